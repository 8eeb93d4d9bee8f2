"""A left-to-right model that runs segments of equal length and returns states and log-probabilities.

Batches are sized to memory; one that still does not fit is run in halves.

Controls run the same analysis on a model without training, or on texts without meaning.
``untrained``: the same architecture with random weights, on the same texts. ``shuffled``: the same model on
the same texts with the tokens of each in random order (special tokens at the beginning stay there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lmeval_dispersion.errors import DispersionError, NonFiniteStateError, UsageError
from lmeval_dispersion.laboratory.precision import check_memory, free_bytes
from lmeval_dispersion.laboratory.segments import Segments, Unit, prefix_of
from lmeval_dispersion.model.capture import Decoder, capture, unwrapped
from lmeval_dispersion.model.loading import ModelLike, loaded_model

#: Reduces a batch's states (b, t, d) to an array of b rows, which is kept.
Reduce = Callable[[Tensor], NDArray[Any]]
CONTROLS = ("untrained", "shuffled")

_LARGEST_BATCH = 64
_CPU_BYTES = 2**30  # larger batches are no faster on a CPU
_PROBE = 8  # tokens of the probe for left-to-right reading
_NO_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # torch's words on the CPU


class CausalModel:
    """A left-to-right model, ready to run segments; UsageError if its predictions see later tokens.

    ``suffix`` are the special tokens that end its segments; decoders have none.
    """

    def __init__(self, model: ModelLike, batch: int = 1) -> None:
        check_memory(model)
        self.loaded = loaded_model(model)
        self.batch = batch
        self.suffix: list[int] = []
        self._shuffled_by: int | None = None
        config: Any = unwrapped(self.loaded.model).config
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._find_layers()

    def _find_layers(self) -> None:
        self.decoder = Decoder.of(self.loaded.model)
        self.blocks = len(self.decoder)
        self._check_causal()

    @property
    def width(self) -> int:
        """Width of a state."""
        return int(self.config.hidden_size)

    def summary(self) -> dict[str, Any]:
        """Revision, dtype, device, layers, width and number of parameters, for the manifest."""
        model = self.loaded.model
        return {
            "revision": self.loaded.revision,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": self.loaded.device.type,
            "layers": self.blocks,
            "width": self.width,
            "parameters": int(sum(p.numel() for p in model.parameters())),
        }

    def layers(self, wanted: str | Sequence[str]) -> list[str]:
        """Canonical names, each once, of ``all``, ``depths`` (embeddings too) or names; else UsageError."""
        names = wanted.split(",") if isinstance(wanted, str) else list(wanted)
        if names in (["all"], ["depths"]):
            blocks = [f"layer.{k}" for k in range(len(self.decoder) - 1)]
            return [*(["embeddings"] if names == ["depths"] else []), *blocks, "last"]
        if not names:
            raise UsageError("expected at least one layer; pass last, all or names")
        sites: dict[str, str] = {}
        for name in map(str.strip, names):
            site = self.decoder.site(name).name
            sites.setdefault(site, f"{site}.ffn" if name.endswith(".ffn") else site)
        return list(sites.values())

    def check_segment(self, length: int) -> None:
        """Raise UsageError if segments of ``length`` tokens exceed the model's context."""
        known = (
            getattr(self.config, key, None) for key in ("max_position_embeddings", "n_positions")
        )
        limit = next((limit for limit in known if isinstance(limit, int)), length)
        if length > limit:
            raise UsageError(
                f"{self.loaded.name} takes at most {limit} tokens, got segments of {length}; shorten them"
            )

    def batch_size(self, length: int, layers: int, *, losses: bool) -> int:
        """Number of segments to run at once, 1 to 64, from the free memory and the model's shape."""
        size = torch.finfo(self.loaded.model.dtype).bits // 8
        a_token = self.width * (24 * size + 8 * layers)
        if losses:
            a_token += int(getattr(self.config, "vocab_size", 32000)) * (size + 4)
        free = free_bytes(str(self.loaded.device)) // 4
        if self.loaded.device.type == "cuda":
            free *= 2
        else:
            free = min(_CPU_BYTES, free)
        return int(max(1, min(_LARGEST_BATCH, free // (a_token * length))))

    def run(
        self,
        segments: Segments,
        rows: NDArray[np.int64],
        layers: Sequence[str],
        reduce: Reduce,
        *,
        length: int | None = None,
        losses: bool = False,
    ) -> Unit:
        """Run ``rows`` (n,) of the segments, their first ``length`` tokens, in batches.

        Returns:
            For every layer the results of ``reduce`` on the states (b, t, d) of each batch, joined to (n,
            ...); with ``losses``, ``nll``: the NLL in nats of tokens 1 ... t - 1, shape (n, t - 1).

        Raises:
            NonFiniteStateError: A number is not finite; names layer and text.
            DispersionError: A single segment does not fit into memory.
            UsageError: A token is outside the model's embeddings.
        """
        tokens = self._ordered(np.asarray(segments.tokens[rows])[:, :length], rows)
        run = partial(self._pass, layers=layers, reduce=reduce, losses=losses)
        batches = [tokens[start : start + self.batch] for start in range(0, len(rows), self.batch)]
        parts = [part for batch in batches for part in self._in_halves(run, batch)]
        names = [*layers, *(["nll"] if losses else [])]
        results = {name: np.concatenate([part[name] for part in parts]) for name in names}
        for name, values in results.items():
            self._check_finite(values, name, segments.origins[rows], segments.source)
        return results

    def _in_halves(self, run: Callable[[NDArray[Any]], Unit], tokens: NDArray[Any]) -> list[Unit]:
        """The results of ``run`` for a batch, in one pass if that fits into memory."""
        try:
            return [run(tokens)]
        except (MemoryError, RuntimeError) as error:
            # torch has no error type for the CPU's memory.
            is_known = isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError))
            if not is_known and not any(words in str(error) for words in _NO_CPU_MEMORY):
                raise
            if len(tokens) == 1:
                raise DispersionError(
                    f"one segment of {tokens.shape[1]} tokens does not fit on {self.loaded.device}; "
                    "use shorter segments, model_args load_in_8bit=True or device auto"
                ) from error
        # Outside the handler, which would keep the failed pass's tensors alive.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(tokens) // 2
        return [*self._in_halves(run, tokens[:middle]), *self._in_halves(run, tokens[middle:])]

    @torch.no_grad()
    def _pass(
        self, tokens: NDArray[Any], *, layers: Sequence[str], reduce: Reduce, losses: bool
    ) -> Unit:
        """Run one batch in one forward pass."""
        ids = self._on_device(tokens)
        length = ids.shape[1]
        arrays: Unit = {}

        def sink(name: str, state: Tensor) -> None:
            arrays[name] = reduce(state[:, -length:])  # prompt tuning puts virtual tokens in front

        with capture(self.loaded.model, layers, sink):
            # The output projection gets no token if none is scored; capture's hooks run before this one.
            head = nn.Identity() if losses or self.decoder.head is None else self.decoder.head
            idle = head.register_forward_pre_hook(lambda _head, states: (states[0][:, :0],))
            try:
                logits = self.loaded.model(input_ids=ids, use_cache=False).logits
            finally:
                idle.remove()
        if losses:
            arrays["nll"] = np.stack(
                [_nll(*each) for each in zip(logits[:, -length:], ids, strict=True)]
            )
        return arrays

    def _on_device(self, tokens: NDArray[Any]) -> Tensor:
        """Tokens (b, t) as the model takes them; UsageError if one has no embedding."""
        highest = int(tokens.max())
        known = self.loaded.model.get_input_embeddings().weight.shape[0]
        if highest >= known:
            raise UsageError(
                f"token {highest} is outside the model's {known} embeddings; its tokenizer does not fit"
            )
        return torch.as_tensor(tokens.astype(np.int64), device=self.loaded.device)

    def _check_finite(
        self, values: NDArray[Any], name: str, origins: NDArray[np.int64], source: str
    ) -> None:
        bad = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if bad.size:
            text, start = origins[int(bad[0])]
            advice = "use model_args dtype=bfloat16 or dtype=float32"
            if self.loaded.model.dtype == torch.float32:
                advice = "check the checkpoint's weights"
            layer = "the output" if name == "nll" else name
            raise NonFiniteStateError(
                f"expected finite numbers, got NaN or infinity at {layer} in text {text} of {source} "
                f"(segment from token {start}); {advice}"
            )

    @torch.no_grad()
    def _check_causal(self) -> None:
        """Change the last token: in a left-to-right model no earlier prediction may move."""
        vocabulary = min(int(getattr(self.config, "vocab_size", 2)), 1000)
        ids = torch.arange(_PROBE, device=self.loaded.device)[None] % vocabulary
        other = ids.clone()
        other[0, -1] = (other[0, -1] + 1) % vocabulary
        before, after = (
            self.loaded.model(input_ids=x, use_cache=False).logits[0, -_PROBE:-1].float()
            for x in (ids, other)
        )
        if (before - after).abs().max() > 1e-2 * before.std().clamp_min(1e-6):
            raise UsageError(
                f"expected a left-to-right language model, got {self.loaded.name}, whose predictions change "
                "with the tokens after them; name a causal model"
            )

    def control(self, name: str, seed: int) -> CausalModel:
        """The model of a control, of `CONTROLS` ("": this one); DispersionError if it cannot be built."""
        if not name:
            return self
        if name == "shuffled":
            other = type(self)(self.loaded, self.batch)
            other._shuffled_by = seed
            return other
        model: Any = unwrapped(self.loaded.model)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                built = self._at_random(model)
            except (ValueError, TypeError) as error:
                raise DispersionError(
                    f"{self.loaded.name} cannot be built with random weights, which this needs: {error}"
                ) from error
        # The model's dtype, so that rounding is equal; float32 for quantised weights.
        quantised = getattr(model.config, "quantization_config", None) is not None
        built = built.to(self.loaded.device, dtype=torch.float32 if quantised else model.dtype)
        built = built.eval().requires_grad_(False)
        untrained = self.loaded._replace(model=built, name=f"{self.loaded.name} at random weights")
        return type(self)(untrained, self.batch)

    def _at_random(self, model: Any) -> Any:
        """A model like this one, in float32, whose weights are random."""
        import transformers

        return transformers.AutoModelForCausalLM.from_config(
            model.config,
            dtype=torch.float32,
            trust_remote_code=self.loaded.choice.trust_remote_code,
        )

    def _ordered(self, tokens: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The segments (b, t) that are run; a shuffled order depends on a segment's number and the seed."""
        if self._shuffled_by is None:
            return tokens
        front = len(prefix_of(self.loaded.tokenizer))
        mixed = np.array(tokens)
        end = mixed.shape[1] - len(self.suffix)
        for row, number in zip(mixed, numbers, strict=True):
            rng = np.random.default_rng([self._shuffled_by, int(number)])
            row[front:end] = row[front:end][rng.permutation(end - front)]
        return mixed


def as_controls(wanted: str | Sequence[str] | None) -> list[str]:
    """The wanted controls, each once, in the order of ``CONTROLS``; UsageError for another name."""
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    for name in names:
        if name not in CONTROLS:
            raise UsageError(f"expected controls among {', '.join(CONTROLS)}, got {name!r}")
    return [name for name in CONTROLS if name in names]


def _nll(logits: Tensor, ids: Tensor) -> NDArray[np.float64]:
    """Negative log-probability of every token of a text after its first, float64."""
    losses = nn.functional.cross_entropy(
        logits[:-1].float(), ids[1:].to(logits.device), reduction="none"
    )
    return np.asarray(losses.to("cpu", torch.float64).numpy())


def last_vectors(states: Tensor) -> NDArray[np.float32]:
    """The last position's states, shape (b, d), float32."""
    return np.asarray(states[:, -1].float().cpu().numpy(), dtype=np.float32)


def unit_tokens(states: Tensor) -> tuple[Tensor, Tensor]:
    """Token states (b, t, d) at length one, float32, and whether each has a direction, (b, t) bool."""
    x = states.float()
    x = x / x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    norms = x.norm(dim=-1, keepdim=True)
    return x / norms.clamp_min(0.5), norms[..., 0] > 0


def token_dispersions(states: Tensor) -> NDArray[np.float64]:
    """Mean cosine distance over each text's token pairs, shape (b,); NaN below two directions."""
    units, valid = unit_tokens(states)
    count = valid.sum(dim=1).double()
    mean = units.sum(dim=1, keepdim=True) / count[:, None, None]
    squares = ((units - mean) ** 2).sum(dim=-1).double() * valid
    spread = squares.sum(dim=1) / (count - 1)
    return np.asarray(spread.masked_fill(count < 2, float("nan")).cpu().numpy())
