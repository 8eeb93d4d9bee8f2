"""Slices of torch's distributed checkpoint: which file holds which part of a matrix.

``HuggingFaceStorageWriter(save_distributed=True)`` lets every process write files of its own
(``shard-00001-model-00001-of-00002.safetensors``), in which a tensor's usual name stands for a slice of it.
Where the slice begins is in the file's metadata: ``DCP_SHARDING_INFO``, a JSON object of
``{name: {"saved_offsets": [row, column]}}``. How large the whole is stands nowhere, so that config.json
has to say it.

Source: torch 2.13, ``torch/distributed/checkpoint/_hf_utils.py`` and ``hf_storage.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.rows import Matrix, PiecedRows
from lmeval_screener.weights.tensors import Header

_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")


def slice_files(files: Iterable[str]) -> list[str]:
    """The files of a distributed checkpoint, if all of a checkpoint's weights are such files; else none."""
    weights = [
        path
        for path in files
        if path.endswith(".safetensors") and "/" not in path and not path.startswith("adapter_")
    ]
    return sorted(weights) if all(_FILE.fullmatch(path) for path in weights) else []


def joined(
    snapshot: Snapshot, name: str, headers: Mapping[str, Header], sizes: tuple[int, int] | None
) -> PiecedRows:
    """A matrix of the slices that make it up."""
    pieces = []
    for file, header in headers.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            continue
        offsets = header.slices.get(name)
        if offsets is None or len(offsets) != 2 or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise sliced(name, f"{file} does not say which rows and columns it holds")
        pieces.append((Matrix.of(snapshot, file, tensor), offsets[0], offsets[1]))
    spans = sorted((row, row + m.shape[0], column, column + m.shape[1]) for m, row, column in pieces)
    v, d = max(span[1] for span in spans), max(span[3] for span in spans)
    held = sum((span[1] - span[0]) * (span[3] - span[2]) for span in spans)
    if held != v * d or _overlap(spans) or len({matrix.dtype for matrix, _, _ in pieces}) != 1:
        raise sliced(
            name, f"those that are there do not make up {v} × {d} numbers; is a process's file missing?"
        )
    if sizes is None:
        raise sliced(name, "config.json has no vocab_size and hidden_size that say how large the whole is")
    if v < sizes[0] or d != sizes[1]:
        raise sliced(
            name,
            f"those that are there make up {v} × {d} of {sizes[0]} × {sizes[1]}; is a file missing?",
        )
    return PiecedRows((v, d), tuple(sorted(pieces, key=lambda piece: piece[1:])))


def sliced(name: str, why: str) -> ScreeningError:
    """The error of slices that cannot be put together."""
    return ScreeningError(
        "SlicedTensor",
        f"cannot be screened because {name} is stored in slices of torch's distributed checkpoint, and "
        f"{why}; put them together first (HuggingFaceStorageWriter(..., enable_consolidation=True) when "
        "saving, or torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files)",
    )


def _overlap(spans: list[tuple[int, int, int, int]]) -> bool:
    """Two slices share a number."""
    open_spans: list[tuple[int, int, int, int]] = []
    for span in spans:
        open_spans = [other for other in open_spans if other[1] > span[0]]
        if any(other[2] < span[3] and span[2] < other[3] for other in open_spans):
            return True
        open_spans.append(span)
    return False
