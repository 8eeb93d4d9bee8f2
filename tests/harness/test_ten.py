"""The group `dispersion_ten`: its tasks' shots and metrics, and its mean, in which MMLU counts once."""

import json
import math
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import lm_eval
import numpy as np
import pytest
import yaml
from harness_world import ROOT, child, evaluate

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import install
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store import read_store

GROUP = yaml.safe_load((ROOT / "task_configs/ten/_dispersion_ten.yaml").read_text())
NINE = {entry["task"]: entry["num_fewshot"] for entry in GROUP["task"] if "task" in entry}
SUBJECTS = ["mmlu_anatomy_dispersion", "mmlu_astronomy_dispersion", "mmlu_virology_dispersion"]


@pytest.fixture
def small_ten(tmp_path):
    """A folder with the group, in which MMLU has three subjects of 57."""
    mmlu = {
        "group": "mmlu_small",
        "task": SUBJECTS,
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    *nine, of_mmlu = GROUP["task"]
    assert of_mmlu == {"group": "mmlu_dispersion", "num_fewshot": 1}
    ten = GROUP | {"group": "small_ten", "task": [*nine, of_mmlu | {"group": "mmlu_small"}]}
    for name, config in (("mmlu_small", mmlu), ("small_ten", ten)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_each_benchmark_counts_once(world, small_ten, tmp_path):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=[str(install.tasks_path()), str(small_ten)],
        include_defaults=False,
        metadata={"dispersion_store": str(tmp_path / "store")},
    )
    lm = world.lm(batch_size=16)
    results = evaluate(lm, ["small_ten"], manager, num_fewshot=None, limit=7)

    def mean_and_error(name):
        scores = np.array([sample["acc"] for sample in results["samples"][name]], float)
        return scores.mean(), scores.std(ddof=1) / math.sqrt(len(scores))

    figures = [mean_and_error(name) for name in NINE]
    subjects = [sample["acc"] for name in SUBJECTS for sample in results["samples"][name]]
    group = results["groups"]["mmlu_small"]
    assert group["acc,none"] == pytest.approx(np.mean(subjects))
    figures.append((group["acc,none"], group["acc_stderr,none"]))
    ten = results["groups"]["small_ten"]
    assert ten["acc,none"] == pytest.approx(np.mean([mean for mean, _ in figures]), rel=1e-12)
    errors = np.array([error for _, error in figures])
    assert ten["acc_stderr,none"] == pytest.approx(np.sqrt((errors**2).sum()) / 10, rel=1e-9)
    # Shots and metrics are the YAML's, though lm-eval has more of both.
    shots = {name: results["n-shot"][name] for name in results["samples"]}
    assert shots == NINE | dict.fromkeys(SUBJECTS, 1)
    for name in results["samples"]:
        config = results["configs"][name]
        assert [entry["metric"] for entry in config["metric_list"]] == ["acc"], name
        assert "acc_norm,none" not in results["results"][name]
        assert math.isfinite(results["results"][name]["dispersion,none"]), name
        assert results["higher_is_better"][name]["acc"] is True
    one_shot = results["samples"]["arc_easy_dispersion"][0]["arguments"][0][0]
    assert one_shot.count("Question:") == 2
    store = read_store(tmp_path / "store")
    assert set(store.documents["task"]) == {*NINE, *SUBJECTS}


def test_a_mean_of_fewer_than_all_members_is_none(world, small_ten):
    from lm_eval.tasks import TaskManager

    text = (small_ten / "small_ten.yaml").read_text()
    config = yaml.safe_load(text)
    config["task"] = [entry for entry in config["task"] if "arc" in entry.get("task", "")]
    del config["metric_list"]
    config["task"][0]["metric_list"] = [
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}
    ]
    (small_ten / "small_ten.yaml").write_text(yaml.safe_dump(config))
    manager = TaskManager(
        include_path=[str(install.tasks_path()), str(small_ten)], include_defaults=False
    )
    results = evaluate(world.lm(), ["small_ten"], manager, num_fewshot=None, limit=2)
    ten = results["groups"]["small_ten"]
    assert math.isnan(ten["acc,none"])
    assert ten["acc_stderr,none"] == "N/A"


@pytest.fixture
def ten_enabled(in_world, harness_copy):
    """A copy of lm-eval with our tasks enabled; MMLU has three subjects of 57 there, for time."""
    theirs = Path(lm_eval.__file__).parent / "tasks"
    for family in ("anli", "lambada", "openbookqa", "piqa", "truthfulqa", "winogrande", "medmcqa"):
        shutil.copytree(theirs / family, harness_copy / family)
    assert main(["enable"]) == 0
    mmlu = harness_copy / "lmeval_dispersion/mmlu/_mmlu_dispersion.yaml"
    config = yaml.safe_load(mmlu.read_text())
    mmlu.write_text(yaml.safe_dump(config | {"task": SUBJECTS}))
    return str(harness_copy.parents[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_stock_command_runs_the_ten(ten_enabled, tmp_path):
    words = [str(Path(sys.executable).parent / "lm_eval"), "--model", "hf", "--device", "cpu"]
    words += ["--tasks", "dispersion_ten", "--limit", "2", "--batch_size", "16"]
    words += ["--model_args", f"pretrained={data_folder('demo') / 'sums-20'},dtype=float32"]
    done = child(*words, "--output_path", tmp_path, path=ten_enabled)
    results = json.loads(next(tmp_path.glob("*/results_*.json")).read_text())
    members = [*NINE, "mmlu_dispersion"]
    assert sorted(results["group_subtasks"]["dispersion_ten"]) == sorted(members)
    figures = [results["results"][name]["acc,none"] for name in members]
    ten = results["groups"]["dispersion_ten"]
    assert ten["acc,none"] == pytest.approx(np.mean(figures))
    assert any(line.startswith("|dispersion_ten") for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_midtraining_ends_with_the_benchmarks_of_each_arm(
    in_world, ten_enabled, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(in_world.parent / "datasets-cache"))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([ten_enabled, str(ROOT), str(ROOT / "screener")])
    )
    midtrain = runpy.run_path(str(ROOT / "examples" / "midtrain.py"))
    (tmp_path / "a.txt").write_text("\n\n".join(f"{i} + 1 = {i + 1}." for i in range(150)))
    words = [str(data_folder("demo") / "sums-20"), str(tmp_path / "a.txt"), str(tmp_path / "out")]
    words += ["--recipe=tiny", "--arm=push_away", "--limit=4"]
    tasks = ["arc_easy_dispersion", "piqa_dispersion"]
    midtrain["main"]([*words, "--tasks", ",".join(tasks)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3
    ranks = []
    for line, folder in zip(lines[2:], ("start", "base-0", "push_away-0.1-0"), strict=True):
        file = next((tmp_path / "out" / folder / "lm-eval").glob("*/results_*.json"))
        results = json.loads(file.read_text())["results"]
        mean = 100 * np.mean([results[name]["acc,none"] for name in tasks])
        matched = re.fullmatch(
            r"\w+: accuracy (\S+) % over 2 benchmarks, mean rank (\S+) of 3(, p \S+ against \w+)*",
            line,
        )
        assert float(matched[1]) == pytest.approx(mean, abs=0.006)
        ranks.append(float(matched[2]))
    assert sum(ranks) == pytest.approx(1 + 2 + 3, abs=0.02)
