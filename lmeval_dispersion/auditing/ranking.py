"""Documents by contribution: does the model get those of lowest contribution wrong?

Every signal is turned so that a low value means "probably wrong". AUROC is the probability that a wrong
document ranks below a right one (ties count half): 0.5 is chance, 1 separates them. Inside subjects only
pairs of one subject count: a signal that only separates subjects has 0.5 there.

The hard tail, the tenth of lowest contribution, is clustered by k-means on the unit vectors (for which
Euclidean and cosine k-means agree up to the centroids' lengths), from a seeded start, in float64.

Source: RD section 3.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.auditing.arguments import RankArguments
from lmeval_dispersion.auditing.figures import (
    Claim,
    RunReport,
    claim_sentence,
    interval_text,
    lines,
    shortened,
)
from lmeval_dispersion.auditing.run import (
    FEWEST,
    Array,
    AuditRun,
    Missing,
    Rows,
    check_labels,
    part_of,
    read_run,
)
from lmeval_dispersion.auditing.slices import Slice, strata
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Chart, Col, Table
from lmeval_dispersion.report.document import fields_of
from lmeval_dispersion.report.vega import numeric
from lmeval_dispersion.statistics import (
    Interval,
    auroc,
    auroc_bounds,
    normal_point,
    stratified_auroc,
)

CONTRIBUTION = "contribution"
SHARES = (5, 10, 20, 50)  # per cent of the documents, lowest first
TAIL = 0.1  # share of the documents, from the low end
_MOST = 2000  # most documents to cluster, lowest first
_CLUSTERS = 8  # most clusters of the hard tail
_TYPICAL = 3  # texts shown of a cluster
COUNT = 20  # documents of lowest contribution in a table


@dataclass(frozen=True)
class RankedDocument:
    """One document: ``rank`` from 1 and ``percentile`` by its contribution; None where nothing is stored."""

    rank: Annotated[int, Col("Rank", "d")]
    contribution: Annotated[float, Col("Contribution", ".4f")]
    percentile: float
    task: str
    doc_id: Annotated[int, Col("doc_id", "d")]
    subject: Annotated[str | None, Col("Subject", drop=2)]
    category: str | None
    correct: Annotated[float | None, Col("Correct", ".2f", drop=1)]
    prediction: str | None
    top_probability: float | None
    query_perplexity: float | None
    text: Annotated[str | None, Col("Text")]


def ranked_documents(run: AuditRun) -> list[RankedDocument]:
    """Every document, lowest contribution first; UsageError without vectors, TooFewVectorsError for one."""
    frame = run.documents.assign(
        contribution=run.vectors.contributions(), correct=run.score, top_probability=run.confidence
    ).sort_values("contribution", kind="stable")
    rank = np.arange(1, len(frame) + 1)
    frame = frame.assign(rank=rank, percentile=100 * rank / len(rank))
    frame = frame[[field.name for field in fields(RankedDocument)]].astype(object)
    return [
        RankedDocument(*row) for row in frame.where(frame.notna(), None).itertuples(index=False)
    ]


@dataclass(frozen=True)
class Signal:
    """How well one signal finds wrong answers; ``missing`` explains absent figures.

    Attributes:
        auroc, auroc_se, auroc_low, auroc_high: DeLong's, with the interval on the logit scale.
        reliable: Whether 20 documents are right and 20 wrong: DeLong's error is too short below.
        inside, inside_low, inside_high, inside_pairs: Over pairs inside one part of :attr:`Ranking.by`.
        errors_5, errors_10, errors_20, errors_50: Share of all errors in the lowest k %.
        deciles: Accuracy of each tenth of the documents, lowest signal first.
    """

    signal: Annotated[str, Col("Signal", hint="Its sign is set so that low means probably wrong.")]
    documents: int
    auroc: Annotated[
        float | None,
        Col(
            "AUROC",
            ".3f",
            hint="Chance that a wrong document ranks below a right one; 0.5 is chance.",
        ),
    ] = None
    auroc_se: float = math.nan
    auroc_low: Annotated[
        float | None, Col("95 % from", ".3f", hint="DeLong, by the logit.", drop=1)
    ] = None
    auroc_high: Annotated[float | None, Col("to", ".3f", drop=1)] = None
    reliable: bool = False
    inside: Annotated[
        float | None, Col("Inside", ".3f", hint="Counts only pairs inside one part.")
    ] = None
    inside_low: Annotated[float | None, Col("95 % from", ".3f", drop=1)] = None
    inside_high: Annotated[float | None, Col("to", ".3f", drop=1)] = None
    inside_pairs: int = 0
    errors_5: Annotated[float | None, Col("Errors in lowest 5 %", ".1%", short="5 %", drop=2)] = (
        None
    )
    errors_10: Annotated[float | None, Col("10 %", ".1%", drop=1)] = None
    errors_20: Annotated[float | None, Col("20 %", ".1%", drop=3)] = None
    errors_50: Annotated[float | None, Col("50 %", ".1%", drop=4)] = None
    deciles: Sequence[float] = ()
    missing: Annotated[str | None, Col("Remark")] = None


@dataclass(frozen=True)
class BestOther:
    """The reliable signal of highest AUROC but the contribution; its 95 % interval allows for the choice."""

    signal: str
    auroc: float
    low: float
    high: float


@dataclass(frozen=True)
class Ranking:
    """How well every signal finds wrong answers, the contribution first.

    Attributes:
        documents, wrong: Number of labelled documents, and of wrong ones.
        cautions: Why right and wrong answers support no conclusion; empty where they may.
        by: ``subject`` or ``task`` where signals are also judged inside these; else None.
    """

    documents: int
    wrong: int
    cautions: Sequence[str]
    by: str | None
    signals: Sequence[Signal]
    best_other: BestOther | Missing

    def tables(self) -> dict[str, Table]:
        """``signals``: each signal's figures."""
        heading = {"inside": f"Inside {self.by}s"}
        caption = "How well each signal finds wrong answers"
        return {"signals": Table.of(self.signals, caption, name="signals", headings=heading)}

    def charts(self) -> dict[str, Chart]:
        """``deciles``: accuracy by tenth, of contribution and three best others; none without its AUROC."""
        ours, *others = self.signals
        if ours.missing:
            return {}
        known = [row for row in others if not row.missing]
        known.sort(key=lambda row: -(row.auroc or 0.0))
        drawn = [ours, *known[:3]]
        deciles = []
        for row in drawn:
            for i, accuracy in enumerate(row.deciles, 1):
                deciles.append({"series": row.signal, "decile": i, "accuracy": accuracy})
        areas = "; ".join(f"{row.signal} {row.auroc:.3f}" for row in drawn)
        title = "tenth of the documents, lowest signal first"
        tenths = {"field": "decile", "type": "ordinal", "title": title, "axis": {"labelAngle": 0}}
        chart = Chart(
            lines(deciles, tenths, numeric("accuracy", "accuracy", axis={"format": "%"})),
            "Accuracy by decile of each signal",
            f"By contribution, accuracy goes from {100 * ours.deciles[0]:.1f} % in the lowest tenth to "
            f"{100 * ours.deciles[-1]:.1f} % in the highest. AUROC: {areas}.",
            "A useful signal rises from left to right. The contribution and the three best other signals are "
            "shown; the table has all.",
        )
        return {"deciles": chart}


def signals(run: AuditRun) -> dict[str, Array]:
    """The signals that a run has, by name, (n,) each: low for "probably wrong", NaN where unknown."""
    scores = {
        CONTRIBUTION: run.vectors.contributions(),
        "top probability": run.confidence,
        "query perplexity (negative)": -run.perplexity,
        "prompt length (negative)": -run.length,
    }
    return {name: values for name, values in scores.items() if not np.isnan(values).all()}


def ranking_report(run: AuditRun) -> Ranking:
    """Judge a run's signals; UsageError without vectors, or without right and wrong answers."""
    check_labels(run, "ranking quality needs")
    scores = signals(run)
    by, parts = _judged_inside(run, scores[CONTRIBUTION])
    table = [_signal(name, values, run, parts) for name, values in scores.items()]
    return Ranking(
        documents=len(run.labelled),
        wrong=int((~run.right[run.labelled]).sum()),
        cautions=run.answers.cautions,
        by=by,
        signals=table,
        best_other=_best_other(table),
    )


def _judged_inside(run: AuditRun, contribution: Array) -> tuple[str | None, list[Slice]]:
    """The first of subjects and tasks that has a right and a wrong document in one part."""
    for name, parts in strata(run).items():
        if _inside(contribution, parts, run):
            return name, parts
    return None, []


def _signal(name: str, values: Array, run: AuditRun, parts: list[Slice]) -> Signal:
    known = run.labelled[~np.isnan(values[run.labelled])]
    signal = values[known]
    right = run.right[known]
    n = len(known)
    if right.all() or not right.any():
        return Signal(name, n, missing="its documents are all right or all wrong")
    if np.ptp(signal) == 0:
        return Signal(name, n, missing="it is the same for all documents")
    area = auroc(signal, right)
    low, high = auroc_bounds(*area[:4])
    in_order = right[np.argsort(signal, kind="stable")]
    errors = dict[str, Any]()
    for share in SHARES:
        lowest = in_order[: max(round(n * share / 100), 1)]
        errors[f"errors_{share}"] = float((~lowest).sum() / (~right).sum())
    return Signal(
        name,
        n,
        auroc=area.value,
        auroc_se=area.se,
        auroc_low=low,
        auroc_high=high,
        reliable=min(area.right, area.wrong) >= FEWEST,
        deciles=[float(tenth.mean()) for tenth in np.array_split(in_order, min(10, n))],
        **_inside(values, parts, run),
        **errors,
    )


def _inside(values: Array, parts: list[Slice], run: AuditRun) -> dict[str, Any]:
    """A :class:`Signal`'s fields on pairs of a right and a wrong document of one part; {} without any."""
    known = ~np.isnan(values) & ~np.isnan(run.score)
    area = stratified_auroc(values, run.right, [part.rows[known[part.rows]] for part in parts])
    if area is None:
        return {}
    low, high = auroc_bounds(*area[:4])
    return {
        "inside": area.value,
        "inside_low": low,
        "inside_high": high,
        "inside_pairs": area.pairs,
    }


def _best_other(table: Sequence[Signal]) -> BestOther | Missing:
    rivals = [row for row in table[1:] if row.reliable]
    if not rivals:
        return Missing(f"no other signal has {FEWEST} right and {FEWEST} wrong documents")
    best = max(rivals, key=lambda row: row.auroc or 0.0)
    value = best.auroc or 0.0
    # Where it is 1, the bound is that of 20 documents, the fewest that a reliable row has.
    bounds = auroc_bounds(value, best.auroc_se, FEWEST, FEWEST, normal_point(len(rivals)))
    return BestOther(best.signal, value, *bounds)


def ranking_sentence(ranking: Ranking | Missing) -> str:
    """A sentence: does a low contribution find wrong answers, over all and inside subjects or tasks?"""
    if isinstance(ranking, Missing):
        reason = ranking.missing
        return f"Whether hard documents can be found by their contribution could not be tested: {reason}."
    if ranking.cautions:
        return " ".join([*ranking.cautions, "The contribution is therefore not judged."])
    ours = ranking.signals[0]
    if ours.auroc is None or ours.auroc_low is None or ours.auroc_high is None:
        return f"The contribution finds no wrong answers: {ours.missing}."
    figure = Interval(ours.auroc, ours.auroc_low, ours.auroc_high)
    if not ours.reliable or math.isnan(figure.low):
        return (
            f"Whether a low contribution points at wrong answers is not clear with "
            f"{ranking.documents - ranking.wrong} right and {ranking.wrong} wrong documents: {FEWEST} of "
            f"each are needed (AUROC {interval_text(figure, '.2f')}, unreliable)."
        )
    inside = None
    if ours.inside is not None and ours.inside_low is not None and ours.inside_high is not None:
        inside = Interval(ours.inside, ours.inside_low, ours.inside_high)
    parts = f"{ranking.by}s"
    word = "wrong" if figure.side(0.5) > 0 else "right"
    claim = Claim(
        "A low contribution is no better than chance at finding wrong answers",
        f"A low contribution points at {word} answers",
        f"A low contribution points at {word} answers over all",
        f"Whether a low contribution finds {word} answers, or {parts} that have more of them, is not clear",
    )
    return claim_sentence(claim, figure, parts, inside, nothing=0.5, spec=".2f", name="AUROC ")


def errors_sentence(ranking: Ranking | Missing) -> str:
    """A sentence: the lowest tenth's share of the errors, and the best other signal; empty if not judged."""
    if isinstance(ranking, Missing) or ranking.cautions or ranking.signals[0].missing:
        return ""
    share = ranking.signals[0].errors_10 or 0.0
    text = f"The lowest tenth of the documents holds {100 * share:.0f} % of the errors"
    best = ranking.best_other
    if isinstance(best, Missing):
        return f"{text}."
    if best.low > 0.5:
        return f"{text}; the best other signal is {best.signal} (AUROC {best.auroc:.2f})."
    return f"{text}; no other signal is clearly better than chance."


@dataclass(frozen=True)
class TailCluster:
    """One cluster in the hard tail: mean score (None without labels), mean contribution, three subjects."""

    cluster: Annotated[int, Col("Cluster", "d")]
    documents: Annotated[int, Col("Documents", "d", drop=1)]
    accuracy: Annotated[float | None, Col("Accuracy", ".1%")]
    contribution: float
    subjects: Annotated[str, Col("Commonest subjects")]


@dataclass(frozen=True)
class TypicalText:
    """A document near a cluster's centre; ``text`` is None and ``subject`` empty if not stored."""

    cluster: Annotated[int, Col("Cluster", "d")]
    task: str
    doc_id: int
    subject: Annotated[str, Col("Subject", drop=1)]
    text: Annotated[str | None, Col("Text")]


@dataclass(frozen=True)
class HardTail:
    """Clusters of the tenth of documents with the lowest contribution, largest first, with typical texts."""

    documents: int
    share: float
    clusters: Sequence[TailCluster]
    typical: Sequence[TypicalText]

    def tables(self) -> dict[str, Table]:
        """``clusters``, and ``typical``: the texts nearest to their centres."""
        typical = [
            replace(row, text=shortened(row.text or f"document {row.doc_id}", 160))
            for row in self.typical
        ]
        caption = "Clusters of the hard tail, largest first"
        return {
            "clusters": Table.of(self.clusters, caption, name="clusters"),
            "typical": Table.of(typical, "Most typical texts of each cluster", name="typical"),
        }


def hard_tail(run: AuditRun, *, seed: int = 0) -> HardTail:
    """Clusters of the tenth (2,000 at most) of lowest contribution; raises as :func:`ranked_documents`."""
    contribution = run.vectors.contributions()
    order = np.argsort(contribution, kind="stable")
    rows = order[: min(max(round(len(order) * TAIL), 1), _MOST)]
    count = max(1, min(_CLUSTERS, math.isqrt(len(rows) // 2)))
    labels, distance = clustered(run.vectors.rows[rows], count, seed=seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    members.sort(key=len, reverse=True)
    clusters = []
    typical = []
    for number, places in enumerate(members, 1):
        documents = run.documents.iloc[rows[places]]
        scores = run.score[rows[places]]
        scores = scores[~np.isnan(scores)]
        subjects = Counter(documents["subject"].dropna())
        common = sorted(subjects.items(), key=lambda item: (-item[1], str(item[0])))[:3]
        clusters.append(
            TailCluster(
                cluster=number,
                documents=len(places),
                accuracy=float(scores.mean()) if scores.size else None,
                contribution=float(contribution[rows[places]].mean()),
                subjects=", ".join(f"{name} {times}" for name, times in common),
            )
        )
        nearest = np.argsort(distance[places], kind="stable")[:_TYPICAL]
        shown = documents.iloc[nearest].astype(object)
        named: Any = shown.where(shown.notna(), None).itertuples()
        for row in named:
            subject = row.subject or ""
            typical.append(TypicalText(number, str(row.task), int(row.doc_id), subject, row.text))
    return HardTail(len(rows), len(rows) / len(order), clusters, typical)


def clustered(x: NDArray[np.float32], k: int, *, seed: int = 0) -> tuple[Rows, Array]:
    """k-means of ``x`` (n, d): each row's cluster, and its squared distance to the cluster's mean, (n,) each.

    Fewer than ``k`` clusters where fewer rows are distinct.
    """
    from sklearn.cluster import KMeans

    # One start, and sums in one thread's order: equal input gives equal bytes.
    model = KMeans(
        min(k, len(np.unique(x, axis=0))), n_init=1, random_state=seed, algorithm="lloyd"
    )
    rows = x.astype(np.float64)
    labels = model.fit_predict(rows).astype(np.int64)
    return labels, np.square(rows - model.cluster_centers_[labels]).sum(axis=1)


@dataclass(frozen=True, repr=False)
class Worst(RunReport):
    """Documents by contribution, lowest first; CSV, JSON and the data frame hold all."""

    template = "worst.jinja"
    schema = "dispersion-worst/1"

    model: str
    documents: Sequence[RankedDocument]
    ranking: Ranking | Missing
    hard_tail: HardTail
    _count: int = COUNT

    def tables(self) -> dict[str, Table]:
        """``documents`` of lowest contribution, ``signals`` unless missing, ``clusters`` and ``typical``."""
        lowest = [
            replace(row, text=shortened(row.text, 60)) for row in self.documents[: self._count]
        ]
        caption = f"The {len(lowest)} documents of lowest contribution of {len(self.documents)}"
        return {
            "documents": Table.of(lowest, caption, name="documents"),
            **self.ranking.tables(),
            **self.hard_tail.tables(),
        }

    def rows(self) -> list[Mapping[str, Any]]:
        """Every document, lowest contribution first."""
        return [fields_of(document) for document in self.documents]

    def charts(self) -> dict[str, Chart]:
        """``deciles``: accuracy by decile; none where the ranking is missing."""
        return self.ranking.charts()

    def context(self) -> dict[str, Any]:
        """Template values: the answer's sentences."""
        return {
            "sentence": ranking_sentence(self.ranking),
            "errors": errors_sentence(self.ranking),
            "fewest": FEWEST,
        }


@takes(RankArguments)
def rank(asked: RankArguments) -> Worst:
    """Documents by their contribution, lowest first, as in ``dispersion audit --worst``.

    A table lists ``worst`` of them, without a number 20; ``to_frame()`` and CSV hold all.

    Raises:
        TooFewVectorsError: One document.
        UsageError: The run has no vectors, no such layer, or cannot be read (HarnessError: samples); neither
            a run nor ``demo``, or both; ``worst`` is below 1.
    """
    count = COUNT if asked.worst is None else asked.worst
    if count < 1:
        raise UsageError(f"expected 1 or more, got {count}", argument="worst")
    run = read_run(asked.run, asked.layer, asked.metric, demo=asked.demo)
    return Worst(
        model=run.store.model,
        documents=ranked_documents(run),
        ranking=part_of(ranking_report, run),
        hard_tail=hard_tail(run, seed=asked.seed),
        _count=count,
    )
