"""What every engine does, and the check that its states are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.geometry import dispersion

CHECKED = 8  # documents that are run by both
_VECTORS_APART = 0.02  # of a vector's length
_DISPERSION_APART = 1e-3


class Engine(Protocol):
    """Gives the state of the last token of prompts.

    Attributes:
        name: As ``--backend`` has it.
        layer: The one layer whose state it gives, as :mod:`lmeval_dispersion.model.capture` names it.
        command: The command that starts its server.
    """

    name: str
    layer: str
    command: str

    @staticmethod
    def start(model: str) -> str:
        """The command that starts the engine's server."""

    def model(self) -> str | None:
        """What the engine says it runs; None where it does not say."""

    def states(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """States (n, d) after the last token of each prompt, which are tokens as they are: none is added.

        Raises:
            HarnessError: The engine cannot be reached, refuses, or answers something else.
        """


def open_engine(backend: str, base_url: str | None, model: str) -> Engine | None:
    """The engine that ``--backend`` names; None for ``hf``, which is lm-eval's own model.

    Raises:
        UsageError: No such backend, or no address for one that is a server.
    """
    from lmeval_dispersion.harness.engines.sglang import SglangServer
    from lmeval_dispersion.harness.engines.vllm import VllmServer

    kinds: dict[str, Any] = {"vllm": VllmServer, "sglang": SglangServer}
    if backend == "hf":
        if base_url is not None:
            raise UsageError("--base-url is the address of a vLLM or SGLang server; add --backend")
        return None
    if backend not in kinds:
        raise UsageError(f"expected a backend of hf, {', '.join(kinds)}, got {backend!r}")
    if base_url is None:
        raise UsageError(
            f"expected --base-url beside --backend {backend}; start a server with "
            f"`{kinds[backend].start(model)}`"
        )
    engine: Engine = kinds[backend](base_url, model)
    return engine


def check_layers(engine: Engine, layers: Sequence[str]) -> None:
    """Raise UsageError where a layer is asked for that the engine cannot give."""
    other = [name for name in layers if name != engine.layer]
    if other:
        raise UsageError(
            f"{engine.name} gives the layer {engine.layer!r} alone, not {other[0]!r}; leave --layer out, or "
            "use --backend hf"
        )


@dataclass(frozen=True)
class Agreement:
    """How far an engine's states are from those of transformers, on the same prompts.

    Attributes:
        vectors: Largest distance of two states of a prompt, as a share of the length of transformers'.
        own: The same of transformers with itself: alone, and in a batch.
        dispersions: Dispersion by the engine and by transformers; None for fewer than two states.
        states: How many were compared.
        unit: Whether the engine's states all have length 1 and transformers' do not.
    """

    vectors: float
    own: float
    dispersions: tuple[float, float] | None
    states: int
    unit: bool

    @property
    def holds(self) -> bool:
        """Whether the engine may go on.

        The 2 % are what bfloat16 needs; where transformers itself differs by more from batch to batch, an
        engine may differ by twice that. Noise of that share of every vector's length raises a dispersion by
        up to its square: so far two dispersions may be apart, and never less than 0.001.
        """
        share = max(_VECTORS_APART, 2 * self.own)
        near = self.vectors <= share
        same = self.dispersions is None or (
            abs(self.dispersions[0] - self.dispersions[1]) <= max(_DISPERSION_APART, share**2)
        )
        return near and same

    def __str__(self) -> str:
        text = (
            f"{self.states} states differ by up to {self.vectors:.2%} of their length "
            f"(transformers from batch to batch: {self.own:.2%})"
        )
        if self.dispersions:
            text += f", dispersion {self.dispersions[0]:.4f} against {self.dispersions[1]:.4f}"
        return text

    @property
    def figures(self) -> dict[str, Any]:
        """The same for a manifest."""
        both = self.dispersions or (None, None)
        return {
            "states": self.states,
            "difference_max": self.vectors,
            "hf_batch_difference_max": self.own,
            "dispersion": both[0],
            "hf_dispersion": both[1],
        }


def agreement(found: ArrayLike, alone: ArrayLike, batched: ArrayLike) -> Agreement:
    """Compare states (n, d) of an engine with those of transformers, run alone and in batches.

    Raises:
        HarnessError: The widths differ.
    """
    ours, theirs, again = (np.asarray(rows, dtype=np.float64) for rows in (found, alone, batched))
    if ours.shape != theirs.shape:
        raise HarnessError(
            f"the engine gives states of width {ours.shape[-1]}, and the model has {theirs.shape[-1]}: it "
            "runs another model; name that one as --model, or start the server with this one"
        )
    lengths = np.linalg.norm(theirs, axis=1)
    dispersions = None
    if len(ours) > 1:
        dispersions = (dispersion(ours), dispersion(theirs))
    return Agreement(
        vectors=float(np.max(np.linalg.norm(ours - theirs, axis=1) / lengths)),
        own=float(np.max(np.linalg.norm(again - theirs, axis=1) / lengths)),
        dispersions=dispersions,
        states=len(ours),
        unit=bool(
            np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-2) and not np.allclose(lengths, 1, atol=0.1)
        ),
    )


def refuse(engine: Engine, found: Agreement) -> HarnessError:
    """The error of an engine whose states are not those of transformers."""
    if found.unit:
        why = "the server divides states by their length"
    else:
        why = "it runs another model, precision, layer or tokenizer"
    return HarnessError(
        f"{engine.name} does not give the states of transformers: {found}: {why}; start it with "
        f"`{engine.command}`, or use --backend hf"
    )
