"""Documents of the shell: messages of the contract as named facts and tables. Pure.

Names are those of the contract. A fact that is absent or empty is left out.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from streammeta.shell.tree import Document, Table, Value
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import admin_pb2, common_pb2, kv_pb2, nodes_pb2, objects_pb2, streams_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES = {
    "deadline_ms": "deadline",
    "committed_at_ms": "committed_at",
    "marked_at_ms": "mark_destroyed_at",
}


def iso_time(time_ms: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC; as a number if no calendar has the time."""
    try:
        time = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def cluster(described: admin_pb2.DescribeClusterResponse) -> Document:
    """The cluster as the answering controller sees it."""
    size = described.size
    fields: list[tuple[str, Value]] = [
        ("cluster_id", described.cluster_id),
        ("leader", described.leader_id if described.HasField("leader_id") else "unknown"),
        ("leader_endpoint", described.leader_endpoint),
        ("epoch", described.epoch),
        ("high_watermark", _optional(described, "high_watermark")),
        ("answered_by", described.answered_by),
        ("object_namespace", described.object_namespace),
        ("cluster_uuid", described.cluster_uuid),
        ("bucket_problem", described.bucket_problem),
        *((field.name, getattr(size, field.name)) for field in size.DESCRIPTOR.fields),
    ]
    rows = tuple(
        (controller.node_id, controller.endpoint, controller.voter)
        for controller in described.controllers
    )
    controllers = Table("controllers", ("node_id", "endpoint", "voter"), rows)
    return Document(_present(fields), (controllers,))


def stream(described: streams_pb2.StreamDescription, readable: objects_pb2.ObjectList) -> Document:
    """A stream, its ranges of ownership, its objects, what is owed or lost of it; all in order."""
    fields: list[tuple[str, Value]] = [
        ("stream_id", described.stream_id),
        ("state", _enum_name(common_pb2.StreamState.DESCRIPTOR, "STREAM_STATE_", described.state)),
        ("epoch", _optional(described, "epoch")),
        ("node_id", _optional(described, "node_id")),
        ("start_offset", described.start_offset),
        ("end_offset", described.end_offset),
    ]
    ranges = tuple(
        (owned.range_index, owned.epoch, owned.start_offset, owned.end_offset, owned.node_id)
        for owned in described.ranges
    )
    stream_objects = tuple(
        (held.object_id, held.start_offset, held.end_offset) for held in described.stream_objects
    )
    slices = tuple(
        (
            part.object_id,
            part.start_offset,
            part.end_offset,
            _enum_name(common_pb2.ObjectKind.DESCRIPTOR, "OBJECT_KIND_", part.kind),
            part.object_size,
        )
        for part in readable.objects
    )
    span = ("start_offset", "end_offset")
    return Document(
        _present(fields),
        (
            _tags(described.tags),
            Table("ranges", ("range_index", "epoch", *span, "node_id"), ranges),
            Table("stream_objects", ("object_id", *span), stream_objects),
            Table("read_from", ("object_id", *span, "kind", "object_size"), slices),
            *_left_behind(described),
        ),
    )


def _left_behind(described: streams_pb2.StreamDescription) -> Iterator[Table]:
    """What is owed of a stream and what is lost, where there is something."""
    span = ("start_offset", "end_offset")
    owed = tuple(
        (each.node_id, each.start_offset, each.end_offset) for each in described.pending_uploads
    )
    lost = tuple((each.start_offset, each.end_offset) for each in described.lost)
    if owed:
        yield Table("pending_uploads", ("node_id", *span), owed)
    if lost:
        yield Table("lost", span, lost)


def stored_object(described: objects_pb2.ObjectDescription, namespace: str) -> Document:
    """An object of the registry: its life, its place in the bucket, and what it holds."""
    fields: list[tuple[str, Value]] = [
        ("object_id", described.object_id),
        ("state", _enum_name(common_pb2.ObjectState.DESCRIPTOR, "OBJECT_STATE_", described.state)),
        ("kind", _enum_name(common_pb2.ObjectKind.DESCRIPTOR, "OBJECT_KIND_", described.kind)),
        ("object_size", described.object_size),
        *_times(described),
        ("key", key_for(described.object_id, namespace)),
        ("attributes", described.attributes),
        ("node_id", _optional(described, "node_id")),
        ("stream_id", _optional(described, "stream_id")),
    ]
    if described.HasField("max_timestamp_ms"):
        fields.append(("min_timestamp", iso_time(described.min_timestamp_ms)))
        fields.append(("max_timestamp", iso_time(described.max_timestamp_ms)))
    if described.HasField("crc32c"):
        fields.append(("crc32c", f"{described.crc32c:08x}"))
    if described.state == common_pb2.OBJECT_STATE_LINKED:
        fields.append(("composite_id", described.composite_id))
    held = described.ranges
    rows = tuple(zip(held.stream_id, held.start_offset, held.end_offset, strict=True))
    ranges = Table("ranges", ("stream_id", "start_offset", "end_offset"), rows)
    return Document(_present(fields, always=("attributes",)), (ranges,))


def with_order(document: Document, listed: nodes_pb2.StreamSetObject) -> Document:
    """A stream set object's document with its place among those of its node."""
    place = (("order_id", listed.order_id), ("data_time", iso_time(listed.data_time_ms)))
    return Document((*document.fields, *place), document.tables)


def node(described: nodes_pb2.NodeDescription) -> Document:
    """A broker and its newest process."""
    fields: list[tuple[str, Value]] = [
        ("node_id", described.node_id),
        ("node_epoch", described.node_epoch),
        ("state", _enum_name(nodes_pb2.NodeState.DESCRIPTOR, "NODE_STATE_", described.state)),
        ("supervised", described.supervised),
        ("failover", described.failover),
        ("recovered_by", _optional(described, "recovered_by")),
        ("compacted_by", _optional(described, "compacted_by")),
        ("locked", described.locked),
        ("departed", described.departed),
        ("has_opening_streams", described.has_opening_streams),
        ("pending_upload_count", described.pending_upload_count),
        ("stream_set_object_count", described.stream_set_object_count),
        ("wal_config", described.wal_config),
    ]
    return Document(_present(fields), (_tags(described.tags),))


def key_value(namespace: str, entry: kv_pb2.KVEntry) -> Document:
    """A key and its value: as text if it is printable UTF-8, else in hexadecimal."""
    fields: list[tuple[str, Value]] = [
        ("namespace", namespace),
        ("key", entry.key),
        ("version", entry.version),
        ("length", len(entry.value)),
    ]
    try:
        text = entry.value.decode()
    except UnicodeDecodeError:
        text = "\0"
    shown = ("value", text) if _is_readable(text) else ("value_hex", entry.value.hex())
    return Document((*_present(fields), shown))


def _present(
    fields: Iterable[tuple[str, Value]], always: tuple[str, ...] = ()
) -> tuple[tuple[str, Value], ...]:
    return tuple((name, value) for name, value in fields if name in always or value != "")


def _times(described: Message) -> Iterator[tuple[str, Value]]:
    for field, name in _TIMES.items():
        if described.HasField(field):
            yield name, iso_time(getattr(described, field))


def _optional(message: Message, field: str) -> Value:
    return getattr(message, field) if message.HasField(field) else ""


def _tags(tags: Iterable[common_pb2.Tag]) -> Table:
    return Table("tags", ("key", "value"), tuple((tag.key, tag.value) for tag in tags))


def _enum_name(enum: EnumDescriptor, prefix: str, number: int) -> str:
    """A state's name without the prefix that all of its enum share; a newer one's number."""
    known = enum.values_by_number.get(number)
    return str(number) if known is None else known.name.removeprefix(prefix)


def _is_readable(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)
