"""Adoption by real controllers and brokers: all acknowledged records are read, also after kills."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.cli.recovery.adoption_survey import read_map_state
from streammeta.cli.recovery.snapshot_command import download
from streammeta.client import StreamClient
from streammeta.storage.adoption.survey import list_stored
from streammeta.storage.object_store.opening import open_object_store
from tests.backup.test_restore_process import NAMESPACE, Restoring, is_copied, options
from tests.kit.doomed_child import REPOSITORY
from tests.kit.real_cluster import FAST, describe, leader_of, put, running_cluster, streammeta
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process


KEPT = ("--delete-delay-ms", "3600000")
RECORDS = 20


async def written(
    cluster: LocalCluster, node_id: int, stream_ids: list[int], text: str
) -> dict[int, list[bytes]]:
    """Let a broker of its own append to streams, new ones if none are named; close them."""
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=node_id
    ) as streams:
        if not stream_ids:
            stream_ids = list(await streams.create_streams([{"topic": text}, {"topic": text}]))
        (await streams.open_streams(stream_ids)).require_all()
        payloads = [f"{text} {number}".encode() for number in range(RECORDS)]
        for half in (payloads[: RECORDS // 2], payloads[RECORDS // 2 :]):
            for stream_id in stream_ids:
                await streams.append_many(stream_id, half)
            await streams.flush()
        await streams.compact()
        await streams.close_streams(stream_ids)
    return {stream_id: [*payloads] for stream_id in stream_ids}


async def read_back(cluster: LocalCluster, stream_ids: list[int]) -> dict[int, list[bytes]]:
    """Read streams from their start, whose offsets must follow each other."""
    found: dict[int, list[bytes]] = {}
    async with await StreamClient.open(cluster.endpoints, cluster.store_uri) as streams:
        for stream_id in stream_ids:
            records = [record async for record in streams.iterate(stream_id)]
            assert [record.base_offset for record in records] == list(range(len(records)))
            found[stream_id] = [record.payload for record in records]
    return found


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def restore(*words: str, cluster: LocalCluster) -> dict[str, Any]:
    return streammeta("restore", *words, "--connect", cluster.connect, "--store", cluster.store_uri)


def test_what_was_acknowledged_after_the_backup_is_adopted_and_read(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, options=(*options(tmp_path), *KEPT)) as old:
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        wanted = run(written(old, 1007, [], "before"))
        ids = sorted(wanted)
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
        point = describe(old).high_watermark
        # The same broker goes on; then another one, under larger epochs.
        for node_id, text in ((1007, "after"), (1008, "after that")):
            for stream_id, payloads in run(written(old, node_id, ids, text)).items():
                wanted[stream_id] += payloads
        new = run(written(old, 1008, [], "created since"))
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
        early = restore("adopt", "--dry-run", cluster=old)
        assert (early["exit_code"], early["error"]["code"]) == (1, "NOT_RECOVERING")

    restoring = Restoring(tmp_path, "second", 1)
    planned = restoring.make_plan("--to-offset", str(point))
    assert planned["exit_code"] == 0, planned
    restoring.applied()
    cluster = restoring.cluster
    try:
        cluster.start_all()
        leader_of(cluster)
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        adopt_all(cluster, set(new))
        early = restore("give-up", "--older-than", "0s", "--yes", cluster=cluster)
        assert (early["exit_code"], early["error"]["code"]) == (1, "RECOVERING")
        end_recovery(cluster, tmp_path)
        assert run(read_back(cluster, ids)) == wanted
        for stream_id, payloads in run(written(cluster, 1007, ids, "again")).items():
            wanted[stream_id] += payloads
        assert run(read_back(cluster, ids)) == wanted
        give_up(cluster, tmp_path)
        assert run(read_back(cluster, ids)) == wanted
    finally:
        cluster.stop_all()


def adopt_all(cluster: LocalCluster, unknown: set[int]) -> None:
    """Adopt in two runs; only what was created since is lost, and the second finds nothing."""
    asked = restore("adopt", cluster=cluster)
    assert asked["exit_code"] == 2, "neither --dry-run nor --yes"
    planned = restore("adopt", "--dry-run", cluster=cluster)
    assert planned["exit_code"] == 0, planned
    assert (planned["adopted"], planned["missing"]) == (0, [])
    assert planned["adoptable"] == len(planned["adopt"]) > 0
    refused = restore("finish", cluster=cluster)
    assert (refused["exit_code"], refused["error"]["code"]) == (1, "LEFT_BEHIND")
    done = restore("adopt", "--yes", cluster=cluster)
    assert done["exit_code"] == 0, done
    assert done["adopted"] == planned["adoptable"]
    again = restore("adopt", "--yes", cluster=cluster)
    assert (again["exit_code"], again["adopted"]) == (0, 0)
    assert {(loss["stream_id"], loss["why"]) for loss in again["lost"]} == {
        (stream_id, "new-stream") for stream_id in unknown
    }


def end_recovery(cluster: LocalCluster, root: Path) -> None:
    """What can't be adopted has to be left behind expressly; until then no broker writes."""
    with (
        ControllerClient(cluster.endpoints, timeout_s=1) as client,
        pytest.raises(CallError) as refused,
    ):
        put(client, "key", "value")
    assert refused.value.code == "RECOVERING"
    left = restore("finish", cluster=cluster)
    assert (left["exit_code"], left["error"]["code"]) == (1, "LEFT_BEHIND")
    where = ("--from", f"file://{root}/backups")
    finished = restore("finish", "--leave-behind", *where, cluster=cluster)
    assert finished["exit_code"] == 0, finished
    assert finished["was_recovering"]
    assert finished["backup_end"] > describe(cluster).high_watermark - 10
    assert not restore("finish", cluster=cluster)["was_recovering"]


def give_up(cluster: LocalCluster, root: Path) -> None:
    """Objects left behind are orphans once they are given up, which a young restore is not."""
    young = restore("give-up", "--yes", cluster=cluster)
    assert (young["exit_code"], young["restores"]) == (0, [])
    now = ("--older-than", "0s")
    planned = restore("give-up", *now, "--dry-run", cluster=cluster)
    (left,) = planned["restores"]
    assert left["objects"] == planned["objects"] > 0
    assert left["bytes"] == planned["bytes"] > 0
    assert verdicts(cluster, root / "before") == {"undecided": left["objects"]}
    done = restore("give-up", *now, "--yes", cluster=cluster)
    assert (done["exit_code"], done["given_up"], done["restores"]) == (0, 1, [left])
    assert verdicts(cluster, root / "after") == {"orphan": left["objects"]}
    again = restore("give-up", *now, "--yes", cluster=cluster)
    assert (again["exit_code"], again["restores"]) == (0, [])


def verdicts(cluster: LocalCluster, plan: Path) -> dict[str, int]:
    """Return the number of keys of a reconciliation that are undecided or orphans, if any."""
    planned = streammeta(
        *("reconcile", "plan", "--connect", cluster.connect, "--store", cluster.store_uri),
        *("--plan", str(plan), "--unsafe-grace", "0s", "--max-share", "1", "--engine", "local"),
    )
    assert planned["exit_code"] == 0, planned
    found = {class_["verdict"]: class_["keys"] for class_ in planned["classes"]}
    return {name: found[name] for name in ("undecided", "orphan") if found.get(name)}


ROUNDS = 3


def test_compacted_records_are_read_after_a_restore_to_an_earlier_point(tmp_path: Path) -> None:
    soon = ("--delete-delay-ms", "0")
    with running_cluster(tmp_path, 1, options=(*options(tmp_path), *soon)) as old:
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        store = open_object_store(old.store_uri)

        def stored() -> set[int]:
            return {found.object_id for found in list_stored(store, NAMESPACE)}

        async def write(streams: StreamClient, ids: list[int], text: str) -> list[bytes]:
            payloads = [f"{text} {number}".encode() for number in range(4)]
            for payload in payloads:
                for stream_id in ids:
                    await streams.append(stream_id, payload)
                await streams.flush()
            return payloads

        async def live() -> tuple[int, set[int], dict[int, list[bytes]]]:
            """Write, note a point and its objects, then write and compact until all have gone."""
            async with await StreamClient.open(
                old.endpoints, old.store_uri, node_id=1007
            ) as streams:
                ids = list(await streams.create_streams([{"topic": "t"}] * 3))
                (await streams.open_streams(ids)).require_all()
                payloads = await write(streams, ids, "before")
                before, point = stored(), describe(old).high_watermark
                for number in range(ROUNDS):
                    payloads += await write(streams, ids, f"after {number}")
                    await streams.compact()
                payloads += await write(streams, ids, "last")
                await streams.close_streams(ids)
            return point, before, dict.fromkeys(ids, payloads)

        point, before, wanted = run(live())
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
        wait_until(lambda: not before & stored(), "the objects of the point to be deleted")

    restoring = Restoring(tmp_path, "second", 1)
    planned = restoring.make_plan("--to-offset", str(point))
    assert planned["exit_code"] == 0, planned
    assert planned["missing_objects"] == len({row["object_id"] for row in planned["missing"]})
    assert planned["missing_objects"] > 0
    restoring.applied()
    cluster = restoring.cluster
    try:
        cluster.start_all()
        leader_of(cluster)
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        done = restore("adopt", "--yes", cluster=cluster)
        assert done["exit_code"] == 0, done
        assert (done["lost"], done["missing"]) == ([], [])
        assert done["replaced"] == planned["missing_objects"]
        again = restore("adopt", "--yes", cluster=cluster)
        assert (again["adopted"], again["missing"], again["lost"]) == (0, [], [])
        assert restore("finish", cluster=cluster)["exit_code"] == 0
        assert run(read_back(cluster, sorted(wanted))) == wanted
        agreed = streammeta("cluster", "hash", "--connect", cluster.connect)
        assert agreed["exit_code"] == 0, agreed
    finally:
        cluster.stop_all()


UPLOADS = 12
"""Of each of two streams, each in an object of its own."""


async def uploaded(cluster: LocalCluster, root: Path) -> tuple[int, dict[int, list[bytes]]]:
    """Upload many objects behind a backup; return its end, and the payloads of each stream."""
    async with await StreamClient.open(
        cluster.endpoints, cluster.store_uri, node_id=1007
    ) as streams:
        ids = await streams.create_streams([{"of": "one"}, {"of": "two"}])
        (await streams.open_streams(ids)).require_all()
        await asyncio.to_thread(wait_until, lambda: is_copied(cluster, root), "the streams' backup")
        end_offset = describe(cluster).high_watermark
        written: dict[int, list[bytes]] = {stream_id: [] for stream_id in ids}
        for number in range(UPLOADS):
            for stream_id, payloads in written.items():
                payloads.append(f"{stream_id} {number}".encode())
                await streams.append_many(stream_id, payloads[-1:])
    return end_offset, written


def state_of(cluster: LocalCluster) -> tuple[Any, ...]:
    """Return streams and objects of the leader's map."""
    with ControllerClient(cluster.endpoints) as client, tempfile.TemporaryFile() as copy:
        download(client, copy)
        state = read_map_state(copy)
    assert state is not None
    return state.streams, state.undecided, state.object_ids.tolist(), state.held


def doomed(cluster: LocalCluster, step: str, at: int, victim: int = 0) -> int:
    """Adopt, while the child or the victim is killed at some call; return its exit code."""
    words = ("--connect", cluster.connect, "--store", cluster.store_uri)
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.backup.doomed_adoption", step, str(at), str(victim)),
            *("restore", "adopt", "--yes", *words),
        ],
        cwd=REPOSITORY,
        check=False,
        stdout=subprocess.DEVNULL,
        timeout=120,
    ).returncode


def started(cluster: LocalCluster) -> None:
    cluster.start_all()
    leader_of(cluster)
    wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")


def test_killed_midway_it_is_repeated_and_the_map_is_the_same(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, options=(*options(tmp_path), *KEPT)) as old:
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        point, wanted = run(uploaded(old, tmp_path))
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
    restoring = Restoring(tmp_path, "second")
    assert restoring.make_plan("--to-offset", str(point))["exit_code"] == 0
    restoring.applied()
    cluster = restoring.cluster
    twin = twin_of(cluster, tmp_path)
    try:
        started(cluster)
        total = restore("adopt", "--dry-run", cluster=cluster)["adoptable"]
        assert total == 2 * UPLOADS
        for step, at, left in (("after", 2, total - 6), ("before", 2, total - 9)):
            assert doomed(cluster, step, at) == -signal.SIGKILL
            assert restore("adopt", "--dry-run", cluster=cluster)["adoptable"] == left
        leader = leader_of(cluster)
        assert doomed(cluster, "under way", 2, cluster.children[leader].process.pid) in (0, 1)
        assert cluster.children[leader].process.wait(60) == -signal.SIGKILL
        cluster.children[leader].stop()
        cluster.start(leader)
        repeated = restore("adopt", "--yes", cluster=cluster)
        assert repeated["exit_code"] == 0, repeated
        again = restore("adopt", "--yes", cluster=cluster)
        assert (again["exit_code"], again["adopted"], again["lost"]) == (0, 0, [])
        found = state_of(cluster)
        assert restore("finish", cluster=cluster)["exit_code"] == 0
        assert run(read_back(cluster, sorted(wanted))) == wanted
    finally:
        cluster.stop_all()
    try:
        started(twin)
        assert restore("adopt", "--yes", cluster=twin)["adopted"] == total
        assert found == state_of(twin), "as if nobody had been killed"
    finally:
        twin.stop_all()


def twin_of(cluster: LocalCluster, root: Path) -> LocalCluster:
    """Return the same cluster, yet to start, over a bucket of its own; one of them may run."""
    shutil.copytree(cluster.root, root / "twin")
    shutil.copytree(root / "bucket", root / "twin-bucket")
    return LocalCluster(
        root / "twin",
        cluster.cluster_id,
        f"file://{root}/twin-bucket",
        cluster.ports,
        (*FAST, *KEPT, "--namespace", NAMESPACE),
        peer_ports=cluster.peer_ports,
        starter=start_warm,
    )
