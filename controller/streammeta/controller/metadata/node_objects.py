"""Which set objects each node holds: how many in all, and near which ids.

Ids are grouped into spans of consecutive ones, and of each node is known how many it holds of each
span. So its objects are listed by looking at the spans that hold some, however many objects of
others there are, and a change costs a few dictionary steps. Kept by replay.
"""

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.values import Int64Column

_SPAN_SHIFT = 8
"""A span has 256 ids."""


class NodeObjects:
    """Counts of objects by node and span; nodes that never held any hold none."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._spans: dict[int, dict[int, int]] = {}

    def get(self, node_id: int) -> int:
        """Return how many objects a node holds."""
        return self._counts.get(node_id, 0)

    def total(self) -> int:
        """Return how many there are."""
        return sum(self._counts.values())

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
        """Count objects no longer; `node_ids` says of each who held it."""
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
        _add(self._counts, node_id, sign * len(object_ids))
        spans = self._spans.setdefault(node_id, {})
        if len(object_ids) == 1:
            _add(spans, int(object_ids[0]) >> _SPAN_SHIFT, sign)
        else:
            numbers, times = np.unique(object_ids >> _SPAN_SHIFT, return_counts=True)
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
