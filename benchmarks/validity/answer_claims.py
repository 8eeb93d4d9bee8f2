"""What answers are made of: the figures and the claims of answers.yaml, by its rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.validity.analysis import (
    DRAWS,
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    PART,
    Estimate,
    Floats,
    Pairs,
    Population,
    Resampled,
    Verdict,
    mean_of,
    sign_of,
    worth,
)
from benchmarks.validity.records import unpacked_shares
from benchmarks.validity.texts import DOMAINS

KINDS = {"tuned": "fine-tunes of six bases", "mix": "fresh random mixtures"}
MEAN = ("math", "code")  # of which means are taken; legal is told beside them
MARGIN = -0.05  # what "nothing is lost" allows
LABELS, PROBABILITIES, SQUARES = (5, 15, 25), (5, 10, 25), 25
#: Figures of rows, by their columns for each domain.
ROWS = {
    "G": "cosine",
    "ratio": "ratio_folded",
    "ratio, answer tokens": "ratio_answers",
    "G, answer tokens": "g_answers",
    "ratio, tokens found by the base": "ratio_found",
    "G, tokens found by the base": "g_found",
}
ANSWERS = "ratio, answer tokens"
BOTH = "mean rank of G and ratio of answer tokens"


class Sides(NamedTuple):
    """Pairs by where they lie beside their base: by domain and as the mean of `MEAN`."""

    below: dict[str, Resampled]
    across: dict[str, Resampled]
    above: dict[str, Resampled]


class Kind:
    """The fine-tunes, or the mixtures.

    Args:
        kind: Of `KINDS`.
        table: Lines of `frame`, bases included.
        questions: How many of a skill each model was asked.
    """

    def __init__(self, kind: str, table: pd.DataFrame, questions: int) -> None:
        self.kind = kind
        self.bases = table[table.recipe.str.startswith("base-")].set_index("seed")
        lines = table[table.recipe.str.startswith(f"{kind}-")].reset_index(drop=True)
        self.population = Population(lines, questions, nested=True)

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """Pairs that count, of all recipes."""
        return {domain: self.population.pairs(domain) for domain in DOMAINS}

    def column(self, figure: str, domain: str) -> Floats:
        """A figure of every line."""
        table = self.population.table
        if figure == BOTH:
            ranks = [table[f"{ROWS[name]}_{domain}"].groupby(table.seed).rank() for name in ("G", ANSWERS)]
            return (ranks[0] + ranks[1]).to_numpy(float)
        return table[f"{ROWS[figure]}_{domain}"].to_numpy(float)

    @cached_property
    def shares(self) -> dict[str, dict[str, Resampled]]:
        """Share of the pairs right, by figure, then by domain and as the mean of `MEAN`."""
        right: dict[str, Callable[[str], Floats]] = {
            name: lambda domain, name=name: self.pairs[domain].right(self.column(name, domain))
            for name in (*ROWS, BOTH)
        }
        for count in LABELS:
            right[f"{count} labels"] = lambda domain, count=count: self.pairs[domain].by_labels[:, count - 1]
        for count in PROBABILITIES:
            right[f"{count} labels by probability"] = lambda domain, count=count: self._by_probability(
                domain, count
            )
        right[f"squares of {SQUARES} questions without answers"] = lambda domain: self.pairs[domain].right(
            self._squares(domain)
        )
        return {
            name: with_mean({domain: self.pairs[domain].share(of(domain)) for domain in DOMAINS})
            for name, of in right.items()
        }

    def _by_probability(self, domain: str, count: int) -> Floats:
        """Chance that the mean probability over so many random labelled questions orders each pair right."""
        cells = self.population.table.probability
        values = np.array([unpacked_shares(cell["labels"][domain]) for cell in cells])
        return by_means(self.pairs[domain], values, count)

    def _squares(self, domain: str) -> Floats:
        cells = self.population.table.squares
        return np.array([unpacked_shares(cell[domain])[:SQUARES].mean() for cell in cells])

    @cached_property
    def sides(self) -> Sides:
        """Share right by ratio over answer tokens, of pairs below, across and above their base."""
        below, across, above = {}, {}, {}
        for domain in DOMAINS:
            pairs, figure = self.pairs[domain], self.column(ANSWERS, domain)
            base = self.bases[f"{ROWS[ANSWERS]}_{domain}"].loc[self.population.table.seed].to_numpy(float)
            up = figure > base
            first, second, right = up[pairs.first], up[pairs.second], pairs.right(figure)
            below[domain] = pairs.share(right, ~first & ~second)
            across[domain] = pairs.share(right, first != second)
            above[domain] = pairs.share(right, first & second)
        return Sides(*(with_mean(parts) for parts in (below, across, above)))

    @cached_property
    def false_text(self) -> dict[str, dict[str, Resampled]]:
        """Share right of the pairs without false text in either recipe, and of the others, by figure."""
        false: NDArray[np.bool_] = self.population.table["false"].to_numpy(bool)
        made = {}
        for figure in ("G", "ratio", ANSWERS):
            for label, wanted in (("no false text", False), ("false text", True)):
                parts = {}
                for domain, pairs in self.pairs.items():
                    among = (false[pairs.first] | false[pairs.second]) == wanted
                    parts[domain] = pairs.share(pairs.right(self.column(figure, domain)), among)
                made[f"{figure}: {label}"] = with_mean(parts)
        return made

    def worth(self, figure: str) -> Estimate:
        """Labels, right or wrong, that order the pairs of `MEAN` as well."""
        return worth({self.pairs[domain]: self.shares[figure][domain] for domain in MEAN})


def by_means(pairs: Pairs, values: Floats, count: int) -> Floats:
    """Chance that the mean of so many random columns of ``values`` orders each pair of lines right."""
    rng, total = np.random.default_rng(1), np.zeros(len(pairs.sign))
    for _ in range(DRAWS):
        total += pairs.right(values[:, rng.permutation(values.shape[1])[:count]].mean(1))
    return total / DRAWS


def with_mean(parts: dict[str, Resampled]) -> dict[str, Resampled]:
    """Figures by domain, with the mean of math and code."""
    return parts | {"mean": mean_of([parts[domain] for domain in MEAN])}


def not_lost(difference: Resampled) -> str:
    """Holds where a difference lies above the margin."""
    low, high = difference.estimate.low, difference.estimate.high
    return HOLDS if low > MARGIN else FAILS if high < MARGIN else INCONCLUSIVE


def claims(tuned: Kind, mixed: Kind) -> list[Verdict]:
    """All lines, in the order of the configuration's claims."""

    def less(kind: Kind, figure: str, rival: str, domain: str = "mean") -> Resampled:
        return kind.shares[figure][domain].less(kind.shares[rival][domain])

    def line(kind: Kind, figure: str, rival: str, domain: str, claim: str, judge: Any = sign_of) -> Verdict:
        difference = less(kind, figure, rival, domain)
        ours, theirs = kind.shares[figure][domain].value, kind.shares[rival][domain].value
        where = f"{KINDS[kind.kind]}, {domain if domain != 'mean' else 'math and code'}"
        return Verdict(
            judge(difference), f"{claim}: {where}", f"{ours:.2f} against {theirs:.2f}: {difference.estimate}"
        )

    found = "ratio, tokens found by the base"
    better = "Ratio over answer tokens orders better than over the domain's set"
    lines = [line(tuned, ANSWERS, "ratio", domain, better) for domain in ("code", "legal", "mean")]
    lines += [
        line(tuned, ANSWERS, "G", "mean", "Ratio over answer tokens orders better than G"),
        line(tuned, found, ANSWERS, "mean", "Tokens found by the base serve as well", not_lost),
        line(mixed, ANSWERS, "ratio", "mean", "Ratio over answer tokens loses nothing", not_lost),
        line(mixed, "G, answer tokens", "G", "mean", "G over answer tokens loses nothing", not_lost),
    ]
    for kind in (tuned, mixed):
        for figure, name in (
            ("5 labels by probability", "5 labels by probability order"),
            (f"squares of {SQUARES} questions without answers", "25 questions without answers order"),
        ):
            lines.append(line(kind, figure, "15 labels", "mean", f"{name} at least as well as 15 labels"))
    below, across = tuned.sides.below["mean"].estimate, tuned.sides.across["mean"].estimate
    apart = below.high < across.low
    verdict = HOLDS if apart and across.low > 0.85 else PART if apart and across.low > 0.75 else FAILS
    lines.append(
        Verdict(
            verdict,
            "Two below their base are ordered less well than one on either side: fine-tunes, math and code",
            f"right: both below {below}, across {across}, both above {tuned.sides.above['mean'].estimate}",
        )
    )
    clean, mixed_up = (tuned.false_text[f"G: {label}"]["code"] for label in ("no false text", "false text"))
    orders = clean.estimate.low > 0.75 and clean.less(mixed_up).estimate.low > 0
    lines.append(
        Verdict(
            HOLDS if orders else FAILS,
            "Without false text G orders code, with it less: fine-tunes",
            f"right: {clean.estimate} of {clean.pairs} pairs against {mixed_up.estimate} of {mixed_up.pairs}",
        )
    )
    return lines


def decided(tuned: Kind, mixed: Kind) -> str:
    """The figure that ranks, by the configuration's rule."""
    for figure in (ANSWERS, BOTH):
        gain, kept = (kind.shares[figure]["mean"].less(kind.shares["G"]["mean"]) for kind in (tuned, mixed))
        if gain.estimate.low > 0 and kept.estimate.low > MARGIN:
            return figure
    return "G"
