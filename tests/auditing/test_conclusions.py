"""Every conclusion of an audit, on a store where it must appear and on ones where it must not."""

import numpy as np
import pytest
from synthetic import concluded, planted_store, subjects_store

from lmeval_dispersion.auditing.ranking import errors_sentence
from lmeval_dispersion.auditing.report import audit
from lmeval_dispersion.auditing.run import answers_of, read_run
from lmeval_dispersion.report import render

STORES = {
    "noise": {},
    "law": {"law": 0.5},
    "reversed": {"law": -0.4},
    "simpson": {"between": 0.8},
    "simpson, reversed law": {"between": 0.9, "law": -0.2, "each": 300},
    "open inside": {"law": 0.12, "subjects": 60, "each": 4},
    "tasks": {"between": 0.8, "tasks": 2, "subjects": 16, "each": 80},
    "alike tasks": {
        "between": 0.9,
        "subjects": 16,
        "each": 80,
        "task": np.repeat(["a", "b"] * 8, 80),
    },
    "law of slices": {"between": 0.8, "subjects": 12},
    "guessing": {"law": 0.5, "accuracy": 0.25},
    "one answer": {"law": 0.5, "accuracy": 0.4, "answer": "A"},
    "few wrong": {"law": 0.5, "accuracy": 0.992},
    "repeats": {"law": 0.5, "repeat": 2},
}
CAUTIOUS = {"guessing", "one answer"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The short audit of every store."""
    folder = tmp_path_factory.mktemp("stores")
    return {
        name: audit(subjects_store(folder / name, **options), short=True)
        for name, options in STORES.items()
    }


@pytest.fixture(scope="module")
def summaries(reports):
    """The conclusions of every store in one text."""
    return {
        name: f"{concluded(each)} {errors_sentence(each.ranking)}" for name, each in reports.items()
    }


@pytest.mark.parametrize(
    ("sentence", "on"),
    [
        ("Right and wrong answers do not differ clearly in dispersion", {"noise"}),
        ("A low contribution is no better than chance at finding wrong answers", {"noise"}),
        ("no other signal is clearly better than chance", {"noise", "law", "reversed"}),
        ("slices, accuracy is not clearly related to dispersion", {"noise"}),
        ("Right answers are more dispersed than wrong ones", {"law"}),
        ("Right answers are less dispersed than wrong ones", {"reversed"}),
        ("A low contribution points to wrong answers (", {"law"}),
        ("A low contribution points to right answers (", {"reversed"}),
        ("inside subjects too", {"law", "reversed"}),
        ("Right answers are more dispersed overall (", {"simpson"}),
        ("A low contribution points to wrong answers overall (", {"simpson"}),
        ("the difference lies between subjects", {"simpson"}),
        ("but the reverse inside subjects", {"simpson, reversed law"}),
        (
            "Whether right answers are more dispersed, or only come from more dispersed subjects",
            {"open inside"},
        ),
        (
            "Whether a low contribution finds wrong answers, or only subjects with more wrong",
            {"open inside"},
        ),
        ("slices, accuracy rises with dispersion", {"simpson", "law of slices"}),
        ("; weakest subject: ", {"simpson", "law of slices"}),
        ("; no subject is clearly weaker than the rest", {"noise", "law", "reversed"}),
        ("inside tasks no order is clear", {"tasks"}),
        ("inside tasks too", {"alike tasks"}),
        ("right answers may be luck", {"guessing"}),
        ("the model answers A in 100 % of cases", {"one answer"}),
        ("repeated documents left out", {"repeats"}),
        ("No verdict: ", CAUTIOUS),
        ("Whether right answers are more dispersed is not clear with", {"few wrong"}),
        ("Whether a low contribution points to wrong answers is not clear with", {"few wrong"}),
    ],
)
def test_a_sentence_appears_where_it_is_true_and_not_on_noise(summaries, sentence, on):
    for name in on:
        assert sentence in summaries[name], summaries[name]
    others = {"noise", "law", "reversed", *CAUTIOUS} - on
    # These two sentences hold of the planted laws too, whose subjects are alike.
    if "not clearly related" in sentence or "no other signal" in sentence:
        others -= {"law", "reversed"}
    for name in others:
        assert sentence not in summaries[name], summaries[name]


@pytest.mark.parametrize("name", sorted(CAUTIOUS))
def test_a_caution_comes_first_and_silences_every_conclusion_about_answers(summaries, name):
    text = summaries[name]
    assert not text.startswith("The 1000 documents")
    for claim in (
        "points to",
        "Right answers are",
        "rises with",
        "falls with",
        "AUROC",
        "better than the",
    ):
        assert claim not in text


@pytest.mark.parametrize("name", sorted(STORES))
def test_the_reason_for_what_is_not_computed_is_the_caution_itself(reports, name):
    text = " ".join(render(reports[name].document(), "table").split())
    assert ("Not computed, as there is no verdict: " in text) == (name in CAUTIOUS)
    assert ("luck" in text) == (name == "guessing")


def order_of(run):
    """The sentences of an audit on the subjects of a run."""
    return concluded(audit(run, short=True))


def test_slices_of_one_document_or_none_usable_are_never_called_the_lowest(tmp_path):
    names = [f"own {i}" for i in range(40)]
    said = order_of(read_run(planted_store(tmp_path / "a", 40, subject=names, category=None)))
    assert (
        "The least dispersed subject cannot be named: at least two slices with three documents"
        in said
    )
    mixed = ["big a"] * 30 + ["big b"] * 30 + ["single"]
    assert "single" not in order_of(
        read_run(planted_store(tmp_path / "b", 61, subject=mixed, category=None))
    )


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
    report = audit(read_run(planted_store(tmp_path, **options)), details=True)
    assert "nan" not in render(report.document(), "markdown").replace("finance", "")


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_noise_is_seldom_taken_for_a_finding(tmp_path, count):
    """At 5 % a sentence, more than 6 of 40 claim in 1 of 300 cases; benchmarks/ counts more of them."""
    words = (
        "with dispersion (",
        "Right answers are",
        "points to",
        "best other signal is",
        "Labels can be",
    )
    claims = dict.fromkeys(words, 0)
    for seed in range(count):
        shape = (
            {"subjects": 57, "each": 20}
            if seed % 4 == 3
            else {"subjects": 12, "each": 50, "luck": 0.1}
        )
        report = audit(
            read_run(subjects_store(tmp_path / str(seed), seed=seed, **shape)), short=True
        )
        said = f"{concluded(report)} {errors_sentence(report.ranking)}"
        for claim in claims:
            claims[claim] += claim in said
    assert max(claims.values()) <= (6 if count == 40 else 2), claims


YES_OR_NO = np.where(np.random.default_rng(0).random(1000) < 0.92, "yes", "no")
CHOICES = [[-9.0, -0.1, -9.0, -9.0] if i % 25 else [-0.1, -9.0, -9.0, -9.0] for i in range(1000)]


@pytest.mark.parametrize(
    ("columns", "caution"),
    [
        # A model that beats the answer that most questions have is not to be blamed for giving it.
        ({"target": YES_OR_NO, "prediction": YES_OR_NO, "correct": 1.0}, None),
        (
            {
                "target": YES_OR_NO,
                "prediction": "yes",
                "correct": (YES_OR_NO == "yes").astype(float),
            },
            "answers yes in 100 %",
        ),
        # Targets written in another way than answers excuse nothing.
        (
            {"target": "1", "prediction": "A", "correct": [float(i % 5 < 2) for i in range(1000)]},
            "answers A in",
        ),
        # Choices that are whole texts are named by their place.
        (
            {"logprobs": CHOICES, "prediction": [f"end {i}" for i in range(1000)]},
            "answers choice 2 in 96 %",
        ),
        # One text with other vectors is not a repeat.
        ({"text": "the same"}, None),
    ],
    ids=["knows", "blind", "other targets", "whole texts", "one text"],
)
def test_one_answer_to_most_questions_is_a_caution(tmp_path, columns, caution):
    found = answers_of(read_run(planted_store(tmp_path, 1000, **columns)))
    assert len(found.cautions) == (caution is not None)
    assert caution is None or caution in found.cautions[0]
