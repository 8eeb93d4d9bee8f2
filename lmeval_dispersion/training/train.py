"""``dispersion train``: compares a base model with models trained with a loss, in one resumable command."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import math
import os
import shutil
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lmeval_dispersion.errors import TrainingError, UsageError
from lmeval_dispersion.geometry import Dispersion
from lmeval_dispersion.model import states_after_blocks
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.options import add_column, add_examples, add_output
from lmeval_dispersion.output import Output, progress_bar, write_whole
from lmeval_dispersion.report import render
from lmeval_dispersion.training.comparison import BASE, TrainingComparison
from lmeval_dispersion.training.loss_table import LOSS_TABLE

if TYPE_CHECKING:
    import transformers

    from lmeval_dispersion.training.trainer import DispersionConfig

Blocks = NDArray[np.int32]
_FULL_DISK = ("No space left", "Disk quota exceeded", "inline_container.cc")  # the last is torch.save's


def _option(metavar: str | None, help: str, default: Any = MISSING, type: Any = str, **more: Any) -> Any:
    """A field that is a command-line option."""
    return field(default=default, metadata={"metavar": metavar, "help": help, "type": type, **more})


def _at_least(
    least: float, convert: Callable[[str], float] = float, below: float = math.inf
) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = convert(text)
        if not least <= value < below:
            most = "finite" if below == math.inf else f"below {below}"
            raise argparse.ArgumentTypeError(f"expected at least {least} and {most}, got {text}")
        return value

    return number


def _count(text: str) -> float:
    """A whole number such as ``200M``, ``1.5k`` or ``4096``, or infinity."""
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    value = float(text[:-1] if factor > 1 else text) * factor
    return value if math.isinf(value) else int(value)


@dataclass(frozen=True)
class Settings:
    """One comparison: base and every loss, with every seed."""

    # Not transformers' HfArgumentParser: `--help` works without transformers, and options repeat and report
    # mistakes as in every other command.
    model: str = _option("MODEL", "base model: Hub id or folder")
    data: Sequence[str] = _option(
        "FILE|HUB_ID", "texts: a file, or a Hub data set ID[:CONFIGURATION][@SPLIT]; repeated: domains"
    )
    output_dir: str = _option("FOLDER", "folder for the models; the same command resumes there")
    eval_data: Sequence[str] = _option(
        "FILE|HUB_ID", "held-out texts, for each --data (default: the end of --data)", ()
    )
    loss: Sequence[str] = _option(
        None,
        "loss to train with; may be repeated (default: angular_spread)",
        ("angular_spread",),
        choices=tuple(LOSS_TABLE),
    )
    seed: Sequence[int] = _option(
        "N", "train each once with this seed; may be repeated (default: 0)", (0,), _at_least(0, int, 2**32)
    )
    tokens: int = _option(
        "N", "tokens that each model sees (default: 200M)", 200_000_000, _at_least(1, _count)
    )
    block: int = _option("N", "tokens of a sequence (default: 512)", 512, _at_least(2, int))
    batch_size: int = _option("N", "sequences of a step, in each process (default: 8)", 8, _at_least(1, int))
    lr: float = _option(
        "X", "peak learning rate of linear warm-up and decay (default: 5e-05)", 5e-5, _at_least(0)
    )
    weight: float = _option("X", "weight of the loss (default: 0.1)", 0.1, _at_least(0))
    layer: Sequence[str] = _option(
        "LAYER", "last, all, early_half, late_half, layer.3; may be repeated (default: last)", ("last",)
    )
    max_tokens: int = _option(
        "N", "tokens drawn of each sequence; 0: all (default: 256)", 256, _at_least(0, int)
    )
    from_scratch: bool = False
    column: str = "text"  # an option that commands share
    processes: int = 1  # that train together: set by the launcher (torchrun, accelerate), not an option

    def __post_init__(self) -> None:
        """Check the fields together; UsageError where one cannot be used."""
        if self.max_tokens == 1:
            raise UsageError("expected --max-tokens of at least 2, which make a pair, or 0 for all, got 1")
        states_after_blocks(self.layer)
        if len(set(self.loss)) < len(self.loss) or len(set(self.seed)) < len(self.seed):
            raise UsageError("expected each --loss and each --seed once")
        if not self.steps:
            least = self.block * self.batch_size * self.processes
            raise UsageError(f"expected --tokens for at least one step of {least}, got {self.tokens}")
        number = len(self.data)
        if self.eval_data and len(self.eval_data) != number:
            raise UsageError(f"expected --eval-data for each of {number} --data, got {len(self.eval_data)}")
        if "cross_domain_push_away" in self.loss and number < 2:
            raise UsageError(
                "expected two --data with cross_domain_push_away, whose pairs are of two domains"
            )
        for source in (*self.data, *self.eval_data):
            Texts(source)  # raises for a missing file

    @property
    def steps(self) -> int:
        """Optimizer steps of a training."""
        return self.tokens // (self.block * self.batch_size * self.processes)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """The result has only the given options."""
    for setting in fields(Settings):
        if setting.metadata:
            parser.add_argument(
                f"--{setting.name.replace('_', '-')}",
                action="append" if str(setting.type).startswith("Sequence") else "store",
                required=setting.default is MISSING,
                default=argparse.SUPPRESS,
                **setting.metadata,
            )
    parser.add_argument(
        "--from-scratch", action="store_true", help="start from random weights with the model's configuration"
    )
    add_column(parser)
    add_output(parser)
    add_examples(
        parser,
        "--model gpt2 --data texts.txt --output-dir trained --tokens 1M",
        "--model gpt2 --data texts.txt --output-dir trained --loss squeeze --seed 0 --seed 1 --layer all",
    )


def _run(args: argparse.Namespace) -> int:
    given = {option.name: getattr(args, option.name) for option in fields(Settings) if option.name in args}
    settings = Settings(**given, processes=int(os.environ.get("WORLD_SIZE", "1")))
    output = Output.of(args)
    import torch
    from accelerate import PartialState
    from transformers.utils.logging import disable_progress_bar

    if settings.processes == 1 and torch.cuda.device_count() > 1:
        raise UsageError(
            f"expected one GPU a process, got {torch.cuda.device_count()}; launch with `torchrun "
            "--nproc-per-node N --no-python dispersion train …`, or set CUDA_VISIBLE_DEVICES"
        )
    # Without `cpu`, Accelerate takes several processes on a machine that has no GPU for single ones.
    processes = PartialState(cpu=settings.processes > 1 and not torch.cuda.is_available())
    tokenizer = checked_tokenizer(settings)
    try:
        with processes.main_process_first():
            folder = claimed_folder(settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("transformers").setLevel(logging.ERROR)
            disable_progress_bar()  # transformers' message for every checkpoint
            results = _all_trained(settings, folder, tokenizer, output)
        if not processes.is_main_process:
            return 0
        document = TrainingComparison.of(results, settings.data).document()
        document = dataclasses.replace(document, command=output.command)
        for name, form in (("comparison.json", "json"), ("comparison.md", "markdown")):
            write_whole(folder / name, render(document, form).encode())
    except Exception as error:  # safetensors and torch.save raise their own errors
        if not any(words in str(error) for words in _FULL_DISK):
            raise
        raise TrainingError(
            f"expected room for checkpoints in {settings.output_dir}, got a full disk; free some space and "
            "repeat the command, which resumes from the last complete checkpoint"
        ) from error
    finally:
        processes.destroy_process_group()
    output.write(document)
    output.say(f"models and the comparison are in {folder}")
    return 0


def checked_tokenizer(settings: Settings) -> Any:
    """The base model's tokenizer; raises if the model cannot be trained with these settings."""
    import torch
    import transformers

    from lmeval_dispersion.training.regularizer import DispersionRegularizer

    try:
        config = transformers.AutoConfig.from_pretrained(settings.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"expected a causal language model with a tokenizer, got {settings.model}: {first}"
        ) from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and settings.block > longest:
        raise UsageError(
            f"expected a block of at most {longest}, the positions of {settings.model}, got {settings.block}"
        )
    if len(tokenizer) > text.vocab_size:
        raise UsageError(
            f"expected a tokenizer of at most {text.vocab_size} tokens, that of {settings.model}, "
            f"got {len(tokenizer)}"
        )
    for loss in settings.loss:
        chosen = _dispersion_config(settings, loss, 0)
        DispersionRegularizer(model, loss, chosen.layers, chosen.weight, **chosen.options).detach()
    return tokenizer


def claimed_folder(settings: Settings) -> Path:
    """The folder of the models, with the settings in it; refused where it holds others."""
    folder = Path(settings.output_dir).expanduser()
    path = folder / "settings.json"
    ours = json.loads(json.dumps(dataclasses.asdict(settings) | {"output_dir": ""}))
    try:
        text = path.read_text(errors="replace") if path.is_file() else ""
        # Do not overwrite another program's settings.json.
        before = json.loads(text) if text.startswith('{\n "model": ') else None
        if before is None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"expected a new or empty folder, got {folder}; choose another --output-dir")
        if before == ours:
            return folder
        # A start that failed before training must not block the next one.
        if before is not None and any(file.is_file() for file in folder.glob("*-seed*/**/*")):
            changed = "; ".join(
                f"{k} {before.get(k)!r} -> {v!r}" for k, v in ours.items() if before.get(k) != v
            )
            raise UsageError(f"{folder} holds models of other settings ({changed}); name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "blocks.npz").unlink(missing_ok=True)
        write_whole(path, json.dumps(ours, indent=1).encode() + b"\n")
    except OSError as error:
        raise UsageError(
            f"expected --output-dir where folders and files can be created, got {folder}: "
            f"{error.strerror or error}"
        ) from error
    return folder


def domain_blocks(settings: Settings, folder: Path, tokenizer: Any) -> list[tuple[Blocks, Blocks]]:
    """Training and held-out blocks of each domain, (n, block) and (m, block) int32.

    Reads only the texts that a training needs, and keeps them, so that a resumed training sees the same.
    """
    path = folder / "blocks.npz"
    if not path.is_file():
        need = -(-(settings.tokens // len(settings.data) + 1) // settings.block)
        held = -(-50_000 // settings.block)  # of each domain, at most
        parts: dict[str, Blocks] = {}
        for number, source in enumerate(settings.data):
            held_source, least = source, "two blocks"
            if settings.eval_data:
                held_source, least = settings.eval_data[number], "a block"
                train = text_blocks(settings, source, tokenizer, need)
                held_out = text_blocks(settings, held_source, tokenizer, held)
            else:
                both = text_blocks(settings, source, tokenizer, need + held)
                # A short source holds out at most a fifth.
                cut = min(held, max(1, len(both) // 5))
                train, held_out = both[:-cut], both[-cut:]
            if not len(train) or not len(held_out):
                raise UsageError(
                    f"expected at least {least} of {settings.block} tokens in "
                    f"{held_source if len(train) else source}, which has fewer; pass more text or a smaller "
                    "--block"
                )
            parts |= {f"train{number}": train, f"held_out{number}": held_out}
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **parts)  # type: ignore[arg-type]
        os.replace(partial, path)
    with np.load(path) as stored:
        return [(stored[f"train{n}"], stored[f"held_out{n}"]) for n in range(len(settings.data))]


def text_blocks(settings: Settings, source: str, tokenizer: Any, most: int) -> Blocks:
    """The first blocks of a source: documents joined by the end-of-text token and cut, as in the papers."""
    end = tokenizer.eos_token_id
    ids = array("i")  # four bytes a token; a list of numbers takes forty
    texts = Texts(source, column=settings.column)
    for number, text in enumerate(texts):
        if number and texts.continuous:
            ids.extend(tokenizer("\n\n", add_special_tokens=False)["input_ids"])
        elif number and end is not None:
            ids.append(end)
        ids.extend(tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"])
        if len(ids) >= most * settings.block:
            break
    whole = min(most, len(ids) // settings.block)
    return np.array(ids[: whole * settings.block], dtype=np.int32).reshape(whole, settings.block)


def _all_trained(settings: Settings, folder: Path, tokenizer: Any, output: Output) -> list[dict[str, Any]]:
    from accelerate import PartialState

    processes = PartialState()
    main = processes.is_main_process
    with processes.main_process_first():
        domains = domain_blocks(settings, folder, tokenizer)
    for source, (train, held) in zip(settings.data, domains, strict=True):
        if main:
            output.say(f"{source}: {train.size} tokens to train on, {held.size} held out")
    total = len(settings.seed) * (1 + len(settings.loss)) * settings.steps
    results: list[dict[str, Any]] = []
    with progress_bar(hidden=output.quiet or not main) as update:
        for seed, arm in itertools.product(settings.seed, (BASE, *settings.loss)):
            done, label = len(results) * settings.steps, f"{arm}, seed {seed}"

            def on_step(step: int, done: int = done, label: str = label) -> None:
                update(done + step, total, label)

            results.append(trained(settings, folder, arm, seed, domains, tokenizer, on_step))
    return results


def trained(
    settings: Settings,
    folder: Path,
    arm: str,
    seed: int,
    domains: list[tuple[Blocks, Blocks]],
    tokenizer: Any,
    on_step: Callable[[int], None],
) -> dict[str, Any]:
    """Train base or a loss, or resume from the last complete checkpoint; writes and returns ``result.json``.

    The same seed gives the same start and the same order of data to all, and a killed and resumed training
    ends with the same numbers.
    """
    import transformers
    from accelerate import PartialState

    from lmeval_dispersion.training.trainer import DispersionTrainer

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            on_step(state.global_step)

    here = folder / f"{arm}-seed{seed}"
    if (here / "result.json").is_file():
        return json.loads((here / "result.json").read_text())  # type: ignore[no-any-return]
    processes = PartialState()
    with processes.main_process_first():
        here.mkdir(exist_ok=True)
        checkpoint = _last_checkpoint(here, settings.steps)
    trainer = DispersionTrainer(
        model=start_model(settings, seed),
        args=_training_arguments(settings, here, seed),
        train_dataset=mixed([train for train, _ in domains]),
        callbacks=[Steps()],
        dispersion=None if arm == BASE else _dispersion_config(settings, arm, seed),
    )
    trainer.remove_callback(transformers.PrinterCallback)  # its table on stdout is unwanted
    result: dict[str, Any] = {"arm": arm, "seed": seed, "steps": settings.steps}
    result["before"] = [held_out_figures(trainer.model, held, settings.batch_size) for _, held in domains]
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    result["after"] = [held_out_figures(trainer.model, held, settings.batch_size) for _, held in domains]
    if processes.is_main_process:
        trainer.model.save_pretrained(here / "model")
        tokenizer.save_pretrained(here / "model")
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        write_whole(here / "result.json", json.dumps(result | {"log": log}, indent=1).encode())
        for checkpoint in here.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    processes.wait_for_everyone()
    return result


def _training_arguments(settings: Settings, folder: Path, seed: int) -> transformers.TrainingArguments:
    import torch
    import transformers
    from accelerate import PartialState

    save_every = max(1, min(200, settings.steps // 4))
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.lr,
        warmup_steps=max(1, settings.steps // 20),
        seed=seed,
        data_seed=seed,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        # Must divide the steps between checkpoints: a resumed run loses a partial logging window.
        logging_steps=math.gcd(save_every, max(1, min(10, settings.steps // 10))),
        save_steps=save_every,
        save_total_limit=2,
        use_cpu=PartialState().device.type == "cpu",
        ddp_find_unused_parameters=False if settings.processes > 1 else None,
        report_to="none",
        disable_tqdm=True,
    )


def mixed(domains: list[Blocks]) -> list[dict[str, Any]]:
    """Training rows with their domain; of several domains equally many, as the smallest has."""
    rows = []
    for blocks in zip(*domains, strict=False):
        for number, block in enumerate(blocks):
            ids = block.astype(np.int64)
            rows.append({"input_ids": ids, "labels": ids, "domains": number})
    return rows


def held_out_figures(model: Any, blocks: Blocks, batch: int) -> dict[str, Any]:
    """Perplexity and dispersion of ``model`` on ``blocks`` (n, t), in float32.

    By layer, the last one after the final norm: ``tokens``, the mean cosine distance between the tokens of a
    block, averaged over blocks (1 - LD's condensation); ``texts``, the dispersion over blocks (RD eq. 1) at
    the last position that predicts a token, None for one block. The very last position has no label in
    training: only a loss on states acts there.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from lmeval_dispersion.model.capture import Decoder, capture
    from lmeval_dispersion.training.losses import push_away

    decoder = Decoder.of(model)
    names = [f"layer.{k}" for k in range(len(decoder))]
    if decoder.norm is not None:
        names[-1] = "norm"
    device = next(model.parameters()).device
    within: dict[str, float] = dict.fromkeys(names, 0.0)
    over: dict[str, Dispersion] = {}
    nll, training = 0.0, model.training

    def see(name: str, state: Any) -> None:
        # One mean per block: keep their sum, so that the last, smaller batch has its right weight.
        within[name] -= float(push_away(state, pairs="sequence")) * len(state)
        last = state[:, -2].float().cpu().numpy()
        over.setdefault(name, Dispersion(last.shape[1])).update(last)

    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), capture(model, names, see):
            for start in range(0, len(blocks), batch):
                ids = torch.as_tensor(blocks[start : start + batch], dtype=torch.long, device=device)
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                nll += float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    finally:
        model.train(training)
    return {
        "perplexity": math.exp(min(700.0, nll / (len(blocks) * (blocks.shape[1] - 1)))),
        "tokens": [within[name] / len(blocks) for name in names],
        "texts": [over[name].mean() if len(blocks) > 1 else None for name in names],
    }


def start_model(settings: Settings, seed: int) -> Any:
    """The starting model of base and every loss with this seed, in float32."""
    import torch
    import transformers

    from lmeval_dispersion.model.loading import load_model

    if settings.from_scratch:
        config = transformers.AutoConfig.from_pretrained(settings.model)
        transformers.set_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return load_model(settings.model, dtype="float32", device="cpu").model.requires_grad_(True)


def _dispersion_config(settings: Settings, loss: str, seed: int) -> DispersionConfig:
    from lmeval_dispersion.training.trainer import DispersionConfig

    options = {"max_tokens": settings.max_tokens} if settings.max_tokens else {}
    return DispersionConfig(loss, ",".join(settings.layer), settings.weight, seed=seed, options=options)


def _last_checkpoint(here: Path, steps: int) -> Path | None:
    """The newest complete checkpoint before the last step; after that, the Trainer would take another step.

    Others are removed.
    """
    whole = {}
    for path in here.glob("checkpoint-*"):
        try:
            # The Trainer writes this file last.
            step = json.loads((path / "trainer_state.json").read_text())["global_step"]
        except (OSError, ValueError, KeyError):
            step = steps
        if step < steps:
            whole[step] = path
        else:
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


COMMANDS = {"train": (_add_arguments, _run)}
