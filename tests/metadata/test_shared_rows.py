"""Shared streams: any node appends, the commit assigns offsets, and a repeat finds them again."""

from dataclasses import fields, replace
from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode, FeatureLevelError, InvalidRequestError
from streammeta.controller.features import SUPPORTED
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.object_slices import ObjectQuery
from streammeta.controller.metadata.api.upload_batches import is_plain
from streammeta.controller.metadata.tables import values as v
from tests.metadata.small_world import NODE, NOW, OTHER, World, stream_objects, upload

OK = ErrorCode.NONE
Row = tuple[int, int] | tuple[int, int, int, int, int]
"""Stream and number of records; and producer, epoch and first sequence."""


@pytest.fixture
def world() -> World:
    """A map with the owned streams 0 and 1 and the shared streams 2 and 3."""
    world = World(2)
    world.write(r.SetFeatureLevel(level=SUPPORTED.highest))
    shared = r.NewStream(shared=True)
    world.write(r.CreateStreams(request_id="s", node=NODE, streams=(shared, shared)))
    return world


def columns(*rows: Row) -> v.SharedRowColumns:
    cells = list(zip(*[row if len(row) == 5 else (*row, -1, -1, -1) for row in rows], strict=True))
    names = [field.name for field in fields(v.SharedRowColumns)]
    named = dict(zip(names, map(v.column, cells), strict=True))
    return v.SharedRowColumns(**(named if max(cells[2]) >= 0 else dict(list(named.items())[:2])))


def append(object_id: int, *rows: Row, **changes: Any) -> r.CommitStreamSetObject:
    fields: dict[str, Any] = {"node": NODE, "order_id": -1, "object_size": 100}
    return r.CommitStreamSetObject(
        object_id=object_id, shared_rows=columns(*rows), **(fields | changes)
    )


def results(answer: Any) -> list[tuple[ErrorCode, int]]:
    """Return the verdict and the offset of each row."""
    pairs = zip(answer.shared.errors.tolist(), answer.shared.start_offset.tolist(), strict=True)
    return [(ErrorCode(error), start) for error, start in pairs]


def held(world: World, stream_id: int) -> list[tuple[int, int, int]]:
    """Return which object holds which offsets of a stream."""
    (described,) = world.map.query(r.DescribeStreams(stream_ids=(stream_id,))).streams  # type: ignore[attr-defined]
    query = ObjectQuery(stream_id, described.start_offset, described.end_offset)
    answer: Any = world.map.query(r.GetObjects(queries=(query,)))
    (found,) = answer.results
    return [(slice_.object_id, slice_.start_offset, slice_.end_offset) for slice_ in found.objects]


# ---- offsets ----


def test_rows_of_any_node_follow_each_other(world: World) -> None:
    first = world.write(append(0, (2, 5), (2, 1), (3, 2)))
    assert (first.error, results(first)) == (OK, [(OK, 0), (OK, 5), (OK, 0)])
    assert first.shared.committed_at_ms == NOW
    second = world.write(append(1, (2, 3), node=OTHER))
    assert results(second) == [(OK, 6)]
    assert held(world, 2) == [(0, 0, 6), (1, 6, 9)]
    assert held(world, 3) == [(0, 0, 2)]


def test_owned_and_shared_rows_share_an_object(world: World) -> None:
    request = replace(upload(0, (1, 0, 4)), shared_rows=columns((2, 5)))
    rows = stream_objects((1, 0, 0, 7))
    answer = world.write(replace(request, stream_objects=rows))
    assert (answer.error, answer.range_errors.tolist()) == (OK, [0])
    assert (held(world, 1), held(world, 2)) == ([(0, 0, 4)], [(0, 0, 5)])
    assert not is_plain(request)


def test_a_world_with_shared_streams_is_undone_and_restored(world: World) -> None:
    world.assert_undone_and_restored(
        (
            append(0, (2, 5, 0, 0, 0), (3, 1, 0, 0, 0)),
            append(1, (2, 5, 0, 0, 5), (3, 1, 0, 0, 9), on_conflict=v.OnConflict.ACCEPT_VALID),
            r.IssueProducerIds(node=NODE, count=10),
            r.TrimStreams(node=OTHER, streams=(r.StreamToTrim(2, 0, 7),)),
            r.DeleteStreams(node=OTHER, streams=(r.StreamToDelete(3, 0),)),
        )
    )


# ---- verdicts ----


def test_the_rows_of_a_stream_stand_or_fall_together(world: World) -> None:
    world.write(append(0, (2, 5, 9, 0, 0)))
    repeated = ((2, 1), (2, 5, 9, 0, 0), (3, 4))
    refused = world.write(append(1, *repeated))
    duplicate, rejected = ErrorCode.DUPLICATE_BATCH, ErrorCode.STREAM_ROWS_REJECTED
    assert (refused.error, results(refused)) == (
        rejected,
        [(rejected, -1), (duplicate, 0), (OK, -1)],
    )
    assert refused.shared.committed_at_ms == -1
    assert world.state(1) is v.ObjectState.PREPARED

    taken = world.write(append(1, *repeated, on_conflict=v.OnConflict.ACCEPT_VALID))
    assert (taken.error, results(taken)) == (OK, [(rejected, -1), (duplicate, 0), (OK, 0)])
    assert (held(world, 2), held(world, 3)) == ([(0, 0, 5)], [(1, 0, 4)])


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ((9, 1), ErrorCode.STREAM_NOT_EXIST),
        ((0, 1), ErrorCode.STREAM_KIND_MISMATCH),
        ((2, 5, 9, 0, 0), ErrorCode.DUPLICATE_BATCH),
        ((2, 5, 9, 0, 6), ErrorCode.OUT_OF_ORDER_SEQUENCE),
        ((2, 5, 9, 1, 5), ErrorCode.OUT_OF_ORDER_SEQUENCE),
        ((2, 5, 8, 0, 0), ErrorCode.PRODUCER_FENCED),
        ((3, 5, 9, 0, 77), OK),
        ((2, 5, 9, 1, 0), OK),
    ],
)
def test_a_row_is_judged_by_its_stream_and_producer(
    world: World, row: Row, error: ErrorCode
) -> None:
    world.write(append(0, (2, 5, 8, 1, 0), (2, 5, 9, 0, 0)))
    answer = world.write(append(1, row))
    assert (answer.error, results(answer)[0][0]) == (error, error)


def test_deleted_streams_take_no_rows(world: World) -> None:
    world.write(append(0, (2, 5, 9, 0, 0)))
    world.write(r.DeleteStreams(node=OTHER, streams=(r.StreamToDelete(2, 0),)))
    rows = ((2, 1), (2, 5, 9, 0, 0), (3, 1))
    answer = world.write(append(1, *rows, on_conflict=v.OnConflict.ACCEPT_VALID))
    assert results(answer) == [(ErrorCode.STREAM_NOT_EXIST, -1)] * 2 + [(OK, 0)]


def test_no_offset_is_assigned_above_the_largest(world: World) -> None:
    world.apply(*fill_to(world, 2**63 - 6))
    assert results(world.write(append(7, (2, 6)))) == [(ErrorCode.OFFSET_NOT_MATCHED, -1)]
    assert results(world.write(append(7, (2, 5)))) == [(OK, 2**63 - 6)]


def fill_to(world: World, end: int) -> list[Any]:
    """Return records after which stream 2 ends there."""
    decision = world.map.decide(append(6, (2, 5)), NOW, world.map.applied_end_offset)
    (record,) = decision.records
    ranges = record.ranges  # type: ignore[union-attr]
    return [replace(record, ranges=replace(ranges, end_offset=v.column([end])))]  # type: ignore[arg-type]


# ---- repeats ----


def test_a_repeat_gets_the_first_answer_whatever_came_after(world: World) -> None:
    world.write(append(0, (2, 5, 9, 0, 0)))
    request = append(
        1, (2, 5, 9, 0, 0), (3, 4), (3, 1, 7, 0, 0), on_conflict=v.OnConflict.ACCEPT_VALID
    )
    first = world.write(request)
    world.write(append(2, (3, 100), node=OTHER))
    for again in (world, world.restored()):
        entries = again.map.applied_end_offset
        answer = again.write(request)
        assert (answer.error, results(answer)) == (first.error, results(first))
        assert answer.shared.committed_at_ms == first.shared.committed_at_ms
        assert again.map.applied_end_offset == entries


def test_a_left_out_row_committed_since_is_a_duplicate_in_the_repeat(world: World) -> None:
    world.write(append(0, (3, 5, 9, 0, 0)))
    rows = ((2, 5), (3, 1, 8, 0, 0), (3, 5, 9, 0, 0))
    request = append(1, *rows, on_conflict=v.OnConflict.ACCEPT_VALID)
    assert results(world.write(request))[1] == (ErrorCode.STREAM_ROWS_REJECTED, -1)
    assert results(world.write(append(2, (3, 1, 8, 0, 0)))) == [(OK, 5)]
    assert results(world.write(request))[1] == (ErrorCode.DUPLICATE_BATCH, 5)


def test_after_a_compaction_only_producers_know_their_offsets(world: World) -> None:
    world.write(append(0, (3, 5, 9, 0, 0)))
    rows = ((2, 5), (2, 4, 9, 0, 0), (3, 1, 8, 0, 0), (3, 5, 9, 0, 0))
    request = append(1, *rows, on_conflict=v.OnConflict.ACCEPT_VALID)
    assert results(world.write(request))[:2] == [(OK, 0), (OK, 5)]
    compacted = upload(2, (2, 0, 9), (3, 0, 5), compacted_object_ids=v.column([0, 1]))
    assert world.write(compacted).error is OK
    answer = world.write(request)
    assert (answer.error, results(answer)) == (
        OK,
        [
            (ErrorCode.OFFSETS_UNKNOWN, -1),
            (OK, 5),
            (ErrorCode.STREAM_ROWS_REJECTED, -1),
            (ErrorCode.DUPLICATE_BATCH, 0),
        ],
    )
    assert answer.shared.committed_at_ms == -1


def test_other_rows_under_a_committed_id_are_refused(world: World) -> None:
    rows: list[Row] = [(2, 5, 9, 0, 0), (2, 3, 8, 1, 4), (3, 5, 9, 0, 0)]
    world.write(append(0, *rows))
    others = [[rows[1], rows[0], rows[2]], rows[:2]]
    for place in range(5):
        row = list(rows[1])
        row[place] += 1
        others.append(sorted([rows[0], tuple(row), rows[2]]))  # type: ignore[list-item]
    for other in others:
        answer = world.write(append(0, *other))
        assert answer.error is ErrorCode.OBJECT_CONTENT_MISMATCH, other
        assert {error for error, _ in results(answer)} == {answer.error}


def test_a_commit_that_left_rows_out_is_no_repeat_of_one_that_may_not(world: World) -> None:
    request = append(0, (0, 1), (2, 1), on_conflict=v.OnConflict.ACCEPT_VALID)
    assert results(world.write(request)) == [(ErrorCode.STREAM_KIND_MISMATCH, -1), (OK, 0)]
    strict = replace(request, on_conflict=v.OnConflict.REJECT_ALL)
    assert world.write(strict).error is ErrorCode.OBJECT_CONTENT_MISMATCH


# ---- streams of both kinds ----


def test_a_shared_stream_has_no_owner(world: World) -> None:
    kind = ErrorCode.STREAM_KIND_MISMATCH
    opened = world.write(r.OpenStreams(node=NODE, streams=(r.StreamToOpen(2, 1),)))
    closed = world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(2, 0),)))
    assert (opened.streams[0].error, closed.errors) == (kind, (kind,))
    for epochs in ((), (0,)):
        assert world.commit(0, (2, 0, 5), epochs=epochs).range_errors.tolist() == [kind]


def test_any_node_trims_a_shared_stream_up_to_its_end(world: World) -> None:
    world.write(append(0, (2, 9)))

    def trimmed(start: int, epoch: int = 0, appended: int | None = None) -> tuple[ErrorCode, int]:
        item = r.StreamToTrim(2, epoch, start, appended)
        answer = world.write(r.TrimStreams(node=OTHER, streams=(item,)))
        return answer.errors[0], answer.start_offsets[0]

    assert trimmed(4) == (OK, 4)
    assert trimmed(3) == trimmed(10) == (ErrorCode.OFFSET_NOT_MATCHED, -1)
    assert trimmed(10, appended=12) == (ErrorCode.OFFSET_NOT_MATCHED, -1)
    assert trimmed(9, epoch=1)[0] is ErrorCode.STREAM_INNER_ERROR
    assert trimmed(9) == (OK, 9)


def test_streams_are_created_of_both_kinds_and_a_repeat_names_the_same(world: World) -> None:
    request = r.CreateStreams(
        request_id="both", node=NODE, streams=(r.NewStream(), r.NewStream(shared=True))
    )
    first = world.write(request)
    assert world.write(request) == world.restored().write(request) == first
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=first.stream_ids))
    found = [(stream.state, stream.epoch, stream.node_id) for stream in answer.streams]
    assert found == [(v.StreamState.CLOSED, -1, -1), (v.StreamState.SHARED, 0, -1)]
    with pytest.raises(InvalidRequestError, match="another kind"):
        world.write(replace(request, streams=request.streams[::-1]))


def test_below_their_level_there_are_no_shared_streams() -> None:
    world = World()
    world.write(r.SetFeatureLevel(level=SUPPORTED.highest - 1))
    shared = r.CreateStreams(request_id="s", node=NODE, streams=(r.NewStream(shared=True),))
    for request in (shared, r.IssueProducerIds(node=NODE, count=1)):
        with pytest.raises(FeatureLevelError, match="feature level 5"):
            world.write(request)


def test_the_level_stays_while_shared_streams_may_exist(world: World) -> None:
    answer = world.write(r.SetFeatureLevel(level=SUPPORTED.highest - 1))
    assert answer.level == SUPPORTED.highest


# ---- malformed rows ----


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"object_id": -1}, "object_id"),
        ({"failover": True}, "shared_rows"),
        ({"compacted_object_ids": v.column([4])}, "shared_rows"),
        ({"shared_rows": columns((3, 1), (2, 1))}, r"shared_rows.stream_id\[1\]"),
        ({"shared_rows": columns((-1, 1))}, r"shared_rows.stream_id\[0\]"),
        ({"shared_rows": columns((2, 0))}, r"shared_rows.record_count\[0\]"),
        ({"shared_rows": columns((2, 2**31))}, r"shared_rows.record_count\[0\]"),
        ({"shared_rows": columns((2, 1), (2, 1, -2, 0, 0), (2, 1, 1, 0, 0))}, "producer_id"),
        ({"shared_rows": columns((2, 1, 5, 2**15, 0))}, r"producer_epoch\[0\]"),
        ({"shared_rows": columns((2, 1, 5, 0, 2**31))}, r"first_sequence\[0\]"),
        ({"shared_rows": columns((2, 1, 5, 0, 0), (2, 1, -1, 0, -1))}, r"producer_epoch\[1\]"),
        ({"shared_rows": replace(columns((2, 1)), producer_id=v.column([1]))}, "producer_epoch"),
        ({"shared_rows": replace(columns((2, 1)), first_sequence=v.column([1]))}, "first_sequence"),
        ({"shared_rows": replace(columns((2, 1)), record_count=v.column())}, "record_count"),
        ({"stream_objects": stream_objects((1, 2, 0, 5))}, r"shared_rows.stream_id\[0\]"),
        ({"ranges": upload(0, (2, 0, 5)).ranges}, r"shared_rows.stream_id\[0\]"),
    ],
)
def test_malformed_rows_are_refused_by_field(
    world: World, changes: dict[str, Any], field: str
) -> None:
    before = world.map.state_hash()
    with pytest.raises(InvalidRequestError, match=field):
        world.write(replace(append(0, (2, 1)), **changes))
    assert world.map.state_hash() == before


# ---- producers ----


def test_ids_of_producers_are_issued_once(world: World) -> None:
    request = r.IssueProducerIds(node=OTHER, count=10)
    firsts = [world.write(request).first_producer_id, world.write(request).first_producer_id]
    assert [*firsts, world.restored().write(request).first_producer_id] == [0, 10, 20]
    fenced = r.IssueProducerIds(node=v.NodeIdentity(1, 0), count=10)
    assert world.write(fenced).error is ErrorCode.NODE_EPOCH_EXPIRED


def test_idle_producers_are_forgotten_within_bounds(world: World) -> None:
    world.write(append(0, (2, 1, 8, 0, 0), (3, 1, 9, 0, 0)))

    def expired(idle_ms: int, since_ms: int = 0, now_ms: int = NOW + 100) -> int:
        request = r.ExpireProducers(limit=1, idle_ms=idle_ms, since_ms=since_ms)
        offset = world.map.applied_end_offset
        decision = world.map.decide(request, now_ms, offset)
        if decision.records:
            world.map.apply(offset, decision.records)
        answer: Any = decision.answer
        count: int = answer.expired
        return count

    assert (expired(100), expired(99, since_ms=NOW + 100)) == (0, 0)
    assert [expired(99), expired(99), expired(99)] == [1, 1, 0]
    assert results(world.write(append(1, (2, 1, 8, 0, 77)))) == [(OK, 1)]
