"""T of the ratio: sets of answers, and the tokens that they consist of in a vocabulary."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.answers import answers_of_domain, load_answers, resolve_answers
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


@pytest.fixture(scope="module", params=["gpt2", "single digits", "llama3", "ignore_merges", "metaspace"])
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
        [*texts, *(numbers * 9 * (kind in ("llama3", "ignore_merges")))], trainers.BpeTrainer(**options)
    )
    data = json.loads(core.to_str())
    data["model"]["ignore_merges"] = kind == "ignore_merges"
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("name", SHIPPED)
def test_tokens_are_those_that_the_tokenizers_library_makes_of_the_answers(library, name):
    shipped, counts = load_answers(name), Counter()
    for text, count in shipped.answers.items():
        encoded = library.encode(text, add_special_tokens=False)
        for token in zip(encoded.ids, encoded.tokens, strict=True):
            if token[1].strip("Ġ▁Ċ"):
                counts[token] += count
    words = {text for group in REFERENCE.groups.values() for text in group.texts()}
    everyday = {library.token_to_id(sign + word.strip()) for word in words for sign in "Ġ▁"}
    counts = Counter({token: count for token, count in counts.items() if token[0] not in everyday})
    found = resolve_answers(shipped, Vocabulary.from_tokenizer_json(library.to_str().encode()), REFERENCE)
    taken = {(token.id, token.piece) for token in found}
    least = min(counts[token] for token in taken)
    others = [count for token, count in counts.items() if token not in taken]
    assert 3 <= len(found) == len(taken) <= 36
    assert max(others, default=0) <= least
    if len(found) < 36:  # without the least frequent, it would cover too little
        rarest = sum(counts[token] for token in taken if counts[token] == least)
        covered = sum(counts[token] for token in taken)
        assert covered >= 0.9 * counts.total() > covered - rarest


@pytest.mark.parametrize("name", TOKENIZERS)
def test_answers_of_a_domain(name):
    digits = resolve_answers(answers_of_domain("math"), vocabulary(name), REFERENCE)
    default = resolve_tokens(load_token_set("math"), REFERENCE, vocabulary(name)).domain
    assert sorted((t.id, t.piece, t.text) for t in digits) == sorted((t.id, t.piece, t.text) for t in default)
    whole = resolve_answers(replace(load_answers("humaneval"), most=100), vocabulary(name), REFERENCE)
    for code in (answers_of_domain("code"), load_answers("humaneval")):
        assert resolve_answers(code, vocabulary(name), REFERENCE) == whole[:36]
    assert len(whole) > 36
    assert answers_of_domain("legal") is None


def test_most_frequent_tokens_are_kept_without_everyday_words():
    names = ["Ġa", "Ġb", "Ġc", "Ġd", "Ġe", "Ġhouse"]
    small = Vocabulary.from_tokenizer_json(tokenizer_json({name: i for i, name in enumerate(names)}))
    everyday = load_token_set("reference", "reference")
    counts = {" house": 900, " a": 60, " b": 30, " c": 5, " d": 5, " e": 1}
    # 90 % are two tokens, three are the least, and d is as frequent as the third.
    assert pieces(resolve_answers(answers(counts), small, everyday)) == ["Ġa", "Ġb", "Ġc", "Ġd"]


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        (
            {" yes": 5, " no": 5},
            "at least 3 tokens, got 2 .* one alone has no distance; ask dispersion probe",
        ),
        (
            {f" {first}{second}z": 1 for first in "bcdfghjklmnpqrs" for second in "abcdefghijklmnopqrst"},
            "the 100 most frequent cover 33%",
        ),
    ],
)
def test_too_few_and_too_many_tokens_are_refused(counts, says):
    rows = {text.replace(" ", "Ġ"): row for row, text in enumerate(counts)}
    with pytest.raises(ScreeningError, match=says) as refused:
        resolve_answers(answers(counts), Vocabulary.from_tokenizer_json(tokenizer_json(rows)), REFERENCE)
    assert refused.value.code == "TooFewTokens"


def test_a_set_of_a_base_holds_in_its_tokenizer_with_any_added_tokens():
    vocab = {"Ġ1": 0, "Ġ2": 1, "Ġ3": 2, "Ġhouse": 3, "<s>": 4}
    special = {"content": "<s>", "id": 4, "special": True}
    base = Vocabulary.from_tokenizer_json(tokenizer_json(vocab, [special]))
    tuned = Vocabulary.from_tokenizer_json(
        tokenizer_json(vocab, [special, special | {"content": "<im>", "id": 5}])
    )
    other = Vocabulary.from_tokenizer_json(tokenizer_json({**vocab, "Ġ1": 1, "Ġ2": 0}, [special]))
    found = answers(pieces=("Ġ3", "Ġhouse", "Ġ1", "<s>", "Ġ2"), tokenizer=base.digest, base="org/base")
    rows = [(" 3", 2), (" 1", 0), (" 2", 1)]
    assert [(t.text, t.id) for t in resolve_answers(found, tuned, REFERENCE)] == rows
    with pytest.raises(ScreeningError, match="come from org/base, whose tokenizer differs") as refused:
        resolve_answers(found, other, REFERENCE)
    assert refused.value.code == "TokenizerMismatch"


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
    assert load_answers(str(data_folder("token_sets") / "answers" / "gsm8k.yaml")) == load_answers("gsm8k")
    assert load_answers("gsm8k").digest != load_answers("mmlu").digest


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hellaswag", "hellaswag has no answer tokens: its choices are whole sentences; "),
        ("arc_easy_dispersion", "arc_easy has no answer tokens: its choices are phrases"),
        ("mmlu_anatomi", "the task 'mmlu_anatomi' has no bundled answer tokens; did you mean mmlu_anatomy"),
        ("blimp", "`dispersion tokens blimp -o set.yaml` makes the set"),
        ("missing.yaml", "expected a readable YAML file"),
        ({"answers": {" 1": 2}, "pieces": ["Ġ1"]}, "either `answers`, or `pieces`"),
        ({"pieces": ["Ġ1"], "base": "org/base"}, "either `answers`, or `pieces`"),
        ({"answers": {" 1": 0}}, "expected an integer of at least 1"),
        ({"answers": {1: 2}}, "a key that is a string"),
        ({"role": "domain"}, "`role`: expected answers"),
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
