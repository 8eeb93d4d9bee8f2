"""Which metric scores a document, and the scores in a file of lm-eval's samples.

``--metric`` is parsed here alone, by :class:`NamedMetrics`. Standard library alone.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.files import hashed
from lmeval_dispersion.logs import (
    Line,
    LoggedRun,
    config_of,
    filter_names,
    find_run,
    is_log,
    number_of,
    read_lines,
)

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

_SHOWN = 5  # most names in a message


class Scored(NamedTuple):
    """One document's score, with what identifies the document and the prompt."""

    doc_hash: str
    prompt_hash: str
    target: str
    metrics: Mapping[str, Any]  # lm-eval's own
    line: int
    score: float = math.nan


class ScoredLine(Protocol):
    """What is read from one line."""

    @property
    def doc_hash(self) -> str:
        """The document's hash."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """lm-eval's own, by name."""

    @property
    def line(self) -> int:
        """The line in its file."""


_Read = TypeVar("_Read", bound=ScoredLine)


def read_scores(file: str | Path, judge: str | None = None) -> tuple[str, dict[int, Scored]]:
    """Read a task's samples: the scoring ``FILTER/METRIC``, and each document's score by its index.

    A score that lm-eval logged as NaN is NaN.

    Args:
        file: A file of samples, or the folder of a run of one task; results are not needed.
        judge: ``METRIC`` or ``FILTER/METRIC``; default: the first filter and known metric.

    Raises:
        HarnessError: The file does not exist, is damaged, or has no such metric.
    """
    path = Path(file).expanduser()
    if not path.exists():
        raise HarnessError(
            f"{path} does not exist; name a samples_TASK_DATE.jsonl of `lm_eval --log_samples`"
        )
    if not path.is_dir() and not is_log(path):
        return _file_scores(path, (), judge)
    run = find_run(path)
    if len(run.samples) > 1:
        tasks = listed_names(sorted(run.samples))
        raise HarnessError(
            f"{path} holds {len(run.samples)} tasks ({tasks}); name the samples of one"
        )
    return task_scores(run, next(iter(run.samples)), judge)


def task_scores(
    run: LoggedRun, task: str, judge: str | None = None
) -> tuple[str, dict[int, Scored]]:
    """As :func:`read_scores`, for one task of a run."""
    return _file_scores(run.samples[task], filter_names(run.results_of(task), task), judge)


def _file_scores(
    path: Path, names: Sequence[str], judge: str | None
) -> tuple[str, dict[int, Scored]]:
    filters, _ = sorted_by_filter(path, ((line, _scored(line)) for line in read_lines(path)), names)
    chosen, metric = chosen_metric(str(path), filters, judge)
    if metric is None:
        raise HarnessError(
            f"no metric of {path} judges single documents by itself: {unscored(filters[chosen])}"
        )
    scores = {}
    for doc_id, scored in filters[chosen].items():
        score = score_of(path, scored, metric)
        if scored.metrics.get(metric) is not None:
            scores[doc_id] = scored._replace(score=score)
    return f"{chosen}/{metric}", scores


def sorted_by_filter(
    file: Path, lines: Iterable[tuple[Line, _Read]], names: Sequence[str]
) -> tuple[dict[str, dict[int, _Read]], int]:
    """What was read from the lines, by filter and document, and the number of equal repeats.

    Without names of filters in the lines (before 0.4.7), a document's lines are those of the filters in
    turn, whose ``names`` the results have.
    """
    filters: dict[str, dict[int, _Read]] = {}
    unnamed: dict[int, list[tuple[Line, _Read]]] = {}
    digests: dict[tuple[str, int], int] = {}
    repeated = 0

    def keep(name: str, line: Line, read: _Read) -> int:
        documents = filters.setdefault(name, {})
        if line.doc_id not in documents:
            documents[line.doc_id] = read
            digests[name, line.doc_id] = line.digest
            return 0
        if digests[name, line.doc_id] == line.digest:
            return 1
        raise HarnessError(
            f"{line.place} holds document {line.doc_id} twice, with other content than line "
            f"{documents[line.doc_id].line}: two processes or two runs wrote into the file; run it again"
        )

    for line, read in lines:
        if line.filter is None:
            kept = replace(line, content={}, metrics={})
            unnamed.setdefault(line.doc_id, []).append((kept, read))
        else:
            repeated += keep(line.filter, line, read)
    if unnamed and filters:
        line = next(iter(unnamed.values()))[0][0]
        raise HarnessError(f"{line.place} has no 'filter', which other lines have; run it again")
    if unnamed:
        names = names or _filters_in_turn(unnamed.values())
    for each in unnamed.values():
        if len(each) % len(names):
            line = each[-1][0]
            raise HarnessError(
                f"{line.place}: document {line.doc_id} has {len(each)} lines, and the task has {len(names)} "
                f"filters ({', '.join(names)}); run it again"
            )
        for i, (line, read) in enumerate(each):
            if read.doc_hash != each[0][1].doc_hash:
                keep("", each[0][0], each[0][1])
                keep("", line, read)
            repeated += keep(names[i % len(names)], line, read)
    return filters, repeated


def _filters_in_turn(documents: Iterable[Sequence[tuple[Line, Any]]]) -> list[str]:
    """Names for filters without names: one, unless all documents have as many lines that differ."""
    counts = {len(each) for each in documents}
    alike = all(len({line.digest for line, _ in each}) == 1 for each in documents)
    if len(counts) > 1 or alike:
        return ["none"]
    return [f"filter {i + 1}" for i in range(counts.pop())]


def _scored(line: Line) -> Scored:
    """What identifies a document, without its answers."""
    content = line.content
    try:
        doc_hash = content.get("doc_hash")
        if not isinstance(doc_hash, str):
            doc_hash = hash_of(content["doc"])
        prompt_hash = content.get("prompt_hash")
        if not isinstance(prompt_hash, str):
            prompt_hash = (
                hashed(str(request_arguments(content["arguments"])[0][0]))
                if "arguments" in content
                else ""
            )
        return Scored(doc_hash, prompt_hash, str(content.get("target")), line.metrics, line.number)
    except KeyError as error:
        raise lacking(line, str(error.args[0])) from None
    except MISFITS as error:
        raise misfit(line, error) from None


MISFITS = (
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    KeyError,
)


def lacking(line: Line, key: str) -> HarnessError:
    """The error for a line without a key."""
    return HarnessError(
        f"{line.place} has no {key!r}: another lm-eval wrote it; this version reads the samples of 0.4.0 and "
        "later"
    )


def misfit(line: Line, error: Exception) -> HarnessError:
    """The error for a line with a value of another form."""
    reason = (str(error) or type(error).__name__).splitlines()[0][:100]
    return HarnessError(f"{line.place} does not fit what lm-eval logs ({reason}); run it again")


def hash_of(doc: Any, encode: Callable[[Any], Any] | None = None) -> str:
    """lm-eval's own hash of a document; ``encode`` makes JSON of values that are not plain."""
    return hashed(json.dumps(doc, indent=2, default=encode, ensure_ascii=False))


def request_arguments(logged: Any) -> list[tuple[Any, ...]]:
    """``{"gen_args_0": {"arg_0": …, "arg_1": …}, …}`` as tuples, in order; before 0.4.3 lists.

    The messages for a server are logged as a list that holds their JSON.
    """
    if isinstance(logged, dict):
        each = [logged[f"gen_args_{i}"] for i in range(len(logged))]
        requests = [[arguments[f"arg_{j}"] for j in range(len(arguments))] for arguments in each]
    elif isinstance(logged, list) and all(isinstance(arguments, list) for arguments in logged):
        requests = logged
    else:
        raise TypeError("expected `arguments` to be those of each request")
    found = []
    for first, *rest in requests:
        messages = isinstance(first, list)
        found.append((*(first if messages else [first]), *rest))
    return found


@dataclass(frozen=True)
class NamedMetrics:
    """What ``--metric`` names: ``[TASK=][FILTER/]METRIC``, several with commas.

    Attributes:
        default: ``[FILTER/]METRIC`` of the tasks without their own; None: the first known of each.
        own: Task or group -> its ``[FILTER/]METRIC``.
    """

    default: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str | None) -> NamedMetrics:
        """Parse the text of ``--metric``; None and an empty one name nothing.

        >>> NamedMetrics.of("acc, gsm8k=strict-match/exact_match")
        NamedMetrics(default='acc', own={'gsm8k': 'strict-match/exact_match'})

        Raises:
            UsageError: A part is empty, or a task, or all tasks, get two metrics.
        """
        if not text:
            return cls()
        own = dict[str | None, str]()
        for part in text.split(","):
            before, equals, after = part.partition("=")
            task = before.strip() if equals else None
            judge = after.strip() if equals else before.strip()
            if not judge or task == "":
                raise UsageError(
                    f"expected [TASK=][FILTER/]METRIC, several with commas, got {text!r}",
                    argument="metric",
                )
            known = own.setdefault(task, judge)
            if known != judge:
                raise UsageError(
                    f"expected one metric for {task or 'all tasks'}, got {known} and {judge}; "
                    "TASK=METRIC names one task's, FILTER/METRIC one of a filter",
                    argument="metric",
                )
        default = own.pop(None, None)
        return cls(default, {str(task): judge for task, judge in own.items()})

    def judge(self, *names: str) -> str | None:
        """What scores a task of these ``names``, its groups' among them: the first that has its own."""
        for name in names:
            if name in self.own:
                return self.own[name]
        return self.default

    def has_own(self, *names: str) -> bool:
        """Whether a task of these names has a metric of its own."""
        return any(name in self.own for name in names)

    def check(self, names: Sequence[str]) -> None:
        """Raise UsageError for a metric of a task or group that is none of ``names``."""
        for name, judge in self.own.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3) or names
                raise UsageError(
                    f"{name}={judge} names no task that is scored; there are {listed_names(near)}",
                    argument="metric",
                )


def split_judge(named: str | None) -> tuple[str | None, str | None]:
    """Filter and metric of ``FILTER/METRIC`` or ``METRIC``; None for a missing part."""
    chosen, slash, metric = (named or "").rpartition("/")
    return (chosen or None) if slash else None, metric or None


def check_judge(
    task: str, named: str | None, filters: Sequence[str], metrics: Iterable[str]
) -> None:
    """Raise HarnessError unless the task has the filter and metric in ``named``."""
    chosen, metric = split_judge(named)
    metrics = list(metrics)
    if (chosen is None or chosen in filters) and (metric is None or metric in metrics):
        return
    names = metrics if len(filters) < 2 else [f"{f}/{m}" for f in filters for m in metrics]
    raise HarnessError(f"{task} has no {named!r} to judge answers by; it has {', '.join(names)}")


def correctness(metrics: Mapping[str, Any], named: str | None) -> tuple[str | None, float]:
    """Name and value of the metric that scores an answer: ``named``, else the first known; or (None, NaN)."""
    for name in (named,) if named else JUDGES:
        if name in metrics and isinstance(metrics[name], int | float):
            return name, float(metrics[name])
    return None, math.nan


def numeric_metrics(documents: Iterable[ScoredLine]) -> dict[str, bool]:
    """Metric -> whether any document has it as a number."""
    numeric: dict[str, bool] = {}
    for document in documents:
        for name, value in document.metrics.items():
            numeric[name] = numeric.get(name, False) or isinstance(value, int | float)
    return numeric


def has_judge(filters: Mapping[str, Mapping[int, ScoredLine]], judge: str) -> bool:
    """Whether a task has the filter and the metric in ``judge``."""
    named_filter, metric = split_judge(judge)
    names = filters if named_filter is None else filters.keys() & {named_filter}
    return any(
        metric is None or metric in numeric_metrics(filters[name].values()) for name in names
    )


def chosen_metric(
    task: str, filters: Mapping[str, Mapping[int, ScoredLine]], judge: str | None
) -> tuple[str, str | None]:
    """The filter and the metric that score a task; no metric if none is known and none is named.

    Raises:
        HarnessError: The task has no such filter or metric, or the metric is not a number of a document.
    """
    named_filter, named = split_judge(judge)
    numeric = {name: numeric_metrics(documents.values()) for name, documents in filters.items()}
    candidates = [name for name in filters if named_filter in (None, name)]
    chosen = next((name for name in candidates if named is None or named in numeric[name]), None)
    if chosen is None:
        names = list(dict.fromkeys(metric for metrics in numeric.values() for metric in metrics))
        check_judge(task, judge, list(filters), names)
        raise HarnessError(f"{task} has no {judge!r} to judge answers by")
    if named is None:
        known = (metric for metric in JUDGES if numeric[chosen].get(metric))
        return chosen, next(known, None)
    if not numeric[chosen][named]:
        raise HarnessError(
            f"{task}: {named} scores no single document: {unscored(filters[chosen])}"
        )
    return chosen, named


def results_metric(
    results: Mapping[str, Any], task: str, keys: Sequence[str], judge: str | None
) -> str | None:
    """The key ``METRIC,FILTER`` of a task's score in lm-eval's results, among ``keys``; None if none is.

    By the same order as for samples: the task's first filter, and of its metrics the first known.
    """
    named_filter, named = split_judge(judge)
    found = [key.partition(",")[::2] for key in keys]
    listed = config_of(results, task).get("filter_list")
    filters = filter_names(results, task) if listed else [name for _, name in found if name]
    filters = list(dict.fromkeys([*filters, *(name for _, name in found)]))
    for name in [named_filter] if named_filter else filters:
        if not any(other == name for _, other in found):
            continue
        for metric in (named,) if named else JUDGES:
            if (metric, name) in found:
                return f"{metric},{name}" if name else metric
        if named is None:
            return None
    return None


def unscored(documents: Mapping[int, ScoredLine]) -> str:
    """Why documents have no score by default, and which metrics there are."""
    metrics = numeric_metrics(documents.values())
    numbers = [name for name, number in metrics.items() if number]
    others = [name for name, number in metrics.items() if not number]
    if numbers:
        return (
            f"none of {', '.join(JUDGES[:3])}, … is a number of a document; `--metric` names what scores it: "
            f"{listed_names(numbers)}"
        )
    if not others:
        return "no metric is logged, so the documents have no label"
    return (
        f"no metric judges single documents, so they have no label: {listed_names(others)} "
        f"{'is' if len(others) == 1 else 'are'} logged as pairs or lists"
    )


def score_of(file: Path, document: ScoredLine, metric: str | None) -> float:
    """A document's score by a metric; NaN without; HarnessError if it is not a number."""
    value = None if metric is None else document.metrics.get(metric)
    try:
        return number_of(value)
    except TypeError:
        raise HarnessError(
            f"{file}: line {document.line}: expected {metric} to be a number, got a "
            f"{type(value).__name__}; run it again"
        ) from None


def listed_names(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
