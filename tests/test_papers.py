"""Every small variant of docs/results/papers.md runs, a test for each section."""

import re
import shutil
from pathlib import Path

import pytest
from test_guides import run

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "papers.md"
SECTIONS = re.findall(
    r"^## (.+?)\n.*?^```console\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
)
LIGHT = ("RD: hard examples without labels", "RD: choosing a model")


def sections():
    """Those that load or train a model are slow."""
    for title, commands in SECTIONS:
        marks = [] if title in LIGHT else [pytest.mark.slow]
        yield pytest.param(commands, id=title, marks=marks)


def test_every_section_has_a_small_variant():
    titles = re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert [title for title, _ in SECTIONS] == titles


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("commands", [*sections()])
def test_the_small_variants_run(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "lmeval_dispersion").symlink_to(ROOT / "lmeval_dispersion")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    texts = [file.read_text("utf-8") for file in sorted((ROOT / "docs").glob("*/*.md"))]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts), "utf-8")
    code = [file.read_text("utf-8") for file in sorted(ROOT.glob("lmeval_dispersion/*.py"))]
    (tmp_path / "code.txt").write_text("\n\n".join(code), "utf-8")
    for line in commands.splitlines():
        printed, status = run(line.removeprefix("$ "), monkeypatch)
        assert status == 0, line
        assert printed.strip(), line
