"""Virtual time, clocks that run at different speeds, the trace of a run, and its violations."""

import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

EVENTS_MAX = 100_000
"""More events than any run needs: something goes round in circles."""


class Timeline:
    """Actions waiting for their virtual millisecond."""

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` after `delay` virtual milliseconds, after all that was due then already."""
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay, self._sequence, action))

    def run_until(self, done: Callable[[], bool], within_ms: int) -> bool:
        """Let things happen until `done`; return whether it was in time."""
        queue, deadline = self._queue, self.now + within_ms
        while not done():
            if not queue or queue[0][0] > deadline:
                return False
            self.now, _, action = heapq.heappop(queue)
            action()
            self.events += 1
            check(self.events < EVENTS_MAX, "no busy loop", f"{EVENTS_MAX} events")
        return True


@dataclass(frozen=True, slots=True)
class NodeClock:
    """A monotonic clock that began elsewhere and is a little fast or slow."""

    offset: int
    rate: int = 1000
    """Milliseconds it shows in a thousand."""

    def show(self, now: int) -> int:
        """What it shows at virtual time `now`."""
        return self.offset + now * self.rate // 1000

    def when(self, shown: int) -> int:
        """The first virtual time at which it shows `shown` or more."""
        return -((self.offset - shown) * 1000 // self.rate)


class Violation(Exception):  # noqa: N818 (the simulator's word for it)
    """An invariant does not hold; the message begins with its name."""


def check(condition: object, invariant: str, detail: str) -> None:
    """Raise unless the condition holds; for hot paths, test first and call `violated`."""
    if not condition:
        violated(invariant, detail)


def violated(invariant: str, detail: str) -> NoReturn:
    raise Violation(f"{invariant}: {detail}")


KEPT = 50
"""Lines that a failure prints."""


class Trace:
    """Lines of one run; taken only when a run is looked at, for they cost much."""

    def __init__(self, kept: int = KEPT) -> None:
        self.lines: deque[str] = deque(maxlen=kept)
        self._hash = hashlib.sha256()

    def add(self, line: str) -> None:
        self.lines.append(line)
        self._hash.update(line.encode())

    def digest(self) -> str:
        """A hash of every line there ever was."""
        return self._hash.hexdigest()
