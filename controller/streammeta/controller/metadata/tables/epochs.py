"""Bounds on epochs, so that no caller can exhaust them: a larger one is always possible.

Callers choose the epochs of their processes and streams: counters, or times. A caller that used the
largest possible number would lock out every later owner forever. Up to `FREE_MAX` any epoch is
allowed, above it only a little more than the present one. The bound applies to new requests only:
old records are replayed unchanged.
"""

from __future__ import annotations

from streammeta.controller.errors import InvalidRequestError

FREE_MAX = 1 << 62
"""Largest freely chosen epoch. Times in ns stay below it until the year 2116."""

STEP_MAX = 1 << 32
"""Maximum growth above `FREE_MAX`, which leaves a thousand million steps."""


def check_growth(field: str, epoch: int, present: int) -> None:
    """Require that an epoch exceeds the present one by no more than allowed.

    Raises:
        InvalidRequestError: it is too large.
    """
    most = max(FREE_MAX, present + STEP_MAX)
    if epoch > most:
        raise InvalidRequestError(
            field, f"{epoch} must be at most {most}, so that a larger one can follow"
        )
