"""lm-eval's logs on disk, by any version since 0.4.0: which files are one run, and the lines of its samples.

Forms: ``MODEL_TASK.jsonl``, one array, next to ``results.json`` (to 0.4.2); ``samples_TASK_DATE.json`` or
``.jsonl``, a line per document, without names of filters and metrics before 0.4.7; ``NAME_DATE.json`` as
results; any of them gzipped, or without results. Standard library alone; logs of Inspect take their form
(:mod:`~lmeval_dispersion.inspect_logs`).
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lmeval_dispersion.errors import HarnessError
from lmeval_dispersion.inspect_logs import (
    SUFFIX,
    finished,
    is_inspect_log,
    read_header,
    read_judgements,
)
from lmeval_dispersion.model_args import key_values

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_DATE = r"\d{4}-\d\d-\d\dT\d\d[-:]\d\d[-:]\d\d(?:\.\d+)?"
_SAMPLES = re.compile(rf"samples_(?P<task>.+?)(?:_(?P<date>{_DATE}))?")
_DATED = re.compile(rf"(?P<name>.*)_(?P<date>{_DATE})")
_FIRST_KEY = re.compile(rb'"(doc_id|results)"\s*:')
# Keys of a line other than metrics.
_KEYS = frozenset(
    {
        "doc_id",
        "doc",
        "target",
        "arguments",
        "resps",
        "filtered_resps",
        "filter",
        "metrics",
        "doc_hash",
        "prompt_hash",
        "target_hash",
        "block",
    }
)
# Parts of the results -> what they are objects of.
_SECTIONS: dict[str, type] = {
    "results": dict,
    "configs": dict,
    "group_subtasks": list,
    "n-samples": dict,
    "versions": object,
    "n-shot": object,
    "config": object,
    "task_hashes": object,
}
_KINDS: dict[type, str] = {dict: "objects", list: "lists"}
_BOM = "\ufeff"
_SNIFFED = 1 << 16  # bytes that show what a file holds
_LONGEST_LINE = 1 << 28  # bytes of one document
_LARGEST = 1 << 31  # bytes of a file that is read in one piece: results, or an array of samples
_MOST_LINES = 20_000_000
_MOST_ID = 1 << 53
_NAMED = 5  # most runs in a message

Results = dict[str, Any]


@dataclass(frozen=True)
class LoggedRun:
    """One evaluation of one model: its results, and by task the file of its samples.

    Attributes:
        file: The results file; without results, the folder or file that was named.
        results: Its content; empty without results.
        samples: Task -> file.
        apart: Task -> results of that task, where other tasks of the model were evaluated at another time.
    """

    file: Path
    results: Results
    samples: dict[str, Path]
    apart: Mapping[str, Results] = field(default_factory=dict)

    def results_of(self, task: str) -> Results:
        """The results that belong to a task's samples."""
        return self.apart.get(task, self.results)

    @property
    def by_inspect(self) -> bool:
        """Whether Inspect wrote it: the results have no scores then."""
        return "inspect" in self.results

    @property
    def model(self) -> str:
        """The model's name, by the results, else by the path."""
        return model_of(self.results) or name_of(self.file, self.samples.values())

    @property
    def date(self) -> str:
        """When the run was written, by its files' names; empty if they do not say."""
        if self.by_inspect:
            return str(self.results["inspect"]["created"])
        dates = [_date(file) for file in (self.file, *self.samples.values())]
        return max(dates)


@dataclass(frozen=True)
class Line:
    """One logged document under one filter.

    Attributes:
        place: The file and the line, which begin a message.
        filter: None in the samples of lm-eval before 0.4.7.
        metrics: Name -> value as logged.
        digest: Equal for equal lines.
    """

    place: str
    number: int
    doc_id: int
    content: Mapping[str, Any]
    filter: str | None
    metrics: dict[str, Any]
    digest: int


# --- runs --------------------------------------------------------------------------------------------------


def is_log(path: Path) -> bool:
    """Whether a path holds results or samples of lm-eval, or logs of Inspect."""
    if path.is_file():
        return bool(kind_of(path))
    return path.is_dir() and bool(_sample_files(path))


def find_run(place: str | Path) -> LoggedRun:
    """The run in a folder, or of this file of results or samples.

    Tasks that one model answered at several times are one run.

    Raises:
        HarnessError: There is no run, or the folder holds several of the same task or of several models.
    """
    path = Path(place).expanduser()
    if not path.exists():
        raise HarnessError(
            f"{path} does not exist; name the folder that lm-eval wrote (output_path)"
        )
    runs = find_runs(path)
    if not runs:
        raise HarnessError(
            f"{path} has no samples of lm-eval (samples_TASK_DATE.jsonl); run it with log_samples and "
            "output_path"
        )
    if len(runs) == 1:
        return runs[0]
    tasks = [task for run in runs for task in run.samples]
    if len(set(tasks)) == len(tasks) and len({run.model for run in runs}) == 1:
        return _together(runs)
    files = [str(run.file if run.results else next(iter(run.samples.values()))) for run in runs]
    named = ", ".join(files[:_NAMED]) + (", …" if len(files) > _NAMED else "")
    raise HarnessError(f"{path} holds the samples of {len(runs)} runs; name one of them: {named}")


def find_runs(path: Path) -> list[LoggedRun]:
    """All runs with samples in a folder, or the one of a file; empty if there is none."""
    if path.is_file() and kind_of(path) in ("samples", "inspect"):
        return _runs_of([path], path)
    folder = path.parent if path.is_file() else path
    files = _sample_files(folder, deep=not path.is_file())
    runs = _runs_of(files, path)
    if path.is_file():
        runs = [run for run in runs if run.results and run.file.samefile(path)]
    return runs


def results_files(folder: Path) -> list[Path]:
    """The files with results in a folder and all below it, sorted by path."""
    return [file for file in _json_files(folder, deep=True) if kind_of(file) == "results"]


def read_results(file: Path) -> Results:
    """The content of a results file; HarnessError for any other."""
    content = _parsed(whole_text(file), str(file))
    if not isinstance(content.get("results"), dict):
        raise HarnessError(f"{file} has no `results`; name lm-eval's results_DATE.json")
    check_results(content, file)
    return content


def check_results(content: Mapping[str, Any], file: Path) -> None:
    """Raise HarnessError if a part of the results that readers use has another type."""
    for key, kind in _SECTIONS.items():
        part = content.get(key)
        if part is None:
            continue
        whole = isinstance(part, dict)
        if not whole or not all(isinstance(value, kind) for value in part.values()):
            of = "" if kind is object else f" of {_KINDS[kind]}"
            raise HarnessError(
                f"{file}: expected `{key}` to be an object{of}; copy it again or run it again"
            )
    members = [name for names in section(content, "group_subtasks").values() for name in names]
    if not all(isinstance(name, str) for name in members):
        raise HarnessError(
            f"{file}: expected `group_subtasks` to hold names of tasks; run it again"
        )
    for task, config in section(content, "configs").items():
        filters = config.get("filter_list")
        if filters is not None and not isinstance(filters, list):
            raise HarnessError(
                f"{file}: expected `filter_list` of {task} to be a list; run it again"
            )


def section(results: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of the results that is an object; empty if it is missing or is something else."""
    part = results.get(key)
    return part if isinstance(part, dict) else {}


def config_of(results: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    """The configuration of a task; empty if the results have none."""
    return section(section(results, "configs"), task)


def model_arguments(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of the evaluated model, such as ``pretrained``; empty if the results have none."""
    arguments = section(results, "config").get("model_args")
    if isinstance(arguments, str):
        return key_values(arguments, check=False)
    return arguments if isinstance(arguments, dict) else {}


def model_of(results: Mapping[str, Any]) -> str:
    """The evaluated model's name; empty if the results have none."""
    arguments = model_arguments(results)
    for name in (results.get("model_name"), arguments.get("pretrained"), arguments.get("model")):
        if name:
            return str(name)
    return ""


def name_of(place: Path, files: Iterable[Path]) -> str:
    """A name for samples without results: the folder's; of a file that was named, its own too."""
    first = next(iter(files), place)
    # lm-eval names the folder by the model, with `__` for `/`.
    folder = first.resolve().parent.name.replace("__", "/")
    if place.is_dir():
        return folder
    match = _SAMPLES.fullmatch(_stem(first))
    if match and match["date"]:
        siblings = first.parent.glob(f"samples_{glob.escape(match['task'])}_*")
        if all(file == first or not _date(file) for file in siblings):
            return folder
    return f"{folder}/{_stem(first)}"


def kind_of(file: Path) -> str:
    """``samples``, ``results``, ``inspect`` for a log of Inspect, or an empty text for another file."""
    if not file.name.endswith((*_SUFFIXES, SUFFIX)):
        return ""
    if file.name.startswith("samples_"):
        return "samples"
    try:
        with _opened(file) as stream:
            head = stream.read(_SNIFFED)
    except (OSError, EOFError, zlib.error):
        return ""
    if is_inspect_log(file, head):
        return "inspect"
    key = _FIRST_KEY.search(head)
    if key is None or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"["):
        return ""
    return "results" if key[1] == b"results" else "samples"


def filter_names(results: Mapping[str, Any], task: str) -> list[str]:
    """The names of a task's filters, in the order in which lm-eval applied them; empty if unknown."""
    listed = config_of(results, task).get("filter_list")
    names = [
        str(entry["name"]) for entry in listed or () if isinstance(entry, dict) and "name" in entry
    ]
    if names:
        return names
    keys = [key.partition(",")[2] for key in section(section(results, "results"), task)]
    return list(dict.fromkeys(name for name in keys if name))


def _json_files(folder: Path, deep: bool, suffixes: tuple[str, ...] = _SUFFIXES) -> list[Path]:
    if not deep:
        return sorted(file for file in folder.iterdir() if file.name.endswith(suffixes))
    files = []
    for place, _, names in os.walk(folder):
        files += [Path(place, name) for name in names if name.endswith(suffixes)]
    return sorted(files)


def _sample_files(folder: Path, deep: bool = True) -> list[Path]:
    """Files of samples, by their names; where none has such a name, by their content."""
    files = _json_files(folder, deep, (*_SUFFIXES, SUFFIX))
    named = [
        file for file in files if file.name.startswith("samples_") or file.name.endswith(SUFFIX)
    ]
    return named or [file for file in files if kind_of(file) in ("samples", "inspect")]


def _stem(file: Path) -> str:
    name = file.name
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _date(file: Path) -> str:
    match = _DATED.fullmatch(_stem(file))
    return match["date"] if match else ""


def _runs_of(files: Sequence[Path], place: Path) -> list[LoggedRun]:
    """Files of samples by run: those of one folder and date, or of one older results file."""
    logs = [file for file in files if kind_of(file) == "inspect"]
    runs = _inspect_runs(logs)
    dated: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        if file in logs:
            continue
        dated.setdefault((file.parent, _date(file)), []).append(file)
    for (folder, date), group in dated.items():
        others = group
        for results_file in _results_beside(folder, date):
            results = read_results(results_file)
            by_task, others = _by_task(others, results)
            if by_task:
                runs.append(LoggedRun(results_file, results, by_task))
        by_task, others = _by_task(others, {})
        if by_task and (date or len(by_task) == len(group)):
            runs.append(LoggedRun(place, {}, by_task))
        else:
            others = [*by_task.values(), *others]
        # Before 0.4.3 the samples of several models lay in one folder, with the results of the last one.
        for file in others:
            runs.append(LoggedRun(file, {}, {_task_of(file, {}) or _stem(file): file}))
    return runs


def _inspect_runs(files: Sequence[Path]) -> list[LoggedRun]:
    """The finished evaluations in logs of Inspect, each of which holds one task."""
    headers = finished({file: read_header(file) for file in files})
    return [
        LoggedRun(file, header, {header["inspect"]["task"]: file})
        for file, header in headers.items()
    ]


def _by_task(
    files: Sequence[Path], results: Mapping[str, Any]
) -> tuple[dict[str, Path], list[Path]]:
    """The files of samples that belong to the results, by task, and the others."""
    by_task: dict[str, Path] = {}
    others = []
    for file in files:
        task = _task_of(file, results)
        if task is None or task in by_task:
            others.append(file)
        else:
            by_task[task] = file
    return by_task, others


def _results_beside(folder: Path, date: str) -> list[Path]:
    """The results of the samples with this date in a folder, or without any."""
    files = [
        file for file in _json_files(folder, deep=False) if not file.name.startswith("samples_")
    ]
    return [file for file in files if _date(file) == date and kind_of(file) == "results"]


def _task_of(file: Path, results: Mapping[str, Any]) -> str | None:
    """The task of a file of samples; None if it is not among those that the results name."""
    stem = _stem(file)
    match = _SAMPLES.fullmatch(stem)
    if match:
        return match["task"]
    tasks = [
        task for task in section(results, "configs") if stem == task or stem.endswith(f"_{task}")
    ]
    if tasks:
        task = max(tasks, key=len)
        arguments = section(results, "config").get("model_args")
        begin = re.sub("/|=", "__", arguments) if isinstance(arguments, str) else ""
        return task if stem in (task, f"{begin}_{task}") or not begin else None
    if results:
        return None
    # MODEL_TASK, where the model's arguments have `__` for `=` and `/`.
    return stem.rpartition("__")[2].partition("_")[2] or stem


def _together(runs: Sequence[LoggedRun]) -> LoggedRun:
    """The tasks of one model that were evaluated at several times."""
    latest = max(runs, key=lambda run: run.date)
    samples = {task: file for run in runs for task, file in run.samples.items()}
    apart = {task: run.results for run in runs for task in run.samples if run is not latest}
    return LoggedRun(latest.file, latest.results, samples, apart)


# --- lines -------------------------------------------------------------------------------------------------


def read_lines(file: Path, text: str | None = None) -> Iterator[Line]:
    """The logged documents of a file of samples, or of its ``text``; at least one.

    Raises:
        HarnessError: The file is empty, cut off, not UTF-8 or not lm-eval's; the message has the line.
    """
    if text is None and kind_of(file) == "inspect":
        yield from _inspect_lines(file)
        return
    raw = _text_lines(file) if text is None else iter(text.split("\n"))
    count = 0
    for number, line in enumerate(raw, 1):
        if not line.strip():
            continue
        if not count and line.lstrip(_BOM).lstrip().startswith("["):
            whole = whole_text(file) if text is None else text
            yield from _array(whole, file)
            return
        count += 1
        if count > _MOST_LINES:
            raise HarnessError(f"{file}: expected {_MOST_LINES:,} lines at most, got more")
        place = f"{file}: line {number}"
        yield _line(_parsed(line, place), place, number, hash(line))
    if not count:
        raise HarnessError(f"{file} is empty; run it again")


def _inspect_lines(file: Path) -> Iterator[Line]:
    for found in read_judgements(file):
        place = f"{file}: sample {_short(found.sample)}"
        metrics = {writable(name): value for name, value in found.metrics.items()}
        yield Line(
            place, found.number, found.number, found.content, writable(found.scorer), metrics, 0
        )


def number_of(value: object) -> float:
    """A logged number; NaN for null, or a number too large; TypeError for a text or a list."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise TypeError(value)
    try:
        return float(value)
    except OverflowError:
        return math.nan


def writable(text: str) -> str:
    """``text`` with a question mark for each half of a pair of surrogates, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _line(content: Mapping[str, Any], place: str, number: int, digest: int) -> Line:
    if "doc_id" not in content:
        raise HarnessError(f"{place} has no 'doc_id': it is not a document that lm-eval logged")
    doc_id = content["doc_id"]
    if isinstance(doc_id, str) and doc_id.isascii() and doc_id.isdigit() and len(doc_id) < 16:
        doc_id = int(doc_id)
    if isinstance(doc_id, bool) or not isinstance(doc_id, int) or not 0 <= doc_id < _MOST_ID:
        raise HarnessError(f"{place}: expected `doc_id` to be a whole number, got {_short(doc_id)}")
    name = content.get("filter")
    if "filter" in content and not isinstance(name, str):
        raise HarnessError(f"{place}: expected `filter` to be a name, got {_short(name)}")
    names: Any = [key for key in content if key not in _KEYS]
    if "metrics" in content:
        names = content["metrics"]
        if not isinstance(names, list) or not all(isinstance(metric, str) for metric in names):
            raise HarnessError(
                f"{place}: expected `metrics` to be a list of names, got {_short(names)}"
            )
    metrics = {
        writable(metric): content[metric]
        for metric in names
        if metric in content and not metric.startswith("dispersion")
    }
    return Line(
        place, number, doc_id, content, None if name is None else writable(name), metrics, digest
    )


def _array(text: str, file: Path) -> Iterator[Line]:
    """The elements of one JSON array of documents, as lm-eval 0.4.0 to 0.4.2 wrote it."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[ \t\r\n]*")
    index = text.index("[") + 1
    counted = 0
    number = 1
    count = 0
    while True:
        index = _after(space, text, index)
        number += text.count("\n", counted, index)
        counted = index
        place = f"{file}: line {number}"
        if text[index : index + 1] == "]":
            break
        try:
            content, end = decoder.raw_decode(text, index)
        except (ValueError, RecursionError):
            raise _cut(place) from None
        if not isinstance(content, dict):
            raise _cut(place)
        count += 1
        yield _line(content, place, number, hash(text[index:end]))
        index = _after(space, text, end)
        if text[index : index + 1] == ",":
            index += 1
        elif text[index : index + 1] != "]":
            raise _cut(place)
    if not count:
        raise HarnessError(f"{file} is empty; run it again")


def _after(space: re.Pattern[str], text: str, index: int) -> int:
    match = space.match(text, index)
    return match.end() if match else index


def _parsed(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text.removeprefix(_BOM))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _cut(place)
    return value


def _cut(place: str) -> HarnessError:
    return HarnessError(f"{place} is cut off or is not JSON of lm-eval; run it again")


def _opened(file: Path) -> BinaryIO:
    """A file's bytes, unpacked."""
    if file.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(file))
    return file.open("rb")


def _text_lines(file: Path) -> Iterator[str]:
    # Not splitlines: lm-eval keeps U+2028 and similar characters inside a text.
    number = 0
    try:
        with _opened(file) as stream:
            while line := stream.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    raise HarnessError(
                        f"{file}: line {number}: expected {_LONGEST_LINE:,} bytes at most"
                    )
                yield line.decode("utf-8")
    except UnicodeDecodeError:
        raise HarnessError(
            f"{file}: line {number} is not UTF-8; copy the file again or run it again"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise HarnessError(
            f"{file}: line {number + 1} cannot be read ({_why(error)}); copy it again"
        ) from None


def whole_text(file: Path) -> str:
    """A file's text, unpacked and without a byte-order mark; HarnessError if it cannot be read."""
    try:
        with _opened(file) as stream:
            content = stream.read(_LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise HarnessError(f"{file} cannot be read ({_why(error)}); copy it again") from None
    if len(content) > _LARGEST:
        raise HarnessError(f"{file}: expected {_LARGEST:,} bytes at most")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise HarnessError(
            f"{file}: line {number} is not UTF-8; copy the file again or run it again"
        ) from None


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")


def _short(value: object) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
