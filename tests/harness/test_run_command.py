"""``dispersion run`` in this process: users' own tasks, second runs, and failures in a sentence."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmeval_dispersion.cli import main
from lmeval_dispersion.harness import install, saving
from lmeval_dispersion.store import read_store

pytestmark = pytest.mark.usefixtures("in_world")

OWN = """
include: {theirs}/arc/arc_easy.yaml
task: my_questions
class: !function lmeval_dispersion.harness.DispersionTask
"""


@pytest.fixture(autouse=True)
def _quick_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """lm-eval reads all of its 10,000 task files before a run: here it has none of its own."""
    import lm_eval.tasks.manager as manager

    (tmp_path / "no-tasks").mkdir()
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "no-tasks/manager.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield
    saving.written.clear()
    logger.handlers[:], logger.level = before


def run(model: Path, tasks: str, store: Path, *more: str) -> int:
    arguments = ["--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"]
    arguments += ["--tasks", tasks, "--limit", "3", "--metadata", f"dispersion_store={store}"]
    return main(["run", *arguments, *more])


def test_a_users_own_tasks_run_beside_ours(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mine.yaml").write_text(OWN.format(theirs=install.harness_tasks()))
    tasks = "my_questions,arc_easy_dispersion"
    assert run(model_folder, tasks, tmp_path / "store", "--include_path", str(tmp_path / "own")) == 0
    mine = read_store(tmp_path / "store/my_questions")
    ours = read_store(tmp_path / "store/arc_easy_dispersion")
    assert mine.documents["doc_hash"].equals(ours.documents["doc_hash"])


def test_a_second_run_into_a_store_says_how_to_go_on(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_folder, "arc_easy_dispersion", tmp_path / "store") == 0
    capsys.readouterr()
    assert run(model_folder, "arc_easy_dispersion", tmp_path / "store") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == (
        f"dispersion run: {tmp_path / 'store/arc_easy_dispersion'} holds a finished store already: read it "
        "with `dispersion audit`, remove it, or choose another place for this run (dispersion_store, -o)"
    )


def test_a_missing_chat_template_is_a_sentence(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model_folder, plain)
    (plain / "chat_template.jinja").unlink()
    assert run(plain, "arc_easy_dispersion", tmp_path / "store", "--apply_chat_template") == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert (
        said.strip()
        .splitlines()[-1]
        .endswith("; leave --apply_chat_template out, or use a model whose tokenizer has a template")
    )
