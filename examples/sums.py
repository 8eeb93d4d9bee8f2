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
    texts = [f"{SHOWN}{a}+{b}=" for a, b in pairs]
    lines = []
    for (a, b), text, answer in zip(pairs, texts, continued(model, tokenizer, texts), strict=True):
        line = {
            "text": text,
            "correct": float(answer.startswith(f"{a + b}.")),
            "prediction": answer,
        }
        lines.append(
            json.dumps({**line, "target": str(a + b), "subject": f"{a // 10}_+{b // 10}_"}) + "\n"
        )
    args.out.write_text("".join(lines))


def continued(model, tokenizer, texts: list[str]) -> list[str]:
    """The three likeliest next tokens of every text, one after the other; texts of one length together."""
    ids = [tokenizer(text)["input_ids"] for text in texts]
    answers = [""] * len(texts)
    for length in sorted({len(tokens) for tokens in ids}):
        rows = [row for row, tokens in enumerate(ids) if len(tokens) == length]
        batch = torch.tensor([ids[row] for row in rows])
        with torch.inference_mode():
            for _ in range(3):
                following = model(batch).logits[:, -1].argmax(dim=-1)
                batch = torch.cat([batch, following[:, None]], dim=1)
        for row, tokens in zip(rows, batch[:, length:].tolist(), strict=True):
            answers[row] = tokenizer.decode(tokens).strip()
    return answers


if __name__ == "__main__":
    main()
