"""Published scores: parquet files of a dataset; results of lm-eval in a dataset, a git repository, a folder.

A source that is not there, or that has none of the tasks, is a line of what is missing; the others count.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import math
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.validity.hub.configuration import ONE, Suite
from benchmarks.validity.hub.plan import Checkpoint, Missing, patiently, said

#: (recipe, size, seed, step), keys of the configuration.
Key = tuple[str, str, str, int]
#: Scores by checkpoint and (task, metric).
Scores = dict[Key, dict[tuple[str, str], float]]
_FILTERS = ("", ",none", ",strict-match", ",flexible-extract")
_SPECIFICATION = re.compile(r"[:@].*")  # how OLMES goes on after a task's name


def published(
    suite: Suite, checkpoints: Sequence[Checkpoint], work: Path
) -> tuple[Scores, dict[Key, float], list[Missing]]:
    """Scores by checkpoint, losses by checkpoint, and what could not be read."""
    scores: Scores = {}
    losses: dict[Key, float] = {}
    missing: list[Missing] = []
    for source in suite.sources:
        place = source.get("dataset") or source.get("git") or source.get("local")
        place = f"{place}/{source['files']}" if "files" in source else place
        try:
            if source["kind"] == "parquet":
                found, lost = _parquet(suite, source)
                losses |= lost
                for line in _unread(suite, source, found, lost):
                    missing.append(line)
            else:
                found, refused = _lm_eval(suite, source, checkpoints, work)
                missing += refused
        except Exception as error:  # huggingface_hub lets those of its HTTP library through
            missing.append(Missing(suite.name, str(place), *_said(source, error)))
            continue
        for key, own in found.items():
            scores[key] = {**own, **scores.get(key, {})}
    return scores, losses, missing


def skills_of(suite: Suite, own: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """A checkpoint's skills: means over tasks by their questions; those that lack a task are not there."""
    found = {}
    for name, skill in suite.skills.items():
        values = [own.get((task, skill.metric)) for task in skill.tasks]
        if all(value is not None and math.isfinite(value) for value in values):
            weighted = zip(values, skill.tasks.values(), strict=True)
            found[name] = (
                sum(value * count for value, count in weighted if value is not None) / skill.questions
            )
    return found


def _said(source: Mapping[str, Any], error: Exception) -> tuple[str, str]:
    if source.get("local") and isinstance(error, FileNotFoundError):
        return "NoScores", (
            "nothing could be compared: no scores are published; put results of lm_eval --output_path there, "
            "evaluated with pretrained=REPOSITORY,revision=BRANCH"
        )
    word, sentence = said(str(source.get("dataset")), error)
    return "NoScores", f"{word}: {sentence}"


# --- parquet files of a dataset -------------------------------------------------------------------------


def _parquet(suite: Suite, source: Mapping[str, Any]) -> tuple[Scores, dict[Key, float]]:
    import pyarrow.parquet as pq
    from huggingface_hub import HfApi, hf_hub_download

    dataset = source["dataset"]
    every = patiently(lambda: HfApi().list_repo_files(dataset, repo_type="dataset"))
    names = fnmatch.filter(every, source["files"])
    if not names:
        raise FileNotFoundError(f"expected files such as {source['files']} in {dataset}, found none")
    keys = _Keys(suite)
    wanted = {task for skill in suite.skills.values() for task in skill.tasks}
    metrics = {skill.metric for skill in suite.skills.values()}
    columns = source.get("columns", {})
    loss = columns.get(suite.loss)
    scores: Scores = {}
    losses: dict[Key, float] = {}
    for name in sorted(names):
        file = pq.ParquetFile(patiently(partial(hf_hub_download, dataset, name, repo_type="dataset")))
        read = ["params", "data", "seed", "step", *([loss] if columns else ["task", "metrics"])]
        for part in file.iter_batches(columns=read, batch_size=20_000):
            for row in part.to_pylist():
                task = _SPECIFICATION.sub("", row.get("task") or "")
                if (not columns and task not in wanted) or (key := keys.of(row)) is None:
                    continue
                if columns:
                    if (value := _number(row[loss])) is not None and value > 0:
                        losses[key] = math.log(value)
                    continue
                own = _metrics(row["metrics"])
                for metric in metrics & own.keys():
                    if (value := _number(own[metric])) is not None:
                        scores.setdefault(key, {})[task, metric] = value
    return scores, losses


class _Keys:
    """From names in the scores to keys of the configuration."""

    def __init__(self, suite: Suite) -> None:
        self._of = {
            part: {name: key for key, name in suite.parts[part].items()}
            for part in ("recipe", "size", "seed")
        }

    def of(self, row: Mapping[str, Any]) -> Key | None:
        """The key of a row, None for a checkpoint that is none of the suite's."""
        recipe = self._of["recipe"].get(str(row["data"]))
        size, seed = self._of["size"].get(str(row["params"])), self._of["seed"].get(str(row["seed"]))
        step = _number(row["step"])
        if recipe is None or size is None or seed is None or step is None:
            return None
        return recipe, size, seed, int(step)


def _metrics(text: object) -> Mapping[str, Any]:
    """The metrics of a task: a structure, JSON, or a Python dictionary as text."""
    if isinstance(text, Mapping):
        return text
    try:
        found = json.loads(str(text))
    except ValueError:
        try:
            found = ast.literal_eval(str(text))
        except (ValueError, SyntaxError):
            return {}
    return found if isinstance(found, Mapping) else {}


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _unread(
    suite: Suite, source: Mapping[str, Any], scores: Scores, losses: Mapping[Key, float]
) -> Iterable[Missing]:
    if not scores and not losses:
        yield Missing(
            suite.name, f"{source['dataset']}/{source['files']}", "NoScores",
            "no row of these files is of a checkpoint and a task of the configuration",
        )  # fmt: skip


# --- results of lm-eval ---------------------------------------------------------------------------------


def _lm_eval(
    suite: Suite, source: Mapping[str, Any], checkpoints: Sequence[Checkpoint], work: Path
) -> tuple[Scores, list[Missing]]:
    root = _root(suite, source, checkpoints, work)
    pattern = re.compile(source.get("path", r".*results_.*\.json"))
    known = {(one.repository, one.revision): one for one in checkpoints}
    scores: Scores = {}
    refused: list[Missing] = []
    others = files = 0
    for file in sorted(root.rglob("*.json")):
        path = file.relative_to(root).as_posix()
        if (match := pattern.fullmatch(path)) is None:
            continue
        files += 1
        try:
            run = json.loads(file.read_text("utf-8"))
            results = dict(run["results"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            refused.append(Missing(suite.name, path, "NoScores", f"expected results of lm-eval, got {error}"))
            continue
        one = known.get(_evaluated(run))
        key = _key_of_path(suite, match) if match.groupdict() else one.key if one else None
        if source.get("same") and (one is None or one.key != key):
            # Of a step that nobody looks at, or of another model than the path says.
            others += key in {c.key for c in checkpoints}
            continue
        if key is not None:
            own = scores.setdefault(key, {})
            for skill in suite.skills.values():
                for task in skill.tasks:
                    if (value := _value(results.get(task), skill.metric)) is not None:
                        own[task, skill.metric] = value  # the last file by name, which is the latest
    place = str(source.get("dataset") or source.get("git") or source.get("local"))
    if others:
        refused.append(
            Missing(
                suite.name, place, "OtherModel", f"{others} files are of another model than their path says"
            )
        )
    if not files:
        raise FileNotFoundError(f"expected files such as {pattern.pattern}, found none")
    return scores, refused


def _root(suite: Suite, source: Mapping[str, Any], checkpoints: Sequence[Checkpoint], work: Path) -> Path:
    """The folder of a source's files; what is on the Hub or in git is brought here once and kept."""
    if local := source.get("local"):
        return Path(local)
    if address := source.get("git"):
        place = work / "scores" / suite.name
        if not (place / ".git").is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            sparse = ["--depth", "1", "--filter=blob:none", "--sparse"]
            _git("clone", "--quiet", *sparse, address, str(place))
        _git("-C", str(place), "sparse-checkout", "set", source["folder"])
        return place
    from huggingface_hub import HfApi, hf_hub_download

    # Only files of checkpoints that are looked at: there are several a step, one for each group of tasks.
    dataset = source["dataset"]
    pattern, wanted = re.compile(source["path"]), {one.key for one in checkpoints}
    commit = patiently(
        lambda: HfApi().dataset_info(dataset)
    ).sha  # a file of a commit that is here costs no request
    names = patiently(lambda: HfApi().list_repo_files(dataset, repo_type="dataset", revision=commit))
    own = [
        name for name in names if (match := pattern.fullmatch(name)) and _key_of_path(suite, match) in wanted
    ]
    if not own:
        raise FileNotFoundError(f"expected files such as {source['path']} in the dataset, found none of use")

    def bring(name: str) -> str:
        return patiently(lambda: hf_hub_download(dataset, name, repo_type="dataset", revision=commit))

    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(bring, own))
    return Path(files[0].removesuffix(own[0]))


def _git(*words: str) -> None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"git {words[0]} failed: {done.stderr.strip()[-200:]}")


def _key_of_path(suite: Suite, match: re.Match[str]) -> Key | None:
    groups = match.groupdict()
    parts = []
    for part in ("recipe", "size", "seed"):
        key = groups.get(part) or ""
        named = suite.parts[part]
        if not named:
            parts.append(ONE)
        elif key in named:
            parts.append(key)
        else:
            return None
    return parts[0], parts[1], parts[2], int(groups["step"])


def _evaluated(run: Mapping[str, Any]) -> tuple[str, str]:
    """Repository and branch that a run of lm-eval names."""
    arguments = (run.get("config") or {}).get("model_args") or {}
    if isinstance(arguments, str):
        arguments = dict(part.partition("=")[::2] for part in arguments.split(","))
    return str(arguments.get("pretrained", "")), str(arguments.get("revision", "main"))


def _value(task: object, metric: str) -> float | None:
    if not isinstance(task, Mapping):
        return None
    for name in _FILTERS:
        if (value := _number(task.get(metric + name))) is not None:
            return value
    return None
