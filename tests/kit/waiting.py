"""Waiting for a condition at most a minute, and clocks: one that tests move, and a skewed one."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator

from streammeta.controller.runtime.clock import SystemClock

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


@contextlib.contextmanager
def counted_turns() -> Iterator[list[None]]:
    """Give a list that grows with each turn of the event loop until the block ends."""
    turns: list[None] = []

    async def count() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    try:
        yield turns
    finally:
        counting.cancel()


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
