"""Writes sums as texts, each with whether a model of the demo family finishes it rightly.

python sums.py MODEL OUT.jsonl
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHOWN = "12+30=42. 40-2=38. 7+5=12. "
COUNT = 1000


def main() -> None:
    """Write one JSON object a sum: text, correct, prediction, target, subject (the tens of both numbers)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    pairs = [(a, b) for a in range(50) for b in range(50)]
    pairs = random.Random(0).sample(pairs, COUNT)
    lines = []
    for a, b in pairs:
        text = f"{SHOWN}{a}+{b}="
        answer = continued(model, tokenizer, text)
        correct = float(answer.startswith(f"{a + b}."))
        subject = f"{a // 10}_+{b // 10}_"
        line = {
            "text": text,
            "correct": correct,
            "prediction": answer,
            "target": str(a + b),
            "subject": subject,
        }
        lines.append(json.dumps(line) + "\n")
    args.out.write_text("".join(lines))


def continued(model, tokenizer, text: str) -> str:
    """The three likeliest next tokens, one after the other."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    start = ids.shape[1]
    with torch.inference_mode():
        for _ in range(3):
            following = model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, following.view(1, 1)], dim=1)
    return tokenizer.decode(ids[0, start:].tolist()).strip()


if __name__ == "__main__":
    main()
