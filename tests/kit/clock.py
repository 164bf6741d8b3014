"""Clocks of tests: one that stands still until it is moved, and the machine's with time skipped."""

from streammeta.controller.runtime.clock import SystemClock


class ManualClock:
    """Monotonic and wall time that stand still until the test moves them.

    Wall time is ahead of monotonic time by `wall_ahead_ms`, which a test may change.
    """

    def __init__(self, now_ms: int = 1_000_000, wall_ahead_ms: int = 0) -> None:
        self.now_ms = now_ms
        self.wall_ahead_ms = wall_ahead_ms

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms + self.wall_ahead_ms

    def advance(self, ms: int) -> None:
        self.now_ms += ms


class SkippingClock(SystemClock):
    """The machine's clock, ahead by as much as the test has skipped."""

    skipped_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.skipped_ms
