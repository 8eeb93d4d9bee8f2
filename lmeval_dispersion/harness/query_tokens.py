"""Which of a prompt's tokens are the query's, by the characters that each token stands for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def query_tokens(lm: Any, prompt: str, query: str | None, context: Sequence[int]) -> tuple[int, int]:
    """Where the query is among a context's tokens: [start, stop), the tokens that hold a character of it.

    White space at the query's ends is not the query's: a tokenizer joins it with whatever is beside it. A
    token that holds the end of one and the start of the other counts.

    Returns:
        An empty span where the tokens cannot be told apart, so that no wrong figure is given.
    """
    core = (query or "").strip()
    at = prompt.rfind(core) if core else -1
    if at < 0:
        return 0, len(context)
    ends = _spans_by_offsets(lm, prompt.rstrip(), context)
    if ends is not None:
        starts, stops = ends
        # Tokens are in the order of the text; those of white space alone may have empty spans.
        first = next((i for i, stop in enumerate(stops) if stop > at), len(context))
        last = next((i for i in reversed(range(len(starts))) if starts[i] < at + len(core)), -1)
        return (first, last + 1) if first <= last else (0, 0)
    return _by_decoding(lm.tokenizer, prompt, at, at + len(core), context)


def _spans_by_offsets(lm: Any, prompt: str, context: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """First and last character of every token; None where the tokenizer does not tell (slow ones)."""
    if not getattr(lm.tokenizer, "is_fast", False):
        return None
    wanted = list(context)
    # With or without special tokens: whichever lm-eval has chosen for this prompt.
    for special in (True, False):
        encoded = lm.tokenizer(prompt, add_special_tokens=special, return_offsets_mapping=True)
        if encoded["input_ids"] == wanted:
            spans = encoded["offset_mapping"]
            positions, latest = [], 0
            for start, stop in spans:  # special tokens say (0, 0) wherever they are
                latest = max(latest, stop)
                positions.append((start if stop > start else latest, latest))
            return [start for start, _ in positions], [stop for _, stop in positions]
    return None


def _by_decoding(
    tokenizer: Any, prompt: str, start: int, stop: int, context: Sequence[int]
) -> tuple[int, int]:
    """The same from texts of ever more tokens, counting characters that are no white space."""

    def visible(count: int) -> int:
        text = tokenizer.decode(
            list(context[:count]), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        # A character whose last bytes are still missing shows as one or several replacements: not yet there.
        return _visible(text.rstrip(_REPLACEMENT))

    if visible(len(context)) != _visible(prompt):
        return 0, 0
    before, through = _visible(prompt[:start]), _visible(prompt[:stop])
    counts = range(len(context) + 1)
    first = bisect_left(counts, before + 1, key=visible) - 1
    # The first bytes of a character show nothing by themselves and are the query's all the same.
    while first > 0 and visible(first - 1) == before and _is_part(tokenizer, context[first - 1]):
        first -= 1
    return first, bisect_left(counts, through, key=visible)


def _is_part(tokenizer: Any, token: int) -> bool:
    """Whether a token stands for some bytes of a character only."""
    return _REPLACEMENT in tokenizer.decode([token], clean_up_tokenization_spaces=False)


def _visible(text: str) -> int:
    return sum(not character.isspace() for character in text)
