"""Questions to a registry, answered as reports: ranks across runs, a checkpoint's history, what has moved."""

from __future__ import annotations

import datetime
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report import Col, Column, Document, Section, Table
from lmeval_dispersion.report.cells import json_value
from lmeval_dispersion.report.declared import count, listed
from lmeval_dispersion.report.document import fields_of
from lmeval_screener import ranking
from lmeval_screener.figures import Difference, difference
from lmeval_screener.registry.database import Seen, folder_is_gone, last_seen
from lmeval_screener.screened import Reading, Screened, grouped, tie_cells, tied_with
from lmeval_screener.targets import labelled

#: Errors that say that a repository, a revision or a folder is no longer there.
_GONE = frozenset({"RepoNotFound", "RevisionNotFound", "FolderNotFound"})
#: Chance that G of any changed checkpoint is said to differ from before although it does not.
_ERROR_RATE = 0.05
_WIDE = 100  # characters of a line from which on each value of a row has a line of its own


def sets_of(connection: sqlite3.Connection, domain: str | None) -> tuple[str, str, str]:
    """Key and names of the pair of token sets with most results, of a domain or of all."""
    rows = connection.execute(
        "SELECT tokens, domain, reference FROM runs GROUP BY tokens "
        "ORDER BY (SELECT count(*) FROM results r WHERE r.tokens = runs.tokens) DESC, tokens"
    ).fetchall()
    if not rows:
        raise UsageError("the registry has no results yet; `screen-checkpoints … --registry FILE` adds some")
    chosen = next((row for row in rows if domain in (None, row["domain"])), None)
    if chosen is None:
        names = ", ".join(sorted({row["domain"] for row in rows}))
        raise UsageError(f"expected a domain that the registry has, got {domain!r}; it has {names}")
    return chosen["tokens"], chosen["domain"], chosen["reference"]


def named(seen: Sequence[Seen]) -> list[Seen]:
    """The same with labels that differ."""
    targets = labelled([entry.target for entry in seen])
    return [entry.called(target) for entry, target in zip(seen, targets, strict=True)]


def is_gone(seen: Seen) -> bool:
    """Whether a checkpoint was there and is not any more: a folder is looked for, others were asked for."""
    return seen.error in _GONE or (not seen.error and folder_is_gone(seen.identity))


def ranked(seen: Sequence[Seen], metric: Metric) -> list[Screened]:
    """All that was measured, ranked in groups of one tokenizer and scale.

    Two tokenizers are one where every token compared is the same piece at the same row.
    """
    rows: dict[int, tuple[object, ...]] = {}
    first: dict[tuple[object, ...], Reading] = {}
    of_family: dict[str, tuple[object, ...]] = {}
    pairs = []
    for reading in (entry.reading for entry in seen if entry.reading is not None):
        resolution, family = reading.resolution, reading.target.family
        tokens = rows.setdefault(
            id(resolution), tuple((t.piece, t.id) for t in (*resolution.domain, *resolution.reference))
        )
        if family is not None and of_family.setdefault(family, tokens) != tokens:
            # Other rows than its family's: a group of its tokenizer.
            reading = replace(reading, target=replace(reading.target, family=None))
        pairs.append((reading, first.setdefault(tokens, reading)))
    return ranking.ranked(pairs, metric)


@dataclass(frozen=True)
class Ranked:
    """A checkpoint of a registry, as `query` shows it; ``rank`` and G are None for one that is gone."""

    checkpoint: Annotated[str, Col("Checkpoint")]
    family: str | None = None
    group: Annotated[str | None, Col("Group", drop=2)] = None
    rank: Annotated[int | None, Col("Rank", "d", short="#")] = None
    tied_with: Annotated[Sequence[int | str], Col("Ties", drop=1)] = ()
    G: Annotated[float | None, Col("G", ".3f", error="se")] = None
    se: float | None = None
    ratio: Annotated[float | None, Col("Ratio", ".3f")] = None
    revision: Annotated[str | None, Col("Commit", drop=3)] = None
    note: Annotated[str | None, Col("Note")] = None


@dataclass(frozen=True)
class Sighting:
    """A state in which a checkpoint was found, by however many runs in a row."""

    requested: Annotated[str, Col("Revision")]
    file: Annotated[str, Col("File")]
    state: Annotated[str, Col("Commit")]
    domain: Annotated[str, Col("Domain")]
    reference: str
    cosine: Annotated[float | None, Col("G cosine", ".4f", error="cosine_se")]
    cosine_se: float | None
    euclidean: Annotated[float | None, Col("G euclidean", ".4f", error="euclidean_se", drop=1)]
    euclidean_se: float | None
    tensor: str | None
    dtype: str | None
    first: Annotated[str, Col("First seen", drop=2)]
    last: Annotated[str, Col("Last seen")]
    runs: Annotated[int, Col("Runs", "d", drop=3)]
    error: Annotated[str | None, Col("Error")]
    message: Annotated[str | None, Col("Why", drop=4)]


def checkpoint_named(connection: sqlite3.Connection, text: str) -> tuple[str, str]:
    """Identity, and file if one is meant, of the checkpoint that a printed label, path or address names."""
    place = f"file://{Path(os.path.expanduser(text)).resolve()}"
    renamed = connection.execute("SELECT identity FROM names WHERE asked = ?", [f"hf://{text}"]).fetchone()
    exact = {text, f"hf://{text}", place, *(renamed or ())}
    keys = [row[0] for row in connection.execute("SELECT DISTINCT tokens FROM seen")]
    seen = [entry for tokens in keys for entry in named(last_seen(connection, tokens))]
    matches = {(entry.identity, "") for entry in seen if entry.identity in exact}
    if not matches:
        # A label is the end of a path, with a revision or a file behind it.
        files = [(entry, entry.target.file or "") for entry in seen]
        matches = {
            (entry.identity, file)
            for entry, file in files
            if text in (entry.target.label, entry.target.name) or f"{entry.identity}/{file}" in exact
        } or {(entry.identity, "") for entry in seen if entry.identity.endswith(f"/{text.strip('/')}")}
    if not matches:
        raise UsageError(f"expected a checkpoint that the registry has seen, got {text}; query lists them")
    if len(matches) > 1:
        names = ", ".join("/".join(filter(None, match)) for match in sorted(matches)[:5])
        raise UsageError(f"expected one checkpoint, got {text}, which is the name of {len(matches)}: {names}")
    return matches.pop()


def since_time(connection: sqlite3.Connection, since: str) -> str:
    """The time that ``--since`` names: the end of a run, ``yesterday``, or a date or time (UTC)."""
    row = connection.execute(
        "SELECT coalesce(ended, (SELECT max(last) FROM seen WHERE run = runs.run), started) FROM runs "
        "WHERE run = ?",
        [since],
    ).fetchone()
    if row is not None:
        return str(row[0])
    if since == "yesterday":
        # The whole of yesterday counts: who asks in the morning means the night before as well.
        since = f"{datetime.datetime.now(datetime.timezone.utc).date() - datetime.timedelta(days=1)}"
    try:
        time = datetime.datetime.fromisoformat(since.replace("Z", "+00:00"))
    except ValueError as error:
        raise UsageError(
            f"expected --since as a date, a time, yesterday or a run of the registry, got {since!r}; "
            '`dispersion registry query FILE "SELECT * FROM runs"` lists the runs'
        ) from error
    if time.tzinfo is not None:
        time = time.astimezone(datetime.timezone.utc)
    return f"{time:%Y-%m-%d %H:%M:%S.%f}"


@dataclass(frozen=True)
class Move:
    """One thing that is not as it was: ``new``, ``changed``, ``recovered``, ``deleted`` or ``failed``.

    ``gain`` is G minus that of the former best of its group, or that of its former commit; ``apart`` whether
    that difference is more than chance of the tokens. All are None where it is not ranked or compared.
    """

    what: Annotated[str, Col("What")]
    checkpoint: Annotated[str, Col("Checkpoint")]
    group: Annotated[str | None, Col("Group", drop=2)] = None
    rank: Annotated[int | None, Col("Rank", "d", short="#")] = None
    G: Annotated[float | None, Col("G", ".3f", drop=1)] = None
    ratio: Annotated[float | None, Col("Ratio", ".3f", drop=1)] = None
    gain: Annotated[float | None, Col("Δ G", ".3f", error="se")] = None
    se: float | None = None
    apart: Annotated[bool | None, Col("Clear", drop=1)] = None
    text: Annotated[str, Col("How")] = ""


def moved(connection: sqlite3.Connection, tokens: str, since: str, metric: Metric) -> list[Move]:
    """The moves since a time: new checkpoints, best first, then what changed, was lost or failed."""
    now = {_place(seen): seen for seen in named(last_seen(connection, tokens))}
    then = {_place(seen): seen for seen in last_seen(connection, tokens, until=since)}
    ranks = {c.label: c for c in ranked([seen for seen in now.values() if not is_gone(seen)], metric)}
    known = {seen.target.label for place, seen in now.items() if place in then and then[place].reading}
    former_best: dict[tuple[str, str], Screened] = {}
    for c in ranks.values():
        if c.label in known:
            former_best.setdefault((c.family, c.scale), c)
    moves: list[Move] = []
    changes: list[tuple[Screened, Reading, Reading]] = []
    for place, seen in now.items():
        label = seen.target.label
        old, ranked_now = then.get(place), ranks.get(label)
        before = old and old.reading
        if before and is_gone(seen):
            moves.append(Move("deleted", label, text=seen.message or "the folder is no longer there"))
        elif seen.error and (old is None or seen.error != old.error):
            moves.append(Move("failed", label, text=f"{seen.error}: {seen.message}"))
        elif ranked_now is not None and before is None:
            what = "recovered" if old else "new"
            moves.append(
                _against(ranked_now, former_best.get((ranked_now.family, ranked_now.scale)), what, metric)
            )
        elif ranked_now is not None and old and before and seen.reading and seen.state != old.state:
            changes.append((ranked_now, before, seen.reading))
    moves += [_changed(*change, metric, len(changes)) for change in changes]
    titles = {c.label: group.title for group in grouped(ranks.values()) for c in group.checkpoints}
    moves = [replace(move, group=titles.get(move.checkpoint)) for move in moves]
    order = ("new", "changed", "recovered", "deleted", "failed")
    return sorted(moves, key=lambda move: (order.index(move.what), move.group or "", move.rank or 0))


def _against(c: Screened, former: Screened | None, what: str, metric: Metric) -> Move:
    """A checkpoint beside the best one of its group that was there before."""
    if former is None or former.label == c.label:
        return _ranked_move(what, c, metric, "first of its group")
    gain, clear = difference(c.gaps[metric], former.gaps[metric]), not c.tied_to(former.rank)
    words = ("above" if gain.mean > 0 else "below") if clear else "no clear order with"
    return _ranked_move(what, c, metric, f"{words} the former best, {former.label}", gain, clear)


def _changed(c: Screened, before: Reading, after: Reading, metric: Metric, changes: int) -> Move:
    """A checkpoint beside its former commit, where so many changed."""
    if before.resolution != after.resolution:
        return _ranked_move("changed", c, metric, "its tokenizer changed too: not compared")
    gain = difference(after.gaps[metric], before.gaps[metric])
    commits = f"{(before.revision or 'before')[:8]} → {(after.revision or 'now')[:8]}"
    return _ranked_move("changed", c, metric, commits, gain, gain.p < _ERROR_RATE / changes)


def _ranked_move(
    what: str,
    c: Screened,
    metric: Metric,
    text: str,
    gain: Difference | None = None,
    apart: bool | None = None,
) -> Move:
    mean, se = (gain.mean, gain.se) if gain else (None, None)
    group, ratio = f"{c.family} · {c.scale}", None if c.ratio is None else c.ratio.mean
    return Move(what, c.label, group, c.rank, c.gaps[metric].mean, ratio, mean, se, apart, text)


def _place(seen: Seen) -> tuple[str, str, str]:
    return seen.identity, seen.target.revision or "", seen.target.file or ""


def query(
    connection: sqlite3.Connection,
    metric: Metric,
    domain: str | None,
    family: str | None,
    scale: str | None,
    top: int | None,
) -> Document:
    """The latest of every checkpoint, ranked across runs."""
    tokens, domain, reference = sets_of(connection, domain)
    seen = named(last_seen(connection, tokens))
    gone = [entry.target.label for entry in seen if is_gone(entry)]
    checkpoints = ranked([entry for entry in seen if entry.target.label not in gone], metric)
    groups = grouped(c for c in checkpoints if family in (None, c.family) and scale in (None, c.scale))
    rows = [
        Ranked(
            c.label, c.family, group.title, c.rank, tie_cells(tied_with(c, group)), c.gaps[metric].mean,
            c.gaps[metric].se, None if c.ratio is None else c.ratio.mean, c.revision,
        )
        for group in groups
        for c in group.checkpoints[:top]
    ]  # fmt: skip
    if family is None and scale is None and top is None:
        rows += [Ranked(label, note="deleted") for label in gone]
    failed = sum(bool(entry.error) and entry.target.label not in gone for entry in seen)
    total = count(sum(len(group.checkpoints) for group in groups), "checkpoint")
    total += f" in {count(len(groups), 'group')}"
    sentence = f"{total} for {domain} against {reference}"
    sentence += f"; {len(gone)} deleted, {failed} failed when last seen."
    return _document("Checkpoints of the registry", "checkpoints", [sentence], rows)


def sql_answer(connection: sqlite3.Connection, statement: str) -> Document:
    """The answer to SQL."""
    try:
        rows = [dict(row) for row in connection.execute(statement)]
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise UsageError(
            f"the registry could not answer: {error}; it takes one SELECT of SQLite's"
        ) from error
    for row in rows:
        row |= {key: f"{len(value)} bytes" for key, value in row.items() if isinstance(value, bytes)}
    return _document("Answer of the registry", "answer", [f"{count(len(rows), 'row')}."], rows)


def history(connection: sqlite3.Connection, text: str) -> Document:
    """All that was seen of the checkpoint that a user names."""
    identity, file = checkpoint_named(connection, text)
    sightings = connection.execute(
        "SELECT requested, file, state, domain, reference, gap_cosine, gap_cosine_se, gap_euclidean, "
        "gap_euclidean_se, tensor, dtype, first, last, runs, error, message "
        "FROM sightings WHERE identity = ? AND ? IN ('', file) ORDER BY last DESC",
        [identity, file],
    )
    rows = [Sighting(*row) for row in sightings]
    commits = len({row.state for row in rows if row.state})
    sentence = f"{text}: {count(commits, 'commit')} seen, last on {rows[0].last[:16]}"
    sentence += f"; it failed then ({rows[0].error})." if rows[0].error else "."
    return _document(f"History of {text}", "history", [sentence], rows)


def diff(connection: sqlite3.Connection, tokens: str, time: str, metric: Metric) -> Document:
    """The moves since a time, and which of what is new is worth an evaluation."""
    moves = moved(connection, tokens, time, metric)
    arrived = [move for move in moves if move.what in ("new", "recovered")]
    groups = {
        "Worth evaluating, above the former best": [m for m in arrived if m.apart and (m.gain or 0) > 0],
        "No clear order with the former best": [m for m in arrived if m.apart is False],
        "Best of a new group": [m for m in arrived if m.gain is None and m.rank == 1],
        "Changed for the better": [m for m in moves if m.what == "changed" and m.apart and (m.gain or 0) > 0],
    }
    sentences = []
    for words, chosen in groups.items():
        names = [f"{move.checkpoint} (rank {move.rank})" for move in chosen]
        shown_names = names if len(names) <= 5 else [*names[:5], f"{len(names) - 5} others"]
        sentences += [f"{words}: {listed(shown_names)}."] if chosen else []
    if arrived and not sentences:
        sentences = ["Nothing new is level with the former best."]
    kinds = Counter(move.what for move in moves)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "nothing moved"
    sentences.append(f"Since {time[:16]} UTC: {counts}.")
    return _document("What moved", "moved", sentences, moves)


def _document(title: str, name: str, sentences: Sequence[str], rows: Sequence[Any]) -> Document:
    """Sentences and rows, of one dataclass or mappings; as one line a value where these are too wide."""
    plain: list[dict[str, Any]] = [row if isinstance(row, dict) else fields_of(row) for row in rows]
    if plain and isinstance(rows[0], dict):
        names, lines = list(plain[0]), plain
        columns = [Column(column, column) for column in names]
        if sum(2 + max(len(n), *(len(str(row[n])) for row in plain)) for n in names) > _WIDE:
            columns = [Column("row", "Row", "d"), Column("column", "Column"), Column("value", "Value")]
            lines = [
                {"row": number, "column": column, "value": value}
                for number, row in enumerate(plain, 1)
                for column, value in row.items()
            ]
        table = Table(lines, columns, title, name)
    else:
        table = Table.of(rows, title, name=name)
    content = {"schema": "dispersion-registry/1", "answer": list(sentences), "rows": json_value(plain)}
    return Document(
        title,
        answer=sentences,
        sections=[Section("", [table] if plain else [], name)],
        rows=plain,
        contract=lambda: json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        guide="docs/reference/registry.md",
        short=True,
    )
