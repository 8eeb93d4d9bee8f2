"""The sentences of a screening: each on planted data that carry it, and not on data that do not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import lmeval_screener.result
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.figures import Ratio, gap
from lmeval_screener.result.answer import course, not_screened, overlaps
from lmeval_screener.screened import Group, Ranks
from screenings import GAPS, failed, ranking, result, screened

from lmeval_dispersion.installation import data_folder


@pytest.mark.parametrize(
    ("ranges", "first", "clear"),
    [
        ([None], "Only a (G 1.900) was screened; a screen orders siblings, and says nothing alone.", ""),
        ([None, None], "Evaluate first: a (highest G of 2; math).", "The order of all 2 is clear."),
        ([(1, 6)] * 6, "No checkpoint stands apart: all 6 have no clear order; evaluate any.", ""),
        (
            [None, None, (3, 4), (3, 4), None],
            "Evaluate first: a, b, c, d (highest G of 5; math).",
            "Ranks 3–4 overlap; the order of the others is clear.",
        ),
        (
            [None, *[(2, 7)] * 6],
            "Evaluate first: a, any 2 of ranks 2–7 (highest G of 7; math).",
            "Rank 1 is clear of all others; ranks 2–7 overlap.",
        ),
        (
            [(1, 2), (1, 3), (2, 4), (3, 4)],
            "Evaluate first: a, b, c, d (highest G of 4; math).",
            "Ranks 1–4 overlap, though not each with every other.",
        ),
        (
            [None, *((2 * i, 2 * i + 1) for i in range(1, 6) for _ in "ab")],
            "Evaluate first: a, b, c (highest G of 11; math).",
            "Ranks 2–3, 4–5, 6–7 and 8–9 and 1 more run overlap; the order of the others is clear.",
        ),
        (
            [(1, 3)] * 3 + [(4, 5)] * 2,
            "Evaluate first: a, b, c (highest G of 5; math).",
            "Ranks 1–3 and 4–5 overlap; each of these runs is clear of the others.",
        ),
    ],
)
def test_the_answer_of_one_group(ranges, first, clear):
    unread = "it was not read; the order is by G alone."
    no_ratio = f"No ratio: {unread}" if len(ranges) > 1 else "No ratio of a: it was not read; G stands alone."
    assert result(ranking(*ranges)).answer() == [line for line in (first, clear, no_ratio) if line]


def test_whose_ratio_is_not_known_stands_beside_the_answer():
    members = [replace(c, ratio=figure(1.0)) for c in ranking(None, None, None)]
    assert not any("No ratio" in line for line in result(members).answer())
    members[1] = replace(members[1], ratio=None, no_ratio="the norm of foo is not known")
    said = "No ratio of b: the norm of foo is not known; the order is by G alone."
    assert said in result(members).answer()


def figure(mean, se=0.01):
    """A ratio whose difference to another has an error of about ``se``."""
    spread = se * np.array([1.0, -1.0, 0.0]) / 4
    return Ratio(mean, se, 0.001, mean + spread, mean - spread)


def test_where_the_figures_disagree_about_the_best_the_report_says_so_first_and_the_list_takes_both():
    members = ranking(*[None] * 6)
    ratios = [1.0, 0.9, 0.8, 0.7, 0.6, 1.4]
    members = [replace(c, ratio=figure(r)) for c, r in zip(members, ratios, strict=True)]
    members[0], members[5] = replace(members[0], ties=Ranks([6])), replace(members[5], ties=Ranks([1]))
    found = result(members)
    first, second, *_ = found.answer()
    assert first == "G and ratio disagree about the best: a by G, f by the ratio; evaluate both."
    assert second == "Evaluate first: a, b, c, f (highest G of 6; math)."
    (choice,) = found.shortlist(2).groups
    assert [c.label for c in choice.listed] == ["a", "b", "f"]
    assert choice.sentence() == "3 of 6: the 2 best and 1 not separated from the 2nd (cap 4)"
    # Where the ratio's best is no better than by rounding, nothing is said.
    members[5] = replace(members[5], ratio=figure(1.0015))
    assert result(members).answer()[0].startswith("Evaluate first: a, b, c (")


NOISE = np.zeros(10)
AHEAD, BEHIND = np.r_[2.0, np.zeros(8), -2.0], np.r_[-2.0, np.zeros(8), 2.0]


@pytest.mark.parametrize(
    ("by_g", "by_ratio", "alike", "appears"),  # alike -1: what is high by G is low by the ratio
    [
        (NOISE, NOISE, 0.0, False),
        (NOISE, NOISE, 0.9, False),
        (NOISE, NOISE, -1.0, False),
        (AHEAD, NOISE, 0.0, False),
        (NOISE, AHEAD, 0.0, False),
        (AHEAD, AHEAD, 0.0, False),
        (AHEAD, BEHIND, 0.0, True),
    ],
)
def test_noise_is_no_disagreement_though_the_pair_is_the_best_of_all(by_g, by_ratio, alike, appears):
    """Ten siblings; each figure is a mean over ten tokens whose values scatter by 1."""
    draw, said = np.random.default_rng(20261123), 0
    for _ in range(200):
        of_g, other = draw.normal(size=(2, 10, 10))
        of_ratio = alike * of_g + np.sqrt(1 - alike**2) * other
        members = []
        for i, (g, r) in enumerate(zip(of_g + by_g[:, None], of_ratio + by_ratio[:, None], strict=True)):
            without = [(v.sum() - v) / 9 for v in (g, r)]
            known = {"left_out_domain": without[0], "left_out_reference": NOISE}
            gaps = {"cosine": replace(GAPS["cosine"], mean=g.mean(), **known)}
            ratio = Ratio(r.mean(), 0.1, 0.0, without[1], NOISE)
            members.append(screened(f"m{i}", i + 1, gaps=gaps, ratio=ratio))
        said += bool(Group("fam", "7B", tuple(members)).rivals("cosine"))
    assert said >= 190 if appears else said <= 10


def test_several_groups_get_a_sentence_each_up_to_four():
    members = [screened(f"m{i}-{j}", j + 1, scale=f"{i}B") for i in range(6) for j in range(2)]
    said = result(members).answer()
    assert said[0] == "fam · 0B: Evaluate first: m0-0 (highest G of 2; math). The order of all 2 is clear."
    assert said[4] == "2 more groups below."


def test_failures_come_last_and_first_where_most_failed():
    failures = [failed(f"org/{i}") for i in range(3)]
    none = "none of the 3 checkpoints could be screened (3 RepoNotFound); the first: org/0: none"
    assert not_screened(failures) == none
    assert not_screened(failures[:1]) == "org/0: RepoNotFound: none"
    for count, place in ((2, 0), (4, -1)):
        said = result(ranking(*[None] * count), failures).answer()
        assert said[place] == f"3 of {count + 3} checkpoints could not be screened (3 RepoNotFound)."
        assert "could not" not in " ".join(said[1:] if place == 0 else said[:-1])


def test_a_training_is_called_by_its_model_and_its_members_by_their_steps():
    local = [screened(f"/x/run1/checkpoint-{i}", 1, commit=None) for i in (20, 3)]
    last = screened("/x/run1", 1, commit=None)
    (group,) = result([*local, last]).groups
    assert group.title == "run1"
    assert list(group.names.values()) == ["checkpoint-3", "checkpoint-20", "final model"]
    (group,) = result([screened("org/pythia", 1, revision=f"step{i}") for i in (20, 3)]).groups
    assert group.title == "pythia"
    # Two runs are no training; each member keeps as much of its path as tells it apart.
    mixed = [*local, screened("/x/run2/checkpoint-3", 1, commit=None)]
    (group,) = result(mixed).groups
    assert (group.trajectory, group.title) == ((), "fam · 7B")
    assert list(group.names.values()) == [c.name for c in mixed]


# --- a training -----------------------------------------------------------------------------------------


def training(levels, seed=0, noise=0.02):
    """Gaps of a model whose domain tokens share a direction the less, the higher the level."""
    draw = np.random.default_rng(seed)
    domain, reference = draw.normal(size=(12, 32)), draw.normal(size=(60, 32))
    noises = ([noise * draw.normal(size=rows.shape) for rows in (domain, reference)] for _ in levels)
    return [gap(domain + 1 - level + a, reference + b) for level, (a, b) in zip(levels, noises, strict=True)]


@pytest.mark.parametrize(
    ("levels", "kind", "flat_since"),
    [
        ([0.0, 0.2, 0.4, 0.6, 0.8], "rises", False),
        ([0.0, 0.3, 0.6, 0.6, 0.6, 0.6], "rises", True),
        ([0.8, 0.6, 0.4, 0.2, 0.0], "falls", False),
        ([0.0, 0.3, 0.7, 0.4, 0.2], "peaks", False),
        ([0.7, 0.4, 0.0, 0.3, 0.5], "dips", False),
        ([0.3, 0.7, 0.0, 0.3], "peaks", False),
        ([0.4, 0.4], "flat", False),
        ([0.2, 0.6], "rises", False),
    ],
)
def test_a_planted_course_is_found(levels, kind, flat_since):
    sentence = course(training(levels), [f"step{i}" for i in range(len(levels))])
    assert ("flat since step2" in sentence) is flat_since
    words = {"rises": "rises from", "falls": "falls from", "flat": "does not change"}
    words |= {"peaks": ", then falls to", "dips": ", then rises to"}
    assert words[kind] in sentence
    for other in set(words) - {kind}:
        assert words[other] not in sentence or (kind, other) in {("peaks", "rises"), ("dips", "falls")}


def test_on_noise_no_course_is_claimed():
    courses = [course(training([0.5] * 6, seed, noise=0.1), list("abcdef")) for seed in range(60)]
    claims = sum("does not change" not in sentence for sentence in courses)
    # 5 % of 60 is 3; 8 or more would happen once in a hundred times.
    assert claims < 8


def test_the_sentence_on_seeds_is_the_demos_own_figures():
    family = yaml.safe_load((data_folder("demo") / "family.yaml").read_text(encoding="utf-8"))
    seeds = defaultdict(list)
    for entry in family["checkpoints"] + family["replicates"]:
        seeds[entry["folder"]].append(entry["gap"]["cosine"])
    assert [len(values) for values in seeds.values()] == [3] * 11
    moves = [max(values) - min(values) for values in seeds.values()]
    steps = [b - a for a, b in pairwise(sorted(values[0] for values in seeds.values()))]
    text = (Path(lmeval_screener.result.__file__).parent / "screening.jinja").read_text("utf-8")
    assert f"11 checkpoints, trained from 3 seeds, spans {min(moves):.3f} to {max(moves):.3f}" in text
    assert f"differ by {min(steps):.3f} to {max(steps):.3f}" in text


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.integers(0, 10**6))
def test_overlaps_are_the_runs_of_ranks_that_hang_together(count, seed):
    draw = np.random.default_rng(seed)
    apart = np.triu(draw.random((count, count)) < draw.random(), 1)
    apart |= apart.T
    members = [
        replace(c, ties=Ranks(j + 1 for j in range(count) if j != i and not apart[i, j]))
        for i, c in enumerate(ranking(*[None] * count))
    ]
    found = overlaps(Group("fam", "7B", tuple(members)))
    # Between two neighbours of one run some tie crosses; between two runs none does.
    crossed = [any(not apart[i, j] for i in range(k) for j in range(k, count)) for k in range(1, count)]
    runs, begin = [], 0
    for k, over in enumerate([*crossed, False], start=1):
        if not over:
            runs += [(begin + 1, k)] if k - begin > 1 else []
            begin = k
    assert found == runs
