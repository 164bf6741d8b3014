"""Validation of commits, and the field checks shared by all requests.

An upload contains each stream once. The result of a compaction may contain a stream in several rows
of the SSO and of stream objects, provided that each offset is in one row only. Errors
name the field as in `proto/`, its value and the expected value. See `validation`.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import fields
from operator import attrgetter

import numpy as np

from streammeta.controller.errors import InvalidRequestError, LimitExceededError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.tables.object_facts import CRC32C_MAX, UNKNOWN
from streammeta.controller.metadata.tables.values import (
    COMPOSITE_BITS,
    INT32_MAX,
    INT64_MAX,
    KIND_MASK,
    Int64Column,
    NodeIdentity,
    OnConflict,
    RangeColumns,
    SharedRowColumns,
    SourceOperation,
    StreamObjectColumns,
)
from streammeta.controller.records.record import FACT_COLUMNS
from streammeta.rpc.method_facts import BATCH_MAX


def fail(field: str, got: object, wanted: str) -> InvalidRequestError:
    """Return the error for a field with a wrong value."""
    return InvalidRequestError(field, f"got {got}, must be {wanted}")


def check_between(field: str, value: int, low: int, high: int) -> None:
    """Raise unless a number is in `[low, high]`."""
    if not low <= value <= high:
        raise fail(field, value, f"{low} to {high}")


def check_count(field: str, count: int, least: int = 1, most: int = BATCH_MAX) -> None:
    """Raise unless a list of a request has `least` to `most` items."""
    if count < least:
        raise fail(field, count or "none", f"{least} to {most}")
    if count > most:
        raise too_many(field, count, most)


def too_many(field: str, count: int, most: int = BATCH_MAX) -> LimitExceededError:
    """Return the error for a list longer than one request may contain."""
    return LimitExceededError(f"{field}: got {count}, at most {most} in one request", field, most)


def check_no_repeat(field: str, values: Sequence[object]) -> None:
    """Raise if a value appears twice."""
    if len(set(values)) != len(values):
        twice, _ = Counter(values).most_common(1)[0]
        raise InvalidRequestError(field, f"{twice} appears twice, must appear once")


def check_node(node: NodeIdentity) -> None:
    """Raise unless node id and epoch are in range."""
    if 0 <= node.node_id <= INT32_MAX and 0 <= node.node_epoch <= INT64_MAX:
        return
    check_between("node.node_id", node.node_id, 0, INT32_MAX)
    check_between("node.node_epoch", node.node_epoch, 0, INT64_MAX)


def all_between(values: Int64Column, low: int, high: int) -> bool:
    """Return whether all numbers are in `[low, high]`. Requires at least one."""
    if len(values) == 1:
        # A vector operation costs about as much for one row as for hundreds.
        single: int = values.item()
        return low <= single <= high
    return bool(np.minimum.reduce(values) >= low and np.maximum.reduce(values) <= high)


def raise_at(field: str, bad: np.ndarray, first_row: int, wanted: str) -> None:
    """Raise for the first bad row. `first_row` is the row number of the first flag in `bad`."""
    if np.count_nonzero(bad):
        row = int(np.argmax(bad)) + first_row
        raise InvalidRequestError(f"{field}[{row}]", f"must be {wanted}")


COMMIT_ROWS_MAX = 20_000
"""Maximum number of ranges and stream objects in one commit."""
OBJECT_SIZE_MAX = 1 << 46
"""Maximum size of an object in bytes, above the limit of every store.

Sums over the rows of a request do not overflow.
"""

PRODUCER_EPOCH_MAX = 2**15 - 1
"""Largest epoch of an idempotent producer, as in Kafka."""
_PRODUCER_COLUMNS = ("producer_id", "producer_epoch", "first_sequence")
_POLICIES = frozenset(OnConflict)
_OPERATIONS = frozenset(SourceOperation)
_MAY_BE_EMPTY = frozenset(("stream_epoch", "attributes", *FACT_COLUMNS))
"""Columns that a table of rows may omit."""
_NAMES = {
    table: tuple(field.name for field in fields(table))
    for table in (RangeColumns, StreamObjectColumns, SharedRowColumns)
}
"""Columns of the tables."""
_columns = {table: attrgetter(*names) for table, names in _NAMES.items()}


def check_commit(request: requests.CommitStreamSetObject) -> None:
    """Check an upload or a compaction of stream set objects."""
    check_node(request.node)
    check_between("object_id", request.object_id, -1, INT64_MAX)
    check_between("order_id", request.order_id, -1, INT64_MAX)
    check_between("object_size", request.object_size, 0, OBJECT_SIZE_MAX)
    check_between("attributes", request.attributes, -(2**31), INT32_MAX)
    if request.on_conflict not in _POLICIES:
        raise fail("on_conflict", request.on_conflict, "REJECT_ALL or ACCEPT_VALID")
    _check_facts(request)

    ranges, stream_objects = request.ranges, request.stream_objects
    _check_columns("ranges", ranges, len(ranges.stream_id), _MAY_BE_EMPTY)
    _check_columns("stream_objects", stream_objects, len(stream_objects.stream_id), _MAY_BE_EMPTY)

    shared = request.shared_rows
    if any(map(len, _columns[SharedRowColumns](shared))):
        _check_shared_rows(request)
    rows = len(ranges.stream_id) + len(stream_objects.stream_id) + len(shared)
    if rows > COMMIT_ROWS_MAX:
        raise LimitExceededError(
            f"ranges, stream_objects and shared_rows: got {rows} rows, at most {COMMIT_ROWS_MAX} "
            "in one commit",
            "ranges",
            COMMIT_ROWS_MAX,
        )

    # A replacement of attributes has no rows, which the checks below require.
    if _is_replace(request):
        return

    if request.object_id >= 0 and not (len(ranges.stream_id) or len(shared)):
        raise InvalidRequestError("ranges", "empty, but object_id names a stream set object")
    if request.object_id < 0 and len(ranges.stream_id):
        raise InvalidRequestError("object_id", "got -1, must name the object with the ranges")
    if not rows and not len(request.compacted_object_ids):
        raise InvalidRequestError("stream_objects", "empty, as are ranges: nothing to commit")

    compacts = len(request.compacted_object_ids) > 0
    _check_ranges(ranges, several=compacts)
    if len(stream_objects.stream_id):
        _check_stream_objects(stream_objects, request)
        if compacts:
            _check_no_overlap(ranges, stream_objects)
        else:
            _check_streams_once(ranges, stream_objects)
    if len(shared):
        owned = np.concatenate((ranges.stream_id, stream_objects.stream_id))
        twice = np.isin(shared.stream_id, owned)
        raise_at("shared_rows.stream_id", twice, 0, "a stream of neither ranges nor stream_objects")


def _check_shared_rows(request: requests.CommitStreamSetObject) -> None:
    """Check the rows that append to shared streams."""
    rows, count = request.shared_rows, len(request.shared_rows)
    _check_columns("shared_rows", rows, count, frozenset(_PRODUCER_COLUMNS))
    if request.object_id < 0:
        raise InvalidRequestError("object_id", "not set, must name the object with shared_rows")
    if len(request.compacted_object_ids) or request.failover:
        wanted = "must be empty in a compaction and with failover"
        raise InvalidRequestError("shared_rows", f"got {count} rows, {wanted}")

    raise_at("shared_rows.stream_id", rows.stream_id < 0, 0, ">= 0")
    falls = rows.stream_id[1:] < rows.stream_id[:-1]
    raise_at("shared_rows.stream_id", falls, 1, "not below the row before")
    bad = (rows.record_count < 1) | (rows.record_count > INT32_MAX)
    raise_at("shared_rows.record_count", bad, 0, f"1 to {INT32_MAX}")

    given = rows.producer_id
    for name in _PRODUCER_COLUMNS:
        if len(getattr(rows, name)) != len(given):
            got = f"got {len(getattr(rows, name))} rows, but producer_id has {len(given)}"
            raise InvalidRequestError(f"shared_rows.{name}", got)
    if len(given):
        _check_producers(rows)


def _check_producers(rows: SharedRowColumns) -> None:
    raise_at("shared_rows.producer_id", rows.producer_id < -1, 0, ">= 0, or -1: none")
    has_none = rows.producer_id == -1
    for name, most in (("producer_epoch", PRODUCER_EPOCH_MAX), ("first_sequence", INT32_MAX)):
        values: Int64Column = getattr(rows, name)
        good = np.where(has_none, values == -1, (values >= 0) & (values <= most))
        raise_at(f"shared_rows.{name}", ~good, 0, f"0 to {most}, -1 without a producer")


def _is_replace(request: requests.CommitStreamSetObject) -> bool:
    """Check the sources and return whether the request only replaces attributes."""
    if not len(request.compacted_object_ids):
        return False
    _check_source_ids("compacted_object_ids", request.compacted_object_ids)
    # A commit that names itself as its only source replaces its attributes.
    if request.compacted_object_ids.tolist() != [request.object_id]:
        return False
    rows = len(request.ranges.stream_id) + len(request.stream_objects.stream_id)
    if rows:
        raise InvalidRequestError(
            "compacted_object_ids",
            f"names object_id alone, to replace its attributes, but there are {rows} rows",
        )
    return True


def check_commit_stream_object(request: requests.CommitStreamObject) -> None:
    """Check a compaction of stream objects."""
    check_node(request.node)
    check_between("object_id", request.object_id, -1, INT64_MAX)
    check_between("object_size", request.object_size, 0, OBJECT_SIZE_MAX)
    check_between("stream_id", request.stream_id, 0, INT64_MAX)
    check_between("stream_epoch", request.stream_epoch, 0, INT64_MAX)
    check_between("attributes", request.attributes, -(2**31), INT32_MAX)
    _check_facts(request)

    ids = request.source_object_ids
    _check_source_ids("source_object_ids", ids)
    _check_operations(request)
    # A replacement of attributes keeps the object and its offsets.
    if ids.tolist() == [request.object_id]:
        return

    start, end = request.start_offset, request.end_offset
    if request.object_id < 0:
        if (start, end) != (-1, -1):
            raise fail("start_offset, end_offset", f"{start}, {end}", "-1 without an object_id")
    else:
        check_between("start_offset", start, 0, INT64_MAX)
        check_between("end_offset", end, start + 1, INT64_MAX)


def check_commit_uploads(request: requests.CommitUploads) -> None:
    """Check uploads in columns."""
    check_node(request.node)
    objects, rows = len(request.object_id), len(request.ranges.stream_id)
    check_count("object_id", objects)
    if rows > COMMIT_ROWS_MAX:
        raise LimitExceededError(
            f"ranges: got {rows} rows, at most {COMMIT_ROWS_MAX} in one call",
            "ranges",
            COMMIT_ROWS_MAX,
        )

    for name, values in (
        ("object_size", request.object_size),
        ("range_count", request.range_count),
    ):
        if len(values) != objects:
            raise InvalidRequestError(name, f"got {len(values)} rows, but object_id has {objects}")
    if not all_between(request.object_id, 0, INT64_MAX):
        raise_at("object_id", request.object_id < 0, 0, ">= 0")
    _check_sizes("object_size", request.object_size)

    # A range count is at least 1, and limiting each keeps their sum from overflowing.
    counts = request.range_count
    if not all_between(counts, 1, COMMIT_ROWS_MAX):
        raise_at("range_count", (counts < 1) | (counts > COMMIT_ROWS_MAX), 0, "1 to all of ranges")
    ends = np.cumsum(counts) if objects > 1 else counts
    if (total := ends.item(-1)) != rows:
        raise InvalidRequestError("range_count", f"sums up to {total}, but ranges has {rows}")

    if objects > 1:
        _check_no_twin("object_id", request.object_id)
    _check_fact_columns("", request, objects)
    _check_columns("ranges", request.ranges, rows, _MAY_BE_EMPTY)
    _check_ranges(request.ranges, ends[:-1])


def check_adoption(request: requests.AdoptObjects) -> None:
    """Check objects to adopt."""
    check_commit_uploads(requests.to_uploads(request))

    epochs, rows = request.ranges.stream_epoch, len(request.ranges.stream_id)
    # Adopted streams take over the epochs of their records, so they are required.
    if len(epochs) != rows:
        raise InvalidRequestError(
            "ranges.stream_epoch", f"got {len(epochs)} rows, must be one per range, {rows}"
        )
    raise_at("ranges.stream_epoch", epochs < 0, 0, ">= 0")

    if len(request.after_gap) not in (0, rows):
        raise InvalidRequestError(
            "ranges.after_gap",
            f"got {len(request.after_gap)} rows, must be one per range, or none",
        )
    check_count("replaced_object_ids", len(request.replaced), least=0)
    _check_source_ids("replaced_object_ids", request.replaced)
    _check_no_twin("replaced_object_ids", request.replaced)


def _check_ranges(
    ranges: RangeColumns, firsts: Int64Column | None = None, *, several: bool = False
) -> None:
    """Check the ranges of one object, or of several.

    The columns have equal lengths. `firsts` are the first rows of all objects but the first. With
    `several` an object may contain several ranges of a stream.
    """
    if not len(ranges.stream_id):
        return
    stream_id = ranges.stream_id
    # Uploads of one range are frequent, and vectors would only slow them down.
    if len(stream_id) == 1:
        if (first := stream_id.item()) < 0:
            raise fail("ranges.stream_id[0]", first, ">= 0")
        _check_offsets("ranges", ranges.start_offset, ranges.end_offset)
        return

    below, before = stream_id[1:], stream_id[:-1]
    falls = below < before if several else below <= before
    # Stream ids ascend within an object and start again with the next one.
    if firsts is not None and len(firsts):
        falls[firsts - 1] = False
        raise_at("ranges.stream_id", stream_id < 0, 0, ">= 0")
    elif stream_id[0] < 0:
        raise fail("ranges.stream_id[0]", stream_id[0], ">= 0")

    order = "not below the row before" if several else "above the row before"
    raise_at("ranges.stream_id", falls, 1, order)
    _check_offsets("ranges", ranges.start_offset, ranges.end_offset)

    if several:
        overlaps = (below == before) & (ranges.start_offset[1:] < ranges.end_offset[:-1])
        raise_at("ranges.start_offset", overlaps, 1, "the end of the row before, or above it")


def _check_stream_objects(
    rows: StreamObjectColumns, request: requests.CommitStreamSetObject
) -> None:
    field = "stream_objects"
    _check_fact_columns(f"{field}.", rows, len(rows.stream_id))
    raise_at(f"{field}.stream_id", rows.stream_id < 0, 0, ">= 0")
    raise_at(f"{field}.object_id", rows.object_id < 0, 0, ">= 0")
    _check_sizes(f"{field}.object_size", rows.object_size)
    raise_at(f"{field}.attributes", rows.attributes != rows.attributes.astype(np.int32), 0, "i32")
    _check_offsets(field, rows.start_offset, rows.end_offset)
    check_no_repeat(f"{field}.object_id", rows.object_id.tolist())
    # An object is either the SSO of a commit or one of its stream objects.
    own = rows.object_id == request.object_id
    raise_at(f"{field}.object_id", own, 0, "another object than object_id")


def _check_streams_once(ranges: RangeColumns, rows: StreamObjectColumns) -> None:
    """Check that an upload has each stream in one row."""
    check_no_repeat("stream_objects.stream_id", rows.stream_id.tolist())
    shared = np.isin(rows.stream_id, ranges.stream_id)
    raise_at("stream_objects.stream_id", shared, 0, "a stream that is not in ranges as well")


def _check_no_overlap(ranges: RangeColumns, rows: StreamObjectColumns) -> None:
    """Check that the results of a compaction contain no offset twice. Ranges are validated."""
    stream_id = np.concatenate((ranges.stream_id, rows.stream_id))
    start = np.concatenate((ranges.start_offset, rows.start_offset))
    end = np.concatenate((ranges.end_offset, rows.end_offset))
    order = np.lexsort((start, stream_id))
    same = stream_id[order[1:]] == stream_id[order[:-1]]
    overlaps = np.flatnonzero(same & (start[order[1:]] < end[order[:-1]]))

    if len(overlaps):
        # Ranges do not overlap each other, and come first: the later row is a stream object.
        first = int(overlaps[0])
        row = int(max(order[first], order[first + 1])) - len(ranges.stream_id)
        raise InvalidRequestError(
            f"stream_objects.start_offset[{row}]",
            f"offsets {rows.start_offset[row]} to {rows.end_offset[row]} of stream "
            f"{rows.stream_id[row]} overlap another row: each offset must be in one row",
        )


def _check_facts(request: requests.CommitStreamSetObject | requests.CommitStreamObject) -> None:
    low, high, crc32c = request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c
    # The usual case: a commit without facts.
    if low == high == crc32c == UNKNOWN:
        return
    check_between("min_timestamp_ms", low, UNKNOWN, INT64_MAX)
    if low == UNKNOWN != high:
        raise fail("max_timestamp_ms", high, "unknown, as min_timestamp_ms is")
    check_between("max_timestamp_ms", high, low, INT64_MAX)
    check_between("crc32c", crc32c, UNKNOWN, CRC32C_MAX)
    if request.object_id < 0:
        name, value = ("crc32c", crc32c) if high == UNKNOWN else ("max_timestamp_ms", high)
        raise fail(name, value, "unknown without an object_id")


def _check_fact_columns(
    prefix: str, columns: requests.CommitUploads | StreamObjectColumns, rows: int
) -> None:
    low, high, crc32c = columns.min_timestamp_ms, columns.max_timestamp_ms, columns.crc32c
    if not (len(low) or len(high) or len(crc32c)):
        return

    for name, values in zip(FACT_COLUMNS, (low, high, crc32c), strict=True):
        if len(values) not in (0, rows):
            raise InvalidRequestError(
                f"{prefix}{name}",
                f"got {len(values)} rows, must be none or one per object, {rows}",
            )

    # Look-ups by time need both bounds, or none.
    if len(low) != len(high):
        raise InvalidRequestError(
            f"{prefix}max_timestamp_ms",
            f"got {len(high)} rows, but min_timestamp_ms has {len(low)}: set both or neither",
        )

    raise_at(f"{prefix}min_timestamp_ms", low < UNKNOWN, 0, "-1 or more")
    crossed = (high < low) | ((low == UNKNOWN) & (high != UNKNOWN))
    raise_at(f"{prefix}max_timestamp_ms", crossed, 0, "min_timestamp_ms or more, -1 if that is -1")
    outside = (crc32c < UNKNOWN) | (crc32c > CRC32C_MAX)
    raise_at(f"{prefix}crc32c", outside, 0, f"-1 to {CRC32C_MAX}")


def _check_operations(request: requests.CommitStreamObject) -> None:
    sources, operations = len(request.source_object_ids), len(request.operations)
    if operations not in (0, sources):
        raise InvalidRequestError(
            "operations", f"got {operations}, must be none or one per source, {sources}"
        )

    for index, operation in enumerate(request.operations):
        if operation not in _OPERATIONS:
            raise fail(f"operations[{index}]", operation, "DELETE, KEEP_DATA or DEEP_DELETE")

    # KEEP_DATA leaves the source's bytes in place, and only a composite can link to them.
    composite = request.object_id >= 0 and request.attributes & KIND_MASK == COMPOSITE_BITS
    if SourceOperation.KEEP_DATA in request.operations and not composite:
        raise InvalidRequestError(
            "operations",
            "KEEP_DATA needs a composite object as the result, which keeps the data: "
            "bits 0-1 of attributes must be 1",
        )


def _check_source_ids(field: str, ids: Int64Column) -> None:
    raise_at(field, ids < 0, 0, ">= 0")


def _check_no_twin(field: str, ids: Int64Column) -> None:
    # Sorting finds that there is a duplicate, counting then finds its value for the error.
    ordered = np.sort(ids)
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        check_no_repeat(field, ids.tolist())


def _check_columns(
    field: str,
    columns: RangeColumns | StreamObjectColumns | SharedRowColumns,
    rows: int,
    optional: Set[str],
) -> None:
    kind = type(columns)
    lengths = [len(values) for values in _columns[kind](columns)]
    if lengths.count(rows) == len(lengths):
        return
    for name, length in zip(_NAMES[kind], lengths, strict=True):
        if length != rows and not (length == 0 and name in optional):
            raise InvalidRequestError(
                f"{field}.{name}", f"got {length} rows, but {field}.stream_id has {rows}"
            )


def _check_sizes(field: str, sizes: Int64Column) -> None:
    if not all_between(sizes, 0, OBJECT_SIZE_MAX):
        outside = (sizes < 0) | (sizes > OBJECT_SIZE_MAX)
        raise_at(field, outside, 0, f"0 to {OBJECT_SIZE_MAX} bytes")


def _check_offsets(field: str, start: Int64Column, end: Int64Column) -> None:
    if len(start) == 1 and 0 <= start.item() < end.item():
        return
    raise_at(f"{field}.start_offset", start < 0, 0, ">= 0")
    raise_at(f"{field}.end_offset", end <= start, 0, "above start_offset")
