"""What a request must be before the map looks at its state.

Every check here depends on the request alone. A malformed request raises `InvalidRequestError`
naming the field as in `proto/`, one over a limit `LimitExceededError`; neither changes anything.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from controller.errors import InvalidRequestError, LimitExceededError
from controller.metadata.object_facts import CRC32C_MAX, UNKNOWN
from controller.metadata.requests import (
    AbandonUploads,
    AssignRecoveries,
    CheckObjects,
    CloseStreams,
    CommitStreamObject,
    CommitStreamSetObject,
    CommitUploads,
    CreateStreams,
    DeleteKVs,
    DeleteStreams,
    DescribeObjects,
    DescribeStreams,
    DestroyDeadSetObjects,
    ExpireObjects,
    GetKVs,
    GetNextNodeId,
    GetNodes,
    GetObjects,
    GetOpeningStreams,
    HoldDeletions,
    ListKVs,
    OpenStreams,
    PrepareObjects,
    PutKVs,
    ReadRequest,
    RegisterNode,
    RemoveObjects,
    SetNodeLock,
    StreamToClose,
    StreamToDelete,
    StreamToOpen,
    StreamToTrim,
    SuperviseNode,
    SweepDeletedStreams,
    TrimStreams,
    UnregisterNode,
    WriteRequest,
)
from controller.metadata.values import (
    COMPOSITE_BITS,
    KIND_MASK,
    Int64Column,
    NodeIdentity,
    PageRequest,
    RangeColumns,
    SourceOperation,
    StreamObjectColumns,
    Tags,
)
from controller.records.record import FACT_COLUMNS

BATCH_MAX = 10_000
"""Items in one request."""
COMMIT_ROWS_MAX = 20_000
"""Ranges and stream objects in one commit."""
PAGE_SIZE_MAX = 10_000
TTL_MS_MIN = 1_000
TTL_MS_MAX = 7 * 24 * 3_600_000
TAGS_MAX = 16
TAG_BYTES_MAX = 1_024
REQUEST_ID_LENGTH_MAX = 64
KEY_BYTES_MAX = 1_024
VALUE_BYTES_MAX = 1 << 20
WAL_CONFIG_BYTES_MAX = 16_384

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def validate(request: WriteRequest | ReadRequest) -> None:
    """Raise unless the request is well-formed.

    Raises:
        InvalidRequestError: a field is malformed.
        LimitExceededError: the request is larger than a limit.
    """
    _CHECKS[type(request)](request)


def _fail(field: str, got: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(field, f"got {got}, must be {wanted}")


def _check_between(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _fail(field, value, f"{low} to {high}")


def _check_batch(field: str, items: Sequence[object]) -> None:
    if not items:
        raise _fail(field, "none", f"1 to {BATCH_MAX}")
    if len(items) > BATCH_MAX:
        raise LimitExceededError(f"{field}: got {len(items)}, at most {BATCH_MAX} in one request")


def _check_no_repeat(field: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        twice, _ = Counter(values).most_common(1)[0]
        raise InvalidRequestError(field, f"{twice} appears twice, must appear once")


def _check_node(node: NodeIdentity) -> None:
    _check_between("node.node_id", node.node_id, 0, _INT32_MAX)
    _check_between("node.node_epoch", node.node_epoch, 0, _INT64_MAX)


def _check_request_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= REQUEST_ID_LENGTH_MAX:
        raise _fail("request_id", repr(request_id), f"1 to {REQUEST_ID_LENGTH_MAX} characters")


def _check_tags(field: str, tags: Tags) -> None:
    if not tags:
        return
    if len(tags) > TAGS_MAX:
        raise LimitExceededError(f"{field}: got {len(tags)}, at most {TAGS_MAX}")
    _check_no_repeat(f"{field}.key", [key for key, _ in tags])
    for part in (part for tag in tags for part in tag):
        if len(part.encode()) > TAG_BYTES_MAX:
            raise LimitExceededError(f"{field}: a key or value is over {TAG_BYTES_MAX} bytes")


def _check_page(page: PageRequest) -> None:
    _check_between("page.page_size", page.page_size, 0, PAGE_SIZE_MAX)


def _check_id_page(page: PageRequest) -> None:
    _check_page(page)
    if page.page_token and not (page.page_token.isascii() and page.page_token.isdecimal()):
        raise _fail("page.page_token", repr(page.page_token), "empty or a next_page_token")
    if page.page_token and int(page.page_token) > _INT64_MAX:
        raise _fail("page.page_token", page.page_token, "empty or a next_page_token")


def _check_create_streams(request: CreateStreams) -> None:
    _check_request_id(request.request_id)
    _check_node(request.node)
    _check_batch("streams", request.streams)
    for index, stream in enumerate(request.streams):
        _check_tags(f"streams[{index}].tags", stream.tags)


def _check_streams(
    node: NodeIdentity,
    streams: Sequence[StreamToOpen | StreamToClose | StreamToTrim | StreamToDelete],
    epoch_min: int,
) -> None:
    _check_node(node)
    _check_batch("streams", streams)
    for index, stream in enumerate(streams):
        if not 0 <= stream.stream_id <= _INT64_MAX:
            raise _fail(f"streams[{index}].stream_id", stream.stream_id, ">= 0")
        if not epoch_min <= stream.stream_epoch <= _INT64_MAX:
            raise _fail(f"streams[{index}].stream_epoch", stream.stream_epoch, f">= {epoch_min}")
    _check_no_repeat("streams.stream_id", [stream.stream_id for stream in streams])


def _check_open_streams(request: OpenStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=0)
    for index, stream in enumerate(request.streams):
        _check_tags(f"streams[{index}].tags", stream.tags)


def _check_close_streams(request: CloseStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=0)
    for index, stream in enumerate(request.streams):
        if stream.end_offset is not None:
            _check_between(f"streams[{index}].end_offset", stream.end_offset, 0, _INT64_MAX)


def _check_abandon_uploads(request: AbandonUploads) -> None:
    _check_between("node_id", request.node_id, 0, _INT32_MAX)
    _check_described("stream_ids", request.stream_ids)
    _check_no_repeat("stream_ids", request.stream_ids)


def _check_trim_streams(request: TrimStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=0)
    for index, stream in enumerate(request.streams):
        field = f"streams[{index}].new_start_offset"
        _check_between(field, stream.new_start_offset, 0, _INT64_MAX)


def _check_delete_streams(request: DeleteStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=-1)


def _check_get_opening_streams(request: GetOpeningStreams) -> None:
    _check_node(request.node)
    _check_id_page(request.page)


def _check_prepare_objects(request: PrepareObjects) -> None:
    _check_request_id(request.request_id)
    _check_node(request.node)
    _check_between("count", request.count, 1, BATCH_MAX)
    _check_between("ttl_ms", request.ttl_ms, TTL_MS_MIN, TTL_MS_MAX)


def _check_commit(request: CommitStreamSetObject) -> None:
    _check_node(request.node)
    _check_between("object_id", request.object_id, -1, _INT64_MAX)
    _check_between("order_id", request.order_id, -1, _INT64_MAX)
    _check_between("object_size", request.object_size, 0, _INT64_MAX)
    _check_between("attributes", request.attributes, -(2**31), _INT32_MAX)
    _check_facts(request)
    ranges, stream_objects = request.ranges, request.stream_objects
    rows = len(ranges.stream_id) + len(stream_objects.stream_id)
    if rows > COMMIT_ROWS_MAX:
        raise LimitExceededError(
            f"ranges and stream_objects: got {rows} rows, at most {COMMIT_ROWS_MAX} in one commit"
        )
    if _is_replace(request):
        return
    if request.object_id >= 0 and not len(ranges.stream_id):
        raise InvalidRequestError("ranges", "empty, but object_id names a stream set object")
    if request.object_id < 0 and len(ranges.stream_id):
        raise InvalidRequestError("object_id", "got -1, must name the object that holds the ranges")
    if not rows and not len(request.compacted_object_ids):
        raise InvalidRequestError("stream_objects", "empty, as are ranges; nothing to commit")
    _check_ranges(ranges)
    if len(stream_objects.stream_id):
        _check_stream_objects(stream_objects, request)


def _is_replace(request: CommitStreamSetObject) -> bool:
    """Check the sources; return whether they say that only attributes are replaced."""
    _check_source_ids("compacted_object_ids", request.compacted_object_ids)
    if request.compacted_object_ids.tolist() != [request.object_id]:
        return False
    rows = len(request.ranges.stream_id) + len(request.stream_objects.stream_id)
    if rows:
        raise InvalidRequestError(
            "compacted_object_ids",
            f"names object_id alone, to replace its attributes, but there are {rows} rows",
        )
    return True


def _check_source_ids(field: str, ids: Int64Column) -> None:
    if len(ids) > BATCH_MAX:
        raise LimitExceededError(f"{field}: got {len(ids)}, at most {BATCH_MAX} in one request")
    _raise_at(field, ids < 0, 0, ">= 0")


def _check_commit_stream_object(request: CommitStreamObject) -> None:
    _check_node(request.node)
    _check_between("object_id", request.object_id, -1, _INT64_MAX)
    _check_between("object_size", request.object_size, 0, _INT64_MAX)
    _check_between("stream_id", request.stream_id, 0, _INT64_MAX)
    _check_between("stream_epoch", request.stream_epoch, 0, _INT64_MAX)
    _check_between("attributes", request.attributes, -(2**31), _INT32_MAX)
    _check_facts(request)
    ids = request.source_object_ids
    if not len(ids):
        raise _fail("source_object_ids", "none", f"1 to {BATCH_MAX}")
    _check_source_ids("source_object_ids", ids)
    _check_operations(request)
    if ids.tolist() == [request.object_id]:
        return
    start, end = request.start_offset, request.end_offset
    if request.object_id < 0:
        if (start, end) != (-1, -1):
            raise _fail("start_offset, end_offset", f"{start}, {end}", "-1 without an object_id")
    else:
        _check_between("start_offset", start, 0, _INT64_MAX)
        _check_between("end_offset", end, start + 1, _INT64_MAX)


def _check_facts(request: CommitStreamSetObject | CommitStreamObject) -> None:
    low, high, crc32c = request.min_timestamp_ms, request.max_timestamp_ms, request.crc32c
    if low == high == crc32c == UNKNOWN:
        return
    _check_between("min_timestamp_ms", low, UNKNOWN, _INT64_MAX)
    if low == UNKNOWN != high:
        raise _fail("max_timestamp_ms", high, "unknown, as min_timestamp_ms is")
    _check_between("max_timestamp_ms", high, low, _INT64_MAX)
    _check_between("crc32c", crc32c, UNKNOWN, CRC32C_MAX)
    if request.object_id < 0:
        name, value = ("crc32c", crc32c) if high == UNKNOWN else ("max_timestamp_ms", high)
        raise _fail(name, value, "unknown without an object_id")


def _check_fact_columns(
    prefix: str, columns: CommitUploads | StreamObjectColumns, rows: int
) -> None:
    low, high, crc32c = (getattr(columns, name) for name in FACT_COLUMNS)
    if not (len(low) or len(high) or len(crc32c)):
        return
    for name, values in zip(FACT_COLUMNS, (low, high, crc32c), strict=True):
        if len(values) not in (0, rows):
            raise InvalidRequestError(
                f"{prefix}{name}", f"got {len(values)} rows, must be none or one an object, {rows}"
            )
    if len(low) != len(high):
        raise InvalidRequestError(
            f"{prefix}max_timestamp_ms",
            f"got {len(high)} rows, but min_timestamp_ms has {len(low)}; give both or neither",
        )
    _raise_at(f"{prefix}min_timestamp_ms", low < UNKNOWN, 0, "-1 or more")
    crossed = (high < low) | ((low == UNKNOWN) & (high != UNKNOWN))
    _raise_at(f"{prefix}max_timestamp_ms", crossed, 0, "min_timestamp_ms or more, -1 if that is -1")
    outside = (crc32c < UNKNOWN) | (crc32c > CRC32C_MAX)
    _raise_at(f"{prefix}crc32c", outside, 0, f"-1 to {CRC32C_MAX}")


def _check_operations(request: CommitStreamObject) -> None:
    sources, operations = len(request.source_object_ids), len(request.operations)
    if operations not in (0, sources):
        raise InvalidRequestError(
            "operations", f"got {operations}, must be none or one a source, {sources}"
        )
    composite = request.object_id >= 0 and request.attributes & KIND_MASK == COMPOSITE_BITS
    if SourceOperation.KEEP_DATA in request.operations and not composite:
        raise InvalidRequestError(
            "operations",
            "KEEP_DATA, but no composite object results that could keep the data; "
            "bits 0-1 of attributes must be 1",
        )


def _check_commit_uploads(request: CommitUploads) -> None:
    _check_node(request.node)
    objects, rows = len(request.object_id), len(request.ranges.stream_id)
    if not objects:
        raise _fail("object_id", "none", f"1 to {BATCH_MAX}")
    if objects > BATCH_MAX:
        raise LimitExceededError(f"object_id: got {objects}, at most {BATCH_MAX} in one request")
    if rows > COMMIT_ROWS_MAX:
        raise LimitExceededError(f"ranges: got {rows} rows, at most {COMMIT_ROWS_MAX} in one call")
    for name in ("object_size", "range_count"):
        length = len(getattr(request, name))
        if length != objects:
            raise InvalidRequestError(name, f"got {length} rows, but object_id has {objects}")
    _raise_at("object_id", request.object_id < 0, 0, ">= 0")
    _raise_at("object_size", request.object_size < 0, 0, ">= 0")
    counts = request.range_count
    # Together with the limit above this keeps their sum from overflowing.
    _raise_at("range_count", (counts < 1) | (counts > COMMIT_ROWS_MAX), 0, "1 to all of ranges")
    ends = np.cumsum(counts)
    if ends[-1] != rows:
        raise InvalidRequestError("range_count", f"sums up to {ends[-1]}, but ranges has {rows}")
    if objects > 1:
        _check_no_twin("object_id", request.object_id)
    _check_fact_columns("", request, objects)
    _check_ranges(request.ranges, ends[:-1])


def _check_no_twin(field: str, ids: Int64Column) -> None:
    ordered = np.sort(ids)
    if np.count_nonzero(ordered[1:] == ordered[:-1]):
        _check_no_repeat(field, ids.tolist())


def _check_ranges(ranges: RangeColumns, firsts: Int64Column | None = None) -> None:
    """Check ranges of one object, or of several; then `firsts` are the others' first rows."""
    rows = len(ranges.stream_id)
    _check_columns("ranges", ranges, rows, optional=("stream_epoch",))
    if rows == 0:
        return
    stream_id = ranges.stream_id
    falls = stream_id[1:] <= stream_id[:-1]
    if firsts is not None and len(firsts):
        falls[firsts - 1] = False
        _raise_at("ranges.stream_id", stream_id < 0, 0, ">= 0")
    elif stream_id[0] < 0:
        raise _fail("ranges.stream_id[0]", stream_id[0], ">= 0")
    _raise_at("ranges.stream_id", falls, 1, "above the row before")
    _check_offsets("ranges", ranges.start_offset, ranges.end_offset)


def _check_stream_objects(rows: StreamObjectColumns, request: CommitStreamSetObject) -> None:
    field = "stream_objects"
    optional = ("stream_epoch", "attributes", *FACT_COLUMNS)
    _check_columns(field, rows, len(rows.stream_id), optional)
    _check_fact_columns(f"{field}.", rows, len(rows.stream_id))
    _raise_at(f"{field}.stream_id", rows.stream_id < 0, 0, ">= 0")
    _raise_at(f"{field}.object_id", rows.object_id < 0, 0, ">= 0")
    _raise_at(f"{field}.object_size", rows.object_size < 0, 0, ">= 0")
    _raise_at(f"{field}.attributes", rows.attributes != rows.attributes.astype(np.int32), 0, "i32")
    _check_offsets(field, rows.start_offset, rows.end_offset)
    _check_no_repeat(f"{field}.object_id", rows.object_id.tolist())
    _check_no_repeat(f"{field}.stream_id", rows.stream_id.tolist())
    own = rows.object_id == request.object_id
    _raise_at(f"{field}.object_id", own, 0, "another object than object_id")
    shared = np.isin(rows.stream_id, request.ranges.stream_id)
    _raise_at(f"{field}.stream_id", shared, 0, "a stream that is not in ranges too")


def _check_columns(
    field: str, columns: RangeColumns | StreamObjectColumns, rows: int, optional: Sequence[str]
) -> None:
    for name in columns.__slots__:
        length = len(getattr(columns, name))
        if length != rows and not (length == 0 and name in optional):
            raise InvalidRequestError(
                f"{field}.{name}", f"got {length} rows, but {field}.stream_id has {rows}"
            )


def _check_offsets(field: str, start: Int64Column, end: Int64Column) -> None:
    _raise_at(f"{field}.start_offset", start < 0, 0, ">= 0")
    _raise_at(f"{field}.end_offset", end <= start, 0, "above start_offset")


def _raise_at(field: str, bad: np.ndarray, first_row: int, wanted: str) -> None:
    if np.count_nonzero(bad):
        row = int(np.argmax(bad)) + first_row
        raise InvalidRequestError(f"{field}[{row}]", f"must be {wanted}")


def _check_limit(request: ExpireObjects | SweepDeletedStreams) -> None:
    _check_between("limit", request.limit, 1, BATCH_MAX)


def _check_destroy_dead(request: DestroyDeadSetObjects) -> None:
    _check_between("node_id", request.node_id, 0, _INT32_MAX)
    _check_between("after_object_id", request.after_object_id, -1, _INT64_MAX - 1)
    _check_between("limit", request.limit, 1, BATCH_MAX)


def _check_hold(request: HoldDeletions) -> None:
    _check_between("hold_ms", request.hold_ms, 1, TTL_MS_MAX)


def _check_object_ids(request: RemoveObjects | CheckObjects) -> None:
    _check_batch("object_ids", request.object_ids)
    _check_id_range("object_ids", request.object_ids)


def _check_id_range(field: str, ids: Sequence[int]) -> None:
    if ids:
        _check_between(field, min(ids), 0, _INT64_MAX)
        _check_between(field, max(ids), 0, _INT64_MAX)


def _check_register_node(request: RegisterNode) -> None:
    _check_node(request.node)
    _check_tags("tags", request.tags)
    if len(request.wal_config.encode()) > WAL_CONFIG_BYTES_MAX:
        raise LimitExceededError(f"wal_config: over {WAL_CONFIG_BYTES_MAX} bytes")


def _check_node_request(request: UnregisterNode | SuperviseNode) -> None:
    _check_node(request.node)


def _check_next_node_id(request: GetNextNodeId) -> None:
    _check_request_id(request.request_id)


def _check_set_node_lock(request: SetNodeLock) -> None:
    _check_between("node_id", request.node_id, 0, _INT32_MAX)


def _check_assign_recoveries(request: AssignRecoveries) -> None:
    _check_batch("targets", request.targets)
    for index, target in enumerate(request.targets):
        field = f"targets[{index}]"
        _check_between(f"{field}.node_id", target.node_id, 0, _INT32_MAX)
        _check_between(f"{field}.node_epoch", target.node_epoch, 0, _INT64_MAX)
        _check_between(f"{field}.target_id", target.target_id, -1, _INT32_MAX)
        if target.target_id == target.node_id:
            raise _fail(f"{field}.target_id", target.target_id, "another node than node_id")
    _check_no_repeat("targets.node_id", [target.node_id for target in request.targets])


def _check_key(field: str, namespace: str, key: str) -> None:
    if not key:
        raise _fail(f"{field}.key", "an empty text", "not empty")
    for name, text in (("key", key), ("namespace", namespace)):
        if len(text.encode()) > KEY_BYTES_MAX:
            raise LimitExceededError(f"{field}.{name}: over {KEY_BYTES_MAX} bytes")


def _check_put_kvs(request: PutKVs) -> None:
    _check_batch("items", request.items)
    for index, item in enumerate(request.items):
        _check_key(f"items[{index}]", item.namespace, item.key)
        if len(item.value) > VALUE_BYTES_MAX:
            raise LimitExceededError(f"items[{index}].value: over {VALUE_BYTES_MAX} bytes")
        _check_version(f"items[{index}]", item.expected_version)
    _check_no_repeat("items.key", [(item.namespace, item.key) for item in request.items])


def _check_version(field: str, expected_version: int | None) -> None:
    if expected_version is not None:
        _check_between(f"{field}.expected_version", expected_version, 0, _INT64_MAX)


def _check_kv_keys(request: GetKVs | DeleteKVs) -> None:
    _check_batch("keys", request.keys)
    for index, key in enumerate(request.keys):
        _check_key(f"keys[{index}]", key.namespace, key.key)
        _check_version(f"keys[{index}]", key.expected_version)
    if isinstance(request, DeleteKVs):
        _check_no_repeat("keys.key", [(key.namespace, key.key) for key in request.keys])


def _check_list_kvs(request: ListKVs) -> None:
    _check_page(request.page)


def _check_describe_streams(request: DescribeStreams) -> None:
    _check_id_page(request.page)
    _check_described("stream_ids", request.stream_ids)
    if request.owner_node_id is not None:
        _check_between("owner_node_id", request.owner_node_id, 0, _INT32_MAX)


def _check_describe_objects(request: DescribeObjects) -> None:
    _check_id_page(request.page)
    _check_described("object_ids", request.object_ids)


def _check_described(field: str, ids: Sequence[int]) -> None:
    if len(ids) > BATCH_MAX:
        raise LimitExceededError(f"{field}: got {len(ids)}, at most {BATCH_MAX} in one request")
    _check_id_range(field, ids)


def _check_get_objects(request: GetObjects) -> None:
    _check_batch("queries", request.queries)
    for index, query in enumerate(request.queries):
        field = f"queries[{index}]"
        _check_between(f"{field}.stream_id", query.stream_id, 0, _INT64_MAX)
        _check_between(f"{field}.start_offset", query.start_offset, 0, _INT64_MAX)
        _check_between(f"{field}.limit", query.limit, 0, BATCH_MAX)
        if query.end_offset != -1 and query.end_offset < query.start_offset:
            raise _fail(f"{field}.end_offset", query.end_offset, "-1 or >= start_offset")


def _check_get_nodes(request: GetNodes) -> None:
    _check_described("node_ids", request.node_ids)


# Each value takes exactly its key's type, which a dictionary's type can't say.
_CHECKS: dict[type, Callable[..., None]] = {
    CreateStreams: _check_create_streams,
    OpenStreams: _check_open_streams,
    CloseStreams: _check_close_streams,
    TrimStreams: _check_trim_streams,
    DeleteStreams: _check_delete_streams,
    GetOpeningStreams: _check_get_opening_streams,
    PrepareObjects: _check_prepare_objects,
    CommitStreamSetObject: _check_commit,
    CommitUploads: _check_commit_uploads,
    AbandonUploads: _check_abandon_uploads,
    CommitStreamObject: _check_commit_stream_object,
    ExpireObjects: _check_limit,
    SweepDeletedStreams: _check_limit,
    DestroyDeadSetObjects: _check_destroy_dead,
    HoldDeletions: _check_hold,
    RemoveObjects: _check_object_ids,
    RegisterNode: _check_register_node,
    UnregisterNode: _check_node_request,
    SuperviseNode: _check_node_request,
    GetNextNodeId: _check_next_node_id,
    SetNodeLock: _check_set_node_lock,
    AssignRecoveries: _check_assign_recoveries,
    PutKVs: _check_put_kvs,
    DeleteKVs: _check_kv_keys,
    DescribeStreams: _check_describe_streams,
    GetObjects: _check_get_objects,
    DescribeObjects: _check_describe_objects,
    CheckObjects: _check_object_ids,
    GetNodes: _check_get_nodes,
    GetKVs: _check_kv_keys,
    ListKVs: _check_list_kvs,
}
