"""The parts of the audit on stores whose truth is known, and on stores that lack something."""

import json

import numpy as np
import pytest
from scipy.stats import spearmanr
from synthetic import documents, planted_store, vectors

from lmeval_dispersion.audit.batches import batch_size, mixture_batches, natural_batches, split
from lmeval_dispersion.audit.calibration import calibration_report
from lmeval_dispersion.audit.calibrator import (
    check_fits,
    fitted_calibrator,
    predictions,
    read_calibrator,
    save_calibrator,
)
from lmeval_dispersion.audit.grouping import by_column, groupings
from lmeval_dispersion.audit.mixtures import mixture_curves, slice_size
from lmeval_dispersion.audit.ranked import ranked_documents
from lmeval_dispersion.audit.ranking import ranking_report
from lmeval_dispersion.audit.report import audit_report, plain, report_json
from lmeval_dispersion.audit.run import read_run
from lmeval_dispersion.audit.slices import slice_table
from lmeval_dispersion.audit.tail import hard_tail
from lmeval_dispersion.errors import StoreError, UsageError
from lmeval_dispersion.geometry import dispersion, dispersion_estimate
from lmeval_dispersion.store import write_store


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return read_run(planted_store(tmp_path_factory.mktemp("planted") / "s", effect=0.5))


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    return read_run(planted_store(tmp_path_factory.mktemp("noise") / "s", effect=0.0, seed=1))


def expected_dispersion(run, share):
    """Of a mixture with ``share`` of correct documents, from the mean unit vectors of the two pools."""
    u = run.points.rows.astype(np.float64) + run.points.mean
    a, b = u[run.right], u[~run.right]
    mean_pair = {
        "aa": 1 - dispersion(a),
        "bb": 1 - dispersion(b),
        "ab": float(a.mean(axis=0) @ b.mean(axis=0)),
    }
    pairs = 100 * 99
    k = round(100 * share)
    same = k * (k - 1) * mean_pair["aa"] + (100 - k) * (99 - k) * mean_pair["bb"]
    return 1 - (same + 2 * k * (100 - k) * mean_pair["ab"]) / pairs


# --- mixtures -----------------------------------------------------------------------------------------------


def test_mixtures_have_the_expected_dispersion_and_rise(planted):
    found = mixture_curves(planted)
    assert found["documents_per_mixture"] == 100
    assert found["seeds"] == 10
    assert [point["target_accuracy"] for point in found["curve"]] == list(range(0, 101, 10))
    assert found["unreachable_targets"] == []
    z = [
        (point["dispersion"] - expected_dispersion(planted, point["target_accuracy"] / 100))
        / point["dispersion_se"]
        for point in found["curve"]
    ]
    assert np.abs(z).max() < 5
    assert np.sqrt(np.mean(np.square(z))) < 2
    assert found["dispersion_trend"]["spearman"] > 0.98
    assert abs(found["query_perplexity_trend"]["spearman"]) < 0.9


def test_pools_have_the_dispersions_of_their_documents(planted, noise):
    u = planted.points.rows.astype(np.float64) + planted.points.mean
    found = mixture_curves(planted)["pools"]
    first, second = dispersion_estimate(u[planted.right]), dispersion_estimate(u[~planted.right])
    assert found["correct"] == pytest.approx(first.mean, rel=1e-5)
    assert found["incorrect_se"] == pytest.approx(second.se, rel=1e-3)
    half = 1.959964 * np.hypot(first.se, second.se)
    assert found["difference_high"] == pytest.approx(first.mean - second.mean + half, rel=1e-3)
    assert found["difference_low"] > 0
    none = mixture_curves(noise)["pools"]
    assert none["difference_low"] < 0 < none["difference_high"]


def test_mixtures_of_noise_have_no_trend(noise):
    found = mixture_curves(noise)["dispersion_trend"]
    assert found["shape"] == "not monotone"
    assert found["low"] < 0.5


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
        u = planted.points.rows[chosen] + planted.points.mean
        assert found == pytest.approx(dispersion(u), rel=1e-5)


def test_the_spread_of_the_curve_is_that_of_independent_draws(planted):
    """Standard errors over seeds agree with the spread between runs of another seed."""
    curves = [mixture_curves(planted, seed=s)["curve"] for s in range(1, 9)]
    means = np.array([[point["dispersion"] for point in curve] for curve in curves])
    errors = np.array([[point["dispersion_se"] for point in curve] for curve in curves])
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(axis=0, ddof=1).mean(), rel=0.35)


@pytest.mark.parametrize(
    ("smaller", "expected"), [(5000, 100), (100, 100), (99, 90), (47, 40), (25, 20), (19, 20), (0, 20)]
)
def test_slices_shrink_in_tens_and_not_below_twenty(smaller, expected):
    assert slice_size(smaller) == expected


def test_unreachable_targets_are_named_and_nothing_is_drawn_twice(tmp_path):
    run = read_run(planted_store(tmp_path, n=200, accuracy=0.04))
    correct = int(run.right.sum())
    assert 0 < correct < 20
    found = mixture_curves(run)
    assert found["documents_per_mixture"] == 20
    reachable = [t for t in range(0, 101, 10) if t * 20 / 100 <= correct]
    assert [point["target_accuracy"] for point in found["curve"]] == reachable
    assert found["unreachable_targets"] == [t for t in range(0, 101, 10) if t not in reachable]


# --- slices -------------------------------------------------------------------------------------------------


def test_slice_rows_are_those_of_a_loop(planted):
    table = slice_table(planted, groupings(planted)["subject"])["rows"]
    u = planted.points.rows.astype(np.float64) + planted.points.mean
    frame = planted.documents
    assert [row["slice"] for row in table] == sorted(set(frame["subject"]))
    for row in table:
        mask = (frame["subject"] == row["slice"]).to_numpy()
        estimate = dispersion_estimate(u[mask])
        assert row["dispersion"] == pytest.approx(estimate.mean, rel=1e-6)
        assert row["dispersion_se"] == pytest.approx(estimate.se, rel=1e-4)
        assert row["accuracy"] == pytest.approx(frame["correct"][mask].mean())
        assert row["query_perplexity"] == pytest.approx(frame["query_perplexity"][mask].mean())
        assert row["documents"] == mask.sum()


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
    table = slice_table(run, groupings(run)["length"])
    ordered = [row["dispersion"] for row in table["rows"]]
    assert ordered == sorted(ordered)
    assert table["association"]["spearman"] == 1.0
    ranking = ranking_report(run)
    area = next(row["auroc"] for row in ranking["signals"] if row["signal"] == "contribution")
    length_row = next(row for row in ranking["confounds"] if row["quantity"] == "prompt length")
    assert area > 0.65
    assert length_row["spearman"] > 0.7
    assert length_row["auroc_within_bands"] < 0.5 + (area - 0.5) / 2
    subject = next(row for row in ranking["confounds"] if row["quantity"] == "subject")
    assert subject["auroc_within_bands"] == pytest.approx(area, abs=0.03)
    confounds = {row["quantity"]: row["spearman"] for row in ranking["confounds"]}
    assert abs(confounds["query perplexity"]) < 0.1


def test_the_auroc_inside_subjects_is_that_of_a_loop_over_pairs(planted):
    contribution = planted.points.contributions()
    found = next(r for r in ranking_report(planted)["confounds"] if r["quantity"] == "subject")
    wins = pairs = 0
    for _, frame in planted.documents.groupby("subject"):
        right = frame.index[planted.right[frame.index]]
        wrong = frame.index[~planted.right[frame.index]]
        wins += sum((contribution[i] > contribution[wrong]).sum() for i in right)
        pairs += len(right) * len(wrong)
    assert found["auroc_within_bands"] == pytest.approx(wins / pairs)
    assert np.isnan(found["spearman"])


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
    inside = next(row for row in ranking["confounds"] if row["quantity"] == "subject")
    assert ranking["signals"][0]["auroc"] > 0.58
    assert abs(inside["auroc_within_bands"] - 0.5) < 0.05


def test_slices_can_be_any_column_and_unusable_ones_are_refused(planted, tmp_path):
    run = read_run(
        planted_store(tmp_path, n=90, flag=[True, False] * 45, words=np.arange(90) / 7, note=["a", None] * 45)
    )
    assert [g.name for g in by_column(run, "flag")] == ["False", "True"]
    assert len(by_column(run, "words")) == 5
    assert [len(g.rows) for g in by_column(run, "note")] == [45]
    for name in ("absent", "text", "logprobs", "doc_id"):
        with pytest.raises(UsageError, match=f"no column '{name}'"):
            by_column(run, name)
    assert set(groupings(run, ["words"])) == {"subject", "category", "length", "confidence", "words"}


# --- calibration --------------------------------------------------------------------------------------------


def test_the_parts_of_a_split_are_disjoint_and_20_10_70():
    parts = split(np.arange(1000), np.random.default_rng(0))
    assert [len(part) for part in parts] == [200, 100, 700]
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))


def estimators(report, protocol):
    return {row["estimator"]: row for row in report["protocols"][protocol]["estimators"]}


def test_noise_is_no_better_than_the_trivial_predictor(noise):
    report = audit_report(noise)
    calibration = report["calibration"]
    for protocol in ("whole", "slices", "mixtures"):
        assert not calibration["protocols"][protocol]["better"]
    assert "no better than the trivial predictor" in calibration["protocols"]["whole"]["verdict"]
    assert "no better than the trivial predictor" in report["summary"][1]
    ours = report["ranking"]["signals"][0]
    assert abs(ours["auroc"] - 0.5) < 4 * ours["auroc_se"]
    assert "no better than chance" in report["summary"][2]


def test_a_relation_that_carries_over_to_slices_beats_the_trivial_predictor(tmp_path):
    """Subjects of very different accuracy, and nothing but the right answers moves the vectors."""
    rng = np.random.default_rng(0)
    n, subjects = 8000, 10
    subject = rng.integers(subjects, size=n)
    right = rng.random(n) < 0.1 + 0.8 * subject / (subjects - 1)
    frame = documents(right, rng=rng).assign(subject=[f"s{i}" for i in subject])
    x = vectors(np.where(right, 1.8, 1.0), rng=rng)
    write_store(tmp_path, documents=frame, vectors={"last": x}, manifest={"model": "m"})
    run = read_run(tmp_path)
    report = calibration_report(run)
    judged = report["protocols"]["slices"]
    assert judged["better"]
    assert judged["winner"] == "dispersion"
    found = estimators(report, "slices")
    assert found["dispersion"]["mae"] < 8
    # The accuracies of ten evenly spaced subjects lie 22 points from their mean on average.
    assert found["trivial"]["mae"] == pytest.approx(22, abs=2)
    assert slice_table(run, groupings(run)["subject"])["association"]["low"] > 0.7


def test_the_trivial_error_is_what_binomial_sampling_says(noise):
    """|p_cal - p_test| of two independent shares: sqrt(2/pi) sd."""
    found = [estimators(calibration_report(noise, seed=s), "whole")["trivial"]["mae"] for s in range(3)]
    n, p = len(noise.labelled), noise.right.mean()
    sd = np.sqrt(p * (1 - p) * (1 / (0.2 * n) + 1 / (0.7 * n)))
    # Over random splits of one sample this is exact up to the thirty splits that are averaged.
    assert np.mean(found) == pytest.approx(100 * np.sqrt(2 / np.pi) * sd, rel=0.35)


def test_confident_models_are_judged_by_their_confidence(tmp_path):
    """Where right answers are far more confident, ATC follows mixtures and is found to win."""
    rng = np.random.default_rng(0)
    right = rng.random(3000) < 0.5
    frame = documents(right, rng=rng, confidence=8.0)
    write_store(tmp_path, documents=frame, vectors={"last": vectors(np.ones(3000), rng=rng)}, manifest={})
    report = calibration_report(read_run(tmp_path))
    assert report["protocols"]["mixtures"]["winner"] == "ATC"
    assert estimators(report, "mixtures")["ATC"]["mae"] < 6


def test_points_are_the_errors_again(planted):
    report = calibration_report(planted, seeds=3)
    for protocol in ("whole", "slices", "mixtures"):
        points = [p for p in report["points"] if p["protocol"] == protocol]
        by_seed = [
            [abs(p["predicted"] - p["true"]) for p in points if p["seed"] == seed] for seed in range(3)
        ]
        mae = np.mean([100 * np.mean(errors) for errors in by_seed])
        assert mae == pytest.approx(estimators(report, protocol)["dispersion"]["mae"])
    assert sum(report["chosen"].values()) == 3


def test_batches_shrink_with_the_labels(planted):
    assert batch_size(planted, planted.labelled, 0.1, 100) == 100
    assert batch_size(planted, planted.labelled[:500], 0.1, 100) == 20
    rng = np.random.default_rng(0)
    natural = natural_batches(planted, planted.labelled, 100, rng)
    assert len(natural.rows) == 6
    for chosen in natural.rows:
        assert planted.documents["subject"].iloc[chosen].nunique() == 1
    assert natural_batches(planted, planted.labelled[:50], 100, rng).rows == []


# --- calibrator ---------------------------------------------------------------------------------------------


def test_a_calibrator_predicts_another_run_of_the_same_kind(tmp_path):
    fitted = fitted_calibrator(read_run(planted_store(tmp_path / "a", effect=0.8)))
    save_calibrator(tmp_path / "cal.json", fitted)
    fitted = read_calibrator(tmp_path / "cal.json")
    inside = []
    for seed, accuracy in enumerate((0.1, 0.3, 0.5, 0.7, 0.9)):
        path = planted_store(tmp_path / f"b{seed}", n=600, effect=0.8, accuracy=accuracy, seed=seed + 9)
        run = read_run(path)
        row = predictions(fitted, run, [])["slices"][0]
        assert row["predicted"] == pytest.approx(row["true"], abs=0.12)
        inside.append(row["low"] <= row["true"] <= row["high"])
    assert sum(inside) >= 4
    assert 0 < fitted["interval"]["half_width"] < 0.3


def test_the_interval_covers_as_it_says(tmp_path):
    """Of fresh batches drawn like the validation ones, about 95 % lie inside."""
    fitted = fitted_calibrator(read_run(planted_store(tmp_path / "a", effect=0.5)))
    run = read_run(planted_store(tmp_path / "b", effect=0.5, seed=5))
    from lmeval_dispersion.audit.regressors import predicted

    batches = mixture_batches(run, run.labelled, 100, repeats=6, rng=np.random.default_rng(0))
    errors = np.abs(predicted(fitted["regression"], batches.dispersion) - batches.accuracy)
    assert (errors <= fitted["interval"]["half_width"]).mean() > 0.88


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other/model"}, "fitted for model 'synthetic/model', and the run has 'other/model'"),
        ({"revision": "v2"}, "fitted for revision 'main', and the run has 'v2'"),
        ({"prompt_format": "p2"}, "fitted for prompt format 'p1', and the run has 'p2'"),
        ({"chat_template": "c"}, "fitted for chat template None"),
        ({"num_fewshot": 5}, "number of few-shot examples 0"),
        ({"tasks": {"other": 1}}, "the run has task 'other'"),
        ({"tasks": {"synthetic": 2}}, "fitted on version 1 of task 'synthetic'"),
    ],
)
def test_a_calibrator_refuses_another_setting_with_the_reason(tmp_path, change, message):
    fitted = fitted_calibrator(read_run(planted_store(tmp_path / "a", n=1500)))
    run = read_run(planted_store(tmp_path / "b", n=300, manifest=change))
    with pytest.raises(UsageError, match=message):
        check_fits(fitted, run)


def test_a_calibrator_refuses_another_layer_and_smaller_slices(tmp_path):
    run = read_run(planted_store(tmp_path / "a", n=2400))
    fitted = fitted_calibrator(run)
    assert fitted["slice_size"] == 100
    other = {**fitted, "layer": "layer.3"}
    with pytest.raises(UsageError, match=r"fitted for layer 'layer\.3', and the run has 'last'"):
        check_fits(other, run)
    with pytest.raises(UsageError, match="fitted for vector width 31, and the run has 32"):
        check_fits({**fitted, "width": 31}, run)
    small = read_run(planted_store(tmp_path / "b", n=90))
    with pytest.raises(UsageError, match="slices of 100 documents, and the run has 90"):
        predictions(fitted, small, [])
    middle = read_run(planted_store(tmp_path / "c", n=300))
    rows = predictions(fitted, middle, by_column(middle, "subject"))["slices"]
    assert rows[0]["reason"] is None
    reason = "50 documents, and the calibrator was fitted for slices of 100"
    assert {row["reason"] for row in rows[1:]} == {reason}
    assert all(np.isnan(row["predicted"]) for row in rows[1:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a calibrator"),
        ("[1]", "is not a calibrator"),
        ('{"format": "dispersion-audit/1"}', "is not a calibrator"),
        ('{"format": "dispersion-calibrator/9"}', "written as 'dispersion-calibrator/9'"),
        ('{"format": "dispersion-calibrator/1"}', "lacks 'blind_mae'"),
    ],
)
def test_what_is_no_calibrator_is_refused(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_calibrator(tmp_path / "c.json")
    with pytest.raises(UsageError, match="expected a calibrator"):
        read_calibrator(tmp_path / "absent.json")


# --- ranking ------------------------------------------------------------------------------------------------


def test_a_planted_relation_ranks_with_the_right_strength(planted):
    found = ranking_report(planted)
    ours = found["signals"][0]
    contribution = planted.points.contributions()
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
    frame = ranked_documents(planted)
    assert frame["rank"].tolist() == list(range(1, 3001))
    assert frame["contribution"].is_monotonic_increasing
    assert frame["contribution"].mean() == pytest.approx(planted.points.estimate().mean)
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
    write_store(tmp_path, documents=frame, vectors={"last": x}, manifest={})
    run = read_run(tmp_path)
    found = hard_tail(run, run.points.contributions())
    assert found["documents"] == 40
    assert sum(cluster["documents"] for cluster in found["clusters"]) == 40
    for cluster in found["clusters"]:
        kinds = {document["text"] for document in cluster["typical"]}
        assert kinds in ({"cats"}, {"dogs"})
        assert cluster["subjects"][0]["subject"] == ("a" if kinds == {"cats"} else "b")


# --- the report ---------------------------------------------------------------------------------------------


def test_same_store_and_seed_same_bytes(planted, tmp_path):
    again = read_run(planted_store(tmp_path, effect=0.5))
    assert report_json(audit_report(planted)) == report_json(audit_report(again))
    assert report_json(audit_report(planted, seed=1)) != report_json(audit_report(planted))


def test_the_json_has_no_nan_and_keeps_seven_digits(planted):
    report = json.loads(report_json(audit_report(planted)))
    assert report["format"] == "dispersion-audit/1"
    assert len(report["summary"]) == 3
    assert plain({"a": float("nan"), "b": [1 / 3, 2]}) == {"a": None, "b": [0.3333333, 2]}


def missing_parts(report):
    return {name for name in ("mixtures", "calibration", "ranking", "hard_tail") if "missing" in report[name]}


@pytest.mark.parametrize("correct", [0.0, 1.0])
def test_all_right_or_all_wrong_leaves_the_slices(tmp_path, correct):
    run = read_run(planted_store(tmp_path, n=300, correct=correct))
    report = audit_report(run)
    assert missing_parts(report) == {"mixtures", "calibration", "ranking"}
    assert "all 300 were answered" in report["mixtures"]["missing"]
    assert len(report["slices"]["subject"]["rows"]) == 6
    assert "same accuracy" in report["slices"]["subject"]["association"]["missing"]
    report_json(report)


def test_no_labels_leave_dispersion_and_the_tail(tmp_path):
    run = read_run(planted_store(tmp_path, n=300, correct=np.nan))
    report = audit_report(run)
    assert missing_parts(report) == {"mixtures", "calibration", "ranking"}
    assert "none of these has a label" in report["ranking"]["missing"]
    assert report["overall"]["dispersion"] > 0
    assert np.isnan(report["overall"]["accuracy"])


def test_one_document_is_a_report_of_reasons(tmp_path):
    report = audit_report(read_run(planted_store(tmp_path, n=1)))
    assert missing_parts(report) == {"mixtures", "calibration", "ranking", "hard_tail"}
    assert report["overall"]["reason"] == "one document has no pair to be distant from"
    assert json.loads(report_json(report))["overall"]["dispersion"] is None


def test_two_documents_have_a_dispersion_without_an_error(tmp_path):
    report = audit_report(read_run(planted_store(tmp_path, n=2, subjects=None)))
    assert report["overall"]["reason"] == "two documents give no error bar"
    assert report["overall"]["dispersion"] > 0


def test_documents_without_direction_are_left_out_and_counted(tmp_path):
    rng = np.random.default_rng(0)
    right = rng.random(200) < 0.5
    x = vectors(np.ones(200), rng=rng)
    x[3], x[50] = 0, np.nan
    write_store(tmp_path, documents=documents(right, rng=rng), vectors={"last": x}, manifest={})
    run = read_run(tmp_path)
    report = audit_report(run)
    assert report["run"]["documents"] == 198
    assert report["run"]["without_direction"] == 2
    assert "2 of 200 documents have a zero or non-finite vector" in report["notes"][0]
    assert report["overall"]["dispersion"] == pytest.approx(dispersion(np.delete(x, [3, 50], 0)), rel=1e-3)
    assert 3 not in ranked_documents(run)["doc_id"].tolist()


def test_no_vector_at_all_is_one_sentence(tmp_path):
    frame = documents(np.ones(5), rng=np.random.default_rng(0))
    write_store(tmp_path / "a", documents=frame, vectors={"last": np.zeros((5, 3))}, manifest={})
    with pytest.raises(StoreError, match="none of the 5 documents"):
        read_run(tmp_path / "a")
    write_store(tmp_path / "b", documents=frame[:0], vectors={"last": np.zeros((0, 3))}, manifest={})
    with pytest.raises(StoreError, match="holds no documents"):
        read_run(tmp_path / "b")
    with pytest.raises(StoreError, match="no layer 'x'"):
        read_run(tmp_path / "a", "x")


def test_scores_outside_the_unit_interval_are_refused(tmp_path):
    with pytest.raises(StoreError, match=r"scores in \[0, 1\] .* got 50 outside"):
        read_run(planted_store(tmp_path, n=50, correct=70.0))


def test_fractional_scores_and_missing_confidences_are_said(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"correct": rng.random(400), "logprobs": [[]] * 400, "truncated": True}
    run = read_run(planted_store(tmp_path, n=400, **columns))
    report = audit_report(run)
    assert any("score between 0 and 1" in note for note in report["notes"])
    assert any("400 prompts were too long" in note for note in report["notes"])
    names = {row["estimator"] for row in report["calibration"]["protocols"]["whole"]["estimators"]}
    assert "ATC" not in names
    assert {row["signal"] for row in report["ranking"]["signals"]}.isdisjoint({"margin", "top probability"})
    assert "confidence" not in report["slices"]


def test_partly_labelled_runs_use_the_labels_they_have(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(1200) < 0.5, (rng.random(1200) < 0.5).astype(float), np.nan)
    report = audit_report(read_run(planted_store(tmp_path, n=1200, correct=labels)))
    assert report["run"]["labelled"] == int((~np.isnan(labels)).sum())
    assert report["ranking"]["documents"] == report["run"]["labelled"]
    assert any("have no label" in note for note in report["notes"])
    assert missing_parts(report) == set()
