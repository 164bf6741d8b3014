"""Records survive their bytes, and bytes that are no records are refused."""

from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest

from controller.records.codec import RecordCodecError, decode_records, encode_records
from controller.records.record import (
    CommitRowsRejected,
    KVsDeleted,
    KVsPut,
    NodeEpochSet,
    NodeRegistered,
    ObjectsDestroyed,
    ObjectsPrepared,
    ObjectsRemoved,
    RangesRemoved,
    Record,
    StreamObjectsCommitted,
    StreamsClosed,
    StreamsCreated,
    StreamsDeleted,
    StreamSetObjectCommitted,
    StreamsOpened,
    StreamsReopened,
    StreamsTrimmed,
)
from proto.records_pb2 import RecordSet

COLUMN = np.array([0, 7, 2**62, -1], dtype=np.int64)
TAGS = (("topic", "t"), ("partition", "ü"))
RECORDS: tuple[Record, ...] = (
    StreamsCreated(request_id="r", node_id=3, first_stream_id=0, count=2, tags=(TAGS, ())),
    StreamsOpened(node_id=2, stream_id=COLUMN, stream_epoch=COLUMN + 0, tags=()),
    StreamsReopened(stream_id=COLUMN),
    StreamsClosed(stream_id=COLUMN),
    StreamsTrimmed(stream_id=COLUMN, start_offset=COLUMN),
    RangesRemoved(stream_id=COLUMN, range_index=COLUMN),
    StreamsDeleted(stream_id=COLUMN),
    ObjectsPrepared(request_id="", node_id=0, first_object_id=0, count=3, deadline_ms=2**50),
    StreamSetObjectCommitted(
        object_id=0,
        node_id=0,
        order_id=-1,
        object_size=2**40,
        attributes=-4,
        committed_at_ms=1,
        stream_id=COLUMN,
        start_offset=COLUMN,
        end_offset=COLUMN,
    ),
    StreamObjectsCommitted(
        committed_at_ms=0,
        object_id=COLUMN,
        object_size=COLUMN,
        attributes=COLUMN,
        stream_id=COLUMN,
        start_offset=COLUMN,
        end_offset=COLUMN,
    ),
    CommitRowsRejected(object_id=COLUMN, stream_id=COLUMN, error=COLUMN),
    ObjectsDestroyed(object_id=COLUMN, marked_at_ms=9, deep=True),
    ObjectsRemoved(object_id=COLUMN[:0]),
    NodeRegistered(node_id=0, node_epoch=0, wal_config="", tags=TAGS),
    NodeEpochSet(node_id=1, node_epoch=2, failover=True),
    KVsPut(namespaces=("", "n"), keys=("a", "b"), values=(b"", b"\xff")),
    KVsDeleted(namespaces=("n",), keys=("b",)),
)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right)) and left.dtype == right.dtype
    return bool(left == right)


def test_every_record_class_is_tried() -> None:
    assert {type(record) for record in RECORDS} == set(get_args(Record))


def test_records_survive_encoding_in_order() -> None:
    decoded = decode_records(encode_records(RECORDS))
    assert [type(record) for record in decoded] == [type(record) for record in RECORDS]
    for before, after in zip(RECORDS, decoded, strict=True):
        for field in fields(before):
            assert _same(getattr(before, field.name), getattr(after, field.name)), field.name


def test_decoded_columns_are_read_only() -> None:
    (record,) = decode_records(encode_records((StreamsClosed(stream_id=COLUMN),)))
    assert isinstance(record, StreamsClosed)
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


def test_a_column_with_a_torn_row_is_refused() -> None:
    record_set = RecordSet()
    record_set.records.add().streams_closed.stream_id = COLUMN.tobytes()[:-3]
    with pytest.raises(RecordCodecError, match="broken column"):
        decode_records(record_set.SerializeToString())
