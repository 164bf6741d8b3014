"""Work of requests that begins in one turn of the event loop, over all connections."""

from __future__ import annotations

import asyncio

from streammeta.brokers.kafka.protocol.request_elements import ELEMENTS_MAX

WORK_A_TURN = ELEMENTS_MAX
"""Work that may begin in one turn: one request of the most elements, or many small ones."""


class RequestTurns:
    """Turns of the event loop, shared by connections in the order in which they ask."""

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._begun = 0

    async def wait(self, frame_bytes: int) -> None:
        """Wait until a request of so many bytes may begin; each element has at least one byte."""
        work = min(frame_bytes, ELEMENTS_MAX)
        async with self._order:
            if self._begun + work > WORK_A_TURN:
                await asyncio.sleep(0)
                self._begun = 0
            self._begun += work
