"""Making lm-eval find our tasks: files in its own tasks folder, or a folder for ``--include_path``.

Our configurations are written for ``lm_eval/tasks/lmeval_dispersion/FAMILY/``: their includes name lm-eval's
own files relative to there, and one file may stand for many, see :func:`task_files`. lm-eval itself need not
be imported for any of this.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from lmeval_dispersion.errors import HarnessError, MissingExtraError, UsageError
from lmeval_dispersion.paths import data_folder

FOLDER = "lmeval_dispersion"
TASKS = "tasks"  # the last part of the entry point's name, see lmeval_dispersion.harness.plugin
_PATTERN = re.compile(r"^# for NAME in ([^;\n]+)(?:; CATEGORY = (\w+))?\n", re.MULTILINE)
_INCLUDE = re.compile(r"^(\s*(?:- )?include: |\s+- )(\.\./\.\./)(\S+)$", re.MULTILINE)

# Beside saying whose this is, a file at the top makes pip remove the whole folder and not only what is in it.
_NOTE = "README.md"
_NOTE_TEXT = "Written by `dispersion enable` of lmeval-dispersion; `dispersion enable --undo` removes it.\n"

State = Literal["enabled", "out of date", "disabled"]


class Status(NamedTuple):
    """Whether lm-eval finds the tasks by itself.

    Attributes:
        state: ``out of date`` where another version of this package wrote the files.
        folder: Where they are or would be.
        files: How many this version has.
        editable: Whether lm-eval is a checkout, which then shows the files as untracked.
        owned: Whether uninstalling this package removes the files: they are in its RECORD.
    """

    state: State
    folder: Path
    files: int
    editable: bool
    owned: bool


def task_files() -> dict[str, str]:
    """Path within the tasks folder -> content of every configuration of this version.

    A file that begins with ``# for NAME in a b c`` is a pattern: it stands for one file each, with ``NAME``
    replaced in path and content. Where such a line ends in ``; CATEGORY = x``, that word is replaced too, and
    more lines may follow.
    """
    root = data_folder("task_configs")
    files: dict[str, str] = {}
    for path in sorted(root.rglob("*.yaml")):
        place, text = path.relative_to(root).as_posix(), path.read_text("utf-8")
        body = _PATTERN.sub("", text)
        for names, category in _PATTERN.findall(text):
            own = body.replace("CATEGORY", category)
            files |= {place.replace("NAME", name): own.replace("NAME", name) for name in names.split()}
        if body == text:
            files[place] = text
    return dict(sorted(files.items()))


def task_names() -> list[str]:
    """Names of all tasks and groups of this version."""
    found = (re.search(r"^(?:task|group): (\S+)$", text, re.MULTILINE) for text in task_files().values())
    return sorted(match[1] for match in found if match)


def harness_tasks() -> Path:
    """lm-eval's folder of tasks.

    Raises:
        MissingExtraError: lm-eval is not installed.
        HarnessError: It has no such folder.
    """
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("lm-eval is not installed; pip install 'lmeval-dispersion[models]'")
    folder = Path(next(iter(spec.submodule_search_locations))) / "tasks"
    if not folder.is_dir():
        raise HarnessError(f"expected lm-eval's tasks in {folder}, which is no folder; reinstall lm-eval")
    return folder


def status() -> Status:
    """Whether the tasks are enabled, by comparing what is there with what this version would write."""
    folder = harness_tasks() / FOLDER
    wanted = task_files()
    there = {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in sorted(folder.rglob("*.yaml"))
    }
    state: State = "disabled" if not there else "enabled" if there == wanted else "out of date"
    return Status(state, folder, len(wanted), _editable(), _owned(folder))


def enable() -> Status:
    """Write the configurations into lm-eval's tasks folder; writing them again changes nothing.

    Raises:
        UsageError: The folder cannot be written; the message names the ways that need no writing.
    """
    before = status()
    if before.state != "enabled":
        try:
            _remove(before.folder)
            for name, text in task_files().items():
                path = before.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            (before.folder / _NOTE).write_text(_NOTE_TEXT, "utf-8")
        except OSError as error:
            shutil.rmtree(before.folder, ignore_errors=True)
            raise UsageError(
                f"{before.folder} cannot be written: {error.strerror}; use `dispersion run` in place of "
                '`lm_eval`, or `--include_path "$(dispersion enable --path)"`'
            ) from error
    _enter_in_record(before.folder, [before.folder / _NOTE, *sorted(before.folder.rglob("*.yaml"))])
    return status()


def disable() -> Status:
    """Remove what :func:`enable` wrote, and nothing else.

    Raises:
        UsageError: The folder cannot be written.
    """
    before = status()
    try:
        _remove(before.folder)
    except OSError as error:
        raise UsageError(
            f"{before.folder} cannot be removed: {error.strerror}; remove it as its owner"
        ) from error
    _enter_in_record(before.folder, [])
    return before


def tasks_path() -> Path:
    """A folder for ``--include_path``: our configurations with lm-eval's own named by absolute path.

    It is made in the user's cache, once for each version and each lm-eval.
    """
    theirs = harness_tasks()
    files = {
        name: _INCLUDE.sub(lambda m: f"{m[1]}{theirs.as_posix()}/{m[3]}", text)
        for name, text in task_files().items()
    }
    key = hashlib.sha256(json.dumps([TASKS, files], sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmeval-dispersion"
    folder = root / f"tasks-{key}"
    if folder.is_dir():
        return folder / TASKS
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root, prefix=".tasks-"))
        for name, text in files.items():
            path = made / TASKS / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    except OSError as error:
        raise UsageError(f"{root} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    return folder / TASKS


def _remove(folder: Path) -> None:
    """Remove our files and the folders that they leave empty; a user's own files there stay."""
    for path in sorted(folder.rglob("*.yaml")):
        path.unlink()
    if (folder / _NOTE).is_file():
        (folder / _NOTE).unlink()
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        if not any(inner.iterdir()):
            inner.rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _own() -> Distribution | None:
    try:
        return distribution("lmeval-dispersion")
    except PackageNotFoundError:
        return None


def _editable() -> bool:
    try:
        text = distribution("lm_eval").read_text("direct_url.json")
    except PackageNotFoundError:
        return True  # on the path without being installed
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


def _owned(folder: Path) -> bool:
    own = _own()
    files = own.files if own is not None and folder.is_dir() else None
    return any(f.parts[:3] == ("lm_eval", "tasks", FOLDER) for f in files or [])


def _enter_in_record(folder: Path, files: list[Path]) -> None:
    """Make our RECORD list exactly ``files`` under ``folder``, as if they had come with our wheel.

    pip and uv then remove them when this package is uninstalled, upgraded or reinstalled, and leave a user's
    own files there alone (tried with pip 23.2 and uv 0.13). Not done where lm-eval is in another place than
    this package: an entry that leaves the environment is skipped by both, and uv calls the RECORD invalid.
    """
    own = _own()
    text = own.read_text("RECORD") if own is not None else None
    site = Path(str(own.locate_file(""))).resolve() if own is not None else None
    if own is None or text is None or site is None or not folder.resolve().is_relative_to(site):
        return
    record = next((Path(str(own.locate_file(f))) for f in own.files or [] if f.name == "RECORD"), None)
    if record is None:
        return
    prefix = folder.resolve().relative_to(site).as_posix() + "/"
    rows = [row for row in csv.reader(io.StringIO(text)) if row and not row[0].startswith(prefix)]
    for path in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        place = prefix + path.relative_to(folder).as_posix()
        rows.append([place, f"sha256={digest}", str(path.stat().st_size)])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    if out.getvalue() == text:
        return
    try:
        temporary = record.with_name("RECORD.tmp")
        temporary.write_text(out.getvalue(), "utf-8")
        temporary.replace(record)
    except OSError as error:
        raise UsageError(
            f"{record} cannot be written: {error.strerror}; `pip uninstall` would leave {folder} behind: run "
            "`dispersion enable --undo` before it"
        ) from error
