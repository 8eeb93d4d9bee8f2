"""Recurring n-grams of a text, with the contexts before them.

The text is written once as a flat file of tokens. Every n-gram is hashed; a table of counters, whose size
does not depend on the text, says which hashes can be frequent, and only their places are kept and compared
token by token. Occurrences never overlap: where one frequent n-gram is a shifted copy of another, the more
frequent one takes the place.

Source: RD section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.laboratory.segments import Counts, prefix_of, tokenised
from lmeval_dispersion.model.texts import Texts

_COUNTERS = 2**24
_CHUNK = 2**20  # places hashed at a time


class Contexts(NamedTuple):
    """Contexts that end where a recurring n-gram begins.

    Attributes:
        tokens: Shape (clusters, contexts, length), uint32.
        ngrams: The n-gram of each cluster, shape (clusters, n).
        occurrences: How often it occurs with a whole context before it, shape (clusters,).
    """

    tokens: NDArray[np.uint32]
    ngrams: NDArray[np.uint32]
    occurrences: NDArray[np.int64]


class _Corpus(NamedTuple):
    """All tokens, flat, and for each the offset of its document's start."""

    tokens: Any
    starts: NDArray[np.int64]  # of every document, ascending

    def usable(self, begin: int, end: int, n: int, before: int) -> NDArray[np.int64]:
        """Places in [begin, end) where an n-gram fits whose document has ``before`` tokens before it."""
        places = np.arange(begin, min(end, len(self.tokens) - n + 1))
        document = np.searchsorted(self.starts, places, side="right") - 1
        ends = np.append(self.starts[1:], len(self.tokens))[document]
        return places[(places - self.starts[document] >= before) & (places + n <= ends)]


def write_corpus(folder: Path, texts: Texts, tokenizer: Any, pack: bool) -> Counts:
    """Write the tokens of ``texts`` and where their documents start to ``folder``.

    Raises:
        UsageError: There is no text.
    """
    counts = Counts()
    starts: list[int] = []
    total = 0
    document = -1
    gap = tokenizer("\n\n", add_special_tokens=False).input_ids
    with (folder / "corpus.u32").open("wb") as file:
        for text, ids in tokenised(texts, tokenizer, counts):
            joins = starts and (pack or text.document == document)
            if not joins:
                starts.append(total)
            document = text.document
            ids = [*gap, *ids] if joins else ids
            np.array(ids, dtype=np.uint32).tofile(file)
            total += len(ids)
    counts.read(texts)
    if not total:
        raise UsageError(f"expected text, got none: {counts.report(texts.source)}")
    np.save(folder / "corpus.starts.npy", np.array(starts, dtype=np.int64))
    return counts


def recurring_contexts(
    folder: Path,
    tokenizer: Any,
    *,
    ngram: int,
    occurrences: int,
    contexts: int,
    context: int,
    clusters: int,
    seed: int,
) -> Contexts:
    """The contexts of the most frequent n-grams of the corpus in ``folder``.

    Args:
        folder: Where :func:`write_corpus` wrote.
        tokenizer: Whose first special tokens begin every context.
        ngram: Tokens of an n-gram.
        occurrences: How often it must occur.
        contexts: Occurrences to draw of each.
        context: Tokens of a context, special ones included.
        clusters: The most n-grams to take.
        seed: Of the draw.

    Raises:
        UsageError: Fewer than two n-grams occur so often.
    """
    starts = np.load(folder / "corpus.starts.npy")
    corpus = _Corpus(np.memmap(folder / "corpus.u32", dtype=np.uint32, mode="r"), starts)
    prefix = prefix_of(tokenizer)
    body = context - len(prefix)
    if body < 1 or ngram < 1 or contexts < 2 or occurrences < contexts:
        raise UsageError(
            f"expected contexts of at least {len(prefix) + 1} tokens, n-grams of at least 1, and at least as "
            f"many occurrences as contexts (2 or more), got {context}, {ngram}, {occurrences} and {contexts}"
        )
    frequent, most = _frequent(corpus, ngram, body, occurrences)
    taken = np.zeros(len(corpus.tokens), dtype=bool)
    rng = np.random.default_rng(seed)
    found: list[tuple[NDArray[np.int64], int]] = []
    for places in frequent:
        free = _apart(places, ngram, taken)
        if len(free) < occurrences:
            continue
        for place in free:
            taken[place : place + ngram] = True
        found.append((np.sort(rng.choice(free, contexts, replace=False)), len(free)))
        if len(found) == clusters:
            break
    if len(found) < 2:
        raise UsageError(
            f"expected at least 2 {ngram}-grams that occur {occurrences} times with {body} tokens before "
            f"them, got {len(found)} (the most frequent one occurs {most} times); pass more text, or lower "
            "--ngram, --occurrences or --context"
        )
    chosen = np.stack([places for places, _ in found])
    tokens = np.empty((*chosen.shape, context), dtype=np.uint32)
    tokens[..., : len(prefix)] = prefix
    tokens[..., len(prefix) :] = corpus.tokens[chosen[..., None] + np.arange(-body, 0)]
    ngrams = corpus.tokens[chosen[:, :1] + np.arange(ngram)]
    return Contexts(tokens, np.asarray(ngrams), np.array([count for _, count in found], dtype=np.int64))


def _frequent(corpus: _Corpus, n: int, before: int, least: int) -> tuple[list[NDArray[np.int64]], int]:
    """Places of every n-gram with at least ``least`` of them, most frequent first; and the highest count."""
    counters = np.zeros(_COUNTERS, dtype=np.int32)
    for _, hashes in _hashed(corpus, n, before):
        counters += np.bincount(hashes % _COUNTERS, minlength=_COUNTERS).astype(np.int32)
    most = int(counters.max())
    kept_places, kept_hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for places, hashes in _hashed(corpus, n, before):
        can = counters[hashes % _COUNTERS] >= least
        kept_places.append(places[can])
        kept_hashes.append(hashes[can])
    places, hashes = np.concatenate(kept_places), np.concatenate(kept_hashes)
    order = np.argsort(hashes, kind="stable")
    places, hashes = places[order], hashes[order]
    cuts = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
    frequent = []
    for alike in np.split(places, cuts):
        # Two n-grams of one hash are told apart; the first one's stays.
        same = (
            corpus.tokens[alike[:, None] + np.arange(n)] == corpus.tokens[alike[:1, None] + np.arange(n)]
        ).all(1)
        if same.sum() >= least:
            frequent.append(alike[same])
    return sorted(frequent, key=lambda places: (-len(places), int(places[0]))), most


def _hashed(corpus: _Corpus, n: int, before: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint64]]]:
    """Usable places with the hash of the n-gram that starts there, chunk by chunk."""
    factors = np.random.default_rng(0).integers(2**63, size=n, dtype=np.uint64) * 2 + 1
    for begin in range(0, len(corpus.tokens), _CHUNK):
        places = corpus.usable(begin, begin + _CHUNK, n, before)
        if not len(places):
            continue
        piece = np.asarray(corpus.tokens[begin : begin + _CHUNK + n], dtype=np.uint64) + np.uint64(1)
        piece *= piece * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
            0x632BE59BD9B4E019
        )  # mixes; wraps by intent
        hashes = np.zeros(len(places), dtype=np.uint64)
        for j, factor in enumerate(factors):
            hashes += piece[places - begin + j] * factor
        yield places, hashes ^ (hashes >> np.uint64(31))


def _apart(places: NDArray[np.int64], n: int, taken: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The places whose n-grams overlap nothing taken, nor one another."""
    free: list[int] = []
    last = -n
    for place in places.tolist():
        if place - last >= n and not taken[place : place + n].any():
            free.append(place)
            last = place
    return np.array(free, dtype=np.int64)
