"""Keys in order, such that neither a change nor a page of a listing examines all of them.

Keys are in runs of bounded length. The module does not depend on the meaning of keys.
"""

import bisect
from collections.abc import Iterable, Iterator
from typing import TypeAlias

Key: TypeAlias = tuple[str, str]

RUN_KEYS = 1_024
"""Maximum number of keys in a run. A full one is split in two."""


class SortedKeys:
    """A sorted set of keys."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        ordered, size = sorted(keys), RUN_KEYS // 2
        self._runs = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        self._firsts = [run[0] for run in self._runs]

    def add(self, key: Key) -> None:
        """Add a new key."""
        if not self._runs:
            self._runs, self._firsts = [[key]], [key]
            return
        number = self._number(key)
        run = self._runs[number]
        bisect.insort(run, key)
        if len(run) > RUN_KEYS:
            # Bounded runs keep insertions cheap however many keys exist.
            half = len(run) // 2
            self._runs.insert(number + 1, run[half:])
            self._firsts.insert(number + 1, run[half])
            del run[half:]
        self._firsts[number] = run[0]

    def remove(self, key: Key) -> None:
        """Remove an existing key."""
        number = self._number(key)
        run = self._runs[number]
        del run[bisect.bisect_left(run, key)]
        if run:
            self._firsts[number] = run[0]
        else:
            del self._runs[number], self._firsts[number]

    def at_or_above(self, key: Key) -> Iterator[Key]:
        """Yield the keys from `key` on, in order. The set must not change meanwhile."""
        number = self._number(key)
        for run in self._runs[number : number + 1]:
            yield from run[bisect.bisect_left(run, key) :]
        for run in self._runs[number + 1 :]:
            yield from run

    def _number(self, key: Key) -> int:
        """Return the number of the run that a key belongs to."""
        return max(0, bisect.bisect_right(self._firsts, key) - 1)
