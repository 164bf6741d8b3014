"""Budget of work for each turn of the event loop, shared by many tasks in the order they ask.

Tasks that wake together would otherwise all do their work in one turn, and nothing else would run
until the last of them is done. Costs are in whatever unit the owner chooses.
"""

from __future__ import annotations

import asyncio
from collections import deque


class TurnBudget:
    """So much work a turn; what a task takes beyond that is paid for by the turns after it."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def take(self, cost: int) -> None:
        """Return in a turn that has room for more work; at once if this one has."""
        if self._left > 0 and not self._waiting:
            self._left -= cost
            self._schedule()
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, granted))
        await granted

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._left = min(self._per_turn, self._left + self._per_turn)
        while self._waiting and self._left > 0:
            cost, granted = self._waiting.popleft()
            if not granted.done():
                self._left -= cost
                granted.set_result(None)
        if self._left < self._per_turn:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)
