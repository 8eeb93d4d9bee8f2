"""Repositories on the Hub: which revision, which name, who may read, what is kept, what costs a request."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_client import FILE, HEAD, IDS, full_matrix, ours, read, read_of
from lmeval_screener.checkpoints import FileEntry, Meter
from lmeval_screener.checkpoints.http import AgainError
from lmeval_screener.checkpoints.hub import (
    Hub,
    parse_listing,
    parse_references,
    parse_tree,
    understood,
)
from lmeval_screener.checkpoints.snapshots import open_download
from lmeval_screener.errors import ScreeningError

from lmeval_dispersion.errors import UsageError


@pytest.fixture
def add(hub, tmp_path):
    """Adds a checkpoint of its own numbers to the Hub; its commit and rows."""

    def one(name="org/model", seed=0, shards=1, **settings):
        folder = write_checkpoint(
            tmp_path / "repos" / f"{name}-{seed}", head_and_embedding(seed=seed), shards=shards
        )
        file = FILE if shards == 1 else f"model-00003-of-{shards:05d}.safetensors"
        return hub.add(name, folder, **settings), full_matrix(folder / file, HEAD)[list(IDS)]

    return one


def refused(hub, tmp_path, *args, **settings):
    """The error that reading ends in."""
    with pytest.raises(ScreeningError) as raised:
        read(hub, tmp_path / "cache", *args, **settings)
    return raised.value


@pytest.mark.parametrize("where", ["api", "resolve"])
def test_a_token_that_is_expired_is_named_as_such(hub, add, tmp_path, where):
    add()
    said = {"X-Error-Message": 'User Access Token "mine" is expired\x07'}
    hub.fault(where, faults.status(401, said, b""), times=-1)
    error = refused(hub, tmp_path, token="hf_old")
    assert error.code == "BadToken"
    assert '(User Access Token "mine" is expired\\x07)' in str(error)
    # Without a token, the same answer says that there is nothing to see.
    assert refused(hub, tmp_path).code == "RepoNotFound"


@pytest.mark.parametrize(
    ("revision", "which"),
    [(None, 0), ("main", 0), ("step/7", 1), ("v1.0", 2), ("refs/pr/1", 3), ("full", 1), ("short", 1)],
)
def test_every_kind_of_revision(hub, add, tmp_path, revision, which):
    added = [add(), add(seed=1, branch="step/7"), add(seed=2, tag="v1.0"), add(seed=3, branch="refs/pr/1")]
    commit, truth = added[which]
    revision = {"full": commit, "short": commit[:8]}.get(revision, revision)
    found = read(hub, tmp_path / "cache", "org/model", revision)
    np.testing.assert_array_equal(found.rows, truth)
    assert found.snapshot.revision == commit


def test_an_unknown_revision_and_an_unknown_repository(hub, add, tmp_path):
    add()
    assert refused(hub, tmp_path, "org/model", "step9").code == "RevisionNotFound"
    assert refused(hub, tmp_path, "org/model", "0" * 40).code == "RevisionNotFound"
    assert refused(hub, tmp_path, "org/none").code == "RepoNotFound"
    assert refused(hub, tmp_path, "org/none", token=hub.token).code == "RepoNotFound"


@pytest.mark.parametrize("name", ["", "../..", "a/b/c", "org/model?x=1", "org/mo del", "org/…", "org\n/x"])
def test_what_is_no_name_is_not_asked_for(hub, tmp_path, name):
    assert refused(hub, tmp_path, name).code == "RepoNotFound"
    assert not hub.requests or name == "../.."


def test_a_renamed_repository_is_followed_and_called_by_its_new_name(hub, add, tmp_path):
    _, truth = add("org/new-name")
    hub.rename("org/old-name", "org/new-name")
    hub.rename("legacy", "org/new-name")
    for name in ("org/old-name", "legacy", "ORG/New-Name"):
        found = read(hub, tmp_path / name.replace("/", "-"), name)
        np.testing.assert_array_equal(found.rows, truth)
        assert found.snapshot.repo == "org/new-name"


@pytest.mark.parametrize("token", [None, "hf_wrong"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_gated_repository(hub, add, tmp_path, token, shards):
    _, truth = add(gated=True, shards=shards)
    error = refused(hub, tmp_path, token=token)
    assert error.code == "GatedRepo"
    assert f"{hub.endpoint}/org/model" in str(error)
    np.testing.assert_array_equal(read(hub, tmp_path / "cache", token=hub.token).rows, truth)


@pytest.mark.parametrize("token", ["hf_“secret”", "hf_secret\nX-Other: 1", "hf secret", "hf_secret\x00"])
def test_a_token_that_is_none_is_refused_and_not_shown(hub, tmp_path, token):
    with pytest.raises(UsageError, match="HF_TOKEN") as raised:
        read(hub, tmp_path / "cache", token=token)
    assert "secret" not in str(raised.value)
    assert not hub.requests


@pytest.mark.parametrize(
    "endpoint", ["huggingface.co", "localhost:8080", "http://", "ftp://host", "http://[::1"]
)
def test_an_endpoint_that_is_no_address_is_refused(tmp_path, endpoint):
    with pytest.raises(UsageError, match="expected HF_ENDPOINT such as"):
        Hub(endpoint=endpoint, cache=tmp_path)


def test_the_listing_by_pages_where_the_api_gives_no_sizes(hub, add, tmp_path):
    _, truth = add(shards=3)
    hub.blobs_in_api, hub.page = False, 2
    np.testing.assert_array_equal(read(hub, tmp_path / "cache").rows, truth)
    pages = [r for r in hub.seen("api") if "/tree/" in r.path]
    assert len(pages) == 3  # config, index, three shards


def test_mirrors_without_raw(hub, add, tmp_path):
    hub.raw = False
    _, truth = add(shards=3)
    np.testing.assert_array_equal(read(hub, tmp_path / "cache").rows, truth)


def test_branches_and_tags_by_glob_in_step_order(hub, add, tmp_path):
    for seed, branch in enumerate(["main", "step1000", "step200", "step30000"]):
        add(seed=seed, branch=branch)
    add(seed=9, tag="step5")

    async def names(pattern, **settings):
        async with ours(hub, tmp_path / "cache", **settings) as client:
            return await client.revisions("org/model", pattern)

    assert asyncio.run(names("step*")) == ["step5", "step200", "step1000", "step30000"]
    with pytest.raises(ScreeningError, match="it has 5: main, step5, step200") as raised:
        asyncio.run(names("checkpoint-*"))
    assert raised.value.code == "RevisionNotFound"
    before = len(hub.requests)
    assert asyncio.run(names("step?0*", offline=True)) == ["step200", "step1000", "step30000"]
    assert len(hub.requests) == before


COMMIT = b"0" * 40
NONSENSE = [
    *(b"", b"[", b"5", b"{", b"[" * 100_000, b"\xff"),
    *(b'{"sha": 5, "branches": 5}', b'{"sha": "main", "siblings": [], "branches": [5], "tags": {}}'),
    b'{"sha": "%s", "siblings": 5, "branches": [{"name": 5}]}' % COMMIT,
    b'{"sha": "%s", "siblings": [5], "branches": {}, "tags": 1}' % COMMIT,
    b'{"sha": "%s", "siblings": [{"size": 5}], "tags": [{"ref": "main"}]}' % COMMIT,
]


@pytest.mark.parametrize("meaning", [parse_listing, parse_tree, parse_references])
@pytest.mark.parametrize("body", NONSENSE)
def test_answers_that_are_not_the_hubs(meaning, body):
    with pytest.raises(AgainError) as raised:
        understood(body, "org/model", meaning)
    assert raised.value.error.code == "BadResponse"


@pytest.mark.parametrize("size", [-1, 1.5, True, "5", None])
def test_sizes_and_digests_that_are_none_count_as_unknown(size):
    sibling = {"rfilename": "config.json", "size": size, "blobId": "../../x", "lfs": {"sha256": "y"}}
    found = parse_listing({"sha": "0" * 40, "siblings": [sibling], "safetensors": {"total": size}})
    assert found.files["config.json"] == FileEntry("config.json", -1, None)
    assert found.parameters is None


def test_the_second_run_asks_for_the_revision_only_and_a_pinned_one_for_nothing(hub, add, tmp_path):
    commit, truth = add(shards=3)
    first = read(hub, tmp_path / "cache").snapshot
    assert first.meter.requests == len(hub.requests)
    before = len(hub.requests)
    again = read(hub, tmp_path / "cache")
    np.testing.assert_array_equal(again.rows, truth)
    assert [(r.method, r.part) for r in hub.requests[before:]] == [("HEAD", "resolve")]
    assert again.snapshot.meter.requests == 1
    before = len(hub.requests)
    pinned = read(hub, tmp_path / "cache", "org/model", commit)
    np.testing.assert_array_equal(pinned.rows, truth)
    assert len(hub.requests) == before
    assert pinned.snapshot.meter == Meter(0, 0)


def test_other_rows_cost_only_themselves(hub, add, tmp_path):
    add()
    read(hub, tmp_path / "cache", ids=(3, 4))
    before = len(hub.requests)
    found = read(hub, tmp_path / "cache", ids=(4, 3, 60))
    matrix = full_matrix(tmp_path / "repos" / "org/model-0" / FILE, HEAD)
    np.testing.assert_array_equal(found.rows, matrix[[4, 3, 60]])
    parts = [r.part for r in hub.requests[before:]]
    assert sorted(parts) == ["cdn", "resolve", "resolve"]


def test_requests_of_a_cold_checkpoint(hub, add, tmp_path):
    """Listing, config and index at once; one HEAD; the header; the rows."""
    add(shards=3)
    read(hub, tmp_path / "cache")
    assert sorted((r.part, r.method) for r in hub.requests) == [
        ("api", "GET"),
        *[("cdn", "GET")] * 4,  # the header; rows 3–7, 90, 119
        *[("raw", "GET")] * 2,
        ("resolve", "HEAD"),
    ]


def test_offline_is_served_from_what_was_read(hub, add, tmp_path):
    commit, truth = add(shards=3)
    read(hub, tmp_path / "cache")
    before = len(hub.requests)
    for revision in (None, "main", commit):
        found = read(hub, tmp_path / "cache", "org/model", revision, offline=True)
        np.testing.assert_array_equal(found.rows, truth)
        assert found.snapshot.revision == commit
    for error in (
        refused(hub, tmp_path, "org/other", offline=True),
        refused(hub, tmp_path, "org/model", "v1", offline=True),
        refused(hub, tmp_path, ids=(50,), offline=True),
    ):
        assert error.code == "Offline"
        assert "HF_HUB_OFFLINE" in str(error)
    assert len(hub.requests) == before


def in_downloads(cache, repo, commit, folder, digest):
    """A repository as huggingface_hub lays its downloads out."""
    place = cache / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "blobs").mkdir()
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        shutil.copy(file, place / "blobs" / digest(file))
        os.symlink(Path("../../blobs") / digest(file), snapshot / file.name)
    return place


def test_a_download_of_huggingface_hub_is_a_snapshot(hub, add, tmp_path):
    commit, truth = add()
    in_downloads(
        tmp_path / "hf", "org/model", commit, hub.repositories["org/model"].commits[commit], hub.digest
    )
    for revision in (None, "main", commit):
        found = open_download(tmp_path / "hf", "org/model", revision or "main")
        assert found is not None
        assert found.revision == commit
        np.testing.assert_array_equal(asyncio.run(read_of(found)).rows, truth)
    for revision in ("v1", "../../../etc/passwd", commit[:7], "0" * 40):
        assert open_download(tmp_path / "hf", "org/model", revision) is None
    assert open_download(tmp_path / "hf", "org/other", "main") is None


DOWNLOAD = """
import asyncio, sys
from pathlib import Path
import huggingface_hub
from hub_client import read_of
from lmeval_screener.checkpoints.hub import Hub

async def work(offline):
    async with Hub(cache=Path(sys.argv[1]), offline=offline) as hub:
        found = await read_of(await hub.snapshot("org/model"))
        print(found.snapshot.revision, hub.endpoint, found.snapshot.meter.requests, found.rows.sum())

huggingface_hub.snapshot_download("org/model")
print(huggingface_hub.constants.HF_HUB_CACHE)
asyncio.run(work(True))
asyncio.run(work(False))
"""


def test_settings_and_downloads_of_the_real_huggingface_hub(hub, add, tmp_path):
    """Its own downloader fills its cache from our Hub; then neither offline nor online weights travel."""
    commit, truth = add(private=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(f"{hub.token}\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD, str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder, offline, online = done.stdout.splitlines()
    assert folder == str(home / "hub")
    assert offline.split()[:3] == [commit, hub.endpoint, "0"]
    assert online.split()[:2] == [commit, hub.endpoint]
    assert float(offline.split()[3]) == float(online.split()[3]) == pytest.approx(truth.sum(), rel=1e-6)
    mine = [r for r in hub.requests if r.headers["user-agent"].startswith("screen-checkpoints")]
    assert {r.part for r in mine} == {"api"}
    assert all(r.headers["authorization"] == f"Bearer {hub.token}" for r in mine)
