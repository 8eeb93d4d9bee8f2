"""The verdicts of the study of births, on planted runs and on noise."""

from __future__ import annotations

import random

import numpy as np

from benchmarks import births


def run(means: dict[int, float], losses: dict[int, float], named: int, rng: np.random.Generator):
    """A run whose saves answer 1,000 other questions with these means."""
    common = rng.random(1000)
    answers = {str(step): (common < mean).astype(float).tolist() for step, mean in means.items()}
    return {
        "losses": {str(step): loss for step, loss in losses.items()},
        "margin": 0.1,
        "named": named,
        "answers": {"next_truth": answers},
    }


def test_verdicts_follow_what_was_planted():
    rng = np.random.default_rng(0)
    means = {20: 0.5, 40: 0.6, 60: 0.52}
    by_loss = {20: 1.0, 40: 1.2, 60: 1.4}
    found = births.verdicts([run(means, by_loss, 40, rng) for _ in range(3)])
    assert found["named"].startswith("holds: +0.")
    assert found["last"].startswith("holds: +0.0")
    assert found["margin"] == "holds"
    found = births.verdicts([run(means, by_loss, 20, rng) for _ in range(3)])
    assert found["named"].startswith("inconclusive: +0.0000")
    found = births.verdicts([run({**means, 40: 0.8}, by_loss, 60, rng) for _ in range(3)])
    assert found["margin"] == "does not hold: 3 of 3"


def test_the_right_sentence_follows_its_beginning():
    draw = random.Random(0)
    texts = [
        " ".join(f"Word{i} {draw.random()} of {place}." for i in range(5)) for place in range(9)
    ]
    rows = births.questions(texts, 9)
    assert len(rows) == 9
    for row in rows:
        whole = f"{row['begin']} {row['choices'][row['label']]}"
        assert any(whole in text for text in texts)
        assert len(set(row["choices"])) == 4
