"""Rows: coalescing, the cache, and rows that are not fit to be compared."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import hub_client
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from lmeval_screener.checkpoints.account import Cache
from lmeval_screener.checkpoints.snapshot import open_folder
from lmeval_screener.weights.projection import find_projection, read_rows
from lmeval_screener.weights.rows import SLACK, coalesced


@given(st.sets(st.integers(0, 300), min_size=1), st.floats(0, 1))
def test_runs_cover_all_rows_within_the_slack(ids, slack):
    order = sorted(ids)
    runs = coalesced(order, slack)
    covered = [i for a, b in runs for i in range(a, b)]
    assert covered == sorted(set(covered))
    assert ids <= set(covered)
    assert len(covered) - len(ids) <= slack * len(ids)
    assert all(a in ids and b - 1 in ids for a, b in runs)
    assert all(b < c for (_, b), (c, _) in pairwise(runs)), "neighbours are one run"


@given(st.sets(st.integers(0, 60), min_size=2, max_size=12))
def test_no_other_choice_of_gaps_needs_fewer_runs(ids):
    order = sorted(ids)
    gaps = [b - a - 1 for a, b in pairwise(order)]
    budget = int(SLACK * len(order))
    best = max(
        bin(chosen).count("1")
        for chosen in range(2 ** len(gaps))
        if sum(gap for at, gap in enumerate(gaps) if chosen >> at & 1) <= budget
    )
    assert len(coalesced(order)) == len(order) - best


def local(tmp_path, tensors):
    return asyncio.run(find_projection(open_folder(write_checkpoint(tmp_path / "m", tensors))))


@pytest.mark.parametrize(
    ("value", "says"),
    [(np.nan, "that hold NaN or Inf"), (np.inf, "that hold NaN or Inf"), (0, "that are zero")],
)
def test_rows_that_are_no_weights_are_named(tmp_path, value, says):
    tensors = head_and_embedding()
    tensors["lm_head.weight"][1][[4, 9]] = value
    projection = local(tmp_path, tensors)
    assert asyncio.run(read_rows(projection, [3, 5])).shape == (2, 16)
    says = f"lm_head.weight has rows {says} (token ids 4, 9)"
    hub_client.refused(asyncio.run, read_rows(projection, [3, 9, 4]), code="BadRows", says=says)


@pytest.mark.parametrize(
    "lengths", [1.0, np.linspace(0.3, 7, 120)[:, None]], ids=["equal", "parallel"]
)
def test_rows_of_one_direction_or_outside_the_matrix_are_no_result(tmp_path, lengths):
    tensors = head_and_embedding()
    matrix = tensors["lm_head.weight"][1]
    matrix[:] = matrix[0] * lengths
    projection = local(tmp_path, tensors)
    same = "lm_head.weight has rows that all point the same way (token ids 0, 1, 2)"
    outside = "has only 120 rows"
    for ids, message in (([0, 1, 2], same), ([0, 120], outside), ([-1], outside)):
        hub_client.refused(asyncio.run, read_rows(projection, ids), code="BadRows", says=message)
    matrix[2, 0] *= 1.01
    assert asyncio.run(read_rows(local(tmp_path, tensors), [0, 1, 2])).shape == (3, 16)


@pytest.fixture
def read(hub, tmp_path):
    """Reads rows of org/m from the loopback Hub with a cache: rows and account."""

    def rows(ids, repo="org/m"):
        found = hub_client.read(hub, tmp_path / "cache", repo, ids=tuple(ids))
        return found.rows, found.snapshot.account

    return rows


def test_rows_read_once_are_never_read_again(hub, tmp_path, read):
    tensors = head_and_embedding()
    expected = tensors["lm_head.weight"][1].astype(np.float32)
    folder = write_checkpoint(tmp_path / "m", tensors)
    hub.add("org/m", folder)
    hub.add("other/copy", folder)
    read([1, 2, 50])
    before = len(hub.requests)
    got, account = read([2, 1])
    np.testing.assert_array_equal(got, expected[[2, 1]])
    # Only whether the branch is still where it was.
    assert [(request.method, request.part) for request in hub.requests[before:]] == [
        ("HEAD", "resolve")
    ]
    assert account.requests == 1

    before = len(hub.requests)
    got, _ = read([2, 1, 90])
    np.testing.assert_array_equal(got, expected[[2, 1, 90]])
    fetched = [
        request.headers["range"] for request in hub.requests[before:] if request.part == "cdn"
    ]
    assert len(fetched) == 1, "only the missing row travels"

    before = len(hub.requests)
    got, _ = read([1, 2, 50, 90], repo="other/copy")
    np.testing.assert_array_equal(got, expected[[1, 2, 50, 90]])
    asked = {request.part for request in hub.requests[before:]}
    assert asked <= {"api", "resolve"}, "the same file by its digest"

    # An entry that is damaged counts as missing, in each of the ways of test_cache.
    places = [place for place in (tmp_path / "cache").rglob("*") if place.is_file()]
    assert len(places) >= 4
    for place in places:
        place.write_bytes(place.read_bytes()[:-1] + b"~")
    np.testing.assert_array_equal(read([1, 2, 50])[0], expected[[1, 2, 50]])
    assert read([1, 2, 50])[1].requests == 1


def test_a_header_that_is_wrong_is_not_kept(tmp_path):
    """A server's one wrong answer must not stay."""
    snapshot = open_folder(write_checkpoint(tmp_path / "m", head_and_embedding()))
    snapshot.cache = Cache(tmp_path / "cache")
    right = snapshot.ranges

    async def wrong(path, spans):
        bodies = await right(path, spans)
        return [b"\xff" * len(body) for body in bodies] if path == "model.safetensors" else bodies

    snapshot.ranges = wrong
    hub_client.refused(asyncio.run, find_projection(snapshot), code="BadHeader", says="header of")
    snapshot.ranges = right
    assert asyncio.run(find_projection(snapshot)).name == "lm_head.weight"
    snapshot.ranges = wrong
    assert asyncio.run(find_projection(snapshot)).name == "lm_head.weight", "what is right is kept"
