"""Documents by their contribution to the dispersion: are those of low contribution answered wrong?

The sign of every signal is set so that a low value means "probably wrong". AUROC is the probability
that a wrong document ranks below a right one (ties count half): 0.5 is chance, 1 separates all
wrong documents from all right ones. AUROC inside subjects counts only pairs of documents from one
subject: a signal that only separates subjects has 0.5 there.

The hard tail, the tenth of documents with the lowest contribution, is clustered by k-means on the
unit vectors (for which Euclidean and cosine k-means agree up to the centroids' lengths), from a
seeded start, in float64.

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
from lmeval_dispersion.errors import shortened
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
    """One document in the order of contributions; a field is None where the run does not record it.

    Attributes:
        rank: Place in the order, from 1 for the lowest contribution.
        contribution: Mean cosine distance of the document's vector to all other vectors.
        percentile: ``rank`` in percent of the number of documents.
        task: Task of the document.
        doc_id: Number of the document in the task.
        subject: Subject of the document.
        category: Category of the document.
        correct: Score of the answer, in [0, 1].
        prediction: The model's answer.
        top_probability: Probability of the likeliest choice.
        query_perplexity: Perplexity of the tokens of the query.
        text: Text of the document.
    """

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
    """Return every document with its rank, the lowest contribution first (see `RankedDocument`).

    Raises:
        UsageError: The run has no vectors.
        TooFewVectorsError: The run has one document.
    """
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
    """How well one signal finds wrong answers.

    A signal is a number for each document, such as the contribution, that is low if the answer is
    probably wrong.

    Attributes:
        signal: Name of the signal.
        documents: Number of labelled documents for which the signal is known.
        auroc: Probability that a document answered wrong ranks below one answered right.
        auroc_se: DeLong's standard error of ``auroc``.
        auroc_low: Lower end of the 95 % interval of ``auroc``, computed on the logit scale.
        auroc_high: Upper end of that interval.
        reliable: Whether at least 20 documents are right and 20 wrong; with fewer, ``auroc_se`` is
            too small.
        inside: AUROC over pairs of documents of the same subject or task (see :attr:`Ranking.by`);
            None if there are no such pairs.
        inside_low: Lower end of the 95 % interval of ``inside``.
        inside_high: Upper end of that interval.
        inside_pairs: Number of pairs that count for ``inside``.
        errors_5: Share of all wrong answers that the 5 % of documents with the lowest signal hold.
        errors_10: The same for the lowest 10 %.
        errors_20: The same for the lowest 20 %.
        errors_50: The same for the lowest 50 %.
        deciles: Accuracy in each tenth of the documents, the lowest signal first.
        missing: Why ``auroc`` and the figures after it were not computed; None if they were.
    """

    signal: Annotated[
        str, Col("Signal", hint="A low value means that the answer is probably wrong.")
    ]
    documents: int
    auroc: Annotated[
        float | None,
        Col(
            "AUROC",
            ".3f",
            hint="Probability that a wrong answer ranks below a right one; 0.5 by chance.",
        ),
    ] = None
    auroc_se: float = math.nan
    auroc_low: Annotated[
        float | None,
        Col(
            "95 % from",
            ".3f",
            hint="95 % interval of the AUROC (DeLong), computed on the logit scale.",
            drop=1,
        ),
    ] = None
    auroc_high: Annotated[float | None, Col("to", ".3f", drop=1)] = None
    reliable: bool = False
    inside: Annotated[
        float | None, Col("Inside", ".3f", hint="Counts only pairs of the same subject or task.")
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
    """The best signal (see `Signal`) other than the contribution: that with the highest AUROC.

    Only signals that are known for at least 20 right and 20 wrong answers are compared.

    Attributes:
        signal: Name of the signal.
        auroc: AUROC of the signal.
        low: Lower end of the 95 % interval of ``auroc``, corrected for the choice of the best of
            several signals.
        high: Upper end of that interval.
    """

    signal: str
    auroc: float
    low: float
    high: float


@dataclass(frozen=True)
class Ranking:
    """How well every signal (see `Signal`) finds wrong answers.

    Attributes:
        documents: Number of labelled documents.
        wrong: Number of documents that were answered wrong.
        cautions: Sentences on why the answers allow no conclusion, for example because they are no
            better than guessing; empty if they allow one.
        by: ``subject`` or ``task`` if signals are also judged inside each subject or task; else
            None.
        signals: The figures of each signal, the contribution first.
        best_other: The best signal other than the contribution; `Missing` if none is reliable.
    """

    documents: int
    wrong: int
    cautions: Sequence[str]
    by: str | None
    signals: Sequence[Signal]
    best_other: BestOther | Missing

    def tables(self) -> dict[str, Table]:
        """Return the table ``signals``: the figures of each signal."""
        heading = {"inside": f"Inside {self.by}s"}
        caption = "How well each signal finds wrong answers"
        return {"signals": Table.of(self.signals, caption, name="signals", headings=heading)}

    def charts(self) -> dict[str, Chart]:
        """Return the chart ``deciles``: accuracy in each tenth of the documents, by signal.

        It shows the contribution and up to three other signals, the best ones (see `Signal`). There
        is no chart if the contribution has no AUROC.
        """
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
            "For a useful signal, accuracy rises from left to right. The contribution and up to three "
            "other signals, the best ones, are shown; the table has all signals.",
        )
        return {"deciles": chart}


def signals(run: AuditRun) -> dict[str, Array]:
    """Return the run's signals (see `Signal`) by name, shape (n,) each.

    A low value means "probably wrong"; NaN where a document's value is not known. Signals that are
    not known for any document are left out.

    Raises:
        UsageError: The run has no vectors.
        TooFewVectorsError: The run has one document.
    """
    scores = {
        CONTRIBUTION: run.vectors.contributions(),
        "top probability": run.confidence,
        "query perplexity (negative)": -run.perplexity,
        "prompt length (negative)": -run.length,
    }
    return {name: values for name, values in scores.items() if not np.isnan(values).all()}


def ranking_report(run: AuditRun) -> Ranking:
    """Judge how well a run's signals (see `Signal`) find its wrong answers.

    Raises:
        UsageError: The run has no vectors, or its answers are all right or all wrong.
    """
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
        answered = "right" if right.all() else "wrong"
        return Signal(
            name, n, missing=f"all documents for which it is known were answered {answered}"
        )
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
        return Missing(f"no other signal is known for {FEWEST} right and {FEWEST} wrong answers")
    best = max(rivals, key=lambda row: row.auroc or 0.0)
    value = best.auroc or 0.0
    # Where it is 1, the bound is that of 20 documents, the fewest that a reliable row has.
    bounds = auroc_bounds(value, best.auroc_se, FEWEST, FEWEST, normal_point(len(rivals)))
    return BestOther(best.signal, value, *bounds)


def ranking_sentence(ranking: Ranking | Missing) -> str:
    """Return sentences on whether a low contribution points to wrong answers.

    A document's contribution is its mean cosine distance to all other documents. It is tested over
    all documents and, if possible, inside subjects or tasks.
    """
    if isinstance(ranking, Missing):
        reason = ranking.missing
        return f"Whether hard documents can be found by their contribution could not be tested: {reason}."
    if ranking.cautions:
        return " ".join([*ranking.cautions, "The contribution is therefore not judged."])
    ours = ranking.signals[0]
    if ours.auroc is None or ours.auroc_low is None or ours.auroc_high is None:
        return f"The contribution cannot find wrong answers: {ours.missing}."
    figure = Interval(ours.auroc, ours.auroc_low, ours.auroc_high)
    if not ours.reliable or math.isnan(figure.low):
        return (
            f"Whether a low contribution points to wrong answers is not clear with "
            f"{ranking.documents - ranking.wrong} right and {ranking.wrong} wrong answers: {FEWEST} of "
            f"each are needed (AUROC {interval_text(figure, '.2f')}, unreliable)."
        )
    inside = None
    if ours.inside is not None and ours.inside_low is not None and ours.inside_high is not None:
        inside = Interval(ours.inside, ours.inside_low, ours.inside_high)
    parts = f"{ranking.by}s"
    word = "wrong" if figure.side(0.5) > 0 else "right"
    claim = Claim(
        "A low contribution is no better than chance at finding wrong answers",
        f"A low contribution points to {word} answers",
        f"A low contribution points to {word} answers overall",
        f"Whether a low contribution finds {word} answers, or only {parts} with more {word} "
        "answers, is not clear",
    )
    return claim_sentence(claim, figure, parts, inside, nothing=0.5, spec=".2f", name="AUROC ")


def errors_sentence(ranking: Ranking | Missing) -> str:
    """Return a sentence on the share of wrong answers that documents of low contribution hold.

    These documents are the tenth with the lowest contribution (see `RankedDocument`). The sentence
    may also name the best other signal. It is "" if the contribution is not judged.
    """
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
    """One cluster of the hard tail (see `HardTail`).

    Attributes:
        cluster: Number of the cluster, from 1 for the largest.
        documents: Number of documents in the cluster.
        accuracy: Mean score of the cluster's labelled documents; None if there are none.
        contribution: Mean contribution (see `RankedDocument`) of the cluster's documents.
        subjects: The most frequent subjects, at most three, each with its number of documents, such
            as ``anatomy 12, virology 3``; "" if no subject is recorded.
    """

    cluster: Annotated[int, Col("Cluster", "d")]
    documents: Annotated[int, Col("Documents", "d", drop=1)]
    accuracy: Annotated[float | None, Col("Accuracy", ".1%")]
    contribution: float
    subjects: Annotated[str, Col("Commonest subjects")]


@dataclass(frozen=True)
class TypicalText:
    """A document near the centre of a cluster of the hard tail (see `HardTail`).

    Attributes:
        cluster: Number of the cluster.
        task: Task of the document.
        doc_id: Number of the document in the task.
        subject: Subject of the document; "" if not recorded.
        text: Text of the document; None if not recorded.
    """

    cluster: Annotated[int, Col("Cluster", "d")]
    task: str
    doc_id: int
    subject: Annotated[str, Col("Subject", drop=1)]
    text: Annotated[str | None, Col("Text")]


@dataclass(frozen=True)
class HardTail:
    """The hard tail: the tenth of documents (at most 2,000) of lowest contribution, in clusters.

    The contribution of a document is its mean cosine distance to all other documents.

    Attributes:
        documents: Number of documents in the hard tail.
        share: Share of all documents that are in the hard tail, in [0, 1].
        clusters: The clusters, the largest first.
        typical: For each cluster up to three documents, those nearest to its centre.
    """

    documents: int
    share: float
    clusters: Sequence[TailCluster]
    typical: Sequence[TypicalText]

    def tables(self) -> dict[str, Table]:
        """Return the tables ``clusters`` and ``typical`` (each cluster's most typical texts)."""
        typical = [
            replace(row, text=shortened(row.text or f"document {row.doc_id}", 160))
            for row in self.typical
        ]
        caption = "Clusters of the documents of lowest contribution, largest first"
        return {
            "clusters": Table.of(self.clusters, caption, name="clusters"),
            "typical": Table.of(typical, "Most typical texts of each cluster", name="typical"),
        }


def hard_tail(run: AuditRun, *, seed: int = 0) -> HardTail:
    """Cluster the tenth of documents (at most 2,000) with the lowest contribution.

    A document's contribution is its mean cosine distance to all other documents.

    Raises:
        UsageError: The run has no vectors.
        TooFewVectorsError: The run has one document.
    """
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
    """Cluster the rows of ``x`` (n, d) by k-means.

    Returns the number of each row's cluster, from 0, and the row's squared distance to the mean of
    that cluster, shape (n,) each. There are fewer than ``k`` clusters if fewer rows are distinct.
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
    """The documents of a run in the order of their contribution, the lowest first.

    A document's contribution is the mean cosine distance of its vector to all other vectors.
    CSV, JSON and the data frame hold all documents; a printed table shows only the first ones.

    Attributes:
        model: Name of the model.
        documents: All documents, the lowest contribution first.
        ranking: How well the contribution and other signals find wrong answers.
        hard_tail: Clusters of the tenth of documents with the lowest contribution.
    """

    template = "worst.jinja"
    schema = "dispersion-worst/1"

    model: str
    documents: Sequence[RankedDocument]
    ranking: Ranking | Missing
    hard_tail: HardTail
    _count: int = COUNT

    def tables(self) -> dict[str, Table]:
        """Return the tables ``documents``, ``signals``, ``clusters`` and ``typical``.

        They hold, in this order, the documents of lowest contribution, the figures of each signal
        (left out if the ranking is missing), the clusters of the hard tail (see `HardTail`), and
        each cluster's most typical texts.
        """
        lowest = [
            replace(row, text=shortened(row.text, 60)) for row in self.documents[: self._count]
        ]
        caption = f"{len(lowest)} of {len(self.documents)} documents, the lowest contribution first"
        return {
            "documents": Table.of(lowest, caption, name="documents"),
            **self.ranking.tables(),
            **self.hard_tail.tables(),
        }

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of CSV: every document, the lowest contribution first."""
        return [fields_of(document) for document in self.documents]

    def charts(self) -> dict[str, Chart]:
        """Return the chart ``deciles`` of the ranking; no chart if the ranking is missing."""
        return self.ranking.charts()

    def context(self) -> dict[str, Any]:
        """Return the template's variables: the sentences of the report."""
        return {
            "sentence": ranking_sentence(self.ranking),
            "errors": errors_sentence(self.ranking),
            "fewest": FEWEST,
        }


@takes(RankArguments)
def rank(asked: RankArguments) -> Worst:
    """Order documents by contribution, the lowest first, as ``dispersion audit --worst`` does.

    A document's contribution is its mean cosine distance to all other documents. The printed table
    lists ``worst`` documents; ``to_frame()`` and CSV hold all.

    Raises:
        TooFewVectorsError: The run has one document.
        StoreError: The store cannot be read, or has no such layer.
        UsageError: The run has no vectors; a run and ``demo`` are both given or both missing; a
            ``metric`` is given for a store; or ``worst`` is below 1.
        HarnessError: Samples or logs cannot be read.
    """
    count = COUNT if asked.worst is None else asked.worst
    run = read_run(asked.run, asked.layer, asked.metric, demo=asked.demo)
    return Worst(
        model=run.store.model,
        documents=ranked_documents(run),
        ranking=part_of(ranking_report, run),
        hard_tail=hard_tail(run, seed=asked.seed),
        _count=count,
    )
