"""A calibrator: fitted to the labelled slices of a run, it estimates the accuracy of other slices.

The estimate is the isotonic regression of a slice's accuracy on one figure that needs no labels: dispersion,
or the model's mean confidence, whichever estimates left-out slices with the smaller squared error. Slices are
judged by the fit to the others; where the figure does not beat the labelled accuracy alone, the labelled
accuracy is the estimate.

Intervals are jackknife+ (Barber, Candès, Ramdas and Tibshirani, Annals of Statistics 49, 2021) on errors
divided by the size of error of a slice of as many documents: 95 % for slices exchangeable with the labelled
ones (proven: 90 %; simulated: ``benchmarks/audit_conclusions.py --calibrators``).

The file is JSON, ``dispersion-calibrator/3`` (docs/reference/audit.md). It holds the labelled slices; the fit
is made from them when it is read. A calibrator holds for the model, prompts and tasks that it was fitted on;
anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

import numpy as np
import pandas as pd

from lmeval_dispersion.auditing.ranking import clustered
from lmeval_dispersion.auditing.run import Array, AuditRun, Rows, check_labels
from lmeval_dispersion.auditing.slices import Slice, by_column, by_value
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import write_whole
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.report import Col
from lmeval_dispersion.statistics import (
    LEVEL,
    Bounds,
    percentiles,
    rank_correlations,
    resampled_means,
    student_quantile,
)
from lmeval_dispersion.store.format import DOCUMENTS

if TYPE_CHECKING:
    from sklearn.isotonic import IsotonicRegression

FORMAT = "dispersion-calibrator/3"
TRIVIAL = "labelled accuracy alone"
FIGURES = {"dispersion": "dispersion", "confidence": "mean confidence"}  # key -> name in sentences
CLUSTERS = "cluster"  # slices by k-means on the vectors, where no column makes enough
FEWEST_SLICES = 8
FEWEST_DOCUMENTS = 5  # labelled documents of a fitted slice

_CLUSTER, _MOST_CLUSTERS = 25, 40  # documents a cluster, clusters of a calibration
_ROUNDING = 1e-9  # of a figure's size: closer values count as equal
_MARGIN = 0.25  # of the fitted range, on either side
_SHIFT = 0.01  # how often similar slices may be called different

# Key of `AuditRun.describe` -> its name in messages. `tasks` and `identity` have their own rules.
_MUST_AGREE = {
    "layer": "layer",
    "width": "vector width",
    "prompt_format": "prompt format",
    "chat_template": "chat template",
    "num_fewshot": "number of few-shot examples",
}
_NAMES = {"model": "model", "revision": "revision"}  # compared where no identity is known

# --- slices and their figures ------------------------------------------------------------------------------


def slice_figures(run: AuditRun, parts: Sequence[Rows], figure: str) -> Array:
    """A figure of sets of rows, shape (parts,); NaN where a document has no confidence or a set no pair."""
    if figure == "confidence":
        return np.array([run.confidence[rows].mean() if len(rows) else np.nan for rows in parts])
    values = np.full(len(parts), np.nan)
    pairs = [i for i, rows in enumerate(parts) if len(rows) > 1]
    values[pairs] = run.vectors.dispersions([parts[i] for i in pairs])
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


class Pairs(NamedTuple):
    """Labelled slices with their figure.

    Attributes:
        figure: Shape (S,).
        accuracy: Mean score, shape (S,), in [0, 1].
        documents: Labelled documents, shape (S,); also the weight in a fit.
        variance: Variance of the scores inside the slice (n - 1 in the denominator), shape (S,).
    """

    figure: Array
    accuracy: Array
    documents: Array
    variance: Array


def isotonic(figure: Array, accuracy: Array, documents: Array | None = None) -> IsotonicRegression:
    """Accuracy as it only rises, or only falls, with a figure; (S,) each, slices weighted by documents.

    Spearman's correlation sets the direction, and the ends continue flat. On equal figures it is the mean.
    Source: Barlow et al., Statistical Inference under Order Restrictions, 1972.
    """
    from sklearn.isotonic import IsotonicRegression

    falls = rank_correlations(figure, accuracy[None])[0] < 0
    fit = IsotonicRegression(increasing=not falls, out_of_bounds="clip")
    return fit.fit(figure, accuracy, sample_weight=documents)


def cross_fitted(pairs: Pairs) -> tuple[list[IsotonicRegression], Array]:
    """For every slice the fit to the others, and its estimate by that fit, shape (S,)."""
    others = ~np.eye(len(pairs.accuracy), dtype=bool)
    fits = [isotonic(pairs.figure[rest], pairs.accuracy[rest], pairs.documents[rest]) for rest in others]
    own = zip(fits, pairs.figure, strict=True)
    return fits, np.array([fit.predict([x])[0] for fit, x in own])


@dataclass(frozen=True)
class ErrorSize:
    """Error of estimates of slices: sqrt(between + within / documents).

    Attributes:
        between: Mean squared error against a slice's true accuracy, 0 if none is visible.
        within: Mean variance of the scores inside slices; over n documents it makes the sampling noise.
    """

    between: float
    within: float

    @classmethod
    def of(cls, pairs: Pairs, estimate: Array) -> ErrorSize:
        """Error size of estimates by fits that did not see the slices."""
        within = float(pairs.variance.mean())
        excess = np.square(estimate - pairs.accuracy) - within / pairs.documents
        return cls(max(float(excess.mean()), 0.0), within)

    def at(self, documents: Array | float) -> Array:
        """Standard error of an estimate of slices with this many documents."""
        size = np.sqrt(self.between + self.within / documents)
        return np.where(size > 0, size, 1.0)


def conformal_rank(slices: int, level: float) -> int:
    """Rank, from 1, of the held-out error that bounds a new slice's interval."""
    return min(math.ceil((slices + 1) * level - 1e-9), slices)


def jackknife_plus(centres: Array, half: Array, level: float) -> Bounds:
    """Interval of one slice from the estimates of S left-out fits (S,) and S half widths (S,).

    Source: Barber et al. 2021, eq. 1.5: quantiles of centre - half and of centre + half.
    """
    n = len(centres)
    rank = conformal_rank(n, level)
    low, high = np.sort(centres - half)[n - rank], np.sort(centres + half)[rank - 1]
    return Bounds(float(max(low, 0.0)), float(min(high, 1.0)))


@dataclass(frozen=True)
class Estimator:
    """Errors in points of one estimate of slices that its fit did not see, and its worth in labels.

    The mean of k labels of n, drawn without replacement, has the variance v (1/k - 1/n), v that of the scores
    (Cochran, Sampling Techniques, 1977, 2.6). Worth k labels: k = mean v / (mean squared error + mean v / n),
    with a bootstrap over slices. The unit is that of Fu et al., arXiv 2305.14802.

    Attributes:
        figure: What the isotonic regression reads it off; empty for estimates without a fit.
        mae, rmse: Mean absolute error, and root of the mean squared error, over slices.
        better: Whether the squared error is lower than that of the labelled accuracy alone, by a one-sided
            paired Student test over slices at 5 %, and the mean absolute error is lower.
    """

    estimator: Annotated[str, Col("Estimate")]
    figure: str
    mae: Annotated[float, Col("Mean error (points)", ".2f")]
    rmse: Annotated[float, Col("RMSE", ".2f", drop=1)]
    worth: Annotated[float, Col("Worth labels a slice", ".0f")]
    worth_low: Annotated[float, Col("95 % from", ".0f", drop=2)]
    worth_high: Annotated[float, Col("to", ".0f", drop=2)]
    better: Annotated[bool, Col("Beats the labelled accuracy", drop=3)]

    @classmethod
    def of(
        cls,
        name: str,
        pairs: Pairs,
        estimate: Array,
        trivial: Array,
        *,
        figure: str = "",
        tests: int = 1,
        seed: int = 0,
    ) -> Estimator:
        """From estimates of left-out slices (S,) and those of the labelled accuracy alone (S,)."""
        ours, theirs = (100 * (values - pairs.accuracy) for values in (estimate, trivial))
        squares = [np.square(errors) for errors in (ours, theirs)]
        mae, trivial_mae = (float(np.abs(errors).mean()) for errors in (ours, theirs))
        difference = squares[1] - squares[0]
        n = len(difference)
        margin = student_quantile(LEVEL, n - 1) * difference.std(ddof=1) / math.sqrt(n)
        better = bool(difference.mean() > margin and mae < trivial_mae)
        off = np.square(estimate - pairs.accuracy) + pairs.variance / pairs.documents
        columns = np.stack([pairs.variance, off], axis=1)
        samples = resampled_means(columns, seed)
        bounds = percentiles(samples[:, 0] / samples[:, 1])
        worth = float(columns[:, 0].mean() / columns[:, 1].mean())
        return cls(name, figure, mae, math.sqrt(squares[0].mean()), worth, *bounds, better)


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
    """A labelled slice: its documents, their mean score and its variance, and the slice's figure."""

    slice: str
    documents: int
    accuracy: float
    variance: float
    figure: float


@dataclass(frozen=True, kw_only=True)
class Calibrator:
    """A fit, as in its file ``dispersion-calibrator/3``; docs/reference/audit.md has the formula.

    Attributes:
        by: The column, or :data:`CLUSTERS`, that made the slices.
        figure: The slices' figure, of :data:`FIGURES`.
        beats_trivial: Whether it beat the labelled accuracy alone; else that is the estimate.
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
    labelled: Labelled
    figure: str
    beats_trivial: bool
    validation: Validation
    slices: Sequence[FittedSlice]
    seed: int = 0
    run_created: str | None = None
    version: str = __version__

    def to_json(self) -> str:
        """The file."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the file, which `predict` reads."""
        write_whole(Path(path), self.to_json().encode())

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
        return cls(**{**content, "slices": [FittedSlice(**part) for part in content["slices"]]})

    @cached_property
    def pairs(self) -> Pairs:
        """The slices that are fitted; without a figure where the labelled accuracy is the estimate."""
        columns = [[getattr(part, name) for part in self.slices] for name in Pairs._fields]
        figure, *others = (np.array(column, dtype=np.float64) for column in columns)
        return Pairs(figure if self.beats_trivial else np.zeros_like(figure), *others)

    @property
    def documents_a_slice(self) -> list[int]:
        """Documents of the smallest and of the largest slice."""
        sizes = [part.documents for part in self.slices]
        return [min(sizes), max(sizes)]

    @property
    def level(self) -> float:
        """Level of the intervals: 95 %, from 19 slices on; S / (S + 1) below."""
        return LEVEL if len(self.slices) >= 19 else len(self.slices) / (len(self.slices) + 1)

    @property
    def range(self) -> Bounds:
        """The range of the figure that is estimated: the slices', wider by a quarter on either side."""
        values = [part.figure for part in self.slices]
        low, high = min(values), max(values)
        return Bounds(low - _MARGIN * (high - low), high + _MARGIN * (high - low))

    def differs(self, figures: Array) -> bool:
        """Whether slices with these figures (s,) differ from the labelled ones: no interval holds for them.

        By a two-sample Kolmogorov-Smirnov test at 1 %.
        """
        from scipy.stats import ks_2samp

        ours = [part.figure for part in self.slices]
        return bool(len(figures) and ks_2samp(ours, figures, method="asymp").pvalue < _SHIFT)

    def applied(self, figures: Array, documents: Array) -> Applied:
        """Estimates of slices with these figures and numbers of documents, (s,) each."""
        x = figures if self.beats_trivial else np.zeros_like(figures)
        fits, estimate = cross_fitted(self.pairs)
        error = ErrorSize.of(self.pairs, estimate)
        score = np.abs(estimate - self.pairs.accuracy) / error.at(self.pairs.documents)
        size = error.at(np.minimum(documents, self.documents_a_slice[1]))
        value = isotonic(*self.pairs[:3]).predict(x)
        return Applied(value, np.array([fit.predict(x) for fit in fits]), size, score, self.level)


class Applied(NamedTuple):
    """A calibrator's estimates of s slices, from S labelled ones.

    Attributes:
        value, size: Estimates, and sizes of their errors, shape (s,).
        folds: Estimates by the fits that each leave out a labelled slice, shape (S, s).
        score: Errors of the labelled slices, left out, divided by their size, shape (S,).
    """

    value: Array
    folds: Array
    size: Array
    score: Array
    level: float

    def interval(self, i: int) -> Bounds:
        """Interval of the estimate of slice ``i``."""
        return jackknife_plus(self.folds[:, i], self.score * self.size[i], self.level)

    @property
    def half_width(self) -> Array:
        """About half an interval, shape (s,)."""
        rank = conformal_rank(len(self.score), self.level)
        return np.asarray(np.sort(self.score)[rank - 1] * self.size)


class Fitted(NamedTuple):
    """A calibrator, and the errors that judge it.

    Attributes:
        calibrator: As written to the file.
        estimators: The chosen figure's estimate, the other figure's, confidence and ATC as they are, and the
            labelled accuracy.
        held_out: Every slice by the first estimator's fit to the others, shape (slices,).
    """

    calibrator: Calibrator
    estimators: list[Estimator]
    held_out: Array


def fit_calibrator(run: AuditRun, *, by: str | None = None, seed: int = 0) -> Fitted:
    """Fit to the labelled slices of a run; arguments and errors are those of `calibrate`."""
    check_labels(run, "calibration needs")
    made_by, slices = labelled_slices(run, by, seed=seed)
    parts = [part.rows for part in slices]
    scores = [run.score[part] for part in parts]
    known = (
        np.array([values.mean() for values in scores]),
        np.array([float(len(values)) for values in scores]),
        np.array([values.var(ddof=1) for values in scores]),
    )
    figures = {name: slice_figures(run, parts, name) for name in FIGURES}
    # Means of one value over slices of many sizes differ by rounding: NaN, and such a figure, order nothing.
    varied = {n: x for n, x in figures.items() if x.std() > _ROUNDING * np.abs(x).max()}
    if not varied:
        raise UsageError("every slice has the same dispersion and confidence, so neither tells its accuracy")
    blind = Pairs(np.zeros(len(parts)), *known)
    trivial = cross_fitted(blind)[1]
    estimates = {name: cross_fitted(Pairs(x, *known))[1] for name, x in varied.items()}
    names = sorted(estimates, key=lambda name: float(np.square(estimates[name] - blind.accuracy).mean()))
    estimators = [
        *(
            Estimator.of(
                f"{FIGURES[n]}, calibrated",
                blind,
                estimates[n],
                trivial,
                figure=n,
                seed=seed,
            )
            for n in names
        ),
        *_uncalibrated(run, parts, blind, trivial, seed),
        Estimator.of(TRIVIAL, blind, trivial, trivial, seed=seed),
    ]
    about, rows = run.describe(), run.labelled
    calibrator = Calibrator(
        **{key: about[key] for key in (*_NAMES, *_MUST_AGREE, "tasks")},
        identity=run.store.manifest.get("identity"),
        by=made_by,
        labelled=Labelled(
            len(rows), float(run.score[rows].mean()), document_ids(run, rows), documents_digest(run)
        ),
        figure=names[0],
        beats_trivial=estimators[0].better,
        validation={"slices": len(parts), "mae": estimators[0].mae, "trivial_mae": estimators[-1].mae},
        slices=[
            FittedSlice(part.name, len(part.rows), float(accuracy), float(variance), float(figure))
            for part, accuracy, variance, figure in zip(
                slices, known[0], known[2], varied[names[0]], strict=True
            )
        ],
        seed=seed,
        run_created=about["created"],
    )
    return Fitted(calibrator, estimators, estimates[names[0]])


def confidence_threshold(run: AuditRun, rows: Rows) -> float:
    """ATC's threshold: above it lies a share of these documents that equals their accuracy.

    Source: Garg et al., "Leveraging unlabeled data to predict out-of-distribution performance", ICLR 2022.
    """
    return float(np.quantile(run.confidence[rows], 1.0 - run.score[rows].mean()))


def _uncalibrated(
    run: AuditRun, parts: list[Rows], pairs: Pairs, trivial: Array, seed: int
) -> list[Estimator]:
    """Mean confidence and ATC (average thresholded confidence) as they are, if every document has them."""
    confidence = run.confidence
    if np.isnan(confidence[run.labelled]).any():
        return []
    # The threshold of each slice is that of the other slices.
    others = [np.concatenate([*parts[:i], *parts[i + 1 :]]) for i in range(len(parts))]
    thresholds = [confidence_threshold(run, rest) for rest in others]
    estimates = {
        "mean confidence, as it is": [confidence[part].mean() for part in parts],
        "ATC, as it is": [
            (confidence[part] > threshold).mean() for part, threshold in zip(parts, thresholds, strict=True)
        ],
    }
    return [
        Estimator.of(name, pairs, np.array(values), trivial, seed=seed) for name, values in estimates.items()
    ]


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
    """Check that a calibrator applies to a run; returns notes on details that neither records.

    Raises:
        UsageError: The model, the layer, the prompts or the tasks differ.
    """
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
