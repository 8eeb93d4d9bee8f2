"""Documents by contribution on stores whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr
from synthetic import documents, written

from lmeval_dispersion.auditing.ranking import (
    clustered,
    hard_tail,
    ranked_documents,
    ranking_report,
)
from lmeval_dispersion.auditing.run import read_run


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
    assert [row.signal for row in found.signals[1:3]] == [
        "top probability",
        "query perplexity (negative)",
    ]
    assert found.by == "subject"
    assert ours.inside_low < ours.inside < ours.inside_high


def test_the_ranked_documents_start_with_the_lowest(planted):
    frame = pd.DataFrame(ranked_documents(planted))
    assert frame["rank"].tolist() == list(range(1, 3001))
    assert frame["contribution"].is_monotonic_increasing
    assert frame["contribution"].mean() == pytest.approx(planted.vectors.estimate().mean)
    assert frame["percentile"].iloc[-1] == 100


def test_the_hard_tail_is_the_lowest_tenth_and_shows_planted_clusters(tmp_path):
    """Two tight bundles of near-duplicates are the least contributing documents; their texts name them."""
    rng = np.random.default_rng(0)
    right = rng.random(400) < 0.5
    texts = ["cats"] * 20 + ["dogs"] * 20 + [f"other {i}" for i in range(360)]
    x = rng.normal(size=(400, 16)) + 4 * np.eye(16)[0]
    x[:20] = 4 * np.eye(16)[0] + 1.2 * np.eye(16)[1] + 0.05 * rng.normal(size=(20, 16))
    x[20:40] = 4 * np.eye(16)[0] - 1.2 * np.eye(16)[1] + 0.05 * rng.normal(size=(20, 16))
    frame = documents(right, rng=rng).assign(text=texts, subject=["a"] * 20 + ["b"] * 380)
    run = read_run(written(tmp_path, frame, x))
    found = hard_tail(run)
    assert found.documents == 40
    assert sum(cluster.documents for cluster in found.clusters) == 40
    for cluster in found.clusters:
        kinds = {row.text for row in found.typical if row.cluster == cluster.cluster}
        assert kinds in ({"cats"}, {"dogs"})
        assert cluster.subjects.startswith("a" if kinds == {"cats"} else "b")
    labels, distance = clustered(x[:40], 2)
    assert [len(set(labels[:20])), len(set(labels[20:])), len(set(labels))] == [1, 1, 2]
    assert distance[:20] == pytest.approx(np.square(x[:20] - x[:20].mean(axis=0)).sum(axis=1))
    alike, distance = clustered(np.ones((5, 3)), 3)
    assert len(set(alike)) == 1
    assert distance == pytest.approx(np.zeros(5), abs=1e-6)
