"""Objects ahead of the map of a real controller: kept, until their stream has passed them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT, Method
from streammeta.client.model import node_message
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2, objects_pb2
from tests.kit.real_cluster import prepare_object, running_cluster, streammeta
from tests.kit.waiting import wait_until
from tests.reconcile.test_reconcile_ahead import uploaded

pytestmark = pytest.mark.process

CHECK = Method(objects_pb2.CheckObjectsRequest, objects_pb2.CheckObjectsResponse)
NEVER_ISSUED = 1_000_000


class LateUploads:
    """A cluster of one controller, and uploads that come after their ids were forgotten."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._namespace = ""
        self._plans = 0
        self.store = open_object_store(f"file://{cluster.root}/bucket")

    def upload(self, *contents: bytes) -> list[str]:
        """Store each under an id that has expired; returns the keys."""
        ids = asyncio.run(self._prepare(len(contents)))
        wait_until(lambda: asyncio.run(self._are_forgotten(ids)), "the ids to expire")
        keys = [self.key(object_id) for object_id in ids]
        for key, data in zip(keys, contents, strict=True):
            self.store.put(key, data)
        return keys

    async def commit(self, stream_id: int, end: int, size: int) -> None:
        """Commit an upload with the first offsets of a stream."""
        async with ControllerClient(self._cluster.endpoints) as client:
            session = await BrokerSession.open(client, 9, 1)
            await session.open_streams({stream_id: 1})
            object_id = await prepare_object(session)
            self.store.put(self.key(object_id), bytes(size))
            request = objects_pb2.CommitStreamSetObjectRequest(
                request_id="c",
                node=node_message(session.node),
                object_id=object_id,
                object_size=size,
                on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
                ranges=objects_pb2.RangeColumns(
                    stream_id=[stream_id], stream_epoch=[1], start_offset=[0], end_offset=[end]
                ),
            )
            answer = await client.call(COMMIT_STREAM_SET_OBJECT, request)
            assert answer.error == common_pb2.ERROR_CODE_NONE

    async def stream(self) -> int:
        """Create a stream."""
        async with ControllerClient(self._cluster.endpoints) as client:
            session = await BrokerSession.open(client, 9, 1)
            (stream_id,) = await session.create_streams([{}])
            return int(stream_id)

    def key(self, object_id: int) -> str:
        return key_for(object_id, self._namespace)

    def reconcile(self) -> dict[str, Any]:
        """Plan and apply; returns what apply says."""
        self._plans += 1
        folder = str(self._cluster.root / f"plan-{self._plans}")
        place = ("--store", f"file://{self._cluster.root}/bucket")
        limits = ("--unsafe-grace", "0s", "--max-share", "1", "--allow-empty-map")
        made = streammeta(
            *("reconcile", "plan", "--connect", self._cluster.connect),
            *("--plan", folder, *place, *limits),
        )
        assert made["exit_code"] == 0, made
        return streammeta("reconcile", "apply", "--plan", folder, "--yes")

    def is_there(self, key: str) -> bool:
        return any(one.key == key for one in self.store.list_objects(key))

    async def _prepare(self, count: int) -> list[int]:
        async with ControllerClient(self._cluster.endpoints) as client:
            session = await BrokerSession.open(client, 9, 1)
            self._namespace = session.namespace
            return [await prepare_object(session, ttl_ms=1_000) for _ in range(count)]

    async def _are_forgotten(self, ids: list[int]) -> bool:
        async with ControllerClient(self._cluster.endpoints) as client:
            answer = await client.call(CHECK, objects_pb2.CheckObjectsRequest(object_ids=ids))
        return set(answer.states) == {common_pb2.OBJECT_STATE_REMOVED}


def test_late_uploads_are_kept_until_their_stream_has_passed_them(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        world = LateUploads(cluster)
        stream_id = asyncio.run(world.stream())
        ahead, unborn, foreign = world.upload(
            uploaded((stream_id, 0, 5)), uploaded((NEVER_ISSUED, 0, 5)), b"foreign" * 100
        )

        done = world.reconcile()

        assert done["exit_code"] == 0
        assert {one["outcome"]: one["keys"] for one in done["outcomes"]} == {
            "ahead_of_map": 2,
            "deleted": 1,
        }
        assert done["warning"].startswith("2 candidates are kept, because their records are ahead")
        assert [world.is_there(key) for key in (ahead, unborn, foreign)] == [True, True, False]

        asyncio.run(world.commit(stream_id, end=5, size=100))
        world.reconcile()

        assert [world.is_there(key) for key in (ahead, unborn)] == [False, True]
