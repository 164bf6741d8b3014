"""Waiting for a condition: the test fails if it does not hold within a minute."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_S = 60.0
"""No test fails sooner, however busy the machine is."""


def wait_until(
    condition: Callable[[], bool], what: str = "the condition", patience_s: float = PATIENCE_S
) -> None:
    """Wait in a thread until `condition` holds. A failure names `what` was awaited."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.05)


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    what: str = "the condition",
    patience_s: float = PATIENCE_S,
) -> None:
    """Wait on the event loop until `condition` holds. A failure names `what` was awaited."""
    deadline = time.monotonic() + patience_s
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        await asyncio.sleep(0.002)
