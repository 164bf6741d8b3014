"""Stage of a story: three controllers over TLS and a bucket, with what all stories do to them."""

import time
from collections.abc import Sequence
from pathlib import Path

from scripts.demonstration import steps
from scripts.demonstration.callers import Callers
from scripts.demonstration.narrator import Narrator
from scripts.demonstration.s3_endpoint import S3Endpoint
from scripts.demonstration.story import MappedKeys
from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.reconcile.cluster.lease import is_lease_key
from streammeta.storage.cluster_files.bucket_marker import is_own_key
from streammeta.storage.object_format.object_key import key_for
from streammeta.v1 import common_pb2

CLUSTER_ID = "demo"
CONTROLLER_COUNT = 3


class Stage:
    """Controllers, bucket and narrator of one story, in the folder `root`."""

    def __init__(
        self, root: Path, narrator: Narrator, endpoint: S3Endpoint, options: Sequence[str]
    ) -> None:
        self.root = root
        self.narrator = narrator
        self.endpoint = endpoint
        self.cluster = LocalCluster(
            root,
            CLUSTER_ID,
            endpoint.store_uri,
            free_ports(CONTROLLER_COUNT),
            options=(
                *("--election-timeout-ms", "400", "--fetch-timeout-ms", "1000"),
                *("--lifecycle-interval-ms", "200", *options),
            ),
            env=endpoint.env,
        )
        self.callers = Callers(self.cluster)

    def start_controllers(self) -> None:
        """Start all controllers, and wait until one leads."""
        self.cluster.start_all()
        leader = steps.wait_for_leader(self.callers.admin)
        self.narrator.step(
            f"three controllers run over TLS, controller {leader} leads; bucket at "
            f"{self.endpoint.url}"
        )

    def kill_leader(self) -> float:
        """Kill and restart the leader. Return the seconds until a write was acknowledged."""
        leader = steps.wait_for_leader(self.callers.admin)
        killed_at = time.monotonic()
        self.cluster.children[leader].kill()
        steps.acknowledged_write(self.callers.admin)
        failover_s = round(time.monotonic() - killed_at, 3)
        self.cluster.start(leader)
        successor = steps.wait_for_leader(self.callers.admin)
        self.narrator.step(
            f"controller {leader}, the leader, is killed (kill -9) and restarted; controller "
            f"{successor} accepted writes after {failover_s} s"
        )
        return failover_s

    def key_of(self, object_id: int) -> str:
        """Return the key of an object in the bucket."""
        return key_for(object_id, self._namespace())

    def keys_of_objects(self) -> set[str]:
        """Return the bucket's keys without the cluster's marker, claims and leases."""
        namespace = self._namespace()
        return {
            key
            for key in steps.bucket_keys(self.endpoint)
            if not is_own_key(key, namespace) and not is_lease_key(key, namespace)
        }

    def mapped_keys(self) -> MappedKeys:
        """Return the keys of the metadata's objects: the live ones, and all of them."""
        namespace = self._namespace()
        keys = {
            state: {key_for(object_id, namespace) for object_id in ids}
            for state, ids in steps.objects_by_state(self.callers.admin).items()
        }
        live = keys.get(common_pb2.OBJECT_STATE_COMMITTED, set())
        return MappedKeys(live, set().union(*keys.values()))

    def reconcile(self) -> None:
        """Plan and apply a reconciliation like an operator, and show the output."""
        plan = str(self.root / "plan")
        place = ["--store", self.endpoint.store_uri, *self.callers.reconciler.words]
        # The story knows that nothing is being uploaded. Its orphans are too young for any grace
        # period that is safe otherwise.
        self.narrator.step("streammeta reconcile plan --unsafe-grace 0s   (deletes nothing)")
        self.narrator.show(
            steps.streammeta(steps.reconcile_plan_words(place, plan), self.endpoint.env)
        )
        self.narrator.step("streammeta reconcile apply --yes")
        self.narrator.show(
            steps.streammeta(steps.reconcile_apply_words(place, plan), self.endpoint.env)
        )

    def _namespace(self) -> str:
        return steps.describe_cluster(self.callers.admin).object_namespace
