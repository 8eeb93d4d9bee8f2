"""The store of one run: every document's vector, answer and scores in one folder, without pickles or torch.

A folder holds ``vectors.safetensors`` (float16 unit rows and float32 norms a layer), ``documents.parquet``
(one row a document, in the same order) and ``manifest.json``, which is written last: a folder without it
is a store whose run did not finish. ``docs/store.md`` is the contract.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion import __version__
from lmeval_dispersion.errors import MixedStoresError, PartialStoreError, StoreError
from lmeval_dispersion.store.files import (
    DOCUMENTS,
    FORMAT,
    MANIFEST,
    ROWS,
    VECTORS,
    document_table,
    open_tensors,
    read_documents,
    read_manifest,
    save_table,
    save_vectors,
    sha256,
    sync,
    tensor_slice,
    verify,
)

if TYPE_CHECKING:
    import pandas as pd

_SAME = ("model", "revision")  # what stores that are read as one must share


@dataclass(frozen=True)
class Store:
    """A finished run, or several runs of one model read as one.

    Attributes:
        path: The folder that was read.
        manifest: What ``manifest.json`` says; of several stores, what they share (see :func:`read_store`).
        documents: One row a document; row i belongs to row i of the vectors.
        parts: The folders of the single stores with their manifests, in the order of the rows.
    """

    path: Path
    manifest: dict[str, Any]
    documents: pd.DataFrame
    parts: list[tuple[Path, dict[str, Any]]] = field(repr=False)

    @property
    def model(self) -> str:
        """Name or path of the model, as the run was given it."""
        return str(self.manifest.get("model") or "unnamed model")

    @property
    def layers(self) -> list[str]:
        """Names of the captured layers, such as ``last`` or ``layer.5.attn``."""
        return list(self.manifest["layers"])

    @property
    def default_layer(self) -> str:
        """The layer that is meant where none is named."""
        return str(self.manifest["default_layer"])

    def vectors(self, layer: str | None = None) -> NDArray[np.float32]:
        """Unit rows of one layer, shape (n, d), float32; a row without a direction comes back as NaN.

        Read from disk at every call.

        Raises:
            StoreError: No such layer, or the file is not the one that the manifest describes.
        """
        name = self._layer(layer)
        rows = np.empty((len(self.documents), int(self.manifest["width"][name])), dtype=np.float32)
        start = 0
        for path, manifest in self.parts:
            verify(path, manifest, VECTORS)
            with open_tensors(path) as tensors:
                stored = tensor_slice(tensors, path, f"{name}.unit", (manifest["n"], rows.shape[1]))
                for i in range(0, manifest["n"], ROWS):
                    block = stored[i : min(i + ROWS, manifest["n"])].astype(np.float32)
                    # float16 leaves lengths off by up to 5e-4: rows of length one are what is promised.
                    block /= np.sqrt(np.einsum("ij,ij->i", block, block))[:, None]
                    rows[start : start + len(block)] = block
                    start += len(block)
        return rows

    def norms(self, layer: str | None = None) -> NDArray[np.float32]:
        """Lengths of the raw vectors of one layer, shape (n,), float32; 0 or non-finite: no direction."""
        name = self._layer(layer)
        found = []
        for path, manifest in self.parts:
            with open_tensors(path) as tensors:
                found.append(tensor_slice(tensors, path, f"{name}.norm", (manifest["n"],))[:])
        return np.concatenate(found)

    def _layer(self, layer: str | None) -> str:
        name = self.default_layer if layer is None else layer
        if name not in self.layers:
            raise StoreError(f"{self.path} has no layer {name!r}; it has {', '.join(self.layers)}")
        return name


def write_store(
    path: str | Path,
    *,
    documents: pd.DataFrame,
    vectors: Mapping[str, ArrayLike],
    manifest: Mapping[str, Any],
) -> Path:
    """Write one run to the folder ``path``, replacing a store that is there; returns the folder.

    At every moment the folder holds a whole store or one that readers refuse as partial.

    Args:
        path: Folder, created where it is missing.
        documents: One row a document with at least ``doc_id`` and ``task``; missing columns of
            :data:`lmeval_dispersion.store.files.COLUMNS` are filled with "not known", further ones are kept.
        vectors: Layer name -> raw vectors, shape (n, d), any float dtype. A zero or non-finite row is kept
            as a row without direction.
        manifest: What is known of the run (model, revision, prompt_format, ...). ``format``,
            ``complete``, ``n``, ``layers``, ``width`` and ``sha256`` are filled in; ``default_layer``
            defaults to the first layer, ``created`` to now.

    Raises:
        StoreError: Lengths differ, a required column or every layer is missing.
    """
    table = document_table(documents)
    layers = {name: np.asarray(rows) for name, rows in vectors.items()}
    if not layers:
        raise StoreError("expected the vectors of at least one layer, got none")
    for name, rows in layers.items():
        if rows.ndim != 2 or rows.shape[0] != len(documents) or rows.shape[1] == 0:
            raise StoreError(f"expected {len(documents)} vectors of layer {name!r}, got shape {rows.shape}")
    default = manifest.get("default_layer", next(iter(layers)))
    if default not in layers:
        raise StoreError(f"the default layer {default!r} is none of {', '.join(layers)}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in (VECTORS, DOCUMENTS, MANIFEST)}
    try:
        save_vectors(temporary[VECTORS], layers)
        save_table(temporary[DOCUMENTS], table)
        content = {
            **manifest,
            "format": FORMAT,
            "complete": True,
            "n": len(documents),
            "layers": list(layers),
            "width": {name: int(rows.shape[1]) for name, rows in layers.items()},
            "default_layer": default,
            "versions": {"lmeval_dispersion": __version__, **manifest.get("versions", {})},
            "created": manifest.get("created") or datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "sha256": {name: sha256(temporary[name]) for name in (VECTORS, DOCUMENTS)},
        }
        temporary[MANIFEST].write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
        # The old manifest goes first: between two stores the folder is partial, never a mixture.
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in (VECTORS, DOCUMENTS, MANIFEST):
            sync(temporary[name])
            temporary[name].replace(folder / name)
        sync(folder)
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return folder


def read_store(path: str | Path) -> Store:
    """The store in the folder ``path``, or all stores in its sub-folders read as one.

    Several stores need one model and revision, and at least one layer in common. Their joint manifest
    keeps what they agree on; ``prompt_format`` is then a hash over all of theirs.

    Raises:
        PartialStoreError: A run did not finish.
        StoreVersionError: Written by another version of the format.
        MixedStoresError: Stores of different models, or one task twice.
        StoreError: No store there, or damaged files.
    """
    folder = Path(path)
    places = _stores(folder)
    parts = [(place, read_manifest(place)) for place in places]
    _same_model(parts)
    shared = [name for name in parts[0][1]["layers"] if all(name in m["layers"] for _, m in parts)]
    widths = {name: {m["width"][name] for _, m in parts} for name in shared}
    mixed = [name for name in shared if len(widths[name]) > 1]
    if not shared or mixed:
        raise MixedStoresError(
            f"the stores in {folder} share no layer of one width; read them one at a time"
            if not shared
            else f"layer {mixed[0]!r} has different widths in {folder}; read its stores one at a time"
        )
    import pandas as pd

    frames = [read_documents(place, manifest) for place, manifest in parts]
    _no_task_twice(places, frames)
    documents = frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)
    return Store(folder, _joint_manifest([m for _, m in parts], shared), documents, parts)


def is_store(path: str | Path) -> bool:
    """Whether ``path`` is a folder that holds a store, finished or not, or folders of stores."""
    folder = Path(path)
    return folder.is_dir() and bool(_candidates(folder))


def _candidates(folder: Path) -> list[Path]:
    """Folders at or below ``folder`` that hold a file of a store, sorted by path."""
    if any((folder / name).exists() for name in (MANIFEST, VECTORS, DOCUMENTS)):
        return [folder]
    found = {file.parent for name in (MANIFEST, VECTORS, DOCUMENTS) for file in folder.rglob(name)}
    return sorted(found)


def _stores(folder: Path) -> list[Path]:
    if not folder.is_dir():
        hint = "; `dispersion store MODEL FILE` makes a run of texts" if folder.exists() else ""
        raise StoreError(f"expected the folder of a run, got {folder}, which is no folder{hint}")
    found = _candidates(folder)
    if not found:
        raise StoreError(f"{folder} holds no store: no {MANIFEST} in it or below it")
    for place in found:
        if not (place / MANIFEST).exists():
            raise PartialStoreError(
                f"the store in {place} is partial: its run did not finish ({MANIFEST} is missing); "
                "run it again or remove the folder"
            )
    return found


def _same_model(parts: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    first_place, first = parts[0]
    for place, manifest in parts[1:]:
        for key in _SAME:
            if manifest.get(key) != first.get(key):
                raise MixedStoresError(
                    f"expected stores of one model, got {key} {first.get(key)!r} in {first_place.name} and "
                    f"{manifest.get(key)!r} in {place.name}; read them one at a time or use "
                    "`dispersion compare`"
                )


def _no_task_twice(places: Sequence[Path], frames: Sequence[pd.DataFrame]) -> None:
    owner: dict[str, Path] = {}
    for place, frame in zip(places, frames, strict=True):
        if frame.duplicated(["task", "doc_id"]).any():
            row = frame[frame.duplicated(["task", "doc_id"])].iloc[0]
            raise StoreError(f"{place} holds document {row['doc_id']} of task {row['task']} twice")
        for task in frame["task"].unique():
            if task in owner:
                raise MixedStoresError(
                    f"task {task!r} is in {owner[task]} and in {place}; remove one of them"
                )
            owner[task] = place


def _joint_manifest(manifests: Sequence[dict[str, Any]], layers: list[str]) -> dict[str, Any]:
    if len(manifests) == 1:
        return dict(manifests[0])
    first = manifests[0]
    joint = {
        key: value for key, value in first.items() if all(m.get(key, None) == value for m in manifests[1:])
    }
    default = joint.get("default_layer", first["default_layer"])
    formats = sorted({str(m.get("prompt_format")) for m in manifests})
    joint.update(
        n=sum(m["n"] for m in manifests),
        layers=layers,
        width={name: first["width"][name] for name in layers},
        default_layer=default if default in layers else layers[0],
        tasks={task: version for m in manifests for task, version in (m.get("tasks") or {}).items()},
        prompt_format=formats[0]
        if len(formats) == 1
        else hashlib.sha256("\n".join(formats).encode()).hexdigest(),
        sha256={},
        created=max(str(m.get("created", "")) for m in manifests),
    )
    return joint
