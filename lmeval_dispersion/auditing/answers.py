"""Whether right and wrong answers say anything about a run's documents: guessing, one answer, repeats.

Where the model gives one answer to nearly everything, a right answer says which answer the question has, not
what the model knows; where its accuracy is that of guessing, right answers are luck. Nothing that is told by
right and wrong answers may be concluded then, and the reports say so first.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.run import Run
from lmeval_dispersion.statistics import wilson

Array = NDArray[np.float64]

ONE_ANSWER = 0.9  # share of a single answer from which on answers are taken for constant
REPEATED = 0.05  # share of repeated documents from which on intervals are too short to conclude from
_FEWEST = 10  # documents for a distribution of answers
_AGREE = 0.95  # of the documents with one answer, for target and score to mean the same
_SAME = 0.01  # of the dispersion: nearer than this, documents of one text are the same document


def answers_report(run: Run) -> dict[str, Any]:
    """How the model answers: accuracy beside guessing, its commonest answer, repeated documents, cautions.

    ``cautions`` are the sentences why right and wrong answers support no conclusion; empty where they may.
    """
    labelled = run.labelled
    choices = run.choices[labelled]
    known = labelled[choices >= 2]
    right = int(run.right[known].sum())
    accuracy = right / len(known) if len(known) else float("nan")
    low, high = wilson(accuracy, len(known))
    report = {
        "with_choices": len(known),
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "chance": float((1 / choices[choices >= 2]).mean()) if len(known) else float("nan"),
        **_commonest(run),
        "repeated_documents": _repeated(run),
    }
    return {**report, "cautions": _cautions(report, run)}


def _commonest(run: Run) -> dict[str, Any]:
    """The answer given most often, by its words or by its place among the choices, and its share."""
    rows = run.labelled
    words = Counter(str(word) for word in run.documents["prediction"].iloc[rows] if isinstance(word, str))
    places = Counter(run.chosen[rows][run.chosen[rows] >= 0].tolist())
    answer, count, given = None, 0, 0
    if words:
        (answer, count), given = min(words.items(), key=lambda item: (-item[1], item[0])), words.total()
    if places:
        place, often = min(places.items(), key=lambda item: (-item[1], item[0]))
        if not given or often / places.total() > count / given:
            answer, count, given = f"choice {place + 1}", often, places.total()
    return {
        "commonest": answer,
        "commonest_documents": count,
        "answered_documents": given,
        "commonest_share": count / given if given else float("nan"),
        "commonest_accuracy": _score_of(answer, run),
    }


def _score_of(answer: str | None, run: Run) -> float:
    """What always giving this answer would score; NaN unless the targets tell who is right."""
    documents = run.documents.iloc[run.labelled]
    is_target = (documents["target"] == answer).to_numpy()
    given = (documents["prediction"] == answer).to_numpy()
    if not given.any() or (is_target[given] == run.right[run.labelled][given]).mean() < _AGREE:
        return float("nan")
    return float(is_target.mean())


def _repeated(run: Run) -> int:
    """Documents whose prompt (or text) and vector another, earlier document has."""
    column = "prompt_hash" if run.documents["prompt_hash"].notna().any() else "text"
    keys = run.documents[column]
    rows = np.flatnonzero(keys.notna() & keys.duplicated(keep=False))
    if not len(rows):
        return 0
    first: dict[str, int] = {}
    near = _SAME * max(float(run.vectors.squares.mean()), 1e-12)
    count = 0
    for row in rows.tolist():
        other = first.setdefault(str(keys.iat[row]), row)
        if other != row:
            difference = run.vectors.rows[row] - run.vectors.rows[other]
            count += bool(float(difference @ difference) / 2 < near)
    return count


def _cautions(report: dict[str, Any], run: Run) -> list[str]:
    sentences = []
    share, constant = report["commonest_share"], report["commonest_accuracy"]
    # A model may well give one answer where nearly all questions have it: if it scores more than that.
    better = not np.isnan(constant) and report["accuracy_low"] > constant
    if report["answered_documents"] >= _FEWEST and share >= ONE_ANSWER and not better:
        sentences.append(
            f"The model answers {report['commonest']} in {_percent(share)} of cases "
            f"({report['commonest_documents']:,} of {report['answered_documents']:,}): correct and incorrect "
            "say nothing about the documents here."
        )
    low, high, chance = report["accuracy_low"], report["accuracy_high"], report["chance"]
    if low <= chance <= high:
        sentences.append(
            f"The accuracy of {100 * report['accuracy']:.1f} % (95 % {100 * low:.1f} to {100 * high:.1f}) is "
            f"no better than guessing ({100 * chance:.1f} %): right answers may be luck."
        )
    if (repeated := report["repeated_documents"]) >= REPEATED * len(run.vectors):
        sentences.append(
            f"{repeated} of {len(run.vectors)} documents repeat another one: errors and intervals count them "
            "as independent and are too short."
        )
    return sentences


def _percent(share: float) -> str:
    """Whole per cent, but 100 only for all."""
    return f"{round(100 * share) if share == 1 else min(round(100 * share), 99)} %"
