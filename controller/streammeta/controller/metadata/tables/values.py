"""Values shared by requests and answers: columns, states, identities and pages.

Numbers are those of the protobuf enums of the same names. A page lists items in id order; its token
is the id it begins at or after. Knows nothing of protobuf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np

from streammeta.controller.records import record

Int64Column: TypeAlias = record.Int64Column
Mask: TypeAlias = record.Mask
Tags: TypeAlias = record.Tags
EMPTY_COLUMN = record.EMPTY_COLUMN
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def column(values: object = ()) -> Int64Column:
    """Return `values` (any sequence of integers) as a read-only int64 column."""
    result = np.array(values, dtype=np.int64)
    result.setflags(write=False)
    return result


class ObjectState(IntEnum):
    """States of an object's life; numbers of the protobuf enum."""

    PREPARED = 1
    COMMITTED = 2
    MARK_DESTROYED = 3
    REMOVED = 4
    LINKED = 5
    NOT_ISSUED = 6


class ObjectKind(IntEnum):
    """Kinds of objects; numbers of the protobuf enum."""

    UNKNOWN = 0
    STREAM_SET = 1
    STREAM = 2
    COMPOSITE = 3
    NAMED = 4


class StreamState(IntEnum):
    """States of a stream: an opened one accepts commits; numbers of the protobuf enum."""

    OPENED = 1
    CLOSED = 2


class OnConflict(IntEnum):
    """Effect of one bad range of a commit on the others; numbers of the protobuf enum."""

    REJECT_ALL = 1
    ACCEPT_VALID = 2


class SourceOperation(IntEnum):
    """Effect of a compaction on a stream object it replaces; numbers of the protobuf enum."""

    DELETE = 1
    KEEP_DATA = 2
    DEEP_DELETE = 3


KIND_MASK = 3
"""The bits of an attributes word that say what kind of object it is."""
COMPOSITE_BITS = 1
"""Their value in a composite."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A broker and the process that speaks for it."""

    node_id: int
    node_epoch: int


@dataclass(frozen=True, slots=True)
class PageRequest:
    """One page of a listing; `page_size` 0 means 1000, an empty token the first page."""

    page_size: int = 0
    page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeColumns:
    """Ranges of a stream set object, sorted by stream id, then start; epochs may be missing.

    An upload has each stream once, a compaction as often as its parts don't overlap.
    """

    stream_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    stream_epoch: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    start_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    end_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def ranges_at(self, rows: Mask | slice) -> "RangeColumns":
        """Return the ranges of some rows."""
        return RangeColumns(
            stream_id=self.stream_id[rows],
            stream_epoch=self.stream_epoch[rows] if len(self.stream_epoch) else EMPTY_COLUMN,
            start_offset=self.start_offset[rows],
            end_offset=self.end_offset[rows],
        )

    def recorded(self) -> record.SetObjectRanges:
        """Return the ranges as a commit's record has them."""
        return record.SetObjectRanges(
            stream_id=self.stream_id, start_offset=self.start_offset, end_offset=self.end_offset
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamObjectColumns(RangeColumns):
    """Stream objects of a commit with their ranges; the attributes and what follows may be empty.

    An upload has each stream in one row here or in its ranges, a compaction as above.

    The last three say what is known of an object's content, -1 being unknown: between which times
    its records are, and the CRC-32C of its bytes.
    """

    object_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    object_size: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    attributes: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


PAGE_SIZE_DEFAULT = 1_000
_CHUNK_ROWS = 65_536

RowFilter: TypeAlias = Callable[[slice], Mask]


def page_size(page: PageRequest) -> int:
    """Return how many items the page may hold."""
    return page.page_size or PAGE_SIZE_DEFAULT


def first_id(page: PageRequest) -> int:
    """Return the id the page begins at or after."""
    return int(page.page_token) if page.page_token else 0


def token_of(next_id: int) -> str:
    """Return the token of the page that begins at an id; -1: there is no more."""
    return str(next_id) if next_id >= 0 else ""


def page_of_rows(
    first_row: int, rows: int, size: int, wanted: RowFilter
) -> tuple[Int64Column, int]:
    """Return the first `size` wanted rows from `first_row` on, and where the next page begins.

    The latter is -1 on the last page. Looks at `rows` rows in chunks, and at no more than needed.
    """
    found = [np.zeros(0, dtype=np.int64)]
    count = 0
    for start in range(first_row, rows, _CHUNK_ROWS):
        chunk = slice(start, min(start + _CHUNK_ROWS, rows))
        hits = np.flatnonzero(wanted(chunk)) + start
        found.append(hits)
        count += len(hits)
        if count > size:
            every = np.concatenate(found)
            return every[:size], int(every[size])
    return np.concatenate(found), -1


def page_of_ids(ids: Sequence[int], page: PageRequest) -> tuple[list[int], str]:
    """Return the page's part of ids asked for by name, in id order, and the next token."""
    ordered = sorted(set(ids))
    rest = [item for item in ordered if item >= first_id(page)]
    size = page_size(page)
    return rest[:size], token_of(rest[size] if len(rest) > size else -1)
