"""How long the audit takes and how much memory, part by part, and how both grow with the documents.

    python benchmarks/audit.py            a store of 14,042 documents of width 4,096 (MMLU, an 8B model)
    python benchmarks/audit.py --growth   1,000 to 100,000 documents of width 1,024

Seconds are those of the clock, which other work on the machine stretches, and of the processor (imports
included). Every part runs in a process of its own, so that its peak memory is its own; each includes reading
the store, which is also given alone. `pairwise` is the plain way to the same dispersion, a matrix of all
pairs in float32, side by side with the closed form.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.shared import in_a_child, parsed, peak_mb

PARTS = ["imports", "read", "slices", "mixtures", "calibration", "paper protocol", "ranking", "hard_tail"]
PARTS += ["default answer", "whole audit", "page", "pairwise"]
GROWTH = [(n, 1024) for n in (1_000, 3_000, 10_000, 30_000, 100_000)]


def written_store(path: Path, n: int, d: int) -> Path:
    """A store like that of MMLU: 57 subjects, four choices, right answers somewhat more dispersed."""
    from lmeval_dispersion.store import write_store

    rng = np.random.default_rng(0)
    subject = rng.integers(57, size=n)
    right = rng.random(n) < 0.3 + 0.5 * subject / 57
    documents = pd.DataFrame(
        {
            "doc_id": np.arange(n),
            "task": "mmlu",
            "subject": [f"subject {i}" for i in subject],
            "category": [f"category {i % 4}" for i in subject],
            "correct": right.astype(float),
            "logprobs": list(rng.normal(size=(n, 4)) - 3),
            "query_perplexity": np.exp(rng.normal(2, 0.3, size=n)),
            "prompt_tokens": rng.integers(20, 900, size=n),
            "text": ["a question " * 20] * n,
        }
    )
    x = np.empty((n, d), dtype=np.float32)
    for i in range(0, n, 1000):
        x[i : i + 1000] = rng.standard_normal((len(x[i : i + 1000]), d), dtype=np.float32)
    x *= (0.5 + 0.1 * right[:, None]).astype(np.float32)
    x[:, 0] += np.sqrt(d)
    write_store(path, documents=documents, vectors={"last": x}, manifest={"model": "m", "tasks": {"mmlu": 1}})
    return path


def run_part(part: str, path: str) -> None:
    """One part, with its seconds and the peak memory of this process."""
    start = time.perf_counter()
    if part == "imports":
        import lmeval_dispersion.auditing.commands  # noqa: F401
    elif part == "pairwise":
        from lmeval_dispersion.store import read_store

        pairwise(read_store(path).vectors())
    else:
        from lmeval_dispersion.auditing.run import read_run

        run = read_run(path)
        if part != "read":
            audit_part(part, run)
    seconds, cpu = time.perf_counter() - start, time.process_time()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_mb": peak_mb()}))


def audit_part(part: str, run) -> None:
    """One part of the audit of a run."""
    from lmeval_dispersion.auditing import mixtures, ranking, slices
    from lmeval_dispersion.auditing.calibrating import calibration
    from lmeval_dispersion.auditing.report import audit
    from lmeval_dispersion.report import render

    jobs = {
        "slices": lambda: [slices.slice_table(run, parts) for parts in slices.slicings(run).values()],
        "mixtures": lambda: mixtures.mixture_curves(run),
        "calibration": lambda: calibration.calibrate(run),
        "paper protocol": lambda: mixtures.paper_protocol(run),
        "ranking": lambda: ranking.ranking_report(run),
        "hard_tail": lambda: ranking.hard_tail(run),
        "default answer": lambda: render(audit(run, short=True).document(), "table"),
        "whole audit": lambda: render(audit(run, details=True).document(), "json"),
        "page": lambda: render(audit(run).document(), "html"),
    }
    jobs[part]()


def pairwise(u: np.ndarray) -> float:
    """All pairs at once, as one would write it first."""
    n = len(u)
    gram = u @ u.T
    return float(1 - (gram.sum(dtype=np.float64) - n) / (n * (n - 1)))


def main() -> None:
    args = parsed(
        __doc__,
        ("--growth", {"action": "store_true"}),
        ("--documents", {"type": int, "default": 14_042}),
        ("--width", {"type": int, "default": 4_096}),
        ("--repeats", {"type": int, "default": 3}),
        hidden=("--child", 2),
    )
    if args.child:
        run_part(*args.child)
        return
    sizes = GROWTH if args.growth else [(args.documents, args.width)]
    parts = ["read", "whole audit"] if args.growth else PARTS
    for n, d in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = written_store(Path(folder) / "store", n, d)
            table = {
                part: [
                    in_a_child(sys.executable, __file__, "--child", part, path) for _ in range(args.repeats)
                ]
                for part in parts
            }
        print(f"{n} documents x {d}")
        for part, runs in table.items():
            seconds = sorted(run["seconds"] for run in runs)
            cpu = sorted(run["cpu"] for run in runs)
            peak = max(run["peak_mb"] for run in runs)
            wall = f"{seconds[0]:7.2f} to {seconds[-1]:6.2f} s"
            processor = f"CPU {cpu[0]:6.2f} to {cpu[-1]:6.2f} s"
            print(f"  {part:<14} {wall}   {processor}   peak {peak:5.0f} MB", flush=True)
        if not args.growth:
            best = {part: min(run["cpu"] for run in runs) for part, runs in table.items()}
            ratio = best["whole audit"] / best["pairwise"]
            print(f"  whole audit / one pairwise matrix: {ratio:.2f} of the CPU time")


if __name__ == "__main__":
    main()
