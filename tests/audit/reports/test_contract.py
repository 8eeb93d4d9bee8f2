"""docs/reference/audit.md against what the commands print."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from json_schemas import faults
from synthetic import planted_store, subjects_store

from lmeval_dispersion.audit.calibration.calibrator import (
    fit_calibrator,
    fit_paper_calibrator,
    predict_slices,
)
from lmeval_dispersion.audit.compare import compared_stores
from lmeval_dispersion.audit.reports.report import audit_report, report_json
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.geometry import SPECTRUM

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "audit.md").read_text()
CONTRACT = PAGE.split("<!-- contract -->")[1].split("<!-- end of contract -->")[0]
NAMED = {
    "slices",
    "run.tasks",
    "paper_protocol.protocols",
    "paper_protocol.chosen",
    "ranking.signals[].error_share",
    "ranking.signals[].inside",
    "mixtures.inside",
}
METRICS = (*SPECTRUM, "dispersion")


def paths(value, at=""):
    """Every path of a report to a plain value, as the contract writes it."""
    if isinstance(value, dict):
        for key, item in value.items():
            rival = re.sub(r"_se$", "", key) in METRICS and at in ("metrics.overall", "metrics.slices[]")
            name = "NAME" if at in NAMED else re.sub(r"^(.*?)(_se)?$", r"NAME\2", key) if rival else key
            yield from paths(item, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{at}[]")
    else:
        yield at


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    stores = [
        planted_store(folder / "noise", n=1200, effect=0.0),
        subjects_store(folder / "tasks", subjects=12, each=40, tasks=2, seed=3),
        subjects_store(folder / "guessing", accuracy=0.25),
        planted_store(folder / "few", n=120, accuracy=0.05),
        planted_store(folder / "unlabelled", n=40, correct=np.nan),
        planted_store(folder / "truncated", n=1200, truncated=True),
    ]
    reports = [audit_report(read_run(store)) for store in stores]
    reports += [audit_report(read_run(store), metrics="all") for store in (stores[1], stores[3])]
    return [json.loads(report_json(report)) for report in reports]


def test_the_contract_and_the_reports_have_the_same_paths(reports):
    first_cells = "\n".join(line.split(" | ")[0] for line in CONTRACT.splitlines())
    documented = set(re.findall(r"`([^`]+)`", first_cells))
    printed = {path for report in reports for path in paths(report)}
    missing = {path for path in printed if path.endswith(".missing")}
    assert documented - printed == set(), "documented and never printed"
    assert printed - missing - documented == set(), "printed and not documented"
    assert missing, "the test must see parts that are missing"


def test_the_reports_are_valid_by_their_schema_and_a_renamed_key_is_not(reports):
    assert [faults(report) for report in reports] == [[]] * len(reports)
    first = reports[0]
    for key in first.keys() - {"format"}:
        without = {other: value for other, value in first.items() if other != key}
        assert faults(without), key
        assert faults({**without, f"{key}_new": first[key]}), key
    run = {**first["run"], "labeled": first["run"]["labelled"]}
    assert any(fault.startswith("$.run: ") for fault in faults({**first, "run": run}))


def test_the_numbers_are_finite_and_in_their_ranges(reports):
    shares = {"accuracy", "accuracy_low", "accuracy_high", "auroc", "predicted", "share_monotone"}

    def walk(value, at=""):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, key)
        elif isinstance(value, list):
            for item in value:
                walk(item, at)
        elif isinstance(value, float) and at in shares:
            assert 0 <= value <= 1, at
        elif isinstance(value, float) and at in ("dispersion", "least_dispersed"):
            assert 0 <= value <= 2

    for report in reports:
        walk(report)


def test_the_other_documents_name_their_keys(tmp_path):
    run = read_run(planted_store(tmp_path / "a", n=1500))
    unlabelled = read_run(planted_store(tmp_path / "c", n=900, correct=np.nan, seed=2))
    keys = set()
    for fitted in (fit_calibrator(run), fit_paper_calibrator(run, size=100)):
        predicted = predict_slices(fitted, unlabelled)
        keys |= {*fitted, *predicted, *predicted["slices"][0], *fitted.get("slices", [{}])[0]}
        keys |= {*fitted.get("worth", {}), *fitted.get("validation", {})}
    other = planted_store(tmp_path / "b", n=1500, seed=0)
    compared = compared_stores([tmp_path / "a", other])
    keys |= {*compared, *compared["others"][0]["slices"][0]}
    keys = {key for key in keys if not key.startswith("accuracy_")}  # "the same five of `accuracy`"
    for key in keys:
        assert f"`{key}`" in PAGE, key
