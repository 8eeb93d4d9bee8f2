"""An order without labels: by agreement with the mean answer of all to the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lmeval_screener.tokens.answers import first_known
from lmeval_screener.tokens.sets import AnswerSet
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import hashed
from lmeval_dispersion.racing.contest import Contest
from lmeval_dispersion.racing.rule import Array

if TYPE_CHECKING:
    from lmeval_dispersion.racing.evaluation import Evaluation, More

SEVERAL = 3  # fewest checkpoints whose mean answer is informative
FEWEST = 5  # fewest questions


@dataclass(frozen=True)
class Agreed:
    """A checkpoint's mean agreement over the questions, in [0, 1], and its standard error."""

    mean: float
    se: float


def answer_tokens(tasks: str) -> AnswerSet | UsageError:
    """The set with the answer tokens of the first task that has one; else why there is none."""
    _, known, refused = first_known(tasks)
    if known:
        return known
    reason = str(refused[0]).partition(";")[0]
    return UsageError(f"{reason}; name a file of `dispersion tokens` as the task")


def asking_tokens(kept: dict[str, Any], path: Path, tasks: str) -> More:
    """What adds the answer tokens' probabilities to the answers of the folder at ``path``.

    ``kept`` is what the folder's ``race.json`` says; the set is added to it.

    Raises:
        UsageError: The folder has answers by another set of answer tokens.
    """
    from lmeval_dispersion.racing.block import complete

    answers = answer_tokens(tasks)
    given = "" if isinstance(answers, UsageError) else hashed(repr(answers.answers))
    if kept.get("answers", given) != given:
        raise UsageError(
            f"{path} has answers by another set of answer tokens; name another folder",
            argument="tasks",
        )
    kept["answers"] = given
    return partial(complete, answers=answers)


def check_agreement(checkpoints: int, questions: int) -> None:
    """Raise UsageError for fewer than three checkpoints, or five questions of each."""
    if checkpoints < SEVERAL or questions < FEWEST:
        raise UsageError(
            f"expected {SEVERAL} or more checkpoints and {FEWEST} or more questions each, whose mean "
            f"answer says something, got {checkpoints} and {questions}",
            argument="budget",
        )


def agreed(evaluation: Evaluation, contest: Contest) -> dict[str, Agreed]:
    """The agreement of each checkpoint of a contest, by label, over the questions that all share.

    Raises:
        UsageError: Fewer than three checkpoints or five questions, or an answer without the tokens'
            probabilities.
    """
    labels = [label for label in contest.answered if label != contest.reference]
    count = min((len(contest.answered[label].score) for label in labels), default=0)
    check_agreement(len(labels), count)
    answers = [tokens_of(evaluation, label, contest.order(label)[:count]) for label in labels]
    return {
        label: Agreed(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(count))
        for label, values in zip(labels, agreement(answers), strict=True)
    }


def tokens_of(evaluation: Evaluation, label: str, places: NDArray[np.int64]) -> list[Array]:
    """A checkpoint's probabilities of the answer tokens, to the questions at ``places``.

    Raises:
        UsageError: A question was answered without them.
    """
    answers = list[Array]()
    for place in places:
        question = evaluation.questions[place]
        block = evaluation.blocks[label].get(question, {})
        if "tokens" not in block:
            before = "a race asked it without its answer tokens; name another folder"
            raise UsageError(
                "expected questions whose answers are tokens, got one of "
                f"{question[0]} without ({block.get('why', before)})",
                argument="answers",
            )
        answers.append(np.array(block["tokens"]))
    return answers


def agreement(answers: Sequence[Sequence[Array]]) -> list[Array]:
    """Each checkpoint's agreement with the mean answer, by question: sum over tokens of p · mean p.

    ``answers`` holds each checkpoint's probabilities of the answer tokens by question, as many of
    each.

    Raises:
        UsageError: The checkpoints have different answer tokens.
    """
    if len({tuple(map(len, each)) for each in answers}) > 1:
        raise UsageError(
            "expected checkpoints of one tokenizer, got some with other answer tokens; race them with "
            "labels",
            argument="answers",
        )
    means = [np.mean([p / p.sum() for p in each], axis=0) for each in zip(*answers, strict=True)]
    return [np.array([p @ mean for p, mean in zip(each, means, strict=True)]) for each in answers]
