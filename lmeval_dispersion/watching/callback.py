"""transformers' Trainer, and TRL's trainers, watched: a callback that logs through the trainer's own log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.watching.watcher import TEXTS, Watcher


class DispersionCallback(TrainerCallback):  # type: ignore[misc]
    """Measures at every step at which the trainer logs, evaluates or saves.

    ``watch/gap_DOMAIN`` (with ``_se``), ``watch/dispersion``, ``watch/condensation`` and
    ``watch/effective_rank`` go to whatever the trainer reports to, and to its ``log_history``;
    ``dispersion_watch.jsonl`` in the folder has more. What is measured at a save is what the saved checkpoint
    has. Add it to the trainer that it is given::

        trainer.add_callback(DispersionCallback(trainer, domains=["math"]))

    Args:
        trainer: transformers' Trainer or one derived from it.
        domains: Token sets as ``--domain`` of the screener takes them.
        reference: The everyday token set, likewise.
        texts: The fixed batch; default: eight short sentences.
        processing_class: The tokenizer; default: the trainer's own.
        folder: Of the JSONL; default: the trainer's output folder.

    Raises:
        UsageError: The trainer has no tokenizer, or the model no output projection.
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
            getattr(processing, "tokenizer", processing),  # a processor of several kinds of input has one
            domains,
            reference=reference,
            texts=texts,
            folder=trainer.args.output_dir if folder is None else folder,
        )
        self._measured = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure where the trainer is about to log, evaluate or save."""
        self._look(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure where the trainer is about to, by epochs."""
        self._look(state, control)

    def _look(self, state: Any, control: Any) -> None:
        wanted = control.should_log or control.should_evaluate or control.should_save
        if not wanted or state.global_step == self._measured:
            return
        self._measured = state.global_step
        self.watcher.model = (
            self.trainer.model_wrapped if self.trainer.is_fsdp_enabled else self.trainer.model
        )
        write = bool(state.is_world_process_zero)
        logs = self.watcher.measure(state.global_step, saved=bool(control.should_save), write=write)
        # The base class's log: those of TRL would empty their averages into this entry. A log unsets the flag
        # for the trainer's own, which is still to come.
        should_log = control.should_log
        Trainer.log(self.trainer, dict(logs))
        control.should_log = should_log
