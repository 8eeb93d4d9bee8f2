"""How many directions vectors spread over: four figures of the singular values of their rows.

Vectors are rows, (n, d), taken as they are (dispersion alone takes their directions). All four are bounded by
n, and rise with it: compare sets of about as many vectors. A figure that is not defined is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError
from lmeval_dispersion.geometry.vectors import Array, matrix

_RANKME = 1e-7  # the constant of its paper
_NOISE = 1e-12  # of a row's length: nearer to the mean it has no direction from there
_NULL = 1e-13  # of the largest eigenvalue: rounding


class Spectrum(NamedTuple):
    """How many directions some vectors spread over; each figure is 1 for a single direction.

    Attributes:
        rankme: Exp of the entropy of the singular values, to min(n, d). Garrido et al., ICML 2023.
        effective_rank: Of :func:`effective_rank`; NaN where all rows are the same.
        participation_ratio: (Σλ)² / Σλ² of the covariance's eigenvalues, to min(n - 1, d). Gao et al.,
            bioRxiv 214262 (2017).
        stable_rank: Squared Frobenius over squared spectral norm, to min(n, d). Rudelson and Vershynin,
            JACM 54 (2007).
    """

    rankme: float
    effective_rank: float
    participation_ratio: float
    stable_rank: float


def spectrum(x: ArrayLike) -> Spectrum:
    """The four figures of the rows of ``x`` (n >= 3, d).

    >>> found = spectrum([[1, 0], [-1, 0], [0, 1], [0, -1]])
    >>> round(found.stable_rank, 6), round(found.effective_rank, 6)
    (2.0, 2.0)
    """
    rows = _finite(x, 3)
    raw = _eigenvalues(rows)
    centred = _eigenvalues(rows - rows.mean(axis=0))
    singular = np.sqrt(raw)
    shares = singular / singular.sum() + _RANKME if singular.sum() > 0 else singular
    return Spectrum(
        rankme=float(np.exp(-(shares * np.log(shares)).sum())) if singular.sum() > 0 else float("nan"),
        effective_rank=_entropy_rank(_eigenvalues(_directions(rows))),
        participation_ratio=_ratio(float(centred.sum()) ** 2, float(np.square(centred).sum())),
        stable_rank=_ratio(float(raw.sum()), float(raw[-1])),
    )


def effective_rank(x: ArrayLike) -> float:
    """Effective number of dimensions that the rows of ``x`` (n >= 2, d) spread over, in [1, min(n, d)].

    Rows are centred, scaled to length one, and the entropy of the normalised eigenvalues of their
    covariance is exponentiated. Low: the texts (or tokens) lie along few directions around their mean.
    Differs from the Vendi score by the centring.

    Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024),
    after Roy and Vetterli (2007).

    >>> round(effective_rank([[1, 0], [-1, 0], [0, 1], [0, -1]]), 6)
    2.0
    """
    directions = _directions(_finite(x, 2))
    if not len(directions):
        raise GeometryError("the effective rank of rows that are all the same is not defined")
    return _entropy_rank(_eigenvalues(directions))


def _finite(x: ArrayLike, least: int) -> Array:
    rows = matrix(x)
    if len(rows) < least:
        raise TooFewVectorsError(
            f"expected `x` of shape (n >= {least}, d), got {rows.shape}; pass more vectors"
        )
    if not np.isfinite(rows).all():
        raise GeometryError("the spectrum needs finite vectors; leave those out that are not")
    return rows


def _directions(rows: Array) -> Array:
    """The rows around their mean at length one, without those that are the mean but for rounding."""
    centred = rows - rows.mean(axis=0)
    lengths = np.sqrt(np.einsum("ij,ij->i", centred, centred))
    kept = lengths > _NOISE * np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return np.asarray(centred[kept] / lengths[kept, None])


def _eigenvalues(rows: Array) -> Array:
    """Squared singular values of the rows, ascending, by the products of the smaller side; rounding is 0."""
    if not len(rows):
        return np.zeros(1)
    values = np.linalg.eigvalsh(rows.T @ rows if rows.shape[1] < len(rows) else rows @ rows.T)
    return np.asarray(np.where(values > _NULL * max(values[-1], 0.0), values, 0.0))


def _entropy_rank(values: Array) -> float:
    """Exp of the entropy of eigenvalues, scaled to sum to 1; NaN where all are 0."""
    values = values[values > 0]
    if not len(values):
        return float("nan")
    shares = values / values.sum()
    shares = shares[shares > 1e-15]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else float("nan")
