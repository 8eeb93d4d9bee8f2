"""Supplied accuracies: read from lm-eval's results or a CSV file, matched by name."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import HarnessError, UsageError
from lmeval_dispersion.layouts import nearest
from lmeval_dispersion.logs.files import kind_of
from lmeval_dispersion.logs.judging import JUDGES, results_metric
from lmeval_dispersion.logs.results import config_of, model_arguments, read_results, section
from lmeval_dispersion.logs.runs import find_runs, is_log, results_files
from lmeval_dispersion.report.cells import unguarded
from lmeval_dispersion.store.samples import task_scores
from lmeval_screener.targets.names import REPOSITORY, Target, label
from lmeval_screener.targets.runs import run_and_step

_LABELS = ("repo", "checkpoint", "name", "label")  # headings of the column that names checkpoints


@dataclass(frozen=True)
class Rated:
    """A supplied accuracy, as a share or in per cent, with its checkpoint's names; None for one not given.

    ``place`` is its file and line, ``file`` the checkpoint's GGUF file, ``label`` its name in a report.
    """

    name: str
    revision: str | None
    accuracy: float
    place: str
    file: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Accuracies:
    """Accuracies from one source; if it is ``complete``, each must belong to a screened checkpoint.

    ``meaning`` is the source in words, such as task, metric and file. ``dropped`` counts a race's checkpoints
    that were not asked everything: results chose the others.
    """

    rated: tuple[Rated, ...]
    meaning: str
    complete: bool = True
    dropped: int = 0

    def of(self, targets: Sequence[Target]) -> list[Target]:
        """Labelled targets, each with its accuracy from this source only.

        Raises:
            UsageError: A name fits several targets, or a target has two accuracies; or, if all targets could
                be expanded, no name fits a target, or one of a ``complete`` source does not.
        """
        names, taken = _Names(targets), dict[str, Rated]()
        labels = [target.label for target in targets]
        known = not any(target.refused for target in targets)
        for rated in self.rated:
            fitting, name = names.matches(rated), label(rated.name, rated.revision)
            if len(fitting) > 1:
                places = _listed([target.name for target in fitting], 4)
                raise UsageError(
                    f"{rated.place}: {name} is screened {len(fitting)} times, as {places}; name one of them, "
                    "a revision in `revision`"
                )
            if fitting and taken.setdefault(fitting[0].label, rated) != rated:
                raise UsageError(
                    f"{rated.place}: {fitting[0].name} occurs twice; expected one accuracy per checkpoint"
                )
            if not fitting and self.complete and known:
                raise UsageError(
                    f"{rated.place}: expected a screened checkpoint, got "
                    f"{name!r}{nearest(name, labels)}; screened: {_listed(labels)}"
                )
        if not taken and known:
            others = _listed([label(rated.name, rated.revision) for rated in self.rated])
            raise UsageError(
                f"expected accuracies of screened checkpoints ({_listed(labels)}), got those of {others}"
            )
        rates = {name: rated.accuracy for name, rated in taken.items()}
        return [replace(target, accuracy=rates.get(target.label)) for target in targets]


def read_accuracies(source: str, metric: str | None = None) -> Accuracies:
    """Read accuracies from lm-eval's results or samples (file or folder, PATH:TASK), or a CSV file.

    ``metric`` is ``[FILTER/]METRIC``; by default as in `dispersion compare`.

    Raises:
        UsageError: The source cannot be read or holds several tasks, or results of unlike prompts.
    """
    path, task = Path(os.path.expanduser(source)), ""
    if not path.exists() and ":" in source:
        place, _, task = source.rpartition(":")
        path = Path(os.path.expanduser(place))
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; expected lm-eval's results or a folder of them (PATH:TASK), or a CSV "
            "file with the columns repo,accuracy"
        )
    if task and path.suffix == ".csv":
        raise UsageError(
            f"{path}: a CSV file has one accuracy for each checkpoint, and takes no :TASK"
        )
    if path.is_dir() or path.suffix == ".json" or task or is_log(path):
        try:
            return _from_results(path, task, metric)
        except HarnessError as error:
            raise UsageError(str(error)) from error
    if metric is not None:
        raise UsageError(
            f"{path}: a CSV file has one accuracy; name a metric of lm-eval's results alone"
        )
    return _from_csv(path)


# --- names ----------------------------------------------------------------------------------------------


class _Names:
    """Targets by all their possible names, so that ten thousand results are matched fast."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._labels: dict[str, list[Target]] = {}
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
        fitting = self._fitting(rated)
        if rated.file is None or len(fitting) < 2:
            return fitting
        return [t for t in fitting if t.file and t.file.lower() in rated.file.lower()] or fitting

    def _fitting(self, rated: Rated) -> list[Target]:
        name = label(rated.name, rated.revision)
        for text in (rated.label, name):
            if text is not None and (exact := self._labels.get(text)):
                return exact
        names = [name]
        if rated.revision is None:
            path = str(Path(os.path.expanduser(rated.name)).resolve())
            if there := self._paths.get(path):
                return there  # run1/final and run2/final share a name, but are two folders
            names += [path, *_far_names(rated.name)]
        return list(dict.fromkeys(target for text in names for target in self._names.get(text, ())))


def _names_of(target: Target) -> set[str]:
    """Names that may mean a target, also without its revision, or the revision alone."""
    last = target.repo.rpartition("/")[2]
    if target.on_hub:
        revision = target.revision or "main"
        alone = {target.revision} if target.revision and "/" not in target.revision else set()
        return {target.repo, last, f"{target.repo}@{revision}", f"{last}@{revision}"} | alone
    # As tables print a folder: its last part, or its step in a training run.
    names = {target.repo, last, Path(target.repo).name, target.place}
    if run := run_and_step(target.repo):
        names |= {run[1], f"{Path(run[0]).name}/{run[1]}"}
    return names


def _far_names(name: str) -> list[str]:
    """The name of a folder in any place: lm-eval's results keep the path of another machine."""
    if not name.startswith(("/", ".", "~")):
        return []
    run = run_and_step(name)
    return [f"{Path(run[0]).name}/{run[1]}" if run else Path(name).name]


def _listed(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --- sources --------------------------------------------------------------------------------------------


def _from_csv(path: Path) -> Accuracies:
    rated = []
    for line, row in _rows(path):
        place = f"{path}: line {line}"
        accuracy = _number(row["accuracy"], place)
        rated.append(
            Rated(row["repo"], row.get("revision") or None, accuracy, place, label=row.get("label"))
        )
    if not rated:
        raise UsageError(f"{path}: expected a line for each checkpoint, got none")
    return Accuracies(tuple(rated), str(path))


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows with their lines; the column that names checkpoints is ``repo``."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            heads = [unguarded(name).strip().lower() for name in reader.fieldnames or ()]
            names = next((name for name in _LABELS if name in heads), "")
            if not names or "accuracy" not in heads:
                raise UsageError(
                    f"{path}: expected a first line with label or repo, accuracy and optionally revision, "
                    f"got {', '.join(heads) or 'nothing'}"
                )
            reader.fieldnames = ["repo" if name == names else name for name in heads]
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise UsageError(
            f"{path}: expected a readable CSV file, got {error.strerror or error}; check the path"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: expected a CSV file in UTF-8, got: {error}") from error
    for line, row in rows:
        if None in row:
            raise UsageError(f"{path}: line {line}: expected {len(heads)} values")
    return [
        (line, {key: unguarded(value).strip() for key, value in row.items()}) for line, row in rows
    ]


def _number(value: object, place: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(
            f"{place}: expected an accuracy that is a number, such as 49.8, got {value!r}"
        )
    return number


def _from_results(path: Path, task: str, metric: str | None) -> Accuracies:
    """One task of lm-eval's results, the latest of each model; of samples without results their mean."""
    files = sorted(results_files(path)) if path.is_dir() else [path]
    if (path / "race.json").is_file():
        return _from_race({file: _results(file) for file in sorted(path.rglob("results_*.json"))})
    runs = {file: _results(file) for file in files if kind_of(file) not in ("samples", "inspect")}
    alone = {}
    for run in sorted(find_runs(path), key=lambda run: run.date):
        if not run.results or run.by_inspect:
            alone[next(iter(run.samples.values()))] = run
    if not runs and not alone:
        raise UsageError(
            f"{path}: expected lm-eval's results_*.json in the folder, got none; name lm-eval's output folder"
        )
    names = [name for content in runs.values() for name in _tasks(content)]
    tasks = list(dict.fromkeys([*names, *(name for run in alone.values() for name in run.samples)]))
    if not task and len(tasks) != 1:
        raise UsageError(
            f"{path} holds {len(tasks)} tasks ({_listed(tasks)}); name one: {path}:TASK"
        )
    task = task or tasks[0]
    chosen = {file: content for file, content in runs.items() if task in content["results"]}
    alone = {file: run for file, run in alone.items() if task in run.samples}
    if not chosen and not alone:
        raise UsageError(
            f"{path}: expected the task {task}, got {_listed(tasks)}{nearest(task, tasks)}"
        )
    key = _metric(task, chosen, path, metric) if chosen else ""
    latest: dict[tuple[str, str | None, str | None], tuple[Rated, Path]] = {}
    for file, content in sorted(chosen.items(), key=lambda pair: (pair[1]["date"], str(pair[0]))):
        rated = _rated(content, file, _number(content["results"][task][key], str(file)))
        latest[rated.name, rated.revision, rated.file] = rated, file
    for file, run in alone.items():
        name, scores = task_scores(run, task, metric)
        key = key or name
        known = [sample.correct for sample in scores.values() if math.isfinite(sample.correct)]
        mean = _number(math.fsum(known) / len(known) if known else math.nan, str(file))
        rated = Rated(run.model, None, mean, str(file))
        if run.by_inspect:
            rated = _rated(run.results, file, mean)
        latest[rated.name, rated.revision, rated.file] = rated, file
        runs[file] = run.results
    notes = _unlike(task, {file: runs[file] for _, file in latest.values() if runs[file]})
    notes += [
        note for run in alone.values() for note in section(run.results, "inspect").get("notes", [])
    ]
    every = [*chosen, *alone]
    count = f"{len(every)} of lm-eval's result files" if len(every) > 1 else every[0].name
    meaning = "; ".join([f"{task}, {key} ({count})", *notes])
    return Accuracies(tuple(rated for rated, _ in latest.values()), meaning, complete=False)


def _unlike(task: str, runs: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Notes on another version of the task, or other documents.

    Raises:
        UsageError: Other numbers of few-shot examples.
    """
    notes = []
    files = list(runs)
    facts = {file: _Asked.of(task, content) for file, content in runs.items()}
    for file in files[1:]:
        first = facts[files[0]]
        other = facts[file]
        if first.hashes and first.hashes == other.hashes:
            continue
        if first.shots is not None and other.shots is not None and first.shots != other.shots:
            raise UsageError(
                f"expected results of {task} with one number of examples, got {first.shots}-shot in "
                f"{files[0]} and {other.shots}-shot in {file}; name results of one prompt"
            )
        if first.version != other.version:
            notes.append(f"versions {first.version} and {other.version} of the task")
        if first.limit != other.limit:
            notes.append(f"limits {first.limit} and {other.limit}: other questions")
    return list(dict.fromkeys(notes))


@dataclass(frozen=True)
class _Asked:
    """What a results file says of a task's questions; ``hashes`` are of all documents and prompts."""

    shots: str | None
    version: object
    limit: object
    hashes: object

    @classmethod
    def of(cls, task: str, content: Mapping[str, Any]) -> _Asked:
        members = section(content, "group_subtasks").get(task)
        names = [task, *(members if isinstance(members, list) else ())]
        shots = {_shots(name, content) for name in names} - {None}
        return cls(
            shots=" and ".join(sorted(str(number) for number in shots)) or None,
            version=section(content, "versions").get(task),
            limit=section(content, "config").get("limit"),
            hashes=section(content, "task_hashes").get(task),
        )


def _shots(task: str, content: Mapping[str, Any]) -> object:
    """The number of a task's few-shot examples; None if the results do not say."""
    places = (section(content, "n-shot").get(task), config_of(content, task).get("num_fewshot"))
    for number in (*places, section(content, "config").get("num_fewshot")):
        if isinstance(number, int | str):
            return number
    return None


def _from_race(runs: Mapping[Path, Mapping[str, Any]]) -> Accuracies:
    """Scores in a race, of checkpoints that answered all questions."""
    whole = {
        file: run for file, run in runs.items() if run["race"]["questions"] == run["race"]["of"]
    }
    rated = tuple(_rated(run, file, run["race"]["score"]) for file, run in whole.items())
    meaning = f"a race ({len(whole)} of {len(runs)} asked everything)"
    return Accuracies(rated, meaning, complete=False, dropped=len(runs) - len(whole))


def _results(file: Path) -> dict[str, Any]:
    content = read_results(file)
    date = content.get("date")
    return content | {"date": date if isinstance(date, int | float) else 0.0}


def _tasks(run: Mapping[str, Any]) -> list[str]:
    """The tasks of the results that are not a group's."""
    members = {name for names in (run.get("group_subtasks") or {}).values() for name in names}
    return [name for name in run["results"] if name not in members] or list(run["results"])


def _metric(
    task: str, runs: Mapping[Path, Mapping[str, Any]], path: Path, judge: str | None
) -> str:
    """The key of the task's accuracy that all results share."""
    contents = list(runs.values())
    scores = [content["results"][task] for content in contents]
    common = [key for key in scores[0] if all(key in other for other in scores)]
    have = [key for key in common if isinstance(scores[0][key], int | float)]
    have = [key for key in have if "_stderr" not in key and key != "sample_len"]
    key = results_metric(contents[0], task, have, judge)
    if key is not None:
        return key
    wanted = judge or ", ".join(JUDGES)
    raise UsageError(
        f"{path}: expected an accuracy of {task} ({wanted}), got {_listed(have) or 'none'}; name one by "
        "`--metric [FILTER/]METRIC`, or supply the numbers as a CSV file"
    )


def _rated(run: Mapping[str, Any], file: Path, accuracy: float) -> Rated:
    """The accuracy of the model that was evaluated, or of the adapter on it."""
    arguments = model_arguments(run)
    name = arguments.get("pretrained") or arguments.get("model") or run.get("model_name")
    if not name:
        raise UsageError(f"{file}: expected the model's name in config.model_args, got none")
    revision, weights = arguments.get("revision") or None, arguments.get("gguf_file") or None
    if not (peft := str(arguments.get("peft") or "")):
        return Rated(str(name), revision, accuracy, str(file), weights)
    place, at, commit = peft.partition("@")
    if REPOSITORY.fullmatch(place) and not Path(peft).exists():
        return Rated(place, commit if at else revision, accuracy, str(file))
    # A folder, perhaps of `--emit`, where each has its repository's name; the revision is the base's.
    return Rated(peft, None, accuracy, str(file), label=peft.rpartition("adapters/")[2])
