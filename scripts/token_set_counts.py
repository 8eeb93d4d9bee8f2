"""Prints the tables of ``docs/reference/token-sets.md``: what each bundled set resolves to on each
tokenizer, and how frequent its tokens are.

python scripts/token_set_counts.py [FOLDER_OF_TOKENIZER_JSON_FILES]
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from statistics import median

from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.resolution import resolve_tokens
from lmeval_screener.tokens.sets import Token, TokenSet, load_token_set, lookup
from lmeval_screener.tokens.vocabulary import Vocabulary
from trim_tokenizers import selections

from lmeval_dispersion.errors import UsageError


def taken() -> list[TokenSet]:
    """Every domain's set by default, and each of its other groups that is large enough alone."""
    sets: dict[str, TokenSet] = {}
    for name in selections():
        with contextlib.suppress(UsageError):
            words = load_token_set(name)
            if not any(words.groups.items() <= known.groups.items() for known in sets.values()):
                sets[name] = words
    return list(sets.values())


def asked(words: TokenSet) -> int:
    return len({text for group in words.groups.values() for text in group.texts()})


def is_whole(cell: str) -> bool:
    found, _, of = cell.partition("/")
    return found == of


def table(folder: Path) -> str:
    """Found of asked, for every ``*.json`` in the folder, in Markdown; without sets that all have whole."""
    sets = taken()
    reference = load_token_set("reference", "reference")
    columns: dict[str, list[str]] = {name: [] for name in ("tokenizer", "numbers")}
    for path in sorted(folder.glob("*.json")):
        vocabulary = Vocabulary.from_tokenizer_json(path.read_bytes())
        columns["tokenizer"].append(path.stem)
        columns["numbers"].append(vocabulary.digit_scheme())
        for domain in sets:
            try:
                found = (
                    f"{len(resolve_tokens(domain, reference, vocabulary).domain)}/{asked(domain)}"
                )
            except ScreeningError:
                found = "refused"
            columns.setdefault(f"`{domain.name}`", []).append(found)
        everyday = len(resolve_tokens(load_token_set("math"), reference, vocabulary).reference)
        columns.setdefault("reference", []).append(f"{everyday}/{asked(reference)}")
    return markdown(
        {name: cells for name, cells in columns.items() if not all(map(is_whole, cells))}
    )


RANKED = ("code", "code:line_start", "legal", "legal:capitals", "legal:obligations", "numbers")


def ranks(folder: Path) -> str:
    """Median rank of each set's tokens in each vocabulary, by frequency, as a share of its pieces.

    A piece's id is its rank: merges are learnt from the most frequent on. Signs of the base alphabet,
    as single digits are, have none.
    """
    references = {name: load_token_set(name, "reference") for name in ("reference", "reference-v1")}
    columns: dict[str, list[str]] = {"tokenizer": []}
    for path in sorted(folder.glob("*.json")):
        vocabulary = Vocabulary.from_tokenizer_json(path.read_bytes())
        columns["tokenizer"].append(path.stem)
        for name, reference in references.items():
            tokens, _, _ = lookup(reference, vocabulary)
            columns.setdefault(f"R: `{name}`", []).append(median_rank(tokens, vocabulary))
        for name in RANKED:
            try:
                tokens, _, _ = lookup(load_token_set(name), vocabulary)
            except ScreeningError:
                tokens = []
            columns.setdefault(f"`{name}`", []).append(median_rank(tokens, vocabulary))
    return markdown(columns)


def median_rank(tokens: list[Token], vocabulary: Vocabulary) -> str:
    if not tokens:
        return "–"
    return f"{median(token.id for token in tokens) / vocabulary.size:.2f}"


def markdown(columns: dict[str, list[str]]) -> str:
    """A table of columns."""
    lines = [list(columns), ["-"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    tokenizers = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/tokenizers")
    print(table(tokenizers))
    print()
    print(ranks(tokenizers))
