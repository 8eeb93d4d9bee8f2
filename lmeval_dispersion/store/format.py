"""The store's format and its writer, which leaves a folder complete or refused as partial."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import StoreError, UsageError, require_extra
from lmeval_dispersion.files import sha256
from lmeval_dispersion.geometry import unit_rows, valid_rows
from lmeval_dispersion.installation import __version__

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "dispersion-store/1"
MANIFEST = "manifest.json"
VECTORS = "vectors.safetensors"
DOCUMENTS = "documents.parquet"
PARTS = ".parts"  # work of a store that is not finished, from which a killed command resumes

# Column -> (parquet type, default value). Other columns are kept unchanged.
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
#: Columns of stores that are not in all of them, and numbers that slice a run.
_TAKEN = {*COLUMNS, "probability", "segment", "document", "length", "confidence"}
_MOST_FIELDS = 30  # of a document
_LONGEST_FIELD = 60  # characters of a text that may be a slice's name
#: A score above this counts as a correct answer.
CORRECT_ABOVE = 0.5
ROWS = 1024  # rows converted at a time, to avoid a second copy in float64


def scalar_fields(document: object) -> dict[str, Any]:
    """Return the fields of a document by which a run can be sliced: name -> value.

    These are its first 30 numbers, booleans and texts of up to 60 characters. Fields that are named
    like a column of a store are left out. A document that is not a mapping has no fields.

    >>> scalar_fields({"kind": "big", "level": 3, "question": "What is 1 + 1?" * 9, "choices": [1, 2]})
    {'kind': 'big', 'level': 3}
    """
    kept: dict[str, Any] = {}
    if not isinstance(document, Mapping):
        return kept
    for name, value in document.items():
        if not isinstance(name, str) or name in _TAKEN or not name.isprintable():
            continue
        is_short = isinstance(value, str) and len(value) <= _LONGEST_FIELD
        if len(kept) < _MOST_FIELDS and (is_short or isinstance(value, bool | int | float)):
            kept[name] = value
    return kept


def begin_store(folder: Path) -> None:
    """Mark a folder as an unfinished store, which readers refuse.

    Raises:
        UsageError: The folder holds a finished store, or cannot be written.
    """
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"{folder} already holds a finished store; read it with `dispersion audit`, remove it, or choose "
            "another folder for this run (dispersion_store, or `-o`)"
        )
    make_folder(folder)
    (folder / DOCUMENTS).touch()


def make_folder(folder: Path, kind: str = "store") -> None:
    """Create the folder of a store.

    Args:
        folder: The folder.
        kind: What the message of an error calls the folder.

    Raises:
        UsageError: The folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        reason = "" if os.access(folder, os.W_OK) else "Permission denied"
    if reason:
        raise UsageError(f"the {kind} {folder} cannot be written: {reason}; choose another folder")


def write_store(
    path: str | Path,
    *,
    documents: pd.DataFrame,
    vectors: Mapping[str, ArrayLike],
    manifest: Mapping[str, Any],
) -> Path:
    """Write a run as a store to the folder ``path``, and return the folder.

    A store that is there already is replaced. Until the new one is complete, readers see either the
    old store or a partial one, which they refuse.

    Args:
        path: The folder.
        documents: One row per document. The columns ``doc_id`` and ``task`` are needed, those of
            :data:`COLUMNS` have fixed types, and any further columns are kept.
        vectors: Layer -> one vector per document, not necessarily of length one. Shape (n, d).
        manifest: Further entries of ``manifest.json``, such as ``model`` and ``default_layer`` (by
            default the first layer).

    Raises:
        StoreError: ``doc_id`` or ``task`` is missing, there is no layer, the vectors of a layer do
            not fit the documents, or the default layer is not one of the layers.
        UsageError: The folder cannot be written.
        MissingExtraError: The extra ``audit`` is not installed.
    """
    require_extra("audit", "a store")
    import pyarrow.parquet as parquet

    table = _document_table(documents)
    layers = {name: np.asarray(rows) for name, rows in vectors.items()}
    if not layers:
        raise StoreError(
            'expected the vectors of at least one layer, got none; pass them as {"last": rows}'
        )
    for name, rows in layers.items():
        if rows.ndim != 2 or rows.shape[0] != len(documents) or rows.shape[1] == 0:
            raise StoreError(
                f"expected {len(documents)} vectors of layer {name!r}, one for each document, got an array "
                f"of shape {rows.shape}"
            )
    default = manifest.get("default_layer", next(iter(layers)))
    if default not in layers:
        raise StoreError(
            f"expected the default layer to be one of {', '.join(layers)}, got {default!r}"
        )
    folder = Path(path)
    make_folder(folder)
    temporary = {}
    for name in (VECTORS, DOCUMENTS, MANIFEST):
        temporary[name] = folder / f".{name}.{os.getpid()}.tmp"
    try:
        _save_vectors(temporary[VECTORS], layers)
        parquet.write_table(table, temporary[DOCUMENTS], compression="zstd")
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = {
            **manifest,
            "format": FORMAT,
            "complete": True,
            "n": len(documents),
            "layers": list(layers),
            "width": {name: int(rows.shape[1]) for name, rows in layers.items()},
            "default_layer": default,
            "versions": {"lmeval_dispersion": __version__, **manifest.get("versions", {})},
            "created": manifest.get("created") or now,
            "sha256": {name: sha256(temporary[name]) for name in (VECTORS, DOCUMENTS)},
        }
        temporary[MANIFEST].write_text(
            json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
        # Remove the old manifest first: between two stores the folder is partial, never a mixture.
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, file in temporary.items():
            _sync(file)
            file.replace(folder / name)
        _sync(folder)
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return folder


def _document_table(documents: pd.DataFrame) -> Any:
    """The documents as an arrow table with the columns of the format first."""
    import pyarrow as pa

    for name in ("doc_id", "task"):
        if name not in documents:
            there = ", ".join(map(str, documents.columns))
            raise StoreError(
                f"expected a column {name!r} in the documents, got the columns {there or 'none'}; add it"
            )
    given = documents.reset_index(drop=True)
    if "subject" not in given:
        given = given.assign(subject=given["task"])
    columns: dict[str, Any] = {}
    for name, (kind, default) in COLUMNS.items():
        values = given[name].tolist() if name in given else [default] * len(given)
        if kind == "double":
            values = [float("nan") if value is None else float(value) for value in values]
        elif kind == "string":
            length = 500 if name == "text" else None
            values = [value and value[:length] for value in map(_text_or_none, values)]
        if kind == "list<double>":
            rows = [list(map(float, () if value is None else value)) for value in values]
            columns[name] = pa.array(rows, type=pa.list_(pa.float64()))
        else:
            columns[name] = pa.array(values, type=pa.type_for_alias(kind))
    for name in given.columns.difference(list(columns), sort=False):
        try:
            columns[str(name)] = pa.Array.from_pandas(given[name])
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # mixed types, which parquet does not support
            texts = map(_text_or_none, given[name])
            columns[str(name)] = pa.array(texts, type=pa.string())
    return pa.table(columns)


def _text_or_none(value: object) -> str | None:
    missing = value is None or (isinstance(value, float) and np.isnan(value))
    return None if missing else str(value)


def _save_vectors(file: Path, layers: Mapping[str, NDArray[Any]]) -> None:
    """Write raw rows, shape (n, d) a layer, as float16 unit rows and float32 norms."""
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {}
    for name, rows in layers.items():
        unit = np.full(rows.shape, np.nan, dtype=np.float16)
        norm = np.empty(len(rows), dtype=np.float32)
        for i in range(0, len(rows), ROWS):
            block = rows[i : i + ROWS].astype(np.float64)
            norm[i : i + ROWS] = np.sqrt(np.einsum("ij,ij->i", block, block))
            good = valid_rows(block)
            unit[i : i + ROWS][good] = unit_rows(block[good])
        tensors[f"{name}.unit"] = unit
        tensors[f"{name}.norm"] = norm
    save_file(tensors, file)


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
