"""Races of released models: draw groups, play them, judge the claims of released_races.yaml, write the page.

python -m benchmarks.validity.released_races explore FOLDER  # -> results/released-races-explore.jsonl
python -m benchmarks.validity.released_races confirm FOLDER  # once: -> results/released-races-confirm.jsonl
python -m benchmarks.validity.released_races own             # our own: -> results/released-races-own.jsonl
python -m benchmarks.validity.released_races known           # bundled answers: -> released-races-known.jsonl
python -m benchmarks.validity.released_races page            # -> docs/results/released-races.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.validity import records, siblings
from benchmarks.validity.analysis import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    Estimate,
    Grouped,
    Verdict,
    share_of,
)
from benchmarks.validity.page import HOME, Page, markdown
from benchmarks.validity.released_play import (
    RIVALS,
    Floats,
    Lanes,
    Matrix,
    Named,
    hoeffding_race,
    is_lost,
    race,
    read_matrix,
    synchronised_rejects,
    with_budget,
)
from benchmarks.validity.siblings import Cell, first_for
from benchmarks.validity.study import read_study
from lmeval_dispersion.asking import MARGIN
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing.rule import SHARED

STUDY = Path(__file__).parent / "released_races.yaml"
TINY = 1e-9  # of a difference of means
LARGE = 32  # members of a family that siblings are drawn from
OWN_ORDERS = 8
KNOWN = {"orders": 30, "budget_orders": 30, "budgets": [0.05, 0.1, 0.2]}  # of the bundled answers
WRONG, MORE, FEWER = 0.05, 0.001, 0.95  # the bounds of the claims
KINDS_OF_LISTS = """
The models of a list race together. *Siblings* share an architecture and a size. *Top* lists are drawn
from the best models, *random* ones from all, and lists of *partial credit* are random ones whose scores
lie between 0 and 1. *Near-equals* are neighbours in the order of accuracy. *Copies* are a few siblings,
each three times. On the *boundary* only two models race: the level is the best one's own mean, and its
rival is 0.01 to 0.03 worse, which is the hardest case for the bound on the error. *SySRs* are
synchronised successive rejects (arXiv 2606.07726), a rival that states no error."""
KINDS = ("siblings", "top", "random", "near-equals", "copies", "partial credit")
POOLED = ("siblings", "top", "random", "partial credit")  # of the claims on stakes and budget
SIZES = (8, 24, 32, 43, 100)
OWN_KINDS = {**siblings.KINDS, "lora": "adapters"}
TITLE = "Races of models that others made"
Rows = Sequence[Mapping[str, Any]]


class Group(NamedTuple):
    """Models that race together.

    Attributes:
        kind: One of the kinds of released_races.yaml.
        number: Among the groups of its kind and matrix.
        scores: (models, questions).
    """

    kind: str
    number: int
    scores: Floats


# --- groups ---------------------------------------------------------------------------------------------


def groups(matrix: Matrix, kinds: Mapping[str, Mapping[str, Any]], seed: int) -> Iterator[Group]:
    """The groups of a matrix, as the study plans them by kind."""
    count = matrix.scores.shape[1]
    for place, (kind, plan) in enumerate(kinds.items()):
        rng = np.random.default_rng([seed, place])
        sizes = [size for size in plan["sizes"] if size <= len(matrix.scores)]
        lengths = [length for length in plan.get("questions", [count]) if length <= count]
        for number in range(plan["groups"]):
            size = sizes[number % len(sizes)]
            scores = matrix.scores[_lines(matrix, kind, size, rng)]
            if kind == "copies":
                scores = _copied(scores, rng, exact=number % 2 == 0)
            length = lengths[number // len(sizes) % len(lengths)]
            questions = np.sort(rng.permutation(count)[:length])
            yield Group(kind, number, scores[:, questions])


def _lines(matrix: Matrix, kind: str, size: int, rng: np.random.Generator) -> Lanes:
    """Which models race."""
    if kind in ("siblings", "copies"):
        families = np.array(matrix.families)
        names, counts = np.unique(families[families != ""], return_counts=True)
        family = rng.choice(names[counts >= max(size, LARGE)])
        wanted = size // 3 if kind == "copies" else size
        return np.asarray(rng.choice(np.flatnonzero(families == family), wanted, replace=False))
    best_first = np.argsort(-matrix.scores.mean(axis=1), kind="stable")
    if kind == "top":
        best_first = best_first[: 2 * size]
    if kind == "near-equals":
        first = int(rng.integers(len(best_first) // 2 - size))
        best_first = best_first[first : first + size]
    return np.asarray(rng.choice(best_first, size, replace=False))


def _copied(scores: Floats, rng: np.random.Generator, *, exact: bool) -> Floats:
    """Each model three times; where not exact, 2 % of its answers are exchanged."""
    copies = np.repeat(scores, 3, axis=0)
    if not exact:
        exchanged = rng.random(copies.shape) < 0.02
        copies = np.where(exchanged, rng.permuted(copies, axis=1), copies)
    return np.asarray(rng.permutation(copies))


# --- play -----------------------------------------------------------------------------------------------


def played(group: Group, study: Mapping[str, Any], *, with_race: bool) -> dict[str, Any]:
    """What every way of a group named, as numbers: a row of the results."""
    row: dict[str, Any] = {
        "kind": group.kind,
        "group": group.number,
        "models": len(group.scores),
        "questions": group.scores.shape[1],
    }
    if with_race:
        row |= _races(group, study)
    orders = study["budget_orders"] if with_race else study["more_orders"]
    row["budgets"] = {str(share): _budget(group, share, orders) for share in study["budgets"]}
    return row


def _races(group: Group, study: Mapping[str, Any]) -> dict[str, Any]:
    """The race, the rule before, and rivals with as many questions, over a few orders."""
    scores = group.scores
    figures: dict[str, list[Floats]] = {}
    ratios = []
    looks = []
    for order in range(study["orders"]):
        seed = 1000 * group.number + order
        rng = np.random.default_rng([group.number, order])
        raced = race(scores, seed, study["looks"])
        ratios.append(raced.questions / raced.questions_before)
        looks.append([_judged(scores, look) for look in raced.looks])
        named = {
            "the race": Named(raced.best, raced.questions),
            "the race before": Named(raced.best_before, raced.questions_before),
            "Hoeffding's race": hoeffding_race(scores, rng),
        }
        for name, way in RIVALS.items():
            named[name] = way(scores, rng, raced.questions / scores.size)
        for name, choice in named.items():
            figures.setdefault(name, []).append(_figures(scores, choice))
    return {
        "ratio": round(float(np.mean(ratios)), 4),
        "looks": looks,
        "ways": {name: _summary(parts) for name, parts in figures.items()},
    }


def _figures(scores: Floats, named: Named) -> Floats:
    """Share of the questions, lost, whether another is better by more than the margin."""
    means = scores.mean(axis=1)
    lost = float(means.max() - means[named.best])
    return np.array([named.questions / scores.size, lost, lost > MARGIN + TINY])


def _summary(figures: Sequence[Floats]) -> list[float]:
    """Mean share, mean and largest loss, number of wrong ones."""
    table = np.array(figures)
    lost = table[:, 1]
    parts = [table[:, 0].mean(), lost.mean(), lost.max()]
    return [*(round(float(part), 5) for part in parts), int(table[:, 2].sum())]


def _judged(scores: Floats, shown: Any) -> list[float] | None:
    """The margin shown, and whether another is better by more; None where none is shown."""
    if shown is None:
        return None
    means = scores.mean(axis=1)
    behind = float(means.max() - means[shown.best])
    return [round(shown.margin, 4), int(behind > shown.margin + TINY)]


def _budget(group: Group, share: float, orders: int) -> dict[str, Any]:
    """SySRs with a share of the questions, and ours with as many as that asked."""
    scores = group.scores
    rival = []
    own = []
    margins = []
    for order in range(orders):
        seed = 1000 * group.number + order
        named = synchronised_rejects(scores, np.random.default_rng(seed), share)
        rival.append(_figures(scores, named))
        answer = with_budget(scores, seed, named.questions)
        own.append(_figures(scores, answer))
        margins.append(_judged(scores, answer))
    table = np.array(margins)
    shown = [round(float(table[:, 0].mean()), 4), int(table[:, 1].sum()), orders]
    return {"SySRs": _summary(rival), "ours": _summary(own), "margin": shown}


def boundary(matrix: Matrix, plan: Mapping[str, int], seed: int) -> dict[str, Any]:
    """How often a checkpoint is lost by a level that is its own mean: by pair, of so many orders."""
    rng = np.random.default_rng([seed, 99])
    means = matrix.scores.mean(axis=1)
    lost: list[int] = []
    while len(lost) < plan["pairs"]:
        own = int(rng.integers(len(means)))
        gaps = means[own] - means
        rivals = np.flatnonzero((gaps > MARGIN) & (gaps < 3 * MARGIN))
        if not len(rivals):
            continue
        rival = int(rivals[means[rivals].argmax()])
        seeds = map(int, rng.integers(2**32, size=plan["orders"]))
        scores = matrix.scores
        lost.append(sum(is_lost(scores[own], scores[rival], each) for each in seeds))
    return {"kind": "boundary", "lost": lost, "orders": plan["orders"]}


def play(part: str, folder: Path, out: Path) -> None:
    """Play all groups of a part of the study, and write a row for each."""
    study = yaml.safe_load(STUDY.read_text("utf-8"))
    origin = records.provenance() | {"configuration": records.digest(STUDY)}
    seed = study["seeds"][part]
    for name, kinds in study[part].items():
        matrix = read_matrix(folder / part / f"{name}.npz")
        row = boundary(matrix, study["boundary"], seed)
        records.append(out, {"name": f"{name} boundary", "matrix": name, **row, **origin})
        for group in groups(matrix, kinds, seed):
            with_race = group.number < kinds[group.kind]["raced"]
            row = played(group, study, with_race=with_race)
            label = f"{name} {group.kind} {group.number}"
            records.append(out, {"name": label, "matrix": name, **row, **origin})


def play_own(results: Path, out: Path) -> None:
    """Race our own populations by both rules."""
    origin = records.provenance() | {"configuration": records.digest(STUDY)}
    content = read_study(siblings.STUDY).content
    found, _ = siblings.cells(siblings.read(results), content["questions"])
    for cell in found:
        if cell.kind.startswith("copies"):
            continue
        for count in (400, content["questions"]):
            row = own_row(cell, count)
            records.append(out, {"name": f"{cell.group} {cell.domain} {count}", **row, **origin})


def play_known(out: Path) -> None:
    """Race all models of the bundled answers to GSM8K, in more orders."""
    study = yaml.safe_load(STUDY.read_text("utf-8")) | KNOWN
    origin = records.provenance() | {"configuration": records.digest(STUDY)}
    matrix = read_matrix(data_folder("released") / "gsm8k.npz")
    row = played(Group("known", 0, matrix.scores), study, with_race=True)
    records.append(out, {"name": "known", "matrix": matrix.name, **row, **origin})


def own_row(cell: Cell, count: int) -> dict[str, Any]:
    """Questions by both rules, of all, over a few orders."""
    lines = np.arange(len(cell.accuracy))
    sharing = SHARED
    if cell.kind in siblings.SLOPES:
        lines = cell.order[: first_for(cell.kind, len(lines))]
        sharing = 0
    scores = cell.right[lines, :count]
    likely = cell.probability[lines, :count]
    races = [
        race(scores, seed, likely=likely, sharing=sharing)
        for seed in range(1000 * cell.seed, 1000 * cell.seed + OWN_ORDERS)
    ]
    return {
        "kind": cell.kind,
        "cell": f"{cell.group} {cell.domain}",
        "questions": count,
        "new": [each.questions for each in races],
        "before": [each.questions_before for each in races],
    }


# --- claims ---------------------------------------------------------------------------------------------


def verdict(estimate: Estimate, bound: float) -> str:
    """Holds where the interval lies below the bound, does not hold where it lies above."""
    if estimate.high < bound:
        return HOLDS
    return FAILS if estimate.low > bound else INCONCLUSIVE


def of_kind(rows: Rows, kind: str, *, with_race: bool = False) -> Rows:
    """The groups of a kind; with a race those that played one."""
    return [row for row in rows if row["kind"] == kind and ("ways" in row or not with_race)]


def wrong_races(rows: Rows, kind: str) -> tuple[Estimate, int]:
    """The share of races that name a worse model, and how many races there were."""
    if kind == "boundary":
        cells = of_kind(rows, kind)
        hits = [lost for row in cells for lost in row["lost"]]
        counts = [row["orders"] for row in cells for _ in row["lost"]]
    else:
        cells = of_kind(rows, kind, with_race=True)
        hits = [row["ways"]["the race"][3] for row in cells]
        counts = [len(row["looks"]) for row in cells]
    return _share(hits, counts)


def wrong_margins(rows: Rows, kind: str) -> tuple[Estimate, int]:
    """The share of races that ever show a margin that is too small."""
    cells = of_kind(rows, kind, with_race=True)
    hits = [
        sum(any(look[1] for look in race if look is not None) for race in row["looks"])
        for row in cells
    ]
    return _share(hits, [len(row["looks"]) for row in cells])


def wrong_answers(rows: Rows, kind: str) -> tuple[Estimate, int]:
    """The same of answers to a budget."""
    shown = [[each["margin"] for each in row["budgets"].values()] for row in of_kind(rows, kind)]
    hits = [sum(margin[1] for margin in margins) for margins in shown]
    return _share(hits, [sum(margin[2] for margin in margins) for margins in shown])


def _share(hits: Sequence[float], counts: Sequence[float]) -> tuple[Estimate, int]:
    return share_of(np.array(hits, float), np.array(counts, float)), int(sum(counts))


def ratios(rows: Rows) -> Grouped:
    """Questions of the race over those by the rule before, mean of the groups."""
    return _mean([row["ratio"] for row in rows if row["kind"] in POOLED and "ratio" in row])


def more_lost(rows: Rows, kind: str, budget: str) -> Grouped:
    """What the answer to a budget loses more than SySRs."""
    cells = [row["budgets"][budget] for row in of_kind(rows, kind)]
    return _mean([cell["ours"][1] - cell["SySRs"][1] for cell in cells])


def own_ratio(rows: Rows, kind: str, count: int) -> Grouped:
    """The ratio of our own populations: mean over a group's cells, then over the groups."""
    groups_of: dict[str, list[float]] = {}
    for row in rows:
        if (row["kind"], row["questions"]) == (kind, count):
            group = row["cell"].rpartition(" ")[0]
            groups_of.setdefault(group, []).append(sum(row["new"]) / sum(row["before"]))
    return _mean([float(np.mean(values)) for values in groups_of.values()])


def _mean(values: Sequence[float]) -> Grouped:
    return Grouped(float(np.mean(values)), np.array(values), len(values))


def claims(rows: Rows, own: Rows) -> list[Verdict]:
    """All lines, by the rules of released_races.yaml."""
    kinds = [kind for kind in KINDS if of_kind(rows, kind)]
    lines = []
    for kind in [*kinds, "boundary"]:
        share, count = wrong_races(rows, kind)
        claim = f"At most 5 % of the races name a model worse by more than 0.01: {kind}"
        lines.append(Verdict(verdict(share, WRONG), claim, f"{percent(share)} of {count:,}"))
    for kind in kinds:
        share, count = wrong_margins(rows, kind)
        claim = f"At most 5 % of the races ever show too small a margin: {kind}"
        lines.append(Verdict(verdict(share, WRONG), claim, f"{percent(share)} of {count:,}"))
    for kind in kinds:
        share, count = wrong_answers(rows, kind)
        claim = f"At most 5 % of the answers to a budget show too small a margin: {kind}"
        lines.append(Verdict(verdict(share, WRONG), claim, f"{percent(share)} of {count:,}"))
    for budget in ("0.2", "0.1"):
        for kind in [kind for kind in POOLED if kind in kinds]:
            more = more_lost(rows, kind, budget)
            share_asked = f"{100 * float(budget):.0f} %"
            claim = f"The answer to a budget of {share_asked} loses at most 0.001 more than SySRs: {kind}"
            result = f"{fine(more.estimate)}, {more.pairs} groups"
            lines.append(Verdict(verdict(more.estimate, MORE), claim, result))
    ratio = ratios(rows)
    claim = f"Stakes by gap in tens ask less than 0.95 of the questions: {ratio.pairs} groups"
    lines.append(Verdict(verdict(ratio.estimate, FEWER), claim, fine(ratio.estimate)))
    for kind, name in OWN_KINDS.items():
        for count in sorted({row["questions"] for row in own}):
            figure = own_ratio(own, kind, count)
            word = HOLDS if figure.value <= 1 else INCONCLUSIVE
            if figure.estimate.low > 1:
                word = FAILS
            claim = (
                f"Of our own models it asks no more questions than before: {name}, N = {count:,}"
            )
            lines.append(Verdict(word, claim, fine(figure.estimate)))
    return lines


def percent(estimate: Estimate) -> str:
    """A share with its interval."""
    value, low, high = (f"{100 * part:.1f}" for part in estimate)
    return f"{value} % ({low} to {high})"


def fine(estimate: Estimate) -> str:
    """A small number with its interval."""
    value, low, high = estimate
    return f"{value:.4f} ({low:.4f} to {high:.4f})"


# --- the page -------------------------------------------------------------------------------------------


def page(confirm: Rows, explore: Rows, own: Rows, known: Rows) -> Page:
    """What the races of released models say."""
    parts = [("confirmed", confirm), ("built on", explore)]
    texts = [
        "## Ways to the best",
        "The rivals may ask as many questions as the race does (halving and SySRs leave some of them "
        "unasked); Hoeffding's race asks as many as it needs. *Lost* is the best score in the list, on all "
        "of its questions, minus that of the model named; near-equals hardly differ. *Wrong* is the share "
        "of races that lose more than 0.01. *The race before* is ours with its former bets (shares of the "
        "largest stake, in steps of 25 questions).",
        markdown(
            ["models", "way", "questions", "lost", "most", "wrong"],
            [line for kind in KINDS for line in _way_lines(confirm, kind)],
        ),
        _beside(parts),
        "## Where a race is short",
        "The share of the questions that the race asks for lists of K models and N questions; in brackets, "
        "that of the race before. The rule was chosen on the answers *built on*; those *confirmed* were "
        "opened after the claims had been committed.",
        markdown(
            ["answers", "models", "N", *(f"K = {size}" for size in SIZES)],
            [line for part, rows in parts for line in _share_lines(part, rows)],
        ),
        "## The margin while it runs",
        "The mean margin that is shown once a race has asked this share of all questions; in brackets, the "
        "share of races that show one by then.",
        markdown(
            ["models", "10 %", "20 %", "30 %", "50 %", "end"],
            [_look_line(confirm, kind) for kind in KINDS if of_kind(confirm, kind)],
        ),
        "## Answers to a budget",
        "All models stay loaded, as adapters and the models of a server do. SySRs follows its abstract, on "
        "the same questions and as many. *More* is what the race's answer loses more than that of SySRs.",
        markdown(
            ["answers", "models", "budget", "lost", "SySRs", "more (95 %)", "margin"],
            [line for part, rows in parts for line in _budget_lines(part, rows)],
        ),
        *_known_texts(known),
        _provenance(confirm, explore, own, known),
    ]
    return Page(_head(confirm), claims(confirm, own), texts)


def _head(rows: Rows) -> list[str]:
    """The first sentences."""
    raced = [row for row in rows if "ways" in row]
    of = [row for row in raced if row["kind"] in POOLED]
    asked = _mean([row["ways"]["the race"][0] for row in of]).estimate
    low, high = np.quantile([row["ways"]["the race"][0] for row in of], (0.05, 0.95))
    wrong = sum(row["ways"]["the race"][3] for row in raced)
    count = sum(len(row["looks"]) for row in raced)
    lost = float(np.mean([row["ways"]["the race"][1] for row in raced]))
    fewest, most = (pick(row["questions"] for row in of) for pick in (min, max))
    return [
        f"Over {len(of)} lists of released models (siblings, top, random, partial credit) the race "
        f"asked {percent(asked)} of their {fewest} to {most} questions, from {100 * low:.0f} to "
        f"{100 * high:.0f} % in nine of ten lists. In {count:,} races, those of near-equals and copies "
        f"included, it named {wrong} times a model that was worse by more than 0.01; the mean loss was "
        f"{lost:.4f}.",
        KINDS_OF_LISTS,
    ]


def _beside(parts: Sequence[tuple[str, Rows]]) -> str:
    """What no claim was registered for: the loss by the stakes before, and the boundary by matrix."""
    confirmed = parts[0][1]
    ways = [row["ways"] for row in confirmed if row["kind"] in POOLED and "ways" in row]
    more = _mean([way["the race"][1] - way["the race before"][1] for way in ways]).estimate
    edges = []
    for part, rows in parts:
        for row in of_kind(rows, "boundary"):
            share, _ = wrong_races([row], "boundary")
            edges.append(f"{row['matrix']} ({part}) {percent(share)}")
    return (
        f"The race before asked more and lost less, inside the margin: today's loses {fine(more)} more. "
        f"On the boundary, by the answers: {'; '.join(edges)}."
    )


def _known_texts(rows: Rows) -> list[str]:
    """The bundled answers, which everybody can race."""
    (row,) = rows
    lines = [
        [way, f"{100 * share:.1f} %", f"{lost:.4f}", f"{most:.3f}", str(wrong), "none"]
        for way, (share, lost, most, wrong) in row["ways"].items()
    ]
    lines[0][-1] = _look_line(rows, "known")[-1].partition(" ")[0]
    for budget, cell in row["budgets"].items():
        for way in ("SySRs", "ours"):
            share, lost, most, wrong = cell[way]
            name = f"{way}, {100 * float(budget):.0f} %"
            margin = f"{cell['margin'][0]:.3f}" if way == "ours" else "none"
            figures = [f"{100 * share:.1f} %", f"{lost:.4f}", f"{most:.3f}", str(wrong), margin]
            lines.append([name, *figures])
    shown = _look_line(rows, "known")[1:]
    looks = ", ".join(shown[:-1])
    return [
        "## Models that everybody knows",
        f"All {row['models']} models of `dispersion race --demo released` on {row['questions']:,} questions of "
        f"GSM8K, {len(row['looks'])} orders; the rule was built on these answers, too. The race shows a mean "
        f"margin of {looks} after 10, 20, 30 and 50 % of the questions.",
        markdown(["way", "questions", "lost", "most", "wrong", "margin"], lines),
    ]


def _way_lines(rows: Rows, kind: str) -> Iterator[list[str]]:
    """A line for each way, of a kind."""
    cells = of_kind(rows, kind, with_race=True)
    shown = kind
    for way in cells[0]["ways"] if cells else ():
        table = np.array([row["ways"][way] for row in cells])
        share, count = _share(table[:, 3].tolist(), [len(row["looks"]) for row in cells])
        asked = f"{100 * table[:, 0].mean():.1f} %"
        lost = _mean(table[:, 1].tolist()).estimate
        most = f"{table[:, 2].max():.3f}"
        yield [shown, way, asked, fine(lost), most, f"{percent(share)} of {count}"]
        shown = ""


def _share_lines(part: str, rows: Rows) -> Iterator[list[str]]:
    """The share of questions by matrix, kind and number of questions, a cell for each number of models."""
    cells: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "ways" in row:
            key = (row["matrix"], row["kind"], row["questions"])
            cells.setdefault(key, []).append(row)
    for (matrix, kind, questions), each in cells.items():
        yield [
            f"{matrix} ({part})",
            kind,
            f"{questions:,}",
            *(_shares(each, size) for size in SIZES),
        ]


def _shares(rows: Rows, size: int) -> str:
    """The mean share of questions of lists of a size, by the race and by the race before."""
    ways = [row["ways"] for row in rows if row["models"] == size]
    if not ways:
        return ""
    now, before = (
        100 * float(np.mean([way[name][0] for way in ways]))
        for name in ("the race", "the race before")
    )
    return f"{now:.0f} % ({before:.0f})"


def _look_line(rows: Rows, kind: str) -> list[str]:
    """The mean margin at each look, of a kind."""
    races = [race for row in of_kind(rows, kind, with_race=True) for race in row["looks"]]
    line = [kind]
    for looks in zip(*races, strict=True):
        shown = [look[0] for look in looks if look is not None]
        if not shown:
            line.append("none yet")
            continue
        line.append(f"{np.mean(shown):.3f} ({100 * len(shown) / len(looks):.0f} %)")
    return line


def _budget_lines(part: str, rows: Rows) -> Iterator[list[str]]:
    """What ours and SySRs lose at a budget, and the margin that ours shows."""
    for matrix in dict.fromkeys(row["matrix"] for row in rows):
        for kind in KINDS:
            cells = [row["budgets"] for row in of_kind(rows, kind) if row["matrix"] == matrix]
            for budget in cells[0] if cells else ():
                lost = [
                    f"{np.mean([cell[budget][way][1] for cell in cells]):.4f}"
                    for way in ("ours", "SySRs")
                ]
                more = [cell[budget]["ours"][1] - cell[budget]["SySRs"][1] for cell in cells]
                margin = f"{np.mean([cell[budget]['margin'][0] for cell in cells]):.3f}"
                share = f"{100 * float(budget):.0f} %"
                interval = fine(_mean(more).estimate)
                yield [f"{matrix} ({part})", kind, share, *lost, interval, margin]


def _provenance(*parts: Rows) -> str:
    """Where it comes from, and how it is made again."""
    commits = ", ".join(sorted({row["commit"] for rows in parts for row in rows}))
    return f"""## Make it again

The claims are [released_races.yaml]({HOME}/released_races.yaml), committed before the confirming
answers were opened; rows by commit {commits}. Answers: [metabench](https://github.com/adkipnis/metabench)
(the Open LLM Leaderboard's models on questions chosen for information, so races need more of them than
of a whole benchmark; CC BY-NC-SA 4.0), [LiveCodeBench](https://livecodebench.github.io) (pass@1 of ten
samples), [ZeroEval](https://github.com/WildEval/ZeroEval) (Apache-2.0). Groups of one matrix share its
questions and may share models: intervals are over groups as drawn, not over benchmarks. No answer has a
probability. With a folder that has `explore/` and `confirm/` (an .npz each: `bits`, `questions`,
`models`, `family`):

```bash
python -m benchmarks.validity.released_races confirm FOLDER
python -m benchmarks.validity.released_races own
python -m benchmarks.validity.released_races known
python -m benchmarks.validity.released_races page
```"""


def main() -> None:
    """Run one of the jobs."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.validity.released_races", description=__doc__
    )
    parser.formatter_class = argparse.RawTextHelpFormatter
    parser.add_argument("job", choices=["explore", "confirm", "own", "known", "page"])
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the answer matrices")
    parser.add_argument("--results", type=Path, default=records.FOLDER, help="folder for results")
    parser.add_argument(
        "--page", type=Path, default=Path("docs/results/released-races.md"), help="the page"
    )
    arguments = parser.parse_args()
    files = {
        part: arguments.results / f"released-races-{part}.jsonl"
        for part in ("explore", "confirm", "own", "known")
    }
    if arguments.job == "page":
        rows = {part: records.checked(file, STUDY) for part, file in files.items()}
        arguments.page.write_text(page(**rows).written(TITLE), "utf-8")
        return
    out = files[arguments.job]
    if out.exists():
        parser.error(f"{out} exists: it was played; remove it to play it again")
    if arguments.job == "own":
        play_own(arguments.results, out)
    elif arguments.job == "known":
        play_known(out)
    elif arguments.folder is None:
        parser.error("expected the folder of the answer matrices")
    else:
        play(arguments.job, arguments.folder, out)


if __name__ == "__main__":
    main()
