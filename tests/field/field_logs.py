"""Logs as each version of lm-eval leaves them: the evaluator's own keys, names and encodings, by its source.

https://github.com/EleutherAI/lm-evaluation-harness, `lm_eval/evaluator.py`, `__main__.py` and
`loggers/evaluation_tracker.py` at the tags v0.4.0, v0.4.2, v0.4.3, v0.4.5, v0.4.7, v0.4.9 and v0.4.13.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATE = "2026-01-26T15-03-11.465269"
TASK = "sums_of_two"
Entry = dict[str, Any]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def document(i: int) -> Entry:
    """Question ``i``, with characters that end a line for `str.splitlines` only."""
    return {
        "question": f"{i} + {i}?\u2028",
        "choices": [f"{2 * i}", f"{2 * i + 1}", "no"],
        "gold": i % 3,
    }


def choices(i: int, right: bool, prompt: str = "Q: ") -> Entry:
    """A logged answer to a question of choices, with every key of 0.4.13."""
    doc = document(i)
    gold = doc["gold"]
    logs = [-5.0 - i / 100] * 3
    logs[gold if right else (gold + 1) % 3] = -0.5
    context = f"{prompt}{doc['question']}"
    return {
        "doc_id": i,
        "doc": doc,
        "target": gold,
        "arguments": [[context, f" {choice}"] for choice in doc["choices"]],
        "resps": [[[log, False]] for log in logs],
        "filtered_resps": [[log, False] for log in logs],
        "filter": "none",
        "metrics": ["acc"],
        "doc_hash": sha(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": sha(context),
        "target_hash": sha(str(gold)),
        "acc": float(right),
    }


def written(i: int, strict: bool, flexible: bool) -> list[Entry]:
    """A logged answer to a question of free text, under two filters."""
    doc = {"question": f"{i} times 3?", "answer": str(3 * i)}
    shared = {
        "doc_id": i,
        "doc": doc,
        "target": doc["answer"],
        "arguments": [[doc["question"], {"until": ["\n"]}]],
        "resps": [[f"It is {3 * i}."]],
        "doc_hash": sha(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": sha(doc["question"]),
        "target_hash": sha(doc["answer"]),
    }
    entries = []
    for name, right in (("strict-match", strict), ("flexible-extract", flexible)):
        more = {"filtered_resps": [str(3 * i) if right else "[invalid]"], "filter": name}
        entries.append({**shared, **more, "metrics": ["exact_match"], "exact_match": float(right)})
    return entries


def _texts(value: Any) -> Any:
    """As lm-eval's `sanitize_list`."""
    return [_texts(each) for each in value] if isinstance(value, list) else str(value)


def before(version: str, other: str) -> bool:
    """Whether a version is older than another."""
    numbers = [tuple(int(part) for part in each.split(".")) for each in (version, other)]
    return numbers[0] < numbers[1]


def as_version(entry: Entry, version: str) -> Entry:
    """The entry as a version of lm-eval writes it."""
    found = dict(entry)
    if before(version, "0.4.7"):
        del found["filter"], found["metrics"]
    if before(version, "0.4.3"):
        for key in ("doc_hash", "prompt_hash", "target_hash"):
            del found[key]
        return found
    found["resps"], found["filtered_resps"] = (
        _texts(entry["resps"]),
        _texts(entry["filtered_resps"]),
    )
    found["arguments"] = {
        f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(request)}
        for i, request in enumerate(entry["arguments"])
    }
    if not before(version, "0.4.9"):
        found["target"] = str(entry["target"])
    return found


def results(name: str, entries: Sequence[Entry], task: str = TASK, **more: Any) -> Entry:
    """A results file's content, as far as readers use it; ``more`` replaces keys."""
    filters = list(dict.fromkeys(entry["filter"] for entry in entries))
    metric = entries[0]["metrics"][0]
    scores = {}
    for chosen in filters:
        values = [entry[metric] for entry in entries if entry["filter"] == chosen]
        if not isinstance(values[0], list):
            scores[f"{metric},{chosen}"] = sum(values) / len(values)
    kind = "generate_until" if "until" in str(entries[0]["arguments"][0][1]) else "multiple_choice"
    config = {"task": task, "output_type": kind, "doc_to_text": "Q: {{question}}", "num_fewshot": 0}
    if len(filters) > 1:
        config["filter_list"] = [{"name": chosen, "filter": []} for chosen in filters]
    content = {
        "results": {task: {"alias": task, **scores}},
        "group_subtasks": {task: []},
        "configs": {task: config},
        "versions": {task: 1.0},
        "n-shot": {task: 0},
        "config": {"model": "hf", "model_args": f"pretrained=lab/{name}"},
    }
    return {**content, **more}


def write(
    folder: Path, version: str, name: str, entries: Sequence[Entry], task: str = TASK, **more: Any
) -> Path:
    """Write a run as a version of lm-eval does; returns what its user would name."""
    lines = [as_version(entry, version) for entry in entries]
    content = results(name, entries, task, **more)
    if before(version, "0.4.3"):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"pretrained__lab__{name}_{task}.jsonl"
        file.write_text(json.dumps(lines, indent=2, ensure_ascii=before(version, "0.4.2")), "utf-8")
        (place / "results.json").write_text(json.dumps(content, indent=2), "utf-8")
        return place
    content["model_name"] = f"lab/{name}"
    place = folder / name / f"lab__{name}"
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    suffix = "json" if version == "0.4.3" else "jsonl"
    (place / f"samples_{task}_{DATE}.{suffix}").write_text(text, "utf-8")
    (place / f"results_{DATE}.json").write_text(json.dumps(content, indent=2), "utf-8")
    return folder / name


def alone(run: Path) -> Path:
    """The run without its results file."""
    for file in run.rglob("*.json"):
        if not file.name.startswith("samples_"):
            file.unlink()
    return run


def zipped(run: Path) -> Path:
    """The run with every file gzipped."""
    for file in [file for file in run.rglob("*") if file.is_file()]:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    return run


def marked(run: Path) -> Path:
    """The run's samples with a byte-order mark and lines that end as on Windows."""
    for file in run.rglob("samples_*"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    return run


def by_output_file(run: Path) -> Path:
    """The run as `--output_path NAME.json` names it; returns the results file."""
    results_file = next(run.rglob("results_*.json"))
    return results_file.rename(results_file.with_name(f"{run.name}_{DATE}.json"))


def samples_file(run: Path) -> Path:
    """The run's file of samples."""
    return next(file for file in run.rglob("*") if "results" not in file.name and file.is_file())
