"""A tokenizer's vocabulary: the row of the output matrix for each piece of text.

Pieces are looked up exactly, never by encoding: SentencePiece tokenizers encode ``7`` as ``▁`` and ``7``, and
the length of an encoding says nothing about the piece. A piece that the tokenizer never makes from text (no
merges build it, the normaliser changes it) has a row that was never trained, and counts as missing.
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
    """A tokenizer's vocabulary: the row of each exact piece, and texts cut into pieces.

    Each way to make one raises ScreeningError (``BadTokenizer``) for content that is broken or not supported.
    """

    def __init__(
        self,
        vocab: object,  # the model's pieces as the file spells them: mapping to ids, or (piece, score) pairs
        kind: Kind,  # how a piece spells a leading space and other bytes: ``Ġthe`` or ``▁the``
        added: object = None,  # tokens that are cut from the text before the model sees it
        individual_digits: bool = False,  # numbers are split into digits, whatever the vocabulary holds
        build: Callable[[str], list[str]]
        | None = None,  # how the model splits a piece's own spelling
        normalise: Callable[[str], str] = str,
        always_spaced: bool = False,  # a space is put before every word of a text
    ) -> None:
        self.kind = kind
        self._pieces, self._added = _pieces(vocab), _added_tokens(added)
        self._individual_digits = individual_digits
        self._build, self._normalise, self._always_spaced = build, normalise, always_spaced
        for content, token in self._added.items():
            if self._pieces.get(content, token.id) != token.id:
                _refuse(
                    f"the added token {content!r} has id {token.id} and the vocabulary's id "
                    f"{self._pieces[content]}; save the tokenizer again"
                )

    @classmethod
    def from_file(cls, name: str, content: bytes) -> Vocabulary:
        """Parse the vocabulary in one of ``TOKENIZER_FILES``."""
        whole = name.endswith("tokenizer.json")
        return cls.from_tokenizer_json(content) if whole else cls.from_vocab_json(content)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary that a transformers tokenizer saves; UsageError if it saves none of the files."""
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for name in TOKENIZER_FILES:
                if (path := Path(folder, name)).is_file():
                    return cls.from_file(name, path.read_bytes())
        raise UsageError(
            f"expected a tokenizer that saves {' or '.join(TOKENIZER_FILES)}, got "
            f"{type(tokenizer).__name__}; load a fast one"
        )

    @classmethod
    def from_tokenizer_json(cls, content: bytes) -> Vocabulary:
        """Parse a ``tokenizer.json`` (BPE or Unigram, byte-level or SentencePiece-style)."""
        data = _parsed(content, "tokenizer.json")
        model = data.get("model")
        if not isinstance(model, dict):
            _refuse("expected `model` to be a mapping in tokenizer.json")
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
        """Parse a ``vocab.json`` (GPT-2 layout); its most frequent space sign, Ġ or ▁, gives the kind."""
        pieces = _parsed(content, "vocab.json")
        spaced = {sign: sum(piece.startswith(sign) for piece in pieces) for sign in "Ġ▁"}
        if not any(spaced.values()):
            _refuse("expected pieces that start with Ġ or ▁ in vocab.json, got none")
        return cls(pieces, "byte-level" if spaced["Ġ"] >= spaced["▁"] else "sentencepiece")

    @property
    def size(self) -> int:
        """The tokenizer's number of rows: its last id + 1, added tokens included."""
        return 1 + max(
            (*self._pieces.values(), *(token.id for token in self._added.values())), default=-1
        )

    def piece(self, text: str) -> str:
        """The vocabulary's spelling of ``text``, whose leading space (if any) is part of it.

        >>> Vocabulary({"the": 0}, "byte-level").piece(" the")
        'Ġthe'
        """
        if self.kind == "sentencepiece":
            return text.replace(" ", "▁")
        table = _byte_signs()
        return "".join(table[byte] for byte in text.encode())

    def row(self, text: str) -> tuple[int, str] | None:
        """Row id and piece of exactly ``text`` in running text, or None.

        None also if the model has the piece but never makes it (`never_made`), or never sees it because an
        added token takes part of the text away first. Special tokens and ``<0x37>`` byte pieces never count.
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
        """Row ids and pieces of running text ``text``, without pure white space.

        By the tokenizer's own merges or scores if its file has them, else longest piece first.

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
        """The text of a piece, the inverse of `piece`; half characters as their bytes, in hex."""
        if self.kind == "sentencepiece":
            return piece.replace("▁", " ")
        signs = {sign: byte for byte, sign in _byte_signs().items()}
        return bytes(signs[sign] for sign in piece if sign in signs).decode(
            errors="backslashreplace"
        )

    def text_row(self, piece: str) -> int | None:
        """A piece's row, by its spelling; None for special tokens, bytes, white space, unknown pieces."""
        if piece in self._added:
            return None if self._added[piece].special else self._added[piece].id
        spells = self.text(piece).strip() and not _BYTE_PIECE.fullmatch(piece)
        return self._pieces.get(piece) if spells else None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over pieces and ids, without added tokens: fine-tunes add some and keep their base's."""
        kept = sorted(
            (row, piece) for piece, row in self._pieces.items() if piece not in self._added
        )
        return hashlib.sha256(json.dumps(kept).encode()).hexdigest()

    def never_made(self, text: str) -> str | None:
        """Why a piece of the vocabulary is never made from text; None if it is made, or does not exist."""
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
        """How numbers are split, for readers of a gap that is measured on the ten digits.

        ``single digits``: numbers consist of the ten rows alone. ``1-3-digit chunks``: every number up
        to 999 has a row of its own, so the ten rows cover part of them. ``irregular``: some numbers do.
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
        raise ScreeningError("BadTokenizer", f"expected JSON in {name}, got: {error}") from error
    if not isinstance(data, dict):
        _refuse(f"expected a mapping in {name}, got {type(data).__name__}")
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
            _refuse(f"expected `model.merges` to list pairs of pieces, got {brief(merge)}")
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
            _refuse(f"expected a normaliser, got one that makes {len(text)} signs of a word")
        kind = part.get("type")
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            text = unicodedata.normalize(kind, text)
        elif kind == "Precompiled":  # SentencePiece's table, which is NFKC except for white space
            text = unicodedata.normalize("NFKC", text)
        elif kind == "Replace" and part.get("content") != "▁":
            pattern, content = part.get("pattern"), part.get("content")
            if isinstance(pattern, dict) and isinstance(content, str) and pattern.get("String"):
                if len(content) > NORMALISED:
                    _refuse(f"expected a replacement of a sign or a word, got {len(content)} signs")
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
            _refuse("expected `model.vocab` to list (piece, score) pairs")
    if not isinstance(vocab, dict) or not vocab:
        _refuse(f"expected `model.vocab` to hold pieces, got {type(vocab).__name__}")
    for piece, row in vocab.items():
        if type(row) is not int or not 0 <= row < 2**31:
            _refuse(f"expected a row id for the piece {piece!r}, got {brief(row)}")
    return vocab


def _added_tokens(listed: object) -> dict[str, _Added]:
    if not isinstance(listed, list):
        return {}
    if len(listed) > ADDED_TOKENS:
        _refuse(f"expected at most {ADDED_TOKENS} `added_tokens`, got {len(listed)}")
    tokens = {}
    for token in listed:
        content, row = (
            (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        )
        if not isinstance(content, str) or type(row) is not int or row < 0:
            _refuse(f"expected `added_tokens` with content and id, got {brief(token)}")
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
                f"expected at most {TOKENIZER_PARTS} parts of a normaliser or pre-tokenizer, got more"
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
        f"expected a byte-level or SentencePiece-style tokenizer, got a {model} model whose pieces don't "
        "spell their leading space"
    )


@functools.cache
def _byte_signs() -> dict[int, str]:
    """Byte → its printable sign in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }
