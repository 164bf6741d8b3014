"""Pace of a task's deletions, and signals between tasks and their driver, on any machines.

A busy store lowers the pace for a while.

A signal is an empty file in a folder of the run, which all machines share like the undo records.
Signals are never removed. A task that sees one late reacts a batch later.

    ending          start no further batch
    busy-TASK-N     the store asked task TASK for fewer requests, for the Nth time
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ENDING = "ending"
_BUSY = "busy-"
# Soon for a person, and a rare look at the callback.
_LOOK_S = 0.2


class RunSignals:
    """Signals of a run, as one task sees and sends them."""

    def __init__(self, folder: Path, task: str) -> None:
        self._folder = folder
        self._task = task
        self._sent = 0
        self._seen: set[str] = set()

    def is_ending(self) -> bool:
        """Return whether the run should end."""
        return (self._folder / _ENDING).exists()

    def send_busy(self) -> None:
        """Signal to all other tasks that the store asks for fewer requests."""
        _send(self._folder, f"{_BUSY}{self._task}-{self._sent:06d}")
        self._sent += 1
        self._look()

    def others_were_busy(self) -> bool:
        """Return whether another task has signalled a busy store since the last look."""
        return any(not name.startswith(f"{_BUSY}{self._task}-") for name in self._look())

    def _look(self) -> set[str]:
        """Return the names of new signals of a busy store."""
        found = {path.name for path in self._folder.glob(f"{_BUSY}*")} - self._seen
        self._seen |= found
        return found


@contextmanager
def relayed(is_ending: Callable[[], bool], folder: Path) -> Iterator[None]:
    """Signal the tasks during the block, soon after `is_ending` becomes true."""
    if is_ending():
        _send(folder, _ENDING)
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            if is_ending():
                _send(folder, _ENDING)
                return

    # A thread, because the block waits inside Spark or a loop of deletions.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        is_over.set()
        looking.join()


def _send(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()


# The limit of S3's DeleteObjects.
LARGEST_BATCH = 1000
"""Maximum number of keys in a request to delete."""


class Pacer:
    """Rate limiter: at most `keys_per_s` keys on average.

    Each time the store asks for fewer requests, the rate is halved, down to one key per second. It
    grows back by a sixteenth of the limit with each accepted batch.
    """

    def __init__(
        self,
        keys_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._whole = keys_per_s
        self._keys_per_s = keys_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    @property
    def batch_size(self) -> int:
        """Largest batch: the keys of one second."""
        return max(1, min(LARGEST_BATCH, int(self._keys_per_s)))

    def slow_down(self) -> None:
        """Halve the rate."""
        # Never 0: the run has to notice when the store recovers.
        self._keys_per_s = max(min(1.0, self._whole), self._keys_per_s / 2)

    def speed_up(self) -> None:
        """Raise the rate, up to the limit."""
        self._keys_per_s = min(self._whole, self._keys_per_s + self._whole / 16)

    def wait_for(self, keys: int) -> None:
        """Wait until the rate limit allows more keys, and count `keys`."""
        wait = self._free_at - self._clock()
        if wait > 0:
            self._sleep(wait)
        # Unused time does not accumulate, so a pause is not followed by a burst.
        self._free_at = max(self._free_at, self._clock()) + keys / self._keys_per_s
