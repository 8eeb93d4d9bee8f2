"""Ranks, where a training gets flat, and agreement with accuracies."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.figures import difference
from lmeval_screener.orders import BY_RATIO, Order
from lmeval_screener.ranking import agreements, flat_from, ranked
from lmeval_screener.screened import grouped
from lmeval_screener.shortlist.choice import shortlist
from lmeval_screener.weights.copies import sketch as sketch_of
from lmeval_screener.weights.projection import FinalNorm
from screenings import GAPS, ratio_of, result, screened

from benchmarks import paper_tables


def placed(*members, base=None, rank_by="ratio"):
    """Ranks by label of readings whose figures are planted."""
    found = ranked(members, Order(rank_by), [base] if base else [])
    return {c.label: c.rank for c in found}


def reading(name, mean, *, G=1.0, sketch=b""):
    of = {metric: replace(gap, mean=G) for metric, gap in GAPS.items()}
    return screened(name, ratio=mean and ratio_of(mean), gaps=of, sketch=sketch)


def test_ranks_are_places_that_equals_share_and_the_base_takes_none():
    rows, norm = np.random.default_rng(1).normal(size=(20, 16)), FinalNorm("n", np.ones(16), "rms")
    sketch = sketch_of(rows.astype("f4"), norm, "F32")
    members = [
        reading(name, mean) for name, mean in zip("abcde", (0.9, 1.3, 1.1, 1.1, 0.7), strict=True)
    ]
    assert placed(*members) == {"b": 1, "c": 2, "d": 2, "a": 3, "e": 4}
    # A base in the middle is shown where it lies, and nobody's rank changes.
    base = reading("base", 1.0)
    assert placed(*members, base, base=base.label) == {
        **{"b": 1, "c": 2, "d": 2, "base": 3, "a": 3, "e": 4}
    }
    order = [c.label for c in ranked([*members, base], BY_RATIO, [base.label])]
    assert order == ["b", "c", "d", "base", "a", "e"]
    assert placed(base, base=base.label) == {"base": 1}
    # Of those with the base's rows, rows say nothing.
    equal = [replace(reading(name, 1.0), sketch=sketch) for name in ("base", "lora")]
    others = [reading("a", 1.1), reading("b", 0.9)]
    found = result([*ranked([*others, *equal], BY_RATIO, [equal[0].label])])
    assert [(c["label"], c["rank"]) for c in found.to_dict()["checkpoints"]] == [
        ("a", 1),
        *(("base", None), ("lora", None)),
        ("b", 2),
    ]
    (group,) = found.groups
    lora = next(c for c in group.checkpoints if c.label == "lora")
    assert (group.places, group.holds_best(lora), found.chance("a", "lora")) == (2, None, None)
    assert [c.label for c in found.shortlist().chosen] == ["a", "lora", "b"]
    assert [c.label for c in found.shortlist(1).chosen] == ["a", "lora"]


def test_rows_without_a_place_of_their_own_keep_the_order_of_steps():
    names = ["run/checkpoint-1000", "run/checkpoint-10000", "run/checkpoint-1500"]
    found = ranked([reading(name, 1.0) for name in names], BY_RATIO, [])
    assert [c.label for c in found] == [names[0], names[2], names[1]]


def test_g_ranks_where_it_is_asked_for_or_where_fewer_than_two_have_a_ratio():
    members = [reading("a", 1.0, G=1.5), reading("b", 1.2, G=1.1), reading("c", 1.1, G=1.9)]
    assert placed(*members) == {"b": 1, "c": 2, "a": 3}
    by_g = {"c": 1, "a": 2, "b": 3}
    assert placed(*members, rank_by="gap") == by_g
    without = [members[0], reading("b", None, G=1.1), reading("c", None, G=1.9)]
    assert placed(*without) == by_g
    assert {c.ranked_by for c in ranked(without, BY_RATIO)} == {"gap"}


def test_one_without_a_ratio_is_set_aside_and_changes_the_order_of_no_other():
    """By G it would be the first, and turn the order of the others round."""
    members = [reading("a", 1.0, G=1.5), reading("b", 1.2, G=1.1), reading("c", 1.1, G=1.3)]
    alone = ranked(members, BY_RATIO)
    (group,) = grouped(ranked([*members, reading("d", None, G=1.9)], BY_RATIO))
    assert [c.label for c in group.placed] == [c.label for c in alone] == ["b", "c", "a"]
    assert [c.rank for c in group.placed] == [1, 2, 3]
    assert [c.label for c in group.set_aside] == ["d"]
    assert group.checkpoints[-1] is group.set_aside[0]
    assert not group.has_place(group.set_aside[0])
    chosen = shortlist([group], 1, audit_sample=3)
    assert "d" not in {c.label for c in chosen.chosen}


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8, 0.9]), min_size=1, max_size=9), st.integers(0, 8)
)
def test_places_are_counted_without_gaps(means, at):
    members = [reading(f"m{i}", mean) for i, mean in enumerate(means)]
    base = members[at % len(means)]
    found = placed(*members, base=base.label)
    others = {i: mean for i, mean in enumerate(means) if members[i] is not base}
    for i, mean in others.items():
        assert found[f"m{i}"] == 1 + len({m for m in others.values() if m > mean})


def drawn_gaps(draw, count, *, shift=0.0, noise=0.02):
    """Gaps like a group's, made without rows: a common influence of each token and noise of its own."""
    sides = [draw.normal(size=10) * 0.05, draw.normal(size=50) * 0.01]
    found = []
    for number in range(count):
        left = [side + noise * side.std() * draw.standard_t(8, size=side.shape) for side in sides]
        # The mean moves with its tokens as the jackknife says: G is the mean of its pseudo-values.
        mean = 1.0 - sum((len(s) - 1) * (v - s).mean() for v, s in zip(left, sides, strict=True))
        step = shift * (number < count // 3)
        sides_of = {"left_out_domain": left[0] + step, "left_out_reference": left[1] + step}
        found.append(replace(GAPS["cosine"], mean=mean + step, **sides_of))
    return found


@pytest.mark.parametrize("count", [6, 70])
def test_where_a_series_gets_flat_by_comparing_each_pair(count):
    draw, level = np.random.default_rng(11), 1e-3
    gaps = drawn_gaps(draw, count, shift=0.1, noise=0.05)
    clear = [
        i for i in range(count - 1) if any(difference(gaps[i], g).p < level for g in gaps[i + 1 :])
    ]
    assert flat_from(gaps, level) == max(clear) + 1
    assert 0 < max(clear) < count - 2


# --- agreement ------------------------------------------------------------------------------------------

TABLES = json.loads(paper_tables.TABLES.read_text())


def lines_of(table):
    rows = TABLES[table]["rows"]
    gaps = [row["within_domain"] + row["between"] for row in rows]
    return agreements(gaps, [row["accuracy"] for row in rows], [row["scale"] for row in rows])


@pytest.mark.parametrize(
    ("table", "spearman", "p"), [("table9", 0.4311, 0.2857), ("table10", 0.1437, 0.7361)]
)
def test_published_qwen_tables(table, spearman, p):
    *groups, inside, overall = lines_of(table)
    assert [(line.group, line.n) for line in groups] == [("1.5B", 3), ("7B", 3), ("14B", 2)]
    assert {line.spearman for line in groups} == {1.0}
    assert [line.spearman_p for line in groups] == pytest.approx([1 / 3, 1 / 3, 1.0])
    assert (inside.scope, inside.n, inside.spearman) == ("within groups", 8, 1.0)
    assert inside.spearman_p == pytest.approx(2 / (6 * 6 * 2))
    assert (overall.scope, overall.n, overall.permutations) == ("overall", 8, 40320)
    assert (overall.spearman, overall.spearman_p) == pytest.approx((spearman, p), abs=5e-5)
    assert all(line.exact for line in (*groups, inside, overall))


def test_published_llama_tables():
    *_, euclidean = lines_of("table11")
    seven, thirteen, _, cosine = lines_of("table12")
    assert (euclidean.spearman, euclidean.spearman_p) == (1.0, pytest.approx(2 / 24))
    assert (seven.spearman, thirteen.spearman, cosine.spearman) == pytest.approx((-1.0, 1.0, -0.4))


def test_the_program_counts_the_pairs_that_each_figure_has_in_order(capsys):
    paper_tables.main()
    counts = [re.findall(r"\d+ of \d+", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [both for *_, both in counts[:2]] == ["9 of 9", "6 of 9"]
    assert counts[3] == ["7 of 7", "1 of 2", "8 of 9"]
    # An equal figure is no order, and another scale no pair.
    tied = {
        "scale": "7B",
        "within_domain": 1.0,
        "between": 1.0,
        "within_reference": 1.0,
        "accuracy": 1.0,
    }
    equal = {"rows": [tied, {**tied, "accuracy": 2.0}, {**tied, "scale": "13B"}]}
    for figure in paper_tables.FIGURES.values():
        assert paper_tables.pairs_in_order(equal, figure) == (0, 1)


def test_missing_and_constant_values_leave_a_checkpoint_or_the_order_out():
    nan = math.nan
    lines = agreements([1, 2, nan, 3], [10, nan, 20, 30], ["a", "a", "a", "b"])
    assert [(line.group, line.n) for line in lines] == [("a", 1), ("b", 1), ("", 2), ("", 2)]
    assert all("fewer than two checkpoints" in lines[i].reason for i in (0, 2))
    assert lines[3].spearman == 1.0
    assert agreements([], [], []) == []
    for constant, reason in (
        ([1, 2, 3], "all accuracies are equal"),
        ([5, 5, 5], "all figures are equal"),
    ):
        (line,) = agreements(
            constant, [1, 2, 3] if len(set(constant)) == 1 else [5, 5, 5], ["a"] * 3
        )
        assert math.isnan(line.spearman)
        assert line.reason == reason
