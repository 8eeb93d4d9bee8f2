"""Training a population: groups of models in worker processes, one result a model, resumable."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.validity import results
from benchmarks.validity.decoder import built, stored_tensors
from benchmarks.validity.measures import measured
from benchmarks.validity.population import Texts, examined, trained
from benchmarks.validity.study import Run, Study, read_study

# Workers keep freed memory: at this size a fifth of a step is spent on getting the same pages again.
KEPT_MEMORY = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**26),
}


def trained_group(configuration: Path, runs: list[Run], work: Path) -> list[dict[str, Any]]:
    """Train models side by side, then ask and measure every checkpoint of each."""
    torch.set_num_threads(1)
    study = read_study(configuration)
    texts = Texts(study, work)
    start, processor = time.perf_counter(), time.process_time()
    found = []
    for run, checkpoints in zip(runs, trained(runs, study, texts, work), strict=True):
        folders = [work / "runs" / run.name / f"step{row['step']}" for row in checkpoints]
        rows: list[dict[str, Any]] = []
        for row, folder, figures in zip(checkpoints, folders, measured(folders), strict=True):
            last = row["step"] == run.steps[-1]
            model = built([stored_tensors(folder)], study.content["sizes"][run.size])
            asked = examined(model, texts, ("truth", "labels") if last else ("truth",))
            if not last:
                del asked["right"]
            rows.append({**row, **asked, "figures": figures})
        found.append(
            {
                "name": run.name,
                "recipe": run.recipe,
                "setting": run.setting,
                "size": run.size,
                "seed": run.seed,
                "checkpoints": rows,
            }
        )
    spent = {
        "seconds": round((time.perf_counter() - start) / len(runs), 1),
        "processor_seconds": round((time.process_time() - processor) / len(runs), 1),
    }
    return [row | spent for row in found]


def train(study: Study, file: Path, work: Path, jobs: int, seeds: Collection[int] | None = None) -> None:
    """Train whatever of some seeds, or of all, is not in the results yet."""
    done = {row["name"] for row in results.checked(file, study.path)}
    groups = [
        [run for run in group if run.name not in done and (seeds is None or run.seed in seeds)]
        for group in study.groups()
    ]
    waiting = [group for group in groups if group]
    print(f"{len(done)} models are there, {sum(map(len, waiting))} to train", file=sys.stderr, flush=True)
    if not waiting:
        return
    os.environ.update(KEPT_MEMORY)
    Texts(study, work)  # made once, before the workers read it
    marks = {"configuration": results.digest(study.path), **results.provenance()}

    def keep(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            results.append(file, row | marks)
            last = row["checkpoints"][-1]["accuracy"]
            print(f"{row['name']}: {row['seconds']:.0f} s, {last}", file=sys.stderr, flush=True)

    if jobs == 1:
        for group in waiting:
            keep(trained_group(study.path, group, work))
        return
    late = [
        group for group in waiting if group[0].teacher or group[0].base
    ]  # after those whom they go on from
    for wave in ([group for group in waiting if group not in late], late):
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(trained_group, study.path, group, work) for group in wave]
            for future in as_completed(futures):
                keep(future.result())
