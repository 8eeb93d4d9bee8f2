"""A model's weights files, as transformers takes them from a folder.

They are ``model.safetensors`` if it is there, else the shards that ``model.safetensors.index.json``
names, else ``pytorch_model.bin`` and its index likewise. Where there is none of these, one lone
safetensors file of another name is taken, with a note, or the slices of torch's distributed
checkpoint. Rows, bodies, copies and refusals all ask here: files next to the model's, such as stale
shards or ``consolidated.safetensors``, belong to none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmeval_dispersion.report.declared import some
from lmeval_screener.budgets import CONFIG, INDEX, parsed
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import SAFETENSORS, TRANSFORMERS, Format, safetensors_files
from lmeval_screener.weights.rows import SLICE


@dataclass(frozen=True)
class ModelFiles:
    """The weights files that belong to a model, in transformers' layout.

    Attributes:
        paths: The paths of the files, sorted; empty if there are none. Several files without an
            index are slices (see ``sliced``), or shards that cannot be read for lack of an index.
        kind: The format whose index names the files; None without an index.
        index: The content of that index; empty without one.
        notes: Sentences about the choice of the files, to be shown with the result; usually empty.
        sliced: Whether each file holds slices of the tensors (torch's distributed checkpoint).
    """

    paths: tuple[str, ...] = ()
    kind: Format | None = None
    index: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sliced: bool = False

    @property
    def holders(self) -> dict[str, list[str]]:
        """For each tensor in the index, a list with the one file that holds it."""
        return {tensor: [file] for tensor, file in self.index.get("weight_map", {}).items()}


async def model_files(snapshot: Snapshot) -> ModelFiles:
    """Choose a model's weights files.

    The first of these that exist are chosen: the files that transformers loads; the slices of
    torch's distributed checkpoint; safetensors files of other names. One file of another name comes
    with a note; several cannot be read without an index.

    Raises:
        ScreeningError: ``BadIndex``: the index is not valid, or it names a missing file. No loader
            reads such a model.
    """
    for kind in TRANSFORMERS:
        has_index = kind.index in snapshot.files
        if kind.single in snapshot.files:
            note = f"both {kind.single} and {kind.index} are stored: {kind.single} was read"
            return ModelFiles((kind.single,), notes=(note,) if has_index else ())
        if has_index:
            index = await read_json(snapshot, kind.index, "BadIndex")
            shards = index.get("weight_map")
            if not isinstance(shards, dict):
                shards = {"": None}
            if not all(isinstance(file, str) for file in shards.values()):
                reason = "has no weight_map from tensors to names of files"
                raise bad_index(snapshot, kind.index, reason)
            named = sorted(set(shards.values()))
            missing = []
            for file in named:
                if file not in snapshot.files or "/" in file or not file.endswith(kind.suffix):
                    missing.append(file)
            if missing:
                reason = f"names missing files ({len(missing)} of {len(named)}): {some(missing, 1)}"
                raise bad_index(snapshot, kind.index, reason)
            return ModelFiles(tuple(named), kind, index)
    others = safetensors_files(snapshot.files)
    if others and all(map(SLICE.fullmatch, others)):
        return ModelFiles(tuple(others), sliced=True)
    if len(others) == 1:
        note = (
            f"{SAFETENSORS.single} is not stored; {others[0]}, the only safetensors file, was read"
        )
        return ModelFiles((others[0],), notes=(note,))
    return ModelFiles(tuple(others))


def bad_index(snapshot: Snapshot, name: str, reason: str) -> ScreeningError:
    """Return the error for an index of shards that does not fit its files.

    Args:
        snapshot: The checkpoint.
        name: The path of the index.
        reason: What is wrong, as a continuation of "NAME of REPOSITORY".
    """
    copy = "copy" if snapshot.is_local else "upload"
    why = f"the index is stale, or the {copy} is incomplete"
    return ScreeningError(
        "BadIndex", f"{name} of {snapshot.repo} {reason}: {why}; {snapshot.next_step}"
    )


async def read_json(snapshot: Snapshot, path: str, code: str) -> Mapping[str, Any]:
    """Read the object in a JSON file; a missing file counts as an empty object.

    Raises:
        ScreeningError: The file holds something other than a JSON object (the error's code is
            ``code``), or cannot be read.
    """
    if path not in snapshot.files:
        return {}
    budget = INDEX if path.endswith(".index.json") else CONFIG
    try:
        fields: Any = parsed(await snapshot.small_file(path), budget)
    except ValueError as error:
        reason = f"is not valid JSON ({error})"
    else:
        if isinstance(fields, dict):
            return fields
        reason = "is not a JSON object"
    raise ScreeningError(code, f"{path} of {snapshot.repo} {reason}; {snapshot.next_step}")
