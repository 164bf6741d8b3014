"""Two processes of one node epoch with a log on disk: the second one is refused, and harms none."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig
from streammeta.controller.features import SECTIONS
from tests.kit.real_cluster import FAST, raise_level, running_cluster

pytestmark = pytest.mark.process

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


async def test_a_second_process_of_an_epoch_is_refused_though_it_has_a_copy_of_the_log(
    tmp_path: Path,
) -> None:
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
