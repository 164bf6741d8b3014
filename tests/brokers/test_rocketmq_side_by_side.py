"""Calls of one RocketMQ-shaped broker side by side: none undoes what another has done."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streammeta.brokers.rocketmq.cluster import cluster_store
from streammeta.brokers.rocketmq.cluster.cluster_metadata import ClusterKeeper, MetadataFencedError
from streammeta.brokers.rocketmq.cluster.cluster_store import QueueStore
from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.formats.names import SegmentType
from streammeta.brokers.rocketmq.key_index_service import IndexSizes, IndexStatus
from streammeta.client import KeyValues, OpenedStream, Outcomes
from streammeta.client.controllers.methods import DELETE_KVS, PUT_KVS
from streammeta.client.errors import StreamFencedError
from streammeta.v1 import kv_pb2
from tests.conformance.rocketmq_files import NOW_MS, open_index
from tests.kit.memory_keys import MemoryControllers
from tests.kit.memory_stores import MemorySegmentStore, MemoryShelf
from tests.kit.seeds import seeds

_PLACE = ("path", SegmentType.COMMIT_LOG, 0)


@dataclass(slots=True)
class SlowShelf(MemoryShelf):
    """A shelf whose calls let others run."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    async def save(self, begin_ms: int, data: bytes) -> None:
        await self.pause()
        await MemoryShelf.save(self, begin_ms, data)

    async def remove(self, begin_ms: int) -> None:
        await self.pause()
        await MemoryShelf.remove(self, begin_ms)

    async def note_uploaded(self, begin_ms: int) -> None:
        await self.pause()
        await MemoryShelf.note_uploaded(self, begin_ms)
        await self.pause()


@pytest.mark.parametrize("seed", seeds(6, slow=14))
async def test_an_index_file_is_uploaded_once_and_is_local_no_more(seed: int) -> None:
    """Two checkpoints and an expiry at once: each file is in one place, or expired."""
    rng = random.Random(seed)
    shelf, store = SlowShelf(rng=rng), MemorySegmentStore()
    index = await open_index(store, shelf, IndexSizes(slots=4, max_items=3))
    for at in range(12):
        index.put("topic", 1, 0, [f"k{at}"], at, 10, NOW_MS)

    async def checkpoint() -> None:
        await index.flush()
        while await index.compact_oldest():
            pass

    jobs = [checkpoint(), checkpoint(), index.flush(), index.expire(NOW_MS - 1)]
    rng.shuffle(jobs)
    await asyncio.gather(*jobs)

    uploaded = [
        begin
        for begin, status in zip(index.begins_ms, index.statuses, strict=True)
        if status is IndexStatus.UPLOAD
    ]
    assert sorted(shelf.done) == uploaded
    assert uploaded == index.begins_ms[:-1]
    assert not set(shelf.local) & set(uploaded)


async def test_two_first_looks_at_a_queue_find_the_same_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dispatcher appends to one of them, and reads ask the other."""

    class SlowFile:
        def __init__(self, _place: Any, queue: Any, _sizes: Any) -> None:
            self.queue = queue

        async def open(self) -> None:
            await asyncio.sleep(0)

    monkeypatch.setattr(cluster_store, "MessageFile", SlowFile)
    store: Any = SimpleNamespace(
        broker="b",
        files={},
        keeper=SimpleNamespace(table=SimpleNamespace(add_topic=lambda *_, **__: None)),
        config=SimpleNamespace(files=None),
        _place=None,
        _own_time_ms=lambda: NOW_MS,
    )
    found = await asyncio.gather(*(QueueStore.file(store, "orders", 0) for _ in range(3)))
    assert len({id(file) for file in found}) == 1
    assert list(store.files.values()) == found[:1]


class LosingControllers(MemoryControllers):
    """Controllers of which the next puts take effect, and their answers are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    async def call(self, method: Any, request: Any) -> Any:
        answer = await super().call(method, request)
        if self.lost and isinstance(request, kv_pb2.PutKVsRequest):
            self.lost -= 1
            raise ConnectionError("the answer was lost")
        return answer


def _keeper(controllers: MemoryControllers, epoch: int) -> ClusterKeeper:
    node = SimpleNamespace(node_id=7, node_epoch=epoch)
    kv = KeyValues(cast(Any, controllers))
    client: Any = SimpleNamespace(
        controllers=controllers, kv=kv, session=SimpleNamespace(node=node)
    )
    return ClusterKeeper(client, "cluster", "broker")


async def test_a_put_whose_answer_was_lost_is_no_other_process() -> None:
    controllers = LosingControllers()
    keeper = _keeper(controllers, 1)
    await keeper.save()
    for topic in ("orders", "bills"):
        keeper.table.add_topic(topic, now_ms=NOW_MS)
        keeper.table.noted_ms += 1
        controllers.lost = 1
        with pytest.raises(ConnectionError):
            await keeper.save()
        keeper.table.noted_ms += 1
        await keeper.prove_owner()
        await keeper.save()
    keeper.require_owner()
    assert {"broker/topic/orders", "broker/topic/bills"} <= controllers.names()


async def test_a_lost_answer_hides_no_process_that_has_taken_over() -> None:
    controllers = LosingControllers()
    former, present = _keeper(controllers, 1), _keeper(controllers, 2)
    await former.save()
    former.table.add_topic("orders", now_ms=NOW_MS)
    controllers.lost = 1
    with pytest.raises(ConnectionError):
        await former.save()
    await present._load()
    await present.prove_owner()
    before = dict(controllers.stored)
    former.table.add_topic("bills", now_ms=NOW_MS)
    for _ in range(2):
        with pytest.raises(MetadataFencedError):
            await former.save()
    assert controllers.stored == before


async def test_a_put_that_takes_effect_late_is_no_other_process() -> None:
    controllers = MemoryControllers()
    keeper = _keeper(controllers, 1)
    await keeper.save()
    keeper.table.add_topic("orders", now_ms=NOW_MS)
    for _ in range(2):
        keeper.table.noted_ms += 1
        late = await _interrupted_put(controllers, keeper)
        keeper.table.noted_ms += 1
        controllers.before[PUT_KVS.name] = lambda late=late: controllers.apply(late)  # type: ignore[misc]
        await keeper.prove_owner()
        await keeper.save()
    stored, _ = controllers.stored["_rocketmq_cluster", "broker/time"]
    assert json.loads(stored) == {"ms": keeper.table.noted_ms, "owner": 1}


async def test_a_late_put_hides_no_process_that_has_taken_over() -> None:
    controllers = MemoryControllers()
    former, present = _keeper(controllers, 1), _keeper(controllers, 2)
    await former.save()
    former.table.noted_ms += 1
    await _interrupted_put(controllers, former)
    await former._settle()
    await present._load()
    await present.prove_owner()
    before = dict(controllers.stored)
    for _ in range(2):
        with pytest.raises(MetadataFencedError):
            await former.prove_owner()
    assert controllers.stored == before


async def test_a_put_that_takes_effect_late_is_deleted_with_its_key() -> None:
    controllers = MemoryControllers()
    keeper = _keeper(controllers, 1)
    keeper.indexed[Queue("broker", "orders", 0)] = 1
    await keeper.save()
    keeper.indexed[Queue("broker", "orders", 0)] = 2
    late = await _interrupted_put(controllers, keeper)
    keeper.indexed.clear()
    controllers.before[DELETE_KVS.name] = lambda: controllers.apply(late)
    await keeper.save()
    assert not any("indexed" in name for name in controllers.names())


async def _interrupted_put(controllers: MemoryControllers, keeper: ClusterKeeper) -> Any:
    """Interrupt a save at its first put, and settle; return the put, which did not arrive yet."""

    def interrupt() -> None:
        raise ConnectionError("the connection ended")

    asked: list[Any] = []
    call = controllers.call

    async def note(method: Any, request: Any) -> Any:
        if method is PUT_KVS:
            asked.append(request)
        return await call(method, request)

    controllers.before[PUT_KVS.name] = interrupt
    controllers.call = note  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await keeper.save()
    controllers.call = call  # type: ignore[method-assign]
    return asked[0]


class LosingStreams:
    """One stream of a node; the answer to its first call of the kind `lost` is lost."""

    def __init__(self, lost: str, *, applied: bool) -> None:
        self.epoch: int | None = 0
        self._lost = lost
        self._applied = applied

    async def describe_streams(self, stream_ids: Sequence[int]) -> AsyncIterator[Any]:
        """Describe the stream if it exists."""
        if self.epoch is not None:
            yield SimpleNamespace(stream_id=5, epoch=self.epoch)

    async def close_streams(self, epochs: Mapping[int, int]) -> Outcomes[None]:
        """Close the stream."""
        return self._change("close", epochs, self.epoch)

    async def open_streams(self, epochs: Mapping[int, int]) -> Outcomes[OpenedStream]:
        """Open the stream."""
        found = self._change("open", epochs, epochs[5])
        return Outcomes(done={5: OpenedStream(5, epochs[5], 0, 9)}) if found.done else found

    async def delete_streams(self, epochs: Mapping[int, int]) -> Outcomes[None]:
        """Delete the stream."""
        return self._change("delete", epochs, None)

    def _change(self, kind: str, epochs: Mapping[int, int], epoch: int | None) -> Outcomes[Any]:
        if epochs and (self.epoch is None or epochs[5] < self.epoch):
            return Outcomes(failed={5: StreamFencedError("the epoch is another one")})
        is_lost = self._lost == kind
        if self._applied or not is_lost:
            self.epoch = epoch
        if is_lost:
            self._lost = ""
            raise ConnectionError("the answer was lost")
        return Outcomes(done=dict.fromkeys(epochs))


def _streams_of(streams: LosingStreams) -> ClusterKeeper:
    client: Any = SimpleNamespace(controllers=streams, session=streams)
    keeper = ClusterKeeper(client, "cluster", "broker")
    keeper.streams[_PLACE] = OpenedStream(5, 0, 0, 0)
    return keeper


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("lost", ["close", "open"])
async def test_a_stream_is_reopened_after_a_lost_answer(lost: str, applied: bool) -> None:
    streams = LosingStreams(lost, applied=applied)
    keeper = _streams_of(streams)
    with pytest.raises(ConnectionError):
        await keeper.reopen_stream(_PLACE)
    opened = await keeper.reopen_stream(_PLACE)
    assert opened.epoch == streams.epoch == keeper.streams[_PLACE].epoch
    assert opened.next_offset == 9


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("lost", ["close", "open", "delete"])
async def test_a_stream_is_deleted_after_a_lost_answer(lost: str, applied: bool) -> None:
    streams = LosingStreams(lost, applied=applied)
    keeper = _streams_of(streams)
    interrupted = keeper.delete_stream if lost == "delete" else keeper.reopen_stream
    with pytest.raises(ConnectionError):
        await interrupted(_PLACE)
    await keeper.delete_stream(_PLACE)
    assert streams.epoch is None
    assert _PLACE not in keeper.streams
