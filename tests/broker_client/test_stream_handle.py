"""Handles of streams, and opening a client in `async with`, against a real controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig, WriterConfig, errors
from streammeta.client.errors import StorageError
from tests.kit.real_cluster import leader_of, running_cluster

pytestmark = pytest.mark.process

FAST = StreamClientConfig(writer=WriterConfig(linger_s=0.01))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One real controller over a directory as the bucket."""
    with running_cluster(tmp_path_factory.mktemp("handle"), 1) as running:
        leader_of(running)
        yield running


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[StreamClient]:
    place = (cluster.endpoints, cluster.store_uri)
    async with StreamClient.open(*place, node_id=1, config=FAST) as client:
        yield client


async def test_a_stream_is_created_appended_to_and_iterated(client: StreamClient) -> None:
    stream = await client.create_stream(topic="orders")
    assert (stream.epoch, stream.next_offset, stream.tags) == (0, 0, {"topic": "orders"})
    assert await stream.append(b"a") == 0
    assert await stream.append([b"b", b"c"], timestamp_ms=5) == 1
    assert [record.payload async for record in stream] == [b"a", b"b", b"c"]
    assert [record.payload async for record in stream.iterate(1, 2)] == [b"b"]
    assert [record.payload for record in await stream.read(2)] == [b"c"]
    described = await stream.describe()
    assert (described.tags, described.end_offset) == ({"topic": "orders"}, 3)


async def test_an_iteration_ends_where_the_stream_ended_at_its_beginning(
    client: StreamClient,
) -> None:
    stream = await client.create_stream()
    await stream.append([b"0", b"1"])
    seen = []
    async for record in stream:
        seen.append(record.payload)
        await stream.append(b"later")
    assert seen == [b"0", b"1"]


async def test_a_follower_waits_for_records(client: StreamClient) -> None:
    stream = await client.create_stream()
    async with stream.follow(0) as records:
        waiting = asyncio.ensure_future(anext(records))
        await stream.append(b"new")
        assert (await waiting).payload == b"new"


async def test_a_stream_is_found_by_time_and_trimmed(client: StreamClient) -> None:
    stream = await client.create_stream()
    for time_ms in (10, 20):
        await stream.append(b"%d" % time_ms, timestamp_ms=time_ms)
    found = await stream.offset_at(15, timestamp_of=lambda record: int(record.payload))
    assert (found.offset, found.timestamp_ms) == (1, 20)
    assert await stream.trim(1) == 1
    assert [record.payload async for record in stream] == [b"20"]


async def test_streams_are_found_by_their_tags(client: StreamClient) -> None:
    first = await client.create_stream(topic="bills", zone="a")
    second = await client.create_stream({"topic": "bills", "zone": "b"})
    found = await client.find_streams(topic="bills")
    assert [(stream.id, stream.tags["zone"]) for stream in found] == [
        (first.id, "a"),
        (second.id, "b"),
    ]
    (only,) = await client.find_streams({"topic": "bills"}, zone="b")
    assert await only.append(b"0") == 0  # a handle of a stream that is open here
    with pytest.raises(errors.InvalidRequestError, match="tags"):
        await client.find_streams()


async def test_singular_calls_raise_where_batches_return_outcomes(client: StreamClient) -> None:
    missing = 10**6
    with pytest.raises(errors.StreamNotFoundError):
        await client.open_stream(missing)
    assert list((await client.open_streams([missing])).failed) == [missing]
    with pytest.raises(errors.StreamNotFoundError):
        await client.stream(missing).describe()
    with pytest.raises(errors.StreamNotOpenedError):
        await client.stream(missing).trim(1)


async def test_a_closed_stream_is_opened_again_and_deleted(client: StreamClient) -> None:
    async with await client.create_stream() as stream:
        await stream.append(b"kept")
    assert stream.epoch is None
    await stream.close()  # a second close does nothing

    again = await client.open_stream(stream.id)
    assert (again.epoch, await again.append(b"next")) == (1, 1)
    assert stream.epoch == 1  # the handles share their state

    await again.delete()
    with pytest.raises(errors.StreamNotFoundError):
        await again.read(0)
    await again.delete()  # a missing stream counts as deleted


async def test_streams_are_deleted_in_a_batch(client: StreamClient) -> None:
    never_opened, opened = await client.create_streams([{}, {}])
    (await client.open_streams([opened])).require_all()
    outcomes = await client.delete_streams([never_opened, opened, 10**6])
    assert set(outcomes.done) == {never_opened, 10**6}
    assert isinstance(outcomes.failed[opened], errors.StreamNotClosedError)


async def test_opening_can_be_awaited_entered_and_scheduled(cluster: LocalCluster) -> None:
    place = (cluster.endpoints, cluster.store_uri)
    async with await StreamClient.open(*place) as awaited:
        assert await awaited.controllers.describe_cluster()
    async with StreamClient.open(*place) as entered:
        assert await entered.controllers.describe_cluster()
    scheduled = await asyncio.create_task(StreamClient.open(*place))
    await scheduled.close()
    for closed in (awaited, entered, scheduled):
        with pytest.raises(errors.ClientClosedError):
            await closed.controllers.describe_cluster()


async def test_a_failed_opening_raises_in_both_forms(cluster: LocalCluster) -> None:
    missing = f"{cluster.store_uri}-missing"
    with pytest.raises(StorageError):
        await StreamClient.open(cluster.endpoints, missing)
    with pytest.raises(StorageError):
        async with StreamClient.open(cluster.endpoints, missing):
            pytest.fail("entered")


def test_an_opening_can_be_given_up() -> None:
    StreamClient.open(["127.0.0.1:1"], "file:///tmp").close()
