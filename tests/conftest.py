"""Fixtures that several areas share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hub_server import HubServer

# The tests run side by side, one worker a core, and threads of torch and BLAS would wait for each other at
# full load. Said before either is imported, and handed down to the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A loopback Hub without latency; see `hub_server.HubServer`."""
    with HubServer() as server:
        yield server
