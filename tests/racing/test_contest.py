"""The error of a whole race, its margin, and that nobody who is clearly behind goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.racing import replay
from lmeval_dispersion.racing.contest import NOTHING, Contest, Phase, Scores, Shown, phases, run
from lmeval_dispersion.racing.replay import raced
from lmeval_dispersion.racing.rule import FINE, Bets

Array = NDArray[np.float64]
Table = Callable[[np.random.Generator], tuple[Array, Array]]
N = 200


def _drawn(chances: Any, rng: np.random.Generator) -> tuple[Array, Array]:
    """Right or wrong of checkpoints that share how hard a question is; probabilities near the chances."""
    hard = rng.random(N)
    own = rng.random((len(chances), N))
    mixed = np.where(rng.random((len(chances), N)) < 0.6, hard, own)
    chances = np.asarray(chances)[:, None]
    return (mixed < chances).astype(float), np.clip(chances + 0.2 * (own - 0.5), 0, 1)


PLANTED: dict[str, Table] = {
    "all equal": lambda rng: _drawn([0.6] * 8, rng),
    "a giant, last": lambda rng: _drawn([0.4] * 7 + [0.9], rng),
    "near ties, the best last": lambda rng: _drawn([0.6] * 7 + [0.64], rng),
    "each a little better than the one before": lambda rng: _drawn(np.linspace(0.5, 0.68, 8), rng),
    "continuous": lambda rng: (_drawn(np.linspace(0.5, 0.6, 8), rng)[1],) * 2,
    "rarely right, then far ahead": lambda rng: (
        (
            np.where(
                rng.random((6, N)) < np.array([[0.0]] * 5 + [[0.04]]),
                1.0,
                np.array([[0.02]] * 5 + [[0.0]]),
            ),
        )
        * 2
    ),
}


# Where a rule that errs ten times as often loses the best of races; the slow tests have all.
TELLING = (
    "each a little better than the one before",
    "alike, the best last",
    "alike, the best second",
)
TELLING += ("alike, a chain", "answers turned round", "rarely wrong")


def _moved(scores: Array, gains: Any, rng: np.random.Generator) -> tuple[Array, Array]:
    """Checkpoints with so many more right answers than they had; probabilities follow the answers."""
    for mine, gain in zip(scores, gains, strict=True):
        mine[rng.choice(np.flatnonzero(mine == 0), gain, replace=False)] = 1
    return scores, np.clip(0.2 + 0.6 * scores + 0.1 * rng.normal(size=scores.shape), 0, 1)


def _alike(gains: Any) -> Table:
    """One checkpoint's answers, of which each has a tenth changed, and then so many more right."""

    def table(rng: np.random.Generator) -> tuple[Array, Array]:
        scores = np.repeat(1.0 * (rng.permutation(N) < 0.6 * N)[None], len(gains), axis=0)
        for mine in scores[1:]:
            right, wrong = (
                rng.choice(np.flatnonzero(mine == x), N // 20, replace=False) for x in (1, 0)
            )
            mine[right], mine[wrong] = 0, 1
        return _moved(scores, gains, rng)

    return table


STEP = 3  # of 200 questions: the least that is more than the margin
PLANTED |= {
    "alike, the best last": _alike([0] * 5 + [STEP]),
    "alike, the best second": _alike([0, STEP] + [0] * 4),
    "alike, a chain": _alike(STEP * np.arange(6)),
    "alike, the best far ahead and last": _alike([0] * 5 + [10]),
    "answers turned round": lambda rng: _moved(
        np.where((rng.permutation(N) < N / 2) == (np.arange(6) % 2 == 0)[:, None], 1.0, 0.0),
        [0] * 5 + [STEP], rng,
    ),
    "rarely right": lambda rng: _moved(1.0 * (rng.random((6, N)) < 0.03), [0] * 5 + [STEP], rng),
    "rarely wrong": lambda rng: _moved(
        np.array([1.0 * (rng.permutation(N) < 0.94 * N) for _ in range(6)]), [0] * 5 + [STEP], rng
    ),
}  # fmt: skip


def _raced(
    score: Array,
    probability: Array,
    rng: np.random.Generator,
    *,
    side_by_side: bool = False,
    **settings: Any,
) -> Contest:
    if not side_by_side:
        answers = {str(i): Scores(score[i], probability[i]) for i in range(len(score))}
        return raced(answers, seed=int(rng.integers(2**32)), **settings)
    order = rng.permutation(score.shape[1])
    contest, going = (
        Contest(score.shape[1], side_by_side=len(score), **settings),
        dict.fromkeys(map(str, range(len(score))), 0),
    )
    while going:
        label = str(rng.choice(sorted(going)))
        at = going[label]
        going[label] = end = min(at + 25, contest.questions)
        mine = Scores(score[int(label)], probability[int(label)]).at(order[at:end])
        if contest.add(label, mine) != "running":
            del going[label]
    return contest


def _wrong(table: Table, races: int, **settings: Any) -> float:
    """Share of races whose best is worse than the truly best by more than the margin."""
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(races):
        score, probability = table(rng)
        contest = _raced(score, probability, rng, **settings)
        assert contest.best is not None
        means = np.average(score, axis=1, weights=settings.get("weights"))
        wrong += bool(means.max() > means[int(contest.best)] + contest.margin + 1e-9)
    return wrong / races


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_best_is_rarely_lost(name: str, side_by_side: bool) -> None:
    assert _wrong(PLANTED[name], 20, side_by_side=side_by_side) <= 0.15


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0.0, 0.01])
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_level_holds(name: str, side_by_side: bool, margin: float) -> None:
    """Two thousand races a case: at most the error, and a bit for chance."""
    assert _wrong(PLANTED[name], 2000, side_by_side=side_by_side, margin=margin) <= 0.06


def test_the_clearly_worse_are_dropped_early_and_equal_ones_are_asked_all() -> None:
    rng = np.random.default_rng(1)
    score, probability = _drawn([0.95, 0.2, 0.2], rng)
    contest = _raced(score, probability, rng)
    assert contest.best == "0"
    assert contest.standing["1"] == contest.standing["2"] == "not better"
    assert contest.asked < N + 4 * 25
    same = _raced(score[[0, 0]], probability[[0, 0]], rng, margin=0.0)
    assert same.best == "0"
    assert same.asked == 2 * N


def test_what_differs_by_less_than_the_margin_is_not_told_apart() -> None:
    rng = np.random.default_rng(2)
    score = (rng.random((1, N)) < 0.5).astype(float).repeat(2, axis=0)
    score[1, 0] = 1 - score[1, 0]
    contest = _raced(score, score, rng, margin=0.05)
    assert contest.standing["1"] == "not better"
    assert contest.asked < 2 * N


def test_no_order_depends_on_who_else_races() -> None:
    contest = Contest(N, seed=3)
    assert (contest.order("a") == Contest(N, seed=3).order("a")).all()
    orders = [*map(contest.order, "abcd"), Contest(N, seed=4).order("a")]
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(N))}
    assert len({tuple(order) for order in orders}) == 5
    beside = Contest(N, side_by_side=2)
    assert (beside.order("a") == beside.order("b")).all()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.03, 0.3, 0.6, 0.97])
@pytest.mark.parametrize("known", ["alike", "independent", "turned round"])
def test_who_reaches_the_level_is_dropped_at_most_as_often_as_the_error(
    rate: float, known: str
) -> None:
    """At the boundary any drop is an error; whatever those asked everything answered."""
    rng, dropped, races = np.random.default_rng(9), 0, 1000
    for _ in range(races):
        level = round(rate * N) / N
        mine = 1.0 * (rng.permutation(N) < level * N)
        flips = rng.random(N) < {"alike": 0.1, "independent": 0.5, "turned round": 0.9}[known]
        columns = np.where(flips, 1 - mine, mine)[:, None]
        order = rng.permutation(N)
        bets = Bets(N, columns[order])
        bets.take(mine[order[: N - 1]])
        dropped += bets.refutes(level, 0.05)
    assert dropped <= (0.05 + 3 * (0.05 * 0.95 / races) ** 0.5) * races


def test_covariates_ask_fewer_questions_of_those_alike() -> None:
    rng, asked = np.random.default_rng(11), {True: 0, False: 0}
    for _ in range(10):
        score, probability = _alike([30, 0, 0, 0])(rng)
        for alike in asked:
            shown = score if alike else rng.permuted(score, axis=1)
            asked[alike] += _raced(shown, probability, rng).asked
    assert asked[True] < asked[False]


def test_whom_a_failed_checkpoint_alone_had_dropped_runs_again() -> None:
    right = {"giant": 1.0, "good": 0.5, "bad": 0.0}
    contest = Contest(N, side_by_side=3, margin=0.0)
    for label in right:
        contest.add(label, Scores(np.full(50, right[label]), np.full(50, np.nan)))
    assert contest.standing == {"giant": "running", "good": "behind", "bad": "behind"}
    contest.fail("giant")
    assert contest.standing == {"giant": "failed", "good": "running", "bad": "behind"}
    assert contest.asked == 150


def test_two_that_drop_each_other_side_by_side_are_not_both_lost() -> None:
    """One is right on 40 questions that the other has wrong, and wrong on the next 1,000."""
    score = np.zeros((2, 2000))
    score[0, 25:65] = score[1, 65:1065] = 1
    contest = Contest(2000, side_by_side=2)
    for label, end in ((1, 1500), (0, 25), (0, 400), (1, 1525)):
        begin = len(contest.answered[str(label)].score) if str(label) in contest.answered else 0
        contest.add(str(label), Scores(*(score[label, begin:end],) * 2))
    assert contest.standing == {"1": "running", "0": "behind"}
    contest.judge_again()
    assert contest.standing == {"1": "running", "0": "behind"}


def test_a_failure_changes_nothing_for_those_that_others_dropped() -> None:
    rng = np.random.default_rng(8)
    score, probability = _drawn([0.5, 0.2, 0.9], rng)
    contest = _raced(score, probability, rng)
    before = dict(contest.standing)
    assert before == {"0": "complete", "1": "not better", "2": "complete"}
    contest.fail("3")
    assert contest.standing == {**before, "3": "failed"}


def _blocks(rng: np.random.Generator, count: int = 6) -> dict[str, Scores]:
    score, probability = _drawn(np.linspace(0.3, 0.8, count), rng)
    return {str(i): Scores(score[i], probability[i]) for i in range(count)}


def test_a_first_block_orders_the_turns_and_counts() -> None:
    answers = _blocks(np.random.default_rng(12))
    contest = raced(answers, sharing=25)
    assert [contest.answered[label].score[:25].mean() for label in "05"] == [
        pytest.approx(answers[label].score[np.random.default_rng(0).permutation(N)[:25]].mean())
        for label in "05"
    ]
    shown = {label: mine.probability[:25].mean() for label, mine in contest.answered.items()}
    assert (
        contest.turns([*answers]) == sorted(shown, key=lambda label: -shown[label]) == [*"543210"]
    )
    assert contest.best == "5"
    assert contest.standing["0"] == "not better"
    assert len(contest.answered["0"].score) == 25
    assert (contest.order("0")[:25] == contest.order("5")[:25]).all()
    assert (contest.order("0") != contest.order("5")).any()


def test_where_there_is_no_probability_the_score_orders() -> None:
    answers = _blocks(np.random.default_rng(13))
    blind = {label: Scores(mine.score, np.full(N, np.nan)) for label, mine in answers.items()}
    contest = raced(blind, sharing=25)
    shown = {label: mine.score[:25].mean() for label, mine in contest.answered.items()}
    assert contest.turns([*answers]) == sorted(shown, key=lambda label: -shown[label])
    assert contest.best == "5"


def test_of_a_long_list_a_third_goes_on_by_probabilities_and_all_by_right_or_wrong() -> None:
    answers = _blocks(np.random.default_rng(14), 24)
    contest = raced(answers, sharing=25, cut=True)
    assert len(contest.left_out) == 16
    assert {len(contest.answered[label].score) for label in contest.left_out} == {25}
    assert int(str(contest.best)) >= 20
    right = {label: Scores(mine.score, np.full(N, np.nan)) for label, mine in answers.items()}
    # As in a suite, one of whose tasks runs code.
    likely = np.where(np.arange(N) % 2, np.nan, 0.5)
    half = {label: Scores(mine.score, likely) for label, mine in answers.items()}
    for some_blind in (right, {**answers, "3": right["3"]}, half):
        assert raced(some_blind, sharing=25, cut=True).left_out == []
    assert raced(answers, sharing=25).left_out == []
    del answers["3"]
    assert raced(answers, sharing=25, cut=True).left_out == []


def test_a_reference_is_asked_everything_and_is_never_the_best() -> None:
    answers = _blocks(np.random.default_rng(15))
    contest = raced(answers, sharing=25, reference="5")
    assert contest.standing["5"] == "complete"
    assert contest.best == "4"
    assert "5" not in contest.levels
    behind = raced(answers, sharing=25, reference="0")
    assert behind.best == "5"
    assert behind.standing["0"] == "complete"


@pytest.mark.parametrize("name", TELLING)
def test_by_the_block_the_best_is_rarely_lost(name: str) -> None:
    assert _wrong(PLANTED[name], 12, sharing=25) <= 0.17


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_the_level_holds_by_the_block(name: str) -> None:
    assert _wrong(PLANTED[name], 2000, sharing=25) <= 0.06


def _missed(table: Table, races: int, top: int, **settings: Any) -> float:
    """Share of races that lack one of the truly best, though it is better by more than the margin."""
    rng, missed = np.random.default_rng(7), 0
    for _ in range(races):
        score, probability = table(rng)
        contest = _raced(score, probability, rng, top=top, **settings)
        means, named = score.mean(axis=1), {int(label) for label in contest.ranked[:top]}
        assert len(named) == top
        last = min(means[i] for i in named)
        missed += any(means[i] > last + contest.margin + 1e-9 for i in {*range(len(means))} - named)
    return missed / races


@pytest.mark.parametrize("name", TELLING)
def test_the_best_three_are_rarely_missed(name: str) -> None:
    assert _missed(PLANTED[name], 8, 3) <= 0.15


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [0, 25])
@pytest.mark.parametrize("name", PLANTED)
def test_the_level_holds_for_the_best_three(name: str, sharing: int) -> None:
    assert _missed(PLANTED[name], 1000, 3, sharing=sharing) <= 0.06


def test_nobody_is_dropped_before_as_many_as_wanted_were_asked_everything() -> None:
    score, probability = _drawn([0.9, 0.1, 0.2, 0.1], np.random.default_rng(3))
    contest = _raced(score, probability, np.random.default_rng(4), top=2)
    assert [contest.standing[label] for label in "0123"] == [
        "complete",
        "complete",
        "complete",
        "not better",
    ]
    assert contest.ranked[:2] == ["0", "2"]


class _Watched(Contest):
    """A contest that notes what is shown after all answers."""

    labels: list[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[Shown] = []

    def add(self, label: str, batch: Scores) -> Any:
        standing = super().add(label, batch)
        self.seen.append(self.shown(self.labels))
        return standing

    def hold(self, label: str, answers: Scores) -> None:
        super().hold(label, answers)
        self.seen.append(self.shown(self.labels))


def _too_small(table: Table, races: int, monkeypatch: Any, **settings: Any) -> float:
    """Share of races that show a margin, at any moment, by more than which another is better."""
    rng = np.random.default_rng(7)
    wrong = 0
    shown = 0
    monkeypatch.setattr(replay, "Contest", _Watched)
    weights = settings.get("weights")
    for _ in range(races):
        score, probability = table(rng)
        _Watched.labels = [str(i) for i in range(len(score))]
        contest = _raced(score, probability, rng, **settings)
        means = np.average(score, axis=1, weights=weights)
        is_wrong = False
        for labels, margin in contest.seen:
            if margin is not None:
                named = {int(label) for label in labels}
                others = [means[i] for i in range(len(means)) if i not in named]
                lead = max(others, default=0.0) - min(means[i] for i in named)
                is_wrong |= bool(lead > margin + 1e-9)
                shown += 1
        wrong += is_wrong
    assert shown > races
    return wrong / races


WAYS: dict[str, dict[str, Any]] = {
    "by rows": {},
    "by shared questions": {"sharing": 25},
    "a budget": {"budget": 300},
    "a budget, then the proof": {"budget": 300, "goes_on": True},
    "a budget of one's own adapters": {"budget": 300, "kept": True},
    "the best three": {"top": 3, "sharing": 25},
    "the best three by a budget": {"top": 3, "budget": 400},
    "by weights": {"weights": np.repeat([1.0, 4.0], N // 2), "sharing": 25},
    "a budget, by weights": {"weights": np.repeat([1.0, 4.0], N // 2), "budget": 300},
}


@pytest.mark.parametrize("way", ["by rows", "a budget, then the proof", "by weights"])
@pytest.mark.parametrize("name", ["alike, the best second", "answers turned round"])
def test_a_margin_shown_is_rarely_too_small(name: str, way: str, monkeypatch: Any) -> None:
    assert _too_small(PLANTED[name], 5, monkeypatch, **WAYS[way]) <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TELLING[2:5])
def test_margins_hold_at_all_moments(name: str, way: str, monkeypatch: Any) -> None:
    """At most the error, and a bit for chance: in a race a margin is shown dozens of times."""
    assert _too_small(PLANTED[name], 100, monkeypatch, **WAYS[way]) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["a budget, then the proof", "by weights"])
@pytest.mark.parametrize("name", TELLING)
def test_the_level_holds_by_a_budget_and_by_weights(name: str, way: str) -> None:
    assert _wrong(PLANTED[name], 500, **WAYS[way]) <= 0.07


def test_a_margin_falls_with_the_answers_and_ends_at_the_races_own(monkeypatch: Any) -> None:
    rng = np.random.default_rng(5)
    score, probability = _drawn(np.linspace(0.4, 0.7, 6), rng)
    monkeypatch.setattr(replay, "Contest", _Watched)
    _Watched.labels = [*"012345"]
    contest = _raced(score, probability, rng, sharing=25)
    known = [shown.margin for shown in contest.seen if shown.margin is not None]
    assert known[0] > 0.1
    assert known == sorted(known, reverse=True)
    assert known[-1] <= contest.margin + 1e-9
    assert contest.seen[0] == Shown([], None)


def test_a_best_that_was_not_asked_everything_needs_its_part_of_the_error() -> None:
    rng = np.random.default_rng(6)
    score, _ = _drawn([0.9, 0.5, 0.4], rng)
    contests = [Contest(N, split=split, sharing=100) for split in (0, 3)]
    for contest in contests:
        for label in "012":
            contest.hold(label, Scores(*(score[int(label), :100],) * 2))
    without, split = (contest.shown("012") for contest in contests)
    assert without == Shown([], None)
    assert split.labels == ["0"]
    means = contests[1].mean("0"), contests[1].mean("1")
    assert split.margin == 0 or split.margin > means[1] - means[0]
    assert contests[1].shown("0123").margin == pytest.approx(1 - contests[1]._at_least("0"))
    for label in "012":
        contests[1].add(label, Scores(*(score[int(label), 100:],) * 2))
    assert contests[1].shown("012") == Shown(["0"], 0.0)


@pytest.mark.parametrize(("checkpoints", "questions"), [(1, 50), (2, 100), (8, 400), (43, 1319)])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_the_phases_of_a_budget(
    checkpoints: int, questions: int, kept: bool, reference: bool
) -> None:
    everyone = checkpoints + reference
    with pytest.raises(UsageError, match=f"at least {everyone}, one question for each"):
        phases(checkpoints, questions, everyone - 1, kept=kept, reference=reference)
    for share in (0.03, 0.1, 0.5, 1.0):
        budget = max(everyone, int(share * everyone * questions))
        plan = phases(checkpoints, questions, budget, kept=kept, reference=reference)
        asked = [phase.questions - phase.after for phase in plan]
        sizes = [phase.checkpoints for phase in plan]
        cost = sum(map(int.__mul__, sizes, asked)) + reference * plan[0].questions
        assert cost <= budget
        assert cost > 0.8 * budget - everyone or plan[-1].questions == questions
        assert min(asked) >= 1
        assert plan[0].checkpoints == checkpoints
        assert sizes == sorted(sizes, reverse=True)
        assert kept or sum(sizes) <= max(1.5 * checkpoints, checkpoints)
    assert plan == [Phase(checkpoints, questions, 0)]


def test_the_worst_leave_and_each_shares_questions_of_its_own_number() -> None:
    answers = _blocks(np.random.default_rng(12), 9)
    contest = raced(answers, budget=9 * 40, reference="0")
    numbers = {label: len(contest.answered[label].score) for label in answers}
    assert numbers == contest.shared
    assert numbers["8"] > numbers["1"] == numbers["0"]
    assert contest.asked <= 9 * 40
    assert contest.best is None
    assert contest.shown(answers).labels == ["8"]
    assert contest.against == {}
    most = contest.shared["8"]
    assert contest.share(Phase(9, most + 5, 0), ["7", "8"]) == ["7", "8"]
    contest.begin("7")
    contest.fail("8")
    assert contest.share(Phase(9, most + 9, 0), ["7", "8"]) == []
    assert contest.shared["7"] == most + 5


def test_a_phase_takes_no_shared_question_back() -> None:
    """A folder of an earlier version has no numbers; its checkpoints share what they were asked."""
    contest = Contest(N, sharing=25)
    for label in "ab":
        contest.hold(label, Scores(np.ones(25), np.ones(25)))
    assert contest.share(Phase(3, 10, 0), [*"abc"]) == [*"abc"]
    assert contest.shared == {"a": 25, "b": 25, "c": 10}
    contest.share(Phase(3, 40, 0), [*"abc"])
    assert set(contest.shared.values()) == {40}


def test_who_joins_a_list_after_a_budget_has_a_turn_of_its_own() -> None:
    """Where a list is raced by rows nobody is asked shared questions but by a budget."""
    answers = _blocks(np.random.default_rng(12), 3)
    contest = raced(answers, budget=90)
    assert contest.turns([*answers, "new"]) == ["2", "1", "0", "new"]
    assert contest.sharing_of("new") == 0
    by_shared = Contest(N, sharing=25)
    assert by_shared.turns(["new"]) == []


def test_the_last_phase_leaves_one_more_than_wanted() -> None:
    assert phases(40, 500, 2000)[-1].checkpoints == 2
    assert phases(40, 500, 2000, top=3)[-1].checkpoints == 4
    assert [phase.checkpoints for phase in phases(3, 500, 300, top=3)] == [3]


@pytest.mark.parametrize("budget", [120, 300])
def test_a_race_goes_on_from_a_budgets_answers(budget: int) -> None:
    answers = _blocks(np.random.default_rng(12))
    some = raced(answers, budget=budget)
    whole = raced(answers, budget=budget, goes_on=True)
    for label, mine in some.answered.items():
        assert (whole.answered[label].score[: len(mine.score)] == mine.score).all()
    assert whole.best == "5"
    assert whole.shown(answers).margin <= some.shown(answers).margin


@pytest.mark.parametrize("settings", [{}, {"sharing": 25}, {"budget": 200, "goes_on": True}])
def test_a_contest_is_judged_anew_from_its_answers(settings: dict[str, Any]) -> None:
    """As a race that goes on, and a folder's replay: in one piece, with the turns and numbers kept."""
    answers = _blocks(np.random.default_rng(16))
    before = raced(answers, **settings)
    again = Contest(N, shared=before.shared, sharing=before.sharing, split=before.split)
    again.against = dict(before.against)
    for label in reversed(answers):
        count = again.sharing_of(label)
        if count:
            again.hold(label, before.answered[label].first(count))
    for label in again.turns([*answers]):
        begin = len(again.answered.get(label, NOTHING).score)
        again.add(
            label, before.answered[label].at(np.arange(begin, len(before.answered[label].score)))
        )
    assert again.standing == before.standing
    assert again.shown(answers).labels == before.shown(answers).labels
    assert again.shown(answers).margin == pytest.approx(before.shown(answers).margin, abs=FINE)


def test_how_many_are_asked_at_once_decides_only_when_the_bets_are_looked_at() -> None:
    rng = np.random.default_rng(17)
    score, probability = _drawn([0.7, 0.45, 0.3], rng)
    asked = {}
    for batch in (1, 7, 32):
        contest = Contest(N, seed=4)
        for i in range(3):
            label = str(i)
            mine = Scores(score[i], probability[i]).at(contest.order(label))
            run(contest, label, lambda a, b, mine=mine: mine.at(np.arange(a, b)), batch)
        asked[batch] = [len(contest.answered[label].score) for label in "012"]
    for batch in (7, 32):
        assert asked[batch] == [N, *(-(-n // batch) * batch for n in asked[1][1:])]


def test_weights_make_the_mean_and_equal_ones_change_nothing() -> None:
    answers = _blocks(np.random.default_rng(18))
    weights = np.repeat([1.0, 3.0], N // 2)
    contest = raced(answers, weights=weights, sharing=25)
    for label in contest.ranked:
        mean = np.average(answers[label].score, weights=weights)
        assert contest.mean(label) == pytest.approx(mean)
    equal = raced(answers, weights=np.full(N, 0.2), sharing=25)
    plain = raced(answers, sharing=25)
    assert equal.standing == plain.standing
    assert (equal.order("2") == plain.order("2")).all()


def test_the_mean_of_a_part_estimates_the_weighted_mean() -> None:
    """By several units, of which the small ones' questions are drawn more often."""
    rng = np.random.default_rng(19)
    sizes = [300, 80, 20]
    weights = np.repeat([1 / size for size in sizes], sizes)
    score = 1.0 * (rng.random(400) < np.repeat([0.2, 0.6, 0.9], sizes))
    true = np.average(score, weights=weights)
    for count in (10, 60, 200, 390):
        means = []
        for seed in range(150):
            contest = Contest(400, seed=seed, weights=weights)
            contest.add("a", Scores(*(score[contest.order("a")[:count]],) * 2))
            means.append(contest.mean("a"))
        assert np.mean(means) == pytest.approx(true, abs=0.02)
        assert np.std(means) < 1.3 * (0.25 / count) ** 0.5


def test_of_a_list_that_was_cut_the_shared_answers_do_not_drop() -> None:
    """Who is the best of those that went on depends on these answers."""
    answers = _blocks(np.random.default_rng(20), 24)
    contest = raced(answers, sharing=25, cut=True)
    going = [label for label in answers if label not in contest.left_out]
    assert {contest._bets[label].begin for label in going if label in contest.levels} == {25}
    asked = {len(contest.answered[label].score) for label in going}
    assert min(asked) > 25
    others = [label for label in answers if label in contest.left_out]
    assert contest.shown(answers).labels[0] not in others
    assert contest.shown(answers).margin <= contest.margin + FINE


def test_of_equally_good_ones_the_first_predicts() -> None:
    """In every process: the order of a set of names differs between them."""
    rng = np.random.default_rng(21)
    score = np.repeat([1.0, 0.0], 50)
    answers = {name: Scores(*(rng.permutation(score),) * 2) for name in "abcdefgh"}
    contest = Contest(100)
    for name, mine in answers.items():
        contest.hold(name, mine.at(contest.order(name)))
    contest.begin("last")
    contest.add("last", Scores(np.ones(10), np.ones(10)))
    columns = contest._bets["last"].columns
    assert columns is not None
    assert (columns[:, 0] == answers["a"].score[contest.order("last")]).all()


def test_shared_answers_that_may_have_ended_a_training_are_no_evidence() -> None:
    """The best of the saves that there are depends on them; what follows counts as ever."""
    right = np.ones(N)
    wrong = np.zeros(N)
    margins = {}
    for may_stop in (False, True):
        for asked in (25, 100):
            contest = Contest(N, sharing=25, may_stop=may_stop)
            contest.hold("good", Scores(right, right))
            contest.hold("bad", Scores(wrong, wrong).first(asked))
            contest.answered["good"].score[:100] = 0.0
            margins[may_stop, asked] = contest.shown(["good", "bad"]).margin
    # Without evidence only the questions left bound the mean.
    assert margins[True, 25] == pytest.approx((N - 25) / N - 0.5)
    assert margins[False, 25] < margins[True, 25]
    assert margins[True, 100] < margins[True, 25]
