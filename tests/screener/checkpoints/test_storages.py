"""Every storage: rows, costs, runs, formats; every fault ends in the right rows or in its named error."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import gguf_files
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from faulty_proxy import FaultyProxy, WebServer
from fsspec.implementations.memory import MemoryFileSystem
from hub_client import FILE, HEAD, full_matrix, gap_of, refused, truth, within
from hub_faults import closed, content, header, shifted, status, truncated, whole, without
from lmeval_screener import screen
from lmeval_screener.checkpoints import stores
from lmeval_screener.checkpoints.snapshot import FileEntry
from lmeval_screener.checkpoints.source import Sources
from lmeval_screener.checkpoints.stores import Bucket, BucketSource, FolderListing
from lmeval_screener.targets.names import Target, parse_target
from storages import expand, read, refused_change

from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo") / "sums-20"
EXPIRED = (
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)
SERVED = ("s3", "azure", "gcs", "web")
LISTED = (*(kind for kind in SERVED if kind != "web"), "memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("made") / "m", head_and_embedding())


@dataclass
class Served:
    """A storage, and the server of tests that breaks its replies; ``put(folder, name)`` stores."""

    server: Any
    address: str
    put: Callable[[Path, str], object]
    model: str = "m"

    def read(self, cache: Path, name: str = "") -> Any:
        return read(f"{self.address}/{name or self.model}", cache)

    def fault(self, change, *, match: str = "*", times: int = -1) -> None:
        self.server.fault("*", change, match=match, times=times)


@pytest.fixture
def storage(request, folder, tmp_path, monkeypatch) -> Iterator[Served]:
    """A storage with a small checkpoint, of which no server may send all in place of a range."""
    monkeypatch.setattr("lmeval_screener.checkpoints.web.WHOLE", 1000)
    root, kind = tmp_path / "served", request.param

    def copied(made, name):
        shutil.copytree(made, root / name, dirs_exist_ok=True)

    copied(folder, "m")
    if kind == "web":
        with WebServer(root) as web:
            yield Served(web, web.endpoint, copied, f"m/{FILE}")
    elif kind == "memory":
        system = fsspec.filesystem("memory")
        system.put(str(folder), "/disk/m", recursive=True)
        yield Served(
            None, "memory://disk", lambda made, name: system.put(f"{made}/", f"/disk/{name}/", True)
        )
        system.rm("/disk", recursive=True)
    else:
        store = request.getfixturevalue(f"{kind}_server")
        with FaultyProxy(store.port) as proxy:
            store.use(monkeypatch, proxy.endpoint)
            store.put(folder, f"{tmp_path.name}/m")
            address = f"{store.scheme}://box/{tmp_path.name}"
            yield Served(
                proxy, address, lambda made, name: store.put(made, f"{tmp_path.name}/{name}")
            )


def in_each(*kinds: str) -> Any:
    return pytest.mark.parametrize("storage", kinds, indirect=True)


def test_every_server_of_a_storage_is_in_use():
    fixtures = (Path(__file__).parents[1] / "conftest.py").read_text("utf-8")
    assert {*re.findall(r"^def (\w+)_server\(", fixtures, re.MULTILINE), "web"} == set(SERVED)


@in_each(*SERVED, "memory")
def test_rows_bytes_and_requests(storage, tmp_path):
    large = write_checkpoint(tmp_path / "large", head_and_embedding(v=5000, d=64))
    storage.put(large, "large")
    found = storage.read(tmp_path, "large")
    np.testing.assert_array_equal(found.rows, truth(large))
    rows, header_piece = found.rows.nbytes, 65_536  # whatever the header's length
    assert rows < found.snapshot.account.bytes_read < 1.2 * rows + header_piece + 2000
    if storage.server is None:
        return
    page = (Path(__file__).parents[3] / "docs/reference/formats-and-storages.md").read_text("utf-8")
    scheme = storage.address.partition("://")[0].replace("http", "https")
    assert f"\n| `{scheme}://" in page, "a row on what it needs"
    asked = storage.server.requests
    assert found.snapshot.account.requests == len(asked)
    if storage.address.startswith("s3:"):
        assert all("if-match" in request.headers for request in asked if "range" in request.headers)
    asked.clear()
    again = storage.read(tmp_path, "large")
    np.testing.assert_array_equal(again.rows, found.rows)
    listing = (
        7 if storage.address.startswith("http") else 1
    )  # each usual name is tried where nothing lists
    assert again.snapshot.account.requests == len(asked) == listing
    assert again.snapshot.account.bytes_read < 2000, "what is there, and nothing of it"


@in_each(*SERVED)
@pytest.mark.parametrize("form", ["bin", "gguf"])
def test_g_is_that_of_the_whole_matrix(storage, tmp_path, form):
    """Of pickled weights and of a GGUF model in parts; safetensors are above."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    made, file = tmp_path / form, ""
    shutil.copytree(
        DEMO, made, ignore=shutil.ignore_patterns("*" if form == "gguf" else "*.safetensors*")
    )
    if form == "gguf":
        full = gguf_files.matrix()
        tensors = {
            "token_embd.weight": ("F16", gguf_files.matrix(1)),
            "output.weight": ("Q8_0", full),
        }
        file = f"/{gguf_files.write(made / 'm-Q8_0.gguf', tensors, parts=1)[0].name}"
        matrix = gguf_files.truth("Q8_0", full)
    else:
        state = {
            k: v
            for shard in sorted(DEMO.glob("*.safetensors"))
            for k, v in load_file(shard).items()
        }
        torch.save(state, made / "pytorch_model.bin")
        matrix = full_matrix(DEMO / "model-00001-of-00002.safetensors", HEAD)
    storage.put(made, form)
    (found,) = screen([f"{storage.address}/{form}{file}"]).checkpoints
    assert found.gaps["cosine"].mean == pytest.approx(gap_of(matrix, found), abs=1e-6)
    assert 0 < found.bytes_read < 1.5 * sum(place.stat().st_size for place in made.iterdir())
    assert 0 < found.requests < 150


@in_each(*LISTED)
def test_a_run_and_globs(storage, folder, tmp_path):
    deep = ["run2/checkpoints/step_2/actor/huggingface", "verl/global_step_7/actor/huggingface"]
    three = [f"run1/checkpoint-{n}" for n in (5, 10, 100)]
    beside = ["run3/step_7", "run3/checkpoint-3-merged", "run3/merged"]
    for name in (*three, "run1/logs", *deep, *beside):
        storage.put(folder, name)
    for text, expected in (
        ("run1/", three),
        ("run1/checkpoint-1*", three[1:]),
        ("run[12]", [*three, deep[0]]),
        ("run3", beside),
        ("ver?/*", deep[1:]),
        ("run*/checkpoint-5", three[:1]),
        ("run1/logs", ["run1/logs"]),
        ("m/*", [f"m/{FILE}"]),
    ):
        found, _ = expand(f"{storage.address}/{text}", tmp_path)
        assert found == [f"{storage.address}/{name}" for name in expected]
    if storage.address.startswith("s3:"):
        for text, requests in (("run1", 4), ("run1/logs", 1)):
            assert expand(f"{storage.address}/{text}", tmp_path)[1] == requests
    refused(expand, f"{storage.address}/none-*", tmp_path, says="no folder or weights file matches")


@in_each(*SERVED, "memory")
def test_a_single_file_and_what_is_not_there(storage, folder, tmp_path):
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "other.safetensors").write_bytes(b"x" * 100)
    (beside / "model.safetensors.index.json").write_text("{}")
    storage.put(beside, "m")
    found = storage.read(tmp_path, f"m/{FILE}")
    assert set(found.snapshot.files) == {"config.json", FILE}
    np.testing.assert_array_equal(found.rows, truth(folder))
    for name in ("none", "m/none.safetensors"):
        error = refused(storage.read, tmp_path, name)
        assert error.code in ("FolderNotFound", "FileNotFound")
        assert "check the address" in str(error) or "name " in str(error)


@in_each(*SERVED, "memory")
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_file_that_is_replaced_while_it_is_read_is_never_mixed(storage, tmp_path, is_begun):
    # All but the file system say which version they sent: there, another size has to do.
    tensors = head_and_embedding(v=120 if storage.server else 100, seed=1)
    other = write_checkpoint(tmp_path / "other", tensors)
    change, cache = (lambda: storage.put(other, "m")), tmp_path / "cache"
    error = refused_change(f"{storage.address}/m", change, cache, is_begun=is_begun)
    assert error.code == "BadResponse"
    assert "changed while it was read" in str(error)


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


@pytest.mark.parametrize("where", ["*", f"*{FILE}*"])
@pytest.mark.parametrize(
    ("storage", "fault"),
    [(kind, name) for kind in SERVED for name in PASSING if kind == "s3" or name in OWN],
    indirect=["storage"],
)
def test_what_passes_is_tried_again(storage, folder, tmp_path, fault, where):
    storage.fault(PASSING[fault], match=where, times=1)
    np.testing.assert_array_equal(storage.read(tmp_path).rows, truth(folder))


@in_each(*SERVED)
@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        (status(429), {"RateLimited"}),
        (status(500), {"ServerError"}),
        (closed(reset=True), {"Unreachable"}),
        (shifted(8), {"BadResponse"}),
        (shifted(0, longer=9), {"BadResponse"}),
        (without("Content-Range"), {"BadResponse"}),
        (whole, {"RangeNotSupported", "BadResponse"}),
        (header("ETag", '"other"'), {"BadResponse"}),
        (content(b"short"), {"BadResponse", "Unreachable"}),
        (status(404), {"BadResponse", "FileNotFound"}),
        (status(403, body=EXPIRED), {"AccessDenied"}),
        (status(416), {"BadResponse"}),
    ],
)
def test_what_stays_wrong_has_a_name(storage, tmp_path, fault, codes):
    storage.fault(fault, match=f"*{FILE}*")
    error = refused(storage.read, tmp_path)
    assert error.code in codes
    assert ";" in str(error), "says what to do next"


@in_each("memory")
def test_small_files_and_listings_of_a_file_system(storage, folder, tmp_path, monkeypatch):
    """A configuration that is replaced, a listing that fails once behind the ranges, a file as a folder."""

    async def replaced(hub, account):
        snapshot = await Sources(hub).snapshot(parse_target(f"{storage.address}/m"), account)
        fsspec.filesystem("memory").pipe_file("/disk/m/config.json", b"{" + 999 * b" " + b"}")
        await snapshot.small_file("config.json")

    assert "changed while it was read" in str(refused(within, replaced, tmp_path))
    listed, faults = MemoryFileSystem.ls, [ConnectionResetError("reset"), None]

    def flaky(self, *args, **settings):
        if fault := faults.pop() if faults else None:
            raise fault
        return listed(self, *args, **settings)

    monkeypatch.setattr(MemoryFileSystem, "ls", flaky)
    np.testing.assert_array_equal(storage.read(tmp_path).rows, truth(folder))
    assert not faults
    assert refused(storage.read, tmp_path, "m/config.json").code == "FolderNotFound"


@in_each("memory")
def test_faults_of_a_file_system(storage, folder, tmp_path, monkeypatch):
    def flaky(self, path, start=None, end=None, **kwargs):
        body = whole_file(self, path, start=start, end=end)
        fault = faults.pop() if faults and path.endswith(FILE) else len(body)
        if isinstance(fault, Exception):
            raise fault
        return body[:fault]

    whole_file, faults = MemoryFileSystem.cat_file, []
    monkeypatch.setattr(MemoryFileSystem, "cat_file", flaky)
    for number, fault in enumerate((ConnectionResetError("reset"), 5, TimeoutError())):
        faults.append(fault)
        np.testing.assert_array_equal(storage.read(tmp_path / str(number)).rows, truth(folder))
        assert not faults
    for fault, code in (
        (ConnectionResetError("x"), "Unreachable"),
        (PermissionError("x"), "AccessDenied"),
        (3, "BadResponse"),
        (FileNotFoundError("x"), "BadResponse"),
    ):
        faults[:] = [fault] * 50
        refused(storage.read, tmp_path / "again", code=code, says=";")


class Zoo(Bucket):
    """Two hundred checkpoints in a folder, and a folder that never answers; counts listings on their way."""

    running, most, asked = 0, 0, []
    names = tuple(f"m{number:03d}" for number in range(200))

    async def listed(self, path, account):
        Zoo.asked.append(path)
        Zoo.running += 1
        Zoo.most = max(Zoo.most, Zoo.running)
        await asyncio.sleep(60 if path == "silent" else 0.05)
        Zoo.running -= 1
        if path == "zoo":
            return FolderListing(Zoo.names)
        return FolderListing(
            (), {name: FileEntry(name, 10, "etag:1") for name in ("config.json", FILE)}
        )


def test_many_folders_are_never_asked_for_at_once_and_each_has_its_own_time(tmp_path, monkeypatch):
    async def expanded(name, _, account):
        targets = await BucketSource(Zoo).expand(Target(f"zoo://box/{name}"), account)
        return [target.repo for target in targets]

    monkeypatch.setattr(stores, "LISTINGS", 4)
    # 4 at a time take 50 rounds of 50 ms, more than the two seconds that each of them may take.
    found = within(functools.partial(expanded, "zoo/*"), tmp_path, timeout=2.0)
    assert found == [f"zoo://box/zoo/{name}" for name in Zoo.names]
    assert Zoo.most <= 4
    assert sorted(Zoo.asked) == ["zoo", *(f"zoo/{name}" for name in Zoo.names)], "each of them once"
    refused(within, functools.partial(expanded, "silent"), tmp_path, timeout=0.5, code="Timeout")


def test_a_tokenizer_without_a_version_is_known_by_its_content(tmp_path):
    """The rows of T and R are those of the file that is there now, not of the one of an earlier run."""
    model = shutil.copytree(data_folder("demo") / "sums-80", tmp_path / "served" / "m")

    def of_server():
        with WebServer(tmp_path / "served") as web:
            web.fault("*", without("ETag"), times=-1)
            (checkpoint,) = screen([f"{web.endpoint}/m"]).checkpoints
        return checkpoint.gaps["cosine"].mean

    before = of_server()
    tokenizer = json.loads((model / "tokenizer.json").read_bytes())
    pieces = tokenizer["model"]["vocab"]
    pieces["7"], pieces["\u0120the"] = pieces["\u0120the"], pieces["7"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert of_server() == screen([str(model)]).best.gaps["cosine"].mean != before


@pytest.mark.parametrize(
    ("missing", "scheme", "says"),
    [
        ("fsspec", "memory", "run: pip install 'lmeval-dispersion[cloud]'"),
        ("paramiko", "sftp", "run pip install with the name of the package"),
    ],
)
def test_a_missing_package_is_named_with_its_installation(
    monkeypatch, tmp_path, missing, scheme, says
):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    refusal = refused(read, f"{scheme}://host/m", tmp_path, code="MissingExtra", says=says)
    assert missing in str(refusal)
