"""Groups of comparable checkpoints, and the pairs of them that have a clear order.

A group is one tokenizer and one scale. A pair of a group has a clear order if its paired difference in G
separates it after correction for the group's comparisons, with a chance of at most 5 % that any pair is
ordered wrongly, and if the ratio agrees (`Ratio.above`): a change that alters no prediction moves G, but must
not decide an order.

Only comparisons that differ count. A hundred near copies of two models are compared in ten thousand pairs,
which all ask whether the two models differ. For a pair, checkpoints whose difference has an error far below
that of the pair count as one; then Holm's step-down procedure, with Student's t. So the order of two models
does not depend on the number of their copies, and copies among themselves have the level of all pairs.
`benchmarks/separation.py` simulates both.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.geometry import Array, Metric
from lmeval_dispersion.statistics import holm, rank_agreement, student_quantile
from lmeval_screener.copies import originals
from lmeval_screener.errors import ScreeningError
from lmeval_screener.figures import Gap, Ratio, check_same_tokens, difference, rank_places
from lmeval_screener.screened import (
    RANK_BY,
    TOKENIZER,
    Against,
    Next,
    RankBy,
    Ranks,
    Reading,
    Screened,
    Side,
)
from lmeval_screener.targets.labels import labelled
from lmeval_screener.targets.names import Target
from lmeval_screener.tokens.resolution import Resolution

#: Chance that any two checkpoints of a group are ordered although they do not differ.
ERROR_RATE = 0.05
_OCTAVES = 40  # of a variance, each half of the previous; anything smaller is rounding
_NEAR = 5  # scales between a pair and the checkpoints that count as one: at most a quarter of its error
_STEPS = 5  # of Holm's procedure; fewer order less
_NAMED = "taken as the base, as all others name it (adapter_config.json, or base_model on the Hub)"
_CELLS = 2**18  # pairs held at a time: 2 MB an array

K = TypeVar("K", bound=Hashable)


# --- groups ---------------------------------------------------------------------------------------------


class CommonTokenizer(NamedTuple):
    """A common tokenizer: the first checkpoint that has it, and its rows."""

    first: Reading
    rows: frozenset[tuple[str, int]]


def common_tokenizers(family: str | None, members: Sequence[Reading]) -> dict[str, CommonTokenizer | None]:
    """For each tokenizer, the common tokenizer that its checkpoints are compared on; None if none fits.

    A family's tokenizer is that of most of its checkpoints. Checkpoints given by name (``family`` is None)
    may have any number of tokenizers. One tokenizer can replace another if each of its compared tokens is
    the same piece at the same row there.
    """
    votes = Counter(member.tokenizer for member in members)
    shown = {member.tokenizer: member for member in reversed(members)}
    commons: list[CommonTokenizer] = []
    common_of: dict[str, CommonTokenizer | None] = {}
    for tokenizer in sorted(votes, key=lambda t: -votes[t]):
        rows = _rows(shown[tokenizer].resolution)
        common = next((common for common in commons if common.rows <= rows), None)
        if common is None and (family is None or not commons):
            common = CommonTokenizer(shown[tokenizer], rows)
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


def _rows(resolution: Resolution) -> frozenset[tuple[str, int]]:
    return frozenset((token.piece, token.id) for token in resolution.compared)


def ranked(
    members: Sequence[tuple[Reading, Reading]],
    metric: Metric,
    rank_by: RankBy = RANK_BY,
    bases: Sequence[Target] = (),
) -> list[Screened]:
    """Every group's checkpoints, best first; each reading is paired with its common tokenizer's reading.

    A group's base is one of ``bases``, else its :func:`named_base`.
    """
    families: dict[str, list[Reading]] = {}
    labels = labelled([reading.target for reading, _ in members])
    for (reading, common), target in zip(members, labels, strict=True):
        name = reading.target.family or f"{TOKENIZER}{common.tokenizer.rpartition(':')[2][:8]}"
        if reading.target.labelled is None:
            reading = replace(reading, target=target)
        families.setdefault(name, []).append(reading)
    groups: dict[tuple[str, str], list[Reading]] = {}
    for name, siblings in families.items():
        for reading, scale in zip(siblings, scale_names(siblings), strict=True):
            groups.setdefault((name, scale), []).append(reading)
    return [
        checkpoint
        for (family, scale), siblings in groups.items()
        for checkpoint in _ranked_group(family, scale, siblings, metric, rank_by, bases)
    ]


def named_base(members: Sequence[Reading]) -> str:
    """The ``place`` that all others of a group, two or more, name as their base; empty for none."""
    for base in sorted({member.base for member in members} - {""}):
        others = [member.base for member in members if member.place != base]
        if len(others) > 1 and set(others) == {base}:
            return base
    return ""


def _ranked_group(
    family: str, scale: str, members: list[Reading], metric: Metric, rank_by: RankBy, bases: Sequence[Target]
) -> list[Screened]:
    base = next((member for member in members if member.target in bases), None)
    if base is None and (named := named_base(members)):
        members = [replace(m, warnings=(*m.warnings, _NAMED)) if m.place == named else m for m in members]
        base = next((member for member in members if member.place == named), None)
    members = sorted(members, key=lambda member: member is not base)  # others are copies of the base
    # A copy gets its original's rank: its own G may have moved without any change of predictions.
    copied = originals(members)
    distinct = sorted({original.place for original in copied})
    gaps, ratios = [members[i].gaps[metric] for i in distinct], [members[i].ratio for i in distinct]
    rank_by = "gap" if None in ratios else rank_by
    of_base = base.ratio if base else None
    standings = dict(zip(distinct, rank_gaps(gaps, ratios, rank_by, of_base), strict=True))
    against: dict[int, Against] = {}
    if of_base is not None:
        others = {i: r for i, m in enumerate(members) if i and (r := m.ratio) is not None}
        against = against_base(of_base, others, {i for i in others if copied[i].place == copied[0].place})
    names = [field.name for field in fields(Reading)]
    checkpoints = [
        Screened(
            **{name: getattr(reading, name) for name in names},
            family=family,
            scale=scale,
            copy_of=None if members[original.place] is reading else members[original.place].label,
            copy_rounded=not original.exact,
            ranked_by=rank_by,
            is_base=reading is base,
            against=against.get(place),
            **standings[original.place]._asdict(),
        )
        for place, (reading, original) in enumerate(zip(members, copied, strict=True))
    ]
    return sorted(checkpoints, key=lambda c: (c.rank, c.copy_of or c.label, c.copy_of is not None, c.label))


# --- clear orders ---------------------------------------------------------------------------------------


class Standing(NamedTuple):
    """The standing of one gap in a group; ``ties`` holds its own rank if another gap shares it."""

    rank: int
    ties: Ranks
    next: Next | None


def rank_gaps(
    gaps: Sequence[Gap],
    ratios: Sequence[Ratio | None] = (),
    rank_by: RankBy = "gap",
    base: Ratio | None = None,
) -> list[Standing]:
    """The standing of each gap in its group, in the given order; see the module's docstring.

    Ranks are by either figure, or by the mean rank of both; without all ratios by G. Two ratios
    below that of ``base`` have no clear order: rows do not show whether a model forgot or was taught wrong.
    """
    ratios = ratios or [None] * len(gaps)
    count = len(gaps)
    # `difference` refuses gaps of other tokens or another metric; checking one of them is enough.
    for gap in gaps:
        check_same_tokens(gap, gaps[0])
    means = np.array([gap.mean for gap in gaps])
    order = np.argsort(-means, kind="stable")
    keys = means
    if rank_by != "gap" and None not in ratios:
        keys = np.array([r.mean for r in ratios if r is not None])
        if rank_by == "both":
            keys = -np.add(rank_places(means.tolist()), rank_places(keys.tolist())) / 2
    means, keys = means[order], keys[order]
    places, line = np.array(rank_places(keys.tolist())), np.argsort(-keys, kind="stable").tolist()
    after = dict(pairwise(line))
    is_below = np.array([base is not None and r is not None and r.mean < base.mean for r in ratios])[order]
    # Without a ratio, a checkpoint counts as both above and below all others.
    bounds = [
        (math.inf, -math.inf) if r is None else (r.mean - r.rounding, r.mean + r.rounding) for r in ratios
    ]
    least, most = np.array(bounds).reshape(-1, 2)[order].T
    unclear = _unclear(means, [gaps[i] for i in order])
    standings: dict[int, Standing] = {}
    for at, i in enumerate(order):
        # In the order of G: those before it are better, those after it worse.
        tied = np.unpackbits(unclear[at], count=count).astype(bool)
        tied[:at] |= ~(least[:at] > most[at])
        tied[at + 1 :] |= ~(least[at] > most[at + 1 :])
        if is_below[at]:
            tied |= is_below
            tied[at] = False
        following = None
        if (behind := after.get(at)) is not None:
            step = difference(gaps[i], gaps[int(order[behind])])
            following = Next(step.mean, step.se, not tied[behind])
        standings[i] = Standing(int(places[at]), Ranks(places[tied]), following)
    return [standings[i] for i in range(count)]


def agree(better: Ratio | None, worse: Ratio | None) -> bool:
    """Whether the ratio allows an order: it agrees, or is not known for both."""
    return better is None or worse is None or better.above(worse)


def clear_above(champion: tuple[Gap, Ratio | None], others: Sequence[tuple[Gap, Ratio | None]]) -> list[bool]:
    """The checkpoints that are clearly above a champion of their group.

    Paired differences from the champion, Holm over ``others`` alone: a chance of at most 5 % that any is
    wrongly called above. It holds even if the champion was chosen as the best of many by G: a champion that
    is best only by the choice of tokens is harder to exceed. For *below* such a champion use
    :func:`rank_gaps`.

    Raises:
        GeometryError: For gaps of another metric or other tokens.
    """
    gap, ratio = champion
    gains = [difference(other, gap) for other, _ in others]
    clear = holm({i: gain.p for i, gain in enumerate(gains)})
    return [i in clear and gain.mean > 0 and agree(others[i][1], ratio) for i, gain in enumerate(gains)]


def against_base(base: Ratio, ratios: Mapping[K, Ratio], copies: Collection[K] = ()) -> dict[K, Against]:
    """Each ratio minus its base's, and the side of the base on which it clearly lies.

    A side is clear by a paired difference, corrected for all comparisons (Holm), that rounding cannot
    explain. Copies, and checkpoints with the base's rows bit for bit, are equal to it.
    """
    gains = {key: difference(ratio, base) for key, ratio in ratios.items()}
    clear = holm({key: gain.p for key, gain in gains.items()})
    against = {}
    for key, ratio in ratios.items():
        gain = gains[key]
        side: Side = "level"
        if key in copies or (len(base.marks) > 0 and np.array_equal(ratio.marks, base.marks)):
            side = "equal"
        elif key in clear and abs(gain.mean) > ratio.rounding_from(base):
            side = "above" if gain.mean > 0 else "below"
        against[key] = Against(gain.mean, gain.se, side)
    return against


def _unclear(means: Array, gaps: Sequence[Gap]) -> NDArray[np.uint8]:
    """Whether G leaves the order of each pair of (n,) gaps open: rows of packed bits, (n, n / 8)."""
    count = len(gaps)
    values = np.concatenate([side * math.sqrt(1 - 1 / side.shape[1]) for side in _sides(gaps)], axis=1)
    # The jackknife variance of a difference is the squared distance of these rows.
    values -= values.mean(axis=0)
    squares = np.square(values).sum(axis=1)
    largest = squares.max() or 1.0
    values, squares, means = values / math.sqrt(largest), squares / largest, means / math.sqrt(largest)

    def blocks() -> Iterator[tuple[slice, Array, NDArray[np.int32]]]:
        """Variances of some rows' differences from all, and their scales: the power of 2, the smallest 0."""
        step = max(1, _CELLS // count)
        for rows in (slice(start, start + step) for start in range(0, count, step)):
            variances = squares[rows, None] + squares - 2 * values[rows] @ values.T
            np.maximum(variances, 2.0**-_OCTAVES, out=variances)
            yield rows, variances, np.frexp(variances)[1] + (_OCTAVES - 1)

    scales = _OCTAVES + 3  # the largest variance is 4
    of_scale = np.zeros((count, scales))
    for rows, _, scale in blocks():
        cells = scale + scales * np.arange(len(scale))[:, None]
        of_scale[rows] = np.bincount(cells.ravel(), minlength=len(scale) * scales).reshape(-1, scales)
    # At each scale, a checkpoint is a share of those that count as one with it.
    shares = np.ones((count, scales), dtype=np.float32)
    shares[:, _NEAR:] /= np.cumsum(of_scale, axis=1)[:, :-_NEAR]
    used = of_scale.any(axis=0)
    # The mean variance among those that count as one: the best of many copies may be ahead by that much.
    of_scale[:, 0] -= 1  # each with itself
    sums = np.cumsum(of_scale * np.exp2(np.arange(scales) - _OCTAVES + 1), axis=1)
    among = np.zeros(scales)
    among[_NEAR:] = np.sqrt((sums / np.maximum(np.cumsum(of_scale, axis=1), 1)).mean(axis=0))[:-_NEAR]
    shares = shares[:, used]
    comparisons = (shares.sum(axis=0, dtype=np.float64) ** 2 - np.square(shares).sum(axis=0)) / 2
    freedom = min(side.shape[1] for side in _sides(gaps)) - 1
    bits = np.zeros((count, -(-count // 8)), dtype=np.uint8)
    points, left = np.zeros(scales), count * count
    for _ in range(_STEPS):
        levels = ERROR_RATE / np.maximum(comparisons, 1)
        points[used] = [student_quantile(1 - level / 2, freedom) for level in levels.tolist()]
        before, left, comparisons = left, 0, np.zeros(len(comparisons))
        for rows, variances, scale in blocks():
            errors = np.sqrt(variances) + among[scale]
            unclear = np.abs(means[rows, None] - means) <= points[scale] * errors
            unclear[np.arange(len(unclear)), np.arange(count)[rows]] = False
            bits[rows] = np.packbits(unclear, axis=1)
            left += int(unclear.sum())
            comparisons += ((unclear.astype(np.float32) @ shares) * shares[rows]).sum(axis=0) / 2
        if left == before:
            break
    return bits


def _sides(gaps: Sequence[Gap]) -> tuple[Array, Array]:
    """G without each token of T, then of R, minus its mean; one row per gap."""
    domain = np.stack([gap.left_out_domain for gap in gaps])
    reference = np.stack([gap.left_out_reference for gap in gaps])
    return domain - domain.mean(axis=1, keepdims=True), reference - reference.mean(axis=1, keepdims=True)


def flat_from(gaps: Sequence[Gap], level: float) -> int:
    """The first place after which no two gaps differ, at the two-sided level of one comparison."""
    sides = _sides(gaps)
    means = np.array([gap.mean for gap in gaps])
    point = student_quantile(1 - level / 2, min(side.shape[1] for side in sides) - 1)
    place = len(gaps) - 1
    while place > 0:
        parts = [(1 - 1 / s.shape[1]) * np.square(s[place - 1] - s[place:]).sum(axis=1) for s in sides]
        gains = np.abs(means[place - 1] - means[place:])
        if ((gains > point * np.sqrt(sum(parts))) & (gains > 0)).any():
            break
        place -= 1
    return place


# --- scales ---------------------------------------------------------------------------------------------

_TOLERANCE = 0.04
_IN_NAME = re.compile(r"(?:^|[-_./])(?:(\d+)x)?(\d+(?:\.\d+)?)([kmb])(?=$|[-_./])", re.IGNORECASE)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
# Published sizes of checkpoints, including the bundled families'. Counts alone cannot separate Pythia's 6.9B
# from the many 7B: its name does.
_KNOWN = (
    *("14M", "31M", "70M", "82M", "124M", "135M", "160M", "355M", "360M", "410M", "0.5B", "0.6B"),
    *("774M", "1B", "1.3B", "1.4B", "1.5B", "1.7B", "2B", "2.8B", "3B", "4B", "7B", "8B"),
    *("9B", "12B", "13B", "14B", "20B", "27B", "30B", "32B", "34B", "40B", "65B", "70B"),
    *("72B", "104B", "110B", "123B", "180B", "235B", "405B", "671B"),
)
_SCALES = {float(scale[:-1]) * _UNITS[scale[-1]]: scale for scale in _KNOWN}


def scale_names(readings: Sequence[Reading]) -> list[str]:
    """The scale of each of some checkpoints of one tokenizer, such as ``0.5B`` or ``70M``; ``unknown``.

    The rule, first match first:

    1. the scale that the family file states;
    2. a size in the repository's or folder's name (``-70m``, ``-7B``, ``-0.5B``), if the parameters that
       were counted are within a factor of two of it: ``Qwen2.5-7B`` has 7.6 billion;
    3. the scale of a sibling by rule 1 or 2 whose parameters are equal within 4 %;
    4. the count: the nearest scale of the bundled families within 4 %, else two digits.

    The count is all parameters without the vocabulary's padding (rows beyond the tokenizer's last id, in both
    vocabulary matrices). A fine-tune that adds or drops padding stays in the group of its siblings.
    """
    counts = [_counts(reading) for reading in readings]
    named = [
        reading.target.scale or _of_name(reading.repo, count)
        for reading, count in zip(readings, counts, strict=True)
    ]
    # Without the second matrix: an untied copy is still a sibling.
    siblings = {(math.log(c[-1]), name) for c, name in zip(counts, named, strict=True) if name and c}
    return [
        name or _of_sibling(count, siblings) or _of_count(count)
        for count, name in zip(counts, named, strict=True)
    ]


def _counts(reading: Reading) -> tuple[int, ...]:
    """The parameters without padding, and, if the matrices are not tied, also without the second matrix.

    Published names follow either: Pythia-70m has 70 million with both, Qwen2.5-7B 7.07 billion without its
    head; and a distilled sibling that was untied stays in its group. Empty if they are not known.
    """
    rows, width = reading.shape
    words = reading.resolution.vocabulary
    count = (reading.parameters or 0) - max(rows - words, 0) * width * (1 if reading.tied else 2)
    second = 0 if reading.tied else min(rows, words) * width
    return tuple(c for c in dict.fromkeys((count, count - second)) if c > 0)


def _of_name(name: str, counts: tuple[int, ...]) -> str | None:
    """The size in a name nearest to the count; None if there is none within a factor of two."""
    sizes: list[tuple[float, str]] = []
    for experts, number, unit in _IN_NAME.findall(re.split(r"[/\\]", name.rstrip("/\\"))[-1]):
        value = float(number) * _UNITS[unit.upper()] * int(experts or 1)
        if value:
            scale = f"{experts}x{float(number):g}{unit.upper()}" if experts else _spelled(value)
            sizes.append((min((abs(math.log(count / value)) for count in counts), default=0.0), scale))
    off, scale = min(sizes, default=(math.inf, ""))
    return scale if off <= math.log(2) else None


def _of_sibling(counts: tuple[int, ...], siblings: set[tuple[float, str]]) -> str | None:
    """The name of the sibling nearest in the logarithm of its count, within the tolerance."""
    place = math.log(counts[-1]) if counts else math.inf
    off, name = min(((abs(place - other), name) for other, name in siblings), default=(math.inf, ""))
    return name if off <= _TOLERANCE else None


def _of_count(counts: tuple[int, ...]) -> str:
    for count in counts:
        value = min(_SCALES, key=lambda known: abs(math.log(count / known)))
        if abs(count / value - 1) <= _TOLERANCE:
            return _SCALES[value]
    return _spelled(counts[-1]) if counts else "unknown"


def _spelled(value: float) -> str:
    """A size as the bundled families spell it, else in two digits (above 2 billion: in whole billions)."""
    if (known := _SCALES.get(value)) is not None:
        return known
    if value >= 2e9:
        return f"{value / 1e9:.0f}B" if value % 1e8 else f"{value / 1e9:g}B"
    if value >= 0.95e9:
        return f"{value / 1e9:.1f}B"
    unit = "M" if value >= 1e6 else "K"
    return f"{float(f'{value / _UNITS[unit]:.2g}'):g}{unit}"


# --- agreement ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How far two orders of the same checkpoints agree, by Spearman's rank correlation in [-1, 1].

    Scope *within groups* compares all groups, each only inside; *overall* is across groups, which the
    published evidence does not support. ``spearman_p`` is two-sided: the share of all orders of the
    accuracies whose correlation is at least as large; beyond nine checkpoints of orders drawn with a fixed
    seed, as (1 + as large) / (1 + drawn). Two checkpoints always give 1, three at least 1/3, reported
    as is.
    """

    scope: Literal["group", "within groups", "overall"]
    group: str
    n: int
    spearman: float = math.nan
    spearman_p: float = math.nan
    exact: bool = True
    permutations: int = 0
    reason: str = ""

    @classmethod
    def of(cls, scope: Any, group: str, strata: Sequence[tuple[list[float], list[float]]]) -> Agreement:
        """The agreement of gaps with accuracies; permutations stay inside each stratum."""
        n = sum(len(gaps) for gaps, _ in strata)
        figures = rank_agreement(strata)
        if figures is not None:
            return cls(scope, group, n, **figures._asdict())
        if all(len(gaps) < 2 for gaps, _ in strata):
            return cls(scope, group, n, reason="fewer than two checkpoints to compare")
        equal = "gaps" if all(len(set(gaps)) < 2 for gaps, _ in strata) else "accuracies"
        return cls(scope, group, n, reason=f"all {equal} are equal")


def agreements(gaps: Sequence[float], accuracies: Sequence[float], groups: Sequence[str]) -> list[Agreement]:
    """Agreement per group in order of appearance; with several groups also *within groups* and *overall*.

    >>> [line.spearman for line in agreements([1.0, 2.0, 3.0], [10, 30, 20], ["7B"] * 3)]
    [0.5]
    """
    members: dict[str, tuple[list[float], list[float]]] = {group: ([], []) for group in groups}
    for gap, accuracy, group in zip(gaps, accuracies, groups, strict=True):
        if math.isfinite(gap) and math.isfinite(accuracy):
            members[group][0].append(gap)
            members[group][1].append(accuracy)
    lines = [Agreement.of("group", group, [pair]) for group, pair in members.items()]
    if len(members) > 1:
        everything = (
            [gap for xs, _ in members.values() for gap in xs],
            [accuracy for _, ys in members.values() for accuracy in ys],
        )
        lines.append(Agreement.of("within groups", "", list(members.values())))
        lines.append(Agreement.of("overall", "", [everything]))
    return lines
