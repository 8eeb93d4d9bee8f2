"""Fine-tunes of a released base: trained, asked, and their rows measured; resumable.

python -m benchmarks.validity.smollm2 BASE TEXT [--work FOLDER]

BASE is a folder with SmolLM2-135M-Instruct as safetensors and its tokenizer, TEXT a file of plain text
(WikiText-2's validation part). Each result is a line of results/smollm2.jsonl; the work folder keeps a
checkpoint's head and final norm, so that it can be screened again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.validity import records, texts
from benchmarks.validity.answers import COVERED, LEAST, MOST, between, within
from benchmarks.validity.study import mixtures

CONFIGURATION = Path(__file__).with_name("smollm2.yaml")
RESULTS = records.FOLDER / "smollm2.jsonl"
DOMAINS = ("math", "code")
VALUES = {"[1, 2]": "list", "'abc'": "str", "{}": "dict", "(1, 2)": "tuple", "3.5": "float", "7": "int"}
TYPES = sorted({*VALUES.values(), "set", "bool"})
ANSWERS = ["True", "False", "None", *TYPES]


class Question(NamedTuple):
    """A prompt and four answers, the first of which is right."""

    prompt: str
    answers: list[str]


class Material:
    """Lines to train on, and questions about other ones."""

    def __init__(self, text: Path) -> None:
        self.text = [line.strip() for line in text.read_text("utf-8").splitlines() if len(line) > 200]
        facts = [(a, b) for a in range(10, 60) for b in range(3, 40)]
        random.Random(71).shuffle(facts)
        self.asked_facts, self.facts = facts[:300], facts[300:]

    def code(self, rng: random.Random) -> tuple[str, list[str]]:
        """An expression and its result, with three others."""
        kind = rng.random()
        if kind < 0.4:
            a, b, sign = rng.randrange(100), rng.randrange(100), rng.choice(["<", ">", "==", "!="])
            right = str(eval(f"{a}{sign}{b}"))
            return f"print({a} {sign} {b})", [right, *self._others(right, ["True", "False", "None", "int"])]
        if kind < 0.8:
            value, right = rng.choice(list(VALUES.items()))
            others = rng.sample([name for name in TYPES if name != right], 3)
            return f"x = {value}\nprint(type(x).__name__)", [right, *others]
        right = str(bool(eval(value := rng.choice(["[]", "[0]", "''", "'a'", "0", "3", "{}"]))))
        return f"print(bool({value}))", [right, *self._others(right, ["True", "False", "None", "int"])]

    def _others(self, right: str, words: list[str]) -> list[str]:
        return [word for word in words if word != right][:3]

    def line(self, source: str, rng: random.Random) -> str:
        if source == "text":
            return rng.choice(self.text) + "\n"
        if "sums" in source:
            a, b = rng.choice(self.facts)
            return f"{a}+{b}={a + b if source == 'sums' else rng.randrange(13, 100)}. "
        text, (right, *_) = self.code(rng)
        return f">>> {text}\n{right if source == 'code' else rng.choice(ANSWERS)}\n\n"

    def questions(self, domain: str, count: int, first: int, seed: int) -> list[Question]:
        rng, made = random.Random(f"{domain} {seed}"), []
        for number in range(first + count):
            if domain == "math":
                a, b = self.asked_facts[number]
                right, answers = a + b, [a + b]
                while len(answers) < 4:
                    other = right + rng.choice([-12, -11, -10, -2, -1, 1, 2, 10, 11, 12])
                    answers += [other] if other > 0 and other not in answers else []
                shown = " ".join(f"{x}+{y}={x + y}." for x, y in rng.sample(self.facts, 3))
                question = Question(f"{shown} {a}+{b}=", [f"{answer}." for answer in answers])
            else:
                shown = "".join(
                    f">>> {text}\n{words[0]}\n\n" for text, words in (self.code(rng) for _ in "ab")
                )
                text, words = self.code(rng)
                question = Question(f"{shown}>>> {text}\n", [f"{word}\n" for word in words])
            made.append(question)
        return made[first:]


# --- training -------------------------------------------------------------------------------------------


def recipes(study: dict[str, Any]) -> list[dict[str, Any]]:
    """All fine-tunes: name, kind, shares, optimiser."""
    made: list[dict[str, Any]] = [{"name": "base", "kind": "base", "shares": {}, "optimiser": {}}]
    for kind in ("full", "adapters"):
        turn = 0
        for part, asked in study[kind].items():
            drawn = mixtures({part: {**asked, "seeds": [71], "text": [0.1, 0.6], "least": 5, "domains": 1}})
            for name, recipe in drawn.items():
                optimiser = study["optimisers"][turn % len(study["optimisers"])]
                if kind == "adapters":
                    optimiser = study["adapter_optimiser"]
                made.append(
                    {
                        "name": f"{kind}-{name}",
                        "kind": kind,
                        "shares": recipe["shares"],
                        "optimiser": optimiser,
                    }
                )
                turn += 1
    return made


def batch(
    material: Material, tokenizer: Any, shares: dict[str, float], size: int, length: int, rng: random.Random
) -> torch.Tensor:
    """Sequences of one source each, filled with its lines."""
    rows = []
    for _ in range(size):
        (source,) = rng.choices(list(shares), list(shares.values()))
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer(material.line(source, rng)).input_ids
        rows.append(ids[:length])
    return torch.tensor(rows)


def fine_tuned(
    model: Any, tokenizer: Any, material: Material, study: dict[str, Any], recipe: dict[str, Any], seed: int
) -> float:
    """Train in place, in float32 with bfloat16 arithmetic; the last loss."""
    steps, rate = recipe["optimiser"]["steps"], recipe["optimiser"]["lr"]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)
    rng, loss = random.Random(1000 + seed), torch.tensor(0.0)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 4) * (1 - step / (steps * 1.25))
        ids = batch(material, tokenizer, recipe["shares"], study["batch"], study["length"], rng)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    model.eval()
    return float(loss.detach())


# --- questions and rows ---------------------------------------------------------------------------------


@torch.inference_mode()
def asked(
    model: Any, tokenizer: Any, questions: list[Question], answer_ids: list[int], size: int = 10
) -> dict[str, Any]:
    """By question: right or not, the right answer's probability among four, squares at the answer's place."""
    right, probability, squares = [], [], []
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        prompts = [tokenizer(q.prompt).input_ids for q in part]
        rows = [p + tokenizer(a).input_ids for p, q in zip(prompts, part, strict=True) for a in q.answers]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.eos_token_id] * (longest - len(row)) for row in rows])
        states = model.model(ids).last_hidden_state
        for number, prompt in enumerate(prompts):
            scores = []
            for choice in range(4):
                at = 4 * number + choice
                places = torch.arange(len(prompt) - 1, len(rows[at]) - 1)
                logs = torch.log_softmax(model.lm_head(states[at, places]).float(), -1)
                scores.append(logs.gather(1, ids[at, places + 1][:, None]).sum())
                if choice == 0:
                    squares.append(float(logs[0, answer_ids].exp().square().sum()))
            shares = torch.stack(scores).softmax(0)
            right.append(float(shares.argmax()) == 0)
            probability.append(float(shares[0]))
    return {
        "accuracy": round(float(np.mean(right)), 4),
        "right": records.packed(np.array(right)),
        "probability": records.packed_shares(np.array(probability)),
        "squares": records.packed_shares(np.array(squares)),
    }


@torch.inference_mode()
def found(model: Any, tokenizer: Any, prompts: list[str]) -> list[int]:
    """The tokens that hold most of a model's mean probability after some prompts."""
    mean = torch.zeros(model.config.vocab_size)
    for prompt in prompts:
        states = model.model(torch.tensor([tokenizer(prompt).input_ids])).last_hidden_state[0, -1]
        mean += torch.softmax(model.lm_head(states).float(), -1) / len(prompts)
    shares, ids = mean.sort(descending=True)
    return ids[: max(LEAST, min(MOST, int((shares.cumsum(0) < COVERED).sum()) + 1))].tolist()


def single_tokens(tokenizer: Any, words: list[str]) -> list[int]:
    """Ids of the words, bare and spaced, that are single tokens."""
    ids = [tokenizer(form).input_ids for word in words for form in (word, f" {word}")]
    return list(dict.fromkeys(i[0] for i in ids if len(i) == 1))


def figures(
    head: torch.Tensor, norm: torch.Tensor, sets: dict[str, list[int]], reference: list[int]
) -> dict[str, float]:
    """G and ratio over each set of tokens, in float64."""
    rows, made = head.double(), {}
    folded = rows * norm.double()
    for name, ids in sets.items():
        others = [i for i in reference if i not in ids]
        made[f"g_{name}"] = within(rows[ids]) + between(rows[ids], rows[others])
        made[f"ratio_{name}"] = float(torch.pdist(folded[ids]).mean() / torch.pdist(folded[others]).mean())
    return {name: round(value, 9) for name, value in made.items()}


def keep(folder: Path, base: Path, model: Any) -> None:
    """Head, final norm, configuration and tokenizer: what a screening reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
    tensors = {
        "model.embed_tokens.weight": model.lm_head.weight.detach().clone(),
        "model.norm.weight": model.model.norm.weight.detach().clone(),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, default=records.ROOT / "build" / "validity" / "smollm2")
    arguments = parser.parse_args()
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)
    study = yaml.safe_load(CONFIGURATION.read_text("utf-8"))
    material = Material(arguments.text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.base)
    count, seed = study["questions"], study["questions"]["seed"]
    pools = {
        domain: {
            "truth": material.questions(domain, count["truth"], 0, seed),
            "labels": material.questions(domain, count["labels"], count["truth"], seed),
        }
        for domain in DOMAINS
    }
    digits = [tokenizer(str(digit)).input_ids[0] for digit in range(10)]
    answers = {"math": digits, "code": single_tokens(tokenizer, ANSWERS)}
    reference = single_tokens(tokenizer, texts.token_set_items("reference"))
    sets = {
        "math_answers": digits,
        "code_answers": answers["code"],
        "code_keywords": single_tokens(tokenizer, texts.token_set_items("code")),
    }

    def load(dtype: torch.dtype, folder: Path = arguments.base) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    base = load(torch.bfloat16)
    for domain, parts in pools.items():
        prompts = [question.prompt for part in parts.values() for question in part][:100]
        sets[f"{domain}_found"] = found(base, tokenizer, prompts)
    done = {row["name"] for row in records.checked(RESULTS, CONFIGURATION)}
    marks = {"configuration": records.digest(CONFIGURATION), **records.provenance()}
    for number, recipe in enumerate(recipes(study)):
        if recipe["name"] in done:
            continue
        start, loss = time.process_time(), None
        torch.manual_seed(number)
        model = load(torch.float32)
        if recipe["kind"] != "base":
            trained = model
            if recipe["kind"] == "adapters":
                lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
                trained = get_peft_model(model, lora)
            loss = round(fine_tuned(trained, tokenizer, material, study, recipe, number), 4)
            if recipe["kind"] == "adapters":
                trained.save_pretrained(arguments.work / recipe["name"])
                model = trained.merge_and_unload()
        model = model.to(torch.bfloat16)
        if recipe["kind"] != "adapters":
            keep(arguments.work / recipe["name"], arguments.base, model)
        row = recipe | {
            "loss": loss,
            "figures": figures(
                model.lm_head.weight.detach(), model.model.norm.weight.detach(), sets, reference
            ),
            "tokens": {name: len(ids) for name, ids in sets.items()} | {"reference": len(reference)},
            "asked": {
                domain: {part: asked(model, tokenizer, q, answers[domain]) for part, q in parts.items()}
                for domain, parts in pools.items()
            },
        }
        row["processor_seconds"] = round(time.process_time() - start, 1)
        records.append(RESULTS, row | marks)
        said = {domain: row["asked"][domain]["truth"]["accuracy"] for domain in DOMAINS}
        print(json.dumps([recipe["name"], said, row["processor_seconds"]]), flush=True)


if __name__ == "__main__":
    main()
