"""The command ``dispersion``: finds the sub-command, imports only its module, prints errors as sentences."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from lmeval_dispersion.errors import LIBRARIES, DispersionError, require_extra
from lmeval_dispersion.options import command_parser
from lmeval_dispersion.version import __version__

# Job -> name -> (module, one-line summary). A module's COMMANDS maps the name to (add_arguments, run):
# add_arguments(parser) declares the options, run(args) does the work and returns the exit code.
JOBS: dict[str, dict[str, tuple[str, str]]] = {
    "screen checkpoints": {
        "screen": ("lmeval_screener.cli", "rank checkpoints by their output rows; also `screen-checkpoints`"),
        "verify": ("lmeval_screener.shortlist.command", "whether the screen works for you, by your results"),
        "registry": ("lmeval_screener.registry.command", "ask a store of screenings, and keep it in order"),
    },
    "evaluate with dispersion": {
        "run": ("lmeval_dispersion.harness.cli", "run lm-eval with the dispersion tasks loaded"),
        "enable": (
            "lmeval_dispersion.harness.cli",
            "let the stock lm_eval find the dispersion tasks",
        ),
        "disable": ("lmeval_dispersion.harness.cli", "undo `enable` without a trace"),
        "status": ("lmeval_dispersion.harness.cli", "whether the stock lm_eval finds the tasks"),
        "tasks-path": ("lmeval_dispersion.harness.cli", "print a folder for lm_eval's --include_path"),
        "store": ("lmeval_dispersion.harness.cli", "make a run of plain texts, or of lm-eval's samples"),
        "audit": ("lmeval_dispersion.audit.commands", "judge a finished run: slices, calibration, ranking"),
        "calibrate": (
            "lmeval_dispersion.audit.calibration.command",
            "learn accuracy from a run's labelled part",
        ),
        "predict": (
            "lmeval_dispersion.audit.calibration.command",
            "accuracy of unlabelled slices, or why not",
        ),
        "budget": (
            "lmeval_dispersion.audit.calibration.budget",
            "how many labelled documents dispersion is worth",
        ),
        "rank": ("lmeval_dispersion.audit.commands", "documents or texts, suspected hard ones first"),
        "compare": ("lmeval_dispersion.compare", "runs or studies side by side, with intervals"),
    },
    "look inside a model": {
        "law": (
            "lmeval_dispersion.laboratory.commands",
            "perplexity against dispersion, per layer",
        ),
        "sublayers": ("lmeval_dispersion.laboratory.commands", "which sub-layer should key a kNN-LM"),
        "condensation": ("lmeval_dispersion.laboratory.commands", "similarity of a text's tokens by layer"),
        "clusters": (
            "lmeval_dispersion.laboratory.commands",
            "distances within and between contexts",
        ),
    },
    "train": {
        "train": ("lmeval_dispersion.training.commands", "train with a dispersion loss, against a base"),
        "watch": ("lmeval_dispersion.watching.command", "a watched training run as a page that follows it"),
    },
    "help": {
        "completion": ("lmeval_dispersion.completion", "print a script that completes commands and options"),
    },
}
COMMANDS = {name: command for commands in JOBS.values() for name, command in commands.items()}

# The optional part that a command needs in the end, said before anything is imported; the others run in a
# base install.
_NEEDS = {
    **dict.fromkeys(("run", "store", "law", "sublayers", "condensation", "clusters", "train"), "models"),
    **dict.fromkeys(("audit", "calibrate", "predict", "budget", "rank", "compare"), "audit"),
    "registry": "registry",
}
# Which optional part brings a library that is only met on the way; the others come with `models`.
_EXTRAS = {
    **dict.fromkeys(("duckdb", "filelock"), "registry"),
    **dict.fromkeys(("altair", "jinja2", "vl_convert"), "html"),
    **dict.fromkeys(LIBRARIES["audit"], "audit"),
}

_DEBUG = "DISPERSION_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dispersion`` with ``argv`` (default: the process's own arguments); returns the exit code.

    0 done, 1 failed, 2 wrong usage, 3 partly done, 130 interrupted. ``DISPERSION_DEBUG=1`` shows
    tracebacks of errors that are otherwise one sentence.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args in (["-h"], ["--help"], ["help"]):
        print(_overview())
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"lmeval-dispersion {__version__}")
        return 0
    name, *rest = [args[1], "--help"] if args[0] == "help" else args
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; `dispersion --help` lists the commands"
        print(f"dispersion: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    try:
        if name in _NEEDS and not {"-h", "--help"} & set(rest):
            require_extra(_NEEDS[name], f"`dispersion {name}`")
        parser, run = parser_of(name)
        parser.set_defaults(command=shlex.join(["dispersion", *args]))
        return int(run(parser.parse_args(rest)))
    except DispersionError as error:
        if os.environ.get(_DEBUG):
            raise
        print(f"dispersion {name}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if os.environ.get(_DEBUG) or package in ("", "lmeval_dispersion", "lmeval_screener"):
            raise
        extra = _NEEDS.get(name) or _EXTRAS.get(package, "models")
        print(
            f"dispersion {name}: needs {package}, which is not installed; "
            f"run: pip install 'lmeval-dispersion[{extra}]'",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:
        # `dispersion … | head` closed the pipe: nobody reads the rest, also not what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"dispersion {name}: interrupted", file=sys.stderr)
        return 130


def parser_of(name: str) -> tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int]]:
    """The parser of a command, and what runs its arguments.

    Raises:
        ModuleNotFoundError: A library that the command needs is not installed.
    """
    module, summary = COMMANDS[name]
    add_arguments, run = importlib.import_module(module).COMMANDS[name]
    parser = command_parser(f"dispersion {name}", f"{summary[0].upper()}{summary[1:]}.")
    add_arguments(parser)
    return parser, run


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: dispersion COMMAND [options]", "", "Representation dispersion of language models.", ""]
    for job, commands in JOBS.items():
        lines += [f"{job}:", *(f"  {name:<{width}}  {about}" for name, (_, about) in commands.items())]
        if job == "help":
            lines.append(f"  {'help':<{width}}  the options of a command: `dispersion help audit`")
            lines.append(f"  {'-V':<{width}}  print the version")
        lines.append("")
    return "\n".join(
        [
            *lines,
            "examples:",
            "  dispersion screen --demo",
            "  dispersion audit results/MODEL/dispersion_RUN -o report.html",
        ]
    )
