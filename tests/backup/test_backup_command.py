"""`streammeta backup` over a store in a directory: answers, exit codes, and what it refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streammeta.cli.recovery.backup_command import VERIFY_METRICS
from streammeta.storage.cluster_files.backup_files import Folder
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import admin_pb2, admin_pb2_grpc, quorum_pb2, quorum_pb2_grpc
from tests.backup.backup_world import FOLDER, Backup, random_log
from tests.kit.grpc_servers import abort, served_by_threads, unimplemented
from tests.kit.real_cluster import streammeta


class Controller(unimplemented(admin_pb2_grpc, quorum_pb2_grpc)):  # type: ignore[misc]
    """A controller that knows entries up to `end`. It leads if `leader` is empty."""

    def __init__(self, end: int, leader: str = "") -> None:
        self._end = end
        self._leader = leader

    def DescribeCluster(self, request: object, context: object) -> object:  # noqa: N802
        return admin_pb2.DescribeClusterResponse(
            cluster_id=FOLDER.cluster_id, cluster_uuid=FOLDER.cluster_uuid, high_watermark=self._end
        )

    def DescribeQuorum(self, request: Any, context: object) -> object:  # noqa: N802
        if request.leader_only and self._leader:
            hint = {"leader_endpoint": self._leader, "epoch": "1"}
            abort(context, grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", "not the leader", hint)
        return quorum_pb2.DescribeQuorumResponse(high_watermark=self._end)


@pytest.fixture
def backup(tmp_path: Path) -> Backup:
    """A backup with two segments and a checkpoint between them."""
    made = Backup(random_log(4))
    first, *_, last = ends = made.log.ends
    made.put_segment(first, ends[20])
    made.put_checkpoint(ends[20])
    made.put_segment(ends[20], last)
    copied(made, tmp_path)
    return made


def copied(backup: Backup, root: Path) -> None:
    store = open_object_store(address(root))
    for key, data in backup.store.objects().items():
        store.put(key, data)


def address(root: Path) -> str:
    (root / "bucket").mkdir(exist_ok=True)
    return f"file://{root}/bucket"


def test_a_backup_is_listed_with_what_can_be_restored(backup: Backup, tmp_path: Path) -> None:
    answer = streammeta("backup", "list", "--from", address(tmp_path))
    assert answer["exit_code"] == 0
    (row,) = answer["backups"]
    assert (row["cluster_id"], row["cluster_uuid"]) == (FOLDER.cluster_id, FOLDER.cluster_uuid)
    assert (row["segments"], row["checkpoints"], row["unfinished"]) == (2, 1, 0)
    (span,) = answer["restorable"]
    assert (span["from_offset"], span["to_offset"]) == (0, backup.log.ends[-1])


def test_a_good_backup_is_verified(backup: Backup, tmp_path: Path) -> None:
    for more in ((), ("--all",), ("--cluster-id", "test")):
        answer = streammeta("backup", "verify", "--from", address(tmp_path), *more)
        assert answer["exit_code"] == 0, answer
        assert answer["restorable_to"] == backup.log.ends[-1]
        assert answer["state_hash"] == backup.log.views[-1].digest().hex()
        assert answer["log_hash"] == backup.log.positions[-1].log_hash.hex()
        assert answer["damage"] == []


def test_damage_is_told_with_what_can_still_be_restored(backup: Backup, tmp_path: Path) -> None:
    store = open_object_store(address(tmp_path))
    first, second = backup.archive.inventory().segments
    store.put(FOLDER.key(first), b"damaged")
    answer = streammeta("backup", "verify", "--from", address(tmp_path))
    assert answer["exit_code"] == 0, "the newest point does not need it"
    answer = streammeta("backup", "verify", "--from", address(tmp_path), "--all")
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "DAMAGED")
    assert [row["file"] for row in answer["damage"]] == [str(first)]
    store.delete_many([FOLDER.key(second)])
    answer = streammeta("backup", "verify", "--from", address(tmp_path))
    assert answer["exit_code"] == 1
    assert answer["restorable_to"] is None
    (row,) = answer["damage"]
    assert row["good_to_offset"] == second.start_offset


def test_the_result_of_a_verification_goes_to_prometheus(backup: Backup, tmp_path: Path) -> None:
    file = tmp_path / "verify.prom"
    verify = ("backup", "verify", "--from", address(tmp_path), "--metrics-file", str(file))
    labels = {"cluster_id": FOLDER.cluster_id, "cluster_uuid": FOLDER.cluster_uuid}
    before_s = time.time()
    assert streammeta(*verify)["exit_code"] == 0
    metrics = {family.name: family for family in text_string_to_metric_families(file.read_text())}
    assert set(metrics) == set(VERIFY_METRICS)
    assert {metric.type for metric in metrics.values()} == {"gauge"}
    (damages,), (read_at,) = (metrics[name].samples for name in VERIFY_METRICS)
    assert (damages.labels, damages.value) == (labels, 0)
    assert before_s <= read_at.value <= time.time()
    newest = backup.archive.inventory().segments[-1]
    open_object_store(address(tmp_path)).put(FOLDER.key(newest), b"damaged")
    assert streammeta(*verify)["exit_code"] == 1
    metrics = {family.name: family for family in text_string_to_metric_families(file.read_text())}
    assert metrics["streammeta_backup_verify_damages"].samples[0].value == 1
    written = file.read_text()
    lost = ("backup", "verify", "--from", f"file://{tmp_path}/nowhere", "--metrics-file", str(file))
    assert streammeta(*lost)["exit_code"] == 1
    assert file.read_text() == written


def test_no_backup_and_several_are_told_apart(backup: Backup, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = streammeta("backup", "verify", "--from", address(empty))
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "NO_BACKUP")
    assert streammeta("backup", "list", "--from", address(empty))["backups"] == []
    other = Folder("other", FOLDER.cluster_uuid)
    open_object_store(address(tmp_path)).put(other.key(backup.archive.inventory().segments[0]), b"")
    answer = streammeta("backup", "verify", "--from", address(tmp_path))
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "AMBIGUOUS")
    answer = streammeta("backup", "verify", "--from", address(tmp_path), "--cluster-id", "test")
    assert answer["exit_code"] == 0


def test_a_wrong_address_is_the_callers(tmp_path: Path) -> None:
    answer = streammeta("backup", "list", "--from", "ftp://x")
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "CONFIG")
    assert "from: " in answer["error"]["message"]
    answer = streammeta("backup", "list", "--from", f"file://{tmp_path}/nowhere")
    assert (answer["exit_code"], answer["error"]["code"]) == (1, "STORAGE")


def test_the_lag_is_measured_from_the_leaders_end(backup: Backup, tmp_path: Path) -> None:
    end = backup.log.ends[-1]
    with (
        served_by_threads(Controller(end + 1), admin_pb2_grpc, quorum_pb2_grpc) as leader,
        served_by_threads(Controller(end, leader), admin_pb2_grpc, quorum_pb2_grpc) as follower,
    ):
        words = ("--from", address(tmp_path), "--connect", follower)
        status = streammeta("backup", "status", *words, "--lag-max", "365d")
    assert (status["committed_end"], status["lag_entries"]) == (end + 1, 1)
