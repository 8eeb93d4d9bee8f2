"""Centred unit vectors: the dispersion of thousands of subsets by closed forms.

With rows c_i = u_i - mean(u) of all n vectors, a subset S of m rows has

    D(S) = (sum |c_i|^2 - |sum c_i|^2 / m) / (m - 1),

the mean cosine distance over its pairs. Both sums have the size of D itself, so rows stored in float32 keep
about seven digits of it however close to parallel the vectors are.

Source: RD eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import TooFewVectorsError
from lmeval_dispersion.geometry.dispersion import Estimate, jackknifed, mean_distances
from lmeval_dispersion.geometry.pairs import Array

Rows = NDArray[np.int64]

_BLOCK = 256  # rows gathered at a time: a temporary that stays in the cache


class CentredVectors:
    """The unit vectors of a run, centred on their mean, for the dispersion of many subsets.

    Args:
        unit: Shape (n, d), float32, rows of length one. The array is centred in place.

    Attributes:
        rows: Shape (n, d), float32, the centred vectors.
        mean: Shape (d,), the mean of the vectors.
        squares: Shape (n,), the squared length of each centred vector.
    """

    def __init__(self, unit: NDArray[np.float32]) -> None:
        self.rows = unit
        n = len(unit)
        self.mean: Array = np.zeros(unit.shape[1])
        for i in range(0, n, _BLOCK):
            self.mean += unit[i : i + _BLOCK].sum(axis=0, dtype=np.float64)
        self.mean /= max(n, 1)
        self.squares: Array = np.empty(n)
        for i in range(0, n, _BLOCK):
            block = unit[i : i + _BLOCK].astype(np.float64) - self.mean
            self.squares[i : i + _BLOCK] = np.einsum("ij,ij->i", block, block)
            unit[i : i + _BLOCK] = block
        self._sum: Array = np.zeros(unit.shape[1])  # sum of all centred rows: zero up to rounding
        for i in range(0, n, _BLOCK):
            self._sum += unit[i : i + _BLOCK].sum(axis=0, dtype=np.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def dispersions(self, subsets: Sequence[Rows]) -> Array:
        """Return the dispersion of each subset.

        Args:
            subsets: For each subset the row numbers of its vectors.

        Returns:
            Shape (subsets,), in [0, 2].

        Raises:
            TooFewVectorsError: A subset has fewer than two vectors.
        """
        values = np.empty(len(subsets))
        for i, subset in enumerate(subsets):
            m = len(subset)
            if m < 2:
                raise TooFewVectorsError(
                    f"expected subsets of at least 2 vectors, got a subset of {m}; "
                    "leave out smaller subsets"
                )
            total = self._total(subset)
            values[i] = (self.squares[subset].sum() - total @ total / m) / (m - 1)
        return values

    def contributions(self, rows: Rows | None = None) -> Array:
        """Return the mean cosine distance of each vector of a subset to the others in the subset.

        Args:
            rows: Row numbers of the subset's vectors; None for all vectors.

        Returns:
            Shape (m,) for m vectors, in [0, 2].

        Raises:
            TooFewVectorsError: There are fewer than two vectors.
        """
        m = len(self) if rows is None else len(rows)
        if m < 2:
            raise TooFewVectorsError(f"expected at least 2 vectors, got {m}; pass more vectors")
        return mean_distances(self._squares_around_own_mean(rows))

    def estimate(self, rows: Rows | None = None) -> Estimate:
        """Return the dispersion of a subset, or of all vectors, with its jackknife standard error.

        Args:
            rows: Row numbers of the subset's vectors; None for all vectors.

        Raises:
            TooFewVectorsError: There are fewer than two vectors.
        """
        return jackknifed(self.contributions(rows))

    def composed(self, parts: Sequence[Rows], shares: Array) -> Estimate:
        """Return the dispersion of a mixture of parts with given shares, and its standard error.

        This dispersion is the expected distance of two different documents. Each document is drawn
        from a part with a probability equal to the part's share. The standard error is computed
        part by part, so that a difference between the parts does not add to it.

        Args:
            parts: For each of two or more parts the row numbers of its two or more vectors.
            shares: Shape (parts,), the shares, which sum to 1.
        """
        means = np.array([self._total(rows) / len(rows) for rows in parts])
        squares = [self.squares[rows] for rows in parts]
        level = np.array([q.mean() for q in squares])
        centre = shares @ means
        value = variance = 0.0
        for rows, q, spread, share, mean in zip(parts, squares, level, shares, means, strict=True):
            n = len(rows)
            to = np.stack([centre - share * mean, mean]).astype(np.float32)
            inner = np.concatenate(
                [self.rows[rows[i : i + _BLOCK]] @ to.T for i in range(0, n, _BLOCK)]
            ).astype(np.float64)
            inside = q / 2 + (n * spread - q) / (2 * (n - 1)) - (n * inner[:, 1] - q) / (n - 1)
            outside = (1 - share) * q / 2 + (shares @ level - share * spread) / 2 - inner[:, 0]
            distance = outside + share * inside
            value += share * float(distance.mean())
            variance += (2 * share) ** 2 * float(distance.var(ddof=1)) / n
        return Estimate(value, float(np.sqrt(variance)), sum(map(len, parts)))

    def _squares_around_own_mean(self, rows: Rows | None) -> Array:
        if rows is None:
            return self.squares
        centre = self._total(rows) / len(rows)
        inner = np.empty(len(rows))
        for i in range(0, len(rows), _BLOCK):
            block = rows[i : i + _BLOCK]
            inner[i : i + _BLOCK] = self.rows[block] @ centre.astype(np.float32)
        return np.asarray(self.squares[rows] - 2 * inner + centre @ centre)

    def _total(self, rows: Rows) -> Array:
        """Sum of these distinct centred rows, shape (d,): float32 inside a block, float64 over blocks."""
        if 2 * len(rows) > len(self):  # the others are fewer
            return np.asarray(self._sum - self._total(np.setdiff1d(np.arange(len(self)), rows)))
        total: Array = np.zeros(self.rows.shape[1])
        for i in range(0, len(rows), _BLOCK):
            block = self.rows[rows[i : i + _BLOCK]]
            total += np.ones(len(block), dtype=np.float32) @ block
        return total
