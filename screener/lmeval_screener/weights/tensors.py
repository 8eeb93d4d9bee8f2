"""Stored tensors: element types, how many bytes they take, and those bytes as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.errors import ScreeningError

#: Bits per element of every dtype that the format knows; sub-byte ones count in bits.
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
#: Dtypes whose numbers are the weights themselves. Everything else is packed or scaled.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
#: Those that may have scales beside them.
SCALED_DTYPES = ("F8_E4M3", "F8_E5M2")
#: GGUF's type code -> name, weights a block, bytes a block.
GGUF_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
#: Name -> code, weights a block, bytes a block.
GGUF_BLOCKS = {name: (code, weights, size) for code, (name, weights, size) in GGUF_TYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of one file: its dtype, shape, and absolute byte range ``[begin, end)`` in the file.

    Attributes:
        strides: Elements between neighbours, dimension by dimension; None: they lie end to end.
        entry: Of a tensor in an archive, whose exact place is not known yet: offset of its entry and the
            entry's name; see ``torch_archive.locate``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None
    entry: tuple[int, str] | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file of weights.

    Attributes:
        tensors: Every tensor by name, as stored.
        slices: Offsets of those that torch's distributed checkpoint stored as a slice under the usual name
            (``DCP_SHARDING_INFO``); None where the entry is no list of offsets.
        architecture: GGUF's ``general.architecture``; None in other formats.
        tokenizer: Digest of the vocabulary in a GGUF header; None where it has none.
        vocabulary: That vocabulary as JSON, where the header was just read; None where it is cached.
    """

    tensors: Mapping[str, Tensor]
    slices: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    architecture: str | None = None
    tokenizer: str | None = None
    vocabulary: bytes | None = None

    @property
    def parameters(self) -> int:
        """Elements of all tensors together; those that share their bytes count once."""
        return sum({(t.begin, t.end): t.elements for t in self.tensors.values() if t.elements}.values())


def row_bytes(dtype: str, width: int) -> int:
    """Bytes of a row of ``width`` weights that lie end to end."""
    if dtype in DTYPE_BITS:
        return width * DTYPE_BITS[dtype] // 8
    _, weights, size = GGUF_BLOCKS[dtype]
    return width // weights * size


def decode_rows(body: bytes, dtype: str, width: int) -> NDArray[np.float32]:
    """Rows of a matrix as float32: exact but for F64, which is rounded (beyond float32's range to infinity).

    Returns:
        Array of shape (rows, width).
    """
    if dtype not in DTYPE_BITS:
        return _decode_blocks(body, dtype, width)
    flat: NDArray[np.float32]
    if dtype == "F64":
        with np.errstate(over="ignore"):
            flat = np.frombuffer(body, "<f8").astype(np.float32)
    elif dtype == "F32":
        flat = np.frombuffer(body, "<f4").astype(np.float32)
    elif dtype == "F16":
        flat = np.frombuffer(body, "<f2").astype(np.float32)
    elif dtype == "BF16":
        flat = (np.frombuffer(body, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        flat = _FLOAT8[dtype][np.frombuffer(body, np.uint8)]
    return flat.reshape(-1, width)


def _float8_table(exponent_bits: int) -> NDArray[np.float32]:
    """All 256 values of an 8-bit float (OCP 8-bit formats E4M3, without infinities, and E5M2)."""
    mantissa_bits = 7 - exponent_bits
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    scale = np.exp2((np.maximum(exponent, 1) - bias).astype(float))
    value = sign * np.where(exponent == 0, mantissa, 1 + mantissa) * scale
    if exponent_bits == 5:
        value[(exponent == 31) & (mantissa == 0)] = np.inf
        value *= np.where(np.isinf(value), sign, 1.0)
        value[(exponent == 31) & (mantissa != 0)] = np.nan
    else:
        value[(code & 0x7F) == 0x7F] = np.nan
    table: NDArray[np.float32] = value.astype(np.float32)
    return table


def _powers_of_two() -> NDArray[np.float32]:
    """All 256 values of F8_E8M0, an exponent without a sign (OCP microscaling formats); the last is NaN."""
    table = np.exp2(np.arange(256) - 127.0)
    table[255] = np.nan
    powers: NDArray[np.float32] = table.astype(np.float32)
    return powers


with np.errstate(over="ignore"):
    _FLOAT8 = {"F8_E4M3": _float8_table(4), "F8_E5M2": _float8_table(5), "F8_E8M0": _powers_of_two()}


def _decode_blocks(body: bytes, dtype: str, width: int) -> NDArray[np.float32]:
    """Rows (n, width) of quantised blocks."""
    code, weights, size = GGUF_BLOCKS[dtype]
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ScreeningError(
            "MissingExtra",
            f"rows stored as {dtype} need the gguf package; run: pip install 'lmeval-dispersion[gguf]'",
        ) from error
    blocks = np.frombuffer(body, np.uint8).reshape(-1, width // weights * size)
    try:
        rows = dequantize(blocks, GGMLQuantizationType(code))
    except (NotImplementedError, ValueError) as error:
        raise ScreeningError(
            "QuantizedTensor",
            f"cannot be screened because its output projection is stored as {dtype}, which the gguf package "
            "does not dequantise; screen another quantisation",
        ) from error
    return np.asarray(rows, dtype=np.float32).reshape(-1, width)
