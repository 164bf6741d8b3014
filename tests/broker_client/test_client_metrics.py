"""Counts of a client are those of what it did, and metrics are those of its counts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from inspect import isfunction
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry, generate_latest

from streammeta.client import (
    ClientMetrics,
    LogConfig,
    ObjectLogConfig,
    ReaderStats,
    StreamClient,
    StreamClientConfig,
    WriterConfig,
)
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT, PREPARE_OBJECTS
from streammeta.client.prometheus import ClientCollector
from streammeta.client.resources import tally
from streammeta.storage.errors import StoreRejectedError, StoreUnavailableError
from streammeta.storage.object_format.record import RECORD_HEADER_SIZE
from streammeta.storage.object_store.protocol.base import ObjectStore
from streammeta.storage.object_store.protocol.calls import OperationMetrics, StoreMetrics
from tests.kit.fake_broker import NEVER, writing
from tests.kit.fake_cluster import FakeCluster
from tests.kit.memory_store import MemoryObjectStore
from tests.monitoring.http_calls import samples
from tests.monitoring.sampled import nothing_yet

FLUSHED = WriterConfig(linger_s=NEVER)


def scraped(seen: ClientMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(ClientCollector(lambda: seen))
    text = generate_latest(registry).decode()
    return {name.removeprefix("streammeta_client_"): value for name, value in samples(text).items()}


async def opened(
    cluster: FakeCluster, config: StreamClientConfig, store: MemoryObjectStore | None = None
) -> StreamClient:
    return await StreamClient.open(
        cluster.endpoints, store or MemoryObjectStore(), node_id=1000, node_epoch=1, config=config
    )


async def one_stream(client: StreamClient) -> int:
    (stream_id,) = await client.create_streams([{}])
    (await client.open_streams([stream_id])).require_all()
    return stream_id


async def test_appends_uploads_commits_and_reads_are_counted() -> None:
    async with FakeCluster() as cluster:
        store = MemoryObjectStore()
        config = StreamClientConfig(writer=FLUSHED)
        async with await opened(cluster, config, store) as client:
            stream_id = await one_stream(client)
            await client.writer.append(stream_id, b"x" * 10, 5)
            await client.writer.append_many(stream_id, [b"y"] * 3)
            before = client.metrics()
            flushing = asyncio.create_task(client.flush())
            await asyncio.sleep(0)
            during = client.metrics()
            await flushing
            after = client.metrics()
            for _ in range(2):
                await client.read(stream_id, 0)
            read = client.metrics()
        assert (before.appends, before.append_records) == (2, 8)
        assert before.append_bytes == 10 + 3 + 4 * RECORD_HEADER_SIZE
        assert before.buffered_bytes > before.append_bytes
        assert during.oldest_unsettled_s > 0
        assert (before.oldest_unsettled_s, after.oldest_unsettled_s) == (0, 0)
        assert (before.log_used_bytes, before.log_limit_bytes) == (0, 0), "there is no log"
        assert (before.uploads["stored"], before.commits["accepted"].total) == (0, 0)
        (object_size,) = (len(data) for key, data in store.objects().items() if "/" in key)
        assert (after.uploads, after.upload_bytes) == ({"stored": 1, "failed": 0}, object_size)
        assert (after.upload_times.total, after.commits["accepted"].total) == (1, 1)
        assert (after.commits["refused"].total, after.buffered_bytes) == (0, 0)
        assert read.cache_misses["index"] == 1
        assert read.cache_misses["map"] >= 1
        assert read.fetches >= 1
        sent = {
            kind: read.store_requests[kind] - before.store_requests[kind]
            for kind in tally.STORE_KINDS
        }
        assert sent["put"] == 1
        assert sent["get"] >= read.fetches
        assert sent["delete"] == 0
        assert read.fetched_bytes > 0
        assert read.append_records == after.append_records
        seen = scraped(read)
        assert seen["append_records_total"] == 8
        assert seen['uploads_total{result="stored"}'] == 1
        assert seen['commit_duration_seconds_count{verdict="accepted"}'] == 1
        assert seen['cache_misses_total{cache="index"}'] == 1
        assert seen['store_requests_total{kind="get"}'] == read.store_requests["get"]


def test_every_call_of_a_store_has_a_kind() -> None:
    calls = {name for name, var in vars(ObjectStore).items() if isfunction(var) and name[0] != "_"}
    sums = dict.fromkeys(
        calls - {"until", "metrics", "close"}, OperationMetrics(calls=1, retries=1)
    )
    counted = tally.snapshot(
        tally.ClientTally(), ReaderStats(), store=StoreMetrics(sums)
    ).store_requests
    assert sum(counted.values()) == 2 * len(sums)
    assert min(counted.values()) > 0


async def test_refused_commits_and_failed_uploads_are_counted_apart() -> None:
    async with writing() as (b, writer):
        (stream_id,) = b.cluster.map.streams
        b.store.fail_next("put", StoreRejectedError("no"))
        ack = await writer.append(stream_id, b"x")
        await writer.flush()
        assert ack.exception() is not None
        assert b.client.tally.uploads == {"stored": 0, "failed": 1}
        writer.attach(await b.reopened([stream_id], 1))
        await b.steal(stream_id)
        ack = await writer.append(stream_id, b"x")
        await writer.flush()
        assert ack.exception() is not None
        assert b.client.tally.uploads == {"stored": 1, "failed": 1}
        ended = {verdict: sum(times.counts) for verdict, times in b.client.tally.commits.items()}
        assert ended == {"accepted": 0, "refused": 1, "unanswered": 0}


async def test_a_commit_without_an_answer_is_unanswered_and_its_repetitions_have_a_reason() -> None:
    async with writing(commit_deadline_s=0.5) as (b, writer):
        (stream_id,) = b.cluster.map.streams
        lost = grpc.StatusCode.UNAVAILABLE
        b.cluster.fail_next(PREPARE_OBJECTS, lost, times=1)
        b.cluster.fail_next(COMMIT_STREAM_SET_OBJECT, lost, applied=True, times=10_000)
        ack = await writer.append(stream_id, b"x")
        await writer.flush()
        assert ack.exception() is not None
        assert sum(b.client.tally.commits["unanswered"].counts) == 1
        assert b.client.tally.retries["unreachable"] >= 2
        assert b.client.tally.retries["not_leader"] == 0


async def test_another_leader_is_a_change_and_not_being_it_a_reason() -> None:
    async with FakeCluster(3) as cluster:
        config = StreamClientConfig(writer=FLUSHED)
        async with await opened(cluster, config) as client:
            before = client.metrics()
            cluster.move_leader(1)
            await one_stream(client)
            after = client.metrics()
        assert (before.leader_changes, after.leader_changes) == (0, 1)
        assert after.retries["not_leader"] > before.retries["not_leader"]


async def test_a_write_ahead_log_on_a_disk_counts_bytes_and_flushes(tmp_path: Path) -> None:
    async with FakeCluster() as cluster:
        config = StreamClientConfig(writer=None, wal_directory=tmp_path / "wal", wal=LogConfig())
        async with await opened(cluster, config) as client:
            stream_id = await one_stream(client)
            await client.append(stream_id, b"x" * 1000)
            first = client.metrics()
            await client.append(stream_id, b"x" * 1000)
            second = client.metrics()
        assert (first.log_flushes, second.log_flushes) == (1, 2)
        assert first.log_bytes > 1000
        assert second.log_bytes == 2 * first.log_bytes
        assert second.log_slots == 0
        assert 2000 < second.log_used_bytes < second.log_limit_bytes == LogConfig().max_bytes


async def test_a_write_ahead_log_in_the_bucket_counts_slots() -> None:
    async with FakeCluster() as cluster:
        config = StreamClientConfig(object_log=ObjectLogConfig(linger_s=0.001))
        async with await opened(cluster, config) as client:
            stream_id = await one_stream(client)
            await client.append(stream_id, b"x" * 1000)
            seen = client.metrics()
        assert (seen.log_slots, seen.log_flushes) == (1, 0)
        assert seen.log_bytes > 1000
        assert 1000 < seen.log_used_bytes < seen.log_limit_bytes == ObjectLogConfig().max_bytes


async def test_repeated_uploads_have_a_reason() -> None:
    async with FakeCluster() as cluster:
        store = MemoryObjectStore()
        config = StreamClientConfig(object_log=ObjectLogConfig(linger_s=0.001))
        async with await opened(cluster, config, store) as client:
            stream_id = await one_stream(client)
            await client.append(stream_id, b"x")
            store.fail_next("put", StoreUnavailableError("later"))
            await asyncio.wait_for(client.flush(), 60)
            seen = client.metrics()
        assert seen.retries["upload"] == 1
        assert seen.uploads == {"stored": 1, "failed": 1}


def test_what_can_be_counted_is_there_before_it_happens() -> None:
    seen = scraped(nothing_yet())
    for reason in tally.REASONS:
        assert seen[f'retries_total{{reason="{reason}"}}'] == 0
    assert seen['commit_duration_seconds_bucket{le="+Inf",verdict="unanswered"}'] == 0
    assert seen['commit_duration_seconds_bucket{le="0.0005",verdict="refused"}'] == 0
    assert not any(seen.values())


def test_a_time_is_in_the_class_whose_bound_it_does_not_exceed() -> None:
    times = tally.TimeCounts()
    for took_s in (0.0, 0.0005, 0.00051, 17.0):
        times.add(took_s)
    assert (times.counts[0], times.counts[1], times.counts[-1]) == (2, 1, 1)
    assert times.frozen().total == 4
    assert tally.BOUNDS_S[0] == 0.0005
    assert 16 < tally.BOUNDS_S[-1] < 17


def test_the_client_is_imported_without_the_package() -> None:
    code = "import sys, streammeta.client; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
