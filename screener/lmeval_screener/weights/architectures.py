"""The stored tensor of the output projection: its names by architecture, and the rule of choice.

The names are data, in ``architectures.yaml``: a new architecture is a line there.

The rule is transformers' own: a stored head if there is one (with a warning if config.json says
*tied*); else the input embedding, if config.json or the architecture's default ties the two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from lmeval_dispersion.report.declared import some
from lmeval_screener.budgets import bundled_yaml
from lmeval_screener.errors import cannot

#: The tables of architectures.yaml, which explains each.
TABLES: dict[str, Any] = bundled_yaml(Path(__file__).with_name("architectures.yaml"))
HEADS = tuple[str, ...](TABLES["heads"])
EMBEDDINGS = tuple[str, ...](TABLES["embeddings"])
FINAL_NORMS = tuple[str, ...](TABLES["final_norms"])
WRAPPERS = tuple[str, ...](TABLES["wrappers"])
_HEAD_BIASES = (
    *(name.removesuffix("weight") + "bias" for name in HEADS),
    "decoder.bias",  # ModernBERT
    "pred_layer.proj.bias",  # XLM
)
#: A factor for each token's logit (Dory), stored where the head is tied too.
_LOGIT_SCALE = ("lm_head.logit_scale",)

NormKind = Literal["rms", "layer"]
#: Kind of the final norm, and whether it multiplies by 1 + its weight, by ``model_type``.
NORMS: dict[str, tuple[NormKind, bool]] = {}
for _norm in TABLES["norms"]:
    NORMS |= dict.fromkeys(_norm["types"].split(), (_norm["kind"], _norm["plus_one"]))
#: Architectures whose final norm has no weight.
NORMS_WITHOUT_WEIGHT = frozenset(TABLES["norms_without_weight"])

#: What decides on tied embeddings, and whether a silent class ties, by the outer ``model_type``.
TYING: dict[str, tuple[Literal["outer", "inner", "either", "never"], bool]] = {}
for _rule in TABLES["tying"]:
    TYING |= dict.fromkeys(_rule["types"].split(), (_rule["by"], _rule["silent"]))
#: The format that mlx_lm's files state.
MLX = "mlx"
#: Types for which mlx_lm stores the whole multiplier of each norm, 1 + its weight.
WHOLE_IN_MLX = frozenset(TABLES["whole_in_mlx"].split())

#: Parts of names that do not belong to the model's own head or embedding.
NOT_THE_MODEL = tuple(TABLES["not_the_model"].split())

#: How PEFT's own words in names begin.
PEFT_WORDS = tuple(TABLES["peft_words"].split())
#: Values of ``model_type`` whose class does *not* tie when config.json is silent; all other known ones tie.
UNTIED_BY_DEFAULT = frozenset(TABLES["untied"].split())

#: Scales that are applied, by their names next to a ``weight``.
SCALES = ("weight_scale", "weight_scale_inv")
#: Tensors next to a matrix that do not change its rows: scales of its *input*, a bias, further rows.
_HARMLESS = re.compile(
    r"bias|embed_scale|(input|output)_(scale|scale_inv|zero_point|global_scale|amax)|"
    r"additional_(fc|embedding)\.(weight|bias)"
)
#: Tensors instead of a ``weight`` that is packed, split or not merged with its adapter.
_PACKED = re.compile(
    r"(qweight|q_weight|qzeros|scales|q_scale\w*|g_idx|weight_packed|weight_scale\w*|weight_zero_point|weight\..+|"
    r"_weight_\w+|SCB|W_q|trellis|suh|svh|codes|codebooks|absmax|weight_[gvq]\w*|tq_\w+|parametrizations\..+|"
    r"base_layer\..+|lora_\w+(\..+)?)"
)
#: Keys of a language model's configuration inside that of a larger model.
_INNER_CONFIGS = ("text_config", "language_config", "llm_config", "thinker_config")
#: Start of the warning that a head is stored although the configuration ties it.
SAYS_TIED = "config.json says that embeddings are tied"


def choose_tensor(
    names: Iterable[str], config: Mapping[str, Any], warnings: list[str]
) -> tuple[str, bool]:
    """Choose the stored tensor that serves as the output projection.

    Args:
        names: The names of all stored tensors.
        config: The content of config.json; empty if there is none.
        warnings: Receives a sentence for each point on which config.json is silent or contradicts
            the stored tensors.

    Returns:
        The tensor's name; and whether it is the input embedding, which serves as the head because
        the two are tied.

    Raises:
        ScreeningError: ``NoOutputProjection``: no output projection is stored, or each logit is
            multiplied by a learned scale. ``QuantizedTensor``: the matrix is stored packed or in
            parts.
    """
    stored = set(names)
    scale = stored_name(stored, _LOGIT_SCALE)
    if scale is not None:
        reason = (
            f"each logit is multiplied by a learned {scale}, which the screen's figures leave out"
        )
        raise cannot("NoOutputProjection", reason, "screen models of another architecture")
    head = stored_name(stored, HEADS) or _only_head(stored)
    ties = _says_tied(levels(config))
    if head is not None:
        if ties:
            warnings.append(
                f"{SAYS_TIED}, but {head} is stored: the stored head was read, "
                "as transformers 5 does (transformers 4 would use the input embedding)"
            )
        return head, False
    embedding = stored_name(stored, EMBEDDINGS)
    packed = _packed(stored, HEADS)
    if packed is None and embedding is None:
        packed = _packed(stored, EMBEDDINGS)
    if packed is not None:
        reason = f"its output projection is stored packed or in parts ({packed})"
        raise cannot("QuantizedTensor", reason, "screen the unquantised model")
    if embedding is None:
        first_names = some(sorted(stored), 3) or "none"
        raise cannot(
            "NoOutputProjection",
            f"none of its {len(stored)} tensors ({first_names}) is a known output projection or "
            "input embedding",
            "check that it is a causal language model",
        )
    types = model_types(config)
    if ties is None and not types:
        warnings.append(
            "config.json does not say whether embeddings are tied, and no output projection is "
            f"stored: the input embedding {embedding} was read"
        )
    if not class_ties(config):
        why = "config.json says that embeddings are not tied"
        if ties is not False:
            why = f"{types[0]} does not tie embeddings with this config.json"
        raise cannot(
            "NoOutputProjection",
            f"{why}, but no output projection is stored, only {embedding}: transformers would "
            "initialise the head at random",
            "check whether the checkpoint is a model without a head, or whether its upload is "
            "incomplete",
        )
    return embedding, True


def stored_name(stored: Collection[str], candidates: Iterable[str]) -> str | None:
    """Return the stored name of the first candidate that is stored; None if no candidate is.

    Args:
        stored: The names of all stored tensors.
        candidates: Names without the prefix of a wrapper, such as ``language_model.``; a stored
            name may have such a prefix.
    """
    for candidate in candidates:
        for wrapper in WRAPPERS:
            if wrapper + candidate in stored:
                return wrapper + candidate
    return None


def head_bias(stored: Collection[str]) -> list[str]:
    """Return a list with a warning if the output projection has a bias, else an empty list.

    Args:
        stored: The names of all stored tensors.
    """
    bias = stored_name(stored, _HEAD_BIASES)
    if bias is None:
        return []
    return [f"the output projection has a bias ({bias}), which the screen's figures leave out"]


def companions(name: str, stored: Iterable[str]) -> list[str]:
    """Return the tensors stored with the matrix ``name`` that change its rows, such as its scales.

    Each is given by its name without the part that it shares with the matrix: ``weight_scale`` for
    ``lm_head.weight_scale`` next to ``lm_head.weight``. Tensors that are not in `SCALES` come
    first. The list is empty if the matrix stands alone.
    """
    stem = name.removesuffix("weight")
    words = set()
    for other in stored:
        word = other.removeprefix(stem)
        if other not in (word, name) and not _HARMLESS.fullmatch(word):
            words.add(word)
    return sorted(words, key=lambda word: (word in SCALES, word))


def model_types(config: Mapping[str, Any]) -> list[str]:
    """Return the ``model_type`` of config.json, followed by those of nested language models.

    Entries that are missing or not texts are left out.
    """
    types: list[str] = []
    for level in levels(config):
        model_type = level.get("model_type")
        if isinstance(model_type, str):
            types.append(model_type)
    return types


def norm_of_type(model_type: str, config: Mapping[str, Any]) -> tuple[NormKind, bool, bool] | None:
    """Return how an architecture's final norm works, or None if the architecture is not known.

    Args:
        model_type: The ``model_type`` of the language model.
        config: The content of config.json.

    Returns:
        Three values: the kind of the norm, ``rms`` or ``layer``; whether it multiplies by 1 + its
        weight rather than by its weight; and whether it has a weight.
    """
    if model_type == "hf_olmo":
        # OLMo as first released, and DataDecide: by settings (olmo/model.py).
        kinds: dict[str, NormKind] = {"default": "layer", "low_precision": "layer", "rms": "rms"}
        kind = kinds.get(str(config.get("layer_norm_type")))
        has_weight = config.get("layer_norm_with_affine")
        if kind is None or not isinstance(has_weight, bool):
            return None
        return kind, False, has_weight
    if model_type == "chatglm" and config.get("rmsnorm") is True:
        return "rms", False, True
    norm = NORMS.get(model_type)
    if norm is None:
        return None
    kind_of_norm, plus_one = norm
    return kind_of_norm, plus_one, model_type not in NORMS_WITHOUT_WEIGHT


def levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return config.json, followed by the configurations of language models nested in it."""
    found = [config]
    for key in _INNER_CONFIGS:
        level = config.get(key)
        if isinstance(level, dict):
            found.append(level)
    return found


def is_of_model(name: str) -> bool:
    """Whether a tensor or module belongs to the language model itself, outside its numbered layers.

    The name decides. Modules inside a numbered layer, in an image encoder, or in a head that
    predicts further tokens do not belong to it.
    """
    words = name.split(".")
    if any(map(str.isdigit, words)):
        return False  # inside a layer
    return not any(part in name for part in NOT_THE_MODEL)


def _packed(stored: set[str], candidates: tuple[str, ...]) -> str | None:
    """Return a stored tensor that holds one of the candidates in packed form, or None."""
    stems = [w + name.removesuffix("weight") for name in candidates for w in WRAPPERS]
    for name in sorted(stored):
        stem = next((stem for stem in stems if name.startswith(stem)), name)
        if _PACKED.fullmatch(name.removeprefix(stem)):
            return name
    return None


def _only_head(stored: set[str]) -> str | None:
    """Return the head under an unknown wrapper if there is exactly one; else None."""
    heads: list[str] = []
    for name in stored:
        if name.endswith(".lm_head.weight") and is_of_model(name):
            heads.append(name)
    if len(heads) != 1:
        return None
    return heads[0]


def class_ties(config: Mapping[str, Any]) -> bool:
    """Whether the model's class ties the output projection to the input embedding.

    The entries of config.json that the class reads decide; if they say nothing, the default of the
    class does. Some classes never tie, whatever config.json says. For a class that is not known,
    any entry counts; without one, it is assumed to tie, except for the types in
    `UNTIED_BY_DEFAULT`.
    """
    types = model_types(config)
    stated = _says_tied(levels(config))
    rule = TYING.get(types[0]) if types else None
    if rule is None:
        if stated is not None:
            return stated
        return UNTIED_BY_DEFAULT.isdisjoint(types)
    by, silent = rule
    outer_level, *inner_levels = levels(config)
    outer = _says_tied([outer_level])
    inner = _says_tied(inner_levels)
    by_outer = silent if outer is None else outer
    by_inner = silent if inner is None else inner
    answers = {"outer": by_outer, "inner": by_inner, "either": by_outer or by_inner, "never": False}
    return answers[by]


def _says_tied(levels: Iterable[Mapping[str, Any]]) -> bool | None:
    """Return the first entry on tied embeddings in levels of config.json; None without one."""
    for level in levels:
        # OLMo as first released has its own key for it, and its class reads no other.
        for key in ("weight_tying", "tie_word_embeddings"):
            value = level.get(key)
            if isinstance(value, bool):
                return value
    return None
