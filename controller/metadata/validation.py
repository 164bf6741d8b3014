"""What a request must be before the map looks at its state.

Every check here depends on the request alone. A malformed request raises `InvalidRequestError`
naming the field as in `proto/`, one over a limit `LimitExceededError`; neither changes anything.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from controller.errors import InvalidRequestError, LimitExceededError
from controller.metadata.requests import (
    CheckObjects,
    CloseStreams,
    CommitStreamSetObject,
    CreateStreams,
    DeleteKVs,
    DeleteStreams,
    DescribeObjects,
    DescribeStreams,
    ExpireObjects,
    GetKVs,
    GetNodes,
    GetObjects,
    GetOpeningStreams,
    ListKVs,
    OpenStreams,
    PrepareObjects,
    PutKVs,
    ReadRequest,
    RegisterNode,
    RemoveObjects,
    StreamToClose,
    StreamToDelete,
    StreamToOpen,
    StreamToTrim,
    TrimStreams,
    WriteRequest,
)
from controller.metadata.values import (
    Int64Column,
    NodeIdentity,
    PageRequest,
    RangeColumns,
    StreamObjectColumns,
    Tags,
)

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
    ranges, stream_objects = request.ranges, request.stream_objects
    rows = len(ranges.stream_id) + len(stream_objects.stream_id)
    if rows > COMMIT_ROWS_MAX:
        raise LimitExceededError(
            f"ranges and stream_objects: got {rows} rows, at most {COMMIT_ROWS_MAX} in one commit"
        )
    if request.object_id >= 0 and not len(ranges.stream_id):
        raise InvalidRequestError("ranges", "empty, but object_id names a stream set object")
    if request.object_id < 0 and len(ranges.stream_id):
        raise InvalidRequestError("object_id", "got -1, must name the object that holds the ranges")
    if not rows:
        raise InvalidRequestError("stream_objects", "empty, as are ranges; nothing to commit")
    _check_ranges(ranges)
    if len(stream_objects.stream_id):
        _check_stream_objects(stream_objects, request)


def _check_ranges(ranges: RangeColumns) -> None:
    rows = len(ranges.stream_id)
    _check_columns("ranges", ranges, rows, optional=("stream_epoch",))
    if rows == 0:
        return
    stream_id = ranges.stream_id
    if stream_id[0] < 0:
        raise _fail("ranges.stream_id[0]", stream_id[0], ">= 0")
    _raise_at("ranges.stream_id", stream_id[1:] <= stream_id[:-1], 1, "above the row before")
    _check_offsets("ranges", ranges.start_offset, ranges.end_offset)


def _check_stream_objects(rows: StreamObjectColumns, request: CommitStreamSetObject) -> None:
    field = "stream_objects"
    _check_columns(field, rows, len(rows.stream_id), optional=("stream_epoch", "attributes"))
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


def _check_expire_objects(request: ExpireObjects) -> None:
    _check_between("limit", request.limit, 1, BATCH_MAX)


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
    ExpireObjects: _check_expire_objects,
    RemoveObjects: _check_object_ids,
    RegisterNode: _check_register_node,
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
