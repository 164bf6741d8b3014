"""Lease of a log's process: how long the last proof that the log has no seal is valid.

A seal stops the process from creating its next slot, but only while the seal exists. A sweep
removes seals, at the earliest `sweeping.WATCH_S` after another process saw them. So a slot created
within the lease can't be in the place of a removed seal. After the lease the process has to check
its claim, which a sweep removes first. The lease counts from the start of the proof, by a clock
that is never set.
"""

from __future__ import annotations

import time

LEASE_S = 30.0
"""Validity of a proof in seconds, far below the lifetime of every seal."""


def elapsed_s() -> float:
    """Return the seconds of a clock that never steps and, if possible, counts suspension."""
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot_clock is None else time.clock_gettime(boot_clock)


class AckLease:
    """The newest proof that a log had no seal. Pure. Times come from the caller's `elapsed_s`."""

    def __init__(self, proved_at: float) -> None:
        self._proved_at = proved_at
        self._started: dict[int, float] = {}

    def start(self, sequence: int, now: float) -> None:
        """Record the start of the first attempt to create a slot."""
        self._started.setdefault(sequence, now)

    def covers(self, now: float) -> bool:
        """Return whether a slot created by `now` needs no other proof."""
        return now - self._proved_at <= LEASE_S

    def renew(self, durable_below: int) -> None:
        """Use the slots below `durable_below`, which are all created, as proofs.

        A seal is created in the place of the first missing slot. So there was none when the last of
        these slots was created, which was after its first attempt had started.
        """
        for sequence in [at for at in self._started if at < durable_below]:
            self._proved_at = max(self._proved_at, self._started.pop(sequence))
