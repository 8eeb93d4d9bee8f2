"""The paper's protocol: does dispersion, calibrated on mixtures, predict accuracy?

For every seed the labelled documents are split 20/10/70 into calibration, validation and test.
Mixtures of the calibration part give pairs (dispersion, accuracy), to which linear, polynomial,
isotonic and random-forest regressions are fitted. The validation part picks one of them. The test
part judges it, along with estimators that use no dispersion. Test batches are the ``whole`` test
part (the paper's figure), one batch of each subject (``slices``: the hardest, and the one that
users need) and ``mixtures`` of every accuracy.

Source: RD sections B.1.2 and B.1.3. Average thresholded confidence (ATC): Garg et al., "Leveraging
unlabeled data to predict out-of-distribution performance", ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.auditing.calibrating.calibrator import confidence_threshold, isotonic
from lmeval_dispersion.auditing.mixtures.curves import SEEDS, mixture_size, pools
from lmeval_dispersion.auditing.run import Array, AuditRun, Rows, check_labels
from lmeval_dispersion.auditing.slices import by_value
from lmeval_dispersion.errors import UsageError, count
from lmeval_dispersion.report import Col, Table
from lmeval_dispersion.statistics import student_interval

if TYPE_CHECKING:
    from sklearn.base import RegressorMixin

DISPERSION = "dispersion"
TRIVIAL = "trivial"
CONSTANT = "constant"
REGRESSIONS = ("linear", "polynomial", "isotonic", "random forest")
KINDS = {"whole": "Whole test part", "slices": "One batch a slice", "mixtures": "Mixtures"}
CALIBRATION = 0.2  # shares of the labelled documents
VALIDATION = 0.1
STEP = 2  # per cent between the target accuracies of calibration
REPEATS = 4  # batches per target accuracy on the calibration part; half as many on the others
FEWEST_TARGETS = 5


class Batches(NamedTuple):
    """Batches of documents, with the dispersion and the accuracy of each.

    Attributes:
        rows: For each batch the row numbers of its documents in the run.
        dispersion: Mean cosine distance, one number a batch.
        accuracy: Share of right answers in [0, 1], one number a batch.
    """

    rows: list[Rows]
    dispersion: Array
    accuracy: Array


Predictor = Callable[[Batches], Array]  # gives every batch's estimated accuracy
# Kind of test batch and estimator -> the errors of each split, in points.
Errors = dict[tuple[str, str], list[Array]]


@dataclass(frozen=True)
class PaperError:
    """The errors of one estimator on one kind of test batches, as means over the splits.

    Attributes:
        kind: Kind of the test batches, a key of :data:`KINDS`: ``whole``, ``slices`` or
            ``mixtures``.
        estimator: Name of the estimator, such as ``dispersion`` or ``mean confidence``.
        mae: Mean absolute error, in percentage points.
        low: Lower end of the 95 % interval of ``mae`` over the splits.
        high: Upper end of that interval.
        bias: Mean of estimate minus accuracy, in percentage points.
    """

    kind: Annotated[str, Col("Test batches")]
    estimator: Annotated[str, Col("Estimator")]
    mae: Annotated[float, Col("Mean absolute error (points)", ".2f", short="Error (points)")]
    low: Annotated[float, Col("95 % from", ".2f", drop=1)]
    high: Annotated[float, Col("to", ".2f", drop=1)]
    bias: Annotated[float, Col("Bias (points)", "+.2f", drop=2)]


@dataclass(frozen=True)
class PaperVerdict:
    """Whether dispersion beats guessing one accuracy for all batches, on one kind of test batches.

    Attributes:
        kind: Kind of the test batches, a key of :data:`KINDS`.
        winner: Name of the estimator with the smallest error; of the regressions on dispersion,
            only the chosen one counts.
        rival: The better way to guess one accuracy: ``trivial``, the accuracy of the calibration
            part, or for mixtures also ``constant``, the median accuracy of the calibration
            mixtures.
        difference: Dispersion's mean absolute error minus the rival's, in percentage points.
        difference_low: Lower end of the 95 % interval of ``difference`` over the splits.
        difference_high: Upper end of that interval.
        better: Whether dispersion's error is clearly smaller than the rival's.
    """

    kind: str
    winner: str
    rival: str
    difference: float
    difference_low: float
    difference_high: float
    better: bool

    @property
    def sentence(self) -> str:
        """A sentence on whether dispersion beats the rival, and on the best estimator."""
        better = "no better"
        apart = ""
        if self.better:
            better = "better"
            apart = f" by {-self.difference:.2f} points"
        elif self.difference_low > 0:
            apart = f" and worse by {self.difference:.2f} points"
        return (
            f"{KINDS[self.kind]}: dispersion is {better} than the {self.rival} predictor{apart}; "
            f"the best estimator is {self.winner}."
        )


@dataclass(frozen=True)
class PaperProtocol:
    """How well dispersion estimates accuracy, tested over several splits as in the RD paper.

    RD is *On the Predictive Power of Representation Dispersion in Language Models*, ICLR 2026.

    Attributes:
        documents_per_batch: Number of documents in a batch: 100, or fewer with few labels.
        seeds: Number of random splits into calibration, validation and test parts.
        chosen: Name of each regression that validation picked -> in how many splits it did.
        errors: The errors of every estimator on every kind of test batches.
        verdicts: One verdict for each kind of test batches that every split has.
    """

    documents_per_batch: int
    seeds: int
    chosen: Mapping[str, int]
    errors: Sequence[PaperError]
    verdicts: Sequence[PaperVerdict]

    def sentences(self) -> list[str]:
        """Return sentences on the split, the regressions that were chosen, and the verdicts."""
        chosen = ", ".join(f"{kind} {n}" for kind, n in self.chosen.items())
        return [
            "The paper's protocol learns from artificial mixtures of every accuracy, which real "
            "slices are not. The labelled documents were split 20/10/70 into calibration, "
            f"validation and test parts, {self.seeds} times; batches have "
            f"{self.documents_per_batch} documents. How often validation chose each regression: "
            f"{chosen}.",
            *(verdict.sentence for verdict in self.verdicts),
        ]

    def tables(self) -> dict[str, Table]:
        """Return the table ``paper``: each estimator's errors on each kind of test batches."""
        caption = "Errors of the paper's protocol"
        return {"paper": Table.of(self.errors, caption, name="paper-protocol")}


def paper_protocol(run: AuditRun, *, seeds: int = SEEDS, seed: int = 0) -> PaperProtocol:
    """Test as in the RD paper (see `PaperProtocol`) how well dispersion estimates accuracy.

    The run's labelled documents are split at random ``seeds`` times.

    Raises:
        UsageError: The run has no vectors or too few labelled documents, or its answers are all
            right or all wrong.
    """
    check_labels(run, "calibration needs")
    # 0.8: parts are random, and some hold less than their share of the rarer kind.
    size = mixture_size(int(0.8 * VALIDATION * pools(run, run.labelled).smaller))
    chosen = []
    splits = []
    for k in range(seeds):
        best, errors_of_split = _split_errors(run, size, k, np.random.default_rng([seed, k]))
        chosen.append(best)
        splits.append(errors_of_split)
    errors: Errors = {}
    for key in splits[0]:
        in_every_split = all(key in split for split in splits)
        if in_every_split:
            errors[key] = [split[key] for split in splits]
    times_chosen = {}
    for regression in REGRESSIONS:
        if regression in chosen:
            times_chosen[regression] = chosen.count(regression)
    verdicts = []
    for kind in KINDS:
        if (kind, DISPERSION) in errors:
            verdicts.append(_verdict(kind, errors))
    return PaperProtocol(
        documents_per_batch=size,
        seeds=seeds,
        chosen=times_chosen,
        errors=[_paper_error(kind, name, values) for (kind, name), values in errors.items()],
        verdicts=verdicts,
    )


def _split_errors(
    run: AuditRun, size: int, k: int, rng: np.random.Generator
) -> tuple[str, dict[tuple[str, str], Array]]:
    """The regression that validation picked in split ``k``, and the errors in points on every test batch.

    The latter by kind of batch and estimator.
    """
    order = rng.permutation(run.labelled)
    first = round(len(order) * CALIBRATION)
    second = first + round(len(order) * VALIDATION)
    labelled = order[:first]
    test = order[second:]
    calibration = mixture_batches(run, labelled, size, repeats=REPEATS, rng=rng)
    validation = mixture_batches(run, order[first:second], size, repeats=REPEATS // 2, rng=rng)
    _check_targets({"calibration": calibration, "validation": validation}, len(order), size)
    tests = {
        "whole": _measured(run, [test]),
        "slices": natural_batches(run, test, size, rng),
        "mixtures": mixture_batches(run, test, size, repeats=REPEATS // 2, step=10, rng=rng),
    }
    fits = {kind: _read_off(fit) for kind, fit in fit_all(calibration, seed=k).items()}

    def error(kind: str) -> float:
        return float(np.abs(fits[kind](validation) - validation.accuracy).mean())

    best = min(fits, key=error)
    estimators = _estimators(run, labelled, calibration, fits, best)
    errors = {}
    for kind, batches in tests.items():
        for name, estimate in estimators.items():
            if len(batches.rows) and (name != CONSTANT or kind == "mixtures"):
                errors[kind, name] = 100 * (estimate(batches) - batches.accuracy)
    return best, errors


def mixture_batches(
    run: AuditRun,
    rows: Rows,
    size: int,
    *,
    repeats: int,
    step: int = STEP,
    rng: np.random.Generator,
) -> Batches:
    """Draw mixtures of ``size`` documents out of ``rows``, ``repeats`` for each target accuracy.

    The target accuracies are 0 to 100 % in steps of ``step`` %, without those for which there are
    too few right or wrong answers.
    """
    pool = pools(run, rows)
    targets = np.arange(0, 101, step)
    counts = np.round(targets * size / 100).astype(int)
    drawn = []
    for correct in np.unique(counts).tolist():
        if not pool.reaches(size, correct):
            continue
        for _ in range(repeats):
            drawn.append(pool.draw(rng, size, correct))
    return _measured(run, drawn)


def natural_batches(run: AuditRun, rows: Rows, size: int, rng: np.random.Generator) -> Batches:
    """Draw one random batch of ``size`` documents from each subject of the documents ``rows``.

    Subjects with fewer documents are left out. If fewer than two remain, categories are taken
    instead; if fewer than two categories remain, there are no batches.
    """
    for column in ("subject", "category"):
        values = run.documents[column].iloc[rows].tolist()
        large = []
        for part in by_value(values):
            if len(part.rows) >= size:
                large.append(rows[part.rows])
        if len(large) >= 2:
            batches = [rng.choice(part, size=size, replace=False) for part in large]
            return _measured(run, batches)
    return _measured(run, [])


def _measured(run: AuditRun, rows: list[Rows]) -> Batches:
    accuracy = np.array([run.right[batch].sum() / len(batch) for batch in rows])
    return Batches(rows, run.vectors.dispersions(rows), accuracy)


def _check_targets(parts: Mapping[str, Batches], labelled: int, size: int) -> None:
    for name, batches in parts.items():
        reached = len(np.unique(batches.accuracy))
        if reached < FEWEST_TARGETS:
            raise UsageError(
                f"of {labelled} labelled documents, the {name} part yields batches of {size} "
                f"documents with only {count(reached, 'accuracy', 'accuracies')}, and at least "
                f"{FEWEST_TARGETS} different ones are needed; label more documents"
            )


def fit_all(batches: Batches, *, seed: int = 0) -> dict[str, RegressorMixin]:
    """Fit regressions of the batches' accuracy on their dispersion.

    Returns a fitted regression for each name in :data:`REGRESSIONS`.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    x = batches.dispersion[:, None]

    def fitted(*steps: Any) -> RegressorMixin:
        return make_pipeline(StandardScaler(), *steps).fit(x, batches.accuracy)

    forest = RandomForestRegressor(n_estimators=50, min_samples_leaf=10, random_state=seed)
    return {
        "linear": fitted(LinearRegression()),
        "polynomial": fitted(PolynomialFeatures(3), LinearRegression()),
        "isotonic": isotonic(batches.dispersion, batches.accuracy),
        "random forest": fitted(forest),
    }


def _read_off(fit: Any) -> Predictor:
    return lambda batches: np.clip(fit.predict(batches.dispersion[:, None]), 0.0, 1.0)


def _estimators(
    run: AuditRun, labelled: Rows, calibration: Batches, fits: Mapping[str, Predictor], best: str
) -> dict[str, Predictor]:
    """Every estimator by name, knowing the labels of the calibration part only."""
    accuracy = float(run.right[labelled].mean())
    middle = float(np.median(calibration.accuracy))
    estimators: dict[str, Predictor] = {
        DISPERSION: fits[best],
        TRIVIAL: lambda batches: np.full(len(batches.rows), accuracy),
        CONSTANT: lambda batches: np.full(len(batches.rows), middle),
    }
    confidence = run.confidence
    if not np.isnan(confidence[run.labelled]).any():
        above = confidence > confidence_threshold(confidence[labelled], accuracy)
        estimators["mean confidence"] = partial(_means, confidence)
        estimators["ATC"] = partial(_means, above)
    for kind, fit in fits.items():
        estimators[f"{DISPERSION}, {kind}"] = fit
    return estimators


def _means(values: NDArray[Any], batches: Batches) -> Array:
    """Each batch's mean of ``values`` (n,), those of all documents."""
    return np.array([values[rows].mean() for rows in batches.rows])


def _paper_error(kind: str, name: str, splits: Sequence[Array]) -> PaperError:
    sizes = [float(np.abs(values).mean()) for values in splits]
    biases = [values.mean() for values in splits]
    low, high = student_interval(sizes)
    return PaperError(kind, name, float(np.mean(sizes)), low, high, float(np.mean(biases)))


def _verdict(kind: str, errors: Errors) -> PaperVerdict:
    """The best estimator, and whether dispersion beats a blind guess."""
    sizes = dict[str, Array]()
    for (kind_of_batch, name), splits in errors.items():
        is_one_regression = name.startswith(f"{DISPERSION},")
        if kind_of_batch == kind and not is_one_regression:
            sizes[name] = np.array([np.abs(values).mean() for values in splits])
    # Mixtures have every accuracy alike, so there the best blind guess is the middle one.
    rivals = [name for name in (TRIVIAL, CONSTANT) if name in sizes]
    rival = min(rivals, key=lambda name: sizes[name].mean())
    difference = sizes[DISPERSION] - sizes[rival]
    low, high = student_interval(difference)
    winner = min(sizes, key=lambda name: sizes[name].mean())
    return PaperVerdict(kind, winner, rival, float(difference.mean()), low, high, high < 0)
