"""Do gaps rank checkpoints as accuracies do? Rank correlations with permutation p-values.

Only accuracies that somebody supplied enter. Checkpoints are ranked inside groups (family and scale), so the
answer has one line per group, one over all groups that compares only inside them, and one across them all,
which the published evidence does not support.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import UsageError
from lmeval_screener.yaml_fields import nearest

Scope = Literal["group", "within groups", "overall"]
_Integers = NDArray[np.int64]

# 9! = 362,880 orders are enumerated; larger groups are sampled.
_EXACT_UP_TO = 9
_DRAWS = 9_999
_SEED = 20260501


@dataclass(frozen=True)
class Agreement:
    """How far two orders of the same checkpoints agree.

    Attributes:
        scope: ``group`` (one group), ``within groups`` (all groups, compared only inside each), ``overall``.
        group: The group's name; empty for the other scopes.
        n: Checkpoints that have both a gap and an accuracy.
        spearman: Rank correlation in [-1, 1]: 1 same order, 0 no relation, -1 opposite. NaN where undefined.
            *Within groups*: the same sum of products over ranks inside the groups.
        kendall: Tau-b in [-1, 1]: share of concordant minus discordant pairs, corrected for ties. NaN where
            undefined. *Within groups*: over the pairs inside groups.
        spearman_p: Two-sided: the share of all orders of the accuracies whose |Spearman| is at least as
            large. Two checkpoints always give 1, three give at least 1/3: it is reported as it is.
        kendall_p: The same for tau-b.
        exact: All orders were enumerated (groups of up to nine). Otherwise ``permutations`` were drawn with a
            fixed seed, and p = (1 + as large) / (1 + drawn).
        permutations: Orders that were enumerated or drawn.
        reason: Why the figures are NaN; empty where they are not.
    """

    scope: Scope
    group: str
    n: int
    spearman: float
    kendall: float
    spearman_p: float
    kendall_p: float
    exact: bool
    permutations: int
    reason: str = ""


def agreement(gaps: Sequence[float], accuracies: Sequence[float], groups: Sequence[str]) -> list[Agreement]:
    """Agreement of gaps with accuracies, per group and overall.

    Args:
        gaps: One gap per checkpoint; NaN leaves the checkpoint out.
        accuracies: One accuracy per checkpoint, in any unit; NaN leaves the checkpoint out.
        groups: The group that each is ranked in.

    Returns:
        One line per group in order of appearance; with more than one group also *within groups* and
        *overall*.

    >>> [line.spearman for line in agreement([1.0, 2.0, 3.0], [10, 30, 20], ["7B"] * 3)]
    [0.5]
    """
    if not len(gaps) == len(accuracies) == len(groups):
        raise ValueError(f"expected equal lengths, got {len(gaps)}, {len(accuracies)} and {len(groups)}")
    members: dict[str, tuple[list[float], list[float]]] = {group: ([], []) for group in groups}
    for gap, accuracy, group in zip(gaps, accuracies, groups, strict=True):
        if math.isfinite(gap) and math.isfinite(accuracy):
            members[group][0].append(gap)
            members[group][1].append(accuracy)
    lines = [_line("group", group, [pair]) for group, pair in members.items()]
    if len(members) > 1:
        everything = (
            [x for xs, _ in members.values() for x in xs],
            [y for _, ys in members.values() for y in ys],
        )
        lines.append(_line("within groups", "", list(members.values())))
        lines.append(_line("overall", "", [everything]))
    return lines


def _line(scope: Scope, group: str, strata: list[tuple[list[float], list[float]]]) -> Agreement:
    """One line of the result; orders are permuted inside each stratum."""
    n = sum(len(xs) for xs, _ in strata)
    used = [(_centred_ranks(xs), _centred_ranks(ys)) for xs, ys in strata if len(xs) > 1]
    size_x, size_y = (sum(int(pair[side] @ pair[side]) for pair in used) for side in (0, 1))
    if not used or not size_x or not size_y:
        reason = (
            "fewer than two checkpoints to compare"
            if not used
            else f"all {'accuracies' if size_x else 'gaps'} are equal"
        )
        return Agreement(scope, group, n, math.nan, math.nan, math.nan, math.nan, True, 0, reason)
    signs = [(_signs(x), _signs(y)) for x, y in used]
    pairs_x, pairs_y = (sum(int(np.abs(pair[side]).sum()) for pair in signs) for side in (0, 1))
    products = sum(int(x @ y) for x, y in used)
    concordance = sum(int((x * y).sum()) for x, y in signs)
    exact = all(len(x) <= _EXACT_UP_TO for x, _ in used)
    spearman_p, kendall_p = _p_values(used, signs, abs(products), abs(concordance), exact)
    return Agreement(
        scope,
        group,
        n,
        products / math.sqrt(size_x * size_y),
        concordance / math.sqrt(pairs_x * pairs_y),
        spearman_p,
        kendall_p,
        exact,
        math.prod(math.factorial(len(x)) for x, _ in used) if exact else _DRAWS,
    )


def _p_values(
    ranks: list[tuple[_Integers, _Integers]],
    signs: list[tuple[_Integers, _Integers]],
    products: int,
    concordance: int,
    exact: bool,
) -> tuple[float, float]:
    """Two-sided p of both statistics' absolute values, which are integers here, so nothing is rounded."""
    rng = np.random.default_rng(_SEED)
    spearman_null, kendall_null = [], []
    for (x, y), (signs_x, signs_y) in zip(ranks, signs, strict=True):
        orders = (
            _all_orders(len(x)) if exact else rng.permuted(np.tile(np.arange(len(x)), (_DRAWS, 1)), axis=1)
        )
        spearman_null.append(y[orders] @ x)
        kendall_null.append(
            np.array([(signs_x * signs_y[np.ix_(order, order)]).sum() for order in orders], dtype=np.int64)
            if len(x) > _EXACT_UP_TO
            else _concordances(signs_x, signs_y, orders)
        )
    if not exact:
        drawn = [np.sum(null, axis=0) for null in (spearman_null, kendall_null)]
        large = [int((np.abs(drawn[0]) >= products).sum()), int((np.abs(drawn[1]) >= concordance).sum())]
        return (1 + large[0]) / (1 + _DRAWS), (1 + large[1]) / (1 + _DRAWS)
    return _share(spearman_null, products), _share(kendall_null, concordance)


def _share(nulls: list[_Integers], least: int) -> float:
    """Share of all combinations of the strata's orders whose summed statistic is at least ``least``."""
    total = Counter({0: 1})
    for null in nulls:
        values, counts = np.unique(null, return_counts=True)
        step: Counter[int] = Counter()
        for before, ways in total.items():
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                step[before + value] += ways * count
        total = step
    return sum(ways for value, ways in total.items() if abs(value) >= least) / total.total()


def _concordances(signs_x: _Integers, signs_y: _Integers, orders: _Integers) -> _Integers:
    """Kendall's numerator (each pair twice) for every order, pair by pair."""
    total = np.zeros(len(orders), dtype=np.int64)
    for i, j in itertools.combinations(range(len(signs_x)), 2):
        if signs_x[i, j]:
            total += signs_x[i, j] * signs_y[orders[:, i], orders[:, j]]
    return 2 * total


def _all_orders(n: int) -> _Integers:
    """All orders of n things, shape (n!, n): built by inserting n - 1 at every place of the shorter ones."""
    orders = np.zeros((1, 1), dtype=np.int64)
    for last in range(1, n):
        orders = np.concatenate([np.insert(orders, place, last, axis=1) for place in range(last + 1)])
    return orders


def _centred_ranks(values: list[float]) -> _Integers:
    """Twice the mean rank minus n + 1: integers that sum to zero, ties shared."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    above = (array[None, :] > array[:, None]).sum(axis=1)
    return np.asarray(below - above, dtype=np.int64)


def _signs(values: _Integers) -> _Integers:
    return np.asarray(np.sign(values[:, None] - values[None, :]), dtype=np.int64)


def accuracies_from_file(path: str | Path, checkpoints: Sequence[tuple[str, str | None]]) -> list[float]:
    """Accuracies from a CSV file with the columns ``repo``, ``accuracy`` and, optionally, ``revision``.

    Args:
        path: The file. A repo may also be written ``repo@revision``.
        checkpoints: (repo, requested revision) of every checkpoint that was asked for.

    Returns:
        One accuracy per checkpoint, in their order; NaN for those that the file leaves out.

    Raises:
        UsageError: The file can't be read or lacks a column; a repo or revision was not asked for, is
            there twice, or needs its revision named; an accuracy is not a finite number. The message names
            the line.
    """
    places: dict[str, dict[str | None, int]] = {}
    for position, (repo, revision) in enumerate(checkpoints):
        places.setdefault(repo, {})[revision] = position
    found = [math.nan] * len(checkpoints)
    for line, row in _rows(path):
        place = f"{path}: line {line}"
        repo, revision = row["repo"], row.get("revision") or None
        if repo not in places and revision is None and "@" in repo:
            repo, revision = repo.rsplit("@", 1)
        if repo not in places:
            raise UsageError(
                f"{place}: expected a repo that is screened, got {repo!r}{nearest(repo, places)}; screened: "
                + ", ".join(places)
            )
        revisions = places[repo]
        if revision is None and None not in revisions and len(revisions) > 1:
            raise UsageError(
                f"{place}: {repo} is screened at {len(revisions)} revisions; name one in `revision`"
            )
        if revision is None and None not in revisions:
            revision = next(iter(revisions))
        if revision not in revisions:
            names = [name or "the main branch" for name in revisions]
            raise UsageError(
                f"{place}: {repo} is not screened at {revision!r}{nearest(str(revision), names)}"
            )
        position = revisions[revision]
        if math.isfinite(found[position]):
            raise UsageError(f"{place}: {repo} is there twice; expected one accuracy per checkpoint")
        found[position] = _accuracy(row["accuracy"], place)
    return found


def _rows(path: str | Path) -> list[tuple[int, dict[str, str]]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            for column in ("repo", "accuracy"):
                if column not in reader.fieldnames:
                    raise UsageError(
                        f"{path}: expected a first line with repo, accuracy and optionally revision, "
                        f"got {', '.join(reader.fieldnames) or 'nothing'}"
                    )
            rows = []
            for row in reader:
                if "" in row:
                    raise UsageError(
                        f"{path}: line {reader.line_num}: expected {len(reader.fieldnames)} values"
                    )
                rows.append((reader.line_num, {key: value.strip() for key, value in row.items()}))
            return rows
    except OSError as error:
        raise UsageError(f"{path}: expected a readable CSV file, got {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: expected a CSV file in UTF-8, got: {error}") from error


def _accuracy(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{place}: expected an accuracy that is a number, such as 49.8, got {text!r}")
    return value
