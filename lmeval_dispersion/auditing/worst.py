"""The documents of a run from the lowest contribution on, and what that order is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lmeval_dispersion.auditing.charts import ranking_charts
from lmeval_dispersion.auditing.conclusions import found_sentence, ranking_sentence
from lmeval_dispersion.auditing.ranking import RankedDocument, ranked_documents, ranking_report
from lmeval_dispersion.auditing.report import GUIDE, LIBRARIES, missing_of, part_of
from lmeval_dispersion.auditing.rows import known, ranking_tables, short, tail_tables
from lmeval_dispersion.auditing.run import Run, read_run
from lmeval_dispersion.auditing.tail import hard_tail
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.document import fields_of

COUNT = 20  # documents shown


@dataclass(frozen=True)
class WorstLine:
    """One document of the low end as a table shows it."""

    rank: Annotated[int, Col("Rank", "d")]
    subject: Annotated[str | None, Col("Subject", drop=2)]
    doc_id: Annotated[int, Col("doc_id", "d")]
    contribution: Annotated[float, Col("Contribution", ".4f")]
    correct: Annotated[float | None, Col("Correct", ".2f", drop=1)]
    text: Annotated[str, Col("Text")]


@dataclass(frozen=True, repr=False)
class Worst(Report):
    """Documents by contribution, lowest first; CSV, JSON and the data frame hold every one.

    Attributes:
        model: The run's model.
        documents: Every document.
        ranking: How well that order finds wrong answers, or ``{"missing": sentence}``.
        hard_tail: The clusters of the lowest tenth.
    """

    template = "worst.jinja"
    schema = "dispersion-worst/1"
    libraries = LIBRARIES
    guide = GUIDE

    model: str
    documents: Sequence[RankedDocument]
    ranking: Mapping[str, Any]
    hard_tail: Mapping[str, Any]
    _count: int = COUNT

    def rows(self) -> list[Mapping[str, Any]]:
        """Every document, lowest contribution first."""
        return [fields_of(document) for document in self.documents]

    def tables(self) -> dict[str, Table]:
        """The lowest documents, then what the order is worth and its clusters."""
        lines = [
            WorstLine(d.rank, d.subject, d.doc_id, d.contribution, known(d.correct), short(d.text, 60))
            for d in self.documents[: self._count]
        ]
        caption = f"The {len(lines)} documents of lowest contribution of {len(self.documents)}"
        tables = {"documents": Table.of(lines, caption, name="documents")}
        if not missing_of(self.ranking):
            tables |= ranking_tables(self.ranking)
        if not missing_of(self.hard_tail):
            tables |= tail_tables(self.hard_tail)
        return tables

    def charts(self) -> dict[str, Chart]:
        """Accuracy by decile and the errors found; none without labels."""
        return {} if missing_of(self.ranking) else ranking_charts(self.ranking)

    def context(self) -> dict[str, Any]:
        """The sentences of the answer."""
        judged = "" if missing_of(self.ranking) else found_sentence(self.ranking)
        return {"sentence": ranking_sentence(self.ranking), "judged": judged, "missing_of": missing_of}


def rank(run: Run | str | Path, *, layer: str | None = None, count: int = COUNT, seed: int = 0) -> Worst:
    """Documents by their contribution, lowest first: what ``dispersion audit --worst`` reports.

    Args:
        run: Folder of the store, or a folder that holds the stores of one run.
        layer: Layer of the vectors; default: the store's own.
        count: How many documents a table shows; ``to_frame()`` and CSV hold all.
        seed: Of the clusters of the lowest tenth.

    Raises:
        TooFewVectorsError: One document.
    """
    run = read_run(run, layer)
    return Worst(
        model=run.store.model,
        documents=ranked_documents(run),
        ranking=part_of(ranking_report, run),
        hard_tail=part_of(hard_tail, run, seed=seed),
        _count=count,
    )
