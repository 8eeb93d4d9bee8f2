"""Which stored tensor is the output projection: by config.json, the index and the safetensors headers.

The rule, in transformers' own order of preference (`slices` has torch's distributed checkpoints, whose files
hold slices, and `adapters` those that change another checkpoint's matrix):

1. File: ``model.safetensors`` if it is there (an index beside it is stale), else the shard that
   ``model.safetensors.index.json`` names, else the only safetensors file there is. Without safetensors the
   same for ``pytorch_model.bin`` and its index.
2. Tensor: a stored head if there is one. Where config.json says *tied* and a head is stored nevertheless, the
   stored head is read, as transformers 5 does, and a warning says so.
3. Without a stored head, the input embedding, if config.json or the architecture's default ties the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.absent import no_weights_error, suggest_alternative
from lmeval_screener.weights.architectures import (
    EMBEDDINGS,
    HEADS,
    NOT_THE_MODEL,
    UNTIED_BY_DEFAULT,
    WRAPPERS,
)
from lmeval_screener.weights.files import WeightFiles
from lmeval_screener.weights.final_norm import FinalNorm, StoredNorm, find_norm
from lmeval_screener.weights.rows import BRIDGE, Matrix, Rows, ScaledRows, side_by_side
from lmeval_screener.weights.scales import SCALES, Blocks, blocks_of, companions, packed
from lmeval_screener.weights.slices import joined, slice_files, sliced
from lmeval_screener.weights.tensors import DTYPE_BITS, FLOAT_DTYPES, SCALED_DTYPES, Header, Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ARCHIVE = "pytorch_model.bin"
ARCHIVE_INDEX = "pytorch_model.bin.index.json"
#: First request of a shard's header: so many bytes per tensor and some, enough for nearly all names.
_PER_TENSOR, _SOME = 140, 2048


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """The output projection of a checkpoint.

    Attributes:
        name: Name of the tensor.
        file: The file that holds it, or its first slice.
        dtype: ``F64``, ``F32``, ``F16``, ``BF16``, ``F8_E4M3``, ``F8_E5M2``, or a type of GGUF's.
        rows: Its rows.
        tied: Whether it is the input embedding.
        parameters: Parameters of the whole checkpoint as stored (tied matrices once); None if not to be known
            without reading every shard.
        warnings: What a reader of the result should know; usually empty.
        norm: Where the final norm before it is; where that is not known, a clause that says why.
    """

    name: str
    file: str
    dtype: str
    rows: Rows
    tied: bool
    parameters: int | None
    warnings: tuple[str, ...]
    norm: StoredNorm | str

    @property
    def shape(self) -> tuple[int, int]:
        """(v, d), rows and width. v may exceed the tokenizer's vocabulary: padding."""
        return self.rows.shape


async def read_rows_and_norm(
    projection: OutputProjection, ids: Sequence[int]
) -> tuple[NDArray[np.float32], FinalNorm]:
    """Rows of the output projection and the final norm before it, read side by side."""
    norm, width = projection.norm, projection.shape[1]
    if isinstance(norm, str):
        return await read_rows(projection, ids), FinalNorm(reason=norm)
    rows, known = await side_by_side(read_rows(projection, ids), norm.read(width))
    return rows, known


async def read_rows(projection: OutputProjection, ids: Sequence[int]) -> NDArray[np.float32]:
    """Rows of the output projection.

    Returns:
        Array of shape (len(ids), d) in the order of `ids`, exactly the stored numbers; for quantised blocks
        of GGUF and 8-bit floats with scales the numbers that they stand for, for an adapter those of the
        merged model in float32.
    """
    v = projection.shape[0]
    if outside := sorted({i for i in ids if not 0 <= i < v}):
        raise _bad_rows(
            projection, outside, f"are outside its {v} rows", "the checkpoint's vocabulary is too short"
        )
    wanted, place = np.unique(np.asarray(ids, dtype=int), return_inverse=True)
    matrix = await projection.rows.read(wanted.tolist())
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        raise _bad_rows(projection, wanted[~finite], "hold NaN or Inf", "the checkpoint is damaged")
    zero = ~matrix.any(axis=1)
    if zero.any():
        raise _bad_rows(projection, wanted[zero], "are zero", "these tokens were never trained")
    if len(wanted) > 1 and _parallel(matrix):
        why = "the matrix was never trained, or is damaged"
        raise _bad_rows(projection, wanted, "all point the same way", why)
    result: NDArray[np.float32] = matrix[place]
    return result


def _parallel(matrix: NDArray[np.float32]) -> bool:
    """All rows (n, d) have one direction, up to float32's rounding."""
    rows = matrix.astype(np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return bool(np.abs(units - units[0]).max() < 1e-6)


def _bad_rows(projection: OutputProjection, ids: Iterable[int], state: str, why: str) -> ScreeningError:
    numbers = [str(i) for i in ids]
    shown = ", ".join(numbers[:8]) + (", …" if len(numbers) > 8 else "")
    return ScreeningError(
        "BadRows",
        f"cannot be screened because rows {shown} of {projection.name} {state}: {why}; screen "
        "another revision",
    )


async def find_projection(snapshot: Snapshot) -> OutputProjection:
    """The output projection of a checkpoint in transformers' layout."""
    config = await _json(snapshot, "config.json", "BadConfig") if "config.json" in snapshot.files else {}
    files = WeightFiles(snapshot)
    usual = {SINGLE, INDEX} & snapshot.files.keys()
    if slices := [] if usual else slice_files(snapshot.files):
        return await _joined_slices(files, config, slices)
    warnings: list[str] = []
    if beside := [
        path for path in ("adapter_model.safetensors", "adapter_model.bin") if path in snapshot.files
    ]:
        warnings.append(f"{beside[0]} lies beside the weights and was not applied to them")
    index_name = _index(snapshot)
    files_of: Mapping[str, str]
    if index_name is None:
        file = await _only_file(snapshot, warnings)
        header = await files.header(file)
        files_of = dict.fromkeys(header.tensors, file)
        name, tied = await _chosen(snapshot, files_of, config, warnings)
        parameters: int | None = snapshot.parameters or header.parameters
    else:
        index = await _json(snapshot, index_name, "BadIndex")
        files_of = _weight_map(snapshot, index, index_name)
        name, tied = await _chosen(snapshot, files_of, config, warnings)
        file = _shard(snapshot, name, files_of[name], index_name)
        header = await files.header(file, _header_bytes(files_of, file))
        if name not in header.tensors:
            raise ScreeningError(
                "BadIndex",
                f"{index_name} of {snapshot.repo} says that {name} is in {file}, which does not hold it: the "
                "index is stale; ask for another revision",
            )
        bits = DTYPE_BITS[header.tensors[name].dtype]
        parameters = snapshot.parameters or await _parameters(files, index, set(files_of.values()), bits)
    tensor = header.tensors[name]
    rows = await _rows(files, tensor, {**files_of, **dict.fromkeys(header.tensors, file)}, config)
    if name in header.slices and not _is_whole(snapshot, config, header.slices[name], rows.shape):
        raise sliced(name, f"{file} does not hold all of it")
    if not tied and _shares_an_embedding(tensor, header):
        tied, warnings = True, [text for text in warnings if not text.startswith(_SAYS_TIED)]
    warnings += _size_warnings(config, rows.shape[0])
    holders = {stored: (shard,) for stored, shard in files_of.items() if shard in snapshot.files}
    norm = find_norm(files, holders, model_types(config))
    if not isinstance(norm, str) and norm.holders:
        norm = replace(norm, guess=_header_bytes(files_of, norm.holders[0]))
    return OutputProjection(name, file, tensor.dtype, rows, tied, parameters, tuple(warnings), norm)


async def _joined_slices(files: WeightFiles, config: Mapping[str, Any], names: list[str]) -> OutputProjection:
    """The output projection of a distributed checkpoint, from the slices that its files hold."""
    snapshot = files.snapshot
    headers = dict(zip(names, await side_by_side(*(files.header(n, 16_384) for n in names)), strict=True))
    holders: dict[str, list[str]] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            holders.setdefault(tensor, []).append(file)
    warnings: list[str] = []
    files_of = {tensor: held[0] for tensor, held in holders.items()}
    name, tied = await _chosen(snapshot, files_of, config, warnings)
    stored = headers[files_of[name]].tensors[name]
    if await _scales(files, stored, files_of, config) is not None:
        raise sliced(name, "it has scales beside it, which may be sliced too")
    _shape(stored)
    whole = joined(snapshot, name, headers, _sizes(config))
    first = whole.pieces[0][0]
    # A slice counts as what it holds, so that the whole counts once.
    parameters = snapshot.parameters or sum(header.parameters for header in headers.values())
    norm = find_norm(files, holders, model_types(config))
    rows = first if len(whole.pieces) == 1 else whole
    return OutputProjection(name, first.file, first.dtype, rows, tied, parameters, tuple(warnings), norm)


async def _chosen(
    snapshot: Snapshot, files_of: Mapping[str, str], config: Mapping[str, Any], warnings: list[str]
) -> tuple[str, bool]:
    """`choose_tensor`; where the head is packed, the error names what to screen instead."""
    try:
        return choose_tensor(files_of, config, warnings)
    except ScreeningError as error:
        if error.code != "QuantizedTensor":
            raise
        raise await _with_suggestion(snapshot, config, str(error)) from error


async def _rows(
    files: WeightFiles, tensor: Tensor, files_of: Mapping[str, str], config: Mapping[str, Any]
) -> Matrix | ScaledRows:
    """Rows of a whole matrix, with the scales that may lie beside it."""
    scales = await _scales(files, tensor, files_of, config)
    _shape(tensor)
    codes = await files.matrix(files_of[tensor.name], tensor)
    return codes if scales is None else ScaledRows(codes, *scales)


async def _scales(
    files: WeightFiles, tensor: Tensor, files_of: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[Matrix, tuple[int, int]] | None:
    """Scales of a matrix and the block that each covers; None where its stored numbers are its weights."""
    # Unknown companions come first: an error names them.
    beside = sorted(companions(tensor.name, files_of), key=lambda word: word in SCALES)
    stem = tensor.name.removesuffix("weight")
    quantization = config.get("quantization_config")
    known = len(beside) == 1 and beside[0] in SCALES and tensor.dtype in SCALED_DTYPES
    if tensor.dtype not in FLOAT_DTYPES:
        how = f"as {tensor.dtype}" + (f" with {stem}{beside[0]} beside it" if beside else "")
    elif known and len(tensor.shape) == 2:
        name = stem + beside[0]
        file = files_of[name]
        header = await files.header(file) if file in files.snapshot.files else Header({})
        scale = header.tensors.get(name)
        if scale is None:
            blocks: Blocks | str = f"with {name} beside it, which is not in {file}"
        else:
            blocks = blocks_of(tensor, scale, quantization)
        if scale is not None and isinstance(blocks, Blocks):
            matrix = await files.matrix(file, scale, BRIDGE)
            return replace(matrix, shape=blocks.shape, strides=None), blocks.size
        how = f"as {tensor.dtype} {blocks}"
    elif beside:
        how = f"as {tensor.dtype} with {stem}{beside[0]} beside it"
    elif tensor.dtype in SCALED_DTYPES and quantization:
        how = f"as {tensor.dtype} without the scales that config.json's quantization_config announces"
    else:
        return None
    sentence = f"cannot be screened because {tensor.name} is stored {how}; screen the unquantised model"
    raise await _with_suggestion(files.snapshot, config, sentence)


async def _with_suggestion(snapshot: Snapshot, config: Mapping[str, Any], sentence: str) -> ScreeningError:
    """The error of a packed matrix, with what to screen in place of it."""
    reason, _, step = sentence.partition("; ")
    return ScreeningError(
        "QuantizedTensor", f"{reason}; {await suggest_alternative(snapshot, config) or step}"
    )


def _header_bytes(files_of: Mapping[str, str], file: str) -> int:
    """About the size of a shard's header, by the number of its tensors."""
    return _SOME + _PER_TENSOR * sum(shard == file for shard in files_of.values())


def _index(snapshot: Snapshot) -> str | None:
    """The index that says which shard holds what; None where one file holds everything."""
    if SINGLE in snapshot.files:
        return None
    if INDEX in snapshot.files:
        return INDEX
    others = any(path.endswith(".safetensors") and "/" not in path for path in snapshot.files)
    return ARCHIVE_INDEX if not others and _is_archive(snapshot) and ARCHIVE not in snapshot.files else None


def _is_archive(snapshot: Snapshot) -> bool:
    return ARCHIVE in snapshot.files or ARCHIVE_INDEX in snapshot.files


def _shares_an_embedding(tensor: Tensor, header: Header) -> bool:
    """A head has the bytes of an input embedding: an archive keeps tied matrices once."""
    return any(
        other.begin == tensor.begin and other.end == tensor.end and _first({name}, EMBEDDINGS)
        for name, other in header.tensors.items()
        if name != tensor.name
    )


def model_types(config: Mapping[str, Any]) -> list[str]:
    """``model_type`` of config.json and of the language model inside it, the outermost first."""
    return [level["model_type"] for level in _levels(config) if isinstance(level.get("model_type"), str)]


def choose_tensor(names: Iterable[str], config: Mapping[str, Any], warnings: list[str]) -> tuple[str, bool]:
    """Name of the output projection among stored tensors, and whether it is the tied input embedding."""
    stored = set(names)
    head = _first(stored, HEADS) or _only_head(stored)
    embedding = _first(stored, EMBEDDINGS)
    says = _says_tied(config)
    if head:
        if says:
            warnings.append(
                f"{_SAYS_TIED}, but {head} is stored: the stored one was read, "
                "as transformers 5 does (transformers 4 would tie)"
            )
        return head, False
    if instead_of_head := packed(stored, _stems(HEADS)):
        raise _cannot(
            "QuantizedTensor",
            f"its output projection is stored packed or in parts ({instead_of_head})",
            "screen the unquantised model",
        )
    if embedding is None and (instead_of_embedding := packed(stored, _stems(EMBEDDINGS))):
        raise _cannot(
            "QuantizedTensor",
            f"its input embedding is stored packed or in parts ({instead_of_embedding})",
            "screen the unquantised model",
        )
    if embedding is None:
        some = ", ".join(sorted(stored)[:3]) or "none"
        raise _cannot(
            "NoOutputProjection",
            f"none of its {len(stored)} tensors ({some}, …) is a known output projection or input embedding",
            "check that it is a causal language model",
        )
    if says is None:
        says, model_type = _tied_by_default(config)
        if model_type is None:
            warnings.append(
                f"config.json is silent on tied embeddings and no head is stored; read {embedding}"
            )
    if not says:
        raise _cannot(
            "NoOutputProjection",
            f"config.json says that embeddings are not tied, but beside {embedding} no head is stored",
            "it may be a base model without a head, or an incomplete upload",
        )
    return embedding, True


_SAYS_TIED = "config.json says that embeddings are tied"


def _first(stored: set[str], candidates: tuple[str, ...]) -> str | None:
    return next((w + name for name in candidates for w in WRAPPERS if w + name in stored), None)


def _stems(names: tuple[str, ...]) -> list[str]:
    return [w + name.removesuffix("weight") for name in names for w in WRAPPERS]


def _only_head(stored: set[str]) -> str | None:
    """A head under an unknown wrapper, if there is exactly one."""
    heads = [
        name
        for name in stored
        if name.endswith(".lm_head.weight")
        and not any(word in name for word in NOT_THE_MODEL)
        and not any(part.isdigit() for part in name.split("."))
    ]
    return heads[0] if len(heads) == 1 else None


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    """Ties by config.json; the outermost level that says anything decides. None if it is silent."""
    for level in _levels(config):
        # OLMo as first released says it in a word of its own, and its class looks at no other.
        for key in ("weight_tying", "tie_word_embeddings"):
            value = level.get(key)
            if isinstance(value, bool):
                return value
    return None


def _tied_by_default(config: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Ties by the architecture when config.json is silent, and the architecture; None if unknown."""
    types = model_types(config)
    if not types:
        return True, None
    return not any(name in UNTIED_BY_DEFAULT for name in types), types[0]


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = [config.get(key) for key in ("text_config", "language_config", "llm_config", "thinker_config")]
    return [config, *(level for level in inner if isinstance(level, dict))]


async def _only_file(snapshot: Snapshot, warnings: list[str]) -> str:
    """The file that holds everything, where no index is used."""
    files = [path for path in snapshot.files if path.endswith(".safetensors") and "/" not in path]
    weights = [path for path in files if not path.startswith("adapter_")]
    if SINGLE in weights:
        if INDEX in snapshot.files:
            warnings.append(f"both {SINGLE} and {INDEX} are stored: {SINGLE} was read, as transformers does")
        return SINGLE
    if len(weights) == 1:
        warnings.append(f"{SINGLE} is not stored; {weights[0]}, the only safetensors file, was read")
        return weights[0]
    if weights:
        raise _cannot(
            "NoSafetensors",
            f"it has {len(weights)} safetensors files but no {INDEX}",
            "the upload may be incomplete",
        )
    if not files and ARCHIVE in snapshot.files:
        if ARCHIVE_INDEX in snapshot.files:
            warnings.append(f"both {ARCHIVE} and {ARCHIVE_INDEX} are stored: {ARCHIVE} was read")
        return ARCHIVE
    raise await no_weights_error(snapshot)


def _is_whole(
    snapshot: Snapshot, config: Mapping[str, Any], offsets: tuple[int, ...] | None, shape: tuple[int, int]
) -> bool:
    """A tensor of a distributed checkpoint is stored whole, by config.json's sizes."""
    alone = len(slice_files(snapshot.files)) <= 1
    sizes = _sizes(config)
    return alone and offsets == (0, 0) and sizes is not None and shape[0] >= sizes[0] and shape[1] == sizes[1]


def _sizes(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and width of the output projection, as config.json states them."""
    sizes = [
        (level["vocab_size"], level["hidden_size"])
        for level in _levels(config)
        if type(level.get("vocab_size")) is int and type(level.get("hidden_size")) is int
    ]
    return sizes[0] if sizes else None


def _weight_map(snapshot: Snapshot, index: Mapping[str, Any], name: str) -> Mapping[str, str]:
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise ScreeningError(
            "BadIndex", f"{name} of {snapshot.repo} has no weight_map of names; ask for another revision"
        )
    return shards


def _shard(snapshot: Snapshot, name: str, file: str, index_name: str) -> str:
    suffix = ".safetensors" if index_name == INDEX else ".bin"
    if "/" in file or "\\" in file or file not in snapshot.files or not file.endswith(suffix):
        raise ScreeningError(
            "BadIndex",
            f"{index_name} of {snapshot.repo} says that {name} is in {file!r}, which is not among its files; "
            "the upload may be incomplete",
        )
    return file


async def _parameters(
    files: WeightFiles, index: Mapping[str, Any], shards: set[str], bits: int
) -> int | None:
    """Parameters where the Hub does not count them.

    By every header in a folder, where they cost nothing; else by the index, whose ``total_size`` is of bytes:
    all matrices are taken to have as many bits an element as the output projection.
    """
    metadata = index.get("metadata")
    total = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    if type(total) is int and total > 0:
        return total
    if files.snapshot.cache is not None or not all(shard in files.snapshot.files for shard in shards):
        size: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
        known = isinstance(size, (int, float)) and not isinstance(size, bool) and 0 < size < 2**62
        return int(size) * 8 // bits if known else None
    return sum([(await files.header(shard)).parameters for shard in sorted(shards)])


def _shape(tensor: Tensor) -> tuple[int, int]:
    """Rows and width of weights that can be read row by row."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise _cannot(
            "NoOutputProjection",
            f"{tensor.name} has shape {tensor.shape}, expected (v, d)",
            "check what the repository is",
        )
    return tensor.shape[0], tensor.shape[1]


def _size_warnings(config: Mapping[str, Any], v: int) -> list[str]:
    sizes = [level["vocab_size"] for level in _levels(config) if type(level.get("vocab_size")) is int]
    if sizes and v < sizes[0]:
        return [f"config.json says vocab_size {sizes[0]}, but only {v} rows are stored"]
    return []


async def _json(snapshot: Snapshot, path: str, code: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(await snapshot.small_file(path))
    except (ValueError, RecursionError) as error:
        raise ScreeningError(
            code, f"{path} of {snapshot.repo} is not valid JSON ({error}); ask for another revision"
        ) from error
    if not isinstance(fields, dict):
        raise ScreeningError(
            code, f"{path} of {snapshot.repo} is not a JSON object; ask for another revision"
        )
    return fields


def _cannot(code: str, reason: str, step: str) -> ScreeningError:
    return ScreeningError(code, f"cannot be screened because {reason}; {step}")
