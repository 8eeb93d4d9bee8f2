"""The command ``screen-checkpoints``: parse, screen, print, exit.

Only the standard library is imported before the arguments are known, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import Output, add_examples, add_output, add_version, command_parser, finished
from lmeval_dispersion.report import FORMATS
from lmeval_screener.planning import add_limit_options, allowance_of
from lmeval_screener.registry import add_registry_options
from lmeval_screener.shortlist.command import (
    add_shortlist_options,
    add_verify_arguments,
    check_shortlist_options,
    print_names,
    run_verify,
    shortlist_of,
)
from lmeval_screener.targets.selection import add_selection_options

if TYPE_CHECKING:
    from lmeval_screener.reading import Reading
    from lmeval_screener.screened import Failed
    from lmeval_screener.screening import OnDone

_PATIENCE = 1.0  # seconds without progress
_ABOUT = (
    "Rank checkpoints by how well their output rows tell a domain's tokens apart: no labels, no data, no "
    "GPU, and only the few rows that are needed are read."
)
_MORE = """
checkpoints:
  ORG/NAME                  a repository on the Hub
  ORG/NAME@REVISION         a branch, tag or commit of it
  'ORG/NAME@step*'          every branch and tag that matches: a training trajectory
  path/to/folder            a local folder in transformers' layout
  ORG/NAME:Q4_K_M           a GGUF model of it; also FOLDER:Q8_0 and path/to/FILE.gguf
  path/to/run               a training run: its checkpoint-*, step_*, iter_* or global_step* folders
  'ORG/*'                   all models of an organisation; 'ORG/NAME-*' those whose name matches
  https://huggingface.co/…  a model's page on the Hub, of a revision or not
  -                         a list from standard input, as with --from
  path/to/FILE.safetensors  a file of weights, also pytorch_model.bin; --tokenizer for what lies alone
  's3://BUCKET/RUN/step*'   folders, runs and files in S3; likewise gs://, az://, abfss:// (extra cloud)
  https://HOST/FOLDER       a folder or a file of a web server
  hf://buckets/ORG/NAME/RUN folders, runs and files in a bucket of the Hub
  models:/NAME/3            a model of an MLflow registry; also NAME, NAME@ALIAS, 'NAME/*' (extra mlflow)

HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME work as in huggingface_hub; AWS_*, GOOGLE_* and AZURE_*
as in the tools of these services, MLFLOW_* as in MLflow.
exit status: 0 all screened, 1 none, 2 wrong usage, 3 some failed, 4 below the checkpoint of --fail-if-below.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``screen-checkpoints``; returns the exit code. ``DISPERSION_DEBUG=1`` shows tracebacks."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = shlex.join(["screen-checkpoints", *words])
    # A folder of that name is still ./verify.
    name, declare, work = "screen-checkpoints", add_arguments, run
    if words[:1] == ["verify"]:
        name, declare, work = "screen-checkpoints verify", add_verify_arguments, run_verify
        words = words[1:]
    parser = command_parser(name, _ABOUT)
    declare(parser)
    parser.set_defaults(command=command)
    args = parser.parse_args(words)
    return finished(name, lambda: work(args))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``screen-checkpoints``, which is also ``dispersion screen``."""
    parser.description = _ABOUT
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="what to screen, see below")
    what = parser.add_argument_group("what to screen")
    what.add_argument("--family", metavar="NAME", help="all checkpoints of a family (default: none)")
    what.add_argument(
        "--families", metavar="FILE", help="a family file of your own (default: the bundled one)"
    )
    what.add_argument("--list-families", action="store_true", help="print the families and stop")
    what.add_argument("--list-domains", action="store_true", help="print the bundled token sets and stop")
    what.add_argument("--demo", action="store_true", help="screen the bundled tiny models; needs no network")
    add_selection_options(parser.add_argument_group("what to select on the Hub"))
    how = parser.add_argument_group("how")
    how.add_argument(
        "--domain",
        default="math",
        metavar="SET",
        help="domain tokens: math, code, legal, SET:GROUP,GROUP, or a YAML file (default: math)",
    )
    how.add_argument(
        "--reference",
        default="reference",
        metavar="SET",
        help="everyday tokens, likewise; reference:bare without leading spaces (default: reference)",
    )
    how.add_argument(
        "--tokenizer",
        metavar="SOURCE",
        help="tokenizer of checkpoints that store none: what may be written for a checkpoint, or a "
        "tokenizer's file (default: none)",
    )
    how.add_argument(
        "--metric",
        default="cosine",
        choices=("cosine", "euclidean"),
        help="which gap ranks (default: cosine)",
    )
    how.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for one checkpoint (default: 60)"
    )
    add_limit_options(how)
    add_registry_options(how)
    show = parser.add_argument_group("what to show")
    add_output(show, (*FORMATS, "jsonl"))
    show.add_argument(
        "--show-tokens",
        action="store_true",
        help="list the pieces and rows of T and R (the JSON always does)",
    )
    show.add_argument(
        "--accuracy",
        metavar="SOURCE",
        help="how well the ranking agrees with accuracies: lm-eval's results_*.json or a folder of them "
        "(PATH:TASK where they hold several), a CSV file with the columns repo,accuracy, or hub:TASK "
        "(default: none)",
    )
    show.add_argument(
        "--fail-if-below",
        metavar="CHECKPOINT",
        help="end with status 4 if a checkpoint of its group is clearly below this one, which is screened "
        "too; without a clear order it passes (default: none)",
    )
    add_shortlist_options(parser)
    add_version(parser)
    add_examples(
        parser,
        "--family qwen2.5 --domain math",
        "Qwen/Qwen2.5-7B Qwen/Qwen2.5-Math-7B ./my-finetune --shortlist 1",
        "'EleutherAI/pythia-410m@step*' --output pythia.html",
        "run1 --accuracy results/:gsm8k",
        "--base-model Qwen/Qwen2.5-7B --since 2026-09-01 --dry-run",
        "'our-org/*' --registry nightly.db --since yesterday",
        more=_MORE,
    )


def run(args: argparse.Namespace) -> int:
    """Run ``screen-checkpoints``; returns the exit code."""
    if "numpy" not in sys.modules:
        # A hundred rows need one thread; a pool that spins for them is five times slower on a busy machine.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if args.list_families or args.list_domains:
        from lmeval_screener.reports.listings import domains_document, families_document

        Output.of(args).write(families_document(args.families) if args.list_families else domains_document())
        return 0
    check_shortlist_options(args)
    lines = args.format == "jsonl" or (args.format is None and str(args.output or "").endswith(".jsonl"))
    if lines and args.shortlist is not None:
        raise UsageError(
            "expected --format jsonl without --shortlist, got both; its last line has every rank"
        )
    if args.registry is not None and args.since is not None and (lines or args.shortlist is not None):
        raise UsageError(
            "expected --since with --registry without --shortlist and --format jsonl: it answers what is new"
        )
    output = Output.of(argparse.Namespace(**vars(args) | {"format": "json"}) if lines else args)

    from lmeval_screener.registry import kept_in, reader_type_of
    from lmeval_screener.reports.answer import not_screened
    from lmeval_screener.reports.progress import JsonLines
    from lmeval_screener.screening import Screening, screen_targets
    from lmeval_screener.targets.selection import demo_targets, load_family, select_targets, selection_of
    from lmeval_screener.tokens import load_token_set

    allowance = allowance_of(args)
    selected = select_targets(
        args.checkpoints, selection_of(args), args.lists, allowance=allowance, tokenizer=args.tokenizer
    )
    if selected.sentence and not args.quiet:
        print(f"screen-checkpoints: {selected.sentence}", file=sys.stderr)
    targets = selected.targets
    if args.family is not None:
        targets += load_family(args.family, args.families).checkpoints
    elif args.families is not None:
        raise UsageError("expected --family NAME with --families, got no name; --list-families shows them")
    if args.demo:
        targets += demo_targets()
    named = list(targets)
    if args.fail_if_below is not None:
        from lmeval_screener.ranking.gate import reference_among

        gate = reference_among(targets, args.fail_if_below, args.tokenizer)
        named += [gate] if gate not in targets else []
    domain, reference = load_token_set(args.domain, "domain"), load_token_set(args.reference, "reference")
    tasks: tuple[str, ...] = ()
    if args.emit is not None:
        from lmeval_screener.shortlist.emit import check_emit

        tasks = check_emit(args.emit, args.tasks, domain.name, named)
    if args.dry_run:
        from lmeval_screener.planning import plan_document

        output.write(plan_document(selected, named, domain, reference))
        return 0
    accuracies = None
    if args.accuracy is not None:
        from lmeval_screener.accuracies import read_accuracies

        accuracies = read_accuracies(args.accuracy, named)
    reader_type = reader_type_of(args.engine, targets)
    written = JsonLines(args.output) if lines else None
    run_of = {"metric": args.metric, "refresh": args.refresh, "command": args.command}
    with (
        kept_in(args.registry, domain, reference, **run_of) as session,
        _progress(args.quiet) as show,
    ):

        def on_done(outcome: Reading | Failed, done: int, count: int) -> None:
            if written is not None:
                written.on_done(outcome)
            show(outcome, done, count)

        since = None
        if session is not None and args.since is not None:
            from lmeval_screener.registry.queries import since_time

            since = since_time(session.connection, args.since)
        settings = Screening(
            domain,
            reference,
            metric=args.metric,
            timeout=args.timeout,
            tokenizer=args.tokenizer,
            accuracies=accuracies,
            fail_if_below=args.fail_if_below,
            session=session,
            reader_type=reader_type,
            allowance=allowance,
            selected=selected,
            keep_on_interrupt=True,
        )
        result = screen_targets(targets, settings, on_done)
        if session is not None:
            session.finish(result)
        news = None
        if session is not None and since is not None:
            from lmeval_screener.registry.queries import diff

            news = diff(session.connection, session.tokens, since, args.metric)
    if not result.checkpoints and news is None and output.format not in ("json", "csv"):
        # Programs get the failures as data; for readers there is nothing to report.
        print(f"screen-checkpoints: {not_screened(result.failed)}", file=sys.stderr)
        return 1
    if session is not None and session.reused:
        output.say(f"{session.reused} of {len(result.checkpoints)} taken from {args.registry}")
    chosen = shortlist_of(args, result)
    if chosen is not None and args.emit is not None and chosen.chosen:
        from lmeval_screener.shortlist.emit import emit

        manifest = emit(args.emit, result.head(), chosen, tasks=tasks, command=vars(args).get("command", ""))
        output.say(f"wrote {manifest}; evaluate with: bash {args.emit / 'run.sh'}")
    only_names = chosen is not None and args.format is None and output.format == "table"
    if written is not None:
        written.finish(result)
    elif news is not None:
        output.write(news.document())
    elif chosen is not None and only_names:
        print_names(chosen, output)
    else:
        meaning = accuracies.meaning if accuracies else "measured when the demo was trained" * args.demo
        output.write(result.shown(chosen, accuracy=meaning, tokens=args.show_tokens).document())
    if only_names or output.format == "csv":
        # These forms have no place for failures, and nothing may be lost silently.
        for failed in result.failed:
            print(f"screen-checkpoints: {failed.label}: {failed.error}: {failed.message}", file=sys.stderr)
    if any(failed.error == "Interrupted" for failed in result.failed):
        output.say("stopped; the same command goes on from here")
    if result.gate is not None and result.gate.exit_code is not None:
        return result.gate.exit_code
    if not result.failed:
        return 0
    return 3 if result.checkpoints else 1


@contextmanager
def _progress(quiet: bool) -> Iterator[OnDone]:
    """A bar on a terminal's standard error, which disappears when all is read; elsewhere lines.

    Either comes after a second only, when the total is known.
    """
    if quiet:
        yield lambda outcome, done, count: None
        return
    if not sys.stderr.isatty():
        from lmeval_screener.reports.progress import Lines

        yield Lines(lambda text: print(f"screen-checkpoints: {text}", file=sys.stderr, flush=True)).on_done
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    from lmeval_screener.screening import label_of

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("")
    start = time.monotonic()

    def update(outcome: Reading | Failed, done: int, count: int) -> None:
        bar.update(task, completed=done, total=count, description=label_of(outcome))
        if time.monotonic() - start > _PATIENCE:
            bar.start()

    try:
        yield update
    finally:
        bar.stop()


COMMANDS = {"screen": (add_arguments, run)}
