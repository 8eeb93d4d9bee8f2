"""Record the demo family's answers that `dispersion race --demo` replays, by lm-eval.

    python scripts/demo_answers.py

Every checkpoint is asked the same 400 sums with four answers to choose from. `answers.npz` holds the
checkpoints in the screen's order (`label`), whether they were right (`score`), and the probability of each
right answer (`probability`).
"""

import json
import random
import tempfile
from pathlib import Path

import numpy as np
import yaml
from demo_texts import OPERANDS, held_out_pairs
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lmeval_screener import screen

from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store.samples import right_probability

QUESTIONS = 400


def questions(seed: int = 0) -> list[dict[str, object]]:
    """Sums of pairs that no checkpoint was trained on, after one that is known to all."""
    rng = random.Random(seed)
    held_out = held_out_pairs()
    pairs = [(a, b) for a in range(OPERANDS) for b in range(10, OPERANDS) if frozenset((a, b)) in held_out]
    rows = []
    for a, b in rng.choices(pairs, k=QUESTIONS):
        choices = [f"{a + b + step}." for step in rng.sample((-10, -2, -1, 1, 2, 10), 3)]
        label = rng.randrange(4)
        choices.insert(label, f"{a + b}.")
        rows.append({"q": f"7+5=12. {a}+{b}=", "choices": choices, "label": label})
    return rows


def main() -> None:
    demo = data_folder("demo")
    labels = [checkpoint.label for checkpoint in screen(demo=True).checkpoints]
    scores, chances = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "sums.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in questions()))
        task = {
            "task": "sums",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{label}}",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        Path(folder, "sums.yaml").write_text(yaml.safe_dump(task))
        manager = TaskManager(include_path=folder, include_defaults=False)
        for label in labels:
            samples = simple_evaluate(
                model="hf",
                model_args={"pretrained": str(demo / label)},
                tasks=["sums"],
                task_manager=manager,
                device="cpu",
                batch_size=64,
                bootstrap_iters=0,
            )["samples"]["sums"]
            samples.sort(key=lambda sample: sample["doc_id"])
            scores.append([sample["acc"] for sample in samples])
            chances.append(
                [
                    right_probability([float(answer[0]) for answer in s["filtered_resps"]], [s["target"]])
                    for s in samples
                ]
            )
            print(f"{label:14s} {np.mean(scores[-1]):.3f} {np.mean(chances[-1]):.3f}")
    np.savez_compressed(
        demo / "answers.npz", label=labels, score=np.bool_(scores), probability=np.float16(chances)
    )


if __name__ == "__main__":
    main()
