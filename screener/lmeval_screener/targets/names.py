"""Names and addresses of checkpoints, parsed from a user's texts."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from lmeval_dispersion.errors import printable, without_secrets
from lmeval_screener.errors import ScreeningError
from lmeval_screener.formats import SUFFIXES, TOKENIZER_FILES, is_gguf
from lmeval_screener.orders import UNSAID, Order
from lmeval_screener.targets.caches import cached_name
from lmeval_screener.targets.runs import checkpoints_in, joined, names_in, step_key

#: A Hub repository, with or without an organisation.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_GGUF_CHOICE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
#: A model of a registry: its name, and its version or stage, or its alias.
MODEL = re.compile(r"models:/([^/@:]+)(?:/([^/@]+)|@([^/@]+))?")
_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
_FORMS = "ORGANISATION/NAME, ORGANISATION/NAME@REVISION, a folder, or an address such as s3://BUCKET/FOLDER"


@dataclass(frozen=True, slots=True)
class Listed:
    """A repository's entry in a listing of the Hub.

    Attributes:
        commit: The commit of the default branch.
        files: Paths of the files in the repository.
        parameters: Number of parameters; None if the Hub does not state it.
        gated: Whether the files can be read only with a token, after accepting conditions.
        base: Repository of the base model from which the repository's model was trained; empty if
            the repository's tags name none.
        private: Whether the repository can be read only with certain tokens; None if not stated.
    """

    commit: str
    files: tuple[str, ...]
    parameters: int | None
    gated: bool
    base: str = ""
    private: bool | None = None


class Base(NamedTuple):
    """The base model of an adapter.

    Attributes:
        place: Repository or folder of the base model.
        revision: Commit of the base model, or the revision that the adapter names if the base could
            not be opened. None for a folder, or if no revision is known.
        tokenizer: Whether the adapter uses the base's tokenizer rather than one of its own.
    """

    place: str
    revision: str | None
    tokenizer: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint to screen, as a user, a listing or a file names it.

    Attributes:
        repo: Repository on the Hub, path of a folder or file, or an address such as
            ``s3://bucket/run`` without its secrets.
        revision: Branch, tag or commit; None for a folder, and for the default branch. It may be a
            glob until the target is expanded.
        family: Name of the family that lists the checkpoint; None if none does.
        scale: Size class that the family states, such as ``7B``; None to derive it from the number
            of parameters.
        local: Whether ``repo`` is a folder or a file.
        accuracy: Accuracy that the user or the family supplies, in the unit of that source; None
            without one.
        negative_control: Whether the checkpoint is known not to have learned the domain.
        file: A GGUF file in ``repo``, or a quantisation that names one; None for weights in
            transformers' layout.
        refused: Code and message of the error, if the name cannot be parsed or found; else None.
        tokenizer: Repository, folder, address or file of a tokenizer to use if the checkpoint
            stores none; None if no other tokenizer may be used.
        listed: The entry in a listing of the Hub; None if the user named the checkpoint.
        on: The base of an adapter; None for a whole model, and until the adapter has been opened.
        kind: The kind that the family's file states, such as ``base`` or ``instruct``; empty if it
            states none.
        order: The figure that ranks the family; ``UNSAID`` if no family lists the checkpoint.
        labelled: The unique name in reports; None until the function `labelled` has set it.
        secret: The whole address if it holds a user name, a password or a query; else empty. It is
            only used to open the checkpoint.
        by_file: Whether a downloaded file or a registry names the checkpoint, and not the user. If
            so, its address must not be in a private network.
    """

    repo: str
    revision: str | None = None
    family: str | None = None
    scale: str | None = None
    local: bool = False
    accuracy: float | None = field(default=None, compare=False)
    negative_control: bool = False
    file: str | None = None
    refused: tuple[str, str] | None = None
    tokenizer: str | None = None
    listed: Listed | None = field(default=None, compare=False, repr=False)
    on: Base | None = field(default=None, compare=False, repr=False)
    kind: str = field(default="", compare=False, repr=False)
    order: Order = field(default=UNSAID, compare=False, repr=False)
    labelled: str | None = field(default=None, compare=False, repr=False)
    secret: str = field(default="", repr=False)
    by_file: bool = field(default=False, compare=False, repr=False)

    def at(self, address: str) -> Target:
        """Return the target with another address, whose secrets go to ``secret`` and not ``repo``."""
        public = without_secrets(address)
        secret = address
        if public == address:
            secret = ""
        return replace(self, repo=public, secret=secret)

    @property
    def address(self) -> str:
        """The address with its secrets, for opening the checkpoint; never to be shown or stored."""
        return self.secret or self.repo

    @property
    def scheme(self) -> str | None:
        """The scheme of the address, such as ``s3``; None for a folder or Hub repository."""
        scheme, mark, _ = self.repo.partition(":/")
        if not mark or self.local:
            return None
        return scheme.lower()

    @property
    def on_hub(self) -> bool:
        """Whether ``repo`` is a repository on the Hub."""
        return not self.local and self.scheme is None

    @property
    def place(self) -> str:
        """``repo``; for a folder or a file on this machine, its absolute path without links."""
        if not self.local:
            return self.repo
        return str(Path(self.repo).resolve())

    @property
    def name(self) -> str:
        """``repo``, followed by ``@revision`` and ``:file`` if set, as a user would write it."""
        return printable(label(self.shown, self.revision, self.file))

    @property
    def label(self) -> str:
        """The name in reports: the unique one, if `labelled` has set it, or else ``name``."""
        return self.labelled or self.name

    @property
    def shown(self) -> str:
        """``repo`` with unprintable characters escaped, for reports."""
        return printable(self.repo)

    @property
    def is_glob(self) -> bool:
        """Whether the revision is a glob, such as ``step*``."""
        if self.revision is None:
            return False
        return glob.has_magic(self.revision)

    @property
    def _borrowed_tokenizer(self) -> str | None:
        """The tokenizer for a local checkpoint that stores none, as a folder or name; else None."""
        if not self.local or self.tokenizer is None or self.file is not None:
            return None
        _, files = names_in(self.repo)
        if not {*TOKENIZER_FILES, "tokenizer.model"}.isdisjoint(files):
            return None
        path = Path(self.tokenizer).expanduser()
        if path.is_file():
            path = path.parent
        if not path.is_dir():
            return self.tokenizer
        return str(path.resolve())

    def arguments(self, commit: str | None = None, folder: str | None = None) -> dict[str, str]:
        """Return the arguments by which lm-eval loads the checkpoint, as for ``--model_args``.

        For an adapter, ``pretrained`` and ``revision`` are those of its base, and ``peft`` is the
        adapter; lm-eval has no revision for the adapter itself. ``tokenizer`` is added if a local
        checkpoint stores none and another one is known, or if an adapter has its own.

        Args:
            commit: The commit to load; None for the target's own revision.
            folder: The folder to which an adapter was downloaded; None to give the adapter by its
                name.
        """
        revision = commit or self.revision
        given: dict[str, str | None] = {
            "pretrained": self.place,
            "revision": revision,
            "gguf_file": self.file,
            "tokenizer": self._borrowed_tokenizer,
        }
        if self.on is not None:
            adapter = folder or label(self.place, revision)
            given["pretrained"] = self.on.place
            given["revision"] = self.on.revision
            given["peft"] = adapter
            if not self.on.tokenizer:
                given["tokenizer"] = adapter
        return {key: value for key, value in given.items() if value is not None}


# --- parsing ---------------------------------------------------------------------------------------------


def parse_targets(
    text: str, tokenizer: str | None = None, left_out: list[str] | None = None
) -> list[Target]:
    """Return the checkpoints that a user means by a name, a path, a glob or an address.

    A glob means the paths that match it. A folder means the checkpoints of the training run in it,
    or the models in its subfolders, or else the folder itself. A name that cannot be parsed or
    found gives a target with ``refused``. Globs and runs in remote storage remain one target, which
    is expanded later.

    Args:
        text: The name, path, glob or address.
        tokenizer: Repository, folder or file of a tokenizer for checkpoints that store none. If
            None, they use the tokenizer in the run's folder.
        left_out: List to which the subfolders that hold no model are appended.
    """
    targets: list[Target] = []
    for path in matching_paths(text) or [text]:
        target = parse_target(path, tokenizer)
        if target.local and target.file is not None and Path(target.repo, target.file).is_file():
            targets.append(target)
        elif target.local:
            try:
                run = checkpoints_in(target.repo)
            except ScreeningError as error:
                targets.append(replace(target, refused=(error.code, str(error))))
                continue
            if left_out is not None:
                left_out += run.left_out
            for folder in run.checkpoints:
                source = target.tokenizer or run.tokenizers.get(folder)
                targets.append(replace(target, repo=str(Path(folder)), tokenizer=source))
        else:
            targets.append(_not_local(target, path))
    return targets


def _not_local(target: Target, path: str) -> Target:
    """Refuse a bare name that is ``demo``, or close to the name of a family or of a local file."""
    from lmeval_screener.budgets import bundled_yaml

    is_plain = target.on_hub and "/" not in path and target.revision is None
    if target.refused or not is_plain:
        return target
    bundled = bundled_yaml(Path(__file__).with_name("families.yaml"))
    written = target.repo.lower()
    alike = [name for name in bundled["families"] if name.lower().startswith(written)]
    alike.sort(key=len)
    near = difflib.get_close_matches(target.repo, os.listdir(), n=1, cutoff=0.8)
    if written == "demo":
        why = "that is the bundled demo: run `screen-checkpoints --demo`"
    elif alike and alike[0].lower() == written:
        why = f"that is a family: run `screen-checkpoints --family {alike[0]}`"
    elif alike:
        names = ", ".join(alike)
        why = f"a family may be meant ({names}): run `screen-checkpoints --family {alike[0]}`"
    elif near:
        why = f"no folder has this name (did you mean {near[0]}?)"
    else:
        return target
    why = f"expected a checkpoint, got {path!r}; {why}, or name the Hub's repository hf://{path}"
    return replace(target, refused=("BadName", why))


def matching_paths(text: str) -> list[str]:
    """Return the local folders and weights files that match a glob, ordered by training step.

    The list is empty if the text is not a glob, or if a file or folder of exactly that name exists.
    """
    if "\0" in text:  # in no path
        return []
    path = os.path.expanduser(text.removeprefix("file://"))
    if "://" in path or not glob.has_magic(path) or os.path.exists(path):
        return []
    matches: list[str] = []
    for match in glob.glob(path):
        if match.endswith(SUFFIXES) or os.path.isdir(match):
            matches.append(match)
    return sorted(matches, key=step_key)


def parse_target(text: str, tokenizer: str | None = None) -> Target:
    """Parse the name of a checkpoint as `parse_name` does, without raising its errors.

    Args:
        text: The name.
        tokenizer: Repository, folder or file of a tokenizer, for a checkpoint that stores none.

    Returns:
        The target; if the name cannot be parsed, ``refused`` holds the error.
    """
    try:
        target = parse_name(text)
    except ScreeningError as error:
        return Target(without_secrets(text), refused=(error.code, str(error)))
    return replace(target, tokenizer=tokenizer)


def parse_name(text: str) -> Target:
    r"""Parse the name of a checkpoint: a repository, a folder, a weights file or an address.

    The text is a folder if that folder exists, or if it looks like a path (``./x``, ``/x``,
    ``~/x``, ``C:\x``). A repository is ``ORG/NAME`` or ``ORG/NAME@REVISION``, with ``hf://`` before
    it or not, or the address of its page on the Hub or on the host of HF_ENDPOINT. A GGUF model is
    given by the path of its file (``x/model.gguf``), or after a colon: ``ORG/NAME:Q4_K_M``,
    ``FOLDER:model-Q8_0.gguf``. Any other address (``s3://…``, ``https://…``, ``models:/…``) is kept
    as it is.

    Raises:
        ScreeningError: ``BadName``: the text is none of these. ``FolderNotFound``: the text is a
            path that does not exist, or names a file that holds no weights.
    """
    if "\0" in text:
        raise _bad(text, "a name cannot contain a NUL character")
    if text.startswith("models:/") and not text.startswith("models://"):
        if not MODEL.fullmatch(text) or not text.isprintable():
            raise _bad(
                text,
                "a registered model is models:/NAME, models:/NAME/VERSION, models:/NAME/STAGE, "
                "models:/NAME@ALIAS or models:/NAME/*",
            )
        return Target(text)
    if text.startswith("file://"):
        path = unquote(text.removeprefix("file://"))
        return parse_name(path or ".")
    local = _on_disk(text)
    if local is not None:
        return local
    rest, _, choice = text.rpartition(":")
    is_host = re.fullmatch(r"\w+://[^/]*", rest)
    is_choice = len(rest) > 1 and _GGUF_CHOICE.fullmatch(choice)
    if is_choice and not is_host:
        return replace(parse_name(rest), file=choice)
    scheme, mark, rest = text.partition("://")
    if not mark:
        first, slash, inside = text.partition("/")
        here = os.path.lexists(text) or (slash and (not inside or os.path.isdir(first)))
        if here or text.endswith(SUFFIXES) or re.match(r"[./~\\]|[A-Za-z]:[\\/]", text):
            raise _missing(text)
        name, at, revision = text.partition("@")
        if at and not revision:
            raise _bad(text, "the revision after the @ is missing")
    elif scheme in ("http", "https"):
        if not _is_page_of_hub(text):
            return Target("").at(text)
        name, revision = _page_of_revision(text)
    elif scheme == "hf":
        name, _, revision = rest.partition("@")
        name = name.rstrip("/").removeprefix("models/")
        revision = revision.rstrip("/")
        if name.startswith(("datasets/", "spaces/", "buckets/")) or name.count("/") > 1:
            raise _bad(text, "only whole model repositories can be read: hf://ORGANISATION/NAME")
    elif _SCHEME.fullmatch(scheme) and rest.strip("/") and rest.isprintable():
        return Target("").at(text.rstrip("/"))
    else:
        raise _bad(text, "an address needs a valid scheme before :// and a bucket or host after it")
    name = name.rstrip("/")
    if not REPOSITORY.fullmatch(name) or ".." in name:
        is_pattern = glob.has_magic(text)
        raise _bad(text, "the pattern matches no local path; check it" if is_pattern else "")
    return Target(name, revision or None)


def _missing(text: str) -> ScreeningError:
    """Return the error for a path that cannot be read, with the nearest existing name."""
    path = os.path.expanduser(text)
    near: list[str] = []
    if os.path.islink(path):
        why = ", a broken link"
    elif os.path.lexists(path):
        why = ", which is neither"
    elif glob.has_magic(path):
        why = ", which matches nothing"
    else:
        kind = "file" if text.endswith(SUFFIXES) else "folder"
        why = f"; that {kind} does not exist"
        folder, name = os.path.split(path.rstrip("/"))
        folders, files = names_in(folder or ".")
        entries = [*folders, *(file for file in files if file.endswith(SUFFIXES))]
        here = [joined(folder, entry) for entry in entries]
        near = difflib.get_close_matches(joined(folder, name), here, n=1)
    if near:
        why += f" (did you mean {near[0]}?)"
    why += ": check the path"
    if REPOSITORY.fullmatch(text) and "/" in text:
        why += f", or name the Hub's repository hf://{text}"
    return ScreeningError(
        "FolderNotFound", f"expected a folder or a weights file, got {text!r}{why}"
    )


def _on_disk(text: str) -> Target | None:
    """Return the target of an existing folder or weights file, or None."""
    path = Path(text)
    try:
        path = path.expanduser()
        is_file = path.is_file()
        is_folder = bool(text) and path.is_dir()
    except (OSError, RuntimeError, ValueError):  # an unknown ~user, a NUL, a name that is too long
        return None
    if is_file and is_gguf(path.name):
        return Target(str(path.parent), local=True, file=path.name)
    if is_folder or (is_file and path.name.endswith(SUFFIXES)):
        return Target(str(path), local=True)
    if is_file:
        what = f"the folder with config.json and the tokenizer: {path.parent}"
        if path.suffix in (".txt", ".csv"):
            what = f"a list of names on standard input: `screen-checkpoints - < {text}`"
        raise ScreeningError(
            "FolderNotFound",
            f"expected a folder or a weights file ({', '.join(SUFFIXES)}), got the file {text!r}; give "
            f"{what}",
        )
    return None


def _is_page_of_hub(text: str) -> bool:
    """Whether an address is of a page on the Hub, not of a file or folder elsewhere."""
    from huggingface_hub import constants

    try:
        address = urlsplit(text)
        endpoint = urlsplit(constants.ENDPOINT)
        port = address.port
    except ValueError:
        raise _bad(text) from None
    if not address.hostname or port == 0 or not text.isprintable():
        raise _bad(text, "its host is missing")
    return address.netloc in (endpoint.netloc, *_HOSTS)


def _page_of_revision(text: str) -> tuple[str, str]:
    """Return the repository and the revision of a page on the Hub; the revision may be empty."""
    path = urlsplit(text).path
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["models"] or parts[1:] == ["models"]:
        raise _bad(text, "that page lists models; write 'ORG/*' for the models of an organisation")
    if parts and parts[0] in ("datasets", "spaces", "papers", "collections", "buckets"):
        raise _bad(text, f"that page is about {parts[0]}, not a model")
    # gpt2/tree/main: the oldest repositories have no organisation.
    cut = 2
    if len(parts) == 1 or parts[1:2] in (["tree"], ["blob"], ["resolve"], ["commit"]):
        cut = 1
    name = "/".join(parts[:cut])
    verb, *revision = parts[cut:] or [""]
    if verb in ("", "commits"):
        return name, ""
    if verb in ("tree", "commit"):
        if revision[:1] == ["refs"]:
            return name, "/".join(revision)
        if len(revision) == 1:
            return name, unquote(revision[0])
    if revision:
        name += f"@{unquote(revision[0])}"
    raise _bad(text, f"that page does not show a whole revision; give the checkpoint: {name}")


def _bad(text: str, why: str = "") -> ScreeningError:
    message = f"expected {_FORMS}, got {text!r}"
    if why:
        message += f": {why}"
    return ScreeningError("BadName", message)


def storable(text: str) -> str:
    r"""Return a path as valid Unicode; bytes that are not UTF-8 become escapes (``\udcff``)."""
    return text.encode("utf-8", "backslashreplace").decode()


def path_of(text: str) -> str:
    """Undo `storable`: return the path that it turned into ``text``."""
    return re.sub(r"\\udc([89a-f][0-9a-f])", lambda byte: chr(0xDC00 + int(byte[1], 16)), text)


# --- labels ----------------------------------------------------------------------------------------------


def label(repo: str, revision: str | None, file: str | None = None) -> str:
    """Return ``repo``, followed by ``@revision`` and ``:file`` if they are not None."""
    if revision is not None:
        repo += f"@{revision}"
    if file is not None:
        repo += f":{file}"
    return repo


def labelled(targets: Sequence[Target]) -> list[Target]:
    """Return the targets with the attribute ``labelled`` set to a unique label for reports.

    The label of a Hub repository, or of its snapshot in a Hub cache, is its name. The label of any
    other target is the end of its path: as many parts as make it unique, and at least two for a
    GGUF file or a version of a registered model. A label that occurs twice gets a number:
    ``NAME (2)``.

    >>> targets = [Target("gg", local=True, file="a.gguf"), Target("models:/sums/2")]
    >>> [target.label for target in labelled(targets)]
    ['gg/a.gguf', 'sums/2']
    """
    from lmeval_dispersion.report.cells import short_names

    paths: dict[Target, str] = {}
    for target in targets:
        if not target.on_hub and _cached_name(target) is None:
            paths[target] = _path(target)
    short = dict(zip(paths, short_names(list(paths.values())), strict=True))
    seen = Counter[str]()
    with_labels: list[Target] = []
    for target in targets:
        text = _cached_name(target) or short.get(target, target.name)
        is_version = target.scheme == "models" or text.endswith(".gguf")
        if target in paths and "/" not in text and is_version:
            text = "/".join(paths[target].rsplit("/", 2)[-2:])
        seen[text] += 1
        if seen[text] > 1:
            text = f"{text} ({seen[text]})"
        with_labels.append(replace(target, labelled=text))
    return with_labels


def _cached_name(target: Target) -> str | None:
    """The repository of a folder in a Hub cache; None for any other."""
    return cached_name(target.place) if target.local else None


def shared_name(targets: Sequence[Target]) -> str:
    """Return the name of the innermost folder, organisation or repository that all targets share.

    The text is empty if they share none. For a single target, it is the last part of its own name
    or path.

    >>> shared_name([Target("runs/a", local=True), Target("runs/b", local=True)])
    'runs'
    """
    paths = []
    for target in targets:
        path = target.repo if target.on_hub else _path(target)
        paths.append(_cached_name(target) or path)
    kinds = {(target.scheme, target.local) for target in targets}
    if len(kinds) > 1:
        return ""
    if len(paths) > 1:
        return os.path.basename(os.path.commonpath(paths))
    return paths[0].rpartition("/")[2]


def _path(target: Target) -> str:
    if target.local:
        # Absolute, so that `.` has a name.
        absolute = os.path.abspath(target.repo)
        path = printable(absolute.replace(os.sep, "/"))
    else:
        _, _, place = target.shown.partition(":/")
        path = place.strip("/")
    if target.file is None:
        return path
    file = printable(target.file)
    if is_gguf(target.file):
        return f"{path}/{file}"
    return f"{path}:{file}"
