"""Makes ``token_sets/answers/*.yaml`` from the tasks' own documents, as `dispersion tokens TASK` does.

    python scripts/answer_sets.py [--list FOLDER_OF_TOKENIZERS]

lm-eval loads the documents: from the Hub, or from folders ORG/NAME in the working directory. `--list` prints
the table of docs/reference/token-sets.md instead, for each FOLDER/NAME/tokenizer.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lmeval_screener.errors import ScreeningError
from lmeval_screener.tokens.answers import load_answers, resolve_answers
from lmeval_screener.tokens.sets import load_token_set
from lmeval_screener.tokens.vocabulary import Vocabulary

from lmeval_dispersion.harness.answers import answer_set, counted_set

FOLDER = Path(__file__).resolve().parent.parent / "token_sets" / "answers"

LETTERS = [
    "mmlu_stem",
    "mmlu_other",
    "mmlu_social_sciences",
    "mmlu_humanities",
    "m_mmlu_*",
    "tinyMMLU",
]
LETTERS += ["mmlu_llama*", "mmlu_*_llama*", "metabench_mmlu*"]
# Name of a set -> lm-eval's names of more tasks with the same answers, and what else the file says.
COUNTED = {
    "gsm8k": (["gsm8k_*", "tinyGSM8k", "metabench_gsm8k*"], {"domain": "math", "licence": "MIT"}),
    "humaneval": (["humaneval_*"], {"domain": "code", "licence": "MIT"}),
    "mmlu": (LETTERS, {"licence": "MIT"}),
}
SENTENCES = "its choices are whole sentences"
REFUSED = {
    "arc": (
        ["arc_easy", "arc_challenge", "tinyArc", "metabench_arc*"],
        "its choices are phrases of too many different words",
    ),
    "hellaswag": (["hellaswag", "tinyHellaswag", "metabench_hellaswag*"], SENTENCES),
    "quail": (["quail"], SENTENCES),
    "truthfulqa": (["truthfulqa_*", "tinyTruthfulQA*", "metabench_truthfulqa*"], SENTENCES),
    "winogrande": (
        ["winogrande", "tinyWinogrande", "metabench_winogrande*"],
        "its answers end a sentence",
    ),
    "ifeval": (["ifeval"], "its answers are free text"),
    "wikitext": (["wikitext"], "it scores whole texts"),
}


def write_all() -> None:
    from lmeval_dispersion.harness.seams import loaded_tasks

    sets = {
        name: {"name": name, "tasks": tasks, "refused": reason}
        for name, (tasks, reason) in REFUSED.items()
    }
    for name, (others, about) in COUNTED.items():
        counted = counted_set(name, [*loaded_tasks(name).values()])
        answers = counted.pop("answers")
        sets[name] = counted | about | {"tasks": counted["tasks"] + others, "answers": answers}
    for name, fields in sets.items():
        made = answer_set(fields)
        made.save(FOLDER / f"{name}.yaml")
        print(made.head)


def table(folder: Path) -> str:
    """The table in Markdown: tokens of each counted set in every tokenizer of the folder."""
    everyday = load_token_set("reference", "reference")
    lines = ["| task | tokenizer | tokens | the most frequent |", "|---|---|---|---|"]
    for name in COUNTED:
        for path in sorted(folder.glob("*/tokenizer.json")):
            try:
                tokens, _ = resolve_answers(
                    load_answers(name), Vocabulary.from_tokenizer_json(path.read_bytes()), everyday
                )
                count, shown = (
                    str(len(tokens)),
                    " ".join(f"`{token.piece}`" for token in tokens[:6]),
                )
            except ScreeningError as error:
                count, shown = error.code, str(error)
            lines.append(f"| {name} | {path.parent.name} | {count} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--list"]:
        print(table(Path(sys.argv[2])))
    else:
        write_all()
