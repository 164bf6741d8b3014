"""Clocks of the controller: monotonic time for timers, wall time for records."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. A test's clock only advances when it is moved."""

    def monotonic_ms(self) -> int:
        """Return milliseconds that never decrease, from an arbitrary origin."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ms(self) -> int:
        """Return milliseconds that never decrease, from an arbitrary origin."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000


# CLOCK_MONOTONIC stops during suspension on Linux, and a lease must not.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock_ms() -> int:
    """Return milliseconds that never decrease and continue while the machine is suspended."""
    return time.clock_gettime_ns(_SINCE_BOOT) // 1_000_000
