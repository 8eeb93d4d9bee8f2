"""Effective rank: how many dimensions rows spread over around their mean."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError


def effective_rank(x: ArrayLike) -> float:
    """Effective number of dimensions that the rows of ``x`` (n >= 2, d) spread over, in [1, min(n, d)].

    Rows are centred, scaled to length one, and the entropy of the normalised eigenvalues of their
    covariance is exponentiated. Low: the texts (or tokens) lie along few directions around their mean.
    Differs from the Vendi score by the centring.

    Raises:
        TooFewVectorsError: n < 2.
        GeometryError: A non-finite value, or all rows are the same.

    Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024),
    after Roy and Vetterli (2007).

    >>> round(effective_rank([[1, 0], [-1, 0], [0, 1], [0, -1]]), 6)
    2.0
    """
    rows = np.asarray(x, dtype=np.float64)
    if rows.ndim != 2 or len(rows) < 2:
        raise TooFewVectorsError(f"expected `x` of shape (n >= 2, d), got {rows.shape}; pass more vectors")
    if not np.isfinite(rows).all():
        raise GeometryError("the effective rank needs finite vectors")
    centred = rows - rows.mean(axis=0)
    lengths = np.sqrt(np.einsum("ij,ij->i", centred, centred))
    # Below rounding of the rows themselves a distance from the mean is noise, not a direction.
    noise = 1e-12 * np.sqrt(np.einsum("ij,ij->i", rows, rows))
    kept = lengths > noise
    if not kept.any():
        raise GeometryError("the effective rank of rows that are all the same is not defined")
    unit = centred[kept] / lengths[kept, None]
    gram = unit.T @ unit if unit.shape[1] < len(unit) else unit @ unit.T
    values = np.linalg.eigvalsh(gram)
    values = values[values > 0] / values[values > 0].sum()
    values = values[values > 1e-15]
    return float(np.exp(-(values * np.log(values)).sum()))
