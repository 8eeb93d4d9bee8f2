"""Slices of a run: their documents, dispersion and accuracy.

A slice is a part of a run's documents: those with one value of a column, or with a number within
one band.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.figures import ENDS, SHOWN, without_nan
from lmeval_dispersion.auditing.run import Array, AuditRun, Missing, Rows
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.geometry import Spectrum, spectrum
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.document import columns_of, fields_of
from lmeval_dispersion.report.vega import Spec, mark, numeric, span
from lmeval_dispersion.statistics import (
    LEVEL,
    UNDEFINED,
    Bounds,
    Interval,
    normal_point,
    rank_agreement,
    rank_correlations,
    spearman_bounds,
    student_bounds,
    student_quantile,
    wilson,
)

BANDS = 5
_DISTINCT = 12  # a numeric column with more values than this is cut into bands
_BANDED = ("length", "confidence")  # numbers of a :class:`AuditRun` that slice it by bands
_NOT_SLICES = ("logprobs", "text", "doc_id", "doc_hash", "prompt_hash")
ORDER = ("is not clearly related to", "rises with", "falls with")  # by an association's side
_FEWEST_OF_A_TASK = 4  # fewest slices in a task for a correlation inside it
_DISPERSION = (
    "Mean cosine distance over all pairs of the slice's documents, ± jackknife standard error: 0 "
    "if all point the same way, 1 if orthogonal. For all documents together, pairs from two slices "
    "count, too, and no dot is drawn."
)
_PROBABILITY = "Mean probability of the right answer among the choices."
_SHORT_DISPERSION = (
    "mean cosine distance of the documents' vectors, with 95 % intervals; for all documents "
    "together, pairs from two slices count, too, and no dot is drawn."
)
_LINE = {"slice": Col("Slice"), "documents": Col("Docs", "d")}
_RIGHT = {"probability": Col("Right answer", ".3f", hint=_PROBABILITY, drop=1)}
# A short table's columns, by the figure that it draws as dots.
_SHORT = {
    "dispersion": {
        **_LINE,
        "dispersion": Col(
            "Dispersion", ".4f", dots="both", reach="low high", hint=_SHORT_DISPERSION
        ),
        "accuracy": Col("Accuracy (95 %)"),
        **_RIGHT,
    },
    "accuracy": {
        **_LINE,
        "accuracy": Col("Accuracy", ".1%", dots="both", reach="accuracy_low accuracy_high"),
        **_RIGHT,
        "confidence": Col("Confidence", ".1%"),
    },
}


class Slice(NamedTuple):
    """A slice: a part of a run's documents, such as a subject or a band of prompt lengths.

    Attributes:
        name: Name of the slice.
        rows: Row numbers of the slice's documents in the run, ascending.
    """

    name: str
    rows: Rows


def all_documents(run: AuditRun) -> Slice:
    """Return the whole run as one slice."""
    return Slice("all documents", np.arange(len(run)))


def slicings(run: AuditRun, extra: Sequence[str] = ()) -> dict[str, list[Slice]]:
    """Return the slices of a run by each column that can slice it, in the order of the report.

    The columns named in ``extra`` come first, as they were given. Then come ``subject``,
    ``category`` and ``task`` where they divide the documents, and bands of ``length`` (prompt
    tokens) and ``confidence`` (probability of the chosen answer).

    Raises:
        UsageError: A column of ``extra`` does not exist or is empty.
    """
    ways = {name: by_column(run, name) for name in extra}
    for name, slices in _dividing(run, ("subject", "category", "task")).items():
        ways.setdefault(name, slices)
    for name in _BANDED:
        bands = by_band(getattr(run, name))
        if len(bands) > 1:
            ways.setdefault(name, bands)
    return ways


def strata(run: AuditRun) -> dict[str, list[Slice]]:
    """Return the slices by ``subject`` and by ``task``, where these divide the documents.

    ``task`` is left out if it divides them in the same way as ``subject``.
    """
    return _dividing(run, ("subject", "task"))


def _dividing(run: AuditRun, columns: Sequence[str]) -> dict[str, list[Slice]]:
    """The slices of those columns that divide the documents, each differently."""
    ways: dict[str, list[Slice]] = {}
    cuts = []
    for name in columns:
        slices = by_value(run.documents[name].tolist())
        cut = sorted(part.rows.tolist() for part in slices)
        if len(slices) > 1 and cut not in cuts:
            ways[name] = slices
            cuts.append(cut)
    return ways


def by_column(run: AuditRun, name: str) -> list[Slice]:
    """Slice a run by a column of its documents, or by ``length`` or ``confidence``.

    Length is that of the prompt in tokens, and confidence the probability of the chosen answer.
    Each value makes a slice; a column with many different numbers is cut into bands.

    Raises:
        UsageError: The column does not exist or is empty.
    """
    if name in _BANDED:
        slices = by_band(getattr(run, name))
    else:
        columns = run.documents.columns.drop(list(_NOT_SLICES), errors="ignore")
        if name not in columns:
            known = ", ".join([*columns, *_BANDED])
            raise UsageError(f"there is no column {name!r} to slice by; choose from {known}")
        values = run.documents[name]
        if values.dtype.kind in "fiu" and values.nunique() > _DISTINCT:
            slices = by_band(values.to_numpy(dtype=np.float64))
        else:
            slices = by_value(values.tolist())
    if not slices:
        raise UsageError(f"the column {name!r} is empty in this run; choose another")
    return slices


def by_value(values: Sequence[object]) -> list[Slice]:
    """Return one slice for each distinct value; missing values belong to no slice.

    Slices are in the order of their values if all are numbers or bands like ``5 to 9``, else of
    their names.
    """
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None and value == value:  # NaN differs from itself
            rows.setdefault(str(value), []).append(row)
    return [
        Slice(name, np.array(rows[name], dtype=np.int64)) for name in in_order(rows) or sorted(rows)
    ]


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of slices in ascending order, if all are numbers or bands like ``5 to 9``.

    Bands are sorted by their lower ends. The list is empty if a name is neither a number nor a
    band.
    """
    places: dict[str, float] = {}
    for name in names:
        try:
            places[name] = float(name.partition(" to ")[0])
        except ValueError:
            return []
        if not math.isfinite(places[name]):
            return []
    return sorted(places, key=lambda name: places[name])


def by_band(values: Array) -> list[Slice]:
    """Cut numbers into up to five slices of about equal size, at their quantiles.

    Equal numbers stay together; NaN belongs to no slice.
    """
    known = np.flatnonzero(~np.isnan(values))
    if not known.size:
        return []
    edges = np.unique(np.quantile(values[known], np.linspace(0, 1, BANDS + 1)))
    index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
    slices = []
    for band in range(max(len(edges) - 1, 1)):
        rows = known[index[known] == band]
        if rows.size:
            name = f"{values[rows].min():.4g} to {values[rows].max():.4g}"
            slices.append(Slice(name, rows))
    return slices


@dataclass(frozen=True)
class SliceRow:
    """The figures of one slice; NaN where a figure is undefined.

    Attributes:
        slice: Name of the slice.
        dispersion: Mean cosine distance over all pairs of the slice's documents.
        dispersion_se: Jackknife standard error of the dispersion.
        accuracy: Mean score of the slice's labelled documents, in [0, 1].
        accuracy_low: Lower end of the 95 % Wilson interval of the accuracy.
        accuracy_high: Upper end of that interval.
        probability: Mean probability of the right answer among the choices.
        documents: Number of documents in the slice.
        labelled: Number of documents with a label, that is, a score.
        query_perplexity: Mean perplexity of the queries.
        confidence: Mean probability of the chosen answer.
        prompt_tokens: Mean length of the prompts, in tokens.
        reason: Why dispersion or its error is undefined, if the slice has too few documents; else
            None.
    """

    slice: Annotated[str, Col("Slice")]
    dispersion: Annotated[
        float, Col("Dispersion", ".4f", error="dispersion_se", hint=_DISPERSION, dots="page")
    ]
    dispersion_se: float
    accuracy: Annotated[
        float, Col("Accuracy", ".1%", dots="page", reach="accuracy_low accuracy_high")
    ]
    accuracy_low: Annotated[
        float, Col("95 % from", ".1%", hint="Wilson interval of the accuracy.", drop=1)
    ]
    accuracy_high: Annotated[float, Col("to", ".1%", drop=1)]
    probability: Annotated[float, Col("Right answer", ".3f", hint=_PROBABILITY, drop=2)]
    documents: Annotated[int, Col("Documents", "d", short="Docs", drop=1)]
    labelled: int
    query_perplexity: Annotated[
        float, Col("Perplexity", ".2f", hint="Mean perplexity of the queries.", drop=2)
    ]
    confidence: Annotated[
        float, Col("Confidence", ".1%", hint="Mean probability of the chosen answer.", drop=3)
    ]
    prompt_tokens: Annotated[float, Col("Tokens", ".0f", hint="Mean prompt length.", drop=4)]
    reason: Annotated[str | None, Col("Remark")]


@dataclass(frozen=True)
class SpectrumRow(SliceRow):
    """A slice with four measures of how many directions its vectors spread over.

    The measures are those of :class:`~lmeval_dispersion.geometry.Spectrum`. They are NaN for a slice
    of fewer than three documents.

    Attributes:
        rankme: RankMe, the exponential of the entropy of the singular values.
        effective_rank: Effective rank, see :func:`~lmeval_dispersion.geometry.effective_rank`.
        participation_ratio: Participation ratio, (Σλ)² / Σλ² over the eigenvalues λ of the
            covariance.
        stable_rank: Stable rank, the squared Frobenius norm over the squared spectral norm.
    """

    rankme: Annotated[float, Col("RankMe", ".4g", drop=5)]
    effective_rank: Annotated[float, Col("Effective rank", ".4g", drop=6)]
    participation_ratio: Annotated[float, Col("Participation ratio", ".4g", drop=7)]
    stable_rank: Annotated[float, Col("Stable rank", ".4g", drop=8)]


@dataclass(frozen=True)
class InsideTasks:
    """Correlation of dispersion with accuracy over slices of the same task.

    Attributes:
        spearman: Spearman's correlation inside tasks, combined over the tasks.
        p: Two-sided p-value of ``spearman``, by permutation inside tasks.
        tasks: Number of tasks that count, each with four slices or more.
        slices: Number of slices of these tasks.
    """

    spearman: float
    p: float
    tasks: int
    slices: int


@dataclass(frozen=True)
class Association:
    """Correlation of dispersion with accuracy over slices.

    Attributes:
        spearman: Spearman's correlation.
        low: Lower end of the 95 % interval of ``spearman``; NaN below eight slices.
        high: Upper end of that interval; NaN below eight slices.
        slices: Number of slices.
        inside_tasks: The correlation inside tasks; None unless at least two tasks have four slices
            or more.
    """

    spearman: float
    low: float
    high: float
    slices: int
    inside_tasks: InsideTasks | None = None

    @property
    def side(self) -> int:
        """1 if accuracy clearly rises with dispersion, -1 if accuracy clearly falls, else 0.

        Clearly means that the 95 % interval excludes 0.
        """
        return Interval(self.spearman, self.low, self.high).side(0)


@dataclass(frozen=True)
class LeastDispersed:
    """The least dispersed slice, compared with the other slices of three documents or more.

    Attributes:
        slice: Name of the least dispersed slice.
        dispersion: Dispersion of that slice.
        others: Number of other slices that are compared.
        not_clear: Number of other slices whose dispersion is not clearly higher.
    """

    slice: str
    dispersion: float
    others: int
    not_clear: int


@dataclass(frozen=True)
class SliceTable:
    """The slices by one column: the figures of each, and two findings on all of them.

    Attributes:
        rows: The figures of each slice.
        least_dispersed: The least dispersed slice; `Missing` if no two slices can be compared.
        association: The correlation of dispersion with accuracy over the slices; `Missing` if it
            cannot be computed.
    """

    rows: Sequence[SliceRow | SpectrumRow]
    least_dispersed: LeastDispersed | Missing
    association: Association | Missing


def slice_table(
    run: AuditRun, slices: list[Slice], raw: NDArray[np.float32] | None = None
) -> SliceTable:
    """Compute the figures of the slices by one column, and the findings of `SliceTable` on them.

    ``raw`` (n, d), the run's vectors before normalisation, adds the figures of `SpectrumRow`.
    """
    rows = [slice_row(run, part, raw) for part in slices]
    tasks = []
    for part in slices:
        names = run.documents["task"].iloc[part.rows].unique()
        tasks.append(str(names[0]) if len(names) == 1 else None)
    return SliceTable(rows, least_dispersed(rows), association(rows, tasks))


def slice_row(run: AuditRun, part: Slice, raw: NDArray[np.float32] | None = None) -> SliceRow:
    """Compute the figures of one slice.

    ``raw`` (n, d), the run's vectors before normalisation, adds the figures of `SpectrumRow`.
    """
    rows = part.rows
    n = len(rows)
    accuracy = known_mean(run.score[rows])
    labelled = int((~np.isnan(run.score[rows])).sum())
    low, high = wilson(accuracy, labelled)
    dispersion = math.nan
    error = math.nan
    reason = None
    if run.centred is not None:
        if n < 2:
            reason = "a dispersion needs two documents"
        else:
            dispersion, error, _ = run.centred.estimate(rows)
            reason = "an error bar needs three documents" if n == 2 else None
    row = SliceRow(
        slice=part.name,
        dispersion=dispersion,
        dispersion_se=error,
        accuracy=accuracy,
        accuracy_low=low,
        accuracy_high=high,
        probability=known_mean(run.probability[rows]),
        documents=n,
        labelled=labelled,
        query_perplexity=known_mean(run.perplexity[rows]),
        confidence=known_mean(run.confidence[rows]),
        prompt_tokens=known_mean(run.length[rows]),
        reason=reason,
    )
    if raw is None:
        return row
    figures: dict[str, Any] = dict.fromkeys(Spectrum._fields, math.nan)
    if n >= 3:
        figures = spectrum(raw[rows])._asdict()
    return SpectrumRow(**fields_of(row), **figures)


def association(
    rows: Sequence[SliceRow], tasks: Sequence[str | None] = ()
) -> Association | Missing:
    """Return Spearman's correlation of dispersion with accuracy over slices.

    It is 1 if the more dispersed slice is always the more accurate one, 0 without an order, and
    negative for the reverse order. Slices with fewer than three documents or labels do not count.
    An interval needs eight slices. The result is `Missing` with fewer than four slices, or if all
    slices have the same dispersion or the same accuracy.

    ``tasks`` has the task of each slice, None for a slice of several tasks. If at least two tasks
    have four slices or more, the correlation inside tasks is added, with its permutation p-value.
    """
    points = []
    of_task = dict[str | None, list[tuple[float, float]]]()
    for row, task in zip_longest(rows, tasks):
        if min(row.documents, row.labelled) >= 3 and not math.isnan(row.dispersion):
            point = (row.dispersion, row.accuracy)
            points.append(point)
            of_task.setdefault(task, []).append(point)
    if len(points) < 4:
        return Missing(
            "a correlation needs at least 4 slices, each with 3 or more labelled documents, got "
            f"{len(points)}"
        )
    x, y = _columns(points)
    rho = float(rank_correlations(x, y[None])[0])
    if np.isnan(rho):
        equal = "dispersion" if np.ptp(x) == 0 else "accuracy"
        return Missing(f"all slices have the same {equal}")
    of_task.pop(None, None)
    large = [part for part in of_task.values() if len(part) >= _FEWEST_OF_A_TASK]
    inside = None
    if len(large) >= 2:
        agreed = rank_agreement([_columns(part) for part in large])
        if agreed is not None:
            slices = sum(map(len, large))
            inside = InsideTasks(agreed.spearman, agreed.spearman_p, len(large), slices)
    return Association(rho, *spearman_bounds(rho, len(points)), len(points), inside)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    x, y = np.array(points).T
    return x, y


def least_dispersed(rows: Sequence[SliceRow]) -> LeastDispersed | Missing:
    """Find the slice with the lowest dispersion, and count the others that are not clearly higher.

    Only slices of three documents or more are compared; with fewer than two of these the result is
    `Missing`. Differences are tested by Student's t, corrected for the number of all pairs of
    slices, so that equal slices show a clear difference in at most 5 % of runs.
    """
    usable = [row for row in rows if row.documents >= 3 and np.isfinite(row.dispersion_se)]
    if len(usable) < 2:
        return Missing(
            f"at least two slices with three documents or more are needed, got {len(usable)} of "
            f"{len(rows)}"
        )
    lowest = min(usable, key=lambda row: row.dispersion)
    tail = NormalDist().cdf(-normal_point(len(usable) * (len(usable) - 1) // 2))
    clear = 0
    for row in usable:
        error = math.hypot(row.dispersion_se, lowest.dispersion_se)
        point = student_quantile(1 - tail, min(row.documents, lowest.documents) - 1)
        clear += row.dispersion - lowest.dispersion > point * error
    return LeastDispersed(lowest.slice, lowest.dispersion, len(usable) - 1, len(usable) - 1 - clear)


def known_mean(values: Array) -> float:
    """Return the mean of the finite values; NaN if no value is finite."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def shown_slices(name: str, rows: Sequence[SliceRow], whole: SliceRow) -> Table:
    """Return the table of the slices by the column ``name``, with all documents as the last row.

    Bands and numbers are in ascending order. Other slices are sorted by dispersion, the lowest
    first; without vectors by accuracy.
    """
    key = "accuracy" if math.isnan(whole.dispersion) else "dispersion"
    least = {"accuracy": "least accurate first", "dispersion": "least dispersed first"}
    caption = f"{count(len(rows), 'slice')} by {name}, {least[key]}"
    ordered = sorted(rows, key=lambda row: (math.isnan(getattr(row, key)), getattr(row, key)))
    places = in_order(row.slice for row in rows)
    if places:
        caption = f"{count(len(rows), 'slice')} in order of {name}"
        ordered.sort(key=lambda row: places.index(row.slice))
    headings = {"slice": name.capitalize()}
    anchor = f"slices-{name}"
    last = len(rows)
    lines = [
        {**fields_of(without_nan(row)), "undrawn": row is whole}  # it is not on the axis
        for row in (*ordered, whole)
    ]
    row_type: type = type(whole)
    columns = columns_of(row_type)
    every = Table.of(lines, caption, columns=columns, name=anchor, headings=headings)
    if not rows:
        return replace(every, marks={last: "control"})
    brief_lines = []
    for line, row in zip(lines, (*ordered, whole), strict=True):
        if key == "dispersion":
            bounds = dispersion_bounds(row)._asdict()
            brief_lines.append({**line, **bounds, "accuracy": _accuracy(row)})
        else:
            brief_lines.append({**line, "undrawn": False})
    brief = Table.of(
        brief_lines,
        caption,
        columns=_SHORT[key],
        name=anchor,
        headings=headings,
        excerpt=[*range(ENDS), *range(last - ENDS, last + 1)] if last + 1 > SHOWN else [],
    )
    return replace(every, brief=brief, marks={last: "control"})


def dispersion_bounds(row: SliceRow) -> Bounds:
    """Return Student's 95 % interval of a slice's dispersion, clipped to [0, n / (n - 1)].

    n is the number of documents in the slice. Both ends are NaN below three documents.
    """
    if row.documents < 3 or math.isnan(row.dispersion_se):
        return UNDEFINED
    low, high = student_bounds(row.dispersion, row.dispersion_se, row.documents)
    return Bounds(max(low, 0.0), min(high, row.documents / (row.documents - 1)))


def weakest(rows: Sequence[SliceRow], whole: SliceRow) -> SliceRow | None:
    """Return the slice of lowest accuracy if that is clearly below the run's accuracy, else None.

    Only slices with three or more labelled documents count, and there have to be two of them. The
    slice's Wilson interval, corrected for the choice among these slices (Bonferroni), has to end
    below the accuracy of ``whole``.
    """
    usable = [row for row in rows if row.labelled >= 3]
    if len(usable) < 2:
        return None
    lowest = min(usable, key=lambda row: row.accuracy)
    _, high = wilson(lowest.accuracy, lowest.labelled, normal_point(len(usable)))
    return lowest if high < whole.accuracy else None


def _accuracy(row: SliceRow) -> str:
    if math.isnan(row.accuracy):
        return ""
    return f"{row.accuracy:.0%} ({100 * row.accuracy_low:.0f}–{100 * row.accuracy_high:.0f})"


def spearman_text(association: Association) -> str:
    """Return a Spearman correlation as text, with its interval or the reason for having none."""
    if math.isnan(association.low):
        return f"Spearman {association.spearman:.2f}, too few slices for an interval"
    return (
        f"Spearman {association.spearman:.2f}, 95 % {association.low:.2f} to {association.high:.2f}"
    )


def association_sentence(order: Association | Missing) -> str:
    """Return a sentence on whether accuracy rises with dispersion over slices.

    The sentence adds the correlation inside tasks if this is known. If there is no correlation, it
    says why.
    """
    if isinstance(order, Missing):
        return f"No correlation with accuracy is given: {order.missing}."
    relation = f"accuracy {ORDER[order.side]} dispersion"
    text = f"Over {order.slices} slices, {relation} ({spearman_text(order)})"
    inside = order.inside_tasks
    if inside is None:
        return f"{text}."
    numbers = f"Spearman {inside.spearman:.2f}, p = {inside.p:.3f}"
    figures = f"{numbers}, {inside.slices} slices of {inside.tasks} tasks"
    if not order.side:
        return f"{text}; inside tasks: {figures}."
    if inside.p >= 1 - LEVEL:
        return f"{text}; inside tasks no order is clear ({figures})."
    if inside.spearman * order.side > 0:
        return f"{text}; inside tasks too ({figures})."
    return f"{text}; the reverse inside tasks ({figures})."


def least_sentence(name: str, least: LeastDispersed | Missing) -> str:
    """Return a sentence on the least dispersed of the slices by the column ``name``.

    The sentence names this slice and says whether it differs clearly from all others; or it says
    why no slice can be named.
    """
    if isinstance(least, Missing):
        return f"The least dispersed {name} cannot be named: {least.missing}."
    if least.not_clear == least.others:
        apart = "which does not differ clearly from any other"
    elif least.not_clear:
        apart = f"which does not differ clearly from {least.not_clear} of the other {least.others}"
    elif least.others == 1:
        apart = "which differs clearly from the other one"
    else:
        apart = f"which differs clearly from all {least.others} others"
    return f"The least dispersed {name} is {least.slice} ({least.dispersion:.4f}), {apart}."


def slice_chart(name: str, table: SliceTable) -> dict[str, Chart]:
    """Return the chart ``slices``: accuracy against dispersion, one point for each slice.

    Slices with fewer than three documents or without a label have no point. There is no chart
    unless accuracy clearly rises or falls with dispersion (see :attr:`Association.side`).
    """
    rows = [row for row in table.rows if row.documents >= 3 and row.labelled >= 1]
    order = table.association
    if isinstance(order, Missing) or not order.side:
        return {}
    if any(math.isnan(row.dispersion_se) for row in rows):
        return {}
    lowest, *_, highest = sorted(rows, key=lambda row: row.dispersion)
    text = f"{spearman_text(order)}, over {order.slices} slices"
    ends = [
        f"{row.slice}, dispersion {row.dispersion:.4f}, accuracy {100 * row.accuracy:.1f} %"
        for row in (lowest, highest)
    ]
    chart = Chart(
        _points(name, rows),
        f"Accuracy against dispersion by {name}",
        f"{len(rows)} points. {text}. Least dispersed: {ends[0]}; most dispersed: {ends[1]}.",
        "Bars are 95 % intervals; a point names its slice on hover. If points rise to the right, the slices "
        "that the model spreads out are the ones it answers better. Slices also differ in topic and length, "
        "so one slice below another is a place to look, not a proof.",
        name="slices",
    )
    return {"slices": chart}


def _points(name: str, rows: Sequence[SliceRow]) -> Spec:
    keys = ("slice", "documents", "dispersion", "accuracy", "accuracy_low", "accuracy_high")
    values = [
        {key: getattr(row, key) for key in keys} | dispersion_bounds(row)._asdict() for row in rows
    ]
    x = numeric("dispersion", "dispersion (mean cosine distance)", axis={"tickCount": 6})
    y = numeric("accuracy", "accuracy", axis={"format": "%"})
    faint = {"type": "rule", "opacity": 0.35, "color": "var(--series-1)"}
    hover = [
        {"field": "slice", "type": "nominal", "title": name},
        {"field": "dispersion", "format": ".4f"},
        {"field": "accuracy", "format": ".1%"},
        {"field": "documents"},
    ]
    return {
        "data": {"values": values},
        "height": 230,  # it shares the first screen with the answer
        "layer": [
            mark(faint, **span("x", {**x, "field": "low"}, "high"), y=y),
            mark(faint, x=x, **span("y", {**y, "field": "accuracy_low"}, "accuracy_high")),
            mark(
                {"type": "point", "color": "var(--series-1)", "size": 70}, x=x, y=y, tooltip=hover
            ),
        ],
    }
