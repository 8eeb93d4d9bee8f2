"""Make `lmeval_dispersion/data/demo_runs`, two lm-eval runs that `audit --demo` and `compare --demo` read.

    python scripts/demo_runs.py

Two checkpoints of the demo family answer the same 600 sums of numbers below 50, four choices each. No pair of
numbers occurs twice; about one in ten was held out of the checkpoints' training. A sum's subject is the tens
of its numbers.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path

from demo_answers import OPERANDS, sum_with_choices, write_task

from lmeval_dispersion.installation import data_folder

CHECKPOINTS = ("sums-20", "sums-30")
QUESTIONS = 600
TASK = "sums"


def questions(seed: int = 0) -> list[dict[str, object]]:
    """Sums of different pairs of numbers, each pair in random order."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(OPERANDS) for b in range(a, OPERANDS)]
    rows = []
    for small, large in rng.sample(pairs, QUESTIONS):
        subject = f"{small // 10}x + {large // 10}x"
        a, b = rng.sample((small, large), 2)
        rows.append({"subject": subject, **sum_with_choices(a, b, rng)})
    return rows


def evaluate(checkpoint: str, folder: Path) -> Path:
    """The store that the harness writes into ``folder`` while a checkpoint answers."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    store = folder / checkpoint
    manager = TaskManager(
        include_path=str(folder), include_defaults=False, metadata={"dispersion_store": str(store)}
    )
    model = {"pretrained": f"demo/{checkpoint}", "dtype": "float32"}
    how = {"device": "cpu", "batch_size": 64, "bootstrap_iters": 0}
    simple_evaluate(model="hf", model_args=model, tasks=[TASK], task_manager=manager, **how)
    return store / TASK


def main() -> None:
    data = data_folder("demo").parent
    os.chdir(data)  # the runs name their models "demo/NAME", on any machine
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_task(folder, questions(), harness_class="lmeval_dispersion.harness.DispersionTask")
        for checkpoint in CHECKPOINTS:
            shutil.copytree(
                evaluate(checkpoint, folder), data / "demo_runs" / checkpoint, dirs_exist_ok=True
            )


if __name__ == "__main__":
    main()
