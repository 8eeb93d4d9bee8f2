"""Programs of several processes that talk to each other over loopback."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def environment():
    """For a process of its own, with one thread, that has this checkout and no Hub."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent, TESTS.parent / "screener")))
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def torchrun(processes, *words):
    """A program of Python, finished, in so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *map(str, words)],
        env=environment() | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
