"""docs/reference/audit.md against what the commands print."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from json_schemas import changed, faults
from synthetic import planted_store, subjects_store

from lmeval_dispersion.auditing.calibrating.calibration import calibrate
from lmeval_dispersion.auditing.calibrating.prediction import predict
from lmeval_dispersion.auditing.compare import compare
from lmeval_dispersion.auditing.ranking import rank
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.report import render

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "audit.md").read_text()
CONTRACT = PAGE.split("<!-- contract -->")[1].split("<!-- end of contract -->")[0]
NAMED = {"slices", "run.tasks", "calibration.tasks", "paper_protocol.chosen", "mixtures.inside"}


def paths(value, at=""):
    """Every path of a report to a plain value, as the contract writes it."""
    if isinstance(value, dict):
        for key, item in value.items():
            name = "NAME" if at in NAMED else key
            yield from paths(item, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{at}[]")
    else:
        yield at


def expanded(text):
    """The paths that ``before.{one,other}`` writes together, or the one path."""
    before, _, names = text.rstrip("}").partition("{")
    return [before + name for name in names.split(",")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    stores = [
        planted_store(folder / "planted", n=1200, effect=0.5, truncated=True),
        subjects_store(folder / "tasks", subjects=12, each=40, tasks=2, seed=3),
        subjects_store(folder / "guessing", accuracy=0.25),
        planted_store(folder / "few", n=120, accuracy=0.05),
        planted_store(folder / "unlabelled", n=40, correct=np.nan),
        planted_store(
            folder / "odd",
            n=120,
            logprobs=[[np.nan, -1.0]] * 3 + [[-1.0, -2.0], [-2.0, -1.0]] * 58 + [[-1.0, -1.5]],
        ),
    ]
    metrics = ["all" if store in (stores[1], stores[3]) else "dispersion" for store in stores]
    pairs = zip(stores, metrics, strict=True)
    reports = [audit(store, details=True, metrics=name) for store, name in pairs]
    return [json.loads(render(report.document(), "json")) for report in reports]


def test_the_contract_and_the_reports_have_the_same_paths(reports):
    first_cells = "\n".join(line.split(" | ")[0] for line in CONTRACT.splitlines())
    documented = {path for text in re.findall(r"`([^`]+)`", first_cells) for path in expanded(text)}
    printed = {path for report in reports for path in paths(report)}
    missing = {path for path in printed if path.endswith(".missing")}
    assert documented - printed == set(), "documented and never printed"
    assert printed - missing - documented == set(), "printed and not documented"
    assert missing, "the test must see parts that are missing"


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Calibrators, their reports, what they predict, comparisons and rankings."""
    folder = tmp_path_factory.mktemp("others")
    run = read_run(planted_store(folder / "a", n=1500))
    unlabelled = read_run(planted_store(folder / "c", n=900, correct=np.nan, seed=2))
    noise = read_run(planted_store(folder / "noise", n=1200, effect=0.0))
    fitted = [calibrate(run), calibrate(noise)]
    predicted = [
        predict(replace(report.calibrator, beats_trivial=True), unlabelled) for report in fitted
    ]
    stores = [
        subjects_store(folder / f"{seed}", subjects=10, each=40, seed=seed) for seed in (3, 4)
    ]
    ranked = [rank(read_run(stores[0])), rank(unlabelled)]
    assert [report.better for report in fitted] == [True, False]
    return [json.loads(report.calibrator.to_json()) for report in fitted] + [
        json.loads(render(one.document(), "json"))
        for one in (*fitted, *predicted, compare(stores), *ranked)
    ]


def shortened(value):
    """With one row of every list of rows: only the first is changed."""
    if isinstance(value, list):
        return [
            shortened(item)
            for item in (value[:1] if value and isinstance(value[0], dict) else value)
        ]
    return (
        {key: shortened(item) for key, item in value.items()} if isinstance(value, dict) else value
    )


def test_documents_are_valid_and_not_with_a_renamed_or_missing_key(reports, others):
    assert [faults(report) for report in reports] == [[]] * len(reports)
    documents = [reports[0], *others]
    assert len({document.get("schema") or document["format"] for document in documents}) == 6
    free = {"tasks", "identity", "doc_ids", "slices", "inside", "chosen"}  # keys of a run
    for document in documents:
        assert faults(document) == []
        document = shortened(document)
        for change in ("renamed", "missing"):
            for other, where in changed(document, change):
                *above, key = where.replace("[]", "").split(".")
                if key not in ("format", "schema") and not free & set(above):
                    assert faults(other), f"{where} {change}"
