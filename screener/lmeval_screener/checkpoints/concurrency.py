"""Coroutines run concurrently in an event loop, or one after the other without a loop.

A few folders are read without a loop: importing asyncio, with its servers, takes longer than reading them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")


def in_loop() -> bool:
    """Whether an event loop runs in this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def run(work: Coroutine[Any, Any, T], *, in_turn: bool = False) -> T:
    """The result of a coroutine, in a new event loop, or ``in_turn`` without one: RuntimeError if it waits.

    A thread that already runs a loop, as a notebook's, gets a second thread.
    """

    def act() -> T:
        if not in_turn:
            import asyncio

            return asyncio.run(work)
        try:
            work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise RuntimeError("expected work that does not wait")

    if not in_loop():
        return act()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def lock(holders: int = 1) -> AbstractAsyncContextManager[object]:
    """A lock for so many at a time in an event loop; without one, a context that does nothing."""
    if not in_loop():
        return contextlib.nullcontext()
    import asyncio

    return asyncio.Semaphore(holders)


async def side_by_side(works: Iterable[Any], most: int | None = None) -> list[Any]:
    """Results of coroutines (in a loop, also tasks), in order; in a loop concurrently, ``most`` at a time.

    If one fails, the others are stopped before its error is raised.
    """
    if not in_loop():
        in_turn = list(works)
        try:
            return [await work for work in in_turn]
        finally:
            for work in in_turn:
                work.close()  # those behind a failed one have not begun
    import asyncio

    if most is not None:
        results: dict[int, Any] = {}
        waiting = enumerate(works)

        async def some() -> None:
            for place, work in waiting:
                results[place] = await work

        await side_by_side(some() for _ in range(most))
        return [results[place] for place in range(len(results))]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """Result of a blocking call; in a loop by a daemon thread, so that a call that hangs delays no exit."""
    if not in_loop():
        return work()
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(put: Callable[[Any], None], value: object) -> None:
        if not done.done():
            put(value)

    def act() -> None:
        try:
            outcome: tuple[Callable[[Any], None], object] = done.set_result, work()
        except BaseException as error:
            outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=act, daemon=True).start()
    return await done
