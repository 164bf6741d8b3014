"""Identity: controllers, map and bucket are of one cluster, or nothing goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammeta.reconcile.errors import ControllerError
from streammeta.reconcile.identity import ClusterIdentity, check_bucket, check_standing, identify
from streammeta.reconcile.leader import LeaderClient
from streammeta.reconcile.map_export import export_map
from streammeta.reconcile.plan import PlanConfig, plan
from streammeta.storage.bucket_marker import claim_key, marker_key
from streammeta.storage.errors import CorruptObjectError, WrongBucketError
from streammeta.storage.object_store.address import open_object_store
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.real_cluster import running_cluster
from tests.reconcile.fake_controller import FakeMap, serving

DEV = FakeMap(cluster_id="dev", cluster_uuid="uuid-1", namespace="_streammeta_dev")


def test_the_leader_says_whose_cluster_it_is() -> None:
    leading = DEV
    following = replace(DEV, cluster_uuid="")  # not yet replayed
    with serving(FakeMap()) as down:
        pass
    with serving(leading) as there, serving(following) as here:
        following.leader_endpoint = there
        with LeaderClient([here, down], 5) as leader:
            assert identify(leader) == ClusterIdentity("dev", "uuid-1", "_streammeta_dev")


def test_a_leader_that_has_just_taken_over_is_given_time() -> None:
    state = replace(DEV, bucket_problem="the leader has just taken over")
    pauses: list[float] = []

    def go_on(seconds: float) -> None:
        pauses.append(seconds)
        state.bucket_problem = ""

    with serving(state) as endpoint, LeaderClient([endpoint], 5) as leader:
        assert identify(leader, sleep=go_on) == DEV.identity
    assert len(pauses) == 1


@pytest.mark.parametrize(
    "difference",
    [
        {"cluster_uuid": "uuid-2"},  # two runs of `streammeta dev` have one name
        {"namespace": "_streammeta_other"},
        {"cluster_id": "prod"},
    ],
    ids=str,
)
def test_controllers_of_two_clusters_are_refused(difference: dict[str, Any]) -> None:
    with (
        serving(DEV) as one,
        serving(replace(DEV, **difference)) as other,
        LeaderClient([one, other], 5) as leader,
        pytest.raises(ControllerError, match=f"{other} is of .*--connect name controllers of one"),
    ):
        identify(leader)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cluster_uuid": ""}, "has no UUID and so no marker"),
        ({"namespace": ""}, "tells no namespace"),
        ({"bucket_problem": "it is older"}, "does not trust its bucket: it is older"),
    ],
)
def test_a_cluster_that_does_not_own_its_bucket_is_refused(
    change: dict[str, Any], complaint: str
) -> None:
    with (
        serving(replace(DEV, **change)) as endpoint,
        LeaderClient([endpoint], 0.1) as leader,
        pytest.raises(ControllerError, match=complaint),
    ):
        identify(leader)


def test_a_bucket_with_the_cluster_s_marker_tells_its_claims() -> None:
    store = MemoryObjectStore()
    DEV.mark(store)
    assert check_bucket(store, DEV.identity) == 0
    for bound in (1000, 3000):
        store.put(claim_key(DEV.namespace, bound), b"")
    assert check_bucket(store, DEV.identity) == 3000


def test_a_bucket_without_a_readable_marker_of_the_cluster_is_refused() -> None:
    store = MemoryObjectStore()
    with pytest.raises(WrongBucketError, match=r"no marker.*name the bucket"):
        check_bucket(store, DEV.identity)
    replace(DEV, cluster_uuid="uuid-2").mark(store)
    with pytest.raises(WrongBucketError, match="uuid-2"):
        check_bucket(store, DEV.identity)
    store.put(marker_key(DEV.namespace), b"{")
    with pytest.raises(CorruptObjectError):
        check_bucket(store, DEV.identity)


def check(**answer: Any) -> None:
    """Compare with a bucket whose claims reach 200 and a plan that saw ids below 100."""
    state = replace(DEV, **{"next_object_id": 100, "issued_below": 200} | answer)
    check_standing(state.answer(()), DEV.identity, claimed_below=200, next_object_id=100)


def test_a_leader_of_the_cluster_is_believed() -> None:
    check()
    check(next_object_id=101, issued_below=201)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"cluster_id": "prod"}, "cluster 'prod', UUID uuid-1, but the plan is of"),
        ({"cluster_uuid": "uuid-2"}, "UUID uuid-2, but the plan is of"),
        ({"cluster_uuid": ""}, "UUID unknown"),
        ({"issued_below": 199}, "claims reach 200"),
        ({"next_object_id": 99}, "plan saw 100: the map was restored"),
    ],
)
def test_any_other_leader_is_not_believed(answer: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ControllerError, match=complaint):
        check(**answer)


# Real controllers


@pytest.mark.process
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


@pytest.mark.process
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
