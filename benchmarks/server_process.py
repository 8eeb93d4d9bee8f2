"""A benchmark's server in a process of its own, so that its time and memory are not the client's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


class ServerProcess:
    """A script started with ``--serve``: it prints its address, then counts for each line that it is sent.

    Args:
        script: The script.
        words: What ``--serve`` gets.
    """

    def __init__(self, script: str, *words: object) -> None:
        command = [sys.executable, script, "--serve", *map(str, words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()

    def counts(self) -> dict[str, Any]:
        """What it has counted so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
