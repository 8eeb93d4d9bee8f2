"""Documents by contribution: are those of the lowest contribution the ones the model gets wrong?

Every signal is turned so that a low value means "probably wrong". AUROC is the probability that a wrong
document ranks below a right one (ties count half): 0.5 says nothing, 1 separates them. Inside subjects and
tasks only pairs of one subject count: a signal that only tells subjects apart has 0.5 there.

Source: RD section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lmeval_dispersion.auditing.answers import answers_report
from lmeval_dispersion.auditing.run import FEWEST, Run
from lmeval_dispersion.auditing.slices import Slice, by_band, strata
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.statistics import (
    auroc,
    auroc_bounds,
    auroc_difference,
    normal_point,
    rank_correlations,
    stratified_auroc,
    wilson,
)

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

SHARES = (1, 5, 10, 20, 30, 50)  # per cent of the documents looked at first

CONTRIBUTION = "contribution"


def signals(run: Run) -> dict[str, Array]:
    """Every signal of a run, low for "probably wrong"; NaN where a document has none."""
    scores = {CONTRIBUTION: run.vectors.contributions()}
    top, margin, entropy = run.confidence
    scores |= {"top probability": top, "margin": margin, "entropy (negative)": -entropy}
    scores |= {"query perplexity (negative)": -run.perplexity, "prompt length (negative)": -run.length}
    return {name: values for name, values in scores.items() if not np.isnan(values).all()}


@dataclass(frozen=True)
class RankedDocument:
    """One document by its contribution; None where the store knows nothing."""

    rank: int
    contribution: float
    percentile: float
    task: str
    doc_id: int
    subject: str | None
    category: str | None
    correct: float | None
    prediction: str | None
    top_probability: float | None
    query_perplexity: float | None
    text: str | None


def ranked_documents(run: Run) -> list[RankedDocument]:
    """Every document, lowest contribution first; ``percentile`` is in (0, 100].

    Raises:
        TooFewVectorsError: One document.
    """
    contribution = run.vectors.contributions()
    order = np.argsort(contribution, kind="stable")
    documents = run.documents.iloc[order]
    rank = np.arange(1, len(order) + 1)
    frame = pd.DataFrame(
        {
            "rank": rank,
            "contribution": contribution[order],
            "percentile": 100 * rank / len(rank),
            **{name: documents[name].to_numpy() for name in ("task", "doc_id", "subject", "category")},
            "correct": run.score[order],
            "prediction": documents["prediction"].to_numpy(),
            "top_probability": run.confidence.top_probability[order],
            "query_perplexity": run.perplexity[order],
            "text": documents["text"].to_numpy(),
        }
    ).astype(object)
    return [RankedDocument(*row) for row in frame.where(frame.notna(), None).itertuples(index=False)]


def ranking_report(run: Run, answers: dict[str, Any] | None = None) -> dict[str, Any]:
    """AUROC, accuracy by decile and error share of the low tail for every signal.

    Raises:
        UsageError: No labels, all right or all wrong, or fewer than two documents.
    """
    if not len(run.labelled):
        raise UsageError("ranking quality needs labelled documents, and none of these has a label")
    if len(run.vectors) < 2:
        raise UsageError("one document cannot be ranked")
    scores = signals(run)
    inside = strata(run)
    table = [_signal_row(name, values, run, inside) for name, values in scores.items()]
    return {
        "documents": len(run.labelled),
        "wrong": int((~run.right[run.labelled]).sum()),
        "cautions": (answers or answers_report(run))["cautions"],
        "signals": table,
        "best_other": _best_other(table),
        "against": _against(scores, run),
        "confounds": confounds(run, scores[CONTRIBUTION]),
    }


def _signal_row(name: str, values: Array, run: Run, inside: dict[str, list[Slice]]) -> dict[str, Any]:
    known = run.labelled[~np.isnan(values[run.labelled])]
    signal, right = values[known], run.right[known]
    try:
        area = auroc(signal, right)
    except UsageError:
        if name == CONTRIBUTION:
            raise
        reason = "its documents are all right, or all wrong"
        return {"signal": name, "documents": len(known), "missing": reason}
    if np.ptp(signal) == 0:
        return {"signal": name, "documents": len(known), "missing": "it is the same for all documents"}
    bounds = auroc_bounds(area.value, area.se, len(area.right), len(area.wrong))
    order = np.argsort(signal, kind="stable")
    wrong = ~right[order]
    return {
        "signal": name,
        "documents": len(known),
        "auroc": area.value,
        "auroc_se": area.se,
        "auroc_low": bounds.low,
        "auroc_high": bounds.high,
        # DeLong's error is too short where either side has few documents.
        "reliable": min(len(area.right), len(area.wrong)) >= FEWEST,
        "inside": {what: _inside(values, parts, run) for what, parts in inside.items()},
        "deciles": _deciles(~wrong),
        "error_share": {
            str(share): float(wrong[: max(round(len(wrong) * share / 100), 1)].sum() / wrong.sum())
            for share in SHARES
        },
    }


def _best_other(table: list[dict[str, Any]]) -> dict[str, Any]:
    """The signal of highest AUROC beside the contribution; its interval allows for the choice of the best."""
    rivals = [row for row in table if row["signal"] != CONTRIBUTION and row.get("reliable")]
    if not rivals:
        return {"missing": f"no other signal has {FEWEST} right and {FEWEST} wrong documents"}
    best = max(rivals, key=lambda row: float(row["auroc"]))
    # Where it is 1, the bound is that of 20 documents, the fewest that a reliable row has.
    low, high = auroc_bounds(best["auroc"], best["auroc_se"], FEWEST, FEWEST, normal_point(len(rivals)))
    return {"signal": best["signal"], "auroc": best["auroc"], "low": low, "high": high}


def _inside(values: Array, parts: list[Slice], run: Run) -> dict[str, Any]:
    """AUROC over the pairs of a right and a wrong document of one part, with its interval."""
    known = ~np.isnan(values) & ~np.isnan(run.score)
    area = stratified_auroc(values, run.right, [part.rows[known[part.rows]] for part in parts])
    if area is None:
        return {"missing": "no part has a right and a wrong document"}
    low, high = auroc_bounds(area.value, area.se, area.right, area.wrong)
    return {
        "auroc": area.value,
        "auroc_low": low,
        "auroc_high": high,
        "parts": area.strata,
        "pairs": area.pairs,
        "reliable": min(area.right, area.wrong) >= FEWEST,
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


def _against(signals: dict[str, Array], run: Run) -> list[dict[str, Any]]:
    """AUROC of the contribution minus that of every other signal, on the documents that have both.

    The intervals hold together: with contributions that are like every other signal, one of them leaves
    out 0 in 5 % of runs.
    """
    rows = []
    point = normal_point(len(signals) - 1)
    for name, values in signals.items():
        if name == CONTRIBUTION:
            continue
        known = run.labelled[~np.isnan(values[run.labelled])]
        right = run.right[known]
        if right.all() or not right.any() or np.ptp(values[known]) == 0:
            continue
        ours = auroc(signals[CONTRIBUTION][known], right)
        difference, se = auroc_difference(ours, auroc(values[known], right))
        enough = se > 0 and min(right.sum(), (~right).sum()) >= FEWEST
        half = point * se if enough else float("nan")
        low, high = difference - half, difference + half
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
    """What else the contribution follows: length, perplexity and confidence.

    For each the Spearman correlation with the contribution, and the AUROC of the contribution inside five
    bands of it, averaged with the number of (right, wrong) pairs as weights: what is left of the ranking
    once that is held about equal.
    """
    rows = []
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
        inside = _inside(contribution, by_band(np.where(np.isfinite(values), values, np.nan)), run)
        area = inside.get("auroc", float("nan"))
        rows.append({"quantity": name, "spearman": rho, "auroc_within_bands": area})
    return rows
