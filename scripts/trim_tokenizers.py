"""Makes the small tokenizers in ``tests/data/tokenizers`` from whole ones.

    python scripts/trim_tokenizers.py FOLDER_OF_FOLDERS tests/data/tokenizers

Kept: normalizer, pre-tokenizer, decoder and added tokens as they are; of the vocabulary, with true ids, what
the sets ask for, single characters and some two thousand others, evenly. The merges go: resolving doesn't use
them. Each small file must resolve every bundled set, in every selection of one group and by default, exactly
as the whole one does, or nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.resolution import Resolution, resolve_tokens
from lmeval_screener.tokens.sets import bundled_token_sets, described_groups, load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary

from lmeval_dispersion.errors import UsageError

OTHERS = 2000
LIMIT = 200_000


def selections() -> list[str]:
    """Every domain set by default and by each of its groups."""
    names = []
    for name in bundled_token_sets():
        groups = described_groups(name)
        if groups[0][0] == "domain":
            names += [name, *(f"{name}:{key}" for _, key, _, _ in groups)]
    return names


def words() -> set[str]:
    """Every item of every bundled set, in the case in which it is looked up."""
    groups = [group for name in bundled_token_sets() for _, _, group, _ in described_groups(name)]
    return {text.strip() for group in groups for text in group.texts()}


def trimmed(content: bytes) -> bytes:
    """The small tokenizer.json."""
    data = json.loads(content)
    vocabulary = Vocabulary.from_tokenizer_json(content)
    pieces: dict[str, int] = data["model"]["vocab"]
    forms = words() | {f"{number:0{width}d}" for width in (1, 2, 3) for number in range(10**width)}
    kept = {vocabulary.piece(space + form) for form in forms for space in ("", " ")}
    kept |= {piece for piece in pieces if piece.startswith("<0x") or len(piece) == 1}
    ordered = sorted(pieces, key=pieces.__getitem__)
    kept.update(
        [*ordered[:: max(1, len(ordered) // OTHERS)], ordered[-1]]
    )  # the last id tells the size
    data["model"]["vocab"] = {piece: pieces[piece] for piece in ordered if piece in kept}
    data["model"]["merges"] = []
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def outcome(selection: str, vocabulary: Vocabulary) -> Resolution | str:
    """The resolution, or the words it is refused with."""
    try:
        return resolve_tokens(
            load_token_set(selection), load_token_set("reference", "reference"), vocabulary
        )
    except (ScreeningError, UsageError) as error:
        return str(error)


def main(source: Path, target: Path) -> int:
    for folder in sorted(path for path in source.iterdir() if (path / "tokenizer.json").is_file()):
        whole = (folder / "tokenizer.json").read_bytes()
        small = trimmed(whole)
        before, after = (Vocabulary.from_tokenizer_json(content) for content in (whole, small))
        differing = [name for name in selections() if outcome(name, before) != outcome(name, after)]
        sizes = f"{len(whole)} -> {len(small)} bytes"
        print(
            f"{folder.name}: {sizes}, {len(selections())} selections, differing: {differing or 'none'}"
        )
        if differing or len(small) > LIMIT:
            return 1
        (target / f"{folder.name}.json").write_bytes(small)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
