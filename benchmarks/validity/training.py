"""Training a population: groups of models side by side, every checkpoint asked and measured; resumable."""

from __future__ import annotations

import math
import os
import random
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
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
from benchmarks.validity.decoder import Adapted, Decoder, built, stored_tensors, write, write_adapter
from benchmarks.validity.questions import questions
from benchmarks.validity.study import Run, Study, read_study
from benchmarks.validity.texts import (
    ALIKE,
    BOS,
    EOS,
    SKILLS,
    SOURCES,
    WITH_CALLS,
    trained_tokenizer,
)

LOSS_WINDOW = 50  # steps whose mean is the training loss of a checkpoint
# Workers keep freed memory: at this size a fifth of a step is spent on getting the same pages again.
KEPT_MEMORY = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**26),
}


class Texts:
    """Tokenizer, training streams by source, and held-out text of a study, made once and kept in ``work``."""

    def __init__(self, study: Study, work: Path) -> None:
        made = study.content["texts"]
        calls = made.get("calls", False)
        self.sources = WITH_CALLS if calls else SOURCES
        file = work / "tokenizer.json"
        work.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            trained_tokenizer(self.sources, made["vocabulary"], seed=made["seed"]).save(str(file))
        if made.get("alike", False):
            self.sources = self.sources | ALIKE
        self.json = file.read_text("utf-8")
        self.tokenizer = Tokenizer.from_str(self.json)
        self.streams = {
            name: self._stream(work / f"{name}.npy", name, made["tokens"], made["seed"])
            for name in self.sources
        }
        self.held_out = self._stream(work / "held-out.npy", "text", made["held_out"], made["seed"] + 1)
        self.digits = torch.tensor([self.tokenizer.token_to_id(str(d)) for d in range(10)])
        self.asked = {
            part: {skill: questions(skill, study.content["questions"], seed, calls=calls) for skill in SKILLS}
            for part, seed in (("truth", made["seed"] + 2), ("labels", made["seed"] + 3))
        }

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def _stream(self, file: Path, name: str, tokens: int, seed: int) -> torch.Tensor:
        if not file.exists():
            rng, ids = random.Random(f"{name} {seed}"), list[int]()
            while len(ids) < tokens:
                texts = [f"{BOS}{self.sources[name](rng)}{EOS}" for _ in range(500)]
                for encoding in self.tokenizer.encode_batch(texts):
                    ids += encoding.ids
            np.save(file, np.array(ids[:tokens], np.int32))
        return torch.from_numpy(np.load(file).astype(np.int64))


# --- training -------------------------------------------------------------------------------------------


def schedule(step: int, steps: int, warmup: int, decay: bool) -> float:
    """Factor on the learning rate: a linear rise, then a cosine down to a tenth, or no decay."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) if decay else 1.0


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
) -> Iterator[list[dict[str, float | None]]]:
    """Train models side by side and store their checkpoints below ``work``.

    The runs share size and training settings; each has its own texts, initial weights and order. At every
    stored step it yields what training saw so far, by model.
    """
    first = runs[0]
    chosen, steps, shape = first.training, first.steps[-1], study.content["sizes"][first.size]

    def last_of(recipe: str) -> Decoder:
        return built([stored_tensors(last_folder(study, work, run, recipe)) for run in runs], shape)

    seeds = [run.seed for run in runs]
    base = last_folder(study, work, first, first.base) if first.base else None
    adapters = [run.adapter for run in runs if run.adapter]
    model = (
        Adapted(stored_tensors(base), shape, adapters, [zlib.crc32(run.name.encode()) for run in runs])
        if base and adapters
        else last_of(first.base).train()
        if first.base
        else Decoder(texts.vocabulary, **shape, tied=chosen["tied"], scale=chosen["logit_scale"], seeds=seeds)
    )
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
    generators = [torch.Generator().manual_seed(1000 + run.seed + 10_000 * run.order) for run in runs]
    losses: list[torch.Tensor] = []
    tokens, digits = 0, torch.zeros(len(runs))
    for step in range(steps + 1):
        if step in first.steps:
            for number, run in enumerate(runs):
                folder = work / "runs" / run.name / f"step{step}"
                if run.adapter and base:
                    write_adapter(folder, model.member(number), base)
                else:
                    write(folder, model.member(number), model.shape, texts.json)
            recent = torch.stack(losses[-LOSS_WINDOW:]).mean(0) if losses else None
            yield [
                {
                    "step": step,
                    "train_loss": None if recent is None else round(float(recent[number]), 5),
                    "digit_share": round(float(digits[number]) / tokens, 5) if tokens else None,
                }
                for number in range(len(runs))
            ]
        if step == steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = chosen["lr"] * schedule(step, steps, chosen["warmup"], chosen["decay"])
        batch = torch.stack([sampled(run, texts, g) for run, g in zip(runs, generators, strict=True)])
        tokens += batch[0].numel()
        digits += torch.isin(batch, texts.digits).flatten(1).sum(1)
        loss, by_model = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        model.clip(1.0)
        optimizer.step()
        losses.append(by_model)


def last_folder(study: Study, work: Path, run: Run, recipe: str) -> Path:
    """The last checkpoint of a recipe, of a run's size and seed."""
    step = study.content["recipes"][recipe].get("steps", study.steps)[-1]
    return work / "runs" / f"{run.size}-{recipe}-default-seed{run.seed}" / f"step{step}"


def loss_of(model: Decoder, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over all models, and each model's own mean cross-entropy.

    A sum over models: the gradient of each is that of its own mean.
    """
    inputs, targets = batch[:, :, :-1], batch[:, :, 1:].flatten()
    logits = model.logits(inputs)
    by_model = cross_entropy(logits.flatten(0, 1), targets, reduction="none").view(len(batch), -1).mean(1)
    return by_model.sum(), by_model.detach()


# --- a population ---------------------------------------------------------------------------------------


def trained_group(configuration: Path, runs: Sequence[Run], work: Path) -> list[dict[str, Any]]:
    """Train models side by side, then ask and measure every checkpoint of each; one result a model."""
    torch.set_num_threads(1)
    study = read_study(configuration)
    texts = Texts(study, work)
    start, processor = time.perf_counter(), time.process_time()
    rows = []
    answers = Answers(texts.tokenizer, texts.asked)
    for run, checkpoints in zip(runs, zip(*trained(runs, study, texts, work), strict=True), strict=True):
        folders = [work / "runs" / run.name / f"step{checkpoint['step']}" for checkpoint in checkpoints]
        names = {name: getattr(run, name) for name in ("name", "recipe", "setting", "size", "seed")}
        tensors = stored_tensors(folders[-1])
        model = built([tensors], study.content["sizes"][run.size])
        rows.append({**names, **answers.kept(model, tensors, own_rows=not run.adapter)})
    spent = {
        "seconds": round((time.perf_counter() - start) / len(runs), 1),
        "processor_seconds": round((time.process_time() - processor) / len(runs), 1),
    }
    return [row | spent for row in rows]


def train(study: Study, file: Path, work: Path, jobs: int, seeds: Collection[int] | None = None) -> None:
    """Train all models of some seeds, or of all, that are not in the results yet."""
    kinds = file.parent.glob(f"{file.stem}-*.jsonl")  # a file for each kind: together they are large
    done = {row["name"] for kind in kinds for row in records.checked(kind, study.path)}
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
