"""From results to tables. Every interval is 95 %, from resampling recipes, each with all its seeds.

Nothing is chosen here by its outcome: rivals with their signs, variants, the split and the number of labels
stand in
the configuration, and what refutes a claim is written there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from benchmarks.validity.study import Study
from benchmarks.validity.texts import HOLD

Floats = NDArray[np.float64]
SKILLS = ("math", "code", "legal", "text")
DOMAINS = ("math", "code", "legal")
DRAWS = 200  # of labelled questions


class Estimate(NamedTuple):
    """A figure with the bounds of its interval; NaN where there is none."""

    value: float
    low: float
    high: float


#: Those among them that teach nothing true.
UNTRUE = {"wrong_sums", "digits", "wrong_code"}
#: Figures beside the registered rivals: the second figure, and two that know the recipe.
BESIDE = {"ratio": "ratio_folded", "share of the domain seen": "seen", "share of its true text": "true"}


def frame(study: Study, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One line a checkpoint: who it is, accuracies, losses and figures."""
    lines = []
    for row in rows:
        for checkpoint in row["checkpoints"]:
            line = {name: row[name] for name in ("name", "recipe", "setting", "size", "seed")}
            line |= {name: checkpoint[name] for name in ("step", "train_loss", "text_loss", "digit_share")}
            line |= {f"accuracy_{skill}": value for skill, value in checkpoint["accuracy"].items()}
            line |= checkpoint["figures"]
            line["labels"] = checkpoint.get("right", {}).get("labels")
            lines.append(line)
    table = pd.DataFrame(lines)
    made = study.content["recipes"]
    for domain in DOMAINS:
        for name, sources in (("seen", HOLD[domain]), ("true", HOLD[domain] - UNTRUE)):
            shares = {
                recipe: sum(share for source, share in made[recipe]["shares"].items() if source in sources)
                for recipe in table.recipe.unique()
                if recipe in made
            }
            table[f"{name}_{domain}"] = table.recipe.map(shares)
    return table


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


def agreement(x: Floats, y: Floats, questions: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Whether ``x`` orders each pair as accuracies ``y`` do, and which pairs count.

    Right is 1, wrong 0, equal one half. A pair counts where the accuracies differ by two binomial standard
    errors. Both results are (n, n), the second true above the diagonal only.
    """
    difference = y[:, None] - y[None]
    variance = y * (1 - y) / questions
    counts = np.triu(np.abs(difference) > 2 * np.sqrt(variance[:, None] + variance[None]), 1)
    return (np.sign(x[:, None] - x[None]) * np.sign(difference) + 1) / 2, counts


def decision(x: Floats, y: Floats, questions: int) -> tuple[float, int]:
    """Share of pairs that ``x`` orders as accuracies ``y`` do, and the pairs; see `agreement`."""
    right, counts = agreement(x, y, questions)
    return (float(right[counts].mean()), int(counts.sum())) if counts.any() else (float("nan"), 0)


def share_right(right: Floats, counts: NDArray[np.bool_], draws: NDArray[np.int64]) -> Estimate:
    """Share of right pairs over seeds, with its interval; ``right`` and ``counts`` are (seeds, n, n)."""
    hits, pairs = np.where(counts, right, 0.0).sum(0), counts.sum(0).astype(float)
    weights = np.stack([np.bincount(draw, minlength=len(pairs)) for draw in draws]).astype(float)
    got = np.einsum("bi,ij,bj->b", weights, hits, weights)
    of = np.einsum("bi,ij,bj->b", weights, pairs, weights)
    samples = np.divide(got, of, out=np.full(len(got), np.nan), where=of > 0)
    return bounds(float(hits.sum() / pairs.sum()) if pairs.sum() else float("nan"), samples)


def both(study: Study, own: Panel, skill: str) -> dict[str, Any]:
    """The pairs on which G and ratio agree: their share of all, how many are right, and of the others G."""
    y, draws = own.matrix(f"accuracy_{skill}"), resampled(study, len(own.recipes))
    figures = [own.matrix(f"{name}_{skill}") for name in ("cosine", "ratio_folded")]
    first, second = ([agreement(a, b, own.questions) for a, b in zip(x, y, strict=True)] for x in figures)
    right, counts = (np.array([pairs[part] for pairs in first]) for part in (0, 1))
    agree = counts & (right == np.array([pairs[0] for pairs in second]))
    return {
        "pairs": int(counts.sum()),
        "agree": share_right(agree.astype(float), counts, draws),
        "right": share_right(right, agree, draws),
        "else": share_right(right, counts & ~agree, draws),
    }


@dataclass(frozen=True)
class Panel:
    """Checkpoints of one size and step: recipes x seeds, complete."""

    recipes: list[str]
    seeds: list[int]
    table: pd.DataFrame  # indexed by (recipe, seed)

    def matrix(self, column: str) -> Floats:
        """A figure, (seeds, recipes)."""
        return self.table[column].unstack("seed").loc[self.recipes, self.seeds].to_numpy(float).T

    def labels(self, skill: str) -> NDArray[np.bool_]:
        """Flags of the labelled questions, (seeds, recipes, questions)."""
        from benchmarks.validity.population import unpacked  # imports torch, which no other figure needs

        own = self.table["labels"].unstack("seed").loc[self.recipes, self.seeds].T.to_numpy()
        return np.array([[unpacked(cell[skill], self.questions) for cell in row] for row in own])

    @property
    def questions(self) -> int:
        return int(self.table.attrs["questions"])


def panel(
    study: Study, table: pd.DataFrame, size: str, step: int, *, half: str | None = None
) -> Panel | None:
    """What is complete of a size at a step under default settings; None where that is too little.

    A population that was stopped early has seeds in which recipes are missing: such seeds are left out while
    less
    than nine tenths of the recipes would remain. ``half`` is ``choose`` or ``report`` (recipes and seeds of
    the split).
    """
    own = table[(table["size"] == size) & (table.step == step) & (table.setting == "default")]
    asked = [recipe for recipe in study.recipes(size) if half is None or study.half(recipe) == half]
    chosen = set(study.content["split"]["choose"]["seeds"])
    if half is not None:
        own = own[own.seed.isin(chosen) == (half == "choose")]
    own = own[own.recipe.isin(asked)]
    seeds, recipes = [], asked
    for seed, group in own.groupby("seed"):
        left = [recipe for recipe in recipes if recipe in set(group.recipe)]
        if len(left) >= 0.9 * len(asked):
            seeds, recipes = [*seeds, int(seed)], left
    if not seeds or len(recipes) < 4:
        return None
    found = own[own.recipe.isin(recipes) & own.seed.isin(seeds)].set_index(["recipe", "seed"])
    found.attrs["questions"] = study.content["questions"]
    return Panel(recipes, seeds, found)


def within_domain(study: Study, own: Panel, domain: str) -> Panel:
    """The same with only those recipes whose texts hold the domain at all, by their shares."""
    made = study.content["recipes"]
    recipes = [recipe for recipe in own.recipes if HOLD[domain] & set(made[recipe]["shares"])]
    return Panel(recipes, own.seeds, own.table)


def resampled(study: Study, recipes: int) -> NDArray[np.int64]:
    """Resamples of recipes, (b, recipes)."""
    draws = study.content["analysis"]["resamples"]
    return np.random.default_rng(0).integers(recipes, size=(draws, recipes))


def bounds(value: float, samples: Floats) -> Estimate:
    """A figure and the 2.5th and 97.5th percentile of its resamples."""
    kept = samples[np.isfinite(samples)]
    if len(kept) < 2 or not np.isfinite(value):
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.percentile(kept, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def mean_rho(x: Floats, y: Floats, draws: NDArray[np.int64]) -> tuple[float, Floats]:
    """Mean over seeds of rho over recipes, and its resamples; ``x`` and ``y`` are (seeds, recipes)."""
    if not np.isfinite(x).all():
        return float("nan"), np.full(len(draws), np.nan)
    value = float(np.nanmean(correlations(x, y)))
    samples = [correlations(a[draws], b[draws]) for a, b in zip(x, y, strict=True)]
    return value, known_mean(np.array(samples))


def predictors(study: Study, skill: str) -> dict[str, tuple[str, int]]:
    """Everything that might order checkpoints: name -> column and sign."""
    found = {"G (cosine)": (f"cosine_{skill}", 1), "G (Euclidean)": (f"euclidean_{skill}", 1)}
    for name, sign in study.content["analysis"]["rivals"].items():
        column = name if not name.endswith("_math") else f"{name.removesuffix('_math')}_{skill}"
        found[name.removesuffix("_math")] = (column, sign)
    return found


def ordering(study: Study, own: Panel, domain: str, skill: str) -> list[dict[str, Any]]:
    """How well each figure and each number of labels orders recipes at one size and step."""
    draws = resampled(study, len(own.recipes))
    rows = by_figure(study, own, domain, skill)
    y = own.matrix(f"accuracy_{skill}")
    rows += [_order(study, own, name, own.matrix(f"{column}_{domain}"), y) for name, column in BESIDE.items()]
    flags, pairs = own.labels(skill), rows[0]["pairs"]
    rng = np.random.default_rng(1)
    for count in study.content["analysis"]["labels"]:
        rhos, shares, samples = [], [], []
        for _ in range(1 if count >= flags.shape[2] else DRAWS):
            x = flags[:, :, rng.choice(flags.shape[2], min(count, flags.shape[2]), replace=False)].mean(2)
            rhos.append(np.nanmean(correlations(x, y)))
            shares.append(np.nanmean([decision(a, b, own.questions)[0] for a, b in zip(x, y, strict=True)]))
            some = draws[rng.integers(len(draws), size=200 if count >= flags.shape[2] else 5)]
            samples.append(mean_rho(x, y, some)[1])
        rows.append(
            {
                "predictor": f"{count} labels",
                "rho": bounds(float(np.mean(rhos)), np.concatenate(samples)),
                "decision": Estimate(float(np.mean(shares)), float("nan"), float("nan")),
                "pairs": pairs,
            }
        )
    return rows + by_another_seed(study, own, skill)


def by_figure(study: Study, own: Panel, domain: str, skill: str) -> list[dict[str, Any]]:
    """How well each figure orders recipes at one size and step."""
    y = own.matrix(f"accuracy_{skill}")
    return [
        _order(study, own, name, sign * own.matrix(column), y)
        for name, (column, sign) in predictors(study, domain).items()
        if name != "step"  # the same for all of them here
    ]


def by_another_seed(study: Study, own: Panel, skill: str) -> list[dict[str, Any]]:
    """The same recipe with another seed: what training's own noise allows; empty for one seed."""
    y = own.matrix(f"accuracy_{skill}")
    return (
        [_order(study, own, "accuracy of another seed", np.roll(y, 1, axis=0), y)]
        if len(own.seeds) > 1
        else []
    )


def _order(study: Study, own: Panel, name: str, x: Floats, y: Floats) -> dict[str, Any]:
    """How well ``x`` (seeds, recipes) orders ``y``."""
    draws = resampled(study, len(own.recipes))
    value, samples = mean_rho(x, y, draws)
    parts = [agreement(a, b, own.questions) for a, b in zip(x, y, strict=True)]
    counts = np.array([kept for _, kept in parts])
    return {
        "predictor": name,
        "rho": bounds(value, samples),
        "decision": share_right(np.array([right for right, _ in parts]), counts, draws),
        "pairs": int(counts.sum()),
    }


def worth(study: Study, own: Panel, skill: str) -> Estimate:
    """How many labelled questions order pairs as well as G, at its share and at the ends of its interval."""
    x, y, flags = own.matrix(f"cosine_{skill}"), own.matrix(f"accuracy_{skill}"), own.labels(skill)
    share = _order(study, own, "", x, y)["decision"]
    rng, most = np.random.default_rng(3), 40
    curve = np.zeros(most)
    for _ in range(DRAWS):
        order = rng.permutation(flags.shape[2])[:most]
        means = np.cumsum(flags[:, :, order], 2) / np.arange(1, most + 1)
        for count in range(most):
            parts = [decision(a, b, own.questions)[0] for a, b in zip(means[:, :, count], y, strict=True)]
            curve[count] += float(known_mean(np.array(parts))) / DRAWS
    return Estimate(*(float(np.searchsorted(np.maximum.accumulate(curve), value) + 1) for value in share))


def along(
    study: Study, table: pd.DataFrame, skill: str, *, above: float = 0.1, fewest: int | None = None
) -> dict[str, Any]:
    """Rho along the trained checkpoints of each run that ends above 0.1, mean over runs, by predictor.

    ``fewest`` is how many checkpoints a run has to have: all of the study's, where it is not given.
    """
    fewest = len(study.steps) - 1 if fewest is None else fewest
    own = table[(table.setting == "default") & (table.step > 0)]
    found: dict[str, dict[str, list[float]]] = {}
    runs = 0
    for _, run in own.groupby("name"):
        run = run.sort_values("step")
        y = run[f"accuracy_{skill}"].to_numpy(float)
        if y[-1] <= above or len(y) < fewest:
            continue
        runs += 1
        for name, (column, sign) in predictors(study, skill).items():
            rho = float(correlations(sign * run[column].to_numpy(float)[None], y[None])[0])
            found.setdefault(name, {}).setdefault(str(run.recipe.iloc[0]), []).append(rho)
    rows = []
    for name, by_recipe in found.items():
        means = np.array([float(known_mean(np.array(values))) for values in by_recipe.values()])
        draws = resampled(study, len(means))
        rows.append({"predictor": name, "rho": bounds(float(known_mean(means)), known_mean(means[draws].T))})
    return {"runs": runs, "rows": rows}


def seed_pairs(study: Study, own: Panel, skill: str) -> dict[str, Any]:
    """Whether G tells which of two seeds of a recipe is better, over pairs that the questions tell apart."""
    x, y = own.matrix(f"cosine_{skill}"), own.matrix(f"accuracy_{skill}")
    right: dict[str, list[float]] = {}
    for number, recipe in enumerate(own.recipes):
        for i in range(len(own.seeds)):
            for j in range(i):
                a, b = y[i, number], y[j, number]
                if abs(a - b) > 2 * np.sqrt((a * (1 - a) + b * (1 - b)) / own.questions):
                    right.setdefault(recipe, []).append(float((x[i, number] - x[j, number]) * (a - b) > 0))
    sums = np.array([[sum(values), len(values)] for values in right.values()])
    noise = {
        "sd_accuracy": float(y.std(0, ddof=1).mean()) if len(y) > 1 else float("nan"),
        "sd_gap": float(x.std(0, ddof=1).mean()) if len(x) > 1 else float("nan"),
    }
    if not len(sums):
        return {"share": Estimate(float("nan"), float("nan"), float("nan")), "pairs": 0, **noise}
    drawn = sums[resampled(study, len(sums))].sum(1)
    share = float(sums[:, 0].sum() / sums[:, 1].sum())
    return {"share": bounds(share, drawn[:, 0] / drawn[:, 1]), "pairs": int(sums[:, 1].sum()), **noise}


def across_sizes(study: Study, small: Panel, large: Panel, skill: str) -> list[dict[str, Any]]:
    """Figures of the small models, mean over seeds, against accuracy of the larger ones."""
    both = [recipe for recipe in large.recipes if recipe in small.recipes]
    places = [small.recipes.index(recipe) for recipe in both]
    y = large.matrix(f"accuracy_{skill}").mean(0)[[large.recipes.index(recipe) for recipe in both]][None]
    draws = resampled(study, len(both))
    columns = {
        "G (cosine) of the small models": f"cosine_{skill}",
        "accuracy of the small models": f"accuracy_{skill}",
    }
    rows = []
    for name, column in columns.items():
        value, samples = mean_rho(small.matrix(column).mean(0)[places][None], y, draws)
        rows.append({"predictor": name, "recipes": len(both), "rho": bounds(value, samples)})
    value, samples = mean_rho(
        large.matrix(f"cosine_{skill}").mean(0)[None][:, [large.recipes.index(r) for r in both]], y, draws
    )
    rows.append(
        {"predictor": "G (cosine) of the larger models", "recipes": len(both), "rho": bounds(value, samples)}
    )
    return rows


def residual(values: Floats, controls: Floats) -> Floats:
    """What a linear fit of controls (n, k) leaves of values (n,)."""
    design = np.column_stack([np.ones(len(values)), controls])
    return values - design @ np.linalg.lstsq(design, values, rcond=None)[0]


def partial(
    study: Study, table: pd.DataFrame, skill: str, *, last: bool, size: str = "small"
) -> list[dict[str, Any]]:
    """Rank correlation of G with accuracy once each rival, and all together, are taken out of both.

    Ranks are of all trained checkpoints of one size under default settings, or of the last ones.
    """
    own = table[(table["size"] == size) & (table.setting == "default") & (table.step > 0)]
    if last:
        own = own[own.step == study.steps[-1]]
    rivals = {
        name: rankdata(own[column])
        for name, (column, _) in predictors(study, skill).items()
        if not name.startswith("G ") and own[column].nunique() > 1
    }
    g, y = rankdata(own[f"cosine_{skill}"]), rankdata(own[f"accuracy_{skill}"])
    groups = [np.flatnonzero(own.recipe == recipe) for recipe in dict.fromkeys(own.recipe)]
    sets = {"nothing": [], **{name: [name] for name in rivals}, "all of these": list(rivals)}
    draws = resampled(study, len(groups))[:500]
    rows = []
    for name, chosen in sets.items():
        controls = np.column_stack([rivals[c] for c in chosen]) if chosen else np.zeros((len(g), 0))

        def rho(index: NDArray[np.int64], controls: Floats = controls) -> float:
            a, b = residual(g[index], controls[index]), residual(y[index], controls[index])
            return float(np.corrcoef(a, b)[0, 1]) if a.std() > 1e-9 and b.std() > 1e-9 else float("nan")

        samples = np.array([rho(np.concatenate([groups[i] for i in draw])) for draw in draws])
        rows.append({"taken out": name, "rho": bounds(rho(np.arange(len(g))), samples)})
    return rows


def matrix(study: Study, own: Panel) -> list[dict[str, Any]]:
    """Rho of each domain's G with each skill."""
    draws = resampled(study, len(own.recipes))
    rows = []
    for domain in DOMAINS:
        for skill in SKILLS:
            value, samples = mean_rho(own.matrix(f"cosine_{domain}"), own.matrix(f"accuracy_{skill}"), draws)
            rows.append({"domain": domain, "skill": skill, "rho": bounds(value, samples)})
    return rows


INVARIANT = {"ratio_folded", "centred_folded"}  # to a common vector and to a scale moved to the final norm


def variants(study: Study, table: pd.DataFrame) -> list[dict[str, Any]]:
    """Variants of the metric on the choosing half and, with the difference to the cosine G, on the other.

    A figure is the mean over the three domains of rho with the domain's own skill. Holm's correction is over
    all variants; the one that the choosing half prefers needs none.
    """
    found: dict[str, dict[str, tuple[float, Floats]]] = {}
    for half in ("choose", "report"):
        own = panel(study, table, "small", study.steps[-1], half=half)
        if own is None:
            return []
        draws = resampled(study, len(own.recipes))
        for name in study.content["analysis"]["variants"]:
            if name.startswith("since_"):
                continue  # G less a constant of the seed: it orders as G does
            parts = []
            for domain in DOMAINS:
                x = own.matrix(f"{name}_{domain}")
                parts.append(mean_rho(x, own.matrix(f"accuracy_{domain}"), draws))
            value = float(np.mean([part[0] for part in parts]))
            found.setdefault(name, {})[half] = (value, np.mean([part[1] for part in parts], axis=0))
    base_value, base_samples = found["cosine"]["report"]
    rows = []
    for name, halves in found.items():
        value, samples = halves["report"]
        difference = samples - base_samples
        tail = 2 * min(float((difference <= 0).mean()), float((difference >= 0).mean()))
        rows.append(
            {
                "variant": name,
                "unmoved": name in INVARIANT,
                "choose": halves["choose"][0],
                "report": bounds(value, samples),
                "difference": bounds(value - base_value, difference),
                "p": 1.0 if name == "cosine" else min(1.0, max(tail, 1 / len(difference))),
            }
        )
    tested = sorted((row for row in rows if row["variant"] != "cosine"), key=lambda row: row["p"])
    worst = 0.0
    for number, row in enumerate(tested):
        worst = max(worst, min(1.0, row["p"] * (len(tested) - number)))
        row["holm"] = worst
    return sorted(rows, key=lambda row: -row["choose"])


def settings_decision(study: Study, table: pd.DataFrame) -> float:
    """Share of the pairs of settings that G orders as accuracy does, mean over recipes and seeds."""
    last = table[(table["size"] == "small") & (table.step == study.steps[-1])]
    recipes = {recipe for part in study.content["population"].values() for recipe in part["settings_on"]}
    shares = [
        decision(
            group.cosine_math.to_numpy(float), group.accuracy_math.to_numpy(float), study.content["questions"]
        )[0]
        for _, group in last[last.recipe.isin(recipes)].groupby(["recipe", "seed"])
    ]
    return float(known_mean(np.array(shares))) if shares else float("nan")


def settings(study: Study, table: pd.DataFrame) -> list[dict[str, Any]]:
    """Settings of the optimiser on one recipe: means over seeds, with the range."""
    last = table[(table["size"] == "small") & (table.step == study.steps[-1])]
    recipes = {recipe for part in study.content["population"].values() for recipe in part["settings_on"]}
    rows = []
    for (recipe, setting), group in last[last.recipe.isin(recipes)].groupby(
        ["recipe", "setting"], sort=False
    ):
        rows.append(
            {
                "recipe": recipe,
                "setting": setting,
                "seeds": len(group),
                "accuracy": float(group.accuracy_math.mean()),
                **{
                    name: Estimate(float(group[c].mean()), float(group[c].min()), float(group[c].max()))
                    for name, c in (
                        ("cosine", "cosine_math"), ("euclidean", "euclidean_math"), ("ratio",
                        "ratio_folded_math"),
                    )
                },
            }
        )  # fmt: skip
    return rows


def trial_tables(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Trials: what moved no prediction, largest movement by change; and the others, before and after."""
    before = {(row["of"], row["seed"]): row for row in rows if row["kind"] == "none"}
    same: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] != "same" or (row["of"], row["seed"]) not in before:
            continue
        own = same.setdefault(row["change"], {"change": row["change"], "shift": 0.0, "checkpoints": 0})
        own["shift"] = max(own["shift"], row["shift"])
        own["checkpoints"] += 1
        for name in ("cosine", "euclidean", "centred", "ratio_folded", "centred_folded"):
            start = before[row["of"], row["seed"]]["figures"][f"{name}_math"]
            moved = abs(row["figures"][f"{name}_math"] - start)
            own[name] = max(own.get(name, 0.0), moved)
    other: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] in {"changed", "merge", "fine-tune"}:
            other.setdefault((row["change"], row["of"]), []).append(row)
    changed = []
    for (change, of), group in other.items():
        starts = [before.get((of.split(" -> ")[0].split(" + ")[0], row["seed"])) for row in group]
        if any(start is None for start in starts):
            continue
        line: dict[str, Any] = {"change": change, "of": of, "seeds": len(group)}
        for when, part in (("before", starts), ("after", group)):
            line[f"accuracy {when}"] = float(np.mean([r["accuracy"]["math"] for r in part if r]))
            line[f"cosine {when}"] = float(np.mean([r["figures"]["cosine_math"] for r in part if r]))
            line[f"ratio {when}"] = float(np.mean([r["figures"]["ratio_folded_math"] for r in part if r]))
        changed.append(line)
    return {"same": list(same.values()), "changed": changed}
