"""Reads a race's folder: each value is checked by type and range, names as plain file names.

The folder may come from a colleague, a cache or a bucket. No checkpoint is loaded just because the
folder names it: see :meth:`folder.RaceFolder.may_load`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from lmeval_dispersion.errors import DispersionError, HarnessError, UsageError
from lmeval_dispersion.files import json_in
from lmeval_dispersion.layouts import Label, PlainName, Text, checked
from lmeval_dispersion.racing.lineup import Entry

T = TypeVar("T")
SETTINGS = "race.json"
SCHEMA = "dispersion-race-folder/2"
#: Of one number of shared questions for all; read as this version's.
_FORMER = "dispersion-race-folder/1"
#: What reading samples and states raises whose values are of other types.
WRONG_CONTENT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
#: Errors of the system for a file that is not there any more, or is of another kind.
_OTHER_FILES = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_REPAIR = "name another folder, or remove the folder of this race and begin the race again"


class _NeededKeys(TypedDict):
    date: PlainName
    checkpoints: Sequence[Entry]
    notes: Sequence[Text]
    tasks: Text
    seed: Annotated[int, 0]
    drawn: Sequence[tuple[PlainName, Annotated[int, 0]]]
    turns: Mapping[Label, Sequence[Label]]
    order: Literal["rows", "block"]


class _RaceFile(_NeededKeys, total=False):
    """The layout of ``race.json``; `RaceFolder.settings` are compared with the command's."""

    which: Mapping[str, Any]
    identity: Mapping[Label, Any]  # of each task's questions and prompts
    times: Annotated[int, 0]
    error: Annotated[float, 0, 1]
    margin: Annotated[float, 0, 1]
    top: Annotated[int, 1]
    answers: Text
    shared: Mapping[Label, Annotated[int, 0]]  # number of shared questions of a checkpoint
    weights: Sequence[Annotated[float, 0]] | None  # of the drawn questions, where they differ
    step: Annotated[int, 1]  # questions of a bet's step
    margins: Sequence[
        tuple[Annotated[int, 0], Annotated[float, 0, 1]]
    ]  # questions asked, margin shown
    may_stop: bool  # whether shared answers may have ended the training that made the checkpoints
    split: Annotated[int, 0]  # checkpoints among which half of the error is split


class _OlderFile(TypedDict):
    """What is read of ``race.json`` by version 0.2, whose entries begin with the label."""

    date: PlainName
    checkpoints: Sequence[Sequence[Any]]
    notes: Sequence[Text]


def kept_race(path: Path, *, older: bool = False) -> dict[str, Any]:
    """Read ``race.json`` in a race's folder; the result is empty if there is no such file.

    Args:
        path: The folder.
        older: Whether a file of version 0.2 is accepted as well.

    Raises:
        UsageError: The file is damaged or lists a label twice, or was written by another program or
            another version.
    """
    file = path / SETTINGS
    try:
        content = json_in(file)
        if not isinstance(content, dict) or not content.keys() >= {"checkpoints", "notes", "date"}:
            raise ValueError(f"{SETTINGS} of another program")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"expected the folder of a race, but {path} cannot be read as one ({error}); name another "
            "folder"
        ) from error
    if content.get("schema") in (SCHEMA, _FORMER):
        kept: dict[str, Any] = {**checked(_RaceFile, content, file, _REPAIR)}
        labels = Counter(entry.label for entry in kept["checkpoints"])
        twice = [label for label, number in labels.items() if number > 1]
        if twice:
            raise UsageError(
                f"{file} is damaged (`checkpoints`: expected each label once, got {twice[0][:200]} twice); "
                f"{_REPAIR}"
            )
        kept["checkpoints"] = [_where_it_lies(entry, path) for entry in kept["checkpoints"]]
        return kept
    if not older or "schema" in content:
        raise UsageError(
            f"expected a race by this version of lmeval-dispersion in {path}, got one by another "
            "version; name another folder"
        )
    return dict(checked(_OlderFile, content, file, _REPAIR))


def _where_it_lies(entry: Entry, folder: Path) -> Entry:
    """An entry, with its present place where its folder was moved together with the race's.

    Where the folder that it names is gone, the end of its path is looked for next to the race's
    ``folder``: ``checkpoint-10`` next to ``race-sums``, both in a run. Its answers count only where
    the files have the sizes and times that they had.
    """
    arguments = dict(entry.arguments)
    for key in ("pretrained", "peft", "tokenizer"):
        place = Path(arguments.get(key, ""))
        if not place.is_absolute() or place.exists():
            continue
        around = folder.absolute().parent
        for begin in range(1, len(place.parts)):
            moved = around.joinpath(*place.parts[begin:])
            if moved.is_dir():
                arguments[key] = os.path.realpath(moved)
                break
    return entry._replace(arguments=arguments)


class _Asked(TypedDict):
    label: Label
    questions: Annotated[int, 0]
    of: Annotated[int, 0]


class OlderResults(TypedDict):
    """The part of a checkpoint's results that is read from a race of version 0.2."""

    race: _Asked


class _RaceEntry(_Asked):
    seconds: Annotated[float, 0]
    bytes: dict[PlainName, Annotated[int, 0]]
    judges: dict[PlainName, tuple[Text, Text]]
    weights: list[Any]
    manifest: dict[str, Any]


class _Race(_RaceEntry, total=False):
    as_base: bool
    stored: Annotated[int, 0]


class _Config(TypedDict):
    model_args: dict[str, Any]


class RaceResults(TypedDict):
    """The part of a checkpoint's ``results_DATE.json`` that a race reads."""

    race: _Race
    config: _Config
    configs: dict[PlainName, dict[str, Any]]
    chat_template_sha: Text | None


def race_results(file: Path, layout: type[T]) -> T:
    """Read a checkpoint's results in a race's folder.

    Args:
        file: The results file.
        layout: The TypedDict that its content must fit, such as `RaceResults`.

    Returns:
        The content. Keys that the layout does not declare are kept.

    Raises:
        UsageError: The file is damaged.
        OSError: The file cannot be read.
    """
    repair = "remove the file's folder, then run the same command to ask the checkpoint again"
    try:
        content = json_in(file)
    except ValueError as error:
        raise UsageError(f"{file} is damaged ({error}); {repair}") from error
    return checked(layout, content, file, repair)


def not_as_left(folder: Path, error: Exception, step: str) -> DispersionError:
    """Return the error for a checkpoint's folder that was changed, or cannot be read or written.

    Args:
        folder: The folder.
        error: The error in reading or writing.
        step: What to do next if files were changed. The message leaves it out if the disk or the
            permissions are to blame, since the files are good then.
    """
    if isinstance(error, OSError) and not isinstance(error, _OTHER_FILES):
        return DispersionError(
            f"could not read or write {error.filename or folder}: {error.strerror or error}; check its "
            "permissions and its disk, then run the same command to go on"
        )
    return HarnessError(f"{folder} is not as the race left it ({error}); {step}")
