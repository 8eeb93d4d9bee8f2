"""How often an audit claims something on noise: `python benchmarks/audit_conclusions.py [--stores 400]`.

Right and wrong answers are drawn independently of the vectors; subjects have directions of their own, as
real ones do. A claim is a sentence with a direction or a difference; a report may make none. `coverage` is
how often the intervals hold the truth: no difference, AUROC 0.5, no correlation. The
intervals of calibrations are those of benchmarks/audit_coverage.py. With `--differences N`: how often
`dispersion compare` claims a difference between N pairs of runs that differ by chance alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic import differences_of_equals, subjects_store

from lmeval_dispersion.auditing.calibrating.calibration import calibrate
from lmeval_dispersion.auditing.mixtures import Inside, mixture_curves, pools_sentence
from lmeval_dispersion.auditing.ranking import errors_sentence, ranking_report, ranking_sentence
from lmeval_dispersion.auditing.run import AuditRun, answers_of, part_of, read_run
from lmeval_dispersion.auditing.slices import slice_table, slicings
from lmeval_dispersion.statistics import Interval

NOISE = {
    "57 subjects x 20": {"subjects": 57, "each": 20},
    "10 subjects x 100": {"subjects": 10, "each": 100},
    "12 x 50, 2 tasks": {"subjects": 12, "each": 50, "tasks": 2},
    "10 x 40, 90 % right": {"subjects": 10, "each": 40, "accuracy": 0.9},
    "20 x 30, lucky subjects": {"subjects": 20, "each": 30, "luck": 0.15},
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
        "a low contribution points at answers": "points at" in ranking,
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
        figures["AUROC inside subjects"] = (0.5, Interval(ours.inside, ours.inside_low, ours.inside_high))
    return {name: bool(figure.low <= truth <= figure.high) for name, (truth, figure) in figures.items()}


def alike(seed: int, folder: Path, subjects: int, each: int) -> bool:
    """Whether a store whose subjects are all alike has one that clearly differs from the least dispersed."""
    rng = np.random.default_rng([seed, 1])
    run = read_run(subjects_store(folder, subjects=1, each=subjects * each, seed=seed))
    run.documents["subject"] = [f"s{i}" for i in rng.permutation(np.repeat(np.arange(subjects), each))]
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
    print(f"{'pairs that differ by chance':<28} {'n':>4} {'answers':>8} {'scores':>8} {'vectors':>8}")
    for name, options in settings.items():
        for n in (5, 10, 30, 300):
            rng, wrong = np.random.default_rng(n), Counter[str]()
            for _ in range(repeats):
                bounds = differences_of_equals(rng, n, **options)
                wrong.update({kind: low > 0 or high < 0 for kind, (low, high) in bounds.items()})
            rates = " ".join(f"{wrong[kind] / repeats:>7.1%}" for kind in ("answers", "scores", "vectors"))
            print(f"{name:<28} {n:>4} {rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stores", type=int, default=400)
    parser.add_argument("--differences", type=int, metavar="N")
    args = parser.parse_args()
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
