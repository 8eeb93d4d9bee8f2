"""A study, the folder of one analysis: settings, work that can be stopped and resumed, results.

A study is a folder with ``manifest.json`` (``{"format": "dispersion-lab/2", "kind": "law", "complete": true,
"settings": {...}, ...}``), result tables as parquet, and, until it is complete, ``work/``. Its settings hold
the content of its inputs (digests, commits): a changed text or a retrained model makes another study.

Work is cut into numbered units whose content is settled before the first one starts; process r of R takes
the units r, r + R, .... A unit writes its own rows of memory-mapped arrays and adds to integer
accumulators, so neither the order of units, nor who did them, nor a stop in between changes a bit of the
result. What is done is recorded every few seconds, after the rows are on disk; a killed process loses those
seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.version import __version__

FORMAT = "dispersion-lab/2"

_FIRST_RECORD = 0.5  # seconds until what is done is first recorded
_RECORD_EVERY = 5.0  # and between later records, at least
_OVERHEAD = 20.0  # and so many times the time that one record takes


class Under(NamedTuple):
    """A folder of studies; each gets a folder of its own in it, named for its kind and settings."""

    root: Path


Folder = str | Path | Under | None
Accumulators = dict[str, NDArray[np.int64]]


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


class Study:
    """One study's folder, see the module.

    Attributes:
        folder: The folder.
        manifest: What ``manifest.json`` holds.
        processes: Who works on it.
    """

    def __init__(
        self, folder: Path, manifest: dict[str, Any], processes: Processes, quiet: bool = True
    ) -> None:
        self.folder, self.manifest, self.processes, self.quiet = folder, manifest, processes, quiet
        self._rows: dict[str, Any] = {}

    @classmethod
    def open(
        cls,
        folder: Path,
        kind: str,
        settings: dict[str, Any],
        *,
        names: dict[str, Any] | None = None,
        quiet: bool = True,
    ) -> Study:
        """Start a study in ``folder``, or go on with the one that is there; ``names`` are for readers.

        Raises:
            UsageError: The folder holds something else, or a study with other settings.
        """
        processes = Processes()
        wanted = json.loads(json.dumps(settings))
        if processes.first:
            _prepare(folder, kind, wanted, names or {})
        processes.wait()
        return cls(folder, read_manifest(folder), processes, quiet)

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

    def rows(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> Any:
        """A memory-mapped array that units write their rows of; zeros at first. Shared by all processes."""
        path = self.work_folder / f"{name}.rows.npy"
        if self.processes.first and not path.exists():
            part = path.with_suffix(".part.npy")
            np.lib.format.open_memmap(part, "w+", dtype, shape).flush()
            part.replace(path)
        self.processes.wait()
        self._rows[name] = np.load(path, mmap_mode="r+")
        return self._rows[name]

    def rows_read(self, name: str) -> Any:
        """An array that :meth:`rows` made, to be read."""
        return np.load(self.work_folder / f"{name}.rows.npy", mmap_mode="r")

    def work(
        self, name: str, units: int, do: Callable[[int], None], accumulators: Accumulators | None = None
    ) -> Accumulators:
        """Call ``do(unit)`` for every unit that is not done, this process's share; then wait for the others.

        ``do`` may add to ``accumulators`` in place; the sums over all units and processes come back.
        """
        start = {key: np.zeros_like(array) for key, array in (accumulators or {}).items()}
        if self.processes.first:
            # One record from here on, so that this session's process numbers collide with no older file.
            units_done, sums = self._recorded(name, start)
            self._record(name, "base", units_done, sums)
            for path in self._records(name):
                if path.name != f"{name}.base.npz":
                    path.unlink()
        self.processes.wait()
        done, _ = self._recorded(name, start)
        waiting = np.setdiff1d(np.arange(self.processes.index, units, self.processes.count), done)
        finished: list[int] = []
        last = time.monotonic()
        pause = _FIRST_RECORD
        with self._progress(name, len(waiting)) as advance:
            try:
                for unit in waiting.tolist():
                    do(unit)
                    finished.append(unit)
                    advance()
                    if time.monotonic() - last > pause:
                        begun = time.monotonic()
                        self._checkpoint(name, finished, accumulators)
                        last = time.monotonic()
                        pause = max(_RECORD_EVERY, _OVERHEAD * (last - begun))
            finally:
                self._checkpoint(name, finished, accumulators)
        self.processes.wait()
        return self._recorded(name, start)[1]

    def finish(self, tables: dict[str, pd.DataFrame], **fields: Any) -> None:
        """Write the result tables as parquet, mark the study complete and drop its work."""
        self.processes.wait()
        if self.processes.first:
            for name, frame in tables.items():
                path = self.folder / f"{name}.parquet"
                frame.to_parquet(path.with_suffix(".part"), index=False)
                path.with_suffix(".part").replace(path)
            self.manifest.update(fields, tables=sorted(tables), complete=True)
            _write_json(self.folder / "manifest.json", self.manifest)
        self._rows.clear()
        self.processes.wait()
        if self.processes.first:
            shutil.rmtree(self.work_folder, ignore_errors=True)
        self.manifest = read_manifest(self.folder)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The result tables of a complete study."""
        return {name: pd.read_parquet(self.folder / f"{name}.parquet") for name in self.manifest["tables"]}

    def _checkpoint(self, name: str, finished: list[int], accumulators: Accumulators | None) -> None:
        for array in self._rows.values():
            array.flush()
        self._record(name, str(self.processes.index), np.array(finished, dtype=np.int64), accumulators or {})

    def _records(self, name: str) -> list[Path]:
        """The base first: it may already hold what a file beside it holds."""
        paths = self.work_folder.glob(f"{name}.*.npz")
        return sorted(paths, key=lambda path: path.name != f"{name}.base.npz")

    def _recorded(self, name: str, start: Accumulators) -> tuple[NDArray[np.int64], Accumulators]:
        units = np.empty(0, dtype=np.int64)
        sums = {key: array.copy() for key, array in start.items()}
        for path in self._records(name):
            with np.load(path) as record:
                mine = record["units"]
                if len(mine) and np.isin(mine, units).all():
                    continue  # a stop between writing the base and removing what went into it
                units = np.concatenate([units, mine])
                for key in sums:
                    sums[key] += record[f"sum.{key}"]
        return units, sums

    def _record(self, name: str, who: str, units: NDArray[np.int64], sums: Accumulators) -> None:
        path = self.work_folder / f"{name}.{who}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, units=units, **{f"sum.{key}": array for key, array in sums.items()})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    @contextmanager
    def _progress(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        if self.quiet or not self.processes.first or not total:
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(name, total=total)
            yield lambda: progress.advance(task)


@contextmanager
def opened(
    kind: str, settings: dict[str, Any], names: dict[str, Any], folder: Folder, quiet: bool
) -> Iterator[Study]:
    """The study in ``folder``, or in a temporary one that goes away."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="dispersion-") as temporary:
            yield Study.open(Path(temporary), kind, settings, names=names, quiet=quiet)
        return
    if isinstance(folder, Under):
        key = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
        folder = folder.root / f"{kind}-{key}"
    yield Study.open(Path(folder), kind, settings, names=names, quiet=quiet)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a study.

    Raises:
        UsageError: ``folder`` holds no study.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"expected the folder of a study, got {folder}, without a manifest") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise UsageError(f"expected a study of format {FORMAT} in {folder}, got {found}")
    return manifest


def is_study(folder: str | Path) -> bool:
    """Whether ``folder`` holds a study, complete or not, of this format or another version of it."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and str(manifest.get("format", "")).startswith("dispersion-lab/")


def read_study(folder: str | Path) -> Study:
    """A complete study, to be looked at.

    Raises:
        UsageError: No study is there, or it is not complete.
    """
    manifest = read_manifest(Path(folder))
    if not manifest["complete"]:
        raise UsageError(f"the study in {folder} is not complete; give its command again to resume it")
    return Study(Path(folder), manifest, Processes())


def _prepare(folder: Path, kind: str, settings: dict[str, Any], names: dict[str, Any]) -> None:
    if (folder / "manifest.json").exists():
        manifest = read_manifest(folder)
        if manifest["kind"] != kind:
            raise UsageError(
                f"{folder} holds a study of {manifest['kind']}, not of {kind}; pass another --run"
            )
        if changes := _changes(_flat(manifest["settings"]), _flat(settings)):
            raise UsageError(
                f"{folder} holds a study with other settings ({'; '.join(changes)}); pass another --run"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(path.name != "work" for path in folder.iterdir())):
        raise UsageError(f"{folder} exists and holds no study; pass another --run")
    (folder / "work").mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "complete": False,
        "settings": settings,
        "names": names,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": _versions(["torch", "transformers"]),
    }
    _write_json(folder / "manifest.json", manifest)


# What the ends of content's keys say to a reader.
_CONTENT = {"weights": "the model's files", "adapter": "the adapter's files", "sha256": "the text's content"}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One phrase a setting that differs."""
    changes = []
    for key in sorted(k for k in {*old, *new} if old.get(k) != new.get(k)):
        what = _CONTENT.get(key.rpartition(".")[2])
        if what and old.get(key) and new.get(key):
            changes.append(f"{what} changed since: {_short(old[key])}, now {_short(new[key])}")
        else:
            changes.append(f"{key} {old.get(key)!r}, now {new.get(key)!r}")
    return changes


def _short(digest: str) -> str:
    return re.sub(r"([0-9a-f]{10})[0-9a-f]{20,}", r"\1…", digest)


def _flat(settings: Any, before: str = "") -> dict[str, Any]:
    """Settings with dotted keys, so that what differs can be named."""
    if isinstance(settings, dict):
        pairs = [(f"{before}{key}", value) for key, value in settings.items()]
    elif isinstance(settings, list) and any(isinstance(value, dict) for value in settings):
        pairs = [(f"{before}{number}", value) for number, value in enumerate(settings)]
    else:
        return {before[:-1]: settings}
    return {name: found for key, value in pairs for name, found in _flat(value, f"{key}.").items()}


def _versions(packages: Sequence[str]) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"lmeval_dispersion": __version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _write_json(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
