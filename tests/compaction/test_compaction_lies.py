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

Lie = Callable[[CommitStreamSetObjectRequest], object]
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


def shift(path: str, row: int, by: int) -> Lie:
    """Return a lie that adds to one number of a column."""

    def lie(request: CommitStreamSetObjectRequest) -> None:
        columns, name = path.split(".")
        getattr(getattr(request, columns), name)[row] += by

    return lie


def drop_last_row(columns: str) -> Lie:
    """Return a lie that leaves out the last row of all columns."""

    def lie(request: CommitStreamSetObjectRequest) -> None:
        for _, column in getattr(request, columns).ListFields():
            column.pop()

    return lie


def begin_untrimmed_late(request: CommitStreamSetObjectRequest) -> None:
    rows = request.stream_objects  # in the order in which they were written
    untrimmed = list(rows.stream_id).index(max(rows.stream_id))
    rows.start_offset[untrimmed] += 1


def swap_streams(request: CommitStreamSetObjectRequest) -> None:
    ends = request.stream_objects.end_offset
    ends[0], ends[1] = ends[1] + 1, ends[0] - 1


def double_stream_object(request: CommitStreamSetObjectRequest) -> None:
    request.stream_objects.stream_id[0] = request.stream_objects.stream_id[1]


def name_a_newer_source(request: CommitStreamSetObjectRequest) -> None:
    request.compacted_object_ids.append(max(request.compacted_object_ids) + 1)


def name_no_result(request: CommitStreamSetObjectRequest) -> None:
    request.object_id = -1
    request.object_size = 0
    for field in ("ranges", "stream_objects", "crc32c", "min_timestamp_ms", "max_timestamp_ms"):
        request.ClearField(field)


LIES: dict[str, Lie] = {
    "drop a range": drop_last_row("ranges"),
    "end a range early": shift("ranges.end_offset", 1, -1),
    "end a range late": shift("ranges.end_offset", 2, 1),
    "begin a range late": shift("ranges.start_offset", 1, 1),
    "take another stream": shift("ranges.stream_id", 2, 100),
    "drop a stream object": drop_last_row("stream_objects"),
    "end a stream object early": shift("stream_objects.end_offset", 0, -1),
    "begin an untrimmed stream object late": begin_untrimmed_late,
    "swap streams": swap_streams,
    "double a stream object": double_stream_object,
    "name one source less": lambda request: bool(request.compacted_object_ids.pop()),
    "name a newer source": name_a_newer_source,
    "name no result": name_no_result,
    "name a result that was never prepared": lambda request: setattr(request, "object_id", 10**9),
    "speak for another node": lambda request: setattr(request.node, "node_id", 1001),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
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
    await check.all_gone()
