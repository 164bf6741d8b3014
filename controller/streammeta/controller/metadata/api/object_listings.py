"""Listings of the objects of one node or one stream: requests, and the listed values.

Answers are in `answers`, whose description of a node contains the same values.
"""

from dataclasses import dataclass, field

from streammeta.controller.metadata.api.requests import ReadRequest
from streammeta.controller.metadata.tables.values import ObjectKind, PageRequest, RangeColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class ListStreamSetObjects(ReadRequest):
    """Read one node's committed stream set objects page by page, in object id order."""

    node_id: int
    page: PageRequest = field(default_factory=PageRequest)
    include_ranges: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListStreamObjects(ReadRequest):
    """Read a stream's stream objects and composites that overlap a range, by end offset.

    `end_offset` -1 means no end.
    """

    stream_id: int
    start_offset: int = 0
    end_offset: int = -1
    page: PageRequest = field(default_factory=PageRequest)


@dataclass(frozen=True, slots=True)
class StreamSetObject:
    """A stream set object of a node. Unknown facts (times, checksum) are -1."""

    object_id: int
    order_id: int
    data_time_ms: int
    object_size: int
    range_count: int
    attributes: int
    committed_at_ms: int
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1
    ranges: RangeColumns | None = None


@dataclass(frozen=True, slots=True)
class StreamObject:
    """A stream object or composite of a stream. Unknown facts (times, checksum) are -1."""

    stream_id: int
    object_id: int
    kind: ObjectKind
    start_offset: int
    end_offset: int
    object_size: int
    attributes: int
    committed_at_ms: int
    min_timestamp_ms: int = -1
    max_timestamp_ms: int = -1
    crc32c: int = -1


def token_of_row(end_offset: int, object_id: int) -> str:
    """Return the token of the page that begins at a stream object."""
    return f"{end_offset}-{object_id}"


def row_of_token(token: str) -> tuple[int, int]:
    """Return the end offset and the object id of a token, zeros for the first page."""
    if not token:
        return 0, 0
    end_offset, object_id = token.split("-")
    return int(end_offset), int(object_id)
