"""Every exception that a user can cause.

A message says what was expected, what was given and what to do next: by options in a command, by arguments in
Python.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Extra of the package -> libraries that it installs; they show whether it is installed.
LIBRARIES = {
    "audit": ("pandas", "pyarrow", "safetensors", "scipy", "sklearn"),
    "models": ("torch", "transformers", "accelerate", "datasets", "lm_eval"),
    "quantized": ("bitsandbytes",),
    "adapters": ("peft",),
    "ray": ("ray", "pydantic"),
}


# Option -> the matching argument of the public functions. Messages name options.
_ARGUMENTS = {
    name: name.replace("-", "_")
    for name in (
        *("author", "base-model", "limit", "max-requests", "tag", "column"),
        *("audit-sample", "bin-size", "bins", "control", "demo", "device", "domain"),
        *("family", "force", "held-out", "layer", "metric", "ngram", "occurrences"),
        *("pack", "reference", "refresh", "registry", "seed", "segment", "segments", "since"),
        *("gpus-per-checkpoint", "timeout", "tokenizer", "where"),
    )
} | {"batch-size": "batch", "feature": "features", "shortlist": "k", "slice": "by", "study": "folder"}
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?![\w-])(?:[ =](\d[\w.]*)|=(\w+))?")
_in_a_command = False


@contextmanager
def in_a_command() -> Iterator[None]:
    """Inside, messages name options (``--bin-size 50``); elsewhere arguments (``bin_size=50``)."""
    global _in_a_command
    before, _in_a_command = _in_a_command, True
    try:
        yield
    finally:
        _in_a_command = before


def is_in_a_command() -> bool:
    """Whether one of our commands is running; it prints an error as a sentence."""
    return _in_a_command


def _as_argument(option: re.Match[str]) -> str:
    name, number, word = option.groups()
    if name not in _ARGUMENTS:
        return option[0]
    return f"{_ARGUMENTS[name]}={number or (repr(word) if word else '')}"


def printable(text: str, keep: str = "") -> str:
    """A text that is safe to print: control characters other than ``keep`` are escaped."""
    return "".join(sign if sign.isprintable() or sign in keep else ascii(sign)[1:-1] for sign in text)


class DispersionError(Exception):
    """Base of all errors. ``exit_code`` is the exit code of a command that it ends."""

    exit_code = 1

    def __str__(self) -> str:
        text = printable(super().__str__(), keep="\n")
        return text if _in_a_command else _OPTION.sub(_as_argument, text)


class UsageError(DispersionError):
    """An argument, a name or a file cannot be used."""

    exit_code = 2


class StoreError(UsageError):
    """A run's folder cannot be read or written as a store."""


class PartialStoreError(StoreError):
    """The run that was writing this store did not finish."""


class StoreVersionError(StoreError):
    """The store was written by another version of the format."""


class MixedStoresError(StoreError):
    """Runs cannot be read or compared together: other model, other documents, one task twice."""


class GeometryError(DispersionError, ValueError):
    """A geometric quantity is not defined for these vectors."""


class TooFewVectorsError(GeometryError):
    """There are fewer vectors than the quantity needs."""


class NoDirectionError(GeometryError):
    """Zero or non-finite vectors, which have no direction; ``rows`` are their indices, ascending."""

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class CaptureError(DispersionError):
    """A model's hidden states cannot be captured: no decoder blocks, or a layer that was never reached."""


class HarnessError(DispersionError):
    """lm-eval cannot run a dispersion task: wrong backend, version or installation."""


class TrainingError(DispersionError):
    """A training run, or a loss in it, cannot go on."""


class NonFiniteLossError(TrainingError):
    """A dispersion loss is NaN or infinite: at ``layer``, such as ``layer.3``, in forward pass ``step``."""

    def __init__(self, layer: str, step: int) -> None:
        super().__init__(
            f"expected a finite dispersion loss, got a non-finite one at {layer}, forward pass {step}; "
            "lower the learning rate or the weight, or look for NaN in the model's own loss"
        )
        self.layer, self.step = layer, step


class NonFiniteStateError(DispersionError):
    """A model's states or log-probabilities are NaN or infinite."""


class MissingExtraError(DispersionError, ImportError):
    """An optional part of the package is not installed; the message names the extra."""


def require_extra(extra: str, what: str) -> None:
    """Raise MissingExtraError if a library of ``extra``, which ``what`` needs, is not installed."""
    missing = [name for name in LIBRARIES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed; "
            f"run: pip install 'lmeval-dispersion[{extra}]'"
        )
