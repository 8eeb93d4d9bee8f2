"""Screen released checkpoints on the Hub, and hold G and ratio against their published scores.

    python -m benchmarks.validity.hub --dry-run
    python -m benchmarks.validity.hub --only datadecide --limit 9

The figures come from `screen-checkpoints`, with a registry that a stopped run goes on from. The page goes to
standard output, each checkpoint's figures and score to WORK/SUITE.jsonl. HF_TOKEN, HF_ENDPOINT and HF_HOME
work as in huggingface_hub. Exit status: 0 done, 1 nothing was screened, 2 wrong usage, 3 some are missing,
130 stopped.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from huggingface_hub import HfApi, hf_hub_download

from benchmarks.validity import records
from benchmarks.validity.analysis import RESAMPLES, Resampled, drawn, outcome
from benchmarks.validity.page import markdown
from benchmarks.validity.texts import REFERENCES

CONFIGURATION = records.ROOT / "benchmarks" / "validity" / "hub.yaml"
WORK = records.ROOT / "build" / "validity-hub"
SCREEN = [sys.executable, "-m", "lmeval_screener"]
RECIPES, PAIRS = 5, 10  # fewer conclude nothing
COLUMNS = ["recipe", "size", "seed", "G", "ratio", "skill"]
EVERY = "all"  # for a part of a name that a suite does not vary


class Key(NamedTuple):
    """How a published score names a checkpoint, by the keys of the configuration."""

    recipe: str
    size: str
    seed: str
    step: int


@dataclass(frozen=True)
class Suite:
    """Checkpoints of one publisher; see hub.yaml."""

    name: str
    about: str
    repository: str
    revision: str
    names: Mapping[str, Mapping[str, str]]
    last: Mapping[str, int]
    domain: str
    scores: Mapping[str, str]
    tasks: Mapping[str, int]
    metric: str
    chance: float

    def key(self, parts: Mapping[str, str | None]) -> Key | None:
        """The key for parts of a name; None where one is not in the configuration."""
        words = []
        for part in ("recipe", "size", "seed"):
            word = parts.get(part) or ""
            if part in self.names and word not in self.names[part]:
                return None
            words.append(word if part in self.names else EVERY)
        return Key(words[0], words[1], words[2], int(parts["step"] or 0))

    def skill(self, tasks: Mapping[str, float]) -> float | None:
        """The mean over tasks, weighted by questions; None where a task is missing."""
        if not tasks.keys() >= self.tasks.keys():
            return None
        return sum(tasks[task] * count for task, count in self.tasks.items()) / sum(
            self.tasks.values()
        )


def read_suites(path: Path) -> dict[str, Suite]:
    """The suites of a configuration.

    Raises:
        ValueError: A key is missing or unknown.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        return {name: Suite(name=name, **entry) for name, entry in content.items()}
    except (TypeError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: expected suites with the keys of {Suite.__name__}, got {error}"
        ) from error


def checkpoints_of(suite: Suite, limit: int | None) -> tuple[dict[str, Key], list[str]]:
    """The last branch of every run by its name, and a sentence for every repository without one."""
    runs: dict[tuple[str, Key], tuple[str, int]] = {}
    missing: list[str] = []
    combinations = itertools.product(
        *(suite.names.get(part, {EVERY: EVERY}) for part in ("recipe", "size"))
    )
    for recipe, size in itertools.islice(combinations, limit):
        repository = suite.repository.format(recipe=recipe, size=size)
        try:
            refs = HfApi().list_repo_refs(repository)
        except Exception as error:  # huggingface_hub lets those of its HTTP library through
            missing.append(
                f"{repository}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            )
            continue
        names = [ref.name for ref in [*refs.branches, *refs.tags]]
        matches = [match for name in names if (match := re.fullmatch(suite.revision, name))]
        for match in matches:
            key = suite.key({"recipe": recipe, "size": size, **match.groupdict()})
            if key is None or key.step > suite.last[size]:
                continue
            run = (repository, key._replace(step=0))
            if key.step >= runs.get(run, ("", -1))[1]:
                runs[run] = (match[0], key.step)
        if not matches:
            missing.append(f"{repository}: no branch such as {suite.revision} among {len(names)}")
    return {
        f"{repository}@{branch}": key._replace(step=step)
        for (repository, key), (branch, step) in runs.items()
    }, missing


def screened(
    suite: Suite, names: Iterable[str], work: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON report of `screen-checkpoints` on a list of names."""
    work.mkdir(parents=True, exist_ok=True)
    report = work / f"{suite.name}.json"
    report.unlink(missing_ok=True)
    tokens = ["--domain", suite.domain, "--reference", REFERENCES["reference"]]
    command = [*SCREEN, "-", *tokens, "-o", str(report), *options]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    listed = "".join(f"{name}\n" for name in names)
    status = subprocess.run(
        command, input=listed, text=True, check=False, env=environment
    ).returncode
    text = report.read_text("utf-8") if report.exists() else "{}"
    return status, {"plan": text} if "--dry-run" in options else json.loads(text)


# --- published scores -----------------------------------------------------------------------------------


def published(suite: Suite, keys: Iterable[Key], work: Path) -> dict[Key, float]:
    """The skill of every checkpoint that was scored in all tasks."""
    wanted = set(keys)
    tasks: dict[Key, dict[str, float]] = {}
    lines = _parquet(suite) if "files" in suite.scores else _lm_eval(suite, wanted, work)
    for key, task, score in lines:
        if key in wanted and task in suite.tasks and math.isfinite(score):
            tasks.setdefault(key, {})[task] = score
    skills = {key: suite.skill(scores) for key, scores in tasks.items()}
    return {key: skill for key, skill in skills.items() if skill is not None}


def _parquet(suite: Suite) -> Iterable[tuple[Key | None, str, float]]:
    """Rows of a dataset's parquet files; a row's metrics are JSON or a Python dictionary as text."""
    import pyarrow.parquet as pq

    dataset = suite.scores["dataset"]
    files = HfApi().list_repo_files(dataset, repo_type="dataset")
    columns = {"recipe": "data", "size": "params", "seed": "seed"}
    named = {
        part: {value: key for key, value in names.items()} for part, names in suite.names.items()
    }
    for name in sorted(fnmatch.filter(files, suite.scores["files"])):
        path = hf_hub_download(dataset, name, repo_type="dataset")
        wanted = [*columns.values(), "step", "task", "metrics"]
        for batch in pq.ParquetFile(path).iter_batches(columns=wanted, batch_size=20_000):
            for row in batch.to_pylist():
                parts = {
                    part: named[part].get(str(row[column])) for part, column in columns.items()
                }
                if None in parts.values() or row["task"] not in suite.tasks:
                    continue
                try:
                    metrics = json.loads(row["metrics"])
                except ValueError:
                    metrics = ast.literal_eval(row["metrics"])
                score = float(metrics.get(suite.metric, math.nan))
                yield suite.key({**parts, "step": str(int(row["step"]))}), row["task"], score


def _lm_eval(suite: Suite, wanted: set[Key], work: Path) -> Iterable[tuple[Key | None, str, float]]:
    """Results of lm-eval in a git repository or a dataset; the path says whose they are."""
    pattern = re.compile(suite.scores["path"])
    if address := suite.scores.get("git"):
        place = work / f"{suite.name}-scores"
        if not (place / ".git").is_dir():
            sparse = ["--depth", "1", "--filter=blob:none", "--sparse"]
            subprocess.run(["git", "clone", "--quiet", *sparse, address, str(place)], check=True)
        subprocess.run(
            ["git", "-C", str(place), "sparse-checkout", "set", suite.scores["folder"]], check=True
        )
        names = [path.relative_to(place).as_posix() for path in place.rglob("*.json")]
    else:
        dataset = suite.scores["dataset"]
        names = HfApi().list_repo_files(dataset, repo_type="dataset")
    for name in sorted(names):
        match = pattern.fullmatch(name)
        key = suite.key(match.groupdict()) if match else None
        if key not in wanted:
            continue
        path = (
            place / name if address else Path(hf_hub_download(dataset, name, repo_type="dataset"))
        )
        run = json.loads(path.read_text("utf-8"))
        revision = re.search(
            r"revision=step(\d+)", str(run.get("config", {}).get("model_args", ""))
        )
        if key is None or (revision and int(revision[1]) != key.step):
            continue  # of another checkpoint than the path says
        for task, metrics in run.get("results", {}).items():
            score = metrics.get(f"{suite.metric},none", metrics.get(suite.metric, math.nan))
            yield key, task, float(score)


# --- the verdict ----------------------------------------------------------------------------------------


def judged(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for G, for ratio and for the pairs on which both agree: pairs, share right, verdict.

    Args:
        suite: Its tasks give the questions.
        rows: Checkpoints: ``recipe``, ``size``, ``seed``, ``G``; ``ratio`` and ``skill`` may be None.
    """
    questions = sum(suite.tasks.values())
    table = pd.DataFrame([row for row in rows if row["skill"] is not None], columns=COLUMNS)
    skill, groups = table.skill.to_numpy(float), (table["size"] + " " + table.seed).to_numpy()
    first, second = np.triu_indices(len(skill), 1)
    error = np.sqrt(
        (skill[first] * (1 - skill[first]) + skill[second] * (1 - skill[second])) / questions
    )
    kept = (groups[first] == groups[second]) & (np.abs(skill[first] - skill[second]) > 2 * error)
    first, second = first[kept], second[kept]
    g, ratio = (
        (np.sign((x[first] - x[second]) * (skill[first] - skill[second])) + 1) / 2
        for x in (table[name].to_numpy(float) for name in ("G", "ratio"))
    )
    codes, names = pd.factorize(table.recipe)
    draws = drawn(len(names)) if len(names) else np.zeros((RESAMPLES, 0), int)
    times = (
        np.stack([(draws == number).sum(1) for number in codes], axis=1) if len(codes) else draws
    )
    chance = suite.chance + 2 * math.sqrt(suite.chance * (1 - suite.chance) / questions)
    recipes, above = table.recipe.nunique(), int((table.skill > chance).sum())
    lines = []
    for figure, right, among in (
        ("G", g, np.isfinite(g)),
        ("ratio", ratio, np.isfinite(ratio)),
        ("both", g, g == ratio),
    ):
        line: dict[str, Any] = {"figure": figure, "pairs": int(among.sum()), "counted": len(g)}
        if recipes < RECIPES or among.sum() < PAIRS or 2 * above < len(table):
            verdict = f"not tested: {recipes} recipes, {among.sum()} pairs, {above} of {len(table)} above chance"
            line |= {"right": "", "verdict": verdict}
        else:
            weight = (times[:, first] * times[:, second])[:, among]
            samples = (weight @ right[among]) / np.maximum(weight.sum(1), 1)
            share = Resampled(float(right[among].mean()), samples).estimate
            line |= {"right": str(share), "verdict": outcome(share.low > 0.75, share.low > 0.5)}
        lines.append(line)
    return lines


def page(suite: Suite, rows: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> str:
    """A suite's part of the page, in Markdown."""
    lines = judged(suite, rows)
    scored = sum(row["skill"] is not None for row in rows)
    parts = [
        f"## {suite.about}",
        f"{len(rows)} checkpoints were screened, {scored} of them have a published score.",
        markdown(
            ["figure", "pairs", "counted", "share right (95 %)", "verdict"],
            [line.values() for line in lines],
        ),
    ]
    if missing:
        parts += ["### Missing", "\n".join(f"- {line}" for line in missing)]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, or print what it would cost; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validity.hub", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--configuration", type=Path, default=CONFIGURATION, metavar="FILE")
    parser.add_argument("--only", metavar="SUITE,SUITE", help="these suites (default: all)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="the first N repositories of a suite"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="checkpoints, requests and bytes, and stop"
    )
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER")
    args = parser.parse_args(argv)
    status = 0
    try:
        suites = read_suites(args.configuration)
        names = args.only.split(",") if args.only else list(suites)
        if unknown := set(names) - suites.keys():
            raise ValueError(
                f"--only: expected names of {', '.join(suites)}, got {', '.join(sorted(unknown))}"
            )
        for suite in (suites[name] for name in names):
            checkpoints, missing = checkpoints_of(suite, args.limit)
            if not checkpoints:
                print(
                    f"validity-hub: {suite.name}: no checkpoint; {'; '.join(missing[:3])}",
                    file=sys.stderr,
                )
                status = 1
            elif args.dry_run:
                options = ["--dry-run", "--format", "table"]
                print(
                    f"{suite.about}\n{screened(suite, checkpoints, args.work, *options)[1]['plan']}"
                )
            else:
                status = max(status, _run(suite, checkpoints, missing, args.work))
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"validity-hub: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("validity-hub: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return status


def _run(suite: Suite, checkpoints: Mapping[str, Key], missing: list[str], work: Path) -> int:
    registry = ["--registry", str(work / f"{suite.name}.sqlite"), "--format", "json"]
    status, report = screened(suite, checkpoints, work, *registry)
    if status == 130 or any(entry["error"] == "Interrupted" for entry in report.get("failed", ())):
        raise KeyboardInterrupt
    missing += [
        f"{entry['repo']}: {entry['error']}: {entry['message']}"
        for entry in report.get("failed", ())
    ]
    skills: Mapping[Key, float] = {}
    try:
        skills = published(suite, checkpoints.values(), work)
    except Exception as error:  # huggingface_hub lets those of its HTTP library through
        missing.append(f"scores: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
    rows = []
    for entry in report.get("checkpoints", ()):
        name = f"{entry['repo']}@{entry['requested_revision']}"
        key = checkpoints.get(name)
        if key is None:
            missing.append(
                f"{name}: the Hub answers under this name, which is not the name that was asked"
            )
            continue
        ratio = entry.get("ratio") or {}
        figures = {"G": entry["gap"]["cosine"]["mean"], "ratio": ratio.get("mean")}
        rows.append({"name": name, **key._asdict(), **figures, "skill": skills.get(key)})
    (work / f"{suite.name}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), "utf-8"
    )
    print(page(suite, rows, missing))
    return 0 if rows and not missing else 3 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
