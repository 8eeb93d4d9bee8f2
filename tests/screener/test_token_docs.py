"""docs/reference/token-sets.md and the script that trimmed the tokenizers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lmeval_screener.targets.selection import load_family
from lmeval_screener.tokens import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import (
    DATA,
    own_set,
    vocabulary,
)


def test_trimming_a_tokenizer_changes_no_resolution(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    monkeypatch.delitem(sys.modules, "trim_tokenizers", raising=False)
    import trim_tokenizers as script

    whole = (DATA / "smollm2.json").read_bytes()
    small = Vocabulary.from_tokenizer_json(script.trimmed(whole))
    for selection in script.selections():
        assert script.outcome(selection, small) == script.outcome(selection, vocabulary("smollm2"))


def test_the_documented_counts_are_what_the_script_prints(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "scripts"))
    monkeypatch.delitem(sys.modules, "token_set_counts", raising=False)
    import token_set_counts as script

    assert script.table(DATA) in (root / "docs" / "reference" / "token-sets.md").read_text(encoding="utf-8")


def test_the_documented_files_are_valid(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "reference" / "token-sets.md").read_text(encoding="utf-8")
    domain, families = re.findall(r"```yaml\n(.*?)```", text, re.S)
    path = own_set(tmp_path, domain.replace("min_tokens: 20", "min_tokens: 2"))
    assert list(load_token_set(f"{path}:elements,symbols").groups) == ["elements", "symbols"]
    (tmp_path / "families.yaml").write_text(families)
    assert load_family("ours", tmp_path / "families.yaml").scales == ("1B",)
