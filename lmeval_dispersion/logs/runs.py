"""Which files of lm-eval's logs are one run, by any version since 0.4.0.

Forms: ``MODEL_TASK.jsonl``, one array, next to ``results.json`` (to 0.4.2); ``samples_TASK_DATE.json`` or
``.jsonl``, a line per document, without names of filters and metrics before 0.4.7; ``NAME_DATE.json`` as
results; any of them gzipped, or without results. Logs of Inspect take their form
(:mod:`~lmeval_dispersion.logs.inspect`).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmeval_dispersion.errors import HarnessError, listed_names
from lmeval_dispersion.logs import inspect
from lmeval_dispersion.logs.files import SUFFIXES, kind_of
from lmeval_dispersion.logs.results import Results, model_of, read_results, section

_DATE = r"\d{4}-\d\d-\d\dT\d\d[-:]\d\d[-:]\d\d(?:\.\d+)?"
_SAMPLES = re.compile(rf"samples_(?P<task>.+?)(?:_(?P<date>{_DATE}))?")
_DATED = re.compile(rf"(?P<name>.*)_(?P<date>{_DATE})")


@dataclass(frozen=True)
class LoggedRun:
    """The evaluation of one model: its results, and the file of samples of each task.

    Attributes:
        file: The results file or log of Inspect; without results, a file of samples, or the folder
            in which the run was looked for.
        results: Content of the results file, or the header of the log; empty without results.
        samples: Task -> file of its samples.
        apart: Task -> content of the results file of an earlier evaluation, for tasks that are not
            in ``results``; empty without such a file.
    """

    file: Path
    results: Results
    samples: dict[str, Path]
    apart: Mapping[str, Results] = field(default_factory=dict)

    def results_of(self, task: str) -> Results:
        """Return the results that belong to the samples of a task."""
        return self.apart.get(task, self.results)

    @property
    def by_inspect(self) -> bool:
        """Whether the run is a log of Inspect, in which case the results have no scores."""
        return "inspect" in self.results

    @property
    def model(self) -> str:
        """Name of the model: from the results, or from the path if they do not name it."""
        return model_of(self.results) or _name_of(self.file, self.samples.values())

    @property
    def date(self) -> str:
        """Date of the run as a text: the latest in its file names, or that of the log of Inspect.

        Empty if it is unknown.
        """
        if self.by_inspect:
            return str(self.results["inspect"]["created"])
        return max(map(_date, (self.file, *self.samples.values())))


def is_log(path: Path) -> bool:
    """Whether a path holds samples of lm-eval or a log of Inspect, or is a results file.

    A folder with results alone does not count.
    """
    if path.is_file():
        return bool(kind_of(path))
    return path.is_dir() and bool(_sample_files(path))


def find_run(place: str | Path) -> LoggedRun:
    """Return the run in a folder, or the run to which a results or samples file belongs.

    Tasks that one model answered at different times are one run.

    Raises:
        HarnessError: There are no samples, the folder holds several runs of one task or runs of
            several models, or a file cannot be read.
        MissingExtraError: The run is a log of Inspect, and inspect_ai is not installed.
    """
    path = Path(place).expanduser()
    if not path.exists():
        raise HarnessError(
            f"{path} does not exist; name the folder that lm-eval wrote (output_path)"
        )
    runs = find_runs(path)
    if not runs:
        raise HarnessError(
            f"{path} has no samples of lm-eval (samples_TASK_DATE.jsonl); run lm-eval with log_samples "
            "and output_path"
        )
    if len(runs) == 1:
        return runs[0]
    tasks = [task for run in runs for task in run.samples]
    if len(set(tasks)) == len(tasks) and len({run.model for run in runs}) == 1:
        return _together(runs)
    files = list[str]()
    for run in runs:
        file = run.file if run.results else next(iter(run.samples.values()))
        files.append(str(file))
    raise HarnessError(
        f"{path} holds the samples of {len(runs)} runs; name one of them: {listed_names(files)}"
    )


def find_runs(path: Path) -> list[LoggedRun]:
    """Return all runs with samples in a folder.

    For a results file, a file of samples or a log of Inspect, the list holds only the run to which
    the file belongs. The list is empty if there are no samples.

    Raises:
        HarnessError: A results file or a log of Inspect cannot be read, or the log is of an
            evaluation that did not finish.
        MissingExtraError: There is a log of Inspect, and inspect_ai is not installed.
    """
    if not path.is_file():
        return _runs_of(_sample_files(path), path)
    if kind_of(path) in ("samples", "inspect"):
        return _runs_of([path], path)
    runs = _runs_of(_sample_files(path.parent, "*"), path)
    return [run for run in runs if run.results and run.file.samefile(path)]


def results_files(folder: Path) -> list[Path]:
    """Return the results files in a folder and in all folders below it, sorted by path."""
    return [file for file in _files(folder, SUFFIXES) if kind_of(file) == "results"]


def _files(folder: Path, suffixes: tuple[str, ...], pattern: str = "**/*") -> list[Path]:
    """The files with one of the suffixes, sorted by path: in a folder and all below it, or by a pattern."""
    files = list[Path]()
    for file in folder.glob(pattern):
        if file.name.endswith(suffixes) and file.is_file():
            files.append(file)
    return sorted(files)


def _sample_files(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Files of samples, by their names; where none has such a name, by their content."""
    files = _files(folder, (*SUFFIXES, inspect.SUFFIX), pattern)
    named = []
    for file in files:
        if file.name.startswith("samples_") or file.name.endswith(inspect.SUFFIX):
            named.append(file)
    return named or [file for file in files if kind_of(file) in ("samples", "inspect")]


def _stem(file: Path) -> str:
    name = file.name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _date(file: Path) -> str:
    match = _DATED.fullmatch(_stem(file))
    if match is None:
        return ""
    return match["date"]


def _name_of(place: Path, files: Iterable[Path]) -> str:
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


def _runs_of(files: Sequence[Path], place: Path) -> list[LoggedRun]:
    """Files of samples by run: those of one folder and date, or of one older results file."""
    logs = []
    dated: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        if kind_of(file) == "inspect":
            logs.append(file)
        else:
            dated.setdefault((file.parent, _date(file)), []).append(file)
    runs = _inspect_runs(logs)
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
            task = _task_of(file, {}) or _stem(file)
            runs.append(LoggedRun(file, {}, {task: file}))
    return runs


def _inspect_runs(files: Sequence[Path]) -> list[LoggedRun]:
    """The finished evaluations in logs of Inspect, each of which holds one task."""
    runs = []
    headers = dict(zip(files, map(inspect.read_header, files), strict=True))
    for file, header in inspect.finished(headers).items():
        task = header["inspect"]["task"]
        runs.append(LoggedRun(file, header, {task: file}))
    return runs


def _by_task(files: Sequence[Path], results: Results) -> tuple[dict[str, Path], list[Path]]:
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
    results = []
    for file in _files(folder, SUFFIXES, "*"):
        is_sample = file.name.startswith("samples_")
        if not is_sample and _date(file) == date and kind_of(file) == "results":
            results.append(file)
    return results


def _task_of(file: Path, results: Results) -> str | None:
    """The task of a file of samples; None if it is not among those that the results name."""
    stem = _stem(file)
    match = _SAMPLES.fullmatch(stem)
    if match:
        return match["task"]
    configured = section(results, "configs")
    tasks = [task for task in configured if stem == task or stem.endswith(f"_{task}")]
    if tasks:
        task = max(tasks, key=len)
        arguments = section(results, "config").get("model_args")
        if not isinstance(arguments, str) or not arguments:
            return task
        begin = re.sub("/|=", "__", arguments)
        if stem in (task, f"{begin}_{task}"):
            return task
        return None
    if results:
        return None
    # MODEL_TASK, where the model's arguments have `__` for `=` and `/`.
    return stem.rpartition("__")[2].partition("_")[2] or stem


def _together(runs: Sequence[LoggedRun]) -> LoggedRun:
    """The tasks of one model that were evaluated at several times."""
    latest = max(runs, key=lambda run: run.date)
    samples: dict[str, Path] = {}
    apart: dict[str, Results] = {}
    for run in runs:
        samples |= run.samples
        if run is not latest:
            apart |= dict.fromkeys(run.samples, run.results)
    return LoggedRun(latest.file, latest.results, samples, apart)
