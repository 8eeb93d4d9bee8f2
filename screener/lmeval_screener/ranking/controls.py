"""Gauge controls: what of G can move although no prediction does, and two figures that cannot.

A softmax over ``row · state`` does not change when one vector is added to every row, nor when a scale moves
between the final norm's weight γ and the rows. The cosine G sees the first, the Euclidean G the second.
Beside G therefore stand

- the cosine G of rows *centred* by the mean of a fixed sample of rows, and
- within(T) / within(R), Euclidean, of the rows as the normed state meets them: ``γ ∘ row``. A difference of
  two rows has no common vector, γ takes the scale in, and the ratio has no unit: nothing moves it that moves
  no prediction.

Beside them stand plain figures that could rank as well as G does: the rows' norm, the effective rank of T's
rows, and G's place among sets of random tokens. The latter is shown and never ranked by: the random sets'
G moves with training too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import GeometryError
from lmeval_dispersion.geometry import Array, effective_rank, unit_rows, within
from lmeval_dispersion.statistics import jackknife_se
from lmeval_screener.ranking.gap import Difference, gap, paired_difference
from lmeval_screener.weights.final_norm import FinalNorm

#: Raised when a control is computed in another way: what an older rule gave is read again.
CONTROLS = 1
#: Times |T|: random tokens that the sets are drawn from, where so many fit into the bytes.
POOL = 4

_SETS = 200  # random sets of tokens
_SEED = 20260501


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
        row_norm: Mean Euclidean norm of the sample's rows, in the unit of the rows.
        effective_rank: Of T's rows: how many dimensions they spread over, in [1, |T| - 1].
        random_tokens: G among the G of random sets of tokens.
    """

    centred: Control | str
    final_norm: Control | str
    sample: int
    tensor: str | None
    row_norm: float = math.nan
    effective_rank: float | str = "it was not computed"
    random_tokens: RandomTokens | str = "no random tokens were read"


@dataclass(frozen=True)
class RandomTokens:
    """The cosine G of T against that of random sets of as many tokens of T's range of ids, with the same R.

    Attributes:
        z: G of T minus their mean, over their standard deviation.
        mean: Of the random sets' G.
        sd: Their standard deviation, corrected for sets that share tokens.
        rows: Tokens that the sets were drawn from.
    """

    z: float
    mean: float
    sd: float
    rows: int


NAMES = {"centred": "G of centred rows", "final_norm": "within(T) / within(R) of rows times the final norm"}


def controls(
    domain: NDArray[Any],
    reference: NDArray[Any],
    sample: NDArray[Any],
    norm: FinalNorm | str,
    others: NDArray[Any] | None = None,
) -> Controls:
    """The controls of rows of T (n, d) and R (m, d), with a sample of rows (k, d) and the final norm.

    Args:
        domain: Rows of T.
        reference: Rows of R.
        sample: Rows of a sample of the whole matrix.
        norm: The final norm; a sentence where it is not known.
        others: Rows of random tokens of T's range of ids, shape (p, d); None for none.

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
        float(np.linalg.norm(sample.astype(np.float64), axis=1).mean()),
        _effective_rank(domain),
        "no random tokens were read" if others is None else random_tokens(domain, reference, others),
    )


def _effective_rank(domain: NDArray[Any]) -> float | str:
    try:
        return effective_rank(domain)
    except GeometryError as error:
        return str(error)


def random_tokens(domain: NDArray[Any], reference: NDArray[Any], others: NDArray[Any]) -> RandomTokens | str:
    """Where G of T (n, d) stands among random sets of n of the rows ``others`` (p, d), against R (m, d).

    A sentence where there are fewer than 2 n rows with a direction. Sets of a small pool share tokens, which
    narrows their spread by √(1 - n/p); the standard deviation is divided by that. The sets are the same in
    every checkpoint.
    """
    n = len(domain)
    others = others[others.any(axis=1)]
    if len(others) < 2 * n:
        return f"there are {len(others)} random tokens of its range of ids within 1 MB, expected {2 * n}"
    t, r, u = (unit_rows(rows) for rows in (domain, reference, others))
    draw = np.random.default_rng(_SEED)
    members = np.zeros((_SETS, len(u)))
    for row in members:
        row[draw.choice(len(u), n, replace=False)] = 1
    centre = r.mean(axis=0)

    def gaps(sums: Array) -> Array:
        # Mean pair distances of unit rows by their sums: 1 - (|Σu|² - n) / n(n - 1), and 1 - Σu·r̄ / n.
        inside = 1 - (np.square(sums).sum(axis=1) - n) / (n * (n - 1))
        return np.asarray(inside + 1 - sums @ centre / n)

    null = gaps(members @ u)
    sd = float(null.std(ddof=1)) / math.sqrt(1 - n / len(u))
    if not sd > 0:
        return "the random sets do not differ"
    own = float(gaps(t.sum(axis=0)[None])[0])
    return RandomTokens((own - float(null.mean())) / sd, float(null.mean()), sd, len(u))


def random_ids(
    domain: Sequence[int], taken: Sequence[int], sample: Sequence[int], rows: int, most: int
) -> tuple[list[int], list[int]]:
    """Ids of random tokens in T's range of ids: those of the sample, and up to ``most`` others to be read.

    Ids follow frequency in most vocabularies: digits lie among single characters, and so do these. A range
    that is too narrow is widened evenly.

    Args:
        domain: Ids of T.
        taken: Ids of T and R.
        sample: Ids that are read anyway.
        rows: Ids end below this.
        most: How many others may be read.

    Returns:
        Ids of the sample inside the range, and the others, ascending.
    """
    used, wanted = set(taken), POOL * len(domain)
    low, high = min(domain), max(domain)

    def free() -> int:
        return high - low + 1 - sum(low <= i <= high for i in used)

    while free() < wanted and (low > 0 or high < rows - 1):
        low, high = max(low - wanted, 0), min(high + wanted, rows - 1)
    own = [i for i in sample if low <= i <= high and i not in used]
    used.update(own)
    count = min(most, max(wanted - len(own), 0))
    there = [i for i in range(low, high + 1) if i not in used]
    if len(there) <= count:
        return own, there
    # Near T where the range is that narrow; at random over a wide one.
    picked = np.random.default_rng(_SEED).choice(len(there), count, replace=False)
    return own, sorted(there[i] for i in picked)


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
