"""Several tasks and several runs: the mean over tasks, and the runs not shown worse than the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from json_schemas import faults
from logged_runs import LoggedTask, write_run
from scipy.stats import binomtest

from lmeval_dispersion import compare
from lmeval_dispersion.report import render

SIZES = {"arc": 200, "mmlu_a": 40, "mmlu_b": 160, "quiz": 100}


def runs(
    folder: Path,
    shares: dict[str, dict[str, float]],
    *,
    sizes: dict[str, int] = SIZES,
    groups: dict[str, list[str]] | None = None,
    by_size: bool = True,
) -> list[str]:
    """Runs with these shares of right answers by task, on the same hard and easy documents."""
    rng = np.random.default_rng(8)
    luck = {task: rng.random(size) for task, size in sizes.items()}
    paths = []
    for place, (name, by_task) in enumerate(shares.items()):
        tasks = {}
        for task, size in sizes.items():
            mine = np.where(rng.random(size) < 0.6, luck[task], rng.random(size))
            right = (mine < by_task[task]).tolist()
            tasks[task] = LoggedTask.of_choices(right, seed=place * 100 + size)
        paths.append(write_run(folder / name, f"org/{name}", tasks, groups, by_size))
    return paths


def everywhere(share: float) -> dict[str, float]:
    return dict.fromkeys(SIZES, share)


def scores_of(folder: str) -> dict[str, np.ndarray]:
    """Each task's scores, read without any code of the package."""
    found = {}
    for file in Path(folder).glob("samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name.removeprefix("samples_").rsplit("_2026", 1)[0]] = np.array(
            [x["acc"] for x in lines]
        )
    return found


@pytest.mark.parametrize("by_size", [True, False])
def test_the_mean_over_tasks_counts_a_group_once_as_lm_eval_weighs_it(
    by_size: bool, tmp_path: Path
) -> None:
    groups = {"mmlu": ["mmlu_a", "mmlu_b"]}
    shares = {"base": everywhere(0.5), "tuned": everywhere(0.5) | {"mmlu_a": 0.9, "quiz": 0.75}}
    paths = runs(tmp_path, shares, groups=groups, by_size=by_size)
    found = compare(paths)
    means = []
    for path in paths:
        each = {task: scores.mean() for task, scores in scores_of(path).items()}
        weights = [SIZES["mmlu_a"], SIZES["mmlu_b"]] if by_size else None
        mmlu = np.average([each["mmlu_a"], each["mmlu_b"]], weights=weights)
        means.append(np.mean([each["arc"], mmlu, each["quiz"]]))
    mean, *tasks = found.others[0].tasks
    assert (mean.accuracy_baseline, mean.accuracy) == pytest.approx(tuple(means))
    assert mean.slice == "mean over 3 tasks (mmlu as one)"
    assert {row.slice for row in tasks} == {*SIZES}
    whole = found.others[0].slices[0]
    pooled = [np.concatenate([*scores_of(path).values()]) for path in paths]
    assert whole.accuracy == pytest.approx(pooled[1].mean())
    gained, lost = int((pooled[1] > pooled[0]).sum()), int((pooled[1] < pooled[0]).sum())
    assert whole.accuracy_p == pytest.approx(binomtest(gained, gained + lost).pvalue)
    weights = "weighted by number of documents" if by_size else "with equal weights"
    assert any(
        f"the group mmlu counts as one task, the mean of its 2 tasks ({weights})" in note
        for note in found.notes
    )
    said = found.answer()
    assert said[0].startswith(
        "tuned scores higher than base in the mean over 3 tasks (mmlu as one): "
    )
    assert said[1].startswith("Task by task: mmlu_a (")
    assert any(line.startswith("With all 500 questions weighted equally: ") for line in said)
    assert "hold for these 4 tasks only; " in " ".join(said)
    assert faults(found.to_dict()) == []
    assert [row["slice"] for row in found.rows()].count("arc") == 1


def test_tasks_that_move_apart_are_no_difference_in_the_mean(tmp_path: Path) -> None:
    sizes = {"large": 400, "small": 100}
    shares = {"base": {"large": 0.5, "small": 0.5}, "tuned": {"large": 0.65, "small": 0.35}}
    found = compare(runs(tmp_path, shares, sizes=sizes))
    said = found.answer()
    assert said[0].startswith(
        "tuned and base do not differ clearly in accuracy in the mean over 2 tasks: "
    )
    assert found.others[0].slices[0].side("accuracy") == 1  # over all questions it does
    assert any("Accuracy differs clearly in " in line and "large (+" in line for line in said)


def test_one_task_has_no_mean_over_tasks(tmp_path: Path) -> None:
    found = compare(runs(tmp_path, {"a": {"arc": 0.5}, "b": {"arc": 0.6}}, sizes={"arc": 200}))
    assert not found.others[0].tasks
    assert not any(
        words in found.to_markdown() for words in ("mean over", "Task by task", "these 1 task")
    )


def test_a_group_by_size_that_is_all_is_every_question_alike(tmp_path: Path) -> None:
    sizes = {"mmlu_a": 40, "mmlu_b": 160}
    shares = {"a": everywhere(0.4), "b": everywhere(0.7)}
    found = compare(runs(tmp_path, shares, sizes=sizes, groups={"mmlu": [*sizes]}))
    mean = found.others[0].tasks[0]
    assert mean.slice == "mean of mmlu"
    assert (mean.gained, mean.accuracy_p) == (
        found.others[0].slices[0].gained,
        found.others[0].slices[0].accuracy_p,
    )
    assert found.answer()[0].startswith(
        "b answers more documents right than a in the mean of mmlu: "
    )
    assert "questions weighted equally" not in " ".join(found.answer())


_BEST = "All other runs are shown to be worse than the best: "
_SOME = "Any of these may be the best: "
_NONE = "No run is shown to be worse than the best: "


@pytest.mark.parametrize(
    ("shares", "opening", "shown_worse"),
    [
        ([0.3, 0.8, 0.4], _BEST, {"run 0", "run 2"}),
        ([0.3, 0.75, 0.76, 0.4], _SOME, {"run 0", "run 3"}),
        ([0.6, 0.6, 0.6], _NONE, set()),
        ([0.5] * 6, _NONE, set()),
    ],
)
def test_which_runs_are_not_shown_worse_than_the_best(
    shares: list[float], opening: str, shown_worse: set[str], tmp_path: Path
) -> None:
    named = {f"run {i}": everywhere(share) for i, share in enumerate(shares)}
    found = compare(runs(tmp_path, named))
    first = found.answer()[0]
    assert [words for words in (_BEST, _SOME, _NONE) if first.startswith(words)] == [opening]
    assert found.best is not None
    assert {*found.best.worse} == shown_worse
    assert {*found.best.not_worse} == {*named} - shown_worse
    (highest,) = found.best.highest
    assert f"{highest} (" in first
    pairs = len(shares) * (len(shares) - 1) // 2
    assert f"mean over 4 tasks; {pairs} pairs tested with Holm's correction at 5 %" in first
    assert render(found.document(), "html").count("<h1") == 1


def test_runs_of_one_score_are_the_highest_together(tmp_path: Path) -> None:
    paths = runs(
        tmp_path, {name: everywhere(share) for name, share in {"a": 0.3, "b": 0.8}.items()}
    )
    shutil.copytree(paths[1], tmp_path / "c")
    results = next((tmp_path / "c").glob("results_*"))
    results.write_text(results.read_text().replace("org/b", "org/c"))
    found = compare([*paths, tmp_path / "c"])
    assert found.answer()[0].startswith("Any of these may be the best: b and c (")
    assert (
        "b and c: the log-probabilities of all 500 documents are equal to the last digit"
        in found.answer()[1]
    )


def test_two_runs_have_a_verdict_of_their_own(tmp_path: Path) -> None:
    found = compare(runs(tmp_path, {"a": everywhere(0.3), "b": everywhere(0.8)}))
    assert found.best is None
    assert "the best" not in found.to_markdown()


def test_a_run_without_answers_is_not_among_the_best(tmp_path: Path) -> None:
    paths = runs(
        tmp_path,
        {name: everywhere(share) for name, share in zip("abc", (0.4, 0.7, 0.5), strict=True)},
    )
    tied = {
        task: LoggedTask([0.25] * size, [[0.0] * 4] * size, targets=[i % 4 for i in range(size)])
        for task, size in SIZES.items()
    }
    paths.append(write_run(tmp_path / "zero", "org/zero", tied))
    first = compare(paths).answer()[0]
    assert first.startswith("All other runs are shown to be worse than the best: b (")
    assert first.endswith("; 3 pairs tested with Holm's correction at 5 %; without zero).")
