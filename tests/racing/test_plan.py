"""What a race will load and ask."""

from __future__ import annotations

import pytest
from lmeval_screener.targets.names import parse_name

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.racing.contest import LOADS
from lmeval_dispersion.racing.folder import _as_named, what_loads
from lmeval_dispersion.racing.lineup import Entry, Lineup, Plan, may_cut, questions_of, time_words


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
    with pytest.raises(UsageError, match="expected a number of questions, or a share such as 10%"):
        questions_of(budget, 100)


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
        UsageError, match="expected at least 6, one question for each checkpoint, got 5"
    ):
        Plan.of(listed, listed.entries, 200, budget=5, api=False)


def test_a_long_list_may_be_cut_unless_all_were_named() -> None:
    assert may_cut(lineup(24).entries)
    assert not may_cut(lineup(23, base=True).entries)
    assert not may_cut(lineup(24, why="named").entries)


@pytest.mark.parametrize(
    ("by", "answered", "few", "many", "loads"),
    [
        ("rows", {}, 200 + 3 * 10, 800, 4),
        ("rows", {"0": 200, "1": 10, "2": 50}, 10, 190 + 150 + 200, 3),
        ("rows", {str(i): 200 for i in range(4)}, 0, 0, 0),
        ("block", {"3": 25, "1": 40}, 160 + 2 * 25, 800 - 65, 8),
    ],
)
def test_a_plan_counts_what_is_answered(
    by: str, answered: dict[str, int], few: int, many: int, loads: int
) -> None:
    listed = lineup(4)._replace(by=by)
    plan = Plan.of(listed, listed.entries, 200, budget=None, api=False, answered=answered)
    assert (plan.expected, plan.loads) == ((few, many), loads)
    said = plan.words("9 GB")
    if answered:
        assert f"load weights at most {loads} times" in said
        assert f"({sum(answered.values())} are answered)" in said
        assert "9 GB" not in said
    else:
        assert "load 4 checkpoints (about 9 GB) and ask 230 to 800 questions." in said


def test_a_plan_of_a_budget_counts_what_is_answered() -> None:
    listed = lineup(9)
    plan = Plan.of(listed, listed.entries, 200, budget=180, api=False)
    assert plan.expected == (plan.expected[0],) * 2
    first, *later = plan.phases
    halfway = {str(i): first.questions for i in range(9)}
    on = Plan.of(listed, listed.entries, 200, budget=180, api=False, answered=halfway)
    assert on.expected == (plan.expected[0] - 9 * first.questions,) * 2
    assert on.loads == sum(phase.checkpoints for phase in later)
    done = {str(i): later[-1].questions for i in range(9)}
    assert Plan.of(listed, listed.entries, 200, budget=180, api=False, answered=done).loads == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (89, "89 s"), (900, "15 min"), (7200, "2 h"), (9000, "2.5 h"), (24000, "7 h")],
)
def test_a_time_is_a_short_text(seconds: float, words: str) -> None:
    assert time_words(seconds) == words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pretrained": "org/m", "revision": "dev"}, "org/m@dev"),
        ({"pretrained": "org/m", "revision": "dev", "gguf_file": "q4.gguf"}, "org/m@dev:q4.gguf"),
        ({"pretrained": "org/m", "revision": "a" * 40}, "org/m"),
        ({"pretrained": "org/base", "revision": "dev", "peft": "org/lora"}, "org/lora"),
    ],
)
def test_a_checkpoint_that_was_not_loaded_is_named_as_a_command_has_to(
    arguments: dict[str, str], words: str
) -> None:
    """Read back, the name is that of the same repository, revision and file."""
    assert _as_named(arguments) == words
    target = parse_name(words)
    assert (target.repo, target.file or "") == what_loads(arguments)
    if "peft" not in arguments and arguments["revision"] == "dev":
        assert target.revision == "dev"
