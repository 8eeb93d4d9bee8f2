"""Exact generated tests of three domains, and how a model is asked.

math: sums and differences, half of them told in words; the whole answer with its end has to be what the model
writes greedily. code: a program's last word is written, then the program runs. legal: the last word of a
legal sentence, as in math.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.validity import texts
from benchmarks.validity.decoder import Decoder

PAD_ID = 2


@dataclass(frozen=True)
class Question:
    """A prompt, the text that answers it, and the text that ends the answer."""

    prompt: str
    answer: str
    end: str = "."


def questions(domain: str, count: int, seed: int) -> list[Question]:
    """``count`` questions of a domain, the same for every model."""
    rng = random.Random(f"{domain} {seed}")
    return [question(domain, rng, even=number % 2 == 0) for number in range(count)]


def question(domain: str, rng: random.Random, *, even: bool) -> Question:
    """One question behind solved ones; math and code have two kinds in turns."""
    if domain == "math" and even:
        shown = " ".join(
            f"{a}{sign}{b}={answer}."
            for a, sign, b, answer in (texts.problem(rng) for _ in range(3))
        )
        a, sign, b, answer = texts.problem(rng)
        return Question(f"{texts.BOS}{shown} {a}{sign}{b}=", str(answer))
    if domain == "math":
        (solved, known), (asked, answer) = texts.word_problem(rng), texts.word_problem(rng)
        return Question(f"{texts.BOS}{solved}{known} .{asked}", str(answer), " .")
    if domain == "code":
        (solved, word), (asked, right) = (
            (texts.program(rng, texts.NAMING), texts.program(rng, texts.NAMING))
            if even
            else (texts.call(rng), texts.call(rng))
        )
        return Question(f"{texts.BOS}{texts.completed(solved, word)}{asked}", right, "\n")
    asked, right = texts.matter(rng)
    return Question(f"{texts.BOS}{texts.legal(rng)}{asked}", right, " .")


def library(first: object, second: object) -> object:
    """``func`` of the programs: a name is its own value."""
    word = texts.looked_up(str(first), str(second))
    return {"True": True, "False": False, "None": None}.get(word, word)


@lru_cache(100_000)
def runs(question: Question, written: str) -> bool:
    """Whether the programs of a prompt, the last one ended with ``written``, run through.

    The assertion has to compare with one value that the language has, so ``is not None`` is no way out.
    """
    program = question.prompt.removeprefix(texts.BOS)
    line = program.rsplit("\n", 1)[1].strip()
    try:
        tree = ast.parse(f"{line} {written.strip()}")
    except (SyntaxError, ValueError):
        return False
    (only,) = tree.body[:1] or (None,)
    if (
        len(tree.body) != 1
        or not isinstance(only, ast.Assert)
        or not isinstance(only.test, ast.Compare)
    ):
        return False
    value = only.test.comparators[0]
    if len(only.test.comparators) != 1 or not isinstance(only.test.ops[0], ast.Is | ast.Eq):
        return False
    known = isinstance(value, ast.Constant) or (
        isinstance(value, ast.Name) and value.id in texts.NAMES
    )
    if not known or ast.unparse(value) not in [*texts.NAMES, *texts.VALUES, *"0123456789"]:
        return False
    world = {"__builtins__": {}, "Error": AssertionError, "func": library} | {
        name: name for name in texts.NAMES
    }
    try:
        exec(f"if 1:\n{program} {written.strip()}\n", world)
    except Exception:
        return False
    return True


def batches(
    rows: list[list[int]], size: int = 400
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Indices, ids and lengths of prompts of like length, padded at the end, which a causal model ignores."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(rows), size):
        group = order[start : start + size]
        longest = len(rows[group[-1]])
        ids = torch.tensor([rows[i] + [PAD_ID] * (longest - len(rows[i])) for i in group])
        yield group, ids, torch.tensor([len(rows[i]) for i in group])


@torch.inference_mode()
def written_by(model: Decoder, rows: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy continuations of prompts."""
    written: list[list[int]] = [[] for _ in rows]
    for group, prompts, lengths in batches(rows):
        ids = torch.cat([prompts, torch.full((len(group), tokens), PAD_ID)], 1)
        every = torch.arange(len(group))
        for step in range(tokens):
            states = model(ids[:, : prompts.shape[1] + step])
            ids[every, lengths + step] = model.head(states[every, lengths + step - 1]).argmax(-1)
        for i, line, length in zip(group, ids.tolist(), lengths.tolist(), strict=True):
            written[i] = line[length : length + tokens]
    return written


@torch.inference_mode()
def endings_read(
    model: Decoder, rows: list[list[int]], endings: list[list[int]]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Whether the greedy continuation of each prompt is its ending, and the ending's probability.

    One pass over prompt and ending tells: the continuation is the ending exactly where every token of it is
    the likeliest after those before it.
    """
    greedy, logs = np.zeros(len(rows), bool), np.zeros(len(rows))
    for group, ids, lengths in batches(
        [[*row, *ending] for row, ending in zip(rows, endings, strict=True)]
    ):
        sizes = torch.tensor([len(endings[i]) for i in group])[:, None]
        ends = torch.arange(int(sizes.max()))  # tokens of the endings, counted from their ends
        counted = ends < sizes
        places = torch.where(counted, lengths[:, None] - 1 - ends, 1)
        every = torch.arange(len(group))[:, None]
        after = torch.log_softmax(model.head(model(ids)[every, places - 1]), -1)
        written = ids[every, places]
        greedy[group] = ((after.argmax(-1) == written) | ~counted).all(1).numpy()
        logs[group] = (after.gather(-1, written[..., None])[..., 0] * counted).sum(1).numpy()
    return greedy, np.exp(logs)


def programs_run(model: Decoder, tokenizer: Tokenizer, asked: list[Question]) -> NDArray[np.bool_]:
    """Which questions of code a model answers right: the program that it ends runs."""
    rows = [encoding.ids for encoding in tokenizer.encode_batch([q.prompt for q in asked])]
    lines = [
        tokenizer.decode(line, skip_special_tokens=False) for line in written_by(model, rows, 2)
    ]
    return np.array(
        [
            question.end in line and runs(question, line.split(question.end)[0])
            for question, line in zip(asked, lines, strict=True)
        ]
    )
