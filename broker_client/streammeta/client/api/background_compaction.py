"""Compaction that a broker carries out by itself, every twenty minutes unless told otherwise.

Owns the schedule and what a failure means for the next cycle. Others may compact the same node
meanwhile, by `compact` or from outside: the controllers accept the first commit of each object.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from streammeta.client.compaction.runner import BARRED
from streammeta.client.errors import BrokerClientError
from streammeta.storage.errors import StorageError, WrongBucketError

INTERVAL_S = 20 * 60.0
"""Time between the beginnings of two cycles."""

CLOSE_S = 5.0
"""Time that the end of a cycle under way is waited for, in seconds."""

_log = logging.getLogger(__name__)


class BackgroundCompaction:
    """Runs `cycle` every `interval_s` seconds, from `start` to `close`.

    The first one comes after half of the interval to all of it, at random, so that brokers that
    were started together do not compact together.
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
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End; a cycle under way is given up, and changes nothing that it has not committed.

        Calls of the store can't be stopped: the cycle is left alone if they take too long.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await self._sleep(self._interval_s * self._rng.uniform(0.5, 1.0))
        while True:
            began = loop.time()
            if not await self._is_to_go_on():
                return
            rest_s = self._interval_s * self._rng.uniform(0.9, 1.1) - (loop.time() - began)
            await self._sleep(max(0.0, rest_s))

    async def _is_to_go_on(self) -> bool:
        """Run one cycle; return whether another may succeed."""
        try:
            await self._cycle()
        except (*BARRED, WrongBucketError) as error:
            _log.warning("compaction in the background ends: %s", error)
            return False
        except (BrokerClientError, StorageError) as error:
            _log.warning("compaction failed, trying again in %g s: %s", self._interval_s, error)
        except Exception:  # noqa: BLE001 - a defect of one cycle must not stop the others
            _log.exception("compaction failed unexpectedly, trying again in %g s", self._interval_s)
        return True
