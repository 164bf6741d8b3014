"""Event that a signal handler may set.

Handlers run in the main thread between any two steps. A handler that sets a `threading.Event` on
which that thread is about to wait finds the lock of the event taken, and both block forever.
"""

from __future__ import annotations

import contextlib
import queue
import time

_WAIT_S = 0.5  # also the longest delay of a signal that interrupts no wait


class SignalEvent:
    """Subset of `threading.Event`. Only one thread may wait."""

    def __init__(self) -> None:
        self._is_set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may break into `get`

    def set(self) -> None:
        """Set the event, and wake the waiting thread."""
        # The flag comes first: a thread that is woken must already see it.
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        """Return True once the event was set."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Wait until the event is set, at most `timeout` seconds. Return whether it is set."""
        deadline = time.monotonic() + timeout
        # The flag decides, because a wake-up is used up by one wait.
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            # Never one long wait: a signal that arrives just before it, or at another thread, does
            # not interrupt it, and the handler runs only after it.
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=min(left, _WAIT_S))
        return self._is_set
