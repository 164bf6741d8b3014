"""A real controller whose disk is rolled back to a copy: acknowledged records keep their bytes."""

import asyncio
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.client.controllers.methods import COMMIT_STREAM_SET_OBJECT
from streammeta.client.model import node_message
from streammeta.client.parts import BrokerSession, ControllerClient
from streammeta.storage.cluster_files.bucket_marker import is_own_key, read_claimed
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_format.record import RecordBatch
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2
from tests.kit.built_objects import ObjectBuilder
from tests.kit.real_cluster import STEADY, describe, prepare_object, running_cluster
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process

TTL_MS = 5_000
ATTEMPTS = 5


def test_a_disk_rolled_back_below_commits_does_not_delete_their_objects(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = (*STEADY, "--http-listen", f"127.0.0.1:{port}")
    with running_cluster(tmp_path, 1, options) as cluster:
        objects = roll_back(cluster)
        wait_until(
            lambda: deletions(port)["ahead"] == len(objects), "the objects to be ahead of the map"
        )
        document = status(port)
        keys = {
            ahead_key["key"]: ahead_key["reason"]
            for ahead_key in document["deletions"]["ahead_keys"]
        }
        assert keys.keys() == objects.keys()
        assert all("above the stream's end 0 in the metadata" in reason for reason in keys.values())
        assert "objects_ahead" in {alarm["name"] for alarm in document["alarms"]}
        assert "objects_ahead_of_map" in log_of(cluster)

        # Ids that were never used go, so deletion runs on. Bytes that are no object may be a named
        # one whose commit was forgotten.
        wait_until(lambda: deletions(port)["unproven"] == 1, "other bytes to be kept")
        assert "objects_unproven" in log_of(cluster)
        kept = len(objects) + 1
        wait_until(lambda: deletions(port)["owed"] == kept, "unused ids to be forgotten")
        assert len(keys_in(cluster)) == kept
        store = open_object_store(cluster.store_uri)
        assert {key: store.get_range(key) for key in objects} == objects

        passed = asyncio.run(asyncio.wait_for(append_again(cluster), 120))
        wait_until(lambda: deletions(port)["owed"] == 1, "streams that passed to free objects")
        assert keys_in(cluster).issuperset(passed)
        assert len(keys_in(cluster)) == len(passed) + 1


def roll_back(cluster: LocalCluster) -> dict[str, bytes]:
    """Commit objects after a copy of the disk, and go back to it; return their bytes by key.

    A claim between copy and end would reveal the older map, so that nothing would be deleted at
    all: then there is another attempt.
    """
    for attempt in range(1, ATTEMPTS + 1):
        copy = cluster.root / f"copy-{attempt}"
        objects, is_unseen = asyncio.run(
            asyncio.wait_for(commit_after_copy(cluster, copy, attempt), 120)
        )
        if is_unseen:
            shutil.rmtree(cluster.data_dir(1))
            shutil.copytree(copy, cluster.data_dir(1))
            cluster.start(1)
            return objects
        cluster.start(1)
    raise AssertionError(f"claims came between copy and end in all of {ATTEMPTS} attempts")


async def commit_after_copy(
    cluster: LocalCluster, copy: Path, attempt: int
) -> tuple[dict[str, bytes], bool]:
    """Return the bytes committed after the copy by key, and whether no claim was made meanwhile."""
    store, namespace = open_object_store(cluster.store_uri), describe(cluster).object_namespace
    child = cluster.children[1]
    async with ControllerClient(cluster.endpoints) as client:
        session = await BrokerSession.open(client, 1001, attempt)
        (stream,) = await session.create_streams([{}])
        (await session.open_streams({stream: 1})).require_all()
        ids = [await prepare_object(session, TTL_MS) for _ in range(4)]
        await prepare_object(session, TTL_MS)  # never used
        store.put(key_for(await prepare_object(session, TTL_MS), namespace), b"half an upload")
        objects = {object_id: record_of(stream, offset) for offset, object_id in enumerate(ids)}
        for object_id, data in objects.items():
            store.put(key_for(object_id, namespace), data)

        os.kill(child.pid, signal.SIGSTOP)
        claimed = read_claimed(store, namespace)
        await asyncio.to_thread(shutil.copytree, cluster.data_dir(1), copy)
        os.kill(child.pid, signal.SIGCONT)
        for offset, object_id in enumerate(ids):
            await commit(session, object_id, len(objects[object_id]), stream, offset)
        child.kill()
    by_key = {key_for(object_id, namespace): data for object_id, data in objects.items()}
    return by_key, read_claimed(store, namespace) == claimed


async def append_again(cluster: LocalCluster) -> Sequence[str]:
    """Commit other objects over the offsets; return their keys."""
    store, namespace = open_object_store(cluster.store_uri), describe(cluster).object_namespace
    keys = []
    async with ControllerClient(cluster.endpoints) as client:
        session = await BrokerSession.open(client, 1001, ATTEMPTS + 1)
        for stream in session.inherited:
            for offset in range(stream.next_offset, 4):
                object_id = await prepare_object(session)
                data = record_of(stream.stream_id, offset)
                store.put(key_for(object_id, namespace), data)
                await commit(session, object_id, len(data), stream.stream_id, offset, stream.epoch)
                keys.append(key_for(object_id, namespace))
    return keys


async def commit(
    session: BrokerSession, object_id: int, size: int, stream: int, offset: int, epoch: int = 1
) -> None:
    request = COMMIT_STREAM_SET_OBJECT.request(
        node=node_message(session.node),
        object_id=object_id,
        object_size=size,
        on_conflict=common_pb2.ON_CONFLICT_REJECT_ALL,
    )
    ranges = request.ranges
    ranges.stream_id.append(stream)
    ranges.stream_epoch.append(epoch)
    ranges.start_offset.append(offset)
    ranges.end_offset.append(offset + 1)
    answer = await session.client.call(COMMIT_STREAM_SET_OBJECT, request)
    assert answer.error == 0, answer


def record_of(stream: int, offset: int) -> bytes:
    builder = ObjectBuilder()
    builder.write([RecordBatch(stream, 1, offset, 1, b"acknowledged")])
    return builder.finish().data


def keys_in(cluster: LocalCluster) -> set[str]:
    """Return the keys in the bucket, without marker and claims."""
    namespace = describe(cluster).object_namespace
    keys = (info.key for info in open_object_store(cluster.store_uri).list_objects())
    return {key for key in keys if not is_own_key(key, namespace)}


def status(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status.json", timeout=60) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def deletions(port: int) -> dict[str, Any]:
    found: dict[str, Any] = status(port)["deletions"]
    return found


def log_of(cluster: LocalCluster) -> str:
    return (cluster.root / "controller-1.log").read_text()
