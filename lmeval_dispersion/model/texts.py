"""Texts for a model: from a file or a Hub data set, one at a time, counting those left out.

A source is

- ``*.txt``: paragraphs separated by blank lines; they belong to one continuous document;
- ``*.jsonl`` (also ``.gz``): one JSON object per line, the text under ``column``; every line is a document;
- ``*.parquet``: the column ``column``; every row is a document;
- anything else that is not a file: a data set of the Hugging Face Hub, ``ID[:CONFIGURATION][@SPLIT]``,
  streamed through ``datasets``.

Nothing is read before iteration starts or kept afterwards: a source of any size needs the memory of one
text. Empty and undecodable texts are skipped and counted, never passed on.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lmeval_dispersion.errors import UsageError, first_line, require_extra
from lmeval_dispersion.layouts import nearest

FILE_KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")

_HUB = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")


class SourceText(NamedTuple):
    """One text of a source of texts (see `Texts`).

    Attributes:
        id: Number of the text in the source, counted from 0.
        text: The text.
    """

    id: int
    text: str


class Texts:
    """The texts of a file or of a data set of the Hub; each iteration starts at the beginning.

    Args:
        source: A file or a data set of the Hub (see the module).
        column: Name of the field with the text in JSONL, parquet and data sets of the Hub.

    Attributes:
        revision: Branch, tag or commit of a data set of the Hub; None for the main branch.
        read: Number of texts in the latest iteration so far, including skipped ones.
        skipped: Number of ``empty`` and of ``undecodable`` texts in the latest iteration so far.
            A text is undecodable if it is not UTF-8, or if its line is not a JSON object or has no
            text under ``column``, or if its value in a parquet file or a data set is not text.

    Raises:
        UsageError: The file does not exist, is a folder or of an unknown kind; or, while iterating,
            the source cannot be read or has no field ``column``.
    """

    def __init__(self, source: str | Path, *, column: str = "text") -> None:
        self.source = str(source)
        self.column = column
        self.revision: str | None = None
        self.read = 0
        self.skipped = Counter[str](empty=0, undecodable=0)
        self.path = _file(self.source)
        match = None if self.path else _HUB.fullmatch(self.source)
        parts = match.groupdict() if match else {}
        self.name: str = parts.get("id") or self.source
        self.config = parts.get("config")
        self.split = parts.get("split") or "train"

    @property
    def continuous(self) -> bool:
        """Whether all texts belong to one continuous document, as they do in a text file."""
        return self.path is not None and self.path.suffix == ".txt"

    def __iter__(self) -> Iterator[SourceText]:
        self.read = 0
        self.skipped = Counter(empty=0, undecodable=0)
        for value in self._values():
            number = self.read
            self.read += 1
            if not isinstance(value, str):
                self.skipped["undecodable"] += 1
            elif not value.strip():
                self.skipped["empty"] += 1
            else:
                yield SourceText(number, value)

    def report(self) -> str | None:
        """Return a line on the texts that the latest iteration skipped; None if it skipped none."""
        parts = [f"{count} {reason}" for reason, count in self.skipped.items() if count]
        if not parts:
            return None
        number = sum(self.skipped.values())
        return f"{self.source}: skipped {number} of {self.read} texts ({', '.join(parts)})"

    def objects(self) -> Iterator[dict[str, Any] | None]:
        """Yield the JSON object in each non-blank line of a JSONL file.

        None is yielded for a line that is not valid JSON, or holds another value than an object.
        """
        assert self.path is not None
        return (_json_object(line) for line in _lines(self.path) if line.strip())

    def _values(self) -> Iterator[Any]:
        """Every text; a value that is not a string if one cannot be decoded."""
        if self.path is None:
            yield from self._column(self._hub_rows())
        elif self.path.suffix == ".parquet":
            yield from self._parquet_values(self.path)
        elif self.continuous:
            for filled, lines in groupby(_lines(self.path), lambda line: bool(line.strip())):
                if filled:
                    yield _decoded(b"".join(lines))
        else:
            yield from self._column(self.objects())

    def _column(self, rows: Iterable[dict[str, Any] | None]) -> Iterator[Any]:
        """The column of every row; None for an invalid row."""
        known: set[str] = set()
        for row in rows:
            if row is None:
                yield None
            else:
                known.update(row)
                yield row.get(self.column)
        if known:
            self._check_column(known)

    def _check_column(self, known: Iterable[str]) -> None:
        if self.column not in known:
            raise UsageError(
                f"expected texts under {self.column!r} in {self.source}, whose fields are "
                f"{', '.join(sorted(known)[:20])}; give the right column"
            )

    def _hub_rows(self) -> Iterator[dict[str, Any]]:
        require_extra("models", "a data set of the Hub")
        import datasets

        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )
            for row in rows:
                self._check_column(row)  # a stream may be endless
                yield row
        except (OSError, ValueError) as error:
            raise UsageError(
                f"expected a file or a Hub data set with split {self.split!r}, got {self.source!r}: "
                f"{first_line(error)}; check the id, its configuration and its split, or pass a local file"
            ) from error

    def _parquet_values(self, path: Path) -> Iterator[Any]:
        require_extra("audit", "a parquet file")
        import pyarrow
        import pyarrow.parquet as parquet

        try:
            with parquet.ParquetFile(path) as file:
                self._check_column(file.schema_arrow.names)
                for batch in file.iter_batches(1024, columns=[self.column]):
                    yield from batch.column(0).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise UsageError(
                f"expected a parquet file, got {path} ({first_line(error)}); check the file, or download it "
                "again"
            ) from error


#: A source of texts, or what names it.
DataLike = str | Path | Texts


def _file(source: str) -> Path | None:
    """The source as a file of a known kind; None for a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        raise UsageError(
            f"expected a file or the id of a Hub data set, got the folder {source}; give a file in it"
        )
    known = any(path.name.endswith(kind) for kind in FILE_KINDS)
    if path.is_file():
        if not known:
            raise UsageError(
                f"expected a file of type {', '.join(FILE_KINDS)}, got {source}; convert it to one of these"
            )
        return path
    if known or source.startswith((".", "/", "~")) or source.count("/") > 1:
        names = [file.name for file in path.parent.glob("*")]
        hint = nearest(path.name, names) or "; check the path"
        raise UsageError(f"the file {source} does not exist{hint}")
    return None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    # The last two come from an interrupted download.
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the file {path} cannot be read: {reason}; check the file, or download it again"
        ) from error


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8").strip("\r\n")
    except UnicodeDecodeError:
        return None


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # bad UTF-8 is a ValueError too
        return None
    return value if isinstance(value, dict) else None
