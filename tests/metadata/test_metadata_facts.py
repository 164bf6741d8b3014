"""Time bounds and checksums of objects: optional, never wrong, and free where none are recorded."""

import io
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.tables.object_facts import ObjectFacts, facts_of_one
from streammeta.controller.metadata.tables.values import SourceOperation, column
from streammeta.controller.records import record as rec
from streammeta.controller.records.codec import RecordCodecError, decode_records, encode_records
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader, write_checkpoint
from streammeta.v1.records_pb2 import RecordSet
from tests.metadata import small_world
from tests.metadata.rich_history import checkpoint

UNKNOWN = (-1, -1, -1)
KEEP, DELETE = SourceOperation.KEEP_DATA, SourceOperation.DELETE
SET_OBJECT_OF_OLD = bytes.fromhex(
    # Of a log that knows no facts: object 1 of node 0 holds offsets 0 to 10 of stream 2.
    "0a5b920158108827188827220801000000000000002a080100000000000000320864000000000000003a0800"
    "00000000000000420801000000000000004a1e0a080200000000000000120800000000000000001a080a0000"
    "0000000000"
)


def facts(low: int = -1, high: int = -1, crc32c: int = -1) -> dict[str, Any]:
    return dict(zip(rec.FACT_COLUMNS, (low, high, crc32c), strict=True))


def fact_columns(*rows: tuple[int, int, int]) -> dict[str, Any]:
    return {
        name: column(values)
        for name, values in zip(rec.FACT_COLUMNS, zip(*rows, strict=True), strict=True)
    }


def known(world: small_world.World, *object_ids: int) -> list[tuple[int, int, int]]:
    answer: Any = world.map.query(r.DescribeObjects(object_ids=object_ids))
    return [tuple(getattr(item, name) for name in rec.FACT_COLUMNS) for item in answer.objects]


def made(world: small_world.World, request: Any) -> None:
    assert world.write(request).error is ErrorCode.NONE


def test_the_next_object_of_a_row_inherits_nothing() -> None:
    world = small_world.World()
    made(world, small_world.upload(0, (0, 0, 5), **facts(1, 2, 3)))
    row = world.map._objects.row(0)
    world.apply(rec.ObjectsDestroyed(object_id=column([0]), marked_at_ms=small_world.NOW))
    assert known(world, 0) == [(1, 2, 3)]
    entry = world.map.applied_end_offset
    world.write(r.RemoveObjects(object_ids=(0,)))
    world.map.undo_to(entry)
    assert known(world, 0) == [(1, 2, 3)]
    world.write(r.RemoveObjects(object_ids=(0,)))
    world.map.forget_undo(world.map.applied_end_offset)
    request = r.PrepareObjects(request_id="next", node=small_world.NODE, count=1, ttl_ms=1_000)
    object_id = world.write(request).first_object_id
    assert world.map._objects.row(object_id) == row
    made(world, small_world.upload(object_id, (0, 5, 9)))
    assert known(world, object_id) == [UNKNOWN]


# ---- clusters that record none pay nothing ----


def test_commits_without_facts_take_no_memory_and_no_bytes() -> None:
    world = small_world.World()
    objects = world.map._objects
    none = small_world.upload(0, (0, 0, 5), stream_objects=small_world.stream_objects((1, 1, 0, 5)))
    unknown = replace(
        none,
        object_id=2,
        ranges=small_world.batch((0, (0, 5, 6))).ranges,
        stream_objects=replace(small_world.stream_objects((3, 1, 5, 6)), **fact_columns(UNKNOWN)),
    )
    batched = small_world.batch((4, (0, 6, 7)), (5, (0, 7, 8)), **fact_columns(UNKNOWN, UNKNOWN))
    for request in (none, unknown, batched):
        decision = world.map.decide(request, small_world.NOW, world.map.applied_end_offset)
        for record in decision.records:
            assert not any(len(getattr(record, name)) for name in rec.FACT_COLUMNS)
        world.map.apply(world.map.applied_end_offset, decision.records)
    assert objects._facts.nbytes == 0
    assert not len(world.map.freeze().sections()["object_facts"]["object_id"])


def test_facts_take_21_bytes_an_object() -> None:
    table = ObjectFacts()
    rows = np.arange(100_000)
    table.put(rows, facts_of_one(1, 2, 3))
    assert table.nbytes == 21 * len(rows)


# ---- what older versions wrote ----


def test_an_old_record_is_replayed_with_everything_unknown() -> None:
    world = small_world.World()
    (record,) = decode_records(SET_OBJECT_OF_OLD)
    assert isinstance(record, rec.StreamSetObjectsCommitted)
    assert [getattr(record, name).tolist() for name in rec.FACT_COLUMNS] == [[], [], []]
    world.apply(record)
    assert known(world, 1) == [UNKNOWN]
    assert encode_records([record]) == SET_OBJECT_OF_OLD


def test_records_name_their_facts_behind_all_older_fields() -> None:
    """So a reader that knows them not finds all others where they were."""
    for name, least in (("stream_set_objects_committed", 10), ("stream_objects_committed", 8)):
        message = RecordSet().records.add()
        by_name = getattr(message, name).DESCRIPTOR.fields_by_name
        assert [by_name[fact_column].number for fact_column in rec.FACT_COLUMNS] == [
            least,
            least + 1,
            least + 2,
        ]


@pytest.mark.parametrize("name", rec.FACT_COLUMNS)
def test_a_column_of_facts_for_some_objects_only_is_refused(name: str) -> None:
    columns: dict[str, Any] = {
        field.name: column([1, 2])
        for field in fields(rec.StreamObjectsCommitted)
        if field.name not in ("committed_at_ms", "content_digest")
    }
    whole = rec.StreamObjectsCommitted(committed_at_ms=1, **columns)
    assert len(decode_records(encode_records([whole]))) == 1
    short: Any = {name: column([1])}
    with pytest.raises(RecordCodecError, match="length"):
        decode_records(encode_records([replace(whole, **short)]))


def test_a_checkpoint_without_the_section_is_read_with_everything_unknown() -> None:
    world = small_world.World()
    made(world, small_world.upload(0, (0, 0, 5)))
    (snapshot_id, whole), old = checkpoint(world.map.freeze()), io.BytesIO()
    sections = CheckpointReader(whole).sections()
    kept = {name: sections[name] for name in sections if name != "object_facts"}
    write_checkpoint(old, snapshot_id, "c", kept)
    for file in (whole, old):
        loaded = read_metadata(file, snapshot_id).cluster_metadata
        assert loaded.state_hash() == world.map.state_hash()
