"""Orphans in the bucket of a test's cluster, and reconciliation, which deletes them."""

import asyncio
import time

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.controllers.methods import Method
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.real_cluster import prepare_object, streammeta
from tests.kit.waiting import until

_CHECK_OBJECTS = Method(objects_pb2.CheckObjectsRequest, objects_pb2.CheckObjectsResponse)
_EXPIRE_S = 120.0
_NODE_ID = 99


class Orphans:
    """Objects that nothing knows of: uploads that arrive after their ids were forgotten."""

    def __init__(self, cluster: LocalCluster, count: int) -> None:
        self._store = open_object_store(cluster.store_uri)
        self._keys: list[str] = []
        self.planted: list[str] = []
        asyncio.run(self._prepare(cluster, count))

    async def _prepare(self, cluster: LocalCluster, count: int) -> None:
        """Prepare objects, and wait until the controllers have forgotten them."""
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, _NODE_ID, time.time_ns() // 1_000_000)
            ids = [await prepare_object(session, ttl_ms=1000) for _ in range(count)]
            self._keys = [key_for(object_id, session.namespace) for object_id in ids]

            async def are_removed() -> bool:
                request = objects_pb2.CheckObjectsRequest(object_ids=ids)
                states = (await client.call(_CHECK_OBJECTS, request)).states
                return all(state == common_pb2.OBJECT_STATE_REMOVED for state in states)

            await until(are_removed, "prepared objects expire", _EXPIRE_S)

    def is_there(self, key: str) -> bool:
        return any(object_.key == key for object_ in self._store.list_objects(key))

    def plant(self, count: int) -> None:
        """Have some appear."""
        for _ in range(count):
            self.planted.append(self._keys.pop())
            self._store.put(self.planted[-1], b"late")

    def left(self) -> list[str]:
        return [key for key in self.planted if self.is_there(key)]


def reconcile(cluster: LocalCluster) -> tuple[dict[str, int], int]:
    """Plan and apply; return the number of keys by verdict, and how many were deleted."""
    folder = str(cluster.root / f"plan-{time.monotonic_ns()}")
    where = ("--store", cluster.store_uri, "--connect", cluster.connect)
    planned = streammeta(
        "reconcile",
        "plan",
        *where,
        "--plan",
        folder,
        "--engine",
        "local",
        "--max-share",
        "1",
        "--allow-empty-map",
    )
    assert planned["exit_code"] == 0, planned
    applied = streammeta(
        *("reconcile", "apply", "--plan", folder, "--store", cluster.store_uri),
        *("--engine", "local", "--yes"),
    )
    assert applied["exit_code"] == 0, applied
    deleted = (int(row["keys"]) for row in applied["outcomes"] if row["outcome"] == "deleted")
    return {row["verdict"]: int(row["keys"]) for row in planned["classes"]}, sum(deleted)
