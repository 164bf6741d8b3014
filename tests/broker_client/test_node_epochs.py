"""A node whose process once had a fast clock registers again, by whatever clock comes next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from streammeta.cli.local_cluster import LocalCluster
from streammeta.client import ControllerClient, StreamClient, errors
from streammeta.client.node_epochs import register
from tests.kit.real_cluster import leader_of, running_cluster

pytestmark = pytest.mark.process

YEAR_MS = 365 * 86_400_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One real controller over a directory as the bucket."""
    with running_cluster(tmp_path_factory.mktemp("epochs"), 1) as running:
        leader_of(running)
        yield running


async def test_processes_after_one_with_a_fast_clock_register_and_fence_it(
    cluster: LocalCluster,
) -> None:
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


async def start(cluster: LocalCluster, node_id: int, *clock_ms: int) -> int:
    """Register with a clock that shows these times, one after the other; return the epoch."""
    times = iter(clock_ms)
    async with ControllerClient(cluster.endpoints) as client:
        session = await register(
            client,
            node_id,
            None,
            wal_config="",
            tags=None,
            timeout_s=0.0,
            now_ms=lambda: next(times),
        )
        return session.node.node_epoch


async def test_a_slow_clock_registers_above_the_process_before(cluster: LocalCluster) -> None:
    assert await start(cluster, 12, 5 * YEAR_MS) == 5 * YEAR_MS
    assert await start(cluster, 12, 5 * YEAR_MS + 1) == 5 * YEAR_MS + 1, "the time, if it is larger"
    assert await start(cluster, 12, 1, 2) > 5 * YEAR_MS + 1


async def test_a_process_that_another_overtook_does_not_fence_it(cluster: LocalCluster) -> None:
    await start(cluster, 13, 1_000)
    with pytest.raises(errors.NodeEpochExpiredError):
        await start(cluster, 13, 999, 1_001)
    with pytest.raises(errors.NodeEpochExpiredError):
        await start(cluster, 13, 999, 1_000)
