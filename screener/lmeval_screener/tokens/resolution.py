"""Resolving token sets: the rows of T, R and a task's answers in a vocabulary.

Resolving looks each word of T and R up as one exact piece, in the one variant that its group names (``7``
bare, ``␣the`` spaced), without falling back to the other: the leading space is a direction of its own.
Missing words are dropped and listed, rows of T are removed from R, and sets that are then too small are
refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace

from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.sets import (
    AnswerSet,
    Token,
    TokenSet,
    is_file,
    load_token_set,
    lookup,
    some_words,
    with_reason,
)
from lmeval_screener.tokens.vocabulary import DigitScheme, Vocabulary

# Part of every cached resolution's key: raise it when the rule or the layout of an entry changes.
RESOLUTIONS = 7
DOMAIN = "math"  # if neither a domain nor a task is named


def load_domain(name: str | None = None, tasks: str | AnswerSet | None = None) -> TokenSet:
    """Load T for G and for the ratio: a domain's set, and the answers of a task or of the domain.

    ``tasks`` are ``NAME,NAME``: the ratio is over the first known answers among them, else over the domain's.
    With tasks alone, G uses the domain that the answers name, or the answers themselves.

    Raises:
        UsageError: A set is not known, or neither the answers of a task nor a domain.
    """
    from lmeval_screener.tokens.answers import LEAST, answers_of_domain, first_known, tasks_in

    task = ""
    remark = ""
    answers: AnswerSet | None = None
    evaluated: tuple[str, ...] = ()
    if isinstance(tasks, AnswerSet):
        answers = tasks
        task = tasks.name
        evaluated = tasks.tasks
    elif tasks:
        task, answers, refused = first_known(tasks)
        if answers is None and name is None:
            raise refused[0]
        evaluated = tasks_in(tasks)
        if answers is not None and is_file(task):
            task = answers.name
        if refused:
            why = str(refused[0]).partition(";")[0]
            remark = f"the ratio is over tokens of {task or name}; {why}"
    if answers is None:
        answers = answers_of_domain(name or DOMAIN)
    if name or answers is None or answers.domain:
        words = load_token_set(name or (answers and answers.domain) or DOMAIN)
    else:
        words = TokenSet(answers.name, "domain", LEAST, {}, "")
    words = replace(words, tasks=evaluated or words.tasks, remark=remark)
    if answers is None or not (task or answers.tasks):
        return words  # the set itself holds the answers, or they are not known
    digest = hashlib.sha256(f"{words.digest} {answers.digest}".encode()).hexdigest()
    return replace(words, answers=answers, task=task, digest=digest)


@dataclass(frozen=True)
class Resolution:
    """The rows of T and R in one vocabulary.

    Attributes:
        domain: T, in the order of the token set.
        reference: R likewise, without the rows of T.
        dropped: Surface forms of T that are not a single piece.
        dropped_reference: Those of R.
        never_made: Those whose piece exists but is never made from text, with the reason.
        shared: Tokens of R that are rows of T, and so were removed from R.
        one_row: Words of one set that share a row, which counts once.
        digit_scheme: How numbers are split, see `Vocabulary.digit_scheme`.
        vocabulary: The tokenizer's rows: its last id + 1; a padded matrix has more.
        answers: T of the ratio, none of them in R; empty if unknown.
        left_out: Share of the answers' tokens that do not differ, or are in sentences.
    """

    domain: tuple[Token, ...]
    reference: tuple[Token, ...]
    dropped: tuple[str, ...]
    dropped_reference: tuple[str, ...]
    never_made: tuple[str, ...]
    shared: tuple[Token, ...]
    one_row: tuple[str, ...]
    digit_scheme: DigitScheme
    vocabulary: int
    answers: tuple[Token, ...] = ()
    left_out: float = 0.0

    @property
    def of_ratio(self) -> tuple[Token, ...]:
        """The tokens of T for the ratio."""
        return self.answers or self.domain

    @property
    def compared(self) -> tuple[Token, ...]:
        """All tokens with rows to read: T, R, and T of the ratio."""
        return *self.domain, *self.reference, *self.answers

    @property
    def domain_ids(self) -> list[int]:
        """Row ids of T, in its order."""
        return [token.id for token in self.domain]

    @property
    def reference_ids(self) -> list[int]:
        """Row ids of R, in its order."""
        return [token.id for token in self.reference]

    @classmethod
    def from_json(cls, content: bytes | str) -> Resolution:
        """Read a resolution from the JSON of `to_json`."""
        fields = json.loads(content)
        for name, value in fields.items():
            if name in ("domain", "reference", "shared", "answers"):
                fields[name] = tuple(Token(*token) for token in value)
            elif isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)

    def to_json(self) -> str:
        """The resolution as JSON."""
        return json.dumps(vars(self))


def resolve_tokens(domain: TokenSet, reference: TokenSet, vocabulary: Vocabulary) -> Resolution:
    """The rows of T and R in a vocabulary, by the rule in the module's docstring; or ScreeningError."""
    tokens, dropped, doubled = lookup(domain, vocabulary)
    answers: tuple[Token, ...] = ()
    left_out = 0.0
    if domain.answers is not None:
        from lmeval_screener.tokens.answers import resolve_answers

        # Answers that a vocabulary lacks are an error only if the user asked for them.
        with contextlib.nullcontext() if domain.task else contextlib.suppress(ScreeningError):
            answers, left_out = resolve_answers(domain.answers, vocabulary, reference)
    if not domain.groups:
        tokens = list(answers)
    rows_of_domain = {token.id for token in tokens}
    everyday, dropped_reference, doubled_reference = lookup(reference, vocabulary)
    kept: list[Token] = []
    shared: list[Token] = []
    for token in everyday:
        (shared if token.id in rows_of_domain else kept).append(token)
    _check_count(domain, len(tokens), dropped)
    taken = f", {len(shared)} belong to {domain.name}" if shared else ""
    _check_count(reference, len(kept), dropped_reference, taken)
    never_made = []
    for text in dict.fromkeys((*dropped, *dropped_reference)):
        if vocabulary.never_made(text):
            never_made.append(with_reason(text, vocabulary).strip())
    if {token.id for token in answers} == rows_of_domain:
        answers = tuple(tokens)
    return Resolution(
        domain=tuple(tokens),
        reference=tuple(kept),
        dropped=tuple(dropped),
        dropped_reference=tuple(dropped_reference),
        never_made=tuple(never_made),
        shared=tuple(shared),
        one_row=(*doubled, *doubled_reference),
        digit_scheme=vocabulary.digit_scheme(),
        vocabulary=vocabulary.size,
        answers=answers,
        left_out=left_out,
    )


def _check_count(words: TokenSet, count: int, dropped: list[str], also: str = "") -> None:
    if count >= words.min_tokens:
        return
    asked = set[str]()
    for group in words.groups.values():
        asked.update(group.texts())
    missing = f"; no single token: {some_words(dropped)}" if dropped else ""
    raise ScreeningError(
        "TooFewTokens",
        f"{words.name}: expected at least {words.min_tokens} single tokens, got {count} of "
        f"{len(asked)}{also}{missing}; take more groups or a token set made for this vocabulary",
    )
