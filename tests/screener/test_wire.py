"""Ranges over our own connections: right bytes or a named error, whatever a server sends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gzip
import ipaddress
import itertools
import random
import socket
import ssl
import struct

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from lmeval_screener.checkpoints import http
from lmeval_screener.checkpoints.http import AgainError, Budget, Transport
from lmeval_screener.checkpoints.hub_responses import range_problem
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.checkpoints.wire import (
    MOST_HEAD,
    BrokenAnswerError,
    Connection,
    parse_head,
    request_bytes,
    request_start,
)
from yarl import URL

FILE = bytes(random.Random(0).randbytes(100_000))
CHUNKED, INTERIM = "Transfer-Encoding: chunked", b"HTTP/1.1 102 Processing\r\n\r\n"
#: What a step of a raw server does beside sending bytes.
RESET, CLOSE, HANG, IDLE_CLOSE = "reset", "close", "hang", "close when idle"


def answer(begin, end, *fields, status="206 Partial Content", length=True, body=None):
    """A right answer to a range, as bytes, unless told otherwise."""
    body = FILE[begin:end] if body is None else body
    lines = [f"HTTP/1.1 {status}", f"Content-Range: bytes {begin}-{end - 1}/{len(FILE)}", *fields]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def chunked(body, size=700, extension=""):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension.encode(), p) for p in pieces)
    return framed + b"0\r\nX-Trailer: 1\r\n\r\n"


class RawServer:
    """Does what `reply(number, begin, end)` says for each request: bytes to send and words from above."""

    def __init__(self, reply, tls=None):
        self.reply, self.tls = reply, tls
        self.requests, self.connections, self.busy, self._tasks = [], 0, set(), []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = URL(
            f"{'https' if self.tls else 'http'}://127.0.0.1:{port}/file?signature=a%2Fb", encoded=True
        )
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _serve(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        try:
            await self._served(reader, writer)
        except asyncio.CancelledError:
            pass  # asyncio's streams would report it
        finally:
            self.busy.discard(writer)
            writer.transport.abort()

    async def _served(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.requests.append(head)
                self.busy.add(writer)
                begin, last = head.partition("Range: bytes=")[2].partition("\r\n")[0].split("-")
                for step in self.reply(len(self.requests), int(begin), int(last) + 1):
                    if step == RESET:
                        sock = writer.get_extra_info("socket")
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                        return
                    if step in (CLOSE, IDLE_CLOSE):
                        writer.close()
                        return
                    if step == HANG:
                        self.busy.discard(writer)
                        await reader.read()
                        return
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                        continue
                    writer.write(step)
                    await writer.drain()
                self.busy.discard(writer)


async def asked(transport, url, begin, end, meter, whole=0):
    """Bytes of one attempt, believed as a snapshot does."""
    headers = {"Range": f"bytes={begin}-{end - 1}"}
    route, budget = transport.route(url), Budget(30)
    async with transport.ranged(route, headers, meter, budget, end - begin, whole) as response:
        transport.raise_if_passing(response)
        if response.status == 206 and (
            problem := range_problem(response.headers, begin, end, len(FILE), None)
        ):
            raise ValueError(problem)
        body = b"".join([piece async for piece in http.unpacked(response, meter)])
        if response.status == 206 and len(body) != end - begin:
            raise ValueError("wrong length")
        return response.status, body


def read(reply, spans, *, tls=None, token=None, silence=15.0, monkeypatch=None):
    """What comes of each span, read one after the other: bytes, or the error; and the server."""

    async def work():
        async with RawServer(reply, tls) as server:
            transport, meter = Transport(str(server.url.origin()), token, "test"), Meter()
            found = []
            try:
                for begin, end in spans:
                    try:
                        status, body = await asked(transport, server.url, begin, end, meter)
                        found.append(body if status == 206 else status)
                    except (AgainError, ValueError) as error:
                        found.append(error)
                    while server.busy:
                        await asyncio.sleep(0)
                    await asyncio.sleep(0.01)  # what was sent is there in the loop's next round
            finally:
                await transport.close()
            return found, server, meter

    if monkeypatch is not None:
        monkeypatch.setattr(http, "SILENCE", silence)
    return asyncio.run(work())


SPANS = [(0, 100), (5_000, 12_000), (40_000, 99_999), (7, 8)]
RIGHT = [FILE[a:b] for a, b in SPANS]


@pytest.mark.parametrize(
    ("reply", "connections"),
    [
        (lambda n, a, b: [answer(a, b)], 1),
        (lambda n, a, b: [answer(a, b, "Connection: close"), CLOSE], 4),
        (lambda n, a, b: [INTERIM, b"HTTP/1.1 100 Continue\r\n\r\n", answer(a, b)], 1),
        (lambda n, a, b: [answer(a, b, CHUNKED, length=False, body=chunked(FILE[a:b]))], 1),
        (
            lambda n, a, b: [
                answer(a, b, "Transfer-Encoding: Chunked", length=False, body=chunked(FILE[a:b], 97, ";x=1"))
            ],
            1,
        ),
        (lambda n, a, b: [answer(a, b, length=False), CLOSE], 4),
        (lambda n, a, b: [answer(a, b), IDLE_CLOSE], 4),
        (lambda n, a, b: [answer(a, b) + b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\n\r\nx"], 4),
        (lambda n, a, b: [answer(a, b), 0.002, b"garbage"], 4),
        (lambda n, a, b: [answer(a, b).replace(b"HTTP/1.1", b"HTTP/1.0"), CLOSE], 4),
        (lambda n, a, b: [answer(a, b, *[f"X-{i}: {'y' * 200}" for i in range(100)])], 1),
    ],
    ids=["usual", "close", "interim", "chunked", "extensions", "until close", "closed when idle",
         "bytes after the body", "bytes when idle", "HTTP/1.0", "long head"],
)  # fmt: skip
def test_whatever_is_right_gives_the_bytes(reply, connections):
    found, server, meter = read(reply, SPANS)
    assert found == RIGHT
    assert server.connections == connections
    assert meter.requests == len(SPANS)


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        (lambda a, b: [RESET], AgainError, "connection"),
        (lambda a, b: [CLOSE], AgainError, "before the answer's end"),
        (lambda a, b: [answer(a, b)[:60], CLOSE], AgainError, "before the answer's end"),
        (lambda a, b: [answer(a, b)[:-1], RESET], AgainError, "connection"),
        (lambda a, b: [answer(a, b)[:-1], CLOSE], AgainError, "before the answer's end"),
        (lambda a, b: [answer(a, b, length=False)[:-1], CLOSE], ValueError, "wrong length"),
        (lambda a, b: [answer(a + 1, b + 1)], ValueError, "Content-Range"),
        (lambda a, b: [answer(a, b, body=FILE[a : b + 1])], ValueError, "Content-Length"),
        (lambda a, b: [answer(a, b, "Content-Encoding: gzip", body=gzip.compress(FILE[a:b]))],
         ValueError, "Content-"),
        (lambda a, b: [answer(a, b, "Content-Length: 5")], AgainError, "two different content-length"),
        (lambda a, b: [answer(a, b, "Content-Range: bytes 1-2/3")], AgainError, "different content-range"),
        (lambda a, b: [answer(a, b, CHUNKED)], AgainError, "where its body ends"),
        (lambda a, b: [answer(a, b, "Transfer-Encoding: x", length=False)], AgainError, "its body ends"),
        (lambda a, b: [answer(a, b, "Content-Length: -1", length=False)], AgainError, "no number"),
        (lambda a, b: [answer(a, b, "X: a\rb")], AgainError, "does not begin"),
        (lambda a, b: [answer(a, b, "X: a\x00b")], AgainError, "does not begin"),
        (lambda a, b: [answer(a, b, " folded: x")], AgainError, "does not begin"),
        (lambda a, b: [b"<html>no HTTP at all</html>\r\n\r\n"], AgainError, "does not begin"),
        (lambda a, b: [b"HTTP/1.1 101 Switching Protocols\r\n\r\n"], AgainError, "protocol"),
        (lambda a, b: [answer(a, b, *[f"X-{i}: {'y' * 1000}" for i in range(70)])], AgainError, "head"),
        (lambda a, b: [b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" * 5000, HANG], AgainError, "head"),
        (lambda a, b: [b"HTTP/1.1 206 OK\r\nX: " + b"y" * (MOST_HEAD + 1), HANG], AgainError, "head"),
        (lambda a, b: [answer(a, b, CHUNKED, length=False, body=b"zz\r\nab\r\n"), HANG],
         AgainError, "framed"),
        (lambda a, b: [answer(a, b, CHUNKED, length=False, body=b"2\r\nabcd\r\n"), HANG],
         AgainError, "longer than it says"),
        (lambda a, b: [answer(a, b, CHUNKED, length=False,
                              body=chunked(FILE[a:b])[:-20]), CLOSE], AgainError, "before the answer's end"),
        (lambda a, b: [answer(a, b, CHUNKED, length=False,
                              body=b"1;" + b"x" * 5000), HANG], AgainError, "framed"),
        (lambda a, b: [answer(a, b, status="429 Too Many Requests", body=b"wait")], AgainError, "429"),
        (lambda a, b: [answer(a, b, status="503 No", body=b"x" * 200_000)], AgainError, "503"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_has_a_name_and_the_next_answer_is_right(steps, error, words):
    """Also over the connection's successor: nothing of the wrong answer is left behind."""
    found, server, _ = read(lambda n, a, b: steps(a, b) if n == 2 else [answer(a, b)], SPANS)
    assert [found[0], *found[2:]] == [RIGHT[0], *RIGHT[2:]]
    # A server that says nothing at all over a used connection is asked once more: see below.
    if found[1] != RIGHT[1]:
        assert isinstance(found[1], error)
        assert words in str(found[1])
        assert server.connections == 2
    else:
        assert steps(0, 1)[0] in (RESET, CLOSE)


def test_a_used_connection_that_says_nothing_is_replaced_once():
    """Not twice: a new connection that says nothing is an error, and the request is not sent a third time."""
    found, server, meter = read(lambda n, a, b: [CLOSE] if n == 2 else [answer(a, b)], SPANS)
    assert found == RIGHT
    assert (server.connections, len(server.requests), meter.requests) == (2, 5, 4)
    found, server, _ = read(lambda n, a, b: [CLOSE] if n in (2, 3) else [answer(a, b)], SPANS[:2])
    assert isinstance(found[1], AgainError)
    assert len(server.requests) == 3
    found, server, _ = read(lambda n, a, b: [CLOSE], SPANS[:1])
    assert isinstance(found[0], AgainError)
    assert len(server.requests) == 1


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 206 OK\r\n", answer(0, 100)[:-50]])
def test_silence_ends_an_answer_and_a_slow_one_does_not(before, monkeypatch):
    found, server, _ = read(
        lambda n, a, b: [before, HANG] if n == 1 else [0.15, answer(a, b)[:50], 0.15, answer(a, b)[50:]],
        [(0, 100), (0, 100)], silence=0.25, monkeypatch=monkeypatch,
    )  # fmt: skip
    assert isinstance(found[0], AgainError)
    assert "not a byte for 0.25 s" in str(found[0])
    assert found[1] == FILE[:100]
    assert server.connections == 2


def test_a_cancelled_read_leaves_no_connection_behind():
    async def work():
        async with RawServer(lambda n, a, b: [HANG] if n == 1 else [answer(a, b)]) as server:
            transport, meter = Transport(str(server.url.origin()), None, "test"), Meter()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asked(transport, server.url, 0, 100, meter), 0.1)
            body = (await asked(transport, server.url, 100, 200, meter))[1]
            await transport.close()
            return body, server.connections

    assert asyncio.run(work()) == (FILE[100:200], 2)


def test_a_whole_file_is_taken_as_far_as_it_is_wanted():
    async def work(whole):
        reply = [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + FILE]
        async with RawServer(lambda n, a, b: reply) as server:
            transport, meter = Transport(str(server.url.origin()), None, "test"), Meter()
            found = await asked(transport, server.url, 0, 10, meter, whole)
            await transport.close()
            return found, meter.bytes_read

    assert asyncio.run(work(100_000)) == ((200, FILE), 100_000)
    assert asyncio.run(work(0)) == ((200, FILE[:1]), 1)


def test_the_request_is_what_was_asked_for_and_the_token_is_the_hubs_only():
    _, server, _ = read(lambda n, a, b: [answer(a, b)], SPANS[:1], token="hf_secret")
    host = f"127.0.0.1:{server.url.port}"
    assert server.requests == [
        f"GET /file?signature=a%2Fb HTTP/1.1\r\nHost: {host}\r\nUser-Agent: test\r\nAccept: */*\r\n"
        "Accept-Encoding: identity\r\nAuthorization: Bearer hf_secret\r\nRange: bytes=0-99\r\n\r\n"
    ]

    async def elsewhere():
        async with RawServer(lambda n, a, b: [answer(a, b)]) as server:
            transport = Transport("https://hub.example", "hf_secret", "test")
            await asked(transport, server.url, 0, 100, Meter())
            await transport.close()
            return server.requests[0]

    assert "Authorization" not in asyncio.run(elsewhere())


def test_nothing_is_smuggled_into_a_request():
    start = request_start(URL("http://host/a"), {})
    assert start is not None
    assert request_bytes(start, {"If-Match": '"a"\r\nX: y'}) is None
    assert request_bytes(start, {"If-Match": '"\xe4"'}) is None
    assert request_start(URL("http://host/a b\r\nX: y", encoded=True), {}) is None


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of our own for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    place = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    place.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return place


def test_tls_is_spoken_and_a_certificate_that_nobody_vouches_for_is_refused(certificate, monkeypatch):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    known = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(http, "_tls_context", lambda: known)
    found, server, _ = read(lambda n, a, b: [answer(a, b)], SPANS, tls=tls)
    assert found == RIGHT
    assert server.connections == 1
    found, _, _ = read(
        lambda n, a, b: [answer(a, b)[:-9], CLOSE] if n == 2 else [answer(a, b)], SPANS, tls=tls
    )
    assert [found[0], *found[2:]] == [RIGHT[0], *RIGHT[2:]]
    assert isinstance(found[1], AgainError)
    monkeypatch.setattr(http, "_tls_context", ssl.create_default_context)
    found, server, _ = read(lambda n, a, b: [answer(a, b)], SPANS[:1], tls=tls)
    assert isinstance(found[0], AgainError)
    assert "CERTIFICATE_VERIFY_FAILED" in str(found[0])
    assert not server.requests


# --- the protocol by itself -------------------------------------------------------------------------------


class Told(asyncio.Transport):
    """A transport that sends nowhere."""

    def __init__(self):
        super().__init__()
        self.aborted = False

    def write(self, data):
        pass

    def abort(self):
        self.aborted = True


def fed(pieces, wanted=7_000, whole=0):
    """What a connection makes of an answer in these pieces: status, fields and body, or the error."""

    async def work():
        connection, transport = Connection(asyncio.get_running_loop(), 10.0), Told()
        connection.connection_made(transport)
        waiter = connection.ask(b"", wanted, whole)
        for piece in pieces:
            while piece and not transport.aborted:
                # As the loop does: no more than there is room for.
                room = connection.get_buffer(-1)
                taken = min(len(room), len(piece))
                room[:taken] = piece[:taken]
                connection.buffer_updated(taken)
                piece = piece[taken:]
        if not waiter.done():
            connection.connection_lost(None)
        connection.abort()
        try:
            reply = await waiter
        except BrokenAnswerError as error:
            return str(error)
        return reply.status, dict(reply.headers), reply.body, str(reply.trouble or "")

    return asyncio.run(work())


ANSWERS = [
    answer(0, 7_000),
    answer(0, 7_000, CHUNKED, length=False, body=chunked(FILE[:7_000], 999, ";a")),
    b"HTTP/1.1 102 Processing\r\n\r\n" + answer(0, 7_000, "X: y"),
    answer(0, 7_000, length=False),
    answer(0, 7_000)[:-10],
    answer(0, 40_000),
    answer(0, 7_000, CHUNKED, length=False, body=chunked(FILE[:9_000])),
    answer(0, 7_000, CHUNKED, length=False, body=b"3\r\nabcd\r\n"),
    b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/2 200 OK\r\n\r\n",
]


@given(st.sampled_from(range(len(ANSWERS))), st.lists(st.integers(0, 41_000), max_size=30))
@settings(deadline=None, max_examples=120)
def test_where_an_answer_is_cut_makes_no_difference(which, cuts):
    whole = ANSWERS[which]
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    assert fed(pieces) == fed([whole])


def test_answers_byte_by_byte():
    for whole in (ANSWERS[0], ANSWERS[1], ANSWERS[2]):
        found = fed([whole[at : at + 1] for at in range(len(whole))])
        assert found[0] == 206
        assert found[2:] == (FILE[:7_000], "")


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_what_is_no_head_is_refused_by_name(noise):
    with contextlib.suppress(BrokenAnswerError):
        parse_head(b"HTTP/1.1 206 OK\r\n" + noise + b"\r\n\r\n")
    with contextlib.suppress(BrokenAnswerError):
        parse_head(noise)


def test_fields_of_a_head():
    status, stays, headers = parse_head(b'HTTP/1.1 206\r\nETag: "a"\r\nx-a:  b \r\nX-A: c\r\nEmpty:\r\n\r\n')
    assert (status, stays) == (206, True)
    assert headers["etag"] == headers.get("ETag") == '"a"'
    assert headers["X-A"] == "b"
    assert "EMPTY" in headers
    assert headers.get("missing", "x") == "x"


# --- many ranges at once ------------------------------------------------------------------------------------

MANY = [(at * 2_000, at * 2_000 + 700 + at) for at in range(48)]


def batched(reply, *, slots=8, more=0):
    """What a batch makes of `MANY`: its bodies, what it leaves over by place, the server, and the meter.

    Afterwards everything must be free again: slots, the quota, and connections for a batch that is right.
    """

    def fits(response, begin, end):
        right = response.status == 206 and response.trouble is None and len(response.body) == end - begin
        return right and range_problem(response.headers, begin, end, len(FILE), None) is None

    async def one(transport, url, meter):
        batch = transport.batch(transport.route(url), {}, meter, MANY, 0, fits)
        try:
            await batch.settled()
            while batch._flying or batch._opening:
                await asyncio.sleep(0.001)
            return batch.bodies, dict(batch.left)
        finally:
            batch.close()

    async def work():
        async with RawServer(reply) as server:
            transport, meter = Transport("https://hub.example", None, "test"), Meter()
            found = await asyncio.gather(*(one(transport, server.url, meter) for _ in range(1 + more)))
            route = transport.route(server.url)
            assert route.slots._free == slots
            assert route.bucket._flying == 0
            await transport.close()
            return found, server, meter

    return asyncio.run(work())


def test_batches_share_the_slots_of_a_host(monkeypatch):
    """Three side by side: every body in its place, and never more requests at a time than there are slots."""
    monkeypatch.setattr(http, "CONNECTIONS", 8)
    busy = [0, 0]

    def reply(number, begin, end):
        busy[0] += 1
        busy[1] = max(busy)
        yield 0.002
        busy[0] -= 1
        yield answer(begin, end)

    found, server, meter = batched(reply, more=2)
    for bodies, left in found:
        assert bodies == [FILE[a:b] for a, b in MANY]
        assert not left
    assert busy[1] <= 8
    assert server.connections <= 8
    assert meter.requests == len(server.requests) == 3 * len(MANY)
    assert meter.bytes_read == 3 * sum(b - a for a, b in MANY)


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (lambda a, b: [answer(a, b, status="429 Too Many Requests", body=b"wait")], 429),
        (lambda a, b: [answer(a, b, status="302 Found", body=b"")[:-2] + b"Location: /x\r\n\r\n"], 302),
        (lambda a, b: [answer(a + 1, b + 1)], 206),
        (lambda a, b: [answer(a, b)[:-1], CLOSE], 206),
        (lambda a, b: [answer(a, b, "Content-Encoding: gzip", body=gzip.compress(FILE[a:b]))], 206),
        (lambda a, b: [answer(a, b, "Content-Type: text/html")], 206),
        (lambda a, b: [b"<html>no HTTP at all</html>\r\n\r\n"], BrokenAnswerError),
        (lambda a, b: [RESET], None),
        (lambda a, b: [CLOSE], None),
    ],
)
def test_a_batch_leaves_over_what_is_odd_with_the_answer_that_came(odd, kind, monkeypatch):
    monkeypatch.setattr(http, "CONNECTIONS", 8)
    ((bodies, left),), server, meter = batched(lambda n, a, b: odd(a, b) if n == 20 else [answer(a, b)])
    place = next(
        at for at, (a, b) in enumerate(MANY) if f"bytes={a}-{b - 1}\r" in server.requests[19]
    )  # the twentieth request
    assert place in left
    for at, (a, b) in enumerate(MANY):
        assert (bodies[at] == FILE[a:b]) != (at in left)  # each is there or left over, and never both
    assert [at for at, came in left.items() if came is not None] == ([] if kind is None else [place])
    assert len(left) >= 10  # nothing new was sent
    came = left[place]
    if isinstance(kind, int):
        assert came._outcome.status == kind
    elif kind is not None:
        assert isinstance(came._outcome, kind)
    assert len(server.requests) == meter.requests + (kind is None)


def test_a_closed_batch_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(http, "CONNECTIONS", 8)

    async def work():
        async with RawServer(lambda n, a, b: [HANG] if n <= 8 else [answer(a, b)]) as server:
            transport, meter = Transport("https://hub.example", None, "test"), Meter()
            route = transport.route(server.url)
            batch = transport.batch(route, {}, meter, MANY, 0, lambda *_: True)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(batch.settled(), 0.2)
            batch.close()
            assert (route.slots._free, route.bucket._flying, len(batch.left)) == (8, 0, len(MANY) - 8)
            opening = transport.batch(route, {}, meter, MANY, 0, lambda *_: True)
            opening.close()  # before any connection is open
            assert (route.slots._free, route.bucket._flying) == (8, 0)
            body = (await asked(transport, server.url, 100, 200, meter))[1]
            await transport.close()
            return body

    assert asyncio.run(work()) == FILE[100:200]


def test_a_batch_leaves_all_over_where_the_quota_has_no_room():
    async def work():
        async with RawServer(lambda n, a, b: [answer(a, b, 'RateLimit: "x";r=9;t=60')]) as server:
            transport, meter = Transport("https://hub.example", None, "test"), Meter()
            route = transport.route(server.url)
            await asked(transport, server.url, 0, 100, meter)
            batch = transport.batch(route, {}, meter, MANY, 0, lambda *_: True)
            await batch.settled()
            while batch._flying or batch._opening:
                await asyncio.sleep(0.001)
            batch.close()
            await transport.close()
            return len(batch.left), len(server.requests)

    assert asyncio.run(work()) == (len(MANY) - 9, 10)
