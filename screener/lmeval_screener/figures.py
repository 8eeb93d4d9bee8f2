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
    """G of a checkpoint in one metric, with its parts.

    T are the tokens of the domain, R the everyday tokens.

    Attributes:
        metric: ``cosine`` (G lies in [0, 8/3], near 2 if all rows are orthogonal) or ``euclidean``
            (G has the unit of the rows).
        mean: G: ``within_domain.mean + between.mean``.
        se: Standard error of G by a jackknife over the tokens of both sets. Leaving out a token of
            T changes both parts.
        within_domain: Mean distance over the pairs inside T.
        between: Mean distance over the pairs of a token of T and one of R.
        within_reference: Mean distance over the pairs inside R, as a control and not a part of G.
            If it changes as much as G does, the whole matrix has changed, not only the domain.
        left_out_domain: G without token i of T, shape (|T|,).
        left_out_reference: G without token j of R, shape (|R|,).
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
    """Compute G: how far a domain's rows lie from one another and from everyday rows.

    `Gap` has the formula and the parts.

    Args:
        domain: Rows of the domain's tokens T, shape (|T|, d) with |T| >= 3.
        reference: Rows of the everyday tokens R, shape (|R|, d) with |R| >= 3.
        metric: ``cosine`` or ``euclidean``.

    Raises:
        GeometryError: An array has another shape, or a row is not finite or, for ``cosine``, zero.
    """
    across = between(domain, reference, metric)
    return _gap(metric, Contrast(within(domain, metric), across, within(reference, metric)))


def gaps(domain: ArrayLike, reference: ArrayLike) -> dict[Metric, Gap]:
    """Compute G in every metric at once; returns metric -> `Gap`.

    The arguments and errors are those of :func:`gap`.
    """
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
    """A figure of one checkpoint minus that of another, paired over their common tokens.

    Attributes:
        mean: The difference.
        se: Standard error of ``mean`` due to the choice of tokens, by the jackknife.
        freedom: Degrees of freedom of ``se``: one less than the number of tokens in the smaller
            set. Welch's larger estimate gives too small p-values far out in the tails, which matter
            when many checkpoints are compared. Source: Mickey and Brown, Annals of Mathematical
            Statistics 37 (1966).
    """

    mean: float
    se: float
    freedom: float

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis of no difference, by Student's t.

        It is 1 if ``mean`` is 0, and otherwise 0 if ``se`` is 0.
        """
        if self.mean == 0:
            return 1.0
        if not self.se > 0:
            return 0.0
        return student_p(abs(self.mean) / self.se, self.freedom)


def difference(a: Gap | Ratio, b: Gap | Ratio) -> FigureDifference:
    """Return figure ``a`` minus figure ``b``, paired over tokens.

    The jackknife leaves the same token out of both: a token that is far from the others in one
    checkpoint is also far in its siblings, and independent errors would hide real differences.

    Raises:
        GeometryError: One is a gap and the other a ratio, or they differ in their metric or in
            their numbers of tokens.
    """
    is_same_domain = a.left_out_domain.shape == b.left_out_domain.shape
    is_same_reference = a.left_out_reference.shape == b.left_out_reference.shape
    is_same_figure = getattr(a, "metric", None) == getattr(b, "metric", None)
    if not (is_same_domain and is_same_reference and is_same_figure):
        raise GeometryError(
            "expected two ratios, or two gaps in the same metric, over the same tokens; screen "
            "both checkpoints with the same token sets"
        )
    domain = a.left_out_domain - b.left_out_domain
    reference = a.left_out_reference - b.left_out_reference
    freedom = min(len(domain), len(reference)) - 1
    return FigureDifference(a.mean - b.mean, jackknife_se(domain, reference), freedom)


# --- the ratio ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ratio:
    """The ratio of a checkpoint, within(T) / within(R), with its errors.

    within() is the mean Euclidean distance over the pairs of a set of output rows, as
    `FinalNorm.effective` combines them with the weight γ of the final norm. T are a task's answer
    tokens, or the tokens of the domain; R are everyday tokens.

    Attributes:
        mean: The ratio.
        se: Standard error of the ratio by a jackknife over the tokens of T and R, with the final
            norm's weight γ held fixed.
        rounding: Largest change of the ratio that rounding to the stored element type explains:
            three standard deviations.
        left_out_domain: The ratio without token i of T, shape (|T|,).
        left_out_reference: The ratio without token j of R, shape (|R|,).
        shares: ``rounding / mean`` in three parts, shape (3,): from the rows of T, from the rows of
            R, and from γ.
        marks: Hashes of the rows of T, of the rows of R and of γ, shape (|T| + |R| + 1,). Like
            ``shares``, empty if an earlier version of this package measured the ratio.
    """

    mean: float
    se: float
    rounding: float
    left_out_domain: Array
    left_out_reference: Array
    shares: Array = field(default_factory=lambda: _NONE)
    marks: Array = field(default_factory=lambda: _NONE)

    def above(self, other: Ratio) -> bool:
        """Whether this ratio is above another checkpoint's by more than the sum of ``rounding``."""
        return self.mean - self.rounding > other.mean + other.rounding

    def rounding_from(self, base: Ratio) -> float:
        """Return the largest difference from the ratio of ``base`` that rounding explains.

        It is three standard deviations of the rounding errors. A fine-tune starts from its base's
        numbers, so rows (or γ) that are equal bit for bit add no rounding error; for rows that
        differ, the coarser of the two element types decides. If either ratio has no ``marks``, or
        the numbers of tokens differ, the result is the sum of ``rounding`` of the two ratios.
        """
        if self.marks.shape != base.marks.shape or not len(self.marks):
            return self.rounding + base.rounding
        moved = np.split(self.marks != base.marks, [len(self.left_out_domain), -1])
        errors = np.maximum(self.shares * self.mean, base.shares * base.mean)
        return math.sqrt(sum(e**2 * part.mean() for e, part in zip(errors, moved, strict=True)))


def ratio(domain: NDArray[Any], reference: NDArray[Any], norm: FinalNorm, dtype: str) -> Ratio:
    """Compute within(T) / within(R), the ratio of a checkpoint (see `Ratio`).

    Args:
        domain: Stored rows of T, the answer tokens or the domain's tokens, shape (n, d).
        reference: Stored rows of R, the everyday tokens, shape (m, d).
        norm: The final norm, with a known weight.
        dtype: Element type in which the rows are stored, such as ``BF16``.

    Raises:
        GeometryError: The ratio is not defined: T or R has fewer than three rows, a row is not
            finite, or all rows of R are equal after the final norm.
    """
    seen_domain = norm.effective(domain)
    seen_reference = norm.effective(reference)
    inside = within(seen_domain, "euclidean")
    control = within(seen_reference, "euclidean")
    if not control.mean > 0:
        raise GeometryError("the rows of all everyday tokens are equal after the final norm")
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
    """Return the standard deviation of each number's rounding error, as its element type implies.

    Args:
        rows: The numbers, shape (n, d).
        dtype: The stored element type, such as ``F16``. Any but the known floating-point types
            counts as blocks of 32 integers that share a scale.

    Returns:
        Shape (n, d), float64, in the unit of the rows.
    """
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
    """Return the standard deviation of the rounding error, relative to the rounded number.

    ``dtype`` is the stored element type. For quantised types, such as ``Q4_K``, the error follows
    from the number of bits in the name (4 if the name has none).
    """
    bits = _significand(dtype)
    return math.ldexp(1 / math.sqrt(3), -(_bits(dtype) if bits is None else bits))


def _bits(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 4


def figures_left_out(figures: Sequence[Gap | Ratio]) -> tuple[Array, Array]:
    """Stack the leave-one-out values of n figures over the same tokens.

    Returns:
        Each figure without each token of T, shape (n, |T|); and without each token of R, shape
        (n, |R|).
    """
    domain = np.stack([figure.left_out_domain for figure in figures])
    reference = np.stack([figure.left_out_reference for figure in figures])
    return domain, reference


# --- both as one array, for a registry ------------------------------------------------------------------


def numbers_of(gaps: Mapping[Metric, Gap], ratio: Ratio | None) -> Array:
    """Pack the figures of a checkpoint into one float64 array, for :func:`figures_of`.

    The array has G in each metric of ``METRICS`` with its error, its parts and its leave-one-out
    values over T and R; then the ratio with its errors, its leave-one-out values, its ``shares``
    and its ``marks``, which earlier versions omitted. If the ratio is None, three NaN stand in its
    place.
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
    """Unpack the figures in an array of :func:`numbers_of`.

    The leave-one-out values of G's parts are not stored, and come back empty.

    Args:
        numbers: The array.
        domain: Number of tokens in T.
        reference: Number of tokens in R.
        of_ratio: Number of tokens that take the place of T in the ratio.

    Returns:
        Metric -> G; and the ratio, None if the array holds none.
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
