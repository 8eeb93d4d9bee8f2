"""Results of a population that nobody trained: accuracies and figures with a planted law between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.validity.analysis import DOMAINS, SKILLS
from benchmarks.validity.population import packed
from benchmarks.validity.study import Study


def planted(study: Study, *, law: float, seed: int = 0, noise: float = 0.02) -> list[dict[str, Any]]:
    """Results of every run: a domain's G is ``law`` times its accuracy, plus noise; all else is noise."""
    rng = np.random.default_rng(seed)
    count = study.content["questions"]
    skill_of = {
        recipe: dict(
            zip(SKILLS, rng.permutation(np.linspace(0.02, 0.95, 4)) * rng.uniform(0.2, 1), strict=True)
        )
        for recipe in study.content["recipes"]
    }
    rows = []
    for run in study.runs():
        checkpoints = []
        for place, step in enumerate(study.steps):
            grown = place / (len(study.steps) - 1)
            known = {
                skill: float(np.clip(level * rng.uniform(0.7, 1) * grown, 0, 1))
                for skill, level in skill_of[run.recipe].items()
            }
            figures = {}
            for domain in DOMAINS:
                gap = 1 + law * known[domain] + noise * rng.normal()
                figures |= {f"{name}_{domain}": gap for name in ("cosine", "ratio_folded")}
                for name in (
                    "euclidean", "within_T", "between", "centred", "folded", "centred_folded", "ratio_cosine",
                    "euclidean_over_R", "null_difference", "null_z", "norm_T", "cosine_se",
                ):  # fmt: skip
                    figures[f"{name}_{domain}"] = rng.normal()
            for name in (
                "norm_R", "norm_all", "within_R", "euclidean_within_R", "effective_rank", "alpha_head",
                "alpha_mean",
            ):  # fmt: skip
                figures[name] = rng.normal()
            row: dict[str, Any] = {
                "step": step,
                "train_loss": None if step == 0 else rng.uniform(1, 2),
                "text_loss": rng.uniform(1, 2),
                "digit_share": None if step == 0 else rng.uniform(0, 0.3),
                "accuracy": {skill: round(value * count) / count for skill, value in known.items()},
                "figures": figures,
            }
            if step == study.steps[-1]:
                flags = {s: packed(rng.random(count) < known[s]) for s in SKILLS}
                row["right"] = {
                    "truth": flags,
                    "labels": {s: packed(rng.random(count) < known[s]) for s in SKILLS},
                }
            checkpoints.append(row)
        rows.append(
            {
                "name": run.name, "recipe": run.recipe, "setting": run.setting, "size": run.size,
                "seed": run.seed,
                "seconds": 1.0, "processor_seconds": 1.0, "commit": "planted", "machine": "none",
                "checkpoints": checkpoints,
            }
        )  # fmt: skip
    return rows
