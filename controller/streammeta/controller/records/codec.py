"""Codec of record sets. The only module that knows `proto/streammeta/v1/records.proto`.

A record class and its message have the same fields. Columns are encoded as little-endian int64
bytes and decoded as read-only arrays over the received bytes, without a copy. A record set that
cannot be read completely is rejected, since replaying a part of it would fork the metadata. The
same holds for additions of newer versions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from streammeta.controller.errors import NewerLogError
from streammeta.controller.records import record as rec
from streammeta.v1.records_pb2 import RecordSet

_COLUMN_DTYPE = np.dtype("<i8")


class RecordCodecError(Exception):
    """Bytes that are not a record set. The message contains place and cause."""


def encode_records(records: Sequence[rec.Record]) -> bytes:
    """Return the payload of one log entry. `records` is not empty."""
    record_set = RecordSet()
    for record in records:
        layout = _LAYOUTS[type(record)]
        message = getattr(record_set.records.add(), layout.name)
        # A record whose fields are all default values must still be encoded.
        message.SetInParent()
        layout.encode(message, record)
    return record_set.SerializeToString()


def decode_records(payload: bytes) -> tuple[rec.Record, ...]:
    """Return the records of one log entry.

    Raises:
        RecordCodecError: the bytes are damaged or empty.
        NewerLogError: they contain a kind of record, or a field, that this version does not
            know.
    """
    try:
        record_set = RecordSet.FromString(payload)
    except DecodeError as error:
        raise RecordCodecError(f"payload of {len(payload)} bytes is not a record set") from error
    if not record_set.records:
        raise RecordCodecError(f"payload of {len(payload)} bytes contains no record")
    records = tuple(_decode(index, message) for index, message in enumerate(record_set.records))
    _reject_unknown_fields(record_set, payload)
    return records


def _reject_unknown_fields(record_set: RecordSet, payload: bytes) -> None:
    # Walking through all messages would cost as much as decoding them, comparing sizes does not.
    record_set.DiscardUnknownFields()
    if record_set.ByteSize() == len(payload):
        return

    for path, number in _unknown_fields(RecordSet.FromString(payload), "record set"):
        raise NewerLogError(
            f"field {number} of {path} is unknown to this version: "
            "a newer controller wrote it, upgrade this one"
        )


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    """Yield (path of the message, number) of each unknown field."""
    unknown: Any = UnknownFieldSet(message)  # its stub omits that it is iterable
    yield from ((path, field.field_number) for field in unknown)
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in value if field.is_repeated else (value,):
                yield from _unknown_fields(child, f"{path}.{field.name}")


def _decode(index: int, message: Any) -> rec.Record:
    name = message.WhichOneof("kind")
    layout = _LAYOUTS_BY_NAME.get(name)
    if layout is None:
        # An unknown kind is an unknown field of the message, so it has bytes but no kind.
        if not message.ByteSize():
            raise RecordCodecError(f"record {index} is empty")
        raise NewerLogError(
            f"record {index} is of a kind unknown to this version: "
            "a newer controller wrote it, upgrade this one"
        )

    try:
        record: rec.Record = layout.decode(getattr(message, name))
    except ValueError as error:
        raise RecordCodecError(f"record {index} ({name}) has a broken column: {error}") from error

    # Replay slices the ranges by these counts, so a wrong one would shift all later objects.
    if type(record) is rec.StreamSetObjectsCommitted:
        _check_range_counts(index, record)
    return record


def _check_range_counts(index: int, record: rec.StreamSetObjectsCommitted) -> None:
    counts = record.range_count
    # A single commit is the usual case, and a reduction would cost more than the rest.
    counted = int(counts[0]) if len(counts) == 1 else int(np.add.reduce(counts))
    rows = len(record.ranges.stream_id)
    if counted != rows:
        raise RecordCodecError(
            f"record {index} (stream_set_objects_committed) counts {counted} ranges in "
            f"range_count, but contains {rows}"
        )


_Encoder = Callable[[Any, str, Any], None]
_Decoder = Callable[[Any], Any]


def _encode_repeated(message: Any, name: str, value: Iterable[Any]) -> None:
    getattr(message, name).extend(value)


def _encode_tags(message: Any, name: str, value: rec.Tags) -> None:
    target = getattr(message, name)
    for key, text in value:
        target.add(key=key, value=text)


def _decode_tags(value: Any) -> rec.Tags:
    return tuple((tag.key, tag.value) for tag in value)


def _encode_tag_sets(message: Any, name: str, value: tuple[rec.Tags, ...]) -> None:
    target = getattr(message, name)
    for tags in value:
        _encode_tags(target.add(), "tags", tags)


def _decode_tag_sets(value: Any) -> tuple[rec.Tags, ...]:
    return tuple(_decode_tags(tag_set.tags) for tag_set in value)


def _encode_ranges(message: Any, name: str, value: rec.StreamSetObjectRanges) -> None:
    _RANGES_LAYOUT.encode(getattr(message, name), value)


def _decode_ranges(value: Any) -> Any:
    return _RANGES_LAYOUT.decode(value)


def _same(value: Any) -> Any:
    return value


_CODECS: dict[Any, tuple[_Encoder, _Decoder]] = {
    int: (setattr, _same),
    bool: (setattr, _same),
    str: (setattr, _same),
    rec.Tags: (_encode_tags, _decode_tags),
    tuple[rec.Tags, ...]: (_encode_tag_sets, _decode_tag_sets),
    tuple[str, ...]: (_encode_repeated, tuple),
    tuple[bytes, ...]: (_encode_repeated, tuple),
    rec.StreamSetObjectRanges: (_encode_ranges, _decode_ranges),
}
_PARALLEL_TYPES = (rec.Int64Column, tuple[str, ...], tuple[bytes, ...])
_MAY_BE_EMPTY: dict[type[Any], tuple[str, ...]] = {
    rec.StreamsCreated: ("shared",),
    rec.StreamsClosed: ("end_offset",),
    rec.StreamSetObjectsCommitted: (*rec.FACT_COLUMNS, "content_digest"),
    rec.StreamObjectsCommitted: rec.FACT_COLUMNS,
    rec.NamedObjectsCommitted: ("crc32c",),
}


class _Layout:
    """Mapping of a record class to its message: fields, their codecs, and the columns."""

    def __init__(self, cls: type[Any]) -> None:
        hints = get_type_hints(cls, vars(rec))
        names = [field.name for field in fields(cls)]
        self.cls = cls
        self.name = _message_field(cls.__name__)
        # Most fields of most records are columns; they have their own loop without calls.
        self._columns = [name for name in names if hints[name] == rec.Int64Column]
        self._others = [
            (name, *_CODECS[hints[name]]) for name in names if name not in self._columns
        ]
        # Columns added by a later level are absent in older records.
        self._may_be_empty = _MAY_BE_EMPTY.get(cls, ())

        parallel = [name for name in names if hints[name] in _PARALLEL_TYPES]
        self._parallel = [name for name in parallel if name not in self._may_be_empty]

    def encode(self, message: Any, record: Any) -> None:
        """Fill a message with a record. An empty column is omitted, which reads as empty."""
        for name in self._columns:
            if len(value := getattr(record, name)):
                # Columns that come from tables may be narrower.
                column = value if value.dtype is _COLUMN_DTYPE else value.astype(_COLUMN_DTYPE)
                setattr(message, name, column.tobytes())
        for name, encode, _ in self._others:
            encode(message, name, getattr(record, name))

    def decode(self, body: Any) -> Any:
        """Return the record. Raises ValueError unless its columns have equal lengths."""
        values = {name: decode(getattr(body, name)) for name, _, decode in self._others}
        for name in self._columns:
            column = getattr(body, name)
            # numpy rejects an empty buffer.
            values[name] = np.frombuffer(column, _COLUMN_DTYPE) if column else rec.EMPTY_COLUMN

        lengths = [len(values[name]) for name in self._parallel]
        lengths += [len(values[name]) for name in self._may_be_empty if len(values[name])]
        # Replay indexes columns in parallel, so a shorter one is damage.
        if lengths and lengths.count(lengths[0]) < len(lengths):
            named = {name: len(values[name]) for name in (*self._parallel, *self._may_be_empty)}
            raise ValueError(f"columns of unequal lengths {named}")
        return self.cls(**values)


def _message_field(class_name: str) -> str:
    # Two capitals in a row would become two words.
    spelled = class_name.replace("KVs", "Kvs")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in spelled).lstrip("_")


_RANGES_LAYOUT = _Layout(rec.StreamSetObjectRanges)
_LAYOUTS = {cls: _Layout(cls) for cls in get_args(rec.Record)}
_LAYOUTS_BY_NAME = {layout.name: layout for layout in _LAYOUTS.values()}
