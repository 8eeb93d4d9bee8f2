"""``--engine ray``: on a Ray of this machine's own, on clusters that lose their nodes, and without any."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import write_with_words
from faulty_proxy import WebServer
from lmeval_screener import screen
from lmeval_screener.cli import main
from lmeval_screener.reading import ray_reader

from lmeval_dispersion.installation import data_folder

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
PATIENCE = 300  # seconds for what takes a few on an idle machine

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="without the extra [ray]")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Twelve checkpoints, m00 to m11."""
    place = tmp_path_factory.mktemp("zoo")
    for number in range(12):
        write_with_words(place / f"m{number:02d}", number, number / 10)
    return place


@pytest.fixture(scope="module")
def gaps(zoo):
    """G of each checkpoint as one process reads it."""
    found = screen(sorted(map(str, zoo.glob("m*")))).checkpoints
    return {Path(c.repo).name: c.gaps["cosine"].mean for c in found}


def gaps_of(rows):
    return {Path(row["repo"]).name: row["gap"]["cosine"]["mean"] for row in rows}


class Gate(WebServer):
    """Serves a folder of checkpoints, of which those in ``held`` wait."""

    def __init__(self, folder: Path, held: Sequence[str]) -> None:
        super().__init__(folder)
        self.held = held
        # Set for a checkpoint's name as soon as a file of it is asked for.
        self.asked = {place.name: threading.Event() for place in folder.iterdir()}

    async def _answer(self, request, reply, writer):
        name = request.path.split("/")[1]
        self.asked[name].set()
        while name in self.held:
            await asyncio.sleep(0.05)
        return await super()._answer(request, reply, writer)


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of one node here."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield nodes
    kill(nodes.list_all_nodes())


def kill(nodes):
    for node in nodes:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


# The command, with a line of progress whenever a checkpoint ends.
_SCREEN = """
import sys
from lmeval_screener import cli

if __name__ == "__main__":
    cli._EVERY = 0.0
    sys.exit(cli.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def screening(cluster, gate):
    """The command over all of the gate's checkpoints on both nodes: half of them wait at each."""
    names = sorted(gate.asked)
    command = [sys.executable, "-c", _SCREEN, *(f"{gate.endpoint}/{name}" for name in names)]
    process = subprocess.Popen(
        [*command, "--engine", "ray", "--timeout", str(PATIENCE), "--format", "json"], text=True,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert gate.asked[names[0]].wait(PATIENCE)
        cluster.add_node(**NODE)
        assert gate.asked[names[-1]].wait(PATIENCE)
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_ray
@pytest.mark.slow
def test_the_loss_of_one_of_two_nodes_costs_nothing(zoo, gaps, cluster):
    with Gate(zoo, held=sorted(gaps)) as gate, screening(cluster, gate) as process:
        kill(cluster.list_all_nodes()[-1:])
        gate.held = ()
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert gaps_of(json.loads(out)["checkpoints"]) == gaps


LOST = "no node of the Ray cluster has answered for 20 s; what was read is kept, run the same command again"


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("end", ["of the cluster", signal.SIGTERM, signal.SIGINT])
def test_an_end_half_way_leaves_what_was_read(zoo, gaps, cluster, end):
    with Gate(zoo, held=sorted(gaps)[6:]) as gate, screening(cluster, gate) as process:
        assert any(line.startswith("screen-checkpoints: 6 of 12") for line in process.stderr)
        if end == "of the cluster":
            kill(cluster.list_all_nodes())
        else:
            process.send_signal(end)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, err
    assert gaps_of(json.loads(out)["checkpoints"]) == {name: gaps[name] for name in sorted(gaps)[:6]}
    lost = json.loads(out)["failed"]
    assert len(lost) == 6
    if end == "of the cluster":
        assert {(row["error"], row["message"]) for row in lost} == {("Interrupted", LOST)}
    else:
        assert "stopped; the same command goes on from here" in err


@needs_ray
def test_relative_folders_on_a_ray_of_its_own_are_as_in_one_process(zoo, gaps, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # its workers would be starved on a machine that is busy
    words = [*sorted(gaps), "./none", "--engine", "ray", "--format", "json", "--quiet"]
    assert main(words) == 3
    document = json.loads(capsys.readouterr().out)
    assert gaps_of(document["checkpoints"]) == gaps
    assert [c["repo"] for c in document["checkpoints"]] == [c.repo for c in screen(sorted(gaps)).checkpoints]
    assert [f["error"] for f in document["failed"]] == ["FolderNotFound"]


@needs_ray
def test_what_a_registry_knows_needs_no_cluster(zoo, gaps, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(zoo)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    words = [*sorted(gaps)[:3], "--registry", str(tmp_path / "r"), "--format", "json"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--engine", "ray"]) == 0
    captured = capsys.readouterr()
    assert "3 of 3 taken from" in captured.err
    assert gaps_of(json.loads(captured.out)["checkpoints"]) == {name: gaps[name] for name in sorted(gaps)[:3]}


@needs_ray
def test_a_dead_address_ends_in_one_sentence(zoo, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray_reader, "_SILENCE", 0.0)
    assert main([*map(str, sorted(zoo.glob("m*"))), "--engine", "ray"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == (
        "screen-checkpoints: --engine ray: no node of the Ray cluster has answered for 0 s; check "
        "RAY_ADDRESS (127.0.0.1:1) with `ray status`, or leave --engine out"
    )


@needs_ray
def test_on_the_hub_the_quota_is_the_limit_and_ray_does_not_start(capsys):
    assert main(["org/a", "org/b", str(data_folder("demo") / "sums-00"), "--engine", "ray"]) == 2
    assert "got 2 on the Hub: its quota is the limit there" in capsys.readouterr().err


def test_without_ray_a_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([str(data_folder("demo") / "sums-00"), "--engine", "ray"]) == 1
    assert "pip install 'lmeval-dispersion[ray]'" in capsys.readouterr().err
