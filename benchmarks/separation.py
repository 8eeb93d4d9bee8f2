"""How often siblings that differ by noise alone get a clear order: `python benchmarks/separation.py`.

Each group is one matrix with independent noise in every row of every sibling; *copies* are near copies, a
twentieth of the noise apart, of eleven such siblings. Printed is the share of groups in which at least one
pair is ordered: by two standard errors pair by pair, with the comparisons of the group counted, by G and
ratio together, and against the best of one half of the group (`clear_above`), beside the spread of G among
the siblings and its printed error.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
from lmeval_screener.figures import Gap, Ratio, difference, gap, ratio
from lmeval_screener.ranking import clear_above, rank_gaps
from lmeval_screener.weights.projection import FinalNorm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import parsed
from lmeval_dispersion.geometry import METRICS, Metric

DIGITS, WORDS, WIDTH = 10, 105, 256
MODELS = 11  # that near copies are copies of
FEW = 64  # siblings up to which all pairs are looked at one by one


def siblings(
    draw: np.random.Generator, count: int, noise: float, metric: Metric, copies: bool = False
) -> tuple[list[Gap], list[Ratio]]:
    """Both figures of one matrix, with noise of a share ``noise`` of each row's norm in every sibling.

    With ``copies`` they are near copies of `MODELS` such siblings.
    """
    base = draw.normal(size=(DIGITS + WORDS, WIDTH)) + 0.6 * draw.normal(size=WIDTH)
    base[:DIGITS] += 0.6 * draw.normal(size=WIDTH)
    size = noise * np.linalg.norm(base, axis=1, keepdims=True) / np.sqrt(WIDTH)
    norm = FinalNorm("norm", np.ones(WIDTH), "rms")
    gaps, ratios = [], []
    models = [base + size * draw.normal(size=base.shape) for _ in range(MODELS if copies else 0)]
    for i in range(count):
        own = size * draw.normal(size=base.shape)
        rows = models[i % MODELS] + own / 20 if copies else base + own
        gaps.append(gap(rows[:DIGITS], rows[DIGITS:], metric))
        ratios.append(ratio(rows[:DIGITS], rows[DIGITS:], norm, "BF16"))
    return gaps, ratios


def is_ordered(gaps: list[Gap], ratios: list[Ratio] | None = None) -> bool:
    """Whether any two have a clear order."""
    return any(len(tuple(s.ties)) < len(gaps) - 1 for s in rank_gaps(gaps, ratios or ()))


def main() -> None:
    """Print one line for every metric, size of a group and size of the noise."""
    args = parsed(
        __doc__,
        ("--groups", {"type": int, "default": 1000}),
        ("--sizes", {"default": "2,5,10,20,100,1000", "help": "siblings of a group"}),
        ("--metrics", {"default": ",".join(METRICS)}),
    )
    groups, sizes = args.groups, [int(size) for size in args.sizes.split(",")]
    draw = np.random.default_rng(20260501)
    heads = "metric     siblings  noise          pair by pair  counted    both  champion  sd of G  printed se"
    print(heads, flush=True)
    for metric in args.metrics.split(","):
        for count in sizes:
            for noise, copies in ((0.02, False), (0.3, False), (0.3, True)):
                pairwise = counted = together = champion = 0
                spreads, errors = [], []
                for _ in range(groups):
                    gaps, ratios = siblings(draw, count, noise, metric, copies)
                    # All pairs of a large group take too long one by one: no figure of them.
                    pairs = itertools.starmap(difference, itertools.combinations(gaps, 2))
                    pairwise += count <= FEW and any(abs(pair.mean) > 2 * pair.se for pair in pairs)
                    counted += is_ordered(gaps)
                    together += is_ordered(gaps, ratios)
                    best = max(gaps[: -(-count // 2)], key=lambda g: g.mean)
                    champion += any(clear_above((best, None), [(g, None) for g in gaps[-(-count // 2) :]]))
                    spreads.append(np.var([g.mean for g in gaps], ddof=1))
                    errors.append(gaps[0].se)
                looks = f"{pairwise / groups:.3f}" if count <= FEW else "-"
                print(
                    f"{metric:9} {count:9} {noise:6} {'copies' if copies else '':6} {looks:>13} "
                    f"{counted / groups:8.3f} {together / groups:7.3f} {champion / groups:9.3f} "
                    f"{np.sqrt(np.mean(spreads)):8.4f} {np.mean(errors):11.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
