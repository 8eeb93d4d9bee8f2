"""Which checkpoints may be compared, and their order: one tokenizer, one scale, paired errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from lmeval_dispersion.geometry import Metric
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.scales import Size, scale_names
from lmeval_screener.ranking.ties import Standing, rank_gaps
from lmeval_screener.reading import Reading
from lmeval_screener.screened import Screened, TensorInfo, TokenInfo
from lmeval_screener.targets import labelled
from lmeval_screener.tokens import Resolution


class Compared(NamedTuple):
    """One tokenizer by which others are compared: the checkpoint that showed it, and its rows."""

    first: Reading
    rows: frozenset[tuple[str, int]]


def common_tokenizers(family: str | None, members: Sequence[Reading]) -> dict[str, Compared | None]:
    """For each tokenizer the one by which its checkpoints are compared; None where it fits none.

    The tokenizer that most checkpoints have is the one of a family. Checkpoints given by name (``family`` is
    None) may have any number of tokenizers. One tokenizer stands for another where every token that is
    compared in it is the same piece at the same row there.
    """
    votes = Counter(member.tokenizer for member in members)
    shown = {member.tokenizer: member for member in reversed(members)}
    commons: list[Compared] = []
    common_of: dict[str, Compared | None] = {}
    for tokenizer in sorted(dict.fromkeys(member.tokenizer for member in members), key=lambda t: -votes[t]):
        rows = _rows(shown[tokenizer].resolution)
        common = next((common for common in commons if common.rows <= rows), None)
        if common is None and (family is None or not commons):
            common = Compared(shown[tokenizer], rows)
            commons.append(common)
        common_of[tokenizer] = common
    return common_of


def mismatch(family: str | None, member: Reading, common: Reading) -> ScreeningError:
    """Why a checkpoint is left out of its family's ranking."""
    missing = _rows(common.resolution) - _rows(member.resolution)
    pieces = sorted(piece for piece, _ in missing)
    shown = ", ".join(pieces[:5]) + (", ..." if len(pieces) > 5 else "")
    return ScreeningError(
        "TokenizerMismatch",
        f"left out of the ranking of {family} because its tokenizer differs from that of "
        f"{common.target.label} in {len(pieces)} of the tokens compared ({shown}); screen it by its own name",
    )


def ranked(members: Sequence[tuple[Reading, Reading]], metric: Metric) -> list[Screened]:
    """Every group's checkpoints, best first, with their ranks and those they are tied with."""
    labels = labelled([reading.target for reading, _ in members])
    families: dict[str, list[Reading]] = {}
    for (reading, common), target in zip(members, labels, strict=True):
        name = reading.target.family or f"tokenizer:{common.tokenizer.rpartition(':')[2][:8]}"
        if reading.target.labelled is None:
            reading = replace(reading, target=target)
        families.setdefault(name, []).append(reading)
    groups: dict[tuple[str, str], list[Reading]] = {}
    for name, siblings in families.items():
        scales = scale_names([_size(reading) for reading in siblings])
        for reading, scale in zip(siblings, scales, strict=True):
            groups.setdefault((name, scale), []).append(reading)
    return [
        checkpoint
        for (family, scale), siblings in groups.items()
        for checkpoint in _ranked_group(family, scale, siblings, metric)
    ]


def _ranked_group(family: str, scale: str, members: list[Reading], metric: Metric) -> list[Screened]:
    standings = rank_gaps(
        [reading.gaps[metric] for reading in members], [reading.ratio for reading in members]
    )
    checkpoints = [
        _screened(reading, family, scale, standing)
        for reading, standing in zip(members, standings, strict=True)
    ]
    return sorted(checkpoints, key=lambda c: (c.rank, c.label))


@lru_cache(maxsize=64)
def _token_info(resolution: Resolution) -> TokenInfo:
    return TokenInfo(
        len(resolution.domain),
        len(resolution.reference),
        resolution.dropped,
        resolution.dropped_reference,
        resolution.digit_scheme,
        resolution.domain,
        resolution.reference,
    )


def _screened(reading: Reading, family: str, scale: str, standing: Standing) -> Screened:
    return Screened(
        repo=reading.repo,
        requested_revision=reading.target.revision,
        revision=reading.revision,
        family=family,
        scale=scale,
        gaps=reading.gaps,
        tensor=TensorInfo(reading.tensor, reading.file, reading.dtype, reading.shape, reading.tied),
        tokens=_token_info(reading.resolution),
        bytes_read=reading.bytes_read,
        requests=reading.requests,
        seconds=reading.seconds,
        notes=(*reading.warnings, *_token_notes(reading)),
        accuracy=reading.target.accuracy,
        file=reading.target.file,
        negative_control=reading.target.negative_control,
        rank=standing.rank,
        ties=standing.ties,
        next=standing.next,
        ratio=reading.ratio,
        no_ratio=reading.no_ratio,
        labelled=reading.target.labelled,
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
    if resolution.one_row:
        notes.append(f"counted once because they share a row: {', '.join(resolution.one_row)}")
    if resolution.vocabulary > reading.shape[0]:
        notes.append(
            f"the tokenizer names {resolution.vocabulary} rows, {reading.tensor} has only {reading.shape[0]}"
        )
    return notes


def _size(reading: Reading) -> Size:
    vocabulary = reading.resolution.vocabulary
    return Size(
        reading.repo, reading.target.scale, reading.parameters, *reading.shape, reading.tied, vocabulary
    )


def _rows(resolution: Resolution) -> frozenset[tuple[str, int]]:
    return frozenset((token.piece, token.id) for token in (*resolution.domain, *resolution.reference))
