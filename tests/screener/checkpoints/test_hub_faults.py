"""Every fault in every place of the Hub ends in the right rows or in its named error; nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
from dataclasses import replace

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint, write_qwen_7b
from hub_client import read, read_of, refused, truth, within
from hub_server import HubServer
from lmeval_screener.checkpoints import web
from lmeval_screener.checkpoints.snapshot import read_ranges
from lmeval_screener.errors import ScreeningError
from lmeval_screener.targets.names import Listed

IDS = (*range(10, 20), 3, 77, 400, 401, 403, 999)
PLACES = ["api", "resolve", "cdn"]


@pytest.fixture
def folder(hub, tmp_path, monkeypatch):
    """A checkpoint on the Hub; it is small, but no server may send all of it in place of a range."""
    monkeypatch.setattr(web, "WHOLE", 1000)
    tensors = head_and_embedding(v=1000, d=32, dtype="BF16")
    folder = write_checkpoint(tmp_path / "repo", tensors, shards=2)
    hub.add("org/model", folder)
    return folder


@pytest.fixture
def check(hub, folder, tmp_path):
    """Reads the rows, which are the right ones."""

    def run(**settings):
        found = read(hub, tmp_path / "cache", ids=IDS, **settings)
        np.testing.assert_array_equal(found.rows, truth(folder, IDS))

    return run


@pytest.fixture
def refusal(hub, folder, tmp_path):
    """The code of the error that reading ends in."""

    def run(timeout=1.5, **settings):
        error = refused(read, hub, tmp_path / "cache", ids=IDS, timeout=timeout, **settings)
        assert str(error).count(";") >= 1, "says what to do next"
        return error.code

    return run


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "fault",
    [
        faults.status(429, {"Retry-After": "0"}),
        faults.status(429, {"RateLimit": '"api";r=0;t=0'}),
        faults.status(429),
        faults.status(500),
        faults.status(200),
        faults.status(503, {"Retry-After": "0.1"}),
        faults.closed(),
        faults.closed(reset=True),
        faults.truncated(7),
        faults.truncated(7, reset=True),
    ],
)
def test_what_passes_is_retried(hub, check, where, fault):
    hub.fault(where, fault, times=1)
    check(timeout=10)


@pytest.mark.parametrize(
    ("where", "fault", "code"),
    [
        ("cdn", faults.status(503), "ServerError"),
        ("resolve", faults.status(502), "ServerError"),
        # The time is over before the attempts are, and the error says why.
        ("cdn", lambda *of: replace(faults.status(502)(*of), stall=0.6), "ServerError"),
        ("api", faults.status(429, {"Retry-After": "3600"}), "RateLimited"),
        ("cdn", faults.status(429, {"RateLimit": '"resolvers";r=0;t=2000'}), "RateLimited"),
        ("api", faults.closed(), "Unreachable"),
        ("cdn", faults.closed(reset=True), "Unreachable"),
        ("api", faults.stalled(60), "Timeout"),
        ("cdn", faults.stalled(60), "Timeout"),
        ("cdn", faults.drip(0.4), "Timeout"),
        ("api", faults.status(200), "BadResponse"),
        ("api", faults.status(418), "ServerError"),
        ("api", faults.status(204, body=b""), "ServerError"),
        ("api", faults.claimed(10**30), "Unreachable"),
        ("api", faults.header("Content-Encoding", "br"), "BadResponse"),
        ("resolve", faults.header("Transfer-Encoding", "chunked"), "Unreachable"),
        ("resolve", faults.status(301), "ServerError"),
        ("cdn", faults.status(416), "BadResponse"),
        ("cdn", faults.status(403), "AccessDenied"),
        ("resolve", faults.status(403), "AccessDenied"),
        (
            "api",
            faults.status(307, {"Location": "/api/models/org/model/revision/main"}),
            "BadResponse",
        ),
        (
            "resolve",
            faults.status(302, {"Location": "/org/model/resolve/main/config.json"}),
            "BadResponse",
        ),
    ],
)
def test_what_stays_wrong_ends_in_its_named_error(hub, refusal, where, fault, code):
    hub.fault(where, fault)
    assert refusal() == code


def test_a_hub_that_cannot_be_reached_names_the_mirror_and_the_offline_mode(hub, tmp_path):
    hub.add("org/model", write_checkpoint(tmp_path / "repo", head_and_embedding()))
    hub.fault("*", faults.closed())
    error = refused(read, hub, tmp_path / "cache", code="Unreachable")
    assert "; check the network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to" in str(error)


@pytest.mark.parametrize("sha", [b"main", b"0" * 40])
@pytest.mark.parametrize("siblings", [b"[5]}", b'[{"size": 5}]}', b"\xff", b"[" * 100_000])
def test_a_listing_that_is_none_is_refused(hub, folder, tmp_path, sha, siblings):
    hub.fault("api", faults.status(200, body=b'{"sha": "%s", "siblings": %s' % (sha, siblings)))
    assert "expected JSON of the Hub's API" in str(refused(read, hub, tmp_path / "cache"))


@pytest.mark.parametrize(
    ("where", "fault", "match"),
    [
        ("resolve", faults.header("X-Linked-Size", "12"), "*.safetensors"),
        ("resolve", faults.header("X-Linked-ETag", '"' + 64 * "0" + '"'), "*.safetensors"),
        ("resolve", faults.header("X-Repo-Commit", 40 * "0"), "*.safetensors"),
        ("resolve", faults.content(b"{}"), "*config.json"),
        ("resolve", faults.content(gzip.compress(b" " * 30_000_000)), "*index.json"),
    ],
)
def test_a_file_that_is_another_or_never_ends_is_refused(hub, refusal, where, fault, match):
    """The digest of the listing decides; nothing of a text is believed before."""
    hub.fault(where, fault, match=match)
    assert refusal() == "BadResponse"


def test_a_body_that_breaks_again_and_again_is_resumed_where_it_broke(hub, check):
    hub.fault("cdn", faults.truncated(200))
    check(timeout=30)
    begins = [int(r.headers["range"][6:].split("-")[0]) for r in hub.seen("cdn")]
    assert len(begins) == len(set(begins)), "no byte is asked for twice"


def test_one_expiry_costs_one_resolve_however_many_wait(hub, check):
    first = []

    def expired(reply, request):
        # Whatever carries the first signature is refused, after the header was read with it.
        first.append(request.query["signature"]) if not first else None
        if request.query["signature"] == first[0] and not request.headers["range"].startswith(
            "bytes=0-"
        ):
            return faults.Reply(403, {}, b"Request has expired")
        return reply

    hub.fault("cdn", expired)
    check()
    assert [request.method for request in hub.seen("resolve")].count("HEAD") == 2


def test_addresses_that_serve_one_range_only_are_resolved_range_by_range(hub, check):
    hub.any_range = False
    check(timeout=10)
    assert any("range" in request.headers for request in hub.seen("resolve"))


@pytest.mark.parametrize("where", ["header", "rows"])
def test_200_for_206_on_a_large_file_is_noticed_before_the_body_is_read(hub, tmp_path, where):
    hub.add("org/model", write_qwen_7b(tmp_path / "repo", rows={5: np.ones((1, 3584))}))
    if where == "rows":
        # The header was served properly; from then on Range is ignored.
        assert "are zero" in str(refused(read, hub, tmp_path / "cache", ids=(9,)))
    hub.fault("cdn", faults.whole)
    before = hub.sent
    refused(
        read,
        hub,
        tmp_path / "cache",
        ids=(5,),
        code="RangeNotSupported",
        says="download the checkpoint",
    )
    # Bytes that lay in buffers between the two sides when the connection was closed, of several GB.
    assert hub.sent - before < 64_000_000


def test_a_small_file_is_accepted_whole_and_read_once(hub, check, monkeypatch):
    monkeypatch.setattr(web, "WHOLE", 10**6)
    hub.fault("cdn", faults.whole)
    check()
    assert len(hub.seen("cdn")) == 1


@pytest.mark.parametrize("where", ["api", "resolve", "cdn"])
@pytest.mark.parametrize(
    "address",
    [
        *("http://[", "//", "\x00", "http://\xb3", "ftp://cdn.example/x"),
        *("http://localhost:0/x", "http://localhost:1/x"),
    ],
)
def test_a_redirect_to_nowhere(hub, refusal, where, address):
    hub.fault(where, faults.status(302, {"Location": address}))
    assert refusal(timeout=0.6) in ("BadResponse", "Unreachable")


@pytest.mark.parametrize("following", ["http://example.org/x", "http://["])
def test_a_listing_that_goes_on_elsewhere_is_refused(hub, folder, tmp_path, following):
    hub.fault("api", faults.header("Link", f'<{following}>; rel="next"'), match="*/refs")

    def work(client, account):
        return client.revisions("org/model", "*", account)

    refused(
        within,
        work,
        tmp_path / "cache",
        endpoint=hub.endpoint,
        code="BadResponse",
        says="the next page of the listing of org/model",
    )


def read_listed(hub, folder, cache):
    """The rows of a checkpoint of which a list has told commit and names of files."""
    names = tuple(place.name for place in folder.iterdir())
    listed = Listed(hub.repositories["org/model"].branches["main"], names, None, gated=False)

    async def work(client, account):
        snapshot = await client.snapshot("org/model", None, account, listed)
        return (await read_of(snapshot, IDS)).rows

    return within(work, cache, endpoint=hub.endpoint, timeout=5)


@pytest.mark.parametrize(
    ("where", "fault", "match", "is_right"),
    [
        ("resolve", faults.header("X-Linked-Size", "12"), "*.safetensors", False),
        ("resolve", faults.header("X-Linked-Size", "-1"), "*.safetensors", False),
        ("resolve", faults.without("X-Linked-Size"), "*.safetensors", False),
        ("resolve", faults.without("X-Linked-ETag"), "*.safetensors", True),
        ("resolve", faults.header("X-Repo-Commit", 40 * "0"), "*.safetensors", False),
        ("resolve", faults.header("X-Repo-Commit", 40 * "0"), "*config.json", False),
        ("resolve", faults.content(b"{}"), "*config.json", False),
        ("resolve", faults.without("ETag"), "*config.json", True),
        ("resolve", faults.status(404), "/api/*", False),
        ("resolve", faults.status(200), "*config.json", False),
        ("resolve", faults.header("Location", "/elsewhere"), "*safetensors", False),
        ("cdn", faults.shifted(0, longer=2), "*", False),
        ("cdn", faults.shifted(2), "*", False),
    ],
)
def test_of_a_listed_checkpoint_as_little_is_believed(
    hub, folder, tmp_path, where, fault, match, is_right
):
    """Sizes and digests come from the resolver; one that is wrong for a while leaves nothing wrong behind."""
    hub.fault(where, fault, match=match)
    if is_right:
        np.testing.assert_array_equal(
            read_listed(hub, folder, tmp_path / "cache"), truth(folder, IDS)
        )
    else:
        error = refused(read_listed, hub, folder, tmp_path / "cache")
        assert error.code in ("BadResponse", "RepoNotFound")
    hub.faults.clear()
    for _ in range(2):
        hub.requests.clear()
        np.testing.assert_array_equal(
            read_listed(hub, folder, tmp_path / "cache"), truth(folder, IDS)
        )
        assert not hub.seen("api")
    assert not hub.requests, "all is known then"


def test_the_token_goes_to_the_hub_and_nowhere_else(hub, folder, tmp_path):
    hub.repositories["org/model"].gated = True
    read(hub, tmp_path / "cache", token=hub.token)
    assert all(
        r.headers.get("authorization") == (None if r.on_cdn else f"Bearer {hub.token}")
        for r in hub.requests
    )
    for part in ("api", "resolve"):
        with HubServer() as other:
            hub.fault(part, faults.status(302, {"Location": other.endpoint + "/x"}), times=9)
            with contextlib.suppress(ScreeningError):
                read(hub, tmp_path / part, token=hub.token)
            assert other.requests
            assert all("authorization" not in r.headers for r in other.requests)
        hub.faults.clear()


def test_cancelling_leaves_nothing_behind(hub, folder, tmp_path):
    hub.fault("cdn", faults.stalled(30))
    file = max(folder.glob("*.safetensors"))

    async def work(client, account):
        snapshot = await client.snapshot("org/model", None, account)
        before = asyncio.all_tasks()
        task = asyncio.create_task(
            snapshot.ranges(file.name, [(k, k + 8) for k in range(0, 800, 8)])
        )
        while not hub.seen("cdn"):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == before
        # The pool is whole: the next reading works.
        hub.faults.clear()
        return await snapshot.ranges(file.name, [(0, 8)])

    found = within(work, tmp_path / "cache", endpoint=hub.endpoint)
    assert found == read_ranges(file, [(0, 8)])


#: Ways in which a delivery contradicts itself.
CONTRADICTIONS = [
    faults.status(200),
    faults.status(206),
    faults.status(206, {"Content-Type": "multipart/byteranges; boundary=x"}, b"--x--"),
    faults.status(404),
    faults.status(416, {"Content-Range": "bytes */64"}),
    faults.shifted(2),
    faults.shifted(-2),
    faults.longer(-1),
    faults.longer(1),
    faults.claimed(9),
    faults.content(faults.HTML),
    faults.header("Content-Range", "bytes 0-63/64"),
    faults.header("Content-Range", "bytes 8-71/*"),
    faults.without("Content-Range"),
    faults.header("Content-Type", "text/html"),
    faults.zipped,
]


def test_a_server_that_is_wrong_once_in_fifteen_times_loses_no_checkpoint(hub, tmp_path):
    folder = write_checkpoint(tmp_path / "repo", head_and_embedding(v=2000, d=64))
    hub.add("org/model", folder)
    ids = tuple(range(0, 2000, 40))
    draw, wrong = random.Random(0), []

    def rarely(reply, request):
        if draw.random() > 1 / 15:
            return reply
        wrong.append(request)
        return CONTRADICTIONS[len(wrong) % len(CONTRADICTIONS)](reply, request)

    hub.fault("cdn", rarely)
    for number in range(12):
        np.testing.assert_array_equal(
            read(hub, tmp_path / f"cache{number}", ids=ids).rows, truth(folder, ids)
        )
    assert len(wrong) >= len(CONTRADICTIONS)
