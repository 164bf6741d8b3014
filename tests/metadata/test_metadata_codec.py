"""Records survive their bytes, and bytes that are no records are refused."""

from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest

from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import RecordCodecError, decode_records, encode_records
from streammeta.v1.records_pb2 import RecordSet

COLUMN = np.array([0, 7, 2**62, -1], dtype=np.int64)
TAGS = (("topic", "t"), ("partition", "ü"))
RECORDS: tuple[rec.Record, ...] = (
    rec.StreamsCreated(request_id="r", node_id=3, first_stream_id=0, count=2, tags=(TAGS, ())),
    rec.StreamsOpened(node_id=2, stream_id=COLUMN, stream_epoch=COLUMN + 0, tags=()),
    rec.StreamsReopened(stream_id=COLUMN),
    rec.StreamsClosed(stream_id=COLUMN, end_offset=COLUMN + 0),
    rec.StreamsClosed(stream_id=COLUMN, end_offset=COLUMN[:0]),
    rec.StreamsTrimmed(stream_id=COLUMN, start_offset=COLUMN),
    rec.RangesRemoved(stream_id=COLUMN, range_index=COLUMN),
    rec.StreamsDeleted(stream_id=COLUMN),
    rec.ObjectsPrepared(request_id="", node_id=0, first_object_id=0, count=3, deadline_ms=2**50),
    rec.StreamSetObjectsCommitted(
        node_id=0,
        committed_at_ms=1,
        data_time_ms=-5,
        object_id=COLUMN[:2],
        order_id=COLUMN[:2],
        object_size=COLUMN[:2],
        attributes=np.array([-4, 0]),
        range_count=np.array([1, 3]),
        ranges=rec.SetObjectRanges(stream_id=COLUMN, start_offset=COLUMN, end_offset=COLUMN + 1),
    ),
    rec.StreamSetObjectsCommitted(
        node_id=0,
        committed_at_ms=1,
        data_time_ms=1,
        object_id=COLUMN[:1],
        order_id=COLUMN[:1],
        object_size=COLUMN[:1],
        attributes=COLUMN[:1],
        range_count=np.array([4]),
        ranges=rec.SetObjectRanges(stream_id=COLUMN, start_offset=COLUMN, end_offset=COLUMN + 1),
        min_timestamp_ms=np.array([0]),
        max_timestamp_ms=np.array([2**63 - 1]),
        crc32c=np.array([2**32 - 1]),
    ),
    rec.StreamObjectsCommitted(
        committed_at_ms=0,
        object_id=COLUMN,
        object_size=COLUMN,
        attributes=COLUMN,
        stream_id=COLUMN,
        start_offset=COLUMN,
        end_offset=COLUMN,
        crc32c=COLUMN,
    ),
    rec.StreamObjectsCommitted(
        committed_at_ms=0,
        object_id=COLUMN,
        object_size=COLUMN,
        attributes=COLUMN,
        stream_id=COLUMN,
        start_offset=COLUMN,
        end_offset=COLUMN,
    ),
    rec.CommitRowsRejected(object_id=COLUMN, stream_id=COLUMN, error=COLUMN),
    rec.ObjectsDestroyed(object_id=COLUMN, marked_at_ms=9, deep=True),
    rec.ObjectsRemoved(object_id=COLUMN[:0]),
    rec.ObjectsLinked(composite_id=2**40, object_id=COLUMN),
    rec.ObjectAttributesSet(object_id=5, attributes=-4),
    rec.PendingUploadsSet(node_id=1, stream_id=COLUMN, start_offset=COLUMN, end_offset=COLUMN),
    rec.UploadsAbandoned(node_id=1, stream_id=COLUMN),
    rec.NodeLocked(node_id=1, locked=True),
    rec.NodeUnregistered(node_id=1),
    rec.NodeIdIssued(request_id="r", node_id=1000),
    rec.NodeSupervised(node_id=1),
    rec.RecoveryAssigned(node_id=1, target_id=-1),
    rec.DeletionsHeld(since_ms=1, until_ms=2),
    rec.BucketClaimed(cluster_uuid="u", issued_below=2**63 - 1),
    rec.NodeRegistered(node_id=0, node_epoch=0, wal_config="", tags=TAGS),
    rec.NodeEpochSet(node_id=1, node_epoch=2, failover=True),
    rec.KVsPut(namespaces=("", "n"), keys=("a", "b"), values=(b"", b"\xff")),
    rec.KVsDeleted(namespaces=("n",), keys=("b",)),
)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, rec.SetObjectRanges):
        return all(_same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right)) and left.dtype == right.dtype
    return bool(left == right)


def test_every_record_class_is_tried() -> None:
    assert {type(record) for record in RECORDS} == set(get_args(rec.Record))


def test_records_survive_encoding_in_order() -> None:
    decoded = decode_records(encode_records(RECORDS))
    assert [type(record) for record in decoded] == [type(record) for record in RECORDS]
    for before, after in zip(RECORDS, decoded, strict=True):
        for field in fields(before):
            assert _same(getattr(before, field.name), getattr(after, field.name)), field.name


def test_decoded_columns_are_read_only() -> None:
    (record,) = decode_records(encode_records((rec.StreamsReopened(stream_id=COLUMN),)))
    assert isinstance(record, rec.StreamsReopened)
    assert not record.stream_id.flags.writeable


def test_cut_off_bytes_are_refused_or_whole_records() -> None:
    payload = encode_records(RECORDS)
    for length in range(len(payload)):
        try:
            records = decode_records(payload[:length])
        except RecordCodecError:
            continue
        # A cut between two records leaves a shorter, valid set; the log's checksum tells.
        assert encode_records(records) == payload[:length]


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff", b"\x0a\x00"])
def test_bytes_that_are_no_record_set_are_refused(payload: bytes) -> None:
    with pytest.raises(RecordCodecError):
        decode_records(payload)


def test_an_unknown_kind_of_record_is_refused_by_name() -> None:
    unknown = bytes.fromhex("0a05" + "a206" + "02" + "0801")  # field 100 of Record
    with pytest.raises(RecordCodecError, match="does not know"):
        decode_records(unknown)


def test_columns_of_unequal_length_are_refused() -> None:
    record_set = RecordSet()
    trimmed = record_set.records.add().streams_trimmed
    trimmed.stream_id = COLUMN.tobytes()
    trimmed.start_offset = COLUMN[:2].tobytes()
    with pytest.raises(RecordCodecError, match="unequal lengths"):
        decode_records(record_set.SerializeToString())


def _set_objects() -> tuple[RecordSet, Any]:
    record_set = RecordSet()
    record = record_set.records.add().stream_set_objects_committed
    pair = COLUMN[:2].tobytes()
    for name in ("object_id", "order_id", "object_size", "attributes"):
        setattr(record, name, pair)
    record.range_count = np.array([1, 3]).tobytes()
    for name in ("stream_id", "start_offset", "end_offset"):
        setattr(record.ranges, name, COLUMN.tobytes())
    return record_set, record


def test_ranges_of_set_objects_have_their_own_number_of_rows() -> None:
    record_set, record = _set_objects()
    assert len(decode_records(record_set.SerializeToString())) == 1
    record.ranges.end_offset = COLUMN[:3].tobytes()
    with pytest.raises(RecordCodecError, match="unequal lengths"):
        decode_records(record_set.SerializeToString())


def test_ranges_of_set_objects_are_as_many_as_counted() -> None:
    record_set, record = _set_objects()
    record.range_count = np.array([1, 2]).tobytes()
    with pytest.raises(RecordCodecError, match="counts 3 ranges in range_count, but holds 4"):
        decode_records(record_set.SerializeToString())


def test_a_closed_offset_for_some_streams_only_is_refused() -> None:
    record_set = RecordSet()
    closed = record_set.records.add().streams_closed
    closed.stream_id, closed.end_offset = COLUMN.tobytes(), COLUMN[:2].tobytes()
    with pytest.raises(RecordCodecError, match="unequal lengths"):
        decode_records(record_set.SerializeToString())


def test_a_column_with_a_torn_row_is_refused() -> None:
    record_set = RecordSet()
    record_set.records.add().streams_closed.stream_id = COLUMN.tobytes()[:-3]
    with pytest.raises(RecordCodecError, match="broken column"):
        decode_records(record_set.SerializeToString())
