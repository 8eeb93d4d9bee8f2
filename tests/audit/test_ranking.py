"""Documents by contribution on stores whose truth is known, and what confounds the order."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from synthetic import documents, planted_store, vectors

from lmeval_dispersion.auditing.ranking import ranked_documents, ranking_report
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.store import write_store


def test_a_planted_relation_ranks_with_the_right_strength(planted):
    found = ranking_report(planted)
    ours = found["signals"][0]
    contribution = planted.vectors.contributions()
    pairs = contribution[planted.right][:, None] > contribution[~planted.right][None]
    assert ours["auroc"] == pytest.approx(pairs.mean())
    assert ours["auroc"] > 0.75
    wrong = ~planted.right[np.argsort(contribution, kind="stable")]
    for share in (1, 10, 50):
        expected = wrong[: round(len(wrong) * share / 100)].sum() / wrong.sum()
        assert ours["error_share"][str(share)] == pytest.approx(expected)
    accuracies = [decile["accuracy"] for decile in ours["deciles"]]
    assert spearmanr(range(10), accuracies).statistic > 0.9
    assert sum(decile["documents"] for decile in ours["deciles"]) == 3000
    verdicts = {row["signal"]: row["verdict"] for row in found["against"]}
    assert set(verdicts.values()) == {"better"}
    assert {"top probability", "margin", "entropy (negative)", "query perplexity (negative)"} <= set(verdicts)


def test_the_ranked_documents_start_with_the_lowest(planted):
    frame = pd.DataFrame(ranked_documents(planted))
    assert frame["rank"].tolist() == list(range(1, 3001))
    assert frame["contribution"].is_monotonic_increasing
    assert frame["contribution"].mean() == pytest.approx(planted.vectors.estimate().mean)
    assert frame["percentile"].iloc[-1] == 100


def test_a_planted_confound_shows_in_the_slices_and_in_the_ranking(tmp_path):
    """Length drives both the spread and the answers: its slices say so, and inside them little is left."""
    rng = np.random.default_rng(0)
    n = 3000
    length = rng.integers(20, 200, size=n)
    right = rng.random(n) < length / 220
    frame = documents(right, rng=rng).assign(prompt_tokens=length)
    x = vectors(0.5 + length / 100, rng=rng)
    write_store(tmp_path, documents=frame, vectors={"last": x}, manifest={"model": "m"})
    run = read_run(tmp_path)
    table = slice_table(run, slicings(run)["length"])
    ordered = [row["dispersion"] for row in table["rows"]]
    assert ordered == sorted(ordered)
    assert table["association"]["spearman"] == 1.0
    ranking = ranking_report(run)
    area = next(row["auroc"] for row in ranking["signals"] if row["signal"] == "contribution")
    length_row = next(row for row in ranking["confounds"] if row["quantity"] == "prompt length")
    assert area > 0.65
    assert length_row["spearman"] > 0.7
    assert length_row["auroc_within_bands"] < 0.5 + (area - 0.5) / 2
    inside = ranking["signals"][0]["inside"]["subject"]
    assert inside["auroc"] == pytest.approx(area, abs=0.03)
    confounds = {row["quantity"]: row["spearman"] for row in ranking["confounds"]}
    assert abs(confounds["query perplexity"]) < 0.1


def test_the_auroc_inside_subjects_is_that_of_a_loop_over_pairs(planted):
    contribution = planted.vectors.contributions()
    found = ranking_report(planted)["signals"][0]["inside"]["subject"]
    wins = pairs = 0
    for _, frame in planted.documents.groupby("subject"):
        right = frame.index[planted.right[frame.index]]
        wrong = frame.index[~planted.right[frame.index]]
        wins += sum((contribution[i] > contribution[wrong]).sum() for i in right)
        pairs += len(right) * len(wrong)
    assert found["auroc"] == pytest.approx(wins / pairs)
    assert found["pairs"] == pairs
    assert found["parts"] == 6
    assert found["auroc_low"] < found["auroc"] < found["auroc_high"]


def test_a_subject_effect_vanishes_inside_subjects(tmp_path):
    """Subjects differ in spread and in accuracy; inside one, answers are luck."""
    rng = np.random.default_rng(0)
    subject = rng.integers(6, size=2400)
    right = rng.random(2400) < 0.2 + 0.1 * subject
    frame = documents(right, rng=rng).assign(subject=[f"s{i}" for i in subject])
    write_store(
        tmp_path, documents=frame, vectors={"last": vectors(0.6 + 0.2 * subject, rng=rng)}, manifest={}
    )
    ranking = ranking_report(read_run(tmp_path))
    ours = ranking["signals"][0]
    assert ours["auroc"] > 0.58
    assert abs(ours["inside"]["subject"]["auroc"] - 0.5) < 0.05


def test_few_wrong_documents_are_said_to_be_too_few(tmp_path):
    found = ranking_report(read_run(planted_store(tmp_path, n=300, accuracy=0.96)))
    assert found["wrong"] < 20
    assert not any(row["reliable"] for row in found["signals"])
    assert found["best_other"]["missing"] == "no other signal has 20 right and 20 wrong documents"
    assert {row["verdict"] for row in found["against"]} == {"not separated"}
