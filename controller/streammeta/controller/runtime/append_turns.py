"""Who may append now, and who waits so that many share one batch.

A batch costs every replica about the same however much is in it. While enough of them are under way
another would only queue up behind them, so whoever wants to append waits for the next one to be
committed; then those who waited append in the same turn of the event loop, or in the next ones if
they are very many. Knows nothing of the log.
"""

from __future__ import annotations

import asyncio
from collections import deque

BATCHES_UNDER_WAY_MAX = 2
"""One on the disks and the network, one behind it so that they never run idle."""

GIVEN_PER_TURN = 128
"""Callers that may append in one turn of the event loop after having waited."""


class AppendTurns:
    """Callers that wait for their turn."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._given = 0  # of those that wait, from the first: so many may go on
        self._is_scheduled = False

    async def wait(self, batches_under_way: int) -> None:
        """Return at once, or with all others that wait when `give` is called next."""
        if batches_under_way < BATCHES_UNDER_WAY_MAX and not self._waiting:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def give_if(self, batches_under_way: int) -> None:
        """Let all who wait go on if there is room for another batch."""
        if self._waiting and batches_under_way < BATCHES_UNDER_WAY_MAX:
            self.give()

    def give(self) -> None:
        """Let all who wait go on."""
        self._given = len(self._waiting)
        if not self._is_scheduled:
            self._give_some()

    def _give_some(self) -> None:
        self._is_scheduled = False
        awake = 0
        while self._given and awake < GIVEN_PER_TURN:
            turn = self._waiting.popleft()
            self._given -= 1
            if not turn.done():
                turn.set_result(None)
                awake += 1
        if self._given:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._give_some)
