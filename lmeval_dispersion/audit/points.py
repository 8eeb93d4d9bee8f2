"""Unit vectors prepared for thousands of subsets: closed forms in float32 storage and float64 sums.

With rows c_i = u_i - mean(u) of all n vectors, a subset S of m rows has

    D(S) = (sum |c_i|^2 - |sum c_i|^2 / m) / (m - 1),

the mean cosine distance over its pairs. Both sums have the size of D itself, so rows stored in float32 keep
about seven digits of it however close to parallel the vectors are; tests/test_audit_points.py compares with
float64 and with the pairwise loop.

Source: RD eq. 1, by the closed form of ``lmeval_dispersion.geometry``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import TooFewVectorsError
from lmeval_dispersion.geometry import Estimate, jackknife_se

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

_BLOCK = 1024  # rows or subsets held in a temporary at a time
_WIDTH = 512  # columns summed at a time: the temporary of one block of subsets stays small


class Points:
    """The vectors of a run, centred on their mean.

    Args:
        unit: Unit rows, shape (n, d), float32, none of them NaN. They are centred in place.
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

    def __len__(self) -> int:
        return len(self.rows)

    def dispersions(self, subsets: Sequence[Rows]) -> Array:
        """Dispersion of each subset of rows (at least two each); shape (subsets,), in [0, 2].

        Raises:
            TooFewVectorsError: A subset has fewer than two rows.
        """
        from scipy.sparse import csr_matrix

        sizes = np.array([len(subset) for subset in subsets], dtype=np.int64)
        if sizes.size and sizes.min() < 2:
            raise TooFewVectorsError(f"expected subsets of at least 2 documents, got one of {sizes.min()}")
        found = np.empty(len(subsets))
        for i in range(0, len(subsets), _BLOCK):
            chosen, size = subsets[i : i + _BLOCK], sizes[i : i + _BLOCK]
            columns = np.concatenate(chosen)
            starts = np.concatenate([[0], np.cumsum(size)])
            selection = csr_matrix(
                (np.ones(len(columns), dtype=np.float32), columns, starts), shape=(len(chosen), len(self))
            )
            lengths = np.zeros(len(chosen))
            for j in range(0, self.rows.shape[1], _WIDTH):
                sums = (selection @ self.rows[:, j : j + _WIDTH]).astype(np.float64)
                lengths += np.einsum("ij,ij->i", sums, sums)
            squares = np.add.reduceat(self.squares[columns], starts[:-1])
            found[i : i + _BLOCK] = (squares - lengths / size) / (size - 1)
        return found

    def contributions(self, rows: Rows | None = None) -> Array:
        """Mean distance of each of these rows (default: all) to the others of them; shape (m,), in [0, 2].

        Their mean is the dispersion of the subset; low values are texts the model hardly tells from the
        rest.

        Raises:
            TooFewVectorsError: Fewer than two rows.
        """
        m = len(self) if rows is None else len(rows)
        if m < 2:
            raise TooFewVectorsError(f"expected at least 2 documents, got {m}")
        squares = self._squares_around_own_mean(rows)
        return np.asarray((m * squares + squares.sum()) / (2 * (m - 1)))

    def estimate(self, rows: Rows | None = None) -> Estimate:
        """Dispersion of these rows (default: all) with its jackknife error over documents.

        Raises:
            TooFewVectorsError: Fewer than two rows.
        """
        c = self.contributions(rows)
        mean, m = float(c.mean()), len(c)
        if m == 2:
            return Estimate(mean, float("nan"), m)
        return Estimate(mean, jackknife_se(left_out(c)), m)

    def _squares_around_own_mean(self, rows: Rows | None) -> Array:
        if rows is None:
            return self.squares
        centre = np.zeros(self.rows.shape[1])
        for i in range(0, len(rows), _BLOCK):
            centre += self.rows[rows[i : i + _BLOCK]].sum(axis=0, dtype=np.float64)
        centre /= len(rows)
        inner = np.empty(len(rows))
        for i in range(0, len(rows), _BLOCK):
            block = rows[i : i + _BLOCK]
            inner[i : i + _BLOCK] = self.rows[block] @ centre.astype(np.float32)
        return np.asarray(self.squares[rows] - 2 * inner + centre @ centre)


def left_out(contributions: Array) -> Array:
    """The dispersion without document i, one value a document, from their contributions; shape (m,), m >= 3.

    Leaving i out moves the mean D by (D - c_i) 2/(m - 2).
    """
    m, mean = len(contributions), contributions.mean()
    return np.asarray(mean + (mean - contributions) * 2 / (m - 2))
