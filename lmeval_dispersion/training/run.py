"""One training run of a comparison: an arm with a seed, resumable, evaluated before, during and after."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.training.blocks import Blocks, mixed
from lmeval_dispersion.training.evaluation import evaluated
from lmeval_dispersion.training.forgetting import ActiveForgetting
from lmeval_dispersion.training.modules import LOSSES
from lmeval_dispersion.training.settings import FORGET, NOISE, Settings
from lmeval_dispersion.training.trainer import DispersionConfig, DispersionTrainer

Tell = Callable[[int, dict[str, float]], None]  # the step just done, and what was logged of late


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """Where a run keeps its checkpoints, evaluations and model."""
    return folder / f"{arm}-seed{seed}"


def finished(folder: Path, arm: str, seed: int) -> dict[str, Any] | None:
    """The result of a run that is done, else None."""
    path = run_folder(folder, arm, seed) / "result.json"
    return json.loads(path.read_text()) if path.is_file() else None


def trained(
    settings: Settings,
    folder: Path,
    arm: str,
    seed: int,
    domains: list[tuple[Blocks, Blocks]],
    tokenizer: Any,
    tell: Tell,
) -> dict[str, Any]:
    """Train, or go on from the last whole checkpoint, and write ``result.json``; its contents.

    The same seed gives the same start and the same order of data in every arm, and a run that was killed
    ends with the numbers of one that was not.
    """
    here = run_folder(folder, arm, seed)
    here.mkdir(exist_ok=True)
    checkpoint = _last_whole(here, settings.steps)
    model = start_model(settings, seed)
    notes = _Notes(here / "evaluations.jsonl", settings, domains, tell)
    trainer = DispersionTrainer(
        model=model,
        args=_arguments(settings, here, arm, seed),
        train_dataset=mixed([train for train, _ in domains]),
        callbacks=[notes, *([ActiveForgetting(settings.forget_every, seed)] if arm == FORGET else [])],
        dispersion=_dispersion(settings, arm, seed),
    )
    # Its table on stdout is not ours.
    trainer.remove_callback(transformers.PrinterCallback)
    if checkpoint is None:
        notes.look(model, 0)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.perf_counter() - start
    model.save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    result = {
        "arm": arm,
        "seed": seed,
        "steps": settings.steps,
        "tokens": settings.steps * settings.block * settings.batch * settings.accumulate,
        "seconds_since_last_start": round(seconds, 1),
        "log": [_kept(entry) for entry in trainer.state.log_history if "loss" in entry],
        "evaluations": notes.read(),
    }
    _write(here / "result.json", json.dumps(result, indent=1))
    for left in here.glob("checkpoint-*"):
        shutil.rmtree(left)
    return result


def start_model(settings: Settings, seed: int) -> Any:
    """The model that a run with this seed starts from, in float32."""
    if not settings.from_scratch:
        model = load_model(settings.model, dtype="float32", device="cpu").model
        return model.requires_grad_(True)
    try:
        config = transformers.AutoConfig.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"there is no configuration at {settings.model}: {str(error).splitlines()[0]}"
        ) from error
    transformers.set_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def start_tokenizer(settings: Settings) -> Any:
    """The tokenizer of the base model, once that is known to fit the settings.

    Raises:
        UsageError: There is no such model or tokenizer, or they do not fit each other or the block length.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(settings.model).get_text_config()
        tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"expected a model with a tokenizer, got {settings.model}: {first}; pass a Hub id or a folder"
        ) from error
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and settings.block > longest:
        raise UsageError(
            f"expected a block of at most {longest}, the positions of {settings.model}, got {settings.block}"
        )
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"expected a tokenizer of at most {config.vocab_size} tokens, that of {settings.model}, "
            f"got {len(tokenizer)}"
        )
    return tokenizer


def _dispersion(settings: Settings, arm: str, seed: int) -> DispersionConfig | None:
    if arm not in LOSSES:
        return None
    options: dict[str, Any] = {"max_tokens": settings.max_tokens} if settings.max_tokens else {}
    return DispersionConfig(
        loss=arm,
        layers=settings.layer_choice(),
        weight=settings.weight,
        schedule=settings.schedule,  # type: ignore[arg-type]
        warmup=max(1, settings.steps // 20),
        seed=seed,
        options=options,
    )


def _arguments(settings: Settings, here: Path, arm: str, seed: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(here),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.lr,
        lr_scheduler_type="linear",
        warmup_steps=max(1, settings.steps // 20),
        seed=seed,
        data_seed=seed,
        bf16=settings.bf16,
        neftune_noise_alpha=settings.noise_alpha if arm == NOISE else None,
        logging_steps=_log_every(settings),
        save_steps=settings.save_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _log_every(settings: Settings) -> int:
    """Steps between log entries, a divisor of those between checkpoints: resuming forgets half a mean."""
    most = max(1, min(10, settings.steps // 10))
    return max(n for n in range(1, most + 1) if settings.save_every % n == 0)


class _Notes(TrainerCallback):  # type: ignore[misc]
    """Evaluates at evenly spaced steps and at the end, and keeps the figures in a file, one line each."""

    def __init__(
        self, path: Path, settings: Settings, domains: list[tuple[Blocks, Blocks]], tell: Tell
    ) -> None:
        self.path, self.settings, self.tell = path, settings, tell
        self.held_out = [held for _, held in domains]
        steps, parts = settings.steps, settings.evals + 1
        self.at = {steps * part // parts for part in range(1, parts + 1)}
        self.latest: dict[str, float] = {}

    def look(self, model: Any, step: int) -> None:
        found = [evaluated(model, blocks, self.settings.batch) for blocks in self.held_out]
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "domains": found}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Evaluations by step; of a step that was done again after an interruption the later one."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # the line that a kill cut off; its step was evaluated again
                continue
            by_step[entry["step"]] = entry
        return [by_step[step] for step in sorted(by_step)]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.at:
            self.look(model, state.global_step)
        self.tell(state.global_step, self.latest)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.latest = dict(logs or {})


def _last_whole(here: Path, steps: int) -> Path | None:
    """The newest checkpoint before the last step that was written to its end; others are removed.

    A run that is killed after its last checkpoint and before its result does the steps since the one before
    again: the Trainer would take one step too many from the last.
    """
    whole = {}
    for path in here.glob("checkpoint-*"):
        try:
            # The Trainer writes this file last.
            step = json.loads((path / "trainer_state.json").read_text())["global_step"]
        except (OSError, ValueError, KeyError):
            step = steps
        if step < steps:
            whole[step] = path
        else:
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


def _kept(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("epoch", "total_flos")}


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)
