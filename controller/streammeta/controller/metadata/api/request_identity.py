"""Identity of requests: keys of remembered requests, and digests that recognise repeats.

Create, prepare and node id requests are remembered by `RequestKey` in bounded windows. Entries come
in by replay and leave in order of arrival, so every replica forgets alike.

A commit's digest covers what it says of its objects: owner, order, sizes, attributes, ranges, known
facts, sources; and the values put and streams trimmed with it. It leaves out what only says whether
and how the commit is judged: request id, epochs, `failover`, `on_conflict`, conditions of values.
It is a sum over rows, so their order does not matter, and one pass of vector operations makes the
digests of a whole batch. It guards against mistakes, not
against forgery: a caller that forges one deceives only itself. Not one bit of it may change between
versions, since it is part of records and checkpoint files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import mul

import numpy as np
import numpy.typing as npt

from streammeta.controller.errors import InvalidRequestError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables.values import Int64Column, StreamObjectColumns, Tags
from streammeta.controller.records.record import FACT_COLUMNS

REQUESTS_MAX = 32_768
"""Create and Prepare requests remembered."""
REJECTED_ROWS_MAX = 65_536
"""Rows left out of commits remembered."""
REMOVED_OBJECTS_MAX = 131_072
"""Committed objects remembered after they are removed."""

_NO_TAGS = 1


class RequestKind(IntEnum):
    """Kinds of remembered requests."""

    CREATE_STREAMS = 1
    PREPARE_OBJECTS = 2
    NEXT_NODE_ID = 3


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Two nodes may choose the same request id by accident; they are different requests."""

    kind: RequestKind
    node_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class IssuedIds:
    """The first answer: `count` ids from `first_id`; `deadline_ms` is -1 for streams.

    `content_digest` is that of the streams' tags, see `digest_of_tags`; 0: unknown, or no
    streams were created.
    """

    first_id: int
    count: int
    deadline_ms: int = -1
    content_digest: int = 0

    def require_count(self, key: RequestKey, count: int) -> None:
        """Raise `InvalidRequestError` if a repeat asks for another number of ids."""
        if self.count != count:
            raise InvalidRequestError(
                "request_id",
                f"{key.request_id!r} was used for {self.count} ids, now for {count}; "
                "a new request needs a new id",
            )


def digest_of_tags(tags: Sequence[Tags]) -> int:
    """Return a number that tells the tags of some streams from others; it is never 0."""
    if not any(tags):
        return _NO_TAGS
    state = hashlib.blake2b(digest_size=8)
    for of_one in tags:
        texts = [text.encode() for tag in sorted(of_one) for text in tag]
        state.update(b"%d;" % len(texts))
        for text in texts:
            state.update(b"%d:" % len(text) + text)
    return int.from_bytes(state.digest(), "little", signed=True) or _NO_TAGS


NO_DIGEST = 0
"""Of objects that are not committed, or were by a version that kept none."""

_Unsigned = npt.NDArray[np.uint64]

_FEW_ROWS = 8
"""Rows that are mixed one by one, because vectors would not be faster."""

_MASK = (1 << 64) - 1
_MIX = 0xD6E8FEB86659FD93
_SHIFT = np.uint64(32)
_MIX_SCALAR = np.uint64(_MIX)


class _Multipliers:
    """Odd constants, another sequence for each kind of row: as numbers, and as a vector."""

    def __init__(self, kind: int, count: int) -> None:
        state, self.numbers = (kind * 0x9E3779B97F4A7C15) & _MASK, list[int]()
        for _ in range(count):
            state = (state + 0x9E3779B97F4A7C15) & _MASK
            self.numbers.append(_mixed(state) | 1)
        self.vector: _Unsigned = np.array(self.numbers, dtype=np.uint64)


def _mixed(value: int) -> int:
    for _ in range(2):
        value = ((value ^ (value >> 32)) * _MIX) & _MASK
    return value ^ (value >> 32)


_UPLOAD = _Multipliers(1, 8)
_COMPACTION = _Multipliers(2, 8)
_MERGE = _Multipliers(3, 9)
_RANGE = _Multipliers(4, 3)
_STREAM_OBJECT = _Multipliers(5, 9)
_SOURCE = _Multipliers(6, 2)
_PUT = _Multipliers(7, 2)
_TRIM = _Multipliers(8, 2)


def digest_of_commit(request: requests.CommitStreamSetObject) -> int:
    """Return the digest of an upload, or of what set objects were compacted to."""
    compacts = len(request.compacted_object_ids) > 0
    head = _of_cells(
        _COMPACTION if compacts else _UPLOAD,
        (
            request.object_id,
            request.node.node_id,
            request.order_id,
            request.object_size,
            request.attributes,
            request.min_timestamp_ms,
            request.max_timestamp_ms,
            request.crc32c,
        ),
    )
    ranges, others = request.ranges, request.stream_objects
    columns = (ranges.stream_id, ranges.start_offset, ranges.end_offset)
    total = head + _sum_of_rows(_RANGE, columns)
    if len(others.stream_id):
        total += _sum_of_rows(_STREAM_OBJECT, _stream_object_columns(others))
    if compacts:
        ids = request.compacted_object_ids
        total += _of_sources(ids, np.ones_like(ids))
    return _signed(total + _of_effects(request))


def digest_of_merge(request: requests.CommitStreamObject) -> int:
    """Return the digest of what stream objects were compacted to."""
    total = _of_cells(
        _MERGE,
        (
            request.object_id,
            request.object_size,
            request.stream_id,
            request.start_offset,
            request.end_offset,
            request.attributes,
            request.min_timestamp_ms,
            request.max_timestamp_ms,
            request.crc32c,
        ),
    )
    ids = request.source_object_ids
    operations = np.array(request.operations or (1,) * len(ids), dtype=np.int64)
    return _signed(total + _of_sources(ids, operations) + _of_effects(request))


def digests_of_uploads(request: requests.CommitUploads) -> Int64Column:
    """Return the digest of each upload: that of the same upload as a commit of its own."""
    ids, ranges = request.object_id, request.ranges
    count = len(ids)
    if count == 1 and len(ranges.stream_id) <= _FEW_ROWS:
        return np.array([_digest_of_one(request)])
    node_id = np.full(count, request.node.node_id)
    facts = (_filled(getattr(request, name), count, -1) for name in FACT_COLUMNS)
    nothing = np.zeros(count, dtype=np.int64)
    totals = _of_rows(_UPLOAD, (ids, node_id, ids, request.object_size, nothing, *facts))
    rows = _of_rows(_RANGE, (ranges.stream_id, ranges.start_offset, ranges.end_offset))
    firsts = np.cumsum(request.range_count) - request.range_count
    totals += np.add.reduceat(rows, firsts)
    totals[totals == NO_DIGEST] = 1
    return totals.view(np.int64)


def _digest_of_one(request: requests.CommitUploads) -> int:
    object_id = request.object_id.item()
    columns = (request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c)
    facts = [column.item() if len(column) else -1 for column in columns]
    cells = (object_id, request.node.node_id, object_id, request.object_size.item(), 0, *facts)
    ranges = request.ranges
    rows = (ranges.stream_id, ranges.start_offset, ranges.end_offset)
    return _signed(_of_cells(_UPLOAD, cells) + _sum_of_rows(_RANGE, rows))


def _of_effects(request: requests.CommitStreamSetObject | requests.CommitStreamObject) -> int:
    """Return the digest of values put and streams trimmed with a commit; 0 if there are none."""
    total = 0
    for item in request.kv_puts:
        texts = (item.namespace.encode(), item.key.encode(), item.value)
        # A row of zeros would add nothing, hence the 1.
        total += _of_cells(_PUT, (1, _digest_of_texts(texts)))
    for trim in request.trims:
        total += _of_cells(_TRIM, (trim.stream_id + 1, trim.new_start_offset))
    return total


def _digest_of_texts(texts: Sequence[bytes]) -> int:
    state = hashlib.blake2b(digest_size=8)
    for text in texts:
        state.update(b"%d:" % len(text) + text)
    return int.from_bytes(state.digest(), "little", signed=True)


def _of_sources(ids: Int64Column, operations: Int64Column) -> int:
    # A row of zeros would add nothing to a sum, as if it were missing; operations begin at 1.
    return _sum_of_rows(_SOURCE, (ids, operations))


def _stream_object_columns(rows: StreamObjectColumns) -> tuple[Int64Column, ...]:
    count = len(rows.stream_id)
    return (
        rows.object_id,
        rows.object_size,
        rows.stream_id,
        rows.start_offset,
        rows.end_offset,
        _filled(rows.attributes, count, 0),
        *(_filled(getattr(rows, name), count, -1) for name in FACT_COLUMNS),
    )


def _filled(values: Int64Column, count: int, value: int) -> Int64Column:
    """Return a column that may be empty, which means `value` in each row."""
    return values if len(values) else np.full(count, value, dtype=np.int64)


def _of_cells(multipliers: _Multipliers, cells: Sequence[int]) -> int:
    return _mixed(sum(map(mul, multipliers.numbers, cells)) & _MASK)


def _of_rows(multipliers: _Multipliers, columns: Sequence[Int64Column]) -> _Unsigned:
    """Return a number for each row, what `_of_cells` returns for its cells."""
    factors = multipliers.vector
    total: _Unsigned = columns[0].view(np.uint64) * factors[0]
    for values, factor in zip(columns[1:], factors[1:], strict=True):
        total += values.view(np.uint64) * factor
    for _ in range(2):
        total ^= total >> _SHIFT
        total *= _MIX_SCALAR
    total ^= total >> _SHIFT
    return total


def _sum_of_rows(multipliers: _Multipliers, columns: Sequence[Int64Column]) -> int:
    if len(columns[0]) > _FEW_ROWS:
        return int(np.add.reduce(_of_rows(multipliers, columns)))
    rows = zip(*[column.tolist() for column in columns], strict=True)
    return sum([_of_cells(multipliers, cells) for cells in rows])


def _signed(total: int) -> int:
    total &= _MASK
    if total == NO_DIGEST:
        return 1
    return total - (1 << 64) if total >> 63 else total
