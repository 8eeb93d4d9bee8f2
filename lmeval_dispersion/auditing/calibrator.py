"""A calibrator: fitted to the labelled slices of a run, it estimates the accuracy of other slices.

Its file is JSON, ``dispersion-calibrator/2`` (docs/reference/audit.md): pairs from a run's own slices, shrunk
to the labelled accuracy (``shrinkage``). A calibrator holds for the model, prompts and tasks that it was
fitted on; anything else is refused.
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

from lmeval_dispersion.auditing import shrinkage
from lmeval_dispersion.auditing.features import (
    FEATURES,
    FEWEST_SLICES,
    Slicing,
    available_features,
    batches_of,
    confidence_threshold,
    labelled_slices,
    slice_features,
)
from lmeval_dispersion.auditing.run import Run, check_labels
from lmeval_dispersion.auditing.selection import document_ids
from lmeval_dispersion.auditing.worth import Estimator
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.store.format import DOCUMENTS
from lmeval_dispersion.version import __version__

Array = NDArray[np.float64]
Rows = NDArray[np.int64]

FORMAT = "dispersion-calibrator/2"
TRIVIAL, OURS = "labelled accuracy alone", "this estimate"

# Key of `Run.describe` -> how a message calls it. `tasks` and `identity` are compared by their own rules.
_MUST_AGREE = {
    "layer": "layer",
    "width": "vector width",
    "prompt_format": "prompt format",
    "chat_template": "chat template",
    "num_fewshot": "number of few-shot examples",
}
_NAMES = {"model": "model", "revision": "revision"}  # compared where no identity is known
_KEYS = {
    *_NAMES, *_MUST_AGREE, "tasks", "labelled", "by", "features", "intercept", "used", "slices", "folds",
    "error_size", "validation", "ranges", "documents_a_slice", "level", "worth", "atc_threshold",
    "beats_trivial",
}  # fmt: skip
_ROUNDING = 1e-9  # of a feature's size: values nearer than this are the same


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


class Fitted(NamedTuple):
    """A calibrator, and the estimates of left-out slices that it was judged by.

    Attributes:
        content: Of the file.
        estimators: This estimate, every feature alone, the model's own confidence, and the labelled accuracy.
        prepared: What it was fitted to.
    """

    content: dict[str, Any]
    estimators: list[Estimator]
    prepared: LabelledPairs


def fit_calibrator(
    run: Run,
    *,
    by: str | None = None,
    features: Sequence[str] = (),
    slice_size: int | None = None,
    seed: int = 0,
) -> Fitted:
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
    pairs, names, raw = prepared.pairs, prepared.names, prepared.raw
    allowed = shrinkage.families(len(names))
    fit = shrinkage.shrunken_fit(pairs, allowed)
    trivial, folds = (shrinkage.cross_fitted(pairs, families) for families in ([], allowed))
    estimators = [
        Estimator.of(OURS, pairs, folds.estimate, trivial.estimate, seed=seed),
        *_single_estimators(run, prepared, trivial.estimate, seed),
        Estimator.of(TRIVIAL, pairs, trivial.estimate, trivial.estimate, seed=seed),
    ]
    ours, blind = estimators[0], estimators[-1]
    # Shrunk to nothing on all slices, it is the trivial predictor, whatever the folds chose.
    beats = ours.better and bool(np.any(fit.coefficients))
    if not beats:
        fit, folds = shrinkage.shrunken_fit(pairs, []), trivial
    size = shrinkage.ErrorSize.of(pairs, folds.estimate)
    score = np.abs(folds.estimate - pairs.accuracy) / size.at(pairs.documents)
    # One batch a slice: batches of one slice are not exchangeable with those of a new one.
    first = np.unique(pairs.group, return_index=True)[1]
    about = run.describe()
    used = ours if beats else blind
    content = {
        "format": FORMAT,
        "protocol": "natural",
        **{key: about[key] for key in (*_NAMES, *_MUST_AGREE, "tasks")},
        "identity": run.store.manifest.get("identity"),
        "by": prepared.slicing.by,
        "slice_size": slice_size,
        "documents_a_slice": [int(pairs.documents.min()), int(pairs.documents.max())],
        "labelled": labelled_part(run),
        "features": {
            name: {"centre": float(c), "scale": float(s)}
            for name, c, s in zip(names, raw.mean(axis=0), raw.std(axis=0), strict=True)
        },
        "atc_threshold": None if math.isnan(prepared.threshold) else prepared.threshold,
        "beats_trivial": beats,
        "intercept": float(fit.intercept),
        "used": [name for name, value in zip(names, fit.coefficients, strict=True) if value],
        "coefficients": fit.coefficients.tolist(),
        "validation": {
            "slices": len(first),
            **_errors(ours),
            "trivial_mae": blind.mae,
            "trivial_rmse": blind.rmse,
            "single_features": [
                {"estimator": row.feature, **_errors(row)} for row in estimators if row.feature
            ],
        },
        "worth": {**_worth(used), "trivial": _worth(blind)},
        "error_size": size._asdict(),
        "level": shrinkage.level_reached(len(first)),
        "folds": [
            {"intercept": float(fold.intercept), "coefficients": fold.coefficients.tolist()}
            for fold in folds.fits
        ],
        "ranges": {
            **{name: list(shrinkage.fitted_range(raw[:, j])) for j, name in enumerate(names)},
            "estimate": list(shrinkage.fitted_range(fit.value(pairs.z))),
        },
        "slices": [
            {
                "slice": prepared.slicing.slices[place].name,
                "documents": int(pairs.documents[row]),
                "accuracy": float(pairs.accuracy[pairs.group == group].mean()),
                "features": dict(zip(names, raw[row].tolist(), strict=True)),
                "score": float(score[row]),
                "fold": int(folds.fold[group]),
            }
            for group, (place, row) in enumerate(zip(prepared.kept, first.tolist(), strict=True))
        ],
        "seed": seed,
        "run_created": about["created"],
        "version": __version__,
    }
    return Fitted(content, estimators, prepared)


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
    slicing = labelled_slices(run, by, seed=seed)
    rng = np.random.default_rng(seed)
    batches = [batches_of(part, slice_size, rng) for part in slicing.slices]
    kept = [i for i, some in enumerate(batches) if some]
    if len(kept) < FEWEST_SLICES:
        raise UsageError(
            f"{len(kept)} slices have {slice_size} labelled documents, and {FEWEST_SLICES} are needed; "
            "give a smaller --slice-size"
        )
    parts = [batch for i in kept for batch in batches[i]]
    group = np.repeat(np.arange(len(kept)), [len(batches[i]) for i in kept])
    threshold = confidence_threshold(run)
    names = _wanted(features, available_features(run, run.labelled))
    raw = slice_features(run, parts, names, threshold)
    # Means of one value over slices of many sizes differ by rounding: no feature, and no scale to divide by.
    varied = raw.std(axis=0) > _ROUNDING * np.abs(raw).max(axis=0)
    if features and not varied.all():
        alike = FEATURES[names[int(varied.argmin())]]
        raise UsageError(f"{alike} is the same in every slice and tells nothing apart; leave it out")
    names, raw = [name for name, varies in zip(names, varied, strict=True) if varies], raw[:, varied]
    pairs = shrinkage.Pairs(
        (raw - raw.mean(axis=0)) / raw.std(axis=0),
        np.array([run.score[part].mean() for part in parts]),
        np.array([float(len(part)) for part in parts]),
        np.array([run.score[part].var(ddof=1) for part in parts]),
        group,
    )
    return LabelledPairs(slicing, kept, parts, names, raw, pairs, threshold)


def _single_estimators(run: Run, prepared: LabelledPairs, trivial: Array, seed: int) -> list[Estimator]:
    """Every feature alone, and mean confidence and ATC as they are, where every document has them."""
    pairs, parts, confidence = prepared.pairs, prepared.parts, run.confidence.top_probability
    rows = [
        Estimator.of(
            f"{FEATURES[name]} alone",
            pairs,
            shrinkage.cross_fitted(pairs, [(j,)]).estimate,
            trivial,
            feature=name,
            seed=seed,
        )
        for j, name in enumerate(prepared.names)
    ]
    if not np.isnan(confidence[run.labelled]).any():
        mean = np.array([confidence[part].mean() for part in parts])
        rows.append(Estimator.of("mean confidence, as it is", pairs, mean, trivial, seed=seed))
        atc = _thresholded_confidence(run, parts)
        rows.append(Estimator.of("ATC, as it is", pairs, atc, trivial, seed=seed))
    return rows


def _thresholded_confidence(run: Run, parts: Sequence[Rows]) -> Array:
    """ATC: share of each slice above the confidence threshold that gives the other slices' accuracy."""
    confidence, estimate = run.confidence.top_probability, np.empty(len(parts))
    for i, part in enumerate(parts):
        others = np.concatenate([rows for j, rows in enumerate(parts) if j != i])
        threshold = np.quantile(confidence[others], 1 - run.score[others].mean())
        estimate[i] = (confidence[part] > threshold).mean()
    return estimate


def _errors(row: Estimator) -> dict[str, Any]:
    return {"mae": row.mae, "rmse": row.rmse, "better": row.better}


def _worth(row: Estimator) -> dict[str, float]:
    return {"labels": row.worth, "low": row.worth_low, "high": row.worth_high}


def _wanted(asked: Sequence[str], have: Sequence[str]) -> list[str]:
    for name in asked:
        if name not in FEATURES:
            raise UsageError(f"there is no feature {name!r}; choose from {', '.join(FEATURES)}")
        if name not in have:
            raise UsageError(f"some labelled documents have no {FEATURES[name]}; leave {name!r} out")
    return [name for name in have if name in asked] if asked else list(have)


def labelled_part(run: Run) -> dict[str, Any]:
    """The labelled documents of a run: how many, their accuracy, and which ones."""
    rows = run.labelled
    return {
        "documents": len(rows),
        "accuracy": float(run.score[rows].mean()),
        "doc_ids": document_ids(run, rows),
        "documents_sha256": documents_digest(run),
    }


def documents_digest(run: Run) -> str:
    """Of the files that hold the documents of a run: whether two runs are one and the same."""
    digests = sorted(str(manifest["sha256"][DOCUMENTS]) for _, manifest in run.store.parts)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


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
    if kind != FORMAT:
        raise UsageError(f"{file} was written as {kind!r} and this version reads {FORMAT}; calibrate again")
    if missing := sorted(_KEYS - set(content)):
        raise UsageError(f"{file} lacks {missing[0]!r}; it is damaged, calibrate again")
    return dict(content)


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


def check_worth(calibrator: Mapping[str, Any], name: str | Path) -> None:
    """Raise UsageError where the calibrator did not beat knowing nothing when it was validated."""
    if not calibrator["beats_trivial"]:
        raise UsageError(
            f"{name} should not be used: {no_gain(calibrator['validation'])}; take the labelled accuracy "
            f"({calibrator['labelled']['accuracy']:.3f}), or see what it would say with --force"
        )


def no_gain(validation: Mapping[str, Any]) -> str:
    """Why a calibrator that did not beat the labelled accuracy alone should not be used."""
    ours, blind = validation["mae"], validation["trivial_mae"]
    if ours == blind:
        return (
            f"nothing tells slices apart better than the {TRIVIAL}, which is {blind:.1f} points off on "
            "held-out slices"
        )
    verdict = "worse than" if ours > blind + 0.05 else "not reliably better than"
    return f"on held-out slices the estimate is {ours:.1f} points off, {verdict} the {TRIVIAL} ({blind:.1f})"
