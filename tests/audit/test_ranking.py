"""Documents by contribution on stores whose truth is known, and what confounds the order."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from synthetic import documents, planted_store, vectors

from lmeval_dispersion.auditing.ranking import clustered, hard_tail, ranked_documents, ranking_report
from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.store import write_store


def test_a_planted_relation_ranks_with_the_right_strength(planted):
    found = ranking_report(planted)
    ours = found.signals[0]
    contribution = planted.vectors.contributions()
    pairs = contribution[planted.right][:, None] > contribution[~planted.right][None]
    assert ours.auroc == pytest.approx(pairs.mean())
    assert ours.auroc > 0.75
    wrong = ~planted.right[np.argsort(contribution, kind="stable")]
    for share in (5, 10, 50):
        expected = wrong[: round(len(wrong) * share / 100)].sum() / wrong.sum()
        assert getattr(ours, f"errors_{share}") == pytest.approx(expected)
    assert spearmanr(range(10), ours.deciles).statistic > 0.9
    assert [row.signal for row in found.signals[1:3]] == ["top probability", "query perplexity (negative)"]
    assert found.by == "subject"
    assert ours.inside_low < ours.inside < ours.inside_high


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
    ordered = [row.dispersion for row in table.rows]
    assert ordered == sorted(ordered)
    assert table.association.spearman == 1.0
    ranking = ranking_report(run)
    area = next(row.auroc for row in ranking.signals if row.signal == "contribution")
    assert area > 0.65
    assert ranking.signals[0].inside == pytest.approx(area, abs=0.03)


def test_few_wrong_documents_are_said_to_be_too_few(tmp_path):
    found = ranking_report(read_run(planted_store(tmp_path, n=300, accuracy=0.96)))
    assert found.wrong < 20
    assert not any(row.reliable for row in found.signals)
    assert found.best_other.missing == "no other signal has 20 right and 20 wrong documents"


def test_the_hard_tail_is_the_lowest_tenth_and_shows_planted_clusters(tmp_path):
    """Two tight bundles of near-duplicates are the least contributing documents; their texts name them."""
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.5
    texts = ["cats"] * 20 + ["dogs"] * 20 + [f"other {i}" for i in range(360)]
    x = rng.normal(size=(400, 16)) + 4 * np.eye(16)[0]
    x[:20] = 4 * np.eye(16)[0] + 1.2 * np.eye(16)[1] + 0.05 * rng.normal(size=(20, 16))
    x[20:40] = 4 * np.eye(16)[0] - 1.2 * np.eye(16)[1] + 0.05 * rng.normal(size=(20, 16))
    frame = documents(right, rng=rng).assign(text=texts, subject=["a"] * 20 + ["b"] * 380)
    write_store(tmp_path, documents=frame, vectors={"last": x}, manifest={})
    run = read_run(tmp_path)
    found = hard_tail(run)
    assert found.documents == 40
    assert sum(cluster.documents for cluster in found.clusters) == 40
    for cluster in found.clusters:
        kinds = {row.text for row in found.typical if row.cluster == cluster.cluster}
        assert kinds in ({"cats"}, {"dogs"})
        assert cluster.subjects.startswith("a" if kinds == {"cats"} else "b")


def test_clusters_that_are_there_are_found():
    rng = np.random.default_rng(0)
    centres = np.eye(6)[:3] * 4
    truth = rng.integers(3, size=300)
    x = (centres[truth] + 0.3 * rng.normal(size=(300, 6))).astype(np.float32)
    labels, distance = clustered(x, 3)
    for cluster in range(3):
        assert len(set(labels[truth == cluster])) == 1
    centre = x[labels == labels[7]].mean(axis=0)
    assert distance[7] == pytest.approx(float(((x[7] - centre) ** 2).sum()), rel=1e-4)
    alike, distance = clustered(np.ones((5, 3), dtype=np.float32), 3)
    assert len(set(alike.tolist())) == 1
    assert distance == pytest.approx(np.zeros(5), abs=1e-6)
