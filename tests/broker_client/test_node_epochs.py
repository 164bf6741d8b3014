"""A node whose process once had a fast clock registers again, by whatever clock comes next."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig, errors
from streammeta.client.nodes.node_epochs import register
from streammeta.client.parts import ControllerClient
from streammeta.controller.features import SECTIONS
from tests.kit.fake_cluster import FakeCluster
from tests.kit.real_cluster import FAST, raise_level, running_cluster

YEAR_MS = 365 * 86_400_000


@pytest.mark.process
async def test_processes_after_a_fast_clock_register_and_fence_it(cluster: LocalCluster) -> None:
    place = (cluster.endpoints, cluster.store_uri)
    fast = time.time_ns() // 1_000_000 + 10 * YEAR_MS
    async with await StreamClient.open(*place, node_id=11, node_epoch=fast) as old:
        epochs = [fast]
        for _ in range(3):
            async with await StreamClient.open(*place, node_id=11) as client:
                epochs.append(client.session.node.node_epoch)
        with pytest.raises(errors.NodeEpochExpiredError):
            await old.session.heartbeat()
    assert all(0 < later - earlier <= 60_000 for earlier, later in pairwise(epochs))


async def start(cluster: FakeCluster, *clock_ms: int) -> int:
    """Register with a clock that shows these times, one after the other; return the epoch."""
    times = iter(clock_ms)
    async with ControllerClient(cluster.endpoints) as client:
        session = await register(
            client, 7, None, wal_config="", tags=None, timeout_s=0.0, now_ms=lambda: next(times)
        )
        return session.node.node_epoch


async def test_a_clock_set_back_registers_a_larger_epoch(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeCluster() as cluster:
        assert await start(cluster, 5 * YEAR_MS) == 5 * YEAR_MS
        assert await start(cluster, 5 * YEAR_MS + 1) == 5 * YEAR_MS + 1, "the time, if it is larger"
        assert 0 < await start(cluster, 1, 2) - (5 * YEAR_MS + 1) <= 60_000
    assert f"{5 * YEAR_MS - 1} ms ahead of this machine's clock" in caplog.text


async def test_a_process_that_another_overtook_does_not_fence_it() -> None:
    async with FakeCluster() as cluster:
        await start(cluster, 1_000)
        for now_ms in (1_000, 1_001):
            with pytest.raises(errors.NodeEpochExpiredError):
                await start(cluster, 999, now_ms)
        assert cluster.map.nodes == {7: 1_000}


NODE = 1001

_CHILD = """
import asyncio, sys
from streammeta.client import StreamClient, StreamClientConfig

async def main(endpoints, bucket, epoch, directory):
    config = StreamClientConfig(wal_directory=directory)
    try:
        async with await StreamClient.open(
            endpoints.split(","), bucket, node_id=1001, node_epoch=int(epoch), config=config
        ) as client:
            print("opened", len(client.inherited))
    except Exception as error:
        print(type(error).__name__, error)

asyncio.run(main(*sys.argv[1:]))
"""


async def open_elsewhere(cluster: LocalCluster, epoch: int, directory: Path) -> str:
    """Open a client in a process of its own; return what it printed."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD),
        *(",".join(cluster.endpoints), cluster.store_uri, str(epoch), str(directory)),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await child.communicate()
    return printed.decode()


@pytest.mark.process
async def test_a_second_process_of_an_epoch_is_refused_even_with_its_log(tmp_path: Path) -> None:
    ours, copied = tmp_path / "wal", tmp_path / "copy"
    config = StreamClientConfig(wal_directory=ours)
    with running_cluster(tmp_path, 1, FAST) as cluster:
        await asyncio.to_thread(raise_level, cluster, SECTIONS["node_processes"])
        async with await StreamClient.open(
            cluster.endpoints, cluster.store_uri, node_id=NODE, node_epoch=5, config=config
        ) as client:
            (stream_id,) = await client.create_streams([{}])
            (await client.open_streams([stream_id])).require_all()
            assert await client.append(stream_id, b"first") == 0
            shutil.copytree(ours, copied)

            printed = await open_elsewhere(cluster, 5, copied)
            assert printed.startswith("NodeEpochExpiredError")
            assert "larger node epoch" in printed
            assert await client.append(stream_id, b"second") == 1
            await client.flush()
            payloads = [record.payload async for record in client.iterate(stream_id)]
            assert payloads == [b"first", b"second"]
        assert (await open_elsewhere(cluster, 5, ours)).startswith("NodeEpochExpiredError")
        assert (await open_elsewhere(cluster, 6, ours)).startswith("opened 1")
