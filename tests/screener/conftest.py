"""Waits between attempts are short here; a server of each kind of storage for all tests, with names apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from lmeval_screener.checkpoints import account
from storages import Storage, azurite, fake_gcs, moto


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five attempts within a fraction of a second."""
    monkeypatch.setattr(account, "FIRST_BACKOFF", 0.01)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache for each test: no other has what this one reads."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))


@pytest.fixture
def served(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """The loopback Hub in place of the real one, for calls in this process; nobody is logged in."""
    for name, value in (("ENDPOINT", hub.endpoint), ("HF_HUB_CACHE", str(tmp_path / "downloads"))):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lmeval_screener.checkpoints.hub._implicit_token", lambda: None)
    return hub


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Storage]:
    with moto() as store:
        yield store


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Storage]:
    with azurite() as store:
        yield store


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Storage]:
    with fake_gcs() as store:
        yield store
