"""The command ``dispersion registry``, and its function.

Only the standard library is imported before a command runs.
"""

from __future__ import annotations

import argparse
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lmeval_dispersion.arguments import Option, add_options, given_of, takes
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.options import add_examples, add_output, one_thread
from lmeval_dispersion.output import Output
from lmeval_dispersion.report.declared import listed
from lmeval_screener.orders import RankedBy

if TYPE_CHECKING:
    from lmeval_dispersion.report import Report

#: The options that each action accepts.
_TAKES = {"query": "domain scale top base", "show": "", "diff": "domain since base"}
_MORE = """
actions:
  query FILE [SQL]      the latest states of all checkpoints, ranked across runs; or the answer to SQL
  FILE                  the same as query FILE
  show FILE CHECKPOINT  the history of a checkpoint, by its printed label, path or address
  diff FILE last        the last news once more, as it was announced
  diff FILE DATE        what has changed since then: new, changed, recovered, renamed, gone, failed

SQL is read-only. Tables: runs, seen, results, tokenizers, names; the view checkpoints has the
latest state of each checkpoint.
DATE: yesterday (the end of the last run before today), a date or time in UTC, or the name of a run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dispersion registry`` to a parser."""
    names = ("action", "file", "what", "domain", "scale", "top")
    add_options(parser, Questioned, *names)
    add_options(parser, RankedBy)
    add_output(parser, details=False)
    add_examples(
        parser,
        "query nightly.db --scale 7B --top 5",
        "diff nightly.db yesterday",
        "show nightly.db sums-80",
        more=_MORE,
    )


@dataclass(frozen=True)
class Questioned(RankedBy):
    """The arguments of a query of a registry.

    Attributes:
        file: The registry, a file that `screen-checkpoints --registry` wrote.
        action: What to do, see below.

            ``query`` for the latest state of every checkpoint, ranked; ``show`` for the history of
            a checkpoint; ``diff`` for the changes since a time.
        what: SQL, CHECKPOINT or DATE, see below.

            For ``query``, an SQL SELECT to run instead of the ranking; for ``show``, the label,
            path or address of the checkpoint. ``diff`` takes its date as ``since``.
        domain: Only results for this token set. Default: the set with the most results.

            For ``query`` and ``diff``.
        scale: Only checkpoints of this scale, such as 7B. Default: all.

            For ``query``.
        top: Only the K best checkpoints of each group. Default: all.

            For ``query``; at least 1.
        since: For ``diff``, the time since which changes are wanted: ``yesterday``, a date or time
            in UTC, or the name of a run. ``last`` shows the last news once more.
    """

    file: Annotated[str | Path, Option("FILE")]
    action: Literal["query", "show", "diff"] = "query"
    what: Annotated[str | None, Option("ARGUMENT")] = None
    _: KW_ONLY
    domain: Annotated[str | None, Option("SET")] = None
    scale: Annotated[str | None, Option("NAME")] = None
    top: Annotated[int | None, Option("K", least=1)] = None
    since: str | None = None


@takes(Questioned)
def registry(asked: Questioned) -> Report:
    """Query a registry that ``screen(registry=FILE)`` wrote.

    Returns `News` for the action ``diff``, otherwise an `Answer`.

    Raises:
        UsageError: The file is not a registry or has no results; the checkpoint, base, domain or
            time is unknown, or a name matches several checkpoints; the SQL fails or takes over 60
            seconds; or an argument is missing or not used by the action.
        DispersionError: SQLite cannot read the file: it is damaged or locked.
    """
    action = asked.action
    file = asked.file
    what = asked.what
    since = asked.since
    if what is None and action == "show":
        raise UsageError(
            f"expected a checkpoint after show {file}, got none; give its label, path or address"
        )
    if what is not None and action == "diff":
        raise UsageError(f"diff takes no `what`, got {what!r}; give the time as `since`")
    if since is None and action == "diff":
        raise UsageError(
            f"expected a time after diff {file}, got none; give last, yesterday or a date"
        )
    is_sql = action == "query" and what is not None
    for option in ("domain", "scale", "top", "since", "base"):
        is_used = option in _TAKES[action].split() and not is_sql
        if getattr(asked, option) is not None and not is_used:
            kind = "query with SQL" if is_sql else action
            raise UsageError(f"{kind} does not use this option; leave it out", argument=option)
    order = asked.order
    one_thread()
    from lmeval_screener.registry import news, queries
    from lmeval_screener.registry.database import to_read

    with to_read(Path(file)) as connection:
        if action == "show":
            return queries.history(connection, str(what))
        if action == "diff":
            tokens = queries.sets_of(connection, asked.domain)[0]
            if since == "last":
                start, end = news.last_announced(connection, tokens)
                again = news.news(connection, tokens, start, order, asked.base, until=end)
                return replace(again, until=end)
            start = news.since_time(connection, str(since), tokens)
            return news.news(connection, tokens, start, order, asked.base)
        if what is not None:
            return queries.sql_answer(connection, what)
        return queries.query(connection, order, asked.base, asked.domain, asked.scale, asked.top)


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion registry`` with parsed arguments; returns the exit code 0.

    Raises:
        UsageError: The action is unknown.
        DispersionError: An error of :func:`registry`.
    """
    output = Output.of(args)
    if args.what is not None and not Path(args.file).exists() and Path(args.what).is_file():
        raise UsageError(
            f"expected {listed(list(_TAKES), 'or')}, got {args.file!r}{nearest(args.file, _TAKES)}"
        )
    options = given_of(Questioned, args)
    if args.action == "diff":
        options["since"] = options.pop("what")
    output.write(registry(**options).document())
    return 0


COMMANDS = {"registry": (add_arguments, run)}
