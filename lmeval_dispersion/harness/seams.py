"""The seams to lm-eval: every workaround is here, and nowhere else.

lm-eval has no public interface for twelve things that a dispersion task or a race needs. Each is
done here, once:

===================================  ==================================================  ==================
a task needs                         what is done                                        upstream
===================================  ==================================================  ==================
a request type of its own            :func:`add_request_types`: methods on lm-eval's     issue 2871
                                     model for transformers
the tokens of a running batch        :func:`shadowed`: functions over one model's        issue 2871
                                     methods for a while
what the running evaluation knows,   :func:`running_evaluation`: the stack frames of     issue 1119
and its end                          the callers; ``dump_config``, asked for after the
                                     task's metrics, saves the run
a document's score with its          :class:`TaskBase`: a base class for each            none
requests and filter                  generation of lm-eval, 0.4 and 0.5
a group's figure over all documents  :func:`pool_groups`: lm-eval's group computes it    issue 823,
                                     from floats that know their documents; with         pull request 2198
                                     ``average_over: members``, a mean of its members
tasks from two folders               :func:`more_tasks`: lm-eval's task manager with     pull request 4015
                                     one more folder
a word before weights are loaded,    :func:`before_weights`, in our own command alone;   none
and a refusal in one sentence        :func:`one_sentence`
a table without rows of NaN          :func:`folded_tables`, in our own command alone     none
weights that a model's files lack    :func:`refused_loads`: the reports of transformers  none
                                     and PEFT, by public names alone
a task's requests, asked of many     :func:`loaded_tasks`, :func:`built_requests`,       none
models, one in training too          :func:`right_choices`, :func:`loaded_lm`,
                                     :func:`live_lm`, :func:`settle_batch`
one figure of a suite                :func:`task_groups`: its groups' own settings       none
tens of thousands of them at once    :func:`compile_templates_once`: a cache in its      done in 0.5
                                     environment of templates
some documents evaluated, by one     :func:`evaluated`: lm-eval's ``evaluate`` over      none
model after the other                requests that are built once
===================================  ==================================================  ==================

The rest of the harness does not ask which lm-eval is installed.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import disable_progress_bars
from lm_eval import utils
from lm_eval.api import registry
from lm_eval.api.group import Group
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.defaults import DEFAULT_OTHER_SEED as DEFAULT_OTHER_SEED
from lm_eval.defaults import DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.models.api_models import TemplateAPI as TemplateAPI
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import handle_arg_string, handle_non_serializable, sanitize_list
from transformers.utils.logging import disable_progress_bar

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError, require_extra
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.adapters import check_beside, downloaded
from lmeval_dispersion.harness.failures import near_tasks, sentences
from lmeval_dispersion.model.load_report import watched_loads
from lmeval_dispersion.model_args import key_values
from lmeval_dispersion.store.groups import TaskGroup
from lmeval_dispersion.store.identity import SUFFIX

Parts = tuple[Any, ...]

# Keys of --model_args whose values stay text, such as a branch 1000.
_NAMES = ("pretrained", "revision", "model", "peft", "delta", "tokenizer", "subfolder", "gguf_file")
# lm-eval's metrics over all documents together, which a single document does not have.
_POOLED = (
    "perplexity",
    "weighted_perplexity",
    "bits_per_byte",
    "f1",
    "matthews_corrcoef",
    "bleu",
    "chrf",
    "chrf++",
    "ter",
    "brier_score",
)
# Arguments of `simple_evaluate` that tasks ask for, as given.
_GIVEN = ("model_args", "limit", "tasks", "predict_only", "apply_chat_template", "use_cache")
_LONGEST = 16  # texts whose tokens are counted to find the longest
_LETTERS = 4  # per token, about


@dataclass(frozen=True)
class RunningEvaluation:
    """What is known about the running lm-eval evaluation, which lm-eval does not pass to its tasks.

    Unknown values are None, so no metric may depend on them.

    Attributes:
        lm: The model under evaluation, without the wrapper of ``--use_cache``.
        groups: lm-eval's groups by name.
        tracker: lm-eval's EvaluationTracker, which has the ``--output_path``.
        model_args: The ``--model_args``, as given: text or a mapping.
        limit: The ``--limit``, as given.
        fewshot_seed: The seed with which examples are drawn.
        tasks: The tasks to evaluate, as given; names as a rule.
        predict_only: Whether answers are generated and not scored, as given.
        apply_chat_template: Whether prompts are in a chat template, or its name, as given.
        use_cache: The ``--use_cache``, as given.
        metrics: Results of the task that has just been scored, by lm-eval's key, such as
            ``acc,none``.
        command_line: Whether the command ``lm_eval`` runs the evaluation.
        ours: Whether the command ``dispersion`` runs the evaluation.
    """

    lm: Any = None
    groups: dict[str, Any] | None = None
    tracker: Any = None
    model_args: Any = None
    limit: Any = None
    fewshot_seed: Any = None
    tasks: Any = None
    predict_only: Any = None
    apply_chat_template: Any = None
    use_cache: Any = None
    metrics: Any = None
    command_line: bool = False
    ours: bool = False

    def category(self, task: str) -> str | None:
        """Return the alias, or else the name, of the group that directly contains ``task``.

        Return None if the task is in no group.
        """
        for name, group in (self.groups or {}).items():
            if any(getattr(child, "task_name", None) == task for child in group):
                return str(getattr(group, "alias", None) or name)
        return None

    def output_folder(self) -> Path | None:
        """Return the folder to which lm-eval will write the model's results; None if unknown."""
        output = getattr(self.tracker, "output_path", None)
        if not output:
            return None
        path = Path(str(output))
        if path.suffix == ".json":
            return path.parent
        settings = getattr(self.tracker, "general_config_tracker", None)
        return path / (getattr(settings, "model_name_sanitized", None) or "")


def running_evaluation() -> RunningEvaluation:
    """Return what is known about the running evaluation.

    The values are read from the stack frames of lm-eval's ``evaluate`` and ``simple_evaluate``. If
    neither is among the callers, nothing is known: values are None or False.
    """
    known: dict[str, Any] = {}
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("lm_eval."):
            scope = frame.f_locals
            if module.startswith(("lm_eval._cli", "lm_eval.__main__")):
                known["command_line"] = True
            elif frame.f_code.co_name == "evaluate" and "lm" in scope and "lm" not in known:
                known["lm"] = getattr(scope["lm"], "lm", scope["lm"])
                known["groups"] = scope.get("groups")
                known["limit"] = scope.get("limit_arg", scope.get("limit"))
            elif frame.f_code.co_name == "_collect_results":
                known["metrics"] = scope.get("agg_metrics")
            elif frame.f_code.co_name == "simple_evaluate" and "tracker" not in known:
                known["tracker"] = scope.get("evaluation_tracker")
                known["fewshot_seed"] = scope.get("fewshot_random_seed")
                known |= {name: scope.get(name) for name in _GIVEN}
                if "lm" in scope:
                    known.setdefault("lm", getattr(scope["lm"], "lm", scope["lm"]))
        elif module == "lmeval_dispersion.cli":
            known["ours"] = True
        frame = frame.f_back  # type: ignore[assignment]
    return RunningEvaluation(**known)


def _requests_by_document(instances: Sequence[Any]) -> dict[int, list[Any]]:
    """Each document's requests in order."""
    of_document: dict[int, list[Any]] = defaultdict(list)
    for instance in sorted(instances, key=lambda instance: instance.idx):
        of_document[instance.doc_id].append(instance)
    return of_document


class _Task04(ConfigurableTask):  # type: ignore[misc]
    """0.4 scores a document in ``process_results``, which gets neither its requests nor the filter.

    Both follow from lm-eval's position in the task's ``doc_iterator``, requested once per filter.
    """

    # Documents of --samples, ascending; instances have their places in it.
    _selected: Sequence[int] = ()
    _filters_left: Iterator[str] = iter(())
    # The document's number, itself, and the filter.
    _place: tuple[int, Any, str | None] = (-1, None, None)

    @property
    def only_predicts(self) -> bool:
        """Whether ``--predict_only`` replaced the metrics, so that ours do not apply."""
        return "bypass" in self._metric_fn_list

    def document_index(self, doc_id: int) -> int:
        """Return the index in the task's split of the document that instances call ``doc_id``."""
        return self._selected[doc_id] if self._selected else doc_id

    def build_all_requests(self, **options: Any) -> None:
        """Build requests as lm-eval does, and remember which documents are selected."""
        self._selected = sorted(set(options.get("samples") or ()))
        super().build_all_requests(**options)

    def apply_filters(self) -> Any:
        """Apply the filters as lm-eval does, which then scores the documents filter by filter."""
        self._of_document = _requests_by_document(self._instances or [])
        self._filters_left = iter(filters_of(self))
        return super().apply_filters()

    def doc_iterator(self, **options: Any) -> Iterator[tuple[int, Any]]:
        """Yield the numbered documents as lm-eval does, through :meth:`placed`."""
        return self.placed(super().doc_iterator(**options))

    def placed(self, documents: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield numbered documents, and remember the current document and its filter."""
        filter_name = next(self._filters_left, None)
        for number, doc in documents:
            self._place = number, doc, filter_name
            yield number, doc

    def process_results(self, doc: Any, results: Sequence[Any]) -> Any:
        """Score a document as lm-eval does, and add the values of ``judged``."""
        metrics = super().process_results(doc, results)
        if self.only_predicts:
            return metrics
        number, scored_doc, filter_name = self._place
        if scored_doc is not doc or filter_name is None:
            raise HarnessError(
                f"{self.task_name}: lm-eval {version('lm_eval')} iterates over documents in an "
                "unsupported way; if this lm-eval is newer than 0.4.13, install lm-eval 0.4.13, "
                "otherwise run the stock task"
            )
        return {**metrics, **self.judged(self._of_document[number], results, metrics, filter_name)}

    def dump_config(self) -> dict[str, Any]:
        """Return lm-eval's configuration; errors of our standard errors are dropped from the results."""
        metrics = running_evaluation().metrics or {}
        for key in list(metrics):
            if "_stderr_stderr," in key:
                del metrics[key]
        return super().dump_config()  # type: ignore[no-any-return]


class _Task05(Task):  # type: ignore[misc]
    """0.5 has a class for each output type, whose scorers score a task's documents at once.

    Making a task gives a subclass that is also lm-eval's class of the output type.
    """

    def __new__(cls, config: Any = None, **_: Any) -> Any:
        """An object of lm-eval's class for the configuration's output type, with this class before it."""
        kind = Task._registry.get((config or {}).get("output_type"))
        if kind is not None and not issubclass(cls, kind):
            about = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            cls = type(cls.__name__, (cls, kind), about)
        return super().__new__(cls)

    @property
    def only_predicts(self) -> bool:
        return bool(self._has_metric("bypass"))

    def document_index(self, doc_id: int) -> int:
        return doc_id

    def process_instances(self) -> None:
        """Score the documents as lm-eval does, and add the values of ``judged`` to their scores."""
        super().process_instances()
        if self.only_predicts:
            return
        of_document = _requests_by_document(self._instances or [])
        for scorer in self._scorers:
            results = {}
            for doc_id, scored in scorer.raw_docs.items():
                instances = of_document[doc_id]
                answers = list[Any]()
                for instance in instances:
                    answers += instance.filtered_resps[scorer.name]
                ours = self.judged(instances, answers, scorer.reduced_docs[doc_id], scorer.name)
                scores = {name: [value] for name, value in ours.items()}
                results[doc_id] = replace(scored, scores={**scored.scores, **scores})
            scorer.set_results(results)

    def aggregate(self, bootstrap_iters: int | None = 100000) -> tuple[dict[str, Any], int]:
        """Aggregate scores as lm-eval does, but bootstrap no error of our metrics: they have their own."""
        if self.only_predicts:
            return super().aggregate(bootstrap_iters)  # type: ignore[no-any-return]
        functions = self.aggregation()
        documents = 0
        figures: dict[str, Any] = {}
        for scorer in self._scorers:
            theirs = dict[int, dict[str, Any]]()
            ours = dict[int, dict[str, Any]]()
            for doc_id, scores in scorer.reduced_docs.items():
                for name, value in scores.items():
                    part = ours if name in self.our_metrics else theirs
                    part.setdefault(doc_id, {})[name] = value
            for part, draws in ((theirs, bootstrap_iters), (ours, 0)):
                aggregated, count = scorer.aggregate(part, draws, functions)
                documents = max(documents, count)
                for key, value in aggregated.items():
                    if "_stderr_stderr," not in key:
                        figures[key] = value
        return figures, documents


if TYPE_CHECKING:
    TaskBase = _Task04
elif hasattr(Task, "process_instances"):
    TaskBase = _Task05
else:
    TaskBase = _Task04


def add_request_types(methods: Mapping[str, Callable[..., Any]], needed: Sequence[str]) -> None:
    """Add methods to lm-eval's transformers model (HFLM); they replace methods of the same name.

    Args:
        methods: The functions, by the name of the method.
        needed: Names of HFLM's methods that recording needs.

    Raises:
        HarnessError: This version of lm-eval is not supported: HFLM lacks a method in ``needed``,
            or the class of groups lacks a method.
    """
    wanted = [(HFLM, name) for name in needed]
    wanted += [(Group, "aggregate"), (Group, "get_all_tasks")]
    for kind, name in wanted:
        if not hasattr(kind, name):
            raise HarnessError(
                f"lm-eval {version('lm_eval')} has no {kind.__name__}.{name}, which dispersion tasks need; "
                "install lm-eval 0.4.13 or a newer lmeval-dispersion"
            )
    for name, method in methods.items():
        setattr(HFLM, name, method)


@contextmanager
def shadowed(lm: Any, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside this context, replace methods of one object by functions.

    ``replacements`` maps the name of a method to a function, which is called with the original
    method as its first argument. The methods are restored even after an error.
    """
    originals = {name: lm.__dict__[name] for name in replacements if name in lm.__dict__}
    try:
        for name, replacement in replacements.items():
            setattr(lm, name, partial(replacement, getattr(lm, name)))
        yield
    finally:
        for name in replacements:
            lm.__dict__.pop(name, None)
        lm.__dict__.update(originals)


def compile_templates_once() -> None:
    """Make lm-eval 0.4 compile a task's prompt template once, as 0.5 does, not for each document."""
    environment = getattr(utils, "env", None)
    if environment is not None and not hasattr(environment.from_string, "cache_info"):
        environment.from_string = lru_cache(maxsize=256)(environment.from_string)


def loaded_tasks(names: str, include_path: str | None = None) -> dict[str, Any]:
    """Load the tasks named in ``names``, and return them by name; see :func:`loaded_suite`.

    The name of a dispersion task gives lm-eval's stock task.

    Raises:
        UsageError: lm-eval has no such task.
        DispersionError: The tasks' data cannot be loaded.
    """
    return loaded_suite(names, include_path=include_path)[0]


def loaded_suite(
    names: str,
    num_fewshot: int | None = None,
    include_path: str | Sequence[str] | None = None,
    *,
    stock: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the lm-eval tasks named in ``names``, tasks or groups separated by commas.

    Returns the tasks and the groups, both by name; groups inside groups are included. Each task's
    ``category`` is set to the alias of its group, or else the group's name; None without a group.

    Args:
        names: The names, ``NAME,NAME``.
        num_fewshot: Number of examples, as in lm-eval: None keeps each task's own number, and a
            task that is configured with 0 keeps 0.
        include_path: One or more folders with more tasks.
        stock: Whether the name of a dispersion task gives lm-eval's stock task.

    Raises:
        UsageError: lm-eval has no such task.
        DispersionError: The tasks' data cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    disable_progress_bar()
    disable_progress_bars()
    compile_templates_once()
    ours = [] if install.status().state == "enabled" else [str(install.tasks_path())]
    theirs = [include_path] if isinstance(include_path, str) else include_path or ()
    manager = TaskManager(include_path=[*ours, *theirs])
    _seed()  # tasks such as gpqa shuffle choices as they are loaded
    wanted = [name.strip() for name in names.split(",")]
    if stock:
        wanted = [name.removesuffix(SUFFIX) for name in wanted]
    for name in wanted:
        if name in manager.all_tasks:
            continue
        plain = name.removesuffix(SUFFIX)
        if plain in manager.all_tasks:
            hint = f"; did you mean {plain}?"
        else:
            hint = near_tasks([name], manager.all_tasks)
            if not theirs:
                hint += " (for a task of your own, give its folder as include_path)"
        raise UsageError(f"lm-eval has no task {name!r}{hint}")
    with sentences():
        loaded = manager.load(wanted)
    groups = RunningEvaluation(groups=loaded["groups"])
    for task in loaded["tasks"].values():
        task.category = groups.category(task.task_name)
        own = task.config.num_fewshot
        if num_fewshot is not None and own != 0:  # a task configured without examples keeps none
            own = num_fewshot
        task.config.num_fewshot = own or 0
    return loaded["tasks"], loaded["groups"]


def task_groups(
    groups: Mapping[str, Any], judges: Mapping[str, str | None]
) -> dict[str, TaskGroup]:
    """Return the outermost groups for which lm-eval computes a figure, by name.

    Each group has the names of its tasks, and whether its mean weights the tasks by their numbers
    of documents. lm-eval computes a figure for a group that aggregates a metric which all its tasks
    have. A group without a figure, such as the Open LLM Leaderboard's ``leaderboard``, is replaced
    by its members. `store.groups` chooses the same groups from finished results.

    Args:
        groups: lm-eval's groups, by name.
        judges: For each task, the metric that scores it. If a group weights its tasks differently
            for different metrics, the weights for this metric are used.
    """
    inner = {id(child) for group in groups.values() for child in group}
    waiting = []
    for group in reversed(list(groups.values())):
        if id(group) not in inner:
            waiting.append(group)
    chosen = dict[str, TaskGroup]()
    taken = set[str]()
    while waiting:
        group = waiting.pop()
        figures = [each for each in group.aggregate_metric_list or () if _has_figure(group, each)]
        if not figures:
            waiting += filter(_is_group, reversed(list(group)))
            continue
        members = []
        scoring = set()
        for task in group.get_all_tasks():
            name = _name_of(task)
            if name not in taken:
                taken.add(name)
                members.append(name)
                scoring.add(judges.get(name))
        figures.sort(key=lambda figure: figure.metric not in scoring)
        chosen[group.name] = {"tasks": members, "by_size": figures[0].weight_by_size}
    return chosen


def groups_above(groups: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, by task name, the names of the groups that contain each task, smallest group first."""
    above = dict[str, list[str]]()
    for group in sorted(groups.values(), key=lambda group: len(group.get_all_tasks())):
        for task in group.get_all_tasks():
            above.setdefault(_name_of(task), []).append(group.name)
    return above


def group_entries(groups: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Return, by group name, each group's alias (or name) and the names of its members.

    Names are those in lm-eval's results.
    """
    entries = dict[str, tuple[str, list[str]]]()
    for name, group in groups.items():
        entries[name] = (str(group.alias or name), [_name_of(child) for child in group])
    return entries


def _is_group(child: Any) -> bool:
    return isinstance(child, Group)


def _has_figure(group: Any, figure: Any) -> bool:
    """Whether all tasks of a group have the metric and a filter of a ``figure`` that it aggregates."""
    listed = figure.filter_list
    for task in group.get_all_tasks():
        if figure.metric not in task.aggregation() and not _may_add_metrics(task):
            return False
        if listed is not None and not {*listed} & {*filters_of(task)}:
            return False
    return True


def _name_of(task: Any) -> str:
    """A task's, or a group's, name in lm-eval's results: 0.5 puts a group's before its tasks'."""
    name = getattr(task, "_qualified_name", None) or getattr(task, "task_name", None)
    return str(name or task.name)


def drawn_questions(
    tasks: Mapping[str, Any],
    count: int | None,
    seed: int,
    units: Mapping[str, Sequence[str]] | None = None,
) -> tuple[list[tuple[str, int]], int]:
    """Draw questions of some tasks at random; return them, and the number of all questions.

    A question is a pair of task name and document index. Questions are in random order.

    Args:
        tasks: lm-eval's tasks, by name.
        count: Number of questions to draw; None for all.
        seed: Seed of the draw.
        units: Tasks of each unit (a task, or a group with one figure), by name. With two or more
            units, equally many questions are drawn from each, or all that a unit has.

    Raises:
        UsageError: There are two or more units, and ``count`` is less than their number.
    """
    every = list[tuple[str, int]]()
    with sentences():  # a task may load its data here
        for name, task in tasks.items():
            every += [(name, i) for i in range(len(task.eval_docs))]
    order = np.random.default_rng(seed).permutation(len(every))
    if count is not None and units and len(units) > 1:
        if count < len(units):
            raise UsageError(
                f"expected at least {len(units)} questions, one for each of {', '.join(units)}, got "
                f"{count}; ask more questions, or set weigh to questions",
                argument="limit",
            )
        number = dict[str, int]()
        for k, members in enumerate(units.values()):
            number |= dict.fromkeys(members, k)
        unit = np.array([number[name] for name, _ in every])[order]
        shares = equal_shares(np.bincount(unit, minlength=len(units)).tolist(), count)
        first = [np.flatnonzero(unit == k)[:share] for k, share in enumerate(shares)]
        # In a random order again: shared questions are the first ones.
        order = np.random.default_rng([seed, 1]).permutation(order[np.concatenate(first)])
    return [every[i] for i in order[:count]], len(every)


def equal_shares(sizes: Sequence[int], count: int) -> list[int]:
    """Divide ``count`` into equal shares, none of them larger than its entry in ``sizes``.

    If there is a remainder, the first shares are one larger. Shares add up to ``count``, or to the
    sum of ``sizes`` if that is less.

    >>> equal_shares([100, 10, 100], 50), equal_shares([3, 3], 100)
    ([20, 10, 20], [3, 3])
    """
    shares = [0] * len(sizes)
    left = min(count, sum(sizes))
    while left:
        growing = [k for k, size in enumerate(sizes) if shares[k] < size]
        each = max(1, left // len(growing))
        for k in growing[:left]:
            more = min(each, sizes[k] - shares[k])
            shares[k] += more
            left -= more
    return shares


def build_requests(task: Any, **options: Any) -> None:
    """Build the requests of an lm-eval task, without lm-eval's progress bar.

    ``options`` are those of lm-eval's ``build_all_requests``.

    Raises:
        DispersionError: lm-eval fails for a common reason; see :func:`failures.sentences`.
    """
    with sentences(), redirect_stderr(StringIO()):
        task.build_all_requests(rank=0, world_size=1, **options)


def built_requests(task: Any, documents: Sequence[int], lm: Any = None) -> dict[int, list[Any]]:
    """Build the requests of some documents of a task, and return them by document index.

    With a model ``lm``, prompts are in the model's chat template.

    Raises:
        DispersionError: lm-eval fails for a common reason; see :func:`failures.sentences`.
    """
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    chosen = sorted(documents)
    # Examples as separate turns, lm_eval's default.
    options: dict[str, Any] = {"samples": chosen}
    if len(chosen) == len(task.eval_docs):
        options["samples"] = None  # a selection is searched once per document
    if lm:
        options["apply_chat_template"] = True
        options["fewshot_as_multiturn"] = True
        options["chat_template"] = getattr(lm, "apply_chat_template", None)
    build_requests(task, **options)
    requests = _requests_by_document(task.instances)
    if _is_later(task):
        return requests
    return {chosen[place]: of_document for place, of_document in requests.items()}


def _is_later(task: Any) -> bool:
    """Whether a task is 0.5's, which keeps documents' indices; 0.4 renumbers a selection's."""
    return hasattr(task, "process_instances")


class _Index(list[int]):
    """A selection for 0.5, whose log uses a document's index as a position in it."""

    def __getitem__(self, index: Any) -> Any:
        return index


def evaluated(
    lm: Any,
    tasks: Mapping[str, Any],
    requests: Mapping[str, Mapping[int, Sequence[Any]]],
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model on some documents of tasks; return lm-eval's results, with samples.

    Args:
        lm: lm-eval's model.
        tasks: lm-eval's tasks, by name.
        requests: For each task, the requests of each document, as :func:`built_requests` returns
            them. They are not changed.
        options: Further arguments of lm-eval's ``evaluate``.
    """
    samples: dict[str, list[int]] = {}
    with ExitStack() as stack:
        for name, of_document in requests.items():
            task = tasks[name]
            chosen = sorted(of_document)
            samples[name] = chosen
            numbers: Sequence[int] = range(len(chosen))
            if _is_later(task):
                samples[name] = _Index(chosen)
                numbers = chosen
            task._instances = []
            documents = []
            for number, i in zip(numbers, chosen, strict=True):
                task._instances += [_fresh(request, number) for request in of_document[i]]
                documents.append((number, of_document[i][0].doc))
            if isinstance(task, _Task04):
                task._selected = chosen
            replaced: dict[str, Callable[..., Any]] = {
                "build_all_requests": lambda original, **_: None,
                # lm-eval's own method would iterate over all documents of the split, in every block.
                "doc_iterator": partial(_documents, getattr(task, "placed", iter), documents),
            }
            stack.enter_context(shadowed(task, replaced))
        stack.enter_context(redirect_stderr(StringIO()))
        _seed()
        chosen_tasks = {"tasks": {name: tasks[name] for name in requests}, "groups": {}}
        return evaluate(lm, chosen_tasks, samples=samples, bootstrap_iters=0, **options)  # type: ignore[no-any-return]


def log_likelihoods(lm: Any, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """Ask lm-eval's model for the log-likelihood of each request, without progress bars.

    Returns, for each request, the log-likelihood in nats and whether greedy decoding would give the
    continuation.
    """
    with redirect_stderr(StringIO()):
        return list(lm.loglikelihood(list(requests))) if requests else []


def _seed() -> None:
    """Seed as lm-eval does."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


def _documents(
    placed: Callable[..., Any], documents: Sequence[Any], original: Any, **_: Any
) -> Any:
    return placed(documents)


def _fresh(request: Any, number: int) -> Any:
    """A request without answers, of the document with lm-eval's number."""
    fresh = copy(request)
    fresh.resps = []
    fresh.filtered_resps = {}
    fresh.doc_id = number
    return fresh


def logged_lines(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the samples in results of :func:`evaluated` as text, by task.

    Each text has the lines of the file that lm-eval writes with ``--log_samples``.
    """
    lines = {}
    for name, samples in results["samples"].items():
        lines[name] = "".join(map(logged_line, samples))
    return lines


def logged_line(sample: Mapping[str, Any]) -> str:
    """Return one of lm-eval's samples as a line of a ``--log_samples`` file, with its line end."""
    arguments = {}
    for i, parts in enumerate(sample["arguments"]):
        arguments[f"gen_args_{i}"] = {f"arg_{j}": part for j, part in enumerate(parts)}
    logged = {
        **sample,
        "resps": sanitize_list(sample["resps"]),
        "filtered_resps": sanitize_list(sample["filtered_resps"]),
        "arguments": arguments,
        "target": str(sample["target"]),
    }
    return json.dumps(logged, default=handle_non_serializable, ensure_ascii=False) + "\n"


def filters_of(task: Any) -> list[str]:
    """Return the names of a task's filters, which extract answers from a model's output."""
    filters = task._scorers if _is_later(task) else task._filters
    return [each.name for each in filters]


def metrics_of(task: Any) -> tuple[dict[str, bool], bool]:
    """Return which metrics of an lm-eval task score single documents, and whether more may come.

    The first value maps the name of each metric to True if it is defined for a single document,
    unless lower values are declared better. The second is true if the task may give further
    metrics, whose names are known only once an answer is scored.
    """
    pooled = [registry.get_aggregation(name) for name in _POOLED]
    better = task.higher_is_better()
    ours = getattr(task, "our_metrics", ())
    usable = {}
    for name, function in task.aggregation().items():
        if name not in ours:
            usable[name] = function not in pooled and better.get(name) is not False
    return usable, _is_later(task) or _may_add_metrics(task)


def _may_add_metrics(task: Any) -> bool:
    """Whether a function scores answers, which may give metrics of other names."""
    return any(callable(entry["metric"]) for entry in task.config.metric_list or ())


def settle_batch(lm: Any, requests: Iterable[Any], most: int) -> None:
    """Fix the batch size of lm-eval's transformers model if it is ``auto``, to at most ``most``.

    lm-eval itself would choose a batch size in each call. Here it is the size at which the longest
    of ``requests`` fits into memory, with room for the answer to be generated.
    """
    if getattr(lm, "batch_size_per_gpu", None) != "auto" or not hasattr(lm, "_detect_batch_size"):
        return
    texts: dict[str, int] = {}  # text -> number of tokens that may follow
    for request in requests:
        text = ""
        following = 0
        for part in request.args:
            if isinstance(part, str):
                text += part
            elif isinstance(part, dict):
                following = part.get("max_gen_toks", lm.max_gen_toks)
        texts[text] = following
    longest = sorted(texts, key=lambda text: len(text) + _LETTERS * texts[text])[-_LONGEST:]
    tokens = max(len(lm.tok_encode(text)) + texts[text] for text in longest)
    lm.max_batch_size = min(lm.max_batch_size, most)
    lm.batch_size_per_gpu = lm._detect_batch_size([(None, [0] * min(tokens, lm.max_length), [0])])


def halve_batch(lm: Any) -> bool:
    """Halve the batch size of lm-eval's transformers model for later calls.

    Returns whether the size was halved: 1, or a size that is not a number, is left as it is.
    """
    size = getattr(lm, "batch_size_per_gpu", 1)
    if not isinstance(size, int) or size < 2:
        return False
    lm.batch_size_per_gpu = size // 2
    return True


def free_memory() -> None:
    """Free the memory of deleted models, on the CPU and the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def judges_by_own_rule(task: Any) -> bool:
    """Whether a multiple-choice task scores its answers with a function of its own.

    Only that function knows which choices are right: the task's target may be any choice, and for
    truthfulqa_mc2 it is always the first.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return False
    if getattr(task.config, "process_results", None) is not None:
        return True
    ours_and_theirs = ("lm_eval.api.", "lmeval_dispersion.")
    for kind in type(task).__mro__:
        if "process_results" in vars(kind) and not kind.__module__.startswith(ours_and_theirs):
            return True
    return False


def right_choices(task: Any, request: Any, count: int) -> tuple[int, ...]:
    """Return the indices of a document's right choices; empty if they are not known.

    Args:
        task: The lm-eval task of the document.
        request: The first request of the document.
        count: Number of choices; indices of ``count`` or more are left out.
    """
    if judges_by_own_rule(task):
        return ()
    doc = request.doc
    if hasattr(request, "target"):
        target = request.target
    elif task.multiple_input:  # 0.4
        target = task.doc_to_text(doc)
    else:
        target = task.doc_to_target(doc)
    if isinstance(target, str):
        choices = task.doc_to_choice(doc)
        target = choices.index(target) if target in choices else target
    places = target if isinstance(target, list) else [target]
    return tuple(place for place in places if isinstance(place, int) and 0 <= place < count)


@contextmanager
def more_tasks(folder: Path | None) -> Iterator[None]:
    """Inside this context, let lm-eval find the tasks in ``folder`` too; None adds nothing.

    lm-eval accepts only one ``--include_path``, which remains the user's.
    """
    from lm_eval.tasks import TaskManager

    original = TaskManager.__init__

    def with_ours(
        self: Any, verbosity: Any = None, include_path: Any = None, **options: Any
    ) -> None:
        given = include_path if isinstance(include_path, list | tuple) else [include_path]
        original(self, verbosity, [folder, *(path for path in given if path)], **options)

    try:
        if folder is not None:
            TaskManager.__init__ = with_ours
        yield
    finally:
        TaskManager.__init__ = original


@contextmanager
def before_weights(check: Callable[[Any, RunningEvaluation], None]) -> Iterator[None]:
    """Inside this context, call ``check`` before lm-eval loads the weights of a model.

    ``check`` is called with the class of the model and, for lm-eval's transformers model, again
    with the model once its tokenizer is loaded. Its second argument is the running evaluation. An
    error that ``check`` raises stops the loading.
    """
    get_model = registry.get_model
    tokenizer = HFLM._create_tokenizer

    def checked_class(name: str) -> Any:
        try:
            kind = get_model(name)
        except ModuleNotFoundError:  # vllm's, say: a refusal comes before the way to install it
            check(type(name, (), {}), running_evaluation())
            raise
        check(kind, running_evaluation())
        return kind

    def checked_model(self: Any, *args: Any, **options: Any) -> None:
        tokenizer(self, *args, **options)
        check(self, running_evaluation())

    try:
        registry.get_model = checked_class
        HFLM._create_tokenizer = checked_model
        yield
    finally:
        registry.get_model = get_model
        HFLM._create_tokenizer = tokenizer


def backend(name: str) -> type:
    """Return lm-eval's class for the name of a ``--model``, such as ``hf``.

    Raises:
        UsageError: lm-eval has no model of that name.
    """
    try:
        return registry.get_model(name)  # type: ignore[no-any-return]
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"expected the name of a model that `lm_eval run --help` lists, such as hf, got {name!r}",
            argument="model",
        ) from error


def backend_arguments(model_args: str | Mapping[str, Any]) -> dict[str, Any]:
    """Parse ``--model_args``, a text ``K=V,K=V`` or a mapping.

    Values are converted as lm-eval converts them, but names, such as ``revision``, remain text.

    Raises:
        UsageError: The text is not of the form ``K=V,K=V``.
    """
    given = key_values(model_args) if isinstance(model_args, str) else model_args
    parsed = dict[str, Any](given)
    for key, value in given.items():
        if isinstance(value, str) and key not in _NAMES:
            parsed[key] = handle_arg_string(value)
    return parsed


def loaded_lm(
    name: str, arguments: Mapping[str, Any], check: Callable[[Any], None], **settings: Any
) -> Any:
    """Load a model as lm-eval does, and return lm-eval's object for it.

    Args:
        name: lm-eval's name of the backend, such as ``hf``.
        arguments: The ``--model_args``, parsed.
        check: Called with lm-eval's transformers model before its weights are loaded; other
            backends are not checked. An error that it raises stops the loading.
        settings: Further settings for lm-eval's model, such as ``device`` or ``batch_size``.

    Raises:
        UsageError: lm-eval has no such backend.
        HarnessError: The backend cannot load the adapter, or the files lack weights.
        MissingExtraError: A library for adapters is not installed.
        DispersionError: A tensor in the files does not have the shape that the model needs.
    """
    disable_progress_bar()
    kind = backend(name)
    arguments = downloaded(arguments)
    adapter = "peft" in arguments
    if adapter:
        require_extra("models", "loading an adapter")
        if not issubclass(kind, HFLM):
            raise HarnessError(
                f"the model {name} does not load adapters; use hf or vllm, or merge the adapter into its "
                "base (merge_and_unload, save_pretrained)"
            )
    if not issubclass(kind, TemplateAPI):
        check_beside(arguments, transformers_loads=issubclass(kind, HFLM))
    if settings.get("device") is None and issubclass(kind, HFLM) and not torch.cuda.is_available():
        settings["device"] = "cpu"  # lm-eval's default is a GPU
    with (
        before_weights(lambda lm, _: check(lm)),
        refused_loads(adapter=adapter),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
        return kind.create_from_arg_obj({**arguments}, settings)  # type: ignore[attr-defined]


def live_lm(model: Any, tokenizer: Any, **settings: Any) -> Any:
    """Wrap a model in memory as lm-eval's transformers model, without a change to its weights.

    lm-eval adds a padding token to a tokenizer without one, so pass a copy of the tokenizer. The
    caller decides whether the model is in training or evaluation mode. ``settings`` are further
    arguments of lm-eval's ``HFLM``.
    """
    log = logging.getLogger("lm_eval.models.huggingface")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every model that is not a name
    try:
        with shadowed(model, {"tie_weights": lambda original, *_, **__: None}):
            return HFLM(pretrained=model, tokenizer=tokenizer, **settings)
    finally:
        log.setLevel(level)


@contextmanager
def folded_tables(metrics: Sequence[str]) -> Iterator[None]:
    """Inside this context, leave the NaN rows of ``metrics`` out of lm-eval's tables.

    A line below the table gives the number of rows left out. A subject with one right answer, for
    example, has no dispersion of right answers.
    """
    original = utils.make_table

    def folded(results: Mapping[str, Any], column: str = "results", **options: Any) -> str:
        left_out = 0
        kept: dict[str, dict[str, Any]] = {}
        for name, figures in results[column].items():
            kept[name] = dict(figures)
            for key, value in figures.items():
                is_ours = key.partition(",")[0] in metrics
                if is_ours and isinstance(value, float) and math.isnan(value):
                    del kept[name][key]
                    left_out += 1
        text: str = original({**results, column: kept}, column, **options)
        if left_out:
            rows = "1 row is not shown: it is"
            if left_out > 1:
                rows = f"{left_out} rows are not shown: they are"
            text += (
                f"{rows} NaN, since a dispersion needs at least two documents (that of right or "
                "wrong answers: two of these).\n"
            )
        return text

    try:
        utils.make_table = folded
        yield
    finally:
        utils.make_table = original


@contextmanager
def refused_loads(*, adapter: bool) -> Iterator[None]:
    """Inside this context, watch which models are loaded, and refuse one whose files lack weights.

    With ``adapter``, adapters are checked too. The error is raised when the context ends.

    Raises:
        HarnessError: The files of a model or adapter lack weights.
    """
    # Not sooner: PEFT has changed the base by then, and it stays whole.
    sentences: list[str] = []
    with watched_loads(lambda _, sentence: sentences.append(sentence), adapter=adapter):
        yield
    if sentences:
        raise HarnessError(sentences[0])


@contextmanager
def one_sentence() -> Iterator[None]:
    """Inside this context, turn a DispersionError into an exit of ``lm_eval`` with its message.

    If the evaluation was not started by the command ``lm_eval``, the error is raised unchanged.
    """
    try:
        yield
    except DispersionError as error:
        evaluation = running_evaluation()
        if evaluation.ours or not evaluation.command_line:
            raise
        raise SystemExit(f"lm_eval: {error}") from error


class Pooled(float):
    """A figure of a task that remembers how it was computed, so that groups can pool documents.

    When pickled, the figure becomes a plain float.

    Attributes:
        parts: The records of the documents from which the figure was computed.
        measure: The function that computes the figure from records.
    """

    parts: Parts
    measure: Callable[[Parts], float]

    @classmethod
    def of(cls, parts: Parts, measure: Callable[[Parts], float]) -> Pooled:
        """Return ``measure(parts)`` as a float that remembers ``parts`` and ``measure``."""
        figure = cls(measure(parts))
        figure.parts = parts
        figure.measure = measure
        return figure

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


def pool_groups() -> None:
    """Make lm-eval compute the dispersion of a group over all its documents, not as a mean of tasks.

    Groups whose metadata have ``average_over: members`` get the mean of their members instead.
    """
    original = Group.aggregate
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def aggregate(self: Any, task_metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        # Without our errors, for which lm-eval would divide by zero if tasks have one document.
        others = dict[str, dict[str, Any]]()
        for name, metrics in task_metrics.items():
            others[name] = dict(metrics)
            for key, value in metrics.items():
                if "_stderr" in key and isinstance(value, Pooled):
                    del others[name][key]
        combined: dict[str, Any] = original(self, others)
        names = [_name_of(task) for task in self.get_all_tasks()]
        for key in combined:
            parts: Parts = ()
            measure = None
            for name in names:
                figure = task_metrics.get(name, {}).get(key)
                if isinstance(figure, Pooled):
                    parts += figure.parts
                    measure = measure or figure.measure
            if measure:
                combined[key] = measure(parts)
        if (self.metadata or {}).get("average_over") == "members":
            combined |= _means_over_members(self, combined, task_metrics)
        return combined

    Group.aggregate = aggregate


def _means_over_members(
    group: Any, combined: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A group's figures as plain means over its members, of which each counts once, also a group.

    lm-eval's own mean is over the tasks of all groups within: MMLU's 57 would outweigh nine
    benchmarks. NaN where a member has no such figure; the error is that of a mean of independent
    figures.
    """
    members = [metrics.get(_name_of(child), {}) for child in group]
    means: dict[str, Any] = {}
    for entry in group.aggregate_metric_list or ():
        for key in combined:
            if not key.startswith(f"{entry.metric},"):
                continue
            error = key.replace(",", "_stderr,", 1)
            values = [member.get(key, math.nan) for member in members]
            errors: list[Any] = [member.get(error) for member in members]
            means[key] = sum(values) / len(values)
            if error in combined and all(isinstance(value, float) for value in errors):
                means[error] = math.hypot(*errors) / len(errors)
            else:
                means[error] = "N/A"
    return means
