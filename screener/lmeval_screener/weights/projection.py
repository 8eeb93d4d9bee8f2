"""The output projection of a checkpoint in transformers' layout, and the final norm in front of it.

The files are those that `model_files` chooses, as transformers does. The tensor is chosen by its
name (`architectures`).

A softmax sees ``row · (γ ∘ x)``, with the normed state x and the final norm's weight γ: the effect
of a token's row is ``γ ∘ row``. A scale that moves between γ and the rows changes no prediction.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.report.declared import some
from lmeval_screener.budgets import bounded_yaml
from lmeval_screener.checkpoints.concurrency import side_by_side
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import ScreeningError, cannot
from lmeval_screener.formats import (
    ADAPTERS,
    ARCHIVE,
    SAFETENSORS,
    TRANSFORMERS,
    UNREAD,
    is_training_state,
)
from lmeval_screener.targets.layouts import layout_of
from lmeval_screener.weights import architectures
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
_PER_TENSOR = 140
_LEAST_HEADER = 2048
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: Where a checkpoint names its base: file -> key.
_NAMES_OF_BASES = {"adapter_config.json": "base_model_name_or_path", "README.md": "base_model"}


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """The final norm in front of the output projection, as far as it is known.

    Attributes:
        name: Name of the tensor that stores the weight; None if the norm has no weight, or is not
            known.
        weight: The norm's weight γ, float64 of shape (d,); ones if the norm has no weight; None if
            it is not known.
        kind: ``rms`` or ``layer``; None if it is not known. After a layer norm the state sums to 0,
            so adding a constant to all numbers of ``γ ∘ row`` changes no logit.
        reason: Why the weight or the kind is not known; empty if both are known.
    """

    name: str | None = None
    weight: NDArray[np.float64] | None = None
    kind: architectures.NormKind | None = None
    reason: str = ""

    def effective(self, rows: NDArray[Any]) -> NDArray[np.float64]:
        """Return the part of the rows on which predictions depend.

        Args:
            rows: Rows of the output projection, shape (n, d).

        Returns:
            ``γ ∘ row`` for each row, float64 of shape (n, d). For a layer norm, the mean along the
            width is subtracted.

        Raises:
            ValueError: ``weight`` is None.
        """
        if self.weight is None:
            raise ValueError(f"expected a known final norm, got none: {self.reason}")
        seen = rows.astype(np.float64) * self.weight
        if self.kind == "layer":
            seen -= seen.mean(axis=1, keepdims=True)
        return seen


@dataclass(frozen=True, eq=False)
class StoredNorm:
    """Where a checkpoint stores the weight of its final norm.

    Attributes:
        files: The checkpoint's weights files.
        name: Name of the tensor; None if the norm has no weight.
        holders: The files that hold the tensor: one, or one for each of its slices.
        kind: ``rms`` or ``layer``.
        plus_one: Whether the norm multiplies by 1 + the weight.
        guess: Size in bytes of the first request for the header of a file in ``holders``.
        reason: Why the place is not known; empty if it is known.
    """

    files: WeightFiles
    name: str | None = None
    holders: Sequence[str] = ()
    kind: architectures.NormKind = "rms"
    plus_one: bool = False
    guess: int = 16_384
    reason: str = ""

    async def read(self, width: int) -> FinalNorm:
        """Read the final norm in front of rows with ``width`` columns.

        If the weight cannot be used, the ``reason`` of the result says why.

        Raises:
            ScreeningError: A file that holds the weight is missing or broken.
        """
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
            begin, *others = header.slices.get(self.name) or (0,)
            end = begin + tensor.elements
            is_part = len(self.holders) > 1
            fits = end <= width and (is_part or tensor.elements == width)
            is_vector = len(tensor.shape) == 1 and not others and tensor.strides in (None, (1,))
            if tensor.dtype not in FLOAT_DTYPES or not is_vector or not fits:
                stored = f"{tensor.dtype} of shape {tensor.shape}"
                return FinalNorm(
                    reason=f"{self.name} is {stored}, where {width} floating-point numbers are "
                    "expected"
                )
            row = replace(await self.files.matrix(file, tensor), shape=(1, tensor.elements))
            weight[begin:end] = (await row.read([0]))[0]
        weight += self.plus_one
        if not np.isfinite(weight).all() or not weight.any():
            return FinalNorm(reason=f"{self.name} is zero or not finite")
        return FinalNorm(self.name, weight, self.kind)


@dataclass(frozen=True, slots=True)
class OutputProjection:
    """A checkpoint's output projection.

    Attributes:
        name: Name of the tensor.
        file: The file that holds the tensor, or its first slice.
        dtype: ``F64``, ``F32``, ``F16``, ``BF16``, ``F8_E4M3``, ``F8_E5M2``, or a type of GGUF.
        rows: The matrix, of which single rows can be read.
        tied: Whether the tensor is the input embedding.
        parameters: Number of parameters in the whole checkpoint as stored, where tied matrices
            count once; None if unknown.
        warnings: Sentences for readers of the result; usually empty.
        norm: Where the final norm in front of the output projection is stored.
        files: Paths of the model's weights files; empty if they were not collected.
        stored: Names of all tensors in the checkpoint; empty if they were not collected.
        types: The ``model_type`` of config.json, followed by that of a nested language model, if
            any; empty if unknown.
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
        """Number of rows and width, (v, d); padding may make v exceed the vocabulary's size."""
        return self.rows.shape


async def read_rows_and_norm(
    projection: OutputProjection, ids: Sequence[int]
) -> tuple[NDArray[np.float32], FinalNorm]:
    """Read rows of the output projection and, at the same time, the final norm in front of it.

    Args:
        projection: The output projection.
        ids: Numbers of the rows, which are token ids.

    Returns:
        The rows as `read_rows` returns them, float32 of shape (len(ids), d), and the final norm.

    Raises:
        ScreeningError: The rows cannot be used (see `read_rows`), or a file that holds the norm's
            weight is missing or broken.
    """
    _, width = projection.shape
    rows, norm = await side_by_side(
        [
            read_rows(projection, ids),
            projection.norm.read(width),
        ]
    )
    return rows, norm


async def read_rows(projection: OutputProjection, ids: Sequence[int]) -> NDArray[np.float32]:
    """Read rows of the output projection.

    Args:
        projection: The output projection.
        ids: Numbers of the rows, which are token ids.

    Returns:
        float32 array of shape (len(ids), d), in the order of ``ids``. The stored numbers are
        returned exactly, except for F64; GGUF's quantised blocks and scaled 8-bit floats are
        dequantised. The rows of an adapter are those of the merged model.

    Raises:
        ScreeningError: ``BadRows``: rows are outside the matrix, zero or not finite, or all point
            the same way.
    """

    def refuse(bad: Iterable[int], fault: str, why: str) -> None:
        numbers = [str(i) for i in bad]
        if not numbers:
            return
        shown = ", ".join(numbers[:8])
        if len(numbers) > 8:
            shown += ", …"
        tokens = "token id" if len(numbers) == 1 else "token ids"
        reason = f"{projection.name} {fault} ({tokens} {shown}): {why}"
        raise cannot("BadRows", reason, "screen another checkpoint")

    v, _ = projection.shape
    numbers = np.asarray(ids, dtype=int)
    wanted, place = np.unique(numbers, return_inverse=True)
    is_outside = (wanted < 0) | (wanted >= v)
    outside = wanted[is_outside]
    refuse(
        outside, f"has only {v} rows, fewer than needed", "the checkpoint's vocabulary is too short"
    )
    matrix = await projection.rows.read(wanted.tolist())
    is_finite = np.isfinite(matrix).all(axis=1)
    refuse(wanted[~is_finite], "has rows that hold NaN or Inf", "the checkpoint is damaged")
    is_zero = ~matrix.any(axis=1)
    refuse(wanted[is_zero], "has rows that are zero", "these tokens were never trained")
    if len(wanted) > 1 and _of_one_direction(matrix[:2]) and _of_one_direction(matrix):
        fault = "has rows that all point the same way"
        refuse(wanted, fault, "the matrix was never trained, or is damaged")
    rows: NDArray[np.float32] = matrix[place]
    return rows


def _of_one_direction(rows: NDArray[np.float32]) -> bool:
    """Whether all rows point the same way, up to float32's rounding."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    units = rows / lengths
    farthest = np.abs(units - units[0]).max()
    return bool(farthest < 1e-6)


async def find_projection(snapshot: Snapshot) -> OutputProjection:
    """Find the output projection of a checkpoint in transformers' layout, without reading rows.

    Raises:
        ScreeningError: The output projection is missing, or stored in a way that cannot be read. If
            it is quantised and the checkpoint names its base model, the message recommends that.
    """
    config, chosen = await side_by_side(
        [
            read_json(snapshot, "config.json", "BadConfig"),
            model_files(snapshot),
        ]
    )
    try:
        return await _Model(snapshot, config, chosen).projection()
    except ScreeningError as error:
        if error.code != "QuantizedTensor":
            raise
        base = await _base_model(snapshot)
        if base is None:
            raise
        reason = str(error).partition("; ")[0]
        raise ScreeningError(error.code, f"{reason}; screen {base}") from error


class _Model:
    """A model in transformers' layout, in which the output projection is looked for.

    Args:
        snapshot: Its files.
        config: config.json; empty without one.
        chosen: Its weights files.
    """

    def __init__(self, snapshot: Snapshot, config: Mapping[str, Any], chosen: ModelFiles) -> None:
        self._snapshot = snapshot
        self._config = config
        self._chosen = chosen
        self._files = WeightFiles(snapshot)
        self._types = architectures.model_types(config)
        self._holders = chosen.holders  # tensor -> the files that hold it
        self._shapes: dict[str, Shape] = dict.fromkeys(self._holders)
        self._is_mlx = False  # whether mlx_lm wrote it, as far as the headers read say
        self._warnings: list[str] = []

    async def projection(self) -> OutputProjection:
        """The output projection; ScreeningError if it is missing or unreadable."""
        snapshot = self._snapshot
        chosen = self._chosen
        self._note_adapter()
        parameters = snapshot.parameters
        if chosen.kind is None:
            await _refuse_unreadable(snapshot, chosen)
            self._warnings += chosen.notes
            stored_parameters = await self._read_headers()
            parameters = parameters or stored_parameters
        await self._refuse_names()
        name, tied = self._choose()
        header, tensor = await self._locate(name)
        if chosen.kind is not None:
            refuse_placeholders({stored: part.shape for stored, part in header.tensors.items()})
            parameters = parameters or await self._count_parameters(tensor)
        rows = await self._whole_rows(tensor, header)
        if not chosen.sliced and not header.slices:
            self._refuse_other_sizes(name, rows.shape, tied)
        if not tied and _shares_an_embedding(tensor, header):
            tied = True
            says_tied = architectures.SAYS_TIED
            self._warnings = [text for text in self._warnings if not text.startswith(says_tied)]
        self._note_few_rows(rows)
        self._warnings += architectures.head_bias(self._holders)
        self._warnings += notes_on(self._holders, self._config)
        norm = self._as_converted(self._find_norm(), header)
        return OutputProjection(
            name,
            self._holders[name][0],
            tensor.dtype,
            rows,
            tied,
            parameters,
            tuple(self._warnings),
            norm,
            files=chosen.paths,
            stored=frozenset(self._holders),
            types=tuple(self._types),
        )

    def _note_adapter(self) -> None:
        """Warn of an adapter next to the weights that no program loads."""
        files = self._snapshot.files
        adapters = [path for path in ADAPTERS if path in files]
        if adapters and "adapter_config.json" not in files:
            self._warnings.append(
                f"{adapters[0]} has no adapter_config.json: no program applies it to the weights"
            )

    async def _read_headers(self) -> int:
        """Read the headers of files without an index; the number of parameters."""
        paths = self._chosen.paths
        headers = await side_by_side(self._files.header(path) for path in paths)
        parameters = 0
        for file, header in zip(paths, headers, strict=True):
            # A slice counts its own elements, so that the whole counts once.
            parameters += header.parameters
            self._is_mlx = self._is_mlx or header.writer == architectures.MLX
            for stored, tensor in header.tensors.items():
                self._holders.setdefault(stored, []).append(file)
                self._shapes[stored] = tensor.shape
        return parameters

    async def _refuse_names(self) -> None:
        """Refuse names that no loader has; those of mlx_lm are its own."""
        try:
            refuse_names(self._shapes, self._config, by_transformers=not self._is_mlx)
        except ScreeningError:
            if self._is_mlx or not self._holders:
                raise
            shard, *_ = next(iter(self._holders.values()))
            header = await self._files.header(shard)
            if header.writer != architectures.MLX:
                raise
            self._is_mlx = True
            refuse_names(self._shapes, self._config, by_transformers=False)

    def _choose(self) -> tuple[str, bool]:
        """As `choose_tensor`; the error of a model that was trained for another head says so."""
        try:
            return architectures.choose_tensor(self._holders, self._config, self._warnings)
        except ScreeningError as error:
            notes = notes_on(self._holders, self._config)
            if not notes:
                raise
            raise ScreeningError(error.code, f"{error} ({notes[0]})") from error

    async def _locate(self, name: str) -> tuple[Header, Tensor]:
        """The header of the file that holds a tensor, and the tensor; or ScreeningError (``BadIndex``)."""
        file = self._holders[name][0]
        header = await self._files.header(file, self._header_bytes(file))
        tensor = header.tensors.get(name)
        if tensor is None:
            kind = self._chosen.kind
            index = kind.index if kind else ""
            reason = f"says that {name} is in {file}, which does not contain it"
            raise bad_index(self._snapshot, index, reason)
        return header, tensor

    def _header_bytes(self, file: str) -> int:
        """The estimated size of a shard's header, by the number of its tensors."""
        tensors = sum(files[0] == file for files in self._holders.values())
        return _LEAST_HEADER + _PER_TENSOR * tensors

    async def _whole_rows(self, tensor: Tensor, header: Header) -> Rows:
        """The matrix' rows, put together where it is stored in slices."""
        name = tensor.name
        rows = await self._rows(tensor, header)
        if not self._chosen.sliced and name not in header.slices:
            return rows
        if self._chosen.sliced and isinstance(rows, ScaledRows):
            raise sliced_error(name, "it has separate scales, which may be sliced too")
        pieces = []
        for path in self._holders[name]:
            part = await self._files.header(path)
            matrix = await self._files.matrix(path, part.tensors[name])
            pieces.append((matrix, part))
        sizes = self._stated("vocab_size", "hidden_size")
        whole = pieced(name, pieces, sizes)
        if len(pieces) == 1:
            return rows
        return whole

    async def _rows(self, tensor: Tensor, header: Header) -> Rows:
        """Rows of a stored matrix, with its separate scales, if any."""
        # An index may omit tensors next to the matrix.
        stored = {*header.tensors, *self._holders}
        companions = architectures.companions(tensor.name, stored)
        stem = tensor.name.removesuffix("weight")
        quantization = self._config.get("quantization_config")
        how = f"as {tensor.dtype}"
        if companions:
            how += f" with {stem}{companions[0]} next to it"
        if tensor.dtype in FLOAT_DTYPES:
            if len(tensor.shape) != 2 or 0 in tensor.shape:
                reason = f"{tensor.name} has shape {tensor.shape}, where a matrix is expected"
                step = "check that it is a causal language model"
                raise cannot("NoOutputProjection", reason, step)
            file = self._holders[tensor.name][0]
            rows = await self._files.matrix(file, tensor)
            is_code = tensor.dtype in SCALED_DTYPES
            if not companions and not (is_code and quantization):
                return rows
            if not companions:
                how += " without the scales that config.json's quantization_config requires"
            elif is_code and len(companions) == 1 and companions[0] in architectures.SCALES:
                name = stem + companions[0]
                file, *_ = self._holders.get(name, [file])
                header = await self._files.header(file)
                scale = header.tensors.get(name)
                if scale is None:
                    how += f", which is not in {file}"
                else:
                    scales = await self._files.matrix(file, scale, narrow=True)
                    with_scales = scaled(rows, scales, quantization)
                    if with_scales is not None:
                        return with_scales
                    how += f" ({scale.dtype} of shape {scale.shape}), whose block size is not known"
        reason = f"{tensor.name} is stored {how}"
        raise cannot("QuantizedTensor", reason, "screen the unquantised model")

    def _refuse_other_sizes(self, name: str, shape: tuple[int, int], tied: bool) -> None:
        """Refuse a matrix, or an input embedding, of other sizes than config.json says."""
        refuse_part(name, shape, self._config)
        embedding = architectures.stored_name(self._shapes, architectures.EMBEDDINGS)
        if embedding is not None:
            stored = self._shapes[embedding] or ()
            refuse_part(embedding, stored, self._config, more_rows=not tied)

    def _note_few_rows(self, rows: Rows) -> None:
        """Warn where fewer rows are stored than config.json's vocabulary has."""
        stored = rows.shape[0]
        sizes = self._stated("vocab_size")
        if sizes and stored < sizes[0]:
            self._warnings.append(
                f"config.json says vocab_size {sizes[0]}, but only {stored} rows are stored"
            )

    def _stated(self, *keys: str) -> tuple[int, ...] | None:
        """The numbers under some keys, at the first level of config.json that has them all."""
        for level in architectures.levels(self._config):
            values: list[Any] = [level.get(key) for key in keys]
            if all(type(value) is int for value in values):
                return tuple(values)
        return None

    async def _count_parameters(self, head: Tensor) -> int | None:
        """Parameters if the Hub does not count them.

        By every header of a local folder, where they cost nothing; else by the index's
        ``total_size`` in bytes: all matrices are assumed to have the output projection's element
        type.
        """
        metadata = self._chosen.index.get("metadata")
        if not isinstance(metadata, dict):
            metadata = {}
        total = metadata.get("total_parameters")
        if type(total) is int and total > 0:
            return total
        if self._snapshot.is_local:
            count = 0
            for shard in self._chosen.paths:
                header = await self._files.header(shard)
                count += header.parameters
            return count
        size: Any = metadata.get("total_size")
        if type(size) not in (int, float) or not 0 < size < 2**62:
            return None
        return int(size) * 8 // DTYPE_BITS[head.dtype]

    def _find_norm(self) -> StoredNorm:
        """The final norm: its location, and how it is applied."""
        files = self._files
        if not self._types:
            reason = "config.json has no model_type, which would say how the final norm is applied"
            return StoredNorm(files, reason=reason)
        kind_of_model = self._types[-1]
        norm = architectures.norm_of_type(kind_of_model, self._config)
        if norm is None:
            reason = f"the final normalisation layer of {kind_of_model} is not known"
            if kind_of_model in architectures.TABLES["post_norm"]:
                reason = f"{kind_of_model} has no final norm"
            return StoredNorm(files, reason=reason)
        kind, plus_one, has_weight = norm
        if not has_weight:
            return StoredNorm(files, kind=kind)
        name = architectures.stored_name(self._holders, architectures.FINAL_NORMS)
        if name is None:
            return StoredNorm(files, reason="no final norm with a known name is stored")
        bias = name.removesuffix("weight") + "bias"
        if kind == "rms" and bias in self._holders:
            reason = f"{bias} is stored, but the final norm of {kind_of_model} has no bias"
            return StoredNorm(files, reason=reason)
        held = self._holders[name]
        return StoredNorm(files, name, held, kind, plus_one, self._header_bytes(held[0]))

    def _as_converted(self, norm: StoredNorm, header: Header) -> StoredNorm:
        """The norm as the files' writer stores it: mlx_lm has added the 1 of some models."""
        is_mlx = self._is_mlx or header.writer == architectures.MLX
        if not is_mlx or not norm.plus_one or self._types[-1] not in architectures.WHOLE_IN_MLX:
            return norm
        self._warnings.append(
            f"the checkpoint was converted by mlx_lm, which stores 1 + the weight in {norm.name}: "
            "the norm was read as mlx_lm loads it, not as transformers does"
        )
        return replace(norm, plus_one=False)


async def _refuse_unreadable(snapshot: Snapshot, chosen: ModelFiles) -> None:
    """Raise ScreeningError for files without an index that are not one whole, nor its slices."""
    paths = chosen.paths
    if not paths:
        raise await no_weights_error(snapshot)
    if len(paths) == 1 or chosen.sliced:
        return
    known = layout_of(paths, snapshot.repo, is_local=snapshot.is_local)
    if known is not None:
        raise cannot(*known)
    step = f"name the one that you mean, such as {snapshot.repo}/{paths[0]}"
    if not snapshot.is_local:
        step = "check whether the upload is complete"
    elif any("-of-" in path for path in paths):
        step = snapshot.next_step
    reason = f"it has {len(paths)} safetensors files but no {SAFETENSORS.index}"
    raise cannot("NoSafetensors", reason, step)


def _shares_an_embedding(tensor: Tensor, header: Header) -> bool:
    """Whether a head has the bytes of an input embedding: an archive keeps tied matrices once."""
    twins = []
    for name, other in header.tensors.items():
        if other is not tensor and (other.begin, other.end) == (tensor.begin, tensor.end):
            twins.append(name)
    return architectures.stored_name(twins, architectures.EMBEDDINGS) is not None


async def no_weights_error(snapshot: Snapshot) -> ScreeningError:
    """Return the error for a checkpoint that has no readable weights.

    The message says what the files are instead, and how to get a checkpoint that can be read. For
    an adapter, and for files without any weights, it recommends the base model that
    ``adapter_config.json`` or the README's ``base_model`` names.
    """
    files = sorted(snapshot.files)
    around = snapshot.names_around()
    known = layout_of(around, snapshot.repo, is_local=snapshot.is_local)
    if known is not None:
        return cannot(*known)
    base = await _base_model(snapshot)
    if "adapter_config.json" in files or any(path.startswith("adapter_model.") for path in files):
        step = f"merge the adapter into its base model, or screen {base or 'that model'}"
        return cannot("AdapterOnly", "it holds only an adapter", step)
    unread = []
    inside = []
    for path in files:
        if path.endswith((ARCHIVE.suffix, *UNREAD)) and not is_training_state(path):
            unread.append(path)
        elif "/" in path and path.endswith(SAFETENSORS.suffix):
            inside.append(path)
    if unread:
        usual = " or ".join(kind.single for kind in TRANSFORMERS)
        step = "save the model with save_pretrained"
        if snapshot.revision:  # of the Hub
            step = f"look for a revision that has safetensors (often refs/pr/N), or {step}"
        reason = f"its weights are stored only as {some(unread, 2)}, where {usual} is expected"
        return cannot("NoSafetensors", reason, step)
    stopped = layout_of(around, snapshot.repo, "stopped")
    if stopped is not None:
        return cannot(*stopped)
    if inside:
        folder = inside[0].rpartition("/")[0]
        step = f"screen one of these folders, such as {snapshot.repo.rstrip('/')}/{folder}"
        if not snapshot.is_local and "://" not in snapshot.repo:  # of the Hub
            step = (
                f"download one of these folders with `hf download {snapshot.repo} --include "
                f"'{folder}/*' --local-dir FOLDER`, and screen FOLDER/{folder}"
            )
        reason = f"its safetensors files are in subfolders ({some(inside, 2)})"
        return cannot("NoSafetensors", reason, step)
    step = "check the name"
    if base is not None:
        step = f"check the name, or screen {base}"
    return cannot("NoSafetensors", "it holds no weights", step)


async def _base_model(snapshot: Snapshot) -> str | None:
    """``ORG/NAME, which its … names``, by ``adapter_config.json`` or the metadata at the top of a README."""
    import yaml

    async def fields_of(path: str) -> Any:
        if path.endswith(".json"):
            return await read_json(snapshot, path, "BadConfig")
        if path not in snapshot.files:
            return {}
        body = await snapshot.small_file(path)
        if not body.startswith(b"---"):
            return {}
        metadata, _, _ = body[3:].partition(b"\n---")
        return bounded_yaml(metadata)

    for path, key in _NAMES_OF_BASES.items():
        # A broken file costs only the hint.
        with contextlib.suppress(
            ScreeningError, yaml.YAMLError, ValueError, TypeError, AttributeError
        ):
            fields = await fields_of(path)
            name = fields.get(key)
            if isinstance(name, list) and name:
                name = name[0]
            if isinstance(name, str) and _REPO.fullmatch(name) and name != snapshot.repo:
                return f"{name}, which its {path} names"
    return None
