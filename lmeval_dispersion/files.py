"""Files written whole, JSON of a schema, digests; a killed process loses one unit of its work."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically, through to the disk: to a temporary file first, then renamed."""
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
        raise DispersionError(
            f"could not write {path}: {error.strerror or error}; free some space or name another file"
        ) from error


def read_json(file: Path, schema: str, what: str, hint: str) -> dict[str, Any]:
    """The content of a JSON file of a schema.

    Raises:
        UsageError: There is no such file, or another one; ``what`` was expected, ``hint`` is the next step.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: expected {what}, got {error.strerror or error}; {hint}") from error
    except ValueError as error:
        raise UsageError(f"{file}: expected {what} as JSON; {hint}") from error
    given = content.get("schema") if isinstance(content, dict) else None
    if given != schema:
        other = given or "other JSON"
        raise UsageError(f"{file}: expected {what} with the schema {schema}, got {other}; {hint}")
    whole: dict[str, Any] = content
    return whole


def keep_arrays(path: Path, compute: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
    """Write the arrays of a unit of work, unless an earlier process did: a killed one loses one unit."""
    if path.exists():
        return
    import numpy as np

    content = io.BytesIO()
    np.savez(content, **compute())  # type: ignore[arg-type]
    write_whole(path, content.getbuffer())
