"""`dispersion enable`, with `--undo`, `--status` and `--path`: on a copy of lm-eval, as a user runs them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.cli import failure_sentence


@pytest.fixture
def harness_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks as lm-eval has it, with two families; ours find it in place of the real one."""
    tasks = tmp_path / "site/lm_eval/tasks"
    for family in ("arc", "mmlu/default"):
        shutil.copytree(install.harness_tasks() / family, tasks / family)
    monkeypatch.setattr(install, "harness_tasks", lambda: tasks)
    return tasks


def test_enable_status_and_undo_leave_no_trace(
    harness_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main([*arguments]) == 0
        return capsys.readouterr().out

    before = sorted(harness_copy.rglob("*"))
    target = harness_copy / "lmeval_dispersion"
    assert said("enable", "--status").startswith("disabled: `dispersion enable` would write")
    assert re.match(rf"enabled: \d+ task files in {target}\n", said("enable"))
    written = {path: path.read_text() for path in target.rglob("*.yaml")}
    assert len(written) == len(install.task_files())
    anatomy = written[target / "mmlu/mmlu_anatomy_dispersion.yaml"]
    assert "include: ../../mmlu/default/mmlu_anatomy.yaml" in anatomy
    assert said("enable").startswith("already enabled")
    assert said("enable", "--status").startswith("enabled:")
    (target / "arc/arc_easy_dispersion.yaml").write_text("task: old\n")
    (target / "arc/mine.txt").write_text("a user's own file\n")
    assert said("enable", "--status").startswith("out of date")
    assert said("enable").startswith("enabled")
    assert {path: path.read_text() for path in target.rglob("*.yaml")} == written
    assert (target / "arc/mine.txt").exists()
    (target / "arc/mine.txt").unlink()
    assert said("enable", "--undo").startswith("disabled: removed")
    assert said("enable", "--undo").startswith("already disabled")
    assert sorted(harness_copy.rglob("*")) == before


def test_read_only_installations_get_the_other_ways(
    harness_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A file where the folder would go stops root as well, whom permissions do not stop.
    (harness_copy / "lmeval_dispersion").write_text("")
    assert main(["enable"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be written" in said
    assert (
        'use `dispersion run` in place of `lm_eval`, or `--include_path "$(dispersion enable --path)"`'
        in said
    )


def test_without_lm_eval_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "find_spec", lambda _: None)
    assert main(["enable"]) == 1
    assert "pip install 'lmeval-dispersion[models]'" in capsys.readouterr().err


def test_tasks_path_names_lm_evals_files_by_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = install.tasks_path()
    assert folder == install.tasks_path()
    assert folder.parent == tmp_path / "lmeval-dispersion"
    for path in folder.rglob("*.yaml"):
        for include in re.findall(r"include: (\S+)", path.read_text()):
            assert (path.parent / include).is_file(), (path, include)
    assert len(list(folder.rglob("*.yaml"))) == len(install.task_files())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("4 GB"), "out of memory: 4 GB; lower --batch_size"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
            "out of memory: CUDA out of memory",
        ),
        (ValueError("Tasks not found: mmlu_dispertion"), "did you mean mmlu_dispersion"),
        (ValueError("Tasks not found: qqq"), "`dispersion run ls tasks` lists them"),
        (
            OSError("x/y is not a local folder and is not a valid model identifier.\n"),
            "check the name of the model",
        ),
    ],
)
def test_failures_that_users_meet_are_one_sentence(error: Exception, expected: str) -> None:
    sentence = failure_sentence(error)
    assert sentence is not None
    assert expected in sentence
    assert "\n" not in sentence


def test_defects_keep_their_traceback() -> None:
    assert failure_sentence(KeyError("x")) is None
    assert failure_sentence(ValueError("anything else")) is None


def test_the_stubs_match_this_lm_eval() -> None:
    """scripts/mmlu_stubs.py would write what is there: the harness's subjects, groups and versions."""
    theirs = install.harness_tasks() / "mmlu" / "default"
    files = install.task_files()
    subjects = sorted(path.name.removesuffix(".yaml") for path in theirs.glob("mmlu_*.yaml"))
    assert [n for n in subjects if f"mmlu/{n}_dispersion.yaml" not in files] == []
    assert sum(name.startswith("mmlu/mmlu_") for name in files) == len(subjects) == 57
    assert [name for name in install.task_names() if not name.endswith("_dispersion")] == ["quail"]
