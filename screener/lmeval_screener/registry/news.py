"""A registry's news: changes since a time, and the checkpoints among them worth an evaluation.

Weights are announced once: a checkpoint's state that was measured before that time is not news when it is
seen again. New states are compared with the best of their group *at that time*, by its stored figures, even
if that has changed since, was deleted or could not be reached.
"""

from __future__ import annotations

import datetime
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np

from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.geometry import Array
from lmeval_dispersion.report import Col, Report, Table
from lmeval_dispersion.report.declared import some
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

_CHANCE = (
    "of being more accurate than the former best, as measured on our own models or by `--slope`"
)
_WORTH = 0.5  # chance to be above the former best from which a checkpoint is worth an evaluation
_KINDS = ("new", "changed", "recovered", "copy", "renamed", "gone", "failed")
_SIDES = {"level": "level with its base", "equal": "the rows of its base"}


@dataclass(frozen=True)
class Move:
    """One change of a checkpoint.

    Attributes:
        what: Kind of the change: ``new``, ``changed``, ``recovered``, ``copy`` (new, but a copy of
            a known checkpoint), ``renamed``, ``gone`` or ``failed``.
        checkpoint: Label of the checkpoint.
        group: Title of its group; None without figures.
        rank: Rank among all checkpoints of the group in the registry; None for the base, for
            checkpoints with the base's rows or without the figure that ranks the group, and for
            checkpoints without any figures.
        G: The gap G of the checkpoint (see `lmeval_screener.figures`); None without figures.
        ratio: The ratio of the checkpoint (see there, too); None if unknown.
        chance: Chance that the checkpoint is more accurate than the former best of its group; None
            if unknown.
        standing: How the checkpoint compares with the former best of its group: ``above``, by more
            than rounding and with a chance of at least 50 % or an unknown one; ``below``;
            ``level``, within rounding or if the group has no clear order; ``first`` of a new group;
            ``copy`` of a known checkpoint; ``equal``, with the output rows of another checkpoint.
            None for a base, for checkpoints without the figure that ranks the group or with weights
            that were announced before, and for checkpoints without any figures.
        text: The change in words.
        name: The checkpoint's name for commands; empty if the checkpoint is gone or failed.
        error: Code of the failure, ``Gone`` for a deleted checkpoint; empty if it did not fail.
        message: The failure in a sentence; empty if the checkpoint did not fail, or was deleted.
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
        """Whether the checkpoint is worth an evaluation.

        This is so if the checkpoint is above the former best of its group, or the best of a new
        group.
        """
        return self.standing == "above" or (self.standing == "first" and self.rank == 1)


@dataclass(frozen=True, repr=False)
class News(Report):
    """Changes in a registry since a time: the answer of ``--since`` and of ``registry diff``.

    Attributes:
        since: Start of the period (UTC), such as ``2026-11-23 02:17:00.000000``; empty for the
            registry's beginning.
        moves: The changes, sorted by kind (in the order of ``Move.what``), group and rank.
        touched: Number of checkpoints whose files were written again with the same figures.
        kept: Label -> ``DAY, ERROR`` for checkpoints that cannot be read now and are ranked by the
            figures of that day.
        unknown: Sentences on new or changed checkpoints without a ratio, with the reason.
        failing: Label -> ``ERROR, since DAY`` for checkpoints that failed before and still fail.
        against_base: Sentences that compare new or changed checkpoints with their base; all
            checkpoints if the base itself has changed.
        gate: The outcome of ``--fail-if-below``; None without that option.
        until: End of the period (UTC) if earlier news is shown once more; empty if the period runs
            until now.
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
        """Exit status for failures: 3 if a checkpoint has begun to fail, else 0."""
        kinds = {move.what for move in self.moves}
        return max((cause.status for cause in CAUSES if cause.what in kinds), default=0)

    @property
    def worth(self) -> tuple[str, ...]:
        """Names of the checkpoints worth an evaluation, as commands take them."""
        return tuple(move.name for move in self.moves if move.is_worth)

    def tables(self) -> Mapping[str, Table]:
        """Return one table, ``moved``, with the changed checkpoints."""
        places = excerpt([move.what for move in self.moves])
        return {"moved": Table.of(self.moves, "Changes", name="moved", excerpt=places)}

    def context(self) -> Mapping[str, Any]:
        """Return the template's values.

        ``sentences`` is the answer; ``reasons`` maps each error code to the message of the first
        change with this code.
        """
        reasons = {move.error: move.message for move in reversed(self.moves) if move.message}
        return {"sentences": self._sentences(), "reasons": reasons}

    def to_dict(self) -> dict[str, Any]:
        """Return the news as plain Python values, in the layout of ``dispersion-registry/1``.

        The key ``rows`` has the ``moves``; ``worth`` has the names of the checkpoints worth an
        evaluation. Without ``--fail-if-below`` the key ``gate`` is left out.
        """
        content = super().to_dict()
        del content["gate"]
        if self.gate is not None:
            content["gate"] = self.gate.to_dict()
        return content | {"rows": content.pop("moves"), "worth": list(self.worth)}

    def _sentences(self) -> list[str]:
        by_standing: defaultdict[str | None, list[Move]] = defaultdict(list)
        for move in self.moves:
            by_standing[move.standing].append(move)
        groups = {
            "Worth evaluating, above the former best": by_standing["above"],
            "First of a new group": [move for move in by_standing["first"] if move.rank == 1],
            "Not distinguishable from the former best by output rows": by_standing["level"],
        }
        sentences = [f"{words}: {_names(moves)}." for words, moves in groups.items() if moves]
        if not sentences and (by_standing["below"] or by_standing["first"]):
            sentences.append("No new or changed checkpoint is above the former best of its group.")
        equal = []
        for move in by_standing["equal"]:
            rows, _, _ = move.text.partition("; ")
            equal.append(f"{move.checkpoint} has {rows}")
        if equal:
            sentences.append(
                f"{some(equal)}; to see which is better, ask both checkpoints of a pair the same "
                "questions with `dispersion race`."
            )
        copies = [f"{move.checkpoint} is {move.text}" for move in by_standing["copy"]]
        if copies:
            sentences.append(f"Not news, judging by the rows that were read: {some(copies)}.")
        begun, lasting = self._failures()
        return [
            *sentences,
            *self.against_base,
            *self.unknown,
            *begun,
            f"{self._time()}: {self._counts() or 'no changes'}.",
            *lasting,
        ]

    def _failures(self) -> tuple[list[str], list[str]]:
        """Sentences on checkpoints that failed, are gone or renamed: for the first time, and still."""
        begun: dict[str, list[str]] = {cause.first: [] for cause in CAUSES}
        lasting: dict[str, list[str]] = {cause.later: [] for cause in CAUSES}
        for move in self.moves:
            label = move.checkpoint
            if move.what == "renamed":
                begun[RENAMED.first].append(f"{label} ({move.text})")
            elif move.error:
                cause = cause_of(move.error, was_read=label in self.kept)
                if move.what == "failed":
                    label = f"{label} ({self.kept.get(label, move.error)})"
                begun[cause.first].append(label)
        for label, reason in self.failing.items():
            lasting[cause_of(reason.partition(",")[0]).later].append(f"{label} ({reason})")
        return _filled(begun), _filled(lasting)

    def _time(self) -> str:
        words = "Since the registry began"
        if self.since:
            words = f"Since {self.since[:16]} UTC"
        if self.until:
            words += f", until {self.until[:16]} UTC"
        return words

    def _counts(self) -> str:
        """The numbers of changes by kind; empty for none."""
        kinds = Counter(move.what for move in self.moves)
        copies = kinds.pop("copy", 0)
        counts = [f"{number} {kind}" for kind, number in kinds.items()]
        if copies:
            counts.append(count(copies, "copy", "copies"))
        if self.touched:
            counts.append(f"{self.touched} written again with the same figures")
        return ", ".join(counts)


def _filled(names_by_words: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences: words with their names in place of ``{}``, where there are any."""
    return [words.format(some(names)) for words, names in names_by_words.items() if names]


def _names(moves: Sequence[Move]) -> str:
    names = []
    for move in moves:
        changed = f", {move.what}" if move.what in ("changed", "recovered") else ""
        names.append(f"{move.checkpoint} (rank {move.rank}{changed})")
    return some(names)


def since_time(connection: sqlite3.Connection, since: str, tokens: str) -> str:
    """Return the time that ``--since`` names, in UTC; empty for the beginning of the registry.

    ``last`` is the end of the last run that announced its news for ``last`` or ``yesterday``;
    before the first such run, the end of the last finished run. ``yesterday`` is the same, but only
    runs that began before today (UTC) count. The name of a run means the end of that run. Anything
    else must be a date or a time; without a time zone it is UTC.

    Args:
        connection: The registry.
        since: The text of ``--since``.
        tokens: Key of the pair of token sets whose runs count for ``last`` and ``yesterday``.

    Raises:
        UsageError: ``since`` is neither of these words, nor a run, a date or a time.
    """
    if since in NIGHTLY:
        today = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
        before = today if since == "yesterday" else "9"
        return _last_answer(connection, tokens, "started", before)
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
            f"expected last, yesterday, a date, a time or the name of a run, got {since!r}; "
            '`dispersion registry query FILE "SELECT * FROM runs"` lists the runs',
            argument="since",
        ) from error
    if time.tzinfo is not None:
        time = time.astimezone(datetime.timezone.utc)
    return f"{time:%Y-%m-%d %H:%M:%S.%f}"


def _last_answer(connection: sqlite3.Connection, tokens: str, column: str, before: str) -> str:
    """The end of the last nightly answer, else of the last run, whose ``column`` is ``before`` a time."""
    announced, ended = connection.execute(
        "SELECT max(nullif(announced, '')), max(CASE WHEN announced IS NULL THEN ended END) FROM runs "
        f"WHERE tokens = ? AND {column} < ?",
        [tokens, before],
    ).fetchone()
    return str(announced or ended or "")


def last_announced(connection: sqlite3.Connection, tokens: str) -> tuple[str, str]:
    """Return the start and end (UTC) of the period that the last news with changes covers.

    Later news of *no changes* is passed over. If nothing has been announced yet, runs take the
    place of announcements: the period is that of the last run that found changes. Both texts are
    empty if no run has finished.

    Args:
        connection: The registry.
        tokens: Key of the pair of token sets.
    """
    announced, ended = connection.execute(
        "SELECT max(nullif(announced, '')), max(ended) FROM runs WHERE tokens = ?", [tokens]
    ).fetchone()
    column = "announced" if announced else "ended"
    last = announced or ended
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
        start = _last_answer(connection, tokens, "ended", end)
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
    """Find the changes between two times, ranked among all checkpoints of the registry.

    Args:
        connection: The registry.
        tokens: Key of the pair of token sets.
        since: The start, as :func:`since_time` returns it.
        order: The figure that ranks, and the distance of G; a field that is None is taken from each
            family's file.
        base: Label, path or address of the model that the other checkpoints were trained from; this
            model is never worth an evaluation. Default: the base of the last run with these token
            sets that had one.
        until: The end (UTC). Default: now.
        others: Further failures of the run, which the registry does not hold.
        own: Slope of the user's own results; None if there is none.

    Raises:
        UsageError: The registry does not know ``base``, or is damaged.
    """
    now = {_place(seen): seen for seen in last_seen(connection, tokens, until=until)}
    then = {}
    for seen in last_seen(connection, tokens, until=since):
        then[_place(seen)] = seen.called(now[_place(seen)].target)
    announced = _announced_states(connection, tokens, since)
    live = {place: seen for place, seen in now.items() if seen.reading and not is_gone(seen)}
    changes = _changes(now, then, since, {state[:3] for state in announced})
    bases = bases_among(connection, tokens, list(live.values()), base)

    def rank(seen: Sequence[Seen]) -> _Ranking:
        return _Ranking.of(ranked_rows(seen, order, bases), own)

    ranking = rank(list(live.values()))
    origins = [place for place, seen in live.items() if ranking.member(seen).is_base]
    arrived = changes.arrived
    fresh = []
    for place in arrived:
        if place not in origins and (*place, now[place].state) not in announced:
            fresh.append(place)
    standings = _standings(fresh, live, then, ranking, rank, origins)

    moves = [
        Move("failed", f.label, text=f.error, error=f.error, message=f.message) for f in others
    ]
    moves += _renamed(connection, now, since, until)
    # A rename is one move, not two.
    renamed = set()
    for place, standing in standings.items():
        if standing.of and arrived[place] == "new":
            renamed.add(now[standing.of].target.label)
    moves += [m for m in changes.moves if m.what != "gone" or m.checkpoint not in renamed]
    arrivals = []
    new = set()
    changed = set()
    for place, what in arrived.items():
        c, group = ranking.places[live[place].key]
        former = then[place].reading if what == "changed" else None
        standing = standings.get(place, _ANNOUNCED)
        if c.is_base:
            standing = _Standing(None, "the base")
        moves.append(_arrival(what, c, group, standing, former))
        arrivals.append(c)
        if standing.word != "copy":
            new.add(c)
        if place in origins and what == "changed":
            changed.add(c)
    moves.sort(key=lambda move: (_KINDS.index(move.what), move.group or "", move.rank or 0))
    sides = []
    for group in ranking.groups:
        sides += _against_base(group, new, changed)
    return News(
        since,
        tuple(moves),
        changes.touched,
        changes.kept,
        unknown(arrivals, alone=all(len(group.checkpoints) < 2 for group in ranking.groups)),
        changes.failing,
        sides,
    )


def _announced_states(
    connection: sqlite3.Connection, tokens: str, since: str
) -> set[tuple[str, str, str, str]]:
    """Return identity, revision, file and state of all that was measured until ``since``."""
    rows = connection.execute(
        "SELECT identity, requested, file, state FROM seen "
        "WHERE tokens = ? AND first <= ? AND error IS NULL",
        [tokens, since],
    )
    return {tuple(row) for row in rows}


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
            text = seen.error
            if seen.as_of:
                text += f", ranked by its figures of {seen.as_of}"
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
    what: str, c: Screened, group: Group, standing: _Standing, former: Reading | None
) -> Move:
    """The move of a measured checkpoint; ``former`` are its figures before it changed."""
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
    again = (
        f"The base {group.names[group.base]} has changed: all other checkpoints of its group are "
        "compared with it again."
    )
    return [again, *base_sentences(group)]


_Place = tuple[str, str, str]


def _place(seen: Seen) -> _Place:
    return seen.identity, seen.target.revision or "", seen.target.file or ""


def _same_figures(old: Seen, new: Seen) -> bool:
    """Whether both have the same figures, except for last digits that differ between machines."""
    if old.reading is None or new.reading is None:
        return False
    before = _numbers(old.reading)
    now = _numbers(new.reading)
    return before.shape == now.shape and np.allclose(before, now, 1e-9, 1e-12, equal_nan=True)


def _numbers(reading: Reading) -> Array:
    """A reading's figures and errors, without what identifies single rows."""
    ratio = reading.ratio
    if ratio is not None:
        ratio = replace(ratio, shares=np.zeros(0), marks=np.zeros(0))
    return numbers_of(reading.gaps, ratio)


class _Standing(NamedTuple):
    """A checkpoint compared with the former best of its group."""

    word: Literal["above", "level", "below", "first", "equal", "copy"] | None
    text: str
    chance: float | None = None
    of: _Place | None = None  # its original, if it is a copy


_ANNOUNCED = _Standing(None, "with weights that were announced before")


@dataclass(frozen=True)
class _Ranking:
    """States of checkpoints, ranked; each by its key (`Seen.key`), as two states may share a label.

    Attributes:
        groups: Their groups.
        places: Key -> member and group.
        originals: Key -> group and place of the member's original, or its own.
    """

    groups: Sequence[Group]
    places: Mapping[int, tuple[Screened, Group]]
    originals: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, members: Sequence[Screened], own: Own | None) -> _Ranking:
        groups = grouped(members, own)
        places = {}
        originals_of = {}
        for number, group in enumerate(groups):
            for place, original in enumerate(originals(group.checkpoints)):
                c = group.checkpoints[place]
                first = place if original.copied is None else original.copied
                places[id(c.gaps)] = c, group
                originals_of[id(c.gaps)] = number, first
        return cls(groups, places, originals_of)

    def member(self, seen: Seen) -> Screened:
        """The ranked member for a state."""
        return self.places[seen.key][0]


def _standings(
    fresh: Sequence[_Place],
    live: Mapping[_Place, Seen],
    then: Mapping[_Place, Seen],
    ranking: _Ranking,
    rank: Callable[[Sequence[Seen]], _Ranking],
    bases: Sequence[_Place],
) -> dict[_Place, _Standing]:
    """Compare each fresh checkpoint with the best of its group at that time."""
    if not fresh:
        return {}
    # Former states of changed or deleted checkpoints are ranked together with the present ones.
    former: dict[_Place, Seen] = {}
    as_now = set()
    selves = []
    for place, old in then.items():
        if old.reading is None:
            continue
        if place in live and _same_figures(old, live[place]):
            as_now.add(place)
            former[place] = live[place]
        else:
            selves.append(old)
            former[place] = old
    if selves:
        ranking = rank([*live.values(), *selves])
    best: dict[str, tuple[_Place, Screened]] = {}
    # The base is the original; else, of two known ones, one that still exists.
    known = {ranking.originals[old.key]: place for place, old in former.items()}
    known |= {ranking.originals[live[place].key]: place for place in (*as_now, *bases)}
    for place, old in former.items():
        c, group = ranking.places[old.key]
        if c.is_base or c.is_set_aside:
            continue
        if group.name not in best or c.rank < best[group.name][1].rank:
            best[group.name] = place, c
    standings: dict[_Place, _Standing] = {}
    for place in fresh:
        key = live[place].key
        of = known.get(ranking.originals[key])
        if of is not None:
            name = (live.get(of) or then[of]).target.label
            if of == place:
                name = "its former self"
            elif of not in live:
                name += ", which is gone"
            standings[place] = _Standing("copy", f"a copy of {name}", of=of)
            continue
        c, group = ranking.places[key]
        if group.name not in best:
            standings[place] = _alone(c, group) or _Standing("first", "first of its group")
            continue
        origin, champion = best[group.name]
        name = champion.label
        if origin == place:
            name = "its former self"
        elif origin not in live:
            name += " (gone)"
        elif origin not in as_now:
            name += " as it was"
        standings[place] = _alone(c, group) or _against(group, c, champion, name)
    return standings


def _alone(c: Screened, group: Group) -> _Standing | None:
    """The standing of a checkpoint that is not ranked: its rows are another's, or it has no ratio."""
    alike = [] if c.same_rows is None else group.by_rows.get(c.same_rows, [])
    if len(alike) > 1:
        other = next(other for other in alike if other is not c)
        return _Standing("equal", f"output rows equal to those of {other.label}")
    if c.is_set_aside:
        return _Standing(None, "set aside, as it has no ratio to be ranked by")
    return None


def _against(group: Group, c: Screened, champion: Screened, name: str) -> _Standing:
    """The standing of a checkpoint against the former best of its group, which has this ``name``."""
    word = _word(group, c, champion)
    side = "not distinguishable from" if word == "level" else word
    return _Standing(word, f"{side} the former best, {name}", group.chance(c, champion))


def _word(group: Group, c: Screened, champion: Screened) -> Literal["above", "level", "below"]:
    """A checkpoint's side of a former best: by rank; ``level`` within rounding, or without an order."""
    high, low = sorted((c, champion), key=lambda member: member.rank)
    by_rounding = (
        high.ratio is not None and low.ratio is not None and not high.ratio.above(low.ratio)
    )
    if group.is_noise or high.rank == low.rank or (group.figure == "ratio" and by_rounding):
        return "level"
    if high is c and (group.chance(c, champion) or 1.0) >= _WORTH:
        return "above"
    return "below"
