"""Background compaction of a broker, by default every twenty minutes.

Owns the schedule and the effect of a failure on the next cycle. Others may compact the same node at
the same time, by `compact` or from outside: the controllers accept the first commit of each object.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from streammeta.client.compaction.runner import FENCED
from streammeta.client.errors import BrokerClientError
from streammeta.storage.errors import StorageError, WrongBucketError

INTERVAL_S = 20 * 60.0
"""Time between the beginnings of two cycles."""

CLOSE_S = 5.0
"""Time that `close` waits for the end of a running cycle, in seconds."""

_log = logging.getLogger(__name__)


class BackgroundCompaction:
    """Runs `cycle` every `interval_s` seconds, from `start` to `close`.

    The first cycle starts after a random part of the interval, at least half of it, so that brokers
    that started together do not compact together.
    """

    def __init__(
        self,
        cycle: Callable[[], Awaitable[object]],
        interval_s: float,
        *,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cycle = cycle
        self._interval_s = interval_s
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the cycles."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. A running cycle is cancelled, and keeps only the changes it has committed.

        Calls of the store can't be cancelled, so `close` does not wait for long ones.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await self._sleep(self._interval_s * self._rng.uniform(0.5, 1.0))
        while True:
            began = loop.time()
            if not await self._run_cycle():
                return
            # The interval includes the cycle, so a long cycle does not slow down the schedule.
            rest_s = self._interval_s * self._rng.uniform(0.9, 1.1) - (loop.time() - began)
            await self._sleep(max(0.0, rest_s))

    async def _run_cycle(self) -> bool:
        """Run one cycle and return whether another may succeed."""
        try:
            await self._cycle()
        except (*FENCED, WrongBucketError) as error:
            _log.warning("background compaction stopped: %s", error)
            return False
        except (BrokerClientError, StorageError) as error:
            _log.warning("compaction failed, retrying in %g s: %s", self._interval_s, error)
        except Exception:  # noqa: BLE001 - a defect of one cycle must not stop the others
            _log.exception("compaction failed unexpectedly, retrying in %g s", self._interval_s)
        return True
