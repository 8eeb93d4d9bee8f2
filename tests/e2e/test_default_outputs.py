"""Default outputs as terminals of 80 and of 120 columns show them."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path

import pytest
from command import captured

from lmeval_dispersion.cli import main

ROOT = Path(__file__).resolve().parents[2]
#: Name of the capture: the most lines that the answer may take, and the commands, of which the last is shown.
LOOKS = {
    "screen": (26, ["screen --demo"]),
    "shortlist": (26, ["screen --demo --shortlist 3"]),
    "verify": (
        18,
        [
            "screen --demo --shortlist 3 --audit-sample 3 --emit list",
            "screen --demo -o measured.csv",
            "verify list measured.csv",
        ],
    ),
    "registry": (30, ["screen --demo --registry seen.db", "registry query seen.db"]),
    "audit": (40, ["audit --demo"]),
    "compare": (30, ["compare mmlu_before mmlu_after"]),
    "calibrate": (30, ["calibrate mmlu_after -o cal.json --where 'doc_id % 2 == 0'"]),
    "predict": (
        30,
        [
            "calibrate mmlu_after -o cal.json --where 'doc_id % 2 == 0'",
            "predict cal.json mmlu_after --force",
        ],
    ),
    "worst": (40, ["audit mmlu_after --worst 10"]),
}


class Terminal(io.StringIO):
    """Standard output that says that it is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("name", LOOKS)
def test_a_default_output_fits_one_look(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    for store in ("mmlu_before", "mmlu_after"):
        (tmp_path / store).symlink_to(ROOT / "examples" / store)
    most, commands = LOOKS[name]
    for command in commands[:-1]:
        main([*shlex.split(command), "-q"])
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            assert main([*shlex.split(commands[-1]), "-q"]) in (0, 3)
        text = terminal.getvalue().replace(str(ROOT), "ROOT")
        lines = text.splitlines()
        assert len(lines) <= most
        assert max(map(len, lines)) <= width
        assert text == captured(f"{name}-{width}", text)
