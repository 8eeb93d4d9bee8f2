"""Which checkpoints may be compared, and their order: one tokenizer, one scale, paired errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lmeval_dispersion.geometry import Metric
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.gap import Gap, difference, ranks
from lmeval_screener.ranking.scales import Size, scale_names
from lmeval_screener.reading import Reading
from lmeval_screener.result import Next, Screened, TensorInfo, TokenInfo
from lmeval_screener.targets.target import label
from lmeval_screener.tokens.resolution import Resolution

_ERROR_RATE = 0.05  # that any two of a group are told apart although they do not differ


def common_tokenizers(family: str | None, readings: Sequence[Reading]) -> list[Reading]:
    """One reading for each tokenizer by which the others are compared.

    The tokenizer that most checkpoints have is the one of a family. Checkpoints given by name (``family`` is
    None) may have any number of tokenizers.
    """
    votes = Counter(reading.tokenizer for reading in readings)
    commons: list[Reading] = []
    for reading in sorted(readings, key=lambda r: -votes[r.tokenizer]):
        if not any(same_tokens(common, reading) for common in commons) and (family is None or not commons):
            commons.append(reading)
    return commons


def same_tokens(common: Reading, other: Reading) -> bool:
    """Whether every token that is compared in one checkpoint is the same piece at the same row in another."""
    return _rows(common.resolution) <= _rows(other.resolution)


def mismatch(family: str | None, reading: Reading, common: Reading) -> ScreeningError:
    """Why a reading is left out of its family's ranking."""
    missing = _rows(common.resolution) - _rows(reading.resolution)
    pieces = sorted(piece for piece, _ in missing)
    shown = ", ".join(pieces[:5]) + (", ..." if len(pieces) > 5 else "")
    return ScreeningError(
        "TokenizerMismatch",
        f"left out of the ranking of {family} because its tokenizer differs from that of "
        f"{common.target.label} in {len(pieces)} of the tokens compared ({shown}); screen it by its own name",
    )


def rank_readings(readings: Sequence[tuple[Reading, Reading]], metric: Metric) -> list[Screened]:
    """Every group's checkpoints, best first, with ranks and the siblings they are not separated from.

    Args:
        readings: Each reading with the one of its common tokenizer, whose digest names a group without a
            family.
        metric: Which gap ranks.
    """
    families: dict[str, list[Reading]] = {}
    for reading, common in readings:
        name = reading.target.family or f"tokenizer:{common.tokenizer.rpartition(':')[2][:8]}"
        families.setdefault(name, []).append(reading)
    groups: dict[tuple[str, str], list[Reading]] = {}
    for name, members in families.items():
        for reading, scale in zip(members, scale_names([_size(r) for r in members]), strict=True):
            groups.setdefault((name, scale), []).append(reading)
    return [
        checkpoint
        for (family, scale), members in groups.items()
        for checkpoint in _ranked_group(family, scale, members, metric)
    ]


class Standing(NamedTuple):
    """Where one gap of a group stands.

    Attributes:
        rank: 1 for the largest; equal means share the better rank.
        not_separated_from: Positions of the gaps within two paired standard errors, each pair by itself.
        tied_with: First and last rank of which it is not told apart once all pairs of the group are counted.
        next: Against the gap of the next rank; None for the last.
    """

    rank: int
    not_separated_from: list[int]
    tied_with: tuple[int, int]
    next: Next | None


def rank_gaps(gaps: Sequence[Gap]) -> list[Standing]:
    """The standing of each gap in its group.

    Two gaps are *tied* unless Holm's procedure over all pairs of the group rejects that they are equal: the
    chance that any two of a group are told apart by the choice of tokens alone is at most 5 %.
    """
    places = ranks([gap.mean for gap in gaps])
    order = sorted(range(len(gaps)), key=lambda i: places[i])
    pairs = {(i, j): difference(gaps[i], gaps[j]) for at, i in enumerate(order) for j in order[at + 1 :]}
    apart = _told_apart({pair: found.p for pair, found in pairs.items()})
    close = {pair for pair, found in pairs.items() if not found.separated}
    following = dict(pairwise(order))

    def others(i: int, chosen: Callable[[tuple[int, int]], bool]) -> list[int]:
        return [j for j in range(len(gaps)) if j != i and (chosen((i, j)) or chosen((j, i)))]

    standings = []
    for i, rank in enumerate(places):
        ties = [rank, *(places[j] for j in others(i, lambda pair: pair in pairs and pair not in apart))]
        pair = (i, following[i]) if i in following else None
        standings.append(
            Standing(
                rank,
                others(i, lambda pair: pair in close),
                (min(ties), max(ties)),
                None if pair is None else Next(pairs[pair].mean, pairs[pair].se, pair in apart),
            )
        )
    return standings


def _told_apart(p_values: dict[tuple[int, int], float]) -> set[tuple[int, int]]:
    """Pairs that Holm's step-down procedure rejects at 5 % for all pairs together."""
    apart: set[tuple[int, int]] = set()
    for done, (pair, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > _ERROR_RATE / (len(p_values) - done):
            break
        apart.add(pair)
    return apart


def _ranked_group(family: str, scale: str, members: list[Reading], metric: Metric) -> list[Screened]:
    labels = [
        label(reading.snapshot.repo, reading.target.revision, reading.target.file) for reading in members
    ]
    standings = rank_gaps([reading.gaps[metric] for reading in members])
    found = [
        _screened(reading, family, scale, standing, labels)
        for reading, standing in zip(members, standings, strict=True)
    ]
    return sorted(found, key=lambda c: (c.rank, c.label))


def _screened(
    reading: Reading, family: str, scale: str, standing: Standing, labels: Sequence[str]
) -> Screened:
    projection, snapshot, resolution = reading.projection, reading.snapshot, reading.resolution
    return Screened(
        repo=snapshot.repo,
        requested_revision=reading.target.revision,
        revision=snapshot.revision,
        family=family,
        scale=scale,
        gaps=reading.gaps,
        tensor=TensorInfo(
            projection.name, projection.file, projection.dtype, projection.shape, projection.tied
        ),
        tokens=TokenInfo(
            len(resolution.domain),
            len(resolution.reference),
            resolution.dropped,
            resolution.dropped_reference,
            resolution.digit_scheme,
            resolution.domain,
            resolution.reference,
        ),
        bytes_read=reading.bytes_read,
        requests=reading.requests,
        seconds=reading.seconds,
        notes=(*projection.warnings, *_token_notes(reading)),
        accuracy=reading.target.accuracy,
        file=reading.target.file,
        negative_control=reading.target.negative_control,
        rank=standing.rank,
        not_separated_from=tuple(labels[other] for other in standing.not_separated_from),
        tied_with=standing.tied_with,
        next=standing.next,
        controls=reading.controls,
    )


def _token_notes(reading: Reading) -> list[str]:
    resolution, notes = reading.resolution, []
    if resolution.never_made:
        words = ", ".join(resolution.never_made[:5])
        more = len(resolution.never_made) - 5
        notes.append(
            f"words dropped because the tokenizer never makes their piece: {words}"
            + (f" and {more} more" if more > 0 else "")
        )
    if resolution.vocabulary > reading.projection.shape[0]:
        notes.append(
            f"the tokenizer names {resolution.vocabulary} rows, {reading.projection.name} has only "
            f"{reading.projection.shape[0]}"
        )
    return notes


def _size(reading: Reading) -> Size:
    projection = reading.projection
    return Size(
        reading.snapshot.repo,
        reading.target.scale,
        projection.parameters,
        *projection.shape,
        projection.tied,
        reading.resolution.vocabulary,
    )


def _rows(resolution: Resolution) -> set[tuple[str, int]]:
    return {(token.piece, token.id) for token in (*resolution.domain, *resolution.reference)}
