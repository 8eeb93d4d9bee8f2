"""Hidden states of a decoder's layers and sub-layers, by hooks; layers are located by structure.

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

In blocks that add attention and feed-forward in parallel (GPT-NeoX, GPT-J, Phi, Falcon, Cohere, ...) ``attn``
is block input + attention output, so that ``ffn - attn`` is the feed-forward contribution everywhere. In
post-norm blocks (OPT-350m) ``attn`` is the sum before its norm. Blocks of one part only (Mamba) have
``layer.K`` alone. The ``hidden_states`` of Mamba and RWKV leave the embeddings out, so that ``layer.K`` is
``hidden_states[K]`` there; RWKV in evaluation halves the state after every ``rescale_every``-th block, and
``layer.K`` is the state before that.

Locating ``attn``: within a block, the mixer is the first sub-module called that has sub-modules itself;
the stream is the first tensor after it that enters a sub-module and is not the output of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmeval_dispersion.errors import CaptureError, UsageError
from lmeval_dispersion.model import NAME

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


@dataclass(frozen=True)
class Site:
    """A place in a model where hidden states are captured.

    Attributes:
        name: Canonical name of the layer, such as ``layer.3.attn``.
        module: The module that gets the hook.
        kind: Which state is captured: the module's ``input`` or ``output``; or ``attn``, a block's
            residual stream after its attention (or another token mixer).
    """

    name: str
    module: nn.Module
    kind: str

    def hook(self, see: Callable[[Tensor], None]) -> list[RemovableHandle]:
        """Register hooks that call ``see`` with the state in each forward pass.

        The state has the shape (batch, tokens, d).

        Returns:
            The handles with which the caller removes the hooks.
        """
        if self.kind == "attn":
            return _AfterMixer(see).hook(self.module)

        def on_output(_module: nn.Module, _arguments: Any, output: Any) -> None:
            see(_first(output, self.name))

        def on_input(_module: nn.Module, *given: Any) -> None:
            see(_first(given, self.name))

        if self.kind == "output":
            return [self.module.register_forward_hook(on_output)]
        return [self.module.register_forward_pre_hook(on_input, with_kwargs=True)]


@dataclass(frozen=True)
class Decoder:
    """The parts of a causal decoder, found inside wrappers (PEFT, DDP, FSDP, ``torch.compile``).

    Attributes:
        stack: The module that contains the list of blocks and runs them.
        blocks: The decoder blocks, first to last.
        norm: The final norm after the blocks; None if there is none.
        head: The output projection; None for a bare decoder.
    """

    stack: nn.Module
    blocks: tuple[nn.Module, ...]
    norm: nn.Module | None
    head: nn.Module | None

    @classmethod
    def of(cls, model: nn.Module) -> Decoder:
        """Find the parts of a model.

        Raises:
            CaptureError: The model is an encoder-decoder, or has no list of decoder blocks.
        """
        inner = unwrapped(model)
        config = getattr(inner, "config", None)
        kind = type(inner).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise CaptureError(
                f"expected a decoder-only model, got the encoder-decoder {kind}; use a causal model"
            )
        lists = block_lists(text_decoder(inner))
        if not lists:
            raise CaptureError(
                f"expected a model with a list of decoder blocks, got {kind} without such a list; load "
                "the model with AutoModelForCausalLM"
            )
        layers = depth(config)
        # max keeps the first of equals: the stack is registered before heads and extras.
        parent, blocks = max(lists, key=lambda pair: (len(pair[1]) == layers, len(pair[1])))
        return cls(parent, tuple(blocks), final_norm(parent, blocks), head(inner))

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def names(self) -> list[str]:
        """Return every layer name that :meth:`site` accepts, except those with negative indices."""
        names = list(self._outside())
        for k, block in enumerate(self.blocks):
            names.append(f"layer.{k}")
            if has_two_parts(block):
                names += [f"layer.{k}.attn", f"layer.{k}.ffn"]
        return names

    def site(self, name: str) -> Site:
        """Return the place in the model where the state of a layer can be captured.

        Raises:
            UsageError: The model has no layer of that name.
        """
        outside = self._outside()
        if name in outside:
            return outside[name]
        count = len(self)
        match = NAME.fullmatch(name)
        if match and -count <= int(match[1]) < count:
            k = int(match[1]) % count
            block = self.blocks[k]
            if match[2] is None or has_two_parts(block):
                if match[2] == "attn":
                    return Site(f"layer.{k}.attn", block, "attn")
                return Site(f"layer.{k}", block, "output")
        raise UsageError(f"expected layers among {self._known()}; got {name!r}")

    def _known(self) -> str:
        """All names, for a message."""
        count = len(self)
        blocks = f"layer.0 ... layer.{count - 1} (or layer.-{count} ... layer.-1)"
        known = ", ".join([*self._outside(), blocks])
        two = [str(k) for k, block in enumerate(self.blocks) if has_two_parts(block)]
        if not two:
            return known
        which = "each layer.K"
        if len(two) < count:
            which = ", ".join(f"layer.{k}" for k in two)
        return f"{known}, and {which} with .attn or .ffn added"

    def _outside(self) -> dict[str, Site]:
        """The places outside single blocks."""
        sites = {}
        if self.head is not None:
            sites["last"] = Site("last", self.head, "input")
        elif self.norm is not None:
            sites["last"] = Site("last", self.norm, "output")
        if self.norm is not None:
            sites["norm"] = Site("norm", self.norm, "output")
        sites["embeddings"] = Site("embeddings", self.blocks[0], "input")
        return sites


def split_names(names: str | Sequence[str]) -> list[str]:
    """Split a text into layer names separated by ``+`` or ``,``.

    Blank names are dropped; without any name the result is ``["last"]``. A sequence of names is
    treated the same way.

    >>> split_names("last+layer.-1.attn")
    ['last', 'layer.-1.attn']
    """
    if isinstance(names, str):
        names = names.replace(",", "+").split("+")
    stripped = [str(name).strip() for name in names]
    return [name for name in stripped if name] or ["last"]


def resolve(model: nn.Module, names: Sequence[str]) -> list[Site]:
    """Return the places where the states of some layers can be captured, in the order of ``names``.

    Raises:
        CaptureError: The model is not a decoder.
        UsageError: A name is not that of a layer of this model.
    """
    decoder = Decoder.of(model)
    return [decoder.site(name) for name in names]


@contextmanager
def capture(
    model: nn.Module, names: Sequence[str], sink: Callable[[str, Tensor], None] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Inside this context, capture the hidden states of some layers in every forward pass.

    Yields a dict that maps each name to the state of the last forward pass, shape
    (batch, tokens, d); with ``sink`` it stays empty. Hooks are removed even after an error.

    Args:
        model: A decoder, wrapped (PEFT, DDP, …) or not.
        names: Names of layers; see the module's table.
        sink: Function that is called in each forward pass with a name, as given, and the state,
            shape (batch, tokens, d), in the model's dtype and on its device. The state is part of
            the autograd graph, if there is one.

    Raises:
        UsageError: A name is not that of a layer of this model.
        CaptureError: The model has no decoder blocks, or ran without reaching a layer, as a model
            that was compiled earlier may do.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11))
    >>> with capture(model, ["last", "layer.-1.attn"]) as states:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> {name: tuple(state.shape) for name, state in states.items()}
    {'layer.-1.attn': (1, 3, 8), 'last': (1, 3, 8)}
    """
    sites = zip(names, resolve(model, names), strict=True)
    latest: dict[str, Tensor] = {}
    seen: set[str] = set()
    passes: list[None] = []

    def see(name: str, state: Tensor) -> None:
        seen.add(name)
        if sink is None:
            latest[name] = state
        else:
            sink(name, state)

    handles = [model.register_forward_hook(lambda *_: passes.append(None))]
    try:
        for name, site in sites:
            handles += site.hook(partial(see, name))
        yield latest
    finally:
        for handle in handles:
            handle.remove()
    missed = [name for name in names if name not in seen]
    if passes and missed:
        raise CaptureError(
            f"the model ran without reaching {', '.join(missed)}; with a compiled model, start to capture "
            "before its first call; with a loss that skips the output projection, use 'norm' in place of "
            "'last'"
        )


class _AfterMixer:
    """Hooks on one block that locate the residual stream after its token mixer (see the module)."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self.see = see
        self.clear()

    def clear(self) -> None:
        self.block_input: Tensor | None = None
        # The mixer's contribution, followed through dropout and post-norm.
        self.mixed: Tensor | None = None
        self.known: list[Tensor] = []  # kept alive: a freed tensor's id could be reused
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
        self.block_input = _first((args, kwargs), "a block's input")
        self.known = [self.block_input]

    def before_child(self, _child: nn.Module, args: Any, kwargs: Any) -> None:
        state = next(_tensors((args, kwargs)), None)
        x = self.block_input
        if x is None or self.done or state is None or any(state is other for other in self.known):
            return
        if self.mixed is not None and state.numel() == x.numel():
            self.see(state.reshape(x.shape))  # OPT passes flattened rows to its feed-forward part
            self.done = True
        self.known.append(state)

    def after_child(self, child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        out = next(_tensors(output), None)
        if self.block_input is None or self.done or out is None:
            return
        given = list(_tensors((args, kwargs)))
        if self.mixed is None:
            if _composite(child):
                self.mixed = out
                # BLOOM: the mixer itself adds its block's input.
                if any(other is self.block_input for other in given[1:]):
                    self.see(out)
                    self.done = True
        elif given and given[0] is self.mixed:
            self.mixed = out
        self.known.append(out)

    def leave(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        x = self.block_input
        mixed = self.mixed
        if not self.done and x is not None and mixed is not None:
            self.see(x.to(mixed.device) + mixed.reshape(x.shape))
        self.clear()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors of at least two dimensions in (nested) arguments or outputs, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.ndim >= 2:
            yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _first(given: Any, what: str) -> Tensor:
    """The first tensor of states in arguments or an output."""
    state = next(_tensors(given), None)
    if state is None or state.ndim != 3:
        shape = "no tensor" if state is None else tuple(state.shape)
        raise CaptureError(
            f"expected {what} with one state for each token, shape (batch, tokens, d), got {shape}; name "
            "another layer"
        )
    # Tensor-parallel plans may keep states in pieces (DTensor); all processes come here and gather them.
    whole = getattr(state, "full_tensor", None)
    return whole() if callable(whole) else state


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of PEFT, DDP, FSDP and ``torch.compile``."""
    while True:
        children = dict(model.named_children())
        if callable(getattr(model, "get_base_model", None)):
            inner = model.get_base_model()  # type: ignore[operator]
        else:
            inner = next((children[name] for name in _WRAPPED if [*children] == [name]), None)
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def text_decoder(model: nn.Module) -> nn.Module:
    """Return the text decoder of a model that may also read images.

    The model itself is returned if it has no such part with decoder blocks.
    """
    get_decoder = getattr(model, "get_decoder", None)
    if callable(get_decoder):
        inner = get_decoder()
        if isinstance(inner, nn.Module) and block_lists(inner):
            return inner
    return model


def depth(config: Any) -> int | None:
    """Return the number of decoder blocks in a transformers configuration; None if not stated."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    layers = getattr(text, "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None


def block_lists(root: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """Find the lists of blocks in a model: outermost ModuleLists whose members have submodules.

    Returns pairs: the module that contains a list, and the list.
    """
    lists: list[tuple[nn.Module, nn.ModuleList]] = []
    for child in root.children():
        if isinstance(child, nn.ModuleList):
            if len(child) and all(_composite(unwrapped(member)) for member in child):
                lists.append((root, child))
        else:
            lists += block_lists(child)
    return lists


def final_norm(parent: nn.Module, blocks: nn.ModuleList) -> nn.Module | None:
    """Return the final norm of the module that contains the blocks; None if there is none.

    It is the first norm registered after the blocks, or else the last one before the blocks; a norm
    of the embedding does not count.
    """
    before: nn.Module | None = None
    passed = False
    for name, child in parent.named_children():
        label = f"{name} {type(child).__name__}".lower()
        if child is blocks:
            passed = True
        elif "norm" in label or re.search(r"\bln", label):
            if passed:
                return child
            if "emb" not in label:
                before = child
    return before


def head(model: nn.Module) -> nn.Module | None:
    """Return the output projection of a model; None for a bare decoder."""
    find = getattr(model, "get_output_embeddings", None)
    if callable(find):
        projection = find()
        if isinstance(projection, nn.Module):
            return projection
    return None


def has_two_parts(block: nn.Module) -> bool:
    """Whether a block has a token mixer and a feed-forward part.

    A block has both if at least two of its submodules have a weight matrix or submodules of their
    own, and at least one has submodules.
    """
    composite = 0
    linear = 0
    for child in unwrapped(block).children():
        weight = getattr(child, "weight", None)
        if _composite(child):
            composite += 1
        elif isinstance(weight, Tensor) and weight.ndim >= 2:
            linear += 1
    return composite >= 1 and composite + linear >= 2


def _composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())
