"""Which objects a composite keeps: those linked to it.

Derived from the objects' rows: a linked object names its composite there. Here it is found the
other way round.
"""

import numpy as np

from streammeta.controller.metadata.columns import Undo
from streammeta.controller.metadata.values import EMPTY_COLUMN, Int64Column


class ObjectLinks:
    """Linked objects by composite, in id order."""

    def __init__(self) -> None:
        self._linked: dict[int, Int64Column] = {}

    def of(self, composite_id: int) -> Int64Column:
        """Return what is linked to an object."""
        return self._linked.get(composite_id, EMPTY_COLUMN)

    def add(self, composite_id: int, object_ids: Int64Column, undo: Undo) -> None:
        """Link objects that are linked to no other."""
        self._set(composite_id, np.union1d(self.of(composite_id), object_ids), undo)

    def remove(self, composite_ids: Int64Column, object_ids: Int64Column, undo: Undo) -> None:
        """Take links away, given as pairs."""
        for composite_id in np.unique(composite_ids).tolist():
            gone = object_ids[composite_ids == composite_id]
            left = np.setdiff1d(self.of(composite_id), gone, assume_unique=True)
            self._set(composite_id, left, undo)

    def load(self, composite_ids: Int64Column, object_ids: Int64Column) -> None:
        """Fill with pairs, in object id order."""
        order = np.argsort(composite_ids, kind="stable")
        composites, first = np.unique(composite_ids[order], return_index=True)
        parts = np.split(object_ids[order], first[1:]) if len(composites) else []
        self._linked = dict(zip(composites.tolist(), parts, strict=True))

    def _set(self, composite_id: int, object_ids: Int64Column, undo: Undo) -> None:
        before = self.of(composite_id)
        self._put(composite_id, object_ids)
        undo.append(lambda: self._put(composite_id, before))

    def _put(self, composite_id: int, object_ids: Int64Column) -> None:
        if len(object_ids):
            self._linked[composite_id] = object_ids
        else:
            self._linked.pop(composite_id, None)
