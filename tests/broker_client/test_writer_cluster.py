"""The writer and real controllers: order, no gaps, killed leaders, two processes of one node."""

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
    NodeEpochExpiredError,
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
async def client_of(cluster: LocalCluster) -> AsyncIterator[ControllerClient]:
    async with ControllerClient(cluster.endpoints, rng=random.Random(3)) as client:
        yield client


def store_of(cluster: LocalCluster) -> LocalObjectStore:
    return LocalObjectStore(Path(cluster.store_uri.removeprefix("file://")))


@pytest.mark.parametrize(
    "total", [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_small_records_of_many_streams_keep_their_order(tmp_path: Path, total: int) -> None:
    async def run(cluster: LocalCluster) -> None:
        store = store_of(cluster)
        async with client_of(cluster) as client:
            session = await BrokerSession.open(client, NODE, time.time_ns())
            ids = await session.create_streams([{}] * 100)
            opened = (await session.open_streams(dict.fromkeys(ids, 0))).require_all()
            rng = random.Random(total)
            counts = dict.fromkeys(ids, 0)
            async with StreamWriter(session, store, CONFIG) as writer:
                writer.attach(opened.values())
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
            await check_streams(client, store, counts)

    with running_cluster(tmp_path, 1) as cluster:
        asyncio.run(run(cluster))


@pytest.mark.parametrize(
    "kills", [1, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_leaders_killed_under_load_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    seed = int(os.environ.get("STREAMMETA_SEED", "7"))
    rng = random.Random(seed)

    async def run(cluster: LocalCluster) -> None:
        store = store_of(cluster)
        async with client_of(cluster) as client:
            session = await BrokerSession.open(client, NODE, time.time_ns())
            ids = await session.create_streams([{}] * 20)
            opened = (await session.open_streams(dict.fromkeys(ids, 0))).require_all()
            counts = dict.fromkeys(ids, 0)
            acks: list[asyncio.Future[int]] = []
            stop = asyncio.Event()
            async with StreamWriter(session, store, CONFIG) as writer:
                writer.attach(opened.values())

                async def produce() -> None:
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
            await check_streams(client, store, counts)

    with running_cluster(tmp_path, 3) as cluster:
        asyncio.run(run(cluster))


async def progress(acks: list[asyncio.Future[int]], more: int) -> None:
    """Wait until `more` appends from now on are acknowledged."""
    start = len(acks)
    deadline = asyncio.get_running_loop().time() + 60
    while len(acks) < start + more or not all(ack.done() for ack in acks[start : start + more]):
        assert asyncio.get_running_loop().time() < deadline, "no progress within 60 s"
        await asyncio.sleep(0.02)


def test_of_two_processes_of_a_node_the_older_one_stops_at_once(tmp_path: Path) -> None:
    async def run(cluster: LocalCluster) -> None:
        store = store_of(cluster)
        async with client_of(cluster) as client, client_of(cluster) as other_client:
            old = await BrokerSession.open(client, NODE, 1)
            ids = await old.create_streams([{}] * 3)
            opened = (await old.open_streams(dict.fromkeys(ids, 0))).require_all()
            counts = dict.fromkeys(ids, 0)
            old_writer = StreamWriter(old, store, CONFIG)
            old_writer.attach(opened.values())
            for stream_id in ids:
                await old_writer.append(stream_id, payload_of(stream_id, 0))
                counts[stream_id] += 1
            await old_writer.flush()

            new = await BrokerSession.open(other_client, NODE, 2)
            lost = [await old_writer.append(stream_id, b"never") for stream_id in ids]
            with pytest.raises(NodeEpochExpiredError, match="a newer one speaks for the node"):
                await old_writer.flush()
            for ack in lost:
                with pytest.raises(NodeEpochExpiredError):
                    await ack
            with pytest.raises(NodeEpochExpiredError):
                await old_writer.append(ids[0], b"never")
            await old_writer.close()

            async with StreamWriter(new, store, CONFIG) as writer:
                writer.attach(new.inherited)
                for stream_id in ids:
                    await writer.append(stream_id, payload_of(stream_id, 1))
                    counts[stream_id] += 1
                await writer.flush()
            await check_streams(client, store, counts)

    with running_cluster(tmp_path, 1) as cluster:
        asyncio.run(run(cluster))
