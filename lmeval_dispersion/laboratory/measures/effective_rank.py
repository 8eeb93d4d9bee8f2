"""Effective rank, and Diff-eRank: how many dimensions of noise training took out of a model's token states.

Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lmeval_dispersion.errors import GeometryError, TooFewVectorsError
from lmeval_dispersion.laboratory.causal_model import CausalModel
from lmeval_dispersion.laboratory.controls import untrained
from lmeval_dispersion.laboratory.study import Study


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


class TokenRanks(NamedTuple):
    """Effective ranks of the token states of a text, averaged over texts.

    Attributes:
        token_effective_rank: Of the model; 1 ... min(tokens, width).
        untrained_effective_rank: Of the same architecture at random weights, on the same texts.
        diff_erank: The second minus the first; higher: training removed more redundant dimensions.
    """

    token_effective_rank: float
    untrained_effective_rank: float
    diff_erank: float


Bin = tuple[NDArray[np.uint32], NDArray[np.int64]]  # segments, and which of them


def token_ranks(
    study: Study, causal: CausalModel, bins: Sequence[Bin], batch: int, seed: int
) -> list[TokenRanks]:
    """:class:`TokenRanks` of every bin of segments, at the final layer.

    Raises:
        DispersionError: The architecture cannot be built at random weights.
    """
    values = study.rows("eranks", (2, len(bins)))
    models: Any = (("trained", lambda: causal), ("untrained", lambda: untrained(causal, seed)))
    for row, (name, built) in enumerate(models):
        other = built()

        def one_bin(number: int, row: int = row, other: CausalModel = other) -> None:
            tokens, members = bins[number]
            found: list[float] = []

            def see(_layer: str, _first: int, states: Tensor) -> Callable[[], None]:
                return partial(found.extend, [effective_rank(text) for text in states.float().cpu().numpy()])

            for start in range(0, len(members), batch):
                other.forward(np.asarray(tokens[np.sort(members)[start : start + batch]]), ["last"], see)
            values[row, number] = np.mean(found)

        study.work(f"eranks-{name}", len(bins), one_bin)
    return [TokenRanks(float(a), float(b), float(b - a)) for a, b in np.asarray(values).T]
