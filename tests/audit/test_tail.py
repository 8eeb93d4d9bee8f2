"""The hard tail: planted clusters are found and shown by their texts."""

import numpy as np
import pytest
from synthetic import documents

from lmeval_dispersion.auditing.run import read_run
from lmeval_dispersion.auditing.tail import clustered, hard_tail
from lmeval_dispersion.store import write_store


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
    assert found["documents"] == 40
    assert sum(cluster["documents"] for cluster in found["clusters"]) == 40
    for cluster in found["clusters"]:
        kinds = {document["text"] for document in cluster["typical"]}
        assert kinds in ({"cats"}, {"dogs"})
        assert cluster["subjects"][0]["subject"] == ("a" if kinds == {"cats"} else "b")


def test_clusters_that_are_there_are_found():
    rng = np.random.default_rng(0)
    centres = np.eye(6)[:3] * 4
    truth = rng.integers(3, size=300)
    x = (centres[truth] + 0.3 * rng.normal(size=(300, 6))).astype(np.float32)
    labels, distance = clustered(x, 3)
    for cluster in range(3):
        assert len(set(labels[truth == cluster])) == 1
    for i in (0, 7, 200):
        centre = x[labels == labels[i]].mean(axis=0)
        assert distance[i] == pytest.approx(float(((x[i] - centre) ** 2).sum()), rel=1e-4)


def test_clustering_takes_duplicates_and_single_rows():
    labels, distance = clustered(np.ones((5, 3), dtype=np.float32), 3)
    assert len(set(labels.tolist())) == 1
    np.testing.assert_allclose(distance, 0, atol=1e-6)
    assert clustered(np.ones((1, 3), dtype=np.float32), 1)[0].tolist() == [0]
