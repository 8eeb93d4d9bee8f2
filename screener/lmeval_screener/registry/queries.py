"""Questions to a registry: checkpoints ranked anew across runs, a checkpoint's history, what has moved."""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Metric
from lmeval_dispersion.report import Col
from lmeval_screener import ranking
from lmeval_screener.figures import Difference, difference
from lmeval_screener.registry.database import Seen, folder_is_gone, stored
from lmeval_screener.screened import Reading, Screened
from lmeval_screener.targets import labelled

#: Errors that say that a repository, a revision or a folder is no longer there.
_GONE = frozenset({"RepoNotFound", "RevisionNotFound", "FolderNotFound"})
#: Chance that G of any changed checkpoint is said to differ from before although it does not.
_ERROR_RATE = 0.05


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
    """The same with the labels that tell them apart."""
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
    for measured in (entry.measured for entry in seen if entry.measured is not None):
        resolution, family = measured.resolution, measured.target.family
        tokens = rows.setdefault(
            id(resolution), tuple((t.piece, t.id) for t in (*resolution.domain, *resolution.reference))
        )
        if family is not None and of_family.setdefault(family, tokens) != tokens:
            # Other rows than its family's: a group of its tokenizer.
            measured = replace(measured, target=replace(measured.target, family=None))
        pairs.append((measured, first.setdefault(tokens, measured)))
    return ranking.ranked(pairs, metric)


@dataclass(frozen=True)
class Ranked:
    """A checkpoint of a registry, as `query` shows it; ``rank`` and G are None for one that is gone."""

    checkpoint: Annotated[str, Col("Checkpoint")]
    group: Annotated[str | None, Col("Group", drop=2)]
    rank: Annotated[int | None, Col("Rank", "d", short="#")]
    tied_with: Annotated[tuple[int, ...], Col("No clear order with", drop=1)]
    G: Annotated[float | None, Col("G", ".3f", error="se")]
    se: float | None
    ratio: Annotated[float | None, Col("Ratio", ".3f")]
    revision: Annotated[str | None, Col("Commit", drop=3)]
    note: Annotated[str | None, Col("Note")]


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


def history(connection: sqlite3.Connection, identity: str, file: str) -> list[Sighting]:
    """All that was seen of a repository, folder or address, or of a file in it, the latest first."""
    rows = connection.execute(
        "SELECT s.requested, s.file, s.state, u.domain, u.reference, r.gap_cosine, r.gap_cosine_se, "
        "r.gap_euclidean, r.gap_euclidean_se, r.tensor, r.dtype, s.first, s.last, s.runs, s.error, s.message "
        "FROM seen s LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity "
        "AND r.file = s.file AND r.state = s.state AND r.tokens = s.tokens AND r.method = s.method "
        "LEFT JOIN runs u ON u.run = s.run WHERE s.identity = ? AND ? IN ('', s.file) "
        "ORDER BY s.last DESC",
        [identity, file],
    )
    return [Sighting(*row) for row in rows]


def checkpoint_named(connection: sqlite3.Connection, text: str) -> tuple[str, str]:
    """Identity, and file if one is meant, of the checkpoint that a printed label, path or address names."""
    place = str(Path(text).expanduser().resolve())
    renamed = connection.execute("SELECT identity FROM names WHERE asked = ?", [f"hf://{text}"]).fetchone()
    exact = {text, f"hf://{text}", f"file://{place}", *(renamed or ())}
    keys = [row[0] for row in connection.execute("SELECT DISTINCT tokens FROM seen")]
    seen = [entry for tokens in keys for entry in named(stored(connection, tokens))]
    matches = sorted(
        {(entry.identity, "") for entry in seen if entry.identity in exact}
        # A label is the end of a path, with a revision or a file behind it.
        or {
            (entry.identity, file)
            for entry in seen
            for file in [entry.target.file or ""]
            if text in (entry.target.label, entry.target.name) or f"{entry.identity}/{file}" in exact
        }
        or {(entry.identity, "") for entry in seen if entry.identity.endswith(f"/{text.strip('/')}")}
    )
    if not matches:
        raise UsageError(f"expected a checkpoint that the registry has seen, got {text}; query lists them")
    if len(matches) > 1:
        names = ", ".join("/".join(filter(None, match)) for match in matches[:5])
        raise UsageError(f"expected one checkpoint, got {text}, which is the name of {len(matches)}: {names}")
    return matches[0]


def since_time(connection: sqlite3.Connection, since: str) -> str:
    """The time that ``--since`` names: the end of a run, ``yesterday``, or a date or time (UTC)."""
    row = connection.execute(
        "SELECT coalesce(ended, (SELECT max(last) FROM seen WHERE run = runs.run), started) FROM runs "
        "WHERE run = ?",
        [since],
    ).fetchone()
    if row is not None:
        return str(row[0])
    now = datetime.datetime.now(datetime.timezone.utc)
    if since == "yesterday":
        # The whole of yesterday counts: who asks in the morning means the night before as well.
        return f"{now.date() - datetime.timedelta(days=1)} 00:00:00.000000"
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
    """One thing that is not as it was.

    Attributes:
        what: ``new``, ``changed`` (another commit), ``recovered``, ``deleted`` or ``failed``.
        checkpoint: Its label.
        group: Family and scale; None where it is not ranked.
        rank: Its rank there now.
        G: Its gap now.
        ratio: Its second figure now.
        gain: G minus that of the former best of its group, or that of its former commit.
        se: Its paired error.
        apart: Whether that difference is more than chance of the tokens; None where there is none.
        text: In words.
    """

    what: Annotated[str, Col("What")]
    checkpoint: Annotated[str, Col("Checkpoint")]
    group: Annotated[str | None, Col("Group", drop=2)]
    rank: Annotated[int | None, Col("Rank", "d", short="#")]
    G: Annotated[float | None, Col("G", ".3f", drop=1)]
    ratio: Annotated[float | None, Col("Ratio", ".3f", drop=1)]
    gain: Annotated[float | None, Col("Δ G", ".3f", error="se")]
    se: float | None
    apart: Annotated[bool | None, Col("Clear", drop=1)]
    text: Annotated[str, Col("How")]


def moved(connection: sqlite3.Connection, tokens: str, since: str, metric: Metric) -> list[Move]:
    """The moves since a time: new checkpoints, best first, then what changed, was lost or failed."""
    now = {_place(entry): entry for entry in named(stored(connection, tokens))}
    then = {_place(entry): entry for entry in stored(connection, tokens, until=since)}
    ranks = {c.label: c for c in ranked([entry for entry in now.values() if not is_gone(entry)], metric)}
    known = {entry.target.label for place, entry in now.items() if place in then and then[place].measured}
    best_known: dict[tuple[str, str], Screened] = {}
    for ranked_now in ranks.values():
        if ranked_now.label in known:
            best_known.setdefault((ranked_now.family, ranked_now.scale), ranked_now)
    moves: list[Move] = []
    changes: list[tuple[Screened, Reading, Reading]] = []
    for place, entry in now.items():
        old, label, c = then.get(place), entry.target.label, ranks.get(entry.target.label)
        if old is not None and old.measured is not None and is_gone(entry):
            moves.append(_unranked("deleted", label, entry.message or "the folder is no longer there"))
        elif entry.error and (old is None or entry.error != old.error):
            moves.append(_unranked("failed", label, f"{entry.error}: {entry.message}"))
        elif c is not None and (old is None or old.measured is None):
            moves.append(
                _against(c, best_known.get((c.family, c.scale)), "recovered" if old else "new", metric)
            )
        elif c is not None and old and old.measured and entry.measured and entry.state != old.state:
            changes.append((c, old.measured, entry.measured))
    moves += [_changed(*change, metric, len(changes)) for change in changes]
    order = ("new", "changed", "recovered", "deleted", "failed")
    return sorted(moves, key=lambda move: (order.index(move.what), move.group or "", move.rank or 0))


def _unranked(what: str, label: str, text: str) -> Move:
    return Move(what, label, None, None, None, None, None, None, None, text)


def _ranked_move(
    what: str, c: Screened, metric: Metric, text: str, gain: Difference | None, apart: bool | None
) -> Move:
    group, ratio = f"{c.family} · {c.scale}", None if c.ratio is None else c.ratio.mean
    mean, se = (None, None) if gain is None else (gain.mean, gain.se)
    return Move(what, c.label, group, c.rank, c.gaps[metric].mean, ratio, mean, se, apart, text)


def _against(c: Screened, former: Screened | None, what: str, metric: Metric) -> Move:
    """A checkpoint beside the best one of its group that was there before."""
    if former is None or former.label == c.label:
        return _ranked_move(what, c, metric, "first of its group", None, None)
    gain, clear = difference(c.gaps[metric], former.gaps[metric]), not c.tied_to(former.rank)
    words = ("above" if gain.mean > 0 else "below") if clear else "no clear order with"
    return _ranked_move(what, c, metric, f"{words} the former best, {former.label}", gain, clear)


def _changed(c: Screened, before: Reading, after: Reading, metric: Metric, count: int) -> Move:
    """A checkpoint beside its former commit, where so many changed."""
    if before.resolution != after.resolution:
        return _ranked_move("changed", c, metric, "its tokenizer changed too: not compared", None, None)
    gain = difference(after.gaps[metric], before.gaps[metric])
    commits = f"{(before.revision or 'before')[:8]} → {(after.revision or 'now')[:8]}"
    return _ranked_move("changed", c, metric, commits, gain, gain.p < _ERROR_RATE / count)


def _place(seen: Seen) -> tuple[str, str, str]:
    return seen.identity, seen.target.revision or "", seen.target.file or ""
