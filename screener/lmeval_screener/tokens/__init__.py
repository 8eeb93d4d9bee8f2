"""Tokens: the words of T and R, a task's answers, and their rows in a vocabulary."""

from lmeval_screener.tokens.resolution import Resolution, load_domain, resolve_tokens
from lmeval_screener.tokens.sets import (
    Token,
    TokenSet,
    bundled_token_sets,
    described_groups,
    load_token_set,
)

__all__ = [
    "Resolution",
    "Token",
    "TokenSet",
    "bundled_token_sets",
    "described_groups",
    "load_domain",
    "load_token_set",
    "resolve_tokens",
]
