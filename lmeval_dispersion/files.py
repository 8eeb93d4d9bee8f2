"""Files that are written atomically, JSON files with a schema, digests, and cached arrays."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.layouts import checked

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
#: Bytes of a JSON file of our own: the list of 20,000 checkpoints has 10 MB.
MOST_JSON = 48 << 20
#: Errors of a disk, or a quota, that is full.
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def hashed(text: str) -> str:
    """Return the SHA-256 of a text as hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def json_in(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON in UTF-8, or is too large or too deeply nested.
    """
    with path.open("rb") as file:
        content = file.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise ValueError(f"it has more than {MOST_JSON >> 20} MiB")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(
    path: Path,
    layout: type[T],
    what: str,
    schema: str,
    hint: str,
    *,
    key: str = "schema",
    repair: str,
) -> T:
    """Read a JSON file that this package wrote, and check its schema and content.

    Args:
        path: The file.
        layout: Class that describes the content, with or without the key of the schema (see
            `lmeval_dispersion.layouts`).
        what: What the file should contain, for messages, such as ``a calibrator``.
        schema: Name and version of the expected schema, such as ``screen-checkpoints/3``.
        hint: What to do if the file is something else, for messages.
        key: Key under which the file names its schema.
        repair: What to do if the file has this schema but does not fit the layout, for messages.

    Returns:
        The content as an instance of ``layout``.

    Raises:
        UsageError: The file cannot be read, is not JSON, has another schema, or is damaged.
    """
    try:
        content = json_in(path)
    except FileNotFoundError:
        why = "does not exist"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except ValueError:
        why = "is not JSON that can be read"
    else:
        held = content.get(key) if isinstance(content, dict) else None
        if held == schema:
            return checked(layout, content, path, repair)
        why = "holds other JSON"
        if isinstance(held, str) and held:
            why = f"has the schema {held[:100]}"
    raise UsageError(f"expected {what} ({schema}), but {path} {why}; {hint}")


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically, by way of a temporary file that is flushed to the disk.

    A pipe or a device is written directly.

    Raises:
        DispersionError: The file cannot be written.
    """
    place = Path(os.path.realpath(path))
    part = place.with_name(f".{place.name[:50]}.{os.getpid()}")  # 255 bytes at most
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(content)  # a pipe or a device cannot be replaced
            return
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if place.exists():
                shutil.copymode(place, part)
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        free = "free some space or " * (error.errno in FULL)
        raise DispersionError(
            f"could not write {path}: {error.strerror or error}; {free}name another file"
        ) from error


def remove_parts(folder: Path) -> None:
    """Remove the temporary files that a killed `write_whole` left in a folder.

    No other process may be writing in the folder.
    """
    for part in folder.glob(".*"):
        if re.fullmatch(r"\..+\.\d+", part.name) and not part.is_dir():
            part.unlink(missing_ok=True)


def keep_arrays(path: Path, compute: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
    """Write the arrays that ``compute()`` returns to an .npz file, unless the file exists.

    The file is written by `write_whole`, so that an interrupted program leaves no partial file.
    """
    if path.exists():
        return
    import numpy as np

    content = io.BytesIO()
    np.savez(content, **compute())  # type: ignore[arg-type]
    write_whole(path, content.getbuffer())
