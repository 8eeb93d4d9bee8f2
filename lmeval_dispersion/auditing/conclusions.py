"""What an audit concludes, in sentences: each claim only where its interval leaves out "nothing is there".

Over all documents a claim is judged first. Inside subjects (or tasks) the same number is told beside it, and
the sentence says whether what was found over all is found there too, or lies between the subjects; where
neither can be told, nothing is claimed, since subjects that happen to differ look the same.
`benchmarks/audit_conclusions.py` counts how often each sentence is wrong on noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from lmeval_dispersion.auditing.run import FEWEST

Relation = Literal["same", "reversed", "between", "open", "alone"]


class Figure(NamedTuple):
    """A number with its 95 % interval; NaN bounds where there is none."""

    value: float
    low: float
    high: float

    def side(self, nothing: float) -> int:
        """1 or -1 where the interval lies above or below ``nothing``, else 0."""
        return int(self.low > nothing) - int(self.high < nothing)

    def text(self, spec: str, level: str = "95 % ") -> str:
        """The number and its interval in words; the level is said once a sentence."""
        if math.isnan(self.low):
            return f"{self.value:{spec}}, no interval"
        plain = spec.lstrip("+")
        return f"{self.value:{spec}}, {level}{self.low:{plain}} to {self.high:{plain}}"


def relation(over_all: Figure, inside: Figure | None, nothing: float) -> Relation:
    """How the number inside parts stands to a number over all documents that is told from ``nothing``.

    ``same`` side or ``reversed``; ``between`` the parts: inside them it is told from the number over all,
    and not from nothing; ``open``: told from neither; ``alone``: nothing divides the documents.
    """
    if inside is None:
        return "alone"
    if side := inside.side(nothing):
        return "same" if side == over_all.side(nothing) else "reversed"
    return "between" if inside.side(over_all.value) else "open"


def inside_figure(part: Mapping[str, Any], key: str) -> tuple[str, Figure | None]:
    """The first stratification of ``part["inside"]`` that has a number: its plural name and the number."""
    for name, figures in part["inside"].items():
        if "missing" not in figures:
            figures = figures.get("pools", figures)
            return f"{name}s", Figure(figures[key], figures[f"{key}_low"], figures[f"{key}_high"])
    return "", None


def least_dispersed_text(name: str, least: Mapping[str, Any]) -> str:
    """Which slice is least dispersed, and from how many others it can be distinguished."""
    if "missing" in least:
        return f"no {name} is called the least dispersed, since {least['missing']}"
    if least["not_told_apart"] == least["others"]:
        return (
            f"the least dispersed {name} is {least['slice']} ({least['dispersion']:.4f}), and it is told "
            "apart from no other"
        )
    text = f"the least dispersed {name} is {least['slice']} ({least['dispersion']:.4f})"
    if least["not_told_apart"]:
        return f"{text}, not told apart from {least['not_told_apart']} of the {least['others']} others"
    return f"{text}, told apart from all {least['others']} others"


def order_text(association: Mapping[str, Any]) -> str:
    """Whether accuracy follows dispersion over slices."""
    figure = Figure(association["spearman"], association["low"], association["high"])
    side = figure.side(0)
    verb = ("shows no clear order by", "rises with", "falls with")[side]
    text = f"Over {association['slices']} slices accuracy {verb} dispersion ({interval_text(association)})"
    inside = association.get("inside_tasks")
    if not inside:
        return text
    figures = f"Spearman {inside['spearman']:.2f}, p = {inside['p']:.3f}"
    if not side:
        return f"{text}; inside tasks: {figures}"
    if inside["p"] >= 0.05:
        return f"{text}; inside tasks no order is told ({figures})"
    same = (inside["spearman"] > 0) == (side > 0)
    return f"{text}; inside tasks {'too' if same else 'it is the reverse'} ({figures})"


def pools_sentence(mixtures: Mapping[str, Any]) -> str:
    """Whether right answers are more dispersed than wrong ones, over all and inside subjects or tasks."""
    if "missing" in mixtures:
        return f"Whether right answers are more dispersed could not be tested: {mixtures['missing']}."
    pools = mixtures["pools"]
    figure = Figure(pools["difference"], pools["difference_low"], pools["difference_high"])
    if math.isnan(figure.low):
        return (
            f"Whether right answers are more dispersed cannot be told with {mixtures['correct_documents']} "
            f"right and {mixtures['incorrect_documents']} wrong documents: {FEWEST} of each are needed."
        )
    parts, inside = inside_figure(mixtures, "difference")
    beside = f"inside {parts} {inside.text('+.4f', '')}" if inside else ""
    side = figure.side(0)
    if not side:
        text = f"Right and wrong answers are not told apart by dispersion ({figure.text('+.4f')}"
        return f"{text}; {beside})." if beside else f"{text})."
    word = "more" if side > 0 else "less"
    how = relation(figure, inside, 0)
    if how == "between":
        return (
            f"Right answers are {word} dispersed over all ({figure.text('+.4f')}; {beside}): the "
            f"difference lies between {parts}."
        )
    if how == "open":
        return (
            f"Whether right answers are {word} dispersed, or come from {word} dispersed {parts}, cannot be "
            f"told ({figure.text('+.4f')}; {beside})."
        )
    text = f"Right answers are {word} dispersed than wrong ones ({figure.text('+.4f')})"
    return f"{text}{_tail(how, parts, inside, '+.4f')}."


def ranking_sentence(ranking: Mapping[str, Any]) -> str:
    """Whether wrong answers can be found by a low contribution, over all and inside subjects or tasks."""
    if "missing" in ranking:
        reason = ranking["missing"]
        return f"Whether hard documents can be found by their contribution could not be tested: {reason}."
    if ranking["cautions"]:
        return " ".join([*ranking["cautions"], "What the contribution finds is not judged."])
    ours = ranking["signals"][0]
    if "missing" in ours:
        return f"The contribution finds no wrong answers: {ours['missing']}."
    figure = Figure(ours["auroc"], ours["auroc_low"], ours["auroc_high"])
    wrong = ranking["wrong"]
    if not ours["reliable"] or math.isnan(figure.low):
        return (
            f"Whether a low contribution points at wrong answers cannot be told with "
            f"{ranking['documents'] - wrong} right and {wrong} wrong documents: {FEWEST} of each are needed "
            f"(AUROC {figure.text('.2f')}, unreliable)."
        )
    parts, inside = inside_figure(ours, "auroc")
    return f"{_ranks(figure, parts, inside)}."


def _ranks(figure: Figure, parts: str, inside: Figure | None) -> str:
    beside = f"inside {parts} {inside.text('.2f', '')}" if inside else ""
    side, over_all = figure.side(0.5), f"AUROC {figure.text('.2f')}"
    if not side:
        text = f"A low contribution is no better than chance at finding wrong answers ({over_all}"
        return f"{text}; {beside})" if beside else f"{text})"
    how = relation(figure, inside, 0.5)
    word = "wrong" if side > 0 else "right"
    if how == "between":
        return (
            f"A low contribution points at {word} answers over all ({over_all}; {beside}): the "
            f"difference lies between {parts}"
        )
    if how == "open":
        return (
            f"Whether a low contribution finds {word} answers, or {parts} that have more of them, cannot "
            f"be told ({over_all}; {beside})"
        )
    return f"A low contribution points at {word} answers ({over_all}){_tail(how, parts, inside, '.2f')}"


def _tail(how: Relation, parts: str, inside: Figure | None, spec: str) -> str:
    """How a claim over all documents ends: whether it was found inside the parts too."""
    if inside is None:
        return ""
    verdict = f", inside {parts} too" if how == "same" else f", and inside {parts} it is the reverse"
    return f"{verdict} ({inside.text(spec, '')})"


def found_sentence(ranking: Mapping[str, Any]) -> str:
    """How many errors a reader of the low tail finds, and which other signal finds some too."""
    ours = ranking["signals"][0]
    if ranking["cautions"] or "missing" in ours:
        return ""
    share = ours["error_share"]["10"]
    text = f"The lowest tenth of the documents holds {100 * share:.0f} % of the errors"
    best = ranking["best_other"]
    if "missing" in best:
        return f"{text}."
    if best["low"] > 0.5:
        return f"{text}; the best other signal is {best['signal']} (AUROC {best['auroc']:.2f})."
    return f"{text}; no other signal is told to be better than chance."


def interval_text(association: Mapping[str, Any]) -> str:
    """A Spearman correlation with its interval, or why it has none."""
    if math.isnan(association["low"]):
        return f"Spearman {association['spearman']:.2f}, too few slices for an interval"
    return (
        f"Spearman {association['spearman']:.2f}, 95 % {association['low']:.2f} to {association['high']:.2f}"
    )


def association_sentence(association: Mapping[str, Any]) -> str:
    """The correlation of dispersion with accuracy over slices, and inside tasks, as numbers."""
    if "missing" in association:
        return f"No correlation with accuracy is given: {association['missing']}."
    text = (
        f"Dispersion with accuracy over these {association['slices']} slices: {interval_text(association)}."
    )
    if inside := association.get("inside_tasks"):
        text += (
            f" Over the {inside['slices']} slices inside {inside['tasks']} tasks: Spearman "
            f"{inside['spearman']:.2f}, p = {inside['p']:.3f} (permutations inside tasks)."
        )
    return text
