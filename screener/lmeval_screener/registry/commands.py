"""A registry of checkpoints: ``dispersion registry``.

Only the standard library is imported before a command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.options import add_examples, add_output, one_thread
from lmeval_dispersion.output import Output
from lmeval_screener.checkpoints.selection import add_ranking_options

#: The options that each action accepts.
_TAKES = {"query": "domain scale top base", "show": "", "diff": "domain since base"}
_MORE = """
actions:
  query FILE [SQL]      the latest state of every checkpoint, ranked across runs; with SQL, its answer
  show FILE CHECKPOINT  the history of a checkpoint, by its printed label, path or address
  diff FILE             changes since a time: new, changed, recovered, renamed, gone, failed

SQL is read-only. Tables: runs, seen, results, tokenizers; the view checkpoints has the latest of each.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion registry``."""
    parser.add_argument("action", choices=_TAKES, help="what to do, see below")
    parser.add_argument("registry", type=Path, metavar="FILE", help="the registry that --registry wrote")
    parser.add_argument("what", nargs="?", metavar="ARGUMENT", help="the SQL or the checkpoint, see below")
    parser.add_argument(
        "--domain", metavar="SET", help="only results of this token set (default: the most used)"
    )
    parser.add_argument("--scale", metavar="NAME", help="only this scale, such as 7B (default: all)")
    parser.add_argument("--top", type=int, metavar="K", help="only the K best of each group (default: all)")
    add_ranking_options(parser)
    parser.add_argument(
        "--since",
        metavar="DATE",
        help="the end of the last run before today (yesterday) or of the last at all (last), a date or time "
        "in UTC, or a run of the registry (default: none)",
    )
    add_output(parser)
    add_examples(
        parser,
        "query nightly.db --scale 7B --top 5",
        "diff nightly.db --since yesterday",
        "show nightly.db sums-80",
        more=_MORE,
    )


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion registry``; returns the exit code."""
    if args.what is None and args.action == "show":
        raise UsageError(f"expected the checkpoint after show {args.registry}, got none")
    if args.what is not None and args.action == "diff":
        raise UsageError(f"expected nothing after diff {args.registry}, got {args.what!r}")
    if args.since is None and args.action == "diff":
        raise UsageError("diff expects a date, such as yesterday, got none", argument="since")
    is_sql = args.action == "query" and args.what is not None
    for option in ("domain", "scale", "top", "since", "base"):
        if vars(args)[option] is not None and (is_sql or option not in _TAKES[args.action].split()):
            action = "query with SQL" if is_sql else args.action
            raise UsageError(f"{action} does not use this; leave it out", argument=option)
    if args.top is not None and args.top < 1:
        raise UsageError(f"expected at least 1, got {args.top}", argument="top")
    one_thread()
    from lmeval_screener.registry import news, queries
    from lmeval_screener.registry.database import to_read

    output, how = Output.of(args), (args.rank_by, args.base)
    with to_read(args.registry) as connection:
        if args.action == "show":
            answer = queries.history(connection, args.what)
        elif args.action == "diff":
            tokens = queries.sets_of(connection, args.domain)[0]
            since = news.since_time(connection, args.since, tokens)
            answer = news.news(connection, tokens, since, *how).document()
        elif args.what is not None:
            answer = queries.sql_answer(connection, args.what)
        else:
            answer = queries.query(connection, *how, args.domain, args.scale, args.top)
    output.write(answer)
    return 0


COMMANDS = {"registry": (add_arguments, run)}
