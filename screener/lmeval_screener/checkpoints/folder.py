"""Checkpoints in folders on this machine: named by the user, or downloaded by huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmeval_screener.checkpoints.concurrency import in_thread
from lmeval_screener.checkpoints.snapshot import SMALL, FileEntry, Snapshot, single_file
from lmeval_screener.errors import ScreeningError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LFS, _POINTER = b"version https://git-lfs", 1024  # how a git-lfs pointer begins, and its largest size


class LocalSnapshot(Snapshot):
    """A checkpoint in a folder. It needs no network and no cache."""

    is_local = True

    def __init__(
        self, repo: str, folder: Path, files: Mapping[str, FileEntry], revision: str | None = None
    ) -> None:
        super().__init__(repo, files, revision)
        self.folder = folder

    async def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of a file; see `Snapshot.ranges`."""
        return await in_thread(lambda: read_ranges(self.folder / self.entry(path).path, ranges))


def open_folder(path: str | os.PathLike[str]) -> LocalSnapshot:
    """A checkpoint in a folder, or a weights file with its folder's configuration and tokenizer, if any.

    A folder is laid out as by ``save_pretrained`` or in the Hub's cache (``…/snapshots/COMMIT``).
    """
    place = Path(path).expanduser()
    if place.is_file():
        return LocalSnapshot(str(path), place.parent, single_file(_files(place.parent), place.name))
    if not place.is_dir():
        raise ScreeningError("FolderNotFound", f"{str(path)!r} is not a folder; check the path")
    files = _files(place)
    if not files and not any(place.iterdir()):
        raise ScreeningError(
            "FolderNotFound",
            f"{path} is empty; name a folder with config.json and *.safetensors, or a training run's folder "
            "with checkpoint-*, step_* or iter_* in it",
        )
    return LocalSnapshot(str(path), place, files)


def open_download(cache: Path, repo: str, revision: str) -> LocalSnapshot | None:
    """A checkpoint that huggingface_hub downloaded; None if this revision is not in its cache."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    place = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not place.is_dir():
        return None
    return LocalSnapshot(repo, place, _files(place), revision=commit)


def _files(folder: Path) -> dict[str, FileEntry]:
    files = {}
    try:
        for place in sorted(folder.iterdir()):
            name = place.name
            broken = place.is_symlink() and not place.exists()  # reading it raises the error
            if name.startswith(".") or not (place.is_file() or broken):
                continue
            size, digest = 0 if broken else place.stat().st_size, None
            if name.endswith((".json", ".model", ".txt", ".tiktoken")) and size <= SMALL and not broken:
                digest = f"sha256:{hashlib.sha256(place.read_bytes()).hexdigest()}"
            files[name] = FileEntry(name, size, digest)
    except OSError as error:
        raise _unreadable(folder, error) from error
    return files


def read_ranges(place: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Bytes ``[begin, end)`` of a file on disk, for each range."""
    bodies = []
    try:
        with place.open("rb") as file:
            if os.fstat(file.fileno()).st_size < _POINTER and file.read(len(_LFS)) == _LFS:
                why = f"{place} is a git-lfs pointer, not the file itself; run: git lfs pull"
                raise ScreeningError("FileNotFound", why)
            for begin, end in ranges:
                file.seek(begin)
                bodies.append(file.read(end - begin))
    except OSError as error:
        raise _unreadable(place, error) from error
    for (begin, end), body in zip(ranges, bodies, strict=True):
        if len(body) != end - begin:
            raise ScreeningError(
                "BadResponse", f"{place} ended before byte {end}; wait until it is written, or copy it again"
            )
    return bodies


def _unreadable(place: Path, error: OSError) -> ScreeningError:
    if place.is_symlink() and not place.exists():
        why = f"{place} links to {os.readlink(place)}, which is gone (perhaps a purged cache)"
        return ScreeningError("FileNotFound", f"{why}; download it again")
    return ScreeningError(
        "FileNotFound", f"cannot read {place}: {error}; check that it exists and that you may read it"
    )
