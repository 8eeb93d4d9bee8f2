"""The report of ``dispersion audit`` on one run; docs/reference/audit.md has the JSON.

A part that cannot be computed is ``{"missing": sentence}``; the others still appear. Where right and wrong
answers are not evidence, the parts judged by them are left out and not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.auditing.arguments import Auditing
from lmeval_dispersion.auditing.calibrating.calibration import Calibration, calibrate
from lmeval_dispersion.auditing.figures import RunReport, shortened
from lmeval_dispersion.auditing.mixtures.curves import Mixtures, mixture_curves, pools_sentence
from lmeval_dispersion.auditing.mixtures.protocol import PaperProtocol, paper_protocol
from lmeval_dispersion.auditing.ranking import (
    HardTail,
    Ranking,
    errors_sentence,
    hard_tail,
    ranking_report,
    ranking_sentence,
)
from lmeval_dispersion.auditing.reliability import Reliability, reliability, reliability_sentence
from lmeval_dispersion.auditing.run import (
    FEWEST,
    Answers,
    AuditRun,
    Missing,
    Rows,
    RunFacts,
    answers_of,
    first_occurrences,
    part_of,
    read_run,
)
from lmeval_dispersion.auditing.slices import (
    ORDER,
    SliceRow,
    SliceTable,
    SpectrumRow,
    all_documents,
    association_sentence,
    least_sentence,
    shown_slices,
    slice_chart,
    slice_row,
    slice_table,
    slicings,
    weakest,
)
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry.centred import CentredVectors
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.report import Chart, Table
from lmeval_dispersion.report.declared import count
from lmeval_dispersion.report.document import fields_of

#: Parts that right and wrong answers judge, by their names in sentences.
JUDGED = {
    "mixtures": "mixtures",
    "calibration": "calibration",
    "paper_protocol": "the paper's protocol",
    "ranking": "ranking",
}
_LEFT_OUT = Missing("left out; the details have it")


@dataclass(frozen=True, repr=False)
class Audit(RunReport):
    """The audit of one run; a missing part gives its reason.

    Attributes:
        run: The model, the texts and the settings.
        overall: The whole run as one slice.
        notes: Documents that were left out or counted otherwise.
        filters: Filters of a task that differ by more than chance from the one that scores.
        slices: By column: its slices, the least dispersed one, and the association with accuracy.
    """

    template = "audit.jinja"
    schema = "dispersion-audit/3"

    seed: int
    run: RunFacts
    overall: SliceRow | SpectrumRow
    answers: Answers
    notes: Sequence[str]
    slices: Mapping[str, SliceTable]
    reliability: Reliability | Missing
    mixtures: Mixtures | Missing
    calibration: Calibration | Missing
    paper_protocol: PaperProtocol | Missing
    ranking: Ranking | Missing
    hard_tail: HardTail | Missing
    filters: Sequence[str] = ()
    _short: bool = False
    _repeated: int = 0  # documents left out, as they repeat another

    @property
    def cautions(self) -> Sequence[str]:
        """Why right and wrong answers support no conclusion; empty where they may."""
        return self.answers.cautions

    def has(self, part: str) -> bool:
        """Whether the part with this name was computed: not missing, and not left out."""
        return not isinstance(getattr(self, part), Missing)

    @property
    def left_out(self) -> list[str]:
        """Names of parts that were left out on purpose."""
        return [name for name, part in vars(self).items() if part == _LEFT_OUT]

    @property
    def missing(self) -> dict[str, str]:
        """Part -> why it could not be computed; without parts left out on purpose.

        Confidence is never listed: many questions have no choices.
        """
        parts = {name: part for name, part in vars(self).items() if isinstance(part, Missing)}
        return {
            name: part.missing
            for name, part in parts.items()
            if name not in ("reliability", *self.left_out)
        }

    def rows(self) -> list[Mapping[str, Any]]:
        """Every slice by every column, the whole run first."""
        rows = [
            ("all", self.overall),
            *((by, row) for by, t in self.slices.items() for row in t.rows),
        ]
        return [{"by": by, **fields_of(row)} for by, row in rows]

    def tables(self) -> dict[str, Table]:
        """Every table by its anchor in the page."""
        slices = {name: table.rows for name, table in self.slices.items()} or {"slice": []}
        tables = {
            f"slices-{name}": shown_slices(name, rows, self.overall)
            for name, rows in slices.items()
        }
        for part in (
            self.reliability,
            self.mixtures,
            self.ranking,
            self.hard_tail,
            self.paper_protocol,
        ):
            if not isinstance(part, Missing):
                tables |= part.tables()
        if not isinstance(self.calibration, Missing):
            tables["calibration"] = self.calibration.tables()["estimators"]
        return tables

    def charts(self) -> dict[str, Chart]:
        """Every chart by name: ``slices`` (of the first slicing), and those of parts that were computed."""
        charts: dict[str, Chart] = {}
        for name, table in list(self.slices.items())[:1]:
            if picture := slice_chart(name, table):
                charts["slices"] = picture
        for part in (self.reliability, self.mixtures, self.calibration, self.ranking):
            if not isinstance(part, Missing):
                charts |= part.charts()
        return charts

    def context(self) -> dict[str, Any]:
        """Template values: sentences and names."""
        return {
            "opening": self._opening(),
            "pools": pools_sentence(self.mixtures) if self._judged else "",
            "conclusions": list(self._conclusions()),
            "left_out": [JUDGED[part] for part in self.left_out if part in JUDGED],
            "associations": self._associations(),
            "shortened": shortened,
            "errors": errors_sentence(self.ranking),
            "fewest": FEWEST,
            "warnings": self._warnings(),
            "ranks": isinstance(self.overall, SpectrumRow),
        }

    def _warnings(self) -> dict[str, str]:
        """The warning at the head of a section that is missing, or whose answers are not evidence."""
        warnings = {name: f"Not available: {reason}." for name, reason in self.missing.items()}
        if self.cautions:
            unfounded = f"{' '.join(self.cautions)} Nothing in this section is a finding."
            judged = [
                name for name in JUDGED if self.has(name) and name != "ranking"
            ]  # it has its own
            warnings |= dict.fromkeys(judged, unfounded)
        return warnings

    def _opening(self) -> list[str]:
        """The answer: a finding and the numbers, which come first where labels cannot be saved."""
        warnings = self.answers.warnings
        if self.cautions and self.run["labelled"]:
            first, *more = self.cautions
            return [f"No verdict: {first[0].lower()}{first[1:]}", *more, *warnings, self._numbers()]
        if not isinstance(self.calibration, Missing) and not self.calibration.better:
            return [*warnings, self._numbers(), self._finding()]
        return [*warnings, self._finding(), self._numbers()]

    def _finding(self) -> str:
        if not self.run["labelled"]:
            return "No document has a label, so nothing about right answers can be tested."
        if not self.run["width"]:
            none = "No document has choices, so the model's confidence cannot be checked."
            return self._confidence() or none
        if isinstance(self.calibration, Missing):
            return pools_sentence(self.mixtures)
        estimators = self.calibration.estimators
        ours, alone, where = estimators[0], estimators[-1], f"on {self.calibration.where} held out"
        if ours.better:
            return (
                f"Labels can be saved here: accuracy read off dispersion is {ours.mae:.1f} points off "
                f"{where}, the labelled accuracy alone {alone.mae:.1f}: worth {ours.worth:.0f} "
                "labels a slice."
            )
        other = ""
        for row in estimators:
            if row.better:
                named = f"{row.estimator},"
                if row.estimator.startswith("ATC"):
                    named = "the share of documents whose confidence is above a threshold (ATC)"
                other = f"; {named} does ({row.mae:.1f})"
                break
        return (
            "Dispersion replaces no labels here: it does not reliably beat the labelled accuracy "
            f"({ours.mae:.1f} against {alone.mae:.1f} points off {where}){other}."
        )

    def _confidence(self) -> str:
        return (
            "" if isinstance(self.reliability, Missing) else reliability_sentence(self.reliability)
        )

    def _numbers(self) -> str:
        whole = self.overall
        if whole.reason:
            return f"The run has {count(whole.documents, 'document')}: {whole.reason}."
        said = count(whole.documents, "document")
        if not math.isnan(whole.accuracy):
            said = f"{100 * whole.accuracy:.1f} % of {whole.labelled:,} right"
        if not math.isnan(whole.dispersion):
            said += f", dispersion {whole.dispersion:.4f}"
        if self.slices and whole.labelled and self._compares_slices:
            name, table = next(iter(self.slices.items()))
            lowest = weakest(table.rows, whole)
            said += (
                f"; no {name} is clearly weaker than the rest"
                if lowest is None
                else f"; weakest {name}: {lowest.slice} ({lowest.accuracy:.0%})"
            )
            if not isinstance(table.association, Missing):
                order = ORDER[table.association.side]
                plural = "categories" if name == "category" else f"{name}s"
                said += f". Accuracy {order} dispersion over {table.association.slices} {plural}"
        if self._repeated:
            said += f"; {count(self._repeated, 'repeated document')} left out"
        if not self.run["width"]:
            said += ". Logs hold no vectors: dispersion is not known"
        return f"{said}."

    @property
    def _compares_slices(self) -> bool:
        """Whether accuracies of slices are evidence; what is not finite may lie in one of them."""
        return not self.cautions and not self.answers.not_finite

    @property
    def _judged(self) -> bool:
        """Whether right and wrong answers judge the vectors."""
        return bool(self.run["width"] and self.run["labelled"] and not self.cautions)

    def _conclusions(self) -> Iterator[str]:
        """The conclusions below the answer; on right and wrong answers only where those are evidence."""
        for name, table in list(self.slices.items())[: 1 if self.run["width"] else 0]:
            yield least_sentence(name, table.least_dispersed)
            if (
                self._judged
                and self._compares_slices
                and not isinstance(table.association, Missing)
            ):
                yield association_sentence(table.association)
        if self._judged:
            yield pools_sentence(self.mixtures)
            yield ranking_sentence(self.ranking)
        yield self._confidence()

    def _associations(self) -> dict[str, str]:
        """The sentence under each slicing's table; none where answers are not evidence."""
        if self._short or not self._compares_slices or not self.run["width"]:
            return {}
        return {
            name: association_sentence(table.association) for name, table in self.slices.items()
        }


def _part_of_run(run: AuditRun, kept: Rows) -> AuditRun:
    """A run with the documents ``kept``, and a note on the others, which repeat them."""
    centred = run.centred
    if centred is not None:
        unit = centred.rows + centred.mean.astype(np.float32)
        centred = CentredVectors(unit[kept])
    left_out = len(run) - len(kept)
    note = f"{count(left_out, 'document')} of {len(run):,} repeat another of their task and are left out."
    return replace(
        run,
        documents=run.documents.iloc[kept].reset_index(drop=True),
        score=run.score[kept],
        confidence=run.confidence[kept],
        choices=run.choices[kept],
        chosen=run.chosen[kept],
        finite=run.finite[kept],
        centred=centred,
        notes=[*run.notes, note],
    )


@takes(Auditing)
def audit(asked: Auditing) -> Audit:
    """The audit of one run, as ``dispersion audit`` reports it; undefined numbers are NaN.

    Its schema is ``dispersion-audit/3`` (``docs/reference/audit.md``); ``to_dict()``, ``to_frame()``,
    ``to_markdown()``, ``to_html()`` and ``plot()`` give its forms.

    Raises:
        StoreError, HarnessError: The store, or lm-eval's samples, cannot be read.
        UsageError: The layer or a column does not exist, or ``metrics`` is ``all`` and there are no vectors;
            neither a run nor ``demo``, or both.
    """
    if (asked.run is None) != asked.demo:
        raise UsageError("expected a run, or demo=True without one, which audits the bundled run")
    place = data_folder("demo_runs") / "sums-30" if asked.run is None else asked.run
    run = read_run(place, asked.layer, asked.metric)
    raw = run.raw_vectors if asked.metrics == "all" else None
    kept = first_occurrences(run)
    repeated = len(run) - len(kept)
    if repeated:
        run = _part_of_run(run, kept)
        raw = None if raw is None else raw[kept]
    ways = slicings(run, asked.slices)
    if asked.short:
        shown = [*list(ways)[:1], *asked.slices]  # few documents may have no slicing
        ways = {name: parts for name, parts in ways.items() if name in shown}
    answers = answers_of(run)
    answers = replace(answers, repeated_documents=answers.repeated_documents + repeated)
    left_out = set[str]()
    if answers.cautions and not asked.details:
        left_out.update(JUDGED)
    if asked.short:
        left_out.update(("paper_protocol", "hard_tail"))

    def part(name: str, build: Callable[..., Any], **options: Any) -> Any:
        if name in left_out:
            return _LEFT_OUT
        judged = run if name == "reliability" else run.judged
        return part_of(build, judged, **options)

    seed = asked.seed
    return Audit(
        seed=seed,
        run=cast("RunFacts", run.describe()),
        overall=slice_row(run, all_documents(run), raw),
        answers=answers,
        filters=list(run.store.manifest.get("filters", ())),
        notes=list(run.notes),
        slices={name: slice_table(run, parts, raw) for name, parts in ways.items()},
        reliability=part("reliability", reliability, seed=seed),
        mixtures=part("mixtures", mixture_curves, seed=seed),
        calibration=part("calibration", calibrate, seed=seed, answers=answers),
        paper_protocol=part("paper_protocol", paper_protocol, seed=seed),
        ranking=part("ranking", ranking_report, cautions=answers.cautions),
        hard_tail=part("hard_tail", hard_tail, seed=seed),
        _short=asked.short,
        _repeated=repeated,
    )
