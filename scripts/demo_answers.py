"""Record the demo family's answers that `dispersion race --demo` replays, by lm-eval.

    python scripts/demo_answers.py

Every checkpoint is asked the same 400 sums with four answers to choose from. `answers.npz` holds the
checkpoints in the screen's order (`label`), whether they were right (`score`), and the probability of each
right answer (`probability`).
"""

import copy
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from lmeval_screener import screen

from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store.samples import read_logged

QUESTIONS = 400
OPERANDS = 50  # both operands are below this
HELD_OUT_PAIRS = 0.1  # share of unordered operand pairs that no checkpoint was trained on


def held_out_pairs() -> set[frozenset[int]]:
    """Unordered operand pairs kept for the test."""
    pairs = [frozenset((a, b)) for a in range(OPERANDS) for b in range(a, OPERANDS)]
    return set(random.Random(0).sample(pairs, round(HELD_OUT_PAIRS * len(pairs))))


def questions(seed: int = 0) -> list[dict[str, object]]:
    """Sums of pairs that no checkpoint was trained on."""
    rng = random.Random(seed)
    held_out = held_out_pairs()
    pairs = [
        (a, b)
        for a in range(OPERANDS)
        for b in range(10, OPERANDS)
        if frozenset((a, b)) in held_out
    ]
    return [sum_with_choices(a, b, rng) for a, b in rng.choices(pairs, k=QUESTIONS)]


def sum_with_choices(a: int, b: int, rng: random.Random) -> dict[str, object]:
    """A sum after one that is known to all, with the right answer among three near ones."""
    choices = [f"{a + b + step}." for step in rng.sample((-10, -2, -1, 1, 2, 10), 3)]
    label = rng.randrange(4)
    choices.insert(label, f"{a + b}.")
    return {"q": f"7+5=12. {a}+{b}=", "choices": choices, "label": label}


def write_task(folder: Path, rows: Sequence[Mapping[str, object]], harness_class: str = "") -> None:
    """The task `sums` of lm-eval, run by lm-eval's own class or another."""
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    own = f"class: !function {harness_class}\n" if harness_class else ""
    (folder / "sums.yaml").write_text(yaml.safe_dump(task) + own)


def evaluate(label: str, folder: Path, out: Path) -> Path:
    """The results of a checkpoint with its samples, as lm-eval's command writes them."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    model = {"pretrained": str(data_folder("demo") / label)}
    tracker = EvaluationTracker(output_path=str(out / label))
    tasks = {
        "tasks": ["sums"],
        "task_manager": TaskManager(include_path=str(folder), include_defaults=False),
    }
    how = {"device": "cpu", "batch_size": 64, "bootstrap_iters": 0, "evaluation_tracker": tracker}
    results = simple_evaluate(model="hf", model_args=model, **tasks, **how)
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=copy.deepcopy(samples))
    tracker.save_results_samples(task_name="sums", samples=samples["sums"])
    return out / label


def main() -> None:
    labels = [checkpoint.label for checkpoint in screen(demo=True).checkpoints]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_task(folder, questions())
        runs = [read_logged(evaluate(label, folder, folder)).documents for label in labels]
    np.savez_compressed(
        data_folder("demo") / "answers.npz",
        label=labels,
        score=np.array([run["correct"] for run in runs], dtype=bool),
        probability=np.array([run["probability"] for run in runs], dtype=np.float16),
    )


if __name__ == "__main__":
    main()
