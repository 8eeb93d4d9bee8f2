"""A checkpoint's body in brief: a few numbers of its tensors (of 32, if remote) before the final norm.

Checkpoints with equal rows are copies only if their bodies are equal too: LoRA, merges and a frozen
head change the body alone. A body in brief has a hash of the weights files' digests, which a
listing holds, and for each tensor read a weighted sum of some numbers, which a training step
changes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.figures import storage_error
from lmeval_screener.formats import ADAPTERS, is_gguf
from lmeval_screener.weights.architectures import FINAL_NORMS, HEADS, MLX, WHOLE_IN_MLX, model_types
from lmeval_screener.weights.model_files import model_files, read_json
from lmeval_screener.weights.names import loaded_name
from lmeval_screener.weights.rows import WeightFiles
from lmeval_screener.weights.tensors import DTYPE_BITS, FLOAT_DTYPES, Tensor, decode_rows

_IN_ROWS = {*HEADS, *FINAL_NORMS}
#: Start of the warning of an adapter that leaves the rows alone.
SAME_ROWS = "same rows as its base "
#: Part of names of layers that predict further tokens, which conversions leave out.
_MTP = "mtp."
#: Part of names of experts that mlx_lm stacks: such a body is not compared with that of the original.
_STACKED = "switch_mlp."
#: Ends of names of norms to which mlx_lm adds 1.
_WHOLE_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
MOST = 32  # tensors read of a checkpoint that is not on this machine
_NUMBERS = 64  # numbers read from each tensor
_DIGEST = 8  # bytes of the files' hash
_REACH = 6  # standard deviations of rounding within which two sums are equal
_TENSOR = np.dtype(
    [
        ("name", "<u4"),
        ("dtype", "<u4"),
        ("sum", "<f4"),
        ("error", "<f4"),
    ]
)


class Likeness(NamedTuple):
    """The result of comparing two checkpoints' bodies (their tensors before the final norm).

    Attributes:
        is_same: Whether both bodies have the same number of tensors, and all compared ones are
            equal; True as well if the hashes of the weights files agree, or if neither body has a
            tensor. Otherwise None if no tensor was read from both.
        compared: Number of tensors that were compared; 0 if the hashes of the weights files already
            agree.
        of: Number of tensors in the larger of the two bodies; 0 if the hashes already agree, or if
            ``is_same`` is None.
    """

    is_same: bool | None
    compared: int = 0
    of: int = 0


UNKNOWN = Likeness(None)


def are_body(content: bytes) -> bool:
    """Whether bytes are empty, or have a length that a result of `read_body` can have."""
    if len(content) in (0, _DIGEST):
        return True
    size = len(content) - _DIGEST - 4
    return size >= 0 and size % _TENSOR.itemsize == 0


def likeness(first: bytes, second: bytes) -> Likeness:
    """Compare the bodies of two checkpoints, each given as `read_body` returned it.

    Two tensors count as equal if their weighted sums (see `read_body`) agree exactly, or, with
    different dtypes, up to rounding. Bodies from weights files with the same hash are equal, and so
    are two without tensors. Otherwise the result is `UNKNOWN` if no tensor was read from both.
    """
    digest, whole, a = _parts(first)
    other_digest, other_whole, b = _parts(second)
    if digest == other_digest and digest.strip(b"\0"):
        return Likeness(True)
    _, of_a, of_b = np.intersect1d(a["name"], b["name"], return_indices=True)
    compared = len(of_a)
    are_empty = whole == other_whole == bytes(4)
    if compared == 0 and not are_empty:
        return UNKNOWN
    apart = _apart(a[of_a], b[of_b])
    is_same = whole == other_whole and not apart.any()
    larger = max(int.from_bytes(whole, "little"), int.from_bytes(other_whole, "little"))
    return Likeness(is_same, compared, larger)


def _apart(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether tensors are different: those of one type exactly, others by more than rounding."""
    rounding = _REACH * np.hypot(a["error"], b["error"])
    are_of_one_type = a["dtype"] == b["dtype"]
    reach = np.where(are_of_one_type, 0, rounding)
    distance = np.abs(a["sum"] - b["sum"])
    apart: NDArray[np.bool_] = distance > reach
    return apart


def _parts(body: bytes) -> tuple[bytes, bytes, NDArray[Any]]:
    """The hash of a body's files, its number of tensors (four bytes), and those that were read."""
    numbers = body[_DIGEST:]
    return body[:_DIGEST], numbers[:4], np.frombuffer(numbers[4:], _TENSOR)


def keys(body: bytes) -> list[bytes]:
    """Return the keys by which a body (a checkpoint's tensors before the final norm) is looked up.

    Two bodies that share a key are equal. One key is the hash of the weights files, if it is known.
    The other consists of the number of tensors and of the numbers that were read from them. A body
    has only the first key if no number was read although it has tensors, or if it is a hash alone.

    Args:
        body: The body, as `read_body` returned it.
    """
    digest, whole, tensors = _parts(body)
    known = []
    if digest.strip(b"\0"):
        known.append(digest)
    is_empty = whole == bytes(4)
    if len(tensors) or is_empty:
        known.append(body[_DIGEST:])
    return known


def kind(body: bytes) -> bytes:
    """Return a key that two bodies share if the tensors read from them have equal names and dtypes.

    The key is empty if no tensor was read.

    Args:
        body: The body, as `read_body` returned it.
    """
    _, _, tensors = _parts(body)
    names = tensors["name"].tobytes()
    dtypes = tensors["dtype"].tobytes()
    return names + dtypes


def tensors_in(body: bytes) -> int:
    """Return the number of tensors that were read for a body, given as `read_body` returned it."""
    _, _, tensors = _parts(body)
    return len(tensors)


class Bodies:
    """A collection of bodies (see `read_body`) whose tensors have the same names and dtypes.

    The method `same` finds the first body in the collection that equals a given one, whose dtypes
    may differ.

    Args:
        tensors: Number of tensors that were read for each of these bodies (see `tensors_in`).
    """

    def __init__(self, tensors: int) -> None:
        self._row = np.dtype(
            [
                ("digest", f"V{_DIGEST}"),
                ("whole", "V4"),
                ("tensors", _TENSOR, (tensors,)),
            ]
        )
        self._content = bytearray()
        self._places: list[int] = []

    def add(self, place: int, body: bytes) -> None:
        """Add a body, as `read_body` returned it, under the number ``place``."""
        self._content += body
        self._places.append(place)

    def same(self, body: bytes) -> int | None:
        """Return the ``place`` of the first added body that equals ``body``; None if none does.

        Equal bodies have the same number of tensors, and the tensors that were read from both agree
        as in `likeness`. The result is also None if no tensor was read from both.
        """
        _, whole, own = _parts(body)
        rows = np.frombuffer(self._content, self._row)
        tensors = rows["tensors"]
        names = tensors["name"][0]
        _, of_own, of_rows = np.intersect1d(own["name"], names, return_indices=True)
        if not len(of_own):
            return None
        are_as_many = rows["whole"] == np.frombuffer(whole, "V4")
        alike = np.flatnonzero(are_as_many)
        # Tensor by tensor: most bodies differ in one of the first, and the others are not compared.
        for a, column in zip(own[of_own], of_rows, strict=True):
            apart = _apart(a, tensors[alike, column])
            alike = alike[~apart]
            if not len(alike):
                return None
        place: int = self._places[alike[0]]
        return place


def digest_of(snapshot: Snapshot, paths: Iterable[str]) -> bytes:
    """Return an 8-byte hash of the content of weights files, without reading them.

    It is computed from the SHA-256 that the checkpoint's listing gives for each file. The result is
    eight zero bytes if the listing lacks the SHA-256 of a file, or if there are no files.
    """
    digests: list[str] = []
    for path in paths:
        digest = snapshot.files[path].digest or ""
        if not digest.startswith("sha256:"):
            return bytes(_DIGEST)
        digests.append(digest)
    if not digests:
        return bytes(_DIGEST)
    listed = " ".join(sorted(digests))
    return hashlib.blake2b(listed.encode(), digest_size=_DIGEST).digest()


async def read_body(snapshot: Snapshot, paths: Sequence[str], most: int | None = None) -> bytes:
    """Read a summary of a checkpoint's body, its tensors before the final norm.

    Copies are recognised by this summary. It holds a hash of the weights files and, for each tensor
    that is read, a weighted sum of some of its numbers. Tensors that are packed or not contiguous
    are left out, and so are all but one slice of a tensor that is stored in slices. For GGUF, and
    for experts stacked by mlx_lm, the summary is the hash alone.

    Args:
        snapshot: The checkpoint's files.
        paths: The weights files.
        most: Largest number of tensors to read, the same ones in every checkpoint; None for all.

    Returns:
        The summary in bytes, which `likeness` compares.

    Raises:
        ScreeningError: A weights file is missing or broken.
    """
    files = WeightFiles(snapshot)
    places: dict[int, tuple[str, Tensor]] = {}
    whole: set[int] = set()  # norms that are stored with the 1 added
    is_converted = False
    for path in paths:
        if is_gguf(path):
            return digest_of(snapshot, paths)
        header = await files.header(path)
        if header.writer == MLX and not is_converted:
            config = await read_json(snapshot, "config.json", "BadConfig")
            types = model_types(config)
            is_converted = bool(types) and types[-1] in WHOLE_IN_MLX
        for stored_as, tensor in header.tensors.items():
            name = loaded_name(stored_as)
            in_rows = re.sub("bias$", "weight", name) in _IN_ROWS
            if in_rows or not tensor.elements or _MTP in name:
                continue
            if is_converted and _STACKED in name:
                return digest_of(snapshot, paths)
            code = _code(name)
            places[code] = (path, tensor)
            is_vector = len(tensor.shape) == 1
            if is_converted and is_vector and name.endswith(_WHOLE_NORMS):
                whole.add(code)
    chosen: dict[str, list[tuple[int, Tensor]]] = {}
    for code in sorted(places)[:most]:
        path, tensor = places[code]
        if tensor.dtype not in FLOAT_DTYPES or not tensor.is_contiguous:
            continue
        matrix = await files.matrix(path, tensor)
        of_file = chosen.setdefault(path, [])
        of_file.append((code, matrix.tensor))
    sums = await _sums(snapshot, chosen, whole)
    count = len(places).to_bytes(4, "little")
    return digest_of(snapshot, paths) + count + sums.tobytes()


async def _sums(
    snapshot: Snapshot, chosen: Mapping[str, Sequence[tuple[int, Tensor]]], whole: Set[int]
) -> NDArray[Any]:
    """The weighted sums of tensors by file, each with its code; ``whole`` has 1 added to their numbers."""
    rows: list[tuple[int, int, float, float]] = []
    for path, tensors in chosen.items():
        spans = [_middle(tensor) for _, tensor in tensors]
        stored = await snapshot.ranges(path, spans)
        for (code, tensor), body in zip(tensors, stored, strict=True):
            dtype = tensor.dtype
            count = min(_NUMBERS, tensor.elements)
            numbers = decode_rows(body, dtype, count)
            weights = _weights_of(count)
            rounding = weights * storage_error(numbers, dtype)
            error = math.sqrt(np.square(rounding).sum())
            weighted = numbers[0] * weights
            total = float(weighted.sum())
            if code in whole:
                total -= float(weights.sum())
                dtype += " of 1 + weight"  # rounded elsewhere: never equal bit for bit
            rows.append((code, _code(dtype), total, error))
    return np.array(rows, _TENSOR)


def _middle(tensor: Tensor) -> tuple[int, int]:
    """Byte range in the file of the tensor's numbers that are compared."""
    count = min(_NUMBERS, tensor.elements)
    before = (tensor.elements - count) // 2
    size = DTYPE_BITS[tensor.dtype] // 8
    begin = tensor.begin + before * size
    return begin, begin + count * size


async def weights_in(snapshot: Snapshot) -> list[str]:
    """Return the paths of the weights files of a model or, without a model, of an adapter.

    The files of a model are those that `model_files` chooses.

    Raises:
        ScreeningError: ``BadIndex``: the index of the shards does not fit the files.
    """
    chosen = await model_files(snapshot)
    if chosen.paths:
        return list(chosen.paths)
    return [path for path in ADAPTERS if path in snapshot.files][:1]


def _code(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _weights_of(count: int) -> NDArray[np.float64]:
    """Random weights (count,) in [-1, 1], the same in every version."""
    content = hashlib.shake_128(b"body").digest(_NUMBERS)
    bits = np.frombuffer(content, np.uint8)
    weights: NDArray[np.float64] = bits[:count] / 127.5 - 1
    return weights
