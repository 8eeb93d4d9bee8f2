"""The command ``dispersion``: imports the sub-command's module only, prints errors as sentences."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from lmeval_dispersion.errors import require_extra
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.options import command_line, command_parser, exit_code_of, print_whole
from lmeval_dispersion.report.document import SITE

_AUDIT = "lmeval_dispersion.auditing.commands"
_HARNESS = "lmeval_dispersion.harness.cli"
_RACE = "lmeval_dispersion.racing.commands"
_SCREEN = "lmeval_screener.cli"
_REGISTRY = "lmeval_screener.registry.commands"

# Job -> name -> (module, the extra that the command needs, summary). A module's COMMANDS
# maps the name to (add_arguments, run): add_arguments(parser) declares the options, run(args)
# does the work and returns the exit code.
JOBS: dict[str, dict[str, tuple[str, str, str]]] = {
    "screen checkpoints": {
        "screen": (_SCREEN, "", "rank checkpoints by their output rows; also `screen-checkpoints`"),
        "verify": (_SCREEN, "", "check the screen against your results"),
        "registry": (_REGISTRY, "", "list recorded screenings and the changes between them"),
    },
    "evaluate with dispersion": {
        "race": (_RACE, "", "evaluate checkpoints, drop the clearly worse early, name the best"),
        "run": (_HARNESS, "models", "run lm-eval with the dispersion tasks loaded"),
        "enable": (
            _HARNESS,
            "",
            "add the dispersion tasks to lm_eval's own command, or remove them",
        ),
        "tokens": (
            _HARNESS,
            "models",
            "list a task's answer tokens, which `dispersion screen` ranks by",
        ),
        "embed": (
            _HARNESS,
            "models",
            "compute the hidden states of texts or of lm-eval's samples, for an audit",
        ),
        "audit": (_AUDIT, "audit", "analyse a finished run: slices, calibration, hard documents"),
        "calibrate": (
            _AUDIT,
            "audit",
            "learn from a labelled run to estimate accuracy without labels",
        ),
        "compare": (_AUDIT, "audit", "compare runs, with intervals"),
    },
    "look inside a model": {
        "inspect": (
            "lmeval_dispersion.laboratory.commands",
            "models",
            "relate a model's hidden states to perplexity, sub-layer, depth or context",
        ),
    },
}
# Former commands -> what does their work.
GONE = {
    "predict": "use `dispersion calibrate RUN --from FILE`, where FILE is the saved calibrator",
    "probe": "use `dispersion race … --budget N`, which asks every checkpoint a few questions",
    "watch": "use lmeval_dispersion.RaceCallback, which logs the same figures during training",
}
COMMANDS = {name: command for commands in JOBS.values() for name, command in commands.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dispersion`` with the arguments ``argv``, and return the exit code.

    Exit codes are 0 (done), 1 (failed), 2 (wrong usage), 3 (partly done) and 130 (interrupted).
    ``argv`` is by default the command line of the process. An error that the user can mend prints
    one sentence, or with ``DISPERSION_DEBUG=1`` its traceback.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args in (["-h"], ["--help"], ["help"]):
        print_whole(_overview())
        return 0 if args else 2
    if args[-1] in ("-V", "--version") and " ".join(args[:-1]) in ("", *COMMANDS):
        print_whole(f"lmeval-dispersion {__version__}")
        return 0
    if args[0] == "help":
        args = [*args[1:], "--help"]
    name, *rest = args
    if name in GONE:
        print(f"dispersion: the command {name!r} no longer exists; {GONE[name]}", file=sys.stderr)
        return 2
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or "; `dispersion --help` lists the commands"
        print(f"dispersion: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    extra = COMMANDS[name][1]

    def command() -> tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int]]:
        if extra and not {"-h", "--help"} & set(rest):
            require_extra(extra, f"`dispersion {name}`")
        parser, run = parser_of(name)
        parser.set_defaults(command=command_line(["dispersion", *args]))
        return parser, run

    return exit_code_of(f"dispersion {name}", command, rest)


def parser_of(name: str) -> tuple[argparse.ArgumentParser, Callable[[argparse.Namespace], int]]:
    """Return the parser of the command ``name``, and the function that runs it.

    That function takes the parsed arguments and returns the exit code. ``name`` is a key of
    ``COMMANDS``.
    """
    module, _, summary = COMMANDS[name]
    add_arguments, run = importlib.import_module(module).COMMANDS[name]
    parser = command_parser(f"dispersion {name}", f"{summary[0].upper()}{summary[1:]}.")
    add_arguments(parser)
    return parser, run


def _overview() -> str:
    """All commands, and where to read on."""
    width = max(map(len, COMMANDS))
    jobs = ""
    for job, commands in JOBS.items():
        jobs += f"{job}:\n"
        for name, (_, _, summary) in commands.items():
            jobs += f"  {name:<{width}}  {summary}\n"
        jobs += "\n"
    return f"""usage: dispersion COMMAND [options]

Representation dispersion of language models.

{jobs}`dispersion help COMMAND` lists its options, `dispersion -V` prints the version.
Docs: {SITE}

examples:
  dispersion screen --demo
  dispersion audit results/MODEL/dispersion_RUN -o report.html"""
