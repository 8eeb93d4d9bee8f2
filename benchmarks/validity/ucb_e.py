"""Let UCB-E choose the best of each table of siblings.yaml, by banditeval's own code and defaults.

    git clone https://github.com/kilian-group/banditeval    # read at 80f95a3; needs torch, einops, tqdm
    PYTHONPATH=banditeval:. TQDM_DISABLE=1 python benchmarks/validity/ucb_e.py

It is given as many of 400 questions as the race asked on average, and writes siblings-ucb-e.json.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks.validity import siblings
from benchmarks.validity.records import FOLDER
from benchmarks.validity.sibling_play import means, shortened
from benchmarks.validity.sibling_races import BY_BLOCK, RACE, SHORT, Named, label
from benchmarks.validity.study import read_study
from lmeval_dispersion.racing.contest import MARGIN

STEP = 8  # questions a step, as in their demo; with the default's 32 few budgets reach all checkpoints
ORDERS = 5
WAY = "UCB-E, as many questions"


def chosen(right: Any, questions: int, seed: int) -> Named:
    """The line with the highest score, questions asked, loads; whether one raced is better by the margin."""
    from banditeval import BanditEval

    torch.manual_seed(seed)
    asked: list[int] = []

    def method(line: int) -> Any:
        def answers(columns: list[int]) -> Any:
            asked.append(line)
            return right[line, columns]

        return answers

    methods = [method(line) for line in range(len(right))]
    bandit = BanditEval(methods, range(right.shape[1]), lambda answers, columns: answers(columns), "ucbe")
    best = int(bandit(-(-questions // STEP), batch_size=STEP).nan_to_num(-1).argmax())
    loads = sum(i == 0 or line != asked[i - 1] for i, line in enumerate(asked))
    scores = right.mean(1)
    return Named(best, len(asked) * STEP, loads, bool(scores.max() > scores[best] + MARGIN + 1e-9))


def main() -> None:
    races = json.loads((FOLDER / "siblings-races.json").read_text("utf-8"))[str(SHORT)]
    made = {}
    for whole in siblings.cells(siblings.read(FOLDER), read_study(siblings.STUDY).content["questions"])[0]:
        if label(whole) in races:
            cell, rival = shortened(whole, SHORT), BY_BLOCK if whole.kind == "lora" else RACE
            right = torch.tensor(cell.right, dtype=torch.float)
            questions = round(races[label(cell)][rival]["share"] * cell.right.size)
            runs = [{WAY: chosen(right, questions, order)} for order in range(ORDERS)]
            made[label(cell)] = means(cell, runs)
    (FOLDER / "siblings-ucb-e.json").write_text(json.dumps(made, indent=1), "utf-8")


if __name__ == "__main__":
    main()
