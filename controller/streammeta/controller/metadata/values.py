"""Values that requests and answers share: columns, states, identities and pages.

Numbers are those of the protobuf enums of the same names. Knows nothing of protobuf.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Column: TypeAlias = npt.NDArray[np.int64]
"""One column: row i is element i. Requests and answers never change one once it is made."""


def column(values: object = ()) -> Int64Column:
    """Return `values` (any sequence of integers) as a read-only int64 column."""
    result = np.array(values, dtype=np.int64)
    result.setflags(write=False)
    return result


EMPTY_COLUMN = column()


class ObjectState(IntEnum):
    """Where an object is in its life; numbers of the protobuf enum."""

    PREPARED = 1
    COMMITTED = 2
    MARK_DESTROYED = 3
    REMOVED = 4
    LINKED = 5
    NOT_ISSUED = 6


class ObjectKind(IntEnum):
    """What holds an object; numbers of the protobuf enum."""

    UNKNOWN = 0
    STREAM_SET = 1
    STREAM = 2
    COMPOSITE = 3


class StreamState(IntEnum):
    """Whether a stream accepts commits; numbers of the protobuf enum."""

    OPENED = 1
    CLOSED = 2


class OnConflict(IntEnum):
    """What one bad range of a commit does to the others; numbers of the protobuf enum."""

    REJECT_ALL = 1
    ACCEPT_VALID = 2


class SourceOperation(IntEnum):
    """What a compaction does to a stream object it replaces; numbers of the protobuf enum."""

    DELETE = 1
    KEEP_DATA = 2
    DEEP_DELETE = 3


Tags: TypeAlias = tuple[tuple[str, str], ...]
"""(key, value) pairs, no key twice. In answers sorted by key."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamObjectColumns:
    """Stream objects of a commit; the epochs, attributes and the last three may be empty.

    An upload has each stream in one row here or in its ranges, a compaction as above.

    The last three say what is known of an object's content, -1 being unknown: between which times
    its records are, and the CRC-32C of its bytes.
    """

    object_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    object_size: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    stream_id: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    stream_epoch: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    start_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    end_offset: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    attributes: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    min_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    max_timestamp_ms: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
    crc32c: Int64Column = field(default_factory=lambda: EMPTY_COLUMN)
