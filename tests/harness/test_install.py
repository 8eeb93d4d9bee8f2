"""`dispersion enable`, `off`, `status` and `path`: on a copy of lm-eval, as a user runs them."""

import re
from pathlib import Path

import pytest
import yaml

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.failures import failure_sentence, near_tasks
from lmeval_dispersion.harness.records import METRICS


def test_enable_status_and_undo_leave_no_trace(harness_copy, capsys):
    def check(*arguments, says):
        assert main([*arguments]) == 0
        assert re.match(says, capsys.readouterr().out)

    before = sorted(harness_copy.rglob("*"))
    target = harness_copy / "lmeval_dispersion"
    check("enable", "status", says="disabled: `dispersion enable` would write")
    check("enable", says=rf"enabled: \d+ task files in {target}\n")
    written = {path: path.read_text() for path in target.rglob("*.yaml")}
    assert len(written) == len(install.task_files())
    anatomy = written[target / "mmlu/mmlu_anatomy_dispersion.yaml"]
    assert "include: ../../mmlu/default/mmlu_anatomy.yaml" in anatomy
    check("enable", says="already enabled")
    check("enable", "status", says="enabled:")
    (target / "arc/arc_easy_dispersion.yaml").write_text("task: old\n")
    (target / "arc/mine.txt").write_text("a user's own file\n")
    check("enable", "status", says="out of date")
    check("enable", says="enabled")
    assert {path: path.read_text() for path in target.rglob("*.yaml")} == written
    (target / "arc/mine.txt").unlink()
    check("enable", "off", says="disabled: removed")
    check("enable", "off", says="already disabled")
    assert sorted(harness_copy.rglob("*")) == before


def test_read_only_installations_get_the_other_ways(harness_copy, capsys):
    # A file where the folder would go stops root as well, whom permissions do not stop.
    (harness_copy / "lmeval_dispersion").write_text("")
    assert main(["enable"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be written" in said
    assert '--include_path "$(dispersion enable path)"`' in said


def test_without_lm_eval_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(install, "find_spec", lambda _: None)
    assert main(["enable"]) == 1
    assert "pip install 'lmeval-dispersion[models]'" in capsys.readouterr().err


def test_tasks_path_names_lm_evals_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = install.tasks_path()
    assert folder == install.tasks_path()
    assert folder.parent == tmp_path / "lmeval-dispersion"
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.yaml")}
    assert files.keys() == set(install.task_files())
    for path in files.values():
        for include in re.findall(r"include: (\S+)", path.read_text()):
            assert (path.parent / include).is_file(), (path, include)
    others = [name for name in install.task_names() if not name.endswith("_dispersion")]
    assert others == ["dispersion_ten", "quail"]


def test_every_task_is_a_stock_one_with_our_class_and_every_group_has_our_metrics():
    def read(text):
        return yaml.safe_load(text.replace("!function ", ""))

    files = {
        name: read(text)
        for name, text in install.task_files().items()
        if name != "quail/quail.yaml"
    }
    tasks = {name: config for name, config in files.items() if "group" not in config}
    for name, config in tasks.items():
        included = Path(config["include"])
        stock_task = included.parent.name if included.stem == "default" else included.stem
        assert config["task"] == Path(name).stem == f"{stock_task}_dispersion"
        assert config["class"] == "lmeval_dispersion.harness.DispersionTask"
        assert config.keys() <= {"include", "task", "tag", "class"}
    known = {*install.task_names(), *(config.get("tag") for config in tasks.values())}
    groups = [config for config in files.values() if "group" in config]
    ten = files["ten/_dispersion_ten.yaml"]  # test_ten.py
    groups.remove(ten)
    assert {entry.get("task", entry.get("group")) for entry in ten["task"]} <= known
    for config in groups:
        assert [entry["metric"] for entry in config["aggregate_metric_list"][1:]] == [*METRICS]
        assert {child for child in config["task"] if isinstance(child, str)} <= known
    # MMLU's subjects and metabench are listed by name, metabench's groups as well.
    theirs = install.harness_tasks()
    stock = {path.stem: read(path.read_text()) for path in theirs.glob("metabench/*.yaml")}
    subjects = {path.stem for path in theirs.glob("mmlu/default/mmlu_*.yaml")}
    assert {f"{name}_dispersion" for name in {*stock, *subjects}} <= known
    ours = {config["group"]: config for config in groups}
    for wanted in (config for config in stock.values() if "group" in config):
        group = ours[f"{wanted['group']}_dispersion"]
        assert group["task"] == [f"{task}_dispersion" for task in wanted["task"]]
        assert group["aggregate_metric_list"][:1] == wanted["aggregate_metric_list"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("4 GB"), "out of memory: 4 GB; lower batch_size"),
        (
            RuntimeError("CUDA out of memory. Tried 2 GiB.\nmore"),
            "out of memory: CUDA out of memory",
        ),
        (ValueError("Tasks not found: mmlu_dispertion"), "did you mean mmlu_dispersion"),
        (ValueError("Tasks not found: qqq"), "`dispersion run ls tasks` lists all tasks"),
        (
            ValueError("Duplicate task 'a': found in both 'g' and 'a'"),
            "'g' and 'a'; name each task once",
        ),
        (OSError("x/y is not a valid model identifier.\n"), "check the name of the model"),
        (KeyError("x"), ""),  # a defect keeps its traceback
        (ValueError("anything else"), ""),
    ],
)
def test_failures_that_users_meet_are_one_sentence(error, expected):
    sentence = failure_sentence(error) or ""
    assert expected in sentence
    assert "\n" not in sentence
    assert bool(sentence) == bool(expected)


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        (["tinyMMUL"], "; did you mean tinyMMLU?"),
        (["LAMBADA"], "; did you mean lambada?"),
        (["gsm8kk", "arc_easyy"], "; did you mean gsm8k, arc_easy?"),
        (["zzzz"], "; `dispersion run ls tasks` lists all tasks"),
    ],
)
def test_tasks_that_do_not_exist_bring_one_hint(names, hint):
    assert near_tasks(names, ["tinyMMLU", "lambada", "gsm8k", "arc_easy", "mmlu"]) == hint
