"""A dispersion loss on the hidden states of any decoder, in any training loop, by forward hooks.

    reg = DispersionRegularizer(model, "angular_spread", layers="all", weight=0.1)
    model.train()  # from_pretrained leaves it in evaluation mode
    loss = model(**batch).loss + reg.pop()

A hook before the decoder arms the hooks of the layers, only in training and with gradients, and a
hook after it disarms them: they ignore evaluation, generation and the second run of a checkpointed
block. States are collected by layer during the forward pass. The loss is formed in
:meth:`DispersionRegularizer.pop`, outside any checkpoint or compiled graph.
:meth:`DispersionRegularizer.measured` watches evaluation with the same hooks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmeval_dispersion.errors import CaptureError, GeometryError, NonFiniteLossError, UsageError
from lmeval_dispersion.geometry.dispersion import mean_distance
from lmeval_dispersion.model import states_after_blocks
from lmeval_dispersion.model.capture import Decoder
from lmeval_dispersion.training.losses import DispersionLoss, push_away
from lmeval_dispersion.training.pairs import points, unit_scale, unit_sums

# Numbers of states in a call of the loss. Large stacks of layers save a GPU many small kernels; on a CPU only
# toy models gain, and larger stacks would leave its cache.
_STACKED_NUMBERS = 1 << 26
_STACKED_NUMBERS_CPU = 1 << 16


class Layout(NamedTuple):
    """Which tokens of a batch are real, and to which document each belongs.

    Attributes:
        mask: Shape (b, t), true on real tokens; None if all are real.
        segments: Shape (b, t), the document of each token; None if each row is one document.
    """

    mask: Tensor | None
    segments: Tensor | None


def layout(arguments: dict[str, Any], b: int, t: int) -> Layout:
    """Read the layout of a batch from the arguments that the decoder was called with.

    The last t columns of ``attention_mask`` count, since it may cover a cache or a prefix too.
    Documents are those of ``seq_idx``; without it those of ``cu_seq_lens_q``, if ``b`` is 1;
    otherwise a document begins wherever ``position_ids`` is 0. Without any of these arguments each
    row is one document.

    Args:
        arguments: The arguments of the decoder's forward pass, by name.
        b: Number of rows in the batch.
        t: Number of tokens in a row.

    Raises:
        GeometryError: The shape of an argument does not fit; then call
            :meth:`DispersionRegularizer.describe` before each pass.
    """
    mask = arguments.get("attention_mask")
    if mask is not None:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        if len(shape) != 2 or shape[0] != b or int(shape[1]) < t:
            raise GeometryError(
                f"expected an attention_mask of shape (b, t) = ({b}, {t}), got {shape}; "
                "say which tokens are real with describe(mask=..., segments=...)"
            )
        mask = mask[:, -t:] != 0
        if mask.device.type == "cpu" and bool(mask.all()):
            mask = None
    return Layout(mask, _documents(arguments, b, t))


class DispersionRegularizer:
    """Adds a dispersion loss on hidden states to the loss of any training loop.

    The added term is ``weight`` times the mean of the loss over layers. Create the regularizer
    before a model wrapped by ``torch.compile`` or DDP runs for the first time. The model may be
    wrapped by PEFT, DDP, FSDP2 or ``torch.compile`` before the regularizer is created, or after.
    Use the regularizer as a context manager, or call :meth:`detach` at the end.

    Args:
        model: A causal decoder of transformers, bare or wrapped.
        loss: Name of a loss of :mod:`lmeval_dispersion.training.losses`, a ``DispersionLoss``, or a
            function of your own (see ``DispersionLoss``).
        layers: The blocks whose output states count: ``last`` (after the final norm), ``all``,
            ``early_half``, ``late_half``, names such as ``layer.3``, or indices such as ``[0,
            -1]``.
        weight: Factor of the loss, at least 0. It may be changed between steps.
        mode: With ``add``, :meth:`pop` returns the term to add to your loss. ``inject`` is for
            loops whose loss cannot be changed: :meth:`pop` returns 0, and the backward pass adds
            the term's gradient to the gradient at the layers' outputs, whose values stay the same.
            The errors of :meth:`pop` are then raised by the forward pass.
        seed: Seed of the draw of tokens, if the option ``max_tokens`` is set.
        options: Options of the loss, such as ``max_tokens=256`` (the most tokens that are drawn
            from each row) or ``tau=0.5``.

    Attributes:
        loss: The loss as a :class:`~lmeval_dispersion.training.losses.DispersionLoss`.
        layers: Full names of the layers.
        weight: Factor of the loss.
        mode: ``add`` or ``inject``.
        loss_scale: With ``inject``, the factor by which the loop multiplies its loss before
            ``backward``, such as 1/k with k accumulation steps. Set it if the loop has such a
            factor; 1 by default.
        step: Number of training passes whose loss was computed: by :meth:`pop`, or with
            ``inject`` by the pass itself.
        values: The loss of each layer in the latest of these passes, without the weight, by the
            layer's name; empty before the first.

    Raises:
        UsageError: The loss, an option, a layer, the weight or the mode cannot be used.
        CaptureError: The model has no list of decoder blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Tensor] = "angular_spread",
        layers: str | Sequence[str | int] = "last",
        weight: float = 0.1,
        *,
        mode: Literal["add", "inject"] = "add",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"expected a model (torch.nn.Module), got {type(model).__name__}; pass the loaded "
                "model"
            )
        if not weight >= 0:
            raise UsageError(
                f"expected a weight of at least 0, got {weight}; use the loss squeeze to make states "
                "more alike"
            )
        if mode not in ("add", "inject"):
            raise UsageError(f"expected mode add or inject, got {mode!r}")
        decoder = Decoder.of(model)
        if not isinstance(loss, DispersionLoss):
            loss = DispersionLoss(loss, seed=seed, **options)
        self.loss = loss
        self.layers = states_after_blocks(layers, len(decoder))
        self.weight = float(weight)
        self.mode = mode
        self.loss_scale = 1.0
        self.step = 0
        self.values: dict[str, Tensor] = {}
        self._armed = False
        self._forward = "none"  # the kind of the latest forward pass
        self._idle = False  # inside a forward pass without training, which hooks ignore
        self._states: dict[str, Tensor] = {}
        self._arguments: dict[str, Any] = {}  # the decoder's in the latest training pass
        self._idle_arguments: dict[str, Any] = {}
        self._next: dict[str, Tensor | None] = {}  # the described layout of the next pass
        self._described: dict[str, Tensor | None] = {}  # the described layout of the latest pass
        self._latest: tuple[Tensor, Tensor | None] | None = None
        self._measured: dict[str, TokenDispersion] | None = None  # while evaluation is measured
        # Losses that are being copied from a GPU.
        self._unchecked: list[tuple[Tensor, Any, list[str], int]] = []
        self._decoder = decoder
        self._handles: list[RemovableHandle] = []
        self.attach()

    def pop(self) -> Tensor:
        """Return the term to add to your loss: the weighted loss of the latest training pass.

        A training pass is a forward pass in training mode with gradients. If a step has several,
        the latest counts, so call `pop` after each pass whose loss you use. A pass in training mode
        without gradients, such as that of a reference model, changes nothing; a pass in evaluation
        mode drops a loss that was not fetched.

        Returns:
            A scalar. It is 0 with ``mode="inject"``, or if only passes without gradients ran.

        Raises:
            CaptureError: The model did not run since the last call, ran with gradients in
                evaluation mode, or a layer was not seen: hooks that are set after the first call of
                a compiled model never run.
            NonFiniteLossError: The loss is NaN or infinite. On a GPU this is raised one step later,
                so that no step waits for it.
            GeometryError: The mask, segments or domains do not fit the states.
            UsageError: The loss needs ``domains``, and :meth:`describe` was given none.
        """
        if self.mode == "inject":
            return torch.zeros(())
        states = self._states
        forward = self._forward
        self._states = {}
        self._forward = "none"
        if forward == "unlearned":
            return torch.zeros(())
        if forward == "evaluation":
            raise CaptureError(
                "expected a forward pass in training mode, got one in evaluation mode, in which "
                "from_pretrained leaves a model; call model.train() before you train"
            )
        missing = [name for name in self.layers if name not in states]
        if missing:
            raise CaptureError(
                f"expected states of {', '.join(self.layers)} since the previous pop(), got none "
                f"of {', '.join(missing)}; run the model once in training mode before each pop(), "
                "and attach the regularizer before torch.compile runs"
            )
        last = states[self.layers[-1]]
        shape = self._layout(last)
        values = self._losses([states[name] for name in self.layers], shape)
        of_layers = values.detach().unbind()
        self._note(dict(zip(self.layers, of_layers, strict=True)))
        self._latest = (last.detach(), shape.mask)
        self.step += 1
        return values.mean() * self.weight

    def describe(
        self,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        domains: Tensor | None = None,
    ) -> None:
        """Describe the batch of the next training pass, where the model's arguments do not.

        If neither ``mask`` nor ``segments`` is given, both are read from the model's arguments; see
        :func:`layout`.

        Args:
            mask: Shape (b, t), true on real tokens. With ``segments`` alone, all tokens are real.
            segments: Shape (b, t), the document of each token in packed rows. With ``mask`` alone,
                each row is one document.
            domains: Shape (b,), the domain of each sequence, for the loss
                ``cross_domain_push_away``.
        """
        self._next = {"mask": mask, "segments": segments, "domains": domains}

    @property
    def value(self) -> Tensor | None:
        """The mean of ``values`` over layers: the latest loss, without the weight.

        A scalar; None before the first.
        """
        if not self.values:
            return None
        return torch.stack(list(self.values.values())).mean()

    @contextmanager
    def measured(self) -> Iterator[dict[str, TokenDispersion]]:
        """Measure the dispersion of each chosen layer in the evaluation passes inside the block.

        If :meth:`detach` has removed the hooks, they are set again for the block.

        Yields:
            A `TokenDispersion` for each layer, by name. It collects all real tokens (by
            ``attention_mask``) of all passes that are not training passes.
        """
        detached = not self._handles
        self.attach()
        self._measured = {name: TokenDispersion() for name in self.layers}
        try:
            yield self._measured
        finally:
            self._measured = None
            if detached:
                self.detach()

    def dispersion(self) -> float | None:
        """Return the mean cosine distance over all token pairs of the latest batch with a loss.

        This is the batch of the latest training pass that ``step`` counts. The tokens' states are
        those of the last of the chosen layers. The result is None before the first such pass, and
        after :meth:`detach`.
        """
        if self._latest is None:
            return None
        z, mask = self._latest
        return -float(push_away(z, mask=mask))

    def attach(self) -> None:
        """Set the hooks on the model; needed only after :meth:`detach`."""
        if self._handles:
            return
        root = self._decoder.stack
        parameters = inspect.signature(type(root).forward).parameters
        self._names = [name for name in parameters if name != "self"]
        self._handles = [root.register_forward_pre_hook(self._enter, with_kwargs=True)]
        for name in self.layers:
            # The final norm, not the projection's input, which a loss fused with the projection skips.
            if name == "last":
                module = self._decoder.norm or self._decoder.blocks[-1]
            else:
                module = self._decoder.blocks[int(name.removeprefix("layer."))]
            self._handles.append(module.register_forward_hook(self._hook(name)))
        self._handles.append(root.register_forward_hook(self._leave))

    def detach(self) -> None:
        """Remove all hooks from the model; :meth:`attach` sets them again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._states = {}
        self._latest = None

    def __enter__(self) -> DispersionRegularizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _enter(self, root: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._idle = not (root.training and torch.is_grad_enabled())
        given = dict(zip(self._names, args, strict=False))
        given.update(kwargs)
        arguments = {}
        for name in ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q"):
            if given.get(name) is not None:
                arguments[name] = given[name]
        if self._idle:
            if self._measured is not None:
                self._idle_arguments = arguments
            if not root.training:
                self._states = {}
                self._forward = "evaluation" if torch.is_grad_enabled() else "unlearned"
            elif self._forward == "none":
                self._forward = "unlearned"
            return
        self._armed = True
        self._forward = "training"
        self._states = {}
        self._described = self._next
        self._next = {}
        self._arguments = arguments

    def _leave(self, _root: nn.Module, _args: Any, _output: Any) -> None:
        # With `inject` a checkpointed block needs the hooks again in the backward pass, even if other
        # passes without gradients ran in between.
        self._idle = False
        if self.mode == "add":
            self._armed = False

    def _hook(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            state: Tensor = output if isinstance(output, Tensor) else output[0]
            if self._idle and self._measured is not None:
                self._measure(self._measured[name], state)
            if self._idle or not self._armed:
                return None
            if self.mode == "add":
                self._states[name] = state
                return None
            if not (torch.is_grad_enabled() and state.requires_grad):
                return None
            pushed = self._with_gradient(name, state)
            if isinstance(output, Tensor):
                return pushed
            return (pushed, *output[1:])

        return hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _measure(self, measured: TokenDispersion, state: Tensor) -> None:
        b, t = state.shape[:2]
        mask, _ = layout(self._idle_arguments, b, t)
        measured.add(state, mask)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _with_gradient(self, name: str, state: Tensor) -> Tensor:
        """``state`` unchanged; its backward pass adds this layer's share of the loss's gradient."""
        shape = self._layout(state)
        with torch.enable_grad():
            leaf = state.detach().requires_grad_()
            value = self._losses([leaf], shape, first=self.layers.index(name))
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        self._note({name: value.detach()[0]})
        self._latest = (state.detach(), shape.mask)
        if name == self.layers[-1]:
            self.step += 1
        share = self.weight * self.loss_scale / len(self.layers)
        pushed: Tensor = _Inject.apply(state, gradient * share)  # type: ignore[no-untyped-call]
        return pushed

    def _losses(self, states: list[Tensor], shape: Layout, first: int = 0) -> Tensor:
        """The loss of each of ``states``, (layers,), in stacks of the best size."""
        given = {**shape._asdict(), "domains": self._described.get("domains")}
        values: list[Tensor] = []
        most = _STACKED_NUMBERS
        if states[0].device.type == "cpu":
            most = _STACKED_NUMBERS_CPU
        size = max(1, most // states[0].numel())
        for state in states:
            if state.shape != states[0].shape or state.device != states[0].device:
                size = 1
        for start in range(0, len(states), size):
            group = states[start : start + size]
            self.loss.calls = self.step * len(self.layers) + first + start
            # A single layer is not copied.
            stack = torch.stack(group) if len(group) > 1 else group[0].unsqueeze(0)
            values.append(self.loss(stack, **given))
        device = values[-1].device
        return torch.cat([value.to(device) for value in values])

    def _layout(self, state: Tensor) -> Layout:
        mask = self._described.get("mask")
        segments = self._described.get("segments")
        if mask is None and segments is None:
            b, t = state.shape[:2]
            return layout(self._arguments, b, t)
        return Layout(mask, segments)

    def _note(self, values: dict[str, Tensor]) -> None:
        """Keep the losses of layers, and raise for a non-finite one: on a GPU after it was copied."""
        self.values.update(values)
        layers = list(values)
        device = values[layers[-1]].device
        losses = torch.stack([value.to(device) for value in values.values()])
        if losses.device.type != "cuda":
            _check_finite(losses, layers, self.step)
            return
        while self._unchecked and self._unchecked[0][1].query():
            arrived, _, earlier_layers, step = self._unchecked.pop(0)
            _check_finite(arrived, earlier_layers, step)
        host = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
        host.copy_(losses, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._unchecked.append((host, event, layers, self.step))


class TokenDispersion:
    """The mean cosine distance over all pairs of tokens. Their states are added batch by batch.

    Only the sum and the number of unit vectors are kept, so the result does not depend on the
    batches, and the sums of several processes can be added.

    Attributes:
        sums: Shape (d + 1,), float64: the sum of the unit vectors, then their number; None before
            the first batch.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # (d + 1,): sum and number of the unit vectors, in float64

    def add(self, states: Tensor, mask: Tensor | None = None) -> None:
        """Add the states of a batch's tokens.

        States with a norm of at most 1e-12 have no direction and are left out.

        Args:
            states: Shape (b, t, d), the states of one layer.
            mask: Shape (b, t), true on the tokens to add; None for all.

        Raises:
            GeometryError: A shape or dtype does not fit.
        """
        p = points(states.detach(), mask=mask, pairs="batch")
        scale = unit_scale(p.z)
        (vectors,) = unit_sums(p, scale)
        number = p.counts(scale != 0).double()
        sums = torch.cat([vectors, number])
        self.sums = sums if self.sums is None else self.sums + sums

    def mean(self) -> float:
        """Return the mean cosine distance, in [0, n / (n - 1)] for n tokens; NaN for n < 2.

        Source: equation 1 of the paper RD (see :mod:`lmeval_dispersion.training.losses`).
        """
        if self.sums is None:
            return math.nan
        number = int(self.sums[-1])
        if number < 2:
            return math.nan
        total = self.sums[:-1].cpu().double()
        return mean_distance(total.numpy(), number)


def _check_finite(losses: Tensor, layers: list[str], step: int) -> None:
    for layer, value in zip(layers, losses.tolist(), strict=True):
        if not math.isfinite(value):
            raise NonFiniteLossError(layer, step)


def _documents(arguments: dict[str, Any], b: int, t: int) -> Tensor | None:
    ids = arguments.get("seq_idx")
    if isinstance(ids, Tensor):
        return _fitting("seq_idx", ids, b, t)
    bounds = arguments.get("cu_seq_lens_q")
    if isinstance(bounds, Tensor) and b == 1:
        place = torch.arange(t, device=bounds.device)
        ends = bounds[1:].to(place.dtype)
        documents = torch.bucketize(place, ends, right=True)
        return documents.unsqueeze(0)
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() == 3:  # several axes of rotary positions; the first counts tokens
        positions = positions[0]
    if positions.shape[0] == 1 and b > 1:
        positions = positions.expand(b, -1)
    starts = _fitting("position_ids", positions, b, t) == 0
    if starts.device.type == "cpu" and not bool(starts[:, 1:].any()):
        return None
    return starts.cumsum(-1)


def _fitting(name: str, given: Tensor, b: int, t: int) -> Tensor:
    if given.shape != (b, t):
        raise GeometryError(
            f"expected {name} of shape (b, t) = ({b}, {t}), got {tuple(given.shape)}; "
            "say which tokens are real, and to which document each belongs, with "
            "describe(mask=..., segments=...)"
        )
    return given


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad + gradient.to(grad.dtype), None
