"""How far storing an output projection in fewer bits moves G: every type on the same rows.

    python benchmarks/quantised_heads.py FOLDER… [--ggml libggml-base.so]

The rows of T and R are read from a checkpoint's own weights, stored in each type and read back, and G is
compared with that of the rows as they were; the error is the paired one over the choice of tokens. Types
whose blocks have 256 numbers are measured on as many columns as fill such blocks, beside two others on the
same columns. Types that the ``gguf`` package does not write need ggml's library (``--ggml``; npm's
``@node-llama-cpp/linux-x64`` holds one).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from lmeval_screener.checkpoints.folder import open_folder
from lmeval_screener.figures import difference, gap
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.projection import find_projection, read_rows
from lmeval_screener.weights.tensors import decode_rows

BY_PACKAGE = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
BY_GGML = ("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")
Rows = np.ndarray


def rows_of(folder: Path) -> tuple[Rows, int]:
    """Rows of T, then of R, in float32, and how many T has."""

    async def work() -> tuple[Rows, int]:
        snapshot = open_folder(folder)
        file = "tokenizer.json"
        vocabulary = Vocabulary.from_file(file, await snapshot.small_file(file))
        resolution = resolve_tokens(
            load_token_set("math"), load_token_set("reference", "reference"), vocabulary
        )
        ids = [*resolution.domain_ids, *resolution.reference_ids]
        return await read_rows(await find_projection(snapshot), ids), len(resolution.domain_ids)

    return asyncio.run(work())


def by_package(kind: str) -> Callable[[Rows], Rows]:
    """Store and read back by the ``gguf`` package."""
    code = GGMLQuantizationType[kind]
    return lambda rows: dequantize(quantize(rows, code), code)


def by_ggml(library: ctypes.CDLL, kind: str) -> Callable[[Rows], Rows]:
    """Store by ggml itself, without an importance matrix; read back by the ``gguf`` package."""
    code = GGMLQuantizationType[kind]
    weights, size = GGML_QUANT_SIZES[code]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]

    def stored(rows: Rows) -> Rows:
        packed = np.ascontiguousarray(rows, np.float32)
        blocks = np.zeros((len(packed), packed.shape[1] // weights * size), np.uint8)
        written = library.ggml_quantize_chunk(
            int(code), packed.ctypes.data, blocks.ctypes.data, 0, len(packed), packed.shape[1], None
        )
        if written != blocks.nbytes:
            raise RuntimeError(f"ggml wrote {written} bytes of {kind}, expected {blocks.nbytes}")
        return dequantize(blocks, code)

    return stored


def float8(block: tuple[int, int] | None) -> Callable[[Rows], Rows]:
    """E4M3 with a scale a row (None) or a block; nearest code, as compressed-tensors rounds."""
    codes = decode_rows(bytes(range(256)), "F8_E4M3", 1)[:, 0]
    values = np.unique(codes[np.isfinite(codes)])

    def stored(rows: Rows) -> Rows:
        high, wide = block or (1, rows.shape[1])
        result = np.empty_like(rows)
        for i in range(0, len(rows), high):
            for j in range(0, rows.shape[1], wide):
                part = rows[i : i + high, j : j + wide]
                scale = np.abs(part).max() / 448
                at = np.clip(np.searchsorted(values, part / scale), 1, len(values) - 1)
                below, above = values[at - 1], values[at]
                near = np.where(part / scale - below <= above - part / scale, below, above)
                result[i : i + high, j : j + wide] = near * scale
        return result

    return stored


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--ggml", metavar="LIBRARY", help="ggml's shared library, for the K types")
    options = parser.parse_args()
    library = ctypes.CDLL(options.ggml) if options.ggml else None
    for folder in options.folders:
        rows, split = rows_of(folder)
        narrow = rows[:, : rows.shape[1] // 256 * 256]
        print(f"\n{folder.name}: {split} + {len(rows) - split} rows of {rows.shape[1]} numbers")
        whole: list[tuple[str, Callable[[Rows], Rows]]] = [(k, by_package(k)) for k in BY_PACKAGE]
        whole += [("F8_E4M3, a scale a row", float8(None)), ("F8_E4M3, 1 × 128", float8((1, 128)))]
        blocks = [(k, by_ggml(library, k)) for k in BY_GGML] if library else []
        blocks += [(k, by_package(k)) for k in ("Q8_0", "Q4_0")]
        if library:
            whole += [(f"{k} by ggml", by_ggml(library, k)) for k in ("Q8_0", "Q4_0")]
        for matrix, kinds in ((rows, whole), (narrow, blocks)):
            plain = gap(matrix[:split], matrix[split:])
            print(f"  {matrix.shape[1]} columns: G = {plain.mean:.4f} ± {plain.se:.4f}")
            for kind, stored in kinds:
                after = stored(matrix)
                shift = difference(gap(after[:split], after[split:]), plain)
                print(f"    {kind:24} {shift[0]:+.5f} ({shift[1]:.5f})")


if __name__ == "__main__":
    main()
