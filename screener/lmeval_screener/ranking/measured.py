"""What is kept of a checkpoint once it is read: some three kilobytes, however large it is.

The snapshot, the header and the rows are gone; what paired comparisons need stays in one array.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lmeval_dispersion.geometry import METRICS, Array, Metric, PairMean
from lmeval_screener.ranking.controls import Controls
from lmeval_screener.ranking.gap import Gap
from lmeval_screener.targets.target import Target
from lmeval_screener.tokens.resolution import Resolution

_PARTS = ("within_domain", "between", "within_reference")
_HEAD = 2 + 4 * len(_PARTS)  # mean and error of G; mean, two errors and pairs of each part
_NONE = np.zeros(0)


class Spill:
    """A temporary file for the figures of many checkpoints: two kilobytes each, out of memory.

    It goes when nothing that lies in it is needed any more. Where the disk is full, figures stay in memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._end = 0
        self._shapes: dict[tuple[int, int], tuple[int, int]] = {}
        self._sizes: dict[int, Spilled] = {}
        weakref.finalize(self, self._file.close)

    def kept(self, one: Measured) -> Measured:
        """The same checkpoint with its figures on disk."""
        gaps = one.gaps
        if not isinstance(gaps, Gaps):
            return one
        # Names that nearly all have are kept once.
        tensor, file, dtype = sys.intern(one.tensor), sys.intern(one.file), sys.intern(one.dtype)
        shape = self._shapes.setdefault(one.shape, one.shape)
        one = replace(one, tensor=tensor, file=file, dtype=dtype, shape=shape)
        content = gaps.packed.tobytes()
        try:
            os.pwrite(self._file.fileno(), content, self._end)
        except OSError:
            return one
        place = self._sizes.setdefault(len(content), Spilled(self, len(content)))
        begin, self._end = self._end, self._end + len(content)
        return replace(one, gaps=Gaps(place, gaps.domain, begin))

    def read(self, begin: int, size: int) -> Array:
        """What lies at a place, float64."""
        return np.frombuffer(os.pread(self._file.fileno(), size, begin), dtype=np.float64)


class Spilled(NamedTuple):
    """Figures in a spill that all take as many bytes."""

    spill: Spill
    size: int


class Gaps(Mapping[Metric, Gap]):
    """The gap in every metric, unpacked when it is asked for.

    Args:
        packed: float64, for each metric in the order of ``METRICS``: mean and se of G; mean, se, se_pairs and
            pairs of within(T), between(T, R) and within(R); G without each token of T, then of R.
        domain: Tokens of T.
        begin: Where they begin in a spill, in bytes.
    """

    __slots__ = ("_begin", "_packed", "domain")

    def __init__(self, packed: Array | Spilled, domain: int, begin: int = 0) -> None:
        self._packed, self.domain, self._begin = packed, domain, begin

    @property
    def packed(self) -> Array:
        """The figures, see above; read from the disk where they were spilled."""
        place = self._packed
        return place.spill.read(self._begin, place.size) if isinstance(place, Spilled) else place

    def __reduce__(self) -> tuple[type[Gaps], tuple[Array, int]]:
        """Another process cannot read this one's spill."""
        return Gaps, (self.packed, self.domain)

    @classmethod
    def of(cls, gaps: Mapping[Metric, Gap]) -> Gaps:
        """Gaps packed; what the parts' own comparisons would need is dropped."""
        parts: list[Array] = []
        for metric in METRICS:
            one = gaps[metric]
            head = [one.mean, one.se]
            for name in _PARTS:
                part: PairMean = getattr(one, name)
                head += [part.mean, part.se, part.se_pairs, part.pairs]
            parts += [np.array(head, dtype=np.float64), one.left_out_domain, one.left_out_reference]
        return cls(np.concatenate(parts), len(parts[1]))

    def __getitem__(self, metric: Metric) -> Gap:
        packed = self.packed
        each = len(packed) // len(METRICS)
        begin = METRICS.index(metric) * each
        values = packed[begin : begin + each]
        parts = [
            PairMean(float(mean), float(se), float(se_pairs), int(pairs), _NONE, _NONE)
            for mean, se, se_pairs, pairs in values[2:_HEAD].reshape(-1, 4)
        ]
        split = _HEAD + self.domain
        inside, across, control = parts
        return Gap(
            metric,
            float(values[0]),
            float(values[1]),
            inside,
            across,
            control,
            values[_HEAD:split],
            values[split:],
        )

    def __iter__(self) -> Iterator[Metric]:
        return iter(METRICS)

    def __len__(self) -> int:
        return len(METRICS)


@dataclass(frozen=True, eq=False, slots=True)
class Measured:
    """One checkpoint that was read, before it is known which others it may be compared with.

    Attributes:
        target: What was asked for.
        repo: Repository after renames, or the folder.
        revision: The commit that was read; None for a folder.
        tensor: Name of the output projection.
        file: Where it is stored.
        dtype: Its element type as stored.
        shape: Rows and columns.
        tied: Whether it is the input embedding.
        parameters: All parameters as stored; None if not to be known.
        tokenizer: Digest of the tokenizer's file.
        resolution: The rows of T and R; checkpoints of one tokenizer share it.
        gaps: The gap in every metric.
        warnings: What a reader of the number should know.
        bytes_read: Bytes that travelled.
        requests: Requests that were made.
        seconds: From the first request to the last row.
        controls: Gauge controls, where they were asked for; a sentence where they could not be read.
    """

    target: Target
    repo: str
    revision: str | None
    tensor: str
    file: str
    dtype: str
    shape: tuple[int, int]
    tied: bool
    parameters: int | None
    tokenizer: str
    resolution: Resolution
    gaps: Mapping[Metric, Gap]
    warnings: tuple[str, ...]
    bytes_read: int
    requests: int
    seconds: float
    controls: Controls | str | None = None
