"""The supported formats of weights files: one entry each, which every other module reads.

A new format is a module with ``async def read_header(file: WeightFile) -> Header`` and an entry here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmeval_screener.weights.tensors import Header, WeightFile


@dataclass(frozen=True)
class Format:
    """A file format of weights.

    Attributes:
        suffix: Suffix of the file names.
        module: Module in ``weights.files`` that reads the headers; imported when the first file is
            read.
        single: Name of the file that holds a whole model in transformers' layout. Empty for a
            format in which every file is a model with its own configuration and tokenizer.
        index: Name of the file that lists a model's shards in transformers' layout; empty if the
            format has no such file.
    """

    suffix: str
    module: str
    single: str = ""
    index: str = ""

    async def read_header(self, file: WeightFile) -> Header:
        """Read the header of a file in this format.

        Raises:
            ScreeningError: The file is broken, or uses features that are not supported.
        """
        module = importlib.import_module(f"lmeval_screener.weights.files.{self.module}")
        header: Header = await module.read_header(file)
        return header


SAFETENSORS = Format(
    ".safetensors", "safetensors", "model.safetensors", "model.safetensors.index.json"
)
ARCHIVE = Format(".bin", "torch_archive", "pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF = Format(".gguf", "gguf")
#: All formats; if a checkpoint is stored in several, the first is read.
FORMATS = (SAFETENSORS, ARCHIVE, GGUF)
#: Formats of transformers' layout.
TRANSFORMERS = tuple(kind for kind in FORMATS if kind.single)
SUFFIXES = tuple(kind.suffix for kind in FORMATS)
#: Names of an adapter's weights, as peft saves them.
ADAPTERS = tuple(f"adapter_model{kind.suffix}" for kind in TRANSFORMERS)
#: Name of an Ollama blob: a model's is in GGUF.
BLOB = re.compile("sha256[-:][0-9a-f]{64}")
#: Files of a tokenizer whose rows can be looked up, best first.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
#: Shards of torch's distributed checkpoint.
DISTRIBUTED = ".distcp"
#: Suffixes of unsupported weights: a checkpoint with them is refused with an error, not left out.
UNREAD = (".pt", ".pth", ".ckpt", ".h5", ".msgpack", DISTRIBUTED)
# What training leaves next to a model: states of optimizers, schedulers, random numbers, data loaders.
_TRAINING_STATE = re.compile(
    r"training_args\.bin|scheduler\.(?:bin|pt)|scaler\.pt|(?:dl_state_dict|sampler)(?:_\d+)?\.bin"
    r"|(?:optimizer|optim)[_.].*|rng_state.*|random_states_.*|custom_checkpoint_.*|extra_state_.*|recipe_state.*"
    r"|.*_optim_states\.pt|trainer_state\.pt|dataloader.*\.(?:pt|bin)",
)
# Safetensors that are not a model's in transformers' layout: adapters, and Mistral's own layout.
_NOT_THE_MODEL = re.compile(
    r"adapter_.*|(?:.*_)?adapters\.safetensors|lora\.safetensors|consolidated.*|optimizer.*"
)


def is_gguf(path: str) -> bool:
    """Whether a file has the name of a GGUF file or of an Ollama blob."""
    return path.endswith(GGUF.suffix) or BLOB.fullmatch(path.rpartition("/")[2]) is not None


def format_of(path: str) -> Format:
    """Return the format of a weights file, judged by its name; an Ollama blob counts as GGUF.

    Raises:
        StopIteration: The name belongs to no known format.
    """
    if is_gguf(path):
        return GGUF
    return next(kind for kind in FORMATS if path.endswith(kind.suffix))


def holds_weights(files: Iterable[str]) -> bool:
    """Whether any of the files, by its name, holds weights of a model or an adapter.

    Unsupported formats count, too: such a checkpoint is refused with an error, not left out.
    """
    ends = (*SUFFIXES, *UNREAD)
    return any(path.endswith(ends) and not is_training_state(path) for path in files)


def tokenizer_in(files: Container[str]) -> str | None:
    """Return the file of a tokenizer whose rows can be looked up; None if ``files`` have none."""
    return next((name for name in TOKENIZER_FILES if name in files), None)


def is_training_state(path: str) -> bool:
    """Whether a file's name says that it holds a trainer's state, such as the optimizer's.

    >>> is_training_state("checkpoint-5/optimizer.bin"), is_training_state("pytorch_model.bin")
    (True, False)
    """
    return _TRAINING_STATE.fullmatch(path.rpartition("/")[2]) is not None


def own_weights(files: Iterable[str]) -> list[str]:
    """Return the files that may hold a whole model in transformers' layout; empty without any.

    They are chosen as transformers chooses them: the file with the whole model, or, if there is an
    index, all files that may be its shards; safetensors come before pickles. Which shards the index
    lists is read later (`lmeval_screener.weights.model_files`). Without such a file or index, files
    are returned that transformers does not load: other safetensors files, or else pickled shards
    without an index.
    """
    names = set(files)
    pickled = sorted(
        p for p in names if p.startswith("pytorch_model") and p.endswith(ARCHIVE.suffix)
    )
    shards = {SAFETENSORS: safetensors_files(names), ARCHIVE: pickled}
    for kind in TRANSFORMERS:
        if kind.single in names:
            return [kind.single]
        if kind.index in names:
            return shards[kind]
    return shards[SAFETENSORS] or pickled


def safetensors_files(files: Iterable[str]) -> list[str]:
    """Return the safetensors files that may hold a model's own weights in transformers' layout.

    Files are judged by their names. Adapters, optimizer states, Mistral's consolidated files and
    files in sub-folders are left out; the result is sorted.
    """
    weights: list[str] = []
    for path in sorted(files):
        is_stored = path.endswith(SAFETENSORS.suffix) and "/" not in path
        if is_stored and not _NOT_THE_MODEL.fullmatch(path):
            weights.append(path)
    return weights
