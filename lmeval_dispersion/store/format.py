"""The format of a store: its files, its columns, and the libraries that read and write them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import MissingExtraError

FORMAT = "dispersion-store/1"
MANIFEST, VECTORS, DOCUMENTS = "manifest.json", "vectors.safetensors", "documents.parquet"

# Column -> (parquet type, value where the writer was given none). Other columns are kept as they come.
COLUMNS: dict[str, tuple[str, Any]] = {
    "doc_id": ("int64", None),
    "task": ("string", None),
    "subject": ("string", None),
    "category": ("string", None),
    "doc_hash": ("string", None),
    "prompt_hash": ("string", None),
    "correct": ("double", float("nan")),
    "prediction": ("string", None),
    "target": ("string", None),
    "logprobs": ("list<double>", ()),
    "query_perplexity": ("double", float("nan")),
    "prompt_tokens": ("int64", 0),
    "truncated": ("bool", False),
    "text": ("string", None),
}
TEXT_LENGTH = 500
ROWS = 1024  # rows converted at a time, so that a wide store never exists twice in float64


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def pyarrow() -> Any:
    """The package, or MissingExtraError."""
    try:
        import pyarrow as package
    except ImportError:
        raise _missing("pyarrow") from None
    return package


def safetensors() -> Any:
    """The package with its numpy part, or MissingExtraError."""
    try:
        import safetensors as package
        import safetensors.numpy
    except ImportError:
        raise _missing("safetensors") from None
    return package


def _missing(package: str) -> MissingExtraError:
    return MissingExtraError(
        f"stores need {package}, which is not installed; run: pip install 'lmeval-dispersion[audit]'"
    )
