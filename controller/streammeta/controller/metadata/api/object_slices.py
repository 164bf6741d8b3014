"""Queries for the objects that contain ranges of streams, and the slices of objects found.

Both are also available in columns, because a request has thousands of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, overload

from streammeta.controller.metadata.tables.values import EMPTY_COLUMN, Int64Column, ObjectKind


@dataclass(frozen=True, slots=True)
class ObjectQuery:
    """A range to find objects for. `end_offset` -1 means as far as `limit` (0: 1000) allows."""

    stream_id: int
    start_offset: int
    end_offset: int
    limit: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ObjectQueryColumns(Sequence[ObjectQuery]):
    """Queries in columns. A row becomes an `ObjectQuery` on access."""

    stream_id: Int64Column
    start_offset: Int64Column
    end_offset: Int64Column
    limit: Int64Column

    def __len__(self) -> int:
        return len(self.stream_id)

    @overload
    def __getitem__(self, at: int) -> ObjectQuery: ...

    @overload
    def __getitem__(self, at: slice) -> ObjectQueryColumns: ...

    def __getitem__(self, at: int | slice) -> ObjectQuery | ObjectQueryColumns:
        if isinstance(at, slice):
            return self.take(at)
        columns = (self.stream_id, self.start_offset, self.end_offset, self.limit)
        return ObjectQuery(*(int(values[at]) for values in columns))

    def take(self, at: slice | Int64Column) -> ObjectQueryColumns:
        """Return some of the queries."""
        columns = (self.stream_id, self.start_offset, self.end_offset, self.limit)
        return ObjectQueryColumns(*(values[at] for values in columns))


class ObjectSlice(NamedTuple):
    """An object and the part of the stream in it.

    The last three fields describe the object's content: the time bounds of its records and the
    CRC-32C of its bytes. -1 is unknown.
    """

    object_id: int
    kind: ObjectKind
    start_offset: int
    end_offset: int
    object_size: int
    attributes: int
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class ObjectSlices(Sequence[ObjectSlice]):
    """Slices in columns. A row becomes an `ObjectSlice` on access.

    The last three columns are empty if no slice has known facts.
    """

    object_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    kind: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    start_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    end_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    object_size: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    attributes: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def __len__(self) -> int:
        return len(self.object_id)

    @overload
    def __getitem__(self, row: int) -> ObjectSlice: ...

    @overload
    def __getitem__(self, row: slice) -> list[ObjectSlice]: ...

    def __getitem__(self, row: int | slice) -> ObjectSlice | list[ObjectSlice]:
        return list(self)[row]

    def __iter__(self) -> Iterator[ObjectSlice]:
        known = self.facts() if self.has_facts else itertools.repeat((-1, -1, -1), len(self))
        for (object_id, kind, *cells), facts in zip(self.places(), known, strict=True):
            yield ObjectSlice._make((object_id, _KINDS[kind], *cells, *facts))

    def part(self, first: int, end: int) -> ObjectSlices:
        """Return the slices from one row up to another."""
        return ObjectSlices(*(getattr(self, name)[first:end] for name in _SLICE_COLUMNS))

    @property
    def has_facts(self) -> bool:
        """Whether content facts are known for any object."""
        return len(self.crc32c) > 0

    def places(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Iterate over the first six fields of each slice, its kind as a number."""
        columns = (
            self.object_id,
            self.kind,
            self.start_offset,
            self.end_offset,
            self.object_size,
            self.attributes,
        )
        return zip(*[values.tolist() for values in columns], strict=True)

    def facts(self) -> Iterator[tuple[int, int, int]]:
        """Iterate over the last three fields of each slice. Requires `has_facts`."""
        columns = (self.min_timestamp_ms, self.max_timestamp_ms, self.crc32c)
        return zip(*[values.tolist() for values in columns], strict=True)


# Looking an enum member up by its number is slow, and answers contain thousands.
_KINDS = tuple(ObjectKind)

_SLICE_COLUMNS = tuple(column.name for column in fields(ObjectSlices))

NO_SLICES = ObjectSlices()
