"""A malformed request is refused naming its field, and changes nothing.

So is a compaction whose results differ from its sources. The metadata stops where its own caller
breaks an invariant.
"""

from dataclasses import replace
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError, LimitExceededError
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.commit_validation import OBJECT_SIZE_MAX
from streammeta.controller.metadata.api.object_listings import (
    ListStreamObjects,
    ListStreamSetObjects,
)
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.tables.values import (
    NodeIdentity,
    PageRequest,
    RangeColumns,
    column,
)
from tests.metadata.small_world import NODE, NOW, World, batch, merge, stream_objects, upload

STREAM = (r.NewStream(),)
MANY = 10_001


def _ranges(**changes: Any) -> r.CommitStreamSetObject:
    columns = {"stream_id": (0, 1), "start_offset": (0, 0), "end_offset": (1, 1)} | changes
    return upload(
        0,
        (0, 0, 1),
        ranges=RangeColumns(**{name: column(values) for name, values in columns.items()}),
    )


def _objects(*rows: tuple[int, int, int, int], **changes: Any) -> r.CommitStreamSetObject:
    return upload(0, (0, 0, 1), stream_objects=stream_objects(*rows), **changes)


def _results(
    *rows: tuple[int, int, int], others: tuple[tuple[int, int, int, int], ...] = ()
) -> r.CommitStreamSetObject:
    """What set object 9 is compacted to: set object 0, and stream objects."""
    more = {"stream_objects": stream_objects(*others)} if others else {}
    return upload(0, *rows, compacted_object_ids=column([9]), **more)


def _without_set_object(**changes: Any) -> r.CommitStreamSetObject:
    return upload(
        -1, (0, 0, 1), ranges=RangeColumns(), stream_objects=stream_objects((1, 1, 0, 5)), **changes
    )


def _facts_of_rows(**facts: tuple[int, ...]) -> r.CommitStreamSetObject:
    rows = replace(stream_objects((1, 1, 0, 5), (2, 2, 0, 5)), **_columns(facts))
    return upload(0, (0, 0, 1), stream_objects=rows)


def _facts_of_batch(**facts: tuple[int, ...]) -> r.CommitUploads:
    return batch((0, (0, 0, 1)), (1, (1, 0, 1)), **_columns(facts))


def _columns(facts: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: column(values) for name, values in facts.items()}


def _compaction(**changes: Any) -> r.CommitStreamObject:
    return merge(changes.pop("object_id", 1), (0,), **changes)


def _tags(count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"k{index}", "v") for index in range(count))


INVALID: list[tuple[Any, str]] = [
    (r.CreateStreams(request_id="", node=NODE, streams=STREAM), "request_id"),
    (r.CreateStreams(request_id="x" * 65, node=NODE, streams=STREAM), "request_id"),
    (r.CreateStreams(request_id="x", node=NodeIdentity(-1, 0), streams=STREAM), "node.node_id"),
    (r.CreateStreams(request_id="x", node=NodeIdentity(0, -1), streams=STREAM), "node.node_epoch"),
    (r.CreateStreams(request_id="x", node=NODE, streams=()), "streams"),
    (r.CreateStreams(request_id="c", node=NODE, streams=STREAM), "request_id"),
    (
        r.CreateStreams(
            request_id="x", node=NODE, streams=(r.NewStream((("k", "1"), ("k", "2"))),)
        ),
        "streams[0].tags.key",
    ),
    (r.OpenStreams(node=NODE, streams=(r.StreamToOpen(0, 1),) * 2), "streams.stream_id"),
    (r.OpenStreams(node=NODE, streams=(r.StreamToOpen(-1, 1),)), "streams[0].stream_id"),
    (r.OpenStreams(node=NODE, streams=(r.StreamToOpen(0, -1),)), "streams[0].stream_epoch"),
    (r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1),) * 2), "streams.stream_id"),
    (r.CloseStreams(node=NODE, streams=()), "streams"),
    (r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, -1),)), "streams[0].end_offset"),
    (r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1, 2**63),)), "streams[0].end_offset"),
    (r.AbandonUploads(node_id=-1), "node_id"),
    (r.AbandonUploads(node_id=0, stream_ids=(-1,)), "stream_ids"),
    (r.AbandonUploads(node_id=0, stream_ids=(1, 1)), "stream_ids"),
    (batch((0, (0, 0, 1)), object_id=column()), "object_id"),
    (batch((0, (0, 0, 1)), (0, (1, 0, 1))), "object_id"),
    (batch((1, (0, 0, 1)), (-1, (1, 0, 1))), "object_id[1]"),
    (batch((0, (0, 0, 1)), object_size=column()), "object_size"),
    (batch((0, (0, 0, 1)), object_size=column([-1])), "object_size[0]"),
    (batch((0, (0, 0, 1)), range_count=column([1, 1])), "range_count"),
    (batch((0, (0, 0, 1)), range_count=column([0])), "range_count[0]"),
    (batch((0, (0, 0, 1)), range_count=column([2])), "range_count"),
    (batch((0, (0, 0, 1)), range_count=column([2**62])), "range_count[0]"),
    (batch((0, (0, 0, 1), (0, 1, 2))), "ranges.stream_id[1]"),
    (batch((0, (0, 0, 1)), (1, (1, 0, 1), (0, 1, 2))), "ranges.stream_id[2]"),
    (batch((0, (0, 0, 1)), (1, (-1, 0, 1))), "ranges.stream_id[1]"),
    (batch((0, (0, 0, 1)), (1, (1, -1, 1))), "ranges.start_offset[1]"),
    (batch((0, (0, 0, 1)), (1, (1, 1, 1))), "ranges.end_offset[1]"),
    (batch((0, (0, 0, 1)), (1, (1, 0, 1)), epochs=(1,)), "ranges.stream_epoch"),
    (batch((0, (0, 0, 1)), node=NodeIdentity(-1, 1)), "node.node_id"),
    (upload(0, (0, 0, 1), object_size=OBJECT_SIZE_MAX + 1), "object_size"),
    (_compaction(object_size=OBJECT_SIZE_MAX + 1), "object_size"),
    (batch((0, (0, 0, 1)), object_size=column([OBJECT_SIZE_MAX + 1])), "object_size[0]"),
    (_facts_of_rows(object_size=(1, OBJECT_SIZE_MAX + 1)), "stream_objects.object_size[1]"),
    (upload(0, (0, 0, 1), on_conflict=0), "on_conflict"),
    (_compaction(operations=(0,)), "operations[0]"),
    (r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 1, -1),)), "streams[0].new_start_offset"),
    (r.TrimStreams(node=NODE, streams=(r.StreamToTrim(0, 2**63, 1),)), "streams[0].stream_epoch"),
    (r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(0, -2),)), "streams[0].stream_epoch"),
    (r.GetOpeningStreams(node=NODE, page=PageRequest(page_token="x")), "page.page_token"),
    (r.GetOpeningStreams(node=NODE, page=PageRequest(page_size=MANY)), "page.page_size"),
    (r.PrepareObjects(request_id="x", node=NODE, count=0, ttl_ms=1_000), "count"),
    (r.PrepareObjects(request_id="x", node=NODE, count=MANY, ttl_ms=1_000), "count"),
    (r.PrepareObjects(request_id="x", node=NODE, count=1, ttl_ms=999), "ttl_ms"),
    (r.PrepareObjects(request_id="x", node=NODE, count=1, ttl_ms=604_800_001), "ttl_ms"),
    (r.PrepareObjects(request_id="p", node=NODE, count=1, ttl_ms=1_000), "request_id"),
    (_ranges(stream_id=(0, 0)), "ranges.stream_id[1]"),
    (_ranges(stream_id=(1, 0)), "ranges.stream_id[1]"),
    (_ranges(stream_id=(-1, 0)), "ranges.stream_id[0]"),
    (_ranges(start_offset=(0, 1)), "ranges.end_offset[1]"),
    (_ranges(start_offset=(-1, 0)), "ranges.start_offset[0]"),
    (_ranges(end_offset=(1,)), "ranges.end_offset"),
    (_ranges(stream_epoch=(1,)), "ranges.stream_epoch"),
    (upload(-1, (0, 0, 1)), "object_id"),
    (upload(0, (0, 0, 1), ranges=RangeColumns()), "ranges"),
    (upload(-1, (0, 0, 1), ranges=RangeColumns()), "stream_objects"),
    (upload(0, (0, 0, 1), object_size=-1), "object_size"),
    (upload(0, (0, 0, 1), attributes=2**31), "attributes"),
    (_objects((0, 1, 0, 5)), "stream_objects.object_id[0]"),
    (_objects((1, 0, 0, 5)), "stream_objects.stream_id[0]"),
    (_objects((1, 1, 0, 5), (2, 1, 5, 6)), "stream_objects.stream_id"),
    (_objects((1, 1, 0, 5), (1, 2, 0, 6)), "stream_objects.object_id"),
    (_objects((1, 1, 5, 5)), "stream_objects.end_offset[0]"),
    (_objects((-1, 1, 0, 5)), "stream_objects.object_id[0]"),
    (_results((1, 0, 5), (0, 0, 5)), "ranges.stream_id[1]"),
    (_results((0, 5, 9), (0, 0, 5)), "ranges.start_offset[1]"),
    (_results((0, 0, 5), (0, 0, 5)), "ranges.start_offset[1]"),
    (_results((0, 0, 5), (1, 0, 9), (1, 8, 10)), "ranges.start_offset[2]"),
    (_results((0, 0, 5), others=((1, 0, 4, 6),)), "stream_objects.start_offset[0]"),
    (_results((0, 4, 6), others=((1, 0, 0, 5),)), "stream_objects.start_offset[0]"),
    (_results((0, 0, 2**63 - 1), others=((1, 0, 7, 8),)), "stream_objects.start_offset[0]"),
    (_results((9, 0, 5), others=((1, 0, 5, 9), (2, 0, 0, 6))), "stream_objects.start_offset[1]"),
    (_results((9, 0, 5), others=((1, 0, 5, 9), (1, 0, 9, 10))), "stream_objects.object_id"),
    (upload(0, (0, 0, 1), min_timestamp_ms=-2), "min_timestamp_ms"),
    (upload(0, (0, 0, 1), min_timestamp_ms=5), "max_timestamp_ms"),
    (upload(0, (0, 0, 1), max_timestamp_ms=5), "max_timestamp_ms"),
    (upload(0, (0, 0, 1), min_timestamp_ms=5, max_timestamp_ms=4), "max_timestamp_ms"),
    (upload(0, (0, 0, 1), max_timestamp_ms=2**63), "max_timestamp_ms"),
    (upload(0, (0, 0, 1), crc32c=-2), "crc32c"),
    (upload(0, (0, 0, 1), crc32c=2**32), "crc32c"),
    (_without_set_object(crc32c=0), "crc32c"),
    (_without_set_object(min_timestamp_ms=0, max_timestamp_ms=0), "max_timestamp_ms"),
    (_facts_of_rows(min_timestamp_ms=(1, 1)), "stream_objects.max_timestamp_ms"),
    (_facts_of_rows(max_timestamp_ms=(1, 1)), "stream_objects.max_timestamp_ms"),
    (_facts_of_rows(crc32c=(1,)), "stream_objects.crc32c"),
    (_facts_of_rows(crc32c=(1, 2**32)), "stream_objects.crc32c[1]"),
    (_facts_of_batch(min_timestamp_ms=(1,), max_timestamp_ms=(1,)), "min_timestamp_ms"),
    (_facts_of_batch(min_timestamp_ms=(1, 1)), "max_timestamp_ms"),
    (_facts_of_batch(min_timestamp_ms=(0, -2), max_timestamp_ms=(0, 0)), "min_timestamp_ms[1]"),
    (_facts_of_batch(min_timestamp_ms=(0, -1), max_timestamp_ms=(0, 0)), "max_timestamp_ms[1]"),
    (_facts_of_batch(min_timestamp_ms=(3, 0), max_timestamp_ms=(2, 0)), "max_timestamp_ms[0]"),
    (_facts_of_batch(min_timestamp_ms=(3, 0), max_timestamp_ms=(-1, 0)), "max_timestamp_ms[0]"),
    (_facts_of_batch(crc32c=(-2, 0)), "crc32c[0]"),
    (_facts_of_batch(crc32c=(0, 2**32)), "crc32c[1]"),
    (_facts_of_batch(crc32c=(0, 0, 0)), "crc32c"),
    (_compaction(max_timestamp_ms=7), "max_timestamp_ms"),
    (_compaction(crc32c=2**32), "crc32c"),
    (_compaction(object_id=-1, start_offset=-1, end_offset=-1, crc32c=1), "crc32c"),
    (_compaction(object_id=-1), "start_offset, end_offset"),
    (upload(0, (0, 0, 1), compacted_object_ids=column([0])), "compacted_object_ids"),
    (r.ExpireObjects(limit=0), "limit"),
    (r.RemoveObjects(object_ids=()), "object_ids"),
    (r.RegisterNode(node=NodeIdentity(2**31, 0)), "node.node_id"),
    (r.UnregisterNode(node=NodeIdentity(-1, 0)), "node.node_id"),
    (r.SuperviseNode(node=NodeIdentity(0, -1)), "node.node_epoch"),
    (r.GetNextNodeId(request_id=""), "request_id"),
    (r.SetNodeLock(node_id=2**31, locked=True), "node_id"),
    (r.AssignRecoveries(targets=()), "targets"),
    (r.AssignRecoveries(targets=(r.RecoveryTarget(-1, 0, 1),)), "targets[0].node_id"),
    (r.AssignRecoveries(targets=(r.RecoveryTarget(0, -1, 1),)), "targets[0].node_epoch"),
    (r.AssignRecoveries(targets=(r.RecoveryTarget(0, 0, -2),)), "targets[0].target_id"),
    (r.AssignRecoveries(targets=(r.RecoveryTarget(0, 0, 0),)), "targets[0].target_id"),
    (r.AssignRecoveries(targets=(r.RecoveryTarget(0, 0, 1),) * 2), "targets.node_id"),
    (r.PutKVs(items=(r.KVToPut(key="", value=b""),)), "items[0].key"),
    (r.PutKVs(items=(r.KVToPut(key="k", value=b""),) * 2), "items.key"),
    (
        r.PutKVs(items=(r.KVToPut(key="k", value=b"", expected_version=-1),)),
        "items[0].expected_version",
    ),
    (r.DeleteKVs(keys=(r.KVKey(key="k"),) * 2), "keys.key"),
    (r.SetFeatureLevel(level=0), "level"),
    (r.SetFeatureLevel(level=SUPPORTED.highest + 1), "level"),
    (r.ClaimBucket(cluster_uuid="", issued_below=0), "cluster_uuid"),
    (r.ClaimBucket(cluster_uuid="u" * 65, issued_below=0), "cluster_uuid"),
    (r.ClaimBucket(cluster_uuid="u", issued_below=-1), "issued_below"),
    (r.ClaimBucket(cluster_uuid="u", issued_below=2**63), "issued_below"),
]
INVALID_READS: list[tuple[Any, str]] = [
    (r.GetKVs(keys=()), "keys"),
    (r.GetObjects(queries=()), "queries"),
    (r.GetObjects(queries=(ObjectQuery(0, 5, 4),)), "queries[0].end_offset"),
    (r.GetObjects(queries=(ObjectQuery(0, -1, 4),)), "queries[0].start_offset"),
    (r.GetObjects(queries=(ObjectQuery(0, 0, -1, MANY),)), "queries[0].limit"),
    (r.CheckObjects(object_ids=(-1,)), "object_ids"),
    (r.DescribeStreams(owner_node_id=-1), "owner_node_id"),
    (r.DescribeStreams(page=PageRequest(page_token="-1")), "page.page_token"),
    (r.DescribeStreams(page=PageRequest(page_token=str(2**63))), "page.page_token"),
    (r.DescribeStreams(page=PageRequest(page_token="9" * 5_000)), "page.page_token"),
    (r.FindStreams(tags=()), "tags"),
    (r.FindStreams(tags=(("k", "1"),), owner_node_id=-1), "owner_node_id"),
    (r.FindStreams(tags=(("k", "1"), ("k", "2"))), "tags.key"),
    (r.FindStreams(tags=(("k", "1"),), page=PageRequest(page_token="x")), "page.page_token"),
    (r.DescribeObjects(page=PageRequest(page_token="0" * 5_000)), "page.page_token"),
    (r.DescribeObjects(object_ids=(2**63,)), "object_ids"),
    (r.GetNodes(node_ids=(-1,)), "node_ids"),
    (ListStreamSetObjects(node_id=-1), "node_id"),
    (ListStreamObjects(stream_id=-1), "stream_id"),
    (ListStreamObjects(stream_id=0, start_offset=-1), "start_offset"),
    (ListStreamObjects(stream_id=0, start_offset=2, end_offset=1), "end_offset"),
    (ListStreamObjects(stream_id=0, page=PageRequest(-1)), "page.page_size"),
    (ListStreamObjects(stream_id=0, page=PageRequest(page_token="7")), "page.page_token"),
    (ListStreamObjects(stream_id=0, page=PageRequest(page_token="7--1")), "page.page_token"),
    (ListStreamObjects(stream_id=0, page=PageRequest(page_token="1-9" * 30)), "page.page_token"),
    (ListStreamSetObjects(node_id=0, page=PageRequest(page_token="x")), "page.page_token"),
    (r.ListKVs(page=PageRequest(page_size=-1)), "page.page_size"),
]
TOO_LARGE: list[Any] = [
    r.CreateStreams(request_id="x", node=NODE, streams=STREAM * MANY),
    r.CreateStreams(request_id="x", node=NODE, streams=(r.NewStream(_tags(17)),)),
    upload(0, *((stream, 0, 1) for stream in range(20_001))),
    batch((0, *((stream, 0, 1) for stream in range(20_001)))),
    batch(*((number, (0, number, number + 1)) for number in range(MANY))),
    r.AbandonUploads(node_id=0, stream_ids=tuple(range(MANY))),
    upload(0, (0, 0, 1), compacted_object_ids=column(range(MANY))),
    r.AssignRecoveries(targets=(r.RecoveryTarget(0, 0, 1),) * MANY),
    r.PutKVs(items=(r.KVToPut(key="k" * 1_025, value=b""),)),
    r.PutKVs(items=(r.KVToPut(key="k", value=b"v" * (2**20 + 1)),)),
    r.RegisterNode(node=NODE, tags=_tags(17)),
    r.RemoveObjects(object_ids=(0,) * MANY),
]


@pytest.mark.parametrize(("request_", "field"), INVALID)
def test_malformed_writes_name_their_field_and_change_nothing(request_: Any, field: str) -> None:
    world = World()
    before = world.map.state_hash()
    with pytest.raises(InvalidRequestError) as caught:
        world.map.decide(request_, NOW, world.map.applied_end_offset)
    assert caught.value.field == field
    assert world.map.state_hash() == before


@pytest.mark.parametrize(("request_", "field"), INVALID_READS)
def test_malformed_reads_name_their_field(request_: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        World().map.query(request_)
    assert caught.value.field == field


@pytest.mark.parametrize("request_", TOO_LARGE)
def test_what_is_over_a_limit_is_refused(request_: Any) -> None:
    world = World()
    before = world.map.state_hash()
    with pytest.raises(LimitExceededError):
        world.map.decide(request_, NOW, world.map.applied_end_offset)
    assert world.map.state_hash() == before


def test_results_of_a_compaction_may_touch() -> None:
    request = _results((0, 0, 5), (0, 5, 7), (1, 0, 5), others=((2, 0, 9, 10), (1, 0, 7, 9)))
    assert World().write(request).error == ErrorCode.COMPACTED_OBJECTS_NOT_FOUND


def test_optional_columns_may_be_left_out() -> None:
    rows = stream_objects((1, 1, 0, 5))
    assert len(rows.stream_epoch) == len(rows.attributes) == 0
    assert World().write(_objects((1, 1, 0, 5))).error == 0


def test_a_decision_never_precedes_applied_entries() -> None:
    world = World()
    before = world.map.state_hash()

    with pytest.raises(AssertionError):
        world.map.decide(requests.RegisterNode(node=NODE), NOW, world.map.applied_end_offset - 1)

    assert world.map.state_hash() == before


def test_undoing_leaves_no_entry_above_the_new_end() -> None:
    world = World()
    end = world.map.applied_end_offset
    world.map.applied_end_offset = end + 2  # an entry that no undo belongs to

    with pytest.raises(AssertionError):
        world.map.undo_to(end + 1)


@pytest.mark.parametrize(
    ("rows", "others", "verdicts"),
    [
        (((0, 0, 20),), (), [0]),  # stream 1 is missing
        (((1, 0, 20),), (), [0]),
        (((0, 0, 20), (1, 0, 19)), (), [0, 0]),  # so is a part of it
        (((0, 0, 20), (1, 0, 21)), (), [0, 509]),
        (((0, 0, 20), (1, 0, 20), (2, 0, 10)), (), [0, 0, 509]),  # not held by these sources
        (((0, 0, 20), (1, 0, 20), (9, 0, 10)), (), [0, 0, 509]),  # never created
        (((0, 0, 10), (1, 0, 20)), ((4, 0, 11, 20),), [0, 0, 0]),  # offset 10 is missing
        (((0, 0, 20), (1, 0, 20)), ((4, 0, 20, 21), (5, 3, 0, 1)), [0, 0, 509, 509]),
        (((0, 0, 10), (0, 15, 25), (1, 0, 20)), (), [0, 509, 0]),  # as much as is missing
    ],
)
def test_results_hold_what_the_sources_hold_or_nothing_happens(
    rows: Any, others: Any, verdicts: list[int]
) -> None:
    world = World()
    world.commit(0, (0, 0, 10), (1, 0, 10))
    world.commit(1, (0, 10, 20), (1, 10, 20))
    world.commit(2, (2, 0, 10))
    before = world.map.state_hash()
    more = {"stream_objects": stream_objects(*others)} if others else {}
    answer = world.commit(3, *rows, compacted_object_ids=column((0, 1)), **more)
    assert answer.error is ErrorCode.OFFSET_NOT_MATCHED
    assert [*answer.range_errors.tolist(), *answer.stream_object_errors.tolist()] == verdicts
    assert world.map.state_hash() == before
