"""Checkpoints in a folder: transformers' layout, or the Hub's cache."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.checkpoints.snapshot import FileEntry, Meter, single_file
from lmeval_screener.errors import ScreeningError

#: Files up to this size get a digest from their content; weights do not need one.
SMALL = 64 * 2**20
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class LocalSnapshot:
    """A checkpoint in a folder; see `Snapshot`. Nothing travels, nothing is cached."""

    repo: str
    folder: Path
    files: Mapping[str, FileEntry]
    requested_revision: str | None = None
    revision: str | None = None
    meter: Meter = field(default_factory=Meter)
    parameters: int | None = None
    cache: Cache | None = None

    async def small_file(self, path: str) -> bytes:
        """Whole content of a file; see `Snapshot.small_file`."""
        return await asyncio.to_thread(self._whole, path)

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        return await asyncio.to_thread(read_ranges, self._place(path), ranges)

    async def size(self, path: str) -> int:
        """Size of a file; see `Snapshot.size`."""
        place = self._place(path)
        try:
            return place.stat().st_size
        except OSError as error:
            raise ScreeningError("FileNotFound", f"cannot read {path} of {self.repo}: {error}") from error

    def _place(self, path: str) -> Path:
        if path not in self.files:
            raise ScreeningError("FileNotFound", f"{self.repo} has no {path}; is the download complete?")
        return self.folder / path

    def _whole(self, path: str) -> bytes:
        try:
            return self._place(path).read_bytes()
        except OSError as error:
            raise ScreeningError("FileNotFound", f"cannot read {path} of {self.repo}: {error}") from error


def open_folder(path: str | os.PathLike[str]) -> LocalSnapshot:
    """A checkpoint in a folder.

    Three layouts are understood:

    - transformers' own (``save_pretrained``): config.json and the safetensors files side by side;
    - a snapshot of the Hub's cache (``…/snapshots/<commit>``), whose files are symbolic links;
    - a repository of the Hub's cache (``models--org--name``): the commit that ``refs/main`` names, or
      the only snapshot there is.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ScreeningError(
            "FolderNotFound", f"expected a folder, got {str(path)!r}, which is none; check the path"
        )
    if not any(folder.iterdir()):
        raise ScreeningError(
            "FolderNotFound",
            f"{path} is empty; name a folder with config.json and *.safetensors, or a training run's folder "
            "with checkpoint-*, step_* or iter_* in it",
        )
    if folder.name.startswith("models--") and (folder / "snapshots").is_dir():
        folder = _cached_commit(folder)
    return LocalSnapshot(str(path), folder, _files(folder))


def open_file(path: str | os.PathLike[str]) -> LocalSnapshot:
    """A checkpoint that is one file of weights, with the configuration and tokenizer beside it, if any."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise ScreeningError("FolderNotFound", f"there is no file {str(path)!r}; check the path")
    files = _files(place.parent)
    return LocalSnapshot(str(path), place.parent, single_file(files, place.name))


def open_download(cache: Path, repo: str, revision: str | None) -> LocalSnapshot | None:
    """A checkpoint that huggingface_hub downloaded; None if this revision is not in its cache."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else (revision or "")
    place = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not place.is_dir():
        return None
    return LocalSnapshot(repo, place, _files(place), requested_revision=revision, revision=commit)


def _files(folder: Path) -> dict[str, FileEntry]:
    files = {
        name: FileEntry(name, place.stat().st_size, None)
        for place in sorted(folder.iterdir())
        if not (name := place.name).startswith(".") and place.is_file()
    }
    for name, entry in files.items():
        if name.endswith((".json", ".model", ".txt", ".tiktoken")) and (entry.size or 0) <= SMALL:
            digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            files[name] = FileEntry(name, entry.size, f"sha256:{digest}")
    return files


def read_ranges(place: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes ``[begin, end)`` of a file on disk, for each range."""
    bodies = []
    try:
        with place.open("rb") as file:
            for begin, end in ranges:
                file.seek(begin)
                bodies.append(file.read(end - begin))
    except OSError as error:
        raise ScreeningError("FileNotFound", f"cannot read {place}: {error}") from error
    for (begin, end), body in zip(ranges, bodies, strict=True):
        if len(body) != end - begin:
            raise ScreeningError(
                "BadResponse", f"{place} ended before byte {end}; is it still being written?"
            )
    return bodies


def _cached_commit(folder: Path) -> Path:
    snapshots = sorted(place for place in (folder / "snapshots").iterdir() if place.is_dir())
    reference = folder / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text().strip()
        if _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit) in snapshots:
            return folder / "snapshots" / commit
    if len(snapshots) == 1:
        return snapshots[0]
    names = ", ".join(place.name for place in snapshots) or "none"
    raise ScreeningError(
        "FolderNotFound",
        f"{folder} holds several snapshots or none ({names}); name one: {folder}/snapshots/…",
    )
