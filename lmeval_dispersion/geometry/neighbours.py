"""The nearest rows of every row of a matrix: proposed by products in float32, measured in float64.

The products of all pairs are nearly the whole cost; those in float32, of every pair once, take a quarter of
the time. They only propose: a few more rows than wanted are measured in float64, and rounding bounds how
near any other row can be. Rows for which the bound does not exclude all others (many are alike) are measured
against every row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.geometry.vectors import Array

Places = NDArray[np.int64]
Coarse = NDArray[np.float32]

_BLOCK = 1024  # rows a side of a block of products: 4 MB in float32
_MEASURED = 64  # rows whose proposals are widened to float64 at a time
_MORE = 8  # proposals beyond the rows wanted
_ROUNDING = 2.0**-24  # of float32


def nearest_rows(rows: NDArray[Any], centre: Array, count: int) -> tuple[Array, Places]:
    """Squared distances of every row of ``rows`` (n, d) to its ``count`` nearest others, and their places.

    Args:
        rows: Finite numbers of a float dtype.
        centre: A point (d,) amid the rows: distances come from products of the rows less this point.
        count: How many, from 1 to n - 1.

    Returns:
        Distances in float64, ascending, and places, both (n, count). A distance is off by the rounding of
        the products, less than 1e-14 of the largest squared length. Of equally near rows any may be named.
    """
    return _Nearest(rows, centre, count).all()


class _Nearest:
    def __init__(self, rows: NDArray[Any], centre: Array, count: int) -> None:
        self.rows, self.centre, self.count = rows, centre, count
        self.n, self.d = rows.shape
        self.blocks = [np.arange(at, min(at + _BLOCK, self.n)) for at in range(0, self.n, _BLOCK)]
        moved = map(self._moved, self.blocks)
        self.squares: Array = np.concatenate([np.einsum("ij,ij->i", part, part) for part in moved])
        self.scale = float(np.sqrt(self.squares.max()))

    def all(self) -> tuple[Array, Places]:
        distance = np.empty((self.n, self.count))
        place = np.empty((self.n, self.count), dtype=np.int64)
        proved = np.zeros(self.n, dtype=bool)
        proposals = self.count + _MORE
        if proposals < _BLOCK < self.n and self.scale > 0:  # else float64 is as fast
            coarse, near = self._proposed(proposals)
            for of in self.blocks:
                distance[of], place[of] = self._measured(of, near[of])
                proved[of] = self._excluded(of, distance[of, -1], coarse[of].max(axis=1).astype(np.float64))
        rest = np.flatnonzero(~proved)
        for at in range(0, len(rest), _BLOCK // 2):
            of = rest[at : at + _BLOCK // 2]
            distance[of], place[of] = self._of_all(of)
        return distance, place

    def _proposed(self, proposals: int) -> tuple[Coarse, Places]:
        """For every row some that are near by float32: how near, and their places, both (n, proposals).

        Nearness is |x_j|^2 - 2 x_i x_j of rows that are scaled to lengths of at most 1: the squared distance
        less |x_i|^2.
        """
        nearness = np.full((self.n, proposals), np.inf, dtype=np.float32)
        place = np.zeros((self.n, proposals), dtype=np.int64)
        squares = (self.squares / self.scale**2).astype(np.float32)

        def offer(of: Places, others: Places, products: Coarse) -> None:
            every = np.empty((len(of), proposals + len(others)), dtype=np.float32)
            every[:, :proposals] = nearness[of]
            np.add(products, squares[others], out=every[:, proposals:])
            # Places by comparison with the last value: `argpartition` takes five times as long.
            last = np.partition(every, proposals - 1, axis=1)[:, proposals - 1]
            row, column = np.divmod(np.flatnonzero(every <= last[:, None]), every.shape[1])
            if len(row) != len(of) * proposals:  # more than one has the last value
                column = np.argpartition(every, proposals - 1, axis=1)[:, :proposals].ravel()
                row = np.repeat(np.arange(len(of)), proposals)
            kept = place[of[row], np.minimum(column, proposals - 1)]
            kept = np.where(column < proposals, kept, others[0] + column - proposals)
            nearness[of], place[of] = (found.reshape(len(of), -1) for found in (every[row, column], kept))

        for i, of in enumerate(self.blocks):
            left = self._scaled(of)
            own = -2 * left @ left.T
            np.fill_diagonal(own, np.inf)
            offer(of, of, own)
            for others in self.blocks[i + 1 :]:
                products = -2 * left @ self._scaled(others).T
                offer(of, others, products)
                offer(others, of, products.T)
        return nearness, place

    def _excluded(self, of: Places, farthest: Array, others: Array) -> NDArray[np.bool_]:
        """Whether no row but the proposals can be nearer than the squared distance ``farthest`` (b,).

        All other rows are at least as near as ``others`` by float32. A row that is nearer than ``farthest``
        is no longer than |x_i| + the distance, which bounds the rounding of its nearness: d + 2 roundings of
        twice the product of the lengths, and some of the squared length.
        """
        length = np.sqrt(self.squares[of]) / self.scale
        nearness = farthest / self.scale**2 - length**2
        longest = length + np.sqrt(np.maximum(farthest, 0)) / self.scale
        rounding = _ROUNDING * longest * ((2.1 * self.d + 8) * length + 4 * longest) + 1e-30
        return np.asarray(nearness + rounding < others)

    def _measured(self, of: Places, near: Places) -> tuple[Array, Places]:
        """The nearest of ``near`` (b, m) to each row, by products in float64."""
        products = np.empty(near.shape)
        for at in range(0, len(of), _MEASURED):
            part = slice(at, at + _MEASURED)
            others = self._moved(near[part].ravel()).reshape(*near[part].shape, self.d)
            products[part] = (others @ self._moved(of[part])[:, :, None])[:, :, 0]
        return self._ordered(self.squares[near] + self.squares[of, None] - 2 * products, near)

    def _of_all(self, of: Places) -> tuple[Array, Places]:
        """The same of all rows."""
        left = self._moved(of)
        products = np.concatenate([left @ self._moved(others).T for others in self.blocks], axis=1)
        squared = self.squares[None, :] + self.squares[of, None] - 2 * products
        squared[np.arange(len(of)), of] = np.inf
        near = np.argpartition(squared, self.count - 1, axis=1)[:, : self.count]
        return self._ordered(np.take_along_axis(squared, near, axis=1), near)

    def _ordered(self, squared: Array, near: Places) -> tuple[Array, Places]:
        order = np.argsort(squared, axis=1, kind="stable")[:, : self.count]
        return np.take_along_axis(squared, order, axis=1), np.take_along_axis(near, order, axis=1)

    def _moved(self, of: Places) -> Array:
        return self.rows[of].astype(np.float64) - self.centre

    def _scaled(self, of: Places) -> Coarse:
        moved = self._moved(of)
        return np.divide(moved, self.scale, out=np.empty(moved.shape, dtype=np.float32), casting="same_kind")
