"""Pieces that a vocabulary has and its tokenizer never makes: dropped and told, as the library would say."""

from __future__ import annotations

import copy
import json

import pytest
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import REFERENCE, own_set
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "the cat sat on the mat and None of the dogs saw 7 cats or 17 mats",
    "a catalogue of 1234567890 None None dogs and cats, cats, cats; the axolotl",
] * 5
SET = """
schema: 1
name: own
role: domain
default_groups: [words]
min_tokens: 2
groups:
  words: {variant: space, items: [cat, the, None, dogs]}
"""


def read(data):
    return Vocabulary.from_tokenizer_json(json.dumps(data).encode())


def library(data):
    return Tokenizer.from_str(json.dumps(data))


@pytest.fixture(scope="module")
def bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module")
def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXT, trainer)
    return json.loads(tokenizer.to_str())


def without_merge(data, number, **settings):
    """The tokenizer without one of its merges, whose piece stays in the vocabulary."""
    merges = data["model"]["merges"]
    kept = {"merges": merges[:number] + merges[number + 1 :]}
    return data | {"model": data["model"] | kept | settings}


def merge_of_cat(data):
    return next(i for i, merge in enumerate(data["model"]["merges"]) if "".join(merge) == "Ġcat")


@pytest.mark.parametrize("style", ["pairs", "strings"])
def test_every_piece_is_judged_as_the_library_does_with_any_merge_missing(bpe, style):
    judged = []
    for number in range(0, len(bpe["model"]["merges"]), 7):
        data = without_merge(bpe, number)
        if style == "strings":
            data["model"]["merges"] = [" ".join(merge) for merge in data["model"]["merges"]]
        words, reference = read(data), library(data)
        for piece in data["model"]["vocab"]:
            text = piece.replace("Ġ", " ")
            if text.isascii() and text.strip().isalnum() and " " not in text[1:]:
                judged.append([token.value for token in reference.model.tokenize(piece)] == [piece])
                assert (words.row(text) is not None) == judged[-1]
    assert judged.count(False) > 5
    assert len(judged) > 20 * 5


def test_a_piece_without_a_merge_path_is_dropped_and_told(bpe, tmp_path):
    text = SET.replace("domain", "reference").replace("cat, the, None, dogs", "cats, and, of")
    (tmp_path / "reference.yaml").write_text(text)
    sets = [load_token_set(own_set(tmp_path, SET))]
    sets.append(load_token_set(str(tmp_path / "reference.yaml"), "reference"))
    found = resolve_tokens(*sets, read(without_merge(bpe, merge_of_cat(bpe))))
    assert found.dropped == (" cat",)
    assert found.never_made == ("cat (text makes Ġ cat)", "cats (text makes Ġ cat s)")
    whole = resolve_tokens(*sets, read(bpe))
    assert (whole.dropped, whole.never_made) == ((), ())


LOWER, NFC, NFKC = ({"type": name} for name in ("Lowercase", "NFC", "NFKC"))
DOG = {"type": "Replace", "pattern": {"String": "cat"}, "content": "dog"}


@pytest.mark.parametrize(
    ("change", "never"),
    [
        ({"normalizer": LOWER}, {" None"}),
        ({"normalizer": {"type": "Sequence", "normalizers": [NFC, LOWER]}}, {" None"}),
        ({"normalizer": DOG}, {" cat"}),
        ({"normalizer": NFKC}, set()),
        ("a merge less", {" cat"}),
        ("a merge less, and merges ignored", set()),
    ],
)
def test_a_word_whose_piece_is_unreachable_is_known_as_the_library_does(bpe, change, never):
    if isinstance(change, str):
        data = without_merge(bpe, merge_of_cat(bpe), ignore_merges="ignored" in change)
    else:
        data = bpe | change
    words, reference = read(data), library(data)
    for text in (" cat", " the", " None", " dogs"):
        made = reference.encode(text).tokens == ["Ġ" + text[1:]]
        assert made == (text not in never)
        assert (words.row(text) is not None) == made


def test_bare_digits_where_text_makes_spaced_ones(unigram):
    # As in T5: a space is put before every word, so a digit by itself is the spaced piece.
    data, digits = copy.deepcopy(unigram), "0123456789"
    signs = {sign: score for d in digits for sign, score in ((d, -9.0), (f"▁{d}", -4.0))}
    kept = [entry for entry in data["model"]["vocab"] if entry[0] not in signs]
    data["model"]["vocab"] = kept + [list(item) for item in signs.items()]
    words, reference = read(data), library(data)
    for digit in digits:
        assert reference.encode(digit).tokens == [f"▁{digit}"]
        assert words.never_made(digit) == f"text makes ▁{digit}"
        assert words.row(f" {digit}") is not None
    with pytest.raises(
        ScreeningError, match=r"got 0; not a single token: 0 \(text makes ▁0\)"
    ) as raised:
        resolve_tokens(load_token_set("math"), REFERENCE, words)
    assert raised.value.code == "TooFewTokens"


def test_a_unigram_piece_that_is_never_the_likeliest(unigram):
    data = copy.deepcopy(unigram)
    data["model"]["vocab"] += [["▁thecat", -500.0], ["▁thedogs", -0.1]]
    words, reference = read(data), library(data)
    for word in ("thecat", "thedogs"):
        made = reference.encode(word).tokens == [f"▁{word}"]
        assert made == (word == "thedogs")
        assert (words.row(f" {word}") is not None) == made


@pytest.mark.parametrize("lstrip", [True, False])
def test_an_added_token_that_takes_its_space_as_the_library_does(bpe, lstrip):
    flags = dict.fromkeys(("single_word", "rstrip", "normalized", "special"), False)
    new = len(bpe["model"]["vocab"])
    data = bpe | {"added_tokens": [{"id": new, "content": "zebra", "lstrip": lstrip, **flags}]}
    assert library(data).encode("house zebra").ids[-1] == new
    assert read(data).row(" zebra") == ((new, " zebra") if lstrip else None)
