"""Repositories on the Hub: which revision, which name, who may read, what is kept, what costs a request."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_client import IDS, read, refused, truth, within
from huggingface_hub import constants, get_token
from lmeval_screener.checkpoints.hub import Hub, _implicit_token, parse_listing
from lmeval_screener.checkpoints.snapshot import FileEntry, open_download

from lmeval_dispersion.errors import UsageError


@pytest.fixture
def add(hub, tmp_path):
    """Adds a checkpoint of its own numbers to the Hub; its commit and rows."""

    def put(name="org/model", seed=0, shards=1, **settings):
        place = tmp_path / "repos" / f"{name}-{seed}"
        folder = write_checkpoint(place, head_and_embedding(seed=seed), shards=shards)
        return hub.add(name, folder, **settings), truth(folder)

    return put


@pytest.fixture
def refusal(hub, tmp_path):
    """The error that reading ends in."""
    return functools.partial(refused, read, hub, tmp_path / "cache")


def test_every_kind_of_revision(hub, add, tmp_path):
    added = [
        add(),
        add(seed=1, branch="step/7"),
        add(seed=2, tag="v1.0"),
        add(seed=3, branch="refs/pr/1"),
    ]
    names = [(None, "main"), ("step/7",), ("v1.0",), ("refs/pr/1",)]
    for (commit, rows), revisions in zip(added, names, strict=True):
        for revision in (*revisions, commit, commit[:8]):
            found = read(hub, tmp_path / "cache", "org/model", revision)
            np.testing.assert_array_equal(found.rows, rows)
            assert found.snapshot.revision == commit


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (("org/model", "step9"), "RevisionNotFound"),
        (("org/model", "0" * 40), "RevisionNotFound"),
        *(
            ((name,), "RepoNotFound")
            for name in ("org/none", "", "../..", "org/model?x=1", "o\n/x")
        ),
    ],
)
@pytest.mark.parametrize("token", [None, "hf_opensesame"])
def test_an_unknown_revision_and_an_unknown_repository(hub, add, refusal, asked, code, token):
    add()
    assert refusal(*asked, token=token).code == code
    assert not [request for request in hub.requests if "?x=1" in request.target]


def test_a_renamed_repository_is_followed_and_called_by_its_new_name(hub, add, tmp_path):
    _, rows = add("org/new-name")
    hub.rename("org/old-name", "org/new-name")
    hub.rename("legacy", "org/new-name")
    for name in ("org/old-name", "legacy", "ORG/New-Name"):
        found = read(hub, tmp_path / name.replace("/", "-"), name)
        np.testing.assert_array_equal(found.rows, rows)
        assert found.snapshot.repo == "org/new-name"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_gated_repository(hub, add, refusal, tmp_path, shards):
    _, rows = add(gated=True, shards=shards)
    for token in (None, "hf_wrong"):
        refusal(token=token, code="GatedRepo", says=f"{hub.endpoint}/org/model")
    np.testing.assert_array_equal(read(hub, tmp_path / "cache", token=hub.token).rows, rows)


@pytest.mark.parametrize("where", ["api", "resolve"])
def test_a_token_that_is_expired_is_named_as_such(hub, add, refusal, where):
    add()
    hub.fault(
        where,
        faults.status(401, {"X-Error-Message": 'User Access Token "mine" is expired\x07'}, b""),
    )
    refusal(token="hf_old", code="BadToken", says='(User Access Token "mine" is expired\\x07)')
    # Without a token, the same answer says that there is nothing to see.
    assert refusal().code == "RepoNotFound"


@pytest.mark.parametrize("value", [None, "", "hf_a", " hf_a\n", "hf_a b"])
@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
@pytest.mark.parametrize("stored", [None, "hf_stored\n"])
def test_the_token_is_the_one_that_huggingface_hub_finds(
    tmp_path, monkeypatch, name, value, stored
):
    for other in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    if value is not None:
        monkeypatch.setenv(name, value)
    if stored is not None:
        (tmp_path / "token").write_text(stored)
    assert _implicit_token() == get_token()


def test_a_token_or_an_endpoint_that_is_none_is_refused_and_no_token_shown(
    hub, tmp_path, monkeypatch
):
    for token in ("hf_“secret”", "hf_secret\nX-Other: 1"):
        with pytest.raises(UsageError, match="HF_TOKEN") as raised:
            read(hub, tmp_path / "cache", token=token)
        assert "secret" not in str(raised.value)
    for endpoint in ("huggingface.co", "localhost:8080", "http://", "ftp://host", "http://[::1"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(UsageError, match="expected HF_ENDPOINT such as"):
            Hub()
    assert not hub.requests


def test_a_mirror_whose_listing_has_no_sizes(hub, add, tmp_path):
    """The resolver says them, where a file is opened; what it said is known later, offline too."""
    _, rows = add(shards=3)
    hub.blobs_in_api = hub.texts_apart = False
    np.testing.assert_array_equal(read(hub, tmp_path / "cache").rows, rows)
    for settings, asked in ({}, [("resolve", "HEAD")]), ({"offline": True}, []):
        hub.requests.clear()
        np.testing.assert_array_equal(read(hub, tmp_path / "cache", **settings).rows, rows)
        assert [(request.part, request.method) for request in hub.requests] == asked


def test_a_disabled_repository_is_called_so(hub, add, refusal):
    add()
    hub.fault(
        "api", faults.status(403, {"X-Error-Message": "Access to this resource is disabled."})
    )
    error = refusal(code="AccessDenied", says="is disabled on")
    assert "log in" not in str(error)


def test_branches_and_tags_by_glob_in_step_order(hub, add, tmp_path):
    for seed, branch in enumerate(["main", "step1000", "step200", "step30000"]):
        add(seed=seed, branch=branch)
    add(seed=9, tag="step5")

    def names(pattern, **settings):
        def work(client, account):
            return client.revisions("org/model", pattern, account)

        return within(work, tmp_path / "cache", endpoint=hub.endpoint, **settings)

    assert names("step*") == ["step5", "step200", "step1000", "step30000"]
    refused(names, "checkpoint-*", code="RevisionNotFound", says="(5): main, step5, step200")
    before = len(hub.requests)
    assert names("step?0*", offline=True) == ["step200", "step1000", "step30000"]
    assert len(hub.requests) == before


@pytest.mark.parametrize("size", [-1, 1.5, True, "5", None])
def test_sizes_and_digests_that_are_none_count_as_unknown(size):
    sibling = {
        "rfilename": "config.json",
        "size": size,
        "blobId": "../../x",
        "lfs": {"sha256": "y"},
    }
    found = parse_listing({"sha": "0" * 40, "siblings": [sibling], "safetensors": {"total": size}})
    assert found.files["config.json"] == FileEntry("config.json", -1, None)
    assert found.parameters is None


def test_what_a_reading_asks_for(hub, add, tmp_path):
    """Cold: listing, config and index at once; one HEAD; the header; the rows. Then only what is new."""
    commit, rows = add(shards=3)
    header_and_rows = [("cdn", "GET")] * 4
    api, texts, head = ("api", "GET"), [("resolve", "GET")] * 2, ("resolve", "HEAD")
    for revision, ids, expected in (
        (None, IDS, [api, *header_and_rows, *texts, head]),
        (None, IDS, [head]),
        (commit, IDS, []),
        (commit, (4, 3, 60), [("cdn", "GET"), head]),
    ):
        hub.requests.clear()
        found = read(hub, tmp_path / "cache", "org/model", revision, ids=ids)
        known = [place for place, row in enumerate(ids) if row in IDS]
        np.testing.assert_array_equal(
            found.rows[known], rows[[IDS.index(ids[place]) for place in known]]
        )
        assert sorted((r.part, r.method) for r in hub.requests) == expected
        assert found.snapshot.account.requests == len(hub.requests)


def test_offline_is_served_from_what_was_read(hub, add, refusal, tmp_path):
    commit, rows = add(shards=3)
    read(hub, tmp_path / "cache")
    before = len(hub.requests)
    for revision in (None, "main", commit):
        found = read(hub, tmp_path / "cache", "org/model", revision, offline=True)
        np.testing.assert_array_equal(found.rows, rows)
        assert found.snapshot.revision == commit
    for error in (
        refusal("org/other", offline=True),
        refusal("org/model", "v1", offline=True),
        refusal(ids=(50,), offline=True),
    ):
        assert error.code == "Offline"
        assert "HF_HUB_OFFLINE" in str(error)
    assert len(hub.requests) == before


DOWNLOAD = """
import asyncio
import huggingface_hub
from hub_client import read_of
from lmeval_screener.checkpoints.hub import Hub

async def work(offline):
    async with Hub(offline=offline) as hub:
        found = await read_of(await hub.snapshot("org/model", None, hub.account))
        print(found.snapshot.revision, hub.endpoint, hub.account.requests, found.rows.sum())

huggingface_hub.snapshot_download("org/model")
print(huggingface_hub.constants.HF_HUB_CACHE)
asyncio.run(work(True))
asyncio.run(work(False))
"""


def test_settings_and_downloads_of_the_real_huggingface_hub(hub, add, tmp_path):
    """Its own downloader fills its cache from our Hub; then neither offline nor online weights travel."""
    commit, rows = add(private=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(f"{hub.token}\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    folder, offline, online = done.stdout.splitlines()
    assert folder == str(home / "hub")
    assert offline.split()[:3] == [commit, hub.endpoint, "0"]
    assert online.split()[:2] == [commit, hub.endpoint]
    assert (
        float(offline.split()[3]) == float(online.split()[3]) == pytest.approx(rows.sum(), rel=1e-6)
    )
    mine = [r for r in hub.requests if r.headers["user-agent"].startswith("screen-checkpoints")]
    assert {r.part for r in mine} == {"api"}
    assert all(r.headers["authorization"] == f"Bearer {hub.token}" for r in mine)
    for revision, known in {"main": commit, commit: commit, "v1": None, "0" * 40: None}.items():
        found = open_download(home / "hub", "org/model", revision)
        assert (found and found.revision) == known
    for name, revision in (("org/model", ".."), ("org/model", commit[:7]), ("x/y", "main")):
        assert open_download(home / "hub", name, revision) is None
