"""Where and how a command writes its report: format, file or standard output, progress.

Before a report is written, only the standard library is imported, and tqdm for a progress bar.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.report.forms import PICTURES, file_bytes, form_of, render, require

if TYPE_CHECKING:
    from lmeval_dispersion.report import Document

_PATIENCE = 1.0  # seconds without progress


@dataclass(frozen=True)
class Output:
    """Where a command writes its report, and in which formats.

    Attributes:
        format: The format on standard output; not used if there are files.
        files: Path of each file to write -> its format.
        quiet: Whether to print nothing but errors on standard error, and nothing on standard output
            if there are files.
        command: The command as the user typed it; empty in Python.
        details: Whether the format ``table`` shows the report's details, too.
    """

    format: str = "table"
    files: Mapping[Path, str] = field(default_factory=dict)
    quiet: bool = False
    command: str = ""
    details: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Output:
        """Return the output that a command's parsed arguments ask for (see `add_output`).

        Raises:
            UsageError: A format or a file's suffix is unknown, or a file cannot be written.
            MissingExtraError: The format needs a library that is not installed.
        """
        paths = args.output or []
        if isinstance(paths, Path):
            paths = [paths]
        files = {}
        for path in paths:
            _check_writable(path)
            step = "rename it, or name the format with `--format`"
            files[path] = args.format or form_of(path, step, argument="output")
        output_format = args.format or "table"
        for form in (output_format, *files.values()):
            require(form)
        given = vars(args)
        return cls(
            format=output_format,
            files=files,
            quiet=given.get("quiet", False),
            command=given.get("command", ""),
            details=given.get("details", False),
        )

    @property
    def formats(self) -> Set[str]:
        """The formats that are written, on standard output or to files."""
        return set(self.files.values()) or {self.format}

    @property
    def short(self) -> bool:
        """Whether the details appear nowhere: all output is text tables, and ``details`` is not set."""
        return self.formats == {"table"} and not self.details

    def write(self, document: Document, *, table: str | None = None) -> None:
        """Print the report, or write it to :attr:`files` and print only its answer unless ``quiet``.

        The answer is the paragraphs with which the report begins.

        Args:
            document: The report; the command is added to it.
            table: A text that replaces the report in the format ``table``; if all files have this
                format, nothing is printed. None for the report itself.

        Raises:
            UsageError: A file is a picture, but the report has no chart. All other files have then
                been written.
            DispersionError: A file cannot be written.
        """
        document = replace(document, command=document.command or self.command)
        if not self.files:
            if table is None or self.format != "table":
                table = self._shown(document)
            _print(table, self.format)
            return
        if table is None or self.formats != {"table"}:
            self._print_answer(document)
        for path in sorted(self.files, key=lambda path: self.files[path] in PICTURES):
            form = self.files[path]
            if form == "table" and table is not None:
                self._write_file(path, table.encode("utf-8", "backslashreplace"))
            else:
                self._write_file(path, file_bytes(document, form, details=self.details))

    def write_text(self, text: str) -> None:
        """Print a text, or write it to :attr:`files` and name the files on standard error.

        Raises:
            DispersionError: A file cannot be written.
        """
        if not self.files:
            _print(text, self.format)
        for path in self.files:
            self._write_file(path, text.encode("utf-8", "backslashreplace"))

    def _shown(self, document: Document) -> str:
        """The report as standard output shows it."""
        terminal = sys.stdout.isatty()
        sized = terminal or os.environ.get("COLUMNS", "").isdigit()
        return render(
            document,
            self.format,
            width=shutil.get_terminal_size().columns if sized else None,
            colour=terminal and "NO_COLOR" not in os.environ,
            encoding=_stdout_encoding(),
            details=self.details,
        )

    def _print_answer(self, document: Document) -> None:
        """Print the answer's lines, which files alone would hide, unless ``--quiet``."""
        if self.quiet or not document.answer:
            return
        answer = replace(document, sections=(), limits=(), short=True)
        text = replace(self, format="table")._shown(answer)
        if any(map(_is_stdout, self.files)):
            print(text, end="", file=sys.stderr)
        else:
            _print(text, "table")

    def _write_file(self, path: Path, content: bytes) -> None:
        from lmeval_dispersion.files import write_whole

        write_whole(path, content)
        self.say(f"wrote {path}")

    def say(self, text: str) -> None:
        """Print a remark on standard error, unless ``quiet``."""
        if not self.quiet:
            print(text, file=sys.stderr)


def report_and_file(args: argparse.Namespace, file_format: str) -> tuple[Output, Output]:
    """Return two outputs: one for a report on standard output, one for the data file ``--output``.

    ``file_format`` is the file's format. The errors raised are those of `Output.of`.
    """
    file = Output.of(argparse.Namespace(**vars(args) | {"format": file_format}))
    return Output.of(argparse.Namespace(**vars(args) | {"output": None})), file


@contextmanager
def progress_bar(
    *, hidden: bool = False, every: float | None = None
) -> Iterator[Callable[[int, int, str], None]]:
    """Give a function ``update(done, total, label)`` that shows progress, in a ``with`` block.

    ``done`` and ``total`` are numbers of steps; ``label`` is the text before the progress.

    On a terminal or in a notebook it draws a bar, after one second. Elsewhere, as in the log of a
    batch job, it prints at most one line per ``every`` seconds, or nothing if ``every`` is None.
    With ``hidden`` nothing is shown anywhere.
    """
    if hidden or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield _lines(math.inf if hidden or every is None else every)
        return
    from tqdm import tqdm

    with tqdm(delay=_PATIENCE, leave=False) as bar:

        def update(done: int, total: int, label: str) -> None:
            bar.total = total
            bar.set_description_str(label, refresh=False)
            bar.update(done - bar.n)

        yield update


def say_above_progress(text: str) -> None:
    """Print a line on standard error, above the progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def _lines(every: float) -> Callable[[int, int, str], None]:
    latest = time.monotonic()
    before = 0

    def update(done: int, total: int, label: str) -> None:
        nonlocal latest, before
        passed = time.monotonic() - latest
        if passed >= every and before < done < total:
            minutes = (total - done) / (done - before) * passed / 60
            pace = f"{done / total:.0%}, at this pace {max(1, round(minutes)):,} min left"
            print(f"{label}; {pace}", file=sys.stderr, flush=True)
            latest += passed
            before = done

    return update


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Redirect standard output to standard error, inside a ``with`` block.

    Anything that libraries and their child processes print inside the block then does not mix with
    the data that a command prints.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise UsageError(
            f"expected a file, got the folder {path}; name a file in it", argument="output"
        )
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(
            f"expected a file in an existing folder, got {path}; create {folder} first",
            argument="output",
        )
    is_device = path.exists() and not path.is_file()
    needed = [path] if path.exists() else []
    if not is_device:
        needed.append(folder)
    if not all(os.access(place, os.W_OK) for place in needed):
        raise UsageError(
            f"expected a writable file, got {path}; check the permissions of the file and the folder",
            argument="output",
        )


def _is_stdout(path: Path) -> bool:
    """Whether a file is where standard output goes, such as ``/dev/stdout``."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _stdout_encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _print(text: str, form: str) -> None:
    """Print a report: UTF-8 for programs, standard output's encoding for people."""
    try:
        if form in ("csv", "html", "json") and hasattr(sys.stdout, "buffer"):
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        else:
            try:
                text.encode(_stdout_encoding())
            except UnicodeEncodeError:
                from lmeval_dispersion.report.terminal import spelled

                text = spelled(text, _stdout_encoding())
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Text that is still buffered would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise DispersionError(
            f"could not write to standard output: {error.strerror or error}; redirect it to another file"
        ) from error
