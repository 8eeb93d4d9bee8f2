"""Groups of comparable checkpoints, their places, and paired differences from a base.

A group has one tokenizer and one scale, and is ordered by the ratio, or by G; `chance` has the probability
that accuracy orders it as the ratio does.
"""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from lmeval_dispersion.statistics import holm, rank_agreement, student_quantile
from lmeval_screener.errors import ScreeningError
from lmeval_screener.figures import Gap, Ratio, difference, figures_left_out
from lmeval_screener.orders import BY_RATIO, UNSAID, Order
from lmeval_screener.screened import (
    TOKENIZER,
    Against,
    Reading,
    Screened,
    Side,
)
from lmeval_screener.targets.runs import step_key
from lmeval_screener.tokens.resolution import Resolution
from lmeval_screener.weights.copies import originals

_NAMED = (
    "taken as the base, because the other checkpoints name it as their base, and none names another "
    "(in adapter_config.json, or as base_model on the Hub)"
)

K = TypeVar("K", bound=Hashable)


# --- groups ---------------------------------------------------------------------------------------------


class CommonTokenizer(NamedTuple):
    """A tokenizer by which several checkpoints are compared.

    Attributes:
        first: The first reading with this tokenizer.
        rows: The tokens used in comparisons, each as its piece and the number of its row.
    """

    first: Reading
    rows: frozenset[tuple[str, int]]


def common_tokenizers(
    family: str | None, members: Sequence[Reading]
) -> dict[str, CommonTokenizer | None]:
    """Find the tokenizers by which checkpoints can be compared.

    Tokenizer A can replace tokenizer B if each token that A uses in comparisons is the same piece at
    the same row in B. A family is compared by one tokenizer, that of most of its checkpoints;
    checkpoints that were given by name may be compared by any number of tokenizers.

    Args:
        family: The family of the checkpoints; None if they were given by name.
        members: The readings of the checkpoints.

    Returns:
        Digest of each checkpoint's tokenizer -> the tokenizer that replaces it in comparisons
        (possibly itself); None if the family's tokenizer cannot replace it.
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
    """Return the error for a checkpoint whose tokenizer differs from its family's.

    Args:
        family: Name of the family.
        member: The reading of the checkpoint.
        common: A reading with the family's tokenizer.
    """
    missing = _rows(common.resolution) - _rows(member.resolution)
    pieces = sorted(piece for piece, _ in missing)
    shown = ", ".join(pieces[:5]) + (", ..." if len(pieces) > 5 else "")
    return ScreeningError(
        "TokenizerMismatch",
        f"left out of the ranking of {family} because its tokenizer differs from that of "
        f"{common.target.label} in {len(pieces)} of the tokens compared ({shown}); to screen it, "
        "give its own name instead of the family",
    )


def _rows(resolution: Resolution) -> frozenset[tuple[str, int]]:
    return frozenset((token.piece, token.id) for token in resolution.compared)


def ranked(
    members: Sequence[Reading],
    order: Order = UNSAID,
    bases: Collection[str] = (),
) -> list[Screened]:
    """Group checkpoints by family (or tokenizer) and scale, and rank each group.

    Groups are ranked by the ratio, and members without a ratio get no rank. A group is ranked by G
    instead if ``order`` or the family's file says so, or if a member has no ratio and fewer than
    two members other than the base have one.

    Args:
        members: The readings.
        order: Figure to rank by, and the distance used for G. A field that is not set is taken
            from the family's file, and otherwise from `BY_RATIO`.
        bases: Labels of base models. A group without any of them takes its :func:`named_base`.

    Returns:
        The checkpoints, group by group, each group best first.
    """
    families: dict[str, list[Reading]] = {}
    for reading in members:
        tokenizer = reading.common or reading.tokenizer
        name = reading.target.family or f"{TOKENIZER}{tokenizer.rpartition(':')[2][:8]}"
        families.setdefault(name, []).append(reading)
    groups: dict[tuple[str, str], list[Reading]] = {}
    for name, siblings in families.items():
        for reading, scale in zip(siblings, scale_names(siblings), strict=True):
            groups.setdefault((name, scale), []).append(reading)
    checkpoints: list[Screened] = []
    for (family, scale), siblings in groups.items():
        checkpoints += _ranked_group(family, scale, siblings, order, bases)
    return checkpoints


def named_base(members: Sequence[Reading]) -> str:
    """Return the name (``Reading.place``) of the base that all other members of a group name.

    Empty if there is no such base, or if it has fewer than two other members. Members that name no
    base, such as merged checkpoints, are accepted if they belong to training runs whose other
    members name the base, and if they are not the majority.
    """
    named = Counter(member.base for member in members if member.base != member.place)
    there = Counter(member.place for member in members)
    for base in sorted(named.keys() - {""}):
        others = len(members) - there[base]
        if others > 1 and others - named[base] <= named[""] and _is_base_of_others(base, members):
            return base
    return ""


def _is_base_of_others(base: str, members: Sequence[Reading]) -> bool:
    """Whether each member at another place names this base, or is of a training run that does."""
    naming: list[Reading] = []
    silent: list[Reading] = []
    for member in members:
        if member.place == base:
            continue
        if member.base not in ("", base):
            return False
        (naming if member.base else silent).append(member)
    if len(silent) > len(naming):
        return False
    runs = {member.training_and_step[0] for member in naming}
    return all(not runs.isdisjoint(member.possible_runs) for member in silent)


def _ranked_group(
    family: str, scale: str, members: list[Reading], order: Order, bases: Collection[str]
) -> list[Screened]:
    members, base = _base_first(members, bases)
    for member in members:
        order = order.over(member.target.order)
    order = order.over(BY_RATIO)
    rank_by = order.rank_by or "ratio"
    metric = order.metric or "cosine"
    ratios: dict[int, Ratio] = {}  # of candidates
    for place, member in enumerate(members):
        if member.ratio is not None and member is not base:
            ratios[place] = member.ratio
    if len(ratios) < 2 and any(member.ratio is None for member in members):
        rank_by = "gap"
    figures: list[float] = []
    for member in members:
        if rank_by == "gap":
            figures.append(member.gaps[metric].mean)
        elif member.ratio is not None:
            figures.append(member.ratio.mean)
        else:  # set aside, behind all others
            figures.append(-math.inf)
    # A copy shares its original's place: its own G may have moved without any change of predictions.
    copied = originals(members)
    values = [figures[original.place] for original in copied]
    of_places = set[float]()
    for value, original in zip(values, copied, strict=True):
        # The base, and those with its rows, of which rows say nothing, take no place.
        if base is None or original.place:
            of_places.add(value)
    places = sorted(of_places - {-math.inf})
    against: dict[int, Against] = {}
    if base is not None and base.ratio is not None:
        copies = [place for place in ratios if copied[place].place == copied[0].place]
        against = against_base(base.ratio, ratios, copies)
    checkpoints: list[Screened] = []
    for place, (reading, original) in enumerate(zip(members, copied, strict=True)):
        is_copy = original.copied is not None
        has_rows_of_other = original.place != place and not is_copy
        has_rows_of_base = place in against and against[place].side == "equal"
        checkpoint = Screened(
            **{field.name: getattr(reading, field.name) for field in fields(Reading)},
            family=family,
            scale=scale,
            rank=1 + len(places) - bisect.bisect_right(places, values[place]),
            copy_of=None if original.copied is None else members[original.copied].label,
            copy_rounded=is_copy and not original.exact,
            equal_rows_with=members[original.place].label if has_rows_of_other else None,
            same_rows=0 if has_rows_of_base else original.place,
            bodies=original.bodies,
            ranked_by=rank_by,
            metric=metric,
            is_base=reading is base,
            against=against.get(place),
        )
        checkpoints.append(checkpoint)

    def shown(c: Screened) -> tuple[object, ...]:
        after_base = base is None or c.same_rows != 0
        original = step_key(c.copy_of or c.label)
        is_copy = c.copy_of is not None
        own = step_key(c.label)
        return c.is_set_aside, c.rank, after_base, not c.is_base, original, is_copy, own

    return sorted(checkpoints, key=shown)


def _base_first(
    members: list[Reading], bases: Collection[str]
) -> tuple[list[Reading], Reading | None]:
    """A group with its base first, of which others are copies; and the base, None without one."""
    named = ""
    if not any(member.label in bases for member in members):
        named = named_base(members)
    base: Reading | None = None
    marked: list[Reading] = []
    for member in members:
        if named and member.place == named:
            member = replace(member, warnings=(*member.warnings, _NAMED))
        if base is None and (member.label in bases or (named and member.place == named)):
            base = member
        marked.append(member)
    return sorted(marked, key=lambda member: member is not base), base


# --- paired differences ---------------------------------------------------------------------------------


def against_base(
    base: Gap | Ratio, ratios: Mapping[K, Gap | Ratio], copies: Collection[K] = ()
) -> dict[K, Against]:
    """Compare each checkpoint's figure, its ratio or G, with the same figure of the base.

    A checkpoint is ``above`` or ``below`` its base if the paired difference is significant at 5 %,
    corrected for all comparisons (Holm); the difference of two ratios must also be larger than
    rounding explains. Otherwise the checkpoint is ``level``. Copies of the base are ``equal``, and
    so are checkpoints whose ratio was measured on the same rows bit for bit.

    Args:
        base: The figure of the base.
        ratios: Key -> the figure of a checkpoint.
        copies: Keys of the checkpoints that are copies of the base.

    Returns:
        Key -> the difference from the base, with its side.

    Raises:
        GeometryError: The figures are of different kinds, or over different numbers of tokens.
    """
    gains = {key: difference(ratio, base) for key, ratio in ratios.items()}
    clear = holm({key: gain.p for key, gain in gains.items()})
    against: dict[K, Against] = {}
    for key, ratio in ratios.items():
        gain = gains[key]
        side: Side = "level"
        rounding = 0.0
        is_equal = key in copies
        if isinstance(ratio, Ratio) and isinstance(base, Ratio):
            rounding = ratio.rounding_from(base)
            is_equal |= len(base.marks) > 0 and np.array_equal(ratio.marks, base.marks)
        if is_equal:
            side = "equal"
        elif key in clear and abs(gain.mean) > rounding:
            side = "above" if gain.mean > 0 else "below"
        against[key] = Against(gain.mean, gain.se, side)
    return against


def flat_from(gaps: Sequence[Gap | Ratio], level: float) -> int:
    """Return the first index after which, itself included, no two figures differ significantly.

    Args:
        gaps: Figures over the same tokens, in the order of the training steps.
        level: Two-sided significance level of the paired test of each pair.
    """
    sides = [side - side.mean(axis=1, keepdims=True) for side in figures_left_out(gaps)]
    means = np.array([gap.mean for gap in gaps])
    point = student_quantile(1 - level / 2, min(side.shape[1] for side in sides) - 1)
    place = len(gaps) - 1
    while place > 0:
        variances = np.zeros(len(gaps) - place)
        for side in sides:
            weight = 1 - 1 / side.shape[1]
            variances += weight * np.square(side[place - 1] - side[place:]).sum(axis=1)
        gains = np.abs(means[place - 1] - means[place:])
        if ((gains > point * np.sqrt(variances)) & (gains > 0)).any():
            break
        place -= 1
    return place


# --- scales ---------------------------------------------------------------------------------------------

_TOLERANCE = 0.04
_IN_NAME = re.compile(r"(?:^|[-_./])(?:(\d+)x)?(\d+(?:\.\d+)?)([kmb])(?=$|[-_./])", re.IGNORECASE)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
# Published sizes of checkpoints, including the bundled families'. Counts alone cannot separate Pythia's 6.9B
# from the many 7B, Qwen1.5's 1.8B from untied 1.5B, Phi's 2.7B and 3.8B from 2.8B and 4B: names
# and families do.
_KNOWN = """
14M 31M 70M 82M 124M 135M 160M 355M 360M 410M 0.5B 560M 0.6B 774M 1B 1.1B 1.3B 1.4B 1.5B 1.7B 2B
2.8B 3B 4B 7B 8B 9B 12B 13B 14B 20B 27B 30B 32B 34B 40B 65B 70B 72B 104B 110B 123B 176B 180B 235B
405B 671B
"""
_SCALES = {float(scale[:-1]) * _UNITS[scale[-1]]: scale for scale in _KNOWN.split()}


def scale_names(readings: Sequence[Reading]) -> list[str]:
    """Return the scale of each checkpoint, such as ``0.5B``; ``unknown`` if no rule applies.

    The checkpoints must share a tokenizer. The first rule that applies decides:

    1. the scale that the family file states;
    2. a size in the repository's or folder's name (``-70m``, ``-7B``, ``-0.5B``) that is within a
       factor of two of the counted parameters: ``Qwen2.5-7B`` has 7.6 billion;
    3. the scale, by rule 1 or 2, of a sibling whose parameters are equal within 4 %;
    4. the counted parameters: the nearest published size within 4 %, else the count rounded to two
       digits (to whole billions from 2 billion on).

    All parameters are counted except the vocabulary's padding (rows beyond the tokenizer's last id,
    in both vocabulary matrices), so that a fine-tune with more or less padding stays with its
    siblings.
    """
    counts = [_counts(reading) for reading in readings]
    names = [
        reading.target.scale or _of_name(reading.repo, count)
        for reading, count in zip(readings, counts, strict=True)
    ]
    siblings: dict[float, str] = {}
    for count, name in zip(counts, names, strict=True):
        if name and count:
            # Without the second matrix: an untied copy is still a sibling.
            place = math.log(count[-1])
            siblings[place] = min(name, siblings.get(place, name))
    places = sorted(siblings)
    return [
        name or _of_sibling(count, places, siblings) or _of_count(count)
        for count, name in zip(counts, names, strict=True)
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
    """The size in a name nearest to the count; None if none is within a factor of two."""
    sizes: list[tuple[float, str]] = []
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    for experts, number, unit in _IN_NAME.findall(last):
        value = float(number) * _UNITS[unit.upper()] * int(experts or 1)
        if not value:
            continue
        off = min((abs(math.log(count / value)) for count in counts), default=0.0)
        scale = _spelled(value)
        if experts:
            scale = f"{experts}x{float(number):g}{unit.upper()}"
        sizes.append((off, scale))
    off, scale = min(sizes, default=(math.inf, ""))
    return scale if off <= math.log(2) else None


def _of_sibling(
    counts: tuple[int, ...], places: Sequence[float], siblings: Mapping[float, str]
) -> str | None:
    """The name of the sibling nearest in the logarithm of its count, within the tolerance.

    ``places`` are the logarithms of ``siblings``, ascending.
    """
    if not counts:
        return None
    place = math.log(counts[-1])
    at = bisect.bisect_left(places, place)
    nearest = [(abs(place - other), siblings[other]) for other in places[max(at - 1, 0) : at + 1]]
    off, name = min(nearest, default=(math.inf, ""))
    return name if off <= _TOLERANCE else None


@cache
def _of_count(counts: tuple[int, ...]) -> str:
    for count in counts:
        value = min(_SCALES, key=lambda known: abs(math.log(count / known)))
        if abs(count / value - 1) <= _TOLERANCE:
            return _SCALES[value]
    return _spelled(counts[-1]) if counts else "unknown"


def _spelled(value: float) -> str:
    """A size as the bundled families spell it, else in two digits (above 2 billion: in whole billions)."""
    if value in _SCALES:
        return _SCALES[value]
    if value >= 2e9 and value % 1e8:
        return f"{value / 1e9:.0f}B"
    if value >= 2e9:
        return f"{value / 1e9:g}B"
    if value >= 0.95e9:
        return f"{value / 1e9:.1f}B"
    unit = "M" if value >= 1e6 else "K"
    return f"{float(f'{value / _UNITS[unit]:.2g}'):g}{unit}"


# --- agreement ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlation between a figure of checkpoints, such as G, and their accuracies.

    Attributes:
        scope: ``group`` for one group; ``within groups`` for checkpoints that are compared only
            inside their groups; ``overall`` across groups, which the published evidence does not
            support.
        group: Name of the group; empty for the other scopes.
        n: Number of checkpoints.
        spearman: The correlation, in [-1, 1]; NaN for fewer than two checkpoints, or if all figures
            or all accuracies are equal. Two checkpoints always give 1 or -1.
        spearman_p: Two-sided p-value of the correlation: the share of the permutations of the
            accuracies whose correlation is at least as large in absolute value; NaN without a
            correlation. Two checkpoints always give 1, three at least 1/3.
        exact: Whether all permutations were counted. In groups of more than nine checkpoints,
            permutations are drawn with a fixed seed, and the p-value is (1 + the number drawn with
            a correlation at least as large) / (1 + the number drawn).
        permutations: Number of permutations that were counted or drawn; 0 without a correlation.
        reason: Why the correlation is NaN; empty if it is a number.
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
    def of(
        cls, scope: Any, group: str, strata: Sequence[tuple[list[float], list[float]]]
    ) -> Agreement:
        """Compute the agreement of checkpoints' figures, such as G, with their accuracies.

        Args:
            scope: The scope, as in `Agreement`.
            group: Name of the group; empty for the other scopes.
            strata: For each group whose checkpoints are compared only with one another, their
                figures and their accuracies, all finite. For the p-value, accuracies are permuted
                only inside their group.
        """
        n = sum(len(gaps) for gaps, _ in strata)
        figures = rank_agreement(strata)
        if figures is not None:
            return cls(scope, group, n, **figures._asdict())
        if all(len(gaps) < 2 for gaps, _ in strata):
            return cls(scope, group, n, reason="fewer than two checkpoints to compare")
        equal = "figures" if all(len(set(gaps)) < 2 for gaps, _ in strata) else "accuracies"
        return cls(scope, group, n, reason=f"all {equal} are equal")


def agreements(
    gaps: Sequence[float], accuracies: Sequence[float], groups: Sequence[str]
) -> list[Agreement]:
    """Compute the agreement of checkpoints' figures with their accuracies in each group.

    Checkpoints whose figure or accuracy is not finite are left out.

    Args:
        gaps: G, or another figure, of each checkpoint.
        accuracies: Accuracy of each checkpoint.
        groups: Group of each checkpoint.

    Returns:
        One agreement per group, in order of appearance; with several groups, those *within groups*
        and *overall* follow.

    >>> [line.spearman for line in agreements([1.0, 2.0, 3.0], [10, 30, 20], ["7B"] * 3)]
    [0.5]
    """
    members: dict[str, tuple[list[float], list[float]]] = {group: ([], []) for group in groups}
    everything: tuple[list[float], list[float]] = ([], [])
    for gap, accuracy, group in zip(gaps, accuracies, groups, strict=True):
        if math.isfinite(gap) and math.isfinite(accuracy):
            for xs, ys in (members[group], everything):
                xs.append(gap)
                ys.append(accuracy)
    lines = [Agreement.of("group", group, [pair]) for group, pair in members.items()]
    if len(members) > 1:
        lines.append(Agreement.of("within groups", "", list(members.values())))
        lines.append(Agreement.of("overall", "", [everything]))
    return lines
