"""An event that a signal's handler may set.

Handlers run in the main thread, between any two steps of it: one that sets a `threading.Event` on
which that thread is about to wait finds the event's lock held, and neither goes on.
"""

from __future__ import annotations

import contextlib
import queue


class SignalEvent:
    """See `threading.Event`, of which it has the methods in use; one thread may wait."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may break into `get`

    def set(self) -> None:
        """Set the event, and wake the thread that waits."""
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        """Return True once the event was set."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Wait until the event is set, at most `timeout` seconds; returns whether it is."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=timeout)
        return self._is_set
