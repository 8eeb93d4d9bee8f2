"""Ways to the best checkpoint of a group, each with the same random orders of the questions: race.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.validity.analysis import Floats
from benchmarks.validity.records import FOLDER, read, unpacked, unpacked_shares
from benchmarks.validity.texts import DOMAINS
from lmeval_dispersion.racing.contest import BLOCK, MARGIN, Contest, Scores, run

ORDERS = 200
Lanes = NDArray[np.int64]


class Table(NamedTuple):
    """Answers of a group's checkpoints to one domain's questions, (checkpoints, questions), and figures."""

    right: Floats
    probability: Floats
    truth: Floats  # accuracy on the pool that no race is asked, (checkpoints,)
    ratio: Floats
    g: Floats

    @property
    def third(self) -> int:
        """How many a third is, rounded up."""
        return math.ceil(len(self.right) / 3)

    @property
    def screen(self) -> Lanes:
        """The screen's order: ratio over answer tokens."""
        return np.argsort(-self.ratio, kind="stable")

    @property
    def screen_of_both(self) -> Lanes:
        """The order of the mean rank of G and that ratio."""
        ranks = [np.argsort(np.argsort(-figure, kind="stable")) for figure in (self.g, self.ratio)]
        return np.argsort(ranks[0] + ranks[1], kind="stable")

    @property
    def cut(self) -> float:
        """Accuracy of the truly best less that of the best of the screen's third."""
        return float(self.truth.max() - self.truth[self.screen[: self.third]].max())


class Named(NamedTuple):
    """A way's best checkpoint, and what it took.

    Attributes:
        best: Its line in the table.
        questions: Asked of all together.
        loads: Checkpoints loaded; one that is loaded twice counts twice.
        wrong: Whether another of those raced is better by more than the margin, by all questions.
    """

    best: int
    questions: int
    loads: int
    wrong: bool = False


def tables(rows: Sequence[Mapping[str, Any]], questions: int) -> dict[str, Table]:
    """By "KIND SEED DOMAIN"; the bases are no members."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["name"]):
        groups.setdefault(f"{row['recipe'].split('-')[0]} {row['seed']}", []).append(row["checkpoints"][-1])
    return {
        f"{group} {domain}": Table(
            np.array([unpacked(end["right"]["labels"][domain], questions) for end in ends], float),
            np.array([unpacked_shares(end["probability"]["labels"][domain]) for end in ends]),
            np.array([unpacked(end["right"]["truth"][domain], questions).mean() for end in ends]),
            np.array([end["answers"][f"ratio_answers_{domain}"] for end in ends]),
            np.array([end["figures"][f"cosine_{domain}"] for end in ends]),
        )
        for group, ends in sorted(groups.items())
        if not group.startswith("base")
        for domain in DOMAINS
    }


def released_tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, Table]:
    """The full fine-tunes of the released base, of smollm2.jsonl: 50 questions of each domain."""
    full = [row for row in rows if row["kind"] == "full"]

    def table(domain: str) -> Table:
        asked = [row["asked"][domain] for row in full]
        probability = np.array([unpacked_shares(each["labels"]["probability"]) for each in asked])
        right = [unpacked(each["labels"]["right"], probability.shape[1]) for each in asked]
        truth = np.array([each["truth"]["accuracy"] for each in asked])
        ratio = np.array([row["figures"][f"ratio_{domain}_answers"] for row in full])
        return Table(np.array(right, float), probability, truth, ratio, ratio)

    return {f"released 0 {domain}": table(domain) for domain in ("math", "code")}


def all_asked(right: Floats, among: Lanes, count: int) -> Named:
    """The first questions asked of each; the first of equal ones."""
    return Named(int(among[right[among, :count].mean(1).argmax()]), count * len(among), len(among))


def halved(right: Floats, among: Lanes) -> Named:
    """Successive halving: 25 questions, then twice as many of the better half, until one is left."""
    count, asked, questions, loads = BLOCK, 0, 0, 0
    while len(among) > 1:
        questions, loads = questions + (count - asked) * len(among), loads + len(among)
        better = among[np.argsort(-right[among, :count].sum(1), kind="stable")]
        whole = count == right.shape[1]
        among = better[: 1 if whole else math.ceil(len(among) / 2)]
        count, asked = min(2 * count, right.shape[1]), count
    return Named(int(among[0]), questions, loads)


def raced(right: Floats, probability: Floats, among: Lanes, *, by_probability: bool = False) -> Named:
    """The race as it is shipped, with its defaults."""
    contest = Contest(right.shape[1], by_probability=by_probability)
    for lane in among:

        def ask(begin: int, end: int, lane: int = lane) -> Scores:
            return Scores(right[lane, begin:end], probability[lane, begin:end])

        run(contest, str(lane), ask)
    assert contest.best is not None
    means, best = right.mean(1), int(contest.best)
    wrong = bool(means[among].max() > means[best] + MARGIN + 1e-9)
    return Named(best, contest.asked, len(contest.answered), wrong)


def ways(table: Table, rng: np.random.Generator) -> dict[str, Named]:
    """All of them, with one random order of the questions, and one of the checkpoints where none is given."""
    order, lanes = rng.permutation(table.right.shape[1]), rng.permutation(len(table.right))
    right, probability = table.right[:, order], table.probability[:, order]
    screen, third, every = table.screen, table.third, len(order)
    return {
        "everything": all_asked(right, lanes, every),
        "random third": all_asked(right, lanes[:third], every),
        "25 labels": all_asked(right, lanes, 25),
        "halving": halved(right, lanes),
        "the third": all_asked(right, screen[:third], every),
        "first three": all_asked(right, screen[:3], every),
        "the race": raced(right, probability, screen[:third]),
        "the race by probability": raced(right, probability, screen[:third], by_probability=True),
        "all raced": raced(right, probability, lanes),
        "the race, mean rank": raced(right, probability, table.screen_of_both[:third]),
    }


def mean_of(table: Table, named: Sequence[Named]) -> dict[str, float]:
    """Accuracy lost, share of all questions, loads and share of the races that are wrong."""
    best, questions, loads, wrong = map(np.array, zip(*named, strict=True))
    means = {
        "lost": table.truth.max() - table.truth[best].mean(),
        "share": questions.mean() / table.right.size,
        "loads": loads.mean(),
        "wrong": wrong.mean(),
    }
    return {name: round(float(value), 6) for name, value in means.items()}


def played(given: Mapping[str, Table], orders: int = ORDERS) -> tuple[dict[str, Any], dict[str, Any]]:
    """Means over the orders by table and way; and what UCB-E is given, with as many questions as the race."""
    results, problems = {}, {}
    for label, table in given.items():
        _, seed, domain = label.split()
        rng = np.random.default_rng([int(seed), DOMAINS.index(domain)])
        runs = [ways(table, rng) for _ in range(orders)]
        results[label] = {way: mean_of(table, [each[way] for each in runs]) for way in runs[0]}
        budgets = {
            "UCB-E, 10 %": [table.right.size // 10] * orders,
            "UCB-E, as the race": [each["the race"].questions for each in runs],
        }
        problems[label] = {"right": table.right.astype(int).tolist(), "budgets": budgets}
    return results, problems


def with_choices(results: Any, given: Mapping[str, Table], choices: Mapping[str, Any]) -> dict[str, Any]:
    """The results, with the means of what ucb_e.py wrote."""
    return {
        label: results[label]
        | {way: mean_of(table, list(starmap(Named, own))) for way, own in choices.get(label, {}).items()}
        for label, table in given.items()
    }


if __name__ == "__main__":  # the released base's fine-tunes, without a claim
    for label, way in played(released_tables(read(FOLDER / "smollm2.jsonl")))[0].items():
        for name, means in way.items():
            print(f"{label:20} {name:24} lost {means['lost']:.3f}  questions {means['share']:.3f}")
