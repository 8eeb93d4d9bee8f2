"""Ranged reads over HTTP/1.1 as cheaply as they can be made: no more than that is spoken here.

A screening makes about a hundred small ranged reads a checkpoint. Here one is a single write, and as a rule
a single read: a head that is parsed strictly, and a body that is counted. Everything else (redirects, quotas,
what may be believed, what is tried again) is decided by those who ask, and proxies are left to aiohttp.

A connection carries one request at a time, and after anything odd it is closed, not used again.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from yarl import URL

#: Bytes that heads may have, those of interim answers together with the final one.
MOST_HEAD = 65_536
#: Bytes that are read of a body that is neither what was asked for nor a whole file.
MOST_OTHER = 65_536
#: Seconds that a connection may lie idle before it is used again.
IDLE = 30.0
#: Seconds for which addresses of a name are believed, and after which a silent one is left for the next.
_NAMED, _NEXT_ADDRESS = 30.0, 2.0
#: Bytes of one read: a head and a row of most models.
_READ = 16_384

_TARGET = re.compile(r"/[!-~]*")
_VALUE = re.compile(r"[ -~]*")
_HEAD = re.compile(
    rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [\t -~\x80-\xff]*)?\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*\r\n)*)\r\n"
)
_LENGTH = re.compile(r"[0-9]{1,15}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[\t -~\x80-\xff]*)?")
#: Headers that say what a body is: two of them are a contradiction.
_ONCE = frozenset(
    ("content-length", "content-range", "content-encoding", "transfer-encoding", "etag", "location")
)


class BrokenAnswerError(ConnectionError):
    """What came is no answer in HTTP/1.1, or it broke off."""


class Headers(dict[str, str]):
    """Fields of an answer, looked up without regard to case; the keys are in lower case."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or something else where it is missing."""
        return super().get(name.lower(), default)


class Reply:
    """An answer, read to its end or as far as it was wanted or came.

    Attributes:
        status: As it was sent.
        headers: Likewise.
        url: What was asked.
        body: What came of the body, at most one byte more than was wanted.
        trouble: Why no more came; None where the body is whole, or more than was wanted.
        connection: What it came over.
    """

    __slots__ = ("body", "connection", "headers", "status", "trouble", "url")

    def __init__(self, status: int, headers: Headers, connection: Connection) -> None:
        self.status, self.headers, self.connection = status, headers, connection
        self.url: URL
        self.body = b""
        self.trouble: Exception | None = None

    @property
    def content(self) -> Reply:
        """What can be read piece by piece."""
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        """What came, then the reason why no more did.

        Raises:
            OSError: The body broke off.
        """
        if self.body:
            yield self.body
        if self.trouble is not None:
            raise self.trouble


def parse_head(head: bytes | bytearray) -> tuple[int, bool, Headers]:
    """Status, whether the connection stays open, and fields of a head that ends with its empty line.

    Raises:
        BrokenAnswerError: It is not one of HTTP/1.1 or 1.0, or contradicts itself.
    """
    if (match := _HEAD.fullmatch(head)) is None:
        raise BrokenAnswerError("the answer does not begin as one of HTTP/1.1 does")
    headers = Headers()
    for line in match[3].decode("utf-8", "surrogateescape").split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if dict.setdefault(headers, name, value) != value and name in _ONCE:
            raise BrokenAnswerError(f"the answer has two different {name}")
    stays = match[1] == b"1" and "close" not in dict.get(headers, "connection", "").lower()
    return int(match[2]), stays, headers


#: Told what came of a request: an answer, or why there is none.
Answered = Callable[[Reply | Exception], None]


class _Chunks:
    """A body in chunks: what is fed is framing, what comes out is the body."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._left = 0  # of a chunk, with the line end behind it
        self._trailing = False
        self._framing = 0
        self.ended = False

    def feed(self, data: bytes | memoryview, body: bytearray) -> bool:
        """Append to a body what is of it; whether something is left behind its end."""
        at, end = 0, len(data)
        while at < end and not self.ended:
            if self._left > 2:
                taken = min(end - at, self._left - 2)
                body += data[at : at + taken]
                self._left -= taken
                at += taken
                continue
            self._framing += 1
            self._line.append(data[at])
            at += 1
            if self._line.endswith(b"\n"):
                self._framed(bytes(self._line))
                self._line.clear()
            elif len(self._line) > 1024 or (self._trailing and self._framing > MOST_HEAD):
                raise BrokenAnswerError("the body's chunks are not framed as those of HTTP/1.1 are")
        return at < end

    def _framed(self, line: bytes) -> None:
        """Understand one line between chunks."""
        if not line.endswith(b"\r\n"):
            raise BrokenAnswerError("the body's chunks are not framed as those of HTTP/1.1 are")
        if self._left:
            if line != b"\r\n":
                raise BrokenAnswerError("a chunk of the body is longer than it says")
            self._left = 0
        elif self._trailing:
            self.ended = line == b"\r\n"
        else:
            match = _CHUNK.fullmatch(line[:-2])
            if match is None:
                raise BrokenAnswerError("the body's chunks are not framed as those of HTTP/1.1 are")
            size = int(match[1], 16)
            self._left, self._trailing, self._framing = (size + 2, False, 0) if size else (0, True, 0)


class Connection(asyncio.BufferedProtocol):
    """One connection, which answers one request at a time.

    Args:
        loop: Of the pool.
        silence: Seconds without a byte after which an answer is given up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, silence: float) -> None:
        self._loop, self._silence = loop, silence
        self._scratch = memoryview(bytearray(_READ))
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answered: Answered | None = None  # who waits for an answer
        self._moved = 0.0  # when the last byte came or went
        self._head = bytearray()
        self._heard = 0
        self._reply: Reply | None = None
        self._body = bytearray()
        self._counted = False  # whether the answer says how long its body is
        self._view: memoryview | None = None
        self._at = self._take = 0
        self._chunks: _Chunks | None = None
        self._wanted, self._whole = 0, 0
        self._stays = True
        #: Answers so far.
        self.served = 0
        #: Whether it can be used once more.
        self.usable = False

    # --- what a pool says ---------------------------------------------------------------------------------

    def rested(self) -> bool:
        """Whether it can be used once more, and has not been idle for long."""
        return self.usable and self._loop.time() - self._moved < IDLE

    def ask(self, request: bytes, wanted: int, whole: int) -> asyncio.Future[Reply]:
        """Send a request; the answer to come. See `send`."""
        waiter: asyncio.Future[Reply] = self._loop.create_future()

        def answered(outcome: Reply | Exception) -> None:
            if waiter.done():
                return
            if isinstance(outcome, Exception):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)

        self.send(request, wanted, whole, answered)
        return waiter

    def send(self, request: bytes, wanted: int, whole: int, answered: Answered) -> None:
        """Send a request.

        Args:
            request: All of it.
            wanted: Bytes of the range.
            whole: Bytes that are taken of an answer with the whole file.
            answered: Called once with what comes of it, unless the connection is closed by `abort` before.
        """
        assert self._transport is not None
        self.usable, self._stays = False, True
        self._wanted, self._whole = wanted, whole
        self._heard = 0
        self._answered = answered
        self._moved = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence, self._look)
        self._transport.write(request)

    def abort(self) -> None:
        """Close it at once."""
        self.usable = False
        self._answered = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    # --- what the loop says -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.usable = True
        self._moved = self._loop.time()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: into the body, as far as it is known; one place more than it has."""
        return self._scratch if self._view is None else self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        self._moved = self._loop.time()
        if self._answered is None:
            # Nothing was asked: whatever this is, it would be taken for the next answer.
            self.abort()
        elif self._view is not None:
            self._at += nbytes
            if self._at >= self._take:
                self._end_of_body(beyond=self._at > self._take)
        else:
            try:
                self._parse(self._scratch[:nbytes])
            except BrokenAnswerError as error:
                self._broken(error)

    def eof_received(self) -> bool:
        """No more bytes will come."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed."""
        self.usable = False
        if self._answered is None:
            self.abort()
        elif self._reply is not None and self._chunks is None and not self._counted and error is None:
            self._end_of_body(beyond=True)  # a body without a length ends so
        else:
            self._broken(error or BrokenAnswerError("the connection was closed before the answer's end"))

    # --- an answer ------------------------------------------------------------------------------------------

    def _parse(self, data: memoryview) -> None:
        if self._reply is not None:
            self._parse_body(data)
            return
        received: bytes | bytearray = bytes(data)
        if self._head:
            self._head += received
            received = self._head
        start = 0
        while True:
            end = received.find(b"\r\n\r\n", start) + 4
            if end < 4:
                if self._heard + len(received) - start > MOST_HEAD:
                    raise BrokenAnswerError(f"the answer's head has more than {MOST_HEAD} bytes")
                if start or received is not self._head:
                    self._head = bytearray(received[start:])
                return
            self._heard += end - start
            if self._heard > MOST_HEAD:
                raise BrokenAnswerError(f"the answer's head has more than {MOST_HEAD} bytes")
            status, stays, headers = parse_head(received[start:end])
            if status >= 200:
                break
            if status == 101:
                raise BrokenAnswerError("the answer changes the protocol, which nobody asked for")
            start = end
        self._head = bytearray()
        self._stays = self._stays and stays
        self._begin_body(Reply(status, headers, self))
        self._parse_body(memoryview(received)[end:])

    def _begin_body(self, reply: Reply) -> None:
        status, headers = reply.status, reply.headers
        most = self._wanted if status == 206 else self._whole if status == 200 else MOST_OTHER
        length = dict.get(headers, "content-length")
        coding = dict.get(headers, "transfer-encoding")
        self._take, self._counted = most + 1, False
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise BrokenAnswerError("the answer contradicts itself on where its body ends")
            self._chunks = _Chunks()
        elif status in (204, 304):
            self._take, self._counted = 0, True
        elif length is not None:
            if _LENGTH.fullmatch(length) is None:
                raise BrokenAnswerError("the answer's Content-Length is no number")
            if int(length) > most:
                self._stays = False  # what nobody wants stays unread
            self._take, self._counted = min(int(length), most + 1), True
        else:
            self._stays = False
        self._reply = reply

    def _parse_body(self, data: memoryview) -> None:
        if self._chunks is not None:
            beyond = self._chunks.feed(data, self._body)
            if len(self._body) >= self._take:
                del self._body[self._take :]
                self._end_of_body(beyond=True)
            elif self._chunks.ended:
                self._end_of_body(beyond=beyond)
        elif not self._counted:
            self._body += data[: self._take - len(self._body)]
            if len(self._body) >= self._take:
                self._end_of_body(beyond=True)
        elif len(data) >= self._take:
            # As a rule: head and body came together.
            self._body += data[: self._take]
            self._end_of_body(beyond=len(data) > self._take)
        else:
            self._body = bytearray(self._take + 1)
            self._body[: len(data)] = data
            self._view, self._at = memoryview(self._body), len(data)

    def _end_of_body(self, *, beyond: bool) -> None:
        """The answer is complete; with bytes behind it the connection would be out of step."""
        self._stays = self._stays and not beyond
        self._end(None)

    def _broken(self, error: Exception) -> None:
        """Nothing more comes of this answer."""
        self._stays = False
        if self._reply is None:
            answered = self._answered
            self.abort()
            if answered is not None:
                answered(error)
        else:
            self._end(error)

    def _end(self, trouble: Exception | None) -> None:
        reply, answered = self._reply, self._answered
        assert reply is not None
        if self._view is not None:
            # The loop still holds what it wrote into, so that it cannot be cut.
            reply.body, self._view = bytes(self._view[: min(self._at, self._take)]), None
        else:
            reply.body = bytes(self._body)
        reply.trouble = trouble
        self._reply, self._chunks, self._answered = None, None, None
        self._body, self._at = bytearray(), 0
        self.served += 1
        if self._stays:
            self.usable = True
        else:
            self.abort()
        # The last of all: who is told may send the next request at once.
        if answered is not None:
            answered(reply)

    @property
    def silent(self) -> bool:
        """Whether nothing at all came of an answer."""
        return self._reply is None and not self._head and not self._heard

    def _look(self) -> None:
        """Whether the silence has become too long; one timer serves all answers."""
        self._timer = None
        if self._answered is None:
            return
        left = self._moved + self._silence - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._broken(TimeoutError(f"not a byte for {self._silence:g} s"))


class Pool:
    """Connections to one origin, opened as they are needed and used again.

    Args:
        origin: Scheme, host and port.
        silence: Seconds after which a connection that does not open, or says nothing, is given up.
        tls: Makes the context, for https.
    """

    def __init__(self, origin: URL, silence: float, tls: Callable[[], ssl.SSLContext]) -> None:
        self._host, self._port = origin.raw_host or "", origin.port or 0
        self._tls = tls if origin.scheme == "https" else None
        self._silence = silence
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._addresses: list[tuple[Any, ...]] = []
        self._believed_until = 0.0
        self._turn = 0
        self._naming = asyncio.Lock()

    async def ask(self, url: URL, request: bytes, wanted: int, whole: int) -> Reply:
        """The answer to a request; `done` or `drop` must follow.

        A connection that was used before may have been closed by the server meanwhile. If nothing at all came
        over it, the request is sent again, once, over a new one.

        Args:
            url: What is asked.
            request: As it is sent.
            wanted: Bytes of the range: no more than one beyond it is read of a 206.
            whole: The same for a 200.

        Raises:
            OSError: No connection, or no head of an answer.
        """
        connection = self.rested() or await self.opened()
        again = connection.served > 0
        while True:
            try:
                reply = await connection.ask(request, wanted, whole)
            except ConnectionError:
                self._all.discard(connection)
                if not (again and connection.silent):
                    raise
            except BaseException:
                self.drop(connection)
                raise
            else:
                reply.url = url
                return reply
            connection, again = await self.opened(), False

    def done(self, reply: Reply) -> None:
        """An answer is as it should be: its connection can serve the next request."""
        if reply.connection.usable:
            self._idle.append(reply.connection)
        else:
            self._all.discard(reply.connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection that may be out of step, as something is wrong with an answer."""
        connection.abort()
        self._all.discard(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in self._all:
            connection.abort()
        self._all.clear()
        self._idle.clear()

    def rested(self) -> Connection | None:
        """A connection that was used before and can be used again, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.rested():
                return connection
            self.drop(connection)
        return None

    async def opened(self) -> Connection:
        """A new connection, to one of the host's addresses after the other.

        Raises:
            OSError: To none of them.
        """
        loop = asyncio.get_running_loop()
        addresses = await self._named()
        self._turn += 1
        at = self._turn % (sum(one[0] == addresses[0][0] for one in addresses) or 1) if addresses else 0
        addresses = addresses[at:] + addresses[:at]
        trouble: Exception = OSError("the name has no address")
        while addresses:
            first, *others = addresses
            family, *_, address = first
            limit = self._silence if len(addresses) == 1 else min(_NEXT_ADDRESS, self._silence)
            made: list[Connection] = []

            def connection(made: list[Connection] = made) -> Connection:
                made.append(Connection(loop, self._silence))
                return made[-1]

            opening = loop.create_connection(
                connection,
                address[0],
                address[1],
                family=family,
                ssl=None if self._tls is None else self._tls(),
                server_hostname=None if self._tls is None else self._host,
            )
            try:
                await asyncio.wait_for(opening, limit)
                self._all.add(made[0])
                return made[0]
            except (OSError, asyncio.TimeoutError) as error:
                # Where one address of a kind cannot be reached, as a rule none can.
                trouble = error if str(error) else TimeoutError(f"not open within {limit:g} s")
                addresses = sorted(others, key=lambda one: one[0] == family)
                self._addresses = addresses
            finally:
                if made and made[0] not in self._all:
                    made[0].abort()
        self._believed_until = 0.0
        raise trouble

    async def _named(self) -> list[tuple[Any, ...]]:
        """Addresses of the host, as they were found a moment ago; asked for once by all."""
        async with self._naming:
            if not self._addresses or time.monotonic() >= self._believed_until:
                loop = asyncio.get_running_loop()
                found = await asyncio.wait_for(
                    loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM), self._silence
                )
                self._addresses = list(dict.fromkeys(found))
                self._believed_until = time.monotonic() + _NAMED
            return self._addresses


def request_start(url: URL, fields: Mapping[str, str]) -> bytes | None:
    """The lines that all requests for one address have; None where one does not fit into a line as it is."""
    target = url.raw_path_qs
    host = url.raw_host or ""
    host = f"[{host}]" if ":" in host else host
    if not url.is_default_port():
        host = f"{host}:{url.port}"
    if not host or _TARGET.fullmatch(target) is None:
        return None
    return _lines(f"GET {target} HTTP/1.1\r\n", {"Host": host, **fields})


def request_bytes(start: bytes, fields: Mapping[str, str], *, open_ended: bool = False) -> bytes | None:
    """A whole request; None where a field does not fit into a line as it is.

    Args:
        start: Of `request_start`.
        fields: Beside those that it has.
        open_ended: Whether more fields and the empty line are still to come.
    """
    lines = _lines("", fields)
    return None if lines is None else b"%b%b%b" % (start, lines, b"" if open_ended else b"\r\n")


def _lines(first: str, fields: Mapping[str, str]) -> bytes | None:
    if _VALUE.fullmatch("".join(fields.values())) is None:
        return None
    return "".join([first, *[f"{name}: {value}\r\n" for name, value in fields.items()]]).encode("ascii")
