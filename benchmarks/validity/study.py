"""A study's configuration: which models are trained, and what of the outcome would refute which claim.

The file is committed before its run. Nothing in it is chosen by what came out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.validity.texts import ALIKE, HOLD, SOURCES

TRAINING = {"batch", "length", "lr", "warmup", "decay", "weight_decay"}


@dataclass(frozen=True)
class Run:
    """One model to train.

    Attributes:
        recipe: Name of its mixture.
        seed: Of initial weights and of the order of data.
        shares: Share of the sequences by source.
        base: Recipe whose last checkpoint is trained on, None for initial weights.
        training: Settings of the optimiser.
        steps: How many; the last checkpoint is stored.
        order: Another order of the data, where recipes of one seed are to differ by chance alone.
        adapter: Of a LoRA adapter that is trained in place of the weights: ``rank`` and ``modules`` (``all``
            projections or those of ``attention``).
    """

    recipe: str
    seed: int
    shares: Mapping[str, float]
    base: str | None
    training: Mapping[str, Any]
    steps: int
    order: int = 0
    adapter: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The folder of its checkpoint, and its line in the results."""
        return f"small-{self.recipe}-default-seed{self.seed}"


@dataclass(frozen=True)
class Study:
    """A population of one size and its analysis, as the configuration says."""

    path: Path
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def shape(self) -> Mapping[str, int]:
        """Width, layers and so on of each model."""
        return dict(self.content["sizes"]["small"])

    def runs(self) -> list[Run]:
        """All models, by seed."""
        recipes = self.content["recipes"].items()
        seeds = self.content["population"]["small"]["seeds"]
        return [
            self._run(name, made, seed)
            for seed in sorted(seeds)
            for name, made in recipes
            if made.get("seed", seed) == seed
        ]

    def groups(self) -> list[list[Run]]:
        """Models that are trained side by side, with one setting of the optimiser.

        They go by seed, so that a run that is cut short leaves whole seeds. Those who go on from a base come
        after it.
        """
        waiting: dict[tuple[Any, ...], list[Run]] = {}
        for run in self.runs():
            optimiser = (run.training["lr"], run.steps, run.adapter is not None) if run.base else ()
            waiting.setdefault((run.seed, run.base or "", optimiser), []).append(run)
        ordered = [(key, waiting[key]) for key in sorted(waiting)]
        most = self.content["side_by_side"]
        return [group[i : i + most] for _, group in ordered for i in range(0, len(group), most)]

    def _run(self, recipe: str, made: Mapping[str, Any], seed: int) -> Run:
        return Run(
            recipe,
            seed,
            made["shares"],
            made.get("base"),
            {**self.content["training"], **made.get("training", {})},
            made.get("steps", self.content["steps"])[-1],
            made.get("order", 0),
            made.get("adapter"),
        )


def mixtures(made: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Random recipes, by name: text and a few other sources that touch at least two domains.

    Text's share is drawn evenly from a range, the others share the rest by a flat Dirichlet distribution, in
    whole percents. A kind of mixtures may train on from a base, with its own steps and settings; of a list of
    ``optimisers`` each recipe takes the next, beginning at ``first``. Sources are drawn ``among`` some (all
    but text), at least one of ``need``. A ``base`` may be given by seed. With ``shares`` nothing is drawn:
    recipes of one seed differ by the order of their data.
    """
    recipes = {}
    for kind, asked in made.items():
        fixed = {name: asked[name] for name in ("base", "steps", "training") if name in asked}
        others = list(asked.get("among", [name for name in SOURCES if name != "text"]))
        need = set(asked.get("need", others))
        optimisers = asked.get("optimisers", [{}])
        for seed in asked["seeds"]:
            draw = np.random.default_rng([asked.get("draw", 0), seed])
            for number in range(asked["count"]):
                shares: dict[str, float] = dict(asked.get("shares", {}))
                least = asked.get("domains", 2)
                while sum(bool(s & set(shares)) for s in HOLD.values()) < least or not need & set(
                    shares
                ):
                    count = draw.integers(*asked["sources"], endpoint=True)
                    chosen = draw.choice(others, count, replace=False)
                    text = round(100 * draw.uniform(*asked["text"]))
                    parts = draw.dirichlet(np.ones(count)) * (100 - text)
                    parts = np.maximum(asked["least"], parts).astype(int)
                    parts[parts.argmax()] += 100 - text - parts.sum()
                    shares = {
                        str(name): int(part) / 100 for name, part in zip(chosen, parts, strict=True)
                    }
                    shares["text"] = text / 100
                own = optimisers[(number + asked.get("first", 0)) % len(optimisers)]
                if isinstance(bases := asked.get("base"), Mapping):
                    own = {"base": bases[seed], **own}
                if "shares" in asked:
                    own = {"order": number, **own}
                recipes[f"{kind}-{seed}-{number:02}"] = {
                    "shares": shares,
                    "seed": seed,
                    **fixed,
                    **own,
                }
    return recipes


def read_study(path: Path) -> Study:
    """A configuration file, checked.

    Raises:
        ValueError: A recipe, setting or share that makes no sense, in a sentence that names it.
    """
    content = yaml.safe_load(path.read_text("utf-8"))
    content["recipes"] |= mixtures(content.get("mixtures", {}))
    for name, recipe in content["recipes"].items():
        unknown = set(recipe["shares"]) - set(SOURCES | ALIKE)
        if unknown or abs(sum(recipe["shares"].values()) - 1) > 1e-9:
            raise ValueError(
                f"{path}: recipe {name}: expected shares of {', '.join(SOURCES)} that sum to 1, got "
                f"{recipe['shares']}"
            )
        if unknown := set(recipe.get("training", {})) - TRAINING:
            raise ValueError(
                f"{path}: {name}: expected keys of {', '.join(sorted(TRAINING))}, got {', '.join(unknown)}"
            )
    return Study(path, content)
