"""Brokers whose machines are gone for good: another recovers their logs from the bucket."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import Child, LocalCluster, start_child
from streammeta.client import ObjectLogConfig, StreamClient, StreamClientConfig
from streammeta.storage.object_log.slot import logs_prefix, parse_log_key
from streammeta.storage.object_store.local import LocalObjectStore
from tests.broker_client.marathon_broker import (
    RECORD_BYTES,
    Settings,
    count_notes,
    payload_of,
    read_notes,
)
from tests.kit.real_cluster import FAST, running_cluster
from tests.kit.waiting import until

pytestmark = pytest.mark.process

OPTIONS = (*FAST, "--session-timeout-ms", "5000")
SURVIVOR = 2001
STREAMS = 5
PATIENCE_S = 90.0
NEVER_S = 3600.0


def settings_of(cluster: LocalCluster, node_id: int) -> Settings:
    """Return a broker that commits nothing while it lives, so all it acknowledges is in its log."""
    return Settings(
        endpoints=cluster.endpoints,
        root=str(cluster.root),
        node_id=node_id,
        node_epoch=1,
        streams=STREAMS,
        records=10_000_000,
        durability="object_log",
        upload_bytes=30 << 20,
        linger_s=NEVER_S,
    )


@contextmanager
def brokers(cluster: LocalCluster, node_ids: Sequence[int]) -> Iterator[dict[int, Child]]:
    """Run brokers that write."""
    children: dict[int, Child] = {}
    try:
        for node_id in node_ids:
            folder = cluster.root / f"machine-{node_id}"
            folder.mkdir()
            children[node_id] = start_child(
                f"broker {node_id}",
                [
                    sys.executable,
                    *("-m", "tests.broker_client.marathon_broker"),
                    settings_of(cluster, node_id).encode(),
                ],
                folder / "log",
            )
        yield children
    finally:
        for child in children.values():
            child.process.send_signal(signal.SIGCONT)
            child.kill()


async def check_all(cluster: LocalCluster, client: StreamClient, node_ids: Sequence[int]) -> None:
    """Compare every stream with what was acknowledged of it."""
    for node_id in node_ids:
        ends: dict[int, int] = {}
        for stream_id, end in read_notes(settings_of(cluster, node_id).notes):
            ends[stream_id] = max(end, ends.get(stream_id, 0))
        assert len(ends) == STREAMS
        assert sum(ends.values()) > 0
        for stream_id, end in ends.items():
            offset = 0
            async for record in client.iterate(stream_id):
                assert record.base_offset == offset, (
                    f"stream {stream_id} has a gap, or {offset} twice"
                )
                assert record.payload == payload_of(stream_id, offset)
                assert len(record.payload) == RECORD_BYTES
                offset += 1
            assert offset >= end, f"stream {stream_id}: acknowledged to {end}, readable to {offset}"


async def survivor(cluster: LocalCluster) -> StreamClient:
    config = StreamClientConfig(object_log=ObjectLogConfig(linger_s=0.02))
    return await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=SURVIVOR, config=config
    )


async def test_what_brokers_acknowledged_outlives_their_machines(tmp_path: Path) -> None:
    node_ids = (1001, 1002)
    with (
        running_cluster(tmp_path, 1, OPTIONS) as cluster,
        brokers(cluster, node_ids) as children,
    ):
        async with await survivor(cluster) as client:
            notes = [settings_of(cluster, node_id).notes for node_id in node_ids]
            await until(lambda: min(map(count_notes, notes)) > 40, "records acknowledged")
            for node_id in node_ids:
                children[node_id].kill()
                shutil.rmtree(cluster.root / f"machine-{node_id}")
            await until(lambda: len(client.failovers) == len(node_ids), "both recovered")
            assert {failover.node.node_id for failover in client.failovers} == set(node_ids)
            assert all(one.uploaded > 0 and not one.set_aside for one in client.failovers)
            assert [failover.closed_streams for failover in client.failovers] == [STREAMS, STREAMS]
            await check_all(cluster, client, node_ids)
            namespace = client.session.namespace
        # Each recovered log leaves a seal and a mark, the survivor's a claim and a seal.
        store = LocalObjectStore(cluster.root / "bucket")
        left = list(store.list_objects(logs_prefix(namespace)))
        assert all(parse_log_key(entry.key, namespace) is not None for entry in left)
        assert len(left) <= 2 * len(node_ids) + 2
        assert sum(entry.size for entry in left) < 1000


async def test_a_broker_that_was_stopped_acknowledges_nothing_more(tmp_path: Path) -> None:
    node_id = 1001
    with (
        running_cluster(tmp_path, 1, OPTIONS) as cluster,
        brokers(cluster, [node_id]) as children,
    ):
        async with await survivor(cluster) as client:
            settings, zombie = settings_of(cluster, node_id), children[node_id]
            await until(lambda: count_notes(settings.notes) > 40, "records acknowledged")
            zombie.process.send_signal(signal.SIGSTOP)
            await until(lambda: bool(client.failovers), "recovered")
            (report,) = client.failovers
            streams = sorted({stream_id for stream_id, _ in read_notes(settings.notes)})
            (await client.open_streams(streams)).require_all()
            for stream_id in streams:  # its records continue where those of the zombie end
                offset = client.writer.next_offset(stream_id)
                assert await client.append(stream_id, payload_of(stream_id, offset)) == offset
            zombie.process.send_signal(signal.SIGCONT)
            await until(lambda: not zombie.is_running, "end of the broker that was taken for dead")
            assert zombie.process.returncode != 0
            assert report.uploaded > 0
            await client.flush()
            await check_all(cluster, client, [node_id])
