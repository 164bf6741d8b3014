"""Time that follows a monotonic timer and approaches the wall clock slowly.

Code that deletes or expires by time uses it, so that an operator has time to notice a wrong clock.
It never jumps and never runs backwards.
"""

from __future__ import annotations

from collections.abc import Callable

REPORTED_JUMP_MS = 60_000
"""Smallest jump of the wall clock that is reported, in milliseconds."""


class SteadyTime:
    """Time in ms since 1970 from `start_ms` on.

    It is corrected towards `wall_ms` by at most the share `1 / slew` of the elapsed time. `on_jump`
    receives the size of each jump of the wall clock and the clock's lead after it.
    """

    def __init__(
        self,
        monotonic_ms: Callable[[], int],
        wall_ms: Callable[[], int],
        on_jump: Callable[[int, int], None],
        *,
        start_ms: int,
        slew: int,
    ) -> None:
        self._monotonic_ms = monotonic_ms
        self._wall_ms = wall_ms
        self._on_jump = on_jump
        self._slew = slew
        self._read_ms = monotonic_ms()
        self._now_ms = start_ms
        self._ahead_ms = wall_ms() - start_ms

    def now_ms(self) -> int:
        """Return the time in milliseconds since 1970."""
        read_ms = self._monotonic_ms()
        passed_ms = read_ms - self._read_ms
        ahead_ms = self._wall_ms() - self._now_ms - passed_ms
        self._report(ahead_ms)

        # Rounding down would lose corrections below a millisecond, so they accumulate.
        most = passed_ms // self._slew
        if not most:
            return self._now_ms + passed_ms
        # Within the share in both directions, so time never stops or runs backwards.
        correction_ms = max(-most, min(most, ahead_ms))
        self._now_ms += passed_ms + correction_ms
        self._read_ms = read_ms
        self._ahead_ms = ahead_ms - correction_ms
        return self._now_ms

    def _report(self, ahead_ms: int) -> None:
        """Report each jump once, with its size."""
        jump_ms = ahead_ms - self._ahead_ms
        # Smaller ones are corrections by NTP.
        if abs(jump_ms) >= REPORTED_JUMP_MS:
            self._ahead_ms = ahead_ms
            self._on_jump(jump_ms, ahead_ms)
