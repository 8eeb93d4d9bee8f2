"""Scores of models on the same documents: the paired difference of two models, the best of several.

Answers that are not finite keep lm-eval's score, and are also counted as wrong: where the two ways
give different verdicts, no verdict is given. Needs numpy alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np

from lmeval_dispersion.errors import HarnessError, MixedStoresError, UsageError, count
from lmeval_dispersion.report import Col
from lmeval_dispersion.report.declared import listed
from lmeval_dispersion.statistics import (
    UNDEFINED,
    Array,
    Interval,
    clearly_worse,
    mcnemar_p,
    paired_bounds,
    paired_share_bounds,
)
from lmeval_dispersion.store.documents import Sample
from lmeval_dispersion.store.groups import TaskGroup, document_weights, units_of
from lmeval_dispersion.store.samples import read_scores
from lmeval_dispersion.store.sanity import Flags, as_wrong, mean_text

if TYPE_CHECKING:
    from lmeval_dispersion.auditing.run import AuditRun, Rows

_EQUAL = 1e-9  # relative difference of weights that is rounding
FEWEST = 5  # fewest shared documents for an interval: below, neither test can be significant


@dataclass(frozen=True)
class PairedScores:
    """Two models' scores on the documents that both answered; NaN where undefined.

    Attributes:
        documents: Number of shared documents.
        first: The first model's mean score.
        second: The second model's mean score.
        difference: ``second - first``.
        low: Lower end of the 95 % interval of ``difference``; NaN below five documents.
        high: Upper end of that interval.
        p: p-value of ``difference``: by McNemar's exact test, or by a paired t-test if ``gained``
            is None.
        gained: Number of documents that only the second model answers right; None if a score is
            neither 0 nor 1, or if documents have different weights.
        lost: Number of documents that only the first model answers right; None if ``gained`` is
            None.
        metric: The metric that was compared, such as ``acc``.
        left_out: For the first and the second run, the number of its documents that the other run
            does not have with the same target and prompt.
        not_finite: Number of documents with a log-probability or score that is not finite, in at
            least one run.
        changes: Whether the verdict changes if the documents of ``not_finite`` count as wrong.
        other_prompts: Number of documents that both runs have, but with different prompts; they
            count in both numbers of ``left_out``.
    """

    documents: int
    first: float
    second: float
    difference: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    gained: int | None = None
    lost: int | None = None
    metric: str = ""
    left_out: tuple[int, int] = (0, 0)
    not_finite: int = 0
    changes: bool = False
    other_prompts: int = 0

    @property
    def side(self) -> int:
        """1 if the interval of ``difference`` is above 0, -1 if it is below 0, else 0."""
        return Interval(self.difference, self.low, self.high).side(0)


def paired_scores(x: Array, y: Array, *, weights: Array | None = None) -> PairedScores:
    """Compare two models' scores ``x`` and ``y`` on the same n > 0 documents, (n,) each.

    ``weights`` (n,) are the documents' weights in the means; by default all are equal.
    """
    n = len(x)
    changes = y - x
    if weights is not None and np.ptp(weights) <= _EQUAL * weights.max():
        weights = None
    gained = None
    lost = None
    if weights is None and np.isin([x, y], (0.0, 1.0)).all():
        gained = int((changes > 0).sum())
        lost = int((changes < 0).sum())
    low, high = UNDEFINED
    p = math.nan
    if n >= FEWEST and gained is not None and lost is not None:
        low, high = paired_share_bounds(gained, lost, n)
        p = mcnemar_p(gained, lost)
    elif n >= FEWEST:
        low, high, p = paired_bounds(changes, weights, span=_span(x, y))
    return PairedScores(
        documents=n,
        first=float(np.average(x, weights=weights)),
        second=float(np.average(y, weights=weights)),
        difference=float(np.average(changes, weights=weights)),
        low=low,
        high=high,
        p=p,
        gained=gained,
        lost=lost,
    )


def _span(x: Array, y: Array) -> float:
    """How far apart two scores can lie: 1 for scores from 0 to 1, else as far as they do here."""
    lowest = min(x.min(), y.min())
    highest = max(x.max(), y.max())
    if lowest >= 0 and highest <= 1:
        return 1.0
    return float(highest - lowest) or 1.0


class SharedAnswers(NamedTuple):
    """One run's answers to the n documents that are compared.

    Attributes:
        score: Scores, shape (n,); NaN where a document has no score.
        finite: Whether each answer is finite, shape (n,): its log-probabilities, and for samples
            and logs also its score.
        lower_is_better: Whether lower scores are better, according to lm-eval's results.
    """

    score: Array
    finite: Flags
    lower_is_better: bool = False

    @classmethod
    def of(cls, run: AuditRun, rows: Rows) -> SharedAnswers:
        """Return a run's answers to the documents with the row numbers ``rows``."""
        return cls(run.score[rows], run.finite[rows], run.lower_is_better)

    def at(self, rows: Rows) -> SharedAnswers:
        """Return the answers to the documents at the positions ``rows``, from 0 to n - 1."""
        return SharedAnswers(self.score[rows], self.finite[rows], self.lower_is_better)


@dataclass(frozen=True)
class TaskMean:
    """The mean over the tasks of n documents, in which a group of lm-eval counts as one task.

    Attributes:
        tasks: The task of each of the n documents.
        groups: lm-eval's groups by name; each counts as one task.
    """

    tasks: Sequence[str]
    groups: Mapping[str, TaskGroup]

    def __str__(self) -> str:
        units = units_of(self.tasks, self.groups)
        if len(units) == 1:
            return f"mean of {next(iter(units))}"
        grouped = f" ({listed(list(self.groups))} as one)" if len(self.groups) == 1 else ""
        return f"mean over {count(len(units), 'task')}{grouped}"

    def weights(self, rows: Rows) -> Array:
        """Return the weights of the documents ``rows`` in the mean over tasks; their sum is 1."""
        return document_weights([self.tasks[row] for row in rows.tolist()], self.groups)

    def notes(self) -> list[str]:
        """Return a sentence for each group on how its tasks are weighted."""
        notes = []
        for name, group in self.groups.items():
            members = count(len(set(self.tasks) & set(group["tasks"])), "task")
            weights = (
                "weighted by number of documents" if group["by_size"] else "with equal weights"
            )
            notes.append(
                f"In the mean over tasks, the group {name} counts as one task, the mean of its "
                f"{members} ({weights}), as in lm-eval's own figure."
            )
        return notes


@dataclass(frozen=True)
class PairVerdict:
    """Two runs compared by lm-eval's scores, and with answers that are not finite counted as wrong.

    Attributes:
        logged: The comparison by lm-eval's scores.
        as_wrong: The comparison with the documents of ``not_finite`` counted as wrong; None if
            there are none.
        not_finite: Number of documents with a log-probability or score that is not finite, in at
            least one run.
    """

    logged: PairedScores
    as_wrong: PairedScores | None
    not_finite: int

    @property
    def changes(self) -> bool:
        """Whether the two comparisons disagree on which run is clearly better, if any."""
        return self.as_wrong is not None and self.as_wrong.side != self.logged.side

    @property
    def p(self) -> float:
        """The larger p-value of the two comparisons; 1 if their verdicts differ."""
        if self.as_wrong is None:
            return self.logged.p
        return 1.0 if self.changes else float(np.fmax(self.logged.p, self.as_wrong.p))


def verdict_of(
    first: SharedAnswers, second: SharedAnswers, mean: TaskMean | None = None
) -> PairVerdict | None:
    """Compare two runs by their mean scores on the same documents.

    Documents have equal weights, or those of the ``mean`` over tasks if it is given. Returns None
    if no document has a finite score in both runs.
    """

    def compared(x: Array, y: Array) -> PairedScores:
        rows = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        weights = None if mean is None else mean.weights(rows)
        return paired_scores(x[rows], y[rows], weights=weights)

    if not np.isfinite(first.score + second.score).any():
        return None
    logged = compared(first.score, second.score)
    finite = first.finite & second.finite
    if finite.all():
        return PairVerdict(logged, None, 0)
    counted = compared(as_wrong(*first), as_wrong(*second))
    return PairVerdict(logged, counted, int((~finite).sum()))


@dataclass(frozen=True)
class Best:
    """Which of three or more runs are shown to be worse than the best, and which are not.

    Attributes:
        highest: The run with the highest mean score, or all runs that share it.
        score: The highest mean score.
        not_worse: Runs that no other run clearly beats, the highest score first.
        worse: Runs that another run clearly beats, the highest score first.
        left_out: Runs that were not compared, as they gave no usable answers.
        pairs: Number of pairs of runs that were tested.
        over: The mean that was compared, such as ``mean over 3 tasks``; "" for the mean over all
            documents.
    """

    highest: Sequence[str]
    score: Annotated[float, Col("Score", ".1%")]
    not_worse: Sequence[str]
    worse: Sequence[str]
    left_out: Sequence[str]
    pairs: int
    over: str = ""

    def sentence(self) -> str:
        """Return a sentence that names the runs that are not shown to be worse than the best."""
        details = [self.over] if self.over else []
        details.append(f"{count(self.pairs, 'pair')} tested with Holm's correction at 5 %")
        if self.left_out:
            details.append(f"without {listed(self.left_out)}")
        test = "; ".join(details)
        best = f"{listed(self.highest)} ({mean_text(self.score)}, the highest)"
        if not self.worse:
            beats = "does not clearly beat" if len(self.highest) == 1 else "do not clearly beat"
            return f"No run is shown to be worse than the best: {best} {beats} any other ({test})."
        if len(self.not_worse) == 1:
            return f"All other runs are shown to be worse than the best: {best} ({test})."
        others = [best, *(name for name in self.not_worse if name not in self.highest)]
        worse = listed(self.worse)
        return (
            f"Any of these may be the best: {listed(others)}; shown to be worse: {worse} ({test})."
        )


def best_of(
    answers: Mapping[str, SharedAnswers],
    left_out: Sequence[str] = (),
    mean: TaskMean | None = None,
) -> Best | None:
    """Find the runs that are not shown to be worse than the best.

    All pairs of runs are tested, with Holm's correction. Returns None if fewer than three runs
    remain, or if a pair cannot be tested.

    Args:
        answers: Name of each run -> its answers to the same documents.
        left_out: Names of runs that are not compared.
        mean: Weights the documents as in the mean over tasks; None for equal weights.
    """
    names = [name for name in answers if name not in left_out]
    if len(names) < 3:
        return None
    tests = dict[tuple[str, str], tuple[float, float]]()
    scores = dict[str, float]()
    for one, other in combinations(names, 2):
        verdict = verdict_of(answers[one], answers[other], mean)
        if verdict is None or np.isnan(verdict.p):
            return None
        tests[one, other] = (verdict.logged.difference, verdict.p)
        scores.setdefault(one, verdict.logged.first)
        scores.setdefault(other, verdict.logged.second)
    losers = clearly_worse(tests)
    ordered = sorted(names, key=lambda name: -scores[name])
    highest = scores[ordered[0]]
    return Best(
        highest=[name for name in ordered if scores[name] == highest],
        score=highest,
        not_worse=[name for name in ordered if name not in losers],
        worse=[name for name in ordered if name in losers],
        left_out=list(left_out),
        pairs=len(tests),
        over=str(mean) if mean else "",
    )


def compare_samples(
    first: str | Path, second: str | Path, *, metric: str | None = None
) -> PairedScores:
    """Compare two runs of lm-eval on one task by their samples, as ``dispersion compare`` does.

    Needs numpy alone, and no results file.

    Args:
        first: The baseline's samples (``lm_eval --log_samples``), or its folder with one task.
        second: The other run's samples or folder.
        metric: ``METRIC`` or ``FILTER/METRIC``. By default the first filter is taken, and of its
            metrics the first of ``acc``, ``exact_match`` and so on (``docs/reference/audit.md``).

    Raises:
        HarnessError: A file does not exist, is cut off, or has no such metric; or no document has a
            finite score in both.
        MixedStoresError: The files share no document with the same target and prompt.
        UsageError: A score is not from 0 to 1.
    """
    name, a = read_scores(first, metric)
    _, b = read_scores(second, name)
    pairs, other_prompts = _paired(first, a, second, b)
    x = np.array([a[i].correct for i, _ in pairs])
    y = np.array([b[j].correct for _, j in pairs])
    verdict = verdict_of(SharedAnswers(x, np.isfinite(x)), SharedAnswers(y, np.isfinite(y)))
    if verdict is None:
        raise HarnessError(
            f"no document has a finite {name} in both {first} and {second}; run lm-eval again, "
            "with `dtype=float32` in `--model_args` if a model gives NaN"
        )
    scores = np.concatenate([x, y])
    scores = scores[np.isfinite(scores)]
    if scores.min() < 0 or scores.max() > 1:
        raise UsageError(
            f"expected scores from 0 to 1, got {name} scores from {scores.min():g} to "
            f"{scores.max():g}; name another metric",
            argument="metric",
        )
    return replace(
        verdict.logged,
        metric=name,
        left_out=(len(a) - len(pairs), len(b) - len(pairs)),
        not_finite=verdict.not_finite,
        changes=verdict.changes,
        other_prompts=other_prompts,
    )


def _paired(
    first: str | Path, a: Mapping[int, Sample], second: str | Path, b: Mapping[int, Sample]
) -> tuple[list[tuple[int, int]], int]:
    """The numbers of each shared document in both runs, and how many had another prompt and are left out.

    A document is known by its hash; where that repeats, by its number too.
    """
    times = [Counter(sample.columns["doc_hash"] for sample in run.values()) for run in (a, b)]

    def key(sample: Sample) -> tuple[str, int]:
        doc_hash = sample.columns["doc_hash"]
        is_one = all(counts[doc_hash] < 2 for counts in times)
        return doc_hash, -1 if is_one else sample.doc_id

    numbers = {key(sample): j for j, sample in b.items()}
    shared = []
    alike = []
    for i, sample in sorted(a.items()):
        j = numbers.get(key(sample))
        if j is None or sample.columns["target"] != b[j].columns["target"]:
            continue
        shared.append((i, j))
        if sample.columns["prompt_hash"] == b[j].columns["prompt_hash"]:
            alike.append((i, j))
    ids = a.keys() & b.keys()
    if not shared and ids:
        raise MixedStoresError(
            f"{first} and {second} differ in the documents or targets of "
            f"{count(len(ids), 'shared id')} (such as {min(ids)}); compare runs on the same "
            "version of the data"
        )
    if not shared:
        raise MixedStoresError(
            f"{first} and {second} share no document; name two runs' samples of the same task"
        )
    if not alike:
        raise MixedStoresError(
            f"{first} and {second} asked their {count(len(shared), 'shared document')} in "
            "different prompts; compare runs with the same prompt (if chat templates differ, give "
            "the runs' folders to `dispersion compare`)"
        )
    return alike, len(shared) - len(alike)
