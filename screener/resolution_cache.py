"""Resolved ids on disk, so that a known tokenizer is not downloaded again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from screener.tokens import Resolution, Token, TokenSet

# Part of every entry's name: raise it when the rule of resolution or the layout of an entry changes.
_VERSION = 1


class ResolutionCache:
    """Resolutions by tokenizer file and token sets.

    Entries are written whole or not at all, so several processes may share a folder. An entry that cannot be
    read counts as absent, and the next ``put`` replaces it.

    Args:
        folder: Where the entries lie; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, tokenizer_digest: str, domain: TokenSet, reference: TokenSet) -> Resolution | None:
        """The stored resolution, or None.

        Args:
            tokenizer_digest: What identifies the tokenizer file: any hash, as long as ``put`` got the same.
            domain: T.
            reference: R.
        """
        try:
            entry = json.loads(self._path(tokenizer_digest, domain, reference).read_bytes())
            content = entry["resolution"]
            if entry["sha256"] != _sha256(content):
                return None
            return Resolution(
                domain=_tokens(content["domain"]),
                reference=_tokens(content["reference"]),
                dropped=tuple(content["dropped"]),
                dropped_reference=tuple(content["dropped_reference"]),
                shared=_tokens(content["shared"]),
                digit_scheme=content["digit_scheme"],
                variants=dict(content["variants"]),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def put(
        self, tokenizer_digest: str, domain: TokenSet, reference: TokenSet, resolution: Resolution
    ) -> None:
        """Store a resolution.

        A folder that cannot be written to is no reason to fail a screening: nothing is stored then.
        """
        content = {
            "domain": [list(token) for token in resolution.domain],
            "reference": [list(token) for token in resolution.reference],
            "dropped": list(resolution.dropped),
            "dropped_reference": list(resolution.dropped_reference),
            "shared": [list(token) for token in resolution.shared],
            "digit_scheme": resolution.digit_scheme,
            "variants": resolution.variants,
        }
        path = self._path(tokenizer_digest, domain, reference)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
        except OSError:
            return
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"sha256": _sha256(content), "resolution": content}, file)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, tokenizer_digest: str, domain: TokenSet, reference: TokenSet) -> Path:
        key = _sha256([_VERSION, tokenizer_digest, domain.digest, reference.digest])
        return self._folder / f"{key}.json"


def _tokens(listed: list[list[object]]) -> tuple[Token, ...]:
    tokens = []
    for text, piece, row, group in listed:
        if not (
            isinstance(text, str) and isinstance(piece, str) and type(row) is int and isinstance(group, str)
        ):
            raise TypeError("not a token")
        tokens.append(Token(text, piece, row, group))
    return tuple(tokens)


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
