"""Connections: no more than needed, used again, reopened when closed; proxies respected."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_client import refused, within
from hub_faults import header, status, truncated
from lmeval_screener.checkpoints import account
from lmeval_screener.checkpoints.account import FIRST_BACKOFF, RANGES, Account, RetryError
from lmeval_screener.checkpoints.http import (
    Transport,
    environment_proxy,
)
from lmeval_screener.errors import ScreeningError
from yarl import URL


@pytest.fixture
def read(hub, tmp_path):
    """Reads single bytes of one file, one range after the other or all at once."""
    hub.add("org/m", write_checkpoint(tmp_path / "m", head_and_embedding(v=400)))

    def run(count, together):
        async def work(pool, account):
            snapshot = await pool.snapshot("org/m", None, account)
            spans = [(at, at + 1) for at in range(count)]
            if together:
                return await snapshot.ranges("model.safetensors", spans)
            return [(await snapshot.ranges("model.safetensors", [span]))[0] for span in spans]

        whole = (tmp_path / "m" / "model.safetensors").read_bytes()
        found = within(work, tmp_path / "cache", endpoint=hub.endpoint)
        assert found == [whole[at : at + 1] for at in range(count)]

    return run


def test_side_by_side_opens_no_more_than_the_limit(hub, read):
    hub.latency = 0.1
    read(300, together=True)
    assert 4 < hub.connections[1] <= RANGES
    assert len(hub.seen("cdn")) == 300


def test_a_connection_that_the_server_closed_is_opened_again(hub, read):
    hub.fault("cdn", header("Connection", "close"), times=3)
    hub.fault("cdn", truncated(0), times=1)
    read(10, together=False)
    assert hub.connections[1] == 5


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_the_environment_names_the_proxy(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert environment_proxy(URL("https://cdn.example/file")) == "http://127.0.0.1:9"
    plain = URL("http://cdn.example/file")
    assert environment_proxy(plain) is None
    monkeypatch.setenv("ALL_PROXY", "socks5://user:secret@127.0.0.1:9")
    assert "secret" not in str(refused(environment_proxy, plain, says="expected an HTTP proxy for"))


@pytest.mark.parametrize(
    ("excluded", "url", "is_excluded"),
    [
        ("localhost:5710", "http://localhost:5710/x", True),
        ("localhost:5710", "http://localhost:5711/x", False),
        ("host.example:443", "https://host.example/x", True),
        ("127.0.0.0/8", "http://127.9.9.9/x", True),
        ("10.0.0.0/8, 192.168.0.0/16", "http://192.168.7.7:9000/x", True),
        ("fd00::/8", "http://[fd00::1]/x", True),
        (".example", "http://host.example/x", True),
        ("*", "http://host.example/x", True),
        ("10.0.0.0/99,other", "http://10.0.0.1/x", False),
    ],
)
def test_no_proxy_knows_ports_and_blocks(monkeypatch, excluded, url, is_excluded):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", excluded)
    assert (environment_proxy(URL(url)) is None) == is_excluded


@pytest.mark.parametrize(
    ("source", "location", "says"),
    [
        ("https://8.8.8.8/x", "http://8.8.8.8/x", "from https to http"),
        ("http://8.8.8.8/x", "http://169.254.169.254/latest", "link-local network"),
        ("http://10.0.0.1/x", "http://169.254.169.254/latest", "link-local network"),
        ("https://8.8.8.8/x", "https://[fe80::1]/x", "link-local network"),
        ("https://8.8.8.8/x", "https://[::ffff:10.0.0.1]/x", "private network"),
        ("http://8.8.8.8/x", "http://localhost:9000/x", "private network"),
        ("http://8.8.8.8/x", "http://loopback.test/x", "private network"),
        ("http://loopback.test/x", "http://10.0.0.1/x", "private network"),
        ("http://8.8.8.8/x", "http://100.100.100.200/latest", "private network"),
        ("http://8.8.8.8/x", "http://[fd00:ec2::254]/latest", "private network"),
        ("http://8.8.8.8/x", "http://[64:ff9b::a9fe:a9fe]/latest", "link-local network"),
        ("http://8.8.8.8/x", "http://[2002:0a00:0001::1]/x", "private network"),
        ("http://8.8.8.8/x", "http://named.example/x", None),
        ("http://8.8.8.8/x", "http://198.18.0.9/x", None),
        ("http://8.8.8.8/x", "https://1.1.1.1/y", None),
        ("https://8.8.8.8/x", "/y", None),
    ],
)
def test_a_redirect_to_where_nobody_should_be_sent_is_refused(monkeypatch, source, location, says):
    """`Transport.redirect` looks at the answer's address, its Location, and reads its body."""

    async def nothing():
        return b""

    headers, body = {"Location": location}, SimpleNamespace(readany=nothing)
    answer = SimpleNamespace(url=URL(source), headers=headers, status=302, content=body)

    async def work():
        async def named(host, port):
            known = {
                "loopback.test": "127.0.0.1",
                "localhost": "127.0.0.1",
                "hub.example": "8.8.4.4",
            }
            known["named.example"] = "10.0.0.7"
            return [(0, 0, 0, "", (known[host], 0))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://named.example:9000")
        transport = Transport("https://hub.example", None)
        try:
            return await transport.redirect(answer, Account())
        finally:
            await transport.close()

    if says is None:
        assert asyncio.run(work()) == URL(source).join(URL(location))
        return
    refused(asyncio.run, work(), code="BadResponse", says=says)


def test_every_request_goes_through_the_proxy(hub, tmp_path, monkeypatch):
    """A proxy is asked with the whole address; nothing goes past it."""
    monkeypatch.setenv("HTTP_PROXY", hub.endpoint)
    hub.fault("*", status(418))

    def work(pool, account):
        return pool.snapshot("org/m", None, account)

    refused(within, work, tmp_path, endpoint="http://hub.invalid", code="ServerError")
    assert hub.requests
    assert all(request.target.startswith("http://hub.invalid/") for request in hub.requests)


def test_waits_between_attempts_grow_and_stay_within_the_budget(monkeypatch):
    """0.25 s and more, twice as long each time; the last attempt's error is the one that is raised."""
    monkeypatch.setattr(account, "FIRST_BACKOFF", FIRST_BACKOFF)
    slept, attempts = [], []

    async def sleep(seconds):
        slept.append(seconds)

    async def fails():
        attempts.append(len(attempts) + 1)
        raise RetryError(ScreeningError("ServerError", f"attempt {len(attempts)}; try again"))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    refused(asyncio.run, Account(60).retried(fails), says="attempt 5")
    assert [wait // (0.25 * 2**place) for place, wait in enumerate(slept)] == [1, 1, 1, 1]
    slept.clear()
    refused(asyncio.run, Account(1).retried(fails), says="attempt 8")
    assert sum(slept) < 1.5
