"""Bound on the work of requests that start in one turn of the event loop."""

from __future__ import annotations

import asyncio

from streammeta.brokers.kafka.protocol.request_elements import ELEMENTS_MAX

TURN_WORK_MAX = ELEMENTS_MAX
"""Maximum work per turn: one request with the most elements, or many small ones."""


class RequestTurns:
    """Turns of the event loop, shared by connections in the order in which they ask."""

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._begun = 0

    async def wait(self, frame_bytes: int) -> None:
        """Wait until a request of this size may start. Every element has at least one byte."""
        work = min(frame_bytes, ELEMENTS_MAX)
        async with self._order:
            if self._begun + work > TURN_WORK_MAX:
                # Other connections and heartbeats run before the next request is parsed.
                await asyncio.sleep(0)
                self._begun = 0
            self._begun += work
