"""Which metric scores a document: the parts of ``--metric``, and the defaults."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmeval_dispersion.errors import HarnessError, UsageError, listed_names
from lmeval_dispersion.logs.results import config_of, filter_names

# The metric that scores a document: the first of these that the task's first filter has.
# The last two are Inspect's.
JUDGES = (
    "acc",
    "exact_match",
    "prompt_level_strict_acc",
    "pass@1",
    "pass_at_1",
    "em",
    "acc_norm",
    "f1",
    "accuracy",
    "mean",
)

#: Metric -> whether any document has it as a number.
Numeric = Mapping[str, bool]


@dataclass(frozen=True)
class NamedMetrics:
    """The metrics that ``--metric`` names: ``[TASK=][FILTER/]METRIC``, several separated by commas.

    Attributes:
        default: ``[FILTER/]METRIC`` for all tasks without one of their own; None for the first
            known metric of each task.
        own: Task or group -> its own ``[FILTER/]METRIC``.
    """

    default: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str | None) -> NamedMetrics:
        """Parse the text of ``--metric``; None or an empty text names no metric.

        >>> NamedMetrics.of("acc, gsm8k=strict-match/exact_match")
        NamedMetrics(default='acc', own={'gsm8k': 'strict-match/exact_match'})

        Raises:
            UsageError: A part is empty, or one task (or all tasks) gets two different metrics.
        """
        if not text:
            return cls()
        own = dict[str | None, str]()
        for part in text.split(","):
            before, equals, after = part.partition("=")
            task = None
            judge = before.strip()
            if equals:
                task = judge
                judge = after.strip()
            if not judge or task == "":
                raise UsageError(
                    "expected [TASK=][FILTER/]METRIC, several separated by commas, such as "
                    f"acc,gsm8k=strict-match/exact_match, got {text!r}",
                    argument="metric",
                )
            known = own.setdefault(task, judge)
            if known != judge:
                tasks = task or "all tasks"
                step = "leave out one of them" if task else "name one for a task by TASK=METRIC"
                raise UsageError(
                    f"expected one metric for {tasks}, got {known} and {judge}; {step}",
                    argument="metric",
                )
        default = own.pop(None, None)
        return cls(default, {str(task): judge for task, judge in own.items()})

    def judge(self, *names: str) -> str | None:
        """Return the ``[FILTER/]METRIC`` that is named for a task; None if none is.

        ``names`` are the names of the task and of its groups. The first of them in ``own`` decides;
        if none is there, ``default`` is returned, which may be None.
        """
        for name in names:
            if name in self.own:
                return self.own[name]
        return self.default

    def has_own(self, *names: str) -> bool:
        """Whether ``own`` names a metric for one of the tasks or groups in ``names``."""
        return any(name in self.own for name in names)

    def check(self, names: Sequence[str]) -> None:
        """Check that metrics are named only for the tasks and groups in ``names``.

        Raises:
            UsageError: A metric is named for another task or group.
        """
        for name, judge in self.own.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3) or names
                raise UsageError(
                    f"expected TASK=METRIC for a task or group that is scored, got {name}={judge}; "
                    f"name one of these: {listed_names(near)}",
                    argument="metric",
                )


def split_judge(named: str | None) -> tuple[str | None, str | None]:
    """Split ``FILTER/METRIC`` or ``METRIC`` into filter and metric; a missing part is None."""
    chosen, _, metric = (named or "").rpartition("/")
    return chosen or None, metric or None


def check_judge(
    task: str, named: str | None, filters: Sequence[str], metrics: Iterable[str]
) -> None:
    """Check that a task has the filter and the metric that are named for it.

    Args:
        task: Name of the task, for the message.
        named: ``[FILTER/]METRIC``; None if nothing is named.
        filters: Names of the task's filters.
        metrics: Names of the task's metrics.

    Raises:
        HarnessError: The task lacks the filter or the metric.
    """
    chosen, metric = split_judge(named)
    metrics = list(metrics)
    has_filter = chosen is None or chosen in filters
    has_metric = metric is None or metric in metrics
    if not has_filter or not has_metric:
        raise _no_judge(task, named, filters, metrics)


def _no_judge(
    task: str, named: str | None, filters: Sequence[str], metrics: Sequence[str]
) -> HarnessError:
    names = list(metrics)
    if len(filters) > 1:
        names = [f"{name}/{metric}" for name in filters for metric in metrics]
    step = f"name one of {', '.join(names)}"
    if len(names) == 1:
        step = f"name {names[0]}"
    if not names:
        step = "the task has none, so run a task that scores each document"
    return HarnessError(f"expected a metric of {task}, got {named!r}; {step}")


def correctness(metrics: Mapping[str, Any], named: str | None) -> tuple[str | None, float]:
    """Return the name and the value of the metric that scores a document.

    They are None and NaN if the document lacks the metric, or has no number for it.

    Args:
        metrics: Name -> logged value of each metric of the document.
        named: Name of the metric; None for the first metric in `JUDGES` that is a number.
    """
    for name in (named,) if named else JUDGES:
        if name in metrics and isinstance(metrics[name], int | float):
            return name, float(metrics[name])
    return None, math.nan


def numeric_metrics(documents: Iterable[Mapping[str, Any]]) -> Numeric:
    """Return for each metric whether at least one document has a number for it.

    ``documents`` holds, for each document, the logged value of each metric by name.
    """
    numeric: dict[str, bool] = {}
    for metrics in documents:
        for name, value in metrics.items():
            numeric[name] = numeric.get(name, False) or isinstance(value, int | float)
    return numeric


def filter_with(filters: Mapping[str, Numeric], judge: str | None) -> str | None:
    """Return the name of the first filter that has the named metric; None if no filter has it.

    Args:
        filters: Filter -> its metrics, as keys; the values are not used.
        judge: ``METRIC``, or ``FILTER/METRIC`` to look at that filter only; None for the first
            filter.
    """
    named_filter, metric = split_judge(judge)
    for name, numeric in filters.items():
        if named_filter in (None, name) and (metric is None or metric in numeric):
            return name
    return None


def chosen_metric(
    task: str, filters: Mapping[str, Numeric], judge: str | None
) -> tuple[str, str | None]:
    """Return the filter and the metric that score a task.

    The metric is None if ``judge`` names none, and the documents have no number for any metric in
    `JUDGES`.

    Args:
        task: Name of the task, for messages.
        filters: Filter -> metric -> whether any document has a number for the metric.
        judge: ``[FILTER/]METRIC``; None for the first filter, and the first metric in `JUDGES` for
            which its documents have a number.

    Raises:
        HarnessError: The task lacks the named filter or metric, or no document has a number for the
            named metric.
    """
    chosen = filter_with(filters, judge)
    if chosen is None:
        metrics = dict.fromkeys(metric for numeric in filters.values() for metric in numeric)
        raise _no_judge(task, judge, list(filters), list(metrics))
    numeric = filters[chosen]
    named = split_judge(judge)[1]
    if named is None:
        return chosen, _first_known(numeric)
    if not numeric[named]:
        step = "evaluate the model on a task with a metric that does"
        numbers = [name for name in numeric if numeric[name]]
        if numbers:
            step = f"name a metric that does: {listed_names(numbers)}"
        raise HarnessError(f"{task}: {named} does not score single documents; {step}")
    return chosen, named


def _first_known(numeric: Numeric) -> str | None:
    """The first known metric that is a number; None if none is."""
    for metric in JUDGES:
        if numeric.get(metric):
            return metric
    return None


def results_metric(
    results: Mapping[str, Any], task: str, keys: Sequence[str], judge: str | None
) -> str | None:
    """Return the key of a task's score in lm-eval's results, such as ``acc,none``.

    The result is None if no key fits ``judge``.

    Args:
        results: Content of the results file.
        task: Name of the task.
        keys: The keys to choose from, ``METRIC,FILTER``; in old results ``METRIC``.
        judge: ``[FILTER/]METRIC``; None for the task's first filter, and the first metric in
            `JUDGES` that this filter has.
    """
    filters: dict[str, dict[str, bool]] = {}
    if config_of(results, task).get("filter_list"):
        filters = {name: {} for name in filter_names(results, task)}
    for key in sorted(keys, key=lambda key: "," not in key):  # those without a filter last
        metric, _, name = key.partition(",")
        filters.setdefault(name, {})[metric] = True
    scored = {name: numeric for name, numeric in filters.items() if numeric}
    chosen = filter_with(scored, judge)
    if chosen is None:
        return None
    known = split_judge(judge)[1] or _first_known(scored[chosen])
    if known is None or not chosen:
        return known
    return f"{known},{chosen}"


def unscored(numeric: Numeric) -> str:
    """Return a clause that says why a task's documents have no score, for a run's notes.

    ``numeric`` says for each metric whether any document has a number for it. The clause lists
    these metrics, and names ``--metric`` if it can choose one of them.
    """
    numbers = [name for name in numeric if numeric[name]]
    if numbers:
        return (
            f"documents have no number for a known metric ({', '.join(JUDGES[:3])}, …); name one "
            f"of their metrics by `--metric`: {listed_names(numbers)}"
        )
    if not numeric:
        return "no metric is logged, so the documents have no score; run a task that scores each document"
    verb = "is" if len(numeric) == 1 else "are"
    return (
        f"no metric scores single documents: {listed_names(list(numeric))} {verb} logged as pairs "
        "or lists; run a task that scores each document"
    )
