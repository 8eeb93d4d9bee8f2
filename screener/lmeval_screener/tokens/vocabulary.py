"""A tokenizer's vocabulary: the row of the output matrix for each piece of text.

Pieces are looked up exactly, never by encoding: SentencePiece tokenizers encode ``7`` as ``▁`` and
``7``, and the length of an encoding says nothing about the piece. A piece that the tokenizer never
makes from text (no merges build it, the normaliser changes it) has a row that was never trained,
and counts as missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from lmeval_dispersion.errors import UsageError, brief
from lmeval_screener.budgets import (
    ADDED_TOKENS,
    MARGIN,
    NORMALISED,
    TOKENIZER,
    TOKENIZER_PARTS,
    in_steps,
    parsed,
)
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import TOKENIZER_FILES

Kind = Literal["byte-level", "sentencepiece"]
DigitScheme = Literal["single digits", "1-3-digit chunks", "irregular"]

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# How pre-tokenizers split numbers from their surroundings, by digit scheme; pure white space is left out.
_PARTS: dict[DigitScheme, re.Pattern[str]] = {
    "single digits": re.compile(r"\d| ?[^\s\d]+"),
    "1-3-digit chunks": re.compile(r"\d{1,3}| ?[^\s\d]+"),
    "irregular": re.compile(r" ?\S+"),  # merges stay inside the parts in which they were learnt
}


class _Added(NamedTuple):
    id: int
    special: bool
    single_word: bool
    lstrip: bool


class Vocabulary:
    """The vocabulary of a tokenizer, which finds the token of a text and cuts texts into tokens.

    A token is given by its id, which is also the number of its row in the output projection, and by
    its spelling in the tokenizer's file.

    Args:
        vocab: The model's tokens, spelled as in the file: a mapping to ids, or a list of pairs
            (token, score), in which the position is the id.
        kind: How tokens spell a leading space and bytes: ``byte-level`` (``Ġthe``) or
            ``sentencepiece`` (``▁the``).
        added: The file's list ``added_tokens``, which are cut from a text before the model sees it;
            None if there is no list.
        individual_digits: Whether numbers are split into single digits before the model sees them.
        build: Function that splits the spelling of a word into tokens as the model does; None to
            take the longest token that fits.
        normalise: Function that changes a text as the tokenizer does before splitting it; by
            default the text stays as it is.
        always_spaced: Whether the tokenizer puts a space before every word.

    Raises:
        ScreeningError: ``BadTokenizer``: the file is broken or not supported. All class methods
            raise this error, too.
    """

    def __init__(
        self,
        vocab: object,
        kind: Kind,
        added: object = None,
        individual_digits: bool = False,
        build: Callable[[str], list[str]] | None = None,
        normalise: Callable[[str], str] = str,
        always_spaced: bool = False,
    ) -> None:
        self.kind = kind
        self._pieces, self._added = _pieces(vocab), _added_tokens(added)
        self._individual_digits = individual_digits
        self._build, self._normalise, self._always_spaced = build, normalise, always_spaced
        for content, token in self._added.items():
            if self._pieces.get(content, token.id) != token.id:
                _refuse(
                    f"the added token {content!r} has id {token.id}, but the vocabulary "
                    f"gives it the id {self._pieces[content]}; save the tokenizer again"
                )

    @classmethod
    def from_file(cls, name: str, content: bytes) -> Vocabulary:
        """Read a vocabulary from the content of ``tokenizer.json`` or ``vocab.json``.

        Args:
            name: Name of the file, ``tokenizer.json`` or ``vocab.json``.
            content: Content of the file.

        Raises:
            ScreeningError: ``BadTokenizer``: the content is broken or of a kind that is not
                supported.
        """
        whole = name.endswith("tokenizer.json")
        return cls.from_tokenizer_json(content) if whole else cls.from_vocab_json(content)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Read the vocabulary of a transformers tokenizer, from the files that it saves.

        Raises:
            UsageError: The tokenizer saves neither ``tokenizer.json`` nor ``vocab.json``.
            ScreeningError: ``BadTokenizer``: the saved file is of a kind that is not supported.
        """
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for name in TOKENIZER_FILES:
                if (path := Path(folder, name)).is_file():
                    return cls.from_file(name, path.read_bytes())
        raise UsageError(
            f"expected a tokenizer that saves {' or '.join(TOKENIZER_FILES)}, got "
            f"{type(tokenizer).__name__}; load it with use_fast=True"
        )

    @classmethod
    def from_tokenizer_json(cls, content: bytes) -> Vocabulary:
        """Read a vocabulary from the content of a ``tokenizer.json`` with a BPE or Unigram model.

        The tokens must be spelled as by a byte-level tokenizer (``Ġthe``) or by SentencePiece
        (``▁the``).

        Raises:
            ScreeningError: ``BadTokenizer``: the content is broken or of another kind.
        """
        data = _parsed(content, "tokenizer.json")
        model = data.get("model")
        if not isinstance(model, dict):
            _refuse("expected `model` to be a mapping in tokenizer.json; save the tokenizer again")
        parts = _parts(data, "pre_tokenizer")
        return cls(
            model.get("vocab"),
            _kind(data),
            data.get("added_tokens"),
            any(
                part.get("type") == "Digits" and part.get("individual_digits")
                for part in _parts(data)
            ),
            _builder(model),
            functools.partial(_normalised, _parts(data, "normalizer")),
            any(part.get("type") == "Metaspace" and _prepends(part) for part in parts),
        )

    @classmethod
    def from_vocab_json(cls, content: bytes) -> Vocabulary:
        """Read a vocabulary from the content of a ``vocab.json``, a mapping from tokens to ids.

        It is read as SentencePiece's if more tokens begin with ``▁`` than with ``Ġ``, and
        otherwise as byte-level.

        Raises:
            ScreeningError: ``BadTokenizer``: the content is broken, or no token begins with ``Ġ``
                or ``▁``.
        """
        pieces = _parsed(content, "vocab.json")
        spaced = {sign: sum(piece.startswith(sign) for piece in pieces) for sign in "Ġ▁"}
        if not any(spaced.values()):
            _refuse(
                "expected tokens that start with Ġ or ▁ in vocab.json, got none; save the tokenizer as "
                "tokenizer.json"
            )
        return cls(pieces, "byte-level" if spaced["Ġ"] >= spaced["▁"] else "sentencepiece")

    @property
    def size(self) -> int:
        """The last token id plus 1, including added tokens."""
        return 1 + max(
            (*self._pieces.values(), *(token.id for token in self._added.values())), default=-1
        )

    def piece(self, text: str) -> str:
        """Return the vocabulary's spelling of a text, including its leading space if it has one.

        >>> Vocabulary({"the": 0}, "byte-level").piece(" the")
        'Ġthe'
        """
        if self.kind == "sentencepiece":
            return text.replace(" ", "▁")
        table = _byte_signs()
        return "".join(table[byte] for byte in text.encode())

    def row(self, text: str) -> tuple[int, str] | None:
        """Return the token id and the spelling of a text that is exactly one token.

        The result is None for any other text. It is also None if the tokenizer never makes this
        token from text (see `never_made`), or always cuts the text because an added token is part
        of it. Special tokens and byte tokens such as ``<0x37>`` never count.
        """
        word = text.lstrip(" ")
        added = self._added.get(text)
        if added is None and text != word and word in self._added and self._added[word].lstrip:
            added = self._added[word]  # it takes the space before it
        if added is not None:
            return None if added.special else (added.id, text)
        if word in self._added or self._takes_part_of(text):
            return None
        piece = self.piece(text)
        row = self._pieces.get(piece)
        if row is None or _BYTE_PIECE.fullmatch(piece) or self.never_made(text):
            return None
        return row, piece

    def _takes_part_of(self, text: str) -> bool:
        """Whether an added token is cut out of ``text``."""
        for begin in range(len(text)):
            for end in range(begin + 1, min(begin + self._longest_added, len(text)) + 1):
                token = self._added.get(text[begin:end])
                if token is not None and not token.single_word:
                    return True
        return False

    @functools.cached_property
    def _longest_added(self) -> int:
        return max(map(len, self._added), default=0)

    def cut(self, text: str) -> list[tuple[int, str]]:
        """Cut a text into tokens, and return the id and the spelling of each.

        Special tokens and tokens of white space alone are left out. The merges or scores in the
        tokenizer's file are used; without them, the longest token that fits is taken each time.

        >>> Vocabulary({"Ġ": 0, "n": 1, "um": 2, "Ġnu": 3, "m": 4}, "byte-level").cut(" num 7")
        [(3, 'Ġnu'), (4, 'm')]
        """
        rows: list[tuple[int, str]] = []
        for part in self._parts.findall(text):
            if (whole := self.row(part)) is not None:
                rows.append(whole)
                continue
            piece = self.piece(self._normalise(part))
            for cut in self._build(piece) if self._build else self._longest(piece):
                if (row := self.text_row(cut)) is not None:
                    rows.append((row, cut))
        return rows

    @functools.cached_property
    def _parts(self) -> re.Pattern[str]:
        return _PARTS[self.digit_scheme()]

    def _longest(self, piece: str) -> list[str]:
        cuts: list[str] = []
        while piece:
            ends = range(len(piece), 0, -1)
            end = next((end for end in ends if piece[:end] in self._pieces), 1)
            cuts.append(piece[:end])
            piece = piece[end:]
        return cuts

    def text(self, piece: str) -> str:
        r"""Return the text of a token from its spelling in the vocabulary: the inverse of `piece`.

        Bytes that are only part of a character become escapes such as ``\xe2``.
        """
        if self.kind == "sentencepiece":
            return piece.replace("▁", " ")
        signs = {sign: byte for byte, sign in _byte_signs().items()}
        return bytes(signs[sign] for sign in piece if sign in signs).decode(
            errors="backslashreplace"
        )

    def text_row(self, piece: str) -> int | None:
        """Return the id of the token with this spelling in the vocabulary, such as ``Ġthe``.

        The result is None for special tokens, byte tokens, white space, and unknown spellings.
        """
        if piece in self._added:
            return None if self._added[piece].special else self._added[piece].id
        spells = self.text(piece).strip() and not _BYTE_PIECE.fullmatch(piece)
        return self._pieces.get(piece) if spells else None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the tokens and their ids, as a hexadecimal string.

        Added tokens are left out, so that fine-tunes share the digest with their base.
        """
        kept = sorted(
            (row, piece) for piece, row in self._pieces.items() if piece not in self._added
        )
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()

    def never_made(self, text: str) -> str | None:
        """Return why the tokenizer, when it encodes texts, never makes the token of this text.

        The result is None if the tokenizer makes the token, or has no token for the text.
        """
        piece = self.piece(text)
        if piece not in self._pieces or text in self._added:
            return None
        if (changed := self._normalise(text)) != text:
            return f"the normaliser writes {changed.strip()!r}"
        if self._always_spaced and not text.startswith(" ") and self.row(f" {text}") is not None:
            return f"text makes {self.piece(f' {text}')}"
        if self._build is not None and (cut := self._build(piece)) != [piece]:
            return f"text makes {' '.join(cut)}"
        return None

    def digit_scheme(self) -> DigitScheme:
        """Return how the tokenizer splits numbers.

        Returns:
            ``single digits``: every digit of a number is a token. ``1-3-digit chunks``: each
            sequence of up to three digits is one token. ``irregular``: some sequences of two or
            three digits are one token, others are not.
        """
        if self._individual_digits:
            return "single digits"
        longer = [f"{n:0{width}d}" for width in (2, 3) for n in range(10**width)]
        whole = sum(self.piece(number) in self._pieces for number in longer)
        if whole == len(longer):
            return "1-3-digit chunks"
        return "irregular" if whole else "single digits"


def _refuse(message: str) -> NoReturn:
    raise ScreeningError("BadTokenizer", message)


def _parsed(content: bytes, name: str) -> dict[str, Any]:
    try:
        data = parsed(content, TOKENIZER)
    except ValueError as error:
        raise ScreeningError(
            "BadTokenizer", f"expected JSON in {name} ({error}); save the tokenizer again"
        ) from error
    if not isinstance(data, dict):
        _refuse(
            f"expected a mapping in {name}, got {type(data).__name__}; save the tokenizer again"
        )
    return data


def _builder(model: dict[str, Any]) -> Callable[[str], list[str]] | None:
    """How a model splits a piece's own spelling; None if the file does not say or it cannot matter."""
    if model.get("type") == "Unigram" and isinstance(model.get("vocab"), list):
        try:
            return functools.partial(
                _likeliest, {piece: float(score) for piece, score in model["vocab"]}
            )
        except (TypeError, ValueError, OverflowError):
            return None  # refused when the pieces are read
    merges = model.get("merges")
    # A file reduced to its vocabulary has no merges.
    if not isinstance(merges, list) or not merges:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(in_steps(merges)):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) for part in pair)
        ):
            _refuse(
                f"expected `model.merges` in tokenizer.json to list pairs of tokens, got "
                f"{brief(merge)}; save the tokenizer again"
            )
        ranks.setdefault((pair[0], pair[1]), rank)
    if model.get("ignore_merges") is True:  # a word that has a piece is that piece
        return lambda text: [text] if text in model["vocab"] else _merged(ranks, text)
    return functools.partial(_merged, ranks)


def _merged(ranks: Mapping[tuple[str, str], int], text: str) -> list[str]:
    """Byte-pair encoding of one word: the earliest merge first, leftmost first, until none is left."""
    parts = list(text)
    while len(parts) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(parts)))
        if rank == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _likeliest(scores: Mapping[str, float], text: str) -> list[str]:
    """The split of a word into pieces with the highest sum of scores (Unigram); itself if there is none."""
    best: list[tuple[float, list[str]] | None] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = [
            (before[0] + scores[piece], [*before[1], piece])
            for begin in range(end)
            if (before := best[begin]) is not None and (piece := text[begin:end]) in scores
        ]
        best.append(max(ways, key=lambda way: way[0], default=None))
    last = best[-1]
    return [text] if last is None else last[1]


def _normalised(parts: list[dict[str, Any]], text: str) -> str:
    """A text after the normaliser, except for spaces, which `Vocabulary.piece` spells."""
    most = max(NORMALISED, MARGIN * len(text))
    for part in parts:
        if len(text) > most:
            _refuse(
                f"the tokenizer's normaliser turns a word into {len(text):,} characters, above the "
                f"limit of {most:,}; check tokenizer.json, or download it again"
            )
        kind = part.get("type")
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            text = unicodedata.normalize(kind, text)
        elif kind == "Precompiled":  # SentencePiece's table, which is NFKC except for white space
            text = unicodedata.normalize("NFKC", text)
        elif kind == "Replace" and part.get("content") != "▁":
            pattern, content = part.get("pattern"), part.get("content")
            if isinstance(pattern, dict) and isinstance(content, str) and pattern.get("String"):
                if len(content) > NORMALISED:
                    _refuse(
                        f"the tokenizer's normaliser inserts a text of {len(content):,} characters, "
                        f"above the limit of {NORMALISED:,}; check tokenizer.json, or download it "
                        "again"
                    )
                text = text.replace(str(pattern["String"]), content)
        elif kind == "Lowercase":
            text = text.lower()
    return text


def _prepends(part: dict[str, Any]) -> bool:
    """A Metaspace signs every word: ``always``, or in files older than `prepend_scheme`."""
    scheme = part.get("prepend_scheme")
    return scheme == "always" or (scheme is None and part.get("add_prefix_space") is True)


def _pieces(vocab: object) -> dict[str, int]:
    """Piece → id from BPE's mapping or Unigram's list of (piece, score)."""
    if isinstance(vocab, list):
        try:
            return {piece: row for row, (piece, _) in enumerate(vocab)}
        except (TypeError, ValueError):
            _refuse(
                "expected `model.vocab` to list pairs of token and score, got other items; save the "
                "tokenizer again"
            )
    if not isinstance(vocab, dict) or not vocab:
        given = type(vocab).__name__ if vocab else "none"
        _refuse(f"expected `model.vocab` to hold tokens, got {given}; save the tokenizer again")
    for piece, row in vocab.items():
        if type(row) is not int or not 0 <= row < 2**31:
            _refuse(
                f"expected an id for the token {piece!r}, got {brief(row)}; save the tokenizer again"
            )
    return vocab


def _added_tokens(listed: object) -> dict[str, _Added]:
    if not isinstance(listed, list):
        return {}
    if len(listed) > ADDED_TOKENS:
        _refuse(
            f"expected at most {ADDED_TOKENS:,} `added_tokens`, got {len(listed):,}; check "
            "tokenizer.json, or download it again"
        )
    tokens = {}
    for token in listed:
        content, row = (
            (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        )
        if not isinstance(content, str) or type(row) is not int or row < 0:
            _refuse(
                f"expected `added_tokens` with content and id, got {brief(token)}; save the "
                "tokenizer again"
            )
        if content:
            flags = (bool(token.get(key)) for key in ("special", "single_word", "lstrip"))
            tokens[content] = _Added(row, *flags)
    return tokens


def _parts(data: dict[str, Any], *keys: str) -> list[dict[str, Any]]:
    """Every component of normalizer, pre-tokenizer and decoder (or of ``keys``), sequences opened."""
    open_parts = [
        data.get(key) for key in reversed(keys or ("normalizer", "pre_tokenizer", "decoder"))
    ]
    parts: list[dict[str, Any]] = []
    while open_parts:
        if len(open_parts) + len(parts) > TOKENIZER_PARTS:
            _refuse(
                f"expected at most {TOKENIZER_PARTS} parts of a normaliser or pre-tokenizer, got more; "
                "check tokenizer.json, or download it again"
            )
        part = open_parts.pop()
        if not isinstance(part, dict):
            continue
        parts.append(part)
        for key in ("decoders", "pretokenizers", "normalizers"):
            nested = part.get(key)
            if isinstance(nested, list):
                open_parts += reversed(nested)
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
        f"expected a byte-level or SentencePiece-style tokenizer, got one of the type {model}, "
        "whose tokens do not spell their leading space; screen models with another tokenizer"
    )


@functools.cache
def _byte_signs() -> dict[int, str]:
    """Byte → its printable sign in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
