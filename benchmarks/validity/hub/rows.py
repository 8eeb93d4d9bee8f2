"""Results as JSON lines, a file a suite: one line a checkpoint, one for each thing that could not be had."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.validity import results
from benchmarks.validity.hub.configuration import HubStudy, Suite
from benchmarks.validity.hub.plan import Checkpoint, Missing
from benchmarks.validity.hub.scores import Key, Scores, skills_of


def rows_of(
    study: HubStudy,
    suite: Suite,
    checkpoints: Sequence[Checkpoint],
    figures: Mapping[str, Mapping[str, float]],
    commits: Mapping[str, str],
    scores: Scores,
    losses: Mapping[Key, float],
    missing: Sequence[Missing],
) -> list[dict[str, Any]]:
    """All lines of a suite."""
    made = {"configuration": results.digest(study.path), **results.provenance()}
    rows: list[dict[str, Any]] = []
    for one in checkpoints:
        own = skills_of(suite, scores.get(one.key, {}))
        line: dict[str, Any] = {
            "suite": suite.name,
            "name": one.name,
            "revision": commits.get(one.name),
            "step": one.step,
        }
        line |= {part: one.part(part) for part in ("recipe", "size", "seed")}
        line |= {"figures": figures.get(one.name), "skills": own, "loss": losses.get(one.key)}
        rows.append({**line, **made})
    for lost in [*missing, *_unmatched(suite, checkpoints, figures, scores)]:
        rows.append(
            {"suite": suite.name, "name": lost.name, "error": lost.error, "message": lost.message, **made}
        )
    return rows


def _unmatched(
    suite: Suite, checkpoints: Sequence[Checkpoint], figures: Mapping[str, Any], scores: Scores
) -> Iterable[Missing]:
    """Checkpoints without a score, counted by size, and scores without a checkpoint, by repository."""
    there = {one.key for one in checkpoints}
    repositories = {(one.part("recipe"), one.part("size")): one.repository for one in checkpoints}
    absent: dict[str, list[str]] = {}
    for recipe, size, seed, step in sorted(scores.keys() - there, key=str):
        if suite.step_wanted(size, step) and (recipe, size) in repositories:
            absent.setdefault(repositories[recipe, size], []).append(f"step {step} {seed}".strip())
    for repository, steps in absent.items():
        yield Missing(
            suite.name, repository, "RevisionNotFound",
            f"{len(steps)} checkpoints have a score and no branch: {', '.join(steps[:3])}"
            + (", …" if len(steps) > 3 else ""),
        )  # fmt: skip
    read = [one for one in checkpoints if one.name in figures]
    sizes = Counter(one.part("size") for one in read)
    for name in suite.skills if scores else ():
        without = [one for one in read if name not in skills_of(suite, scores.get(one.key, {}))]
        for size, count in Counter(one.part("size") for one in without).items():
            yield Missing(
                suite.name, f"{suite.name}, {size}", "NoScore",
                f"{count} of {sizes[size]} checkpoints have no score of {name}",
            )  # fmt: skip


def file_of(folder: Path, suite: str) -> Path:
    """Where a suite's results lie."""
    return folder / f"hub-{suite}.jsonl"


def write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a suite's results, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".part")
    draft.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), "utf-8")
    draft.replace(file)
