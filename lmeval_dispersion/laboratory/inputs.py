"""Models and texts as a caller names them, and what identifies them in a study's settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.loading import LoadedModel, ModelChoice, ModelLike, model_choice
from lmeval_dispersion.model.texts import Texts

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
    """What identifies a model in a study's settings; where it runs is no part of it."""
    choice = model_choice(model)
    known = {"name": choice.name, "revision": choice.revision, "dtype": choice.dtype}
    return {**known, "quantize": choice.quantize, "adapter": choice.adapter}


def as_models(models: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    """One model or several as a list.

    Raises:
        UsageError: There is none, or two would have the same name in the tables.
    """
    several = [models] if isinstance(models, (str, Path, ModelChoice, LoadedModel)) else list(models)
    names = [label(model) for model in several]
    twice = [name for name in names if names.count(name) > 1]
    if not several or twice:
        raise UsageError(
            f"expected different models, got {twice[0]} twice" if twice else "expected a model, got none"
        )
    return several


def label(model: ModelLike) -> str:
    """How a model is called in tables: its name, with revision, adapter and bits where they are set."""
    choice = model_choice(model)
    extras = f"@{choice.revision}" if choice.revision else ""
    extras += f" + {choice.adapter}" if choice.adapter else ""
    extras += f" ({choice.quantize})" if choice.quantize else ""
    return choice.name + extras


def data_settings(texts: Texts | None) -> dict[str, Any] | None:
    """What identifies a source in a study's settings."""
    if texts is None:
        return None
    size = texts.path.stat().st_size if texts.path else None
    known = {"source": texts.source, "column": texts.column, "bytes": size}
    return known if texts.path else {**known, "config": texts.config, "split": texts.split}
