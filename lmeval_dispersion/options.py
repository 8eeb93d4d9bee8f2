"""What commands share: options with the same names and help, and where a report goes.

Only the standard library is imported before a report is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import DispersionError, UsageError

if TYPE_CHECKING:
    from lmeval_dispersion.report import Document

FORMATS = ("table", "markdown", "csv", "json", "html")
_SUFFIXES = {
    ".txt": "table",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".htm": "html",
}


def add_output(parser: argparse._ActionsContainer, formats: Sequence[str] = FORMATS) -> None:
    """Add ``--format`` and ``-o/--output FILE``; :meth:`Output.of` reads them."""
    parser.add_argument(
        "--format",
        choices=formats,
        help="form of the report (default: by the suffix of --output, else table)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there (default: to standard output)"
    )
    parser.set_defaults(formats=tuple(formats))


def add_layer(
    parser: argparse._ActionsContainer, *, what: str = "layer of the vectors", default: str = "the run's own"
) -> None:
    """Add ``--layer LAYER``, None where it is not given; ``default`` says in words what is taken then."""
    parser.add_argument("--layer", metavar="LAYER", help=f"{what} (default: {default})")


def add_slice(parser: argparse._ActionsContainer) -> None:
    """Add ``--slice COLUMN``, a list of columns of the documents; empty where it is not given."""
    parser.add_argument(
        "--slice",
        action="append",
        default=[],
        metavar="COLUMN",
        help="also slice by this column of the documents; may be repeated (default: none)",
    )


def add_seed(parser: argparse._ActionsContainer, *, default: int = 0) -> None:
    """Add ``--seed N``."""
    parser.add_argument(
        "--seed", type=int, default=default, metavar="N", help="seed of all draws (default: %(default)s)"
    )


@dataclass(frozen=True)
class Output:
    """Where a report goes, and in which form; checked before the work starts.

    Attributes:
        format: One of :data:`FORMATS`.
        path: The file; None for standard output.
    """

    format: str
    path: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Output:
        """The output that the options of :func:`add_output` name.

        Raises:
            UsageError: The suffix stands for no format, or the file cannot be written.
            MissingExtraError: The format needs a library that is not installed.
        """
        from lmeval_dispersion.report import require

        path: Path | None = args.output
        output_format = args.format or "table"
        if path is not None:
            _check_writable(path)
            if args.format is None:
                output_format = _by_suffix(path, args.formats)
        require(output_format)
        return cls(output_format, path)

    def write(self, document: Document) -> None:
        """Render the report, write or print it, and say on stderr which file was written.

        Raises:
            DispersionError: The file could not be written; an older file is as it was.
        """
        from lmeval_dispersion.report import render

        if self.path is not None:
            self.write_text(render(document, self.format))
            return
        terminal = sys.stdout.isatty()
        text = render(
            document,
            self.format,
            width=shutil.get_terminal_size().columns if terminal else None,
            colour=terminal and "NO_COLOR" not in os.environ,
            encoding=_stdout_encoding(),
        )
        self.write_text(text)

    def write_text(self, text: str) -> None:
        """Write or print text that was rendered elsewhere; see :meth:`write`."""
        if self.path is None:
            _print(text, self.format)
        else:
            write_whole(self.path, text.encode("utf-8", "backslashreplace"))
            print(f"wrote {self.path}", file=sys.stderr)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never half there: beside it first, then in its place.

    Raises:
        DispersionError: It could not be written; what was there before still is.
    """
    place = Path(os.path.realpath(path))
    beside = place.with_name(f".{place.name[:200]}.{os.getpid()}")
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(content)  # a pipe or a device, which nothing can take the place of
            return
        try:
            beside.write_bytes(content)
            if place.exists():
                shutil.copymode(place, beside)
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise DispersionError(
            f"could not write {path}: {error.strerror or error}; free some space or name another --output"
        ) from error


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"expected --output to be a file, got the folder {path}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"expected --output in an existing folder, got {path}; make {folder} first")
    if not os.access(path if path.exists() else folder, os.W_OK) or not (
        os.access(folder, os.W_OK) or (path.exists() and not path.is_file())
    ):
        raise UsageError(f"expected --output where writing is allowed, got {path}")


def _by_suffix(path: Path, formats: Sequence[str]) -> str:
    known = {suffix: name for suffix, name in _SUFFIXES.items() if name in formats}
    try:
        return known[path.suffix.lower()]
    except KeyError:
        raise UsageError(
            f"expected --output with the suffix {', '.join(known)}, or with --format, got {path}"
        ) from None


def _stdout_encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _print(text: str, output_format: str) -> None:
    """Print what standard output's encoding can hold; files for programs are UTF-8 where it cannot."""
    try:
        text.encode(_stdout_encoding())
    except UnicodeEncodeError:
        if output_format in ("csv", "html", "json") and hasattr(sys.stdout, "buffer"):
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
            sys.stdout.buffer.flush()
            return
        from lmeval_dispersion.report.terminal import spelled

        text = spelled(text, _stdout_encoding())
    sys.stdout.write(text)
    sys.stdout.flush()
