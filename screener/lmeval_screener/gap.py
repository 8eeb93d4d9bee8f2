"""The dispersion gap of one checkpoint, and whether two checkpoints differ in it.

G = within(T) + between(T, R): the mean distance inside the domain's tokens plus the mean distance from
them to everyday tokens, on rows of the output projection. Larger: the model tells the domain's tokens
apart and keeps them away from everyday language. Source: RD section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import Array, Metric, PairMean, between, within
from lmeval_dispersion.statistics import jackknife_se


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


def gap(domain: ArrayLike, reference: ArrayLike, metric: Metric = "cosine") -> Gap:
    """The dispersion gap of rows ``domain`` (|T| >= 3, d) against rows ``reference`` (|R| >= 3, d).

    Raises:
        TooFewVectorsError: A side has fewer than three rows.
        NoDirectionError: A zero or non-finite row.
    """
    inside, across = within(domain, metric), between(domain, reference, metric)
    left_domain = inside.left_out + across.left_out
    left_reference = inside.mean + across.left_out_other
    return Gap(
        metric=metric,
        mean=inside.mean + across.mean,
        se=jackknife_se(left_domain, left_reference),
        within_domain=inside,
        between=across,
        within_reference=within(reference, metric),
        left_out_domain=left_domain,
        left_out_reference=left_reference,
    )


class Difference(NamedTuple):
    """G of one checkpoint minus G of another, with the error over the tokens that they share."""

    mean: float
    se: float

    @property
    def separated(self) -> bool:
        """Whether the difference is more than two standard errors from 0."""
        return bool(abs(self.mean) > 2 * self.se)


def difference(a: Gap, b: Gap) -> Difference:
    """``a`` minus ``b``, paired: the same token is left out of both.

    Paired errors are the ones to use: tokens that are far from the others in one checkpoint are so in its
    siblings, and independent errors would hide real differences.

    Raises:
        GeometryError: The gaps are of different metrics or token sets.
    """
    same = a.left_out_domain.shape == b.left_out_domain.shape
    same = same and a.left_out_reference.shape == b.left_out_reference.shape
    if a.metric != b.metric or not same:
        raise GeometryError(
            "expected two gaps of one metric over the same tokens; screen both with the same sets"
        )
    se = jackknife_se(a.left_out_domain - b.left_out_domain, a.left_out_reference - b.left_out_reference)
    return Difference(a.mean - b.mean, se)


def ranks(means: list[float]) -> list[int]:
    """Rank of each mean, 1 for the largest; equal means share the better rank."""
    values = np.asarray(means, dtype=np.float64)
    return [1 + int((values > value).sum()) for value in values]
