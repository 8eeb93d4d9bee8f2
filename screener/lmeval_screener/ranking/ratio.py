"""The second figure: within(T) / within(R), Euclidean, of rows as the normed state meets them.

A softmax over ``row · state`` does not change when one vector is added to every row, nor when a scale moves
between the final norm's weight γ and the rows. The cosine G sees the first, the Euclidean G the second, and
this figure neither: a difference of two rows has no common vector, γ takes the scale in, and a ratio has no
unit. Two copies of a model that predict the same therefore differ in it by rounding alone.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import Array, within
from lmeval_dispersion.statistics import jackknife_se
from lmeval_screener.ranking.gap import Difference, paired_difference
from lmeval_screener.weights.projection import FinalNorm

_SIGMAS = 3  # of rounding that a difference must exceed
#: Bits of the significand, the hidden one included, of the stored types; other types are blocks of integers.
_SIGNIFICAND = {"F64": 24, "F32": 24, "F16": 11, "BF16": 8, "F8_E4M3": 4, "F8_E5M2": 3}  # read as float32
_BLOCK = 32  # numbers that share a scale


@dataclass(frozen=True, eq=False)
class Ratio:
    """The figure of one checkpoint.

    Attributes:
        mean: within(T) / within(R).
        se: Its jackknife standard error over tokens of both sets; γ is held fixed.
        rounding: How far the stored element type may have moved it, three standard deviations.
        left_out_domain: The figure without domain token i, shape (|T|,).
        left_out_reference: The figure without reference token j, shape (|R|,).
    """

    mean: float
    se: float
    rounding: float
    left_out_domain: Array
    left_out_reference: Array

    def minus(self, other: Ratio) -> Difference:
        """This figure minus another checkpoint's, paired over tokens."""
        return paired_difference(
            self.mean - other.mean,
            self.left_out_domain - other.left_out_domain,
            self.left_out_reference - other.left_out_reference,
        )

    def above(self, other: Ratio) -> bool:
        """Whether it is larger than another checkpoint's by more than both are rounded."""
        return self.mean - self.rounding > other.mean + other.rounding


def ratio(domain: NDArray[Any], reference: NDArray[Any], norm: FinalNorm, dtype: str) -> Ratio:
    """The ratio of rows of T (n, d) and R (m, d), as stored, behind a final norm."""
    seen = norm.effective(domain), norm.effective(reference)
    t, r = (within(rows, "euclidean") for rows in seen)
    if not r.mean > 0:
        raise GeometryError("the final norm leaves no difference between everyday tokens")
    mean = t.mean / r.mean
    left_domain, left_reference = t.left_out / r.mean, t.mean / r.left_out
    share = sum(
        _rounded(rounding(rows, dtype), weight_of(norm), part.mean)
        for rows, part in ((domain, t), (reference, r))
    )
    # A scale that moved into γ was rounded there too: it weighs the dimensions of T and of R otherwise.
    spreads = [rows.var(axis=0) / rows.var(axis=0).sum() for rows in seen]
    share += _SIGMAS * _relative(dtype) * float(np.linalg.norm(spreads[0] - spreads[1]))
    se = jackknife_se(left_domain, left_reference)
    return Ratio(mean, se, mean * share, left_domain, left_reference)


def weight_of(norm: FinalNorm) -> Array:
    """γ, which is known here."""
    if norm.weight is None:
        raise ValueError("expected a final norm whose weight is known")
    return norm.weight


def rounding(rows: NDArray[Any], dtype: str) -> Array:
    """Standard deviation of what was lost when each number of the rows was stored."""
    values: Array = np.abs(rows.astype(np.float64))
    if _significand(dtype) is not None:
        return values * _relative(dtype)
    # Integers of so many bits, times a scale that each block has.
    count, width = values.shape
    padded = np.pad(values, ((0, 0), (0, -width % _BLOCK)))
    largest = padded.reshape(count, -1, _BLOCK).max(axis=2, keepdims=True)
    step = 2 * largest / (2 ** _bits(dtype) - 1)
    errors: Array = np.repeat(step / math.sqrt(12), _BLOCK, axis=2).reshape(count, -1)[:, :width]
    return errors


def _rounded(errors: Array, weight: Array, mean: float) -> float:
    """By what share rounding moves a mean distance: at random, and up, as any noise adds to distances."""
    variances = np.square(errors * weight).mean(axis=1)
    at_random = _SIGMAS * 2 * math.sqrt(float(variances.mean()) / len(errors))
    return float((at_random + errors.shape[1] * variances.mean() / mean) / mean)


def _significand(dtype: str) -> int | None:
    return next((bits for name, bits in _SIGNIFICAND.items() if dtype.upper().startswith(name)), None)


def _relative(dtype: str) -> float:
    """Standard deviation of rounding to nearest, as a share of the number."""
    bits = _significand(dtype)
    return math.ldexp(1 / math.sqrt(3), -(_bits(dtype) if bits is None else bits))


def _bits(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 4
