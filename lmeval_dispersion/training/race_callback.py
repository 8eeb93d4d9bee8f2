"""A race of a run's saves while it trains, in any Trainer or in a loop of one's own.

    callback = RaceCallback("my_task", questions=100)  # Trainer, TRL, and what builds on them
    callback.attach(trainer)
    trainer.train()

    race = RaceCallback("my_task", run="run", tokenizer=tokenizer)  # any loop
    figures = race.ask(model, step)

The same callback logs the geometry of the head and of fixed texts: G of token sets, and dispersion.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainerCallback

from lmeval_dispersion.arguments import check_values
from lmeval_dispersion.asking import ERROR, Asking
from lmeval_dispersion.errors import DispersionError, UsageError, count
from lmeval_dispersion.output import say_above_progress
from lmeval_dispersion.training.measuring import Measuring
from lmeval_dispersion.training.no_trace import without_trace

if TYPE_CHECKING:
    from lmeval_dispersion.training.live_race import LiveRace, Place

_LEAST = 10  # questions that a share of the time leaves at least
#: What a live model has already, and the run's folder.
_NOT_HERE = ("tasks", "limit", "output_path", "model", "model_args")
_log = logging.getLogger(__name__)


class RaceCallback(TrainerCallback):  # type: ignore[misc]
    """Ask the model in memory lm-eval's questions at each save, and log the best save so far.

    ``race/score``, ``race/margin`` and ``race/best_step`` (see
    :class:`~lmeval_dispersion.training.live_race.Place`) are logged to ``state.log_history`` and,
    after :meth:`attach`, to the trainer's trackers. The answers are kept in ``RUN/race-TASKS``,
    where ``dispersion race RUN --tasks TASKS`` can continue the race. Unless ``stop_after`` ends
    it, the training does not change: its losses are the same to the last bit. If a save cannot be
    asked or measured, a warning is logged, and the training continues.

    Args:
        tasks: Tasks of lm-eval, separated by commas. None to log only the geometry, that is, the
            figures of :class:`~lmeval_dispersion.training.measuring.Measuring`.
        questions: Number of questions for each save.
        every: Also ask at each multiple of this number of steps, although no save is written there;
            None to ask only at saves.
        share: Share of the training's time that the questions may take, above 0 and below 1. The
            number of questions is lowered accordingly at the first save, but not below 10. None for
            no limit.
        stop_after: Number of saves in a row that must be shown to be worse than the best save to
            end the training; None to never end it.
        run: The folder of the saves. Needed in a loop of your own; a trainer has one.
        tokenizer: The model's tokenizer; None for the trainer's.
        options: For the geometry: ``domains``, ``reference``, ``texts`` and ``layers``, as in
            :class:`~lmeval_dispersion.training.measuring.Measuring`. For the race: ``error``, the
            highest probability with which a statement about the saves may be wrong, and the options
            of :func:`~lmeval_dispersion.race` on questions and lm-eval, such as ``metric``,
            ``batch_size``, ``num_fewshot``, ``include_path`` or ``apply_chat_template``.

    Attributes:
        should_stop: Whether ``stop_after`` saves in a row have been shown to be worse than the
            best one.
        trainer: The trainer to which :meth:`attach` added the callback; None without one.

    Raises:
        UsageError: An argument cannot be used. The tasks and the folder are checked only when
            training begins.
    """

    def __init__(
        self,
        tasks: str | None = None,
        *,
        questions: int = 100,
        every: int | None = None,
        share: float | None = None,
        stop_after: int | None = None,
        run: str | Path | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        _check(questions=questions, every=every, stop_after=stop_after)
        if share is not None and not 0 < share < 1:
            raise UsageError(f"expected a share above 0 and below 1, got {share}", argument="share")
        self.tasks = tasks
        self.questions = questions
        self.every = every
        self.share = share
        self.stop_after = stop_after
        self.run = None if run is None else Path(run)
        self.tokenizer = tokenizer
        self.trainer: Any = None
        self.should_stop = False
        of_geometry = ("domains", "reference", "texts", "layers")
        self._geometry = {name: options.pop(name) for name in of_geometry if name in options}
        self._error = options.pop("error", ERROR)
        if not 0 < self._error < 1:
            raise UsageError(
                f"expected an error above 0 and below 1, got {self._error}", argument="error"
            )
        self._asking = _asking(tasks, options)
        self._measuring: Measuring | None = None
        self._race: LiveRace | None = None
        self._pace = 0.0  # seconds a question
        self._spent = 0.0  # seconds of the callback
        self._began = time.perf_counter()
        self._first_step = 0
        self._is_begun = False

    def attach(self, trainer: Any) -> RaceCallback:
        """Add the callback to a trainer, so that its trackers log the figures too.

        Returns:
            The callback itself.

        Raises:
            UsageError: ``trainer`` is not a Trainer of transformers.
        """
        if not isinstance(trainer, Trainer):
            raise UsageError(
                f"expected a Trainer of transformers, got {type(trainer).__name__}; in a loop of "
                "your own call ask()"
            )
        self.trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def ask(self, model: nn.Module, step: int) -> dict[str, float]:
        """Ask the model the questions, and measure it, as the save ``RUN/checkpoint-STEP``.

        This method is for a training loop of your own. In distributed training, every process must
        call it.

        Args:
            model: The model in memory.
            step: The step of the save.

        Returns:
            The figures to log, by name: ``race/score``, ``race/margin`` and ``race/best_step``, and
            those of ``Measuring.measure``. Figures that could not be obtained are left out.

        Raises:
            UsageError: At the first call, if an argument, a task or the folder cannot be used.
            ScreeningError: At the first call, if the tokenizer lacks too many words of a token set.
        """
        if not self._is_begun:
            if self.run is None:
                raise UsageError(
                    "expected the folder of the saves, got none; pass it as run", argument="run"
                )
            self._begin(_bare(model), self.tokenizer, planned=None, step=step)
            self._first_step = 0
        model = _bare(model)
        start = time.perf_counter()
        figures: dict[str, float] = {}
        place = self._asked(model, step)
        if place is not None:
            figures["race/score"] = place.score
            figures["race/margin"] = place.margin
            figures["race/best_step"] = place.best
        if self._measuring is not None:
            try:
                figures.update(self._measuring.measure(model))
            except Exception as error:
                _warn("the geometry was not measured", step, error)
        self._spent += time.perf_counter() - start
        return figures

    # --- a Trainer's events ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Open the folder of the race, if there are tasks, and print how many questions are asked.

        Raises:
            UsageError: An argument, a task or the folder cannot be used.
            ScreeningError: The tokenizer lacks too many words of a token set.
        """
        self.run = Path(args.output_dir)
        tokenizer = self.tokenizer
        if tokenizer is None:
            processing = given.get("processing_class")
            # Multimodal processors keep their tokenizer here.
            tokenizer = getattr(processing, "tokenizer", processing)
        self._begin(
            given["model"], tokenizer, planned=self._planned(args, state), step=state.global_step
        )
        logged = [entry["step"] for entry in state.log_history if "race/score" in entry]
        is_saved = self._race is not None and self._race.is_saved(state.global_step)
        if is_saved and state.global_step not in logged:
            # A resumed run: the state of a save was written before the save was asked.
            self._at(args, state, control, given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Do the same as :meth:`on_save` every ``every`` steps, unless a save is due there."""
        if self.every is None or state.global_step % self.every or control.should_save:
            return control
        return self._at(args, state, control, given["model"])

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Ask the model that was just saved, and log its figures.

        The training then ends if :attr:`should_stop` is true.
        """
        return self._at(args, state, control, given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the run, so that the callback can serve another one."""
        self._race = None
        self._measuring = None
        self._is_begun = False

    def _at(self, args: Any, state: Any, control: Any, model: Any) -> Any:
        figures = self.ask(model, state.global_step)
        if figures:
            self._log(state, control, figures)
        if self._race is not None and state.global_step in self._race.standings.asked:
            self._name_best(args, state, self._race.standing(state.global_step))
        if self.should_stop:
            control.should_training_stop = True
        return control

    def _log(self, state: Any, control: Any, figures: Mapping[str, float]) -> None:
        if self.trainer is None:
            entry: dict[str, Any] = {**figures, "step": state.global_step}
            if state.epoch is not None:
                entry["epoch"] = state.epoch
            state.log_history.append(entry)
            return
        # The base class's log: TRL's would empty their averages into this entry. A log unsets the
        # flag for the trainer's own, still to come.
        should_log = control.should_log
        Trainer.log(self.trainer, dict(figures))
        control.should_log = should_log

    def _name_best(self, args: Any, state: Any, place: Place) -> None:
        """Name the best save as the Trainer's, unless that names one by a metric of its own."""
        if args.metric_for_best_model is not None or args.load_best_model_at_end:
            return
        if place.best_kept is not None:
            best = Path(args.output_dir) / f"checkpoint-{place.best_kept}"
            state.best_model_checkpoint = str(best)

    def _begin(self, model: Any, tokenizer: Any, *, planned: int | None, step: int) -> None:
        self._is_begun = True
        self.should_stop = False
        if tokenizer is None:
            raise UsageError(
                "expected the model's tokenizer, got none; pass it as tokenizer",
                argument="tokenizer",
            )
        self.tokenizer = tokenizer
        try:
            self._measuring = Measuring(tokenizer, **self._geometry)
        except DispersionError as error:
            if self._geometry:
                raise
            _warn("the geometry will not be measured", step, error)
        if self.tasks:
            self._open(planned, step)
        if self._race is not None:
            self._forecast(self._race, model, step)
        self._first_step = step
        self._spent = 0.0
        self._began = time.perf_counter()

    def _open(self, planned: int | None, step: int) -> None:
        from lmeval_dispersion.training.live_race import LiveRace, all_agree

        run = Path(self.run or ".").absolute()
        race: LiveRace | None = None
        with without_trace():
            try:
                race = LiveRace(
                    self._asking,
                    run,
                    self.questions,
                    planned=planned,
                    error=self._error,
                    may_stop=self.stop_after is not None,
                )
                race.resume(step)
            except UsageError:
                raise
            except Exception as error:
                race = None
                _warn("no save will be asked", step, error)
        if all_agree(race is not None) and race is not None:
            race.agree()
            self._race = race

    def _forecast(self, race: LiveRace, model: Any, step: int) -> None:
        """Print how many questions are asked, what they show, and the time that they take."""
        with without_trace(model):
            try:
                self._pace = race.timed(model, self.tokenizer)
            except Exception as error:
                _warn("the time for a question could not be measured", step, error)
        _say(race.forecast(self._pace))

    def _asked(self, model: Any, step: int) -> Place | None:
        """The standing after a save; None without a race, or where it could not be asked."""
        race = self._race
        if race is None:
            return None
        if self.share is not None and not race.has_answers:
            self._lower(race, self.share, step)
        try:
            with without_trace(model):
                place = race.ask(model, self.tokenizer, step)
        except Exception as error:
            _warn("the save was not asked", step, error)
            return None
        if self.stop_after is not None and place.worse >= self.stop_after:
            self.should_stop = True
            saves = f"the save of step {step}"
            if place.worse > 1:
                saves = f"each of the last {place.worse} saves up to step {step}"
            _say(
                f"race: {saves} is shown to be worse than the save of step "
                f"{place.best} (error at most {100 * self._error:g} %), so the training ends. "
                "Later saves might have been better."
            )
        return place

    def _lower(self, race: LiveRace, share: float, step: int) -> None:
        """Lower the questions to a share of the time between two saves."""
        elapsed = time.perf_counter() - self._began - self._spent
        if self._pace > 0 and step > self._first_step:
            affordable = int(share * elapsed / self._pace)
            race.lower(max(_LEAST, affordable))
            limit = "at most" if race.questions <= affordable else "more than"
            _say(
                f"race: each save is asked {count(race.questions, 'question')}; this takes {limit} "
                f"{100 * share:g} % of the time between two saves"
            )

    def _planned(self, args: Any, state: Any) -> int | None:
        """The number of times that the run will be asked; None where it is not known."""
        strategy = getattr(args.save_strategy, "value", args.save_strategy)
        steps: set[int] = set()
        if self.every is not None:
            steps.update(range(self.every, state.max_steps + 1, self.every))
        if strategy == "steps":
            each = state.save_steps or args.save_steps
            if each < 1:
                each = math.ceil(each * state.max_steps)
            steps.update(range(int(each), state.max_steps + 1, int(each)))
            steps.add(state.max_steps)
        elif strategy == "epoch":
            epochs: int = math.ceil(state.num_train_epochs)
            return len(steps) + epochs
        elif strategy == "best":
            return None
        return len(steps) or None


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UsageError(f"expected at least 1, got {number}", argument=name)


def _bare(model: nn.Module) -> nn.Module:
    """The model that DDP or ``torch.compile`` wraps, which lm-eval can ask."""
    children = dict(model.named_children())
    for name in ("_orig_mod", "module"):
        if [*children] == [name]:
            return _bare(children[name])
    return model


def _asking(tasks: str | None, options: dict[str, Any]) -> Asking:
    """What is asked; UsageError for an option that a live model does not have."""
    names = [field.name for field in fields(Asking) if field.name not in _NOT_HERE]
    for name in options:
        if name not in names:
            raise UsageError(
                f"expected an option among {', '.join(names)}, got {name}", argument=name
            )
    if options.get("include_path") is not None:
        options["include_path"] = str(options["include_path"])
    asking = Asking(tasks=tasks, **options)
    check_values(asking)
    return asking


def _say(text: str) -> None:
    from lmeval_dispersion.training.live_race import process_number

    if process_number() == 0:
        say_above_progress(text)


def _warn(what: str, step: int, error: Exception) -> None:
    reason = str(error) or type(error).__name__
    _log.warning("race at step %s: %s (%s); the training continues", step, what, reason)
