"""A run's model and prompts, as the ``identity`` of its manifest records them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import MixedStoresError, shortened
from lmeval_dispersion.files import hashed

Identity = Mapping[str, str]
Differences = dict[str, tuple[str, str]]  # key -> both values
StorePart = tuple[Path, Mapping[str, Any]]  # a store's folder and manifest

# The model, and settings of all prompts: stores read as one share these.
MODEL_KEYS = (
    "weights",
    "gguf",
    "adapter",
    "delta",
    "quantization",
    "dtype",
    "tokenizer",
    "add_bos_token",
)
RUN_KEYS = ("system_prompt", "chat_template", "multiturn")
# Settings of one task's prompts: a run's tasks may differ here.
TASK_KEYS = ("prompt_template", "num_fewshot", "fewshot_seed")

UNKNOWN = "prompts"  # key of an identity whose prompts' settings are not known

SUFFIX = "_dispersion"  # suffix of a dispersion task's name
_SHOWN = 24  # characters of a value in a message
# Of a function, in a text of Python: other in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def prompt_manifest(
    config: Mapping[str, Any],
    *,
    fewshot_seed: int | None,
    chat_template: str | None,
    multiturn: bool,
    system: str | None,
) -> dict[str, Any]:
    """Return the entries of a store's manifest that describe the prompts of a task.

    The entry ``identity`` has only those settings that apply. Equal settings give equal values in
    every process, so that two runs can be compared.

    Args:
        config: lm-eval's configuration of the task; empty if it is not known, which gives the
            identity ``{"prompts": "unknown"}``.
        fewshot_seed: Seed of the examples; None if it is not known.
        chat_template: Hash of the chat template; None without one.
        multiturn: Whether examples are turns of a chat.
        system: The system prompt; None without one.
    """
    if not config:  # samples without results
        return {
            "num_fewshot": None,
            "chat_template": None,
            "prompt_format": None,
            "identity": {UNKNOWN: "unknown"},
        }
    source = source_text(config.get("doc_to_text"))
    delimiters = [config.get("target_delimiter"), config.get("fewshot_delimiter")]
    shots = config.get("num_fewshot")
    description = config.get("description")
    if not isinstance(description, str):
        description = ""
    subject = config.get("dataset_name")
    if isinstance(subject, str):
        # "... questions about anatomy": the subjects of one benchmark have one template.
        description = description.replace(subject.replace("_", " "), "SUBJECT")
    shape = {
        "doc_to_text": source,
        "num_fewshot": shots,
        "delimiters": delimiters,
        "chat_template": chat_template,
        "multiturn": multiturn if chat_template else None,
        "system": system,
    }
    identity = {
        "prompt_template": hashed(json.dumps([source, description, delimiters])),
        "num_fewshot": str(shots or 0),
    }
    if shots and fewshot_seed is not None:
        identity["fewshot_seed"] = str(fewshot_seed)
    if system:
        identity["system_prompt"] = hashed(str(system))
    if chat_template:
        identity["chat_template"] = chat_template
        identity["multiturn"] = str(multiturn).lower()
    return {
        "num_fewshot": shots,
        "chat_template": chat_template,
        "prompt_format": hashed(json.dumps(shape, sort_keys=True)),
        "identity": identity,
    }


def source_text(value: Any) -> str:
    """Return a prompt template as text without memory addresses, so that it can be compared.

    A function becomes its source code, as in lm-eval's results, or its name if the code is not
    known. A `functools.partial` becomes its function with the arguments, and any other value the
    text that `str` gives.
    """
    if isinstance(value, partial):
        words = [repr(word) for word in value.args]
        words += [f"{key}={word!r}" for key, word in sorted(value.keywords.items())]
        return _ADDRESS.sub("", f"{source_text(value.func)}({', '.join(words)})")
    if not callable(value):
        return _ADDRESS.sub("", str(value))
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"


def check_one_model(parts: Sequence[StorePart]) -> None:
    """Check that stores to be read as one have the same model and the same general prompt settings.

    The general settings are the system prompt, the chat template, and whether few-shot examples are
    turns of a chat. Settings of single tasks, such as the number of these examples, may differ.

    Raises:
        MixedStoresError: The stores differ, or only some of them have an ``identity``.
    """
    first_place, first = parts[0]
    for place, manifest in parts[1:]:
        differing = differences(first, manifest, ("model", "revision"))
        a = first.get("identity")
        b = manifest.get("identity")
        if not differing and (a is None) != (b is None):
            old = first_place if a is None else place
            raise MixedStoresError(
                f"{old} was written by a version that did not record the weights, so its model "
                "cannot be compared with that of the other stores; read this store alone, or evaluate "
                "the model again"
            )
        differing |= differences(a or {}, b or {}, (*MODEL_KEYS, *RUN_KEYS))
        if differing:
            raise MixedStoresError(
                f"the stores in {first_place.name} and {place.name} differ in "
                f"{shown_differences(differing)}; read them one at a time or use `dispersion compare`"
            )


def model_notes(first: Sequence[StorePart], other: Sequence[StorePart]) -> list[str]:
    """Return a note if two runs' models differ, or if only one run's manifest records its weights.

    The result is a list with one sentence, without its full stop. It is empty if there is nothing
    to note, or if neither manifest describes the model (``identity``).
    """
    a = first[0][1].get("identity")
    b = other[0][1].get("identity")
    if a is None and b is None:
        return []
    if a is None or b is None:
        place = first[0][0] if a is None else other[0][0]
        return [
            f"{place} was written by a version that did not record the weights, so its model "
            "cannot be checked"
        ]
    models = _model_differences(first, other)
    if models and _models_known(a, b):
        return [f"The models differ in {shown_differences(models)}"]
    return []


def prompt_differences(
    first: Sequence[StorePart], other: Sequence[StorePart]
) -> tuple[Differences, Differences]:
    """Return the prompt settings in which two runs differ, according to their manifests.

    Returns:
        Two dictionaries, setting -> its value in each run. If the models differ as well, which may
        be why their chat templates do, the chat template is in the second dictionary. All other
        settings are in the first. Both are empty if a run has no ``identity``.
    """
    if first[0][1].get("identity") is None or other[0][1].get("identity") is None:
        return {}, {}
    by_task: dict[str, Identity] = {}
    for _, manifest in first:
        for task in manifest.get("tasks") or {}:
            by_task[task.removesuffix(SUFFIX)] = manifest.get("identity") or {}
    prompts: Differences = {}
    for _, manifest in other:
        theirs = manifest.get("identity") or {}
        for task in manifest.get("tasks") or {}:
            ours = by_task.get(task.removesuffix(SUFFIX), {UNKNOWN: "no such task"})
            if ours.get(UNKNOWN) or theirs.get(UNKNOWN):
                continue  # samples without results
            prompts |= differences(ours, theirs, (*RUN_KEYS, *TASK_KEYS))
    template: Differences = {}
    if "chat_template" in prompts and _model_differences(first, other).keys() - {"dtype"}:
        template["chat_template"] = prompts.pop("chat_template")
    return prompts, template


def _model_differences(first: Sequence[StorePart], other: Sequence[StorePart]) -> Differences:
    a = first[0][1].get("identity") or {}
    b = other[0][1].get("identity") or {}
    if _models_known(a, b):
        return differences(a, b, MODEL_KEYS)
    return differences(first[0][1], other[0][1], ("model",))


def _models_known(a: Identity, b: Identity) -> bool:
    """Whether both runs describe their models: samples of lm-eval have their names alone."""
    keys = set(MODEL_KEYS)
    return bool(keys & a.keys()) and bool(keys & b.keys())


def joint_identity(identities: Sequence[Identity]) -> dict[str, str]:
    """Return the identity of several stores that are read as one.

    A setting of the tasks' prompts that differs between the stores becomes a hash of all values.
    """
    joint = dict(identities[0])
    for key in TASK_KEYS:
        values = sorted({identity.get(key, "") for identity in identities})
        if len(values) > 1:
            joint[key] = "several:" + hashed("\n".join(values))
    return joint


def differences(a: Identity, b: Identity, keys: Sequence[str]) -> Differences:
    """Return both values of each of the ``keys`` whose values differ; a missing value is ``none``."""
    differing = {}
    for key in keys:
        if a.get(key) != b.get(key):
            differing[key] = (a.get(key) or "none", b.get(key) or "none")
    return differing


def shown_differences(differing: Differences) -> str:
    """Return the settings that differ, as part of a sentence.

    >>> shown_differences({"dtype": ("float32", "bfloat16"), "num_fewshot": ("0", "5")})
    'dtype (float32 and bfloat16), num_fewshot (0 and 5)'

    Long values are shortened, unless they would then look equal.
    """
    parts = []
    for key, values in differing.items():
        whole = [str(value) for value in values]
        short = [shortened(value, _SHOWN) for value in whole]
        shown = whole if short[0] == short[1] else short
        parts.append(f"{key} ({shown[0]} and {shown[1]})")
    return ", ".join(parts)
