"""Every sentence of a race's report: planted answers on which it stands, and others on which it must not."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
from json_schemas import faults

from lmeval_dispersion.racing import report
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.lineup import Entry
from lmeval_dispersion.racing.replay import raced
from lmeval_dispersion.racing.report import Agreed, Asked, Race, UnitScore, race_of
from lmeval_dispersion.report import render

N = 200
#: Label -> (right answers, questions asked, standing); the probability of the right answer is theirs too.
WON = {"a": (190, N, "complete"), "b": (40, 50, "behind"), "c": (30, 75, "behind")}
CLOSE = WON | {"b": (189, N, "complete")}
LEFT = WON | {"d": (10, 25, "left out"), "e": (5, 25, "left out")}
BASED = WON | {"d": (150, N, "complete"), "base": (160, N, "complete")}
DROPPED = WON | {"b": (145, 150, "not better")}
EQUAL = WON | {"b": (190, N, "complete")}
STOPPED = WON | {"b": (40, 50, "running")}
NEVER = {"b": (40, 50, "running")}
SPENT = {
    label: (right, 50, "running") for label, right in zip("abcde", (40, 33, 15, 10, 5), strict=True)
}
AGREED = {label: Agreed(0.812 - i / 10, 0.02) for i, label in enumerate(SPENT)}
RANKS = {label: rank for rank, label in enumerate("abcdefghi", 1)}
LISTED: dict[str, Any] = {"not_loaded": list("defghi"), "ranks": RANKS}


def race(
    planted: dict[str, tuple[int, int, str]], *, options: Any = None, choices: bool = True,
    scale: float = 1.0, mixed: bool = False, **more: Any,
) -> Race:  # fmt: skip
    contest = Contest(N, **(options or {}))
    for label, (right, asked, standing) in planted.items():
        score = scale * (np.arange(asked) < right)
        if mixed:
            score = np.random.default_rng(right).permutation(score)
        contest.answered[label] = Scores(score, score if choices else np.full(asked, np.nan))
        contest.standing[label] = standing  # type: ignore[assignment]
        contest.levels[label] = 0.96
    others, waiting, sample = (
        more.pop(key, ()) for key in ("not_loaded", "waiting", "audit_sample")
    )
    ranks, failed = more.pop("ranks", {}), more.get("failed", {})

    def chosen(label: str) -> str | None:
        why = "base" if label == contest.reference else "audit" if label in sample else "rank"
        return None if label in others and label not in waiting else why

    labels = dict.fromkeys([*planted, *failed, *waiting, *others])
    entries = [Entry(label, {}, ranks.get(label), chosen(label)) for label in labels]
    asked = Asked(**{key: more.pop(key) for key in ("seconds", "failed", "agreed") if key in more})
    notes = more.pop("notes", ())
    result = race_of(contest, entries, asked, task="gsm8k", metric="exact_match", notes=notes)
    renamed = {"wall": "seconds", "there": "questions_there"}
    return replace(result, **{renamed.get(key, key): value for key, value in more.items()})


def said(result: Race) -> str:
    return " ".join(render(result.document(), "markdown").split())


ALL = {
    "won": race(WON), "close": race(CLOSE), "dropped": race(DROPPED),
    "equal": race(EQUAL, options={"margin": 0.0}),
    "stopped": race(STOPPED),
    "early": race({"a": WON["a"]}, waiting=["b", "c"], audit_sample=["c"], **LISTED),
    "groups": race(WON, not_loaded=list("defghi"), ranks={**RANKS, "b": 1, "c": 2}, audit_sample=["c"]),
    "never": race(NEVER), "alone": race({"a": WON["a"]}),
    "three": race(BASED, options={"top": 2}),
    "slow": race(WON, seconds={"a": 2000.0, "b": 1250.0}),
    "slower": race(WON, seconds={"a": 20000.0, "b": 9250.0}),
    "listed": race(WON, **LISTED), "cut": race(LEFT),
    "based": race(BASED, options={"reference": "base"}),
    "single": race(WON | {"base": BASED["base"]}, options={"reference": "base"}),
    "worse": race(WON | {"base": (199, N, "complete")}, options={"reference": "base"}),
    "below": race(BASED | {"base": (199, N, "complete")}, options={"reference": "base"}),
    "above": race(BASED | {"d": (170, N, "complete")}, options={"reference": "base"}),
    "timed": race(WON, wall=240.0), "short": race(WON, wall=35.2),
    "failed": race(WON, failed={"x": "It has no weights."}), "noted": race(WON, notes=["Recorded."]),
    "partial": race(WON, scale=0.5),
    "drawn": race(WON, there=1319), "group": race(WON, tasks=3), "both": race(CLOSE, there=1319, tasks=3),
    "nobody": race(NEVER, there=1319),
    "sampled": race(WON, **LISTED, audit_sample=["c"]),
    "cut_near": race(LEFT | {"b": DROPPED["b"]}),
    "budget": race(SPENT, options={"split": 5, "sharing": 50}, budget=250, mixed=True),
    "part": race({label: SPENT[label] for label in "abc"}, options={"split": 3, "sharing": 50},
                 budget=150, not_loaded=list("xyz")),
    "two": race(SPENT, options={"split": 5, "sharing": 50, "top": 2}, budget=250, mixed=True),
    "deleted": race(DROPPED | {"d": (20, 25, "deleted")}),
    "unnamed": race(NEVER, budget=60),
    "half": race(WON | {"base": (20, 25, "running")}, options={"reference": "base"}),
    "vague": race({"a": WON["a"]}, options={"top": 2}, waiting=["b"]),
    "agreed": race(SPENT, options={"sharing": 50}, budget=250, agreed=AGREED),
    "several": race(WON, units=[UnitScore("x", "a", 100, 0.9), UnitScore("y", "a", 100, 1.0)]),
    "missed": race({**WON, "z": (200, N, "complete")}, **LISTED, audit_sample=["c", "z"]),
}  # fmt: skip


TEXTS = {name: said(result) for name, result in ALL.items()}


@pytest.mark.parametrize(
    ("sentence", "races"),
    [
        ("Best: a, 95.0 % on gsm8k; better than all others raced (error ≤ 5 %).",
         "won listed timed short failed noted sampled groups single worse half "
         "based below above three slow slower several"),
        ("better than all others that went on (error ≤ 5 %); 2 others were left out after 25 answers "
         "(in our studies on adapters, this cost 0.002 of accuracy, 95 % interval -0.004 to 0.009).", "cut"),
        ("left out after", "cut cut_near"),
        ("no other checkpoint that went on is better by more than 0.01 (error ≤ 5 %); 2 others", "cut_near"),
        ("Best: a, 95.0 % on gsm8k (200 of 1,319 questions); better than all others raced", "drawn"),
        ("Best: a, 95.0 % on gsm8k (200 questions); better than all others raced", "group"),
        ("Best: a, 95.0 % on gsm8k (200 of 1,319 questions); no other", "both"),
        ("No best checkpoint yet: none was asked all 200 drawn questions of gsm8k;", "nobody"),
        ("better than all others raced (error ≤ 5 %).",
         "won listed timed short failed noted sampled groups missed partial drawn group half "
         "single worse based below above three slow slower several"),
        ("Best: z, 100.0 % on gsm8k; better than all others raced (error ≤ 5 %).", "missed"),
        ("Best: a, exact_match 0.475 on gsm8k; better than all others raced (error ≤ 5 %).", "partial"),
        ("no other checkpoint in the race is better (error ≤ 5 %); nearest: b, 0.945.", "close both"),
        ("no other checkpoint in the race is better by more than 0.01 (error ≤ 5 %).", "dropped"),
        ("Best: a, 95.0 % on gsm8k; no other checkpoint in the race is better (error ≤ 5 %); "
         "nearest: b, 0.950.", "equal"),
        ("Best: a, 95.0 % on gsm8k; no other checkpoint was raced.", "alone"),
        ("Best so far: a, 95.0 % on gsm8k; no other checkpoint in the race is better (error ≤ 5 %). "
         "Undecided: b. The race's own command goes on.", "stopped"),
        ("Best so far: a, 95.0 % on gsm8k; no other checkpoint in the race is better by more than "
         "0.05 (error ≤ 5 %). "
         "Undecided: b and c. The race's own command goes on.", "early"),
        ("Best so far: a, 80.0 % on 50 of the 200 questions of gsm8k; no other checkpoint in the race is "
         "better by ",
         "budget"),
        ("no other checkpoint in the race is better than the last of the best 2 by more than 0.", "two"),
        ("no other checkpoint that went on is better by more than 0.01 (error ≤ 5 %).", "deleted"),
        ("No best checkpoint yet: none was asked all 200 questions of gsm8k; to continue the race, "
         "run the race's own command without a budget.", "unnamed"),
        ("Undecided: 4 of 5. The same command without a budget goes on until the best is proven.", "budget two"),
        ("; how much better another checkpoint may be is not known yet. Undecided: b.", "vague"),
        ("Best by agreement: a (agreement 0.812 with the mean answer of all checkpoints to 50 questions of "
         "gsm8k); without labels there is neither a margin nor an error.", "agreed"),
        ("## By task", "several"),
        ("1 of 9 checkpoints raced, 200 of 1,800 questions asked (11 %).", "early"),
        ("No best checkpoint yet: none was asked all 200 questions of gsm8k; to continue", "never unnamed"),
        ("3 of 3 checkpoints raced, 325 of 600 questions asked (54 %).",
         "won stopped noted partial drawn group slow slower several"),
        ("3 of 4 checkpoints raced, 325 of 800 questions asked (41 %).", "failed"),
        ("3 of 9 checkpoints raced, 325 of 1,800 questions asked (18 %).", "listed sampled groups"),
        ("3 of 3 checkpoints loaded, 325 of 600 questions asked (54 %), 4 min.", "timed"),
        ("(12 %; 25 % of the 600 for the checkpoints in the race).", "part"),
        ("questions asked (54 %), 35 s.", "short"),
        ("outside the short list, none did better by more than 0.01; of the 7", "sampled"),
        ("outside the short list, none did better by more than 0.01. ", "groups"),
        ("outside the short list, z did better by more than 0.01: race a longer", "missed"),
        ("x failed: It has no weights.", "failed"),
        ("The best 2: a and base.", "three"),
        ("Asking all checkpoints everything would take about 46 min more.", "slow"),
        ("Asking all checkpoints everything would take about 7 h more.", "slower"),
        ("left out after 25 |", "cut cut_near"),
        ("a scores higher than the base (0.800).", "single"),
        ("a does not score higher than the base (0.995).", ""),
        ("of the 1 asked", ""),
        ("Of the 2 checkpoints that were asked everything, 1 scores higher than the base (0.800).", "based"),
        ("Of the 2 checkpoints that were asked everything, 2 score higher than the base (0.800).", "above"),
        (" (error ≤ 5 %). It does not score higher than the base (0.995).", "worse below"),
        ("everything none", ""),
        ("4 of 4 checkpoints raced, 725 of 1,000 questions asked (72 %).", "based below above"),
        ("Recorded.", "noted"),
        ("within 0.01 |", "close both"),
        ("not better after 150", "dropped cut_near deleted"),
        ("equal |", "equal"),
        ("a, b and c gave the same answers to the last digit: they are copies, or a server", "partial"),
        ("behind after 50",
         "won listed timed short failed noted partial sampled missed groups drawn group "
         "cut single worse based below above three slow slower several half"),
        ("the base (", "single worse based below above"),
        ("Undecided: base", ""),
    ],
)  # fmt: skip
def test_a_sentence_stands_on_its_data_and_on_no_other(sentence: str, races: str) -> None:
    assert {name for name, text in TEXTS.items() if sentence in text} == set(races.split())


def test_the_cost_of_the_rest_is_said_where_it_was_measured_and_a_screen_left_some_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = (
        "In our studies, not loading the other checkpoints cost 0.003 of accuracy "
        "(95 % interval 0.001 to 0.006) on 8 groups."
    )
    monkeypatch.setattr(report, "LOST", None)
    assert "not loading the other" not in said(ALL["listed"])  # not measured
    monkeypatch.setattr(report, "LOST", (0.003, 0.001, 0.006, "8 groups"))
    assert {name for name, result in ALL.items() if sentence in said(result)} == {"listed", "early"}


def test_the_most_that_a_sample_leaves_possible_is_the_one_of_counted_draws() -> None:
    """None of 3 random others of 9 was better: by all draws, how many better ones are still likely enough."""
    planted = {"a": WON["a"], **dict.fromkeys("xyz", (40, 50, "behind"))}
    result = race(planted, not_loaded=list("bcdefg"), audit_sample=list("xyz"))
    most = max(
        better for better in range(10)
        if sum(min(draw) >= better for draw in combinations(range(9), 3)) / comb(9, 3) > 0.05
    )  # fmt: skip
    assert f"of the 9 that the screen left out, at most {most} would (95 % confidence)" in said(
        result
    )


@pytest.mark.parametrize("name", ALL)
def test_json_holds_to_its_schema_and_the_chart_ends_where_questions_did(name: str) -> None:
    result = ALL[name]
    document = result.to_dict()
    assert faults(document) == []
    ends = {value["questions"] for value in result.plot()["data"]["values"] if "says" in value}
    assert ends == {row["questions"] for row in document["checkpoints"] if row["questions"]}
    assert list(result.to_frame()["label"]) == [row["label"] for row in document["checkpoints"]]
    assert (document["checkpoints"][0]["status"] == "best") is (document["best"] is not None)


def test_statuses_are_those_of_the_whole_list_best_first() -> None:
    failed = {"x": "Gone.", "d": "Killed."}
    result = race(DROPPED | {"d": (20, 25, "running")}, failed=failed, not_loaded=["y"])
    assert [(row.label, row.status, row.outcome) for row in result.checkpoints] == [
        ("a", "best", "best"),
        ("b", "not better", "not better after 150"),
        ("c", "behind", "behind after 75"),
        ("d", "failed", "failed"),
        ("x", "failed", "failed"),
        ("y", "not loaded", "not loaded"),
    ]
    score = np.arange(75) < 30
    assert result.checkpoints[2].se == pytest.approx(np.sqrt(score.var(ddof=1) / 75))


@pytest.mark.parametrize(("last", "status"), [(0.9, "behind"), (0.54, "not better")])
def test_what_was_below_a_level_is_behind_a_best_above_it(last: float, status: str) -> None:
    """Its score is at most the best of then plus the margin, and no more is known of it."""
    even = np.arange(N) % 2 < 1
    scores = {"first": even, "near": even ^ (np.arange(N) < 1), "last": np.arange(N) < last * N}
    answers = {label: Scores(*(1.0 * score,) * 2) for label, score in scores.items()}
    contest = raced(answers, margin=0.05)
    assert contest.standing["near"] == "not better"
    entries = [Entry(label, {}, None, "named") for label in answers]
    result = race_of(contest, entries, task="sums", metric="acc")
    assert result.best == "last"
    assert {row.label: row.status for row in result.checkpoints}["near"] == status


def test_twelve_checkpoints_fit_into_one_look_and_long_lists_are_cut() -> None:
    labels = [f"org/sums-{i:02d}" for i in range(40)]
    planted = {
        labels[0]: WON["a"],
        labels[1]: CLOSE["b"],
        **dict.fromkeys(labels[2:4], (30, 75, "behind")),
    }
    lines = render(
        race(planted, not_loaded=labels[4:12]).document(), "table", width=80
    ).splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 80
    assert all(any(label in line for line in lines) for label in labels[:12])
    longer = race(planted, not_loaded=labels[4:])
    text = render(longer.document(), "table", width=80)
    assert labels[11] in text
    assert labels[12] not in text
    assert labels[39] in longer.to_frame()["label"].tolist()


@pytest.mark.parametrize(("wall", "command"), [(9.0, "same command"), (None, "race's own command")])
def test_a_judged_folder_names_the_race_as_what_goes_on(wall: float | None, command: str) -> None:
    """`--replay FOLDER` asks nothing, so that the same command would never go on."""
    assert f"The {command} goes on." in said(race(STOPPED, wall=wall))
    assert f"; to continue the race, run the {command}." in said(race(NEVER, wall=wall))


def test_the_best_ones_score_on_a_losers_own_questions_stands_beside_the_losers() -> None:
    contest = Contest(N, sharing=25, seed=3)
    right = np.random.default_rng(0).random(N) < 0.7  # of the best, by question
    for label, asked in (("a", N), ("b", 75), ("c", 25), ("base", N)):
        own = contest.order(label)[:asked]
        scores = (right[own] if label == "a" else np.zeros(asked)).astype(float)
        contest.answered[label] = Scores(scores, scores)
        contest.standing[label] = "complete" if asked == N else "not better"
        contest.levels[label] = 0.5
    result = race_of(
        contest,
        [Entry(label, {}, None, "rank") for label in contest.answered],
        task="t",
        metric="acc",
    )
    there = {row.label: row.best_there for row in result.checkpoints}
    expected = {
        label: right[contest.order(label)[:n]].mean()
        for label, n in (("b", 75), ("c", 25), ("base", N))
    }
    assert there == {"a": None} | expected
    assert {row.best_there for row in race(NEVER).checkpoints} == {None}  # without a best
