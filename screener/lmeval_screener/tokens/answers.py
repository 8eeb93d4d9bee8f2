"""Answer tokens: the tokens that a task's answers consist of, T of the ratio.

A set lists the task's answers as texts with counts (taken from its documents), or the pieces that a base
model expects at the start of an answer (`dispersion tokens --base`). Rule: ``docs/reference/token-sets.md``.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.sets import MOST, AnswerSet, Token, TokenSet, load_token_set, lookup
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.yaml_fields import load_yaml, mistake, nearest

# Tokens of T: as many as cover this share of all answer tokens, within these bounds. If the most frequent
# tokens within the bounds cover less than the least share, the answers are running text.
COVERED, LEAST, LEAST_COVERED = 0.9, 3, 2 / 3
T = TypeVar("T", str, tuple[int, str])


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


def load_answers(name_or_path: str) -> AnswerSet:
    """The set of a task, by lm-eval's name or ours, or from a YAML file.

    Raises:
        UsageError: No set has the task, its answers have no tokens of their own, or the file is broken.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path).expanduser()
        return _set(path, load_yaml(_File, path), name_or_path)
    task = name_or_path.removesuffix("_dispersion")
    folder = data_folder("token_sets") / "answers"
    files = {path: load_yaml(_File, path) for path in sorted(folder.glob("*.yaml"))}
    for path, file in files.items():
        if any(fnmatch.fnmatchcase(task, pattern) for pattern in file.tasks):
            return _set(path, file, task)
    known = sorted(chain.from_iterable(file.tasks for file in files.values()))
    raise UsageError(
        f"the task {task!r} has no bundled answer tokens{nearest(task, known)}; `dispersion tokens {task} -o "
        "set.yaml` makes the set of any task that lm-eval has here; then give set.yaml instead of the name"
    )


def answers_of_domain(domain_set_name: str) -> AnswerSet | None:
    """The answers for the ratio of a bundled domain set; None for a domain without known answers."""
    if domain_set_name == "math":  # digits: answers consist of them
        digits = [text for group in load_token_set("math").groups.values() for text in group.texts()]
        return AnswerSet("math", (), "math", "the ten digits", dict.fromkeys(digits, 1))
    return load_answers("humaneval") if domain_set_name == "code" else None


def resolve_answers(answers: AnswerSet, vocabulary: Vocabulary, everyday: TokenSet) -> tuple[Token, ...]:
    """The tokens that answers consist of in a vocabulary, most frequent first, without everyday words.

    Each answer is tokenized, and its tokens count as often as it occurs. Kept are the
    most frequent tokens that cover 90 % of all, and those as frequent as the last of them; 3 to 36.

    Raises:
        ScreeningError: ``TooFewTokens`` for fewer than 3 tokens, and where 100 cover less than two thirds;
            ``TokenizerMismatch`` for a set made by a base with another tokenizer.
    """
    left_out = {token.id for token in lookup(everyday, vocabulary)[0]}
    if answers.pieces:
        if vocabulary.digest != answers.tokenizer:
            raise ScreeningError(
                "TokenizerMismatch",
                f"{answers.name}: its tokens come from {answers.base}, whose tokenizer differs from this "
                "checkpoint's; make the set with this checkpoint's own base: dispersion tokens --base",
            )
        found = ((vocabulary.text_row(piece), piece) for piece in answers.pieces)
        rows = [(row, piece) for row, piece in found if row is not None and row not in left_out]
    else:
        counts: Counter[tuple[int, str]] = Counter()
        for text, count in answers.answers.items():
            for token in vocabulary.cut(text):
                if token[0] not in left_out:
                    counts[token] += count
        rows = most_frequent(answers.name, counts)[: answers.most]
    if len(rows) < LEAST:
        raise ScreeningError(
            "TooFewTokens",
            f"{answers.name}: expected answers of at least {LEAST} tokens, got {len(rows)}"
            f" ({', '.join(piece for _, piece in rows) or 'none'}): errors leave each out in turn, and one "
            f"alone has no distance; ask dispersion probe --task {answers.name}, or name a --domain",
        )
    return tuple(Token(vocabulary.text(piece), piece, row, answers.name) for row, piece in rows)


def most_frequent(name: str, counts: Counter[T]) -> list[T]:
    """The tokens (or words) that cover most of the answers, by the rule of `resolve_answers`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    whole, run, taken = counts.total(), 0, 0
    while taken < min(len(ordered), MOST) and (
        run < COVERED * whole or taken < LEAST or ordered[taken][1] == ordered[taken - 1][1]
    ):
        run += ordered[taken][1]
        taken += 1
    if run < LEAST_COVERED * whole:
        raise ScreeningError(
            "TooFewTokens",
            f"{name}: its answers are whole sentences or too many different words: the {MOST} most frequent "
            f"cover {run / whole:.0%}, expected at least {LEAST_COVERED:.0%}; name a --domain",
        )
    return [token for token, _ in ordered[:taken]]


def _set(path: Path, file: _File, asked: str) -> AnswerSet:
    if file.refused:
        raise UsageError(
            f"{asked} has no answer tokens: {file.refused}; name a --domain, or let a base find tokens: "
            f"dispersion tokens --base MODEL --task {asked} -o set.yaml"
        )
    if bool(file.answers) == bool(file.pieces) or bool(file.pieces) != bool(file.tokenizer and file.base):
        raise mistake(path, "", "either `answers`, or `pieces` with `tokenizer` and `base`", None)
    about = f"answers of {file.name}" + (f" as {file.base} begins them" if file.base else "")
    if file.documents:
        about += f" ({file.documents:,} {'questions' if file.pieces else 'documents'})"
    return replace(file, about=about)
