"""Measures a model in memory: the screener's G on the head's rows, and the spread of a fixed batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmeval_screener.figures import Gap, gap
from lmeval_screener.tokens.resolution import Resolution, resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from lmeval_dispersion.errors import GeometryError, UsageError
from lmeval_dispersion.geometry import dispersion, effective_rank
from lmeval_dispersion.model.capture import Decoder, capture, head, unwrapped
from lmeval_dispersion.watching.report import FORMAT, append_record

# The default fixed batch: short texts of several kinds, the same for every run.
TEXTS = (
    "The weather was fine, and the two of them walked along the river until it was dark.",
    "A train leaves at 9:40 and arrives at 12:15; the journey takes 155 minutes.",
    "def mean(values):\n    return sum(values) / len(values)",
    "Water boils at a lower temperature on a high mountain, because the pressure of the air is lower.",
    "12 + 30 = 42, and 42 - 7 = 35.",
    "She opened the letter, read it twice, and put it back without a word.",
    "The parties agree that any dispute shall be settled by the courts of the seller's country.",
    "Bread is made of flour, water, salt and yeast.",
)
_TOKENS = 32  # most tokens of a text


class Watcher:
    """Measures a model regularly in your own loop, and writes a line for each measurement.

    >>> watcher = watch(model, tokenizer, domains=["math"], folder="run", every=50)  # doctest: +SKIP
    >>> logs = watcher.step(saved=step % 1000 == 0)  # doctest: +SKIP

    Args:
        model: A causal decoder, bare or wrapped.
        tokenizer: Its tokenizer, as transformers has it.
        domains: Token sets as ``--domain`` of the screener takes them.
        reference: The everyday token set, in the same form.
        texts: The fixed batch; default: eight short sentences. Empty: G alone.
        folder: Where ``dispersion_watch.jsonl`` is written; None writes nothing.
        every: Steps between two measurements of :meth:`step`.

    Attributes:
        resolutions: The rows of each domain and the reference.

    Raises:
        UsageError: An argument is not usable, or the model has no output projection in one piece.
        CaptureError: The model has no list of decoder blocks.
        ScreeningError: The tokenizer lacks too many of the words.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        domains: Sequence[str] = ("math",),
        *,
        reference: str = "reference",
        texts: Sequence[str] = TEXTS,
        folder: str | Path | None = None,
        every: int = 100,
    ) -> None:
        if isinstance(domains, str) or not domains:
            raise UsageError(f"expected a list of token sets such as ['math'], got {domains!r}")
        if every < 1:
            raise UsageError(f"expected `every` of at least 1, got {every}")
        if tokenizer is None:
            raise UsageError("watching needs the model's tokenizer, got none; pass tokenizer=...")
        self.model, self.every = model, every
        self.folder = None if folder is None else Path(folder)
        vocabulary = Vocabulary.of(tokenizer)
        everyday = load_token_set(reference, "reference")
        self.resolutions: dict[str, Resolution] = {
            name: resolve_tokens(load_token_set(name, "domain"), everyday, vocabulary)
            for name in domains
        }
        self._batch = [
            ids[:_TOKENS]
            for text in texts
            if len(ids := tokenizer(text, add_special_tokens=False).input_ids) > 1
        ]
        if texts and len(self._batch) < 2:
            raise UsageError(
                f"expected at least 2 texts of 2 tokens to watch, got {len(self._batch)}"
            )
        self._steps = 0
        # States after the final norm need no logits; a few models lack that norm.
        self._place = "norm" if "norm" in Decoder.of(model).names() else "last"
        self._rows([0])  # raises before the first step if the head cannot be read

    def step(self, *, saved: bool = False) -> dict[str, float] | None:
        """Count a step of the loop and measure at every ``every``-th, and where a checkpoint was ``saved``.

        The count begins at 1: a loop resumed from a checkpoint calls :meth:`measure` with its own.

        Returns:
            The figures to log, or None where nothing was measured; raises as :meth:`measure`.
        """
        self._steps += 1
        if self._steps % self.every and not saved:
            return None
        return self.measure(self._steps, saved=saved)

    def measure(self, step: int, *, saved: bool = False, write: bool = True) -> dict[str, float]:
        """Measure now and write the line; returns the numbers by their names in trackers.

        With a sharded model every process has to call it; ``write`` is for one of them.

        Raises:
            GeometryError: A row of the head is zero, or a row or state of the texts is not finite.
            UsageError: The tokenizer names rows that the head does not have.
        """
        start = time.perf_counter()
        gaps = self.gaps()
        spread = self.spread() if self._batch else {}
        seconds = round(time.perf_counter() - start, 6)
        if write and self.folder is not None:
            domains = {name: self._domain(name, gap) for name, gap in gaps.items()}
            record = {
                "format": FORMAT,
                "step": step,
                "saved": saved,
                "seconds": seconds,
                "domains": domains,
            }
            append_record(self.folder, record | spread)
        logs = {f"gap_{name}": gap.mean for name, gap in gaps.items()}
        logs |= {f"gap_{name}_se": gap.se for name, gap in gaps.items()}
        return {f"watch/{name}": value for name, value in {**logs, **spread}.items()}

    def gaps(self) -> dict[str, Gap]:
        """Every domain's G on the current head, by the screener's formula (cosine); raises as `measure`."""
        sides = {name: (t.domain_ids, t.reference_ids) for name, t in self.resolutions.items()}
        ids = sorted({i for pair in sides.values() for side in pair for i in side})
        rows = self._rows(ids)
        places = {
            name: [np.searchsorted(ids, side) for side in pair] for name, pair in sides.items()
        }
        return {
            name: gap(rows[domain], rows[reference]) for name, (domain, reference) in places.items()
        }

    def spread(self) -> dict[str, float]:
        """Three figures of the fixed batch's last states, by name.

        ``dispersion``: of the texts' last tokens; ``condensation``: mean similarity of one text's tokens,
        averaged over texts; ``effective_rank``: of all tokens together. Raises GeometryError as `measure`.
        """
        texts = list(self._states())
        return {
            "dispersion": dispersion(np.stack([states[-1] for states in texts])),
            "condensation": float(np.mean([1 - dispersion(states) for states in texts])),
            "effective_rank": effective_rank(np.concatenate(texts)),
        }

    def _states(self) -> Iterator[NDArray[np.float32]]:
        """Final states of the tokens of each text, (t, d); the model is unchanged afterwards."""
        device = next(self.model.parameters()).device
        longest = max(map(len, self._batch))
        # Padded on the right: no token of a text sees later tokens.
        ids = torch.tensor(
            [text + [0] * (longest - len(text)) for text in self._batch], device=device
        )
        lengths = torch.tensor([len(text) for text in self._batch], device=device)
        mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
        with _evaluating(self.model), torch.no_grad(), capture(self.model, [self._place]) as states:
            self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        for text, padded in zip(
            self._batch, states[self._place].float().cpu().numpy(), strict=True
        ):
            state = padded[: len(text)]
            if not np.isfinite(state).all():
                raise GeometryError(
                    "expected finite states of the watched texts, got NaN or infinity; the training has "
                    "diverged, lower its rate or go back to an earlier checkpoint"
                )
            yield state

    def _rows(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Rows of the output projection, of ascending ids."""
        projection = head(unwrapped(self.model))
        weight = None if projection is None else getattr(projection, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise UsageError(
                "expected a model with an output projection of shape (vocabulary, width) in this process, "
                f"got {type(self.model).__name__} without one; watch a causal language model that is not "
                "sharded as flat parameters"
            )
        if ids[-1] >= weight.shape[0]:
            raise UsageError(
                f"the tokenizer names row {ids[-1]} and the output projection has {weight.shape[0]}; pass "
                "the tokenizer of this model"
            )
        weight = weight.detach()
        if hasattr(weight, "full_tensor"):  # a DTensor: gathered by all processes
            weight = weight.full_tensor()
        rows = weight[torch.tensor(ids, device=weight.device)]
        return np.asarray(rows.to("cpu", torch.float64).numpy())

    def _domain(self, name: str, gap: Gap) -> dict[str, Any]:
        tokens = self.resolutions[name]
        ids = [*tokens.domain_ids, -1, *tokens.reference_ids]
        return {
            "gap": gap.mean,
            "se": gap.se,
            "within": gap.within_domain.mean,
            "between": gap.between.mean,
            "within_reference": gap.within_reference.mean,
            "tokens": hashlib.sha256(str(ids).encode()).hexdigest()[:16],
            "left_out_domain": gap.left_out_domain.tolist(),
            "left_out_reference": gap.left_out_reference.tolist(),
        }


class DispersionCallback(TrainerCallback):  # type: ignore[misc]
    """Measures at every step at which the trainer logs, evaluates or saves.

    ``watch/gap_DOMAIN`` (with ``_se``), ``watch/dispersion``, ``watch/condensation`` and
    ``watch/effective_rank`` go to all trackers of the trainer, and to its ``log_history``;
    ``dispersion_watch.jsonl`` in the folder has more. A measurement at a save describes the saved
    checkpoint. Add it to the same trainer::

        trainer.add_callback(DispersionCallback(trainer, domains=["math"]))

    Args:
        trainer: transformers' Trainer or one derived from it.
        domains, reference, texts: As in :func:`~lmeval_dispersion.watch`.
        processing_class: The tokenizer; default: the trainer's own.
        folder: Folder of the JSONL; default: the trainer's output folder.

    Raises:
        UsageError: Not a Trainer, no tokenizer, no output projection, or another argument is not usable.
        CaptureError: The model has no list of decoder blocks.
        ScreeningError: The tokenizer lacks too many of the words.
    """

    def __init__(
        self,
        trainer: Any,
        domains: Sequence[str] = ("math",),
        *,
        reference: str = "reference",
        texts: Sequence[str] = TEXTS,
        processing_class: Any = None,
        folder: str | Path | None = None,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise UsageError(
                f"expected a Trainer to watch, got {type(trainer).__name__}; see watch() for loops"
            )
        processing = trainer.processing_class if processing_class is None else processing_class
        self.trainer = trainer
        self.watcher = Watcher(
            trainer.model,
            getattr(
                processing, "tokenizer", processing
            ),  # multimodal processors keep their tokenizer here
            domains,
            reference=reference,
            texts=texts,
            folder=trainer.args.output_dir if folder is None else folder,
        )
        self._measured = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure where the trainer is about to log, evaluate or save; raises as :meth:`Watcher.measure`."""
        wanted = control.should_log or control.should_evaluate or control.should_save
        if not wanted or state.global_step == self._measured:
            return
        self._measured = state.global_step
        self.watcher.model = (
            self.trainer.model_wrapped if self.trainer.is_fsdp_enabled else self.trainer.model
        )
        write = bool(state.is_world_process_zero)
        logs = self.watcher.measure(state.global_step, saved=bool(control.should_save), write=write)
        # The base class's log: TRL's would empty their averages into this entry. A log unsets the flag for
        # the trainer's own, still to come.
        should_log = control.should_log
        Trainer.log(self.trainer, dict(logs))
        control.should_log = should_log

    on_epoch_end = on_step_end


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; restores every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


watch = Watcher  # public alias: the stub cannot rename
