"""Short trainings of tiny models with dropout, and a task of lm-eval that they learn."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tiny_models
import torch
import yaml
from tiny_decoders import trainer_arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

QUESTIONS = 48
PERIOD = 5  # the word after w7 is w12


def write_task(folder: Path) -> Path:
    """The folder, with the task ``words``: which word follows, of four."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    rows = []
    for _ in range(QUESTIONS):
        first = draw.randrange(90 - 3 * PERIOD)
        label = draw.randrange(4)
        choices = [f"w{draw.randrange(90)}" for _ in range(3)]
        choices.insert(label, f"w{first + 2 * PERIOD}")
        question = f"w{first} w{first + PERIOD}"
        rows.append({"question": question, "choices": choices, "label": label})
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "words.yaml").write_text(yaml.safe_dump(config))
    return folder


def model(dropout: float = 0.1) -> Any:
    """A GPT-2 of two layers, in training."""
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    built = tiny_models.model(GPT2Config, GPT2LMHeadModel, **shape, **rates, **special)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)
    return built.train()


def rows(number: int = 64) -> list[dict[str, list[int]]]:
    """Texts in which each word is followed by the one five later."""
    draw = random.Random(1)
    tokenizer = tiny_models.tokenizer()
    texts = []
    for _ in range(number):
        first = draw.randrange(90 - 11 * PERIOD)
        words = " ".join(f"w{first + PERIOD * step}" for step in range(10))
        ids = tokenizer(words).input_ids
        texts.append({"input_ids": ids, "labels": list(ids)})
    return texts


def arguments(folder: Path, kind: Any = TrainingArguments, **options: Any) -> Any:
    """Twelve steps with three saves."""
    steps = {"max_steps": 12, "save_steps": 4, "logging_steps": 1}
    rate = {"learning_rate": 0.01, "per_device_train_batch_size": 8}
    return trainer_arguments(folder, kind, **{**steps, **rate, **options})


def trainer(folder: Path, *, built: Any = None, held_out: Any = None, **options: Any) -> Trainer:
    """A Trainer of that model."""
    return Trainer(
        model=model() if built is None else built,
        args=arguments(folder, **options),
        train_dataset=rows(),
        eval_dataset=held_out,
        processing_class=tiny_models.tokenizer(pad=True),
    )


def raced_trainer(folder: Path, task: Path) -> Trainer:
    """That Trainer, whose saves race on twenty questions of the task ``words``."""
    from lmeval_dispersion import RaceCallback

    given = trainer(folder)
    given.add_callback(RaceCallback("words", questions=20, include_path=task))
    return given


def main(words: list[str]) -> int:
    """A training with a race, as a command: the run's folder and that of the task."""
    folder, task = map(Path, words)
    raced_trainer(folder, task).train()
    return 0


def raced(log_history: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The race's entries of a log, by step."""
    return {entry["step"]: entry for entry in log_history if "race/score" in entry}


def losses(log_history: list[dict[str, Any]]) -> dict[int, float]:
    """The losses of a log, by step."""
    return {entry["step"]: entry["loss"] for entry in log_history if "loss" in entry}
