"""A task of lm-eval for tiny models in training."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_training import write_task

from lmeval_dispersion.harness import install


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the task ``words``; lm-eval reads it alone, not its 10,000 files."""
    import datasets
    import lm_eval.evaluator

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", "/none/manager.py")
    there = install.Status("enabled", Path("/none"), 0)
    monkeypatch.setattr(install, "status", lambda: there)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda _results: None)
    return write_task(tmp_path / "tasks")
