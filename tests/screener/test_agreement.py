"""Rank agreement: the published tables, slow re-derivations, ties, and accuracy files."""

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.agreement import agreement
from scipy import stats

TABLES = json.loads((Path(__file__).parent.parent / "data" / "paper_gap_tables.json").read_text())


def lines_of(table):
    rows = TABLES[table]["rows"]
    gaps = [row["within_domain"] + row["between"] for row in rows]
    return agreement(gaps, [row["accuracy"] for row in rows], [row["scale"] for row in rows])


@pytest.mark.parametrize(
    ("table", "spearman", "p"), [("table9", 0.4311, 0.2857), ("table10", 0.1437, 0.7361)]
)
def test_published_qwen_tables(table, spearman, p):
    *groups, inside, overall = lines_of(table)
    assert [(line.group, line.n, line.spearman, line.kendall) for line in groups] == [
        ("1.5B", 3, 1.0, 1.0),
        ("7B", 3, 1.0, 1.0),
        ("14B", 2, 1.0, 1.0),
    ]
    assert [line.spearman_p for line in groups] == pytest.approx([1 / 3, 1 / 3, 1.0])
    assert (inside.scope, inside.n, inside.spearman, inside.kendall) == ("within groups", 8, 1.0, 1.0)
    assert inside.spearman_p == pytest.approx(2 / (6 * 6 * 2))
    assert (overall.scope, overall.n, overall.permutations) == ("overall", 8, 40320)
    assert overall.spearman == pytest.approx(spearman, abs=5e-5)
    assert overall.spearman_p == pytest.approx(p, abs=5e-5)
    assert all(line.exact for line in (*groups, inside, overall))


def test_published_llama_tables():
    *_, euclidean = lines_of("table11")
    seven, thirteen, _, cosine = lines_of("table12")
    assert (euclidean.spearman, euclidean.spearman_p) == (1.0, pytest.approx(2 / 24))
    assert (seven.spearman, thirteen.spearman) == (-1.0, 1.0)
    assert cosine.spearman == pytest.approx(-0.4)


@functools.cache
def centred(values):
    return stats.rankdata(values) - (len(values) + 1) / 2


def slow(groups):
    """Statistics and two-sided p of stratified data by enumerating every order, with scipy's ranks."""

    def statistics(pairs):
        ranked = [(centred(tuple(x)), centred(tuple(y))) for x, y in pairs]
        dot = sum((x * y).sum() for x, y in ranked)
        size = math.sqrt(sum((x * x).sum() for x, _ in ranked) * sum((y * y).sum() for _, y in ranked))
        both = np.zeros(3)
        for x, y in pairs:
            for i, j in itertools.combinations(range(len(x)), 2):
                a, b = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
                both += (a * b, a * a, b * b)
        return dot / size, both[0] / math.sqrt(both[1] * both[2])

    seen = statistics(groups)
    null = [
        statistics([(x, order) for (x, _), order in zip(groups, orders, strict=True)])
        for orders in itertools.product(*(list(itertools.permutations(y)) for _, y in groups))
    ]
    return seen, [np.mean([abs(one[k]) >= abs(seen[k]) - 1e-9 for one in null]) for k in (0, 1)]


values = st.integers(0, 4)
strata = st.lists(
    st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.lists(values, min_size=n, max_size=n)] * 2)),
    min_size=1,
    max_size=2,
)


@settings(max_examples=25, deadline=None)
@given(strata)
def test_equals_plain_enumeration(groups):
    gaps = [x for xs, _ in groups for x in xs]
    accuracies = [y for _, ys in groups for y in ys]
    names = [str(index) for index, (xs, _) in enumerate(groups) for _ in xs]
    for line in agreement(gaps, accuracies, names):
        if line.scope == "group":
            pairs = [groups[int(line.group)]]
        else:
            pairs = groups if line.scope == "within groups" else [(gaps, accuracies)]
        if line.reason:
            assert math.isnan(line.spearman)
            assert math.isnan(line.kendall_p)
            constant = [all(len(set(pair[side])) == 1 for pair in pairs) for side in (0, 1)]
            assert any(constant)
        else:
            seen, p = slow(pairs)
            assert (line.spearman, line.kendall) == pytest.approx(seen)
            assert (line.spearman_p, line.kendall_p) == pytest.approx(p)


@pytest.mark.parametrize("n", [5, 9, 30])
def test_equals_scipy_with_ties(n):
    rng = np.random.default_rng(n)
    gaps, accuracies = rng.integers(0, 6, n).tolist(), rng.integers(0, 6, n).tolist()
    (line,) = agreement(gaps, accuracies, ["all"] * n)
    assert line.spearman == pytest.approx(stats.spearmanr(gaps, accuracies).statistic)
    assert line.kendall == pytest.approx(stats.kendalltau(gaps, accuracies).statistic)
    assert line.exact == (n <= 9)


def test_many_checkpoints_are_sampled_and_say_so():
    rng = np.random.default_rng(1)
    gaps = rng.normal(size=40)
    related = (gaps + rng.normal(size=40)).tolist()
    line, again = (agreement(gaps.tolist(), related, ["run"] * 40)[0] for _ in range(2))
    assert not line.exact
    assert line.permutations == 9_999
    assert line == again
    assert line.kendall_p == pytest.approx(stats.kendalltau(gaps, related).pvalue, abs=2e-3)
    assert line.spearman_p >= 1 / 10_000
    unrelated = rng.normal(size=40)
    (null,) = agreement(gaps.tolist(), unrelated.tolist(), ["run"] * 40)
    assert null.spearman_p == pytest.approx(stats.spearmanr(gaps, unrelated).pvalue, abs=0.02)


def test_a_sampled_group_beside_a_small_one():
    lines = agreement([*range(12), 1.0, 2.0], [*range(12), 5.0, 6.0], ["big"] * 12 + ["small"] * 2)
    assert [line.exact for line in lines] == [False, True, False, False]
    assert lines[2].spearman == 1.0
    assert lines[2].kendall_p == pytest.approx(1 / 10_000)


def test_missing_values_leave_a_checkpoint_out():
    nan = math.nan
    lines = agreement([1, 2, nan, 3], [10, nan, 20, 30], ["a", "a", "a", "b"])
    assert [(line.group, line.n) for line in lines] == [("a", 1), ("b", 1), ("", 2), ("", 2)]
    assert "fewer than two checkpoints" in lines[0].reason
    assert "fewer than two checkpoints" in lines[2].reason
    assert lines[3].spearman == 1.0
    assert agreement([], [], []) == []


@pytest.mark.parametrize(
    ("gaps", "accuracies", "reason"),
    [([1, 1, 1], [1, 2, 3], "all gaps are equal"), ([1, 2, 3], [5, 5, 5], "all accuracies are equal")],
)
def test_constant_values_have_no_order(gaps, accuracies, reason):
    (line,) = agreement(gaps, accuracies, ["a"] * 3)
    assert math.isnan(line.spearman)
    assert line.reason == reason


def test_unequal_lengths():
    with pytest.raises(ValueError, match="expected equal lengths, got 1, 2 and 1"):
        agreement([1.0], [1.0, 2.0], ["a"])
