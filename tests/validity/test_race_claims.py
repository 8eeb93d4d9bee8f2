"""The rules of race.yaml on planted groups: what is there is said, and what is not there is not."""

import json

import numpy as np
import pytest

from benchmarks.validity import race_claims, records
from benchmarks.validity.analysis import FAILS, HOLDS, INCONCLUSIVE, Resampled
from benchmarks.validity.page import markdown
from benchmarks.validity.race_claims import BY_PROBABILITY, Kind, below, claims, race_part, write_races
from benchmarks.validity.races import Table, all_asked, halved, played, tables, ways, with_choices
from benchmarks.validity.study import read_study
from benchmarks.validity.texts import DOMAINS

QUESTIONS, ORDERS = 400, 8
NAMES = (
    "loses at most",
    "asks at most",
    "drops the best",
    "loads a third",
    "fewer questions are asked",
    "more is lost",
    "random third",
    "race of all",
)


def table(rng, *, size=12, screened=True, apart=0.5, probability=True):
    """Checkpoints ``apart`` from worst to best in accuracy; a screen that knows it, or its opposite."""
    chances = rng.permutation(0.9 - apart * np.linspace(0, 1, size) ** 0.5)
    draws = rng.random((2, size, QUESTIONS))
    right, truth = (draws < chances[:, None]).astype(float)
    near = np.clip(chances[:, None] + 0.05 * rng.standard_normal((size, QUESTIONS)), 0, 1)
    figure = chances if screened else -chances
    return Table(right, near if probability else 1 - near, truth.mean(1), figure, figure)


def kind(**settings):
    rng = np.random.default_rng(3)
    given = {f"mix {seed} {domain}": table(rng, **settings) for seed in (1, 2, 3) for domain in DOMAINS}
    return Kind("mix", given, played(given, ORDERS)[0])


def said(own):
    """Verdicts by the part of a claim: by right or wrong, then by probability where there are two."""
    lines = claims(own)
    made = {name: [v.verdict for v in lines if name in v.claim] for name in NAMES}
    assert sum(map(len, made.values())) == len(lines) == 11
    return made


def test_a_screen_that_knows_saves_all_that_is_claimed():
    assert said(kind()) == {name: [HOLDS] * (2 if name in NAMES[:3] else 1) for name in NAMES}


@pytest.mark.parametrize(
    ("settings", "not_said"),
    [
        ({"screened": False}, ["loses at most", "random third"]),
        ({"apart": 0.0}, ["asks at most", "random third"]),
        ({"probability": False}, ["fewer questions are asked"]),
    ],
)
def test_what_is_not_there_is_not_said(settings, not_said):
    made = said(kind(**settings))
    assert HOLDS not in [verdict for name in not_said for verdict in made[name]]


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"wrong": 0.06}, "drops the best"),
        ({"loads": 5.0}, "loads a third"),
        ({"lost": 0.5}, "more is lost"),
        ({"share": 0.9}, "race of all"),
    ],
)
def test_a_figure_beyond_its_bound_refutes_its_claim(change, claim):
    own = kind()
    for means in own.results.values():
        means[BY_PROBABILITY if claim == "more is lost" else "the race"] |= change
    assert FAILS in said(own)[claim]


def test_an_interval_on_both_sides_decides_nothing():
    spread = np.linspace(0, 0.02, 100)
    assert below(Resampled(0.01, spread), 0.01) == INCONCLUSIVE
    assert [below(Resampled(0.01, spread), bound) for bound in (0.03, -0.01)] == [HOLDS, FAILS]


def test_ways_ask_what_they_say():
    own, rng = table(np.random.default_rng(0), size=24), np.random.default_rng(1)
    made = ways(own, rng)
    assert {way: (named.questions, named.loads) for way, named in made.items() if "race" not in way} == {
        "everything": (9600, 24),
        "random third": (3200, 8),
        "25 labels": (600, 24),
        "halving": (1900, 47),
        "the third": (3200, 8),
        "first three": (1200, 3),
    }
    assert [made[way].loads for way in ("the race", "the race by probability", "all raced")] == [8, 8, 24]
    assert own.cut == 0
    lost = table(np.random.default_rng(0), size=24, screened=False)
    assert lost.cut == pytest.approx(lost.truth.max() - lost.truth[np.argsort(-lost.ratio)[:8]].max()) != 0
    means, lanes = own.right.mean(1), np.arange(24)
    assert means[made["everything"].best] == means[all_asked(own.right, lanes, QUESTIONS).best] == means.max()
    assert halved(own.right * (lanes == 5)[:, None], lanes).best == 5


def test_the_choices_of_ucb_e_are_judged_as_any_way():
    given = {"mix 1 math": table(np.random.default_rng(0))}
    results, problems = played(given, 2)
    assert problems["mix 1 math"]["budgets"]["UCB-E, 10 %"] == [480, 480]
    worst = int(given["mix 1 math"].truth.argmin())
    made = with_choices(results, given, {"mix 1 math": {"UCB-E, 10 %": [[worst, 480, 20], [worst, 480, 30]]}})
    means = made["mix 1 math"]["UCB-E, 10 %"]
    assert (means["share"], means["loads"]) == (0.1, 25)
    assert means["lost"] == pytest.approx(np.ptp(given["mix 1 math"].truth), abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records of every run of the study, which nobody trained, and their races of few orders."""
    study, rng, made = (
        read_study(race_claims.STUDY),
        np.random.default_rng(0),
        tmp_path_factory.mktemp("race"),
    )
    for run in study.runs():
        chances = {domain: rng.uniform(0.2, 0.9) for domain in DOMAINS}
        right = {
            pool: {d: records.packed(rng.random(QUESTIONS) < p) for d, p in chances.items()}
            for pool in ("labels", "truth")
        }
        shares = {d: records.packed_shares(np.full(QUESTIONS, p)) for d, p in chances.items()}
        end = {
            "right": right,
            "probability": {"labels": shares},
            "answers": {f"ratio_answers_{d}": p for d, p in chances.items()},
            "figures": {f"cosine_{d}": p for d, p in chances.items()},
        }
        row = {"name": run.name, "recipe": run.recipe, "seed": run.seed, "checkpoints": [end]}
        made_by = {"commit": "0", "machine": "-", "processor_seconds": 1}
        records.append(made / "race.jsonl", row | made_by | {"configuration": records.digest(study.path)})
    return made


def test_the_page_says_first_what_does_not_hold(folder, monkeypatch):
    assert race_part(folder, markdown, lambda *_: "", "") is None
    monkeypatch.setattr(played, "__defaults__", (2,))
    write_races(folder, folder / "work")
    part = race_part(folder, markdown, lambda *_: "324 models.", "")
    assert part.lines[0].verdict != HOLDS or all(line.verdict == HOLDS for line in part.lines)
    assert len(part.head) == 2 + sum(line.verdict != HOLDS for line in part.lines)
    assert "8 groups of 24 random mixtures, 8 of each loaded" in part.head[-2]
    assert "not run" in part.texts[1]
    problems = json.loads((folder / "work" / "tables.json").read_text("utf-8"))
    choices = {label: {way: [[0, 100, 5]] * 2 for way in own["budgets"]} for label, own in problems.items()}
    (folder / "race-ucb-e.json").write_text(json.dumps(choices), "utf-8")
    assert "| UCB-E, 10 % |" in race_part(folder, markdown, lambda *_: "", "").texts[2]


def test_an_unfinished_study_is_not_raced(folder, tmp_path):
    lines = (folder / "race.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "race.jsonl").write_text("".join(lines[:-1]), "utf-8")
    with pytest.raises(ValueError, match="got 323: train"):
        write_races(tmp_path, tmp_path)


def test_bases_are_no_members(folder):
    rows = records.read(folder / "race.jsonl")
    made = tables(rows, QUESTIONS)
    assert len(rows) == 324
    assert sorted({label.split()[1] for label in made}) == [str(seed) for seed in (*range(57, 69),)]
    assert {len(own.right) for label, own in made.items() if "tuned" in label} == {32}


@pytest.mark.slow
def test_the_committed_races_are_raced_again():
    """One table with all its orders: the rule and its defaults are still those that were judged."""
    rows = [row for row in records.read(records.FOLDER / "race.jsonl") if row["seed"] == 62]
    given = {label: own for label, own in tables(rows, QUESTIONS).items() if label == "mix 62 code"}
    kept = json.loads((records.FOLDER / "race-races.json").read_text("utf-8"))["results"]
    assert played(given)[0] == {label: kept[label] for label in given} != {}
