"""Tokenizer files: which row is which piece."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import DATA, REFERENCE, anything, changed, paths, tokenizer_json, vocabulary


def test_the_order_of_a_file_does_not_matter():
    data = json.loads((DATA / "smollm2.json").read_bytes())
    data["model"] = dict(reversed(data["model"].items()))
    words = Vocabulary.from_tokenizer_json(
        json.dumps(dict(reversed(data.items())), indent=2).encode()
    )
    code = load_token_set("code")
    assert resolve_tokens(code, REFERENCE, words) == resolve_tokens(
        code, REFERENCE, vocabulary("smollm2")
    )


def test_added_tokens_take_their_text_before_the_model_does():
    vocab = {"Ġcat": 0, "Ġcatfish": 1, "Ġdog": 3, "Ġowl": 4, "Ġelk": 5}
    added = [
        {"id": 10, "content": "7", "special": False},
        {"id": 11, "content": "cat", "special": False},
        {"id": 12, "content": "og", "special": False, "single_word": True},
        {"id": 13, "content": " owl", "special": True},
        {"id": 14, "content": "", "special": False},
        {"id": 15, "content": "elk", "special": False, "lstrip": True},
    ]
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab, added))
    assert [words.row(text) for text in (" cat", " catfish", " owl")] == [None] * 3
    # The last takes the space before it too.
    found = {"7": (10, "7"), " dog": (3, "Ġdog"), " elk": (15, " elk"), "elk": (15, "elk")}
    assert {text: words.row(text) for text in found} == found


@pytest.mark.parametrize("piece", ["Ġcat", "▁cat"])
def test_vocab_json_shows_its_kind_by_its_pieces(piece):
    content = json.dumps({piece: 0, "cat": 1}).encode()
    assert Vocabulary.from_file("vocab.json", content).row(" cat") == (0, piece)


@pytest.mark.parametrize(
    ("pre_tokenizer", "scheme"),
    [
        ([{"type": "ByteLevel"}], "irregular"),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], "single digits"),
        ([{"type": "Digits", "individual_digits": False}, {"type": "ByteLevel"}], "irregular"),
    ],
)
def test_pre_tokenizer_decides_the_digit_scheme(pre_tokenizer, scheme):
    vocab = {str(n): n for n in range(40)}
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizer}}
    assert Vocabulary.from_tokenizer_json(tokenizer_json(vocab, **parts)).digit_scheme() == scheme


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "expected JSON in tokenizer.json"),
        (b"[1]", "expected a mapping in tokenizer.json, got list"),
        (b'{"a": 1,}', "expected JSON"),
        (b'{"model": 3}', "expected `model` to be a mapping"),
        (b"\xff", "expected JSON"),
        (b"{}", "expected `model`"),
        (b"[" * 100_000, "expected JSON"),
        (tokenizer_json({}), "hold tokens"),
        (tokenizer_json({"a": "1"}), "id for the token 'a', got '1'"),
        (tokenizer_json({"a": True}), "an id for the token"),
        (tokenizer_json({"a": -1}), "an id for the token"),
        (tokenizer_json([["a"]]), "pairs of token and score"),
        (
            tokenizer_json({}, model={"type": "BPE", "vocab": {"a": 1}, "merges": ["a"]}),
            "list pairs of",
        ),
        (
            tokenizer_json({}, model={"type": "BPE", "vocab": {"a": 1}, "merges": [7]}),
            "list pairs of",
        ),
        (
            tokenizer_json({"a": 1}, [{"content": "a", "id": 2}]),
            "has id 2, but the vocabulary gives it the id 1",
        ),
        (tokenizer_json({"a": 1}, [{"content": "x"}]), "`added_tokens` with content and id"),
        (
            tokenizer_json({"a": 1}, pre_tokenizer={"type": "BertPreTokenizer"}),
            "byte-level or SentencePiece",
        ),
    ],
)
def test_bad_tokenizer_files(content, message):
    with pytest.raises(ScreeningError, match=re.escape(message)) as error:
        Vocabulary.from_tokenizer_json(content)
    assert error.value.code == "BadTokenizer"


@settings(max_examples=150)
@given(st.data())
def test_any_change_to_a_tokenizer_is_understood_or_refused(data):
    added = [{"id": 3, "content": "x", "special": False, "single_word": False}]
    sequence = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}
    tree = json.loads(tokenizer_json({"Ġcat": 0, "7": 1}, added, pre_tokenizer=sequence))
    tree = changed(tree, data.draw(st.sampled_from(paths(tree))), data.draw(anything))
    code = "BadTokenizer"
    try:
        words = Vocabulary.from_tokenizer_json(json.dumps(tree).encode())
        words.row(" cat")
        words.digit_scheme()
    except ScreeningError as error:
        code = error.code
    assert code == "BadTokenizer"
