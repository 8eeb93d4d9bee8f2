"""Coroutines run concurrently in an event loop, or one after the other without a loop.

A few folders are read without a loop: importing asyncio takes longer than reading them.
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
    """Whether an asyncio event loop is running in this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def run(work: Coroutine[Any, Any, T], *, in_turn: bool = False) -> T:
    """Run a coroutine to its end and return its result.

    It runs in a new event loop, or without one if ``in_turn`` is true. If this thread already runs
    an event loop, as in a notebook, the coroutine runs in a second thread.

    Raises:
        RuntimeError: ``in_turn`` is true and the coroutine has to wait for something.
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
        raise RuntimeError(
            "expected a coroutine that does not wait, got one that waits; run it in an event loop"
        )

    if not in_loop():
        return act()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def lock(holders: int = 1) -> AbstractAsyncContextManager[object]:
    """Return an asynchronous context manager that at most ``holders`` coroutines enter at a time.

    Without an event loop, where coroutines run one after the other, it does nothing.
    """
    if not in_loop():
        return contextlib.nullcontext()
    import asyncio

    return asyncio.Semaphore(holders)


async def side_by_side(works: Iterable[Any], most: int | None = None) -> list[Any]:
    """Await coroutines and return their results in the same order.

    In an event loop the coroutines, which may also be tasks, run concurrently, at most ``most`` at
    a time (None: all at once). Without a loop they run one after the other. If one fails, the rest
    are cancelled and then its error is raised.
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

        async def take_turns() -> None:
            for place, work in waiting:
                results[place] = await work

        await side_by_side(take_turns() for _ in range(most))
        return [results[place] for place in range(len(results))]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """Call a blocking function and return its result, without blocking the event loop.

    In a loop the call runs in a daemon thread, so that the program can exit even if the call
    hangs; without a loop it runs in this thread.
    """
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
