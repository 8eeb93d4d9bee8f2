"""Can G be fooled? Changes that move no prediction, and changes that move skill but not rows.

Every trial takes last checkpoints of the small size and writes changed ones, which are asked and screened
like the population's. That a change leaves predictions alone is checked, not assumed: ``shift`` is the
largest change of any log-probability on a fixed batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.validity import records
from benchmarks.validity.decoder import Decoder, built, stored_tensors, write
from benchmarks.validity.study import Run, Study
from benchmarks.validity.training import Texts, examined, measured, sampled

Tensors = dict[str, torch.Tensor]
KEPT = ("cosine", "euclidean", "within_T", "ratio_folded", "cosine_se")


def common_vector(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """One vector, as long as a mean row, added to every row: the softmax does not see it."""
    rows = tensors["lm_head.weight"]
    vector = torch.randn(rows.shape[1], generator=generator)
    vector *= rows.norm(dim=1).mean() / vector.norm()
    return tensors | {"lm_head.weight": rows + vector}


def without_mean(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """The mean of all rows taken from every row: a common vector that somebody might well subtract."""
    rows = tensors["lm_head.weight"]
    return tensors | {"lm_head.weight": rows - rows.mean(0)}


def scale_moved(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """A scale for each dimension (log-normal, sd 0.5) moved from the final norm into the rows."""
    scale = torch.exp(0.5 * torch.randn(tensors["lm_head.weight"].shape[1], generator=generator))
    return tensors | {
        "lm_head.weight": tensors["lm_head.weight"] * scale,
        "model.norm.weight": tensors["model.norm.weight"] / scale,
    }


def norm_folded(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """The final norm's weight folded into the rows, as inference engines do."""
    norm = tensors["model.norm.weight"]
    return tensors | {
        "lm_head.weight": tensors["lm_head.weight"] * norm,
        "model.norm.weight": torch.ones_like(norm),
    }


def padded(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """Sixty-four unused rows more in both matrices."""
    changed = dict(tensors)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        rows = tensors[name]
        changed[name] = torch.cat([rows, torch.zeros(64, rows.shape[1])])
    return changed


def rotated(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """All norms folded into what follows them, then the residual stream turned by a random rotation."""
    turned = norm_folded(tensors, generator)
    width = turned["lm_head.weight"].shape[1]
    turn, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    for name, tensor in list(turned.items()):
        if name.endswith("layernorm.weight"):
            before = name.removesuffix("layernorm.weight")
            layer = before.rsplit(".", 1)[0]
            parts = (
                ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
                if before.endswith("input_")
                else ["mlp.gate_proj", "mlp.up_proj"]
            )
            for part in parts:
                turned[f"{layer}.{part}.weight"] = turned[f"{layer}.{part}.weight"] * tensor
            turned[name] = torch.ones_like(tensor)
    for name, tensor in list(turned.items()):
        if name in ("lm_head.weight", "model.embed_tokens.weight") or any(
            part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        ):
            turned[name] = tensor @ turn
        elif "o_proj" in name or "down_proj" in name:
            turned[name] = turn.T @ tensor
    return turned


def quantised(bits: int) -> Callable[[Tensors, torch.Generator], Tensors]:
    """Rows rounded to ``bits`` bits with one scale a row."""

    def change(tensors: Tensors, generator: torch.Generator) -> Tensors:
        rows = tensors["lm_head.weight"]
        step = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return tensors | {"lm_head.weight": (rows / step).round() * step}

    return change


def digits_longer(tensors: Tensors, ids: torch.Tensor) -> Tensors:
    """The digits' rows twice as long: predictions move, directions do not."""
    rows = tensors["lm_head.weight"].clone()
    rows[ids] *= 2
    return tensors | {"lm_head.weight": rows}


def noisy_body(tensors: Tensors, generator: torch.Generator) -> Tensors:
    """The feed-forward weights shuffled: skill is destroyed, no row moves."""
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if ".mlp." in name:
            changed[name] = tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(
                tensor
            )
    return changed


def merged(first: Tensors, second: Tensors) -> Tensors:
    """The mean of two checkpoints' weights."""
    return {name: (tensor + second[name]) / 2 for name, tensor in first.items()}


def fine_tuned(tensors: Tensors, run: Run, study: Study, texts: Texts, *, part: str, steps: int) -> Tensors:
    """The checkpoint trained on with a recipe's texts: all of it, the ``head`` alone, the ``body`` alone."""
    model = built([tensors], study.content["sizes"][run.size]).train()
    named = model.named.items()
    chosen = [p for name, p in named if part == "all" or (name == "lm_head/weight") == (part == "head")]
    optimizer = torch.optim.AdamW(chosen, lr=run.training["lr"] / 3, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(5000 + run.seed)
    for _ in range(steps):
        batch = sampled(run, texts, generator)
        loss = cross_entropy(model.head(model(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
    return {name: tensor.float() for name, tensor in model.member(0).items()}


@torch.inference_mode()
def log_probabilities(tensors: Tensors, study: Study, texts: Texts) -> torch.Tensor:
    """Of every known token at 512 positions of held-out text."""
    model: Decoder = built([tensors], study.content["sizes"]["small"])
    logits = model.head(model(texts.held_out[:512].view(8, 64)))[..., : texts.vocabulary]
    return torch.log_softmax(logits.double(), -1)


#: Changes that move no prediction, and others; each takes tensors and a generator.
SAME: dict[str, Callable[[Tensors, torch.Generator], Tensors]] = {
    "common vector": common_vector,
    "rows less their mean": without_mean,
    "scale moved": scale_moved,
    "norm folded": norm_folded,
    "padding rows": padded,
    "rotation": rotated,
}
CHANGED: dict[str, Callable[[Tensors, torch.Generator], Tensors]] = {
    "head in 8 bits": quantised(8),
    "head in 4 bits": quantised(4),
    "head in 3 bits": quantised(3),
    "feed-forward weights shuffled": noisy_body,
}

Job = tuple[str, str, str, Callable[[], Tensors]]


def jobs(study: Study, texts: Texts, work: Path, seed: int) -> Iterator[Job]:
    """Kind of trial, name of the change, what it is applied to, and how it is made."""
    asked, (*_, before, last) = study.content["trials"], study.steps
    runs = {
        run.recipe: run
        for run in study.runs()
        if (run.size, run.setting, run.seed) == ("small", "default", seed)
    }

    def stored(recipe: str, step: int = last) -> Tensors:
        return stored_tensors(work / "runs" / runs[recipe].name / f"step{step}")

    for recipe in asked["recipes"]:
        yield "none", "unchanged", recipe, partial(stored, recipe)
        for kind, changes in (("same", SAME), ("changed", CHANGED)):
            for name, change in changes.items():
                draw = torch.Generator().manual_seed(seed)
                yield kind, name, recipe, partial(change, stored(recipe), draw)
        longer = partial(digits_longer, stored(recipe), texts.digits)
        yield "changed", "digits' rows twice as long", recipe, longer
        last_two = partial(merged, stored(recipe), stored(recipe, before))
        yield "merge", "mean of the last two checkpoints", recipe, last_two
    for first, second in asked["merges"]:
        mean = partial(merged, stored(first), stored(second))
        yield "merge", "mean of two recipes", f"{first} + {second}", mean
    for start, towards in asked["fine_tunes"]:
        for part in ("all", "head", "body"):
            tuned = partial(
                fine_tuned, stored(start), runs[towards], study, texts, part=part, steps=asked["steps"]
            )
            yield "fine-tune", f"fine-tuned, {part}", f"{start} -> {towards}", tuned


def run_trials(study: Study, file: Path, work: Path) -> None:
    """All trials of the configuration that are not in the results yet.

    Raises:
        FileNotFoundError: The population is not trained that far.
    """
    torch.set_num_threads(1)
    texts, shape = Texts(study, work), study.content["sizes"]["small"]
    done = {row["name"] for row in records.checked(file, study.path)}
    marks = {"configuration": records.digest(study.path), **records.provenance()}
    for seed in study.content["trials"]["seeds"]:
        unchanged: Tensors = {}
        for kind, name, recipe, make in jobs(study, texts, work, seed):
            if kind == "none":
                unchanged = make()
            label = f"{name}; {recipe}; seed {seed}"
            if label in done:
                continue
            start, made = time.perf_counter(), make()
            folder = work / "trials" / label.replace(" ", "-").replace(">", "to")
            # Float32 where a change must not hide behind BF16's rounding.
            dtype = torch.float32 if kind == "same" else torch.bfloat16
            made = {name: tensor.to(dtype).contiguous() for name, tensor in made.items()}
            write(folder, made, shape, texts.json)
            made = {name: tensor.float() for name, tensor in made.items()}
            row: dict[str, Any] = {"name": label, "kind": kind, "change": name, "of": recipe, "seed": seed}
            if kind == "same":
                after, before = (log_probabilities(part, study, texts) for part in (made, unchanged))
                row["shift"] = float(f"{float((after - before).abs().max()):.2g}")
            row["accuracy"] = examined(built([made], shape), texts, labels=False)["accuracy"]
            (figures,) = measured([folder])
            row["figures"] = {n: v for n, v in figures.items() if n.rsplit("_", 1)[0] in KEPT}
            row["seconds"] = round(time.perf_counter() - start, 1)
            records.append(file, row | marks)
            print(f"{label}: {row['seconds']:.0f} s", file=sys.stderr, flush=True)
