"""A node whose process once had a fast clock registers again, by whatever clock comes next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, errors
from streammeta.client.nodes.node_epochs import register
from streammeta.client.parts import ControllerClient
from tests.kit.fake_cluster import FakeCluster
from tests.kit.real_cluster import leader_of, running_cluster

YEAR_MS = 365 * 86_400_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One real controller over a directory as the bucket."""
    with running_cluster(tmp_path_factory.mktemp("epochs"), 1) as running:
        leader_of(running)
        yield running


@pytest.mark.process
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


async def start(cluster: FakeCluster, *clock_ms: int) -> int:
    """Register with a clock that shows these times, one after the other; return the epoch."""
    times = iter(clock_ms)
    async with ControllerClient(cluster.endpoints) as client:
        session = await register(
            client,
            7,
            None,
            wal_config="",
            tags=None,
            timeout_s=0.0,
            now_ms=lambda: next(times),
        )
        return session.node.node_epoch


async def test_a_clock_that_was_set_back_registers_above_the_process_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
