"""Names, addresses and paths that a user writes for a checkpoint, parsed or explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from lmeval_screener.errors import ScreeningError

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
