"""PEFT's patterns for modules: matched as PEFT matches them, without an engine that may never end."""

from __future__ import annotations

import pytest
from lmeval_screener.weights.adapters.patterns import UnknownPattern, first_match
from peft.utils.other import get_pattern_key

NAMES = [
    "lm_head",
    "model.lm_head",
    "lm_headx",
    "head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.12.self_attn.k_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.mlp.experts.gate_up_proj",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "lm_head",
        "^lm_head$",
        "lm.head",
        "head",
        "lm_head.",
        "lm_heady?x?",
        ".*",
        r".*\.gate_up_proj",
        r"model\.layers\.\d+\.self_attn\.q_proj",
        r"^model\.layers\.(0|1)\.mlp\.(?:up|down)_proj$",
        r"layers\.[0-3]\..*",
        r"[^.]+_proj",
        r"\w+",
        "q_proj|k_proj",
        r"(q|k)_proj",
        "1.mlp.up_proj",
    ],
)
def test_as_peft_matches(pattern):
    for name in NAMES:
        # PEFT returns the name itself where no pattern matches.
        matches = get_pattern_key([pattern, "other"], name) == pattern or name == pattern
        assert (first_match([pattern], name) == pattern) is matches, name


def test_the_first_of_several_counts():
    patterns = ["k_proj", r".*_proj", "q_proj"]
    name = "model.layers.0.self_attn.q_proj"
    assert first_match(patterns, name) == get_pattern_key(patterns, name) == r".*_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+)+!",
        "(a*)*b",
        "a{3}",
        "(?=x)x",
        r"\bq",
        "(?i)lm",
        r"(a)\1",
        "^a|b",
        "(^a|b)",
        "[",
        "a" * 201,
        "(a|b)" * 6,
    ],
)
def test_other_expressions_are_refused(pattern):
    with pytest.raises(UnknownPattern):
        first_match([pattern], "a" * 40)


def test_many_repetitions_end():
    assert first_match([".*" * 99 + "!"], "a." * 400) is None
