"""Reading a run's store, or stores of several runs of one model as one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import (
    MixedStoresError,
    PartialStoreError,
    StoreError,
    StoreVersionError,
    require_extra,
)
from lmeval_dispersion.files import hashed, json_in, sha256
from lmeval_dispersion.layouts import Text, checked, nearest
from lmeval_dispersion.store.format import COLUMNS, DOCUMENTS, FORMAT, MANIFEST, ROWS, VECTORS
from lmeval_dispersion.store.identity import check_one_model, joint_identity

if TYPE_CHECKING:
    import pandas as pd


_REPAIR = "copy the folder again, or write the store again"


@dataclass(frozen=True, repr=False)
class Store:
    """A finished run, or several runs of one model read as one.

    Layers are named as the run's options named them: ``layer.-8`` is the eighth block from the end.

    Attributes:
        path: The folder that was read.
        manifest: Content of ``manifest.json``; for several stores, what they have in common (see
            :func:`read_store`).
        documents: One row per document; row i belongs to row i of the vectors.
        parts: The folders of the single stores with their manifests, in the order of the rows.
    """

    path: Path
    manifest: dict[str, Any]
    documents: pd.DataFrame
    parts: list[tuple[Path, dict[str, Any]]]

    def __repr__(self) -> str:
        count = len(self.documents)
        documents = "1 document" if count == 1 else f"{count} documents"
        tasks = self.documents["task"].nunique()
        if tasks > 1:
            documents += f" of {tasks} tasks"
        layers = ", ".join(self.layers) or "none"
        return f"<Store of {self.model}: {documents}, layers: {layers}>"

    @property
    def model(self) -> str:
        """Name or path of the model, as passed to the run; ``unnamed model`` if unknown."""
        return str(self.manifest.get("model") or "unnamed model")

    @property
    def layers(self) -> list[str]:
        """Names of the captured layers, such as ``last`` or ``layer.5.attn``.

        The list is empty for a store that was read from lm-eval's samples or Inspect's logs.
        """
        return list(self.manifest["layers"])

    @property
    def default_layer(self) -> str:
        """Name of the layer that methods use if none is named; "" for a store without layers."""
        return str(self.manifest["default_layer"])

    def vectors(self, layer: str | None = None) -> NDArray[np.float32]:
        """Return the vectors of a layer, scaled to length one. Shape (n, d), float32.

        A vector without a direction (zero or not finite) is a row of NaN. Each call reads the
        vectors from disk.

        Args:
            layer: Name of the layer; default: :attr:`default_layer`.

        Raises:
            StoreError: There is no such layer, or the file is damaged (checked by its SHA-256).
        """
        name = self.layer_name(layer)
        width = int(self.manifest["width"][name])
        tensors = []
        for path, manifest in self.parts:
            _verify(path, manifest, VECTORS)
            tensors.append(_tensor(path, f"{name}.unit", (manifest["n"], width)))
        # Only now: a manifest may claim any width.
        rows = np.empty((len(self.documents), width), dtype=np.float32)
        start = 0
        for (_, manifest), stored in zip(self.parts, tensors, strict=True):
            for i in range(0, manifest["n"], ROWS):
                block = stored[i : min(i + ROWS, manifest["n"])].astype(np.float32)
                # float16 lengths are off by up to 5e-4, and rows of length one are promised.
                block /= np.sqrt(np.einsum("ij,ij->i", block, block))[:, None]
                rows[start : start + len(block)] = block
                start += len(block)
        return rows

    def norms(self, layer: str | None = None) -> NDArray[np.float32]:
        """Return the Euclidean norms of a layer's vectors before scaling. Shape (n,), float32.

        The norm of a vector without a direction is 0 or not finite.

        Raises:
            StoreError: There is no such layer, or the file cannot be read.
        """
        name = self.layer_name(layer)
        norms = []
        for path, manifest in self.parts:
            norms.append(_tensor(path, f"{name}.norm", (manifest["n"],))[:])
        return np.concatenate(norms)

    def to_numpy(self, layer: str | None = None) -> NDArray[np.float32]:
        """Return the hidden states of a layer, at their original lengths. Shape (n, d), float32.

        They are accurate to about three digits, since directions are stored in float16. A state
        without a direction is a row of NaN.

        Raises:
            StoreError: There is no such layer, or the file is damaged (checked by its SHA-256).
        """
        return self.vectors(layer) * self.norms(layer)[:, None]

    def to_frame(self, *layers: str) -> pd.DataFrame:
        """Return the documents with a column ``state:LAYER`` of hidden states for each named layer.

        Each state is an array of shape (d,). ``layers`` are names of layers; without names, the
        default layer.

        Raises:
            StoreError: There is no such layer, or the file is damaged (checked by its SHA-256).
        """
        states = {}
        for layer in layers or (None,):
            states[f"state:{self.layer_name(layer)}"] = list(self.to_numpy(layer))
        return self.documents.assign(**states)

    def to_parquet(self, path: str | Path, *layers: str) -> Path:
        """Write the frame of :meth:`to_frame` to a Parquet file, and return its path.

        pandas, polars, DuckDB and `datasets` read such files.

        Raises:
            StoreError: There is no such layer, or the file is damaged (checked by its SHA-256).
        """
        file = Path(path)
        self.to_frame(*layers).to_parquet(file, index=False)
        return file

    def layer_name(self, layer: str | None = None) -> str:
        """Return the name under which the store has a layer.

        ``layer`` may count blocks from the end, as in ``layer.-1``, or end in ``.ffn``, which means
        the block's output. Default: the default layer.

        Raises:
            StoreError: The store has no such layer.
        """
        if not self.layers:
            raise StoreError(
                f"{self.path} holds answers without hidden states, so it has no layers; "
                "`dispersion embed` makes a store with hidden states"
            )
        name = self.default_layer if layer is None else layer
        if name in self.layers:
            return name
        block = re.fullmatch(r"layer\.(-?\d+)(?:(\.attn)|\.ffn)?", name)
        if block:
            number = int(block[1])
            if number < 0:
                number += self.manifest.get("depth") or 0
            stored = f"layer.{number}{block[2] or ''}"
            if stored in self.layers:
                return stored
        choice = f"one of {', '.join(self.layers)}"
        if len(self.layers) == 1:
            choice = self.layers[0]
        raise StoreError(f"{self.path} has no layer {name!r}; name {choice}")


class _Needed(TypedDict):
    n: Annotated[int, 0]
    layers: tuple[Text, ...]
    width: dict[str, Annotated[int, 1]]
    default_layer: Text
    sha256: dict[str, Text]


class _Manifest(_Needed, total=False):
    """The layout of ``manifest.json``; other keys stay."""

    model: Text | None
    revision: Text | None
    depth: Annotated[int, 0] | None
    tasks: dict[str, Any] | None
    identity: dict[str, Any] | None
    prompt_format: Text | None
    chat_template: Text | None
    created: Text | None


def read_store(path: str | Path) -> Store:
    """Read the store in a folder, or all stores in its sub-folders as one.

    Two kinds of sub-folders are searched: those directly in the folder, and the tasks' folders in a
    ``dispersion_DATE`` folder, which runs with ``--output_path`` write into the folder or one level
    below.

    Stores that are read as one need the same model and revision, the same general prompt settings
    (system prompt, chat template), and at least one layer in common. Their joint manifest has the
    values that they share; where ``prompt_format`` and the settings of the tasks' prompts in
    ``identity`` differ, it has a hash of all values.

    Raises:
        StoreError: There is no store, or it is damaged.
        PartialStoreError: The run of a store did not finish.
        StoreVersionError: A store has another version of the format.
        MixedStoresError: The stores have different models or prompt settings, no layer in common,
            layers of different widths, or one task twice.
        MissingExtraError: The extra ``audit`` is not installed.
    """
    require_extra("audit", "a store")
    import pandas as pd

    folder = Path(path)
    if not folder.is_dir():
        hint = "; check the path"
        if folder.exists():
            hint = "; `dispersion embed MODEL FILE -o STORE` makes a store of the texts in FILE"
        elif folder.parent.is_dir():
            hint = nearest(folder.name, [place.name for place in folder.parent.iterdir()]) or hint
        raise StoreError(f"expected the folder of a run, but {folder} is not a folder{hint}")
    parts = [(place, _read_manifest(place)) for place in places_of(folder)]
    if not parts:
        raise StoreError(
            f"{folder} and its sub-folders hold no store; name the folder of a run with dispersion tasks, "
            "or one that `dispersion embed` wrote"
        )
    check_one_model(parts)
    frames = {place: _read_documents(place, manifest) for place, manifest in parts}
    _check_tasks(frames)
    if len(parts) == 1:
        return Store(folder, dict(parts[0][1]), frames[parts[0][0]], parts)
    documents = pd.concat(frames.values(), ignore_index=True)
    manifest = _joint_manifest(folder, [manifest for _, manifest in parts])
    return Store(folder, manifest, documents, parts)


def places_of(folder: Path) -> list[Path]:
    """Return the folders at or below ``folder`` that hold a store, sorted by path; may be empty."""
    if any((folder / name).exists() for name in (MANIFEST, VECTORS, DOCUMENTS)):
        return [folder]
    # Other tools also write a manifest.json: below the named folder it is not a store.
    places: set[Path] = set()
    for pattern in ("*", "dispersion_*/*", "*/dispersion_*/*"):
        for name in (VECTORS, DOCUMENTS):
            for file in folder.glob(f"{pattern}/{name}"):
                places.add(file.parent)
    return sorted(places)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The checked ``manifest.json`` of one store."""
    file = folder / MANIFEST
    if not file.exists():
        raise PartialStoreError(
            f"the store in {folder} is partial ({MANIFEST} is missing), because its run did not finish; "
            "finish the run, or remove the folder"
        )
    try:
        manifest: dict[str, Any] = json_in(file)
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} cannot be read as JSON ({error}); {_REPAIR}") from None
    held = manifest.get("format") if isinstance(manifest, dict) else None
    if not str(held).startswith("dispersion-store/"):
        raise StoreError(
            f"expected {file} to be the manifest of a store, got {held or 'another file'}; name the "
            "folder of a run with dispersion tasks, or one that `dispersion embed` wrote"
        )
    if held != FORMAT:
        raise StoreVersionError(
            f"expected the format {FORMAT!r} in {folder}, got {held!r}; read the store with the version "
            "that wrote it, or write the store again"
        )
    if manifest.get("complete") is not True:
        raise PartialStoreError(
            f"the store in {folder} is partial, because its run did not finish; finish the run, or "
            "remove the folder"
        )
    given = checked(_Manifest, manifest, file, _REPAIR, StoreError)
    if set(given["layers"]) != set(given["width"]) or given["default_layer"] not in given["layers"]:
        raise StoreError(
            f"{file} is damaged (`layers`: expected the names in `width`, among them `default_layer`, got "
            f"{', '.join(given['layers'])[:200]}); {_REPAIR}"
        )
    return manifest


def _read_documents(folder: Path, manifest: dict[str, Any]) -> pd.DataFrame:
    """The documents of one store, checked against the manifest."""
    import pandas as pd

    _verify(folder, manifest, DOCUMENTS)
    frame = pd.read_parquet(folder / DOCUMENTS, engine="pyarrow")
    defect = ""
    if len(frame) != manifest["n"]:
        defect = f"{len(frame)} rows instead of {manifest['n']}"
    for name in COLUMNS:
        if name not in frame:
            defect = f"no column {name!r}"
    if defect:
        raise StoreError(f"{folder / DOCUMENTS} is damaged: it has {defect}; {_REPAIR}")
    return frame


def _check_tasks(frames: Mapping[Path, pd.DataFrame]) -> None:
    """Raise StoreError for a document that is there twice, MixedStoresError for a task in two stores."""
    owner: dict[str, Path] = {}
    for place, frame in frames.items():
        twice = frame[frame.duplicated(["task", "doc_id"])]
        if len(twice):
            row = twice.iloc[0]
            raise StoreError(
                f"{place} holds document {row['doc_id']} of task {row['task']} twice; write the store "
                "again"
            )
        for task in frame["task"].unique():
            if owner.setdefault(task, place) != place:
                raise MixedStoresError(
                    f"the task {task!r} is in two stores, {owner[task]} and {place}; move one of them "
                    "away"
                )


def _joint_manifest(folder: Path, manifests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The common values of several stores' manifests, and what describes them together."""
    first = manifests[0]
    joint = dict(first)
    layers = first["layers"]
    tasks: dict[str, Any] = {}
    formats = set()
    for manifest in manifests:
        for key in [*joint]:
            if manifest.get(key) != joint[key]:
                del joint[key]
        layers = [name for name in layers if name in manifest["layers"]]
        tasks |= manifest.get("tasks") or {}
        formats.add(str(manifest.get("prompt_format")))
    if not layers:
        raise MixedStoresError(f"the stores in {folder} share no layer; read them one at a time")
    width = {name: first["width"][name] for name in layers}
    for manifest in manifests:
        for name in layers:
            if manifest["width"][name] != width[name]:
                raise MixedStoresError(
                    f"layer {name!r} has different widths in {folder}; read its stores one at a time"
                )
    default = first["default_layer"]
    if first.get("identity") is not None:
        joint["identity"] = joint_identity([manifest["identity"] for manifest in manifests])
    joint["n"] = sum(manifest["n"] for manifest in manifests)
    joint["layers"] = layers
    joint["width"] = width
    joint["default_layer"] = default if default in layers else layers[0]
    joint["tasks"] = tasks
    joint["prompt_format"] = formats.pop()
    if formats:
        formats.add(joint["prompt_format"])
        joint["prompt_format"] = hashed("\n".join(sorted(formats)))
    joint["sha256"] = {}
    joint["created"] = max(str(manifest.get("created", "")) for manifest in manifests)
    return joint


def _tensor(folder: Path, name: str, shape: tuple[int, ...]) -> Any:
    """A tensor of a store's vectors, with checked shape; read when sliced."""
    from safetensors import SafetensorError, safe_open

    try:
        tensors: Any = safe_open(str(folder / VECTORS), framework="numpy")
        stored = tensors.get_slice(name)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{folder / VECTORS} cannot be read ({error}); {_REPAIR}") from None
    if tuple(stored.get_shape()) != shape:
        raise StoreError(
            f"{folder / VECTORS} is damaged: expected {name} in the shape {list(shape)}, got "
            f"{stored.get_shape()}; {_REPAIR}"
        )
    return stored


def _verify(folder: Path, manifest: dict[str, Any], name: str) -> None:
    """Raise StoreError unless the file has the manifest's checksum."""
    file = folder / name
    if not file.exists():
        raise PartialStoreError(f"the store in {folder} is partial ({name} is missing); {_REPAIR}")
    if sha256(file) != manifest["sha256"].get(name):
        raise StoreError(
            f"{file} was changed or damaged (its checksum differs from {MANIFEST}'s); {_REPAIR}"
        )
