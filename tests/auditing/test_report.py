"""The whole report: equal bytes, plain numbers, and stores that lack something."""

import dataclasses
import json

import numpy as np
import pytest
from synthetic import concluded, documents, planted_store, subjects_store, vectors, written

from lmeval_dispersion.auditing.calibrating.calibrator import TRIVIAL
from lmeval_dispersion.auditing.compare import compare
from lmeval_dispersion.auditing.ranking import rank, ranked_documents
from lmeval_dispersion.auditing.report import JUDGED, Audit, audit
from lmeval_dispersion.auditing.run import Missing, read_run
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import render


def test_noise_is_no_better_than_the_trivial_predictor(noise):
    report = audit(noise, details=True)
    verdicts = report.paper_protocol.verdicts
    assert [verdict.kind for verdict in verdicts] == ["whole", "slices", "mixtures"]
    assert not any(verdict.better for verdict in verdicts)
    assert (
        "Whole test part: dispersion is no better than the trivial predictor"
        in report.to_markdown()
    )
    assert "Dispersion cannot replace labels here" in concluded(report)


def test_same_store_and_seed_same_bytes(tmp_path):
    path = planted_store(tmp_path, n=900)
    first, second, other = (
        audit(path, seed=s, details=True).document().contract() for s in (0, 0, 1)
    )
    assert '"chosen"' in first
    assert first == second != other


def test_parts_that_are_no_finding_are_left_out_and_not_computed(tmp_path, monkeypatch):
    run = read_run(subjects_store(tmp_path, law=0.5, accuracy=0.25))
    said = "Not computed, as there is no verdict: mixtures, calibration, the paper's protocol and ranking"
    whole = " ".join(render(audit(run, details=True).document(), "table", details=True).split())
    assert "Not computed" not in whole
    assert whole.count("Nothing in this section is a finding.") == 4
    for name in ("mixture_curves", "calibrate", "paper_protocol", "ranking_report"):
        monkeypatch.setattr(f"lmeval_dispersion.auditing.report.{name}", None)
    for short in (True, False):
        report = audit(run, short=short)
        assert said in " ".join(render(report.document(), "table").split())
        assert report.answer()[0].startswith("No verdict: ")
        assert report.missing == {}
        assert "left out" in report.to_dict()["ranking"]["missing"]


@pytest.mark.parametrize(
    ("options", "part", "reason"),
    [
        ({"correct": 0.0}, "mixtures", "every one of the 300 labelled documents was answered"),
        ({"correct": 1.0}, "mixtures", "every one of the 300 labelled documents was answered"),
        ({"correct": np.nan}, "ranking", "has a label"),
        ({"n": 1}, "hard_tail", "got 1"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_had_say_why_and_the_rest_stays(tmp_path, options, part, reason):
    report = audit(read_run(planted_store(tmp_path, **{"n": 300, **options})), details=True)
    assert set(report.missing) - {"hard_tail"} == {
        "mixtures",
        "calibration",
        "paper_protocol",
        "ranking",
    }
    assert reason in report.missing[part]
    assert report.to_html().count("Not available") == len(report.missing)
    printed = json.loads(render(report.document(), "json"))["overall"]
    if options == {"n": 1}:
        assert printed["reason"] == "a dispersion needs two documents"
        assert printed["dispersion"] is None
    else:
        assert printed["dispersion"] > 0
        assert len(report.slices["subject"].rows) == 6
        assert report.slices["subject"].association.missing


def test_every_section_that_is_missing_says_why(planted):
    """The parts come from the report's fields: a new one cannot be forgotten."""
    parts = [field.name for field in dataclasses.fields(Audit) if "Missing" in str(field.type)]
    assert set(parts) >= {*JUDGED, "hard_tail", "reliability"}
    reasons = {name: Missing(f"the reason of {name}") for name in parts}
    report = dataclasses.replace(audit(planted, short=True), **reasons)
    assert report.missing == {
        name: r.missing for name, r in reasons.items() if name != "reliability"
    }
    page = report.to_markdown()
    assert [name for name in parts if f": the reason of {name}" not in page] == []


def test_documents_without_direction_are_left_out_and_counted(tmp_path):
    rng = np.random.default_rng(0)
    x = vectors(np.ones(200), rng=rng)
    x[3], x[50] = 0, np.nan
    run = read_run(written(tmp_path, documents(np.arange(200) % 2, rng=rng), x))
    report = audit(run, short=True)
    assert report.run["documents"] == 198
    assert report.run["without_direction"] == 2
    assert "vector is zero or not finite: 2 of 200 documents" in report.notes[0]
    assert report.overall.dispersion == pytest.approx(
        dispersion(np.delete(x, [3, 50], 0)), rel=1e-3
    )
    assert 3 not in [document.doc_id for document in ranked_documents(run)]


def test_scores_between_and_missing_labels_and_confidences_are_said_and_the_rest_is_used(tmp_path):
    rng = np.random.default_rng(0)
    scores = np.where(rng.random(1200) < 0.5, rng.random(1200), np.nan)
    scores[0] = 0.5  # no correct answer, as in lm-eval's figures
    run = planted_store(tmp_path, n=1200, correct=scores, logprobs=[[]] * 1200, truncated=True)
    report = audit(run, details=True)
    labelled = int((~np.isnan(scores)).sum())
    assert read_run(run).right.tolist() == (scores > 0.5).tolist()
    assert (report.run["labelled"], report.ranking.documents, report.missing) == (
        labelled,
        labelled,
        {},
    )
    assert [note.partition(": ")[0] for note in report.notes] == [
        "Prompts that were too long for the model and lost their beginning",
        "Documents without a label, of which only the vectors are used",
        "Documents with a score between 0 and 1",
    ]
    assert "ATC" not in {row.estimator for row in report.paper_protocol.errors}
    assert [row.estimator for row in report.calibration.estimators] == [
        "dispersion, calibrated",
        TRIVIAL,
    ]
    assert {row.signal for row in report.ranking.signals}.isdisjoint({"top probability"})
    assert "confidence" not in report.slices


def test_the_bundled_runs_are_there_in_python_too():
    whole = audit(demo=True, short=True)
    assert whole.answer() == audit(data_folder("demo_runs") / "sums-30", short=True).answer()
    assert compare(demo=True).documents == 600
    with pytest.raises(UsageError, match="demo=True"):
        audit()
    with pytest.raises(UsageError, match="demo=True"):
        compare(["run"], demo=True)


@pytest.mark.parametrize("asked", [audit, rank])
@pytest.mark.parametrize("seed", [-1, None])
def test_a_seed_that_no_generator_takes_is_a_sentence(asked, seed):
    with pytest.raises(UsageError, match="seed: expected "):
        asked(demo=True, seed=seed)
