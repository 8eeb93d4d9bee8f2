"""Results of a population that nobody trained: accuracies and figures with a planted law between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.validity.analysis import DOMAINS, SKILLS
from benchmarks.validity.results import packed
from benchmarks.validity.study import Study
from benchmarks.validity.texts import HOLD

NOISE = ("norm_R", "norm_all", "within_R", "euclidean_within_R", "effective_rank", "alpha_head", "alpha_mean",
         "norm_T_math", "null_difference_math")  # fmt: skip


def planted(study: Study, *, law: float, seed: int = 0, noise: float = 0.02) -> list[dict[str, Any]]:
    """Results of every run: G and ratio are ``law`` times accuracy, plus noise; all else is noise.

    A domain that a recipe does not hold has no accuracy, whatever the law.
    """
    rng = np.random.default_rng(seed)
    count = study.content["questions"]
    skills = {recipe: rng.uniform(0.05, 0.95, 4) for recipe in study.content["recipes"]}
    rows = []
    for run in study.runs():
        checkpoints = []
        for place, step in enumerate(run.steps):
            grown = (place + 1) / len(run.steps) if step else 0.0
            known = {
                skill: float(np.clip(level * rng.uniform(0.8, 1) * grown, 0, 1))
                if not study.content.get("mixtures") or HOLD.get(skill, set(run.shares)) & set(run.shares)
                else 0.0
                for skill, level in zip(SKILLS, skills[run.recipe], strict=True)
            }
            figures = {name: rng.normal() for name in NOISE}
            for domain in DOMAINS:
                figures[f"euclidean_{domain}"] = rng.normal()
                for name in ("cosine", "ratio_folded"):
                    figures[f"{name}_{domain}"] = 1 + law * known[domain] + noise * rng.normal()
            checkpoints.append(
                {
                    "step": step,
                    "train_loss": None if step == 0 else rng.uniform(1, 2),
                    "text_loss": rng.uniform(1, 2),
                    "digit_share": None if step == 0 else rng.uniform(0, 0.3),
                    "accuracy": {skill: round(value * count) / count for skill, value in known.items()},
                    "figures": figures,
                    "right": {
                        "labels": {skill: packed(rng.random(count) < known[skill]) for skill in SKILLS}
                    },
                }
            )
        names = {name: getattr(run, name) for name in ("name", "recipe", "setting", "size", "seed")}
        spent = {"seconds": 1.0, "processor_seconds": 1.0, "commit": "planted", "machine": "none"}
        rows.append({**names, **spent, "checkpoints": checkpoints})
    return rows
