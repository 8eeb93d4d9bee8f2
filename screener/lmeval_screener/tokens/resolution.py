"""Resolving token sets: the rows of T, R and a task's answers in a vocabulary.

Resolving looks each word of T and R up as one exact piece, in the one variant that its group names
(``7`` bare, ``␣the`` spaced), without falling back to the other: the leading space is a direction
of its own. Missing words are dropped and listed, rows of T are removed from R, and sets that are
then too small are refused.
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
    """Load the tokens to compare: a domain's words for the gap G, and answers for the ratio.

    G and the ratio are the two figures of a screening.

    Args:
        name: Name or file of the domain's token set. None takes the domain that the answers name,
            or ``math`` if no tasks are given. If the answers name no domain, G is computed from the
            answers, too.
        tasks: Tasks as ``NAME,NAME``, the path of a file with answers, or an answer set. The ratio
            is computed from the answers of the first task that has any; if none has, from the
            domain's own answers or words.

    Returns:
        The domain's token set, whose ``answers`` are those for the ratio.

    Raises:
        UsageError: A set is not known or its file is broken, or no task has answers and no domain
            is named.
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
            remark = f"the ratio uses the tokens of {task or name}, since {why}"
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
    """The words of T (a domain) and R (everyday words) as tokens of one vocabulary.

    Attributes:
        domain: The tokens of T, in the order of the token set; the gap G is computed from them.
        reference: The tokens of R in the order of the token set, without those that are in T.
        dropped: Words of T that are not a single token.
        dropped_reference: Words of R that are not a single token.
        never_made: Dropped words that do have a token, but one that the tokenizer never makes from
            text; each with the reason in brackets.
        shared: Tokens of R that were removed because they are in T.
        one_row: Pairs of words in one set that have the same token, as ``A and B``; the token
            counts once.
        digit_scheme: How the tokenizer splits numbers; see `Vocabulary.digit_scheme`.
        vocabulary: The last token id plus 1. The output projection may have more rows, as padding.
        answers: The tokens of a task's answers for the ratio, none of them in R; empty if the ratio
            uses ``domain``.
        left_out: Share of the answers' tokens that is not in ``answers`` (see `resolve_answers`).
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
        """The tokens that give the ratio: ``answers``, or ``domain`` if ``answers`` is empty."""
        return self.answers or self.domain

    @property
    def compared(self) -> tuple[Token, ...]:
        """All tokens whose rows are read: ``domain``, ``reference`` and ``answers``, in order."""
        return *self.domain, *self.reference, *self.answers

    @property
    def domain_ids(self) -> list[int]:
        """Token ids of the domain's words T, in the order of ``domain``."""
        return [token.id for token in self.domain]

    @property
    def reference_ids(self) -> list[int]:
        """Token ids of the everyday words R, in the order of ``reference``."""
        return [token.id for token in self.reference]

    @classmethod
    def from_json(cls, content: bytes | str) -> Resolution:
        """Read a resolution from JSON, as `to_json` returned it."""
        fields = json.loads(content)
        for name, value in fields.items():
            if name in ("domain", "reference", "shared", "answers"):
                fields[name] = tuple(Token(*token) for token in value)
            elif isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)

    def to_json(self) -> str:
        """Return the resolution as JSON text."""
        return json.dumps(vars(self))


def resolve_tokens(domain: TokenSet, reference: TokenSet, vocabulary: Vocabulary) -> Resolution:
    """Find the tokens of two word sets, T and R, and of a task's answers in a vocabulary.

    Each word must be one exact token in the variant that its group names: with a space before it
    (``␣the``) or without (``7``). Other words are dropped, and tokens of T are removed from R.

    Args:
        domain: T, the words of a domain, with the answers for the ratio.
        reference: R, everyday words for comparison.
        vocabulary: The vocabulary of a checkpoint.

    Raises:
        ScreeningError: ``TooFewTokens``: too few words of a set are single tokens. If the user
            named a task, also the errors of `resolve_answers`; otherwise, these only mean that the
            ratio is computed from T.
    """
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
    taken = f" ({len(shared)} more belong to {domain.name})" if shared else ""
    _check_count(reference, len(kept), dropped_reference, taken)
    never_made = []
    for text in dict.fromkeys((*dropped, *dropped_reference)):
        if vocabulary.never_made(text):
            never_made.append(with_reason(text, vocabulary).strip())
    rows_of_answers = {token.id for token in answers}
    if rows_of_answers == rows_of_domain:
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
    missing = f"; not a single token: {some_words(dropped)}" if dropped else ""
    raise ScreeningError(
        "TooFewTokens",
        f"{words.name}: expected at least {words.min_tokens} words that are single tokens, got "
        f"{count} of {len(asked)}{also}{missing}; take more groups or a token set made for this vocabulary",
    )
