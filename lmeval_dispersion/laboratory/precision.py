"""The dtype in which a measure is true, and whether its weights fit into memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.model.loading import LoadedModel, ModelLike, model_choice

_BYTES = 4  # of a weight in float32
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def in_float32(model: ModelLike) -> ModelLike:
    """The model in float32, unless it is loaded, quantised, or another dtype was asked for."""
    choice = model_choice(model)
    if isinstance(model, LoadedModel) or choice.dtype != "auto" or choice.quantize:
        return model
    config = _config(model)
    if config is None or getattr(config, "quantization_config", None) is not None:
        return model
    return replace(choice, dtype="float32")


def check_memory(model: ModelLike) -> None:
    """Raise UsageError if a model that is to be loaded in float32 is larger than its device's memory.

    Nothing but its configuration is read; a model whose weights cannot be counted by it passes.
    """
    choice = model_choice(model)
    if isinstance(model, LoadedModel) or choice.dtype != "float32" or choice.device == "auto":
        return
    count = weights_count(model)
    if count is None:
        return
    device = choice.device or ("cuda" if torch.cuda.is_available() else "cpu")
    free = free_bytes(device)
    if count * _BYTES > free:
        raise UsageError(
            f"{choice} takes {count * _BYTES / 1e9:.1f} GB in float32 ({count / 1e9:.2f} billion "
            f"weights), and {device} has {free / 1e9:.1f} GB free; use a larger device, auto for "
            "all of them, or dtype=bfloat16 in model_args, with which single numbers are less exact"
        )


def weights_count(model: ModelLike) -> int | None:
    """Number of a model's weights by its configuration; None if it cannot be told."""
    import transformers

    config = _config(model)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=model_choice(model).trust_remote_code
            )
    except Exception:  # a checkpoint's own code may raise any exception; loading tells it
        return None
    return int(sum(parameter.numel() for parameter in built.parameters()))


def free_bytes(device: str) -> int:
    """Free memory of a device in bytes; of a container at most what it was given."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = _CONTAINER.read_text(encoding="ascii").strip()
    except OSError:
        return free
    return min(free, int(limit)) if limit.isdigit() else free


def _config(model: ModelLike) -> Any:
    """A checkpoint's configuration; None if it cannot be read, which loading tells."""
    import transformers

    choice = model_choice(model)
    folder = Path(choice.name).expanduser()
    try:
        return transformers.AutoConfig.from_pretrained(
            folder if folder.is_dir() else choice.name,
            revision=choice.revision or "main",
            trust_remote_code=choice.trust_remote_code,
        )
    except Exception:  # transformers passes on errors of its HTTP library, too
        return None
