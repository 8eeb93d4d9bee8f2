"""Decoder models with their tokenizers, from a Hub id or a folder, with errors that say what to do next."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmeval_dispersion.errors import DispersionError, MissingExtraError, UsageError
from lmeval_dispersion.model.identity import adapter_identity, settings_identity, weights_identity

if TYPE_CHECKING:
    import torch

Quantization = Literal["4bit", "8bit"]
DTYPES = ("auto", "float32", "float16", "bfloat16")

# Heads that read both ways or write no text: their configurations sit in the causal mapping all the same.
_OTHER_HEADS = (
    "MaskedLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "PreTraining",
)


@dataclass(frozen=True)
class ModelChoice:
    """Which checkpoint, and how to load it: the arguments of :func:`load_model`."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    quantize: Quantization | None = None
    adapter: str | None = None
    device: str | None = None
    trust_remote_code: bool = False

    def load(self) -> LoadedModel:
        """The model, loaded."""
        options = asdict(self)
        return load_model(options.pop("name"), **options)


class LoadedModel(NamedTuple):
    """A decoder in evaluation mode with its tokenizer.

    Attributes:
        model: The transformers model (or its PEFT wrapper), gradients off.
        tokenizer: Its tokenizer; always has a pad token.
        name: Hub id or folder as given.
        revision: The commit that was loaded, where the Hub said it.
        device: Where inputs go.
        choice: How it was loaded.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    device: torch.device
    choice: ModelChoice

    @property
    def identity(self) -> dict[str, str]:
        """What it is, whatever it is called: see :mod:`lmeval_dispersion.model.identity`."""
        adapter = self.choice.adapter
        found = {
            "weights": weights_identity(self.name, self.revision),
            "adapter": adapter_identity(adapter) if adapter else None,
            **settings_identity(self.model),
        }
        return {key: value for key, value in found.items() if value is not None}


ModelLike = str | Path | ModelChoice | LoadedModel


def loaded_model(model: ModelLike) -> LoadedModel:
    """``model``, loaded where it is not yet."""
    if isinstance(model, LoadedModel):
        return model
    return (model if isinstance(model, ModelChoice) else ModelChoice(str(model))).load()


def model_choice(model: ModelLike) -> ModelChoice:
    """What ``model`` is, without loading it."""
    if isinstance(model, LoadedModel):
        return model.choice
    return model if isinstance(model, ModelChoice) else ModelChoice(str(model))


def load_model(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: Quantization | None = None,
    adapter: str | Path | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The model and tokenizer of a checkpoint, ready to run.

    Args:
        name: Hub id or folder.
        revision: Branch, tag or commit.
        dtype: One of :data:`DTYPES`; ``auto`` is the checkpoint's own.
        quantize: Load the weights in 4 or 8 bits through bitsandbytes.
        adapter: Hub id or folder of a PEFT adapter to put on the model.
        device: ``cpu``, ``cuda``, ``cuda:1``, …; ``auto`` spreads the model over all devices; by default
            the first GPU, else the CPU.
        trust_remote_code: Run the checkpoint's own code.

    Raises:
        MissingExtraError: torch or transformers, or what ``quantize`` or ``adapter`` needs, is missing.
        UsageError: No such model or revision, a gated one, one that is no decoder, an unknown dtype.
        DispersionError: The files cannot be loaded.
    """
    torch, transformers = _libraries()
    if dtype not in DTYPES:
        raise UsageError(f"expected a dtype of {', '.join(DTYPES)}, got {dtype!r}")
    source = _source(name)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        common["revision"] = revision

    def attempt(load: Any, **options: Any) -> Any:
        try:
            return load(source, **common, **options)
        except (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError) as error:
            raise _explained(source, revision, error) from error

    config = attempt(transformers.AutoConfig.from_pretrained)
    _check_decoder(source, config, transformers)
    tokenizer = attempt(transformers.AutoTokenizer.from_pretrained)
    if tokenizer.pad_token_id is None:
        # Padding is masked wherever this project looks, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {"config": config, "dtype": dtype}
    if quantize:
        options["quantization_config"] = _quantization(quantize, transformers)
    # Quantised weights are placed while loading; a plain model is moved afterwards.
    placed = place == "auto" or quantize is not None
    if placed:
        options["device_map"] = "auto" if place == "auto" else {"": place}
    model = attempt(transformers.AutoModelForCausalLM.from_pretrained, **options)
    if adapter is not None:
        model = _with_adapter(model, str(adapter))
    try:
        model = model if placed else model.to(place)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"the device {place!r} cannot be used: {_first_line(error)}") from error
    model.eval().requires_grad_(False)
    commit = getattr(config, "_commit_hash", None)
    choice = ModelChoice(
        str(name),
        revision,
        dtype,
        quantize,
        None if adapter is None else str(adapter),
        device,
        trust_remote_code,
    )
    return LoadedModel(model, tokenizer, str(name), commit or revision, _input_device(model, place), choice)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "running a model needs torch and transformers; pip install 'lmeval-dispersion[models]'"
        ) from error
    return torch, transformers


def _source(name: str | Path) -> str:
    """The name as transformers takes it; raises where it is clearly a folder and there is no model in it."""
    text = str(name)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
            raise UsageError(f"{text} is a PEFT adapter; name its base model and pass the folder as adapter")
        if not (path / "config.json").is_file():
            inside = sorted(child.parent.name for child in path.glob("*/config.json"))
            hint = f"it holds the models {', '.join(inside[:5])}" if inside else "check the path"
            raise UsageError(f"expected a model folder with config.json, got {text}; {hint}")
        return str(path)
    if path.is_file():
        raise UsageError(f"expected a model folder or a Hub id, got the file {text}; name its folder")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise UsageError(f"the folder {text} does not exist; {_near(path) or 'check the path'}")
    return text


def _near(path: Path) -> str | None:
    """A hint at the nearest name: a sibling folder, or a model in the Hub's cache."""
    if path.parent.is_dir():
        names = [child.name for child in path.parent.iterdir() if child.is_dir()]
        if near := difflib.get_close_matches(path.name, names, n=1):
            return f"did you mean {path.parent / near[0]}?"
    from huggingface_hub import constants

    cached = [
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in Path(constants.HF_HUB_CACHE).glob("models--*")
    ]
    near = difflib.get_close_matches(str(path), cached, n=1)
    return f"did you mean {near[0]}?" if near else None


def _explained(source: str, revision: str | None, error: BaseException) -> DispersionError:
    kinds: set[str] = set()
    cause: BaseException | None = error
    while cause is not None and len(kinds) < 20:
        kinds.update(kind.__name__ for kind in type(cause).__mro__)
        cause = cause.__cause__ or cause.__context__
    if "GatedRepoError" in kinds:
        return UsageError(
            f"{source} is gated: accept its terms at https://huggingface.co/{source} and log in with "
            "`hf auth login`, or set HF_TOKEN"
        )
    if "RevisionNotFoundError" in kinds:
        return UsageError(
            f"{source} has no revision {revision!r}; https://huggingface.co/{source}/commits lists them"
        )
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        hint = _near(Path(source)) or "check the spelling; a private one needs HF_TOKEN"
        return UsageError(f"there is no model {source} on the Hub, and no such folder here; {hint}")
    if "LocalEntryNotFoundError" in kinds or "OfflineModeIsEnabled" in kinds:
        hint = _near(Path(source)) or "pass a local folder, or go online once to fetch it"
        return UsageError(f"{source} is not in the local cache and the Hub cannot be reached; {hint}")
    if "ImportError" in kinds:
        return MissingExtraError(f"{source} needs a package that is not installed: {_first_line(error)}")
    return DispersionError(f"{source} cannot be loaded: {_first_line(error)}")


def _check_decoder(source: str, config: Any, transformers: Any) -> None:
    heads = list(getattr(config, "architectures", None) or [])
    other = bool(heads) and all(any(word in head for word in _OTHER_HEADS) for head in heads)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    mapped = type(config) in transformers.AutoModelForCausalLM._model_mapping
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if other or encoder_decoder or not (mapped or remote):
        what = "an encoder-decoder" if encoder_decoder else ", ".join(heads) or type(config).__name__
        raise UsageError(
            f"expected a decoder-only language model, got {source} ({what}); "
            "dispersion is defined here on left-to-right models"
        )


def _quantization(quantize: str, transformers: Any) -> Any:
    if quantize not in ("4bit", "8bit"):
        raise UsageError(f"expected quantize of 4bit or 8bit, got {quantize!r}")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "quantised weights need bitsandbytes; pip install 'lmeval-dispersion[quantized]'"
        ) from error
    return transformers.BitsAndBytesConfig(load_in_4bit=quantize == "4bit", load_in_8bit=quantize == "8bit")


def _with_adapter(model: Any, adapter: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("adapters need peft; pip install 'lmeval-dispersion[adapters]'") from error
    try:
        return peft.PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UsageError(
            f"the adapter {adapter} does not fit or cannot be loaded: {_first_line(error)}"
        ) from error


def _input_device(model: Any, place: str) -> torch.device:
    import torch

    return torch.device(model.get_input_embeddings().weight.device if place == "auto" else place)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
