"""Who may append now, and who waits so that many share one batch.

A batch costs every replica about the same however much is in it. While enough of them are under way
another would only queue up behind them, so whoever wants to append waits for the next one to be
committed; then all who waited append in one turn of the event loop. Knows nothing of the log.
"""

from __future__ import annotations

import asyncio

BATCHES_UNDER_WAY_MAX = 2
"""One on the disks and the network, one behind it so that they never run idle."""


class AppendTurns:
    """Callers that wait for their turn."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

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
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
