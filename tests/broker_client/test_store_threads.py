"""Work in threads leaves nothing in memory once its end is told."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.client.resources import StoreThreads
from tests.kit.memory_store import MemoryObjectStore


class Buffer:
    """Stands for the megabytes that a call looks at, until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def look_at(self) -> int:
        assert self.may_end.wait(10)
        return 1


Pools = StoreThreads | StoreCalls


@pytest.mark.parametrize(
    ("pools", "run"),
    [
        (lambda store: StoreThreads(store, 1, "test"), lambda pools, work: pools.run(work)),
        (
            lambda store: StoreCalls(store, CompactionConfig()),
            lambda pools, work: pools.write(1, work),
        ),
    ],
    ids=["brokers", "compactors"],
)
async def test_what_a_call_looked_at_is_gone_when_it_has_ended(
    pools: Callable[[MemoryObjectStore], Pools],
    run: Callable[[Pools, Callable[[], int]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, seen = asyncio.get_running_loop(), threading.Event()
    tell = loop.call_soon_threadsafe

    def tell_and_pause(*args: Any, **kwargs: Any) -> None:
        """Be a thread that gets no turn for a while, once it has told the loop of its end."""
        tell(*args, **kwargs)
        assert seen.wait(10)

    monkeypatch.setattr(loop, "call_soon_threadsafe", tell_and_pause)
    threads = pools(MemoryObjectStore())
    buffer = Buffer()
    there = weakref.ref(buffer)
    loop.call_soon(buffer.may_end.set)  # when the call is waited for
    try:
        ended = run(threads, buffer.look_at)
        del buffer

        assert await ended == 1

        del ended
        assert there() is None
    finally:
        seen.set()
        threads.close()
