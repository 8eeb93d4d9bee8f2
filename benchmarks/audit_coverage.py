"""The worth of `dispersion calibrate` and `predict`: `python benchmarks/audit_coverage.py [--runs 200]`.

40 labelled slices and 40 unlabelled ones of 30 to 60 documents (`tests/synthetic.py`). A row is one kind of
relation and of difference between the two parts; its columns:

    used       share of calibrators that beat knowing nothing on their own held-out slices
    refused    share of unlabelled slices without a number
    coverage   of the 95 % intervals of slices with a number, and of `all documents`
    error      mean absolute error of slices with a number, and of the labelled accuracy there, in points
    worth      median claim in labelled documents a slice; `direct`: the k for which the mean of k labels,
               drawn from each unlabelled slice, is as far off as the estimates are
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic import sliced_store

from lmeval_dispersion.auditing.calibrating.calibrator import fit_calibrator
from lmeval_dispersion.auditing.calibrating.prediction import predict
from lmeval_dispersion.auditing.run import labels_of, read_run

KINDS = {
    "uninformative": {"effect": 0.0},
    "planted law": {"effect": 1.0},
    "reversed law": {"effect": -0.5},
    "law, topics somewhat different": {"effect": 1.0, "topics": 0.3},
    "law, topics clearly different": {"effect": 1.0, "topics": 1.5},
    "no law, topics clearly different": {"effect": 0.0, "topics": 1.5},
    "confidence only": {"effect": 0.0, "confidence": 2.0},
    "one answer to everything": {"effect": 0.0, "spread_of_accuracy": 0.0},
    "16 slices": {"effect": 1.0, "labelled": 16},
    "shift: vectors twice as spread": {"effect": 1.0, "shift": 2.0},
    "shift: a quarter more spread": {"effect": 1.0, "shift": 1.25},
}


def calibrated(folder, seed, options):
    run = read_run(sliced_store(folder / str(seed), seed=seed, **options))
    labelled = np.flatnonzero(run.documents["part"] == "labelled")
    fitted = fit_calibrator(labels_of(run, labelled))
    calibrator = fitted.calibrator
    # One that beats nothing is estimated from too; `force` would also pass over a shift.
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
        off = [order[:, :k].mean(axis=1) - s.mean() for order, s in zip(orders, scores, strict=True)]
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
            np.concatenate([r[key] for r in results]) for key in ("covered", "whole", "error", "blind")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="planted stores of each kind (default: 200)")
    planted(parser.parse_args().runs)


if __name__ == "__main__":
    main()
