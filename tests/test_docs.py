"""What the documentation shows is what the programs say today."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_options_of_the_screener_are_those_of_its_help():
    shown = re.search(r"<!-- help -->\n```\n(.*?)```", (ROOT / "docs/reference/screening.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-m", "lmeval_screener", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    # argparse's headings differ a little between versions of Python; the options do not.
    assert shown
    assert re.findall(r"--[a-z-]+", shown[1]) == re.findall(r"--[a-z-]+", done.stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
