"""Default outputs as terminals of 80 and of 120 columns show them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from command import captured
from synthetic import sliced_store

from lmeval_dispersion.cli import main
from lmeval_dispersion.installation import data_folder

ROOT = Path(__file__).resolve().parents[2]
#: Name of the capture: the most lines that the answer may take, and the commands, of which the last is shown.
LOOKS = {
    "screen": (25, ["screen --demo"]),
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
    "compare": (36, ["compare --demo"]),
    "calibrate": (30, ["calibrate demo_runs/sums-30 -o cal.json --where 'doc_id % 2 == 0'"]),
    "estimate": (
        30,
        [
            "calibrate sliced -o cal.json --where 'part == \"labelled\"'",
            "calibrate sliced --from cal.json",
        ],
    ),
    "worst": (40, ["audit --demo --worst 10"]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_default_output_fits_one_look(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "demo_runs").symlink_to(data_folder("demo_runs"))
    if name == "estimate":  # the bundled runs' calibrators are refused
        sliced_store(tmp_path / "sliced")
    most, commands = LOOKS[name]
    for command in commands[:-1]:
        main([*shlex.split(command), "-q"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        capsys.readouterr()
        assert main([*shlex.split(commands[-1]), "-q"]) in (0, 3)
        text = capsys.readouterr().out.replace(str(ROOT), "ROOT")
        lines = text.splitlines()
        assert len(lines) <= most
        assert max(map(len, lines)) <= width
        assert text == captured(f"{name}-{width}", text)
