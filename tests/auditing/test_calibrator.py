"""A calibrator from a run's own slices: what it estimates, what it refuses, and what it says of itself."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic import documents, planted_store, sliced_store, written

from lmeval_dispersion.auditing.calibrating.calibration import Estimator, calibrate
from lmeval_dispersion.auditing.calibrating.calibrator import (
    Calibrator,
    Pairs,
    check_fits,
    check_worth,
    cross_fitted,
    document_ids,
    jackknife_plus,
    rows_of_ids,
)
from lmeval_dispersion.auditing.calibrating.prediction import predict
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import labels_of, read_run, rows_where
from lmeval_dispersion.auditing.slices import by_column
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder


def halves(path, **options):
    """A sliced store and the calibrator of its labelled part."""
    run = read_run(sliced_store(path, **options))
    return run, calibrate(labels_of(run, rows_where(run, "part == 'labelled'"))).calibrator


@pytest.fixture(scope="module")
def law(tmp_path_factory):
    return halves(tmp_path_factory.mktemp("law") / "s", effect=1.0)


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    return halves(tmp_path_factory.mktemp("noise") / "s", effect=0.0, seed=1)


@pytest.mark.parametrize("effect", [1.0, -0.5])
def test_a_law_is_learnt_either_way_round(tmp_path, effect):
    run, fitted = halves(tmp_path / "s", effect=effect)
    assert fitted.beats_trivial
    values = fitted.pairs.dispersion
    ends = fitted.applied(np.array([values.min(), values.max()]), np.array([40, 40])).value
    assert np.sign(np.diff(ends)) == np.sign(effect)
    result = predict(fitted, run)
    assert result.exchangeable
    assert len(result.slices) == 41
    given = [row for row in result.slices[1:] if row.reason is None]
    trivial = [abs(row.true - fitted.labelled.accuracy) for row in result.slices[1:]]
    assert np.mean([abs(row.predicted - row.true) for row in given]) < 0.5 * np.mean(trivial)
    assert np.mean([row.low <= row.true <= row.high for row in given]) > 0.85
    check_worth(fitted, "cal.json")


def test_without_a_law_it_refuses_and_names_the_labelled_accuracy(noise):
    run, fitted = noise
    assert not fitted.beats_trivial
    with pytest.raises(
        UsageError, match=r"should not be used: .* labelled accuracy alone"
    ) as refused:
        check_worth(fitted, "cal.json")
    labelled = run.score[rows_where(run, "part == 'labelled'")].mean()
    assert str(refused.value).endswith(f" labelled documents ({labelled:.3f})")
    with pytest.raises(UsageError, match="the calibrator should not be used"):
        predict(fitted, run)
    # The same words as the calibrator's own report.
    report = calibrate(labels_of(run, rows_where(run, "part == 'labelled'")))
    reason = report.answer()[0].removeprefix("Do not use: ").removesuffix(".")
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("kinds", "level"),
    [
        ([{"effect": 1.0}, {"effect": 0.0, "topics": 1.5}, {"effect": 1.0, "topics": 1.5}], 0.95),
        ([{"effect": 1.0, "labelled": 12, "unlabelled": 60}] * 2, 12 / 13),
    ],
    ids=["40 slices", "12 slices"],
)
@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_few_runs_of_every_kind_cover_what_they_claim(tmp_path, kinds, level, count):
    """Small; benchmarks/audit_conclusions.py draws many more."""
    covered = []
    for k, options in enumerate(kinds):
        for seed in range(count):
            run, fitted = halves(tmp_path / f"{k}-{seed}", seed=100 * k + seed, **options)
            found = predict(replace(fitted, beats_trivial=True), run)  # also where it would refuse
            assert found.level == pytest.approx(level)
            covered += [r.low <= r.true <= r.high for r in found.slices[1:] if r.reason is None]
    assert len(covered) > 25 * count * len(kinds)
    assert np.mean(covered) == pytest.approx(level + 0.005, abs=0.03 if level == 0.95 else 0.05)


@pytest.mark.parametrize("shift", [1.25, 2.0])
def test_slices_that_are_not_like_the_labelled_ones_get_no_number(tmp_path, shift):
    run, fitted = halves(tmp_path / "s", effect=1.0, shift=shift)
    result = predict(fitted, run)
    assert result.shifted
    assert not result.exchangeable
    assert all("unlike those of the labelled slices" in row.reason for row in result.slices[1:])
    assert all(row.predicted is None for row in result.slices)
    assert result.answer()[0].startswith(
        "The accuracy of none of the 40 slices can be estimated: they differ"
    )
    assert "<circle" not in result.to_html()


def test_one_slice_outside_what_was_fitted_gets_no_number(law):
    """world_religions of the notes: a number of 0.995 for 0.269."""
    run, fitted = read_run(law[0].store.path), law[1]
    odd = rows_where(run, "subject == 'slice 050'")
    run.vectors.rows[odd] *= 0.01
    run.vectors.squares[odd] *= 0.01**2
    found = predict(fitted, run, where="part == 'unlabelled'").slices
    row = next(row for row in found if row.slice == "slice 050")
    assert row.reason.startswith("its dispersion of ")
    assert (row.predicted, row.low, row.high) == (None, None, None)
    assert found[0].slice.endswith("of 40 slices")
    assert found[0].reason is None


def test_documents_of_no_slice_are_one_sentence(tmp_path, law):
    run = read_run(planted_store(tmp_path, n=300, category=["a"] * 20 + [None] * 280))
    with pytest.raises(
        UsageError, match="no document to estimate has a value in the column 'category'"
    ):
        predict(law[1], run, slice="category", where="doc_id >= 20")


def test_small_slices_have_a_reason(law):
    run, fitted = law
    few = np.concatenate([rows[:12] for _, rows in by_column(run, "subject")[40:]])
    result = predict(
        fitted, run, where=f"doc_id in {run.documents['doc_id'].iloc[few].tolist()}"
    ).slices
    assert all(
        "12 documents, and the smallest labelled slice has 3" in row.reason for row in result[1:]
    )


def test_documents_that_were_learnt_from_are_left_out(law):
    run, fitted = law
    result = predict(fitted, run)
    labelled = rows_where(run, "part == 'labelled'")
    assert sum(row.documents for row in result.slices[1:]) == len(run.vectors) - len(labelled)
    assert any(f"{len(labelled):,} documents of this run" in note for note in result.notes)
    with pytest.raises(UsageError, match="fitted to the labels of all"):
        predict(fitted, run, where="part == 'labelled'")


def test_one_subject_is_cut_into_clusters(tmp_path):
    run = read_run(planted_store(tmp_path / "a", n=1200, effect=1.0, subject="web"))
    fitted = calibrate(labels_of(run, np.arange(700))).calibrator
    assert fitted.by == "cluster"
    result = predict(replace(fitted, beats_trivial=True), run)
    assert not result.exchangeable
    whole = result.slices[0]
    assert sum(row.documents for row in result.slices[1:]) == 500
    assert whole.predicted == pytest.approx(whole.true, abs=0.08)


def test_identity_decides_where_it_is_known(tmp_path, law):
    run, fitted = law
    assert "only the model's name and revision were compared" in check_fits(fitted, run)[0]
    ours = {"weights": "sha256:1", "adapter": None, "quantisation": None}
    known = replace(fitted, identity=ours)
    same = read_run(
        planted_store(tmp_path / "a", n=300, manifest={"model": "a/copy", "identity": ours})
    )
    assert check_fits(known, same) == []
    lora = {**ours, "adapter": "sha256:2"}
    other = read_run(planted_store(tmp_path / "b", n=300, manifest={"identity": lora}))
    with pytest.raises(UsageError, match=r"differ in adapter \(none and sha256:2\)"):
        check_fits(known, other)
    joint = replace(known, identity={**ours, "prompt_template": "several:1"})
    with pytest.raises(UsageError, match=r"another model: .* differ in prompt_template"):
        check_fits(joint, same)
    assert check_fits(replace(joint, tasks={**joint.tasks, "second": 1}), same) == []


def test_ids_are_written_as_ranges_and_read_again(law):
    run, _ = law
    rows = np.array([0, 1, 2, 5, 7, 8, 250])
    ids = document_ids(run, rows)
    assert ids == {"synthetic": "0-2,5,7-8,250"}
    assert rows_of_ids(run, ids).tolist() == rows.tolist()
    assert rows_of_ids(run, {"another": "0-9"}).tolist() == []


def test_vectors_that_are_all_alike_tell_nothing(tmp_path):
    rng = np.random.default_rng(0)
    frame = documents(rng.random(600) < 0.5, rng=rng, subjects=12)
    frame = frame.assign(logprobs=[[]] * 600, prompt_tokens=0, query_perplexity=5.0)
    run = read_run(written(tmp_path, frame, np.tile([1.0, 2.0], (600, 1))))
    with pytest.raises(UsageError, match="all slices have the same dispersion"):
        calibrate(run)
    assert (
        "Not available: all slices have the same dispersion" in audit(run, short=True).to_markdown()
    )


def drawn(rng, slices=30, documents=50, slope=0.0, between=0.1):
    """Slices whose accuracy is 0.5 + slope times the figure, and something that no figure tells."""
    figure = rng.normal(size=slices)
    n = np.broadcast_to(np.asarray(documents), (slices,)).astype(float)
    tends_to = np.clip(0.5 + slope * figure + between * rng.normal(size=slices), 0.02, 0.98)
    accuracy = rng.binomial(n.astype(int), tends_to) / n
    return Pairs(figure, accuracy, n, accuracy * (1 - accuracy) * n / (n - 1))


@pytest.mark.parametrize("slope", [0.2, -0.2])
def test_the_estimate_is_the_least_of_the_greatest_means_of_the_other_slices(slope):
    """Barlow's max-min formula over all runs of neighbours, against sklearn's pooling."""
    pairs = drawn(np.random.default_rng(3), slices=14, documents=np.arange(20, 34), slope=slope)
    found, rises = cross_fitted(pairs)[1], slope > 0
    for i, estimate in enumerate(found):
        others = np.delete(np.arange(14), i)
        order = others[np.argsort(pairs.dispersion[others])][:: 1 if rises else -1]
        y, n = pairs.accuracy[order], pairs.documents[order]
        fit = [
            max(
                min(np.average(y[a : b + 1], weights=n[a : b + 1]) for b in range(k, 13))
                for a in range(k + 1)
            )
            for k in range(13)
        ]
        x, fit = (
            np.array(values)[:: 1 if rises else -1] for values in (pairs.dispersion[order], fit)
        )
        assert estimate == pytest.approx(np.interp(pairs.dispersion[i], x, fit))


def test_jackknife_plus_is_the_published_quantiles():
    rng = np.random.default_rng(0)
    centres, half = rng.uniform(0.3, 0.6, size=24), rng.uniform(0, 0.2, size=24)
    low, high = jackknife_plus(centres, half, 0.9)
    # floor(0.1 * 25) = 2nd smallest, ceil(0.9 * 25) = 23rd smallest.
    assert low == sorted(centres - half)[1]
    assert high == sorted(centres + half)[22]


@pytest.mark.parametrize(("slope", "between"), [(0.0, 0.2), (0.2, 0.03), (0.0, 0.0)])
def test_the_labels_that_it_is_worth_are_as_far_off_as_labels_drawn_at_random(slope, between):
    rng = np.random.default_rng(3)
    pairs = drawn(rng, slices=400, documents=40, slope=slope, between=between)
    estimate = cross_fitted(pairs)[1] if slope else pairs.trivial
    found = Estimator.of("ours", pairs, estimate)
    assert found.rmse == pytest.approx(100 * np.sqrt(np.square(estimate - pairs.accuracy).mean()))
    assert found.worth_low < found.worth < found.worth_high
    right = np.arange(40) < np.round(40 * pairs.accuracy)[:, None]
    errors = {}
    for k in range(1, 41):
        samples = rng.permuted(np.tile(right, (10, 1, 1)), axis=2)[:, :, :k].mean(axis=2)
        errors[k] = np.square(samples - right.mean(axis=1)).mean()
    aim = np.square(estimate - pairs.accuracy).mean()
    direct = next(k for k in range(1, 41) if errors[k] <= aim)
    assert found.worth == pytest.approx(direct, abs=1.5)
    if between == slope == 0:
        assert found.worth == pytest.approx(
            20, abs=1.5
        )  # half of a slice that is noise around one accuracy


@pytest.mark.parametrize("store", ["sums-20", "sums-30"])
@pytest.mark.parametrize("by", ["doc_id", "subject"])
def test_halves_of_real_runs_whose_answers_are_luck_are_refused(store, by):
    """Forty fits to real vectors and confidences: the scores are shuffled, so that nothing tells them."""
    run, better = read_run(data_folder("demo_runs") / store), 0
    values = run.documents[by].unique()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        luck = replace(run, score=rng.permutation(run.score))
        half = np.flatnonzero(run.documents[by].isin(rng.permutation(values)[: len(values) // 2]))
        made = {"slice": "cluster"} if by == "subject" else {}  # half of the subjects are too few
        better += calibrate(labels_of(luck, half), **made).calibrator.beats_trivial
    assert better == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": np.arange(0)}, "has a label"),
        ({"labels": np.arange(100)}, "make fewer than 8 slices or clusters"),
        ({"by": "category"}, "5 labelled documents each, got 2 by 'category'"),
    ],
)
def test_too_few_labels_or_slices_are_one_sentence(law, options, message):
    labels = options.get("labels", np.arange(1000))
    with pytest.raises(UsageError, match=message):
        calibrate(labels_of(law[0], labels), slice=options.get("by"))


@pytest.mark.parametrize(
    ("fitted", "run", "message"),
    [
        (
            {},
            {"model": "b/c"},
            "fitted with the model 'synthetic/model', but the run has the model 'b/c'",
        ),
        ({}, {"revision": "v2"}, "the revision 'main', but the run has the revision 'v2'"),
        (
            {},
            {"prompt_format": "p2"},
            "the prompt format 'p1', but the run has the prompt format 'p2'",
        ),
        (
            {},
            {"chat_template": "c"},
            "fitted with no chat template, but the run has the chat template 'c'",
        ),
        ({}, {"num_fewshot": 5}, "number of few-shot examples 0"),
        ({}, {"tasks": {"other": 1}}, "the run has the task 'other'"),
        ({}, {"tasks": {"synthetic": 2}}, "fitted on version 1 of the task 'synthetic'"),
        (
            {"layer": "layer.3"},
            {},
            r"fitted on the layer 'layer\.3', but the run has vectors of last only",
        ),
        ({"width": 31}, {}, "fitted with the vector width 31, but the run has the vector width 32"),
    ],
)
def test_a_calibrator_refuses_another_setting_with_the_reason(tmp_path, law, fitted, run, message):
    other = planted_store(tmp_path, n=300, manifest=run)
    with pytest.raises(UsageError, match=message):
        predict(replace(law[1], **fitted), other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "json does not exist; `dispersion calibrate"),
        ("", "json is not JSON"),
        ("[1]", "json holds other JSON"),
        ('{"format": "dispersion-audit/1"}', "json has the schema dispersion-audit/1"),
        (
            '{"format": "dispersion-calibrator/1"}',
            r"\(dispersion-calibrator/3\), but .* has the schema dispersion-cal.*/1",
        ),
        ('{"format": "dispersion-calibrator/3"}', r"is damaged \(`model`: expected .*nothing"),
    ],
)
def test_a_file_holds_the_fit_and_another_one_is_refused(tmp_path, law, text, message):
    file = tmp_path / "c.json"
    file.write_text(law[1].to_json())
    assert Calibrator.read(file) == law[1]
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(UsageError, match=message):
        Calibrator.read(file)
    whole = json.loads(law[1].to_json())
    slices = whole["slices"]
    for key, damaged in (
        ("labelled", {"documents": 3}),
        ("slices", [{"slice": "a", "rows": 3}]),
        ("slices", 1),
        ("slices", slices[:7]),
        ("slices", [{**slices[0], "accuracy": 5.0}, *slices[1:]]),
        ("slices", [{**slices[0], "accuracy": True}, *slices[1:]]),
        ("slices", [{**slices[0], "documents": -10}, *slices[1:]]),
        ("slices", [{**slices[0], "documents": 1e400}, *slices[1:]]),
        ("slices", [{**slices[0], "variance": -3}, *slices[1:]]),
        ("slices", [{**slices[0], "dispersion": math.nan}, *slices[1:]]),
        ("width", "8"),
        ("seed", 10**400),
        ("beats_trivial", 1),
        ("labelled", {**whole["labelled"], "doc_ids": {"t": "0-9;x"}}),
    ):
        file.write_text(json.dumps(whole | {key: damaged}))
        with pytest.raises(UsageError, match=r"c\.json is damaged \(.*\); calibrate again"):
            Calibrator.read(file)


def test_predictions_say_first_what_can_be_said_and_the_whole_is_its_slices(law):
    some = predict(law[1], law[0])
    whole, *rows = some.slices
    given = [row for row in rows if row.reason is None]
    weight = np.array([row.documents for row in given])
    assert whole.documents == weight.sum()
    assert whole.predicted == pytest.approx(
        weight @ [row.predicted for row in given] / weight.sum()
    )
    assert whole.low <= whole.true <= whole.high
    width = [row.high - row.low for row in given]
    assert whole.high - whole.low < min(width)
    assert np.corrcoef(weight, width)[0, 1] < -0.5
    how_many = "all 40 slices" if len(given) == 40 else f"{len(given)} of 40 slices"
    assert some.answer()[0].startswith(f"The accuracy of {how_many} can be estimated")
    assert f"together: {whole.predicted:.3f} (95 %" in some.answer()[1]
    assert "exchangeable" in some.document().limits[0]
    assert some.to_html().count("<circle") == 1 + len(given)
    inside = sum(row.low <= row.true <= row.high for row in (whole, *given))
    assert (
        f"{inside} of {1 + len(given)} known accuracies lie in their interval" in some.to_markdown()
    )
