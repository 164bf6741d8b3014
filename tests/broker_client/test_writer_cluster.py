"""The writer and real controllers: order, no gaps, killed leaders."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streammeta.cli.local_cluster import LocalCluster
from streammeta.client import (
    BrokerSession,
    ControllerClient,
    StreamWriter,
    WriterConfig,
)
from streammeta.storage.object_store.local import LocalObjectStore
from tests.kit.fake_broker import check_streams, payload_of
from tests.kit.real_cluster import leader_of, running_cluster

pytestmark = pytest.mark.process

NODE = 1001
CONFIG = WriterConfig(linger_s=0.02, upload_bytes=256 * 1024, max_buffer_bytes=16 << 20)


@asynccontextmanager
async def writing_to(
    cluster: LocalCluster, streams: int
) -> AsyncIterator[tuple[StreamWriter, dict[int, int]]]:
    """Yield a writer, and how many records each of its streams gets; then read them all back."""
    store = LocalObjectStore(Path(cluster.store_uri.removeprefix("file://")))
    async with ControllerClient(cluster.endpoints, rng=random.Random(3)) as client:
        session = await BrokerSession.open(client, NODE, time.time_ns())
        ids = await session.create_streams([{}] * streams)
        opened = (await session.open_streams(dict.fromkeys(ids, 0))).require_all()
        counts = dict.fromkeys(ids, 0)
        async with StreamWriter(session, store, CONFIG) as writer:
            writer.attach(opened.values())
            yield writer, counts
            await writer.flush()
        await check_streams(client, store, counts)


@pytest.mark.parametrize(
    "total", [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_small_records_of_many_streams_keep_their_order(tmp_path: Path, total: int) -> None:
    async def run(cluster: LocalCluster) -> None:
        async with writing_to(cluster, 100) as (writer, counts):
            rng = random.Random(total)
            ids = list(counts)
            written = 0
            pending: dict[asyncio.Future[int], int] = {}
            while written < total:
                stream_id = rng.choice(ids)
                some = rng.choice([1, 1, 1, 7, 30])
                at = counts[stream_id]
                payloads = [payload_of(stream_id, at + i) for i in range(some)]
                if some == 1:
                    ack = await writer.append(stream_id, payloads[0])
                else:
                    ack = await writer.append_many(stream_id, payloads)
                pending[ack] = at
                counts[stream_id] += some
                written += some
            await writer.flush()
            assert [ack.result() for ack in pending] == list(pending.values())

    with running_cluster(tmp_path, 1) as cluster:
        asyncio.run(run(cluster))


@pytest.mark.parametrize(
    "kills", [1, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_leaders_killed_under_load_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    seed = int(os.environ.get("STREAMMETA_SEED", "7"))
    rng = random.Random(seed)

    async def run(cluster: LocalCluster) -> None:
        async with writing_to(cluster, 20) as (writer, counts):
            acks: list[asyncio.Future[int]] = []
            stop = asyncio.Event()

            async def produce() -> None:
                ids = list(counts)
                while not stop.is_set():
                    stream_id = rng.choice(ids)
                    payload = payload_of(stream_id, counts[stream_id])
                    acks.append(await writer.append(stream_id, payload))
                    counts[stream_id] += 1
                    if len(acks) % 20 == 0:
                        await asyncio.sleep(0.001)

            producer = asyncio.create_task(produce())
            for _ in range(kills):
                await progress(acks, 2_000)
                leader = await asyncio.to_thread(leader_of, cluster)
                await asyncio.to_thread(cluster.children[leader].kill)
                await progress(acks, 500)
                await asyncio.to_thread(cluster.start, leader)
            stop.set()
            await producer
            await writer.flush()
            failed = [ack.exception() for ack in acks if ack.exception() is not None]
            assert not failed, f"seed {seed}: {len(failed)} failed, first {failed[0]!r}"

    with running_cluster(tmp_path, 3) as cluster:
        asyncio.run(run(cluster))


async def progress(acks: list[asyncio.Future[int]], more: int) -> None:
    """Wait until `more` appends from now on are acknowledged."""
    start = len(acks)
    deadline = asyncio.get_running_loop().time() + 60
    while len(acks) < start + more or not all(ack.done() for ack in acks[start : start + more]):
        assert asyncio.get_running_loop().time() < deadline, "no progress within 60 s"
        await asyncio.sleep(0.02)
