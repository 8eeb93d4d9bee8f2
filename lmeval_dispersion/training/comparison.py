"""Comparison of a base model with models trained with a loss, as far as their seeds allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated, Any, ClassVar

from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.report.cells import shown
from lmeval_dispersion.report.vega import dots
from lmeval_dispersion.statistics import student_quantile

BASE = "base"


@dataclass(frozen=True)
class Trained:
    """One way of training on one domain: means over its seeds."""

    loss: Annotated[str, Col("Loss")]  # or base
    domain: Annotated[str, Col("Domain", drop=3)]
    seeds: Annotated[int, Col("Seeds")]
    perplexity: Annotated[float, Col("Perplexity", ".2f", error="sd", hint="± standard deviation over seeds")]
    sd: float | None
    versus_base: Annotated[
        float | None,
        Col(
            "Against base, %", ".2f", error="half", dots="both", hint="100 log of the ratio, below 0: better"
        ),
    ]
    versus_base_sd: float | None
    half: float | None  # of the interval of versus_base
    before: Annotated[float, Col("Perplexity", ".2f")]
    tokens: Annotated[float, Col("Token dispersion", ".3f", short="Tokens", drop=1)]
    tokens_before: Annotated[float, Col("Token dispersion", ".3f")]
    texts: Annotated[float | None, Col("Text dispersion", ".3f", short="Texts", drop=2)]

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of ``versus_base``; a comparison's intervals hold together with 95 %."""
        if self.versus_base is None or self.half is None:
            return None
        return self.versus_base - self.half, self.versus_base + self.half

    def __str__(self) -> str:
        value, low, high = (shown(x, "+.2f") for x in (self.versus_base, *(self.interval or [math.nan] * 2)))
        return f"{self.loss} on {self.domain}, {value} % ({low} to {high})"


@dataclass(frozen=True, repr=False)
class TrainingComparison(Report):
    """Every loss against base, by domain.

    Intervals are Student's t over seeds, Bonferroni-corrected for the number of comparisons: they hold
    together with 95 %.
    """

    template: ClassVar[str] = "comparison.jinja"
    schema: ClassVar[str] = "dispersion-training/1"
    libraries: ClassVar[Sequence[str]] = ("torch", "transformers")
    guide: ClassVar[str] = "docs/reference/training.md"

    trained: Sequence[Trained]

    @classmethod
    def of(cls, results: Sequence[Mapping[str, Any]], domains: Sequence[str]) -> TrainingComparison:
        """The comparison of trainings, from their ``result.json``; ``domains`` are their texts, in order."""
        names = [domain.replace("\\", "/").rstrip("/").split("/")[-1] for domain in domains]
        names = names if len(set(names)) == len(names) else list(domains)
        losses = list(dict.fromkeys(result["arm"] for result in results))
        comparisons = (len(losses) - 1) * len(names)
        rows = []
        for loss, (number, name) in itertools.product(losses, enumerate(names)):
            before, after, baseline = (
                [result[when][number] for result in results if result["arm"] == arm]
                for arm, when in ((loss, "before"), (loss, "after"), (BASE, "after"))
            )
            perplexities = [figures["perplexity"] for figures in after]
            texts = [figures["texts"][-1] for figures in after if figures["texts"][-1] is not None]
            pairs = zip(after, baseline, strict=True) if loss != BASE else ()  # seed by seed
            shifts = [100 * math.log(ours["perplexity"] / other["perplexity"]) for ours, other in pairs]
            sd = stdev(shifts) if shifts[1:] else None
            half = None
            if sd is not None:
                quantile = student_quantile(1 - 0.025 / comparisons, len(shifts) - 1)
                half = quantile * sd / math.sqrt(len(shifts))
            row = Trained(
                loss=loss,
                domain=name,
                seeds=len(after),
                perplexity=fmean(perplexities),
                sd=stdev(perplexities) if after[1:] else None,
                versus_base=fmean(shifts) if shifts else None,
                versus_base_sd=sd,
                half=half,
                before=fmean(figures["perplexity"] for figures in before),
                tokens=fmean(figures["tokens"][-1] for figures in after),
                tokens_before=fmean(figures["tokens"][-1] for figures in before),
                texts=fmean(texts) if texts else None,
            )
            rows.append(row)
        return cls(rows)

    def tables(self) -> dict[str, Table]:
        """A row for each training and domain, after training and before it."""
        after = Table.of(
            self.trained,
            "Held-out perplexity and dispersion",
            name="trained",
            hide=("seeds", "before", "tokens_before"),
        )
        before = Table.of(
            self.trained,
            "Before training",
            name="before",
            hide=("perplexity", "versus_base", "tokens", "texts"),
        )
        return {"trained": after, "before": before}

    def charts(self) -> dict[str, Chart]:
        """The differences from base with their intervals."""
        rows = [(row, row.interval) for row in self.trained if row.interval]
        if not rows:
            return {}
        data = [
            {"name": f"{row.loss} · {row.domain}", "difference": row.versus_base, "low": low, "high": high}
            for row, (low, high) in rows
        ]
        chart = dots(data, "name", "difference", ("low", "high"), "Perplexity against base, %", line=0.0)
        text = "; ".join(str(row) for row, _ in rows)
        return {"against_base": Chart(chart, "Perplexity against base, 95 % intervals", f"{text}.")}

    def context(self) -> dict[str, Any]:
        """The comparisons by their outcome."""
        known = [(row, row.interval) for row in self.trained if row.interval]
        return {
            "single": [] if known else [row for row in self.trained if row.versus_base is not None],
            "better": [str(row) for row, (_, high) in known if high < 0],
            "worse": [str(row) for row, (low, _) in known if low > 0],
            "open": [str(row) for row, (low, high) in known if low <= 0 <= high],
        }
