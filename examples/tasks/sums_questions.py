"""Questions of the task `sums`: a sum and four results, one of them right."""

import random

from datasets import Dataset

COUNT = 400


def documents(**_: object) -> dict[str, Dataset]:
    """The task's documents, the same each time."""
    draw = random.Random(0)
    rows = []
    for _ in range(COUNT):
        a = draw.randrange(50)
        b = draw.randrange(50)
        label = draw.randrange(4)
        choices = [f"{a + b + step}." for step in draw.sample([1, 2, 3, 10], 3)]
        choices.insert(label, f"{a + b}.")
        rows.append({"question": f"{a}+{b}=", "choices": choices, "label": label})
    return {"test": Dataset.from_list(rows)}
