"""Every fault in every place ends in the right rows or in its named error; nothing hangs."""

from __future__ import annotations

import asyncio
import gzip

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from lmeval_screener.checkpoints import snapshots
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.errors import ScreeningError
from lmeval_screener.weights.projection import find_projection, read_rows

IDS = [*range(10, 20), 3, 77, 400, 401, 403, 999]


@pytest.fixture
def checkpoint(hub, tmp_path, monkeypatch):
    """A checkpoint on the Hub, its expected rows, and how to read them."""
    tensors = head_and_embedding(v=1000, d=32, dtype="BF16")
    folder = write_checkpoint(tmp_path / "m", tensors, shards=2)
    hub.add("org/m", folder)
    # The files here are small; a whole one is accepted from a mirror only below this.
    monkeypatch.setattr(snapshots, "WHOLE", 1000)
    full = (tensors["lm_head.weight"][1].astype("<f4").view("<u4") >> 16 << 16).view("<f4")

    async def work(budget):
        async with Hub(endpoint=hub.endpoint, cache=tmp_path / "cache") as pool:
            snapshot = await pool.snapshot("org/m", budget=budget)
            return await read_rows(await find_projection(snapshot), IDS)

    def read(timeout=3.0):
        budget = Budget(timeout)
        return asyncio.run(budget.bounded(work(budget)))

    read.expected = full[IDS]
    read.folder = folder
    return read


def check(read, timeout=20.0):
    np.testing.assert_array_equal(read(timeout), read.expected)


def refusal(read, timeout=1.5):
    with pytest.raises(ScreeningError) as error:
        read(timeout)
    assert str(error.value).count(";") >= 1, "says what to do next"
    return error.value.code


@pytest.mark.parametrize("where", ["api", "raw", "resolve", "cdn"])
@pytest.mark.parametrize(
    "fault",
    [
        faults.status(429, {"Retry-After": "0"}),
        faults.status(429, {"RateLimit": '"api";r=0;t=0'}),
        faults.status(429),
        faults.status(500),
        faults.status(503, {"Retry-After": "0.1"}),
        faults.closed(),
        faults.closed(reset=True),
        faults.truncated(7),
        faults.truncated(7, reset=True),
    ],
)
def test_what_passes_is_retried(hub, checkpoint, where, fault):
    hub.fault(where, fault, times=1)
    check(checkpoint, timeout=10)


@pytest.mark.parametrize(
    "fault",
    [
        faults.shifted(-2),
        faults.shorter(1),
        faults.status(200),
        faults.status(206),
        faults.content(faults.HTML),
        faults.header("Content-Range", "bytes 0-63/64"),
        faults.header("Content-Range", "bytes 8-71/*"),
        faults.without("Content-Range"),
        faults.header("Content-Type", "text/html"),
        faults.status(416, {"Content-Range": "bytes */64"}),
        faults.status(404),
    ],
)
@pytest.mark.parametrize("times", [1, -1])
def test_a_delivery_that_contradicts_itself_is_never_believed(hub, checkpoint, fault, times):
    """Once: asked again. Always: its named error, and never wrong rows."""
    hub.fault("cdn", fault, times=times)
    if times == 1:
        check(checkpoint)
    else:
        assert refusal(checkpoint) in ("BadResponse", "RangeNotSupported")


@pytest.mark.parametrize(
    ("where", "fault", "code"),
    [
        ("cdn", faults.status(503), "ServerError"),
        ("resolve", faults.status(502), "ServerError"),
        ("api", faults.status(429, {"Retry-After": "3600"}), "RateLimited"),
        ("cdn", faults.status(429, {"RateLimit": '"resolvers";r=0;t=2000'}), "RateLimited"),
        ("api", faults.closed(), "Unreachable"),
        ("cdn", faults.closed(reset=True), "Unreachable"),
        ("api", faults.stalled(60), "Timeout"),
        ("cdn", faults.stalled(60), "Timeout"),
        ("cdn", faults.drip(0.4), "Timeout"),
        ("api", faults.status(200), "BadResponse"),
        ("api", faults.status(200, body=b'{"sha": "main", "siblings": []}'), "BadResponse"),
        ("api", faults.status(200, body=b'{"sha": "%s", "siblings": [5]}' % (b"0" * 40)), "BadResponse"),
        (
            "api",
            faults.status(200, body=b'{"sha": "%s", "siblings": [{"size": 5}]}' % (b"0" * 40)),
            "BadResponse",
        ),
        ("api", faults.status(200, body=b"\xff"), "BadResponse"),
        ("api", faults.status(200, body=b"[" * 100_000), "BadResponse"),
        ("api", faults.status(418), "ServerError"),
        ("cdn", faults.status(403), "AccessDenied"),
        ("resolve", faults.status(403), "AccessDenied"),
        ("api", faults.status(307, {"Location": "/api/models/org/m/revision/main"}), "BadResponse"),
        ("resolve", faults.status(302, {"Location": "/org/m/resolve/main/config.json"}), "BadResponse"),
    ],
)
def test_what_stays_wrong_ends_in_its_named_error(hub, checkpoint, where, fault, code):
    hub.fault(where, fault)
    assert refusal(checkpoint) == code


@pytest.mark.parametrize(
    ("where", "fault", "match"),
    [
        ("resolve", faults.header("X-Linked-Size", "12"), "*.safetensors"),
        ("resolve", faults.header("X-Linked-ETag", '"' + 64 * "0" + '"'), "*.safetensors"),
        ("resolve", faults.header("X-Repo-Commit", 40 * "0"), "*.safetensors"),
        ("raw", faults.content(b"{}"), "*config.json"),
        ("raw", faults.content(gzip.compress(b" " * 30_000_000)), "*index.json"),
    ],
)
def test_a_file_that_is_another_or_never_ends_is_refused(hub, checkpoint, where, fault, match):
    """The digest of the listing decides; nothing of a text is believed before."""
    hub.fault(where, fault, match=match)
    assert refusal(checkpoint) == "BadResponse"


def test_a_body_that_breaks_again_and_again_is_resumed_where_it_broke(hub, checkpoint):
    hub.fault("cdn", faults.truncated(200))
    check(checkpoint, timeout=30)
    begins = [int(r.headers["range"][6:].split("-")[0]) for r in hub.seen("cdn")]
    assert len(begins) == len(set(begins)), "no byte is asked for twice"


def test_an_address_that_expires_is_resolved_again(hub, checkpoint):
    hub.lifetime = 0.5
    hub.fault("cdn", faults.stalled(0.6), times=1)
    check(checkpoint, timeout=10)


def test_one_expiry_costs_one_resolve_however_many_wait(hub, checkpoint):
    first = []

    def expired(reply, request):
        # Whatever carries the first signature is refused, after the header was read with it.
        first.append(request.query["signature"]) if not first else None
        if request.query["signature"] == first[0] and not request.headers["range"].startswith("bytes=0-"):
            return faults.Reply(403, {}, b"Request has expired")
        return reply

    hub.fault("cdn", expired)
    check(checkpoint)
    assert len(hub.seen("resolve")) == 2


def test_addresses_that_serve_one_range_only_are_resolved_range_by_range(hub, checkpoint):
    hub.any_range = False
    check(checkpoint, timeout=10)
    assert any("range" in request.headers for request in hub.seen("resolve"))
    assert not any("authorization" in request.headers for request in hub.seen("cdn"))
