"""How many of something each node has, kept by replay so that nobody has to scan for it.

What is counted, such as streams a node has open, is known to who counts.
"""

import numpy as np

from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.values import Int64Column


class NodeCounts:
    """One number a node; 0 for nodes that were never counted."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def get(self, node_id: int) -> int:
        """Return a node's number."""
        return self._counts.get(node_id, 0)

    def add(self, node_id: int, delta: int, undo: Undo) -> None:
        """Change one node's number."""
        self._change(node_id, delta)
        undo.append(lambda: self._change(node_id, -delta))

    def add_each(self, node_ids: Int64Column, delta: int, undo: Undo) -> None:
        """Change a node's number by `delta` for each time it is named."""
        if not len(node_ids):
            return
        first = int(node_ids[0])
        if np.count_nonzero(node_ids == first) == len(node_ids):
            self.add(first, delta * len(node_ids), undo)
            return
        names, times = np.unique(node_ids, return_counts=True)
        for node_id, count in zip(names.tolist(), times.tolist(), strict=True):
            self.add(node_id, delta * count, undo)

    def load(self, node_ids: Int64Column) -> None:
        """Count from nothing: each node as often as it is named."""
        names, times = np.unique(node_ids, return_counts=True)
        self._counts = dict(zip(names.tolist(), times.tolist(), strict=True))

    def _change(self, node_id: int, delta: int) -> None:
        count = self._counts.get(node_id, 0) + delta
        if count:
            self._counts[node_id] = count
        else:
            self._counts.pop(node_id, None)
