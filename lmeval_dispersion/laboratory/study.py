"""A study: the folder of one analysis, which can be stopped, resumed and shared by several processes.

It holds ``manifest.json`` (``{"format": "dispersion-lab/2", "kind": "law", "complete": true, "settings":
{...}, ...}``), a parquet file a table once it is complete, and ``work/`` until then. Its settings hold the
content of its inputs (digests, commits): a changed text or a retrained model makes another study.

Work is cut into numbered units whose content is settled before the first one starts. Each unit is one
``.npz`` file; a unit whose file is there is done. Files are read in the order of their numbers, so neither
who did them nor a stop in between changes a bit of the result; a killed process loses the unit it was at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.version import __version__

FORMAT = "dispersion-lab/2"

_QUIET_FOR = 1.0  # seconds without a progress bar


class StudyRoot(NamedTuple):
    """A folder of studies; each gets a folder of its own in it, named for its kind and settings."""

    root: Path


Folder = str | Path | StudyRoot | None
Unit = dict[str, NDArray[Any]]


class Processes:
    """This process's number among those that ``accelerate launch`` started; one alone otherwise.

    They share files, so the study's folder must be on a disk that all of them see.
    """

    def __init__(self) -> None:
        self.index, self.count, self._state = 0, 1, None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            import torch
            from accelerate import PartialState

            # A process may wait for the others for as long as their share takes.
            self._state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=14))
            self.index, self.count = self._state.process_index, self._state.num_processes

    @property
    def first(self) -> bool:
        """Whether this one writes what is written once."""
        return self.index == 0

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self._state is not None:
            self._state.wait_for_everyone()


class Units(NamedTuple):
    """The files of a pass whose units are all done, in order."""

    files: list[Path]

    def each(self, key: str) -> Iterator[NDArray[Any]]:
        """An array of every unit; one at a time is in memory."""
        for file in self.files:
            with np.load(file) as unit:
                yield unit[key]

    def joined(self, key: str) -> NDArray[Any]:
        """The units' arrays, one after the other along their first axis."""
        return np.concatenate(list(self.each(key)))

    def stacked(self, key: str) -> NDArray[Any]:
        """The units' arrays under a new first axis."""
        return np.stack(list(self.each(key)))


class Study:
    """One study's folder, see the module.

    Attributes:
        folder: The folder.
        manifest: What ``manifest.json`` holds.
        quiet: Whether to say nothing on stderr.
        processes: Who works on it.
    """

    def __init__(self, folder: Path, quiet: bool = True, processes: Processes | None = None) -> None:
        self.folder, self.quiet = folder, quiet
        self.processes = processes or Processes()
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
        """Start a study in ``folder``, or go on with the one that is there; ``names`` are for readers."""
        processes = Processes()
        if processes.first:
            _prepare(folder, kind, json.loads(json.dumps(settings)), names or {})
        processes.wait()
        return cls(folder, quiet, processes)

    @property
    def complete(self) -> bool:
        """Whether the results are there."""
        return bool(self.manifest["complete"])

    @property
    def work_folder(self) -> Path:
        """Where unfinished work is kept."""
        return self.folder / "work"

    def once(self, key: str, value: Callable[[], Any]) -> Any:
        """``value()``, worked out by the first process and kept in the manifest: a resumed study reads it."""
        if key not in self.manifest:
            if self.processes.first:
                self.manifest[key] = json.loads(json.dumps(value()))
                _write_json(self.folder / "manifest.json", self.manifest)
            self.processes.wait()
            self.manifest = read_manifest(self.folder)
        return self.manifest[key]

    def units(self, name: str, count: int, do: Callable[[int], Unit]) -> Units:
        """Keep the arrays of ``do(unit)`` for every unit; this process does its share of what is not done."""
        folder = self.work_folder / name
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{unit}.npz" for unit in range(count)]
        waiting = [unit for unit, file in enumerate(files) if not file.exists()]
        self.processes.wait()  # so that all of them share the same list
        mine = waiting[self.processes.index :: self.processes.count]
        with self._progress(name, len(mine)) as advance:
            for unit in mine:
                part = folder / f"{unit}.part"
                with part.open("wb") as file:
                    np.savez(file, **do(unit))  # type: ignore[arg-type]
                part.replace(files[unit])
                advance()
        self.processes.wait()
        return Units(files)

    def finish(self, tables: Mapping[str, pd.DataFrame], **fields: Any) -> None:
        """Write the result tables as parquet, mark the study complete and drop its work."""
        self.processes.wait()
        if self.processes.first:
            for name, frame in tables.items():
                path = self.folder / f"{name}.parquet"
                frame.to_parquet(path.with_suffix(".part"), index=False)
                path.with_suffix(".part").replace(path)
            self.manifest.update(fields, tables=sorted(tables), complete=True)
            _write_json(self.folder / "manifest.json", self.manifest)
            shutil.rmtree(self.work_folder, ignore_errors=True)
        self.processes.wait()
        self.manifest = read_manifest(self.folder)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The result tables of a complete study."""
        return {name: pd.read_parquet(self.folder / f"{name}.parquet") for name in self.manifest["tables"]}

    def say(self, sentence: str) -> None:
        """Tell the user something on stderr."""
        if not self.quiet:
            print(sentence, file=sys.stderr)

    @contextmanager
    def _progress(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar over this process's units that appears only where they take longer than a moment."""
        if self.quiet or not self.processes.first or not total or not sys.stderr.isatty():
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import Progress

        progress = Progress(console=Console(stderr=True), transient=True)
        task = progress.add_task(name, total=total)
        shown = threading.Timer(_QUIET_FOR, progress.start)
        shown.daemon = True
        shown.start()
        try:
            yield lambda: progress.advance(task)
        finally:
            shown.cancel()
            shown.join()
            if progress.live.is_started:
                progress.stop()


@contextmanager
def opened(
    kind: str, settings: Mapping[str, Any], names: Mapping[str, Any], folder: Folder, quiet: bool
) -> Iterator[Study]:
    """The study in ``folder``, or in a temporary one that goes away."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dispersion-") as temporary:
            yield Study.open(Path(temporary), kind, settings, names=names, quiet=quiet)
        return
    named = not isinstance(folder, StudyRoot)
    if isinstance(folder, StudyRoot):
        key = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
        folder = folder.root / f"{kind}-{key}"
    study = Study.open(Path(folder), kind, settings, names=names, quiet=quiet)
    yield study
    if not named and study.processes.first:
        study.say(f"the study is kept in {folder}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a study."""
    if not is_study(folder):
        raise UsageError(f"expected the folder of a study, got {folder}, which holds none")
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise UsageError(f"expected a study of format {FORMAT} in {folder}, got {manifest['format']}")
    return manifest


def is_study(folder: str | Path) -> bool:
    """Whether ``folder`` holds a study, complete or not, of this format or another version of it."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and str(manifest.get("format", "")).startswith("dispersion-lab/")


def read_study(folder: str | Path) -> Study:
    """A complete study, to be looked at."""
    study = Study(Path(folder))
    if not study.complete:
        raise UsageError(f"the study in {folder} is not complete; give its command again to resume it")
    return study


def _prepare(folder: Path, kind: str, settings: dict[str, Any], names: Mapping[str, Any]) -> None:
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder)
        if manifest["kind"] != kind:
            raise UsageError(
                f"{folder} holds a study of {manifest['kind']}, not of {kind}; pass another --study"
            )
        if changes := _changes(_flat(manifest["settings"]), _flat(settings)):
            raise UsageError(
                f"{folder} holds a study with other settings ({'; '.join(changes)}); pass another --study"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(path.name != "work" for path in folder.iterdir())):
        raise UsageError(f"{folder} exists and holds no study; pass another --study")
    (folder / "work").mkdir(parents=True, exist_ok=True)
    versions = {
        "lmeval_dispersion": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }
    started = {"format": FORMAT, "kind": kind, "complete": False, "settings": settings, "names": names}
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    _write_json(folder / "manifest.json", {**started, "created": created, "versions": versions})


# Words for the ends of the keys that hold content.
_CONTENT = {"weights": "the model's files", "adapter": "the adapter's files", "sha256": "the text's content"}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One phrase a setting that differs."""
    changes = []
    for key in sorted(k for k in {*old, *new} if old.get(k) != new.get(k)):
        content = _CONTENT.get(key.rpartition(".")[2])
        if content and old.get(key) and new.get(key):
            before, after = (re.sub(r"([0-9a-f]{10})[0-9a-f]{20,}", r"\1…", v[key]) for v in (old, new))
            changes.append(f"{content} changed since: {before}, now {after}")
        else:
            changes.append(f"{key} {old.get(key)!r}, now {new.get(key)!r}")
    return changes


def _flat(settings: Any, before: str = "") -> dict[str, Any]:
    """Settings with dotted keys, so that what differs can be named."""
    if isinstance(settings, list) and any(isinstance(value, dict) for value in settings):
        settings = {str(number): value for number, value in enumerate(settings)}
    if not isinstance(settings, dict):
        return {before[:-1]: settings}
    return {
        name: value
        for key, part in settings.items()
        for name, value in _flat(part, f"{before}{key}.").items()
    }


def _write_json(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
