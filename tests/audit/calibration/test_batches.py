"""What is drawn from the labelled documents: exact shares, disjoint parts, batches of one subject."""

import numpy as np
import pytest

from lmeval_dispersion.audit.calibration.batches import (
    batch_size,
    mixture_batches,
    mixture_size,
    natural_batches,
    split,
)
from lmeval_dispersion.geometry import dispersion


def test_every_mixture_has_its_exact_share_without_replacement(planted):
    rng = np.random.default_rng(0)
    rows = planted.labelled[:800]
    batches = mixture_batches(planted, rows, 100, repeats=2, rng=rng)
    assert len(batches.rows) == 102
    assert sorted(set(batches.accuracy.tolist())) == [k / 100 for k in range(0, 101, 2)]
    for chosen, accuracy, found in zip(batches.rows, batches.accuracy, batches.dispersion, strict=True):
        assert len(set(chosen.tolist())) == 100
        assert set(chosen.tolist()) <= set(rows.tolist())
        assert planted.right[chosen].mean() == accuracy
        u = planted.vectors.rows[chosen] + planted.vectors.mean
        assert found == pytest.approx(dispersion(u), rel=1e-5)


@pytest.mark.parametrize(
    ("smaller", "expected"), [(5000, 100), (100, 100), (99, 90), (47, 40), (25, 20), (19, 20), (0, 20)]
)
def test_slices_shrink_in_tens_and_not_below_twenty(smaller, expected):
    assert mixture_size(smaller) == expected


def test_the_parts_of_a_split_are_disjoint_and_20_10_70():
    parts = split(np.arange(1000), np.random.default_rng(0))
    assert [len(part) for part in parts] == [200, 100, 700]
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))


def test_batches_shrink_with_the_labels(planted):
    assert batch_size(planted, planted.labelled, 0.1, 100) == 100
    assert batch_size(planted, planted.labelled[:500], 0.1, 100) == 20
    rng = np.random.default_rng(0)
    natural = natural_batches(planted, planted.labelled, 100, rng)
    assert len(natural.rows) == 6
    for chosen in natural.rows:
        assert planted.documents["subject"].iloc[chosen].nunique() == 1
    assert natural_batches(planted, planted.labelled[:50], 100, rng).rows == []
