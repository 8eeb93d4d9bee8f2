"""Real storages on loopback for tests, and reading of them in this process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from hub_client import IDS, Read, full_matrix, read_of
from lmeval_screener.checkpoints.http import Budget
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.targets.target import Target, parse_target

HEAD = "lm_head.weight"


@dataclass
class S3:
    """A server that speaks S3, and a bucket in it."""

    port: int
    bucket: str = "box"

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )

    def put(self, folder: Path, prefix: str) -> str:
        """Upload a folder; its address."""
        for place in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = f"{prefix}/{place.relative_to(folder).as_posix()}"
            self.client.put_object(Bucket=self.bucket, Key=name, Body=place.read_bytes())
        return f"s3://{self.bucket}/{prefix}"


@contextlib.contextmanager
def moto() -> Iterator[S3]:
    """Moto's server with an empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        store = S3(server.get_host_and_port()[1])
        store.client.create_bucket(Bucket=store.bucket)
        yield store
    finally:
        server.stop()


@contextlib.contextmanager
def process(command: list[str], port: int, **settings: Any) -> Iterator[None]:
    """A server as a process of its own, until it listens and then while it is used."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **settings)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None, f"{command[0]} ended with {server.returncode}"
            time.sleep(0.05)
        else:
            raise AssertionError(f"{command[0]} does not listen")
        yield
    finally:
        server.terminate()
        server.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read(
    target: Target | str,
    cache: Path,
    *,
    ids: tuple[int, ...] = IDS,
    timeout: float = 20.0,
    endpoint: str = "",
) -> Read:
    """Rows of the output projection of a checkpoint anywhere; fails if it hangs."""

    async def work(budget: Budget) -> Read:
        async with Hub(cache=cache, offline=False, endpoint=endpoint or "http://127.0.0.1:9") as hub:
            one = parse_target(target) if isinstance(target, str) else target
            return await read_of(await Sources(hub).snapshot(one, budget), ids)

    budget = Budget(timeout)
    return asyncio.run(asyncio.wait_for(budget.bounded(work(budget)), 60))


def expand(text: str, cache: Path, *, endpoint: str = "") -> tuple[list[str], int]:
    """What an address stands for, and the requests that it took."""

    async def work(budget: Budget) -> tuple[list[str], int]:
        async with Hub(cache=cache, offline=False, endpoint=endpoint or "http://127.0.0.1:9") as hub:
            found = await Sources(hub).expand(parse_target(text), budget)
            return [target.repo for target in found], hub.meter.requests

    budget = Budget(20.0)
    return asyncio.run(budget.bounded(work(budget)))


def truth(folder: Path, ids: tuple[int, ...] = IDS) -> Any:
    """The same rows of a folder's only file, from the whole matrix."""
    return full_matrix(folder / "model.safetensors", HEAD)[list(ids)]


def slow_gap(matrix: Any, domain: list[int], reference: list[int]) -> float:
    """G in cosine distance by its definition, in float64, pair by pair."""
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    inside = [1 - unit[i] @ unit[j] for n, i in enumerate(domain) for j in domain[:n]]
    across = [1 - unit[i] @ unit[j] for i in domain for j in reference]
    return float(np.mean(inside) + np.mean(across))


AZURITE = shutil.which("azurite-blob")
GCS = [sys.executable, "-m", "gcp_storage_emulator"]
