"""Loading decoder models with their tokenizers, with helpful errors, and their identity.

Identity describes a run's model in plain strings: equal identities that have ``weights`` mean the
same model. The keys are in docs/reference/store.md; a key that does not apply, or whose value is
unknown (as for a model built in memory), is left out. Only loading imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmeval_dispersion.errors import (
    DispersionError,
    MissingExtraError,
    UsageError,
    first_line,
    require_extra,
)
from lmeval_dispersion.files import sha256
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.model.load_report import warned_loads
from lmeval_dispersion.model_args import key_values

if TYPE_CHECKING:
    import torch

Quantization = Literal["4bit", "8bit"]
DTYPES = ("auto", "float32", "float16", "bfloat16")

_COMMIT = 40  # hex digits

# Files of a model's folder besides its weights; not optimizer states or logs.
TEXTS = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.pth")
ADAPTER = ("adapter_config.json", "adapter_model*")

# Bidirectional heads, or heads without text output, although the causal mapping lists their configurations.
_OTHER_HEADS = [
    "MaskedLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "PreTraining",
]


@dataclass(frozen=True)
class ModelChoice:
    """A checkpoint and how to load it; the attributes are the arguments of :func:`load_model`."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    quantize: Quantization | None = None
    adapter: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    encoder: bool = False

    def __str__(self) -> str:
        text = self.name
        if self.revision:
            text += f"@{self.revision}"
        if self.adapter:
            text += f" + {self.adapter}"
        if self.quantize:
            text += f" ({self.quantize})"
        return text


def chosen_model(model: str, model_args: str = "", device: str | None = None) -> ModelChoice:
    """Parse the arguments that choose a model, and return the choice.

    Args:
        model: Hub id or folder, with @REVISION for another revision than the main one.
        model_args: Arguments as for lm-eval's hf model, such as ``dtype=bfloat16,peft=ADAPTER``:
            ``dtype``, ``load_in_4bit``, ``load_in_8bit``, ``peft``, ``revision`` and
            ``trust_remote_code``.
        device: Device of the model; see :func:`load_model`.

    Raises:
        UsageError: An argument is unknown or has no ``=``, a flag is neither True nor False, or two
            arguments contradict each other.
    """
    name, at, revision = model.partition("@")
    if at and Path(model).exists():
        name = model
        revision = ""
    given = key_values(model_args)
    if revision and given.get("revision", revision) != revision:
        raise UsageError(
            f"expected one revision of {name}, got {revision} and {given['revision']}; give only one of them"
        )
    flags = dict.fromkeys(("load_in_4bit", "load_in_8bit", "trust_remote_code"), False)
    for flag in flags:
        value = given.pop(flag, "false")
        if value.lower() not in ("true", "false"):
            raise UsageError(f"expected {flag} to be True or False, got {value!r}")
        flags[flag] = value.lower() == "true"
    quantize: Quantization | None = None
    if flags["load_in_4bit"] and flags["load_in_8bit"]:
        raise UsageError("expected load_in_4bit or load_in_8bit, got both; leave one out")
    if flags["load_in_4bit"]:
        quantize = "4bit"
    elif flags["load_in_8bit"]:
        quantize = "8bit"
    choice = ModelChoice(
        name,
        revision=given.pop("revision", revision) or None,
        dtype=given.pop("dtype", "auto"),
        quantize=quantize,
        adapter=given.pop("peft", None),
        device=device,
        trust_remote_code=flags["trust_remote_code"],
    )
    if given:
        what = "it" if len(given) == 1 else "them"
        raise UsageError(
            f"expected only dtype, peft, revision, {', '.join(flags)}, got {', '.join(given)}; "
            f"leave {what} out",
            argument="model_args",
        )
    return choice


class LoadedModel(NamedTuple):
    """A model that is ready to run, with its tokenizer.

    Attributes:
        model: The model of transformers or PEFT, in evaluation mode and without gradients.
        tokenizer: The tokenizer, which always has a padding token.
        name: Hub id or folder.
        revision: The loaded commit, or the requested revision if the commit is unknown; None if no
            revision was requested either.
        device: Device to which inputs must be moved.
        choice: The checkpoint and options with which the model was loaded.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    device: torch.device
    choice: ModelChoice

    @property
    def identity(self) -> dict[str, str]:
        """What identifies the model by content: its weights, adapter, dtype and quantisation.

        Models are the same, whatever their names, if their identities are equal and contain
        ``weights``. The keys are listed in docs/reference/store.md.
        """
        identity = settings_identity(self.model)
        weights = weights_identity(self.name, self.revision)
        if weights:
            identity["weights"] = weights
        if self.choice.adapter:
            adapter = adapter_identity(self.choice.adapter)
            if adapter:
                identity["adapter"] = adapter
        return identity


ModelLike = str | Path | ModelChoice | LoadedModel


def loaded_model(model: ModelLike) -> LoadedModel:
    """Load a model, unless it is a :class:`LoadedModel` already.

    Raises:
        DispersionError: The model cannot be loaded; see :func:`load_model`.
    """
    if isinstance(model, LoadedModel):
        return model
    return load_model(**asdict(model_choice(model)))


def model_choice(model: ModelLike) -> ModelChoice:
    """Return the :class:`ModelChoice` for a name, a choice or a loaded model; nothing is loaded."""
    if isinstance(model, LoadedModel):
        return model.choice
    if isinstance(model, ModelChoice):
        return model
    return ModelChoice(str(model))


def load_model(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: Quantization | None = None,
    adapter: str | Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    encoder: bool = False,
) -> LoadedModel:
    """Load a checkpoint's model and tokenizer, ready to run.

    Weights that the files lack are initialised at random, with a warning on stderr.

    Args:
        name: Hub id or folder.
        revision: Branch, tag or commit; None for the main branch.
        dtype: One of :data:`DTYPES`; ``auto`` is the checkpoint's own dtype.
        quantize: Load the weights in 4 or 8 bits through bitsandbytes; None to load them as stored.
        adapter: Hub id or folder of a PEFT adapter for the model.
        device: ``cpu``, ``cuda``, ``cuda:1``, …, or ``auto`` to spread the model over all GPUs.
            None for the first GPU, or the CPU if there is none.
        trust_remote_code: Whether to run code that the checkpoint contains.
        encoder: Whether to accept bidirectional models (BERT, ALBERT) too, which are loaded as the
            class that their configuration names.

    Raises:
        MissingExtraError: torch or transformers, or a library for ``quantize`` or ``adapter``, is
            missing.
        UsageError: The model or revision does not exist, the model is gated or not a decoder, the
            adapter does not fit the model, the dtype is unknown, or the device cannot be used.
        DispersionError: The files cannot be loaded.
    """
    require_extra("models", "running a model")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if dtype not in DTYPES:
        raise UsageError(f"expected one of the dtypes {', '.join(DTYPES)}, got {dtype!r}")
    source = _source(name)
    adapter = None if adapter is None else str(adapter)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        common["revision"] = revision

    def attempt(load: Any, **options: Any) -> Any:
        try:
            return load(source, **common, **options)
        except DispersionError as error:  # on the checkpoint's files, without its name
            raise DispersionError(f"{source}: {error}") from error
        except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
            raise _explained(source, revision, error) from error

    config = attempt(transformers.AutoConfig.from_pretrained)
    kind = transformers.AutoModelForCausalLM
    if encoder and not config.is_encoder_decoder and not has_causal_head(config):
        kind = getattr(transformers, config.architectures[0], transformers.AutoModel)
    else:
        _check_decoder(source, config, transformers)
    tokenizer = attempt(transformers.AutoTokenizer.from_pretrained)
    if tokenizer.pad_token_id is None:
        # This project always masks padding, so any token will do.
        usual = tokenizer.eos_token or tokenizer.unk_token
        tokenizer.pad_token = usual or tokenizer.convert_ids_to_tokens(0)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"config": config, "dtype": dtype}
    if quantize:
        options["quantization_config"] = _quantization(quantize, transformers)
    # Quantised weights go to the device while loading; a plain model is moved afterwards.
    placed = place == "auto" or quantize is not None
    if placed:
        options["device_map"] = "auto" if place == "auto" else {"": place}
    with warned_loads(adapter=adapter is not None):
        model = attempt(kind.from_pretrained, **options)
        if adapter is not None:
            model = _with_adapter(model, adapter)
    if not placed:
        try:
            model.to(place)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"the device {place!r} cannot be used ({first_line(error)}); choose another device"
            ) from error
    model.eval().requires_grad_(False)
    choice = ModelChoice(
        str(name), revision, dtype, quantize, adapter, device, trust_remote_code, encoder
    )
    inputs = model.get_input_embeddings().weight.device if place == "auto" else torch.device(place)
    commit = getattr(config, "_commit_hash", None) or revision
    return LoadedModel(model, tokenizer, str(name), commit, inputs, choice)


def _source(name: str | Path) -> str:
    """The name as transformers takes it; raises for a folder without a model."""
    text = str(name)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
            raise UsageError(
                f"expected a model, got the PEFT adapter {text}; give its base model, and "
                f"the adapter as model_args peft={text} (in Python as adapter), or merge both "
                "(merge_and_unload, save_pretrained)"
            )
        if not (path / "config.json").is_file():
            inside = sorted(child.parent.name for child in path.glob("*/config.json"))
            hint = "check the path"
            if inside:
                hint = f"choose a folder in it, such as {', '.join(inside[:5])}"
            raise UsageError(f"expected a model folder with config.json, got {text}; {hint}")
        return str(path)
    if path.is_file():
        raise UsageError(
            f"expected a model folder or a Hub id, got the file {text}; give its folder"
        )
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise UsageError(f"the folder {text} does not exist{_near(path) or '; check the path'}")
    return text


def _near(path: Path) -> str:
    """A hint at folders with similar names next to ``path``, or else at models in the Hub's cache.

    The hint is empty if no name is similar.
    """
    if path.parent.is_dir():
        names = [child.name for child in path.parent.iterdir() if child.is_dir()]
        near = nearest(path.name, names)
        if near:
            return near
    from huggingface_hub import constants

    cached = []
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*"):
        cached.append(folder.name.removeprefix("models--").replace("--", "/"))
    return nearest(str(path), cached)


def _explained(source: str, revision: str | None, error: BaseException) -> DispersionError:
    """The library's error as a sentence with the next step."""
    kinds: set[str] = set()
    cause: BaseException | None = error
    while cause is not None and len(kinds) < 20:
        kinds.update(kind.__name__ for kind in type(cause).__mro__)
        cause = cause.__cause__ or cause.__context__
    if "GatedRepoError" in kinds:
        return UsageError(
            f"{source} is gated; accept its conditions at https://huggingface.co/{source} and log in with "
            "`hf auth login`, or set HF_TOKEN"
        )
    if "RevisionNotFoundError" in kinds:
        return UsageError(
            f"{source} has no revision {revision!r}; see https://huggingface.co/{source}/commits for its "
            "revisions"
        )
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        hint = _near(Path(source)) or "; check the spelling, or set HF_TOKEN for a private model"
        return UsageError(f"there is no model {source} on the Hub, and no such folder here{hint}")
    if "LocalEntryNotFoundError" in kinds or "OfflineModeIsEnabled" in kinds:
        hint = (
            _near(Path(source)) or "; give a local folder, or go online once to download the model"
        )
        return UsageError(f"{source} is not in the local cache and the Hub cannot be reached{hint}")
    if "ImportError" in kinds:
        return MissingExtraError(
            f"{source} needs a package that is missing ({first_line(error)}); install that package"
        )
    return DispersionError(f"{source} cannot be loaded: {first_line(error)}")


def has_causal_head(config: Any) -> bool:
    """Whether a transformers configuration names a causal language model, or no class at all.

    A class counts if it is one of transformers' own, or if the checkpoint has the code for it.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    heads = config.architectures or []
    return not heads or _has_own_code(config) or any(head in NAMES.values() for head in heads)


def _has_own_code(config: Any) -> bool:
    """Whether a repository holds the code of its language model."""
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def _check_decoder(source: str, config: Any, transformers: Any) -> None:
    heads = config.architectures or []
    kind = ", ".join(heads) or type(config).__name__
    is_decoder = type(config) in transformers.AutoModelForCausalLM._model_mapping
    if config.is_encoder_decoder:
        kind = "an encoder-decoder"
        is_decoder = False
    elif heads and all(any(word in head for word in _OTHER_HEADS) for head in heads):
        is_decoder = False
    elif _has_own_code(config):
        is_decoder = True
    if not is_decoder:
        raise UsageError(
            f"expected a decoder-only language model, got {source} ({kind}); choose a model that reads from "
            "left to right, as GPT-2 and Llama do"
        )


def _quantization(quantize: str, transformers: Any) -> Any:
    if quantize not in ("4bit", "8bit"):
        raise UsageError(f"expected quantize to be 4bit or 8bit, got {quantize!r}")
    require_extra("quantized", "loading quantised weights")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=quantize == "4bit", load_in_8bit=quantize == "8bit"
    )


def _with_adapter(model: Any, adapter: str) -> Any:
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UsageError(
            f"the adapter {adapter} cannot be loaded onto its base ({first_line(error)}); check that "
            "it was trained on this base, or save it again"
        ) from error


def weights_identity(
    name: str | Path, commit: str | None = None, gguf: str | None = None
) -> str | None:
    """Return a text that identifies a checkpoint's files by content; None if it is unknown.

    The text is ``NAME@COMMIT`` for a model of the Hub, and a digest of the files for a folder.

    Args:
        name: Hub id or folder.
        commit: The loaded commit; None to look it up in the Hub's cache.
        gguf: Name of the GGUF file with the weights; None for other formats.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder_digest(folder, _loaded_patterns(folder, gguf))
    return _hub_identity(str(name), commit, gguf)


def weights_stamp(
    name: str | Path, gguf: str | None = None, *, adapter: bool = False
) -> list[list[Any]]:
    """Return ``[name, size, time]`` of each file that is read when a folder's model is loaded.

    ``size`` is in bytes, and ``time`` is that of the last change, in ns. The list is empty for a
    Hub id. With ``adapter``, the files are those of a PEFT adapter; ``gguf`` is as in
    :func:`weights_identity`.
    """
    folder = Path(name).expanduser()
    patterns = ADAPTER if adapter else _loaded_patterns(folder, gguf)
    stamps: list[list[Any]] = []
    for file in _files(folder, patterns):
        about = file.stat()
        stamps.append([file.name, about.st_size, about.st_mtime_ns])
    return stamps


def _loaded_patterns(folder: Path, gguf: str | None) -> tuple[str, ...]:
    """Patterns of the files that loading a folder's checkpoint reads; none without weights."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return ADAPTER
    if gguf:
        return (gguf,)
    has_adapter = all(any(folder.glob(pattern)) for pattern in ADAPTER)
    for weights in _WEIGHTS:
        if _files(folder, (weights,)):
            # transformers 5 puts the adapter on the weights in its folder.
            return (*TEXTS, weights, *ADAPTER) if has_adapter else (*TEXTS, weights)
    return ()


def adapter_identity(name: str | Path, commit: str | None = None) -> str | None:
    """Return a text that identifies the files of a PEFT adapter by content; None if unknown.

    For a folder, the text is a digest of its files. For an adapter on the Hub it is
    ``NAME@COMMIT``; if ``commit`` is None or not a full hash, the full one is looked up in the
    Hub's cache.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder_digest(folder, ADAPTER)
    return _hub_identity(str(name), commit, "adapter_config.json")


def _hub_identity(name: str, commit: str | None, file: str | None) -> str | None:
    if commit is None or len(commit) != _COMMIT:
        commit = cached_commit(name, commit, file)
    return f"{name}@{commit}" if commit else None


def cached_commit(name: str, revision: str | None = None, file: str | None = None) -> str | None:
    """Return the commit of a Hub model in the local cache; None if the model is not there.

    Args:
        name: Hub id.
        revision: Branch, tag or commit; None for the main branch.
        file: Name of the file to look for; None for ``config.json``.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file or "config.json", revision=revision)
    except HFValidationError:
        return None
    if not isinstance(path, str):
        return None
    commit = Path(path).parent.name
    return commit if len(commit) == _COMMIT else None


def folder_digest(folder: Path, patterns: tuple[str, ...]) -> str | None:
    """Return a digest ``sha256:…`` of the files in a folder that match one of ``patterns``.

    The digest covers the names, sizes and contents of the files; None if no file matches.
    """
    files = _files(folder, patterns)
    if not files:
        return None
    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = list(pool.map(file_digest, files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name}\0{file.stat().st_size}\0{digest}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def settings_identity(model: Any) -> dict[str, str]:
    """Return the ``dtype`` and ``quantization`` of a transformers model in memory.

    ``quantization`` is the model's quantisation configuration, as JSON. A key is left out if the
    model has no such setting.
    """
    identity = {}
    dtype = getattr(model, "dtype", None)
    if dtype:
        identity["dtype"] = str(dtype).removeprefix("torch.")
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings:
        plain = settings if isinstance(settings, Mapping) else settings.to_dict()
        identity["quantization"] = json.dumps(dict(plain), sort_keys=True, default=str)
    return identity


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    with_adapter = set(ADAPTER) <= set(patterns)
    return sorted(file for file in files if with_adapter or not file.name.startswith("adapter_"))


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hex digits.

    The digest is kept in memory until the file changes.
    """
    about = file.stat()
    return _content_digest(file, about.st_size, about.st_mtime_ns, about.st_ino)


@lru_cache(maxsize=4096)
def _content_digest(file: Path, _size: int, _modified: int, _inode: int) -> str:
    return sha256(file)
