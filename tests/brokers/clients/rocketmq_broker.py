"""A broker of RocketMQ's shape as a process: dispatches its local queues until it is killed.

Usage: rocketmq_broker.py ENDPOINTS STORE NODE_ID [BUCKET]. With a bucket its segments are chunks.
Prints a line for each queue and commit.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from streammeta.brokers.rocketmq.cluster.cluster_store import Backend, QueueStore, StoreConfig
from streammeta.brokers.rocketmq.cluster.upload_pool import PoolConfig
from streammeta.brokers.rocketmq.dispatch import GroupCommit
from streammeta.brokers.rocketmq.key_index_service import IndexSizes
from streammeta.brokers.rocketmq.message_file import FileSizes
from streammeta.client import StreamClient
from tests.brokers.rocketmq_messages import LocalMessages

CONFIG = StoreConfig(
    files=FileSizes(40_000, 20 * 500),
    index=IndexSizes(100, 2000),
    pool=PoolConfig(linger_s=0.005, record_bytes=2000),
    groups=GroupCommit(count=20),
)
QUEUES = (("T", 0), ("T", 1), ("U", 0))
MESSAGES = 100_000


async def _dispatch(store: QueueStore, topic: str, queue_id: int) -> None:
    local = LocalMessages(topic, queue_id, MESSAGES)
    dispatcher = await store.dispatcher(topic, queue_id, local)
    if not dispatcher.file.is_initialised:
        await dispatcher.file.init_offset(0)
    while True:
        await dispatcher.dispatch(force=True)
        print(f"committed {topic} {queue_id} {dispatcher.file.commit_offset}", flush=True)


async def _tend(store: QueueStore) -> None:
    while True:
        await asyncio.sleep(0.1)
        await store.checkpoint()
        await store.client.compact()


def config_of(bucket: str | None) -> StoreConfig:
    """Return the configuration for segments in streams, or in chunks of a bucket."""
    return CONFIG if bucket is None else replace(CONFIG, backend=Backend.CHUNKS, bucket=bucket)


async def _run(endpoints: list[str], store_uri: str, node_id: int, bucket: str | None) -> None:
    async with await StreamClient.open(endpoints, store_uri, node_id=node_id) as client:
        store = await QueueStore.open(client, "c", "b", config_of(bucket))
        await asyncio.gather(_tend(store), *(_dispatch(store, *queue) for queue in QUEUES))


if __name__ == "__main__":
    endpoints, store_uri, node_id, *rest = sys.argv[1:]
    asyncio.run(_run(endpoints.split(","), store_uri, int(node_id), rest[0] if rest else None))
