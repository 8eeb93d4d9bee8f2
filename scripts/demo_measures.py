"""The demo family's accuracy, measured again."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import torch
from demo_answers import OPERANDS, held_out_pairs
from tokenizers import Tokenizer
from torch.nn.functional import log_softmax
from transformers import LlamaForCausalLM


class Accuracy(NamedTuple):
    """Share of questions answered right, its binomial standard error, and their number."""

    mean: float
    se: float
    questions: int


@torch.inference_mode()
def addition_accuracy(
    model: LlamaForCausalLM, tokenizer: Tokenizer, questions: int = 1000, seed: int = 0
) -> Accuracy:
    """Share of held-out sums for which the right answer is the likeliest of four.

    Three right sums are shown first. The four answers are steps of 1, 2 and 10 apart in random order; which
    of them is the right one is drawn evenly, and so is the right sum. Guessing gives 0.25. Taking the answer
    that is commonest among all sums gives 0.31: the sums asked lie within 13..85, the false answers within
    0..98. An answer's likelihood is that of its digits and the full stop behind them.
    """
    rng, held_out = random.Random(seed), held_out_pairs()
    every = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)]
    asked: dict[int, list[tuple[int, int]]] = {}
    for a, b in every:
        if (
            frozenset((a, b)) in held_out and 13 <= a + b <= 2 * OPERANDS - 15
        ):  # all four are possible sums
            asked.setdefault(a + b, []).append((a, b))
    sums = sorted(asked)
    trained = [(a, b) for a, b in every if frozenset((a, b)) not in held_out]
    device = next(model.parameters()).device
    right = 0
    for start in range(0, questions, 100):
        rows, spans = [], []
        for _ in range(min(100, questions - start)):
            shown = [f"{a}+{b}={a + b}." for a, b in rng.choices(trained, k=3)]
            a, b = rng.choice(asked[rng.choice(sums)])
            ladder = [0, *itertools.accumulate(rng.sample((1, 2, 10), 3))]
            rung = rng.randrange(4)
            offsets = [step - ladder[rung] for step in ladder]
            offsets[0], offsets[rung] = offsets[rung], offsets[0]  # the right answer comes first
            prompt = tokenizer.encode(f"<s>{' '.join(shown)} {a}+{b}=").ids
            for offset in offsets:
                ids = tokenizer.encode(f"{a + b + offset}.").ids
                rows.append(prompt + ids)
                spans.append((len(prompt), len(prompt) + len(ids)))
        width = max(map(len, rows))
        batch = torch.tensor([row + [2] * (width - len(row)) for row in rows], device=device)
        logs = log_softmax(model(input_ids=batch, use_cache=False).logits.float(), -1)
        picked = logs[:, :-1].gather(-1, batch[:, 1:, None])[..., 0].cpu()
        scores = torch.stack([picked[i, a - 1 : b - 1].sum() for i, (a, b) in enumerate(spans)])
        right += int((scores.view(-1, 4).argmax(1) == 0).sum())
    mean = right / questions
    return Accuracy(mean, math.sqrt(mean * (1 - mean) / questions), questions)
