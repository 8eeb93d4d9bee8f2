"""Caches of downloads: which of a Hub cache's snapshots a user means, and which model an Ollama blob is."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from lmeval_dispersion.files import json_in
from lmeval_screener.formats import BLOB

_REPOSITORY = re.compile(r"models--(.+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL = "application/vnd.ollama.image.model"


def hub_snapshots(folder: str) -> dict[str, str]:
    """Find the snapshot to read for each model repository in a Hub cache.

    The snapshot is the one to which ``refs/main`` points, or else the one written last. Data sets,
    Spaces and repositories without a snapshot are left out.

    Args:
        folder: The cache, the folder above it (``HF_HOME``), or one repository's folder in it.

    Returns:
        A mapping from each repository's folder to the folder of its snapshot; empty if ``folder``
        is not a Hub cache.
    """
    place = Path(folder).expanduser()
    if (place / "hub").is_dir() and not _repositories(place):
        place = place / "hub"
    repositories = _repositories(place)
    if _REPOSITORY.fullmatch(place.resolve().name):
        repositories = [place.resolve()]
    chosen: dict[str, str] = {}
    for repository in repositories:
        snapshot = _snapshot(repository)
        if snapshot:
            chosen[str(repository)] = snapshot
    return chosen


def _repositories(place: Path) -> list[Path]:
    try:
        entries = sorted(place.iterdir())
    except OSError:
        return []
    repositories: list[Path] = []
    for entry in entries:
        if _REPOSITORY.fullmatch(entry.name) and entry.is_dir():
            repositories.append(entry)
    return repositories


def _snapshot(repository: Path) -> str:
    """The folder of a repository's snapshot that is meant; empty without one."""
    snapshots = repository / "snapshots"
    main = repository / "refs" / "main"
    try:
        stored = [entry for entry in snapshots.iterdir() if entry.is_dir()]
    except OSError:
        stored = []
    if not stored:
        return ""
    with contextlib.suppress(OSError):
        commit = main.read_text("ascii", "replace").strip()
        if _COMMIT.fullmatch(commit) and snapshots / commit in stored:
            return str(snapshots / commit)
    return str(max(stored, key=lambda entry: entry.stat().st_mtime))


def cached_name(path: str) -> str | None:
    """Return ``ORG/NAME`` for the path of a snapshot in a Hub cache, or None for any other path.

    >>> cached_name("hub/models--org--name/snapshots/" + 40 * "a")
    'org/name'
    """
    parts = path.replace("\\", "/").rstrip("/").split("/")
    if len(parts) < 3 or parts[-2] != "snapshots" or not _COMMIT.fullmatch(parts[-1]):
        return None
    repository = _REPOSITORY.fullmatch(parts[-3])
    if repository is None:
        return None
    return repository[1].replace("--", "/")


def ollama_models(folder: str) -> dict[str, str]:
    """Find the weights file (a blob) of each model that Ollama stores.

    Args:
        folder: Ollama's folder of models, the folder above it, or its folder ``blobs``.

    Returns:
        A mapping from the name of each model, such as ``llama3:8b``, to the path of its file; empty
        if Ollama stores nothing in ``folder``.
    """
    place = Path(folder).expanduser()
    for store in (place, place / "models", place.parent):
        manifests = store / "manifests"
        if manifests.is_dir() and (store / "blobs").is_dir():
            return _named_blobs(manifests, store / "blobs")
    return {}


def _named_blobs(manifests: Path, blobs: Path) -> dict[str, str]:
    named: dict[str, str] = {}
    for place, folders, files in os.walk(manifests):
        folders.sort()
        for file in sorted(files):
            # HOST/NAMESPACE/NAME/TAG
            parts = Path(place).relative_to(manifests).parts
            *_, namespace, name = ("", "", *parts)
            digest = _model_digest(Path(place) / file)
            if namespace not in ("", "library"):
                name = f"{namespace}/{name}"
            if digest:
                named[f"{name}:{file}"] = str(blobs / digest.replace(":", "-"))
    return named


def _model_digest(manifest: Path) -> str:
    """The digest of the model's layer in a manifest; empty without one."""
    try:
        content = json_in(manifest)
    except (OSError, ValueError):
        return ""
    if not isinstance(content, dict) or not isinstance(content.get("layers"), list):
        return ""
    for layer in content["layers"]:
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL:
            digest = str(layer.get("digest"))
            if BLOB.fullmatch(digest):
                return digest
            return ""
    return ""
