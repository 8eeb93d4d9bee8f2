"""A calibrator: fitted to the labelled slices of a run, it estimates the accuracy of other slices.

The estimate is the isotonic regression of a slice's accuracy on its dispersion. Slices are judged by the fit
to the others; a calibrator that does not beat the labelled accuracy alone refuses to estimate.

Intervals are jackknife+ (Barber, Candès, Ramdas and Tibshirani, Annals of Statistics 49, 2021) on errors
divided by the size of error of a slice of as many documents: 95 % for slices exchangeable with the labelled
ones (proven: 90 %; simulated: ``benchmarks/audit_conclusions.py --calibrators``).

The file is JSON, ``dispersion-calibrator/3`` (docs/reference/audit.md). It holds the labelled slices; the fit
is made from them when it is read. A calibrator holds for the model, prompts and tasks that it was fitted on;
anything else is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np

from lmeval_dispersion.auditing.ranking import clustered
from lmeval_dispersion.auditing.run import Array, AuditRun, Rows
from lmeval_dispersion.auditing.slices import Slice, by_column, by_value
from lmeval_dispersion.errors import UsageError
from lmeval_dispersion.files import hashed, read_json, write_whole
from lmeval_dispersion.installation import __version__
from lmeval_dispersion.layouts import Form, Text, checked
from lmeval_dispersion.statistics import LEVEL, Bounds, rank_correlations
from lmeval_dispersion.store.format import DOCUMENTS
from lmeval_dispersion.store.identity import differences, shown_differences

if TYPE_CHECKING:
    from sklearn.isotonic import IsotonicRegression

FORMAT = "dispersion-calibrator/3"
TRIVIAL = "labelled accuracy alone"
CLUSTERS = "cluster"  # slices by k-means on the vectors, where no column gives enough
FEWEST_SLICES = 8
FEWEST_DOCUMENTS = 5  # fewest labelled documents in a fitted slice

_CLUSTER = 25  # documents per cluster
_MOST_CLUSTERS = 40  # in a calibration
_MARGIN = 0.25  # share of the fitted range, on either side
_SHIFT = 0.01  # chance that similar slices are called different

# Key of `AuditRun.describe` -> its name in messages. `tasks` and `identity` have their own rules.
MUST_AGREE = {
    "layer": "layer",
    "width": "vector width",
    "prompt_format": "prompt format",
    "chat_template": "chat template",
    "num_fewshot": "number of few-shot examples",
}
NAMES = {"model": "model", "revision": "revision"}  # compared where no identity is known

_REPAIR = "calibrate again"
_RANGES = re.compile(r"\d{1,18}(-\d{1,18})?(,\d{1,18}(-\d{1,18})?)*")
Share = Annotated[float, 0, 1]
Ids = Annotated[str, Form(lambda text: _RANGES.fullmatch(text) is not None, "ids such as 0-99,120")]

# --- slices ------------------------------------------------------------------------------------------------


def labelled_slices(
    run: AuditRun, by: str | None = None, *, seed: int = 0
) -> tuple[str, list[Slice]]:
    """Choose the slices to which a calibrator is fitted.

    Returns the column by which documents are sliced (or :data:`CLUSTERS`), and the slices, which
    hold labelled documents only. Without ``by``, documents are sliced by the first of ``subject``,
    ``category``, ``task`` and clusters of vectors that gives at least :data:`FEWEST_SLICES` slices
    of :data:`FEWEST_DOCUMENTS` labelled documents or more. Smaller slices are left out.

    Raises:
        UsageError: There are too few such slices, or there is no column ``by``.
    """
    rows = run.labelled
    columns = ["subject", "category", "task"]
    if by:
        columns = [] if by == CLUSTERS else [by]
    for name in columns:
        parts = by_column(run, name) if by else by_value(run.documents[name].tolist())
        large = _large(cut_to(parts, rows))
        if len(large) >= FEWEST_SLICES:
            return name, large
        if by:
            raise UsageError(
                f"expected {FEWEST_SLICES} slices or more of at least {FEWEST_DOCUMENTS} labelled "
                f"documents each, got {len(large)} by {name!r}; label more documents, or slice by "
                f"{CLUSTERS!r}, which groups documents by their vectors",
                argument="slice",
            )
    count = min(len(rows) // _CLUSTER, _MOST_CLUSTERS)
    if count >= FEWEST_SLICES:
        large = _large(vector_clusters(run, rows, count, seed=seed))
        if len(large) >= FEWEST_SLICES:
            return CLUSTERS, large
    step = "label more documents"
    if count < FEWEST_SLICES:
        step = f"{step}, {FEWEST_SLICES * _CLUSTER} or more in all"
    raise UsageError(
        f"the {len(rows)} labelled documents make fewer than {FEWEST_SLICES} slices or clusters of at "
        f"least {FEWEST_DOCUMENTS} documents; {step}"
    )


def _large(slices: Sequence[Slice]) -> list[Slice]:
    return [part for part in slices if len(part.rows) >= FEWEST_DOCUMENTS]


def cut_to(slices: Sequence[Slice], rows: Rows) -> list[Slice]:
    """Return the slices cut to the documents ``rows``; slices that become empty are left out."""
    parts = [Slice(part.name, np.intersect1d(part.rows, rows)) for part in slices]
    return [part for part in parts if len(part.rows)]


def vector_clusters(run: AuditRun, rows: Rows, count: int, *, seed: int = 0) -> list[Slice]:
    """Cluster the documents ``rows`` by k-means on their vectors, into at most ``count`` slices."""
    labels, _ = clustered(run.vectors.rows[rows], max(count, 1), seed=seed)
    return [
        Slice(f"cluster {k + 1}", np.sort(rows[labels == label]))
        for k, label in enumerate(np.unique(labels))
    ]


# --- the fit -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FittedSlice:
    """A labelled slice to which a calibrator was fitted.

    Attributes:
        slice: Name of the slice.
        documents: Number of labelled documents in the slice.
        accuracy: Mean score of these documents, in [0, 1].
        variance: Variance of the scores (n - 1 in the denominator).
        dispersion: Mean cosine distance over all pairs of the documents' vectors.
    """

    slice: Text
    documents: Annotated[int, 2]
    accuracy: Share
    variance: Annotated[float, 0, 0.5]  # that of one 0 and one 1
    dispersion: Annotated[float, -1e-6, 2.000001]  # 0 to 2, with rounding


class Pairs(NamedTuple):
    """The dispersion and the accuracy of S labelled slices, as arrays of shape (S,).

    Attributes:
        dispersion: Mean cosine distance over all pairs of the slice's vectors.
        accuracy: Mean score, in [0, 1].
        documents: Number of labelled documents; also the slice's weight in a fit.
        variance: Variance of the scores inside the slice (n - 1 in the denominator).
    """

    dispersion: Array
    accuracy: Array
    documents: Array
    variance: Array

    @classmethod
    def of(cls, slices: Sequence[FittedSlice]) -> Pairs:
        """Return the arrays for labelled slices, in the same order."""
        columns = [[getattr(part, name) for part in slices] for name in cls._fields]
        return cls(*(np.array(column, dtype=np.float64) for column in columns))

    @property
    def trivial(self) -> Array:
        """For each slice the mean score of all other slices' documents, shape (S,).

        A calibrator has to beat this estimate, which needs no dispersion.
        """
        right = self.documents * self.accuracy
        return np.asarray((right.sum() - right) / (self.documents.sum() - self.documents))


def isotonic(
    dispersion: Array, accuracy: Array, documents: Array | None = None
) -> IsotonicRegression:
    """Fit the isotonic regression of accuracy on dispersion, (S,) each.

    Slices are weighted by their numbers of ``documents`` (S,); by default all weigh the same. The
    fitted accuracy rises or falls with dispersion, as Spearman's correlation does, and is
    constant beyond the lowest and the highest dispersion. Source: Barlow et al., Statistical
    Inference under Order Restrictions, 1972.
    """
    from sklearn.isotonic import IsotonicRegression

    falls = rank_correlations(dispersion, accuracy[None])[0] < 0
    fit = IsotonicRegression(increasing=not falls, out_of_bounds="clip")
    return fit.fit(dispersion, accuracy, sample_weight=documents)


def cross_fitted(pairs: Pairs) -> tuple[list[IsotonicRegression], Array]:
    """Fit each slice's accuracy by all other slices.

    Args:
        pairs: The dispersions and accuracies of S slices.

    Returns:
        For each slice, the fit to all other slices; and the slices' accuracies as these fits
        estimate them, shape (S,).
    """
    fits = []
    estimates = []
    for i, own in enumerate(pairs.dispersion):
        rest = np.arange(len(pairs.dispersion)) != i
        fit = isotonic(pairs.dispersion[rest], pairs.accuracy[rest], pairs.documents[rest])
        fits.append(fit)
        estimates.append(fit.predict([own])[0])
    return fits, np.array(estimates)


def error_sizes(pairs: Pairs, estimate: Array, documents: Array) -> Array:
    """Return the standard errors (s,) of estimates for slices with ``documents`` (s,) documents.

    For n documents the error is sqrt(between + within / n). ``within`` is the mean variance of the
    scores inside a slice of ``pairs``; ``between`` is the mean squared error of the held-out
    estimates ``estimate`` (S,), minus the part due to sampling, but at least 0. An error of 0 is
    returned as 1.
    """
    within = float(pairs.variance.mean())
    excess = np.square(estimate - pairs.accuracy) - within / pairs.documents
    size = np.sqrt(max(float(excess.mean()), 0.0) + within / documents)
    return np.where(size > 0, size, 1.0)


def conformal_rank(slices: int, level: float) -> int:
    """Return the rank of the held-out error that bounds a new slice's interval.

    ``slices`` is the number of held-out errors, which are ranked from 1 for the smallest; ``level``
    is the interval's confidence level, in (0, 1).
    """
    return min(math.ceil((slices + 1) * level - 1e-9), slices)


def jackknife_plus(centres: Array, half: Array, level: float) -> tuple[Array, Array]:
    """Return the lower and the upper ends (s,) of the jackknife+ intervals of s slices, in [0, 1].

    ``centres`` and ``half`` (S, s) are the estimates and half widths by the S fits that each leave
    out one labelled slice; ``level`` is the confidence level, in (0, 1). The ends are quantiles of
    centres - half and of centres + half (Barber et al. 2021, eq. 1.5).
    """
    n = len(centres)
    rank = conformal_rank(n, level)
    low = np.sort(centres - half, axis=0)[n - rank]
    high = np.sort(centres + half, axis=0)[rank - 1]
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


@dataclass(frozen=True)
class Labelled:
    """The labelled documents to which a calibrator was fitted.

    Attributes:
        documents: Number of labelled documents.
        accuracy: Mean score of the documents, in [0, 1].
        doc_ids: Task -> ids of its labelled documents, as ranges such as ``0-99,120``.
        documents_sha256: SHA-256, as hex, over the document files of the store.
    """

    documents: Annotated[int, 1]
    accuracy: Share
    doc_ids: Mapping[str, Ids]
    documents_sha256: Text


@dataclass(frozen=True, kw_only=True)
class Calibrator:
    """A fitted calibrator, as its JSON file holds it (docs/reference/audit.md has the formula).

    Attributes:
        model: Name of the model.
        revision: Revision of the model; None if the run did not record one.
        layer: Layer of the vectors.
        width: Length of a vector.
        prompt_format: How prompts were built; None if not recorded.
        chat_template: The chat template of the prompts; None without one.
        num_fewshot: Number of examples in a prompt, as lm-eval recorded it.
        tasks: lm-eval's tasks of the run -> their versions.
        identity: What identifies the model and its prompts, such as digests of its weights (see
            docs/reference/store.md); None if the run did not record this.
        by: Column by which the documents were sliced, or :data:`CLUSTERS`.
        labelled: The documents to which the calibrator was fitted.
        beats_trivial: Whether the calibrator beat the labelled accuracy alone, that is, the mean
            score of all other slices; if not, :func:`predict` refuses it.
        slices: The labelled slices to which the calibrator was fitted.
        seed: Seed of all random draws.
        version: Version of lmeval-dispersion that fitted the calibrator.
    """

    model: Text
    revision: Text | None
    layer: Text
    width: Annotated[int, 1]
    prompt_format: Text | None
    chat_template: Text | None
    num_fewshot: Any
    tasks: Mapping[str, Any]
    identity: Mapping[str, Any] | None = None
    by: Text
    labelled: Labelled
    beats_trivial: bool
    slices: Sequence[FittedSlice]
    seed: Annotated[int, 0] = 0
    version: Text = __version__

    def to_json(self) -> str:
        """Return the calibrator as the JSON text of its file."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the calibrator to a JSON file, which `predict` reads.

        Raises:
            DispersionError: The file cannot be written.
        """
        write_whole(Path(path), self.to_json().encode())

    @classmethod
    def read(cls, name: str | Path) -> Calibrator:
        """Read a calibrator's JSON file.

        Raises:
            UsageError: The file cannot be read, does not hold a calibrator, or is damaged.
        """
        hint = "`dispersion calibrate RUN -o FILE` writes one"
        content = read_json(
            Path(name), dict[str, Any], "a calibrator", FORMAT, hint, key="format", repair=_REPAIR
        )
        names = [field.name for field in fields(cls)]
        known = {key: content[key] for key in names if key in content}
        calibrator = checked(cls, known, name, _REPAIR)
        if len(calibrator.slices) < FEWEST_SLICES:
            raise UsageError(
                f"{name} is damaged (expected {FEWEST_SLICES} slices or more, got {len(calibrator.slices)}); "
                f"{_REPAIR}"
            )
        return calibrator

    @cached_property
    def pairs(self) -> Pairs:
        """The dispersions and accuracies of the slices, to which the regression is fitted."""
        return Pairs.of(self.slices)

    @cached_property
    def held_out(self) -> tuple[list[IsotonicRegression], Array]:
        """For each slice, a fit to all other slices; and the accuracies that these fits estimate.

        The fit without a slice estimates that slice's accuracy. Shape of the estimates: (S,).
        """
        return cross_fitted(self.pairs)

    @property
    def errors(self) -> tuple[float, float]:
        """Mean absolute errors on held-out slices, in percentage points.

        First comes the calibrator's, then that of the labelled accuracy alone, that is, of taking
        the mean score of all other slices.
        """
        accuracy = self.pairs.accuracy
        ours = np.abs(self.held_out[1] - accuracy).mean()
        trivial = np.abs(self.pairs.trivial - accuracy).mean()
        return 100 * float(ours), 100 * float(trivial)

    @property
    def documents_a_slice(self) -> list[int]:
        """Numbers of labelled documents in the smallest and in the largest slice."""
        sizes = [part.documents for part in self.slices]
        return [min(sizes), max(sizes)]

    @property
    def level(self) -> float:
        """Confidence level of the intervals: 0.95, or S / (S + 1) with S < 19 slices."""
        slices = len(self.slices)
        return LEVEL if slices >= 19 else slices / (slices + 1)

    @property
    def range(self) -> Bounds:
        """The lowest and the highest dispersion for which an estimate is given.

        They are the ends of the labelled slices' range, widened at either end by a quarter of its
        width.
        """
        low = float(self.pairs.dispersion.min())
        high = float(self.pairs.dispersion.max())
        margin = _MARGIN * (high - low)
        return Bounds(low - margin, high + margin)

    def differs(self, dispersions: Array) -> bool:
        """Whether slices with these dispersions (s,) differ from the labelled slices.

        This is decided by a two-sample Kolmogorov-Smirnov test at 1 %. If the slices differ, no
        interval holds for them. False if there are no dispersions.
        """
        from scipy.stats import ks_2samp

        if not len(dispersions):
            return False
        test = ks_2samp(self.pairs.dispersion, dispersions, method="asymp")
        return bool(test.pvalue < _SHIFT)

    def applied(self, dispersions: Array, documents: Array) -> Applied:
        """Estimate the accuracy of s slices.

        ``dispersions`` (s,) are those of the slices, and ``documents`` (s,) their numbers of
        documents.
        """
        fits, estimate = self.held_out
        errors = np.abs(estimate - self.pairs.accuracy)
        errors = errors / error_sizes(self.pairs, estimate, self.pairs.documents)
        size = error_sizes(self.pairs, estimate, np.minimum(documents, self.documents_a_slice[1]))
        folds = np.array([fit.predict(dispersions) for fit in fits])
        rank = conformal_rank(len(errors), self.level)
        return Applied(
            isotonic(*self.pairs[:3]).predict(dispersions),
            *jackknife_plus(folds, errors[:, None] * size, self.level),
            half_width=np.sort(errors)[rank - 1] * size,
            size=size,
            folds=folds,
        )


class Applied(NamedTuple):
    """A calibrator's estimates for s slices; S is the number of slices to which it was fitted.

    Attributes:
        value: Estimated accuracies in [0, 1], shape (s,).
        low: Lower ends of the estimates' intervals, shape (s,).
        high: Upper ends of the estimates' intervals, shape (s,).
        half_width: Approximate half widths of the intervals, shape (s,).
        size: Standard errors of the estimates, shape (s,).
        folds: Estimates by the S fits that each leave out one labelled slice, shape (S, s).
    """

    value: Array
    low: Array
    high: Array
    half_width: Array
    size: Array
    folds: Array


def confidence_threshold(confidence: Array, accuracy: float) -> float:
    """Return the threshold above which the share ``accuracy`` of the confidences (n,) lies.

    This is the threshold of average thresholded confidence (ATC). Source: Garg et al., "Leveraging
    unlabeled data to predict out-of-distribution performance", ICLR 2022.
    """
    return float(np.quantile(confidence, 1.0 - accuracy))


# --- the labelled documents --------------------------------------------------------------------------------


def documents_digest(run: AuditRun) -> str:
    """Return a SHA-256, as hex, of the document files of the run's store.

    Two runs have the same digest only if these files are the same byte for byte.
    """
    digests = sorted(str(manifest["sha256"][DOCUMENTS]) for _, manifest in run.store.parts)
    return hashed("".join(digests))


def document_ids(run: AuditRun, rows: Rows) -> dict[str, str]:
    """Return, for each task, the ids of its documents among ``rows``, such as ``0-99,120``."""
    documents = run.documents.iloc[rows]
    ids = documents["doc_id"].groupby(documents["task"].astype(str))
    return {str(task): _ranges(np.unique(numbers.to_numpy(np.int64))) for task, numbers in ids}


def rows_of_ids(run: AuditRun, ids: Mapping[str, str]) -> Rows:
    """Return the rows of the documents whose ids :func:`document_ids` recorded, in ascending order.

    Ids that the run does not have are left out.
    """
    numbers = run.documents["doc_id"].to_numpy()
    tasks = run.documents["task"].astype(str).to_numpy()
    chosen = np.zeros(len(numbers), dtype=bool)
    for task, ranges in ids.items():
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            chosen |= (tasks == task) & (numbers >= int(first)) & (numbers <= int(last or first))
    return np.flatnonzero(chosen)


def _ranges(ids: Rows) -> str:
    ranges = []
    for run in np.split(ids, np.flatnonzero(np.diff(ids) > 1) + 1):
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ",".join(ranges)


# --- its refusals ------------------------------------------------------------------------------------------


def check_fits(calibrator: Calibrator, run: AuditRun) -> list[str]:
    """Check that a calibrator applies to a run.

    Returns a list with one sentence if the calibrator or the run does not record the model's
    weights, so that only the model's name and revision can be compared; else an empty list.

    Raises:
        UsageError: The model, the layer, the prompts, a task or its version differs.
    """
    about = run.describe()
    notes = []
    ours = calibrator.identity
    theirs = run.store.manifest.get("identity")
    compared = dict(MUST_AGREE)
    if ours is None or theirs is None:
        compared = {**NAMES, **MUST_AGREE}
        notes.append(
            f"{'The calibrator' if ours is None else 'The run'} does not record the model's "
            "weights, adapter or quantisation, so only the model's name and revision were compared."
        )
    else:
        changes = differences(ours, theirs, sorted({*ours, *theirs}))
        if set(about["tasks"]) != set(
            calibrator.tasks
        ):  # a digest of several tasks is of these alone
            for key, digests in list(changes.items()):
                if any(str(digest).startswith("several:") for digest in digests):
                    del changes[key]
        if changes:
            raise fitted_elsewhere(
                "on another model: the calibrator and the run differ in "
                f"{shown_differences(changes)}"
            )
    for key, name in compared.items():
        fitted = getattr(calibrator, key)
        if fitted != about[key]:
            raise fitted_elsewhere(
                f"with {_with(name, fitted)}, but the run has {_with(name, about[key])}"
            )
    for task, version in about["tasks"].items():
        if task not in calibrator.tasks:
            noun = "task" if len(calibrator.tasks) == 1 else "tasks"
            raise fitted_elsewhere(
                f"on the {noun} {', '.join(calibrator.tasks)}, but the run has the task {task!r}"
            )
        if calibrator.tasks[task] != version:
            raise fitted_elsewhere(
                f"on {_version(calibrator.tasks[task])} of the task {task!r}, but the run has "
                f"{_version(version)}"
            )
    return notes


def _with(name: str, value: object) -> str:
    """A property of a calibrator or a run with its value, for a sentence."""
    return f"no {name}" if value is None else f"the {name} {value!r}"


def _version(version: object) -> str:
    """The version of a task, for a sentence."""
    return "an unrecorded version" if version is None else f"version {version}"


def fitted_elsewhere(reason: str) -> UsageError:
    """Return the error for a run to which a calibrator does not apply.

    ``reason`` says what differs; it follows the words "this calibrator was fitted".
    """
    return UsageError(
        f"this calibrator was fitted {reason}; a calibrator holds only for its own model, prompts "
        "and tasks, so label some documents of this run and calibrate on them"
    )


def check_worth(calibrator: Calibrator, name: str | Path) -> None:
    """Refuse a calibrator that did not beat the labelled accuracy alone on held-out slices.

    The labelled accuracy alone is the mean score of all other slices.

    Raises:
        UsageError: The calibrator was not better. The message begins with ``name``, which is its
            file or "the calibrator", and gives both errors.
    """
    if not calibrator.beats_trivial:
        raise UsageError(
            f"{name} should not be used: {no_gain(calibrator)}; use the accuracy of the "
            f"labelled documents ({calibrator.labelled.accuracy:.3f})"
        )


def no_gain(calibrator: Calibrator) -> str:
    """Return the clause that says why a calibrator that is not better is refused.

    It compares the mean absolute errors of the calibrator and of the labelled accuracy alone, that
    is, of taking the mean score of all other slices.
    """
    ours, trivial = calibrator.errors
    verdict = "worse than" if ours > trivial + 0.05 else "not reliably better than"
    return f"on held-out slices the estimate is {ours:.1f} points off, {verdict} the {TRIVIAL} ({trivial:.1f})"
