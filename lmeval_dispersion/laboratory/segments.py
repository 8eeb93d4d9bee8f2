"""Texts cut into segments of equal length, drawn at random, written to a file: padding never comes up.

A document is cut from its start into segments that do not overlap; what is left at its end is dropped.
Where the tokenizer begins a text with a special token (BOS), every segment begins with it, inside the
length. Texts of one running document (a text file), or all texts where ``pack`` is asked for, are joined
by a blank line first.

A random sample of a stream of unknown length needs one pass and the memory of one text: reservoir
sampling into a memory-mapped file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.texts import Text, Texts

Tokens = NDArray[np.uint32]

# A stream without an end is read until it has offered so many times the segments asked for.
_OVERSAMPLE = 20


@dataclass
class Counts:
    """Counts of a source's texts, read and left out.

    Attributes:
        texts: Texts read, skipped ones included.
        empty: Texts of white space only.
        undecodable: Texts that are not valid text.
        untokenised: Texts that the tokenizer failed on.
        too_short: Documents shorter than one segment.
        segments: Segments that the source offered.
        kept: Segments drawn.
    """

    texts: int = 0
    empty: int = 0
    undecodable: int = 0
    untokenised: int = 0
    too_short: int = 0
    segments: int = 0
    kept: int = 0

    def read(self, texts: Texts) -> None:
        """Take over what the latest pass over a source read and skipped."""
        self.texts = texts.read
        self.empty, self.undecodable = texts.skipped["empty"], texts.skipped["undecodable"]

    def report(self, source: str) -> str:
        """One sentence on what was read and what was left out."""
        left_out = {
            "empty": self.empty,
            "undecodable": self.undecodable,
            "that failed to tokenise": self.untokenised,
            "shorter than a segment": self.too_short,
        }
        parts = ", ".join(f"{n} {what}" for what, n in left_out.items() if n)
        segments, texts = (
            f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((self.segments, "segment"), (self.texts, "text"))
        )
        return f"{source}: {self.kept} of {segments} from {texts}" + (f" ({parts})" if parts else "")


class Segments(NamedTuple):
    """Segments of equal length with where they came from.

    Attributes:
        tokens: Shape (n, length), uint32, memory-mapped.
        origins: Shape (n, 2), int64: number of the text in its source, and the segment's first token in
            its document.
        counts: What became of the source's texts.
        source: Name of the source.
    """

    tokens: Tokens
    origins: NDArray[np.int64]
    counts: Counts
    source: str


def prefix_of(tokenizer: Any) -> list[int]:
    """The special tokens with which ``tokenizer`` begins a text, usually [] or [BOS]."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    return []


def write_segments(
    folder: Path,
    name: str,
    texts: Texts,
    tokenizer: Any,
    *,
    length: int,
    count: int,
    seed: int = 0,
    pack: bool = False,
) -> dict[str, Any]:
    """Draw ``count`` segments of ``length`` tokens from ``texts``, or all there are, in random order.

    Returns:
        ``counts`` (:class:`Counts` as a mapping) and ``sha256`` of the tokens, for a study's manifest.
    """
    prefix = prefix_of(tokenizer)
    body = length - len(prefix)
    if length < 2 or body < 1:
        raise UsageError(f"expected segments of at least {2 + len(prefix)} tokens, got {length}")
    if count < 1:
        raise UsageError(f"expected to draw at least 1 segment, got {count}")
    rng = np.random.default_rng(seed)
    counts = Counts()
    tokens = np.lib.format.open_memmap(folder / f"{name}.part.npy", "w+", np.uint32, (count, length))
    origins = np.zeros((count, 2), dtype=np.int64)
    for document in _documents(texts, tokenizer, counts, pack):
        before = counts.segments
        for number, start, ids in _cuts(document, body):
            # Reservoir sampling (algorithm R): the i-th segment replaces one of the kept with chance count/i.
            place = counts.segments if counts.segments < count else int(rng.integers(counts.segments + 1))
            counts.segments += 1
            if place < count:
                tokens[place], origins[place] = [*prefix, *ids], (number, start)
            if counts.segments >= _OVERSAMPLE * count:
                break
        counts.too_short += counts.segments == before
        if counts.segments >= _OVERSAMPLE * count:
            break
    counts.read(texts)
    counts.kept = min(count, counts.segments)
    if not counts.kept:
        raise UsageError(
            f"expected text for at least one segment of {length} tokens, got none: "
            f"{counts.report(texts.source)}; use shorter segments"
            + ("" if pack else ", or --pack to join texts")
        )
    order = rng.permutation(counts.kept)
    final = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.uint32, (counts.kept, length))
    for start in range(0, counts.kept, 4096):
        final[start : start + 4096] = tokens[order[start : start + 4096]]
    final.flush()
    np.save(folder / f"{name}.origins.npy", origins[order])
    del tokens
    (folder / f"{name}.part.npy").unlink()
    return {"counts": asdict(counts), "sha256": digest(final)}


def read_segments(folder: Path, name: str, written: dict[str, Any], source: str) -> Segments:
    """The segments that :func:`write_segments` wrote; ``written`` is what it returned."""
    tokens = np.load(folder / f"{name}.npy", mmap_mode="r")
    return Segments(tokens, np.load(folder / f"{name}.origins.npy"), Counts(**written["counts"]), source)


def tokenised(texts: Texts, tokenizer: Any, counts: Counts) -> Iterator[tuple[Text, list[int]]]:
    """Every text with its tokens, without special ones; texts that the tokenizer fails on are counted."""
    for text in texts:
        try:
            ids = tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids
        except Exception:  # tokenizers raise what they like, also plain Exception
            counts.untokenised += 1
            continue
        yield text, ids


# A document's tokens as they come: the number of a text and its tokens.
_Document = Iterator[tuple[int, list[int]]]


def _documents(texts: Texts, tokenizer: Any, counts: Counts, pack: bool) -> Iterator[_Document]:
    stream = tokenised(texts, tokenizer, counts)
    if pack or texts.continuous:
        gap = tokenizer("\n\n", add_special_tokens=False).input_ids
        yield ((text.id, [*ids, *gap]) for text, ids in stream)
    else:
        yield from (iter([(text.id, ids)]) for text, ids in stream)


def _cuts(document: _Document, body: int) -> Iterator[tuple[int, int, list[int]]]:
    """Segments of ``body`` tokens: the number of the text in which each starts, its offset, its tokens."""
    buffer: list[int] = []
    spans: list[tuple[int, int]] = []  # (end of the text in the document, its number)
    start = seen = 0
    for number, ids in document:
        seen += len(ids)
        spans.append((seen, number))
        buffer.extend(ids)
        while len(buffer) >= body:
            while spans[0][0] <= start:
                spans.pop(0)
            yield spans[0][1], start, buffer[:body]
            del buffer[:body]
            start += body


def digest(tokens: NDArray[Any]) -> str:
    """A hash of token ids: studies with the same one saw the same text in the same tokens."""
    return sha256(np.ascontiguousarray(tokens).data).hexdigest()
