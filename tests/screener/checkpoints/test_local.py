"""Folders and files on disk, web servers: what each has that no other storage has."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil

import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from faulty_proxy import WebServer
from hub_client import FILE, read_folder, refused, truth, whole_gap
from hub_faults import status, without
from hub_wire import Reply
from lmeval_screener import screen
from lmeval_screener.checkpoints import snapshot
from lmeval_screener.checkpoints import web as web_source
from lmeval_screener.checkpoints.snapshot import open_folder, read_ranges
from lmeval_screener.cli import main
from lmeval_screener.formats import TRANSFORMERS, Format
from storages import expand, read

from lmeval_dispersion.cli import main as dispersion
from lmeval_dispersion.installation import data_folder

DEMO = data_folder("demo")


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "made" / "m", head_and_embedding())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_as_transformers_saves_it(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "model", head_and_embedding(), shards=shards)
    found = read_folder(folder)
    np.testing.assert_array_equal(found.rows, truth(folder))
    assert found.projection.parameters == 2 * 120 * 16 + 16
    assert found.snapshot.revision is None
    with WebServer(tmp_path) as web:
        np.testing.assert_array_equal(read(f"{web.endpoint}/model/", tmp_path).rows, found.rows)


def test_a_file_that_disappears_or_shrinks_while_it_is_read(folder):
    snapshot = open_folder(folder)
    refused(
        read_ranges,
        folder / FILE,
        [(0, 8), (0, 10**6)],
        code="BadResponse",
        says="wait until it is complete",
    )
    shutil.rmtree(folder)
    for work in (snapshot.small_file("config.json"), snapshot.ranges(FILE, [(0, 8)])):
        assert refused(asyncio.run, work).code == "FileNotFound"
    assert refused(open_folder, folder).code == "FolderNotFound"


def test_a_file_that_may_not_be_read_is_no_defect_of_ours(folder, monkeypatch):
    def read_bytes(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr("pathlib.Path.read_bytes", read_bytes)
    refused(open_folder, folder, code="FileNotFound", says="config.json")


def test_a_file_on_disk(folder, tmp_path):
    """With what lies beside it; alone, with a tokenizer from elsewhere."""
    np.testing.assert_array_equal(read(str(folder / FILE), tmp_path).rows, truth(folder))
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "weights.safetensors"
    shutil.copy(min((DEMO / "sums-80").glob("*.safetensors")), alone)
    (found,) = screen([str(alone)], tokenizer=str(DEMO / "sums-80")).checkpoints
    assert found.gaps["cosine"].mean == pytest.approx(whole_gap(alone.parent, found), abs=1e-6)


def test_control_characters_in_names_reach_no_terminal(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pandas")
    """Of folders that are screened, of those that fail, and in every form."""
    for name, step in (("a\x1b[31mb", "sums-10"), ("c\x1b]0;title\x07d", "sums-80")):
        shutil.copytree(DEMO / step, tmp_path / name)
    (tmp_path / "e\x1b[31mbad").mkdir()
    (tmp_path / "e\x1b[31mbad" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for form in ("table", "csv", "json", "markdown"):
        main(["./*", "--domain", "math", "--format", form])
        out = "".join(capsys.readouterr())
        assert "\\x1b[31m" in out
        assert not {"\x1b", "\x07"} & set(out)
    assert main(["--accuracy", "none\x1b[31m"]) == dispersion(["audit", "./none\x1b[31m"]) == 2
    for line in capsys.readouterr().err.splitlines():
        assert "none\\x1b[31m" in line
        assert "\x1b" not in line


def test_a_signed_address_of_one_file(folder, tmp_path):
    """The signature is of this file: nothing beside it is asked for, and no error shows it."""
    with WebServer(folder.parent, secret="s3cret") as web:
        address = f"{web.endpoint}/m/{FILE}?signature=s3cret"
        np.testing.assert_array_equal(read(address, tmp_path).rows, truth(folder))
        assert {request.path for request in web.requests} == {f"/m/{FILE}"}
        expired = address.replace("s3cret", "exp1red")
        error = refused(read, expired, tmp_path, code="AccessDenied", says="ask for a new one")
        result = screen([address, expired])
        assert len(result.failed) == 2, "this one has no tokenizer"
        for secret in ("s3cret", "exp1red"):
            assert secret not in json.dumps(result.to_dict()) + str(error)


def test_a_tokenizer_on_a_web_server(tmp_path):
    bare = shutil.copytree(
        DEMO / "sums-10", tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*")
    )
    (tmp_path / "words").mkdir()
    shutil.copy(DEMO / "sums-10" / "tokenizer.json", tmp_path / "words" / "words.json")
    with WebServer(tmp_path) as web:
        (found,) = screen([str(bare)], tokenizer=f"{web.endpoint}/words/words.json").checkpoints
    assert found.gaps["cosine"].mean == pytest.approx(whole_gap(bare, found), abs=1e-6)


def test_a_tokenizer_from_elsewhere_is_not_kept_as_a_file_of_the_repository(served, tmp_path):
    bare = shutil.copytree(
        DEMO / "sums-10", tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*")
    )
    served.add("org/bare", bare)
    (found,) = screen("org/bare", tokenizer=str(DEMO / "sums-80")).checkpoints
    assert found.gaps["cosine"].mean == pytest.approx(whole_gap(bare, found), abs=1e-6)
    assert [failed.error for failed in screen("org/bare").failed] == ["TokenizerNotFound"]


class Locked(WebServer):
    """Files for those who send any password."""

    def usual(self, request):
        return super().usual(request) if "authorization" in request.headers else Reply(401, {}, b"")


def test_a_password_reaches_every_file_and_no_message(folder, tmp_path):
    with Locked(folder.parent) as web:
        address = web.endpoint.replace("://", "://user:p@ssw0rd@", 1)
        for name in ("m", f"m/{FILE}"):
            found = read(f"{address}/{name}", tmp_path)
            assert {"config.json", FILE} <= set(found.snapshot.files)
            assert "ssw0rd" not in found.snapshot.repo
        for name in ("none", f"none/{FILE}"):
            error = refused(read, f"{address}/{name}", tmp_path, says=web.endpoint)
            assert "ssw0rd" not in str(error)


def test_shards_on_a_web_server(tmp_path):
    """Beside an archive too, and where the index names files that are not there."""
    folder = write_checkpoint(tmp_path / "model", head_and_embedding(), shards=3)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with WebServer(tmp_path) as web:
        np.testing.assert_array_equal(read(f"{web.endpoint}/model", tmp_path).rows, truth(folder))
        head = read(f"{web.endpoint}/model", tmp_path / "versions").projection.file
        web.fault("*", without("ETag"))
        web.requests.clear()
        read(f"{web.endpoint}/model", tmp_path)
        asked = {
            request.path for request in web.requests if request.headers["range"] != "bytes=0-0"
        }
        assert {path for path in asked if "-of-" in path} == {f"/model/{head}"}, (
            "not every shard's header"
        )
        for shard in folder.glob("*-of-*"):
            shard.unlink()
        assert refused(read, f"{web.endpoint}/model", tmp_path).code == "BadIndex"


def test_letters_of_an_address_quoted_or_not(tmp_path):
    folder = write_checkpoint(tmp_path / "ä b" / "m", head_and_embedding())
    with WebServer(tmp_path) as web:
        for place in ("ä b", "ä%20b", "%C3%A4%20b"):
            np.testing.assert_array_equal(
                read(f"{web.endpoint}/{place}/m", tmp_path).rows, truth(folder)
            )


def test_a_web_page_is_no_file(folder, tmp_path, monkeypatch):
    # Nor is the folder's own, which a format without an index must not ask for.
    monkeypatch.setattr(web_source, "TRANSFORMERS", (*TRANSFORMERS, Format(".x", "x", "weights.x")))
    with WebServer(folder.parent) as web:
        web.fault("*", status(200), match="*/m")
        web.fault("*", status(200), match="*.index.json")
        np.testing.assert_array_equal(read(f"{web.endpoint}/m", tmp_path).rows, truth(folder))
        web.fault("*", status(200))
        refused(
            read, f"{web.endpoint}/m/{FILE}", tmp_path, code="BadResponse", says="got a web page"
        )


def test_addresses_that_no_storage_serves(folder, tmp_path):
    assert refused(read, "http://127.0.0.1:9/m", tmp_path, timeout=1.0).code == "Unreachable"
    assert refused(read, "nonsense://disk/none", tmp_path).code == "BadName"
    refused(
        expand,
        "http://127.0.0.1:9/run/checkpoint-*",
        tmp_path,
        code="BadName",
        says="cannot be matched",
    )


def test_a_folder_among_thousands_is_looked_around_and_closed(tmp_path, monkeypatch):
    """The warning of an iterator that is left open fails the test."""
    monkeypatch.setattr(snapshot, "_MOST_NAMES", 2)
    for number in range(5):
        (tmp_path / f"m{number}").mkdir()
    names = snapshot.LocalSnapshot("m0", tmp_path / "m0", {}).names_around()
    gc.collect()
    assert len(names) == 2
    assert all(name.startswith("../m") for name in names)
