"""Train the demo family: tiny Llama checkpoints that learned addition to different degrees.

One base model a seed is trained on text; every checkpoint of the family goes on from it for the same number
of steps on text mixed with a share of lines like ``12+30=42. 40-2=38.``. Two controls see the same lines
with answers that belong to other sums. The script writes one folder a checkpoint in transformers' layout,
and ``family.yaml`` with what was measured on the stored BF16 weights: accuracy on sums that no checkpoint
was trained on, perplexity on held-out text, and the gap G of the output rows by plain numpy.

    python scripts/train_demo_family.py --out demo                       # texts from the Hub
    python scripts/train_demo_family.py --out demo --wikitext valid.txt test.txt --gsm8k test.jsonl
    python scripts/train_demo_family.py --out /tmp/demo --smoke          # a few steps, to see it run

Needs torch, transformers, tokenizers and PyYAML. Seeds fix every random choice; figures still move a little
between versions of torch and between CPU and GPU, whose sums round differently.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from demo_measures import WINDOW, correlations, measured, spread, table, token_rows
from demo_texts import (
    BOS,
    EOS,
    OPERANDS,
    PAD,
    arithmetic_line,
    gsm8k_questions,
    held_out_pairs,
    reference_words,
    stream,
    trained_tokenizer,
    wikitext_paragraphs,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

BATCH = 16  # sequences a step
WEIGHT_DECAY = 0.01
HELD_OUT_TEXT = 0.05  # share of paragraphs kept for the perplexity
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

RECIPE: dict[str, Any] = {
    "vocabulary": 1280,
    "width": 96,
    "mlp": 160,
    "layers": 3,
    "heads": 4,
    "base_steps": 1500,
    "base_lr": 2e-3,
    "steps": 1200,
    "lr": 1.5e-3,
}
# (share of arithmetic, answers): nine that are told the truth, two that are not.
MEMBERS = [(s, "right") for s in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.8)]
MEMBERS += [(0.45, "random"), (0.8, "random")]


def folder_name(share: float, answers: str) -> str:
    """Name of a checkpoint's folder, such as ``sums-45`` or ``wrong-sums-45``."""
    return f"{'' if answers == 'right' else 'wrong-'}sums-{round(100 * share):02d}"


def new_model(recipe: dict[str, Any]) -> LlamaForCausalLM:
    """A Llama model with random weights and an output projection of its own."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe["vocabulary"],
            hidden_size=recipe["width"],
            intermediate_size=recipe["mlp"],
            num_hidden_layers=recipe["layers"],
            num_attention_heads=recipe["heads"],
            num_key_value_heads=recipe["heads"],
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def train(
    model: LlamaForCausalLM,
    text: torch.Tensor,
    lines: torch.Tensor | None,
    *,
    share: float,
    steps: int,
    lr: float,
    seed: int,
    device: str,
) -> None:
    """Train in place: each sequence is a line of arithmetic with probability ``share``, else of text."""
    generator = torch.Generator().manual_seed(seed)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - 0.9 * step / steps)
    )
    for _ in range(steps):
        starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator)
        batch = text[starts[:, None] + torch.arange(WINDOW + 1)]
        if lines is not None:
            chosen = torch.rand(BATCH, generator=generator) < share
            picks = torch.randint(len(lines), (BATCH,), generator=generator)
            batch = torch.where(chosen[:, None], lines[picks], batch)
        batch = batch.to(device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def arithmetic_sequences(tokenizer: Tokenizer, answers: str, seed: int, count: int) -> torch.Tensor:
    """Lines of arithmetic as token ids, shape (count, WINDOW + 1)."""
    rng, held_out = random.Random(seed), held_out_pairs()
    texts = [BOS + arithmetic_line(rng, answers, held_out) for _ in range(count)]
    return torch.tensor([encoding.ids[: WINDOW + 1] for encoding in tokenizer.encode_batch(texts)])


def write_checkpoint(model: LlamaForCausalLM, folder: Path) -> None:
    """Store a model in BF16 in transformers' layout, with links to the tokenizer in the family's folder.

    Output projection and final norm are a shard of their own: of most models a wheel ships that one only.
    """
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    body = load_file(folder / "model.safetensors")
    head = {name: body.pop(name) for name in ("lm_head.weight", "model.norm.weight")}
    for name, shard in zip(SHARDS, (head, body), strict=True):
        save_file(shard, folder / name, {"format": "pt"})
    everything = [*head.values(), *body.values()]
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel() for tensor in everything),
            "total_size": sum(tensor.numel() * tensor.element_size() for tensor in everything),
        },
        "weight_map": dict.fromkeys(head, SHARDS[0]) | dict.fromkeys(sorted(body), SHARDS[1]),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "model.safetensors").unlink()
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(Path("..") / name)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """``tokenizer.json`` and the configuration that makes AutoTokenizer read it as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


class Run(NamedTuple):
    """Shared by all jobs of one call. ``work`` holds the texts as ids, the tokenizer and the bases."""

    work: Path
    recipe: dict[str, Any]
    words: list[str]
    device: str
    threads: int
    questions: int


def train_base(run: Run, seed: int) -> float:
    """Train and store the base model of a seed on text alone; seconds it took."""
    start = time.perf_counter()
    torch.set_num_threads(run.threads)
    torch.manual_seed(seed)
    model = new_model(run.recipe)
    text = torch.load(run.work / "text.pt")
    steps, lr = run.recipe["base_steps"], run.recipe["base_lr"]
    train(model, text, None, share=0.0, steps=steps, lr=lr, seed=1000 * seed, device=run.device)
    torch.save(model.state_dict(), run.work / f"base-{seed}.pt")
    return time.perf_counter() - start


def train_member(run: Run, out: Path, seed: int, share: float, answers: str) -> dict[str, Any]:
    """Train one checkpoint from its seed's base, store it below ``out``; its entry of ``family.yaml``."""
    start = time.perf_counter()
    torch.set_num_threads(run.threads)
    tokenizer = Tokenizer.from_file(str(run.work / "tokenizer" / "tokenizer.json"))
    model = new_model(run.recipe)
    model.load_state_dict(torch.load(run.work / f"base-{seed}.pt", map_location="cpu"))
    text = torch.load(run.work / "text.pt")
    steps, lr = run.recipe["steps"], run.recipe["lr"]
    lines = arithmetic_sequences(tokenizer, answers, seed=1000 * seed + 1, count=min(20_000, 100 * steps))
    train(model, text, lines, share=share, steps=steps, lr=lr, seed=1000 * seed + 2, device=run.device)
    folder = out / folder_name(share, answers)
    write_checkpoint(model, folder)
    figures = measured(folder, torch.load(run.work / "held_out.pt"), run.words, run.questions, run.device)
    return {
        "folder": folder.name,
        "share": share,
        "answers": answers,
        "steps": steps,
        "seed": seed,
        **figures,
        "seconds": round(time.perf_counter() - start, 1),
    }


def trained(
    run: Run, out: Path, members: list[tuple[float, str]], seeds: list[int], jobs: int
) -> list[dict[str, Any]]:
    """All checkpoints of all seeds, ``jobs`` at a time; those of the first seed are stored in ``out``."""
    rows = []
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        apply = pool.map if jobs > 1 else map
        for seed, seconds in zip(seeds, apply(train_base, repeat(run), seeds), strict=True):
            print(f"base of seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
        tasks = [(seed, share, answers) for seed in seeds for share, answers in members]
        places = [out if seed == seeds[0] else run.work / f"seed-{seed}" for seed, _, _ in tasks]
        for place in set(places):
            place.mkdir(parents=True, exist_ok=True)
            for name in TOKENIZER_FILES:
                shutil.copyfile(run.work / "tokenizer" / name, place / name)
        by_argument = zip(*tasks, strict=True)
        for row in apply(train_member, repeat(run), places, *by_argument):
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """Command line; see ``--help``."""
    sets = Path(__file__).resolve().parent.parent / "token_sets"
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the family is written to")
    add("--wikitext", type=Path, nargs="+", help="WikiText-2 validation and test (default: from the Hub)")
    add("--gsm8k", type=Path, help="GSM8K test split as JSON lines (default: from the Hub)")
    add("--reference", type=Path, default=sets / "reference.yaml", help="token set whose words become pieces")
    add("--seeds", type=int, nargs="+", default=[0], help="the first is stored, all are reported")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--jobs", type=int, default=1, help="models trained side by side")
    add("--threads", type=int, default=1, help="CPU threads a model; the figures depend on it")
    add("--questions", type=int, default=1000, help="questions of the accuracy")
    add("--smoke", action="store_true", help="a few steps of two checkpoints, to see it run")
    args = parser.parse_args(argv)
    for file in (*(args.wikitext or ()), *([args.gsm8k] if args.gsm8k else ()), args.reference):
        if not file.is_file():
            parser.error(f"expected a file, got {file}, which there is not")
    return args


def main(argv: list[str] | None = None) -> None:
    """Train, measure, write and print the family."""
    args = parsed(argv)
    recipe, members = dict(RECIPE), MEMBERS
    if args.smoke:
        recipe |= {"base_steps": 4, "steps": 4}
        members, args.questions = [(0.0, "right"), (0.8, "random")], 20

    words = reference_words(args.reference)
    paragraphs = wikitext_paragraphs(args.wikitext)
    random.Random(0).shuffle(paragraphs)
    cut = round(HELD_OUT_TEXT * len(paragraphs))
    texts = paragraphs[cut:] + gsm8k_questions(args.gsm8k)
    tokenizer = trained_tokenizer(texts, words, recipe["vocabulary"])
    domain, reference = token_rows(tokenizer, words)

    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_tokenizer(tokenizer, work / "tokenizer")
        text, held_out = stream(tokenizer, texts), stream(tokenizer, paragraphs[:cut])
        torch.save(text, work / "text.pt")
        torch.save(held_out, work / "held_out.pt")
        run = Run(work, recipe, words, args.device, args.threads, args.questions)
        rows = trained(run, args.out, members, args.seeds, args.jobs)
    on_gpu = args.device.startswith("cuda")
    training = {
        **recipe,
        "window": WINDOW,
        "batch": BATCH,
        "weight_decay": WEIGHT_DECAY,
        "operands_below": OPERANDS,
        "text_tokens": len(text),
        "held_out_text_tokens": len(held_out),
        "resolved": {"domain": len(domain), "reference": len(reference)},
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})",
        "threads": args.threads,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    family = {
        "schema": "demo-family/1",
        "name": "demo",
        "tokenizer": "tokenizer.json",
        "training": training,
        "checkpoints": [row for row in rows if row["seed"] == args.seeds[0]],
        "replicates": [row for row in rows if row["seed"] != args.seeds[0]],
    }
    (args.out / "family.yaml").write_text(yaml.safe_dump(family, sort_keys=False, width=100), "utf-8")
    for seed in args.seeds:
        chosen = [row for row in rows if row["seed"] == seed]
        print(f"seed {seed}\n\n{table(chosen)}\n")
        if rho := correlations(chosen):
            print(f"Spearman of G with accuracy, {rho}\n")
    if len(args.seeds) > 1:
        print(f"all seeds\n\n{spread(rows)}\n")


if __name__ == "__main__":
    main()
