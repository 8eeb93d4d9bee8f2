"""HTTP for the screener: one aiohttp session with retries, exponential backoff, rate limits and metering.

Transient failures (429, 5xx, broken connections, answers that contradict the request) are retried with
backoff; a lasting failure ends in a `ScreeningError`. The token goes to the Hub's own origin only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import random
import re
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lmeval_screener.checkpoints.cache import Cache
from lmeval_screener.checkpoints.limits import (
    LONGEST_WAIT,
    Budget,
    Notice,
    Quota,
    rate_limited,
    retry_after,
)
from lmeval_screener.checkpoints.snapshot import Meter
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

T = TypeVar("T")

#: Attempts without progress before giving up; the backoff between retries doubles from `FIRST_BACKOFF` (s).
ATTEMPTS = 5
FIRST_BACKOFF = 0.25
#: Likewise for an answer that contradicts the request, until a range of the same file is correct.
CONTRADICTIONS = 3
#: Requests to one host at a time, for all checkpoints together.
CONNECTIONS = 128
#: Ranges of one checkpoint at a time: alone, and the minimum when several are read.
RANGES, FEWEST_RANGES = 64, 16
#: Redirects of one request.
HOPS = 6
#: Seconds without a byte after which a connection counts as dead.
SILENCE = 15.0
#: Most bytes of a line in a response header: signed addresses are long.
_LONGEST_FIELD = 65_536
#: Environment variables that name certificates.
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class RetryError(Exception):
    """A transient failure: retry after ``wait`` seconds (None: exponential backoff)."""

    def __init__(self, error: ScreeningError, *, wait: float | None = None, attempts: int = ATTEMPTS) -> None:
        super().__init__(str(error))
        self.error, self.wait, self.attempts = error, wait, attempts
        self.progressed = False  # whether it got further than the attempt before


def url_of(address: str) -> URL:
    """An address as written: quoting it again would break a signature."""
    from yarl import URL  # not imported for folders

    return URL(address, encoded=True)


def contradiction(what: str, code: str = "BadResponse") -> RetryError:
    """An answer that contradicts the request, the listing or an earlier answer."""
    if code == "BadResponse":
        what = f"{what}; try again, and check the endpoint and any proxy on the way"
    return RetryError(ScreeningError(code, what), attempts=CONTRADICTIONS)


def untrusted(host: str | None, reason: str = "") -> ScreeningError:
    """The error of an untrusted certificate."""
    return ScreeningError(
        "Unreachable",
        f"the certificate of {host} is not trusted{reason}; if your own network issued it, name its issuer's "
        "file in SSL_CERT_FILE or REQUESTS_CA_BUNDLE",
    )


def misdirected(host: str | None, where: str) -> ScreeningError:
    """The error of a redirect that is not followed."""
    return ScreeningError("BadResponse", f"{host} redirects {where}; check the address or HF_ENDPOINT")


async def retried(attempt: Callable[[], Awaitable[T]], budget: Budget) -> T:
    """Result of the first attempt that succeeds; retries with backoff, each wait with up to 50 % jitter."""
    failures = 0
    while True:
        try:
            result = await attempt()
            budget.trouble = None
            return result
        except RetryError as retry:
            budget.trouble = retry.error
            failures = 0 if retry.progressed else failures + 1
            wait = retry.wait
            if wait is None:
                wait = FIRST_BACKOFF * 2 ** max(failures - 1, 0)
            wait *= 1 + random.random() / 2
            if failures >= retry.attempts or wait > budget.remaining:
                raise retry.error from retry
        await asyncio.sleep(wait)


@dataclass(frozen=True)
class Account:
    """What one checkpoint is read with: its time budget, its traffic, the cache and the connections.

    Without connections (offline mode), everything has to come from the cache.
    """

    budget: Budget
    meter: Meter
    cache: Cache
    transport: Transport | None

    def online(self, what: str) -> Transport:
        """The connections, to request an item that is not cached; a ScreeningError in offline mode."""
        if self.transport is None:
            raise ScreeningError(
                "Offline",
                f"offline mode is on and {what} is not in the cache; screen it once with a network, or unset "
                "HF_HUB_OFFLINE",
            )
        return self.transport

    def share(self) -> AbstractContextManager[int]:
        """How many ranges a checkpoint may request at a time."""
        return contextlib.nullcontext(RANGES) if self.transport is None else self.transport.share()


class Transport:
    """One pool of connections for all checkpoints of a run; made inside a running event loop."""

    def __init__(self, endpoint: str, token: str | None, agent: str, notice: Notice | None = None) -> None:
        self.token, self._notice = token, notice
        self._origin, self._agent = url_of(endpoint).origin(), agent
        self._opened: aiohttp.ClientSession | None = None
        self._quotas: dict[tuple[URL, str], Quota] = {}
        self._proxies: dict[URL, str | None] = {}
        self._networks: dict[str, str] = {}
        self._readers = 0

    async def close(self) -> None:
        """Close every connection."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        """Opened for the first request: folders do not need it, and its import takes a third of the start."""
        if self._opened is None:
            import aiohttp

            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS, keepalive_timeout=30),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE),
                headers={"User-Agent": self._agent, "Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # bytes are counted as they travel; `unpacked` opens them
                max_line_size=_LONGEST_FIELD,
                max_field_size=_LONGEST_FIELD,
            )
        return self._opened

    @contextlib.contextmanager
    def share(self) -> Iterator[int]:
        """How many ranges a checkpoint may request at a time, given how many others are being read.

        A request that waits for a connection costs a fifth more than one that is not yet made.
        """
        self._readers += 1
        try:
            yield max(RANGES // self._readers, FEWEST_RANGES)
        finally:
            self._readers -= 1

    def is_hub(self, url: URL) -> bool:
        """Whether a URL is of the Hub's own origin."""
        return url.origin() == self._origin

    def quota(self, url: URL) -> Quota:
        """The quota that counts a request."""
        origin = url.origin()
        kind = "" if origin != self._origin else _kind(url.raw_path)
        if (quota := self._quotas.get((origin, kind))) is None:
            quota = self._quotas[origin, kind] = Quota(kind or url.host or "", self._notice)
        return quota

    async def request(
        self, method: str, url: URL, headers: Mapping[str, str], account: Account
    ) -> aiohttp.ClientResponse:
        """The response to one request within its rate limit, a context manager; no retries, no redirects."""
        if self.is_hub(url) and self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}"}
        quota = self.quota(url)
        await quota.acquire(account.budget)
        answered = None
        try:
            account.meter.add(requests=1)
            response = await self._session.request(
                method,
                url,
                headers=headers,
                allow_redirects=False,
                proxy=self._proxy(url),
                ssl=_tls_context() if url.scheme == "https" else True,
            )
            answered = response.headers
            return response
        except _broken() as error:
            raise _unreachable(error, url) from error
        finally:
            quota.release(answered)

    async def followed(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        account: Account,
        until: Callable[[aiohttp.ClientResponse], bool] = lambda response: False,
    ) -> aiohttp.ClientResponse:
        """`request` that follows redirects: the last response, or a redirect that ``until`` accepts."""
        for _ in range(HOPS):
            response = await self.request(method, url, headers, account)
            try:
                if not is_redirect(response) or until(response):
                    self.raise_if_transient(response)
                    return response
                url = await self.redirect(response, account.meter)
            except BaseException:
                response.close()
                raise
            response.release()
        raise misdirected(url.host, "in circles")

    async def body(
        self,
        url: URL,
        account: Account,
        limit: int,
        refused: Callable[[aiohttp.ClientResponse], ScreeningError],
    ) -> tuple[bytes, aiohttp.ClientResponse]:
        """A whole small body, decompressed, in one attempt; and its response."""
        async with await self.followed("GET", url, {"Accept-Encoding": "gzip"}, account) as response:
            if response.status != 200:
                await drained(response, account.meter)
                raise refused(response)
            return await unpacked(response, account.meter, limit), response

    async def redirect(self, response: aiohttp.ClientResponse, meter: Meter) -> URL:
        """Where a redirect leads; its body is read so that the connection can serve the next request."""
        await drained(response, meter)
        source = response.url
        try:
            url = source.join(url_of(response.headers["Location"])).with_user(None)
            if url.scheme not in ("http", "https"):
                raise ValueError(url.scheme)
            (url.host or "").encode("idna")  # would break name resolution
        except ValueError:
            raise misdirected(source.host, "to an invalid address") from None
        if source.scheme == "https" and url.scheme == "http":
            raise misdirected(source.host, f"from https to http ({url.host}), which is not followed")
        if url.host != source.host:
            network = await self._network(url)
            # Link-local addresses serve a cloud machine's credentials.
            if network == "link-local" or (network == "private" and await self._network(source) == "public"):
                where = f"to {url.host}, an address in a {network} network, which is not followed"
                raise misdirected(source.host, where)
        return url

    def leads_away(self, response: aiohttp.ClientResponse) -> bool:
        """Whether a redirect leads from the Hub's origin; `redirect` refuses an invalid address."""
        with contextlib.suppress(ValueError):
            return not self.is_hub(response.url.join(url_of(response.headers["Location"])))
        return False

    async def _network(self, url: URL) -> str:
        """The kind of network of a host, by its address or (unless a proxy looks it up) its name."""
        host = url.host or ""
        if host not in self._networks:
            addresses = [host]
            with contextlib.suppress(ValueError, OSError):
                if _address(host) is None and self._proxy(url) is None:
                    entries = await asyncio.get_running_loop().getaddrinfo(host, None)
                    addresses = [str(entry[4][0]) for entry in entries]
            known = [address for text in addresses if (address := _address(text)) is not None]
            is_local = host == "localhost" or host.endswith(".localhost")
            is_public = not is_local and all(address.is_global for address in known)
            self._networks[host] = "public" if is_public else "private"
            if any(address.is_link_local for address in known):
                self._networks[host] = "link-local"
        return self._networks[host]

    def _proxy(self, url: URL) -> str | None:
        origin = url.origin()
        if origin not in self._proxies:
            self._proxies[origin] = environment_proxy(url)
        return self._proxies[origin]

    def raise_if_transient(self, response: aiohttp.ClientResponse) -> None:
        """Raise `RetryError` for 408, 5xx and 429 (which throttles every request of its quota)."""
        status, host = response.status, response.url.host
        if status == 429:
            wait = retry_after(response.headers)
            if wait:
                self.quota(response.url).throttle(wait)
                if wait > LONGEST_WAIT:
                    raise rate_limited(host, wait)
            raise RetryError(rate_limited(host, wait), wait=None if wait is None else 0.0)
        if status == 408 or status >= 500:
            raise RetryError(
                ScreeningError("ServerError", f"{host} answered {status} repeatedly; try again later"),
                wait=retry_after(response.headers) if status == 503 else None,
            )


def is_redirect(response: aiohttp.ClientResponse) -> bool:
    """Whether a response leads elsewhere."""
    return response.status in (301, 302, 303, 307, 308) and "Location" in response.headers


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """The errors of connections."""
    import aiohttp

    return aiohttp.ClientError, asyncio.TimeoutError, OSError


def _unreachable(error: Exception, url: URL) -> Exception:
    """The meaning of a connection's error."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return untrusted(url.host, f" ({error.certificate_error})")
    # aiohttp's own text of a refused connection contains the repr of its TLS context.
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    text = cause.message if isinstance(cause, aiohttp.ClientResponseError) else str(cause)
    text = re.sub(r"\?\S*", "", " ".join(text.split())[:200])  # one line, and no signature of an address
    reason = f"{type(error).__name__}: {text}".rstrip(": ")
    what = f"the connection to {url.host} failed ({reason}); check the network and the address"
    return RetryError(ScreeningError("Unreachable", what))


async def piece_of(response: aiohttp.ClientResponse, meter: Meter) -> bytes:
    """The next piece of a body as sent, counted by the meter; empty at the end."""
    try:
        piece = await response.content.readany()
    except _broken() as error:
        raise _unreachable(error, response.url) from error
    meter.add(bytes_read=len(piece))
    return piece


async def unpacked(response: aiohttp.ClientResponse, meter: Meter, limit: int) -> bytes:
    """The whole body, decompressed if necessary."""
    coding = response.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    place, body = response.url.with_query(None), bytearray()
    opened = zlib.decompressobj(16 + zlib.MAX_WBITS) if coding in ("gzip", "x-gzip") else None
    try:
        if opened is None and coding != "identity":
            raise zlib.error(f"unknown Content-Encoding {coding}")
        while piece := await piece_of(response, meter):
            # Bounded by the limit: a few bytes may unpack to gigabytes.
            body += piece if opened is None else opened.decompress(piece, limit + 1 - len(body))
            if len(body) > limit:
                raise contradiction(f"{place} sends more than the {limit} bytes it has")
    except zlib.error as error:
        raise contradiction(f"{place} came compressed and cannot be unpacked ({error})") from error
    return bytes(body)


async def drained(response: aiohttp.ClientResponse, meter: Meter) -> None:
    """Read and discard a short body: a connection with unread bytes would have to be closed."""
    received = 0
    while received <= 65_536 and (piece := await piece_of(response, meter)):
        received += len(piece)


def environment_proxy(url: URL) -> str | None:
    """The proxy from the environment for a URL; aiohttp's own ``trust_env`` also reads ~/.netrc."""
    import urllib.request

    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    host = url.host or ""
    if not proxy or urllib.request.proxy_bypass(f"{host}:{url.port}") or _in_a_block(host, proxies.get("no")):
        return None
    scheme, mark, _ = proxy.partition("://")
    if mark and scheme not in ("http", "https"):
        raise ScreeningError(
            "Unreachable",
            f"expected an HTTP proxy for {url.host}, got a {scheme} one; set "
            f"{url.scheme.upper()}_PROXY or NO_PROXY",
        )
    return proxy if mark else f"http://{proxy}"


def _in_a_block(host: str, excluded: str | None) -> bool:
    """Whether a host is an address in one of NO_PROXY's blocks, such as ``10.0.0.0/8``."""
    for entry in (excluded or "").split(","):
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip().strip("[]"), strict=False):
                return True
    return False


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host's IP address, without its zone; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Certifi's certificates, or those of the environment; loaded once, which takes 40 ms."""
    import certifi

    places = {name: Path(os.environ[name]) for name in _CERTIFICATES if os.environ.get(name)}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, place in (places or {"certifi": Path(certifi.where())}).items():
        file, folder = (None, place) if place.is_dir() else (place, None)
        try:
            context.load_verify_locations(file, folder)
        except OSError as error:  # includes ssl.SSLError
            raise ScreeningError(
                "Unreachable", f"no certificates can be read from {place} ({error}); correct or unset {name}"
            ) from error
    return context


def _kind(path: str) -> str:
    """The Hub's quota that counts a path."""
    if "/resolve/" in path or path.startswith("/api/resolve-cache/"):
        return "resolvers"
    return "api" if path.startswith("/api/") else "pages"
