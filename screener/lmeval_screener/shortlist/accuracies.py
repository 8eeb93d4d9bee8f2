"""Supplied accuracies: read from lm-eval's results or a CSV file, matched by name."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.logs.files import kind_of
from lmeval_dispersion.logs.judging import JUDGES, results_metric
from lmeval_dispersion.logs.results import (
    Results,
    config_of,
    model_arguments,
    read_results,
    section,
)
from lmeval_dispersion.logs.runs import LoggedRun, find_runs, is_log, results_files
from lmeval_dispersion.report.cells import unguarded
from lmeval_dispersion.report.declared import some
from lmeval_dispersion.store.samples import task_scores
from lmeval_screener.targets.names import REPOSITORY, Target, label
from lmeval_screener.targets.runs import run_and_step

_SHOWN = 12  # most names in a message
_LABELS = ("repo", "checkpoint", "name", "label")  # headings of the column that names checkpoints


@dataclass(frozen=True)
class Rated:
    """One accuracy from a user's source, with the names that the source gives its checkpoint.

    Attributes:
        name: Repository or folder of the checkpoint.
        revision: Revision; None if the source gives none.
        accuracy: The accuracy, as a share or in per cent.
        place: File, and line of a CSV file, from which the accuracy was read.
        file: Name of the checkpoint's GGUF file; None if the source gives none.
        label: The checkpoint's label in a report; None if the source gives none.
    """

    name: str
    revision: str | None
    accuracy: float
    place: str
    file: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Accuracies:
    """The accuracies from one source.

    Attributes:
        rated: The accuracies.
        meaning: The source in words, such as task, metric and file.
        complete: Whether each accuracy must belong to a screened checkpoint.
        dropped: Number of checkpoints that a race dropped before they had answered all questions.
            If there are any, the checkpoints with an accuracy were chosen by their results.
    """

    rated: tuple[Rated, ...]
    meaning: str
    complete: bool = True
    dropped: int = 0

    def of(self, targets: Sequence[Target]) -> list[Target]:
        """Return the targets, each with its accuracy from this source, or None if there is none.

        Args:
            targets: Targets with labels.

        Raises:
            UsageError: A name fits several targets, or a target has two accuracies. If all targets
                could be resolved, also if no name fits any target, or if a name in a ``complete``
                source fits none.
        """
        names = _Names(targets)
        labels = [target.label for target in targets]
        is_known = not any(target.refused for target in targets)
        taken: dict[str, Rated] = {}
        for rated in self.rated:
            matches = names.matches(rated)
            name = label(rated.name, rated.revision)
            if len(matches) > 1:
                places = some([target.name for target in matches], 4)
                raise UsageError(
                    f"{rated.place}: {name} fits {len(matches)} screened checkpoints ({places}); "
                    "name one of them by its revision (column `revision` in CSV, `revision=` in "
                    "lm-eval's model_args)"
                )
            if matches:
                known = taken.setdefault(matches[0].label, rated)
                if known != rated:
                    raise UsageError(
                        f"{rated.place}: {matches[0].name} occurs twice; keep one accuracy for "
                        "each checkpoint"
                    )
            elif self.complete and is_known:
                step = nearest(name, labels) or "; correct the name, or leave the line out"
                raise UsageError(
                    f"{rated.place}: expected a screened checkpoint ({some(labels, _SHOWN)}), got "
                    f"{name!r}{step}"
                )
        if not taken and is_known:
            others = some([label(rated.name, rated.revision) for rated in self.rated], _SHOWN)
            raise UsageError(
                f"expected accuracies of the screened checkpoints ({some(labels, _SHOWN)}), got "
                f"those of {others}; give the results of the screened checkpoints"
            )
        with_accuracy = []
        for target in targets:
            rated_target = taken.get(target.label)
            accuracy = None if rated_target is None else rated_target.accuracy
            with_accuracy.append(replace(target, accuracy=accuracy))
        return with_accuracy


def read_accuracies(source: str, metric: str | None = None) -> Accuracies:
    """Read accuracies from results of lm-eval, logs of Inspect or a CSV file.

    Args:
        source: A file or folder of lm-eval's results or samples or of Inspect's logs, with
            ``:TASK`` if they hold several tasks; or a CSV file with the columns ``repo`` and
            ``accuracy``.
        metric: ``[FILTER/]METRIC`` of the results. Default: the accuracy that `dispersion compare`
            takes, too.

    Raises:
        UsageError: The source cannot be read, holds several tasks or no accuracy, or has results
            with different numbers of few-shot examples.
    """
    path = Path(os.path.expanduser(source))
    task = ""
    if not path.exists() and ":" in source:
        place, _, task = source.rpartition(":")
        path = Path(os.path.expanduser(place))
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; give results of lm-eval, logs of Inspect, a folder of these "
            "(PATH:TASK for one task), or a CSV file with the columns repo,accuracy"
        )
    if task and path.suffix == ".csv":
        raise UsageError(
            f"{path}: a CSV file has one accuracy for each checkpoint; leave :{task} out"
        )
    if path.is_dir() or path.suffix == ".json" or task or is_log(path):
        try:
            return _from_results(path, task, metric)
        except HarnessError as error:
            raise UsageError(str(error)) from error
    if metric is not None:
        raise UsageError(
            f"{path}: a CSV file has one accuracy for each checkpoint; leave out the metric, which "
            "is only for lm-eval's results"
        )
    return _from_csv(path)


# --- names ----------------------------------------------------------------------------------------------


class _Names:
    """Targets by all their possible names, so that ten thousand results are matched fast."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._labels: dict[str | None, list[Target]] = {}
        self._paths: dict[str, list[Target]] = {}
        self._names: dict[str, list[Target]] = {}
        for target in targets:
            for text in {target.label, target.name}:
                self._labels.setdefault(text, []).append(target)
            if not target.on_hub:
                self._paths.setdefault(target.place, []).append(target)
            for name in _names_of(target):
                self._names.setdefault(name, []).append(target)

    def matches(self, rated: Rated) -> list[Target]:
        """The targets of a name: the target with exactly this label or folder, else all possible ones."""
        targets = self._targets(rated)
        if rated.file is None or len(targets) < 2:
            return targets
        of_file = [t for t in targets if t.file and t.file.lower() in rated.file.lower()]
        return of_file or targets

    def _targets(self, rated: Rated) -> list[Target]:
        name = label(rated.name, rated.revision)
        for text in (rated.label, name):
            if text in self._labels:
                return self._labels[text]
        names = [name]
        if rated.revision is None:
            path = str(Path(os.path.expanduser(rated.name)).resolve())
            if path in self._paths:
                return self._paths[
                    path
                ]  # run1/final and run2/final share a name, but are two folders
            names += [path, *_far_names(rated.name)]
        possible: dict[Target, None] = {}  # in order
        for text in names:
            possible.update(dict.fromkeys(self._names.get(text, ())))
        return list(possible)


def _names_of(target: Target) -> set[str]:
    """Names that may mean a target, also without its revision, or the revision alone."""
    last = target.repo.rpartition("/")[2]
    if target.on_hub:
        revision = target.revision or "main"
        names = {target.repo, last, f"{target.repo}@{revision}", f"{last}@{revision}"}
        if target.revision and "/" not in target.revision:
            names.add(target.revision)
        return names
    # As tables print a folder: its last part, or its step in a training run.
    names = {target.repo, last, Path(target.repo).name, target.place}
    run_of_step = run_and_step(target.repo)
    if run_of_step:
        run, step = run_of_step
        names |= {step, f"{Path(run).name}/{step}"}
    return names


def _far_names(name: str) -> list[str]:
    """The name of a folder in any place: lm-eval's results keep the path of another machine."""
    if not name.startswith(("/", ".", "~")):
        return []
    run_of_step = run_and_step(name)
    if run_of_step is None:
        return [Path(name).name]
    run, step = run_of_step
    return [f"{Path(run).name}/{step}"]


# --- sources --------------------------------------------------------------------------------------------


def _from_csv(path: Path) -> Accuracies:
    rated = []
    for line, row in _rows(path):
        place = f"{path}: line {line}"
        accuracy = _number(row["accuracy"], place)
        revision = row.get("revision") or None
        rated.append(Rated(row["repo"], revision, accuracy, place, label=row.get("label")))
    if not rated:
        raise UsageError(
            f"{path}: expected a line for each checkpoint, got only the header; add the lines"
        )
    return Accuracies(tuple(rated), str(path))


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows with their lines; the column that names checkpoints is ``repo``."""
    rows = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            heads = [unguarded(name).strip().lower() for name in reader.fieldnames or ()]
            names = [name for name in _LABELS if name in heads]
            if not names or "accuracy" not in heads:
                raise UsageError(
                    f"{path}: expected a header with the columns label or repo, accuracy and "
                    f"optionally revision, got {', '.join(heads) or 'nothing'}; correct the first "
                    "line"
                )
            reader.fieldnames = ["repo" if name == names[0] else name for name in heads]
            for row in reader:
                if None in row:
                    raise UsageError(
                        f"{path}: line {reader.line_num}: expected {len(heads)} values, as the "
                        "header has, got more; quote values that hold a comma"
                    )
                values = {key: unguarded(value).strip() for key, value in row.items()}
                rows.append((reader.line_num, values))
    except OSError as error:
        raise UsageError(
            f"{path}: expected a readable CSV file ({error.strerror or error}); check the path"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path}: expected a CSV file in UTF-8 ({error}); save it again as CSV in UTF-8"
        ) from error
    return rows


def _number(value: object, place: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(
            f"{place}: expected a number as the accuracy, such as 49.8, got {value!r}; correct it, "
            "or leave the checkpoint out"
        )
    return number


def _from_results(path: Path, task: str, metric: str | None) -> Accuracies:
    """One task of lm-eval's results, the latest of each model; of samples without results their mean."""
    if (path / "race.json").is_file():
        return _from_race(sorted(path.rglob("results_*.json")))
    results = {}
    for file in results_files(path) if path.is_dir() else [path]:
        if kind_of(file) not in ("samples", "inspect"):
            results[file] = read_results(file)
    # Runs whose results have no scores, by a file of samples.
    runs = {}
    for run in sorted(find_runs(path), key=lambda run: run.date):
        if not run.results or run.by_inspect:
            runs[next(iter(run.samples.values()))] = run
    tasks = _tasks(results.values(), runs.values())
    if not tasks:
        raise UsageError(
            f"{path}: expected results of lm-eval (results_*.json), got none; name the folder that "
            "lm-eval wrote"
        )
    if not task and len(tasks) != 1:
        raise UsageError(
            f"{path} holds {len(tasks)} tasks ({some(tasks, _SHOWN)}); choose one with {path}:TASK"
        )
    task = task or tasks[0]
    results = {file: content for file, content in results.items() if task in content["results"]}
    runs = {file: run for file, run in runs.items() if task in run.samples}
    if not results and not runs:
        hint = nearest(task, tasks) or f"; choose one of its tasks with {path}:TASK"
        raise UsageError(
            f"{path}: expected results of the task {task}, got those of {some(tasks, _SHOWN)}{hint}"
        )
    key = _metric(task, list(results.values()), path, metric) if results else ""
    latest: dict[tuple[str, str | None, str | None], tuple[Rated, Results]] = {}
    for file in sorted(results, key=lambda file: (_date(results[file]), str(file))):
        content = results[file]
        accuracy = _number(content["results"][task][key], str(file))
        rated = _rated(content, file, accuracy)
        latest[rated.name, rated.revision, rated.file] = rated, content
    notes = []
    for file, run in runs.items():
        name, scores = task_scores(run, task, metric)
        key = key or name
        known = [sample.correct for sample in scores.values() if math.isfinite(sample.correct)]
        mean = _number(math.fsum(known) / len(known) if known else math.nan, str(file))
        rated = Rated(run.model, None, mean, str(file))
        if run.by_inspect:
            rated = _rated(run.results, file, mean)
        latest[rated.name, rated.revision, rated.file] = rated, run.results
        notes += section(run.results, "inspect").get("notes", [])
    notes = [*_unlike(task, latest.values()), *notes]
    files = [*results, *runs]
    source = f"{len(files)} files of lm-eval's results"
    if len(files) == 1:
        source = files[0].name
    meaning = "; ".join([f"{task}, {key} ({source})", *notes])
    return Accuracies(tuple(rated for rated, _ in latest.values()), meaning, complete=False)


def _date(results: Results) -> float:
    """When results were written, in seconds; 0 if they do not say."""
    date = results.get("date")
    return date if isinstance(date, int | float) else 0.0


def _tasks(results: Iterable[Results], runs: Iterable[LoggedRun]) -> list[str]:
    """The tasks that have a score; of groups the group's, without those of its tasks."""
    tasks: dict[str, None] = {}  # in order
    for content in results:
        members: set[str] = set()
        for names in section(content, "group_subtasks").values():
            members.update(names)
        whole = [name for name in content["results"] if name not in members]
        tasks.update(dict.fromkeys(whole or content["results"]))
    for run in runs:
        tasks.update(dict.fromkeys(run.samples))
    return list(tasks)


def _unlike(task: str, scored: Iterable[tuple[Rated, Results]]) -> list[str]:
    """Notes on another version of the task, or other documents.

    Raises:
        UsageError: Other numbers of few-shot examples.
    """
    prompts = [(rated.place, _Prompt.of(task, content)) for rated, content in scored if content]
    notes: dict[str, None] = {}  # in order
    for place, prompt in prompts[1:]:
        first_place, first = prompts[0]
        if first.hashes and first.hashes == prompt.hashes:
            continue
        if first.shots and prompt.shots and first.shots != prompt.shots:
            raise UsageError(
                f"expected results of {task} with the same number of few-shot examples, got "
                f"{first.shots}-shot in {first_place} and {prompt.shots}-shot in {place}; give "
                "only results that agree"
            )
        if first.version != prompt.version:
            versions = f"{_given(first.version)} and {_given(prompt.version)}"
            notes[f"the results are of different versions of the task: {versions}"] = None
        if first.limit != prompt.limit:
            limits = f"{_given(first.limit)} and {_given(prompt.limit)}"
            notes[f"the results have different limits, {limits}, so their questions differ"] = None
    return list(notes)


def _given(value: object) -> object:
    return "none" if value is None else value


@dataclass(frozen=True)
class _Prompt:
    """A task's questions, by its results; ``hashes`` are of all documents and prompts."""

    shots: str  # empty if unknown
    version: object
    limit: object
    hashes: object

    @classmethod
    def of(cls, task: str, results: Results) -> _Prompt:
        members = section(results, "group_subtasks").get(task)
        names = [task]
        if isinstance(members, list):
            names += members
        shots = {_shots(name, results) for name in names} - {""}
        return cls(
            shots=" and ".join(sorted(shots)),
            version=section(results, "versions").get(task),
            limit=section(results, "config").get("limit"),
            hashes=section(results, "task_hashes").get(task),
        )


def _shots(task: str, results: Results) -> str:
    """The number of a task's few-shot examples; empty if the results do not say."""
    numbers = (
        section(results, "n-shot").get(task),
        config_of(results, task).get("num_fewshot"),
        section(results, "config").get("num_fewshot"),
    )
    for number in numbers:
        if isinstance(number, int | str):
            return str(number)
    return ""


def _from_race(files: Sequence[Path]) -> Accuracies:
    """Scores in a race, of checkpoints that answered all questions."""
    rated = []
    for file in files:
        results = read_results(file)
        race = results["race"]
        if race["questions"] == race["of"]:
            rated.append(_rated(results, file, race["score"]))
    meaning = f"a race (with all questions for {len(rated)} of {len(files)} checkpoints)"
    return Accuracies(tuple(rated), meaning, complete=False, dropped=len(files) - len(rated))


def _metric(task: str, results: Sequence[Results], path: Path, judge: str | None) -> str:
    """The key of the task's accuracy that all results share."""
    common = []
    for key, value in results[0]["results"][task].items():
        is_score = isinstance(value, int | float) and "_stderr" not in key and key != "sample_len"
        if is_score and all(key in content["results"][task] for content in results):
            common.append(key)
    key = results_metric(results[0], task, common, judge)
    if key is not None:
        return key
    wanted = judge or ", ".join(JUDGES)
    step = "give the accuracies as a CSV file"
    if common:
        step = f"choose one with `--metric [FILTER/]METRIC`, or {step}"
    raise UsageError(
        f"{path}: expected an accuracy of {task} ({wanted}), got {some(common, _SHOWN) or 'none'}; "
        f"{step}"
    )


def _rated(results: Results, file: Path, accuracy: float) -> Rated:
    """The accuracy of the model that was evaluated, or of the adapter on it."""
    arguments = model_arguments(results)
    name = arguments.get("pretrained") or arguments.get("model") or results.get("model_name")
    if not name:
        raise UsageError(
            f"{file}: expected the model's name in config.model_args, got none; give the "
            "accuracies as a CSV file"
        )
    revision = arguments.get("revision") or None
    peft = str(arguments.get("peft") or "")
    if not peft:
        weights = arguments.get("gguf_file") or None
        return Rated(str(name), revision, accuracy, str(file), weights)
    place, at, commit = peft.partition("@")
    if REPOSITORY.fullmatch(place) and not Path(peft).exists():
        return Rated(place, commit if at else revision, accuracy, str(file))
    # A folder, perhaps of `--emit`, where each has its repository's name; the revision is the base's.
    return Rated(peft, None, accuracy, str(file), label=peft.rpartition("adapters/")[2])
