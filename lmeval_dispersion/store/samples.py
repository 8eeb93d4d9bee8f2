"""The samples of a finished lm-eval run (``--log_samples``) on any backend: read, checked and scored.

No model, torch or lm-eval is needed. :func:`read_logged` returns the samples as a store without
vectors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmeval_dispersion.errors import HarnessError, listed_names, require_extra
from lmeval_dispersion.logs.judging import (
    JUDGES,
    NamedMetrics,
    chosen_metric,
    filter_with,
    numeric_metrics,
    unscored,
)
from lmeval_dispersion.logs.results import config_of, filter_names, section
from lmeval_dispersion.logs.runs import LoggedRun, find_run, is_log
from lmeval_dispersion.statistics import mcnemar_p
from lmeval_dispersion.store.documents import (
    Filters,
    Sample,
    kind_of_task,
    known_probabilities,
    read_samples,
)
from lmeval_dispersion.store.groups import TaskGroup, groups_of
from lmeval_dispersion.store.identity import SUFFIX, prompt_manifest
from lmeval_dispersion.store.reading import Store, places_of

_FILTERS_DIFFER = 0.01  # p below which two filters of one task differ by more than chance


@dataclass(frozen=True)
class JudgedTask:
    """The samples of one task, under the filter that scores them.

    Attributes:
        config: lm-eval's configuration of the task; without results, what the samples show of it.
        samples: Index of a document -> its sample, in ascending order of the indices.
        filter: Name of the filter.
        metric: Metric that decides which answers are right; None if the task has no such metric.
        correct_by: The same metric, as ``FILTER/METRIC`` if the task has several filters; None if
            ``metric`` is.
        prompts: The manifest's entries on the prompts, from
            :func:`~lmeval_dispersion.store.identity.prompt_manifest`.
        category: Alias of the group that holds the task; None if it is in no group.
        version: Version of the task; None if it is not known.
        notes: Clauses on the samples, such as missing or repeated documents, without a full stop.
        filters: Sentences on other filters under which significantly more or fewer answers are
            right.
        as_named: Whether the task has the metric that was named for all tasks; False as well if no
            metric was named for all, None if one was named for this task in particular.
    """

    config: Mapping[str, Any]
    samples: dict[int, Sample]
    filter: str
    metric: str | None
    correct_by: str | None
    prompts: dict[str, Any]
    category: str | None
    version: Any
    notes: list[str]
    filters: list[str]
    as_named: bool | None


def judged_task(
    run: LoggedRun,
    task: str,
    judge: str | None = None,
    *,
    allow_holes: bool = False,
    lenient: bool = False,
) -> JudgedTask:
    """Return the samples of one task of a run, checked against the run's results, and scored.

    Args:
        run: The run.
        task: Name of the task.
        judge: Text of ``--metric``: ``[TASK=][FILTER/]METRIC``, or several of these separated by
            commas. None for the first known metric.
        allow_holes: Whether documents that the results count may be missing.
        lenient: Whether a task that lacks the metric named for all tasks is scored by the first
            known one.

    Raises:
        HarnessError: The task has no such metric, or its samples are damaged or incomplete.
    """
    results = run.results_of(task)
    file = run.samples[task]
    config = config_of(results, task)
    filters, repeated = read_samples(file, config, filter_names(results, task))
    notes = _holes(file, filters, section(section(results, "n-samples"), task), allow_holes)
    notes += section(results, "inspect").get("notes", [])
    if repeated:
        lines = "1 line repeats" if repeated == 1 else f"{repeated} lines repeat"
        verb = "is" if repeated == 1 else "are"
        notes.append(
            f"{lines} an earlier line, as happens if several processes write the samples, and "
            f"{verb} not counted"
        )
    numeric = {}
    for name, documents in filters.items():
        numeric[name] = numeric_metrics(sample.metrics for sample in documents.values())
    named = NamedMetrics.of(judge)
    names = names_of(run, task)
    judge = named.judge(*names)
    has_own = named.has_own(*names)
    has_named = judge is not None and filter_with(numeric, judge) is not None
    is_needed = has_named or not lenient or has_own
    chosen, metric = chosen_metric(task, numeric, judge if is_needed else None)
    samples: dict[int, Sample] = {}
    for doc_id, sample in sorted(known_probabilities(filters[chosen]).items()):
        samples[doc_id] = replace(sample, correct=sample.score(metric))
    correct_by = metric
    if metric is not None and len(filters) > 1:
        correct_by = f"{chosen}/{metric}"
    apart: list[str] = []
    if metric is None:
        notes.append(unscored(numeric[chosen]))
    elif not judge:
        apart = _filters_apart(task, filters, chosen, metric)
    return JudgedTask(
        config=config or {"output_type": kind_of_task(next(iter(samples.values())).arguments)},
        samples=samples,
        filter=chosen,
        metric=metric,
        correct_by=correct_by,
        prompts=prompt_manifest(
            config,
            fewshot_seed=section(results, "config").get("fewshot_seed"),
            chat_template=results.get("chat_template_sha"),
            multiturn=bool(results.get("fewshot_as_multiturn")),
            system=results.get("system_instruction"),
        ),
        category=_category(results, task),
        version=section(results, "versions").get(task),
        notes=notes,
        filters=apart,
        as_named=None if has_own else has_named,
    )


def read_scores(file: str | Path, judge: str | None = None) -> tuple[str, dict[int, Sample]]:
    """Return the metric that scores a task, as ``FILTER/METRIC``, and the task's scored samples.

    The samples are a dictionary: index of the document -> its sample.

    Args:
        file: A file of samples, or the folder of a run of one task; results are not needed.
        judge: ``METRIC`` or ``FILTER/METRIC``; None for the task's first filter, and the first
            known metric that this filter has.

    Raises:
        HarnessError: The file does not exist, is damaged, has several tasks, or lacks the named
            metric (with None, any known metric).
    """
    path = Path(file).expanduser()
    if not path.exists():
        raise HarnessError(
            f"{path} does not exist; name a samples_TASK_DATE.jsonl file, which "
            "`lm_eval --log_samples` writes"
        )
    is_known = path.is_dir() or is_log(path)
    run = find_run(path) if is_known else LoggedRun(path, {}, {str(path): path})
    if len(run.samples) > 1:
        tasks = listed_names(sorted(run.samples))
        raise HarnessError(
            f"{path} holds {len(run.samples)} tasks ({tasks}); name the file of samples of one task"
        )
    return task_scores(run, next(iter(run.samples)), judge)


def task_scores(
    run: LoggedRun, task: str, judge: str | None = None
) -> tuple[str, dict[int, Sample]]:
    """Return the scoring metric and the scored samples of one task, like :func:`read_scores`.

    A score that lm-eval logged as NaN stays NaN; a document without a score is left out.

    Args:
        run: The run.
        task: Name of the task.
        judge: ``METRIC`` or ``FILTER/METRIC``; None for the task's first filter, and the first
            known metric that this filter has.

    Raises:
        HarnessError: The samples are damaged, or have no such metric.
    """
    judged = judged_task(run, task, judge, allow_holes=True)
    if judged.metric is None:
        raise HarnessError(
            f"expected a score for each document in {run.samples[task]}, but {judged.notes[-1]}"
        )
    scored = {}
    for i, sample in judged.samples.items():
        if sample.metrics.get(judged.metric) is not None:
            scored[i] = sample
    return f"{judged.filter}/{judged.metric}", scored


def stock_name(task: str) -> str:
    """Return the name of lm-eval's own (stock) task, for the name of a task in a run.

    ``_dispersion`` at the end is removed, and so are the groups that lm-eval 0.5 puts before the
    name.

    >>> stock_name("mmlu_stem::mmlu_anatomy"), stock_name("arc_easy_dispersion")
    ('mmlu_anatomy', 'arc_easy')
    """
    return task.rpartition("::")[2].removesuffix(SUFFIX)


def names_of(run: LoggedRun, task: str) -> list[str]:
    """Return the names by which ``--metric`` may refer to a task.

    These are the task's own name, its :func:`stock_name`, and the names of the groups that hold it,
    with and without ``_dispersion`` at the end.
    """
    holders = defaultdict[str, list[str]](list)
    for group, members in section(run.results_of(task), "group_subtasks").items():
        for member in members:
            holders[member].append(group)
    names = dict.fromkeys([task, stock_name(task)])
    above = [task]
    seen = {task}
    while above:
        for group in holders[above.pop(0)]:
            if group not in seen:
                seen.add(group)
                above.append(group)
                names |= {group: None, group.removesuffix(SUFFIX): None}
    return list(names)


def check_named(run: LoggedRun, tasks: Iterable[str], judge: str | None) -> None:
    """Check that every task or group that ``--metric`` names is one of the run's.

    Args:
        run: The run.
        tasks: Names of the run's tasks.
        judge: Text of ``--metric``; None if it was not given.

    Raises:
        UsageError: A named task or group is not in the run.
    """
    named = NamedMetrics.of(judge)
    if named.own:
        names = dict[str, None]()
        for task in tasks:
            names |= dict.fromkeys(names_of(run, task))
        named.check(list(names))


def is_logged(place: str | Path) -> bool:
    """Whether a path holds logs of lm-eval or Inspect, and no store."""
    path = Path(place).expanduser()
    if path.is_dir() and places_of(path):
        return False
    return is_log(path)


def read_logged(place: str | Path, judge: str | None = None) -> Store:
    """Return the samples of a run as a store without layers.

    The store calls each task by its :func:`stock_name`.

    Args:
        place: Folder of the run, or a file of its results or samples.
        judge: Text of ``--metric``: ``[TASK=][FILTER/]METRIC``, several separated by commas. A task
            without a metric named for it, or without the named one, is scored by the first known
            metric.

    Raises:
        UsageError: ``judge`` names a task or group that the run does not have.
        HarnessError: There are no samples, those of several runs, or damaged ones; or no task has
            the named metric.
        MissingExtraError: The extra ``audit`` or, for a log of Inspect, ``inspect`` is not
            installed.
    """
    require_extra("audit", "a run's samples")
    import pandas as pd

    run = find_run(place)
    tasks = _judged_tasks(run, judge)
    rows: list[dict[str, Any]] = []
    parts: list[tuple[Path, dict[str, Any]]] = []
    notes: list[str] = []
    filters: list[str] = []
    judges: dict[str, str | None] = {}
    versions: dict[str, Any] = {}
    for name, task in tasks.items():
        stock = stock_name(name)
        for doc_id, sample in task.samples.items():
            rows.append(_row(stock, doc_id, sample, task.category))
        notes += [f"{name}: {note}." for note in task.notes]
        if task.correct_by is not None and task.correct_by not in JUDGES[:2]:
            notes.append(f"{name}: answers are judged by {task.correct_by}.")
        filters += task.filters
        judges[stock] = task.correct_by
        versions[stock] = task.version
        manifest = {**_about(run, name), **task.prompts, "tasks": {stock: task.version}}
        parts.append((run.file, manifest))
    shared = dict(parts[0][1])
    for _, manifest in parts:
        for key in [*shared]:
            if manifest[key] != shared[key]:
                del shared[key]
    manifest = {
        **shared,
        "tasks": versions,
        "layers": [],
        "width": {},
        "default_layer": "",
        "notes": notes,
        "filters": filters,
        "judges": judges,
        "lower_is_better": _lower_is_better(run, tasks),
        "groups": _groups(run),
    }
    return Store(run.file, manifest, pd.DataFrame(rows), parts)


def _judged_tasks(run: LoggedRun, judge: str | None) -> dict[str, JudgedTask]:
    """All tasks of a run, by name; HarnessError if none has the metric that ``judge`` names for all."""
    check_named(run, run.samples, judge)
    lenient = len(run.samples) > 1
    tasks = {}
    for name in sorted(run.samples):
        tasks[name] = judged_task(run, name, judge, allow_holes=True, lenient=lenient)
    default = NamedMetrics.of(judge).default
    has_default = {task.as_named for task in tasks.values()} - {None}
    if default and has_default == {False}:
        raise HarnessError(
            f"expected the metric {default!r} in a task of {run.file}, got tasks without it; name "
            "another metric"
        )
    return tasks


def _about(run: LoggedRun, task: str) -> dict[str, Any]:
    config = section(run.results_of(task), "config")
    return {
        "model": run.model,
        "revision": config.get("model_sha"),
        "limit": config.get("limit"),
        "created": run.date,
        "by_inspect": run.by_inspect,
    }


def _lower_is_better(run: LoggedRun, tasks: Mapping[str, JudgedTask]) -> list[str]:
    """The stock tasks of which lower scores are the better ones, by the results."""
    names = []
    for name, task in tasks.items():
        better = section(section(run.results_of(name), "higher_is_better"), name)
        if task.metric is not None and better.get(task.metric) is False:
            names.append(stock_name(name))
    return names


def _groups(run: LoggedRun) -> dict[str, TaskGroup]:
    """lm-eval's groups in all of the run's results, the latest first."""
    groups = groups_of(run.results, stock_name)
    different = {id(results): results for results in run.apart.values()}
    for results in different.values():
        groups = {**groups_of(results, stock_name), **groups}
    return groups


def _row(task: str, doc_id: int, sample: Sample, category: str | None) -> dict[str, Any]:
    """A document as a row of a store."""
    return {
        **sample.columns,
        "doc_id": doc_id,
        "task": task,
        "subject": sample.columns["subject"] or task,
        "category": category,
        "correct": sample.correct,
        "query_perplexity": math.nan,
        "prompt_tokens": 0,
        "truncated": False,
        "text": None,
    }


def _filters_apart(task: str, filters: Filters, chosen: str, metric: str) -> list[str]:
    """A sentence for each filter whose right answers differ from the chosen one's by more than chance."""
    sentences = []
    for name, documents in filters.items():
        shared = sorted(documents.keys() & filters[chosen].keys())
        if name == chosen or not any(metric in documents[i].metrics for i in shared):
            continue
        of_chosen = filters[chosen]
        first = np.array([of_chosen[i].score(metric) for i in shared])
        other = np.array([documents[i].score(metric) for i in shared])
        if not np.isin([first, other], (0.0, 1.0)).all():
            continue
        gained = int((other > first).sum())
        lost = int((other < first).sum())
        if mcnemar_p(gained, lost) < _FILTERS_DIFFER:
            sentences.append(
                f"{task}: {100 * first.mean():.0f} % of the answers are right by the filter "
                f"{chosen}, "
                f"{100 * other.mean():.0f} % by {name}; `--metric {name}/{metric}` judges by the latter."
            )
    return sentences


def _holes(file: Path, filters: Filters, counts: Mapping[str, Any], allowed: bool) -> list[str]:
    """A note on documents that the results count and the file lacks; HarnessError if not ``allowed``.

    Also where one filter lacks a document that another has.
    """
    present = set().union(*filters.values())
    absent = set[int]()
    for documents in filters.values():
        absent |= present - documents.keys()
    is_uneven = bool(absent)
    expected = counts.get("effective")
    if not isinstance(expected, int):
        expected = len(present)
    if len(present) < expected:
        absent |= set(range(expected)) - present
    if not absent:
        return []
    names = listed_names([str(i) for i in sorted(absent)])
    if is_uneven or not allowed:
        way = "run lm-eval again"
        if not is_uneven:
            way += ", or continue with `--force` if they were left out on purpose"
        raise HarnessError(
            f"{file} lacks {len(absent)} of {max(expected, len(present))} documents "
            f"({names}); {way}"
        )
    return [f"the samples lack {len(absent)} of {expected} documents ({names})"]


def _category(results: Mapping[str, Any], task: str) -> str | None:
    """Alias of the group that directly holds the task, without the dashes of lm-eval's table."""
    for group, children in section(results, "group_subtasks").items():
        if task in children:
            alias = section(section(results, "results"), group).get("alias") or group
            return str(alias).lstrip(" -")
    return None
