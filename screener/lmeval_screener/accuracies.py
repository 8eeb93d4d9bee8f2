"""Supplied accuracies: read from lm-eval's results, a CSV file or the Hub, matched by name.

They are read and matched before anything is screened, so that a name that fits nothing costs no request.
"""

from __future__ import annotations

import csv
import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmeval_dispersion.errors import UsageError
from lmeval_screener.targets import Target, label, labelled, run_and_step
from lmeval_screener.yaml_fields import nearest

HUB = "hub:"
# A task's accuracy in lm-eval's results: the first of these that is there.
_METRICS = ("acc", "exact_match", "em", "pass@1", "pass_at_1", "acc_norm", "prompt_level_strict_acc")
_FILTERS = ("none", "strict-match")
_SEARCHES = 8  # repositories asked for their results at a time


@dataclass(frozen=True)
class Rated:
    """An accuracy as its source has it.

    Attributes:
        name: The checkpoint, as the source writes it.
        revision: Its revision; None where the source names none.
        accuracy: In the source's unit.
        place: Where it stands, for messages.
        file: The GGUF file that was evaluated; None where the source names none.
        label: What a report called it; None where the source has no labels.
    """

    name: str
    revision: str | None
    accuracy: float
    place: str
    file: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Accuracies:
    """Accuracies of one source.

    Attributes:
        rated: All of them.
        meaning: What they are, such as ``gsm8k, exact_match,strict-match (5 of lm-eval's result files)``.
        complete: Whether each of them has to be of a checkpoint that is screened, as in a CSV file.
    """

    rated: tuple[Rated, ...]
    meaning: str
    complete: bool = True

    def check(self, targets: Sequence[Target]) -> None:
        """Make sure that they fit what is to be screened; a glob of revisions fits what it matches."""
        taken: dict[str, Rated] = {}
        index, any_fits = _Index(targets), False
        for rated in self.rated:
            fitting = index.matches(rated, expanded=False)
            any_fits |= bool(fitting)
            if len(fitting) > 1:
                names = ", ".join(target.label for target in fitting[:4])
                raise UsageError(
                    f"{rated.place}: {label(rated.name, rated.revision)} is screened "
                    f"{len(fitting)} times, as {names}{', …' if len(fitting) > 4 else ''}; "
                    "name one of them, a revision in `revision`"
                )
            if not fitting and self.complete:
                name, known = label(rated.name, rated.revision), _labels(targets)
                raise UsageError(
                    f"{rated.place}: expected a checkpoint that is screened, got {name!r}"
                    f"{nearest(name, known)}; screened: {_listed(known)}"
                )
            for target in fitting:
                if not _is_several(target) and taken.setdefault(target.label, rated) is not rated:
                    raise UsageError(
                        f"{rated.place}: {target.label} is there twice; expected one accuracy per checkpoint"
                    )
        if not any_fits:
            raise UsageError(
                f"expected accuracies of what is screened ({_listed(_labels(targets))}), got those of "
                f"{_listed([label(rated.name, rated.revision) for rated in self.rated])}"
            )

    def of(self, targets: Sequence[Target]) -> list[Target]:
        """The targets, globs expanded, each with its accuracy of this source and of no other."""
        index = _Index(targets)
        matches = ((rated, index.matches(rated)) for rated in self.rated)
        accuracies = {places[0].label: rated.accuracy for rated, places in matches if len(places) == 1}
        return [replace(target, accuracy=accuracies.get(target.label)) for target in targets]


def read_accuracies(source: str, targets: Sequence[Target]) -> Accuracies:
    """Accuracies of lm-eval's results, of a CSV file, or of the Hub, checked against the targets."""
    accuracies = find_accuracies(source, targets)
    accuracies.check(targets)
    return accuracies


def find_accuracies(source: str, targets: Sequence[Target]) -> Accuracies:
    """:func:`read_accuracies` before they are checked against the targets."""
    if source.startswith(HUB):
        return _from_hub(source[len(HUB) :], targets)
    path, task = Path(source).expanduser(), ""
    if not path.exists() and ":" in source:
        place, _, task = source.rpartition(":")
        path = Path(place).expanduser()
    if path.is_dir() or path.suffix == ".json" or task:
        return _from_results(path, task)
    return _from_csv(path)


# --- names ----------------------------------------------------------------------------------------------


class _Index:
    """Targets by every name that may mean them, so that ten thousand results are matched at once."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._labels: dict[str, list[Target]] = {}
        self._names: dict[str, list[Target]] = {}
        self._paths: dict[str, list[Target]] = {}
        self._globs = [target for target in targets if target.is_glob]
        several = (target for target in targets if _is_several(target) and not target.on_hub)
        self._several = next(several, None)
        for target, item in zip(targets, labelled(targets), strict=True):
            for text in {target.label, target.name, item.label}:
                self._labels.setdefault(text, []).append(target)
            if not target.on_hub:
                self._paths.setdefault(str(Path(target.repo).resolve()), []).append(target)
            for name in _names_of(target):
                self._names.setdefault(name, []).append(target)

    def matches(self, rated: Rated, *, expanded: bool = True) -> list[Target]:
        """The targets that a name stands for: that of just this label or folder, else all it may mean.

        Before an address is expanded its steps are unknown: the name may be any step's.
        """
        fitting = self._fitting(rated, expanded)
        if rated.file is None or len(fitting) < 2:
            return fitting
        return [t for t in fitting if t.file and t.file.lower() in rated.file.lower()] or fitting

    def _fitting(self, rated: Rated, expanded: bool) -> list[Target]:
        for text in (rated.label, label(rated.name, rated.revision)):
            if text is not None and (exact := self._labels.get(text)):
                return exact
        if rated.revision is None and (
            there := self._paths.get(str(Path(rated.name).expanduser().resolve()))
        ):
            return there  # run1/final and run2/final have one name, and are two folders
        repo = rated.name.rsplit("@", 1)[0] if rated.revision is None else rated.name
        keys = {rated.name, repo, *_folder_names(repo)}
        near = dict.fromkeys(target for key in keys for target in self._names.get(key, ()))
        matching = [target for target in (*near, *self._globs) if _may_mean(rated, target)]
        if not matching and not expanded and (run_and_step(rated.name) or rated.name.startswith("models:/")):
            matching = [self._several] if self._several else []
        return matching


def _names_of(target: Target) -> set[str]:
    """Names that may stand for a target, without its revision; a revision alone may too."""
    if target.is_glob:
        return set()  # looked at one by one
    names = {target.repo, target.repo.rpartition("/")[2], target.revision or target.repo}
    if not target.on_hub:
        # As the tables print a folder: its last part, or its step in a training run.
        path = Path(target.repo)
        names |= {path.name, str(path.resolve())}
        if run := run_and_step(target.repo):
            names |= {run[1], f"{Path(run[0]).name}/{run[1]}"}
    return names


def _is_several(target: Target) -> bool:
    """A target may stand for several checkpoints."""
    return target.is_glob or target.scheme is not None


def _may_mean(rated: Rated, target: Target) -> bool:
    repo, revision = rated.name, rated.revision
    if revision is None and "@" in repo:
        repo, revision = repo.rsplit("@", 1)
    names = {target.repo, target.repo.rpartition("/")[2]}
    if not target.on_hub:
        names = _names_of(target)
        return revision is None and (repo in names or bool(_folder_names(repo) & names))
    if revision is None:
        is_revision = "/" not in repo and fnmatch.fnmatchcase(repo, target.revision or "")
        return is_revision or (repo in names and not target.is_glob)
    return repo in names and fnmatch.fnmatchcase(revision, target.revision or "main")


def _folder_names(name: str) -> set[str]:
    """Names of a folder wherever it lies now: lm-eval's results keep the path of another machine."""
    path = Path(name).expanduser()
    if not name.startswith(("/", ".", "~")):
        return {str(path.resolve())}
    run = run_and_step(name)
    return {str(path.resolve()), f"{Path(run[0]).name}/{run[1]}" if run else path.name}


def _labels(targets: Sequence[Target]) -> list[str]:
    return [item.label for item in labelled(targets)]


def _listed(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --- a CSV file -----------------------------------------------------------------------------------------


def _from_csv(path: Path) -> Accuracies:
    rated = [
        Rated(
            row["repo"],
            row.get("revision") or None,
            _number(row["accuracy"], place),
            place,
            label=row.get("label"),
        )
        for place, row in _rows(path)
    ]
    if not rated:
        raise UsageError(f"{path}: expected a line for each checkpoint, got none")
    return Accuracies(tuple(rated), str(path))


def _rows(path: Path) -> list[tuple[str, dict[str, str]]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            heads = [name.strip().lower() for name in reader.fieldnames or ()]
            names = next((name for name in ("repo", "checkpoint", "name", "label") if name in heads), "")
            reader.fieldnames = ["repo" if name == names else name for name in heads]
            for column in ("repo", "accuracy"):
                if column not in reader.fieldnames:
                    raise UsageError(
                        f"{path}: expected a first line with label or repo, accuracy and optionally "
                        f"revision, got {', '.join(heads) or 'nothing'}"
                    )
            rows = []
            for row in reader:
                place = f"{path}: line {reader.line_num}"
                if "" in row:
                    raise UsageError(f"{place}: expected {len(reader.fieldnames)} values")
                rows.append((place, {key: value.strip() for key, value in row.items()}))
            return rows
    except OSError as error:
        raise UsageError(
            f"{path}: expected a readable CSV file, got {error.strerror or error}; check the path"
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: expected a CSV file in UTF-8, got: {error}") from error


def _number(value: object, place: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{place}: expected an accuracy that is a number, such as 49.8, got {value!r}")
    return number


# --- lm-eval's results ----------------------------------------------------------------------------------


def _from_results(path: Path, task: str) -> Accuracies:
    files = sorted(path.rglob("results_*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path}: expected lm-eval's results_*.json in the folder, found none")
    runs = [(file, _results(file)) for file in files]
    tasks = {name: None for _, run in runs for name in _tasks(run)}
    if not task:
        if len(tasks) != 1:
            raise UsageError(
                f"{path} holds {len(tasks)} tasks ({_listed(list(tasks))}); name one: {path}:TASK"
            )
        task = next(iter(tasks))
    chosen = [(file, run) for file, run in runs if task in run["results"]]
    if not chosen:
        raise UsageError(
            f"{path}: expected the task {task}, got {_listed(list(tasks))}{nearest(task, tasks)}"
        )
    metric = _metric(task, [run["results"][task] for _, run in chosen], path)
    latest: dict[tuple[str, str | None, str | None], Rated] = {}
    for file, run in sorted(chosen, key=lambda pair: (_date(pair[1]), str(pair[0]))):
        name, revision, weights = _model(run, file)
        value = _number(run["results"][task][metric], str(file))
        latest[name, revision, weights] = Rated(name, revision, value, str(file), weights)
    count = f"{len(chosen)} of lm-eval's result files" if len(chosen) > 1 else chosen[0][0].name
    return Accuracies(tuple(latest.values()), f"{task}, {metric} ({count})", complete=False)


def _results(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: expected lm-eval's results, got {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(
            f"{file}: expected lm-eval's results as JSON (a CSV file takes no :TASK), got: {error}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise UsageError(f"{file}: expected lm-eval's results with the key `results`, got other JSON")
    return content


def _tasks(run: Mapping[str, Any]) -> list[str]:
    """The tasks that were asked for: those of no group."""
    members = {name for names in (run.get("group_subtasks") or {}).values() for name in names}
    return [name for name in run["results"] if name not in members] or list(run["results"])


def _metric(task: str, results: Sequence[Mapping[str, Any]], path: Path) -> str:
    """The key of the task's accuracy that all results have."""
    common = [key for key in results[0] if all(key in other for other in results)]
    for metric in _METRICS:
        keys = [key for key in common if key.partition(",")[0] == metric]
        for key in (*(f"{metric},{name}" for name in _FILTERS), *keys):
            if key in keys:
                return key
    have = [key for key in common if isinstance(results[0][key], float) and "_stderr" not in key]
    raise UsageError(
        f"{path}: expected an accuracy of {task} ({', '.join(_METRICS)}), got {_listed(have) or 'none'}; "
        "supply the numbers as a CSV file"
    )


def _model(run: Mapping[str, Any], file: Path) -> tuple[str, str | None, str | None]:
    arguments = (run.get("config") or {}).get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(part.partition("=")[::2] for part in arguments.split(","))
    name = arguments.get("pretrained") or arguments.get("model") or run.get("model_name")
    if not name:
        raise UsageError(f"{file}: expected the model's name in config.model_args, got none")
    return str(name), arguments.get("revision") or None, arguments.get("gguf_file") or None


def _date(run: Mapping[str, Any]) -> float:
    date = run.get("date")
    return float(date) if isinstance(date, (int, float)) else 0.0


# --- the Hub --------------------------------------------------------------------------------------------


def _from_hub(task: str, targets: Sequence[Target]) -> Accuracies:
    """The results that repositories publish in ``.eval_results``, by huggingface_hub."""
    import huggingface_hub

    if not hasattr(huggingface_hub, "parse_eval_result_entries"):
        raise UsageError(
            f"{HUB}{task}: expected huggingface_hub 1.4 or newer, which reads .eval_results, got "
            f"{huggingface_hub.__version__}; run: pip install -U huggingface_hub, or supply a CSV file"
        )
    from huggingface_hub.errors import HfHubHTTPError

    repos = list(dict.fromkeys(target.repo for target in targets if target.on_hub))
    if not task or not repos:
        raise UsageError(f"expected {HUB}TASK and repositories of the Hub, got {HUB}{task} and {len(repos)}")
    api = huggingface_hub.HfApi()

    def published(repo: str) -> list[Any]:
        try:
            return api.model_info(repo, expand=["evalResults"], timeout=30).eval_results or []
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code in (401, 403, 404):
                return []  # its screening will say what is wrong with it
            raise

    try:
        with ThreadPoolExecutor(_SEARCHES) as pool:
            entries = dict(zip(repos, pool.map(published, repos), strict=True))
    except Exception as error:  # huggingface_hub lets those of its HTTP library through, whichever that is
        raise UsageError(f"{HUB}{task}: the Hub gave no results ({error}); supply a CSV file") from error
    wanted = task.casefold()
    rated: list[Rated] = []
    kinds: set[str] = set()
    for repo, results in entries.items():
        for entry in results:
            if wanted in _called(entry):
                kinds.add(f"{entry.dataset_id}/{entry.task_id}")
                place = f".eval_results of {repo}"
                rated.append(Rated(repo, "main", _number(entry.value, place), place))
    if len(kinds) > 1:
        raise UsageError(f"{HUB}{task} may be {_listed(sorted(kinds))}; name one of them after {HUB}")
    if not rated:
        have = sorted({f"{e.dataset_id}/{e.task_id}" for results in entries.values() for e in results})
        raise UsageError(
            f"{HUB}{task}: none of the {len(repos)} repositories publishes it; they publish "
            f"{_listed(have) or 'no results'}"
        )
    return Accuracies(tuple(rated), f"{next(iter(kinds))}, as {len(rated)} repositories publish it", False)


def _called(entry: Any) -> set[str]:
    """Names by which a published result may be asked for."""
    names = (entry.task_id, entry.dataset_id, entry.dataset_id.rpartition("/")[2])
    return {name.casefold() for name in (*names, f"{entry.dataset_id}/{entry.task_id}")}
