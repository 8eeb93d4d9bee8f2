"""Shared by the benchmarks: a process for each measurement, and servers in others."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def parsed(
    doc: str | None,
    *options: tuple[str, dict[str, Any]],
    hidden: tuple[str, int | str] | None = None,
) -> Any:
    """The command line; ``hidden`` is the option of child processes, with the number of its words."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, keywords in options:
        parser.add_argument(name, **keywords)
    if hidden:
        parser.add_argument(hidden[0], nargs=hidden[1], help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_child(python: str, script: str, *words: object, **environment: str) -> dict[str, Any]:
    """The JSON that a script prints last, run in a process of its own."""
    command = [python, "-W", "ignore", script, *map(str, words)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def without_hub(**variables: str) -> dict[str, str]:
    """This environment without the Hub's variables, with this tree's packages, and with some of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "screener")])
    return kept | {"PYTHONPATH": path, "HF_HUB_DISABLE_XET": "1"} | variables


def many_files() -> None:
    """Raise the limit on open files, and say how busy the machine is."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


def math_and_reference(tokenizer: bytes) -> tuple[list[int], list[int]]:
    """Rows of T and R that a screening in math reads."""
    from lmeval_screener.tokens.resolution import resolve_tokens
    from lmeval_screener.tokens.sets import load_token_set
    from lmeval_screener.tokens.vocabulary import Vocabulary

    vocabulary = Vocabulary.from_file("tokenizer.json", tokenizer)
    resolution = resolve_tokens(
        load_token_set("math", "domain"), load_token_set("reference", "reference"), vocabulary
    )
    return list(resolution.domain_ids), list(resolution.reference_ids)


class ServerProcess:
    """A script started with ``--serve`` and some words, so that its time and memory are not the client's.

    It prints its address, then counts for each line that it is sent.
    """

    def __init__(self, script: str, *words: object) -> None:
        command = [sys.executable, script, "--serve", *map(str, words)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()

    def counts(self) -> dict[str, Any]:
        """Its counts so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
