"""The options of a short list and the command ``dispersion verify``; light, so that ``--help`` is at once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import Output, add_examples, add_output, add_seed, add_version

if TYPE_CHECKING:
    from lmeval_screener.result import Result
    from lmeval_screener.shortlist.choice import Shortlist


def add_shortlist_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--shortlist K`` and what belongs to it."""
    group = parser.add_argument_group("short list")
    group.add_argument(
        "--shortlist",
        type=int,
        metavar="K",
        help="only the K best of each group and those tied with the K-th, at most 2 K: their names, one a "
        "line, or a report of them with --format or the suffix of --output (default: all)",
    )
    group.add_argument(
        "--audit-sample",
        type=int,
        default=0,
        metavar="N",
        help="add N others of each group at random, without which `dispersion verify` cannot say what the "
        "list missed (default: 0)",
    )
    add_seed(group)
    group.add_argument(
        "--emit",
        type=Path,
        metavar="FOLDER",
        help="write there what lm-eval needs to evaluate the list: a configuration for each checkpoint, "
        "run.sh, slurm.sh, manifest.json (default: nothing)",
    )
    group.add_argument(
        "--tasks",
        metavar="NAME,NAME",
        help="lm-eval's tasks for --emit (default: those of the domain: math gsm8k_dispersion, code "
        "humaneval_dispersion, legal mmlu_professional_law_dispersion)",
    )


def check_shortlist_options(args: argparse.Namespace) -> None:
    """Check what can be checked before anything is screened."""
    if args.shortlist is None:
        given = {
            "--audit-sample": args.audit_sample,
            "--seed": args.seed,
            "--emit": args.emit is not None,
            "--tasks": args.tasks is not None,
        }
        for option, there in given.items():
            if there:
                raise UsageError(f"expected --shortlist K with {option}, got no --shortlist")
        return
    if args.shortlist < 1:
        raise UsageError(f"expected --shortlist of at least 1, got {args.shortlist}")
    if args.audit_sample < 0:
        raise UsageError(f"expected --audit-sample of at least 0, got {args.audit_sample}")
    if args.seed < 0:
        raise UsageError(f"expected --seed of at least 0, got {args.seed}")
    if args.tasks is not None and args.emit is None:
        raise UsageError("expected --emit FOLDER with --tasks, got no --emit")


def shortlist_of(args: argparse.Namespace, result: Result) -> Shortlist | None:
    """The short list that the options ask for; None where they ask for none."""
    if args.shortlist is None:
        return None
    from lmeval_screener.shortlist.choice import shortlist

    return shortlist(
        result.groups, result.metric, args.shortlist, audit_sample=args.audit_sample, seed=args.seed
    )


def print_names(chosen: Shortlist, output: Output) -> None:
    """The names of the list as a user writes them; how it came about goes to stderr, past any pipe."""
    lines: list[str] = []
    for choice in chosen.groups:
        names = [c.name for c in choice.chosen]
        audit = f" ({', '.join(c.label for c in choice.audit)})" if choice.audit else ""
        print(f"{choice.group.title}: {choice.sentence()}{audit}", file=sys.stderr, flush=True)
        if output.path is None:
            output.write_text("".join(f"{line}\n" for line in names))
        lines += names
    if output.path is not None:
        output.write_text("".join(f"{line}\n" for line in lines))


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion verify``, which is also ``screen-checkpoints verify``."""
    parser.description = (
        "Say whether the screen works for you: the short list of `screen-checkpoints --shortlist K --emit "
        "FOLDER` against the results that came back."
    )
    parser.add_argument("manifest", type=Path, metavar="MANIFEST", help="manifest.json, or its folder")
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULTS",
        help="lm-eval's results_*.json, or folders of them (PATH:TASK where they hold several tasks); a CSV "
        "file with the columns repo,accuracy; or hub:TASK",
    )
    parser.add_argument(
        "--hours-per-model",
        type=float,
        metavar="X",
        help="GPU hours that evaluating one model costs you: says what was saved (default: not said)",
    )
    add_output(parser)
    add_version(parser)
    add_examples(
        parser, "list list/results", "list/manifest.json accuracy.csv --hours-per-model 1.5 -o verdict.html"
    )


def run_verify(args: argparse.Namespace) -> int:
    """Run ``dispersion verify``; returns the exit code."""
    output = Output.of(args)
    if args.hours_per_model is not None and not 0 < args.hours_per_model < float("inf"):
        raise UsageError(f"expected --hours-per-model above 0, got {args.hours_per_model}")

    from lmeval_screener.shortlist.manifest import read_manifest
    from lmeval_screener.shortlist.verdict import verify

    output.write(verify(read_manifest(args.manifest), args.results, hours=args.hours_per_model).document())
    return 0


COMMANDS = {"verify": (add_verify_arguments, run_verify)}
