"""``dispersion train``: the papers' (mid-)training, base against regularised, as one resumable command."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import logging
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import MissingExtraError, TrainingError, UsageError
from lmeval_dispersion.options import Output, add_examples, add_output
from lmeval_dispersion.report import render
from lmeval_dispersion.training.comparison import compared, json_of, report
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
    "seeds": "each arm is trained once with each; may be repeated",
    "tokens": "tokens that each arm sees, such as 200M",
    "block": "tokens of a sequence",
    "batch": "sequences of a micro-batch, in each process",
    "accumulate": "micro-batches of an optimizer step",
    "lr": "peak learning rate; 5 %% linear warm-up, then linear decay to 0",
    "weight": "weight of the loss",
    "layers": "last, all, early_half, late_half, layer.3 or 3, ...; may be repeated",
    "max_tokens": "tokens drawn of each sequence for the loss; 0 takes all",
    "schedule": "schedule of the weight: constant, linear (warm-up) or cosine",
    "noise_alpha": "NEFTune's alpha, of the arm noisy_embeddings",
    "forget_every": "steps between resets of the embeddings, of the arm active_forgetting",
    "eval_tokens": "tokens of each domain to evaluate on",
    "evals": "evaluations while an arm trains, besides before and after",
    "save_every": "steps between checkpoints",
    "bf16": "train under bf16 autocast",
    "lora": "train LoRA adapters only: r=8[,alpha=16][,dropout=0.05][,targets=q_proj+v_proj]",
    "report_to": "trackers that get the log, comma-separated: tensorboard, wandb, mlflow, trackio, ...",
    "column": "field of the text in JSONL, parquet and Hub data sets",
    "data_config": "configuration of Hub data sets",
    "split": "split of Hub data sets",
}


# What stands for a value in the help, by setting or by the type of its default.
_METAVARS: dict[object, str] = {
    **dict.fromkeys(("data", "second_data", "eval_data", "second_eval_data"), "FILE|HUB_ID"),
    "model": "MODEL",
    "out": "FOLDER",
    "arms": "ARM,ARM",
    "lora": "K=V,K=V",
    "report_to": "NAME,NAME",
    "layers": "LAYER",
    "column": "FIELD",
    "seeds": "N",
    int: "N",
    float: "X",
    str: "NAME",
}
# Options that take one value and may be repeated; a settings file has them as lists under the longer name.
_REPEATED = {"layers": "--layer", "seeds": "--seed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dispersion train``."""
    parser.add_argument(
        "--settings", metavar="FILE", help="YAML file of the options below; flags win (default: none)"
    )
    for field in _flags():
        text, default = _HELP[field.name], field.default
        if isinstance(default, bool):
            parser.add_argument(_flag(field.name), action="store_true", default=argparse.SUPPRESS, help=text)
            continue
        if default is not dataclasses.MISSING and "(default" not in text:
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            text += f" (default: {'none' if shown is None else shown})"
        parser.add_argument(
            _flag(field.name),
            dest=field.name,
            metavar=_METAVARS.get(field.name) or _METAVARS.get(type(default), "NAME"),
            action="append" if field.name in _REPEATED else "store",
            default=argparse.SUPPRESS,
            help=text,
        )
    add_output(parser)
    add_examples(
        parser,
        "--model gpt2 --data texts.txt --out trained --tokens 1M",
        "--model gpt2 --data texts.txt --out trained --arms base,squeeze --seed 0 --seed 1 --layer all",
    )


def given_settings(args: argparse.Namespace) -> Settings:
    """The settings of the flags and of the file that they name.

    Raises:
        UsageError: See :func:`~lmeval_dispersion.training.settings.settings_from`.
    """
    names = {field.name for field in _flags()}
    flags = {name: value for name, value in vars(args).items() if name in names}
    if "layers" in flags:
        flags["layers"] = ",".join(flags["layers"])
    flags["processes"] = int(os.environ.get("WORLD_SIZE", "1"))
    return settings_from(flags, args.settings)


def _flag(name: str) -> str:
    return _REPEATED.get(name, "--" + name.replace("_", "-"))


def run(args: argparse.Namespace) -> int:
    """Train every arm with every seed, and report how they compare with base."""
    settings = given_settings(args)
    output = Output.of(args)
    try:
        import torch
        from accelerate import PartialState
        from transformers.utils.logging import disable_progress_bar

        from lmeval_dispersion.training.arm import checked_tokenizer, several_on_cpu
    except ImportError as error:
        raise MissingExtraError(
            "training needs torch and transformers; pip install 'lmeval-dispersion[models]'"
        ) from error
    if settings.processes == 1 and torch.cuda.device_count() > 1:
        raise UsageError(
            f"expected one GPU a process, got {torch.cuda.device_count()}; launch with `torchrun "
            "--nproc-per-node N --no-python dispersion train …`, or set CUDA_VISIBLE_DEVICES"
        )
    processes = PartialState(cpu=several_on_cpu(settings))
    tokenizer = checked_tokenizer(settings)
    with processes.main_process_first():
        folder = agree_or_write(settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("transformers").setLevel(logging.ERROR)
            disable_progress_bar()  # transformers' own, for every checkpoint
            results = _all_arms(settings, folder, tokenizer, output)
        if not processes.is_main_process:
            return 0
        rows = compared(settings, results)
        document = report(rows, command_of(settings))
        (folder / "comparison.json").write_text(json_of(rows))
        (folder / "comparison.md").write_text(render(document, "markdown"))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise TrainingError(
            f"expected room for checkpoints in {folder}, got a full disk; free some, and the same command "
            "goes on from the last whole checkpoint"
        ) from error
    finally:
        processes.destroy_process_group()
    output.write(document)
    output.say(f"models, evaluations and the comparison are in {folder}")
    return 0


def _all_arms(settings: Settings, folder: Path, tokenizer: Any, output: Output) -> list[dict[str, Any]]:
    from accelerate import PartialState
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lmeval_dispersion.training.arm import finished, trained
    from lmeval_dispersion.training.token_blocks import domain_blocks

    processes = PartialState()
    console = Console(stderr=True, quiet=not processes.is_main_process)
    with processes.main_process_first():
        domains = domain_blocks(settings, folder, tokenizer)

    def say(text: str) -> None:
        if processes.is_main_process:
            output.say(text)

    for (source, _), (train, held) in zip(settings.domains, domains, strict=True):
        say(f"{source}: {train.size} tokens to train on, {held.size} held out")
    seen = sum(min(train.size for train, _ in domains) for _ in domains)
    if settings.tokens > seen:
        say(f"each arm sees its {seen} tokens {settings.tokens / seen:.1f} times")
    results = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with Progress(*columns, console=console, disable=output.quiet) as progress:
        for seed in settings.seeds:
            for arm in settings.arms:
                task = progress.add_task(f"{arm}, seed {seed}", total=settings.steps, metrics="")

                def tell(step: int, logs: dict[str, float], task: Any = task) -> None:
                    names = ("ce_loss", "dispersion_loss", "dispersion")
                    metrics = "  ".join(f"{name} {logs[name]:.3f}" for name in names if name in logs)
                    progress.update(task, completed=step, metrics=metrics)

                done = finished(folder, arm, seed)
                results.append(done or trained(settings, folder, arm, seed, domains, tokenizer, tell))
                progress.update(task, completed=settings.steps)
    return results


def _flags() -> list[dataclasses.Field[Any]]:
    """The settings that are options of the command."""
    return [field for field in dataclasses.fields(Settings) if field.name != "processes"]


def command_of(settings: Settings) -> str:
    """The command with these settings, in flags."""
    words = ["dispersion", "train"]
    if settings.processes > 1:
        words = ["torchrun", "--nproc-per-node", str(settings.processes), "--no-python", *words]
    for field in _flags():
        value, flag = getattr(settings, field.name), _flag(field.name)
        if value is True:
            words.append(flag)
        elif value == field.default or value is None:
            continue
        elif field.name in _REPEATED:
            for one in value.split(",") if isinstance(value, str) else value:
                words += [flag, str(one)]
        else:
            words += [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)


COMMANDS = {"train": (add_arguments, run)}
