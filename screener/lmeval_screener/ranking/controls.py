"""Gauge controls: what of G can move although no prediction does, and two figures that cannot.

A softmax over ``row · state`` does not change when one vector is added to every row, nor when a scale moves
between the final norm's weight γ and the rows. The cosine G sees the first, the Euclidean G the second.
Beside G therefore stand

- the cosine G of rows *centred* by the mean of a fixed sample of rows, and
- within(T) / within(R), Euclidean, of the rows as the normed state meets them: ``γ ∘ row``. A difference of
  two rows has no common vector, γ takes the scale in, and the ratio has no unit: nothing moves it that moves
  no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.geometry import Array, within
from lmeval_dispersion.statistics import jackknife_se
from lmeval_screener.ranking.gap import Difference, gap, paired_difference
from lmeval_screener.weights.final_norm import FinalNorm


@dataclass(frozen=True, eq=False)
class Control:
    """One control of one checkpoint.

    Attributes:
        mean: The figure.
        se: Its jackknife standard error over tokens; the sample's mean and γ are held fixed.
        left_out_domain: The figure without domain token i, shape (|T|,).
        left_out_reference: The figure without reference token j, shape (|R|,).
    """

    mean: float
    se: float
    left_out_domain: Array
    left_out_reference: Array

    def minus(self, other: Control) -> Difference:
        """This figure minus another checkpoint's, paired over tokens."""
        return paired_difference(
            self.mean - other.mean,
            self.left_out_domain - other.left_out_domain,
            self.left_out_reference - other.left_out_reference,
        )


@dataclass(frozen=True, eq=False)
class Controls:
    """The controls of one checkpoint; where one is not known it is a sentence that says why.

    Attributes:
        centred: Cosine G of rows less the mean of the sample.
        final_norm: within(T) / within(R), Euclidean, of rows times γ.
        sample: Rows in the sample.
        tensor: Name of γ; None where there is none.
    """

    centred: Control | str
    final_norm: Control | str
    sample: int
    tensor: str | None


NAMES = {"centred": "G of centred rows", "final_norm": "within(T) / within(R) of rows times the final norm"}


def controls(
    domain: NDArray[Any], reference: NDArray[Any], sample: NDArray[Any], norm: FinalNorm | str
) -> Controls:
    """The controls of rows of T (n, d) and R (m, d), with a sample of rows (k, d) and the final norm.

    Raises:
        GeometryError: A centred row is zero, or fewer than three rows.
    """
    mean = sample.astype(np.float64).mean(axis=0)
    centred = gap(domain - mean, reference - mean, "cosine")
    return Controls(
        Control(centred.mean, centred.se, centred.left_out_domain, centred.left_out_reference),
        norm if isinstance(norm, str) else _ratio(norm.effective(domain), norm.effective(reference)),
        len(sample),
        None if isinstance(norm, str) else norm.name,
    )


def _ratio(domain: Array, reference: Array) -> Control:
    """within(T) / within(R), Euclidean."""
    t, r = within(domain, "euclidean"), within(reference, "euclidean")
    left_domain, left_reference = t.left_out / r.mean, t.mean / r.left_out
    return Control(t.mean / r.mean, jackknife_se(left_domain, left_reference), left_domain, left_reference)


def reversals(members: Sequence[tuple[str, Controls | None]], apart: Sequence[tuple[int, int]]) -> list[str]:
    """Sentences for the pairs of a group that G tells apart and a control orders the other way.

    Args:
        members: Label and controls of each checkpoint of the group.
        apart: Positions (better, worse) of the pairs that G tells apart.
    """
    sentences = []
    for name, called in NAMES.items():
        found = []
        for better, worse in apart:
            a, b = (getattr(members[i][1], name, None) for i in (better, worse))
            if isinstance(a, Control) and isinstance(b, Control) and (d := a.minus(b)).mean < 0:
                found.append(
                    f"{members[better][0]} over {members[worse][0]} ({d.mean:+.4f} ± {d.se:.4f} there)"
                )
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            sentences.append(
                f"The order changes under a control: by G {', '.join(found[:3])}{more}, by {called} the "
                "other way round."
            )
    return sentences
