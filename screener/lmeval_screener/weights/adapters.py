"""PEFT's adapters: which of them change the output projection, and the rows that they make of a base's.

An adapter names its base in ``adapter_config.json`` and stores its own tensors under the names of the modules
that it changes (``base_model.model.lm_head.lora_A.weight``). Most change neither the output projection nor an
input embedding that is tied to it: then every row is the base's. Else row ``i`` of the merged model is

- LoRA: ``W_i + s · B_i A`` with ``s = α / r``, or ``α / √r`` where rank-stabilised; the factors of an
  embedding are stored transposed;
- DoRA on a linear layer: the same times ``m_i / ‖W_i + s · B_i A‖``;
- ``modules_to_save``, and embeddings that were resized: the stored row in place of the base's;
- ``trainable_token_indices``: stored rows for some tokens.

Sources: peft 0.21, ``tuners/lora/layer.py``, ``variants.py``, ``dora.py``,
``tuners/trainable_tokens/layer.py``, ``utils/save_and_load.py``; LoRA, arXiv 2106.09685; rsLoRA, 2312.03732;
DoRA, 2402.09353.
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

from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.architectures import EMBEDDINGS, FINAL_NORMS, HEADS, NOT_THE_MODEL, WRAPPERS
from lmeval_screener.weights.files import WeightFiles
from lmeval_screener.weights.final_norm import StoredNorm
from lmeval_screener.weights.projection import OutputProjection, find_projection
from lmeval_screener.weights.rows import BRIDGE, Matrix, Rows
from lmeval_screener.weights.tensors import FLOAT_DTYPES, Tensor, row_bytes

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
#: How archives of a model's own weights begin; a training leaves other .bin files beside its adapter.
_ARCHIVES = "pytorch_model"

_PREFIX = "base_model.model."
#: What may stand behind a module's name: parts that are read.
_PART = re.compile(
    r"(?:modules_to_save\.)?(?:"
    r"lora_(?P<linear>A|B)(?:\.\w+)?\.weight|lora_embedding_(?P<embedding>A|B)(?:\.\w+)?|"
    r"(?P<magnitude>lora_magnitude_vector)(?:\.\w+)*|"
    r"(?:token_adapter\.)?(?P<tokens>trainable_tokens_delta)(?:\.\w+)?|"
    r"(?P<base>base_layer\.weight)|(?P<weight>weight))"
)
#: Where the name of a module ends that is neither a head nor an embedding.
_END = re.compile(r"\.(?:lora_|base_layer|modules_to_save|token_adapter|[\w-]+$)")
#: Ways of starting to train that leave the base's weights as they are; others subtract from them.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
#: Settings that are other methods than LoRA or DoRA, if they are set.
_OTHER_METHODS = (
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("velora_config", "monteclora_config", "megatron_config", "layer_replication", "fan_in_fan_out"),
)


def _modules(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(f"{w}{name.removesuffix('.weight')}" for name in names for w in WRAPPERS)


_HEADS, _EMBEDDINGS, _NORMS = _modules(HEADS), _modules(EMBEDDINGS), _modules(FINAL_NORMS)
#: Last words of embeddings' names, less those that other modules bear too.
_EMBEDDING_WORDS = {m.rpartition(".")[2] for m in _EMBEDDINGS} - {"embeddings", "embedding"}
#: A pattern of PEFT's that is a name or the end of one, with at most two gaps: others may never terminate.
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.(?!\*))*(?:\.\*(?:[\w-]|\\?\.(?!\*))*){0,2}\$?")


@dataclass(frozen=True, slots=True)
class Update:
    """A low-rank change of a matrix.

    Attributes:
        a: The factor A: (r, d); of an embedding (r, v).
        b: The factor B: (v, r); of an embedding (d, r).
        scaling: What their product is multiplied by.
        embedding: Whether the matrix is an embedding, whose factors are stored transposed.
        magnitude: DoRA's length of every row, (v, 1).
    """

    a: Matrix
    b: Matrix
    scaling: float
    embedding: bool
    magnitude: Matrix | None = None

    async def applied(self, rows: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float32]:
        """Rows (n, d) of these numbers plus ``scaling · B A``, set to DoRA's lengths where there are some."""
        if self.embedding:
            size = self.a.shape[0] * row_bytes(self.a.dtype, self.a.shape[1])
            self.a.refuse_scattered(size, "with a column a token", "for any of them")
            left = (await self.a.read(range(self.a.shape[0])))[:, list(ids)].T
            right = (await self.b.read(range(self.b.shape[0]))).T
        else:
            left, right = await self.b.read(ids), await self.a.read(range(self.a.shape[0]))
        changed = rows.astype(np.float64) + self.scaling * (
            left.astype(np.float64) @ right.astype(np.float64)
        )
        if self.magnitude is not None:
            changed *= await self.magnitude.read(ids) / np.linalg.norm(changed, axis=1, keepdims=True)
        result: NDArray[np.float32] = changed.astype(np.float32)
        return result


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of single tokens: row ``k`` of the matrix is that of token ``ids[k]``."""

    ids: tuple[int, ...]
    matrix: Matrix


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows with an adapter's changes.

    Attributes:
        base: The base's rows, or those that the adapter stores in their place.
        updates: Low-rank changes, in order.
        tokens: Rows of single tokens.
    """

    base: Rows
    updates: tuple[Update, ...]
    tokens: TokenRows | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return self.base.shape

    async def read(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """See `Rows`."""
        rows = await self.base.read(ids)
        for update in self.updates:
            rows = await update.applied(rows, ids)
        if self.tokens is not None:
            place = {token: at for at, token in enumerate(self.tokens.ids)}
            here = [at for at, i in enumerate(ids) if i in place]
            if here:
                asked = sorted({place[ids[at]] for at in here})
                new = await self.tokens.matrix.read(asked)
                rows = rows.copy()
                rows[here] = new[[asked.index(place[ids[at]]) for at in here]]
        return rows


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is stored.

    Attributes:
        files: The files of its weights.
        file: The one that holds its tensors.
        base: The base's name or path, as its configuration says it.
        revision: The base's revision, None for the default.
        settings: adapter_config.json.
        modules: Its tensors by module and part: ``modules["lm_head"]["A"]``.
    """

    files: WeightFiles
    file: str
    base: str
    revision: str | None
    settings: Mapping[str, Any]
    modules: Mapping[str, Mapping[str, Tensor]]

    @property
    def label(self) -> str:
        """The base as a user would write it."""
        return self.base if self.revision is None else f"{self.base}@{self.revision}"


def is_adapter(snapshot: Snapshot) -> bool:
    """An adapter holds no weights of a model's own."""
    has_weights = any(
        "/" not in path
        and (
            (path.endswith(".safetensors") and not path.startswith("adapter_")) or path.startswith(_ARCHIVES)
        )
        for path in snapshot.files
    )
    return CONFIG in snapshot.files and any(name in snapshot.files for name in FILES) and not has_weights


async def read_adapter(snapshot: Snapshot) -> Adapter:
    """An adapter's settings and the places of its tensors."""
    try:
        settings = json.loads(await snapshot.small_file(CONFIG))
    except (ValueError, RecursionError) as error:
        raise ScreeningError(
            "BadConfig", f"{CONFIG} of {snapshot.repo} is not valid JSON ({error}); ask for another revision"
        ) from error
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise ScreeningError(
            "BadConfig",
            f"{CONFIG} of {snapshot.repo} names no base (base_model_name_or_path), whose rows it "
            "changes; merge it into its base, or write the name into the file",
        )
    revision = settings.get("revision")
    file = next(name for name in FILES if name in snapshot.files)
    modules: dict[str, dict[str, Tensor]] = {}
    files = WeightFiles(snapshot)
    for name, tensor in (await files.header(file)).tensors.items():
        module, part = _split(name.removeprefix(_PREFIX))
        modules.setdefault(module, {})[part] = tensor
    adapter = Adapter(
        files, file, base, revision if isinstance(revision, str) and revision else None, settings, modules
    )
    if not modules:
        raise _unread(adapter, f"stores no tensors in {file}")
    return adapter


async def adapted_projection(adapter: Adapter, base: Snapshot) -> OutputProjection:
    """The output projection of an adapter's merged model."""
    try:
        projection = await find_projection(base)
    except ScreeningError as error:
        raise ScreeningError(error.code, f"its base {adapter.label}: {error}") from error
    heads = [module for module in adapter.modules if _is_head(module)]
    embeddings = [module for module in adapter.modules if _is_embedding(module)]
    if len(heads) > 1 or len(embeddings) > 1:
        raise _unread(adapter, f"changes {len(heads)} heads and {len(embeddings)} embeddings")
    touched = [*heads, *(embeddings if projection.tied else ())]
    parts = {module: dict(adapter.modules[module]) for module in touched}
    for module in embeddings if projection.tied else ():
        if "weight" in parts[module] and (heads or _saved(adapter, module)):
            # PEFT trains a copy of an embedding that is to be saved: the head keeps the base's rows.
            del parts[module]["weight"]
    norm = _norm(adapter, projection.norm)
    if not any(parts.values()):
        note = f"same rows as its base {adapter.label}: G cannot tell them apart"
        return replace(projection, warnings=(*projection.warnings, note), norm=norm)
    settings = adapter.settings
    plain = settings.get("init_lora_weights", True)
    if plain not in _PLAIN_STARTS:
        raise _unread(adapter, f"was begun with init_lora_weights={plain!r}, which changes the base")
    other = [name for name in _OTHER_METHODS if settings.get(name)]
    if other:
        raise _unread(adapter, f"sets {other[0]}")
    replaced: Matrix | None = None
    updates: list[Update] = []
    tokens: list[TokenRows] = []
    for module, tensors in parts.items():
        if unknown := sorted(set(tensors) - {"A", "B", "EA", "EB", "magnitude", "base", "weight", "tokens"}):
            raise _unread(adapter, f"stores {module}.{unknown[0]}")
        place = await _located(adapter, tensors)
        whole = place.get("base") or place.get("weight")
        if whole is not None and replaced is None:
            replaced = whole
        if update := _update(adapter, module, place):
            updates.append(update)
        if "tokens" in place:
            tokens.append(TokenRows(_token_ids(adapter, module, place["tokens"]), place["tokens"]))
    ensured = bool(settings.get("ensure_weight_tying"))
    if len(updates) > 1 and ensured:
        # One change under both names: the model that was trained has it once (peft 0.21 merges it twice).
        updates = updates[:1]
    if len(tokens) > 1 and tokens[0].ids == tokens[1].ids:
        tokens = tokens[:1]
    if len(tokens) > 1 or (tokens and updates):
        kinds = " and ".join(sorted({part for p in parts.values() for part in p}))
        raise _unread(adapter, f"changes {' and '.join(touched)}, which are one matrix, by {kinds}")
    rows = AdaptedRows(replaced or projection.rows, tuple(updates), tokens[0] if tokens else None)
    _fits(adapter, rows, projection.shape[1])
    warnings = list(projection.warnings)
    if any(update.embedding for update in updates) and not ensured:
        warnings.append(
            f"the adapter changes the input embedding, which {adapter.label} ties to its head: the rows are "
            "those of the merged model; before it is merged, its head lacks that change"
        )
    return replace(projection, file=adapter.file, rows=rows, warnings=tuple(warnings), norm=norm)


def _norm(adapter: Adapter, norm: StoredNorm | str) -> StoredNorm | str:
    """The final norm of a merged model: the base's, with the adapter's weight where it stores one."""
    norms = [module for module in adapter.modules if module in _NORMS]
    if not norms or isinstance(norm, str):
        return norm
    stored = [tensor for module in norms for tensor in adapter.modules[module].values()]
    if len(stored) != 1 or not stored[0].name.endswith(".weight"):
        return "the adapter changes the final norm in a way that is not read"
    (tensor,) = stored
    return replace(norm, files=adapter.files, name=tensor.name, holders=(adapter.file,))


def _unread(adapter: Adapter, why: str) -> ScreeningError:
    return ScreeningError(
        "AdapterOnly",
        f"cannot be screened because it is an adapter ({adapter.settings.get('peft_type')}) that {why}; "
        f"merge it into its base {adapter.label} (merge_and_unload, save_pretrained) and screen that folder",
    )


def _split(name: str) -> tuple[str, str]:
    """Module and part of a tensor's name.

    Heads and embeddings come first, so that an unknown part is still seen to be theirs.
    """
    words = name.split(".")
    heads = (".".join(words[:count]) for count in range(1, len(words)))
    module = next((m for m in heads if _is_head(m) or _is_embedding(m)), None)
    if module is None:
        end = _END.search(name)
        return (name, "") if end is None else (name[: end.start()], name[end.start() + 1 :])
    rest = name[len(module) + 1 :]
    match = _PART.fullmatch(rest)
    if match is None:
        return module, rest
    if match["linear"] or match["embedding"]:
        return module, match["linear"] or f"E{match['embedding']}"
    return module, str(match.lastgroup)


def _is_head(module: str) -> bool:
    of_model = not any(word in module for word in NOT_THE_MODEL) and not _numbered(module)
    return of_model and (module in _HEADS or module.endswith(".lm_head"))


def _is_embedding(module: str) -> bool:
    of_model = not any(word in module for word in NOT_THE_MODEL) and not _numbered(module)
    return of_model and (module in _EMBEDDINGS or module.rpartition(".")[2] in _EMBEDDING_WORDS)


def _numbered(module: str) -> bool:
    return any(part.isdigit() for part in module.split("."))


def _saved(adapter: Adapter, module: str) -> bool:
    """A module that is to be saved is trained as a copy of its own."""
    names = adapter.settings.get("modules_to_save")
    return isinstance(names, list) and any(
        isinstance(name, str) and (module == name or module.endswith(f".{name}")) for name in names
    )


async def _located(adapter: Adapter, tensors: Mapping[str, Tensor]) -> dict[str, Matrix]:
    located = {}
    for part, tensor in tensors.items():
        flat = len(tensor.shape) != 2 and part != "magnitude"
        if tensor.dtype not in FLOAT_DTYPES or 0 in tensor.shape or flat:
            raise _unread(adapter, f"stores {tensor.name} as {tensor.dtype} of shape {tensor.shape}")
        bridge = BRIDGE if part in ("B", "magnitude") else 0
        located[part] = await adapter.files.matrix(adapter.file, tensor, bridge)
    return located


def _update(adapter: Adapter, module: str, place: Mapping[str, Matrix]) -> Update | None:
    settings = adapter.settings
    linear, embedding = {"A", "B"} & place.keys(), {"EA", "EB"} & place.keys()
    if not linear and not embedding:
        return None
    if settings.get("peft_type") != "LORA":
        raise _unread(adapter, f"changes {module}")
    names = ("EA", "EB") if embedding else ("A", "B")
    if len(linear) + len(embedding) != 2 or not all(name in place for name in names):
        raise _unread(adapter, f"lacks a factor of {module}")
    a, b = place[names[0]], place[names[1]]
    magnitude = place.get("magnitude")
    if (magnitude is not None) != bool(settings.get("use_dora")):
        raise _unread(
            adapter, f"has use_dora={settings.get('use_dora')!r} and not the magnitudes of {module} that fit"
        )
    if magnitude is not None and embedding:
        raise _unread(
            adapter, f"is a DoRA of the embedding {module}, whose lengths run over all rows at once"
        )
    rank = a.shape[0]
    alpha = _patterned(adapter, "alpha_pattern", module, settings.get("lora_alpha", 8))
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not math.isfinite(alpha)
        or b.shape[1] != rank
    ):
        raise _unread(
            adapter, f"has lora_alpha {alpha!r} and factors of ranks {rank} and {b.shape[1]} for {module}"
        )
    said = _patterned(adapter, "rank_pattern", module, settings.get("r", rank))
    if said != rank:
        raise _unread(adapter, f"states the rank {said!r} for {module}, but its factors have {rank}")
    scaling = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Update(a, b, scaling, bool(embedding), magnitude)


def _patterned(adapter: Adapter, setting: str, module: str, otherwise: Any) -> Any:
    """A module's own setting by PEFT's patterns: ends of names, which may have gaps."""
    pattern = adapter.settings.get(setting)
    for key, value in pattern.items() if isinstance(pattern, dict) else ():
        if not _PATTERN.fullmatch(key):
            raise _unread(adapter, f"has the pattern {key!r} in its {setting}, which is not followed")
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


def _token_ids(adapter: Adapter, module: str, matrix: Matrix) -> tuple[int, ...]:
    stated = adapter.settings.get("trainable_token_indices", adapter.settings.get("token_indices"))
    if isinstance(stated, dict):
        stated = next(
            (ids for name, ids in stated.items() if module == name or module.endswith(f".{name}")), None
        )
    natural = isinstance(stated, list) and all(type(i) is int and i >= 0 for i in stated)
    if not natural or len(set(stated)) != len(stated) or len(stated) != matrix.shape[0]:
        raise _unread(adapter, f"does not say of which tokens the {matrix.shape[0]} rows for {module} are")
    return tuple(stated)


def _fits(adapter: Adapter, rows: AdaptedRows, width: int) -> None:
    """Every shape has to be that of one and the same matrix."""
    v, d = rows.shape
    for update in rows.updates:
        a, b = update.a.shape, update.b.shape
        shape = (a[1], b[0]) if update.embedding else (b[0], a[1])
        if shape != (v, d) or (update.magnitude is not None and update.magnitude.shape != (v, 1)):
            raise _unread(adapter, f"has factors for {shape[0]} × {shape[1]} numbers; its base has {v} × {d}")
    tokens = rows.tokens
    if d != width or (tokens and (tokens.matrix.shape[1] != d or max(tokens.ids, default=0) >= v)):
        raise _unread(adapter, f"has rows that do not fit the {v} × {width} numbers of its base")
