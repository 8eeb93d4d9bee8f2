"""Shared by the commands: their parser, options with the same names and help, and where a report goes.

Only the standard library is imported before a report is written.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lmeval_dispersion.errors import LIBRARIES, DispersionError, UsageError, in_a_command
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.report import FORMATS, render, require
from lmeval_dispersion.report.document import SITE

if TYPE_CHECKING:
    from lmeval_dispersion.report import Document

_SUFFIXES = {
    ".txt": "table",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".htm": "html",
}
_PATIENCE = 1.0  # seconds without progress
# Words that people type for an option of another name.
_OTHER_NAMES = {"--top": "--shortlist", "--layers": "--layer", "--seeds": "--seed", "--batch": "--batch-size"}


class _Help(argparse.HelpFormatter):
    """Folds paragraphs and leaves indented lines, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part if "\n " in part or part.startswith(" ") else textwrap.fill(" ".join(part.split()), width)
            for part in paragraphs
        )


class _Once(argparse.Action):
    """Stores a value, and refuses a second one, which argparse would take in silence."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"expected {option_string} once, got it twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Ends wrong usage with one sentence, where argparse prints all options above it."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """argparse's; the words are kept for what a message suggests."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = message.startswith("unrecognized arguments: ")
        meant = [self._meant(word) for word in message.split() if unknown and word.startswith("--")]
        hint = f"; did you mean {', '.join(filter(None, meant))}?" if any(meant) else ""
        self.exit(2, f"{self.prog}: {message}{hint}; see `{self.prog} --help`\n")

    def _meant(self, word: str) -> str:
        """The option that an unknown one stands for, empty where none is near enough to help."""
        (option, _, value), known = word.partition("="), self._option_string_actions
        if option.removeprefix("--") in FORMATS and "--format" in known:
            return f"--format {option.removeprefix('--')}"
        if (other := _OTHER_NAMES.get(option)) in known:
            at = self._words.index(option) + 1 if option in self._words else len(self._words)
            after = [value] if value else self._words[at : at + 1]
            return " ".join([str(other), *(text for text in after if text and text[0] != "-")])
        place = option.removeprefix("--").upper()
        if any(action.metavar == place for action in self._get_positional_actions()):
            return f"{place} without {option}"
        near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
        return (near or [name for name in known if name.startswith(option)] or [""])[0]


def exit_code_of(name: str, work: Callable[[], int], extra: str = "") -> int:
    """The exit code of a command's work: an error that a user can cause is one sentence, not a traceback.

    ``extra`` is the part of the package that the command needs in the end.
    """
    debug = bool(os.environ.get("DISPERSION_DEBUG"))
    try:
        with in_a_command():
            try:
                return work()
            except DispersionError as error:
                if debug:
                    raise
                print(f"{name}: {error}", file=sys.stderr)
                return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if debug or package in ("", "lmeval_dispersion", "lmeval_screener"):
            raise
        brings = {"vl_convert": "html"} | dict.fromkeys(LIBRARIES["audit"], "audit")
        part = extra or brings[package] if package in brings else "models"
        print(
            f"{name}: needs {package}, which is not installed; run: pip install 'lmeval-dispersion[{part}]'",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:
        # `dispersion … | head` closed the pipe: nobody reads the rest, also not what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def command_parser(command: str, about: str) -> argparse.ArgumentParser:
    """A parser with the manners of every command."""
    return _Parser(prog=command, description=about, formatter_class=_Help, allow_abbrev=False)


def add_examples(parser: argparse.ArgumentParser, *examples: str, more: str = "") -> None:
    """Begin the help with ``examples``, each without the command's name; ``more`` and the docs end it."""
    lines = "\n".join(f"  {parser.prog} {example}".rstrip() for example in examples)
    parser.description = f"{parser.description}\n\nexamples:\n{lines}"
    parser.epilog = f"{more}\n\ndocs, and completion in your shell:\n  {SITE}reference/commands/"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``-V/--version``."""
    version = f"lmeval-dispersion {__version__}"
    parser.add_argument(
        "-V", "--version", action="version", version=version, help="print the version and stop"
    )


def add_format(
    parser: argparse._ActionsContainer,
    formats: Sequence[str] = FORMATS,
    *,
    default: str = "by the suffix of --output, else table",
) -> None:
    """Add ``--format``; ``default`` says in words what is taken where it is not given."""
    parser.add_argument("--format", choices=formats, help=f"form of the report (default: {default})")
    parser.set_defaults(formats=tuple(formats))


def add_output(parser: argparse._ActionsContainer, formats: Sequence[str] = FORMATS) -> None:
    """Add ``--format``, ``-o/--output FILE``, ``--details``, ``-q/--quiet``; :meth:`Output.of` reads them."""
    add_format(parser, formats)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there (default: to standard output)"
    )
    parser.add_argument("--details", action="store_true", help="show every table on the terminal")
    add_quiet(parser)


def add_quiet(parser: argparse._ActionsContainer) -> None:
    """Add ``-q/--quiet``."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress and no remarks on standard error; errors stay"
    )


def add_layer(parser: argparse._ActionsContainer) -> None:
    """Add ``--layer LAYER`` for commands that take one."""
    text = "layer of the vectors (default: the run's own)"
    parser.add_argument("--layer", action=_Once, metavar="LAYER", help=text)


def add_layers(parser: argparse._ActionsContainer, *, what: str, default: str) -> None:
    """Add ``--layer LAYER`` for commands that take several."""
    text = f"{what}; may be repeated (default: {default})"
    parser.add_argument("--layer", action="append", metavar="LAYER", help=text)


def add_column(parser: argparse._ActionsContainer) -> None:
    """Add ``--column FIELD``, where texts stand in files with fields."""
    text = "field with the text (default: text)"
    parser.add_argument("--column", default="text", metavar="FIELD", help=text)


def add_slice(parser: argparse._ActionsContainer) -> None:
    """Add ``--slice COLUMN`` for commands that take several."""
    text = "also slice by this column of the documents; may be repeated (default: none)"
    parser.add_argument("--slice", action="append", default=[], metavar="COLUMN", help=text)


def add_one_slice(
    parser: argparse._ActionsContainer, *, default: str | None = "subject", otherwise: str = ""
) -> None:
    """Add ``--slice COLUMN`` for commands that take one; ``otherwise`` says what None means."""
    text = f"column of the documents that makes the slices (default: {otherwise or default})"
    parser.add_argument("--slice", action=_Once, default=default, metavar="COLUMN", help=text)


def add_metrics(parser: argparse._ActionsContainer) -> None:
    """Add ``--metrics``: ``dispersion``, or ``all`` for RankMe and its like too."""
    parser.add_argument(
        "--metrics",
        choices=("dispersion", "all"),
        default="dispersion",
        help="all: also RankMe, effective rank, participation ratio and stable rank (default: %(default)s)",
    )


def add_seed(parser: argparse._ActionsContainer) -> None:
    """Add ``--seed N``."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default: 0)")


@dataclass(frozen=True)
class Output:
    """Where a report goes, and in which form; checked before the work starts."""

    format: str
    path: Path | None = None  # None: standard output
    quiet: bool = False  # no remarks on standard error
    command: str = ""  # as it was typed; empty in Python
    details: bool = False  # a terminal shows them too

    @classmethod
    def of(cls, args: argparse.Namespace) -> Output:
        """The output that the options of :func:`add_output` name, refused where it cannot be written."""
        path: Path | None = args.output
        output_format = args.format or "table"
        if path is not None:
            _check_writable(path)
            if args.format is None:
                output_format = _by_suffix(path, args.formats)
        require(output_format)
        given = vars(args)
        quiet, details = given.get("quiet", False), given.get("details", False)
        return cls(output_format, path, quiet, given.get("command", ""), details)

    @property
    def short(self) -> bool:
        """Whether a reader asks for the answer in one look: a table without details."""
        return self.format == "table" and not self.details

    def write(self, document: Document) -> None:
        """Render the report, with its command; write or print it, and say which file was written."""
        document = replace(document, command=document.command or self.command)
        terminal = self.path is None and sys.stdout.isatty()
        sized = terminal or (self.path is None and os.environ.get("COLUMNS", "").isdigit())
        text = render(
            document,
            self.format,
            width=shutil.get_terminal_size().columns if sized else None,
            colour=terminal and "NO_COLOR" not in os.environ,
            encoding="utf-8" if self.path else _stdout_encoding(),
            details=self.details,
        )
        self.write_text(text)

    def write_text(self, text: str) -> None:
        """Write or print text that was rendered elsewhere; see :meth:`write`."""
        if self.path is None:
            _print(text, self.format)
        else:
            write_whole(self.path, text.encode("utf-8", "backslashreplace"))
            self.say(f"wrote {self.path}")

    def say(self, text: str) -> None:
        """Print a remark on standard error, unless the user wants none."""
        if not self.quiet:
            print(text, file=sys.stderr)


def report_beside(args: argparse.Namespace, file_format: str) -> tuple[Output, Output]:
    """The report on standard output, and the file of data that ``--output`` names, checked."""
    given = vars(args) | {"formats": FORMATS}
    file = Output.of(argparse.Namespace(**given | {"format": file_format}))
    return Output.of(argparse.Namespace(**given | {"output": None})), file


@contextmanager
def progress_bar(*, hidden: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Gives ``update(done, total, label)``: a bar after a second, on a terminal or in a notebook."""
    if hidden or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield lambda done, total, label: None
        return
    from tqdm import tqdm

    with tqdm(delay=_PATIENCE, leave=False) as bar:

        def update(done: int, total: int, label: str) -> None:
            bar.total = total
            bar.set_description_str(label, refresh=False)
            bar.update(done - bar.n)

        yield update


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is never half there: beside it first, then in its place."""
    place = Path(os.path.realpath(path))
    beside = place.with_name(f".{place.name[:50]}.{os.getpid()}")  # 255 bytes at most
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


def _print(text: str, form: str) -> None:
    """Print a report: for programs in UTF-8, for people in what standard output's encoding can hold."""
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
        raise DispersionError(f"could not write to standard output: {error.strerror or error}") from error
