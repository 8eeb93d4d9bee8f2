"""Resolutions on disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lmeval_screener.checkpoints import Cache
from lmeval_screener.tokens import ResolutionCache, TokenSet, load_token_set, resolve
from token_cases import (
    REFERENCE,
    vocabulary,
)


@pytest.fixture
def stored(tmp_path):
    domain = load_token_set("legal")
    found = resolve(domain, REFERENCE, vocabulary("mistral-v0.1"))
    cache = ResolutionCache(Cache(tmp_path / "deep" / "cache"))
    assert cache.find("abc", domain, REFERENCE) is None
    cache.put("abc", domain, REFERENCE, found)
    return cache, domain, found, tmp_path / "deep" / "cache"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_cache_returns_what_was_put(stored):
    cache, domain, found, folder = stored
    assert cache.find("abc", domain, REFERENCE) == found
    assert ResolutionCache(Cache(folder)).find("abc", domain, REFERENCE) == found
    assert cache.find("abd", domain, REFERENCE) is None
    assert cache.find("abc", load_token_set("code"), REFERENCE) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"sha256": "x", "resolution": {}}', "null", "[" * 99999])
def test_corrupt_entry_is_ignored_and_rewritten(stored, damage):
    cache, domain, found, folder = stored
    (entry,) = files(folder)
    entry.write_text(damage)
    assert cache.find("abc", domain, REFERENCE) is None
    cache.put("abc", domain, REFERENCE, found)
    assert cache.find("abc", domain, REFERENCE) == found
    assert files(folder) == [entry]


def test_a_changed_id_in_an_entry_is_noticed(stored):
    cache, domain, found, folder = stored
    (entry,) = files(folder)
    text = entry.read_text()
    assert str(found.domain[0].id) in text
    entry.write_text(text.replace(str(found.domain[0].id), "5", 1))
    assert cache.find("abc", domain, REFERENCE) is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("in the way")
    domain: TokenSet = load_token_set("math")
    found = resolve(domain, REFERENCE, vocabulary("gpt2"))
    cache = ResolutionCache(Cache(tmp_path / "file"))
    cache.put("abc", domain, REFERENCE, found)
    assert cache.find("abc", domain, REFERENCE) is None


def test_writers_side_by_side_leave_a_whole_entry(stored):
    cache, domain, found, folder = stored
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.put("abc", domain, REFERENCE, found), range(40)))
        assert set(pool.map(lambda _: cache.find("abc", domain, REFERENCE) == found, range(40))) == {True}
    assert len(files(folder)) == 1
