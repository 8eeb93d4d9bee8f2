"""Training one model of the population, and asking every stored checkpoint of it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from benchmarks.validity.decoder import Decoder, built, stored_tensors, write
from benchmarks.validity.questions import SKILLS, Question, answered, questions
from benchmarks.validity.results import packed
from benchmarks.validity.study import Run, Study
from benchmarks.validity.texts import BOS, EOS, SOURCES, WITH_CALLS, trained_tokenizer

LOSS_WINDOW = 50  # steps whose mean is the training loss of a checkpoint


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
            rng, ids = random.Random(f"{name} {seed}"), []
            while len(ids) < tokens:
                texts = [f"{BOS}{self.sources[name](rng)}{EOS}" for _ in range(500)]
                for encoding in self.tokenizer.encode_batch(texts):
                    ids += encoding.ids
            np.save(file, np.array(ids[:tokens], np.int32))
        return torch.from_numpy(np.load(file).astype(np.int64))


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


def trained(runs: list[Run], study: Study, texts: Texts, work: Path) -> list[list[dict[str, float | None]]]:
    """Train models side by side and store their checkpoints below ``work``; what training saw, by model.

    The runs share size and training settings; each has its own texts, initial weights and order.
    """
    first = runs[0]
    chosen, steps, shape = first.training, first.steps[-1], study.content["sizes"][first.size]

    def last_of(recipe: str) -> Decoder:
        folders = [work / "runs" / f"{run.size}-{recipe}-default-seed{run.seed}" for run in runs]
        return built([stored_tensors(folder / f"step{study.steps[-1]}") for folder in folders], shape)

    seeds = [run.seed for run in runs]
    model = (
        last_of(first.base).train()
        if first.base
        else Decoder(texts.vocabulary, **shape, tied=chosen["tied"], scale=chosen["logit_scale"], seeds=seeds)
    )
    teachers = last_of(first.teacher) if first.teacher else None
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.named.values() if p.dim() > 2],
            "weight_decay": chosen["weight_decay"]},
            {"params": [p for p in model.named.values() if p.dim() == 2], "weight_decay": 0.0},
        ],
        lr=chosen["lr"], betas=(0.9, 0.98), fused=True,
    )  # fmt: skip
    generators = [torch.Generator().manual_seed(1000 + run.seed) for run in runs]
    losses: list[torch.Tensor] = []
    seen, digits = 0, torch.zeros(len(runs))
    found: list[list[dict[str, float | None]]] = [[] for _ in runs]
    for step in range(steps + 1):
        if step in first.steps:
            recent = torch.stack(losses[-LOSS_WINDOW:]).mean(0) if losses else None
            for number, run in enumerate(runs):
                folder = work / "runs" / run.name / f"step{step}"
                write(folder, model.member(number), model.shape, texts.json)
                found[number].append(
                    {
                        "step": step,
                        "train_loss": None if recent is None else round(float(recent[number]), 5),
                        "digit_share": round(float(digits[number]) / seen, 5) if seen else None,
                    }
                )
        if step == steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = chosen["lr"] * schedule(step, steps, chosen["warmup"], chosen["decay"])
        batch = torch.stack([sampled(run, texts, g) for run, g in zip(runs, generators, strict=True)])
        seen += batch[0].numel()
        digits += torch.isin(batch, texts.digits).flatten(1).sum(1)
        inputs, targets = batch[:, :, :-1], batch[:, :, 1:].flatten()
        logits = model.logits(inputs)
        flat = logits.flatten(0, 1)
        plain = cross_entropy(flat, targets, label_smoothing=chosen["label_smoothing"], reduction="none")
        own = plain.view(len(runs), -1).mean(1)
        loss = own.sum()  # one member's gradient is that of its own mean
        if teachers is not None:
            with torch.no_grad():
                aim = log_softmax(teachers.logits(inputs), -1)
            loss = kl_div(log_softmax(logits, -1), aim, log_target=True, reduction="sum") / logits.shape[1]
        if chosen["z_loss"]:
            loss = loss + chosen["z_loss"] * torch.logsumexp(logits, -1).square().mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        model.clip(1.0)
        optimizer.step()
        losses.append(own.detach())
    return found


@torch.inference_mode()
def text_loss(model: Decoder, ids: torch.Tensor, length: int = 64) -> float:
    """Mean cross-entropy a token of held-out text, nats."""
    windows = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, length + 1)
    logits = model.head(model(windows[:, :-1]))
    return float(cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def examined(model: Decoder, texts: Texts, parts: tuple[str, ...] = ("truth", "labels")) -> dict[str, object]:
    """A checkpoint's answers: flags of every question by part and skill; and its loss on held-out text."""
    right: dict[str, dict[str, str]] = {}
    accuracy: dict[str, float] = {}
    for part in parts:
        right[part] = {}
        for skill in SKILLS:
            asked: list[Question] = texts.asked[part][skill]
            flags = answered(model, texts.tokenizer, asked)
            right[part][skill] = packed(flags)
            if part == "truth":
                accuracy[skill] = round(float(flags.mean()), 4)
    return {"accuracy": accuracy, "right": right, "text_loss": round(text_loss(model, texts.held_out), 5)}
