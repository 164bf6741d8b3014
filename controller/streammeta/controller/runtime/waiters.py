"""Callers that wait on the event loop: for a key, for an offset of the log, or for a read round.

Owns the futures and their order; knows neither requests nor the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from streammeta.controller.ids import EndOffset
from streammeta.controller.runtime.quorum_errors import TooManyReadsError

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class WaiterMap(Generic[Key, Result]):
    """Futures by key; an answer without a waiting caller is dropped."""

    def __init__(self) -> None:
        self._futures: dict[Key, asyncio.Future[Result]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def expect(self, key: Key) -> asyncio.Future[Result]:
        """Return a future for the answer to `key`; it replaces an older one."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

    def waiting_for(self, key: Key) -> asyncio.Future[Result]:
        """Return the existing future for `key`."""
        return self._futures[key]

    def forget(self, key: Key, future: asyncio.Future[Result]) -> None:
        """Remove a future, unless a newer one has replaced it."""
        if self._futures.get(key) is future:
            del self._futures[key]

    def answer(self, key: Key, result: Result) -> None:
        """Complete the future for `key` with the result."""
        future = self._futures.pop(key, None)
        if future is not None and not future.done():
            future.set_result(result)

    def fail(self, key: Key, error: Exception) -> None:
        """Fail the future for `key`."""
        future = self._futures.pop(key, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # mark as retrieved: the caller may have been cancelled

    def fail_all(self, error: Exception) -> None:
        """Fail all futures."""
        for key in list(self._futures):
            self.fail(key, error)


COMPLETED_PER_TURN = 32
"""Callers woken in one turn of the event loop."""


class OffsetWaiters:
    """Futures by the log offset they wait for.

    However many an offset releases, a turn of the event loop completes a bounded number: a woken
    caller's work costs much more than its release, and the quorum's messages go in between.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._failed: deque[tuple[asyncio.Future[None], Exception]] = deque()
        self._count = 0
        self._reached = 0
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._failed)

    def until(self, end_offset: int) -> asyncio.Future[None]:
        """Return a future that is done once everything below `end_offset` is reached."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1  # no two entries are equal, and the older comes first
        heappush(self._waiting, (end_offset, self._count, future))
        return future

    def forget(self, future: asyncio.Future[None]) -> None:
        """Remove a future; takes time in proportion to their number."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not future]
        heapify(self._waiting)

    def release(self, end_offset: int) -> None:
        """Complete the futures for offsets up to `end_offset`, in order, from this turn on."""
        self._reached = max(self._reached, end_offset)
        self._go_on()

    def fail_all(self, error: Exception) -> None:
        """Fail every future not released yet: its outcome is no longer known here."""
        failed = sorted(entry for entry in self._waiting if entry[0] > self._reached)
        self._waiting = [entry for entry in self._waiting if entry[0] <= self._reached]
        heapify(self._waiting)
        self._failed.extend((future, error) for _, _, future in failed)
        self._go_on()

    def _go_on(self) -> None:
        if not self._is_scheduled:
            self._complete_some()

    def _complete_some(self) -> None:
        self._is_scheduled = False
        for _ in range(COMPLETED_PER_TURN):
            if not self._complete_next():
                return
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._complete_some)

    def _complete_next(self) -> bool:
        """Complete one waiting caller; False if none is left to complete."""
        while self._waiting and self._waiting[0][0] <= self._reached:
            _, _, future = heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return True
        while self._failed:
            future, error = self._failed.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark as retrieved: the caller may have been cancelled
                return True
        return False


class ReadRounds:
    """Rounds of linearizable reads by number, of which the last may still be forming.

    All reads of one turn of the event loop share a round. A round ends when the core returns the
    offset that its reads must have applied, or can't prove leadership.
    """

    def __init__(self, max_pending: int) -> None:
        """Limit the number of pending rounds."""
        self._max_pending = max_pending
        self._rounds: WaiterMap[int, EndOffset] = WaiterMap()
        self._last = 0
        self._forming: int | None = None

    def join(self) -> asyncio.Future[EndOffset]:
        """Return the future of the forming round; the caller must not cancel it.

        Raises:
            TooManyReadsError: too many rounds wait already.
        """
        if self._forming is not None:
            return self._rounds.waiting_for(self._forming)
        if len(self._rounds) >= self._max_pending:
            raise TooManyReadsError(
                f"{len(self._rounds)} rounds of reads wait for a majority of the voters, at most "
                f"{self._max_pending} may; try again later"
            )
        self._last += 1
        self._forming = self._last
        return self._rounds.expect(self._last)

    def take(self) -> int | None:
        """Close the forming round to further reads; return its number, or None."""
        round_, self._forming = self._forming, None
        return round_

    def proven(self, round_: int, index: EndOffset) -> None:
        """Release the reads of a round."""
        self._rounds.answer(round_, index)

    def refused(self, round_: int, error: Exception) -> None:
        """Fail the reads of a round."""
        self._rounds.fail(round_, error)

    def close(self, error: Exception) -> None:
        """Fail all reads."""
        self._forming = None
        self._rounds.fail_all(error)
