"""What decides on tied embeddings, against the classes of the installed transformers."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from lmeval_screener.weights.architectures import TYING, class_ties, levels  # noqa: E402
from test_architectures import REFUSED, SETTINGS  # noqa: E402
from tiny_classes import Case, cases, tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STATES = (None, False, True)
_INNER = ("text_config", "language_config", "llm_config", "thinker_config")
#: One of each rule; all others are slow.
FAST = (
    "qwen2_5_vl",
    "llava",
    "hunyuan_vl",
    "llama4",
    "blip-2",
    "mllama",
    "qwen3_vl",
    "mistral3",
    "llama",
)
#: BERT's kind, whose head no other test reads; and Gemma 3's class with another's configuration.
_OTHERS = [*" ".join(REFUSED.values()).split(), "shieldgemma2"]


def with_states(config: dict[str, Any], outer: bool | None, inner: bool | None) -> dict[str, Any]:
    """config.json with ``tie_word_embeddings`` as given on each of its levels, or without it."""
    changed = copy.deepcopy(config)
    places = [changed, *(changed[key] for key in _INNER if isinstance(changed.get(key), dict))]
    for place, value in zip(places, (outer, inner), strict=False):
        place.pop("tie_word_embeddings", None)
        if value is not None:
            place["tie_word_embeddings"] = value
    return changed


def ties(model_class: Any, config: dict[str, Any]) -> bool:
    """Whether the class ties by this config.json, on the meta device; one that refuses to tie does not."""
    try:
        made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    except Exception as error:
        if "tie_word_embeddings is not support" not in str(error):
            raise
        return False
    with torch.device("meta"):
        model = model_class(made)
    return bool(model.all_tied_weights_keys)


def marked(case: Case) -> Any:
    marks = () if case.model_type in FAST else pytest.mark.slow
    return pytest.param(case, marks=marks, id=f"{case.model_type}-{case.name}")


@pytest.mark.parametrize(
    "case", [marked(case) for case in cases() if case.model_type not in _OTHERS]
)
def test_a_class_ties_as_the_table_says_in_every_state_of_both_levels(case):
    try:
        config = tiny(case, SETTINGS.get(case.model_type, {})).config.to_dict()
        ties(getattr(transformers, case.name), config)
    except Exception as error:
        pytest.skip(f"{case.name} cannot be built here: {error!r}")
    inner = STATES if len(levels(config)) > 1 else (None,)
    wrong = {}
    for states in product(STATES, inner):
        changed = with_states(config, *states)
        right = ties(getattr(transformers, case.name), changed)
        if class_ties(changed) is not right:
            wrong[states] = right
    assert wrong == {}


def test_every_rule_of_the_table_has_a_fast_case():
    assert {TYING[name] for name in FAST if name in TYING} == set(TYING.values())
