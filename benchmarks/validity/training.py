"""Training a population: groups of models side by side, every checkpoint asked and measured; resumable."""

from __future__ import annotations

import math
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from benchmarks.validity import records
from benchmarks.validity.answers import Answers
from benchmarks.validity.decoder import (
    Adapted,
    Decoder,
    built,
    stored_tensors,
    write,
    write_adapter,
)
from benchmarks.validity.questions import questions
from benchmarks.validity.study import Run, Study, read_study
from benchmarks.validity.texts import (
    ALIKE,
    BOS,
    DOMAINS,
    EOS,
    REFERENCES,
    REGISTERED,
    WITH_CALLS,
    in_both,
    trained_tokenizer,
)

# Workers keep freed memory: at this size a fifth of a step is spent on getting the same pages again.
KEPT_MEMORY = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**26),
}


class Texts:
    """Tokenizer, training streams by source, and questions of a study, made once and kept in ``work``."""

    def __init__(self, study: Study, work: Path) -> None:
        made, file = study.content["texts"], work / "tokenizer.json"
        work.mkdir(parents=True, exist_ok=True)
        sources, alike = WITH_CALLS, ALIKE
        if made.get("both_references"):
            sources = {name: in_both(make) for name, make in sources.items()}
            alike = {name: in_both(make) for name, make in alike.items()}
        if not file.exists():
            trained_tokenizer(sources, made["vocabulary"], seed=made["seed"]).save(str(file))
        self.json = file.read_text("utf-8")
        self.tokenizer = Tokenizer.from_str(self.json)
        self.streams = {
            name: self._stream(work, name, make, made) for name, make in (sources | alike).items()
        }
        self.asked = {
            part: {
                domain: questions(domain, study.content["questions"], seed) for domain in DOMAINS
            }
            for part, seed in (("truth", made["seed"] + 2), ("labels", made["seed"] + 3))
        }

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def _stream(
        self, work: Path, name: str, make: Callable[[random.Random], str], made: Mapping[str, int]
    ) -> torch.Tensor:
        file = work / f"{name}.npy"
        if not file.exists():
            rng, ids = random.Random(f"{name} {made['seed']}"), list[int]()
            while len(ids) < made["tokens"]:
                texts = [f"{BOS}{make(rng)}{EOS}" for _ in range(500)]
                for encoding in self.tokenizer.encode_batch(texts):
                    ids += encoding.ids
            np.save(file, np.array(ids[: made["tokens"]], np.int32))
        return torch.from_numpy(np.load(file).astype(np.int64))


# --- training -------------------------------------------------------------------------------------------


def schedule(step: int, steps: int, warmup: int, decay: bool) -> float:
    """Factor on the learning rate: a linear rise, then a cosine down to a tenth, or no decay."""
    if step < warmup:
        return (step + 1) / warmup
    return (
        0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) if decay else 1.0
    )


def sampled(run: Run, texts: Texts, generator: torch.Generator) -> torch.Tensor:
    """A batch of sequences, (batch, length + 1)."""
    batch, length = run.training["batch"], run.training["length"]
    names = list(run.shares)
    shares = torch.tensor([run.shares[name] for name in names])
    which = torch.multinomial(shares, batch, replacement=True, generator=generator).tolist()
    rows = []
    for source in which:
        stream = texts.streams[names[source]]
        room = max(1, len(stream) - length - 1)
        start = int(torch.randint(room, (1,), generator=generator))
        rows.append(stream[start : start + length + 1])
    return torch.stack(rows)


def trained(
    runs: Sequence[Run], study: Study, texts: Texts, work: Path
) -> list[dict[str, torch.Tensor]]:
    """Train models side by side and store their last checkpoints below ``work``; their tensors as stored.

    The runs share training settings; each has its own texts, initial weights and order.
    """
    first = runs[0]
    chosen, steps, shape = first.training, first.steps, study.shape
    seeds = [run.seed for run in runs]
    adapters = [run.adapter for run in runs if run.adapter]
    base = folder_of(work, study, first.base, first.seed) if first.base else None
    if base and adapters:
        names = [zlib.crc32(run.name.encode()) for run in runs]
        model: Decoder = Adapted(stored_tensors(base), shape, adapters, names)
    elif first.base:
        model = built(
            [stored_tensors(folder_of(work, study, first.base, seed)) for seed in seeds], shape
        )
        model.train()
    else:
        model = Decoder(texts.vocabulary, **shape, seeds=seeds)
    matrices = [parameter for parameter in model.named.values() if parameter.dim() > 2]
    vectors = [parameter for parameter in model.named.values() if parameter.dim() == 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": chosen["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=chosen["lr"],
        betas=(0.9, 0.98),
        fused=True,
    )
    generators = [
        torch.Generator().manual_seed(1000 + run.seed + 10_000 * run.order) for run in runs
    ]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = chosen["lr"] * schedule(step, steps, chosen["warmup"], chosen["decay"])
        batch = torch.stack(
            [sampled(run, texts, g) for run, g in zip(runs, generators, strict=True)]
        )
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()
        model.clip(1.0)
        optimizer.step()
    stored = []
    for number, run in enumerate(runs):
        folder = folder_of(work, study, run.recipe, run.seed)
        if run.adapter and base:
            write_adapter(folder, model.member(number), base)
        else:
            write(folder, model.member(number), model.shape, texts.json)
        stored.append(stored_tensors(folder))
    return stored


def folder_of(work: Path, study: Study, recipe: str, seed: int) -> Path:
    """The last checkpoint of a recipe."""
    (run,) = (run for run in study.runs() if run.recipe == recipe and run.seed == seed)
    return work / "runs" / run.name / f"step{run.steps}"


def loss_of(model: Decoder, batch: torch.Tensor) -> torch.Tensor:
    """The sum over models of each one's mean cross-entropy: the gradient of each is that of its own mean."""
    inputs, targets = batch[:, :, :-1], batch[:, :, 1:].flatten()
    logits = model.logits(inputs)
    by_model = (
        cross_entropy(logits.flatten(0, 1), targets, reduction="none").view(len(batch), -1).mean(1)
    )
    return by_model.sum()


# --- a population ---------------------------------------------------------------------------------------


def trained_group(configuration: Path, runs: Sequence[Run], work: Path) -> list[dict[str, Any]]:
    """Train models side by side, then ask and measure every checkpoint of each; one result a model."""
    torch.set_num_threads(1)
    study = read_study(configuration)
    texts = Texts(study, work)
    start, processor = time.perf_counter(), time.process_time()
    rows = []
    references = REFERENCES if study.content["texts"].get("both_references") else REGISTERED
    answers = Answers(texts.tokenizer, texts.asked, references)
    for run, tensors in zip(runs, trained(runs, study, texts, work), strict=True):
        # The two that no longer vary are in the committed rows.
        names = {"name": run.name, "recipe": run.recipe, "setting": "default", "size": "small"}
        kept = answers.kept(built([tensors], study.shape), tensors, own_rows=not run.adapter)
        rows.append({**names, "seed": run.seed, **kept})
    spent = {
        "seconds": round((time.perf_counter() - start) / len(runs), 1),
        "processor_seconds": round((time.process_time() - processor) / len(runs), 1),
    }
    return [row | spent for row in rows]


def train(study: Study, file: Path, work: Path, jobs: int) -> None:
    """Train all models that are not in the results yet."""
    kinds = file.parent.glob(
        f"{file.stem}-*.jsonl"
    )  # a file for each kind: together they are large
    done = {row["name"] for kind in kinds for row in records.checked(kind, study.path)}
    groups = [[run for run in group if run.name not in done] for group in study.groups()]
    waiting = [group for group in groups if group]
    print(
        f"{len(done)} models are there, {sum(map(len, waiting))} to train",
        file=sys.stderr,
        flush=True,
    )
    if not waiting:
        return
    os.environ.update(KEPT_MEMORY)
    Texts(study, work)  # made once, before the workers read it
    marks = {"configuration": records.digest(study.path), **records.provenance()}

    def keep(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            kind = row["recipe"].split("-")[0]
            records.append(file.with_stem(f"{file.stem}-{kind}"), row | marks)
            print(f"{row['name']}: {row['seconds']:.0f} s", file=sys.stderr, flush=True)

    if jobs == 1:
        for group in waiting:
            keep(trained_group(study.path, group, work))
        return
    # Those who go on from a base wait for all others.
    late = [group for group in waiting if group[0].base]
    for wave in ([group for group in waiting if group not in late], late):
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(trained_group, study.path, group, work) for group in wave]
            for future in as_completed(futures):
                keep(future.result())
