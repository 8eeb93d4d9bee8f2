"""``dispersion race --engine ray``: on clusters that lose a node, after a killed driver, and without any."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo_answers
import pytest
from processes import environment

from lmeval_dispersion.installation import data_folder
from lmeval_dispersion.store import read_store

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="without the extra [ray]"),
    pytest.mark.timeout(900),
]
NODE = {
    "num_cpus": 2,
    "num_gpus": 1,
    "object_store_memory": 100 * 2**20,
}  # no GPU is there, or touched
PATIENCE = 240  # seconds for what takes a few on an idle machine
LABELS = ("a80", "b90", "c40", "d30")


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def begin(folder, labels=LABELS, gpus="null", address=""):
    """A race of planted answers, as a process."""
    (folder / "race").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("planted_race.py")), "race", gpus, *labels],
        env=environment() | {"RAY_ADDRESS": address, "RAY_worker_niceness": "0"},
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process):
    """What it printed: the result, and nothing else, on stdout."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert out.startswith("{"), out
    return json.loads(out)


def asked(folder):
    """Label, begin and node of each block that was asked, in the order of asking."""
    log = folder / "race" / "log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [(words[0], int(words[1]), words[-1]) for words in lines if words[1] != "closed"]


def wait_for(condition):
    patience = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.1)


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes, a GPU each by their own word."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    nodes.add_node(**NODE)
    yield nodes
    for node in nodes.list_all_nodes():
        kill(node)


def kill(node):
    node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.mark.slow
def test_a_lost_node_and_failing_checkpoints_cost_nobody_else_an_answer(cluster, tmp_path):
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "hold").touch()
    labels = ("a80", "b90", "broken50", "midway95", "defect50", "c40", "d30")
    race = begin(tmp_path, labels, address=cluster.address)
    wait_for(lambda: len({(label, node) for label, _, node in asked(tmp_path)}) == 2)
    assert {label for label, *_ in asked(tmp_path)} == {
        "a80",
        "b90",
    }  # a GPU each, in the order of the list
    assert len({node for *_, node in asked(tmp_path)}) == 2
    kill(cluster.list_all_nodes()[-1])
    (tmp_path / "race" / "hold").unlink()
    result = end(race)
    assert result["best"] == "b90"
    lost = re.match(
        r"its worker on the Ray cluster was lost (\d) times", result["failed"].pop("defect50")
    )
    assert lost
    assert int(lost[1]) >= 3  # Ray does not count a worker that goes with its node
    assert result["failed"] == {"broken50": "broken at 0", "midway95": "midway at 100"}
    assert result["standing"]["b90"] == "complete"
    assert {result["standing"][label] for label in ("c40", "d30")} <= {"behind", "not better"}
    assert result["asked"]["c40"] <= 75
    blocks = [block[:2] for block in asked(tmp_path)]
    # A block that was under way on the lost node may be asked twice.
    assert len(blocks) - len(set(blocks)) <= 1
    assert 25 * len(set(blocks)) == sum(result["asked"].values())


@pytest.mark.slow
def test_after_a_killed_driver_the_same_command_asks_the_rest(tmp_path):
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "hold").touch()
    killed = begin(tmp_path)
    wait_for(lambda: {("a80", 25), ("b90", 25)} <= {block[:2] for block in asked(tmp_path)})
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    time.sleep(5)
    before = asked(tmp_path)
    (tmp_path / "race" / "hold").unlink()
    time.sleep(5)
    assert asked(tmp_path) == before  # no worker of the killed one is left that asks on
    result = end(begin(tmp_path))
    assert result["best"] == "b90"
    assert result["standing"]["d30"] in ("behind", "not better")
    blocks = [block[:2] for block in asked(tmp_path)]
    assert len(blocks) == len(set(blocks))
    assert 25 * len(blocks) == sum(result["asked"].values())
    again = end(begin(tmp_path))
    assert (again["best"], again["asked"]) == (result["best"], result["asked"])
    assert len(asked(tmp_path)) == len(blocks)


@pytest.mark.parametrize(
    ("address", "gpus", "labels", "sentence"),
    [
        ("127.0.0.1:1", "null", LABELS, "Ray could not join the cluster at RAY_ADDRESS, 127"),
        ("ray://127.0.0.1:1", "null", LABELS, "Ray could not join the cluster at RAY_ADDRESS"),
        slow("", "64", LABELS, "gpus_per_checkpoint: expected a number of GPUs from 0 to "),
        slow("", "0", ("a80", "refused50"), "expected a task that lm-eval has"),
    ],
)  # fmt: skip
def test_what_cannot_be_raced_ends_in_one_sentence(tmp_path, address, gpus, labels, sentence):
    race = begin(tmp_path, labels, gpus, address)
    out, err = race.communicate(timeout=PATIENCE)
    assert race.returncode == 1
    assert out == ""
    assert err.splitlines()[-1].removeprefix("--engine ray: ").startswith(sentence)


@pytest.mark.slow
def test_models_race_by_the_command_and_one_by_one_nothing_is_left_to_ask(tmp_path):
    demo_answers.write_task(tmp_path, demo_answers.questions())
    states = "include: sums.yaml\ntask: states\nclass: !function lmeval_dispersion.harness.DispersionTask\n"
    (tmp_path / "states.yaml").write_text(states)
    models = [str(data_folder("demo") / name) for name in ("sums-45", "wrong-sums-45")]
    words = ["race", *models, "--all", "--tasks", "states", "--include_path", ".", "--limit", "50"]
    results = []
    for engine in (["--engine", "ray"], []):
        done = subprocess.run(
            [sys.executable, "-m", "lmeval_dispersion", *words, *engine, "--format", "json"],
            env=environment() | {"RAY_ADDRESS": "", "RAY_worker_niceness": "0"},
            cwd=tmp_path, text=True, capture_output=True, timeout=PATIENCE * 2, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        samples = {path: path.read_bytes() for path in tmp_path.glob("race-states/*/samples_*")}
        results.append((samples, json.loads(done.stdout)))
        for row in results[-1][1]["checkpoints"]:
            store = next(tmp_path.glob(f"race-states/{row['label']}/dispersion_*"))
            assert len(read_store(store).documents) >= row["questions"]
    (before, beside), (after, alone) = results
    assert len(before) == 2
    assert before == after
    assert beside["best"] == alone["best"] == "sums-45"
    assert beside["checkpoints"][0]["status"] == "best"
    assert alone["questions"] <= beside["questions"]
