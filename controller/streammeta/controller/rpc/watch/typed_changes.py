"""Changes of the contract (`changes.proto`) from the records of a log entry.

Every type of record has one rule here, or is named as one that has no change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from google.protobuf.message import Message

from streammeta.controller.metadata.tables.values import (
    COMPOSITE_BITS,
    KIND_MASK,
    Int64Column,
    ObjectKind,
)
from streammeta.controller.records import record as rec
from streammeta.controller.records.record import FACT_COLUMNS, Record, Tags
from streammeta.v1 import changes_pb2 as pb
from streammeta.v1 import common_pb2, nodes_pb2, objects_pb2, streams_pb2

_UNKNOWN = -1

INTERNAL = frozenset(
    {
        rec.CommitRowsRejected,
        rec.DeletionsHeld,
        rec.BucketClaimed,
        rec.ObjectsReclaimed,
        rec.NodeIdIssued,
        rec.ProducerIdsIssued,
        rec.ProducerBatchesCommitted,
        rec.ProducersExpired,
    }
)
"""Records that concern only the controllers, without a change."""


def encode_changes(offset: int, records: Sequence[Record]) -> list[pb.MetadataChange]:
    """Return the changes of the log entry at an offset, in the order of its records."""
    return [_change(offset, record) for record in records if type(record) not in INTERNAL]


def _change(offset: int, record: Record) -> pb.MetadataChange:
    # Only the version of a value depends on the offset.
    if isinstance(record, rec.KVsPut):
        return pb.MetadataChange(offset=offset, keys_put=_keys_put(record, offset))
    name, encode = CHANGES[type(record)]
    content: Any = {name: encode(record)}
    return pb.MetadataChange(offset=offset, **content)


def _rows(*columns: Int64Column) -> Iterator[tuple[int, ...]]:
    return zip(*(values.tolist() for values in columns), strict=True)


def _tags(tags: Tags) -> list[common_pb2.Tag]:
    return [common_pb2.Tag(key=key, value=value) for key, value in tags]


def _optional(values: Int64Column, count: int) -> list[int | None]:
    """Return the cells of a column that may be empty, None where they are unknown."""
    if not len(values):
        return [None] * count
    return [None if value == _UNKNOWN else value for value in values.tolist()]


def _facts(
    record: rec.StreamSetObjectsCommitted | rec.StreamObjectsCommitted,
) -> Iterator[tuple[int | None, ...]]:
    """Iterate over the time bounds and checksums of a record's objects."""
    count = len(record.object_id)
    return zip(*(_optional(getattr(record, name), count) for name in FACT_COLUMNS), strict=True)


def _copy(kind: type[Message]) -> Callable[[Any], Message]:
    """Return an encoder that copies equally named fields of a record. `ids` are its column `id`."""
    wire = kind.DESCRIPTOR.fields
    names = [part.name for part in wire if not part.is_repeated]
    columns = [part.name for part in wire if part.is_repeated]

    def encode(record: Any) -> Message:
        content: dict[str, Any] = {name: getattr(record, name) for name in names}
        for name in columns:
            content[name] = getattr(record, name.removesuffix("s")).tolist()
        return kind(**content)

    return encode


# -- streams


def _streams_created(record: rec.StreamsCreated) -> Message:
    ids = range(record.first_stream_id, record.first_stream_id + record.count)
    tags = record.tags or ((),) * record.count
    shared = record.shared.tolist() or [0] * record.count
    return pb.StreamsCreated(
        node_id=record.node_id,
        streams=[
            pb.CreatedStream(stream_id=stream_id, tags=_tags(of_stream), shared=bool(is_shared))
            for stream_id, of_stream, is_shared in zip(ids, tags, shared, strict=True)
        ],
    )


def _streams_opened(record: rec.StreamsOpened) -> Message:
    tags = record.tags or ((),) * len(record.stream_id)
    rows = _rows(record.stream_id, record.stream_epoch)
    return pb.StreamsOpened(
        node_id=record.node_id,
        streams=[
            pb.StreamEpoch(stream_id=stream_id, epoch=epoch, tags=_tags(of_stream))
            for (stream_id, epoch), of_stream in zip(rows, tags, strict=True)
        ],
    )


def _streams_closed(record: rec.StreamsClosed) -> Message:
    ends = _optional(record.end_offset, len(record.stream_id))
    return pb.StreamsClosed(
        streams=[
            pb.ClosedStream(stream_id=stream_id, end_offset=end_offset)
            for stream_id, end_offset in zip(record.stream_id.tolist(), ends, strict=True)
        ]
    )


def _streams_trimmed(record: rec.StreamsTrimmed) -> Message:
    return pb.StreamsTrimmed(
        streams=[
            pb.TrimmedStream(stream_id=stream_id, start_offset=start_offset)
            for stream_id, start_offset in _rows(record.stream_id, record.start_offset)
        ]
    )


def _ranges_removed(record: rec.RangesRemoved) -> Message:
    return pb.RangesRemoved(
        ranges=[
            pb.RemovedRange(stream_id=stream_id, range_index=range_index)
            for stream_id, range_index in _rows(record.stream_id, record.range_index)
        ]
    )


def _uploads_pending(record: rec.PendingUploadsSet) -> Message:
    rows = _rows(record.stream_id, record.start_offset, record.end_offset)
    return pb.UploadsPending(
        uploads=[
            streams_pb2.PendingUpload(
                node_id=record.node_id, stream_id=stream_id, start_offset=start, end_offset=end
            )
            for stream_id, start, end in rows
        ]
    )


# -- objects


def _set_objects_committed(record: rec.StreamSetObjectsCommitted) -> Message:
    ends = np.cumsum(record.range_count).tolist()
    rows = _rows(
        record.object_id,
        record.order_id,
        record.object_size,
        record.attributes,
        record.range_count,
    )

    objects = []
    for (object_id, order_id, size, attributes, ranges), end, (low, high, crc32c) in zip(
        rows, ends, _facts(record), strict=True
    ):
        held = slice(end - ranges, end)
        objects.append(
            nodes_pb2.StreamSetObject(
                object_id=object_id,
                order_id=order_id,
                data_time_ms=record.data_time_ms,
                object_size=size,
                range_count=ranges,
                min_timestamp_ms=low,
                max_timestamp_ms=high,
                crc32c=crc32c,
                attributes=attributes,
                committed_at_ms=record.committed_at_ms,
                ranges=objects_pb2.RangeColumns(
                    stream_id=record.ranges.stream_id[held].tolist(),
                    start_offset=record.ranges.start_offset[held].tolist(),
                    end_offset=record.ranges.end_offset[held].tolist(),
                ),
            )
        )

    return pb.StreamSetObjectsCommitted(node_id=record.node_id, objects=objects)


def _stream_objects_committed(record: rec.StreamObjectsCommitted) -> Message:
    is_composite = (record.attributes & KIND_MASK) == COMPOSITE_BITS
    kinds = np.where(is_composite, ObjectKind.COMPOSITE, ObjectKind.STREAM)
    rows = _rows(
        record.object_id,
        record.stream_id,
        kinds,
        record.start_offset,
        record.end_offset,
        record.object_size,
        record.attributes,
    )
    objects = []
    for (object_id, stream_id, kind, start, end, size, attributes), (low, high, crc32c) in zip(
        rows, _facts(record), strict=True
    ):
        objects.append(
            objects_pb2.StreamObject(
                object_id=object_id,
                stream_id=stream_id,
                kind=cast(common_pb2.ObjectKind.ValueType, kind),
                start_offset=start,
                end_offset=end,
                object_size=size,
                attributes=attributes,
                committed_at_ms=record.committed_at_ms,
                min_timestamp_ms=low,
                max_timestamp_ms=high,
                crc32c=crc32c,
            )
        )
    return pb.StreamObjectsCommitted(objects=objects)


def _named_objects_committed(record: rec.NamedObjectsCommitted) -> Message:
    checksums = _optional(record.crc32c, len(record.object_id))
    rows = _rows(record.object_id, record.object_size)
    return pb.NamedObjectsCommitted(
        committed_at_ms=record.committed_at_ms,
        objects=[
            pb.CommittedNamedObject(object_id=object_id, object_size=size, crc32c=crc32c)
            for (object_id, size), crc32c in zip(rows, checksums, strict=True)
        ],
    )


# -- nodes and keys


def _recovery_assigned(record: rec.RecoveryAssigned) -> Message:
    target = None if record.target_id == _UNKNOWN else record.target_id
    return pb.RecoveryAssigned(node_id=record.node_id, recovered_by=target)


def _keys_put(record: rec.KVsPut, offset: int) -> pb.KeysPut:
    rows = zip(record.namespaces, record.keys, record.values, strict=True)
    return pb.KeysPut(
        keys=[
            pb.StoredKey(namespace=namespace, key=key, value=value, version=offset + 1)
            for namespace, key, value in rows
        ]
    )


def _keys_deleted(record: rec.KVsDeleted) -> Message:
    rows = zip(record.namespaces, record.keys, strict=True)
    return pb.KeysDeleted(
        keys=[pb.DeletedKey(namespace=namespace, key=key) for namespace, key in rows]
    )


CHANGES: dict[type, tuple[str, Callable[[Any], Message]]] = {
    rec.StreamsCreated: ("streams_created", _streams_created),
    rec.StreamsOpened: ("streams_opened", _streams_opened),
    rec.StreamsReopened: ("streams_reopened", _copy(pb.StreamsReopened)),
    rec.StreamsClosed: ("streams_closed", _streams_closed),
    rec.StreamsTrimmed: ("streams_trimmed", _streams_trimmed),
    rec.StreamsDeleted: ("streams_deleted", _copy(pb.StreamsDeleted)),
    rec.RangesRemoved: ("ranges_removed", _ranges_removed),
    rec.PendingUploadsSet: ("uploads_pending", _uploads_pending),
    rec.UploadsAbandoned: ("uploads_abandoned", _copy(pb.UploadsAbandoned)),
    rec.ObjectsPrepared: ("objects_prepared", _copy(pb.ObjectsPrepared)),
    rec.StreamSetObjectsCommitted: ("stream_set_objects_committed", _set_objects_committed),
    rec.StreamObjectsCommitted: ("stream_objects_committed", _stream_objects_committed),
    rec.NamedObjectsCommitted: ("named_objects_committed", _named_objects_committed),
    rec.ObjectsDestroyed: ("objects_destroyed", _copy(pb.ObjectsDestroyed)),
    rec.ObjectsRemoved: ("objects_removed", _copy(pb.ObjectsRemoved)),
    rec.ObjectsLinked: ("objects_linked", _copy(pb.ObjectsLinked)),
    rec.ObjectAttributesSet: ("object_attributes_changed", _copy(pb.ObjectAttributesChanged)),
    rec.NodeRegistered: (
        "node_registered",
        # Without wal_config, which may contain secrets: GetNodes decides who may see it.
        lambda record: pb.NodeRegistered(
            node_id=record.node_id, node_epoch=record.node_epoch, tags=_tags(record.tags)
        ),
    ),
    rec.NodeEpochSet: ("node_epoch_changed", _copy(pb.NodeEpochChanged)),
    rec.NodeLocked: ("node_lock_changed", _copy(pb.NodeLockChanged)),
    rec.NodeUnregistered: ("node_unregistered", _copy(pb.NodeUnregistered)),
    rec.NodeSupervised: ("node_supervised", _copy(pb.NodeSupervised)),
    rec.RecoveryAssigned: ("recovery_assigned", _recovery_assigned),
    rec.KVsDeleted: ("keys_deleted", _keys_deleted),
    rec.FeatureLevelSet: ("feature_level_changed", _copy(pb.FeatureLevelChanged)),
    rec.RestoreFinished: ("restore_finished", _copy(pb.RestoreFinished)),
}
"""Field of `MetadataChange` and the encoder of its content, by type of record except `KVsPut`."""
