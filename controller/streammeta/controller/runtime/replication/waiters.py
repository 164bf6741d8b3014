"""Callers that wait on the event loop: for a key, for an offset of the log, or for a read round.

Owns the futures and their order. A read round is a number for which the core proves or rejects
leadership. Rounds begin with flushes, and delays between them let reads share them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import EndOffset
from streammeta.controller.quorum import events
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.quorum_errors import TooManyReadsError

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class WaiterMap(Generic[Key, Result]):
    """Futures by key. An answer without a waiting caller is dropped."""

    def __init__(self) -> None:
        self._futures: dict[Key, asyncio.Future[Result]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def expect(self, key: Key) -> asyncio.Future[Result]:
        """Return a future for the answer to `key`, which replaces an older one."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

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
            future.exception()  # marked as retrieved, because the caller may be cancelled

    def fail_all(self, error: Exception) -> None:
        """Fail all futures."""
        for key in list(self._futures):
            self.fail(key, error)


COMPLETED_PER_TURN = 32
"""Callers woken in one event loop turn."""


class OffsetWaiters:
    """Futures by the log offset that they wait for.

    An event loop turn completes a bounded number of them. A woken caller's work costs much more
    than waking it, and the quorum's messages must be sent in between.
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
        self._count += 1  # breaks ties between equal offsets: first come, first served
        heappush(self._waiting, (end_offset, self._count, future))
        return future

    def forget(self, future: asyncio.Future[None]) -> None:
        """Remove a future, in time proportional to the number of futures."""
        # Rare: only callers whose deadline passes before the commit leave early.
        self._waiting = [entry for entry in self._waiting if entry[2] is not future]
        heapify(self._waiting)

    def release(self, end_offset: int) -> None:
        """Complete the futures for offsets up to `end_offset`, in order, starting in this turn."""
        self._reached = max(self._reached, end_offset)
        if self._waiting or self._failed:
            self._complete_if_idle()

    def fail_all(self, error: Exception) -> None:
        """Fail every future that is not released yet, because its outcome is unknown here."""
        # Released futures are still completed successfully: their entries are committed.
        failed = sorted(entry for entry in self._waiting if entry[0] > self._reached)
        self._waiting = [entry for entry in self._waiting if entry[0] <= self._reached]
        heapify(self._waiting)
        # In turns as well, because a failed caller also has work to do.
        self._failed.extend((future, error) for _, _, future in failed)
        self._complete_if_idle()

    def _complete_if_idle(self) -> None:
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
        """Complete one waiting caller. Returns False if there is none."""
        while self._waiting and self._waiting[0][0] <= self._reached:
            _, _, future = heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return True
        while self._failed:
            future, error = self._failed.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # marked as retrieved, because the caller may be cancelled
                return True
        return False


REST_A_READ_MS = 0.5
"""Delay per read of a round of several, in milliseconds: about their cost to the leader."""

ROUND_REST_MS = 4
"""Maximum delay between the starts of two rounds, the first with several reads."""


class FlushWaiters:
    """Callbacks for the flush of a leader's log up to an offset.

    Only traced writes register here. The flushed end may decrease between two terms, so it is not
    remembered.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def tell(self, end_offset: int, flushed_end: int, told: Callable[[], None]) -> None:
        """Call `told` once `end_offset` is flushed, or immediately if it already is."""
        self._waiting.append((end_offset, told))
        self.release(flushed_end)

    def release(self, flushed_end: int) -> None:
        """Run the callbacks for offsets up to `flushed_end`."""
        if not self._waiting:
            return
        # A callback may register another one.
        waiting, self._waiting = self._waiting, []
        for end_offset, told in waiting:
            if end_offset > flushed_end:
                self._waiting.append((end_offset, told))
            else:
                told()

    def forget_all(self) -> None:
        """Drop all callbacks, because this node no longer leads."""
        self._waiting.clear()


class ReadRounds:
    """Rounds of linearizable reads: at most one in progress, and the next one collecting reads.

    A round proves leadership from its beginning on, for every read that arrived before. A read
    therefore joins the next round and never the one in progress, which may have been echoed before
    the read arrived: everything acknowledged by then could be another leader's. However many reads
    wait, the voters are asked once for all of them.

    After a round of several reads the next one waits a little, to collect more of them. A round
    costs the voters the same for one read as for hundreds, at the expense of the reads that are
    being answered. The wait is about as long as answering them takes, so a few readers hardly wait,
    and a lone reader never does.

    A round ends when the core returns the offset that its reads must have applied, or can't prove
    leadership. An event loop turn wakes a bounded number of its reads.
    """

    def __init__(self, max_waiting: int) -> None:
        """Limit the number of reads that wait in both rounds together."""
        self._max_waiting = max_waiting
        self._forming: list[asyncio.Future[EndOffset]] = []
        self._under_way: list[asyncio.Future[EndOffset]] = []
        self._proven: deque[tuple[asyncio.Future[EndOffset], EndOffset]] = deque()
        self._is_scheduled = False
        self._last = 0
        """Number of the last round that began."""
        self._rests_until = 0

    def rest_ms(self, now_ms: int) -> int | None:
        """Return how long the open round still has to wait, 0 if it may begin.

        None if no read waits for one, or a round is in progress.
        """
        if not self._forming or self._under_way:
            return None
        return max(0, self._rests_until - now_ms)

    def join(self) -> asyncio.Future[EndOffset]:
        """Return a future of the open round for this caller.

        Raises:
            TooManyReadsError: too many reads are waiting.
        """
        waiting = len(self._forming) + len(self._under_way) + len(self._proven)
        # Without a majority no round ends, and reads would pile up.
        if waiting >= self._max_waiting:
            raise TooManyReadsError(
                f"{waiting} reads wait for a majority of the voters, and the limit is "
                f"{self._max_waiting}: retry later"
            )
        read: asyncio.Future[EndOffset] = asyncio.get_running_loop().create_future()
        self._forming.append(read)
        return read

    def begin(self, now_ms: int) -> int | None:
        """Begin the open round and return its number, None if it may not begin yet."""
        if self.rest_ms(now_ms) != 0:
            return None
        self._under_way, self._forming = self._forming, []
        # A lone read gains nothing from a pause.
        if (count := len(self._under_way)) > 1:
            self._rests_until = now_ms + min(ROUND_REST_MS, int(count * REST_A_READ_MS))
        self._last += 1
        return self._last

    def proven(self, round_: int, index: EndOffset) -> None:
        """Release the reads of a round, in order, starting in this turn."""
        self._proven.extend((read, index) for read in self._end(round_))
        if not self._is_scheduled:
            self._release_some()

    def refused(self, round_: int, error: Exception) -> None:
        """Fail the reads of a round."""
        _fail_reads(self._end(round_), error)

    def refuse_forming(self, error: Exception) -> None:
        """Fail the reads whose round has not begun."""
        forming, self._forming = self._forming, []
        _fail_reads(forming, error)

    def close(self, error: Exception) -> None:
        """Fail all reads."""
        self.refused(self._last, error)
        self.refuse_forming(error)

    def _release_some(self) -> None:
        self._is_scheduled = False
        for _ in range(min(len(self._proven), COMPLETED_PER_TURN)):
            read, index = self._proven.popleft()
            if not read.done():
                read.set_result(index)
        if self._proven:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._release_some)

    def _end(self, round_: int) -> list[asyncio.Future[EndOffset]]:
        """Return the reads of a round that has ended, none if it had ended before."""
        # An answer for an earlier round says nothing about the reads of this one.
        if round_ != self._last:
            return []
        ended, self._under_way = self._under_way, []
        return ended


def _fail_reads(reads: list[asyncio.Future[EndOffset]], error: Exception) -> None:
    for read in reads:
        if not read.done():
            read.set_exception(error)
            read.exception()  # marked as retrieved, because the caller may be cancelled


@dataclass(eq=False)
class ReadIndex:
    """The read rounds of one replica."""

    _rounds: ReadRounds
    _clock: Clock
    _feed: Callable[[events.ReadIndexRequested], None]
    """Passes events to the core."""
    _schedule: Callable[[], None]
    """Arranges a later call of `begin`."""
    _rests: bool = field(init=False, default=False)

    def join(self) -> asyncio.Future[EndOffset]:
        """Return a future of the open round. Raises TooManyReadsError."""
        proof = self._rounds.join()
        self._schedule_round()
        return proof

    def begin(self) -> None:
        """Begin the open round if it may begin."""
        if (read_id := self._rounds.begin(self._clock.monotonic_ms())) is not None:
            self._feed(events.ReadIndexRequested(read_id))

    def proven(self, done: events.ReadIndexReady) -> None:
        """Release the reads of a round."""
        self._rounds.proven(done.read_id, done.index)
        # Reads that arrived during the round wait for the next one, because this proof began before
        # them.
        self._schedule_round()

    def refused(self, done: events.ReadIndexRejected, error: NotLeaderError) -> None:
        """Fail the reads of a round."""
        self._rounds.refused(done.read_id, error)
        self._schedule_round()

    def refuse_forming(self, error: NotLeaderError) -> None:
        """Fail the reads whose round has not begun."""
        self._rounds.refuse_forming(error)

    def close(self, error: Exception) -> None:
        """Fail all reads."""
        self._rounds.close(error)

    def _schedule_round(self) -> None:
        """Begin a round in a later turn, with all reads that arrive in this one, if it may."""
        rest_ms = self._rounds.rest_ms(self._clock.monotonic_ms())
        if rest_ms == 0:
            self._schedule()
        # One timer serves all reads that arrive during the pause.
        elif rest_ms is not None and not self._rests:
            self._rests = True
            asyncio.get_running_loop().call_later(rest_ms / 1000, self._end_rest)

    def _end_rest(self) -> None:
        self._rests = False
        self._schedule_round()
