"""How often the laboratory's 95 % intervals hold the truth, on planted laws and clusters.

    python benchmarks/laboratory_coverage.py                2000 studies of each kind
    python benchmarks/laboratory_coverage.py --studies 200  a quick look

r: bins chosen by the law's own algorithm from 800 segments of 20 a bin, with the mean perplexity of a segment
or the log perplexity of a token; `percentile` is the interval of bootstrap percentiles, beside the printed
one. Differences: of two measures in the same bins (a control), and of two studies. Clusters: spreads and
places drawn from one distribution (`tests/planted_law.py`); the truth is that of 20,000 clusters.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from planted_law import planted_bins, planted_clusters

from lmeval_dispersion.laboratory.context_clusters import ratio_interval, within_interval
from lmeval_dispersion.laboratory.perplexity_law import SEQUENCE
from lmeval_dispersion.statistics import (
    Interval,
    bootstrap_correlation,
    correlation,
    correlation_bounds,
    correlation_difference,
    percentiles,
    resampled_correlations,
)

KINDS = (SEQUENCE, "last@16")


def correlations(studies):
    print(f"{'r of':<10} {'bins':>4} {'r':>6} {'coverage':>9} {'percentile':>11} {'width':>6}")
    for kind in KINDS:
        for bins in (5, 10, 20, 40):
            for rho in (0.0, -0.5, -0.8, -0.95):
                x, y = planted_bins(np.random.default_rng(1), rho, studies, bins=bins, kind=kind)
                pairs = list(enumerate(zip(x, y, strict=True)))
                ours = [bootstrap_correlation(*pair, seed=i) for i, pair in pairs]
                plain = [percentiles(resampled_correlations(*pair, seed=i)) for i, pair in pairs]
                covered, old = (
                    np.mean([bounds.low <= rho <= bounds.high for bounds in all_of])
                    for all_of in (ours, plain)
                )
                width = np.mean([bounds.high - bounds.low for bounds in ours])
                print(f"{kind:<10} {bins:>4} {rho:>6} {covered:>9.3f} {old:>11.3f} {width:>6.2f}", flush=True)


def of_two(x, y, other_x, other_y, seed, *, paired):
    """The interval of the second r minus the first, as the commands make it."""
    pairs = (x, y), (other_x, other_y)
    drawn = [resampled_correlations(*pair, seed=seed + k * (not paired)) for k, pair in enumerate(pairs)]
    values = [correlation(*pair) for pair in pairs]
    found = [
        Interval(value, *correlation_bounds(value, samples, len(x)))
        for value, samples in zip(values, drawn, strict=True)
    ]
    return correlation_difference(*found, (drawn[0], drawn[1]), paired=paired)


def differences(studies):
    print(f"\n{'r of':<10} {'bins':>4} {'r':>6} {'other':>6} {'same bins':>10} {'two studies':>12}")
    for kind in KINDS:
        for bins in (5, 10, 20, 40):
            for first, second in ((-0.8, -0.1), (-0.8, -0.8), (-0.9, 0.5), (0.0, 0.0)):
                rng = np.random.default_rng(2)
                x, y = planted_bins(rng, first, studies, bins=bins, kind=kind)
                z = (x - x.mean()) / x.std()
                control = second * z + np.sqrt(1 - second**2) * rng.normal(size=x.shape)
                other = planted_bins(rng, second, studies, bins=bins, kind=kind)
                held = np.zeros(2)
                for i in range(studies):
                    both = (
                        of_two(x[i], y[i], x[i], control[i], i, paired=True),
                        of_two(x[i], y[i], other[0][i], other[1][i], 2 * i, paired=False),
                    )
                    held += [bounds.low <= second - first <= bounds.high for bounds in both]
                same, two = held / studies
                print(f"{kind:<10} {bins:>4} {first:>6} {second:>6} {same:>10.3f} {two:>12.3f}", flush=True)


def clusters(studies):
    within, apart = planted_clusters(np.random.default_rng(3), 20_000)
    middle, ratio = within.mean(), apart.mean() / within.mean()
    print(f"\n{'clusters':>8} {'within':>7} {'ratio':>6}")
    for count in (3, 5, 10, 20, 50):
        rng, held = np.random.default_rng(count), np.zeros(2)
        for _ in range(studies):
            within, apart = planted_clusters(rng, count)
            both = (within_interval(within), middle), (ratio_interval(within, apart), ratio)
            held += [bounds.low <= truth <= bounds.high for bounds, truth in both]
        print(f"{count:>8} {held[0] / studies:>7.3f} {held[1] / studies:>6.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--studies", type=int, default=2000, help="of each kind (default: 2000)")
    args = parser.parse_args()
    correlations(args.studies)
    differences(args.studies)
    clusters(args.studies)


if __name__ == "__main__":
    main()
