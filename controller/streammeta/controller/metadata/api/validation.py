"""Validation of requests before they reach the metadata.

The checks depend on the request alone. A malformed request raises `InvalidRequestError` with the
field's name in `proto/`, one over a limit `LimitExceededError`. Neither changes anything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from streammeta.controller.errors import InvalidRequestError, LimitExceededError
from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api.commit_validation import (
    OBJECT_SIZE_MAX,
    check_adoption,
    check_between,
    check_commit,
    check_commit_stream_object,
    check_commit_uploads,
    check_count,
    check_no_repeat,
    check_node,
    fail,
    too_many,
)
from streammeta.controller.metadata.api.named_answers import OWN_NAMESPACES
from streammeta.controller.metadata.api.object_listings import ListStreamObjects
from streammeta.controller.metadata.api.object_slices import ObjectQueryColumns
from streammeta.controller.metadata.tables.object_facts import CRC32C_MAX
from streammeta.controller.metadata.tables.values import (
    INT32_MAX,
    INT64_MAX,
    NodeIdentity,
    PageRequest,
    Tags,
)
from streammeta.rpc.method_facts import BATCH_MAX, RequestList
from streammeta.rpc.method_rows import TAGS_MAX
from streammeta.rpc.methods import METHODS

PAGE_SIZE_MAX = 10_000
TTL_MS_MIN = 1_000
TTL_MS_MAX = 7 * 24 * 3_600_000
TAG_BYTES_MAX = 1_024
REQUEST_ID_LENGTH_MAX = 64
CLUSTER_UUID_LENGTH_MAX = 64
KEY_BYTES_MAX = 1_024
VALUE_BYTES_MAX = 1 << 20
NAME_BYTES_MAX = 512
WAL_CONFIG_BYTES_MAX = 16_384
PROCESS_ID_BYTES_MAX = 64
_ID_DIGITS_MAX = len(str(INT64_MAX))

_Stream: TypeAlias = (
    requests.StreamToOpen | requests.StreamToClose | requests.StreamToTrim | requests.StreamToDelete
)


def validate(request: requests.WriteRequest | requests.ReadRequest) -> None:
    """Raise unless the request is well-formed.

    Raises:
        InvalidRequestError: a field is malformed.
        LimitExceededError: the request is larger than a limit.
    """
    for limit in _LISTS.get(type(request), ()):
        check_count(limit.field, len(getattr(request, limit.field)), limit.least, limit.most)
    check: Callable[..., None] = _CHECKS.get(type(request), _check_fields)
    check(request)


def _check_fields(request: Any) -> None:
    """Check each field by the rule for its name. Fields without a rule accept every value."""
    for name in request.__dataclass_fields__:
        check = _FIELDS.get(name)
        if check is not None:
            check(name, getattr(request, name))


def _between(low: int, high: int) -> Callable[[str, int], None]:
    return lambda field, value: check_between(field, value, low, high)


def _length(longest: int) -> Callable[[str, str], None]:
    def check(field: str, text: str) -> None:
        if not 1 <= len(text) <= longest:
            raise fail(field, repr(text), f"1 to {longest} characters")

    return check


def _too_long(field: str, most: int) -> LimitExceededError:
    return LimitExceededError(f"{field}: a text or value exceeds {most} bytes", field, most)


def _check_wal_config(field: str, text: str) -> None:
    if len(text.encode()) > WAL_CONFIG_BYTES_MAX:
        raise _too_long(field, WAL_CONFIG_BYTES_MAX)


def _check_process_id(field: str, text: str) -> None:
    if len(text.encode()) > PROCESS_ID_BYTES_MAX:
        raise fail(field, repr(text), f"at most {PROCESS_ID_BYTES_MAX} bytes")


def _check_tags(field: str, tags: Tags) -> None:
    if not tags:
        return
    if len(tags) > TAGS_MAX:
        raise too_many(field, len(tags), TAGS_MAX)
    check_no_repeat(f"{field}.key", [key for key, _ in tags])
    for part in (part for tag in tags for part in tag):
        if len(part.encode()) > TAG_BYTES_MAX:
            raise _too_long(field, TAG_BYTES_MAX)


def _check_page(page: PageRequest) -> None:
    check_between("page.page_size", page.page_size, 0, PAGE_SIZE_MAX)


def _check_id_page(_: str, page: PageRequest | None) -> None:
    if page is None:
        return
    _check_page(page)
    if page.page_token and not _is_id(page.page_token):
        raise _not_a_token(page.page_token)


def _is_id(text: str) -> bool:
    # Check the length first: `int` rejects very long texts with an error of its own kind.
    is_number = len(text) <= _ID_DIGITS_MAX and text.isascii() and text.isdecimal()
    return is_number and int(text) <= INT64_MAX


def _not_a_token(token: str) -> InvalidRequestError:
    got = repr(token if len(token) <= _ID_DIGITS_MAX else f"{token[:_ID_DIGITS_MAX]}...")
    return fail("page.page_token", got, "empty or a next_page_token")


def _check_create_streams(request: requests.CreateStreams) -> None:
    _check_fields(request)
    for index, stream in enumerate(request.streams):
        _check_tags(f"streams[{index}].tags", stream.tags)


def _check_streams(node: NodeIdentity, streams: Sequence[_Stream], epoch_min: int) -> None:
    check_node(node)
    _check_stream_ids("streams", streams, epoch_min)


def _check_stream_ids(field: str, streams: Sequence[_Stream], epoch_min: int) -> None:
    for index, stream in enumerate(streams):
        if not 0 <= stream.stream_id <= INT64_MAX:
            raise fail(f"{field}[{index}].stream_id", stream.stream_id, ">= 0")
        if not epoch_min <= stream.stream_epoch <= INT64_MAX:
            raise fail(f"{field}[{index}].stream_epoch", stream.stream_epoch, f">= {epoch_min}")
    check_no_repeat(f"{field}.stream_id", [stream.stream_id for stream in streams])


def _check_open_streams(request: requests.OpenStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=0)
    for index, stream in enumerate(request.streams):
        _check_tags(f"streams[{index}].tags", stream.tags)


def _check_close_streams(request: requests.CloseStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=0)
    if request.recoverer is not None:
        _check_recoverer(request.recoverer, request.node, may_recover=True)
    for index, stream in enumerate(request.streams):
        if stream.end_offset is not None:
            check_between(f"streams[{index}].end_offset", stream.end_offset, 0, INT64_MAX)


def _check_abandon_uploads(request: requests.AbandonUploads) -> None:
    _check_fields(request)
    check_no_repeat("stream_ids", request.stream_ids)
    if (epoch := request.close_streams_of_epoch) is not None:
        check_between("close_streams_of_epoch", epoch, 0, INT64_MAX)


def _check_trim_streams(request: requests.TrimStreams) -> None:
    check_node(request.node)
    _check_trims("streams", request.streams)


def _check_trims(field: str, trims: Sequence[requests.StreamToTrim]) -> None:
    _check_stream_ids(field, trims, epoch_min=0)
    for index, trim in enumerate(trims):
        check_between(f"{field}[{index}].new_start_offset", trim.new_start_offset, 0, INT64_MAX)
        if (appended := trim.appended_end_offset) is not None:
            check_between(f"{field}[{index}].appended_end_offset", appended, 0, INT64_MAX)


def _check_delete_streams(request: requests.DeleteStreams) -> None:
    _check_streams(request.node, request.streams, epoch_min=-1)


def _check_removal(request: requests.RemoveObjects) -> None:
    check_count("object_ids", len(request.object_ids))
    _check_id_range("object_ids", request.object_ids)


def _check_id_range(field: str, ids: Sequence[int]) -> None:
    if ids:
        check_between(field, min(ids), 0, INT64_MAX)
        check_between(field, max(ids), 0, INT64_MAX)


def _check_assign_recoveries(request: requests.AssignRecoveries) -> None:
    check_count("targets", len(request.targets))
    for index, target in enumerate(request.targets):
        field = f"targets[{index}]"
        check_between(f"{field}.node_id", target.node_id, 0, INT32_MAX)
        check_between(f"{field}.node_epoch", target.node_epoch, 0, INT64_MAX)
        check_between(f"{field}.target_id", target.target_id, -1, INT32_MAX)
        # A node cannot recover itself: its restart is a recovery already.
        if target.target_id == target.node_id:
            raise fail(f"{field}.target_id", target.target_id, "another node than node_id")

    check_no_repeat("targets.node_id", [target.node_id for target in request.targets])


def _check_key(field: str, namespace: str, key: str) -> None:
    if not key:
        raise fail(f"{field}.key", "an empty text", "not empty")
    for name, text in (("key", key), ("namespace", namespace)):
        if len(text.encode()) > KEY_BYTES_MAX:
            raise _too_long(f"{field}.{name}", KEY_BYTES_MAX)


def _check_put_kvs(request: requests.PutKVs) -> None:
    _check_puts("items", request.items)


def _check_puts(field: str, items: Sequence[requests.KVToPut]) -> None:
    for index, item in enumerate(items):
        # Writing these keys directly could leave a name without its object.
        _check_no_name(f"{field}[{index}]", item.namespace)
        _check_key(f"{field}[{index}]", item.namespace, item.key)
        if len(item.value) > VALUE_BYTES_MAX:
            raise _too_long(f"{field}[{index}].value", VALUE_BYTES_MAX)
        _check_version(f"{field}[{index}]", item.expected_version)
    check_no_repeat(f"{field}.key", [(item.namespace, item.key) for item in items])


def _check_commit(request: requests.CommitStreamSetObject) -> None:
    check_commit(request)
    if request.recoverer is not None:
        uploads_for_another = request.failover and not len(request.compacted_object_ids)
        _check_recoverer(request.recoverer, request.node, may_recover=uploads_for_another)
    if request.kv_puts or request.trims:
        has_result = request.object_id >= 0 or len(request.stream_objects.object_id) > 0
        is_replace = request.compacted_object_ids.tolist() == [request.object_id]
        _check_effects(request, has_result=has_result and not is_replace)


def _check_commit_stream_object(request: requests.CommitStreamObject) -> None:
    check_commit_stream_object(request)
    if request.kv_puts or request.trims:
        is_replace = request.source_object_ids.tolist() == [request.object_id]
        _check_effects(request, has_result=request.object_id >= 0 and not is_replace)


def _check_opening(request: requests.GetOpeningStreams) -> None:
    _check_fields(request)
    if request.recoverer is not None:
        _check_recoverer(request.recoverer, request.node, may_recover=request.failover)


def _check_recoverer(recoverer: NodeIdentity, node: NodeIdentity, *, may_recover: bool) -> None:
    if not may_recover:
        raise fail("recoverer", "one", "set only for uploads and GetOpeningStreams with failover")
    check_between("recoverer.node_id", recoverer.node_id, 0, INT32_MAX)
    check_between("recoverer.node_epoch", recoverer.node_epoch, 0, INT64_MAX)
    if recoverer.node_id == node.node_id:
        raise fail("recoverer.node_id", recoverer.node_id, "another node than node.node_id")


def _check_effects(
    request: requests.CommitStreamSetObject | requests.CommitStreamObject, *, has_result: bool
) -> None:
    """Check values and trims of a commit. Without a result a repeat could not be recognised."""
    if not has_result:
        raise InvalidRequestError(
            "kv_puts" if request.kv_puts else "trims",
            "need a commit that creates an object, so that a retry can be recognised: "
            "use PutKVs or TrimStreams",
        )
    if request.kv_puts:
        _check_puts("kv_puts", request.kv_puts)
    if request.trims:
        _check_trims("trims", request.trims)


def _check_no_name(field: str, namespace: str) -> None:
    """Check that a namespace is not reserved for named objects."""
    if namespace in OWN_NAMESPACES:
        raise InvalidRequestError(
            f"{field}.namespace",
            f"{namespace!r} changes only with named objects: commit or delete those",
        )


def _check_name(field: str, name: str) -> None:
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise fail(field, f"{len(name.encode())} bytes", f"1 to {NAME_BYTES_MAX} bytes")
    # Names are shown in logs and on terminals.
    if any(letter < " " or letter == "\x7f" for letter in name):
        raise fail(field, repr(name), "without control characters")


def _check_named(field: str, items: Sequence[Any]) -> None:
    for index, item in enumerate(items):
        _check_name(f"{field}[{index}].name", item.name)
        if item.object_id is not None:
            check_between(f"{field}[{index}].object_id", item.object_id, 0, INT64_MAX)
    check_no_repeat(f"{field}.name", [item.name for item in items])


def _check_commit_named(request: requests.CommitNamedObjects) -> None:
    check_node(request.node)
    _check_named("objects", request.objects)

    check_no_repeat("objects.object_id", [item.object_id for item in request.objects])

    for index, item in enumerate(request.objects):
        field = f"objects[{index}]"
        check_between(f"{field}.object_size", item.object_size, 0, OBJECT_SIZE_MAX)
        check_between(f"{field}.crc32c", item.crc32c, -1, CRC32C_MAX)
        check_between(f"{field}.owner_stream_id", item.owner_stream_id, -1, INT64_MAX)
        _check_tags(f"{field}.metadata", item.metadata)
        # The owner decides when the object is deleted, so there must be exactly one.
        if (item.owner_key is None) == (item.owner_stream_id < 0):
            raise InvalidRequestError(
                f"{field}.owner_key", "must be set, or owner_stream_id, but not both"
            )
        if item.owner_key is not None:
            _check_owner_key(f"{field}.owner_key", item.owner_key)


def _check_owner_key(field: str, owner: requests.OwnerKey) -> None:
    _check_key(field, owner.namespace, owner.key)
    _check_no_name(field, owner.namespace)


def _check_delete_named(request: requests.DeleteNamedObjects) -> None:
    check_node(request.node)
    _check_named("objects", request.objects)
    if request.owner_key is not None:
        _check_owner_key("owner_key", request.owner_key)
        if request.owner_stream_id >= 0:
            raise InvalidRequestError("owner_key", "must not be set with owner_stream_id")
    elif request.with_owner_key:
        raise InvalidRequestError("owner_key", "not set, must be set with with_owner_key")
    elif request.owner_stream_id < 0 and not request.objects:
        raise InvalidRequestError("objects", "got none, expected some names or an owner")


def _check_describe_named(request: requests.DescribeNamedObjects) -> None:
    _check_page(request.page)


def _check_version(field: str, expected_version: int | None) -> None:
    if expected_version is not None:
        check_between(f"{field}.expected_version", expected_version, 0, INT64_MAX)


def _check_kv_keys(request: requests.GetKVs | requests.DeleteKVs) -> None:
    for index, key in enumerate(request.keys):
        _check_key(f"keys[{index}]", key.namespace, key.key)
        _check_version(f"keys[{index}]", key.expected_version)

    # Keys may be read several times and in any namespace, but deleted only once.
    if isinstance(request, requests.DeleteKVs):
        for index, key in enumerate(request.keys):
            _check_no_name(f"keys[{index}]", key.namespace)
        check_no_repeat("keys.key", [(key.namespace, key.key) for key in request.keys])


def _check_list_kvs(request: requests.ListKVs) -> None:
    _check_page(request.page)


def _check_get_objects(request: requests.GetObjects) -> None:
    asked = request.queries
    # Columns are validated at once. Row by row only finds the field to name in the error.
    if isinstance(asked, ObjectQueryColumns) and _are_sound(asked):
        return
    for index, query in enumerate(asked):
        field = f"queries[{index}]"
        check_between(f"{field}.stream_id", query.stream_id, 0, INT64_MAX)
        check_between(f"{field}.start_offset", query.start_offset, 0, INT64_MAX)
        check_between(f"{field}.limit", query.limit, 0, BATCH_MAX)
        if query.end_offset != -1 and query.end_offset < query.start_offset:
            raise fail(f"{field}.end_offset", query.end_offset, "-1 or >= start_offset")


def _check_list_stream_objects(request: ListStreamObjects) -> None:
    check_between("stream_id", request.stream_id, 0, INT64_MAX)
    check_between("start_offset", request.start_offset, 0, INT64_MAX)
    if request.end_offset != NONE_ID and request.end_offset < request.start_offset:
        raise fail("end_offset", request.end_offset, ">= start_offset")

    _check_page(request.page)
    token = request.page.page_token
    parts = token.split("-")
    if token and not (len(parts) == 2 and all(map(_is_id, parts))):
        raise _not_a_token(token)


def _are_sound(asked: ObjectQueryColumns) -> bool:
    """Return whether all queries are well-formed, checked by vector operations."""
    starts, ends = asked.start_offset, asked.end_offset
    rows = {len(values) for values in (asked.stream_id, starts, ends, asked.limit)}
    if len(rows) > 1:
        raise fail("queries", f"columns of {sorted(rows)} rows", "as many rows in each")

    sound = (asked.stream_id >= 0) & (starts >= 0) & ((ends == NONE_ID) | (ends >= starts))
    sound &= (asked.limit >= 0) & (asked.limit <= BATCH_MAX)
    return bool(np.all(sound))


def _check_owner(field: str, node_id: int | None) -> None:
    if node_id is not None:
        check_between(field, node_id, 0, INT32_MAX)


_FIELDS: dict[str, Callable[[str, Any], None]] = {
    "after_object_id": _between(-1, INT64_MAX - 1),
    "cluster_uuid": _length(CLUSTER_UUID_LENGTH_MAX),
    "count": _between(1, BATCH_MAX),
    "hold_ms": _between(1, TTL_MS_MAX),
    "idle_ms": _between(1, TTL_MS_MAX),
    "issued_below": _between(0, INT64_MAX),
    "level": _between(SUPPORTED.lowest, SUPPORTED.highest),
    "limit": _between(1, BATCH_MAX),
    "node": lambda _, node: check_node(node),
    "node_id": _between(0, INT32_MAX),
    "node_ids": _check_id_range,
    "object_ids": _check_id_range,
    "owner_node_id": _check_owner,
    "page": _check_id_page,
    "process_id": _check_process_id,
    "request_id": _length(REQUEST_ID_LENGTH_MAX),
    "stream_ids": _check_id_range,
    "tags": _check_tags,
    "ttl_ms": _between(TTL_MS_MIN, TTL_MS_MAX),
    "wal_config": _check_wal_config,
}
"""Rules for fields that have the same meaning in all requests checked by `_check_fields`."""

_LISTS: Mapping[type, tuple[RequestList, ...]] = {
    kind: tuple(limit for limit in facts.request_lists if limit.field in kind.__dataclass_fields__)
    for method, facts in METHODS.items()
    if (kind := getattr(requests, method.rpartition(".")[2], None)) is not None
}
"""Lists with a limit by request. Where the request has columns instead, its check counts rows."""

# Each function accepts exactly its key's type, which the type of a dictionary cannot express.
# Requests that are not listed have their fields checked by name.
_CHECKS: dict[type, Callable[..., None]] = {
    requests.CreateStreams: _check_create_streams,
    requests.OpenStreams: _check_open_streams,
    requests.CloseStreams: _check_close_streams,
    requests.GetOpeningStreams: _check_opening,
    requests.TrimStreams: _check_trim_streams,
    requests.DeleteStreams: _check_delete_streams,
    requests.CommitStreamSetObject: _check_commit,
    requests.CommitUploads: check_commit_uploads,
    requests.AdoptObjects: check_adoption,
    requests.AbandonUploads: _check_abandon_uploads,
    requests.CommitStreamObject: _check_commit_stream_object,
    requests.RemoveObjects: _check_removal,
    requests.AssignRecoveries: _check_assign_recoveries,
    requests.PutKVs: _check_put_kvs,
    requests.DeleteKVs: _check_kv_keys,
    requests.GetObjects: _check_get_objects,
    requests.GetKVs: _check_kv_keys,
    requests.CommitNamedObjects: _check_commit_named,
    requests.DeleteNamedObjects: _check_delete_named,
    requests.DescribeNamedObjects: _check_describe_named,
    requests.ListKVs: _check_list_kvs,
    ListStreamObjects: _check_list_stream_objects,
}
