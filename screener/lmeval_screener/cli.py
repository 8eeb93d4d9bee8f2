"""The commands ``screen-checkpoints`` (``dispersion screen``) and ``verify``: parse, screen, print, exit.

Only the standard library is imported before the arguments are known, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.arguments import add_options, check_values, given_of, options_from
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import (
    add_examples,
    add_output,
    add_version,
    command_line,
    command_parser,
    exit_code_of,
    one_thread,
)
from lmeval_dispersion.output import Output, progress_bar
from lmeval_dispersion.report.forms import PICTURES
from lmeval_screener.orders import RankedBy
from lmeval_screener.screening.arguments import ScreenArguments, ScreenInputs, Selecting, Showing

if TYPE_CHECKING:
    from lmeval_screener.result.result import Result
    from lmeval_screener.screened import Failed, Reading
    from lmeval_screener.screening.run import OnDone
    from lmeval_screener.shortlist.choice import Shortlist

_EVERY = 30.0  # seconds between two lines of progress
_ABOUT = (
    "Rank checkpoints without labels, data or a GPU: by how far apart a domain's tokens lie in the "
    "output projection, of which only the needed rows are read."
)
_MORE = """
checkpoints:
  ORG/NAME, ORG/NAME@REVISION, 'ORG/NAME@step*', 'ORG/NAME-*'    on the Hub
  path/to/folder        a model, a folder of models, or a training run's folder
  ORG/NAME:Q4_K_M, path/FILE.gguf    a file: GGUF, .safetensors, .bin
  's3://BUCKET/RUN/step*', gs://, az://, https://, models:/ and others
  -                     a list from standard input: one name per line, or CSV

exit status: 0 all were screened, 1 none was, 2 wrong usage, 3 some failed,
  4 some below --fail-if-below, 5 --since has news; the first of 4, 5, 3 counts
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``screen-checkpoints`` and return its exit code.

    Errors are printed, or raised if DISPERSION_DEBUG=1 is set.

    Args:
        argv: The command's arguments; default: those of this process.

    Raises:
        SystemExit: From argparse, for wrong arguments and after ``--help`` or ``--version``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = command_line(["screen-checkpoints", *words])
    name = "screen-checkpoints"
    chosen = "screen"
    if words[:1] == ["verify"]:  # a folder of that name can still be given as ./verify
        name += " verify"
        chosen = words.pop(0)
    declare, work = COMMANDS[chosen]
    parser = command_parser(name, _ABOUT)
    declare(parser)
    parser.set_defaults(command=command)
    return exit_code_of(name, lambda: (parser, work), words)


# --- screen ---------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``screen-checkpoints``, alias ``dispersion screen``, to a parser."""
    parser.description = _ABOUT
    parser.usage = f"{parser.prog} [options] CHECKPOINT ..."
    group = parser.add_argument_group("what to screen")
    add_options(group, ScreenArguments, "checkpoints")
    add_options(group, Selecting)
    group = parser.add_argument_group("how")
    add_options(group, ScreenInputs)
    add_options(group, RankedBy)
    group = parser.add_argument_group("what to show")
    add_options(group, Showing)
    add_output(group)
    add_version(parser)
    add_examples(
        parser,
        "myruns --shortlist 3",
        "--family qwen2.5 --task gsm8k",
        "'EleutherAI/pythia-410m@step*' --output pythia.html",
        "'our-org/*' --registry nightly.db --since last",
        more=_MORE,
    )


def run(args: argparse.Namespace) -> int:
    """Run ``screen-checkpoints`` with parsed arguments and return its exit code.

    The codes are 0, 1, 3, 4 and 5; ``--help`` says what they mean.

    Raises:
        DispersionError: The screening could not be run; `main` prints the error.
    """
    one_thread()
    if args.list is not None:
        from lmeval_screener.result import planning

        Output.of(args).write(getattr(planning, f"{args.list}_document")())
        return 0
    _check(args)
    output = Output.of(args)

    from lmeval_screener.screening.run import Screening
    from lmeval_screener.screening.selection import select

    def notice(name: str, seconds: float) -> None:
        output.say(
            f"screen-checkpoints: the rate limit of {name} is reached; continuing in {seconds:.0f} "
            "s"
        )

    arguments = options_from(ScreenArguments, args)
    screening = Screening(
        arguments, fail_if_below=args.fail_if_below, notice=notice, keep_on_interrupt=True
    )
    domain = screening.domain
    if domain.remark:
        output.say(f"screen-checkpoints: {domain.remark}")
    selected = select(arguments, notice)
    if selected.sentence and not args.dry_run:  # the plan's own answer has it
        output.say(f"screen-checkpoints: {selected.sentence}")
    named, _ = screening.named(selected.targets)
    if args.emit is not None:
        from lmeval_screener.shortlist.manifest import check_emit

        check_emit(args.emit, domain, named)
    if args.dry_run:
        from lmeval_screener.result.planning import plan_document

        output.write(plan_document(selected, named, domain, screening.reference))
        return 0
    with screening.recorded(args.command) as session:
        with _progress(args.quiet) as screening.on_done:
            result = screening.result(selected)
        if session is not None and session.reused:
            from lmeval_dispersion.errors import count

            output.say(
                f"{args.registry} already had the results of {session.reused} of "
                f"{count(len(result.checkpoints), 'checkpoint')}"
            )
        status = _write(args, output, result, domain.tasks)
    if session is not None and session.loss:
        _print_error(session.loss)
    return status


def _write(args: argparse.Namespace, output: Output, result: Result, tasks: tuple[str, ...]) -> int:
    """Write the report in its form, and to stderr anything that the form cannot hold; the exit code."""
    news = result.news
    unread = not result.checkpoints and not result.of_base
    if unread and news is None and not output.formats <= {"json", "csv"}:
        from lmeval_screener.result.answer import not_screened

        # Programs and files get the failures as data; on a terminal there is nothing more to report.
        _print_error(not_screened(result.failed))
        if output.files and output.formats.isdisjoint(PICTURES):
            replace(output, quiet=True).write(result.document())
        return 1
    names: str | None = None
    if args.shortlist is None and args.emit is None:
        output.write((news or result).document())
    else:
        most = None if args.shortlist is True else args.shortlist
        chosen = result.shortlist(most, audit_sample=args.audit_sample)
        if args.emit is not None and chosen.chosen:
            from lmeval_screener.shortlist.manifest import emit

            manifest = emit(args.emit, result.head(), chosen, tasks=tasks, command=args.command)
            output.say(f"wrote {manifest}; evaluate the list with: bash {args.emit / 'run.sh'}")
        if args.format is None and "table" in output.formats:
            names = _names(chosen)
        output.write(result.shown(chosen).document(), table=names)
    if names is not None or "csv" in output.formats:
        # These forms cannot hold the sentence that explains the exit status, nor failures.
        printed = names is None and bool(output.files) and not output.quiet
        if result.gate is not None and not result.gate.passed and not printed:
            _print_error(result.gate.sentence())
        for failed in result.failed:
            _print_error(f"{failed.label}: {failed.error}: {failed.message}")
        if result.of_base:
            from lmeval_screener.result.answer import rows_of_base

            _print_error(" ".join(rows_of_base(result.of_base, alone=not result.checkpoints)))
    if any(failed.error == "Interrupted" for failed in result.failed):
        output.say("stopped; run the same command again to continue")
    return result.exit_code


def _print_error(text: str) -> None:
    print(f"screen-checkpoints: {text}", file=sys.stderr, flush=True)


def _check(args: argparse.Namespace) -> None:
    """Refuse options that conflict or are out of range, before anything is screened."""
    check_values(Showing(**given_of(Showing, args)))
    if args.shortlist is None and args.emit is None:
        if args.audit_sample:
            raise UsageError(
                "needs --shortlist or --emit; add one of them", argument="audit_sample"
            )
    elif args.registry is not None and args.since is not None:
        raise UsageError(
            "expected no --shortlist or --emit together with --since and --registry, which report "
            "only news; leave --since out"
        )


def _names(chosen: Shortlist) -> str:
    """The names of the list as a user writes them; their explanation goes to stderr, past any pipe."""
    for choice in chosen.groups:
        sentence = f"{choice.group.title}: {choice.sentence()}"
        if choice.audit:
            sentence += f" ({', '.join(c.label for c in choice.audit)})"
        print(sentence, file=sys.stderr, flush=True)
    for member in chosen.chosen:
        if member.target.secret:
            _print_error(
                f"{member.name} is listed without the user name, password or query of its address; "
                "add them to the address to evaluate the checkpoint"
            )
    return "".join(f"{c.name}\n" for c in chosen.chosen)


@contextmanager
def _progress(quiet: bool) -> Iterator[OnDone]:
    """Show how many checkpoints have ended, and how many failed and why; lines outside a terminal."""
    from lmeval_screener.screened import Failed

    failed: Counter[str] = Counter()
    with progress_bar(hidden=quiet, every=_EVERY) as update:

        def ended(outcome: Reading | Failed, done: int, count: int) -> None:
            label = outcome.label
            if isinstance(outcome, Failed):
                failed[outcome.error] += 1
            if failed:
                errors = ", ".join(f"{number} {code}" for code, number in failed.most_common())
                label += f" (failed: {errors})"
            update(done, count, label)

        yield ended


# --- verify ---------------------------------------------------------------------------------------------


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion verify`` to a parser.

    ``screen-checkpoints verify`` has the same arguments.
    """
    from lmeval_screener.shortlist.arguments import Verifying

    parser.description = (
        "Check whether the screen works for you: compare its order with the results of the "
        "checkpoints on a short list (`screen-checkpoints --shortlist K --emit FOLDER`)."
    )
    add_options(parser, Verifying, "manifest", "results", "metric")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="write the slope of your results (how strongly ranks predict accuracy) to FILE, for "
        "`screen-checkpoints --slope` (default: do not)",
    )
    add_output(parser)
    add_examples(
        parser,
        "list/race",
        "list/manifest.json accuracy.csv -o verdict.html",
        "list/race --keep slope.json",
    )


def run_verify(args: argparse.Namespace) -> int:
    """Run ``dispersion verify`` with parsed arguments; returns 0, whatever the verdict.

    Raises:
        DispersionError: There is no verdict, or no slope for ``--keep``; `main` prints the error.
    """
    output = Output.of(args)

    from lmeval_screener.shortlist.arguments import Verifying
    from lmeval_screener.shortlist.verdict import verify

    verdict = verify(**given_of(Verifying, args))
    output.write(verdict.document())
    if args.keep is not None:
        output.say(f"dispersion verify: {verdict.keep(args.keep)}")
    return 0


COMMANDS = {"screen": (add_arguments, run), "verify": (add_verify_arguments, run_verify)}
