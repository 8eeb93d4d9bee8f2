"""The argument parser of the commands, the options that they share, and exit codes."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lmeval_dispersion.errors import LIBRARIES, DispersionError, printable, without_secrets
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.report import FORMATS
from lmeval_dispersion.report.document import SITE

Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
# Options that lm-eval has as keys of --model_args -> the key.
_KEYS = {
    "--dtype": "dtype",
    "--quantize": "load_in_4bit",
    "--adapter": "peft",
    "--revision": "revision",
}
#: An option -> what another command calls it.
_SAME = {"--top": "--shortlist", "--shortlist": "--top"}


class _Help(argparse.HelpFormatter):
    """Folds paragraphs and leaves indented lines, such as examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        filled = []
        for paragraph in paragraphs:
            if not paragraph.startswith(" ") and "\n " not in paragraph:
                paragraph = textwrap.fill(" ".join(paragraph.split()), width)
            filled.append(paragraph)
        return "\n\n".join(filled)


class Once(argparse.Action):
    """Action that stores an option's value and refuses the option if it is given twice."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Store the value, or exit with an error if the option already has one."""
        given = vars(namespace).setdefault("_given", set())
        if self.dest in given:
            parser.error(f"expected {option_string} once, got it twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class JoinedByCommas(argparse.Action):
    """Action of an option that may be repeated: its values are joined, separated by commas."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Append the value to the earlier ones, after a comma."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in one sentence, without argparse's list of options."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized arguments: "):
            hint = self._hint(message)
        self.exit(2, f"{self.prog}: {message}{hint}; see `{self.prog} --help`\n")

    def _hint(self, message: str) -> str:
        """What to write in place of unknown arguments; empty if nothing is close."""
        for action in self._get_positional_actions():
            if action.nargs and " -" not in message:
                return f"; put {action.metavar or action.dest} before the options"
        meant = [self._meant(word) for word in message.split() if word.startswith("--")]
        return f"; did you mean {', '.join(filter(None, meant))}?" if any(meant) else ""

    def _meant(self, word: str) -> str:
        """The option that an unknown one probably means; empty if none is close."""
        option = word.partition("=")[0]
        name = option.removeprefix("--")
        known = self._option_string_actions
        if name in FORMATS and "--format" in known:
            return f"--format {name}"
        if option in _KEYS and "--model_args" in known:
            return f"--model_args {_KEYS[option]}=…"
        if _SAME.get(option) in known:
            return _SAME[option]
        for action in self._get_positional_actions():
            if action.metavar == name.upper():
                return f"{name.upper()} without {option}"
            if name in (action.choices or ()):
                return f"{name} without {option}"
        near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
        near += [longer for longer in known if longer.startswith(option)]
        return near[0] if near else ""


def exit_code_of(
    name: str,
    command: Callable[[], tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int]]],
    words: Sequence[str],
) -> int:
    """Parse ``words`` with a command's parser, run the command, and return its exit code.

    For an error that the user can mend, one sentence is printed without a traceback; it names the
    command's option in place of the Python argument. If the environment variable
    ``DISPERSION_DEBUG`` is set, errors are raised instead.

    Args:
        name: Name of the command, with which messages begin.
        command: Function that returns the parser, and the function that runs the command.
        words: Arguments of the command.
    """
    debug = bool(os.environ.get("DISPERSION_DEBUG"))
    actions: list[argparse.Action] = []
    try:
        parser, run = command()
        actions = parser._actions
        return run(parser.parse_args(_with_action(parser, words)))
    except DispersionError as error:
        if debug:
            raise
        argument = error.argument
        for action in actions:
            if action.dest == error.argument and action.option_strings:
                argument = action.option_strings[-1]
        print(f"{name}: {error.naming(argument)}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if debug or package in ("lmeval_dispersion", "lmeval_screener"):
            raise
        print(f"{name}: {_missing(package, error)}", file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        if debug or error.filename:
            raise
        print(f"{name}: the current folder was deleted; change to one that exists", file=sys.stderr)
        return 1
    except BrokenPipeError:
        _discard_output()
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _missing(package: str, error: ModuleNotFoundError) -> str:
    """The sentence on a package that is not installed."""
    if not package:  # as lm-eval raises it, with the way to install the library
        return " ".join(str(error).split())
    for extra, libraries in LIBRARIES.items():
        if package in libraries:
            return (
                f"needs {package}, which is not installed; run: "
                f"pip install 'lmeval-dispersion[{extra}]'"
            )
    return f"needs {package}, which is not part of lmeval-dispersion; run: pip install {package}"


def _with_action(parser: argparse.ArgumentParser, words: Sequence[str]) -> Sequence[str]:
    """The words, begun with the default of a first argument that chooses an action, if none of them does."""
    for first in parser._get_positional_actions()[:1]:
        chooses = first.nargs is None and first.choices and first.default
        if chooses and not set(words) & set(first.choices or ()):
            return [first.default, *words]
    return words


def command_line(words: Sequence[str]) -> str:
    """Return a command's words as one line for reports and registries.

    The line is quoted for a shell, printable, and without secrets.
    """
    return printable(shlex.join(map(without_secrets, words)))


def print_whole(text: str) -> None:
    """Print a text on standard output; a pipe that is closed early raises no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    # `dispersion … | head` closed the pipe: this discards the rest, and what Python flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_thread() -> None:
    """Restrict numpy's linear algebra to one thread, if numpy is not imported yet.

    This sets ``OPENBLAS_NUM_THREADS``, unless the user has set it. For matrices of about a hundred
    rows a pool of threads is five times slower.
    """
    if "numpy" not in sys.modules:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def command_parser(command: str, about: str) -> argparse.ArgumentParser:
    """Return an argument parser whose errors are one sentence, and whose options are not abbreviated.

    Args:
        command: Name of the command, such as ``dispersion race``.
        about: What the command does; begins the help.
    """
    return _Parser(prog=command, description=about, formatter_class=_Help, allow_abbrev=False)


def add_examples(parser: argparse.ArgumentParser, *examples: str, more: str = "") -> None:
    """Add examples to a command's help, after its description.

    Each of ``examples`` is given without the command's name. The help ends with ``more`` and the
    address of the documentation.
    """
    lines = "\n".join(f"  {parser.prog} {example}".rstrip() for example in examples)
    parser.description = f"{parser.description}\n\nexamples:\n{lines}"
    parser.epilog = f"{more}\n\ndocumentation and shell completion:\n  {SITE}reference/commands/"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``-V/--version``, which prints the version of the package and exits."""
    version = f"lmeval-dispersion {__version__}"
    parser.add_argument(
        "-V", "--version", action="version", version=version, help="print the version and stop"
    )


def add_output(
    parser: argparse._ActionsContainer,
    *,
    file: str = "file to write (.svg, .png, .pdf: the first chart); repeatable (default: standard output)",
    form: str = "by --output's suffix, else table",
    details: bool = True,
) -> None:
    """Add ``--format``, ``-o/--output FILE``, ``--details`` and ``-q/--quiet``.

    ``Output.of`` reads these options.

    Args:
        parser: The parser, or one of its argument groups.
        file: Help of ``--output``.
        form: Default of ``--format``, in words.
        details: Whether to add ``--details``; False for a report without details.
    """
    parser.add_argument("--format", choices=FORMATS, help=f"format (default: {form})")
    parser.add_argument("-o", "--output", type=Path, action="append", metavar="FILE", help=file)
    if details:
        parser.add_argument(
            "--details", action="store_true", help="show every table on the terminal"
        )
    add_quiet(parser)


def add_quiet(parser: argparse._ActionsContainer) -> None:
    """Add ``-q/--quiet``, with which a command prints only errors on standard error."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print only errors on standard error"
    )
