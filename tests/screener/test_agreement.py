"""Rank agreement: the published tables, groups apart, missing and constant values."""

import json
import math
from pathlib import Path

import pytest
from lmeval_screener.ranking import agreement

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
    assert [(line.group, line.n, line.spearman) for line in groups] == [
        ("1.5B", 3, 1.0),
        ("7B", 3, 1.0),
        ("14B", 2, 1.0),
    ]
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


def test_missing_and_constant_values_leave_a_checkpoint_or_the_order_out():
    nan = math.nan
    lines = agreement([1, 2, nan, 3], [10, nan, 20, 30], ["a", "a", "a", "b"])
    assert [(line.group, line.n) for line in lines] == [("a", 1), ("b", 1), ("", 2), ("", 2)]
    assert all("fewer than two checkpoints" in lines[i].reason for i in (0, 2))
    assert lines[3].spearman == 1.0
    assert agreement([], [], []) == []
    for constant, reason in (([1, 2, 3], "all accuracies are equal"), ([5, 5, 5], "all gaps are equal")):
        (line,) = agreement(constant, [1, 2, 3] if len(set(constant)) == 1 else [5, 5, 5], ["a"] * 3)
        assert math.isnan(line.spearman)
        assert line.reason == reason
