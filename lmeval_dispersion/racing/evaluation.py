"""Checkpoints evaluated block by block: lm-eval's own evaluation, and a folder that keeps every block.

An :class:`Entrant` is all that a process needs to run one checkpoint: it loads it, asks it, and keeps what it
answered. Its folder holds what ``lm_eval --log_samples`` writes. A block counts once the results file, which
is replaced as a whole, says how long the samples' files are; what a killed run left behind that is cut off.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.harness.cli import failure_sentence
from lmeval_dispersion.harness.seams import (
    DEFAULT_OTHER_SEED,
    built_requests,
    evaluated,
    filters_of,
    free_memory,
    halve_batch,
    loaded_lm,
    loaded_tasks,
    logged_line,
    simple_parse_args_string,
)
from lmeval_dispersion.output import write_whole
from lmeval_dispersion.racing.contest import NOTHING, Scores
from lmeval_dispersion.store.identity import hashed, prompt_manifest
from lmeval_dispersion.store.samples import Sample, by_filter, check_judge, correctness, split_judge

#: Task -> filter -> document -> how it was asked, answered and judged.
Samples = Mapping[str, Mapping[str, Mapping[int, Sample]]]


class CheckpointError(DispersionError):
    """One checkpoint could not be loaded or asked; the race goes on without it."""


class Evaluation:
    """Questions of one or several tasks in one random order, the same for every model.

    Args:
        tasks: lm-eval's names of tasks and groups, or ours, with commas.
        seed: Of the order.
        limit: How many questions a checkpoint is asked at most; None for all.
        metric: What judges: a metric or FILTER/METRIC; None for each task's first.
        num_fewshot: Examples before each question; None for the task's own number.
        include_path: A folder with more tasks.
        apply_chat_template: As lm-eval takes it.
        confirm_run_unsafe_code: Whether a task may run the code that models write.

    Attributes:
        questions: Task and document of each, in order. Their mean score is that of a checkpoint.
        judges: Filter and metric of each task that was asked.

    Raises:
        UsageError: lm-eval has no such task.
    """

    def __init__(
        self,
        tasks: str,
        *,
        seed: int = 0,
        limit: int | None = None,
        metric: str | None = None,
        num_fewshot: int | None = None,
        include_path: str | None = None,
        apply_chat_template: bool | str = False,
        confirm_run_unsafe_code: bool = False,
    ) -> None:
        self.name, self.seed, self._metric, self.chat = tasks, seed, metric, apply_chat_template
        self._tasks = loaded_tasks(tasks, num_fewshot, include_path)
        every = [(name, i) for name, task in self._tasks.items() for i in range(len(task.eval_docs))]
        order = np.random.default_rng(seed).permutation(len(every))[:limit]
        self.questions = [every[i] for i in order]
        self.judges: dict[str, tuple[str, str]] = {}
        self._options = {
            "apply_chat_template": apply_chat_template,
            "fewshot_as_multiturn": bool(apply_chat_template),
            "confirm_run_unsafe_code": confirm_run_unsafe_code,
        }
        self._requests: dict[str, dict[int, list[Any]]] = {}
        self._built_for: Any = lambda: None

    @property
    def metric(self) -> str:
        """What judged, as audits call it: the metric, with the filter where a task has several."""
        names = [
            metric if len(filters_of(self._tasks[task])) < 2 else f"{chosen}/{metric}"
            for task, (chosen, metric) in self.judges.items()
        ]
        return ", ".join(dict.fromkeys(names))

    def identity(self) -> dict[str, dict[str, str]]:
        """Task -> its version and a hash of how it asks: what makes answers of two runs comparable."""
        template = str(self.chat) if self.chat else None
        shape: dict[str, Any] = {"chat_template": template, "multiturn": bool(self.chat), "system": None}
        return {
            name: {
                "version": str(task.VERSION),
                "prompts": prompt_manifest(vars(task.config), fewshot_seed=DEFAULT_OTHER_SEED, **shape)[
                    "prompt_format"
                ],
            }
            for name, task in self._tasks.items()
        }

    def ask(self, lm: Any, begin: int, end: int) -> dict[str, Any]:
        """lm-eval's results of a model on the questions ``begin`` to ``end``, samples included."""
        if not self._requests or (self.chat and self._built_for() is not lm):
            self._requests = {name: self._built(name, lm) for name in dict(self.questions)}
            self._built_for = weakref.ref(lm)
        block = sorted(self.questions[begin:end])
        requests = {
            name: {i: self._requests[name][i] for _, i in chosen}
            for name, chosen in groupby(block, key=lambda question: question[0])
        }
        return evaluated(lm, self._tasks, requests, **self._options)

    def _built(self, name: str, lm: Any) -> dict[int, list[Any]]:
        """A task's requests; where examples may be drawn document by document all, as in lm-eval."""
        task = self._tasks[name]
        asked = [i for other, i in self.questions if other == name]
        documents = range(len(task.eval_docs)) if task.config.num_fewshot else asked
        return built_requests(task, documents, lm if self.chat else None)

    def documents(self, task: str) -> int:
        """How many documents a task has."""
        return len(self._tasks[task].eval_docs)

    def scores(self, samples: Samples, begin: int, end: int) -> Scores:
        """The scores of the questions ``begin`` to ``end``.

        Raises:
            UsageError: The metric gives no number from 0 to 1 for a question, or a lower one is better.
            HarnessError: The task has no such metric.
        """
        found = []
        for task, i in self.questions[begin:end]:
            if task not in self.judges:
                self.judges[task] = self._judge(task, samples[task])
            chosen, metric = self.judges[task]
            sample = samples[task][chosen][i]
            value = correctness(sample.metrics, metric)[1]
            if not 0 <= value <= 1:
                raise UsageError(
                    f"{task}: expected scores from 0 to 1, got {metric} {value:g} of document {i}; name "
                    f"another metric with --metric: it has {', '.join(sample.metrics)}"
                )
            found.append((value, sample.columns["probability"]))
        return Scores(*np.array(found, dtype=np.float64).T)

    def _judge(self, task: str, filters: Mapping[str, Mapping[int, Sample]]) -> tuple[str, str]:
        metrics = next(iter(next(iter(filters.values())).values())).metrics
        check_judge(task, self._metric, list(filters), metrics)
        chosen, named = split_judge(self._metric)
        metric = correctness(metrics, named)[0]
        if metric is None or self._tasks[task].higher_is_better().get(metric) is False:
            why = f"has no {named or 'metric'} with a number for every question" if metric is None else ""
            raise UsageError(
                f"{task} {why or f'is better the lower its {metric} is'}; expected --metric with scores from "
                f"0 to 1 where higher is better, of {', '.join(metrics)}"
            )
        return chosen or next(iter(filters)), metric


class Entrant:
    """One checkpoint of a race, loaded when a question is new, and its folder, which keeps all answers.

    Args:
        evaluation: The questions.
        label: Its name in reports.
        folder: Its own, for lm-eval's results and samples.
        date: In the names of these files.
        arguments: Of the backend, such as ``pretrained``; ``model_args`` come after them.
        model: lm-eval's name of the backend.
        settings: ``batch_size`` and ``device``.

    Attributes:
        seconds: To load and ask it, earlier runs included.
        known: All answers so far, in the race's order.

    Raises:
        HarnessError: What the folder holds was changed.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        label: str,
        folder: Path,
        date: str,
        arguments: Mapping[str, str],
        *,
        model: str = "hf",
        model_args: str = "",
        **settings: Any,
    ) -> None:
        self.evaluation, self.label, self.known, self.seconds = evaluation, label, NOTHING, 0.0
        self._folder, self._date = folder, date
        self._model, self._arguments, self._more, self._settings = model, arguments, model_args, settings
        self._lm: Any = None
        self._halved = False
        self._results: dict[str, Any] = {}
        self._file = folder / f"results_{date}.json"
        self._read()

    def ask(self, begin: int, end: int) -> Scores:
        """The answers to the questions ``begin`` to ``end``, or as many of them as the folder has.

        Raises:
            CheckpointError: It could not be loaded or asked.
            UsageError: Of the whole race: no such backend, or a metric that cannot be raced by.
            DispersionError: A block could not be written.
        """
        if begin >= len(self.known.score):
            start = time.perf_counter()
            results = self._asked(begin, end)
            lines = {task: "".join(map(logged_line, found)) for task, found in results["samples"].items()}
            read = {t: by_filter(text, self._place(t), results["configs"][t]) for t, text in lines.items()}
            self.known += self.evaluation.scores(read, begin, end)
            self.seconds += time.perf_counter() - start
            self._keep(results, lines)
        return Scores(*(part[begin:end] for part in self.known))

    def close(self) -> None:
        """Give the model's memory back."""
        self._lm = None
        free_memory()

    def _asked(self, begin: int, end: int) -> dict[str, Any]:
        try:
            if self._lm is None:
                self._lm = loaded_lm(
                    self._model, self._arguments, self._more, lambda lm: None, **self._settings
                )
            return self.evaluation.ask(self._lm, begin, end)
        except UsageError:
            raise
        except Exception as error:
            said = str(error) if isinstance(error, DispersionError) else failure_sentence(error) or ""
            memory = said.startswith("out of memory") and self._lm is not None and not self._halved
            if not memory or not halve_batch(self._lm):
                if os.environ.get("DISPERSION_DEBUG"):
                    raise
                raise CheckpointError(said or f"{type(error).__name__}: {error}") from error
            self._halved = True
        free_memory()  # outside of the handler, whose traceback holds the tensors
        return self._asked(begin, end)

    # --- on disk --------------------------------------------------------------------------------------

    def _place(self, task: str) -> Path:
        return self._folder / f"samples_{task}_{self._date}.jsonl"

    def _keep(self, results: Mapping[str, Any], lines: Mapping[str, str]) -> None:
        """Append a block's samples, then replace the results, which make it count."""
        sizes: dict[str, int] = self._results.get("race", {}).get("bytes", {})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for task, text in lines.items():
                with open(self._place(task), "ab") as file:
                    file.write(text.encode("utf-8", "backslashreplace"))
                    file.flush()
                    os.fsync(file.fileno())
                    sizes[task] = file.tell()
        except OSError as error:
            raise DispersionError(
                f"could not write to {self._folder}: {error.strerror or error}; free some space, and "
                "the same command goes on"
            ) from error
        for key in ("configs", "versions", "n-shot", "higher_is_better"):
            self._results[key] = self._results.get(key, {}) | dict(results[key])
        self._results |= self._described() | {"race": self._counted(sizes)}
        write_whole(self._file, json.dumps(self._results, indent=1, default=str, ensure_ascii=False).encode())

    def _described(self) -> dict[str, Any]:
        """What lm-eval's results say of the run, and each task's figures so far."""
        figures, counts = {}, {}
        places: dict[str, list[int]] = {}
        for i, (task, _) in enumerate(self.evaluation.questions[: len(self.known.score)]):
            places.setdefault(task, []).append(i)
        for task, chosen in places.items():
            values, n = self.known.score[chosen], len(chosen)
            name, metric = self.evaluation.judges[task]
            error = float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else "N/A"
            figures[task] = {f"{metric},{name}": float(values.mean()), f"{metric}_stderr,{name}": error}
            counts[task] = {"original": self.evaluation.documents(task), "effective": n}
        chat = self.evaluation.chat
        template = self._lm.chat_template(chat) if chat else None
        return {
            "results": figures,
            "group_subtasks": {},
            "n-samples": counts,
            "config": {
                "model": self._model,
                "model_args": {**self._arguments, **simple_parse_args_string(self._more)},
                "model_sha": self._arguments.get("revision"),
                "fewshot_seed": DEFAULT_OTHER_SEED,
                "limit": None,
                **{key: value for key, value in self._settings.items() if value is not None},
            },
            "date": self._results.get("date", time.time()),
            "model_name": self._arguments["pretrained"],
            "system_instruction": None,
            "chat_template_sha": hashed(template) if template else None,
            "fewshot_as_multiturn": bool(chat),
        }

    def _counted(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Where the race stands with it; ``bytes`` says how much of each file of samples counts."""
        return {
            "label": self.label,
            "questions": len(self.known.score),
            "of": len(self.evaluation.questions),
            "score": float(self.known.score.mean()),
            "seconds": round(self.seconds, 3),
            "bytes": sizes,
        }

    def _read(self) -> None:
        """Read the blocks of an earlier run; what it did not finish is cut off."""
        try:
            if self._file.exists():
                self._results = json.loads(self._file.read_text("utf-8"))
            kept = self._results.get("race", {"bytes": {}})
            sizes = {self._place(task): size for task, size in kept["bytes"].items()}
            for place in self._folder.glob(f"samples_*_{self._date}.jsonl"):
                if place not in sizes:
                    place.unlink()
                elif place.stat().st_size < sizes[place]:
                    raise ValueError(f"{place.name} is shorter than it was")
                else:
                    os.truncate(place, sizes[place])
            if not kept["bytes"]:
                return
            samples = {}
            for task in kept["bytes"]:
                place = self._place(task)
                samples[task] = by_filter(place.read_text("utf-8"), place, self._results["configs"][task])
            self.known = self.evaluation.scores(samples, 0, kept["questions"])
            self.seconds = kept["seconds"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarnessError(
                f"{self._folder} is not as the race left it ({error}); remove it, and the "
                "checkpoint is asked anew"
            ) from error
