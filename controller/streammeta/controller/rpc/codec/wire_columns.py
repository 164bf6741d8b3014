"""Commits and adoptions between bytes and values, column by column: no row becomes an object.

A packed column of `sfixed64` is encoded as the little-endian bytes of its rows. The messages of
`columns.proto` return those bytes as they came, and an array is laid over them. Senders that don't
pack their columns, and fields this version does not know, are read from the messages of the
contract. Hosts with another byte order are not supported: the metadata reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.ids import NONE_ID
from streammeta.controller.metadata.api import answers, requests
from streammeta.controller.metadata.api.answers import AdoptObjectsAnswer
from streammeta.controller.metadata.api.requests import AdoptObjects
from streammeta.controller.metadata.tables import values
from streammeta.controller.metadata.tables.values import Int64Column, RangeColumns, column
from streammeta.controller.records.record import FACT_COLUMNS
from streammeta.controller.rpc.codec.conversion import Conversion, enum_in, not_set
from streammeta.v1 import admin_pb2, common_pb2, kv_pb2, objects_pb2, streams_pb2
from streammeta.v1 import columns_pb2 as pb

_DTYPE = np.dtype("<i8")
_ROW_BYTES = _DTYPE.itemsize
_NO_RANGES = values.RangeColumns()
_NO_STREAM_OBJECTS = values.StreamObjectColumns()
_NO_SHARED_ROWS = values.SharedRowColumns()

_PLAIN = Conversion({}, {}, {})
_put_in = _PLAIN.reader(requests.KVToPut, kv_pb2.KVToPut)
_trim_in = _PLAIN.reader(requests.StreamToTrim, streams_pb2.StreamToTrim)
_result_out = _PLAIN.writer(answers.KVResult, kv_pb2.KVResult)

MessageT = TypeVar("MessageT", bound=Message)


def parse_commit(data: bytes) -> pb.PackedCommitStreamSetObjectRequest:
    """Parse a CommitStreamSetObjectRequest with any encoding of its columns.

    Raises:
        InvalidRequestError: the bytes are not such a message.
    """
    message = _parse(pb.PackedCommitStreamSetObjectRequest, data)
    if not _is_unpacked(message):
        return message
    # Encoding it again packs the columns and drops the fields that this version does not know.
    packed = _parse(objects_pb2.CommitStreamSetObjectRequest, data).SerializeToString()
    return pb.PackedCommitStreamSetObjectRequest.FromString(packed)


def parse_batch(data: bytes) -> pb.PackedCommitPipelineRequest:
    """Parse a CommitBatchRequest with any encoding of its columns.

    Raises:
        InvalidRequestError: the bytes are not such a message.
    """
    message = _parse(pb.PackedCommitPipelineRequest, data)
    uploads = message.uploads if message.HasField("uploads") else None
    if not any(map(_is_unpacked, message.commits)) and not (
        uploads is not None and (_has_unknown(uploads) or _has_unknown(uploads.ranges))
    ):
        return message
    packed = _parse(objects_pb2.CommitPipelineRequest, data).SerializeToString()
    return pb.PackedCommitPipelineRequest.FromString(packed)


def commit_stream_set_object_in(
    message: pb.PackedCommitStreamSetObjectRequest,
) -> requests.CommitStreamSetObject:
    """Read CommitStreamSetObject."""
    return requests.CommitStreamSetObject(
        node=_node(message.node, "node"),
        object_id=_optional(message, "object_id"),
        order_id=_optional(message, "order_id"),
        object_size=message.object_size,
        attributes=message.attributes,
        ranges=_ranges_in(message.ranges, "ranges.") if message.HasField("ranges") else _NO_RANGES,
        stream_objects=(
            _stream_objects_in(message.stream_objects)
            if message.HasField("stream_objects")
            else _NO_STREAM_OBJECTS
        ),
        compacted_object_ids=_column(message.compacted_object_ids, "", "compacted_object_ids"),
        failover=message.failover,
        on_conflict=enum_in(values.OnConflict, message.on_conflict, "on_conflict"),
        min_timestamp_ms=_optional(message, "min_timestamp_ms"),
        max_timestamp_ms=_optional(message, "max_timestamp_ms"),
        crc32c=_optional(message, "crc32c"),
        kv_puts=_list_in(_put_in, message.kv_puts, "kv_puts"),
        trims=_list_in(_trim_in, message.trims, "trims"),
        recoverer=(
            _node(message.recoverer, "recoverer") if message.HasField("recoverer") else None
        ),
        shared_rows=(
            values.SharedRowColumns(**_SHARED_ROWS.read(message.shared_rows, "shared_rows."))
            if message.HasField("shared_rows")
            else _NO_SHARED_ROWS
        ),
    )


def uploads_in(message: pb.PackedUploadColumns) -> requests.CommitUploads:
    """Read the uploads of a CommitBatchRequest."""
    return requests.CommitUploads(
        node=_node(message.node, "uploads.node"),
        ranges=_ranges_in(message.ranges, "uploads.ranges."),
        **_UPLOADS.read(message, "uploads."),
    )


def commit_stream_set_object_out(
    answer: answers.CommitStreamSetObjectAnswer,
) -> pb.PackedCommitStreamSetObjectResponse:
    """Write the answer to CommitStreamSetObject."""
    # Lazy: both branches below consume it once.
    results = map(_result_out, answer.kv_results)
    if answer.error is ErrorCode.NONE and not (
        np.count_nonzero(answer.range_errors) or np.count_nonzero(answer.stream_object_errors)
    ):
        return pb.PackedCommitStreamSetObjectResponse(
            error=_error(answer.error),
            # NONE is 0, and a varint of 0 is one zero byte. Nearly all answers take this way.
            range_errors=bytes(len(answer.range_errors)),
            stream_object_errors=bytes(len(answer.stream_object_errors)),
            kv_results=results,
            trim_errors=bytes(len(answer.trim_errors)),
            trim_start_offsets=answer.trim_start_offsets,
            shared_results=_shared_out(answer.shared),
        )

    response = objects_pb2.CommitStreamSetObjectResponse(
        error=_error(answer.error),
        range_errors=answer.range_errors.tolist(),
        stream_object_errors=answer.stream_object_errors.tolist(),
        kv_results=results,
        trim_errors=map(_error, answer.trim_errors),
        trim_start_offsets=answer.trim_start_offsets,
    )
    packed = pb.PackedCommitStreamSetObjectResponse.FromString(response.SerializeToString())
    if (shared := _shared_out(answer.shared)) is not None:
        packed.shared_results.CopyFrom(shared)
    return packed


def _shared_out(
    results: answers.SharedRowResults | None,
) -> pb.PackedSharedRowResults | None:
    if results is None:
        return None
    message = pb.PackedSharedRowResults(
        start_offset=[results.start_offset.astype(_DTYPE).tobytes()]
    )
    if np.count_nonzero(results.errors):
        message.errors.extend(results.errors.tolist())
    if results.committed_at_ms >= 0:
        message.committed_at_ms = results.committed_at_ms
    return message


def uploads_out(answer: answers.CommitUploadsAnswer, message: objects_pb2.UploadErrors) -> None:
    """Encode the answer to the uploads of a CommitBatchRequest. All-NONE columns are omitted."""
    # Present even when both columns are omitted: the caller must see that its uploads were decided.
    message.SetInParent()
    if np.count_nonzero(answer.errors):
        message.errors.extend(answer.errors.tolist())
    if np.count_nonzero(answer.range_errors):
        message.range_errors.extend(answer.range_errors.tolist())


def _parse(kind: type[MessageT], data: bytes) -> MessageT:
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.name.removeprefix("Packed")
        raise InvalidRequestError(
            "message", f"{len(data)} bytes that are no {name}; send one"
        ) from None


def _is_unpacked(message: pb.PackedCommitStreamSetObjectRequest) -> bool:
    return (
        _has_unknown(message)
        or (message.HasField("ranges") and _has_unknown(message.ranges))
        or (message.HasField("stream_objects") and _has_unknown(message.stream_objects))
        or (message.HasField("shared_rows") and _has_unknown(message.shared_rows))
    )


def _has_unknown(message: Message) -> bool:
    return len(UnknownFieldSet(message)) > 0


def _ranges_in(message: pb.PackedRangeColumns, prefix: str) -> values.RangeColumns:
    return values.RangeColumns(**_RANGES.read(message, prefix))


def _stream_objects_in(message: pb.PackedStreamObjectColumns) -> values.StreamObjectColumns:
    return values.StreamObjectColumns(
        attributes=values.column(message.attributes),
        **_STREAM_OBJECTS.read(message, "stream_objects."),
    )


class _Columns:
    """Reads the columns of one kind of message by their names there."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._pieces = attrgetter(*names)

    def read(self, message: Message, prefix: str) -> dict[str, values.Int64Column]:
        """Return the columns by name. `prefix` precedes each name in an error's path."""
        return {
            name: _column(pieces, prefix, name) if pieces else values.EMPTY_COLUMN
            for name, pieces in zip(self._names, self._pieces(message), strict=True)
        }


_RANGES = _Columns(*(part.name for part in fields(values.RangeColumns)))
_STREAM_OBJECTS = _Columns(
    *(part.name for part in fields(values.StreamObjectColumns) if part.name != "attributes")
)
_SHARED_ROWS = _Columns(*(part.name for part in fields(values.SharedRowColumns)))
_UPLOADS = _Columns("object_id", "object_size", "range_count", *FACT_COLUMNS)


def _column(pieces: Sequence[bytes], prefix: str, name: str) -> values.Int64Column:
    """Return a read-only column over received bytes.

    They are copied only if they arrive in pieces.
    """
    if not pieces:
        return values.EMPTY_COLUMN
    # Encoders may split a packed field, and a column has to be contiguous.
    data = pieces[0] if len(pieces) == 1 else _joined(pieces)
    # frombuffer would raise an error that names no field.
    if len(data) % _ROW_BYTES:
        raise InvalidRequestError(
            f"{prefix}{name}",
            f"a column of {len(data)} bytes; rows have {_ROW_BYTES}, send it as sfixed64",
        )
    return np.frombuffer(data, dtype=_DTYPE)


def _node(message: common_pb2.NodeIdentity, field: str) -> values.NodeIdentity:
    if not (message.HasField("node_id") and message.HasField("node_epoch")):
        missing = "node_epoch" if message.HasField("node_id") else "node_id"
        raise not_set(f"{field}.{missing}")
    return values.NodeIdentity(message.node_id, message.node_epoch)


def _list_in(read: Any, messages: Sequence[Message], field: str) -> tuple[Any, ...]:
    if not messages:
        return ()
    return tuple(read(message, f"{field}[{index}]") for index, message in enumerate(messages))


def _optional(message: Message, field: str) -> int:
    """Return an optional field's value, or -1 if it is absent, which no number may say."""
    value: int = getattr(message, field)
    # Presence is only asked for the rare values, because the question costs as much as the read.
    if value > 0:
        return value
    if not message.HasField(field):
        return NONE_ID
    if value < 0:
        raise InvalidRequestError(field, f"{value}, must be 0 or more, or not set")
    return value


def _error(code: ErrorCode) -> common_pb2.ErrorCode.ValueType:
    """Encode an outcome. Both enums have the same numbers."""
    return cast(common_pb2.ErrorCode.ValueType, code)


def _joined(pieces: Iterable[Any]) -> bytes:
    return b"".join(pieces)


def adoption_in(message: admin_pb2.AdoptObjectsRequest) -> AdoptObjects:
    """Read a request.

    Raises:
        InvalidRequestError: an id or an epoch is not set, or an object is named without ranges.
    """
    for index, item in enumerate(message.objects):
        # An id of 0 must be stated. The default of a missing field would adopt a wrong object.
        _require_set(item, f"objects[{index}]", "object_id")
        if not item.ranges:
            raise InvalidRequestError(f"objects[{index}].ranges", "empty, must have one or more")
        for place, part in enumerate(item.ranges):
            _require_set(part, f"objects[{index}].ranges[{place}]", "stream_id", "stream_epoch")

    ranges = [part for item in message.objects for part in item.ranges]
    return AdoptObjects(
        object_id=_adopted_column(message.objects, "object_id"),
        object_size=_adopted_column(message.objects, "object_size"),
        range_count=column([len(item.ranges) for item in message.objects]),
        ranges=RangeColumns(
            stream_id=_adopted_column(ranges, "stream_id"),
            stream_epoch=_adopted_column(ranges, "stream_epoch"),
            start_offset=_adopted_column(ranges, "start_offset"),
            end_offset=_adopted_column(ranges, "end_offset"),
        ),
        replaced=column(message.replaced_object_ids),
        after_gap=column([int(part.after_gap) for part in ranges]),
        **{name: _facts(message.objects, name) for name in FACT_COLUMNS},
    )


def adoption_out(
    answer: AdoptObjectsAnswer, range_count: Int64Column
) -> admin_pb2.AdoptObjectsResponse:
    """Write the answer to a request whose objects have so many ranges each."""
    response = admin_pb2.AdoptObjectsResponse()
    # Errors of all ranges are one column. The counts of the request divide it again.
    parts = np.split(answer.range_errors, np.cumsum(range_count)[:-1])
    for error, rows in zip(answer.errors.tolist(), parts, strict=True):
        response.results.add(error=error, range_errors=rows.tolist())
    return response


def _require_set(message: Any, path: str, *names: str) -> None:
    for name in names:
        if not message.HasField(name):
            raise not_set(f"{path}.{name}")


def _adopted_column(messages: Iterable[Any], name: str) -> Int64Column:
    return column([getattr(message, name) for message in messages])


def _facts(messages: Iterable[Any], name: str) -> Int64Column:
    return column(
        [
            getattr(message, name) if message.HasField(name) else NONE_ID  # unknown
            for message in messages
        ]
    )
