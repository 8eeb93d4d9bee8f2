"""GGUF models: choice of the file, header by ranges, vocabulary and output projection.

A GGUF file begins with a header (key-value pairs, among them the whole vocabulary, then the
tensors' names, shapes and offsets); the tensors' data follow. Strings have no index, so the header
is walked from its start and fetched in pieces, each byte once. Rows are whole blocks of their
quantisation, so single rows can be read by ranges; the ``gguf`` package turns quantised blocks into
numbers.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.budgets import (
    GGUF_ELEMENTS,
    GGUF_HEADER,
    GGUF_PAIRS,
    GGUF_TENSORS,
    NAME,
    check_time,
)
from lmeval_screener.checkpoints.concurrency import side_by_side
from lmeval_screener.checkpoints.snapshot import PART, Snapshot
from lmeval_screener.errors import ScreeningError, cannot
from lmeval_screener.formats import is_gguf
from lmeval_screener.tokens.vocabulary import Kind, Vocabulary
from lmeval_screener.weights.architectures import TABLES, NormKind, head_bias
from lmeval_screener.weights.projection import OutputProjection, StoredNorm
from lmeval_screener.weights.rows import Matrix, WeightFiles
from lmeval_screener.weights.tensors import (
    PLAIN_DTYPES,
    DamagedError,
    Header,
    Tensor,
    WeightFile,
)

_LONGEST_KEY = 65_535  # the format's own limit
_ELSEWHERE = "download the file again if it is damaged, or screen the model in safetensors"
_PIECE = 2**20  # bytes of one request while the header is walked
_BEGINNING = 4096  # bytes that hold a header's first pairs, which say what kind of file it is
_FIRST = 64  # most pairs that are read of a header's beginning
_ASKED = 16  # most files of one folder whose kind is read to choose among them
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9
_KEPT = re.compile(
    r"general\.(architecture|type|alignment)|tokenizer\.ggml\.(model|pre|tokens|token_type)"
)
_INTEGERS = ("I8", "I16", "I32", "I64")
#: Pre-tokenizers of llama.cpp that split numbers into single digits, whatever the vocabulary holds.
_SINGLE_DIGITS = frozenset(TABLES["gguf_single_digits"].split())
#: What a token is.
_CONTROL = 3
_USER = 4
_UNUSED = 5
#: The kind of a vocabulary by its model.
_VOCABULARIES: dict[str, Kind] = {
    "gpt2": "byte-level",
    "llama": "sentencepiece",
    "t5": "sentencepiece",
    "gemma4": "sentencepiece",  # merges, over pieces spelled with ▁
}
#: Architecture -> kind of its final norm.
_NORMS: dict[str, NormKind] = {}
for _kind_of_norm, _types in TABLES["gguf_norms"].items():
    _NORMS |= dict.fromkeys(_types.split(), _kind_of_norm)
#: The architecture whose norm has no weight.
_NORM_WITHOUT_WEIGHT = "olmo"
#: GGUF's type code -> name, weights a block, bytes a block.
GGUF_TYPES: dict[int, tuple[str, int, int]] = {}
#: Name -> code, weights a block, bytes a block.
_BLOCKS: dict[str, tuple[int, int, int]] = {}
for _code, (_name, _weights, _size) in TABLES["gguf_types"].items():
    GGUF_TYPES[_code] = (_name, _weights, _size)
    _BLOCKS[_name] = (_code, _weights, _size)


class _Blocks(Matrix):
    """Rows of quantised blocks, dequantised."""

    __slots__ = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        _, weights, size = _BLOCKS[self.tensor.dtype]
        return self.shape[1] // weights * size

    def decoded(self, body: bytes) -> NDArray[np.float32]:
        """Rows as numbers, from their blocks end to end."""
        dtype = self.tensor.dtype
        try:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise ScreeningError(
                "MissingExtra",
                f"rows stored as {dtype} need the gguf package; run: pip install 'lmeval-dispersion[gguf]'",
            ) from error
        blocks = np.frombuffer(body, np.uint8).reshape(-1, self.row_bytes)
        try:
            rows = dequantize(blocks, GGMLQuantizationType(_BLOCKS[dtype][0]))
        except (NotImplementedError, ValueError) as error:
            reason = f"its output projection is {dtype}, which the gguf package cannot dequantise"
            step = "screen a file with another quantisation"
            raise cannot("QuantizedTensor", reason, step) from error
        return np.asarray(rows, dtype=np.float32).reshape(-1, self.shape[1])


@dataclass(frozen=True)
class GgufModel:
    """The output projection and the tokenizer of a GGUF model, which is one file or several parts.

    Attributes:
        projection: The output projection.
        tokenizer: SHA-256 of the vocabulary, the same for all files of one tokenizer.
        pairs: What the header says about the vocabulary: ``model`` and ``pre``, names of the
            tokenizer and of the pre-tokenizer; ``tokens``, a list of texts; and ``types``, a list
            with a number for each token, or None.
    """

    projection: OutputProjection
    tokenizer: str
    pairs: Mapping[str, Any]

    async def vocabulary(self) -> Vocabulary:
        """Return the vocabulary in the header.

        Raises:
            ScreeningError: ``BadTokenizer``: the kind of the vocabulary is not supported, since its
                tokens do not show whether a space comes before them.
        """
        model = self.pairs["model"]
        kind = _VOCABULARIES.get(model)
        if kind is None:
            raise ScreeningError(
                "BadTokenizer",
                f"expected a GGUF vocabulary of one of the types {', '.join(_VOCABULARIES)}, got "
                f"{model!r}, whose tokens do not show whether a space comes before them; screen "
                "the model in safetensors",
            )
        tokens = self.pairs["tokens"]
        roles = self.pairs["types"] or [None] * len(tokens)
        pieces: dict[str, int] = {}
        added = []
        for row, (token, role) in enumerate(zip(tokens, roles, strict=True)):
            if role in (_CONTROL, _USER):
                added.append({"content": token, "id": row, "special": role == _CONTROL})
            elif role != _UNUSED:
                pieces.setdefault(token, row)
        is_by_digit = self.pairs["pre"] in _SINGLE_DIGITS
        return Vocabulary(pieces, kind, added, individual_digits=is_by_digit)


def choose_files(files: Sequence[str], choice: str | None, repo: str) -> tuple[str, ...]:
    """Choose a GGUF model by its name, and return its file, or all its parts in order.

    Args:
        files: The paths of all files in the repository or folder.
        choice: A file's name, or a word of it such as ``Q8_0``; None to take the only model.
        repo: Name of the repository or folder in messages.

    Raises:
        ScreeningError: ``FileNotFound``: no model has that name, or a part of the model is missing.
            ``SeveralFiles``: several models have that name, or, without a name, there are several.

    >>> choose_files(["a-Q4_0.gguf", "a-Q8_0.gguf"], "q8_0", "a")
    ('a-Q8_0.gguf',)
    """
    models: dict[str, list[str]] = {}
    for path in sorted(files):
        if is_gguf(path) and not re.search("mmproj|imatrix", path, re.IGNORECASE):
            models.setdefault(PART.sub(".gguf", path), []).append(path)
    matching = list(models) if choice is None else _named(models, choice)
    if not matching:
        which = "that holds a model" if choice is None else repr(choice)
        step = "check the name"
        if models:
            step = f"name one of its models: {', '.join(models)}"
        raise ScreeningError("FileNotFound", f"{repo} has no GGUF file {which}; {step}")
    if len(matching) > 1:
        raise cannot(
            "SeveralFiles",
            f"it holds {len(matching)} GGUF models ({', '.join(matching)})",
            f"name one, such as {repo}:{matching[0].rpartition('/')[2]}, or several to compare them",
        )
    parts = models[matching[0]]
    if matching[0] in parts:  # whole, whether or not its parts are there too
        return (matching[0],)
    part = PART.search(parts[0])
    if part and len(parts) != int(part[2]):
        raise ScreeningError(
            "FileNotFound",
            f"{repo} has {len(parts)} of the {int(part[2])} parts of {matching[0]}; add the "
            "missing parts, or download the model again",
        )
    return tuple(parts)


def _named(models: Mapping[str, Sequence[str]], choice: str) -> list[str]:
    """The models, each with its parts, that a choice names: by path, by file, else by a word in the name."""
    file = PART.sub(".gguf", choice)
    tag = re.compile(rf"(?:^|[-._/]){re.escape(choice)}(?:[-._/]|$)", re.IGNORECASE)
    at_end = f"{choice.lower()}.gguf"
    by_path: list[str] = []
    by_file: list[str] = []
    by_end: list[str] = []
    by_word: list[str] = []
    for model, parts in models.items():
        _, _, name = model.rpartition("/")
        if choice in (model, *parts):
            by_path.append(model)
        if name == file:
            by_file.append(model)
        if tag.search(model.removesuffix(".gguf")):
            by_word.append(model)
            if model.lower().endswith(at_end):
                by_end.append(model)
    return by_path or by_file or by_end or by_word


async def models_among(snapshot: Snapshot) -> list[str]:
    """Return the GGUF files that may hold a model.

    LoRA adapters and projectors for images or sound, as their headers show, are left out. Headers
    are read only if there are 2 to 16 candidates, counting the parts of one model once. If no file
    would be left, all are returned.
    """
    files = sorted(path for path in snapshot.files if path.endswith(".gguf"))
    whole = {PART.sub(".gguf", path) for path in files}
    if not 1 < len(whole) <= _ASKED:
        return files
    kinds = await side_by_side(_other_kind(snapshot, path) for path in files)
    models = dict(zip(files, kinds, strict=True))
    return [path for path, kind in models.items() if not kind] or files


async def _other_kind(snapshot: Snapshot, path: str) -> str:
    """What a GGUF file is instead of a model, by its first pairs; empty for a model and a broken file."""
    try:
        file = WeightFile(snapshot, await snapshot.look_up(path))
        return _kind(await _Walk(file, _BEGINNING).beginning())
    except ScreeningError:
        return ""  # the error is raised where the file is read


def _kind(pairs: Mapping[str, Any]) -> str:
    """What a header says that its file is instead of a model; empty for a model.

    >>> _kind({"general.architecture": "llama", "general.type": "adapter"})
    'a LoRA adapter of llama.cpp'
    """
    if pairs.get("general.type") == "adapter":
        return "a LoRA adapter of llama.cpp"
    if pairs.get("general.type") == "mmproj" or pairs.get("general.architecture") == "clip":
        return "a projector for images or sound, not a language model"
    return ""


async def read_header(file: WeightFile) -> Header:
    """Read the header of a GGUF file.

    Raises:
        ScreeningError: ``BadHeader``: the header is broken, or contradicts the file.
    """
    return await _Walk(file).header()


async def read_gguf(snapshot: Snapshot, names: Sequence[str]) -> GgufModel:
    """Find the output projection and the vocabulary of a GGUF model.

    Args:
        snapshot: The repository or folder.
        names: The model's file, or all its parts in order.

    Raises:
        ScreeningError: The output projection or the vocabulary is missing, a file is broken, or it
            holds an adapter or a projector in place of a model.
    """
    files = WeightFiles(snapshot)
    what = f"{names[0]} of {snapshot.repo}"
    places: dict[str, tuple[str, Tensor]] = {}
    pairs: dict[str, Any] = {}
    parameters = 0
    for name in names:
        header = await files.header(name)
        kind = _kind(header.pairs)
        if kind:
            step = "screen the GGUF file of the whole model (llama-export-lora merges an adapter into it)"
            raise cannot("NoOutputProjection", f"{what} is {kind}", step)
        if not places.keys().isdisjoint(header.tensors):
            raise ScreeningError(
                "BadHeader",
                f"two parts of the model {what} hold a tensor of the same name; download the parts "
                "again, or save them again",
            )
        for tensor in header.tensors.values():
            places[tensor.name] = (name, tensor)
        pairs = {**header.pairs, **pairs}
        parameters += header.parameters
    head = "output.weight" if "output.weight" in places else "token_embd.weight"
    if head not in places:
        raise cannot(
            "NoOutputProjection",
            f"none of the {len(places)} tensors of {what} is output.weight or token_embd.weight",
            "check that it is a whole model, not an adapter or a projector",
        )
    file, tensor = places[head]
    if len(tensor.shape) != 2 or tensor.dtype in _INTEGERS:
        raise cannot(
            "NoOutputProjection",
            f"{head} of {what} is not a matrix of weights: {tensor.dtype} of shape {tensor.shape}",
            "check that the file holds a language model",
        )
    vocabulary = _vocabulary_pairs(pairs, what)
    digest = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
    matrix = Matrix
    warnings = head_bias(places)
    if tensor.dtype not in PLAIN_DTYPES:
        matrix = _Blocks
        quantised = f"{head} is quantised ({tensor.dtype}): the screen uses the dequantised rows"
        warnings.insert(0, quantised)
    projection = OutputProjection(
        name=head,
        file=file,
        dtype=tensor.dtype,
        rows=matrix(snapshot, file, tensor, (tensor.shape[0], tensor.shape[1])),
        tied=head != "output.weight",
        parameters=parameters,
        warnings=tuple(warnings),
        norm=_final_norm(files, pairs.get("general.architecture"), places),
        files=tuple(names),
    )
    return GgufModel(projection, f"sha256:{digest}", vocabulary)


def _final_norm(
    files: WeightFiles, architecture: Any, places: Mapping[str, tuple[str, Tensor]]
) -> StoredNorm:
    """The location of the final norm. Its weight is the multiplier: converters add the 1 that Gemma omits."""
    name = "output_norm.weight"
    kind = _NORMS.get(str(architecture))
    if kind is None:
        stated = architecture if isinstance(architecture, str) else "an unnamed architecture"
        return StoredNorm(files, reason=f"the final normalisation layer of {stated} is not known")
    if name not in places and architecture == _NORM_WITHOUT_WEIGHT:
        return StoredNorm(files, kind=kind)
    if name not in places or places[name][1].dtype not in PLAIN_DTYPES:
        return StoredNorm(
            files, reason=f"the GGUF file does not hold {name} as floating-point numbers"
        )
    return StoredNorm(files, name, places[name][:1], kind)


def _vocabulary_pairs(pairs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The vocabulary from a header's pairs."""
    tokens = pairs.get("tokenizer.ggml.tokens")
    types = pairs.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ScreeningError(
            "BadTokenizer",
            f"expected a list of texts as the vocabulary of {what} (`tokenizer.ggml.tokens`), "
            "which is missing or of another type; convert the model again",
        )
    if types is not None and (not isinstance(types, list) or len(types) != len(tokens)):
        raise ScreeningError(
            "BadTokenizer",
            f"expected a type for each of the {len(tokens)} tokens in {what}, got a "
            "`tokenizer.ggml.token_type` that is not a list of that length; convert the model again",
        )
    return {
        "model": str(pairs.get("tokenizer.ggml.model", "")),
        "pre": str(pairs.get("tokenizer.ggml.pre", "")),
        "tokens": tokens,
        "types": types,
    }


class _Walk:
    """Walks a header from the file's start, and holds the piece of it that it looks at."""

    def __init__(self, file: WeightFile, piece: int = _PIECE) -> None:
        self._file = file
        self._size = file.size
        self._piece = piece  # bytes of one request
        self._data = bytearray()
        self._begin = 0  # the place of `_data` in the file
        self._at = 0  # the place of the walk
        self._elements = 0

    async def header(self) -> Header:
        """The whole header."""
        tensors, count = await self._counts()
        pairs: dict[str, Any] = {}
        for _ in range(count):
            name, value = await self._pair()
            if name in pairs:
                raise self._bad(f"the key {name!r} occurs twice")
            pairs[name] = value
        described = [await self._tensor() for _ in range(tensors)]
        stored = self._placed(described, pairs.get("general.alignment", 32))
        return Header(
            stored, pairs={name: value for name, value in pairs.items() if _KEPT.fullmatch(name)}
        )

    async def beginning(self) -> dict[str, Any]:
        """The pairs up to the file's kind, or before the vocabulary, which is most of a header."""
        _, count = await self._counts()
        pairs: dict[str, Any] = {}
        for _ in range(min(count, _FIRST)):
            name, value = await self._pair()
            if name.startswith("tokenizer."):
                break
            pairs[name] = value
            if name == "general.type":
                break
        return pairs

    async def _pair(self) -> tuple[str, Any]:
        name = await self._string()
        if len(name) > _LONGEST_KEY:
            raise self._bad(
                f"the key {name!r} has {len(name):,} characters, above the limit of "
                f"{_LONGEST_KEY:,}"
            )
        keep = _KEPT.fullmatch(name) is not None
        value = await self._value(await self._scalar("I"), keep=keep)
        return name, value if keep else None

    async def _counts(self) -> tuple[int, int]:
        """The numbers of tensors and of pairs, after the file's magic and version."""
        magic = bytes(await self._take(4))
        if magic != b"GGUF":
            raise self._bad(f"it begins with {magic!r}, not GGUF")
        version = await self._scalar("I")
        if version not in (2, 3):
            word = "big-endian" if version in (0x02000000, 0x03000000) else "unknown"
            raise self._bad(
                f"its version is {word} ({version}), where little-endian files of version 2 or 3 "
                "are expected",
                "convert the model again, or download the file again if it is damaged",
            )
        tensors, count = await self._scalar("Q"), await self._scalar("Q")
        announced = f"it announces {count:,} pairs and {tensors:,} tensors"
        # A pair takes at least 12 bytes and a tensor 24, so the file's size limits their numbers.
        if count > self._size // 12 or tensors > self._size // 24:
            raise self._bad(f"{announced}, too many for a file of {self._size:,} bytes")
        if count > GGUF_PAIRS or tensors > GGUF_TENSORS:
            raise self._bad(
                f"{announced}, above the limits of {GGUF_PAIRS:,} pairs and {GGUF_TENSORS:,} "
                "tensors",
                _ELSEWHERE,
            )
        return tensors, count

    async def _need(self, end: int) -> None:
        """Hold the file's bytes from the walk's place up to an end at least."""
        have = self._begin + len(self._data)
        if end <= have:
            return
        if end > self._size:
            raise self._bad(f"it refers to byte {end:,}, beyond the file of {self._size:,} bytes")
        if end > GGUF_HEADER:
            raise self._bad(f"it is longer than {GGUF_HEADER:,} bytes", _ELSEWHERE)
        check_time()
        if self._at >= have:
            self._data.clear()
            self._begin = have = self._at
        else:
            del self._data[: self._at - self._begin]
            self._begin = self._at
        until = min(max(end, have + self._piece), self._size)
        self._data += await self._file.read(have, until)

    async def _take(self, count: int) -> bytes:
        end = self._at + count
        await self._need(end)
        taken = bytes(self._data[self._at - self._begin : end - self._begin])
        self._at = end
        return taken

    def _pass(self, count: int) -> None:
        """Go on without the next bytes."""
        self._at += count
        if self._at > self._size:
            raise self._bad(
                f"it refers to byte {self._at:,}, beyond the file of {self._size:,} bytes"
            )
        if self._at > GGUF_HEADER:
            raise self._bad(f"it is longer than {GGUF_HEADER:,} bytes", _ELSEWHERE)

    def _count(self, elements: int) -> None:
        """Count an array's elements; ScreeningError above the budget."""
        self._elements += elements
        if self._elements > GGUF_ELEMENTS:
            raise self._bad(
                f"its arrays hold more values than the limit of {GGUF_ELEMENTS:,}", _ELSEWHERE
            )

    async def _scalar(self, kind: str) -> Any:
        (value,) = struct.unpack("<" + kind, await self._take(struct.calcsize("<" + kind)))
        return value

    async def _string(self) -> str:
        return (await self._take(await self._scalar("Q"))).decode("utf-8", "replace")

    async def _value(self, kind: int, *, keep: bool, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return await self._scalar(_SCALARS[kind])
        if kind == _STRING and keep:
            return await self._string()
        if kind == _STRING:
            return self._pass(await self._scalar("Q"))
        if kind != _ARRAY:
            raise self._bad(f"a value has the unknown type {kind}")
        if depth > 2:
            raise self._bad("arrays are nested too deeply")
        inner, count = await self._scalar("I"), await self._scalar("Q")
        self._count(count)
        if inner in _SCALARS:
            size = count * struct.calcsize("<" + _SCALARS[inner])
            if not keep:
                return self._pass(size)
            return np.frombuffer(await self._take(size), "<" + _SCALARS[inner]).tolist()
        if self._at + 8 * count > self._size:  # a string or an array takes at least its length
            raise self._bad(
                f"an array of {count:,} values at byte {self._at:,} ends beyond the file"
            )
        if inner == _STRING:
            return await self._strings(count, keep)
        return [await self._value(inner, keep=keep, depth=depth + 1) for _ in range(count)]

    async def _strings(self, count: int, keep: bool) -> list[str]:
        """An array of strings: most of a header, so without a call for each."""
        data = self._data
        begin, at = self._begin, self._at
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > begin + len(data):
                self._at = at
                await self._need(at + 8)
                begin = self._begin
            (length,) = unpack(data, at - begin)
            at += 8
            if keep and at + length > begin + len(data):
                self._at = at
                await self._need(at + length)
                begin = self._begin
            if keep:
                strings.append(data[at - begin : at - begin + length].decode("utf-8", "replace"))
            at += length
        self._at = at
        self._pass(0)
        return strings

    async def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = await self._string()
        if len(name) > NAME:
            raise self._bad(
                f"the name {name!r} has {len(name):,} characters, above the limit of {NAME:,}"
            )
        dimensions = await self._scalar("I")
        if not 1 <= dimensions <= 4:
            raise self._bad(f"{name!r} has {dimensions} dimensions, expected 1 to 4")
        shape = tuple([await self._scalar("Q") for _ in range(dimensions)])
        code, offset = await self._scalar("I"), await self._scalar("Q")
        if code not in GGUF_TYPES:
            raise self._bad(f"{name!r} has the unknown type {code}")
        if any(not 0 < n < 2**40 for n in shape):
            raise self._bad(f"{name!r} has the shape {shape}, expected 1 to {2**40 - 1:,} each")
        # ggml writes the fastest dimension first.
        return name, GGUF_TYPES[code][0], shape[::-1], offset

    def _placed(
        self, described: list[tuple[str, str, tuple[int, ...], int]], alignment: Any
    ) -> dict[str, Tensor]:
        if type(alignment) is not int or not 0 < alignment <= 2**20:
            raise self._bad(f"its alignment is {alignment!r}, expected 1 to {2**20:,}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape, offset in described:
            _, weights, size = _BLOCKS[dtype]
            if shape[-1] % weights:
                raise self._bad(
                    f"the rows of {name!r}, {shape[-1]} wide, are not whole blocks of {dtype}"
                )
            end = start + offset + math.prod(shape) // weights * size
            if name in tensors:
                raise self._bad(f"the tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._bad(
                    f"{name!r} begins at byte {start + offset:,}, which is not a multiple of "
                    f"{alignment}"
                )
            if end > self._size:
                raise self._bad(
                    f"{name!r} ends at byte {end:,}, but the file has only {self._size:,} bytes"
                )
            tensors[name] = Tensor(name, dtype, shape, start + offset, end)
        at = start
        for tensor in sorted(tensors.values(), key=lambda t: t.begin):
            if tensor.begin < at:
                raise self._bad(f"{tensor.name!r} overlaps the tensor before it")
            at = tensor.end
        return tensors

    def _bad(self, reason: str, step: str = "") -> DamagedError:
        return DamagedError("the GGUF header of", reason, step=step)
