"""Comparing runs: paired differences by hand, and what must not be compared."""

import json
import re

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp
from scipy.stats import t as student
from synthetic import differences_of_equals, documents, planted_store, written

from lmeval_dispersion import audit
from lmeval_dispersion.auditing.compare import compare
from lmeval_dispersion.auditing.run import Missing
from lmeval_dispersion.errors import MixedStoresError, UsageError
from lmeval_dispersion.geometry import dispersion
from lmeval_dispersion.report import render
from lmeval_dispersion.statistics import mcnemar_p, paired_share_bounds
from lmeval_dispersion.store import read_store


def store(path, *, seed=0, shift=0.0, n=300, order=None, hashes="h", model="m", d=24):
    """Documents are the same for every seed; vectors and answers differ."""
    rng = np.random.default_rng(seed)
    right = rng.random(n) < 0.5 + shift
    frame = documents(right, rng=np.random.default_rng(99))
    frame["doc_hash"] = [f"{hashes}{i}" for i in range(n)]
    base = np.random.default_rng(7).normal(size=(n, d))
    x = base + 0.3 * rng.normal(size=(n, d)) + 3 * np.eye(d)[0] * (1 - shift)
    order = np.arange(n) if order is None else order
    return written(path, frame.iloc[order], x[order], {"model": model})


def test_differences_and_errors_are_those_of_leaving_each_document_out(tmp_path):
    order = np.random.default_rng(3).permutation(300)
    a, b = (
        store(tmp_path / "a", n=300),
        store(tmp_path / "b", seed=1, shift=0.1, order=order, model="m2"),
    )
    found = compare([a, b])
    assert found.documents == 300
    assert found.left_out == [0, 0]
    row = found.others[0].slices[0]
    x, y = read_store(a).vectors(), read_store(b).vectors()[np.argsort(order)]
    assert row.dispersion_baseline == pytest.approx(dispersion(x), rel=1e-5)
    assert row.dispersion_difference == pytest.approx(dispersion(y) - dispersion(x), rel=1e-4)
    without = [
        dispersion(np.delete(y, i, axis=0)) - dispersion(np.delete(x, i, axis=0))
        for i in range(300)
    ]
    se = np.sqrt(299 / 300 * np.square(without - np.mean(without)).sum())
    point = student.ppf(0.975, 299)
    assert row.dispersion_high - row.dispersion_low == pytest.approx(2 * point * se, rel=1e-3)
    first, second = (
        read_store(p).documents.sort_values("doc_id")["correct"].to_numpy() for p in (a, b)
    )
    assert row.accuracy_difference == pytest.approx((second - first).mean())
    gained, lost = int((second > first).sum()), int((second < first).sum())
    assert (row.gained, row.lost) == (gained, lost)
    assert row.accuracy_p == pytest.approx(binomtest(gained, gained + lost).pvalue)
    assert row.accuracy_low < row.accuracy_difference < row.accuracy_high
    names = [r.slice for r in found.others[0].slices]
    assert names[0] == "all documents"
    assert sorted(names[1:]) == [f"subject {i}" for i in range(6)]
    parts = found.others[0].slices[1:]
    assert [p.change for p in parts] == sorted((p.accuracy_difference for p in parts), reverse=True)
    # A phone has room for both differences; their ends stand in columns of their own, not in the cell.
    text = render(found.document(), "html")
    heads = re.findall(r'<th scope="col" class="([^"]*)"[^>]*><button type="button">([^<]*)', text)
    narrow = [name for kind, name in heads if "spare" not in kind]
    assert narrow == ["Subject", "Δ accuracy", "Δ dispersion"]
    assert f"{row.dispersion_difference:+.4f} (".replace("-", "−") not in text.split("<table")[1]
    mask = [i % 6 == 2 for i in range(300)]
    part = next(p for p in parts if p.slice == "subject 2")
    assert part.dispersion == pytest.approx(dispersion(y[mask]), rel=1e-5)


def test_only_shared_documents_count(tmp_path):
    a, b = store(tmp_path / "a"), store(tmp_path / "b", seed=1, order=np.arange(100))
    found = compare([a, b])
    assert found.documents == 100
    assert found.left_out == [200, 0]
    small = compare([a, store(tmp_path / "c", order=np.arange(8), d=25)])
    assert any("different widths" in note for note in small.notes)
    rows = small.others[0].slices
    assert rows[1].reason == "an interval needs 5 or more shared documents, got 2"
    assert not np.isnan([rows[1].dispersion_difference, rows[1].accuracy_difference]).any()
    assert np.isnan([rows[1].dispersion_low, rows[1].accuracy_low, rows[1].accuracy_p]).all()
    json.loads(render(small.document(), "json"))


def test_what_cannot_be_compared_is_refused(tmp_path):
    a = store(tmp_path / "a")
    with pytest.raises(UsageError, match="two or more runs"):
        compare([a])
    with pytest.raises(
        MixedStoresError, match=r"differs between .*b and .*a \(300 such documents\)"
    ):
        compare([a, store(tmp_path / "b", hashes="other")])
    other = planted_store(tmp_path / "c", n=30, task="elsewhere")
    with pytest.raises(MixedStoresError, match="share no document"):
        compare([a, other])


def test_the_document_says_the_difference_first_and_has_every_form(tmp_path):
    found = compare([store(tmp_path / "a"), store(tmp_path / "b", seed=1, shift=0.2, model="m2")])
    document = found.document()
    whole = found.others[0].slices[0]
    assert found.answer()[0].startswith("m2 answers more documents right than m: ")
    assert render(document, "markdown").count("| subject ") == 6
    lines = render(document, "csv").splitlines()
    assert len(lines) == 8
    assert lines[1].startswith(
        f"m2,all documents,300,300,{whole.accuracy!r},{whole.accuracy_baseline!r},"
    )
    page = render(document, "html")
    heads = re.findall(r'<button type="button">([^<]*)</button><span class="dots', page)
    assert heads == ["Δ accuracy", "Δ dispersion"]
    assert "subject 5" in page


MORE, FEWER = "b answers more documents right than a", "b answers fewer documents right than a"
WIDER, NARROWER = "b is more dispersed than a", "b is less dispersed than a"
ALIKE, AS_WIDE = (
    "b and a do not differ clearly in accuracy",
    "b and a do not differ clearly in dispersion",
)


@pytest.mark.parametrize(
    ("right", "spread", "said"),
    [
        ((0.3, 0.6), (0.5, 0.5), {MORE, AS_WIDE}),
        ((0.6, 0.3), (0.5, 0.5), {FEWER, AS_WIDE}),
        ((0.5, 0.5), (0.5, 1.0), {ALIKE, WIDER}),
        ((0.5, 0.5), (1.0, 0.5), {ALIKE, NARROWER}),
    ],
)
def test_each_sentence_appears_where_it_is_true_and_nowhere_else(tmp_path, right, spread, said):
    """Planted differences of right answers and of spread, on 400 documents."""
    rng = np.random.default_rng(4)
    luck, base = rng.random(400), rng.normal(size=(400, 16)) / 4
    for name, share, width in zip("ab", right, spread, strict=True):
        frame = documents(luck < share, rng=np.random.default_rng(ord(name)), subjects=1)
        written(tmp_path / name, frame, np.eye(1, 16) + width * base, {"model": name})
    text = " ".join(compare([tmp_path / "a", tmp_path / "b"]).answer())
    assert {
        words for words in (MORE, FEWER, ALIKE, WIDER, NARROWER, AS_WIDE) if words in text
    } == said
    assert ("neither good nor bad" in text) == (spread[0] != spread[1])


@pytest.mark.parametrize("repeated", [0, 14, 15, 60], ids=str)
def test_repeated_documents_allow_no_verdict_in_compare_and_are_left_out_of_an_audit(
    tmp_path, repeated
):
    """Of 300 documents, from 5 % on: two models that clearly differ are then not said to."""
    rng = np.random.default_rng(0)
    places = np.r_[np.arange(300 - repeated), rng.integers(0, 240, repeated)]
    luck, x = rng.random(300)[places], rng.normal(size=(300, 16))[places]
    for name, share, width in (("a", 0.5, 0.5), ("b", 0.8, 1.0)):
        frame = documents(luck < share, rng=np.random.default_rng(0)).assign(
            prompt_hash=[f"p{place}" for place in places]
        )
        written(tmp_path / name, frame, np.eye(1, 16) + width * x, {"model": name})
    found, said = compare([tmp_path / "a", tmp_path / "b"]), f"{repeated} of 300 documents repeat"
    audited = audit(tmp_path / "b", short=True)
    assert not audited.cautions
    assert audited.run["documents"] == 300 - repeated
    assert (f"{repeated} repeated documents left out" in " ".join(audited.answer())) == bool(
        repeated
    )
    assert not isinstance(audited.mixtures, Missing)
    assert audited.overall.accuracy == np.mean((luck < 0.8)[: 300 - repeated])
    if repeated < 15:
        assert not found.cautions
        assert found.answer()[0].startswith(MORE)
        assert "No verdict" not in found.to_markdown()
    else:
        assert found.answer()[0].startswith(f"No verdict: {said}")
        shares = [f"{100 * np.mean(luck < share):.1f} %" for share in (0.8, 0.5)]
        assert found.answer()[1] == f"b against a: {shares[0]} against {shares[1]}."
        text = " ".join(found.answer())
        assert not any(words in text for words in (MORE, WIDER, "p <", "clearly", "95 %"))
        assert "and more where documents repeat" in found.to_html()


def test_a_slice_without_shared_documents_or_with_all_of_them_has_no_row(tmp_path):
    a, b = store(tmp_path / "a"), store(tmp_path / "b", seed=1, order=np.arange(0, 300, 6))
    (whole,) = compare([a, b]).others[0].slices
    assert (whole.slice, whole.documents) == ("all documents", 50)
    three = store(tmp_path / "c", order=np.flatnonzero(np.arange(300) % 6 < 3))
    names = sorted(row.slice for row in compare([a, three]).others[0].slices)
    assert names == ["all documents", "subject 0", "subject 1", "subject 2"]


def test_no_difference_of_minus_nothing_is_printed(tmp_path):
    """One document of 4,000 is lost: -0.025 points."""
    right = np.arange(4000) % 2 == 0
    for name, lost in (("a", 0), ("b", 1)):
        frame = documents(
            np.where(np.arange(4000) < lost, False, right), rng=np.random.default_rng(0)
        )
        written(
            tmp_path / name, frame, np.random.default_rng(0).normal(size=(4000, 4)), {"model": name}
        )
    found = compare([tmp_path / "a", tmp_path / "b"])
    shown = render(found.document(), "table", width=100)
    assert found.others[0].slices[0].lost == 1
    assert not re.search(r"-0(\.0+)?(?![\d.])", shown), shown


def test_subjects_that_differ_are_named_only_where_they_do(tmp_path):
    rng = np.random.default_rng(1)
    x, luck = rng.normal(size=(600, 8)), rng.random(600)
    shares = {"a": 0.5, "noise": 0.5, "b": np.full(600, 0.5)}
    shares["b"][np.arange(600) % 6 == 3] = 0.95
    paths = {}
    for name, share in shares.items():
        drawn = luck if name != "noise" else np.where(rng.random(600) < 0.7, luck, rng.random(600))
        frame = documents(drawn < share, rng=np.random.default_rng(0))
        paths[name] = written(tmp_path / name, frame, x, {"model": name})
    found = compare([paths["a"], paths["b"]]).answer()
    assert found[1].startswith("Accuracy differs clearly in subject 3 (+")
    assert (
        "in no slice by subject, after correction for testing all 6"
        in compare([paths["a"], paths["noise"]]).answer()[1]
    )


def test_false_claims_on_runs_that_do_not_differ_are_at_most_one_in_twenty():
    """Three standard errors are allowed; benchmarks/audit_conclusions.py has more settings and draws."""
    rng = np.random.default_rng(0)
    for n, repeats in ((5, 600), (10, 500), (30, 300), (300, 60)):
        wrong = dict.fromkeys(("answers", "scores", "vectors"), 0)
        for _ in range(repeats):
            for kind, (low, high) in differences_of_equals(rng, n).items():
                wrong[kind] += low > 0 or high < 0
        assert max(wrong.values()) <= 0.05 * repeats + 3 * np.sqrt(0.05 * 0.95 * repeats), (
            n,
            wrong,
        )


@pytest.mark.parametrize("n", [5, 6, 9, 40])
def test_an_interval_leaves_out_zero_where_the_exact_test_does_and_stays_in_its_range(n):
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            low, high = paired_share_bounds(gained, lost, n)
            assert -1 <= low <= high <= 1
            assert (low > 0 or high < 0) == (mcnemar_p(gained, lost) < 0.05), (gained, lost)


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (0.05, "b gives the right answer more probability than a: 0."),
        (-0.05, "b gives the right answer less probability than a: 0."),
        (0.0, "b and a do not differ clearly in the probability of the right answer: 0."),
    ],
)
def test_the_probability_of_the_right_answer_is_compared(tmp_path, shift, said):
    rng = np.random.default_rng(5)
    x = rng.uniform(0.2, 0.6, 240)
    y = x + shift + rng.normal(0, 0.1, 240)
    y[:7] = np.nan
    stores = []
    for name, values in (("a", x), ("b", y)):
        frame = documents(np.arange(240) % 2 == 0, rng=np.random.default_rng(ord(name)))
        frame = frame.assign(probability=values)
        stores.append(written(tmp_path / name, frame, rng.normal(size=(240, 8)), {"model": name}))
    found = compare(stores)
    whole, *parts = found.others[0].slices
    change = (y - x)[7:]
    assert whole.probability_difference == pytest.approx(change.mean())
    assert whole.probability_se == pytest.approx(change.std(ddof=1) / np.sqrt(233))
    assert whole.probability_p == pytest.approx(ttest_1samp(change, 0).pvalue)
    assert all(part.probability_se > 0 for part in parts)
    sentence = next(text for text in found.answer() if "right answer" in text)
    assert sentence.startswith(said)
    assert "Δ right answer" in render(found.document(), "markdown")
    shown = audit(stores[1], short=True)
    assert shown.overall.probability == pytest.approx(np.nanmean(y))
    assert "fine-tunes" not in shown.to_markdown() + found.to_markdown()


def test_runs_without_probabilities_say_nothing_of_them(tmp_path):
    found = compare([store(tmp_path / "a"), store(tmp_path / "b", seed=1)])
    text = found.to_markdown() + audit(tmp_path / "a").to_markdown()
    assert not any(
        words in text for words in ("| Right answer", "Δ right answer", "the right answer")
    )
