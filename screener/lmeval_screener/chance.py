"""The probability that an order by ratio is the order by accuracy.

Ranks transfer from study to study, differences of ratios do not. The model is Thurstone's
(Psychological Review 34, 1927): in a group, accuracies are normal on some scale and correlate by ρ
with the normal scores z of the ranks by ratio. So

    chance(i is better than j) = Φ(k (z_i - z_j)),    k = ρ / √(2 (1 - ρ²)),

for two checkpoints whose accuracies differ by more than `NEAR`. The slope k is measured for each
kind of checkpoints (`evidence.SLOPES`), or fitted on a user's own results (:func:`fitted`). The
same k gives the number of places to evaluate (:meth:`Chances.first_for`).

All this holds only where the rows of checkpoints differ: see :func:`is_noise`.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.evidence import SLOPES, Slope
from lmeval_dispersion.files import read_json, write_whole
from lmeval_dispersion.geometry import Array
from lmeval_dispersion.layouts import Form, Text
from lmeval_dispersion.statistics import LEVEL, f_p
from lmeval_screener.figures import Gap, Ratio, figures_left_out

NEAR = 0.01  # accuracies that differ by no more are taken as equal
WITHIN = 0.9  # chance with which the places to evaluate hold the best
# Accuracies and ratios, in standard deviations; the best of 10^6 is at 4.9.
_GRID = np.arange(-6.0, 8.0, 0.05)
_TAIL = np.geomspace(1e-9, 0.5, 300)
_BINS = np.concatenate([_TAIL, 1 - _TAIL[-2::-1]])  # bins of probabilities
_LEAST = 1e-12  # ratio; all rows of T may be equal
LEAST_SLOPE = -1.0  # of a user's results
MOST_SLOPE = 3.0
_SLOPES = np.arange(LEAST_SLOPE, MOST_SLOPE, 0.01)
_STEPS = np.linspace(-10.0, 10.0, 401)  # grid of differences of normal scores
SCHEMA = "screen-checkpoints-slope/1"
_HINT = "`dispersion verify … --keep FILE` writes one"
_REPAIR = "write it again with `dispersion verify … --keep FILE`"


@cache
def normal_scores(places: int) -> Array:
    """Return the normal score of each rank, best first, shape (places,).

    It is the expected value, by Blom's approximation, of the number at that rank if ``places``
    numbers are drawn from the standard normal distribution and sorted. Source: Blom, Statistical
    Estimates and Transformed Beta-Variables (1958).

    >>> normal_scores(3).round(2).tolist()
    [0.87, 0.0, -0.87]
    """
    tails = (np.arange(places) + 0.625) / (places + 0.25)  # share above each place
    # Tukey's lambda, then Newton's steps.
    scores: Array = (np.power(1 - tails, 0.135) - np.power(tails, 0.135)) / 0.1975
    for _ in range(5):
        scores = scores + (_phi(-scores) - tails) * math.sqrt(2 * math.pi) * np.exp(
            np.square(scores) / 2
        )
    return scores


@dataclass(frozen=True)
class Chances:
    """Probabilities that follow from a group's ranking by ratio.

    They say which of two checkpoints is more accurate, and how far down the best one may be.

    Attributes:
        places: Number of ranks in the group; checkpoints with equal output rows share a rank.
        slope: How strongly the ranks predict accuracy. Its ``k`` is the slope of a probit model
            (see `fitted`).
    """

    places: int
    slope: Slope

    def between(self, better: int, worse: int) -> float:
        """Return the chance, in [0, 1], that rank ``better`` is more accurate than rank ``worse``.

        Ranks count from 1. The chance holds for checkpoints whose accuracies differ by more than
        `NEAR`.
        """
        z = normal_scores(self.places)
        return math.erfc(self.slope.k * float(z[worse - 1] - z[better - 1]) / math.sqrt(2)) / 2

    @cached_property
    def holds_best(self) -> Array:
        """The chance that the most accurate checkpoint is among the first m ranks.

        One number for each m from 1 to ``places``, shape (places,).
        """
        return _holds_best(self.places, self.slope.k)

    def first_for(self, chance: float = WITHIN) -> int:
        """Return how many of the first ranks are needed to hold the most accurate checkpoint.

        It is the smallest m for which the first m ranks hold that checkpoint with a probability of
        at least ``chance``.

        Args:
            chance: The probability, in (0, 1].
        """
        return min(1 + int(np.searchsorted(self.holds_best, chance)), self.places)


@cache
def _holds_best(places: int, k: float) -> Array:
    """P(the most accurate is among the first m by ratio), m = 1 … places.

    Given its accuracy a and its ratio x, each of the others is above it with the probability p of a ratio
    above x given an accuracy below a: its place is binomial. Integrated over a, whose density is
    n φ(a) Φ(a)^(n-1), and x, in bins of p.
    """
    if places == 1:
        return np.ones(1)
    chances, density = _above(k)
    of_accuracy = np.exp(-np.square(_GRID) / 2)
    below = np.cumsum(of_accuracy) - of_accuracy / 2
    mass = (of_accuracy * np.power(below / below[-1], places - 1))[:, None] * density
    bins = np.searchsorted(_BINS, chances).ravel()
    weights = np.bincount(bins, mass.ravel(), len(_BINS) + 1)
    sums = np.bincount(bins, (mass * chances).ravel(), len(_BINS) + 1)
    used = weights > weights.sum() * 1e-12
    p = np.clip(sums[used] / weights[used], 1e-12, 1 - 1e-12)[:, None]
    others = np.arange(places)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(others[1:]))])
    ways = factorials[-1] - factorials - factorials[::-1]
    of_place = weights[used] @ np.exp(
        ways + others * np.log(p) + (places - 1 - others) * np.log1p(-p)
    )
    held: Array = np.minimum(np.cumsum(of_place) / of_place.sum(), 1.0)
    return held


@cache
def _above(k: float) -> tuple[Array, Array]:
    """P(ratio above x | accuracy below a), and the density of x given a; both over a, then x of `_GRID`."""
    rho = k * math.sqrt(2 / (1 + 2 * k * k))
    rest = (_GRID - rho * _GRID[:, None]) / math.sqrt(1 - rho * rho)
    of_accuracy = np.exp(-np.square(_GRID) / 2)[:, None]
    joint = of_accuracy * _phi(-rest)
    chances = (np.cumsum(joint, axis=0) - joint / 2) / (
        np.cumsum(of_accuracy, axis=0) - of_accuracy / 2
    )
    return chances, np.exp(-np.square(rest) / 2)


def _phi(values: Array) -> Array:
    """The standard normal distribution function."""
    tails: Array = np.vectorize(math.erfc, otypes=[float])(-values / math.sqrt(2))
    return tails / 2


# --- the slope of a user's own results ------------------------------------------------------------------


@dataclass(frozen=True)
class Own(Slope):
    """The slope k of a user's own results: how strongly ranks predicted accuracy in them.

    It applies to checkpoints of the same ``kind``. Its ``groups`` is the number of evaluated
    checkpoints; the other inherited fields are those of `Slope`.

    Attributes:
        subject: Task that the checkpoints were screened for; the domain if no task was named.
    """

    subject: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the slope as JSON values: the content of a `keep_slope` file, without its schema.

        ``groups`` is called ``evaluated`` there. ``spread``, and the fields that only bundled slopes
        have, are left out.
        """
        return {
            "kind": self.kind,
            "k": self.k,
            "low": self.low,
            "high": self.high,
            "evaluated": self.groups,
            "subject": self.subject,
            "measured": self.measured,
        }

    def said(self) -> str:
        """Return the slope with its interval and its source, as the beginning of a sentence."""
        return (
            f"According to your own results (slope k = {self.k:.2f}, 95 % interval {self.low:.2f} to "
            f"{self.high:.2f}, from {self.groups} evaluated checkpoints, screened for {self.subject})"
        )


Kind = Annotated[str, Form(lambda kind: kind in SLOPES, f"one of {', '.join(SLOPES)}")]


class _OwnFile(TypedDict):
    """The layout of `Own.to_dict`."""

    kind: Kind
    k: float
    low: float
    high: float
    evaluated: Annotated[int, 0]
    subject: Text
    measured: Text


def fitted(groups: Iterable[tuple[Array, Array]], ours: Slope, near: float = NEAR) -> Slope:
    """Fit the slope of a user's own results, with its 95 % interval.

    The model is a probit regression: the outcome is which of two checkpoints in a group is more
    accurate, the predictor is the difference of their normal scores. Pairs whose accuracies differ
    by at most ``near`` are left out. As pairs share checkpoints, all pairs of a group of n
    checkpoints together are given the weight of n pairs; in simulations the 95 % intervals then
    have their nominal coverage. The prior is normal with mean ``ours.k`` and standard deviation
    ``ours.spread``; without any pair, k and its interval are those of the prior.

    Args:
        groups: For each group, two arrays of shape (n,) over its evaluated checkpoints: their
            normal scores (`normal_scores`) among all ranks of the group, and their accuracies in
            the unit of ``near``.
        ours: The slope measured on our own checkpoints of the same kind.
        near: Largest difference of two accuracies that count as equal.

    Returns:
        The slope, of the kind ``yours``; its ``groups`` is the number of evaluated checkpoints.
    """
    logs = -np.square((_SLOPES - ours.k) / ours.spread) / 2
    count = 0
    for scores, accuracies in groups:
        first, second = np.triu_indices(len(scores), 1)
        gains = accuracies[first] - accuracies[second]
        apart = np.abs(gains) > near * (1 + 1e-9)
        steps = (np.sign(gains) * (scores[first] - scores[second]))[apart]
        if len(steps):
            logs = logs + len(scores) * (_log_chances() @ _counted(steps)) / len(steps)
        count += len(scores)
    weights = np.exp(logs - logs.max())
    k = float(weights @ _SLOPES / weights.sum())
    shares = np.cumsum(weights) / weights.sum()
    edges = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = _SLOPES[np.searchsorted(shares, edges)].tolist()
    return Slope("yours", k, low, high, ours.spread, "", count)


def _counted(steps: Array) -> Array:
    """The number of steps near each of `_STEPS`, shape (401,)."""
    width = _STEPS[1] - _STEPS[0]
    places = np.rint((steps - _STEPS[0]) / width).astype(int)
    return np.bincount(places, minlength=len(_STEPS)).astype(float)


@cache
def _log_chances() -> Array:
    """The logarithm of Φ(k d) for each slope k and each difference d."""
    return np.log(np.maximum(_phi(_SLOPES[:, None] * _STEPS), 1e-30))


def keep_slope(path: Path, found: Slope, kind: str, subject: str) -> None:
    """Write a slope that was fitted on the user's results to a JSON file, for `read_slope`.

    Args:
        path: A new file, or one that holds an earlier slope, which is replaced.
        found: The slope; k and its interval are rounded to four decimals.
        kind: The kind of checkpoints, a key of `evidence.SLOPES`.
        subject: The task of the screening; its domain if no task was named.

    Raises:
        UsageError: The file exists and does not hold a slope.
        DispersionError: The file cannot be written.
    """
    if path.exists():
        read_slope(path, "name a new file")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    own = Own(
        kind=kind,
        k=round(found.k, 4),
        low=round(found.low, 4),
        high=round(found.high, 4),
        spread=found.spread,
        measured=today,
        groups=found.groups,
        subject=subject,
    )
    write_whole(path, f"{json.dumps({'schema': SCHEMA} | own.to_dict(), indent=1)}\n".encode())


def read_slope(path: str | Path, hint: str = _HINT) -> Own:
    """Read the slope in a file that `keep_slope` wrote.

    Args:
        path: The file.
        hint: The next step to advise if the file does not hold a slope.

    Raises:
        UsageError: The file cannot be read, does not hold a slope, or is damaged.
    """
    content = read_json(Path(path), _OwnFile, "a kept slope", SCHEMA, hint, repair=_REPAIR)
    own = Own(
        kind=content["kind"],
        k=content["k"],
        low=content["low"],
        high=content["high"],
        spread=SLOPES[content["kind"]].spread,
        measured=content["measured"],
        groups=content["evaluated"],
        subject=content["subject"],
    )
    if not LEAST_SLOPE <= own.low <= own.k <= own.high <= MOST_SLOPE:
        raise UsageError(
            f"{path}: expected a slope k within its interval, and both within {LEAST_SLOPE:g} to "
            f"{MOST_SLOPE:g}, got {own.k} with the interval {own.low} to {own.high}; {_REPAIR}"
        )
    return own


# --- noise of the tokens --------------------------------------------------------------------------------


def is_noise(figures: Sequence[Gap | Ratio]) -> bool:
    """Whether the choice of tokens alone may explain how far the figures of checkpoints differ.

    ``figures`` are ratios (or gaps) over the same tokens; False for fewer than two. The test is an
    F test at 5 %: the sum of squared deviations of the figures' logarithms from their mean, divided
    by its expectation by the paired jackknife, is F distributed if the figures differ by noise
    only. The degrees of freedom follow from the correlations of the noise (Satterthwaite), as
    sibling checkpoints share tokens and may differ along few directions.

    Sources: Dempster, Annals of Mathematical Statistics 29 (1958); the estimate of tr Σ²: Bai and
    Saranadasa, Statistica Sinica 6 (1996).
    """
    if len(figures) < 2:
        return False
    logs = np.log(np.maximum([figure.mean for figure in figures], _LEAST))
    spread = float(np.square(logs - logs.mean()).sum())
    noise = squared = below = 0.0
    sides: list[Array] = []
    for side in figures_left_out(figures):
        values = np.log(np.maximum(side, _LEAST))
        m = values.shape[1]
        values = (values - values.mean(axis=1, keepdims=True)) * math.sqrt(1 - 1 / m)
        values -= values.mean(axis=0)
        products = values.T @ values
        own = float(np.trace(products))
        of_side = (
            (m - 1) ** 2
            / ((m + 1) * (m - 2))
            * (float(np.square(products).sum()) - own**2 / (m - 1))
        )
        of_side = max(of_side, own**2 / (len(figures) - 1))
        noise += own
        squared += of_side
        below += of_side / (m - 1)
        sides.append(values)
    if not noise > 0:
        return spread == 0
    squared += 2 * float(np.square(sides[0].T @ sides[1]).sum())
    above = min(max(noise**2 / squared, 1.0), len(figures) - 1)
    return f_p(spread / noise, above, min(noise**2 / below, 1e6)) > 1 - LEVEL
