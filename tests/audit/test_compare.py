"""Comparing runs: paired differences by hand, and what must not be compared."""

import json

import numpy as np
import pytest
from synthetic import documents, planted_store, written

from lmeval_dispersion.auditing.compare import compare_runs
from lmeval_dispersion.errors import MixedStoresError, UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.report import render
from lmeval_dispersion.store import read_store


def store(path, *, seed=0, shift=0.0, n=300, order=None, hashes="h", model="m", d=24):
    """Documents are the same for every seed; vectors and answers differ."""
    rng = np.random.default_rng(seed)
    right = rng.random(n) < 0.5 + shift
    frame = documents(right, rng=np.random.default_rng(99))
    frame["correct"] = right.astype(float)
    frame["doc_hash"] = [f"{hashes}{i}" for i in range(n)]
    base = np.random.default_rng(7).normal(size=(n, d))
    x = base + 0.3 * rng.normal(size=(n, d)) + 3 * np.eye(d)[0] * (1 - shift)
    order = np.arange(n) if order is None else order
    return written(path, frame.iloc[order], x[order], {"model": model})


def test_differences_and_errors_are_those_of_leaving_each_document_out(tmp_path):
    order = np.random.default_rng(3).permutation(300)
    a, b = store(tmp_path / "a", n=300), store(tmp_path / "b", seed=1, shift=0.1, order=order, model="m2")
    found = compare_runs([a, b])
    assert found.documents == 300
    assert found.left_out == [0, 0]
    row = found.others[0].slices[0]
    x, y = read_store(a).vectors(), read_store(b).vectors()[np.argsort(order)]
    assert row.dispersion_baseline == pytest.approx(dispersion(x), rel=1e-5)
    assert row.dispersion_difference == pytest.approx(dispersion(y) - dispersion(x), rel=1e-4)
    without = [dispersion(np.delete(y, i, axis=0)) - dispersion(np.delete(x, i, axis=0)) for i in range(300)]
    se = np.sqrt(299 / 300 * np.square(without - np.mean(without)).sum())
    assert row.dispersion_high - row.dispersion_low == pytest.approx(2 * 1.959964 * se, rel=1e-3)
    first, second = (read_store(p).documents.sort_values("doc_id")["correct"].to_numpy() for p in (a, b))
    assert row.accuracy_difference == pytest.approx((second - first).mean())
    half = 1.959964 * (second - first).std(ddof=1) / np.sqrt(300)
    assert row.accuracy_high == pytest.approx((second - first).mean() + half)
    names = [r.slice for r in found.others[0].slices]
    assert names == ["all documents", *(f"subject {i}" for i in range(6))]
    mask = [i % 6 == 2 for i in range(300)]
    assert found.others[0].slices[3].dispersion == pytest.approx(dispersion(y[mask]), rel=1e-5)


def test_only_shared_documents_count(tmp_path):
    a, b = store(tmp_path / "a"), store(tmp_path / "b", seed=1, order=np.arange(100))
    found = compare_runs([a, b])
    assert found.documents == 100
    assert found.left_out == [200, 0]
    small = compare_runs([a, store(tmp_path / "c", order=np.arange(8), d=25)])
    assert any("different widths" in note for note in small.notes)
    rows = small.others[0].slices
    assert rows[1].reason == "a paired error needs three shared documents, got 2"
    assert np.isnan(rows[1].dispersion_difference)
    json.loads(render(small.document(), "json"))


def test_what_cannot_be_compared_is_refused(tmp_path):
    a = store(tmp_path / "a")
    with pytest.raises(UsageError, match="two runs or more"):
        compare_runs([a])
    with pytest.raises(MixedStoresError, match=r"another one in .*b than in .*a \(300 such documents\)"):
        compare_runs([a, store(tmp_path / "b", hashes="other")])
    other = planted_store(tmp_path / "c", n=30, task="elsewhere")
    with pytest.raises(MixedStoresError, match="share no document"):
        compare_runs([a, other])


def test_the_document_says_the_difference_first_and_has_every_form(tmp_path):
    found = compare_runs([store(tmp_path / "a"), store(tmp_path / "b", seed=1, shift=0.2, model="m2")])
    document = found.document()
    whole = found.others[0].slices[0]
    assert found.answer()[0].startswith(f"m2 against m: dispersion {whole.dispersion_difference:+.4f}")
    assert render(document, "markdown").count("| subject ") == 6
    lines = render(document, "csv").splitlines()
    assert len(lines) == 8
    assert lines[1].startswith(f"m2,all documents,300,{whole.dispersion!r},{whole.dispersion_baseline!r},")
    page = render(document, "html")
    assert "Difference of dispersion, slice by slice" in page
    assert "subject 5" in page
