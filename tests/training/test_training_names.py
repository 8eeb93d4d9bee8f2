"""The public names of lmeval_dispersion.training are the documented ones, and cost nothing before use."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmeval_dispersion import training

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "training.md").read_text(encoding="utf-8")


def test_public_names_are_the_documented_ones():
    table = PAGE.split("## Names", 1)[1].split("\n## ", 1)[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert sorted(documented) == sorted(training.__all__)
    imported = re.findall(r"^from lmeval_dispersion\.training import (.+)$", PAGE, re.M)
    assert imported
    assert {name for line in imported for name in line.split(", ")} <= {*training.__all__, "losses"}


def test_public_names_are_found_and_cost_nothing_before():
    for name in training.__all__:
        assert getattr(training, name).__name__ == name
    with pytest.raises(AttributeError, match="Regulariser"):
        _ = training.Regulariser
    code = "import sys, lmeval_dispersion.training.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
