"""The reference sets: what the default leaves out, what both keep, and where each is found."""

from __future__ import annotations

import pytest
from lmeval_screener.tokens.sets import bundled_token_sets, load_token_set, lookup
from program_words import items, main, places_of
from token_cases import TOKENIZERS, vocabulary

#: Words of `reference-v1` that a reviewer found, each with a place that the search must name.
OF_PROGRAMS = {
    "sleep": "a command",
    "walk": "ast.walk",
    "nice": "a command",
    "tree": "a command",
    "clean": "a command",
    "visit": "ast.NodeVisitor.visit",
    "red": "css",
    "green": "css",
    "blue": "css",
    "yellow": "css",
    "friend": "cpp",
}
#: Of the words by default; a registry's results are kept by it.
DIGEST_OF_V1 = "a043a777caaae1efab6741c06dd8efb46425041952c3808b844a49410c325ad5"


@pytest.mark.parametrize(("word", "place"), OF_PROGRAMS.items())
def test_the_search_finds_words_of_programs(word, place):
    assert place in places_of(word)


def test_no_word_of_the_default_means_anything_in_programs(capsys):
    assert main(["reference"]) == 0
    assert capsys.readouterr().out == "none\n"
    assert main(["reference-v1"]) == 1
    found = {line.partition(":")[0] for line in capsys.readouterr().out.splitlines()}
    assert set(OF_PROGRAMS) < found < set(items("reference-v1"))
    assert not found & set(items("reference"))


def test_the_default_is_as_large_and_keeps_the_other_words():
    first, second = set(items("reference-v1")), set(items("reference"))
    assert len(first) == len(second) == 105
    assert len(first & second) == 80
    for one, other in zip(
        load_token_set("reference-v1", "reference").groups.values(),
        load_token_set("reference", "reference").groups.values(),
        strict=True,
    ):
        assert (one.variant, len(one.items)) == (other.variant, len(other.items))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_word_of_both_is_one_piece(name):
    for reference in ("reference", "reference-v1"):
        tokens, dropped, doubled = lookup(load_token_set(reference, "reference"), vocabulary(name))
        assert (len(tokens), dropped, doubled) == (105, [], [])


def test_the_first_set_keeps_its_words_and_its_place_in_registries():
    kept = load_token_set("reference-v1", "reference")
    assert (kept.name, kept.digest) == ("reference-v1", DIGEST_OF_V1)
    assert kept.digest != load_token_set("reference", "reference").digest
    assert load_token_set("reference-v1:bare", "reference").name == "reference-v1:bare"
    assert "reference-v2" not in bundled_token_sets()
