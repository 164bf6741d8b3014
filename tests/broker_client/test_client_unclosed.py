"""What is dropped without `close` says so, by a ResourceWarning that names what is lost."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from streammeta.client import (
    CommitPipeline,
    ControllerClient,
    Heartbeat,
    LogIdentity,
    StreamReader,
    StreamWriter,
    Upload,
    WriteAheadLog,
    WriterConfig,
)
from tests.kit.fake_broker import Broker, broker
from tests.kit.fake_cluster import NAMESPACE

NEVER = 3600.0


def warned_after(part: Callable[[Broker], Awaitable[object]]) -> list[str]:
    """Run `part` on an event loop of its own and return the warnings of what it dropped."""

    async def run() -> None:
        async with broker() as b:
            await part(b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what earlier tests dropped on purpose
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(run())
        gc.collect()
    return [str(one.message) for one in caught if "dropped without close" in str(one.message)]


async def drop_writer(b: Broker) -> None:
    streams = await b.opened(2)
    writer = StreamWriter(b.session, b.store, WriterConfig(linger_s=NEVER))
    writer.attach(streams)
    for one in streams:
        await writer.append(one.stream_id, b"x", 3)


async def close_writer(b: Broker) -> None:
    async with StreamWriter(b.session, b.store, WriterConfig(linger_s=NEVER)) as writer:
        writer.attach(await b.opened(1))
        await writer.append(0, b"x")


async def drop_reader(b: Broker) -> None:
    await b.opened(1)
    await StreamReader(b.client, b.store, NAMESPACE).read(0, 0)


async def drop_client(b: Broker) -> None:
    await ControllerClient(b.cluster.endpoints).describe_cluster()


async def drop_heartbeat(b: Broker) -> None:
    Heartbeat(b.session, print).start()
    await asyncio.sleep(0)


async def stop_heartbeat(b: Broker) -> None:
    heartbeat = Heartbeat(b.session, print)
    heartbeat.start()
    await heartbeat.close()


async def drop_pipeline(b: Broker) -> None:
    pipeline = CommitPipeline(b.client, b.session.node)
    b.cluster.leader = -1
    await pipeline.upload(Upload(1, 9, [1], [0], [1]))
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("drop", "said"),
    [
        (drop_writer, ["StreamWriter", "6 offsets of 2 streams", "may be lost", "async with"]),
        (drop_reader, ["StreamReader", "reads that wait", "reader.close()"]),
        (drop_client, ["ControllerClient", "1 connections", "client.close()"]),
        (drop_heartbeat, ["Heartbeat", "node 1000", "heartbeat.close()"]),
        (drop_pipeline, ["CommitPipeline", "1 commits of node 1000", "pipeline.close()"]),
    ],
)
def test_what_is_dropped_says_what_is_lost(
    drop: Callable[[Broker], Awaitable[object]], said: list[str]
) -> None:
    messages = warned_after(drop)
    assert any(all(part in message for part in said) for message in messages), messages


def test_a_dropped_log_and_its_writer_say_where_the_records_are(tmp_path: Path) -> None:
    async def drop(b: Broker) -> None:
        streams = await b.opened(1)
        log = await WriteAheadLog.open(tmp_path, LogIdentity(b.session.namespace, 1000, 1))
        config = WriterConfig(linger_s=NEVER, durability="wal")
        writer = StreamWriter(b.session, b.store, config, log=log)
        writer.attach(streams)
        await (await writer.append(0, b"x"))

    messages = warned_after(drop)
    assert any("StreamWriter" in one and "write-ahead log keeps" in one for one in messages)
    assert any("WriteAheadLog" in one and str(tmp_path) in one for one in messages)


@pytest.mark.parametrize("part", [close_writer, stop_heartbeat])
def test_what_is_closed_says_nothing(part: Callable[[Broker], Awaitable[object]]) -> None:
    assert warned_after(part) == []


def test_what_was_never_made_says_nothing() -> None:
    async def refused(b: Broker) -> None:
        for make in (
            lambda: StreamWriter(b.session, None),  # type: ignore[arg-type]
            lambda: StreamReader(b.client, None, ""),  # type: ignore[arg-type]
            lambda: ControllerClient([]),
            lambda: CommitPipeline(b.client, None),  # type: ignore[arg-type]
            lambda: Heartbeat(None, print),  # type: ignore[arg-type]
        ):
            with pytest.raises((TypeError, ValueError)):
                make()

    assert warned_after(refused) == []
