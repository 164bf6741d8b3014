"""Identity as real controllers tell it: answers, copy of the map and bucket name one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from streammeta.reconcile.errors import ControllerError
from streammeta.reconcile.identity import check_bucket, check_standing, identify
from streammeta.reconcile.leader import LeaderClient
from streammeta.reconcile.map_export import export_map
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.storage.errors import WrongBucketError
from streammeta.storage.object_store.address import open_object_store
from tests.kit.real_cluster import running_cluster

pytestmark = pytest.mark.process


def test_controllers_map_and_bucket_name_one_cluster(tmp_path: Path) -> None:
    with (
        running_cluster(tmp_path, count=1) as cluster,
        LeaderClient(cluster.endpoints, 30) as leader,
    ):
        identity = identify(leader)
        assert (identity.cluster_id, identity.namespace) == ("test", "_streammeta_test")
        claimed_below = check_bucket(open_object_store(cluster.store_uri), identity)
        standing = leader.check_objects([0])
        check_standing(standing, identity, claimed_below=claimed_below, next_object_id=0)
        exported = export_map(leader, tmp_path / "map")
    assert (exported.cluster_id, exported.cluster_uuid) == ("test", identity.cluster_uuid)
    assert exported.issued_below >= standing.issued_below >= claimed_below > 0


def test_two_clusters_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    with running_cluster(one, count=1) as here, running_cluster(other, count=1) as there:
        for cluster in (here, there):
            with LeaderClient(cluster.endpoints, 30) as leader:
                identify(leader)
        with (
            LeaderClient([*here.endpoints, *there.endpoints], 30) as leader,
            pytest.raises(ControllerError, match="let --connect name controllers of one cluster"),
        ):
            identify(leader)
        config = PlanConfig(
            store=there.store_uri, connect=tuple(here.endpoints), folder=tmp_path / "p"
        )
        with pytest.raises(WrongBucketError, match="belongs to cluster 'test' with UUID"):
            plan(config)
        assert not (tmp_path / "p").exists()
