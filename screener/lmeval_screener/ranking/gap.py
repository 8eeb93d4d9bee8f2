"""The dispersion gap of one checkpoint, and whether two checkpoints differ in it.

G = within(T) + between(T, R): the mean distance inside the domain's tokens plus the mean distance from
them to everyday tokens, on rows of the output projection. Larger: the model tells the domain's tokens
apart and keeps them away from everyday language. Source: RD section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import Array, Contrast, Metric, PairMean, between, contrasts, within
from lmeval_dispersion.statistics import jackknife_se, student_p


@dataclass(frozen=True, eq=False)
class Gap:
    """G with its parts, in one metric.

    Attributes:
        metric: ``cosine`` (0 to about 4; near 2 when all is orthogonal) or ``euclidean`` (unit of the rows).
        mean: within_domain.mean + between.mean.
        se: Jackknife standard error over tokens of both sets: leaving a domain token out moves both parts.
        within_domain: Mean distance inside T.
        between: Mean distance across T x R.
        within_reference: Mean distance inside R: the control. It is no part of G; where it moves as much
            as G does, the whole matrix changed and not the domain.
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

    def comparable(self, other: Gap) -> None:
        """Check that both are of one metric over as many tokens."""
        same = self.left_out_domain.shape == other.left_out_domain.shape
        same = same and self.left_out_reference.shape == other.left_out_reference.shape
        if self.metric != other.metric or not same:
            raise GeometryError(
                "expected two gaps of one metric over the same tokens; screen both with the same sets"
            )


def gap(domain: ArrayLike, reference: ArrayLike, metric: Metric = "cosine") -> Gap:
    """The dispersion gap of rows ``domain`` (|T| >= 3, d) against rows ``reference`` (|R| >= 3, d)."""
    across = between(domain, reference, metric)
    return _gap(metric, Contrast(within(domain, metric), across, within(reference, metric)))


def gaps(domain: ArrayLike, reference: ArrayLike) -> dict[Metric, Gap]:
    """:func:`gap` in every metric, with less work."""
    return {metric: _gap(metric, contrast) for metric, contrast in contrasts(domain, reference).items()}


def _gap(metric: Metric, contrast: Contrast) -> Gap:
    inside, across = contrast.within, contrast.between
    left_domain = inside.left_out + across.left_out
    left_reference = inside.mean + across.left_out_other
    return Gap(
        metric=metric,
        mean=inside.mean + across.mean,
        se=jackknife_se(left_domain, left_reference),
        within_domain=inside,
        between=across,
        within_reference=contrast.within_other,
        left_out_domain=left_domain,
        left_out_reference=left_reference,
    )


class Difference(NamedTuple):
    """G of one checkpoint minus G of another, with the error over the tokens that they share.

    Attributes:
        mean: The difference.
        se: Its jackknife standard error: that of the choice of tokens.
        freedom: Degrees of freedom of the error. Ten digits are few: their error is itself uncertain.
    """

    mean: float
    se: float
    freedom: float

    @property
    def separated(self) -> bool:
        """Whether the difference is more than two standard errors from 0: of one pair, taken by itself."""
        return bool(abs(self.mean) > 2 * self.se)

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference, by Student's t; 1 where the two are one and the same."""
        if self.mean == 0:
            return 1.0
        return student_p(abs(self.mean) / self.se, self.freedom) if self.se > 0 else 0.0


def difference(a: Gap, b: Gap) -> Difference:
    """``a`` minus ``b``, paired: the same token is left out of both.

    Paired errors are the ones to use: tokens that are far from the others in one checkpoint are so in its
    siblings, and independent errors would hide real differences.
    """
    a.comparable(b)
    return paired_difference(
        a.mean - b.mean,
        a.left_out_domain - b.left_out_domain,
        a.left_out_reference - b.left_out_reference,
    )


def paired_difference(mean: float, *left_out: Array) -> Difference:
    """A difference with its error, from its values with each token of T and of R left out."""
    parts = [jackknife_se(side) ** 2 for side in left_out]
    # Welch and Satterthwaite: each side's variance has as many degrees of freedom as tokens, less one.
    spread = sum(part**2 / (len(side) - 1) for part, side in zip(parts, left_out, strict=True))
    freedom = sum(parts) ** 2 / spread if spread > 0 else math.inf
    return Difference(mean, jackknife_se(*left_out), freedom)


def ranks(means: list[float]) -> list[int]:
    """Rank of each mean, 1 for the largest; equal means share the better rank."""
    values = -np.asarray(means, dtype=np.float64)
    return [1 + int(place) for place in np.searchsorted(np.sort(values), values, side="left")]
