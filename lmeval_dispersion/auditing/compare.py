"""Runs of several models or checkpoints on the same documents: paired differences per slice.

Documents are matched by :func:`~lmeval_dispersion.store.joining.join`. Right and wrong answers are
compared by McNemar's exact test, other scores by `statistics.paired_bounds`. With several tasks the
report begins with the mean over tasks; with three runs or more it begins with the runs that are not
shown to be worse than the best. The interval of the difference of two dispersions over shared
documents is Student's, with the jackknife error of the paired leave-one-out differences.
`benchmarks/audit_conclusions.py --differences` counts false claims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.auditing.arguments import Comparing
from lmeval_dispersion.auditing.figures import RunReport, both_ends, interval_text, without_nan
from lmeval_dispersion.auditing.paired import (
    FEWEST,
    Best,
    PairVerdict,
    SharedAnswers,
    TaskMean,
    best_of,
    verdict_of,
)
from lmeval_dispersion.auditing.run import (
    Array,
    AuditRun,
    Rows,
    read_run,
    repeated_documents,
    repeats_caution,
)
from lmeval_dispersion.auditing.slices import Slice, by_column, by_value
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.geometry.dispersion import left_out
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.cells import short_names, shown
from lmeval_dispersion.report.document import fields_of
from lmeval_dispersion.report.vega import Spec, dots
from lmeval_dispersion.statistics import (
    LEVEL,
    Interval,
    holm,
    jackknife_se,
    student_bounds,
    student_p,
)
from lmeval_dispersion.store.groups import TaskGroup
from lmeval_dispersion.store.identity import SUFFIX
from lmeval_dispersion.store.joining import JoinedRun, check_judges, join
from lmeval_dispersion.store.sanity import (
    Fingerprints,
    Flags,
    counted_as_wrong,
    equal_answers,
    mean_text,
    pair_doubts,
)

_SHOWN_TASKS = 6  # most tasks that a sentence lists; the table has all
_PROBABILITY = (
    "Difference of the mean probability of the right answer, ± one paired standard error."
)
_LINE = {"slice": Col("Slice"), "documents": Col("Docs", "d", drop=1)}
_RIGHT = {"probability_difference": Col("Δ right answer", "+.3f", error="probability_se", drop=10)}
# A short table's columns by the drawn difference: accuracy, or dispersion where accuracy is unknown.
_SHORT = {
    "accuracy": {
        **_LINE,
        "accuracy_difference": Col(
            "Δ accuracy", "+.1%", error="reach", dots="both", reach="accuracy_low accuracy_high"
        ),
        "gained": Col("Gained", "d", drop=9),
        "lost": Col("Lost", "d", drop=9),
        "accuracy_p": Col("p", "p-value"),
        **_RIGHT,
        "dispersion_difference": Col("Δ dispersion", "+.4f", error="dispersion_reach", drop=11),
    },
    "dispersion": {
        **_LINE,
        "dispersion_difference": Col(
            "Δ dispersion",
            "+.4f",
            error="reach",
            dots="both",
            reach="dispersion_low dispersion_high",
        ),
    },
}


@dataclass(frozen=True)
class Difference:
    """One slice of a run compared with the same slice of the first run, the baseline.

    A difference is this run minus the baseline. Undefined numbers are NaN.

    Attributes:
        slice: Name of the slice.
        documents: Number of shared documents in the slice.
        labelled: Number of documents that have a score in both runs; mean scores are over these
            documents.
        accuracy: This run's mean score.
        accuracy_baseline: The baseline's mean score.
        accuracy_difference: Difference of the mean scores.
        accuracy_low: Lower end of the 95 % interval of ``accuracy_difference``.
        accuracy_high: Upper end of that interval.
        gained: Number of documents that only this run answers right; None without scores, if a
            score is neither 0 nor 1, or if documents have different weights.
        lost: Number of documents that only the baseline answers right; None if ``gained`` is None.
        accuracy_p: p-value of ``accuracy_difference``: by McNemar's exact test, or by a paired
            t-test if ``gained`` is None.
        not_finite: Number of documents with a log-probability or score that is not finite, in at
            least one of the two runs.
        accuracy_as_wrong: This run's mean score if the documents of ``not_finite`` count as wrong;
            NaN if there are none.
        accuracy_baseline_as_wrong: The baseline's mean score, counted in the same way.
        changes: Whether the verdict on accuracy changes if the documents of ``not_finite`` count as
            wrong.
        probability: This run's mean probability of the right answer.
        probability_baseline: The baseline's mean probability of the right answer.
        probability_difference: Difference of the mean probabilities.
        probability_se: Paired standard error of ``probability_difference``.
        probability_p: p-value of ``probability_difference`` by a paired t-test.
        dispersion: Mean cosine distance over all pairs of the documents' vectors in this run.
        dispersion_baseline: The same for the baseline's vectors.
        dispersion_difference: Difference of the dispersions.
        dispersion_low: Lower end of the 95 % interval of ``dispersion_difference``.
        dispersion_high: Upper end of that interval.
        reason: Why there are no intervals, if the slice has too few documents; else None.
        percent: Whether the scores of all runs are from 0 to 1, so that they are shown in percent.
    """

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Documents", "d", short="Docs", drop=1)]
    labelled: int = 0
    accuracy: Annotated[float, Col("Accuracy", ".1%", drop=4)] = math.nan
    accuracy_baseline: float = math.nan
    accuracy_difference: Annotated[
        float,
        Col("Δ accuracy", "+.1%", short="Δ acc.", dots="both", reach="accuracy_low accuracy_high"),
    ] = math.nan
    accuracy_low: Annotated[float, Col("95 % from", "+.1%", short="from", drop=8)] = math.nan
    accuracy_high: Annotated[float, Col("to", "+.1%", drop=8)] = math.nan
    gained: Annotated[int | None, Col("Gained", "d", drop=7)] = None
    lost: Annotated[int | None, Col("Lost", "d", drop=7)] = None
    accuracy_p: Annotated[float, Col("p", "p-value", drop=3)] = math.nan
    not_finite: int = 0
    accuracy_as_wrong: float = math.nan
    accuracy_baseline_as_wrong: float = math.nan
    changes: bool = False
    probability: float = math.nan
    probability_baseline: float = math.nan
    probability_difference: Annotated[
        float, Col("Δ right answer", "+.3f", error="probability_se", hint=_PROBABILITY, drop=6)
    ] = math.nan
    probability_se: float = math.nan
    probability_p: float = math.nan
    dispersion: Annotated[float, Col("Dispersion", ".4f", drop=5)] = math.nan
    dispersion_baseline: float = math.nan
    dispersion_difference: Annotated[
        float,
        Col(
            "Δ dispersion",
            "+.4f",
            short="Δ disp.",
            dots="both",
            reach="dispersion_low dispersion_high",
        ),
    ] = math.nan
    dispersion_low: Annotated[float, Col("95 % from", "+.4f", short="from", drop=8)] = math.nan
    dispersion_high: Annotated[float, Col("to", "+.4f", drop=8)] = math.nan
    reason: Annotated[str | None, Col("Remark", drop=2)] = None
    percent: bool = True

    @property
    def change(self) -> float:
        """The number by which slices are sorted.

        It is ``accuracy_difference``, or ``dispersion_difference`` if the former is NaN. It is NaN
        if both are.
        """
        if math.isnan(self.accuracy_difference):
            return self.dispersion_difference
        return self.accuracy_difference

    def figure(self, name: str) -> Interval:
        """Return the difference of ``name`` (``accuracy`` or ``dispersion``) with its interval."""
        ends = (f"{name}_{part}" for part in ("difference", "low", "high"))
        return Interval(*(getattr(self, end) for end in ends))

    def side(self, name: str) -> int:
        """Return 1 if this run is clearly higher than the baseline, -1 if clearly lower, else 0.

        ``name`` is what is compared, ``accuracy`` or ``dispersion``. Clearly means that the 95 %
        interval of the difference excludes 0. For accuracy, the result is 0 as well if ``changes``
        is true.
        """
        if self.changes and name == "accuracy":
            return 0
        return self.figure(name).side(0)


@dataclass(frozen=True)
class Compared:
    """One run compared with the first run.

    Attributes:
        run: Name of the run.
        layer: Layer of the run's vectors; "" without vectors.
        slices: A row for all documents, then one for each slice, the largest difference first.
        tasks: A row for the mean over tasks, then one for each task; empty with only one task,
            without scores, or with a score outside [0, 1].
        no_verdict: Clause on why the accuracies support no verdict, such as identical answers; else
            None.
    """

    run: str
    layer: str
    slices: Sequence[Difference]
    tasks: Sequence[Difference] = ()
    no_verdict: str | None = None

    @property
    def leading(self) -> Difference:
        """The row of the verdict: the mean over tasks, or all documents if ``tasks`` is empty."""
        return self.tasks[0] if self.tasks else self.slices[0]

    @property
    def sliced(self) -> bool:
        """Whether the slices are other parts than the tasks, judged by their names.

        True if ``tasks`` is empty.
        """
        tasks = {row.slice for row in self.tasks[1:]}
        return not tasks or {row.slice for row in self.slices[1:]} != tasks


@dataclass(frozen=True, repr=False)
class Comparison(RunReport):
    """Runs compared with the first run, over the documents that all runs share.

    Attributes:
        baseline: Name of the first run.
        layer: Layer of the first run's vectors; "" without vectors.
        by: Column that the documents are sliced by.
        documents: Number of shared documents.
        left_out: For each run, the first included, the number of its documents that another run
            lacks or has with another target.
        others: Each other run, compared with the first.
        best: Which runs are not shown to be worse than the best; None with fewer than three runs
            that can be compared, if a pair cannot be tested, or if lower scores are better.
        warnings: Sentences on answers that tell more about a run's settings than about its model,
            such as equal log-probabilities of all choices.
        cautions: Sentence that the intervals are too short because documents repeat; else empty.
        notes: Sentences on other differences between the runs.
        filters: Sentences on lm-eval filters whose scores differ by more than chance from those of
            the filter that is compared.
    """

    template = "comparison.jinja"
    schema = "dispersion-comparison/2"

    baseline: str
    layer: str
    by: str
    documents: int
    left_out: Sequence[int]
    others: Sequence[Compared]
    best: Best | None
    warnings: Sequence[str]
    cautions: Sequence[str]
    notes: Sequence[str]
    filters: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """Short names of the runs for sentences, the baseline first."""
        return short_names([self.baseline, *(other.run for other in self.others)])

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of CSV, for each run but the first.

        A run has a row for all documents, each slice, the mean over tasks and each task. If the
        slices are the tasks, these appear once. A row has the run's name as ``run``, and the fields
        of `Difference`.
        """
        rows = list[Mapping[str, Any]]()
        for other in self.others:
            tasks = other.tasks if other.sliced else other.tasks[:1]
            for row in [*other.slices, *tasks]:
                rows.append({"run": other.run, **fields_of(row)})
        return rows

    def tables(self) -> dict[str, Table]:
        """Return the tables of each run but the first, numbered from 0.

        ``tasks-0``, if there are several tasks: the mean over tasks, all documents, then each task.
        ``run-0``, unless the slices are the tasks: all documents, then each slice, the largest
        difference first.
        """
        tables: dict[str, Table] = {}
        for i, other in enumerate(self.others):
            whole, *parts = other.slices
            if other.tasks:
                mean, *tasks = other.tasks
                caption = (
                    f"Rows: mean over tasks, all documents, then each of the {len(tasks)} tasks"
                )
                tables[f"tasks-{i}"] = _table([mean, whole, *tasks], caption, "Task")
            if other.sliced:
                caption = "All documents"
                if parts:
                    caption = f"Rows: all documents, then {count(len(parts), 'slice')} by {self.by}"
                tables[f"run-{i}"] = _table(other.slices, caption, self.by.capitalize())
        return tables

    def charts(self) -> dict[str, Chart]:
        """Return the charts of each run but the first, numbered from 0.

        ``accuracy-0`` and ``dispersion-0`` show the difference of each slice that has an interval;
        a chart is left out if no slice has one.
        """
        more = ", and more than that where documents repeat" if self.cautions else ""
        charts = {}
        for i, other in enumerate(self.others):
            for name in ("accuracy", "dispersion"):
                rows = [row for row in other.slices if math.isfinite(row.figure(name).low)]
                if not rows:
                    continue
                bounds = (f"{name}_low", f"{name}_high")
                clear = sum(row.side(name) != 0 for row in rows)
                verb = "excludes" if clear == 1 else "exclude"
                percent = name == "accuracy" and all(row.percent for row in rows)
                axis: Spec | None = {"format": "+%"} if percent else None
                title = f"Difference of {name}, with 95 % interval"
                charts[f"{name}-{i}"] = Chart(
                    dots(rows, "slice", f"{name}_difference", bounds, title, axis),
                    f"Difference of {name}, slice by slice; the dashed line marks 0",
                    f"{clear} of {len(rows)} intervals {verb} 0; by chance about one in twenty "
                    f"would{more}.",
                )
        return charts

    def context(self) -> dict[str, Any]:
        """Return the template's variables: the runs' names, and the sentences on the runs."""
        best = ""
        of_these = ""
        tasks = len(self.others[0].tasks) - 1
        if self.best and not self.cautions:
            best = self.best.sentence()
        if tasks > 0 and not self.cautions:
            of_these = (
                f"These means and intervals hold for these {tasks} tasks only; differences on "
                "other tasks may lie outside the intervals."
            )
        names = self.names
        sentences = [
            list(self._sentences(other, name, names[0]))
            for name, other in zip(names[1:], self.others, strict=True)
        ]
        return {"sentences": sentences, "names": names, "best": best, "of_these": of_these}

    def _sentences(self, other: Compared, name: str, first: str) -> Iterator[str]:
        whole = other.slices[0]
        leading = other.leading
        if whole.reason:
            yield f"{name} against {first}: {whole.reason}."
        if self.cautions:
            if not math.isnan(leading.accuracy):
                yield f"{name} against {first}{_within(leading)}: {_shares(leading)}."
            return
        if other.no_verdict:
            yield f"No verdict on {name} against {first}: {other.no_verdict}."
        elif not math.isnan(leading.accuracy_low):
            yield from _accuracy_sentences(other, self.by, name, first, each=len(self.others) == 1)
        if not math.isnan(whole.probability_p) and not other.no_verdict:
            yield _probability_sentence(whole, name, first)
        if not math.isnan(whole.dispersion_low):
            yield _dispersion_sentence(whole, name, first)


def _table(slices: Sequence[Difference], caption: str, heading: str) -> Table:
    headings = {"slice": heading}
    labels = any(not math.isnan(row.accuracy_difference) for row in slices)
    name = "accuracy" if labels else "dispersion"
    brief = Table.of(
        [_short_line(row, name, aside=i == 0) for i, row in enumerate(slices)],
        caption,
        columns=_SHORT[name],
        headings=headings,
        excerpt=both_ends(len(slices)),
    )
    every = Table.of([without_nan(row) for row in slices], caption, headings=headings)
    if not all(row.percent for row in slices):
        brief = _in_own_unit(brief)
        every = _in_own_unit(every)
    return replace(every, brief=brief)


def _in_own_unit(table: Table) -> Table:
    """The table with shares as plain numbers, for scores that are not from 0 to 1."""
    columns = list(table.columns)
    for place, column in enumerate(columns):
        if column.format.endswith("%"):
            sign = "+" if column.format.startswith("+") else ""
            columns[place] = replace(column, format=f"{sign}.4g")
    return replace(table, columns=columns)


def _accuracy_sentences(
    other: Compared, by: str, name: str, first: str, *, each: bool
) -> Iterator[str]:
    """The verdict, and that on parts; of several tasks the mean over tasks first, and ``each`` task."""
    whole, *parts = other.slices
    if other.tasks:
        mean, *tasks = other.tasks
        yield _accuracy_sentence(mean, name, first)
        if each and len(tasks) <= _SHOWN_TASKS:
            yield f"Task by task: {'; '.join(f'{row.slice} {_numbers(row)}' for row in tasks)}."
        yield from _parts_sentence(tasks, "task")
        if each and mean.gained is None:  # else all documents weigh alike
            yield (
                f"With all {whole.labelled:,} questions weighted equally: {_shares(whole)} "
                f"{_numbers(whole)}."
            )
    else:
        yield _accuracy_sentence(whole, name, first)
    if other.sliced:
        yield from _parts_sentence(parts, by)


def _accuracy_sentence(row: Difference, name: str, first: str) -> str:
    side = row.side("accuracy")
    numbers = f"{_shares(row)} {_numbers(row)}"
    if not side:
        return f"{name} and {first} do not differ clearly in accuracy{_within(row)}: {numbers}."
    if row.gained is None:
        verb = "scores higher than" if side > 0 else "scores lower than"
    else:
        more = "more" if side > 0 else "fewer"
        verb = f"answers {more} documents right than"
    return f"{name} {verb} {first}{_within(row)}: {numbers}."


def _within(row: Difference) -> str:
    """Where a verdict holds, if not over all documents alike."""
    return f" in the {row.slice}" if row.slice.startswith("mean ") else ""


def _numbers(row: Difference) -> str:
    """The difference of the scores with its interval and test, in brackets."""
    change = _change(row, row.accuracy_difference, " points")
    if math.isnan(row.accuracy_low):
        return f"({change})"
    low = _change(row, row.accuracy_low)
    high = _change(row, row.accuracy_high)
    test = "paired t" if row.gained is None else "exact McNemar"
    return f"({change}, 95 % {low} to {high}; {test} p {_p_value(row.accuracy_p)})"


def _shares(row: Difference) -> str:
    if not row.percent:
        return f"{row.accuracy:.4g} against {row.accuracy_baseline:.4g}"
    return f"{100 * row.accuracy:.1f} % against {100 * row.accuracy_baseline:.1f} %"


def _change(row: Difference, change: float, unit: str = "") -> str:
    """A change of the score, in points where scores are from 0 to 1."""
    if row.percent:
        return f"{shown(100 * change, '+.1f')}{unit}"
    return shown(change, "+.4g")


def _parts_sentence(parts: Sequence[Difference], by: str) -> Iterator[str]:
    """A sentence on the slices, or tasks, that differ clearly; none with a single one."""
    p = dict[int, float]()
    for i, row in enumerate(parts):
        if not math.isnan(row.accuracy_p):
            p[i] = 1.0 if row.changes else row.accuracy_p
    if len(p) < 2:
        return
    one = "task" if by == "task" else f"slice by {by}"
    several = "tasks" if by == "task" else f"slices by {by}"
    clear = sorted(holm(p), key=lambda i: p[i])
    if not clear:
        yield f"Accuracy differs clearly in no {one}, after correction for testing all {len(p)}."
        return
    changes = [
        f"{parts[i].slice} ({_change(parts[i], parts[i].accuracy_difference, ' points')})"
        for i in clear[:3]
    ]
    more = f" and {len(clear) - 3} more" if len(clear) > 3 else ""
    yield (
        f"Accuracy differs clearly in {', '.join(changes)}{more}, after correction for testing all "
        f"{len(p)} {several}."
    )


def _probability_sentence(row: Difference, name: str, first: str) -> str:
    more = "less" if row.probability_difference < 0 else "more"
    opening = f"{name} gives the right answer {more} probability than {first}"
    if row.probability_p >= 1 - LEVEL:
        opening = f"{name} and {first} do not differ clearly in the probability of the right answer"
    return (
        f"{opening}: {row.probability:.3f} against {row.probability_baseline:.3f} "
        f"({row.probability_difference:+.3f} ± {row.probability_se:.3f}; paired t "
        f"p {_p_value(row.probability_p)})."
    )


def _dispersion_sentence(row: Difference, name: str, first: str) -> str:
    figure = row.figure("dispersion")
    shares = f"{row.dispersion:.4f} against {row.dispersion_baseline:.4f}"
    numbers = f"({shares}; {interval_text(figure, '+.4f')})"
    side = figure.side(0)
    if not side:
        return f"{name} and {first} do not differ clearly in dispersion {numbers}."
    more = "more" if side > 0 else "less"
    return f"{name} is {more} dispersed than {first} {numbers}, which by itself is neither good nor bad."


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def _short_line(row: Difference, name: str, aside: bool) -> dict[str, Any]:
    """A slice in the short table; ``aside``: its dot does not stretch the axis."""
    line = {**fields_of(without_nan(row)), "aside": aside}
    if name == "accuracy":
        line |= {"documents": row.labelled, "dispersion_reach": _reach(row, "dispersion")}
    return {**line, "reach": _reach(row, name)}


def _reach(row: Difference, name: str) -> float:
    """The longer side of an interval."""
    figure = row.figure(name)
    return max(figure.high - figure.value, figure.value - figure.low)


@takes(Comparing)
def compare(asked: Comparing) -> Comparison:
    """Compare runs with the first run, as ``dispersion compare`` does.

    Only documents that all runs share are compared; intervals are those of paired differences.
    Undefined numbers are NaN. If a ``metric`` is given, scores may lie outside [0, 1].

    Raises:
        UsageError: There are fewer than two runs, or runs together with ``demo``; ``slice`` names
            no column; a ``metric`` is given for a store; or the runs judge a task by different
            metrics.
        StoreError: A store cannot be read or has no such layer, or scores are outside [0, 1].
        HarnessError: Samples or logs cannot be read.
        MixedStoresError: No document has the same content, target and prompt in all runs.
    """
    paths = asked.runs
    if asked.demo:
        if paths:
            raise UsageError(
                "expected either runs or `--demo` (demo=True), got both; leave out the runs or "
                "`--demo`"
            )
        paths = sorted(data_folder("demo_runs").glob("sums-*"))
    if len(paths) < 2:
        raise UsageError(
            f"expected two or more runs, got {len(paths)}; name more runs, or compare two bundled "
            "runs with `dispersion compare --demo`"
        )
    is_named = asked.metric is not None
    runs = [read_run(path, asked.layer, asked.metric, any_range=is_named) for path in paths]
    rows, more = shared_rows(runs)
    check_judges({str(path): run.store.manifest for path, run in zip(paths, runs, strict=True)})
    first = runs[0]
    documents = len(rows[0])
    tasks = first.documents["task"].iloc[rows[0]].str.removesuffix(SUFFIX).tolist()
    parts = []
    for part in by_column(first, asked.slice):
        places = np.flatnonzero(np.isin(rows[0], part.rows))
        if 0 < len(places) < documents:
            parts.append(Slice(part.name, places))
    shared = [_Shared.of(run, rows_of_run) for run, rows_of_run in zip(runs, rows, strict=True)]
    percent = _in_unit(shared)
    mean = TaskMean(tasks, _groups(runs, tasks)) if _has_mean(shared, tasks) else None
    names = _names(runs, paths)
    others = []
    for name, other in zip(names[1:], shared[1:], strict=True):
        whole, *slices = [
            replace(_difference(part, shared[0], other), percent=percent)
            for part in (Slice("all documents", np.arange(documents)), *parts)
        ]
        compared = Compared(
            name, other.run.layer, [whole, *_falling(slices)], _by_task(shared[0], other, mean)
        )
        others.append(replace(compared, no_verdict=_no_verdict(compared, shared[0], other)))
    named = list(zip(short_names(names), shared, strict=True))
    best = None
    if not any(run.lower_is_better for run in runs):
        silent = [name for name, each in named if each.nothing]
        best = best_of({name: each.answers for name, each in named}, silent, mean)
    repeated = min(repeated_documents(each.run, each.rows) for each in shared)
    notes = [*_notes(runs, set(tasks)), *more, *(mean.notes() if mean else ())]
    return Comparison(
        baseline=names[0],
        layer=first.layer,
        by=asked.slice,
        documents=documents,
        left_out=[len(run) - documents for run in runs],
        others=others,
        best=best,
        warnings=list(_warnings(named)),
        cautions=repeats_caution(repeated, documents),
        notes=list(dict.fromkeys(notes)),
        filters=list(_filters(runs, names)),
    )


def shared_rows(runs: Sequence[AuditRun]) -> tuple[list[Rows], list[str]]:
    """Match the documents of several runs.

    Returns for each run the row numbers (n,) of the shared documents, in the same order for all
    runs, and sentences on what differs between the runs.

    Raises:
        MixedStoresError: No document has the same content, target and prompt in all runs.
    """
    joined = join(
        [JoinedRun(run.store.model, run.store.path, run.documents, run.store.parts) for run in runs]
    )
    return joined.rows, joined.notes


class _Shared(NamedTuple):
    """One run, its rows of the shared documents (n,), and what the sanity pass knows of it.

    ``nothing`` is why its answers are none, as a clause; "" for a run that answers.
    """

    run: AuditRun
    rows: Rows
    answers: SharedAnswers
    prints: Fingerprints
    nothing: str

    @classmethod
    def of(cls, run: AuditRun, rows: Rows) -> _Shared:
        answers = SharedAnswers.of(run, rows)
        logprobs = run.documents["logprobs"].iloc[rows].tolist()
        nothing = ""
        if run.logged.tied:
            nothing = (
                f"{run.store.model} gave all choices the same log-probability in most documents"
            )
        if not answers.finite.any():
            nothing = (
                f"every answer of {run.store.model} has a log-probability or score that is not "
                "finite"
            )
        return cls(run, rows, answers, Fingerprints.of(logprobs, answers.score), nothing)

    @property
    def is_scored(self) -> bool:
        """Whether a shared document has a score."""
        return bool(np.isfinite(self.answers.score).any())


def _difference(part: Slice, first: _Shared, second: _Shared) -> Difference:
    """Two runs' figures on a part of the shared documents."""
    n = len(part.rows)
    in_first = first.rows[part.rows]
    in_second = second.rows[part.rows]
    a = first.run
    b = second.run
    numbers = _accuracies(verdict_of(first.answers.at(part.rows), second.answers.at(part.rows)))
    finite = a.finite[in_first] & b.finite[in_second]
    numbers |= probabilities(a.probability[in_first], b.probability[in_second], finite)
    if n >= 2 and a.centred and b.centred:
        numbers |= dispersions(
            a.centred.contributions(in_first), b.centred.contributions(in_second)
        )
    reason = None
    if n < FEWEST:
        reason = f"an interval needs {FEWEST} or more shared documents, got {n}"
    return Difference(part.name, n, reason=reason, **numbers)


def _falling(rows: Sequence[Difference]) -> list[Difference]:
    """The rows by falling difference, those without one last."""
    return sorted(rows, key=lambda row: math.inf if math.isnan(row.change) else -row.change)


def _accuracies(verdict: PairVerdict | None) -> dict[str, Any]:
    """A :class:`Difference`'s fields on accuracy."""
    if verdict is None:
        return {}
    scores = verdict.logged
    numbers: dict[str, Any] = {
        **_both("accuracy", scores.first, scores.second),
        "labelled": scores.documents,
        "accuracy_low": scores.low,
        "accuracy_high": scores.high,
        "gained": scores.gained,
        "lost": scores.lost,
        "accuracy_p": scores.p,
        "not_finite": verdict.not_finite,
        "changes": verdict.changes,
    }
    if verdict.as_wrong is not None:
        numbers["accuracy_as_wrong"] = verdict.as_wrong.second
        numbers["accuracy_baseline_as_wrong"] = verdict.as_wrong.first
    return numbers


def _by_task(first: _Shared, second: _Shared, mean: TaskMean | None) -> list[Difference]:
    """The mean over tasks, then each task by falling difference; [] without several tasks."""
    if mean is None:
        return []
    verdict = verdict_of(first.answers, second.answers, mean)
    leading = Difference(str(mean), len(mean.tasks), **_accuracies(verdict))
    parts = by_value(mean.tasks)
    return [leading, *_falling([_difference(part, first, second) for part in parts])]


def _no_verdict(other: Compared, first: _Shared, second: _Shared) -> str | None:
    """Why two runs' accuracies support no verdict, as a clause; None where they do."""
    if first.nothing or second.nothing:
        return first.nothing or second.nothing
    equal, telling = equal_answers(first.prints, second.prints)
    if equal and equal == telling:
        return "the answers of both runs are identical to the last digit"
    row = other.leading
    if not row.changes:
        return None
    counted = (
        f"{mean_text(row.accuracy_as_wrong)} against {mean_text(row.accuracy_baseline_as_wrong)}"
    )
    return (
        "the result depends on how answers whose log-probabilities or scores are not finite are "
        f"counted ({_shares(row)} as lm-eval scored them, {counted} if they count as wrong)"
    )


def _warnings(runs: Sequence[tuple[str, _Shared]]) -> Iterator[str]:
    """The sanity pass on every run, and on each with the others; sentences with the runs' names."""
    any_scored = any(each.is_scored for _, each in runs)
    for name, each in runs:
        if any_scored and not each.is_scored:
            yield f"{name}: no shared document has a finite score."
        if each.is_scored and not each.answers.finite.all():
            yield f"{name}: {counted_as_wrong(*each.answers).sentence()}."
        logged = each.run.logged
        for clause in [*logged.doubts(), *logged.remarks()]:
            yield f"{name}: {clause}."
    yield from pair_doubts([(name, each.prints, each.run.documents) for name, each in runs])


def _groups(runs: Sequence[AuditRun], tasks: Sequence[str]) -> dict[str, TaskGroup]:
    """lm-eval's groups that hold shared tasks, by the first run whose results have any."""
    shared = set(tasks)
    for run in runs:
        groups: Mapping[str, TaskGroup] = run.store.manifest.get("groups") or {}
        used = {name: group for name, group in groups.items() if shared & set(group["tasks"])}
        if used:
            return used
    return {}


def _in_unit(runs: Sequence[_Shared]) -> bool:
    """Whether all scores are from 0 to 1."""
    scores = np.concatenate([each.answers.score for each in runs])
    scores = scores[np.isfinite(scores)]
    return bool(((scores >= 0) & (scores <= 1)).all())


def _has_mean(runs: Sequence[_Shared], tasks: Sequence[str]) -> bool:
    """Whether a mean over tasks says something: of several tasks, with scores of one range."""
    return len(set(tasks)) > 1 and any(each.is_scored for each in runs) and _in_unit(runs)


def dispersions(first: Array, second: Array) -> dict[str, Any]:
    """Compare two runs' dispersions over the same documents, the second minus the first.

    ``first`` and ``second`` (n,) are the contributions of the documents: the mean cosine distance
    of each to the other n - 1. Returns the fields of :class:`Difference` on dispersion, by name;
    the ends of the interval are missing if n < 5.
    """
    n = len(first)
    numbers = _both("dispersion", float(first.mean()), float(second.mean()))
    if n >= FEWEST:
        error = jackknife_se(left_out(second) - left_out(first))
        low, high = student_bounds(numbers["dispersion_difference"], error, n)
        widest = n / (n - 1)  # a dispersion is at least 0
        numbers |= {"dispersion_low": max(low, -widest), "dispersion_high": min(high, widest)}
    return numbers


def probabilities(x: Array, y: Array, finite: Flags | None = None) -> dict[str, Any]:
    """Compare two runs' probabilities of the right answer, paired: the second minus the first.

    Args:
        x: Probability of each document in the first run, shape (n,); NaN if unknown.
        y: The same of the second run.
        finite: Whether each document's log-probabilities are finite in both runs, shape (n,); None
            if all are.

    Returns:
        The fields of :class:`Difference` on probability, by name. The dictionary is empty if fewer
        than five documents have a probability in both runs. It is also empty if the verdict (the
        first run clearly higher, the second, or neither) changes when the unknown probabilities of
        documents that are not finite count as 0.
    """
    known = ~np.isnan(x) & ~np.isnan(y)
    if known.sum() < FEWEST:
        return {}
    numbers = _both("probability", float(x[known].mean()), float(y[known].mean()))
    side, error, p = _student(y[known] - x[known])
    if finite is not None and not finite.all():
        counted = known | ~finite
        if _student(np.nan_to_num(y[counted]) - np.nan_to_num(x[counted]))[0] != side:
            return {}
    return {**numbers, "probability_se": error, "probability_p": p}


def _student(changes: Array) -> tuple[int, float, float]:
    """The side of a clear mean difference (1, -1 or 0), its error, and Student's p, NaN without a spread."""
    n = len(changes)
    mean = float(changes.mean())
    error = float(changes.std(ddof=1)) / math.sqrt(n)
    p = student_p(abs(mean) / error, n - 1) if error else math.nan
    side = int(np.sign(mean)) if p < 1 - LEVEL else 0
    return side, error, p


def _both(name: str, first: float, second: float) -> dict[str, Any]:
    return {name: second, f"{name}_baseline": first, f"{name}_difference": second - first}


def _names(runs: Sequence[AuditRun], paths: Sequence[str | Path]) -> list[str]:
    """Names for the runs: their models, with the revision or folder if these are equal."""
    models = [run.store.model for run in runs]
    revisions = []
    for run in runs:
        revision = run.store.manifest.get("revision")
        revisions.append(f"{run.store.model}@{revision}" if revision else run.store.model)
    for names in (models, revisions):
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _filters(runs: Sequence[AuditRun], names: Sequence[str]) -> Iterator[str]:
    """Each run's filters that differ by more than chance, with the run's name."""
    for name, run in zip(names, runs, strict=True):
        yield from (f"{name}, {sentence}" for sentence in run.store.manifest.get("filters", ()))


def _notes(runs: Sequence[AuditRun], tasks: set[str]) -> Iterator[str]:
    """Differences between the runs, and the runs' own notes but those on other tasks than ``tasks`` alone."""
    for run in runs:
        if run.centred is None:
            yield f"Dispersion is not compared: {run.source} hold no vectors; {run.way_to_vectors}."
            break
    widths = sorted({run.centred.rows.shape[1] for run in runs if run.centred})
    if len(widths) > 1:
        yield (
            f"The models' vectors have different widths ({', '.join(map(str, widths))}); compare "
            "dispersions only between sibling models of the same size."
        )
    if any(run.documents["truncated"].eq(True).any() for run in runs):
        yield "Some prompts were truncated, and not necessarily the same prompts in every run."
    for run in runs:
        others = set(run.documents["task"].str.removesuffix(SUFFIX)) - tasks
        for note in run.store.manifest.get("notes", ()):
            words = set(re.findall(r"\w+", note))
            if words & tasks or not words & others:
                yield note
