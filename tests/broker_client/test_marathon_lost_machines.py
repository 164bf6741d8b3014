"""Many records by brokers whose machines are lost for good, one after the other: none is lost.

A broker is killed and its folder deleted; it never comes back. Another broker, which the
controllers name, recovers its log from the bucket, and a new node goes on where that ends. Some are
not killed but stopped, and go on when their streams are another's. `STREAMMETA_SEED` replays a run
that failed.
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
from dataclasses import dataclass
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import Child, LocalCluster, start_child
from tests.broker_client.marathon_broker import MANY, Settings, count_notes, read_notes
from tests.broker_client.test_marathon import PROGRESS_S, read_all
from tests.kit.real_cluster import FAST, running_cluster

pytestmark = pytest.mark.process

OPTIONS = (*FAST, "--session-timeout-ms", "5000")
FIRST_NODE = 1001
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
        self._next = FIRST_NODE
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
        return sum(count_notes(one.settings.notes) for one in self.all)

    def working(self) -> list[Machine]:
        """Machines that have all their streams and are not done; one that failed fails the test."""
        lost = [one for one, _ in self.heirs]
        found = []
        for one in self.all:
            if one in lost:
                continue
            code = one.child.process.poll()
            assert code in (None, 0), f"{one.child.name} ended with {code}:\n{one.child.log_tail()}"
            if code is None and len(one.ends()) == self._quota[0]:
                found.append(one)
        return found

    def is_done(self) -> bool:
        """Whether every machine that was not lost has written its quota."""
        lost = [one for one, _ in self.heirs]
        self.working()
        return all(one in lost or not one.child.is_running for one in self.all)

    def lose(self, one: Machine, *, is_stopped: bool) -> None:
        """Lose a machine for good, or stop its broker; a new node is to take its streams."""
        if is_stopped:
            one.child.process.send_signal(signal.SIGSTOP)
            self.stopped.append(one)
        else:
            one.child.kill()
            shutil.rmtree(one.folder)
        self.heirs.append((one, self._start(tuple(sorted(one.ends())))))

    def wake(self) -> None:
        """Let stopped brokers go on, once their heirs have their streams; they must give up."""
        for one, heir in self.heirs:
            if one in self.stopped:
                self.wait(lambda heir=heir: bool(heir.ends()), "the heir has the streams")  # type: ignore[misc]
                one.child.process.send_signal(signal.SIGCONT)
                self.wait(lambda one=one: not one.child.is_running, "the stopped broker ends")  # type: ignore[misc]
                assert one.child.process.returncode not in (0, -signal.SIGKILL)

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
        for one, heir in self.heirs:
            starts = heir.starts()
            for stream_id, end in one.ends().items():
                # Less was recovered than was acknowledged, or more was acknowledged afterwards.
                assert end <= starts[stream_id], f"stream {stream_id} of {one.child.name}"
        ends: dict[int, int] = {}
        for machine in self.all:
            for stream_id, end in machine.ends().items():
                ends[stream_id] = max(end, ends.get(stream_id, 0))
        return ends

    def end(self) -> None:
        for one in self.all:
            one.child.process.send_signal(signal.SIGCONT)
            one.child.kill()


@pytest.mark.parametrize(
    ("records", "streams", "losses"),
    [
        (80_000, 40, 3),
        pytest.param(*(10_000_000, 1000, 30), marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
)
def test_machines_lost_for_good_lose_nothing_that_was_acknowledged(
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
