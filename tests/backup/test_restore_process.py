"""Disaster and restore with real controllers: a new cluster from the backup, the old one fenced."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.client.errors import BucketRejectedError
from streammeta.client.parts import BrokerSession
from streammeta.client.parts import ControllerClient as BrokerClient
from streammeta.storage.cluster_files.bucket_marker import read_claimed, read_generations
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2, kv_pb2, metadata_pb2
from streammeta.v1.kv_pb2_grpc import KVServiceStub
from streammeta.v1.metadata_pb2_grpc import MetadataServiceStub
from tests.kit.real_cluster import (
    FAST,
    describe,
    leader_of,
    prepare_object,
    put,
    put_when_ready,
    running_cluster,
    streammeta,
    values,
    wait_superseded,
)
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process

NAMESPACE = "_streammeta_test"


def options(root: Path) -> tuple[str, ...]:
    (root / "backups").mkdir(exist_ok=True)
    return (*FAST, "--backup-store", f"file://{root}/backups", "--backup-interval-ms", "100")


def is_copied(cluster: LocalCluster, root: Path) -> bool:
    status = streammeta(
        "backup", "status", "--from", f"file://{root}/backups", "--connect", cluster.connect
    )
    return bool(status["exit_code"] == 0 and status["lag_entries"] == 0)


def prepared(cluster: LocalCluster, node_id: int) -> int:
    async def prepare() -> int:
        async with BrokerClient(cluster.endpoints) as client:
            return await prepare_object(await BrokerSession.open(client, node_id, 1))

    return asyncio.run(asyncio.wait_for(prepare(), 60))


class Restoring:
    """A restore over the bucket of a cluster, into the directories of a new one."""

    def __init__(self, root: Path, name: str, count: int = 3) -> None:
        self.root = root
        self.at = ("--from", f"file://{root}/backups", "--store", f"file://{root}/bucket")
        self.plan = root / f"{name}.json"
        self.cluster = LocalCluster(
            root / name,
            name,
            f"file://{root}/bucket",
            free_ports(count),
            (*options(root), "--namespace", NAMESPACE),
            starter=start_warm,
        )

    def make_plan(self, *more: str) -> dict[str, Any]:
        peers = self.cluster.peer_endpoints
        voters = ",".join(f"{node}@{peers[node - 1]}" for node in self.cluster.node_ids)
        return streammeta(
            *("restore", "plan", *self.at, "--new-cluster-id", self.cluster.cluster_id),
            *("--voters", voters, "--plan", str(self.plan), "--namespace", NAMESPACE, *more),
        )

    def apply(self, node_id: int, *more: str) -> dict[str, Any]:
        where = str(self.cluster.data_dir(node_id))
        return streammeta(
            *("restore", "apply", *self.at, "--plan", str(self.plan)),
            *("--node-id", str(node_id), "--data-dir", where, *more),
        )

    def applied(self, *, are_stopped: bool = True) -> None:
        """Apply the plan on each controller; `are_stopped`: those of the old cluster surely are."""
        declared = ("--old-controllers-stopped",) if are_stopped else ()
        done = [self.apply(node_id, *declared) for node_id in self.cluster.node_ids]
        assert {answer["exit_code"] for answer in done} == {0}, done
        assert len({(answer["state_hash"], answer["sha256"]) for answer in done}) == 1


def test_all_disks_lost_and_restored_twice_in_a_row(tmp_path: Path) -> None:
    with running_cluster(tmp_path, options=options(tmp_path)) as cluster:
        with ControllerClient(cluster.endpoints) as client:
            for number in range(20):
                put(client, f"key {number}", str(number))
            wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
            last_id = prepared(cluster, 1001)
            wait_until(lambda: is_copied(cluster, tmp_path), "all to be copied")
            before = values(client)
            end = describe(cluster).high_watermark
        for child in cluster.children.values():
            child.kill()
        for node_id in cluster.node_ids:
            cluster.wipe(node_id)

    for node_id, name, more in ((1002, "second", ()), (1003, "third", ("--cluster-id", "second"))):
        restoring = Restoring(tmp_path, name)
        planned = restoring.make_plan(*more)
        assert planned["exit_code"] == 0, planned
        assert not restoring.cluster.data_dir(1).exists(), "a plan changes nothing"
        restoring.applied()
        again = restoring.apply(1)
        assert (again["exit_code"], again["error"]["code"]) == (1, "DATA_DIRECTORY")
        try:
            before, end = lived(restoring.cluster, before, end, tmp_path)
            new_id = prepared(restoring.cluster, node_id)
            assert new_id >= planned["next_object_id"] > last_id
            last_id = new_id
        finally:
            restoring.cluster.stop_all()
        verified = streammeta(
            "backup", "verify", "--from", f"file://{tmp_path}/backups", "--cluster-id", name
        )
        assert verified["exit_code"] == 0, verified
    store = open_object_store(f"file://{tmp_path}/bucket")
    assert [mark.cluster_id for mark in read_generations(store, NAMESPACE)] == ["second", "third"]


def lived(
    cluster: LocalCluster, wanted: dict[str, str], end: int, root: Path
) -> tuple[dict[str, str], int]:
    """Start a restored cluster, which must hold what is wanted; write, and wait for its backup."""
    cluster.start_all()
    leader_of(cluster)
    with ControllerClient(cluster.endpoints, timeout_s=1) as client:
        assert values(client) == wanted
        with pytest.raises(CallError) as refused:
            put(client, cluster.cluster_id, "1")
        assert refused.value.code == "RECOVERING"
        finish(cluster)
    with ControllerClient(cluster.endpoints) as client:
        put(client, cluster.cluster_id, "1")
        found = values(client)
    hashes = streammeta("cluster", "hash", "--connect", cluster.connect)
    assert hashes["exit_code"] == 0, hashes
    wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
    wait_until(lambda: is_copied(cluster, root), "the next backup")
    assert describe(cluster).high_watermark > end + 2**32
    what_was_remembered_is_refused(cluster, end)
    return found, describe(cluster).high_watermark


def finish(cluster: LocalCluster) -> None:
    """End recovery mode, twice."""
    assert describe(cluster).HasField("undecided")
    for was_recovering in (True, False):
        finished = streammeta(
            *("restore", "finish", "--connect", cluster.connect, "--store", cluster.store_uri)
        )
        assert (finished["exit_code"], finished["was_recovering"]) == (0, was_recovering)


def what_was_remembered_is_refused(cluster: LocalCluster, end: int) -> None:
    """Offsets and versions of the log before, known or never backed up, are of no use any more."""
    with ControllerClient(cluster.endpoints) as client:
        for offset in (0, end, end + 1_000):
            request = metadata_pb2.WatchRequest(from_offset=offset)

            def first(
                channel: grpc.Channel, left_s: float, wanted: Any = request
            ) -> metadata_pb2.WatchResponse:
                watching = MetadataServiceStub(channel).Watch(wanted, timeout=left_s)
                told = next(iter(watching))
                watching.cancel()
                return told

            assert client.ask(first).snapshot_required
        for version in (end, end + 1_000):
            item = kv_pb2.KVToPut(key=cluster.cluster_id, value=b"2", expected_version=version)
            answer = client.call(
                lambda channel: KVServiceStub(channel).PutKVs,
                kv_pb2.PutKVsRequest(items=[item]),
            )
            assert answer.results[0].error == common_pb2.ERROR_CODE_KEY_EXIST


def test_the_old_cluster_rejects_writes_and_old_backups_need_a_request(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1, options=options(tmp_path)) as old:
        with ControllerClient(old.endpoints) as client:
            put_when_ready(client, "one", "1")
            wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
            wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
            restoring = Restoring(tmp_path, "second")
            planned = restoring.make_plan()
            assert planned["exit_code"] == 0, planned
            store = open_object_store(old.store_uri)
            assert planned["next_object_id"] > read_claimed(store, NAMESPACE)
            restoring.applied(are_stopped=False)
            wait_superseded(client)
            assert "one" in values(client), "reads go on"
            with pytest.raises(BucketRejectedError, match="second"):
                prepared(old, 1001)
        # A controller of the old cluster that comes back is fenced from its start.
        old.children[1].kill()
        old.start(1)
        leader_of(old)
        wait_until(lambda: "second" in describe(old).bucket_problem, "the marker to be seen")
    refused = Restoring(tmp_path, "other").make_plan("--cluster-id", "test")
    assert (refused["exit_code"], refused["error"]["code"]) == (1, "WRONG_BUCKET")
    shutil.rmtree(tmp_path / "second")
    again = Restoring(tmp_path, "other")
    assert again.make_plan("--cluster-id", "test", "--supersede")["generation"] == 3


def test_points_in_between_and_before_the_backup(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, 1, options=options(tmp_path)) as cluster,
        ControllerClient(cluster.endpoints) as client,
    ):
        put(client, "one", "1")
        wait_until(lambda: is_copied(cluster, tmp_path), "the first to be copied")
        offset = describe(cluster).high_watermark
        put(client, "two", "2")
        wait_until(lambda: is_copied(cluster, tmp_path), "all to be copied")
    point = Restoring(tmp_path, "point").make_plan("--to-offset", str(offset))
    assert (point["from_end_offset"], point["keys"]) == (offset, 1)
    whole = Restoring(tmp_path, "whole").make_plan("--to-time", "2100-01-01T00:00:00")
    assert whole["keys"] == 2
    early = Restoring(tmp_path, "early").make_plan("--to-time", "2000-01-01T00:00:00")
    assert early["error"]["code"] == "TOO_EARLY"
    late = Restoring(tmp_path, "late").make_plan("--to-offset", "999999")
    assert late["error"]["code"] == "NOT_RESTORABLE"


def test_a_file_that_was_taken_by_hand_is_restored_too(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, 1) as cluster,
        ControllerClient(cluster.endpoints) as client,
    ):
        put(client, "one", "1")
        wait_until(lambda: not describe(cluster).bucket_problem, "ids to be issued")
        file = tmp_path / "now.checkpoint"
        taken = streammeta("backup", "now", str(file), "--connect", cluster.connect)
        assert taken["exit_code"] == 0, taken
        wanted = values(client)
    restoring = Restoring(tmp_path, "second")
    restoring.at = ("--from", str(file), *restoring.at[2:])
    assert restoring.make_plan()["from_end_offset"] == taken["end_offset"]
    restoring.applied()
    try:
        restoring.cluster.start_all()
        leader_of(restoring.cluster)
        with ControllerClient(restoring.cluster.endpoints) as client:
            assert values(client) == wanted
    finally:
        restoring.cluster.stop_all()
    file.write_bytes(file.read_bytes()[:-1])
    damaged = Restoring(tmp_path, "third")
    damaged.at = restoring.at
    assert damaged.make_plan()["error"]["code"] == "BACKUP"
