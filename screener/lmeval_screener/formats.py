"""The supported formats of weights files: one entry each, which every other module reads.

A new format is a module with ``async def read_header(file: WeightFile) -> Header`` and an entry here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmeval_screener.weights.tensors import Header, WeightFile


@dataclass(frozen=True)
class Format:
    """A format of weights files.

    Attributes:
        suffix: End of its files' names.
        module: Name in ``weights`` of the module that reads its headers, imported for the first file.
        single: Name of the file that holds a whole model in transformers' layout; empty for a format whose
            every file is a model with its own configuration and tokenizer.
        index: Name of the index of its shards in that layout; empty for none.
    """

    suffix: str
    module: str
    single: str = ""
    index: str = ""

    async def read_header(self, file: WeightFile) -> Header:
        """Read a file's header with the format's module; ScreeningError for a broken or refused file."""
        module = importlib.import_module(f"lmeval_screener.weights.{self.module}")
        header: Header = await module.read_header(file)
        return header


SAFETENSORS = Format(".safetensors", "safetensors", "model.safetensors", "model.safetensors.index.json")
ARCHIVE = Format(".bin", "torch_archive", "pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF = Format(".gguf", "gguf")
#: All formats; if a checkpoint is stored in several, the first is read.
FORMATS = (SAFETENSORS, ARCHIVE, GGUF)
#: Formats of transformers' layout.
TRANSFORMERS = tuple(kind for kind in FORMATS if kind.single)
SUFFIXES = tuple(kind.suffix for kind in FORMATS)
#: Names of an adapter's weights, as peft saves them.
ADAPTERS = tuple(f"adapter_model{kind.suffix}" for kind in TRANSFORMERS)
#: Shards of torch's distributed checkpoint.
DISTRIBUTED = ".distcp"
#: Suffixes of unsupported weights: a checkpoint with them is refused with an error, not left out.
UNREAD = (".pt", ".pth", ".ckpt", ".h5", ".msgpack", DISTRIBUTED)
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")


def format_of(path: str) -> Format:
    """The format with the suffix of ``path``, a weights file; StopIteration for other suffixes."""
    return next(kind for kind in FORMATS if path.endswith(kind.suffix))


def holds_weights(files: Iterable[str]) -> bool:
    """Whether any file may hold a model's or an adapter's weights, also in an unsupported format."""
    ends = (*SUFFIXES, *UNREAD)
    return any(path.endswith(ends) and path.rpartition("/")[2] not in _NO_WEIGHTS for path in files)


def own_weights(files: Iterable[str]) -> list[str]:
    """A model's own weights files in transformers' layout, sorted; empty without any.

    They are its safetensors, else its ``pytorch_model*.bin``; a file that holds the whole model comes alone.
    """
    names = sorted(files)
    pickled = [p for p in names if p.startswith("pytorch_model") and p.endswith(ARCHIVE.suffix)]
    weights = safetensors_files(names) or pickled
    return [p for p in weights if p in (SAFETENSORS.single, ARCHIVE.single)] or weights


def safetensors_files(files: Iterable[str]) -> list[str]:
    """The safetensors files with a model's own weights, whatever their names."""
    return sorted(p for p in files if p.endswith(SAFETENSORS.suffix) and not re.search("^adapter_|/", p))
