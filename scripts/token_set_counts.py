"""Prints the table of ``docs/reference/token-sets.md``: what each bundled set resolves to on each tokenizer.

python scripts/token_set_counts.py [FOLDER_OF_TOKENIZER_JSON_FILES]
"""

from __future__ import annotations

import sys
from pathlib import Path

from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens import TokenSet, load_token_set, resolve_tokens
from lmeval_screener.tokens.vocabulary import Vocabulary

SELECTIONS = ["math", "math:operators", "math:number_words", "code", "code:code_only", "code:builtins"]
SELECTIONS += ["legal", "legal:contract,court,common"]


def asked(words: TokenSet) -> int:
    return len({text for group in words.groups.values() for text in group.texts()})


def table(folder: Path) -> str:
    """The table in Markdown: found of asked, for every ``*.json`` in the folder."""
    sets = [load_token_set(name) for name in SELECTIONS]
    reference = load_token_set("reference", "reference")
    heads = ["tokenizer", "numbers", *(f"`{domain.name}`" for domain in sets), "reference"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for path in sorted(folder.glob("*.json")):
        vocabulary = Vocabulary.from_tokenizer_json(path.read_bytes())
        cells = []
        for domain in sets:
            try:
                resolution = resolve_tokens(domain, reference, vocabulary)
                cells.append(f"{len(resolution.domain)} of {asked(domain)}")
            except ScreeningError as error:
                cells.append(error.code)
        scheme = vocabulary.digit_scheme()
        everyday = len(resolve_tokens(load_token_set("math"), reference, vocabulary).reference)
        lines.append(
            f"| {path.stem} | {scheme} | " + " | ".join(cells) + f" | {everyday} of {asked(reference)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/tokenizers")))
