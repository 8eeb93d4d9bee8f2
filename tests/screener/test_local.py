"""Checkpoints in folders: transformers' layout, the Hub's cache, and what is wrong with a folder."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_client import FILE, HEAD, IDS, full_matrix, read_folder
from lmeval_screener.checkpoints import Meter
from lmeval_screener.checkpoints.snapshots import open_folder, read_ranges
from storages import refused


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", head_and_embedding())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_as_transformers_saves_it(tmp_path, shards):
    folder = write_checkpoint(tmp_path / "model", head_and_embedding(), shards=shards)
    found = read_folder(folder)
    file = found.projection.file
    np.testing.assert_array_equal(found.rows, full_matrix(folder / file, HEAD)[list(IDS)])
    assert found.projection.parameters == 2 * 120 * 16 + 16
    assert found.snapshot.revision is None
    assert found.snapshot.meter == Meter(0, 0)


def test_a_file_that_disappears_or_shrinks_while_it_is_read(folder):
    snapshot = open_folder(folder)
    error = refused(read_ranges, folder / FILE, [(0, 8), (0, 10**6)])
    assert error.code == "BadResponse"
    assert "still being written" in str(error)
    shutil.rmtree(folder)
    for work in (snapshot.small_file("config.json"), snapshot.ranges(FILE, [(0, 8)])):
        assert refused(asyncio.run, work).code == "FileNotFound"


def test_a_download_that_is_not_complete(folder):
    whole = (folder / FILE).read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        (folder / FILE).write_bytes(whole[:size])
        assert refused(read_folder, folder).code == "BadHeader"
    (folder / FILE).unlink()
    assert refused(read_folder, folder).code == "NoSafetensors"
    assert refused(open_folder, folder / "none").code == "FolderNotFound"
