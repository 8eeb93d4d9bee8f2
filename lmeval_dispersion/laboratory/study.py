"""A study: the folder of one analysis, which can be stopped and resumed.

It holds ``manifest.json``, and ``work/`` until it is complete, then one parquet file per table. Its settings
include its inputs' content (digests, commits): a changed text or a retrained model is another study.

Work is divided into numbered units, fixed before the first one starts. Each unit is one ``.npz`` file; a
unit with a file is done. Files are read in numerical order, so an interruption does not change the result; a
killed process loses its current unit.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import keep_arrays, write_whole
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.output import progress_bar
from lmeval_dispersion.store.format import make_folder

FORMAT = "dispersion-lab/3"

_WORDS = {"data": "another text", "held_out": "another held-out text", "models": "other models"}


class StudyRoot(NamedTuple):
    """A folder of studies; each gets a folder of its own in it, named for its kind and settings."""

    root: Path


Folder = str | Path | StudyRoot | None
Unit = dict[str, NDArray[Any]]


class Units(NamedTuple):
    """The files of a pass whose units are all done, in order."""

    files: list[Path]

    def each(self, key: str) -> Iterator[NDArray[Any]]:
        """An array of every unit; one at a time is in memory."""
        for file in self.files:
            with np.load(file) as unit:
                yield unit[key]

    def first(self) -> Unit:
        """All arrays of the first unit."""
        with np.load(self.files[0]) as unit:
            return dict(unit)

    def joined(self, key: str) -> NDArray[Any]:
        """The units' arrays, one after the other along their first axis."""
        return np.concatenate(list(self.each(key)))

    def stacked(self, key: str) -> NDArray[Any]:
        """The units' arrays under a new first axis."""
        return np.stack(list(self.each(key)))


class Study:
    """One study's folder, see the module."""

    def __init__(self, folder: Path, quiet: bool = True) -> None:
        self.folder, self.quiet = folder, quiet
        self.manifest = read_manifest(folder)

    @classmethod
    def open(
        cls,
        folder: Path,
        kind: str,
        settings: Mapping[str, Any],
        *,
        names: Mapping[str, Any] | None = None,
        quiet: bool = True,
    ) -> Study:
        """Start a study in ``folder``, or resume it; ``names`` are for readers."""
        _prepare(folder, kind, json.loads(json.dumps(settings)), names or {})
        return cls(folder, quiet)

    def once(self, key: str, value: Any) -> Any:
        """The ``value``, kept in the manifest: a resumed study reads the first."""
        if key not in self.manifest:
            self._record(**{key: value})
        return self.manifest[key]

    def units(self, name: str, count: int, do: Callable[[int], Unit]) -> Units:
        """Keep the arrays of ``do(unit)`` for every unit; those of an earlier process are not done again."""
        folder = self.folder / "work" / name
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{unit}.npz" for unit in range(count)]
        waiting = [unit for unit, file in enumerate(files) if not file.exists()]
        with progress_bar(hidden=self.quiet) as update:
            for done, unit in enumerate(waiting, 1):
                keep_arrays(files[unit], partial(do, unit))
                update(done, len(waiting), name)
        return Units(files)

    def blocks(self, name: str, rows: int, size: int, do: Callable[[NDArray[np.int64]], Unit]) -> Units:
        """Units of ``size`` of so many rows each: ``do`` gets their numbers."""
        parts = [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]
        return self.units(name, len(parts), lambda unit: do(parts[unit]))

    def finish(self, tables: Mapping[str, pd.DataFrame], **fields: Any) -> None:
        """Write the result tables as parquet, mark the study complete and drop its work."""
        for name, frame in tables.items():
            write_whole(self.folder / f"{name}.parquet", frame.to_parquet(index=False))
        self._record(**fields, tables=sorted(tables), complete=True)
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def _record(self, **fields: Any) -> None:
        """Add to the manifest."""
        _write_manifest(self.folder, {**self.manifest, **fields})
        self.manifest = read_manifest(self.folder)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The result tables of a complete study."""
        return {name: pd.read_parquet(self.folder / f"{name}.parquet") for name in self.manifest["tables"]}

    def say(self, sentence: str) -> None:
        """Print a message on stderr."""
        if not self.quiet:
            print(sentence, file=sys.stderr)


@contextmanager
def opened(
    kind: str, settings: Mapping[str, Any], names: Mapping[str, Any], folder: Folder, quiet: bool
) -> Iterator[Study]:
    """The study in ``folder``, or in a temporary folder that is deleted."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dispersion-") as temporary:
            yield Study.open(Path(temporary), kind, settings, names=names, quiet=quiet)
        return
    key = sha256(json.dumps([FORMAT, settings], sort_keys=True).encode()).hexdigest()[:10]
    place = folder.root / f"{kind}-{key}" if isinstance(folder, StudyRoot) else Path(folder).expanduser()
    study = Study.open(place, kind, settings, names=names, quiet=quiet)
    yield study
    if isinstance(folder, StudyRoot):
        study.say(f"the study is kept in {place}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a study."""
    if not is_study(folder):
        raise UsageError(f"expected the folder of a study, but {folder} is not one")
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise UsageError(
            f"expected a study of format {FORMAT} in {folder}, got {manifest['format']}; run the study again"
        )
    return manifest


def is_study(folder: str | Path) -> bool:
    """Whether ``folder`` holds a study, complete or not, of this format or another version of it."""
    try:
        manifest = json.loads((Path(folder).expanduser() / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and str(manifest.get("format", "")).startswith("dispersion-lab/")


def read_study(folder: str | Path) -> Study:
    """A complete study, read-only."""
    study = Study(Path(folder).expanduser())
    if not study.manifest["complete"]:
        raise UsageError(f"the study in {folder} is not complete; repeat its command to resume it")
    return study


def _prepare(folder: Path, kind: str, settings: dict[str, Any], names: Mapping[str, Any]) -> None:
    """Check that ``folder`` holds this study, or begin it there."""
    if is_study(folder):
        manifest = read_manifest(folder)
        if manifest["kind"] != kind:
            raise UsageError(f"{folder} holds a study of {manifest['kind']}, not of {kind}; name another")
        if changes := _changes(manifest["settings"], settings):
            raise UsageError(
                f"{folder} holds a study with other settings ({'; '.join(changes)}); name another"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(path.name != "work" for path in folder.iterdir())):
        raise UsageError(f"{folder} exists but is not a study; name another folder")
    make_folder(folder, "study")
    versions = {name: version(name) for name in ("torch", "transformers")}
    manifest = {"format": FORMAT, "kind": kind, "complete": False, "settings": settings, "names": names}
    manifest["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    _write_manifest(folder, {**manifest, "versions": {"lmeval_dispersion": __version__, **versions}})


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_whole(folder / "manifest.json", json.dumps(manifest, indent=1).encode())


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One phrase per changed setting."""
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    before, now = (
        [", ".join(map(str, value)) if isinstance(value, list) else value for value in map(side.get, changed)]
        for side in (old, new)
    )
    rows = zip(changed, before, now, strict=True)
    return [_WORDS.get(key) or f"{key} {was}, now {value}" for key, was, value in rows]
