"""One bucket with all three shapes and logs: brokers are killed, reconciliation deletes orphans.

Every object is made to look old before each plan, so that nothing but the map protects what is
live. `STREAMMETA_SEED` replays the choice of brokers of a run that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import Child, LocalCluster, start_child
from streammeta.client import StreamClient
from streammeta.storage.object_store.local import LocalObjectStore
from tests.broker_client.test_marathon import Machines, read_all
from tests.brokers.clients.pulsar_broker import bodies
from tests.brokers.clients.pulsar_rolling_broker import MODES, shape_of
from tests.brokers.test_rocketmq_processes import _check as check_queues
from tests.kit.kafka_brokers import KafkaBrokers, result_of
from tests.kit.real_cluster import FAST, raise_level, running_cluster
from tests.kit.reconciled_bucket import Orphans, reconcile

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

OPTIONS = (*FAST, "--session-timeout-ms", "5000")
ROOT = Path(__file__).parent.parent.parent
KAFKA_NODES = (1, 2)
ORPHANS = 3
"""Orphans that appear before each plan."""
AGE_S = 7200.0


class Printing:
    """A broker of one script that is killed and started again; its lines come in between."""

    def __init__(self, cluster: LocalCluster, script: str, node_id: int) -> None:
        self._cluster = cluster
        self._script = script
        self._node_id = node_id
        self.lines: list[list[str]] = []
        self.child = self._started()

    def _started(self) -> Child:
        script = str(ROOT / "tests" / "brokers" / "clients" / self._script)
        where = [",".join(self._cluster.endpoints), self._cluster.store_uri]
        command = [sys.executable, script, *where, str(self._node_id)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return start_child(self._script, command, self._cluster.root / f"{self._script}.log", env)

    def follow(self, count: int) -> None:
        """Read so many more lines."""
        for _ in range(count):
            line = self.child.read_line()
            assert line, self.child.log_tail()
            self.lines.append(line.split())

    def kill(self) -> None:
        """Kill it; what it printed before counts."""
        self.child.process.kill()
        while line := self.child.read_line():
            if line.endswith("\n") or len(line.split()) > 2:
                self.lines.append(line.split())
        self.child.kill()

    def restart(self) -> None:
        self.kill()
        self.child = self._started()


def _age(bucket: Path) -> None:
    """Make every object look old: no grace protects it."""
    past = time.time() - AGE_S
    for folder, _, names in os.walk(bucket):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.utime(Path(folder) / name, (past, past))


def _reconcile(cluster: LocalCluster) -> int:
    """Reconcile a bucket whose objects all look old; return how many were deleted."""
    _age(cluster.root / "bucket")
    return reconcile(cluster)[1]


async def check_ledgers(cluster: LocalCluster, printed: list[list[str]]) -> None:
    """Assert that what the broker said is offloaded is, and is read from its copies."""
    async with await StreamClient.open(cluster.endpoints, cluster.store_uri, node_id=7) as client:
        for mode in MODES:
            shape = shape_of(client, mode)
            await shape.managed.open()
            await shape.managed.sweep()
            complete = [ledger for ledger in shape.managed.ledgers if ledger.is_complete]
            said = max(int(number) for _, of, number in printed if of == mode)
            assert said <= max(info.ledger_id for info in complete)
            reader = shape.reader()
            for info in complete:
                found = await reader.read(info.ledger_id, 0, info.entries - 1)
                assert [entry.data for entry in found] == bodies(info.ledger_id)
            assert reader.open_handles == len(complete)
            named = {
                (ledger.ledger_id, ledger.context.uuid): ledger.is_complete
                for ledger in shape.managed.ledgers
                if ledger.context
            }
            held = set(await shape.copies.list_copies())
            assert held <= named.keys()
            # One that was begun when its broker ended may have nothing yet.
            assert held >= {name for name, is_complete in named.items() if is_complete}


def _accidents(
    rng: random.Random, kafka: KafkaBrokers, printing: list[Printing]
) -> list[Callable[[], None]]:
    """Return an accident for each of the brokers that are started again, in any order."""

    def kafka_dies() -> None:
        node_id = rng.choice(KAFKA_NODES)
        kafka.children[node_id].kill()
        kafka.start(node_id)

    accidents = [kafka_dies, *(broker.restart for broker in printing)]
    rng.shuffle(accidents)
    return accidents


@pytest.mark.parametrize(
    ("rounds", "records"),
    [
        (2, 80_000),
        pytest.param(20, 1_500_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_reconciliation_beside_all_shapes_deletes_orphans_and_nothing_else(
    tmp_path: Path, rounds: int, records: int
) -> None:
    seed = int(os.environ.get("STREAMMETA_SEED", "1"))
    rng = random.Random(seed)
    with running_cluster(tmp_path, 1, OPTIONS) as cluster, contextlib.ExitStack() as exits:
        raise_level(cluster, 3)
        orphans = Orphans(cluster, (rounds + 1) * ORPHANS)
        store = LocalObjectStore(tmp_path / "bucket")
        store.put("someone/else", b"not ours")
        kafka = KafkaBrokers(cluster)
        exits.callback(kafka.stop)
        addresses = [kafka.start(node_id, "--partitions", "2") for node_id in KAFKA_NODES]
        client = kafka.run("marathon_script.py", ",".join(addresses), "shapes", str(records))
        exits.callback(client.kill)
        queues = Printing(cluster, "rocketmq_broker.py", 9)
        exits.callback(queues.child.kill)
        ledgers = Printing(cluster, "pulsar_rolling_broker.py", 7)
        exits.callback(ledgers.child.kill)
        logged = records * 5  # far cheaper than a record of a Kafka client
        machines = Machines(cluster, 8, logged, 2)
        exits.callback(machines.end)
        deleted = busy = 0
        for _ in range(rounds):
            machines.wait(lambda: bool(machines.working()) or machines.is_done(), "records")
            if working := machines.working():
                machines.lose(rng.choice(working), is_stopped=False)
            queues.follow(10)
            ledgers.follow(2)
            busy += client.is_running
            for accident in _accidents(rng, kafka, [queues, ledgers]):
                accident()
            orphans.plant(ORPHANS)
            deleted += _reconcile(cluster)
            assert orphans.left() == [], f"seed {seed}"
        queues.follow(5)
        ledgers.follow(2)
        written = result_of(client)
        machines.wait(machines.is_done, "all is written")
        assert machines.heirs, f"seed {seed}: no machine was lost"
        assert busy, f"seed {seed}: the producer was done before a broker was killed"
        queues.kill()
        ledgers.kill()
        kafka.stop()
        orphans.plant(ORPHANS)
        deleted += _reconcile(cluster)
        assert orphans.left() == []
        assert deleted >= len(orphans.planted)
        assert store.get_range("someone/else") == b"not ours"
        assert written == {
            "failed": [],
            "acknowledged": records,
            "stored": records,
            "numbers": records,
            "out_of_order": 0,
        }
        ends = {(topic, int(number)): int(end) for _, topic, number, end in queues.lines}
        asyncio.run(check_queues(cluster, ends))
        asyncio.run(check_ledgers(cluster, ledgers.lines))
        assert asyncio.run(read_all(cluster, machines.checked_ends())) == logged
