"""docs/reference/token-sets.md and the script that trimmed the tokenizers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from lmeval_screener.targets.selection import load_family
from lmeval_screener.tokens import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import DATA, own_set, vocabulary

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "token-sets.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch):
    """A script of the repository by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def test_trimming_a_tokenizer_changes_no_resolution(script):
    trim = script("trim_tokenizers")
    small = Vocabulary.from_tokenizer_json(trim.trimmed((DATA / "smollm2.json").read_bytes()))
    for selection in trim.selections():
        assert trim.outcome(selection, small) == trim.outcome(selection, vocabulary("smollm2"))


def test_the_documented_counts_are_what_the_script_prints(script):
    assert script("token_set_counts").table(DATA) in PAGE


def test_the_documented_files_are_valid(tmp_path):
    domain, families = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    path = own_set(tmp_path, domain.replace("min_tokens: 20", "min_tokens: 2"))
    assert list(load_token_set(f"{path}:elements,symbols").groups) == ["elements", "symbols"]
    (tmp_path / "families.yaml").write_text(families)
    assert load_family("ours", tmp_path / "families.yaml").scales == ("1B",)
