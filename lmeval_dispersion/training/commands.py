"""``dispersion train``: the papers' (mid-)training, base against regularised, as one resumable command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.training.settings import ARMS, Settings, agree_or_write, settings_from

_HELP = {
    "model": "base model: Hub id or folder",
    "data": "texts to train on: .txt, .jsonl, .parquet or a Hub data set id",
    "out": "folder of the arms; the same command goes on in it after an interruption",
    "second_data": "texts of a second domain, mixed in one to one",
    "eval_data": "held-out texts (default: the end of --data)",
    "second_eval_data": "held-out texts of the second domain",
    "from_scratch": "start from random weights with the model's configuration",
    "arms": f"what to compare, comma-separated, of {', '.join(ARMS)}",
    "seeds": "comma-separated; each arm is trained once with each",
    "tokens": "tokens that each arm sees, such as 200M",
    "block": "tokens of a sequence",
    "batch": "sequences of a micro-batch",
    "accumulate": "micro-batches of an optimizer step",
    "lr": "peak learning rate; 5 %% linear warm-up, then linear decay to 0",
    "weight": "weight of the loss",
    "layers": "last, all, early_half, late_half, layer.3 or 3, ..., separated by commas",
    "max_tokens": "tokens drawn of each sequence for the loss; 0 takes all",
    "schedule": "schedule of the weight: constant, linear (warm-up) or cosine",
    "noise_alpha": "NEFTune's alpha, of the arm noisy_embeddings",
    "forget_every": "steps between resets of the embeddings, of the arm active_forgetting",
    "eval_tokens": "tokens of each domain to evaluate on",
    "evals": "evaluations during a run, besides before and after",
    "save_every": "steps between checkpoints",
    "bf16": "train under bf16 autocast",
    "column": "field of the text in JSONL, parquet and Hub data sets",
    "data_config": "configuration of Hub data sets",
    "split": "split of Hub data sets",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dispersion train``."""
    parser.add_argument("--settings", metavar="FILE", help="YAML file of the options below; flags win")
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        text, default = _HELP[field.name], field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        if default not in (None, dataclasses.MISSING):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            text += f" (default {shown})"
        parser.add_argument(flag, metavar="X", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    """Train every arm with every seed, and print how they compare."""
    flags = {name: value for name, value in vars(args).items() if name not in ("settings", "json")}
    settings = settings_from(flags, args.settings)
    try:
        import torch
        from transformers.utils.logging import disable_progress_bar

        from lmeval_dispersion.training.arm import start_tokenizer
    except ImportError as error:
        raise MissingExtraError(
            "training needs torch and transformers; pip install 'lmeval-dispersion[models]'"
        ) from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.cuda.device_count() > 1:
        raise UsageError(
            "expected one process with one GPU; set CUDA_VISIBLE_DEVICES, or use DispersionTrainer in a "
            "script of your own under torchrun"
        )
    tokenizer = start_tokenizer(settings)
    folder = agree_or_write(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        disable_progress_bar()  # transformers' own, for every checkpoint
        results = _all_runs(settings, folder, tokenizer)
    _report(settings, folder, results, as_json=args.json)
    return 0


def _all_runs(settings: Settings, folder: Path, tokenizer: Any) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lmeval_dispersion.training.arm import finished, trained
    from lmeval_dispersion.training.token_blocks import domain_blocks

    domains = domain_blocks(settings, folder, tokenizer)
    for (source, _), (train, held) in zip(settings.domains, domains, strict=True):
        print(f"{source}: {train.size} tokens to train on, {held.size} held out", file=sys.stderr)
    seen = sum(min(train.size for train, _ in domains) for _ in domains)
    if settings.tokens > seen:
        print(f"each run sees its {seen} tokens {settings.tokens / seen:.1f} times", file=sys.stderr)
    results = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for seed in settings.seeds:
            for arm in settings.arms:
                task = progress.add_task(f"{arm}, seed {seed}", total=settings.steps, figures="")

                def tell(step: int, logs: dict[str, float], task: Any = task) -> None:
                    names = ("ce_loss", "dispersion_loss", "dispersion")
                    figures = "  ".join(f"{name} {logs[name]:.3f}" for name in names if name in logs)
                    progress.update(task, completed=step, figures=figures)

                done = finished(folder, arm, seed)
                results.append(done or trained(settings, folder, arm, seed, domains, tokenizer, tell))
                progress.update(task, completed=settings.steps)
    return results


def _report(settings: Settings, folder: Path, results: list[dict[str, Any]], *, as_json: bool) -> None:
    from lmeval_dispersion.training.comparison import as_table, compared

    rows = compared(settings, results)
    table = as_table(rows)
    (folder / "comparison.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "comparison.md").write_text(table + "\n")
    print(json.dumps(rows, indent=1) if as_json else table)
    print(f"runs, models and evaluations are in {folder}", file=sys.stderr)


COMMANDS = {"train": (add_arguments, run)}
