"""`dispersion inspect` as users run it: interrupted, resumed, mistaken."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_models
from json_schemas import faults
from threadpoolctl import threadpool_limits

from lmeval_dispersion.cli import main
from lmeval_dispersion.report.cells import json_value

LAW = ("--segment", "24", "--bins", "8", "--bin-size", "10", "--layer", "all", "--contexts", "8")
WHOLE = ("law", "model", "--data", "text.jsonl", *LAW)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laboratory")
    tiny_models.saved(folder / "model", tiny_models.llama())
    rng = np.random.default_rng(0)
    rows = [" ".join(f"w{i}" for i in rng.zipf(1.3, 24) % 90) for _ in range(600)]
    tiny_models.text_file(folder / "text.jsonl", rows)
    tiny_models.text_file(folder / "few.jsonl", rows[:200])
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def words(arguments):
    """The words of a command, with `inspect` before the name of a measure."""
    return ["inspect", *map(str, arguments)]


def run_here(*arguments):
    """The command in this process: what it prints is the same, and torch is loaded already."""
    return main(words(arguments))


def rows_of(folder, kind):
    """The kept rows of a study in a folder of studies."""
    (place,) = folder.glob(f"{kind}-*")
    facts, rows = json.loads(place.read_text())
    assert facts["created"]
    return rows


@pytest.fixture(scope="module")
def whole(place):
    # In this process, with the one thread that the others have: their results are compared to the bit.
    with pytest.MonkeyPatch.context() as patch, threadpool_limits(1):
        patch.chdir(place)
        assert run_here(*WHOLE, "--study", "whole") == 0
    return place / "whole"


def test_an_interrupted_study_resumes_to_the_identical_result(here, whole, monkeypatch):
    savez, saved = np.savez, []

    def saved_or_interrupted(file, **arrays):
        savez(file, **arrays)
        saved.append(file)
        if len(saved) == 5:
            raise KeyboardInterrupt

    with threadpool_limits(1), monkeypatch.context() as patch:
        patch.setattr(np, "savez", saved_or_interrupted)
        assert run_here(*WHOLE, "--study", "cut") == 130
    assert not list(Path("cut").glob("*.json"))
    # All that it knows lies in its folder, so it may go on in this process.
    with threadpool_limits(1):
        assert run_here(*WHOLE, "--study", "cut") == 0
    assert rows_of(here / "cut", "law") == rows_of(whole, "law")


def test_models_and_texts_of_one_law_are_one_figure(here, whole, capsys):
    """The first model on the first text comes from the study that ran alone."""
    tiny_models.saved(here / "other", tiny_models.llama(seed=2))
    words = ("law", "model", "other", "--data", "text.jsonl", "few.jsonl", *LAW)
    assert run_here(*words, "--study", "whole", "-o", "grid.json", "-o", "grid.svg") == 0
    answer = capsys.readouterr().out
    assert "2 models on 2 texts" in " ".join(answer.split())
    report = json.loads((here / "grid.json").read_text())
    assert faults(report) == []
    cells = {(row["model"], row["data"]) for row in report["tables"]["correlations"]}
    assert len(cells) == 4
    assert {each["study"] for each in report["manifest"]["models"]} == {
        path.stem for path in whole.glob("law-*.json")
    }
    picture = (here / "grid.svg").read_text()
    for model, text in cells:
        assert f"{model}, {text}: r " in picture


@pytest.mark.parametrize("kind", ["law", "sublayers", "condensation", "clusters"])
def test_every_kind_of_study_is_its_report(here, whole, kind, capsys):
    options = {
        "law": (*LAW, "--control", "shuffled"),
        "sublayers": ("--segment", 24, "--sizes", "10,20", "--knn", "--segments", 60),
        "condensation": ("--segment", 24, "--segments", 50, "--control", "untrained"),
        "clusters": ("--ngram", 1, "--occurrences", 20, "--segment", 5, "--layer", "all"),
    }[kind]
    options = ("--data", "few.jsonl", *options)
    assert run_here(kind, "model", *options, "--study", f"{kind}-model", "-o", "report.json") == 0
    report = json.loads((here / "report.json").read_text())
    assert faults(report) == []
    assert all(
        faults({key: report[key] for key in report if key != left}) for left in list(report)[1:]
    )
    assert faults(
        {**report, "tables": {f"{name}_new": rows for name, rows in report["tables"].items()}}
    )
    of_table = {}
    for name, row in rows_of(here / f"{kind}-model", kind):
        of_study = {"model": "model", "data": "few.jsonl", **json_value(row)}
        of_table.setdefault(name, []).append(of_study)
    for name, rows in of_table.items():
        for row, reported in zip(rows, report["tables"][name], strict=True):
            assert row.items() <= reported.items(), name
    capsys.readouterr()
    assert run_here(kind, "model", *options, "--study", f"{kind}-model", "--format", "csv") == 0
    printed = pd.read_csv(io.StringIO(capsys.readouterr().out))
    main_table = {"law": "correlations", "condensation": "layers"}.get(kind, "summary")
    rows = pd.DataFrame(report["tables"][main_table], columns=printed.columns)
    rows = rows.fillna(np.nan).replace("", np.nan)
    pd.testing.assert_frame_equal(printed, rows, check_dtype=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("law", "model", "--data", "fex.jsonl"),
            2,
            "fex.jsonl does not exist; did you mean few.jsonl",
        ),
        ((*WHOLE, "--bin-size", "201"), 2, "use smaller bins or segments"),
        (
            (*WHOLE, "--sizes", "9"),
            2,
            "--sizes: expected an option that law takes, got one that belongs to sublayers; leave",
        ),
        (
            ("sublayers", "model", "tuned", "--data", "few.jsonl"),
            2,
            "one model for sublayers, got model, tuned",
        ),
        (
            ("condensation", "model", "--data", "few.jsonl", "text.jsonl"),
            2,
            "--data: expected one text for condensation, got few.jsonl, text.jsonl",
        ),
        (
            ("sublayers", "model", "--data", "few.jsonl", "--test", "0.3"),
            2,
            "--knn: expected knn together with",
        ),
        (
            ("sublayers", "model", "--data", "few.jsonl", "--knn", "--test", "3"),
            2,
            "--test: expected a share above 0 and at most 1, or a text, got 3.0",
        ),
    ],
)
def test_mistakes_are_one_sentence(here, whole, arguments, code, message, capsys):
    assert run_here(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("dispersion inspect: ")
    assert message in last


def test_too_short_a_text_for_the_largest_draw_is_said_and_partly_done(place, monkeypatch, capsys):
    (place / "here").mkdir()
    monkeypatch.chdir(place / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    arguments = (
        "sublayers",
        "../model",
        "--data",
        "../few.jsonl",
        "--segment",
        "24",
        "--sizes",
        "10,5000",
    )
    assert run_here(*arguments) == 3
    first = capsys.readouterr()
    assert "has 200 segments, too few for draws of 5000" in first.err
    assert "Mean dispersion of the draws" in first.out
    assert run_here(*arguments) == 3
    assert capsys.readouterr().out == first.out
    assert list((place / "here").iterdir()) == []
    assert len(list((place / "cache" / "lmeval-dispersion" / "dispersion-runs").iterdir())) == 1
