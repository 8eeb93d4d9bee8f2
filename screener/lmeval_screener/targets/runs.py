"""Training runs: the folders of a run's checkpoints, and the order of its steps."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from lmeval_dispersion.errors import listed_names
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import (
    ADAPTERS,
    GGUF,
    SAFETENSORS,
    holds_weights,
    own_weights,
    tokenizer_in,
)
from lmeval_screener.targets.caches import hub_snapshots, ollama_models
from lmeval_screener.targets.layouts import layout_of

# checkpoint-500 (Trainer, TRL), step-500 (torchtitan), step_500 (NeMo-RL), epoch_0_step_500 and
# model--step=500-consumed_samples=... (NeMo), iter_0000500 (Megatron), global_step500 (DeepSpeed, verl).
_STEP_FOLDER = re.compile(
    r"(?:.+[-_])?(?:checkpoint|ckpt|global_step|step|iteration|iter)[-_=]?(\d+)"
    r"(?:[-_](?:hf|last|final|consumed_samples.*|tokens?.*))?",
    re.IGNORECASE,
)
# epoch_0 (torchtune, mmengine): the steps of a run without the folders above.
_EPOCH_FOLDER = re.compile(r"epoch[-_=]?\d+", re.IGNORECASE)
_STORE_FOLDERS = ("checkpoints", "checkpoint")  # where some trainers keep the folders of steps
# What trainers write next to the checkpoints: logs, and states of training that hold no model.
_NO_MODEL = re.compile(
    r"\..*|__pycache__|runs|(?:.*_)?logs?|wandb|tensorboard|(?:tb|lightning|csv)_.*|mlruns|profil.*|eval.*"
    r"|recipe_state|optimi[sz]er.*|(?:.+_)?generations?|.*samples",
    re.IGNORECASE,
)
_RACE = "race.json"  # in a folder of answers that `dispersion race` keeps
# Results of a training in a model's own folder: what else lies in it, such as encoders, is a part.
_RESULT = re.compile(
    r"(?:.*[-_])?merged(?:[-_].*)?|final(?:[-_].*)?|last-checkpoint", re.IGNORECASE
)
# Files of a folder that is certainly a model or an adapter, for the glob that a sentence offers.
_MODEL_FILES = {"config.json", SAFETENSORS.single, "adapter_config.json"}
_LOOKED_AT = 10_000  # folders that are looked at to offer a glob
_DIGITS = 18  # of a step; more belong to something else, such as a digest
_DEPTH = 3  # how far below a step's folder its model may lie: actor/huggingface, policy/weights/hf

#: Names of the subfolders and of the files in a folder.
Names = tuple[Collection[str], Collection[str]]


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match a glob, each once, ordered by training step."""
    matches = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    return sorted(matches, key=step_key)


def step_key(revision: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts names by the numbers in them, so that ``step9`` precedes ``step10``."""
    key = []
    for index, part in enumerate(re.split(r"([0-9]+)", revision)):
        # A number's order is that of its length, then of its digits: `int` refuses thousands of them.
        is_number = index % 2 == 1
        if is_number:
            digits = part.lstrip("0")
            key.append((len(digits), digits))
        else:
            key.append((-1, part))
    return tuple(key)


def step_number(revision: str) -> float | None:
    """Return the training step in a name: the number after ``step``, or else its first number.

    The result is None for a name without a number, or with one of more than 18 digits.

    >>> step_number("stage1-step140000-tokens588B"), step_number("iter_500"), step_number("main")
    (140000.0, 500.0, None)
    """
    match = re.search(r"step[-_=]?([0-9]+)", revision, re.IGNORECASE)
    match = match or re.search(r"([0-9]+)", revision)
    if match is None:
        return None
    digits = match[1]
    if len(digits) > _DIGITS:
        return None
    return float(digits)


@dataclass
class Run:
    """The checkpoints found in a folder, such as a training run; all attributes may be empty.

    Attributes:
        checkpoints: Folders of the checkpoints: first the folders of steps, in order, then other
            models of the run, and last the run's own folder if it holds a model.
        left_out: Folders that hold no model, except for those in which trainers keep logs, samples
            or states of the training.
        tokenizers: Checkpoint without a tokenizer -> another folder of the run that has one; empty
            if every checkpoint has its own, or no folder has any.
    """

    checkpoints: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    tokenizers: dict[str, str] = field(default_factory=dict)


def checkpoints_in(folder: str) -> Run:
    """Find the checkpoints in a folder on disk.

    These are the checkpoints of a training run (see `run_checkpoints`), or else the models in the
    subfolders, such as those of a Hub cache. A folder that holds neither counts as one checkpoint.

    Raises:
        ScreeningError: ``FolderNotFound``: the checkpoints lie more than one level below
            ``folder``, or Ollama stores its models there. The message says how to name them.
    """
    above = os.path.dirname(os.path.abspath(folder))
    search = run_checkpoints(folder, above)
    try:
        wanted = next(search)
        while True:
            listings = list(map(names_in, wanted))
            wanted = search.send(listings)
    except StopIteration as end:
        run: Run = end.value
    if run.checkpoints:
        run.checkpoints = _without_links(run.checkpoints)
        return run
    folders, files = names_in(folder)
    if _holds_model(files):
        return _model_and_results(folder, (folders, files))
    cached = hub_snapshots(folder)
    if cached:
        run = Run()
        for repository, place in cached.items():
            _, inside = names_in(place)
            if _holds_model(inside):
                run.checkpoints.append(place)
            else:
                run.left_out.append(repository)
        if not run.checkpoints:
            run.checkpoints = [folder]
        return run
    _refuse_ollama(folder)
    listed: dict[str, Names] = {}
    for name in sorted(folders, key=step_key):
        if not name.startswith("."):
            place = joined(folder, name)
            listed[place] = names_in(place)
    subfolders = _subfolders(folder, listed)
    if subfolders is None:
        _refuse_deeper(folder)
    return subfolders or Run([folder])


def _model_and_results(folder: str, names: Names) -> Run:
    """A model's folder, after results of the same training in it, such as ``merged``."""
    folders, own_files = names
    models: dict[str, Collection[str]] = {}
    for name in sorted(filter(_RESULT.fullmatch, folders)):
        place = joined(folder, name)
        _, files = names_in(place)
        if _holds_readable(files):
            models[place] = files
    models[folder] = own_files
    tokenizers = _tokenizers(models, [(folder, names)])
    return Run(list(models), tokenizers=tokenizers)


def _subfolders(folder: str, listed: Mapping[str, Names]) -> Run | None:
    """The models in subfolders; the folder itself where its program's own sentence says more; else None."""
    models: dict[str, Collection[str]] = {}
    others: dict[str, Names] = {}
    below: list[str] = []
    is_readable = False
    for place, names in listed.items():
        _, files = names
        subfolder = os.path.basename(place)
        for name in files:
            below.append(joined(subfolder, name))
        if _holds_model(files):
            models[place] = files
            is_readable |= "config.json" in files or _holds_readable(files)
        else:
            others[place] = names
    if not is_readable and layout_of(below, folder):
        return Run([folder])
    if not models:
        return None
    run = Run(list(models), list(others))
    if len(models) == 1:  # MLflow keeps the tokenizer of its one model in a folder of its own
        components = joined(folder, "components/tokenizer")
        others[components] = names_in(components)
        run.tokenizers = _tokenizers(models, others.items())
    return run


def _refuse_ollama(folder: str) -> None:
    """Raise ScreeningError with the blobs' names for a store of Ollama."""
    blobs = ollama_models(folder)
    if not blobs:
        return
    names = listed_names([f"{blob} ({name})" for name, blob in blobs.items()])
    raise ScreeningError(
        "FolderNotFound",
        f"expected a checkpoint, got {folder}, where Ollama stores its models; give a model's file: "
        f"{names}",
    )


def _refuse_deeper(folder: str) -> None:
    """Raise ScreeningError with a glob of the checkpoints that lie further down, if any do."""
    for pattern in ("*/*", "*/*/*", "*/*/*/*"):
        place = _first_model(folder, pattern)
        if not place:
            continue
        if _STEP_FOLDER.fullmatch(os.path.basename(place)):
            pattern = pattern.removesuffix("/*")
            place = os.path.dirname(place)
        raise ScreeningError(
            "FolderNotFound",
            f"expected a checkpoint, got {folder}, which holds folders of checkpoints, such as "
            f"{place}; name them all: '{joined(folder, pattern)}'",
        )


def _without_links(places: list[str]) -> list[str]:
    """The folders without links to others of them, such as ``latest``."""
    known = {os.path.realpath(place) for place in places if not os.path.islink(place)}
    kept: list[str] = []
    for place in places:
        is_link = os.path.islink(place)
        if not is_link or os.path.realpath(place) not in known:
            kept.append(place)
    return kept


def _first_model(folder: str, pattern: str) -> str | None:
    """The first folder below that matches a glob and holds a configuration or weights that are read."""
    for place in islice(glob.iglob(f"{glob.escape(folder)}/{pattern}/"), _LOOKED_AT):
        _, files = names_in(place)
        is_model = not _MODEL_FILES.isdisjoint(files)
        if is_model or any(name.endswith(GGUF.suffix) for name in files):
            return place.rstrip("/")
    return None


def _holds_model(files: Collection[str]) -> bool:
    """Whether a folder's files belong to a checkpoint, even a broken one."""
    return "config.json" in files or holds_weights(files)


def names_in(folder: str) -> Names:
    """Return the names of the subfolders, and those of the files, in a folder.

    Both lists are empty if the folder cannot be listed.
    """
    _, folders, files = next(os.walk(folder), ("", [], []))
    return folders, files


def run_checkpoints(folder: str, above: str = "") -> Generator[list[str], list[Names], Run]:
    """Find the checkpoints of a training run; a generator whose caller lists the folders.

    The folders of steps (``checkpoint-500``, ``step_500``, ``iter_0000500``, ``global_step500``, or
    else ``epoch_0``) lie in ``folder`` itself or in its subfolder ``checkpoints``. The model of a
    step may lie deeper, as in ``global_step_500/actor/huggingface``. After the steps come the run's
    other models (``merged``, ``final``) and the final model in the run's own folder. If ``folder``
    is itself the folder of a step, that step is the only checkpoint.

    Args:
        folder: The folder, local or remote.
        above: The folder above ``folder``. If ``folder`` is that of a step, a tokenizer is looked
            for there, too; empty to look nowhere else.

    Yields:
        A list of folders. The caller must ``send`` a list with the names of the subfolders and of
        the files in each, in the same order.

    Returns:
        The run; all its attributes are empty if the folder holds none.
    """
    (top,) = yield [folder]
    top_folders, _ = top
    inner = [joined(folder, name) for name in _STORE_FOLDERS if name in top_folders]
    listings = yield inner
    places = [folder, *inner]
    for place, (folders, _) in zip(places, [top, *listings], strict=True):
        if _steps_among(folders):
            return (yield from _whole_run(folder, top, place, folders))
    # The names of `.` and `..` are in the whole path.
    name = os.path.basename(os.path.abspath(folder))
    if not folder or not _STEP_FOLDER.fullmatch(name):
        return Run()
    models = yield from _models_in([folder])
    run = Run(list(models))
    if not above or all(map(tokenizer_in, models.values())):
        return run
    outer = [above]
    if os.path.basename(above) in _STORE_FOLDERS:
        outer.append(os.path.dirname(above))
    listings = yield outer
    run.tokenizers = _tokenizers(models, zip(outer, listings, strict=True))
    return run


def _steps_among(folders: Iterable[str]) -> list[str]:
    """The folders named after steps, in order; those named after epochs where no other is."""
    names = list(folders)
    steps = list(filter(_STEP_FOLDER.fullmatch, names))
    if not steps:
        steps = list(filter(_EPOCH_FOLDER.fullmatch, names))
    return sorted(steps, key=step_key)


def _whole_run(
    folder: str, top: Names, store: str, folders: Collection[str]
) -> Generator[list[str], list[Names], Run]:
    """A run in ``folder``, whose steps and perhaps other models are the ``folders`` of ``store``."""
    top_folders, top_files = top
    steps = _steps_among(folders)
    models = yield from _models_in([joined(store, step) for step in steps])
    places: list[str] = []
    for name in folders:
        if name not in steps and not _is_no_model(name):
            places.append(joined(store, name))
    if store != folder:
        for name in top_folders:
            if not _is_no_model(name):
                places.append(joined(folder, name))
    places.sort(key=step_key)
    listings = yield places
    left_out: list[str] = []
    for place, (_, files) in zip(places, listings, strict=True):
        is_whole = "config.json" in files and holds_weights(files)
        if is_whole or _holds_readable(files):
            models[place] = files
        elif _RACE not in files:
            left_out.append(place)
    if _holds_readable(top_files):
        models[folder] = top_files
    outer = [(folder, top), *zip(places, listings, strict=True)]
    tokenizers = _tokenizers(models, outer)
    return Run(list(models), left_out, tokenizers)


def _is_no_model(name: str) -> bool:
    """Whether a folder's name says that it holds no model of its own."""
    return name in _STORE_FOLDERS or _NO_MODEL.fullmatch(name) is not None


def _holds_readable(files: Collection[str]) -> bool:
    """Whether a folder holds a model's or an adapter's weights in a format that is read."""
    suffixes = (SAFETENSORS.suffix, GGUF.suffix)
    if any(name.endswith(suffixes) for name in files):
        return True
    is_adapter = not set(ADAPTERS).isdisjoint(files)
    return is_adapter or bool(own_weights(files))


def _tokenizers(
    models: Mapping[str, Collection[str]], outer: Iterable[tuple[str, Names]]
) -> dict[str, str]:
    """Model without a tokenizer -> the first folder that has one, among the run's other folders."""
    tokenizers: dict[str, str] = {}
    for source, (_, outer_files) in outer:
        if not tokenizer_in(outer_files):
            continue
        for place, files in models.items():
            if not tokenizer_in(files):
                tokenizers[place] = source
        break
    return tokenizers


def _models_in(steps: list[str]) -> Generator[list[str], list[Names], dict[str, Collection[str]]]:
    """The nearest folder with configuration and weights, from each one down; else with either; else itself.

    Shards of a distributed checkpoint are safetensors too, often above the folder where they are
    joined. Each comes with the names of its files.
    """
    whole: dict[str, str] = {}
    either: dict[str, str] = {}
    names: dict[str, Collection[str]] = {}
    level = list(zip(steps, steps, strict=True))
    for _ in range(_DEPTH + 1):
        listings = yield [place for _, place in level]
        below = []
        for (step, place), (folders, files) in zip(level, listings, strict=True):
            names[place] = files
            has_config = "config.json" in files or "adapter_config.json" in files
            has_weights = _holds_readable(files)
            if has_config and has_weights:
                whole.setdefault(step, place)
            elif has_config or has_weights:
                either.setdefault(step, place)
            for name in sorted(folders):
                if not name.startswith("."):
                    below.append((step, joined(place, name)))
        level = [(step, place) for step, place in below if step not in whole]
    models: dict[str, Collection[str]] = {}
    for step in steps:
        place = whole.get(step) or either.get(step) or step
        models[place] = names[place]
    return models


def joined(path: str, name: str) -> str:
    """Return ``path/name``, or only one of the two if the other is empty."""
    if path and name:
        return f"{path}/{name}"
    return path or name


def possible_runs(folder: str) -> tuple[str, str]:
    """Return the two folders that may be the run of a checkpoint that is not named after a step.

    The first is the checkpoint's own folder, the second the folder above it. A folder above that is
    called ``checkpoints`` or ``checkpoint`` is skipped.

    >>> possible_runs("out/run1/checkpoints/merged")
    ('out/run1/checkpoints/merged', 'out/run1')
    """
    place = Path(folder)
    return str(place), _run_of(place)


def _run_of(place: Path) -> str:
    """The folder around a checkpoint's, or around its store of checkpoints."""
    above = place.parent
    if above.name in _STORE_FOLDERS:
        above = above.parent
    return str(above)


def is_epoch(step: str) -> bool:
    """Whether the name of a checkpoint's folder counts epochs (``epoch_3``) instead of steps."""
    return _EPOCH_FOLDER.fullmatch(step) is not None


def run_and_step(folder: str) -> tuple[str, str] | None:
    """Return the folder of a checkpoint's training run, and the name of the folder of its step.

    The result is None if neither the folder nor one of the three above it is named after a step.

    >>> run_and_step("out/run1/checkpoint-500"), run_and_step("a/b")
    (('out/run1', 'checkpoint-500'), None)
    >>> run_and_step("titan/checkpoint/step-50")
    ('titan', 'step-50')
    """
    path = Path(folder)
    parents = list(path.parents)
    for place in (path, *parents[:_DEPTH]):
        step = place.name
        if _STEP_FOLDER.fullmatch(step) or is_epoch(step):
            return _run_of(place), step
    return None
