"""Brokers with a write-ahead log, killed at every step, again and again: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient, StreamClientConfig
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.client.wal.disk.log import WriteAheadLog
from streammeta.client.wal.disk.set_aside import read_set_aside
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.local import LocalObjectStore
from tests.broker_client.wal_child import STEPS, Settings
from tests.broker_client.wal_tools import encoded
from tests.kit.doomed_child import run_child
from tests.kit.fake_cluster import FakeCluster
from tests.kit.real_cluster import running_cluster
from tests.kit.seeds import seeds

STREAMS = 7
LATEST = {"time": (300, 1200), "write": (1, 60), "sync": (1, 60), "synced": (1, 60)}
"""In which range a step is ordered to be the last; 1 to 12 for the others."""


@dataclass(frozen=True)
class Life:
    """How one broker ended, and, if it came so far, what it found in its log."""

    was_killed: bool
    committed: int = 0
    uploaded: int = 0
    set_aside: int = 0


async def lived(settings: Settings) -> Life:
    """Run a broker to its end."""
    was_killed, out = await run_child(
        "tests.broker_client.wal_child",
        settings.encode(),
        may_die=bool(settings.step),
    )
    return Life(was_killed, *json.loads(out)) if out else Life(was_killed)


async def check_streams(endpoints: list[str], root: Path) -> int:
    """Compare the streams with what was acknowledged; return how many records there are."""
    acknowledged = defaultdict[int, dict[int, str]](dict)
    for line in (root / "acknowledged").read_text().splitlines():
        stream, offset, name = line.split()
        acknowledged[int(stream)][int(offset)] = name
    seen = 0
    async with await StreamClient.open(endpoints, LocalObjectStore(root / "bucket")) as client:
        for stream_id, expected in acknowledged.items():
            names: list[str] = []
            async for record in client.iterate(stream_id):
                assert record.base_offset == len(names)
                names.append(record.payload.decode().rstrip())
            for at, name in expected.items():
                assert at < len(names), f"{name} of stream {stream_id} is lost"
                assert names[at] == name
            numbers = [tuple(map(int, name.split("."))) for name in names]
            assert numbers == sorted(set(numbers)), f"stream {stream_id} is out of order"
            seen += len(names)
    return seen


async def storm(
    endpoints: list[str],
    root: Path,
    rounds: list[tuple[str, int]],
    seed: int,
    before_round: Callable[[], None] = lambda: None,
    records: int = 700,
) -> int:
    """Kill a broker once in each round, then let a last one finish; return how many were killed."""
    committed = uploaded = kills = 0
    for epoch, (step, at) in enumerate([*rounds, ("", 0)], start=1):
        before_round()
        life = await lived(
            Settings(endpoints, str(root), epoch, STREAMS, records, seed + epoch, step, at)
        )
        kills += life.was_killed
        committed += life.committed
        uploaded += life.uploaded
        assert life.set_aside == 0, f"seed {seed}, round {epoch}: nothing may be set aside"
    assert uploaded > 0, "no round left anything to upload"
    assert committed > 0, "no round left anything that is committed"
    total = await check_streams(endpoints, root)
    acknowledged = len((root / "acknowledged").read_text().splitlines())
    assert records <= acknowledged <= total
    assert not list((root / "log").glob("*.aside"))
    assert len(list((root / "log").glob("*.wal"))) == 1
    return kills


async def storm_on_fakes(root: Path, rounds: list[tuple[str, int]], seed: int) -> int:
    (root / "bucket").mkdir()
    async with FakeCluster() as cluster:
        return await storm(cluster.endpoints, root, rounds, seed)


@pytest.mark.process
def test_a_broker_killed_at_each_step_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    rounds = [
        *(("write", 9), ("sync", 12), ("committed", 3), ("synced", 12), ("uploaded", 5)),
        *(("remove", 2), ("time", 900)),
    ]
    assert {step for step, _ in rounds} == set(STEPS)
    assert asyncio.run(storm_on_fakes(tmp_path, rounds, 42)) >= len(rounds) - 1


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(2, slow=2))
def test_a_broker_killed_again_and_again_loses_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    steps = [rng.choice(STEPS) for _ in range(40)]
    rounds = [(step, rng.randint(*LATEST.get(step, (1, 12)))) for step in steps]
    asyncio.run(storm_on_fakes(tmp_path, rounds, seed))


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Run one real controller."""
    with running_cluster(tmp_path_factory.mktemp("controller"), 1) as cluster:
        yield cluster


@pytest.mark.process
def test_a_broker_killed_on_a_real_controller_loses_nothing(controller: LocalCluster) -> None:
    rounds = [("uploaded", 3), ("committed", 2), ("synced", 9)]
    kills = asyncio.run(storm(controller.endpoints, controller.root, rounds, 7))
    assert kills == len(rounds)


@pytest.mark.process
async def test_what_another_broker_has_overtaken_is_set_aside(controller: LocalCluster) -> None:
    """Records are logged, and another node commits its own at the same offsets meanwhile."""
    place, directory = (controller.endpoints, controller.store_uri), controller.root / "overtaken"
    async with await StreamClient.open(*place, node_id=2000, node_epoch=1) as first:
        (stream_id,) = await first.create_streams([{}])
        (await first.open_streams([stream_id])).require_all()
        identity = LogIdentity(first.session.namespace, 2000, 1)
        logged = [RecordBatch(stream_id, 0, offset, 1, b"mine") for offset in range(3)]
        async with await WriteAheadLog.open(directory, identity) as log:
            for record in logged:
                log.append(*encoded(record))
        (await first.close_streams([stream_id])).require_all()
    async with await StreamClient.open(*place, node_id=3000) as second:
        (await second.open_streams([stream_id])).require_all()
        await second.append_many(stream_id, [b"theirs", b"theirs"])
    config = StreamClientConfig(wal_directory=directory)
    async with await StreamClient.open(*place, node_id=2000, node_epoch=2, config=config) as again:
        report = again.recovery
        assert report is not None
        assert (report.committed, report.uploaded, report.set_aside) == (0, 0, 3)
        assert report.file is not None
        assert list(read_set_aside(report.file))[1:] == logged
        found = [record.payload async for record in again.iterate(stream_id)]
        assert found == [b"theirs"] * 2


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(2))
def test_a_broker_killed_while_the_leader_dies_loses_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    steps = [rng.choice(STEPS) for _ in range(12)]
    rounds = [(step, rng.randint(*LATEST.get(step, (1, 12)))) for step in steps]
    with running_cluster(tmp_path, 3) as cluster:
        due: list[asyncio.TimerHandle] = []

        def let_one_die() -> None:
            if due:
                due.pop().cancel()
            for node_id, child in cluster.children.copy().items():
                if not child.is_running:
                    cluster.start(node_id)
            victim = cluster.children[rng.choice(cluster.node_ids)]
            due.append(asyncio.get_running_loop().call_later(rng.uniform(0.5, 2), victim.kill))

        asyncio.run(storm(cluster.endpoints, tmp_path, rounds, seed, let_one_die))
