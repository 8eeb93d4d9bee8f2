"""The two figures of a checkpoint, G and the ratio, and tests of differences between checkpoints.

G = within(T) + between(T, R): the mean distance inside the domain's tokens plus the mean distance from them
to everyday tokens, on rows of the output projection. Larger: the domain's tokens are farther from one another
and from everyday language. Source: RD section 3.2.

The ratio is within(T) / within(R), Euclidean, of rows as they act on the normed state. Some changes alter no
softmax over ``row · state``, and therefore G but not the ratio: one vector added to every row, or a scale
moved between the final norm's weight γ and the rows. Copies of a model with the same predictions differ in
their ratio only by rounding.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import (
    METRICS,
    Array,
    Contrast,
    Metric,
    PairMean,
    between,
    contrasts,
    within,
)
from lmeval_dispersion.statistics import jackknife_se, student_p

if TYPE_CHECKING:
    from lmeval_screener.weights.projection import FinalNorm

#: The parts of G, and the control, which is not a part of it.
PARTS = ("within_domain", "between", "within_reference")
_SIGMAS = 3  # standard deviations of rounding that a difference must exceed
#: Bits of the significand, with the hidden bit, of the stored types; other types are blocks of integers.
_SIGNIFICAND = {
    "F64": 24,  # read as float32
    "F32": 24,
    "F16": 11,
    "BF16": 8,
    "F8_E4M3": 4,
    "F8_E5M2": 3,
}
_BLOCK = 32  # numbers that share a scale
_NONE = np.zeros(0)


@dataclass(frozen=True, eq=False)
class Gap:
    """G with its parts, in one metric.

    Attributes:
        metric: ``cosine`` (0 to 8/3; near 2 when all is orthogonal) or ``euclidean`` (unit of the rows).
        mean: within_domain.mean + between.mean.
        se: Jackknife standard error over tokens of both sets: leaving a domain token out moves both parts.
        within_domain: Mean distance inside T.
        between: Mean distance across T x R.
        within_reference: Mean distance inside R: the control. It is not a part of G; if it moves as much as
            G does, the whole matrix changed, not only the domain.
        left_out_domain: G without domain token i, shape (|T|,).
        left_out_reference: G without reference token j, shape (|R|,).
    """

    metric: Metric
    mean: float
    se: float
    within_domain: PairMean
    between: PairMean
    within_reference: PairMean
    left_out_domain: Array
    left_out_reference: Array


def gap(domain: ArrayLike, reference: ArrayLike, metric: Metric = "cosine") -> Gap:
    """G of ``domain`` (|T| >= 3, d) against ``reference`` (|R| >= 3, d); else GeometryError."""
    across = between(domain, reference, metric)
    return _gap(metric, Contrast(within(domain, metric), across, within(reference, metric)))


def gaps(domain: ArrayLike, reference: ArrayLike) -> dict[Metric, Gap]:
    """:func:`gap` in every metric, with less work."""
    return {
        metric: _gap(metric, contrast) for metric, contrast in contrasts(domain, reference).items()
    }


def _gap(metric: Metric, contrast: Contrast) -> Gap:
    inside, across, control = contrast
    domain = inside.left_out + across.left_out
    reference = inside.mean + across.left_out_other
    mean = inside.mean + across.mean
    se = jackknife_se(domain, reference)
    return Gap(metric, mean, se, inside, across, control, domain, reference)


class FigureDifference(NamedTuple):
    """A figure of one checkpoint minus another's, with the error over their common tokens.

    Attributes:
        mean: The difference.
        se: Its jackknife standard error, for the choice of tokens.
        freedom: The error's degrees of freedom, from the side with fewer tokens: ten digits are few, and
            their error is itself uncertain. Welch's estimate of them claims too much far out, where many
            comparisons are counted. Source: Mickey and Brown, Annals of Mathematical Statistics 37 (1966).
    """

    mean: float
    se: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference, by Student's t; 1 for a mean of 0, else 0 for an error of 0."""
        if self.mean == 0:
            return 1.0
        if not self.se > 0:
            return 0.0
        return student_p(abs(self.mean) / self.se, self.freedom)


def difference(a: Gap | Ratio, b: Gap | Ratio) -> FigureDifference:
    """``a`` minus ``b``, paired: the same token is left out of both.

    Tokens that are far from others in one checkpoint are also far in its siblings: independent errors
    would hide real differences.

    Raises:
        GeometryError: A gap and a ratio, different metrics, or different numbers of tokens.
    """
    is_same_domain = a.left_out_domain.shape == b.left_out_domain.shape
    is_same_reference = a.left_out_reference.shape == b.left_out_reference.shape
    is_same_figure = getattr(a, "metric", None) == getattr(b, "metric", None)
    if not (is_same_domain and is_same_reference and is_same_figure):
        raise GeometryError(
            "expected two figures in the same metric over the same tokens; screen both with the same sets"
        )
    domain = a.left_out_domain - b.left_out_domain
    reference = a.left_out_reference - b.left_out_reference
    freedom = min(len(domain), len(reference)) - 1
    return FigureDifference(a.mean - b.mean, jackknife_se(domain, reference), freedom)


# --- the ratio ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ratio:
    """A checkpoint's ratio.

    Attributes:
        mean: within(T) / within(R).
        se: Its jackknife standard error over tokens of both sets; γ is held fixed.
        rounding: Possible move by rounding to the stored element type, three standard deviations.
        left_out_domain: The figure without domain token i, shape (|T|,).
        left_out_reference: The figure without reference token j, shape (|R|,).
        shares: The parts of ``rounding`` over ``mean``: of T's rows, of R's, and of γ with a scale, (3,).
        marks: A hash for each row of T, each of R, and γ, (|T| + |R| + 1,); empty, like ``shares``, if an
            earlier version measured it.
    """

    mean: float
    se: float
    rounding: float
    left_out_domain: Array
    left_out_reference: Array
    shares: Array = field(default_factory=lambda: _NONE)
    marks: Array = field(default_factory=lambda: _NONE)

    def above(self, other: Ratio) -> bool:
        """Whether it exceeds another checkpoint's ratio by more than the rounding of both."""
        return self.mean - self.rounding > other.mean + other.rounding

    def rounding_from(self, base: Ratio) -> float:
        """Possible move of the difference from a base by rounding, three standard deviations.

        A fine-tune begins at its base's numbers: rows, or γ, that are equal bit for bit have no rounding
        between them; for the others the coarser of the two types decides. If one has no marks, or other
        numbers of tokens, it is the sum of both roundings.
        """
        if self.marks.shape != base.marks.shape or not len(self.marks):
            return self.rounding + base.rounding
        moved = np.split(self.marks != base.marks, [len(self.left_out_domain), -1])
        errors = np.maximum(self.shares * self.mean, base.shares * base.mean)
        return math.sqrt(sum(e**2 * part.mean() for e, part in zip(errors, moved, strict=True)))


def ratio(domain: NDArray[Any], reference: NDArray[Any], norm: FinalNorm, dtype: str) -> Ratio:
    """Ratio from rows of T (n, d) and R (m, d), as ``dtype``, by a known norm; GeometryError if undefined."""
    seen_domain = norm.effective(domain)
    seen_reference = norm.effective(reference)
    inside = within(seen_domain, "euclidean")
    control = within(seen_reference, "euclidean")
    if not control.mean > 0:
        raise GeometryError("the final norm leaves no difference between everyday tokens")
    mean = inside.mean / control.mean
    left_out_domain = inside.left_out / control.mean
    left_out_reference = inside.mean / control.left_out
    weight = np.asarray(norm.weight)
    # A scale that moved into γ was rounded there too, and weighs the dimensions of T and R differently.
    moved = float(np.linalg.norm(_variances(seen_domain) - _variances(seen_reference)))
    shares = [
        _rounding(domain, weight, dtype, inside.mean),
        _rounding(reference, weight, dtype, control.mean),
        _SIGMAS * relative_error(dtype) * moved,
    ]
    numbers = [*domain, *reference, weight]
    marks = [zlib.crc32(np.ascontiguousarray(row, dtype="<f4").tobytes()) for row in numbers]
    return Ratio(
        mean,
        jackknife_se(left_out_domain, left_out_reference),
        mean * sum(shares),
        left_out_domain,
        left_out_reference,
        np.array(shares),
        np.array(marks, dtype=float),
    )


def _variances(rows: Array) -> Array:
    """The share of each dimension in the variance of rows (n, d), shape (d,)."""
    variances: Array = rows.var(axis=0)
    variances = variances / variances.sum()
    return variances


def _rounding(rows: NDArray[Any], weight: Array, dtype: str, mean: float) -> float:
    """The relative effect of rounding on a mean distance: at random, and up, as noise adds to distances."""
    variances = np.square(storage_error(rows, dtype) * weight).mean(axis=1)
    at_random = _SIGMAS * 2 * math.sqrt(float(variances.mean()) / len(rows))
    return float((at_random + rows.shape[1] * variances.mean() / mean) / mean)


def storage_error(rows: NDArray[Any], dtype: str) -> Array:
    """Standard deviation of each number's rounding to ``dtype``, float64, shape of ``rows`` (n, d)."""
    values: Array = np.abs(rows.astype(np.float64))
    if _significand(dtype) is not None:
        return values * relative_error(dtype)
    # Other types hold integers times a scale per block.
    count, width = values.shape
    padded = np.pad(values, ((0, 0), (0, -width % _BLOCK)))
    largest = padded.reshape(count, -1, _BLOCK).max(axis=2, keepdims=True)
    step = 2 * largest / (2 ** _bits(dtype) - 1)
    errors: Array = np.repeat(step / math.sqrt(12), _BLOCK, axis=2).reshape(count, -1)[:, :width]
    return errors


def _significand(dtype: str) -> int | None:
    for name, bits in _SIGNIFICAND.items():
        if dtype.upper().startswith(name):
            return bits
    return None


def relative_error(dtype: str) -> float:
    """Standard deviation of rounding to ``dtype``, relative to the number; of integers, by their bits."""
    bits = _significand(dtype)
    return math.ldexp(1 / math.sqrt(3), -(_bits(dtype) if bits is None else bits))


def _bits(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 4


def figures_left_out(figures: Sequence[Gap | Ratio]) -> tuple[Array, Array]:
    """Figures without each token of T, (n, |T|), and without each of R, (n, |R|), a row per figure."""
    domain = np.stack([figure.left_out_domain for figure in figures])
    reference = np.stack([figure.left_out_reference for figure in figures])
    return domain, reference


# --- both as one array, for a registry ------------------------------------------------------------------


def numbers_of(gaps: Mapping[Metric, Gap], ratio: Ratio | None) -> Array:
    """The figures as one float64 array, each with its leave-one-out values over T, then over R.

    First G in each metric of ``METRICS`` with its parts, then the ratio, NaN if it is not known; last its
    shares of rounding and marks, which earlier versions omitted.
    """
    arrays: list[ArrayLike] = []
    for metric in METRICS:
        gap = gaps[metric]
        parts = [*gap.within_domain[:4], *gap.between[:4], *gap.within_reference[:4]]
        arrays += [[gap.mean, gap.se, *parts], gap.left_out_domain, gap.left_out_reference]
    if ratio is None:
        arrays.append(np.full(3, math.nan))
    else:
        arrays.append([ratio.mean, ratio.se, ratio.rounding])
        arrays += [ratio.left_out_domain, ratio.left_out_reference, ratio.shares, ratio.marks]
    return np.concatenate(arrays, dtype=np.float64)


def figures_of(
    numbers: Array, domain: int, reference: int, of_ratio: int
) -> tuple[dict[Metric, Gap], Ratio | None]:
    """The figures in an array of :func:`numbers_of`, without the leave-one-out values of G's parts.

    ``domain`` and ``reference`` are the numbers of tokens in T and R, ``of_ratio`` in the ratio's T.
    """
    sizes = [*(14, domain, reference) * len(METRICS), 3, of_ratio, reference, 3]
    arrays = iter(np.split(numbers, np.cumsum(sizes)))
    gaps: dict[Metric, Gap] = {}
    for metric in METRICS:
        mean, se, *parts = map(float, next(arrays))
        inside, across, control = map(_pair_mean, (parts[:4], parts[4:8], parts[8:]))
        gaps[metric] = Gap(metric, mean, se, inside, across, control, next(arrays), next(arrays))
    mean, se, rounding = map(float, next(arrays))
    if math.isnan(mean):
        return gaps, None
    return gaps, Ratio(mean, se, rounding, *arrays)


def _pair_mean(numbers: list[float]) -> PairMean:
    mean, se, by_pairs, pairs = numbers
    return PairMean(mean, se, by_pairs, int(pairs), _NONE, _NONE)
