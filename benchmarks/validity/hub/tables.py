"""From the lines of a suite to the tables and verdicts of the population's study, by the same code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.validity import analysis, verdicts
from benchmarks.validity.analysis import Panel
from benchmarks.validity.hub.configuration import HubStudy, Pair, Skill, Suite
from benchmarks.validity.study import Study
from benchmarks.validity.verdicts import FAILS, UNTESTED, Verdict

SHARE = 0.9  # of recipes (seeds) that have a step, for it to be compared at
CLAIMS = {
    "orders": "G({domain}) orders recipes by {skill}",
    "beats-rivals": "G({domain}) orders by {skill} better than each rival alone",
    "seeds": "G({domain}) tells which seed is better at {skill}",
    "sizes": "G({domain}) of small models orders the largest by {skill}",
    "adds": "G({domain}) adds to all rivals together, for {skill}",
    "trajectory": "G({domain}) orders the checkpoints of one run by {skill}",
}
NOTHING = "no checkpoint has both a G and a score"
Tables = dict[str, Any]


def frame(suite: Suite, rows: Sequence[dict[str, Any]], pair: Pair) -> pd.DataFrame:
    """One line a checkpoint that has a G and a score: who it is, figures, and the skill as ``accuracy``."""
    lines = []
    seeds = list(suite.parts["seed"])
    for row in rows:
        figures = row.get("figures")
        if figures is None or pair.skill not in row["skills"] or f"cosine_{pair.domain}" not in figures:
            continue
        own = {key: row[key] for key in ("recipe", "size", "step", "loss")}
        own["name"] = " ".join(str(row[key]) for key in ("size", "recipe", "seed"))
        own |= {"setting": "default", "seed": seeds.index(row["seed"]) if row["seed"] in seeds else 0}
        lines.append({**own, **figures, f"accuracy_{pair.domain}": row["skills"][pair.skill]})
    return pd.DataFrame(lines)


def tables_of(study: HubStudy, suite: Suite, rows: Sequence[dict[str, Any]], pair: Pair) -> Tables:
    """All tables of a pair; ``untested`` says by claim why there is none."""
    table, skill = frame(suite, rows, pair), suite.skills[pair.skill]
    found: Tables = {
        "ordering": {}, "what": "", "seeds": {}, "sizes": [], "partial": [], "untested": {},
        "along": {"runs": 0, "rows": []}, "trained_steps": study.analysis["fewest"], "small": suite.small,
        "questions": skill.questions, "checkpoints": len(table), "rivals_left_out": [],
    }  # fmt: skip
    if table.empty:
        return found
    known = [key for key in study.analysis["rivals"] if key != "loss" or table.loss.notna().all()]
    if "loss" not in known and table.loss.notna().any():
        found["rivals_left_out"].append(
            f"loss: published for {int(table.loss.notna().sum())} of {len(table)} checkpoints"
        )
    own = _study(study, suite, table, skill, known)
    _recipes(study, suite, own, table, pair, skill, found)
    _runs(study, own, table, pair, skill, found)
    return found


def verdicts_of(tables: Tables, pair: Pair) -> list[Verdict]:
    """A line for each claim, by the rules of the population's study; one line where nothing is there."""
    if not tables["checkpoints"]:
        return [Verdict(f"{pair.name}: all claims", NOTHING, "", "", "", UNTESTED)]
    ordered = verdicts.orders(tables, pair.domain)
    rules: dict[str, Callable[[], Verdict]] = {
        "orders": lambda: ordered,
        "beats-rivals": lambda: verdicts.rivals(tables, pair.domain),
        "seeds": lambda: verdicts.seeds(tables),
        "sizes": lambda: verdicts.sizes(tables),
        "adds": lambda: verdicts.adds(tables),
        "trajectory": lambda: verdicts.trajectory(tables),
    }
    size = tables["what"].partition(":")[0]
    run = {
        "sizes": f"{tables['small']} against {size}",
        "adds": f"{size}: all trained checkpoints, {len(tables['partial']) - 2} rivals taken out",
        "trajectory": f"{tables['along']['runs']} runs that end above chance",
    }
    lines = []
    for claim, rule in rules.items():
        text = CLAIMS[claim].format(domain=pair.domain, skill=pair.skill)
        if reason := tables["untested"].get(claim):
            lines.append(Verdict(text, reason, "", "", "", UNTESTED))
            continue
        line = rule()
        if claim == "beats-rivals" and ordered.verdict == FAILS:
            line = replace(line, verdict=FAILS)  # that noise is better ordered than other noise is no claim
        lines.append(replace(line, claim=text, run=run.get(claim, line.run)))
    return lines


def above_chance(skill: Skill) -> float:
    """The accuracy that is two standard errors above guessing; minus infinity for what is no accuracy."""
    if skill.chance is None:
        return -math.inf
    n = skill.questions
    return skill.chance + 2 * math.sqrt(max(skill.chance * (1 - skill.chance), 1 / n) / n)


def _study(study: HubStudy, suite: Suite, table: pd.DataFrame, skill: Skill, rivals: Sequence[str]) -> Study:
    """The configuration as the population's analysis reads it."""
    recipes = [recipe for recipe in suite.parts["recipe"] or ["all"] if recipe in set(table.recipe)]
    settings = study.analysis
    content = {
        "questions": skill.questions,
        "steps": sorted(int(step) for step in table.step.unique()),
        "recipes": {recipe: {} for recipe in recipes},
        "settings": {},
        "population": {
            size: {"recipes": recipes, "seeds": [], "settings_on": []} for size in suite.parts["size"]
        },
        "split": {"choose": {"recipes": [], "seeds": []}},
        "analysis": {
            "rivals": {key: settings["rivals"][key] for key in rivals},
            **{key: settings[key] for key in ("resamples", "shortlist", "labels")},
        },
    }
    return Study(study.path, content)


def _last(table: pd.DataFrame, size: str, of: str) -> int | None:
    """The last step of a size that nine tenths of its recipes (or seeds) have."""
    own = table[table["size"] == size]
    counts = own.groupby("step")[of].nunique()
    kept = counts[counts >= SHARE * own[of].nunique()] if len(counts) else counts
    return int(kept.index.max()) if len(kept) else None


def _panel(own: Study, table: pd.DataFrame, size: str) -> Panel | None:
    step = _last(table, size, "recipe")
    seeds = table[table["size"] == size].groupby(["recipe", "step"]).seed.transform("nunique")
    several = _last(table.loc[seeds.index[seeds > 1]], size, "recipe")
    if step is not None and several is not None and several >= SHARE * step:
        step = several  # other seeds may have ended a little earlier
    return None if step is None else analysis.panel(own, table, size, step)


def _at_chance(panel: Panel, domain: str, skill: Skill) -> bool:
    return bool(np.mean(panel.matrix(f"accuracy_{domain}") > above_chance(skill)) < 0.5)


def _known(row: Mapping[str, Any]) -> bool:
    """Whether a row is of G, or of a rival that is not the same everywhere."""
    return row["predictor"].startswith("G ") or math.isfinite(row["rho"].value)


def _recipes(
    study: HubStudy, suite: Suite, own: Study, table: pd.DataFrame, pair: Pair, skill: Skill, found: Tables
) -> None:
    """Recipes at one size, their seeds, and small against large."""
    fewest, untested = study.analysis["clusters"], found["untested"]
    panels = {size: panel for size in suite.parts["size"] if (panel := _panel(own, table, size)) is not None}
    panels = {size: panel for size, panel in panels.items() if len(panel.recipes) >= fewest}
    claims = ("orders", "beats-rivals", "seeds", "sizes", "adds")
    if not panels:
        reason = f"fewer than {fewest} recipes have a G and a score at one size and step"
        untested.update(dict.fromkeys(claims, reason))
        _sizes_as_recipes(study, suite, own, table, pair, skill, found)
        return
    size, panel = list(panels.items())[-1]
    step = int(panel.table.step.iloc[0])
    found["what"] = f"{size}: {len(panel.recipes)} recipes x {len(panel.seeds)} seeds, step {step}"
    rows = analysis.by_figure(own, panel, pair.domain, pair.domain)
    kept = [row for row in rows if _known(row)]
    found["ordering"] = {pair.domain: kept + analysis.by_another_seed(own, panel, pair.domain)}
    found["partial"] = analysis.partial(own, table, pair.domain, last=False, size=size)
    if len(panel.seeds) > 1:
        found["seeds"] = analysis.seed_pairs(own, panel, pair.domain)
    else:
        untested["seeds"] = f"{size}: one seed at the step that is compared"
    for smaller in list(panels)[:-1]:
        both = set(panels[smaller].recipes) & set(panel.recipes)
        if len(both) >= fewest:
            pairs = analysis.across_sizes(own, panels[smaller], panel, pair.domain)
            found["sizes"] += [{"small": smaller, **row} for row in pairs]
    found["all_sizes"] = found["sizes"]
    found["sizes"] = [row for row in found["sizes"] if row["small"] == suite.small]
    if not found["sizes"]:
        untested["sizes"] = f"{suite.small or 'no smaller size'}: not screened and scored beside {size}"
    if _at_chance(panel, pair.domain, skill):
        reason = f"{found['what']}: fewer than half are above chance ({above_chance(skill):.3f})"
        untested.update({claim: reason for claim in claims})


def _sizes_as_recipes(
    study: HubStudy, suite: Suite, own: Study, table: pd.DataFrame, pair: Pair, skill: Skill, found: Tables
) -> None:
    """Seeds of a suite of one recipe: of each size at its last step, as seeds of a recipe elsewhere."""
    if table.recipe.nunique() > 1 or table.seed.nunique() < 2:
        return
    parts = []
    for size in suite.parts["size"]:
        step = _last(table, size, "seed")
        part = table[(table["size"] == size) & (table.step == step)]
        if (
            len(part) >= SHARE * table.seed.nunique()
            and (part[f"accuracy_{pair.domain}"] > above_chance(skill)).mean() >= 0.5
        ):
            parts.append(part)
    if len(parts) < study.analysis["clusters"]:
        found["untested"]["seeds"] = (
            f"{len(parts)} sizes have nine tenths of their seeds scored and half of them above chance; "
            f"{study.analysis['clusters']} are needed"
        )
        return
    seeds = sorted(set.intersection(*(set(part.seed) for part in parts)))
    whole = pd.concat(parts).assign(recipe=lambda lines: lines["size"])
    whole = whole[whole.seed.isin(seeds)].set_index(["recipe", "seed"])
    whole.attrs["questions"] = skill.questions
    panel = Panel([part["size"].iloc[0] for part in parts], seeds, whole)
    found["seeds"] = analysis.seed_pairs(own, panel, pair.domain)
    del found["untested"]["seeds"]


def _runs(study: HubStudy, own: Study, table: pd.DataFrame, pair: Pair, skill: Skill, found: Tables) -> None:
    """Along each run; where there are few recipes, each run counts as one."""
    fewest = study.analysis["clusters"]
    by_run = table if table.recipe.nunique() >= fewest else table.assign(recipe=table["name"])
    found["along"] = analysis.along(
        own, by_run, pair.domain, above=above_chance(skill), fewest=study.analysis["fewest"]
    )
    rows = [row for row in found["along"]["rows"] if _known(row)]
    found["along"]["rows"] = rows
    if rows and "step" not in {row["predictor"] for row in rows}:
        found["untested"]["trajectory"] = "the score is the same at every step of these runs"
    ended = by_run[by_run.step > 0].sort_values("step").groupby("name").tail(1)
    counted = ended[ended[f"accuracy_{pair.domain}"] > above_chance(skill)].recipe.nunique()
    if counted < fewest or found["along"]["runs"] < fewest:
        found["untested"]["trajectory"] = (
            f"{found['along']['runs']} runs of {study.analysis['fewest']} scored steps or more end above "
            f"chance; {fewest} recipes or runs are needed"
        )
