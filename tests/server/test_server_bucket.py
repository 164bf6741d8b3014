"""Real controllers and their bucket: its marker, claims on object ids, and what is refused."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from streammeta.cli.local.local_cluster import LocalCluster, free_ports
from streammeta.client import errors
from streammeta.client.controllers import bucket_check
from streammeta.client.parts import BrokerSession, ControllerClient, StreamReader, StreamWriter
from streammeta.storage.cluster_files.bucket_marker import is_own_key, read_claimed, read_marker
from streammeta.storage.errors import WrongBucketError
from streammeta.storage.object_format.object_key import key_for
from streammeta.storage.object_store.opening import open_object_store
from tests.kit.real_cluster import FAST, describe, leader_of, prepare_object, running_cluster
from tests.kit.waiting import wait_until
from tests.kit.warm_start import start_warm

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


def test_a_cluster_of_the_same_name_is_refused_the_bucket_and_so_are_its_brokers(
    tmp_path: Path,
) -> None:
    (tmp_path / "first").mkdir()
    with running_cluster(tmp_path / "first") as first:
        issuing(first)
        first_uuid = describe(first, leader_of(first)).cluster_uuid
        assert first_uuid
        bucket = first.store_uri
        second = LocalCluster(
            tmp_path / "second", "test", bucket, free_ports(1), FAST, starter=start_warm
        )
        try:
            second.start_all()
            refused = problem_of(second)
            assert first_uuid in refused
            assert describe(second).cluster_uuid != first_uuid

            async def prepare_and_write() -> None:
                async with ControllerClient(second.endpoints) as client:
                    with pytest.raises(errors.BucketRejectedError, match=first_uuid):
                        await BrokerSession.open(client, 1001, 1)
                    namespace = describe(second).object_namespace
                    reader = StreamReader(client, open_object_store(bucket), namespace)
                    async with reader:
                        with pytest.raises(WrongBucketError, match=first_uuid):
                            await reader.read(0, 0)

            before = objects_in(first)
            asyncio.run(asyncio.wait_for(prepare_and_write(), 60))
            assert objects_in(first) == before
        finally:
            second.stop_all()


def test_a_broker_with_the_wrong_bucket_writes_and_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_check, "MARKER_WAIT", 0.5)  # of a marker that never comes
    with running_cluster(tmp_path, 1) as cluster:
        issuing(cluster)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()

        async def try_it() -> None:
            async with ControllerClient(cluster.endpoints) as client:
                session = await BrokerSession.open(client, 1001, 1)
                with pytest.raises(WrongBucketError, match="marker"):
                    await written(session, f"file://{elsewhere}")
                assert await written(session, cluster.store_uri) == 0
                reader = StreamReader(client, open_object_store(f"file://{elsewhere}"),
                                      session.namespace)  # fmt: skip
                async with reader:
                    with pytest.raises(WrongBucketError, match="marker"):
                        await reader.read(0, 0)

        asyncio.run(asyncio.wait_for(try_it(), 60))
        assert list(open_object_store(f"file://{elsewhere}").list_objects()) == []


def test_a_cluster_restored_to_an_earlier_state_issues_and_deletes_nothing(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        issuing(cluster)
        expiring = prepared(cluster, 1, ttl_ms=3_000)
        stop(cluster)
        for node in cluster.node_ids:
            shutil.copytree(cluster.data_dir(node), tmp_path / "copy" / str(node))
        cluster.start_all()
        leader_of(cluster)
        issuing(cluster)
        lost = prepared(cluster, 2, ttl_ms=600_000)
        store = open_object_store(cluster.store_uri)
        namespace = describe(cluster).object_namespace
        wait_until(
            lambda: any("objects_deleted" in line for line in log_of(cluster)),
            "the expired object to be deleted",
        )
        kept = [key_for(object_id, namespace) for object_id in (expiring, lost)]
        for key in kept:
            store.put(key, b"of the lost time")
        stop(cluster)
        for node in cluster.node_ids:
            cluster.wipe(node)
            shutil.copytree(tmp_path / "copy" / str(node), cluster.data_dir(node))
        cluster.start_all()
        assert "older than the bucket" in problem_of(cluster)

        async def refused() -> None:
            async with ControllerClient(cluster.endpoints) as client:
                session = await BrokerSession.open(client, 1002, 1)
                with pytest.raises(errors.MetadataOlderThanBucketError):
                    await prepare_object(session)
                # What asks for no new objects is served.
                assert await session.create_streams([{}]) == [0]

        asyncio.run(asyncio.wait_for(refused(), 60))
        # Killing the leader changes nothing: the next one finds the same.
        cluster.children[leader_of(cluster)].kill()
        wait_until(lambda: "older" in bucket_problem(cluster), "the next leader to find it")
        wait_until(lambda: describe(cluster).size.destroyed_objects == 1, "the expiry")
        log = log_of(cluster)
        refused_at = min(at(line) for line in log if "bucket_refused" in line)
        assert not [line for line in log if "objects_deleted" in line and at(line) > refused_at]
        assert [store.get_range(key) for key in kept] == [b"of the lost time"] * 2


def test_without_its_bucket_a_leader_takes_commits_and_issues_ids_when_it_is_back(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path) as cluster:
        issuing(cluster)
        bucket, away = tmp_path / "bucket", tmp_path / "away"

        async def stream_then_id(session: BrokerSession) -> None:
            assert await session.create_streams([{}]) == [0]
            await prepare_object(session, deadline_s=3)

        async def streams_but_no_ids() -> None:
            async with ControllerClient(cluster.endpoints) as client:
                session = await BrokerSession.open(client, 1001, 1)
                bucket.rename(away)
                cluster.children[leader_of(cluster)].kill()
                with pytest.raises(errors.ControllerUnavailableError) as put_off:
                    await stream_then_id(session)
                # On a machine that is held up for so long the lease on the marker ends before.
                assert put_off.value.reason in ("OBJECT_IDS_NOT_READY", "MARKER_UNSEEN")
                bring_back = asyncio.get_running_loop().call_later(0.2, away.rename, bucket)
                await prepare_object(session, deadline_s=60)
                bring_back.cancel()

        asyncio.run(asyncio.wait_for(streams_but_no_ids(), 180))


# -- what the tests share


def bucket_problem(cluster: LocalCluster) -> str:
    """Return the problem that some controller has with the bucket, "" if none has."""
    for node in cluster.node_ids:
        if cluster.children[node].is_running and (said := describe(cluster, node).bucket_problem):
            return said
    return ""


def problem_of(cluster: LocalCluster) -> str:
    """Wait until the leader refuses its bucket for good; return why."""
    wait_until(lambda: "nothing is deleted" in bucket_problem(cluster), "the bucket to be refused")
    return bucket_problem(cluster)


def issuing(cluster: LocalCluster) -> None:
    """Wait until object ids can be issued."""

    def is_issuing() -> bool:
        leader = leader_of(cluster)
        seen = describe(cluster, leader)
        return bool(seen.cluster_uuid) and not seen.bucket_problem

    wait_until(is_issuing, "object ids to be issued")


def prepared(cluster: LocalCluster, node_epoch: int, ttl_ms: int) -> int:
    """Prepare one object; return its id."""

    async def prepare() -> int:
        async with ControllerClient(cluster.endpoints) as client:
            session = await BrokerSession.open(client, 1001, node_epoch)
            return await prepare_object(session, ttl_ms)

    return asyncio.run(asyncio.wait_for(prepare(), 60))


async def written(session: BrokerSession, store_uri: str) -> int:
    """Write one record to a new stream through a store; return its offset."""
    (stream,) = await session.create_streams([{}])
    opened = (await session.open_streams({stream: 1})).require_all()
    async with StreamWriter(session, open_object_store(store_uri)) as writer:
        writer.attach(opened.values())
        ack = await writer.append(stream, b"record")
        await writer.flush()
        return await ack


def log_of(cluster: LocalCluster) -> list[str]:
    """Return all lines that the controllers logged."""
    paths = [cluster.root / f"controller-{node}.log" for node in cluster.node_ids]
    return [line for path in paths for line in path.read_text().splitlines()]


def at(line: str) -> str:
    """Return the time of a line of a log."""
    return str(json.loads(line)["timestamp"])


def stop(cluster: LocalCluster) -> None:
    for child in cluster.children.values():
        child.stop()


def objects_in(cluster: LocalCluster) -> set[str]:
    """The keys in the bucket, without marker and claims."""
    namespace = describe(cluster).object_namespace
    keys = (info.key for info in open_object_store(cluster.store_uri).list_objects())
    return {key for key in keys if not is_own_key(key, namespace)}
