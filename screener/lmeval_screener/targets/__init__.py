"""The checkpoints that a user asks for: names, addresses, folders of training runs."""

from __future__ import annotations

import difflib
import fnmatch
import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lmeval_dispersion.errors import printable
from lmeval_screener.errors import ScreeningError

#: A repository of the Hub, with or without an organisation.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_GGUF_CHOICE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_BUCKET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/.*)?", re.ASCII)
_MODEL = re.compile(r"models:/[^/@:]+([/@][^/@]+)?")
_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
_FORMS = "ORGANISATION/NAME, ORGANISATION/NAME@REVISION, a folder, or an address such as s3://BUCKET/FOLDER"
#: How files of weights end; a file of another kind is no checkpoint.
WEIGHTS = (".safetensors", ".bin", ".gguf")
# Those of formats that are not read too: such a checkpoint is refused by name, not left out.
_FORMATS = (*WEIGHTS, ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".distcp")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")
# checkpoint-500 (Trainer, TRL), step-500 (torchtitan), step_500 (NeMo-RL), epoch_0_step_500 and
# model--step=500-consumed_samples=... (NeMo), iter_0000500 (Megatron), global_step500 (DeepSpeed, verl).
_STEP_FOLDER = re.compile(
    r"(?:.+[-_])?(?:checkpoint|ckpt|global_step|step|iteration|iter)[-_=]?(\d+)"
    r"(?:[-_](?:hf|last|final|consumed_samples.*|tokens?.*))?",
    re.IGNORECASE,
)
_STORE_FOLDERS = ("checkpoints", "checkpoint")  # where some trainers keep the folders of steps
_DEPTH = 3  # how far below a step's folder its model may lie: actor/huggingface, policy/weights/hf

#: Names of the folders and of the files in a folder.
Names = tuple[Collection[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Listed:
    """The entry of a repository in a list of many."""

    commit: str
    files: tuple[str, ...]
    parameters: int | None
    gated: bool
    base: str = ""  # see `Snapshot`


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
        refused: Code and sentence where ``repo`` is something that cannot be parsed.
        tokenizer: Where a tokenizer is read if the checkpoint stores none: what may be written for a
            checkpoint, or a tokenizer's file; None for nowhere else.
        listed: What a list of repositories said of it, its commit above all; None where it was named.
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
    listed: Listed | None = field(default=None, compare=False, repr=False)
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
        """``repo`` as a report may show it: no control characters, nor secrets of a web address."""
        if self.scheme not in ("http", "https"):
            return printable(self.repo)
        return printable(re.sub("(?<=://)[^/]*@", "", self.repo.partition("?")[0]))

    @property
    def is_glob(self) -> bool:
        """Whether the revision stands for several."""
        return self.revision is not None and any(sign in self.revision for sign in "*?[")


def parse_targets(
    texts: Iterable[str], tokenizer: str | None = None, left_out: list[str] | None = None
) -> list[Target]:
    """The targets that texts name: of a glob what matches, of a training run or a folder its checkpoints.

    Runs and globs in a storage are expanded when they are screened: that takes requests. Other folders beside
    checkpoints are added to ``left_out``.
    """
    targets: list[Target] = []
    for path in (path for text in texts for path in matching_paths(text) or [text]):
        target = parse_target(path, tokenizer)
        folders = _checkpoints_in(target.repo) if target.local else []
        if target.local and not folders and not holds_model(_names_in(target.repo)[1]):
            names = [name for name in sorted(_names_in(target.repo)[0], key=step_key) if name[0] != "."]
            held = {place: _names_in(place)[1] for place in (joined(target.repo, name) for name in names)}
            folders = [place for place, files in held.items() if holds_model(files)]
            if folders and left_out is not None:
                left_out += [place for place in held if place not in folders]
        if target.refused is None and not folders:
            target = _further_down(target) if target.local else _not_local(target, path)
        targets += [replace(target, repo=str(Path(folder))) for folder in folders] or [target]
    return targets


def _not_local(target: Target, path: str) -> Target:
    """A name without owner; refused where it is a family's, or nearly that of something here."""
    from lmeval_screener.yaml_fields import bundled_yaml

    if not target.on_hub or "/" in path or target.revision is not None:
        return target
    families = bundled_yaml(Path(__file__).with_name("families.yaml"))["families"]
    family = next((name for name in families if name.lower() == target.repo.lower()), None)
    near = difflib.get_close_matches(target.repo, os.listdir(), n=1, cutoff=0.8)
    if family is None and not near:
        return target
    why = f"a family: write --family {family}" if family else f"no folder here; did you mean {near[0]}?"
    why = f"expected a checkpoint, got {path!r}, {why} (the Hub's repository is hf://{path})"
    return replace(target, refused=("BadName", why))


def _further_down(target: Target) -> Target:
    """A checkpoint on disk; a folder without any is refused with the glob of those that lie further down."""
    for pattern in () if holds_model(_names_in(target.repo)[1]) else ("*/*", "*/*/*"):
        if place := next(glob.iglob(f"{glob.escape(target.repo)}/{pattern}/config.json"), None):
            why = f"expected a checkpoint, got {target.repo}, which holds folders of them, such as "
            why += f"{os.path.dirname(place)}; name them all: '{joined(target.repo, pattern)}'"
            return replace(target, refused=("FolderNotFound", why))
    return target


def holds_weights(files: Iterable[str]) -> bool:
    """Whether a file may hold weights, of a model or of an adapter, in a format that is read or another."""
    return any(path.endswith(_FORMATS) and path.rpartition("/")[2] not in _NO_WEIGHTS for path in files)


def holds_model(files: Collection[str]) -> bool:
    """Whether a folder's files are those of a checkpoint, be it broken."""
    return "config.json" in files or holds_weights(files)


def matching_paths(text: str) -> list[str]:
    """The folders and files of weights on disk that a glob stands for, by step; empty for another text."""
    path = os.path.expanduser(text.removeprefix("file://"))
    if "://" in path or "\0" in path or not glob.has_magic(path) or os.path.exists(path):
        return []
    return sorted((p for p in glob.glob(path) if p.endswith(WEIGHTS) or os.path.isdir(p)), key=step_key)


def parse_target(text: str, tokenizer: str | None = None) -> Target:
    """The target of `parse_name`; a text that means nothing is ``refused``, and costs no other its run."""
    try:
        return replace(parse_name(text), tokenizer=tokenizer)
    except ScreeningError as error:
        return Target(text, refused=(error.code, str(error)))


def parse_name(text: str) -> Target:
    r"""The repository, folder, file or address that a user means.

    A folder is what exists as one, or what is written like a path (``./x``, ``/x``, ``~/x``, ``C:\x``). A
    repository may be written as its address (``https://huggingface.co/ORG/NAME/tree/REVISION``; the host of
    HF_ENDPOINT counts too), as ``hf://ORG/NAME@REVISION``, and with slashes at its end. A GGUF model is its
    file (``x/model.gguf``), or named behind a colon: ``ORG/NAME:Q4_K_M``, ``FOLDER:model-Q8_0.gguf``.
    A file of weights stands for itself. Addresses of storages (``s3://…``, ``https://…`` of another host,
    ``hf://buckets/…``, ``models:/…``) are taken as they are.
    """
    if text.startswith("models:/") and not text.startswith("models://"):
        if not _MODEL.fullmatch(text) or not text.isprintable():
            forms = "NAME, models:/NAME/VERSION, models:/NAME/STAGE, models:/NAME@ALIAS or models:/NAME/*"
            raise _bad(text, f"a registered model is models:/{forms}")
        return Target(text)
    if text.startswith("file://"):
        return parse_name(unquote(text.removeprefix("file://")) or ".")
    if (local := _on_disk(text)) is not None:
        return local
    rest, colon, choice = text.rpartition(":")
    if colon and _GGUF_CHOICE.fullmatch(choice) and len(rest) > 1 and not re.fullmatch(r"\w+://[^/]*", rest):
        return replace(parse_name(rest), file=choice)
    scheme, mark, rest = text.partition("://")
    if not mark:
        first, slash, inside = text.partition("/")
        here = os.path.lexists(text) or (slash and (not inside or os.path.isdir(first)))
        if here or text.endswith(WEIGHTS) or re.match(r"[./~\\]|[A-Za-z]:[\\/]", text):
            raise _missing(text)
        name, at, revision = text.partition("@")
        if at and not revision:
            raise _bad(text, "there is no revision behind the @")
    elif scheme in ("http", "https"):
        if (address := _storage_address(text)) is not None:
            return Target(address)
        name, revision = _page_of_revision(text)
    elif scheme == "hf" and rest.startswith("buckets/"):
        return Target(_bucket(text, rest.removeprefix("buckets/")))
    elif scheme == "hf":
        name, _, revision = rest.partition("@")
        name, revision = name.rstrip("/").removeprefix("models/"), revision.rstrip("/")
        if name.startswith(("datasets/", "spaces/")) or name.count("/") > 1:
            raise _bad(text, "only a model's repository as a whole is read: hf://ORGANISATION/NAME")
    elif _SCHEME.fullmatch(scheme) and rest.strip("/") and rest.isprintable():
        return Target(text.rstrip("/"))
    else:
        raise _bad(text, "an address has a scheme before :// and a place behind it")
    name = name.rstrip("/")
    if not REPOSITORY.fullmatch(name) or ".." in name:
        raise _bad(text)
    return Target(name, revision or None)


def _missing(text: str) -> ScreeningError:
    """Why nothing can be read at a path, and which name is near."""
    path, near = os.path.expanduser(text), list[str]()
    if os.path.lexists(path):
        why = ", a link that leads nowhere" if os.path.islink(path) else ", which is neither"
    elif glob.has_magic(path):
        why = ", which matches nothing"
    else:
        why = f"; there is no such {'file' if text.endswith(WEIGHTS) else 'folder'}"
        folder, name = os.path.split(path.rstrip("/"))
        here = [joined(folder, entry) for entries in _names_in(folder or ".") for entry in entries]
        near = difflib.get_close_matches(joined(folder, name), here, n=1)
    why += f"; did you mean {near[0]}?" if near else ": check the path"
    hub = f" (the Hub's repository is hf://{text})" if REPOSITORY.fullmatch(text) and "/" in text else ""
    return ScreeningError("FolderNotFound", f"expected a folder or a file of weights, got {text!r}{why}{hub}")


def _on_disk(text: str) -> Target | None:
    """The folder or file of weights that exists; None where there is neither."""
    path = Path(text)
    try:
        path = path.expanduser()
        is_file, is_folder = path.is_file(), bool(text) and path.is_dir()
    except (OSError, RuntimeError, ValueError):  # an unknown ~user, a NUL, a name that is too long
        return None
    if is_file and path.suffix == ".gguf":
        return Target(str(path.parent), local=True, file=path.name)
    if is_folder or (is_file and path.name.endswith(WEIGHTS)):
        return Target(str(path), local=True)
    if is_file:
        raise ScreeningError(
            "FolderNotFound",
            f"expected a folder or a file of weights ({', '.join(WEIGHTS)}), got the file {text!r}; give the "
            f"folder that has config.json and the tokenizer beside it: {path.parent}",
        )
    return None


def _storage_address(text: str) -> str | None:
    """The address of a file, folder or bucket, which is read as it is; None for a model's page on the Hub."""
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
        return _bucket(text, "/".join([*parts[1:3], *map(unquote, below)]))
    return None


def _bucket(text: str, name: str) -> str:
    """``hf://buckets/NAMESPACE/NAME[/FOLDER]``."""
    if not _BUCKET.fullmatch(name.rstrip("/")):
        raise _bad(text, "a bucket is hf://buckets/NAMESPACE/NAME, with a folder behind it or without")
    return f"hf://buckets/{name.rstrip('/')}"


def _page_of_revision(text: str) -> tuple[str, str]:
    """Repository and revision of a page's address on the Hub."""
    parts = [part for part in urlsplit(text).path.split("/") if part]
    if parts[:1] == ["models"] or parts[1:] == ["models"]:
        raise _bad(text, "it is a list of models; write 'ORG/*', --author or --tag")
    if parts[:1] in (["datasets"], ["spaces"], ["papers"], ["collections"]):
        raise _bad(text, f"it is of {parts[0]}, not of a model")
    # gpt2/tree/main: repositories of the first days have no organisation.
    cut = 1 if parts[1:2] in ([], ["tree"], ["blob"], ["resolve"], ["commit"]) else 2
    name, verb, revision = "/".join(parts[:cut]), parts[cut : cut + 1], parts[cut + 1 :]
    if verb in ([], ["commits"]):
        return name, ""
    if verb in (["tree"], ["commit"]) and revision[:1] == ["refs"]:
        return name, "/".join(revision)
    if verb in (["tree"], ["commit"]) and len(revision) == 1:
        return name, unquote(revision[0])
    whole = f"{name}@{unquote(revision[0])}" if revision else name
    raise _bad(text, f"it is no page of a revision as a whole; give the checkpoint: {whole}")


def _bad(text: str, why: str = "") -> ScreeningError:
    return ScreeningError("BadName", f"expected {_FORMS}, got {text!r}" + (f": {why}" if why else ""))


def label(repo: str, revision: str | None, file: str | None = None) -> str:
    """``repo``, ``repo@revision``, or either with ``:file``."""
    name = repo if revision is None else f"{repo}@{revision}"
    return name if file is None else f"{name}:{file}"


def labelled(targets: Sequence[Target]) -> list[Target]:
    """The targets with the labels that a report of them all gives them, no two of them equal.

    A repository of the Hub is called by its name, anything else by as many last parts of its path as differ
    from the others', a GGUF file and a version of a registered model by two at least.

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
    seen = Counter[str]()
    for place, text in enumerate(labels):
        seen[text] += 1
        if seen[text] > 1:
            labels[place] = f"{text} ({seen[text]})"
    return [replace(target, labelled=text) for target, text in zip(targets, labels, strict=True)]


def shared_name(targets: Sequence[Target]) -> str:
    """The name of the place that all lie in, such as a folder or an organisation; empty where there is none.

    >>> shared_name([Target("runs/a", local=True), Target("runs/b", local=True)])
    'runs'
    """
    paths = [target.repo if target.on_hub else _path(target) for target in targets]
    if len({(target.scheme, target.local) for target in targets}) > 1:
        return ""
    return os.path.basename(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].rsplit("/", 1)[-1]


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

    >>> step_number("stage1-step140000-tokens588B"), step_number("iter_500"), step_number("main")
    (140000.0, 500.0, None)
    """
    number = re.search(r"step[-_=]?(\d+)", revision, re.IGNORECASE) or re.search(r"(\d+)", revision)
    return float(number.group(1)) if number else None


def _checkpoints_in(folder: str) -> list[str]:
    """The checkpoints of a training run's folder on disk; see `run_checkpoints`."""
    search = run_checkpoints(folder)
    try:
        wanted = next(search)
        while True:
            wanted = search.send([_names_in(path) for path in wanted])
    except StopIteration as end:
        return list(end.value)


def _names_in(folder: str) -> Names:
    """The names in a folder on disk; empty where it cannot be listed: it is refused when it is opened."""
    _, folders, files = next(os.walk(folder), ("", [], []))
    return folders, files


def run_checkpoints(folder: str) -> Generator[list[str], list[Names], list[str]]:
    """The checkpoints of a training run's folder, by step; empty where it is none.

    They lie in folders named after a step (``checkpoint-500``, ``step_500``, ``iter_0000500``,
    ``global_step500``), in ``folder`` or in its ``checkpoints``; the model itself may lie deeper, as in
    ``global_step_500/actor/huggingface``. A model in the run's own folder, the final one, comes last.
    Folders to list, wherever they are, are yielded; the names in each have to be sent back.
    """
    (top,) = yield [folder]
    inner = [joined(folder, name) for name in _STORE_FOLDERS if name in top[0]]
    listings = yield inner
    for place, (folders, _) in zip([folder, *inner], [top, *listings], strict=True):
        steps = sorted(filter(_STEP_FOLDER.fullmatch, folders), key=step_key)
        if steps:
            models = yield from _models_in([joined(place, step) for step in steps])
            return [*models, *([folder] if _has_weights(top[1]) else [])]
    # Of `.` and `..` the name is in the whole path.
    name = os.path.basename(os.path.abspath(folder)) if folder else ""
    if _STEP_FOLDER.fullmatch(name):
        models = yield from _models_in([folder])
        return models if models != [folder] else []
    return []


def _models_in(steps: list[str]) -> Generator[list[str], list[Names], list[str]]:
    """The nearest folder with configuration and weights, from each one down; else with either; else itself.

    Shards of a distributed checkpoint are safetensors too, often above the folder where they are joined.
    """
    whole: dict[str, str] = {}
    either: dict[str, str] = {}
    level = [(step, step) for step in steps]
    for _ in range(_DEPTH + 1):
        listings = yield [place for _, place in level]
        below = []
        for (step, place), (folders, files) in zip(level, listings, strict=True):
            has_config, has_weights = "config.json" in files, _has_weights(files)
            if has_config and has_weights:
                whole.setdefault(step, place)
            elif has_config or has_weights:
                either.setdefault(step, place)
            below += [(step, joined(place, name)) for name in sorted(folders) if not name.startswith(".")]
        level = [(step, place) for step, place in below if step not in whole]
    return [whole.get(step) or either.get(step) or step for step in steps]


def _has_weights(names: Collection[str]) -> bool:
    return any(name.endswith(".safetensors") for name in names)


def joined(path: str, name: str) -> str:
    """A path below another one, either of which may be empty."""
    return f"{path}/{name}" if path and name else path or name


def run_and_step(folder: str) -> tuple[str, str] | None:
    """The folder of a training run and the name of one of its steps, of a checkpoint's folder; else None.

    >>> run_and_step("out/run1/checkpoint-500"), run_and_step("titan/checkpoint/step-50"), run_and_step("a/b")
    (('out/run1', 'checkpoint-500'), ('titan', 'step-50'), None)
    """
    path = Path(folder)
    for place in (path, *list(path.parents)[:_DEPTH]):
        if _STEP_FOLDER.fullmatch(place.name):
            run = place.parent.parent if place.parent.name in _STORE_FOLDERS else place.parent
            return str(run), place.name
    return None


def training_and_step(repo: str, requested_revision: str | None, *, local: bool) -> tuple[str, str | None]:
    """The training of a screened checkpoint, and its step's name: a revision, or a folder of a run."""
    return (run_and_step(repo) or (repo, None)) if local else (repo, requested_revision)
