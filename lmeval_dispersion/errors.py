"""Every exception that this project raises for what a user can cause.

The tree::

    DispersionError            exit 1
    ├── UsageError             exit 2: an argument, a name or a file that cannot be used as given
    │   └── StoreError         the folder of a run cannot be read or written
    │       ├── PartialStoreError  its run did not finish
    │       ├── StoreVersionError  written by another version of the format
    │       └── MixedStoresError   runs that must not be read or compared as one
    ├── GeometryError          also a ValueError: a quantity is not defined for these vectors
    │   ├── TooFewVectorsError
    │   └── NoDirectionError   zero or non-finite vectors
    ├── CaptureError           a model's states cannot be seen
    ├── HarnessError           lm-eval cannot run a dispersion task as asked
    ├── TrainingError          a training run cannot go on
    │   └── NonFiniteLossError     a dispersion loss is NaN or infinite; has the layer and the step
    ├── NonFiniteStateError    a model's states hold NaN or infinity
    ├── MissingExtraError      also an ImportError: an optional part is not installed
    └── ScreeningError         one checkpoint cannot be screened; `code` is a stable word

A message says what was expected, what was given, and what to do next.
"""

from __future__ import annotations


class DispersionError(Exception):
    """Root of the tree. ``exit_code`` is what a command returns when this ends it."""

    exit_code = 1


class UsageError(DispersionError):
    """An argument, a name or a file that cannot be used as it was given."""

    exit_code = 2


class StoreError(UsageError):
    """The folder of a run cannot be read or written as a store."""


class PartialStoreError(StoreError):
    """The run that was writing this store did not finish."""


class StoreVersionError(StoreError):
    """The store was written by another version of the format."""


class MixedStoresError(StoreError):
    """Runs that must not be read or compared as one: other model, other documents, one task twice."""


class GeometryError(DispersionError, ValueError):
    """A geometric quantity is not defined for these vectors."""


class TooFewVectorsError(GeometryError):
    """There are fewer vectors than the quantity needs."""


class NoDirectionError(GeometryError):
    """Zero or non-finite vectors, which have no direction.

    Attributes:
        rows: Indices of the offending rows, ascending.
    """

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


class CaptureError(DispersionError):
    """A model's hidden states cannot be seen: no decoder blocks, or a place that was never passed."""


class HarnessError(DispersionError):
    """lm-eval cannot run a dispersion task as asked: its backend, its version or its installation."""


class TrainingError(DispersionError):
    """A training run, or a loss in it, cannot go on."""


class NonFiniteLossError(TrainingError):
    """A dispersion loss is NaN or infinite.

    Attributes:
        layer: Name of the layer whose states gave it, such as ``layer.3``.
        step: Number of the forward pass, from 0.
    """

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


#: Every code of a `ScreeningError` and what it means. Codes are a contract: programs test them.
SCREENING_CODES: dict[str, str] = {
    # the repository
    "RepoNotFound": "no such model repository, or it is private and the token does not open it",
    "GatedRepo": "the repository exists, but its files need accepted conditions and a token",
    "RevisionNotFound": "the repository has no such branch, tag or commit",
    "FileNotFound": "a file that the checkpoint needs is not in the repository or folder",
    "FolderNotFound": "the local folder does not exist or is not a checkpoint's folder",
    # what is stored
    "NoSafetensors": "the weights are stored only as GGUF, .bin, .pth or not at all",
    "AdapterOnly": "the repository holds an adapter, not a model's own matrices",
    "QuantizedTensor": "the output projection is stored packed, or with scales beside it",
    "NoOutputProjection": "no output projection was found, or config.json contradicts what is stored",
    "BadConfig": "config.json is not a JSON object",
    "BadIndex": "the index of the shards is broken, or does not fit the shards",
    "BadHeader": "a safetensors header is broken, or does not fit its file",
    "BadRows": "needed rows are zero, not finite, or outside the matrix",
    "BadTokenizer": "the tokenizer file is broken, or its pieces do not spell their leading space",
    "TokenizerMismatch": "the tokenizer differs from the one of the checkpoint's family",
    "TokenizerNotFound": "no tokenizer.json is stored with the checkpoint",
    "TooFewTokens": "too few of the words of a token set are single tokens",
    # the way there
    "AccessDenied": "the server refuses the token, or the signed address, again and again",
    "BadResponse": "the server's answers contradict the request, the listing or each other",
    "RangeNotSupported": "the server ignores Range and would send a whole large file",
    "RateLimited": "the server asks to wait for longer than the time budget allows",
    "ServerError": "the server keeps failing (5xx, or an unexpected status)",
    "Unreachable": "no connection, or it breaks again and again",
    "Timeout": "the checkpoint's time budget ran out",
    "Offline": "offline mode is on and something needed is not in the cache",
    "Interrupted": "the run was stopped before this checkpoint was read",
    "InternalError": "a defect of this program; please report it",
}


class ScreeningError(DispersionError):
    """One checkpoint cannot be screened.

    Attributes:
        code: A stable word for programs, such as ``GatedRepo``: a key of `SCREENING_CODES`.
    """

    def __init__(self, code: str, message: str) -> None:
        if code not in SCREENING_CODES:
            raise ValueError(f"{code!r} is not in SCREENING_CODES")
        super().__init__(message)
        self.code = code
