"""A calibrator as a file: fitted on the labelled documents of a run, it estimates the accuracy of others.

The file is JSON (docs/reference/audit.md). ``dispersion-calibrator/2`` holds the natural protocol of this
module: pairs from a run's own slices, shrunk to the labelled accuracy (``shrinkage``).
``dispersion-calibrator/1`` holds the paper's, by mixtures (``paper_calibrator``).
A calibrator holds for the model, prompts and tasks that it was fitted on; anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.audit.calibration import paper_calibrator as paper
from lmeval_dispersion.audit.calibration import shrinkage
from lmeval_dispersion.audit.calibration.features import (
    CLUSTERS,
    FEATURES,
    FEWEST_SLICES,
    Slicing,
    available_features,
    batches_of,
    confidence_threshold,
    labelled_slices,
    slice_features,
    slices_of,
    vector_clusters,
)
from lmeval_dispersion.audit.calibration.selection import document_ids, rows_of_ids
from lmeval_dispersion.audit.run import Run, check_labels
from lmeval_dispersion.audit.slices import Slice
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.statistics import student_quantile
from lmeval_dispersion.store.format import DOCUMENTS
from lmeval_dispersion.version import __version__

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

FORMAT = "dispersion-calibrator/2"
PREDICTIONS = "dispersion-predictions/2"

# Key of `Run.describe` -> how a message calls it. `tasks` and `identity` are compared by their own rules.
_MUST_AGREE = {
    "layer": "layer",
    "width": "vector width",
    "prompt_format": "prompt format",
    "chat_template": "chat template",
    "num_fewshot": "number of few-shot examples",
}
_ROUNDING = 1e-9  # of a feature's size: values nearer than this are the same
_NAMES = {"model": "model", "revision": "revision"}  # compared where no identity is known
_ALWAYS = {*_NAMES, *_MUST_AGREE, "tasks", "labelled"}
_KEYS = {
    paper.FORMAT: {"slice_size", "regression", "dispersion_range", "interval", "validation_mae", "blind_mae"},
    FORMAT: {"by", "features", "intercept", "used", "slices", "folds", "error_size", "validation", "ranges"}
    | {"documents_a_slice", "level", "worth", "atc_threshold", "beats_trivial"},
}


def fit_calibrator(
    run: Run,
    *,
    by: str | None = None,
    features: Sequence[str] = (),
    slice_size: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Fit to the labelled slices of a run.

    Args:
        run: Its documents with a label are what is learnt from.
        by: The column that makes the slices; default: subjects, else categories, tasks, clusters of vectors.
        features: Of :data:`FEATURES`; default: all that the labelled documents have.
        slice_size: Cut every slice into random batches of so many documents, because slices of that size are
            to be estimated; default: slices as they are.
        seed: Of clusters, batches and the bootstrap.

    Raises:
        UsageError: Too few labelled documents or slices, labels all right or all wrong, unknown features.
    """
    prepared = labelled_pairs(run, by=by, features=features, slice_size=slice_size, seed=seed)
    slicing, kept, names, raw = prepared.slicing, prepared.kept, prepared.names, prepared.raw
    pairs, threshold = prepared.pairs, prepared.threshold
    group, centre, scale = pairs.group, raw.mean(axis=0), raw.std(axis=0)
    learnt = _learn(pairs, names, seed)
    about = run.describe()
    sizes = [int(pairs.documents.min()), int(pairs.documents.max())]
    return {
        "format": FORMAT,
        "protocol": "natural",
        **{key: about[key] for key in (*_NAMES, *_MUST_AGREE, "tasks")},
        "identity": run.store.manifest.get("identity"),
        "by": slicing.by,
        "slice_size": slice_size,
        "documents_a_slice": sizes,
        "labelled": labelled_part(run),
        "features": {
            name: {"centre": float(c), "scale": float(s)}
            for name, c, s in zip(names, centre, scale, strict=True)
        },
        "atc_threshold": None if math.isnan(threshold) else threshold,
        **learnt.content,
        "ranges": {
            **{name: list(shrinkage.fitted_range(raw[:, j])) for j, name in enumerate(names)},
            "estimate": list(shrinkage.fitted_range(learnt.fit.value(pairs.z))),
        },
        "slices": [
            {
                "slice": slicing.slices[i].name,
                "documents": int(pairs.documents[group == k][0]),
                "accuracy": float(pairs.accuracy[group == k].mean()),
                "features": dict(zip(names, raw[group == k][0].tolist(), strict=True)),
                "score": float(learnt.score[k]),
                "fold": int(learnt.folds.fold[k]),
            }
            for k, i in enumerate(kept)
        ],
        "seed": seed,
        "run_created": about["created"],
        "version": __version__,
    }


class LabelledPairs(NamedTuple):
    """The labelled slices of a run as what is fitted to.

    Attributes:
        slicing: All slices.
        kept: Which of them are large enough, in order; ``pairs.group`` counts these.
        parts: Rows of each pair.
        names: Features that vary.
        raw: Their values, shape (pairs, features).
        pairs: With the features standardised.
        threshold: ATC's.
    """

    slicing: Slicing
    kept: list[int]
    parts: list[Rows]
    names: list[str]
    raw: Array
    pairs: shrinkage.Pairs
    threshold: float


def labelled_pairs(
    run: Run,
    *,
    by: str | None = None,
    features: Sequence[str] = (),
    slice_size: int | None = None,
    seed: int = 0,
) -> LabelledPairs:
    """The slices that :func:`fit_calibrator` learns from; arguments and errors are its."""
    check_labels(run)
    rows = run.labelled
    slicing = labelled_slices(run, by, seed=seed)
    rng = np.random.default_rng(seed)
    batches = [batches_of(part, slice_size, rng) for part in slicing.slices]
    kept = [i for i, found in enumerate(batches) if found]
    if len(kept) < FEWEST_SLICES:
        raise UsageError(
            f"{len(kept)} slices have {slice_size} labelled documents, and {FEWEST_SLICES} are needed; "
            "give a smaller --slice-size"
        )
    parts = [batch for i in kept for batch in batches[i]]
    group = np.repeat(np.arange(len(kept)), [len(batches[i]) for i in kept])
    threshold = confidence_threshold(run)
    names = _wanted(features, available_features(run, rows))
    raw = slice_features(run, parts, names, threshold)
    # Means of one value over slices of many sizes differ by rounding: no feature, and no scale to divide by.
    varied = raw.std(axis=0) > _ROUNDING * np.abs(raw).max(axis=0)
    if features and not varied.all():
        alike = FEATURES[names[int(varied.argmin())]]
        raise UsageError(f"{alike} is the same in every slice and tells nothing apart; leave it out")
    names, raw = [name for name, varies in zip(names, varied, strict=True) if varies], raw[:, varied]
    centre, scale = raw.mean(axis=0), raw.std(axis=0)
    pairs = shrinkage.Pairs(
        (raw - centre) / scale,
        np.array([run.score[part].mean() for part in parts]),
        np.array([float(len(part)) for part in parts]),
        np.array([run.score[part].var(ddof=1) for part in parts]),
        group,
    )
    return LabelledPairs(slicing, kept, parts, names, raw, pairs, threshold)


class _Learnt(NamedTuple):
    fit: shrinkage.Fit
    folds: shrinkage.Folds
    score: Array
    content: dict[str, Any]


def _learn(pairs: shrinkage.Pairs, names: Sequence[str], seed: int) -> _Learnt:
    """The fit, its folds and what it is worth; the trivial one where it did not beat that."""
    allowed = shrinkage.families(len(names))
    trivial = shrinkage.cross_fitted(pairs, [])
    folds = shrinkage.cross_fitted(pairs, allowed)
    fit = shrinkage.shrunken_fit(pairs, allowed)
    found = shrinkage.gain(pairs, folds.estimate, trivial.estimate)
    # Shrunk to nothing on all slices, it is the trivial predictor, whatever the folds chose.
    beats = found.better and bool(np.any(fit.coefficients))
    if not beats:
        fit, folds = shrinkage.shrunken_fit(pairs, []), trivial
    singles = [
        {
            "estimator": name,
            **_judged(
                shrinkage.gain(pairs, shrinkage.cross_fitted(pairs, [(j,)]).estimate, trivial.estimate)
            ),
        }
        for j, name in enumerate(names)
    ]
    size = shrinkage.ErrorSize.of(pairs, folds.estimate)
    score = np.abs(folds.estimate - pairs.accuracy) / size.at(pairs.documents)
    # One batch a slice: batches of one slice are not exchangeable with those of a new one.
    first = np.unique(pairs.group, return_index=True)[1]
    content = {
        "beats_trivial": beats,
        "intercept": float(fit.intercept),
        "used": [name for name, value in zip(names, fit.coefficients, strict=True) if value],
        "coefficients": fit.coefficients.tolist(),
        "validation": {
            "slices": len(first),
            **_judged(found),
            "trivial_mae": found.trivial_mae,
            "trivial_rmse": found.trivial_rmse,
            "single_features": singles,
        },
        "worth": {
            **shrinkage.worth(pairs, folds.estimate, seed)._asdict(),
            "trivial": shrinkage.worth(pairs, trivial.estimate, seed)._asdict(),
        },
        "error_size": size._asdict(),
        "level": shrinkage.level_reached(len(first)),
        "folds": [
            {"intercept": float(fold.intercept), "coefficients": fold.coefficients.tolist()}
            for fold in folds.fits
        ],
    }
    return _Learnt(fit, folds, score[first], content)


def _judged(found: shrinkage.Gain) -> dict[str, Any]:
    return {"mae": found.mae, "rmse": found.rmse, "better": found.better}


def _wanted(asked: Sequence[str], have: Sequence[str]) -> list[str]:
    for name in asked:
        if name not in FEATURES:
            raise UsageError(f"there is no feature {name!r}; choose from {', '.join(FEATURES)}")
        if name not in have:
            raise UsageError(f"some labelled documents have no {FEATURES[name]}; leave {name!r} out")
    return [name for name in have if name in asked] if asked else list(have)


def labelled_part(run: Run) -> dict[str, Any]:
    """What of a run was labelled: how many documents, their accuracy, and which ones."""
    rows = run.labelled
    return {
        "documents": len(rows),
        "accuracy": float(run.score[rows].mean()),
        "doc_ids": document_ids(run, rows),
        "documents_sha256": _documents_digest(run),
    }


def _documents_digest(run: Run) -> str:
    """Of the files that hold the documents of a run: whether two runs are one and the same."""
    digests = sorted(str(manifest["sha256"][DOCUMENTS]) for _, manifest in run.store.parts)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def fit_paper_calibrator(run: Run, *, size: int, seed: int = 0) -> dict[str, Any]:
    """The paper's protocol as a file ``dispersion-calibrator/1``; see :mod:`.paper_calibrator`."""
    about = run.describe()
    return {
        "format": paper.FORMAT,
        "protocol": "paper",
        **{key: about[key] for key in (*_NAMES, *_MUST_AGREE, "tasks")},
        "identity": run.store.manifest.get("identity"),
        **paper.fit_mixtures(run, size=size, seed=seed),
        "labelled": labelled_part(run),
        "seed": seed,
        "run_created": about["created"],
        "version": __version__,
    }


def calibrator_json(calibrator: Mapping[str, Any]) -> str:
    """The file of a calibrator."""
    return json.dumps(calibrator, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_calibrator(path: str | Path) -> dict[str, Any]:
    """Read a calibrator.

    Raises:
        UsageError: No such file, not a calibrator, or one of another version of the format.
    """
    file = Path(path)
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"expected a calibrator from `dispersion calibrate`, got {file}: {reason}; "
            "`dispersion calibrate RUN -o FILE` writes one"
        ) from None
    kind = content.get("format") if isinstance(content, dict) else None
    if not str(kind).startswith("dispersion-calibrator/"):
        raise UsageError(f"{file} is not a calibrator; `dispersion calibrate RUN -o {file}` writes one")
    if kind not in _KEYS:
        raise UsageError(
            f"{file} was written as {kind!r} and this version reads {' and '.join(_KEYS)}; calibrate again"
        )
    if missing := sorted((_ALWAYS | _KEYS[kind]) - set(content)):
        raise UsageError(f"{file} lacks {missing[0]!r}; it is damaged, calibrate again")
    return {"protocol": "paper", **content}


def check_fits(calibrator: Mapping[str, Any], run: Run) -> list[str]:
    """Notes on what could not be compared, where the calibrator may speak about this run.

    Raises:
        UsageError: It may not, with the reason.
    """
    about, notes = run.describe(), []
    ours, theirs = calibrator.get("identity"), run.store.manifest.get("identity")
    compared = dict(_MUST_AGREE)
    if ours is None or theirs is None:
        compared = {**_NAMES, **_MUST_AGREE}
        notes.append(
            f"{'The calibrator' if ours is None else 'The run'} says nothing about its weights, adapter or "
            "quantisation: only the model's name and revision were compared."
        )
    elif different := _different(ours, theirs, same_tasks=set(about["tasks"]) == set(calibrator["tasks"])):
        fields = ", ".join(f"{key} {ours.get(key)!r}, now {theirs.get(key)!r}" for key in different)
        raise UsageError(
            f"this calibrator was fitted on another model: {fields}; a calibration does not carry over, "
            "label some documents of this run and calibrate on them"
        )
    for key, name in compared.items():
        if calibrator[key] != about[key]:
            raise UsageError(
                f"this calibrator was fitted for {name} {calibrator[key]!r}, and the run has {about[key]!r}; "
                "a calibration does not carry over, label some documents of this run and calibrate on them"
            )
    for task, version in about["tasks"].items():
        if task not in calibrator["tasks"]:
            known = ", ".join(calibrator["tasks"])
            raise UsageError(
                f"this calibrator was fitted on {known}, and the run has task {task!r}; "
                "label some documents of it and calibrate on them"
            )
        fitted_on = calibrator["tasks"][task]
        if fitted_on != version:
            raise UsageError(
                f"this calibrator was fitted on version {fitted_on} of task {task!r}, and the run has "
                f"version {version}; run the same version"
            )
    return notes


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, same_tasks: bool) -> list[str]:
    """Keys of two identities whose values differ.

    Where runs of several tasks are read as one, ``several:…`` is a digest of what all of them have. It
    differs between a run and a part of its tasks, which says nothing: there such a value is not compared.
    """
    return [
        key
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
        and (same_tasks or not any(str(side.get(key)).startswith("several:") for side in (ours, theirs)))
    ]


def check_worth(calibrator: Mapping[str, Any], file: str | Path) -> None:
    """Raise UsageError where the calibrator did not beat knowing nothing when it was validated."""
    if calibrator["protocol"] == "paper":
        error = calibrator["validation_mae"][calibrator["regression"]["kind"]]
        better = paper.beats_blind(calibrator)
        reason = (
            f"on mixtures held out it is {error:.1f} points off, a blind guess {calibrator['blind_mae']:.1f}"
        )
    else:
        better, reason = calibrator["beats_trivial"], no_gain(calibrator["validation"])
    if not better:
        raise UsageError(
            f"{file} should not be used: {reason}; take the labelled accuracy "
            f"({calibrator['labelled']['accuracy']:.3f}), or see what it would say with --force"
        )


def no_gain(validation: Mapping[str, Any]) -> str:
    """Why a calibrator that did not beat the labelled accuracy alone should not be used."""
    ours, blind = validation["mae"], validation["trivial_mae"]
    if ours == blind:
        return (
            "nothing tells slices apart better than the labelled accuracy alone, which is "
            f"{blind:.1f} points off on held-out slices"
        )
    verdict = "worse than" if ours > blind + 0.05 else "not reliably better than"
    return (
        f"on held-out slices the estimate is {ours:.1f} points off, {verdict} the labelled accuracy alone "
        f"({blind:.1f})"
    )


def unlabelled_rows(calibrator: Mapping[str, Any], run: Run, chosen: Rows | None = None) -> tuple[Rows, int]:
    """The rows to estimate, ``chosen`` without those that were fitted on, and how many those are.

    Raises:
        UsageError: None is left.
    """
    rows = np.arange(len(run.vectors)) if chosen is None else chosen
    fitted = np.empty(0, dtype=np.int64)
    if calibrator["labelled"].get("documents_sha256") == _documents_digest(run):
        fitted = np.intersect1d(rows, rows_of_ids(run, calibrator["labelled"].get("doc_ids", {})))
    left = np.setdiff1d(rows, fitted)
    if not len(left):
        raise UsageError(
            f"the calibrator was fitted on the labels of all {len(rows)} documents; name another run, or "
            "calibrate on a part of this one with --where or --labelled"
        )
    return left, len(fitted)


def predict_slices(
    calibrator: Mapping[str, Any],
    run: Run,
    *,
    by: str | None = None,
    rows: Rows | None = None,
    force: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Estimated accuracy of every slice with its interval; a slice without an estimate has a reason.

    Args:
        calibrator: Of :func:`read_calibrator`.
        run: What to estimate.
        by: What to slice by; default: what the calibrator was fitted by.
        rows: Documents to estimate; default: all that the calibrator was not fitted on.
        force: Also estimate slices that differ as a whole from the labelled ones.
        seed: Of batches and clusters.

    Raises:
        UsageError: The calibrator does not fit the run, or there is no such column.
    """
    notes = check_fits(calibrator, run)
    rows, fitted = unlabelled_rows(calibrator, run, rows)
    if fitted:
        notes.append(f"{fitted} documents of this run were labelled for the calibrator and are left out.")
    by = by or str(calibrator.get("by", "subject"))
    if by == CLUSTERS:
        a_slice = float(np.mean([part["documents"] for part in calibrator["slices"]]))
        parts = vector_clusters(run, rows, round(len(rows) / a_slice), seed=seed)
    else:
        parts = slices_of(run, by, rows)
    whole = Slice("all documents", rows)
    common = {
        "format": PREDICTIONS,
        "protocol": calibrator["protocol"],
        "model": run.store.manifest.get("model"),
        "layer": run.layer,
        "by": by,
        "labelled_accuracy": calibrator["labelled"]["accuracy"],
        "notes": notes,
    }
    if calibrator["protocol"] == "paper":
        several = parts if len(parts) > 1 else []
        return {**common, **paper.predictions(calibrator, run, [whole, *several], seed=seed)}
    return {**common, **_natural_predictions(calibrator, run, whole, parts, by, force)}


def _natural_predictions(
    calibrator: Mapping[str, Any], run: Run, whole: Slice, parts: Sequence[Slice], by: str, force: bool
) -> dict[str, Any]:
    names = list(calibrator["features"])
    threshold = calibrator["atc_threshold"]
    if lacking := sorted(set(names) - set(available_features(run, whole.rows))):
        others = " ".join(f"--feature {name}" for name in names if name not in lacking)
        raise UsageError(
            f"some documents of the run have no {FEATURES[lacking[0]]}, which this calibrator was fitted "
            f"with; calibrate without it: {others}"
        )
    raw = slice_features(
        run, [part.rows for part in parts], names, math.nan if threshold is None else threshold
    )
    model = _Model.of(calibrator)
    labelled = np.array([[part["features"][name] for name in names] for part in calibrator["slices"]])
    known = ~np.isnan(raw).any(axis=1)
    found = shrinkage.shift(labelled, raw[known])
    shifted = None if found is None else names[found.feature]
    refused = shifted is not None and not force
    reasons = [
        f"not like the labelled slices in {FEATURES[str(shifted)]}"
        if refused
        else model.refusal(len(part.rows), names, values)
        for part, values in zip(parts, raw, strict=True)
    ]
    rows = [
        _row(run, part, names, values, reason, model)
        for part, values, reason in zip(parts, raw, reasons, strict=True)
    ]
    return {
        "level": calibrator["level"],
        "exchangeable": by == calibrator["by"] and by != CLUSTERS and shifted is None,
        "shifted": shifted,
        "beats_trivial": calibrator["beats_trivial"],
        "used": calibrator["used"],
        "validation": calibrator["validation"],
        "worth": calibrator["worth"],
        "slices": [_whole_row(run, whole, parts, raw, rows, model, names), *(rows if len(rows) > 1 else [])],
    }


class _Model(NamedTuple):
    """A natural calibrator's numbers as arrays."""

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

    def refusal(self, documents: int, names: Sequence[str], values: Array) -> str | None:
        """Why there is no number for a slice with these raw features (F,), or None."""
        if documents < self.fewest:
            return f"{documents} documents, and the smallest fitted slice has {self.fewest}"
        given = {**dict(zip(names, values.tolist(), strict=True))}
        given["estimate"] = float(self.fit.value(self.standardised(values)[None])[0])
        for name, value in given.items():
            low, high = self.ranges[name]
            if not low <= value <= high:
                what = FEATURES.get(name, name)
                return f"outside what was fitted: {what} {value:.4g}, fitted from {low:.4g} to {high:.4g}"
        return None

    def error(self, documents: int) -> float:
        """Expected size of the error; slices larger than all labelled ones count as the largest of those."""
        return float(self.size.at(np.array(float(min(documents, self.most)))))

    def interval(self, values: Array, documents: int) -> tuple[float, float]:
        """The jackknife+ interval of a slice with these raw features (F,)."""
        z = self.standardised(values)[None]
        centres = np.array([float(fit.predict(z)[0]) for fit in self.folds])[self.fold]
        return shrinkage.jackknife_plus(centres, self.score * self.error(documents), self.level)


def _row(
    run: Run, part: Slice, names: Sequence[str], values: Array, reason: str | None, model: _Model
) -> dict[str, Any]:
    row = _empty_row(run, part)
    row.update(dict(zip(names, values.tolist(), strict=True)))
    row["reason"] = reason
    if reason is None:
        row["predicted"] = float(model.fit.predict(model.standardised(values)[None])[0])
        row["low"], row["high"] = model.interval(values, len(part.rows))
    return row


def _whole_row(
    run: Run,
    whole: Slice,
    parts: Sequence[Slice],
    raw: Array,
    rows: Sequence[Mapping[str, Any]],
    model: _Model,
    names: Sequence[str],
) -> dict[str, Any]:
    """All slices with an estimate together: their estimates weighted by documents.

    Over slices that are independent, errors average out: the standard error is made of each slice's own error
    and, by the jackknife over the left-out fits, of the fit's, which all slices share. Student's t with a
    degree of freedom less than slices were fitted. A run as a whole is not looked up as a slice: it mixes
    slices, so its dispersion is larger than any of theirs.
    """
    if len(rows) == 1:
        return {**rows[0], "slice": whole.name}
    used = [i for i, row in enumerate(rows) if row["reason"] is None]
    if not used:
        row = _empty_row(run, whole)
        row["reason"] = "no slice can be estimated"
        return row
    inside = np.sort(np.concatenate([parts[i].rows for i in used]))
    every = len(inside) == len(whole.rows)
    row = _empty_row(run, Slice(whole.name if every else f"{len(used)} of {len(rows)} slices", inside))
    weight = np.array([float(len(parts[i].rows)) for i in used])
    weight /= weight.sum()
    z = model.standardised(raw[used])
    estimate = float(weight @ model.fit.predict(z))
    own = np.array([model.error(len(parts[i].rows)) for i in used])
    shared = np.array([float(weight @ fit.predict(z)) for fit in model.folds])
    folds = len(shared)
    variance = float(np.square(weight * own).sum()) + (folds - 1) * float(shared.var())
    # A level above that of its slices would be no honest sum of them.
    half = student_quantile((1 + model.level) / 2, folds - 1) * math.sqrt(variance)
    row.update(
        {name: float(weight @ raw[used, j]) for j, name in enumerate(names) if name != "dispersion"},
        dispersion=float(run.vectors.dispersions([inside])[0]),
        predicted=estimate,
        low=max(estimate - half, 0.0),
        high=min(estimate + half, 1.0),
    )
    return row


def _empty_row(run: Run, part: Slice) -> dict[str, Any]:
    nan = float("nan")
    known = run.score[part.rows]
    known = known[~np.isnan(known)]
    return {
        "slice": part.name,
        "documents": len(part.rows),
        **dict.fromkeys(FEATURES, nan),
        "predicted": nan,
        "low": nan,
        "high": nan,
        "true": float(known.mean()) if known.size else nan,
        "reason": None,
    }
