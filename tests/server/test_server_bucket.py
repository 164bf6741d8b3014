"""Real controllers and their bucket: its marker, claims on object ids, and what is refused."""

from pathlib import Path

import pytest

from storage.bucket_marker import read_claimed, read_marker
from storage.object_store.factory import open_object_store
from tests.server.quorum_tools import wait_until
from tests.server.running import describe, leader_of, running_cluster

pytestmark = pytest.mark.process


def test_all_controllers_name_the_uuid_of_the_marker_also_after_a_restart(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        store = open_object_store(cluster.store_uri)
        leader_of(cluster)
        wait_until(
            lambda: all(describe(cluster, node).cluster_uuid for node in cluster.node_ids),
            "every controller to know the UUID",
        )
        namespace = describe(cluster).object_namespace
        wait_until(lambda: read_claimed(store, namespace) > 0, "ids to be claimed")
        marker = read_marker(store, namespace)
        assert marker is not None
        assert (marker.cluster_id, marker.namespace) == ("test", namespace)
        uuids = {describe(cluster, node).cluster_uuid for node in cluster.node_ids}
        assert uuids == {marker.cluster_uuid}
        for child in cluster.children.values():
            child.kill()
        cluster.start_all()
        leader = leader_of(cluster)
        wait_until(lambda: bool(describe(cluster, leader).cluster_uuid), "the leader to know it")
        assert describe(cluster, leader).cluster_uuid == marker.cluster_uuid
        assert read_marker(store, namespace) == marker
        wait_until(lambda: not describe(cluster, leader).bucket_problem, "ids to be issued")
