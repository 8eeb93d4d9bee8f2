"""Token sets, vocabularies, resolution and its cache, on seven real tokenizers (trimmed, see tests/data)."""

import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.errors import ScreeningError
from lmeval_screener.families import load_family
from lmeval_screener.tokens.cache import ResolutionCache
from lmeval_screener.tokens.resolution import resolve
from lmeval_screener.tokens.sets import TokenSet, bundled_token_sets, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from tokenizers import Tokenizer

from lmeval_dispersion.errors import UsageError

DATA = Path(__file__).parent.parent / "data" / "tokenizers"
TOKENIZERS = sorted(path.stem for path in DATA.glob("*.json"))
REFERENCE = load_token_set("reference", "reference")

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


def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.from_tokenizer_json((DATA / f"{name}.json").read_bytes())


def tokenizer_json(vocab: object, added: list[dict[str, object]] | None = None, **parts: object) -> bytes:
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


# --- resolution on real tokenizers ----------------------------------------------------------------------


def test_all_seven_tokenizers_are_here():
    assert set(TOKENIZERS) == set(COUNTS)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_counts_and_digit_scheme(name):
    words = vocabulary(name)
    resolutions = {
        domain: resolve(load_token_set(domain), REFERENCE, words) for domain in ("math", "code", "legal")
    }
    code, legal, scheme = COUNTS[name]
    assert {domain: len(found.domain) for domain, found in resolutions.items()} == {
        "math": 10,
        "code": code,
        "legal": legal,
    }
    for domain, found in resolutions.items():
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
    byte_rows = {row for piece, row in pieces(name).items() if re.fullmatch("<0x..>", piece)}
    assert (name == "mistral-v0.1") == bool(byte_rows)
    assert not byte_rows & set(found.domain_ids)


def pieces(name: str) -> dict[str, int]:
    return json.loads((DATA / f"{name}.json").read_bytes())["model"]["vocab"]


def test_spelling_of_a_leading_space():
    assert {name: vocabulary(name).row(" the")[1] for name in ("gpt2", "qwen2.5", "mistral-v0.1")} == {
        "gpt2": "Ġthe",
        "qwen2.5": "Ġthe",
        "mistral-v0.1": "▁the",
    }


def test_no_fallback_to_the_other_variant():
    words = Vocabulary.from_tokenizer_json(tokenizer_json({"cat": 0, "Ġdog": 1, "Ġcat": 2, "Ġfox": 3}))
    assert words.row(" cat") == (2, "Ġcat")
    assert words.row("dog") is None
    assert words.row("fox") is None


def test_code_only_has_enough_tokens_everywhere():
    for name in TOKENIZERS:
        found = resolve(load_token_set("code:code_only"), REFERENCE, vocabulary(name))
        assert len(found.domain) >= 27


def test_bundled_sets_are_disjoint_from_the_reference_in_any_case():
    everyday = {
        text.strip().lower()
        for group in load_token_set(
            "reference:nouns,verbs,adjectives,function_words", "reference"
        ).groups.values()
        for text in group.texts()
    }
    assert bundled_token_sets() == ["code", "legal", "math", "reference"]
    for selection in (
        "code:keywords,code_only,builtins",
        "legal:contract,court,common,archaisms",
        "math:digits,operators,number_words,math_words",
    ):
        groups = load_token_set(selection).groups.values()
        assert not everyday & {text.strip().lower() for group in groups for text in group.texts()}


# --- vocabularies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("order", range(6))
def test_the_order_of_a_file_does_not_matter(order, indent):
    # Usually the merges come last and are left unread.
    data = json.loads((DATA / "smollm2.json").read_bytes())
    data["model"]["merges"] = [["]", '"merges": ['], ["\\", '"']]
    random.Random(order).shuffle(top := list(data))
    random.Random(order).shuffle(inner := list(data["model"]))
    data["model"] = {key: data["model"][key] for key in inner}
    text = json.dumps({key: data[key] for key in top}, indent=indent)
    words = Vocabulary.from_tokenizer_json(text.encode())
    assert resolve(load_token_set("code"), REFERENCE, words) == resolve(
        load_token_set("code"), REFERENCE, vocabulary("smollm2")
    )


def test_added_tokens_take_their_text_before_the_model_does():
    vocab = {"Ġcat": 0, "Ġcatfish": 1, "7": 2, "Ġdog": 3, "Ġowl": 4}
    added = [
        {"id": 10, "content": "7", "special": False},
        {"id": 11, "content": "cat", "special": False},
        {"id": 12, "content": "og", "special": False, "single_word": True},
        {"id": 13, "content": " owl", "special": True},
        {"id": 14, "content": "", "special": False},
    ]
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab, added))
    assert words.row("7") == (10, "7")
    assert words.row(" cat") is None
    assert words.row(" catfish") is None
    assert words.row(" dog") == (3, "Ġdog")
    assert words.row(" owl") is None


def test_unigram_vocabulary_and_metaspace():
    vocab = [["<unk>", 0.0], ["▁cat", -1.5], ["7", -2.0], ["<0x37>", 0.0]]
    content = tokenizer_json(vocab, pre_tokenizer={"type": "Metaspace", "replacement": "▁"})
    words = Vocabulary.from_file("tokenizer.json", content)
    assert words.row(" cat") == (1, "▁cat")
    assert words.row("7") == (2, "7")
    assert words.row("<0x37>") is None


def test_byte_level_spelling_beyond_ascii():
    words = Vocabulary.from_tokenizer_json((DATA / "qwen2.5.json").read_bytes())
    assert words.piece(" é") == "ĠÃ©"


@pytest.mark.parametrize(
    ("vocab", "piece"), [({"Ġcat": 0, "cat": 1}, "Ġcat"), ({"▁cat": 0, "cat": 1}, "▁cat")]
)
def test_vocab_json_shows_its_kind_by_its_pieces(vocab, piece):
    assert Vocabulary.from_file("vocab.json", json.dumps(vocab).encode()).row(" cat") == (0, piece)


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
        (b"[1]", "expected JSON in tokenizer.json, got: expected {"),
        (b'{"a": 1,}', "expected JSON"),
        (b'{"a": 1 "b": 2}', "expected JSON"),
        (b"{[1]: 2}", "expected JSON"),
        (b'{"model": 3}', "expected `model` to be a mapping"),
        (b"\xff", "expected JSON"),
        (b"{}", "expected `model`"),
        (b"[" * 100_000, "expected JSON"),
        (tokenizer_json({}), "hold pieces"),
        (tokenizer_json({"a": "1"}), "row id for the piece 'a', got '1'"),
        (tokenizer_json({"a": True}), "row id"),
        (tokenizer_json({"a": -1}), "row id"),
        (tokenizer_json([["a"]]), "(piece, score)"),
        (tokenizer_json({"a": 1}, [{"content": "x"}]), "`added_tokens` with content and id"),
        (
            tokenizer_json({"a": 1}, pre_tokenizer={"type": "BertPreTokenizer"}),
            "byte-level or SentencePiece-style",
        ),
    ],
)
def test_bad_tokenizer_files(content, message):
    with pytest.raises(ScreeningError, match=re.escape(message)) as error:
        Vocabulary.from_tokenizer_json(content)
    assert error.value.code == "BadTokenizer"


# --- rule of resolution ---------------------------------------------------------------------------------


def test_rows_of_the_domain_are_taken_out_of_the_reference(tmp_path):
    name = own_set(tmp_path, TINY)
    everyday = resolve(load_token_set(name), REFERENCE, vocabulary("qwen2.5"))
    assert [token.text for token in everyday.domain] == [" cat", " dog"]
    assert everyday.dropped == (" axolotl",)
    assert [token.text for token in everyday.shared] == [" dog", " cat"]
    assert len(everyday.reference) == 103


def test_a_row_counts_once(tmp_path):
    name = own_set(tmp_path, TINY.replace('items: ["7", "8"]', "case: lower, items: [A, a]"))
    found = resolve(load_token_set(f"{name}:words,more"), REFERENCE, vocabulary("qwen2.5"))
    assert [token.text for token in found.domain] == [" cat", " dog", "a"]


def test_too_few_tokens_is_refused_with_the_counts():
    vocab = {f"Ġ{word.strip()}": row for row, word in enumerate(REFERENCE.groups["nouns"].texts())}
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    counts = (
        "legal: expected at least 20 single tokens, found 0 of 81; no single token: agreement, contract, "
    )
    with pytest.raises(ScreeningError, match=rf"{counts}.* and 75 more; take more groups") as error:
        resolve(load_token_set("legal"), REFERENCE, words)
    assert error.value.code == "TooFewTokens"


def test_too_small_a_reference_names_what_the_domain_took(tmp_path):
    domain = load_token_set(own_set(tmp_path, TINY))
    few = load_token_set("reference:adjectives,verbs,nouns", "reference")
    vocab = {f"Ġ{text.strip()}": row for row, text in enumerate(few.groups["nouns"].texts()[:51])}
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    with pytest.raises(
        ScreeningError, match=r"at least 50 .* found 49 of 105, 2 belong to tiny; no single token: "
    ):
        resolve(domain, few, words)


def test_required_items_must_all_be_there():
    vocab = {str(n): n for n in range(9)}
    with pytest.raises(
        ScreeningError, match=r"math: expected all 10 items of digits .*, 1 are not: 9"
    ) as error:
        resolve(load_token_set("math"), REFERENCE, Vocabulary.from_tokenizer_json(tokenizer_json(vocab)))
    assert error.value.code == "TooFewTokens"


# --- token sets -----------------------------------------------------------------------------------------


def test_groups_are_selected_by_name():
    assert list(load_token_set("math").groups) == ["digits"]
    chosen = load_token_set("math:operators,digits")
    assert list(chosen.groups) == ["operators", "digits"]
    assert chosen.name == "math:operators,digits"
    assert chosen.digest != load_token_set("math").digest


def test_own_file_and_its_groups(tmp_path):
    name = own_set(tmp_path, TINY)
    assert load_token_set(name).groups["words"].texts() == [" cat", " dog", " axolotl"]
    assert load_token_set(f"{name}:more").groups["more"].texts() == ["7", "8"]


@pytest.mark.parametrize(
    ("case", "texts"), [("exact", [" Cat"]), ("lower", [" cat"]), ("upper", [" CAT"]), ("title", [" Cat"])]
)
def test_case_changes_the_form_that_is_looked_up(tmp_path, case, texts):
    text = TINY.replace("items: [cat, dog, axolotl]", f"case: {case}, items: [Cat, dog]")
    assert load_token_set(own_set(tmp_path, text)).groups["words"].texts()[:1] == texts


def test_digest_ignores_notes_and_follows_words(tmp_path):
    plain = load_token_set(own_set(tmp_path, TINY)).digest
    assert load_token_set(own_set(tmp_path, TINY + "notes: changed\n")).digest == plain
    assert load_token_set(own_set(tmp_path, TINY.replace("dog", "fox"))).digest != plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema: 1", "schema: 2"), "`schema`: expected 1, got 2; update"),
        (("schema: 1", ""), "`schema`: expected an integer of at least 1, got nothing"),
        (("name: tiny", "name: 7"), "`name`: expected a string, got an integer 7; quote it"),
        (("role: domain", "role: dom"), "`role`: expected one of domain, reference, got a string 'dom'"),
        (("role: domain", "role: reference"), "`role`: expected domain (it is used as the domain set)"),
        (
            ("[words]", "[word]"),
            "`default_groups[0]`: expected one of the groups words, more, got a string 'word'",
        ),
        (("[words]", "[more]"), "`default_groups[0]`: expected a group that is not optional, got a string"),
        (("[words]", "words"), "`default_groups`: expected a list of strings, got a string 'words'"),
        (
            ("min_tokens: 2", "min_tokens: true"),
            "`min_tokens`: expected an integer of at least 2, got a boolean",
        ),
        (("min_tokens: 2", "min_tokens: 9"), "expected at least 9 words (`min_tokens`) in words, got 3"),
        (("variant: space", "variant: spaced"), "`groups.words.variant`: expected one of bare, space"),
        (("variant: space", "varient: space"), "`groups.words.varient`: expected one of the keys variant, "),
        (("min_tokens: 2", "minimum: 2"), "`minimum`: expected one of the keys schema, "),
        (("dog,", "no,"), "`groups.words.items[1]`: expected a string, got a boolean False; quote it"),
        (("dog,", "7,"), "`groups.words.items[1]`: expected a string, got an integer 7; quote it"),
        (("dog,", "cat,"), "`groups.words.items[1]`: expected each item once, got a string 'cat'"),
        (("dog,", '"\\ud800",'), "`groups.words.items[1]`: expected printable signs, got a string"),
        (("dog,", '" dog",'), "`groups.words.items[1]`: expected a word without spaces around it"),
        (("[cat, dog, axolotl]", "[]"), "`groups.words.items`: expected a list of strings, got a list []"),
        (("optional: true", "optional: yes please"), "`groups.more.optional`: expected true or false"),
        (("  more:", "  words:"), "line 9: expected each key once, got 'words' again"),
        (("items: [cat", "items: {cat"), "expected YAML, got: "),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"- a\n", "expected a mapping, got a list ['a']"), (b"\xff", "expected UTF-8"), (b"", "got nothing"),
     (b"1: a\nschema: 1\n", "`1`: expected a key that is a string, got an integer 1; quote it"),
     (b"[a]: 1\n", "expected each key once"), (b"schema: &a [*a]\n", "recursive")],
)  # fmt: skip
def test_files_that_are_no_token_set(tmp_path, content, message):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        load_token_set(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean math?; bundled: code, legal, math, reference"),
        ("math:digit", "there is no group 'digit'; did you mean digits?; there are digits, operators, "),
        ("missing.yaml", "missing.yaml: expected a readable YAML file, got No such file or directory"),
        ("math:", "there is no token set 'math:'"),
        (
            "legal:archaisms",
            "expected at least 20 words (`min_tokens`) in archaisms, got 13; take more groups",
        ),
    ],
)
def test_names_that_mean_nothing(name, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load_token_set(name)


# --- cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    domain = load_token_set("legal")
    found = resolve(domain, REFERENCE, vocabulary("mistral-v0.1"))
    cache = ResolutionCache(Cache(tmp_path / "deep" / "cache"))
    assert cache.find("abc", domain, REFERENCE) is None
    cache.put("abc", domain, REFERENCE, found)
    return cache, domain, found, tmp_path / "deep" / "cache"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_cache_returns_what_was_put(stored):
    cache, domain, found, folder = stored
    assert cache.find("abc", domain, REFERENCE) == found
    assert ResolutionCache(Cache(folder)).find("abc", domain, REFERENCE) == found
    assert cache.find("abd", domain, REFERENCE) is None
    assert cache.find("abc", load_token_set("code"), REFERENCE) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"sha256": "x", "resolution": {}}', "null", "[" * 99999])
def test_corrupt_entry_is_ignored_and_rewritten(stored, damage):
    cache, domain, found, folder = stored
    (entry,) = files(folder)
    entry.write_text(damage)
    assert cache.find("abc", domain, REFERENCE) is None
    cache.put("abc", domain, REFERENCE, found)
    assert cache.find("abc", domain, REFERENCE) == found
    assert files(folder) == [entry]


def test_a_changed_id_in_an_entry_is_noticed(stored):
    cache, domain, found, folder = stored
    (entry,) = files(folder)
    text = entry.read_text()
    assert str(found.domain[0].id) in text
    entry.write_text(text.replace(str(found.domain[0].id), "5", 1))
    assert cache.find("abc", domain, REFERENCE) is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("in the way")
    domain: TokenSet = load_token_set("math")
    found = resolve(domain, REFERENCE, vocabulary("gpt2"))
    cache = ResolutionCache(Cache(tmp_path / "file"))
    cache.put("abc", domain, REFERENCE, found)
    assert cache.find("abc", domain, REFERENCE) is None


def test_writers_side_by_side_leave_a_whole_entry(stored):
    cache, domain, found, folder = stored
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.put("abc", domain, REFERENCE, found), range(40)))
        assert set(pool.map(lambda _: cache.find("abc", domain, REFERENCE) == found, range(40))) == {True}
    assert len(files(folder)) == 1


# --- the script that made the data ----------------------------------------------------------------------


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

    assert script.table(DATA) in (root / "docs" / "token-sets.md").read_text(encoding="utf-8")


def test_the_documented_files_are_valid(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "token-sets.md").read_text(encoding="utf-8")
    domain, families = re.findall(r"```yaml\n(.*?)```", text, re.S)
    path = own_set(tmp_path, domain.replace("min_tokens: 20", "min_tokens: 2"))
    assert list(load_token_set(f"{path}:elements,symbols").groups) == ["elements", "symbols"]
    (tmp_path / "families.yaml").write_text(families)
    assert load_family("ours", tmp_path / "families.yaml").scales == ("1B",)


# --- whatever the files hold ----------------------------------------------------------------------------

plain = [None, True, False, -1, 0, 2, 1.5, float("nan"), "", "a", " b", "space", "▁"]
keys = ["type", "content", "id", "items", "a", "vocab", "model"]
anything = st.recursive(
    st.sampled_from(plain),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys), inner, max_size=4),
    max_leaves=8,
)


def paths(tree: object, prefix: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Where something could be changed in a tree of mappings and lists."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [prefix, *(path for key in keys for path in paths(tree[key], (*prefix, key)))]


def changed(tree: object, path: tuple[object, ...], value: object) -> object:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
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
