"""A compactor whose commits are wrong: the controllers believe none of them, and nothing changes.

Each lie is told of a compaction that is sound otherwise, by one change of its request.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streammeta.client.compaction.commit import Replacement
from streammeta.v1.objects_pb2 import CommitStreamSetObjectRequest
from tests.compaction.compaction_lives import compact, compacted
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_steps import Step, Steps
from tests.compaction.compaction_world import World

Lie = Callable[[CommitStreamSetObjectRequest], None]
SOME = [(2, 30), (1, 40), (1, 10)]
STREAMS = 3


async def lively_world() -> World:
    """Streams 0 to 2 are split off, 3 to 5 stay together; one of each is trimmed."""
    world = World(block_bytes=120)
    await world.register(1000)
    large = await world.create(1000, STREAMS)
    tiny = await world.create(1000, STREAMS)
    for _ in range(4):
        await world.upload(1000, dict.fromkeys(large, SOME) | {key: [(2, 5)] for key in tiny})
    await world.trim(large[0], 3)
    await world.trim(tiny[0], 3)
    return world


def drop_range(request: CommitStreamSetObjectRequest) -> None:
    for column in (request.ranges.stream_id, request.ranges.start_offset):
        column.pop()
    request.ranges.end_offset.pop()


def end_range_early(request: CommitStreamSetObjectRequest) -> None:
    request.ranges.end_offset[1] -= 1


def end_range_late(request: CommitStreamSetObjectRequest) -> None:
    request.ranges.end_offset[2] += 1


def begin_range_late(request: CommitStreamSetObjectRequest) -> None:
    request.ranges.start_offset[1] += 1


def take_another_stream(request: CommitStreamSetObjectRequest) -> None:
    request.ranges.stream_id[2] += 100


def drop_stream_object(request: CommitStreamSetObjectRequest) -> None:
    rows = request.stream_objects
    for column in (rows.object_id, rows.object_size, rows.stream_id, rows.start_offset):
        column.pop()
    for column in (rows.end_offset, rows.min_timestamp_ms, rows.max_timestamp_ms, rows.crc32c):
        if column:
            column.pop()


def end_stream_object_early(request: CommitStreamSetObjectRequest) -> None:
    request.stream_objects.end_offset[0] -= 1


def begin_stream_object_late(request: CommitStreamSetObjectRequest) -> None:
    rows = request.stream_objects
    untrimmed = list(rows.stream_id).index(max(rows.stream_id))
    rows.start_offset[untrimmed] += 1


def swap_streams(request: CommitStreamSetObjectRequest) -> None:
    ends = request.stream_objects.end_offset
    ends[0], ends[1] = ends[1] + 1, ends[0] - 1


def double_stream_object(request: CommitStreamSetObjectRequest) -> None:
    request.stream_objects.stream_id[0] = request.stream_objects.stream_id[1]


def name_one_source_less(request: CommitStreamSetObjectRequest) -> None:
    request.compacted_object_ids.pop()


def name_a_newer_source(request: CommitStreamSetObjectRequest) -> None:
    request.compacted_object_ids.append(max(request.compacted_object_ids) + 1)


def name_no_result(request: CommitStreamSetObjectRequest) -> None:
    request.object_id = -1
    request.object_size = 0
    for field in ("ranges", "stream_objects", "crc32c", "min_timestamp_ms", "max_timestamp_ms"):
        request.ClearField(field)


def name_a_result_that_was_never_prepared(request: CommitStreamSetObjectRequest) -> None:
    request.object_id = 10**9


def speak_for_another_node(request: CommitStreamSetObjectRequest) -> None:
    request.node.node_id = 1001


LIES: tuple[Lie, ...] = (
    *(drop_range, end_range_early, end_range_late, begin_range_late, take_another_stream),
    *(drop_stream_object, end_stream_object_early, begin_stream_object_late, swap_streams),
    *(double_stream_object, name_one_source_less, name_a_newer_source, name_no_result),
    *(name_a_result_that_was_never_prepared, speak_for_another_node),
)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_a_commit_that_does_not_hold_what_its_sources_hold_is_refused(
    lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await lively_world()
    await world.register(1001)
    ids = world.set_objects(1000)
    check = ReadCheck(world)
    newer = iter([0])

    async def upload(step: Step) -> None:
        if step.name == "PrepareObjects" and not step.done and next(newer, None) == 0:
            await world.upload(1000, dict.fromkeys(world.streams, SOME))
        check.run()

    truth = Replacement.request

    def told(replacement: Replacement) -> CommitStreamSetObjectRequest:
        request = truth(replacement)
        assert len(request.ranges.stream_id) == len(request.stream_objects.object_id) == STREAMS
        lie(request)
        return request

    monkeypatch.setattr(Replacement, "request", told)
    report = await compacted(world, 1000, Steps(hook=upload))
    assert report.failures
    assert world.set_objects(1000)[: len(ids)] == ids, "no source has gone"
    check.run()
    monkeypatch.undo()
    await compact(world, 1000)
    assert not set(ids) & set(world.set_objects(1000)), "the truth is believed"
    check.run()
    await world.expire()
    check.run()
    assert not world.strays()
