"""Quotas: what is left is never exceeded, waits cost no checkpoint its time, buckets are apart."""

from __future__ import annotations

import asyncio

import hub_faults as faults
import numpy as np
import pytest
from checkpoints import head_and_embedding, write_checkpoint
from hub_client import FILE, HEAD, IDS, full_matrix, read_of, refused, within
from hub_server import HubServer
from lmeval_screener.checkpoints.account import Account
from lmeval_screener.checkpoints.http import UNSTATED, Quota
from lmeval_screener.errors import ScreeningError


def told(left, seconds, quota=10):
    return {
        "RateLimit": f'"api";r={left};t={seconds}',
        "RateLimit-Policy": f'"fixed window";"api";q={quota};w=300',
    }


def let_go(bucket, count):
    """How many of some requests leave at once."""

    async def work():
        tasks = [asyncio.ensure_future(bucket.acquire(Account(60))) for _ in range(count)]
        await asyncio.sleep(0.01)
        gone = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return gone

    return asyncio.run(work())


@pytest.mark.parametrize(("left", "expected"), [(0, 0), (3, 3), (100, 20)])
def test_no_more_leave_than_are_left(left, expected):
    bucket = Quota("api")
    assert let_go(bucket, 1) == 1
    bucket.release(told(left, 200))
    assert let_go(bucket, 20) == expected


def test_until_a_server_says_something_few_leave_and_a_silent_one_sets_no_limit():
    bucket = Quota("api")
    assert let_go(bucket, 40) == UNSTATED
    for _ in range(UNSTATED):
        bucket.release({})
    assert let_go(bucket, 40) == 40


def test_answers_that_overtake_one_another_do_not_add_room():
    bucket = Quota("api")
    assert let_go(bucket, 3) == 3
    for left in (5, 7, 6):
        bucket.release(told(left, 200))
    assert bucket.available() == 5
    bucket.release(told(9, 290))  # a new window
    assert bucket.available() == 10, "and one that nobody asked for"


def test_a_cancelled_request_gives_its_turn_back():
    bucket = Quota("api")
    assert let_go(bucket, 1) == 1
    bucket.release(told(2, 200))

    async def work():
        first = [asyncio.ensure_future(bucket.acquire(Account(60))) for _ in range(2)]
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(bucket.acquire(Account(60))) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert all(task.done() for task in first)
        bucket.release(None)  # it failed on its way: nobody counted it
        await asyncio.wait_for(waiting[1], 1)

    asyncio.run(work())


def test_too_long_a_wait_is_refused_to_all_that_wait():
    async def work():
        bucket = Quota("api")
        bucket.throttle(100)
        waiting = asyncio.ensure_future(bucket.acquire(Account(60)))
        await asyncio.sleep(0)
        bucket.throttle(3600)
        for turn in (waiting, bucket.acquire(Account(60))):
            with pytest.raises(
                ScreeningError, match=r"try again in 36\d\d s|try again in 3600 s"
            ) as error:
                await turn
            assert error.value.code == "RateLimited"

    asyncio.run(work())


def test_the_clock_stands_while_anything_of_a_checkpoint_waits():
    async def work():
        account = Account(0.3)

        async def waits(seconds):
            with account.paused():
                await asyncio.sleep(seconds)

        async def both():
            await asyncio.gather(waits(0.5), waits(0.7))
            return account.remaining

        assert await account.bounded(both()) > 0.1
        await account.bounded(asyncio.sleep(5))

    refused(asyncio.run, work(), code="Timeout")


def rows(hub, tmp_path, count, *, timeout):
    """Rows of many checkpoints by name, read side by side; each as it came or its error."""

    async def one(pool, number):
        account = pool.account.part(timeout)

        async def work():
            return (await read_of(await pool.snapshot(f"org/m{number}", None, account))).rows

        try:
            return await account.bounded(work())
        except ScreeningError as error:
            return error.code

    async def work(pool, _):
        return await asyncio.gather(*(one(pool, number) for number in range(count)))

    return within(work, tmp_path / "cache", timeout=60.0, endpoint=hub.endpoint)


def test_a_run_above_every_quota_ends_in_one_go(tmp_path):
    """24 checkpoints of 4 s, 8 API calls and 24 resolver requests in 2 s, next to no pages: all come."""
    quotas = {"api": (8, 2.0), "resolvers": (24, 2.0), "pages": (4, 2.0)}
    with HubServer(quotas=quotas) as hub:
        folders = [
            write_checkpoint(tmp_path / f"m{n}", head_and_embedding(seed=n)) for n in range(24)
        ]
        for folder in folders:
            hub.add(f"org/{folder.name}", folder)
        truth = [full_matrix(folder / FILE, HEAD)[list(IDS)] for folder in folders]
        found = rows(hub, tmp_path, 24, timeout=4.0)
        for got, expected in zip(found, truth, strict=True):
            assert not isinstance(got, str), got
            np.testing.assert_array_equal(got, expected)
        assert len(hub.seen("api")) - hub.quotas.refusals["api"] == 24
        # A request at the start of an unknown window may be one too many; nothing is tried in between.
        assert hub.quotas.refusals["api"] <= UNSTATED
        assert hub.quotas.refusals["resolvers"] <= UNSTATED


def test_a_server_that_refuses_again_and_again_is_left_alone(hub, tmp_path):
    hub.add("org/m0", write_checkpoint(tmp_path / "m0", head_and_embedding()))
    hub.fault("api", faults.status(429, {"RateLimit": '"api";r=0;t=0'}))
    assert rows(hub, tmp_path, 1, timeout=20) == ["RateLimited"]
    assert len(hub.seen("api")) == 5
