"""The lines of a scrape stay the same, whatever the map holds and strangers ask for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from streammeta.client.parts import BrokerSession, ControllerClient
from tests.kit.certificates import Authority
from tests.kit.real_cluster import STEADY
from tests.kit.waiting import wait_until
from tests.monitoring.planes import Planed, Planes, running
from tests.monitoring.test_metrics import LINES_MAX

STREAMS, STREAMS_A_CALL = 10_000, 2_000
NODES = range(1_000, 1_300)
PATHS = 200


@pytest.mark.process
async def test_streams_nodes_and_unknown_paths_add_no_line(
    authority: Authority, tmp_path: Path
) -> None:
    rng = random.Random(0)
    with running(tmp_path / "run", authority, Planes(False, False, False), STEADY) as planed:
        planed.wait_ready()
        async with ControllerClient(planed.cluster.endpoints) as client:
            await _filled(client, NODES[:1], 1)
            planed.page("/unknown")
            leader = _leader(planed)
            before = set(planed.metrics(leader))
            await _filled(client, NODES, STREAMS)
        for _ in range(PATHS):
            status, _ = planed.page(f"/{rng.randbytes(8).hex()}", leader)
            assert status == 404
        wait_until(lambda: _streams(planed, leader) > STREAMS, "the streams to be counted")
        after = set(planed.metrics(leader))
        status, text = planed.page("/metrics", leader)
    assert after == before
    assert (status, len(text.splitlines()) <= LINES_MAX) == (200, True)


async def _filled(client: ControllerClient, nodes: range, streams: int) -> None:
    """Register brokers, and create streams with a tag of its own each."""
    sessions = [await BrokerSession.open(client, node_id, 1) for node_id in nodes]
    tags = [{"topic": f"topic-{number}"} for number in range(streams)]
    for start in range(0, streams, STREAMS_A_CALL):
        await sessions[0].create_streams(tags[start : start + STREAMS_A_CALL])


def _leader(planed: Planed) -> int:
    return next(
        n for n in planed.cluster.node_ids if planed.metrics(n)["streammeta_quorum_is_leader"]
    )


def _streams(planed: Planed, node_id: int) -> float:
    return planed.metrics(node_id)["streammeta_map_streams"]
