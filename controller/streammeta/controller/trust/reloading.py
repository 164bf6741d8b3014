"""Files that may be replaced while a controller runs: when they are looked at.

Knows neither the files nor what a change of them means.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog

_log = structlog.get_logger(component="server")


class Reloading:
    """Calls every one of `looks` in a thread, once in `interval_ms` and whenever it is asked."""

    def __init__(self, interval_ms: int, looks: Sequence[Callable[[], None]]) -> None:
        self._interval_s = interval_ms / 1000
        self._looks = looks
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Look now."""
        self._asked.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            self._asked.clear()
            # Each on its own, so that one broken file does not hide the changes of others.
            for look in self._looks:
                try:
                    await asyncio.to_thread(look)
                except Exception as error:  # noqa: BLE001 - the files in use stay in use
                    _log.error("files_not_looked_at", exc_info=error)
