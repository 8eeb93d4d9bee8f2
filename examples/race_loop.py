"""Trains a model in a plain loop, and races its saves while it trains.

python race_loop.py MODEL RUN
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmeval_dispersion import RaceCallback

STEPS = 40
EVERY = 10


def main() -> None:
    """Train, save and ask; no evaluation loads a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    race = RaceCallback(
        "sums",
        questions=100,
        include_path="tasks",
        batch_size=16,
        run=args.run,
        tokenizer=tokenizer,
    )
    draw = random.Random(0)
    for step in range(1, STEPS + 1):
        texts = []
        for _ in range(8):
            pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(9)]
            text = " ".join(f"{a}+{b}={a + b}." for a, b in pairs)
            texts.append(tokenizer(text)["input_ids"][:40])
        batch = torch.tensor(texts)
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            folder = args.run / f"checkpoint-{step}"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            figures = race.ask(model, step)
            print(f"step {step}: {figures['race/score']:.2f}, best {figures['race/best_step']:.0f}")


if __name__ == "__main__":
    main()
