"""Answer tokens: the tokens that a task's answers are made of, T of the ratio.

A set lists the task's answers as texts with counts (made from its documents), or the pieces that a base
model expects where an answer begins (`dispersion tokens --base`). The rule: ``docs/reference/token-sets.md``.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import data_folder
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens import Token, TokenSet, load_token_set, lookup
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.yaml_fields import load_yaml, mistake, nearest

# Tokens of T: as many as cover this share of all answer tokens, within these bounds. Where the most frequent
# ones that the bounds allow cover less than the least share, the answers are running text.
COVERED, LEAST, MOST, LEAST_COVERED = 0.9, 3, 100, 2 / 3


@dataclass(frozen=True)
class _File:
    """The layout of an answer set's file, see ``docs/reference/token-sets.md``."""

    schema: Literal[1]
    name: str
    role: Literal["answers"]
    tasks: tuple[str, ...]
    domain: str = ""
    answers: dict[str, Annotated[int, 1]] = cast(Any, None)
    pieces: tuple[str, ...] = ()
    tokenizer: str = ""
    base: str = ""
    refused: str = ""
    documents: Annotated[int, 1] = 0
    coverage: Any = None
    source: Any = None
    revision: Any = None
    licence: Any = None
    notes: Any = None


@dataclass(frozen=True)
class AnswerSet:
    """The answers of a task, by their texts, or as a base model expects them."""

    name: str
    tasks: tuple[str, ...]  # lm-eval's names, or shell patterns of them
    domain: str  # bundled domain set that G uses; empty: G is over the answer tokens too
    about: str  # ``answers of gsm8k (1,319 documents)``
    answers: dict[str, int] = field(default_factory=dict)  # text as it stands after the prompt -> its count
    pieces: tuple[str, ...] = ()  # found by a base, most probable first
    tokenizer: str = ""  # `Vocabulary.digest` of the base's
    base: str = ""  # the model that found ``pieces``

    @property
    def digest(self) -> str:
        """SHA-256 over all that decides which tokens are taken."""
        content = [sorted(self.answers.items()), self.pieces, self.tokenizer]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def load_answers(name_or_path: str) -> AnswerSet:
    """The set of a task, by lm-eval's or our name of it, or in a YAML file.

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
        f"there are no answer tokens of a task {task!r}{nearest(task, known)}; `dispersion tokens {task} -o "
        "set.yaml` makes the set of any task that lm-eval has here, and set.yaml goes in place of the name"
    )


def answers_of_domain(domain_set_name: str) -> AnswerSet | None:
    """The answers that a bundled domain set's ratio is over; None for a domain without known answers."""
    if domain_set_name == "math":  # digits: the set is what answers are made of
        digits = [text for group in load_token_set("math").groups.values() for text in group.texts()]
        return AnswerSet("math", (), "math", "the ten digits", dict.fromkeys(digits, 1))
    return load_answers("humaneval") if domain_set_name == "code" else None


def resolve_answers(answers: AnswerSet, vocabulary: Vocabulary, everyday: TokenSet) -> tuple[Token, ...]:
    """The tokens that the answers consist of in a vocabulary, most frequent first, without everyday words.

    Each answer is cut up as the tokenizer does it, and its tokens count as often as it does. Kept are the
    most frequent that cover 90 % of all, and those as frequent as the last of them; 3 to 100.

    Raises:
        ScreeningError: ``TooFewTokens`` for fewer than 3 tokens, and where 100 cover less than two thirds;
            ``TokenizerMismatch`` for a set that a base of another tokenizer found.
    """
    left_out = {token.id for token in lookup(everyday, vocabulary)[0]}
    if answers.pieces:
        if vocabulary.digest != answers.tokenizer:
            raise ScreeningError(
                "TokenizerMismatch",
                f"{answers.name}: its tokens were found by {answers.base}, whose tokenizer differs from this "
                "one's; find them with this checkpoint's own base: dispersion tokens --base",
            )
        rows = ((vocabulary.id_of(piece), piece) for piece in answers.pieces)
        kept = [(row, piece) for row, piece in rows if row is not None and row not in left_out]
        return _enough(answers, vocabulary, kept)
    counts: Counter[tuple[int, str]] = Counter()
    for text, count in answers.answers.items():
        for token in vocabulary.cut(text):
            if token[0] not in left_out:
                counts[token] += count
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    whole, run, taken = sum(counts.values()), 0, 0
    while taken < min(len(ordered), MOST) and (
        run < COVERED * whole or taken < LEAST or ordered[taken][1] == ordered[taken - 1][1]
    ):
        run += ordered[taken][1]
        taken += 1
    if run < LEAST_COVERED * whole:
        raise ScreeningError(
            "TooFewTokens",
            f"{answers.name}: its answers are whole sentences or too many different words: the {MOST} most "
            f"frequent tokens cover {run / whole:.0%} of them, {LEAST_COVERED:.0%} are needed; name a --domain",
        )
    return _enough(answers, vocabulary, [token for token, _ in ordered[:taken]])


def _enough(answers: AnswerSet, vocabulary: Vocabulary, rows: list[tuple[int, str]]) -> tuple[Token, ...]:
    if len(rows) < LEAST:
        raise ScreeningError(
            "TooFewTokens",
            f"{answers.name}: expected answers of at least {LEAST} tokens, got {len(rows)}"
            f" ({', '.join(piece for _, piece in rows) or 'none'}); name a --domain",
        )
    return tuple(Token(vocabulary.text(piece), piece, row, answers.name) for row, piece in rows)


def _set(path: Path, file: _File, asked: str) -> AnswerSet:
    if file.refused:
        raise UsageError(
            f"{asked} has no answer tokens: {file.refused}; name a --domain, or let a base find tokens: "
            f"dispersion tokens --base MODEL --task {asked} -o set.yaml"
        )
    if bool(file.answers) == bool(file.pieces) or bool(file.pieces) != bool(file.tokenizer and file.base):
        raise mistake(path, "", "either `answers`, or `pieces` with `tokenizer` and `base`", None)
    counted = f"{file.documents:,} {'questions' if file.pieces else 'documents'}" if file.documents else ""
    of = f"answers of {file.name}" + (f" as {file.base} begins them" if file.base else "")
    return AnswerSet(
        name=file.name,
        tasks=file.tasks,
        domain=file.domain,
        about=of + (f" ({counted})" if counted else ""),
        answers=file.answers or {},
        pieces=file.pieces,
        tokenizer=file.tokenizer,
        base=file.base,
    )
