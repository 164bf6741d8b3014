"""Indexes and counts derived from table rows, maintained by replay so that requests never scan.

`ExpiryIndex` buckets object ids by the second in which they expire. An entry is a hint: the index
asks the objects which ids still expire, and drops a second without any. So a state change need not
remove an entry, and undo may add an id twice.

`NodeObjects` counts each node's stream set objects by span of consecutive ids, so that listing one
node's objects does not touch the others. `ObjectLinks` finds the objects linked to a
composite. `ObjectCounts` counts objects by state, `NodeCounts` the open streams of nodes.
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
"""Maps ids to expiry times in ms, -1 for ids that no longer expire."""

_SLOT_MS = 1_000


class _Slot:
    """The ids of one second. Consecutive ids form one run."""

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
    """Object ids by expiry second. `expiry_times` returns the current times of ids."""

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
        # Consecutive ids take two numbers, whatever their count.
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
        """Return at most `limit` ids that expire before `time_ms`, earliest first. They stay.

        Ids that expire before `since_ms` are skipped.
        """
        found: list[int] = []
        # Slots are whole seconds, so the exact times are compared below.
        first = bisect.bisect_left(self._order, since_ms // _SLOT_MS)
        for number in self._order[first : bisect.bisect_right(self._order, time_ms // _SLOT_MS)]:
            ids, times = self._expiring(number)
            # Entries are hints: all ids of this second have changed their state since.
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
        """Return the ids of a slot that still expire in its second, by time, and the times."""
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
"""Up to this number objects are counted in a loop, which is faster than sorting."""


class NodeObjects:
    """Counts of objects by node and span. Unknown nodes have none."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._spans: dict[int, dict[int, int]] = {}

    def get(self, node_id: int) -> int:
        """Return a node's number of objects."""
        return self._counts[node_id]

    def total(self) -> int:
        """Return the number of all objects."""
        return self._counts.total()

    def spans_from(self, node_id: int, first_id: int) -> Int64Column:
        """Return the numbers of a node's spans in order, from the span of an id on."""
        held = self._spans.get(node_id, {})
        numbers = np.fromiter(held, np.int64, len(held))
        return np.sort(numbers[numbers >= first_id >> _SPAN_SHIFT])

    def add(self, node_id: int, object_ids: Int64Column, undo: Undo) -> None:
        """Count a node's new objects."""
        self._change(node_id, object_ids, 1)
        undo.append(lambda: self._change(node_id, object_ids, -1))

    def remove(
        self, node_ids: npt.NDArray[np.integer], object_ids: Int64Column, undo: Undo
    ) -> None:
        """Stop counting objects. `node_ids` names the node of each."""
        for node_id in np.unique(node_ids).tolist():
            self._remove(node_id, object_ids[node_ids == node_id], undo)

    def _remove(self, node_id: int, object_ids: Int64Column, undo: Undo) -> None:
        self._change(node_id, object_ids, -1)
        undo.append(lambda: self._change(node_id, object_ids, 1))

    def load(self, node_ids: Int64Column, object_ids: Int64Column) -> None:
        """Count the objects of an empty index."""
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
        # A node that lost its last object must not leave an entry.
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
        """Return the objects linked to a composite."""
        return self._linked.get(composite_id, EMPTY_COLUMN)

    def add(self, composite_id: int, object_ids: Int64Column, undo: Undo) -> None:
        """Link objects that are not linked yet."""
        undo.put(self._linked, composite_id, np.union1d(self.of(composite_id), object_ids))

    def remove(self, composite_ids: Int64Column, object_ids: Int64Column, undo: Undo) -> None:
        """Remove links, given as pairs."""
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
"""Maximum total size of committed objects in bytes, which fits into 64 bits."""
_STATES = len(ObjectState)
_COMMITTED = int(ObjectState.COMMITTED)
_LOW = 31
_LOW_BITS = (1 << _LOW) - 1


class ObjectCounts:
    """Numbers of objects by `ObjectState`, and the bytes of committed ones."""

    def __init__(self) -> None:
        self._of_state = [0] * _STATES
        self.committed_bytes = 0

    def of(self, state: ObjectState) -> int:
        """Return the number of objects in a state."""
        return self._of_state[state]

    def present(self) -> int:
        """Return the number of all objects."""
        return sum(self._of_state)

    def change(self, state: int, count: int, size: int = 0) -> None:
        """Add `count` objects with `size` bytes in total to a state. Both may be negative."""
        self._of_state[state] += count
        if state == _COMMITTED:
            self.committed_bytes += size

    def require_room(self, object_size: int, others: Int64Column) -> None:
        """Raise `LimitExceededError` if objects of these sizes exceed the maximum total size."""
        more = object_size + (exact_sum(others) if len(others) else 0)
        if self.committed_bytes + more > COMMITTED_BYTES_MAX:
            raise LimitExceededError(
                f"object_size: {more} bytes exceed the limit: committed objects have "
                f"{self.committed_bytes} in total, the limit is {COMMITTED_BYTES_MAX}",
                "object_size",
                COMMITTED_BYTES_MAX,
            )

    def add(self, states: npt.NDArray[np.integer], sizes: Int64Column, sign: int) -> None:
        """Add (sign 1) or subtract (-1) objects, given by their states and sizes."""
        for state, count in enumerate(np.bincount(states, minlength=_STATES).tolist()):
            self._of_state[state] += sign * count
        self.committed_bytes += sign * exact_sum(sizes[states == _COMMITTED])


def exact_sum(sizes: Int64Column) -> int:
    """Return the sum of non-negative sizes without overflow."""
    if len(sizes) == 1:
        return int(sizes[0])
    # Sum high and low halves separately, since 64 bits could overflow.
    low = int((sizes & _LOW_BITS).sum())
    return (int((sizes >> _LOW).sum()) << _LOW) + low


_COUNTED_BELOW = 1 << 16


def _count_by_node(node_ids: npt.NDArray[np.integer]) -> dict[int, int]:
    """Return how often each node is named. Small ids, the usual case, need no sorting."""
    # A stream that was never opened has node -1, which `bincount` does not accept.
    if len(node_ids) and node_ids.min() >= 0 and node_ids.max() < _COUNTED_BELOW:
        counts = np.bincount(node_ids)
        names = np.flatnonzero(counts)
        return dict(zip(names.tolist(), counts[names].tolist(), strict=True))
    names, times = np.unique(node_ids, return_counts=True)
    return dict(zip(names.tolist(), times.tolist(), strict=True))


class NodeCounts:
    """One count per node, 0 for unknown nodes."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def get(self, node_id: int) -> int:
        """Return a node's count."""
        return self._counts[node_id]

    def add_each(self, node_ids: Int64Column, delta: int, undo: Undo) -> None:
        """Change a node's count by `delta` for each occurrence in `node_ids`."""
        if not len(node_ids):
            return
        # Most records concern a single node.
        first = int(node_ids[0])
        if np.count_nonzero(node_ids == first) == len(node_ids):
            self._add(first, delta * len(node_ids), undo)
            return
        names, times = np.unique(node_ids, return_counts=True)
        for node_id, count in zip(names.tolist(), times.tolist(), strict=True):
            self._add(node_id, delta * count, undo)

    def count(self, node_ids: npt.NDArray[np.integer]) -> None:
        """Count each occurrence of a node, without undo."""
        self._counts.update(_count_by_node(node_ids))

    def _add(self, node_id: int, delta: int, undo: Undo) -> None:
        self._counts[node_id] += delta
        undo.append(lambda: self._counts.subtract({node_id: delta}))
