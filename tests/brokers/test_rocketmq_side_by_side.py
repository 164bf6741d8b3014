"""Calls of one RocketMQ-shaped broker side by side: none undoes what another has done."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.brokers.rocketmq import cluster_store
from streammeta.brokers.rocketmq.cluster_store import QueueStore
from streammeta.brokers.rocketmq.key_index_service import (
    IndexSizes,
    IndexStatus,
    KeyIndexService,
    MemoryShelf,
)
from streammeta.brokers.rocketmq.storage import MemorySegmentStore

NOW_MS = 1_700_000_000_000


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


@pytest.mark.parametrize("seed", range(20))
async def test_an_index_file_is_uploaded_once_and_is_local_no_more(seed: int) -> None:
    """Two checkpoints and an expiry at once: each file is in one place, or expired."""
    rng = random.Random(seed)
    shelf, store = SlowShelf(rng=rng), MemorySegmentStore()
    index = await KeyIndexService.open(
        "broker/index", store, shelf, lambda: NOW_MS, IndexSizes(slots=4, max_items=3)
    )
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
