"""Pages and plots, made of the results alone.

``docs/results/README.md`` keeps what stands outside its marked part, so that other studies have their lines
there;
``docs/results/population.md`` and the plots are written whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import vl_convert

from benchmarks.validity import analysis, results
from benchmarks.validity.markdown import claims_table, markdown, verdict_table
from benchmarks.validity.study import Study, read_study
from benchmarks.validity.verdicts import (
    FAILS,
    HOLDS,
    PART,
    UNTESTED,
    Verdict,
    by_name,
    rivals_of,
    shown,
    verdicts,
)

HERE = Path(__file__).parent
HOME = "https://github.com/lmeval-dispersion/lmeval-dispersion/blob/main"
BEGIN, END = "<!-- part A: made by `make validity-page` -->", "<!-- end of part A -->"
RECIPE_KINDS = {
    "wrong": "wrong answers",
    "half-wrong": "wrong answers",
    "digits": "random digits",
    "shuffled": "shuffled",
}

#: Figures that the tables show; the results have all.
SHOWN = {
    "G (cosine)", "ratio", "share of the domain seen", "share of its true text", "step", "25 labels",
    "accuracy of another seed",
}  # fmt: skip
DULL = {"folded", "null_z", "between"}  # variants that no sentence is about

Tables = dict[str, Any]


def _kept(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["predictor"] in SHOWN]


def _in_page(row: dict[str, Any]) -> bool:
    """Whether a trial is a fine-tune, or of a checkpoint that the page follows."""
    return " -> " in row["of"] or row["of"] in ("text", "sums-words", "wrong-sums")


def tables_of(study: Study, rows: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]) -> Tables:
    """All tables of a study; parts that are not run yet are empty."""
    table = analysis.frame(study, rows)
    last = study.steps[-1]
    small = analysis.panel(study, table, "small", last)
    large = analysis.panel(study, table, "medium", last) if "medium" in study.content["population"] else None
    found: Tables = {
        "ordering": {}, "seeds": {}, "sizes": [], "matrix": [], "worth": None, "both": [], "frequency": [],
        "spread": None, "smallest": None, "what": "", "trained_steps": len(study.steps) - 1, "points": [],
        "panel": small,
    }  # fmt: skip
    if small is not None:
        seeds = f"{len(small.seeds)} seed{'s' if len(small.seeds) > 1 else ''}"
        found["what"] = f"{len(small.recipes)} recipes x {seeds}, step {last}"
        found["ordering"] = {d: analysis.ordering(study, small, d, d) for d in analysis.DOMAINS}
        found["inside"] = {
            d: analysis.ordering(study, analysis.within_domain(study, small, d), d, d)
            for d in analysis.DOMAINS
        }
        found["inside_recipes"] = {
            d: len(analysis.within_domain(study, small, d).recipes) for d in analysis.DOMAINS
        }
        found["seeds"] = analysis.seed_pairs(study, small, "math") if len(small.seeds) > 1 else {}
        found["matrix"] = analysis.matrix(study, small)
        found["worth"] = analysis.worth(study, small, "math")
        for domain in analysis.DOMAINS:
            for recipes, own in (
                ("all", small), ("holding the domain", analysis.within_domain(study, small, domain))
            ):  # fmt: skip
                line = {"domain": domain, "recipes": recipes}
                found["both"].append(line | analysis.both(study, own, domain))
        g, y = small.matrix("cosine_math"), small.matrix("accuracy_math")
        found["spread"] = float(np.ptp(g.mean(0)))
        found["smallest"] = float(np.diff(np.sort(g, axis=1), axis=1).min())
        if "sums-05" in small.recipes:
            base = small.recipes.index("sums-05")
            for recipe in ("wrong-sums", "digits"):
                if recipe in small.recipes:
                    own = small.recipes.index(recipe)
                    found["frequency"].append(
                        {
                            "recipe": recipe, "above": int((g[:, own] > g[:, base]).sum()), "seeds": len(g),
                            "accuracy": float(y[:, own].mean()), "other": float(y[:, base].mean()),
                        }
                    )  # fmt: skip
        found["points"] = [
            {"recipe": recipe, "seed": seed, "G": float(g[i, j]), "accuracy": float(y[i, j])}
            for i, seed in enumerate(small.seeds)
            for j, recipe in enumerate(small.recipes)
        ]
    if small is not None and large is not None:
        found["sizes"] = analysis.across_sizes(study, small, large, "math")
    found["along"] = analysis.along(study, table, "math")
    found["partial"] = analysis.partial(study, table, "math", last=False) if small is not None else []
    found["partial_last"] = analysis.partial(study, table, "math", last=True) if small is not None else []
    found["variants"] = analysis.variants(study, table)
    found["settings"] = analysis.settings(study, table)
    found["settings_decision"] = analysis.settings_decision(study, table)
    own = found["settings"]
    found["settings_rho"] = (
        float(
            analysis.correlations(
                np.array([[row["cosine"].value for row in own]]), np.array([[row["accuracy"] for row in own]])
            )[0]
        )
        if len(own) > 2
        else float("nan")
    )
    found["trials"] = analysis.trial_tables(trials)
    return found


def first_sentence(study: Study, tables: Tables) -> str:
    """What a reader should take away if they read nothing else."""
    rows = tables["ordering"].get("math")
    if not rows:
        return "The population is not trained yet, so nothing is known of how G orders it."
    found = by_name(rows, "predictor")
    own, labels = found["G (cosine)"], found["25 labels"]
    share = own["decision"].value
    hundred = found.get("100 labels", labels)
    best = max(rivals_of(rows), key=lambda row: row["rho"].value)
    beaten = [
        f"{name} ({row['decision'].value:.2f})"
        for name, row in (("25 labelled questions", labels), ("100 labelled questions", hundred))
        if row["decision"].value >= share
    ]
    start = (
        f"On {tables['what']}, G orders {share:.0%} of the pairs that differ in math accuracy as "
        f"accuracy does (rho {shown(own['rho'])})"
    )
    if beaten:
        text = f"{start}, and it does not beat {' or '.join(beaten)} on each checkpoint."
    else:
        text = (
            f"{start}; 25 labelled questions on each checkpoint order {labels['decision'].value:.0%} of "
            f"them, 100 labelled ones {hundred['decision'].value:.0%}."
        )
    if best["rho"].value >= own["rho"].value:
        text += f" It does not beat `{best['predictor']}` either (rho {shown(best['rho'])})."
    along = by_name(tables["along"]["rows"], "predictor")
    if along:
        g, step = along["G (cosine)"]["rho"], along["step"]["rho"]
        text += (
            f" Along one run it orders checkpoints with rho {shown(g)}, and "
            f"the step alone does {'at least as well' if step.value >= g.value else 'worse'} ({shown(step)})."
        )
    return text


def inside_sentence(tables: Tables) -> str:
    """Whether G orders recipes that were all taught the domain, or only tells who was."""
    if not tables.get("inside"):
        return ""
    said = []
    for domain, rows in tables["inside"].items():
        own = by_name(rows, "predictor")["G (cosine)"]["rho"]
        said.append(f"{domain} {shown(own)} ({tables['inside_recipes'][domain]} recipes)")
    return (
        "Among recipes whose texts hold the domain at all, rho of G with its skill is "
        f"{', '.join(said)}; the rest of the orders is telling who was taught the domain."
    )


def still_worth(tables: Tables) -> str:
    """When a megabyte is still worth reading, by what came out."""
    worth = tables["worth"]
    if worth is None:
        return ""
    count = f"{worth.value:.0f} labelled question{'s' if worth.value != 1 else ''}"
    return (
        f"G orders pairs of recipes as well as {count} on each checkpoint would ({worth.low:.0f} to "
        f"{worth.high:.0f}, the interval of its share of right pairs)."
    )


def provenance(study: Study, rows: Sequence[dict[str, Any]], trials: Sequence[dict[str, Any]]) -> str:
    """How many of the planned models there are, by which commits, on what, how long."""
    planned = len(study.runs())
    commits = ", ".join(sorted({row["commit"] for row in [*rows, *trials]}))
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    processor = sum(row["processor_seconds"] for row in rows)
    text = (
        f"{len(rows)} of {planned} models, {len(trials)} trials; commit {commits}; {machines}; "
        f"{processor / 60:.0f} minutes of one core for the models."
    )
    if len(rows) < planned:
        text += (
            " The run was stopped before its end; what is missing is not in the tables, and nothing was left "
            "out by its outcome."
        )
    return text


def population_page(
    study: Study,
    tables: Tables,
    rows: list[dict[str, Any]],
    trials: list[dict[str, Any]],
    lines: Sequence[Verdict] = (),
) -> str:
    """The page with every table."""
    ordering = {
        "predictor": "figure", "rho": "Spearman's rho (95 %)", "decision": "decision accuracy (95 %)",
        "pairs": "pairs",
    }  # fmt: skip
    parts = [
        f"# Does G order checkpoints? A population made to be hard on it ({study.name})",
        first_sentence(study, tables),
        f"Made by `make validity{'-full' if study.name == 'full' else ''}`; configuration "
        f"[{study.name}.yaml]({HOME}/benchmarks/validity/{study.name}.yaml), committed before its run: "
        "recipes, settings, seeds, "
        "steps, rivals with their signs, the split, and what would refute each claim. "
        f"{provenance(study, rows, trials)}",
        "Small decoders (width 48, two layers; width 96, three layers) are trained from scratch on "
        "generated text, sums, word "
        "problems, code, legal sentences and traps. Skills are exact tests of 400 generated questions each: "
        "the whole answer of a sum, "
        "a program that has to run, the last word of a legal sentence, one of four words. The questions are "
        "drawn from what "
        "is taught, so a skill here is knowledge of a taught table and not generalisation. Text is "
        "generated: real prose is "
        "harder. Intervals are 95 %, from resampling recipes with all their seeds. A *pair* counts where "
        "400 questions "
        "tell its two checkpoints apart. Widths, steps and operands were set by accuracy and time on two "
        "recipes, never by G.",
    ]
    if lines:
        parts += ["## Every claim and its control", claims_table(lines)]
    for domain in analysis.DOMAINS:
        if tables["ordering"]:
            parts += [
                f"## Recipes: G({domain}) against {domain} accuracy",
                markdown(_kept(tables["ordering"][domain]), ordering),
            ]
    if tables["ordering"]:
        parts += [
            f"![Accuracy against G, a panel a seed](plots/{study.name}-points.svg)",
            "## Two figures",
            "Ratio is within(T) / within(R), Euclidean, of rows times the final norm's weight. Of the pairs "
            "that the questions tell apart: on how many both figures agree, how many of these are right, and "
            "how many of the others G orders right.",
            markdown(
                tables["both"],
                {"domain": "domain", "recipes": "recipes", "pairs": "pairs", "agree": "agree (95 %)",
                 "right": "right where they agree", "else": "G right where they do not"},
            ),
        ]  # fmt: skip
    if tables.get("inside"):
        inside = [
            {"domain": d, "recipes": tables["inside_recipes"][d], **row}
            for d, rows_of in tables["inside"].items()
            for row in _kept(rows_of)
        ]
        parts += [
            "## Only recipes whose texts hold the domain",
            "In many recipes a domain does not occur and its skill is zero, so the tables above mostly ask "
            "whether it was taught at all. Here stand only recipes whose texts hold the domain, true or "
            "wrong. This table was added after the first seed had been seen; no claim of the configuration "
            "rests on it.",
            markdown(inside, {"domain": "domain", "recipes": "recipes", **ordering}),
        ]
    if tables["along"]["rows"]:
        parts += [
            "## Along one run",
            f"Mean over {tables['along']['runs']} runs that end above 0.1 in math, "
            f"{tables['trained_steps']} trained "
            "checkpoints each.",
            markdown(_kept(tables["along"]["rows"]), {"predictor": "figure", "rho": "mean rho (95 %)"}),
        ]
    if tables["seeds"]:
        own = tables["seeds"]
        parts += [
            "## Seeds",
            f"Of {own['pairs']} pairs of seeds of one recipe that the questions tell apart, G orders "
            f"{shown(own['share'])} right. From "
            f"seed to seed math accuracy moves by {own['sd_accuracy']:.3f} and G by {own['sd_gap']:.3f} "
            "(mean sd).",
        ]
    if tables["sizes"]:
        parts += [
            "## Across sizes",
            "Against math accuracy of the larger size.",
            markdown(tables["sizes"], {"predictor": "figure", "recipes": "recipes", "rho": "rho (95 %)"}),
        ]
    for key, what in (("partial", "all trained checkpoints"), ("partial_last", "last checkpoints")):
        if tables[key]:
            parts += [
                f"## What G adds, {what}",
                "Rank correlation of G with math accuracy, once a figure is taken out of both.",
                markdown(
                    [row for row in tables[key] if row["taken out"] in ("nothing", "all of these")],
                    {"taken out": "taken out", "rho": "partial rho (95 %)"},
                ),
            ]
    if tables["trials"]["same"]:
        parts += [
            "## Changes that move no prediction",
            "Largest movement over the checkpoints; *shift* is the largest change of a log-probability.",
            markdown(
                tables["trials"]["same"],
                {"change": "change", "shift": "shift", "cosine": "G cosine", "euclidean": "G Euclidean",
                 "centred": "centred", "ratio_folded": "within(T)/within(R), folded",
                 "centred_folded": "centred, folded"},
            ),
        ]  # fmt: skip
    if tables["trials"]["changed"]:
        parts += [
            "## Changes that move skill, rows, or both",
            "Math accuracy, the cosine G and ratio, before and after (mean over seeds), for the fine-tunes "
            "and the checkpoints text, sums-words and wrong-sums; the JSON lines have all.",
            markdown(
                [row for row in tables["trials"]["changed"] if _in_page(row)],
                {"change": "change", "of": "checkpoint", "accuracy before": "accuracy before",
                "accuracy after": "after",
                 "cosine before": "G before", "cosine after": "after", "ratio before": "ratio before",
                 "ratio after": "after"},
            ),
        ]  # fmt: skip
    if len(tables["settings"]) > 1:
        parts += [
            "## Settings of the optimiser",
            f"One recipe; in brackets the lowest and highest seed. G orders "
            f"{tables['settings_decision']:.2f} of the pairs of settings that the questions tell apart.",
            markdown(
                tables["settings"],
                {"recipe": "recipe", "setting": "setting", "seeds": "seeds", "accuracy": "math accuracy",
                "cosine": "G cosine",
                 "euclidean": "G Euclidean", "ratio": "within(T)/within(R), folded"},
            ),
        ]  # fmt: skip
    if tables["matrix"]:
        grid = [
            {"domain": f"G({d})", **{r["skill"]: r["rho"] for r in tables["matrix"] if r["domain"] == d}}
            for d in analysis.DOMAINS
        ]
        parts += [
            "## Domains and skills",
            "Rho of each G with each skill over recipes; the diagonal should be the highest of its row.",
            markdown(grid, {"domain": "", **{skill: skill for skill in analysis.SKILLS}}),
        ]
    if tables["variants"]:
        parts += [
            "## Variants of the metric",
            "Mean over math, code and legal of rho with the own skill. Chosen on one half of recipes and "
            "seeds, reported on the other; "
            "*unmoved*: no function-preserving change moves it. Holm's p is over all variants.",
            markdown(
                [row for row in tables["variants"] if row["variant"] not in DULL],
                {"variant": "variant", "unmoved": "unmoved", "choose": "rho, choosing half",
                "report": "rho, reporting half",
                 "difference": "less cosine G", "p": "p", "holm": "p (Holm)"},
            ),
        ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def plots(study: Study, tables: Tables) -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by name."""
    if not tables["ordering"]:
        return {}
    points = pd.DataFrame(tables["points"])
    points["kind"] = [
        next(
            (
                kind
                for start, kind in RECIPE_KINDS.items()
                if recipe.startswith(start) and recipe != "digits-sums"
            ),
            "true text",
        )
        for recipe in points.recipe
    ]
    return {
        f"{study.name}-points": {
            "data": {"values": points.to_dict("records")},
            "facet": {"column": {"field": "seed", "type": "ordinal", "title": "seed"}},
            "spec": {
                "width": 230,
                "height": 200,
                "mark": {"type": "point", "filled": True, "size": 55},
                "encoding": {
                    "x": {
                        "field": "G",
                        "type": "quantitative",
                        "title": "G (cosine, math)",
                        "scale": {"zero": False},
                    },
                    "y": {"field": "accuracy", "type": "quantitative", "title": "math accuracy"},
                    "color": {"field": "kind", "type": "nominal", "title": None},
                    "shape": {"field": "kind", "type": "nominal", "title": None},
                },
            },
        }
    }


def write_pages(folder: Path, page: Path, *, draw: bool = True) -> None:
    """Write the pages of every study that has results, and the claims of the largest.

    Raises:
        ValueError: Results that belong to another version of a configuration, or a page without its marks.
    """
    front = ""
    for name in ("small", "full"):
        study = read_study(HERE / f"{name}.yaml")
        rows = results.checked(folder / f"{name}.jsonl", study.path)
        trials = results.checked(folder / f"{name}-trials.jsonl", study.path)
        if not rows:
            continue
        tables = tables_of(study, rows, trials)
        lines = verdicts(tables)
        text = population_page(study, tables, rows, trials, lines)
        target = page / ("population.md" if name == "full" else "population-small.md")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        if draw:
            (page / "plots").mkdir(exist_ok=True)
            for chart, made in plots(study, tables).items():
                svg = vl_convert.vegalite_to_svg(made)
                (page / "plots" / f"{chart}.svg").write_text(svg + "\n", "utf-8")
        counted = {v: sum(line.verdict == v for line in lines) for v in (HOLDS, PART, FAILS, UNTESTED)}
        count = (
            f"Of {len(lines)} claims {counted[HOLDS]} hold, {counted[PART]} hold in part, "
            f"{counted[FAILS]} do not hold and {counted[UNTESTED]} are not tested."
        )
        front = "\n\n".join(
            [
                first_sentence(study, tables),
                inside_sentence(tables),
                still_worth(tables),
                f"{count} {provenance(study, rows, trials)} All tables: [{target.name}]({target.name}).",
                verdict_table(lines),
            ]
        )
    if not front:
        return
    index = page / "README.md"
    whole = index.read_text("utf-8") if index.exists() else f"# Does it hold?\n\n{BEGIN}\n{END}\n"
    if BEGIN not in whole or END not in whole:
        raise ValueError(
            f"{index}: expected the marks {BEGIN!r} and {END!r} around part A's lines, put them back"
        )
    start, rest = whole.split(BEGIN)
    index.write_text(f"{start}{BEGIN}\n{front}\n{END}{rest.split(END)[1]}", "utf-8")
