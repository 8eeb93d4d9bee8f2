"""A registry's news: changes since a time, and the checkpoints among them worth an evaluation.

Weights are announced once: a checkpoint's state that was measured before that time is not news when it is
seen again. New states are compared with the best of their group *at that time*, by its stored figures, even
if that has changed since, was deleted or could not be reached.
"""

from __future__ import annotations

import datetime
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.report.declared import count, some
from lmeval_screener.chance import Own
from lmeval_screener.errors import GONE
from lmeval_screener.figures import numbers_of
from lmeval_screener.orders import UNSAID, Order
from lmeval_screener.registry.database import NIGHTLY, Seen, last_seen, plain_name
from lmeval_screener.registry.queries import bases_among, excerpt, is_gone, ranked_rows
from lmeval_screener.registry.states import CAUSES, RENAMED, cause_of
from lmeval_screener.result.answer import base_sentences, unknown
from lmeval_screener.result.gate import Gate
from lmeval_screener.screened import Failed, Group, Reading, Screened, grouped
from lmeval_screener.weights.copies import originals

_CHANCE = "to be above the former best, as on our own models or by --slope"
_WORTH = 0.5  # chance to be above the former best from which a checkpoint is worth an evaluation
_KINDS = ("new", "changed", "recovered", "copy", "renamed", "gone", "failed")
_SIDES = {"level": "level with its base", "equal": "the rows of its base"}


@dataclass(frozen=True)
class Move:
    """One checkpoint that changed.

    Attributes:
        what: ``new``, ``changed``, ``recovered``, ``copy`` (new, of a known one), ``renamed``, ``gone`` or
            ``failed``.
        checkpoint: Its label.
        group: Title of its group; None without figures.
        rank: Rank among the group's in the registry; None for the base, for its rows, and without figures.
        G: Its gap; None without figures.
        ratio: Its ratio; None if it has none.
        chance: Chance that it is more accurate than the group's former best; None where unknown.
        standing: ``above`` the former best: by more than rounding, at a chance of 50 % or more, or unknown;
            ``below`` it; ``level``: within rounding, or no order; ``first`` of its group; ``copy`` of a
            known one; ``equal``: another's rows. None for a base, if announced before, or without figures.
        text: The change in words.
        name: The checkpoint's name for commands; empty if it is gone or failed.
        error: Code of its failure, or ``Gone``; else empty.
        message: The failure in a sentence; else empty.
    """

    what: Annotated[str, Col("What")]
    checkpoint: Annotated[str, Col("Checkpoint")]
    group: Annotated[str | None, Col("Group", drop=4)] = None
    rank: Annotated[int | None, Col("Rank", "d", short="#", drop=2)] = None
    ratio: Annotated[float | None, Col("Ratio", ".3f", drop=3)] = None
    G: Annotated[float | None, Col("G", ".3f", drop=3)] = None
    chance: Annotated[float | None, Col("Chance", ".0%", hint=_CHANCE, drop=1)] = None
    standing: Literal["above", "level", "below", "first", "equal", "copy"] | None = None
    text: Annotated[str, Col("How")] = ""
    name: str = ""
    error: str = ""
    message: str = ""

    @property
    def is_worth(self) -> bool:
        """Whether it is worth an evaluation: above the former best, or the best of a new group."""
        return self.standing == "above" or (self.standing == "first" and self.rank == 1)


@dataclass(frozen=True, repr=False)
class News(Report):
    """Changes in a registry since a time: the answer of ``--since`` and of ``registry diff``.

    Attributes:
        since: The time (UTC), as ``2026-11-23 02:17:00.000000``; empty for the beginning.
        moves: What changed, by kind (in the order of ``Move.what``), group and rank.
        touched: Checkpoints whose files were written again with the same figures.
        kept: Label -> ``DAY, ERROR``, for checkpoints that could not be read and rank by figures of DAY.
        unknown: Sentences on new or changed checkpoints without a ratio, with the reason.
        failing: Label -> ``ERROR, since DAY``, for checkpoints that failed before and fail still.
        against_base: Sentences on new or changed checkpoints' side of their base; on all if it changed.
        gate: The answer of ``--fail-if-below``; None without that option.
        until: The end of an earlier announcement (UTC); empty for news until now.
    """

    template: ClassVar[str] = "news.jinja"
    schema: ClassVar[str] = "dispersion-registry/1"
    guide: ClassVar[str] = "docs/reference/registry.md"
    each: ClassVar[str] = "moves"

    since: str
    moves: tuple[Move, ...]
    touched: int
    kept: Mapping[str, str]
    unknown: Sequence[str] = ()
    failing: Mapping[str, str] = field(default_factory=dict)
    against_base: Sequence[str] = ()
    gate: Gate | None = None
    until: str = ""

    @property
    def status(self) -> int:
        """The exit status for failures: 3 if a checkpoint began to fail, else 0."""
        kinds = {move.what for move in self.moves}
        return max((cause.status for cause in CAUSES if cause.what in kinds), default=0)

    @property
    def worth(self) -> tuple[str, ...]:
        """Names for commands of the checkpoints worth an evaluation, in the order of ``moves``."""
        return tuple(move.name for move in self.moves if move.is_worth)

    def tables(self) -> Mapping[str, Table]:
        """One table: the changed checkpoints."""
        places = excerpt([move.what for move in self.moves])
        return {"moved": Table.of(self.moves, "Changes", name="moved", excerpt=places)}

    def context(self) -> Mapping[str, Any]:
        """Template values: ``sentences``, and ``reasons``: error code -> its first message."""
        reasons = {move.error: move.message for move in reversed(self.moves) if move.message}
        return {"sentences": self._sentences(), "reasons": reasons}

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract ``dispersion-registry/1`` as plain Python values: ``moves`` are its ``rows``."""
        content = super().to_dict()
        del content["gate"]
        if self.gate is not None:
            content["gate"] = self.gate.to_dict()
        return content | {"rows": content.pop("moves"), "worth": list(self.worth)}

    def _sentences(self) -> list[str]:
        compared = [move for move in self.moves if move.standing is not None]
        groups = {
            "Worth evaluating, above the former best": [
                m for m in compared if m.standing == "above"
            ],
            "First of a new group": [m for m in compared if m.standing == "first" and m.rank == 1],
            "Not apart from the former best by its rows": [
                m for m in compared if m.standing == "level"
            ],
        }
        said = [f"{words}: {_names(chosen)}." for words, chosen in groups.items() if chosen]
        copies = [
            f"{move.checkpoint} is {move.text}" for move in compared if move.standing == "copy"
        ]
        if not said and any(move.standing in ("below", "first") for move in compared):
            said = ["No new or changed checkpoint is above the former best."]
        if equal := [move.checkpoint for move in compared if move.standing == "equal"]:
            said.append(
                f"Output rows equal to another's: {some(equal)}; ask both: dispersion race."
            )
        said += [f"Not news, by the rows read: {some(copies)}."] if copies else []
        said += [*self.against_base, *self.unknown]
        begun: dict[str, list[str]] = {cause.first: [] for cause in CAUSES}
        lasting: dict[str, list[str]] = {cause.later: [] for cause in CAUSES}
        for move in self.moves:
            label, is_known = move.checkpoint, move.checkpoint in self.kept
            cause = cause_of(move.error, was_read=is_known) if move.what != "renamed" else RENAMED
            how = {"gone": "", "renamed": move.text}.get(
                move.what, self.kept.get(label, move.error)
            )
            begun[cause.first].append(f"{label} ({how})" if how else label)
        for label, how in self.failing.items():
            lasting[cause_of(how.partition(",")[0]).later].append(f"{label} ({how})")
        kinds = Counter(move.what for move in self.moves)
        counts = [f"{number} {kind}" for kind, number in kinds.items() if kind != "copy"]
        counts += [count(kinds["copy"], "copy", "copies")] if kinds["copy"] else []
        counts += [f"{self.touched} touched, same figures"] if self.touched else []
        since = f"Since {self.since[:16]} UTC" if self.since else "Since the registry began"
        if self.until:
            since += f", until {self.until[:16]} UTC"
        said += [words.format(some(names)) for words, names in begun.items() if names]
        still = [words.format(some(names)) for words, names in lasting.items() if names]
        return [*said, f"{since}: {', '.join(counts) or 'no changes'}.", *still]


def _names(moves: Sequence[Move]) -> str:
    def called(move: Move) -> str:
        changed = f", {move.what}" if move.what in ("changed", "recovered") else ""
        return f"{move.checkpoint} (rank {move.rank}{changed})"

    return some([called(move) for move in moves])


def since_time(connection: sqlite3.Connection, since: str, tokens: str) -> str:
    """The time that ``--since`` names, in UTC; empty for the beginning.

    ``last`` is the end of the last run that gave its answer to ``last`` or ``yesterday``; before the first
    such run, the end of the last finished run. ``yesterday`` is the same for runs that began before today
    (UTC). Without any run under ``tokens``, both are empty: the beginning. Any other text is the name of a
    run, which means its end, or a date or time (UTC), else a UsageError.
    """
    if since in NIGHTLY:
        today = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
        (announced, ended) = connection.execute(
            "SELECT max(nullif(announced, '')), "
            "max(CASE WHEN announced IS NULL THEN ended END) FROM runs WHERE tokens = ? AND started < ?",
            [tokens, "9" if since == "last" else today],
        ).fetchone()
        return str(announced or ended or "")
    row = connection.execute(
        "SELECT coalesce(ended, (SELECT max(last) FROM seen WHERE run = runs.run), started) FROM runs "
        "WHERE run = ?",
        [since],
    ).fetchone()
    if row is not None:
        return str(row[0])
    try:
        time = datetime.datetime.fromisoformat(since.replace("Z", "+00:00"))
    except ValueError as error:
        raise UsageError(
            f"expected last, yesterday, a date, a time or a run of the registry, got {since!r}; "
            '`dispersion registry query FILE "SELECT * FROM runs"` lists the runs',
            argument="since",
        ) from error
    if time.tzinfo is not None:
        time = time.astimezone(datetime.timezone.utc)
    return f"{time:%Y-%m-%d %H:%M:%S.%f}"


def last_announced(connection: sqlite3.Connection, tokens: str) -> tuple[str, str]:
    """Start and end (UTC) of the last announcement that had changes; if none was made, of the last run's.

    An answer *no changes* hides no earlier one. Both are empty without a finished run.
    """
    column = "announced"
    (last,) = connection.execute(
        "SELECT max(nullif(announced, '')) FROM runs WHERE tokens = ?", [tokens]
    ).fetchone()
    if last is None:
        column = "ended"
        (last,) = connection.execute(
            "SELECT max(ended) FROM runs WHERE tokens = ?", [tokens]
        ).fetchone()
    if last is None:
        return "", ""
    (changed,) = connection.execute(
        "SELECT max(stamp) FROM (SELECT max(first) AS stamp FROM seen WHERE tokens = ? AND first <= ? "
        "UNION ALL SELECT max(renamed) FROM names WHERE renamed <= ?)",
        [tokens, last, last],
    ).fetchone()
    end, start = connection.execute(
        f"SELECT {column}, since FROM runs WHERE tokens = ? AND {column} <> '' AND {column} >= ? "
        f"ORDER BY {column}",
        [tokens, changed or last],
    ).fetchone()
    if start is None or start > end:
        # An earlier version did not keep it, or the times were edited: it is that of --since last.
        announced, ended = connection.execute(
            "SELECT max(nullif(announced, '')), max(CASE WHEN announced IS NULL THEN ended END) FROM runs "
            "WHERE tokens = ? AND ended < ?",
            [tokens, end],
        ).fetchone()
        start = announced or ended or ""
    return str(start), str(end)


def news(
    connection: sqlite3.Connection,
    tokens: str,
    since: str,
    order: Order = UNSAID,
    base: str | None = None,
    *,
    until: str = "9",
    others: Sequence[Failed] = (),
    own: Own | None = None,
) -> News:
    """Changes between two times under one pair of token sets, ranked among the whole registry.

    Times are those of :func:`since_time`, ``until`` by default now. ``base``, which the others were trained
    from, is never worth an evaluation; raises as `bases_among`. ``others`` are failures that the registry
    does not hold; ``own`` is the slope of the user's own results.
    """
    now = {_place(seen): seen for seen in last_seen(connection, tokens, until=until)}
    then = {}
    for seen in last_seen(connection, tokens, until=since):
        then[_place(seen)] = seen.called(now[_place(seen)].target)
    announced = _announced_states(connection, tokens, since)
    live = {place: seen for place, seen in now.items() if seen.reading and not is_gone(seen)}
    changes = _changes(now, then, since, {state[:3] for state in announced})
    bases = bases_among(connection, tokens, list(live.values()), base)
    in_order = partial(ranked_rows, order=order, bases=bases)
    in_rank = in_order(list(live.values()))
    groups = grouped(in_rank, own)
    ranks = {id(c.gaps): (c, group) for group in groups for c in group.checkpoints}
    origins = [place for place, seen in live.items() if ranks[seen.key][0].is_base]
    arrived = changes.arrived
    fresh = []
    for place in arrived:
        if place not in origins and (*place, now[place].state) not in announced:
            fresh.append(place)
    standings = _standings(fresh, live, then, in_rank, in_order, origins, own)

    moves = [
        Move("failed", f.label, text=f.error, error=f.error, message=f.message) for f in others
    ]
    moves += _renamed(connection, now, since, until)
    # A rename is one move, not two.
    renamed = {
        now[standing.of].target.label
        for place, standing in standings.items()
        if standing.of and arrived[place] == "new"
    }
    moves += [m for m in changes.moves if m.what != "gone" or m.checkpoint not in renamed]
    for place, what in arrived.items():
        former = then[place].reading if what == "changed" else None
        moves.append(_arrival(what, *ranks[live[place].key], standings.get(place), former))
    moves.sort(key=lambda move: (_KINDS.index(move.what), move.group or "", move.rank or 0))

    arrivals = [ranks[live[place].key][0] for place in arrived]
    alone = max((len(group.checkpoints) for group in groups), default=0) < 2
    changed = {ranks[live[place].key][0] for place in origins if arrived.get(place) == "changed"}
    new = {
        ranks[live[place].key][0]
        for place in arrived
        if place not in standings or standings[place].word != "copy"
    }
    sides = [sentence for group in groups for sentence in _against_base(group, new, changed)]
    return News(
        since,
        tuple(moves),
        changes.touched,
        changes.kept,
        unknown(arrivals, alone=alone),
        changes.failing,
        sides,
    )


def _announced_states(
    connection: sqlite3.Connection, tokens: str, since: str
) -> set[tuple[str, str, str, str]]:
    """Identity, revision, file and state of all that was measured by ``since``."""
    rows = connection.execute(
        "SELECT identity, requested, file, state FROM seen "
        "WHERE tokens = ? AND first <= ? AND error IS NULL",
        [tokens, since],
    )
    return {(row[0], row[1], row[2], row[3]) for row in rows}


@dataclass
class _Changes:
    """What became of the checkpoints of a registry, before their figures are compared.

    Attributes:
        moves: Those that are gone or failed.
        arrived: Place -> ``new``, ``changed`` or ``recovered``: measured in a state that was not known.
        touched: Number of those written again with the same figures.
        kept: Label -> day and error of those ranked by older figures.
        failing: Label -> error and day of those that failed before and fail still.
    """

    moves: list[Move] = field(default_factory=list)
    arrived: dict[_Place, str] = field(default_factory=dict)
    touched: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)


def _changes(
    now: Mapping[_Place, Seen],
    then: Mapping[_Place, Seen],
    since: str,
    read: Set[_Place],
) -> _Changes:
    """Compare two states of a registry; ``read`` are the places that were measured by ``since``."""
    changes = _Changes()
    for place, seen in now.items():
        label = seen.target.label
        old = then.get(place)
        was_read = old is not None and old.reading is not None
        if seen.as_of:
            changes.kept[label] = f"{seen.as_of}, {seen.error}"
        if is_gone(seen):
            if was_read:
                text = seen.message or "the folder does not exist any more"
                changes.moves.append(Move("gone", label, text=text, error=GONE))
            continue
        if seen.error and not _failed_before(seen, old):
            figures = f", ranked by its figures of {seen.as_of}" if seen.as_of else ""
            text = seen.error + figures
            changes.moves.append(
                Move("failed", label, text=text, error=seen.error, message=seen.message)
            )
        elif seen.error and seen.looked > since:
            changes.failing[label] = f"{seen.error}, since {seen.since}"
        if seen.reading is None:
            continue
        if old is None or not was_read:
            changes.arrived[place] = "recovered" if place in read else "new"
        elif seen.state != old.state:
            if _same_figures(old, seen):
                changes.touched += 1
            else:
                changes.arrived[place] = "changed"
    return changes


def _arrival(
    what: str, c: Screened, group: Group, standing: _Standing | None, former: Reading | None
) -> Move:
    """The move of a measured checkpoint; ``former`` are its figures before it changed."""
    if standing is None:
        standing = _Standing(None, "the base" if c.is_base else "as it was announced before")
    words = [standing.text]
    rank = c.rank if group.has_place(c) else None
    if standing.word == "first" and rank != 1:
        words = ["in a new group"]
    if c.against and standing.word not in ("copy", "equal"):
        words.append(_SIDES.get(c.against.side, f"{c.against.side} its base"))
    if former is not None:
        words.append(_figure_before(former, c, group))
    if what == "new" and standing.word == "copy":
        what = "copy"
    return Move(
        what,
        c.label,
        group.title,
        rank=rank,
        G=c.gap.mean,
        ratio=None if c.ratio is None else c.ratio.mean,
        chance=standing.chance,
        standing=standing.word,
        text="; ".join(filter(None, words)),
        name=c.name,
    )


def _figure_before(former: Reading, c: Screened, group: Group) -> str:
    """The figure that ranks the group, as it was."""
    if former.ratio is not None and group.figure == "ratio":
        return f"was ratio {former.ratio.mean:.3f}"
    return f"was G {former.gaps[c.metric].mean:.3f}"


def _failed_before(seen: Seen, old: Seen | None) -> bool:
    """Whether a failure is not news: the error is that of before, or the state is as unknown as before."""
    if old is None or not old.error:
        return False
    state = cause_of(seen.error).state
    return seen.error == old.error or state == cause_of(old.error).state == "unknown"


def _renamed(
    connection: sqlite3.Connection, now: Mapping[_Place, Seen], since: str, until: str
) -> Iterator[Move]:
    """Checkpoints that go on under a new name."""
    places = {place[0]: seen for place, seen in now.items()}
    renamed = (
        "SELECT asked, identity FROM names WHERE renamed > ? AND renamed <= ? ORDER BY renamed"
    )
    for asked, identity in connection.execute(renamed, [since, until]):
        if identity in places:
            label = places[identity].target.label
            yield Move(
                "renamed", label, text=f"before: {plain_name(asked)}", name=plain_name(identity)
            )


def _against_base(group: Group, arrivals: Set[Screened], changed: Set[Screened]) -> list[str]:
    """The side of their base on which new checkpoints of a group lie; of all if the base changed."""
    if group.base is None or group.base not in changed:
        return base_sentences(group, [c for c in group.candidates if c in arrivals])
    again = f"The base {group.names[group.base]} changed: all are compared with it again."
    return [again, *base_sentences(group)]


_Place = tuple[str, str, str]


def _place(seen: Seen) -> _Place:
    return seen.identity, seen.target.revision or "", seen.target.file or ""


def _same_figures(old: Seen, new: Seen) -> bool:
    """Whether both have the same figures, except for last digits that differ between machines."""
    if old.reading is None or new.reading is None:
        return False
    a, b = (
        numbers_of(r.gaps, r.ratio and replace(r.ratio, shares=np.zeros(0), marks=np.zeros(0)))
        for r in (old.reading, new.reading)
    )
    return a.shape == b.shape and np.allclose(a, b, 1e-9, 1e-12, equal_nan=True)


class _Standing(NamedTuple):
    """A checkpoint compared with the former best of its group."""

    word: Literal["above", "level", "below", "first", "equal", "copy"] | None
    text: str
    chance: float | None = None
    of: _Place | None = None  # its original, if it is a copy


def _standings(
    fresh: Sequence[_Place],
    live: Mapping[_Place, Seen],
    then: Mapping[_Place, Seen],
    in_rank: Sequence[Screened],
    in_order: Callable[[Sequence[Seen]], list[Screened]],
    bases: Sequence[_Place],
    own: Own | None,
) -> dict[_Place, _Standing]:
    """Compare each fresh checkpoint with the best of its group at that time."""
    if not fresh:
        return {}
    # Former states of changed or deleted checkpoints are ranked together with the present ones.
    former = {place: seen for place, seen in then.items() if seen.reading}
    as_now = {
        place for place, old in former.items() if place in live and _same_figures(old, live[place])
    }
    selves = [seen for place, seen in former.items() if place not in as_now]
    everyone = in_order([*live.values(), *selves]) if selves else in_rank
    standing = {
        id(c.gaps): (c, group) for group in grouped(everyone, own) for c in group.checkpoints
    }
    best: dict[str, tuple[_Place, Screened]] = {}
    for place, old in former.items():
        c, group = standing[(live[place] if place in as_now else old).key]
        if c.is_base or c.is_set_aside:
            continue
        if group.name not in best or c.rank < best[group.name][1].rank:
            best[group.name] = place, c
    copied = _originals(everyone)
    # The base is the original; else, of two known ones, one that still exists.
    known = {copied[seen.key]: place for place, seen in former.items() if place not in as_now}
    known |= {copied[live[place].key]: place for place in (*as_now, *bases)}
    standings: dict[_Place, _Standing] = {}
    for place in fresh:
        if (of := known.get(copied[live[place].key])) is not None:
            called = (live.get(of) or then[of]).target.label + (
                "" if of in live else ", which is gone"
            )
            called = "its former self" if of == place else called
            standings[place] = _Standing("copy", f"a copy of {called}", of=of)
            continue
        c, group = standing[live[place].key]
        alike = group.by_rows.get(c.same_rows, []) if c.same_rows is not None else []
        if len(alike) > 1:
            other = alike[alike[0] is c].label
            standings[place] = _Standing("equal", f"output rows equal to those of {other}")
            continue
        if c.is_set_aside:
            standings[place] = _Standing(None, "set aside, without a ratio to rank by")
            continue
        if group.name not in best:
            standings[place] = _Standing("first", "first of its group")
            continue
        origin, champion = best[group.name]
        called = champion.label
        if origin not in as_now:
            called += " as it was" if origin in live else " (gone)"
        word = _word(group, c, champion)
        words = "not apart from" if word == "level" else word
        text = f"{words} the former best, {'its former self' if place == origin else called}"
        standings[place] = _Standing(word, text, group.chance(c, champion))
    return standings


def _word(group: Group, c: Screened, champion: Screened) -> Literal["above", "level", "below"]:
    """A checkpoint's side of a former best: by rank; ``level`` within rounding, or without an order."""
    high, low = (c, champion) if c.rank < champion.rank else (champion, c)
    by_rounding = (
        high.ratio is not None and low.ratio is not None and not high.ratio.above(low.ratio)
    )
    if group.is_noise or high.rank == low.rank or (group.figure == "ratio" and by_rounding):
        return "level"
    return "above" if high is c and (group.chance(c, champion) or 1.0) >= _WORTH else "below"


def _originals(everyone: Sequence[Screened]) -> dict[int, tuple[int, int]]:
    """Figures' id -> group and place of its original, or its own: two states may share a label."""
    return {
        id(c.gaps): (number, place if original.copied is None else original.copied)
        for number, group in enumerate(grouped(everyone))
        for place, (c, original) in enumerate(
            zip(group.checkpoints, originals(group.checkpoints), strict=True)
        )
    }
