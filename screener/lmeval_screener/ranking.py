"""Which checkpoints may be compared, and their order: one tokenizer, one scale, paired errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lmeval_dispersion.errors import ScreeningError
from lmeval_dispersion.geometry import Metric
from lmeval_screener.gap import Difference, difference, ranks
from lmeval_screener.reading import Reading
from lmeval_screener.result import Screened, TensorInfo, TokenInfo
from lmeval_screener.scale import scale_name
from lmeval_screener.tokens.resolution import Resolution


def by_tokenizer(family: str | None, readings: Sequence[Reading]) -> list[tuple[Reading, Reading | None]]:
    """Each reading with the one that stands for its tokenizer.

    Two tokenizers are the same where every token that is compared is the same piece at the same row. The one
    that most checkpoints have stands for a family; what differs from it gets None. Checkpoints given by
    name may have any number of tokenizers.
    """
    votes = Counter(reading.tokenizer for reading in readings)
    commons: list[Reading] = []
    for reading in sorted(readings, key=lambda r: -votes[r.tokenizer]):
        known = any(_same_rows(common.resolution, reading.resolution) for common in commons)
        if not known and (family is None or not commons):
            commons.append(reading)
    return [
        (reading, next((c for c in commons if _same_rows(c.resolution, reading.resolution)), None))
        for reading in readings
    ]


def mismatch(family: str | None, reading: Reading, readings: Sequence[Reading]) -> ScreeningError:
    """Why a reading is left out of its family's ranking."""
    common = next(c for r, c in by_tokenizer(family, readings) if c is not None)
    missing = _rows(common.resolution) - _rows(reading.resolution)
    pieces = sorted(piece for piece, _ in missing)
    shown = ", ".join(pieces[:5]) + (", ..." if len(pieces) > 5 else "")
    return ScreeningError(
        "TokenizerMismatch",
        f"left out of the ranking of {family} because its tokenizer differs from that of "
        f"{common.target.label} in {len(pieces)} of the tokens compared ({shown}); screen it by its own name",
    )


def screened(reading: Reading, family: str | None, tokenizer: str) -> Screened:
    """A reading as a line of the result, not yet ranked; ``tokenizer`` names a group without a family."""
    projection, snapshot, resolution = reading.projection, reading.snapshot, reading.resolution
    v, d = projection.shape
    scale = reading.target.scale
    if scale is None:
        scale = scale_name(projection.parameters, 0 if projection.tied else v * d)
    return Screened(
        repo=snapshot.repo,
        requested_revision=reading.target.revision,
        revision=snapshot.revision,
        family=family or f"tokenizer:{tokenizer.rpartition(':')[2][:8]}",
        scale=scale,
        gaps=reading.gaps,
        tensor=TensorInfo(projection.name, projection.file, projection.dtype, (v, d), projection.tied),
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
    )


def ranked(checkpoints: Sequence[Screened], metric: Metric) -> list[Screened]:
    """Every group's checkpoints, best first, with ranks and the siblings they are not separated from."""
    groups: dict[tuple[str, str], list[Screened]] = {}
    for checkpoint in checkpoints:
        groups.setdefault((checkpoint.family, checkpoint.scale), []).append(checkpoint)
    return [c for members in groups.values() for c in _ranked_group(members, metric)]


def separation(a: Screened, b: Screened, metric: Metric) -> Difference:
    """The paired difference of two checkpoints' G."""
    return difference(a.gaps[metric], b.gaps[metric])


def _ranked_group(members: list[Screened], metric: Metric) -> list[Screened]:
    places = ranks([c.gaps[metric].mean for c in members])
    with_rank = [
        replace(
            checkpoint,
            rank=rank,
            not_separated_from=tuple(
                other.label
                for other in members
                if other is not checkpoint and not separation(checkpoint, other, metric).separated
            ),
        )
        for checkpoint, rank in zip(members, places, strict=True)
    ]
    return sorted(with_rank, key=lambda c: (c.rank, c.label))


def _rows(resolution: Resolution) -> set[tuple[str, int]]:
    return {(token.piece, token.id) for token in (*resolution.domain, *resolution.reference)}


def _same_rows(common: Resolution, other: Resolution) -> bool:
    return _rows(common) <= _rows(other)
