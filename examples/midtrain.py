"""Mid-train a model with dispersion losses and without, and compare held-out perplexity over seeds.

    python midtrain.py MODEL TEXTS FOLDER --arm angular_spread --arm noise --seed 0 --seed 1 --seed 2

TEXTS is a file with empty lines between texts, `--also TEXTS` a second domain. An arm is a loss or a baseline
of the dispersion-loss paper: `noise` on the input embeddings (NEFTune), `forgetting` (embeddings drawn anew).
Each is compared with `base`: same start, data and order. After an interruption the same command goes on.
"""

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from scipy.stats import sem
from scipy.stats import t as student
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from lmeval_dispersion import DispersionConfig, DispersionTrainer


class ActiveForgetting(TrainerCallback):
    """Resets the input embeddings and their optimizer state every ``every`` steps, but not after the last.

    New rows are normal with the model's ``initializer_range``, drawn from the seed and the step alone.
    Source: Chen et al. (2023), "Improving language plasticity via pretraining with active forgetting".
    """

    def __init__(self, every, seed):
        self.every, self.seed = every, seed

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        """Reset, if it is time."""
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        weight = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state.global_step)
        with torch.no_grad():
            scale = getattr(model.config, "initializer_range", 0.02)
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        for value in getattr(optimizer, "optimizer", optimizer).state.get(weight, {}).values():
            if value.shape == weight.shape:
                value.zero_()


def blocks(path, tokenizer, size):
    """Texts joined by the end-of-text token and cut; the last fifth, at most 100 blocks, is held out."""
    ids = []
    for text in Path(path).read_text(encoding="utf-8").split("\n\n"):
        ids += tokenizer(text, add_special_tokens=False).input_ids + [
            tokenizer.eos_token_id
        ] * bool(ids)
    cut = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    held = min(100, len(cut) // 5)
    if not held:
        raise SystemExit(f"expected 5 blocks or more of {size} tokens in {path}, got {len(cut)}")
    return cut[:-held], cut[-held:]


def rows(parts):
    """Rows for the trainer, with their domain; as many of each domain as the smallest has."""
    mixed = [(ids, number) for both in zip(*parts, strict=False) for number, ids in enumerate(both)]
    return [{"input_ids": ids, "labels": ids, "domains": number} for ids, number in mixed]


def trained(args, arm, seed, train, held, tokenizer):
    """Held-out figures of one arm with one seed, before and after; kept in its folder."""
    here = Path(args.folder, f"{arm}-{seed}")
    if (here / "result.json").is_file():
        return json.loads((here / "result.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    plain = arm in ("base", "noise", "forgetting")
    loss, weight = ("angular_spread", 0.0) if plain else (arm, args.weight)  # 0 only measures
    trainer = DispersionTrainer(
        model=model,
        args=TrainingArguments(
            str(here),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            warmup_steps=max(1, args.steps // 20),
            neftune_noise_alpha=5 if arm == "noise" else None,
            seed=seed,
            save_steps=max(1, args.steps // 4),
            save_total_limit=1,
            logging_steps=max(1, args.steps // 10),
            bf16=torch.cuda.is_available()
            and torch.cuda.is_bf16_supported(including_emulation=False),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset={f"domain{number}": part for number, part in enumerate(held)},
        callbacks=[ActiveForgetting(max(1, args.steps // 4), seed)]
        if arm == "forgetting"
        else None,
        dispersion=DispersionConfig(
            loss, args.layers, weight, seed=seed, options={"max_tokens": 256}
        ),
    )
    trainer.remove_callback(PrinterCallback)  # its table is on stdout
    print(f"{arm}, seed {seed}: {args.steps} steps", file=sys.stderr)
    whole = {
        int(file.parent.name.split("-")[1]): file.parent
        for file in here.glob("*/trainer_state.json")
    }
    started = max((step for step in whole if step < args.steps), default=None)
    result = {"before": trainer.evaluate()}
    trainer.train(resume_from_checkpoint=str(whole[started]) if started else None)
    result["after"] = trainer.evaluate()
    trainer.save_model(here / "model")
    tokenizer.save_pretrained(here / "model")
    (here / "partial.json").write_text(json.dumps({**result, "log": trainer.state.log_history}))
    (here / "partial.json").replace(here / "result.json")
    for checkpoint in here.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return result


def main(words=None):
    """Train all, and print a line for each arm and domain."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "texts", "folder"):
        parser.add_argument(name)
    for name, kind in (("also", str), ("arm", str), ("seed", int)):
        parser.add_argument(f"--{name}", action="append", type=kind, default=[])
    defaults = {
        "steps": 1000,
        "block": 512,
        "batch_size": 8,
        "lr": 5e-5,
        "weight": 0.1,
        "layers": "last",
    }
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args(words)
    settings, file = {**vars(args), "arm": None, "seed": None}, Path(args.folder, "settings.json")
    if file.is_file() and json.loads(file.read_text()) != json.loads(json.dumps(settings)):
        parser.error(f"{args.folder} holds models of other settings ({file}); name another folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    domains = [blocks(path, tokenizer, args.block) for path in (args.texts, *args.also)]
    train, held = rows([train for train, _ in domains]), [rows([part]) for _, part in domains]
    arms, seeds = dict.fromkeys(["base", *args.arm]), args.seed or [0]
    kept = {
        (arm, seed): trained(args, arm, seed, train, held, tokenizer)
        for seed in seeds
        for arm in arms
    }
    level = 1 - 0.025 / max(
        1, (len(arms) - 1) * len(domains)
    )  # the intervals hold together with 95 %
    for arm in arms:
        for number, path in enumerate((args.texts, *args.also)):
            both = [[kept[each, seed]["after"] for seed in seeds] for each in (arm, "base")]
            loss = np.array([[one[f"eval_domain{number}_loss"] for one in each] for each in both])
            spread = np.mean([one[f"eval_domain{number}_dispersion"] for one in both[0]])
            said = [f"{arm} on {Path(path).name}: perplexity {math.exp(loss[0].mean()):.2f}"]
            said += [f"dispersion {spread:.3f}"]
            if arm != "base":
                shifts = 100 * (loss[0] - loss[1])  # log perplexity, seed by seed
                half = (
                    student.ppf(level, len(seeds) - 1) * sem(shifts) if len(seeds) > 1 else math.nan
                )
                said.append(f"{shifts.mean():+.2f} ± {half:.2f} % against base")
            print(", ".join(said))


if __name__ == "__main__":
    main()
