"""T of the ratio: sets of answers, and the tokens that they consist of in a vocabulary."""

from __future__ import annotations

import calendar
import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.answers import (
    answers_of_domain,
    check_answers,
    left_out_note,
    load_answers,
    resolve_answers,
)
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import AnswerSet, bundled_token_sets, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary
from token_cases import REFERENCE, TOKENIZERS, tokenizer_json, vocabulary
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder

SHIPPED = ["gsm8k", "humaneval", "mmlu"]
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def answers(counts=None, **fields):
    return AnswerSet("own", (), answers=counts or {}, **fields)


def pieces(found):
    return [token.piece for token in found]


@pytest.fixture(
    scope="module", params=["gpt2", "single digits", "llama3", "ignore_merges", "metaspace"]
)
def library(request):
    """Tokenizers trained on the shipped answers, with the ways of cutting that real ones have."""
    kind, core = request.param, Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if kind == "single digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        core.pre_tokenizer = pre_tokenizers.Sequence([digits, core.pre_tokenizer])
    elif kind in ("llama3", "ignore_merges"):
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    elif kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        core.decoder = decoders.Metaspace(prepend_scheme="never")
    texts = [text for name in SHIPPED for text in load_answers(name).answers]
    numbers = [f"{number:0{width}d}" for width in (1, 2, 3) for number in range(10**width)]
    alphabet = [] if kind == "metaspace" else pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 3000, "initial_alphabet": alphabet, "show_progress": False}
    # Every number up to 999, as Llama 3 has it.
    core.train_from_iterator(
        [*texts, *(numbers * 9 * (kind in ("llama3", "ignore_merges")))],
        trainers.BpeTrainer(**options),
    )
    data = json.loads(core.to_str())
    data["model"]["ignore_merges"] = kind == "ignore_merges"
    return Tokenizer.from_str(json.dumps(data))


def tokens(*of):
    return resolve_answers(*of)[0]


def slowly(shipped, library):
    """T by the documented rule: the tokens, and those that may complete a class of signs."""
    words = {text for group in REFERENCE.groups.values() for text in group.texts()}
    everyday = {library.token_to_id(sign + word.strip()) for word in words for sign in "Ġ▁"}
    held, counts = [], Counter()
    for text, count in shipped.answers.items():
        letters = "".join(sign if sign.isalpha() else " " for sign in text).split()
        if len(set(letters)) > 5:  # no word of the shipped sets is in nearly all answers
            continue
        encoded = library.encode(text, add_special_tokens=False)
        own = {*zip(encoded.ids, encoded.tokens, strict=True)}
        own = {token for token in own if token[1].strip("Ġ▁Ċ") and token[0] not in everyday}
        held += [own] * count
        counts += Counter(dict.fromkeys(own, count))
    assert not [
        token for token, count in counts.items() if count > 0.9 * len(held) and {token} not in held
    ]
    taken, ordered = [], sorted(counts, key=lambda token: (-counts[token], token))
    for token in ordered[:100]:
        if sum(counts[other] for other in taken) < 0.9 * counts.total() or len(taken) < 3:
            taken.append(token)
    taken += [
        token for token in ordered[len(taken) : 100] if 2 * counts[token] >= counts[taken[-1]]
    ]
    signs = {
        token
        for token in counts
        if token[1].strip("Ġ▁") in {*"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    }
    return taken[:36], signs


@pytest.mark.parametrize("name", SHIPPED)
def test_tokens_are_those_that_the_tokenizers_library_makes_of_the_answers(library, name):
    shipped = load_answers(name)
    found = tokens(shipped, Vocabulary.from_tokenizer_json(library.to_str().encode()), REFERENCE)
    taken, signs = slowly(shipped, library)
    chosen = [(token.id, token.piece) for token in found]
    assert chosen[: len(taken)] == taken
    assert {*chosen[len(taken) :]} <= signs


@pytest.mark.parametrize("name", TOKENIZERS)
def test_answers_of_a_domain(name):
    digits = tokens(answers_of_domain("math"), vocabulary(name), REFERENCE)
    default = resolve_tokens(load_token_set("math"), REFERENCE, vocabulary(name)).domain
    assert sorted((t.id, t.piece, t.text) for t in digits) == sorted(
        (t.id, t.piece, t.text) for t in default
    )
    whole = tokens(replace(load_answers("humaneval"), most=100), vocabulary(name), REFERENCE)
    for code in (answers_of_domain("code"), load_answers("humaneval")):
        assert tokens(code, vocabulary(name), REFERENCE)[:36] == whole[:36]
    assert len(whole) > 36
    assert answers_of_domain("legal") is None


def small(*words):
    """A vocabulary of spaced words and of signs."""
    return Vocabulary.from_tokenizer_json(
        tokenizer_json({w.replace(" ", "Ġ"): i for i, w in enumerate(words)})
    )


def test_most_frequent_tokens_are_kept_without_everyday_words():
    everyday = load_token_set("reference", "reference")
    words = small(" a", " b", " c", " d", " e", " house")
    counts = {" house": 900, " a": 60, " b": 30, " c": 5, " d": 3, " e": 1}
    # 90 % are two tokens, three are the least, and d is half as frequent as the third.
    assert pieces(tokens(answers(counts), words, everyday)) == ["Ġa", "Ġb", "Ġc", "Ġd"]


def test_what_nearly_all_answers_hold_counts_only_as_a_whole_answer():
    words = small(" x", " y", " z", " w", "(", ")", ";")
    counts = {" x ;": 30, " y ;": 30, " z ;": 30}
    assert pieces(tokens(answers(counts | {" w": 9}), words, REFERENCE)) == ["Ġx", "Ġy", "Ġz"]
    assert ";" in pieces(tokens(answers(counts | {" w": 11}), words, REFERENCE))  # 89 %
    # An answer counts a token once.
    assert (
        resolve_answers(answers({" x x x x": 2, " y": 3, " z": 4}), words, REFERENCE)[0][0].text
        == " z"
    )
    # w in nearly all, and alone an answer.
    often = {" w": 80, " w x": 8, " w y": 8, " w z": 4}
    assert pieces(tokens(answers(often), words, REFERENCE)) == ["Ġw", "Ġx", "Ġy", "Ġz"]


def test_digits_and_letters_of_choices_are_completed():
    words = small(*"0123456789ABCDEFx", " A", " B")
    rare = {digit: 90 for digit in "1234567"} | {"0": 2, "8": 1, "x": 1}
    assert {*pieces(tokens(answers(rare), words, REFERENCE))} == {*"012345678"}  # no answer has a 9
    few = {digit: 90 for digit in "12345"} | dict.fromkeys("06789", 1)
    assert {*pieces(tokens(answers(few), words, REFERENCE))} == {*"12345"}  # half of them
    letters = {"A": 60, "B": 30, "C": 9, "D": 1, " A": 1}
    assert pieces(tokens(answers(letters), words, REFERENCE)) == [*"ABCD"]


# --- kinds of answers -----------------------------------------------------------------------------------

COLUMNS, TABLES, NAMES = (
    ["age", "price", "id"],
    ["users", "orders", "items"],
    ["anna", "bob", "carl", "dora"],
)
MONTHS = calendar.month_name[1:]
LONG = " The text says nothing about that, because nobody who wrote it had been there."
WORDS = [*LONG.replace(",", "").split(), "slowly", "green", "tall", "river"]


def made(kind, count=120):
    """Answers of a kind, by chance."""
    draw = random.Random(kind)
    c, n = draw.choice, draw.randrange
    one = {
        "sql": lambda i: f" SELECT {c(COLUMNS)} FROM {c(TABLES)} WHERE {c(COLUMNS)} > {n(100)};",
        "json": lambda i: " " + json.dumps({"name": c(NAMES), "age": n(90), "ok": c([True, False])}),
        "rust": lambda i: f" fn {c(NAMES)}(x: i32) -> i32 {{\n    x {c('+*-')} {n(100)}\n}}",
        "half numbers": lambda i: f" {n(1000)}" if i % 2 else LONG,
        "sentences": lambda i: " " + " ".join(c(WORDS) for _ in range(14)) + ".",
        "letters": lambda i: f" ({c('ABCD')})",
        "negative": lambda i: f" -{n(1, 51)}",
        "dates": lambda i: f" {n(1, 29)} {c(MONTHS)} {n(1990, 2025)}",
        "ISO dates": lambda i: f" 2024-{n(1, 13):02d}-{n(1, 29):02d}",
        "yes": lambda i: f" {c(['yes', 'no'])}",
        "Arabic": lambda i: " " + "".join(chr(0x660 + int(d)) for d in str(n(1000))),
        "Chinese": lambda i: " " + "".join("零一二三四五六七八九"[int(d)] for d in str(n(1000))),
    }[kind]  # fmt: skip
    return Counter(one(i) for i in range(count))


@pytest.fixture(scope="module")
def trained():
    """A tokenizer of single digits that has every word of the kinds as a piece."""
    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    texts = [
        text for kind in ("sql", "json", "rust", "dates", "sentences", "yes") for text in made(kind)
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [*texts, LONG],
        trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False),
    )
    return Vocabulary.from_tokenizer_json(core.to_str().encode())


@pytest.mark.parametrize(
    ("kind", "expected", "warned"),
    [
        ("sql", {*COLUMNS, *TABLES, *"0123456789"}, True),
        ("json", {*NAMES, "true", "false", *"0123456789"}, True),
        ("rust", {*NAMES, *"+*-", *"0123456789"}, True),
        ("half numbers", {*"0123456789"}, True),
        ("letters", {*"ABCD"}, False),
        ("negative", {*"0123456789"}, False),
        ("dates", {*MONTHS, *"0123456789"}, False),
        ("ISO dates", {*"0123456789"}, False),
        # Each digit is two bytes, of which the first is the same.
        ("Arabic", {rf"\x{0xA0 + digit:x}" for digit in range(10)}, False),
    ],
)
def test_tokens_of_a_kind_of_answers_are_what_differs(kind, expected, warned, trained):
    found, left_out = resolve_answers(answers(dict(made(kind))), trained, REFERENCE)
    assert {token.text.strip() for token in found} == expected
    note = left_out_note("mine", left_out)
    assert bool(note) == warned
    assert note.endswith("`dispersion race --all --budget 5% --task mine`)") == warned


def test_tokens_of_characters_that_a_tokenizer_halves_are_all_there(trained):
    found = tokens(answers(dict(made("Chinese"))), trained, REFERENCE)
    halves = {row for sign in "零一二三四五六七八九" for row, _ in trained.cut(sign)}
    assert {token.id for token in found} <= halves
    signs = [{row for row, _ in trained.cut(sign)} for sign in "零一二三四五六七八九"]
    assert all(sign & {token.id for token in found} for sign in signs)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("yes", "at least 3 tokens that differ between answers, got 2"),
        (
            "sentences",
            "100% of its answers are sentences (more than 5 words that differ between answers)",
        ),
    ],
)
def test_a_kind_of_answers_without_tokens_of_its_own_is_refused(kind, says, trained):
    with pytest.raises(ScreeningError, match=re.escape(says)) as refused:
        resolve_answers(answers(dict(made(kind))), trained, REFERENCE)
    assert "`dispersion race --all --budget 5% --task own`" in str(refused.value)
    assert refused.value.code == "TooFewTokens"
    if kind != "yes":  # as `dispersion tokens` says without a tokenizer
        with pytest.raises(ScreeningError, match=re.escape(says)):
            check_answers("own", made(kind))


def test_answers_of_too_many_different_words_are_refused():
    counts = {
        f" {first}{second}z": 1 for first in "bcdfghjklmnpqrs" for second in "abcdefghijklmnopqrst"
    }
    with pytest.raises(
        ScreeningError, match="too many different words: the 100 most frequent cover 33%"
    ):
        resolve_answers(answers(counts), small(*counts), REFERENCE)


def test_a_set_of_a_base_holds_in_its_tokenizer_with_any_added_tokens():
    vocab = {"Ġ1": 0, "Ġ2": 1, "Ġ3": 2, "Ġhouse": 3, "<s>": 4}
    special = {"content": "<s>", "id": 4, "special": True}
    base = Vocabulary.from_tokenizer_json(tokenizer_json(vocab, [special]))
    tuned = Vocabulary.from_tokenizer_json(
        tokenizer_json(vocab, [special, special | {"content": "<im>", "id": 5}])
    )
    other = Vocabulary.from_tokenizer_json(tokenizer_json({**vocab, "Ġ1": 1, "Ġ2": 0}, [special]))
    found = answers(
        pieces=("Ġ3", "Ġhouse", "Ġ1", "<s>", "Ġ2"), tokenizer=base.digest, base="org/base"
    )
    rows = [(" 3", 2), (" 1", 0), (" 2", 1)]
    assert [(t.text, t.id) for t in tokens(found, tuned, REFERENCE)] == rows
    with pytest.raises(
        ScreeningError, match="come from org/base, whose tokenizer differs"
    ) as refused:
        resolve_answers(found, other, REFERENCE)
    assert refused.value.code == "TokenizerMismatch"


def test_answers_given_as_a_domain_are_named_with_the_option_that_takes_them(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "schema: 1\nname: own\nrole: answers\ntasks: [own]\nanswers: {' 1': 2}"
    )
    with pytest.raises(
        UsageError, match=r"own.yaml holds answers of a task, not words: give it as the "
    ) as refused:
        load_token_set(str(tmp_path / "own.yaml"))
    assert "expected" not in str(refused.value)


def test_bundled_sets_load_by_every_name_and_are_no_domains():
    assert not {"gsm8k", "answers", "hellaswag"} & set(bundled_token_sets())
    for name, task in {
        "gsm8k": "gsm8k_cot_zeroshot",
        "mmlu": "mmlu_anatomy_dispersion",
        "humaneval": "humaneval",
    }.items():
        assert load_answers(task).name == name
    assert load_answers("gsm8k").about == "answers of gsm8k (1,319 documents)"
    assert load_answers("gsm8k").domain == "math"
    assert load_answers(str(data_folder("token_sets") / "answers" / "gsm8k.yaml")) == load_answers(
        "gsm8k"
    )
    assert load_answers("gsm8k").digest != load_answers("mmlu").digest


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hellaswag", "hellaswag has no answer tokens: its choices are whole sentences; "),
        ("arc_easy_dispersion", "arc_easy has no answer tokens: its choices are phrases"),
        (
            "mmlu_anatomi",
            "the task 'mmlu_anatomi' has no bundled answer tokens; did you mean mmlu_anatomy",
        ),
        ("blimp", "run `dispersion tokens blimp -o set.yaml`"),
        ("missing.yaml", "expected a readable YAML file"),
        ({"answers": {" 1": 2}, "pieces": ["Ġ1"]}, "either `answers`, or `pieces`"),
        ({"pieces": ["Ġ1"], "base": "org/base"}, "either `answers`, or `pieces`"),
        ({"answers": {" 1": 0}}, "expected an integer of at least 1"),
        ({"answers": {1: 2}}, "a key that is a string"),
        ({"role": "domain"}, "own.yaml holds the words of a domain, not answers: give it as the "),
        ({"role": "reference"}, "`role`: expected answers"),
    ],
)
def test_what_has_no_set_is_a_sentence(name, says, tmp_path):
    if isinstance(name, dict):
        own = {"schema": 1, "name": "own", "role": "answers", "tasks": ["own"], **name}
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
        name = str(tmp_path / "own.yaml")
    with pytest.raises(UsageError) as refused:
        load_answers(name)
    assert says in str(refused.value)
