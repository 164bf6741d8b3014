"""Which objects are due when, earliest first.

Ids are filed by the second they are due in. What is filed is a hint: whoever asks learns from the
objects which ids still are due, and a second none of whose ids is, is dropped. So nothing has to
be taken out when an object changes state, and undo may file ids that are there already. Ids that
follow each other are filed as one run, which is most often all that a second holds.
"""

import bisect
from array import array
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from streammeta.controller.metadata.values import EMPTY_COLUMN, Int64Column

DueTimes: TypeAlias = Callable[[Int64Column], Int64Column]
"""ids -> when each is due, in ms; -1 if it is not due any more."""

_SLOT_MS = 1_000


class _Slot:
    """What is filed under one second."""

    __slots__ = ("_chunks", "_runs")

    def __init__(self) -> None:
        self._runs = array("q")  # first, end, first, end, ...
        self._chunks: list[Int64Column] = []

    def add(self, first_id: int, count: int) -> None:
        """File consecutive ids."""
        if self._runs and self._runs[-1] == first_id:
            self._runs[-1] += count
        else:
            self._runs.extend((first_id, first_id + count))

    def add_ids(self, ids: Int64Column) -> None:
        """File any ids."""
        self._chunks.append(ids)

    def ids(self) -> Int64Column:
        """Return every id once."""
        runs = zip(self._runs[::2], self._runs[1::2], strict=True)
        parts = [np.arange(first, end, dtype=np.int64) for first, end in runs]
        return np.unique(np.concatenate((EMPTY_COLUMN, *parts, *self._chunks)))


class DueObjects:
    """Objects by the time they are due."""

    def __init__(self, due_times: DueTimes) -> None:
        self._due_times = due_times
        self._slots: dict[int, _Slot] = {}
        self._order: list[int] = []

    def add(self, time_ms: int, first_id: int, count: int) -> None:
        """File `count` consecutive ids."""
        self._slot(time_ms).add(first_id, count)

    def add_ids(self, time_ms: int, ids: Int64Column) -> None:
        """File ids, in any order."""
        steps = np.diff(ids)
        if len(ids) and np.count_nonzero(steps == 1) == len(steps):
            self.add(time_ms, int(ids[0]), len(ids))
            return
        self._slot(time_ms).add_ids(ids)

    def load(self, times_ms: Int64Column, ids: Int64Column) -> None:
        """File ids that are due at different times."""
        if not len(ids):
            return
        numbers = times_ms // _SLOT_MS
        order = np.lexsort((ids, numbers))
        numbers, ids = numbers[order], ids[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        firsts = numbers[np.concatenate(([0], cuts))].tolist()
        for number, part in zip(firsts, np.split(ids, cuts), strict=True):
            self.add_ids(number * _SLOT_MS, part)

    def first_time(self) -> int | None:
        """Return the earliest time at which something is due, or None."""
        while self._order:
            _, times = self._due(self._order[0])
            if len(times):
                return int(times[0])
            self._drop(self._order[0])
        return None

    def before(self, time_ms: int, limit: int) -> tuple[int, ...]:
        """Return at most `limit` ids due before `time_ms`, earliest first; they stay due."""
        found: list[int] = []
        for number in self._order[: bisect.bisect_right(self._order, time_ms // _SLOT_MS)]:
            ids, times = self._due(number)
            if not len(ids):
                self._drop(number)
            found.extend(ids[: np.searchsorted(times, time_ms)].tolist())
            if len(found) >= limit:
                break
        return tuple(found[:limit])

    def _slot(self, time_ms: int) -> _Slot:
        number = time_ms // _SLOT_MS
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = _Slot()
            bisect.insort(self._order, number)
        return slot

    def _due(self, number: int) -> tuple[Int64Column, Int64Column]:
        """Return the ids of a slot that are due in its second, earliest first, and their times."""
        ids = self._slots[number].ids()
        times = self._due_times(ids)
        right = (times >= 0) & (times // _SLOT_MS == number)
        ids, times = ids[right], times[right]
        order = np.argsort(times, kind="stable")
        return ids[order], times[order]

    def _drop(self, number: int) -> None:
        del self._slots[number]
        self._order.pop(bisect.bisect_left(self._order, number))
