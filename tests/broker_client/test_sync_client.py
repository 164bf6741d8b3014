"""The blocking client, against a real controller, and in processes of its own."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import streammeta.client
from streammeta.cli.local.local_cluster import LocalCluster
from streammeta.client import KeyChange, StreamClientConfig, errors, sync
from tests.broker_client.conftest import FAST
from tests.broker_client.sync_child import SCENES
from tests.kit.real_cluster import raise_level

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[sync.StreamClient]:
    place = (cluster.endpoints, cluster.store_uri)
    with sync.StreamClient.open(*place, node_id=1, config=FAST) as client:
        yield client


@pytest.mark.process
def test_streams_are_written_read_followed_and_deleted(client: sync.StreamClient) -> None:
    with client.create_stream(topic="orders") as stream:
        assert (stream.append(b"0"), stream.append([b"1", b"2"])) == (0, 1)
        assert (stream.epoch, stream.next_offset, stream.tags) == (0, 3, {"topic": "orders"})
        assert [record.payload for record in stream] == [b"0", b"1", b"2"]
        assert [record.payload for record in stream.iterate(1, 2)] == [b"1"]
        assert [record.payload for record in stream.read(2)] == [b"2"]
        with stream.follow(1) as records:
            assert next(records).payload == b"1"
        found = stream.offset_at(2, timestamp_of=lambda record: int(record.payload))
        assert found.offset == 2
        assert stream.trim(2) == 2
        assert stream.describe().start_offset == 2
    assert stream.epoch is None
    assert [found.id for found in client.find_streams(topic="orders")] == [stream.id]
    again = client.open_stream(stream.id)
    again.delete()
    with pytest.raises(errors.StreamNotFoundError):
        client.stream(stream.id).describe()
    assert client.open_streams([stream.id]).failed
    assert client.metrics().appends == 2


@pytest.mark.process
def test_shared_streams_are_written_and_found(
    cluster: LocalCluster, client: sync.StreamClient
) -> None:
    raise_level(cluster, 5)
    stream = client.create_stream(topic="shared", shared=True)
    assert (stream.append(b"0", 2), stream.append([b"1", b"2"])) == (0, 2)
    (found,) = client.find_streams(topic="shared")
    for handle in (found, client.stream(stream.id, shared=True)):
        assert isinstance(handle, sync.SharedStream)
    assert client.stream(stream.id, shared=True).append(b"3") == 4
    assert [record.payload for record in client.stream(stream.id)] == [b"0", b"1", b"2", b"3"]
    with pytest.raises(errors.StreamKindMismatchError):
        stream.close()
    found.delete()


@pytest.mark.process
def test_keys_are_put_listed_and_watched(client: sync.StreamClient) -> None:
    with client.watch(["key"], key_prefixes=[("", "k/")]) as changes:
        version = client.kv.put("k/1", b"1", expected_version=0)
        found = client.kv.get("k/1")
        assert found is not None
        assert found.version == version
        assert [pair.key for pair in client.kv.list("k/")] == ["k/1"]
        with pytest.raises(errors.KeyConflictError):
            client.kv.put("k/1", b"2", expected_version=0)
        change = next(changes)
        assert isinstance(change, KeyChange)
        assert (change.key, change.value) == ("k/1", b"1")
        client.kv.delete("k/1")
        assert client.kv.get("k/1") is None
    assert list(changes) == []


@pytest.mark.process
def test_threads_share_a_client(client: sync.StreamClient) -> None:
    stream = client.create_stream()
    threads = [threading.Thread(target=stream.append, args=(b"x",)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(stream)) == 20


@pytest.mark.process
def test_a_callback_that_calls_the_client_is_an_error(client: sync.StreamClient) -> None:
    stream = client.create_stream()
    stream.append(b"0")
    with pytest.raises(RuntimeError, match="callback"):
        stream.offset_at(0, timestamp_of=lambda _: stream.describe().end_offset)


@pytest.mark.process
def test_a_closed_client_refuses_calls_and_a_dropped_one_warns(cluster: LocalCluster) -> None:
    client = sync.StreamClient.open(cluster.endpoints, cluster.store_uri)
    with pytest.raises(ValueError, match="node_id"):
        client.create_stream()
    client.close()
    with pytest.raises(errors.ClientClosedError):
        client.kv.get("a")


def test_a_failed_opening_leaves_no_thread(tmp_path: Path) -> None:
    config = StreamClientConfig(deadline_s=0.1)
    with pytest.raises(errors.ControllerUnavailableError):
        sync.StreamClient.open(["127.0.0.1:1"], f"file://{tmp_path}", config=config)
    assert "streammeta-client" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.process
@pytest.mark.parametrize("scene", SCENES)
def test_forks_interrupts_and_threads(cluster: LocalCluster, scene: str) -> None:
    command = [sys.executable, "-m", "tests.broker_client.sync_child", scene]
    result = subprocess.run(
        [*command, cluster.endpoints[0], cluster.store_uri],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert result.stdout.strip() == "ok", result.stderr


@pytest.mark.parametrize("name", ["StreamClient", "Stream", "KeyValues"])
def test_the_names_and_parameters_are_those_of_the_client(name: str) -> None:
    blocking, waiting = getattr(sync, name), getattr(streammeta.client, name)
    for member in vars(blocking):
        if member.startswith("_") or isinstance(vars(blocking)[member], property):
            continue
        mine = list(inspect.signature(getattr(blocking, member)).parameters)
        theirs = list(inspect.signature(getattr(waiting, member)).parameters)
        assert mine == [parameter for parameter in theirs if parameter != "observer"]
