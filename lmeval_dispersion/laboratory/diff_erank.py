"""Diff-eRank: how many dimensions of noise training took out of a model's token states.

Source: "Diff-eRank: A Novel Rank-Based Metric for Evaluating Large Language Models" (NeurIPS 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.laboratory.engine import Engine
from lmeval_dispersion.laboratory.runs import Run
from lmeval_dispersion.laboratory.statistics import effective_rank
from lmeval_dispersion.model.parts import unwrapped


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


Group = tuple[NDArray[np.uint32], NDArray[np.int64]]  # segments, and which of them


def token_ranks(run: Run, engine: Engine, groups: Sequence[Group], batch: int, seed: int) -> list[TokenRanks]:
    """:class:`TokenRanks` of every group of segments, at the final layer.

    Raises:
        DispersionError: The architecture cannot be built at random weights.
    """
    values = run.rows("eranks", (2, len(groups)))
    models: Any = (("trained", lambda: engine), ("untrained", lambda: _untrained(engine, seed)))
    for row, (name, built) in enumerate(models):
        other = built()

        def one_group(number: int, row: int = row, other: Engine = other) -> None:
            tokens, members = groups[number]
            found: list[float] = []

            def see(_layer: str, _first: int, states: Tensor) -> None:
                found.extend(effective_rank(text) for text in states.float().cpu().numpy())

            for start in range(0, len(members), batch):
                other.run(np.asarray(tokens[np.sort(members)[start : start + batch]]), ["last"], see)
            values[row, number] = np.mean(found)

        run.work(f"eranks-{name}", len(groups), one_group)
    return [TokenRanks(float(a), float(b), float(b - a)) for a, b in np.asarray(values).T]


def _untrained(engine: Engine, seed: int) -> Engine:
    import torch
    import transformers

    model: Any = unwrapped(engine.loaded.model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            built = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        except (ValueError, TypeError) as error:
            raise DispersionError(
                f"{engine.loaded.name} cannot be built at random weights, which Diff-eRank needs: {error}"
            ) from error
    built = built.to(engine.loaded.device).eval().requires_grad_(False)
    return Engine(engine.loaded._replace(model=built, name=f"{engine.loaded.name} at random weights"))
