"""Tensor names as a loader reads them, before anything is chosen by them.

``from_pretrained`` of transformers 5.24 knows a tensor by the name that its class has, with that
class's prefix (``model.`` for most) added or taken off once, and by no other: whatever stands under
another name is left out, and its module starts at random, without an error. A checkpoint that would
lose its head, its final norm or a layer in this way is refused here, by a sentence with the cause
and the step that mends it.

Sources: transformers 5.24, ``output_loading_info`` of tiny checkpoints under each kind of name;
peft 0.21, ``tuners`` and ``utils/other.py``; torch 2.13, ``_dynamo/eval_frame.py``,
``distributed/fsdp``, ``nn/parallel``; SafeAILab's EAGLE and vllm's ``config/speculative.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lmeval_screener.errors import ScreeningError, cannot
from lmeval_screener.weights.architectures import (
    EMBEDDINGS,
    FINAL_NORMS,
    HEADS,
    NORMS,
    NORMS_WITHOUT_WEIGHT,
    PEFT_WORDS,
    TABLES,
    WRAPPERS,
    is_of_model,
    levels,
    model_types,
    stored_name,
)

#: A tensor's shape; None where the header that holds it was not read.
Shape = tuple[int, ...] | None


_UNWRAP = (
    "save the model inside the wrapper, for example with "
    "`accelerator.unwrap_model(model).save_pretrained(FOLDER)`"
)
_GATHER = (
    "gather the weights when saving: "
    "`model.save_pretrained(FOLDER, state_dict=accelerator.get_state_dict(model))`, or join the "
    "shards with `accelerate merge-weights`"
)
_MERGE = "merge the adapter into its base: `model.merge_and_unload().save_pretrained(FOLDER)`"
_FSDP = ("it was saved from a model wrapped by FSDP", _GATHER)
_FLATTENED = ("it was saved from the flattened parameters of FSDP", _GATHER)
_RECOMPUTED = ("it was saved from layers wrapped for activation checkpointing", _GATHER)
#: Parts that no class has, wherever they stand in a name: how they came there, and the command that saves the
#: model without them.
_ANYWHERE = {
    "_orig_mod": (
        "it was saved from a compiled model",
        "save `model._orig_mod`: `model._orig_mod.save_pretrained(FOLDER)`",
    ),
    "_fsdp_wrapped_module": _FSDP,
    "_fpw_module": _FSDP,
    "_flat_param": _FLATTENED,
    "flat_param_0": _FLATTENED,
    "_checkpoint_wrapped_module": _RECOMPUTED,
    "_checkpoint_wrapped_model": _RECOMPUTED,
    "_forward_module": ("it was saved from a model wrapped by Lightning or DeepSpeed", _UNWRAP),
}
_PEFT = "base_model.model"
#: Beginnings of all names of a wrapped model, likewise.
_IN_FRONT = {
    _PEFT: ("it was saved from a PEFT model", _MERGE),
    "module": ("it was saved from a model wrapped by DDP, DataParallel or DeepSpeed", _UNWRAP),
    "_module": (
        "it was saved from a model wrapped by Opacus",
        "save the model inside it: `model._module.save_pretrained(FOLDER)`",
    ),
}
#: How parts of the names of a PEFT model begin whose adapters were not merged.
_UNMERGED = (*PEFT_WORDS, "prompt_encoder")
#: Types that store adapters of their own with each layer.
_WITH_ADAPTERS = ("phi4mm", "phi4_multimodal")
#: Of a draft: the maps between its vocabulary and the target's, and the layer over the target's states.
_DRAFT_MAPS = ("d2t", "t2d")
_DRAFT_INPUTS = ("fc.weight", "model.fc.weight")
_DRAFT_CLASSES = re.compile(r"Eagle3?$|^Medusa|Speculator|DraftModel")
#: Heads of models that score, classify or estimate, and their classes: reward and value models, probes.
_OTHER_HEADS = tuple(TABLES["other_heads"].split())
_OTHER_CLASSES = re.compile(
    r"For(Sequence|Token)Classification|ForQuestionAnswering|RewardModel|ForScore|ForTextEncoding|ValueHead"
)
#: Settings of classes whose rows are narrower than ``hidden_size``.
_OTHER_WIDTHS = ("word_embed_proj_dim", "embedding_size", "emb_dim")
_LAYERS = ("layers", "h", "blocks")
_LAYER = re.compile(r"(?P<stem>(?:[A-Za-z_]\w*\.)*?(?:layers|h|blocks))\.(?P<number>\d{1,6})\.")
#: Numbers of layers in configurations; the least that is stated counts.
_LAYER_COUNTS = ("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
#: Types that leave layers out by their configuration.
_WITH_HOLES = ("nemotron-nas",)
_INCOMPLETE = (
    "if the copy is incomplete, download it again; otherwise save the model again with "
    "save_pretrained"
)
#: Types whose own names have a wrapper's part behind the prefix.
_INSIDE = {"inkling2_text": "llm", "inkling2_loop_text": "llm"}
#: Prefix of stored names by ``model_type``, where it is not ``model.``.
_PREFIXES: dict[str, str] = {}
for _prefix, _types in TABLES["prefixes"].items():
    _PREFIXES |= dict.fromkeys(_types.split(), f"{_prefix}.")
#: Beginnings of a head's names, which have no prefix.
_OF_HEADS = (
    *(
        name.removesuffix("weight")
        for name in HEADS
        if not name.startswith(("model.", "transformer."))
    ),
    "decoder.bias",
)
#: Parts of the names of prefixes and wrappers.
_OF_WRAPPERS = set(".".join((*WRAPPERS, *_PREFIXES.values())).split("."))


def _inner_parts() -> set[str]:
    """First parts of names behind their prefix."""
    parts = set(_LAYERS)
    for name in (*EMBEDDINGS, *FINAL_NORMS):
        for prefix in ("model.", *_PREFIXES.values()):
            parts.add(name.removeprefix(prefix).partition(".")[0])
    return parts - _OF_WRAPPERS


_INNER = _inner_parts()


def loaded_name(name: str, model_type: str = "") -> str:
    """Return the name under which transformers loads a stored tensor.

    If the prefix of the model's class, such as ``model.``, is missing, it is added; if it occurs
    twice, one is removed.

    Args:
        name: The name as stored.
        model_type: The ``model_type`` of config.json, if the model is a plain language model. The
            prefix is ``model.`` for an unknown type.

    >>> [loaded_name(name) for name in ("layers.0.mlp.up.weight", "model.model.norm.weight")]
    ['model.layers.0.mlp.up.weight', 'model.norm.weight']
    """
    prefix = _PREFIXES.get(model_type, "model.")
    inner = name.removeprefix(prefix)
    if inner != name:
        is_doubled = inner.startswith((prefix, *_OF_HEADS))
        return inner if is_doubled else name
    is_bare = name.partition(".")[0] in _INNER and not name.startswith(_OF_HEADS)
    return prefix + name if is_bare else name


def refuse_names(
    shapes: Mapping[str, Shape], config: Mapping[str, Any], *, by_transformers: bool = True
) -> None:
    """Raise an error if a loader would initialise the head, the final norm or a layer at random.

    Args:
        shapes: The shape of every tensor by its stored name; None for a shape that is not known.
        config: The content of config.json; empty if there is none.
        by_transformers: Whether transformers loads the checkpoint; False for files of mlx_lm, in
            which names may begin with the prefix of a wrapper, such as ``language_model.``.

    Raises:
        ScreeningError: ``RandomWeights``; or ``NoOutputProjection`` for a draft model of
            speculative decoding, whose rows belong to the vocabulary of another model.
    """
    _refuse_drafts(shapes, config)
    _refuse_wrappers(shapes, config)
    _refuse_other_case(shapes)
    refuse_placeholders(shapes)
    model_type = _plain_type(config)
    if model_type and by_transformers:
        _refuse_foreign_parts(shapes, model_type)
    _refuse_missing_layers(shapes, config)


def refuse_part(
    name: str, shape: Sequence[int], config: Mapping[str, Any], *, more_rows: bool = False
) -> None:
    """Raise an error if the shape of an output projection or embedding differs from config.json.

    Args:
        name: The name of the matrix.
        shape: Number of rows and width of the matrix, (v, d).
        config: The content of config.json.
        more_rows: Whether the matrix may have more rows than ``vocab_size``, as the input embedding
            of some classes has.

    Raises:
        ScreeningError: ``NoOutputProjection``: the shapes differ, so transformers would not load
            the model. This is raised only for plain language models of a known class.
    """
    if not _plain_type(config) or len(shape) != 2 or any(key in config for key in _OTHER_WIDTHS):
        return
    stored_rows, stored_width = shape
    rows = _positive(config.get("vocab_size"), stored_rows)
    width = _positive(config.get("hidden_size"), stored_width)
    has_rows = stored_rows == rows or (more_rows and stored_rows > rows)
    if has_rows and stored_width == width:
        return
    step = "correct config.json, or save the model again with save_pretrained"
    if stored_rows < rows or stored_width < width:
        step = (
            "if the matrix is one process's slice under tensor parallelism, save the gathered "
            "model with save_pretrained; otherwise correct config.json"
        )
    raise cannot(
        "NoOutputProjection",
        f"{name} is {stored_rows} × {stored_width}, where config.json says {rows} × {width}: "
        "transformers does not load it",
        step,
    )


def _positive(stated: Any, otherwise: int) -> int:
    if type(stated) is int and stated > 0:
        return stated
    return otherwise


def notes_on(names: Collection[str], config: Mapping[str, Any]) -> list[str]:
    """Return a list with a remark if a checkpoint was saved as a reward model or a classifier.

    The list is empty for any other checkpoint. These models have a head other than the output
    projection, which is recognised by the tensors' names or by ``architectures`` in config.json.

    Args:
        names: The names of all stored tensors.
        config: The content of config.json; empty if there is none.
    """
    heads = [f"{name} is stored" for name in _OTHER_HEADS if name in names]
    classes = filter(_OTHER_CLASSES.search, _architectures(config))
    stated = [f"config.json says {name}" for name in classes]
    if not heads and not stated:
        return []
    signs = " and ".join(heads[:1] + stated[:1])
    return [
        f"{signs}; the checkpoint is read as AutoModelForCausalLM loads it, without the head for "
        "scores or classes"
    ]


def _architectures(config: Mapping[str, Any]) -> list[str]:
    stated = config.get("architectures")
    if not isinstance(stated, list):
        return []
    return [name for name in stated if isinstance(name, str)]


def _random(reason: str, step: str) -> ScreeningError:
    return cannot("RandomWeights", reason, step)


def _plain_type(config: Mapping[str, Any]) -> str:
    """``model_type`` of a language model that no other holds, if its class is known; else empty."""
    types = model_types(config)
    is_plain = len(levels(config)) == 1
    if not is_plain or not types or types[0] not in NORMS:
        return ""
    return types[0]


def _refuse_drafts(names: Collection[str], config: Mapping[str, Any]) -> None:
    parts = [name for name in _DRAFT_MAPS if name in names or f"model.{name}" in names]
    size = config.get("draft_vocab_size")
    if isinstance(size, int):
        parts.append(f"draft_vocab_size {size}")
    parts += filter(_DRAFT_CLASSES.search, _architectures(config))
    if _plain_type(config):
        parts += [name for name in _DRAFT_INPUTS if name in names]
    if parts:
        raise cannot(
            "NoOutputProjection",
            f"it is a draft model for speculative decoding ({', '.join(parts[:2])}), which needs the "
            "hidden states of another model",
            "screen the model that it drafts for",
        )


def _refuse_wrappers(names: Collection[str], config: Mapping[str, Any]) -> None:
    """Refuse what programs are known to put into names, wherever it stands."""
    has_adapters = any(name in _WITH_ADAPTERS for name in model_types(config))
    unmerged = ""
    seen: set[str] = set()  # hundreds of thousands of names have a few hundred parts
    for name in names:
        if f".{_PEFT}." in name:
            raise _wrapped(_PEFT, name)
        for part in set(name.split(".")) - seen:
            seen.add(part)
            if part in _ANYWHERE:
                raise _wrapped(part, name)
            if not unmerged and not has_adapters and part.startswith(_UNMERGED):
                unmerged = name
    if unmerged:
        raise _random(f"its adapter was not merged ({unmerged})", _MERGE)
    for part in _IN_FRONT:
        wrapped = [name for name in names if name.startswith(f"{part}.")]
        inside = {re.sub(rf"^({part}\.)+", "", name) for name in wrapped}
        if wrapped and (len(wrapped) == len(names) or stored_name(inside, (*HEADS, *EMBEDDINGS))):
            raise _wrapped(part, wrapped[0])


def _refuse_other_case(names: Collection[str]) -> None:
    """Refuse names of a head or embedding that are known but for capital letters."""
    known = (*HEADS, *EMBEDDINGS)
    if stored_name(names, known):
        return
    lowered = {name.lower(): name for name in names}
    name = stored_name(lowered, known)
    if name is not None and lowered[name] != name:
        step = "give the tensors the names of the model's class, and save them again"
        raise _random(
            "its tensors' names have other capital letters than transformers expects "
            f"({lowered[name]} in place of {name})",
            step,
        )


def _wrapped(part: str, name: str) -> ScreeningError:
    """The error for a name with a part that a wrapper puts there."""
    cause, step = _ANYWHERE.get(part) or _IN_FRONT[part]
    where = "begin with" if name.startswith(part) else "contain"
    reason = f"{cause}, so its tensors' names {where} `{part}.`, which transformers does not expect"
    return _random(reason, step)


def refuse_placeholders(shapes: Mapping[str, Shape]) -> None:
    """Raise an error if tensors have the shape (0,), which DeepSpeed's ZeRO-3 leaves behind.

    Raises:
        ScreeningError: ``RandomWeights``.
    """
    empty = [name for name, shape in shapes.items() if shape == (0,) and name.endswith(".weight")]
    if empty:
        raise _random(
            f"it holds placeholders of shape [0] in place of weights ({len(empty)} of its "
            f"{len(shapes)} tensors, such as {empty[0]}): DeepSpeed ZeRO-3 kept the numbers in "
            "other files",
            "run `python zero_to_fp32.py . OUT --safe_serialization` in the checkpoint's folder, put "
            "config.json and the tokenizer into OUT and screen OUT; or save the model again with "
            "stage3_gather_16bit_weights_on_model_save",
        )


def _refuse_foreign_parts(stored: Collection[str], model_type: str) -> None:
    """Refuse a head, embedding or norm under a name that a plain language model's class does not have."""
    prefix = _PREFIXES.get(model_type, "model.")
    for candidates in (HEADS, EMBEDDINGS, FINAL_NORMS):
        name = stored_name(stored, candidates) or _at_the_end(stored, candidates)
        if name is None:
            continue
        loaded = loaded_name(name, model_type)
        parts = loaded.removeprefix(prefix).split(".")
        is_head = loaded.startswith(_OF_HEADS)
        is_inside = loaded.startswith(prefix) and parts[0] not in _OF_WRAPPERS
        if not is_head and not is_inside and parts[0] != _INSIDE.get(model_type):
            raise _foreign(name, candidates)
    stems: set[str] = set()
    for name in stored:
        match = _LAYER.match(name)
        if match:
            stems.add(match["stem"])
    if stems and not any(loaded_name(f"{stem}.", model_type).startswith(prefix) for stem in stems):
        raise _foreign(f"{min(stems)}.0", _LAYERS)


def _at_the_end(stored: Iterable[str], candidates: Iterable[str]) -> str | None:
    """A stored name that ends in a candidate, behind parts that no wrapper is known to have."""
    ends = tuple(f".{candidate}" for candidate in candidates)
    names: list[str] = []
    for name in stored:
        if name.endswith(ends) and is_of_model(name):
            names.append(name)
    return min(names, default=None)


def _foreign(name: str, candidates: Iterable[str]) -> ScreeningError:
    tails: list[str] = []
    for candidate in candidates:
        tail = f".{candidate}"
        if tail in name:
            tails.append(tail)
    beginning = name
    if tails:
        longest = max(tails, key=len)
        beginning, _, _ = name.rpartition(longest)
    return _random(
        f"its tensors' names begin with `{beginning}.`, which the model's class does not have: "
        "transformers would leave these tensors out",
        "save only the language model with save_pretrained, or give the tensors the names of its "
        "class",
    )


def _refuse_missing_layers(stored: Collection[str], config: Mapping[str, Any]) -> None:
    """Refuse a known class's checkpoint without its final norm, or with fewer layers than it should have."""
    types = model_types(config)
    if not types or types[-1] not in NORMS or types[-1] in _WITH_HOLES:
        return
    norm = stored_name(stored, FINAL_NORMS)
    is_known = types[0] in NORMS and types[-1] not in NORMS_WITHOUT_WEIGHT
    if norm is None and is_known and any(_LAYER.match(name) for name in stored):
        raise _random(
            "its final norm is not stored under a name that the model's class has", _INCOMPLETE
        )
    place = norm or stored_name(stored, EMBEDDINGS) or ""
    parent = place.removesuffix(".weight").rpartition(".")[0]
    stems = {f"{parent}.{word}".removeprefix(".") for word in _LAYERS}
    numbers: set[int] = set()
    stem = ""
    for name in stored:
        match = _LAYER.match(name)
        if match and match["stem"] in stems:
            stem = match["stem"]
            numbers.add(int(match["number"]))
    if not numbers:
        return
    level = levels(config)[-1]
    counts: list[int] = []
    for key in _LAYER_COUNTS:
        stated = level.get(key)
        if type(stated) is int:
            counts.append(stated)
    count = max(min(counts, default=0), max(numbers) + 1)
    missing = next((number for number in range(count) if number not in numbers), None)
    if missing is not None:
        reason = (
            f"layer {missing} of {count} (counted from 0) is not stored: no tensor's name begins "
            f"with `{stem}.{missing}.`"
        )
        raise _random(reason, _INCOMPLETE)
