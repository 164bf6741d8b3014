"""Signals between the tasks of a deletion and their driver, on any machines.

A signal is an empty file in a folder of the run, which all machines share like the undo records.
Signals are never removed. A task that sees one late reacts a batch later.

    ending          start no further batch
    busy-TASK-N     the store asked task TASK for fewer requests, for the Nth time
"""

from __future__ import annotations

import threading
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
