"""Connections: no more than needed, used again, reopened when closed; proxies respected."""

from __future__ import annotations

import asyncio

import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_faults import header, truncated
from lmeval_screener.checkpoints import Meter, http
from lmeval_screener.checkpoints.http import (
    FIRST_WAIT,
    RANGES,
    AgainError,
    Transport,
    environment_proxy,
    retried,
)
from lmeval_screener.checkpoints.hub import Hub
from lmeval_screener.checkpoints.limits import Budget
from lmeval_screener.errors import ScreeningError
from yarl import URL


@pytest.fixture
def read(hub, tmp_path):
    """Reads single bytes of one file, one range after the other or all at once."""
    hub.add("org/m", write_checkpoint(tmp_path / "m", head_and_embedding(v=400)))

    async def work(count, together):
        async with Hub(endpoint=hub.endpoint, cache=tmp_path / "cache") as pool:
            snapshot = await pool.snapshot("org/m")
            spans = [(at, at + 1) for at in range(count)]
            if together:
                return await snapshot.ranges("model.safetensors", spans)
            return [(await snapshot.ranges("model.safetensors", [span]))[0] for span in spans]

    def run(count, together):
        whole = (tmp_path / "m" / "model.safetensors").read_bytes()
        assert asyncio.run(work(count, together)) == [whole[at : at + 1] for at in range(count)]

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


@pytest.fixture
def no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_the_environment_names_the_proxy(monkeypatch, no_proxy):
    url = URL("https://cdn.example/file")
    assert environment_proxy(url) is None
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert environment_proxy(url) == "http://127.0.0.1:9"
    assert environment_proxy(URL("http://cdn.example/file")) is None
    monkeypatch.setenv("ALL_PROXY", "socks5://user:secret@127.0.0.1:9")
    with pytest.raises(ScreeningError, match="expected an HTTP proxy for") as error:
        environment_proxy(URL("http://cdn.example/file"))
    assert "secret" not in str(error.value)
    monkeypatch.setenv("NO_PROXY", "cdn.example")
    assert environment_proxy(url) is None


@pytest.mark.parametrize(
    ("excluded", "url", "is_excluded"),
    [
        ("localhost:5710", "http://localhost:5710/x", True),
        ("localhost:5710", "http://localhost:5711/x", False),
        ("host.example:443", "https://host.example/x", True),
        ("127.0.0.0/8", "http://127.9.9.9/x", True),
        ("10.0.0.0/8, 192.168.0.0/16", "http://192.168.7.7:9000/x", True),
        ("10.0.0.0/8", "http://11.0.0.1/x", False),
        ("fd00::/8", "http://[fd00::1]/x", True),
        (".example", "http://host.example/x", True),
        ("*", "http://host.example/x", True),
        ("10.0.0.0/99,other", "http://10.0.0.1/x", False),
    ],
)
def test_no_proxy_knows_ports_and_blocks(monkeypatch, no_proxy, excluded, url, is_excluded):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", excluded)
    assert (environment_proxy(URL(url)) is None) == is_excluded


class Redirect:
    """An answer that leads elsewhere, as far as `Transport.redirect` looks at it."""

    def __init__(self, url, location):
        self.url, self.headers, self.status = URL(url), {"Location": location}, 302
        self.content = self

    async def readany(self):
        return b""


@pytest.mark.parametrize(
    ("source", "location", "refused"),
    [
        ("https://8.8.8.8/x", "http://8.8.8.8/x", "from https to http"),
        ("https://127.0.0.1/x", "http://127.0.0.1/x", "from https to http"),
        ("http://8.8.8.8/x", "http://169.254.169.254/latest", "private network"),
        ("https://8.8.8.8/x", "https://[fe80::1]/x", "private network"),
        ("https://8.8.8.8/x", "https://[::ffff:10.0.0.1]/x", "private network"),
        ("https://8.8.8.8/x", "https://10.1.2.3/x", "private network"),
        ("http://8.8.8.8/x", "http://localhost:9000/x", "private network"),
        ("http://8.8.8.8/x", "http://loopback.test/x", "private network"),
        ("http://127.0.0.1/x", "http://169.254.169.254/x", None),
        ("http://loopback.test/x", "http://10.0.0.1/x", None),
        ("http://8.8.8.8/x", "https://1.1.1.1/y", None),
        ("https://8.8.8.8/x", "/y", None),
    ],
)
def test_a_redirect_to_where_nobody_should_be_sent_is_refused(
    monkeypatch, no_proxy, source, location, refused
):
    async def work():
        async def named(host, port):
            assert host in ("loopback.test", "localhost")
            return [(0, 0, 0, "", ("127.0.0.1", 0))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", named)
        transport = Transport("https://hub.example", None, "test")
        try:
            return await transport.redirect(Redirect(source, location), Meter())
        finally:
            await transport.close()

    if refused is None:
        assert asyncio.run(work()) == URL(source).join(URL(location))
        return
    with pytest.raises(ScreeningError, match=refused) as error:
        asyncio.run(work())
    assert error.value.code == "BadResponse"


def test_every_request_goes_through_the_proxy(tmp_path, monkeypatch, no_proxy):
    """A proxy is asked with the whole address; nothing goes past it."""
    lines = []

    async def forward(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lines.append(head.split(b"\r\n")[0].decode())
        writer.write(b"HTTP/1.1 418 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work():
        async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
            async with Hub(endpoint="http://hub.invalid", offline=False, cache=tmp_path) as pool:
                with pytest.raises(ScreeningError) as error:
                    await pool.snapshot("org/m")
        return error.value.code

    assert asyncio.run(work()) == "ServerError"
    assert lines
    assert all(line.startswith("GET http://hub.invalid/") for line in lines)


def test_a_refused_connection_is_said_without_objects_of_python(tmp_path, no_proxy):
    async def work():
        async with Hub(endpoint="https://127.0.0.1:1", offline=False, cache=tmp_path) as pool:
            await pool.snapshot("org/m")

    with pytest.raises(ScreeningError, match=r"^the connection to 127\.0\.0\.1 failed") as error:
        asyncio.run(work())
    assert error.value.code == "Unreachable"
    assert "object at" not in str(error.value)


def test_waits_between_attempts_grow_and_stay_within_the_budget(monkeypatch):
    """0.25 s and more, twice as long each time; the last attempt's error is the one that is raised."""
    monkeypatch.setattr(http, "FIRST_WAIT", FIRST_WAIT)
    slept, attempts = [], []

    async def sleep(seconds):
        slept.append(seconds)

    async def fails():
        attempts.append(len(attempts) + 1)
        raise AgainError(ScreeningError("ServerError", f"attempt {len(attempts)}; try again"))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(ScreeningError, match="attempt 5"):
        asyncio.run(retried(fails, Budget(60)))
    assert [wait // (0.25 * 2**place) for place, wait in enumerate(slept)] == [1, 1, 1, 1]
    slept.clear()
    with pytest.raises(ScreeningError, match="attempt 8"):
        asyncio.run(retried(fails, Budget(1)))
    assert sum(slept) < 1.5
