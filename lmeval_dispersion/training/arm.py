"""One arm of a comparison, trained with one seed: resumable, evaluated before, during and after.

LD is "Dispersion Loss Counteracts Embedding Condensation" (ICML 2026), RD "On the Predictive Power of
Representation Dispersion in Language Models" (ICLR 2026).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments
from transformers.pytorch_utils import Conv1D

from lmeval_dispersion.errors import MissingExtraError, UsageError
from lmeval_dispersion.geometry import Dispersion
from lmeval_dispersion.model.capture import Decoder, capture
from lmeval_dispersion.model.loading import load_model
from lmeval_dispersion.model.texts import Texts
from lmeval_dispersion.training.losses import LOSSES, push_away
from lmeval_dispersion.training.regularizer import DispersionRegularizer
from lmeval_dispersion.training.settings import FORGET, NOISE, Lora, Settings
from lmeval_dispersion.training.token_blocks import Blocks, mixed
from lmeval_dispersion.training.trainer import DispersionConfig, DispersionTrainer

_ADAPTABLE = (torch.nn.Linear, Conv1D)

Tell = Callable[[int, dict[str, float]], None]  # the step just done, and what was logged of late


def arm_folder(folder: Path, arm: str, seed: int) -> Path:
    """Where an arm keeps its checkpoints, evaluations and model."""
    return folder / f"{arm}-seed{seed}"


def finished(folder: Path, arm: str, seed: int) -> dict[str, Any] | None:
    """The result of an arm that is trained, else None."""
    path = arm_folder(folder, arm, seed) / "result.json"
    return json.loads(path.read_text()) if path.is_file() else None


def trained(
    settings: Settings,
    folder: Path,
    arm: str,
    seed: int,
    domains: list[tuple[Blocks, Blocks]],
    tokenizer: Any,
    tell: Tell,
) -> dict[str, Any]:
    """Train, or go on from the last whole checkpoint, and write ``result.json``; its contents.

    The same seed gives the same start and the same order of data in every arm, and an arm that was killed
    ends with the numbers of one that was not.
    """
    here = arm_folder(folder, arm, seed)
    processes = PartialState()
    with processes.main_process_first():
        here.mkdir(exist_ok=True)
        checkpoint = _last_whole(here, settings.steps)
    model = start_model(settings, seed)
    evaluations = _Evaluations(here / "evaluations.jsonl", settings, domains, tell)
    trainer = DispersionTrainer(
        model=model,
        args=_arguments(settings, here, arm, seed),
        train_dataset=mixed([train for train, _ in domains]),
        callbacks=[evaluations, *([ActiveForgetting(settings.forget_every, seed)] if arm == FORGET else [])],
        dispersion=_dispersion(settings, arm, seed),
    )
    # Its table on stdout is not ours.
    trainer.remove_callback(transformers.PrinterCallback)
    evaluations.report = trainer.log if settings.trackers else None
    if checkpoint is None:
        evaluations.look(model, 0)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = time.perf_counter() - start
    if "wandb" in settings.trackers:  # the only one whose run would go on into the next arm
        importlib.import_module("wandb").finish()
    if processes.is_main_process:
        model.save_pretrained(here / "model")
        tokenizer.save_pretrained(here / "model")
        result = {
            "arm": arm,
            "seed": seed,
            "steps": settings.steps,
            "tokens": settings.steps * settings.step_tokens,
            "seconds_since_last_start": round(seconds, 1),
            "log": [_kept(entry) for entry in trainer.state.log_history if "loss" in entry],
            "evaluations": evaluations.read(),
        }
        _write(here / "result.json", json.dumps(result, indent=1))
        for left in here.glob("checkpoint-*"):
            shutil.rmtree(left)
    processes.wait_for_everyone()
    return json.loads((here / "result.json").read_text())  # type: ignore[no-any-return]


def several_on_cpu(settings: Settings) -> bool:
    """Whether several processes train without a GPU: Accelerate takes them for single ones unless told."""
    return settings.processes > 1 and not torch.cuda.is_available()


def start_model(settings: Settings, seed: int) -> Any:
    """The model that every arm with this seed starts from, in float32, with its adapters if there are any."""
    if settings.from_scratch:
        config = transformers.AutoConfig.from_pretrained(settings.model)
        transformers.set_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = load_model(settings.model, dtype="float32", device="cpu").model.requires_grad_(True)
    transformers.set_seed(seed)  # of the adapters' random half
    return _with_adapters(model, settings)


def checked_tokenizer(settings: Settings) -> Any:
    """The tokenizer of the base model, once that, the data and every arm are known to fit the settings.

    The model is built without weights, so that losses, layers and adapters are tried on its real structure.

    Raises:
        UsageError: There is no such model or tokenizer or source of texts, they do not fit each other, the
            block length, the layers, the losses or the adapters, or a tracker is unknown.
        MissingExtraError: A tracker or PEFT is not installed.
        CaptureError: The model is no decoder.
    """
    _check_trackers(settings)
    for sources in settings.domains:
        for source in filter(None, sources):
            Texts(source, column=settings.column, config=settings.data_config, split=settings.split)
    try:
        config = transformers.AutoConfig.from_pretrained(settings.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"expected a model with a tokenizer, got {settings.model}: {first}; pass a Hub id or a folder"
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
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise UsageError(
            f"expected a causal language model, got {settings.model} ({type(config).__name__})"
        ) from error
    Decoder.of(model)
    model = _with_adapters(model, settings)
    for arm in settings.arms:
        chosen = _dispersion(settings, arm, 0)
        if chosen is not None:
            with DispersionRegularizer(model, chosen.loss, chosen.layers, chosen.weight, **chosen.options):
                pass
        try:
            _arguments(settings, Path(settings.out), arm, 0)
        except ValueError as error:  # such as bf16 on a device that has none
            raise UsageError(f"transformers refuses to train so: {str(error).splitlines()[0]}") from error
    return tokenizer


def _check_trackers(settings: Settings) -> None:
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    there = get_available_reporting_integrations()
    for name in settings.trackers:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise UsageError(f"expected report_to of none, {known}, separated by commas; got {name!r}")
        if name not in there:
            raise MissingExtraError(
                f"reporting to {name} needs it installed; install {name}, or leave it out"
            )


def _with_adapters(model: Any, settings: Settings) -> Any:
    if settings.lora is None:
        return model
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("adapters need peft; pip install 'lmeval-dispersion[adapters]'") from error
    lora = Lora.of(settings.lora)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
        base_model_name_or_path=settings.model,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what PEFT asks transformers for
            return peft.get_peft_model(model, config)
    except ValueError as error:
        names = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, _ADAPTABLE)}
        raise UsageError(
            f"expected lora targets among {', '.join(sorted(names))}, got {'+'.join(lora.targets) or 'none'}"
        ) from error


def evaluated(model: Any, blocks: Blocks, batch: int) -> dict[str, Any]:
    """Perplexity and dispersion by layer of ``model`` on ``blocks`` (n, t), in float32.

    The model's mode and the random states stay as they are.

    Returns:
        ``perplexity``: exp of the mean negative log-likelihood over all predicted tokens, n (t - 1) of them.
        ``tokens``: for each layer the mean cosine distance between the tokens of a block, averaged over
        blocks (1 - it is LD's condensation). ``texts``: for each layer the dispersion over blocks (RD eq. 1)
        of the state at the last position that predicts a token, None for one block: the very last has no
        label in training, so that there a loss on states alone decides. Layers are the outputs of the
        blocks of the model, the last one after the final norm.
    """
    decoder = Decoder.of(model)
    names = [f"layer.{k}" for k in range(len(decoder))]
    if decoder.norm is not None:
        names[-1] = "norm"
    device = next(model.parameters()).device
    within: dict[str, float] = dict.fromkeys(names, 0.0)
    over: dict[str, Dispersion] = {}
    nll, training = 0.0, model.training

    def see(name: str, state: Tensor) -> None:
        # One mean a block: their sum is kept, so that the last, smaller batch weighs what it should.
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


def _dispersion(settings: Settings, arm: str, seed: int) -> DispersionConfig | None:
    if arm not in LOSSES:
        return None
    options: dict[str, Any] = {"max_tokens": settings.max_tokens} if settings.max_tokens else {}
    return DispersionConfig(
        loss=arm,
        layers=settings.layers,
        weight=settings.weight,
        schedule=settings.schedule,  # type: ignore[arg-type]
        warmup=max(1, settings.steps // 20),
        seed=seed,
        options=options,
    )


def _arguments(settings: Settings, here: Path, arm: str, seed: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(here),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.lr,
        lr_scheduler_type="linear",
        warmup_steps=max(1, settings.steps // 20),
        seed=seed,
        data_seed=seed,
        bf16=settings.bf16,
        neftune_noise_alpha=settings.noise_alpha if arm == NOISE else None,
        logging_steps=_log_every(settings),
        save_steps=settings.save_every,
        save_total_limit=2,
        # Without this transformers refuses bf16 where there is no accelerator.
        use_cpu=PartialState().device.type == "cpu",
        ddp_find_unused_parameters=False if settings.processes > 1 else None,
        report_to=settings.trackers or "none",
        run_name=f"{Path(settings.out).name}-{arm}-seed{seed}",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _log_every(settings: Settings) -> int:
    """Steps between log entries, a divisor of those between checkpoints: resuming forgets half a mean."""
    most = max(1, min(10, settings.steps // 10))
    return max(n for n in range(1, most + 1) if settings.save_every % n == 0)


class ActiveForgetting(TrainerCallback):  # type: ignore[misc]
    """Resets the input embeddings and their optimizer state every ``every`` steps, but not after the last.

    Where the output projection is tied to them it is reset too, as in LD's released code for GPT-2. New
    rows are normal with the model's ``initializer_range``, drawn from the seed and the step alone.

    Args:
        every: Steps between resets.
        seed: Seed of the draws.

    Source: a baseline of LD, after Chen et al. (2023), "Improving language plasticity via pretraining with
    active forgetting".
    """

    def __init__(self, every: int, seed: int) -> None:
        self.every, self.seed = every, seed

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Reset, if it is time."""
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        weight = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state.global_step)
        scale = getattr(model.config, "initializer_range", 0.02)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        inner = getattr(optimizer, "optimizer", optimizer)
        for value in inner.state.get(weight, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                value.zero_()


class _Evaluations(TrainerCallback):  # type: ignore[misc]
    """Evaluates at evenly spaced steps and at the end, and keeps the numbers in a file, one line each."""

    def __init__(
        self, path: Path, settings: Settings, domains: list[tuple[Blocks, Blocks]], tell: Tell
    ) -> None:
        self.path, self.settings, self.tell = path, settings, tell
        self.held_out = [held for _, held in domains]
        steps, parts = settings.steps, settings.evals + 1
        self.at = {steps * part // parts for part in range(1, parts + 1)}
        self.latest: dict[str, float] = {}
        self.report: Callable[[dict[str, float]], None] | None = None  # to the trackers

    def look(self, model: Any, step: int) -> None:
        """Evaluate, in the first of several processes; the others wait for its next gradient."""
        if not PartialState().is_main_process:
            return
        found = [evaluated(model, blocks, self.settings.batch) for blocks in self.held_out]
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "domains": found}) + "\n")
        if self.report is not None and step:
            self._told(found)

    def _told(self, found: list[dict[str, Any]]) -> None:
        logs: dict[str, float] = {}
        for number, figures in enumerate(found):
            prefix = "eval_" if len(found) == 1 else f"eval_{number}_"
            logs[prefix + "perplexity"] = figures["perplexity"]
            for k, value in enumerate(figures["tokens"]):
                name = "last" if k == len(figures["tokens"]) - 1 else f"layer.{k}"
                logs[f"{prefix}dispersion/{name}"] = value
        if self.report is not None:
            self.report(logs)

    def read(self) -> list[dict[str, Any]]:
        """Evaluations by step; of a step that was done again after an interruption the later one."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # the line that a kill cut off; its step was evaluated again
                continue
            by_step[entry["step"]] = entry
        return [by_step[step] for step in sorted(by_step)]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.at:
            self.look(model, state.global_step)
        self.tell(state.global_step, self.latest)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.latest = dict(logs or {})


def _last_whole(here: Path, steps: int) -> Path | None:
    """The newest checkpoint before the last step that was written to its end; others are removed.

    An arm that is killed after its last checkpoint and before its result does the steps since the one before
    again: the Trainer would take one step too many from the last.
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


def _kept(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("epoch", "total_flos")}


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)
