"""Answer tokens: the tokens that differ between a task's answers, T of the ratio.

A set lists the task's answers as texts with counts (taken from its documents), or the pieces that a
base model expects at the start of an answer (`dispersion tokens --base`). Rule:
``docs/reference/token-sets.md``.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, Literal, NamedTuple

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.layouts import nearest
from lmeval_screener.budgets import load_yaml
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.sets import (
    MOST,
    AnswerSet,
    Token,
    TokenSet,
    is_file,
    load_token_set,
    lookup,
)
from lmeval_screener.tokens.vocabulary import Vocabulary

# T: of the tokens that differ between answers as many as cover this share of their weight, within bounds; if
# the most frequent ones within the bounds cover less than the least share, answers differ in too many words.
COVERED = 0.9
LEAST = 3
LEAST_COVERED = 2 / 3
SAME = 0.9  # a token in more than this share of the answers does not differ between them
WORDS = 5  # an answer with more words that differ is a sentence
_ELSEWHERE = {"domain": "the words of a domain, not answers: give it as the domain"}
_WORD = re.compile(r"[^\W\d_]+")
_WORD_OR_DIGIT = re.compile(r"\d|[^\W\d_]+")
_PATTERN = re.compile(r"[*?[]")
_ASK = "ask all checkpoints a few questions (`dispersion race --all --budget 5% --task {}`)"
Piece = tuple[int, str]  # row and spelling


@dataclass(frozen=True)
class _File(AnswerSet):
    """The layout of a set's file, see ``docs/reference/token-sets.md``."""

    schema: Literal[1] = 1
    role: Literal["answers"] = "answers"
    refused: str = ""
    documents: Annotated[int, 1] = 0
    coverage: Any = None
    source: Any = None
    revision: Any = None
    licence: Any = None


@cache
def bundled_answers() -> Mapping[Path, _File]:
    """Return the bundled answer sets, each by the path of its file."""
    folder = data_folder("token_sets") / "answers"
    files: dict[Path, _File] = {}
    for path in sorted(folder.glob("*.yaml")):
        files[path] = load_yaml(_File, path)
    return files


def load_answers(name_or_path: str) -> AnswerSet:
    """Load the answers of a task, from a bundled set or from a YAML file.

    Args:
        name_or_path: The name of an lm-eval task, with or without ``_dispersion``; or the path of a
            file.

    Raises:
        UsageError: No bundled set covers the task, its answers are known not to differ in single
            tokens, or the file is broken.
    """
    if is_file(name_or_path):
        path = Path(name_or_path).expanduser()
        return _set(path, load_yaml(_File, path, _ELSEWHERE), name_or_path)
    task = name_or_path.removesuffix("_dispersion")
    for path, file in bundled_answers().items():
        for pattern in file.tasks:
            if fnmatch.fnmatchcase(task, pattern):
                return _set(path, file, task)
    known: list[str] = []
    for file in bundled_answers().values():
        known += file.tasks
    near = nearest(task, sorted(known))
    raise UsageError(
        f"the task {task!r} has no bundled answer tokens{near}; run `dispersion tokens {task} -o "
        "set.yaml` and give that file in place of the name, or name a domain in place of a task"
    )


def first_known(tasks: str) -> tuple[str, AnswerSet | None, list[UsageError]]:
    """Load the answers of the first task in ``NAME,NAME`` whose answers can be loaded.

    Returns:
        Three values: the name of that task, its answers, and the errors of the tasks named before
        it. If no task has answers, the name is empty and the answers are None.
    """
    refused = list[UsageError]()
    for name in _split(tasks):
        try:
            return name, load_answers(name), refused
        except UsageError as error:
            refused.append(error)
    return "", None, refused


def tasks_in(tasks: str) -> tuple[str, ...]:
    """Return the names of the lm-eval tasks in ``NAME,NAME``, each once.

    If a name is the file of an answer set, the tasks that it lists are returned instead. Shell
    patterns, such as ``mmlu_*``, are left out.

    Raises:
        UsageError: A file is missing or broken.
    """
    names: list[str] = []
    for name in _split(tasks):
        if is_file(name):
            names += load_answers(name).tasks
        else:
            names.append(name)
    without_patterns = itertools.filterfalse(_PATTERN.search, names)
    return tuple(dict.fromkeys(without_patterns))


def _split(names: str) -> list[str]:
    """The names in ``NAME,NAME``."""
    return list(filter(None, map(str.strip, names.split(","))))


def answers_of_domain(domain_set_name: str) -> AnswerSet | None:
    """Return the answers whose tokens give the ratio for a domain, if no task has known answers.

    They are the ten digits for ``math``, and the answers of HumanEval for ``code``. For any other
    domain the result is None: the ratio is computed from the domain's words.
    """
    if domain_set_name == "code":
        return load_answers("humaneval")
    if domain_set_name != "math":
        return None
    digits: dict[str, int] = {}  # of which answers consist
    for group in load_token_set("math").groups.values():
        digits |= dict.fromkeys(group.texts(), 1)
    return AnswerSet("math", (), "math", "the ten digits", digits)


def resolve_answers(
    answers: AnswerSet, vocabulary: Vocabulary, everyday: TokenSet
) -> tuple[tuple[Token, ...], float]:
    """Find the tokens of a vocabulary that differ between a task's answers.

    If a base model gave the tokens (``answers.pieces``), these are taken. Otherwise `differing` and
    `most_frequent` choose at most ``answers.most`` tokens; if these include two thirds of the
    answers' digits, or of their capital letters, the remaining digits or letters are added.
    Everyday words are left out in both cases.

    Args:
        answers: The task's answers.
        vocabulary: The vocabulary of a checkpoint.
        everyday: The token set R of everyday words, which are not taken.

    Returns:
        The tokens, most frequent or most probable first; and the share of the answers' tokens that
        is not among them, 0 if a base model gave the tokens. If all chosen tokens are single
        characters, only the tokens of answers that are sentences count for this share.

    Raises:
        ScreeningError: ``TooFewTokens``: fewer than 3 tokens are found, most answers are sentences,
            or the answers differ in too many words. ``TokenizerMismatch``: a base model gave the
            tokens, and its tokenizer is not that of the checkpoint.
    """
    left_out = {token.id for token in lookup(everyday, vocabulary)[0]}
    left = 0.0
    if answers.pieces:
        if vocabulary.digest != answers.tokenizer:
            raise ScreeningError(
                "TokenizerMismatch",
                f"{answers.name}: its tokens come from {answers.base}, whose tokenizer differs from this "
                "checkpoint's; make the set with this checkpoint's own base: `dispersion tokens TASK --base "
                "MODEL -o set.yaml`",
            )
        rows: list[Piece] = []
        for piece in answers.pieces:
            row = vocabulary.text_row(piece)
            if row is not None and row not in left_out:
                rows.append((row, piece))
    else:

        def cut(text: str) -> Iterable[Piece]:
            for row, piece in vocabulary.cut(text):
                if row not in left_out:
                    yield row, piece

        counts = differing(answers.name, answers.answers, cut)
        rows = most_frequent(answers.name, counts.weights)[: answers.most]
        rows += _missing(rows, counts.all_weights, vocabulary)
        kept = dict(counts.weights)
        for token in rows:
            kept[token] = counts.all_weights[token]
        if all(len(vocabulary.text(piece).strip()) == 1 for _, piece in rows):
            kept = counts.all_weights  # numbers and letters are right in any form
        left = 1 - sum(kept.values()) / counts.everything
    if len(rows) < LEAST:
        raise ScreeningError(
            "TooFewTokens",
            f"{answers.name}: expected at least {LEAST} tokens that differ between answers, got "
            f"{len(rows)} ({', '.join(dict(rows).values()) or 'none'}), too few for a standard error; "
            f"{_ASK.format(answers.name)}, or name a domain",
        )
    tokens = [Token(vocabulary.text(piece), piece, row, answers.name) for row, piece in rows]
    return tuple(tokens), left


def left_out_note(task: str, share: float) -> str:
    """Return a warning if more than half of the tokens in a task's answers are left out, else "".

    Args:
        task: Name of the task.
        share: Share of the answers' tokens that is not among those from which the ratio is computed
            (see `resolve_answers`).
    """
    if share <= 1 / 2:
        return ""
    return (
        f"the ratio leaves out {share:.0%} of the tokens in the answers of {task}, since they are "
        "in nearly all answers, or in answers that are sentences; if right and wrong answers "
        f"differ in these tokens, {_ASK.format(task)}"
    )


def check_answers(name: str, answers: Mapping[str, int]) -> None:
    """Raise an error if a task's answers are running text, which has no answer tokens.

    The answers are cut into words and digits, since no tokenizer is at hand.

    Args:
        name: Name of the task.
        answers: Each answer with the number of its occurrences.

    Raises:
        ScreeningError: ``TooFewTokens``: most answers are sentences, or differ in too many words.
    """
    counts = differing(name, answers, lambda text: _words(text, _WORD_OR_DIGIT))
    most_frequent(name, counts.weights)


class Differing(NamedTuple):
    """The tokens in a task's answers, each with its weight: the number of answers that hold it.

    Attributes:
        weights: The tokens that differ between answers.
        all_weights: All tokens of answers that are not sentences (see `differing`).
        everything: Sum of the weights of all tokens, those of sentences included; at least 1.
    """

    weights: Counter[Piece]
    all_weights: Counter[Piece]
    everything: int


def differing(
    name: str, answers: Mapping[str, int], cut: Callable[[str], Iterable[Piece]]
) -> Differing:
    """Count, for each token in which a task's answers differ, the answers that hold it.

    Answers that are sentences do not count: apart from words that over 90 % of all answers share,
    they have more than 5 words. Tokens that over 90 % of the other answers share do not differ,
    except for a token that is a whole answer.

    Args:
        name: Name of the task, for messages.
        answers: Each answer with the number of its occurrences.
        cut: Function that splits a text into tokens, each given by its row and its spelling.

    Returns:
        The counts of the tokens that differ, and what they are compared with (see `Differing`).

    Raises:
        ScreeningError: ``TooFewTokens``: most answers are sentences.
    """
    words: dict[str, set[Piece]] = {}
    for text in answers:
        words[text] = _words(text, _WORD)
    same_words = _in_nearly_all(words, answers)
    short: dict[str, int] = {}
    for text, count in answers.items():
        if len(words[text] - same_words) <= WORDS:
            short[text] = count
    sentences = 1 - sum(short.values()) / max(1, sum(answers.values()))
    if sentences > 1 / 2:
        raise ScreeningError(
            "TooFewTokens",
            f"{name}: {sentences:.0%} of its answers are sentences (more than {WORDS} words that differ "
            f"between answers); {_ASK.format(name)}, or name a domain",
        )
    tokens: dict[str, set[Piece]] = {}
    for text in answers:
        tokens[text] = set(cut(text))
    same = _in_nearly_all(tokens, short)
    for text in short:
        if len(tokens[text]) == 1:
            same -= tokens[text]
    weights = _weights(tokens, short)
    differ = weights.copy()
    for token in same:
        del differ[token]
    return Differing(differ, weights, max(1, _weights(tokens, answers).total()))


def _words(text: str, pattern: re.Pattern[str]) -> set[Piece]:
    """The words in a text in place of tokens, all of row 0."""
    return {(0, word) for word in pattern.findall(text)}


def _weights(held: Mapping[str, set[Piece]], answers: Mapping[str, int]) -> Counter[Piece]:
    """Number of answers that hold each token."""
    weights: Counter[Piece] = Counter()
    for text, count in answers.items():
        for token in held[text]:
            weights[token] += count
    return weights


def _in_nearly_all(held: Mapping[str, set[Piece]], answers: Mapping[str, int]) -> set[Piece]:
    most = SAME * sum(answers.values())
    tokens: set[Piece] = set()
    for token, count in _weights(held, answers).items():
        if count > most:
            tokens.add(token)
    return tokens


def most_frequent(name: str, weights: Counter[Piece]) -> list[Piece]:
    """Return the most frequent tokens that together have 90 % of the weight, most frequent first.

    At least 3 tokens are taken, if there are that many. Further tokens that are at least half as
    frequent as the last of these are also taken, since counts differ by as much by chance alone. At
    most 100 tokens are taken in all.

    Args:
        name: Name of the task, for messages.
        weights: Each token with its weight, the number of answers that hold it.

    Raises:
        ScreeningError: ``TooFewTokens``: 100 tokens have less than two thirds of the weight.
    """
    whole = weights.total()
    run = 0
    last = 0
    taken: list[Piece] = []
    for token, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0]))[:MOST]:
        if run < COVERED * whole or len(taken) < LEAST:
            last = weight
        elif 2 * weight < last:
            break
        run += weight
        taken.append(token)
    if run < LEAST_COVERED * whole:
        raise ScreeningError(
            "TooFewTokens",
            f"{name}: its answers hold too many different words: the {MOST} most frequent cover "
            f"{run / whole:.0%} of their uses, expected at least {LEAST_COVERED:.0%}; "
            f"{_ASK.format(name)}, or name a domain",
        )
    return taken


def _missing(rows: Sequence[Piece], tokens: Iterable[Piece], vocabulary: Vocabulary) -> list[Piece]:
    """Digits, or capital letters, that the answers' tokens lack, if two thirds of them are there."""
    classes: dict[tuple[str, int], list[Piece]] = {}
    for token in sorted(tokens):
        _, piece = token
        text = vocabulary.text(piece)
        before = text[:-1]
        sign = text.strip()
        if len(sign) == 1 and sign.isdecimal():  # of any script
            zero = ord(sign) - unicodedata.decimal(sign)
            classes.setdefault((before, zero), []).append(token)
        elif sign in {*ascii_uppercase}:
            classes.setdefault((before, 0), []).append(token)
    missing = list[Piece]()
    for members in classes.values():
        others = [token for token in members if token not in rows]
        if 3 * len(others) <= len(members):
            missing += others
    return missing


def _set(path: Path, file: _File, asked: str) -> AnswerSet:
    if file.refused:
        raise UsageError(
            f"{asked} has no answer tokens: {file.refused}; name a domain, or let a base model find "
            f"tokens: "
            f"`dispersion tokens {asked} --base MODEL -o set.yaml`"
        )
    is_from_base = bool(file.tokenizer and file.base)
    if bool(file.answers) == bool(file.pieces) or bool(file.pieces) != is_from_base:
        keys = ("answers", "pieces", "tokenizer", "base")
        given = [f"`{key}`" for key in keys if getattr(file, key)]
        raise UsageError(
            f"{path}: expected either `answers`, or `pieces` with `tokenizer` and `base`, got "
            f"{', '.join(given) or 'none of these'}; write the file again with `dispersion tokens`"
        )
    about = f"answers of {file.name}"
    if file.base:
        about += f" as {file.base} begins them"
    if file.documents:
        unit = "questions" if file.pieces else "documents"
        about += f" ({file.documents:,} {unit})"
    return replace(file, about=about)
