"""Two models' scores on the same documents: the paired difference and its test, with numpy alone.

Answers that are not finite keep lm-eval's score and are counted as wrong, too: verdicts that differ are none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lmeval_dispersion.errors import HarnessError, MixedStoresError, UsageError
from lmeval_dispersion.statistics import (
    UNDEFINED,
    Array,
    Interval,
    mcnemar_p,
    paired_bounds,
    paired_share_bounds,
)
from lmeval_dispersion.store.documents import Sample
from lmeval_dispersion.store.groups import TaskGroup, document_weights
from lmeval_dispersion.store.samples import read_scores
from lmeval_dispersion.store.sanity import Flags, as_wrong

if TYPE_CHECKING:
    from lmeval_dispersion.auditing.run import AuditRun, Rows

_EQUAL = 1e-9  # relative difference of weights that is rounding
FEWEST = 5  # fewest shared documents for an interval: below, neither test can be significant


@dataclass(frozen=True)
class PairedScores:
    """Two models' scores on the documents that both answered; NaN where undefined.

    Attributes:
        documents: Number of shared documents.
        first, second: Mean scores.
        difference: ``second - first``, with its 95 % interval ``low`` to ``high``.
        p: McNemar's exact p for right and wrong answers, else the interval's.
        gained, lost: Documents that only the second, or only the first, answers right; None for other scores.
        metric: The metric that was compared, such as ``acc``.
        left_out: Documents of the first and of the second without a comparable one in the other.
        not_finite: Documents left out as one of the models has no finite score for them.
        changes: Whether the verdict changes where those count as wrong.
        other_prompts: How many documents in ``left_out`` had another prompt.
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
        """1 or -1 where the interval leaves out 0, else 0."""
        return Interval(self.difference, self.low, self.high).side(0)


def paired_scores(x: Array, y: Array, *, weights: Array | None = None) -> PairedScores:
    """Compare two models' scores ``x`` and ``y`` on the same n > 0 documents, (n,) each.

    ``weights`` (n,) are the documents' weights in the means; default: equal.
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
    """One run's scores of the shared documents (n,), NaN without one, and which answers are finite (n,).

    ``lower_is_better``: whether lower scores are the better ones, by lm-eval's results.
    """

    score: Array
    finite: Flags
    lower_is_better: bool = False

    @classmethod
    def of(cls, run: AuditRun, rows: Rows) -> SharedAnswers:
        """The answers of a run to the documents in its ``rows``."""
        return cls(run.score[rows], run.finite[rows], run.lower_is_better)

    def at(self, rows: Rows) -> SharedAnswers:
        """The answers to some of the documents."""
        return SharedAnswers(self.score[rows], self.finite[rows], self.lower_is_better)


@dataclass(frozen=True)
class PairVerdict:
    """Two runs' scores compared as lm-eval gives them, and with answers that are not finite as wrong.

    ``as_wrong`` is None where all answers are finite.
    """

    logged: PairedScores
    as_wrong: PairedScores | None
    not_finite: int

    @property
    def changes(self) -> bool:
        """Whether the verdict depends on how the answers that are not finite count."""
        return self.as_wrong is not None and self.as_wrong.side != self.logged.side

    @property
    def p(self) -> float:
        """The larger p of both ways; 1 where the verdict changes."""
        if self.as_wrong is None:
            return self.logged.p
        return 1.0 if self.changes else float(np.fmax(self.logged.p, self.as_wrong.p))


def verdict_of(
    first: SharedAnswers,
    second: SharedAnswers,
    tasks: Sequence[str] = (),
    groups: Mapping[str, TaskGroup] | None = None,
) -> PairVerdict | None:
    """Compare two runs on the same documents; None where none has a score in both.

    With ``tasks`` (n,) the score is the mean over tasks, in which a group of ``groups`` counts once.
    """
    known = np.isfinite(first.score) & np.isfinite(second.score)
    if not known.any():
        return None
    names = np.array(tasks, dtype=object)

    def over(x: Array, y: Array, rows: Flags) -> PairedScores:
        weights = document_weights(names[rows].tolist(), groups or {}) if len(names) else None
        return paired_scores(x[rows], y[rows], weights=weights)

    logged = over(first.score, second.score, known)
    finite = first.finite & second.finite
    if finite.all():
        return PairVerdict(logged, None, 0)
    x = as_wrong(*first)
    y = as_wrong(*second)
    counted = over(x, y, np.isfinite(x) & np.isfinite(y))
    return PairVerdict(logged, counted, int((~finite).sum()))


def compare_samples(
    first: str | Path, second: str | Path, *, metric: str | None = None
) -> PairedScores:
    """Compare two runs of lm-eval on one task by their samples, as ``dispersion compare`` does.

    Needs numpy alone, and no results file.

    Args:
        first: The baseline's samples (``lm_eval --log_samples``), or its folder with one task.
        second: The other run's.
        metric: ``METRIC`` or ``FILTER/METRIC``; default: the first filter, and of its metrics the first of
            ``acc``, ``exact_match`` and so on (``docs/reference/audit.md``).

    Raises:
        HarnessError: A file does not exist, is cut off, or has no such metric.
        MixedStoresError: The files share no document with one target and prompt.
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
            f"no document has a finite {name} in both {first} and {second}; run them again"
        )
    scores = np.concatenate([x, y])
    scores = scores[np.isfinite(scores)]
    if scores.min() < 0 or scores.max() > 1:
        raise UsageError(
            f"expected scores from 0 to 1, got {name} from {scores.min():g} to {scores.max():g}; name "
            "another",
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
    repeated = set()
    for run in (a, b):
        counts = Counter(sample.columns["doc_hash"] for sample in run.values())
        repeated |= {doc_hash for doc_hash, count in counts.items() if count > 1}

    def key(sample: Sample) -> tuple[str, int]:
        doc_hash = sample.columns["doc_hash"]
        return doc_hash, sample.doc_id if doc_hash in repeated else -1

    def alike(column: str, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(i, j) for i, j in pairs if a[i].columns[column] == b[j].columns[column]]

    others = {key(sample): j for j, sample in b.items()}
    same = [(i, others[key(sample)]) for i, sample in a.items() if key(sample) in others]
    pairs = alike("target", same)
    ids = a.keys() & b.keys()
    if not pairs and ids:
        raise MixedStoresError(
            f"{first} and {second} have other documents or targets under {len(ids)} ids (the first: "
            f"{min(ids)}); compare runs on one version of the data"
        )
    if not pairs:
        raise MixedStoresError(f"{first} and {second} share no document; name samples of one task")
    in_one_prompt = alike("prompt_hash", pairs)
    if not in_one_prompt:
        raise MixedStoresError(
            f"{first} and {second} asked all {len(pairs)} shared documents in other prompts; compare runs of "
            "one prompt (of chat templates, name the runs' folders in `dispersion compare`)"
        )
    return sorted(in_one_prompt), len(pairs) - len(in_one_prompt)
