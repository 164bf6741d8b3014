"""Identity of requests: keys of remembered requests, and digests that recognise repeats.

Create, prepare and node id requests are remembered by `RequestKey` in bounded windows. Replay adds
entries and evicts them in order of arrival, so every replica forgets the same ones.

A commit's digest covers its content: owner, order, sizes, attributes, ranges, known facts, sources,
shared rows, and the values put and streams trimmed with it. It leaves out the fields that only
decide whether and how the commit is accepted: request id, epochs, `failover`, `on_conflict`,
conditions of values. It is a sum over rows, so their order does not matter (except in shared
rows), and vector operations compute the digests of a whole batch in one pass. It protects against
mistakes, not against forgery: a caller that forges one deceives only itself. Digests are part of
records and checkpoint files, so the algorithm must never change between versions.
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
from streammeta.controller.metadata.tables.values import (
    Int64Column,
    SharedRowColumns,
    StreamObjectColumns,
    Tags,
)
from streammeta.controller.records.record import FACT_COLUMNS

REQUESTS_MAX = 32_768
"""Maximum number of create and prepare requests remembered."""
REJECTED_ROWS_MAX = 65_536
"""Maximum number of rows left out of commits that are remembered."""
REMOVED_OBJECTS_MAX = 131_072
"""Maximum number of committed objects remembered after they are removed."""

_NO_TAGS = 1


class RequestKind(IntEnum):
    """Kinds of remembered requests."""

    CREATE_STREAMS = 1
    PREPARE_OBJECTS = 2
    NEXT_NODE_ID = 3


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a remembered request. Two nodes may choose the same request id by accident."""

    kind: RequestKind
    node_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class IssuedIds:
    """The first answer: `count` ids from `first_id`. `deadline_ms` is -1 for streams.

    `content_digest` is the digest of the streams, see `digest_of_streams`. 0: unknown, or no
    streams were created.
    """

    first_id: int
    count: int
    deadline_ms: int = -1
    content_digest: int = 0

    def require_count(self, key: RequestKey, count: int) -> None:
        """Raise `InvalidRequestError` if a repeat requests another number of ids."""
        if self.count != count:
            raise InvalidRequestError(
                "request_id",
                f"{key.request_id!r} was used for {self.count} ids, now for {count}: "
                "use a new id for a new request",
            )


def digest_of_streams(tags: Sequence[Tags], shared: Sequence[bool]) -> int:
    """Return a number, never 0, that identifies some streams to create: their tags and kinds.

    `shared` is empty if all streams are owned.
    """
    if not any(tags) and not any(shared):
        return _NO_TAGS

    state = hashlib.blake2b(digest_size=8)
    # Owned streams have the digest of versions that knew no other kind.
    if any(shared):
        state.update(b"shared:" + bytes(shared) + b";")
    # A record has no entries if no stream has tags.
    for stream_tags in tags if any(tags) else ():
        # Tags are a set: sort them, so that a repeat in another order is recognised.
        texts = [text.encode() for tag in sorted(stream_tags) for text in tag]
        state.update(b"%d;" % len(texts))
        # Length prefixes keep adjacent texts apart: ("ab", "c") differs from ("a", "bc").
        for text in texts:
            state.update(b"%d:" % len(text) + text)

    return int.from_bytes(state.digest(), "little", signed=True) or _NO_TAGS


NO_DIGEST = 0
"""Digest of objects that are not committed, or were committed by a version without digests."""

_Unsigned = npt.NDArray[np.uint64]

_FEW_ROWS = 8
"""Up to this number of rows scalar code is faster than vectors."""

_MASK = (1 << 64) - 1
_MIX = 0xD6E8FEB86659FD93
_SHIFT = np.uint64(32)
_MIX_SCALAR = np.uint64(_MIX)


class _Multipliers:
    """Odd constants, a different sequence for each kind of row: as numbers, and as a vector."""

    def __init__(self, kind: int, count: int) -> None:
        state, self.numbers = (kind * 0x9E3779B97F4A7C15) & _MASK, list[int]()
        for _ in range(count):
            state = (state + 0x9E3779B97F4A7C15) & _MASK
            # An odd factor is invertible modulo 2**64, so no bit of a cell is lost.
            self.numbers.append(_mix(state) | 1)
        self.vector: _Unsigned = np.array(self.numbers, dtype=np.uint64)


def _mix(value: int) -> int:
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
_SHARED_ROW = _Multipliers(9, 6)


def digest_of_commit(request: requests.CommitStreamSetObject) -> int:
    """Return the digest of an upload or of a compaction of stream set objects."""
    # Uploads and compactions use different constants, so they never look alike.
    compacts = len(request.compacted_object_ids) > 0
    head = _mix_cells(
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

    if len(request.shared_rows):
        total += _sum_of_rows(_SHARED_ROW, _shared_row_columns(request.shared_rows))

    if compacts:
        ids = request.compacted_object_ids
        total += _sum_of_sources(ids, np.ones_like(ids))

    return _to_signed(total + _sum_of_effects(request))


def digest_of_merge(request: requests.CommitStreamObject) -> int:
    """Return the digest of a compaction of stream objects."""
    total = _mix_cells(
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
    return _to_signed(total + _sum_of_sources(ids, operations) + _sum_of_effects(request))


def digests_of_uploads(request: requests.CommitUploads) -> Int64Column:
    """Return the digest of each upload, the same as if it were committed alone."""
    ids, ranges = request.object_id, request.ranges
    count = len(ids)
    if count == 1 and len(ranges.stream_id) <= _FEW_ROWS:
        return np.array([_digest_of_upload(request)])

    node_id = np.full(count, request.node.node_id)
    facts = (_fill_empty(getattr(request, name), count, -1) for name in FACT_COLUMNS)
    nothing = np.zeros(count, dtype=np.int64)
    # The order id equals the object id, and a plain upload has no attributes.
    totals = _mix_rows(_UPLOAD, (ids, node_id, ids, request.object_size, nothing, *facts))
    rows = _mix_rows(_RANGE, (ranges.stream_id, ranges.start_offset, ranges.end_offset))
    firsts = np.cumsum(request.range_count) - request.range_count
    totals += np.add.reduceat(rows, firsts)

    # 0 means that no digest is known.
    totals[totals == NO_DIGEST] = 1
    return totals.view(np.int64)


def _digest_of_upload(request: requests.CommitUploads) -> int:
    object_id = request.object_id.item()
    columns = (request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c)
    facts = [column.item() if len(column) else -1 for column in columns]
    cells = (object_id, request.node.node_id, object_id, request.object_size.item(), 0, *facts)
    ranges = request.ranges
    rows = (ranges.stream_id, ranges.start_offset, ranges.end_offset)
    return _to_signed(_mix_cells(_UPLOAD, cells) + _sum_of_rows(_RANGE, rows))


def _sum_of_effects(request: requests.CommitStreamSetObject | requests.CommitStreamObject) -> int:
    """Return the digest of values put and streams trimmed with a commit, 0 without any."""
    total = 0
    for item in request.kv_puts:
        texts = (item.namespace.encode(), item.key.encode(), item.value)
        # A row of zeros would add nothing, hence the 1.
        total += _mix_cells(_PUT, (1, _digest_of_texts(texts)))
    for trim in request.trims:
        total += _mix_cells(_TRIM, (trim.stream_id + 1, trim.new_start_offset))
    return total


def _digest_of_texts(texts: Sequence[bytes]) -> int:
    state = hashlib.blake2b(digest_size=8)
    for text in texts:
        state.update(b"%d:" % len(text) + text)
    return int.from_bytes(state.digest(), "little", signed=True)


def _sum_of_sources(ids: Int64Column, operations: Int64Column) -> int:
    # A row of zeros would not change the sum, as if it were missing; operations begin at 1.
    return _sum_of_rows(_SOURCE, (ids, operations))


def _stream_object_columns(rows: StreamObjectColumns) -> tuple[Int64Column, ...]:
    count = len(rows.stream_id)
    return (
        rows.object_id,
        rows.object_size,
        rows.stream_id,
        rows.start_offset,
        rows.end_offset,
        _fill_empty(rows.attributes, count, 0),
        *(_fill_empty(getattr(rows, name), count, -1) for name in FACT_COLUMNS),
    )


def _shared_row_columns(rows: SharedRowColumns) -> tuple[Int64Column, ...]:
    count = len(rows)
    producers = (rows.producer_id, rows.producer_epoch, rows.first_sequence)
    return (
        rows.stream_id,
        rows.record_count,
        *(_fill_empty(values, count, -1) for values in producers),
        np.arange(count),  # the order of rows decides which batch gets which offset
    )


def _fill_empty(values: Int64Column, count: int, value: int) -> Int64Column:
    """Return the column, or one with `value` in each row if it is empty."""
    return values if len(values) else np.full(count, value, dtype=np.int64)


def _mix_cells(multipliers: _Multipliers, cells: Sequence[int]) -> int:
    return _mix(sum(map(mul, multipliers.numbers, cells)) & _MASK)


def _mix_rows(multipliers: _Multipliers, columns: Sequence[Int64Column]) -> _Unsigned:
    """Return a number for each row, equal to `_mix_cells` of its cells."""
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
        return int(np.add.reduce(_mix_rows(multipliers, columns)))
    rows = zip(*[column.tolist() for column in columns], strict=True)
    return sum([_mix_cells(multipliers, cells) for cells in rows])


def _to_signed(total: int) -> int:
    total &= _MASK
    if total == NO_DIGEST:
        return 1
    return total - (1 << 64) if total >> 63 else total
