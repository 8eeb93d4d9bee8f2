"""Errors of checkpoints whose weights cannot be read: they say what to screen instead."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from lmeval_screener.checkpoints import Snapshot
from lmeval_screener.errors import ScreeningError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PICKLED = (".bin", ".pth", ".pt", ".ckpt", ".msgpack", ".h5")
#: Files of a model in 16 or 32 bits, beside packed ones.
_PLAIN_GGUF = re.compile(r"(?:^|[-._/])(BF16|F16|FP16|F32)\.gguf$", re.IGNORECASE)


async def no_weights_error(snapshot: Snapshot) -> ScreeningError:
    """The error of a checkpoint without weights of a model's own; it names the files that are there.

    The base model comes from ``adapter_config.json`` or from ``base_model`` in the README, where one says it.
    """
    files = sorted(snapshot.files)
    base = await _base_model(snapshot)
    if "adapter_config.json" in files or any(path.startswith("adapter_model.") for path in files):
        return _cannot(
            "AdapterOnly", "it holds only an adapter", f"merge it into its base model, or screen {base}"
        )
    if paths := [path for path in files if path.endswith(_PICKLED)]:
        return _cannot(
            "NoSafetensors",
            f"its weights are stored only as {_listed(paths)}, which are not read: they may run code",
            "look for a revision in safetensors (often refs/pr/N), or save it with save_pretrained",
        )
    if paths := [path for path in files if "/" in path and path.endswith(".safetensors")]:
        folder = paths[0].rpartition("/")[0]
        return _cannot(
            "NoSafetensors",
            f"its safetensors lie in folders inside it ({_listed(paths)})",
            f"download one (hf download {snapshot.repo} --include '{folder}/*') and screen that folder",
        )
    return _cannot("NoSafetensors", "it holds no weights", f"check the name, or screen {base}")


async def suggest_alternative(snapshot: Snapshot, config: Mapping[str, Any]) -> str | None:
    """A checkpoint to screen in place of one whose output projection is packed; None if nothing names one.

    A GGUF file in 16 bits beside it, else the model that the README's ``base_model`` or config.json's
    ``_name_or_path`` names.
    """
    plain = sorted(path for path in snapshot.files if _PLAIN_GGUF.search(path))
    if plain:
        return (
            f"screen {snapshot.repo}:{plain[0].rpartition('/')[2]}, which lies beside it in 16 bits or more"
        )
    base = await _base_model(snapshot)
    if base != _UNKNOWN:
        return f"screen {base}"
    name = config.get("_name_or_path")
    if isinstance(name, str) and _REPO.fullmatch(name) and name != snapshot.repo:
        return f"screen {name}, which its config.json names"
    return None


_UNKNOWN = "its base model"


async def _base_model(snapshot: Snapshot) -> str:
    """``ORG/NAME, which … names`` or ``its base model``."""
    places = (("adapter_config.json", _of_adapter), ("README.md", _of_readme))
    for path, find in places:
        if path in snapshot.files:
            # A broken file only costs the hint.
            with contextlib.suppress(ScreeningError, ValueError, RecursionError):
                name = find((await snapshot.small_file(path)).decode("utf-8"))
                if isinstance(name, str) and _REPO.fullmatch(name) and name != snapshot.repo:
                    return f"{name}, which its {path} names"
    return _UNKNOWN


def _of_adapter(text: str) -> Any:
    content = json.loads(text)
    return content.get("base_model_name_or_path") if isinstance(content, dict) else None


def _of_readme(text: str) -> Any:
    """``base_model`` of the metadata at the top of a README; the first one where it lists several."""
    import yaml

    if not text.startswith("---"):
        return None
    try:
        metadata = yaml.safe_load(text[3:].partition("\n---")[0])
    except yaml.YAMLError:
        return None
    name = metadata.get("base_model") if isinstance(metadata, dict) else None
    return name[0] if isinstance(name, list) and name else name


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")


def _cannot(code: str, reason: str, step: str) -> ScreeningError:
    return ScreeningError(code, f"cannot be screened because {reason}; {step}")
