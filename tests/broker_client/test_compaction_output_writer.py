"""An output is the same object however its bytes come, in one request or in parts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import google_crc32c
import pytest

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.output_writer import OutputWriter
from streammeta.client.compaction.report import Figures
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage.errors import AccessDeniedError, StoreUnavailableError
from streammeta.storage.object_store.base import MIN_PART_SIZE, MultipartUpload, Tags
from tests.kit.memory_store import MemoryObjectStore

CONFIG = CompactionConfig(store_patience_s=0.0, part_bytes=MIN_PART_SIZE, put_bytes=MIN_PART_SIZE)
KEY = "key"


@asynccontextmanager
async def writing(store: MemoryObjectStore, figures: Figures) -> AsyncIterator[OutputWriter]:
    calls = StoreCalls(store, CONFIG)
    try:
        yield OutputWriter(calls, KEY, 7, CONFIG, figures)
    finally:
        calls.close()


@pytest.mark.parametrize("seed", range(6))
async def test_pieces_of_any_size_make_one_object_of_equal_parts(seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.choice([0, 1, 3 * MIN_PART_SIZE, 3 * MIN_PART_SIZE + 77]) + 1)
    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randint(0, 5)))
    store, figures = MemoryObjectStore(), Figures()
    async with writing(store, figures) as writer:
        for start, end in zip([0, *cuts], cuts, strict=False):
            await writer.write(memoryview(writer.carried + data[start:end]))
            assert len(writer.carried) < MIN_PART_SIZE
        last = data[cuts[-1] :] if cuts else data
        written = await writer.finish(memoryview(writer.carried + last))
    assert store.objects() == {KEY: data}, f"seed {seed}"
    assert (written.object_id, written.size) == (7, len(data))
    assert written.crc32c == google_crc32c.value(data)
    assert figures.bytes_written == len(data)
    parts = -(-len(data) // MIN_PART_SIZE)
    assert (figures.puts, figures.multiparts, figures.parts) in [(1, 0, 0), (0, 1, parts)]


@pytest.mark.parametrize("size", [MIN_PART_SIZE, MIN_PART_SIZE + 1])
async def test_only_what_is_larger_than_one_request_goes_in_parts(size: int) -> None:
    store, figures = MemoryObjectStore(), Figures()
    async with writing(store, figures) as writer:
        await writer.finish(memoryview(bytes(size)))
    assert figures.multiparts == (size > MIN_PART_SIZE)
    assert not list(store.list_multipart_uploads())


@pytest.mark.parametrize("fails", ["upload_part", "complete_multipart"])
async def test_what_is_not_finished_is_dropped(fails: str) -> None:
    store, figures = MemoryObjectStore(), Figures()
    store.fail_next(fails, AccessDeniedError("no"))
    async with writing(store, figures) as writer:
        with pytest.raises(AccessDeniedError):
            await writer.finish(memoryview(bytes(3 * MIN_PART_SIZE)))
        assert len(list(store.list_multipart_uploads())) == 1
        await writer.abort()
        await writer.abort()
    assert not list(store.list_multipart_uploads())
    assert not store.objects()


async def test_an_upload_whose_start_was_not_answered_is_dropped_too() -> None:
    class Forgetful(MemoryObjectStore):
        def start_multipart(self, key: str, *, tags: Tags | None = None) -> MultipartUpload:
            super().start_multipart(key, tags=tags)
            raise StoreUnavailableError("the answer is lost")

    store = Forgetful()
    other = MemoryObjectStore.start_multipart(store, KEY + "/longer")
    async with writing(store, Figures()) as writer:
        with pytest.raises(StoreUnavailableError):
            await writer.finish(memoryview(bytes(3 * MIN_PART_SIZE)))
        await writer.abort()
    assert list(store.list_multipart_uploads()) == [other], "only its own"


async def test_an_upload_that_can_not_be_dropped_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, figures = MemoryObjectStore(), Figures()
    store.fail_next("abort_multipart", AccessDeniedError("not that either"))
    async with writing(store, figures) as writer:
        await writer.write(memoryview(bytes(MIN_PART_SIZE)))
        await writer.abort()
    assert "could not be dropped (not that either)" in caplog.text
