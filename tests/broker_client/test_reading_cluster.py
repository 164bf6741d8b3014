"""Against real controllers: tails, look-ups and reads while objects are compacted and trimmed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streammeta.client import (
    BrokerSession,
    ControllerClient,
    OffsetTrimmedError,
    ReaderConfig,
    StreamReader,
    StreamWriter,
    WriterConfig,
    methods,
)
from streammeta.client.model import node_message
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.built_objects import ObjectBuilder
from tests.kit.fake_broker import until
from tests.kit.real_cluster import running_cluster

ROUNDS = 12
PER_ROUND = 20
TIME = 1_700_000_000_000


def payload_of(offset: int) -> bytes:
    return f"record {offset} ".encode() * 20


def time_of(record: RecordBatch) -> int:
    return TIME + record.base_offset * 10


async def append(writer: StreamWriter, stream_id: int) -> None:
    """Commit one object."""
    for _ in range(PER_ROUND):
        offset = writer.next_offset(stream_id)
        await writer.append(stream_id, payload_of(offset), timestamp_ms=TIME + offset * 10)
    await writer.flush()


async def compact(
    session: BrokerSession, store: LocalObjectStore, reader: StreamReader, stream_id: int, end: int
) -> None:
    """Put one object in the place of all that lie below `end`."""
    client = session.client
    request = objects_pb2.GetObjectsRequest(
        queries=[objects_pb2.ObjectQuery(stream_id=stream_id, end_offset=end)]
    )
    (held,) = (await client.call(methods.GET_OBJECTS, request)).results
    start, end = held.objects[0].start_offset, held.objects[-1].end_offset
    builder = ObjectBuilder(1_000)
    builder.write([one async for one in reader.iterate(stream_id, start, end)])
    built = builder.finish()
    prepared = await client.call(
        methods.PREPARE_OBJECTS,
        objects_pb2.PrepareObjectsRequest(node=node_message(session.node), count=1, ttl_ms=60_000),
    )
    object_id = prepared.first_object_id
    store.put(key_for(object_id, session.namespace), built.data)
    commit = objects_pb2.CommitStreamObjectRequest(
        node=node_message(session.node),
        object_id=object_id,
        object_size=built.size,
        stream_id=stream_id,
        stream_epoch=1,
        start_offset=start,
        end_offset=end,
        source_object_ids=[piece.object_id for piece in held.objects],
        operations=[objects_pb2.SOURCE_OPERATION_DELETE] * len(held.objects),
    )
    answer = await client.call(methods.COMMIT_STREAM_OBJECT, commit)
    assert answer.error == common_pb2.ERROR_CODE_NONE
    gone = (
        Path(str(store._root)) / "objects" / key_for(held.objects[0].object_id, session.namespace)
    )
    await until(lambda: not gone.exists(), "deletion of a compacted object")


async def read_until_refused(reader: StreamReader, stream_id: int, offset: int) -> None:
    """Read again and again: what the reader knows may be behind for a moment."""
    while True:
        await reader.read(stream_id, offset)


async def scene(root: Path, endpoints: list[str]) -> None:
    store = LocalObjectStore(root / "bucket")
    async with ControllerClient(endpoints) as client:
        session = await BrokerSession.open(client, 1000, 1)
        (stream_id,) = await session.create_streams([{}])
        opened = (await session.open_streams({stream_id: 1})).require_all()
        config = ReaderConfig(poll_interval_s=60.0)
        async with (
            StreamWriter(session, store, WriterConfig(linger_s=60.0, block_bytes=900)) as writer,
            StreamReader(client, store, session.namespace, config) as reader,
            StreamReader(client, store, session.namespace, config) as other,
        ):
            writer.attach(opened.values())
            wanted = ROUNDS * PER_ROUND
            tails = [reader.tail(stream_id, 0) for _ in range(5)]

            async def follow(place: int) -> list[RecordBatch]:
                return [await anext(tails[place]) for _ in range(wanted)]

            following = [asyncio.create_task(follow(place)) for place in range(len(tails))]
            for number in range(ROUNDS):
                await append(writer, stream_id)
                if number % 4 == 3:
                    await compact(session, store, reader, stream_id, number * PER_ROUND)
            async with asyncio.timeout(20):
                for got in await asyncio.gather(*following):
                    assert [one.payload for one in got] == list(map(payload_of, range(wanted)))
            read = [one async for one in other.iterate(stream_id)]
            assert [one.payload for one in read] == list(map(payload_of, range(wanted)))
            found = await other.offset_for_timestamp(stream_id, TIME + 555, timestamp_of=time_of)
            assert found.offset == 56
            (await session.trim_streams({stream_id: 1}, {stream_id: 100})).require_all()

            with pytest.raises(OffsetTrimmedError, match="the stream at 100"):
                await asyncio.wait_for(read_until_refused(reader, stream_id, 99), 10)
            found = await other.offset_for_timestamp(stream_id, TIME, timestamp_of=time_of)
            assert found.offset == 100


@pytest.mark.process
def test_readers_of_a_real_cluster_see_every_record_once(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        asyncio.run(asyncio.wait_for(scene(tmp_path, list(cluster.endpoints)), 60))
