"""A client whose store stops answering for good; prints a line when `asyncio.run` has returned.

Run as `python -m tests.broker_client.closing_child SCENARIO`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from streammeta.client import ObjectLogConfig, StreamClient, StreamClientConfig, WriterConfig
from streammeta.storage.cluster_files.bucket_marker import BucketMarker, create_marker
from streammeta.storage.object_store.protocol.calls import Tally
from tests.fake_bucket import FAKE_UUID
from tests.kit.fake_cluster import NAMESPACE, FakeCluster
from tests.kit.memory_store import MemoryObjectStore

RETURNED = "asyncio.run has returned"
QUICK_S = 0.1


class Stuck(MemoryObjectStore):
    """A store whose calls never end once `is_stuck` is set; `entered` counts those."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()
        self.entered = threading.Semaphore(0)

    @contextmanager
    def _call(self, operation: str, deadline: float | None = None) -> Iterator[Tally]:
        if self.is_stuck.is_set():
            self.entered.release()
            threading.Event().wait()
        with super()._call(operation, deadline) as tally:
            yield tally

    async def wait_for_call(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


async def append(client: StreamClient, store: Stuck, stream_id: int) -> None:
    """Leave an upload, or a slot of a log, that never ends."""
    await client.append(stream_id, b"before")
    store.is_stuck.set()
    ack = await client.writer.append(stream_id, b"after")
    ack.add_done_callback(lambda done: done.cancelled() or done.exception())
    await store.wait_for_call()


async def append_first(client: StreamClient, store: Stuck, stream_id: int) -> None:
    """Leave a look at the bucket's marker that never ends."""
    store.is_stuck.set()
    ack = await client.writer.append(stream_id, b"first")
    ack.add_done_callback(lambda done: done.cancelled() or done.exception())
    await store.wait_for_call()


async def read(client: StreamClient, store: Stuck, stream_id: int) -> None:
    """Leave a read that never ends."""
    await client.append(stream_id, b"before")
    await client.flush()
    store.is_stuck.set()
    reading = asyncio.create_task(client.read(stream_id, 0))
    await store.wait_for_call()
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


MARKER = BucketMarker(cluster_id="fake", cluster_uuid=FAKE_UUID, namespace=NAMESPACE, created_ms=0)

Scenario = Callable[[StreamClient, Stuck, int], Awaitable[None]]
WRITER = WriterConfig(linger_s=0.001, close_deadline_s=QUICK_S)
LOG = ObjectLogConfig(linger_s=0.001, close_deadline_s=QUICK_S)
SCENARIOS: dict[str, tuple[StreamClientConfig, Scenario]] = {
    "upload": (StreamClientConfig(writer=WRITER), append),
    "marker": (StreamClientConfig(writer=WRITER), append_first),
    "read": (StreamClientConfig(writer=WRITER), read),
    "log": (
        StreamClientConfig(
            writer=WriterConfig(durability="wal", linger_s=0.001, close_deadline_s=QUICK_S),
            object_log=LOG,
        ),
        append,
    ),
}


async def main(scenario: str) -> None:
    config, leave_a_call = SCENARIOS[scenario]
    store = Stuck()
    create_marker(store, MARKER)
    async with FakeCluster() as cluster:
        client = await StreamClient.open(
            cluster.endpoints, store, node_id=1, node_epoch=1, config=config
        )
        (stream_id,) = await client.create_streams([{}])
        (await client.open_streams([stream_id])).require_all()
        await leave_a_call(client, store, stream_id)
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    print(RETURNED, flush=True)
