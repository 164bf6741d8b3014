"""Records survive their bytes, and bytes that are no records are refused."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
from google.protobuf.message import Message

from streammeta.controller.errors import NewerLogError
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import RecordCodecError, decode_records, encode_records
from streammeta.v1.records_pb2 import RecordSet
from tests.metadata.test_record_selection import sample

COLUMN = np.array([0, 2**62, -1], dtype=np.int64)
RECORDS: tuple[rec.Record, ...] = (
    *(sample(kind, rows=COLUMN) for kind in get_args(rec.Record)),
    replace(sample(rec.StreamsClosed), end_offset=COLUMN[:0]),
    replace(sample(rec.StreamsCreated), tags=((("topic", "ü"), ("k", "")), ())),
    replace(sample(rec.StreamsOpened), tags=()),
    replace(sample(rec.ObjectsPrepared), request_id="", deadline_ms=2**50),
    replace(
        sample(rec.StreamSetObjectsCommitted),
        data_time_ms=-5,
        range_count=np.array([0, 3, 0]),
        min_timestamp_ms=COLUMN[:0],
        max_timestamp_ms=COLUMN[:0],
        crc32c=COLUMN[:0],
    ),
    replace(sample(rec.StreamObjectsCommitted), min_timestamp_ms=COLUMN[:0], crc32c=COLUMN[:0]),
    rec.ObjectsRemoved(object_id=COLUMN[:0]),
    rec.ObjectsLinked(composite_id=2**40, object_id=COLUMN),
    rec.ObjectAttributesSet(object_id=5, attributes=-4),
    rec.RecoveryAssigned(node_id=1, target_id=-1),
    rec.BucketClaimed(cluster_uuid="u", issued_below=2**63 - 1),
    rec.FeatureLevelSet(level=2),
    rec.ObjectsReclaimed(object_id=np.array([7, 5]), deadline_ms=2**62),
    rec.RestoreFinished(undecided_below=2**63 - 1),
    rec.NodeRegistered(node_id=0, node_epoch=0, wal_config="", tags=()),
    rec.KVsPut(namespaces=("", "n"), keys=("a", "b"), values=(b"", b"\xff")),
)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, rec.StreamSetObjectRanges):
        return all(_same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right)) and left.dtype == right.dtype
    return bool(left == right)


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


def test_a_record_without_a_kind_is_refused_by_its_place() -> None:
    record_set = RecordSet.FromString(encode_records(RECORDS[:1]))
    record_set.records.add()
    with pytest.raises(RecordCodecError, match="record 1"):
        decode_records(record_set.SerializeToString())


def test_an_unknown_kind_of_record_is_refused_by_name() -> None:
    unknown = bytes.fromhex("0a05" + "a206" + "02" + "0801")  # field 100 of Record
    with pytest.raises(NewerLogError):
        decode_records(unknown)


@pytest.mark.parametrize(
    ("kind", "field", "content", "problem"),
    [
        ("streams_trimmed", "start_offset", COLUMN[:2].tobytes(), "unequal lengths"),
        ("streams_closed", "end_offset", COLUMN[:2].tobytes(), "unequal lengths"),
        ("streams_closed", "stream_id", COLUMN.tobytes()[:-3], "broken column"),
    ],
)
def test_a_damaged_column_is_refused(kind: str, field: str, content: bytes, problem: str) -> None:
    record_set = RecordSet()
    record = getattr(record_set.records.add(), kind)
    record.stream_id = COLUMN.tobytes()
    setattr(record, field, content)
    with pytest.raises(RecordCodecError, match=problem):
        decode_records(record_set.SerializeToString())


@pytest.mark.parametrize(
    ("counts", "ends", "problem"),
    [
        ([0, 3], COLUMN[:2], "unequal lengths"),
        ([1, 1], COLUMN, "counts 2 ranges in range_count, but contains 3"),
        ([0, 3], COLUMN, None),
    ],
)
def test_ranges_of_set_objects_are_as_many_as_counted(
    counts: list[int], ends: rec.Int64Column, problem: str | None
) -> None:
    record_set = RecordSet()
    record = record_set.records.add().stream_set_objects_committed
    for name in ("object_id", "order_id", "object_size", "attributes"):
        setattr(record, name, COLUMN[:2].tobytes())
    record.range_count = np.array(counts).tobytes()
    record.ranges.stream_id = record.ranges.start_offset = COLUMN.tobytes()
    record.ranges.end_offset = ends.tobytes()
    with pytest.raises(RecordCodecError, match=problem) if problem else nullcontext():
        assert len(decode_records(record_set.SerializeToString())) == 1


NEWER = b"\xf8\x07\x01"
"""Field 127, as a later version may add it to any message."""


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_field_that_a_newer_version_added_is_refused_wherever_it_is(record: rec.Record) -> None:
    """To drop it would make another map of the same log."""
    payload = encode_records((record,))

    def messages(within: Message) -> Iterator[Message]:
        yield within
        for field, value in within.ListFields():
            if field.message_type is not None:
                for item in value if field.is_repeated else (value,):
                    yield from messages(item)

    for place in range(len(list(messages(RecordSet.FromString(payload))))):
        record_set = RecordSet.FromString(payload)
        list(messages(record_set))[place].MergeFromString(NEWER)
        with pytest.raises(NewerLogError, match="field 127"):
            decode_records(record_set.SerializeToString())


def test_a_field_that_spells_out_its_default_is_not_taken_for_a_newer_one() -> None:
    """Other writers may say what ours leaves away."""
    record = b"\x0a\x00" + b"\x10\x00" + b"\x20\x01"  # request id "", node 0, count 1
    kind = b"\x0a" + bytes((len(record),)) + record  # streams_created
    payload = b"\x0a" + bytes((len(kind),)) + kind
    (decoded,) = decode_records(payload)
    assert isinstance(decoded, rec.StreamsCreated)
    assert (decoded.request_id, decoded.node_id, decoded.count) == ("", 0, 1)
    assert len(encode_records((decoded,))) < len(payload)
