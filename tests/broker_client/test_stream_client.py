"""Client and stream handles against a real controller; the README's lines run as they stand."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from pathlib import Path
from types import CodeType

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig, WriterConfig, errors
from streammeta.client.errors import StorageError
from tests.broker_client.conftest import FAST

pytestmark = pytest.mark.process


README = Path(__file__).resolve().parents[2] / "README.md"


def readme_example(cluster: LocalCluster) -> tuple[str, CodeType]:
    """The Python lines of the README with the addresses of `cluster`; it has one such block."""
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for wanted in ("127.0.0.1:9091", "file:///tmp/streammeta/bucket"):
        assert text.count(wanted) == 1
    placed = text.replace("127.0.0.1:9091", cluster.endpoints[0])
    placed = placed.replace("file:///tmp/streammeta/bucket", cluster.store_uri)
    return text, compile(placed, str(README), "exec")


def test_the_lines_of_the_readme_run(cluster: LocalCluster) -> None:
    text, program = readme_example(cluster)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) <= 16
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {"__name__": "__main__"})
    assert printed.getvalue().splitlines() == ["0 b'hello'", "1 b'world'"]


async def test_a_broker_writes_reads_tails_trims_compacts_and_closes(cluster: LocalCluster) -> None:
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=1, config=FAST
    ) as client:
        ids = await client.create_streams([{"topic": "a"}, {"topic": "b"}])
        opened = (await client.open_streams(ids)).require_all()
        assert [(stream.epoch, stream.next_offset) for stream in opened.values()] == [(0, 0)] * 2
        for at in range(3):  # one object each
            assert await asyncio.gather(*(client.append(i, b"%d" % at) for i in ids)) == [at, at]
        tail = client.tail(ids[0], 0)
        assert [(await anext(tail)).payload for _ in range(3)] == [b"0", b"1", b"2"]
        waiting = asyncio.ensure_future(anext(tail))
        assert await client.append_many(ids[0], [b"3", b"4"]) == 3
        assert (await waiting).payload == b"3"
        await tail.close()
        (await client.trim_streams({ids[1]: 1})).require_all()
        done = await client.compact()
        assert [node_report.node_id for node_report in done.set_objects] == [1]
        assert not any(node_report.failures for node_report in done.set_objects)
        assert [record.payload async for record in client.iterate(ids[1])] == [b"1", b"2"]
        fetched = await client.fetch(ids[0], 5, wait_s=0.01)
        assert (fetched.records, fetched.end_offset) == ([], 5)
        (await client.close_streams(ids)).require_all()
        with pytest.raises(errors.StreamNotOpenedError, match=f"{ids[0]}"):
            await client.trim_streams({ids[0]: 1})
        unknown = await client.open_streams([10**6])
        with pytest.raises(errors.StreamNotFoundError, match="1000000"):
            unknown.require_all()
        again = (await client.open_streams(ids)).require_all()
        assert [(stream.epoch, stream.next_offset) for stream in again.values()] == [(1, 5), (1, 3)]
        await client.close()  # a second time, by the context, does nothing


async def test_a_client_without_a_node_only_reads(cluster: LocalCluster) -> None:
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=2, config=FAST
    ) as client:
        (stream_id,) = await client.create_streams([{}])
        await client.open_streams({stream_id: 4})
        await client.append(stream_id, b"seen")
    async with await StreamClient.open(cluster.endpoints, cluster.store_uri) as reading:
        assert [record.payload for record in await reading.read(stream_id, 0)] == [b"seen"]
        with pytest.raises(ValueError, match="node_id"):
            await reading.append(stream_id, b"refused")


async def test_a_restarted_broker_resumes_from_its_log(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    config = StreamClientConfig(
        wal_directory=tmp_path / "wal", writer=WriterConfig(linger_s=60.0, durability="wal")
    )
    place = (cluster.endpoints, cluster.store_uri)
    client = await StreamClient.open(*place, node_id=3, node_epoch=1, config=config)
    (stream_id,) = await client.create_streams([{}])
    await client.open_streams([stream_id])
    assert await client.append(stream_id, b"logged") == 0  # long before it is uploaded
    await client.writer.close(0)  # as a process ends that is killed
    await client.close()
    async with await StreamClient.open(*place, node_id=3, node_epoch=2, config=config) as restarted:
        assert [stream.stream_id for stream in restarted.inherited] == [stream_id]
        assert restarted.recovery is not None
        assert restarted.recovery.uploaded == 1
        assert await restarted.append(stream_id, b"next") == 1
        await restarted.flush()
        assert [row.payload for row in await restarted.read(stream_id, 0)] == [b"logged", b"next"]


async def test_the_older_of_two_processes_of_a_node_stops_at_once(cluster: LocalCluster) -> None:
    place = (cluster.endpoints, cluster.store_uri)
    held = StreamClientConfig(writer=WriterConfig(linger_s=60.0))
    async with await StreamClient.open(*place, node_id=4, node_epoch=1, config=held) as old:
        (stream_id,) = await old.create_streams([{}])
        await old.open_streams([stream_id])
        await old.writer.append(stream_id, b"kept")
        await old.flush()
        async with await StreamClient.open(*place, node_id=4, node_epoch=2, config=FAST) as new:
            lost = await old.writer.append(stream_id, b"never")
            with pytest.raises(errors.NodeEpochExpiredError):
                await old.flush()
            for refused in (lost, old.append(stream_id, b"never")):
                with pytest.raises(errors.NodeEpochExpiredError):
                    await refused
            assert await new.append(stream_id, b"new") == 1
            assert [record.payload for record in await new.read(stream_id, 0)] == [b"kept", b"new"]


async def test_a_log_without_a_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wal_directory needs a node_id"):
        await StreamClient.open(
            ["127.0.0.1:1"],
            f"file://{tmp_path}",
            config=StreamClientConfig(wal_directory=tmp_path),
        )


HELD_BACK = {
    "object": WriterConfig(linger_s=60.0),
    "wal": WriterConfig(linger_s=60.0, durability="wal"),
}


@pytest.mark.parametrize("durability", HELD_BACK)
@pytest.mark.parametrize(("wanted", "start"), [(8, 8), (15, 10), (2**63 - 1, 10)])
async def test_appends_after_a_trim_are_visible_whatever_was_committed(
    cluster: LocalCluster, tmp_path: Path, durability: str, wanted: int, start: int
) -> None:
    """Half of what was appended is not committed yet when the stream is trimmed."""
    is_logged = durability == "wal"
    config = StreamClientConfig(
        wal_directory=tmp_path / "wal" if is_logged else None, writer=HELD_BACK[durability]
    )
    place = (cluster.endpoints, cluster.store_uri)
    client = await StreamClient.open(*place, node_id=7, config=config)
    (stream_id,) = await client.create_streams([{}])
    await client.open_streams([stream_id])
    first = await client.writer.append_many(stream_id, [b"first"] * 5)
    await client.flush()
    later = [await client.writer.append(stream_id, b"later", 2), first]
    later += [await client.writer.append(stream_id, b"later", 3)]
    if is_logged:
        await asyncio.gather(*later)

    trimmed = (await client.trim_streams({stream_id: wanted})).require_all()
    assert trimmed == {stream_id: start}
    assert await asyncio.gather(*later) == [5, 0, 7]
    after = await client.writer.append(stream_id, b"after")
    await client.flush()
    assert await after == 10
    seen = [record async for record in client.iterate(stream_id)]
    assert [record.payload for record in seen][-1] == b"after"
    assert seen[0].end_offset > start
    await client.close()

    async with await StreamClient.open(*place, node_id=7, config=config) as client:
        assert client.recovery is None or not client.recovery.set_aside
        assert [id_.start_offset for id_ in client.inherited if id_.stream_id == stream_id] == [
            start
        ]
        again = await client.writer.append(stream_id, b"again")
        await client.flush()
        assert await again == 11
        assert [row.payload async for row in client.iterate(stream_id, 10)] == [b"after", b"again"]
        left = [stream.stream_id for stream in client.inherited]
        (await client.close_streams(left)).require_all()  # the next run has another log


async def test_a_session_without_a_writer_trims_what_is_committed(cluster: LocalCluster) -> None:
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=8, config=FAST
    ) as client:
        (stream_id,) = await client.create_streams([{}])
        opened = (await client.open_streams([stream_id])).require_all()
        epochs = {stream_id: opened[stream_id].epoch}
        await client.append_many(stream_id, [b"0", b"1", b"2", b"3"])
        trimmed = await client.session.trim_streams(epochs, {stream_id: 1000})
        assert trimmed.require_all() == {stream_id: 4}
        assert await client.append(stream_id, b"4") == 4
        assert [record.payload async for record in client.iterate(stream_id)] == [b"4"]
        covered = await client.session.trim_streams(epochs, {stream_id: 9}, {stream_id: 7})
        assert covered.require_all() == {stream_id: 7}


async def test_a_trim_of_a_failed_stream_ends_at_its_committed_end(cluster: LocalCluster) -> None:
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=9, config=FAST
    ) as client:
        (stream_id,) = await client.create_streams([{}])
        await client.open_streams([stream_id])
        await client.append(stream_id, b"0")
        stream = client.writer._streams.require(stream_id, "a write")
        stream.failure = errors.StreamFencedError("a write")
        stream.next_offset = 9
        assert (await client.trim_streams({stream_id: 5})).require_all() == {stream_id: 1}


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


async def test_an_iteration_ends_at_the_end_of_the_stream_as_it_was(client: StreamClient) -> None:
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
