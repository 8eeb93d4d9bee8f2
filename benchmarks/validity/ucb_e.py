"""Let UCB-E choose a best checkpoint of each table, by banditeval's own code and its defaults.

    git clone https://github.com/kilian-group/banditeval    # read at 80f95a3; needs torch, einops, tqdm
    PYTHONPATH=banditeval TQDM_DISABLE=1 python benchmarks/validity/ucb_e.py TABLES CHOICES

`races` writes TABLES, `page` reads CHOICES (results/race-ucb-e.json): for each table and budget, of each
order the chosen line, questions asked, and how often a checkpoint was loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

STEP = 8  # questions a step, as in their demo; with the default's 32 few budgets reach all checkpoints


def chosen(right: Any, questions: int, seed: int) -> tuple[int, int, int]:
    """The line with the highest score, questions asked, loads."""
    from banditeval import BanditEval

    torch.manual_seed(seed)
    asked: list[tuple[int, int]] = []

    def method(line: int) -> Any:
        def answers(columns: list[int]) -> Any:
            asked.append((line, len(columns)))
            return right[line, columns]

        return answers

    methods = [method(line) for line in range(len(right))]
    bandit = BanditEval(methods, range(right.shape[1]), lambda answers, columns: answers(columns), "ucbe")
    scores = bandit(-(-questions // STEP), batch_size=STEP)
    loads = sum(i == 0 or line != asked[i - 1][0] for i, (line, _) in enumerate(asked))
    return int(scores.nan_to_num(-1).argmax()), sum(count for _, count in asked), loads


def main(tables: Path, choices: Path) -> None:
    made = {}
    for label, table in json.loads(tables.read_text("utf-8")).items():
        right = torch.tensor(table["right"], dtype=torch.float)
        made[label] = {
            budget: [chosen(right, count, order) for order, count in enumerate(counts)]
            for budget, counts in table["budgets"].items()
        }
        print(label, flush=True)
    choices.write_text(json.dumps(made, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
