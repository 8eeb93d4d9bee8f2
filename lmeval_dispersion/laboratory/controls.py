"""Controls: what the same analysis finds where a model knows nothing, or where a text says nothing.

``untrained``: the same architecture at random weights, on the same texts. What it shows too, the model did
not learn. ``shuffled``: the same model on the same texts with the tokens of each in random order (what the
tokenizer puts in front stays there). What it shows too does not come from what the texts say, only from
which words are in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.laboratory.causal_model import CausalModel
from lmeval_dispersion.laboratory.segments import prefix_of
from lmeval_dispersion.model.capture import unwrapped

CONTROLS = ("untrained", "shuffled")


def as_controls(wanted: str | Sequence[str] | None) -> list[str]:
    """Names of controls, each once, in the order of ``CONTROLS``.

    Raises:
        UsageError: A name is unknown.
    """
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    for name in names:
        if name not in CONTROLS:
            raise UsageError(f"expected controls among {', '.join(CONTROLS)}, got {name!r}")
    return [name for name in CONTROLS if name in names]


def control_model(control: str, causal: CausalModel, seed: int) -> CausalModel:
    """The model that a control runs; ``untrained`` has random weights, as transformers draws them.

    Raises:
        DispersionError: The architecture cannot be built from its configuration.
    """
    if control != "untrained":
        return causal
    import transformers

    model: Any = unwrapped(causal.loaded.model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            built = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        except (ValueError, TypeError) as error:
            raise DispersionError(
                f"{causal.loaded.name} cannot be built at random weights, which this needs: {error}"
            ) from error
    # The model's own dtype, so that rounding is the same; float32 where its weights are quantised.
    quantised = getattr(model.config, "quantization_config", None) is not None
    dtype = torch.float32 if quantised else model.dtype
    built = built.to(causal.loaded.device, dtype=dtype).eval().requires_grad_(False)
    return CausalModel(causal.loaded._replace(model=built, name=f"{causal.loaded.name} at random weights"))


def control_tokens(
    control: str, tokens: NDArray[Any], numbers: NDArray[np.int64], causal: CausalModel, seed: int
) -> NDArray[Any]:
    """The segments (b, t) that a control runs; the order of each depends on its number and the seed only."""
    if control != "shuffled":
        return tokens
    front = len(prefix_of(causal.loaded.tokenizer))
    mixed = np.array(tokens)
    for row, number in zip(mixed, numbers, strict=True):
        order = np.random.default_rng([seed, int(number)]).permutation(len(row) - front)
        row[front:] = row[front:][order]
    return mixed
