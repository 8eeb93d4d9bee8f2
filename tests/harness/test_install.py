"""`dispersion enable`, with `--undo`, `--status` and `--path`: on a copy of lm-eval, as a user runs them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness_world import environment

from lmeval_dispersion.harness import install
from lmeval_dispersion.harness.cli import failure_sentence

MAIN = "from lmeval_dispersion.cli import main; raise SystemExit(main())"
OURS = Path(install.__file__).resolve().parents[2]


def dispersion(*arguments: str, path: Path | str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The command, with lm-eval found at ``path`` first."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAIN, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(PYTHONPATH=f"{path}:{OURS}", XDG_CACHE_HOME=str(cache)),
    )


@pytest.fixture
def harness_copy(tmp_path: Path) -> Path:
    """A folder with a lm_eval package that holds no more than its tasks' skeleton."""
    package = tmp_path / "site" / "lm_eval"
    for family in ("arc", "mmlu/default"):
        shutil.copytree(install.harness_tasks() / family, package / "tasks" / family)
    (package / "__init__.py").touch()
    return package.parent


def test_enable_status_and_disable_leave_no_trace(harness_copy: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return dispersion(*arguments, path=harness_copy, cache=tmp_path / "cache")

    before = sorted(harness_copy.rglob("*"))
    target = harness_copy / "lm_eval/tasks/lmeval_dispersion"
    assert run("enable", "--status").stdout.startswith("disabled: `dispersion enable` would write")
    first = run("enable")
    assert first.returncode == 0, first.stderr
    assert re.match(rf"enabled: \d+ task files in {target}\n", first.stdout)
    written = {path: path.read_text() for path in target.rglob("*.yaml")}
    assert len(written) == len(install.task_files())
    assert (
        "include: ../../mmlu/default/mmlu_anatomy.yaml"
        in written[target / "mmlu/mmlu_anatomy_dispersion.yaml"]
    )
    assert run("enable").stdout.startswith("already enabled")
    assert run("enable", "--status").stdout.startswith("enabled:")
    (target / "arc/arc_easy_dispersion.yaml").write_text("task: old\n")
    (target / "arc/mine.txt").write_text("a user's own file\n")
    assert run("enable", "--status").stdout.startswith("out of date")
    assert run("enable").stdout.startswith("enabled")
    assert {path: path.read_text() for path in target.rglob("*.yaml")} == written
    assert (target / "arc/mine.txt").exists()
    (target / "arc/mine.txt").unlink()
    assert run("enable", "--undo").stdout.startswith("disabled: removed")
    assert run("enable", "--undo").stdout.startswith("already disabled")
    assert sorted(harness_copy.rglob("*")) == before


def test_read_only_installations_get_the_other_ways(harness_copy: Path, tmp_path: Path) -> None:
    # A file where the folder would go stops root as well, whom permissions do not stop.
    (harness_copy / "lm_eval/tasks/lmeval_dispersion").write_text("")
    done = dispersion("enable", path=harness_copy, cache=tmp_path / "cache")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be written" in done.stderr
    assert (
        'use `dispersion run` in place of `lm_eval`, or `--include_path "$(dispersion enable --path)"`'
        in done.stderr
    )


def test_without_lm_eval_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("")
    done = dispersion("enable", path=tmp_path, cache=tmp_path / "cache")
    assert done.returncode == 1
    assert "pip install 'lmeval-dispersion[models]'" in done.stderr


def test_tasks_path_names_lm_evals_files_by_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = install.tasks_path()
    assert folder == install.tasks_path()
    assert folder.parent.parent == tmp_path / "lmeval-dispersion"
    for path in folder.rglob("*.yaml"):
        for include in re.findall(r"include: (\S+)", path.read_text()):
            assert (path.parent / include).is_file(), (path, include)
    assert len(list(folder.rglob("*.yaml"))) == len(install.task_files())


def test_the_record_lists_the_files_while_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for family in ("arc", "mmlu/default"):
        shutil.copytree(install.harness_tasks() / family, site / "lm_eval/tasks" / family)
    (site / "lm_eval/__init__.py").touch()
    info = site / "lmeval_dispersion-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmeval-dispersion\nVersion: 0.1\n")
    (info / "RECORD").write_text(
        "lmeval_dispersion/__init__.py,,\nlmeval_dispersion-0.1.dist-info/RECORD,,\n"
    )
    cache = tmp_path / "cache"
    original = (info / "RECORD").read_text()
    first = dispersion("enable", path=site, cache=cache)
    assert first.returncode == 0
    assert "uninstalling leaves" not in first.stderr
    rows = [line.split(",") for line in (info / "RECORD").read_text().splitlines()]
    entered = {row[0] for row in rows if row[0].startswith("lm_eval/tasks/lmeval_dispersion/")}
    assert len(entered) == len(install.task_files()) + 1
    assert all((site / name).is_file() for name in entered)
    before = (info / "RECORD").read_text()
    assert dispersion("enable", path=site, cache=cache).returncode == 0
    assert (info / "RECORD").read_text() == before
    assert dispersion("enable", "--undo", path=site, cache=cache).returncode == 0
    assert (info / "RECORD").read_text() == original


def test_the_record_stays_as_it_is_where_lm_eval_is_elsewhere(harness_copy: Path, tmp_path: Path) -> None:
    """pip and uv skip entries that leave the environment, so there are none, and enabling says so."""
    info = tmp_path / "ours" / "lmeval_dispersion-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmeval-dispersion\nVersion: 0.1\n")
    (info / "RECORD").write_text("lmeval_dispersion-0.1.dist-info/RECORD,,\n")
    done = dispersion("enable", path=f"{info.parent}:{harness_copy}", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert (info / "RECORD").read_text() == "lmeval_dispersion-0.1.dist-info/RECORD,,\n"
    assert "uninstalling leaves this folder: run `dispersion enable --undo` before it" in done.stderr


def test_every_name_ends_in_dispersion_except_the_stock_form_of_quail() -> None:
    assert [name for name in install.task_names() if not name.endswith("_dispersion")] == ["quail"]


def test_misspelt_tasks_are_refused_with_the_nearest(tmp_path: Path) -> None:
    done = dispersion("run", "--tasks", "arc_eazy_dispersion,quail", path=tmp_path, cache=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "dispersion run: there is no task 'arc_eazy_dispersion'; did you mean arc_easy_dispersion, "
    )
    assert done.stderr.count("\n") == 1


def test_run_with_a_users_own_tasks_wants_enabling_first(tmp_path: Path) -> None:
    done = dispersion(
        "run", "--tasks", "boolq_dispersion", "--include_path", str(tmp_path), path=tmp_path, cache=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.endswith("run `dispersion enable` first\n")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("4 GB"), "out of memory: 4 GB; lower --batch_size"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
            "out of memory: CUDA out of memory",
        ),
        (ValueError("Tasks not found: mmlu_dispertion"), "did you mean mmlu_dispersion"),
        (ValueError("Tasks not found: qqq"), "`dispersion run ls tasks` lists what there is"),
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


def test_an_lm_eval_with_task_plugins_finds_the_tasks_by_the_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    metadata = (Path(install.__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    (value,) = re.findall(r'\[project.entry-points."lm_eval.tasks"\]\n\w+ = "([\w.]+)"', metadata)
    # As lm-eval resolves it: the folder of a package, found and not imported.
    monkeypatch.delitem(sys.modules, value.rpartition(".")[0], raising=False)
    spec = importlib.util.find_spec(value)
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    assert folder == install.tasks_path()
    assert len(list(folder.rglob("*.yaml"))) == len(install.task_files())
