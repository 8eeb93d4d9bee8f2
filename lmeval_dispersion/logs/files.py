"""One file of lm-eval's logs: whether it holds samples or results, its text, and the lines of its samples."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lmeval_dispersion.errors import HarnessError, brief
from lmeval_dispersion.logs import inspect

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_FIRST_KEY = re.compile(rb'"(doc_id|results)"\s*:')
# Keys of a line other than metrics.
_KEYS = frozenset(
    {
        "doc_id",
        "doc",
        "target",
        "arguments",
        "resps",
        "filtered_resps",
        "filter",
        "metrics",
        "doc_hash",
        "prompt_hash",
        "target_hash",
        "block",
    }
)
_BOM = "\ufeff"
_SNIFFED = 1 << 16  # bytes that show what a file holds
_LONGEST_LINE = 1 << 28  # bytes of one document
_LARGEST = 1 << 31  # bytes of a file that is read in one piece: results, or an array of samples
_MOST_LINES = 20_000_000
_MOST_ID = 1 << 53


@dataclass(frozen=True)
class Line:
    """A logged document under one filter.

    Attributes:
        place: File of the document, and its line or its number in the file. Messages begin with it.
        doc_id: Index of the document in its task.
        content: The logged JSON object; for a log of Inspect, a mapping with the same keys.
        filter: Name of the filter, or of Inspect's scorer; None in samples of lm-eval before 0.4.7.
        metrics: Name -> value of each metric, as logged. Names that begin with ``dispersion`` are
            left out.
        digest: Hash of the line; equal lines have equal hashes. 0 in a log of Inspect.
    """

    place: str
    doc_id: int
    content: Mapping[str, Any]
    filter: str | None
    metrics: dict[str, Any]
    digest: int


def kind_of(file: Path) -> str:
    """Return what a file holds: ``samples``, ``results``, or ``inspect`` for a log of Inspect.

    The name decides for ``samples_…`` and ``.eval``, the first bytes for other names. The result is
    an empty text for any other kind of file, and if the first bytes cannot be read.
    """
    if not file.name.endswith((*SUFFIXES, inspect.SUFFIX)):
        return ""
    if file.name.startswith("samples_"):
        return "samples"
    try:
        with _opened(file) as stream:
            head = stream.read(_SNIFFED)
    except (OSError, EOFError, zlib.error):
        return ""
    if inspect.is_inspect_log(file, head):
        return "inspect"
    key = _FIRST_KEY.search(head)
    if key is None or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        return ""
    return "results" if key[1] == b"results" else "samples"


def whole_text(file: Path) -> str:
    """Return the text of a file, unpacked and without a byte-order mark.

    Raises:
        HarnessError: The file cannot be read, is larger than 2 GiB, or is not UTF-8.
    """
    try:
        with _opened(file) as stream:
            content = stream.read(_LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise HarnessError(
            f"{file} cannot be read ({_reason(error)}); check its permissions, or copy it again"
        ) from None
    if len(content) > _LARGEST:
        raise HarnessError(
            f"{file}: expected at most {_LARGEST:,} bytes, got more; evaluate fewer documents "
            "(`lm_eval --limit`)"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(file, content.count(b"\n", 0, error.start) + 1) from None


def json_object(text: str, place: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Args:
        text: The text.
        place: Where the text is from; the message begins with it.

    Raises:
        HarnessError: The text is not a JSON object, for example because it is cut off.
    """
    try:
        value = json.loads(text.removeprefix(_BOM))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _cut(place)
    return value


def number_of(value: object) -> float:
    """Return a logged number as a float; NaN for None, or for a number that a float cannot hold.

    Raises:
        TypeError: The value is something else, such as a text or a list.
    """
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise TypeError(value)
    try:
        return float(value)
    except OverflowError:
        return math.nan


def writable(text: str) -> str:
    """Return ``text`` with ``?`` in place of each lone surrogate, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def read_lines(file: Path, text: str | None = None) -> Iterator[Line]:
    """Yield the logged documents of a file of samples or a log of Inspect; at least one.

    Args:
        file: The file; messages begin with its path.
        text: Content of the file; None to read the file.

    Raises:
        HarnessError: The file cannot be read, is too large, empty, cut off, not UTF-8, or was not
            written by lm-eval or Inspect. The message names the line, if one is to blame.
        MissingExtraError: The file is a log of Inspect, and inspect_ai is not installed.
    """
    if text is None and kind_of(file) == "inspect":
        yield from _inspect_lines(file)
        return
    raw = _text_lines(file) if text is None else iter(text.split("\n"))
    count = 0
    for number, line in enumerate(raw, 1):
        if not line.strip():
            continue
        if not count and line.lstrip(_BOM).lstrip().startswith("["):
            yield from _array(whole_text(file) if text is None else text, file)
            return
        count += 1
        if count > _MOST_LINES:
            raise HarnessError(
                f"{file}: expected at most {_MOST_LINES:,} lines, got more; evaluate fewer "
                "documents (`lm_eval --limit`)"
            )
        place = f"{file}: line {number}"
        yield _line(json_object(line, place), place, hash(line))
    if not count:
        raise _empty(file)


def _inspect_lines(file: Path) -> Iterator[Line]:
    for judgement in inspect.read_judgements(file):
        metrics = {writable(name): value for name, value in judgement.metrics.items()}
        yield Line(
            place=f"{file}: sample {brief(judgement.sample)}",
            doc_id=judgement.number,
            content=judgement.content,
            filter=writable(judgement.scorer),
            metrics=metrics,
            digest=0,
        )


def _array(text: str, file: Path) -> Iterator[Line]:
    """The elements of one JSON array of documents, as lm-eval 0.4.0 to 0.4.2 wrote it."""
    try:
        documents = json.loads(text)
    except json.JSONDecodeError as error:
        raise _cut(f"{file}: line {error.lineno}") from None
    except (ValueError, RecursionError):
        raise _cut(str(file)) from None
    if not documents:
        raise _empty(file)
    for number, content in enumerate(documents, 1):
        place = f"{file}: element {number}"
        if not isinstance(content, dict):
            raise _cut(place)
        yield _line(content, place, hash(json.dumps(content)))


def _line(content: Mapping[str, Any], place: str, digest: int) -> Line:
    if "doc_id" not in content:
        raise HarnessError(
            f"{place}: expected a document that lm-eval logged, got an object without `doc_id`; "
            "name a file samples_TASK_DATE.jsonl that lm-eval wrote"
        )
    doc_id = content["doc_id"]
    if isinstance(doc_id, str) and doc_id.isascii() and doc_id.isdigit() and len(doc_id) < 16:
        doc_id = int(doc_id)
    if isinstance(doc_id, bool) or not isinstance(doc_id, int) or not 0 <= doc_id < _MOST_ID:
        raise HarnessError(
            f"{place}: expected `doc_id` to be a whole number from 0 to 2**53 - 1, got "
            f"{brief(doc_id)}; run lm-eval again"
        )
    name = content.get("filter")
    if "filter" in content and not isinstance(name, str):
        raise HarnessError(
            f"{place}: expected `filter` to be a name, got {brief(name)}; run lm-eval again"
        )
    names: Any = [key for key in content if key not in _KEYS]
    if "metrics" in content:
        names = content["metrics"]
        if not isinstance(names, list) or not all(isinstance(metric, str) for metric in names):
            raise HarnessError(
                f"{place}: expected `metrics` to be a list of names, got {brief(names)}; run lm-eval again"
            )
    metrics: dict[str, Any] = {}
    for metric in names:
        if metric in content and not metric.startswith("dispersion"):
            metrics[writable(metric)] = content[metric]
    return Line(
        place=place,
        doc_id=doc_id,
        content=content,
        filter=None if name is None else writable(name),
        metrics=metrics,
        digest=digest,
    )


def _opened(file: Path) -> BinaryIO:
    """A file's bytes, unpacked."""
    if file.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(file))
    return file.open("rb")


def _text_lines(file: Path) -> Iterator[str]:
    # Not splitlines: lm-eval keeps U+2028 and similar characters inside a text.
    number = 0
    try:
        with _opened(file) as stream:
            while line := stream.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    raise HarnessError(
                        f"{file}: line {number}: expected at most {_LONGEST_LINE:,} bytes, got more; "
                        "leave this document out (`lm_eval --samples`)"
                    )
                yield line.decode("utf-8")
    except UnicodeDecodeError:
        raise _not_utf8(file, number) from None
    except (OSError, EOFError, zlib.error) as error:
        raise HarnessError(
            f"{file}: line {number + 1} cannot be read ({_reason(error)}); check the file's "
            "permissions, or copy it again"
        ) from None


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.rstrip(".")


def _cut(place: str) -> HarnessError:
    return HarnessError(
        f"{place} is cut off, or is not JSON that lm-eval wrote; copy the file again, or run lm-eval again"
    )


def _empty(file: Path) -> HarnessError:
    return HarnessError(f"{file} is empty; copy it again, or run lm-eval again")


def _not_utf8(file: Path, line: int) -> HarnessError:
    return HarnessError(
        f"{file}: line {line} is not UTF-8; copy the file again, or run lm-eval again"
    )
