"""What a race will load and ask, and the agreement that orders without labels."""

from __future__ import annotations

import numpy as np
import pytest

from lmeval_dispersion.asking import LmEval
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.racing.agreement import agreement, check_agreement
from lmeval_dispersion.racing.contest import LOADS
from lmeval_dispersion.racing.lineup import Entry, Lineup
from lmeval_dispersion.racing.plan import Plan, batch_of, may_cut, questions_of


def lineup(checkpoints: int, *, base: bool = False, why: str = "block") -> Lineup:
    """A list of models of a server."""
    entries = [Entry(str(i), {"model": str(i)}, None, why) for i in range(checkpoints)]
    if base:
        entries.append(Entry("base", {"model": "base"}, None, "base"))
    return Lineup(entries, by="block")


@pytest.mark.parametrize(
    ("budget", "everything", "questions"),
    [
        (60, 400, 60),
        ("60", 400, 60),
        ("10%", 400, 40),
        (" 2.5% ", 400, 10),
        ("0.01%", 400, 1),
        ("100%", 7, 7),
    ],
)
def test_a_budget_is_a_number_or_a_part(budget: int | str, everything: int, questions: int) -> None:
    assert questions_of(budget, everything) == questions


@pytest.mark.parametrize("budget", ["", "%", "0%", "101%", "ten", "1e3", "0", "-1", "nan%"])
def test_another_budget_is_refused(budget: str) -> None:
    with pytest.raises(UsageError, match="expected a number of questions, or a part such as 10%"):
        questions_of(budget, 100)


@pytest.mark.parametrize(
    ("size", "requests", "batch"),
    [
        (None, 4, 10),
        (16, 4, 10),
        (64, 4, 16),
        ("64", 1, 64),
        ("auto", 4, 25),
        ("auto:4", 1, 25),
        (1, 1, 10),
    ],
)
def test_what_is_asked_at_once_fills_the_device_and_is_a_step_at_least(
    size: int | str | None, requests: int, batch: int
) -> None:
    assert batch_of(LmEval(batch_size=size), requests) == batch


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 8, 24, 43, 100])
@pytest.mark.parametrize("base", [False, True])
def test_the_phases_cost_what_the_plan_says_and_no_more_than_the_budget(
    checkpoints: int, base: bool
) -> None:
    listed = lineup(checkpoints, base=base)
    everything = 200 * (checkpoints + base)
    for budget in (checkpoints + base, everything // 20, everything // 3, everything):
        if budget < checkpoints + base:
            continue
        plan = Plan.of(listed, listed.entries, 200, budget=budget, api=False)
        few, many = plan.expected
        asked = {label: 0 for label in range(checkpoints + base)}
        for phase in plan.phases:
            for label in range(phase.checkpoints):
                asked[label] = phase.questions
        if base:
            asked[checkpoints] = plan.phases[0].questions
        assert few == many == sum(asked.values()) <= budget
        assert plan.loads <= LOADS * checkpoints + base + 1
        for phase in plan.phases:
            assert f"up to {phase.questions} shared question" in plan.words()
    assert Plan.of(listed, listed.entries, 200, budget=everything, api=True).loads == 1


def test_a_budget_without_a_question_for_each_is_refused() -> None:
    listed = lineup(5, base=True)
    with pytest.raises(
        UsageError, match="expected at least 6, a question of each checkpoint, got 5"
    ):
        Plan.of(listed, listed.entries, 200, budget=5, api=False)


def test_a_long_list_may_be_cut_unless_all_were_named() -> None:
    assert may_cut(lineup(24).entries)
    assert not may_cut(lineup(23, base=True).entries)
    assert not may_cut(lineup(24, why="named").entries)


def test_agreement_is_with_the_mean_answer() -> None:
    answers = np.random.default_rng(3).random((4, 25, 5)) / 5
    mean = (answers / answers.sum(2, keepdims=True)).mean(0)
    found = [values.mean() for values in agreement([list(each) for each in answers])]
    assert found == pytest.approx([float((each * mean).sum(1).mean()) for each in answers])
    unlike = [list(each) for each in answers]
    unlike[3] = [each[:4] for each in unlike[3]]
    with pytest.raises(UsageError, match="of one tokenizer"):
        agreement(unlike)
    for checkpoints, questions in ((2, 25), (3, 4)):
        with pytest.raises(UsageError, match="3 or more checkpoints and 5 or more questions"):
            check_agreement(checkpoints, questions)
