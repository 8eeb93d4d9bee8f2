"""The checkpoints that a user asks for: names, addresses, folders of training runs."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from lmeval_dispersion.errors import printable
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    from lmeval_screener.checkpoints.hub_responses import RepoFiles

#: A repository of the Hub, with or without an organisation.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_CHOICE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_BUCKET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/.*)?", re.ASCII)
_MODEL = re.compile(r"models:/[^/@:]+([/@][^/@]+)?")
_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
_FORMS = "ORGANISATION/NAME, ORGANISATION/NAME@REVISION, a folder, or an address such as s3://BUCKET/FOLDER"
#: How files of weights end; a file of another kind is no checkpoint.
WEIGHTS = (".safetensors", ".bin", ".gguf")


class Place(NamedTuple):
    """A repository with a revision, a folder, a file or an address; ``file`` names one of its GGUFs."""

    repo: str
    revision: str | None
    local: bool
    file: str | None = None


def parse_name(text: str) -> Place:
    r"""The repository, folder, file or address that a user means.

    A folder is what exists as one, or what is written like a path (``./x``, ``/x``, ``~/x``, ``C:\x``). A
    repository may be written as its address (``https://huggingface.co/ORG/NAME/tree/REVISION``; the host of
    HF_ENDPOINT counts too), as ``hf://ORG/NAME@REVISION``, and with slashes at its end. A GGUF model is its
    file (``x/model.gguf``), or named behind a colon: ``ORG/NAME:Q4_K_M``, ``FOLDER:model-Q8_0.gguf``.
    A file of weights stands for itself. Addresses of storages (``s3://…``, ``https://…`` of another host,
    ``hf://buckets/…``, ``models:/…``) are taken as they are.
    """
    if text.startswith("models:/") and not text.startswith("models://"):
        return Place(_registered(text), None, False)
    if text.startswith("file://"):
        return parse_name(unquote(text.removeprefix("file://")) or ".")
    if (file := _gguf_file(text)) is not None:
        return Place(str(file.parent), None, True, file.name)
    rest, colon, choice = text.rpartition(":")
    if colon and _CHOICE.fullmatch(choice) and len(rest) > 1 and not re.fullmatch(r"\w+://[^/]*", rest):
        return parse_name(rest)._replace(file=choice)
    if (folder := _folder(text)) is not None:
        return Place(folder, None, True)
    scheme, mark, rest = text.partition("://")
    if mark and scheme in ("http", "https"):
        if (elsewhere := _elsewhere(text)) is not None:
            return Place(elsewhere, None, False)
        name, revision = _of_address(text)
    elif mark and scheme == "hf" and rest.startswith("buckets/"):
        return Place(_of_bucket(text, rest.removeprefix("buckets/")), None, False)
    elif mark and scheme == "hf":
        name, revision = _of_hf(text, rest)
    elif mark and _SCHEME.fullmatch(scheme) and rest.strip("/") and rest.isprintable():
        return Place(text.rstrip("/"), None, False)
    elif mark:
        raise _bad(text, "an address has a scheme before :// and a place behind it")
    else:
        name, at, revision = text.partition("@")
        name = name.rstrip("/")
        if at and not revision:
            raise _bad(text, "there is no revision behind the @")
    if not REPOSITORY.fullmatch(name) or ".." in name:
        raise _bad(text)
    return Place(name, revision or None, False)


def _gguf_file(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.suffix == ".gguf" and path.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _folder(text: str) -> str | None:
    """A folder's path; None for what is not written like one and does not exist as one."""
    try:
        path = Path(text).expanduser()
        if text and path.is_dir():
            return str(path)
        is_file = bool(text) and path.is_file()
        if is_file and path.name.endswith(WEIGHTS):
            return str(path)
    except (OSError, RuntimeError, ValueError):  # an unknown ~user, a NUL, a name that is too long
        path, is_file = Path(text), False
    if is_file:
        raise ScreeningError(
            "FolderNotFound",
            f"expected a folder or a file of weights ({', '.join(WEIGHTS)}), got the file {text!r}; give the "
            f"folder that has config.json and the tokenizer beside it: {path.parent}",
        )
    if re.match(r"[A-Za-z]:[\\/]|\\|\.{1,2}\\", text) or text.startswith((".", "/", "~")):
        raise ScreeningError(
            "FolderNotFound", f"expected a folder, got {text!r}; there is no such folder: check the path"
        )
    return None


def _elsewhere(text: str) -> str | None:
    """The address of a file or folder that is read as it is; None for a page of the Hub about a model."""
    from huggingface_hub import constants

    try:
        address, endpoint = urlsplit(text), urlsplit(constants.ENDPOINT)
        port = address.port
    except ValueError:
        raise _bad(text) from None
    if not address.hostname or port == 0 or not text.isprintable():
        raise _bad(text, "its host is missing")
    if address.netloc != endpoint.netloc and address.netloc not in _HOSTS:
        return text
    parts = [part for part in address.path.split("/") if part]
    if parts[:1] == ["buckets"]:
        below = parts[4:] if parts[3:4] in (["tree"], ["resolve"]) else parts[3:]
        return _of_bucket(text, "/".join([*parts[1:3], *map(unquote, below)]))
    return None


def _of_bucket(text: str, name: str) -> str:
    """``hf://buckets/NAMESPACE/NAME[/FOLDER]``."""
    if not _BUCKET.fullmatch(name.rstrip("/")):
        raise _bad(text, "a bucket is hf://buckets/NAMESPACE/NAME, with a folder behind it or without")
    return f"hf://buckets/{name.rstrip('/')}"


def _registered(text: str) -> str:
    """``models:/NAME``, with a version, a stage or an alias: a model of an MLflow registry."""
    if not _MODEL.fullmatch(text) or not text.isprintable():
        raise _bad(
            text,
            "a registered model is models:/NAME, models:/NAME/VERSION, models:/NAME/STAGE, "
            "models:/NAME@ALIAS or models:/NAME/*",
        )
    return text


def _of_address(text: str) -> tuple[str, str]:
    """Repository and revision of a page's address on the Hub."""
    address = urlsplit(text)
    parts = [part for part in address.path.split("/") if part]
    if parts[:1] in (["datasets"], ["spaces"], ["papers"]):
        raise _bad(text, f"it is of {parts[0]}, not of a model")
    if parts[:1] == ["collections"]:
        raise _bad(text, f"it is a collection; write --collection {'/'.join(parts[1:3])}")
    if parts[:1] == ["models"] or parts[1:] == ["models"]:
        raise _bad(text, "it is a list of models; write 'ORG/*', --author, --search or --tag")
    # gpt2/tree/main: repositories of the first days have no organisation.
    cut = 1 if parts[1:2] in ([], ["tree"], ["blob"], ["resolve"], ["commit"]) else 2
    name, verb, revision = "/".join(parts[:cut]), parts[cut : cut + 1], parts[cut + 1 :]
    if not verb or verb == ["commits"]:
        return name, ""
    if verb[0] in ("blob", "resolve") and revision:
        raise _bad(text, f"it is one file; give the checkpoint: {name}@{unquote(revision[0])}")
    if verb[0] not in ("tree", "commit") or not revision:
        raise _bad(text, f"it is no page of a revision; give the checkpoint: {name}")
    if revision[0] == "refs":
        return name, "/".join(revision)
    if len(revision) > 1:
        raise _bad(
            text, f"folders inside a repository are not read; {name}@{unquote(revision[0])} is its top"
        )
    return name, unquote(revision[0])


def _of_hf(text: str, rest: str) -> tuple[str, str]:
    """Repository and revision of ``hf://[models/]ORG/NAME[@REVISION]``."""
    name, _, revision = rest.partition("@")
    name = name.rstrip("/").removeprefix("models/")
    kind = name.partition("/")[0]
    if kind in ("datasets", "spaces"):
        raise _bad(text, f"it is of {kind}, not of a model's repository")
    if name.count("/") > 1:
        raise _bad(
            text, f"folders and files inside a repository are not read; give {'/'.join(name.split('/')[:2])}"
        )
    return name, revision.rstrip("/")


def _bad(text: str, why: str = "") -> ScreeningError:
    return ScreeningError("BadName", f"expected {_FORMS}, got {text!r}" + (f": {why}" if why else ""))


@dataclass(frozen=True, slots=True)
class Target:
    """One checkpoint to screen.

    Attributes:
        repo: Repository on the Hub, the path of a folder or file, or an address such as ``s3://bucket/run``.
        revision: Branch, tag or commit; None for the default branch or a folder; may be a glob before it
            is expanded.
        family: Name of the family that lists it; None where it was given by name.
        scale: Scale that the family states; None where the headers have to tell.
        local: Whether ``repo`` is a folder or a file.
        accuracy: Accuracy that somebody measured, None otherwise.
        negative_control: Whether it is known not to have learned what the others learned.
        file: A GGUF file of it, or a quantisation that names one; None for the checkpoint's own weights.
        refused: Code and sentence where ``repo`` is something that cannot be parse_name.
        tokenizer: Where a tokenizer is read if the checkpoint stores none: what may be written for a
            checkpoint, or a tokenizer's file; None for nowhere else.
        listing: Commit and files, where a list of repositories said them: then it costs no API call.
        labelled: Its name in reports (:func:`labelled`); None before all that is screened is known.
    """

    repo: str
    revision: str | None = None
    family: str | None = None
    scale: str | None = None
    local: bool = False
    accuracy: float | None = None
    negative_control: bool = False
    file: str | None = None
    refused: tuple[str, str] | None = None
    tokenizer: str | None = None
    listing: RepoFiles | None = field(default=None, compare=False, repr=False)
    labelled: str | None = field(default=None, compare=False, repr=False)

    @property
    def scheme(self) -> str | None:
        """The beginning of its address, such as ``s3``; None for a folder and a repository of the Hub."""
        scheme, mark, _ = self.repo.partition(":/")
        return scheme.lower() if mark and not self.local else None

    @property
    def on_hub(self) -> bool:
        """Whether ``repo`` is a repository of the Hub."""
        return not self.local and self.scheme is None

    @property
    def name(self) -> str:
        """``repo``, ``repo@revision`` or ``repo:file``, as a user would write it."""
        return label(self.shown, self.revision, self.file)

    @property
    def label(self) -> str:
        """Its name in reports; as the user wrote it before that is settled."""
        return self.labelled or self.name

    @property
    def shown(self) -> str:
        """``repo`` as a report may show it: no control characters, nor the signature of a signed address."""
        return printable(self.repo.partition("?")[0] if self.scheme in ("http", "https") else self.repo)

    @property
    def is_glob(self) -> bool:
        """Whether the revision stands for several."""
        return self.revision is not None and any(sign in self.revision for sign in "*?[")


def parse_target(text: str, tokenizer: str | None = None) -> Target:
    """The target that a repository's name or address, with a revision or glob or without, or a path names.

    What cannot be parse_name is a target that is ``refused``: it fails by itself and costs no other its run.
    """
    try:
        place = parse_name(text)
    except ScreeningError as error:
        return Target(text, refused=(error.code, str(error)))
    return Target(place.repo, place.revision, local=place.local, file=place.file, tokenizer=tokenizer)


def label(repo: str, revision: str | None, file: str | None = None) -> str:
    """``repo``, ``repo@revision``, or either with ``:file``."""
    name = repo if revision is None else f"{repo}@{revision}"
    return name if file is None else f"{name}:{file}"


def labelled(targets: Sequence[Target]) -> list[Target]:
    """The targets with the labels by which a report of them all tells them apart.

    A repository of the Hub is called by its name, anything else by the last parts of its path that tell it
    from the others: a GGUF file and a version of a registered model by two of them at least.

    >>> [t.label for t in labelled([Target("gg", local=True, file="a.gguf"), Target("models:/sums/2")])]
    ['gg/a.gguf', 'sums/2']
    """
    from lmeval_dispersion.report.cells import short_names

    paths = {target: _path(target) for target in targets if not target.on_hub}
    short = dict(zip(paths, short_names(list(paths.values())), strict=True))
    labels = []
    for target in targets:
        text = short.get(target, target.name)
        if target in paths and "/" not in text and (target.scheme == "models" or text.endswith(".gguf")):
            text = "/".join(paths[target].rsplit("/", 2)[-2:])
        labels.append(text)
    count, seen = Counter(labels), Counter[str]()
    for place, text in enumerate(labels):
        seen[text] += 1
        if count[text] > 1 and seen[text] > 1:
            labels[place] = f"{text} ({seen[text]})"
    return [replace(target, labelled=text) for target, text in zip(targets, labels, strict=True)]


def _path(target: Target) -> str:
    if target.local:
        path = printable(os.path.abspath(target.repo).replace(os.sep, "/"))  # so that `.` has a name
    else:
        path = target.shown.partition(":/")[2].strip("/")
    if target.file is None:
        return path
    return f"{path}/{target.file}" if target.file.endswith(".gguf") else f"{path}:{target.file}"


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The revisions that a glob stands for, in the order of their steps."""
    return sorted({n for n in names if fnmatch.fnmatchcase(n, pattern)}, key=step_key)


def step_key(revision: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts ``step1000`` before ``step2000`` before ``step10000``."""
    parts = re.split(r"(\d+)", revision)
    return tuple((int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts))


def step_number(revision: str) -> float | None:
    """The training step that a revision's name carries: the number after ``step``, else its first number.

    >>> step_number("stage1-step140000-tokens588B"), step_number("main")
    (140000.0, None)
    """
    number = re.search(r"step[-_=]?(\d+)", revision, re.IGNORECASE) or re.search(r"(\d+)", revision)
    return float(number.group(1)) if number else None


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
