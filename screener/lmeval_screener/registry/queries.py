"""What a registry is asked: checkpoints ranked anew across runs, a repository's history, what has moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.geometry import Metric
from lmeval_screener.ranking import groups
from lmeval_screener.ranking.gap import difference
from lmeval_screener.reading import Reading
from lmeval_screener.registry.database import Seen, stored
from lmeval_screener.screened import Screened

if TYPE_CHECKING:
    import duckdb

#: Errors that say that a repository or a revision is no longer there.
_GONE = frozenset({"RepoNotFound", "RevisionNotFound", "FolderNotFound"})


@dataclass(frozen=True)
class Sets:
    """Token sets that a registry has results of: their key, their names, how many were measured."""

    tokens: str
    domain: str
    reference: str
    count: int


def sets_of(connection: duckdb.DuckDBPyConnection, domain: str | None) -> list[Sets]:
    """The pairs of token sets, of a domain or of all, the ones with most results first.

    Raises:
        UsageError: The registry has none, or none of the domain.
    """
    rows = connection.execute(
        "SELECT u.tokens, max_by(u.domain, u.started), max_by(u.reference, u.started), "
        "(SELECT count(*) FROM results r WHERE r.tokens = u.tokens) AS number "
        "FROM runs u GROUP BY u.tokens ORDER BY number DESC, u.tokens"
    ).fetchall()
    found = [Sets(*row) for row in rows]
    if domain is not None:
        chosen = [one for one in found if one.domain == domain]
        if not chosen:
            names = ", ".join(sorted({one.domain for one in found})) or "none"
            raise UsageError(f"expected a domain that the registry has, got {domain!r}; it has {names}")
        return chosen
    if not found:
        raise UsageError("the registry has no results yet; `screen-checkpoints … --registry FILE` adds some")
    return found


def ranked(found: Sequence[Seen], metric: Metric) -> list[Screened]:
    """All that was measured, ranked anew in groups of one tokenizer and scale, whichever run read it.

    Two tokenizers are one where every token compared is the same piece at the same row.
    """
    rows: dict[int, tuple[object, ...]] = {}
    first: dict[tuple[object, ...], Reading] = {}
    of_family: dict[str, tuple[object, ...]] = {}
    pairs = []
    for one in (seen.measured for seen in found if seen.measured is not None):
        resolution, family = one.resolution, one.target.family
        own = rows.setdefault(
            id(resolution), tuple((t.piece, t.id) for t in (*resolution.domain, *resolution.reference))
        )
        if family is not None and of_family.setdefault(family, own) != own:
            # Other rows than its family's: a group of its tokenizer.
            one = replace(one, target=replace(one.target, family=None))
        pairs.append((one, first.setdefault(own, one)))
    return groups.ranked(pairs, metric)


def group_rows(found: Sequence[Screened], metric: Metric) -> list[dict[str, Any]]:
    """Ranked checkpoints as rows of a table."""
    return [
        {
            "checkpoint": c.label,
            "revision": c.revision,
            "group": f"{c.family} · {c.scale}",
            "rank": c.rank,
            "tied_with": " ".join(map(str, c.tied_with)),
            "G": c.gaps[metric].mean,
            "se": c.gaps[metric].se,
        }
        for c in found
    ]


def history(connection: duckdb.DuckDBPyConnection, repo: str) -> list[dict[str, Any]]:
    """All that was seen of a repository or folder, the latest first; runs that found the same are one row.

    A repository is found by a name that it had, too, if it was asked for by it.
    """
    tables = connection.execute("SELECT table_name FROM information_schema.tables").fetchall()
    if ("names",) in tables:  # not where a registry of before may only be read
        now = connection.execute("SELECT identity FROM names WHERE asked = 'hf://' || ?", [repo]).fetchone()
        repo = now[0] if now else repo
    rows = connection.execute(
        "SELECT s.requested, s.file, s.state, u.domain, u.reference, min(s.stamp), max(s.stamp), count(*), "
        "any_value(r.gap_cosine), any_value(r.gap_cosine_se), any_value(r.gap_euclidean), "
        "any_value(r.gap_euclidean_se), any_value(r.tensor), any_value(r.dtype), s.error, max(s.message) "
        "FROM seen s LEFT JOIN results r ON s.error IS NULL AND r.identity = s.identity "
        "AND r.file = s.file AND r.state = s.state AND r.tokens = s.tokens AND r.method = s.method "
        "LEFT JOIN runs u ON u.run = s.run "
        "WHERE s.identity = ? OR s.identity = 'hf://' || ? OR s.identity = 'file://' || ? "
        "GROUP BY ALL ORDER BY max(s.stamp) DESC",
        [repo, repo, repo],
    ).fetchall()
    names = (
        *("requested", "file", "state", "domain", "reference", "first", "last", "runs", "cosine"),
        *("cosine_se", "euclidean", "euclidean_se", "tensor", "dtype", "error", "message"),
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def since_time(connection: duckdb.DuckDBPyConnection, since: str) -> str:
    """The time that ``--since`` names: the start of a run, or a date or time as DuckDB reads it (UTC).

    Raises:
        UsageError: It is neither.
    """
    import duckdb

    rows = connection.execute("SELECT CAST(started AS VARCHAR) FROM runs WHERE run = ?", [since]).fetchall()
    if rows:
        return str(rows[0][0])
    try:
        (found,) = connection.execute("SELECT CAST(CAST(? AS TIMESTAMP) AS VARCHAR)", [since]).fetchall()
    except duckdb.Error as error:
        raise UsageError(
            f"expected --since as a date, a time or a run of the registry, got {since!r}; "
            '`dispersion registry query STORE "SELECT * FROM runs"` lists the runs'
        ) from error
    return str(found[0])


@dataclass(frozen=True)
class Moved:
    """One thing that is not as it was.

    Attributes:
        what: ``new``, ``changed`` (another commit), ``vanished``, ``failed``, ``recovered`` or ``leader``.
        label: The checkpoint.
        text: In words.
        gain: G now minus G then, of one whose commit changed; None for others.
        se: Its paired error.
        apart: Whether that difference is more than chance of the tokens at 5 %, all changed ones counted.
    """

    what: str
    label: str
    text: str
    gain: float | None = None
    se: float | None = None
    apart: bool | None = None


def moved(connection: duckdb.DuckDBPyConnection, tokens: str, since: str, metric: Metric) -> list[Moved]:
    """What is not as it was at a time: new, changed, failed and vanished checkpoints, and new leaders."""
    then = {_place(one): one for one in stored(connection, tokens, until=since)}
    now = {_place(one): one for one in stored(connection, tokens)}
    found: list[Moved] = []
    changes: list[tuple[str, Reading, Reading]] = []
    for place, one in now.items():
        old, called = then.get(place), _label(one)
        if old is None:
            what = "new" if one.measured is not None else "failed"
            found.append(Moved(what, called, one.message if one.error else "first seen"))
        elif one.error and one.error != old.error:
            what = "vanished" if one.error in _GONE and old.measured is not None else "failed"
            found.append(Moved(what, called, f"{one.error}: {one.message}"))
        elif old.error and one.measured is not None:
            found.append(Moved("recovered", called, f"was {old.error}"))
        elif one.measured is not None and old.measured is not None and one.state != old.state:
            changes.append((called, old.measured, one.measured))
    for called, before, after in changes:
        if before.resolution != after.resolution:
            found.append(Moved("changed", called, "its tokenizer changed too: not compared"))
            continue
        change = difference(after.gaps[metric], before.gaps[metric])
        apart = change.p < 0.05 / len(changes)
        commits = f"{(before.revision or 'before')[:8]} → {(after.revision or 'now')[:8]}"
        found.append(Moved("changed", called, commits, change.mean, change.se, apart))
    return [*found, *_leaders(list(then.values()), list(now.values()), metric)]


def _leaders(then: Sequence[Seen], now: Sequence[Seen], metric: Metric) -> list[Moved]:
    """Groups whose best is another one; said to be apart only where the new one is not tied with the old."""
    old = {(c.family, c.scale): c.label for c in ranked(then, metric) if c.rank == 1}
    found = []
    by_group: dict[tuple[str, str], list[Screened]] = {}
    for c in ranked(now, metric):
        by_group.setdefault((c.family, c.scale), []).append(c)
    for key, members in by_group.items():
        best, before = members[0], old.get(key)
        if before is None or any(c.label == before for c in members if c.rank == 1):
            continue
        former = next((c for c in members if c.label == before), None)
        if former is None:
            text = f"best of {key[0]} · {key[1]}, where {before} was, which is gone"
            found.append(Moved("leader", best.label, text))
            continue
        apart = not best.tied_to(former.rank)
        text = f"best of {key[0]} · {key[1]}, where {before} was" + ("" if apart else "; the two are tied")
        change = difference(best.gaps[metric], former.gaps[metric])
        found.append(Moved("leader", best.label, text, change.mean, change.se, apart))
    return found


def _place(seen: Seen) -> tuple[str, str, str]:
    return seen.identity, seen.requested, seen.file


def _label(seen: Seen) -> str:
    name = seen.identity.removeprefix("hf://").removeprefix("file://")
    name = f"{name}@{seen.requested}" if seen.requested else name
    return f"{name}:{seen.file}" if seen.file else name
