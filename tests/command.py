"""Commands in this process: what only a process of its own can show, a test starts itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from lmeval_screener.checkpoints import account
from lmeval_screener.cli import main

CAPTURES = Path(__file__).parent / "data" / "terminal"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs ``screen-checkpoints``, or another ``main``, in ``tmp_path`` with a Hub and a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(account, "FIRST_BACKOFF", 0.01)

    def run(
        *words: object,
        endpoint: str,
        home: str = "hf",
        offline: bool = False,
        main: Callable[..., int] = main,
    ) -> subprocess.CompletedProcess[str]:
        place = tmp_path / home
        for name, value in {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_OFFLINE": offline,
            "HF_ASSETS_CACHE": str(place / "assets"),
            "HF_HUB_CACHE": str(place / "hub"),
            "HF_TOKEN_PATH": str(place / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        capsys.readouterr()
        try:
            code = main([*map(str, words)])
        except SystemExit as end:
            code = int(end.code or 0)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


def captured(name: str, text: str) -> str:
    """The committed text of a terminal; ``WRITE_CAPTURES=1`` writes ``text`` anew: look at the difference."""
    place = CAPTURES / f"{name}.txt"
    if os.environ.get("WRITE_CAPTURES"):
        place.write_text(text, encoding="utf-8")
    return place.read_text(encoding="utf-8")
