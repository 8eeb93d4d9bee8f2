"""GGUF models: the file that is meant, its vocabulary and its output projection.

Rows are whole blocks of their quantisation, so single rows can be read by ranges; the ``gguf`` package turns
quantised blocks into numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.vocabulary import Vocabulary
from lmeval_screener.weights.files import WeightFiles
from lmeval_screener.weights.final_norm import StoredNorm, norm_kind
from lmeval_screener.weights.gguf_header import read_header
from lmeval_screener.weights.projection import OutputProjection
from lmeval_screener.weights.tensors import Header

PLAIN = ("F32", "F16", "BF16", "F64")
_WHOLE = ("I8", "I16", "I32", "I64")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
#: Pre-tokenizers of llama.cpp that cut numbers into single digits, whatever the vocabulary holds.
_SINGLE_DIGITS = {"qwen2", "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_CONTROL, _USER, _UNUSED, _BYTE = 3, 4, 5, 6
#: Architectures, as llama.cpp calls them, whose final norm is a LayerNorm without a bias that would show it.
_NORMS_OF_MEAN = frozenset(["command-r", "cohere2", "cohere2moe", "mpt", "dbrx", "olmo"])
#: The one of them whose norm has no weight.
_NORM_WITHOUT_WEIGHT = "olmo"


@dataclass(frozen=True)
class GgufModel:
    """A model stored as GGUF, in one file or in parts.

    Attributes:
        projection: Its output projection.
        tokenizer: Digest of its vocabulary; two files of one tokenizer have the same.
        files: The files, of which ``vocabulary_file`` holds the vocabulary.
        vocabulary_file: That file.
    """

    projection: OutputProjection
    tokenizer: str
    files: WeightFiles
    vocabulary_file: str


def choose_files(files: Sequence[str], choice: str | None, repo: str) -> tuple[str, ...]:
    """The GGUF file that is meant, or its parts in order.

    >>> choose_files(["a-Q4_0.gguf", "a-Q8_0.gguf"], "q8_0", "a")
    ('a-Q8_0.gguf',)
    """
    models: dict[str, list[str]] = {}
    for path in sorted(files):
        if path.endswith(".gguf") and "mmproj" not in path.lower() and "imatrix" not in path.lower():
            models.setdefault(_SPLIT.sub(".gguf", path), []).append(path)
    if choice is None:
        matching = list(models)
    elif choice.endswith(".gguf"):
        matching = [m for m, parts in models.items() if choice in (m, *parts)]
        matching = matching or [m for m in models if m.rpartition("/")[2] == _SPLIT.sub(".gguf", choice)]
    else:
        tag = re.compile(rf"(?:^|[-._/]){re.escape(choice)}(?:[-._/]|$)", re.IGNORECASE)
        matching = [m for m in models if tag.search(m.removesuffix(".gguf"))]
        exact = [m for m in matching if m.lower().endswith(f"{choice.lower()}.gguf")]
        matching = exact or matching
    names = ", ".join(models) or "none"
    if not matching:
        raise ScreeningError("FileNotFound", f"{repo} has no GGUF file {choice!r}; it has: {names}")
    if len(matching) > 1:
        raise ScreeningError(
            "SeveralFiles",
            f"cannot be screened because it holds {len(matching)} GGUF models ({', '.join(matching)}); name "
            f"one: {repo}:{matching[0].rpartition('/')[2]}, or all that you want to compare",
        )
    parts = models[matching[0]]
    split = _SPLIT.search(parts[0])
    if split and [p for p in parts if _SPLIT.search(p)] and len(parts) != int(split[2]):
        raise ScreeningError(
            "FileNotFound", f"{repo} has {len(parts)} of the {int(split[2])} parts of {matching[0]}"
        )
    return tuple(parts)


async def read_gguf(snapshot: Snapshot, names: Sequence[str]) -> GgufModel:
    """Where a GGUF model keeps its output projection and its vocabulary."""
    files = WeightFiles(snapshot)
    headers = {name: await files.header(name) for name in names}
    places = {tensor: name for name, header in headers.items() for tensor in header.tensors}
    what = f"{names[0]} of {snapshot.repo}"
    if len(places) != sum(len(header.tensors) for header in headers.values()):
        raise ScreeningError(
            "BadHeader", f"two parts of {what} hold a tensor of one name; download or save them again"
        )
    head = next((tensor for tensor in ("output.weight", "token_embd.weight") if tensor in places), None)
    if head is None:
        raise ScreeningError(
            "NoOutputProjection",
            f"cannot be screened because none of the {len(places)} tensors of {what} is output.weight or "
            "token_embd.weight; it may be an adapter or a projector",
        )
    tensor = headers[places[head]].tensors[head]
    if len(tensor.shape) != 2 or tensor.dtype in _WHOLE:
        raise ScreeningError(
            "NoOutputProjection",
            f"cannot be screened because {head} of {what} is no matrix of weights: {tensor.dtype} of shape "
            f"{tensor.shape}; check what the file is",
        )
    quantised = f"quantised: {head} is stored as {tensor.dtype}; G is that of the dequantised rows"
    holder = next((name for name, header in headers.items() if header.tokenizer), None)
    if holder is None:
        raise ScreeningError("BadTokenizer", f"expected the vocabulary in {what}, which has none")
    rows = await files.matrix(places[head], tensor)
    projection = OutputProjection(
        name=head,
        file=places[head],
        dtype=tensor.dtype,
        rows=rows,
        tied=head != "output.weight",
        parameters=sum(t.elements for header in headers.values() for t in header.tensors.values()),
        warnings=() if tensor.dtype in PLAIN else (quantised,),
        norm=_final_norm(files, headers, places),
    )
    return GgufModel(projection, headers[holder].tokenizer or "", files, holder)


async def read_vocabulary(model: GgufModel) -> Vocabulary:
    """The vocabulary of a GGUF model."""
    snapshot, file = model.files.snapshot, model.vocabulary_file
    content = (await model.files.header(file)).vocabulary
    if content is None and snapshot.cache is not None:
        content = snapshot.cache.read("vocabularies", model.tokenizer)
    if content is None:
        content = (await read_header(snapshot, file)).vocabulary or b"{}"
    return _vocabulary(json.loads(content), model.tokenizer)


def _final_norm(
    files: WeightFiles, headers: Mapping[str, Header], places: Mapping[str, str]
) -> StoredNorm | str:
    """Where the final norm is. Its weight is what multiplies: converters add the 1 that Gemma's omits."""
    architecture = next((h.architecture for h in headers.values() if h.architecture), None)
    file = places.get("output_norm.weight")
    if file is None and architecture == _NORM_WITHOUT_WEIGHT:
        return StoredNorm(files, None, (), "layer")
    if file is None or headers[file].tensors["output_norm.weight"].dtype not in PLAIN:
        return "the GGUF file holds no output_norm.weight in plain numbers"
    takes_mean = architecture in _NORMS_OF_MEAN or "output_norm.bias" in places
    return StoredNorm(files, "output_norm.weight", (file,), norm_kind(takes_mean))


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
