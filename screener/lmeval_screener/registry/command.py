"""``dispersion registry``: what a registry of screenings holds, what has moved, and its upkeep."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.options import Output, add_examples, add_output

if TYPE_CHECKING:
    from lmeval_dispersion.report import Document

_ACTIONS = ("query", "show", "diff", "export", "prune")
_MORE = """
actions:
  query STORE [SQL]      the latest of every checkpoint, ranked across runs; with SQL, its answer
  show STORE CHECKPOINT  all that was seen of a repository or folder
  diff STORE             what moved since --since: new, changed, vanished, failed, new leaders
  export STORE FILE      the latest of every checkpoint as .parquet or .csv
  prune STORE            forget superseded commits, and runs before --since

SQL is read-only. Tables: runs, seen, results, tokenizers; the view checkpoints has the latest of each.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion registry``."""
    parser.add_argument("action", choices=_ACTIONS, help="what to do, see below")
    parser.add_argument("registry", type=Path, metavar="FILE", help="the registry that --registry wrote")
    parser.add_argument(
        "what", nargs="?", metavar="ARGUMENT", help="the SQL, checkpoint or file of the action, see below"
    )
    parser.add_argument(
        "--domain", metavar="SET", help="only results of this token set (default: the most used)"
    )
    parser.add_argument("--family", metavar="NAME", help="only this family or tokenizer (default: all)")
    parser.add_argument("--scale", metavar="NAME", help="only this scale, such as 7B (default: all)")
    parser.add_argument("--top", type=int, metavar="K", help="only the K best of each group (default: all)")
    parser.add_argument(
        "--metric",
        default="cosine",
        choices=("cosine", "euclidean"),
        help="which gap ranks (default: cosine)",
    )
    parser.add_argument(
        "--since", metavar="RUN", help="a run of the registry, or a date or time in UTC (default: none)"
    )
    add_output(parser)
    add_examples(
        parser,
        "query nightly.duckdb --scale 7B --top 5",
        "diff nightly.duckdb --since 2026-11-20",
        "export nightly.duckdb checkpoints.parquet",
        more=_MORE,
    )


def run(args: argparse.Namespace) -> int:
    """Run ``dispersion registry``; returns the exit code."""
    needs = {"show": "the checkpoint", "export": "the file"}
    if args.what is None and args.action in needs:
        raise UsageError(f"expected {needs[args.action]} after {args.action} {args.registry}, got none")
    if args.what is not None and args.action in ("diff", "prune"):
        raise UsageError(f"expected nothing after {args.action} {args.registry}, got {args.what!r}")
    if args.since is None and args.action == "diff":
        raise UsageError("expected --since DATE or --since RUN with diff, got none")
    if args.top is not None and args.top < 1:
        raise UsageError(f"expected --top of at least 1, got {args.top}")
    from lmeval_screener.registry.database import Registry

    output, registry = Output.of(args), Registry(args.registry)
    if args.action == "export":
        place = _exported(registry, Path(args.what))
        output.say(f"wrote {place}")
        return 0
    output.write(_pruned(registry, args.since) if args.action == "prune" else _answered(registry, args))
    return 0


def _answered(registry: Any, args: argparse.Namespace) -> Document:
    with registry.read() as connection:
        if args.action == "show":
            return _shown(connection, args.what)
        if args.action == "query" and args.what is not None:
            return _sql(connection, args.what)
        return _diff(connection, args) if args.action == "diff" else _query(connection, args)


def _document(title: str, answer: str, rows: list[dict[str, Any]], columns: list[Any], name: str) -> Document:
    from lmeval_dispersion.report import Document, Section, Table

    return Document(
        title,
        answer=(answer,),
        sections=[Section("", [Table(rows, columns, title, name)])] if rows else [],
        rows=rows,
        fields=[column.key for column in columns],
        guide="docs/reference/registry.md",
    )


def _query(connection: Any, args: argparse.Namespace) -> Document:
    from lmeval_dispersion.report import Column
    from lmeval_screener.registry.database import stored
    from lmeval_screener.registry.queries import group_rows, ranked, sets_of

    chosen = sets_of(connection, args.domain)[0]
    seen = stored(connection, chosen.tokens)
    found = [
        c
        for c in ranked(seen, args.metric)
        if (args.family is None or c.family == args.family) and (args.scale is None or c.scale == args.scale)
    ]
    groups: dict[tuple[str, str], int] = {}
    shown = []
    for c in found:
        key = c.family, c.scale
        groups[key] = groups.get(key, 0) + 1
        if args.top is None or groups[key] <= args.top:
            shown.append(c)
    failed = sum(bool(one.error) for one in seen)
    many = "s" if len(groups) != 1 else ""
    answer = (
        f"{len(found)} checkpoints in {len(groups)} group{many} for {chosen.domain} against "
        f"{chosen.reference}; "
        f"{failed} failed when last seen."
    )
    columns = [
        Column("checkpoint", "Checkpoint"),
        Column("group", "Group", drop=2),
        Column("rank", "Rank", "d", short="#"),
        Column("tied_with", "Tied with", drop=1),
        Column("G", "G", ".4f", error="se"),
        Column("revision", "Commit", drop=3),
    ]
    return _document(
        "Checkpoints of the registry", answer, group_rows(shown, args.metric), columns, "checkpoints"
    )


def _sql(connection: Any, statement: str) -> Document:
    import duckdb

    from lmeval_dispersion.report import Column

    try:
        cursor = connection.execute(statement)
        names = [column[0] for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    except duckdb.Error as error:
        raise UsageError(f"the registry could not answer: {str(error).strip()}") from error
    plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
    many = "s" if len(rows) != 1 else ""
    columns = [Column(name, name) for name in names]
    return _document("Answer of the registry", f"{len(rows)} row{many}.", plain, columns, "answer")


def _plain(value: Any) -> Any:
    """What every form of a report can show."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _shown(connection: Any, repo: str) -> Document:
    from lmeval_dispersion.report import Column
    from lmeval_screener.registry.queries import history
    from lmeval_screener.targets.target import parse_target

    target = parse_target(repo)
    rows = history(connection, str(Path(target.repo).resolve()) if target.local else target.repo)
    if not rows:
        raise UsageError(f"expected a checkpoint that the registry has seen, got {repo}; query lists them")
    commits = len({row["state"] for row in rows if row["state"]})
    last = rows[0]
    answer = (
        f"{repo}: {commits} commit{'s' if commits != 1 else ''} seen, last on {last['last']:%Y-%m-%d %H:%M}"
        + (f"; it failed then ({last['error']})." if last["error"] else ".")
    )
    columns = [
        Column("requested", "Revision"),
        Column("state", "Commit"),
        Column("domain", "Domain"),
        Column("cosine", "G cosine", ".4f", error="cosine_se"),
        Column("euclidean", "G euclidean", ".4f", error="euclidean_se", drop=1),
        Column("first", "First seen", drop=2),
        Column("last", "Last seen"),
        Column("runs", "Runs", "d", drop=3),
        Column("error", "Error"),
        Column("message", "Why", drop=4),
    ]
    plain = [
        {name: value if isinstance(value, int | float) else _plain(value) for name, value in row.items()}
        for row in rows
    ]
    return _document(f"History of {repo}", answer, plain, columns, "history")


def _diff(connection: Any, args: argparse.Namespace) -> Document:
    from lmeval_dispersion.report import Column
    from lmeval_screener.registry.queries import moved, sets_of, since_time

    chosen = sets_of(connection, args.domain)[0]
    since = since_time(connection, args.since)
    found = moved(connection, chosen.tokens, since, args.metric)
    kinds = ("new", "changed", "vanished", "failed", "recovered", "leader")
    counts = [(sum(one.what == kind for one in found), kind) for kind in kinds]
    apart = sum(one.what == "changed" and bool(one.apart) for one in found)
    listed = ", ".join(
        f"{number} {'new leader' + 's' * (number > 1) if kind == 'leader' else kind}"
        for number, kind in counts
        if number
    )
    told = f" G of {apart} of the changed differs from before." if apart else ""
    answer = f"Since {since[:16]} UTC: {listed or 'nothing moved'}.{told}"
    rows = [
        {
            "what": one.what,
            "checkpoint": one.label,
            "text": one.text,
            "gain": one.gain,
            "se": one.se,
            "apart": None if one.apart is None else "yes" if one.apart else "no",
        }
        for one in sorted(found, key=lambda one: kinds.index(one.what))
    ]
    columns = [
        Column("what", "What"),
        Column("checkpoint", "Checkpoint"),
        Column("text", "How"),
        Column("gain", "Δ G", ".4f", error="se"),
        Column("apart", "Told apart", drop=1),
    ]
    return _document("What moved", answer, rows, columns, "moved")


def _exported(registry: Any, place: Path) -> Path:
    """The latest of every checkpoint as a file."""
    import os

    forms = {".parquet": "(FORMAT parquet)", ".csv": "(FORMAT csv, HEADER)"}
    form = forms.get(place.suffix.lower())
    if form is None:
        raise UsageError(f"expected a file with the suffix {' or '.join(forms)}, got {place}")
    if not place.absolute().parent.is_dir():
        raise UsageError(f"expected a file in an existing folder, got {place}")
    registry.check_there()
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with registry.written() as connection:
            quoted = str(beside).replace("'", "''")
            connection.execute(f"COPY (SELECT * FROM checkpoints ORDER BY identity) TO '{quoted}' {form}")
        os.replace(beside, place)
    except OSError as error:
        raise DispersionError(f"could not write {place}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return place


def _pruned(registry: Any, since: str | None) -> Document:
    """Forget what no latest observation refers to; with a time, runs before it too, but never the latest."""
    from lmeval_dispersion.report import Column
    from lmeval_screener.registry.queries import since_time

    registry.check_there()
    latest = (
        "(SELECT run, identity, requested, file, tokens, state FROM seen QUALIFY row_number() OVER ("
        "PARTITION BY identity, requested, file, tokens ORDER BY stamp DESC, run DESC) = 1)"
    )
    rows = []
    with registry.written() as connection:
        before = {name: _count(connection, name) for name in ("runs", "seen", "results")}
        connection.execute("BEGIN")
        same = " AND ".join(f"l.{name} = seen.{name}" for name in ("identity", "requested", "file", "tokens"))
        connection.execute(
            f"DELETE FROM seen USING {latest} l WHERE {same} AND seen.state <> l.state AND l.state <> ''"
        )
        if since is not None:
            connection.execute(
                f"DELETE FROM seen USING {latest} l WHERE {same} AND seen.run <> l.run "
                "AND seen.stamp < CAST(? AS TIMESTAMP)",
                [since_time(connection, since)],
            )
        connection.execute(
            "DELETE FROM results WHERE NOT ((identity, file, state, tokens, method) IN "
            "(SELECT identity, file, state, tokens, method FROM seen WHERE error IS NULL))"
        )
        connection.execute(
            "DELETE FROM controls WHERE NOT ((identity, file, state, tokens, method) IN "
            "(SELECT identity, file, state, tokens, method FROM results))"
        )
        connection.execute("DELETE FROM names WHERE identity NOT IN (SELECT identity FROM seen)")
        connection.execute("DELETE FROM runs WHERE ended IS NOT NULL AND run NOT IN (SELECT run FROM seen)")
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT")
        for name, number in before.items():
            rows.append({"table": name, "before": number, "after": _count(connection, name)})
    gone = {name: number - int(str(rows[at]["after"])) for at, (name, number) in enumerate(before.items())}
    columns = [
        Column("table", "Table"),
        Column("before", "Rows before", "d"),
        Column("after", "Rows now", "d"),
    ]
    words = {"results": "superseded result", "seen": "observation", "runs": "run"}
    one, two, three = (f"{gone[name]} {word}{'s' * (gone[name] != 1)}" for name, word in words.items())
    answer = f"Forgot {one}, {two} and {three}; the latest of every checkpoint is kept."
    return _document("Pruned", answer, rows, columns, "pruned")


def _count(connection: Any, table: str) -> int:
    if not re.fullmatch("[a-z]+", table):
        raise ValueError(table)
    (row,) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
    return int(row[0])


COMMANDS = {"registry": (add_arguments, run)}
