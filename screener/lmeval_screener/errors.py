"""The error of a checkpoint that cannot be screened, and a stable code for each reason."""

from __future__ import annotations

from lmeval_dispersion.errors import DispersionError, sentence

#: The code of a checkpoint that a registry knows and that does not exist any more.
GONE = "Gone"
_OF_NAMES: dict[str, str] = {
    "BadName": "not a repository's name, a folder, or an address of a supported storage",
    "RepoNotFound": "no such model repository, or it is private and the token does not open it",
    "RevisionNotFound": "the repository has no such branch, tag or commit",
    "FileNotFound": "a file that the checkpoint needs is not in the repository or folder",
    "FolderNotFound": "the folder does not exist, or it holds no checkpoint",
    GONE: "it was deleted, renamed or made private since a registry last saw it",
    "TokenizerMismatch": "the tokenizer differs from that of the checkpoint's family",
    "Interrupted": "the run was stopped before this checkpoint was read",
}
#: Errors of the stored checkpoint: the same commit fails the same way again.
OF_WEIGHTS: dict[str, str] = {
    "NoSafetensors": "the weights are missing, or stored in a format that is not supported",
    "AdapterOnly": "an adapter that has no base, or that changes the head in a way that is not supported",
    "SeveralFiles": "there are several GGUF models, and the name does not choose between them",
    "BadArchive": "a torch.save file is broken, or is not what its name says",
    "LegacyPickle": "the weights are a bare pickle, as torch wrote it before 1.6",
    "UnsafePickle": "the pickle contains more than tensors; none of it was executed",
    "ScatteredRows": "the rows are scattered: most of the matrix would have to be read",
    "QuantizedTensor": "the output projection is packed, or stored with separate scales",
    "SlicedTensor": "the output projection is stored in slices (torch's distributed checkpoint)",
    "RandomWeights": "a loader would draw weights at random: a wrapper's names, a missing layer, placeholders",
    "NoOutputProjection": "the output projection is missing, or config.json contradicts the weights",
    "BadConfig": "config.json is not a JSON object",
    "BadIndex": "the index of the shards is broken, or does not fit the shards",
    "BadHeader": "a header of weights is broken, or does not fit its file",
    "BadRows": "needed rows are zero, not finite, all parallel, or outside the matrix",
    "BadTokenizer": "the tokenizer file is broken, or its pieces do not spell their leading space",
    "TokenizerNotFound": "no tokenizer.json is stored with the checkpoint",
    "TooFewTokens": "too few words of a token set are single tokens",
}
#: Errors that say nothing about the weights: the checkpoint's last results still hold.
NOT_OF_WEIGHTS: dict[str, str] = {
    "BaseNotFound": "an adapter's base does not exist, or the token does not open it",
    "RowsOfBase": "nothing to rank: the adapter leaves the head to its base, which cannot be read",
    "GatedRepo": "the repository exists, but its files need accepted conditions and a token",
    "MissingExtra": "reading this format needs an optional package",
    "BadToken": "the Hub does not accept the token: it is expired, revoked or mistyped",
    "AccessDenied": "the server refuses access with this token, or the signed address, repeatedly",
    "BadResponse": "the server's answers contradict the request, the listing or each other",
    "RangeNotSupported": "the server ignores Range and would send a whole large file",
    "RateLimited": "the server asks to wait for a quarter of an hour or longer, or refuses repeatedly",
    "ServerError": "the server keeps failing (5xx, or an unexpected status)",
    "Unreachable": "no connection, or it keeps breaking",
    "Timeout": "the checkpoint's time budget ran out",
    "Offline": "offline mode is on and something needed is not in the cache",
    "InternalError": "a defect of this program; please report it",
}
#: Every code of a `ScreeningError` and what it means. Codes are a contract: programs test them.
SCREENING_CODES = {**_OF_NAMES, **OF_WEIGHTS, **NOT_OF_WEIGHTS}


class ScreeningError(DispersionError):
    """One checkpoint cannot be screened.

    Attributes:
        code: A stable word for programs, such as ``GatedRepo``: a key of `SCREENING_CODES`, else ValueError.
        base: Name of the base that cannot be read; empty unless that is the reason.
        cause: Why it cannot, with the step that mends it; likewise.
    """

    base = ""
    cause = ""

    def __init__(self, code: str, message: str) -> None:
        if code not in SCREENING_CODES:
            raise ValueError(f"{code!r} is not in SCREENING_CODES")
        super().__init__(sentence(message))
        self.code = code


def cannot(code: str, reason: str, step: str) -> ScreeningError:
    """The error for a checkpoint that cannot be read: the reason and the next step."""
    return ScreeningError(code, f"cannot be screened because {reason}; {step}")


class UnreadBaseError(ScreeningError):
    """An adapter leaves the head to its ``base``, which cannot be read because of its ``cause``."""

    def __init__(self, rows: str, base: str, cause: str) -> None:
        super().__init__("RowsOfBase", f"{rows} ({base}), which could not be read: {cause}")
        self.base = base
        self.cause = sentence(cause)
