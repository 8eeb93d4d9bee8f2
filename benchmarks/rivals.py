"""What one dispersion costs beside the plain closed form, what its rivals cost, and what is claimed on noise.

    OMP_NUM_THREADS=1 python benchmarks/rivals.py                 dispersion and its rivals, side by side
    OMP_NUM_THREADS=1 python benchmarks/rivals.py --claims 1000   how often an order is claimed

`plain` is the closed form in float32 with a normalised copy of the matrix; `float64` the same in float64
around the mean. Processor seconds, in turn in one process; the ratio is the median over pairs.
"""

import argparse
import time

import numpy as np

from lmeval_dispersion.geometry import dispersion, spectrum_estimates, spectrum_metrics, unit_rows
from lmeval_dispersion.geometry.ordering import chance, ordering


def plain(x):
    unit = x / np.sqrt(np.einsum("ij,ij->i", x, x))[:, None]
    total, n = unit.sum(axis=0), len(x)
    return 1 - (float(total @ total) - n) / (n * (n - 1))


def in_float64(x):
    unit = unit_rows(x)
    centred = unit - unit.mean(axis=0)
    return float(np.einsum("ij,ij->", centred, centred) / (len(x) - 1))


def seconds(job, *args):
    start = time.process_time()
    job(*args)
    return time.process_time() - start


def costs(n, d, pairs):
    x = np.random.default_rng(0).standard_normal((n, d), dtype=np.float32) + np.float32(0.3)
    found = np.array(
        [[seconds(plain, x), seconds(dispersion, x), seconds(in_float64, x)] for _ in range(pairs)]
    )
    low, high = found.min(axis=0), found.max(axis=0)
    print(f"{n} x {d}, {pairs} pairs")
    for name, a, b in zip(("plain float32", "dispersion()", "float64"), low, high, strict=True):
        print(f"  {name:<14} {a:.3f} to {b:.3f} s")
    print(f"  dispersion() / plain: {np.median(found[:, 1] / found[:, 0]):.2f}")
    exact = in_float64(x)
    print(f"  off float64: dispersion() {abs(dispersion(x) - exact):.1e}, plain {abs(plain(x) - exact):.1e}")
    for rows, width in ((250, 896), (250, 4096), (2000, 896), (14_042, 576)):
        part = np.resize(x, (rows, width)) if rows > n else np.ascontiguousarray(x[:rows, :width])
        print(
            f"  rivals of {rows} x {width}: {seconds(spectrum_metrics, part):.2f} s, with errors "
            f"{seconds(spectrum_estimates, part):.2f} s"
        )


def claims(repeats):
    """How often an order is claimed where accuracy has nothing to do with the vectors."""
    print("slices  sizes     metrics of                an order claimed  by permutations alone")
    for slices in (8, 12, 20):
        for sizes, metrics in (
            ("equal", "planted numbers"),
            ("8 to 200", "planted, rising with n"),
            ("8 to 200", "vectors of one kind"),
        ):
            found = np.array([_claimed(slices, sizes, metrics, seed) for seed in range(repeats)])
            both, alone = found.mean(axis=0)
            print(f"{slices:>6}  {sizes:<8}  {metrics:<24}  {both:>16.3f}  {alone:>21.3f}", flush=True)
    print(f"one standard error at 5 %: {np.sqrt(0.05 * 0.95 / repeats):.3f}; none is claimed below 8 slices")
    print("slices  metrics follow the truth by  a better metric claimed")
    for slices in (8, 20, 57):
        for strength in (0.0, 1.0, 2.5):
            better = 0
            for seed in range(repeats // 10):
                rng = np.random.default_rng([seed, slices])
                truth, shared = rng.normal(size=slices), rng.normal(size=slices)
                rows = strength * truth + 0.5 * shared + rng.normal(size=(9, slices))
                found = ordering({f"m{j}": row for j, row in enumerate(rows)}, truth, seed=seed)
                better += any(row["better"] for row in found["against"])
            print(f"{slices:>6}  {strength:>27}  {better / (repeats // 10):>23.3f}", flush=True)


def _claimed(slices, sizes, metrics, seed):
    rng = np.random.default_rng([seed, slices])
    n = np.full(slices, 40) if sizes == "equal" else np.exp(rng.uniform(np.log(8), np.log(200), size=slices))
    n = np.round(n).astype(int)
    accuracy = rng.binomial(n, 0.5) / n
    if metrics == "vectors of one kind":
        scale = np.exp(np.linspace(0, -2, 12))
        sets = [0.5 + rng.normal(size=(count, 12)) * scale for count in n]
        found = [{**spectrum_metrics(x), "dispersion": dispersion(x)} for x in sets]
        rows = np.array([[one[name] for one in found] for name in found[0]])
        rows = rows[np.isfinite(rows).all(axis=1)]
    else:
        rise = np.array([3, 3, 3, 1, 1, 0.5, 0, 0, 0])[:, None]
        rows = rise * np.log(n) + 0.5 * rng.normal(size=slices) + rng.normal(size=(9, slices))
    if np.ptp(accuracy) == 0:
        return False, False
    # 199 draws: the test is as exact, and a tenth of the time.
    return [chance(rows, accuracy, how, rng, 199) <= 0.05 for how in (n, None)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--claims", type=int, metavar="REPEATS")
    args = parser.parse_args()
    claims(args.claims) if args.claims else costs(10_000, 4_096, args.pairs)
