"""Every conclusion of an audit, on a store where it must appear and on ones where it must not."""

from functools import partial

import numpy as np
import pytest
from synthetic import planted_store, subjects_store

from lmeval_dispersion.auditing.mixtures import mixture_curves, pools_sentence
from lmeval_dispersion.auditing.ranking import found_sentence, ranking_report, ranking_sentence
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import answers_of, read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.report import render

audit_report = partial(audit, details=True)

STORES = {
    "noise": {},
    "law": {"law": 0.5},
    "reversed": {"law": -0.4},
    "simpson": {"between": 0.8},
    "simpson, reversed law": {"between": 0.9, "law": -0.2, "each": 300},
    "open inside": {"law": 0.12, "subjects": 60, "each": 4},
    "tasks": {"between": 0.8, "tasks": 2, "subjects": 16, "each": 80},
    "law of slices": {"between": 0.8, "subjects": 12},
    "guessing": {"law": 0.5, "accuracy": 0.25},
    "one answer": {"law": 0.5, "accuracy": 0.4, "answer": "A"},
    "few wrong": {"law": 0.5, "accuracy": 0.992},
    "repeats": {"law": 0.5, "repeat": 2},
}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    """The conclusions of every store in one text, without the calibration's."""
    found = {}

    def no_protocol(run, **_):
        raise GeometryError("its forests take most of the time, and no sentence here is theirs")

    for name, options in STORES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lmeval_dispersion.auditing.report.paper_protocol", no_protocol)
            report = audit_report(read_run(subjects_store(tmp_path_factory.mktemp("s") / "s", **options)))
        said = [*report.answer(), found_sentence(report.ranking)]
        found[name] = " ".join(sentence for sentence in said if "read off" not in sentence)
    return found


CAUTIOUS = {"guessing", "one answer", "repeats"}


@pytest.mark.parametrize(
    ("sentence", "on"),
    [
        ("Right and wrong answers do not differ clearly in dispersion", {"noise"}),
        ("A low contribution is no better than chance at finding wrong answers", {"noise"}),
        ("no other signal is clearly better than chance", {"noise", "law", "reversed"}),
        ("slices accuracy shows no clear order by dispersion", {"noise"}),
        ("Right answers are more dispersed than wrong ones", {"law"}),
        ("Right answers are less dispersed than wrong ones", {"reversed"}),
        ("A low contribution points at wrong answers (", {"law"}),
        ("A low contribution points at right answers (", {"reversed"}),
        ("inside subjects too", {"law", "reversed"}),
        ("Right answers are more dispersed over all (", {"simpson"}),
        ("A low contribution points at wrong answers over all (", {"simpson"}),
        ("the difference lies between subjects", {"simpson"}),
        ("and inside subjects it is the reverse", {"simpson, reversed law"}),
        ("Whether right answers are more dispersed, or come from more dispersed subjects", {"open inside"}),
        ("Whether a low contribution finds wrong answers, or subjects that have more", {"open inside"}),
        ("slices accuracy rises with dispersion", {"simpson", "law of slices"}),
        ("inside tasks no order is clear", {"tasks"}),
        ("right answers may be luck", {"guessing"}),
        ("the model answers A in 100 % of cases", {"one answer"}),
        ("documents repeat another one", {"repeats"}),
        ("No verdict: ", CAUTIOUS),
        ("of each are needed", {"few wrong"}),
    ],
)
def test_a_sentence_appears_where_it_is_true_and_not_on_noise(summaries, sentence, on):
    for name in on:
        assert sentence in summaries[name], summaries[name]
    others = {"noise", "law", "reversed", *CAUTIOUS} - on
    # These two sentences hold of the planted laws too, whose subjects are alike.
    if "no clear order" in sentence or "no other signal" in sentence:
        others -= {"law", "reversed"}
    for name in others:
        assert sentence not in summaries[name], summaries[name]


@pytest.mark.parametrize("name", sorted(CAUTIOUS))
def test_a_caution_comes_first_and_silences_every_conclusion_about_answers(summaries, name):
    text = summaries[name]
    assert not text.startswith("The 1000 documents")
    for claim in ("points at", "Right answers are", "rises with", "falls with", "AUROC", "better than the"):
        assert claim not in text


def order_of(run):
    """What an audit says of the subjects of a run."""
    return audit(run, short=True).answer()[0]


def test_two_tasks_are_compared_inside_each(tmp_path):
    """Subjects of two tasks: the order over all is that of the tasks; where it is in them, it says so."""
    run = read_run(subjects_store(tmp_path / "a", between=0.8, tasks=2, subjects=16, each=80))
    found = slice_table(run, slicings(run)["subject"]).association
    assert found.low > 0
    assert found.inside_tasks.tasks == 2
    assert found.inside_tasks.p > 0.05
    other = read_run(subjects_store(tmp_path / "b", between=0.9, subjects=16, each=80))
    other.documents["task"] = ["ab"[int(name[-2:]) % 2] for name in other.documents["subject"]]
    assert "inside tasks too" in order_of(other)


def test_slices_of_one_document_or_none_usable_are_never_called_the_lowest(tmp_path):
    names = [f"own {i}" for i in range(40)]
    said = order_of(read_run(planted_store(tmp_path / "a", 40, subject=names, category=None)))
    assert "no subject is called the least dispersed, since 0 of 40 slices have three documents" in said
    mixed = ["big a"] * 30 + ["big b"] * 30 + ["single"]
    assert "single" not in order_of(read_run(planted_store(tmp_path / "b", 61, subject=mixed, category=None)))


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"n": 40, "correct": [1.0] * 39 + [0.0]},
        {"n": 60, "query_perplexity": np.nan, "prompt_tokens": 0, "logprobs": [[]] * 60},
        {"n": 200, "correct": 1.0},
        {"n": 30, "subject": [f"s{i}" for i in range(30)]},
    ],
    ids=str,
)
def test_no_report_prints_nan(tmp_path, options):
    report = audit_report(read_run(planted_store(tmp_path, **options)))
    assert "nan" not in render(report.document(), "markdown").replace("finance", "")


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_noise_is_seldom_taken_for_a_finding(tmp_path, count):
    """At 5 % a sentence, more than 6 of 40 claim in 1 of 300 cases; benchmarks/ counts more of them."""
    claims = {"rises with|falls with": 0, "Right answers are": 0, "points at": 0, "best other signal is": 0}
    for seed in range(count):
        shape = {"subjects": 57, "each": 10} if seed % 2 else {"subjects": 10, "each": 60}
        run = read_run(subjects_store(tmp_path / str(seed), seed=seed, **shape))
        mixtures, ranking = mixture_curves(run), ranking_report(run)
        said = order_of(run) + pools_sentence(mixtures) + ranking_sentence(ranking) + found_sentence(ranking)
        for words in claims:
            claims[words] += any(word in said for word in words.split("|"))
    assert max(claims.values()) <= (6 if count == 40 else 2)


YES_OR_NO = np.where(np.random.default_rng(0).random(1000) < 0.92, "yes", "no")
CHOICES = [[-9.0, -0.1, -9.0, -9.0] if i % 25 else [-0.1, -9.0, -9.0, -9.0] for i in range(1000)]


@pytest.mark.parametrize(
    ("columns", "caution"),
    [
        # A model that beats the answer that most questions have is not to be blamed for giving it.
        ({"target": YES_OR_NO, "prediction": YES_OR_NO, "correct": 1.0}, None),
        (
            {"target": YES_OR_NO, "prediction": "yes", "correct": YES_OR_NO == "yes"},
            "answers yes in 100 %",
        ),
        # Targets written in another way than answers excuse nothing.
        (
            {"target": ["1"] * 1000, "prediction": "A", "correct": np.arange(1000) % 5 < 2},
            "answers A in",
        ),
        # Choices that are whole texts are named by their place.
        ({"logprobs": CHOICES, "prediction": [f"end {i}" for i in range(1000)]}, "answers choice 2 in 96 %"),
        # One text with other vectors is not a repeat.
        ({"text": "the same"}, None),
    ],
    ids=["knows", "blind", "other targets", "whole texts", "one text"],
)
def test_one_answer_to_most_questions_is_a_caution(tmp_path, columns, caution):
    if "correct" in columns:
        columns = {**columns, "correct": np.broadcast_to(columns["correct"], 1000).astype(float)}
    found = answers_of(read_run(planted_store(tmp_path, 1000, **columns)))
    assert len(found.cautions) == (caution is not None)
    assert caution is None or caution in found.cautions[0]
