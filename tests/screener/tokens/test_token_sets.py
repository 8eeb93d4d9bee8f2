"""Token sets: the bundled ones, users' own, and mistakes in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.tokens.sets import load_token_set
from token_cases import TINY, anything, changed, own_set, paths

from lmeval_dispersion.errors import UsageError


def test_groups_and_variants_are_selected_by_name():
    assert list(load_token_set("math").groups) == ["digits"]
    chosen = load_token_set("math:operators,digits")
    assert list(chosen.groups) == ["operators", "digits"]
    assert chosen.name == "math:operators,digits"
    assert chosen.digest != load_token_set("math").digest
    spaced = load_token_set("math:operators,space")
    assert spaced.name == "math:operators,space"
    assert spaced.groups["operators"].texts()[0] == " +"
    default, bare = (
        load_token_set("reference", "reference"),
        load_token_set("reference:bare", "reference"),
    )
    assert bare.name == "reference:bare"
    assert {g.variant for g in bare.groups.values()} == {"bare"}
    assert [g.items for g in bare.groups.values()] == [g.items for g in default.groups.values()]
    assert bare.digest != default.digest


def test_digest_ignores_notes_and_follows_words(tmp_path, monkeypatch):
    plain = load_token_set(own_set(tmp_path, TINY)).digest
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell expands no ~ behind --domain=
    assert load_token_set(f"~/{Path(own_set(tmp_path, TINY)).name}").digest == plain
    assert load_token_set(own_set(tmp_path, TINY + "notes: changed\n")).digest == plain
    assert load_token_set(own_set(tmp_path, TINY.replace("dog", "fox"))).digest != plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((TINY, "- a\n"), "expected a mapping, got a list ['a']"),
        ((TINY, ""), "expected a mapping, got nothing"),
        (
            (TINY, "1: a\nschema: 1\n"),
            "`1`: expected a key that is a string, got an integer 1; quote it",
        ),
        ((TINY, "[a]: 1\n"), "expected valid YAML ("),
        ((TINY, "schema: &a [*a]\n"), "`schema`: expected 1, got a list"),
        (("schema: 1", "schema: 2"), "`schema`: expected 1, got an integer 2"),
        (("schema: 1", ""), "`schema`: expected 1, got nothing"),
        (("name: tiny", "name: 7"), "`name`: expected a string, got an integer 7; quote it"),
        (
            ("role: domain", "role: dom"),
            "`role`: expected one of domain, reference, got a string 'dom'",
        ),
        (
            ("role: domain", "role: reference"),
            "`role`: expected domain (the set is used as the domain)",
        ),
        (
            ("[words]", "[word]"),
            "`default_groups[0]`: expected one of the groups words, more, got a string",
        ),
        (
            ("[words]", "[more]"),
            "`default_groups[0]`: expected a group that is not optional, got a string",
        ),
        (
            ("[words]", "words"),
            "`default_groups`: expected a list of strings, got a string 'words'",
        ),
        (
            ("min_tokens: 2", "min_tokens: true"),
            "`min_tokens`: expected an integer of at least 2, got a",
        ),
        (
            ("min_tokens: 2", "min_tokens: 9"),
            "expected at least 9 words (`min_tokens`) in words, got 3",
        ),
        (
            ("variant: space", "variant: spaced"),
            "`groups.words.variant`: expected one of bare, space",
        ),
        (
            ("variant: space", "varient: space"),
            "`groups.words.varient`: expected one of the keys variant, ",
        ),
        (("min_tokens: 2", "minimum: 2"), "`minimum`: expected one of the keys schema, "),
        (
            ("dog,", "no,"),
            "`groups.words.items[1]`: expected a string, got a boolean False; quote it",
        ),
        (("dog,", "cat,"), "`groups.words.items[1]`: expected each item once, got a string 'cat'"),
        (("dog,", '"\\ud800",'), "`groups.words.items[1]`: expected printable signs, got a string"),
        (("dog,", '" dog",'), "`groups.words.items[1]`: expected a word without spaces around it"),
        (
            ("[cat, dog, axolotl]", "[]"),
            "`groups.words.items`: expected a list of strings, got a list []",
        ),
        (
            ("optional: true", "optional: yes please"),
            "`groups.more.optional`: expected true or false",
        ),
        (("items: [cat", "items: {cat"), "expected valid YAML ("),
        (("groups:", "groups: none\nx:"), "`x`: expected one of the keys"),
    ],
)
def test_every_mistake_in_a_file_is_one_sentence(tmp_path, change, message):
    assert change[0] in TINY
    path = own_set(tmp_path, TINY.replace(*change, 1))
    with pytest.raises(UsageError) as error:
        load_token_set(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_utf_8(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="expected UTF-8 text, got the byte 0xff"):
        load_token_set(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean math?; bundled: code, "),
        (
            "math:digit",
            "unknown group 'digit'; did you mean digits?; expected one of digits, operators, ",
        ),
        (
            "missing.yaml",
            "missing.yaml: expected a readable YAML file (No such file or directory)",
        ),
        ("math:", "unknown token set 'math:'"),
        ("code:bare,space", "expected one variant, got bare and space"),
        ("code:bear", "or a variant (bare, space)"),
        (
            "legal:archaisms",
            "expected at least 20 words (`min_tokens`) in archaisms, got 13; take more",
        ),
    ],
)
def test_names_that_mean_nothing(name, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_token_set(name)


@settings(max_examples=150)
@given(st.data())
def test_any_change_to_a_token_set_is_understood_or_refused(tmp_path_factory, data):
    tree = yaml.safe_load(TINY)
    tree = changed(tree, data.draw(st.sampled_from(paths(tree))), data.draw(anything))
    path = tmp_path_factory.getbasetemp() / "changed.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    said = f"{path}: "
    try:
        load_token_set(str(path))
    except UsageError as error:
        said = str(error)
    assert said.startswith(f"{path}: ")
