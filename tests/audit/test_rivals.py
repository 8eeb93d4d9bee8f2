"""The rivals of dispersion in the audit and in comparisons, and what is said of which orders best."""

import io
import json
import math

import numpy as np
import pandas as pd
import pytest
from synthetic import documents, subjects_store, vectors

from lmeval_dispersion.audit.compare import compared_stores
from lmeval_dispersion.audit.reports.document import audit_document
from lmeval_dispersion.audit.reports.report import audit_report, plural
from lmeval_dispersion.audit.rivals import raw_vectors, rivals_report
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.audit.slices import slicings
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import StoreError
from lmeval_dispersion.geometry import SPECTRUM, jackknife_groups, spectrum_estimates
from lmeval_dispersion.geometry.ordering import chance, ordering, ordering_sentence
from lmeval_dispersion.report import render
from lmeval_dispersion.store import write_store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two runs on the same documents whose vectors have lengths of their own."""
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(4)
    subject = np.repeat(np.arange(9), 12)
    right = rng.random(len(subject)) < 0.2 + 0.07 * subject
    frame = documents(right, rng=rng).assign(subject=[f"subject {i}" for i in subject], category=None)
    found = {}
    for name, growth in (("base", 0.0), ("tuned", 0.1)):
        x = vectors(1 + growth * subject, rng=np.random.default_rng(5), d=12)
        x *= rng.uniform(1, 30, size=len(x))[:, None]
        manifest = {"model": f"synthetic/{name}", "tasks": {"synthetic": 1}}
        write_store(folder / name, documents=frame, vectors={"last": x}, manifest=manifest)
        found[name] = (folder / name, x)
    return found


def test_the_vectors_are_the_models_own(stores):
    path, x = stores["tuned"]
    # Stores keep unit rows in float16.
    np.testing.assert_allclose(raw_vectors(read_run(path)), x, rtol=0, atol=2e-3 * np.abs(x).max())
    run = read_run(path)
    run.vectors.rows = run.vectors.rows[:-1]
    with pytest.raises(StoreError, match="lengths"):
        raw_vectors(run)


def test_rows_are_the_metrics_of_the_slices_vectors(stores):
    run = read_run(stores["tuned"][0])
    found = rivals_report(run, slicings(run))
    assert found["by"] == "subject"
    assert len(found["slices"]) == 9
    raw = raw_vectors(run)
    for rows, row in ((np.arange(len(raw)), found["overall"]), (np.arange(24, 36), found["slices"][2])):
        for name, estimate in spectrum_estimates(raw[rows]).items():
            assert row[name] == pytest.approx(estimate.value, nan_ok=True)
            assert row[f"{name}_se"] == pytest.approx(estimate.se, nan_ok=True)


def test_every_format_has_them_where_they_are_asked_for(stores, capsys):
    path = str(stores["tuned"][0])
    assert main(["audit", path, "--metrics", "all", "--format", "csv", "-q"]) in (0, 3)
    rows = pd.read_csv(io.StringIO(capsys.readouterr().out)).set_index("slice")
    report = audit_report(read_run(path), metrics="all")
    for row in [*report["metrics"]["slices"], report["metrics"]["overall"]]:
        for name in SPECTRUM:
            given = pd.to_numeric(rows.loc[rows["by"].isin(["subject", "all"]), name])[row["slice"]]
            assert given == pytest.approx(row[name], rel=1e-6, nan_ok=True)
    text = render(audit_document(report), "markdown")
    assert all(about.label in text and about.hint in text for about in SPECTRUM.values())
    assert report["summary"][-1] in text
    plain = audit_report(read_run(path))
    assert "metrics" not in plain
    assert not any("RankMe" in sentence for sentence in plain["summary"])
    assert "RankMe" not in render(audit_document(plain), "markdown")


def test_small_slices_have_a_reason(tmp_path):
    run = read_run(subjects_store(tmp_path / "small", subjects=9, each=3))
    found = rivals_report(run, slicings(run))
    assert found["slices"][0]["reason"] == "4 documents are needed, got 3"
    assert math.isnan(found["slices"][0]["rankme"])
    assert "8 slices" in found["ordering"]["missing"]


def test_compared_runs_have_paired_differences(stores, capsys):
    paths = [stores[name][0] for name in ("base", "tuned")]
    found = compared_stores(paths, metrics="all")
    whole = found["others"][0]["slices"][0]
    raw = [raw_vectors(read_run(path)) for path in paths]
    groups = jackknife_groups(*raw[0].shape)
    a, b = (spectrum_estimates(x, groups) for x in raw)
    for name in SPECTRUM:
        left = b[name].left_out - a[name].left_out
        error = math.sqrt((groups - 1) / groups * np.square(left - left.mean()).sum())
        assert whole[f"{name}_difference"] == pytest.approx(b[name].value - a[name].value)
        assert whole[f"{name}_high"] - whole[f"{name}_low"] == pytest.approx(2 * 1.959964 * error, rel=1e-5)
    paired = whole["effective_rank_high"] - whole["effective_rank_difference"]
    assert paired < 1.96 * math.hypot(a["effective_rank"].se, b["effective_rank"].se)
    assert main(["compare", *map(str, paths), "--metrics", "all", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["others"][0]
    assert printed["slices"][0]["rankme_difference"] == pytest.approx(whole["rankme_difference"], rel=1e-6)
    assert printed["ordering"] == {"missing": "all slices have the same value"}  # the answers are the same
    assert main(["compare", *map(str, paths), "--metrics", "all"]) == 0
    assert "Diff-eRank" in capsys.readouterr().out
    assert "rankme_difference" not in compared_stores(paths)["others"][0]["slices"][0]


# --- which orders best --------------------------------------------------------------------------------------


def planted(k, strength, *, seed, metrics=6):
    """Metrics that follow the truth by ``strength`` (one number, or one for each), with shared luck."""
    rng = np.random.default_rng(seed)
    truth, shared = rng.normal(size=k), rng.normal(size=k)
    strengths = np.broadcast_to(strength, metrics)
    names = ("dispersion", *SPECTRUM)[:metrics]
    found = {
        name: how * truth + 0.5 * shared + rng.normal(size=k)
        for name, how in zip(names, strengths, strict=True)
    }
    return found, truth


@pytest.mark.parametrize(("k", "strength"), [(8, 0.0), (20, 0.0), (8, 2.0), (20, 1.0)])
def test_on_noise_and_among_equals_nothing_is_claimed(k, strength):
    runs, ordered, better = 25, 0, 0
    for seed in range(runs):
        found = ordering(*planted(k, strength, seed=seed), seed=seed)
        ordered += found["p"] < 0.05
        better += any(row["better"] for row in found["against"])
    assert better <= 2
    assert ordered <= 5 or strength > 0


@pytest.mark.parametrize("k", [8, 20])
@pytest.mark.parametrize("uneven", [False, True])
def test_an_order_is_claimed_on_noise_in_one_draw_of_twenty(k, uneven):
    runs = 300
    claimed = []
    for seed in range(runs):
        rng = np.random.default_rng([seed, k])
        sizes = np.exp(rng.uniform(np.log(5), np.log(500), size=k)).round() if uneven else np.full(k, 40.0)
        known = rng.binomial(sizes.astype(int), 0.5) / sizes
        rows = 3 * np.log(sizes) + rng.normal(size=(9, k))  # as most metrics, they rise with the size
        claimed.append(chance(rows, known, sizes, rng, 99) <= 0.05)
    assert np.mean(claimed) <= 0.05 + 2.33 * math.sqrt(0.05 * 0.95 / runs)
    assert np.mean(claimed) > 0


def test_an_order_of_uneven_slices_is_found_and_their_sizes_count():
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(8), np.log(200), size=20)).round()
    known = rng.normal(size=20)
    metrics = {"rankme": known + 0.2 * rng.normal(size=20), "dispersion": rng.normal(size=20)}
    uneven = ordering(metrics, known, sizes)
    assert uneven["p"] < 0.01
    even = ordering(metrics, known, np.full(20, 7))
    assert even == ordering(metrics, known)


def test_planted_orders_are_found_and_said():
    equal = ordering(*planted(40, 0.0, seed=1))
    said = ordering_sentence(equal, "subjects")
    assert said.startswith("None of 6 metrics is shown to order the 40 subjects")
    first = ordering(*planted(60, [8, 0, 0, 0, 0, 0], seed=2))
    assert first["best"] == "dispersion"
    assert "better than each of the others" in ordering_sentence(first, "subjects")
    other = ordering(*planted(60, [0, -8, 0, 0, 0, 0], seed=3))
    said = ordering_sentence(other, "subjects")
    assert other["metrics"][0]["spearman"] < -0.9
    assert said.startswith("RankMe (Spearman -0.9")
    assert "it is better than dispersion" in said
    both = ordering(*planted(60, [4, 4, 0, 0, 0, 0], seed=4))
    assert "not shown" in ordering_sentence(both, "subjects")


def test_the_correlations_are_scipys_and_p_counts_permutations_of_the_best():
    from scipy.stats import spearmanr

    metrics, truth = planted(12, 0.6, seed=7)
    found = ordering(metrics, truth)
    for row in found["metrics"]:
        assert row["spearman"] == pytest.approx(spearmanr(metrics[row["metric"]], truth).statistic)
    rng = np.random.default_rng(99)
    best = abs(found["metrics"][0]["spearman"])
    chance = [
        max(abs(spearmanr(row, shuffled).statistic) for row in metrics.values())
        for shuffled in (rng.permutation(truth) for _ in range(150))
    ]
    assert found["p"] == pytest.approx(np.mean(np.array(chance) >= best), abs=0.11)


def test_what_cannot_be_ordered_is_told():
    metrics, truth = planted(7, 1.0, seed=0)
    assert "8 slices are needed" in ordering_sentence(ordering(metrics, truth), "tasks")
    metrics, truth = planted(9, 1.0, seed=0)
    assert "same value" in ordering(metrics, np.ones(9))["missing"]
    undefined = {name: np.full(9, np.nan) for name in metrics}
    assert "0 metrics" in ordering(undefined, truth)["missing"]
    assert plural("category") == "categories"
