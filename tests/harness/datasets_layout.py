"""Small data sets in the layouts that lm-eval's tasks expect: a folder a data set, as it is on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).resolve().parent.parent / "data" / "harness"
LANGUAGES = ("de", "es", "fr", "hi", "it", "pt")
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
ARC_ROWS: list[dict[str, Any]] = [
    {"id": f"q{i}", "question": q, "choices": {"text": c, "label": LETTERS}, "answerKey": LETTERS[a]}
    for i, (q, c, a) in enumerate(FACTS)
]
HELLASWAG_ROWS: list[dict[str, Any]] = [
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
TRUTHFUL_ROWS = [
    {"question": q} | {f"mc{i}_targets": {"choices": c, "labels": [1, 0, 0, 0]} for i in (1, 2)}
    for q, c, _ in FACTS
]


def write_all(root: Path) -> None:
    """Write every data set under ``root/ORG/NAME``."""
    excerpts = json.loads((DATA / "excerpts.json").read_text("utf-8"))
    mmlu: dict[str, dict[str, Any]] = {}
    for (subject, split), rows in pd.read_parquet(DATA / "mmlu.parquet").groupby(["subject", "split"]):
        mmlu.setdefault(subject, {})[split] = rows.drop(columns="split").to_dict("records")
    write(root / "cais/mmlu", mmlu)
    arc = {"train": ARC_ROWS[:2], "validation": ARC_ROWS[2:4], "test": ARC_ROWS}
    write(root / "allenai/ai2_arc", {"ARC-Easy": arc, "ARC-Challenge": arc})
    hellaswag = {"train": HELLASWAG_ROWS[:2], "validation": HELLASWAG_ROWS}
    write(root / "Rowan/hellaswag", {"default": hellaswag})
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
    quail = [{"context": story, "question": q, "answers": c, "correct_answer_id": a} for q, c, a in FACTS]
    write(root / "textmachinelab/quail", {"quail": {"train": quail[:3], "validation": quail}})
    write(root / "openai/gsm8k", {"main": {"train": excerpts["gsm8k"][:6], "test": excerpts["gsm8k"][6:]}})
    write(root / "truthfulqa/truthful_qa", {"multiple_choice": {"validation": TRUTHFUL_ROWS}})
    write(root / "openai/openai_humaneval", {"openai_humaneval": {"test": excerpts["humaneval"]}})
    pages = [{"page": page} for page in excerpts["wikitext"]]
    wikitext = {"train": pages[:1], "validation": pages[:1], "test": pages}
    write(root / "EleutherAI/wikitext_document_level", {"wikitext-2-raw-v1": wikitext})
    boolq = [
        {"question": f"is {c[a]} the answer", "passage": f"{q} It is {c[0]}.", "label": int(a == 0)}
        for q, c, a in FACTS
    ]
    write(root / "aps/super_glue", {"boolq": {"train": boolq[:2], "validation": boolq}})
    m_mmlu = [
        {"instruction": q, "answer": LETTERS[a]}
        | {f"option_{k}": choice for k, choice in zip("abcd", c, strict=True)}
        for q, c, a in FACTS
    ]
    write(root / "alexandrainst/m_mmlu", {lang: {"train": m_mmlu[:5], "test": m_mmlu} for lang in LANGUAGES})
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
    write(root / "meta-llama" / name, {f"{name}__multilingual_mmlu_th__details": {"latest": details}})

    tiny = [
        {
            "question": q,
            "subject": "anatomy",
            "choices": c,
            "answer": a,
            "input_formatted": f"{q}\n{c}\nAnswer:",
        }
        for q, c, a in FACTS
    ]
    write(root / "tinyBenchmarks/tinyMMLU", {"all": {"test": tiny, "dev": tiny[:2]}})
    write(root / "tinyBenchmarks/tinyAI2_arc", {"ARC-Challenge": arc})
    write(root / "tinyBenchmarks/tinyHellaswag", {"default": hellaswag})
    splits = {name: {"primary": rows[:6], "secondary": rows[4:]} for name, rows in metabench().items()}
    write(root / "HCAI/metabench", splits)


def metabench() -> dict[str, list[dict[str, Any]]]:
    """Rows of metabench, which holds the examples of every prompt in columns of their own."""

    def shots(count: str, numbers: int, kind: str, **columns: Any) -> dict[str, Any]:
        examples = {f"{kind}_{k}_shot_{i}": v for i in range(1, numbers + 1) for k, v in columns.items()}
        return {**examples, f"all{count}shot_longprompt": ""}

    q, c, a = FACTS[0]
    arc = shots("twentyfive", 25, "arc", question=q, answerKey="A", choices=ARC_ROWS[0]["choices"], idx=0)
    gsm8k = shots("five", 5, "gsm8k", prompt=q, answer="It is 2. #### 2", idx=0)
    origin = {"activity_labels": "Baking", "ind": 0, "source_id": "s", "split": "v", "split_type": "i"}
    hellaswag = shots("ten", 10, "hellaswag", **{**HELLASWAG_ROWS[0], **origin})
    mmlu = shots("five", 5, "mmlu", question=q, choices=c, answers=a, ind=0)
    options = {"option1": "honey", "option2": "iron"}
    winogrande = shots("five", 5, "winogrande", prompt="The _ is sweet.", idx=0, answer="1", **options)
    return {
        "ARC": [row | arc for row in ARC_ROWS],
        "GSM8K": [
            {"question": q, "answer": f"It is {i}. #### {i}", **gsm8k} for i, (q, _, _) in enumerate(FACTS)
        ],
        "HellaSwag": [row | hellaswag for row in HELLASWAG_ROWS],
        "MMLU": [
            {"question": q, "subject": "anatomy", "choices": c, "answer": a, **mmlu} for q, c, a in FACTS
        ],
        "TruthfulQA": TRUTHFUL_ROWS,
        "Winogrande": [
            {"sentence": f"{q} It is _ today.", "option1": c[0], "option2": c[1], "answer": str(1 + a % 2)}
            | winogrande
            for q, c, a in FACTS
        ],
    }


def write(folder: Path, configs: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """One data set: parquet files CONFIG/SPLIT-00000-of-00001.parquet and the card that names them."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        (folder / config).mkdir(parents=True, exist_ok=True)
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            pd.DataFrame(rows).to_parquet(folder / config / f"{split}-00000-of-00001.parquet", index=False)
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
