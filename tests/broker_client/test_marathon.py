"""Many small records in many streams, by brokers that are killed at random: none lost, in order.

`STREAMMETA_SEED` replays the kills of a run that failed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from streammeta.cli.local.local_cluster import Child, LocalCluster, start_child
from streammeta.client import StreamClient
from tests.broker_client.marathon_broker import MANY, Settings, count_notes, payload_of, read_notes
from tests.kit.real_cluster import running_cluster

pytestmark = pytest.mark.process

FIRST_NODE = 1001
PROGRESS_S = 120.0


class Brokers:
    """The brokers of one run, the even ones with a write-ahead log; each is started again."""

    def __init__(
        self,
        cluster: LocalCluster,
        streams: int,
        records: int,
        count: int,
        log: Literal["wal", "object_log"],
    ) -> None:
        self._root = cluster.root
        self._settings = [
            Settings(
                endpoints=cluster.endpoints,
                root=str(cluster.root),
                node_id=FIRST_NODE + number,
                node_epoch=1,
                streams=streams // count,
                records=records // count,
                durability="object" if number % 2 else log,
            )
            for number in range(count)
        ]
        self._epochs = [0] * count
        self._children: list[Child] = [self._started(number) for number in range(count)]

    def _started(self, number: int) -> Child:
        self._epochs[number] += 1
        settings = replace(self._settings[number], node_epoch=self._epochs[number])
        return start_child(
            f"broker {settings.node_id} of epoch {settings.node_epoch}",
            [sys.executable, "-m", "tests.broker_client.marathon_broker", settings.encode()],
            self._root / f"broker-{settings.node_id}-{settings.node_epoch}.log",
        )

    def acknowledged(self) -> int:
        """Return how many appends were acknowledged, by all processes together."""
        return sum(count_notes(settings.notes) for settings in self._settings)

    def ends(self) -> dict[int, int]:
        """Return up to where each stream was acknowledged."""
        ends: dict[int, int] = {}
        for settings in self._settings:
            for stream_id, end in read_notes(settings.notes):
                ends[stream_id] = max(end, ends.get(stream_id, 0))
        return ends

    def kill_one(self, rng: random.Random) -> bool:
        """Kill a broker that still writes and start its next process; False if all are done."""
        running = [number for number, child in enumerate(self._children) if child.is_running]
        if not running:
            return False
        number = rng.choice(running)
        self._children[number].kill()
        self._children[number] = self._started(number)
        return True

    def check(self) -> bool:
        """Return whether one still runs; one that failed fails the test."""
        for child in self._children:
            code = child.process.poll()
            assert code in (None, 0), f"{child.name} ended with {code}:\n{child.log_tail()}"
        return any(child.is_running for child in self._children)

    def stop(self) -> None:
        for child in self._children:
            child.kill()


def wait_until_acknowledged(brokers: Brokers, appends: int) -> None:
    """Wait until so many appends are acknowledged or all brokers are done."""
    seen, deadline = -1, 0.0
    while (now := brokers.acknowledged()) < appends and brokers.check():
        if now > seen:
            seen, deadline = now, time.monotonic() + PROGRESS_S
        assert time.monotonic() < deadline, f"nothing acknowledged in {PROGRESS_S:.0f} s"
        time.sleep(0.02)


async def read_all(cluster: LocalCluster, ends: dict[int, int]) -> int:
    """Read every stream and compare it; return how many records there are."""
    total = 0
    async with await StreamClient.open(cluster.endpoints, cluster.store_uri) as client:
        async for stream_id, records in client.reader.read_streams(list(ends)):
            for offset, record in enumerate(records):
                assert record.base_offset == offset
                assert record.payload == payload_of(stream_id, offset)
            assert len(records) >= ends[stream_id], f"stream {stream_id} has lost records"
            total += len(records)
    return total


@pytest.mark.parametrize(
    ("records", "streams", "kills", "log"),
    [
        (80_000, 40, 3, "wal"),
        (80_000, 40, 3, "object_log"),
        *(
            pytest.param(
                *(10_000_000, 1000, 40, log),
                marks=[pytest.mark.slow, pytest.mark.timeout(1800)],
            )
            for log in ("wal", "object_log")
        ),
    ],
)
def test_brokers_killed_at_random_lose_nothing_that_was_acknowledged(
    tmp_path: Path, records: int, streams: int, kills: int, log: Literal["wal", "object_log"]
) -> None:
    seed = int(os.environ.get("STREAMMETA_SEED", "1"))
    rng = random.Random(seed)
    appends = records // ((MANY + 1) // 2)
    moments = sorted(rng.randrange(appends * 9 // 10) for _ in range(kills))
    with running_cluster(tmp_path, 3) as cluster:
        brokers = Brokers(cluster, streams, records, 4, log)
        try:
            killed = 0
            for moment in moments:
                wait_until_acknowledged(brokers, moment)
                killed += brokers.kill_one(rng)
            while brokers.check():
                wait_until_acknowledged(brokers, sys.maxsize)
        finally:
            brokers.stop()
        assert killed > kills // 2, f"seed {seed}: the brokers were done before they were killed"
        ends = brokers.ends()
        assert len(ends) == streams
        assert asyncio.run(read_all(cluster, ends)) == records, f"seed {seed}"
