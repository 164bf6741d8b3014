"""Drill of a disaster: all controllers and disks are lost, and the backup becomes a new cluster.

Brokers of the product write until the controllers are killed. Records acknowledged since the last
backup are only in the bucket. The new cluster has to return all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.demonstration.narrator import Narrator
from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import StreamClient
from streammeta.client.errors import BrokerClientError
from tests.backup.test_restore_process import Restoring, is_copied
from tests.kit.real_cluster import FAST, describe, leader_of, put, running_cluster, streammeta
from tests.kit.waiting import wait_until

BACKUP_INTERVAL_MS = 3_000
BROKERS = (1007, 1008)
STREAMS_A_BROKER = 4
WRITING_S = 5.0
RECORDS_AT_ONCE = 5

Written = dict[int, list[bytes]]
"""Payloads by stream, acknowledged in this order."""


@dataclass(slots=True)
class Clock:
    """Times of the steps, in seconds."""

    narrator: Narrator
    figures: dict[str, object] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, name: str, text: str) -> Iterator[None]:
        """Print a step, and measure its time."""
        self.narrator.step(text)
        began = time.monotonic()
        yield
        self.figures[f"{name}_s"] = round(time.monotonic() - began, 1)


def run(root: Path, narrator: Narrator) -> Mapping[str, object]:
    """Carry out the drill in `root`, and return its figures, with times in seconds.

    Raises:
        AssertionError: a step failed, or acknowledged records are lost.
    """
    clock = Clock(narrator)
    (root / "backups").mkdir()
    backups = ("--backup-store", f"file://{root}/backups")
    interval = ("--backup-interval-ms", str(BACKUP_INTERVAL_MS))
    with running_cluster(root, options=(*FAST, *backups, *interval)) as old:
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        narrator.step("three controllers copy their log to a backup; two brokers write")
        written = asyncio.run(_write_until_killed(old, root))
        acknowledged = sum(map(len, written.values()))
        copies = {node_id: root / f"copy-{node_id}" for node_id in old.node_ids}
        for node_id, copy in copies.items():
            shutil.copytree(old.data_dir(node_id), copy)
            old.wipe(node_id)
        narrator.step(f"everything is killed after {acknowledged} records, and all disks are wiped")
        began = time.monotonic()
        restoring = Restoring(root, "second")
        new = restoring.cluster
        try:
            report = _restore(restoring, clock)
            clock.figures["rto_s"] = round(time.monotonic() - began, 1)
            with clock.step("write_on", "the brokers come back and continue to write"):
                ids = sorted(written)
                halves = (ids[:STREAMS_A_BROKER], ids[STREAMS_A_BROKER:])
                for node_id, half in zip(BROKERS, halves, strict=True):
                    asyncio.run(write_on(new, node_id, half, written))
            _reconcile(root, new, clock)
            with clock.step("read_back", "every record is read and compared"):
                asyncio.run(compare(new, written))
            with clock.step("refusal", "the old cluster comes back from copies of its disks"):
                _old_is_refused(old, copies)
        finally:
            new.stop_all()
    return {
        "acknowledged": acknowledged,
        "adopted_objects": report["adopted"],
        "adopted_offsets": report["offsets"],
        "lost": 0,
        **clock.figures,
    }


# -- before


async def _write_until_killed(cluster: LocalCluster, root: Path) -> Written:
    """Let brokers write until the controllers are killed, and return the acknowledged records."""
    written: Written = {}
    async with contextlib.AsyncExitStack() as closing:
        brokers = [await open_broker(cluster, node_id) for node_id in BROKERS]
        closing.push_async_callback(drop, brokers)
        for streams in brokers:
            ids = await streams.create_streams([{"of": "a drill"}] * STREAMS_A_BROKER)
            written |= {stream_id: [] for stream_id in ids}
            (await streams.open_streams(list(ids))).require_all()
        await asyncio.to_thread(
            wait_until, lambda: is_copied(cluster, root), "the streams to be in the backup"
        )
        ids = sorted(written)
        halves = (ids[:STREAMS_A_BROKER], ids[STREAMS_A_BROKER:])
        writing = [
            asyncio.create_task(write(streams, half, written))
            for streams, half in zip(brokers, halves, strict=True)
        ]
        await asyncio.sleep(WRITING_S)
        for child in cluster.children.values():
            child.kill()
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
    return written


async def open_broker(cluster: LocalCluster, node_id: int) -> StreamClient:
    """Start a broker of a cluster."""
    return await StreamClient.open(cluster.endpoints, cluster.store_uri, node_id=node_id)


async def drop(brokers: list[StreamClient]) -> None:
    """Abandon brokers without controllers: their buffered records were not acknowledged."""
    for streams in brokers:
        with contextlib.suppress(BrokerClientError, TimeoutError):
            await asyncio.wait_for(streams.close(), 2)


async def write(streams: StreamClient, ids: list[int], written: Written) -> None:
    """Append to streams forever, and record the acknowledged payloads."""
    number = 0
    while True:
        for stream_id in ids:
            payloads = [
                f"{stream_id} {number + index}".encode() for index in range(RECORDS_AT_ONCE)
            ]
            await streams.append_many(stream_id, payloads)
            written[stream_id] += payloads
        number += RECORDS_AT_ONCE


# -- after


def _restore(restoring: Restoring, clock: Clock) -> dict[str, Any]:
    new = restoring.cluster
    place = ("--connect", new.connect, "--store", new.store_uri)
    with clock.step("plan", "streammeta restore plan"):
        expect(restoring.make_plan("--cluster-id", "test"))
    with clock.step("apply", "streammeta restore apply   (on each of three controllers)"):
        restoring.applied()
    with clock.step("start", "the new controllers start, in recovery mode"):
        new.start_all()
        leader_of(new)
        wait_until(lambda: not describe(new).bucket_problem, "ids to be issued")
    with clock.step("adopt", "streammeta restore adopt --yes"):
        report = expect(streammeta("restore", "adopt", *place, "--yes"))
    shown = {name: report[name] for name in ("objects", "adopted", "streams", "offsets")}
    clock.narrator.show(", ".join(f"{name}: {value}" for name, value in shown.items()))
    assert not report["lost"], report["lost"]
    assert not report["missing"], report["missing"]
    with clock.step("finish", "streammeta restore finish   (with a check of the next backup)"):
        expect(streammeta("restore", "finish", *place, "--from", restoring.at[1]))
    return report


async def write_on(cluster: LocalCluster, node_id: int, ids: list[int], written: Written) -> None:
    """Let a broker open streams and append to each, which must continue at its end."""
    async with await open_broker(cluster, node_id) as streams:
        await streams.open_streams(ids)
        for stream_id in ids:
            await streams.append_many(stream_id, [b"after the disaster"])
            written[stream_id].append(b"after the disaster")


async def compare(cluster: LocalCluster, written: Written) -> None:
    """Compare the read records with the acknowledged ones.

    Records of a last, unanswered append may follow the acknowledged ones.
    """
    async with StreamClient.open(cluster.endpoints, cluster.store_uri) as streams:
        for stream_id, payloads in written.items():
            records = [record async for record in streams.iterate(stream_id)]
            offsets = [record.base_offset for record in records]
            assert offsets == list(range(len(records))), f"offsets of stream {stream_id}"
            found = [record.payload for record in records]
            *before, after = payloads
            assert found[: len(before)] == before, f"stream {stream_id} lost acknowledged records"
            assert found[-1] == after, f"stream {stream_id} lost records written later"


def _reconcile(root: Path, cluster: LocalCluster, clock: Clock) -> None:
    place = ("--connect", cluster.connect, "--store", cluster.store_uri)
    plan = ("--plan", str(root / "reconcile"))
    with clock.step("reconcile", "streammeta reconcile plan --unsafe-grace 0s, apply --yes"):
        limits = ("--unsafe-grace", "0s", "--max-share", "1")
        expect(streammeta("reconcile", "plan", *place, *plan, *limits, "--engine", "local"))
        expect(streammeta("reconcile", "apply", *place, *plan, "--yes", "--engine", "local"))


def _old_is_refused(old: LocalCluster, copies: Mapping[int, Path]) -> None:
    for node_id, copy in copies.items():
        shutil.copytree(copy, old.data_dir(node_id))
    old.start_all()
    leader_of(old)

    def is_refused() -> bool:
        try:
            with ControllerClient(old.endpoints) as client:
                put(client, "too late", "1")
        except CallError as error:
            return error.code == "SUPERSEDED"
        return False

    wait_until(is_refused, "the old cluster to notice that it is superseded", 30)


def expect(answer: dict[str, Any]) -> dict[str, Any]:
    """Require that a command succeeded, and return its answer."""
    assert answer["exit_code"] == 0, answer
    return answer
