"""The error of a checkpoint that cannot be screened, and a stable code for each reason."""

from __future__ import annotations

from lmeval_dispersion.errors import DispersionError, sentence

#: The code of a checkpoint that a registry knows and that does not exist any more.
GONE = "Gone"
_OF_NAMES: dict[str, str] = {
    "BadName": "the name is neither a repository, nor a folder, nor an address of a supported "
    "storage",
    "RepoNotFound": "there is no such model repository, or it is private and the token gives no "
    "access to it",
    "RevisionNotFound": "the repository has no such branch, tag or commit",
    "FileNotFound": "a file that is needed is missing from the repository or folder",
    "FolderNotFound": "the folder does not exist, or it holds no checkpoint",
    GONE: "the checkpoint was deleted, renamed or made private since the registry last saw it",
    "TokenizerMismatch": "the tokenizer differs from that of the family, or does not match the "
    "weights",
    "Interrupted": "the run was stopped before this checkpoint was read",
}
#: Errors of the stored checkpoint: the same commit fails the same way again.
OF_WEIGHTS: dict[str, str] = {
    "NoSafetensors": "the weights are missing, or stored in a format that is not supported",
    "AdapterOnly": "the adapter names no usable base model, or changes the output projection in a "
    "way that is not supported",
    "SeveralFiles": "the repository or folder has several GGUF models, and the name does not say "
    "which to read",
    "BadArchive": "a torch.save file is damaged, or is of another format than its name says",
    "LegacyPickle": "the weights are a bare pickle, the format of torch.save before torch 1.6, "
    "which is not read",
    "UnsafePickle": "the pickle contains more than tensors; none of it was executed",
    "ScatteredRows": "the needed rows are stored in scattered pieces: most of the matrix would "
    "have to be read",
    "QuantizedTensor": "the output projection is quantised: its numbers are packed, or have "
    "separate scales",
    "SlicedTensor": "the output projection is split into slices, as in torch's distributed "
    "checkpoints",
    "RandomWeights": "transformers would initialise weights at random, as tensors are missing, "
    "renamed or placeholders",
    "NoOutputProjection": "the weights have no output projection, or config.json contradicts them",
    "BadConfig": "config.json is not a JSON object",
    "BadIndex": "the index of the weights files is broken, or does not match these files",
    "BadHeader": "the header of a weights file is broken, or does not match the file",
    "BadRows": "needed rows of the output projection are zero, not finite, all parallel, or "
    "outside the matrix",
    "BadTokenizer": "the tokenizer file is broken, or its pieces do not show which words begin "
    "with a space",
    "TokenizerNotFound": "no tokenizer.json or vocab.json is stored with the checkpoint",
    "TooFewTokens": "too few usable tokens: the words of the set are split into several tokens "
    "each, or the task's answers are sentences or too varied",
}
#: Errors that say nothing about the weights: the checkpoint's last results still hold.
NOT_OF_WEIGHTS: dict[str, str] = {
    "BaseNotFound": "the adapter's base model does not exist, or the token gives no access to it",
    "RowsOfBase": "nothing to rank: the adapter keeps the output projection of its base, which "
    "cannot be read",
    "GatedRepo": "the repository is gated: its files are open only to the token of an account that "
    "has accepted its conditions on the Hub",
    "MissingExtra": "reading this format needs an optional package that is not installed",
    "BadToken": "the Hub rejects the token: it has expired, was revoked or is mistyped",
    "AccessDenied": "the server refuses access to the repository, a file, or a signed address",
    "BadResponse": "the server's answers contradict the request, the listing or each other",
    "RangeNotSupported": "the server ignores requests for a part of a file (Range), and would "
    "send a large file whole",
    "RateLimited": "the server's rate limit is reached: it asks to wait for 15 minutes or longer, "
    "or refuses repeatedly",
    "ServerError": "the server keeps failing with a 5xx or another unexpected status",
    "Unreachable": "the server cannot be reached, or the connection keeps breaking",
    "Timeout": "reading the checkpoint took longer than the time limit (DISPERSION_TIMEOUT)",
    "Offline": "offline mode is on, and a file that is needed is not in the cache",
    "InternalError": "a defect of this program; please report it",
}
#: Every code of a `ScreeningError` and what it means. Codes are a contract: programs test them.
SCREENING_CODES = {**_OF_NAMES, **OF_WEIGHTS, **NOT_OF_WEIGHTS}


class ScreeningError(DispersionError):
    """A checkpoint that cannot be screened; the message says why.

    Attributes:
        code: A key of `SCREENING_CODES`, such as ``GatedRepo``, which programs may test.
        base: Name of an adapter's base model if this model cannot be read (``RowsOfBase``); empty
            for other errors.
        cause: Why the base cannot be read, and what to do about it; empty for other errors.

    Raises:
        ValueError: ``code`` is not in `SCREENING_CODES`.
    """

    base = ""
    cause = ""

    def __init__(self, code: str, message: str) -> None:
        if code not in SCREENING_CODES:
            raise ValueError(f"{code!r} is not in SCREENING_CODES")
        super().__init__(sentence(message))
        self.code = code


def cannot(code: str, reason: str, step: str) -> ScreeningError:
    """Return the error ``cannot be screened because REASON; STEP``.

    Args:
        code: A key of `SCREENING_CODES`.
        reason: Why the checkpoint cannot be read, as a clause.
        step: What to do about it, as an imperative.
    """
    return ScreeningError(code, f"cannot be screened because {reason}; {step}")


class BaseError(ScreeningError):
    """The base of an adapter cannot be read, although the adapter itself can."""


class UnreadBaseError(ScreeningError):
    """An adapter keeps the output projection of its base model, which cannot be read.

    The code is ``RowsOfBase``.

    Args:
        rows: Clause that says why the adapter's output rows are those of the base.
        base: Name of the base model.
        cause: Why the base cannot be read, and what to do about it.
    """

    def __init__(self, rows: str, base: str, cause: str) -> None:
        super().__init__("RowsOfBase", f"{rows} ({base}), which could not be read: {cause}")
        self.base = base
        self.cause = sentence(cause)
