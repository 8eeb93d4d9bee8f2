"""The samples of a finished lm-eval run (``--log_samples``), read and checked; no model is needed for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.utils import apply_template, handle_non_serializable, hash_string

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.harness.prompts import PromptShape

SUFFIX = "_dispersion"

_FILE = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
_NEEDED = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash")
_SHOWN = 5  # documents named in a message
_CHOICES = "multiple_choice"
_ROLLING = "loglikelihood_rolling"


@dataclass(frozen=True)
class LoggedRun:
    """One run's results file with the samples beside it."""

    file: Path
    results: dict[str, Any]
    samples: dict[str, Path]


@dataclass(frozen=True)
class LoggedDocument:
    """One document as it was asked and judged, by one filter.

    Attributes:
        doc_id: Index in the task's split.
        doc: The document.
        doc_hash: lm-eval's hash of it, checked.
        prompt_hash: lm-eval's hash of the first prompt, checked.
        target: What the task calls right, as :func:`lmeval_dispersion.harness.records.record_of` takes it.
        arguments: Arguments of each of its requests.
        first: The first request's answer: log-probability or text.
        answers: The filtered answers.
        metrics: lm-eval's metrics of it.
        query: The query as the task renders it; None where a samples file cannot tell.
    """

    doc_id: int
    doc: Any
    doc_hash: str
    prompt_hash: str
    target: Any
    arguments: list[tuple[Any, ...]]
    first: float | str
    answers: list[Any]
    metrics: dict[str, Any]
    query: str | None

    @property
    def continuations(self) -> list[str]:
        """The texts whose log-probabilities were asked for, in order."""
        return [a[1] for a in self.arguments if len(a) > 1 and isinstance(a[1], str)]

    @property
    def several_contexts(self) -> bool:
        """Whether the choices are in the contexts, as in Winogrande."""
        return len({a[0] for a in self.arguments if a[0]}) > 1


@dataclass(frozen=True)
class LoggedTask:
    """The samples of one task.

    Attributes:
        name: lm-eval's name of the task.
        output_type: Kind of its requests.
        filters: Filter -> documents in the order of their index; the same documents for every filter.
        shape: What shaped its prompts.
        category: Alias of the group that holds it.
        alias: The task's own.
        version: Of the task.
        notes: What the file could not tell.
    """

    name: str
    output_type: str
    filters: dict[str, list[LoggedDocument]]
    shape: PromptShape
    category: str | None
    alias: str | None
    version: Any
    notes: list[str]

    @property
    def store_name(self) -> str:
        """The name under which a dispersion run has this task, so that both can be compared."""
        return self.name if self.name.endswith(SUFFIX) else self.name + SUFFIX


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
    results = {key: _results_file(*key) for key in runs}
    if len(runs) > 1:
        named = ", ".join(str(file or f"{folder} ({date})") for (folder, date), file in results.items())
        raise HarnessError(f"{path} holds the samples of {len(runs)} runs; name one of them: {named}")
    (folder, date), tasks = next(iter(runs.items()))
    results_file = results[folder, date]
    if results_file is None:
        raise HarnessError(
            f"{folder} has samples of {date} and no results file of that run: it did not finish; run it again"
        )
    return LoggedRun(results_file, _json(results_file), tasks)


def read_task(run: LoggedRun, task: str, *, allow_holes: bool = False) -> LoggedTask:
    """The samples of one task, checked against the run's results and against themselves."""
    config = (run.results.get("configs") or {}).get(task)
    if not isinstance(config, dict) or "output_type" not in config:
        raise HarnessError(f"{run.file} has no configuration of task {task!r}; run it with lm-eval 0.4.13")
    file, kind = run.samples[task], str(config["output_type"])
    notes: list[str] = []
    template, known = _template(config)
    if not known:
        notes.append(
            "the prompts come from a function of the task: which part is the query cannot be told, and the "
            "perplexity is that of the whole prompt"
        )
    filters: dict[str, dict[int, LoggedDocument]] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        sample = _sample(file, number, line)
        document = _document(file, sample, kind, template)
        of_filter = filters.setdefault(str(sample["filter"]), {})
        if document.doc_id in of_filter:
            raise HarnessError(
                f"{file} holds document {document.doc_id} twice: two runs were written into it; run it again"
            )
        of_filter[document.doc_id] = document
    if not filters:
        raise HarnessError(f"{file} is empty; run it again")
    notes += _holes(run, task, file, filters, allow_holes)
    return LoggedTask(
        name=task,
        output_type=kind,
        filters={name: [documents[i] for i in sorted(documents)] for name, documents in filters.items()},
        shape=_shape(run.results, config),
        category=_category(run.results, task),
        alias=config.get("task_alias"),
        version=(run.results.get("versions") or {}).get(task),
        notes=notes,
    )


def _results_file(folder: Path, date: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"*_{date}.json"))), None)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise HarnessError(f"{file} is not JSON ({error}); run it again") from None
    if not isinstance(value, dict):
        raise HarnessError(f"{file} is no results file of lm-eval")
    return value


def _sample(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise HarnessError(f"{file}: line {number} is cut off or no JSON; run it again") from None
    missing = [key for key in _NEEDED if not isinstance(value, dict) or key not in value]
    if missing:
        raise HarnessError(
            f"{file}: line {number} has no {missing[0]!r}: another lm-eval wrote it; this version reads the "
            "samples of 0.4.13 and 0.5.0.dev2"
        )
    sample: dict[str, Any] = value
    return sample


def _document(file: Path, sample: Mapping[str, Any], kind: str, template: str | None) -> LoggedDocument:
    doc, doc_id = sample["doc"], int(sample["doc_id"])
    arguments = _arguments(sample["arguments"])
    if not arguments or not arguments[0] or not isinstance(arguments[0][0], str):
        raise HarnessError(f"{file}: document {doc_id} has no prompt as text; log it with --log_samples")
    dumped = json.dumps(doc, indent=2, default=handle_non_serializable, ensure_ascii=False)
    hashes = {"doc_hash": hash_string(dumped), "prompt_hash": hash_string(arguments[0][0])}
    for name, value in hashes.items():
        if sample.get(name, value) != value:
            raise HarnessError(
                f"{file}: document {doc_id} is not the one that was run (its {name} differs): the file was "
                "changed; run it again"
            )
    return LoggedDocument(
        doc_id=doc_id,
        doc=doc,
        **hashes,
        target=_target(sample["target"], kind),
        arguments=arguments,
        first=_answer(sample["resps"][0][0], kind)[0],
        answers=[_answer(answer, kind)[1] for answer in sample["filtered_resps"]],
        metrics={m: sample[m] for m in sample["metrics"] if m in sample and not m.startswith("dispersion")},
        query=_query(doc, template),
    )


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
    """The target as the task had it: lm-eval logs ``str()`` of it."""
    if kind == _ROLLING or logged in (None, "None"):
        return None
    if kind == _CHOICES and isinstance(logged, str) and logged.isdigit():
        return int(logged)
    return logged


def _template(config: Mapping[str, Any]) -> tuple[str | None, bool]:
    """The template of a task's query, and whether the samples tell which it is: functions are not run."""
    text = config.get("doc_to_text")
    if not isinstance(text, str):
        return None, text is None
    is_code = re.match(r"\s*(?:@|def |<|functools\.|\S+ = lambda|lambda )", text) is not None
    return (None, False) if is_code else (text, True)


def _query(doc: Any, template: str | None) -> str | None:
    """The query as lm-eval's ``doc_to_text`` renders it."""
    if template is None or not isinstance(doc, dict):
        return None
    query = doc[template] if template in doc else apply_template(template, doc)
    return query if isinstance(query, str) else None


def _holes(
    run: LoggedRun,
    task: str,
    file: Path,
    filters: Mapping[str, Mapping[int, LoggedDocument]],
    allowed: bool,
) -> list[str]:
    """A note on documents that are missing, or HarnessError where that is not allowed."""
    everyone = set().union(*filters.values())
    count = ((run.results.get("n-samples") or {}).get(task) or {}).get("effective")
    expected = int(count) if count is not None else len(everyone)
    absent = {i for documents in filters.values() for i in everyone - set(documents)}
    if len(everyone) < expected:
        absent |= set(range(expected)) - everyone
    if not absent:
        return []
    named = ", ".join(map(str, sorted(absent)[:_SHOWN])) + (", …" if len(absent) > _SHOWN else "")
    if not allowed or any(len(documents) != len(everyone) for documents in filters.values()):
        raise HarnessError(
            f"{file} lacks {len(absent)} of {max(expected, len(everyone))} documents ({named}); run it "
            "again, or pass --force where they were left out on purpose (--samples)"
        )
    return [f"{len(absent)} of {expected} documents are not in the samples ({named})"]


def _shape(results: Mapping[str, Any], config: Mapping[str, Any]) -> PromptShape:
    return PromptShape(
        doc_to_text=config.get("doc_to_text"),
        description=config.get("description"),
        subject=config.get("dataset_name"),
        delimiters=(config.get("target_delimiter"), config.get("fewshot_delimiter")),
        num_fewshot=config.get("num_fewshot"),
        fewshot_seed=(results.get("config") or {}).get("fewshot_seed"),
        chat_template=results.get("chat_template_sha"),
        multiturn=bool(results.get("fewshot_as_multiturn")),
        system=results.get("system_instruction"),
    )


def _category(results: Mapping[str, Any], task: str) -> str | None:
    """Alias of the group that holds the task directly; lm-eval puts dashes before it, for its table."""
    for group, children in (results.get("group_subtasks") or {}).items():
        if task in children:
            alias = ((results.get("results") or {}).get(group) or {}).get("alias") or group
            return str(alias).lstrip(" -")
    return None
