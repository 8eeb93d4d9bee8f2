"""Ranking: are the documents of lowest contribution the ones the model gets wrong?

Every signal is turned so that a low value means "probably wrong". AUROC is the probability that a wrong
document ranks below a right one (ties count half): 0.5 says nothing, 1 separates them. Its error and that
of a difference between two signals on the same documents are DeLong's.

Source: RD section 3.1; DeLong, DeLong and Clarke-Pearson, Biometrics 44 (1988).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.grouping import Group, by_band, by_value
from lmeval_dispersion.audit.run import Run
from lmeval_dispersion.audit.slices import wilson
from lmeval_dispersion.audit.trend import rank_correlations
from lmeval_dispersion.errors import UsageError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

SHARES = (1, 5, 10, 20, 30, 50)  # per cent of the documents looked at first
_Z = 1.959963984540054

CONTRIBUTION = "contribution"


class Auroc(NamedTuple):
    """Area under the ROC curve with DeLong's error and what a paired comparison needs.

    Attributes:
        value: In [0, 1].
        se: Standard error; NaN with a single right or wrong document.
        right: Placement of every right document among the wrong ones.
        wrong: Placement of every wrong document among the right ones.
    """

    value: float
    se: float
    right: Array
    wrong: Array


def auroc(signal: Array, right: Flags) -> Auroc:
    """AUROC of ``signal`` (n,), low for wrong, against ``right`` (n,).

    Raises:
        UsageError: All right or all wrong.
    """
    a, b = np.sort(signal[right]), np.sort(signal[~right])
    if not len(a) or not len(b):
        raise UsageError(
            f"ranking quality needs right and wrong answers, and all {len(right)} documents were answered "
            f"{'correctly' if len(a) else 'wrongly'}"
        )
    above = _share_below(b, signal[right])
    below = 1.0 - _share_below(a, signal[~right])
    variance = _variance(above) / len(above) + _variance(below) / len(below)
    return Auroc(float(above.mean()), float(np.sqrt(variance)), above, below)


def auroc_difference(first: Auroc, second: Auroc) -> tuple[float, float]:
    """AUROC of ``first`` minus ``second`` on the same documents, with its standard error."""
    variance = sum(
        _variance(x - y) / len(x) for x, y in ((first.right, second.right), (first.wrong, second.wrong))
    )
    return first.value - second.value, float(np.sqrt(variance))


def signals(run: Run) -> dict[str, Array]:
    """Every signal of a run, low for "probably wrong"; NaN where a document has none."""
    found = {CONTRIBUTION: run.points.contributions()}
    top, margin, entropy = run.confidence
    found |= {"top probability": top, "margin": margin, "entropy (negative)": -entropy}
    found |= {"query perplexity (negative)": -run.perplexity, "prompt length (negative)": -run.length}
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def ranking_report(run: Run) -> dict[str, Any]:
    """AUROC, accuracy by decile and error share of the low tail for every signal.

    Raises:
        UsageError: No labels, all right or all wrong, or fewer than two documents.
    """
    if not len(run.labelled):
        raise UsageError("ranking quality needs labelled documents, and none of these has a label")
    if len(run.points) < 2:
        raise UsageError("one document cannot be ranked")
    found = signals(run)
    table = [_signal_row(name, values, run) for name, values in found.items()]
    return {
        "documents": len(run.labelled),
        "signals": table,
        "against": _against(found, run),
        "confounds": confounds(run, found[CONTRIBUTION]),
    }


def _signal_row(name: str, values: Array, run: Run) -> dict[str, Any]:
    known = run.labelled[~np.isnan(values[run.labelled])]
    signal, right = values[known], run.right[known]
    try:
        area = auroc(signal, right)
    except UsageError:
        if name == CONTRIBUTION:
            raise
        reason = "its documents are all right, or all wrong"
        return {"signal": name, "documents": len(known), "missing": reason}
    order = np.argsort(signal, kind="stable")
    wrong = ~right[order]
    return {
        "signal": name,
        "documents": len(known),
        "auroc": area.value,
        "auroc_se": area.se,
        "auroc_low": max(area.value - _Z * area.se, 0.0),
        "auroc_high": min(area.value + _Z * area.se, 1.0),
        "deciles": _deciles(~wrong),
        "error_share": {
            str(share): float(wrong[: max(round(len(wrong) * share / 100), 1)].sum() / wrong.sum())
            for share in SHARES
        },
    }


def _deciles(right_in_order: Flags) -> list[dict[str, Any]]:
    """Accuracy of each tenth of the documents, lowest signal first."""
    parts = np.array_split(right_in_order, min(10, len(right_in_order)))
    rows = []
    for part in parts:
        accuracy = float(part.mean())
        low, high = wilson(accuracy, len(part))
        rows.append({"documents": len(part), "accuracy": accuracy, "low": low, "high": high})
    return rows


def _against(found: dict[str, Array], run: Run) -> list[dict[str, Any]]:
    """AUROC of the contribution minus that of every other signal, on the documents that have both."""
    rows = []
    for name, values in found.items():
        if name == CONTRIBUTION:
            continue
        known = run.labelled[~np.isnan(values[run.labelled])]
        right = run.right[known]
        if right.all() or not right.any():
            continue
        ours = auroc(found[CONTRIBUTION][known], right)
        difference, se = auroc_difference(ours, auroc(values[known], right))
        low, high = difference - _Z * se, difference + _Z * se
        rows.append(
            {
                "signal": name,
                "difference": difference,
                "low": low,
                "high": high,
                "verdict": "better" if low > 0 else "worse" if high < 0 else "not separated",
            }
        )
    return rows


def confounds(run: Run, contribution: Array) -> list[dict[str, Any]]:
    """What else the contribution follows: subject, length, perplexity and confidence.

    For each the AUROC of the contribution inside slices of it (five bands of a number), averaged with the
    number of (right, wrong) pairs as weights: what is left of the ranking once that is held about equal. For
    numbers also the Spearman correlation with the contribution; NaN for subjects, which have no order.
    """
    rows = []
    subjects = by_value(run.documents["subject"].tolist())
    if len(subjects) > 1:
        inside = _inside(subjects, contribution, run)
        rows.append({"quantity": "subject", "spearman": float("nan"), "auroc_within_bands": inside})
    candidates = {
        "prompt length": run.length,
        "query perplexity": run.perplexity,
        "top probability": run.confidence.top_probability,
    }
    for name, values in candidates.items():
        known = np.flatnonzero(np.isfinite(values))
        if len(known) < 10 or np.ptp(values[known]) == 0:
            continue
        rho = float(rank_correlations(values[known], contribution[known][None])[0])
        bands = by_band(np.where(np.isfinite(values), values, np.nan))
        inside = _inside(bands, contribution, run)
        rows.append({"quantity": name, "spearman": rho, "auroc_within_bands": inside})
    return rows


def _inside(groups: list[Group], contribution: Array, run: Run) -> float:
    total = weight = 0.0
    for group in groups:
        rows = group.rows[~np.isnan(run.score[group.rows])]
        right = run.right[rows]
        pairs = int(right.sum()) * int((~right).sum())
        if pairs:
            total += pairs * auroc(contribution[rows], right).value
            weight += pairs
    return total / weight if weight else float("nan")


def _share_below(ordered: Array, values: Array) -> Array:
    """Share of ``ordered`` that lies below each value, ties counted half."""
    sides = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray(sides / (2 * len(ordered)))


def _variance(values: Array) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else float("nan")
