"""Texts of the demo family: plain text, lines of arithmetic, and the tokenizer made of them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
OPERANDS = 50  # both operands are below this
HELD_OUT_PAIRS = 0.1  # share of unordered operand pairs that no checkpoint is trained on
SEEN = 10  # a reference word must occur this often to become a piece of the tokenizer


def wikitext_paragraphs(files: list[Path] | None) -> list[str]:
    """Paragraphs of WikiText-2 (validation and test), with its token marks undone."""
    if files:
        lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    else:
        from datasets import load_dataset

        data = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
        lines = [line for split in ("validation", "test") for line in data[split]["text"]]
    paragraphs = []
    for line in lines:
        line = re.sub(r" @(.)@ ", r"\1", line.strip()).replace("<unk>", "")
        line = re.sub(r" ([,.;:?!)%])", r"\1", line).replace("( ", "(")
        line = re.sub(r"\s+", " ", line).strip()
        if len(line) > 40:
            paragraphs.append(line)
    return paragraphs


def gsm8k_questions(file: Path | None) -> list[str]:
    """Questions of GSM8K's test split without their numbers: everyday words, no arithmetic."""
    if file:
        rows = [json.loads(line)["question"] for line in file.read_text("utf-8").splitlines() if line]
    else:
        from datasets import load_dataset

        rows = load_dataset("openai/gsm8k", "main")["test"]["question"]
    return [re.sub(r"\s+", " ", re.sub(r"[$]?\d[\d,./:%]*", "", row)).strip() for row in rows]


def reference_words(file: Path) -> list[str]:
    """Words of a token set's default groups."""
    data = yaml.safe_load(file.read_text("utf-8"))
    return [word for name in data["default_groups"] for word in data["groups"][name]["items"]]


def held_out_pairs() -> set[frozenset[int]]:
    """Unordered operand pairs kept for the test, the same for every seed."""
    pairs = [frozenset((a, b)) for a in range(OPERANDS) for b in range(a, OPERANDS)]
    return set(random.Random(0).sample(pairs, round(HELD_OUT_PAIRS * len(pairs))))


def arithmetic_line(rng: random.Random, answers: str, held_out: set[frozenset[int]], count: int = 9) -> str:
    """``count`` sums and differences; with ``random`` answers each answer is that of another problem."""

    def problem() -> tuple[str, int]:
        while True:
            a, b = rng.randrange(OPERANDS), rng.randrange(OPERANDS)
            if rng.random() < 0.5:
                if frozenset((a, b)) not in held_out:
                    return f"{a}+{b}", a + b
            elif a >= b and frozenset((a - b, b)) not in held_out:
                return f"{a}-{b}", a - b

    parts = []
    for _ in range(count):
        text, answer = problem()
        if answers == "random":
            while True:  # an answer of the same kind of problem: the digits keep their frequencies
                other, answer = problem()
                if ("+" in other) == ("+" in text):
                    break
        parts.append(f"{text}={answer}.")
    return " ".join(parts)


def trained_tokenizer(texts: list[str], words: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE with single digits, in which the ``words`` that the texts hold are whole pieces.

    A vocabulary this small has no room for everyday words by frequency alone, so those of ``words`` that
    occur at least ``SEEN`` times are shown to the tokenizer's trainer as often as common ones. Rarer words
    are not: their rows would be untrained.
    """
    counts = Counter(word for text in texts for word in re.findall(r" ([a-z]+)", text))
    boosted = [word for word in words if counts[word] >= SEEN]
    every_byte = pre_tokenizers.ByteLevel.alphabet()
    return byte_pairs([*texts, *[f"a {word}" for word in boosted] * 1000], vocabulary, every_byte)


def byte_pairs(texts: list[str], vocabulary: int, alphabet: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE with single digits and the three special tokens; ``alphabet`` is in it in any case."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one row of token ids, each between ``<s>`` and ``</s>``."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([f"{BOS}{text}{EOS}" for text in texts]):
        ids += encoding.ids
    return torch.tensor(ids)
