"""The GGUF format: the file that is meant, its header by ranges, its vocabulary and its output projection.

A GGUF file begins with a header (key-value pairs, among them the whole vocabulary, then the tensors' names,
shapes and offsets); the tensors' data follow. Strings have no index, so the header is walked from its start.
It is fetched in pieces, each byte once, and what matters of it is cached by the file's content. Rows are
whole blocks of their quantisation, so single rows can be read by ranges; the `gguf` package turns quantised
blocks into numbers.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints.snapshot import Snapshot, content_key
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.element_types import GGUF_BLOCKS, GGUF_TYPES
from lmeval_screener.weights.matrices import Matrix, NormPlace
from lmeval_screener.weights.projection import OutputProjection

PLAIN = ("F32", "F16", "BF16", "F64")
_WHOLE = ("I8", "I16", "I32", "I64")

MAX_HEADER = 256 * 2**20
_PIECE = 2**20  # bytes of one request while the header is walked
_MOST = 2**24  # pairs, tensors: far beyond any model, and small enough to count to
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEPT = re.compile(
    r"general\.(architecture|alignment)|split\.(no|count)|tokenizer\.ggml\.(model|pre|tokens|token_type)"
)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
#: Pre-tokenizers of llama.cpp that cut numbers into single digits, whatever the vocabulary holds.
_SINGLE_DIGITS = {"qwen2", "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_CONTROL, _USER, _UNUSED, _BYTE = 3, 4, 5, 6
#: Architectures, as llama.cpp calls them, whose final norm is a LayerNorm without a bias that would show it.
_NORMS_OF_MEAN = frozenset(["command-r", "cohere2", "cohere2moe", "mpt", "dbrx", "olmo"])
#: The one of them whose norm has no weight.
_NORM_WITHOUT_WEIGHT = "olmo"
#: What is cached of an output projection.
_KEPT_FIELDS = ("name", "file", "dtype", "shape", "tied", "begin", "parameters", "warnings")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file: type name, shape with the fastest dimension last, absolute byte range."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF header says, as far as it matters here.

    Attributes:
        pairs: The kept key-value pairs.
        tensors: Every tensor by name.
        size: Bytes of the header.
    """

    pairs: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    size: int


@dataclass(frozen=True)
class GgufModel:
    """A model stored as GGUF, in one file or in parts.

    Attributes:
        projection: Its output projection.
        tokenizer: Digest of its vocabulary; two files of one tokenizer have the same.
        vocabulary_file: The part that holds the vocabulary.
        vocabulary: The vocabulary as JSON, where the header was just read; None where it is cached.
    """

    projection: OutputProjection
    tokenizer: str
    vocabulary_file: str
    vocabulary: bytes | None = None


def choose_files(files: Sequence[str], choice: str | None, repo: str) -> tuple[str, ...]:
    """The GGUF file that is meant, or its parts in order.

    Args:
        files: All paths of the checkpoint.
        choice: A file's name, or a quantisation such as ``Q4_K_M`` as llama.cpp's users write it; None takes
            the only one there is.
        repo: For errors.

    Raises:
        ScreeningError: ``FileNotFound`` if nothing matches or a part is missing, ``SeveralFiles`` if
            several match.

    >>> choose_files(["a-Q4_0.gguf", "a-Q8_0.gguf"], "q8_0", "a")
    ('a-Q8_0.gguf',)
    """
    models: dict[str, list[str]] = {}
    for path in sorted(files):
        if path.endswith(".gguf") and "mmproj" not in path.lower() and "imatrix" not in path.lower():
            models.setdefault(_SPLIT.sub(".gguf", path), []).append(path)
    if choice is None:
        found = list(models)
    elif choice.endswith(".gguf"):
        found = [m for m, parts in models.items() if choice in (m, *parts)]
        found = found or [m for m in models if m.rpartition("/")[2] == _SPLIT.sub(".gguf", choice)]
    else:
        tag = re.compile(rf"(?:^|[-._/]){re.escape(choice)}(?:[-._/]|$)", re.IGNORECASE)
        found = [m for m in models if tag.search(m.removesuffix(".gguf"))]
        exact = [m for m in found if m.lower().endswith(f"{choice.lower()}.gguf")]
        found = exact or found
    names = ", ".join(models) or "none"
    if not found:
        raise ScreeningError("FileNotFound", f"{repo} has no GGUF file {choice!r}; it has: {names}")
    if len(found) > 1:
        raise ScreeningError(
            "SeveralFiles",
            f"cannot be screened because it holds {len(found)} GGUF models ({', '.join(found)}); name one: "
            f"{repo}:{found[0].rpartition('/')[2]}, or all that you want to compare",
        )
    parts = models[found[0]]
    split = _SPLIT.search(parts[0])
    if split and [p for p in parts if _SPLIT.search(p)] and len(parts) != int(split[2]):
        raise ScreeningError(
            "FileNotFound", f"{repo} has {len(parts)} of the {int(split[2])} parts of {found[0]}"
        )
    return tuple(parts)


async def read_gguf(snapshot: Snapshot, files: Sequence[str]) -> GgufModel:
    """Where a GGUF model keeps its output projection and its vocabulary.

    Raises:
        ScreeningError: ``BadHeader``, ``NoOutputProjection``, ``BadTokenizer``, or an error of the
            connection.
    """
    known = _kept_model(snapshot, files)
    if known is not None:
        return known
    headers = {}
    for file in files:
        headers[file] = await read_header(snapshot, file)
    pairs: dict[str, Any] = {}
    for header in headers.values():
        pairs = {**header.pairs, **pairs}
    places = {name: file for file, header in headers.items() for name in header.tensors}
    what = f"{files[0]} of {snapshot.repo}"
    counted = sum(len(header.tensors) for header in headers.values())
    if len(places) != counted:
        raise _bad(what, "two parts hold a tensor of one name")
    name = next((n for n in ("output.weight", "token_embd.weight") if n in places), None)
    if name is None:
        raise ScreeningError(
            "NoOutputProjection",
            f"cannot be screened because none of the {len(places)} tensors of {what} is output.weight or "
            "token_embd.weight; it may be an adapter or a projector",
        )
    tensor = headers[places[name]].tensors[name]
    if len(tensor.shape) != 2 or tensor.dtype in _WHOLE:
        raise ScreeningError(
            "NoOutputProjection",
            f"cannot be screened because {name} of {what} is no matrix of weights: {tensor.dtype} of shape "
            f"{tensor.shape}; check what the file is",
        )
    quantised = tensor.dtype not in PLAIN
    warnings = (
        (f"quantised: {name} is stored as {tensor.dtype}; G is that of the dequantised rows",)
        if quantised
        else ()
    )
    elements = [
        int(np.prod(t.shape, dtype=object)) for header in headers.values() for t in header.tensors.values()
    ]
    projection = OutputProjection(
        name=name,
        file=places[name],
        dtype=tensor.dtype,
        shape=(tensor.shape[0], tensor.shape[1]),
        tied=name != "output.weight",
        begin=tensor.begin,
        parameters=sum(elements),
        warnings=warnings,
        final_norm=_final_norm(headers, places, pairs.get("general.architecture")),
    )
    holder = next((f for f, h in headers.items() if "tokenizer.ggml.tokens" in h.pairs), files[0])
    digest, content = _vocabulary_entry(headers[holder].pairs, what)
    if snapshot.cache is not None:
        snapshot.cache.write("vocabularies", digest, content)
        fields = {
            "tokenizer": digest,
            "holder": holder,
            **{key: getattr(projection, key) for key in _KEPT_FIELDS},
            "final_norm": projection.final_norm and dataclasses.asdict(projection.final_norm),
        }
        snapshot.cache.write("headers", _key(snapshot, files), json.dumps(fields).encode())
    return GgufModel(projection, digest, holder, content)


async def read_vocabulary(snapshot: Snapshot, model: GgufModel) -> Vocabulary:
    """The vocabulary of a GGUF model.

    Raises:
        ScreeningError: ``BadTokenizer``, ``BadHeader``, or an error of the connection.
    """
    content = model.vocabulary
    if content is None and snapshot.cache is not None:
        content = snapshot.cache.read("vocabularies", model.tokenizer)
    if content is None:
        header = await read_header(snapshot, model.vocabulary_file)
        _, content = _vocabulary_entry(header.pairs, f"{model.vocabulary_file} of {snapshot.repo}")
    return _vocabulary(json.loads(content), model.tokenizer)


async def read_header(snapshot: Snapshot, path: str) -> GgufHeader:
    """Header of a GGUF file, fetched in pieces.

    Raises:
        ScreeningError: ``BadHeader``, or an error of the connection.
    """
    what = f"{path} of {snapshot.repo}"
    size = await snapshot.size(path)
    walk = _Walk(size, what)
    while True:
        try:
            return walk.header()
        except _ShortError as short:
            have = len(walk.data)
            need = min(max(short.need, have + _PIECE), size)
            if short.need > size:
                raise _bad(what, f"it asks for byte {short.need} of a file of {size} bytes") from None
            if need > MAX_HEADER:
                raise _bad(what, f"it is longer than {MAX_HEADER} bytes") from None
            (more,) = await snapshot.ranges(path, [(have, need)])
            walk.data += more


def decode_blocks(body: bytes, dtype: str, width: int) -> NDArray[np.float32]:
    """Rows of a GGUF matrix as float32.

    Args:
        body: Bytes of whole rows.
        dtype: A type's name that is not one of `PLAIN`.
        width: Weights of a row.

    Returns:
        Array of shape (rows, width), as the ``gguf`` package dequantises it.

    Raises:
        ScreeningError: ``MissingExtra`` without the ``gguf`` package, ``QuantizedTensor`` for a type that it
            cannot dequantise.
    """
    code, weights, size = GGUF_BLOCKS[dtype]
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ScreeningError(
            "MissingExtra",
            f"rows stored as {dtype} need the gguf package; run: pip install 'lmeval-dispersion[gguf]'",
        ) from error
    blocks = np.frombuffer(body, np.uint8).reshape(-1, width // weights * size)
    try:
        rows = dequantize(blocks, GGMLQuantizationType(code))
    except (NotImplementedError, ValueError) as error:
        raise ScreeningError(
            "QuantizedTensor",
            f"cannot be screened because its output projection is stored as {dtype}, which the gguf package "
            "does not dequantise; screen another quantisation",
        ) from error
    return np.asarray(rows, dtype=np.float32).reshape(-1, width)


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

    def header(self) -> GgufHeader:
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
        found = [self._tensor() for _ in range(tensors)]
        return GgufHeader(self._pairs, self._placed(found), self._at)

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
        found = []
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
                found.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        return found if keep else None

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

    def _placed(self, found: list[tuple[str, str, tuple[int, ...], int]]) -> dict[str, GgufTensor]:
        alignment = self._pairs.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20:
            raise _bad(self._what, f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dtype, shape, offset in found:
            _, weights, size = GGUF_BLOCKS[dtype]
            if shape[-1] % weights:
                raise _bad(self._what, f"{name!r}: rows of {shape[-1]} are no whole blocks of {dtype}")
            elements = 1
            for n in shape:
                elements *= n
            end = start + offset + elements // weights * size
            if name in tensors:
                raise _bad(self._what, f"the tensor {name!r} occurs twice")
            if offset % alignment or end > self._size:
                raise _bad(self._what, f"{name!r} lies at bytes {start + offset} to {end} of {self._size}")
            tensors[name] = GgufTensor(name, dtype, shape, start + offset, end)
        at = start
        for tensor in sorted(tensors.values(), key=lambda t: t.begin):
            if tensor.begin < at:
                raise _bad(self._what, f"{tensor.name!r} overlaps the tensor before it")
            at = tensor.end
        return tensors


def _final_norm(
    headers: Mapping[str, GgufHeader], places: Mapping[str, str], architecture: Any
) -> NormPlace | None:
    """Where the final norm is. Its weight is what multiplies: converters add the 1 that Gemma's omits."""
    takes_mean = architecture in _NORMS_OF_MEAN or "output_norm.bias" in places
    file = places.get("output_norm.weight")
    if file is None:
        return NormPlace(None, True) if architecture == _NORM_WITHOUT_WEIGHT else None
    norm = headers[file].tensors["output_norm.weight"]
    if norm.dtype not in PLAIN or len(norm.shape) != 1:
        return None
    return NormPlace(Matrix(norm.name, file, norm.dtype, (norm.shape[0], 1), norm.begin), takes_mean)


def _vocabulary_entry(pairs: Mapping[str, Any], what: str) -> tuple[str, bytes]:
    """Digest and JSON of the vocabulary that the header's pairs hold."""
    tokens, types = pairs.get("tokenizer.ggml.tokens"), pairs.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ScreeningError("BadTokenizer", f"expected the vocabulary in {what}, which has none")
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


def _vocabulary(fields: Mapping[str, Any], digest: str) -> Vocabulary:
    kinds = {"gpt2": "byte-level", "llama": "sentencepiece", "t5": "sentencepiece"}
    kind = kinds.get(fields["model"])
    if kind is None:
        raise ScreeningError(
            "BadTokenizer",
            f"expected a GGUF vocabulary of {', '.join(kinds)}, got {fields['model']!r}, whose pieces do not "
            "spell their leading space",
        )
    types = fields["types"] or [1] * len(fields["tokens"])
    pieces: dict[str, int] = {}
    added = []
    for row, (token, role) in enumerate(zip(fields["tokens"], types, strict=True)):
        if role in (_CONTROL, _USER):
            added.append({"content": token, "id": row, "special": role == _CONTROL})
        elif role not in (_UNUSED, _BYTE):
            pieces.setdefault(token, row)
    return Vocabulary.from_parts(
        pieces,
        "byte-level" if kind == "byte-level" else "sentencepiece",
        added,
        individual_digits=fields["pre"] in _SINGLE_DIGITS,
        digest=digest.removeprefix("sha256:"),
    )


def _key(snapshot: Snapshot, files: Sequence[str]) -> str:
    return "gguf/2:" + "+".join(content_key(snapshot, file) for file in files)


def _kept_model(snapshot: Snapshot, files: Sequence[str]) -> GgufModel | None:
    kept = snapshot.cache.read("headers", _key(snapshot, files)) if snapshot.cache else None
    if kept is None:
        return None
    fields = json.loads(kept)
    tokenizer, holder = fields.pop("tokenizer"), fields.pop("holder")
    fields["shape"], fields["warnings"] = tuple(fields["shape"]), tuple(fields["warnings"])
    if (norm := fields["final_norm"]) is not None:
        weight = norm["weight"]
        place = None if weight is None else Matrix(**weight | {"shape": tuple(weight["shape"])})
        fields["final_norm"] = NormPlace(place, norm["takes_mean"])
    return GgufModel(OutputProjection(**fields), tokenizer, holder)


def _bad(what: str, reason: str) -> ScreeningError:
    return ScreeningError(
        "BadHeader",
        f"the GGUF header of {what} is broken: {reason}; the file was damaged on its way or at its source, "
        "compare its sha256 or upload it again",
    )
