"""Identity: controllers, map and bucket are of one cluster, or nothing goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streammeta.reconcile.errors import ControllerError
from streammeta.reconcile.identity import ClusterIdentity, check_bucket, check_standing, identify
from streammeta.reconcile.leader import LeaderClient, Standing
from streammeta.storage.bucket_marker import claim_key, marker_key
from streammeta.storage.errors import CorruptObjectError, WrongBucketError
from tests.kit.memory_store import MemoryObjectStore
from tests.reconcile.fake_controller import FakeMap, serving

DEV = FakeMap(cluster_id="dev", cluster_uuid="uuid-1", namespace="_streammeta_dev")


def other_dev() -> FakeMap:
    """Another cluster with the same name, as two runs of `streammeta dev` make them."""
    return replace(DEV, cluster_uuid="uuid-2", checks=[])


def test_the_leader_says_whose_cluster_it_is() -> None:
    leading = replace(DEV, checks=[])
    following = replace(DEV, cluster_uuid="", checks=[])  # not yet replayed
    with serving(FakeMap()) as down:
        pass
    with serving(leading) as there, serving(following) as here:
        following.leader_endpoint = there
        with LeaderClient([here, down], 5) as leader:
            assert identify(leader) == ClusterIdentity("dev", "uuid-1", "_streammeta_dev")


def test_a_leader_that_has_just_taken_over_is_given_time() -> None:
    state = replace(DEV, bucket_problem="the leader has just taken over", checks=[])
    pauses: list[float] = []

    def go_on(seconds: float) -> None:
        pauses.append(seconds)
        state.bucket_problem = ""

    with serving(state) as endpoint, LeaderClient([endpoint], 5) as leader:
        assert identify(leader, sleep=go_on) == DEV.identity
    assert len(pauses) == 1


@pytest.mark.parametrize(
    "stranger",
    [
        other_dev(),
        replace(DEV, namespace="_streammeta_other", checks=[]),
        replace(DEV, cluster_id="prod", checks=[]),
    ],
    ids=["another UUID", "another namespace", "another id"],
)
def test_controllers_of_two_clusters_are_refused(stranger: FakeMap) -> None:
    with (
        serving(replace(DEV, checks=[])) as one,
        serving(stranger) as other,
        LeaderClient([one, other], 5) as leader,
        pytest.raises(ControllerError, match=f"{other} is of .*--connect name controllers of one"),
    ):
        identify(leader)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (replace(DEV, cluster_uuid=""), "has no UUID and so no marker"),
        (replace(DEV, namespace=""), "tells no namespace"),
        (
            replace(DEV, bucket_problem="the map is older"),
            "does not trust its bucket: the map is older",
        ),
    ],
)
def test_a_cluster_that_does_not_own_its_bucket_is_refused(state: FakeMap, complaint: str) -> None:
    with (
        serving(state) as endpoint,
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


def test_a_bucket_without_a_marker_is_refused() -> None:
    with pytest.raises(WrongBucketError, match=r"no marker.*name the bucket"):
        check_bucket(MemoryObjectStore(), DEV.identity)


def test_the_bucket_of_another_cluster_of_the_same_name_is_refused() -> None:
    store = MemoryObjectStore()
    other_dev().mark(store)
    with pytest.raises(WrongBucketError, match="uuid-2"):
        check_bucket(store, DEV.identity)


def test_a_marker_that_can_t_be_read_is_refused() -> None:
    store = MemoryObjectStore()
    store.put(marker_key(DEV.namespace), b"{")
    with pytest.raises(CorruptObjectError):
        check_bucket(store, DEV.identity)


STANDING = Standing(
    (), next_object_id=100, cluster_id="dev", cluster_uuid="uuid-1", issued_below=200
)


def check(standing: Standing) -> None:
    """Compare with a bucket whose claims reach 200 and a plan that saw ids below 100."""
    check_standing(standing, DEV.identity, claimed_below=200, next_object_id=100)


def test_a_leader_of_the_cluster_is_believed() -> None:
    check(STANDING)
    check(replace(STANDING, next_object_id=101, issued_below=201))


@pytest.mark.parametrize(
    ("standing", "complaint"),
    [
        (replace(STANDING, cluster_id="prod"), "cluster 'prod', UUID uuid-1, but the plan is of"),
        (replace(STANDING, cluster_uuid="uuid-2"), "UUID uuid-2, but the plan is of"),
        (replace(STANDING, cluster_uuid=""), "UUID unknown"),
        (replace(STANDING, issued_below=199), "claims reach 200"),
        (replace(STANDING, next_object_id=99), "plan saw 100: the map was restored"),
    ],
)
def test_any_other_leader_is_not_believed(standing: Standing, complaint: str) -> None:
    with pytest.raises(ControllerError, match=complaint):
        check(standing)
