"""Checkpoints evaluated block by block by lm-eval's own evaluation, and a folder that keeps every block.

An :class:`Entrant` runs one checkpoint in any process: it loads and asks the model, and keeps the
answers. Its folder holds what ``lm_eval --log_samples`` writes. A block counts once the results
file, which is replaced as a whole, gives the lengths of the samples' files; anything after that,
from a killed run, is cut off. The states of dispersion tasks are kept by block next to them, until
all questions are in a store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lmeval_screener.shortlist.loading import with_base
from numpy.typing import NDArray
from safetensors import SafetensorError

from lmeval_dispersion.asking import Asking, LmEval
from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.errors import count as counted
from lmeval_dispersion.files import hashed, remove_parts, write_whole
from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.adapters import answers_as_base
from lmeval_dispersion.harness.failures import checkpoint_failure, failure_sentence
from lmeval_dispersion.harness.recording import check_model
from lmeval_dispersion.harness.records import DocRecord, TaskMetrics, load_states, save_states
from lmeval_dispersion.harness.saving import commit_of, manifest_of, write
from lmeval_dispersion.harness.swapping import SharedBase
from lmeval_dispersion.harness.task import DispersionTask
from lmeval_dispersion.logs.judging import (
    JUDGES,
    NamedMetrics,
    check_judge,
    correctness,
    split_judge,
)
from lmeval_dispersion.model.loading import weights_stamp
from lmeval_dispersion.racing.contest import NOTHING, Scores
from lmeval_dispersion.racing.kept import WRONG_CONTENT, RaceResults, not_as_left, race_results
from lmeval_dispersion.racing.rule import SHARED, STEP
from lmeval_dispersion.store.documents import Sample, by_filter
from lmeval_dispersion.store.groups import mean_score, question_weights, units_of
from lmeval_dispersion.store.identity import SUFFIX, prompt_manifest, source_text
from lmeval_dispersion.store.samples import stock_name
from lmeval_dispersion.store.sanity import finite_answer, not_finite_sentence

#: Keys of lm-eval's results that are kept, by task.
_KEPT = ("configs", "versions", "n-shot", "higher_is_better")


Question = tuple[str, int]  # task and document
More = Callable[["Evaluation", Any, dict[str, Any]], None]
_SCORING = (
    "doc_to_target",
    "doc_to_choice",
    "process_results",
    "metric_list",
    "filter_list",
    "repeats",
)


def _digest(values: Iterable[Any]) -> str:
    """Hash of values, the same in every process: a function by its source, an image by its type."""

    def shown(value: Any) -> str:
        return source_text(value) if callable(value) else type(value).__name__

    digest = hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value, default=shown).encode())
    return digest.hexdigest()


@contextmanager
def _without_metadata_advice() -> Iterator[None]:
    """Leave out lm-eval's advice to try ``--metadata``, an option that a race does not have."""

    def is_other(record: logging.LogRecord) -> bool:
        return "--metadata" not in record.getMessage()

    log = logging.getLogger("lm_eval.api.task")
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def batch_of(asking: LmEval, requests: int) -> int:
    """Return how many questions to ask at once, if each of them makes ``requests`` requests.

    It is the number of questions whose requests fill one of lm-eval's batches, but at least `STEP`
    (see :class:`~lmeval_dispersion.racing.rule.Bets`). For the batch size ``auto`` it is `SHARED`,
    the number of shared questions of a race, or `STEP` if that is larger.
    """
    size = str(asking.batch_size or 1)
    if size.startswith("auto"):
        return max(SHARED, STEP)
    return max(STEP, math.ceil(int(size) / max(1, requests)))


class CheckpointError(DispersionError):
    """A checkpoint could not be loaded or asked; the race goes on without it.

    Attributes:
        asked: Whether the checkpoint had been loaded before the error.
    """

    asked = False


class Evaluation:
    """The questions of a race, drawn at random from one or several tasks.

    A *unit* is a task, or a group of tasks for which lm-eval gives one figure. Each task of a tag,
    or of a group without a figure, is a unit of its own. A checkpoint's score is the mean over the
    units, where a group's score is computed as lm-eval does. With ``weigh`` ``questions`` the score
    is the mean over the questions instead. With a limit, that many questions are drawn in all:
    equally many from each unit (as far as it has them), or, with ``weigh`` ``questions``, from all
    tasks together.

    Attributes:
        asking: The options that say what is asked, and how.
        seed: Seed of the draw of the questions.
        chat: Whether questions are put in a chat template, or the name of the template.
        tasks: Name -> lm-eval's task.
        questions: The task and the document of each question, in the order drawn; N of them.
        available: Number of questions that the tasks have in all.
        weights: Weight of each question in a checkpoint's score, with a mean of 1; None if all are
            equal. Shape (N,).
        units: Name of a unit -> indices of its questions, ascending; the units in the order named.
        groups: Name of a group that is a unit -> the group's
            :class:`~lmeval_dispersion.store.groups.TaskGroup`.
        weighing: ``units`` if the equal weight of the units changes which questions are drawn, or
            the score; None otherwise.
        places: Task -> indices of its questions, ascending.
        own_rules: Names of the multiple-choice tasks that score answers by a function of their own.
        judges: Task -> the filter and the metric that score it, for the tasks asked so far.
        recorded: Name -> dispersion task. The hidden states of these tasks are kept.
        blocks: Label -> question -> the probabilities that :func:`shared.complete` added to the
            answer.
        not_finite: Label -> questions whose log-probabilities are not finite. A single one takes
            the checkpoint out of the race.
        others: Label -> questions whose prompt from the chat template differs from the prompt that
            an earlier checkpoint had.
        models: Keeps the loaded model, which adapters of one base share.

    Raises:
        UsageError: lm-eval does not know a task, a task has no metric with scores from 0 to 1 where
            higher is better, or the limit leaves a unit without questions.
        HarnessError: A task lacks the filter or metric that is named for it.
    """

    def __init__(self, asking: Asking) -> None:
        self.asking = asking
        self.seed = asking.seed
        self.chat = asking.apply_chat_template
        with _without_metadata_advice():
            self.tasks, groups = seams.loaded_suite(
                asking.tasks or "", asking.num_fewshot, asking.include_path, stock=False
            )
        self._group_entries = seams.group_entries(groups)
        self._named = self._named_metrics(asking.metric, seams.groups_above(groups))
        self.recorded = dict[str, DispersionTask]()
        self.own_rules = set[str]()
        expected = dict[str, str | None]()
        for name, task in self.tasks.items():
            expected[name] = self._check_metric(name)
            if isinstance(task, DispersionTask):
                task.saves = False
                self.recorded[name] = task
            if seams.judges_by_own_rule(task):
                self.own_rules.add(name)
        self.groups = seams.task_groups(groups, expected)
        self._draw(asking.limit, asking.weigh)
        self._place = {question: i for i, question in enumerate(self.questions)}
        self.judges: dict[str, tuple[str, str]] = {}
        self.blocks = defaultdict[str, dict[Question, Mapping[str, Any]]](dict)
        self.not_finite = defaultdict[str, set[Question]](set)
        self.others = defaultdict[str, set[Question]](set)
        self._prompts = defaultdict[str | None, dict[Question, str]](dict)
        self._options = {
            "apply_chat_template": self.chat,
            "fewshot_as_multiturn": bool(self.chat),
            "confirm_run_unsafe_code": asking.confirm_run_unsafe_code,
        }
        self._requests: dict[str, dict[int, list[Any]]] = {}
        self._built_for: Any = lambda: None
        self.models = SharedBase()

    def _named_metrics(
        self, text: str | None, above: Mapping[str, Sequence[str]]
    ) -> dict[str, str | None]:
        """Task -> what ``--metric`` names for it, or for a group that holds it."""
        named = NamedMetrics.of(text)
        names = dict[str, list[str]]()
        for task in self.tasks:
            given = [task, stock_name(task), *above.get(task, ())]
            plain = [name.removesuffix(SUFFIX) for name in given]
            names[task] = [*given, *plain]
        every_name = dict.fromkeys(chain.from_iterable(names.values()))
        named.check([*every_name])
        return {task: named.judge(*each) for task, each in names.items()}

    def _draw(self, limit: int | None, weigh: str) -> None:
        """Draw the questions, and weigh them."""
        units = units_of(self.tasks, self.groups)
        if weigh == "units":
            drawn, self.available = seams.drawn_questions(self.tasks, limit, self.seed, units)
            self.weights = question_weights([task for task, _ in drawn], self.groups)
        else:
            drawn, self.available = seams.drawn_questions(self.tasks, limit, self.seed)
            self.weights = None
        is_part = len(drawn) < self.available
        is_apart = weigh == "units" and len(units) > 1 and is_part
        self.weighing = "units" if is_apart or self.weights is not None else None
        self.questions = drawn
        tasks = np.array([task for task, _ in drawn])
        self.places = dict[str, NDArray[np.int64]]()
        for task in dict(drawn):
            self.places[task] = np.flatnonzero(tasks == task)
        self.units = dict[str, NDArray[np.int64]]()
        for unit, members in units.items():
            self.units[unit] = np.flatnonzero(np.isin(tasks, members))

    def mean(self, scores: NDArray[np.float64], places: NDArray[np.int64] | None = None) -> float:
        """Return a checkpoint's score, as lm-eval computes it from the scores of single questions.

        Args:
            scores: Score on each question, NaN where there is none. Shape (N,).
            places: Indices of the questions to count, shape (k,); None for all.

        Returns:
            The mean over units, or over questions if these have equal weights; NaN without a score.
        """
        if places is None:
            places = np.arange(len(self.questions))
        places = places[~np.isnan(scores[places])]
        known = scores[places]
        if not len(known):
            return math.nan
        if self.weights is None:
            return float(known.mean())
        tasks = [self.questions[place][0] for place in places]
        return mean_score(tasks, known, self.groups)

    def by_unit(self, scores: NDArray[np.float64]) -> dict[str, tuple[int, float]]:
        """Return the number of scores in each unit (task or group) and their mean, by unit.

        The mean is NaN for a unit without a score. ``scores`` is the score on each question, shape
        (N,); NaN where the question was not asked.
        """
        means = dict[str, tuple[int, float]]()
        for unit, places in self.units.items():
            is_known = ~np.isnan(scores[places])
            count = int(is_known.sum())
            means[unit] = (count, self.mean(scores, places))
        return means

    def figures(self, scores: NDArray[np.float64]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the sections ``results`` and ``n-samples`` of a results file.

        A task without a score is left out. A group that is a unit has a score, without a standard
        error, if one metric scores all its tasks. ``scores`` is the score on each question, NaN
        where the question was not asked. Shape (N,).
        """
        figures = dict[str, Any]()
        counts = dict[str, Any]()
        for task, (chosen, metric) in self.judges.items():
            values = scores[self.places[task]]
            values = values[~np.isnan(values)]
            if not len(values):
                continue
            error = "N/A"
            if len(values) > 1:
                error = values.std(ddof=1) / len(values) ** 0.5
            figures[task] = {
                f"{metric},{chosen}": values.mean(),
                f"{metric}_stderr,{chosen}": error,
            }
            total = len(self.tasks[task].eval_docs)
            counts[task] = {"original": total, "effective": len(values)}
        for name, (alias, _) in self._group_entries.items():
            figures[name] = {"alias": alias}
        for name, group in self.groups.items():
            judges = set[tuple[str, str]]()
            for task in group["tasks"]:
                if task in self.judges:
                    judges.add(self.judges[task])
            mean = self.mean(scores, self.units[name])
            if len(judges) == 1 and not math.isnan(mean):
                chosen, metric = judges.pop()
                figures[name][f"{metric},{chosen}"] = mean
        return figures, counts

    @property
    def group_members(self) -> dict[str, list[str]]:
        """Names of the members of each of lm-eval's groups, by the group's name."""
        return {name: members for name, (_, members) in self._group_entries.items()}

    @property
    def metric(self) -> str:
        """The metrics that score the tasks asked so far, joined by commas.

        They are named as in audits: ``FILTER/METRIC`` for a task with several filters.
        """
        names = dict[str, None]()
        for name, task in self.tasks.items():
            if name in self.judges:
                chosen, metric = self.judges[name]
                if len(seams.filters_of(task)) > 1:
                    metric = f"{chosen}/{metric}"
                names[metric] = None
        return ", ".join(names)

    def identity(self) -> dict[str, dict[str, str]]:
        """Return the version and hashes of each task, which show whether two races ask the same.

        There is one hash of the task's requests with their few-shot examples (``prompts``), one of
        its documents (``documents``), and one of the settings by which answers are scored
        (``scoring``).
        Where a chat template is applied, requests are hashed without it, since each model has its
        own template.
        """
        identity = dict[str, dict[str, str]]()
        asked = dict(self.questions)
        for name, task in self.tasks.items():
            requests = list[Any]()
            if name in asked:
                built = self._built(name)
                requests = list(chain.from_iterable(built.values()))
                if not self.chat:
                    self._requests[name] = built
            config = vars(task.config)
            identity[name] = {
                "version": str(task.VERSION),
                "prompts": _digest(request.arguments for request in requests),
                "documents": _digest(task.eval_docs),
                "scoring": _digest(config.get(key) for key in _SCORING),
            }
        return identity

    def prompts(self, name: str, chat_template: str | None) -> dict[str, Any]:
        """Return the entries of a store's manifest that describe the prompts of a task.

        Args:
            name: Name of the task.
            chat_template: Hash of the model's chat template; None without one.
        """
        return prompt_manifest(
            vars(self.tasks[name].config),
            fewshot_seed=seams.DEFAULT_OTHER_SEED,
            chat_template=chat_template,
            multiturn=bool(self.chat),
            system=None,
        )

    def ask(self, lm: Any, places: Sequence[int]) -> dict[str, Any]:
        """Ask a model some of the questions, and return lm-eval's results with samples.

        Args:
            lm: lm-eval's model.
            places: Indices of the questions.
        """
        if self._built_for() is not lm:
            self._built_for = weakref.ref(lm)
            if self.chat or not self._requests:
                self._requests = {name: self._built(name, lm) for name in dict(self.questions)}
            every_request = list[Any]()
            for built in self._requests.values():
                every_request += chain.from_iterable(built.values())
            seams.settle_batch(lm, every_request, SHARED * self._most_requests)
        requests = dict[str, dict[int, list[Any]]]()
        questions = sorted(self.questions[place] for place in places)
        for name, i in questions:
            of_task = requests.setdefault(name, {})
            of_task[i] = self._requests[name][i]
        for task in self.recorded.values():
            task.take()  # records of a block that another model did not finish
        return seams.evaluated(lm, self.tasks, requests, **self._options)

    @property
    def _most_requests(self) -> int:
        """The most requests of a question."""
        most = 1
        for documents in self._requests.values():
            for requests in documents.values():
                count = sum(request.repeats for request in requests)
                most = max(most, count)
        return most

    @property
    def batch(self) -> int:
        """Number of questions that are asked at once."""
        return batch_of(self.asking, self._most_requests)

    def requests_of(self, question: Question) -> tuple[Any, list[Any]]:
        """Return a question's task and requests, as built for the model that was asked last."""
        name, i = question
        return self.tasks[name], self._requests[name][i]

    def template_of(self, lm: Any) -> str | None:
        """Return a hash of the chat template that is applied for a model; None without one."""
        template = lm.chat_template(self.chat) if self.chat else None
        return hashed(template) if template else None

    def _built(self, name: str, lm: Any = None) -> dict[int, list[Any]]:
        """A task's requests; where examples may be drawn document by document all, as in lm-eval."""
        task = self.tasks[name]
        asked = [i for other, i in self.questions if other == name]
        documents = range(len(task.eval_docs)) if task.config.num_fewshot else asked
        return seams.built_requests(task, documents, lm if self.chat else None)

    def scores(
        self,
        label: str,
        template: str | None,
        texts: Mapping[str, str],
        configs: Mapping[str, Any],
    ) -> Scores:
        """Return the scores of all N questions from logged samples, NaN where there is no answer.

        A question whose log-probabilities are not finite is entered in ``not_finite``. Its score is
        set to 0, which is never used, since the checkpoint leaves the race.

        Args:
            label: Label of the checkpoint.
            template: Hash of the checkpoint's chat template; None without one.
            texts: Task -> content of the file with the task's samples.
            configs: Task -> lm-eval's configuration of the task.

        Raises:
            UsageError: A score is not from 0 to 1, lower scores are better, or a task has no
                metric to race by.
            HarnessError: A task lacks the filter or metric that is named for it, a line is broken,
                or a prompt without a chat template differs from that of earlier checkpoints.
        """
        scores = self.unasked()
        for task, text in texts.items():
            filters = by_filter(Path(f"samples of {task}"), configs[task], text)
            if filters and task not in self.judges:
                self.judges[task] = self._judge(task, filters)
            self._enter(task, filters, label, template, scores)
        return scores

    def _enter(
        self,
        task: str,
        filters: Mapping[str, Mapping[int, Sample]],
        label: str,
        template: str | None,
        scores: Scores,
    ) -> None:
        """Enter one task's samples, by filter and document, into the scores; raises as :meth:`scores`."""
        chosen, metric = self.judges[task]
        samples = filters[chosen]
        values = {i: correctness(sample.metrics, metric)[1] for i, sample in samples.items()}
        is_own = task in self.own_rules
        is_mass = is_own and any(0 < value < 1 for value in values.values())
        log_probabilities = [sample.columns["logprobs"] for sample in samples.values()]
        finite = finite_answer(log_probabilities)
        for (i, sample), is_finite in zip(samples.items(), finite, strict=True):
            place = self._place[task, i]
            value = values[i]
            if not is_finite:
                self.not_finite[label].add((task, i))
                scores.score[place] = 0.0  # asked; it fails the checkpoint
                continue
            if not 0 <= value <= 1:
                others = [name for name in sample.metrics if name != metric]
                step = f"name another metric ({', '.join(others)}), or " if others else ""
                raise UsageError(
                    f"{task}: expected scores from 0 to 1, got {metric} {value:g} for document "
                    f"{i}; {step}leave the task out"
                )
            scores.score[place] = value
            if not is_own:
                scores.probability[place] = sample.likely(value)
            elif is_mass:
                # Such a task alone knows which choices are right: this is their probability.
                scores.probability[place] = value
            self.blocks[label][task, i] = sample.block
            prompt = sample.columns["prompt_hash"]
            first_prompt = self._prompts[template].setdefault((task, i), prompt)
            if first_prompt != prompt:
                if not self.chat:
                    raise HarnessError(
                        f"{label} got document {i} of {task} with a different prompt than earlier "
                        f"checkpoints did; remove the folder of {label} in the race's folder, then "
                        "run the same command to ask the checkpoint again"
                    )
                self.others[label].add((task, i))  # a template may hold the date

    def unasked(self) -> Scores:
        """Return scores without any answer: NaN for all N questions."""
        count = len(self.questions)
        return Scores(np.full(count, np.nan), np.full(count, np.nan))

    def notes(self) -> list[str]:
        """Return a sentence for each checkpoint whose prompts differ from those of earlier ones."""
        notes = list[str]()
        for label, questions in self.others.items():
            notes.append(
                f"{label}: for {counted(len(questions), 'question')}, the chat template gave a "
                "different prompt than for earlier checkpoints, for example because it contains "
                "the date."
            )
        return notes

    def _check_metric(self, task: str) -> str | None:
        """The metric that a task is expected to be scored by; None if its answers alone tell.

        Refuses, before a model is loaded, a task without a metric to race by.
        """
        usable, may_have_more = seams.metrics_of(self.tasks[task])
        named = split_judge(self._named[task])[1]
        candidates = (named,) if named else JUDGES
        for metric in candidates:
            if usable.get(metric):
                return metric
        if any(metric not in usable for metric in candidates) and may_have_more:
            return None
        check_judge(task, self._named[task], seams.filters_of(self.tasks[task]), usable)
        raise self._unusable(task, usable, [metric for metric in usable if usable[metric]])

    def _unusable(self, task: str, metrics: Iterable[str], usable: Sequence[str]) -> UsageError:
        given = split_judge(self._named[task])[1] or ", ".join(metrics)
        step = ""
        if len(usable) == 1:
            step = f"name {usable[0]}, or "
        elif usable:
            step = f"name one of {', '.join(usable)}, or "
        return UsageError(
            f"{task}: expected a metric that scores each question from 0 to 1, where higher is better, "
            f"got {given or 'none'}; {step}leave the task out",
            argument="metric",
        )

    def _judge(self, task: str, filters: Mapping[str, Mapping[int, Sample]]) -> tuple[str, str]:
        """The filter and metric that score a task."""
        of_first_filter = next(iter(filters.values()))
        metrics = next(iter(of_first_filter.values())).metrics
        check_judge(task, self._named[task], list(filters), metrics)
        chosen, named = split_judge(self._named[task])
        metric = correctness(metrics, named)[0]
        is_higher_better = self.tasks[task].higher_is_better()
        if metric is None or is_higher_better.get(metric) is False:
            usable = list[str]()
            for name, value in metrics.items():
                if isinstance(value, int | float) and is_higher_better.get(name) is not False:
                    usable.append(name)
            raise self._unusable(task, metrics, usable)
        return chosen or next(iter(filters)), metric


def _commits(given: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, str]:
    """The commits in the ``earlier`` arguments of the same repositories; nothing else is taken of them."""
    adapter = str(given.get("peft", ""))
    before = str(earlier.get("peft", ""))
    if earlier.get("pretrained") != given.get("pretrained"):
        return {}
    if before.partition("@")[0] != adapter.partition("@")[0]:
        return {}
    commits = {}
    if isinstance(earlier.get("revision"), str):
        commits["revision"] = earlier["revision"]
    if before and not os.path.isabs(before):
        commits["peft"] = before
    return commits


def _stamps(given: Mapping[str, Any]) -> list[Any]:
    """Sizes and times of the weight files that lm-eval's arguments name."""
    stamps = list[Any]()
    for key in ("pretrained", "peft", "delta"):
        if given.get(key):
            is_adapter = key == "peft"
            stamp = weights_stamp(given[key], given.get("gguf_file"), adapter=is_adapter)
            stamps.append(stamp)
    return stamps


class Entrant:
    """A checkpoint in a race, and the folder that keeps its answers.

    The checkpoint is loaded only when a question is asked to which the folder has no answer.

    Args:
        evaluation: The questions of the race.
        label: Label of the checkpoint.
        folder: The folder for the checkpoint's answers; it need not exist.
        date: Date in the names of the folder's files.
        arguments: lm-eval's arguments for loading the checkpoint, such as ``pretrained``. The
            command's ``model_args`` take precedence.
        order: Indices of the questions in the order in which they are asked. Shape (N,).
        pinned: Whether the commit that gave the earlier answers is loaded. If not, the latest
            commit is loaded, and has to be the same.

    Attributes:
        evaluation: The questions of the race.
        label: Label of the checkpoint.
        seconds: Seconds that loading and asking took, earlier commands included.
        loading: Seconds that the latest loading took.
        as_base: Whether this is an adapter whose answers are exactly those of its base.
        live: lm-eval's model of a running training, which is asked in place of the saved files;
            None to load the saved files.

    Raises:
        HarnessError: Answers in the folder were changed after they were written.
        DispersionError: The folder cannot be read or written.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        label: str,
        folder: Path,
        date: str,
        arguments: Mapping[str, str],
        order: NDArray[np.int64],
        *,
        pinned: bool = True,
    ) -> None:
        asking = evaluation.asking
        self.evaluation = evaluation
        self.label = label
        self.seconds = 0.0
        self.loading = 0.0
        self._order = order
        self._answers = evaluation.unasked()
        self._folder = folder
        self._date = date
        self._file = folder / f"results_{date}.json"
        self._model = asking.model
        self._given = {**arguments, **seams.backend_arguments(asking.model_args)}
        self._settings: dict[str, Any] = {**asking.of_model}
        self.live: Any = None
        self._lm: Any = None
        self._pinned = pinned
        self._earlier: dict[str, Any] = {}  # arguments that gave the earlier answers
        self._halved = False
        self.as_base = False
        self._template: str | None = None  # hash of its chat template
        self._results: dict[str, Any] = {"date": time.time(), **{key: {} for key in _KEPT}}
        self._sizes: dict[str, int] = {}  # task -> bytes of its samples that are valid
        self._weights: list[Any] = []  # sizes and times of the weight files at load
        self._manifest: dict[str, Any] = {}  # keys of the stores' manifests on the model
        self._read()

    def ask(self, begin: int, end: int, more: More | None = None) -> Scores:
        """Return the scores of the questions from ``begin`` to ``end`` in the checkpoint's order.

        Questions to which the folder has no answer are asked, and their answers are kept.

        Args:
            begin: Position of the first question, from 0.
            end: Position after the last question.
            more: Called to add probabilities to lm-eval's samples, as :func:`shared.complete` does;
                None to add none.

        Raises:
            CheckpointError: The checkpoint cannot be loaded or asked, or log-probabilities of an
                answer are not finite.
            UsageError: The whole race cannot go on: lm-eval has no such backend, the backend gives
                no log-likelihoods and a task needs them, or a task's metric does not give scores
                from 0 to 1 where higher is better.
            HarnessError: The checkpoint got other prompts than earlier checkpoints.
            DispersionError: The answers cannot be written.
        """
        self._check_finite()
        places = self._order[begin:end]
        new = places[np.isnan(self._answers.score[places])]
        if len(new):
            start = time.perf_counter()
            results = self._asked(new, more)
            lines = seams.logged_lines(results)
            scores = self._scores(lines, results["configs"])
            self._check_finite()
            self.seconds += time.perf_counter() - start
            self._keep(scores, results, lines)
        return self._answers.at(places)

    @property
    def known(self) -> Scores:
        """Scores of the kept answers in the checkpoint's order, up to the first missing answer.

        Empty if log-probabilities of an answer are not finite, which takes the checkpoint out of
        the race.
        """
        if self.evaluation.not_finite.get(self.label):
            return NOTHING
        unknown = np.isnan(self._answers.score[self._order])
        end = np.append(unknown, True).argmax()
        return self._answers.at(self._order[:end])

    @property
    def _count(self) -> int:
        """Number of questions that it was asked."""
        is_known = ~np.isnan(self._answers.score)
        return int(is_known.sum())

    def _scores(self, *given: Any) -> Scores:
        return self.evaluation.scores(self.label, self._template, *given)

    def _check_finite(self) -> None:
        """Fail the checkpoint, and keep no answer of the block, if an answer is not finite."""
        questions = self.evaluation.not_finite.get(self.label)
        if questions:
            raise CheckpointError(not_finite_sentence(len(questions)))

    def close(self) -> None:
        """Release the model, so that the next one can have its memory."""
        self._lm = None

    def _asked(self, places: NDArray[np.int64], more: More | None) -> dict[str, Any]:
        try:
            if self._lm is None:
                start = time.perf_counter()
                self._lm = self._loaded()
                self.loading = time.perf_counter() - start
            results = self.evaluation.ask(self._lm, places.tolist())
            if more:
                more(self.evaluation, self._lm, results)
            if not self._count:
                of_first_task = next(iter(results["samples"].values()))
                prompt = of_first_task[0]["arguments"][0][0]
                self.as_base = answers_as_base(self._lm, prompt)
            return results
        except UsageError:
            raise
        except NotImplementedError as error:
            if self._lm is None:
                raise CheckpointError(checkpoint_failure(error)) from error
            raise UsageError(
                "the task's answers are scored by log-likelihoods, which "
                f"{type(self._lm).__name__} does not give; use the model hf or vllm, or a task with "
                "generated answers"
            ) from error
        except Exception as error:
            is_full = (failure_sentence(error) or "").startswith("out of memory")
            # Of a live model all processes have to ask again together: its race sees to that.
            may_halve = is_full and self._lm is not None and self.live is None and not self._halved
            if not may_halve or not seams.halve_batch(self._lm):
                failure = CheckpointError(checkpoint_failure(error))
                failure.asked = self._lm is not None
                raise failure from error
            self._halved = True
        seams.free_memory()  # outside of the handler, whose traceback holds the tensors
        return self._asked(places, more)

    def _loaded(self) -> Any:
        """The model; for earlier answers with the weights that gave them, on the Hub by their commit."""
        # A server has its own names.
        if not issubclass(seams.backend(self._model), seams.TemplateAPI):
            self._given = self._with_base()
        if self._pinned:
            self._given |= _commits(self._given, self._earlier)
        weights = _stamps(self._given)
        if self._count and weights != self._weights:
            raise CheckpointError(
                "the sizes or times of the weights files have changed since they gave the "
                f"{counted(self._count, 'answer')} in {self._folder}; remove that folder, then "
                "run the same command to ask the checkpoint again"
            )
        named = ",".join(self.evaluation.recorded)

        def check(lm: Any) -> None:
            if named:
                check_model(lm, named)

        lm = self.live
        if lm is None:
            lm = self.evaluation.models.loaded(self._model, self._given, check, **self._settings)
        self._weights = weights
        self._template = self.evaluation.template_of(lm)
        name = self._given.get("pretrained") or self._given["model"]  # a server has the latter
        commit = commit_of(name, lm, self._given)
        earlier = self._earlier.get("revision")
        if self._count and not self._pinned and earlier not in (None, commit):
            raise CheckpointError(
                f"expected commit {earlier}, which gave the {counted(self._count, 'answer')} in "
                f"{self._folder}, got {commit or 'an unknown one'}; with trust_remote_code only "
                "the latest commit is loaded, so remove that folder, then run the same command to "
                "ask the checkpoint again"
            )
        if commit:
            self._given["revision"] = commit
        if named:
            self._manifest = manifest_of(lm, self._given, {"identity": {}}, {}, None)
        return lm

    def _with_base(self) -> dict[str, Any]:
        """Its arguments, an adapter's with its base; a base that is in memory alone has no name."""
        try:
            return with_base(self._given)
        except DispersionError:
            if self.live is None:
                raise
            return self._given

    @property
    def is_stale(self) -> bool:
        """Whether the weights files have changed, by size or time, since the answers were kept.

        False if no answers are kept.
        """
        return bool(self._count) and _stamps(self._with_base()) != self._weights

    # --- on disk --------------------------------------------------------------------------------------

    def _place(self, task: str) -> Path:
        return self._folder / f"samples_{task}_{self._date}.jsonl"

    def _keep(self, scores: Scores, results: Mapping[str, Any], lines: Mapping[str, str]) -> None:
        """Append a block's samples, then replace the results, which make it count; it is known last."""
        is_old = np.isnan(scores.score)
        known = Scores(
            np.where(is_old, self._answers.score, scores.score),
            np.where(is_old, self._answers.probability, scores.probability),
        )
        sizes = dict(self._sizes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._keep_states(self._count)
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
        self._answers = known

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
            for record in records:
                entry = (name, by, record.doc_id, record.correct, record.filter, record.columns)
                states.append((record.state, entry))
        if self.evaluation.recorded:
            self._states(begin).parent.mkdir(exist_ok=True)
            save_states(self._states(begin), states)

    def store(self) -> None:
        """Write the store of each dispersion task, with the documents that were asked so far.

        After the last question, the hidden states that were kept for the stores are removed.

        Raises:
            HarnessError: The kept states were changed, or all texts of a task are empty.
            DispersionError: The states cannot be read, or a store cannot be written.
        """
        if not self.evaluation.recorded or not self._count:
            return
        if self._results["race"].get("stored") == self._count:
            self._drop_states()
            return
        for (name, by), records in self._kept_records().items():
            task = self.evaluation.tasks[name]
            metrics = TaskMetrics(task.task_name, records)
            prompts = self.evaluation.prompts(name, self._results["chat_template_sha"])
            manifest = {**self._manifest, **prompts, "tasks": {task.task_name: task.VERSION}}
            manifest["identity"] = {**self._manifest["identity"], **prompts["identity"]}
            manifest["figures"] = {**metrics.summary(), "correct_by": by}
            try:
                place = self._folder / f"dispersion_{self._date}" / task.task_name
                write(place, metrics, task.category, manifest)
            except (OSError, SafetensorError) as error:
                raise self._unwritten(error) from error
        self._results["race"]["stored"] = self._count
        self._write()
        self._drop_states()

    def _kept_records(self) -> dict[tuple[str, str | None], list[DocRecord]]:
        """The records of the blocks that count, by dispersion task and what decides right answers."""
        records = defaultdict[tuple[str, str | None], list[DocRecord]](list)
        try:
            for file in sorted(self._states(0).parent.iterdir()):
                if int(file.stem) >= self._count:
                    continue
                for state, (name, by, *rest) in load_states(file):
                    records[name, by].append(DocRecord(state, *rest))
        except (OSError, SafetensorError, *WRONG_CONTENT) as error:
            raise self._changed(error) from error
        return records

    def _drop_states(self) -> None:
        """Remove the kept states of a checkpoint that was asked everything; its stores have them."""
        if self._count == len(self.evaluation.questions):
            shutil.rmtree(self._states(0).parent, ignore_errors=True)

    def _described(self, known: Scores) -> dict[str, Any]:
        """lm-eval's results entries of the run, each task's figures so far, and the race's own."""
        figures, counts = self.evaluation.figures(known.score)
        is_asked = ~np.isnan(known.score)
        given = self._given
        race = {
            "label": self.label,
            "questions": int(is_asked.sum()),
            "of": len(self.evaluation.questions),
            "score": self.evaluation.mean(known.score),
            "seconds": round(self.seconds, 3),
            "bytes": self._sizes,
            "judges": self.evaluation.judges,
            "weights": self._weights,
            "manifest": self._manifest,
            "as_base": self.as_base,
        }
        name = given.get("peft") or given.get("pretrained") or given["model"]
        if not os.path.isdir(name):
            name = name.partition("@")[0]
        return {
            "results": figures,
            "group_subtasks": self.evaluation.group_members,
            "n-samples": counts,
            "config": {
                "model": self._model,
                "model_args": given,
                "model_sha": given.get("revision"),
                **self._settings,
                "fewshot_seed": seams.DEFAULT_OTHER_SEED,
                "limit": None,
            },
            "model_name": name,
            "system_instruction": None,
            "chat_template_sha": self._template,
            "fewshot_as_multiturn": bool(self.evaluation.chat),
            "race": race,
        }

    def _read(self) -> None:
        """Read the blocks of an earlier run; what it did not finish is cut off."""
        try:
            self._check_links()
            remove_parts(self._folder)
            remove_parts(self._states(0).parent)
            if self._file.exists():
                results = self._kept_results()
                race = results["race"]
                self._results = dict(results)
                self._earlier = results["config"]["model_args"]
                self._sizes = race["bytes"]
                self._weights = race["weights"]
                self._manifest = race["manifest"]
                self.as_base = race.get("as_base", False)
                self.seconds = race["seconds"]
            self._cut_off_unfinished()
            if self._sizes:
                self._read_answers()
        except (OSError, *WRONG_CONTENT) as error:
            raise self._changed(error) from error

    def _cut_off_unfinished(self) -> None:
        """Remove what a killed run wrote after the last block; ValueError if a file lacks something."""
        sizes = dict[Path, int]()
        for task, size in self._sizes.items():
            if task not in self.evaluation.tasks:
                raise ValueError(f"it has samples of {task}, which this race does not ask")
            sizes[self._place(task)] = size
        written = self._folder.glob(f"samples_*_{escape(self._date)}.jsonl")
        for place in {*sizes, *written}:
            size = sizes.get(place, 0)
            if place.stat().st_size < size:
                raise ValueError(f"{place.name} is shorter than the race left it")
            if size:
                os.truncate(place, size)
            else:
                place.unlink()

    def _read_answers(self) -> None:
        """Read the answers in the files of samples; ValueError for those of another race."""
        texts = {task: self._place(task).read_text("utf-8") for task in self._sizes}
        self._template = self._results["chat_template_sha"]
        self._answers = self._scores(texts, self._results["configs"])
        self._check_blocks()
        expected = self._results["race"]["questions"]
        if self._count != expected:
            questions = counted(self._count, "question")
            raise ValueError(f"it has answers to {questions} instead of {expected}")
        if self.evaluation.recorded and "identity" not in self._manifest:
            raise ValueError("its manifest lacks `identity`")

    def _kept_results(self) -> RaceResults:
        """The results in the folder; ValueError for damaged ones."""
        try:
            return race_results(self._file, RaceResults)
        except UsageError as error:
            raise ValueError(str(error)) from error

    def _check_blocks(self) -> None:
        """Raise ValueError for a first block whose probabilities are not numbers."""
        for block in self.evaluation.blocks[self.label].values():
            numbers = [block.get("probability", 0.0), *block.get("tokens", ())]
            if not all(isinstance(number, int | float) for number in numbers):
                raise ValueError("a probability that the race added is not a number")

    def _check_links(self) -> None:
        """Raise ValueError for a link in the folder, through which writing would go elsewhere."""
        inside = self._folder.iterdir() if self._folder.is_dir() else ()
        for place in (self._folder, *inside):
            if place.is_symlink():
                raise ValueError(f"{place.name} is a link")

    def _changed(self, error: Exception) -> DispersionError:
        return not_as_left(
            self._folder,
            error,
            "remove the folder, then run the same command to ask the checkpoint again",
        )

    def _unwritten(self, error: Exception) -> DispersionError:
        why = getattr(error, "strerror", None) or error
        return DispersionError(
            f"could not write to {self._folder}: {why}; check its disk and its permissions, then run the "
            "same command to go on"
        )
