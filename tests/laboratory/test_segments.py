"""Segments: what is cut, drawn, counted, and from where."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import tiny_models

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.analysis import _report, draw_segments
from lmeval_dispersion.laboratory.causal_model import prefix_of
from lmeval_dispersion.model.texts import Texts


def words(*numbers):
    return " ".join(f"w{n}" for n in numbers)


def lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return Texts(path)


def test_documents_are_cut_from_their_start_and_never_across(tmp_path):
    source = lines(tmp_path / "a.jsonl", [words(*range(7)), words(1), words(*range(10, 16))])
    got = draw_segments(source, tiny_models.tokenizer(), length=3, most=99)
    rows = [(*at, *(tokens - 3)) for at, tokens in zip(*map(got.get, ("origins", "tokens")), strict=True)]
    assert sorted(rows) == [(0, 0, 0, 1, 2), (0, 3, 3, 4, 5), (2, 0, 10, 11, 12), (2, 3, 13, 14, 15)]
    assert source.skipped["too_short"] == 1


def test_packed_texts_are_one_stream_and_name_the_text_a_segment_starts_in(tmp_path):
    source = lines(tmp_path / "a.jsonl", [words(0, 1), words(2), words(3, 4, 5), words(6)])
    got = draw_segments(source, tiny_models.tokenizer(), length=3, most=9, pack=True)
    rows = [(*at, *(tokens - 3)) for at, tokens in zip(*map(got.get, ("origins", "tokens")), strict=True)]
    # A word-level tokenizer has no token for the blank line between texts.
    assert sorted(rows) == [(0, 0, 0, 1, 2), (2, 3, 3, 4, 5)]


def test_a_segment_begins_as_the_tokenizer_begins_a_text(tmp_path):
    tokenizer = tiny_models.tokenizer(bos=True)
    assert prefix_of(tokenizer) == [1]
    assert prefix_of(tiny_models.tokenizer()) == []
    source = lines(tmp_path / "a.jsonl", [words(0, 1, 2, 3)])
    got = draw_segments(source, tokenizer, length=3, most=9)
    assert sorted(map(tuple, got["tokens"].tolist())) == [(1, 3, 4), (1, 5, 6)]


def test_the_draw_is_even_and_repeats_with_its_seed(tmp_path):
    source = lines(tmp_path / "a.jsonl", [words(n, n) for n in range(40)])
    tokenizer, hits = tiny_models.tokenizer(), Counter()
    for seed in range(200):
        got = draw_segments(source, tokenizer, length=2, most=10, seed=seed)
        drawn = got["tokens"][:, 0].tolist()
        assert len(set(drawn)) == 10
        hits.update(drawn)
    assert len(hits) == 40
    assert min(hits.values()) > 20
    assert max(hits.values()) < 85  # 50 expected, sd 6
    first, second = (draw_segments(source, tokenizer, length=2, most=10, seed=5) for _ in "ab")
    assert np.array_equal(first["tokens"], second["tokens"])


def test_what_cannot_be_tokenised_is_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        f'{{"text": "{words(1, 2)}"}}\n{{"text": "\\ud800 x"}}\n{{"text": ""}}\n'
    )
    source = Texts(tmp_path / "a.jsonl")
    got = draw_segments(source, tiny_models.tokenizer(), length=2, most=5)
    assert len(got["tokens"]) == 1
    assert source.skipped == {"empty": 1, "undecodable": 0, "untokenised": 1, "too_short": 0}
    counts = {"texts": source.read, **source.skipped, "kept": 1}
    assert _report("a.jsonl", counts) == "a.jsonl: 1 segment from 3 texts (1 empty, 1 untokenised)"


def test_too_little_text_says_what_to_do(tmp_path):
    source = lines(tmp_path / "a.jsonl", [words(1), words(2, 3)])
    with pytest.raises(UsageError, match=r"one segment of 8 tokens, got none: .*2 too short.*pack="):
        draw_segments(source, tiny_models.tokenizer(), length=8, most=5)
    with pytest.raises(UsageError, match="segments of at least 2 tokens, got 1"):
        draw_segments(source, tiny_models.tokenizer(), length=1, most=5)
