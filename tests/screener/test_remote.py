"""The way to a file: waits that all keep, servers that ignore Range, redirects, and who gets the token."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint, write_qwen_7b
from hub_client import FILE, HEAD, IDS, full_matrix, ours, read
from hub_server import HubServer
from lmeval_screener.checkpoints.snapshots import read_ranges
from lmeval_screener.errors import ScreeningError


@pytest.fixture
def truth(hub, tmp_path):
    """A small checkpoint on the Hub; its rows."""
    folder = write_checkpoint(tmp_path / "repo", head_and_embedding())
    hub.add("org/model", folder)
    return full_matrix(folder / FILE, HEAD)[list(IDS)]


def refused(hub, tmp_path, **settings):
    """The error that reading ends in."""
    with pytest.raises(ScreeningError) as raised:
        read(hub, tmp_path / "cache", **settings)
    return raised.value


@pytest.mark.parametrize("where", ["header", "rows"])
def test_200_for_206_on_a_large_file_is_noticed_before_the_body_is_read(hub, tmp_path, where):
    write_qwen_7b(tmp_path / "repo", rows={5: np.ones((1, 3584))})
    hub.add("org/model", tmp_path / "repo")
    if where == "rows":
        # The header was served properly; from then on Range is ignored.
        assert "are zero" in str(refused(hub, tmp_path, ids=(9,)))
    hub.fault("cdn", faults.whole)
    before = hub.sent
    error = refused(hub, tmp_path, ids=(5,))
    assert error.code == "RangeNotSupported"
    assert "download the checkpoint" in str(error)
    # What lay in buffers between the two sides when the connection was closed, of several GB.
    assert hub.sent - before < 64_000_000


def test_a_small_file_is_accepted_whole_and_read_once(hub, truth, tmp_path):
    hub.fault("cdn", faults.whole)
    np.testing.assert_array_equal(read(hub, tmp_path / "cache").rows, truth)
    assert len(hub.seen("cdn")) == 1


@pytest.mark.parametrize("where", ["api", "resolve", "cdn"])
@pytest.mark.parametrize(
    "address",
    [
        *("http://[", "//", "\x00", "http://\xb3", "ftp://cdn.example/x"),
        *("http://localhost:0/x", "http://localhost:1/x"),
    ],
)
def test_a_redirect_to_nowhere(hub, truth, tmp_path, where, address):
    hub.fault(where, faults.status(302, {"Location": address}))
    assert refused(hub, tmp_path, timeout=0.6).code in ("BadResponse", "Unreachable")


def test_the_token_goes_to_the_hub_and_nowhere_else(hub, truth, tmp_path):
    hub.repositories["org/model"].gated = True
    read(hub, tmp_path / "cache", token=hub.token)
    assert all("authorization" not in r.headers for r in hub.seen("cdn"))
    assert all(r.headers["authorization"] == f"Bearer {hub.token}" for r in hub.requests if not r.on_cdn)


@pytest.mark.parametrize("part", ["api", "raw", "resolve"])
def test_a_redirect_to_another_host_does_not_get_the_token(hub, truth, tmp_path, part):
    with HubServer() as other:
        hub.fault(part, lambda reply, request: faults.Reply(302, {"Location": other.endpoint + "/x"}))
        with contextlib.suppress(ScreeningError):
            read(hub, tmp_path / "cache", token="hf_secret", timeout=0.6)
        assert other.requests
        assert all("authorization" not in r.headers for r in other.requests)


@pytest.mark.parametrize("following", ["http://example.org/x", "http://["])
def test_a_listing_that_goes_on_elsewhere_is_refused(hub, truth, tmp_path, following):
    hub.blobs_in_api = False
    hub.fault("api", faults.header("Link", f'<{following}>; rel="next"'), match="*/tree/*")
    assert refused(hub, tmp_path, timeout=5).code == "BadResponse"


def test_cancelling_leaves_nothing_behind(hub, truth, tmp_path):
    hub.fault("cdn", faults.stalled(30))

    async def work():
        async with ours(hub, tmp_path / "cache") as client:
            snapshot = await client.snapshot("org/model")
            before = asyncio.all_tasks()
            task = asyncio.create_task(snapshot.ranges(FILE, [(k, k + 8) for k in range(0, 800, 8)]))
            while not hub.seen("cdn"):
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asyncio.all_tasks() == before
            # The pool is whole: the next reading works.
            hub.faults.clear()
            (body,) = await snapshot.ranges(FILE, [(0, 8)])
            return body

    assert asyncio.run(asyncio.wait_for(work(), 10)) == read_ranges(tmp_path / "repo" / FILE, [(0, 8)])[0]


def test_time_that_runs_out_while_trying_again_says_why(hub, truth, tmp_path):
    hub.fault("cdn", lambda reply, request: replace(faults.status(502)(reply, request), stall=0.4))
    error = refused(hub, tmp_path, timeout=0.9)
    assert error.code == "ServerError"
    assert "answered 502" in str(error)
