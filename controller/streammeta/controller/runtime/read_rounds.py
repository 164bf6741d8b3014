"""Linearizable reads that wait for the proof that this node leads, many to a round.

All reads of one turn of the event loop share a round. A round is over when the core says how far
its reads must have applied, or that it can't prove leadership.
"""

from __future__ import annotations

import asyncio

from streammeta.controller.ids import EndOffset
from streammeta.controller.runtime.quorum_errors import TooManyReadsError
from streammeta.controller.runtime.waiting import WaitingCallers


class ReadRounds:
    """Rounds by number, of which the last may still be forming."""

    def __init__(self, max_pending: int) -> None:
        """Let at most `max_pending` rounds wait at a time."""
        self._max_pending = max_pending
        self._rounds: WaitingCallers[int, EndOffset] = WaitingCallers()
        self._last = 0
        self._forming: int | None = None

    def join(self) -> asyncio.Future[EndOffset]:
        """Return the future of the round that is forming; the caller must not cancel it.

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
        """Return the number of the round that was forming, if any; no read joins it any more."""
        round_, self._forming = self._forming, None
        return round_

    def proven(self, round_: int, index: EndOffset) -> None:
        """Let the reads of a round go on."""
        self._rounds.answer(round_, index)

    def refused(self, round_: int, error: Exception) -> None:
        """Fail the reads of a round."""
        self._rounds.fail(round_, error)

    def close(self, error: Exception) -> None:
        """Fail all reads."""
        self._forming = None
        self._rounds.fail_all(error)
