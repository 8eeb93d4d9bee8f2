"""The output projection of a checkpoint in transformers' layout, and the final norm in front of it.

The files are those that `model_files` chooses, as transformers does. The tensor is chosen by its name
(`architectures`).

A softmax sees ``row · (γ ∘ x)``, with the normed state x and the final norm's weight γ: the effect of a
token's row is ``γ ∘ row``. A scale that moves between γ and the rows changes no prediction.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_screener.budgets import CONFIG, bounded_yaml, parsed
from lmeval_screener.checkpoints.concurrency import side_by_side
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import (
    ADAPTERS,
    ARCHIVE,
    SAFETENSORS,
    TRANSFORMERS,
    UNREAD,
    is_training_state,
)
from lmeval_screener.targets.layouts import layout_of
from lmeval_screener.weights import architectures as names
from lmeval_screener.weights.model_files import ModelFiles, bad_index, model_files, read_json
from lmeval_screener.weights.names import (
    Shape,
    notes_on,
    refuse_names,
    refuse_part,
    refuse_placeholders,
)
from lmeval_screener.weights.rows import (
    Rows,
    ScaledRows,
    WeightFiles,
    pieced,
    scaled,
    sliced_error,
)
from lmeval_screener.weights.tensors import DTYPE_BITS, FLOAT_DTYPES, SCALED_DTYPES, Header, Tensor

#: First request of a shard's header, in bytes per tensor and in all: enough for nearly all names.
_PER_TENSOR, _SOME = 140, 2048
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """The final norm in front of the output projection, as far as it is known.

    Attributes:
        name: Name of the tensor; None if the architecture's norm has no weight, or is unknown.
        weight: γ, shape (d,), float64, ones if the norm has no weight; None if unknown.
        kind: ``rms``, or ``layer``: its normed state sums to 0, so a constant along the width changes no
            prediction; None if unknown.
        reason: Why the weight or the kind is unknown; empty if both are known.
    """

    name: str | None = None
    weight: NDArray[np.float64] | None = None
    kind: names.NormKind | None = None
    reason: str = ""

    def effective(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """The part of rows (n, d) that a softmax sees, float64; ValueError if the norm is not known."""
        if self.weight is None:
            raise ValueError(f"expected a known final norm: {self.reason}")
        seen = rows.astype(np.float64) * self.weight
        return seen - seen.mean(axis=1, keepdims=True) if self.kind == "layer" else seen


@dataclass(frozen=True, eq=False)
class StoredNorm:
    """Location of a checkpoint's final norm weight."""

    files: WeightFiles
    name: str | None = None  # name of the tensor; None if the norm has no weight
    holders: Sequence[str] = ()  # the files that hold it: one, or one for each slice
    kind: names.NormKind = "rms"
    plus_one: bool = False  # whether the norm multiplies by 1 + weight
    guess: int = 16_384  # bytes of the first request for a holder's header
    reason: str = ""  # why the location is unknown

    async def read(self, width: int) -> FinalNorm:
        """Read the final norm for rows with ``width`` columns; ``reason`` says why it is unknown."""
        if self.reason:
            return FinalNorm(reason=self.reason)
        if self.name is None:
            return FinalNorm(None, np.ones(width), self.kind)
        weight = np.full(width, np.nan)
        for file in self.holders:
            header = await self.files.header(file, self.guess)
            tensor = header.tensors.get(self.name)
            if tensor is None:
                return FinalNorm(reason=f"{self.name} is not in {file}")
            offsets = header.slices.get(self.name) or (0,)
            end = offsets[0] + tensor.elements
            other = len(self.holders) == 1 and tensor.elements != width
            vector = len(tensor.shape) == len(offsets) == 1 and tensor.strides in (None, (1,))
            if tensor.dtype not in FLOAT_DTYPES or not vector or end > width or other:
                stored = f"{tensor.dtype} of shape {tensor.shape}"
                return FinalNorm(reason=f"{self.name} is {stored}, expected {width} numbers")
            row = replace(await self.files.matrix(file, tensor), shape=(1, tensor.elements))
            weight[offsets[0] : end] = (await row.read([0]))[0]
        weight += self.plus_one
        if not np.isfinite(weight).all() or not weight.any():
            return FinalNorm(reason=f"{self.name} is zero or not finite")
        return FinalNorm(self.name, weight, self.kind)


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """A checkpoint's output projection.

    Attributes:
        name: Name of the tensor.
        file: The file that holds it, or its first slice.
        dtype: ``F64``, ``F32``, ``F16``, ``BF16``, ``F8_E4M3``, ``F8_E5M2``, or a type of GGUF's.
        rows: Reads its rows.
        tied: Whether it is the input embedding.
        parameters: Number in the whole checkpoint as stored (tied matrices once); None if unknown.
        warnings: Warnings for a reader of the result; usually empty.
        norm: The final norm before it.
        files: The model's weights files.
        stored: Names of all tensors of the checkpoint; empty if they were not collected.
        types: Its ``model_type``, and that of the language model inside it; empty likewise.
    """

    name: str
    file: str
    dtype: str
    rows: Rows
    tied: bool
    parameters: int | None
    warnings: tuple[str, ...]
    norm: StoredNorm
    files: tuple[str, ...] = ()
    stored: frozenset[str] = frozenset()
    types: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(v, d), rows and width. v may exceed the tokenizer's vocabulary: padding."""
        return self.rows.shape


async def read_rows_and_norm(
    projection: OutputProjection, ids: Sequence[int]
) -> tuple[NDArray[np.float32], FinalNorm]:
    """Read rows of the output projection, as `read_rows`, and the final norm before it, concurrently."""
    rows, norm = await side_by_side(
        [read_rows(projection, ids), projection.norm.read(projection.shape[1])]
    )
    return rows, norm


async def read_rows(projection: OutputProjection, ids: Sequence[int]) -> NDArray[np.float32]:
    """Read rows of the output projection.

    Returns:
        Array of shape (len(ids), d) in the order of `ids`: the stored numbers exactly; GGUF's quantised
        blocks and 8-bit floats with scales, dequantised; an adapter's rows as merged, in float32.

    Raises:
        ScreeningError: ``BadRows``: rows outside the matrix, zero, not finite, or all parallel.
    """

    def refuse(bad: Iterable[int], state: str, why: str) -> None:
        numbers = [str(i) for i in bad]
        shown = ", ".join(numbers[:8]) + (", …" if len(numbers) > 8 else "")
        if numbers:
            reason = f"rows {shown} of {projection.name} {state}: {why}"
            raise names.cannot("BadRows", reason, "screen another checkpoint")

    v = projection.shape[0]
    outside = sorted({i for i in ids if not 0 <= i < v})
    refuse(outside, f"are outside its {v} rows", "the checkpoint's vocabulary is too short")
    wanted, place = np.unique(np.asarray(ids, dtype=int), return_inverse=True)
    matrix = await projection.rows.read(wanted.tolist())
    finite = np.isfinite(matrix).all(axis=1)
    refuse(wanted[~finite], "hold NaN or Inf", "the checkpoint is damaged")
    refuse(wanted[~matrix.any(axis=1)], "are zero", "these tokens were never trained")
    if len(wanted) > 1 and _of_one_direction(matrix[:2]) and _of_one_direction(matrix):
        refuse(wanted, "all point the same way", "the matrix was never trained, or is damaged")
    rows: NDArray[np.float32] = matrix[place]
    return rows


def _of_one_direction(rows: NDArray[np.float32]) -> bool:
    """Whether all rows point the same way, up to float32's rounding."""
    units = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return bool(np.abs(units - units[0]).max() < 1e-6)


async def find_projection(snapshot: Snapshot) -> OutputProjection:
    """Find the output projection in transformers' layout; ScreeningError if it is missing or unreadable."""
    config, chosen = await side_by_side(
        [read_json(snapshot, "config.json", "BadConfig"), model_files(snapshot)]
    )
    try:
        return await _find(snapshot, config, chosen)
    except ScreeningError as error:
        if error.code != "QuantizedTensor" or not (base := await _base_model(snapshot)):
            raise
        raise ScreeningError(
            error.code, f"{str(error).partition('; ')[0]}; screen {base}"
        ) from error


async def _find(
    snapshot: Snapshot, config: Mapping[str, Any], chosen: ModelFiles
) -> OutputProjection:
    files = WeightFiles(snapshot)
    warnings = _adapter_notes(snapshot)
    holders = chosen.holders
    shapes: dict[str, Shape] = dict.fromkeys(holders)
    parameters = snapshot.parameters
    if chosen.kind is None:
        await _refuse_unreadable(snapshot, chosen)
        warnings += chosen.notes
        stored_parameters = await _take_headers(files, chosen, holders, shapes)
        parameters = parameters or stored_parameters
    is_mlx = await _refuse_names(files, holders, shapes, config)
    name, tied = _chosen(holders, config, warnings)
    header, tensor = await _header_with(name, files, chosen, holders)
    if chosen.kind is not None:
        refuse_placeholders({stored: part.shape for stored, part in header.tensors.items()})
        parameters = parameters or await _parameters(files, chosen.index, holders, tensor)
    rows = await _whole_rows(tensor, header, files, chosen, holders, config)
    if not chosen.sliced and not header.slices:
        refuse_part(name, rows.shape, config)
        embedding = names.stored_name(shapes, names.EMBEDDINGS)
        if embedding is not None:
            refuse_part(embedding, shapes[embedding] or (), config, more_rows=not tied)
    if not tied and _shares_an_embedding(tensor, header):
        tied = True
        warnings = [text for text in warnings if not text.startswith(names.SAYS_TIED)]
    warnings += _few_rows(rows, config)
    warnings += names.head_bias(holders)
    warnings += notes_on(holders, config)
    norm = _find_norm(files, holders, config)
    is_mlx = is_mlx or header.writer == names.MLX
    if is_mlx and norm.plus_one and names.model_types(config)[-1] in names.WHOLE_IN_MLX:
        norm = replace(norm, plus_one=False)
        warnings.append(
            f"converted by mlx_lm, which stores 1 + {norm.name}: read as mlx_lm loads it, "
            "not as transformers"
        )
    return OutputProjection(
        name,
        holders[name][0],
        tensor.dtype,
        rows,
        tied,
        parameters,
        tuple(warnings),
        norm,
        files=chosen.paths,
        stored=frozenset(holders),
        types=tuple(names.model_types(config)),
    )


def _adapter_notes(snapshot: Snapshot) -> list[str]:
    """A note on an adapter next to the weights that no program loads."""
    adapters = [path for path in ADAPTERS if path in snapshot.files]
    if adapters and "adapter_config.json" not in snapshot.files:
        return [f"{adapters[0]} has no adapter_config.json: no program puts it on the weights"]
    return []


async def _take_headers(
    files: WeightFiles,
    chosen: ModelFiles,
    holders: dict[str, list[str]],
    shapes: dict[str, Shape],
) -> int:
    """Add the tensors of files without an index to ``holders`` and ``shapes``.

    Returns the number of parameters.
    """
    headers = await side_by_side(files.header(path) for path in chosen.paths)
    for file, header in zip(chosen.paths, headers, strict=True):
        for stored, tensor in header.tensors.items():
            holders.setdefault(stored, []).append(file)
            shapes[stored] = tensor.shape
    # A slice counts its own elements, so that the whole counts once.
    return sum(header.parameters for header in headers)


async def _header_with(
    name: str, files: WeightFiles, chosen: ModelFiles, holders: Mapping[str, Sequence[str]]
) -> tuple[Header, Tensor]:
    """The header of the file that holds the matrix, and the matrix in it.

    Raises:
        ScreeningError: The index names a file that is not there, or that does not hold the matrix.
    """
    snapshot = files.snapshot
    sharded = chosen.kind
    index = sharded.index if sharded else None
    file = holders[name][0]
    if sharded:
        is_there = "/" not in file and file in snapshot.files
        if not is_there or not file.endswith(sharded.suffix):
            raise bad_index(
                snapshot, index, f"says that {name} is in {file!r}, which does not exist"
            )
    header = await files.header(file, _header_bytes(holders, file))
    tensor = header.tensors.get(name)
    if tensor is None:
        raise bad_index(
            snapshot, index, f"says that {name} is in {file}, which does not contain it"
        )
    return header, tensor


async def _whole_rows(
    tensor: Tensor,
    header: Header,
    files: WeightFiles,
    chosen: ModelFiles,
    holders: Mapping[str, Sequence[str]],
    config: Mapping[str, Any],
) -> Rows:
    """The matrix' rows, put together where it is stored in slices."""
    name = tensor.name
    # The index may omit tensors next to the matrix.
    here = {stored: [holders[name][0]] for stored in header.tensors}
    rows = await _rows(files, tensor, {**here, **holders}, config)
    if not chosen.sliced and name not in header.slices:
        return rows
    if chosen.sliced and isinstance(rows, ScaledRows):
        raise sliced_error(name, "it has separate scales, which may be sliced too")
    pieces = []
    for path in holders[name]:
        part = await files.header(path)
        pieces.append((await files.matrix(path, part.tensors[name]), part))
    whole = pieced(name, pieces, _sizes(config))
    return whole if len(pieces) > 1 else rows


def _few_rows(rows: Rows, config: Mapping[str, Any]) -> list[str]:
    """A note where fewer rows are stored than config.json's vocabulary has."""
    for level in names.levels(config):
        size = level.get("vocab_size")
        if type(size) is int:
            if rows.shape[0] < size:
                stored = rows.shape[0]
                return [f"config.json says vocab_size {size}, but only {stored} rows are stored"]
            break
    return []


async def _rows(
    files: WeightFiles,
    tensor: Tensor,
    holders: Mapping[str, Sequence[str]],
    config: Mapping[str, Any],
) -> Rows:
    """Rows of a stored matrix, with its separate scales, if any."""
    companions = names.companions(tensor.name, holders)
    stem = tensor.name.removesuffix("weight")
    quantization = config.get("quantization_config")
    how = f"as {tensor.dtype}" + (f" with {stem}{companions[0]} next to it" if companions else "")
    if tensor.dtype in FLOAT_DTYPES:
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            reason = f"{tensor.name} has shape {tensor.shape}, expected (v, d)"
            raise names.cannot(
                "NoOutputProjection", reason, "check that it is a causal language model"
            )
        rows = await files.matrix(holders[tensor.name][0], tensor)
        is_code = tensor.dtype in SCALED_DTYPES
        if not companions and not (is_code and quantization):
            return rows
        if not companions:
            how += " without the scales of config.json's quantization_config"
        elif is_code and len(companions) == 1 and companions[0] in names.SCALES:
            name = stem + companions[0]
            file = holders[name][0]
            scale = (
                (await files.header(file)).tensors.get(name)
                if file in files.snapshot.files
                else None
            )
            if scale is None:
                how += f", which is not in {file}"
            elif made := scaled(rows, await files.matrix(file, scale, narrow=True), quantization):
                return made
            else:
                how += f", {scale.dtype} of shape {scale.shape}, blocks of no known size"
    raise names.cannot(
        "QuantizedTensor", f"{tensor.name} is stored {how}", "screen the unquantised model"
    )


def _chosen(
    holders: Mapping[str, Sequence[str]], config: Mapping[str, Any], warnings: list[str]
) -> tuple[str, bool]:
    """As `choose_tensor`; the error of a model that was trained for another head says so."""
    try:
        return names.choose_tensor(holders, config, warnings)
    except ScreeningError as error:
        notes = notes_on(holders, config)
        if not notes:
            raise
        raise ScreeningError(error.code, f"{error} ({notes[0]})") from error


async def _refuse_names(
    files: WeightFiles,
    holders: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
) -> bool:
    """Refuse names that no loader has; whether mlx_lm wrote them, as far as the headers read say."""
    is_mlx = any(header.writer == names.MLX for header in files.read_headers())
    try:
        refuse_names(shapes, config, by_transformers=not is_mlx)
    except ScreeningError:
        shards = [shard for (shard, *_) in holders.values() if shard in files.snapshot.files]
        if is_mlx or not shards or (await files.header(shards[0])).writer != names.MLX:
            raise
        is_mlx = True
        refuse_names(shapes, config, by_transformers=False)
    return is_mlx


async def _refuse_unreadable(snapshot: Snapshot, chosen: ModelFiles) -> None:
    """Raise ScreeningError for files without an index that are not one whole, nor its slices."""
    if not chosen.paths:
        raise await no_weights_error(snapshot)
    if len(chosen.paths) > 1 and not chosen.sliced:
        if known := layout_of(chosen.paths, snapshot.repo, is_local=snapshot.is_local):
            code, reason, step = known
            raise names.cannot(code, reason, step)
        reason = f"it has {len(chosen.paths)} safetensors files but no {SAFETENSORS.index}"
        if not snapshot.is_local:
            step = "the upload may be incomplete"
        elif any("-of-" in path for path in chosen.paths):
            step = snapshot.next_step
        else:
            step = f"name the one that you mean, such as {snapshot.repo}/{chosen.paths[0]}"
        raise names.cannot("NoSafetensors", reason, step)


def _header_bytes(holders: Mapping[str, Sequence[str]], file: str) -> int:
    """The estimated size of a shard's header, by the number of its tensors."""
    return _SOME + _PER_TENSOR * sum(files[0] == file for files in holders.values())


def _shares_an_embedding(tensor: Tensor, header: Header) -> bool:
    """Whether a head has the bytes of an input embedding: an archive keeps tied matrices once."""
    place = tensor.begin, tensor.end
    others = [
        t.name for t in header.tensors.values() if (t.begin, t.end) == place and t is not tensor
    ]
    return names.stored_name(others, names.EMBEDDINGS) is not None


def _sizes(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and width of the output projection, from config.json."""
    stated = [(level.get("vocab_size"), level.get("hidden_size")) for level in names.levels(config)]
    return next(((v, d) for v, d in stated if type(v) is type(d) is int), None)


async def _parameters(
    files: WeightFiles, index: Mapping[str, Any], holders: Mapping[str, Sequence[str]], head: Tensor
) -> int | None:
    """Parameters if the Hub does not count them.

    By every header of a local folder, where they cost nothing; else by the index's ``total_size`` in bytes:
    all matrices are assumed to have the output projection's element type.
    """
    stated = index.get("metadata")
    metadata = stated if isinstance(stated, dict) else {}
    total, size = metadata.get("total_parameters"), metadata.get("total_size")
    if type(total) is int and total > 0:
        return total
    shards = sorted({file for (file,) in holders.values()})
    if files.snapshot.is_local and all(shard in files.snapshot.files for shard in shards):
        return sum([(await files.header(shard)).parameters for shard in shards])
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < 2**62:
        return None
    return int(size) * 8 // DTYPE_BITS[head.dtype]


def _find_norm(
    files: WeightFiles, holders: Mapping[str, Sequence[str]], config: Mapping[str, Any]
) -> StoredNorm:
    """The final norm of a checkpoint in transformers' layout: its location, and how it is applied."""
    types = names.model_types(config)
    if not types:
        reason = "config.json has no model_type, which says how the final norm is applied"
        return StoredNorm(files, reason=reason)
    norm = names.norm_of_type(types[-1], config)
    if norm is None:
        if types[-1] in names.TABLES["post_norm"]:
            return StoredNorm(files, reason=f"{types[-1]} has no final norm")
        return StoredNorm(files, reason=f"the norm of {types[-1]} is not known")
    kind, plus_one, has_weight = norm
    if not has_weight:
        return StoredNorm(files, kind=kind)
    name = names.stored_name(holders, names.FINAL_NORMS)
    if name is None:
        return StoredNorm(files, reason="no final norm with a known name is stored")
    held = [file for file in holders[name] if file in files.snapshot.files]
    if not held:
        return StoredNorm(files, reason=f"{name} is not in {holders[name][0]}")
    if kind == "rms" and (bias := name.removesuffix("weight") + "bias") in holders:
        return StoredNorm(
            files, reason=f"{bias} is stored, and the norm of {types[-1]} has no bias"
        )
    return StoredNorm(files, name, held, kind, plus_one, _header_bytes(holders, held[0]))


async def no_weights_error(snapshot: Snapshot) -> ScreeningError:
    """The error for a checkpoint without a model's own weights; it names the files that exist.

    The base model comes from ``adapter_config.json`` or from ``base_model`` in the README, if given.
    """
    files = sorted(snapshot.files)
    if known := layout_of(snapshot.names_around(), snapshot.repo, is_local=snapshot.is_local):
        code, reason, step = known
        return names.cannot(code, reason, step)
    base, usual = (
        await _base_model(snapshot) or "its base model",
        [kind.single for kind in TRANSFORMERS],
    )
    if "adapter_config.json" in files or any(path.startswith("adapter_model.") for path in files):
        step = f"merge it into its base model, or screen {base}"
        return names.cannot("AdapterOnly", "it holds only an adapter", step)
    if paths := [
        p for p in files if p.endswith((ARCHIVE.suffix, *UNREAD)) and not is_training_state(p)
    ]:
        return names.cannot(
            "NoSafetensors",
            f"its weights are stored only as {_listed(paths)}, where {' or '.join(usual)} is expected",
            f"{_elsewhere(snapshot)}save it with save_pretrained",
        )
    if stopped := layout_of(snapshot.names_around(), snapshot.repo, "stopped"):
        code, reason, step = stopped
        return names.cannot(code, reason, step)
    if paths := [path for path in files if "/" in path and path.endswith(SAFETENSORS.suffix)]:
        folder = paths[0].rpartition("/")[0]
        return names.cannot(
            "NoSafetensors",
            f"its safetensors are in subfolders ({_listed(paths)})",
            f"download one (`hf download {snapshot.repo} --include '{folder}/*'`) and screen that folder",
        )
    return names.cannot("NoSafetensors", "it holds no weights", f"check the name, or screen {base}")


def _elsewhere(snapshot: Snapshot) -> str:
    """Where the Hub may have the same weights in safetensors; empty for other places."""
    return "look for a revision in safetensors (often refs/pr/N), or " if snapshot.revision else ""


async def _base_model(snapshot: Snapshot) -> str | None:
    """``ORG/NAME, which its … names``, by ``adapter_config.json`` or the metadata at the top of a README."""
    import yaml

    name: Any = None
    for path, key in (
        ("adapter_config.json", "base_model_name_or_path"),
        ("README.md", "base_model"),
    ):
        # A broken file costs only the hint.
        with contextlib.suppress(
            ScreeningError, yaml.YAMLError, ValueError, TypeError, AttributeError
        ):
            body = await snapshot.small_file(path) if path in snapshot.files else b""
            head = body[3:].partition(b"\n---")[0] if body.startswith(b"---") else b""
            name = (parsed(body, CONFIG) if path.endswith(".json") else bounded_yaml(head)).get(key)
            name = name[0] if isinstance(name, list) and name else name
            if isinstance(name, str) and _REPO.fullmatch(name) and name != snapshot.repo:
                return f"{name}, which its {path} names"
    return None


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")
