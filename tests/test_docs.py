"""What the documentation shows is what the programs say today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_reference_holds_every_command_and_its_options(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from reference_pages import every_help

    page = (ROOT / "docs/reference/commands.md").read_text()
    shown = dict(re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)```", page, re.DOTALL | re.MULTILINE))
    # argparse's headings differ a little between versions of Python; the options do not.
    options = {title: re.findall(r"--[a-z-]+", text) for title, text in every_help()}
    assert {title: re.findall(r"--[a-z-]+", text) for title, text in shown.items()} == options


def test_the_example_of_dispersion_prints_what_the_page_shows():
    page = (ROOT / "docs/explanation/dispersion.md").read_text()
    (code, output), *_ = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (output, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
