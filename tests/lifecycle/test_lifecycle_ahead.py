"""Uncommitted objects ahead of the map keep their bytes; all others are deleted as before."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from streammeta.controller.lifecycle import deletion as deletion_module
from streammeta.controller.lifecycle.deletion import Deletion
from streammeta.controller.lifecycle.deletion_order import RETRY_PAUSES_MS
from streammeta.controller.lifecycle.uncommitted import READERS
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.decisions.named_objects import NAMED_LEVEL
from streammeta.controller.metadata.tables.values import ObjectState
from streammeta.storage import errors
from streammeta.storage.adoption import last_entries
from streammeta.storage.object_format.composite import LinkedObject, encode_composite
from streammeta.storage.object_format.index_block import FOOTER_SIZE, IndexEntry
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.built_objects import ObjectBuilder, built_object
from tests.lifecycle.lifecycle_world import BROKER, NAMESPACE, World
from tests.lifecycle.test_lifecycle_deletion import deleting, new_deletion

MARKED = {ObjectState.MARK_DESTROYED}
LOOK_MS = int(RETRY_PAUSES_MS.longest)


def key_of(object_id: int) -> str:
    return key_for(object_id, NAMESPACE)


def stream_data(*ranges: tuple[int, int, int]) -> bytes:
    """Return an object with one record of each (stream, start, end)."""
    builder = ObjectBuilder()
    for stream_id, start, end in ranges:
        builder.write([RecordBatch(stream_id, 0, start, end - start, b"payload")])
    return builder.finish().data


async def expired(world: World, *bodies: bytes | None) -> list[int]:
    """Let ids expire whose objects have these bytes; None: the bucket has no such object."""
    ids = await world.prepare(len(bodies), ttl_ms=1_000)
    for object_id, body in zip(ids, bodies, strict=True):
        if body is not None:
            world.store.put(key_of(object_id), body)
    world.clock.advance(2_000)
    await world.write(requests.ExpireObjects(limit=len(ids)))
    return ids


async def once_committed(world: World, count: int) -> list[int]:
    """Commit named objects and destroy them."""
    await world.write(requests.SetFeatureLevel(level=NAMED_LEVEL))
    ids = await world.prepare(count)
    (owner,) = await world.open_streams(1)
    named = []
    for object_id in ids:
        world.store.put(key_of(object_id), b"named")
        named.append(
            requests.NamedObjectToCommit(
                object_id=object_id,
                name=f"n{object_id}",
                object_size=5,
                owner_stream_id=owner,
            )
        )
    await world.write(requests.CommitNamedObjects(node=BROKER, objects=tuple(named)))
    names = tuple(requests.NamedObjectToDelete(name=object_.name) for object_ in named)
    await world.write(requests.DeleteNamedObjects(node=BROKER, objects=names))
    return ids


async def is_seen_ahead(world: World, deletion: Deletion, count: int = 1) -> None:
    await world.until(lambda: deletion.describe().ahead == count, "it to be ahead", tick_ms=100)


async def stays(world: World, ids: Sequence[int], spans_ms: int = 4 * LOOK_MS) -> None:
    """Let time pass in which objects are looked at several times: they must stay."""
    before = {key_of(object_id): world.store.objects()[key_of(object_id)] for object_id in ids}
    for _ in range(40):
        world.clock.advance(spans_ms // 40)
        await asyncio.sleep(0.005)
    assert world.states(ids) == MARKED
    assert before.items() <= world.store.objects().items()


async def test_an_object_ahead_of_the_map_stays_until_its_stream_has_passed_it(
    world: World,
) -> None:
    (stream,) = await world.open_streams(1)
    await world.commit({stream: (0, 5)})
    (ahead,) = await expired(world, stream_data((stream, 5, 10)))
    with capture_logs() as logs:
        async with deleting(new_deletion(world)) as deletion:
            await is_seen_ahead(world, deletion)
            await stays(world, [ahead])
            status = deletion.describe()
            await world.commit({stream: (5, 9)})
            await stays(world, [ahead])
            await world.commit({stream: (9, 10)})
            await world.removal([ahead], tick_ms=LOOK_MS // 10)
            assert (deletion.describe().ahead, deletion.describe().ahead_sample) == (0, ())
    assert world.store.objects() == {}

    assert (status.ahead, status.stuck, status.refused) == (1, 0, 0)
    ((key, reason),) = status.ahead_sample
    assert key == key_of(ahead)
    assert f"offsets 5 to 10 of stream {stream} are above" in reason
    events = [line for line in logs if line["event"] == "objects_ahead_of_map"]
    assert events == [
        {
            "component": "lifecycle",
            "event": "objects_ahead_of_map",
            "log_level": "warning",
            "count": 1,
            "object_id": ahead,
            "stream_id": stream,
            "start_offset": 5,
            "end_offset": 10,
            "stream_end": 5,
        }
    ], "logged once, not at each look"


async def test_a_relative_object_is_ahead_if_it_has_more_offsets_than_its_stream(
    world: World,
) -> None:
    """Its offsets were never assigned, so nothing else is certain."""
    (stream,) = await world.open_streams(1)
    await world.commit({stream: (0, 5)})
    records = [RecordBatch(stream, 0, 0, 6, b""), RecordBatch(stream, 0, 6, 1, b"")]
    bodies = [built_object([some], relative=True).data for some in (records[:1], records)]
    deleted = built_object([[RecordBatch(stream, 0, 0, 5, b"")]], relative=True).data
    *ahead, gone = await expired(world, *bodies, deleted)
    async with deleting(new_deletion(world)) as deletion:
        await is_seen_ahead(world, deletion, 2)
        await world.removal([gone], tick_ms=LOOK_MS // 10)
        await stays(world, ahead)
        await world.commit({stream: (5, 6)})
        await world.removal(ahead[:1], tick_ms=LOOK_MS // 10)
        await stays(world, ahead[1:])


async def test_any_stream_that_is_not_passed_keeps_an_object(world: World) -> None:
    first, second, third = await world.open_streams(3)
    ranges = [(first, 0, 5), (second, 0, 5), (second, 5, 10), (third, 0, 5)]
    ids = await expired(world, stream_data(*ranges))
    async with deleting(new_deletion(world)) as deletion:
        await is_seen_ahead(world, deletion)
        await world.commit({first: (0, 5), second: (0, 5), third: (0, 5)})
        await stays(world, ids)
        await world.commit({second: (5, 10)})
        await world.removal(ids, tick_ms=LOOK_MS // 10)


async def test_a_deleted_stream_and_one_trimmed_beyond_keep_no_object(world: World) -> None:
    deleted, trimmed = await world.open_streams(2)
    ids = await expired(world, stream_data((deleted, 0, 5)), stream_data((trimmed, 0, 10)))
    async with deleting(new_deletion(world)) as deletion:
        await is_seen_ahead(world, deletion, 2)
        trim = requests.StreamToTrim(trimmed, 0, 10, appended_end_offset=10)
        await world.write(requests.TrimStreams(node=BROKER, streams=(trim,)))
        close = requests.StreamToClose(deleted, 0)
        await world.write(requests.CloseStreams(node=BROKER, streams=(close,)))
        gone = requests.StreamToDelete(deleted, 0)
        await world.write(requests.DeleteStreams(node=BROKER, streams=(gone,)))
        await world.removal(ids, tick_ms=LOOK_MS // 10)


async def test_a_stream_created_after_the_copy_keeps_its_objects(world: World) -> None:
    ids = await expired(world, stream_data((0, 0, 5)))
    async with deleting(new_deletion(world)) as deletion:
        await is_seen_ahead(world, deletion)
        assert await world.open_streams(1) == [0]
        await stays(world, ids)
        await world.commit({0: (0, 5)})
        await world.removal(ids, tick_ms=LOOK_MS // 10)


async def test_composites_and_long_indexes_are_looked_at_as_well(world: World) -> None:
    (stream,) = await world.open_streams(1)
    link = LinkedObject(7, 0, (IndexEntry(stream, 0, 10, 1, 0, 53),))
    (composite,) = await expired(world, encode_composite([link]))
    (large,) = await expired(world, stream_data(*((stream, n, n + 1) for n in range(400))))
    async with deleting(new_deletion(world)) as deletion:
        await is_seen_ahead(world, deletion, 2)
        await stays(world, [composite, large])
        await world.commit({stream: (0, 10)})
        await world.removal([composite], tick_ms=LOOK_MS // 10)
        await stays(world, [large])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("head", errors.AccessDeniedError("GetObject")),
        ("get_range", errors.AccessDeniedError("GetObject")),
        ("head", errors.StoreUnavailableError("timeout")),
        ("get_range", errors.StoreUnavailableError("busy", throttled=True)),
        ("get_range", errors.BucketNotFoundError("bucket")),
    ],
    ids=["head-denied", "read-denied", "unavailable", "throttled", "no-bucket"],
)
async def test_a_failed_look_is_not_a_good_look(
    world: World, call: str, error: errors.StorageError
) -> None:
    (stream,) = await world.open_streams(1)
    ids = await expired(world, stream_data((stream, 0, 10)))
    world.store.fail_next(call, error, times=5)
    async with deleting(new_deletion(world)) as deletion:
        for _ in range(40):
            world.clock.advance(LOOK_MS // 4)
            await asyncio.sleep(0.005)
            assert world.states(ids) == MARKED
            assert key_of(ids[0]) in world.store.objects()
        await world.until(lambda: deletion.describe().ahead == 1, "a look", tick_ms=LOOK_MS // 4)
    assert world.store.requests == []


async def test_a_part_of_the_bytes_is_not_a_good_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = await world.open_streams(1)
    await expired(world, stream_data((stream, 0, 10)))
    whole = world.store.get_range

    def get_part(key: str, start: int = 0, end: int | None = None) -> bytes:
        return whole(key, start, end)[:-10]

    monkeypatch.setattr(world.store, "get_range", get_part)
    async with deleting(new_deletion(world)) as deletion:
        await world.until(lambda: deletion.describe().stuck == 1, "it to be stuck", tick_ms=LOOK_MS)
        assert "bytes" in deletion.describe().sample[0][1]
        assert world.store.requests == []
        monkeypatch.undo()
        await world.until(lambda: deletion.describe().ahead == 1, "a look", tick_ms=LOOK_MS // 4)
        assert deletion.describe().refused == 0


async def test_an_object_that_is_ahead_stays_so_while_the_bucket_fails(world: World) -> None:
    (stream,) = await world.open_streams(1)
    ids = await expired(world, stream_data((stream, 0, 10)))
    async with deleting(new_deletion(world)) as deletion:
        await is_seen_ahead(world, deletion)
        world.store.fail_next("head", errors.StoreUnavailableError("down"), times=3)
        await stays(world, ids)
        status = deletion.describe()
        assert (status.ahead, status.refused, status.stuck) == (1, 0, 0)
        world.store.delete_many([key_of(ids[0])])  # by an operator
        await world.removal(ids, tick_ms=LOOK_MS // 10)
        assert deletion.describe().ahead == 0


async def test_bytes_that_are_no_object_are_deleted_and_a_damaged_object_is_not(
    world: World,
) -> None:
    (stream,) = await world.open_streams(1)
    data = stream_data((stream, 0, 10))
    place = len(data) - FOOTER_SIZE - 8
    damaged = data[:place] + b"\xff" * 8 + data[place + 8 :]
    bodies = (b"", b"x", data[: len(data) // 2], data[:-1], b"named object " * 1_000, None)
    ids = await expired(world, *bodies)
    (kept,) = await expired(world, damaged)
    async with deleting(new_deletion(world)) as deletion:
        await world.removal(ids, tick_ms=100)
        await world.until(lambda: deletion.describe().stuck == 1, "it to be stuck", tick_ms=LOOK_MS)
        assert "index" in deletion.describe().sample[0][1]
    assert list(world.store.objects()) == [key_of(kept)]


async def test_an_index_beyond_the_bound_is_not_read_and_its_object_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_entries, "INDEX_BYTES_MAX", 12_000)
    (stream,) = await world.open_streams(1)
    builder = ObjectBuilder(64)
    builder.write([RecordBatch(stream, 0, offset, 1, bytes(64)) for offset in range(400)])
    (kept,) = await expired(world, builder.finish().data)
    async with deleting(new_deletion(world)) as deletion:
        await world.until(lambda: deletion.describe().refused == 1, "a refusal", tick_ms=100)
        assert "at most 12000 bytes" in str(deletion._retries.some(1))
    assert world.states([kept]) == MARKED


async def test_committed_objects_are_deleted_unseen_while_looks_at_others_hang(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion_module, "DELETE_BATCH_MAX", 50)
    unused = await expired(world, *[None] * 500)
    committed = await once_committed(world, 200)
    looked: list[str] = []
    go_on, head, most, now = threading.Event(), world.store.head, 0, 0

    def wait(key: str) -> object:
        nonlocal most, now
        looked.append(key)
        now += 1
        most = max(most, now)
        go_on.wait(60)
        now -= 1
        return head(key)

    monkeypatch.setattr(world.store, "head", wait)
    async with deleting(new_deletion(world)):
        await world.removal(committed)
        assert not {key_of(object_id) for object_id in committed}.intersection(looked)
        assert len(looked) <= READERS
        go_on.set()
        await world.removal(unused, tick_ms=20)
    assert most <= READERS
    assert sorted(looked) == sorted(map(key_of, unused)), "one look at each"


async def test_unused_ids_cost_one_request_each_and_hold_up_nothing(world: World) -> None:
    unused = await expired(world, *[None] * 10_000)
    committed = await once_committed(world, 100)
    heads, reads = (world.store.metrics().of(call).calls for call in ("head", "get_range"))
    async with deleting(new_deletion(world)):
        await world.removal(committed, tick_ms=50)
        await world.removal(unused, tick_ms=50)
    metrics = world.store.metrics()
    assert metrics.of("head").calls - heads == len(unused)
    assert metrics.of("get_range").calls == reads


@pytest.mark.parametrize("loss", ["leadership", "bucket"])
async def test_what_is_lost_during_a_look_ends_the_deletion(
    world: World, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    ids = await expired(world, b"half an upload")
    go_on, looking, head = threading.Event(), threading.Event(), world.store.head

    def wait(key: str) -> object:
        looking.set()
        go_on.wait(60)
        return head(key)

    monkeypatch.setattr(world.store, "head", wait)
    may_delete = True
    async with deleting(new_deletion(world, may_delete=lambda: may_delete)) as deletion:
        await world.until(looking.is_set, "a look", tick_ms=100)
        if loss == "leadership":
            world.log.lose_leadership(truncate=False)
            world.log.lead()  # and is back before the look has ended
        else:
            may_delete = False
        go_on.set()
        await world.until(lambda: deletion.describe().in_flight == 0, "the end of the look")
        assert world.store.requests == []
        may_delete = True
        await world.removal(ids, tick_ms=100)
