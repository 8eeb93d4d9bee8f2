"""Races on answers that are there already: equal to a race that asks, on results as lm-eval writes them."""

from __future__ import annotations

import io
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo_answers
import lmeval_screener
import numpy as np
import pytest
from json_schemas import faults
from lmeval_screener.shortlist.manifest import manifest_dict

from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.racing.contest import Contest, Scores, run
from lmeval_dispersion.racing.kept import kept_race
from lmeval_dispersion.racing.lineup import Named, all_named
from lmeval_dispersion.racing.replay import Recorded, raced, read_answers, replay
from lmeval_dispersion.report import render
from lmeval_dispersion.store.groups import question_weights


def planted(rng: np.random.Generator, chances: Any, n: int) -> dict[str, Scores]:
    hard, own = rng.random(n), rng.random((len(chances), n))
    mixed = np.where(rng.random(own.shape) < 0.6, hard, own)
    likely = np.clip(np.asarray(chances)[:, None] + 0.3 * (own - 0.5), 0, 1)
    return {
        str(i): Scores(1.0 * (mixed[i] < chance), likely[i]) for i, chance in enumerate(chances)
    }


@pytest.mark.parametrize("margin", [0.0, 0.01, 0.05])
def test_a_replay_asks_what_a_race_asks(margin: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(12):
        answers = planted(rng, rng.uniform(0.4, 0.8, 5), int(rng.integers(60, 500)))
        seed = int(rng.integers(1000))
        contest = Contest(len(answers["0"].score), margin=margin, seed=seed)
        for label, mine in answers.items():
            order = np.random.default_rng(seed).permutation(contest.questions)[contest.order(label)]
            run(contest, label, lambda a, b, mine=mine, order=order: mine.at(order[a:b]))
        found = raced(answers, seed=seed, margin=margin)
        assert found.standing == contest.standing
        assert found.asked == contest.asked


@pytest.mark.parametrize(
    ("chances", "shuffled", "stands", "not_there"),
    [
        (
            [0.9, 0.3, 0.2],
            False,
            "would have named the same best, 0, in 40 of 40 random orders",
            "Where it named",
        ),
        ([0.9, 0.3, 0.2], False, "were raced in the order given.", "alphabetical"),
        ([0.9, 0.3, 0.2], True, "results were named in alphabetical order", "order given"),
        (
            [0.6, 0.6, 0.6, 0.6],
            True,
            "Where it named another checkpoint, that one was",
            "in 40 of 40",
        ),
    ],
)
def test_the_sentences_of_a_replay(
    chances: list[float], shuffled: bool, stands: str, not_there: str
) -> None:
    answers = planted(np.random.default_rng(5), chances, 200)
    result = replay(Recorded(answers, ["sums"]), orders=40, shuffled=shuffled, margin=0.2)
    text = " ".join(render(result.document(), "markdown").split())
    assert stands in text
    assert not_there not in text
    assert f"with {100 * result.share[0]:.0f} % of the questions asked (median;" in text
    assert sum(row.named for row in result.checkpoints) == 40
    assert result.share[1] <= result.share[0] <= result.share[2] <= 1
    lowest = min(row.score for row in result.checkpoints if row.named)
    assert result.checkpoints[0].score - result.lost == pytest.approx(lowest)
    assert faults(result.to_dict()) == []


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        (
            ["0", "2"],
            "in 40 of 40 random orders, with 35 % of the questions asked (median; in nine of ten orders "
            "35 to 35 %) and 2 of 3 loaded.",
        ),
        (["2", "1"], "a checkpoint other than 0 in 40 of 40 random orders"),
    ],
)
def test_a_screen_leaves_some_unloaded(listed: list[str], sentence: str) -> None:
    answers = planted(np.random.default_rng(5), [0.9, 0.3, 0.2], 200)
    result = replay(Recorded(answers, ["sums"]), listed=listed, orders=40)
    text = " ".join(render(result.document(), "markdown").split())
    assert sentence in text
    assert "2 of 3 loaded" in text
    assert "were raced in the screen's order; checkpoints that the screen does not list" in text
    assert "each checkpoint is loaded" not in text
    assert {row.label for row in result.checkpoints if row.asked} == {*listed}
    assert "loaded." not in " ".join(replay(Recorded(answers, ["sums"]), orders=2).answer())


def test_where_the_best_is_never_named_the_sentence_says_so() -> None:
    """The first is better by less than the margin than the second, which comes before it."""
    score = np.zeros(200)
    score[:100] = 1
    more = score.copy()
    more[100:102] = 1
    answers = {"b": Scores(score, score), "a": Scores(more, more)}
    result = replay(Recorded(answers, ["t"]), orders=20, margin=0.05)
    text = " ".join(result.answer())
    assert "a checkpoint other than a in 20 of 20 random orders" in text
    assert "worse by at most 0.010" in text
    # Of equal ones the sentence has the one that was named.
    result = replay(Recorded({**answers, "b": answers["a"]}, ["t"]), orders=20, margin=0.05)
    assert "named the same best, b, in 20 of 20 random orders" in " ".join(result.answer())


@pytest.fixture(scope="module", params=[60, pytest.param(400, marks=pytest.mark.slow)])
def asked(request: pytest.FixtureRequest) -> int:
    """Questions of the demo's task that are asked, of 400."""
    return int(request.param)


@pytest.fixture(scope="module")
def results(asked: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of the demo family, evaluated by lm-eval."""
    folder = tmp_path_factory.mktemp("results")
    demo_answers.write_task(folder, demo_answers.questions()[:asked])
    with pytest.MonkeyPatch.context() as patch:  # pip, lscpu and others are asked about the machine
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _results: None)
        for label in ("sums-20", "sums-80", "sums-00"):
            demo_answers.evaluate(label, folder, folder)
    return folder


def _check_bundled(names: list[str], asked: int) -> None:
    """The answers are the bundled ones, as far as models of half precision answer alike on two machines.

    Where two choices are nearly as probable as each other one of them may choose the other one.
    """
    with np.load(data_folder("demo") / "answers.npz") as file:
        bundled = {
            label: Scores(score[:asked], probability[:asked].astype(float))
            for label, score, probability in zip(
                file["label"].tolist(), file["score"], file["probability"], strict=True
            )
        }
    for name, mine in read_answers(names).answers.items():
        known = bundled[Path(name).name]
        moved = np.abs(mine.probability - known.probability)
        assert moved.max() < 0.05
        assert moved.mean() < 0.002
        differs = np.flatnonzero(mine.score != known.score)
        assert len(differs) <= 0.005 * asked
        assert (mine.probability[differs] <= 0.525).all()


def test_results_of_lm_eval_are_replayed_and_are_the_bundled_ones(
    results: Path, asked: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = [str(results / label) for label in ("sums-20", "sums-80", "sums-00")]
    assert main(["race", "--replay", *names, "--format", "json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][0]["label"].endswith("sums-80")
    assert (found["same"], found["questions_each"], found["by"]) == (200, asked, "block")
    _check_bundled(names, asked)
    rows = ["--by", "rows", "--format", "json", "-q"]
    assert main(["race", "--replay", *sorted(names), *rows]) == 0
    assert json.loads(capsys.readouterr().out)["shuffled"] is True

    screened = lmeval_screener.screen([str(data_folder("demo") / "sums-*")], domain="math")
    head, of = screened.head(), len(names)
    (tmp_path / "manifest.json").write_text(
        json.dumps(manifest_dict(head, screened.shortlist(2), tasks=("sums",), command=""))
    )
    listed = ["race", str(tmp_path), "--replay", *names, "--format", "json", "-q"]
    missing = {c.label for c in screened.shortlist(2).chosen} - {"sums-80"}
    assert main(listed) == 2
    assert f"names, got none for {missing.pop()}" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text(
        json.dumps(manifest_dict(head, screened.shortlist(1), tasks=("sums",), command=""))
    )
    assert main(listed) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["loaded"], found["same"], found["shuffled"]) == (1, 200, False)
    assert found["share"] == pytest.approx([1 / of] * 3)

    fewer = tmp_path / "fewer"
    shutil.copytree(results / "sums-00", fewer)
    samples = next(fewer.rglob("samples_*.jsonl"))
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:55]))
    assert main(["race", "--replay", names[1], str(fewer), "-q"]) == 0
    assert (
        f"55 of {asked} questions are in all results; the others are left out."
        in capsys.readouterr().out
    )
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:30]))
    for given, sentence in [
        (
            [names[1], str(fewer)],
            f"expected at least 50 questions with a score in all results, got 30 of {asked}",
        ),
        ([names[1], names[1]], "expected results of two or more models, one for each model"),
        ([names[1]], "expected results of two or more models"),
        ([str(tmp_path / "none")], "expected the folder of a run"),
    ]:
        assert main(["race", "--replay", *given]) in (1, 2)
        assert sentence in capsys.readouterr().err
    other = next((results / "sums-00").rglob("results_*.json"))
    other.write_text(other.read_text().replace('"sums": "Yaml"', '"sums": 2'))
    assert main(["race", "--replay", names[1], str(results / "sums-00"), "-q"]) == 0
    assert "The versions of sums differ: Yaml in " in " ".join(capsys.readouterr().out.split())


def test_the_demo_takes_a_second_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from lmeval_dispersion.cli import main; code = main(['race', '--demo']); "
        "assert not {'torch', 'transformers', 'lm_eval', 'pandas'} & set(sys.modules); sys.exit(code)"
    )
    command, before = [sys.executable, "-c", code], resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2  # on a machine that does other work too
    text = " ".join(done.stdout.split())
    assert text.startswith(
        "Best: sums-80, 100.0 % on sums; no other checkpoint in the race is better (error ≤ 5 %)"
    )
    assert "3 of 11 checkpoints raced, " in text
    assert len(done.stdout.splitlines()) <= 26


def test_released_models_race_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(data_folder("released") / "gsm8k.npz") as file:
        right = np.unpackbits(file["right"], axis=1, count=int(file["questions"]))
        scores = dict(zip(file["names"].tolist(), right.mean(axis=1), strict=True))
    assert main(["race", "--demo", "released", "--format", "json"]) == 0
    race = json.loads(capsys.readouterr().out)
    assert (race["of"], race["questions_all"]) == (43, 43 * 1319)
    assert scores[race["best"]] >= max(scores.values()) - race["margin"]
    assert race["questions"] < race["questions_all"] / 4
    assert "ZeroEval" in " ".join(race["notes"])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--metric", "f1"], "race recorded answers; leave out --metric"),
        (["family", "list"], "race recorded answers; leave out list"),
        (["--seed", "-1"], "--seed: expected at least 0, got -1"),
    ],
)
def test_a_recorded_race_refuses_what_it_would_not_use(
    more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["race", "--demo", *more]) == 2
    assert sentence in capsys.readouterr().err


def test_a_race_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["race", "--demo", "--replay", "a"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_race_of_version_0_2_is_read_but_not_continued(tmp_path):
    kept = {
        "named": ["a", "b"],
        "prompts": {},
        "date": "2026-10-01",
        "checkpoints": [],
        "notes": [],
    }
    (tmp_path / "race.json").write_text(json.dumps(kept))
    assert kept_race(tmp_path, older=True) == kept
    with pytest.raises(UsageError, match="got one by another version"):
        kept_race(tmp_path)


def test_a_manifest_of_another_program_is_left_alone_and_a_damaged_one_is_named(tmp_path):
    file = tmp_path / "manifest.json"
    file.write_text('["a.js"]')
    assert Named.of([tmp_path]).manifest == {}
    file.write_text("{")
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read .*; remove it, or"):
        Named.of(str(tmp_path))


def test_a_list_on_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("acme/one\nacme/two@main\n"))
    named = Named.of("-")
    assert list(named.arguments(taken=False)) == ["acme/one", "acme/two@main"]
    assert [entry.label for entry in all_named(named, api=False).entries] == [
        "acme/one",
        "acme/two@main",
    ]


@pytest.mark.parametrize("settings", [{}, {"sharing": 25}, {"budget": 300}, {"top": 2}])
def test_a_replay_answers_as_the_race_of_its_seed(settings: dict[str, Any]) -> None:
    answers = planted(np.random.default_rng(6), [0.8, 0.7, 0.4, 0.3], 300)
    result = replay(Recorded(answers, ["sums"]), seed=5, orders=3, **settings)
    contest = raced(answers, seed=5, **settings)
    assert result.top == contest.shown(answers).labels
    assert result.best == result.top[0]
    assert result.margin_shown == contest.shown(answers).margin
    assert (result.questions, result.questions_all) == (contest.asked, 1200)
    assert result == replay(Recorded(answers, ["sums"]), seed=5, orders=3, **settings)
    again = replay(Recorded(answers, ["sums"]), seed=6, orders=3, **settings)
    assert again.questions != result.questions or "budget" in settings
    assert faults(result.to_dict()) == []


def test_a_replay_by_weights_names_the_best_of_the_weighted_mean() -> None:
    """One is better on the large task, the other on the small one, which counts as much."""
    rng = np.random.default_rng(7)
    tasks = ["large"] * 300 + ["small"] * 60
    right = [
        rng.random(360) < np.repeat(chances, (300, 60)) for chances in ((0.7, 0.3), (0.5, 0.9))
    ]
    answers = {name: Scores(*(1.0 * mine,) * 2) for name, mine in zip("ab", right, strict=True)}
    plain = replay(Recorded(answers, ["large", "small"]), orders=5, sharing=25)
    weights = question_weights(tasks, {})
    assert weights is not None
    assert weights.mean() == pytest.approx(1)
    even = replay(Recorded(answers, ["large", "small"], weights=weights), orders=5, sharing=25)
    assert [plain.best, even.best] == ["a", "b"]
    halves = (answers["b"].score[:300].mean() + answers["b"].score[300:].mean()) / 2
    assert even.checkpoints[0].score == pytest.approx(halves)
    assert question_weights(["a", "b"] * 10, {}) is None


@pytest.mark.parametrize(("weigh", "best"), [("units", "b"), ("questions", "a")])
def test_a_replay_weighs_as_it_is_told(
    weigh: str, best: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is right in the large task alone, the other in the small one."""
    large = np.repeat([1.0, 0.0], (300, 60))
    recorded = Recorded(
        {"a": Scores(large, large), "b": Scores(1 - large, 1 - large)},
        ["large", "small"],
        weights=question_weights(["large"] * 300 + ["small"] * 60, {}),
    )
    if weigh == "units":  # alike; then the small one's answers decide
        recorded.answers["b"].score[:9] = 1.0
    monkeypatch.setattr(
        "lmeval_dispersion.racing.replay.read_answers", lambda places, metric: recorded
    )
    given = ["race", "--replay", "one", "other", "--weigh", weigh, "--format", "json", "-q"]
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["best"] == best


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sharing": 25}, "in the order of their scores on the shared questions."),
        ({"margin": 0.05}, "no other checkpoint in the race is better"),
        ({"budget": 240}, "240 of 1,200 questions asked (20 %)."),
        ({"top": 2}, "The best 2: 0 and 1."),
        ({"top": 2}, "is better than the last of the best 2"),
    ],
)
def test_the_first_lines_of_a_replay(settings: dict[str, Any], sentence: str) -> None:
    answers = planted(np.random.default_rng(8), [0.95, 0.8, 0.3, 0.2], 300)
    result = replay(Recorded(answers, ["sums"]), orders=2, **settings)
    text = " ".join(render(result.document(), "markdown").split())
    assert "**Best: 0, 0.9" in text
    assert sentence in text


def test_a_replays_budget_has_a_question_for_each() -> None:
    answers = planted(np.random.default_rng(8), [0.9, 0.3, 0.2], 100)
    with pytest.raises(
        UsageError, match="expected at least 3, one question for each checkpoint, got 2"
    ):
        replay(Recorded(answers, ["sums"]), orders=2, budget=2)
