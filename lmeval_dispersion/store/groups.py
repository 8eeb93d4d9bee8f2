"""lm-eval's groups of tasks: which tasks a group's score is the mean of, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.logs.files import number_of
from lmeval_dispersion.logs.results import section


class TaskGroup(TypedDict):
    """The tasks for which lm-eval gives one joint score.

    Attributes:
        tasks: Names of the tasks.
        by_size: Whether each task is weighted by its number of documents; if not, all tasks have
            the same weight.
    """

    tasks: list[str]
    by_size: bool


def groups_of(results: Mapping[str, Any], name: Callable[[str], str] = str) -> dict[str, TaskGroup]:
    """Return the outermost groups that have a score in lm-eval's results, by name.

    A group has a score if its tasks have a metric in common. A group without one, such as the Open
    LLM Leaderboard's ``leaderboard``, is replaced by the groups in it. lm-eval does not log the
    weights of the tasks. So the group's score is compared with two means over its tasks: weights by
    size, lm-eval's default, are assumed unless the mean with equal weights is closer.

    Args:
        results: Content of lm-eval's results file.
        name: Function that returns the name to use for a task; by default the task's own.
    """
    children = dict[str, list[str]]()
    for group, members in section(results, "group_subtasks").items():
        # lm-eval before 0.4.3 lists tasks, too, without members.
        if not isinstance(members, list) or not members:
            continue
        children[group] = []
        for member in members:
            if isinstance(member, str):
                children[group].append(member)
    reported = section(results, "results")
    figures = {task: _numbers(section(reported, task)) for task in reported}
    counts = section(results, "n-samples")
    sizes = dict[str, int]()
    for task in counts:
        size = section(counts, task).get("effective")
        if isinstance(size, int):
            sizes[task] = size
    inner = set().union(*children.values())
    outermost = [group for group in children if group not in inner]
    common = _common_metrics(outermost, children, figures)
    groups = dict[str, TaskGroup]()
    taken = set[str]()
    for group in _below(outermost, children, stop=lambda each: each in common):
        if group not in common:
            continue
        tasks = list[str]()
        for task in _below(children[group], children):
            if task not in children and task not in taken:
                tasks.append(task)
        taken.update(tasks)
        groups[group] = {
            "tasks": [name(task) for task in tasks],
            "by_size": _weighs_by_size(figures[group], tasks, figures, sizes),
        }
    return groups


def units_of(tasks: Iterable[str], groups: Mapping[str, TaskGroup]) -> dict[str, list[str]]:
    """Return the units of a mean over ``tasks``: name of the unit -> its tasks.

    A unit is a group, or a task that is in no group. All units have equal weight in the mean.

    >>> units_of(["a1", "a2", "b"], {"a": {"tasks": ["a1", "a2"], "by_size": True}})
    {'a': ['a1', 'a2'], 'b': ['b']}
    """
    group_of = dict[str, str]()
    for name, group in groups.items():
        group_of |= dict.fromkeys(group["tasks"], name)
    units = dict[str, list[str]]()
    for task in dict.fromkeys(tasks):
        unit = group_of.get(task, task)
        units.setdefault(unit, []).append(task)
    return units


def question_weights(
    tasks: Sequence[str], groups: Mapping[str, TaskGroup]
) -> NDArray[np.float64] | None:
    """Return the weights of :func:`document_weights`, scaled to a mean of 1; None if all are equal.

    Args:
        tasks: Task of each of the n documents.
        groups: Name of a group -> its tasks, and how they are weighted.

    Returns:
        Shape (n,), float64.
    """
    weights = document_weights(tasks, groups) * len(tasks)
    if np.allclose(weights, 1.0, rtol=0, atol=1e-9):
        return None
    return weights


def mean_score(
    tasks: Sequence[str], scores: NDArray[np.float64], groups: Mapping[str, TaskGroup]
) -> float:
    """Return the mean score over tasks and groups, where a group counts as one task.

    Args:
        tasks: Task of each document.
        scores: Score of each document; NaN where it is unknown. Shape (n,).
        groups: Name of a group -> its tasks, and how they are weighted.

    Returns:
        The mean over the tasks and groups with a known score; NaN if no score is known. Documents
        without a score are left out.
    """
    known = np.flatnonzero(~np.isnan(scores))
    if not len(known):
        return math.nan
    tasks_of_known = [tasks[row] for row in known.tolist()]
    weights = document_weights(tasks_of_known, groups)
    return float(weights @ scores[known])


def document_weights(tasks: Sequence[str], groups: Mapping[str, TaskGroup]) -> NDArray[np.float64]:
    """Return the weight of each document in a mean over tasks, where a group counts as one task.

    The weights sum to 1. The tasks of a group have equal weights, or weights by their numbers of
    documents (see :class:`TaskGroup`).

    Args:
        tasks: Task of each of the n documents.
        groups: Name of a group -> its tasks, and how they are weighted.

    Returns:
        Shape (n,), float64.

    >>> document_weights(["a", "a", "b"], {}).tolist()
    [0.25, 0.25, 0.5]
    """
    texts = np.array([str(task) for task in tasks])
    names, place, sizes = np.unique(texts, return_inverse=True, return_counts=True)
    position = {name: i for i, name in enumerate(names.tolist())}
    share = np.zeros(len(names))
    alone = set(position)
    units = 0
    for group in groups.values():
        members = [position[task] for task in group["tasks"] if task in alone]
        alone -= set(group["tasks"])
        if not members:
            continue
        units += 1
        weights = sizes[members] if group["by_size"] else np.ones(len(members))
        share[members] = weights / weights.sum()
    for task in alone:
        units += 1
        share[position[task]] = 1.0
    return np.asarray(share[place] / sizes[place] / max(units, 1))


def _below(
    names: Sequence[str],
    children: Mapping[str, Sequence[str]],
    stop: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    """The names and those below them, each once, in lm-eval's order; none below one where ``stop`` holds."""
    reached = dict[str, None]()
    waiting = list(reversed(names))
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached[name] = None
        if not stop(name):
            waiting += reversed(children.get(name, ()))
    return list(reached)


def _common_metrics(
    outermost: Sequence[str],
    children: Mapping[str, Sequence[str]],
    figures: Mapping[str, Mapping[str, float]],
) -> set[str]:
    """The groups with a figure by a metric that all their tasks with figures have."""
    shared = dict[str, set[str] | None]()  # None: no task below has a figure
    common = set[str]()
    for name in reversed(_below(outermost, children)):
        if name not in children:
            shared[name] = set(figures[name]) if figures.get(name) else None
            continue
        everywhere: set[str] | None = None
        for child in children[name]:
            metrics = shared.get(child)
            if metrics is None:
                continue
            everywhere = metrics if everywhere is None else everywhere & metrics
        shared[name] = everywhere
        own = set(figures.get(name, ()))
        if everywhere is not None:
            own &= everywhere
        if own:
            common.add(name)
    return common


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by ``METRIC,FILTER``, without their errors."""
    numbers = {}
    for key, value in figures.items():
        if "," in key and "_stderr" not in key and isinstance(value, int | float):
            numbers[key] = number_of(value)
    return numbers


def _weighs_by_size(
    group: Mapping[str, float],
    tasks: Sequence[str],
    figures: Mapping[str, Mapping[str, float]],
    sizes: Mapping[str, int],
) -> bool:
    """Whether a group's figure is the mean over its tasks' documents rather than over its tasks."""
    for key, figure in group.items():
        values = []
        weights = []
        for task in tasks:
            size = sizes.get(task, 0)
            if size > 0 and key in figures.get(task, {}):
                values.append(figures[task][key])
                weights.append(size)
        if len(values) < 2:
            continue
        weighted = float(np.average(values, weights=weights))
        plain = float(np.mean(values))
        if not math.isclose(weighted, plain, abs_tol=1e-9):
            return abs(figure - weighted) <= abs(figure - plain)
    return True
