"""``dispersion budget``: errors of labels against direct draws, and what is said of their worth."""

import json

import numpy as np
import pytest
from json_schemas import faults
from synthetic import sliced_store, subjects_store

from lmeval_dispersion.audit.calibration.budget import (
    TRIVIAL,
    budget_document,
    budget_report,
    budget_sentences,
    label_error,
)
from lmeval_dispersion.audit.calibration.calibrator import fit_calibrator, labelled_pairs
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.cli import main
from lmeval_dispersion.report import Chart, render


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Budgets of stores with a planted law, with none, with confident answers, and of a guessing model."""
    folder = tmp_path_factory.mktemp("stores")
    stores = {
        "law": sliced_store(folder / "law", unlabelled=0, effect=1.0),
        "noise": sliced_store(folder / "noise", unlabelled=0, effect=0.0),
        "confident": sliced_store(folder / "confident", unlabelled=0, effect=0.0, confidence=4.0),
        "guessing": subjects_store(folder / "guessing", accuracy=0.25, law=0.5),
    }
    return {name: (path, budget_report(read_run(path))) for name, path in stores.items()}


@pytest.mark.parametrize("k", [1, 10, 60])
@pytest.mark.parametrize("kind", ["right or wrong", "between"])
def test_errors_of_labels_are_those_of_draws(k, kind):
    rng = np.random.default_rng(k)
    scores = (rng.random(80) < 0.3).astype(float) if kind == "right or wrong" else rng.random(80)
    told = label_error(scores, k, np.random.default_rng(0))
    drawn = rng.permuted(np.tile(scores, (8000, 1)), axis=1)[:, :k].mean(axis=1)
    off = drawn - scores.mean()
    assert told["mae"] == pytest.approx(100 * np.abs(off).mean(), rel=0.05)
    assert told["rmse"] == pytest.approx(100 * np.sqrt(np.square(off).mean()), rel=0.04)
    assert np.mean((drawn >= told["low"] - 1e-9) & (drawn <= told["high"] + 1e-9)) >= 0.94


def test_all_labels_have_no_error_and_small_cases_are_enumerated():
    scores = np.array([1.0, 0.0, 0.0, 1.0, 1.0])
    assert label_error(scores, 5, np.random.default_rng(0)) == {"mae": 0, "rmse": 0, "low": 0.6, "high": 0.6}
    pairs = [(scores[i] + scores[j]) / 2 for i in range(5) for j in range(i)]
    told = label_error(scores, 2, np.random.default_rng(0))
    assert told["mae"] == pytest.approx(100 * np.mean(np.abs(np.array(pairs) - 0.6)))


def test_a_worth_is_what_so_many_labels_give(found):
    path, report = found["law"]
    run = read_run(path)
    parts = labelled_pairs(run).parts
    rng = np.random.default_rng(3)
    for row in report["estimators"]:
        k = max(round(row["worth"]), 1)
        squares = [
            (rng.permutation(run.score[part])[:k].mean() - run.score[part].mean()) ** 2
            for _ in range(100)
            for part in parts
        ]
        off = 100 * np.sqrt(np.mean(squares))
        assert off == pytest.approx(row["rmse"], rel=0.04 + 0.6 * abs(k - row["worth"]) / k), row


def test_the_estimates_are_the_calibrators(found):
    path, report = found["law"]
    calibrator = fit_calibrator(read_run(path))
    rows = {row["feature"] or row["estimator"]: row for row in report["estimators"]}
    for single in calibrator["validation"]["single_features"]:
        assert rows[single["estimator"]]["mae"] == pytest.approx(single["mae"])
    assert rows["all features together"]["worth"] == pytest.approx(calibrator["worth"]["labels"])
    assert rows[TRIVIAL]["worth"] == pytest.approx(calibrator["worth"]["trivial"]["labels"])
    run, parts = read_run(path), labelled_pairs(read_run(path)).parts
    off = [run.confidence.top_probability[part].mean() - run.score[part].mean() for part in parts]
    assert rows["mean confidence, as it is"]["mae"] == pytest.approx(100 * np.mean(np.abs(off)))


@pytest.mark.parametrize(
    ("sentence", "on"),
    [
        ("Dispersion is worth no labels here", {"noise", "confident"}),
        ("labelled documents (95 %", {"law", "noise", "confident"}),
        ("mean confidence", {"confident"}),
        ("Nothing else without labels beats", {"noise"}),
        ("therefore not judged", {"guessing"}),
        ("would have said", {"law", "noise", "confident", "guessing"}),
    ],
)
def test_each_sentence_stands_where_it_is_true_and_nowhere_else(found, sentence, on):
    assert {
        name for name, (_, report) in found.items() if sentence in " ".join(budget_sentences(report))
    } == on


def test_the_planted_law_is_worth_many_labels(found):
    said = budget_sentences(found["law"][1])[0]
    row = next(row for row in found["law"][1]["estimators"] if row["feature"] == "dispersion")
    assert said.startswith(f"Dispersion is worth {row['worth']:.0f} labelled documents")
    assert 12 < row["worth_low"] < row["worth"] < row["worth_high"] < 45


def test_the_command_writes_every_format(found, capsys, tmp_path):
    path, report = found["law"]
    assert main(["budget", str(path), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["format"] == "dispersion-budget/1"
    assert faults(printed) == []
    assert faults({**printed, "estimators": [{**printed["estimators"][0], "value": 1}]})
    assert [row["labels"] for row in printed["whole"]] == [10, 20, 50, 100, 200, 500, 1000]
    assert [row["labels"] for row in printed["a_slice"]] == [10, 20, 50]
    assert main(["budget", str(path), "--format", "csv"]) == 0
    assert capsys.readouterr().out.startswith("estimator,")
    assert main(["budget", str(path), "-o", str(tmp_path / "budget.html"), "-q"]) == 0
    assert "worth" in (tmp_path / "budget.html").read_text()
    assert main(["budget", str(path)]) == 0
    assert capsys.readouterr().out.count("labelled documents")
    assert render(budget_document(report), "markdown").index("Dispersion is worth")
    assert main(["budget", str(path), "--slice", "nothing"]) == 2
    assert "no column 'nothing'" in capsys.readouterr().err


def test_the_chart_has_every_worth_and_is_left_out_where_none_is_judged(found):
    def charts(report):
        parts = [part for section in budget_document(report).sections for part in section.parts]
        return [part for part in parts if isinstance(part, Chart)]

    report = found["law"][1]
    (chart,) = charts(report)
    drawn = chart.draw().to_dict()
    values = drawn["layer"][1]["data"]["values"]
    assert [(row["estimator"], row["better"]) for row in values] == [
        (row["estimator"], row["better"]) for row in report["estimators"]
    ]
    assert [row["worth"] for row in values] == pytest.approx([row["worth"] for row in report["estimators"]])
    trivial = next(row for row in report["estimators"] if row["estimator"] == TRIVIAL)
    assert drawn["layer"][0]["data"]["values"] == [{"x": trivial["worth"]}]
    assert chart.description.startswith("2 of 8 estimates are shown to beat the labelled accuracy alone")
    (none,) = charts(found["noise"][1])
    assert none.description.startswith("0 of 8 estimates")
    assert found["guessing"][1]["cautions"]
    assert not charts(found["guessing"][1])
