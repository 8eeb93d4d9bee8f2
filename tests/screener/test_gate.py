"""The gate, and what is said while a screening runs."""

from __future__ import annotations

import csv
import io
import itertools
import json
from dataclasses import replace

import pytest
from lmeval_screener.cli import main, progress_lines
from lmeval_screener.figures import difference
from lmeval_screener.result import Gate
from lmeval_screener.screening import reference_among, screen
from lmeval_screener.targets import parse_target
from screenings import failed, result, screened

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.paths import data_folder
from lmeval_dispersion.report import Table

DEMO = data_folder("demo")


def gate_of(result, reference):
    return replace(result, gate=Gate.of(result.groups, result.failed, reference))


def members(*ranges):
    return [screened(f"org/{'abcdef'[i]}", i + 1, ends) for i, ends in enumerate(ranges)]


def test_tied_passes_and_clearly_below_fails():
    of_four = result(members((1, 2), (1, 3), (2, 3), (4, 4)))
    first = gate_of(of_four, "org/a")
    assert (first.gate.below, first.gate.compared, first.exit_code) == (("org/c", "org/d"), 3, 4)
    assert first.answer()[0] == "Failed: org/c, org/d clearly below org/a (3 compared)."
    assert gate_of(of_four, "org/b").gate.below == ("org/d",)
    many = gate_of(result(screened(f"org/{i}", i + 1) for i in range(10)), "org/0")
    assert many.answer()[0].endswith("org/4, org/5 and 4 more clearly below org/0 (9 compared).")
    last = gate_of(of_four, "org/d")
    assert (last.gate.passed, last.exit_code) == (True, 0)
    assert last.answer()[0] == "Passed: none of 3 is clearly below org/d."


def test_what_cannot_be_compared_does_not_pass():
    lonely = result([*members((1, 1)), screened("org/x", 1, scale="1B")], [failed("org/y", "Timeout", "")])
    alone = gate_of(lonely, "org/a")
    assert (alone.gate.compared, alone.gate.not_compared, alone.gate.passed) == (0, 2, False)
    assert alone.exit_code == 1
    unjudged = gate_of(lonely, "org/y")
    assert unjudged.answer()[0] == "The gate cannot be judged: org/y was not screened (Timeout)."
    assert unjudged.exit_code == 1


def test_a_reference_that_is_screened_anyway_is_screened_once():
    targets = [parse_target(f"{DEMO}/sums-10"), parse_target("org/a@v1")]
    assert reference_among(targets, "org/a@v1") == targets[1]
    assert reference_among(targets, "org/a") not in targets
    assert reference_among(targets, f"{DEMO}/../demo/sums-10") == targets[0]
    assert reference_among(targets, "sums-10") == targets[0]
    with pytest.raises(UsageError, match="names several"):
        reference_among(targets, "org/a@step*")


@pytest.mark.parametrize(("reference", "below"), [("sums-80", ["sums-45", "sums-00"]), ("sums-00", [])])
@pytest.mark.parametrize("demo", [True, False])
def test_the_command_ends_with_the_gates_status_and_takes_the_tables_names(capsys, reference, below, demo):
    names = ["sums-80", "sums-45", "sums-00"]
    words = ["--demo"] if demo else [str(DEMO / name) for name in names]
    status = 4 if below else 0
    assert main([*words, "--fail-if-below", reference]) == status
    assert capsys.readouterr().out.startswith("Failed: " if below else "Passed: ")
    assert main([*words, "--fail-if-below", reference, "--format", "json"]) == status
    document = json.loads(capsys.readouterr().out)
    gate = document["gate"]
    assert (gate["reference"], document["failed"]) == (reference, [])
    assert (gate["passed"], gate["compared"]) == (not below, 10 if demo else 2)
    assert [name for name in gate["below"] if name.rpartition("/")[2] in names] == below


def test_one_truth_of_ties(capsys, tmp_path):
    """The table, JSON, CSV and registry of the demo name the ranks that an own count of all pairs finds."""
    demo = screen(demo=True)
    gaps = {c.label: c.gaps["cosine"] for c in demo.checkpoints}
    p = {frozenset(pair): difference(*(gaps[c] for c in pair)).p for pair in itertools.combinations(gaps, 2)}
    order = sorted(p, key=p.get)
    first_kept = next(i for i, pair in enumerate(order) if p[pair] > 0.05 / (len(order) - i))
    ranks = {c.label: c.rank for c in demo.checkpoints}
    ties = {
        label: sorted(ranks[o] for pair in order[first_kept:] if label in pair for o in pair - {label})
        for label in gaps
    }
    assert {c["label"]: c["tied_with"] for c in demo.to_dict()["checkpoints"]} == ties
    assert main(["--demo", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["label"]: [int(rank) for rank in row["tied_with"].split()] for row in rows} == ties
    store = str(tmp_path / "s.db")
    assert main(["--demo", "--registry", store, "-q"]) == 0
    capsys.readouterr()
    assert dispersion(["registry", "query", store, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["checkpoint"]: row["tied_with"] for row in rows} == ties
    (table, *_) = (t for s in demo.document().sections for t in s.parts if isinstance(t, Table))
    assert {row["called"]: row["no_clear_order_with"] for row in table.rows} == {
        label: " ".join(map(str, t)) for label, t in ties.items()
    }


def test_lines_of_progress_come_every_half_minute_and_name_failures():
    now, said = [0.0], []
    lines = progress_lines(said.append, lambda: now[0])
    for done in range(1, 1001):
        now[0] += 0.1
        lines(failed("org/x", "GatedRepo") if done % 100 == 0 else object(), done, 1000)
    assert said[0] == "300 of 1000, about 0:01:10 left; failed: 3 GatedRepo"
    assert len(said) == 3  # not of the last
    quick = progress_lines(said.append, lambda: 0.5)
    for done in range(1, 11):
        quick(object(), done, 10)
    assert len(said) == 3
