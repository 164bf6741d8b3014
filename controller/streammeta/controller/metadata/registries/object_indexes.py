"""Indexes and counts derived from tables' rows, kept by replay so that no request has to scan.

`ExpiryIndex` holds object ids bucketed by the second they expire. An entry is a hint: the index
asks the objects which of its ids still expire, and drops a second that holds none. So no entry has
to be removed when an object changes state, and undo may add ids that are present already.

`NodeObjects` groups ids into spans of consecutive ones and counts each node's set objects by span,
so a node's objects are listed without looking at those of others. `ObjectLinks` finds the objects
linked to a composite, `ObjectCounts` counts objects by state, `NodeCounts` a node's open streams.
"""

import bisect
from array import array
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import LimitExceededError
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Int64Column, ObjectState

ExpiryTimes: TypeAlias = Callable[[Int64Column], Int64Column]
"""Maps ids to the time each expires, in ms; -1 if it does not expire any more."""

_SLOT_MS = 1_000


class _Slot:
    """The ids of one second. Ids that follow each other are kept as one run."""

    __slots__ = ("_chunks", "_runs")

    def __init__(self) -> None:
        self._runs = array("q")  # first, end, first, end, ...
        self._chunks: list[Int64Column] = []

    def add(self, first_id: int, count: int) -> None:
        """Add consecutive ids."""
        if self._runs and self._runs[-1] == first_id:
            self._runs[-1] += count
        else:
            self._runs.extend((first_id, first_id + count))

    def add_ids(self, ids: Int64Column) -> None:
        """Add any ids."""
        self._chunks.append(ids)

    def ids(self) -> Int64Column:
        """Return every id once."""
        if len(self._runs) == 2 and not self._chunks:
            return np.arange(self._runs[0], self._runs[1], dtype=np.int64)
        runs = zip(self._runs[::2], self._runs[1::2], strict=True)
        parts = [np.arange(first, end, dtype=np.int64) for first, end in runs]
        return np.unique(np.concatenate((EMPTY_COLUMN, *parts, *self._chunks)))


class ExpiryIndex:
    """Object ids by the second they expire; `expiry_times` says which still do."""

    def __init__(self, expiry_times: ExpiryTimes) -> None:
        self._expiry_times = expiry_times
        self._slots: dict[int, _Slot] = {}
        self._order: list[int] = []

    def add(self, time_ms: int, first_id: int, count: int) -> None:
        """Add `count` consecutive ids."""
        self._slot(time_ms).add(first_id, count)

    def add_ids(self, time_ms: int, ids: Int64Column) -> None:
        """Add ids, in any order."""
        steps = np.diff(ids)
        if len(ids) and np.count_nonzero(steps == 1) == len(steps):
            self.add(time_ms, int(ids[0]), len(ids))
            return
        self._slot(time_ms).add_ids(ids)

    def load(self, times_ms: Int64Column, ids: Int64Column) -> None:
        """Add ids that expire at different times."""
        if not len(ids):
            return
        numbers = times_ms // _SLOT_MS
        order = np.lexsort((ids, numbers))
        numbers, ids = numbers[order], ids[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        firsts = numbers[np.concatenate(([0], cuts))].tolist()
        for number, part in zip(firsts, np.split(ids, cuts), strict=True):
            self.add_ids(number * _SLOT_MS, part)

    def before(self, time_ms: int, limit: int, since_ms: int = 0) -> tuple[int, ...]:
        """Return at most `limit` ids that expire before `time_ms`, earliest first; they stay.

        Ids that expire before `since_ms` are left out.
        """
        found: list[int] = []
        first = bisect.bisect_left(self._order, since_ms // _SLOT_MS)
        for number in self._order[first : bisect.bisect_right(self._order, time_ms // _SLOT_MS)]:
            ids, times = self._expiring(number)
            if not len(ids):
                self._drop(number)
            low, high = np.searchsorted(times, (since_ms, time_ms))
            found.extend(ids[low:high].tolist())
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

    def _expiring(self, number: int) -> tuple[Int64Column, Int64Column]:
        """Return the ids of a slot that expire in its second, earliest first, and their times."""
        ids = self._slots[number].ids()
        times = self._expiry_times(ids)
        right = (times >= 0) & (times // _SLOT_MS == number)
        ids, times = ids[right], times[right]
        order = np.argsort(times, kind="stable")
        return ids[order], times[order]

    def _drop(self, number: int) -> None:
        del self._slots[number]
        self._order.pop(bisect.bisect_left(self._order, number))


_SPAN_SHIFT = 8
"""A span has 256 ids."""
_FEW = 64
"""Objects that are counted one by one, because sorting them would not be faster."""


class NodeObjects:
    """Counts of objects by node and span; nodes that never held any hold none."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._spans: dict[int, dict[int, int]] = {}

    def get(self, node_id: int) -> int:
        """Return how many objects a node holds."""
        return self._counts[node_id]

    def total(self) -> int:
        """Return how many there are."""
        return self._counts.total()

    def spans_from(self, node_id: int, first_id: int) -> Int64Column:
        """Return the numbers of a node's spans, ascending, from the one of an id on."""
        held = self._spans.get(node_id, {})
        numbers = np.fromiter(held, np.int64, len(held))
        return np.sort(numbers[numbers >= first_id >> _SPAN_SHIFT])

    def add(self, node_id: int, object_ids: Int64Column, undo: Undo) -> None:
        """Count objects that a node holds from now on."""
        self._change(node_id, object_ids, 1)
        undo.append(lambda: self._change(node_id, object_ids, -1))

    def remove(
        self, node_ids: npt.NDArray[np.integer], object_ids: Int64Column, undo: Undo
    ) -> None:
        """Count objects no longer; `node_ids` names the holder of each."""
        for node_id in np.unique(node_ids).tolist():
            self._remove(node_id, object_ids[node_ids == node_id], undo)

    def _remove(self, node_id: int, object_ids: Int64Column, undo: Undo) -> None:
        self._change(node_id, object_ids, -1)
        undo.append(lambda: self._change(node_id, object_ids, 1))

    def load(self, node_ids: Int64Column, object_ids: Int64Column) -> None:
        """Count from nothing."""
        for node_id in np.unique(node_ids).tolist():
            self._change(node_id, object_ids[node_ids == node_id], 1)

    def _change(self, node_id: int, object_ids: Int64Column, sign: int) -> None:
        self._counts[node_id] += sign * len(object_ids)
        spans = self._spans.setdefault(node_id, {})
        numbers = object_ids >> _SPAN_SHIFT
        if len(numbers) <= _FEW:
            for number in numbers.tolist():
                _add(spans, number, sign)
        else:
            numbers, times = np.unique(numbers, return_counts=True)
            for number, count in zip(numbers.tolist(), times.tolist(), strict=True):
                _add(spans, number, sign * count)
        if not spans:
            del self._spans[node_id]


def ids_of_spans(numbers: Int64Column) -> Int64Column:
    """Return all ids of spans, in their order."""
    offsets = np.arange(1 << _SPAN_SHIFT, dtype=np.int64)
    return ((numbers << _SPAN_SHIFT)[:, None] + offsets).ravel()


def _add(counts: dict[int, int], key: int, delta: int) -> None:
    count = counts.get(key, 0) + delta
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)


class ObjectLinks:
    """Linked objects by composite, in id order."""

    def __init__(self) -> None:
        self._linked: dict[int, Int64Column] = {}

    def of(self, composite_id: int) -> Int64Column:
        """Return what is linked to an object."""
        return self._linked.get(composite_id, EMPTY_COLUMN)

    def add(self, composite_id: int, object_ids: Int64Column, undo: Undo) -> None:
        """Link objects that are linked to no other."""
        undo.put(self._linked, composite_id, np.union1d(self.of(composite_id), object_ids))

    def remove(self, composite_ids: Int64Column, object_ids: Int64Column, undo: Undo) -> None:
        """Take links away, given as pairs."""
        for composite_id in np.unique(composite_ids).tolist():
            gone = object_ids[composite_ids == composite_id]
            left = np.setdiff1d(self.of(composite_id), gone, assume_unique=True)
            undo.put(self._linked, composite_id, left if len(left) else None)

    def load(self, composite_ids: Int64Column, object_ids: Int64Column) -> None:
        """Fill with pairs, in object id order."""
        order = np.argsort(composite_ids, kind="stable")
        composites, first = np.unique(composite_ids[order], return_index=True)
        parts = np.split(object_ids[order], first[1:]) if len(composites) else []
        self._linked = dict(zip(composites.tolist(), parts, strict=True))


COMMITTED_BYTES_MAX = 1 << 62
"""Bytes that all committed objects may have together; their sum fits into 64 bits."""
_STATES = len(ObjectState)
_COMMITTED = int(ObjectState.COMMITTED)
_LOW = 31
_LOW_BITS = (1 << _LOW) - 1


class ObjectCounts:
    """Objects by `ObjectState`, and how many bytes the committed ones take."""

    def __init__(self) -> None:
        self._of_state = [0] * _STATES
        self.committed_bytes = 0

    def of(self, state: ObjectState) -> int:
        """Return how many objects are in a state."""
        return self._of_state[state]

    def present(self) -> int:
        """Return how many objects there are."""
        return sum(self._of_state)

    def change(self, state: int, count: int, size: int = 0) -> None:
        """Add `count` objects in a state, of `size` bytes together; both may be negative."""
        self._of_state[state] += count
        if state == _COMMITTED:
            self.committed_bytes += size

    def require_room(self, object_size: int, others: Int64Column) -> None:
        """Raise `LimitExceededError` if with objects of these sizes the sum of all is too large."""
        more = object_size + (exact_sum(others) if len(others) else 0)
        if self.committed_bytes + more > COMMITTED_BYTES_MAX:
            raise LimitExceededError(
                f"object_size: {more} bytes are too many; committed objects have "
                f"{self.committed_bytes} together, {COMMITTED_BYTES_MAX} is the limit",
                "object_size",
                COMMITTED_BYTES_MAX,
            )

    def add(self, states: npt.NDArray[np.integer], sizes: Int64Column, sign: int) -> None:
        """Add (sign 1) or take away (-1) objects given by their states and sizes."""
        for state, count in enumerate(np.bincount(states, minlength=_STATES).tolist()):
            self._of_state[state] += sign * count
        self.committed_bytes += sign * exact_sum(sizes[states == _COMMITTED])


def exact_sum(sizes: Int64Column) -> int:
    """Return the sum of sizes that are not negative, however large they are."""
    if len(sizes) == 1:
        return int(sizes[0])
    low = int((sizes & _LOW_BITS).sum())
    return (int((sizes >> _LOW).sum()) << _LOW) + low


_COUNTED_BELOW = 1 << 16


def _times(node_ids: npt.NDArray[np.integer]) -> dict[int, int]:
    """Return how often each node is named; nothing is sorted if ids are few, as they mostly are."""
    # A stream that was never opened has node -1.
    if len(node_ids) and node_ids.min() >= 0 and node_ids.max() < _COUNTED_BELOW:
        counts = np.bincount(node_ids)
        names = np.flatnonzero(counts)
        return dict(zip(names.tolist(), counts[names].tolist(), strict=True))
    names, times = np.unique(node_ids, return_counts=True)
    return dict(zip(names.tolist(), times.tolist(), strict=True))


class NodeCounts:
    """One number a node; 0 for nodes that were never counted."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def get(self, node_id: int) -> int:
        """Return a node's number."""
        return self._counts[node_id]

    def add_each(self, node_ids: Int64Column, delta: int, undo: Undo) -> None:
        """Change a node's number by `delta` for each time it is named."""
        if not len(node_ids):
            return
        first = int(node_ids[0])
        if np.count_nonzero(node_ids == first) == len(node_ids):
            self._add(first, delta * len(node_ids), undo)
            return
        names, times = np.unique(node_ids, return_counts=True)
        for node_id, count in zip(names.tolist(), times.tolist(), strict=True):
            self._add(node_id, delta * count, undo)

    def count(self, node_ids: npt.NDArray[np.integer]) -> None:
        """Count each node as often as it is named, for good."""
        self._counts.update(_times(node_ids))

    def _add(self, node_id: int, delta: int, undo: Undo) -> None:
        self._counts[node_id] += delta
        undo.append(lambda: self._counts.subtract({node_id: delta}))
