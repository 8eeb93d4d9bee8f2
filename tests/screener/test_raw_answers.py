"""Ranges from a server that is no server: right bytes or a named error, whatever it sends."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.checkpoints import Cache, FileEntry, Meter, http, snapshots
from lmeval_screener.checkpoints.http import Transport
from lmeval_screener.checkpoints.limits import Account, Budget
from lmeval_screener.checkpoints.web import WebFile, WebSnapshot
from lmeval_screener.errors import ScreeningError
from yarl import URL

FILE = bytes(random.Random(0).randbytes(100_000))
CHUNKED, INTERIM = "Transfer-Encoding: chunked", b"HTTP/1.1 102 Processing\r\n\r\n"
#: What a step of a raw server does beside sending bytes.
RESET, CLOSE, HANG = "reset", "close", "hang"


def answer(begin, end, *fields, status="206 Partial Content", length=True, body=None):
    """A right answer to a range, as bytes, unless told otherwise."""
    body = FILE[begin:end] if body is None else body
    lines = [f"HTTP/1.1 {status}", f"Content-Range: bytes {begin}-{end - 1}/{len(FILE)}", *fields]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunked(body, size=97):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x;x=1\r\n%b\r\n" % (len(p), p) for p in pieces)
    return framed + b"0\r\nX-Trailer: 1\r\n\r\n"


class RawServer:
    """Does what `reply(number, begin, end)` says for each request: bytes to send and words from above."""

    def __init__(self, reply):
        self.reply = reply
        self.requests, self.connections, self._tasks = [], 0, []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = URL(f"http://127.0.0.1:{port}/file?signature=a%2Fb", encoded=True)
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _serve(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        self.connections += 1
        # A task that is cancelled ends in silence: asyncio's streams would report it.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                begin, last = head.partition("Range: bytes=")[2].partition("\r\n")[0].split("-")
                for step in self.reply(len(self.requests), int(begin), int(last) + 1):
                    if step == HANG:
                        await reader.read()
                    elif isinstance(step, float):
                        await asyncio.sleep(step)
                    elif isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    if step in (RESET, CLOSE, HANG):
                        return self._end(writer, reset=step == RESET)
        self._end(writer)

    def _end(self, writer, reset=False):
        if reset:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def ranges_of(url, spans, tmp_path, *, token=None, pause=0.0, timeout=30.0):
    """Each span of the file at an address, or the code of its error; and what it cost."""
    transport, meter, budget = Transport(str(url.origin()), token, "test"), Meter(), Budget(timeout)
    files = {"file": WebFile(url, FileEntry("file", len(FILE), None), None)}
    snapshot = WebSnapshot(transport, "m", files, Account(budget, meter), Cache(tmp_path))

    async def read():
        bodies = []
        for span in spans:
            try:
                bodies += await snapshot.ranges("file", [span])
            except ScreeningError as error:
                clear = "signature" not in str(error) and "\n" not in str(error)
                bodies.append(error.code if clear else "a secret, or several lines")
            await asyncio.sleep(pause)  # bytes that were sent too many are there in the loop's next round
        return bodies

    try:
        return await budget.bounded(read()), meter
    finally:
        await transport.close()


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads spans from a raw server; the bodies, the server, the meter."""
    monkeypatch.setattr(snapshots, "WHOLE", 1000)

    def run(reply, spans=SPANS, **how):
        async def work():
            async with RawServer(reply) as server:
                bodies, meter = await ranges_of(server.url, spans, tmp_path, **how)
                return bodies, server, meter

        return asyncio.run(work())

    return run


SPANS = [(0, 100), (5_000, 12_000), (40_000, 99_999), (7, 8)]
RIGHT = [FILE[a:b] for a, b in SPANS]


@pytest.mark.parametrize(
    ("reply", "connections"),
    [
        (lambda n, a, b: [answer(a, b)], 1),
        (lambda n, a, b: [answer(a, b, "Connection: close"), CLOSE], 4),
        (lambda n, a, b: [INTERIM, b"HTTP/1.1 100 Continue\r\n\r\n", answer(a, b)], 1),
        (lambda n, a, b: [answer(a, b, CHUNKED, length=False, body=chunked(FILE[a:b]))], 1),
        (lambda n, a, b: [answer(a, b, length=False), CLOSE], 4),
        (lambda n, a, b: [answer(a, b), CLOSE], 4),
        (lambda n, a, b: [answer(a, b) + b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\n\r\nx"], 4),
        (lambda n, a, b: [answer(a, b), 0.002, b"garbage"], 4),
        (lambda n, a, b: [answer(a, b).replace(b"HTTP/1.1", b"HTTP/1.0"), CLOSE], 4),
        (lambda n, a, b: [answer(a, b, *[f"X-{i}: {'y' * 200}" for i in range(100)])], 1),
    ],
    ids=["usual", "close", "interim", "chunked", "until close", "closed when idle",
         "bytes after the body", "bytes when idle", "HTTP/1.0", "long head"],
)  # fmt: skip
def test_whatever_is_right_gives_the_bytes(read, reply, connections):
    bodies, server, meter = read(reply, pause=0.05)
    assert bodies == RIGHT
    assert server.connections == connections
    assert meter.requests == len(SPANS)


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        (lambda a, b: [RESET], "Unreachable"),
        (lambda a, b: [answer(a, b)[:60], CLOSE], "Unreachable"),
        (lambda a, b: [answer(a, b)[: -(b - a)], CLOSE], "Unreachable"),
        (lambda a, b: [answer(a, b, length=False)[:-1], CLOSE], "BadResponse"),
        (lambda a, b: [answer(a + 1, b + 1)], "BadResponse"),
        (lambda a, b: [answer(a, b, body=FILE[a : b + 1])], "BadResponse"),
        (lambda a, b: [answer(a, b, "Content-Encoding: gzip", body=gzip.compress(FILE[a:b]))], "BadResponse"),
        (lambda a, b: [answer(a, b, "Content-Length: 5")], "Unreachable"),
        (lambda a, b: [answer(a, b, "Content-Range: bytes 1-2/3")], "BadResponse"),
        (lambda a, b: [answer(a, b, "X: a\x00b")], "Unreachable"),
        (lambda a, b: [b"<html>no HTTP at all</html>\r\n\r\n"], "Unreachable"),
        (lambda a, b: [answer(a, b, CHUNKED, length=False, body=b"zz\r\nab\r\n"), CLOSE], "Unreachable"),
        (lambda a, b: [answer(a, b, CHUNKED, length=False, body=chunked(FILE[a:b])[:-20]), CLOSE],
         "Unreachable"),
        (lambda a, b: [answer(a, b, status="503 No", body=b"x" * 200_000)], "ServerError"),
        (lambda a, b: [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + FILE], "RangeNotSupported"),
        (lambda a, b: [answer(a, b, "Content-Type: multipart/byteranges; boundary=x",
                              body=b"--x\r\n\r\n" + FILE[a:b] + b"--x--")], "BadResponse"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_asked_again_and_has_a_name(read, steps, code):
    """Nothing of a wrong answer is left behind for the next one over the connection's successor."""
    bodies, _, _ = read(lambda n, a, b: steps(a, b) if n == 2 else [answer(a, b)])
    assert bodies == RIGHT
    bodies, _, _ = read(lambda n, a, b: [answer(a, b)] if n < 2 else steps(a, b), [*SPANS[:2]])
    assert bodies == [RIGHT[0], code]


def test_silence_ends_an_answer_and_a_slow_one_does_not(read, monkeypatch):
    monkeypatch.setattr(http, "SILENCE", 0.25)
    for before in (b"", b"HTTP/1.1 206 OK\r\n", answer(0, 100)[:-50]):
        bodies, server, _ = read(
            lambda n, a, b, before=before: [before, HANG] if n == 1 else [
                0.15, answer(a, b)[:50], 0.15, answer(a, b)[50:]
            ],
            [(0, 100)],
        )  # fmt: skip
        assert bodies == [FILE[:100]]
        assert server.connections == 2


def test_the_request_is_what_was_asked_for(read):
    _, server, _ = read(lambda n, a, b: [answer(a, b)], SPANS[:1], token="hf_secret")
    first, *fields = server.requests[0].split("\r\n")
    assert first == "GET /file?signature=a%2Fb HTTP/1.1"
    assert {field.lower() for field in fields if field} == {
        f"host: 127.0.0.1:{server.url.port}", "user-agent: test", "accept: */*", "accept-encoding: identity",
        "authorization: bearer hf_secret", "range: bytes=0-99",
    }  # fmt: skip


@pytest.mark.parametrize("version", ['"a"\r\nX: y', '"a"\x00'])
def test_nothing_is_smuggled_into_a_request(version):
    async def work():
        async with RawServer(lambda n, a, b: [answer(a, b)]) as server:
            transport = Transport("https://hub.example", None, "test")
            with pytest.raises(ValueError, match="header"):
                async with await transport.request(
                    "GET", server.url, {"If-Match": version}, Account(Budget(9), Meter())
                ):
                    pass
            await transport.close()
            return server.requests

    assert asyncio.run(work()) == []


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_any_noise_in_place_of_an_answer_never_gives_other_bytes(tmp_path_factory, data):
    """Cut, garbled and lengthened answers to single attempts."""
    whole = bytearray(answer(0, 300))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 301), max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    more = data.draw(st.binary(max_size=20)) if cut == len(whole) else b""

    async def work():
        async with RawServer(lambda n, a, b: [bytes(whole[:cut]) + more, CLOSE]) as server:
            with contextlib.suppress(ScreeningError):  # a cut answer may also take all of the time
                bodies, _ = await ranges_of(server.url, [(0, 300)], tmp_path_factory.getbasetemp(), timeout=1)
                assert isinstance(bodies[0], str) or bodies[0] == FILE[:300]

    asyncio.run(work())
