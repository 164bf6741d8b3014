"""A broker of RocketMQ's shape, killed while it dispatches, indexes and compacts."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from streammeta.brokers.rocketmq.cluster.cluster_store import Backend, QueueStore
from streammeta.brokers.rocketmq.formats.consume_queue import ITEM_SIZE, decode_items
from streammeta.brokers.rocketmq.formats.message import decode_message, with_physical_offset
from streammeta.brokers.rocketmq.formats.metadata import Queue
from streammeta.brokers.rocketmq.message_file import MessageFile
from streammeta.cli.local.local_cluster import LocalCluster, start_child
from streammeta.client import StreamClient
from tests.brokers.clients.rocketmq_broker import QUEUES, config_of
from tests.brokers.rocketmq_messages import key, message
from tests.kit.real_cluster import raise_level, running_cluster

pytestmark = pytest.mark.process

_SCRIPT = Path(__file__).parent / "clients" / "rocketmq_broker.py"
_ROOT = Path(__file__).parent.parent.parent


def _killed(cluster: LocalCluster, commits: int, bucket: str | None) -> dict[tuple[str, int], int]:
    """Run a broker until it has made so many commits, and kill it; return what it committed."""
    command = [sys.executable, str(_SCRIPT), ",".join(cluster.endpoints), cluster.store_uri, "9"]
    command += [bucket] if bucket else []
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    child = start_child("rocketmq", command, cluster.root / "rocketmq.log", env)
    ends: dict[tuple[str, int], int] = {}
    try:
        for _ in range(commits):
            line = child.read_line()
            assert line, child.log_tail()
            _, topic, queue_id, end = line.split()
            ends[topic, int(queue_id)] = int(end)
    finally:
        child.kill()
    return ends


async def _check(
    cluster: LocalCluster, ends: dict[tuple[str, int], int], bucket: str | None = None
) -> None:
    """Assert that items point at their messages, and that nothing acknowledged is missing."""
    async with await StreamClient.open(cluster.endpoints, cluster.store_uri, node_id=9) as client:
        store = await QueueStore.open(client, "c", "b", config_of(bucket))
        for (topic, queue_id), acknowledged in ends.items():
            file = store.files[Queue("b", topic, queue_id)]
            end = file.commit_offset
            assert end >= acknowledged
            items = decode_items(await file.consume_queue.read(0, end * ITEM_SIZE))
            assert len(items) == end
            for offset, item in enumerate(items):
                data = await _message_at(file, item.commit_log_offset, item.message_size)
                wanted = message(topic, queue_id, offset)
                assert data == with_physical_offset(wanted, item.commit_log_offset)
        queue_ends = [store.files[Queue("b", "T", queue_id)].commit_offset for queue_id in (0, 1)]
        last = min(queue_ends) - 1
        found = await store.fetcher.query("T", key(last), 999)
        offsets = {decode_message(data).queue_offset for data in found}
        assert last in offsets
        await store.close()


async def _message_at(file: MessageFile, place: int, size: int) -> bytes:
    return await file.commit_log.read(place, size)


@pytest.mark.parametrize("backend", Backend)
def test_what_is_dispatched_never_shows_before_its_data_over_kills(
    tmp_path: Path, backend: Backend
) -> None:
    (tmp_path / "chunks").mkdir()
    bucket = f"file://{tmp_path}/chunks" if backend is Backend.CHUNKS else None
    with running_cluster(tmp_path, 1) as cluster:
        raise_level(cluster, 3)
        ends: dict[tuple[str, int], int] = {}
        for commits in (7, 31, 12):
            ends |= _killed(cluster, commits, bucket)
        assert set(ends) == set(QUEUES)
        asyncio.run(_check(cluster, ends, bucket))
