"""PEFT adapters: which of them change the output projection, and the rows of the merged model.

An adapter names its base in ``adapter_config.json`` and stores its own tensors under the names of
the modules it changes (``base_model.model.lm_head.lora_A.weight``). Most change neither the output
projection nor an input embedding tied to it: then every row is the base's. Otherwise row ``i`` of
the merged model is

- LoRA: ``W_i + s · B_i A`` with ``s = α / r``, or ``α / √r`` if rank-stabilised; the factors of an
  embedding are stored transposed;
- DoRA on a linear layer: the same times ``m_i / ‖W_i + s · B_i A‖``;
- ``modules_to_save``, and resized embeddings: the stored row instead of the base's;
- ``trainable_token_indices``: stored rows for some tokens.

Sources: peft 0.21, ``tuners/lora/layer.py``, ``variants.py``, ``dora.py``,
``tuners/trainable_tokens/layer.py``, ``utils/save_and_load.py``; LoRA, arXiv 2106.09685; rsLoRA,
2312.03732; DoRA, 2402.09353.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import count
from lmeval_screener.checkpoints.snapshot import Snapshot
from lmeval_screener.errors import BaseError, ScreeningError, cannot
from lmeval_screener.formats import ADAPTERS, own_weights
from lmeval_screener.targets.names import label
from lmeval_screener.weights.adapters.names import PREFIX, BaseModules, module_of, words_of
from lmeval_screener.weights.adapters.patterns import UnknownPattern, first_match
from lmeval_screener.weights.architectures import (
    EMBEDDINGS,
    FINAL_NORMS,
    HEADS,
    WRAPPERS,
    is_of_model,
)
from lmeval_screener.weights.body import SAME_ROWS
from lmeval_screener.weights.model_files import read_json
from lmeval_screener.weights.projection import OutputProjection, StoredNorm, find_projection
from lmeval_screener.weights.rows import Matrix, Rows, WeightFiles
from lmeval_screener.weights.tensors import FLOAT_DTYPES, Tensor

CONFIG = "adapter_config.json"
#: Names of modules whose tensors are read, by their endings.
_PART = re.compile(
    r"(?:modules_to_save\.)?(?:"
    r"lora_(?P<linear>A|B)(?:\.\w+)?\.weight|lora_embedding_(?P<embedding>A|B)(?:\.\w+)?|"
    r"(?P<magnitude>lora_magnitude_vector)(?:\.\w+)*|"
    r"(?:token_adapter\.)?(?P<tokens>trainable_tokens_delta)(?:\.\w+)?|"
    r"(?P<base>base_layer\.weight)|(?P<weight>weight))"
)
#: Initialisations that leave the base's weights unchanged; others subtract from them.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
#: Methods that stand before or around the model, and change no module of it.
_BEFORE_THE_MODEL = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "CPT",
    "CARTRIDGE",
    "ADAPTION_PROMPT",
)
#: Settings that mean a method other than LoRA or DoRA.
_OTHER_METHODS = (
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "megatron_config",
    "layer_replication",
    "fan_in_fan_out",
)


def _modules(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(f"{w}{name.removesuffix('.weight')}" for name in names for w in WRAPPERS)


_HEADS = _modules(HEADS)
_EMBEDDINGS = _modules(EMBEDDINGS)
_NORMS = _modules(FINAL_NORMS)
#: Last words of embeddings' names, without those of other modules.
_EMBEDDING_WORDS = {m.rpartition(".")[2] for m in _EMBEDDINGS} - {"embeddings", "embedding"}
#: PEFT's own words in the names of a low-rank change, A or B.
_FACTOR = re.compile(r"\.lora_(?:embedding_)?(A|B)(?:\.\w+)?(?:\.weight)?$")
_SHOWN = 120  # characters of a name in a sentence
_CHECK_BASE = "check that its base is the model on which it was trained, or save the adapter again"
_CHUNK = 65_536  # rows of a factor that are looked at in one read


@dataclass(frozen=True, slots=True)
class _Update:
    """A low-rank change of a matrix."""

    a: Matrix  # (r, d); of an embedding, whose factors are stored transposed, (r, v)
    b: Matrix  # (v, r); of an embedding (d, r)
    scaling: float
    embedding: bool
    magnitude: Matrix | None = None  # DoRA's length of every row, (v, 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix that it changes."""
        v, _ = self.b.shape
        _, d = self.a.shape
        if self.embedding:
            return d, v
        return v, d

    async def applied(self, rows: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
        """Rows (n, d) of these numbers plus ``scaling · B A``, rescaled to DoRA's lengths if it has any."""
        rank = range(self.a.shape[0])
        if self.embedding:
            size = len(rank) * self.a.row_bytes
            self.a.refuse_scattered(size, "with a column for each token", "for any of them")
            columns = await self.a.read(rank)
            left = columns[:, list(ids)].T
            rows_of_b = await self.b.read(range(self.b.shape[0]))
            right = rows_of_b.T
        else:
            left = await self.b.read(ids)
            right = await self.a.read(rank)
        product = left.astype(np.float64) @ right.astype(np.float64)
        changed = rows + self.scaling * product
        if self.magnitude is not None:
            lengths = np.linalg.norm(changed, axis=1, keepdims=True)
            changed *= await self.magnitude.read(ids) / lengths
        result: NDArray[np.float32] = changed.astype(np.float32)
        return result


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows of an output projection after an adapter has been merged into its base.

    Attributes:
        base: The base's rows, or the whole matrix that the adapter stores instead.
        updates: The low-rank changes of the matrix.
        tokens: Token ids of single rows that the adapter stores (``trainable_token_indices``).
        token_rows: The rows of ``tokens``, in the same order; None if there are none.
    """

    base: Rows
    updates: tuple[_Update, ...]
    tokens: tuple[int, ...] = ()
    token_rows: Matrix | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and their width."""
        return self.base.shape

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Read rows of the merged model by their numbers, which are token ids; see `Rows.read`."""
        rows = await self.base.read(ids)
        for update in self.updates:
            rows = await update.applied(rows, ids)
        here = np.flatnonzero(np.isin(ids, self.tokens))
        if self.token_rows is not None and len(here):
            stored = [self.tokens.index(token) for token in np.asarray(ids)[here].tolist()]
            asked, place = np.unique(stored, return_inverse=True)
            own_rows = await self.token_rows.read(asked.tolist())
            rows = rows.copy()
            rows[here] = own_rows[place]
        return rows


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter: its settings, its tensors, and the name of the base that it changes.

    Attributes:
        files: The weights files in the adapter's folder.
        file: The file that holds the adapter's tensors.
        base: Name or path of the base, from ``adapter_config.json``; may be empty if ``has_base``.
        revision: The base's revision; None if it is not stated.
        settings: The content of ``adapter_config.json``.
        tensors: All tensors of the adapter by name.
        modules: The tensors that change heads, embeddings and final norms, by module and by role:
            ``["lm_head"]["A"]`` is the factor A of a LoRA on the head.
        nothing: Why the adapter changes nothing, such as ``its lora_alpha is 0``; empty if it
            changes something, or if that cannot be seen from its files.
        has_base: Whether the base's weights lie in the same folder, where transformers loads both.
    """

    files: WeightFiles
    file: str
    base: str
    revision: str | None
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    modules: Mapping[str, Mapping[str, Tensor]]
    nothing: str = ""
    has_base: bool = False

    @property
    def label(self) -> str:
        """The base's name, followed by ``@REVISION`` if a revision is stated.

        For a base in the adapter's own folder, the text is ``next to it``.
        """
        if self.has_base:
            return "next to it"
        return label(self.base, self.revision)

    @property
    def leaves_head(self) -> bool:
        """Whether the adapter certainly keeps the output projection and the final norm of its base.

        This is judged by the names of the adapter's tensors and by ``nothing``. The answer is False
        for an adapter that changes the input embedding, to which its base may tie the projection.
        """
        return not self.modules or bool(self.nothing)

    def unread_error(self, why: str) -> ScreeningError:
        """Return the error for a change of the output projection that is not supported.

        Args:
            why: The reason, as a continuation of "it is an adapter that".
        """
        return self.broken_error(
            why,
            f"merge it into its base {self.label} (merge_and_unload, save_pretrained) and screen "
            "the merged model",
        )

    def broken_error(self, why: str, step: str = "") -> ScreeningError:
        """Return the error for an adapter whose files are broken, so that it cannot be merged.

        Args:
            why: The reason, as a continuation of "it is an adapter that".
            step: What to do about it, as an imperative. If empty, the message says to save the
                adapter again.
        """
        return cannot(
            "AdapterOnly",
            f"it is an adapter ({self.settings.get('peft_type', 'of unknown type')}) that {why}",
            step or "save it again with PEFT's save_pretrained",
        )


def is_adapter(snapshot: Snapshot) -> bool:
    """Whether a folder holds an adapter without a whole model.

    Files such as ``training_args.bin``, which a trainer leaves there, do not count as a model.
    """
    return holds_adapter(snapshot) and not own_weights(snapshot.files)


def holds_adapter(snapshot: Snapshot) -> bool:
    """Whether a folder holds an adapter, with or without a whole model next to it."""
    files = snapshot.files
    return CONFIG in files and any(name in files for name in ADAPTERS)


def holds_both(snapshot: Snapshot) -> bool:
    """Whether a folder holds both an adapter and the whole model to which transformers applies it.

    Such a folder also holds config.json. ``from_pretrained(FOLDER)`` of transformers 5 loads the
    weights in the folder and applies the adapter to them (5.24, ``maybe_load_adapters``). Given a
    repository on the Hub, it loads the base that the adapter names instead.

    Raises:
        ScreeningError: ``AdapterOnly``: the adapter's weights are missing or pickled, so that
            transformers 5 does not load the folder.
    """
    files = snapshot.files
    if CONFIG not in files or "config.json" not in files or not own_weights(files):
        return False
    if not any(name.startswith("adapter_model") for name in files):
        raise ScreeningError(
            "AdapterOnly",
            f"{CONFIG} lies next to the weights, and {ADAPTERS[0]} does not: transformers 5 loads such a "
            f"folder only without {CONFIG}; remove that file, or add the adapter's weights",
        )
    if ADAPTERS[0] not in files and ADAPTERS[1] in files:
        raise ScreeningError(
            "AdapterOnly",
            f"{ADAPTERS[1]} lies next to the weights, where transformers 5 opens only "
            f"{ADAPTERS[0]} and fails; save the adapter again with PEFT's save_pretrained, or move "
            f"{ADAPTERS[1]} and {CONFIG} to a folder of their own",
        )
    return holds_adapter(snapshot)


async def read_adapter(snapshot: Snapshot, *, has_base: bool = False) -> Adapter:
    """Read an adapter's settings, and locate its tensors.

    Args:
        snapshot: The adapter's folder or repository.
        has_base: Whether the weights in the same folder are its base, even if it names another.

    Raises:
        ScreeningError: The adapter names no base (``BadConfig``); its tensors are missing, empty or
            broken; or, with ``has_base``, it is of a kind that transformers does not apply to the
            weights next to it.
    """
    settings = await read_json(snapshot, CONFIG, "BadConfig")
    base = _text(settings, "base_model_name_or_path")
    if not base and not has_base:
        raise ScreeningError(
            "BadConfig",
            f"{CONFIG} of {snapshot.repo} does not name the base of the adapter "
            "(base_model_name_or_path); write the base's name into the file, or merge the adapter "
            "into the base",
        )
    revision = _text(settings, "revision") or None
    files = WeightFiles(snapshot)
    file = next(name for name in ADAPTERS if name in snapshot.files)
    tensors = (await files.header(file)).tensors
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place = _split(name)
        if place is not None:
            module, part = place
            modules.setdefault(module, {})[part] = tensor
    adapter = Adapter(files, file, base, revision, settings, tensors, modules, has_base=has_base)
    if not tensors:
        raise adapter.broken_error(f"stores no tensors in {file}")
    empty = [name for name, tensor in tensors.items() if 0 in tensor.shape]
    if empty:
        first = min(empty)[:_SHOWN]
        raise ScreeningError(
            "AdapterOnly",
            f"{file} holds empty tensors ({len(empty)} of {len(tensors)}, such as {first}): it was "
            "saved under DeepSpeed's ZeRO-3 without gathering, and PEFT does not load it; save the "
            "adapter with stage3_gather_16bit_weights_on_model_save, or make it from the output of "
            "zero_to_fp32.py",
        )
    if has_base and settings.get("peft_type") in _BEFORE_THE_MODEL:
        raise ScreeningError(
            "AdapterOnly",
            f"an adapter ({settings['peft_type']}) lies next to the weights, and transformers 5 does not apply "
            "this kind to them; move the adapter to a folder of its own",
        )
    return replace(adapter, nothing=await _nothing(adapter))


def _text(settings: Mapping[str, Any], key: str) -> str:
    """A setting if it is a text, else an empty one."""
    value = settings.get(key)
    if not isinstance(value, str):
        return ""
    return value


async def adapted_projection(adapter: Adapter, base: Snapshot) -> OutputProjection:
    """Return the output projection of the model that results from merging an adapter into its base.

    Args:
        adapter: The adapter.
        base: The files of its base.

    Raises:
        BaseError: The base cannot be read.
        ScreeningError: None of the adapter's tensors fits the base, or its change of the output
            projection is broken or not supported.
    """
    try:
        projection = await find_projection(base)
    except ScreeningError as error:
        where = "" if adapter.has_base else f"its base {adapter.label}: "
        raise BaseError(error.code, f"{where}{error}") from error
    warnings = list(projection.warnings)
    adapter, left_out = _fitting(adapter, projection)
    if adapter.has_base:
        warnings.append(
            f"{adapter.file} is applied to the weights next to it, as transformers 5 does if peft is "
            f"installed; transformers 4 applies it to {adapter.base or 'the base that it names'}"
        )
    elif own_weights(adapter.files.snapshot.files):
        warnings.append(
            f"the weights next to {adapter.file} were not read: given a repository, transformers 5 "
            f"loads the base that the adapter names ({adapter.label}) instead"
        )
    if left_out:
        warnings.append(left_out)
    if adapter.nothing:
        warnings.append(f"the adapter changes nothing: {adapter.nothing}")
    parts = _parts_of_head(adapter, tied=projection.tied)
    projection = replace(projection, norm=_norm(adapter, projection.norm))
    rows = await _adapted_rows(adapter, parts, projection.rows) if any(parts.values()) else None
    if rows is None or adapter.nothing:
        if not adapter.has_base:
            warnings.append(
                f"{SAME_ROWS}{adapter.label}: the screen cannot rank one above the other"
            )
        return replace(projection, warnings=tuple(warnings))
    if any(update.embedding for update in rows.updates):
        warnings.append(
            f"the adapter changes the input embedding, which {adapter.label} ties to its head: the rows are "
            "those of the merged model; before merging, the head does not have that change"
        )
    return replace(projection, file=adapter.file, rows=rows, warnings=tuple(warnings))


def _fitting(adapter: Adapter, projection: OutputProjection) -> tuple[Adapter, str]:
    """The adapter without modules that its base lacks, and a note on its tensors that fit nothing, if any."""
    base = BaseModules(projection.stored, projection.types, forgiving=adapter.has_base)
    unplaced = [name for name in adapter.tensors if not base.fits(name)]
    if not unplaced:
        return adapter, ""
    of_modules = list(filter(module_of, adapter.tensors))
    if len(unplaced) == len(of_modules) and not adapter.has_base:
        raise _unplaced_error(adapter, base)
    lacking = set(unplaced)
    modules: dict[str, dict[str, Tensor]] = {}
    for module, parts in adapter.modules.items():
        for part, tensor in parts.items():
            if tensor.name not in lacking:
                modules.setdefault(module, {})[part] = tensor
    note = (
        f"the base has no module for {len(unplaced)} of the adapter's {len(adapter.tensors)} tensors "
        f"(first: {min(unplaced)[:_SHOWN]}), and PEFT leaves such tensors out"
    )
    return replace(adapter, modules=modules), note


def _unplaced_error(adapter: Adapter, base: BaseModules) -> ScreeningError:
    """The error for an adapter of which PEFT loads nothing; a race refuses it in the same words."""
    # By name the last one that changes a module: not a tensor of the whole adapter.
    modules = [module_of(name) for name in sorted(adapter.tensors)]
    named = next(filter(None, reversed(modules)), "")[:_SHOWN]
    how = base.mistake(adapter.tensors)
    step = (
        "write the base on which it was trained into adapter_config.json, or save the adapter again"
    )
    return ScreeningError(
        "AdapterOnly",
        f"none of the adapter's {len(adapter.tensors)} tensors belongs to a module of its base "
        f"{adapter.label}: the adapter names {named}, the base has {base.example()}; {how or step}",
    )


def _parts_of_head(adapter: Adapter, *, tied: bool) -> dict[str, dict[str, Tensor]]:
    """Tensors of the head, and of an embedding tied to it, by module, as far as they change its rows."""
    heads = list(filter(_is_head, adapter.modules))
    embeddings = list(filter(_is_embedding, adapter.modules))
    if len(heads) > 1 or len(embeddings) > 1:
        raise adapter.unread_error(
            f"changes {count(len(heads), 'output projection')} and "
            f"{count(len(embeddings), 'input embedding')}, where at most one of each is supported"
        )
    # transformers never merges an adapter next to the weights: a tied head lacks the embedding's change.
    changed_too = embeddings if tied and not adapter.has_base else []
    parts = {module: dict(adapter.modules[module]) for module in (*heads, *changed_too)}
    for module in changed_too:
        if heads or _of_module(adapter.settings.get("modules_to_save"), module):
            # PEFT trains a copy of a saved embedding: the head keeps the base's rows.
            parts[module].pop("weight", None)
    return parts


async def _nothing(adapter: Adapter) -> str:
    """Why an adapter changes nothing: alpha is 0, or in a local file a factor of every product is zero."""
    settings = adapter.settings
    is_lora = settings.get("peft_type") == "LORA"
    if not is_lora or settings.get("init_lora_weights", True) not in _PLAIN_STARTS:
        return ""
    factors: dict[str, dict[str, str]] = {}
    for name in adapter.tensors:
        match = _FACTOR.search(name[-_SHOWN:])
        if match is not None:
            factors.setdefault(module_of(name), {})[match[1]] = name
        elif not name.endswith(".base_layer.weight"):
            return ""
    if settings.get("lora_alpha") == 0 and not settings.get("alpha_pattern"):
        return "its lora_alpha is 0"
    if not adapter.files.snapshot.is_local:
        return ""
    for pair in factors.values():
        # An embedding's A begins as zeros, any other module's B.
        for name in pair.values():
            if await _is_zero(adapter, name):
                break
        else:
            return ""
    return "a factor of each LoRA (usually lora_B) is zero, as before training" if factors else ""


async def _is_zero(adapter: Adapter, name: str) -> bool:
    """Whether every number of a tensor is zero; the first that is not ends the reading."""
    tensor = adapter.tensors[name]
    if tensor.dtype not in FLOAT_DTYPES:
        return False
    matrix = await adapter.files.matrix(adapter.file, tensor, narrow=True)
    rows = range(matrix.shape[0])
    for begin in range(0, len(rows), _CHUNK):
        chunk = await matrix.read(rows[begin : begin + _CHUNK])
        if chunk.any():
            return False
    return True


async def _adapted_rows(
    adapter: Adapter, parts: Mapping[str, Mapping[str, Tensor]], base: Rows
) -> AdaptedRows:
    """The base's rows as changed by the tensors of a head, or of an embedding tied to it."""
    settings = adapter.settings
    start = settings.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise adapter.unread_error(
            f"was initialised with init_lora_weights={start!r}, which changes the base's weights"
        )
    for name in _OTHER_METHODS:
        if settings.get(name):
            raise adapter.unread_error(f"sets {name} in {CONFIG}, which is not supported")
    whole: list[Matrix] = []
    updates: list[_Update] = []
    tokens: list[tuple[tuple[int, ...], Matrix]] = []
    for module, tensors in parts.items():
        place = await _located(adapter, module, tensors)
        whole += [place[part] for part in ("base", "weight") if part in place]
        if {"A", "B", "EA", "EB"} & place.keys():
            updates.append(_update(adapter, module, place))
        if "tokens" in place:
            tokens.append((_token_ids(adapter, module, place["tokens"]), place["tokens"]))
    if len(updates) > 1 and settings.get("ensure_weight_tying"):
        # One change under both names: the trained model has it once (peft 0.21 merges it twice).
        updates = updates[:1]
    if len(tokens) > 1 and tokens[0][0] == tokens[1][0]:
        tokens = tokens[:1]
    if len(tokens) > 1 or (tokens and updates):
        ways = "with different trainable_token_indices"
        if updates:
            ways = "both by LoRA and by trainable_token_indices"
        raise adapter.unread_error(f"changes {' and '.join(parts)} {ways}, which is not supported")
    rows = AdaptedRows(whole[0] if whole else base, tuple(updates))
    if tokens:
        ids, token_rows = tokens[0]
        rows = replace(rows, tokens=ids, token_rows=token_rows)
    v, d = rows.shape
    for update in updates:
        magnitude = update.magnitude
        if magnitude is not None and magnitude.shape != (v, 1):
            stored, width = magnitude.shape
            raise adapter.broken_error(
                f"stores DoRA magnitudes of shape {stored} × {width}, where {v} × 1 is expected",
                _CHECK_BASE,
            )
        if update.shape != (v, d):
            factors = f"{update.shape[0]} × {update.shape[1]}"
            raise adapter.broken_error(
                f"has factors for a matrix of {factors}, where the matrix of its base is {v} × {d}",
                _CHECK_BASE,
            )
    new = rows.token_rows
    if d != base.shape[1] or (new and (new.shape[1] != d or max(rows.tokens, default=0) >= v)):
        raise adapter.broken_error(
            f"stores rows that do not fit the matrix of its base ({v} × {base.shape[1]})",
            _CHECK_BASE,
        )
    return rows


def _norm(adapter: Adapter, norm: StoredNorm) -> StoredNorm:
    """The final norm of a merged model: the base's, with the adapter's weight if it stores one."""
    stored: list[str] = []
    for module, tensors in adapter.modules.items():
        if module in _NORMS:
            stored += [tensor.name for tensor in tensors.values()]
    if not stored or norm.reason:
        return norm
    if len(stored) != 1 or not stored[0].endswith(".weight"):
        return replace(norm, reason="the adapter's change of the final norm is not supported")
    return replace(norm, files=adapter.files, name=stored[0], holders=(adapter.file,))


def _split(name: str) -> tuple[str, str] | None:
    """Module and part of a tensor of a head, an embedding or a final norm; None for all others."""
    words = words_of(name.removeprefix(PREFIX))
    module = ""
    for place, word in enumerate(words[:-1]):
        if word.isdigit():
            return None  # inside a layer
        module = f"{module}.{word}" if place else word
        if _is_head(module) or _is_embedding(module) or module in _NORMS:
            return module, _part(".".join(words[place + 1 :]))
    return None


def _part(rest: str) -> str:
    """What a tensor is to its module, by its name after the module's."""
    match = _PART.fullmatch(rest)
    if match is None:
        return rest
    if match["linear"] or match["embedding"]:
        return match["linear"] or f"E{match['embedding']}"
    return str(match.lastgroup)


def _is_head(module: str) -> bool:
    return is_of_model(module) and (module in _HEADS or module.endswith(".lm_head"))


def _is_embedding(module: str) -> bool:
    is_known = module in _EMBEDDINGS or module.rpartition(".")[2] in _EMBEDDING_WORDS
    return is_of_model(module) and is_known


def _of_module(stated: Any, module: str) -> Any:
    """The item of a setting that matches the end of a module's name: a list's name, a mapping's value."""
    for name in stated if isinstance(stated, list | dict) else ():
        if isinstance(name, str) and f".{module}".endswith(f".{name}"):
            return stated[name] if isinstance(stated, dict) else name
    return None


async def _located(
    adapter: Adapter, module: str, tensors: Mapping[str, Tensor]
) -> dict[str, Matrix]:
    located = {}
    for part, tensor in tensors.items():
        if part not in ("A", "B", "EA", "EB", "magnitude", "base", "weight", "tokens"):
            raise adapter.unread_error(f"stores {module}.{part}, which is not supported")
        flat = len(tensor.shape) != 2 and part != "magnitude"
        if tensor.dtype not in FLOAT_DTYPES or 0 in tensor.shape or flat:
            raise adapter.broken_error(
                f"stores {tensor.name} as {tensor.dtype} of shape {tensor.shape}, where a matrix of "
                "floats is expected"
            )
        narrow = part in ("B", "magnitude")
        located[part] = await adapter.files.matrix(adapter.file, tensor, narrow=narrow)
    return located


def _update(adapter: Adapter, module: str, place: Mapping[str, Matrix]) -> _Update:
    settings = adapter.settings
    if settings.get("peft_type") != "LORA":
        raise adapter.unread_error(f"changes {module} by a method that is not supported")
    factors = sorted({"A", "B", "EA", "EB"} & place.keys())
    embedding = factors == ["EA", "EB"]
    if factors != ["A", "B"] and not embedding:
        raise adapter.broken_error(f"lacks one of the two factors of {module} (LoRA's A and B)")
    a = place[factors[0]]
    b = place[factors[1]]
    magnitude = place.get("magnitude")
    use = settings.get("use_dora")
    if (magnitude is not None) != bool(use):
        raise adapter.broken_error(
            f"has use_dora={bool(use)}, which contradicts the tensors that it stores for {module}",
            f"correct use_dora in {CONFIG}, or save the adapter again",
        )
    if magnitude is not None and embedding:
        raise adapter.unread_error(
            f"applies DoRA to the embedding {module}, so that every row depends on all other rows"
        )
    rank = a.shape[0]
    alpha = _setting(adapter, "lora_alpha", 8, "alpha_pattern", module)
    if b.shape[1] != rank:
        raise adapter.broken_error(
            f"has factors of ranks {rank} and {b.shape[1]} for {module}, where equal ranks are "
            "expected"
        )
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise adapter.broken_error(
            f"has lora_alpha {json.dumps(alpha)} for {module}, where a finite number is expected",
            f"correct lora_alpha in {CONFIG}, or save the adapter again",
        )
    stated = _setting(adapter, "r", rank, "rank_pattern", module)
    if stated != rank:
        raise adapter.broken_error(
            f"has factors of rank {rank} for {module}, where {CONFIG} says r={json.dumps(stated)}, "
            "so that PEFT cannot load the adapter",
            f"correct r (or rank_pattern) in {CONFIG}, or save the adapter again",
        )
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    scaling = alpha / divisor
    return _Update(a, b, scaling, embedding, magnitude)


def _setting(adapter: Adapter, key: str, default: Any, patterns: str, module: str) -> Any:
    """A module's alpha or rank, by PEFT's patterns for the ends of names."""
    values = adapter.settings.get(patterns)
    if isinstance(values, dict):
        try:
            match = first_match(values, module)
        except UnknownPattern as error:
            raise adapter.unread_error(
                f"has the pattern {str(error)[:_SHOWN]!r} in its {patterns}, which is not supported"
            ) from error
        if match is not None:
            return values[match]
    return adapter.settings.get(key, default)


def _token_ids(adapter: Adapter, module: str, matrix: Matrix) -> tuple[int, ...]:
    settings = adapter.settings
    stated = settings.get("trainable_token_indices", settings.get("token_indices"))
    if isinstance(stated, dict):
        stated = _of_module(stated, module)
    natural = isinstance(stated, list) and all(type(i) is int and i >= 0 for i in stated)
    if not natural or len(set(stated)) != len(stated) or len(stated) != matrix.shape[0]:
        raise adapter.broken_error(
            f"stores {count(matrix.shape[0], 'row')} for {module}, but not a token id of its own "
            "for each row (trainable_token_indices)",
            f"correct trainable_token_indices in {CONFIG}, or save the adapter again",
        )
    return tuple(stated)
