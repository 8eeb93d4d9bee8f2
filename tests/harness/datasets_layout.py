"""Small data sets in the layouts that lm-eval's tasks expect: a folder a data set, as it is on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).resolve().parent.parent / "data" / "harness"
LANGUAGES = ("de", "es", "fr", "hi", "it", "pt")

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
    mmlu = pd.read_parquet(DATA / "mmlu.parquet")
    subjects = sorted(mmlu["subject"].unique())
    write(
        root / "cais/mmlu",
        {
            subject: {
                split: mmlu[(mmlu["subject"] == subject) & (mmlu["split"] == split)]
                .drop(columns="split")
                .to_dict("records")
                for split in ("test", "dev")
            }
            for subject in subjects
        },
    )
    letters = list("ABCD")
    arc = [
        {"id": f"q{i}", "question": q, "choices": {"text": c, "label": letters}, "answerKey": letters[a]}
        for i, (q, c, a) in enumerate(FACTS)
    ]
    parts = {"train": arc[:2], "validation": arc[2:4], "test": arc}
    write(root / "allenai/ai2_arc", {"ARC-Easy": parts, "ARC-Challenge": parts})
    hellaswag = [
        {
            "ind": i,
            "activity_label": "Baking",
            "ctx_a": f"A person asks: {q}",
            "ctx_b": "another one",
            "ctx": f"A person asks: {q} another one",
            "endings": [f"answers that it is {choice}." for choice in c],
            "source_id": f"s{i}",
            "split": "val",
            "split_type": "indomain",
            "label": str(a),
        }
        for i, (q, c, a) in enumerate(FACTS)
    ]
    write(root / "Rowan/hellaswag", {"default": {"train": hellaswag[:2], "validation": hellaswag}})
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
    quail = [
        {
            "id": f"f{i}",
            "context_id": "f0",
            "question_id": str(i),
            "domain": "fiction",
            "metadata": {"author": "a", "title": "t", "url": "u"},
            "context": "Anna walked through the garden and thought of many things.",
            "question": q,
            "question_type": "Factual",
            "answers": c,
            "correct_answer_id": a,
        }
        for i, (q, c, a) in enumerate(FACTS)
    ]
    write(root / "textmachinelab/quail", {"quail": {"train": quail[:3], "validation": quail}})
    write(root / "openai/gsm8k", {"main": {"train": excerpts["gsm8k"][:6], "test": excerpts["gsm8k"][6:]}})
    truthful = [
        {
            "question": q,
            "mc1_targets": {"choices": c, "labels": [1, 0, 0, 0]},
            "mc2_targets": {"choices": c, "labels": [1, 0, 0, 0]},
        }
        for q, c, _ in FACTS
    ]
    write(root / "truthfulqa/truthful_qa", {"multiple_choice": {"validation": truthful}})
    write(root / "openai/openai_humaneval", {"openai_humaneval": {"test": excerpts["humaneval"]}})
    pages = [{"page": page} for page in excerpts["wikitext"]]
    write(
        root / "EleutherAI/wikitext_document_level",
        {"wikitext-2-raw-v1": {"train": pages[:1], "validation": pages[:1], "test": pages}},
    )
    boolq = [
        {"question": f"is {c[a]} the answer", "passage": f"{q} It is {c[0]}.", "idx": i, "label": int(a == 0)}
        for i, (q, c, a) in enumerate(FACTS)
    ]
    write(root / "aps/super_glue", {"boolq": {"train": boolq[:2], "validation": boolq}})
    m_mmlu = [
        {
            "id": f"anatomy/test/{i}",
            "instruction": q,
            **{f"option_{k}": choice for k, choice in zip("abcd", c, strict=True)},
            "answer": letters[a],
        }
        for i, (q, c, a) in enumerate(FACTS)
    ]
    write(root / "alexandrainst/m_mmlu", {lang: {"train": m_mmlu[:5], "test": m_mmlu} for lang in LANGUAGES})
    write_sparse(root, arc, hellaswag)
    details = [
        {
            "subtask_name": f"mmlu_th_chat.{subject}",
            "input_question": FACTS[i % 8][0],
            "input_choice_list": dict(zip(letters, FACTS[i % 8][1], strict=True)),
            "input_correct_responses": [letters[FACTS[i % 8][2]]],
        }
        for i, subject in enumerate(subjects * 2)
    ]
    write(
        root / "meta-llama/Llama-3.1-8B-Instruct-evals",
        {"Llama-3.1-8B-Instruct-evals__multilingual_mmlu_th__details": {"latest": details}},
    )


def write_sparse(root: Path, arc: list[dict[str, Any]], hellaswag: list[dict[str, Any]]) -> None:
    """tinyBenchmarks and metabench, which holds the examples of every prompt in columns of their own."""
    letters = list("ABCD")
    tiny_mmlu = [
        {
            "question": q,
            "subject": "anatomy",
            "choices": c,
            "answer": a,
            "input_formatted": f"{q}\n{' '.join(c)}\nAnswer:",
        }
        for q, c, a in FACTS
    ]
    write(root / "tinyBenchmarks/tinyMMLU", {"all": {"test": tiny_mmlu, "dev": tiny_mmlu[:2]}})
    parts = {"train": arc[:3], "validation": arc[2:4], "test": arc}
    write(root / "tinyBenchmarks/tinyAI2_arc", {"ARC-Challenge": parts})
    parts = {"train": hellaswag[:2], "validation": hellaswag}
    write(root / "tinyBenchmarks/tinyHellaswag", {"default": parts})

    def shots(count: int, columns: dict[str, Any], **long: str) -> dict[str, Any]:
        return {f"{name}_shot_{i}": v for i in range(1, count + 1) for name, v in columns.items()} | long

    q, c, a = FACTS[0]
    choices = {"text": c, "label": letters}
    of_arc = {"arc_question": q, "arc_answerKey": "A", "arc_choices": choices, "arc_idx": 0}
    of_gsm8k = {"gsm8k_prompt": q, "gsm8k_answer": "It is 2. #### 2", "gsm8k_idx": 0}
    of_hellaswag = {
        **{f"hellaswag_{name}": hellaswag[0][name] for name in ("ctx_a", "ctx_b", "ctx", "endings", "label")},
        **{"hellaswag_activity_labels": "Baking", "hellaswag_ind": 0, "hellaswag_source_id": "s"},
        **{"hellaswag_split": "val", "hellaswag_split_type": "indomain"},
    }
    of_mmlu = {"mmlu_question": q, "mmlu_choices": c, "mmlu_answers": a, "mmlu_ind": 0}
    of_winogrande = {"winogrande_prompt": "The _ is sweet.", "winogrande_idx": 0, "winogrande_answer": "1"}
    of_winogrande |= {"winogrande_option1": "honey", "winogrande_option2": "iron"}
    rows = {
        "ARC": [one | shots(25, of_arc, alltwentyfiveshot_longprompt="") for one in arc],
        "GSM8K": [
            {"question": q, "answer": f"It is {i}. #### {i}", **shots(5, of_gsm8k, allfiveshot_longprompt="")}
            for i, (q, _, _) in enumerate(FACTS)
        ],
        "HellaSwag": [one | shots(10, of_hellaswag, alltenshot_longprompt="") for one in hellaswag],
        "MMLU": [
            {"question": q, "subject": "anatomy", "choices": c, "answer": a}
            | shots(5, of_mmlu, allfiveshot_longprompt="")
            for q, c, a in FACTS
        ],
        "TruthfulQA": [
            {"question": q, "mc1_targets": {"choices": c, "labels": [1, 0, 0, 0]}} for q, c, _ in FACTS
        ],
        "Winogrande": [
            {"sentence": f"{q} It is _ today.", "option1": c[0], "option2": c[1], "answer": str(1 + a % 2)}
            | shots(5, of_winogrande, allfiveshot_longprompt="")
            for q, c, a in FACTS
        ],
    }
    splits = {name: {"primary": some[:6], "secondary": some[4:]} for name, some in rows.items()}
    write(root / "HCAI/metabench", splits)


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
