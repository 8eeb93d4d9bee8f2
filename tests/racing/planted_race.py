"""A race on Ray over planted answers, as a program of its own: no model, and a log of all questions asked."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.files import write_whole
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.folder import Limits
from lmeval_dispersion.racing.tune import race_on_ray

N = 200


def planted(label: str, begin: int, end: int) -> Scores:
    """Answers of a checkpoint whose name ends with its percentage of right ones."""
    right = np.random.default_rng(sum(map(ord, label))).random(N) < int(label[-2:]) / 100
    return Scores(right[begin:end].astype(float), np.full(end - begin, np.nan))


class Entrant:
    """Answers block by block, and keeps them; its name says how it fails."""

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label, self.seconds = folder, label, 1.0
        self.kept = folder / f"{label}.kept"
        self.known = planted(label, 0, int(self.kept.read_text()) if self.kept.exists() else 0)

    def ask(self, begin: int, end: int) -> Scores:
        if begin >= len(self.known.score):
            self._fail(begin)
            while begin >= 50 and (self.folder / "hold").exists():
                time.sleep(0.05)
            print("a worker's noise")
            self._log(f"{self.label} {begin} {end}")
            self.known += planted(self.label, begin, end)
            write_whole(self.kept, str(end).encode())  # as a real one: a worker may be killed here
        return Scores(*(part[begin:end] for part in self.known))

    def _fail(self, begin: int) -> None:
        from lmeval_dispersion.racing.evaluation import CheckpointError

        kind = self.label[:-2]
        if kind == "refused":
            raise UsageError("expected a task that lm-eval has")
        if kind == "broken" or (kind == "midway" and begin >= 100):
            raise CheckpointError(f"{kind} at {begin}")
        if kind == "defect":
            raise ZeroDivisionError

    def _log(self, line: str) -> None:
        import ray

        with (self.folder / "log").open("a") as log:
            log.write(f"{line} {ray.get_runtime_context().get_node_id()}\n")

    def close(self) -> None:
        self._log(f"{self.label} closed")

    def store(self) -> None:
        """Answers without states have none."""


@dataclass
class RaceFolder:
    path: Path
    labels: list[str]
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    allowance: Limits = field(default_factory=Limits)

    @property
    def raced(self):
        return [SimpleNamespace(label=label) for label in self.labels]

    def entrant(self, entry, contest: Contest) -> Entrant:
        return Entrant(self.path, entry.label)

    def going(self, contest: Contest) -> list[str]:
        return [
            label for label in self.labels if contest.standing.get(label, "running") == "running"
        ]

    def ended(self, entrant: Entrant) -> None:
        self.seconds[entrant.label] = entrant.seconds


def main(path: Path, gpus: float | None, labels: list[str]) -> None:
    folder, contest = RaceFolder(path, labels), Contest(N, side_by_side=len(labels))
    race_on_ray(folder, contest, gpus=gpus)
    asked = {label: len(scores.score) for label, scores in contest.answered.items()}
    print(
        json.dumps(
            {
                "best": contest.best,
                "standing": contest.standing,
                "asked": asked,
                "failed": folder.failed,
            }
        )
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
    except DispersionError as error:
        sys.exit(str(error))
