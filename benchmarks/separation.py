"""How often siblings that differ by noise alone get a clear order: `python benchmarks/separation.py`.

Each group is one matrix with independent noise in every row of every sibling. Printed is the share of groups
in which at least one pair is ordered: by two standard errors pair by pair, with all pairs of the group
counted, and by G and ratio together, beside the spread of G among the siblings and its printed
error.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
from lmeval_screener.figures import Gap, Ratio, difference, gap, ratio
from lmeval_screener.ranking import ALL_PAIRS, rank_gaps
from lmeval_screener.weights.projection import FinalNorm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import parsed
from lmeval_dispersion.geometry import METRICS, Metric

DIGITS, WORDS, WIDTH = 10, 105, 256


def siblings(
    draw: np.random.Generator, count: int, noise: float, metric: Metric
) -> tuple[list[Gap], list[Ratio]]:
    """Both figures of one matrix, with noise of a share ``noise`` of each row's norm in every sibling."""
    base = draw.normal(size=(DIGITS + WORDS, WIDTH)) + 0.6 * draw.normal(size=WIDTH)
    base[:DIGITS] += 0.6 * draw.normal(size=WIDTH)
    size = noise * np.linalg.norm(base, axis=1, keepdims=True) / np.sqrt(WIDTH)
    norm = FinalNorm("norm", np.ones(WIDTH), "rms")
    gaps, ratios = [], []
    for _ in range(count):
        rows = base + size * draw.normal(size=base.shape)
        gaps.append(gap(rows[:DIGITS], rows[DIGITS:], metric))
        ratios.append(ratio(rows[:DIGITS], rows[DIGITS:], norm, "BF16"))
    return gaps, ratios


def main() -> None:
    """Print one line for every metric, size of a group and size of the noise."""
    args = parsed(
        __doc__,
        ("--groups", {"type": int, "default": 1000}),
        ("--sizes", {"default": "2,5,10,20,100,200", "help": "siblings of a group"}),
    )
    groups, sizes = args.groups, [int(size) for size in args.sizes.split(",")]
    draw = np.random.default_rng(20260501)
    heads = "metric     siblings  noise  pair by pair  all counted   both  sd of G  printed se"
    print(heads, flush=True)
    for metric in METRICS:
        for count in sizes:
            for noise in (0.02, 0.3):
                pairwise = counted = together = 0
                spreads, errors = [], []
                for _ in range(groups):
                    gaps, ratios = siblings(draw, count, noise, metric)
                    # All pairs of a large group take too long one by one: no figure of them.
                    pairwise += count <= ALL_PAIRS and any(
                        difference(a, b).separated for a, b in itertools.combinations(gaps, 2)
                    )
                    counted += any(len(tuple(s.ties)) < count - 1 for s in rank_gaps(gaps))
                    together += any(len(tuple(s.ties)) < count - 1 for s in rank_gaps(gaps, ratios))
                    spreads.append(np.var([g.mean for g in gaps], ddof=1))
                    errors.append(gaps[0].se)
                looks = f"{pairwise / groups:.3f}" if count <= ALL_PAIRS else "-"
                print(
                    f"{metric:9} {count:9} {noise:6} {looks:>13} {counted / groups:12.3f} "
                    f"{together / groups:6.3f} {np.sqrt(np.mean(spreads)):8.4f} {np.mean(errors):11.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
