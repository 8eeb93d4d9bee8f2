"""The rules of released_races.yaml on planted answers, and the ways that are raced against."""

import numpy as np
import pytest
import yaml

from benchmarks.validity import earlier_rule, records, released_play
from benchmarks.validity.analysis import FAILS, HOLDS, INCONCLUSIVE
from benchmarks.validity.released_play import Matrix, race, read_matrix, with_budget
from benchmarks.validity.released_races import (
    STUDY,
    TITLE,
    boundary,
    claims,
    groups,
    own_row,
    page,
    played,
)
from benchmarks.validity.siblings import Cell
from lmeval_dispersion.racing.contest import Scores
from lmeval_dispersion.racing.replay import raced

PLAN = {
    "orders": 2,
    "looks": [0.2, 0.5],
    "budgets": [0.1, 0.2],
    "budget_orders": 2,
    "more_orders": 1,
}
FAMILIES = ("mistral-7b", "llama-7b", "")


def matrix(models=120, questions=120, *, partial=False, seed=0):
    rng = np.random.default_rng(seed)
    ability = rng.uniform(-0.3, 0.3, models)
    ease = rng.uniform(0.2, 0.8, questions)
    chance = np.clip(ability[:, None] + ease, 0, 1)
    scores = chance if partial else (rng.random(chance.shape) < chance).astype(float)
    return Matrix("planted", scores, [FAMILIES[i % 3] for i in range(models)])


# --- the product's race ---------------------------------------------------------------------------------


def test_a_race_that_is_looked_at_is_the_products_race():
    scores = matrix(12).scores
    for seed in range(5):
        own = race(scores, seed, [0.1, 0.4])
        unknown = np.full(scores.shape[1], np.nan)
        answers = {str(i): Scores(row, unknown) for i, row in enumerate(scores)}
        contest = raced(answers, seed=seed, sharing=released_play.SHARED)
        assert (str(own.best), own.questions) == (contest.best, contest.asked)
        assert len(own.looks) == 3
        assert own.looks[-1].margin == contest.shown(answers).margin
        shown = [look.margin for look in own.looks if look is not None]
        assert shown == sorted(shown, reverse=True)


def test_the_rule_before_asks_what_it_asked():
    # By `racing.rule.Bets` of a389e275: after how many questions it dropped a checkpoint.
    rng = np.random.default_rng(0)
    asked = []
    for case in range(12):
        count = int(rng.integers(60, 500))
        ease = rng.random(count)
        scores = (rng.random(count) < ease).astype(float)
        noise = 0.3 * rng.standard_normal((count, 2 + 2 * (case % 2)))
        columns = np.clip(ease[:, None] + noise, 0, 1)
        level = scores.mean() + rng.uniform(-0.05, 0.15)
        plain = 25 * (case // 2 % 2)
        asked.append(earlier_rule.asked(scores, columns, plain, level, 0.05))
    assert asked == BEFORE


BEFORE = [250, 340, 175, 238, 339, 125, 76, 100, 400, 175, 200, 225]


def test_a_budget_is_kept_and_shows_a_margin():
    scores = matrix(12).scores
    answer = with_budget(scores, 3, scores.size // 5)
    assert answer.questions <= scores.size // 5
    assert 0 <= answer.margin < 1


# --- rivals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", released_play.RIVALS.values(), ids=released_play.RIVALS)
def test_a_rival_keeps_its_budget_and_finds_a_clear_best(way):
    scores = matrix(16).scores
    scores[5] = 1
    for share in (0.15, 0.3):
        named = way(scores, np.random.default_rng(1), share)
        assert named.best == 5
        assert named.questions <= share * scores.size + 16


def test_hoeffdings_race_stops_at_a_clear_best_and_asks_equals_nearly_all():
    scores = matrix(16, 2000).scores
    clear = scores * 0.2
    clear[5] = 1
    named = released_play.hoeffding_race(clear, np.random.default_rng(1))
    assert (named.best, named.questions < scores.size / 2) == (5, True)
    equal = np.tile(scores[0], (4, 1))
    named = released_play.hoeffding_race(equal, np.random.default_rng(1))
    assert named.questions > 0.95 * equal.size


# --- matrices and groups --------------------------------------------------------------------------------


def test_files_of_bits_of_per_cents_and_of_neither(tmp_path):
    scores = matrix(9, 30).scores
    bits = np.packbits(scores.astype(bool), axis=1)
    np.savez(tmp_path / "bits.npz", bits=bits, questions=30, family=np.array(["a"] * 9))
    read = read_matrix(tmp_path / "bits.npz")
    assert (read.scores == scores).all()
    assert read.families == ["a"] * 9
    np.savez(tmp_path / "cents.npz", models=np.array(["m"] * 9), passed=100 * scores)
    assert (read_matrix(tmp_path / "cents.npz").scores == scores).all()
    np.savez(tmp_path / "none.npz", models=np.array(["m"] * 9))
    with pytest.raises(ValueError, match="one table of scores"):
        read_matrix(tmp_path / "none.npz")


def test_groups_are_what_their_kind_says():
    whole = matrix(200)
    means = whole.scores.mean(axis=1)
    plan = {"groups": 4, "sizes": [12, 24]}
    kinds = ("siblings", "top", "random", "near-equals", "copies")
    found = list(groups(whole, {kind: plan for kind in kinds}, 7))
    assert [len(group.scores) for group in found] == [12, 24] * 2 * len(kinds)
    by_row = {row.tobytes(): line for line, row in enumerate(whole.scores)}
    for group in found:
        if group.kind == "copies":
            distinct = len({row.tobytes() for row in group.scores})
            exact = group.number % 2 == 0
            assert (distinct == len(group.scores) // 3) == exact
            continue
        lines = [by_row[row.tobytes()] for row in group.scores]
        assert len(set(lines)) == len(lines)
        families = {whole.families[line] for line in lines}
        if group.kind == "siblings":
            assert len(families) == 1
            assert "" not in families
        if group.kind == "top":
            assert means[lines].min() >= np.sort(means)[-2 * len(lines)]
        if group.kind == "near-equals":
            assert np.ptp(means[lines]) < 0.6 * np.ptp(means)


# --- claims ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    made = []
    plan = {"groups": 3, "sizes": [6]}
    kinds = {kind: plan for kind in ("siblings", "top", "random", "near-equals", "copies")}
    for whole, planned in (
        (matrix(), kinds),
        (matrix(12, 90, partial=True), {"partial credit": plan | {"questions": [60, 90]}}),
    ):
        edge = boundary(whole, {"pairs": 4, "orders": 20}, 1)
        made.append({"matrix": whole.name, "commit": "abc", **edge})
        for group in groups(whole, planned, 1):
            row = played(group, PLAN, with_race=group.number < 2)
            made.append({"matrix": whole.name, "commit": "abc", **row})
    return made


def own_rows(factor):
    return [
        {"kind": kind, "cell": f"{kind} {seed} {domain}", "questions": count, "commit": "abc",
         "new": [factor * 100 + seed], "before": [100]}
        for kind in ("mix", "tuned", "lora")
        for seed in range(4)
        for domain in ("math", "code")
        for count in (400, 1319)
    ]  # fmt: skip


def verdicts(rows, own):
    return {line.claim: line.verdict for line in claims(rows, own)}


def test_planted_races_are_right_and_the_page_is_written(rows):
    found = verdicts(rows, own_rows(0.9))
    kinds = ("siblings", "top", "random", "near-equals", "copies", "partial credit")
    for kind in (*kinds, "boundary"):
        assert found[f"At most 5 % of the races name a model worse by more than 0.01: {kind}"] in (
            HOLDS,
            INCONCLUSIVE,
        )
    known = [{**next(row for row in rows if "ways" in row), "kind": "known"}]
    text = page(rows, rows, own_rows(0.9), known).written(TITLE)
    assert text.count("Hoeffding's race") == len(kinds) + 2
    assert "nan" not in text


def test_what_is_wrong_too_often_does_not_hold(rows):
    spoiled = []
    for row in rows:
        row = dict(row)
        if "lost" in row:
            row["lost"] = [row["orders"] // 4] * len(row["lost"])
        else:
            row["budgets"] = {
                share: {**each, "ours": [0.1, 0.2 + row["group"] / 100, 0.2, 1],
                        "margin": [0.01, each["margin"][2], each["margin"][2]]}
                for share, each in row["budgets"].items()
            }  # fmt: skip
        if "ways" in row:
            ways = {**row["ways"], "the race": [0.5, 0.1, 0.1, 2]}
            looks = [[[0.01, 1] for _ in race] for race in row["looks"]]
            row |= {"ways": ways, "looks": looks, "ratio": 1.1 + row["group"] / 100}
        spoiled.append(row)
    found = verdicts(spoiled, own_rows(1.1))
    assert set(found.values()) == {FAILS}


def test_our_own_models_count_by_group():
    cell_of = np.random.default_rng(3)
    right = (cell_of.random((6, 200)) < np.linspace(0.3, 0.8, 6)[:, None]).astype(float)
    cell = Cell("lora", 1, "math", right.mean(1), right.mean(1), right, 0.9 * right + 0.05,
                np.zeros((6, 25, 2)), np.zeros(6), np.zeros((6, 4)))  # fmt: skip
    row = own_row(cell, 150)
    assert row["questions"] == 150
    assert len(row["new"]) == len(row["before"]) == 8
    assert 6 * 25 < min(row["new"]) <= max(row["new"]) <= 900


def test_the_page_is_that_of_the_committed_rows():
    parts = {
        part: records.checked(records.FOLDER / f"released-races-{part}.jsonl", STUDY)
        for part in ("confirm", "explore", "own", "known")
    }
    committed = records.ROOT / "docs" / "results" / "released-races.md"
    assert page(**parts).written(TITLE) == committed.read_text("utf-8")


def test_the_study_names_what_is_played():
    study = yaml.safe_load(STUDY.read_text("utf-8"))
    assert set(study["claims"]) == {"wrong", "margin", "budget", "stakes", "own"}
    assert set(PLAN) | {"boundary", "seeds", "explore", "confirm", "claims"} == set(study)
