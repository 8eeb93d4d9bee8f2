"""ECE, Brier score and the sentence on confidence, against sums written out, on planted confidences."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import concluded, documents, planted_store, vectors, written

from lmeval_dispersion.auditing.reliability import reliability, reliability_sentence
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import Missing, read_run


def confident_store(path, n=2000, *, gap=0.0, bent=0.0, seed=0):
    """Two choices; the likelier one is right by its probability minus ``gap``, ``bent`` around 0.75."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.5, 1.0, size=n)
    right = rng.random(n) < confidence - gap + bent * np.sign(confidence - 0.75)
    frame = documents(right, rng=rng).assign(
        logprobs=[[np.log(p) - 7, np.log1p(-p) - 7] for p in confidence]
    )
    return written(path, frame, vectors(np.ones(n), rng=rng, d=8))


def test_the_figures_are_the_sums_over_documents_and_bins(tmp_path):
    run = read_run(confident_store(tmp_path, gap=0.1))
    found = reliability(run)
    p, right = run.confidence, run.right
    ece = 0.0
    for i in range(10):
        inside = (p >= i / 10) & ((p < (i + 1) / 10) | (i == 9))
        if inside.any():
            ece += inside.mean() * abs(p[inside].mean() - right[inside].mean())
    assert found.ece == pytest.approx(ece)
    assert found.brier == pytest.approx(np.mean((p - right) ** 2))
    assert found.gap == pytest.approx(p.mean() - right.mean())
    assert [row.documents for row in found.bins] == np.histogram(p, np.linspace(0.5, 1, 6))[
        0
    ].tolist()
    assert sum(row.documents * row.accuracy for row in found.bins) == pytest.approx(right.sum())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gap": 0.1}, "The model is overconfident: "),
        ({"gap": -0.1}, "The model is underconfident: "),
        ({"bent": 0.12}, "right on average, but wrong at some levels of confidence: "),
        ({}, "confidence is not clearly wrong: "),
    ],
)
def test_each_sentence_stands_where_it_is_planted(tmp_path, options, said):
    report = audit(confident_store(tmp_path, **options), short=True)
    text = concluded(report)
    kinds = (
        "is overconfident",
        "is underconfident",
        "wrong at some levels",
        "is not clearly wrong",
    )
    assert said in text
    assert sum(kind in text for kind in kinds) == 1


def test_right_confidences_are_called_wrong_in_few_runs(tmp_path):
    run, wrong = read_run(confident_store(tmp_path, 150)), 0
    for seed in range(60):
        score = (np.random.default_rng(seed).random(150) < run.confidence).astype(float)
        wrong += "not clearly wrong" not in reliability_sentence(
            reliability(replace(run, score=score))
        )
    assert wrong <= 11  # two tests at 5 %: six expected


def test_without_choices_there_is_no_confidence_and_no_failure(tmp_path):
    report = audit(planted_store(tmp_path, 300, logprobs=[[]] * 300), details=True)
    assert isinstance(report.reliability, Missing)
    assert "reliability" not in report.missing
    assert (
        "Not judged: judging confidence needs 20 or more labelled documents" in report.to_markdown()
    )
