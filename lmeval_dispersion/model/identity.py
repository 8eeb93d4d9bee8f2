"""What produced a run's vectors, as plain strings: two runs of equal identity ran one and the same model.

====================  ======================================================================================
``weights``           ``ORG/NAME@COMMIT`` of the Hub, else ``sha256:…`` of a folder's weights, configuration,
                      tokenizer and code: names, sizes, every byte; retrained weights differ
``gguf``              name of the GGUF file; ``weights`` is then of this file alone
``adapter``           the same of a PEFT adapter; ``delta`` of delta weights
``quantization``      the quantisation's settings as sorted JSON
``dtype``             dtype of the parameters
``tokenizer``         name of a tokenizer that is not the model's own
``add_bos_token``     where the harness was told whether to start with the BOS token
====================  ======================================================================================

A key that does not apply, or whose value cannot be known (a model that was built in memory), is left out.
What shaped the prompts goes beside these (docs/reference/store.md has all keys). This module needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22
_COMMIT = 40  # hex digits

# What a folder's model consists of besides its weights; states of optimizers and logs are no part of it.
_TEXTS = (
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
_ADAPTER = ("adapter_config.json", "adapter_model*")


def weights_identity(name: str | Path, commit: str | None = None, gguf: str | None = None) -> str | None:
    """Identity of a checkpoint's files: its commit on the Hub, or a digest of its folder.

    Args:
        name: Hub id or folder.
        commit: Commit that was loaded, where known; looked up in the Hub's cache otherwise.
        gguf: The one weight file of it that was loaded.

    Returns:
        None where neither can be told.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        found = commit if commit and len(commit) == _COMMIT else cached_commit(str(name), commit, gguf)
        return f"{name}@{found}" if found else None
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return folder_digest(folder, _ADAPTER)
    if gguf:
        return folder_digest(folder, (gguf,))
    weights = next((kind for kind in _WEIGHTS if _files(folder, (kind,))), None)
    return folder_digest(folder, (*_TEXTS, weights)) if weights else None


def adapter_identity(name: str | Path, commit: str | None = None) -> str | None:
    """Identity of a PEFT adapter, likewise."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder_digest(folder, _ADAPTER)
    found = cached_commit(str(name), commit, "adapter_config.json")
    return f"{name}@{found}" if found else None


def cached_commit(name: str, revision: str | None = None, file: str | None = None) -> str | None:
    """Commit of a Hub model, by the place of its files in the cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file or "config.json", revision=revision)
    except HFValidationError:
        return None
    found = Path(path).parent.name if isinstance(path, str) else ""
    return found if len(found) == _COMMIT else None


def folder_digest(folder: Path, patterns: tuple[str, ...]) -> str | None:
    """``sha256:…`` over names, sizes and contents of the files that match; None where none does.

    Shards are read side by side. Digests are kept for this process's life: a file that changes gets a new
    time of modification and is read again.
    """
    files = _files(folder, patterns)
    if not files:
        return None
    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = list(pool.map(_digest, files))
    whole = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        whole.update(f"{file.name}\0{file.stat().st_size}\0{digest}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def settings_identity(model: Any) -> dict[str, str]:
    """``dtype`` and ``quantization`` of a transformers model, as it is in memory."""
    found = {}
    dtype = getattr(model, "dtype", None)
    if dtype is not None:
        found["dtype"] = str(dtype).removeprefix("torch.")
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings:
        plain = settings if isinstance(settings, Mapping) else settings.to_dict()
        found["quantization"] = json.dumps(dict(plain), sort_keys=True, default=str)
    return found


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    # An adapter beside a whole model is another checkpoint.
    adapters = patterns != _ADAPTER
    return sorted(file for file in found if not (adapters and file.name.startswith("adapter_")))


def _digest(file: Path) -> str:
    about = file.stat()
    return _content_digest(file, about.st_size, about.st_mtime_ns, about.st_ino)


@lru_cache(maxsize=4096)
def _content_digest(file: Path, _size: int, _modified: int, _inode: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
