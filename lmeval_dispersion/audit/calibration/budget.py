"""``dispersion budget``: how many labelled documents an estimate without labels is worth on a run.

Labels of k documents, drawn at random without replacement, estimate an accuracy by their mean. Where scores
are right or wrong the number of right ones is hypergeometric, and the expected error and the interval of the
estimate are exact sums over its distribution. Other scores have the same mean squared error by its closed
form v (1/k - 1/n) (Cochran, Sampling Techniques, 1977, 2.6); their absolute error and interval are those of
draws.

Estimates without labels are those of :mod:`.calibrator`, each judged on slices that its fit did not see, and
mean confidence and ATC as they are, ATC with the threshold of the other slices' labels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.answers import answers_report
from lmeval_dispersion.audit.calibration import shrinkage
from lmeval_dispersion.audit.calibration.calibrator import LabelledPairs, labelled_pairs
from lmeval_dispersion.audit.calibration.features import CLUSTERS, FEATURES
from lmeval_dispersion.audit.reports.charts import worth_chart
from lmeval_dispersion.audit.reports.report import plural, report_json
from lmeval_dispersion.audit.run import Run, read_run
from lmeval_dispersion.options import (
    Output,
    add_examples,
    add_layer,
    add_one_slice,
    add_output,
    add_seed,
)
from lmeval_dispersion.report import Column, Document, Facts, Note, Part, Section, Table

Array = NDArray[np.float64]

FORMAT = "dispersion-budget/1"
LABELS = (10, 20, 50, 100, 200, 500, 1000)
_DRAWS = 4000  # of scores between right and wrong
TRIVIAL, EVERY = "labelled accuracy alone", "all features together"
_HALF_WIDTH = 5.0  # points, in the sentence on the whole run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``dispersion budget``."""
    parser.add_argument(
        "run", metavar="RUN", help="folder of a finished run (its store), or of several of one model"
    )
    add_one_slice(parser, default=None, otherwise=f"subject; {CLUSTERS} where too few")
    add_layer(parser)
    add_output(parser)
    add_seed(parser)
    add_examples(parser, "RUN", "RUN --slice category -o budget.html")


def run_budget(args: argparse.Namespace) -> int:
    """Run ``dispersion budget``."""
    output = Output.of(args)
    run = read_run(args.run, args.layer)
    output.write(budget_document(budget_report(run, by=args.slice, seed=args.seed)))
    return 0


def budget_report(run: Run, *, by: str | None = None, seed: int = 0) -> dict[str, Any]:
    """What labels would have told of this run's accuracy, and what dispersion, confidence and ATC are worth.

    Raises:
        UsageError: Too few labelled documents or slices, or labels all right or all wrong.
    """
    prepared = labelled_pairs(run, by=by, seed=seed)
    scores = run.score[run.labelled]
    rng = np.random.default_rng(seed)
    of_slices = [run.score[rows] for rows in prepared.parts]
    ks = [k for k in LABELS if k < len(scores)]
    largest = max(map(len, of_slices))
    about = run.describe()
    return {
        "format": FORMAT,
        "run": {key: about[key] for key in ("model", "revision", "layer", "tasks")},
        "by": prepared.slicing.by,
        "slices": len(of_slices),
        "documents_a_slice": [min(map(len, of_slices)), largest],
        "documents": len(scores),
        "accuracy": float(scores.mean()),
        "cautions": answers_report(run)["cautions"],
        "whole": [{"labels": k, **label_error(scores, k, rng)} for k in ks],
        "a_slice": [{"labels": k, **_slice_error(of_slices, k, rng)} for k in LABELS if k < largest],
        "estimators": _estimators(run, prepared, seed),
        "enough_for_five_points": _enough(scores),
        "seed": seed,
    }


def label_error(scores: Array, k: int, rng: np.random.Generator) -> dict[str, float]:
    """How the mean of ``k`` scores, drawn from ``scores`` (n,) without replacement, is off the mean of all.

    Returns:
        ``mae`` and ``rmse`` in points, ``low`` and ``high``: the estimates between which 95 % of draws lie.
    """
    n = len(scores)
    k = min(k, n)
    mean = float(scores.mean())
    variance = float(scores.var(ddof=1)) * (1 / k - 1 / n) if n > 1 else 0.0
    if np.isin(scores, (0.0, 1.0)).all():
        from scipy.stats import hypergeom

        law = hypergeom(n, int(scores.sum()), k)
        values = np.arange(k + 1)
        mae = float(law.pmf(values) @ np.abs(values / k - mean))
        low, high = float(law.ppf(0.025)) / k, float(law.ppf(0.975)) / k
    else:
        drawn = np.array([rng.choice(scores, size=k, replace=False).mean() for _ in range(_DRAWS)])
        mae = float(np.abs(drawn - mean).mean())
        low, high = map(float, np.quantile(drawn, [0.025, 0.975]))
    return {"mae": 100 * mae, "rmse": 100 * math.sqrt(variance), "low": low, "high": high}


def _slice_error(slices: Sequence[Array], k: int, rng: np.random.Generator) -> dict[str, float]:
    """Mean over slices of the error of ``k`` labels each; smaller slices have all their labels."""
    found = [label_error(scores, k, rng) for scores in slices]
    return {
        "mae": float(np.mean([row["mae"] for row in found])),
        "rmse": math.sqrt(float(np.mean([row["rmse"] ** 2 for row in found]))),
        "whole_slices": sum(len(scores) <= k for scores in slices),
    }


def _enough(scores: Array) -> int:
    """Labels of the whole run whose mean is within 5 points in 95 % of draws, by the normal law."""
    n, variance = len(scores), float(scores.var(ddof=1))
    target = (_HALF_WIDTH / 100 / 1.959964) ** 2
    return min(n, math.ceil(variance / (target + variance / n)))


def _estimators(run: Run, prepared: LabelledPairs, seed: int) -> list[dict[str, Any]]:
    """Errors of every estimate on slices held out, and the labels a slice that it is worth."""
    pairs, names = prepared.pairs, prepared.names
    trivial = shrinkage.cross_fitted(pairs, []).estimate
    every = shrinkage.cross_fitted(pairs, shrinkage.families(len(names))).estimate
    found = {f"{name}": shrinkage.cross_fitted(pairs, [(j,)]).estimate for j, name in enumerate(names)}
    rows = [_judged(EVERY, pairs, every, trivial, seed)]
    rows += [
        _judged(f"{FEATURES[name]}, calibrated", pairs, estimate, trivial, seed, name)
        for name, estimate in found.items()
    ]
    confidence = run.confidence.top_probability
    if not np.isnan(confidence[run.labelled]).any():
        mean = np.array([confidence[part].mean() for part in prepared.parts])
        rows.append(_judged("mean confidence, as it is", pairs, mean, trivial, seed))
        rows.append(_judged("ATC, as it is", pairs, _atc(run, prepared), trivial, seed))
    rows.append(_judged(TRIVIAL, pairs, trivial, trivial, seed))
    return rows


def _atc(run: Run, prepared: LabelledPairs) -> Array:
    """Share of each slice above the confidence threshold that gives the other slices' accuracy.

    Source: Garg et al., "Leveraging unlabeled data to predict out-of-distribution performance", ICLR 2022.
    """
    confidence, parts = run.confidence.top_probability, prepared.parts
    estimate = np.empty(len(parts))
    for i, part in enumerate(parts):
        others = np.concatenate([rows for j, rows in enumerate(parts) if j != i])
        threshold = np.quantile(confidence[others], 1 - run.score[others].mean())
        estimate[i] = (confidence[part] > threshold).mean()
    return estimate


def _judged(
    name: str, pairs: shrinkage.Pairs, estimate: Array, trivial: Array, seed: int, feature: str = ""
) -> dict[str, Any]:
    gain = shrinkage.gain(pairs, estimate, trivial)
    worth = shrinkage.worth(pairs, estimate, seed)
    return {
        "estimator": name,
        "feature": feature,
        "mae": gain.mae,
        "rmse": gain.rmse,
        "worth": worth.labels,
        "worth_low": worth.low,
        "worth_high": worth.high,
        "better": gain.better,
    }


def budget_document(found: Mapping[str, Any]) -> Document:
    """The budget as a report."""
    whole: list[Part] = [
        Table(
            found["whole"],
            [
                Column("labels", "Labels", "d"),
                Column("mae", "Expected error (points)", ".2f"),
                Column("low", "95 % of draws from", ".1%"),
                Column("high", "to", ".1%"),
            ],
            f"What labels drawn from all {found['documents']} documents would have given",
            name="whole",
        )
    ]
    smallest, largest = found["documents_a_slice"]
    slices: list[Part] = [
        *([] if found["cautions"] else [worth_chart(found["estimators"], TRIVIAL)]),
        Table(
            found["estimators"],
            [
                Column("estimator", "Estimate"),
                Column("mae", "Mean error (points)", ".2f"),
                Column("rmse", "RMSE", ".2f", drop=1),
                Column("worth", "Worth labels a slice", ".0f"),
                Column("worth_low", "95 % from", ".0f"),
                Column("worth_high", "to", ".0f"),
                Column("better", "Beats the labelled accuracy", drop=2),
            ],
            f"Estimates of {found['slices']} {plural(found['by'])} of {smallest} to {largest} documents, "
            "each by a fit that did not see it",
            name="estimators",
        ),
        Table(
            found["a_slice"],
            [
                Column("labels", "Labels a slice", "d"),
                Column("mae", "Expected error (points)", ".2f"),
                Column("rmse", "RMSE", ".2f"),
                Column("whole_slices", "Slices with no more", "d", hint="They have all labels: no error."),
            ],
            "What labels drawn from each slice would have given",
            name="labels",
        ),
    ]
    return Document(
        title=f"What labels are worth: {found['run']['model']}",
        answer=budget_sentences(found),
        sections=[
            Section(
                "",
                [Facts({"Layer": found["run"]["layer"]}), *(Note(c, "warning") for c in found["cautions"])],
            ),
            Section("The accuracy of slices", slices),
            Section("The accuracy of the whole run", whole),
        ],
        limits=[
            "A worth holds for this model, layer, task and these slices: on other data it may be nothing.",
            "Labels also check the estimate; an estimate without labels has nothing that checks it.",
        ],
        rows=found["estimators"],
        contract=lambda: f"{report_json(found)}\n",
        float_format="%.7g",
        guide="docs/reference/audit.md",
    )


def budget_sentences(found: Mapping[str, Any]) -> list[str]:
    """What dispersion is worth in labels, what the others are, and what labels of the whole run give."""
    rows = {row["feature"] or row["estimator"]: row for row in found["estimators"]}
    trivial = rows[TRIVIAL]
    where = f"on {found['slices']} {plural(found['by'])} held out"
    sentences = []
    if found["cautions"]:
        sentences.append(f"{' '.join(found['cautions'])} What an estimate is worth is therefore not judged.")
    elif "dispersion" not in rows:
        sentences.append("All slices have the same dispersion: it is worth no label.")
    elif rows["dispersion"]["better"]:
        row = rows["dispersion"]
        sentences.append(
            f"Dispersion is worth {_worth(row)} a slice: {where} it is {row['mae']:.1f} points off, the "
            f"labelled accuracy alone {trivial['mae']:.1f} (worth {trivial['worth']:.0f})."
        )
    else:
        sentences.append(
            f"Dispersion is worth no labels here: {where} it is no better than the labelled accuracy alone "
            f"({rows['dispersion']['mae']:.1f} and {trivial['mae']:.1f} points off), which is worth "
            f"{_worth(trivial)} a slice."
        )
    if not found["cautions"]:
        others = [
            f"{name} {_worth(row)}"
            for name, row in (
                ("all features together", rows[EVERY]),
                ("mean confidence", rows.get("confidence")),
                ("ATC", rows.get("atc")),
            )
            if row is not None and row["better"]
        ]
        if others:
            sentences.append(f"Others that beat the labelled accuracy alone are worth: {', '.join(others)}.")
        else:
            sentences.append("Nothing else without labels beats the labelled accuracy alone.")
    if found["whole"]:
        last = found["whole"][min(3, len(found["whole"]) - 1)]
        sentences.append(
            f"For the whole run, {last['labels']} labels drawn at random would have said "
            f"{100 * last['low']:.1f} to {100 * last['high']:.1f} % (95 % of draws; it is "
            f"{100 * found['accuracy']:.1f} %), and about {found['enough_for_five_points']} are needed for "
            "± 5 points."
        )
    return sentences


def _worth(row: Mapping[str, Any]) -> str:
    return f"{row['worth']:.0f} labelled documents (95 % {row['worth_low']:.0f} to {row['worth_high']:.0f})"


COMMANDS = {"budget": (add_arguments, run_budget)}
