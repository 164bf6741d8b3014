"""Work side by side that ends as soon as one piece of it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of `work`; when one fails cancel the others, and raise what it raised."""
    failed: list[BaseException] = []

    async def run(one: Coroutine[Any, Any, None]) -> None:
        try:
            await one
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failed.append(error)
            raise

    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(run(one))
    except BaseExceptionGroup:
        raise failed[0] from None
