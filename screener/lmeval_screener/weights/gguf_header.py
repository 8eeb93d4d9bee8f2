"""The header of a GGUF file, by ranges.

A GGUF file begins with a header (key-value pairs, among them the whole vocabulary, then the tensors' names,
shapes and offsets); the tensors' data follow. Strings have no index, so the header is walked from its start.
It is fetched in pieces, each byte once. The vocabulary is kept by its digest, for a file of its own.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.tensors import GGUF_BLOCKS, GGUF_TYPES, Header, Tensor

MAX_HEADER = 256 * 2**20
_PIECE = 2**20  # bytes of one request while the header is walked
_MOST = 2**24  # pairs, tensors: far beyond any model, and small enough to count to
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEPT = re.compile(
    r"general\.(architecture|alignment)|split\.(no|count)|tokenizer\.ggml\.(model|pre|tokens|token_type)"
)


async def read_header(snapshot: Snapshot, path: str) -> Header:
    """Header of a GGUF file, fetched in pieces."""
    what = f"{path} of {snapshot.repo}"
    size = await snapshot.size(path)
    walk = _Walk(size, what)
    while True:
        try:
            pairs, tensors = walk.header()
            break
        except _ShortError as short:
            have = len(walk.data)
            need = min(max(short.need, have + _PIECE), size)
            if short.need > size:
                raise _bad(what, f"it asks for byte {short.need} of a file of {size} bytes") from None
            if need > MAX_HEADER:
                raise _bad(what, f"it is longer than {MAX_HEADER} bytes") from None
            (more,) = await snapshot.ranges(path, [(have, need)])
            walk.data += more
    named = pairs.get("general.architecture")
    architecture = named if isinstance(named, str) else None
    if "tokenizer.ggml.tokens" not in pairs:
        return Header(tensors, architecture=architecture)
    digest, vocabulary = _vocabulary_entry(pairs, what)
    if snapshot.cache:
        snapshot.cache.write("vocabularies", digest, vocabulary)
    return Header(tensors, architecture=architecture, tokenizer=digest, vocabulary=vocabulary)


class _ShortError(Exception):
    """The walk needs bytes that have not been fetched."""

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


class _Walk:
    """Walks a header; goes on at the last whole pair when more bytes have come."""

    def __init__(self, size: int, what: str) -> None:
        self.data = bytearray()
        self._size, self._what = size, what
        self._at = 0
        self._pairs: dict[str, Any] = {}
        self._names: set[str] = set()
        self._counts: tuple[int, int] | None = None
        self._resume = 0

    def header(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        self._at = self._resume
        if self._counts is None:
            self._counts = self._start()
            self._resume = self._at
        tensors, pairs = self._counts
        while len(self._names) < pairs:
            name = self._string()
            if name in self._names:
                raise _bad(self._what, f"the key {name!r} occurs twice")
            value = self._value(self._scalar("I"), keep=_KEPT.fullmatch(name) is not None, depth=0)
            self._names.add(name)
            if value is not None:
                self._pairs[name] = value
            self._resume = self._at
        described = [self._tensor() for _ in range(tensors)]
        return self._pairs, self._placed(described)

    def _start(self) -> tuple[int, int]:
        magic = bytes(self._take(4))
        if magic != b"GGUF":
            raise _bad(self._what, f"it begins with {magic!r}, not GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            word = "big-endian" if version in (0x02000000, 0x03000000) else "unknown"
            raise _bad(self._what, f"its version is {word} ({version}); versions 2 and 3 are read")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        # Each takes some bytes, so that a file bounds how many there can be.
        if pairs > min(_MOST, self._size // 12) or tensors > min(_MOST, self._size // 24):
            raise _bad(self._what, f"it announces {pairs} pairs and {tensors} tensors")
        return tensors, pairs

    def _take(self, count: int) -> memoryview:
        end = self._at + count
        if end > len(self.data):
            raise _ShortError(end)
        taken = memoryview(self.data)[self._at : end]
        self._at = end
        return taken

    def _scalar(self, kind: str) -> Any:
        size = struct.calcsize("<" + kind)
        end = self._at + size
        if end > len(self.data):
            raise _ShortError(end)
        (value,) = struct.unpack_from("<" + kind, self.data, self._at)
        self._at = end
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._check(length)
        return bytes(self._take(length)).decode("utf-8", "replace")

    def _check(self, length: int) -> None:
        if self._at + length > min(self._size, MAX_HEADER):
            raise _bad(self._what, f"a value of {length} bytes at byte {self._at} does not fit the file")

    def _value(self, kind: int, *, keep: bool, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _bad(self._what, f"a value has the unknown type {kind}")
        if depth > 2:
            raise _bad(self._what, "arrays are nested too deeply")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[inner])
            self._check(size)
            body = self._take(size)
            return np.frombuffer(body, "<" + _SCALARS[inner]).tolist() if keep else None
        self._check(8 * count)  # a string or an array takes at least its length
        if inner == _STRING:
            return self._strings(count, keep)
        items = [self._value(inner, keep=keep, depth=depth + 1) for _ in range(count)]
        return items if keep else None

    def _strings(self, count: int, keep: bool) -> list[str] | None:
        """An array of strings: the bulk of a header, so without a call for each."""
        data, at, have = self.data, self._at, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > have:
                raise _ShortError(at + 8)
            (length,) = unpack(data, at)
            at += 8
            if at + length > have:
                self._at = at
                self._check(length)
                raise _ShortError(at + length)
            if keep:
                strings.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return strings if keep else None

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= 4:
            raise _bad(self._what, f"{name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        code, offset = self._scalar("I"), self._scalar("Q")
        if code not in GGUF_TYPES:
            raise _bad(self._what, f"{name!r} has the unknown type {code}")
        if any(not 0 < n < 2**40 for n in shape):
            raise _bad(self._what, f"{name!r} has the shape {shape}")
        # ggml writes the fastest dimension first.
        return name, GGUF_TYPES[code][0], shape[::-1], offset

    def _placed(self, described: list[tuple[str, str, tuple[int, ...], int]]) -> dict[str, Tensor]:
        alignment = self._pairs.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20:
            raise _bad(self._what, f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape, offset in described:
            _, weights, size = GGUF_BLOCKS[dtype]
            if shape[-1] % weights:
                raise _bad(self._what, f"{name!r}: rows of {shape[-1]} are no whole blocks of {dtype}")
            end = start + offset + math.prod(shape) // weights * size
            if name in tensors:
                raise _bad(self._what, f"the tensor {name!r} occurs twice")
            if offset % alignment or end > self._size:
                raise _bad(self._what, f"{name!r} lies at bytes {start + offset} to {end} of {self._size}")
            tensors[name] = Tensor(name, dtype, shape, start + offset, end)
        at = start
        for tensor in sorted(tensors.values(), key=lambda t: t.begin):
            if tensor.begin < at:
                raise _bad(self._what, f"{tensor.name!r} overlaps the tensor before it")
            at = tensor.end
        return tensors


def _vocabulary_entry(pairs: Mapping[str, Any], what: str) -> tuple[str, bytes]:
    """Digest and JSON of the vocabulary that the header's pairs hold."""
    tokens, types = pairs.get("tokenizer.ggml.tokens"), pairs.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ScreeningError("BadTokenizer", f"expected a vocabulary of texts in {what}, which has none")
    if types is not None and (not isinstance(types, list) or len(types) != len(tokens)):
        raise ScreeningError("BadTokenizer", f"{what} has {len(tokens)} tokens and not as many token types")
    fields = {
        "model": str(pairs.get("tokenizer.ggml.model", "")),
        "pre": str(pairs.get("tokenizer.ggml.pre", "")),
        "tokens": tokens,
        "types": types,
    }
    content = json.dumps(fields, ensure_ascii=True).encode()
    return f"sha256:{hashlib.sha256(content).hexdigest()}", content


def _bad(what: str, reason: str) -> ScreeningError:
    return ScreeningError(
        "BadHeader",
        f"the GGUF header of {what} is broken: {reason}; the file was damaged on its way or at its source, "
        "compare its sha256 or upload it again",
    )
