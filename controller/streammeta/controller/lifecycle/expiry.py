"""Expires prepared objects whose writers did not commit in time.

Looks at the earliest deadline, never at all objects. Runs only while this node leads; what it
finds is decided by the map like any other request.
"""

import asyncio

import structlog

from streammeta.controller.errors import ApiError
from streammeta.controller.metadata.requests import ExpireObjects
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.controller import MetadataController

EXPIRE_BATCH_MAX = 2_000
"""Objects expired in one log entry."""

_log = structlog.get_logger(component="lifecycle")


class Expiry:
    """A periodic look at the earliest deadline."""

    def __init__(self, controller: MetadataController, clock: Clock, interval_ms: int) -> None:
        self._controller = controller
        self._clock = clock
        self._interval_ms = interval_ms

    async def run(self) -> None:
        """Expire what is due, every interval, until cancelled."""
        while True:
            await self._expire_due()
            await asyncio.sleep(self._interval_ms / 1000)

    async def _expire_due(self) -> None:
        while self._controller.is_active and self._is_due():
            try:
                await self._controller.write(ExpireObjects(limit=EXPIRE_BATCH_MAX))
            except ApiError as error:
                _log.info("expiry_postponed", reason=str(error))
                return

    def _is_due(self) -> bool:
        deadline = self._controller.cluster_map.prepared_deadline()
        return deadline is not None and deadline < self._clock.wall_ms()
