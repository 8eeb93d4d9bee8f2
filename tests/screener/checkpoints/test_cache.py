"""The cache: entries that check themselves, whatever others do to the folder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from lmeval_screener.checkpoints.account import Cache


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def entries(cache):
    return [place for place in cache.folder.rglob("*") if place.is_file()]


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n{}", bytes(range(256)) * 100])
def test_what_is_written_is_read(cache, content):
    assert cache.read("rows", "key") is None
    cache.write("rows", "key", content)
    assert cache.read("rows", "key") == content
    assert cache.read("rows", "other") is None
    assert cache.read("headers", "key") is None


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda raw: raw[:-1], id="cut"),
        pytest.param(lambda raw: raw + b"x", id="longer"),
        pytest.param(lambda raw: raw[:-1] + b"x", id="flipped"),
        pytest.param(lambda raw: b"", id="empty"),
        pytest.param(lambda raw: raw[:10], id="no newline"),
        pytest.param(lambda raw: b"[]\n" + raw, id="not an entry"),
        pytest.param(lambda raw: b"[" * 100_000 + b"\n", id="deep"),
        pytest.param(lambda raw: b"\xff" + raw, id="not UTF-8"),
        pytest.param(lambda raw: raw.replace(b'"key": "key"', b'"key": "kez"'), id="another key's"),
    ],
)
def test_a_damaged_entry_counts_as_missing_and_is_replaced(cache, damage):
    cache.write("rows", "key", b"content")
    (place,) = entries(cache)
    place.write_bytes(damage(place.read_bytes()))
    assert cache.read("rows", "key") is None
    cache.write("rows", "key", b"content")
    assert cache.read("rows", "key") == b"content"


WRITER = """
import sys
from pathlib import Path
from lmeval_screener.checkpoints.account import Cache

cache, mine = Cache(Path(sys.argv[1])), sys.argv[2].encode()
for number in range(400):
    cache.write("rows", "key", mine * (1 + number % 50) * 1000)
    content = cache.read("rows", "key")
    assert content is not None and len(set(content)) == 1, "half of one and half of the other"
"""


def test_processes_that_write_the_same_entry(cache):
    run = [sys.executable, "-c", WRITER, str(cache.folder)]
    options = {
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        "stderr": subprocess.PIPE,
    }
    writers = [subprocess.Popen([*run, letter], **options) for letter in "abc"]
    for writer in writers:
        _, errors = writer.communicate(timeout=100)
        assert writer.returncode == 0, errors
    assert len(entries(cache)) == 1  # no half-written file is left
