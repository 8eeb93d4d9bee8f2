"""Texts to run a model on: from a file or a Hub data set, one at a time, with what was left out counted.

A source is

- ``*.txt``: paragraphs, which blank lines separate; they belong to one running document;
- ``*.jsonl`` (also ``.gz``): one JSON object a line, the text under ``column``; every line its own document;
- ``*.parquet``: the column ``column``; every row its own document;
- anything else that is not a file: a data set id of the Hugging Face Hub, streamed through ``datasets``.

Nothing is read before iteration starts and nothing is kept: a source of any size needs the memory of one
text. Empty and undecodable texts are skipped and counted, never passed on.
"""

from __future__ import annotations

import difflib
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from lmeval_dispersion.errors import MissingExtraError, UsageError

FILE_KINDS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")

_PARQUET_ROWS = 1024  # rows decoded at a time


class Text(NamedTuple):
    """One text of a source.

    Attributes:
        id: Position in the source, from 0, counting skipped texts too: stable whatever is skipped.
        text: The text itself, never empty.
        document: Texts with the same number continue each other; rows of a data set each have their own.
    """

    id: int
    text: str
    document: int


class Texts:
    """A source of texts: iterate over it as often as needed; every pass starts anew.

    Args:
        source: A file (see the module) or a Hub data set id.
        column: Name of the text's field in JSONL, parquet and Hub data sets.
        config: Configuration of a Hub data set, where it has several.
        split: Split of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.

    Attributes:
        skipped: ``{"empty": n, "undecodable": n}`` of the latest pass, as far as it has come. Undecodable
            is a line or a paragraph that is not UTF-8, a line that is not a JSON object with a text, a
            parquet value that is no text.

    Raises:
        UsageError: The file does not exist, is of another kind, or is a folder.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        column: str = "text",
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
    ) -> None:
        self.source = str(source)
        self.column, self.config, self.split, self.revision = column, config, split, revision
        self.skipped: Counter[str] = Counter(empty=0, undecodable=0)
        self.read = 0
        self.path = _file(self.source)

    @property
    def continuous(self) -> bool:
        """Whether all texts belong to one running document (a text file)."""
        return self.path is not None and self.path.suffix == ".txt"

    def __iter__(self) -> Iterator[Text]:
        self.skipped, self.read = Counter(empty=0, undecodable=0), 0
        for value in self._values():
            number = self.read
            self.read += 1
            if not isinstance(value, str):
                self.skipped["undecodable"] += 1
            elif not value.strip():
                self.skipped["empty"] += 1
            else:
                yield Text(number, value, 0 if self.continuous else number)

    def report(self) -> str | None:
        """What the latest pass skipped, as a sentence for stderr; None where nothing was."""
        parts = [f"{count} {reason}" for reason, count in self.skipped.items() if count]
        return f"{self.source}: skipped {' and '.join(parts)} of {self.read} texts" if parts else None

    def _values(self) -> Iterator[Any]:
        if self.path is None:
            return self._hub_values()
        if self.path.suffix == ".parquet":
            return _parquet_values(self.path, self.column)
        return _paragraphs(self.path) if self.continuous else self._lines(self.path)

    def _lines(self, path: Path) -> Iterator[str | None]:
        known: set[str] = set()
        found = False
        with _opened(path) as file:
            for line in file:
                if not line.strip():
                    continue
                value = _json_object(line)
                if value is None:
                    yield None
                    continue
                known.update(value)
                found = found or self.column in value
                text = value.get(self.column)
                yield text if isinstance(text, str) else None
        if known and not found:
            raise UsageError(_no_column(self.source, self.column, sorted(known)))

    def _hub_values(self) -> Iterator[Any]:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtraError(
                "data sets of the Hub need the package datasets; pip install 'lmeval-dispersion[models]'"
            ) from error
        try:
            rows = datasets.load_dataset(
                self.source, self.config, split=self.split, revision=self.revision, streaming=True
            )
            for row in rows:
                if self.column not in row:
                    raise UsageError(_no_column(self.source, self.column, sorted(row)))
                yield row[self.column]
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UsageError(
                f"expected a file or a Hub data set with split {self.split!r}, got {self.source!r}: {first}; "
                "check the id, its configuration and its split, or pass a local file"
            ) from error


def _file(source: str) -> Path | None:
    """The source as a file of a known kind; None where it is a Hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        raise UsageError(
            f"expected a file or a Hub data set id, got the folder {source}; name one file in it"
        )
    known = any(path.name.endswith(kind) for kind in FILE_KINDS)
    if path.is_file():
        if not known:
            raise UsageError(f"expected a file of {', '.join(FILE_KINDS)}, got {source}; convert it to one")
        return path
    if known or source.startswith((".", "/", "~")) or source.count("/") > 1:
        folder = path.parent if path.parent.is_dir() else None
        near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1) if folder else []
        hint = f"did you mean {path.parent / near[0]}?" if near else "check the path"
        raise UsageError(f"the file {source} does not exist; {hint}")
    return None


def _opened(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))
    except OSError as error:
        raise UsageError(f"the file {path} cannot be read: {error.strerror or error}") from error


def _paragraphs(path: Path) -> Iterator[str | None]:
    with _opened(path) as file:
        lines: list[bytes] = []
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield _decoded(b"".join(lines))
                lines = []
        if lines:
            yield _decoded(b"".join(lines))


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


def _parquet_values(path: Path, column: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError(
            "parquet files need the package pyarrow; pip install 'lmeval-dispersion[models]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise UsageError(_no_column(str(path), column, sorted(file.schema_arrow.names)))
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[column]):
                yield from batch.column(0).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"expected a parquet file, got {path}: {str(error).splitlines()[0]}") from error


def _no_column(source: str, column: str, known: list[str]) -> str:
    return f"expected texts under {column!r} in {source}, which has {', '.join(known[:20])}; name the column"
