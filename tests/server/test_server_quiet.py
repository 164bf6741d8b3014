"""A cluster under load, with a bucket, a broker and pages, logs nothing above info: JSON alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient
from tests.kit.real_cluster import STEADY, running_cluster

pytestmark = pytest.mark.process

ROUNDS, STREAMS = 40, 5


def log_of(cluster: LocalCluster, node_id: int) -> list[dict[str, Any]]:
    """Return the lines of a controller's standard error; one that is no JSON is an error."""
    text = (cluster.root / f"controller-{node_id}.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


async def load(cluster: LocalCluster) -> None:
    """Write, read and trim, through a session that ends."""
    store = f"file://{cluster.root / 'bucket'}"
    async with await StreamClient.open(cluster.endpoints, store, node_id=7) as client:
        streams = await client.create_streams([{"topic": "quiet"}] * STREAMS)
        await client.open_streams(streams)
        for number in range(ROUNDS):
            acks = [client.append(each, b"%d" % number) for each in streams]
            await asyncio.gather(*acks)
        for stream in streams:
            records = [bytes(each.payload) async for each in client.iterate(stream)]
            assert records == [b"%d" % number for number in range(ROUNDS)]


def test_nothing_above_info_is_logged_in_normal_operation(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=STEADY) as cluster:
        asyncio.run(load(cluster))
        logs = {node_id: log_of(cluster, node_id) for node_id in cluster.node_ids}
    for node_id, lines in logs.items():
        assert lines[0]["event"] == "controller_starting", "the first line says what runs"
        assert log_of(cluster, node_id)[-1]["event"] == "controller_stopped"
        assert lines[0]["version"]
        assert lines[0]["settings"]["store_uri"].endswith("/bucket")
        loud = [line for line in lines if line["level"] not in ("debug", "info")]
        assert not loud
    assert any(line["event"] == "leader_elected" for lines in logs.values() for line in lines)
