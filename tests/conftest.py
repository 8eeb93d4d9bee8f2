"""Fixtures that several areas share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A loopback Hub without latency; see `hub_server.HubServer`."""
    with HubServer() as server:
        yield server
