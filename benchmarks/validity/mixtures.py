"""Random mixtures and fine-tunes: the figures and the claims of mixtures.yaml, by its rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.validity.analysis import (
    FIGURES,
    RESAMPLES,
    SHARES,
    UNTESTED,
    Pairs,
    Population,
    Resampled,
    Verdict,
    leftover,
    mean_of,
    outcome,
    sign_of,
)
from benchmarks.validity.texts import DOMAINS

KINDS = {"mix": "random mixtures", "tuned": "fine-tunes of one base"}
LABELS = (7, 25)
ORDERED = 0.85  # share of the pairs that G orders, of which both have to order so many: both.yaml

BySkill = dict[str, Resampled]


class Kind:
    """One kind of recipes: those of the mixtures, or those of the fine-tunes.

    Args:
        kind: Of `KINDS`.
        table: Lines of `frame`.
        questions: How many of a skill each model was asked.
        screened: What `both.py` counted with the screener's own errors, by domain; may be empty.
    """

    def __init__(self, kind: str, table: pd.DataFrame, questions: int, screened: Mapping[str, Any]) -> None:
        self.kind, self.screened = kind, screened
        lines = table[table.recipe.str.startswith(f"{kind}-")].reset_index(drop=True)
        self.population = Population(lines, questions, nested=True)

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """Pairs that count, both of whose recipes hold the domain."""
        return {domain: self.population.pairs(domain, holding=True) for domain in DOMAINS}

    @cached_property
    def shares(self) -> dict[str, BySkill]:
        """Decision accuracy by figure, then by domain and as their mean."""
        names = [*FIGURES, "mean rank", *SHARES]
        shares = {name: {d: pairs.share(pairs.by(name)) for d, pairs in self.pairs.items()} for name in names}
        for count in LABELS:
            shares[f"{count} labels"] = {
                d: pairs.share(pairs.by_labels[:, count - 1]) for d, pairs in self.pairs.items()
            }
        every = {d: self.population.pairs(d) for d in DOMAINS}
        shares["G, all recipes"] = {d: pairs.share(pairs.by("G")) for d, pairs in every.items()}
        return {name: with_mean(parts) for name, parts in shares.items()}

    @cached_property
    def agreement(self) -> dict[str, BySkill]:
        """Pairs on which both figures agree: how many, how many right, and G on the others; by domain."""
        by_domain = {domain: pairs.agreement() for domain, pairs in self.pairs.items()}
        return {
            part: with_mean({domain: parts[part] for domain, parts in by_domain.items()})
            for part in ("agree", "right", "else")
        }

    @cached_property
    def leftovers(self) -> dict[str, Resampled]:
        """By figure, the correlation of the share of false math with what accuracy leaves of the rank."""
        table = self.population.table
        ranks = table.groupby("seed")[["cosine_math", "ratio_folded_math", "accuracy_math"]].rank()
        ranks["mean rank"] = (ranks.cosine_math + ranks.ratio_folded_math) / 2
        y, false = ranks.accuracy_math.to_numpy(float), table.false_math.rank().to_numpy(float)
        leftovers = {}
        columns = {"G": "cosine_math", "ratio": "ratio_folded_math", "mean rank": "mean rank"}
        for name, column in columns.items():
            x = ranks[column].to_numpy(float)
            samples = [leftover(x, y, false, self.population.weights[i]) for i in range(RESAMPLES)]
            leftovers[name] = Resampled(leftover(x, y, false, np.ones(len(x))), np.array(samples))
        return leftovers

    @cached_property
    def traps(self) -> dict[str, Resampled]:
        """By figure, share right of the pairs of math whose worse recipe has more false math."""
        pairs = self.pairs["math"]
        false = self.population.table.false_math.to_numpy(float)
        trap = (false[pairs.second] - false[pairs.first]) * pairs.sign > 0
        return {name: pairs.share(pairs.by(name), trap) for name in ("G", "ratio", "mean rank")}


def with_mean(parts: BySkill) -> BySkill:
    """Figures by domain, with their mean."""
    return parts | {"mean": mean_of(list(parts.values()))}


def conditions(screened: Mapping[str, Any]) -> list[bool]:
    """For each domain, whether what both order is as often right as what G orders, and nearly as much."""
    return [
        row["both"]["right"] >= row["alone"]["right"]
        and row["both"]["ordered"] >= ORDERED * row["alone"]["ordered"]
        for row in screened.values()
    ]


def claims(recipes: Kind) -> list[Verdict]:
    """All lines of one kind of recipes, in the order of the configuration's claims."""
    means = {name: parts["mean"] for name, parts in recipes.shares.items()}
    g = means["G"]
    agreed = recipes.agreement["right"]["mean"]
    above = g.estimate.low
    where = KINDS[recipes.kind]

    def against(rival: str, claim: str, figure: str = "G") -> Verdict:
        difference = means[figure].less(means[rival])
        result = f"{means[figure].value:.2f} against {means[rival].value:.2f}: {difference.estimate}"
        return Verdict(sign_of(difference), f"{claim}: {where}", result)

    met = conditions(recipes.screened)
    said = "; ".join(
        f"{domain} {row['both']['right']:.3f} of {row['both']['ordered']:.2f}, G alone "
        f"{row['alone']['right']:.3f} of {row['alone']['ordered']:.2f}"
        for domain, row in recipes.screened.items()
    )
    lines = [
        Verdict(
            outcome(above > 0.75, above > 0.5),
            f"G orders recipes that hold the domain: {where}",
            f"right: {g.estimate} of {g.pairs} pairs, mean of three domains",
        ),
        against("G", "Ratio orders better than G", "ratio"),
        against("G", "The mean rank of both orders better than G", "mean rank"),
        Verdict(
            sign_of(agreed.less(g)),
            f"Where both agree, more pairs are right than by G alone: {where}",
            f"{agreed.value:.3f} against {g.value:.3f}: {agreed.less(g).estimate}; they agree on "
            f"{recipes.agreement['agree']['mean'].value:.2f}",
        ),
        Verdict(
            outcome(all(met), any(met)) if met else UNTESTED,
            f"Both figures by the screener's rule keep what both.yaml asks for: {where}",
            said or "not screened yet",
        ),
        against("7 labels", "G orders better than 7 labelled questions"),
        against("25 labels", "G orders better than 25 labelled questions"),
        against("share of the domain seen", "G orders better than the share of the domain seen"),
        against("share of its true text", "G orders better than the share of its true text"),
    ]
    if recipes.kind == "mix":
        left = {name: recipes.leftovers[name] for name in ("G", "ratio")}
        g_size, ratio_size = (Resampled(abs(x.value), np.abs(x.samples)) for x in left.values())
        correlations = ", ".join(f"{name} {figure.estimate}" for name, figure in left.items())
        result = f"leftover correlation with false math: {correlations}"
        lines.append(
            Verdict(sign_of(g_size.less(ratio_size)), f"Ratio is fooled less than G: {where}", result)
        )
    return lines
