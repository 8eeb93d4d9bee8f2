"""Race the saves of LoRA runs while they train: births.yaml is the study.

python -m benchmarks.births MODEL TRAIN.txt TEST.txt OUT [--seeds 401 402 403]

MODEL is a folder of SmolLM2-135M-Instruct, the texts are two parts of WikiText-2. It goes on where
it was stopped, and prints the verdicts; OUT/births.json has all answers. births.json next to this
script has those so far: copied to OUT, its seeds are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parent
SETTINGS = yaml.safe_load((ROOT / "births.yaml").read_text("utf-8"))
TASKS = {"next": (0, 1000), "next_truth": (1000, 1150)}
ASKED = 100
STEPS = 200
SAVED_EVERY = 10
SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def paragraphs(file: Path) -> list[str]:
    """Paragraphs of three sentences at least, without headings."""
    lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    texts = [line for line in lines if line and not line.startswith("=")]
    return [text for text in texts if len(SENTENCE.split(text)) >= 3]


def questions(texts: list[str], count: int) -> list[dict[str, Any]]:
    """Beginnings, and four sentences of which one follows."""
    draw = random.Random(0)
    rows = []
    for place in draw.sample(range(len(texts)), min(count, len(texts))):
        sentences = SENTENCE.split(texts[place])
        cut = draw.randrange(1, len(sentences))
        others = draw.sample([text for i, text in enumerate(texts) if i != place], 3)
        label = draw.randrange(4)
        choices = [draw.choice(SENTENCE.split(other)[1:]) for other in others]
        choices.insert(label, sentences[cut])
        begin = " ".join(sentences[:cut])[-150:]
        rows.append({"begin": begin, "choices": choices, "label": label})
    return rows


def write_tasks(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The race's task and the one of other questions."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (first, last) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[first:last]), "utf-8")
        metric = {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data.absolute())}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{begin}}",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": [metric],
            "metadata": {"version": 1.0},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), "utf-8")


def trained(model: str, train: list[str], held: list[str], out: Path, seed: int) -> dict[str, Any]:
    """One run: losses and answers of each save, by step."""
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from lmeval_dispersion import RaceCallback

    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def tokens(texts: list[str]) -> list[dict[str, list[int]]]:
        return [{"input_ids": tokenizer(text).input_ids[:128]} for text in texts]

    run = out / f"run-{seed}"
    base = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    trainer = Trainer(
        model=get_peft_model(base, lora),
        args=TrainingArguments(
            str(run),
            seed=seed,
            max_steps=STEPS,
            save_steps=SAVED_EVERY,
            eval_strategy="steps",
            eval_steps=SAVED_EVERY,
            logging_steps=SAVED_EVERY,
            learning_rate=0.001,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            report_to="none",
        ),
        train_dataset=tokens(random.Random(seed).sample(train, min(len(train), 2000))),
        eval_dataset=tokens(held[:100]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    options = {"include_path": out / "tasks", "metric": "acc_norm", "batch_size": 16, "texts": ()}
    race = RaceCallback("next", questions=ASKED, **options)
    truth = RaceCallback("next_truth", questions=150, **options)
    for callback in (truth, race):  # the race's best is named last
        trainer.add_callback(callback)
    result = trainer.train()
    history = trainer.state.log_history
    saves = range(SAVED_EVERY, STEPS + 1, SAVED_EVERY)
    return {
        "seconds": result.metrics["train_runtime"],
        "losses": {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row},
        "margin": [row["race/margin"] for row in history if "race/margin" in row][-1],
        "named": int(str(trainer.state.best_model_checkpoint).rpartition("-")[2]),
        "answers": {
            name: {step: scores(run / f"race-{name}", step) for step in saves} for name in TASKS
        },
        "asking": {name: seconds(run / f"race-{name}") for name in TASKS},
    }


def scores(folder: Path, step: int) -> list[float]:
    """A save's answers, by document."""
    (file,) = (folder / f"checkpoint-{step}").glob("samples_*.jsonl")
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [line["acc_norm"] for line in sorted(lines, key=lambda line: line["doc_id"])]


def seconds(folder: Path) -> float:
    """The time that a race's questions took."""
    files = folder.glob("checkpoint-*/results_*.json")
    return sum(json.loads(file.read_text("utf-8"))["race"]["seconds"] for file in files)


def verdicts(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Each claim's verdict, with its figures."""
    found = {}
    for claim in ("named", "last"):
        differences = []
        for run in runs:
            truth = {
                int(step): np.array(given) for step, given in run["answers"]["next_truth"].items()
            }
            losses = {int(step): loss for step, loss in run["losses"].items()}
            rival = max(truth) if claim == "last" else min(losses, key=lambda step: losses[step])
            differences.append(truth[run["named"]] - truth[rival])
        found[claim] = _verdict(np.array(differences).mean(axis=0))
    outside = 0
    for run in runs:
        truth = {int(step): np.array(given) for step, given in run["answers"]["next_truth"].items()}
        best = max(truth, key=lambda step: truth[step].mean())
        gap = truth[best] - truth[run["named"]]
        outside += gap.mean() > run["margin"] + 2 * gap.std(ddof=1) / len(gap) ** 0.5
    found["margin"] = "holds" if not outside else f"does not hold: {outside} of {len(runs)}"
    return found


def _verdict(differences: np.ndarray) -> str:
    draw = np.random.default_rng(0)
    places = draw.integers(len(differences), size=(2000, len(differences)))
    low, high = np.quantile(differences[places].mean(axis=1), [0.025, 0.975])
    word = "holds" if low > 0 else "does not hold" if high < 0 else "inconclusive"
    return f"{word}: {differences.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=SETTINGS["seeds"])
    args = parser.parse_args()
    held = paragraphs(args.test)
    rows = questions(held, 1150)
    write_tasks(args.out / "tasks", rows)
    file = args.out / "births.json"
    runs = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for seed in args.seeds:
        if str(seed) not in runs:
            given = trained(args.model, paragraphs(args.train), held, args.out, seed)
            runs[str(seed)] = json.loads(json.dumps(given))
            file.write_text(json.dumps(runs), "utf-8")
    for seed, run in runs.items():
        own = run["asking"]["next"]
        share = own / (run["seconds"] - sum(run["asking"].values()))
        print(f"seed {seed}: named {run['named']}, margin {run['margin']:.3f}, share {share:.1%}")
    for claim, verdict in verdicts(list(runs.values())).items():
        print(f"{claim}: {verdict}")


if __name__ == "__main__":
    main()
