"""``--engine ray``: on a Ray of this machine's own, on clusters that lose their nodes, and without any."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoints import write_with_words
from lmeval_screener import ray_reader, screen
from lmeval_screener.cli import main

from lmeval_dispersion.paths import data_folder

# Ray's workers would be starved on a machine that is busy.
RAY_SETTINGS = {"RAY_worker_niceness": "0"}
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


class Gate:
    """A web server of a folder that holds back the paths that begin with ``held`` until it lets go."""

    def __init__(self, folder: Path) -> None:
        # Set for a checkpoint's name as soon as a file of it is asked for.
        self.asked: dict[str, threading.Event] = {p.name: threading.Event() for p in folder.iterdir()}
        self.held: tuple[str, ...] = ()
        self.open = threading.Event()
        gate = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                gate.asked[self.path.split("/")[1]].set()
                if self.path.startswith(gate.held):
                    gate.open.wait(PATIENCE)
                with contextlib.suppress(OSError):
                    super().do_GET()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        self.server.daemon_threads = True

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{name}"

    def __enter__(self) -> Gate:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self.server.shutdown()
        self.server.server_close()


class ClusterOfTwo:
    """A cluster whose second node comes when it is told to."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("ray_cluster.py"))
        self._process = subprocess.Popen(
            [sys.executable, script], env=os.environ | RAY_SETTINGS, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.address = self._process.stdout.readline().strip()

    def tell(self, what: str) -> None:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def __enter__(self) -> ClusterOfTwo:
        return self

    def __exit__(self, *_: object) -> None:
        self.tell("end")
        self._process.communicate(timeout=PATIENCE)


# The command, with a line of progress whenever a checkpoint ends.
_SCREEN = """
import sys
from lmeval_screener import cli

if __name__ == "__main__":
    cli._EVERY = 0.0
    sys.exit(cli.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def screening(cluster, gate, *words):
    """The command over all of the gate's checkpoints on both nodes: half of them wait at each."""
    names = sorted(gate.asked)
    command = [sys.executable, "-c", _SCREEN, *map(gate.address, names)]
    process = subprocess.Popen(
        [*command, "--engine", "ray", "--timeout", str(PATIENCE), *words], text=True,
        env=os.environ | RAY_SETTINGS | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert gate.asked[names[0]].wait(PATIENCE)
        cluster.tell("add")
        assert gate.asked[names[-1]].wait(PATIENCE)
        yield process
    finally:
        process.kill()
        process.communicate()


@needs_ray
@pytest.mark.slow
def test_the_loss_of_one_of_two_nodes_costs_nothing(zoo, gaps):
    with ClusterOfTwo() as cluster, Gate(zoo) as gate:
        gate.held = ("/",)
        with screening(cluster, gate, "--format", "json") as process:
            cluster.tell("kill")
            gate.open.set()
            out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert gaps_of(json.loads(out)["checkpoints"]) == gaps


LOST = "no node of the Ray cluster has answered for 20 s; what was read is kept, run the same command again"


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("end", ["of the cluster", signal.SIGTERM, signal.SIGINT])
def test_an_end_half_way_leaves_what_was_read(zoo, gaps, end):
    with ClusterOfTwo() as cluster, Gate(zoo) as gate:
        gate.held = tuple(f"/m{number:02d}" for number in range(6, 12))
        with screening(cluster, gate, "--format", "json") as process:
            assert any(line.startswith("screen-checkpoints: 6 of 12") for line in process.stderr)
            if end == "of the cluster":
                cluster.tell("end")
            else:
                process.send_signal(end)
            out, err = process.communicate(timeout=PATIENCE)
        assert not gate.open.is_set()
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
    for name, value in RAY_SETTINGS.items():
        monkeypatch.setenv(name, value)
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
