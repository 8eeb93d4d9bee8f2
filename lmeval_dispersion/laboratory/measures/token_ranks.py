"""Diff-eRank: how many dimensions of noise training took out of a model's token states.

Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.geometry import effective_rank
from lmeval_dispersion.laboratory.causal_model import CausalModel
from lmeval_dispersion.laboratory.controls import untrained
from lmeval_dispersion.laboratory.study import Study


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
