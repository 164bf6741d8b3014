"""What is dead is cleared up for those who can't any more, a bounded part at a time."""

import random

import pytest

from streammeta.controller.lifecycle import sweeps
from streammeta.controller.lifecycle.sessions import Sessions, SupervisedNode
from streammeta.controller.lifecycle.sweeps import SetObjectSweep, StreamSweep
from streammeta.controller.metadata import stream_decisions
from streammeta.controller.metadata.requests import (
    CloseStreams,
    CommitStreamSetObject,
    CreateStreams,
    DeleteStreams,
    NewStream,
    OpenStreams,
    PrepareObjects,
    RegisterNode,
    SetNodeLock,
    StreamToClose,
    StreamToDelete,
    StreamToOpen,
    StreamToTrim,
    TrimStreams,
    UnregisterNode,
)
from streammeta.controller.metadata.values import (
    NodeIdentity,
    ObjectState,
    RangeColumns,
    StreamObjectColumns,
    column,
)
from tests.lifecycle.lifecycle_world import World

A, B = NodeIdentity(1001, 1), NodeIdentity(1002, 1)
TIMEOUT_MS = 9_000


class Writing:
    """Node A writes three streams, `rows` offsets an object."""

    def __init__(self) -> None:
        self.world = World()
        self.sessions = Sessions(TIMEOUT_MS)
        self.sweep = SetObjectSweep(self.world.controller, self.sessions, 1_000)
        self.ends = [0, 0, 0]

    async def start(self) -> None:
        await self.world.start()
        await self.world.write(RegisterNode(node=B))
        create = CreateStreams(request_id="a", node=A, streams=(NewStream(),) * 3)
        await self.world.write(create)
        streams = tuple(StreamToOpen(i, 0) for i in range(3))
        await self.world.write(OpenStreams(node=A, streams=streams))

    async def commit(self, *stream_ids: int) -> int:
        """Commit one set object with ten offsets of each stream; return its id."""
        prepare = PrepareObjects(request_id=f"{self.ends}", node=A, count=1, ttl_ms=60_000)
        object_id: int = (await self.world.write(prepare)).first_object_id
        starts = [self.ends[i] for i in stream_ids]
        request = CommitStreamSetObject(
            node=A,
            object_id=object_id,
            order_id=object_id,
            object_size=10,
            ranges=RangeColumns(
                stream_id=column(stream_ids),
                start_offset=column(starts),
                end_offset=column([start + 10 for start in starts]),
            ),
        )
        assert (await self.world.write(request)).error == 0
        for stream_id in stream_ids:
            self.ends[stream_id] += 10
        return object_id

    async def commit_stream_object(self, stream_id: int) -> int:
        """Commit one stream object with ten offsets; return its id."""
        start = self.ends[stream_id]
        prepare = PrepareObjects(request_id=f"{self.ends}", node=A, count=1, ttl_ms=60_000)
        object_id: int = (await self.world.write(prepare)).first_object_id
        rows = StreamObjectColumns(
            object_id=column([object_id]),
            object_size=column([10]),
            stream_id=column([stream_id]),
            start_offset=column([start]),
            end_offset=column([start + 10]),
        )
        request = CommitStreamSetObject(
            node=A, object_id=-1, order_id=-1, object_size=0, stream_objects=rows
        )
        assert (await self.world.write(request)).error == 0
        self.ends[stream_id] += 10
        return object_id

    async def trim(self, stream_id: int, start: int) -> None:
        await self.world.write(TrimStreams(node=A, streams=(StreamToTrim(stream_id, 0, start),)))

    async def close_all(self) -> None:
        streams = tuple(StreamToClose(i, 0) for i in range(3))
        await self.world.write(CloseStreams(node=A, streams=streams))

    async def delete(self, stream_id: int) -> None:
        await self.world.write(DeleteStreams(node=A, streams=(StreamToDelete(stream_id, 0),)))

    def fence(self) -> None:
        """Let A fall silent while B is heard."""
        self.sessions.lead(0)
        for now_ms in range(0, 2 * TIMEOUT_MS, 1_000):
            self.sessions.heartbeat(B.node_id, 1, now_ms)
            self.sessions.tick(now_ms, [SupervisedNode(1001, 1), SupervisedNode(1002, 1)])

    def dead(self, ids: list[int]) -> list[int]:
        marked = ObjectState.MARK_DESTROYED
        return [one for one in ids if self.world.states([one]) == {marked}]


async def test_dead_set_objects_of_a_fenced_node_are_destroyed_and_live_ones_kept() -> None:

    writing = Writing()
    await writing.start()
    ids = [await writing.commit(*streams) for streams in [(0,), (0, 1), (1,), (0, 2), (2,)]]
    await writing.trim(0, 25)
    await writing.trim(1, 20)
    await writing.sweep.step()
    assert writing.dead(ids) == [], "nobody is fenced: the node itself may compact them"

    writing.fence()
    await writing.sweep.step()
    assert writing.dead(ids) == ids[:3]

    await writing.close_all()
    await writing.delete(2)
    await writing.sweep.step()
    assert writing.dead(ids) == [*ids[:3], ids[4]], "stream 0 still has [25, 30)"


async def test_a_departed_node_is_forgotten_with_its_last_set_object() -> None:

    writing = Writing()
    await writing.start()
    ids = [await writing.commit(0, 1, 2) for _ in range(3)]
    await writing.close_all()
    await writing.world.write(UnregisterNode(node=A))
    size = writing.world.controller.cluster_map.size
    assert size().nodes == 2

    await writing.sweep.step()
    assert (writing.dead(ids), size().nodes) == ([], 2)
    for stream_id in range(3):
        delete = DeleteStreams(node=B, streams=(StreamToDelete(stream_id, 0),))
        await writing.world.write(delete)
    await writing.sweep.step()

    assert (writing.dead(ids), size().nodes) == (ids, 1)


@pytest.mark.parametrize("seed", range(8))
async def test_steps_of_any_size_find_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incremental: whatever the bound of one step, exactly the dead ones go."""
    rng = random.Random(seed)
    monkeypatch.setattr(sweeps, "SET_OBJECT_BATCH_MAX", rng.randrange(1, 9))

    writing = Writing()
    await writing.start()
    held: list[list[tuple[int, int]]] = []
    ids = []
    for _ in range(rng.randrange(1, 40)):
        streams = sorted(rng.sample(range(3), rng.randrange(1, 4)))
        ids.append(await writing.commit(*streams))
        held.append([(stream_id, writing.ends[stream_id]) for stream_id in streams])
    starts = [rng.randrange(end + 1) for end in writing.ends]
    for stream_id, start in enumerate(starts):
        await writing.trim(stream_id, start)
    writing.fence()
    await writing.world.write(SetNodeLock(node_id=1001, locked=rng.random() < 0.5))

    await writing.sweep.step()

    wanted = [
        object_id
        for object_id, rows in zip(ids, held, strict=True)
        if all(end <= starts[stream_id] for stream_id, end in rows)
    ]
    assert writing.dead(ids) == wanted, f"seed {seed}"


async def test_objects_of_a_large_deleted_stream_go_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_decisions, "DESTROYED_AT_ONCE_MAX", 10)
    monkeypatch.setattr(sweeps, "SWEEP_BATCH_MAX", 7)

    writing = Writing()
    await writing.start()
    ids = [await writing.commit_stream_object(0) for _ in range(40)]
    await writing.close_all()
    await writing.delete(0)
    cluster_map = writing.world.controller.cluster_map
    assert cluster_map.has_sweepings()
    assert len(writing.dead(ids)) == 10

    await StreamSweep(writing.world.controller, 1_000).step()

    assert not cluster_map.has_sweepings()
    assert writing.dead(ids) == ids
