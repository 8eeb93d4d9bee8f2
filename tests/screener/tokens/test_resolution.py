"""Words to rows, on seven real tokenizers and by rule; docs/reference/token-sets.md and its scripts."""

from __future__ import annotations

import importlib
import json
import keyword
import re
from pathlib import Path

import pytest
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.families import load_family
from lmeval_screener.tokens.answers import load_answers
from lmeval_screener.tokens.resolution import Resolution, resolve_tokens
from lmeval_screener.tokens.sets import bundled_token_sets, described_groups, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import DATA, REFERENCE, TINY, TOKENIZERS, own_set, tokenizer_json, vocabulary
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "token-sets.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch):
    """A script of the repository by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def test_the_documented_counts_and_digit_schemes_are_what_the_script_prints(script):
    """They were first counted from the whole tokenizers."""
    counts = script("token_set_counts")
    table = counts.table(DATA)
    assert table in PAGE
    assert counts.ranks(DATA) in PAGE
    heading, qwen = re.findall(r"^\| (?:tokenizer|qwen2\.5) .*", table, re.M)
    found = dict(zip(heading.split(" | "), qwen.split(" | "), strict=True))
    refused = [name.strip("`") for name, cell in found.items() if cell.startswith("refused")]
    assert [name.partition(":")[0] for name in refused] == ["numbers", "numbers"], (
        "new words: make tests/data/tokenizers anew"
    )


def test_trimming_a_tokenizer_changes_no_resolution(script):
    trim = script("trim_tokenizers")
    data = json.loads((DATA / "smollm2.json").read_bytes())
    data["model"]["vocab"] |= {
        f"other {number}": 60_000 + number for number in range(2 * trim.OTHERS)
    }
    whole = json.dumps(data).encode()
    small, large = (
        Vocabulary.from_tokenizer_json(content) for content in (trim.trimmed(whole), whole)
    )
    for selection in trim.selections():
        assert trim.outcome(selection, small) == trim.outcome(selection, large)


def test_the_documented_files_are_valid(tmp_path):
    domain, answers, families = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    path = own_set(tmp_path, domain.replace("min_tokens: 20", "min_tokens: 2"))
    assert list(load_token_set(f"{path}:elements,symbols").groups) == ["elements", "symbols"]
    assert load_answers(own_set(tmp_path, answers)).about == "answers of my_task (250 documents)"
    (tmp_path / "families.yaml").write_text(families)
    assert load_family("ours", tmp_path / "families.yaml").scales == ("1B",)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "domain",
    [
        *("math", "code", "legal", "code:code_only", "math:number_words"),
        *("code:line_start", "legal:capitals", "legal:obligations"),
    ],
)
def test_rows_are_those_of_the_tokenizers_library(name, domain):
    # The library reads the same file by its own code; a piece decodes to the word it stands for.
    library = Tokenizer.from_file(str(DATA / f"{name}.json"))
    found = resolve_tokens(load_token_set(domain), REFERENCE, vocabulary(name))
    for token in (*found.domain, *found.reference):
        assert library.token_to_id(token.piece) == token.id
        assert library.decoder.decode(["a", token.piece]) == f"a{token.text}"
    asked = [text for group in load_token_set(domain).groups.values() for text in group.texts()]
    assert len(found.domain) + len(found.dropped) == len(asked)
    rows = [*found.domain_ids, *found.reference_ids]
    assert len(set(rows)) == len(rows)
    if domain == "math":
        assert [token.piece for token in found.domain] == list("0123456789"), "never byte pieces"


def test_bundled_sets_are_disjoint_from_the_reference_in_any_case():
    words: dict[str, set[str]] = {}
    for name in bundled_token_sets():
        for role, _, group, _ in described_groups(name):
            words.setdefault(role, set()).update(text.strip().lower() for text in group.texts())
    assert len(words["domain"]) > 250
    assert not words["reference"] & words["domain"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_three_digit_chunks_are_taken_whole_or_not_at_all(name):
    numbers = load_token_set("numbers")
    if name != "olmo2-dolma2":
        with pytest.raises(ScreeningError, match="expected all 1000 items of chunks") as error:
            resolve_tokens(numbers, REFERENCE, vocabulary(name))
        assert error.value.code == "TooFewTokens"
        return
    found = resolve_tokens(numbers, REFERENCE, vocabulary(name))
    assert [token.piece for token in found.domain] == [f"{number:03d}" for number in range(1000)]


def test_words_stand_in_the_form_in_which_texts_have_them():
    line_start = load_token_set("code:line_start")
    words = line_start.groups["line_start"].texts()
    assert set(words) <= {*keyword.kwlist, *keyword.softkwlist, "type"}  # 3.12 has it
    assert {"def", "match", "case", "type"} < set(words)
    capitals = load_token_set("legal:capitals").groups["capitals"].texts()
    assert {" Agreement", " Licensee", " Party"} < set(capitals)
    assert all(text[1].isupper() for text in capitals)
    obligations = load_token_set("legal:obligations").groups["obligations"].texts()
    assert {" shall", " pursuant"} < set(obligations)


def test_rows_of_the_domain_are_taken_out_of_the_reference(tmp_path):
    name = own_set(tmp_path, TINY.replace("cat", "horse"))
    everyday = resolve_tokens(load_token_set(name), REFERENCE, vocabulary("qwen2.5"))
    assert [token.text for token in everyday.domain] == [" horse", " dog"]
    assert everyday.dropped == (" axolotl",)
    assert [token.text for token in everyday.shared] == [" dog", " horse"]
    assert len(everyday.reference) == 103


def test_two_words_on_one_row_are_noted_and_refused_where_every_item_is_required(tmp_path):
    vocab = {text: row for row, text in enumerate(["Ġgnu", "Ġemu", "Ġox", *"0123456789"])}
    vocab |= {
        f"Ġ{text.strip()}": 100 + n for n, text in enumerate(REFERENCE.groups["nouns"].texts())
    }
    vocab |= {
        f"Ġ{text.strip()}": 200 + n for n, text in enumerate(REFERENCE.groups["verbs"].texts())
    }
    vocab["Ġemu"] = vocab["Ġgnu"]
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    own = own_set(tmp_path, TINY.replace("cat, dog, axolotl", "gnu, emu, ox"))
    found = resolve_tokens(load_token_set(own), REFERENCE, words)
    assert [token.text for token in found.domain] == [" gnu", " ox"]
    assert found.one_row == ("gnu and emu",)
    assert Resolution.from_json(found.to_json()) == found
    vocab["7"] = vocab["3"]
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    with pytest.raises(ScreeningError, match="3 and 7 share row 6") as error:
        resolve_tokens(load_token_set("math"), REFERENCE, words)
    assert error.value.code == "TooFewTokens"


def test_too_few_tokens_is_refused_with_the_counts():
    vocab = {f"Ġ{word.strip()}": row for row, word in enumerate(REFERENCE.groups["nouns"].texts())}
    words = Vocabulary.from_tokenizer_json(tokenizer_json(vocab))
    message = (
        "legal: expected at least 20 words that are single tokens, got 0 of 81; .* 75 more; take"
    )
    with pytest.raises(ScreeningError, match=message) as error:
        resolve_tokens(load_token_set("legal"), REFERENCE, words)
    assert error.value.code == "TooFewTokens"
