"""What an analysis found, in up to three sentences: what is told apart from chance and from the controls.

A claim about many layers, models or rows rests on bounds that hold for all of them together
(:mod:`lmeval_dispersion.laboratory.claims`); what they leave open is said to be open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lmeval_dispersion.laboratory.claims import (
    jackknife_bounds,
    log_ratios_left_out,
    places,
    student_bounds,
    text_trends,
)
from lmeval_dispersion.statistics import NORMAL_975, Array

_NO_CONTROL = (
    "No control was run; `--control untrained --control shuffled` shows what does not come from training."
)
_OPEN = "not told apart from 0"


# --- law ----------------------------------------------------------------------------------------------------


def law_answer(result: Any) -> list[str]:
    """Where r of perplexity and dispersion is told apart from 0 and from the controls, on the first text."""
    rows = result.correlations.query("measure == 'dispersion' and split == 'data'")
    controls = result.controls
    if controls is not None:
        controls = controls.query("measure == 'dispersion' and split == 'data'")
    kinds = list(dict.fromkeys(rows["perplexity"]))
    sentences = [_law_sentence(kinds[0], rows, controls)]
    if kinds[1:]:
        sentences.append(
            "Single tokens: " + "; ".join(_law_sentence(k, rows, controls) for k in kinds[1:]) + "."
        )
    if controls is None:
        sentences.append(_NO_CONTROL)
    return sentences


def _law_sentence(kind: str, every: pd.DataFrame, controls: pd.DataFrame | None) -> str:
    rows = every[every["perplexity"] == kind].set_index("layer")
    layers = list(rows.index)
    shown = "last" if "last" in layers else layers[-1]
    beside = None if controls is None else controls[controls["perplexity"] == kind]
    claims = [_claim(layers, rows, beside, sign) for sign in (-1, 1)]
    told = "; ".join(claim for claim in claims if claim) or _OPEN + (
        f" at any of {len(layers)} layers taken together" if len(layers) > 1 else ""
    )
    values = f"r {_of(rows.loc[shown])} at {shown}" if len(layers) > 1 else f"r {_of(rows.loc[shown])}"
    if beside is not None:
        there = beside[beside["layer"] == shown]
        values += "".join(f"; {row.control} {row.pearson:+.2f}" for row in there.itertuples())
    if kind.startswith("last@"):
        return f"after {kind.removeprefix('last@')}, r of log perplexity is {told} ({values})"
    return f"Whole segments: r of perplexity and dispersion is {told} ({values})."


def _claim(layers: list[str], rows: pd.DataFrame, controls: pd.DataFrame | None, sign: int) -> str:
    """Where r has this sign for sure, and from which controls it is not told apart there."""
    word = "negative" if sign < 0 else "positive"
    bound = rows["all_high" if sign < 0 else "all_low"] * sign
    sure = [layer for layer in layers if bound[layer] > 0]
    if not sure:
        return ""
    if controls is None:
        return f"{word} {places(sure, layers)}"
    apart = controls["apart_high" if sign < 0 else "apart_low"] * sign > 0
    alike = {layer: set[str]() for layer in sure}
    for layer, control, clear in zip(controls["layer"], controls["control"], apart, strict=True):
        if layer in alike and not clear:
            alike[layer].add(control)
    parts = []
    if clear_of_all := [layer for layer in sure if not alike[layer]]:
        names = " and ".join(dict.fromkeys(controls["control"]))
        parts.append(f"{word} {places(clear_of_all, layers)}, more so than {names}")
    for others in sorted({tuple(sorted(found)) for found in alike.values() if found}):
        which = [layer for layer in sure if tuple(sorted(alike[layer])) == others]
        parts.append(f"{word} {places(which, layers)}, but not told apart from {' and '.join(others)}")
    return "; ".join(parts)


def _of(row: Any) -> str:
    if not np.isfinite(row["pearson"]):
        return f"undefined: {row['reason']}"
    if not np.isfinite(row["low"]):
        return f"{row['pearson']:+.2f}, without an interval at {row['bins']} bins"
    return f"{row['pearson']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"


# --- sublayers ----------------------------------------------------------------------------------------------


def sublayers_answer(result: Any) -> list[str]:
    """The recommended key, or that there is none; what the kNN-LM says about it."""
    best = result.recommendation.iloc[0]
    lead = f"{best['layer']} lies above {best['second']} by {best['difference']:.4f}"
    if np.isfinite(best["margin"]):
        lead += f", {best['margin']:.1f} standard deviations of a draw of {best['segments']} segments"
        lead += f" ({best['draws_won']} of {best['draws']} draws)"
    else:
        lead += ", and a draw is the whole text, so nothing says how sure that is"
    if best["told_apart"]:
        sentences = [f"Key the datastore by {best['layer']}: {lead}."]
    else:
        sentences = [f"No recommendation: {best['layer']} and {best['second']} are not told apart ({lead})."]
    if result.knn is not None:
        sentences.append(_knn_sentence(result, best))
    return sentences


def _knn_sentence(result: Any, best: Any) -> str:
    differences = [
        (row.second, row.difference, row.low, row.high)
        if row.first == best["layer"]
        else (row.first, -row.difference, -row.high, -row.low)
        for row in result.knn_differences.itertuples()
        if best["layer"] in (row.first, row.second)
    ]
    shown = "; ".join(
        f"{d:+.4f} ({low:+.4f} to {high:+.4f}) against {name}" for name, d, low, high in differences
    )
    numbers = f"{best['layer']} costs {shown} nats a token"
    word = "recommendation" if best["told_apart"] else "order"
    return {
        "agrees": f"The measured kNN-LM agrees with this {word}: {numbers}.",
        "contradicts": f"The measured kNN-LM contradicts this {word}: {numbers}.",
    }.get(best["knn"], f"The measured kNN-LMs are not told apart: {numbers}.")


# --- condensation -------------------------------------------------------------------------------------------


def condensation_answer(result: Any) -> list[str]:
    """Whether tokens grow alike with depth, per model, beside its controls."""
    models = list(dict.fromkeys(result.summary["model"]))
    controls = [name for name in dict.fromkeys(result.summary["control"]) if name]
    found = [_trend(result.texts[result.texts["model"] == model], controls, len(models)) for model in models]
    if len(models) == 1:
        sentences = [f"Tokens of a text {found[0][1]} with depth: {found[0][0]}."]
    else:
        groups: dict[str, list[str]] = {}
        for model, (_, verdict) in zip(models, found, strict=True):
            groups.setdefault(verdict, []).append(model)
        first = "; ".join(f"{verdict} with depth in {_names(names)}" for verdict, names in groups.items())
        numbers = "; ".join(f"{m}: {shown}" for m, (shown, _) in zip(models, found, strict=True))
        sentences = [f"Tokens of a text {first}.", f"{numbers}."]
    return sentences if controls else [*sentences, _NO_CONTROL]


def _trend(texts: pd.DataFrame, controls: list[str], claims: int) -> tuple[str, str]:
    """A model's trend as numbers and as a verdict."""
    similarities = {
        control: frame.pivot(index="text", columns="depth", values="mean").to_numpy()
        for control, frame in texts.groupby("control")
    }
    trends = {control: text_trends(values) for control, values in similarities.items()}
    mine = trends[""]
    known = mine[np.isfinite(mine)]
    if len(known) < 2:
        return "no trend is defined", "show no trend"
    low, high = student_bounds(known, claims)
    shown = f"Spearman of a text's similarity and depth {known.mean():+.2f} ({low:+.2f} to {high:+.2f})"
    verdict = (
        "grow alike"
        if low > 0
        else "grow apart"
        if high < 0
        else "show no trend that is told apart from none"
    )
    if turn := low > 0 and _turn(similarities[""], claims):
        shown += f"; it rises to depth {turn} of {similarities[''].shape[1] - 1}, then falls"
    elif turn := high < 0 and _turn(-similarities[""], claims):
        shown += f"; it falls to depth {turn} of {similarities[''].shape[1] - 1}, then rises"
    alike = []
    for control in controls:
        other = trends[control]
        shown += (
            f"; {control} {np.nanmean(other):+.2f}" if np.isfinite(other).any() else f"; {control} undefined"
        )
        less, more = student_bounds(_finite(mine - other), claims * len(controls))
        if not (less > 0 if low > 0 else more < 0):
            alike.append(control)
    if low <= 0 <= high:
        return shown, verdict
    if turn:
        return shown, "show no steady trend"
    if alike:
        return shown, f"{verdict}, but no more than {' or '.join(alike)},"
    return shown, f"{verdict}, more so than {' and '.join(controls)}," if controls else verdict


def _turn(values: Array, claims: int) -> int:
    """The depth within the first two thirds from which values (texts, depths) fall for sure; 0 for none."""
    last = values.shape[1] - 1
    peak = int(values.mean(axis=0).argmax())
    if not 0 < peak <= last * 2 / 3:
        return 0
    # The peak is chosen among all depths, so the bound holds for each of them.
    fall = student_bounds(_finite(values[:, peak] - values[:, peak + 1 :].mean(axis=1)), claims * last)
    return peak if fall.low > 0 else 0


def _finite(values: Array) -> Array:
    return values[np.isfinite(values)]


# --- clusters -----------------------------------------------------------------------------------------------


def clusters_answer(result: Any) -> list[str]:
    """How far clusters lie apart in units of their own size, and which models differ in it from the first."""
    summary = result.summary
    layers = list(dict.fromkeys(summary["layer"]))
    layer = "last" if "last" in layers else layers[-1]
    rows = summary[summary["layer"] == layer]
    first, count = rows.iloc[0], int(rows["clusters"].iloc[0])
    if count < 3 or not np.isfinite(rows["ratio"]).all():
        return [f"{count} clusters at {layer}: a ratio of distances is not defined here."]
    values = "; ".join(
        f"{r.model} {r.ratio:.2f} ({r.ratio_low:.2f} to {r.ratio_high:.2f})" for r in rows.itertuples()
    )
    sentences = [f"Between over within {count} clusters at {layer}: {values}."]
    if len(rows) == 1:
        side = "further apart than" if first["ratio_low"] > 1 else "closer together than"
        sure = first["ratio_low"] > 1 or first["ratio_high"] < 1
        told = (
            f"Clusters lie {side} their members lie from their centre"
            if sure
            else ("The clusters' distances and the members' distances to their centre are not told apart")
        )
        return [f"{told}.", *sentences]
    each = {
        model: log_ratios_left_out(frame["within"].to_numpy(), frame["apart"].to_numpy())
        for model, frame in result.clusters[result.clusters["layer"] == layer].groupby("model")
    }
    more: list[str] = []
    less: list[str] = []
    alike: list[str] = []
    for row in rows.iloc[1:].itertuples():
        value = float(np.log(row.ratio / first["ratio"]))
        low, high = jackknife_bounds(value, each[row.model] - each[first["model"]], len(rows) - 1)
        (more if low > 0 else less if high < 0 else alike).append(str(row.model))
    parts = [
        f"{words} in {_names(names)}"
        for words, names in (
            ("further apart", more),
            ("closer together", less),
            ("not told apart", alike),
        )
        if names
    ]
    return [f"Against {first['model']}, clusters lie {'; '.join(parts)}.", *sentences]


# --- two studies --------------------------------------------------------------------------------------------


def told_apart(differences: pd.DataFrame) -> pd.Series[bool]:
    """Which differences leave out 0 with bounds that hold for all rows together.

    Each bound is moved outwards as a normal estimate's would be for Bonferroni's correction.
    """
    from statistics import NormalDist

    known = int(differences["difference"].notna().sum())
    factor = NormalDist().inv_cdf(1 - 0.025 / max(known, 1)) / NORMAL_975
    value = differences["difference"]
    below, above = (value - differences["low"]) * factor, (differences["high"] - value) * factor
    return (value > below) & (value > 0) | (-value > above) & (value < 0)


def comparison_answer(differences: pd.DataFrame, labels: Sequence[str], first: str, second: str) -> list[str]:
    """How many differences are sure, and the surest of each metric."""
    sure = told_apart(differences)
    head = f"{second} minus {first}"
    if not sure.any():
        return [f"{head}: none of {len(differences)} differences is told apart from 0."]
    width = ((differences["high"] - differences["low"]) / 2).clip(lower=1e-12)
    surest = (differences["difference"].abs() / width)[sure].groupby(differences["figure"][sure]).idxmax()
    shown = [
        f"{labels[place]} {row['difference']:+.4g} ({row['low']:+.4g} to {row['high']:+.4g})"
        for place, row in ((place, differences.loc[place]) for place in sorted(surest))
    ]
    count = int(sure.sum())
    verb = "is" if count == 1 else "are"
    return [
        f"{head}: {count} of {len(differences)} differences {verb} told apart from 0, all taken together.",
        f"The surest of each metric: {'; '.join(shown)}.",
    ]


def _names(names: Sequence[str]) -> str:
    shown = list(names) if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
