"""Bounds on epochs, so that no caller can spend them: a larger one can always be chosen.

Callers choose the epochs of their processes and streams: counters, or times. With the largest
number there is, one call would lock out every later owner for ever. Up to `FREE_MAX` an epoch may
be anything, above it only a little more than the present one. Judged when a request is decided:
records of the past are replayed as they are.
"""

from __future__ import annotations

from streammeta.controller.errors import InvalidRequestError

FREE_MAX = 1 << 62
"""Largest epoch of free choice: a time in ns stays below until the year 2116, one in ms longer."""

STEP_MAX = 1 << 32
"""Maximum growth above `FREE_MAX`, where a thousand million steps are left."""


def check_growth(field: str, epoch: int, present: int) -> None:
    """Require that an epoch is no further above the present one than it may be.

    Raises:
        InvalidRequestError: it is.
    """
    most = max(FREE_MAX, present + STEP_MAX)
    if epoch > most:
        raise InvalidRequestError(
            field, f"{epoch}; must be at most {most}, so that a larger one can follow"
        )
