"""From results to figures. Every interval is 95 %, from resampling recipes, each with all its seeds.

Nothing is chosen here by its outcome: rivals with their signs, the split and what refutes a claim stand in
the configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.validity.records import unpacked
from benchmarks.validity.study import Study
from benchmarks.validity.texts import HOLD, UNTRUE

Floats = NDArray[np.float64]
HOLDS, PART, FAILS, INCONCLUSIVE = "holds", "holds in part", "does not hold", "inconclusive"
UNTESTED = "not tested"
RESAMPLES, DRAWS = 2000, 200  # of recipes; of labelled questions
MOST_LABELS = 100
#: Figures of a checkpoint's rows, and shares that only its maker knows, by their columns for each domain.
FIGURES = {"G": "cosine", "ratio": "ratio_folded"}
SHARES = {"share of the domain seen": "seen", "share of its true text": "true"}


class Estimate(NamedTuple):
    """A figure with the bounds of its interval; NaN where there is none."""

    value: float
    low: float = float("nan")
    high: float = float("nan")

    def __str__(self) -> str:
        if not np.isfinite(self.value):
            return "undefined"
        if not np.isfinite(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    def includes(self, point: float) -> bool:
        """Whether the interval holds a point; an undefined one holds all."""
        return not (self.low > point or self.high < point)


class Resampled(NamedTuple):
    """A figure, its value in each resample of the recipes, and how many pairs it is of."""

    value: float
    samples: Floats
    pairs: int = 0

    @property
    def estimate(self) -> Estimate:
        """With the 2.5th and 97.5th percentile of the resamples."""
        kept = self.samples[np.isfinite(self.samples)]
        if len(kept) < 2 or not np.isfinite(self.value):
            return Estimate(self.value)
        return Estimate(self.value, *map(float, np.percentile(kept, [2.5, 97.5])))

    def less(self, other: Resampled) -> Resampled:
        """The difference, paired in the resamples."""
        return Resampled(self.value - other.value, self.samples - other.samples, self.pairs)


class Verdict(NamedTuple):
    """One line of the page: what came of a claim."""

    verdict: str
    claim: str
    result: str


def outcome(holds: bool, part: bool = False) -> str:
    """The word for a claim whose rule is met, or met in part."""
    return HOLDS if holds else PART if part else FAILS


def sign_of(difference: Resampled) -> str:
    """Holds where a difference lies above 0, does not where it lies below."""
    estimate = difference.estimate
    return INCONCLUSIVE if estimate.includes(0) else outcome(estimate.low > 0)


def mean_of(parts: Sequence[Resampled]) -> Resampled:
    """Mean of figures of the same resamples; what is undefined in one of them is left out there."""
    samples = known_mean(np.array([part.samples for part in parts]))
    return Resampled(float(np.mean([p.value for p in parts])), samples, sum(p.pairs for p in parts))


def frame(study: Study, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One line a checkpoint: who it is, accuracies, losses, figures, what its recipe holds of each domain."""
    lines = []
    for row in rows:
        for checkpoint in row["checkpoints"]:
            line = {name: row[name] for name in ("name", "recipe", "setting", "size", "seed")}
            line |= {name: checkpoint[name] for name in ("step", "train_loss", "text_loss", "digit_share")}
            line |= {f"accuracy_{skill}": value for skill, value in checkpoint["accuracy"].items()}
            line |= checkpoint["figures"]
            line["labels"] = checkpoint.get("right", {}).get("labels")
            line |= checkpoint.get("answers", {})
            line |= {name: checkpoint[name] for name in ("probability", "squares") if name in checkpoint}
            shares = study.content["recipes"][row["recipe"]]["shares"]
            line["false"] = bool(UNTRUE & set(shares))
            held = {f"seen_{domain}": sources for domain, sources in HOLD.items()}
            held |= {f"true_{domain}": sources - UNTRUE for domain, sources in HOLD.items()}
            held["false_math"] = {"wrong_sums", "digits"}
            for name, sources in held.items():  # rounded, so that equal shares are equal
                line[name] = round(sum(shares.get(source, 0) for source in sources), 6)
            lines.append(line)
    return pd.DataFrame(lines)


def correlations(x: Floats, y: Floats) -> Floats:
    """Spearman's rho of each row of ``x`` (b, n) with that of ``y``; NaN where one is constant."""
    a, b = rankdata(x, axis=-1), rankdata(y, axis=-1)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 0, (a * b).sum(-1) / size, np.nan)


def known_mean(values: Floats) -> Floats:
    """Mean over the first axis of what is no NaN; NaN where nothing is."""
    counts = np.isfinite(values).sum(0)
    return np.where(counts > 0, np.nansum(values, 0) / np.maximum(counts, 1), np.nan)


def drawn(recipes: int, seed: int = 0) -> NDArray[np.int64]:
    """Resamples of so many recipes, (b, recipes)."""
    return np.random.default_rng(seed).integers(recipes, size=(RESAMPLES, recipes))


@dataclass(frozen=True, eq=False)
class Population:
    """Checkpoints that are compared with those of the same seed.

    Attributes:
        table: Lines of `frame`.
        questions: How many of a skill each was asked.
        nested: Whether each recipe has one seed, so that recipes are resampled among those of their seed.
    """

    table: pd.DataFrame
    questions: int
    nested: bool = False

    @cached_property
    def weights(self) -> Floats:
        """How often each line's recipe is drawn, (b, lines)."""
        weights = np.zeros((RESAMPLES, len(self.table)))
        groups = self.table.groupby("seed" if self.nested else np.zeros(len(self.table)))
        for part, (_, same) in enumerate(groups):
            recipes = list(dict.fromkeys(same.recipe))
            draws = drawn(len(recipes), part)
            for number, recipe in enumerate(recipes):
                weights[:, self.table.recipe == recipe] = (draws == number).sum(1)[:, None]
        return weights

    def pairs(self, skill: str, *, holding: bool = False) -> Pairs:
        """Pairs that count: of one seed, with accuracies two binomial standard errors apart.

        With ``holding`` only those both of whose recipes hold the skill's domain, true or not.
        """
        y = self.table[f"accuracy_{skill}"].to_numpy(float)
        seeds = self.table.seed.to_numpy()
        kept = self.table[f"seen_{skill}"].to_numpy(float) > 0 if holding else np.ones(len(y), bool)
        i, j = np.triu_indices(len(y), 1)
        error = np.sqrt((y[i] * (1 - y[i]) + y[j] * (1 - y[j])) / self.questions)
        counts = (seeds[i] == seeds[j]) & kept[i] & kept[j] & (np.abs(y[i] - y[j]) > 2 * error)
        i, j = i[counts], j[counts]
        return Pairs(self, skill, i, j, np.sign(y[i] - y[j]))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs that count: their two lines, and which is better (1: the first)."""

    of: Population
    skill: str
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    sign: Floats

    def right(self, x: Floats) -> Floats:
        """Whether a figure of every line orders each pair as accuracy does: 1, 0, or one half where equal."""
        return (np.sign(x[self.first] - x[self.second]) * self.sign + 1) / 2

    def by(self, figure: str) -> Floats:
        """The same by one of `FIGURES` or `SHARES`, or by the mean rank of G and ratio in the seed."""
        table = self.of.table
        if figure != "mean rank":
            return self.right(table[f"{(FIGURES | SHARES)[figure]}_{self.skill}"].to_numpy(float))
        lines = np.unique([self.first, self.second])
        both = [table[f"{column}_{self.skill}"].iloc[lines] for column in FIGURES.values()]
        ranks = sum(values.groupby(table.seed.iloc[lines]).rank() for values in both)
        x = np.zeros(len(table))
        x[lines] = ranks.to_numpy(float)
        return self.right(x)

    @cached_property
    def by_labels(self) -> Floats:
        """Chance that so many random labelled questions order each pair right, (pairs, `MOST_LABELS`)."""
        flags = np.array([unpacked(cell[self.skill], self.of.questions) for cell in self.of.table.labels])
        rng, total = np.random.default_rng(1), np.zeros((len(self.sign), MOST_LABELS))
        for _ in range(DRAWS):
            sums = flags[:, rng.permutation(flags.shape[1])[:MOST_LABELS]].cumsum(1)
            total[:, : sums.shape[1]] += np.sign(sums[self.first] - sums[self.second]) * self.sign[:, None]
        return (total / DRAWS + 1) / 2

    def share(self, right: Floats, among: NDArray[np.bool_] | None = None) -> Resampled:
        """Share of the pairs, or of those ``among`` them, that are right."""
        chosen = np.ones(len(self.sign), bool) if among is None else among
        right, weights = right[chosen], self.of.weights
        weight = weights[:, self.first[chosen]] * weights[:, self.second[chosen]]
        total = weight.sum(1)
        samples = np.divide(weight @ right, total, out=np.full(len(total), np.nan), where=total > 0)
        return Resampled(float(right.mean()) if len(right) else float("nan"), samples, len(right))

    def agreement(self) -> dict[str, Resampled]:
        """How many pairs G and ratio order alike, how many of these are right, and G on the others."""
        g = self.by("G")
        agree = g == self.by("ratio")
        return {
            "agree": self.share(agree.astype(float)),
            "right": self.share(g, agree),
            "else": self.share(g, ~agree),
        }


def worth(shares: Mapping[Pairs, Resampled]) -> Estimate:
    """Labelled questions that order pairs as well as a figure, at its share and at its interval's ends."""
    curve = np.mean([pairs.by_labels.mean(0) for pairs in shares], axis=0)
    reached = np.maximum.accumulate(curve)
    share = mean_of(list(shares.values())).estimate
    return Estimate(*(float(np.searchsorted(reached, value) + 1) for value in share))


def leftover(x: Floats, y: Floats, z: Floats, weight: Floats) -> float:
    """Correlation of ``z`` with what a linear fit on ``y`` leaves of ``x``, all weighted."""
    x, y, z = (values - np.average(values, weights=weight) for values in (x, y, z))
    left = x - y * (weight @ (x * y)) / (weight @ (y * y))
    return float(weight @ (left * z) / np.sqrt((weight @ left**2) * (weight @ z**2)))
