"""Read index: reads that wait for a proof of leadership, in rounds that begin with flushes.

A round is a number that the core proves or rejects. Delays between rounds let reads share them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streammeta.controller.errors import NotLeaderError
from streammeta.controller.ids import EndOffset
from streammeta.controller.quorum import events
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.replication.waiters import ReadRounds


class ReadIndex:
    """The read rounds of one replica."""

    def __init__(
        self,
        rounds: ReadRounds,
        clock: Clock,
        *,
        feed: Callable[[events.ReadIndexRequested], None],
        schedule: Callable[[], None],
    ) -> None:
        """`feed` passes events to the core, `schedule` arranges a later call of `begin`."""
        self._rounds = rounds
        self._clock = clock
        self._feed = feed
        self._schedule = schedule
        self._rests = False

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
