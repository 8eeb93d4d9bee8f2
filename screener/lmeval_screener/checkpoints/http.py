"""HTTP for the screener: one aiohttp session with retries, exponential backoff and rate limits.

Transient failures (429, 5xx, broken connections, answers that contradict the request) are retried with
backoff; a lasting failure ends in a `ScreeningError`. The token goes to the Hub's own origin only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import math
import os
import re
import ssl
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lmeval_dispersion.installation import __version__
from lmeval_screener.checkpoints.account import Account, RetryError, contradiction
from lmeval_screener.checkpoints.networks import Networks, resolver
from lmeval_screener.errors import ScreeningError

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

#: Name in the headers of requests.
AGENT = f"screen-checkpoints/{__version__}"
#: Requests to one host at a time, for all checkpoints together.
CONNECTIONS = 128
#: Longest wait that a server may ask for, in seconds; the Hub's windows have 300.
LONGEST_WAIT = 900.0
#: Requests in flight until a server has stated the rest of its quota.
UNSTATED = 16
#: Refusals (429) that stop a checkpoint's clock: a server that keeps refusing has no quota.
PATIENCE = 8
#: Servers state whole seconds.
_ROUNDING = 0.5
#: Waits shorter than this, in seconds, are not reported.
_REPORTED_WAIT = 2.0
#: Redirects in a row after which a request fails.
HOPS = 6
#: Seconds without a byte after which a connection counts as dead.
SILENCE = 15.0
#: Most bytes of a line in a response header: signed addresses are long.
_LONGEST_FIELD = 65_536
#: Environment variables that name certificates.
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LEFT = re.compile(
    r'"(?P<name>[^"]{0,200})"\s*;\s*r\s*=\s*(?P<left>[0-9]{1,15})\s*;\s*t\s*=\s*(?P<seconds>[0-9]{1,9})\b'
)

#: Called with a server's name and seconds when its quota makes a request wait.
Notice = Callable[[str, float], None]


def url_of(address: str, *, encoded: bool = True) -> URL:
    """Parse an address as a URL.

    With ``encoded``, the address must be percent-encoded already, and is left as it is: encoding
    it again would break a signed address. Otherwise, characters that a URL cannot hold are encoded.

    Raises:
        ValueError: The address is not a URL.
    """
    from yarl import URL  # not imported for folders

    return URL(address, encoded=encoded)


def untrusted(host: str | None, reason: str = "") -> ScreeningError:
    """Return the error for a server whose TLS certificate is not trusted.

    ``reason`` follows "is not trusted" in the message, for example in brackets.
    """
    return ScreeningError(
        "Unreachable",
        f"the certificate of {host} is not trusted{reason}; if your own network issued it, set "
        "SSL_CERT_FILE or REQUESTS_CA_BUNDLE to the file with the issuer's certificate",
    )


def misdirected(host: str | None, where: str) -> ScreeningError:
    """Return the error for a redirect by ``host`` that is not followed.

    ``where`` completes "HOST redirects …".
    """
    return ScreeningError(
        "BadResponse",
        f"{host} redirects {where}, which is not allowed; check the address or HF_ENDPOINT",
    )


class Quota:
    """One server's rate limit for one kind of request.

    The Hub counts requests in windows of five minutes, separately for ``api``, ``resolvers`` and
    ``pages``. Every response states how many requests are left and when the window ends
    (``RateLimit: "api";r=12;t=87``). A request is sent if the quota has room for it and for the
    requests that are not answered yet. Otherwise it waits, which takes nothing from the time budget
    of its checkpoint (for an exception, see `acquire`).

    Args:
        name: Name of the rate limit in messages: the kind of request, or the host. A name that the
            server states replaces it.
        notice: Called with the name and a number of seconds when requests have to wait.
    """

    def __init__(self, name: str, notice: Notice | None = None) -> None:
        self.name, self._notice = name, notice
        self._left: int | None = None
        self._resets = self._throttled_until = self._noticed = 0.0
        self._unlimited = False
        self._refusals = self._in_flight = 0
        self._changed = asyncio.Event()

    def available(self) -> float:
        """Return how many requests may be sent now.

        The number is infinite if the server states no limit, and 0 or negative if requests have to
        wait. While the rest of the quota is not known, at most `UNSTATED` requests are sent at a
        time.
        """
        now = time.monotonic()
        if now < self._throttled_until:
            return 0
        if self._left is not None and now >= self._resets:
            self._left = None
        if self._left is None:
            return math.inf if self._unlimited else UNSTATED - self._in_flight
        return self._left - self._in_flight

    async def acquire(self, account: Account) -> None:
        """Wait until one request may be sent; call `release` once the request has ended.

        The account's clock stops during the wait, unless the server has asked for a pause (status
        429) `PATIENCE` times since the account first had to wait for this quota.

        Raises:
            ScreeningError: The server has asked for a pause that lasts for more than `LONGEST_WAIT`
                further seconds (``RateLimited``).
        """
        while self.available() <= 0:
            now = time.monotonic()
            if self._throttled_until - now > LONGEST_WAIT:
                raise rate_limited(self.name, self._throttled_until - now)
            opens = self._resets if self._left is not None else 0.0
            opens = self._throttled_until if now < self._throttled_until else opens
            if self._notice is not None and opens - now > _REPORTED_WAIT and opens > self._noticed:
                self._noticed = opens + _REPORTED_WAIT
                self._notice(self.name, opens - now)
            clock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if self._refusals - account.refusals.setdefault(self, self._refusals) < PATIENCE:
                clock = account.paused()
            self._changed.clear()
            with clock, contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), opens - now + 0.001 if opens > now else None
                )
        self._in_flight += 1

    def release(self, headers: Mapping[str, str] | None) -> None:
        """Record that one request has ended.

        ``headers`` are those of the response; None if there was no response.
        """
        self._in_flight -= 1
        if headers is not None:
            self._update(headers)
        self._changed.set()

    def throttle(self, seconds: float) -> None:
        """Let requests of this quota wait for ``seconds``, because the server asked for a pause."""
        now = time.monotonic()
        self._refusals += now >= self._throttled_until
        self._throttled_until = max(self._throttled_until, now + seconds)
        self._left = None
        self._changed.set()

    def _update(self, headers: Mapping[str, str]) -> None:
        stated = _LEFT.search(headers.get("RateLimit", ""))
        if stated is None:
            self._unlimited = self._left is None
            return
        self.name, left = stated["name"], int(stated["left"])
        resets = time.monotonic() + int(stated["seconds"]) + _ROUNDING
        if self._left is not None and abs(resets - self._resets) <= 1.5:
            # Responses overtake one another: inside a window only the smallest value counts.
            left, resets = min(left, self._left), min(resets, self._resets)
        self._left, self._resets = left, resets


class Transport:
    """HTTP connections, shared by all checkpoints of a screening.

    Use it inside a running event loop.

    Args:
        endpoint: Address of the Hub. Requests to other servers never carry the token.
        token: Token for the Hub; None to send none.
        notice: Called with a server's name and a number of seconds when requests have to wait.
        networks: The hosts to which requests may be sent; None for public hosts and those that the
            endpoint and the environment name.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        notice: Notice | None = None,
        networks: Networks | None = None,
    ) -> None:
        self.token = token
        self._notice = notice
        self.networks = networks or Networks(endpoint)
        self._origin = url_of(endpoint).origin()
        self._opened: aiohttp.ClientSession | None = None
        self._quotas: dict[tuple[URL, str], Quota] = {}
        self._proxies: dict[URL, str | None] = {}

    async def close(self) -> None:
        """Close every connection."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        """The aiohttp session, opened for the first request: its import takes a third of the start."""
        if self._opened is None:
            import aiohttp

            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    limit_per_host=CONNECTIONS,
                    keepalive_timeout=30,
                    resolver=resolver(self.networks),
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE),
                headers={"User-Agent": AGENT, "Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # bytes are counted as they travel; `unpacked` opens them
                max_line_size=_LONGEST_FIELD,
                max_field_size=_LONGEST_FIELD,
            )
        return self._opened

    def is_hub(self, url: URL) -> bool:
        """Whether a URL has the scheme, host and port of the Hub."""
        return url.origin() == self._origin

    def quota(self, url: URL) -> Quota:
        """Return the quota that counts requests to ``url``."""
        origin = url.origin()
        kind = _kind(url.raw_path) if origin == self._origin else ""
        if (origin, kind) not in self._quotas:
            self._quotas[origin, kind] = Quota(kind or url.host or "", self._notice)
        return self._quotas[origin, kind]

    async def request(
        self, method: str, url: URL, headers: Mapping[str, str], account: Account
    ) -> aiohttp.ClientResponse:
        """Send one request as soon as its rate limit allows, and return the response.

        Redirects are not followed. Use the response as a context manager, which frees its
        connection.

        Raises:
            RetryError: The connection failed.
            ScreeningError: The server's certificate is not trusted, the file of trusted
                certificates cannot be read, the proxy is not an HTTP proxy, or the rate limit
                demands too long a wait.
        """
        if self.is_hub(url) and self.token:
            headers = {**headers, "Authorization": f"Bearer {self.token}"}
        quota = self.quota(url)
        await quota.acquire(account)
        answered = None
        try:
            account.add(requests=1)
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
            check = "the address"
            if self.is_hub(url):
                check = "HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use only downloaded files"
            raise _unreachable(error, url, check) from error
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
        """Send a request, follow its redirects, and return the last response.

        If ``until`` accepts a redirect, that redirect is returned instead.

        Raises:
            RetryError: The connection failed, or the final status may be temporary (see
                `raise_if_transient`).
            ScreeningError: A redirect must not be followed (see `redirect`), `HOPS` requests in a
                row were redirected, or `request` or `raise_if_transient` raised this error.
        """
        for _ in range(HOPS):
            response = await self.request(method, url, headers, account)
            try:
                if not is_redirect(response) or until(response):
                    self.raise_if_transient(response)
                    return response
                url = await self.redirect(response, account)
            except BaseException:
                response.close()
                raise
            response.release()
        raise misdirected(response.url.host, f"the request {HOPS} times in a row")

    async def body(
        self,
        url: URL,
        account: Account,
        limit: int,
        refused: Callable[[aiohttp.ClientResponse], ScreeningError],
    ) -> tuple[bytes, aiohttp.ClientResponse]:
        """Send a GET request once, and return the whole body, decompressed, and the response.

        Redirects are followed. If the final status is not 200, ``refused`` is called with the
        response, and the error that it returns is raised.

        Raises:
            RetryError: The connection failed, the final status may be temporary, or the body is
                broken or has more than ``limit`` bytes.
            ScreeningError: The error from ``refused``, or one that `followed` raises.
        """
        async with await self.followed(
            "GET", url, {"Accept-Encoding": "gzip"}, account
        ) as response:
            if response.status != 200:
                await drained(response, account)
                raise refused(response)
            return await unpacked(response, account, limit), response

    async def redirect(self, response: aiohttp.ClientResponse, account: Account) -> URL:
        """Return the address to which a response redirects, and free its connection.

        Raises:
            RetryError: The connection broke.
            ScreeningError: The redirect must not be followed: its address is invalid, leads from
                https to http, or is on a host in a private network that the user did not name.
        """
        await drained(response, account)
        source = response.url
        try:
            url = source.join(url_of(response.headers["Location"])).with_user(None)
            if url.scheme not in ("http", "https"):
                raise ValueError(url.scheme)
            (url.host or "").encode("idna")  # would break name resolution
        except ValueError:
            raise misdirected(source.host, "to an invalid address") from None
        if source.scheme == "https" and url.scheme == "http":
            raise misdirected(source.host, f"from https to http ({url.host})")
        if url.host != source.host:
            proxied = self._proxy(url) is not None
            if network := await self.networks.private(url.host, proxied=proxied):
                where = f"to {url.host} in a {network} network"
                raise misdirected(source.host, where)
        return url

    def leads_away(self, response: aiohttp.ClientResponse) -> bool:
        """Whether a redirect leads to another server than the Hub.

        False if the redirect's address is invalid: `redirect` raises the error for that.
        """
        with contextlib.suppress(ValueError):
            return not self.is_hub(response.url.join(url_of(response.headers["Location"])))
        return False

    def _proxy(self, url: URL) -> str | None:
        origin = url.origin()
        if origin not in self._proxies:
            self._proxies[origin] = environment_proxy(url)
        return self._proxies[origin]

    def raise_if_transient(self, response: aiohttp.ClientResponse) -> None:
        """Raise an error if a response's status may be temporary: 408, 429 or 5xx.

        After 429 the quota sends no requests for as long as the server asks.

        Raises:
            RetryError: The request may be tried again.
            ScreeningError: The server asks for a wait of more than `LONGEST_WAIT` seconds.
        """
        status = response.status
        host = response.url.host
        wait = retry_after(response.headers) if status in (429, 503) else None
        if status == 429:
            error = rate_limited(host, wait)
            if wait is None:
                raise RetryError(error)
            if wait:
                self.quota(response.url).throttle(wait)
            if wait > LONGEST_WAIT:
                raise error
            raise RetryError(error, wait=0.0)
        if status == 408 or status >= 500:
            error = ScreeningError(
                "ServerError",
                f"{host} answered every attempt with status {status}; try again later",
            )
            raise RetryError(error, wait=wait)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait before a retry, as a response's headers ask.

    The header ``Retry-After`` is used, or else ``RateLimit``; None if neither gives the seconds.
    """
    value = headers.get("Retry-After", "")
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    if value:
        import email.utils

        with contextlib.suppress(ValueError, TypeError, OverflowError):
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    seconds = re.search(r"\bt\s*=\s*([0-9]{1,9})\b", headers.get("RateLimit", ""))
    return float(seconds[1]) + _ROUNDING if seconds else None


def natural(text: str) -> int | None:
    """Parse an integer of at most 18 digits in a header, such as a size; None for other texts."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def rate_limited(host: str | None, wait: float | None) -> ScreeningError:
    """Return the error for a rate limit that is used up; ``wait`` is in seconds, None if unknown."""
    until = f"in {wait:.0f} s" if wait else "later"
    return ScreeningError(
        "RateLimited",
        f"the rate limit of {host} is used up (429); try again {until}, or log in (hf auth login) "
        "for a higher limit on the Hub",
    )


def is_redirect(response: aiohttp.ClientResponse) -> bool:
    """Whether a response redirects to another address."""
    return response.status in (301, 302, 303, 307, 308) and "Location" in response.headers


@functools.cache
def _broken() -> tuple[type[Exception], ...]:
    """Exception types of broken connections."""
    import aiohttp

    return aiohttp.ClientError, asyncio.TimeoutError, OSError


def _unreachable(error: Exception, url: URL, check: str = "the address") -> Exception:
    """The error for a connection's exception; ``check`` is what to check with the network."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return untrusted(url.host, f" ({error.certificate_error})")
    # aiohttp's own text of a refused connection contains the repr of its TLS context.
    text = str(error)
    if isinstance(error, aiohttp.ClientConnectorError):
        text = str(error.os_error)
    elif isinstance(error, aiohttp.ClientResponseError):
        text = error.message
    # One line, and no signature of an address.
    text = re.sub(r"\?\S*", "", " ".join(text.split())[:200])
    reason = f"{type(error).__name__}: {text}".rstrip(": ")
    what = f"the connection to {url.host} failed ({reason}); check the network and {check}"
    return RetryError(ScreeningError("Unreachable", what))


async def piece_of(response: aiohttp.ClientResponse, account: Account) -> bytes:
    """Return the next bytes of a body as sent; empty bytes at its end.

    The bytes are added to the account's traffic.

    Raises:
        RetryError: The connection broke.
    """
    try:
        piece = await response.content.readany()
    except _broken() as error:
        raise _unreachable(error, response.url) from error
    account.add(bytes_read=len(piece))
    return piece


async def unpacked(response: aiohttp.ClientResponse, account: Account, limit: int) -> bytes:
    """Return a response's whole body, decompressed.

    Raises:
        RetryError: The connection broke, the body cannot be decompressed, or it has more than
            ``limit`` bytes.
    """
    coding = response.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    place = response.url.with_query(None)
    body = bytearray()
    opened = zlib.decompressobj(16 + zlib.MAX_WBITS) if coding in ("gzip", "x-gzip") else None
    try:
        if opened is None and coding != "identity":
            raise zlib.error(f"unknown Content-Encoding {coding}")
        while piece := await piece_of(response, account):
            # Bounded by the limit: a few bytes may unpack to gigabytes.
            body += piece if opened is None else opened.decompress(piece, limit + 1 - len(body))
            if len(body) > limit:
                raise contradiction(f"expected at most {limit:,} bytes from {place}, got more")
    except zlib.error as error:
        what = f"the compressed response of {place} cannot be unpacked ({error})"
        raise contradiction(what) from error
    return bytes(body)


async def drained(response: aiohttp.ClientResponse, account: Account) -> None:
    """Read and discard a response's body, up to 64 kB, so that its connection can be used again."""
    received = 0
    while received <= 65_536 and (piece := await piece_of(response, account)):
        received += len(piece)


def environment_proxy(url: URL) -> str | None:
    """Return the address of the HTTP proxy that the environment names for a URL.

    None if no proxy is named for such a URL, or if ``NO_PROXY`` exempts the host.

    Raises:
        ScreeningError: The proxy is of another kind, such as SOCKS.
    """
    # Not aiohttp's own `trust_env`, which also reads ~/.netrc.
    import urllib.request

    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    host = url.host or ""
    is_bypassed = urllib.request.proxy_bypass(f"{host}:{url.port}")
    if not proxy or is_bypassed or _in_a_block(host, proxies.get("no", "")):
        return None
    scheme, mark, _ = proxy.partition("://")
    if mark and scheme not in ("http", "https"):
        raise ScreeningError(
            "Unreachable",
            f"expected an HTTP proxy for {url.host}, got a {scheme} proxy; set "
            f"{url.scheme.upper()}_PROXY to an http:// address, or add the host to NO_PROXY",
        )
    return proxy if mark else f"http://{proxy}"


def _in_a_block(host: str, excluded: str) -> bool:
    """Whether a host is an address in one of NO_PROXY's blocks, such as ``10.0.0.0/8``."""
    for entry in excluded.split(","):
        with contextlib.suppress(ValueError):
            block = ipaddress.ip_network(entry.strip().strip("[]"), strict=False)
            if ipaddress.ip_address(host) in block:
                return True
    return False


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Certifi's certificates, or those of the environment; loaded once, which takes 40 ms."""
    import certifi

    places = {name: Path(os.environ[name]) for name in _CERTIFICATES if os.environ.get(name)}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, place in (places or {"certifi": Path(certifi.where())}).items():
        try:
            if place.is_dir():
                context.load_verify_locations(capath=place)
            else:
                context.load_verify_locations(place)
        except OSError as error:  # includes ssl.SSLError
            advice = "reinstall certifi" if name == "certifi" else f"correct or unset {name}"
            raise ScreeningError(
                "Unreachable", f"certificates cannot be read from {place} ({error}); {advice}"
            ) from error
    return context


def _kind(path: str) -> str:
    """The Hub's quota kind for a path."""
    if "/resolve/" in path or path.startswith("/api/resolve-cache/"):
        return "resolvers"
    return "api" if path.startswith("/api/") else "pages"
