"""Against real controllers: tails, look-ups and reads while objects are compacted and trimmed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streammeta.client import (
    OffsetTrimmedError,
    ReaderConfig,
    StreamClient,
    StreamClientConfig,
    StreamReader,
    StreamWriter,
    WriterConfig,
    methods,
)
from streammeta.client.model import node_message
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.base import ObjectStore
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.built_objects import ObjectBuilder
from tests.kit.fake_broker import until
from tests.kit.real_cluster import prepare_object, running_cluster

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


async def compact(client: StreamClient, stream_id: int, end: int) -> None:
    """Put one object in the place of all that lie below `end`."""
    call, session = client.controllers.call, client.session
    node = node_message(session.node)
    query = objects_pb2.ObjectQuery(stream_id=stream_id, end_offset=end)
    request = objects_pb2.GetObjectsRequest(queries=[query])
    (held,) = (await call(methods.GET_OBJECTS, request)).results
    start, end = held.objects[0].start_offset, held.objects[-1].end_offset
    builder = ObjectBuilder(1_000)
    builder.write([one async for one in client.iterate(stream_id, start, end)])
    built = builder.finish()
    object_id = await prepare_object(session)
    client.store.put(key_for(object_id, session.namespace), built.data)
    commit = objects_pb2.CommitStreamObjectRequest(
        node=node,
        object_id=object_id,
        object_size=built.size,
        stream_id=stream_id,
        stream_epoch=1,
        start_offset=start,
        end_offset=end,
        source_object_ids=[piece.object_id for piece in held.objects],
        operations=[objects_pb2.SOURCE_OPERATION_DELETE] * len(held.objects),
    )
    answer = await call(methods.COMMIT_STREAM_OBJECT, commit)
    assert answer.error == common_pb2.ERROR_CODE_NONE
    gone = key_for(held.objects[0].object_id, session.namespace)
    await until(lambda: not is_stored(client.store, gone), "deletion of a compacted object")


def is_stored(store: ObjectStore, key: str) -> bool:
    return any(info.key == key for info in store.list_objects(key))


async def read_until_refused(reader: StreamReader, stream_id: int, offset: int) -> None:
    """Read again and again: what the reader knows may be behind for a moment."""
    while True:
        await reader.read(stream_id, offset)


@pytest.mark.process
@pytest.mark.timeout(60)
async def test_readers_of_a_real_cluster_see_every_record_once(tmp_path: Path) -> None:
    slow = ReaderConfig(poll_interval_s=60.0)
    config = StreamClientConfig(writer=WriterConfig(linger_s=60.0, block_bytes=900), reader=slow)
    wanted = ROUNDS * PER_ROUND
    with running_cluster(tmp_path, 1) as cluster:
        place = (cluster.endpoints, cluster.store_uri)
        async with (
            await StreamClient.open(*place, node_id=1000, config=config) as client,
            await StreamClient.open(*place, config=config) as other,
        ):
            (stream_id,) = await client.create_streams([{}])
            (await client.open_streams({stream_id: 1})).require_all()
            tails = [client.tail(stream_id, 0) for _ in range(5)]

            async def follow(place: int) -> list[RecordBatch]:
                return [await anext(tails[place]) for _ in range(wanted)]

            following = [asyncio.create_task(follow(place)) for place in range(len(tails))]
            for number in range(ROUNDS):
                await append(client.writer, stream_id)
                if number % 4 == 3:
                    await compact(client, stream_id, number * PER_ROUND)
            async with asyncio.timeout(20):
                for got in await asyncio.gather(*following):
                    assert [one.payload for one in got] == list(map(payload_of, range(wanted)))
            read = [one async for one in other.iterate(stream_id)]
            assert [one.payload for one in read] == list(map(payload_of, range(wanted)))
            look_up = other.reader.offset_for_timestamp
            found = await look_up(stream_id, TIME + 555, timestamp_of=time_of)
            assert found.offset == 56
            (await client.trim_streams({stream_id: 100})).require_all()

            with pytest.raises(OffsetTrimmedError, match="the stream at 100"):
                await asyncio.wait_for(read_until_refused(client.reader, stream_id, 99), 10)
            assert (await look_up(stream_id, TIME, timestamp_of=time_of)).offset == 100
