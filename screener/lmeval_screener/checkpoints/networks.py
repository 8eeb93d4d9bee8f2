"""Hosts in private networks: requests go only to those that the user named.

A redirect, or an address in a downloaded file, must not send requests to what only this machine can
reach: its own services, those of its network, or the address at which machines of a cloud get
credentials. What counts is the address to which a host's name resolves, both when it is checked and
when the connection is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from typing import Any
from urllib.parse import urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Variables in which users name servers of their own.
_VARIABLES = (
    "HF_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "STORAGE_EMULATOR_HOST",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
)
# Not all that are reserved: some proxies give every host an address in 198.18.0.0/15.
_PRIVATE = [
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "127.0.0.0/8",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "100.64.0.0/10",  # of carriers, and of a cloud's credentials (100.100.100.200)
        "::/127",
        "fc00::/7",
        "fec0::/10",
    )
]
#: Networks whose addresses hold an IPv4 address in their last 32 bits.
_EMBEDDING = [
    ipaddress.IPv6Network(network) for network in ("::/96", "::ffff:0:0/96", "64:ff9b::/96")
]


class Networks:
    """The hosts to which requests may be sent: public ones, and those that the user named.

    Args:
        addresses: Addresses that the user named; those in the environment (``HF_ENDPOINT``,
            ``AWS_ENDPOINT_URL``, …) are added.
    """

    def __init__(self, *addresses: str) -> None:
        self._named: set[str] = set()
        self._kinds: dict[str, str] = {}
        for address in (*addresses, *(os.environ.get(name, "") for name in _VARIABLES)):
            self.name(address)

    def name(self, address: str) -> None:
        """Record that the user named the host of an address: requests may then be sent to it."""
        with contextlib.suppress(ValueError):
            host = urlsplit(address if "://" in address else f"//{address}").hostname
            if host:
                self._named.add(_plain(host))

    async def private(self, host: str | None, *, proxied: bool = False) -> str:
        """Return ``link-local`` or ``private`` if a host is in such a network and was not named.

        The text is empty for a host to which requests may be sent. If a proxy makes the requests
        (``proxied``), host names are not resolved, so that only IP addresses and ``localhost`` are
        refused.
        """
        host = _plain(host or "")
        if host in self._named:
            return ""
        if host not in self._kinds:
            self._kinds[host] = await self._kind(host, proxied)
        return self._kinds[host]

    async def _kind(self, host: str, proxied: bool) -> str:
        addresses = await _resolved(host, proxied)
        is_local = host == "localhost" or host.endswith(".localhost")
        is_here = is_local or any(address.is_loopback for address in addresses)
        if is_here and await self._names_loopback():
            return ""
        if any(address.is_link_local for address in addresses):
            return "link-local"
        if is_local or any(is_private(address) for address in addresses):
            return "private"
        return ""

    async def _names_loopback(self) -> bool:
        """Whether the user named a server on this machine."""
        for host in self._named:
            if any(address.is_loopback for address in await _resolved(host, proxied=False)):
                return True
        return False

    def check_resolved(self, host: str, addresses: list[str]) -> None:
        """Check the IP addresses to which a host resolves at the time of a connection.

        Raises:
            OSError: `private` allowed the host, which the user did not name, but an address is now
                in a private network (other than loopback).
        """
        if self._kinds.get(_plain(host)) != "" or _plain(host) in self._named:
            return
        for text in addresses:
            address = address_of(text)
            if address is not None and is_private(address) and not address.is_loopback:
                raise OSError(f"{host} now resolves to {text}, which is in a private network")


def resolver(networks: Networks) -> Any:
    """Return a resolver of host names for aiohttp that calls `Networks.check_resolved`."""
    import aiohttp

    class Checked(aiohttp.ThreadedResolver):
        async def resolve(self, host: str, *args: Any, **options: Any) -> Any:
            entries = await super().resolve(host, *args, **options)
            networks.check_resolved(host, [entry["host"] for entry in entries])
            return entries

    return Checked()


def is_private(address: Address) -> bool:
    """Whether an IP address is private: this machine's, a private network's, or link-local."""
    return address.is_link_local or any(address in network for network in _PRIVATE)


def address_of(host: str) -> Address | None:
    """Parse a host as an IP address; None if it is a name.

    An IPv6 zone is dropped, and an IPv6 address that contains an IPv4 address gives the latter.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and int(address) > 1:
        if any(address in network for network in _EMBEDDING):
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.sixtofour or address
    return address


async def _resolved(host: str, proxied: bool) -> list[Address]:
    """The addresses of a host; empty if they are not known."""
    address = address_of(host)
    if address is not None:
        return [address]
    if proxied:
        return []
    with contextlib.suppress(ValueError, OSError):
        entries = await asyncio.get_running_loop().getaddrinfo(host, None)
        return list(filter(None, (address_of(str(entry[4][0])) for entry in entries)))
    return []


def _plain(host: str) -> str:
    return host.lower().strip("[]").rstrip(".")
