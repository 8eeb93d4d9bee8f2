"""Which checkpoints may be compared, and their order: one tokenizer, one scale, paired errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from lmeval_dispersion.geometry import Metric
from lmeval_screener.errors import ScreeningError
from lmeval_screener.ranking.gap import Gap
from lmeval_screener.ranking.measured import Measured
from lmeval_screener.ranking.scales import Size, scale_names
from lmeval_screener.ranking.ties import Standing, rank_gaps
from lmeval_screener.result import Screened, TensorInfo, TokenInfo
from lmeval_screener.tokens.resolution import Resolution

T = TypeVar("T")


class Compared(NamedTuple):
    """One tokenizer by which others are compared: the checkpoint that showed it, and its rows."""

    first: Measured
    rows: frozenset[tuple[str, int]]


def common_tokenizers(family: str | None, members: Sequence[Measured]) -> dict[str, Compared | None]:
    """For each tokenizer the one by which its checkpoints are compared; None where it fits none.

    The tokenizer that most checkpoints have is the one of a family. Checkpoints given by name (``family`` is
    None) may have any number of tokenizers. One tokenizer stands for another where every token that is
    compared in it is the same piece at the same row there.
    """
    votes = Counter(member.tokenizer for member in members)
    shown = {member.tokenizer: member for member in reversed(members)}
    commons: list[Compared] = []
    found: dict[str, Compared | None] = {}
    for tokenizer in sorted(dict.fromkeys(member.tokenizer for member in members), key=lambda t: -votes[t]):
        rows = _rows(shown[tokenizer].resolution)
        common = next((common for common in commons if common.rows <= rows), None)
        if common is None and (family is None or not commons):
            common = Compared(shown[tokenizer], rows)
            commons.append(common)
        found[tokenizer] = common
    return found


def mismatch(family: str | None, member: Measured, common: Measured) -> ScreeningError:
    """Why a checkpoint is left out of its family's ranking."""
    missing = _rows(common.resolution) - _rows(member.resolution)
    pieces = sorted(piece for piece, _ in missing)
    shown = ", ".join(pieces[:5]) + (", ..." if len(pieces) > 5 else "")
    return ScreeningError(
        "TokenizerMismatch",
        f"left out of the ranking of {family} because its tokenizer differs from that of "
        f"{common.target.label} in {len(pieces)} of the tokens compared ({shown}); screen it by its own name",
    )


def rank_measured(members: list[tuple[Measured, Measured]], metric: Metric) -> list[Screened]:
    """Every group's checkpoints, best first, with their ranks and those they are tied with.

    Args:
        members: Each checkpoint with the one of its common tokenizer, whose digest names a group without a
            family. It is emptied: many checkpoints are not held twice.
        metric: Which gap ranks.
    """
    families: dict[str, list[Measured]] = {}
    for one, common in _drained(members):
        name = one.target.family or f"tokenizer:{common.tokenizer.rpartition(':')[2][:8]}"
        families.setdefault(name, []).append(one)
    groups: dict[tuple[str, str], list[Measured]] = {}
    for name, siblings in families.items():
        scales = scale_names([_size(m) for m in siblings])
        for one, scale in zip(_drained(siblings), scales, strict=True):
            groups.setdefault((name, scale), []).append(one)
    return [
        checkpoint
        for (family, scale), siblings in groups.items()
        for checkpoint in _ranked_group(family, scale, siblings, metric)
    ]


def _ranked_group(family: str, scale: str, members: list[Measured], metric: Metric) -> list[Screened]:
    standings = rank_gaps(_Unpacked(members, metric))
    tokens: dict[int, TokenInfo] = {}
    tensors: dict[TensorInfo, TensorInfo] = {}
    found = []
    for one, standing in zip(_drained(members), _drained(standings), strict=True):
        info = tokens.setdefault(id(one.resolution), _token_info(one.resolution))
        tensor = TensorInfo(one.tensor, one.file, one.dtype, one.shape, one.tied)
        found.append(_screened(one, family, scale, standing, info, tensors.setdefault(tensor, tensor)))
    found.sort(key=lambda c: (c.rank, c.label))
    return found


def _drained(items: list[T]) -> Iterator[T]:
    """The items of a list in their order, which leave it."""
    items.reverse()
    while items:
        yield items.pop()


class _Unpacked(Sequence[Gap]):
    """Gaps of some checkpoints, each unpacked when it is looked at: those of a large group would not fit."""

    def __init__(self, members: Sequence[Measured], metric: Metric) -> None:
        self._members, self._metric = members, metric

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [one.gaps[self._metric] for one in self._members[place]]
        return self._members[place].gaps[self._metric]


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


def _screened(
    one: Measured, family: str, scale: str, standing: Standing, tokens: TokenInfo, tensor: TensorInfo
) -> Screened:
    return Screened(
        repo=one.repo,
        requested_revision=one.target.revision,
        revision=one.revision,
        family=family,
        scale=scale,
        gaps=one.gaps,
        tensor=tensor,
        tokens=tokens,
        bytes_read=one.bytes_read,
        requests=one.requests,
        seconds=one.seconds,
        notes=(*one.warnings, *_token_notes(one)),
        accuracy=one.target.accuracy,
        file=one.target.file,
        negative_control=one.target.negative_control,
        rank=standing.rank,
        ties=standing.ties,
        next=standing.next,
        controls=one.controls,
        changed=one.target.listing.changed if one.target.listing else None,
        labelled=one.target.labelled,
    )


def _token_notes(one: Measured) -> list[str]:
    resolution, notes = one.resolution, []
    if resolution.never_made:
        words = ", ".join(resolution.never_made[:5])
        more = len(resolution.never_made) - 5
        notes.append(
            f"words dropped because the tokenizer never makes their piece: {words}"
            + (f" and {more} more" if more > 0 else "")
        )
    if resolution.one_row:
        notes.append(f"counted once because they share a row: {', '.join(resolution.one_row)}")
    if resolution.vocabulary > one.shape[0]:
        notes.append(
            f"the tokenizer names {resolution.vocabulary} rows, {one.tensor} has only {one.shape[0]}"
        )
    return notes


def _size(one: Measured) -> Size:
    vocabulary = one.resolution.vocabulary
    return Size(one.repo, one.target.scale, one.parameters, *one.shape, one.tied, vocabulary)


def _rows(resolution: Resolution) -> frozenset[tuple[str, int]]:
    return frozenset((token.piece, token.id) for token in (*resolution.domain, *resolution.reference))
