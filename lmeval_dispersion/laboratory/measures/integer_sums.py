"""Dispersion sums as integers: added up in any order, by any number of processes, to the same bits.

A unit vector's entries are rounded to multiples of 2^-40. A sum over a million vectors stays inside int64,
and D moves by less than 1e-11, far below the float32 of the states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.geometry import Dispersion, unit_rows

GROUPS = 32  # jackknife groups, as in geometry.Dispersion

SCALE = 2.0**40  # how many steps a sum has in 1


def empty_sums(layers: int, width: int) -> NDArray[np.int64]:
    """Sums of no vectors yet: shape (layers, GROUPS, width + 1); the last column counts."""
    return np.zeros((layers, GROUPS, width + 1), dtype=np.int64)


def add_vectors(sums: NDArray[np.int64], layer: int, first: int, x: ArrayLike) -> None:
    """Add the rows of ``x`` (n, d) to a layer; row i is number ``first + i`` of the data and sets its group.

    Raises:
        NoDirectionError: A zero or non-finite row; nothing is added.
    """
    units = np.rint(unit_rows(x) * SCALE).astype(np.int64)
    group = (first + np.arange(len(units))) % GROUPS
    np.add.at(sums[layer, :, : units.shape[1]], group, units)
    sums[layer, :, -1] += np.bincount(group, minlength=GROUPS)


def dispersion_of(sums: NDArray[np.int64]) -> Dispersion:
    """The accumulator of one layer's sums (GROUPS, width + 1), with its mean and its jackknife error."""
    state: dict[str, Any] = {"sums": sums[:, :-1] / SCALE, "counts": sums[:, -1]}
    return Dispersion.from_state(state)
