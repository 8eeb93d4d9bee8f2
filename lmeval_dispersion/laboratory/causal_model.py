"""A left-to-right model that runs segments of equal length and hands out states and log-probabilities.

Batches are sized to memory; a batch that does not fit all the same is run in halves. Logits are computed only
where tokens are scored, a stretch of tokens at a time: whole ones of a batch would take more memory than all
else (64 segments of 512 tokens and 150,000 words: 20 GB in float32).

Controls are what the same analysis finds where a model knows nothing, or where a text says nothing.
``untrained``: the same architecture at random weights, on the same texts. ``shuffled``: the same model on the
same texts with the tokens of each in random order (what the tokenizer puts in front stays there).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lmeval_dispersion.errors import DispersionError, NonFiniteStateError, UsageError
from lmeval_dispersion.laboratory.segments import prefix_of
from lmeval_dispersion.model.capture import Decoder, capture, unwrapped
from lmeval_dispersion.model.loading import ModelLike, loaded_model

# Layer, states (b, t, d), number of the first of them in the run -> what is kept of them.
Reduce = Callable[[str, Tensor, int], Any]

_LARGEST_BATCH = 64
_CPU_BYTES = 2**30  # more does not make a CPU faster
_PROBE = 8  # tokens of the probe for left-to-right reading
_LOGITS = 2**24  # at most so many logits at a time
_NO_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # how torch says it for the CPU


class CausalModel:
    """A left-to-right model, ready to run segments.

    Attributes:
        loaded: The model.
        decoder: Its parts.
        bare_head: Whether its logits are its projection's output, so that they can be computed in stretches.
    """

    def __init__(self, model: ModelLike) -> None:
        self.loaded = loaded_model(model)
        self.decoder = Decoder.of(self.loaded.model)
        self._check_causal()
        self.bare_head = self._head_is_bare()

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        config: Any = unwrapped(self.loaded.model).config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def width(self) -> int:
        """Width of a state."""
        return int(self.config.hidden_size)

    def summary(self) -> dict[str, Any]:
        """The model that was really run, for the manifest."""
        model = self.loaded.model
        return {
            "name": self.loaded.name,
            "revision": self.loaded.revision,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": self.loaded.device.type,
            "layers": len(self.decoder),
            "width": self.width,
            "parameters": int(sum(p.numel() for p in model.parameters())),
        }

    def layers(self, wanted: str | Sequence[str]) -> list[str]:
        """Canonical names of ``wanted``: ``last``, ``all`` (every block, then ``last``), or names."""
        names = wanted.split(",") if isinstance(wanted, str) else list(wanted)
        if names == ["all"]:
            return [f"layer.{k}" for k in range(len(self.decoder) - 1)] + ["last"]
        if not names:
            raise UsageError("expected at least one layer; pass last, all or names")
        sites: dict[str, str] = {}
        for name in names:
            site = self.decoder.site(name.strip()).name
            sites.setdefault(site, f"{site}.ffn" if name.strip().endswith(".ffn") else site)
        return list(sites.values())

    def check_segment(self, length: int) -> None:
        """Raise UsageError where segments of ``length`` tokens are longer than the model takes."""
        limit = getattr(self.config, "max_position_embeddings", None) or getattr(
            self.config, "n_positions", None
        )
        if isinstance(limit, int) and length > limit:
            raise UsageError(
                f"{self.loaded.name} takes at most {limit} tokens, got segments of {length}; shorten them"
            )

    def batch_size(self, length: int, layers: int) -> int:
        """How many segments fit into memory at once, from the free memory and the model's shape."""
        size = torch.finfo(self.loaded.model.dtype).bits // 8
        vocabulary = 0 if self.bare_head else int(getattr(self.config, "vocab_size", 32000))
        a_token = vocabulary * (size + 4) + self.width * (24 * size + 8 * layers)
        if self.loaded.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.loaded.device)[0] // 2
        else:
            pages = os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 2**18
            free = min(_CPU_BYTES, pages * 4096 // 4)
        return int(max(1, min(_LARGEST_BATCH, free // (a_token * length))))

    def run(
        self,
        tokens: NDArray[Any],
        layers: Sequence[str],
        reduce: Reduce,
        *,
        batch: int,
        losses: bool = False,
    ) -> tuple[dict[str, list[Any]], NDArray[np.float64]]:
        """Run segments ``tokens`` (n, t) in batches, in halves where a batch does not fit into memory.

        Returns:
            For every layer what ``reduce`` made of the states of each batch, in order; and, where ``losses``
            are asked for, the NLL in nats of tokens 1 ... t - 1, shape (n, t - 1).
        """
        reduced: dict[str, list[Any]] = {layer: [] for layer in layers}
        scored = [np.empty((0, tokens.shape[1] - 1))]
        waiting = [(start, min(start + batch, len(tokens))) for start in range(0, len(tokens), batch)]
        while waiting:
            first, end = waiting.pop(0)
            try:
                states, nll = self._pass(np.asarray(tokens[first:end]), layers, reduce, first, losses)
            except (torch.cuda.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                if end - first == 1:
                    raise DispersionError(
                        f"one segment of {tokens.shape[1]} tokens does not fit on {self.loaded.device}; "
                        "use shorter segments, --quantize or --device auto"
                    ) from error
            else:
                for layer, value in states.items():
                    reduced[layer].append(value)
                scored.append(nll)
                continue
            # Outside of the handler, which would keep the failed pass's tensors alive.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            middle = (first + end) // 2
            waiting[:0] = [(first, middle), (middle, end)]
        return reduced, np.concatenate(scored)

    @torch.no_grad()
    def _pass(
        self, tokens: NDArray[Any], layers: Sequence[str], reduce: Reduce, first: int, losses: bool
    ) -> tuple[dict[str, Any], NDArray[np.float64]]:
        """One batch, whose first row is number ``first`` of the run."""
        highest, known = int(tokens.max()), self.loaded.model.get_input_embeddings().weight.shape[0]
        if highest >= known:
            raise UsageError(
                f"token {highest} is outside the model's {known} embeddings; its tokenizer does not fit"
            )
        ids = torch.as_tensor(tokens.astype(np.int64), device=self.loaded.device)
        length = ids.shape[1]
        reduced: dict[str, Any] = {}
        final: Tensor | None = None

        def sink(name: str, state: Tensor) -> None:
            # Prompt tuning puts virtual tokens in front.
            nonlocal final
            state = state[:, -length:]
            if name == "last":
                final = state
            if name in layers:
                reduced[name] = reduce(name, state, first)

        whole = losses and not self.bare_head
        names = [*layers, *(["last"] if losses and "last" not in layers else [])]
        head = self.decoder.head
        with _instead(None if whole else head, _nothing) as project, capture(self.loaded.model, names, sink):
            logits = self.loaded.model(input_ids=ids, use_cache=False).logits
            if not losses:
                return reduced, np.empty((len(tokens), length - 1))
            if whole:
                scored = [_nll(row, text[1:]) for row, text in zip(logits[:, -length:], ids, strict=True)]
            else:
                assert final is not None
                assert project is not None
                scored = [self._losses(row, text, project) for row, text in zip(final, ids, strict=True)]
        return reduced, np.asarray(torch.stack(scored).numpy())

    def check_finite(self, values: NDArray[Any], layer: str, origins: NDArray[np.int64], source: str) -> None:
        """Refuse rows of ``values`` (b, ...) that are not finite, naming layer and text."""
        bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if bad.size:
            text, start = origins[int(bad[0])]
            advice = "use --dtype float32 or bfloat16"
            if self.loaded.model.dtype == torch.float32:
                advice = "check the checkpoint's weights"
            raise NonFiniteStateError(
                f"expected finite numbers, got NaN or infinity at {layer} in text {text} of {source} "
                f"(segment from token {start}); {advice}"
            )

    def _losses(self, states: Tensor, ids: Tensor, project: Project) -> Tensor:
        """NLL of every token of one text after its first, from its final states (t, d)."""
        stretch = max(1, _LOGITS // int(getattr(self.config, "vocab_size", 32000)))
        losses = [
            _nll(project(states[None, start : start + stretch])[0], ids[start + 1 : start + 1 + stretch])
            for start in range(0, len(ids) - 1, stretch)
        ]
        return torch.cat(losses)

    @torch.no_grad()
    def _head_is_bare(self) -> bool:
        """Whether the model's logits are what its projection puts out, with nothing done to them afterwards.

        Some divide or cap them (Gemma 2, Cohere, Granite); theirs are taken whole, as the model gives them.
        """
        head = self.decoder.head
        if head is None:
            return False
        ids = torch.arange(_PROBE, device=self.loaded.device)[None] % self._vocabulary()
        with _instead(head, lambda states, *_: _ramp(states)):
            logits = self.loaded.model(input_ids=ids, use_cache=False).logits[:, -_PROBE:]
        return torch.equal(logits, _ramp(logits))

    def _vocabulary(self) -> int:
        return min(int(getattr(self.config, "vocab_size", 2)), 1000)

    @torch.no_grad()
    def _check_causal(self) -> None:
        """Change the last token: in a left-to-right model no earlier prediction may move."""
        vocabulary = self._vocabulary()
        ids = torch.arange(_PROBE, device=self.loaded.device)[None] % vocabulary
        other = ids.clone()
        other[0, -1] = (other[0, -1] + 1) % vocabulary
        logits = [
            self.loaded.model(input_ids=x, use_cache=False).logits[0, -_PROBE:-1].float()
            for x in (ids, other)
        ]
        moved = (logits[0] - logits[1]).abs().max()
        if moved > 1e-2 * logits[0].std().clamp_min(1e-6):
            raise UsageError(
                f"expected a left-to-right language model, got {self.loaded.name}, whose predictions change "
                "with the tokens after them"
            )


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Negative log-probability of ``ids`` by the logits (n or more, vocabulary) before them, float64, CPU."""
    logits = logits[: len(ids)].float()
    losses = nn.functional.cross_entropy(logits, ids.to(logits.device), reduction="none")
    return losses.to("cpu", torch.float64)


def _out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has no type of its own for the CPU's."""
    known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
    return known or any(words in str(error) for words in _NO_CPU_MEMORY)


def _ramp(states: Tensor) -> Tensor:
    """Logits from -128 to 127 for every token of ``states`` (b, t, d): exact in every dtype."""
    ramp = torch.arange(-128, 128, device=states.device, dtype=states.dtype)
    return ramp.expand(*states.shape[:-1], len(ramp))


Project = Callable[..., Tensor]


@contextmanager
def _instead(head: nn.Module | None, stand_in: Project) -> Iterator[Project | None]:
    """The output projection does something else meanwhile; yields what it does otherwise.

    Its hooks still see its input.
    """
    if head is None:
        yield None
        return
    before = head.__dict__.get("forward")
    project: Project = head.forward
    head.forward = stand_in
    try:
        yield project
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def _nothing(states: Tensor, *_: Any) -> Tensor:
    """Logits of no use, for passes that need none."""
    return states.new_zeros(*states.shape[:-1], 1)


def perplexity(mean_nll: ArrayLike) -> NDArray[np.float64]:
    """Perplexity, exp of the mean negative log-probability (nats) a token; >= 1, lower is easier."""
    return np.asarray(np.exp(np.asarray(mean_nll, dtype=np.float64)))


def last_vectors(states: Tensor) -> NDArray[np.float32]:
    """States of the last position, shape (b, d), float32."""
    return np.asarray(states[:, -1].float().cpu().numpy(), dtype=np.float32)


def unit_tokens(states: Tensor) -> tuple[Tensor, Tensor]:
    """Token states (b, t, d) at length one in float32, and which of them have a direction, (b, t) bool.

    Zero states (the embedding of a padding token may be one) become zero rows.
    """
    x = states.float()
    x = x / x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    norms = x.norm(dim=-1, keepdim=True)
    return x / norms.clamp_min(0.5), norms[..., 0] > 0


def token_dispersions(states: Tensor) -> NDArray[np.float64]:
    """Dispersion over the tokens of each text: mean cosine distance over token pairs; shape (b,).

    Zero states have no direction and are left out. NaN where a state is not finite or fewer than two tokens
    are left.
    """
    units, valid = unit_tokens(states)
    count = valid.sum(dim=1).double()
    mean = units.sum(dim=1, keepdim=True) / count[:, None, None]
    squares = ((units - mean) ** 2).sum(dim=-1).double() * valid
    spread = squares.sum(dim=1) / (count - 1)
    return np.asarray(spread.masked_fill(count < 2, float("nan")).cpu().numpy())


CONTROLS = ("untrained", "shuffled")


def as_controls(wanted: str | Sequence[str] | None) -> list[str]:
    """Names of controls, each once, in the order of ``CONTROLS``."""
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    for name in names:
        if name not in CONTROLS:
            raise UsageError(f"expected controls among {', '.join(CONTROLS)}, got {name!r}")
    return [name for name in CONTROLS if name in names]


def control_model(control: str, causal: CausalModel, seed: int) -> CausalModel:
    """The model that a control runs; ``untrained`` has random weights, as transformers draws them."""
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
