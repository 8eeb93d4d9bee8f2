"""Models that run segments of equal length, and return states and log-probabilities.

A decoder reads left to right. An encoder (BERT, ALBERT, RoBERTa …) may read both ways and has no
causal head: its states are the ``hidden_states`` of transformers, the input of the first block and
the output of every block, also where blocks share their weights (ALBERT).

Batches are sized to memory; one that still does not fit is run in halves. A model that cannot fit
in float32 is refused by its configuration, before it is loaded.

Controls run the same analysis on a model without training, or on texts without meaning.
``untrained``: the same architecture with random weights, on the same texts. ``shuffled``: the same
model on the same texts with the tokens of each in random order (special tokens at both ends stay).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from lmeval_dispersion.errors import (
    CaptureError,
    DispersionError,
    NonFiniteStateError,
    UsageError,
)
from lmeval_dispersion.laboratory.arguments import Control
from lmeval_dispersion.laboratory.segments import Segments, Unit, affixes_of
from lmeval_dispersion.model.capture import Decoder, capture, unwrapped
from lmeval_dispersion.model.loading import (
    LoadedModel,
    ModelLike,
    has_causal_head,
    loaded_model,
    model_choice,
)

#: Reduces a batch's states (b, t, d) to an array of b rows, which is kept.
Reduce = Callable[[Tensor], NDArray[Any]]
CONTROLS = get_args(Control)

_LARGEST_BATCH = 64
_CPU_BYTES = 2**30  # larger batches are no faster on a CPU
_PROBE = 8  # tokens of the probe for left-to-right reading
_NO_CPU_MEMORY = ("can't allocate memory", "not enough memory")  # torch's words on the CPU
_FLOAT32 = 4  # bytes of a weight
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


class CausalModel:
    """A left-to-right language model, for the states and log-probabilities of segments of text.

    Args:
        model: Hub id or folder, a `ModelChoice`, or a model that is already loaded.
        batch: Number of segments in one forward pass.

    Attributes:
        loaded: The model, its tokenizer and its device.
        batch: Number of segments in one forward pass.
        prefix: Ids of the special tokens with which every segment begins.
        suffix: Ids of the special tokens with which every segment ends; empty for a decoder.
        config: The configuration of the text model.
        decoder: The parts of the decoder; an `EncoderModel` lacks this attribute.
        blocks: Number of decoder blocks, or of an encoder's layers.

    Raises:
        UsageError: The model cannot be loaded, is too large for the device, or is not a
            left-to-right model: its predictions depend on later tokens.
        CaptureError: The model is an encoder-decoder, or has no list of decoder blocks.
    """

    def __init__(self, model: ModelLike, batch: int = 1) -> None:
        check_memory(model)
        self.loaded = loaded_model(model)
        self.batch = batch
        self.prefix, self.suffix = affixes_of(self.loaded.tokenizer)
        config: Any = unwrapped(self.loaded.model).config
        self.config = config.get_text_config()
        self._shuffled_by: int | None = None
        self._find_layers()

    def _find_layers(self) -> None:
        self.suffix = []  # a decoder's text goes on
        self.decoder = Decoder.of(self.loaded.model)
        self.blocks = len(self.decoder)
        self._check_causal()

    @property
    def width(self) -> int:
        """The number of entries in a state."""
        return int(self.config.hidden_size)

    def summary(self) -> dict[str, Any]:
        """Return the facts on the model that a report's manifest lists.

        These are its revision, dtype, device, number of layers, width and number of parameters.
        """
        model = self.loaded.model
        return {
            "revision": self.loaded.revision,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": self.loaded.device.type,
            "layers": self.blocks,
            "width": self.width,
            "parameters": _count(model),
        }

    def layers(self, wanted: str | Sequence[str]) -> list[str]:
        """Return the full names of the wanted layers, each once.

        Args:
            wanted: ``all`` (the output of every block; of the last one, after the final norm),
                ``depths`` (the embeddings and ``all``), or names of layers, separated by commas or
                as a list.

        Raises:
            UsageError: A name is not a layer of this model, or no name is given.
        """
        names = wanted.split(",") if isinstance(wanted, str) else list(wanted)
        every = [f"layer.{block}" for block in range(self.blocks - 1)]
        every.append("last")
        if names == ["all"]:
            return every
        if names == ["depths"]:
            return ["embeddings", *every]
        if not names:
            raise UsageError(
                "expected at least one layer, got none; pass last, all or names of layers"
            )
        sites: dict[str, str] = {}
        for name in map(str.strip, names):
            site = self.decoder.site(name).name
            sites.setdefault(site, f"{site}.ffn" if name.endswith(".ffn") else site)
        return list(sites.values())

    def check_segment(self, length: int) -> None:
        """Raise UsageError if segments of ``length`` tokens exceed the model's context."""
        limit = self._longest()
        if limit is not None and length > limit:
            raise UsageError(
                f"{self.loaded.name} takes at most {limit} tokens, got segments of {length}; "
                "shorten the segments (--segment)"
            )

    def _longest(self) -> int | None:
        """Tokens of the longest segment; None if the configuration has no limit."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def batch_size(self, length: int, layers: int, *, losses: bool) -> int:
        """Return an estimate of how many segments fit into the free memory at once, from 1 to 64.

        Args:
            length: Number of tokens in a segment.
            layers: Number of layers whose states are kept.
            losses: Whether log-probabilities are computed too, which takes memory for the logits.
        """
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
        """Run segments through the model, in batches.

        Args:
            segments: The segments.
            rows: Shape (n,), the numbers of the segments to run.
            layers: Full names of the layers whose states are wanted.
            reduce: Turns the states of a batch, shape (b, t, d), into an array with b rows.
            length: Number of tokens to run, from the start of each segment; None for all.
            losses: Whether to return negative log-probabilities too.

        Returns:
            An array with n rows for each layer: the results of ``reduce``. With ``losses`` also
            ``nll``, shape (n, t - 1): the negative log-probability in nats of each token after the
            first.

        Raises:
            NonFiniteStateError: A result is NaN or infinite; the message names the layer and the
                text.
            DispersionError: A single segment does not fit into memory.
            UsageError: The model has no embedding for a token.
        """
        tokens = self._ordered(np.asarray(segments.tokens[rows])[:, :length], rows)
        run = partial(self._pass, layers=layers, reduce=reduce, losses=losses)
        parts: list[Unit] = []
        for start in range(0, len(rows), self.batch):
            parts += self._in_halves(run, tokens[start : start + self.batch])
        names = [*layers]
        if losses:
            names.append("nll")
        results: Unit = {}
        for name in names:
            values = np.concatenate([part[name] for part in parts])
            self._check_finite(values, name, segments.origins[rows], segments.source)
            results[name] = values
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
                    f"one segment of {tokens.shape[1]} tokens does not fit into the memory of "
                    f"{self.loaded.device}; use shorter segments, model_args load_in_8bit=True or "
                    "device auto"
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
        """Every layer's reduced states of one batch, and with ``losses`` its NLL, by one forward pass."""
        ids = self._on_device(tokens)
        length = ids.shape[1]
        arrays: Unit = {}

        def sink(name: str, state: Tensor) -> None:
            arrays[name] = reduce(state[:, -length:])  # prompt tuning puts virtual tokens in front

        head: nn.Module = nn.Identity()
        if self.decoder.head is not None and not losses:
            head = self.decoder.head
        with capture(self.loaded.model, layers, sink):
            # The output projection gets no token if none is scored; capture's hooks run first.
            idle = head.register_forward_pre_hook(lambda _head, states: (states[0][:, :0],))
            try:
                logits = self.loaded.model(input_ids=ids, use_cache=False).logits
            finally:
                idle.remove()
        if losses:
            texts = []
            for of_text, tokens_of_text in zip(logits[:, -length:], ids, strict=True):
                texts.append(_nll(of_text, tokens_of_text))
            arrays["nll"] = np.stack(texts)
        return arrays

    def _on_device(self, tokens: NDArray[Any]) -> Tensor:
        """Tokens (b, t) as the model takes them; UsageError if one has no embedding."""
        highest = int(tokens.max())
        known = self.loaded.model.get_input_embeddings().weight.shape[0]
        if highest >= known:
            raise UsageError(
                f"expected token ids below {known}, the number of the model's embeddings, got "
                f"{highest}; load the tokenizer that belongs to this model"
            )
        return torch.as_tensor(tokens.astype(np.int64), device=self.loaded.device)

    def _check_finite(
        self, values: NDArray[Any], name: str, origins: NDArray[np.int64], source: str
    ) -> None:
        is_finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        bad = np.flatnonzero(~is_finite)
        if bad.size:
            text, start = origins[int(bad[0])]
            advice = "use model_args dtype=bfloat16 or dtype=float32"
            if self.loaded.model.dtype == torch.float32:
                advice = "check the checkpoint's weights"
            layer = "the output" if name == "nll" else name
            raise NonFiniteStateError(
                f"expected finite numbers, got NaN or infinity at {layer} in text {text} of "
                f"{source}, in the segment that begins at token {start}; {advice}"
            )

    @torch.no_grad()
    def _check_causal(self) -> None:
        """Change the last token: in a left-to-right model no earlier prediction may move."""
        vocabulary = min(int(getattr(self.config, "vocab_size", 2)), 1000)
        ids = torch.arange(_PROBE, device=self.loaded.device)[None] % vocabulary
        other = ids.clone()
        other[0, -1] = (other[0, -1] + 1) % vocabulary
        logits = []
        for tokens in (ids, other):
            output = self.loaded.model(input_ids=tokens, use_cache=False)
            logits.append(output.logits[0, -_PROBE:-1].float())
        before, after = logits
        largest = (before - after).abs().max()
        if largest > 1e-2 * before.std().clamp_min(1e-6):
            raise UsageError(
                f"expected a left-to-right language model, got {self.loaded.name}, whose "
                "predictions depend on later tokens; choose a causal model"
            )

    def control(self, name: str, seed: int) -> CausalModel:
        """Return the model with which a measurement is repeated as a control.

        Args:
            name: ``untrained`` for the same architecture with random weights, ``shuffled`` for the
                same model on shuffled tokens, or an empty string for the model itself.
            seed: Seed of the random weights or of the order of tokens.

        Raises:
            DispersionError: The model cannot be built with random weights.
        """
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
                    f"{self.loaded.name} cannot be built with random weights ({error}); leave out "
                    "the control `untrained`"
                ) from error
        if getattr(model.config, "quantization_config", None) is None:
            built = built.to(model.dtype)  # so that rounding is equal
        built = built.to(self.loaded.device).eval().requires_grad_(False)
        untrained = self.loaded._replace(model=built, name=f"{self.loaded.name} at random weights")
        return type(self)(untrained, self.batch)

    def _at_random(self, model: Any) -> Any:
        """A model like this one, in float32, whose weights are random."""
        return transformers.AutoModelForCausalLM.from_config(
            model.config,
            dtype=torch.float32,
            trust_remote_code=self.loaded.choice.trust_remote_code,
        )

    def _ordered(self, tokens: NDArray[Any], numbers: NDArray[np.int64]) -> NDArray[Any]:
        """The segments (b, t) that are run; a shuffled order depends on a segment's number and the seed."""
        if self._shuffled_by is None:
            return tokens
        mixed = np.array(tokens)
        start = len(self.prefix)
        end = mixed.shape[1] - len(self.suffix)
        for row, number in zip(mixed, numbers, strict=True):
            rng = np.random.default_rng([self._shuffled_by, int(number)])
            order = rng.permutation(end - start)
            middle = row[start:end]
            row[start:end] = middle[order]
        return mixed


class EncoderModel(CausalModel):
    """A model that does not read left to right, such as BERT, for states of segments of text."""

    def _find_layers(self) -> None:
        self.blocks = int(self.config.num_hidden_layers)

    def layers(self, wanted: str | Sequence[str]) -> list[str]:
        """Return the names of all layers: ``embeddings``, ``layer.K`` and ``last``.

        Raises:
            UsageError: ``wanted`` is not ``depths``.
        """
        if wanted != "depths":
            raise UsageError(
                f"expected layers='depths' for an encoder, got {wanted!r}; single layers can be "
                "measured in decoders only"
            )
        return super().layers(wanted)

    def _longest(self) -> int:
        """Tokens of the tokenizer's longest text: RoBERTa's configuration counts two positions more."""
        longest = int(self.loaded.tokenizer.model_max_length)
        return min(longest, super()._longest() or longest)

    @torch.no_grad()
    def _pass(
        self, tokens: NDArray[Any], *, layers: Sequence[str], reduce: Reduce, losses: bool
    ) -> Unit:
        """Every layer's reduced states of one batch, by one forward pass."""
        ids = self._on_device(tokens)
        output = self.loaded.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
        )
        states = output.hidden_states
        if states is None or len(states) != len(layers):
            raise CaptureError(
                f"expected {len(layers)} hidden states from {self.loaded.name}, got "
                f"{len(states or ())}; its class in transformers does not return the states of "
                "its blocks, so it cannot be measured; choose another model"
            )
        return {name: reduce(state) for name, state in zip(layers, states, strict=True)}

    def _at_random(self, model: Any) -> Any:
        """A model like this one, in float32, whose weights are random."""
        return type(model)(model.config)


def read_either_way(model: ModelLike) -> CausalModel:
    """Load a left-to-right decoder as a `CausalModel`, and a bidirectional model as `EncoderModel`.

    Raises:
        UsageError: The model is too large for the device, is an encoder-decoder, or cannot be
            loaded.
        CaptureError: A decoder has no list of decoder blocks.
    """
    check_memory(model)
    if not isinstance(model, LoadedModel):
        model = loaded_model(replace(model_choice(model), encoder=True))
    if has_causal_head(unwrapped(model.model).config):
        # Some heads for causal models read later tokens too (BertLMHeadModel, XLNet).
        with suppress(UsageError):
            return CausalModel(model)
    return EncoderModel(model)


def as_controls(wanted: str | Sequence[str] | None) -> list[str]:
    """Return the wanted controls as a list, each once, in the order of ``CONTROLS``.

    The control ``untrained`` is the model with random weights; ``shuffled`` is the model on texts
    whose tokens are in random order.

    Args:
        wanted: One name, several, or None for no control.
    """
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    return [name for name in CONTROLS if name in names]


def _nll(logits: Tensor, ids: Tensor) -> NDArray[np.float64]:
    """Negative log-probability of every token of a text after its first, float64."""
    losses = nn.functional.cross_entropy(
        logits[:-1].float(),
        ids[1:].to(logits.device),
        reduction="none",
    )
    losses = losses.to("cpu", torch.float64)
    return np.asarray(losses.numpy())


def last_vectors(states: Tensor) -> NDArray[np.float32]:
    """Return the state of each text's last token.

    Args:
        states: Shape (b, t, d).

    Returns:
        Shape (b, d), float32, on the CPU.
    """
    return np.asarray(states[:, -1].float().cpu().numpy(), dtype=np.float32)


def unit_tokens(states: Tensor) -> tuple[Tensor, Tensor]:
    """Scale every token's state to length one.

    Args:
        states: Shape (b, t, d).

    Returns:
        The scaled states, shape (b, t, d), float32, and a mask, shape (b, t), that is false where a
        state is zero and so has no direction.
    """
    x = states.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    x = x / largest.clamp_min(torch.finfo(torch.float32).tiny)
    norms = x.norm(dim=-1, keepdim=True)
    return x / norms.clamp_min(0.5), norms[..., 0] > 0


def token_dispersions(states: Tensor) -> NDArray[np.float64]:
    """Return the mean cosine distance over all pairs of tokens, for each text.

    Args:
        states: Shape (b, t, d).

    Returns:
        Shape (b,), float64; NaN for a text with fewer than two states that are not zero.
    """
    units, valid = unit_tokens(states)
    count = valid.sum(dim=1).double()
    mean = units.sum(dim=1, keepdim=True) / count[:, None, None]
    differences = units - mean
    squares = (differences**2).sum(dim=-1).double() * valid
    spread = squares.sum(dim=1) / (count - 1)
    defined = spread.masked_fill(count < 2, float("nan"))
    return np.asarray(defined.cpu().numpy())


def in_float32(model: ModelLike) -> ModelLike:
    """Return a model's loading options, changed to load the weights in float32.

    The argument is returned unchanged if the model is already loaded or quantised, if a dtype was
    asked for, or if the configuration cannot be read.
    """
    choice = model_choice(model)
    if isinstance(model, LoadedModel) or choice.dtype != "auto" or choice.quantize:
        return model
    config = _config(model)
    if config is None or getattr(config, "quantization_config", None) is not None:
        return model
    return replace(choice, dtype="float32")


def check_memory(model: ModelLike) -> None:
    """Raise UsageError if a model in float32 does not fit into its device's free memory.

    The model is not loaded: its weights are counted from its configuration. Nothing is checked if
    the model is already loaded, is to run in another dtype or with ``device="auto"``, or if its
    weights cannot be counted.
    """
    choice = model_choice(model)
    if isinstance(model, LoadedModel) or choice.dtype != "float32" or choice.device == "auto":
        return
    count = weights_count(model)
    if count is None:
        return
    device = choice.device or ("cuda" if torch.cuda.is_available() else "cpu")
    free = free_bytes(device)
    if count * _FLOAT32 > free:
        raise UsageError(
            f"{choice} takes {count * _FLOAT32 / 1e9:.1f} GB in float32 ({count / 1e9:.2f} billion "
            f"weights), and {device} has {free / 1e9:.1f} GB free; use a larger device, device "
            "auto to spread the model over all devices, or model_args dtype=bfloat16, which makes "
            "the results less exact"
        )


def weights_count(model: ModelLike) -> int | None:
    """Return the number of a model's weights, counted from its configuration without loading it.

    The result is None if the configuration cannot be read, or no model can be built from it.
    """
    config = _config(model)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=model_choice(model).trust_remote_code
            )
    except Exception:  # a checkpoint's own code may raise any exception; loading tells it
        return None
    return _count(built)


def _count(model: Any) -> int:
    """Number of a model's parameters."""
    return int(sum(parameter.numel() for parameter in model.parameters()))


def free_bytes(device: str) -> int:
    """Return the free memory of a device in bytes.

    For the CPU it is at most the memory limit of the container in which the process runs.
    """
    if device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = _CONTAINER.read_text(encoding="ascii").strip()
    except OSError:
        return free
    return min(free, int(limit)) if limit.isdigit() else free


def _config(model: ModelLike) -> Any:
    """A checkpoint's configuration; None if it cannot be read, which loading tells."""
    choice = model_choice(model)
    folder = Path(choice.name).expanduser()
    try:
        return transformers.AutoConfig.from_pretrained(
            folder if folder.is_dir() else choice.name,
            revision=choice.revision or "main",
            trust_remote_code=choice.trust_remote_code,
        )
    except Exception:  # transformers passes on errors of its HTTP library, too
        return None
