"""The controller's only clocks: monotonic time for timers, wall time for what records say."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from; a test's clock stands still until it is moved."""

    def monotonic_ms(self) -> int:
        """Milliseconds that never run backwards; the origin means nothing."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, as operators read them."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ms(self) -> int:
        """Milliseconds that never run backwards; the origin means nothing."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch, as operators read them."""
        return time.time_ns() // 1_000_000
