"""Resolved ids on disk, so that a known tokenizer is not downloaded again."""

from __future__ import annotations

import json

from lmeval_screener.checkpoints import Cache
from lmeval_screener.tokens.resolution import Resolution, Token
from lmeval_screener.tokens.sets import TokenSet

# Part of every entry's key: raise it when the rule of resolution or the layout of an entry changes.
_VERSION = 5


class ResolutionCache:
    """Resolutions by tokenizer file and token sets.

    Args:
        cache: Where the entries lie. An entry that cannot be read counts as absent.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def find(self, tokenizer_digest: str, domain: TokenSet, reference: TokenSet) -> Resolution | None:
        """The stored resolution, or None."""
        stored = self._cache.read("tokens", _key(tokenizer_digest, domain, reference))
        return None if stored is None else resolution_of(stored)

    def put(
        self, tokenizer_digest: str, domain: TokenSet, reference: TokenSet, resolution: Resolution
    ) -> None:
        """Store a resolution."""
        self._cache.write("tokens", _key(tokenizer_digest, domain, reference), resolution_text(resolution))


def resolution_text(resolution: Resolution) -> bytes:
    """A resolution as JSON."""
    return json.dumps(vars(resolution)).encode()


def resolution_of(stored: bytes | str) -> Resolution:
    """The resolution that :func:`resolution_text` wrote."""
    content = json.loads(stored)
    for name in ("domain", "reference", "shared"):
        content[name] = tuple(Token(*token) for token in content[name])
    for name in ("dropped", "dropped_reference", "never_made", "one_row"):
        content[name] = tuple(content[name])
    return Resolution(**content)


def _key(tokenizer_digest: str, domain: TokenSet, reference: TokenSet) -> str:
    return f"{_VERSION} {tokenizer_digest} {domain.digest} {reference.digest}"
