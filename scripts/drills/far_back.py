"""Drill of a restore over S3 to a point before compaction, while a blind cluster still runs.

Brokers write and compact until the bucket has deleted all objects of the point to restore. Then the
controllers lose the bucket and keep running: neither they nor their brokers notice the restore, and
they acknowledge records until their lease is over. The new cluster has to return every record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from scripts.demonstration.narrator import Narrator
from scripts.drills.disaster import (
    BROKERS,
    Clock,
    Written,
    compare,
    drop,
    expect,
    open_broker,
    write,
    write_on,
)
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.client import StreamClient
from streammeta.client.errors import BrokerClientError
from streammeta.storage.adoption.survey import list_stored
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.real_cluster import FAST, describe, leader_of, streammeta
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm
from tests.storage.s3_fault_proxy import Fault, FaultProxy, always, running_fault_proxy
from tests.storage.s3_servers import S3Endpoint, running_ministack

STREAMS_A_BROKER = 3
COMPACTED_EVERY_S = 1.0
OLD, NEW = "test", "second"
NAMESPACE = f"_streammeta_{OLD}"
_OPTIONS = (*FAST, "--delete-delay-ms", "1000", "--backup-interval-ms", "500")


def run(root: Path, narrator: Narrator) -> Mapping[str, object]:
    """Carry out the drill in `root`, and return its figures, with times in seconds.

    Raises:
        AssertionError: a step failed, or acknowledged records are lost.
    """
    clock = Clock(narrator)
    with running_ministack() as server, running_fault_proxy(server) as sight:
        for bucket in ("objects", "backups"):
            server.create_bucket(bucket)
        old = _cluster(root, OLD, sight.endpoint, 3)
        new = _cluster(root, NEW, server, 1)
        try:
            old.start_all()
            wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
            drill = _Drill(old, new, server, sight, root, clock)
            return asyncio.run(drill.run())
        finally:
            sight.plan = always(Fault.RESET)
            for cluster in (old, new):
                for child in cluster.children.values():
                    child.kill()


def _cluster(root: Path, name: str, endpoint: S3Endpoint, count: int) -> LocalCluster:
    backups = ("--backup-store", endpoint.uri("backups"))
    namespace = ("--namespace", NAMESPACE)
    return LocalCluster(
        root / name,
        name,
        endpoint.uri("objects"),
        free_ports(count),
        (*_OPTIONS, *backups, *namespace),
        starter=start_warm,
    )


class _Drill:
    """Old cluster, new cluster, and the acknowledged records."""

    def __init__(
        self,
        old: LocalCluster,
        new: LocalCluster,
        server: S3Endpoint,
        sight: FaultProxy,
        root: Path,
        clock: Clock,
    ) -> None:
        self._old = old
        self._new = new
        self._server = server
        self._sight = sight
        self._root = root
        self._clock = clock
        self._written: Written = {}

    async def run(self) -> Mapping[str, object]:
        narrator = self._clock.narrator
        # Brokers reach the bucket all the time; the controllers alone go blind.
        self._old.store_uri = self._server.uri("objects")
        brokers = [await open_broker(self._old, node_id) for node_id in BROKERS]
        writing = await self._start_writing(brokers)
        try:
            with self._clock.step("age", "brokers write and compact; a point loses all objects"):
                point = await asyncio.to_thread(self._age)
            self._sight.plan = always(Fault.RESET)
            seen = self._acknowledged()
            narrator.step(f"the controllers lose the bucket after {seen} records")
            began = time.monotonic()
            report = await asyncio.to_thread(self._restore, point)
            self._clock.figures["rto_s"] = round(time.monotonic() - began, 1)
            blind = self._acknowledged() - seen
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
            await drop(brokers)
        with self._clock.step("write_on", "the brokers find the new cluster and continue to write"):
            for place, node_id in enumerate(BROKERS):
                ids = sorted(self._written)[place * STREAMS_A_BROKER :][:STREAMS_A_BROKER]
                await write_on(self._new, node_id, ids, self._written)
        with self._clock.step("read_back", "every record is read and compared"):
            await compare(self._new, self._written)
        return {
            "acknowledged": self._acknowledged(),
            "acknowledged_by_the_blind": blind,
            "adopted_objects": report["adopted"],
            "replaced_objects": report["replaced"],
            "lost": 0,
            **self._clock.figures,
        }

    def _acknowledged(self) -> int:
        return sum(map(len, self._written.values()))

    async def _start_writing(self, brokers: list[StreamClient]) -> list[asyncio.Task[None]]:
        tasks = []
        for streams in brokers:
            ids = list(await streams.create_streams([{"of": "a drill"}] * STREAMS_A_BROKER))
            self._written |= {stream_id: [] for stream_id in ids}
            (await streams.open_streams(ids)).require_all()
            tasks.append(asyncio.create_task(write(streams, ids, self._written)))
            tasks.append(asyncio.create_task(_compact(streams)))
        return tasks

    def _age(self) -> int:
        """Return a point of the log whose objects have all been deleted from the bucket since."""
        store = open_object_store(self._server.uri("objects"))

        def stored() -> set[int]:
            return {found.object_id for found in list_stored(store, NAMESPACE)}

        wait_until(lambda: len(stored()) > 2 * STREAMS_A_BROKER, "some objects", 30)
        point, objects = describe(self._old).high_watermark, stored()
        wait_until(lambda: not objects & stored(), "the objects to be compacted and deleted", 60)
        return point

    def _restore(self, point: int) -> dict[str, object]:
        buckets = ("--store", self._server.uri("objects"))
        backups = ("--from", self._server.uri("backups"))
        plan = ("--plan", str(self._root / "plan.json"))
        voters = f"1@{self._new.peer_endpoints[0]}"
        place = ("--connect", self._new.connect, *buckets)
        with self._clock.step("plan", f"streammeta restore plan --to-offset {point}"):
            named = ("--cluster-id", OLD, "--new-cluster-id", NEW, "--namespace", NAMESPACE)
            wanted = ("--voters", voters, "--to-offset", str(point))
            planned = expect(
                streammeta("restore", "plan", *backups, *buckets, *named, *wanted, *plan)
            )
        assert planned["missing_objects"], "nothing of the point was deleted"
        with self._clock.step("apply", "streammeta restore apply"):
            where = ("--node-id", "1", "--data-dir", str(self._new.data_dir(1)))
            expect(streammeta("restore", "apply", *backups, *buckets, *plan, *where))
        with self._clock.step("start", "the new controller starts, in recovery mode"):
            self._new.start_all()
            leader_of(self._new)
        with self._clock.step("adopt", "streammeta restore adopt --yes   (waits for the lease)"):
            report = expect(streammeta("restore", "adopt", *place, "--yes"))
        shown = {name: report[name] for name in ("objects", "adopted", "replaced", "offsets")}
        self._clock.narrator.show(", ".join(f"{name}: {value}" for name, value in shown.items()))
        assert not report["lost"], report["lost"]
        assert not report["missing"], report["missing"]
        with self._clock.step("finish", "streammeta restore finish"):
            expect(streammeta("restore", "finish", *place))
        return report


async def _compact(streams: StreamClient) -> None:
    while True:
        await asyncio.sleep(COMPACTED_EVERY_S)
        with contextlib.suppress(BrokerClientError):
            await streams.compact()
