"""The soak of a registry, small: faults, kills, gated and broken ones; and that it sees what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import registry_soak  # its folder in sys.path would hide the package `coverage`

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # the two kills of test_registry.py always run
def test_a_small_registry_survives_faults_and_kills():
    command = [sys.executable, str(ROOT / "benchmarks" / "registry_soak.py")]
    done = subprocess.run(
        [*command, "--count", "150", "--faults", "0.04"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every row right, nothing lost, nothing twice" in done.stdout
    assert done.stdout.count("killed after") == 3
    assert "'GatedRepo': 2" in done.stdout
    assert "'BadHeader': 2" in done.stdout


def test_what_is_wrong_is_seen():
    truth = [(registry_soak.Checkpoint(number), 2.0 - number / 100) for number in (0, 30, 60)]
    truth.append((registry_soak.Checkpoint(27), None))
    names = [one.name for one, _ in truth]
    stored = [(name, 2.0 - number / 100) for name, number in zip(names, (0, 30, 60), strict=False)]
    group = {"family": "f", "scale": "1B"}
    members = [
        {"repo": name, "rank": rank, "gap": {"cosine": {"mean": gap}}} | group
        for rank, (name, gap) in enumerate(stored, 1)
    ]
    failed = [{"repo": names[3], "error": "BadHeader"}]

    def wrong(stored=stored, checkpoints=members, failed=failed):
        report = {"checkpoints": checkpoints, "failed": failed}
        return registry_soak.problems(truth, stored, report)

    assert not wrong()
    assert wrong(stored=stored[1:])  # lost
    assert wrong(stored=[*stored, stored[0]])  # twice
    assert wrong(stored=[(stored[0][0], 2.1), *stored[1:]])  # another number
    assert wrong(checkpoints=members[1:])
    assert wrong(checkpoints=[*members, members[0]])
    assert wrong(failed=[{"repo": names[3], "error": "Timeout"}])
    assert wrong(checkpoints=[member | {"rank": 4 - member["rank"]} for member in members])  # order
    other = registry_soak.Checkpoint(1).name
    assert wrong(checkpoints=[*members[:2], members[2] | {"repo": other}])  # of another family
