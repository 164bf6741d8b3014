"""Values shared by requests and answers: columns, states, identities and pages.

Numbers equal the protobuf enums of the same names. A page lists items in id order, and its
token is the id at or after which it begins. The module does not depend on protobuf.
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
    """States of an object's life, with the numbers of the protobuf enum."""

    PREPARED = 1
    COMMITTED = 2
    MARK_DESTROYED = 3
    REMOVED = 4
    LINKED = 5
    NOT_ISSUED = 6


class ObjectKind(IntEnum):
    """Kinds of objects, with the numbers of the protobuf enum."""

    UNKNOWN = 0
    STREAM_SET = 1
    STREAM = 2
    COMPOSITE = 3
    NAMED = 4


class StreamState(IntEnum):
    """States of a stream, with the numbers of the protobuf enum.

    An opened stream accepts ranges of its owner. A shared one accepts shared rows of every node,
    and never has another state.
    """

    OPENED = 1
    CLOSED = 2
    SHARED = 3


SHARED_EPOCH = 0
"""Epoch of every shared stream."""


class OnConflict(IntEnum):
    """Effect of one bad range of a commit on the others, with the numbers of the protobuf enum."""

    REJECT_ALL = 1
    ACCEPT_VALID = 2


class SourceOperation(IntEnum):
    """Operation of a compaction on a source object, with the numbers of the protobuf enum."""

    DELETE = 1
    KEEP_DATA = 2
    DEEP_DELETE = 3


KIND_MASK = 3
"""Bits of an attributes word that contain the object's kind."""
COMPOSITE_BITS = 1
"""Value of these bits for a composite."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A broker and the process that acts for it."""

    node_id: int
    node_epoch: int


@dataclass(frozen=True, slots=True)
class PageRequest:
    """One page of a listing. `page_size` 0 means 1000, an empty token the first page."""

    page_size: int = 0
    page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeColumns:
    """Ranges of a stream set object, sorted by stream id, then start. Epochs are optional.

    An upload has each stream once. A compaction may have several parts that do not overlap.
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

    def to_record(self) -> record.StreamSetObjectRanges:
        """Return the ranges in the form of a commit's record."""
        return record.StreamSetObjectRanges(
            stream_id=self.stream_id, start_offset=self.start_offset, end_offset=self.end_offset
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamObjectColumns(RangeColumns):
    """Stream objects of a commit with their ranges. Attributes and facts may be empty.

    An upload has each stream in one row here or in its ranges, a compaction as above.

    The last three columns describe an object's content: the time bounds of its records and the
    CRC-32C of its bytes. -1 is unknown.
    """

    object_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    object_size: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    attributes: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRowColumns:
    """Batches appended to shared streams, sorted by stream id, in the order of the object.

    The last three columns name the idempotent producer. -1 is none. They may be empty together.
    """

    stream_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    record_count: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    producer_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    producer_epoch: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    first_sequence: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)

    def __len__(self) -> int:
        return len(self.stream_id)


PAGE_SIZE_DEFAULT = 1_000
_CHUNK_ROWS = 65_536

RowFilter: TypeAlias = Callable[[slice], Mask]


def page_size(page: PageRequest) -> int:
    """Return the maximum number of items on the page."""
    return page.page_size or PAGE_SIZE_DEFAULT


def first_id(page: PageRequest) -> int:
    """Return the id the page begins at or after."""
    return int(page.page_token) if page.page_token else 0


def token_of(next_id: int) -> str:
    """Return the token of the page that begins at an id, -1 after the last page."""
    return str(next_id) if next_id >= 0 else ""


def page_of_rows(
    first_row: int, rows: int, size: int, are_wanted: RowFilter
) -> tuple[Int64Column, int]:
    """Return the first `size` wanted rows from `first_row` on, and the next page's first row.

    The next row is -1 on the last page. Rows are examined in chunks, and only as far as needed.
    """
    found = [np.zeros(0, dtype=np.int64)]
    count = 0
    for start in range(first_row, rows, _CHUNK_ROWS):
        chunk = slice(start, min(start + _CHUNK_ROWS, rows))
        hits = np.flatnonzero(are_wanted(chunk)) + start
        found.append(hits)
        count += len(hits)
        # One more than a page shows where the next page begins.
        if count > size:
            every = np.concatenate(found)
            return every[:size], int(every[size])

    return np.concatenate(found), -1


def page_of_ids(ids: Sequence[int], page: PageRequest) -> tuple[list[int], str]:
    """Return the page's part of the requested ids, in id order, and the next token."""
    ordered = sorted(set(ids))
    rest = [item for item in ordered if item >= first_id(page)]
    size = page_size(page)
    return rest[:size], token_of(rest[size] if len(rest) > size else -1)
