"""The samples of a finished lm-eval run (``--log_samples``), read and checked; no model is needed for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.utils import apply_template

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.records import (
    DocRecord,
    Prompt,
    check_judge,
    correctness,
    options_of,
    record_of,
    split_judge,
)
from lmeval_dispersion.harness.saving import prompt_manifest

SUFFIX = "_dispersion"

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
_NEEDED = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash")
_SHOWN = 5  # documents named in a message


@dataclass(frozen=True)
class LoggedRun:
    """One run's results file with the samples beside it."""

    file: Path
    results: dict[str, Any]
    samples: dict[str, Path]


@dataclass(frozen=True)
class LoggedDocument:
    """One document as it was asked and judged."""

    record: DocRecord  # whose state is still missing
    prompt: Prompt  # its first request
    logged_answer: float | str  # to it: log-probability or text
    metrics: dict[str, Any]


@dataclass(frozen=True)
class LoggedTask:
    """The samples of one task."""

    name: str
    store_name: str  # as a dispersion run names this task, so that both can be compared
    kind: str  # lm-eval's type of its requests
    documents: list[LoggedDocument]  # in the order of their index
    correct_by: str | None  # the metric that tells correct answers; of several filters, with the filter
    prompts: dict[str, Any]  # what a manifest says of how it asked
    category: str | None  # alias of the group that holds it
    version: Any
    notes: list[str]  # facts that the file does not hold


def find_run(place: str | Path) -> LoggedRun:
    """The run whose results file or folder ``place`` is."""
    path = Path(place).expanduser()
    if not path.exists():
        raise HarnessError(f"{path} does not exist; name the folder that lm-eval's --output_path made")
    files = sorted(path.parent.glob("samples_*.jsonl") if path.is_file() else path.rglob("samples_*.jsonl"))
    runs: dict[tuple[Path, str], dict[str, Path]] = {}
    for file in files:
        if match := _FILE.fullmatch(file.name):
            runs.setdefault((file.parent, match["date"]), {})[match["task"]] = file
    if path.is_file():
        runs = {key: tasks for key, tasks in runs.items() if path.stem.endswith(key[1])}
    if not runs:
        raise HarnessError(
            f"{path} has no samples of lm-eval (samples_TASK_DATE.jsonl); run it with --log_samples and "
            "--output_path"
        )
    results = {
        (folder, date): next(iter(sorted(folder.glob(f"*_{date}.json"))), None) for folder, date in runs
    }
    if len(runs) > 1:
        named = ", ".join(str(file or f"{folder} ({date})") for (folder, date), file in results.items())
        raise HarnessError(f"{path} holds the samples of {len(runs)} runs; name one of them: {named}")
    (folder, date), tasks = next(iter(runs.items()))
    results_file = results[folder, date]
    if results_file is None:
        raise HarnessError(
            f"{folder} has samples of {date} and no results file of that run: it did not finish; run it again"
        )
    return LoggedRun(results_file, _json(results_file.read_text("utf-8"), str(results_file)), tasks)


def read_task(
    run: LoggedRun, task: str, judge: str | None = None, *, allow_holes: bool = False
) -> LoggedTask:
    """The samples of one task, checked against the run's results and against themselves."""
    results, file = run.results, run.samples[task]
    config = (results.get("configs") or {}).get(task)
    if not isinstance(config, dict) or "output_type" not in config:
        raise HarnessError(f"{run.file} has no configuration of task {task!r}; run it with lm-eval 0.4.13")
    template, notes = _template(config.get("doc_to_text")), []
    if template is None and config.get("doc_to_text") is not None:
        notes.append(
            "the prompts come from a function of the task: which part is the query cannot be told, and the "
            "perplexity is that of the whole prompt"
        )
    filters = _documents_by_filter(file, task, config, template)
    count = ((results.get("n-samples") or {}).get(task) or {}).get("effective")
    notes += _holes(file, filters, count, allow_holes)
    first, (named_filter, metric) = next(iter(filters)), split_judge(judge)
    check_judge(task, judge, list(filters), next(iter(filters[first].values())).metrics)
    chosen, by = named_filter or first, None
    for document in filters[chosen].values():
        name, document.record.correct = correctness(document.metrics, metric)
        by = name or by
    kind = str(config["output_type"])
    return LoggedTask(
        name=task,
        store_name=task.removesuffix(SUFFIX) + SUFFIX,
        kind="loglikelihood" if kind == "multiple_choice" else kind,
        documents=[filters[chosen][i] for i in sorted(filters[chosen])],
        correct_by=f"{chosen}/{by}" if by is not None and len(filters) > 1 else by,
        prompts=prompt_manifest(
            config,
            fewshot_seed=(results.get("config") or {}).get("fewshot_seed"),
            chat_template=results.get("chat_template_sha"),
            multiturn=bool(results.get("fewshot_as_multiturn")),
            system=results.get("system_instruction"),
        ),
        category=_category(results, task),
        version=(results.get("versions") or {}).get(task),
        notes=notes,
    )


def _documents_by_filter(
    file: Path, task: str, config: Mapping[str, Any], template: str | None
) -> dict[str, dict[int, LoggedDocument]]:
    """Filter -> index -> document, of all lines of a file of samples."""
    filters: dict[str, dict[int, LoggedDocument]] = {}
    # Not splitlines: lm-eval leaves U+2028 and its like as they are inside a text.
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        sample = _json(line, f"{file}: line {number}")
        missing = [key for key in _NEEDED if key not in sample]
        if missing:
            raise HarnessError(
                f"{file}: line {number} has no {missing[0]!r}: another lm-eval wrote it; this version reads "
                "the samples of 0.4.13 and 0.5.0.dev2"
            )
        document = _document(file, task, config, sample, template)
        documents, doc_id = filters.setdefault(str(sample["filter"]), {}), document.record.doc_id
        if doc_id in documents:
            raise HarnessError(
                f"{file} holds document {doc_id} twice: two runs were written into it; run it again"
            )
        documents[doc_id] = document
    if not filters:
        raise HarnessError(f"{file} is empty; run it again")
    return filters


def _json(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise HarnessError(f"{place} is cut off or no JSON of lm-eval; run it again")
    return value


def _document(
    file: Path, task: str, config: Mapping[str, Any], sample: Mapping[str, Any], template: str | None
) -> LoggedDocument:
    kind = str(config["output_type"])
    doc, doc_id = sample["doc"], int(sample["doc_id"])
    arguments = _arguments(sample["arguments"])
    if not arguments or not arguments[0] or not isinstance(arguments[0][0], str):
        raise HarnessError(f"{file}: document {doc_id} has no prompt as text; log it with --log_samples")
    query = None
    if template is not None and isinstance(doc, dict):
        query = doc[template] if template in doc else apply_template(template, doc)
    prompt = Prompt(arguments[0], query if isinstance(query, str) else None, task)
    record = record_of(
        doc,
        prompt,
        [_answer(answer, kind)[1] for answer in sample["filtered_resps"]],
        doc_id=doc_id,
        correct=math.nan,
        target=_target(sample["target"], kind),
        options=options_of(arguments, kind),
        alias=config.get("task_alias"),
        filter_name=str(sample["filter"]),
    )
    for name in ("doc_hash", "prompt_hash"):
        if sample.get(name, record.columns[name]) != record.columns[name]:
            raise HarnessError(
                f"{file}: document {doc_id} is not the one that was run (its {name} differs): the file was "
                "changed; run it again"
            )
    metrics = {m: sample[m] for m in sample["metrics"] if m in sample and not m.startswith("dispersion")}
    return LoggedDocument(record, prompt, _answer(sample["resps"][0][0], kind)[0], metrics)


def _arguments(logged: Any) -> list[tuple[Any, ...]]:
    """``{"gen_args_0": {"arg_0": …, "arg_1": …}, …}`` as tuples, in order."""
    if not isinstance(logged, dict):
        return [tuple(arguments) for arguments in logged]
    each = [logged[f"gen_args_{i}"] for i in range(len(logged))]
    return [tuple(arguments[f"arg_{j}"] for j in range(len(arguments))) for arguments in each]


def _answer(logged: Any, kind: str) -> tuple[float | str, Any]:
    """A logged answer as its number or text, and as lm-eval had it: numbers are logged as text."""
    if kind == "generate_until":
        return (logged if isinstance(logged, str) else str(logged)), logged
    if isinstance(logged, list):
        value = float(logged[0])
        return value, (value, str(logged[1]) == "True")
    return float(logged), float(logged)


def _target(logged: Any, kind: str) -> Any:
    """The target as the task had it, which lm-eval logs as text; that of a rolling task is the whole text."""
    if kind == "loglikelihood_rolling" or logged in (None, "None"):
        return None
    if kind == "multiple_choice" and isinstance(logged, str) and logged.isdigit():
        return int(logged)
    return logged


def _template(text: Any) -> str | None:
    """The template of a task's query; None for a function, whose source is logged and is not run."""
    is_code = r"\s*(?:@|def |<|functools\.|\S+ = lambda|lambda )"
    return None if not isinstance(text, str) or re.match(is_code, text) else text


def _holes(
    file: Path, filters: Mapping[str, Mapping[int, Any]], count: int | None, allowed: bool
) -> list[str]:
    """A note on documents that are missing, or HarnessError where that is not allowed."""
    present = set().union(*filters.values())
    expected = len(present) if count is None else int(count)
    absent = {i for documents in filters.values() for i in present - set(documents)}
    uneven = bool(absent)
    if len(present) < expected:
        absent |= set(range(expected)) - present
    if not absent:
        return []
    named = ", ".join(map(str, sorted(absent)[:_SHOWN])) + (", …" if len(absent) > _SHOWN else "")
    if uneven or not allowed:
        raise HarnessError(
            f"{file} lacks {len(absent)} of {max(expected, len(present))} documents ({named}); run it "
            "again, or pass --force where they were left out on purpose (--samples)"
        )
    return [f"{len(absent)} of {expected} documents are not in the samples ({named})"]


def _category(results: Mapping[str, Any], task: str) -> str | None:
    """Alias of the group that holds the task directly; lm-eval puts dashes before it, for its table."""
    for group, children in (results.get("group_subtasks") or {}).items():
        if task in children:
            alias = ((results.get("results") or {}).get(group) or {}).get("alias") or group
            return str(alias).lstrip(" -")
    return None
