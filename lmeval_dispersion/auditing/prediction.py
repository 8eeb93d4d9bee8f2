"""The accuracy of the slices of a run, estimated by a calibrator, or why a slice has no estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing import shrinkage
from lmeval_dispersion.auditing.calibration import Calibration
from lmeval_dispersion.auditing.calibrator import (
    check_fits,
    check_worth,
    documents_digest,
    read_calibrator,
)
from lmeval_dispersion.auditing.charts import axis, dots
from lmeval_dispersion.auditing.features import (
    CLUSTERS,
    FEATURES,
    available_features,
    slice_features,
    slices_of,
    vector_clusters,
)
from lmeval_dispersion.auditing.run import Run
from lmeval_dispersion.auditing.selection import rows_of_ids, rows_where
from lmeval_dispersion.auditing.slices import Slice
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.report import Chart, Col, Report, Table
from lmeval_dispersion.statistics import student_quantile
from lmeval_dispersion.store import read_store

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

_ENDS = 5  # slices of each end that a short table shows
_KNOWN = {
    "transform": [{"filter": "isValid(datum.true)"}],
    "mark": {"type": "point", "shape": "cross", "angle": 45, "filled": True, "color": "var(--series-2)"},
    "encoding": {"x": axis("true")},
}


@dataclass(frozen=True)
class Prediction:
    """One slice; where it has no estimate, ``reason`` says why."""

    slice: Annotated[str, Col("Slice")]
    documents: Annotated[int, Col("Documents", "d", drop=4)]
    predicted: Annotated[float | None, Col("Estimate", ".3f")] = None
    low: Annotated[float | None, Col("from", ".3f")] = None
    high: Annotated[float | None, Col("to", ".3f")] = None
    true: Annotated[float | None, Col("True", ".3f", drop=3)] = None
    dispersion: Annotated[float | None, Col("Dispersion", ".4f", drop=2)] = None
    confidence: Annotated[float | None, Col("Confidence", ".3f", drop=5)] = None
    atc: Annotated[
        float | None,
        Col(
            "ATC",
            ".3f",
            hint="Share of documents more confident than the labelled accuracy's threshold.",
            drop=6,
        ),
    ] = None
    log_perplexity: Annotated[float | None, Col("Log perplexity", ".2f", drop=7)] = None
    prompt_tokens: Annotated[float | None, Col("Tokens", ".0f", drop=8)] = None
    reason: Annotated[str | None, Col("No estimate because", drop=1)] = None
    too_small: bool = False


@dataclass(frozen=True, repr=False)
class Predictions(Report):
    """The estimated accuracy of every slice, the whole first where there are several.

    Attributes:
        level: Of the intervals, in (0, 1).
        exchangeable: Whether the slices were made as the labelled ones, which the intervals need.
        shifted: The feature in which the slices differ from the labelled ones as a whole, else None.
        beats_trivial: Whether the calibrator beat the labelled accuracy alone.
        used: The features that the estimates are read off.
        validation, worth: Of the calibrator.
    """

    template = "predictions.jinja"
    schema = "dispersion-predictions/3"
    libraries = ("numpy", "pandas")
    guide = "docs/reference/audit.md"

    model: str
    layer: str
    by: str
    labelled_accuracy: float
    notes: Sequence[str]
    level: float
    exchangeable: bool
    shifted: str | None
    beats_trivial: bool
    used: Sequence[str]
    validation: Mapping[str, Any]
    worth: Mapping[str, Any]
    slices: Sequence[Prediction]
    _short: bool = False

    def tables(self) -> dict[str, Table]:
        """The slices."""
        headings = {"slice": self.by.capitalize(), "low": f"{100 * self.level:.0f} % from"}
        caption = f"Estimated accuracy by {self.by}"
        some: list[int] = []
        if self._short and len(self.slices) > 2 * _ENDS + 3:
            some = [*range(_ENDS + 1), *range(len(self.slices) - _ENDS, len(self.slices))]
        return {"slices": Table.of(self.slices, caption, name="slices", headings=headings, excerpt=some)}

    def charts(self) -> dict[str, Chart]:
        """The estimates with their intervals; none where there is no estimate."""
        rows = [row for row in self.slices if row.reason is None]
        if not rows:
            return {}
        known = [row for row in rows if row.true is not None]
        inside = sum((row.low or 0) <= (row.true or 0) <= (row.high or 0) for row in known)
        coverage = f"{inside} of {len(known)} known accuracies lie in their interval. " if known else ""
        level = f"{100 * self.level:.0f} %"
        return {
            "estimates": Chart(
                dots(
                    rows,
                    "slice",
                    "predicted",
                    ("low", "high"),
                    f"accuracy, with {level} interval",
                    self.labelled_accuracy,
                    _KNOWN,
                ),
                "Estimated accuracy, slice by slice",
                f"{coverage}The labelled documents had {self.labelled_accuracy:.3f}.",
                f"Dots are estimates with their {level} intervals, "
                f"{'crosses the accuracies that are known, ' if known else ''}"
                "the dashed line is the labelled accuracy.",
                name="estimates",
            )
        }

    def context(self) -> dict[str, Any]:
        """How many slices have no estimate, and why."""
        parts = self.slices[1:]
        refused = [row for row in parts if row.reason]
        small = sum(row.too_small for row in refused)
        return {
            "whole": self.slices[0],
            "parts": parts,
            "estimated": len(parts) - len(refused),
            "small": small,
            "outside": len(refused) - small,
            "level": f"{100 * self.level:.0f} %",
            "features": FEATURES,
            "used": [FEATURES[name] for name in self.used],
        }


def predict(
    calibrator: Calibration | Mapping[str, Any] | str | Path,
    run: Run | str | Path,
    *,
    where: str | None = None,
    by: str | None = None,
    rows: Rows | None = None,
    force: bool = False,
    seed: int = 0,
    short: bool = False,
) -> Predictions:
    """The accuracy of every slice, read off what it shows without labels, as ``dispersion predict`` does.

    A slice without an estimate has a reason.

    Args:
        calibrator: Of :func:`lmeval_dispersion.calibrate`, or the file of ``dispersion calibrate``.
        run: Folder of the store, or a folder that holds the stores of one run.
        where: Estimate only documents that satisfy this.
        by: Column of the documents that makes the slices; default: that of the calibrator.
        rows: Documents to estimate; default: all. Those that the calibrator was fitted on are left out.
        force: Whether to estimate where the calibrator did not beat knowing nothing, or the slices differ
            from the labelled ones.
        seed: Of clusters.
        short: Whether texts show only the slices of the lowest and the highest estimates.

    Raises:
        UsageError: The calibrator does not fit the run, or did not beat knowing nothing, or there is no such
            column.
    """
    name: str | Path = "the calibrator"
    if isinstance(calibrator, Calibration):
        calibrator = calibrator.calibrator
    elif not isinstance(calibrator, Mapping):
        name, calibrator = calibrator, read_calibrator(calibrator)
    run = run_for(calibrator, run)
    notes = check_fits(calibrator, run)
    if not force:
        check_worth(calibrator, name)
    if where is not None:
        rows = rows_where(run, where)
    rows, fitted = unlabelled_rows(calibrator, run, rows)
    if fitted:
        notes.append(f"{fitted} documents of this run were labelled for the calibrator and are left out.")
    by = by or str(calibrator["by"])
    if by == CLUSTERS:
        a_slice = float(np.mean([part["documents"] for part in calibrator["slices"]]))
        parts = vector_clusters(run, rows, round(len(rows) / a_slice), seed=seed)
    else:
        parts = slices_of(run, by, rows)
    model, names = _Model.of(calibrator), list(calibrator["features"])
    if lacking := sorted(set(names) - set(available_features(run, rows))):
        others = " ".join(f"--feature {name}" for name in names if name not in lacking)
        raise UsageError(
            f"some documents of the run have no {FEATURES[lacking[0]]}, which this calibrator was fitted "
            f"with; calibrate without it: {others}"
        )
    threshold = calibrator["atc_threshold"]
    threshold = math.nan if threshold is None else threshold
    raw = slice_features(run, [part.rows for part in parts], names, threshold)
    labelled = np.array([[part["features"][name] for name in names] for part in calibrator["slices"]])
    shift = shrinkage.shift(labelled, raw[~np.isnan(raw).any(axis=1)])
    shifted = None if shift is None else names[shift.feature]
    unlike = f"not like the labelled slices in {FEATURES[shifted]}" if shifted and not force else None
    estimates = [
        model.estimated(run, part, names, values, unlike) for part, values in zip(parts, raw, strict=True)
    ]
    whole = _whole(run, Slice("all documents", rows), parts, raw, estimates, model, names)
    return Predictions(
        model=str(run.store.manifest.get("model")),
        layer=run.layer,
        by=by,
        labelled_accuracy=calibrator["labelled"]["accuracy"],
        notes=notes,
        level=calibrator["level"],
        exchangeable=by == calibrator["by"] and by != CLUSTERS and shifted is None,
        shifted=shifted,
        beats_trivial=calibrator["beats_trivial"],
        used=calibrator["used"],
        validation=calibrator["validation"],
        worth=calibrator["worth"],
        slices=[whole, *(estimates if len(estimates) > 1 else [])],
        _short=short,
    )


def run_for(calibrator: Mapping[str, Any], run: Run | str | Path) -> Run:
    """The run, in the calibrator's layer; another model is refused before its vectors are read.

    Raises:
        UsageError: The run has not the calibrator's layer.
    """
    if isinstance(run, Run):
        return run
    store, layer = read_store(run), calibrator["layer"]
    if store.model == calibrator["model"] and layer not in store.layers:
        raise UsageError(
            f"this calibrator was fitted for layer {layer!r}, and the run has "
            f"{', '.join(store.layers)}; run it with that layer, or calibrate on another"
        )
    return Run.of(store, layer if layer in store.layers else None)


def unlabelled_rows(calibrator: Mapping[str, Any], run: Run, chosen: Rows | None = None) -> tuple[Rows, int]:
    """The rows to estimate, ``chosen`` without those that were fitted on, and how many those are.

    Raises:
        UsageError: None is left.
    """
    rows = np.arange(len(run.vectors)) if chosen is None else chosen
    fitted = np.empty(0, dtype=np.int64)
    if calibrator["labelled"].get("documents_sha256") == documents_digest(run):
        fitted = np.intersect1d(rows, rows_of_ids(run, calibrator["labelled"].get("doc_ids", {})))
    left = np.setdiff1d(rows, fitted)
    if not len(left):
        raise UsageError(
            f"the calibrator was fitted on the labels of all {len(rows)} documents; name another run, or "
            "calibrate on a part of this one with --where or --labelled"
        )
    return left, len(fitted)


class _Model(NamedTuple):
    """A calibrator's numbers as arrays."""

    fit: shrinkage.Fit
    folds: list[shrinkage.Fit]
    fold: NDArray[np.int64]
    score: Array
    size: shrinkage.ErrorSize
    level: float
    fewest: int
    most: int
    centre: Array
    scale: Array
    ranges: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> _Model:
        features, slices = content["features"].values(), content["slices"]
        fits = [
            shrinkage.Fit(float(f["intercept"]), np.asarray(f["coefficients"], dtype=np.float64))
            for f in (content, *content["folds"])
        ]
        return cls(
            fits[0],
            fits[1:],
            np.array([part["fold"] for part in slices], dtype=np.int64),
            np.array([part["score"] for part in slices], dtype=np.float64),
            shrinkage.ErrorSize(**content["error_size"]),
            float(content["level"]),
            int(content["documents_a_slice"][0]),
            int(content["documents_a_slice"][1]),
            np.array([f["centre"] for f in features], dtype=np.float64),
            np.array([f["scale"] for f in features], dtype=np.float64),
            content["ranges"],
        )

    def standardised(self, values: Array) -> Array:
        """Raw features (…, F) on the scale of the fit."""
        return np.asarray((values - self.centre) / self.scale)

    def estimated(
        self, run: Run, part: Slice, names: Sequence[str], values: Array, unlike: str | None
    ) -> Prediction:
        """The estimate of a slice with these raw features (F,), or why there is none."""
        n = len(part.rows)
        row = replace(_empty(run, part), **dict(zip(names, values.tolist(), strict=True)))
        if unlike:
            return replace(row, reason=unlike)
        if n < self.fewest:
            reason = f"{n} documents, and the smallest fitted slice has {self.fewest}"
            return replace(row, reason=reason, too_small=True)
        z = self.standardised(values)[None]
        given = {**dict(zip(names, values.tolist(), strict=True)), "estimate": float(self.fit.value(z)[0])}
        for name, value in given.items():
            low, high = self.ranges[name]
            if not low <= value <= high:
                name = FEATURES.get(name, name)
                reason = f"outside what was fitted: {name} {value:.4g}, fitted from {low:.4g} to {high:.4g}"
                return replace(row, reason=reason)
        centres = np.array([float(fit.predict(z)[0]) for fit in self.folds])[self.fold]
        low, high = shrinkage.jackknife_plus(centres, self.score * self.error(n), self.level)
        return replace(row, predicted=float(self.fit.predict(z)[0]), low=low, high=high)

    def error(self, documents: int) -> float:
        """Expected size of the error; slices larger than all labelled ones count as the largest of those."""
        return float(self.size.at(np.array(float(min(documents, self.most)))))


def _whole(
    run: Run,
    whole: Slice,
    parts: Sequence[Slice],
    raw: Array,
    rows: Sequence[Prediction],
    model: _Model,
    names: Sequence[str],
) -> Prediction:
    """All slices with an estimate together: their estimates weighted by documents.

    Over slices that are independent, errors average out: the standard error is made of each slice's own error
    and, by the jackknife over the left-out fits, of the fit's, which all slices share. Student's t with a
    degree of freedom less than slices were fitted. A run as a whole is not looked up as a slice: it mixes
    slices, so its dispersion is larger than any of theirs.
    """
    if len(rows) == 1:
        return replace(rows[0], slice=whole.name)
    used = [i for i, row in enumerate(rows) if row.reason is None]
    if not used:
        return replace(_empty(run, whole), reason="no slice can be estimated")
    inside = np.sort(np.concatenate([parts[i].rows for i in used]))
    every = len(inside) == len(whole.rows)
    weight = np.array([float(len(parts[i].rows)) for i in used])
    weight /= weight.sum()
    z = model.standardised(raw[used])
    estimate = float(weight @ model.fit.predict(z))
    errors = np.array([model.error(len(parts[i].rows)) for i in used])
    shared = np.array([float(weight @ fit.predict(z)) for fit in model.folds])
    folds = len(shared)
    variance = float(np.square(weight * errors).sum()) + (folds - 1) * float(shared.var())
    # A level above that of its slices would be no honest sum of them.
    half = student_quantile((1 + model.level) / 2, folds - 1) * math.sqrt(variance)
    means: dict[str, Any] = {name: float(weight @ raw[used, j]) for j, name in enumerate(names)}
    return replace(
        _empty(run, Slice(whole.name if every else f"{len(used)} of {len(rows)} slices", inside)),
        **{**means, "dispersion": float(run.vectors.dispersions([inside])[0])},
        predicted=estimate,
        low=max(estimate - half, 0.0),
        high=min(estimate + half, 1.0),
    )


def _empty(run: Run, part: Slice) -> Prediction:
    known = run.score[part.rows]
    known = known[~np.isnan(known)]
    return Prediction(part.name, len(part.rows), true=float(known.mean()) if known.size else None)
