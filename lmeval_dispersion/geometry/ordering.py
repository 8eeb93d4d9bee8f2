"""Which of several metrics orders slices best by what is known of them, and whether that is more than luck.

Two questions, each corrected for having looked at all metrics: does the best one order the slices at all
(permutations of the known numbers, largest correlation of any metric), and is it better than another one
(paired bootstrap over slices, Bonferroni over all pairs of metrics, since the best pair was picked).

The known numbers of small slices scatter more than those of large ones, and many metrics rise with the size,
so permutations alone find an order in up to 8 % of noise. Where sizes are given and differ, the known
numbers' deviations also change their signs at random, each at its own slice, and the larger p counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmeval_dispersion.geometry.spectrum import SPECTRUM
from lmeval_dispersion.statistics import (
    FEWEST_PAIRS,
    fisher,
    paired_correlations,
    rank_correlations,
    ranks,
    student_quantile,
)

Array = NDArray[np.float64]

DISPERSION = "dispersion"
_PERMUTATIONS, _RESAMPLES = 1999, 1000
_LEVEL = 0.05


def metric_label(name: str) -> str:
    """What a table calls a metric."""
    return SPECTRUM[name].label if name in SPECTRUM else name.replace("_", " ").capitalize()


def ordering(
    metrics: Mapping[str, ArrayLike], known: ArrayLike, sizes: ArrayLike | None = None, *, seed: int = 0
) -> dict[str, Any]:
    """How well each metric orders slices, the best of them, and how sure that is.

    Args:
        metrics: Name -> its value for every slice, shape (k,); metrics with an undefined value, and those
            that are the same for all slices, are left out.
        known: What the slices are ordered by, such as their accuracies, shape (k,), no NaN.
        sizes: Documents behind each of them, shape (k,); None: all alike.
        seed: Of permutations and resamples.

    Returns:
        ``{"missing": sentence}`` below eight slices or two metrics; else ``slices``, ``metrics`` (by falling
        size of their Spearman correlation: ``metric``, ``spearman``), ``best``, ``p`` (that the best of so
        many metrics correlates as much by chance), and ``against`` (every other metric: ``metric``,
        ``difference`` of the sizes of the correlations on Fisher's scale with ``low`` and ``high``, 95 % for
        all pairs of metrics together, and ``better``).
    """
    truth = np.asarray(known, dtype=np.float64)
    values = {name: np.asarray(row, dtype=np.float64) for name, row in metrics.items()}
    k = len(truth)
    if k < FEWEST_PAIRS:
        return {"missing": f"{FEWEST_PAIRS} slices are needed to tell metrics apart, got {k}"}
    values = {name: row for name, row in values.items() if np.isfinite(row).all() and np.ptp(row) > 0}
    if np.ptp(truth) == 0:
        return {"missing": "all slices have the same value"}
    if len(values) < 2:
        return {"missing": f"{len(values)} metrics are defined for all {k} slices, 2 needed"}
    names, rows = list(values), np.array(list(values.values()))
    rho = rank_correlations(truth, rows)
    best = int(np.abs(rho).argmax())
    rng = np.random.default_rng(seed)
    p = chance(rows, truth, None if sizes is None else np.asarray(sizes, dtype=np.float64), rng)
    draws = rng.integers(0, k, size=(_RESAMPLES, k))
    signs = np.where(rho < 0, -1.0, 1.0)
    # A correlation of 1 counts as the next smaller one: Fisher's scale has no end.
    most = 1 - 12 / (k * (k * k - 1))
    of_truth = ranks(truth[draws])
    resampled = np.array(
        [
            fisher(np.clip(sign * paired_correlations(ranks(row[draws]), of_truth), -most, most))
            for sign, row in zip(signs, rows, strict=True)
        ]
    )
    z = fisher(np.minimum(np.abs(rho), most))
    pairs = len(names) * (len(names) - 1) // 2
    point = student_quantile(1 - _LEVEL / (2 * pairs), k - 2)
    against = []
    for j in np.argsort(-np.abs(rho), kind="stable"):
        if j == best:
            continue
        difference = float(z[best] - z[j])
        apart = resampled[best] - resampled[j]
        apart = apart[np.isfinite(apart)]
        half = point * float(apart.std()) if len(apart) else float("nan")
        against.append(
            {
                "metric": names[j],
                "difference": difference,
                "low": difference - half,
                "high": difference + half,
                "better": bool(difference - half > 0),
            }
        )
    order = np.argsort(-np.abs(rho), kind="stable")
    return {
        "slices": k,
        "metrics": [{"metric": names[j], "spearman": float(rho[j])} for j in order],
        "best": names[best],
        "p": float(p),
        "against": against,
    }


def chance(
    rows: Array, known: Array, sizes: Array | None, rng: np.random.Generator, draws: int = _PERMUTATIONS
) -> float:
    """Probability that any of ``rows`` (m, k) correlates with ``known`` (k,) as the best does, by luck.

    Permutations of the known numbers are exact where slices are alike. With uneven ``sizes`` (k,) it is the
    larger of two: sign flips of the deviations from the pooled mean keep the scatter of each slice.
    """
    standard = _standard(rows)
    found = np.abs(standard @ _standard(known[None])[0]).max() - 1e-12

    def above(drawn: Array) -> float:
        return (1 + int((np.abs(_standard(drawn) @ standard.T).max(axis=1) >= found).sum())) / (draws + 1)

    p = above(rng.permuted(np.tile(known, (draws, 1)), axis=1))
    if sizes is None or np.ptp(sizes) == 0:
        return p
    middle = float(sizes @ known / sizes.sum())
    signs = rng.choice([-1.0, 1.0], size=(draws, len(known)))
    return max(p, above(middle + signs * (known - middle)))


def ordering_sentence(found: Mapping[str, Any], slices: str, known: str = "accuracy") -> str:
    """Which metric orders ``slices`` best by ``known``, and whether the difference is real."""
    if "missing" in found:
        return f"Which metric orders the {slices} best is not told: {found['missing']}."
    rho = {row["metric"]: row["spearman"] for row in found["metrics"]}
    count, best = len(rho), found["best"]
    text = f"{metric_label(best)} (Spearman {rho[best]:+.2f}"
    if found["p"] >= _LEVEL:
        return (
            f"None of {count} metrics is shown to order the {found['slices']} {slices} by {known}: the best "
            f"is {text}, p = {found['p']:.2f} for the best of {count})."
        )
    lead = f"{text}, p = {found['p']:.3f}) orders the {found['slices']} {slices} best by {known}"
    lead += f", of {count} metrics"
    if best != DISPERSION and DISPERSION in rho:
        one = next(row for row in found["against"] if row["metric"] == DISPERSION)
        beside = f"dispersion ({rho[DISPERSION]:+.2f})"
        if one["better"]:
            return f"{lead}; it is better than {beside}, more than luck and the choice of the best explain."
        return f"{lead}; that it is better than {beside} is not shown."
    better = [row["metric"] for row in found["against"] if row["better"]]
    if not better:
        return f"{lead}; that it is better than any of the others is not shown."
    if len(better) == count - 1:
        return f"{lead}; it is better than each of the others, more than luck explains."
    names = ", ".join(metric_label(name) for name in better)
    return f"{lead}; it is better than {names}, and not shown to be better than the others."


def _standard(rows: Array) -> Array:
    """Ranks of each row, centred and of length one; a row that is all the same is zero."""
    centred = ranks(rows) - (rows.shape[1] + 1) / 2
    length = np.sqrt(np.square(centred).sum(axis=1))[:, None]
    return np.asarray(centred / np.where(length > 0, length, 1))
