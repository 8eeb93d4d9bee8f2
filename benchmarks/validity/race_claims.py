"""From a screen to the best checkpoint: the figures, the claims and the page of race.yaml, by its rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.validity import records
from benchmarks.validity.analysis import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    PART,
    Resampled,
    Verdict,
    drawn,
    outcome,
    sign_of,
)
from benchmarks.validity.answer_page import Part
from benchmarks.validity.races import ORDERS, Table, played, tables, with_choices
from benchmarks.validity.study import read_study
from benchmarks.validity.texts import DOMAINS

STUDY = Path(__file__).parent / "race.yaml"
KINDS = {"mix": "random mixtures", "tuned": "fine-tunes"}
RACE, BY_PROBABILITY = "the race", "the race by probability"
LOST, SHARE, LEVEL = 0.01, 0.15, 0.05
WORST_FIRST = (FAILS, INCONCLUSIVE, PART, HOLDS)


class Kind:
    """The mixtures, or the fine-tunes: figures by way, resampled over the groups.

    Args:
        kind: Of `KINDS`.
        given: All tables, by label.
        results: Means by way of each, by label.
    """

    def __init__(self, kind: str, given: Mapping[str, Table], results: Mapping[str, Any]) -> None:
        self.name, self.given, self.results = KINDS[kind], given, results
        self.groups = sorted({label.rsplit(" ", 1)[0] for label in given if label.startswith(kind)})
        first = given[f"{self.groups[0]} {DOMAINS[0]}"]
        self.size, self.third = len(first.right), first.third
        self.population = f"{len(self.groups)} groups of {self.size} {self.name}"

    def over(self, of: Callable[[str], float], domains: Sequence[str] = DOMAINS) -> Resampled:
        """Mean of a figure of tables over the domains, then over the groups; and of resampled groups."""
        values = np.array([np.mean([of(f"{group} {d}") for d in domains]) for group in self.groups])
        return Resampled(float(values.mean()), values[drawn(len(values))].mean(1))

    def figure(self, way: str, name: str) -> Resampled:
        """Mean of a figure of a way."""
        return self.over(lambda label: self.results[label][way][name])

    def more(self, name: str, way: str, rival: str) -> Resampled:
        """By how much a way's figure is above a rival's."""
        return self.figure(way, name).less(self.figure(rival, name))

    @property
    def cut(self) -> tuple[Resampled, list[Resampled]]:
        """How often the truly best is not in the screen's third; what that loses, of all and by domain."""
        lost = [self.over(lambda label: self.given[label].cut, d) for d in (DOMAINS, *zip(DOMAINS))]
        return self.over(lambda label: self.given[label].cut > 0), lost


def said(figure: Resampled) -> str:
    """Accuracy with its interval."""
    value, low, high = figure.estimate
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def percent(figure: Resampled) -> str:
    """A share with its interval."""
    value, low, high = (100 * part for part in figure.estimate)
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def below(figure: Resampled, bound: float) -> str:
    """Holds where the interval lies below the bound, does not where it lies above."""
    _, low, high = figure.estimate
    return HOLDS if high < bound else FAILS if low > bound else INCONCLUSIVE


def claims(kind: Kind) -> list[Verdict]:
    """All lines, in the order of the configuration's claims."""
    lines: list[tuple[str, str, str]] = []
    for way in (RACE, BY_PROBABILITY):
        name, more = way[0].upper() + way[1:], kind.more("lost", way, "everything")
        share, wrong = kind.figure(way, "share"), kind.figure(way, "wrong").value
        dropped = f"{name} drops the best of the raced for another, worse by more than the margin, in at most"
        lines += [
            (below(more, LOST), f"{name} loses at most 0.01 more than everything", said(more)),
            (below(share, SHARE), f"{name} asks at most 15 % of the questions", percent(share)),
            (outcome(wrong <= LEVEL), f"{dropped} 5 % of its runs", f"{100 * wrong:.2f} %"),
        ]
    labels = [f"{group} {domain}" for group in kind.groups for domain in DOMAINS]
    loads = {kind.results[label][way]["loads"] for label in labels for way in (RACE, BY_PROBABILITY)}
    once = outcome(loads == {kind.third})
    fewer, more = (kind.more(name, BY_PROBABILITY, RACE) for name in ("share", "lost"))
    random, saved = kind.more("lost", "random third", RACE), kind.more("share", "all raced", RACE)
    lines += [
        (once, "The race loads a third, each once", f"{max(loads):g} of {kind.size}"),
        (below(fewer, 0), "By probability fewer questions are asked", percent(fewer)),
        (below(more, LOST), "By probability at most 0.01 more is lost", said(more)),
        (sign_of(random), "The race after the screen loses less than a random third", said(random)),
        (sign_of(saved), "The race after the screen asks fewer questions than a race of all", percent(saved)),
    ]
    return [Verdict(verdict, f"{claim}: {kind.name}", result) for verdict, claim, result in lines]


def sentence(kind: Kind) -> str:
    """The race beside everything."""
    both = [
        f"{said(kind.figure(way, 'lost'))} with {percent(kind.figure(way, 'share'))} of the questions"
        for way in (RACE, BY_PROBABILITY)
    ]
    return (
        f"- {kind.population}, {kind.third} of each loaded: the race after the screen loses {both[0]}, by "
        f"probability {both[1]}; everything loses {said(kind.figure('everything', 'lost'))}, a random third "
        f"{said(kind.figure('random third', 'lost'))}."
    )


def race_part(folder: Path, markdown: Any, provenance: Any, home: str) -> Part | None:
    """What the races say; None where they were not run."""
    races, choices = (folder / f"race-{name}.json" for name in ("races", "ucb-e"))
    if not races.exists():
        return None
    study = read_study(STUDY)
    rows = records.checked(folder / "race.jsonl", STUDY)
    given, content = tables(rows, study.content["questions"]), json.loads(races.read_text("utf-8"))
    chosen = json.loads(choices.read_text("utf-8")) if choices.exists() else {}
    results = with_choices(content["results"], given, chosen)
    kinds, names = [Kind(kind, given, results) for kind in KINDS], next(iter(results.values()))
    older = tables(records.read(folder / "answers.jsonl"), study.content["questions"])
    cuts = {k.population: k.cut for k in kinds}
    cuts |= {
        f"{k.population} of answers.yaml": k.cut for k in (Kind(kind, older, {}) for kind in KINDS if older)
    }
    lines = sorted((v for kind in kinds for v in claims(kind)), key=lambda v: WORST_FIRST.index(v.verdict))
    failed = [f"- {v.verdict.capitalize()}: {v.claim}, {v.result}." for v in lines if v.verdict != HOLDS]
    headings = [f"{kind.name}: {what}" for kind in kinds for what in ("lost", "questions", "loads")]
    texts = [
        "## Ways to the best",
        "*Lost*: accuracy on 400 other questions, of the truly best less that of the checkpoint named; means "
        f"over three domains and {ORDERS} orders of the questions, intervals from resampling groups. "
        "*Questions*: of those that `everything` asks. *Loads*: loaded twice counts twice. *UCB-E*: "
        + (
            "banditeval's own code, 8 questions a step as in its demo (`ucb_e.py`)." if chosen else "not run."
        ),
        markdown(["way", *headings], [[way, *(c for k in kinds for c in row(k, way))] for way in names]),
        "## What the screen's cut costs",
        "How often the truly best is not in the screen's first third, and the accuracy that this loses; "
        "beside it in the older study by which the ratio ranks.",
        markdown(
            ["population", "best not loaded", "lost", *DOMAINS],
            [[name, percent(dropped), *map(said, lost)] for name, (dropped, lost) in cuts.items()],
        ),
        f"[race.yaml]({home}/race.yaml): {provenance(study, rows)} Races: commit {content['commit']}.",
    ]
    return Part([*failed, *map(sentence, kinds)], lines, texts)


def row(kind: Kind, way: str) -> list[str]:
    """A way's cells."""
    loads = kind.figure(way, "loads").value
    return [said(kind.figure(way, "lost")), percent(kind.figure(way, "share")), f"{loads:.0f}"]


def write_races(folder: Path, work: Path) -> None:
    """Run all races, write their means, and what UCB-E is given.

    Raises:
        ValueError: Some models are missing.
    """
    study, rows = read_study(STUDY), records.checked(folder / "race.jsonl", STUDY)
    if len(rows) < len(study.runs()):
        raise ValueError(
            f"expected {len(study.runs())} models in {folder}, got {len(rows)}: train the others"
        )
    results, problems = played(tables(rows, study.content["questions"]))
    text = json.dumps(records.provenance() | {"results": results}, indent=0) + "\n"
    (folder / "race-races.json").write_text(text, "utf-8")
    work.mkdir(parents=True, exist_ok=True)
    (work / "tables.json").write_text(json.dumps(problems), "utf-8")
