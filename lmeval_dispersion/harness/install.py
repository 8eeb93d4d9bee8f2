"""Adding our tasks to lm-eval: files in its tasks folder, or a folder for ``--include_path``.

Our configurations are written for ``lm_eval/tasks/lmeval_dispersion/FAMILY/``: their includes name lm-eval's
own files relative to there. None of this imports lm-eval.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.installation import cache_folder, data_folder

FOLDER = "lmeval_dispersion"
_PATTERN = re.compile(r"^# for NAME in ([^;\n]+)(?:; CATEGORY = (\w+))?\n", re.MULTILINE)
_INCLUDE = re.compile(r"^(\s*(?:- )?include: |\s+- )\.\./\.\./(\S+)$", re.MULTILINE)

State = Literal["enabled", "out of date", "disabled"]


class Status(NamedTuple):
    """Whether lm-eval lists the tasks without ``--include_path``; their folder, and their number of files."""

    state: State
    folder: Path
    files: int


def task_files() -> dict[str, str]:
    """Path within the tasks folder -> content of every configuration of this version.

    A file that begins with ``# for NAME in a b c`` is a pattern for one file each, with ``NAME`` replaced in
    path and content. Where such a line ends in ``; CATEGORY = x``, that word is replaced too, and
    more lines may follow.
    """
    root = data_folder("task_configs")
    files: dict[str, str] = {}
    for path in sorted(root.rglob("*.yaml")):
        place = path.relative_to(root).as_posix()
        text = path.read_text("utf-8")
        body = _PATTERN.sub("", text)
        if body == text:
            files[place] = text
        for names, category in _PATTERN.findall(text):
            filled = body.replace("CATEGORY", category)
            for name in names.split():
                files[place.replace("NAME", name)] = filled.replace("NAME", name)
    return dict(sorted(files.items()))


def task_names() -> list[str]:
    """Names of all dispersion tasks and groups in this version of the package, sorted."""
    texts = "\n".join(task_files().values())
    return sorted(re.findall(r"^(?:task|group): (\S+)$", texts, re.MULTILINE))


def harness_tasks() -> Path:
    """lm-eval's folder of tasks; MissingExtraError without lm-eval."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            "lm-eval is not installed; run: pip install 'lmeval-dispersion[models]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


def status() -> Status:
    """Whether the tasks are enabled, by this version's files; MissingExtraError without lm-eval."""
    folder = harness_tasks() / FOLDER
    wanted = task_files()
    there = {
        path.relative_to(folder).as_posix(): path.read_text("utf-8")
        for path in folder.rglob("*.yaml")
    }
    state: State = "out of date"
    if not there:
        state = "disabled"
    elif there == wanted:
        state = "enabled"
    return Status(state, folder, len(wanted))


def enable() -> None:
    """Write the configurations into lm-eval's tasks folder, if not there; UsageError if not writable."""
    folder = harness_tasks() / FOLDER
    if status().state == "enabled":
        return
    try:
        _remove(folder)
        _write(folder, task_files())
    except OSError as error:
        with suppress(OSError):
            _remove(folder)
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}; use `dispersion run` in place of "
            '`lm_eval`, or `--include_path "$(dispersion enable path)"`'
        ) from error


def disable() -> None:
    """Remove what :func:`enable` of any version wrote; UsageError if it cannot be removed."""
    folder = harness_tasks() / FOLDER
    try:
        _remove(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be removed: {error.strerror}; remove it as its owner"
        ) from error


def tasks_path() -> Path:
    """A folder for ``--include_path``: our configurations with lm-eval's own named by absolute path.

    It is created in the user's cache, once for each version and each lm-eval; UsageError if it cannot be.
    """
    theirs = harness_tasks().as_posix()
    files = {}
    for name, text in task_files().items():
        files[name] = _INCLUDE.sub(lambda match: f"{match[1]}{theirs}/{match[2]}", text)
    key = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder(f"tasks-{key}")
    root = folder.parent
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root, prefix=".tasks-"))
        _write(made, files)
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    except OSError as error:
        raise UsageError(
            f"{root} cannot be written: {error.strerror}; set XDG_CACHE_HOME"
        ) from error
    return folder


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def _remove(folder: Path) -> None:
    """Remove the YAML files of our folder, and folders left empty; other files stay."""
    for path in folder.rglob("*.yaml"):
        path.unlink()
    for inner in [*sorted(folder.rglob("*"), reverse=True), folder]:
        if inner.is_dir() and not any(inner.iterdir()):
            inner.rmdir()
