"""The hand-made recipes' verdict on each claim of full.yaml: its rules as code, a line of the page each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.validity.analysis import (
    INCONCLUSIVE,
    UNTESTED,
    Floats,
    Population,
    Resampled,
    Verdict,
    correlations,
    drawn,
    frame,
    known_mean,
    outcome,
    sign_of,
)
from benchmarks.validity.study import Study
from benchmarks.validity.texts import DOMAINS, SKILLS

FOLLOWED = ("text", "sums-words", "wrong-sums")  # checkpoints whose changes the page shows
UNSHOWN = ("head in 8 bits", "head in 4 bits")  # changes that it does not


def mean_rho(x: Floats, y: Floats) -> Resampled:
    """Mean over seeds of rho over recipes; ``x`` and ``y`` are (seeds, recipes)."""
    draws = drawn(x.shape[1])
    samples = [correlations(a[draws], b[draws]) for a, b in zip(x, y, strict=True)]
    return Resampled(float(np.nanmean(correlations(x, y))), known_mean(np.array(samples)))


class HandMade:
    """The population of full.yaml, its trials, and every figure that a claim needs."""

    def __init__(
        self, study: Study, rows: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]
    ) -> None:
        self.study, self.trials = study, trials
        self.table = frame(study, rows)
        self.small = self._last("small")

    def _last(self, size: str) -> pd.DataFrame:
        table, last = self.table, self.study.steps[-1]
        chosen = (table["size"] == size) & (table.setting == "default") & (table.step == last)
        return table[chosen].reset_index(drop=True)

    def matrix(self, column: str, table: pd.DataFrame | None = None) -> Floats:
        """A figure, (seeds, recipes); of the small size's last checkpoints where no table is given."""
        wide = (self.small if table is None else table).pivot(index="seed", columns="recipe", values=column)
        return wide[[name for name in self.study.content["recipes"] if name in wide]].dropna().to_numpy(float)

    @cached_property
    def population(self) -> Population:
        return Population(self.small, self.study.content["questions"])

    def rho(self, column: str, skill: str, sign: int = 1) -> Resampled:
        """Mean over seeds of the rank correlation of a figure with a skill over recipes."""
        return mean_rho(sign * self.matrix(column), self.matrix(f"accuracy_{skill}"))

    @cached_property
    def rivals(self) -> dict[str, tuple[str, int]]:
        """Figures that need no label and are no G: name -> column for math, and which way it is read."""
        named = self.study.content["analysis"]["rivals"].items()
        return {name.removesuffix("_math"): (name, sign) for name, sign in named if name in self.table}

    def along(self) -> dict[str, Any]:
        """Mean rho of G and of the step along the runs that end above 0.1 in math, and how many these are."""
        table = self.table[(self.table.setting == "default") & (self.table.step > 0)].sort_values("step")
        runs = [run for _, run in table.groupby("name") if run.accuracy_math.iloc[-1] > 0.1]
        figures: dict[str, Any] = {"runs": len(runs)}
        for name, column in (("G", "cosine_math"), ("step", "step")):
            by_recipe: dict[str, list[float]] = {}
            for run in runs:
                x, y = run[column].to_numpy(float), run.accuracy_math.to_numpy(float)
                by_recipe.setdefault(run.recipe.iloc[0], []).append(float(correlations(x[None], y[None])[0]))
            means = np.array([float(known_mean(np.array(values))) for values in by_recipe.values()])
            figures[name] = Resampled(float(known_mean(means)), known_mean(means[drawn(len(means))].T))
        return figures

    def seeds(self) -> Resampled:
        """Share of the pairs of seeds of one recipe that G orders right."""
        # Pairs are of one seed; here they are of one recipe, so the two change places.
        groups = self.small.assign(recipe=self.small.seed, seed=self.small.recipe)
        pairs = Population(groups, self.study.content["questions"]).pairs("math")
        right, recipes = pairs.by("G"), groups.seed.to_numpy()[pairs.first]
        sums = np.array([[right[recipes == r].sum(), (recipes == r).sum()] for r in dict.fromkeys(recipes)])
        samples = sums[drawn(len(sums))].sum(1)
        return Resampled(float(right.mean()), samples[:, 0] / samples[:, 1], len(right))

    def partial(self, *, last: bool) -> dict[str, Resampled]:
        """Rank correlation of G with math accuracy, with nothing and with all rivals taken out of both."""
        every_step = self.table[(self.table.setting == "default") & (self.table.step > 0)]
        table = self.small if last else every_step[every_step["size"] == "small"]
        columns = [column for column, _ in self.rivals.values() if table[column].nunique() > 1]
        g, y = rankdata(table.cosine_math), rankdata(table.accuracy_math)
        ranks = np.column_stack([np.ones(len(g)), *(rankdata(table[column]) for column in columns)])
        groups = [np.flatnonzero(table.recipe == recipe) for recipe in dict.fromkeys(table.recipe)]
        draws = [np.concatenate([groups[i] for i in draw]) for draw in drawn(len(groups))]

        def rho(lines: NDArray[np.int64], controls: Floats) -> float:
            design = controls[lines]
            both = np.column_stack([g[lines], y[lines]])
            left = both - design @ np.linalg.lstsq(design, both, rcond=None)[0]
            return float(np.corrcoef(left.T)[0, 1]) if left.std(0).min() > 1e-9 else float("nan")

        every = np.arange(len(g))
        return {
            name: Resampled(rho(every, controls), np.array([rho(draw, controls) for draw in draws]))
            for name, controls in (("nothing", ranks[:, :1]), ("all rivals", ranks))
        }

    def settings(self) -> dict[str, float]:
        """How far settings move G and order accuracy on the recipes that are trained with them."""
        table = self.table[(self.table["size"] == "small") & (self.table.step == self.study.steps[-1])]
        recipes = set(table.recipe[table.setting != "default"])
        table = table[table.recipe.isin(recipes)].reset_index(drop=True)
        means = table.groupby("setting")[["cosine_math", "accuracy_math"]].mean().to_numpy(float)
        # Pairs of settings are of one recipe and seed.
        groups = table.assign(recipe=table.setting, seed=table.recipe + table.seed.astype(str))
        pairs = Population(groups, self.study.content["questions"]).pairs("math")
        by_seed = pd.Series(pairs.by("G")).groupby(groups.seed.to_numpy()[pairs.first]).mean()
        return {
            "settings": len(means) - 1,
            "range": float(np.ptp(means[:, 0])),
            "right": float(by_seed.mean()),
            "rho": float(correlations(means[None, :, 0], means[None, :, 1])[0]),
        }

    def sizes(self) -> tuple[Resampled, Resampled, int]:
        """Rho of G and of accuracy of the small models with math accuracy of the larger ones."""
        large = self._last("medium")
        small = self.small[self.small.recipe.isin(large.recipe)]
        y = self.matrix("accuracy_math", large).mean(0, keepdims=True)
        by_g, by_accuracy = (
            mean_rho(self.matrix(column, small).mean(0, keepdims=True), y)
            for column in ("cosine_math", "accuracy_math")
        )
        return by_g, by_accuracy, y.shape[1]

    def unmoved(self) -> pd.DataFrame:
        """Changes that move no prediction: largest movement of a log-probability, of G and of ratio."""
        before = {(row["of"], row["seed"]): row["figures"] for row in self.trials if row["kind"] == "none"}
        lines = [
            {"change": row["change"], "of": row["of"], "a log-probability": row["shift"]}
            | {
                name: abs(row["figures"][column] - before[row["of"], row["seed"]][column])
                for name, column in (
                    ("G", "cosine_math"),
                    ("G Euclidean", "euclidean_math"),
                    ("ratio", "ratio_folded_math"),
                )
            }
            for row in self.trials
            if row["kind"] == "same"
        ]
        return pd.DataFrame(lines).groupby("change", sort=False).max().drop(columns="of")

    def moved(self) -> pd.DataFrame:
        """Other changes, of checkpoints that the page follows: means over seeds, before and after."""
        before = {(row["of"], row["seed"]): row for row in self.trials if row["kind"] == "none"}
        lines = []
        for row in self.trials:
            start = before.get((row["of"].split(" -> ")[0], row["seed"]))
            followed = row["of"] in FOLLOWED or "->" in row["of"]
            if row["kind"] in ("none", "same") or row["change"] in UNSHOWN or start is None or not followed:
                continue
            line = {"change": row["change"], "checkpoint": row["of"]}
            for when, part in (("before", start), ("after", row)):
                line[f"accuracy {when}"] = part["accuracy"]["math"]
                line[f"G {when}"] = part["figures"]["cosine_math"]
                line[f"ratio {when}"] = part["figures"]["ratio_folded_math"]
            lines.append(line)
        return pd.DataFrame(lines).groupby(["change", "checkpoint"], sort=False).mean().reset_index()


def verdicts(data: HandMade) -> list[Verdict]:
    """All lines, in the order of the configuration's claims."""
    g = data.rho("cosine_math", "math")
    pairs = data.population.pairs("math")
    decision = pairs.share(pairs.by("G"))
    return [
        _orders(g, decision),
        _trajectory(data),
        _seeds(data),
        _sizes(data),
        _adds(data),
        _beats_rivals(data, g),
        _beats_labels(pairs, decision),
        _frequency(data),
        _optimiser(data),
        _gauge(data),
        _domains(data),
        _variant(data),
    ]


def _orders(g: Resampled, decision: Resampled) -> Verdict:
    result = f"rho {g.estimate}; decision accuracy {decision.estimate}"
    verdict = outcome(g.estimate.low > 0.5, g.estimate.low > 0)
    return Verdict(verdict, "G orders recipes by math accuracy (one size, one step)", result)


def _trajectory(data: HandMade) -> Verdict:
    along = data.along()
    g, step = along["G"].estimate, along["step"].estimate
    verdict = outcome(g.low > 0 and step.value < g.value)
    result = f"{along['runs']} runs that learn math: mean rho {g}; the step alone {step}"
    return Verdict(verdict, "G orders the checkpoints of one run", result)


def _seeds(data: HandMade) -> Verdict:
    share = data.seeds()
    right = share.estimate
    verdict = INCONCLUSIVE if right.includes(0.5) else outcome(right.low > 0.75, right.low > 0.5)
    moved = (data.matrix(column).std(0, ddof=1).mean() for column in ("accuracy_math", "cosine_math"))
    spread = "accuracy {:.3f}, G {:.3f}".format(*moved)
    return Verdict(
        verdict,
        "G tells which seed of a recipe is better",
        f"{share.pairs} pairs, right: {right}; sd over seeds: {spread}",
    )


def _sizes(data: HandMade) -> Verdict:
    claim = "G of small models orders larger ones"
    if "medium" not in set(data.table["size"]):
        return Verdict(UNTESTED, claim, "the larger size is not trained yet")
    by_g, by_accuracy, recipes = data.sizes()
    result = f"{recipes} recipes: rho {by_g.estimate}; accuracy of the small models {by_accuracy.estimate}"
    return Verdict(outcome(by_g.estimate.low > 0.5, by_g.estimate.low > 0), claim, result)


def _adds(data: HandMade) -> Verdict:
    over_all, last = (data.partial(last=last)["all rivals"].estimate for last in (False, True))
    result = f"partial rho over all trained checkpoints {over_all}, over the last ones {last}"
    return Verdict(outcome(over_all.low > 0), f"G adds to {len(data.rivals)} cheap rivals together", result)


def _beats_rivals(data: HandMade, g: Resampled) -> Verdict:
    rivals = {
        name: data.rho(column, "math", sign) for name, (column, sign) in data.rivals.items() if name != "step"
    }
    name, best = max(rivals.items(), key=lambda item: item[1].value)
    verdict = outcome(best.estimate.high < g.estimate.low, best.value < g.value)
    result = f"rho {g.estimate}; best of {len(rivals)}, {name}: {best.estimate}"
    return Verdict(verdict, "G orders better than each rival alone", result)


def _beats_labels(pairs: Any, decision: Resampled) -> Verdict:
    few, many = (float(pairs.by_labels[:, count - 1].mean()) for count in (25, 100))
    result = f"decision accuracy {decision.value:.2f}; 25 labels {few:.2f}, 100 labels {many:.2f}"
    return Verdict(outcome(decision.value > few), "G orders better than 25 labelled questions", result)


def _frequency(data: HandMade) -> Verdict:
    small = data.small.set_index(["recipe", "seed"])
    base, said, above = small.loc["sums-05"], [], []
    for recipe in ("wrong-sums", "digits"):
        runs = small.loc[recipe]
        higher = (runs.cosine_math > base.cosine_math.reindex(runs.index)).sum()
        said.append(f"{recipe} above sums-05 in {higher} of {len(runs)} seeds")
        above.append(higher > len(runs) / 2 and runs.accuracy_math.mean() < base.accuracy_math.mean())
    means = {recipe: small.loc[recipe].accuracy_math.mean() for recipe in ("sums-05", "wrong-sums", "digits")}
    accuracies = ", ".join(f"{recipe} {mean:.2f}" for recipe, mean in means.items())
    result = f"{'; '.join(said)}; accuracy: {accuracies}"
    return Verdict(outcome(not any(above)), "G is not the frequency of digits", result)


def _optimiser(data: HandMade) -> Verdict:
    claim = "Optimiser settings move G less than recipes do"
    if set(data.table.setting) == {"default"}:
        return Verdict(UNTESTED, claim, "settings are not trained yet")
    settings, recipes = data.settings(), float(np.ptp(data.matrix("cosine_math").mean(0)))
    return Verdict(
        outcome(settings["range"] < recipes / 2, settings["rho"] > 0.5),
        claim,
        f"{settings['settings']} settings: range of G {settings['range']:.2f}, over recipes {recipes:.2f}; "
        f"yet G orders only {settings['right']:.2f} of the pairs of settings, rho {settings['rho']:.2f}",
    )


def _gauge(data: HandMade) -> Verdict:
    claim = "G does not move where no prediction moves"
    if not data.trials:
        return Verdict(UNTESTED, claim, "trials are not run yet")
    rows = data.unmoved()
    nearest = float(np.diff(np.sort(data.matrix("cosine_math"), axis=1), axis=1).min())
    moved = rows.index[(nearest < rows.G)]
    result = f"{len(rows)} changes move G by up to {rows.G.max():.2f} ({rows.G.idxmax()})"
    result += f", {len(moved)} by more than neighbours in rank differ; ratio by up to {rows.ratio.max():.3f}"
    return Verdict(outcome(not len(moved)), claim, result)


def _domains(data: HandMade) -> Verdict:
    held, said = 0, []
    for domain in DOMAINS:
        cells: Mapping[str, Resampled] = {s: data.rho(f"cosine_{domain}", s) for s in SKILLS}
        same = cells[domain].estimate
        other = max((s for s in SKILLS if s != domain), key=lambda s: cells[s].value)
        held += same.value > cells[other].value and same.low > 0
        said.append(f"{domain} {same} against {other} {cells[other].value:.2f}")
    verdict = outcome(held == len(DOMAINS), held > 0)
    return Verdict(verdict, "G of a domain follows that domain's skill", f"rho {'; '.join(said)}")


def _variant(data: HandMade) -> Verdict:
    choose = data.study.content["split"]["choose"]
    chosen = data.small.recipe.isin(choose["recipes"]) | data.small.seed.isin(choose["seeds"])
    rest = data.small[~chosen]
    parts: dict[str, list[Resampled]] = {"cosine": [], "ratio_folded": []}
    for domain in DOMAINS:
        y = data.matrix(f"accuracy_{domain}", rest)
        for name, figures in parts.items():
            figures.append(mean_rho(data.matrix(f"{name}_{domain}", rest), y))
    g, ratio = (
        Resampled(float(np.mean([p.value for p in figures])), np.mean([p.samples for p in figures], axis=0))
        for figures in parts.values()
    )
    difference = ratio.less(g)
    return Verdict(
        sign_of(difference),
        "Ratio, which nothing moves, orders better than G",
        f"recipes and seeds that nothing was chosen on: rho {ratio.estimate}, G {g.estimate}, difference "
        f"{difference.estimate}",
    )
