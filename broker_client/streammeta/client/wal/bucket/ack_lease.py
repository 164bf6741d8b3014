"""Lease of a log's process: the time for which its last proof that the log has no seal counts.

A seal keeps the process from creating its next slot, but only while the seal exists. A sweep
removes seals, at the earliest `sweeping.WATCH_S` after another process saw them. So a slot that was
created within the lease can't be in the place of a seal that was removed. After the lease the
process has to look for its claim, which a sweep removes first. The lease counts from the start of
the proof, by a clock that no one sets.
"""

from __future__ import annotations

import time

LEASE_S = 30.0
"""Seconds for which a proof counts; far below the time for which every seal stays."""


def elapsed_s() -> float:
    """Return the seconds of a clock that never steps and, where there is one, counts suspension."""
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)


class AckLease:
    """The newest proof that a log had no seal. Pure; times come from the caller's `elapsed_s`."""

    def __init__(self, proved_at: float) -> None:
        self._proved_at = proved_at
        self._started: dict[int, float] = {}

    def start(self, sequence: int, now: float) -> None:
        """Note when the first attempt to create a slot began."""
        self._started.setdefault(sequence, now)

    def covers(self, now: float) -> bool:
        """Tell whether a slot that is created by `now` needs no other proof."""
        return now - self._proved_at <= LEASE_S

    def renew(self, durable_below: int) -> None:
        """Take the slots below `durable_below`, all of them created, as proofs.

        A seal takes the first slot that is missing. So there was none when the last of these slots
        was created, which was after its first attempt had begun.
        """
        for sequence in [at for at in self._started if at < durable_below]:
            self._proved_at = max(self._proved_at, self._started.pop(sequence))
