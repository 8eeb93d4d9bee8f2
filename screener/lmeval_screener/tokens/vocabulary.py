"""A tokenizer's vocabulary: which row of the output matrix belongs to which piece of text.

Pieces are looked up exactly, never by encoding: SentencePiece tokenizers encode ``7`` as ``▁`` and ``7``, and
the length of an encoding says nothing about the piece. Only the vocabulary is read, not the merges.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np

from lmeval_screener.errors import ScreeningError

Kind = Literal["byte-level", "sentencepiece"]
DigitScheme = Literal["single digits", "1-3-digit chunks", "irregular"]

# The files that `Vocabulary.from_file` reads, best first.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_BEFORE_MODEL = {"added_tokens", "normalizer", "pre_tokenizer", "decoder"}
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class _Added:
    id: int
    special: bool
    single_word: bool


class Vocabulary:
    """Exact piece → row id.

    Args:
        pieces: The model's pieces as the tokenizer file spells them.
        kind: How a piece spells a leading space and other bytes: ``Ġthe`` (byte-level) or ``▁the``
            (SentencePiece).
        added: Tokens that the tokenizer cuts out of the text before its model sees it, by their text.
        individual_digits: The pre-tokenizer splits numbers into digits, whatever the vocabulary holds.
        digest: sha256 of the file's bytes.
    """

    def __init__(
        self,
        pieces: Mapping[str, int],
        kind: Kind,
        added: Mapping[str, _Added] | None = None,
        individual_digits: bool = False,
        digest: str = "",
    ) -> None:
        self.kind = kind
        self.digest = digest
        self._pieces = pieces
        self._added = dict(added or {})
        self._individual_digits = individual_digits

    @classmethod
    def from_file(cls, name: str, content: bytes) -> Vocabulary:
        """The vocabulary in one of ``TOKENIZER_FILES``.

        Args:
            name: The file's name, which says how to read it.
            content: Its bytes.

        Raises:
            ScreeningError: ``BadTokenizer``: not a tokenizer file that can be read.
        """
        return (
            cls.from_tokenizer_json(content)
            if name.endswith("tokenizer.json")
            else cls.from_vocab_json(content)
        )

    @classmethod
    def from_tokenizer_json(cls, content: bytes) -> Vocabulary:
        """The vocabulary in a ``tokenizer.json`` (BPE or Unigram, byte-level or SentencePiece-style).

        Raises:
            ScreeningError: ``BadTokenizer``: no JSON, no vocabulary in it, or a kind of tokenizer whose
                pieces don't spell their leading space (WordPiece, WordLevel).
        """
        data = _parsed(content, "tokenizer.json", _without_merges)
        model = data.get("model")
        if not isinstance(model, dict):
            _refuse("expected `model` to be a mapping in tokenizer.json")
        kind = _kind(data)
        return cls(
            _pieces(model.get("vocab")),
            kind,
            _added_tokens(data.get("added_tokens")),
            any(part.get("type") == "Digits" and part.get("individual_digits") for part in _parts(data)),
            hashlib.sha256(content).hexdigest(),
        )

    @classmethod
    def from_vocab_json(cls, content: bytes) -> Vocabulary:
        """The vocabulary in a ``vocab.json`` (GPT-2 layout): a mapping from piece to id.

        Such a file doesn't say which kind it is: whichever sign for a space starts more pieces wins.

        Raises:
            ScreeningError: ``BadTokenizer``.
        """
        pieces = _pieces(_parsed(content, "vocab.json"))
        spaced = {sign: sum(piece.startswith(sign) for piece in pieces) for sign in "Ġ▁"}
        if not any(spaced.values()):
            _refuse("expected pieces that start with Ġ or ▁ in vocab.json, got none")
        kind: Kind = "byte-level" if spaced["Ġ"] >= spaced["▁"] else "sentencepiece"
        return cls(pieces, kind, digest=hashlib.sha256(content).hexdigest())

    @property
    def size(self) -> int:
        """Rows that the tokenizer names: its last id + 1, added tokens included."""
        return 1 + max((*self._pieces.values(), *(token.id for token in self._added.values())), default=-1)

    def sample(self, count: int) -> list[int]:
        """A fixed random sample of the model's pieces' rows, in a fixed order: no added token, no padding.

        An id is taken by the hash of its number, so a smaller sample is the beginning of a larger one.
        """
        ids = np.unique(np.fromiter(self._pieces.values(), dtype=np.uint64))
        mixed = ids + np.uint64(0x9E3779B97F4A7C15)  # splitmix64's finaliser
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
        return [int(i) for i in ids[np.argsort(mixed)[:count]]]

    def piece(self, text: str) -> str:
        """How this vocabulary spells ``text``, whose leading space (if any) is part of it.

        >>> Vocabulary({}, "byte-level").piece(" the"), Vocabulary({}, "sentencepiece").piece(" the")
        ('Ġthe', '▁the')
        """
        if self.kind == "sentencepiece":
            return text.replace(" ", "▁")
        table = _byte_signs()
        return "".join(table[byte] for byte in text.encode())

    def row(self, text: str) -> tuple[int, str] | None:
        """Row id and piece that stand for exactly ``text`` in running text, or None.

        None also where the model has the piece but never sees it, because an added token takes part of the
        text away first. Special tokens and ``<0x37>`` byte pieces never count.

        Args:
            text: Surface form, with its leading space where it has one.
        """
        own = self._added.get(text)
        if own is not None:
            return None if own.special else (own.id, text)
        word = text.lstrip(" ")
        for content, token in self._added.items():
            if content == word or (content in text and not token.single_word):
                return None
        piece = self.piece(text)
        if _BYTE_PIECE.fullmatch(piece):
            return None
        row = self._pieces.get(piece)
        return None if row is None else (row, piece)

    def digit_scheme(self) -> DigitScheme:
        """How numbers are cut up, to be read beside a gap that is measured on the ten digits.

        ``single digits``: the ten rows are all there is to a number. ``1-3-digit chunks``: every number up
        to 999 has a row of its own, so the ten rows cover part of them. ``irregular``: some numbers do.
        """
        if self._individual_digits:
            return "single digits"
        longer = [f"{n:0{width}d}" for width in (2, 3) for n in range(10**width)]
        found = sum(self.piece(number) in self._pieces for number in longer)
        if found == len(longer):
            return "1-3-digit chunks"
        return "irregular" if found else "single digits"


def _refuse(message: str) -> NoReturn:
    raise ScreeningError("BadTokenizer", message)


def _parsed(content: bytes, name: str, parse: Callable[[str], object] = json.loads) -> dict[str, Any]:
    try:
        data = parse(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ScreeningError("BadTokenizer", f"expected JSON in {name}, got: {error}") from error
    if not isinstance(data, dict):
        _refuse(f"expected a mapping in {name}, got {type(data).__name__}")
    return data


def _without_merges(text: str) -> object:
    """A tokenizer.json up to the merges of its model, which come last and are half of the file.

    Resolving doesn't need them: at Gemma's size (35 MB) they are half of the time and memory of parsing. In a
    file of another order everything is parsed.
    """
    data, place = _members(text, 0, lambda key, seen: key == "model" and seen.keys() >= _BEFORE_MODEL)
    if place is not None:
        data["model"], _ = _members(text, place, lambda key, seen: key == "merges" and "vocab" in seen)
    return data


def _members(
    text: str, start: int, stop: Callable[[str, dict[str, Any]], bool]
) -> tuple[dict[str, Any], int | None]:
    """Members of the JSON object at ``start``, and where the value begins at which ``stop`` ended it."""
    found: dict[str, Any] = {}
    place = _after(text, start, "{")
    while not text.startswith("}", place):
        if found:
            place = _after(text, place, ",")
        key, place = _DECODER.raw_decode(text, place)
        if not isinstance(key, str):
            raise json.JSONDecodeError("expected a string", text, place)
        place = _after(text, place, ":")
        if stop(key, found):
            return found, place
        found[key], place = _DECODER.raw_decode(text, place)
        place = _after(text, place, "")
    return found, None


def _after(text: str, place: int, sign: str) -> int:
    """The place behind white space, ``sign``, and white space again."""
    place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
    if not text.startswith(sign, place):
        raise json.JSONDecodeError(f"expected {sign}", text, place)
    return _SPACE.match(text, place + len(sign)).end()  # type: ignore[union-attr]


def _pieces(vocab: object) -> dict[str, int]:
    """Piece → id from BPE's mapping or Unigram's list of (piece, score)."""
    if isinstance(vocab, list):
        try:
            return {piece: row for row, (piece, _) in enumerate(vocab)}
        except (TypeError, ValueError):
            _refuse("expected `model.vocab` to list (piece, score) pairs")
    if not isinstance(vocab, dict) or not vocab:
        _refuse(f"expected `model.vocab` to hold pieces, got {type(vocab).__name__}")
    for piece, row in vocab.items():
        if type(row) is not int or not 0 <= row < 2**31:
            _refuse(f"expected a row id for the piece {piece!r}, got {row!r}")
    return vocab


def _added_tokens(listed: object) -> dict[str, _Added]:
    if not isinstance(listed, list):
        return {}
    tokens = {}
    for token in listed:
        content, row = (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        if not isinstance(content, str) or type(row) is not int or row < 0:
            _refuse(f"expected `added_tokens` with content and id, got {token!r}")
        if content:
            tokens[content] = _Added(row, bool(token.get("special")), bool(token.get("single_word")))
    return tokens


def _parts(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Every component of normalizer, pre-tokenizer and decoder, sequences opened."""
    open_parts = [data.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    parts = []
    while open_parts:
        part = open_parts.pop()
        if isinstance(part, dict):
            parts.append(part)
            for key in ("normalizers", "pretokenizers", "decoders"):
                nested = part.get(key)
                open_parts.extend(nested if isinstance(nested, list) else [])
    return parts


def _kind(data: dict[str, Any]) -> Kind:
    parts = _parts(data)
    if any(part.get("type") == "ByteLevel" for part in parts):
        return "byte-level"
    for part in parts:
        if part.get("type") == "Metaspace" or "▁" in (part.get("prepend"), part.get("content")):
            return "sentencepiece"
        if part.get("type") == "Replace" and part.get("pattern") == {"String": "▁"}:
            return "sentencepiece"
    model = data["model"].get("type", "unnamed")
    _refuse(
        f"expected a byte-level or SentencePiece-style tokenizer, got a {model} model whose pieces don't "
        "spell their leading space"
    )


@functools.cache
def _byte_signs() -> dict[int, str]:
    """Byte → the printable sign that stands for it in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
