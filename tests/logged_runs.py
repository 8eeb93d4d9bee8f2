"""Results and samples as lm-eval writes them with --log_samples, from planted answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATE = "2026-11-28T06-35-06.099351"


def places(count: int) -> list[int]:
    """The right choices' places: each of four as often."""
    return [i % 4 for i in range(count)]


def choices(right: Sequence[bool], seed: int, targets: Sequence[int]) -> list[list[float]]:
    """Log-probabilities of four choices, of which the target is the likeliest where ``right``."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(-6, 0.5, size=(len(right), 4))
    for row, is_right, target in zip(rows, right, targets, strict=True):
        likeliest = target if is_right else (target + rng.integers(1, 4)) % 4
        row[likeliest] += 2 + rng.exponential(3.0)
    return [[float(value) for value in row] for row in rows]


@dataclass
class LoggedTask:
    """One task's answers: a score for each document, and log-probabilities or texts."""

    scores: Sequence[float]
    logprobs: Sequence[Sequence[float]] = ()
    texts: Sequence[str] = ()
    metric: str = "acc"
    targets: Sequence[int] = ()  # places of the right choices
    numbers: Sequence[int] = ()  # the documents' numbers in the log, default: in order
    subjects: Sequence[str] = ()

    @classmethod
    def of_choices(
        cls, right: Sequence[bool], seed: int, targets: Sequence[int] = ()
    ) -> LoggedTask:
        """Multiple choice whose scores come from the log-probabilities."""
        targets = targets or places(len(right))
        return cls([float(each) for each in right], choices(right, seed, targets), targets=targets)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sample(name: str, task: LoggedTask, i: int) -> dict[str, Any]:
    doc: dict[str, Any] = {"question": f"{name} {i}"}
    if len(task.subjects):
        doc["subject"] = task.subjects[i]
    prompt = f"Question {i} of {name}:"
    if len(task.texts):
        arguments = {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n"]}}}
        answers: list[Any] = [task.texts[i]]
        target = "42"
    else:
        count = len(task.logprobs[i])
        arguments = {
            f"gen_args_{k}": {"arg_0": prompt, "arg_1": f" choice {k}"} for k in range(count)
        }
        answers = [[str(value), "False"] for value in task.logprobs[i]]
        target = str(task.targets[i])
    return {
        "doc_id": int(task.numbers[i]) if len(task.numbers) else i,
        "doc": doc,
        "target": target,
        "arguments": arguments,
        "resps": [[answer] for answer in answers],
        "filtered_resps": answers,
        "filter": "none",
        "metrics": [task.metric],
        "doc_hash": _hash(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(prompt),
        "target_hash": _hash(target),
        task.metric: task.scores[i],
    }


def write_run(
    folder: Path,
    model: str,
    tasks: Mapping[str, LoggedTask],
    groups: Mapping[str, Sequence[str]] | None = None,
    by_size: bool = True,
) -> str:
    """Write one run's results and samples; returns the folder's path."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    for name, task in tasks.items():
        mean = float(np.mean([score for score in task.scores if score == score] or [np.nan]))
        figures[name] = {"alias": name, f"{task.metric},none": mean}
        lines = [json.dumps(_sample(name, task, i)) for i in range(len(task.scores))]
        (folder / f"samples_{name}_{DATE}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    for group, members in (groups or {}).items():
        sizes = [len(tasks[name].scores) for name in members]
        values = [figures[name]["acc,none"] for name in members]
        mean = float(np.average(values, weights=sizes if by_size else None))
        figures[group] = {"alias": group, "acc,none": mean}
    results = {
        "results": figures,
        "group_subtasks": {group: list(members) for group, members in (groups or {}).items()},
        "configs": {
            name: {
                "task": name,
                "output_type": "generate_until" if len(task.texts) else "multiple_choice",
                "num_fewshot": 0,
            }
            for name, task in tasks.items()
        },
        "versions": dict.fromkeys(tasks, 1.0),
        "n-samples": {
            name: {"original": len(task.scores), "effective": len(task.scores)}
            for name, task in tasks.items()
        },
        "config": {"limit": None},
        "lm_eval_version": "0.4.13",
        "model_name": model,
    }
    (folder / f"results_{DATE}.json").write_text(json.dumps(results), "utf-8")
    return str(folder)
