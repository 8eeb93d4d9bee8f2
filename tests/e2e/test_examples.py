"""Every command of examples/README.md is run, and what is shown there is what they print."""

import contextlib
import io
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from lmeval_dispersion.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES.parent / "lmeval_dispersion" / "data" / "demo"
NUMBER = re.compile(r"[-+]?\d+\.\d+")


def sessions():
    """(command, the lines shown after it) of every console block, in order."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def output_of(command, monkeypatch):
    """Standard output and exit code of a command, run in this process."""
    name, *arguments = shlex.split(command, comments=True)
    arguments = [a.replace("../lmeval_dispersion/data/demo", str(DEMO)) for a in arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        if name == "dispersion":
            code = main(arguments)
        else:
            assert name == "python"
            monkeypatch.setattr("sys.argv", arguments)
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
    return out.getvalue(), code


def same(shown, printed):
    """Equal lines, but for two units in the last place of numbers: other processors round otherwise."""
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        unit = 10.0 ** -len(a.split(".")[1])
        if abs(float(a) - float(b)) > 2.5 * unit:
            return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_the_walk_through(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    commands = 0
    for command, shown in sessions():
        printed, code = output_of(command, monkeypatch)
        expected = re.search(r"# exits with (\d)", command)
        assert code == (int(expected[1]) if expected else 0), command
        lines = iter(printed.splitlines())
        for line in shown:
            if line != "…":
                assert any(same(line, other) for other in lines), f"{command} does not print: {line}"
        commands += 1
    assert commands >= 11
    assert (tmp_path / "examples" / "report.html").stat().st_size > 50_000


def test_a_wrong_line_would_be_noticed():
    assert same("a 0.512 b", "a 0.513 b")
    assert not same("a 0.512 b", "a 0.533 b")
    assert not same("a 0.512 b", "a 0.512 c")


def test_the_shipped_runs_are_small():
    size = sum(file.stat().st_size for file in EXAMPLES.rglob("*") if file.is_file())
    assert size < 1_500_000
