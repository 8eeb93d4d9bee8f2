"""Connections: no more than needed, used again, reopened when closed; proxies respected."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_faults import chunked, header, truncated

from screener.hub import Hub
from screener.transport import RANGES
from screener.wire import proxied


@pytest.fixture
def read(hub, tmp_path):
    """Reads single bytes of one file, one range after the other or all at once."""
    hub.add("org/m", write_checkpoint(tmp_path / "m", head_and_embedding(v=400)))

    async def work(count, together):
        async with Hub(endpoint=hub.endpoint, cache=tmp_path / "cache", timeout=30) as pool:
            snapshot = await pool.snapshot("org/m")
            spans = [(at, at + 1) for at in range(count)]
            if together:
                return await snapshot.ranges("model.safetensors", spans)
            return [(await snapshot.ranges("model.safetensors", [span]))[0] for span in spans]

    def run(count, together):
        whole = (tmp_path / "m" / "model.safetensors").read_bytes()
        assert asyncio.run(work(count, together)) == [whole[at : at + 1] for at in range(count)]

    return run


def test_one_after_the_other_is_one_connection(hub, read):
    read(30, together=False)
    assert hub.connections[1] == 1


def test_side_by_side_opens_no_more_than_the_limit(hub, read):
    hub.latency = 0.1
    read(300, together=True)
    assert 4 < hub.connections[1] <= RANGES
    assert len(hub.seen("cdn")) == 300


def test_a_connection_that_the_server_closed_is_opened_again(hub, read):
    hub.fault("cdn", header("Connection", "close"), times=3)
    hub.fault("cdn", truncated(0), times=1)
    read(10, together=False)
    assert hub.connections[1] == 5


def test_a_proxy_is_left_to_httpx(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    url = httpx.URL("https://cdn.example/file")
    assert not proxied(url)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    assert proxied(url)
    monkeypatch.setenv("NO_PROXY", "cdn.example")
    assert not proxied(url)


def test_an_answer_without_a_length_goes_through_httpx(hub, read):
    """Chunked answers, HTTP/1.0 and the like are httpx's: the same bytes come, by another way."""
    hub.fault("cdn", chunked)
    read(10, together=False)


def test_interim_answers_are_skipped(hub, read):
    hub.fault("cdn", lambda reply, request: replace(reply, interim=True))
    read(3, together=False)
