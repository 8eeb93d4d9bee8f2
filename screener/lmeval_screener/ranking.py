"""Which checkpoints may be compared, and their order: one tokenizer, one scale, paired errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from lmeval_dispersion.geometry import Metric
from lmeval_screener.errors import ScreeningError
from lmeval_screener.gap import Gap, difference, ranks
from lmeval_screener.reading import Reading
from lmeval_screener.result import Screened, TensorInfo, TokenInfo
from lmeval_screener.targets import label
from lmeval_screener.tokens.resolution import Resolution

# Sizes that names commonly carry, in billions. A count within 4 % of one is given its name, so that
# siblings with padded vocabularies or extra heads stay in one group.
_NAMED_SIZES = (
    *(0.5, 0.6, 1.0, 1.3, 1.5, 1.7, 2.0, 3.0, 4.0, 7.0, 8.0, 9.0, 13.0, 14.0, 20.0, 27.0, 30.0, 32.0),
    *(34.0, 40.0, 65.0, 70.0, 72.0, 104.0, 110.0, 123.0, 180.0, 235.0, 405.0, 671.0),
)


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
    groups: dict[tuple[str, str], list[Reading]] = {}
    for reading, common in readings:
        name = reading.target.family or f"tokenizer:{common.tokenizer.rpartition(':')[2][:8]}"
        groups.setdefault((name, _scale(reading)), []).append(reading)
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


def _scale(reading: Reading) -> str:
    if reading.target.scale is not None:
        return reading.target.scale
    projection = reading.projection
    return scale_name(projection.parameters, 0 if projection.tied else math.prod(projection.shape))


def scale_name(parameters: int | None, vocabulary_matrix: int = 0) -> str:
    """Name of a size, such as ``0.5B``, ``1.5B``, ``7B`` or ``160M``; ``unknown`` without a count.

    Args:
        parameters: All parameters of the checkpoint, or None.
        vocabulary_matrix: Parameters of the second vocabulary matrix, where input and output embedding are
            stored apart. They are not counted: names follow the model without it (Qwen2.5-7B stores
            7.62 billion), and a distilled sibling that was untied stays in its group.

    >>> scale_name(7_615_616_512, 152064 * 3584), scale_name(494_032_768)
    ('7B', '0.5B')
    >>> scale_name(1_777_088_000, 151936 * 1536)
    '1.5B'
    """
    if parameters is None:
        return "unknown"
    count = (parameters - vocabulary_matrix) / 1e9
    if count <= 0:
        return "unknown"
    nearest = min(_NAMED_SIZES, key=lambda size: abs(math.log(count / size)))
    if abs(count / nearest - 1) <= 0.04:
        return f"{nearest:g}B"
    if count >= 2:
        return f"{round(count)}B"
    if count >= 0.95:
        return f"{count:.1f}B"
    unit, name = (1e6, "M") if count >= 1e-3 else (1e3, "K")
    value = count * 1e9 / unit
    return f"{float(f'{value:.2g}'):g}{name}"


def _rows(resolution: Resolution) -> set[tuple[str, int]]:
    return {(token.piece, token.id) for token in (*resolution.domain, *resolution.reference)}
