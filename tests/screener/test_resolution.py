"""Words to rows, on seven real tokenizers and by rule."""

from __future__ import annotations

import json
import re

import pytest
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens import Resolution, bundled_token_sets, load_token_set, resolve
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import DATA, REFERENCE, TINY, TOKENIZERS, own_set, tokenizer_json, vocabulary
from tokenizers import Tokenizer

# What the seven give, counted from the whole tokenizers: (T of code, T of legal, digit scheme).
COUNTS = {
    "gpt2": (33, 69, "irregular"),
    "mistral-v0.1": (34, 31, "single digits"),
    "olmo-dolma-v1_5": (34, 70, "irregular"),
    "olmo2-dolma2": (34, 70, "1-3-digit chunks"),
    "pythia-neox20b": (34, 70, "irregular"),
    "qwen2.5": (34, 70, "single digits"),
    "smollm2": (34, 60, "single digits"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_counts_and_digit_scheme(name):
    words = vocabulary(name)
    code, legal, scheme = COUNTS[name]
    for domain, count in (("math", 10), ("code", code), ("legal", legal)):
        found = resolve(load_token_set(domain), REFERENCE, words)
        assert len(found.domain) == count
        size = len([text for group in load_token_set(domain).groups.values() for text in group.texts()])
        assert len(found.domain) + len(found.dropped) == size
        assert len(found.reference) == 105
        assert found.digit_scheme == scheme
        assert not set(found.domain_ids) & set(found.reference_ids)
        assert len(set(found.domain_ids)) == len(found.domain_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("domain", ["math", "code", "legal", "code:code_only", "math:number_words"])
def test_rows_are_those_of_the_tokenizers_library(name, domain):
    # The library reads the same file by its own code; a piece decodes to the word it stands for.
    library = Tokenizer.from_file(str(DATA / f"{name}.json"))
    found = resolve(load_token_set(domain), REFERENCE, vocabulary(name))
    for token in (*found.domain, *found.reference):
        assert library.token_to_id(token.piece) == token.id
        assert library.decoder.decode(["a", token.piece]) == f"a{token.text}"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_digits_are_the_plain_pieces_never_byte_pieces(name):
    found = resolve(load_token_set("math"), REFERENCE, vocabulary(name))
    assert [token.piece for token in found.domain] == list("0123456789")
    pieces = json.loads((DATA / f"{name}.json").read_bytes())["model"]["vocab"]
    byte_rows = {row for piece, row in pieces.items() if re.fullmatch("<0x..>", piece)}
    assert (name == "mistral-v0.1") == bool(byte_rows)
    assert not byte_rows & set(found.domain_ids)


def test_bundled_sets_are_disjoint_from_the_reference_in_any_case():
    def words(*selection):
        groups = load_token_set(*selection).groups.values()
        return {text.strip().lower() for group in groups for text in group.texts()}

    everyday = words("reference:nouns,verbs,adjectives,function_words", "reference")
    assert bundled_token_sets() == ["code", "legal", "math", "reference"]
    for selection in (
        "code:keywords,code_only,builtins",
        "legal:contract,court,common,archaisms",
        "math:digits,operators,number_words,math_words",
    ):
        assert not everyday & words(selection)


def test_rows_of_the_domain_are_taken_out_of_the_reference(tmp_path):
    name = own_set(tmp_path, TINY)
    everyday = resolve(load_token_set(name), REFERENCE, vocabulary("qwen2.5"))
    assert [token.text for token in everyday.domain] == [" cat", " dog"]
    assert everyday.dropped == (" axolotl",)
    assert [token.text for token in everyday.shared] == [" dog", " cat"]
    assert len(everyday.reference) == 103


def test_two_words_on_one_row_are_noted_and_refused_where_every_item_is_required(tmp_path):
    vocab = {text: row for row, text in enumerate(["Ġgnu", "Ġemu", "Ġox", *"0123456789"])}
    vocab |= {f"Ġ{text.strip()}": 100 + n for n, text in enumerate(REFERENCE.groups["nouns"].texts())}
    vocab |= {f"Ġ{text.strip()}": 200 + n for n, text in enumerate(REFERENCE.groups["verbs"].texts())}
    vocab["Ġemu"] = vocab["Ġgnu"]
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    own = own_set(tmp_path, TINY.replace("cat, dog, axolotl", "gnu, emu, ox"))
    found = resolve(load_token_set(own), REFERENCE, words)
    assert [token.text for token in found.domain] == [" gnu", " ox"]
    assert found.one_row == ("gnu and emu",)
    assert Resolution.from_json(found.to_json()) == found
    vocab["7"] = vocab["3"]
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    with pytest.raises(ScreeningError, match="3 and 7 share row 6") as error:
        resolve(load_token_set("math"), REFERENCE, words)
    assert error.value.code == "TooFewTokens"


def test_too_few_tokens_is_refused_with_the_counts():
    vocab = {f"Ġ{word.strip()}": row for row, word in enumerate(REFERENCE.groups["nouns"].texts())}
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    message = "legal: expected at least 20 single tokens, found 0 of 81; .* and 75 more; take more groups"
    with pytest.raises(ScreeningError, match=message) as error:
        resolve(load_token_set("legal"), REFERENCE, words)
    assert error.value.code == "TooFewTokens"
