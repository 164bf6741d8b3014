"""Documents of the shell: messages of the contract as named facts and tables. Pure.

The contract defines the names. Absent and empty facts are omitted.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from google.protobuf.message import Message

from streammeta.shell.tree import Document, Table, Value
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import admin_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES = {
    "deadline_ms": "deadline",
    "committed_at_ms": "committed_at",
    "marked_at_ms": "mark_destroyed_at",
    "data_time_ms": "data_time",
    "min_timestamp_ms": "min_timestamp",
    "max_timestamp_ms": "max_timestamp",
}
"""Names of facts that are times, by their field."""

_SPAN = ("start_offset", "end_offset")


def iso_time(time_ms: int) -> str:
    """Return milliseconds since 1970 as ISO 8601 in UTC, or as a number beyond the calendar."""
    try:
        time = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def field_value(message: Message, field: str) -> Value | None:
    """Return a field of a message, None if it is absent.

    An enum value is its name without the prefix that all its values share. A value of a newer
    version is its number.
    """
    described = message.DESCRIPTOR.fields_by_name[field]
    if described.has_presence and not message.HasField(field):
        return None
    value: Value = getattr(message, field)
    if described.enum_type is None:
        return value
    names = described.enum_type.values_by_number
    # Names of enum values share a prefix, which the zero value shows.
    prefix = names[0].name.removesuffix("UNSPECIFIED")
    known = names.get(int(value))
    return str(value) if known is None else known.name.removeprefix(prefix)


def cluster(described: admin_pb2.DescribeClusterResponse) -> Document:
    """Return the cluster as the answering controller sees it."""
    leader_id = field_value(described, "leader_id")
    fields = (
        *_facts(described, "cluster_id"),
        ("leader", "unknown" if leader_id is None else leader_id),
        *_facts(described, "leader_endpoint", "epoch", "high_watermark", "answered_by"),
        *_facts(described, "object_namespace", "cluster_uuid", "bucket_problem"),
        *_facts(described.size, *described.size.DESCRIPTOR.fields_by_name),
    )
    columns = ("node_id", "endpoint", "voter")
    return Document(fields, (_table("controllers", columns, described.controllers),))


def stream(described: streams_pb2.StreamDescription, readable: objects_pb2.ObjectList) -> Document:
    """Return a stream with its ranges, objects, pending uploads and lost offsets, all in order."""
    left_behind = (
        _table("pending_uploads", ("node_id", *_SPAN), described.pending_uploads),
        _table("lost", _SPAN, described.lost),
    )

    return Document(
        tuple(_facts(described, "stream_id", "state", "epoch", "node_id", *_SPAN)),
        (
            _table("tags", ("key", "value"), described.tags),
            _table("ranges", ("range_index", "epoch", *_SPAN, "node_id"), described.ranges),
            _table("stream_objects", ("object_id", *_SPAN), described.stream_objects),
            _table("read_from", ("object_id", *_SPAN, "kind", "object_size"), readable.objects),
            # Most streams have no such rows, and an empty table would be noise.
            *(table for table in left_behind if table.rows),
        ),
    )


def stored_object(described: objects_pb2.ObjectDescription, namespace: str) -> Document:
    """Return an object of the registry: its state, its place in the bucket, and its contents.

    Without a namespace the place is unknown and omitted.
    """
    # 0 is a valid checksum, so only its absence counts.
    crc32c = field_value(described, "crc32c")
    fields = (
        *_facts(described, "object_id", "state", "kind", "object_size"),
        *_facts(described, "deadline_ms", "committed_at_ms", "marked_at_ms"),
        *([("key", key_for(described.object_id, namespace))] if namespace else []),
        *_facts(described, "attributes", "node_id", "stream_id"),
        *_facts(described, "min_timestamp_ms", "max_timestamp_ms"),
        *([] if crc32c is None else [("crc32c", f"{crc32c:08x}")]),
        *_facts(described, "composite_id"),
    )
    held = described.ranges
    rows = tuple(zip(held.stream_id, held.start_offset, held.end_offset, strict=True))
    return Document(fields, (Table("ranges", ("stream_id", *_SPAN), rows),))


def with_order(document: Document, listed: nodes_pb2.StreamSetObject) -> Document:
    """Return a stream set object's document with its place among the objects of its node."""
    place = _facts(listed, "order_id", "data_time_ms")
    return Document((*document.fields, *place), document.tables)


def node(described: nodes_pb2.NodeDescription) -> Document:
    """Return a broker and its newest process."""
    fields = (
        *_facts(described, "node_id", "node_epoch", "state", "supervised", "failover"),
        *_facts(described, "recovered_by", "compacted_by", "locked", "departed"),
        *_facts(described, "has_opening_streams", "pending_upload_count"),
        *_facts(described, "stream_set_object_count", "wal_config"),
    )
    return Document(fields, (_table("tags", ("key", "value"), described.tags),))


def key_value(namespace: str, entry: kv_pb2.KVEntry) -> Document:
    """Return a key and its value: as text if it is printable UTF-8, else in hexadecimal."""
    try:
        text = entry.value.decode()
    except UnicodeDecodeError:
        # Not printable, so that the value is shown in hexadecimal.
        text = "\0"
    is_readable = all(char.isprintable() or char in "\n\t" for char in text)
    return Document(
        (
            *([("namespace", namespace)] if namespace else []),
            *_facts(entry, "key", "version"),
            ("length", len(entry.value)),
            ("value", text) if is_readable else ("value_hex", entry.value.hex()),
        )
    )


def _facts(message: Message, *fields: str) -> Iterator[tuple[str, Value]]:
    """Yield the fields that are neither absent nor empty, times as text."""
    for field in fields:
        value = field_value(message, field)
        if field in _TIMES and value is not None:
            yield _TIMES[field], iso_time(int(value))
        elif value not in (None, ""):
            yield field, value


def _table(name: str, columns: tuple[str, ...], messages: Iterable[Message]) -> Table:
    rows = (tuple(field_value(message, field) for field in columns) for message in messages)
    return Table(name, columns, tuple(rows))
