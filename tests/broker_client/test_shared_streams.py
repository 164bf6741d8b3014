"""Shared streams of real controllers: many clients append, each record is there once."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import (
    Producer,
    SharedStream,
    StreamClient,
    StreamClientConfig,
    WriterConfig,
    errors,
)
from tests.kit.real_cluster import leader_of, raise_level, running_cluster
from tests.kit.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "broker-client.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SEED = int(os.environ.get("STREAMMETA_SEED", "11"))
QUICK = StreamClientConfig(writer=WriterConfig(shared_linger_ms=5, shared_batch_bytes=2_000))


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[StreamClient]:
    raise_level(cluster, 5)
    place = (cluster.endpoints, cluster.store_uri)
    async with StreamClient.open(*place, node_id=1, config=QUICK) as client:
        yield client


@pytest.fixture
async def other(cluster: LocalCluster) -> AsyncIterator[StreamClient]:
    place = (cluster.endpoints, cluster.store_uri)
    async with StreamClient.open(*place, node_id=2, config=QUICK) as client:
        yield client


async def test_two_clients_append_and_all_is_read_once_at_its_offset(
    client: StreamClient, other: StreamClient
) -> None:
    rng = random.Random(SEED)
    made = [await client.create_stream(shared=True) for _ in range(2)]
    appended: dict[tuple[int, int], tuple[bytes, int]] = {}

    async def write(writer: StreamClient, name: bytes) -> None:
        async def append(stream_id: int, payload: bytes, count: int) -> None:
            handle = writer.stream(stream_id, shared=True)
            offset = await handle.append(payload, count, timestamp_ms=1_000 + count)
            place = (stream_id, offset)
            assert place not in appended, f"two appends at {place}, seed {SEED}"
            appended[place] = (payload, count)

        async with asyncio.TaskGroup() as tasks:
            for number in range(300):
                payload = b"%s-%d" % (name, number) * rng.randint(1, 20)
                tasks.create_task(append(rng.choice(made).id, payload, rng.choice([1, 1, 3])))
                if rng.random() < 0.1:
                    await asyncio.sleep(0)

    await asyncio.gather(write(client, b"one"), write(other, b"two"))
    for reading in (client, other):
        found = {
            (stream.id, record.base_offset): (record.payload, record.count)
            for stream in made
            async for record in reading.stream(stream.id)
        }
        assert found == appended, f"seed {SEED}"
    # No gap: the ends are the sums of the counts.
    for stream in made:
        total = sum(count for (held, _), (_, count) in appended.items() if held == stream.id)
        described = await stream.describe()
        assert described.end_offset == total
        assert described.is_shared
        assert not described.is_open

    # The same after a compaction to normal objects.
    await client.compact()
    for stream in made:
        records = [record async for record in other.stream(stream.id)]
        assert [(stream.id, record.base_offset) for record in records] == sorted(
            place for place in appended if place[0] == stream.id
        )


async def test_the_example_of_the_page_runs(client: StreamClient, cluster: LocalCluster) -> None:
    (text,) = [block for block in BLOCKS if "shared = await" in block]
    place = {"endpoints": cluster.endpoints, "bucket": cluster.store_uri, "payload": b"a record"}
    names = {"StreamClient": StreamClient, "Producer": Producer, **place}
    await eval(compile(text, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    assert names["offset"] == 0


async def test_killed_leaders_lose_and_repeat_no_append(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        await asyncio.to_thread(raise_level, cluster, 5)
        place = (cluster.endpoints, cluster.store_uri)
        async with StreamClient.open(*place, node_id=1, config=QUICK) as client:
            stream = await client.create_stream(shared=True)
            found: dict[int, bytes] = {}

            async def append(writer: int) -> None:
                for number in range(150):
                    payload = b"%d-%d" % (writer, number)
                    producer = Producer(writer, 0, number) if writer % 2 else None
                    offset = await stream.append(payload, producer=producer)
                    assert offset not in found
                    found[offset] = payload

            async with asyncio.TaskGroup() as tasks:
                for writer in range(4):
                    tasks.create_task(append(writer))
                await until(lambda: len(found) > 100, "some appends", 60)
                leader = await asyncio.to_thread(leader_of, cluster)
                await asyncio.to_thread(cluster.children[leader].kill)
            records = [record async for record in stream]
            assert {record.base_offset: record.payload for record in records} == found
            assert len(records) == 600


async def test_a_shared_stream_is_read_trimmed_and_deleted(
    client: StreamClient, other: StreamClient
) -> None:
    stream = await client.create_stream({"kind": "test"}, shared=True, topic="handles")
    assert stream.epoch == 0
    assert await stream.append([b"a", b"b"]) == 0
    (found,) = await other.find_streams(topic="handles")
    assert isinstance(found, SharedStream)
    assert await found.append(b"c", 5) == 2
    tail = stream.follow(0)
    assert [(await anext(tail)).payload for _ in range(3)] == [b"a", b"b", b"c"]
    waiting = asyncio.ensure_future(anext(tail))
    assert await found.append(b"d") == 7
    assert (await waiting).base_offset == 7
    await tail.close()
    assert await found.trim(1) == 1
    assert (await other.trim_streams({stream.id: 2})).require_all() == {stream.id: 2}
    assert await stream.trim(8) == 8
    with pytest.raises(errors.RejectedError, match="OFFSET_NOT_MATCHED"):
        await stream.trim(9)
    await found.delete()
    with pytest.raises(errors.StreamNotFoundError):
        await stream.append(b"gone")


async def test_batches_of_a_producer_are_appended_once_and_in_order(client: StreamClient) -> None:
    stream = await client.create_stream(shared=True)
    offsets = await asyncio.gather(
        *(stream.append([b"x", b"y"], producer=Producer(9, 0, 2 * at)) for at in range(5))
    )
    assert offsets == [0, 2, 4, 6, 8]
    # With a duplicate, another batch of the stream in the same object is appended all the same.
    again = await asyncio.gather(
        stream.append([b"x", b"y"], producer=Producer(9, 0, 8)),
        stream.append(b"other"),
        stream.append([b"z"], producer=Producer(9, 0, 10)),
    )
    assert list(again) == [8, 10, 11]
    # A repeat in the same object gets the offset of the first one.
    last = Producer(9, 0, 11)
    both = await asyncio.gather(*(stream.append(b"t", producer=last) for _ in range(2)))
    assert both == [12, 12]
    with pytest.raises(errors.OutOfOrderSequenceError, match="first_sequence=50"):
        await stream.append(b"gap", producer=Producer(9, 0, 50))
    assert await stream.append(b"new", producer=Producer(9, 1, 0)) == 13
    with pytest.raises(errors.ProducerFencedError):
        await stream.append(b"old", producer=Producer(9, 0, 11))


async def test_what_a_kind_of_stream_does_not_have_is_a_clear_error(client: StreamClient) -> None:
    shared = await client.create_stream(shared=True)
    owned = await client.create_stream()
    with pytest.raises(errors.StreamKindMismatchError, match=f"{shared.id}.*never opened"):
        await client.open_stream(shared.id)
    with pytest.raises(errors.StreamKindMismatchError, match="never open"):
        await shared.close()
    with pytest.raises(errors.StreamKindMismatchError, match="assigns"):
        _ = shared.next_offset
    with pytest.raises(errors.StreamNotOpenedError, match=f"{shared.id}"):
        await client.stream(shared.id).append(b"by a handle of the other kind")
    with pytest.raises(errors.StreamKindMismatchError, match=f"stream {owned.id}"):
        await client.stream(owned.id, shared=True).append(b"not shared")
    with pytest.raises(errors.StreamNotFoundError):
        await client.stream(10**6, shared=True).append(b"nowhere")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("text",), "payloads"),
        ((b"x", 0), "count"),
        (([b"x", b"y"], 2), "count"),
        (([],), "payloads"),
    ],
)
async def test_wrong_arguments_are_named(
    client: StreamClient, arguments: tuple[object, ...], named: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        await client.stream(0, shared=True).append(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="producer"):
        await client.stream(0, shared=True).append(b"x", producer=7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epoch is 32768"):
        Producer(1, 32_768, 0)
    assert not client.shared_writer.buffered_bytes
