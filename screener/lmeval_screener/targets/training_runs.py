"""Folders of training runs: which checkpoints lie in them, and which step of which run a folder is."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from lmeval_screener.targets.names import WEIGHTS
from lmeval_screener.targets.target import Target, parse_target, step_key

# checkpoint-500 (Trainer, TRL), step-500 (torchtitan), step_500 (NeMo-RL), epoch_0_step_500 and
# model--step=500-consumed_samples=... (NeMo), iter_0000500 (Megatron), global_step500 (DeepSpeed, verl).
_STEP_FOLDER = re.compile(
    r"(?:.+[-_])?(?:checkpoint|ckpt|global_step|step|iteration|iter)[-_=]?(\d+)"
    r"(?:[-_](?:hf|last|final|consumed_samples.*|tokens?.*))?",
    re.IGNORECASE,
)
STORE_FOLDERS = ("checkpoints", "checkpoint")  # where some trainers keep the folders of steps
DEPTH = 3  # how far below a step's folder its model may lie: actor/huggingface, policy/weights/hf


class Folder(Protocol):
    """The part of a folder that is needed: a ``Path`` has it, and so has a listing of a storage."""

    @property
    def name(self) -> str:
        """Its last part."""
        ...

    def __truediv__(self: F, name: str) -> F:
        """A file or folder in it."""
        ...

    def iterdir(self: F) -> Iterable[F]:
        """The files and folders in it."""
        ...

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        ...

    def is_file(self) -> bool:
        """Whether it is a file."""
        ...


F = TypeVar("F", bound=Folder)


def parse_targets(texts: Iterable[str], tokenizer: str | None = None) -> list[Target]:
    """The targets that texts name, as :func:`parse_target` reads each; a training run is its checkpoints.

    A glob of paths is the folders and files of weights that match. Runs and globs in a storage other than a
    folder are expanded when they are screened: that takes requests.
    """
    targets = []
    for path in (path for text in texts for path in _matching_paths(text)):
        target = parse_target(path, tokenizer)
        folders = run_checkpoints(Path(target.repo)) if target.local else []
        targets += [replace(target, repo=str(folder)) for folder in folders] or [target]
    return targets


def _matching_paths(text: str) -> list[str]:
    """Paths by step, for a glob that is written like a path (``./x*``, ``/x/*``, ``~/x?``); else the text."""
    path = text.removeprefix("file://")
    if not path.startswith((".", "/", "~")) or not glob.has_magic(path) or Path(path).expanduser().exists():
        return [text]
    paths = glob.glob(str(Path(path).expanduser()))
    return sorted((p for p in paths if p.endswith(WEIGHTS) or Path(p).is_dir()), key=step_key) or [text]


def is_step(name: str) -> bool:
    """Whether a folder's name is that of a step of a training run."""
    return _STEP_FOLDER.fullmatch(name) is not None


def run_checkpoints(folder: F) -> list[F]:
    """The checkpoints of a training run's folder, by step; empty where it is none.

    They lie in folders named after a step (``checkpoint-500``, ``step_500``, ``iter_0000500``,
    ``global_step500``), in ``folder`` or in its ``checkpoints``; the model itself may lie deeper, as in
    ``global_step_500/actor/huggingface``. A model in the run's own folder, the final one, comes last.
    """
    for place in (folder, *(folder / name for name in STORE_FOLDERS)):
        steps = _subfolders(place, is_step)
        if steps:
            models = [_model_folder(step) for step in sorted(steps, key=lambda step: step_key(step.name))]
            return [*models, *([folder] if _has_weights(folder) else [])]
    if is_step(folder.name) and (inner := _model_folder(folder)) != folder:
        return [inner]
    return []


def run_and_step(folder: str) -> tuple[str, str] | None:
    """The folder of a training run and the name of one of its steps, of a checkpoint's folder; else None.

    >>> run_and_step("out/run1/checkpoint-500"), run_and_step("titan/checkpoint/step-50"), run_and_step("a/b")
    (('out/run1', 'checkpoint-500'), ('titan', 'step-50'), None)
    """
    path = Path(folder)
    for place in (path, *list(path.parents)[:DEPTH]):
        if is_step(place.name):
            run = place.parent.parent if place.parent.name in STORE_FOLDERS else place.parent
            return str(run), place.name
    return None


def training_and_step(repo: str, requested_revision: str | None, *, local: bool) -> tuple[str, str | None]:
    """The training of a screened checkpoint, and its step's name: a revision, or a folder of a run."""
    return (run_and_step(repo) or (repo, None)) if local else (repo, requested_revision)


def _model_folder(folder: F) -> F:
    """The nearest folder with configuration and weights, from this one down; else with either; else itself.

    Shards of a distributed checkpoint are safetensors too, often above the folder where they are joined.
    """
    levels = [[folder]]
    for _ in range(DEPTH):
        inner = (sub for place in levels[-1] for sub in _subfolders(place, lambda name: name[0] != "."))
        levels.append(list(inner))
    places = [place for level in levels for place in level]
    whole = (place for place in places if _has_config(place) and _has_weights(place))
    return next(whole, next(filter(_has_model, places), folder))


def _subfolders(folder: F, wanted: Callable[[str], bool]) -> list[F]:
    try:
        places = [place for place in folder.iterdir() if wanted(place.name) and place.is_dir()]
        return sorted(places, key=lambda place: place.name)
    except OSError:
        return []  # a folder that cannot be listed fails when it is opened


def _has_model(folder: Folder) -> bool:
    return _has_config(folder) or _has_weights(folder)


def _has_config(folder: F) -> bool:
    return (folder / "config.json").is_file()


def _has_weights(folder: F) -> bool:
    try:
        return any(place.name.endswith(".safetensors") for place in folder.iterdir())
    except OSError:
        return False
