"""From words to rows: token sets resolved in one tokenizer's vocabulary.

Resolving looks each word of T and R up as one exact piece, in the one variant that its group names (``7``
bare, ``␣the`` spaced), without falling back to the other: the leading space is a direction of its own. What
is missing is dropped and listed, rows of T are taken out of R, and sets that end up too small are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.sets import TokenSet
from lmeval_screener.tokens.vocabulary import DigitScheme, Vocabulary


class Token(NamedTuple):
    """One word that resolved: its surface form, the vocabulary's piece, the row's id, and its group."""

    text: str
    piece: str
    id: int
    group: str


@dataclass(frozen=True)
class Resolution:
    """The rows that stand for T and R in one vocabulary.

    Attributes:
        domain: T in the order of the token set.
        reference: R in the order of the token set, without the rows of T.
        dropped: Surface forms of T that are no single piece.
        dropped_reference: The same of R.
        never_made: Those of the dropped whose piece is there but never made of text, each with the reason.
        shared: Tokens of R that are rows of T, and so were taken out of R.
        one_row: Words of one set that the vocabulary puts on one row, which counts once.
        digit_scheme: How numbers are cut up; see ``Vocabulary.digit_scheme``.
        vocabulary: Rows that the tokenizer names: its last id + 1. A matrix has more where it is padded.
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

    @property
    def domain_ids(self) -> list[int]:
        """Row ids of T, in its order."""
        return [token.id for token in self.domain]

    @property
    def reference_ids(self) -> list[int]:
        """Row ids of R, in its order."""
        return [token.id for token in self.reference]


def resolve(domain: TokenSet, reference: TokenSet, vocabulary: Vocabulary) -> Resolution:
    """The rows of T and R in a vocabulary, by the rule in the module's docstring."""
    tokens, dropped, doubled = _lookup(domain, vocabulary)
    rows_of_domain = {token.id for token in tokens}
    everyday, dropped_reference, doubled_reference = _lookup(reference, vocabulary)
    kept = tuple(token for token in everyday if token.id not in rows_of_domain)
    shared = tuple(token for token in everyday if token.id in rows_of_domain)
    _enough(domain, len(tokens), dropped)
    _enough(
        reference, len(kept), dropped_reference, f", {len(shared)} belong to {domain.name}" if shared else ""
    )
    return Resolution(
        tokens,
        kept,
        tuple(dropped),
        tuple(dropped_reference),
        tuple(
            f"{text.strip()} ({why})"
            for text in dict.fromkeys((*dropped, *dropped_reference))
            if (why := vocabulary.never_made(text)) is not None
        ),
        shared,
        (*doubled, *doubled_reference),
        vocabulary.digit_scheme(),
        vocabulary.size,
    )


def _lookup(words: TokenSet, vocabulary: Vocabulary) -> tuple[tuple[Token, ...], list[str], list[str]]:
    """Tokens of a set, each row once; the surface forms without a row; and those that share one."""
    tokens: dict[int, Token] = {}
    dropped: dict[str, None] = {}
    doubled: dict[str, None] = {}
    for name, group in words.groups.items():
        missing = []
        for text in group.texts():
            row = vocabulary.row(text)
            if row is None:
                missing.append(text)
                continue
            first = tokens.setdefault(row[0], Token(text, row[1], row[0], name))
            if first.text == text:
                continue
            pair = f"{first.text.strip()} and {text.strip()}"
            if group.require_all:
                raise ScreeningError(
                    "TooFewTokens",
                    f"{words.name}: expected a row for each of the {len(group.items)} items of {name}, "
                    f"but {pair} share row {row[0]}; the tokenizer file is damaged, save it again",
                )
            doubled[pair] = None
        if missing and group.require_all:
            raise ScreeningError(
                "TooFewTokens",
                f"{words.name}: expected all {len(group.items)} items of {name} as single tokens, "
                f"{len(missing)} are not: {_shown([_told(text, vocabulary) for text in missing])}",
            )
        dropped.update(dict.fromkeys(missing))
    return tuple(tokens.values()), list(dropped), list(doubled)


def _told(text: str, vocabulary: Vocabulary) -> str:
    why = vocabulary.never_made(text)
    return text if why is None else f"{text} ({why})"


def _enough(words: TokenSet, count: int, dropped: list[str], also: str = "") -> None:
    if count < words.min_tokens:
        asked = len({text for group in words.groups.values() for text in group.texts()})
        missing = f"; no single token: {_shown(dropped)}" if dropped else ""
        raise ScreeningError(
            "TooFewTokens",
            f"{words.name}: expected at least {words.min_tokens} single tokens, found {count} of {asked}"
            f"{also}{missing}; take more groups or a token set made for this vocabulary",
        )


def _shown(texts: list[str]) -> str:
    first = ", ".join(text.strip() for text in texts[:6])
    return first if len(texts) <= 6 else f"{first} and {len(texts) - 6} more"
