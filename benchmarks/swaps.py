"""Seconds of CPU to put the next adapter on a loaded base, in turns with a whole load by lm-eval.

python benchmarks/swaps.py BASE ADAPTER ADAPTER... --rounds 3
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch

from lmeval_dispersion.harness import seams
from lmeval_dispersion.harness.swapping import SharedBase


def seconds(load: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    load()
    return time.process_time() - start


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("adapters", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shared, swaps, loads = SharedBase(), list[float](), list[float]()
    every = [{"pretrained": given.base, "peft": adapter} for adapter in given.adapters]
    settings = {"device": "cpu", "batch_size": 1}
    shared.loaded("hf", every[-1], lambda lm: None, **settings)
    for arguments in every * given.rounds:
        swaps.append(
            seconds(lambda a=arguments: shared.loaded("hf", a, lambda lm: None, **settings))
        )
        loads.append(
            seconds(lambda a=arguments: seams.loaded_lm("hf", a, lambda lm: None, **settings))
        )
    ratios = [load / swap for swap, load in zip(swaps, loads, strict=True)]
    print(
        f"swap {spread(swaps)} s, load {spread(loads)} s, load / swap {spread(ratios)}, {len(swaps)} pairs"
    )


if __name__ == "__main__":
    main()
