"""Ranges from a server that is no server: right bytes or a named error, whatever it sends."""

from __future__ import annotations

import asyncio
import random

import pytest
from hub_client import within
from hub_wire import Loopback, Reply
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.checkpoints import http, web
from lmeval_screener.checkpoints.snapshot import FileEntry
from lmeval_screener.checkpoints.web import WebFile, WebSnapshot
from lmeval_screener.errors import ScreeningError
from yarl import URL

FILE = bytes(random.Random(0).randbytes(100_000))
CHUNKED = "Transfer-Encoding: chunked"
#: Steps of a raw server beside sending bytes; numbers are seconds of silence, IDLE lasts until the
#: client has the answer.
CLOSE, RESET, IDLE, HANG = "close", "reset", "idle", 60.0
SPANS = [(0, 100), (5_000, 12_000), (40_000, 99_999), (7, 8)]
RIGHT = [FILE[a:b] for a, b in SPANS]


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


class RawServer(Loopback):
    """Does what `steps(number, begin, end)` says for each request: bytes to send and words from above."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.taken, self.answered = steps, 0, 0

    def usual(self, request):
        begin, last = request.headers["range"].removeprefix("bytes=").split("-")
        raw = self.steps(len(self.requests) + 1, int(begin), int(last) + 1)
        end = raw[-1] if raw[-1] in (CLOSE, RESET) else None
        raw = [step for step in raw if step not in (CLOSE, RESET)]
        return Reply(0, raw=raw, cut=0 if end else None, reset=end == RESET)

    async def _send_raw(self, raw, writer):
        for step in raw:
            while step == IDLE and self.taken < len(self.requests):
                await asyncio.sleep(0.001)
            if step != IDLE:
                await super()._send_raw([step], writer)
        self.answered += 1

    def read(self, spans, cache, **how):
        """Each span of the file, or the code of its error; bytes too many come before the next request."""

        async def work(hub, account):
            url = URL(f"{self.endpoint}/file?signature=a%2Fb", encoded=True)
            files = {"file": WebFile(url, FileEntry("file", len(FILE), None), None)}
            snapshot = WebSnapshot("m", files, account, hub.online)
            bodies = []
            for span in spans:
                try:
                    bodies += await snapshot.ranges("file", [span])
                except ScreeningError as error:
                    clear = "signature" not in str(error) and "\n" not in str(error)
                    bodies.append(error.code if clear else "a secret, or several lines")
                self.taken = len(bodies)
                while self.answered < len(bodies):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.005)
            self.counted = hub.account.requests
            return bodies

        return within(work, cache, endpoint=self.endpoint, **how)


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads spans from a raw server; the bodies, and the server."""
    monkeypatch.setattr(web, "WHOLE", 1000)

    def run(steps, spans=SPANS, **how):
        with RawServer(steps) as server:
            return server.read(spans, tmp_path, **how), server

    return run


#: Right answers, and the connections that four of them take.
ANSWERS = {
    "usual": (lambda a, b: [answer(a, b)], 1),
    "close": (lambda a, b: [answer(a, b, "Connection: close"), CLOSE], 4),
    "chunked": (lambda a, b: [answer(a, b, CHUNKED, length=False, body=chunked(FILE[a:b]))], 1),
    "bytes after the body": (lambda a, b: [answer(a, b) + b"HTTP/1.1 206 OK\r\n\r\nx"], 4),
    "bytes when idle": (lambda a, b: [answer(a, b), IDLE, b"garbage"], 4),
    "long head": (lambda a, b: [answer(a, b, *[f"X-{i}: {'y' * 200}" for i in range(100)])], 1),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_is_right_gives_the_bytes(read, name):
    steps, connections = ANSWERS[name]
    bodies, server = read(lambda number, a, b: steps(a, b))
    assert bodies == RIGHT
    assert server.connections[0] == connections
    assert server.counted == len(server.requests) == len(SPANS)


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        (lambda a, b: [RESET], "Unreachable"),
        (lambda a, b: [answer(a, b)[:60], CLOSE], "Unreachable"),
        (lambda a, b: [answer(a, b, length=False)[:-1], CLOSE], "BadResponse"),
        (lambda a, b: [answer(a, b, "Content-Length: 5")], "Unreachable"),
        (lambda a, b: [answer(a, b, "Content-Range: bytes 1-2/3")], "BadResponse"),
        (lambda a, b: [answer(a, b, "X: a\x00b")], "Unreachable"),
        (lambda a, b: [b"<html>no HTTP at all</html>\r\n\r\n"], "Unreachable"),
        (
            lambda a, b: [answer(a, b, CHUNKED, length=False, body=b"zz\r\nab\r\n"), CLOSE],
            "Unreachable",
        ),
        (
            lambda a, b: [
                answer(a, b, CHUNKED, length=False, body=chunked(FILE[a:b])[:-20]),
                CLOSE,
            ],
            "Unreachable",
        ),
        (lambda a, b: [answer(a, b, status="503 No", body=b"x" * 200_000)], "ServerError"),
        (
            lambda a, b: [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + FILE],
            "RangeNotSupported",
        ),
    ],
)
def test_whatever_is_wrong_is_asked_again_and_has_a_name(read, steps, code):
    """Nothing of a wrong answer is left behind for the next one over the connection's successor."""
    bodies, _ = read(lambda n, a, b: steps(a, b) if n == 2 else [answer(a, b)])
    assert bodies == RIGHT
    bodies, _ = read(lambda n, a, b: [answer(a, b)] if n < 2 else steps(a, b), [*SPANS[:2]])
    assert bodies == [RIGHT[0], code]


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 206 OK\r\n", answer(0, 100)[:-50]])
def test_silence_ends_an_answer_and_a_slow_one_does_not(read, monkeypatch, before):
    monkeypatch.setattr(http, "SILENCE", 0.25)

    def steps(number, begin, end):
        whole = answer(begin, end)
        return [before, HANG] if number == 1 else [0.15, whole[:50], 0.15, whole[50:]]

    bodies, server = read(steps, [(0, 100)])
    assert bodies == [FILE[:100]]
    assert server.connections[0] == 2


def test_the_request_is_what_was_asked_for(read):
    _, server = read(lambda n, a, b: [answer(a, b)], SPANS[:1], token="hf_secret")
    (request,) = server.requests
    assert (request.method, request.target) == ("GET", "/file?signature=a%2Fb")
    assert request.headers.pop("user-agent").startswith("screen-checkpoints/")
    assert request.headers == {
        "host": server.endpoint.removeprefix("http://"),
        "accept": "*/*",
        "accept-encoding": "identity",
        "authorization": "Bearer hf_secret",
        "range": "bytes=0-99",
    }


@pytest.mark.parametrize("version", ['"a"\r\nX: y', '"a"\x00'])
def test_nothing_is_smuggled_into_a_request(tmp_path, version):
    async def work(hub, account):
        async with await hub.transport.request(
            "GET", URL(hub.endpoint), {"If-Match": version}, account
        ):
            pass

    with RawServer(None) as server:
        with pytest.raises(ValueError, match="header"):
            within(work, tmp_path, endpoint=server.endpoint)
        assert not server.requests


@given(st.data())
@settings(max_examples=30)
def test_any_noise_in_place_of_an_answer_never_gives_other_bytes(tmp_path_factory, data):
    """Cut, garbled and lengthened answers to single attempts; a cut one may also take all of the time."""
    whole = bytearray(answer(0, 300))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 301), max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    more = data.draw(st.binary(max_size=20)) if cut == len(whole) else b""
    with RawServer(lambda n, a, b: [bytes(whole[:cut]) + more, CLOSE]) as server:
        try:
            (body,) = server.read([(0, 300)], tmp_path_factory.getbasetemp(), timeout=1)
        except ScreeningError:
            return
        assert isinstance(body, str) or body == FILE[:300]
