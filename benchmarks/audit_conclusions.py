"""How often an audit claims something on noise: `python benchmarks/audit_conclusions.py [--stores 400]`.

Right and wrong answers are drawn independently of the vectors; subjects have directions of their own, as
real ones do. A claim is a sentence with a direction or a difference; a report may make none. `coverage` is
how often the intervals hold the truth: no difference, AUROC 0.5, no correlation.

`--differences N`: how often `dispersion compare` claims a difference between N pairs of runs that differ by
chance alone.

`--calibrators N`: the worth of `dispersion calibrate` and of its estimates, for N planted stores of each kind of
relation, of 40 labelled slices and 40 unlabelled ones of 30 to 60 documents (`tests/synthetic.py`):

    used       share of calibrators that beat knowing nothing on their own held-out slices
    refused    share of unlabelled slices without a number
    coverage   of the 95 % intervals of slices with a number, and of `all documents`
    error      mean absolute error of slices with a number, and of the labelled accuracy there, in points
    worth      median claim in labelled documents a slice; `direct`: the k for which the mean of k labels,
               drawn from each unlabelled slice, is as far off as the estimates are
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic import differences_of_equals, sliced_store, subjects_store

from lmeval_dispersion.auditing.calibrating.calibration import calibrate
from lmeval_dispersion.auditing.calibrating.prediction import predict
from lmeval_dispersion.auditing.mixtures.curves import Inside, mixture_curves, pools_sentence
from lmeval_dispersion.auditing.ranking import errors_sentence, ranking_report, ranking_sentence
from lmeval_dispersion.auditing.run import AuditRun, answers_of, labels_of, part_of, read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.statistics import Interval

NOISE = {
    "57 subjects x 20": {"subjects": 57, "each": 20},
    "10 subjects x 100": {"subjects": 10, "each": 100},
    "12 x 50, 2 tasks": {"subjects": 12, "each": 50, "tasks": 2},
    "10 x 40, 90 % right": {"subjects": 10, "each": 40, "accuracy": 0.9},
    "20 x 30, lucky subjects": {"subjects": 20, "each": 30, "luck": 0.15},
}
KINDS = {
    "uninformative": {"effect": 0.0},
    "planted law": {"effect": 1.0},
    "reversed law": {"effect": -0.5},
    "law, topics somewhat different": {"effect": 1.0, "topics": 0.3},
    "law, topics clearly different": {"effect": 1.0, "topics": 1.5},
    "no law, topics clearly different": {"effect": 0.0, "topics": 1.5},
    "one answer to everything": {"effect": 0.0, "spread_of_accuracy": 0.0},
    "16 slices": {"effect": 1.0, "labelled": 16},
    "shift: vectors twice as spread": {"effect": 1.0, "shift": 2.0},
    "shift: a quarter more spread": {"effect": 1.0, "shift": 1.25},
}


def parts(run: AuditRun) -> SimpleNamespace:
    """The parts of a report that its own sentences are made from."""
    return SimpleNamespace(
        slices={name: slice_table(run, slices) for name, slices in slicings(run).items()},
        mixtures=mixture_curves(run),
        ranking=ranking_report(run),
        answers=answers_of(run),
        calibration=part_of(calibrate, run),
    )


def claims(report: SimpleNamespace) -> dict[str, bool]:
    """Which sentences claim something."""
    order = report.slices["subject"].association
    pools = pools_sentence(report.mixtures)
    ranking = ranking_sentence(report.ranking)
    return {
        "accuracy rises or falls with dispersion": bool(order.side),
        "right answers are more or less dispersed": "Right answers are" in pools,
        "... it lies between subjects": "lies between" in pools,
        "a low contribution points at answers": "points to" in ranking,
        "... the difference lies between subjects": "lies between" in ranking,
        "the best other signal is": "best other signal is" in errors_sentence(report.ranking),
        "accuracy can be read off unlabelled slices": getattr(report.calibration, "better", False),
        "a caution (guessing, one answer, repeats)": bool(report.answers.cautions),
    }


def covered(report: SimpleNamespace) -> dict[str, bool]:
    """Which intervals hold what is true of noise."""
    mixtures, ours = report.mixtures, report.ranking.signals[0]
    figures = {
        "pools": (0.0, mixtures.pools.figure),
        "AUROC": (0.5, Interval(ours.auroc, ours.auroc_low, ours.auroc_high)),
        "Spearman over slices": (0.0, report.slices["subject"].association),
    }
    if isinstance(inside := mixtures.inside.get("subject"), Inside):
        figures["pools inside subjects"] = (0.0, inside.pools.figure)
        figures["AUROC inside subjects"] = (
            0.5,
            Interval(ours.inside, ours.inside_low, ours.inside_high),
        )
    return {
        name: bool(figure.low <= truth <= figure.high) for name, (truth, figure) in figures.items()
    }


def alike(seed: int, folder: Path, subjects: int, each: int) -> bool:
    """Whether a store whose subjects are all alike has one that clearly differs from the least dispersed."""
    rng = np.random.default_rng([seed, 1])
    run = read_run(subjects_store(folder, subjects=1, each=subjects * each, seed=seed))
    run.documents["subject"] = [
        f"s{i}" for i in rng.permutation(np.repeat(np.arange(subjects), each))
    ]
    least = slice_table(run, slicings(run)["subject"]).least_dispersed
    return least.not_clear < least.others


def differences(repeats: int) -> None:
    """The share of false claims of a comparison, by the number of documents."""
    settings: dict[str, dict[str, float]] = {
        "as it is": {},
        "independent": {"alike": 0.0},
        "nearly alike": {"alike": 0.9, "spread": 1.0},
        "uneven, 90 % right": {"uneven": 1.0, "share": 0.9},
    }
    print(
        f"{'pairs that differ by chance':<28} {'n':>4} {'answers':>8} {'scores':>8} {'vectors':>8}"
    )
    for name, options in settings.items():
        for n in (5, 10, 30, 300):
            rng, wrong = np.random.default_rng(n), Counter[str]()
            for _ in range(repeats):
                bounds = differences_of_equals(rng, n, **options)
                wrong.update({kind: low > 0 or high < 0 for kind, (low, high) in bounds.items()})
            rates = " ".join(
                f"{wrong[kind] / repeats:>7.1%}" for kind in ("answers", "scores", "vectors")
            )
            print(f"{name:<28} {n:>4} {rates}", flush=True)


def calibrated(folder, seed, options):
    run = read_run(sliced_store(folder / str(seed), seed=seed, **options))
    labelled = np.flatnonzero(run.documents["part"] == "labelled")
    fitted = calibrate(labels_of(run, labelled))
    calibrator = fitted.calibrator
    # One that beats nothing is estimated from too.
    whole, *rows = predict(replace(calibrator, beats_trivial=True), run).slices
    given = [row for row in rows if row.reason is None]
    error = np.array([row.predicted - row.true for row in given])
    blind = np.array([calibrator.labelled.accuracy - row.true for row in given])
    return {
        "used": calibrator.beats_trivial,
        "refused": 1 - len(given) / len(rows),
        "covered": [row.low <= row.true <= row.high for row in given],
        "whole": [whole.low <= whole.true <= whole.high] if whole.reason is None else [],
        "error": 100 * np.abs(error),
        "blind": 100 * np.abs(blind),
        "claimed": fitted.estimators[0 if calibrator.beats_trivial else -1].worth,
        "scores": [run.score[run.documents["subject"] == row.slice] for row in given],
    }


def direct_labels(results, rng):
    """The k for which k labels of each slice, drawn without replacement, are as far off as the estimates."""
    errors = np.concatenate([r["error"] for r in results]) / 100
    scores = [scores for r in results for scores in r["scores"]]
    orders = [rng.permuted(np.tile(s, (20, 1)), axis=1) for s in scores]
    for k in range(1, max(map(len, scores)) + 1):
        off = [
            order[:, :k].mean(axis=1) - s.mean() for order, s in zip(orders, scores, strict=True)
        ]
        if np.square(off).mean() <= np.square(errors).mean():
            return k
    return np.inf


def planted(runs):
    print(f"{'relation':<34} {'used':>5} {'refused':>8} {'coverage':>9} {'whole':>6}", end=" ")
    print(f"{'error':>6} {'blind':>6} {'worth':>6} {'direct':>7}")
    for name, options in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            results = [calibrated(Path(folder), seed, options) for seed in range(runs)]
        covered, whole, error, blind = (
            np.concatenate([r[key] for r in results])
            for key in ("covered", "whole", "error", "blind")
        )
        some = len(error) > 0
        print(
            f"{name:<34} {np.mean([r['used'] for r in results]):>5.2f} "
            f"{np.mean([r['refused'] for r in results]):>8.2f} {covered.mean() if some else np.nan:>9.3f} "
            f"{whole.mean() if len(whole) else np.nan:>6.2f} {error.mean() if some else np.nan:>6.1f} "
            f"{blind.mean() if some else np.nan:>6.1f} {np.median([r['claimed'] for r in results]):>6.0f} "
            f"{direct_labels(results, np.random.default_rng(0)) if some else np.nan:>7}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stores", type=int, default=400)
    parser.add_argument("--differences", type=int, metavar="N")
    parser.add_argument("--calibrators", type=int, metavar="N")
    args = parser.parse_args()
    if args.calibrators:
        planted(args.calibrators)
        return
    if args.differences:
        differences(args.differences)
        return
    for name, options in NOISE.items():
        claimed: Counter[str] = Counter()
        held: Counter[str] = Counter()
        for seed in range(args.stores):
            with tempfile.TemporaryDirectory() as folder:
                report = parts(read_run(subjects_store(Path(folder), seed=seed, **options)))
            claimed.update(claims(report))
            held.update(covered(report))
        print(f"noise, {name}: claims")
        for claim, count in claimed.items():
            print(f"  {claim:<46} {100 * count / args.stores:5.1f} %")
        print("  coverage")
        for interval, count in held.items():
            print(f"  {interval:<46} {100 * count / args.stores:5.1f} %", flush=True)
    for subjects, each in ((57, 20), (10, 100), (20, 5)):
        apart = 0
        for seed in range(args.stores):
            with tempfile.TemporaryDirectory() as folder:
                apart += alike(seed, Path(folder), subjects, each)
        rate = 100 * apart / args.stores
        print(f"{subjects} subjects x {each}, all alike: one clearly least dispersed {rate:5.1f} %")


if __name__ == "__main__":
    main()
