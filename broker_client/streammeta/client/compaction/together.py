"""Work side by side that ends when one piece of it has failed, and work that nothing ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of `work`; when one fails cancel the others, and raise what it raised.

    All of it has ended then. Who is cancelled meanwhile stays cancelled, whatever fails in the
    course of that.
    """
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        failed = [one for one in tasks if not one.cancelled() and one.exception() is not None]
    for task in (one for one in failed if one in ended):
        task.result()
    if any(task.cancelled() for task in ended):
        raise asyncio.CancelledError


async def some_at_a_time(
    most: int, items: Iterable[ItemT], work: Callable[[ItemT], Coroutine[Any, Any, None]]
) -> None:
    """Run `work` for each item in order, for at most `most` at once: there may be thousands."""
    left = iter(items)

    async def work_off() -> None:
        for one in left:
            await work(one)

    await together(work_off() for _ in range(most))


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even if its caller is cancelled, which is told afterwards."""
    task = asyncio.create_task(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    task.result()
