"""Dispersion of a set of vectors: at once, accumulated or per vector; and its spectrum.

See the package's docstring for shapes, dtypes and sources. The spectrum takes vectors as they are: four
figures of the singular values of their rows, which are bounded by n and rise with it, NaN where undefined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError
from lmeval_dispersion.geometry.pairs import Array, at_least, matrix, unit_rows, valid_rows
from lmeval_dispersion.statistics import jackknife_se

_NUMBERS = 2**16  # of a block: 512 KB in float64
_LEAST, _MOST = 1e-200, 1e200  # squared lengths that neither under- nor overflowed
_CANCELLED = 1e-4  # below, n - |sum of unit rows|^2 / n has lost too many digits


class Estimate(NamedTuple):
    """A mean distance with its jackknife standard error over ``n`` vectors (``se`` NaN when n = 2)."""

    mean: float
    se: float
    n: int


def dispersion(x: ArrayLike) -> float:
    """Mean cosine distance over all pairs of rows of ``x`` (n >= 2, d).

    0 all parallel, 1 orthogonal on average, at most n/(n-1). In float64 whatever the dtype, without a copy of
    ``x``; nearly parallel vectors keep their digits. Compare a model with itself or its siblings only.

    Raises:
        TooFewVectorsError: n < 2.
        NoDirectionError: A zero or non-finite row; another shape is a GeometryError.

    Source: RD eq. 1. Differs from ``torchmetrics.functional.pairwise_cosine_similarity(reduction="mean")``,
    which counts a zeroed diagonal.

    >>> dispersion([[1, 0], [0, 1]])
    1.0
    """
    rows = _rows(x)
    mean = mean_distance(_total(rows), len(rows))
    return mean if mean > _CANCELLED else float(contributions(rows).mean())


def contributions(x: ArrayLike) -> Array:
    """Mean cosine distance of every row to all others; shape (n,), in [0, 2]. Their mean is the dispersion.

    Raises:
        TooFewVectorsError: n < 2.
        NoDirectionError: A zero or non-finite row; another shape is a GeometryError.
    """
    rows = _rows(x)
    centre = _total(rows) / len(rows)
    squares = [
        np.square(block / lengths[:, None] - centre).sum(axis=1) for block, lengths in _blocks(rows)
    ]
    return mean_distances(np.concatenate(squares))


def _rows(x: ArrayLike) -> NDArray[Any]:
    """``x`` unchanged, of a float dtype, with at least two rows."""
    rows = np.asarray(x)
    rows = rows if rows.dtype.kind == "f" and rows.ndim == 2 and rows.size else matrix(x)
    at_least(rows, 2)
    return rows


def _total(rows: NDArray[Any]) -> Array:
    """Sum of the rows scaled to length one, shape (d,)."""
    return np.asarray(np.sum([(1 / lengths) @ block for block, lengths in _blocks(rows)], axis=0))


def _blocks(rows: NDArray[Any]) -> Iterator[tuple[Array, Array]]:
    """Blocks of rows in float64 that fit into the cache, with the rows' lengths."""
    size = max(1, _NUMBERS // rows.shape[1])
    for i in range(0, len(rows), size):
        block = rows[i : i + size].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("ij,ij->i", block, block)
        if not (squares.min() > _LEAST and squares.max() < _MOST):
            # Tiny or huge values; or a row without a direction, which `unit_rows` names by its index in `x`.
            if not valid_rows(block).all():
                unit_rows(rows)
            block = block / np.abs(block).max(axis=1, keepdims=True)
            squares = np.einsum("ij,ij->i", block, block)
        yield block, np.sqrt(squares)


def mean_distance(total: Array, n: int) -> float:
    """Mean cosine distance over the pairs of ``n`` unit vectors, from their sum (d,): RD eq. 1.

    Raises:
        TooFewVectorsError: n < 2.
    """
    if n < 2:
        raise TooFewVectorsError(f"expected at least 2 vectors, got {n}; pass more texts")
    return (n - float(total @ total) / n) / (n - 1)


def mean_distances(squares: Array) -> Array:
    """Mean cosine distance of each of n > 1 unit vectors to the others, shape (n,).

    From the squared distances to their mean m: (n |u_i - m|^2 + sum_j |u_j - m|^2) / (2 (n - 1)), which
    equals 1 - (u_i.s - 1)/(n - 1) and keeps the digits of nearly parallel vectors.
    """
    n = len(squares)
    return np.asarray((n * squares + squares.sum()) / (2 * (n - 1)))


def dispersion_estimate(x: ArrayLike) -> Estimate:
    """:func:`dispersion` with its jackknife standard error over rows, in O(n d).

    Leaving text i out changes the mean by (D - c_i) 2/(n - 2), with c_i its contribution.

    Raises:
        TooFewVectorsError: n < 2.
        NoDirectionError: A zero or non-finite row; another shape is a GeometryError.
    """
    return jackknifed(contributions(x))


def jackknifed(c: Array) -> Estimate:
    """The dispersion and its jackknife error (NaN for n = 2), from n > 1 contributions (n,)."""
    n = len(c)
    return Estimate(float(c.mean()), jackknife_se(left_out(c)) if n > 2 else float("nan"), n)


def left_out(contributions: Array) -> Array:
    """The dispersion without each vector, shape (n,), from their contributions (n,), n >= 3."""
    mean = float(contributions.mean())
    return np.asarray(mean + (mean - contributions) * 2 / (len(contributions) - 2))


def vendi_score(x: ArrayLike) -> float:
    """Effective number of distinct directions: exp of the entropy of the eigenvalues of K/n, K = u u^T.

    1 all parallel, n (or d, if smaller) all orthogonal.

    Raises:
        TooFewVectorsError: No rows.
        NoDirectionError: A zero or non-finite row; another shape is a GeometryError.

    Source: RD A.5, after Friedman and Dieng (2023). Equals ``vendi_score.vendi.score_X(u)``.

    >>> round(vendi_score([[1, 0], [0, 1]]), 6)
    2.0
    """
    u = unit_rows(x)
    at_least(u, 1)
    return _entropy_rank(_eigenvalues(u))


class Dispersion:
    """Mergeable accumulator of :func:`dispersion`: two halves, or two ranks, give the figure of the whole.

    The state is a count and sums of unit rows in float64, held in ``groups`` groups that rows join in turn;
    the error is the jackknife over groups, the mean is exact. Memory is ``groups x d`` float64, whatever
    the number of rows.

    Args:
        width: Width ``d`` of the vectors.
        groups: Number of jackknife groups, at least 2; merged accumulators need the same.

    >>> a, b = Dispersion(2), Dispersion(2)
    >>> a.update([[1, 0]]); b.update([[0, 1]])
    >>> a.merge(b)
    >>> a.mean()
    1.0
    """

    def __init__(self, width: int, groups: int = 32) -> None:
        if width < 1 or groups < 2:
            raise GeometryError(f"expected width >= 1 and groups >= 2, got {width} and {groups}")
        self.sums: Array = np.zeros((groups, width))
        self.counts: NDArray[np.int64] = np.zeros(groups, dtype=np.int64)

    @property
    def count(self) -> int:
        """Rows seen."""
        return int(self.counts.sum())

    def update(self, x: ArrayLike) -> None:
        """Add rows (n, d), or none: NoDirectionError if one is zero or not finite, else GeometryError."""
        u = unit_rows(x)
        if not len(u):
            return
        if u.shape[1] != self.sums.shape[1]:
            raise GeometryError(f"expected vectors of width {self.sums.shape[1]}, got {u.shape[1]}")
        groups = len(self.counts)
        start = self.count % groups
        order = (start + np.arange(len(u))) % groups
        for group in range(min(groups, len(u))):
            self.sums[order[group]] += u[group::groups].sum(axis=0)
        self.counts += np.bincount(order, minlength=groups)

    def merge(self, other: Dispersion) -> None:
        """Add the rows of ``other``. Raises GeometryError if widths or numbers of groups differ."""
        if self.sums.shape != other.sums.shape:
            raise GeometryError(
                f"expected an accumulator of shape {self.sums.shape}, got {other.sums.shape}"
            )
        self.sums += other.sums
        self.counts += other.counts

    def mean(self) -> float:
        """The dispersion of all rows seen. Raises TooFewVectorsError below two rows."""
        return mean_distance(self.sums.sum(axis=0), self.count)

    def estimate(self) -> Estimate:
        """The dispersion and its grouped-jackknife error, NaN if a group leaves below two; see `mean`."""
        total, n = self.sums.sum(axis=0), self.count
        mean = mean_distance(total, n)
        used = np.flatnonzero(self.counts)
        if n < 3 or len(used) < 2 or n - int(self.counts[used].max()) < 2:
            return Estimate(mean, float("nan"), n)
        left_out = [mean_distance(total - self.sums[g], n - int(self.counts[g])) for g in used]
        return Estimate(mean, jackknife_se(left_out), n)

    def state(self) -> dict[str, Any]:
        """The live arrays to save or send: ``sums`` (groups, width), float64; ``counts`` (groups,), int64."""
        return {"sums": self.sums, "counts": self.counts}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Dispersion:
        """An accumulator that continues from :meth:`state`."""
        sums = np.array(state["sums"], dtype=np.float64)
        new = cls(sums.shape[1], sums.shape[0])
        new.sums, new.counts = sums, np.array(state["counts"], dtype=np.int64)
        return new


_NOISE = 1e-12  # share of a row's length: closer to the mean, its direction is undefined


class Spectrum(NamedTuple):
    """Numbers of directions that vectors spread over; each is 1 for a single direction, NaN if all are 0.

    Attributes:
        rankme: Exp of the entropy of the singular values, to min(n, d). Garrido et al., ICML 2023.
        effective_rank: See :func:`effective_rank`; NaN where all rows are the same.
        participation_ratio: (Σλ)² / Σλ² of the covariance's eigenvalues, to min(n - 1, d); NaN where all
            rows are the same. Gao et al., bioRxiv 214262 (2017).
        stable_rank: Squared Frobenius over squared spectral norm, to min(n, d). Rudelson and Vershynin,
            JACM 54 (2007).
    """

    rankme: float
    effective_rank: float
    participation_ratio: float
    stable_rank: float


def spectrum(x: ArrayLike) -> Spectrum:
    """The four figures for the rows of ``x`` (n >= 3, d), all finite; else GeometryError.

    >>> round(spectrum([[1, 0], [-1, 0], [0, 1], [0, -1]]).stable_rank, 6)
    2.0
    """
    rows = _finite(x, 3)
    raw = _eigenvalues(rows)
    centred = _eigenvalues(rows - rows.mean(axis=0))
    singular = np.sqrt(raw)
    shares = (
        singular / singular.sum() + 1e-7 if singular.sum() > 0 else singular
    )  # its paper's constant
    return Spectrum(
        rankme=float(np.exp(-(shares * np.log(shares)).sum()))
        if singular.sum() > 0
        else float("nan"),
        effective_rank=_entropy_rank(_eigenvalues(_directions(rows))),
        participation_ratio=_ratio(float(centred.sum()) ** 2, float(np.square(centred).sum())),
        stable_rank=_ratio(float(raw.sum()), float(raw[-1])),
    )


def effective_rank(x: ArrayLike) -> float:
    """Effective number of dimensions that the rows of ``x`` (n >= 2, d) spread over, in [1, min(n, d)].

    Rows are centred, scaled to length one, and the entropy of the normalised eigenvalues of their
    covariance is exponentiated. Low: the texts (or tokens) lie along few directions around their mean.
    Differs from the Vendi score by the centring. GeometryError if rows are few, not finite or all the same.

    Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024),
    after Roy and Vetterli (2007).

    >>> round(effective_rank([[1, 0], [-1, 0], [0, 1], [0, -1]]), 6)
    2.0
    """
    directions = _directions(_finite(x, 2))
    if not len(directions):
        raise GeometryError(
            "expected rows that differ, got rows that are all the same: no effective rank"
        )
    return _entropy_rank(_eigenvalues(directions))


def _finite(x: ArrayLike, least: int) -> Array:
    rows = matrix(x)
    at_least(rows, least)
    if not np.isfinite(rows).all():
        raise GeometryError("expected finite vectors, got NaN or infinity; leave those rows out")
    return rows


def _directions(rows: Array) -> Array:
    """The rows around their mean, of length one, without those equal to the mean up to rounding."""
    centred = rows - rows.mean(axis=0)
    lengths = np.sqrt(np.einsum("ij,ij->i", centred, centred))
    kept = lengths > _NOISE * np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return np.asarray(centred[kept] / lengths[kept, None])


def _eigenvalues(rows: Array) -> Array:
    """Squared singular values of the rows, ascending, by the products of the smaller side; rounding is 0."""
    if not len(rows):
        return np.zeros(1)
    values = np.linalg.eigvalsh(rows.T @ rows if rows.shape[1] < len(rows) else rows @ rows.T)
    return np.asarray(np.where(values > 1e-13 * max(values[-1], 0.0), values, 0.0))


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
