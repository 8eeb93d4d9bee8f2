"""Small data sets in the layouts that lm-eval's tasks expect: a folder a data set, as it is on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).resolve().parent / "data" / "harness"
LETTERS = list("ABCD")

FACTS = [
    ("What do bees make?", ["honey in the hive", "glass", "paper boats", "iron"], 0),
    ("Which of these is a metal?", ["wood", "copper", "wool", "a slow river"], 1),
    ("When does it snow?", ["in summer", "never", "in winter when it is cold", "at noon"], 2),
    ("What gives light?", ["a stone", "mud", "an old shoe", "the sun"], 3),
    ("Where do fish live?", ["in water", "in trees", "on the moon", "in ovens"], 0),
    ("What is ice?", ["hot air", "frozen water", "sand", "a kind of bread"], 1),
    ("Which animal can fly?", ["a cow", "a snail", "an owl", "a shark"], 2),
    ("What do plants need?", ["noise", "television", "money", "light and water"], 3),
]


def write_all(root: Path) -> None:
    """Write every data set under ``root/ORG/NAME``."""
    excerpts = json.loads((DATA / "excerpts.json").read_text("utf-8"))
    mmlu: dict[str, dict[str, Any]] = {}
    for (subject, split), rows in pd.read_parquet(DATA / "mmlu.parquet").groupby(
        ["subject", "split"]
    ):
        mmlu.setdefault(subject, {})[split] = rows.drop(columns="split").to_dict("records")
    write(root / "cais/mmlu", mmlu)
    questions = [
        {
            "id": f"q{i}",
            "question": q,
            "choices": {"text": c, "label": LETTERS},
            "answerKey": LETTERS[a],
        }
        for i, (q, c, a) in enumerate(FACTS)
    ]
    arc = {"train": questions[:2], "validation": questions[2:4], "test": questions}
    write(root / "allenai/ai2_arc", {"ARC-Easy": arc, "ARC-Challenge": arc})
    endings = [
        {
            "activity_label": "Baking",
            "ctx_a": f"A person asks: {q}",
            "ctx_b": "another one",
            "ctx": f"A person asks: {q} another one",
            "endings": [f"answers that it is {choice}." for choice in c],
            "label": str(a),
        }
        for q, c, a in FACTS
    ]
    write(root / "Rowan/hellaswag", {"default": {"train": endings[:2], "validation": endings}})
    ifeval = [
        {
            "key": i,
            "prompt": f"{q} Answer without any comma.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{"num_words": None}],
        }
        for i, (q, _, _) in enumerate(FACTS)
    ]
    write(root / "google/IFEval", {"default": {"train": ifeval}})
    story = "Anna walked through the garden and thought of many things."
    quail = [
        {"context": story, "question": q, "answers": c, "correct_answer_id": a} for q, c, a in FACTS
    ]
    write(root / "textmachinelab/quail", {"quail": {"train": quail[:3], "validation": quail}})
    write(
        root / "openai/gsm8k",
        {"main": {"train": excerpts["gsm8k"][:6], "test": excerpts["gsm8k"][6:]}},
    )
    truthful = [
        {"question": q} | {f"mc{i}_targets": {"choices": c, "labels": [1, 0, 0, 0]} for i in (1, 2)}
        for q, c, _ in FACTS
    ]
    write(root / "truthfulqa/truthful_qa", {"multiple_choice": {"validation": truthful}})
    write_ten(root)
    write(root / "openai/openai_humaneval", {"openai_humaneval": {"test": excerpts["humaneval"]}})
    pages = [{"page": page} for page in excerpts["wikitext"]]
    wikitext = {"train": pages[:1], "validation": pages[:1], "test": pages}
    write(root / "EleutherAI/wikitext_document_level", {"wikitext-2-raw-v1": wikitext})
    boolq = [
        {"question": f"is {c[a]} the answer", "passage": f"{q} It is {c[0]}.", "label": int(a == 0)}
        for q, c, a in FACTS
    ]
    write(root / "aps/super_glue", {"boolq": {"train": boolq[:2], "validation": boolq}})
    details = [
        {
            "subtask_name": f"mmlu_th_chat.{subject}",
            "input_question": FACTS[i % 8][0],
            "input_choice_list": dict(zip(LETTERS, FACTS[i % 8][1], strict=True)),
            "input_correct_responses": [LETTERS[FACTS[i % 8][2]]],
        }
        for i, subject in enumerate([*mmlu, *mmlu])
    ]
    name = "Llama-3.1-8B-Instruct-evals"
    write(
        root / "meta-llama" / name, {f"{name}__multilingual_mmlu_th__details": {"latest": details}}
    )
    # metabench holds the examples of a prompt in columns of their own.
    example = {
        "prompt": "The _ is sweet.",
        "option1": "honey",
        "option2": "iron",
        "answer": "1",
        "idx": 0,
    }
    shots = {
        f"winogrande_{key}_shot_{i}": value for i in range(1, 6) for key, value in example.items()
    }
    winogrande = [
        {
            "sentence": f"{q} It is _ today.",
            "option1": c[0],
            "option2": c[1],
            "answer": str(1 + a % 2),
        }
        | {**shots, "allfiveshot_longprompt": ""}
        for q, c, a in FACTS
    ]
    write(root / "HCAI/metabench", {"Winogrande": {"primary": winogrande}})


def write_ten(root: Path) -> None:
    """The six data sets of the dispersion-loss paper's ten benchmarks that no other task has."""
    claims = [
        {"premise": f"{q} It is {c[a]}.", "hypothesis": f"It is {c[i % 4]}.", "label": i % 3}
        for i, (q, c, a) in enumerate(FACTS)
    ]
    anli = {f"{split}_r{i}": claims for split in ("train", "dev", "test") for i in (1, 2, 3)}
    write(root / "facebook/anli", {"default": anli})
    sentences = [{"text": f"{q} I think that the answer is {c[a]}"} for q, c, a in FACTS]
    write(root / "EleutherAI/lambada_openai", {"default": {"test": sentences}})
    books = [
        {"question_stem": q, "choices": {"text": c, "label": LETTERS}, "answerKey": LETTERS[a]}
        for q, c, a in FACTS
    ]
    splits = {"train": books[:2], "validation": books[2:4], "test": books}
    write(root / "allenai/openbookqa", {"main": splits})
    goals = [{"goal": q, "sol1": c[a], "sol2": c[a - 1], "label": 0} for q, c, a in FACTS]
    write(root / "baber/piqa", {"default": {"train": goals[:2], "validation": goals}})
    blanks = [
        {"sentence": f"{q} It is _ of course.", "option1": c[a - 1], "option2": c[a], "answer": "2"}
        for q, c, a in FACTS
    ]
    splits = {"train": blanks[:2], "validation": blanks}
    write(root / "allenai/winogrande", {"winogrande_xl": splits})
    exams = [
        {"question": q, "opa": c[0], "opb": c[1], "opc": c[2], "opd": c[3], "cop": a}
        for q, c, a in FACTS
    ]
    splits = {"train": exams[:3], "validation": exams}
    write(root / "openlifescienceai/medmcqa", {"default": splits})


def write(folder: Path, configs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """One data set: parquet files CONFIG/SPLIT-00000-of-00001.parquet and the card that names them."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        (folder / config).mkdir(parents=True, exist_ok=True)
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            pd.DataFrame(rows).to_parquet(
                folder / config / f"{split}-00000-of-00001.parquet", index=False
            )
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
