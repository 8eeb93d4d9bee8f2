"""Read which of GSM8K's questions released models answered right, from ZeroEval's results.

    python scripts/released_answers.py ZEROEVAL gsm8k_test.jsonl

ZEROEVAL is a clone of https://github.com/WildEval/ZeroEval (Apache-2.0), the other file GSM8K's test split.
`gsm8k.npz` holds the models that answered every question (`names`), whether they were right (`right`, packed
bits, (models, bytes)), and the number of `questions`. An answer is right where the first number of its last
"answer" field is the reference's.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

from lmeval_dispersion.installation import data_folder

FIELD = re.compile(r'"answer"\s*:\s*("(?:[^"\\]|\\.)*"|[^,}\n]+)')
NUMBER = re.compile(r"-?\d+\.?\d*")


def numbers(text: str) -> list[float]:
    """All numbers of a text, without thousands' commas."""
    return [float(number) for number in NUMBER.findall(text.replace(",", "").replace("$", ""))]


def is_right(output: str, reference: float) -> bool:
    """Whether a model's output has the reference as its answer."""
    fields = FIELD.findall(output)
    answer = numbers(fields[-1]) if fields else []
    return bool(answer) and abs(answer[0] - reference) < 1e-6


def right_answers(file: Path, references: list[float]) -> np.ndarray | None:
    """Of one model, (questions,); None where a question is missing."""
    right = np.full(len(references), np.nan)
    for sample in json.loads(file.read_text("utf-8")):
        number = int(sample["session_id"].rpartition("#")[2])
        output = sample["output"]
        text = output[0] if isinstance(output, list) else output
        right[number] = is_right(text, references[number])
    return None if np.isnan(right).any() else right.astype(bool)


def main() -> None:
    clone, test = map(Path, sys.argv[1:3])
    lines = test.read_text("utf-8").splitlines()
    references = [numbers(json.loads(line)["answer"].rpartition("####")[2])[-1] for line in lines]
    found = {}
    for file in sorted((clone / "result_dirs" / "gsm").glob("*.json")):
        right = right_answers(file, references)
        if right is not None:
            found[file.stem] = right
    np.savez_compressed(
        data_folder("released") / "gsm8k.npz",
        names=np.array(list(found)),
        right=np.packbits(list(found.values()), axis=1),
        questions=np.array(len(references)),
    )


if __name__ == "__main__":
    main()
