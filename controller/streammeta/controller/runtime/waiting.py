"""Callers that wait for what the quorum makes of their requests, by the number of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class WaitingCallers(Generic[Key, Result]):
    """Futures by key. An answer nobody waits for, or waits for no more, is dropped."""

    def __init__(self) -> None:
        self._futures: dict[Key, asyncio.Future[Result]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def expect(self, key: Key) -> asyncio.Future[Result]:
        """Return a future for the answer to `key`; it takes the place of an older one."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

    def waiting_for(self, key: Key) -> asyncio.Future[Result]:
        """Return the future that waits for `key`, which somebody must."""
        return self._futures[key]

    def forget(self, key: Key, future: asyncio.Future[Result]) -> None:
        """Wait no more, unless somebody else waits for the key by now."""
        if self._futures.get(key) is future:
            del self._futures[key]

    def answer(self, key: Key, result: Result) -> None:
        """Give whoever waits for `key` the result."""
        future = self._futures.pop(key, None)
        if future is not None and not future.done():
            future.set_result(result)

    def fail(self, key: Key, error: Exception) -> None:
        """Fail whoever waits for `key`."""
        future = self._futures.pop(key, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # seen: nobody may be waiting any more

    def fail_all(self, error: Exception) -> None:
        """Fail all."""
        for key in list(self._futures):
            self.fail(key, error)
