"""One sanity pass over what runs logged: answers that cannot be a working model's.

Commands that read logs, races and audits share these definitions and sentences, so that one log is judged
alike by all of them. Sentences are clauses: a caller puts the run's name before them. numpy alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.statistics import wilson
from lmeval_dispersion.store.format import CORRECT_ABOVE

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

#: What to do about answers that are not finite, as the end of a sentence.
NOT_FINITE_ADVICE = "its weights may be damaged, or try model_args dtype=float32"
INVALID = "[invalid]"  # lm-eval's filters answer so where they match nothing

_ONE_ANSWER = 0.9  # share of the commonest answer above which a model counts as giving only one
_MOST = 0.5  # share of documents from which a doubt concerns the log rather than single documents
_FEWEST = 10  # fewest answers for a distribution of them
_FEWEST_ALIKE = 20  # fewest documents with equal log-probabilities in two runs, or equal scores
_SHOWN = 5  # most tasks that are named
_AGREE = 0.95  # share of the documents with one answer for which target and score must agree
_HALF_PRECISION = 0x1FFF  # bits of a float32 that float16 and bfloat16 lack


# --- answers that are not finite ---------------------------------------------------------------------------


def finite_answer(log_probabilities: Sequence[Sequence[float]]) -> Flags:
    """Whether each document's log-probabilities are an answer; shape (documents,).

    They are not where one is NaN or +inf, or where none is finite. -inf with a finite one is an answer of
    probability 0. A document without log-probabilities, such as a generation, cannot show it: True.

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
    """Whether a log has each document's score (n,): False where other documents of its task have one only.

    A task whose documents all lack a score has no metric of single documents, and says nothing.
    """
    known = np.isfinite(scores)
    scored = {tasks[row] for row in np.flatnonzero(known).tolist()}
    without_scores = np.array([task not in scored for task in tasks], dtype=bool)
    return np.asarray(known | without_scores)


def failure(log_probabilities: Sequence[Sequence[float]], scores: Array) -> str:
    """Why these answers (n,) to a race's questions fail their checkpoint; "" where all are finite."""
    answers = int((~finite_answer(log_probabilities)).sum())
    if answers:
        return not_finite_sentence(answers)
    answers = int((~np.isfinite(scores)).sum())
    if not answers:
        return ""
    questions = "1 question has" if answers == 1 else f"{answers:,} questions have"
    return f"{questions} no finite score; {NOT_FINITE_ADVICE}"


def not_finite_sentence(documents: int) -> str:
    """Why a checkpoint with ``documents`` > 0 answers that are not finite fails; lower case, no full stop.

    >>> not_finite_sentence(1)
    'the log-probabilities of 1 question are not finite; its weights may be damaged, or try model_args \
dtype=float32'
    """
    questions = "1 question" if documents == 1 else f"{documents:,} questions"
    return f"the log-probabilities of {questions} are not finite; {NOT_FINITE_ADVICE}"


class CountedAsWrong(NamedTuple):
    """A run's score as lm-eval gives it, and with the answers that are not finite counted as wrong."""

    documents: int
    not_finite: int
    score: float
    as_wrong: float

    def sentence(self) -> str:
        """The clause on a run with such answers."""
        number = f"{self.not_finite:,} of {self.documents:,}"
        if self.not_finite == self.documents:
            number = f"all {self.documents:,}"
        shares = "none of them has a score"
        if not math.isnan(self.score):
            both = f"{mean_text(self.score)} as lm-eval scored them, {mean_text(self.as_wrong)} with these"
            shares = f"{both} counted as wrong"
        return (
            f"the log-probabilities or scores of {number} documents are not finite: {shares}; "
            f"{NOT_FINITE_ADVICE}"
        )


def mean_text(score: float) -> str:
    """A mean score in a sentence: in per cent from 0 to 1, else as it is.

    >>> mean_text(0.833), mean_text(27.21)
    ('83.3 %', '27.21')
    """
    return f"{100 * score:.1f} %" if 0 <= score <= 1 else f"{score:.4g}"


def as_wrong(scores: Array, finite: Flags, lower_is_better: bool = False) -> Array:
    """The scores (n,), with 0 (or the lowest, if that is below 0) where not ``finite``.

    Of scores of which lower ones are better, with 1 or the highest. Documents without a score that count as
    finite, as those without a label do, stay NaN.
    """
    known = scores[np.isfinite(scores)]
    worst = known.max(initial=1.0) if lower_is_better else known.min(initial=0.0)
    return np.where(finite, scores, worst)


def counted_as_wrong(scores: Array, finite: Flags, lower_is_better: bool = False) -> CountedAsWrong:
    """Compare both ways to count; over the documents with a score, and those that are not finite."""
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
    """What one run logged of its documents (n each), as a store's columns hold it.

    ``predictions`` and ``targets`` are texts or None.
    """

    tasks: Sequence[str]

    log_probabilities: Sequence[Sequence[float]]
    predictions: Sequence[object]
    targets: Sequence[object]
    scores: Array

    def doubts(self) -> list[str]:
        """Clauses on answers that say more of the run's settings than of its model; [] for a sound log."""
        clauses = [*self._one_for_all(), *self._invalid()]
        answer = self.commonest()
        if answer.is_only_one:
            clauses.append(answer.clause())
        return clauses

    def remarks(self) -> list[str]:
        """Clauses on single tasks, and on scores that are all equal, which a model may have earned."""
        clauses = self.doubts_by_task()
        known = self.scores[np.isfinite(self.scores)]
        if len(known) >= _FEWEST_ALIKE and (known == known[0]).all():
            clauses.append(f"every one of {len(known):,} documents has the score {known[0]:g}")
        return clauses

    def doubts_by_task(self) -> list[str]:
        """Doubts about single tasks of several, the first tasks named; [] with doubts about all together."""
        rows = defaultdict[str, list[int]](list)
        for row, task in enumerate(self.tasks):
            rows[task].append(row)
        if len(rows) < 2 or self.doubts():
            return []
        clauses = list[str]()
        for task in sorted(rows):
            if len(rows[task]) >= _FEWEST_ALIKE:
                clauses += [f"in {task}: {clause}" for clause in self._at(rows[task]).doubts()]
        more = len(clauses) - _SHOWN
        if more > 0:
            clauses[_SHOWN:] = [f"the same of {more} more {'task' if more == 1 else 'tasks'}"]
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
        """Whether most documents have one log-probability for all choices, as where the server gives none."""
        return bool(list(self._one_for_all()))

    def commonest(self) -> CommonestAnswer:
        """The most frequent answer, by its words or by its place among the choices."""
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
        of_choices = right[[len(values) >= 2 for values in self.log_probabilities]]
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
        given = np.array([word == answer for word in self.predictions], dtype=bool)
        if not given.any() or (is_target[given] == right[given]).mean() < _AGREE:
            return math.nan
        return float(is_target.mean())

    def _one_for_all(self) -> Iterator[str]:
        documents = 0
        tied = 0
        zero = 0
        for _, values in by_length(self.log_probabilities):
            documents += len(values)
            same = (values == values[:, :1]).all(axis=1) & np.isfinite(values[:, 0])
            if values.shape[1] == 1:
                same &= values[:, 0] == 0
            tied += int(same.sum())
            zero += int((same & (values[:, 0] == 0)).sum())
        if documents >= _FEWEST and tied > _MOST * documents:
            number = " (0)" if zero == tied else ""
            yield (
                f"all choices have the same log-probability{number} in {tied:,} of {documents:,} documents: "
                "the server may not return log-probabilities (echo)"
            )

    def _invalid(self) -> Iterator[str]:
        texts = [word for word in self.predictions if isinstance(word, str)]
        invalid = texts.count(INVALID)
        if len(texts) >= _FEWEST and invalid > _MOST * len(texts):
            yield (
                f"{invalid:,} of {len(texts):,} answers are {INVALID}: the filter matched nothing in them; "
                "`--metric FILTER/METRIC` names another"
            )


@dataclass(frozen=True)
class CommonestAnswer:
    """The most frequent answer: its documents of those ``given``, and the accuracy of always giving it.

    ``answer`` is None without answers. ``accuracy_low`` is the lower Wilson bound of the run's own accuracy
    on documents with choices.
    """

    answer: str | None
    documents: int
    given: int
    accuracy: float
    accuracy_low: float

    @property
    def share(self) -> float:
        """Share of the answers; NaN without any."""
        return self.documents / self.given if self.given else math.nan

    @property
    def is_only_one(self) -> bool:
        """Whether nearly all answers are this one, and always giving it scores no less.

        One answer is fine if nearly all questions have it: if the model scores more than that.
        """
        is_better = self.accuracy_low > self.accuracy  # False for NaN
        return self.given >= _FEWEST and self.share >= _ONE_ANSWER and not is_better

    def clause(self) -> str:
        """The clause on a model that gives nearly always one answer."""
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
    """Labels whose numbers are equal to the last digit, in groups of two or more.

    ``probabilities`` are one number a document, the same documents in the same order: (documents,) by label.
    A label counts only with a number that is finite and neither 0 nor 1, which many models give.
    """
    groups: dict[bytes, list[str]] = {}
    for label, values in probabilities.items():
        telling = np.isfinite(values) & (values != 0) & (values != 1)
        if telling.any():
            groups.setdefault(values.tobytes(), []).append(label)
    return [labels for labels in groups.values() if len(labels) > 1]


@dataclass(frozen=True)
class Fingerprints:
    """Each document's log-probabilities as one number, to compare many runs (n each).

    ``telling`` documents have log-probabilities that are not all 0; in ``fine`` ones they have more digits
    than half precision.
    """

    codes: NDArray[np.int64]
    telling: Flags
    fine: Flags
    scores: Array

    @classmethod
    def of(cls, log_probabilities: Sequence[Sequence[float]], scores: Array) -> Fingerprints:
        """The fingerprints of n documents, with their scores (n,)."""
        count = len(log_probabilities)
        codes = np.zeros(count, dtype=np.int64)
        telling = np.zeros(count, dtype=bool)
        fine = np.zeros(count, dtype=bool)
        for rows, values in by_length(log_probabilities):
            codes[rows] = [hash(row.tobytes()) for row in values]
            telling[rows] = np.isfinite(values).any(axis=1) & (values != 0).any(axis=1)
            fine[rows] = _beyond_half_precision(values)
        return cls(codes, telling, fine, scores)

    def at(self, rows: NDArray[np.int64]) -> Fingerprints:
        """Those of some documents."""
        return Fingerprints(
            self.codes[rows], self.telling[rows], self.fine[rows], self.scores[rows]
        )


def equal_answers(first: Fingerprints, second: Fingerprints) -> tuple[int, int]:
    """Documents whose log-probabilities are equal to the last digit in two runs, and how many could be.

    Both runs have the same documents in the same order. (0, …) below twenty equal ones, or where equal ones
    have other scores, which then do not come from them. Where some differ, log-probabilities in half
    precision do not count: near models share those by chance.
    """
    telling = first.telling & second.telling
    equal = telling & (first.codes == second.codes)
    if not np.array_equal(first.scores[equal], second.scores[equal], equal_nan=True):
        return 0, int(telling.sum())
    counted = int(equal.sum())
    if (equal != telling).any():
        counted = int((equal & first.fine).sum())
    if counted < _FEWEST_ALIKE:
        counted = 0
    return counted, int(telling.sum())


def equal_answers_clause(equal: int, telling: int) -> str:
    """The clause on two runs of which :func:`equal_answers` gives ``equal`` > 0."""
    documents = f"all {telling:,}" if equal == telling else f"{equal:,} of {telling:,}"
    return (
        f"the log-probabilities of {documents} documents are equal to the last digit: copies, a shared cache "
        "(use_cache), an adapter that was not applied, or a server that answers unknown names with its "
        "default model"
    )


def renumbered(first: Mapping[tuple[str, int], str], second: Mapping[tuple[str, int], str]) -> int:
    """Number of documents that ``second`` holds under another number than ``first``.

    Each maps (task, number) to the document's hash. Documents whose hash repeats within a run do not count.
    """
    others = _unique(second)
    count = 0
    for key, number in _unique(first).items():
        count += others.get(key, number) != number
    return count


def renumbered_clause(documents: int) -> str:
    """The clause on a run with ``documents`` > 0 under other numbers than another run's."""
    return (
        f"{documents:,} documents have another number than in the first run, as lm-eval up to 0.4.13 gives "
        "them where `--samples` lists them unsorted (its issue 4084)"
    )


def _unique(hashes: Mapping[tuple[str, int], str]) -> dict[tuple[str, str], int]:
    """(task, hash) -> number, of the hashes that one document of the task has."""
    numbers = defaultdict[tuple[str, str], list[int]](list)
    for (task, number), text in hashes.items():
        numbers[task, text].append(number)
    return {key: known[0] for key, known in numbers.items() if len(known) == 1}


def _beyond_half_precision(values: Array) -> Flags:
    """Whether a row of log-probabilities (k, length) has one that half precision cannot hold; shape (k,)."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    return np.asarray((np.isfinite(values) & ((bits & _HALF_PRECISION) != 0)).any(axis=1))


def by_length(rows: Sequence[Sequence[float]]) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """The places and values of the rows of each length above 0: (k,), (k, length)."""
    lengths = np.array([len(values) for values in rows], dtype=np.int64)
    for length in np.unique(lengths[lengths > 0]):
        places = np.flatnonzero(lengths == length)
        yield places, np.array([rows[place] for place in places.tolist()], dtype=np.float64)
