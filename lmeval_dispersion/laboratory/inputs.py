"""Models and texts as a caller names them, and what identifies them in a study's settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.identity import adapter_identity, weights_identity
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice, ModelLike, model_choice
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.report.cells import short_names

DataLike = str | Path | Texts


_HUB = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


def as_texts(data: DataLike, column: str = "text") -> Texts:
    """``data`` as a source of texts; a Hub data set may be written ``id:configuration@split``.

    Raises:
        UsageError: The file does not exist or is of an unknown kind.
    """
    if isinstance(data, Texts):
        return data
    text = str(data)
    match = _HUB.fullmatch(text)
    if match and not Path(text).exists() and (match["config"] or match["split"]):
        return Texts(match["id"], column=column, config=match["config"], split=match["split"] or "train")
    return Texts(text, column=column)


def model_settings(model: ModelLike) -> dict[str, Any]:
    """What identifies a model in a study's settings: its content, never its name or place.

    ``weights`` and ``adapter`` are a commit of the Hub or a digest of every byte of the folder (of the
    parameters, for a model that is loaded already); None where the Hub could not be asked. Where it runs is
    no part of it.
    """
    choice = model_choice(model)
    known = {"dtype": choice.dtype, "quantize": choice.quantize}
    if isinstance(model, LoadedModel):
        return {"weights": _parameters_digest(model.model), "adapter": None, **known}
    adapter = None if choice.adapter is None else _identity(adapter_identity, choice.adapter, None)
    return {"weights": _identity(weights_identity, choice.name, choice.revision), "adapter": adapter, **known}


def _identity(of: Callable[[str, str | None], str | None], name: str, revision: str | None) -> str | None:
    if Path(name).expanduser().is_dir():
        return of(name, None)
    from huggingface_hub import hf_hub_download

    file = "adapter_config.json" if of is adapter_identity else "config.json"
    try:
        # The folder of a snapshot is named for its commit; without a network the one in the cache is found.
        return of(name, Path(hf_hub_download(name, file, revision=revision)).parent.name)
    except (OSError, ValueError):  # loading says what is wrong with it
        return None


def _parameters_digest(model: Any) -> str:
    import torch

    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return f"sha256:{digest.hexdigest()}"


def as_models(models: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    """One model or several as a list.

    Raises:
        UsageError: There is none, or two would have the same name in the tables.
    """
    several = [models] if isinstance(models, (str, Path, ModelChoice, LoadedModel)) else list(models)
    names = [full_name(model) for model in several]
    twice = [name for name in names if names.count(name) > 1]
    if not several or twice:
        raise UsageError(
            f"expected different models, got {twice[0]} twice" if twice else "expected a model, got none"
        )
    return several


def labels(models: Sequence[ModelLike]) -> list[str]:
    """What reports call the models: the last parts of their names, as few as tell all of them apart."""
    choices = [model_choice(model) for model in models]
    names = short_names([_place(choice.name) for choice in choices])
    adapters = short_names([_place(choice.adapter or "") for choice in choices])
    return [_described(*each) for each in zip(names, adapters, choices, strict=True)]


def full_name(model: ModelLike) -> str:
    """A model's name as it was given, with revision, adapter and bits where they are set."""
    choice = model_choice(model)
    return _described(choice.name, choice.adapter or "", choice)


def _described(name: str, adapter: str, choice: ModelChoice) -> str:
    extras = f"@{choice.revision}" if choice.revision else ""
    extras += f" + {adapter}" if adapter else ""
    return name + extras + (f" ({choice.quantize})" if choice.quantize else "")


def _place(name: str) -> str:
    """The whole path of a folder, so that ``.`` has a name too; a Hub id as it is."""
    folder = Path(name).expanduser()
    return folder.resolve().as_posix() if name and folder.is_dir() else name


def data_settings(texts: Texts) -> dict[str, Any]:
    """What identifies a source in a study's settings: a file's content, a Hub data set's commit.

    A data set is read at that commit from here on.
    """
    if texts.path is not None:
        return {"sha256": file_digest(texts.path), "kind": texts.path.suffix, "column": texts.column}
    from huggingface_hub import HfApi

    with suppress(OSError, ValueError):  # reading says what is wrong with it
        texts.revision = HfApi().dataset_info(texts.source, revision=texts.revision).sha
    known = {"source": texts.source, "commit": texts.revision}
    return {**known, "config": texts.config, "split": texts.split, "column": texts.column}


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
