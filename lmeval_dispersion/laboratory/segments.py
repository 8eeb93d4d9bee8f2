"""Segments of texts: equal length, no padding, drawn in one pass by reservoir sampling.

A document is cut from its start into segments that do not overlap; the rest is dropped. If the
tokenizer begins a text with a special token (BOS), every segment begins with it, and its length
includes it; the segments of an encoder also end as its tokenizer ends a text. The texts of a
running document (a text file), or all texts with ``pack``, are first joined by a blank line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.model.texts import Texts

Unit = dict[str, NDArray[Any]]  # the arrays of one unit of work

# An endless stream is read until it offered this many times the requested segments.
_OVERSAMPLE = 20


class Segments(NamedTuple):
    """Segments of a text: runs of equally many tokens.

    Attributes:
        tokens: Shape (n, length), uint32.
        origins: Shape (n, 2), int64: the number of the text in its source, and the place of the
            segment's first token in its document.
        source: Name of the source, as messages show it.
    """

    tokens: NDArray[np.uint32]
    origins: NDArray[np.int64]
    source: str


def draw_segments(
    texts: Texts,
    tokenizer: Any,
    *,
    length: int,
    most: int,
    seed: int = 0,
    pack: bool = False,
    suffix: Sequence[int] = (),
) -> Unit:
    """Draw segments of one length from texts, in random order.

    Args:
        texts: The texts.
        tokenizer: A tokenizer of transformers.
        length: Number of tokens in a segment, special tokens included.
        most: Maximum number of segments. They are drawn from the first 20 * ``most`` segments.
        seed: Seed of the draw.
        pack: Whether to join all texts into one before they are cut.
        suffix: Special tokens with which every segment ends.

    Returns:
        The arrays ``tokens`` and ``origins`` of `Segments`.

    Raises:
        UsageError: The texts are too short for a segment, or ``length`` or ``most`` is too small.
    """
    prefix, _ = affixes_of(tokenizer)
    special = len(prefix) + len(suffix)
    body = length - special
    least = max(2, 1 + special)
    if length < least:
        raise UsageError(
            f"expected segments of at least {least} tokens, got {length}; use longer segments"
        )
    if most < 1:
        raise UsageError(
            f"expected to draw at least 1 segment, got {most}; raise the number of segments"
        )
    rng = np.random.default_rng(seed)
    offered = 0
    tokens = np.zeros((most, length), dtype=np.uint32)
    origins = np.zeros((most, 2), dtype=np.int64)
    for number, start, ids in _cuts(texts, tokenizer, body, pack):
        # Reservoir sampling (algorithm R): the i-th segment replaces one of the kept with chance most/i.
        place = offered if offered < most else int(rng.integers(offered + 1))
        offered += 1
        if place < most:
            tokens[place] = [*prefix, *ids, *suffix]
            origins[place] = (number, start)
        if offered >= _OVERSAMPLE * most:
            break
    if not offered:
        advice = "join texts (pack)"
        if pack or texts.continuous:
            advice = "more text"
        read = report(texts.source, counts(texts, 0)).removeprefix(f"{texts.source}: ")
        raise UsageError(
            f"expected at least one segment of {length} tokens from {texts.source}, got {read}; "
            f"use shorter segments, or {advice}"
        )
    order = rng.permutation(min(most, offered))
    return {"tokens": tokens[order], "origins": origins[order]}


def counts(texts: Texts, kept: int) -> dict[str, int]:
    """Return how many texts the latest pass has read, and how many were left out for each reason.

    Args:
        texts: The texts.
        kept: Number of segments that were kept.

    Returns:
        ``texts``, the number of texts that were read; for each reason, such as ``too_short``, the
        number of texts that were left out; and ``kept``.
    """
    return {"texts": texts.read, **texts.skipped, "kept": kept}


def report(source: str, counted: Mapping[str, int]) -> str:
    """Return a line on how many segments were kept, and how many texts were read and left out.

    Args:
        source: Name of the source.
        counted: What `counts` returns.

    >>> report("a.jsonl", {"texts": 3, "empty": 1, "undecodable": 0, "too_short": 1, "kept": 1})
    'a.jsonl: 1 segment from 3 texts (1 empty, 1 too short)'
    """
    left_out = []
    for reason, number in counted.items():
        if number and reason not in ("texts", "kept"):
            left_out.append(f"{number} {reason.replace('_', ' ')}")
    segments = count(counted["kept"], "segment")
    texts = count(counted["texts"], "text")
    sentence = f"{source}: {segments} from {texts}"
    if left_out:
        sentence += f" ({', '.join(left_out)})"
    return sentence


def tokenised(texts: Texts, tokenizer: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield for each text its number in the source and its token ids, without special tokens.

    A text on which the tokenizer fails is left out and counted in ``texts.skipped``.
    """
    for text in texts:
        try:
            ids = tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids
        except Exception:  # tokenizers may raise any exception
            texts.skipped["untokenised"] += 1
            continue
        yield text.id, ids


def gap_of(texts: Texts, tokenizer: Any, pack: bool) -> list[int] | None:
    """Return the token ids of the blank line between joined texts; None if texts stay separate."""
    if not (pack or texts.continuous):
        return None
    return list(tokenizer("\n\n", add_special_tokens=False).input_ids)


def affixes_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens that a tokenizer puts before and after a text.

    Both lists are empty if the text's own tokens change when special tokens are added.
    """
    bare = tokenizer("a", add_special_tokens=False).input_ids
    full = tokenizer("a").input_ids
    for start in range(len(full) - len(bare) + 1):
        end = start + len(bare)
        if full[start:end] == bare:
            return list(full[:start]), list(full[end:])
    return [], []


def blocks(rows: int, size: int) -> list[NDArray[np.int64]]:
    """Return the numbers 0 to ``rows`` - 1 in blocks of ``size``; the last block may be shorter."""
    starts = range(0, rows, size)
    return [np.arange(start, min(start + size, rows)) for start in starts]


def _cuts(
    texts: Texts, tokenizer: Any, body: int, pack: bool
) -> Iterator[tuple[int, int, list[int]]]:
    """Segments of ``body`` tokens: the number of the text in which each starts, its offset, its tokens."""
    gap = gap_of(texts, tokenizer, pack)
    start = 0
    buffer: list[int] = []
    # For each text in the buffer its end in the document and its number.
    spans: list[tuple[int, int]] = []
    for number, ids in tokenised(texts, tokenizer):
        if gap is None:
            start = 0
            buffer = []
            spans = []
            texts.skipped["too_short"] += len(ids) < body
        buffer += [*ids, *(gap or [])]
        spans.append((start + len(buffer), number))
        while len(buffer) >= body:
            while spans[0][0] <= start:
                spans.pop(0)
            yield spans[0][1], start, buffer[:body]
            del buffer[:body]
            start += body
