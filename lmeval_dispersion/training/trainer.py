"""transformers' Trainer, and any trainer derived from it, with a dispersion loss.

    trainer = DispersionTrainer(model=model, args=args, train_dataset=data,
                                dispersion=DispersionConfig("angular_spread", layers="all", weight=0.1))

For another trainer put the mixin first: ``class SpreadSFT(DispersionTrainerMixin, SFTTrainer): ...``.
Evaluation and prediction are the parent's own, with the dispersion of every chosen layer added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.training.regularizer import DispersionRegularizer

_Parent: Any = object  # a trainer
# Column of the training data with each sequence's domain, for cross_domain_push_away.
DOMAINS = "domains"


@dataclass(frozen=True)
class DispersionConfig:
    """The dispersion loss that a trainer adds to its own loss.

    Attributes:
        loss: Name of a loss, or a function of your own; see
            :class:`~lmeval_dispersion.training.losses.DispersionLoss`.
        layers: The blocks whose output states count; see
            :class:`~lmeval_dispersion.training.regularizer.DispersionRegularizer`.
        weight: Factor of the loss. A callback may change ``trainer.regularizer.weight`` between
            steps.
        seed: Seed of the draw of tokens, if the option ``max_tokens`` is set.
        options: Options of the loss, such as ``{"max_tokens": 256}`` (the most tokens that are
            drawn from each row).
    """

    loss: str | Callable[..., Tensor] = "angular_spread"
    layers: str | Sequence[str | int] = "last"
    weight: float = 0.1
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class DispersionTrainerMixin(_Parent):  # type: ignore[misc]
    """Adds a dispersion loss to the Trainer of transformers, or to a trainer derived from it.

    The training log gets three figures, of which the first two are means over the same steps as
    ``loss``:

    - ``ce_loss``: the trainer's own loss;
    - ``dispersion_loss``: the dispersion loss without its weight, averaged over layers;
    - ``dispersion``: the mean cosine distance of the tokens in the latest batch, at the last of the
      chosen layers.

    Evaluation adds for every chosen layer ``eval_dispersion/LAYER``, the dispersion of all tokens
    of the evaluation data; the figure of the last chosen layer is ``eval_dispersion``, too.

    The gradient is that of the mean over micro-batches, for any number of accumulation steps; pairs
    are formed inside a micro-batch. If ``compute_loss`` runs the model more than once, the latest
    training pass counts.

    Args:
        *args: The arguments of the trainer.
        dispersion: The loss to add. None trains without one and logs ``ce_loss`` alone.
        **kwargs: The keyword arguments of the trainer.

    Raises:
        UsageError: The loss, a layer or the weight cannot be used, or one process drives several
            GPUs (``DataParallel``).
        CaptureError: The model has no list of decoder blocks.
    """

    def __init__(
        self, *args: Any, dispersion: DispersionConfig | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.dispersion = dispersion
        self.regularizer: DispersionRegularizer | None = None
        self._sums: dict[str, Tensor] = {}
        self._summed_to = 0
        self.add_callback(_Resumed(self))
        if dispersion is None:
            return
        if self.args.n_gpu > 1:
            raise UsageError(
                f"expected one GPU per process, got {self.args.n_gpu}; launch one "
                "process per GPU with torchrun"
            )
        self._regularize(self.model, dispersion)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """Return a new model from ``model_init``, with the dispersion loss attached."""
        model = super().call_model_init(*args, **kwargs)
        chosen = getattr(self, "dispersion", None)  # not yet while the parent is constructed
        if chosen is not None:
            self._regularize(model, chosen)
        return model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, and remove the hooks of the dispersion loss afterwards."""
        if self.regularizer is None:
            return super().train(*args, **kwargs)
        self.regularizer.attach()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.regularizer.detach()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the trainer's loss, with the weighted dispersion loss added while training.

        With ``return_outputs``, the result is a pair: this loss, and the model's outputs.

        Raises:
            CaptureError: The hooks saw no states of a layer in this pass.
            NonFiniteLossError: The dispersion loss is NaN or infinite.
            GeometryError: The batch's mask, documents or domains do not fit the states.
            UsageError: The loss needs a column ``domains``, which the batch lacks.
        """
        inputs = dict(inputs)
        domains = inputs.pop(DOMAINS, None)
        reg = self.regularizer if model.training else None
        if reg is not None and domains is not None:
            reg.describe(domains=domains)
        result = super().compute_loss(
            model,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=num_items_in_batch,
        )
        if not model.training:
            return result
        loss = result
        outputs = None
        if return_outputs:
            loss, outputs = result
        # A loss summed over the whole accumulated batch is no longer divided by the steps; ours is
        # always a mean over micro-batches.
        steps = getattr(self, "current_gradient_accumulation_steps", None)
        share = 1.0 / (steps or self.args.gradient_accumulation_steps)
        is_whole = self._is_scaled(num_items_in_batch)
        self._add("ce_loss", loss.detach() if is_whole else loss.detach() * share)
        if reg is not None:
            extra = reg.pop().to(loss.device)
            if reg.value is not None:
                value = reg.value.to(loss.device)
                self._add("dispersion_loss", value * share)
            loss = loss + (extra * share if is_whole else extra)
        if return_outputs:
            return loss, outputs
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the trainer does, and add each chosen layer's dispersion to the metrics."""
        if self.regularizer is None:
            return super().evaluation_loop(*args, **kwargs)
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_dispersion"
        with self.regularizer.measured() as layers:
            result = super().evaluation_loop(*args, **kwargs)
        for layer, measured in layers.items():
            if measured.sums is None:
                continue
            here = measured.sums.to(self.accelerator.device)
            measured.sums = self.accelerator.reduce(here, "sum")
            mean = measured.mean()
            result.metrics[f"{name}/{layer}"] = mean
            result.metrics[name] = mean  # the last layer's remains
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does; add ``ce_loss`` and dispersion figures to entries with ``loss``."""
        if "loss" in logs and self._sums:
            steps = max(1, self.state.global_step - self._summed_to)
            for name, total in self._sums.items():
                logs[name] = self._mean_of_processes(total) / steps
            measured = self.regularizer.dispersion() if self.regularizer else None
            if measured is not None:
                logs["dispersion"] = self._mean_of_processes(torch.tensor(measured))
            self._sums = {}
            self._summed_to = self.state.global_step
        super().log(logs, *args, **kwargs)

    def _mean_of_processes(self, value: Tensor) -> float:
        here = value.reshape(1).to(self.accelerator.device)
        values = self.accelerator.gather(here)
        return float(values.mean())

    def _regularize(self, model: Any, chosen: DispersionConfig) -> None:
        if self.regularizer is not None:
            self.regularizer.detach()
        self.regularizer = DispersionRegularizer(
            model,
            chosen.loss,
            chosen.layers,
            chosen.weight,
            seed=chosen.seed,
            **chosen.options,
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns
        if columns is not None and DOMAINS not in columns:
            columns.append(DOMAINS)

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the parent's loss is already divided by the whole accumulated batch's tokens."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        accepts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(accepts or self.compute_loss_func is not None)

    def _add(self, name: str, value: Tensor) -> None:
        value = value.float()
        if name in self._sums:
            value = self._sums[name] + value
        self._sums[name] = value


class DispersionTrainer(DispersionTrainerMixin, Trainer):  # type: ignore[misc]
    """The Trainer of transformers with a dispersion loss; see :class:`DispersionTrainerMixin`."""


class _Resumed(TrainerCallback):  # type: ignore[misc]
    """A resumed run continues counting: it draws the same tokens as an uninterrupted run."""

    def __init__(self, trainer: DispersionTrainerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the counters to the checkpoint's step."""
        self.trainer._summed_to = state.global_step
        if self.trainer.regularizer is not None:
            self.trainer.regularizer.step = state.global_step * args.gradient_accumulation_steps
