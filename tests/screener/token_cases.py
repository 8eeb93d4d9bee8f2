"""Shared by the tests of tokens: seven real tokenizers (trimmed, see tests/data), files, drawn changes."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
TOKENIZERS = sorted(path.stem for path in DATA.glob("*.json"))
REFERENCE = load_token_set("reference", "reference")


def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.from_tokenizer_json((DATA / f"{name}.json").read_bytes())


def tokenizer_json(
    vocab: object, added: list[dict[str, object]] | None = None, **parts: object
) -> bytes:
    data = {
        "added_tokens": added or [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel"},
        "decoder": None,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return json.dumps(data | parts).encode()


def own_set(folder: Path, text: str) -> str:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


TINY = """
schema: 1
name: tiny
role: domain
default_groups: [words]
min_tokens: 2
groups:
  words: {variant: space, items: [cat, dog, axolotl]}
  more: {variant: bare, optional: true, items: ["7", "8"]}
"""


plain = [None, True, False, -1, 0, 2, 1.5, float("nan"), "", "a", " b", "space", "▁"]
keys = ["type", "content", "id", "items", "a", "vocab", "model"]
anything = st.recursive(
    st.sampled_from(plain),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths(tree: object, prefix: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where something could be changed in a tree of mappings and lists."""
    keys = (
        list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    )
    return [prefix, *(path for key in keys for path in paths(tree[key], (*prefix, key)))]


def changed(tree: object, path: tuple[object, ...], value: object) -> object:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy
