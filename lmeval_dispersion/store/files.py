"""Reading and writing the three files of a store; ``lmeval_dispersion.store`` is the part to use."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import (
    MissingExtraError,
    PartialStoreError,
    StoreError,
    StoreVersionError,
)
from lmeval_dispersion.geometry import unit_rows, valid_rows

if TYPE_CHECKING:
    import pandas as pd

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


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked ``manifest.json`` of one store. Raises StoreError, PartialStoreError, StoreVersionError."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{file} is not JSON ({error}); run it again") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), str):
        raise StoreError(f"{file} is not the manifest of a store; expected a `format` of {FORMAT!r}")
    if not manifest["format"].startswith("dispersion-store/"):
        raise StoreError(
            f"{folder} holds {manifest['format']!r}, which is no store; name the folder of a harness run, "
            "or one that `dispersion store` made"
        )
    if manifest["format"] != FORMAT:
        raise StoreVersionError(
            f"{folder} was written as {manifest['format']!r} and this version reads {FORMAT!r}; "
            "use the version that wrote it, or run it again"
        )
    if manifest.get("complete") is not True:
        raise PartialStoreError(f"the store in {folder} is partial: its run did not finish; run it again")
    wanted = {"n": int, "layers": list, "width": dict, "default_layer": str, "sha256": dict}
    for key, kind in wanted.items():
        if not isinstance(manifest.get(key), kind):
            raise StoreError(f"{file} lacks a usable `{key}`; the store is damaged, run it again")
    if not manifest["layers"] or set(manifest["layers"]) != set(manifest["width"]):
        raise StoreError(f"{file} names layers without a width; the store is damaged, run it again")
    return manifest


def read_documents(folder: Path, manifest: dict[str, Any]) -> pd.DataFrame:
    """The documents of one store, checked against the manifest. Raises StoreError."""
    import pandas as pd

    verify(folder, manifest, DOCUMENTS)
    _pyarrow()
    frame = pd.read_parquet(folder / DOCUMENTS, engine="pyarrow")
    missing = [name for name in COLUMNS if name not in frame]
    if missing or len(frame) != manifest["n"]:
        what = f"no column {missing[0]!r}" if missing else f"{len(frame)} rows instead of {manifest['n']}"
        raise StoreError(f"{folder / DOCUMENTS} has {what}; the store is damaged, run it again")
    return frame


def document_table(documents: pd.DataFrame) -> Any:
    """The documents as an arrow table with the columns of the format first."""
    pa = _pyarrow()
    missing = [name for name in ("doc_id", "task") if name not in documents]
    if missing:
        raise StoreError(f"expected a column {missing[0]!r} in the documents, got {list(documents.columns)}")
    given = documents.reset_index(drop=True).copy()
    if "subject" not in given:
        given["subject"] = given["task"]
    columns: dict[str, Any] = {}
    for name, (kind, default) in COLUMNS.items():
        values = given[name].tolist() if name in given else [default] * len(given)
        if kind == "double":
            values = [float("nan") if value is None else float(value) for value in values]
        elif kind == "string":
            values = [_text_or_none(value) for value in values]
        elif kind == "list<double>":
            values = [[] if value is None else [float(v) for v in value] for value in values]
        if name == "text":
            values = [value if value is None else value[:TEXT_LENGTH] for value in values]
        type_ = pa.list_(pa.float64()) if kind == "list<double>" else pa.type_for_alias(kind)
        columns[name] = pa.array(values, type=type_)
    for name in given.columns:
        if name not in columns:
            columns[str(name)] = _any_column(given[name])
    return pa.table(columns)


def _any_column(values: pd.Series[Any]) -> Any:
    """A further column as it comes; one of mixed types, which parquet does not have, as text."""
    pa = _pyarrow()
    try:
        return pa.Array.from_pandas(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([_text_or_none(value) for value in values], type=pa.string())


def _text_or_none(value: object) -> str | None:
    missing = value is None or (isinstance(value, float) and np.isnan(value))
    return None if missing else str(value)


def save_vectors(file: Path, layers: Mapping[str, NDArray[Any]]) -> None:
    """Write raw rows, shape (n, d) a layer, as float16 unit rows and float32 norms."""
    save = _safetensors().numpy.save_file
    tensors: dict[str, NDArray[Any]] = {}
    for name, rows in layers.items():
        unit = np.full(rows.shape, np.nan, dtype=np.float16)
        norm = np.empty(len(rows), dtype=np.float32)
        for i in range(0, len(rows), ROWS):
            block = rows[i : i + ROWS].astype(np.float64)
            norm[i : i + ROWS] = np.sqrt(np.einsum("ij,ij->i", block, block))
            good = valid_rows(block)
            unit[i : i + ROWS][good] = unit_rows(block[good])
        tensors[f"{name}.unit"], tensors[f"{name}.norm"] = unit, norm
    save(tensors, file)


def save_table(file: Path, table: Any) -> None:
    """Write an arrow table as parquet."""
    import pyarrow.parquet as parquet

    parquet.write_table(table, file, compression="zstd")


def tensor_slice(tensors: Any, folder: Path, name: str, shape: tuple[int, ...]) -> Any:
    """A lazily read tensor of an open file, with its shape checked. Raises StoreError."""
    if name not in tensors.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
        raise StoreError(f"{folder / VECTORS} has no tensor {name!r}; the store is damaged, run it again")
    found = tensors.get_slice(name)
    if tuple(found.get_shape()) != shape:
        raise StoreError(f"{folder / VECTORS}: {name} is {found.get_shape()}, expected {list(shape)}")
    return found


def open_tensors(folder: Path) -> Any:
    """A store's vectors, opened for reading parts of them. Raises StoreError."""
    safetensors = _safetensors()
    try:
        return safetensors.safe_open(str(folder / VECTORS), framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise StoreError(f"{folder / VECTORS} cannot be read ({error}); run it again") from None


def verify(folder: Path, manifest: dict[str, Any], name: str) -> None:
    """Raise StoreError unless the file has the checksum that the manifest gives."""
    file = folder / name
    if not file.exists():
        raise PartialStoreError(f"the store in {folder} is partial: {name} is missing; run it again")
    if sha256(file) != manifest["sha256"].get(name):
        raise StoreError(
            f"{file} is not the file that was written (its checksum differs from {MANIFEST}'s); "
            "copy the folder again or run it again"
        )


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise _missing("pyarrow") from None
    return pyarrow


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise _missing("safetensors") from None
    return safetensors


def _missing(package: str) -> MissingExtraError:
    return MissingExtraError(
        f"stores need {package}, which is not installed; run: pip install 'lmeval-dispersion[audit]'"
    )
