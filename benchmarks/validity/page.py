"""The page and its plot, made of the results alone.

``docs/results/README.md`` keeps what stands outside its marked part; ``docs/results/population.md`` is
written whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import vl_convert

from benchmarks.validity import records
from benchmarks.validity.analysis import (
    FAILS,
    FIGURES,
    HOLDS,
    INCONCLUSIVE,
    PART,
    SHARES,
    UNTESTED,
    Estimate,
    Resampled,
    Verdict,
    frame,
    worth,
)
from benchmarks.validity.answer_page import Part, populations, released
from benchmarks.validity.hand_made import HandMade, verdicts
from benchmarks.validity.mixtures import KINDS, Kind, claims
from benchmarks.validity.race_claims import race_part
from benchmarks.validity.sibling_races import sibling_part
from benchmarks.validity.study import Study, read_study
from benchmarks.validity.texts import DOMAINS

HERE = Path(__file__).parent
HOME = "https://github.com/lmeval-dispersion/lmeval-dispersion/blob/main/benchmarks/validity"
BEGIN, END = "<!-- part A: made by `make validity-page` -->", "<!-- end of part A -->"
PLOT = "plots/mixtures-points.svg"
TUNED, RACE, SIBLINGS = "fine-tunes.md", "race.md", "siblings.md"
BY_HAND = "<!-- written by hand -->\n"
MARKS = {HOLDS: "✓", PART: "◐", FAILS: "✗", INCONCLUSIVE: "?", UNTESTED: "–"}


def cell(value: object) -> str:
    """A value of a table."""
    if isinstance(value, Resampled):
        return str(value.estimate)
    if isinstance(value, float) and not isinstance(value, Estimate):
        return f"{value:.0e}" if 0 < abs(value) < 0.0005 else f"{value:.3f}"
    return str(value)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def provenance(study: Study, rows: Sequence[dict[str, Any]]) -> str:
    """How many of the planned models there are, by which commits, on what, how long."""
    planned = len(study.runs())
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    machines = "; ".join(sorted({row["machine"] for row in rows}))
    minutes = sum(row["processor_seconds"] for row in rows) / 60
    text = (
        f"{len(rows)} of {planned} models; commit {commits}; {machines}; {minutes:.0f} minutes of one core."
    )
    if len(rows) < planned:
        text += " The run was stopped before its end; what is missing was not left out by its outcome."
    return text


def counted(lines: Sequence[Verdict]) -> str:
    """How many claims came out how."""
    numbers = [
        sum(line.verdict == verdict for line in lines) for verdict in (HOLDS, PART, FAILS, INCONCLUSIVE)
    ]
    hold, part, fail, tied = numbers
    return (
        f"Of {len(lines)} claims {hold} hold, {part} hold in part, {fail} do not hold and {tied} are "
        "inconclusive"
        + (f"; {len(lines) - sum(numbers)} are not tested." if sum(numbers) < len(lines) else ".")
    )


def verdicts_of(lines: Sequence[Verdict]) -> str:
    """The table of claims, each verdict with a mark that a skimming reader sees."""
    return markdown(
        ["verdict", "claim", "result (95 %)"],
        [[f"{MARKS[line.verdict]} {line.verdict}", line.claim, line.result] for line in lines],
    )


def headline(kinds: dict[str, Kind]) -> str:
    """The lines for a reader who reads nothing else."""
    mixed = kinds["mix"]
    g, ratio, both = (mixed.shares[name]["mean"] for name in ("G", "ratio", "mean rank"))
    agree, right = (mixed.agreement[part]["mean"] for part in ("agree", "right"))
    labels = worth({pairs: mixed.shares["G"][domain] for domain, pairs in mixed.pairs.items()})
    text = (
        f"- {mixed.population.table.recipe.nunique()} random mixtures: ratio orders {percent(ratio)} of the "
        f"pairs right ({interval(ratio)}), G {percent(g)} ({interval(g)}: as well as {labels.value:.0f} "
        f"labelled questions, {labels.low:.0f} to {labels.high:.0f}), the mean rank of both {percent(both)}; "
        f"where both agree, on {percent(agree)} of the pairs, {percent(right)}."
    )
    if "tuned" in kinds:
        tuned = kinds["tuned"]
        g, right = tuned.shares["G"]["mean"], tuned.agreement["right"]["mean"]
        each = ", ".join(f"{domain} {percent(tuned.shares['G'][domain])}" for domain in DOMAINS)
        text += (
            f"\n- {tuned.population.table.recipe.nunique()} fine-tunes of one base: G orders {percent(g)} "
            f"({interval(g)}; {each}); where both agree {percent(right)} ({interval(right)})."
        )
    return text


def percent(figure: Resampled) -> str:
    """Its value in percent."""
    return f"{100 * figure.value:.0f} %"


def interval(figure: Resampled) -> str:
    """Its bounds in percent."""
    return f"{100 * figure.estimate.low:.0f} to {100 * figure.estimate.high:.0f} %"


def mixture_parts(kinds: dict[str, Kind]) -> list[str]:
    """Tables of the random mixtures, or of the fine-tunes."""
    columns = [*DOMAINS, "mean"]
    parts: list[str] = []
    for kind, recipes in kinds.items():
        pairs = [str(recipes.shares["G"][column].pairs) for column in columns]
        shares = [[name, *(by_domain[c] for c in columns)] for name, by_domain in recipes.shares.items()]
        agreed = [
            [label, *(recipes.agreement[part][c] for c in columns)]
            for part, label in (
                ("agree", "both agree"),
                ("right", "right where they agree"),
                ("else", "G right where they do not"),
            )
        ]
        parts += [
            f"## {KINDS[kind].capitalize()}",
            "Share of the pairs that each figure orders as accuracy does; both recipes hold the domain, "
            "but for the row *all recipes*. *Mean rank*: of G and ratio.",
            markdown(["figure", *columns], [["pairs", *pairs], *shares, *agreed]),
        ]
        if recipes.screened:
            rows = [
                [
                    domain,
                    row["pairs"],
                    *(row[who][what] for who in ("alone", "both") for what in ("ordered", "right")),
                ]
                for domain, row in recipes.screened.items()
            ]
            parts += [
                f"By the screener's own errors and rule ([both.yaml]({HOME}/both.yaml)), all recipes: share "
                "of the pairs with a clear order, and share of these that is right.",
                markdown(["domain", "pairs", "G alone: ordered", "right", "both: ordered", "right"], rows),
            ]
    return parts


def trap_parts(recipes: Kind) -> list[str]:
    """What wrong sums and random digits do to each figure."""
    return [
        "## Traps",
        "Wrong sums and random digits, in math, over the mixtures. *Leftover*: correlation of their share "
        "with what accuracy leaves of a figure's rank (0: not fooled). *Trap pairs*: share right where the "
        f"worse recipe has more of them ({recipes.traps['G'].pairs} pairs).",
        markdown(
            ["figure", "leftover", "trap pairs"],
            [[name, recipes.leftovers[name], recipes.traps[name]] for name in recipes.leftovers],
        ),
    ]


def hand_made_parts(data: HandMade) -> list[str]:
    """Tables of the hand-made recipes."""
    names, rows = [*FIGURES, *SHARES], []
    for recipes, holding in (("all", False), ("holding the domain", True)):
        for domain in DOMAINS:
            pairs = data.population.pairs(domain, holding=holding)
            shares = [pairs.share(pairs.by(name)) for name in names]
            labels = pairs.share(pairs.by_labels[:, 24])
            rows.append([domain, recipes, len(pairs.sign), *shares, labels, *pairs.agreement().values()])
    columns = [f"{name} {when}" for name in ("accuracy", "G", "ratio") for when in ("before", "after")]
    parts = [
        f"## Hand-made recipes: {data.small.recipe.nunique()} recipes, {data.small.seed.nunique()} seeds",
        "The first population: most recipes hold one domain or none, so that over all of them the tables ask "
        "mostly whether a domain was taught. Share of the pairs that each figure orders right; then on how "
        "many G and ratio agree, how many of these are right, and how many of the others G has right.",
        markdown(["domain", "recipes", "pairs", *names, "25 labels", "agree", "right", "else"], rows),
    ]
    if data.trials:
        unmoved, moved = data.unmoved(), data.moved()
        parts += [
            "## Changes of a checkpoint",
            "That move no prediction: largest movement over twelve checkpoints.",
            markdown(["change", *unmoved.columns], unmoved.reset_index().to_numpy().tolist()),
            "That move skill, rows, or both (math, means over two seeds):",
            markdown(
                ["change", "checkpoint", *columns],
                moved[["change", "checkpoint", *columns]].to_numpy().tolist(),
            ),
        ]
    return parts


def points(recipes: Kind) -> dict[str, Any]:
    """Accuracy against G, a panel a domain, of recipes that hold it: a Vega-Lite specification."""
    table = recipes.population.table
    values = pd.concat(
        [
            table.assign(domain=d, G=table[f"cosine_{d}"], accuracy=table[f"accuracy_{d}"])[
                table[f"seen_{d}"] > 0
            ]
            for d in DOMAINS
        ]
    )[["recipe", "seed", "domain", "G", "accuracy", "false_math"]]
    encoding = {
        "x": {"field": "G", "type": "quantitative", "scale": {"zero": False}},
        "y": {"field": "accuracy", "type": "quantitative"},
        "color": {
            "field": "false_math",
            "type": "quantitative",
            "title": "wrong sums and digits",
            "scale": {"scheme": "viridis"},
        },
    }
    return {
        "data": {"values": values.to_dict("records")},
        "facet": {"column": {"field": "domain", "sort": list(DOMAINS), "title": None}},
        "spec": {
            "width": 230,
            "height": 200,
            "mark": {"type": "point", "filled": True, "size": 30},
            "encoding": encoding,
        },
        "resolve": {"scale": {"x": "independent"}},
    }


def write_pages(folder: Path, page: Path, *, draw: bool = True) -> None:
    """Write the page, its plot and the marked part of the index of what has results.

    Raises:
        ValueError: Results that belong to another version of a configuration, or an index without its marks.
    """
    lines: list[Verdict] = []
    head, parts, made, old = [], [], [], list[str]()
    tuned = [
        part
        for part in (populations(folder, markdown, provenance, HOME), released(folder, markdown, HOME))
        if part
    ]
    race = race_part(folder, markdown, provenance, HOME)
    siblings = sibling_part(folder, markdown, provenance, HOME)
    study = read_study(HERE / "mixtures.yaml")
    if rows := records.checked(folder / "mixtures.jsonl", study.path):
        table, screened = frame(study, rows), records.screened(folder / "mixtures-both.json")
        kinds = {
            kind: Kind(kind, table, study.content["questions"], screened.get(kind, {}))
            for kind in KINDS
            if table.recipe.str.startswith(f"{kind}-").any()
        }
        head.append(headline(kinds))
        lines += [line for recipes in kinds.values() for line in claims(recipes)]
        parts += [*mixture_parts({"mix": kinds["mix"]}), *trap_parts(kinds["mix"])]
        parts += [f"![Accuracy against G]({PLOT})", f"Fine-tunes of one base: [{TUNED}]({TUNED})."]
        old = mixture_parts({kind: recipes for kind, recipes in kinds.items() if kind != "mix"})
        made.append(f"[mixtures.yaml]({HOME}/mixtures.yaml): {provenance(study, rows)}")
        if draw:
            (page / PLOT).parent.mkdir(parents=True, exist_ok=True)
            (page / PLOT).write_text(vl_convert.vegalite_to_svg(points(kinds["mix"])) + "\n", "utf-8")
    study = read_study(HERE / "full.yaml")
    if rows := records.checked(folder / "full.jsonl", study.path):
        trials = records.checked(folder / "full-trials.jsonl", study.path)
        data = HandMade(study, rows, trials)
        lines += verdicts(data)
        parts += hand_made_parts(data)
        made.append(f"[full.yaml]({HOME}/full.yaml), with {len(trials)} trials: {provenance(study, rows)}")
    if not parts:
        return
    head += [sentence for part in tuned for sentence in part.head]
    lines += [line for part in (*tuned, race, siblings) if part for line in part.lines]
    head = [
        f"**{counted(lines)}** Share of the pairs ordered right that the questions tell apart:",
        "\n".join(head),
    ]
    verdict_table = verdicts_of(lines)
    text = "\n\n".join(
        [
            "# Does G order checkpoints? Populations made to be hard on it",
            *head,
            "Configurations were committed before their runs, with what refutes each claim; nothing in them "
            "was chosen by looking at G or ratio. " + " ".join(made),
            "Small decoders (width 48, two layers) are trained from scratch on generated text, sums, word "
            "problems, code, legal sentences and traps. Skills are exact tests of 400 generated questions "
            "each, drawn from what is taught: knowledge of a taught table, not generalisation, and "
            "generated text is easier than real prose. Intervals are 95 %, from resampling recipes. A "
            "*pair* counts where 400 questions tell its two checkpoints apart. Other machines train other "
            "models: accuracies of single models moved by up to 0.25, orders hardly.",
            *parts,
        ]
    )
    page.mkdir(parents=True, exist_ok=True)
    (page / "population.md").write_text(text + "\n", "utf-8")
    if tuned:
        more = [paragraph.replace("## ", "## The first population: ", 1) for paragraph in old]
        title = "# Fine-tunes of one base, and the tokens that answers are made of"
        place = page / TUNED
        # What stands behind the mark is written by hand, and stays.
        _, mark, by_hand = (place.read_text("utf-8") if place.exists() else "").partition(BY_HAND)
        place.write_text(own_page(title, tuned, more) + (f"\n{mark}{by_hand}" if mark else ""), "utf-8")
    for name, title, part in (
        (SIBLINGS, "How often the order is right, and how many questions a race needs", siblings),
        (RACE, "From the screen to the best checkpoint", race),
    ):
        if part:
            (page / name).write_text(own_page(f"# {title}", [part]), "utf-8")
            head += [f"{title} ([tables]({name})):", "\n".join(part.head)]
    front = "\n\n".join([*head, "All tables: [population.md](population.md).", verdict_table])
    write_marked(page / "README.md", front)


def own_page(title: str, parts: Sequence[Part], more: Sequence[str] = ()) -> str:
    """The page of some parts: their sentences, claims and tables."""
    lines = [line for part in parts for line in part.lines]
    head = "\n".join(sentence for part in parts for sentence in part.head)
    texts = [paragraph for part in parts for paragraph in part.texts]
    return "\n\n".join([title, f"**{counted(lines)}**", head, verdicts_of(lines), *texts, *more]) + "\n"


def write_marked(index: Path, front: str) -> None:
    """Write the marked part of the index, and leave the rest as it is."""
    whole = index.read_text("utf-8") if index.exists() else f"# Does it hold?\n\n{BEGIN}\n{END}\n"
    if BEGIN not in whole or END not in whole:
        raise ValueError(
            f"{index}: expected the marks {BEGIN!r} and {END!r} around part A's lines, put them back"
        )
    start, rest = whole.split(BEGIN)
    index.write_text(f"{start}{BEGIN}\n{front}\n{END}{rest.split(END)[1]}", "utf-8")
