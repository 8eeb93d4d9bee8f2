"""Hidden states of a decoder's layers and sub-layers, by hooks; places are found by structure.

Names of places, K counting blocks from 0, negative from the end:

===============  ====================================================================================
``last``         the state that feeds the output projection, after the final norm (``hidden_states[-1]``)
``norm``         output of the final norm: the same numbers in all but a few models; also seen where a fused
                 loss or ``generate`` never gives the projection all positions
``embeddings``   input of the first block (``hidden_states[0]``)
``layer.K``      output of block K (``hidden_states[K + 1]``; for the last block, before the final norm)
``layer.K.ffn``  the same: the residual stream after the block's feed-forward part
``layer.K.attn`` the residual stream after the block's token mixer (attention, or a recurrence in its place)
===============  ====================================================================================

In blocks that add attention and feed-forward in parallel (GPT-NeoX, GPT-J, Phi, Falcon, Cohere, ...) no
such stream exists; ``attn`` is block input + attention output there, so that ``ffn - attn`` is the
feed-forward contribution everywhere. In post-norm blocks (OPT-350m) ``attn`` is the sum before its norm.
Blocks of one part only (Mamba) have ``layer.K`` alone.

The indices are those of all but Mamba and RWKV, whose ``hidden_states`` leave the embeddings out: ``layer.K``
is ``hidden_states[K]`` there, the last block included. RWKV in evaluation halves the state after every
``rescale_every``-th block; ``layer.K`` is the state before that, of the same direction.

How ``attn`` is found: within a block, the mixer is the first sub-module called that has sub-modules itself;
the stream is the first tensor after it that is handed to a sub-module and came out of none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmeval_dispersion.errors import CaptureError, UsageError
from lmeval_dispersion.model import NAME

Sink = Callable[[str, Tensor], None]
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


@dataclass(frozen=True)
class Site:
    """One place whose state can be seen.

    Attributes:
        name: Canonical name: no negative index, ``layer.K`` for ``layer.K.ffn``.
        module: Whose input or output it is; for ``attn`` the block.
        kind: ``input``, ``output`` or ``attn``.
    """

    name: str
    module: nn.Module
    kind: str

    def hook(self, see: Callable[[Tensor], None]) -> list[RemovableHandle]:
        """Register hooks that hand every forward pass's state (b, t, d) to ``see``; remove them yourself."""
        if self.kind == "attn":
            return _AfterMixer(see).hook(self.module)
        if self.kind == "input":

            def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
                see(_first(args, kwargs, self.name))

            return [self.module.register_forward_pre_hook(before, with_kwargs=True)]

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            see(_first(output, {}, self.name))

        return [self.module.register_forward_hook(after)]


@dataclass(frozen=True)
class Decoder:
    """The parts of a causal decoder, found inside any wrapper (PEFT, DDP, FSDP, ``torch.compile``).

    Attributes:
        blocks: The decoder blocks in order.
        norm: The final norm, or None where there is none.
        head: The output projection, or None for a bare decoder.
    """

    blocks: tuple[nn.Module, ...]
    norm: nn.Module | None
    head: nn.Module | None

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        """Find the parts of ``model``.

        Raises:
            CaptureError: It is an encoder-decoder, or no list of decoder blocks is in it.
        """
        inner = unwrapped(model)
        config = getattr(inner, "config", None)
        kind = type(inner).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise CaptureError(
                f"expected a decoder-only model, got the encoder-decoder {kind}; use a causal one"
            )
        layers, found = depth(config), block_lists(text_decoder(inner))
        if not found:
            raise CaptureError(
                f"expected a model with a list of decoder blocks, got {kind}, which has none; "
                "load it with AutoModelForCausalLM"
            )
        # max keeps the first of equals: the stack itself is registered before heads and extras.
        parent, blocks = max(found, key=lambda pair: (len(pair[1]) == layers, len(pair[1])))
        return cls(tuple(blocks), final_norm(parent, blocks), head(inner))

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def names(self) -> list[str]:
        """Every canonical name and alias that :meth:`site` takes, without negative indices."""
        names = [n for n, part in (("last", self.head or self.norm), ("norm", self.norm)) if part is not None]
        names.append("embeddings")
        for k, block in enumerate(self.blocks):
            parts = [f"layer.{k}.attn", f"layer.{k}.ffn"] if has_two_parts(block) else []
            names += [f"layer.{k}", *parts]
        return names

    def site(self, name: str) -> Site:
        """The place called ``name``.

        Raises:
            UsageError: There is none; the message lists what there is.
        """
        if name == "last" and self.head is not None:
            return Site("last", self.head, "input")
        if name == "embeddings":
            return Site(name, self.blocks[0], "input")
        if name in ("last", "norm") and self.norm is not None:
            return Site(name, self.norm, "output")
        match = NAME.fullmatch(name)
        if match and -len(self) <= int(match[1]) < len(self):
            k = int(match[1]) % len(self)
            if match[2] is None or has_two_parts(self.blocks[k]):
                if match[2] == "attn":
                    return Site(f"layer.{k}.attn", self.blocks[k], "attn")
                return Site(f"layer.{k}", self.blocks[k], "output")
        raise UsageError(f"expected layers among {self._summary()}; got {name!r}")

    def _summary(self) -> str:
        names = [n for n in ("last", "norm", "embeddings") if n in self.names()]
        ends = f"layer.0 ... layer.{len(self) - 1} (or layer.-{len(self)} ... layer.-1)"
        two = [k for k, block in enumerate(self.blocks) if has_two_parts(block)]
        which = "each" if len(two) == len(self) else f"layers {', '.join(map(str, two))}"
        return ", ".join([*names, ends]) + (f", {which} also with .attn and .ffn" if two else "")


def split_names(names: str | Sequence[str]) -> list[str]:
    """Layer names from one text, separated by ``+`` or ``,``; ``last`` where there are none.

    >>> split_names("last+layer.-1.attn")
    ['last', 'layer.-1.attn']
    """
    parts = names.replace(",", "+").split("+") if isinstance(names, str) else names
    return [str(name).strip() for name in parts if str(name).strip()] or ["last"]


def resolve(model: nn.Module, names: Sequence[str]) -> list[Site]:
    """The places called ``names``, in that order.

    Raises:
        UsageError: A name is unknown; the message lists what there is.
        CaptureError: ``model`` has no decoder blocks.
    """
    decoder = Decoder.of(model)
    return [decoder.site(name) for name in names]


@contextmanager
def capture(model: nn.Module, names: Sequence[str], sink: Sink | None = None) -> Iterator[dict[str, Tensor]]:
    """See the states of ``names`` in every forward pass inside the block; hooks are always removed.

    Args:
        model: Any wrapped or bare decoder.
        names: Places, see the module's table.
        sink: Called as ``sink(name as given, state)`` with state of shape (b, t, d), the model's dtype and
            device, attached to the graph where one is built. Without it, each pass's states replace the
            last ones in the dict that this yields.

    Raises:
        UsageError: A name is unknown.
        CaptureError: The model has no decoder blocks, or it ran and a place was never passed (hooks are not
            seen by a graph that was compiled before they were set).

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11))
    >>> with capture(model, ["last", "layer.-1.attn"]) as states:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> {name: tuple(state.shape) for name, state in states.items()}
    {'layer.-1.attn': (1, 3, 8), 'last': (1, 3, 8)}
    """
    sites = list(zip(names, resolve(model, names), strict=True))
    latest: dict[str, Tensor] = {}
    seen: set[str] = set()
    ran = False

    def see(name: str) -> Callable[[Tensor], None]:
        def take(state: Tensor) -> None:
            seen.add(name)
            if sink is None:
                latest[name] = state
            else:
                sink(name, state)

        return take

    def passed(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal ran
        ran = True

    handles = [model.register_forward_hook(passed)]
    try:
        for name, site in sites:
            handles += site.hook(see(name))
        yield latest
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for name in names if name not in seen]
    if ran and missed:
        raise CaptureError(
            f"the model ran and never passed {', '.join(missed)}; a compiled model must be captured before "
            "its first call, and a loss that skips the output projection needs 'norm' in place of 'last'"
        )


class _AfterMixer:
    """Hooks of one block that find the residual stream after its token mixer (see the module's text)."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self.see = see
        self.clear()

    def clear(self) -> None:
        self.block_input: Tensor | None = None
        self.mixed: Tensor | None = None  # the mixer's contribution, followed through dropout and post-norm
        self.known: list[Tensor] = []  # held, not only their ids: a freed id could be given to a new tensor
        self.done = False

    def hook(self, block: nn.Module) -> list[RemovableHandle]:
        handles = [
            block.register_forward_pre_hook(self.enter, with_kwargs=True),
            block.register_forward_hook(self.leave),
        ]
        for child in unwrapped(block).children():
            handles.append(child.register_forward_pre_hook(self.before_child, with_kwargs=True))
            handles.append(child.register_forward_hook(self.after_child, with_kwargs=True))
        return handles

    def enter(self, _block: nn.Module, args: Any, kwargs: Any) -> None:
        self.clear()
        self.block_input = _first(args, kwargs, "a block's input")
        self.known = [self.block_input]

    def before_child(self, _child: nn.Module, args: Any, kwargs: Any) -> None:
        state = next(_tensors((args, kwargs)), None)
        x = self.block_input
        if x is None or self.done or state is None or any(state is other for other in self.known):
            return
        if self.mixed is not None and state.numel() == x.numel():
            self.see(state.reshape(x.shape))  # OPT hands its feed-forward part flattened rows
            self.done = True
        self.known.append(state)

    def after_child(self, child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        out = next(_tensors(output), None)
        if self.block_input is None or self.done or out is None:
            return
        given = list(_tensors((args, kwargs)))
        if self.mixed is None:
            if any(True for _ in child.children()):
                self.mixed = out
                if any(other is self.block_input for other in given[1:]):  # BLOOM: the mixer adds it itself
                    self.see(out)
                    self.done = True
        elif given and given[0] is self.mixed:
            self.mixed = out
        self.known.append(out)

    def leave(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        x, mixed = self.block_input, self.mixed
        done = self.done
        self.clear()
        if not done and x is not None and mixed is not None:
            self.see(x.to(mixed.device) + mixed.reshape(x.shape))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors of at least two dimensions in (nested) arguments or outputs, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim >= 2:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _first(args: Any, kwargs: dict[str, Any], what: str) -> Tensor:
    state = next(_tensors((args, kwargs)), None)
    if state is None or state.ndim != 3:
        shape = None if state is None else tuple(state.shape)
        raise CaptureError(f"expected {what} to hold one state a token, shape (b, t, d), got {shape}")
    # Tensor-parallel plans may keep states in pieces (DTensor); all processes pass here and gather them.
    whole = getattr(state, "full_tensor", None)
    return whole() if callable(whole) else state


def unwrapped(model: nn.Module) -> nn.Module:
    """``model`` without PEFT, DDP, FSDP and ``torch.compile`` around it."""
    while True:
        if callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()  # type: ignore[operator]
        else:
            inner = next((c for n in _WRAPPED if (c := _only_child(model, n)) is not None), None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def _only_child(model: nn.Module, name: str) -> nn.Module | None:
    children = dict(model.named_children())
    return children.get(name) if len(children) == 1 else None


def text_decoder(model: nn.Module) -> nn.Module:
    """The text decoder of a model that may have a vision tower beside it."""
    get_decoder = getattr(model, "get_decoder", None)
    inner = get_decoder() if callable(get_decoder) else None
    return inner if isinstance(inner, nn.Module) and block_lists(inner) else model


def depth(config: Any) -> int | None:
    """Number of blocks that the configuration of the text part tells, if it does."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None


def block_lists(root: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Outermost lists whose members are built of modules, with the module that holds each."""
    found: list[tuple[nn.Module, nn.ModuleList]] = []
    for child in root.children():
        if isinstance(child, nn.ModuleList):
            if len(child) and all(any(True for _ in unwrapped(member).children()) for member in child):
                found.append((root, child))
        else:
            found += block_lists(child)
    return found


def final_norm(parent: nn.Module, blocks: nn.ModuleList) -> nn.Module | None:
    """The first norm registered after the blocks, else the last before them that is not the embedding's."""
    before: list[nn.Module] = []
    passed = False
    for name, child in parent.named_children():
        label = f"{name} {type(child).__name__}".lower()
        if child is blocks:
            passed = True
        elif "norm" in label or re.search(r"\bln", label):
            if passed:
                return child
            if "emb" not in label:
                before.append(child)
    return before[-1] if before else None


def head(model: nn.Module) -> nn.Module | None:
    """The output projection, or None for a bare decoder."""
    find = getattr(model, "get_output_embeddings", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def has_two_parts(block: nn.Module) -> bool:
    """Whether a block has a mixer and a feed-forward part: two sub-modules, no norms, one composite."""
    children = list(unwrapped(block).children())
    composite = [child for child in children if any(True for _ in child.children())]
    weights = [getattr(child, "weight", None) for child in children if child not in composite]
    linear = [w for w in weights if isinstance(w, Tensor) and w.ndim >= 2]
    return len(composite) >= 1 and len(composite) + len(linear) >= 2
