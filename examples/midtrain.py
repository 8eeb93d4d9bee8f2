"""Train a model with dispersion losses and without, and compare held-out perplexity and benchmarks.

    python midtrain.py gpt2 texts.txt trained --arm angular_spread --arm noise --seed 0 --seed 1

A text file has empty lines between texts; `--also FILE` is a second domain. An arm is a loss, or a
baseline of the dispersion-loss paper (LD): `noise` on the input embeddings (NEFTune), `forgetting`
(input embeddings drawn anew; of a tied model also the head). Each is compared with `base`: same
start, same data, same order. Of several `--weight` (coefficients) and `--tau` (temperatures) each
pair is trained and listed, and the loss takes the one of lowest perplexity on validation text; all
other figures are those of test text. `--tasks dispersion_ten` evaluates the model of each arm, and
the start, by lm-eval.

`--recipe` sets all that follows, any of which another option changes: `published` is LD's
mid-training of GPT-2, `scratch` the first paper's (RD) training from scratch (add `--scratch`),
`small` the first one with 4 million tokens, `tiny` shows within seconds that all works. One
process, one GPU if there is one. After an interruption the same command goes on.
"""

import argparse
import dataclasses
import json
import math
import shutil
import subprocess
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata, sem, ttest_rel
from scipy.stats import t as student
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

from lmeval_dispersion import DispersionConfig, DispersionTrainer
from lmeval_dispersion.training.losses import LOSSES

BASELINES = ("base", "noise", "forgetting")
LOSSES_OF_LD = ("angular_spread", "orthogonalization", "l2_repel", "decorrelation")
WITH_TEMPERATURE = ("angular_spread", "l2_repel")


@dataclass(frozen=True)
class Recipe:
    """How to train; the defaults are LD's mid-training of GPT-2, as its code was run."""

    tokens: int = 200_000_000  # seen in training, over all steps
    block: int = 1024  # tokens of a sequence
    batch_size: int = 32  # sequences of a forward pass
    accumulate: int = 4  # forward passes of a step
    lr: float = 5e-5
    schedule: str = "cosine"
    warmup: float = 0.2  # share of the steps
    weight_decay: float = 0.1
    beta2: float = 0.95
    layers: str = "all"  # whose states the loss spreads
    max_tokens: int = 256  # that the loss draws of each sequence; 0: all
    released: float = 0.1  # where LD's code cuts cosines; 0: the published formulas
    noise: float = 1.0  # NEFTune's alpha
    forget_every: int = 1000  # steps
    embedding_lr: float = 5e-5  # of the embeddings that are forgotten
    embedding_warmup: float = 0.08  # share of each of their cycles
    evaluations: int = 1  # at equal distances, the last one at the end

    @property
    def steps(self):
        """Optimizer steps that see all tokens."""
        return math.ceil(self.tokens / (self.block * self.batch_size * self.accumulate))


RECIPES = {
    "published": Recipe(),
    "scratch": Recipe(
        tokens=1000 * 64 * 512,
        block=512,
        batch_size=64,
        accumulate=1,
        lr=5e-4,
        schedule="linear",
        warmup=0.0,
        weight_decay=0.0,
        beta2=0.999,
        layers="last",
        max_tokens=0,
        evaluations=2,
    ),
    "small": Recipe(tokens=1000 * 8 * 512, block=512, batch_size=8, accumulate=1, forget_every=250),
    "tiny": Recipe(
        tokens=4 * 8 * 16, block=16, batch_size=4, accumulate=2, lr=1e-3, forget_every=2
    ),
}


@dataclass(frozen=True)
class Setting:
    """An arm with the coefficient and the temperature of its loss."""

    arm: str
    weight: float = 0.0
    tau: float = 1.0

    @property
    def words(self):
        """What a line says of the loss; nothing of a baseline."""
        words = ""
        if self.arm not in BASELINES:
            words += f", weight {self.weight:g}"
        if self.arm in WITH_TEMPERATURE:
            words += f", tau {self.tau:g}"
        return words

    def folder(self, args, seed):
        """Where the run of a seed keeps its model and its figures."""
        name = self.arm
        if self.arm not in BASELINES:
            name += f"-{self.weight:g}"
        if self.tau != 1:
            name += f"-tau{self.tau:g}"
        return Path(args.folder, f"{name}-{seed}")


def settings_of(args, arm):
    """All that are trained of an arm."""
    if arm in BASELINES:
        return [Setting(arm)]
    taus = args.tau if args.tau and arm in WITH_TEMPERATURE else [1.0]
    return [Setting(arm, weight, tau) for tau in taus for weight in args.weight or [0.1]]


class ActiveForgetting(TrainerCallback):
    """Draws the input embeddings anew every ``every`` steps, but not after the last one.

    New rows are normal with the model's ``initializer_range``, from the seed and the step alone;
    what the optimizer remembers of the old ones goes. Source: Chen et al. (2023), "Improving
    language plasticity via pretraining with active forgetting".
    """

    def __init__(self, every, seed):
        self.every = every
        self.seed = seed

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        """Forget, if it is time."""
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        weight = model.get_input_embeddings().weight
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state.global_step)
        scale = getattr(model.config, "initializer_range", 0.02)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
        optimizer.state.pop(weight, None)


def forgets(trainer, recipe, seed):
    """Give the input embeddings of ``trainer`` their forgetting, rate and schedule.

    Their rate rises and falls linearly once in every ``forget_every`` steps, or once if there are
    fewer.
    """
    trainer.add_callback(ActiveForgetting(recipe.forget_every, seed))
    embeddings = trainer.model.get_input_embeddings().weight
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if weight is not embeddings]
    own = {"params": [embeddings], "lr": recipe.embedding_lr, "weight_decay": recipe.weight_decay}
    optimizer.add_param_group(own)
    steps = recipe.steps
    cycles = max(1, steps // recipe.forget_every)

    def of_embeddings(step):
        place = (step + 1) * cycles % steps / steps
        if place < recipe.embedding_warmup:
            return place / recipe.embedding_warmup
        return (1 - place) / (1 - recipe.embedding_warmup)

    warmup = round(recipe.warmup * steps)
    body = get_scheduler(recipe.schedule, optimizer, warmup, steps).lr_lambdas[0]
    others = len(optimizer.param_groups) - 1
    trainer.lr_scheduler = LambdaLR(optimizer, [body] * others + [of_embeddings])


class Rows(torch.utils.data.Dataset):
    """Blocks of one or more domains in turn, as many of each as the smallest has."""

    def __init__(self, domains):
        self.domains = domains

    def __len__(self):
        return len(self.domains) * min(len(blocks) for blocks in self.domains)

    def __getitem__(self, row):
        number = row % len(self.domains)
        ids = torch.from_numpy(self.domains[number][row // len(self.domains)]).long()
        return {"input_ids": ids, "labels": ids, "domains": number}


def blocks_of(path, tokenizer, size):
    """The texts of a file, each ended by the end-of-text token, as blocks (n, size)."""
    texts = Path(path).read_text(encoding="utf-8").split("\n\n")
    ids = array("i")
    for start in range(0, len(texts), 1000):
        batch = tokenizer(texts[start : start + 1000], add_special_tokens=False)
        for text_ids in batch["input_ids"]:
            ids.extend(text_ids)
            ids.append(tokenizer.eos_token_id)
    count = len(ids) // size
    return np.array(ids[: count * size], dtype=np.int32).reshape(count, size)


def splits_of(args, recipe, tokenizer):
    """For each domain its blocks for training, validation and test.

    Without files for them, validation and test are the last two tenths, at most 100 blocks each.
    """
    paths = [args.texts, *args.also]
    for name in ("validation", "test"):
        files = getattr(args, name)
        if files and len(files) != len(paths):
            raise SystemExit(f"expected {len(paths)} of --{name}, one a domain, got {len(files)}")
    splits = []
    for number, path in enumerate(paths):
        train = blocks_of(path, tokenizer, recipe.block)
        held_out = []
        for name in ("test", "validation"):
            files = getattr(args, name)
            if files:
                held_out.insert(0, blocks_of(files[number], tokenizer, recipe.block))
            else:
                count = max(1, min(100, len(train) // 10))
                held_out.insert(0, train[-count:])
                train = train[:-count]
        if min(len(train), *map(len, held_out)) < 1:
            raise SystemExit(f"expected three blocks or more of {recipe.block} tokens in {path}")
        splits.append((train, *held_out))
    return splits


def new_model(args, seed):
    """The model to start from: a checkpoint, or by its configuration alone, from the seed."""
    if not args.scratch:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    changes = {}
    for change in args.set:
        name, _, value = change.partition("=")
        changes[name] = json.loads(value)
    set_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model, **changes))


def loss_of(setting, recipe, seed):
    """The arm's loss; a baseline's is measured, with weight 0."""
    arm = setting.arm
    options = {}
    if recipe.max_tokens:
        options["max_tokens"] = recipe.max_tokens
    if arm in LOSSES_OF_LD and recipe.released:
        has_cut = arm in ("angular_spread", "orthogonalization")
        options["released"] = recipe.released if has_cut else True
    if setting.tau != 1:
        options["tau"] = setting.tau
    name = "angular_spread" if arm in BASELINES else arm
    return DispersionConfig(name, recipe.layers, setting.weight, seed=seed, options=options)


def arguments_of(here, arm, recipe, seed):
    """The recipe in transformers' words."""
    steps = recipe.steps
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return TrainingArguments(
        str(here),
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulate,
        learning_rate=recipe.lr,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=round(recipe.warmup * steps),
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.beta2,
        neftune_noise_alpha=recipe.noise if arm == "noise" else None,
        seed=seed,
        eval_strategy="steps" if recipe.evaluations > 1 else "no",
        eval_steps=math.ceil(steps / recipe.evaluations),
        save_steps=max(1, steps // 4),
        save_total_limit=1,
        logging_steps=max(1, steps // 10),
        bf16=has_bf16,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )


def trained(args, recipe, run, data, tokenizer):
    """One run's held-out figures before, during and after training; kept in its folder.

    ``run`` is (setting, seed), ``data`` the rows to train on and the held-out ones by name.
    """
    setting, seed = run
    here = setting.folder(args, seed)
    if (here / "result.json").is_file():
        return json.loads((here / "result.json").read_text())
    train, held_out = data
    trainer = DispersionTrainer(
        model=new_model(args, seed),
        args=arguments_of(here, setting.arm, recipe, seed),
        train_dataset=train,
        eval_dataset=held_out,
        # A callback that evaluates the model at intervals, or judges it, goes here.
        callbacks=[],
        dispersion=loss_of(setting, recipe, seed),
    )
    trainer.remove_callback(PrinterCallback)  # its table is on stdout
    if setting.arm == "forgetting":
        forgets(trainer, recipe, seed)
    print(f"{here.name}: {recipe.steps} steps", file=sys.stderr)
    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=last_checkpoint(here, recipe.steps))
    trainer.save_model(here / "model")
    tokenizer.save_pretrained(here / "model")
    after = evaluations_in(trainer.state.log_history)
    if str(recipe.steps) not in after:
        after[str(recipe.steps)] = trainer.evaluate()
    result = {"before": before, "after": after}
    (here / "partial.json").write_text(json.dumps({**result, "log": trainer.state.log_history}))
    (here / "partial.json").replace(here / "result.json")
    for checkpoint in here.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return result


def last_checkpoint(here, steps):
    """The last whole checkpoint of an interrupted run, or None."""
    whole = {}
    for file in here.glob("checkpoint-*/trainer_state.json"):
        step = int(file.parent.name.split("-")[1])
        if step < steps:
            whole[step] = str(file.parent)
    return whole[max(whole)] if whole else None


def evaluations_in(log):
    """Held-out figures by step, from the trainer's log."""
    figures = {}
    for entry in log:
        of_step = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if of_step and entry["step"]:
            figures.setdefault(str(entry["step"]), {}).update(of_step)
    return figures


def benchmarks(args, model, folder):
    """lm-eval's accuracies of a model, by member of the group: one call of `dispersion run`."""
    out = Path(folder, "lm-eval")
    if not list(out.glob("*/results_*.json")):
        words = ["--model", "hf", "--model_args", f"pretrained={model},dtype=float32"]
        words += ["--tasks", args.tasks, "--output_path", str(out)]
        if args.limit:
            words += ["--limit", str(args.limit)]
        command = [sys.executable, "-m", "lmeval_dispersion", "run", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results = json.loads(next(out.glob("*/results_*.json")).read_text())
    members = results["group_subtasks"].get(args.tasks) or args.tasks.split(",")
    return {member: results["results"][member]["acc,none"] for member in members}


def main(words=None):
    """Train all, and print a line for each arm and text, then the benchmarks and the scan."""
    args = parsed(words)
    recipe = recipe_of(args)
    disable_progress_bar()
    keep_settings(args, recipe)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.eos_token_id is None:
        raise SystemExit(f"expected an end-of-text token of {args.model}'s tokenizer, got none")
    splits = splits_of(args, recipe, tokenizer)
    held_out = {}
    for number, (_, validation, test) in enumerate(splits):
        held_out[f"validation{number}"] = Rows([validation])
        held_out[f"test{number}"] = Rows([test])
    data = Rows([train for train, _, _ in splits]), held_out
    arms = list(dict.fromkeys(["base", *args.arm]))
    seeds = args.seed or [0]
    results = {}
    chosen = []
    scan = []
    for arm in arms:
        losses = {}
        for setting in settings_of(args, arm):
            for seed in seeds:
                run = setting, seed
                results[run] = trained(args, recipe, run, data, tokenizer)
            losses[setting] = validation_loss(results, setting, seeds)
        best = min(losses, key=losses.get)
        chosen.append(best)
        if len(losses) > 1:
            scan += scan_lines(losses, best)
    for line in perplexity_lines(args, recipe, results, chosen, seeds):
        print(line)
    if args.tasks:
        for line in benchmark_lines(args, chosen, seeds):
            print(line)
    for line in scan:
        print(line)


def scan_lines(losses, best):
    """For each setting of a loss: perplexity on validation text after training."""
    lines = []
    for setting, loss in losses.items():
        line = f"{setting.arm}{setting.words}: perplexity {math.exp(loss):.2f} on validation text"
        if setting == best:
            line += ", the lowest"
        lines.append(line)
    return lines


def validation_loss(results, setting, seeds):
    """Mean loss on validation text after training, over seeds and domains."""
    of_domains = []
    for seed in seeds:
        *_, last = results[setting, seed]["after"].values()
        for name, value in last.items():
            if name.startswith("eval_validation") and name.endswith("_loss"):
                of_domains.append(value)
    return np.mean(of_domains)


def perplexity_lines(args, recipe, results, chosen, seeds):
    """For each evaluation, arm and text: perplexity and dispersion, and the change against base."""
    paths = [args.texts, *args.also]
    # All intervals hold together with 95 %.
    comparisons = max(1, (len(chosen) - 1) * len(paths))
    lines = []
    base = Setting("base")
    for step in results[base, seeds[0]]["after"]:
        for setting in chosen:
            for number, path in enumerate(paths):
                name = f"eval_test{number}"
                runs = [results[setting, seed]["after"][step] for seed in seeds]
                bases = [results[base, seed]["after"][step] for seed in seeds]
                losses = np.array([run[f"{name}_loss"] for run in runs])
                shifts = losses - np.array([run[f"{name}_loss"] for run in bases])
                line = f"{setting.arm} on {Path(path).name}"
                if recipe.evaluations > 1:
                    line += f" after {step} steps"
                line += f": perplexity {math.exp(losses.mean()):.2f}"
                line += f", dispersion {np.mean([run[f'{name}_dispersion'] for run in runs]):.3f}"
                line += setting.words
                if setting != base:
                    line += f", {change(shifts, comparisons)} against base"
                lines.append(line)
    return lines


def change(shifts, comparisons):
    """The change of perplexity in per cent, of shifts of its logarithm, with Student's interval."""
    mean = shifts.mean()
    text = f"{100 * np.expm1(mean):+.2f} %"
    if len(shifts) < 2:
        return text
    half = student.ppf(1 - 0.025 / comparisons, len(shifts) - 1) * sem(shifts)
    with np.errstate(over="ignore"):  # two seeds may leave any change open
        low, high = 100 * np.expm1([mean - half, mean + half])
    return f"{text} ({low:+.2f} to {high:+.2f})"


def benchmark_lines(args, chosen, seeds):
    """For the start and each arm: accuracy and rank, in the mean over benchmarks.

    A loss has also p-values: two-sided paired t-tests over the benchmarks, of means over seeds,
    against the start and each baseline.
    """
    accuracies = {}
    if not args.scratch:
        accuracies["start"] = [benchmarks(args, args.model, Path(args.folder, "start"))]
    for setting in chosen:
        folders = [setting.folder(args, seed) for seed in seeds]
        runs = [benchmarks(args, folder / "model", folder) for folder in folders]
        accuracies[setting.arm] = runs
    names = list(accuracies["base"][0])
    means = {}
    for arm, runs in accuracies.items():
        means[arm] = np.array([np.mean([run[name] for run in runs]) for name in names])
    table = np.array(list(means.values()))
    ranks = rankdata(-table, axis=0).mean(axis=1)  # equal accuracies share their ranks
    lines = []
    for (arm, row), rank in zip(means.items(), ranks, strict=True):
        line = f"{arm}: accuracy {100 * row.mean():.2f} % over {len(names)} benchmarks"
        line += f", mean rank {rank:.2f} of {len(table)}"
        if arm in LOSSES:
            line += p_values(row, means)
        lines.append(line)
    return lines


def p_values(row, means):
    """A loss against the start and the baselines, over benchmarks: words for its line."""
    words = ""
    for other, theirs in means.items():
        # Without a difference that varies there is no test.
        if other not in LOSSES and np.ptp(row - theirs) > 0:
            words += f", p {ttest_rel(row, theirs).pvalue:.2g} against {other}"
    return words


def parsed(words):
    """The command's options; each field of the recipe is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="checkpoint, or with --scratch its configuration")
    parser.add_argument("texts", help="text file, empty lines between texts")
    parser.add_argument("folder", help="for models and figures")
    parser.add_argument("--also", action="append", default=[], help="text of another domain")
    for name in ("validation", "test"):
        parser.add_argument(
            f"--{name}", action="append", default=[], help="text file, one a domain"
        )
    arms = [*LOSSES, *BASELINES]
    parser.add_argument("--arm", action="append", default=[], choices=arms, help="may be repeated")
    parser.add_argument("--weight", action="append", type=float, default=[], help="default: 0.1")
    parser.add_argument(
        "--tau", action="append", type=float, default=[], help="temperature; default: 1"
    )
    parser.add_argument("--seed", action="append", type=int, default=[], help="default: 0")
    parser.add_argument("--scratch", action="store_true", help="train from random weights")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="of the configuration"
    )
    parser.add_argument("--tasks", help="lm-eval's group, such as dispersion_ten")
    parser.add_argument("--limit", type=int, help="documents of a task (LD's tables: 500)")
    parser.add_argument("--recipe", choices=RECIPES, default="small")
    for field in dataclasses.fields(Recipe):
        name = field.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=type(field.default), help="default: the recipe's")
    args = parser.parse_args(words)
    if args.tau and not set(args.arm) & set(WITH_TEMPERATURE):
        parser.error(f"expected an --arm with a temperature, {' or '.join(WITH_TEMPERATURE)}")
    return args


def recipe_of(args):
    """The recipe with what other options change."""
    changes = {}
    for field in dataclasses.fields(Recipe):
        value = getattr(args, field.name)
        if value is not None:
            changes[field.name] = value
    return dataclasses.replace(RECIPES[args.recipe], **changes)


def keep_settings(args, recipe):
    """Write what the folder's models are trained by; refuse a folder with others."""
    kept = ("model", "texts", "also", "validation", "test", "scratch", "set", "tasks", "limit")
    settings = {name: getattr(args, name) for name in kept} | dataclasses.asdict(recipe)
    file = Path(args.folder, "settings.json")
    if file.is_file() and json.loads(file.read_text()) != settings:
        raise SystemExit(
            f"{args.folder} holds models of other settings ({file}); name another folder"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
