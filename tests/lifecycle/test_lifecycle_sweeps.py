"""Expired, deleted and dead objects and uploads are removed, a bounded part at a time."""

import asyncio
import random
from collections.abc import Sequence
from typing import Self

import pytest

from streammeta.controller.lifecycle import sweeps
from streammeta.controller.lifecycle.broker_sessions import Sessions, SupervisedNode
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.registries import stream_decisions
from streammeta.controller.metadata.tables import values
from streammeta.storage.errors import AccessDeniedError, StorageError, StoreUnavailableError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.protocol.base import MultipartUpload
from tests.kit.seeds import seeds
from tests.lifecycle.lifecycle_world import NAMESPACE, TIMEOUT_MS, A, B, World, running

PREPARED, EXPIRED = {values.ObjectState.PREPARED}, {values.ObjectState.MARK_DESTROYED}


class Writing:
    """Node A writes three streams, `rows` offsets an object."""

    def __init__(self) -> None:
        self.world = World()
        self.sessions = Sessions(TIMEOUT_MS)
        self.sweep = sweeps.SetObjectSweep(self.world.controller, self.sessions, 1_000)
        self.ends = [0, 0, 0]

    async def start(self) -> Self:
        await self.world.start()
        await self.world.write(requests.RegisterNode(node=B))
        await self.world.open_streams(3)
        return self

    async def commit(self, *stream_ids: int, as_stream_object: bool = False) -> int:
        """Commit one object with ten offsets of each stream; return its id."""
        rows = {stream: (self.ends[stream], self.ends[stream] + 10) for stream in stream_ids}
        object_id, error = await self.world.commit(rows, as_stream_object=as_stream_object)
        assert error == 0
        for stream_id in stream_ids:
            self.ends[stream_id] += 10
        return object_id

    async def trim(self, stream_id: int, start: int) -> None:
        streams = (requests.StreamToTrim(stream_id, 0, start),)
        await self.world.write(requests.TrimStreams(node=A, streams=streams))

    async def close_all(self) -> None:
        streams = tuple(requests.StreamToClose(i, 0) for i in range(3))
        await self.world.write(requests.CloseStreams(node=A, streams=streams))

    async def delete(self, stream_id: int, node: values.NodeIdentity = A) -> None:
        streams = (requests.StreamToDelete(stream_id, 0),)
        await self.world.write(requests.DeleteStreams(node=node, streams=streams))

    def fence(self) -> None:
        """Let A fall silent while B is heard."""
        self.sessions.lead(0)
        for now_ms in range(0, 2 * TIMEOUT_MS, 1_000):
            self.sessions.heartbeat(B.node_id, 1, now_ms)
            self.sessions.tick(now_ms, [SupervisedNode(1001, 1), SupervisedNode(1002, 1)])

    def dead(self, ids: list[int]) -> list[int]:
        marked = values.ObjectState.MARK_DESTROYED
        return [object_id for object_id in ids if self.world.states([object_id]) == {marked}]


@pytest.fixture
async def writing() -> Writing:
    return await Writing().start()


async def test_dead_set_objects_of_a_fenced_node_go_and_live_ones_stay(writing: Writing) -> None:
    ids = [await writing.commit(*streams) for streams in [(0,), (0, 1), (1,), (0, 2), (2,)]]
    await writing.trim(0, 25)
    await writing.trim(1, 20)
    await writing.sweep.step()
    assert writing.dead(ids) == [], "no node is fenced: the node itself may compact them"

    writing.fence()
    await writing.sweep.step()
    assert writing.dead(ids) == ids[:3]

    await writing.close_all()
    await writing.delete(2)
    await writing.sweep.step()
    assert writing.dead(ids) == [*ids[:3], ids[4]], "stream 0 still has [25, 30)"


async def test_set_objects_are_swept_by_the_leader_alone(writing: Writing) -> None:
    ids = [await writing.commit(0)]
    await writing.trim(0, 10)
    writing.fence()
    writing.world.log.lose_leadership(truncate=False)
    await writing.sweep.step()
    assert writing.dead(ids) == []
    writing.world.log.lead()
    await writing.sweep.step()
    assert writing.dead(ids) == ids


async def test_a_departed_node_is_forgotten_with_its_last_set_object(writing: Writing) -> None:
    ids = [await writing.commit(0, 1, 2) for _ in range(3)]
    await writing.close_all()
    await writing.world.write(requests.UnregisterNode(node=A))
    size = writing.world.controller.cluster_metadata.size
    assert size().nodes == 2

    await writing.sweep.step()
    assert (writing.dead(ids), size().nodes) == ([], 2)
    for stream_id in range(3):
        await writing.delete(stream_id, B)
    await writing.sweep.step()

    assert (writing.dead(ids), size().nodes) == (ids, 1)


@pytest.mark.parametrize("seed", seeds(2, slow=6))
async def test_steps_of_any_size_find_the_same(
    writing: Writing, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incremental: whatever the bound of one step, exactly the dead ones go."""
    rng = random.Random(seed)
    monkeypatch.setattr(sweeps, "SET_OBJECT_BATCH_MAX", rng.randrange(1, 9))

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
    await writing.world.write(requests.SetNodeLock(node_id=1001, locked=rng.random() < 0.5))

    await writing.sweep.step()

    wanted = [
        object_id
        for object_id, rows in zip(ids, held, strict=True)
        if all(end <= starts[stream_id] for stream_id, end in rows)
    ]
    assert writing.dead(ids) == wanted, f"seed {seed}"


async def test_objects_of_a_large_deleted_stream_go_in_parts(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_decisions, "DESTROYED_AT_ONCE_MAX", 10)
    monkeypatch.setattr(sweeps, "SWEEP_BATCH_MAX", 7)

    ids = [await writing.commit(0, as_stream_object=True) for _ in range(40)]
    await writing.close_all()
    await writing.delete(0)
    cluster_metadata = writing.world.controller.cluster_metadata
    assert cluster_metadata.has_sweepings()
    assert len(writing.dead(ids)) == 10

    await sweeps.StreamSweep(writing.world.controller, 1_000).step()

    assert not cluster_metadata.has_sweepings()
    assert writing.dead(ids) == ids


class Uploading:
    """A world in which uploads are begun, and the sweep over it."""

    def __init__(self) -> None:
        self.world = World()
        self.undecided: set[int] = set()
        self.may_delete = True
        self.sweep = sweeps.UploadSweep(
            self.world.controller,
            self.world.store,
            NAMESPACE,
            1_000,
            may_delete=lambda: self.may_delete,
            is_undecided=self.undecided.__contains__,
        )

    async def marked(self, count: int) -> list[int]:
        """Return ids that have expired, whose bytes are still to be deleted."""
        ids = await self.world.prepare(count, ttl_ms=1_000)
        self.world.clock.advance(2_000)
        await self.world.write(requests.ExpireObjects(limit=1_000))
        assert self.world.states(ids) == {values.ObjectState.MARK_DESTROYED}
        return ids

    async def removed(self, count: int) -> list[int]:
        ids = await self.marked(count)
        await self.world.write(requests.RemoveObjects(object_ids=tuple(ids)))
        assert self.world.states(ids) == {values.ObjectState.REMOVED}
        return ids

    def begin(self, ids: Sequence[int], namespace: str = NAMESPACE) -> list[MultipartUpload]:
        """Begin an upload for each id, with a part of it."""
        uploads = [self.world.store.start_multipart(key_for(id_, namespace)) for id_ in ids]
        for upload in uploads:
            self.world.store.upload_part(upload, 1, b"part")
        return uploads

    def unfinished(self) -> set[MultipartUpload]:
        return set(self.world.store.list_multipart_uploads())


@pytest.fixture
async def uploading() -> Uploading:
    started = Uploading()
    await started.world.start()
    return started


async def test_only_what_nobody_can_commit_any_more_is_dropped(uploading: Uploading) -> None:
    gone = await uploading.removed(3)
    wanted = uploading.begin(await uploading.world.prepare(2))
    wanted += uploading.begin(await uploading.marked(2))
    next_id = (await uploading.world.prepare(1))[0] + 1
    wanted += uploading.begin([next_id, next_id + 1_000])
    wanted += uploading.begin(gone, namespace="_streammeta_other")
    wanted.append(uploading.world.store.start_multipart("backup/of/somebody"))
    dropped = uploading.begin([*gone, *gone])

    await uploading.sweep.step()

    assert uploading.unfinished() == set(wanted), f"dropped should be {dropped}"


async def test_an_upload_under_an_id_that_a_restore_left_open_stays(uploading: Uploading) -> None:
    one, other = await uploading.removed(2)
    uploading.undecided.add(one)
    (stays,) = uploading.begin([one])
    uploading.begin([other])
    await uploading.sweep.step()
    assert uploading.unfinished() == {stays}


@pytest.mark.parametrize("seed", seeds(2, slow=6))
async def test_steps_of_any_size_drop_the_same(
    uploading: Uploading, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(sweeps, "UPLOAD_BATCH_MAX", rng.randrange(1, 9))

    wanted: set[MultipartUpload] = set()
    for _ in range(rng.randrange(1, 12)):
        make = rng.choice((uploading.world.prepare, uploading.marked, uploading.removed))
        begun = uploading.begin(await make(rng.randrange(1, 5)))
        if make != uploading.removed:
            wanted.update(begun)

    await uploading.sweep.step()

    assert uploading.unfinished() == wanted, f"seed {seed}"


@pytest.mark.parametrize(
    ("refused", "error", "left"),
    [
        ("list_multipart_uploads", AccessDeniedError("not allowed to"), 3),
        ("abort_multipart", StoreUnavailableError("down"), 3),
        ("abort_multipart", AccessDeniedError("not allowed to"), 1),
    ],
)
async def test_what_the_bucket_refuses_is_tried_again(
    uploading: Uploading, refused: str, error: StorageError, left: int
) -> None:
    uploading.begin(await uploading.removed(3))
    uploading.world.store.fail_next(refused, error)

    await uploading.sweep.step()
    assert len(uploading.unfinished()) == left

    await uploading.sweep.step()
    assert not uploading.unfinished()


async def test_an_upload_that_is_refused_for_ever_holds_up_no_other(
    uploading: Uploading, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, *_ = uploading.begin(await uploading.removed(3))
    abort = uploading.world.store.abort_multipart

    def abort_others(upload: MultipartUpload) -> None:
        if upload == locked:
            raise AccessDeniedError("locked")
        abort(upload)

    monkeypatch.setattr(uploading.world.store, "abort_multipart", abort_others)
    for count in (2, 1):
        await uploading.sweep.step()
        assert uploading.unfinished() == {locked}
        uploading.begin(await uploading.removed(count))
    await uploading.sweep.step()
    assert uploading.unfinished() == {locked}


async def test_no_upload_is_dropped_while_the_bucket_may_be_another_s(uploading: Uploading) -> None:
    begun = set(uploading.begin(await uploading.removed(2)))
    uploading.may_delete = False
    await uploading.sweep.step()
    assert uploading.unfinished() == begun
    uploading.may_delete = True
    await uploading.sweep.step()
    assert not uploading.unfinished()


async def test_who_does_not_lead_asks_nothing_of_the_bucket(uploading: Uploading) -> None:
    uploading.begin(await uploading.removed(1))
    uploading.world.log.lose_leadership(truncate=False)
    before = uploading.world.store.metrics()

    await uploading.sweep.step()

    assert uploading.world.store.metrics() == before
    assert len(uploading.unfinished()) == 1


async def test_objects_expire_by_deadline_in_bounded_entries(world: World) -> None:
    late = await world.prepare(10, ttl_ms=60_000)
    early = await world.prepare(2 * sweeps.EXPIRE_BATCH_MAX + 1, ttl_ms=5_000)
    async with running(sweeps.Expiry(world.controller, 5).run()):
        world.clock.advance(5_000)
        await asyncio.sleep(0.03)
        assert world.states(early) == PREPARED, "at the deadline it may still commit"

        end = world.log.next_offset
        world.clock.advance(1)
        await world.until(lambda: world.states(early) == EXPIRED, "expiry")
        await asyncio.sleep(0.03)

        assert world.log.next_offset == end + 3
        assert world.states(late) == PREPARED
        assert world.store.requests == []


async def test_who_does_not_lead_expires_nothing_and_goes_on_when_it_does(world: World) -> None:
    ids = await world.prepare(5, ttl_ms=1_000)
    world.log.lose_leadership(truncate=False)
    async with running(sweeps.Expiry(world.controller, 5).run()):
        world.clock.advance(2_000)
        await asyncio.sleep(0.03)
        assert world.states(ids) == PREPARED
        world.log.lead()
        await world.until(lambda: world.states(ids) == EXPIRED, "expiry")
