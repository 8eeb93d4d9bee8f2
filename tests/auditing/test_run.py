"""A run as the audit sees it: confidence by hand, stores that cannot be read, documents by an expression."""

import math

import numpy as np
import pytest
from synthetic import documents, planted_store, written

from lmeval_dispersion.auditing.run import confidences, read_run, rows_where
from lmeval_dispersion.errors import StoreError, UsageError
from lmeval_dispersion.store import write_store


def test_confidences_by_hand():
    odd = [[-math.inf, -2.0], [-math.inf] * 2, [math.nan, 0]]
    found = confidences([[-1.0, -2.0, -3.0], [-5.0, -5.0], [], [-1.0], *odd])
    p = [math.exp(-k) / sum(math.exp(-j) for j in (1, 2, 3)) for k in (1, 2, 3)]
    np.testing.assert_allclose(found, [p[0], 0.5, *[math.nan] * 2, 1.0, *[math.nan] * 2])
    values = np.random.default_rng(0).normal(size=(50, 4)) * 5
    moved = confidences((values - 800).tolist())
    np.testing.assert_allclose(confidences(values.tolist()), moved)
    assert len(confidences([])) == 0


def test_stores_that_cannot_be_audited_are_one_sentence(tmp_path):
    frame = documents(np.ones(5), rng=np.random.default_rng(0))
    with pytest.raises(StoreError, match="none of the 5 documents"):
        read_run(written(tmp_path / "a", frame, np.zeros((5, 3))))
    with pytest.raises(StoreError, match="holds no documents"):
        read_run(written(tmp_path / "b", frame[:0], np.zeros((0, 3))))
    with pytest.raises(StoreError, match=r"scores in \[0, 1\] .* got 50 scores outside"):
        read_run(planted_store(tmp_path / "c", n=50, correct=70.0))


def test_a_layer_has_the_stores_name_however_it_is_named(tmp_path):
    frame, x = documents(np.ones(5), rng=np.random.default_rng(0)), np.eye(5)
    states = {"last": x, "layer.1": x, "layer.0.attn": x}
    write_store(tmp_path, documents=frame, vectors=states, manifest={"model": "m", "depth": 2})
    names = {
        None: "last",
        "layer.-1": "layer.1",
        "layer.-1.ffn": "layer.1",
        "layer.1.ffn": "layer.1",
    }
    for given, name in (names | {"layer.-2.attn": "layer.0.attn"}).items():
        assert read_run(tmp_path, given).layer == name
    with pytest.raises(
        StoreError, match=r"no layer 'layer\.-2'; name one of last, layer\.1, layer\.0\.attn"
    ):
        read_run(tmp_path, "layer.-2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(planted_store(tmp_path_factory.mktemp("run") / "s", n=300))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "write comparisons"),
        ("subject ==", "invalid syntax"),
        ("subjct == 'a'", "name 'subjct' is not defined; write comparisons"),
        ("doc_id + 1", "not true or false for every document"),
        ("subject < 3", "write comparisons"),
        ("doc_id < -1", "no document satisfies"),
        ("__import__('os').getcwd() == ''", "write comparisons"),
        ("doc_id == 1; doc_id == 2", "write comparisons"),
    ],
)
def test_what_is_no_comparison_of_columns_is_one_sentence(run, expression, message):
    with pytest.raises(UsageError) as caught:
        rows_where(run, expression)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
