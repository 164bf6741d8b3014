"""Many small records in many streams, by brokers that are killed or lost at random: none is lost.

A killed broker starts again. A lost one has its folder deleted and never comes back: another
broker, which the controllers name, recovers its log from the bucket, and a new node goes on where
that ends. Some are not killed but stopped, and go on when their streams are another's.
`STREAMMETA_SEED` replays a run that failed.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from streammeta.cli.local.local_cluster import Child, LocalCluster, start_child
from streammeta.client import StreamClient
from tests.broker_client.marathon_broker import MANY, Settings, count_notes, payload_of, read_notes
from tests.kit.real_cluster import FAST, running_cluster

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
        (40_000, 40, 3, "wal"),
        (40_000, 40, 3, "object_log"),
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


OPTIONS = (*FAST, "--session-timeout-ms", "5000")
FIRST_MACHINE = 1001
BROKERS = 4


@dataclass
class Machine:
    """One broker on a machine of its own."""

    settings: Settings
    child: Child
    folder: Path

    def ends(self) -> dict[int, int]:
        """Up to where each stream was acknowledged by this broker."""
        found: dict[int, int] = {}
        if self.settings.notes.exists():
            for stream_id, end in read_notes(self.settings.notes):
                found[stream_id] = max(end, found.get(stream_id, 0))
        return found

    def starts(self) -> dict[int, int]:
        """Where each stream ended when this broker took it."""
        found: dict[int, int] = {}
        for stream_id, end in read_notes(self.settings.notes):
            found.setdefault(stream_id, end)
        return found


class Machines:
    """All machines of a run; `heirs` are those that lost one to the one that took its streams."""

    def __init__(
        self, cluster: LocalCluster, streams: int, records: int, brokers: int = BROKERS
    ) -> None:
        self._cluster = cluster
        self._next = FIRST_MACHINE
        self._quota = (streams // brokers, records // brokers)
        self.all: list[Machine] = []
        self.heirs: list[tuple[Machine, Machine]] = []
        self.stopped: list[Machine] = []
        for _ in range(brokers):
            self._start(())

    def _start(self, adopted: tuple[int, ...]) -> Machine:
        streams, records = self._quota
        node_id, self._next = self._next, self._next + 1
        folder = self._cluster.root / f"machine-{node_id}"
        folder.mkdir()
        settings = Settings(
            endpoints=self._cluster.endpoints,
            root=str(self._cluster.root),
            node_id=node_id,
            node_epoch=1,
            streams=streams,
            records=records,
            durability="object_log",
            adopted=adopted,
        )
        words = ["-m", "tests.broker_client.marathon_broker", settings.encode()]
        child = start_child(f"broker {node_id}", [sys.executable, *words], folder / "log")
        self.all.append(Machine(settings, child, folder))
        return self.all[-1]

    def acknowledged(self) -> int:
        """How many appends were acknowledged, by all together."""
        return sum(count_notes(broker.settings.notes) for broker in self.all)

    def working(self) -> list[Machine]:
        """Machines that have all their streams and are not done; one that failed fails the test."""
        lost = [broker for broker, _ in self.heirs]
        found = []
        for one in self.all:
            if one in lost:
                continue
            code = one.child.process.poll()
            assert code in (None, 0), f"{one.child.name} ended with {code}:\n{one.child.log_tail()}"
            ends = one.ends()
            is_complete = sum(ends.values()) >= self._quota[1]
            if code is None and len(ends) == self._quota[0] and not is_complete:
                found.append(one)
        return found

    def is_done(self) -> bool:
        """Whether every machine that was not lost has written its quota."""
        lost = [broker for broker, _ in self.heirs]
        self.working()
        return all(broker in lost or not broker.child.is_running for broker in self.all)

    def lose(self, one: Machine, *, is_stopped: bool) -> None:
        """Lose a machine for good, or stop its broker; a new node is to take its streams."""
        if is_stopped:
            one.child.process.send_signal(signal.SIGSTOP)
            # One that was about to end well has nothing to give up.
            if sum(one.ends().values()) < self._quota[1]:
                self.stopped.append(one)
            else:
                one.child.process.send_signal(signal.SIGCONT)
        else:
            one.child.kill()
            shutil.rmtree(one.folder)
        self.heirs.append((one, self._start(tuple(sorted(one.ends())))))

    def wake(self) -> None:
        """Let stopped brokers go on, once their heirs have their streams; they must give up."""
        for broker, heir in self.heirs:
            if broker in self.stopped:
                self.wait(lambda heir=heir: bool(heir.ends()), "the heir has the streams")  # type: ignore[misc]
                broker.child.process.send_signal(signal.SIGCONT)
                self.wait(lambda broker=broker: not broker.child.is_running, "the broker ends")  # type: ignore[misc]
                assert broker.child.process.returncode not in (0, -signal.SIGKILL)

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something, as long as records are acknowledged."""
        seen, deadline = -1, 0.0
        while not is_so():
            if (now := self.acknowledged()) > seen:
                seen, deadline = now, time.monotonic() + PROGRESS_S
            assert time.monotonic() < deadline, f"no progress in {PROGRESS_S:.0f} s until {what}"
            time.sleep(0.02)

    def checked_ends(self) -> dict[int, int]:
        """Up to where each stream was acknowledged; all of it was there when its heir took it."""
        for broker, heir in self.heirs:
            starts = heir.starts()
            for stream_id, end in broker.ends().items():
                # Less was recovered than was acknowledged, or more was acknowledged afterwards.
                assert end <= starts[stream_id], f"stream {stream_id} of {broker.child.name}"
        ends: dict[int, int] = {}
        for machine in self.all:
            for stream_id, end in machine.ends().items():
                ends[stream_id] = max(end, ends.get(stream_id, 0))
        return ends

    def end(self) -> None:
        for broker in self.all:
            broker.child.process.send_signal(signal.SIGCONT)
            broker.child.kill()


@pytest.mark.parametrize(
    ("records", "streams", "losses"),
    [
        (40_000, 40, 3),
        pytest.param(*(10_000_000, 1000, 30), marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
)
def test_lost_machines_lose_nothing(
    tmp_path: Path, records: int, streams: int, losses: int
) -> None:
    seed = int(os.environ.get("STREAMMETA_SEED", "1"))
    rng = random.Random(seed)
    appends = records // ((MANY + 1) // 2)
    moments = sorted(rng.randrange(appends * 8 // 10) for _ in range(losses))
    with running_cluster(tmp_path, 3, OPTIONS) as cluster:
        machines = Machines(cluster, streams, records)
        try:
            for number, moment in enumerate(moments):
                machines.wait(
                    lambda moment=moment: (
                        (  # type: ignore[misc]
                            machines.acknowledged() >= moment and bool(machines.working())
                        )
                        or machines.is_done()
                    ),
                    f"append {moment}",
                )
                if working := machines.working():
                    machines.lose(rng.choice(working), is_stopped=number % 3 == 1)
            machines.wait(machines.is_done, "all is written")
            machines.wake()
        finally:
            machines.end()
        assert len(machines.heirs) > losses // 2, f"seed {seed}: done before they were lost"
        assert machines.stopped, f"seed {seed}: no broker was stopped"
        ends = machines.checked_ends()
        assert len(ends) == streams
        assert asyncio.run(read_all(cluster, ends)) == records, f"seed {seed}"
