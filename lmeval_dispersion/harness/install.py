"""Adding our tasks to lm-eval: files in its tasks folder, or a folder for ``--include_path``.

Our configurations are written for ``lm_eval/tasks/lmeval_dispersion/FAMILY/``, from where they
include lm-eval's own files by relative paths. None of this imports lm-eval.
"""

from __future__ import annotations

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
from lmeval_dispersion.files import hashed
from lmeval_dispersion.installation import cache_folder, data_folder

FOLDER = "lmeval_dispersion"
_PATTERN = re.compile(r"^# for NAME in ([^;\n]+)(?:; CATEGORY = (\w+))?\n", re.MULTILINE)
_INCLUDE = re.compile(r"^(\s*(?:- )?include: |\s+- )\.\./\.\./(\S+)$", re.MULTILINE)

State = Literal["enabled", "out of date", "disabled"]


class Status(NamedTuple):
    """Whether lm-eval finds the dispersion tasks without ``--include_path``.

    Attributes:
        state: ``enabled``; ``out of date`` if another version's files are there; or ``disabled``.
        folder: The folder in lm-eval where the tasks are, or would be.
        files: Number of task files that this version has.
    """

    state: State
    folder: Path
    files: int


def task_files() -> dict[str, str]:
    """Return this version's task configurations: each file's path in our folder -> its content.

    A stored file that begins with ``# for NAME in a b c`` is a pattern: it gives one file for each
    of these names, with ``NAME`` replaced in path and content. If the line ends in
    ``; CATEGORY = x``, the word ``CATEGORY`` is replaced by x, and more such lines may follow.
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
    """Return the names of all dispersion tasks and groups of this version, sorted."""
    texts = "\n".join(task_files().values())
    return sorted(re.findall(r"^(?:task|group): (\S+)$", texts, re.MULTILINE))


def harness_tasks() -> Path:
    """Return the folder where lm-eval keeps its task configurations.

    Raises:
        MissingExtraError: lm-eval is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            "lm-eval is not installed; run: pip install 'lmeval-dispersion[models]'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


def status() -> Status:
    """Return whether the dispersion tasks in lm-eval are enabled, disabled or out of date.

    The `Status` also has their folder and the number of their files.

    Raises:
        MissingExtraError: lm-eval is not installed.
    """
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
    """Write this version's task configurations into lm-eval's folder, unless it has them already.

    Those of another version are removed first.

    Raises:
        UsageError: The folder cannot be written.
        MissingExtraError: lm-eval is not installed.
    """
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
            f"{folder} cannot be written ({error.strerror}); use `dispersion run` in place of `lm_eval`, "
            'or `lm_eval --include_path "$(dispersion enable path)"`'
        ) from error


def disable() -> None:
    """Remove our task configurations from lm-eval's folder, whichever version wrote them.

    Raises:
        UsageError: The files cannot be removed.
        MissingExtraError: lm-eval is not installed.
    """
    folder = harness_tasks() / FOLDER
    try:
        _remove(folder)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be removed ({error.strerror}); remove it as the user who owns it"
        ) from error


def tasks_path() -> Path:
    """Return a folder with our task configurations, to pass to lm-eval's ``--include_path``.

    They include lm-eval's own files by absolute path. The folder is created in the user's cache,
    once for each version of the configurations and each installation of lm-eval.

    Raises:
        UsageError: The cache cannot be written.
        MissingExtraError: lm-eval is not installed.
    """
    theirs = harness_tasks().as_posix()
    files = {}
    for name, text in task_files().items():
        files[name] = _INCLUDE.sub(lambda match: f"{match[1]}{theirs}/{match[2]}", text)
    key = hashed(json.dumps(files, sort_keys=True))[:16]
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
            f"{root} cannot be written ({error.strerror}); set XDG_CACHE_HOME to another folder"
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
