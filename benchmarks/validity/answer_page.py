"""The page on fine-tunes and answer tokens, made of the results alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.validity import records
from benchmarks.validity.analysis import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    UNTESTED,
    Pairs,
    Population,
    Resampled,
    Verdict,
    frame,
    mean_of,
    sign_of,
)
from benchmarks.validity.answer_claims import ANSWERS, KINDS, Kind, by_means, claims, decided, not_lost
from benchmarks.validity.study import read_study
from benchmarks.validity.texts import DOMAINS

HERE = Path(__file__).parent
RELEASED = ("math", "code")  # domains of the released base's questions
#: Figures of the released base, by their columns for each domain.
COLUMNS = {
    "ratio, answer tokens": {"math": "ratio_math_answers", "code": "ratio_code_answers"},
    "ratio, tokens found by the base": {"math": "ratio_math_found", "code": "ratio_code_found"},
    "ratio, domain's set": {"math": "ratio_math_answers", "code": "ratio_code_keywords"},
    "G, domain's set": {"math": "g_math_answers", "code": "g_code_keywords"},
    "G, answer tokens": {"math": "g_math_answers", "code": "g_code_answers"},
}


class Released:
    """Fine-tunes of the released base: its rows, pairs and shares."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], truth: int) -> None:
        self.base = next(row for row in rows if row["kind"] == "base")
        self.adapters = [row for row in rows if row["kind"] == "adapters"]
        self.full = [row for row in rows if row["kind"] == "full"]
        table = pd.DataFrame(
            {
                "seed": 0,
                "recipe": [row["name"] for row in self.full],
                **{f"seen_{d}": 1.0 for d in RELEASED},
                **{
                    f"accuracy_{d}": [row["asked"][d]["truth"]["accuracy"] for row in self.full]
                    for d in RELEASED
                },
            }
        )
        self.population = Population(table, truth, nested=True)
        self.pairs: dict[str, Pairs] = {d: self.population.pairs(d) for d in RELEASED}

    def column(self, name: str) -> Any:
        """A figure of every fine-tune."""
        return np.array([row["figures"][name] for row in self.full])

    def shares(self) -> dict[str, dict[str, Resampled]]:
        """Share of the pairs right, by figure, domain and their mean."""
        made = {
            name: {d: self.pairs[d].share(self.pairs[d].right(self.column(columns[d]))) for d in RELEASED}
            for name, columns in COLUMNS.items()
        }
        right, shares = self._asked("right"), self._asked("probability")
        for count in (5, 15, 25):
            made[f"{count} labels"] = self._labels(right, count)
        for count in (5, 25):
            made[f"{count} labels by probability"] = self._labels(shares, count)
        squares = self._asked("squares")
        made["squares of 25 questions without answers"] = {
            d: self.pairs[d].share(self.pairs[d].right(squares[d][:, :25].mean(1))) for d in RELEASED
        }
        return {name: parts | {"mean": mean_of(list(parts.values()))} for name, parts in made.items()}

    def _labels(self, values: Mapping[str, Any], count: int) -> dict[str, Resampled]:
        return {d: self.pairs[d].share(by_means(self.pairs[d], values[d], count)) for d in RELEASED}

    def _asked(self, what: str) -> dict[str, Any]:
        """What the labelled questions say, (fine-tunes, questions)."""

        def values(cell: Mapping[str, str]) -> Any:
            count = len(records.unpacked_shares(cell["squares"]))
            if what == "right":
                return records.unpacked(cell["right"], count).astype(float)
            return records.unpacked_shares(cell[what])

        return {d: np.array([values(row["asked"][d]["labels"]) for row in self.full]) for d in RELEASED}

    def across_base(self) -> dict[str, Resampled]:
        """Share right of the pairs of which one lies above the base, one below, by ratio of answer tokens."""
        parts = {}
        for d, pairs in self.pairs.items():
            figure = self.column(COLUMNS[ANSWERS][d])
            up = figure > self.base["figures"][COLUMNS[ANSWERS][d]]
            parts[d] = pairs.share(pairs.right(figure), up[pairs.first] != up[pairs.second])
        return parts | {"mean": mean_of(list(parts.values()))}

    def claims(self) -> list[Verdict]:
        """All lines, in the order of the configuration's claims."""
        shares = self.shares()
        where = "a released base"
        ours, lines = shares[ANSWERS], []
        for d, least in (("code", ["ratio, domain's set", "G, domain's set"]), ("math", [])):
            above = all(ours[d].value > shares[name][d].value for name in least)
            lines.append(
                Verdict(
                    HOLDS if ours[d].estimate.low > 0.5 and above else FAILS,
                    f"Ratio over answer tokens orders {d}: {where}",
                    f"right: {ours[d].estimate} of {ours[d].pairs} pairs"
                    + "".join(f"; {name} {shares[name][d].estimate}" for name in least),
                )
            )
        found = shares["ratio, tokens found by the base"]["mean"].less(ours["mean"])
        lines.append(
            Verdict(not_lost(found), f"Tokens found by the base serve as well: {where}", f"{found.estimate}")
        )
        by_probability = shares["5 labels by probability"]["mean"]
        for rival in ("5 labels", "15 labels"):
            less = by_probability.less(shares[rival]["mean"])
            result = f"{by_probability.value:.2f} against {shares[rival]['mean'].value:.2f}: {less.estimate}"
            claim = "better than 5" if rival == "5 labels" else "at least as well as 15"
            lines.append(
                Verdict(
                    sign_of(less), f"5 labels by probability order {claim} right or wrong: {where}", result
                )
            )
        squares = shares["squares of 25 questions without answers"]["mean"].estimate
        lines.append(
            Verdict(
                HOLDS if squares.low > 0.5 else FAILS if squares.high < 0.5 else INCONCLUSIVE,
                f"25 questions without answers order better than a coin: {where}",
                f"right: {squares}",
            )
        )
        across = self.across_base()
        mean, said = (
            across["mean"].value,
            [f"{d} {across[d].estimate} of {across[d].pairs}" for d in RELEASED],
        )
        verdict = UNTESTED if np.isnan(mean) else HOLDS if mean >= 0.85 else FAILS
        claim = f"One above the base is better than one below: {where}"
        lines.append(Verdict(verdict, claim, f"right: {'; '.join(said)} pairs"))
        names = [name for name in self.base["figures"] if name.startswith("ratio")]
        same = all(
            row["figures"][name] == self.base["figures"][name] for row in self.adapters for name in names
        )
        lines.append(
            Verdict(
                HOLDS if same and self.adapters else FAILS,
                "Rows say nothing of an adapter that leaves the head alone",
                f"{len(self.adapters)} adapters",
            )
        )
        return lines


class Part(NamedTuple):
    """A part of the page, with its verdicts and its first sentence."""

    head: list[str]
    lines: list[Verdict]
    texts: list[str]


def share_table(markdown: Any, shares: Mapping[str, Mapping[str, Resampled]], columns: Sequence[str]) -> str:
    """Shares by figure, with the number of pairs."""
    first = next(iter(shares.values()))
    pairs = ["pairs", *(str(first[column].pairs) for column in columns)]
    return str(
        markdown(["figure", *columns], [pairs, *([n, *(p[c] for c in columns)] for n, p in shares.items())])
    )


def populations(folder: Path, markdown: Any, provenance: Any, home: str) -> Part | None:
    """What answers.jsonl says; None where it is not there."""
    study = read_study(HERE / "answers.yaml")
    rows = records.checked(folder / "answers.jsonl", study.path)
    if not rows:
        return None
    table, questions = frame(study, rows), study.content["questions"]
    tuned, mixed = (Kind(kind, table, questions) for kind in KINDS)
    ours, now, g = (tuned.shares[name] for name in (ANSWERS, "ratio", "G"))
    code = ours["code"].less(now["code"]).estimate
    probability = tuned.worth("5 labels by probability")
    squares = tuned.worth("squares of 25 questions without answers")
    head = (
        f"- {len(tuned.population.table)} fine-tunes of six bases: ratio over answer tokens orders "
        f"{100 * ours['code'].value:.0f} % of the pairs of code, over keywords "
        f"{100 * now['code'].value:.0f} % (difference {code}), G {100 * g['code'].value:.0f} %; of math "
        f"{100 * ours['math'].value:.0f} % and "
        f"{100 * g['math'].value:.0f} %. The registered rule ranks by: {decided(tuned, mixed)}.\n"
        f"- Five labels scored by the probability of the right answer: worth {probability.value:.0f} scored "
        f"right or wrong ({probability.low:.0f} to {probability.high:.0f}); 25 questions without answers: "
        f"{squares.value:.0f} ({squares.low:.0f} to {squares.high:.0f})."
    )
    columns = [*DOMAINS, "mean"]
    sides = tuned.sides._asdict()
    texts = [
        "## Fine-tunes of six bases",
        "Share of the pairs that each figure orders as accuracy does, all recipes; *mean* is of math and "
        "code. "
        "Learning rate and steps vary; half of the recipes hold no false text.",
        share_table(markdown, tuned.shares, columns),
        "Worth, in labels scored right or wrong (math and code):",
        markdown(
            ["figure", "labels"],
            [
                [name, f"{worth.value:.0f} ({worth.low:.0f} to {worth.high:.0f})"]
                for name in tuned.shares
                if not name.endswith(" labels")
                for worth in [tuned.worth(name)]
            ],
        ),
        "### By false text",
        "Wrong sums, random digits, wrong code (at random, or always wrong in the same way) in neither "
        "recipe of "
        "a pair, or in one or both; the number of pairs in brackets behind each interval.",
        markdown(
            ["figure", *columns],
            [[n, *(f"{p[c].estimate} ({p[c].pairs})" for c in columns)] for n, p in tuned.false_text.items()],
        ),
        "### Against the base",
        "Ratio over answer tokens. *Below*: both recipes lie below their base; *across*: one above, one "
        "below.",
        markdown(
            ["pairs", *columns],
            [[n, *(f"{p[c].estimate} ({p[c].pairs})" for c in columns)] for n, p in sides.items()],
        ),
        "## Fresh mixtures from scratch",
        "T is found by the first base.",
        share_table(markdown, mixed.shares, columns),
        f"[answers.yaml]({home}/answers.yaml): {provenance(study, rows)}",
    ]
    return Part([head], claims(tuned, mixed), texts)


def released(folder: Path, markdown: Any, home: str) -> Part | None:
    """What smollm2.jsonl says; None where it is not there."""
    import yaml

    configuration = HERE / "smollm2.yaml"
    rows = records.checked(folder / "smollm2.jsonl", configuration)
    if not rows:
        return None
    planned = yaml.safe_load(configuration.read_text("utf-8"))
    count = 1 + sum(part["count"] for kind in ("full", "adapters") for part in planned[kind].values())
    data = Released(rows, planned["questions"]["truth"])
    shares = data.shares()
    minutes = sum(row["processor_seconds"] for row in rows) / 60
    asked = [
        [row["name"], *(row["asked"][d]["truth"]["accuracy"] for d in RELEASED)]
        + [f"{row['figures'][COLUMNS[ANSWERS][d]]:.5f}" for d in RELEASED]
        for row in rows
    ]
    texts = [
        "## A released base",
        "Share of the pairs of full fine-tunes that each figure orders as accuracy does.",
        share_table(markdown, shares, [*RELEASED, "mean"]),
        "Every checkpoint: accuracy of math and code on 120 questions, ratio over answer tokens.",
        markdown(["checkpoint", "math", "code", "ratio math", "ratio code"], asked),
        f"[smollm2.yaml]({home}/smollm2.yaml): {len(rows)} of {count} models; commit "
        f"{', '.join(sorted({row['commit'] for row in rows}))}; {rows[0]['machine']}; {minutes:.0f} "
        f"minutes of one core.",
    ]
    if len(rows) < count:
        texts.append("The run goes on: its claims are judged when all are there.")
        return Part([], [], texts)
    ours, keywords = shares[ANSWERS], shares["ratio, domain's set"]
    head = (
        f"- A released base that others trained (SmolLM2-135M-Instruct, {len(data.full)} full fine-tunes): "
        f"ratio over answer tokens orders {100 * ours['math'].value:.0f} % of the pairs of math, of code "
        f"{100 * ours['code'].value:.0f} % (over keywords {100 * keywords['code'].value:.0f} %)."
    )
    return Part([head], data.claims(), texts)
