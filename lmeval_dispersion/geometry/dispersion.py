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
    """A mean distance with its standard error.

    Attributes:
        mean: The mean distance.
        se: The jackknife standard error; NaN if it is undefined, as for two vectors.
        n: The number of vectors.
    """

    mean: float
    se: float
    n: int


def dispersion(x: ArrayLike) -> float:
    """Return the mean cosine distance over all pairs of rows.

    It is 0 if all rows point the same way, 1 if they are orthogonal on average, and at most
    n / (n - 1). Compare it only between models of one family, which share a tokenizer and an
    origin.

    Args:
        x: Shape (n, d) with n >= 2, any real dtype; computed in float64.

    Raises:
        TooFewVectorsError: There are fewer than two rows.
        NoDirectionError: A row is zero, or has NaN or infinity.
        GeometryError: ``x`` has another shape.

    Source: RD eq. 1 (the paper cited in :mod:`lmeval_dispersion.geometry`). The result of
    ``torchmetrics.functional.pairwise_cosine_similarity(reduction="mean")`` differs, since its mean
    includes the zeros of the diagonal.

    >>> dispersion([[1, 0], [0, 1]])
    1.0
    """
    rows = _rows(x)
    mean = mean_distance(_total(rows), len(rows))
    return mean if mean > _CANCELLED else float(contributions(rows).mean())


def contributions(x: ArrayLike) -> Array:
    """Return the mean cosine distance of each row to all other rows.

    The mean of these contributions is the dispersion.

    Args:
        x: Shape (n, d) with n >= 2.

    Returns:
        Shape (n,), in [0, 2].

    Raises:
        TooFewVectorsError: There are fewer than two rows.
        NoDirectionError: A row is zero, or has NaN or infinity.
        GeometryError: ``x`` has another shape.
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
    """Return the mean cosine distance over all pairs of unit vectors, computed from their sum.

    Args:
        total: Shape (d,), the sum of the vectors.
        n: Number of vectors.

    Raises:
        TooFewVectorsError: ``n`` is below 2.

    Source: RD eq. 1 (the paper cited in :mod:`lmeval_dispersion.geometry`).
    """
    if n < 2:
        raise TooFewVectorsError(f"expected at least 2 vectors, got {n}; pass more vectors")
    return (n - float(total @ total) / n) / (n - 1)


def mean_distances(squares: Array) -> Array:
    """Return the mean cosine distance of each unit vector to all other vectors.

    For vectors u_i with mean m it is (n |u_i - m|^2 + sum_j |u_j - m|^2) / (2 (n - 1)). This equals
    1 - (u_i.s - 1) / (n - 1) with s = n m, but stays exact for nearly parallel vectors.

    Args:
        squares: Shape (n,) with n > 1, the squared distance of each vector to the mean.

    Returns:
        Shape (n,).
    """
    n = len(squares)
    return np.asarray((n * squares + squares.sum()) / (2 * (n - 1)))


def dispersion_estimate(x: ArrayLike) -> Estimate:
    """Return the dispersion of the rows with its jackknife standard error.

    Args:
        x: Shape (n, d) with n >= 2.

    Raises:
        TooFewVectorsError: There are fewer than two rows.
        NoDirectionError: A row is zero, or has NaN or infinity.
        GeometryError: ``x`` has another shape.
    """
    return jackknifed(contributions(x))


def jackknifed(c: Array) -> Estimate:
    """Return the dispersion and its jackknife standard error, computed from contributions.

    Args:
        c: Shape (n,) with n > 1, the mean distance of each vector to all others.

    Returns:
        The estimate, with n; its standard error is NaN for n = 2.
    """
    n = len(c)
    return Estimate(float(c.mean()), jackknife_se(left_out(c)) if n > 2 else float("nan"), n)


def left_out(contributions: Array) -> Array:
    """Return the dispersion with each vector left out in turn.

    Args:
        contributions: Shape (n,) with n >= 3, the mean distance of each vector to the others.

    Returns:
        Shape (n,).
    """
    mean = float(contributions.mean())
    return np.asarray(mean + (mean - contributions) * 2 / (len(contributions) - 2))


def vendi_score(x: ArrayLike) -> float:
    """Return the Vendi score of the rows: the effective number of distinct directions.

    It is the exponential of the entropy of the eigenvalues of K / n, where K holds the cosines of
    all pairs. It is 1 if all rows point the same way and n if all are orthogonal; it never exceeds
    min(n, d).

    Args:
        x: Shape (n, d) with n >= 1.

    Raises:
        TooFewVectorsError: There are no rows.
        NoDirectionError: A row is zero, or has NaN or infinity.
        GeometryError: ``x`` has another shape.

    Source: Friedman and Dieng (2023), as in appendix A.5 of RD (the paper cited in
    :mod:`lmeval_dispersion.geometry`). Equals ``vendi_score.vendi.score_X(u)`` for the
    rows ``u`` scaled to length one.

    >>> round(vendi_score([[1, 0], [0, 1]]), 6)
    2.0
    """
    u = unit_rows(x)
    at_least(u, 1)
    return _entropy_rank(_eigenvalues(u))


class Dispersion:
    """Accumulates the dispersion of vectors that come in batches or from several processes.

    Only the sums of unit vectors are kept, in ``groups`` groups that rows join in turn. The mean is
    exact; its standard error is a jackknife over the groups. Merging two accumulators gives the
    figures of all their rows.

    Args:
        width: Width d of the vectors.
        groups: Number of groups, at least 2; merged accumulators must have equally many groups.

    Attributes:
        sums: Shape (groups, width), float64, the sum of the unit vectors in each group.
        counts: Shape (groups,), int64, the number of vectors in each group.

    Raises:
        GeometryError: ``width`` or ``groups`` is too small.

    >>> a, b = Dispersion(2), Dispersion(2)
    >>> a.update([[1, 0]]); b.update([[0, 1]])
    >>> a.merge(b)
    >>> a.mean()
    1.0
    """

    def __init__(self, width: int, groups: int = 32) -> None:
        if width < 1 or groups < 2:
            raise GeometryError(
                f"expected width >= 1 and groups >= 2, got width {width} and groups {groups}"
            )
        self.sums: Array = np.zeros((groups, width))
        self.counts: NDArray[np.int64] = np.zeros(groups, dtype=np.int64)

    @property
    def count(self) -> int:
        """The number of rows that were added."""
        return int(self.counts.sum())

    def update(self, x: ArrayLike) -> None:
        """Add rows.

        Args:
            x: Shape (n, d); n may be 0.

        Raises:
            NoDirectionError: A row is zero, or has NaN or infinity.
            GeometryError: ``x`` has another shape or width.
        """
        u = unit_rows(x)
        if not len(u):
            return
        if u.shape[1] != self.sums.shape[1]:
            raise GeometryError(
                f"expected vectors of width {self.sums.shape[1]}, got {u.shape[1]}; make an "
                "accumulator for each width"
            )
        groups = len(self.counts)
        start = self.count % groups
        order = (start + np.arange(len(u))) % groups
        for group in range(min(groups, len(u))):
            self.sums[order[group]] += u[group::groups].sum(axis=0)
        self.counts += np.bincount(order, minlength=groups)

    def merge(self, other: Dispersion) -> None:
        """Add the rows of another accumulator.

        Raises:
            GeometryError: The accumulators differ in width or in number of groups.
        """
        if self.sums.shape != other.sums.shape:
            raise GeometryError(
                f"expected an accumulator of shape {self.sums.shape}, got {other.sums.shape}; "
                "give both the same width and number of groups"
            )
        self.sums += other.sums
        self.counts += other.counts

    def mean(self) -> float:
        """Return the dispersion of all rows that were added.

        Raises:
            TooFewVectorsError: There are fewer than two rows.
        """
        return mean_distance(self.sums.sum(axis=0), self.count)

    def estimate(self) -> Estimate:
        """Return the dispersion of all rows that were added, with its standard error.

        The standard error is NaN if there are too few rows or groups to leave one out.

        Raises:
            TooFewVectorsError: There are fewer than two rows.
        """
        total, n = self.sums.sum(axis=0), self.count
        mean = mean_distance(total, n)
        used = np.flatnonzero(self.counts)
        if n < 3 or len(used) < 2 or n - int(self.counts[used].max()) < 2:
            return Estimate(mean, float("nan"), n)
        left_out = [mean_distance(total - self.sums[g], n - int(self.counts[g])) for g in used]
        return Estimate(mean, jackknife_se(left_out), n)

    def state(self) -> dict[str, Any]:
        """Return the arrays ``sums`` and ``counts`` by name, not copied, to save or send."""
        return {"sums": self.sums, "counts": self.counts}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Dispersion:
        """Return an accumulator that continues from copies of the arrays of :meth:`state`."""
        sums = np.array(state["sums"], dtype=np.float64)
        new = cls(sums.shape[1], sums.shape[0])
        new.sums, new.counts = sums, np.array(state["counts"], dtype=np.int64)
        return new


_NOISE = 1e-12  # share of a row's length: closer to the mean, its direction is undefined


class Spectrum(NamedTuple):
    """Four measures of how many directions vectors spread over.

    Each is 1 if all vectors lie along one direction, and NaN if all are zero.

    Attributes:
        rankme: Exponential of the entropy of the singular values, at most min(n, d). Garrido et
            al., ICML 2023.
        effective_rank: See :func:`effective_rank`; NaN if all rows are the same.
        participation_ratio: (Σλ)² / Σλ² over the eigenvalues λ of the covariance, at most
            min(n - 1, d); NaN if all rows are the same. Gao et al., bioRxiv 214262 (2017).
        stable_rank: Squared Frobenius norm over squared spectral norm, at most min(n, d). Rudelson
            and Vershynin, JACM 54 (2007).
    """

    rankme: float
    effective_rank: float
    participation_ratio: float
    stable_rank: float


def spectrum(x: ArrayLike) -> Spectrum:
    """Return four measures of how many directions the rows spread over.

    Args:
        x: Shape (n, d) with n >= 3, all finite.

    Raises:
        TooFewVectorsError: There are fewer than three rows.
        GeometryError: ``x`` has another shape, or NaN or infinity.

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
    """Return the effective number of dimensions that the rows spread over, in [1, min(n, d)].

    The rows are centred and scaled to length one; the result is the exponential of the entropy of
    their covariance's normalised eigenvalues. It is low if the rows lie along few directions around
    their mean. The Vendi score differs in that it does not centre the rows.

    Args:
        x: Shape (n, d) with n >= 2.

    Raises:
        TooFewVectorsError: There are fewer than two rows.
        GeometryError: ``x`` has another shape, or NaN or infinity, or all rows are the same.

    Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS
    2024), after Roy and Vetterli (2007).

    >>> round(effective_rank([[1, 0], [-1, 0], [0, 1], [0, -1]]), 6)
    2.0
    """
    directions = _directions(_finite(x, 2))
    if not len(directions):
        raise GeometryError(
            "expected rows that differ, got rows that are all the same, for which the effective "
            "rank is not defined"
        )
    return _entropy_rank(_eigenvalues(directions))


def _finite(x: ArrayLike, least: int) -> Array:
    rows = matrix(x)
    at_least(rows, least)
    if not np.isfinite(rows).all():
        raise GeometryError(
            "expected finite vectors, got rows with NaN or infinity; leave these rows out"
        )
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
