"""A restored cluster beside the old one, which lives on and can't reach the bucket."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from streammeta.cli.framework.client import CallError, ControllerClient
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.storage.cluster_files.bucket_marker import LEASE_MS, fenced_key
from streammeta.storage.object_store.opening import open_object_store
from tests.backup.test_restore_process import NAMESPACE, Restoring, is_copied, options
from tests.kit.real_cluster import describe, leader_of, put, streammeta, values
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

pytestmark = pytest.mark.process


class Writing:
    """Puts keys into a cluster all the while, and notes when the last one was acknowledged."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self.acknowledged_at = 0.0
        self.refusals: set[str] = set()

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _write(self) -> None:
        with ControllerClient(self._cluster.endpoints) as client:
            while not self._is_over.wait(0.05):
                try:
                    put(client, "old", "1")
                    self.acknowledged_at = time.monotonic()
                except CallError as error:
                    self.refusals.add(error.code)


@pytest.mark.timeout(300)
def test_a_cluster_without_the_bucket_stops_before_the_restored_one_begins(tmp_path: Path) -> None:
    bucket, seen_by_old = tmp_path / "bucket", tmp_path / "seen-by-old"
    seen_by_old.mkdir()
    old = LocalCluster(
        tmp_path, "test", f"file://{seen_by_old}", free_ports(1), options(tmp_path),
        starter=start_warm,
    )  # fmt: skip
    restoring = Restoring(tmp_path, "second", 1)
    try:
        old.start_all()
        leader_of(old)
        with ControllerClient(old.endpoints) as client:
            put(client, "kept", "1")
        wait_until(lambda: not describe(old).bucket_problem, "ids to be issued")
        wait_until(lambda: is_copied(old, tmp_path), "all to be copied")
        with Writing(old) as writing:
            wait_until(lambda: writing.acknowledged_at > 0, "the old cluster to acknowledge")
            seen_by_old.rename(bucket)
            blind_at = time.monotonic()
            begin_restored(restoring)
            assert not writing.refusals, "the old cluster acknowledges until its lease is over"
            where = ("--connect", restoring.cluster.connect, "--store", f"file://{bucket}")
            adopted = streammeta("restore", "adopt", *where, "--yes")
            adopted_at = time.monotonic()
            assert adopted["exit_code"] == 0, adopted
            assert "MARKER_UNSEEN" in writing.refusals
            finished = streammeta("restore", "finish", *where)
            assert finished["exit_code"] == 0, finished
            with ControllerClient(restoring.cluster.endpoints) as client:
                put(client, "new", "1")
                assert values(client)["kept"] == "1"
        assert writing.acknowledged_at < adopted_at
        assert adopted_at - blind_at > LEASE_MS / 1000
        assert "marker in the bucket" in describe(old).bucket_problem
    finally:
        old.stop_all()
        restoring.cluster.stop_all()


def begin_restored(restoring: Restoring) -> None:
    """Restore and start the new cluster, which changes nothing yet."""
    planned = restoring.make_plan()
    assert planned["exit_code"] == 0, planned
    restoring.applied(are_stopped=False)
    restoring.cluster.start_all()
    leader_of(restoring.cluster)
    with (
        ControllerClient(restoring.cluster.endpoints, timeout_s=5) as client,
        pytest.raises(CallError) as refused,
    ):
        put(client, "early", "1")
    assert refused.value.code == "FENCE_PENDING"
    store = open_object_store(f"file://{restoring.root}/bucket")
    assert fenced_key(NAMESPACE, 2) not in {object_.key for object_ in store.list_objects()}
