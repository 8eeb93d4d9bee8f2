"""Every fault in every storage ends in the right rows or in its named error, in bounded time."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from faulty_proxy import FaultyProxy, WebServer, other_version
from fsspec.implementations.memory import MemoryFileSystem
from hub_faults import closed, content, shifted, status, truncated, whole, without
from hub_server import HubServer
from lmeval_screener.checkpoints import snapshots
from storages import read, refused, truth

EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("made") / "m", head_and_embedding())


class Broken:
    """A storage with a checkpoint behind something that breaks replies."""

    def __init__(self, server, address: str) -> None:
        self.server, self.address = server, address
        self.hub = server.endpoint if isinstance(server, HubServer) else ""

    def fault(self, change, *, match: str = "*", times: int = -1) -> None:
        parts = ["*"]
        if self.hub:
            parts, match = (["api", "cdn"] if match == "*" else ["cdn"]), "*"
        for part in parts:
            self.server.fault(part, change, match=match, times=times)

    def read(self, cache):
        return read(self.address, cache, endpoint=self.hub)

    def check(self, folder, cache):
        found = self.read(cache)
        np.testing.assert_array_equal(found.rows, truth(folder))
        return found.snapshot.meter


STORAGES = ("s3", "azure", "gcs", "web", "bucket")


def test_without_faults(storage, folder, tmp_path):
    meter = storage.check(folder, tmp_path)
    assert meter.requests == len(storage.server.requests)
    stored = sum(place.stat().st_size for place in folder.iterdir())
    assert 0 < meter.bytes_read < stored + 6 * 64 + 2000, "nothing is read twice but the rows"
    assert storage.check(folder, tmp_path).bytes_read < 2000, "all comes from the cache"


@pytest.fixture(params=STORAGES)
def storage(request, folder, monkeypatch) -> Iterator[Broken]:
    monkeypatch.setattr(snapshots, "WHOLE", 1000)
    if request.param == "web":
        with WebServer(folder.parent) as web:
            yield Broken(web, f"{web.endpoint}/m/model.safetensors")
    elif request.param == "bucket":
        with HubServer() as hub:
            yield Broken(hub, f"{hub.add_bucket('org/box', folder.parent)}/m")
    else:
        store = request.getfixturevalue(f"{request.param}_server")
        address = store.put(folder, "faults/m")
        with FaultyProxy(store.port) as proxy:
            store.use(monkeypatch, proxy.endpoint)
            yield Broken(proxy, address)


PASSING = {
    "429": status(429),
    "503": status(503),
    "reset": closed(reset=True),
    "truncated": truncated(7),
    "reset in mid-body": truncated(7, reset=True),
    "another range": shifted(8),
    "no range": without("Content-Range"),
}
#: S3 sees every fault; the others those that a storage's own code, or its server, answers differently.
OWN = ("429", "503", "truncated", "no range")


@pytest.mark.parametrize("where", ["*", "*model.safetensors*"])
@pytest.mark.parametrize(
    ("storage", "fault"),
    [(kind, name) for kind in STORAGES for name in PASSING if kind == "s3" or name in OWN],
    indirect=["storage"],
)
def test_what_passes_is_tried_again(storage, folder, tmp_path, fault, where):
    storage.fault(PASSING[fault], match=where, times=1)
    storage.check(folder, tmp_path)


@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        (status(429), {"RateLimited"}),
        (status(500), {"ServerError"}),
        (closed(reset=True), {"Unreachable"}),
        (shifted(8), {"BadResponse"}),
        (without("Content-Range"), {"BadResponse"}),
        (whole, {"RangeNotSupported", "BadResponse"}),
        (other_version, {"BadResponse"}),
        (content(b"short"), {"BadResponse", "Unreachable"}),
        (status(404), {"BadResponse", "FileNotFound"}),
        (status(403, body=EXPIRED), {"AccessDenied"}),
        (status(416), {"BadResponse"}),
    ],
)
def test_what_stays_wrong_has_a_name(storage, tmp_path, fault, codes):
    if storage.hub and fault is other_version:
        # The Hub names the content where it resolves; its ETag has to stay what it was first.
        storage.server.fault("cdn", lambda reply, request: reply, match="*safetensors", times=1)
    storage.fault(fault, match="*model.safetensors*")
    error = refused(storage.read, tmp_path)
    assert error.code in codes
    assert ";" in str(error), "says what to do next"


def test_faults_of_a_file_system(folder, tmp_path, monkeypatch):
    system, faults = fsspec.filesystem("memory"), []
    system.put(str(folder) + "/", "/flaky/m/", recursive=True)

    def flaky(self, path, start=None, end=None, **kwargs):
        body = whole_file(self, path, start=start, end=end)
        fault = faults.pop() if faults and path.endswith("model.safetensors") else len(body)
        if isinstance(fault, Exception):
            raise fault
        return body[:fault]

    whole_file = MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    for number, fault in enumerate((ConnectionResetError("reset"), 5, TimeoutError())):
        faults.append(fault)
        rows = read("memory://flaky/m", tmp_path / str(number)).rows
        np.testing.assert_array_equal(rows, truth(folder))
        assert not faults
    for fault, code in (
        (ConnectionResetError("x"), "Unreachable"),
        (PermissionError("x"), "AccessDenied"),
        (3, "BadResponse"),
        (FileNotFoundError("x"), "BadResponse"),
    ):
        faults[:] = [fault] * 50
        error = refused(read, "memory://flaky/m", tmp_path / "again")
        assert error.code == code
        assert ";" in str(error)
    system.rm("/flaky", recursive=True)
