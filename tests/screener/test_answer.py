"""The sentences of a screening: each on planted data that carry it, and not on data that do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.ranking.gap import gap
from lmeval_screener.ranking.ties import runs
from lmeval_screener.reports.answer import Ties, answer, course, names, skipped, spans, title
from lmeval_screener.reports.document import SEEDS
from lmeval_screener.result import Failed, Group, Result, Screened, TensorInfo, TokenInfo

from lmeval_dispersion.paths import data_folder


def member(name, rank, tied_with=None, *, family="fam", scale="7B", revision="a" * 40, step=None, gaps=None):
    G = SimpleNamespace(mean=2 - rank / 10, se=0.02)
    return Screened(
        repo=name,
        requested_revision=step,
        revision=revision,
        family=family,
        scale=scale,
        gaps=gaps or {"cosine": G},
        tensor=TensorInfo("lm_head.weight", "model.safetensors", "BF16", (9, 9), False),
        tokens=TokenInfo(10, 60, (), (), "single digits"),
        bytes_read=0,
        requests=0,
        seconds=0.0,
        rank=rank,
        ties=tied(rank, tied_with),
    )


def tied(rank, ends):
    """Ranks from the first to the last, without the own one."""
    return runs(i for i in range(ends[0], ends[1] + 1) if i != rank) if ends else ()


def result(members, failed=()):
    return Result("math", "reference", "cosine", tuple(members), tuple(failed), 0.0, 0, 0)


def ranking(*ranges):
    """Checkpoints a, b, c … with their ranges of tied ranks."""
    return result([member(chr(97 + i), i + 1, tied) for i, tied in enumerate(ranges)])


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([None], ["Only a (G 1.900) was screened; G orders siblings, and says nothing alone."]),
        ([None, None], ["Best: a (G 1.900), apart from all others.", "Evaluate first: a."]),
        ([(1, 2), (1, 2)], ["No checkpoint stands apart: a and b are tied; evaluate any."]),
        ([(1, 6)] * 6, ["No checkpoint stands apart: all 6 are tied; evaluate any."]),
        ([(1, 2), (1, 2), None], ["Best: a (G 1.900), tied with rank 2.", "Evaluate first: a, b."]),
        (
            [None, None, (3, 4), (3, 4), None],
            ["Best: a (G 1.900), apart from all others. Ranks 3–4 are tied.", "Evaluate first: a, b, c, d."],
        ),
        (
            [None, (2, 7), (2, 7), (2, 7), (2, 7), (2, 7), (2, 7)],
            ["Best: a (G 1.900), apart from all others. Ranks 2–7 are tied.",
             "Evaluate first: a, any 2 of ranks 2–7."],
        ),
        (
            [None, None, None, None, (5, 6), (5, 7), (6, 7)],
            ["Best: a (G 1.900), apart from all others. Ranks 5–6 and 6–7 are tied.",
             "Evaluate first: a, b, c."],
        ),
        (
            [None, *((2 * i, 2 * i + 1) for i in range(1, 6) for _ in "ab")],
            ["Best: a (G 1.900), apart from all others. Ranks 2–3, 4–5, 6–7 and 8–9 are tied, and 1 more "
             "run of ranks.", "Evaluate first: a, b, c."],
        ),
    ],
)  # fmt: skip
def test_the_answer_of_one_group(ranges, said):
    assert answer(ranking(*ranges)) == said


def test_a_tie_that_skips_a_rank_is_said_in_words_and_no_other():
    # 1 and 3 are tied across 2, which is apart from 1.
    found = ranking(None, (2, 3), (1, 3)).checkpoints
    found = [replace(found[0], ties=runs([3])), replace(found[1], ties=runs([3])), found[2]]
    group = result(found).groups[0]
    assert Ties(group).bands == [(1, 2)]
    assert skipped(group) == ["Rank 1 is tied with 3, though apart from 2."]
    assert skipped(ranking((1, 3), (1, 3), (1, 3)).groups[0]) == []
    assert skipped(ranking(None, (2, 3), (2, 4), (3, 4)).groups[0]) == []


def test_several_groups_get_a_sentence_each_up_to_four():
    members = [member(f"m{i}-{j}", j + 1, scale=f"{i}B") for i in range(6) for j in range(2)]
    said = answer(result(members))
    assert said[0] == "fam · 0B: Best: m0-0 (G 1.900), apart from all others."
    assert len(said) == 5
    assert said[4] == "2 more groups below."
    assert len(answer(result(members[:8]))) == 4


def test_nothing_screened_and_some_that_failed():
    failed = [Failed(f"org/{i}", None, "RepoNotFound", "none") for i in range(3)]
    assert answer(result([], failed)) == ["Nothing was screened: all 3 failed (3 RepoNotFound)."]
    assert answer(result([], failed[:1])) == [
        "Nothing was screened: the only checkpoint failed (RepoNotFound)."
    ]
    assert (
        answer(result([member("a", 1), member("b", 2)], failed))[-1]
        == "3 of 5 checkpoints could not be screened."
    )
    assert "could not" not in " ".join(answer(ranking(None, None)))


def test_a_training_is_called_by_its_model_and_its_members_by_their_steps():
    local = [member(f"/x/run1/checkpoint-{i}", 1, revision=None) for i in (20, 3)]
    last = member("/x/run1", 1, revision=None)
    (group,) = result([*local, last]).groups
    assert title(group) == "run1"
    assert list(names(group).values()) == ["checkpoint-3", "checkpoint-20", "final model"]
    (group,) = result([member("org/pythia", 1, step=f"step{i}") for i in (20, 3)]).groups
    assert title(group) == "pythia"
    # Two runs are no training; each member keeps as much of its path as tells it apart.
    mixed = [*local, member("/x/run2/checkpoint-3", 1, revision=None)]
    (group,) = result(mixed).groups
    assert (group.trajectory(), title(group)) == (None, "fam · 7B")
    assert list(names(group).values()) == [c.name for c in mixed]


def test_spans():
    assert spans([]) == ""
    assert spans(range(2, 59)) == "2–58"
    assert spans([9, 7, 8, 11]) == "7–9, 11"


# --- a training -----------------------------------------------------------------------------------------


def training(levels, seed=0, noise=0.02):
    """Gaps of a model whose domain tokens share a direction the less, the higher the level."""
    draw = np.random.default_rng(seed)
    domain, reference = draw.normal(size=(12, 32)), draw.normal(size=(60, 32))
    return [
        gap(
            domain + (1 - level) + noise * draw.normal(size=domain.shape),
            reference + noise * draw.normal(size=reference.shape),
        )
        for level in levels
    ]


@pytest.mark.parametrize(
    ("levels", "kind", "since"),
    [
        ([0.0, 0.2, 0.4, 0.6, 0.8], "rises", ""),
        ([0.0, 0.3, 0.6, 0.6, 0.6, 0.6], "rises", "step2"),
        ([0.8, 0.6, 0.4, 0.2, 0.0], "falls", ""),
        ([0.0, 0.3, 0.7, 0.4, 0.2], "peaks", ""),
        ([0.7, 0.4, 0.0, 0.3, 0.5], "dips", ""),
        ([0.3, 0.7, 0.0, 0.3], "peaks", ""),
        ([0.4, 0.4, 0.4, 0.4, 0.4], "flat", ""),
        ([0.4, 0.4], "flat", ""),
        ([0.2, 0.6], "rises", ""),
    ],
)
def test_a_planted_course_is_found(levels, kind, since):
    found = course(training(levels), [f"step{i}" for i in range(len(levels))])
    assert (found.kind, found.flat_since) == (kind, since)
    sentence = found.sentence()
    assert ("flat since step2" in sentence) == bool(since)
    words = {"rises": "rises from", "falls": "falls from", "flat": "does not change"}
    words |= {"peaks": ", then falls to", "dips": ", then rises to"}
    assert words[kind] in sentence
    for other in set(words) - {kind}:
        assert words[other] not in sentence or (kind, other) in {("peaks", "rises"), ("dips", "falls")}


def test_a_course_names_its_turn():
    sentence = course(training([0.0, 0.3, 0.7, 0.4, 0.2]), ["a", "b", "c", "d", "e"]).sentence()
    assert sentence.count(" at ") == 3
    assert " at c, then falls to" in sentence


def test_on_noise_no_course_is_claimed():
    claims = 0
    for seed in range(60):
        draw = np.random.default_rng(seed)
        domain, reference = draw.normal(size=(10, 32)) + 0.5, draw.normal(size=(60, 32))
        gaps = [
            gap(
                domain + 0.1 * draw.normal(size=domain.shape),
                reference + 0.1 * draw.normal(size=reference.shape),
            )
            for _ in range(6)
        ]
        claims += course(gaps, list("abcdef")).kind != "flat"
    # 5 % of 60 is 3; 8 or more would happen once in a hundred times.
    assert claims < 8


def test_the_sentence_on_seeds_is_the_demos_own_figures():
    family = yaml.safe_load((data_folder("demo") / "family.yaml").read_text(encoding="utf-8"))
    first = {entry["folder"]: entry["gap"]["cosine"] for entry in family["checkpoints"]}
    found = {name: [value] for name, value in first.items()}
    for entry in family["replicates"]:
        found[entry["folder"]].append(entry["gap"]["cosine"])
    moves = sorted(max(values) - min(values) for values in found.values())
    ordered = sorted(first.values())
    steps = sorted(b - a for a, b in pairwise(ordered))
    assert f"11 checkpoints, trained from 3 seeds, spans {moves[0]:.3f} to {moves[-1]:.3f}" in SEEDS
    assert f"differ by {steps[0]:.3f} to {steps[-1]:.3f}" in SEEDS
    assert (len(found), {len(values) for values in found.values()}) == (11, {3})


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.integers(0, 10**6))
def test_ties_bands_and_skips_by_looking_at_every_pair(count, seed):
    draw = np.random.default_rng(seed)
    apart = np.triu(draw.random((count, count)) < draw.random(), 1)
    apart |= apart.T
    members = [
        replace(c, ties=runs(j + 1 for j in range(count) if j != i and not apart[i, j]))
        for i, c in enumerate(ranking(*[None] * count).checkpoints)
    ]
    ties = Ties(Group("fam", "7B", tuple(members)))

    def tied(i, j):
        return not apart[i, j]

    assert [ties.of(i) for i in range(count)] == [
        [j for j in range(count) if j != i and tied(i, j)] for i in range(count)
    ]
    bands = [
        (a, b)
        for a in range(count)
        for b in range(a + 1, count)
        if all(tied(i, j) for i in range(a, b + 1) for j in range(a, b + 1))
    ]
    longest = [r for r in bands if not any(o != r and o[0] <= r[0] and r[1] <= o[1] for o in bands)]
    assert ties.bands == longest
    for place, beyond, between in ties.skips():
        assert all(tied(place, i) for i in beyond)
        assert not any(tied(place, i) for i in between)
    skipping = {
        i
        for i in range(count)
        for j in range(count)
        for k in range(min(i, j) + 1, max(i, j))
        if tied(i, j) and not tied(i, k)
    }
    assert {place for place, _, _ in ties.skips()} == skipping
