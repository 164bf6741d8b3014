"""Retry policy for work that outlasts the retries of a single store call.

Uploads, slots of a log, reads and compaction share it. The reason of a failure decides first. An
outage, throttling and rejected credentials may pass: clocks are corrected, keys rotated, policies
fixed. A missing or foreign bucket, an invalid request and a damaged object do not pass. Then the
deadline decides, which the caller measures by a monotonic clock. A store may ask for a longer wait,
limited by `RETRY_AFTER_S_MAX` and the deadline: a wrong `Retry-After` of a day must not stop a
broker for a day. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streammeta.storage.backoff import Backoff
from streammeta.storage.errors import StorageError

RETRY_AFTER_S_MAX = 10.0
"""Longest wait accepted from a store's Retry-After, in seconds."""


def asked_wait_s(error: StorageError) -> float:
    """Return the wait in seconds that the store asked for, at most `RETRY_AFTER_S_MAX`."""
    return min(error.retry_after_s or 0.0, RETRY_AFTER_S_MAX)


@dataclass(frozen=True, slots=True)
class Patience:
    """Waits between attempts, in seconds."""

    pauses: Backoff

    def wait_s(
        self,
        error: StorageError,
        attempt: int,
        left_s: float = math.inf,
        random_unit: float = 1.0,
    ) -> float | None:
        """Return the wait after failed attempt `attempt` (0-based), or None to give up.

        `left_s` is the time until the deadline. The last attempt starts at the deadline.
        """
        if not error.may_pass or left_s <= 0:
            return None
        return min(left_s, max(self.pauses.wait(attempt, random_unit), asked_wait_s(error)))
