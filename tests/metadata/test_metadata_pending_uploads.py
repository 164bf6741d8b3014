"""Fast closes: what a node owes afterwards, how it uploads that, and what happens if it never does.

The invariant: acknowledged offsets are either in an object, owed by exactly one node, or lost.
"""

from typing import Any

import pytest

from streammeta.controller.errors import ErrorCode
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata import values as v
from streammeta.controller.metadata.answers import OpeningStream, PendingUpload
from streammeta.controller.records.record import PendingUploadsSet
from tests.metadata.test_metadata_uploads import (
    NODE,
    NOW,
    OTHER,
    World,
    batch,
    stream_objects,
    upload,
)


def close(world: World, end: int | None, *, stream: int = 0, epoch: int = 1) -> ErrorCode:
    answer = world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(stream, epoch, end),)))
    error: ErrorCode = answer.errors[0]
    return error


def open_by(
    world: World, node: v.NodeIdentity, epoch: int, *, stream: int = 0
) -> tuple[ErrorCode, int]:
    answer = world.write(r.OpenStreams(node=node, streams=(r.StreamToOpen(stream, epoch),)))
    return answer.streams[0].error, answer.streams[0].next_offset


def pending(world: World, stream: int = 0) -> list[tuple[int, int, int]]:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(stream,)))
    return [
        (upload.node_id, upload.start_offset, upload.end_offset)
        for upload in answer.streams[0].pending_uploads
    ]


def lost(world: World, stream: int = 0) -> tuple[tuple[int, int], ...]:
    answer: Any = world.map.query(r.DescribeStreams(stream_ids=(stream,)))
    ranges: tuple[tuple[int, int], ...] = answer.streams[0].lost
    return ranges


def found(world: World, start: int, stream: int = 0) -> tuple[list[tuple[int, int]], int]:
    answer: Any = world.map.query(r.GetObjects(queries=(r.ObjectQuery(stream, start, -1),)))
    result = answer.results[0]
    return [(s.start_offset, s.end_offset) for s in result.objects], result.lost_end_offset


def trim(world: World, node: v.NodeIdentity, epoch: int, start: int) -> None:
    answer = world.write(r.TrimStreams(node=node, streams=(r.StreamToTrim(0, epoch, start),)))
    assert answer.errors == (ErrorCode.NONE,)


def fast_closed(*, taken_over: bool = False) -> World:
    """Stream 0 holds [0, 100), was closed at 150 by NODE, and may be open on OTHER since."""
    world = World(streams=3)
    world.commit(0, (0, 0, 100))
    assert close(world, 150) is ErrorCode.NONE
    if taken_over:
        assert open_by(world, OTHER, 2) == (ErrorCode.NONE, 150)
    return world


# ---- closing ----


def test_a_fast_close_ends_the_stream_and_leaves_an_upload_owed() -> None:
    world = fast_closed()
    assert world.ends()[0] == 150
    assert pending(world) == [(0, 100, 150)]
    described: Any = world.map.query(r.DescribeStreams(stream_ids=(0,), include_ranges=True))
    assert described.streams[0].ranges[-1].end_offset == 150


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (None, None, "NONE"),
        (None, 100, "NONE"),
        (None, 101, "OFFSET_NOT_MATCHED"),
        (150, 150, "NONE"),
        (150, None, "NONE"),
        (150, 100, "OFFSET_NOT_MATCHED"),
        (150, 151, "OFFSET_NOT_MATCHED"),
    ],
)
def test_a_repeated_close_must_name_the_same_end(
    first: int | None, second: int | None, verdict: str
) -> None:
    world = World()
    world.commit(0, (0, 0, 100))
    assert close(world, first) is ErrorCode.NONE
    before = world.map.state_hash()
    assert close(world, second).name == verdict
    assert world.map.state_hash() == before


def test_closes_with_and_without_an_end_mix() -> None:
    world = World(streams=3)
    streams = (r.StreamToClose(2, 1, 7), r.StreamToClose(0, 1), r.StreamToClose(1, 1, 5))
    assert set(world.write(r.CloseStreams(node=NODE, streams=streams)).errors) == {ErrorCode.NONE}
    assert world.ends() == [0, 5, 7]
    assert [pending(world, stream) for stream in range(3)] == [[], [(0, 0, 5)], [(0, 0, 7)]]


# ---- uploading ----

UPLOADS = [
    # (stream's start, its node's upload range, verdict, what is owed afterwards)
    (0, (100, 150), "NONE", []),
    (0, (100, 120), "NONE", [(0, 120, 150)]),
    (0, (100, 151), "OFFSET_NOT_MATCHED", [(0, 100, 150)]),
    (0, (101, 150), "OFFSET_NOT_MATCHED", [(0, 100, 150)]),
    (0, (99, 150), "OFFSET_NOT_MATCHED", [(0, 100, 150)]),
    (0, (150, 160), "OFFSET_NOT_MATCHED", [(0, 100, 150)]),
    (120, (120, 150), "NONE", []),
    (120, (100, 150), "NONE", []),  # formed before the trim
    (120, (100, 130), "NONE", [(0, 130, 150)]),
    (120, (100, 120), "NONE", [(0, 120, 150)]),  # wholly below the start: nothing moves
    (120, (121, 150), "OFFSET_NOT_MATCHED", [(0, 120, 150)]),
    (150, (100, 150), "NONE", []),  # nothing of it is visible any more
]


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize(("start", "offered", "verdict", "owed"), UPLOADS)
def test_what_a_node_owes_is_uploaded_from_its_next_offset_on(
    start: int,
    offered: tuple[int, int],
    verdict: str,
    owed: list[tuple[int, int, int]],
    in_batch: bool,
) -> None:
    world = fast_closed(taken_over=True)
    if start:
        trim(world, OTHER, 2, start)
    if in_batch:
        answer = world.write(batch((1, (0, *offered))))
        got = ErrorCode(int(answer.errors[0]))
        assert answer.range_errors.tolist() == [int(got)]
    else:
        got = world.commit(1, (0, *offered), epochs=(1,)).error
    assert got.name == verdict
    assert pending(world) == owed
    assert world.ends()[0] == 150


def test_owner_and_former_owner_commit_in_any_order_and_readers_stop_at_the_gap() -> None:
    world = fast_closed(taken_over=True)
    assert world.commit(1, (0, 150, 200), node=OTHER).error is ErrorCode.NONE
    assert found(world, 0) == ([(0, 100)], -1)
    assert found(world, 100) == ([], -1)
    assert world.commit(2, (0, 100, 120)).error is ErrorCode.NONE
    assert found(world, 0) == ([(0, 100), (100, 120)], -1)
    rows = stream_objects((3, 0, 120, 150))
    done = world.commit(-1, (0, 0, 1), ranges=v.RangeColumns(), stream_objects=rows)
    assert done.error is ErrorCode.NONE
    assert found(world, 0)[0] == [(0, 100), (100, 120), (120, 150), (150, 200)]
    assert pending(world) == []
    assert world.commit(4, (0, 150, 160)).error is ErrorCode.STREAM_FENCED


def test_a_rejected_row_moves_nothing_and_an_accepted_one_beside_it_does() -> None:
    world = World(streams=2)
    for stream in (0, 1):
        close(world, 50, stream=stream)
    answer = world.commit(0, (0, 0, 50), (1, 1, 50), on_conflict=v.OnConflict.ACCEPT_VALID)
    assert answer.range_errors.tolist() == [0, ErrorCode.OFFSET_NOT_MATCHED]
    assert pending(world, 0) == []
    assert pending(world, 1) == [(0, 0, 50)]


def test_entries_that_are_over_leave_with_the_next_upload() -> None:
    world = fast_closed()
    close(world, 20, stream=1)
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(1, 1),)))
    decision = world.map.decide(upload(1, (0, 100, 110)), NOW, world.map.applied_end_offset)
    (record,) = [one for one in decision.records if isinstance(one, PendingUploadsSet)]
    assert record.stream_id.tolist() == [0, 1]
    assert record.start_offset.tolist() == [110, 20]
    assert record.end_offset.tolist() == [150, 20]


def test_entries_that_are_over_leave_with_the_next_batch_too() -> None:
    world = World(streams=3)
    close(world, 20, stream=1)
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(1, 1),)))
    world.write(batch((1, (0, 0, 5)), (2, (2, 0, 5))))
    assert len(world.map.freeze().sections()["pending_uploads"]["stream_id"]) == 0


# ---- the list of what is open or owed ----


def opening(world: World, node: v.NodeIdentity = NODE, **page: Any) -> Any:
    return world.write(r.GetOpeningStreams(node=node, page=v.PageRequest(**page)))


def test_pending_uploads_are_listed_with_where_to_go_on() -> None:
    world = fast_closed(taken_over=True)
    trim(world, OTHER, 2, 110)
    assert opening(world).streams == (
        OpeningStream(0, 1, 110, 110, 150),
        OpeningStream(1, 1, 0, 0),
        OpeningStream(2, 1, 0, 0),
    )
    assert opening(world, OTHER).streams == (OpeningStream(0, 2, 110, 150),)


def test_uploads_under_several_epochs_are_listed_under_their_own() -> None:
    world = World(streams=2)
    for node, epoch in ((NODE, 1), (OTHER, 2), (NODE, 3)):
        if epoch > 1:
            assert open_by(world, node, epoch)[0] is ErrorCode.NONE
        item = r.StreamToClose(0, epoch, 10 * epoch)
        world.write(r.CloseStreams(node=node, streams=(item,)))
        if node is NODE and epoch == 1:
            assert world.commit(0, (0, 0, 10)).error is ErrorCode.NONE
    assert pending(world) == [(1, 10, 20), (0, 20, 30)]
    assert opening(world).streams[0] == OpeningStream(0, 3, 0, 20, 30)
    assert opening(world, OTHER).streams == (OpeningStream(0, 2, 0, 10, 20),)


@pytest.mark.parametrize("entry", [(1, 0, 9), (0, 90, 149)])
def test_an_upload_of_no_range_of_the_node_is_an_error_and_changes_nothing(
    entry: tuple[int, int, int],
) -> None:
    world = fast_closed()
    stream, start, end = (v.column([value]) for value in entry)
    record = PendingUploadsSet(node_id=0, stream_id=stream, start_offset=start, end_offset=end)
    world.apply(record)
    before = world.map.state_hash()
    answer = world.write(r.GetOpeningStreams(node=v.NodeIdentity(0, 7)))
    assert answer.error is ErrorCode.STREAM_INNER_ERROR
    assert answer.streams == ()
    assert world.map.state_hash() == before


# ---- giving up ----


def test_what_is_given_up_is_lost_and_readers_pass_over_it() -> None:
    world = fast_closed(taken_over=True)
    world.commit(1, (0, 150, 200), node=OTHER)
    world.commit(2, (0, 100, 110))
    answer = world.write(r.AbandonUploads(node_id=0))
    assert answer.abandoned == (PendingUpload(0, 0, 110, 150),)
    assert (pending(world), lost(world)) == ([], ((110, 150),))
    assert found(world, 0) == ([(0, 100), (100, 110)], -1)
    assert found(world, 110) == ([], 150)
    assert found(world, 149) == ([], 150)
    assert found(world, 150) == ([(150, 200)], -1)
    assert world.commit(3, (0, 110, 150)).error is ErrorCode.STREAM_FENCED
    before = world.map.state_hash()
    assert world.write(r.AbandonUploads(node_id=0)).abandoned == ()
    assert world.map.state_hash() == before


def test_lost_ranges_that_touch_are_one_and_go_with_trims_and_deletion() -> None:
    world = fast_closed(taken_over=True)
    item = r.StreamToClose(0, 2, 170)
    world.write(r.CloseStreams(node=OTHER, streams=(item,)))
    world.write(r.AbandonUploads(node_id=1))
    world.write(r.AbandonUploads(node_id=0))
    assert lost(world) == ((100, 170),)
    assert open_by(world, OTHER, 3)[0] is ErrorCode.NONE
    trim(world, OTHER, 3, 120)
    assert lost(world) == ((120, 170),)
    trim(world, OTHER, 3, 170)
    assert lost(world) == ()


def test_lost_ranges_go_with_their_stream() -> None:
    world = fast_closed()
    world.write(r.AbandonUploads(node_id=0))
    assert list(world.map.freeze().sections()["lost_ranges"]["stream_id"]) == [0]
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(0, 1),)))
    assert len(world.map.freeze().sections()["lost_ranges"]["stream_id"]) == 0


# ---- undo and snapshots ----


def test_everything_here_is_undone_and_restored() -> None:
    world = fast_closed(taken_over=True)
    world.commit(2, (0, 100, 110))
    steps = (
        r.CloseStreams(node=NODE, streams=(r.StreamToClose(1, 1, 5),)),
        r.CloseStreams(node=OTHER, streams=(r.StreamToClose(0, 2, 170),)),
        upload(3, (0, 110, 120)),
        batch((4, (0, 120, 130)), (5, (0, 130, 140))),
        r.AbandonUploads(node_id=0),
        r.OpenStreams(node=OTHER, streams=(r.StreamToOpen(1, 2),)),
        r.TrimStreams(node=OTHER, streams=(r.StreamToTrim(1, 2, 3),)),
    )
    world.assert_undone_and_restored(steps)
