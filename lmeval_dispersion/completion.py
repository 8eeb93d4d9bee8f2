"""``dispersion completion``: what a shell needs to complete commands, options and files, made by shtab."""

from __future__ import annotations

import argparse
import contextlib

from lmeval_dispersion.cli import COMMANDS as ALL
from lmeval_dispersion.cli import parser_of
from lmeval_dispersion.errors import MissingExtraError
from lmeval_dispersion.options import add_examples, command_parser

_SHELLS = ("bash", "zsh", "tcsh")
_PROGRAMS = ("dispersion", "screen-checkpoints")
_FILES, _FOLDERS = ("FILE", "FILE|HUB_ID", "CHECKPOINT", "MODEL"), ("FOLDER", "RUN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion completion``."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell that reads the script")
    parser.add_argument(
        "program",
        nargs="?",
        choices=_PROGRAMS,
        default=_PROGRAMS[0],
        help="the command to complete (default: %(default)s)",
    )
    add_examples(
        parser,
        "bash > ~/.local/share/bash-completion/completions/dispersion",
        "zsh > ~/.zfunc/_dispersion",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion completion``."""
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError(
            "completion needs shtab, which is not installed; run: pip install 'lmeval-dispersion[completion]'"
        ) from error
    parser = _whole() if args.program == "dispersion" else parser_of("screen")[0]
    parser.prog = args.program
    for part in _parsers(parser):
        for action in part._actions:
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _whole() -> argparse.ArgumentParser:
    """One parser with every command as a sub-command; without options where its libraries are missing."""
    whole = command_parser("dispersion", "Representation dispersion of language models.")
    commands = whole.add_subparsers()
    for name, (_, summary) in ALL.items():
        parents = []
        # Arguments of `run` are lm-eval's, which completes its own.
        if name != "run":
            with contextlib.suppress(ModuleNotFoundError):
                parents = [parser_of(name)[0]]
        commands.add_parser(name, help=summary, parents=parents, add_help=not parents)
    return whole


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += action.choices.values()
    return found


COMMANDS = {"completion": (add_arguments, run)}
