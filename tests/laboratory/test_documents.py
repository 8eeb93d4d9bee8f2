"""Reports of the four analyses and of a comparison: every form says what the frames say."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from json_schemas import faults

from lmeval_dispersion.laboratory import clusters, condensation, law, sublayers
from lmeval_dispersion.laboratory.perplexity_law import LawResult, correlations
from lmeval_dispersion.laboratory.reports.documents import comparison_document, result_document
from lmeval_dispersion.report import Chart, Table, render

BOTH = ("untrained", "shuffled")
KINDS = ("law", "sublayers", "condensation", "clusters")


@pytest.fixture(scope="module")
def results(model, data, repeating):
    contexts = {"ngram": 4, "occurrences": 20, "contexts": 12, "context": 6, "layers": "layer.1,last"}
    return {
        "law": law(model, data, segment=30, bins=4, bin_size=10, layers="all", contexts=(8,), control=BOTH),
        "sublayers": sublayers(model, data, segment=30, sizes=(5, 20)),
        "condensation": condensation(model, data, segment=30, texts=20, control=BOTH),
        "clusters": clusters(model, repeating, **contexts),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_the_manifest_and_every_frame(results, kind):
    document = result_document(results[kind])
    found = json.loads(render(document, "json"))
    assert list(found) == ["format", "kind", "answer", "manifest", "tables"]
    assert faults(found) == []
    assert all(faults({key: found[key] for key in found if key != left}) for left in list(found)[1:])
    assert found["answer"] == list(document.answer)
    assert faults({**found, "answer": []})
    assert faults({**found, "tables": {f"{name}_new": rows for name, rows in found["tables"].items()}})
    assert (found["format"], found["kind"]) == ("dispersion-lab-report/1", kind)
    assert found["manifest"] == results[kind].manifest
    frames = {name: value for name, value in vars(results[kind]).items() if isinstance(value, pd.DataFrame)}
    assert "controls" in frames or kind != "law"
    assert list(found["tables"]) == list(frames)
    for name, frame in frames.items():
        again = pd.DataFrame(found["tables"][name], columns=frame.columns)
        pd.testing.assert_frame_equal(again, frame.reset_index(drop=True), check_dtype=False)


@pytest.mark.parametrize("kind", KINDS)
def test_csv_is_the_frame(results, kind):
    frame = results[kind].to_frame().reset_index(drop=True)
    found = pd.read_csv(io.StringIO(render(result_document(results[kind]), "csv")))
    assert list(found.columns) == list(frame.columns)
    assert len(found) == len(frame) > 1
    for column in frame.select_dtypes("number"):
        assert np.allclose(found[column], frame[column], rtol=1e-8, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_readers_see_the_answer_first_then_every_row_and_the_limits(results, kind):
    document = result_document(results[kind])
    text = render(document, "table", width=250)
    flat = " ".join(text.split())
    assert flat.startswith(" ".join(document.answer[0].split()))
    tables = list(document.tables().values())
    assert len(tables) == (3 if kind == "law" else 2)
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                value = row[column.key]
                # Columns that may be dropped go first where a table is too wide.
                if column.format.endswith("f") and not column.drop and np.isfinite(value):
                    assert format(value, column.format) in flat
    assert all(" ".join(limit.replace("`", "").split()) in flat for limit in document.limits)
    page = render(document, "html")
    assert "Content-Security-Policy" in page
    assert document.limits[-1] in page


def test_answers_are_the_frames_numbers(results):
    answer = " ".join(result_document(results["law"]).answer)
    rows = results["law"].correlations.query("measure == 'dispersion' and layer == 'last'")
    for row in rows.itertuples():
        assert f"(r {row.pearson:+.2f} ({row.low:+.2f} to {row.high:+.2f}) at last" in answer
    controls = results["law"].controls.query("measure == 'dispersion' and layer == 'last'")
    assert len(controls) == 4
    for row in controls.itertuples():
        assert f"{row.control} {row.pearson:+.2f}" in answer
    trend = results["condensation"].summary.query("control == ''").iloc[0]
    shown = f"{trend['trend']:+.2f} ({trend['trend_low']:+.2f} to {trend['trend_high']:+.2f})"
    answer = " ".join(result_document(results["condensation"]).answer)
    assert shown in answer
    for row in results["condensation"].summary.query("control != ''").itertuples():
        assert f"{row.control} {row.trend:+.2f}" in answer
    wide = (
        results["sublayers"]
        .draws.query("segments == 20")
        .pivot(index="draw", columns="layer", values="dispersion")
    )
    best = wide.mean().idxmax()
    second = wide.mean().idxmin()
    won = int((wide[best] > wide[second]).sum())
    answer = result_document(results["sublayers"]).answer[0]
    assert f"{best} lies above {second} by {wide.mean()[best] - wide.mean()[second]:.4f}, " in answer
    assert f"({won} of 10 draws)" in answer
    ratio = results["clusters"].summary.query("layer == 'last'").iloc[0]
    answer = " ".join(result_document(results["clusters"]).answer)
    assert f"{ratio['ratio']:.2f} ({ratio['ratio_low']:.2f} to {ratio['ratio_high']:.2f})" in answer


def test_readers_learn_what_was_asked_and_of_which_inputs(results, data):
    document = result_document(results["law"])
    text = render(document, "markdown")
    assert "Do texts that the model finds easier lie further apart?" in text
    assert document.answer[0] in text
    assert str(data) in text


def test_a_reason_is_shown_only_where_there_is_one(results):
    correlations, controls, _ = result_document(results["law"]).tables().values()
    assert "control" in [column.key for column in controls.columns]
    assert "reason" not in [column.key for column in correlations.columns]


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("law", ["correlations", "points"]),
        ("sublayers", ["draws"]),
        ("condensation", ["layers", "histogram"]),
        ("clusters", ["summary"]),
    ],
)
def test_charts_hold_their_frames(results, kind, frames):
    parts = [part for section in result_document(results[kind]).sections for part in section.parts]
    charts = [part for part in parts if isinstance(part, Chart)]
    assert len(charts) == len(frames)
    for chart, name in zip(charts, frames, strict=True):
        rows = next(iter(chart.draw().to_dict()["datasets"].values()))
        frame = getattr(results[kind], name)
        expected = {
            "correlations": lambda f: 3 * (f["measure"] == "dispersion").sum(),  # with two controls
            "histogram": lambda f: (f["density"] > 0).sum(),
            "summary": lambda f: 2 * len(f),  # within and between
        }.get(name, len)(frame)
        assert len(rows) == expected > 0


def test_a_comparison_has_an_id_of_its_own_and_counts_what_is_clear():
    frame = pd.DataFrame(
        {
            "layer": ["layer.0", "last", "last"],
            "figure": ["dispersion", "dispersion", "pearson r"],
            "first": [0.1, 0.2, float("nan")],
            "second": [0.2, 0.25, 0.5],
            "difference": [0.1, 0.05, float("nan")],
            "low": [0.05, -0.01, float("nan")],
            "high": [0.15, 0.11, float("nan")],
            "paired": [True, True, False],
        }
    )
    document = comparison_document(frame, "a", "b")
    assert document.answer == [
        "b minus a: 1 of 3 differences is told apart from 0, all taken together.",
        "The surest of each metric: layer.0, dispersion +0.1 (+0.05 to +0.15).",
    ]
    found = json.loads(render(document, "json"))
    assert list(found) == ["format", "answer", "first", "second", "rows"]
    assert faults(found) == []
    without = [{key: value for key, value in row.items() if key != "paired"} for row in found["rows"]]
    assert faults({**found, "rows": without})
    assert (found["format"], found["first"], found["second"]) == ("dispersion-lab-comparison/1", "a", "b")
    assert found["answer"] == list(document.answer)
    assert found["rows"][0] == {
        "layer": "layer.0", "figure": "dispersion", "first": 0.1, "second": 0.2, "difference": 0.1,
        "low": 0.05, "high": 0.15, "paired": True,
    }  # fmt: skip
    assert found["rows"][2]["difference"] is None
    assert render(document, "csv").splitlines()[2] == "last,dispersion,0.2,0.25,0.05,-0.01,0.11,True"
    assert [type(part) for part in document.sections[0].parts] == [Chart, Table]
    chart = document.sections[0].parts[0].draw().to_dict()
    labels = [row["row"] for rows in chart["datasets"].values() for row in rows if "row" in row]
    assert labels == ["layer.0, dispersion", "last, dispersion", "last, pearson r"]


def test_thirty_layers_are_rows_of_a_heat_map():
    rng = np.random.default_rng(0)
    layers = [*(f"layer.{k}" for k in range(29)), "last"]
    points = pd.concat(
        pd.DataFrame(
            {
                "split": "data", "perplexity": kind, "layer": layer, "bin": np.arange(0, 60, 3),
                "mean_perplexity": np.linspace(10, 90, 20), "mean_nll": np.log(np.linspace(10, 90, 20)),
                "dispersion": 10.0**-place + rng.normal(size=20) * 10.0**-place,
            }
        )
        for kind in ("sequence", "last@16")
        for place, layer in enumerate(layers)
    )  # fmt: skip
    result = LawResult(MANIFEST, correlations(points, 0), points, OVERALL, None)
    document = result_document(result)
    lines, heat = [part for section in document.sections for part in section.parts if isinstance(part, Chart)]
    spec = heat.draw().to_dict()
    rows = pd.DataFrame(next(iter(spec["datasets"].values())))
    assert len(rows) == 2 * 30 * 20
    assert spec["spec"]["mark"]["type"] == "rect"
    # Every layer is in its own standard deviations, whatever its level; bins stand from easy to hard.
    spread = rows.groupby(["panel", "layer"])["deviation"].agg(["mean", "std"])
    assert spread["mean"].abs().max() < 1e-3
    assert (spread["std"] - 1).abs().max() < 1e-3
    assert (
        rows.sort_values("place").groupby(["panel", "layer"])["mean_perplexity"].is_monotonic_increasing.all()
    )
    names = {row["layer"] for rows in lines.draw().to_dict()["datasets"].values() for row in rows}
    assert names == set(layers)


def test_a_page_of_an_undefined_correlation_gives_its_reason():
    points = pd.DataFrame({"split": "data", "perplexity": "sequence", "layer": "last", "bin": range(3)})
    points = points.assign(mean_perplexity=[1.0, 2, 4], mean_nll=np.log([1, 2, 4]), dispersion=0.5)
    result = LawResult(MANIFEST, correlations(points, 0), points, OVERALL, None)
    assert "a correlation with a constant is not defined" in result.to_html()


OVERALL = pd.DataFrame({"split": ["data"], "layer": ["last"], "dispersion": [0.5]})
MANIFEST = {
    "kind": "law", "models": [{"model": "planted", "name": "planted"}],
    "names": {"models": ["planted"], "texts": ["planted.txt"]},
    "settings": {}, "versions": {}, "created": "2026-01-01",
}  # fmt: skip


def test_a_report_needs_no_torch_and_draws_nothing_until_asked():
    code = (
        "import sys, lmeval_dispersion.laboratory.reports.documents; "
        "import lmeval_dispersion.laboratory.comparison; "
        "print(sorted({'altair', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
