"""Checkpoints without weights that can be read: the error names what is there and what to screen."""

from __future__ import annotations

import json

import pytest
from checkpoints import header
from lmeval_screener import screen

CARD = "---\nlicense: mit\nbase_model:\n- org/base\n---\n# Title\n"
ADAPTER = json.dumps({"base_model_name_or_path": "org/base"})


def failed(folder):
    (line,) = screen([str(folder)]).failed
    return line


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        ({"adapter_config.json": ADAPTER}, "AdapterOnly", "only an adapter"),
        ({"adapter_model.bin": "", "README.md": CARD}, "AdapterOnly", "only an adapter"),
        ({"README.md": CARD.replace("\n- org", " org")}, "NoSafetensors", "it holds no weights"),
    ],
)
def test_the_base_model_is_named_where_something_names_it(tmp_path, files, code, says):
    # Neither has a tokenizer, which is not what to complain of.
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode() or header([]))
    line = failed(tmp_path)
    assert (line.error, says in line.message) == (code, True)
    assert "screen" in line.message
    assert "org/base, which its " in line.message


@pytest.mark.parametrize("card", ["", "---\n[", "---\nbase_model: 'a b; rm'\n---", "---\n- x\n---"])
def test_a_readme_that_says_nothing_usable_costs_only_the_hint(tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    assert failed(tmp_path).message.endswith("or screen its base model")


def test_pickled_weights_are_named(tmp_path):
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
    assert "only as pytorch_model-00001-of-00002.bin, pytorch_model-00002" in failed(tmp_path).message
