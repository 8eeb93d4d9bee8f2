"""Checkpoints evaluated block by block: lm-eval's own evaluation, and a folder that keeps every block.

An :class:`Entrant` is all that a process needs to run one checkpoint: it loads it, asks it, and keeps what it
answered. Its folder holds what ``lm_eval --log_samples`` writes. A block counts once the results file, which
is replaced as a whole, says how long the samples' files are; what a killed run left behind that is cut off.
The states of dispersion tasks are kept by block beside them, until all questions are in a store.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.failures import checkpoint_failure, failure_sentence
from lmeval_dispersion.harness.recording import check_model
from lmeval_dispersion.harness.records import DocRecord, TaskMetrics, load_states, save_states
from lmeval_dispersion.harness.saving import commit_of, manifest_of, write
from lmeval_dispersion.harness.task import DispersionTask
from lmeval_dispersion.model.loading import weights_stamp
from lmeval_dispersion.output import write_whole
from lmeval_dispersion.racing.contest import BLOCK, NOTHING, Scores
from lmeval_dispersion.store.identity import hashed, prompt_manifest
from lmeval_dispersion.store.samples import Sample, by_filter, check_judge, correctness, split_judge

_KEPT = ("configs", "versions", "n-shot", "higher_is_better")  # of lm-eval's results, task by task


class CheckpointError(DispersionError):
    """One checkpoint could not be loaded or asked; the race goes on without it."""


class Evaluation:
    """Questions of one or several tasks in one random order, the same for every model.

    ``seed`` is of the order, ``limit`` the most questions of a checkpoint, ``metric`` METRIC or
    FILTER/METRIC; the others are lm-eval's own.

    Attributes:
        questions: Task and document of each, in order. Their mean score is that of a checkpoint.
        judges: Filter and metric of each task that was asked.
        recorded: The dispersion tasks, whose hidden states are kept.

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
        self.seed, self._named, self.chat = seed, metric, apply_chat_template
        self.tasks = seams.loaded_tasks(tasks, num_fewshot, include_path, stock=False)
        self.recorded = {name: t for name, t in self.tasks.items() if isinstance(t, DispersionTask)}
        for task in self.recorded.values():
            task.saves = False
        self.questions, _ = seams.drawn_questions(self.tasks, limit, seed)
        self.judges: dict[str, tuple[str, str]] = {}
        self._options = {"apply_chat_template": self.chat, "fewshot_as_multiturn": bool(self.chat)}
        self._options["confirm_run_unsafe_code"] = confirm_run_unsafe_code
        self._requests: dict[str, dict[int, list[Any]]] = {}
        self._built_for: Any = lambda: None

    @property
    def metric(self) -> str:
        """What scored, as audits call it: the metric, with the filter where a task has several."""
        names = dict[str, None]()
        for name, task in self.tasks.items():
            if name in self.judges:
                chosen, metric = self.judges[name]
                names[metric if len(seams.filters_of(task)) < 2 else f"{chosen}/{metric}"] = None
        return ", ".join(names)

    def identity(self) -> dict[str, list[str]]:
        """Task -> its version, and hashes of how it asks and of its documents."""
        text = partial(json.dumps, default=lambda value: type(value).__name__)  # an image's has an address
        found = {}
        for name, task in self.tasks.items():
            prompts = self.prompts(name, str(self.chat) if self.chat else None)
            asked = hashed("".join(map(text, task.eval_docs)))
            found[name] = [str(task.VERSION), prompts["prompt_format"], asked]
        return found

    def prompts(self, name: str, chat_template: str | None) -> dict[str, Any]:
        """The manifest's keys about a task's prompts, by the hash of the model's chat template."""
        return prompt_manifest(
            vars(self.tasks[name].config),
            fewshot_seed=seams.DEFAULT_OTHER_SEED,
            chat_template=chat_template,
            multiturn=bool(self.chat),
            system=None,
        )

    def ask(self, lm: Any, begin: int, end: int) -> dict[str, Any]:
        """lm-eval's results of a model on the questions ``begin`` to ``end``, samples included."""
        if not self._requests or (self.chat and self._built_for() is not lm):
            self._requests = {name: self._built(name, lm) for name in dict(self.questions)}
            self._built_for = weakref.ref(lm)
        requests = {
            name: {i: self._requests[name][i] for _, i in chosen}
            for name, chosen in groupby(sorted(self.questions[begin:end]), key=lambda question: question[0])
        }
        for task in self.recorded.values():
            task.take()  # of a block that another model did not finish
        return seams.evaluated(lm, self.tasks, requests, **self._options)

    def _built(self, name: str, lm: Any) -> dict[int, list[Any]]:
        """A task's requests; where examples may be drawn document by document all, as in lm-eval."""
        task = self.tasks[name]
        asked = [i for other, i in self.questions if other == name]
        documents = range(len(task.eval_docs)) if task.config.num_fewshot else asked
        return seams.built_requests(task, documents, lm if self.chat else None)

    def scores(self, texts: Mapping[str, str], configs: Mapping[str, Any], begin: int, end: int) -> Scores:
        """The scores of the questions ``begin`` to ``end``, by the lines of each task's file of samples.

        Raises:
            UsageError: The metric gives no number from 0 to 1 for a question, or a lower one is better.
            HarnessError: The task has no such metric, or a line is broken.
        """
        samples = {
            task: by_filter(text, Path(f"samples of {task}"), configs[task]) for task, text in texts.items()
        }
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
                    f"another --metric of {', '.join(sample.metrics)}"
                )
            found.append((value, sample.columns["probability"]))
        return Scores(*np.array(found, dtype=np.float64).T)

    def _judge(self, task: str, filters: Mapping[str, Mapping[int, Sample]]) -> tuple[str, str]:
        """The filter and the metric that score."""
        metrics = next(iter(next(iter(filters.values())).values())).metrics
        check_judge(task, self._named, list(filters), metrics)
        chosen, named = split_judge(self._named)
        metric = correctness(metrics, named)[0]
        if metric is None or self.tasks[task].higher_is_better().get(metric) is False:
            raise UsageError(
                f"{task}: expected --metric with a score from 0 to 1 for each question, the higher the "
                f"better, got {named or 'none'}; it has {', '.join(metrics)}"
            )
        return chosen or next(iter(filters)), metric


class Entrant:
    """One checkpoint of a race, loaded when a question is new, and its folder, which keeps all answers.

    ``arguments`` of the backend, such as ``pretrained``, come before ``model_args``; ``settings`` are
    ``batch_size`` and ``device``; ``date`` stands in the names of the files.

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
        self._folder, self._date, self._file = folder, date, folder / f"results_{date}.json"
        self._model, self._given = model, {**arguments, **seams.backend_arguments(model_args)}
        self._name = self._given.get("pretrained") or self._given["model"]  # the latter of a server
        self._settings = {key: value for key, value in settings.items() if value is not None}
        self._lm: Any = None
        self._halved = False
        self._results: dict[str, Any] = {"date": time.time(), **{key: {} for key in _KEPT}}
        self._sizes: dict[str, int] = {}  # task -> bytes of its samples that count
        self._weights: list[Any] = []  # what the files of the weights were when they were loaded
        self._manifest: dict[str, Any] = {}  # of stores, about the model
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
            lines = {
                name: "".join(map(seams.logged_line, found)) for name, found in results["samples"].items()
            }
            scores = self.evaluation.scores(lines, results["configs"], begin, end)
            self.seconds += time.perf_counter() - start
            self._keep(scores, results, lines)
        return Scores(*(part[begin:end] for part in self.known))

    def close(self) -> None:
        """Give the model's memory back."""
        self._lm = None
        seams.free_memory()

    def _asked(self, begin: int, end: int) -> dict[str, Any]:
        try:
            if self._lm is None:
                self._lm = self._loaded()
            return self.evaluation.ask(self._lm, begin, end)
        except UsageError:
            raise
        except Exception as error:
            memory = (failure_sentence(error) or "").startswith("out of memory")
            again = memory and self._lm is not None and not self._halved
            if not again or not seams.halve_batch(self._lm):
                raise CheckpointError(checkpoint_failure(error)) from error
            self._halved = True
        seams.free_memory()  # outside of the handler, whose traceback holds the tensors
        return self._asked(begin, end)

    def _loaded(self) -> Any:
        """The model; for earlier answers with the weights that gave them, on the Hub by their commit."""
        places = [self._given[key] for key in ("pretrained", "peft", "delta") if key in self._given]
        weights = [weights_stamp(place, self._given.get("gguf_file")) for place in places]
        if len(self.known.score) and weights != self._weights:
            raise CheckpointError(
                "the files of its weights have other sizes or times than those that gave the "
                f"{len(self.known.score)} answers in {self._folder}; remove that folder, and the checkpoint "
                "is asked anew"
            )
        named = ",".join(self.evaluation.recorded)

        def check(lm: Any) -> None:
            if named:
                check_model(lm, named)

        lm = seams.loaded_lm(self._model, self._given, check, **self._settings)
        self._weights = weights
        if commit := commit_of(self._name, lm, self._given):
            self._given["revision"] = commit
        if named:
            self._manifest = manifest_of(lm, self._given, {"identity": {}}, {}, None)
        return lm

    # --- on disk --------------------------------------------------------------------------------------

    def _place(self, task: str) -> Path:
        return self._folder / f"samples_{task}_{self._date}.jsonl"

    def _keep(self, scores: Scores, results: Mapping[str, Any], lines: Mapping[str, str]) -> None:
        """Append a block's samples, then replace the results, which make it count; it is known last."""
        known, sizes = self.known + scores, dict(self._sizes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._keep_states(len(self.known.score))
            for task, text in lines.items():
                with open(self._place(task), "ab") as file:
                    file.write(text.encode("utf-8", "backslashreplace"))
                    file.flush()
                    os.fsync(file.fileno())
                    sizes[task] = file.tell()
        except OSError as error:
            raise self._unwritten(error) from error
        for key in _KEPT:
            self._results[key] |= results[key]
        self._sizes = sizes
        self._results |= self._described(known)
        self._write()
        self.known = known

    def _write(self) -> None:
        text = json.dumps(self._results, indent=1, default=str, ensure_ascii=False)
        write_whole(self._file, text.encode("utf-8", "backslashreplace"))

    def _states(self, begin: int) -> Path:
        return self._folder / ".states" / f"{begin:06d}.safetensors"

    def _keep_states(self, begin: int) -> None:
        """Keep the states of a block's dispersion tasks."""
        states = list[tuple[Any, Any]]()
        for name, task in sorted(self.evaluation.recorded.items()):
            records, by = task.take()
            states += [(r.state, (name, by, r.doc_id, r.correct, r.filter, r.columns)) for r in records]
        if self.evaluation.recorded:
            self._states(begin).parent.mkdir(exist_ok=True)
            save_states(self._states(begin), states)

    def store(self) -> None:
        """Make a store of all documents of each dispersion task that were asked so far, unless it is there.

        Raises:
            HarnessError: The states are not as the race left them.
            DispersionError: A store could not be written.
        """
        n, records = len(self.known.score), defaultdict[tuple[str, str | None], list[DocRecord]](list)
        if not self.evaluation.recorded or not n or self._results["race"].get("stored") == n:
            return
        try:
            for begin in range(0, n, BLOCK):
                for state, (name, by, *rest) in load_states(self._states(begin)):
                    records[name, by].append(DocRecord(state, *rest))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise self._changed(error) from error
        for (name, by), found in records.items():
            task = self.evaluation.tasks[name]
            metrics = TaskMetrics(task.task_name, found)
            prompts = self.evaluation.prompts(name, self._results["chat_template_sha"])
            manifest = {**self._manifest, **prompts, "tasks": {task.task_name: task.VERSION}}
            manifest["identity"] = {**self._manifest["identity"], **prompts["identity"]}
            manifest["figures"] = {**metrics.summary(), "correct_by": by}
            try:
                place = self._folder / f"dispersion_{self._date}" / task.task_name
                write(place, metrics, task.category, manifest)
            except (OSError, SafetensorError) as error:
                raise self._unwritten(error) from error
        self._results["race"]["stored"] = n
        self._write()
        if n == len(self.evaluation.questions):
            shutil.rmtree(self._states(0).parent)

    def _described(self, known: Scores) -> dict[str, Any]:
        """What lm-eval's results say of the run, each task's figures so far, and where the race stands."""
        n, figures, counts = len(known.score), {}, {}
        for task, (chosen, metric) in self.evaluation.judges.items():
            values = known.score[[name == task for name, _ in self.evaluation.questions[:n]]]
            if len(values):
                error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else "N/A"
                figures[task] = {f"{metric},{chosen}": values.mean(), f"{metric}_stderr,{chosen}": error}
                total = len(self.evaluation.tasks[task].eval_docs)
                counts[task] = {"original": total, "effective": len(values)}
        given, chat = self._given, self.evaluation.chat
        template = self._lm.chat_template(chat) if chat else None
        config = {"model": self._model, "model_args": given, "model_sha": given.get("revision")}
        race = {"label": self.label, "questions": n, "of": len(self.evaluation.questions)}
        race |= {"score": known.score.mean(), "seconds": round(self.seconds, 3), "bytes": self._sizes}
        race |= {"weights": self._weights, "manifest": self._manifest}
        return {
            "results": figures,
            "group_subtasks": {},
            "n-samples": counts,
            "config": {**config, **self._settings, "fewshot_seed": seams.DEFAULT_OTHER_SEED, "limit": None},
            "model_name": self._name,
            "system_instruction": None,
            "chat_template_sha": hashed(template) if template else None,
            "fewshot_as_multiturn": bool(chat),
            "race": race,
        }

    def _read(self) -> None:
        """Read the blocks of an earlier run; what it did not finish is cut off."""
        try:
            if self._file.exists():
                self._results = json.loads(self._file.read_text("utf-8"))
                race, commit = self._results["race"], self._results["config"]["model_sha"]
                self._sizes, self._weights = race["bytes"], race["weights"]
                self._manifest = race["manifest"]
                self._given |= {"revision": commit} if commit else {}
            counted = {self._place(task): size for task, size in self._sizes.items()}
            for place in {*counted, *self._folder.glob(f"samples_*_{self._date}.jsonl")}:
                size = counted.get(place, 0)
                if place.stat().st_size < size:
                    raise ValueError(f"{place.name} is shorter than it was")
                os.truncate(place, size) if size else place.unlink()
            if self._sizes:
                texts = {task: self._place(task).read_text("utf-8") for task in self._sizes}
                asked = self._results["race"]["questions"]
                self.known = self.evaluation.scores(texts, self._results["configs"], 0, asked)
                self.seconds = self._results["race"]["seconds"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._changed(error) from error

    def _changed(self, error: Exception) -> HarnessError:
        return HarnessError(
            f"{self._folder} is not as the race left it ({error}); remove it, and the checkpoint is asked "
            "anew"
        )

    def _unwritten(self, error: Exception) -> DispersionError:
        why = getattr(error, "strerror", None) or error
        return DispersionError(
            f"could not write to {self._folder}: {why}; free some space, and the same command goes on"
        )
