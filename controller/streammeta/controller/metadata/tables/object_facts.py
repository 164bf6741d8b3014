"""Facts about objects' content: time bounds of their records, and checksums.

All facts are optional. A separate table with the row numbers of the objects' table contains them.
It begins empty and memory is used only for rows that are written, so clusters that record no facts
pay nothing. Cells contain the complement of a value, because rows that were never written are zeros
and must read as unknown. Rows of objects that are not committed contain zeros. The module knows
only the rows of objects.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from streammeta.controller.metadata.tables.tables import Table, TableView
from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Int64Column, Mask, column
from streammeta.controller.records import record as rec

UNKNOWN = -1
CRC32C_MAX = 2**32 - 1

_COLUMNS = {
    "min_timestamp_ms": np.int64,
    "max_timestamp_ms": np.int64,
    "crc32c": np.uint32,
    "has_crc32c": np.bool_,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """Facts of objects in columns of equal length. -1 or an empty column is unknown."""

    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def columns(self) -> dict[str, Int64Column]:
        """Return the columns by name, as in commits and their records."""
        return {
            "min_timestamp_ms": self.min_timestamp_ms,
            "max_timestamp_ms": self.max_timestamp_ms,
            "crc32c": self.crc32c,
        }


NO_FACTS = Facts()


class ObjectFacts:
    """Facts by row of the table of objects."""

    def __init__(self) -> None:
        self._table = Table(_COLUMNS)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._table.nbytes

    def view(self) -> TableView:
        """Return an immutable view, see `facts_in_view`."""
        return self._table.view()

    def of(self, rows: Int64Column) -> Facts:
        """Return the facts of rows."""
        size = len(self._table)
        return _facts(self._table.__getitem__, size, rows) if size else NO_FACTS

    def of_one(self, row: int) -> tuple[int, int, int]:
        """Return time bounds and checksum of a row."""
        facts = self.of(np.array([row]))
        if facts is NO_FACTS:
            return UNKNOWN, UNKNOWN, UNKNOWN
        columns = (facts.min_timestamp_ms, facts.max_timestamp_ms, facts.crc32c)
        low, high, crc32c = (int(values[0]) for values in columns)
        return low, high, crc32c

    def bounds(self, rows: Int64Column) -> tuple[int, int]:
        """Return the time bounds of all records in rows' objects, (-1, -1) if any are unknown.

        Without rows they are unknown.
        """
        facts = self.of(rows)
        if not len(facts.min_timestamp_ms) or facts.min_timestamp_ms.min() == UNKNOWN:
            return UNKNOWN, UNKNOWN
        return int(facts.min_timestamp_ms.min()), int(facts.max_timestamp_ms.max())

    def put(
        self,
        rows: Int64Column,
        known: rec.StreamSetObjectsCommitted | rec.StreamObjectsCommitted | Facts,
    ) -> None:
        """Set the facts of objects without facts. Empty columns are ignored."""
        for name, values in zip(rec.FACT_COLUMNS, _fact_columns(known), strict=True):
            if len(values):
                self._cover(rows)
                self._write(name, rows, values)

    def clear(self, rows: Int64Column) -> None:
        """Forget the facts of rows."""
        size = len(self._table)
        if size:
            used = rows[rows < size]
            for name in _COLUMNS:
                self._table.write(name, used, 0)

    def _cover(self, rows: Int64Column) -> None:
        missing = int(np.maximum.reduce(rows)) + 1 - len(self._table)
        if missing > 0:
            self._table.extend(missing)

    def _write(self, name: str, rows: Int64Column, values: Int64Column) -> None:
        if name == "crc32c":
            # 0 is a valid checksum, so a separate column marks known ones.
            has = values != UNKNOWN
            self._table.write("has_crc32c", rows, has)
            self._table.write(name, rows, np.where(has, values, 0))
        else:
            self._table.write(name, rows, ~values)


def facts_in_view(view: TableView, rows: Int64Column) -> tuple[Int64Column, Facts]:
    """Return the indexes of rows with known facts, and these facts."""
    size = len(view)
    if not size:
        return EMPTY_COLUMN, NO_FACTS
    facts = _facts(view.column, size, rows)
    found = np.flatnonzero((facts.min_timestamp_ms != UNKNOWN) | (facts.crc32c != UNKNOWN))
    return found, Facts(**{name: getattr(facts, name)[found] for name in rec.FACT_COLUMNS})


_fact_columns = attrgetter(*rec.FACT_COLUMNS)


def select_facts(columns: object, chosen: Mask | None = None) -> Facts:
    """Return the facts in the columns of a commit. Columns without known values are empty.

    `chosen` selects rows. None means all.
    """
    given = _fact_columns(columns)
    if not any(map(len, given)):
        return NO_FACTS
    low, high, crc32c = (_select_known(values, chosen) for values in given)
    return Facts(min_timestamp_ms=low, max_timestamp_ms=high, crc32c=crc32c)


def _select_known(values: Int64Column, chosen: Mask | None) -> Int64Column:
    if not len(values):
        return values
    taken = values if chosen is None else values[chosen]
    return taken if np.count_nonzero(taken != UNKNOWN) else EMPTY_COLUMN


def facts_of_one(min_timestamp_ms: int, max_timestamp_ms: int, crc32c: int) -> Facts:
    """Return the facts of one object. Unknown ones are empty."""
    if max_timestamp_ms == UNKNOWN and crc32c == UNKNOWN:
        return NO_FACTS
    known_times = max_timestamp_ms != UNKNOWN
    return Facts(
        min_timestamp_ms=column([min_timestamp_ms]) if known_times else EMPTY_COLUMN,
        max_timestamp_ms=column([max_timestamp_ms]) if known_times else EMPTY_COLUMN,
        crc32c=column([crc32c]) if crc32c != UNKNOWN else EMPTY_COLUMN,
    )


def _facts(column_of: Callable[[str], npt.NDArray[Any]], size: int, rows: Int64Column) -> Facts:
    """Read `rows` of a table of `size` rows. Rows past its end were never written."""
    inside = rows < size
    at = np.minimum(rows, size - 1)
    cells = {name: column_of(name)[at] for name in _COLUMNS}
    has_crc32c = inside & cells["has_crc32c"]
    return Facts(
        min_timestamp_ms=np.where(inside, ~cells["min_timestamp_ms"], UNKNOWN),
        max_timestamp_ms=np.where(inside, ~cells["max_timestamp_ms"], UNKNOWN),
        crc32c=np.where(has_crc32c, cells["crc32c"].astype(np.int64), UNKNOWN),
    )
