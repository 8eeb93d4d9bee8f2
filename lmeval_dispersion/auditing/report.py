"""The report of ``dispersion audit`` on one run; docs/reference/audit.md has the JSON.

A part that cannot be computed is ``{"missing": sentence}``; the others still appear. Where right
and wrong answers give no evidence, the parts that they judge are left out and not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from lmeval_dispersion.arguments import takes
from lmeval_dispersion.auditing.arguments import Auditing
from lmeval_dispersion.auditing.calibrating.calibration import Calibration, calibrate
from lmeval_dispersion.auditing.figures import RunReport
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
    Missing,
    RunFacts,
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
from lmeval_dispersion.errors import count, shortened
from lmeval_dispersion.report import Chart, Table
from lmeval_dispersion.report.document import fields_of

#: Parts that right and wrong answers judge, by their names in sentences.
JUDGED = {
    "mixtures": "mixtures",
    "calibration": "calibration",
    "paper_protocol": "the paper's protocol",
    "ranking": "ranking",
}
_LEFT_OUT = Missing("left out here; `--details` (details=True, short=False) computes it")


@dataclass(frozen=True, repr=False)
class Audit(RunReport):
    """The audit of one run. A part that was not computed is a `Missing` with the reason.

    Attributes:
        seed: Seed of all random draws.
        run: Facts about the run: its model, settings and numbers of documents.
        overall: The figures of all documents together.
        answers: The model's answers, compared with guessing.
        notes: Sentences on documents that were left out or are counted in a special way.
        slices: Column -> the figures of its slices, the least dispersed slice, and the correlation
            of dispersion with accuracy over the slices.
        reliability: Whether the model's confidence matches its accuracy.
        mixtures: Dispersion of mixtures, which are documents drawn with a set share of right
            answers.
        calibration: Whether dispersion estimates the accuracy of held-out slices.
        paper_protocol: Whether dispersion learnt from mixtures estimates accuracy, tested as in the
            RD paper (see :class:`PaperProtocol`).
        ranking: Whether documents of low contribution (mean cosine distance to all other documents)
            tend to be answered wrong.
        hard_tail: Clusters of the tenth of documents with the lowest contribution.
        filters: Sentences on lm-eval filters whose scores differ by more than chance from those of
            the filter that is audited.
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
        """Sentences on why the answers allow no conclusion; empty if they allow one."""
        return self.answers.cautions

    def has(self, part: str) -> bool:
        """Whether the part with this name was computed (neither missing nor left out)."""
        return not isinstance(getattr(self, part), Missing)

    @property
    def left_out(self) -> list[str]:
        """Names of the parts that were left out on purpose.

        A ``short`` report leaves out ``paper_protocol`` and ``hard_tail``. If the answers allow no
        conclusion, a report without ``details`` leaves out the parts in :data:`JUDGED`.
        """
        return [name for name, part in vars(self).items() if part == _LEFT_OUT]

    @property
    def missing(self) -> dict[str, str]:
        """Name of each part that could not be computed -> the reason.

        Parts that were left out on purpose are not included, nor is ``reliability``, which needs
        questions with choices.
        """
        parts = dict[str, str]()
        for name, part in vars(self).items():
            if isinstance(part, Missing) and part != _LEFT_OUT and name != "reliability":
                parts[name] = part.missing
        return parts

    def reasons(self) -> dict[str, list[str]]:
        """Return each reason of :attr:`missing` -> the names of the parts that it concerns."""
        reasons = dict[str, list[str]]()
        for name, reason in self.missing.items():
            reasons.setdefault(reason, []).append(name.replace("_", " "))
        return reasons

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the rows of CSV: the whole run, then every slice.

        The field ``by`` names the column that the run was sliced by; it is ``all`` for the whole
        run.
        """
        rows: list[Mapping[str, Any]] = [{"by": "all", **fields_of(self.overall)}]
        for by, table in self.slices.items():
            rows += [{"by": by, **fields_of(row)} for row in table.rows]
        return rows

    def tables(self) -> dict[str, Table]:
        """Return the report's tables by name, without those of parts that were not computed.

        They are ``slices-COLUMN`` for each column (``slices-slice`` if the run cannot be sliced),
        ``reliability``, ``mixtures``, ``signals``, ``clusters``, ``typical``, ``paper`` and
        ``calibration``.
        """
        tables = dict[str, Table]()
        for name, table in self.slices.items():
            tables[f"slices-{name}"] = shown_slices(name, table.rows, self.overall)
        if not self.slices:
            tables["slices-slice"] = shown_slices("slice", [], self.overall)
        for part in (self.reliability, self.mixtures, self.ranking, self.hard_tail):
            tables |= part.tables()
        tables |= self.paper_protocol.tables()
        calibration = self.calibration.tables()
        if calibration:
            tables["calibration"] = calibration["estimators"]
        return tables

    def charts(self) -> dict[str, Chart]:
        """Return the report's charts by name.

        They are ``slices`` (of the first column alone), ``reliability``, ``mixtures``, ``points``
        (of the calibration) and ``deciles`` (of the ranking). Parts that were not computed have no
        chart, nor do parts whose own ``charts`` is empty.
        """
        charts: dict[str, Chart] = {}
        for name, table in list(self.slices.items())[:1]:
            charts |= slice_chart(name, table)
        for part in (self.reliability, self.mixtures, self.calibration, self.ranking):
            charts |= part.charts()
        return charts

    def context(self) -> dict[str, Any]:
        """Return the template's variables: sentences, warnings by section, and names of parts."""
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
        for name in JUDGED:
            if self.cautions and self.has(name) and name != "ranking":  # that has its own
                warnings[name] = f"{' '.join(self.cautions)} Nothing in this section is a finding."
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
        ours, *_, alone = self.calibration.estimators
        where = f"on {self.calibration.where} that were held out"
        if ours.better:
            return (
                "Labels can be saved here: the accuracy estimated from dispersion is "
                f"{ours.mae:.1f} points off {where}, the labelled accuracy alone {alone.mae:.1f} "
                f"points; the estimate is worth {ours.worth:.0f} labels a slice."
            )
        other = ""
        better = self.calibration.better_one
        if better is not None:
            named = f"{better.estimator},"
            if better.estimator.startswith("ATC"):
                named = "the share of documents whose confidence is above a threshold (ATC)"
            other = f"; {named} does ({better.mae:.1f})"
        return (
            "Dispersion cannot replace labels here: it does not reliably beat the labelled accuracy "
            f"({ours.mae:.1f} against {alone.mae:.1f} points off {where}){other}."
        )

    def _confidence(self) -> str:
        if isinstance(self.reliability, Missing):
            return ""
        return reliability_sentence(self.reliability)

    def _numbers(self) -> str:
        whole = self.overall
        if whole.reason:
            return f"The run has {count(whole.documents, 'document')}: {whole.reason}."
        text = count(whole.documents, "document")
        if not math.isnan(whole.accuracy):
            text = f"{100 * whole.accuracy:.1f} % of {whole.labelled:,} right"
        if not math.isnan(whole.dispersion):
            text += f", dispersion {whole.dispersion:.4f}"
        if self.slices and whole.labelled and self._compares_slices:
            text += self._weakest()
        if self._repeated:
            text += f"; {count(self._repeated, 'repeated document')} left out"
        if not self.run["width"]:
            text += ". Logs hold no vectors, so dispersion is not known"
        return f"{text}."

    def _weakest(self) -> str:
        """The end of the sentence on the numbers: the weakest slice, and the order of the slices."""
        name, table = next(iter(self.slices.items()))
        lowest = weakest(table.rows, self.overall)
        text = f"; no {name} is clearly weaker than the rest"
        if lowest is not None:
            text = f"; weakest {name}: {lowest.slice} ({lowest.accuracy:.0%})"
        order = table.association
        if isinstance(order, Missing):
            return text
        plural = "categories" if name == "category" else f"{name}s"
        return f"{text}. Accuracy {ORDER[order.side]} dispersion over {order.slices} {plural}"

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
        for name, table in list(self.slices.items())[:1]:
            if self.run["width"]:
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


@takes(Auditing)
def audit(asked: Auditing) -> Audit:
    """Audit one run, as ``dispersion audit`` does.

    Undefined numbers are NaN. The JSON has the schema ``dispersion-audit/3``
    (``docs/reference/audit.md``); ``to_dict()``, ``to_frame()``, ``to_markdown()``, ``to_html()``
    and ``plot()`` give the report's other forms.

    Raises:
        StoreError: The store cannot be read, or has no such layer.
        HarnessError: The samples or logs cannot be read.
        UsageError: A column of ``slice`` does not exist or is empty; ``metrics`` is ``all`` and the
            run has no vectors; ``metric`` is given for a store; or a run and ``demo`` are both
            given or both missing.
    """
    run = read_run(asked.run, asked.layer, asked.metric, demo=asked.demo)
    raw = run.raw_vectors if asked.metrics == "all" else None
    kept = first_occurrences(run)
    repeated = len(run) - len(kept)
    if repeated:
        note = (
            "Left out because they repeat another document of the same task: "
            f"{repeated:,} of {len(run):,} documents."
        )
        run = replace(run.at(kept), notes=[*run.notes, note])
        raw = None if raw is None else raw[kept]
    ways = slicings(run, asked.slice)
    if asked.short:
        names = [*list(ways)[:1], *asked.slice]  # few documents may have no slicing
        ways = {name: parts for name, parts in ways.items() if name in names}
    answers = run.answers
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
        calibration=part("calibration", calibrate, seed=seed),
        paper_protocol=part("paper_protocol", paper_protocol, seed=seed),
        ranking=part("ranking", ranking_report),
        hard_tail=part("hard_tail", hard_tail, seed=seed),
        _short=asked.short,
        _repeated=repeated,
    )
