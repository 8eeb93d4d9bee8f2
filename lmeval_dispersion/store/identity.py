"""Which runs belong together, by the ``identity`` of their manifests (docs/reference/store.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import MixedStoresError

Identity = Mapping[str, str]
Part = tuple[Path, Mapping[str, Any]]  # a store's folder and manifest

# The model, and the shape of all prompts of a run: stores that are read as one share these.
MODEL_KEYS = ("weights", "gguf", "adapter", "delta", "quantization", "dtype", "tokenizer", "add_bos_token")
RUN_KEYS = ("system_prompt", "chat_template", "multiturn")
# The shape of one task's prompts: tasks of one run may differ here.
TASK_KEYS = ("prompt_template", "num_fewshot", "fewshot_seed")

_SHOWN = 24  # characters of a value in a message


def check_one_model(parts: Sequence[Part]) -> None:
    """Refuse to read stores as one if they are of two models, or of one that was prompted in two ways."""
    first_place, first = parts[0]
    for place, manifest in parts[1:]:
        differing = _differences(first, manifest, ("model", "revision"))
        a, b = first.get("identity"), manifest.get("identity")
        if not differing and (a is None) != (b is None):
            old = first_place if a is None else place
            raise MixedStoresError(
                f"{old} was written before stores had an identity, and whether it is of the same model as "
                "those beside it cannot be told; read it by itself or run it again"
            )
        differing |= _differences(a or {}, b or {}, (*MODEL_KEYS, *RUN_KEYS))
        if differing:
            raise MixedStoresError(
                f"the stores in {first_place.name} and {place.name} differ in {_shown(differing)}; read them "
                "one at a time or use `dispersion compare`"
            )


def check_comparable(first: Sequence[Part], other: Sequence[Part]) -> list[str]:
    """Sentences that a comparison of two runs must carry: how their models differ. Other prompts are refused.

    Returns:
        Sentences without a full stop; none for equal identities and for stores older than these.
    """
    a, b = first[0][1].get("identity"), other[0][1].get("identity")
    if a is None and b is None:
        return []
    if a is None or b is None:
        old = first if a is None else other
        return [f"{old[0][0]} was written before stores had an identity: what it ran cannot be checked"]
    models = _differences(a, b, MODEL_KEYS)
    by_task = {task: manifest for _, manifest in first for task in manifest.get("tasks") or {}}
    prompts: dict[str, tuple[str, str]] = {}
    for _, manifest in other:
        for task in by_task.keys() & (manifest.get("tasks") or {}).keys():
            ours, theirs = by_task[task].get("identity") or {}, manifest.get("identity") or {}
            prompts |= _differences(ours, theirs, (*RUN_KEYS, *TASK_KEYS))
    template = prompts.pop("chat_template", None) if models.keys() - {"dtype"} else None
    if prompts:
        raise MixedStoresError(
            f"the runs were asked in other ways, they differ in {_shown(prompts)}; compare runs of one prompt"
        )
    notes = []
    if models:
        notes.append(f"the models differ in {_shown(models)}")
    if template:
        notes.append(
            f"the runs differ in {_shown({'chat_template': template})}: the difference is partly its"
        )
    return notes


def joint_identity(identities: Sequence[Identity]) -> dict[str, str]:
    """Identity of stores that are read as one: what they share, and a hash of what differs between tasks."""
    joint = dict(identities[0])
    for key in TASK_KEYS:
        values = sorted({identity.get(key, "") for identity in identities})
        if len(values) > 1:
            joint[key] = "several:" + hashlib.sha256("\n".join(values).encode()).hexdigest()
    return joint


def _differences(a: Identity, b: Identity, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Key -> both values, of the keys whose values differ; a missing one is ``none``."""
    return {key: (a.get(key, "none"), b.get(key, "none")) for key in keys if a.get(key) != b.get(key)}


def _shown(differing: Mapping[str, tuple[str, str]]) -> str:
    """The differing keys with both values, as part of a sentence."""

    def short(value: object) -> str:
        text = str(value)
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"

    return ", ".join(f"{key} ({short(a)} and {short(b)})" for key, (a, b) in differing.items())
