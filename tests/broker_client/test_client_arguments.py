"""Arguments passed by mistake are refused by name; what is dropped without `close` says so.

The mistakes are those of a first hour with the library: a string for a list, a mapping for a
sequence, an address for a store, text for bytes, a float for milliseconds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streammeta.client import LogConfig, ReaderConfig, WriterConfig, parts
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.controllers.metadata_watch import MetadataWatch
from streammeta.client.controllers.methods import DESCRIBE_STREAMS
from streammeta.client.parts import (
    CommitPipeline,
    ControllerClient,
    Heartbeat,
    LogIdentity,
    StreamReader,
    StreamWriter,
    Upload,
    WriteAheadLog,
)
from streammeta.client.wal.disk.set_aside import read_set_aside
from streammeta.storage.object_store.local import LocalObjectStore
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import objects_pb2
from tests.kit.fake_broker import Broker, broker, writing
from tests.kit.fake_cluster import NAMESPACE
from tests.kit.waiting import PATIENCE_S

ENDPOINT = "127.0.0.1:9091"
WRONG = (TypeError, ValueError)

lib: Any = parts
"""The library as a caller without a type checker sees it."""


def anything(function: Any) -> Any:
    """Return `function` for calls that a type checker would refuse."""
    return function


@pytest.mark.parametrize(
    "endpoints",
    [
        "127.0.0.1:9091",
        {"127.0.0.1": 9091},
        [],
        ["127.0.0.1"],
        ["127.0.0.1:"],
        ["127.0.0.1:0"],
        ["127.0.0.1:65536"],
        ["127.0.0.1:9o91"],
        [":9091"],
        ["::1:9091"],
        ["http://127.0.0.1:9091"],
        ["127.0.0.1:9091/"],
        ["127.0.0.1 :9091"],
        [("127.0.0.1", 9091)],
        [ENDPOINT, ENDPOINT],
        None,
        9091,
    ],
)
def test_endpoints_are_host_and_port(endpoints: Any) -> None:
    with pytest.raises(WRONG, match=r"endpoints.*(HOST:PORT|once)"):
        ControllerClient(endpoints)


@pytest.mark.parametrize("endpoint", [ENDPOINT, "localhost:1", "[::1]:65535", "a-b.example:80"])
def test_endpoints_that_are_right(endpoint: str) -> None:
    assert ControllerClient((endpoint,)).endpoints == (endpoint,)
    assert anything(ControllerClient)(iter([endpoint])).endpoints == (endpoint,)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "5", True])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: ControllerClient([ENDPOINT], deadline_s=value),
        lambda value: ControllerClient([ENDPOINT], attempt_timeout_s=value),
        lambda value: MetadataWatch(ControllerClient([ENDPOINT]), deadline_s=value),
        lambda value: MetadataWatch(ControllerClient([ENDPOINT]), silence_s=value),
        lambda value: WriterConfig(commit_deadline_s=value),
        lambda value: ReaderConfig(poll_interval_s=value),
        lambda value: ReaderConfig(deadline_s=value),
    ],
)
def test_durations_are_positive_seconds(make: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(WRONG, match="seconds"):
        make(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", None, True])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (WriterConfig, "max_buffer_bytes"),
        (WriterConfig, "upload_bytes"),
        (WriterConfig, "max_streams"),
        (WriterConfig, "parallel_uploads"),
        (WriterConfig, "upload_threads"),
        (ReaderConfig, "read_bytes"),
        (ReaderConfig, "fetch_threads"),
        (LogConfig, "max_bytes"),
        (LogConfig, "segment_bytes"),
        (LogConfig, "max_unflushed_bytes"),
    ],
)
def test_limits_are_positive_integers(config: Any, name: str, value: Any) -> None:
    with pytest.raises(WRONG, match=f"^{name}"):
        config(**{name: value})


def identity(**change: Any) -> LogIdentity:
    return LogIdentity(**{"namespace": NAMESPACE, "node_id": 7, "node_epoch": 1, **change})


def upload(**change: Any) -> Upload:
    right: dict[str, Any] = {"object_id": 1, "object_size": 9, "stream_ids": [1]}
    return Upload(**{**right, "start_offsets": [0], "end_offsets": [1], **change})


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (WriterConfig, "ttl_s", [0, 0.5, 604_801, math.nan, "60", None, True]),
        (WriterConfig, "max_streams", [20_001]),
        (WriterConfig, "max_buffer_bytes", [1_000_000]),  # less than upload_bytes
        (WriterConfig, "durability", ["disk"]),
        (LogConfig, "max_bytes", [100_000]),  # less than two segments
        (LogConfig, "group_bytes", [0]),
        (CompactionConfig, "memory_budget", ["1 GiB", 1 << 20]),
        (CompactionConfig, "part_bytes", [5, 1 << 20]),
        (CompactionConfig, "read_threads", [None, 0]),
        (CompactionConfig, "write_rate", [-1.0]),
        (CompactionConfig, "id_ttl_s", [0.005]),
        (CompactionConfig, "commit_deadline_s", [0]),
        (identity, "namespace", [b"x", ""]),
        (identity, "node_id", ["7", -1]),
        (identity, "node_epoch", [1.0, 2**63]),
        (upload, "object_id", [-1, "1"]),
        (upload, "object_size", [-1]),
        (upload, "stream_ids", [{1: 2}]),
        (upload, "start_offsets", [0]),
    ],
)
def test_a_wrong_value_is_named(make: Callable[..., object], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(WRONG, match=f"^{name}"):
            make(**{name: value})


def test_a_namespace_fits_the_header_of_a_file() -> None:
    with pytest.raises(ValueError, match="1024"):
        identity(namespace="n" * 1025)


Call = Callable[[Any], Awaitable[object]]


async def _no_wait(made: object) -> object:
    return made


SESSION_CALLS: list[tuple[str, Call]] = [
    ("client", lambda b: lib.BrokerSession.open(ENDPOINT, 7, 1)),
    ("node_id", lambda b: lib.BrokerSession.open(b.client, "7", 1)),
    ("node_id", lambda b: lib.BrokerSession.open(b.client, 2**31, 1)),
    ("node_epoch", lambda b: lib.BrokerSession.open(b.client, 7, -1)),
    ("node_epoch", lambda b: lib.BrokerSession.open(b.client, 7, 1.5)),
    ("wal_config", lambda b: lib.BrokerSession.open(b.client, 7, 1, wal_config=b"")),
    ("tags", lambda b: lib.BrokerSession.open(b.client, 7, 1, tags=["a"])),
    ("tags", lambda b: b.session.create_streams({"topic": "example"})),
    ("tags", lambda b: b.session.create_streams("example")),
    ("tags", lambda b: b.session.create_streams(3)),
    ("tags[1]", lambda b: b.session.create_streams([{}, "example"])),
    ("tags[0]['a']", lambda b: b.session.create_streams([{"a": 1}])),
    ("epochs", lambda b: b.session.open_streams([1, 2])),
    ("epochs", lambda b: b.session.close_streams(1)),
    ("epochs[0]", lambda b: b.session.delete_streams({0: "1"})),
    ("epochs[0]", lambda b: b.session.open_streams({0: -1})),
    ("stream id in epochs", lambda b: b.session.open_streams({"0": 1})),
    ("epochs has no stream 1", lambda b: b.session.trim_streams({0: 1}, {1: 5})),
    ("new_starts", lambda b: b.session.trim_streams({0: 1}, [5])),
    ("request", lambda b: b.client.call(DESCRIBE_STREAMS, {})),
    ("deadline_s", lambda b: b.client.call(DESCRIBE_STREAMS, DESCRIBE_STREAMS.request(), "5")),
    ("stream_ids", lambda b: anext(b.client.describe_streams("12"))),
    ("session", lambda b: _no_wait(lib.Heartbeat(b.client, print))),
    ("on_taken_over", lambda b: _no_wait(lib.Heartbeat(b.session, None))),
    ("session", lambda b: _no_wait(lib.StreamWriter(b.client, b.store))),
    ("store", lambda b: _no_wait(lib.StreamWriter(b.session, "file:///bucket"))),
    ("store", lambda b: _no_wait(lib.StreamWriter(b.session, Path("/bucket")))),
    ("config", lambda b: _no_wait(lib.StreamWriter(b.session, b.store, {"linger_s": 1}))),
    ("log", lambda b: _no_wait(lib.StreamWriter(b.session, b.store, log="/wal"))),
    ("client", lambda b: _no_wait(lib.StreamReader(b.session, b.store, NAMESPACE))),
    ("store", lambda b: _no_wait(lib.StreamReader(b.client, "s3://b", NAMESPACE))),
    ("namespace", lambda b: _no_wait(lib.StreamReader(b.client, b.store, ""))),
    ("namespace", lambda b: _no_wait(lib.StreamReader(b.client, b.store, None))),
    ("config", lambda b: _no_wait(lib.StreamReader(b.client, b.store, NAMESPACE, 5))),
    ("node", lambda b: _no_wait(lib.CommitPipeline(b.client, 7))),
    ("client", lambda b: _no_wait(lib.CommitPipeline(b.session, b.session.node))),
    ("deadline_s", lambda b: _no_wait(lib.CommitPipeline(b.client, b.session.node, deadline_s=0))),
    ("directory", lambda b: lib.WriteAheadLog.open(None, LogIdentity("n", 1, 1))),
    ("directory", lambda b: lib.WriteAheadLog.open("", LogIdentity("n", 1, 1))),
    ("identity", lambda b: lib.WriteAheadLog.open("/wal", NAMESPACE)),
    ("damage", lambda b: lib.WriteAheadLog.open("/wal", LogIdentity("n", 1, 1), damage="mend")),
    ("config", lambda b: lib.WriteAheadLog.open("/wal", LogIdentity("n", 1, 1), WriterConfig())),
    ("path", lambda b: _no_wait(anything(read_set_aside)(7))),
    ("uri", lambda b: _no_wait(anything(open_object_store)(Path("/bucket")))),
]


async def check_named(calls: list[tuple[str, Call]], target: Any) -> None:
    """Each call raises an error that begins with the name of the argument."""
    for name, call in calls:
        with pytest.raises(WRONG) as caught:
            await call(target)
        assert str(caught.value).startswith(name)
        assert "expected" in str(caught.value) or "names" in str(caught.value)


async def test_a_wrong_argument_is_named_and_nothing_is_sent() -> None:
    async with broker() as b:
        before = dict(b.cluster.calls)
        await check_named(SESSION_CALLS, b)
        assert b.cluster.calls == before


APPENDS: list[tuple[str, Call]] = [
    ("payload", lambda w: w.append(0, "text")),
    ("payload", lambda w: w.append(0, 5)),
    ("payload", lambda w: w.append(0, [1, 2])),
    ("stream_id", lambda w: w.append("0", b"x")),
    ("count", lambda w: w.append(0, b"x", 0)),
    ("count", lambda w: w.append(0, b"x", 1.5)),
    ("timestamp_ms", lambda w: w.append(0, b"x", timestamp_ms=1.5)),
    ("max_timestamp_ms", lambda w: w.append(0, b"x", timestamp_ms=1, max_timestamp_ms="2")),
    ("timestamp_ms", lambda w: w.append(0, b"x", timestamp_ms=-1)),
    ("payloads", lambda w: w.append_many(0, b"abc")),
    ("payloads", lambda w: w.append_many(0, "abc")),
    ("payloads", lambda w: w.append_many(0, {"a": b"x"})),
    ("payloads", lambda w: w.append_many(0, [])),
    ("payloads[1]", lambda w: w.append_many(0, [b"x", "y"])),
    ("payloads[1]", lambda w: w.append_many(0, [b"x", 3])),
    ("deadline_s", lambda w: w.close(-1)),
    ("streams", lambda w: _no_wait(w.attach({0: 1}))),
    ("streams[0]", lambda w: _no_wait(w.attach([0]))),
    ("stream_ids", lambda w: _no_wait(w.detach(0))),
]


async def test_a_wrong_append_is_named_and_leaves_no_trace() -> None:
    async with writing() as (b, writer):
        await check_named(APPENDS, writer)
        assert (writer.next_offset(0), writer.buffered_bytes) == (0, 0)
        acks = [
            await anything(writer.append)(0, bytearray(b"a")),
            await anything(writer.append_many)(0, (memoryview(b"b"), b"c")),
            await anything(writer.append_many)(0, (payload for payload in [b"d"])),
        ]
        await writer.flush()
        assert [ack.result() for ack in acks] == [0, 1, 3]
        assert await b.payloads(0) == [b"a", b"b", b"c", b"d"]


READS: list[tuple[str, Call]] = [
    ("stream_id", lambda r: r.read("0", 0)),
    ("start", lambda r: r.read(0, 0.5)),
    ("end", lambda r: r.read(0, 0, "5")),
    ("max_bytes", lambda r: r.read(0, 0, None, 0)),
    ("deadline_s", lambda r: r.read(0, 0, deadline_s="5")),
    ("offset", lambda r: r.fetch(0, -1)),
    ("wait_s", lambda r: r.fetch(0, 0, wait_s=-1)),
    ("min_bytes", lambda r: r.fetch(0, 0, min_bytes=-1)),
    ("stream_id", lambda r: anext(r.iterate(None))),
    ("stream_ids", lambda r: anext(r.read_streams(0))),
    ("stream_ids[0]", lambda r: anext(r.read_streams(["0"]))),
    ("queries", lambda r: r.locate(None)),
    ("queries[0]", lambda r: r.locate([0])),
    ("timestamp_ms", lambda r: r.offset_for_timestamp(0, 1.5, timestamp_of=id)),
    ("timestamp_of", lambda r: r.offset_for_timestamp(0, 1, timestamp_of=None)),
    ("bound", lambda r: r.offset_for_timestamp(0, 1, "under", timestamp_of=id)),
]


async def test_a_wrong_read_is_named_and_asks_nothing() -> None:
    async with broker() as b:
        await b.opened(1)
        before = dict(b.cluster.calls)
        async with b.reader() as reader:
            await check_named(READS, reader)
        assert b.cluster.calls == before


async def test_a_pipeline_names_the_column_that_holds_no_integers() -> None:
    async with broker() as b, CommitPipeline(b.client, b.session.node) as pipeline:
        for column, wrong in (("stream_ids", "1"), ("start_offsets", 0.5), ("end_offsets", 2**63)):
            with pytest.raises(TypeError, match=f"^{column} of object 1"):
                await pipeline.upload(upload(**{column: [wrong]}))
        with pytest.raises(TypeError, match=r"^upload"):
            await anything(pipeline.upload)(objects_pb2.CommitStreamSetObjectRequest())
        with pytest.raises(TypeError, match=r"^commit"):
            await anything(pipeline.commit)({})


async def test_paths_may_be_str(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    store = LocalObjectStore(str(tmp_path / "bucket"))
    async with (
        await WriteAheadLog.open(str(tmp_path / "wal"), identity()) as log,
        broker() as b,
        StreamWriter(b.session, store, WriterConfig(durability="wal"), log=log) as writer,
        StreamReader(b.client, store, NAMESPACE) as reader,
    ):
        writer.attach(await b.opened(1))
        assert await (await writer.append(0, b"x")) == 0
        assert await log.set_aside([], "nothing") is None
        await writer.flush()
        assert [record.payload for record in await reader.read(0, 0)] == [b"x"]


NEVER = 3600.0


def warned_after(
    part: Callable[[Broker], Awaitable[object]], dropped: Sequence[str] = ()
) -> list[str]:
    """Run `part` on an event loop of its own and return the warnings of what it dropped.

    Waits until a warning names each of `dropped`: a thread may hold one for a moment still.
    """

    async def run() -> None:
        async with broker() as b:
            await part(b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what earlier tests dropped on purpose
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # pytest keeps log records, and an error in a record keeps its frames and their writer.
        logging.disable()
        try:
            asyncio.run(run())
        finally:
            logging.disable(logging.NOTSET)
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            gc.collect()
            texts = [str(warning.message) for warning in caught]
            messages = [text for text in texts if "dropped without close" in text]
            is_complete = all(any(name in text for text in messages) for name in dropped)
            if is_complete or time.monotonic() > ends_at:
                return messages


async def drop_writer(b: Broker) -> None:
    streams = await b.opened(2)
    writer = StreamWriter(b.session, b.store, WriterConfig(linger_s=NEVER))
    writer.attach(streams)
    for stream in streams:
        await writer.append(stream.stream_id, b"x", 3)


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
        (drop_reader, ["StreamReader", "waiting reads", "reader.close()"]),
        (drop_client, ["ControllerClient", "1 connections", "client.close()"]),
        (drop_heartbeat, ["Heartbeat", "node 1000", "heartbeat.close()"]),
        (drop_pipeline, ["CommitPipeline", "1 commits of node 1000", "pipeline.close()"]),
    ],
)
def test_a_drop_names_its_loss(
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

    messages = warned_after(drop, dropped=("StreamWriter", "WriteAheadLog"))
    assert any("StreamWriter" in one and "write-ahead log keeps" in one for one in messages), (
        messages
    )
    assert any("WriteAheadLog" in text and str(tmp_path) in text for text in messages), messages


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
