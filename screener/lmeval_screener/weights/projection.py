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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.absent import instead, without_weights
from lmeval_screener.weights.architectures import (
    EMBEDDINGS,
    HEADS,
    NOT_THE_MODEL,
    UNTIED_BY_DEFAULT,
    WRAPPERS,
)
from lmeval_screener.weights.element_types import row_bytes
from lmeval_screener.weights.matrices import Matrix, NormPlace, byte_strides
from lmeval_screener.weights.safetensors import (
    DTYPE_BITS,
    FLOAT_DTYPES,
    SCALED_DTYPES,
    Header,
    Tensor,
    read_header,
)
from lmeval_screener.weights.scales import SCALES, Scale, companions, packed, scale_of
from lmeval_screener.weights.slices import Piece, joined, read_slices, slice_files, sliced
from lmeval_screener.weights.torch_archive import locate, read_archive

if TYPE_CHECKING:
    from lmeval_screener.weights.adapters import AdaptedMatrix

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ARCHIVE = "pytorch_model.bin"
ARCHIVE_INDEX = "pytorch_model.bin.index.json"
#: First request of a shard's header: so many bytes per tensor and some, enough for nearly all names.
_PER_TENSOR, _SOME = 140, 2048


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """Where the output projection of a checkpoint is stored.

    Attributes:
        name: Name of the tensor.
        file: The file that holds it.
        dtype: ``F64``, ``F32``, ``F16``, ``BF16``, ``F8_E4M3``, ``F8_E5M2``, or a type of GGUF's.
        shape: (v, d), rows and width. v may exceed the tokenizer's vocabulary: padding.
        tied: Whether it is the input embedding.
        begin: Absolute offset of its first byte in the file.
        parameters: Parameters of the whole checkpoint as stored (tied matrices once); None if not to be known
            without reading every shard.
        warnings: What a reader of the result should know; usually empty.
        strides: Bytes from row to row and from column to column, where rows do not lie end to end.
        scale: Scales that multiply 8-bit floats; None where the stored numbers are the weights.
        pieces: The slices that make it up, where it is stored in slices; the file is then that of the first.
        adapter: What an adapter makes of it, where the checkpoint is one.
        final_norm: Where the final norm is, where the same header said it (GGUF).
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, int]
    tied: bool
    begin: int
    parameters: int | None
    warnings: tuple[str, ...]
    strides: tuple[int, int] | None = None
    scale: Scale | None = None
    pieces: tuple[Piece, ...] | None = None
    adapter: AdaptedMatrix | None = None
    final_norm: NormPlace | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return row_bytes(self.dtype, self.shape[1])

    @property
    def matrix(self) -> Matrix:
        """The stored numbers, without scales."""
        return Matrix(self.name, self.file, self.dtype, self.shape, self.begin, self.strides)


async def find_projection(snapshot: Snapshot) -> OutputProjection:
    """The output projection of a checkpoint.

    Raises:
        ScreeningError: ``NoSafetensors``, ``AdapterOnly``, ``SlicedTensor``, ``QuantizedTensor``,
            ``NoOutputProjection``, ``BadConfig``, ``BadIndex``, ``BadHeader``, or an error of the connection.
            The message of the first five begins "cannot be screened because".
    """
    config = await _json(snapshot, "config.json", "BadConfig") if "config.json" in snapshot.files else {}
    if files := _sliced_files(snapshot):
        return await _joined_slices(snapshot, config, files)
    warnings: list[str] = []
    if beside := [
        path for path in ("adapter_model.safetensors", "adapter_model.bin") if path in snapshot.files
    ]:
        warnings.append(f"{beside[0]} lies beside the weights and was not applied to them")
    index_name = _index(snapshot)
    files_of: Mapping[str, str]
    if index_name is None:
        file = await _only_file(snapshot, warnings)
        contents = await read_contents(snapshot, file)
        files_of = dict.fromkeys(contents.tensors, file)
        name, tied = await _chosen(snapshot, files_of, config, warnings)
        parameters: int | None = snapshot.parameters or contents.parameters
    else:
        index = await _json(snapshot, index_name, "BadIndex")
        files_of = shards = _weight_map(snapshot, index, index_name)
        name, tied = await _chosen(snapshot, shards, config, warnings)
        file = _shard(snapshot, name, shards[name], index_name)
        guess = _SOME + _PER_TENSOR * sum(shard == file for shard in shards.values())
        contents = await read_contents(snapshot, file, guess)
        if name not in contents.tensors:
            raise ScreeningError(
                "BadIndex",
                f"{index_name} of {snapshot.repo} says that {name} is in {file}, which does not hold it: the "
                "index is stale; ask for another revision",
            )
        bits = DTYPE_BITS[contents.tensors[name].dtype]
        parameters = snapshot.parameters or await _parameters(snapshot, index, set(shards.values()), bits)
    tensor = contents.tensors[name]
    scale = await _scale(snapshot, tensor, {**files_of, **dict.fromkeys(contents.tensors, file)}, config)
    v, d = _matrix(tensor)
    if name in contents.slices and not _is_whole(snapshot, config, contents.slices[name], (v, d)):
        raise sliced(name, f"{file} does not hold all of it")
    if not tied and _shares_an_embedding(tensor, contents):
        tied, warnings = True, [text for text in warnings if not text.startswith(_SAYS_TIED)]
    if tensor.entry is not None:
        (tensor,) = await locate(snapshot, file, [tensor])
    warnings += _size_warnings(config, v)
    return OutputProjection(
        name=name,
        file=file,
        dtype=tensor.dtype,
        shape=(v, d),
        tied=tied,
        begin=tensor.begin,
        parameters=parameters,
        warnings=tuple(warnings),
        strides=byte_strides(tensor),
        scale=scale,
    )


async def _joined_slices(snapshot: Snapshot, config: Mapping[str, Any], files: list[str]) -> OutputProjection:
    """The output projection of a distributed checkpoint, from the slices that its files hold."""
    headers = await read_slices(snapshot, files)
    warnings: list[str] = []
    files_of = {name: file for file, header in headers.items() for name in header.tensors}
    name, tied = await _chosen(snapshot, files_of, config, warnings)
    holder = headers[files_of[name]].tensors[name]
    if await _scale(snapshot, holder, files_of, config) is not None:
        raise sliced(name, "it has scales beside it, which may be sliced too")
    _matrix(holder)
    shape, pieces = joined(name, headers, _sizes(config))
    # A slice counts as what it holds, so that the whole counts once.
    parameters = sum(header.parameters for header in headers.values())
    first = pieces[0].matrix
    return OutputProjection(
        name=name,
        file=first.file,
        dtype=first.dtype,
        shape=shape,
        tied=tied,
        begin=first.begin,
        parameters=snapshot.parameters or parameters,
        warnings=tuple(warnings),
        pieces=None if len(pieces) == 1 else pieces,
    )


def _sliced_files(snapshot: Snapshot) -> list[str]:
    """The files of a distributed checkpoint, where nothing says that they are something else."""
    usual = {SINGLE, INDEX} & snapshot.files.keys()
    return [] if usual else slice_files(snapshot.files)


async def _chosen(
    snapshot: Snapshot, files_of: Mapping[str, str], config: Mapping[str, Any], warnings: list[str]
) -> tuple[str, bool]:
    """`choose_tensor`; where the head is packed, the error names what to screen instead."""
    try:
        return choose_tensor(files_of, config, warnings)
    except ScreeningError as error:
        if error.code != "QuantizedTensor":
            raise
        raise await _advised(snapshot, config, str(error)) from error


async def _scale(
    snapshot: Snapshot, tensor: Tensor, files_of: Mapping[str, str], config: Mapping[str, Any]
) -> Scale | None:
    """Scales of a matrix; None where its stored numbers are its weights.

    Raises:
        ScreeningError: ``QuantizedTensor`` where they are neither weights nor 8-bit floats with scales.
    """
    # What is unknown comes first: an error names it.
    beside = sorted(companions(tensor.name, files_of), key=lambda word: word in SCALES)
    stem = tensor.name.removesuffix("weight")
    quantization = config.get("quantization_config")
    how: str | Scale | None = None
    if tensor.dtype not in FLOAT_DTYPES:
        how = f"as {tensor.dtype}" + (f" with {stem}{beside[0]} beside it" if beside else "")
    elif (
        len(beside) == 1 and beside[0] in SCALES and tensor.dtype in SCALED_DTYPES and len(tensor.shape) == 2
    ):
        name = stem + beside[0]
        file = files_of[name]
        found = (await read_contents(snapshot, file)).tensors.get(name) if file in snapshot.files else None
        if found is None:
            how = f"as {tensor.dtype} with {name} beside it, which is not in {file}"
        else:
            if found.entry is not None:
                (found,) = await locate(snapshot, file, [found])
            how = scale_of(tensor, found, file, quantization)
    elif beside:
        how = f"as {tensor.dtype} with {stem}{beside[0]} beside it"
    elif tensor.dtype in SCALED_DTYPES and quantization:
        how = f"as {tensor.dtype} without the scales that config.json's quantization_config announces"
    if isinstance(how, str):
        sentence = f"cannot be screened because {tensor.name} is stored {how}"
        raise await _advised(snapshot, config, f"{sentence}; screen the unquantised model")
    return how


async def _advised(snapshot: Snapshot, config: Mapping[str, Any], sentence: str) -> ScreeningError:
    """The error of a packed matrix, with what to screen in place of it."""
    reason, _, step = sentence.partition("; ")
    return ScreeningError("QuantizedTensor", f"{reason}; {await instead(snapshot, config) or step}")


async def read_contents(snapshot: Snapshot, file: str, guess: int = 65_536) -> Header:
    """The tensors of a file of weights, safetensors or an archive of ``torch.save``.

    Raises:
        ScreeningError: ``BadHeader``, ``BadArchive``, ``LegacyPickle``, ``UnsafePickle``, or an error of the
            connection.
    """
    if not file.endswith(".bin"):
        return await read_header(snapshot, file, guess)
    stored = await read_archive(snapshot, file)
    return Header(
        {
            name: Tensor(name, t.dtype, t.shape, t.begin, t.end, t.strides, t.entry)
            for name, t in stored.items()
        }
    )


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


def _shares_an_embedding(tensor: Tensor, contents: Header) -> bool:
    """Whether a head's bytes are those of an input embedding: an archive keeps tied matrices once."""
    return any(
        other.begin == tensor.begin and other.end == tensor.end and _first({name}, EMBEDDINGS)
        for name, other in contents.tensors.items()
        if name != tensor.name
    )


async def layout(snapshot: Snapshot) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """config.json (empty without one), and the file of every stored tensor by the tensor's name.

    Raises:
        ScreeningError: As `find_projection`.
    """
    config = await _json(snapshot, "config.json", "BadConfig") if "config.json" in snapshot.files else {}
    if files := _sliced_files(snapshot):
        headers = await read_slices(snapshot, files)
        return config, {name: file for file, header in headers.items() for name in header.tensors}
    index_name = _index(snapshot)
    if index_name is None:
        file = await _only_file(snapshot, [])
        return config, dict.fromkeys((await read_contents(snapshot, file)).tensors, file)
    shards = _weight_map(snapshot, await _json(snapshot, index_name, "BadIndex"), index_name)
    return config, {name: file for name, file in shards.items() if file in snapshot.files}


def model_types(config: Mapping[str, Any]) -> list[str]:
    """``model_type`` of config.json and of the language model inside it, the outermost first."""
    return [level["model_type"] for level in _levels(config) if isinstance(level.get("model_type"), str)]


def choose_tensor(names: Iterable[str], config: Mapping[str, Any], warnings: list[str]) -> tuple[str, bool]:
    """Name of the output projection among stored tensors, and whether it is the tied input embedding.

    Args:
        names: Names of all stored tensors.
        config: config.json, maybe empty.
        warnings: What a reader should know is appended here.

    Raises:
        ScreeningError: ``NoOutputProjection`` if there is none, or config.json contradicts what is stored;
            ``QuantizedTensor`` if only a packed one is stored.
    """
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
    """A head under a wrapper that nobody has met yet, if there is exactly one."""
    found = [
        name
        for name in stored
        if name.endswith(".lm_head.weight")
        and not any(word in name for word in NOT_THE_MODEL)
        and not any(part.isdigit() for part in name.split("."))
    ]
    return found[0] if len(found) == 1 else None


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    """What config.json says; the outermost level that says anything decides. None if it is silent."""
    for level in _levels(config):
        # OLMo as first released says it in a word of its own, and its class looks at no other.
        for key in ("weight_tying", "tie_word_embeddings"):
            value = level.get(key)
            if isinstance(value, bool):
                return value
    return None


def _tied_by_default(config: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Whether the architecture ties when config.json is silent, and the architecture; None if unknown."""
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
    raise await without_weights(snapshot)


def _is_whole(
    snapshot: Snapshot, config: Mapping[str, Any], offsets: tuple[int, ...] | None, shape: tuple[int, int]
) -> bool:
    """Whether what a distributed checkpoint stored under a tensor's name is all of it, by config.json."""
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
    snapshot: Snapshot, index: Mapping[str, Any], shards: set[str], bits: int
) -> int | None:
    """Parameters where the Hub does not count them.

    By every header in a folder, where they cost nothing; else by the index, whose ``total_size`` is of bytes:
    all matrices are taken to have as many bits an element as the output projection.
    """
    metadata = index.get("metadata")
    total = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    if type(total) is int and total > 0:
        return total
    if snapshot.cache is not None or not all(shard in snapshot.files for shard in shards):
        size: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
        known = isinstance(size, (int, float)) and not isinstance(size, bool) and 0 < size < 2**62
        return int(size) * 8 // bits if known else None
    headers = [await read_contents(snapshot, shard) for shard in sorted(shards)]
    return sum(contents.parameters for contents in headers)


def _matrix(tensor: Tensor) -> tuple[int, int]:
    """Rows and width, if these are weights that can be read row by row."""
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
