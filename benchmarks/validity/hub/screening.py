"""The figures: ``screen-checkpoints``, once a size and domain, with a store that it goes on from."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.validity.hub.configuration import HubStudy, Suite
from benchmarks.validity.hub.plan import Checkpoint, Missing

SCREEN = [sys.executable, "-m", "lmeval_screener"]
#: The screener's option for the file that keeps what was measured.
KEEP = "--registry"
ALL, NONE, SOME = 0, 1, 3  # the screener's exit codes that leave a report
#: Name in the tables -> where the report has it, and its metric.
FIGURES = {
    "cosine": ("gap", "cosine"),
    "euclidean": ("gap", "euclidean"),
    "within_R": ("within_reference", "cosine"),
    "euclidean_within_R": ("within_reference", "euclidean"),
}
#: Those that are of the reference alone, the same for every domain.
SHARED = {"within_R", "euclidean_within_R"}
#: The Hub's quotas with a token, requests in five minutes.
QUOTAS = {"api": 1000, "resolvers": 5000}


class ScreenError(RuntimeError):
    """The screener ended without a report."""


def batches(checkpoints: Iterable[Checkpoint]) -> dict[tuple[str, str], list[Checkpoint]]:
    """Checkpoints by suite and size: what one call screens."""
    found: dict[tuple[str, str], list[Checkpoint]] = {}
    for one in checkpoints:
        found.setdefault((one.suite, one.part("size")), []).append(one)
    return found


def screened(
    study: HubStudy, checkpoints: Sequence[Checkpoint], work: Path
) -> tuple[dict[str, dict[str, float]], dict[str, str], list[Missing]]:
    """Figures by checkpoint's name, the commits that were read, and what failed.

    Raises:
        ScreenError: A call ended without a report, as when it was interrupted; what it read is in its store.
    """
    figures: dict[str, dict[str, float]] = {}
    commits: dict[str, str] = {}
    missing: list[Missing] = []
    for (name, size), batch in batches(checkpoints).items():
        suite = study.suites[name]
        for domain in suite.domains:
            report = _report(study, suite, f"{name}-{size}-{domain}", domain, batch, work)
            asked = {one.name for one in batch}
            told = set()
            for entry in report["checkpoints"]:
                label = f"{entry['repo']}@{entry['requested_revision']}"
                told.add(label)
                commits[label] = entry["revision"]
                own = figures.setdefault(label, {})
                for figure, (part, metric) in FIGURES.items():
                    key = figure if figure in SHARED else f"{figure}_{domain}"
                    own[key] = float(entry[part][metric]["mean"])
            for entry in report["failed"]:
                label = entry["repo"] + (f"@{entry['revision']}" if entry["revision"] else "")
                told.add(label)
                missing.append(Missing(name, label, entry["error"], entry["message"]))
            # A repository that was renamed answers under its new name.
            others = ", ".join(sorted(told - asked)[:3])
            for label in sorted(asked - told):
                missing.append(
                    Missing(
                        name, label, "Renamed", f"expected this name in the report, got {others or 'none'}"
                    )
                )
    return figures, commits, list(dict.fromkeys(missing))


def _report(
    study: HubStudy, suite: Suite, name: str, domain: str, batch: Sequence[Checkpoint], work: Path
) -> dict[str, Any]:
    out = work / "screens" / f"{name}.json"
    print(f"validity-hub: {suite.name}, {name}: {len(batch)} checkpoints", file=sys.stderr, flush=True)
    keep = [KEEP, str(work / f"{suite.name}.duckdb")]
    code = _run(
        study, batch, domain, work / "lists" / f"{name}.txt", [*keep, "--format", "json", "-o", str(out)]
    )
    if code not in (ALL, NONE, SOME) or not out.exists():
        raise ScreenError(
            f"{name}: screen-checkpoints ended with {code} and no report, its message is above; what it read "
            "is kept, the same command goes on from there"
        )
    content: dict[str, Any] = json.loads(out.read_text("utf-8"))
    if any(entry["error"] == "Interrupted" for entry in content["failed"]):
        raise ScreenError(f"{name}: stopped; the same command goes on from there")
    return content


def _run(study: HubStudy, batch: Sequence[Checkpoint], domain: str, names: Path, more: list[str]) -> int:
    names.parent.mkdir(parents=True, exist_ok=True)
    names.write_text("".join(f"{one.name}\n" for one in batch), "utf-8")
    out = Path(more[-1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command = [*SCREEN, "--from", str(names), "--domain", domain]
    command += ["--reference", study.content["reference"], *more]
    return subprocess.run(command, check=False, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}).returncode


def planned(study: HubStudy, checkpoints: Sequence[Checkpoint], work: Path) -> list[dict[str, Any]]:
    """What each size would cost, as ``screen-checkpoints --dry-run`` plans it.

    Raises:
        ScreenError: It made no plan.
    """
    rows = []
    for (name, size), batch in batches(checkpoints).items():
        row: dict[str, Any] = {
            "suite": name, "size": size, "repositories": len({one.repository for one in batch}),
            "checkpoints": len(batch), "cached": 0, "api": 0, "resolvers": 0, "bytes": 0,
        }  # fmt: skip
        for domain in study.suites[name].domains:
            out = work / "plans" / f"{name}-{size}-{domain}.json"
            names = work / "lists" / f"{name}-{size}.txt"
            code = _run(
                study, batch, domain, names, ["--quiet", "--dry-run", "--format", "json", "-o", str(out)]
            )
            if code != ALL or not out.exists():
                raise ScreenError(
                    f"{name}, {size}: screen-checkpoints --dry-run ended with {code} and no plan"
                )
            for line in json.loads(out.read_text("utf-8"))["tables"]["plan"]["rows"]:
                row["cached"] += line["what"] == "cached"
                for key in ("api", "resolvers", "bytes"):
                    row[key] += line[key]
        row["MB"] = round(row["bytes"] / 1e6, 1)
        rows.append(row)
    return rows


def hours(rows: Sequence[dict[str, Any]]) -> float:
    """Hours that the Hub's quotas make of a plan, with a token."""
    windows = [math.ceil(sum(row[name] for row in rows) / quota) for name, quota in QUOTAS.items()]
    return max(windows, default=0) * 5 / 60
