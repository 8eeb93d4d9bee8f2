"""Checks of what runs logged, for answers that a working model does not give.

Commands that read logs, races and audits share these definitions and sentences, so that all of them
judge a log alike. The sentences are clauses: a caller puts the run's name before them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import count
from lmeval_dispersion.statistics import wilson
from lmeval_dispersion.store.format import CORRECT_ABOVE
from lmeval_dispersion.store.identity import SUFFIX

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: What to do about answers that are not finite, as the end of a sentence.
NOT_FINITE_ADVICE = (
    "check that the model's weights are not damaged, or try model_args dtype=float32"
)
INVALID = "[invalid]"  # lm-eval's filters answer so where they match nothing

_ONE_ANSWER = 0.9  # share of the commonest answer above which a model counts as giving only one
_MOST = 0.5  # share of documents from which a doubt concerns the log rather than single documents
_FEWEST = 10  # fewest answers for a distribution of them
_FEWEST_ALIKE = 20  # fewest documents with equal log-probabilities in two runs, or equal scores
_SHOWN = 5  # most doubts about single tasks that are shown
_AGREE = 0.95  # share of the documents with one answer for which target and score must agree
_HALF_PRECISION = 0x1FFF  # bits of a float32 that float16 and bfloat16 lack


# --- answers that are not finite ---------------------------------------------------------------------------


def finite_answer(log_probabilities: Sequence[Sequence[float]]) -> Flags:
    """Return for each document whether the log-probabilities of its choices are valid.

    They are invalid if one of them is NaN or +inf, or if none is finite. A choice of -inf next to a
    finite one has a probability of 0, which is valid. So is a document without log-probabilities,
    such as one with a generated answer. Shape (n,), bool.

    >>> nan, inf = float("nan"), float("inf")
    >>> finite_answer([[-1.0, -inf], [nan, -1.0], [inf, -1.0], [-inf, -inf], []]).tolist()
    [True, False, False, False, True]
    """
    answers = np.ones(len(log_probabilities), dtype=bool)
    for rows, values in by_length(log_probabilities):
        is_number = (values < np.inf).all(axis=1)  # NaN is not below infinity
        answers[rows] = is_number & np.isfinite(values).any(axis=1)
    return answers


def finite_score(scores: Array, tasks: Sequence[Hashable]) -> Flags:
    """Return for each document whether its score is finite, or missing for a reason.

    A score is missing for a reason if no document of the same task has one: then the task has no
    metric for single documents.

    Args:
        scores: Score of each document; NaN if missing. Shape (n,).
        tasks: Task of each document.

    Returns:
        Shape (n,), bool.
    """
    is_known = np.isfinite(scores)
    scored = {tasks[row] for row in np.flatnonzero(is_known).tolist()}
    is_without_scores = np.array([task not in scored for task in tasks], dtype=bool)
    return np.asarray(is_known | is_without_scores)


def failure(log_probabilities: Sequence[Sequence[float]], scores: Array) -> str:
    """Return the reason to drop a checkpoint whose answers are not all finite; "" if they are.

    The reason is a clause that follows the checkpoint's name and a colon.

    Args:
        log_probabilities: Log-probabilities of the choices of each question.
        scores: Score of each question. Shape (n,).
    """
    is_answer = finite_answer(log_probabilities)
    if not is_answer.all():
        return not_finite_sentence(int((~is_answer).sum()))
    is_score = np.isfinite(scores)
    if is_score.all():
        return ""
    questions = count(int((~is_score).sum()), "question has", "questions have")
    return f"{questions} no finite score; {NOT_FINITE_ADVICE}"


def not_finite_sentence(documents: int) -> str:
    """Return the reason to drop a checkpoint with log-probabilities that are not finite.

    The reason is a clause that follows the checkpoint's name and a colon. ``documents`` is the
    number of questions with such log-probabilities.

    >>> not_finite_sentence(1)
    "the log-probabilities of 1 question are not finite; check that the model's weights are not \
damaged, or try model_args dtype=float32"
    """
    questions = count(documents, "question")
    return f"the log-probabilities of {questions} are not finite; {NOT_FINITE_ADVICE}"


class CountedAsWrong(NamedTuple):
    """A run's mean score, and what it would be with answers that are not finite counted as wrong.

    Attributes:
        documents: Number of documents with a score, or counted in ``not_finite``.
        not_finite: Number of documents whose log-probabilities or score are not finite.
        score: Mean score as lm-eval gives it; NaN if no document has a score.
        as_wrong: Mean score with the documents of ``not_finite`` counted as wrong.
    """

    documents: int
    not_finite: int
    score: float
    as_wrong: float

    def sentence(self) -> str:
        """Return a clause with both scores and what to do; ``not_finite`` must not be 0.

        If no document has a score, the clause says so in place of the scores.
        """
        number = f"{self.not_finite:,} of {self.documents:,}"
        if self.not_finite == self.documents:
            number = f"all {self.documents:,}"
        shares = "none of them has a score"
        if not math.isnan(self.score):
            shares = (
                f"the mean score is {mean_text(self.score)} as lm-eval gives it, and "
                f"{mean_text(self.as_wrong)} with these documents counted as wrong"
            )
        return (
            f"the log-probabilities or scores of {number} documents are not finite: {shares}; "
            f"{NOT_FINITE_ADVICE}"
        )


def mean_text(score: float) -> str:
    """Return a mean score as text: in per cent if it is from 0 to 1, and as a number otherwise.

    >>> mean_text(0.833), mean_text(27.21)
    ('83.3 %', '27.21')
    """
    return f"{100 * score:.1f} %" if 0 <= score <= 1 else f"{score:.4g}"


def as_wrong(scores: Array, finite: Flags, lower_is_better: bool = False) -> Array:
    """Return the scores, with those where ``finite`` is False counted as wrong. Shape (n,), float64.

    A wrong answer has the score 0, or the lowest score if that is below 0. If lower scores are
    better, it has the score 1, or the highest if that is above 1. A score of NaN stays NaN where
    ``finite`` is True: such a document has no score.

    Args:
        scores: Score of each document; NaN for a document without a score. Shape (n,).
        finite: Whether each document's answer is finite; also True for a document that merely has
            no score. Shape (n,).
        lower_is_better: Whether lower scores are better.
    """
    known = scores[np.isfinite(scores)]
    worst = known.max(initial=1.0) if lower_is_better else known.min(initial=0.0)
    return np.where(finite, scores, worst)


def counted_as_wrong(scores: Array, finite: Flags, lower_is_better: bool = False) -> CountedAsWrong:
    """Return a run's mean score as it is, and with non-finite answers counted as wrong.

    Documents without a score are not counted if ``finite`` is True for them. The arguments are
    those of :func:`as_wrong`.
    """
    counted = as_wrong(scores, finite, lower_is_better)
    return CountedAsWrong(
        documents=int(np.isfinite(counted).sum()),
        not_finite=int((~finite).sum()),
        score=_finite_mean(scores),
        as_wrong=_finite_mean(counted),
    )


def _finite_mean(scores: Array) -> float:
    """The mean of the finite scores (n,); NaN without any."""
    finite = scores[np.isfinite(scores)]
    return float(finite.mean()) if len(finite) else math.nan


# --- one run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logged:
    """What a run logged about its n documents.

    Attributes:
        tasks: Task of each document.
        log_probabilities: Log-probabilities of each document's choices; empty for a generated
            answer.
        predictions: Text of the model's answer to each document; None if unknown.
        targets: Text of each document's right answer; None if unknown.
        scores: Score of each document; NaN if unknown. Shape (n,).
    """

    tasks: Sequence[str]

    log_probabilities: Sequence[Sequence[float]]
    predictions: Sequence[object]
    targets: Sequence[object]
    scores: Array

    @classmethod
    def of(cls, documents: pd.DataFrame, scores: Array) -> Logged:
        """Return what a run logged about n documents of its store, with their ``scores`` (n,)."""
        return cls(
            tasks=documents["task"].tolist(),
            log_probabilities=documents["logprobs"].tolist(),
            predictions=documents["prediction"].tolist(),
            targets=documents["target"].tolist(),
            scores=scores,
        )

    def doubts(self) -> list[str]:
        """Return clauses on answers that suggest a mistake in the run rather than a weak model.

        The list is empty if no answers suggest this.
        """
        clauses = [*self._one_for_all(), *self._invalid()]
        answer = self.commonest()
        if answer.is_only_one:
            clauses.append(answer.clause())
        return clauses

    def remarks(self) -> list[str]:
        """Return the clauses of :meth:`doubts_by_task`, and one more if 20 or more scores are all equal.

        Equal scores are not among :meth:`doubts`, since a good model may have them.
        """
        clauses = self.doubts_by_task()
        known = self.scores[np.isfinite(self.scores)]
        if len(known) >= _FEWEST_ALIKE and (known == known[0]).all():
            clauses.append(
                f"every one of {len(known):,} documents has the score {known[0]:g}; read some answers "
                "to check that they are scored as intended"
            )
        return clauses

    def doubts_by_task(self) -> list[str]:
        """Return clauses on doubts about single tasks: five at most, then the number not shown.

        Tasks of fewer than twenty documents are not looked at. The list is empty if the run has
        only one task, or if there are doubts about the whole run.
        """
        rows = defaultdict[str, list[int]](list)
        for row, task in enumerate(self.tasks):
            rows[task].append(row)
        if len(rows) < 2 or self.doubts():
            return []
        clauses = list[str]()
        for task in sorted(rows):
            if len(rows[task]) < _FEWEST_ALIKE:
                continue
            for clause in self._at(rows[task]).doubts():
                clauses.append(f"in {task}: {clause}")
        more = len(clauses) - _SHOWN
        if more > 0:
            doubts = count(more, "more doubt")
            verb = "is" if more == 1 else "are"
            clauses[_SHOWN:] = [f"{doubts} about single tasks {verb} not shown"]
        return clauses

    def _at(self, rows: Sequence[int]) -> Logged:
        return Logged(
            tasks=[self.tasks[row] for row in rows],
            log_probabilities=[self.log_probabilities[row] for row in rows],
            predictions=[self.predictions[row] for row in rows],
            targets=[self.targets[row] for row in rows],
            scores=self.scores[rows],
        )

    @property
    def tied(self) -> bool:
        """Whether most of ten or more documents have the same log-probability for all choices.

        This happens if a server returns no log-probabilities. A document with a single choice
        counts as such if its log-probability is 0.
        """
        return bool(list(self._one_for_all()))

    def commonest(self) -> CommonestAnswer:
        """Return the most frequent answer: a text, or a position such as ``choice 1``."""
        finite = finite_answer(self.log_probabilities)
        words = Counter[str]()
        for row in np.flatnonzero(finite).tolist():
            word = self.predictions[row]
            if isinstance(word, str):
                words[word] += 1
        places = Counter[str]()
        for rows, values in by_length(self.log_probabilities):
            if values.shape[1] > 1:
                likeliest = values[finite[rows]].argmax(axis=1)
                places.update(f"choice {place + 1}" for place in likeliest.tolist())
        answer, count, given = max(
            (_most_frequent(words), _most_frequent(places)),
            key=lambda most: most[1] / most[2] if most[2] else 0.0,
        )
        right = self.scores > CORRECT_ABOVE
        has_choices = [len(values) >= 2 for values in self.log_probabilities]
        of_choices = right[has_choices]
        accuracy = float(of_choices.mean()) if len(of_choices) else math.nan
        return CommonestAnswer(
            answer=answer,
            documents=count,
            given=given,
            accuracy=self._score_of(answer, right),
            accuracy_low=wilson(accuracy, len(of_choices)).low,
        )

    def _score_of(self, answer: str | None, right: Flags) -> float:
        """The accuracy of always giving this answer; NaN if targets are unknown."""
        is_target = np.array([target == answer for target in self.targets], dtype=bool)
        is_given = np.array([word == answer for word in self.predictions], dtype=bool)
        if not is_given.any():
            return math.nan
        agreeing = is_target[is_given] == right[is_given]
        if agreeing.mean() < _AGREE:
            return math.nan
        return float(is_target.mean())

    def _one_for_all(self) -> Iterator[str]:
        documents = 0
        tied = 0
        zero = 0
        for _, values in by_length(self.log_probabilities):
            documents += len(values)
            first = values[:, 0]
            is_zero = first == 0
            same = (values == values[:, :1]).all(axis=1) & np.isfinite(first)
            if values.shape[1] == 1:
                same &= is_zero
            tied += int(same.sum())
            zero += int((same & is_zero).sum())
        if documents >= _FEWEST and tied > _MOST * documents:
            number = " (0)" if zero == tied else ""
            yield (
                f"all choices have the same log-probability{number} in {tied:,} of {documents:,} documents: "
                "if a server answered, check that it returns log-probabilities of the prompt (echo)"
            )

    def _invalid(self) -> Iterator[str]:
        texts = [word for word in self.predictions if isinstance(word, str)]
        invalid = texts.count(INVALID)
        if len(texts) >= _FEWEST and invalid > _MOST * len(texts):
            yield (
                f"{invalid:,} of {len(texts):,} answers are {INVALID}: the filter matched nothing in them; "
                "`--metric FILTER/METRIC` names another filter"
            )


@dataclass(frozen=True)
class CommonestAnswer:
    """The answer that a model gives most often.

    Attributes:
        answer: The answer; None if there are no answers.
        documents: Number of documents with this answer.
        given: Number of documents with any answer of this kind (a text, or a choice).
        accuracy: Accuracy of a model that always gives this answer; NaN if the targets are unknown,
            or do not explain the scores of this answer.
        accuracy_low: Lower end of the Wilson interval of the run's own accuracy, over documents
            with choices; NaN without any.
    """

    answer: str | None
    documents: int
    given: int
    accuracy: float
    accuracy_low: float

    @property
    def share(self) -> float:
        """Share of the ``given`` answers that are this answer; NaN if ``given`` is 0."""
        return self.documents / self.given if self.given else math.nan

    @property
    def is_only_one(self) -> bool:
        """Whether the model gives hardly any other answer.

        At least 90 % of ten or more answers have to be this answer, and the run must not be clearly
        more accurate than always giving it.
        """
        is_better = self.accuracy_low > self.accuracy  # False for NaN
        return self.given >= _FEWEST and self.share >= _ONE_ANSWER and not is_better

    def clause(self) -> str:
        """Return a clause that says how often the model gives this answer."""
        percent = round(100 * self.share)
        if self.share < 1:
            percent = min(percent, 99)
        return (
            f"answers {self.answer} in {percent} % of cases ({self.documents:,} of {self.given:,})"
        )


def _most_frequent(answers: Counter[str]) -> tuple[str | None, int, int]:
    """The most frequent answer, its count, and the number of answers."""
    if not answers:
        return None, 0, 0
    answer, count = min(answers.items(), key=lambda item: (-item[1], item[0]))
    return answer, count, answers.total()


# --- runs with one another ---------------------------------------------------------------------------------


def alike(probabilities: Mapping[str, Array]) -> list[list[str]]:
    """Return the labels whose numbers are equal to the last digit, in groups of two or more.

    Args:
        probabilities: Label -> one number for each of the n documents, in the same order for all
            labels. Shape (n,). A label counts only if one of its numbers is finite and neither 0
            nor 1, since many models give these.
    """
    groups: dict[bytes, list[str]] = {}
    for label, values in probabilities.items():
        telling = np.isfinite(values) & (values != 0) & (values != 1)
        if telling.any():
            groups.setdefault(values.tobytes(), []).append(label)
    return [labels for labels in groups.values() if len(labels) > 1]


@dataclass(frozen=True)
class Fingerprints:
    """The log-probabilities of each of n documents as one number, to compare many runs.

    Attributes:
        codes: Hash of each document's log-probabilities; 0 without any. Shape (n,), int64.
        telling: Whether a document's log-probabilities can be compared: at least one is finite, and
            at least one is not 0. Shape (n,), bool.
        fine: Whether a document's log-probabilities have more digits than half precision can hold.
            Shape (n,), bool.
        scores: Score of each document. Shape (n,), float64.
    """

    codes: NDArray[np.int64]
    telling: Flags
    fine: Flags
    scores: Array

    @classmethod
    def of(cls, log_probabilities: Sequence[Sequence[float]], scores: Array) -> Fingerprints:
        """Return the fingerprints of n documents.

        Args:
            log_probabilities: Log-probabilities of the choices of each document.
            scores: Score of each document. Shape (n,).
        """
        count = len(log_probabilities)
        codes = np.zeros(count, dtype=np.int64)
        telling = np.zeros(count, dtype=bool)
        fine = np.zeros(count, dtype=bool)
        for rows, values in by_length(log_probabilities):
            codes[rows] = [hash(row.tobytes()) for row in values]
            is_finite = np.isfinite(values).any(axis=1)
            is_other_than_zero = (values != 0).any(axis=1)
            telling[rows] = is_finite & is_other_than_zero
            fine[rows] = _beyond_half_precision(values)
        return cls(codes, telling, fine, scores)


def equal_answers(first: Fingerprints, second: Fingerprints) -> tuple[int, int]:
    """Count the documents with equal log-probabilities in two runs, and all that were compared.

    Log-probabilities are equal if all their digits are. If some documents differ, those in half
    precision do not count as equal, since similar models share them by chance. Documents whose
    log-probabilities are missing or all 0 are not compared.

    Args:
        first: Fingerprints of one run.
        second: Fingerprints of the other run, for the same documents in the same order.

    Returns:
        The number of documents with equal log-probabilities, and the number compared. The first is
        0 if it would be below twenty, or if documents with equal log-probabilities have different
        scores, so that the scores do not come from them.
    """
    telling = first.telling & second.telling
    compared = int(telling.sum())
    equal = telling & (first.codes == second.codes)
    if not np.array_equal(first.scores[equal], second.scores[equal], equal_nan=True):
        return 0, compared
    if (equal != telling).any():
        equal &= first.fine
    count = int(equal.sum())
    if count < _FEWEST_ALIKE:
        count = 0
    return count, compared


def pair_doubts(runs: Sequence[tuple[str, Fingerprints, pd.DataFrame]]) -> Iterator[str]:
    """Yield sentences on doubts about several runs, each compared with the others.

    Args:
        runs: For each run its name, the fingerprints of the documents that all runs share (in one
            order), and all its documents.
    """
    for (one, first, _), (other, second, _) in combinations(runs, 2):
        equal, telling = equal_answers(first, second)
        if equal:
            documents = f"all {telling:,}" if equal == telling else f"{equal:,} of {telling:,}"
            yield (
                f"{one} and {other}: the log-probabilities of {documents} documents are equal to "
                "the last digit: the models are copies or share a cache (use_cache), an adapter "
                "was not applied, or a server answers unknown names with its default model."
            )
    for name, _, documents_of_run in runs[1:]:
        count = renumbered(runs[0][2], documents_of_run)
        if count:
            have = f"{count:,} documents have different numbers"
            if count == 1:
                have = "1 document has a different number"
            yield (
                f"{name}: {have} than in the first run, because lm-eval up to 0.4.13 numbers "
                "documents wrongly where `--samples` lists them unsorted (its issue 4084)."
            )


def renumbered(first: pd.DataFrame, second: pd.DataFrame) -> int:
    """Return how many documents have different numbers in two runs, given the runs' documents.

    Documents are recognised by their hash; hashes that several documents of a task have are left
    out.
    """
    key = ["task", "doc_hash"]
    both = _with_own_hash(first).merge(_with_own_hash(second), on=key)
    return int((both["doc_id_x"] != both["doc_id_y"]).sum())


def _with_own_hash(documents: pd.DataFrame) -> pd.DataFrame:
    """Task, number and hash of the documents whose hash no other document of the task has."""
    hashes = documents[["task", "doc_id", "doc_hash"]].dropna()
    hashes = hashes.assign(task=hashes["task"].str.removesuffix(SUFFIX))
    # A run may have a task and its dispersion task: they hold the same documents.
    hashes = hashes.drop_duplicates(["task", "doc_id"], keep="last")
    return hashes.drop_duplicates(["task", "doc_hash"], keep=False)


def _beyond_half_precision(values: Array) -> Flags:
    """Whether a row of log-probabilities (k, length) has one that half precision cannot hold; shape (k,)."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    is_beyond = (bits & _HALF_PRECISION) != 0
    return np.asarray((is_beyond & np.isfinite(values)).any(axis=1))


def by_length(rows: Sequence[Sequence[float]]) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """Yield rows grouped by length, for each length above 0: the rows' indices and values.

    The indices have shape (k,), int64, and the values shape (k, length), float64.
    """
    lengths = np.array([len(values) for values in rows], dtype=np.int64)
    for length in np.unique(lengths[lengths > 0]):
        places = np.flatnonzero(lengths == length)
        values = [rows[place] for place in places.tolist()]
        yield places, np.array(values, dtype=np.float64)
