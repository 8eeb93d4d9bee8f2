"""Which checkpoints may be compared, and their order: one tokenizer, one scale, paired errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmeval_dispersion.geometry import Metric
from lmeval_screener.errors import ScreeningError
from lmeval_screener.gap import Gap, difference, ranks
from lmeval_screener.reading import Reading
from lmeval_screener.result import Screened, TensorInfo, TokenInfo
from lmeval_screener.scales import Size, scale_names
from lmeval_screener.targets import label
from lmeval_screener.tokens.resolution import Resolution


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


def rank_gaps(gaps: Sequence[Gap]) -> list[tuple[int, list[int]]]:
    """For each gap its rank, 1 for the largest, and the positions of the gaps it is not separated from."""
    return [
        (
            rank,
            [
                place
                for place, other in enumerate(gaps)
                if other is not own and not difference(own, other).separated
            ],
        )
        for own, rank in zip(gaps, ranks([gap.mean for gap in gaps]), strict=True)
    ]


def _ranked_group(family: str, scale: str, members: list[Reading], metric: Metric) -> list[Screened]:
    labels = [label(reading.snapshot.repo, reading.target.revision) for reading in members]
    places = rank_gaps([reading.gaps[metric] for reading in members])
    found = [
        _screened(reading, family, scale, rank, tuple(labels[other] for other in others))
        for reading, (rank, others) in zip(members, places, strict=True)
    ]
    return sorted(found, key=lambda c: (c.rank, c.label))


def _screened(
    reading: Reading, family: str, scale: str, rank: int, not_separated_from: tuple[str, ...]
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
        ),
        bytes_read=snapshot.meter.bytes_read,
        requests=snapshot.meter.requests,
        seconds=reading.seconds,
        notes=projection.warnings,
        accuracy=reading.target.accuracy,
        rank=rank,
        not_separated_from=not_separated_from,
    )


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
