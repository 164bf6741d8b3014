"""Starts without the write-ahead log that a node has registered, and ends that leave nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig
from streammeta.client.config import WriterConfig
from streammeta.client.errors import LogMissingError
from streammeta.client.wal.bucket.config import ObjectLogConfig
from tests.kit.real_cluster import FAST, running_cluster, streammeta

pytestmark = pytest.mark.process

_IDS = itertools.count(8000)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Run one controller whose sessions are short."""
    options = (*FAST, "--session-timeout-ms", "2000")
    with running_cluster(tmp_path_factory.mktemp("cluster"), 1, options) as running:
        yield running


def configs(root: Path) -> dict[str, StreamClientConfig]:
    bare = StreamClientConfig(writer=WriterConfig(linger_s=0.01), session_timeout_s=2.0)
    logged = replace(bare, writer=WriterConfig(linger_s=0.01, durability="wal"))
    return {
        "none": bare,
        "disk": replace(logged, wal_directory=root / "log"),
        "empty": replace(logged, wal_directory=root / "empty"),
        "bucket": replace(logged, object_log=ObjectLogConfig(linger_s=0.01)),
    }


async def start(cluster: LocalCluster, node_id: int, config: StreamClientConfig) -> StreamClient:
    return await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=node_id, config=config
    )


async def open_stream(client: StreamClient) -> int:
    (stream_id,) = await client.create_streams([{}])
    (await client.open_streams([stream_id])).require_all()
    await client.append(stream_id, b"0")
    return stream_id


@pytest.mark.parametrize("had", ["disk", "bucket"])
async def test_open_streams_need_their_log(cluster: LocalCluster, tmp_path: Path, had: str) -> None:
    node_id, kinds = next(_IDS), configs(tmp_path)
    async with await start(cluster, node_id, kinds[had]) as client:
        stream_id = await open_stream(client)
    for other in kinds.keys() - {had}:
        with pytest.raises(LogMissingError, match=f"node {node_id}") as refused:
            await start(cluster, node_id, kinds[other])
        assert "allow_missing_log=True" in str(refused.value)
    assert not (tmp_path / "empty").exists(), "a refused start has made a log"
    async with await start(cluster, node_id, kinds[had]) as client:
        assert [stream.stream_id for stream in client.inherited] == [stream_id]
    anyway = replace(kinds["none"], allow_missing_log=True)
    async with await start(cluster, node_id, anyway) as client:
        assert await client.append(stream_id, b"1") == 1


@pytest.mark.parametrize("had", ["disk", "bucket"])
async def test_a_node_without_streams_changes_log(
    cluster: LocalCluster, tmp_path: Path, had: str
) -> None:
    node_id, kinds = next(_IDS), configs(tmp_path)
    client = await start(cluster, node_id, kinds[had])
    await open_stream(client)
    await client.close(close_streams=True)
    for kind in kinds.keys() - {had}:
        client = await start(cluster, node_id, kinds[kind])
        assert client.inherited == ()
        await client.close(close_streams=True)


async def test_a_node_without_a_log_may_get_one(cluster: LocalCluster, tmp_path: Path) -> None:
    node_id, kinds = next(_IDS), configs(tmp_path)
    async with await start(cluster, node_id, kinds["none"]) as client:
        stream_id = await open_stream(client)
    async with await start(cluster, node_id, kinds["disk"]) as client:
        assert [stream.stream_id for stream in client.inherited] == [stream_id]


async def test_streams_of_a_closed_broker_are_taken(cluster: LocalCluster, tmp_path: Path) -> None:
    bare = configs(tmp_path)["none"]
    first = await start(cluster, next(_IDS), bare)
    stream_id = await open_stream(first)
    async with await start(cluster, next(_IDS), bare) as second:
        assert (await second.open_streams([stream_id])).failed
        await first.close()
        while (await second.open_streams([stream_id])).failed:
            pass
        assert await second.append(stream_id, b"1") == 1
        assert [record.payload for record in await second.read(stream_id, 0)] == [b"0", b"1"]


async def test_a_closing_broker_closes_its_streams(cluster: LocalCluster, tmp_path: Path) -> None:
    bare = configs(tmp_path)["none"]
    first = await start(cluster, next(_IDS), bare)
    stream_id = await open_stream(first)
    await first.close(close_streams=True)
    async with await start(cluster, next(_IDS), bare) as second:
        (await second.open_streams([stream_id])).require_all()
        assert await second.append(stream_id, b"1") == 1


async def test_a_command_closes_streams_of_lost_logs(cluster: LocalCluster, tmp_path: Path) -> None:
    kinds, node_id = configs(tmp_path), next(_IDS)
    gone = await start(cluster, node_id, kinds["disk"])
    stream_id = await open_stream(gone)
    at = ("--connect", cluster.connect, "--node-id", str(node_id))
    abandon = partial(streammeta, "node", "abandon", *at, "--close-streams")
    assert (await asyncio.to_thread(abandon))["error"]["code"] == "NODE_IS_ALIVE"
    await gone.close()
    async with await start(cluster, next(_IDS), kinds["none"]) as other:
        while "error" in (done := await asyncio.to_thread(abandon)):
            assert done["error"]["code"] == "NODE_IS_ALIVE"
        assert done["closed_streams"] == 1
        (await other.open_streams([stream_id])).require_all()
        assert await other.append(stream_id, b"1") == 1
