"""Logs of Inspect, as it wrote them (data/inspect/make.py); right values by Inspect, by hand and by scipy."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmeval_screener.shortlist.accuracies import read_accuracies
from scipy.stats import binomtest

from lmeval_dispersion import compare, compare_samples
from lmeval_dispersion.cli import main
from lmeval_dispersion.errors import DispersionError, HarnessError, MissingExtraError, UsageError
from lmeval_dispersion.logs import inspect
from lmeval_dispersion.store.samples import read_logged

DATA = Path(__file__).parent / "data" / "inspect"
needs_inspect = pytest.mark.skipif(
    importlib.util.find_spec("inspect_ai") is None,
    reason="inspect_ai is not installed: 'lmeval-dispersion[inspect]', in an environment of its own",
)
LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}


def logged(name: str) -> Any:
    """A log, by Inspect."""
    from inspect_ai.log import read_eval_log

    return read_eval_log(str(DATA / name))


def by_hand(name: str, scorer: str) -> dict[str, float]:
    """Each sample's mean score over the epochs, from the letters in the log."""
    letters: dict[str, list[float]] = {}
    for sample in logged(name).samples:
        value = (sample.scores or {}).get(scorer)
        if value is not None and value.value in LETTERS:
            letters.setdefault(str(sample.id), []).append(LETTERS[value.value])
    return {sample: float(np.mean(values)) for sample, values in letters.items()}


def accuracy_of(
    name: str, scorer: str, metric: str = "accuracy", reducer: str | None = None
) -> float:
    """Inspect's own figure."""
    for score in logged(name).results.scores:
        if score.scorer == scorer and reducer in (None, score.reducer) and metric in score.metrics:
            return float(score.metrics[metric].value)
    raise AssertionError(f"{name} has no {metric} of {scorer}")


def pair(first: str, second: str, scorer: str) -> tuple[np.ndarray, np.ndarray]:
    """The scores of the samples in both logs, by hand."""
    a = by_hand(first, scorer)
    b = by_hand(second, scorer)
    shared = sorted(a.keys() & b.keys())
    return np.array([a[name] for name in shared]), np.array([b[name] for name in shared])


@needs_inspect
def test_a_comparison_has_inspects_accuracies_and_mcnemars_p():
    x, y = pair("base/sums.eval", "tuned/sums.eval", "match")
    gained = int((y > x).sum())
    lost = int((y < x).sum())
    assert gained
    assert lost
    whole = compare([DATA / "base", DATA / "tuned" / "sums.eval"]).others[0].slices[0]
    assert whole.accuracy_baseline == pytest.approx(accuracy_of("base/sums.eval", "match"))
    assert whole.accuracy == pytest.approx(accuracy_of("tuned/sums.eval", "match"))
    assert (whole.labelled, whole.gained, whole.lost) == (50, gained, lost)
    assert whole.accuracy_p == pytest.approx(binomtest(gained, gained + lost).pvalue)
    found = compare_samples(DATA / "base", DATA / "tuned" / "sums.eval")
    assert (found.metric, found.gained, found.lost) == ("match/accuracy", gained, lost)


@needs_inspect
def test_epochs_are_repeats_reduced_as_inspect_does():
    x, y = pair("base-epochs/sums.json", "tuned-epochs/sums.json", "match")
    assert set(y) - {0.0, 1.0}
    runs = [DATA / "base-epochs", DATA / "tuned-epochs"]
    whole = compare(runs).others[0].slices[0]
    assert whole.accuracy == pytest.approx(y.mean())
    assert whole.accuracy == pytest.approx(
        accuracy_of("tuned-epochs/sums.json", "match", reducer="mean")
    )
    assert whole.accuracy_baseline == pytest.approx(x.mean())
    assert whole.accuracy_difference == pytest.approx((y - x).mean())
    assert compare_samples(*runs).difference == pytest.approx((y - x).mean())
    other = compare(runs, metric="match/accuracy:pass_at_2").others[0].slices[0]
    expected = accuracy_of("tuned-epochs/sums.json", "match", reducer="pass_at_2")
    assert other.accuracy == pytest.approx(expected)


@needs_inspect
def test_a_log_without_reductions_has_the_mean_over_the_epochs(tmp_path):
    content = json.loads((DATA / "tuned-epochs" / "sums.json").read_text("utf-8"))
    del content["reductions"]
    file = tmp_path / "sums.json"
    file.write_text(json.dumps(content), "utf-8")
    scores = read_logged(file).documents["correct"]
    assert scores.tolist() == pytest.approx(
        list(by_hand("tuned-epochs/sums.json", "match").values())
    )


CASES = {
    "the first scorer": (None, "match", "accuracy"),
    "a scorer by name": ("lenient/accuracy", "lenient", "accuracy"),
    "one of several scores": ("length", "details", "mean"),
    "a scorer's score": ("details/parity", "details", "accuracy"),
}


@needs_inspect
@pytest.mark.parametrize("case", CASES)
def test_scorers_are_filters_and_scores_metrics(case):
    metric, scorer, name = CASES[case]
    for run in ("base-tasks", "tuned-tasks"):
        documents = read_logged(DATA / run / "graded.eval", metric).documents
        mean = documents["correct"].dropna().mean()
        assert mean == pytest.approx(accuracy_of(f"{run}/graded.eval", scorer, name))


@needs_inspect
def test_partial_credit_and_answers_without_a_score():
    x, y = pair("base-tasks/graded.eval", "tuned-tasks/graded.eval", "lenient")
    assert 0.5 in x
    assert len(x) == 9  # of 12: two errors, and one that the scorer left out
    runs = [DATA / "base-tasks" / "graded.eval", DATA / "tuned-tasks" / "graded.eval"]
    whole = compare(runs, metric="lenient/accuracy").others[0].slices[0]
    assert whole.labelled == 9
    assert whole.accuracy_difference == pytest.approx((y - x).mean())


@needs_inspect
def test_several_tasks_in_a_folder_are_one_run_and_errors_are_counted(capsys):
    store = read_logged(DATA / "base-tasks")
    assert store.model == "mockllm/base"
    assert store.manifest["tasks"] == {"graded": 0, "larger": 2}
    assert store.documents["task"].value_counts().to_dict() == {"larger": 12, "graded": 10}
    assert set(store.documents["subject"]) == {"graded", "odd", "even"}
    assert main(["compare", str(DATA / "base-tasks"), str(DATA / "tuned-tasks")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "22 shared documents, 0 and 2 left out" in text
    assert "2 of 12 samples ended in an error" in text
    assert "logs of Inspect hold no vectors" in text


@needs_inspect
def test_questions_with_other_prompts_are_not_compared():
    with pytest.raises(UsageError, match="different prompts for all 12 shared documents"):
        compare([DATA / "base", DATA / "other-prompts"])


@needs_inspect
def test_another_version_of_a_task_is_said(tmp_path):
    content = json.loads((DATA / "tuned-epochs" / "sums.json").read_text("utf-8"))
    content["eval"]["task_version"] = 3
    content["eval"]["created"] = "2099-01-01T00:00:00+00:00"
    (tmp_path / "tuned.json").write_text(json.dumps(content), "utf-8")
    notes = compare([DATA / "base-epochs", tmp_path]).notes
    assert any(
        "The versions of sums differ: 0 in mockllm/base, 3 in mockllm/tuned" in note
        for note in notes
    )
    shutil.copy(DATA / "base-epochs" / "sums.json", tmp_path / "base.json")
    assert "versions of the task: 0 and 3" in read_accuracies(str(tmp_path)).meaning


@needs_inspect
def test_shuffled_data_are_joined_by_their_content(tmp_path):
    content = json.loads((DATA / "tuned-epochs" / "sums.json").read_text("utf-8"))
    content["eval"]["dataset"]["sample_ids"].reverse()
    content["samples"].reverse()
    file = tmp_path / "sums.json"
    file.write_text(json.dumps(content), "utf-8")
    runs = [DATA / "base-epochs", file]
    whole = compare(runs).others[0].slices[0]
    assert whole == compare([DATA / "base-epochs", DATA / "tuned-epochs"]).others[0].slices[0]


@needs_inspect
def test_a_replay_and_verify_take_the_same_paths(tmp_path, capsys):
    words = ["race", "--replay", str(DATA / "base"), str(DATA / "tuned"), "--format", "json"]
    assert main(words) == 0
    checkpoints = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["label"] for row in checkpoints] == ["mockllm/base", "mockllm/tuned"]
    expected = [accuracy_of(f"{name}/sums.eval", "match") for name in ("base", "tuned")]
    assert [row["score"] for row in checkpoints] == pytest.approx(expected)
    for name in ("base", "tuned"):
        shutil.copy(DATA / name / "sums.eval", tmp_path / f"{name}.eval")
    rated = read_accuracies(str(tmp_path)).rated
    assert {each.name: each.accuracy for each in rated} == pytest.approx(
        dict(zip(("base", "tuned"), expected, strict=True))
    )
    rated = read_accuracies(f"{DATA / 'base-tasks'}:larger").rated
    assert rated[0].accuracy == pytest.approx(accuracy_of("base-tasks/larger.eval", "choice"))
    with pytest.raises(HarnessError, match="holds the samples of 2 runs"):
        read_logged(tmp_path)


@needs_inspect
def test_checkpoints_that_inspect_loaded_have_their_own_names(tmp_path):
    content = json.loads((DATA / "base-epochs" / "sums.json").read_text("utf-8"))
    file = tmp_path / "sums.json"
    names = []
    for model, arguments in (
        ("hf/EleutherAI/pythia-70m", {"revision": "step1000"}),
        ("hf/local", {"model_path": "checkpoints/step-20"}),
    ):
        content["eval"]["model"] = model
        content["eval"]["model_args"] = arguments
        file.write_text(json.dumps(content), "utf-8")
        (rated,) = read_accuracies(str(file)).rated
        names.append((rated.name, rated.revision))
        assert read_logged(file).model == model
    assert names == [("EleutherAI/pythia-70m", "step1000"), ("checkpoints/step-20", None)]


REFUSED = {
    "failed/graded.eval": "status 'error'; run: inspect eval-retry",
    "unscored/sums.eval": "has no scores; run: inspect score",
}


@needs_inspect
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_result_is_refused_with_the_step_that_helps(name):
    with pytest.raises(HarnessError, match=REFUSED[name]):
        read_logged(DATA / name)
    with pytest.raises(UsageError, match=REFUSED[name]):
        read_accuracies(str(DATA / name))


@needs_inspect
def test_an_evaluation_that_was_tried_again_counts_once(tmp_path):
    content = json.loads((DATA / "base-epochs" / "sums.json").read_text("utf-8"))
    (tmp_path / "second.json").write_text(json.dumps(content), "utf-8")
    content["status"] = "cancelled"
    (tmp_path / "first.json").write_text(json.dumps(content), "utf-8")
    assert len(read_logged(tmp_path).documents) == 8
    content["eval"]["task"] = "others"
    (tmp_path / "first.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(HarnessError, match="'cancelled'; run: inspect eval-retry"):
        read_logged(tmp_path)


@needs_inspect
def test_no_changed_log_ends_in_a_traceback(tmp_path):
    rng = random.Random(0)
    sentences = []
    for name in ("base-epochs/sums.json", "base-tasks/larger.eval"):
        whole = (DATA / name).read_bytes()
        file = tmp_path / Path(name).name
        for _ in range(25):
            changed = bytearray(whole)
            if rng.random() < 0.3:
                del changed[rng.randrange(1, len(changed)) :]
            for _ in range(rng.randrange(4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            file.write_bytes(changed)
            for read in (read_logged, lambda file: read_accuracies(str(file))):
                try:
                    read(file)
                except DispersionError as error:
                    sentences.append(str(error))
    assert len(sentences) > 10
    assert all(len(sentence) < 500 for sentence in sentences)


@needs_inspect
def test_messages_are_not_embedded(tmp_path, capsys):
    words = ["embed", "MODEL", "--from-samples", str(DATA / "base"), "-o", str(tmp_path / "store")]
    assert main(words) == 2
    assert "is a log of Inspect" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["base/sums.eval", "base-epochs/sums.json"])
def test_without_inspect_the_command_that_installs_it(name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "inspect_ai" else find(n, *a)
    )
    with pytest.raises(MissingExtraError, match=r"pip install 'lmeval-dispersion\[inspect\]'"):
        read_logged(DATA / name)
    with pytest.raises(MissingExtraError, match="inspect_ai"):
        read_accuracies(str(DATA / name))


@pytest.mark.parametrize(
    ("value", "is_category"),
    [
        ("C", False),
        ("yes", False),
        ("0.5", False),
        ("1e-3", False),
        ("left", True),
        ("nan", True),
        (1, False),
    ],
)
def test_a_category_is_no_score(value, is_category):
    """Inspect counts a text that it does not know as 0: kevinschaul/llm-evals, political-bias."""
    assert inspect._is_category(value) is is_category
