"""How a writer ends, by its own will or not, and what travels beside the records."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streammeta.client import NodeFencedError, WriterClosedError
from streammeta.client.record_buffer import ACK_OVERHEAD, RECORD_OVERHEAD, RUN_OVERHEAD
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import INT32_MAX
from tests.kit.fake_broker import until, writing
from tests.kit.fake_cluster import NAMESPACE

COMMITS = "CommitStreamSetObject"


async def test_close_gives_up_at_its_deadline_and_says_what_is_known() -> None:
    async with writing(upload_bytes=1, parallel_uploads=1) as (b, writer):
        b.hold()
        prepares = asyncio.Event()

        async def hold_prepares(request: Any) -> None:
            if b.cluster.calls[COMMITS]:
                await prepares.wait()

        b.cluster.hooks["PrepareObjects"] = hold_prepares
        submitted = await writer.append(0, b"x")
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit")
        later = [await writer.append(0, b"y") for _ in range(20)]
        loop = asyncio.get_running_loop()
        start = loop.time()
        await writer.close(0.3)
        assert loop.time() - start < 3
        with pytest.raises(WriterClosedError, match="it may have been committed"):
            submitted.result()
        ends = await asyncio.gather(*later, return_exceptions=True)
        assert "it was not committed" in str(ends[-1])
        assert writer.buffered_bytes == 0
        prepares.set()


async def test_appends_that_wait_for_room_are_refused_by_close() -> None:
    room = RUN_OVERHEAD + RECORD_OVERHEAD + ACK_OVERHEAD + 100
    async with writing(max_buffer_bytes=room, upload_bytes=room) as (b, writer):
        gate = b.hold()
        ack = await writer.append(0, bytes(100))
        waiting = asyncio.create_task(writer.append(0, b"y"))
        await until(lambda: b.cluster.calls[COMMITS] == 1, "commit of the full buffer")
        closing = asyncio.create_task(writer.close())
        with pytest.raises(WriterClosedError, match="after close"):
            await waiting
        gate.set()
        await closing
        assert ack.result() == 0


async def test_a_node_that_is_taken_over_fails_everything_at_once() -> None:
    """Also what is being uploaded, what waits in the buffer and who waits for room."""
    room = 2 * (RUN_OVERHEAD + RECORD_OVERHEAD + ACK_OVERHEAD + 10)
    async with writing(2, max_buffer_bytes=room, upload_bytes=RUN_OVERHEAD) as (b, writer):
        gate = b.hold("PrepareObjects")
        first = await writer.append(0, b"x" * 10)
        flushing = asyncio.create_task(writer.flush())
        await until(lambda: b.cluster.calls["PrepareObjects"] == 1, "the upload's prepare")
        second = await writer.append(1, b"y" * 10)
        waiting = asyncio.create_task(writer.append(0, b"z"))
        await asyncio.sleep(0)
        error = NodeFencedError("heartbeat")
        writer._heartbeat._on_taken_over(error)
        for failed in (first, second, waiting, flushing, writer.flush()):
            with pytest.raises(NodeFencedError) as raised:
                await failed
            assert raised.value is error, "one error, everywhere"
        with pytest.raises(NodeFencedError):
            await writer.append(1, b"x")
        gate.set()
        await writer.close()
        assert b.cluster.calls[COMMITS] == 0
        assert writer.buffered_bytes == 0


async def test_many_records_at_once_are_one_append() -> None:
    async with writing() as (b, writer):
        first = await writer.append_many(0, [b"a", b"bc"])
        second = await writer.append(0, b"d", 5)
        third = await writer.append_many(0, [bytearray(b"e")])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="payloads is empty"):
            await writer.append_many(0, [])
        with pytest.raises(TypeError):
            await writer.append_many(0, [b"x", "y"])  # type: ignore[list-item]
        assert writer.next_offset(0) == 8
        await writer.flush()
        assert [one.result() for one in (first, second, third)] == [0, 2, 7]
        assert await b.payloads(0) == [b"a", b"bc", b"d", b"e"]


@pytest.mark.parametrize("split_bytes", [1, 1000], ids=["stream objects", "set object"])
async def test_time_bounds_and_checksums_travel_with_the_commit(split_bytes: int) -> None:
    async with writing(2, split_bytes=split_bytes) as (b, writer):
        await writer.append(0, b"x", timestamp_ms=50)
        await writer.append(0, b"x", timestamp_ms=40, max_timestamp_ms=45)
        await writer.append_many(1, [b"y", b"z"], timestamp_ms=10, max_timestamp_ms=60)
        for wrong in ({"timestamp_ms": -1}, {"max_timestamp_ms": 5}):
            with pytest.raises(ValueError, match="timestamp_ms is"):
                await writer.append(0, b"x", **wrong)
        with pytest.raises(ValueError, match="timestamp_ms is 5 and max_timestamp_ms 4"):
            await writer.append(0, b"x", timestamp_ms=5, max_timestamp_ms=4)
        await writer.flush()
        await writer.append(0, b"x")
        await writer.append(1, b"x", timestamp_ms=7)
        await writer.flush()
        first, second = b.cluster.requests[COMMITS]
        if split_bytes == 1:
            rows = first.stream_objects
            assert list(rows.min_timestamp_ms) == [40, 10]
            assert list(rows.max_timestamp_ms) == [50, 60]
            assert list(second.stream_objects.min_timestamp_ms) == [-1, 7]
            checksums = dict(zip(rows.object_id, rows.crc32c, strict=True))
        else:
            assert (first.min_timestamp_ms, first.max_timestamp_ms) == (10, 60)
            assert not second.HasField("min_timestamp_ms"), "one record has no time"
            checksums = {first.object_id: first.crc32c}
        for object_id, told in checksums.items():
            checksum = ObjectChecksum()
            checksum.update(b.store.get_range(key_for(object_id, NAMESPACE)))
            assert told == checksum.value


async def test_a_batch_ends_before_its_offsets_leave_32_bits() -> None:
    async with writing() as (b, writer):
        counts = [INT32_MAX - 1, 1, 1, INT32_MAX]
        acks = [await writer.append(0, b"x", count) for count in counts]
        await writer.flush()
        assert [ack.result() for ack in acks] == [0, INT32_MAX - 1, INT32_MAX, INT32_MAX + 1]
        spans = [end - start for start, end, *_ in b.cluster.map.streams[0].pieces]
        assert spans == [INT32_MAX, 1, INT32_MAX]
