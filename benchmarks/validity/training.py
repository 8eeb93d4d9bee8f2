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
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from benchmarks.validity import records
from benchmarks.validity.answers import Answers
from benchmarks.validity.decoder import Adapted, Decoder, built, stored_tensors, write, write_adapter
from benchmarks.validity.questions import answered, questions
from benchmarks.validity.study import Run, Study, read_study
from benchmarks.validity.texts import (
    ALIKE,
    BOS,
    DOMAINS,
    EOS,
    SKILLS,
    SOURCES,
    WITH_CALLS,
    own_words,
    trained_tokenizer,
)
from lmeval_dispersion import screen

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
        room = max(1, int(len(stream) * run.pool) - length - 1)
        start = int(torch.randint(room, (1,), generator=generator))
        row = stream[start : start + length + 1]
        rows.append(row[torch.randperm(length + 1, generator=generator)] if run.shuffled else row)
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
    teachers = last_of(first.teacher) if first.teacher else None
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
        loss, by_model = loss_of(model, teachers, batch, chosen["label_smoothing"], chosen["z_loss"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        model.clip(1.0)
        optimizer.step()
        losses.append(by_model)


def last_folder(study: Study, work: Path, run: Run, recipe: str) -> Path:
    """The last checkpoint of a recipe, of a run's size and seed."""
    step = study.content["recipes"][recipe].get("steps", study.steps)[-1]
    return work / "runs" / f"{run.size}-{recipe}-default-seed{run.seed}" / f"step{step}"


def loss_of(
    model: Decoder, teachers: Decoder | None, batch: torch.Tensor, label_smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over all models, and each model's own mean cross-entropy.

    A sum over models: the gradient of each is that of its own mean.
    """
    inputs, targets = batch[:, :, :-1], batch[:, :, 1:].flatten()
    logits = model.logits(inputs)
    plain = cross_entropy(logits.flatten(0, 1), targets, label_smoothing=label_smoothing, reduction="none")
    by_model = plain.view(len(batch), -1).mean(1)
    loss = by_model.sum()
    if teachers is not None:
        with torch.no_grad():
            aim = log_softmax(teachers.logits(inputs), -1)
        loss = kl_div(log_softmax(logits, -1), aim, log_target=True, reduction="sum") / logits.shape[1]
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(logits, -1).square().mean(1).sum()
    return loss, by_model.detach()


# --- the skills of a checkpoint, and its figures --------------------------------------------------------


@torch.inference_mode()
def text_loss(model: Decoder, ids: torch.Tensor, length: int = 64) -> float:
    """Mean cross-entropy a token of held-out text, nats."""
    windows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    logits = model.head(model(windows[:, :-1]))
    return float(cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def examined(model: Decoder, texts: Texts, *, labels: bool) -> dict[str, Any]:
    """Accuracy of each skill and the loss on held-out text; with ``labels`` flags of every question too."""
    flags = {
        part: {skill: answered(model, texts.tokenizer, asked) for skill, asked in texts.asked[part].items()}
        for part in (("truth", "labels") if labels else ("truth",))
    }
    right = {
        part: {skill: records.packed(right) for skill, right in by_skill.items()}
        for part, by_skill in flags.items()
    }
    return {
        "accuracy": {skill: round(float(right.mean()), 4) for skill, right in flags["truth"].items()},
        **({"right": right} if labels else {}),
        "text_loss": round(text_loss(model, texts.held_out), 5),
    }


def measured(folders: Sequence[Path]) -> list[dict[str, float]]:
    """Figures of each checkpoint that might order them: G by the public screener, its parts, its rivals.

    Those of a domain end in ``_math``, ``_code`` or ``_legal``.

    Raises:
        RuntimeError: A folder could not be screened.
    """
    rows: list[dict[str, float]] = []
    norms = []
    for folder in folders:
        tensors = stored_tensors(folder)
        matrix = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).numpy()
        norms.append(np.linalg.norm(matrix.astype(np.float64), axis=1))
        rows.append({"norm_all": float(norms[-1].mean())})
    for domain in DOMAINS:
        result = screen([str(folder) for folder in folders], domain=own_words(domain), rank_by="gap")
        if result.failed:
            raise RuntimeError("; ".join(f"{failed.label}: {failed.message}" for failed in result.failed))
        readings = {Path(checkpoint.repo): checkpoint for checkpoint in result.checkpoints}
        for row, folder, norm in zip(rows, folders, norms, strict=True):
            reading = readings[folder]
            cosine, euclidean = reading.gaps["cosine"], reading.gaps["euclidean"]
            row |= {
                f"cosine_{domain}": cosine.mean,
                f"cosine_se_{domain}": cosine.se,
                f"euclidean_{domain}": euclidean.mean,
                f"within_T_{domain}": cosine.within_domain.mean,
                "within_R": cosine.within_reference.mean,
                "euclidean_within_R": euclidean.within_reference.mean,
                f"ratio_folded_{domain}": reading.ratio.mean if reading.ratio else float("nan"),
                f"norm_T_{domain}": float(norm[reading.resolution.domain_ids].mean()),
                "norm_R": float(norm[reading.resolution.reference_ids].mean()),
            }
    return [{name: round(float(value), 6) for name, value in row.items()} for row in rows]


# --- a population ---------------------------------------------------------------------------------------


def trained_group(configuration: Path, runs: Sequence[Run], work: Path) -> list[dict[str, Any]]:
    """Train models side by side, then ask and measure every checkpoint of each; one result a model."""
    torch.set_num_threads(1)
    study = read_study(configuration)
    texts = Texts(study, work)
    start, processor = time.perf_counter(), time.process_time()
    rows = []
    answers, finder = Answers(texts.tokenizer, texts.asked), None
    for run, checkpoints in zip(runs, zip(*trained(runs, study, texts, work), strict=True), strict=True):
        folders = [work / "runs" / run.name / f"step{checkpoint['step']}" for checkpoint in checkpoints]
        names = {name: getattr(run, name) for name in ("name", "recipe", "setting", "size", "seed")}
        if study.content.get("keep") == "siblings":
            tensors = stored_tensors(folders[-1])
            model = built([tensors], study.content["sizes"][run.size])
            rows.append({**names, **answers.kept(model, tensors, own_rows=not run.adapter)})
            continue
        asked = []
        if (of := study.content.get("answers")) is not None:
            finding = next(r for r in study.runs() if r.recipe == (run.base or of["found_by"]))
            tensors = stored_tensors(last_folder(study, work, finding, finding.recipe))
            finder = built([tensors], study.content["sizes"][run.size])
        for checkpoint, folder, figures in zip(checkpoints, folders, measured(folders), strict=True):
            model = built([stored_tensors(folder)], study.content["sizes"][run.size])
            skills = examined(model, texts, labels=checkpoint["step"] == run.steps[-1])
            if finder is not None:
                skills |= answers.measured(model, stored_tensors(folder), finder)
            asked.append({**checkpoint, **skills, "figures": figures})
        rows.append({**names, "checkpoints": asked})
    spent = {
        "seconds": round((time.perf_counter() - start) / len(runs), 1),
        "processor_seconds": round((time.process_time() - processor) / len(runs), 1),
    }
    return [row | spent for row in rows]


def train(study: Study, file: Path, work: Path, jobs: int, seeds: Collection[int] | None = None) -> None:
    """Train all models of some seeds, or of all, that are not in the results yet."""
    done = {row["name"] for row in records.checked(file, study.path)}
    split = study.content.get("keep") == "siblings"  # a file for each kind: together they are large
    if split:
        kinds = file.parent.glob(f"{file.stem}-*.jsonl")
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
            records.append(file.with_stem(f"{file.stem}-{kind}") if split else file, row | marks)
            last = "" if split else row["checkpoints"][-1]["accuracy"]
            print(f"{row['name']}: {row['seconds']:.0f} s, {last}", file=sys.stderr, flush=True)

    if jobs == 1:
        for group in waiting:
            keep(trained_group(study.path, group, work))
        return
    # Those who imitate a teacher or go on from a base wait for all others.
    late = [group for group in waiting if group[0].teacher or group[0].base]
    for wave in ([group for group in waiting if group not in late], late):
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(trained_group, study.path, group, work) for group in wave]
            for future in as_completed(futures):
                keep(future.result())
