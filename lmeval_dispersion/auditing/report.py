"""The whole audit of one run as a report; docs/reference/audit.md is its JSON's contract.

A part that cannot be had is ``{"missing": sentence}``, and the others still appear. Where right and wrong
answers are no evidence, the parts that are told by them are left out, and not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmeval_dispersion.auditing import rows as shown_rows
from lmeval_dispersion.auditing.answers import answers_report
from lmeval_dispersion.auditing.calibration import calibrate, calibration_sentence
from lmeval_dispersion.auditing.charts import (
    mixture_charts,
    paper_protocol_chart,
    ranking_charts,
    slice_chart,
)
from lmeval_dispersion.auditing.conclusions import (
    association_sentence,
    found_sentence,
    least_dispersed_text,
    order_text,
    pools_sentence,
    ranking_sentence,
)
from lmeval_dispersion.auditing.mixtures import mixture_curves
from lmeval_dispersion.auditing.paper import paper_protocol
from lmeval_dispersion.auditing.ranking import ranking_report
from lmeval_dispersion.auditing.run import FEWEST, Run, read_run
from lmeval_dispersion.auditing.slices import all_documents, slice_row, slice_table, slicings
from lmeval_dispersion.auditing.tail import hard_tail
from lmeval_dispersion.errors import DispersionError
from lmeval_dispersion.report import Chart, Report, Table

LIBRARIES = ("numpy", "pandas", "scikit-learn")
GUIDE = "docs/reference/audit.md"
JUDGED = {"mixtures": "mixtures", "calibration": "calibration", "paper_protocol": "the paper's protocol",
          "ranking": "ranking"}  # fmt: skip
_ENDS = 5  # slices of each end that a short table shows
_LOWEST = 20  # documents of the low end that a ranking shows


@dataclass(frozen=True, repr=False)
class Audit(Report):
    """The audit of one run.

    Attributes:
        seed: Of everything that is drawn.
        run: What was measured on what.
        overall: The whole run as one slice.
        answers: How the model answers, and why right and wrong answers support no conclusion (``cautions``).
        notes: What was left out or counted otherwise.
        slices: Way to slice -> its slices, the least dispersed one, and the association with accuracy.
        mixtures, calibration, paper_protocol, ranking, hard_tail: The parts, or ``{"missing": sentence}``.
    """

    template = "audit.jinja"
    schema = "dispersion-audit/3"
    libraries = LIBRARIES
    guide = GUIDE

    seed: int
    run: Mapping[str, Any]
    overall: Mapping[str, Any]
    answers: Mapping[str, Any]
    notes: Sequence[str]
    slices: Mapping[str, Mapping[str, Any]]
    mixtures: Mapping[str, Any]
    calibration: Any
    paper_protocol: Any
    ranking: Mapping[str, Any]
    hard_tail: Mapping[str, Any]
    _left_out: Sequence[str] = ()
    _short: bool = False

    @property
    def cautions(self) -> Sequence[str]:
        """Why right and wrong answers support no conclusion; empty where they may."""
        return list(self.answers["cautions"])

    def has(self, part: str) -> bool:
        """Whether a part could be had."""
        return not missing_of(getattr(self, part))

    @property
    def missing(self) -> dict[str, str]:
        """Parts that could not be had, and why; those that were left out on purpose are not among them."""
        parts = [*JUDGED, "hard_tail"]
        return {
            part: missing_of(getattr(self, part))
            for part in parts
            if not self.has(part) and part not in self._left_out
        }

    def rows(self) -> list[Mapping[str, Any]]:
        """Every slice of every slicing, the whole run first."""
        tables = {"all": {"rows": [self.overall]}, **self.slices}
        return [{"by": name, **row} for name, table in tables.items() for row in table["rows"]]

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``dispersion-audit/3``."""
        content = super().to_dict()
        content["calibration"].pop("_calibrator", None)
        return content

    def tables(self) -> dict[str, Table]:
        """Every table by its anchor."""
        tables = {f"slices-{name}": self._slice_table(name) for name in self.slices} or {
            "slices-slice": shown_rows.slices_table("slice", [], self.overall)
        }
        if self.has("mixtures") and self.mixtures["curve"]:
            tables["mixtures"] = shown_rows.curve_table(self.mixtures)
        if self.has("calibration"):
            tables["calibration"] = self.calibration.tables()["estimators"]
        if self.has("paper_protocol"):
            errors = self.paper_protocol.errors
            tables["paper"] = Table.of(errors, "Errors of the paper's protocol", name="paper-protocol")
        if self.has("ranking"):
            tables |= shown_rows.ranking_tables(self.ranking)
        if self.has("hard_tail"):
            tables |= shown_rows.tail_tables(self.hard_tail)
        return tables

    def _slice_table(self, name: str) -> Table:
        table = self.slices[name]
        most = _ENDS if self._short else 0
        return shown_rows.slices_table(name, table["rows"], self.overall, ends=most)

    def charts(self) -> dict[str, Chart]:
        """Every chart by name, the slices first."""
        charts: dict[str, Chart] = {}
        for name, table in list(self.slices.items())[:1]:
            if picture := slice_chart(name, table):
                charts["slices"] = picture
        if self.has("mixtures") and self.mixtures["curve"]:
            charts |= mixture_charts(self.mixtures)
        if self.has("calibration"):
            charts |= {key: c for key, c in self.calibration.charts().items() if key == "points"}
        if self.has("paper_protocol"):
            charts["paper"] = paper_protocol_chart(self.paper_protocol)
        if self.has("ranking"):
            charts |= ranking_charts(self.ranking)
        return charts

    def context(self) -> dict[str, Any]:
        """Sentences and names that the template puts in their places."""
        curves = self.has("mixtures") and bool(self.mixtures["curve"])
        return {
            "summary": summary(self),
            "left_out": [JUDGED[part] for part in self._left_out if part in JUDGED],
            "facts_of_run": shown_rows.run_facts(self.run, self.overall, self.answers),
            "associations": {
                name: association_sentence(table["association"])
                if "spearman" in table["association"] or self.run["labelled"]
                else ""
                for name, table in self.slices.items()
            },
            "mixture_lines": shown_rows.mixture_lines(self.mixtures) if curves else [],
            "curves": curves,
            "found": found_sentence(self.ranking) if self.has("ranking") else "",
            "fewest": FEWEST,
            "unfounded": f"{' '.join(self.cautions)} Nothing in this section is a finding.",
            "ranks": "rankme" in self.overall,
        }


def audit(
    run: Run | str | Path,
    *,
    layer: str | None = None,
    slices: Sequence[str] = (),
    metrics: Literal["dispersion", "all"] = "dispersion",
    seed: int = 0,
    details: bool = False,
    short: bool = False,
) -> Audit:
    """The audit of one run, as ``dispersion audit`` reports it; undefined numbers are NaN.

    Args:
        run: Folder of the store, or a folder that holds the stores of one run.
        layer: Layer of the vectors; default: the store's own.
        slices: Columns of the documents to slice by, beside those that the run itself suggests.
        metrics: ``all``: also RankMe, effective rank, participation ratio and stable rank of every slice.
        seed: Of everything that is drawn.
        details: Whether to compute the parts that are no finding too.
        short: Whether to compute no more than the answer needs, in the first slicing.

    Returns:
        The report ``dispersion-audit/3`` (``docs/reference/audit.md``); ``to_dict()``, ``to_frame()``,
        ``to_markdown()``, ``to_html()`` and ``plot()`` give its forms.

    Raises:
        StoreError: ``run`` is no store, or one that cannot be read.
        UsageError: The layer or a column is not there.
    """
    run = read_run(run, layer)
    raw = run.raw_vectors if metrics == "all" else None
    ways = slicings(run, slices)
    if short:
        ways = {name: parts for i, (name, parts) in enumerate(ways.items()) if not i or name in slices}
    answers = answers_report(run)
    silent = bool(answers["cautions"]) and not details
    left_out = list(JUDGED) if silent else ["paper_protocol"] if short else []

    def part(name: str, build: Callable[..., Any], **options: Any) -> Any:
        if name in left_out:
            return {"missing": "left out; --details computes it"}
        return part_of(build, run, **options)

    return Audit(
        seed=seed,
        run=run.describe(),
        overall=slice_row(run, all_documents(run), raw),
        answers=answers,
        notes=list(run.notes),
        slices={name: slice_table(run, parts, raw) for name, parts in ways.items()},
        mixtures=part("mixtures", mixture_curves, seed=seed, curves=not short),
        calibration=part("calibration", calibrate, seed=seed, labels=False, answers=answers),
        paper_protocol=part("paper_protocol", paper_protocol, seed=seed),
        ranking=part("ranking", ranking_report, answers=answers),
        hard_tail={"missing": "left out; --details computes it"}
        if short
        else part("hard_tail", hard_tail, seed=seed),
        _left_out=[*left_out, *(["hard_tail"] if short else [])],
        _short=short,
    )


def missing_of(part: Any) -> str:
    """Why a part could not be had; empty where it could."""
    return str(part.get("missing", "")) if isinstance(part, Mapping) else ""


def part_of(build: Callable[..., Any], run: Run, **options: Any) -> Any:
    """A part of a report, or why it cannot be had: ``{"missing": sentence}``."""
    try:
        return build(run, **options)
    except DispersionError as error:
        return {"missing": str(error)}


def summary(report: Audit) -> list[str]:
    """What the run says: weak slices, right and wrong answers, documents to look at, calibration.

    Where right and wrong answers are no evidence, why comes first, and nothing that depends on them is said.
    """
    if not report.run["labelled"]:
        unlabelled = "No document has a label: what dispersion says about right answers cannot be tested."
        return [slices_sentence(report), unlabelled]
    if cautions := report.cautions:
        return [f"No verdict: {cautions[0][0].lower()}{cautions[0][1:]}", *cautions[1:],
                slices_sentence(report, judged=False)]  # fmt: skip
    return [
        slices_sentence(report),
        pools_sentence(report.mixtures),
        ranking_sentence(report.ranking),
        calibration_sentence(report.calibration),
    ]


def slices_sentence(audit: Audit, *, judged: bool = True) -> str:
    """How dispersed the run is, its least dispersed slice, and whether accuracy follows dispersion."""
    whole, count = audit.overall, audit.run["documents"]
    if math.isnan(whole["dispersion"]):
        return f"The run has {count} document{'s' if count > 1 else ''}: {whole['reason']}."
    start = f"The {count} documents have a dispersion of {whole['dispersion']:.4f}"
    if not math.isnan(whole["accuracy"]):
        start += f" at {100 * whole['accuracy']:.1f} % accuracy"
    name = next(iter(audit.slices), None)
    if name is None:
        return f"{start}, and nothing divides them into slices."
    table = audit.slices[name]
    text = f"{start}; {least_dispersed_text(name, table['least_dispersed'])}"
    if "missing" in table["association"] or not judged:
        return f"{text}."
    return f"{text}. {order_text(table['association'])}."
