"""Two reference sets on the same models, by reference.yaml: does the second order no worse?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lmeval_screener.chance import NEAR
from numpy.typing import NDArray

from benchmarks.validity import records
from benchmarks.validity.analysis import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    Estimate,
    Floats,
    Resampled,
    drawn,
)
from benchmarks.validity.page import markdown
from benchmarks.validity.records import unpacked
from benchmarks.validity.study import read_study
from benchmarks.validity.texts import DOMAINS, REFERENCES

STUDY = Path(__file__).parent / "reference.yaml"
KINDS = {"mix": "random mixtures", "tuned": "fine-tunes"}
FIGURES = {"ratio": "ratio", "gap": "Euclidean G"}
WORSE = -0.03  # a difference above this is none


class Comparison(NamedTuple):
    """Shares of right pairs by both sets, and the second's less the first's."""

    kind: str
    figure: str
    checkpoints: int
    shares: tuple[float, float]
    difference: Estimate

    @property
    def verdict(self) -> str:
        if self.difference.low > WORSE:
            return HOLDS
        return FAILS if self.difference.high < WORSE else INCONCLUSIVE


def compared(rows: Mapping[str, Sequence[Mapping[str, Any]]], questions: int) -> list[Comparison]:
    """A comparison for each kind of ``rows`` and each figure."""
    made = []
    for kind, group in rows.items():
        counts = counted(len(group))
        for figure in FIGURES:
            by_set = []
            for reference in REFERENCES:
                cells = [
                    right_shares(
                        accuracies(group, domain, questions),
                        np.array([row[domain]["by_reference"][reference][figure] for row in group]),
                        counts,
                    )
                    for domain in DOMAINS
                ]
                whole, *resampled = np.mean(cells, axis=0)
                by_set.append(Resampled(float(whole), np.array(resampled)))
            first, second = by_set
            difference = second.less(first).estimate
            shares = (first.value, second.value)
            made.append(Comparison(kind, figure, len(group), shares, difference))
    return made


def accuracies(group: Sequence[Mapping[str, Any]], domain: str, questions: int) -> Floats:
    """Over both pools, (checkpoints,)."""
    labels = [unpacked(row[domain]["right"], questions).mean() for row in group]
    truth = [row[domain]["truth"] / questions for row in group]
    both: Floats = (np.array(labels) + np.array(truth)) / 2
    return both


def counted(checkpoints: int) -> NDArray[np.int64]:
    """How often each checkpoint is in the sample, then in each resample, (1 + b, checkpoints)."""
    resampled = [np.bincount(draw, minlength=checkpoints) for draw in drawn(checkpoints)]
    return np.array([np.ones(checkpoints, int), *resampled])


def right_shares(accuracy: Floats, figure: Floats, counts: NDArray[np.int64]) -> Floats:
    """The share of right pairs in each sample of ``counts``, (samples,)."""
    lead = accuracy[:, None] - accuracy
    kept = np.triu(np.abs(lead) > NEAR + 1e-9, 1)
    right = kept & (lead * (figure[:, None] - figure) > 0)
    hits = np.einsum("bi,ij,bj->b", counts, right.astype(int), counts)
    pairs = np.einsum("bi,ij,bj->b", counts, kept.astype(int), counts)
    shares: Floats = hits / pairs
    return shares


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """*Holds* where the second orders no worse in all, *does not hold* where it is worse in one.

    Without every kind, it is not judged.
    """
    verdicts = {comparison.verdict for comparison in comparisons}
    if {comparison.kind for comparison in comparisons} != set(KINDS):
        return "not judged: not all groups are trained"
    if FAILS in verdicts:
        return FAILS
    return INCONCLUSIVE if INCONCLUSIVE in verdicts else HOLDS


def read(folder: Path = records.FOLDER) -> dict[str, list[dict[str, Any]]]:
    """The rows of each kind whose group is trained whole, by name."""
    recipes = [run.recipe.split("-")[0] for run in read_study(STUDY).runs()]
    rows = {}
    for kind in KINDS:
        found = records.checked(folder / f"reference-{kind}.jsonl", STUDY)
        if len(found) == recipes.count(kind):
            rows[kind] = sorted(found, key=lambda row: str(row["name"]))
    return rows


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons in Markdown, under their common verdict."""
    headings = [
        "models",
        "by",
        *(f"`{name}`" for name in REFERENCES.values()),
        "difference",
        "no worse",
    ]
    lines = []
    for each in comparisons:
        percent = [f"{100 * share:.1f} %" for share in each.shares]
        low, high = each.difference.low, each.difference.high
        difference = f"{each.difference.value:+.3f} ({low:+.3f} to {high:+.3f})"
        models = f"{each.checkpoints} {KINDS[each.kind]}"
        lines.append([models, FIGURES[each.figure], *percent, difference, each.verdict])
    _, second = REFERENCES.values()
    sentence = f"`{second}` orders no worse: {verdict_of(comparisons)}"
    return f"{sentence}\n\n{markdown(headings, lines)}"
