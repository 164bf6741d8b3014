"""Signals that end a controller: the first asks it to, the second hurries it, the third kills it.

SIGINT and SIGTERM count alike, from the start on: a process that is the first of its container is
not ended by them otherwise. Signals are taken while a long call keeps the event loop as well.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

import structlog

NUMBERS = (signal.SIGINT, signal.SIGTERM)

_log = structlog.get_logger(component="server")


class StopSignals:
    """Signals of this process so far: none, a stop, an immediate stop."""

    def __init__(self) -> None:
        """Install the handlers. Must be called on the event loop of the main thread."""
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        """Set at the second signal: the stop waits for no client and no other replica."""
        self.on_asked: Callable[[], None] = _do_nothing
        """Called on the event loop at the first signal."""
        self._came = 0
        self._loop = asyncio.get_running_loop()
        for number in NUMBERS:
            # Not the event loop's handlers: they would run only after a long call has ended.
            signal.signal(number, self._on_signal)

    @property
    def are_there(self) -> bool:
        """Whether a signal has come, though the event loop had no turn since."""
        return self._came > 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._came += 1
        # From the third signal on the kernel ends the process, even if the event loop hangs.
        if self._came == 2:
            for number in NUMBERS:
                signal.signal(number, signal.SIG_DFL)
        # The plain call_soon would not wake a loop that sleeps.
        self._loop.call_soon_threadsafe(self._tell, self._came, signal.Signals(number).name)

    def _tell(self, count: int, name: str) -> None:
        if count == 1:
            _log.info("controller_stopping", signal=name)
            self.on_asked()
            self.asked.set()
        else:
            _log.info("controller_stop_hurried", signal=name)
            self.hurried.set()


def _do_nothing() -> None:
    """Do nothing: nothing has started yet."""
