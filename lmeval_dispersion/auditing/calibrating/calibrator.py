"""A calibrator: fitted to the labelled slices of a run, it estimates the accuracy of other slices.

A slice's features need no labels: dispersion, the model's confidence, perplexity and prompt length.
The file is JSON, ``dispersion-calibrator/2`` (docs/reference/audit.md): pairs from a run's own slices, shrunk
to the labelled accuracy (``shrinkage``). A calibrator holds for the model, prompts and tasks that it was
fitted on; anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pandas as pd

from lmeval_dispersion.auditing.calibrating import shrinkage
from lmeval_dispersion.auditing.calibrating.shrinkage import Estimator
from lmeval_dispersion.auditing.ranking import clustered
from lmeval_dispersion.auditing.run import Array, AuditRun, Rows, check_labels
from lmeval_dispersion.auditing.slices import Slice, by_column, by_value
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.store.format import DOCUMENTS

FORMAT = "dispersion-calibrator/2"
TRIVIAL, OURS = "labelled accuracy alone", "this estimate"

# Key -> its name in sentences. All are means over documents, except dispersion, a mean over pairs.
FEATURES = {
    "dispersion": "dispersion",
    "confidence": "mean confidence",
    "atc": "ATC",
    "log_perplexity": "log query perplexity",
    "prompt_tokens": "prompt length",
}
CLUSTERS = "cluster"  # slices by k-means on the vectors, where no column makes enough
FEWEST_SLICES = 8
FEWEST_DOCUMENTS = 5  # labelled documents of a fitted slice

_CLUSTER, _MOST_CLUSTERS = 25, 40  # documents a cluster, clusters of a calibration
_ROUNDING = 1e-9  # of a feature's size: closer values count as equal

# Key of `AuditRun.describe` -> its name in messages. `tasks` and `identity` have their own rules.
_MUST_AGREE = {
    "layer": "layer",
    "width": "vector width",
    "prompt_format": "prompt format",
    "chat_template": "chat template",
    "num_fewshot": "number of few-shot examples",
}
_NAMES = {"model": "model", "revision": "revision"}  # compared where no identity is known

# --- slices and their features -----------------------------------------------------------------------------


def document_features(run: AuditRun, threshold: float) -> dict[str, Array]:
    """Signals of every document, NaN where missing; their means are the slices' features.

    ATC counts the documents above ``threshold``, see :func:`confidence_threshold`.
    """
    confidence = run.confidence
    with np.errstate(divide="ignore"):
        log_perplexity = np.log(run.perplexity)
    return {
        "confidence": confidence,
        "atc": np.where(np.isnan(confidence), np.nan, confidence > threshold),
        "log_perplexity": np.where(np.isfinite(log_perplexity), log_perplexity, np.nan),
        "prompt_tokens": run.length,
    }


def confidence_threshold(run: AuditRun, rows: Rows) -> float:
    """ATC's threshold: above it lies a share of these documents that equals their accuracy.

    Source: Garg et al., "Leveraging unlabeled data to predict out-of-distribution performance", ICLR 2022.
    """
    return float(np.quantile(run.confidence[rows], 1.0 - run.score[rows].mean()))


def available_features(run: AuditRun, rows: Rows) -> list[str]:
    """The features that every one of these documents has."""
    shown = document_features(run, 0.0)
    return [name for name in FEATURES if name not in shown or not np.isnan(shown[name][rows]).any()]


def slice_features(run: AuditRun, parts: Sequence[Rows], names: Sequence[str], threshold: float) -> Array:
    """Features of sets of rows, shape (parts, names); NaN where a document lacks one or a set has no pair."""
    shown = document_features(run, threshold)
    values = np.full((len(parts), len(names)), np.nan)
    for j, name in enumerate(names):
        if name in shown:
            values[:, j] = [shown[name][rows].mean() if len(rows) else np.nan for rows in parts]
        else:
            pairs = [i for i, rows in enumerate(parts) if len(rows) > 1]
            values[pairs, j] = run.vectors.dispersions([parts[i] for i in pairs])
    return values


def labelled_slices(run: AuditRun, by: str | None = None, *, seed: int = 0) -> tuple[str, list[Slice]]:
    """The slices to learn from, and the column (or :data:`CLUSTERS`) that makes them.

    Default: subjects, else categories, else tasks, else clusters. Only labelled documents count, in slices
    of at least :data:`FEWEST_DOCUMENTS`.
    """
    rows = run.labelled
    for name in (by,) if by else ("subject", "category", "task"):
        if name == CLUSTERS:
            break
        parts = by_column(run, name) if by else by_value(run.documents[name].tolist())
        large = [part for part in among(parts, rows) if len(part.rows) >= FEWEST_DOCUMENTS]
        if len(large) >= FEWEST_SLICES:
            return name, large
        if by:
            raise UsageError(
                f"{name!r} makes {len(large)} slices of at least {FEWEST_DOCUMENTS} labelled documents, and "
                f"{FEWEST_SLICES} are needed; label more, or slice by {CLUSTERS!r}, which cuts by vectors",
                argument="by",
            )
    count = min(len(rows) // _CLUSTER, _MOST_CLUSTERS)
    parts = vector_clusters(run, rows, count, seed=seed) if count >= FEWEST_SLICES else []
    large = [part for part in parts if len(part.rows) >= FEWEST_DOCUMENTS]
    if len(large) < FEWEST_SLICES:
        raise UsageError(
            f"the {len(rows)} labelled documents make fewer than {FEWEST_SLICES} slices or clusters of at "
            f"least {FEWEST_DOCUMENTS}; label {FEWEST_SLICES * _CLUSTER} documents or more"
        )
    return CLUSTERS, large


def among(slices: Sequence[Slice], rows: Rows) -> list[Slice]:
    """The slices with the documents of ``rows`` only; empty ones are left out."""
    parts = [Slice(part.name, np.intersect1d(part.rows, rows)) for part in slices]
    return [part for part in parts if len(part.rows)]


def vector_clusters(run: AuditRun, rows: Rows, count: int, *, seed: int = 0) -> list[Slice]:
    """k-means clusters of these documents by their vectors."""
    labels, _ = clustered(run.vectors.rows[rows], max(count, 1), seed=seed)
    return [
        Slice(f"cluster {k + 1}", np.sort(rows[labels == label])) for k, label in enumerate(np.unique(labels))
    ]


# --- the fit -----------------------------------------------------------------------------------------------


class Validation(TypedDict):
    """Errors of a calibrator in points, each slice held out in turn, and of the labelled accuracy alone."""

    slices: int
    mae: float
    trivial_mae: float


@dataclass(frozen=True)
class Labelled:
    """The documents that a calibrator was fitted to: ids by task, such as ``0-99,120``, and their digest."""

    documents: int
    accuracy: float
    doc_ids: Mapping[str, str]
    documents_sha256: str


@dataclass(frozen=True)
class FittedSlice:
    """A labelled slice: what it shows, and its scaled error by the fit of the ``fold`` that left it out."""

    slice: str
    documents: int
    accuracy: float
    features: Mapping[str, float]
    score: float
    fold: int


@dataclass(frozen=True, kw_only=True)
class Calibrator:
    """A fit, as in its file ``dispersion-calibrator/2``; docs/reference/audit.md has the formula.

    Attributes:
        by: The column, or :data:`CLUSTERS`, that made the slices.
        coefficients: Of the standardised ``features``; ``used`` names those that are not 0.
        level: Of the intervals, in (0, 1).
        ranges: Lowest and highest value of each feature, and of the ``estimate``, that is estimated.
    """

    model: str
    revision: str | None
    layer: str
    width: int
    prompt_format: str | None
    chat_template: str | None
    num_fewshot: Any
    tasks: Mapping[str, Any]
    identity: Mapping[str, Any] | None = None
    by: str
    documents_a_slice: Sequence[int]
    labelled: Labelled
    features: Mapping[str, Mapping[str, float]]
    atc_threshold: float | None
    beats_trivial: bool
    intercept: float
    used: Sequence[str]
    coefficients: Sequence[float]
    validation: Validation
    error_size: shrinkage.ErrorSize
    level: float
    folds: Sequence[shrinkage.Fit]
    ranges: Mapping[str, Sequence[float]]
    slices: Sequence[FittedSlice]
    seed: int = 0
    run_created: str | None = None
    version: str = __version__

    def to_json(self) -> str:
        """The file."""
        content = {"format": FORMAT, "protocol": "natural", **asdict(self)}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, name: str | Path) -> Calibrator:
        """Read a file of :meth:`to_json`; UsageError for anything else."""
        try:
            content = json.loads(Path(name).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"expected a calibrator from `dispersion calibrate`, got {name}: {reason}; "
                "`dispersion calibrate RUN -o FILE` writes one"
            ) from None
        kind = content.get("format") if isinstance(content, dict) else None
        if not str(kind).startswith("dispersion-calibrator/"):
            raise UsageError(f"{name} is not a calibrator; `dispersion calibrate RUN -o {name}` writes one")
        if kind != FORMAT:
            raise UsageError(
                f"{name} was written as {kind!r} and this version reads {FORMAT}; calibrate again"
            )
        if missing := sorted(f.name for f in fields(cls) if f.default is MISSING and f.name not in content):
            raise UsageError(f"{name} lacks {missing[0]!r}; it is damaged, calibrate again")
        content = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        content["labelled"] = Labelled(**content["labelled"])
        content["error_size"] = shrinkage.ErrorSize(**content["error_size"])
        content["folds"] = [shrinkage.Fit(**fold) for fold in content["folds"]]
        return cls(**{**content, "slices": [FittedSlice(**part) for part in content["slices"]]})


class Fitted(NamedTuple):
    """A calibrator, and the errors that judge it.

    Attributes:
        calibrator: As written to the file.
        estimators: This estimate, every feature alone, the model's own confidence, and the labelled accuracy.
        isotonic: Isotonic regression on dispersion alone; None if dispersion is not a feature.
        held_out: This estimate of every slice by the fit to the others, shape (slices,): its errors are those
            of the first estimator, also where the file holds the labelled accuracy.
        half_width: Of the interval of the mean slice.
    """

    calibrator: Calibrator
    estimators: list[Estimator]
    isotonic: Estimator | None
    held_out: Array
    half_width: float


def fit_calibrator(
    run: AuditRun, *, by: str | None = None, features: Sequence[str] = (), seed: int = 0
) -> Fitted:
    """Fit to the labelled slices of a run; arguments and errors are those of `calibrate`."""
    check_labels(run, "calibration needs")
    made_by, slices = labelled_slices(run, by, seed=seed)
    parts = [part.rows for part in slices]
    threshold = confidence_threshold(run, run.labelled)
    names, raw = _varied_features(run, parts, features, threshold)
    centre, scale = raw.mean(axis=0), raw.std(axis=0)
    scores = [run.score[part] for part in parts]
    pairs = shrinkage.Pairs(
        (raw - centre) / scale,
        np.array([values.mean() for values in scores]),
        np.array([float(len(values)) for values in scores]),
        np.array([values.var(ddof=1) for values in scores]),
    )
    allowed = shrinkage.families(len(names))
    fit = shrinkage.shrunken_fit(pairs, allowed)
    trivial, tested = (shrinkage.cross_fitted(pairs, families) for families in ([], allowed))
    estimators = [
        Estimator.of(OURS, pairs, tested.estimate, trivial.estimate, seed=seed),
        *_single_estimators(run, names, parts, pairs, trivial.estimate, seed),
        Estimator.of(TRIVIAL, pairs, trivial.estimate, trivial.estimate, seed=seed),
    ]
    ours, blind = estimators[0], estimators[-1]
    # If all slices shrink it to nothing, it is the trivial predictor, whatever the folds chose.
    beats = ours.better and bool(np.any(fit.coefficients))
    folds = tested if beats else trivial
    if not beats:
        fit = shrinkage.shrunken_fit(pairs, [])
    size = shrinkage.ErrorSize.of(pairs, folds.estimate)
    score = np.abs(folds.estimate - pairs.accuracy) / size.at(pairs.documents)
    level = shrinkage.level_reached(len(score))
    about = run.describe()
    rows, accuracy = run.labelled, float(run.score[run.labelled].mean())
    labelled = Labelled(len(rows), accuracy, document_ids(run, rows), documents_digest(run))
    calibrator = Calibrator(
        **{key: about[key] for key in (*_NAMES, *_MUST_AGREE, "tasks")},
        identity=run.store.manifest.get("identity"),
        by=made_by,
        documents_a_slice=[int(pairs.documents.min()), int(pairs.documents.max())],
        labelled=labelled,
        features={
            name: {"centre": float(c), "scale": float(s)}
            for name, c, s in zip(names, centre, scale, strict=True)
        },
        atc_threshold=None if math.isnan(threshold) else threshold,
        beats_trivial=beats,
        intercept=fit.intercept,
        used=[name for name, value in zip(names, fit.coefficients, strict=True) if value],
        coefficients=fit.coefficients,
        validation={"slices": len(score), "mae": ours.mae, "trivial_mae": blind.mae},
        error_size=size,
        level=level,
        folds=folds.fits,
        ranges={
            **{name: list(shrinkage.fitted_range(raw[:, j])) for j, name in enumerate(names)},
            "estimate": list(shrinkage.fitted_range(fit.value(pairs.z))),
        },
        slices=[
            FittedSlice(
                part.name,
                len(part.rows),
                float(pairs.accuracy[i]),
                dict(zip(names, raw[i].tolist(), strict=True)),
                float(score[i]),
                int(folds.fold[i]),
            )
            for i, part in enumerate(slices)
        ],
        seed=seed,
        run_created=about["created"],
    )
    isotonic = None
    if "dispersion" in names:
        monotone = shrinkage.cross_fitted(pairs, [(names.index("dispersion"),)], shrinkage.isotonic_fit)
        isotonic = Estimator.of("isotonic calibration", pairs, monotone.estimate, trivial.estimate, seed=seed)
    mean_size = float(size.at(pairs.documents.mean()))
    half = float(np.sort(score)[shrinkage.conformal_rank(len(score), level) - 1]) * mean_size
    return Fitted(calibrator, estimators, isotonic, tested.estimate, half)


def _varied_features(
    run: AuditRun, parts: Sequence[Rows], asked: Sequence[str], threshold: float
) -> tuple[list[str], Array]:
    """The ``asked`` features (default: all) that differ between slices, and their values."""
    have = available_features(run, run.labelled)
    for name in asked:
        if name not in FEATURES:
            raise UsageError(f"there is no feature {name!r}; choose from {', '.join(FEATURES)}")
        if name not in have:
            raise UsageError(f"some labelled documents have no {FEATURES[name]}; leave {name!r} out")
    names = [name for name in have if name in asked or not asked]
    raw = slice_features(run, parts, names, threshold)
    # Means of one value over slices of many sizes differ by rounding: such a feature has no scale to divide
    # by.
    varied = raw.std(axis=0) > _ROUNDING * np.abs(raw).max(axis=0)
    if asked and not varied.all():
        alike = FEATURES[names[int(varied.argmin())]]
        raise UsageError(f"{alike} is the same in every slice, so it cannot help; leave it out")
    return [name for name, varies in zip(names, varied, strict=True) if varies], raw[:, varied]


def _single_estimators(
    run: AuditRun, names: Sequence[str], parts: list[Rows], pairs: shrinkage.Pairs, trivial: Array, seed: int
) -> list[Estimator]:
    """Every feature alone, and mean confidence and ATC as they are, where every document has them."""
    rows = []
    for j, name in enumerate(names):
        alone = shrinkage.cross_fitted(pairs, [(j,)]).estimate
        rows.append(Estimator.of(f"{FEATURES[name]} alone", pairs, alone, trivial, feature=name, seed=seed))
    confidence = run.confidence
    if not np.isnan(confidence[run.labelled]).any():
        mean = np.array([confidence[part].mean() for part in parts])
        others = [np.concatenate([*parts[:i], *parts[i + 1 :]]) for i in range(len(parts))]
        # The threshold of each slice is that of the other slices.
        atc = [
            (confidence[part] > confidence_threshold(run, rest)).mean()
            for part, rest in zip(parts, others, strict=True)
        ]
        rows.append(Estimator.of("mean confidence, as it is", pairs, mean, trivial, seed=seed))
        rows.append(Estimator.of("ATC, as it is", pairs, np.array(atc), trivial, seed=seed))
    return rows


# --- the labelled documents --------------------------------------------------------------------------------


def documents_digest(run: AuditRun) -> str:
    """Digest of a run's document files; equal for the same run."""
    digests = sorted(str(manifest["sha256"][DOCUMENTS]) for _, manifest in run.store.parts)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def document_ids(run: AuditRun, rows: Rows) -> dict[str, str]:
    """The documents of ``rows`` by task, their ids as ranges such as ``0-99,120``."""
    ids = pd.Series(run.documents["doc_id"].to_numpy()[rows])
    return {
        str(task): _ranges(np.unique(numbers.to_numpy(dtype=np.int64)))
        for task, numbers in ids.groupby(run.documents["task"].astype(str).to_numpy()[rows])
    }


def rows_of_ids(run: AuditRun, ids: Mapping[str, str]) -> Rows:
    """Rows of the documents that :func:`document_ids` recorded; missing ones are left out."""
    numbers = run.documents["doc_id"].to_numpy()
    tasks = run.documents["task"].astype(str).to_numpy()
    chosen = np.zeros(len(numbers), dtype=bool)
    for task, ranges in ids.items():
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            chosen |= (tasks == task) & (numbers >= int(first)) & (numbers <= int(last or first))
    return np.flatnonzero(chosen)


def _ranges(ids: Rows) -> str:
    runs = np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# --- its application -------------------------------------------------------------------------------------


def check_fits(calibrator: Calibrator, run: AuditRun) -> list[str]:
    """Notes on details that could not be compared; raises if the calibrator does not apply to this run."""
    about, notes = run.describe(), []
    ours, theirs = calibrator.identity, run.store.manifest.get("identity")
    compared = dict(_MUST_AGREE)
    if ours is None or theirs is None:
        compared = {**_NAMES, **_MUST_AGREE}
        notes.append(
            f"{'The calibrator' if ours is None else 'The run'} does not record its weights, adapter or "
            "quantisation: only the model's name and revision were compared."
        )
    elif different := _different(ours, theirs, same_tasks=set(about["tasks"]) == set(calibrator.tasks)):
        fields = ", ".join(f"{key} {ours.get(key)!r}, now {theirs.get(key)!r}" for key in different)
        raise fitted_elsewhere(f"on another model: {fields}")
    for key, name in compared.items():
        if (ours := getattr(calibrator, key)) != about[key]:
            raise fitted_elsewhere(f"for {name} {ours!r}, and the run has {about[key]!r}")
    for task, version in about["tasks"].items():
        if task not in calibrator.tasks:
            raise fitted_elsewhere(f"on {', '.join(calibrator.tasks)}, and the run has task {task!r}")
        if (fitted_on := calibrator.tasks[task]) != version:
            raise fitted_elsewhere(
                f"on version {fitted_on} of task {task!r}, and the run has version {version}"
            )
    return notes


def fitted_elsewhere(reason: str) -> UsageError:
    """The error for a run that a calibrator does not apply to."""
    return UsageError(
        f"this calibrator was fitted {reason}; a calibration does not carry over, so label some documents "
        "of this run and calibrate on them"
    )


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, same_tasks: bool) -> list[str]:
    """Keys of two identities whose values differ."""
    return [
        key
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
        and (same_tasks or not any(str(side.get(key)).startswith("several:") for side in (ours, theirs)))
    ]


def check_worth(calibrator: Calibrator, name: str | Path) -> None:
    """Raise UsageError if the calibrator did not beat the labelled accuracy when it was validated."""
    if not calibrator.beats_trivial:
        raise UsageError(
            f"{name} should not be used: {no_gain(calibrator.validation)}; take the labelled accuracy "
            f"({calibrator.labelled.accuracy:.3f}), or force its estimate"
        )


def no_gain(validation: Validation) -> str:
    """Why a calibrator that did not beat the labelled accuracy alone should not be used."""
    ours, blind = validation["mae"], validation["trivial_mae"]
    if ours == blind:
        return f"nothing beats the {TRIVIAL}, which is {blind:.1f} points off on held-out slices"
    verdict = "worse than" if ours > blind + 0.05 else "not reliably better than"
    return f"on held-out slices the estimate is {ours:.1f} points off, {verdict} the {TRIVIAL} ({blind:.1f})"
