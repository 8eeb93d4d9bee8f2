"""The scale of a checkpoint: by family, name, sibling or count, whatever the vocabulary's padding."""

from __future__ import annotations

import cProfile
import math
import pstats
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener.ranking import _SCALES, _counts, named_base, scale_names
from lmeval_screener.targets.families import load_families
from screenings import TOKENS, screened

# label, stored parameters, rows, width, tied and rows of the tokenizer, as their configurations give them
REAL = {
    "Qwen/Qwen2.5-0.5B": ("0.5B", 494_032_768, 151936, 896, True, 151665),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "1.5B",
        1_777_088_000,
        151936,
        1536,
        False,
        151665,
    ),
    "Qwen/Qwen2.5-7B": ("7B", 7_615_616_512, 152064, 3584, False, 151665),
    "meta-llama/Llama-2-7b-hf": ("7B", 6_738_415_616, 32000, 4096, False, 32000),
    "meta-llama/Llama-3.1-8B": ("8B", 8_030_261_248, 128256, 4096, False, 128256),
    "HuggingFaceTB/SmolLM2-135M": ("135M", 134_515_008, 49152, 576, True, 49152),
    "openai-community/gpt2": ("124M", 124_439_808, 50257, 768, True, 50257),
    "EleutherAI/pythia-70m": ("70M", 70_426_624, 50304, 512, False, 50277),
    "EleutherAI/pythia-160m": ("160M", 162_322_944, 50304, 768, False, 50277),
    "EleutherAI/pythia-1.4b": ("1.4B", 1_414_647_808, 50304, 2048, False, 50277),
    "EleutherAI/pythia-12b": ("12B", 11_846_072_320, 50688, 5120, False, 50277),
}


def test_every_scale_of_the_bundled_families_is_known_by_count():
    scales = {scale for family in load_families().values() for scale in family.scales}
    by_name = {"6.9B", "1.8B", "2.7B", "3.8B", "8x7B"}
    assert scales - by_name <= set(_SCALES.values())


def size(
    name="./mine",
    parameters=130_000_000,
    rows=50304,
    width=768,
    tied=True,
    vocabulary=50277,
    **more,
):
    read = screened(name, resolution=replace(TOKENS, vocabulary=vocabulary), shape=(rows, width))
    target = replace(read.target, scale=more.get("stated"))
    return replace(read, target=target, parameters=parameters, tied=tied)


@pytest.mark.parametrize("repo", REAL)
@pytest.mark.parametrize("named", [True, False])
def test_real_checkpoints_read_as_they_are_called_by_name_and_by_count_alone(repo, named):
    label, *rest = REAL[repo]
    assert scale_names([size(repo if named else "./mine", *rest)]) == [label]
    parameters, rows, width, tied, vocabulary = rest
    padded = parameters + 1024 * width * (1 if tied else 2)
    assert scale_names([size("./mine", padded, rows + 1024, width, tied, vocabulary)]) == [label]


@given(st.integers(10**8, 10**11), st.integers(64, 1024), st.integers(0, 4096), st.booleans())
def test_the_same_weights_with_other_padding_are_one_group(parameters, width, padding, tied):
    padded = parameters + padding * width * (1 if tied else 2)
    plain = size("./a", parameters, 50277, width, tied)
    assert len(set(scale_names([plain, size("./b", padded, 50277 + padding, width, tied)]))) == 1


@pytest.mark.parametrize(
    ("name", "parameters", "scale"),
    [
        ("org/model-7B", 500_000_000, "0.5B"),  # more than twice off: the name is of something else
        ("org/model-500m", 494_000_000, "0.5B"),
        ("org/distilled-70b-to-8b", 8_030_000_000, "8B"),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, "8x7B"),
        ("Qwen/Qwen3-30B-A3B", 30_500_000_000, "30B"),
        ("./runs/lr1e-4", 1_100_000, "1.1M"),
        ("C:\\runs\\pythia-70m", 70_000_000, "70M"),
        ("org/model-3b", None, "3B"),
        ("org/model", None, "unknown"),
    ],
)
def test_a_size_in_the_name_counts_where_the_parameters_do_not_contradict_it(
    name, parameters, scale
):
    assert scale_names([size(name, parameters, 1000, 64, True, 1000)]) == [scale]


def test_what_has_no_size_in_its_name_joins_the_sibling_of_its_count():
    gemma = ("google/gemma-2-2b", 2_614_341_888, 256000, 2304, True, 256000)
    mine = ("./mine", 2_614_341_888 + 4096 * 2304, 260096, 2304, True, 260096)
    assert scale_names([size(*gemma), size(*mine)]) == ["2B", "2B"]
    assert scale_names([size(*mine)]) == ["3B"]
    untied = ("./untied", 2_614_341_888 + 256000 * 2304, 256000, 2304, False, 256000)
    assert scale_names([size(*untied), size(*gemma)]) == ["2B", "2B"]
    assert scale_names([size(parameters=10)]) == ["unknown"]  # fewer than its matrix has
    assert scale_names([size("org/x-7B", 7_000_000_000, stated="8B")]) == [
        "8B"
    ]  # the family's word


def test_work_grows_with_the_checkpoints_not_with_their_square():
    """Where half have a size in their name, and all have other counts and other bases."""
    looks = []
    for count in (100, 400):
        seen = Counter()

        class Looked(SimpleNamespace):
            def __getattribute__(self, name, seen=seen):
                seen[name] += 1
                return super().__getattribute__(name)

        assert named_base([Looked(base=f"b/{i}", place=f"org/{i}") for i in range(count)]) == ""
        members = [
            size(f"./m-130M-{i}" if i % 2 else f"./m{i}", 130_000_000 + i) for i in range(count)
        ]
        profile = cProfile.Profile()
        assert set(profile.runcall(scale_names, members)) == {"130M"}
        looks.append((seen.total(), pstats.Stats(profile).total_calls))
    assert looks[1][0] < 5 * looks[0][0]
    assert looks[1][1] < 5 * looks[0][1]


@given(st.lists(st.tuples(st.integers(10**8, 3 * 10**8), st.booleans()), min_size=1, max_size=12))
def test_the_nearest_sibling_gives_its_scale(counts):
    """As one looks through all siblings."""
    members = [
        size(f"./m-{count / 1e6:.0f}M-x" if named else f"./m{at}", count)
        for at, (count, named) in enumerate(counts)
    ]
    names = scale_names(members)
    known = set()
    for member, name, (_, given_name) in zip(members, names, counts, strict=True):
        known |= {(math.log(_counts(member)[-1]), name)} if given_name else set()
    for member, name, (_, given_name) in zip(members, names, counts, strict=True):
        if not given_name and known:
            place = math.log(_counts(member)[-1])
            off, nearest = min((abs(place - other), scale) for other, scale in known)
            assert off > 0.04 or name == nearest
