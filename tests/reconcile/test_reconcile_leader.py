"""Asking the leader, and identity: controllers, map and bucket are of one cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pyarrow.parquet as pq
import pytest

from streammeta.controller.snapshot import checkpoint_file
from streammeta.reconcile.cluster.controller_client import LeaderClient
from streammeta.reconcile.cluster.identity import (
    ClusterIdentity,
    check_bucket,
    check_standing,
    identify,
)
from streammeta.reconcile.metadata.export import MetadataExport, export_metadata, fetch_snapshot
from streammeta.reconcile.vocabulary.errors import ControllerError, MetadataExportError
from streammeta.storage.cluster_files.bucket_marker import claim_key, marker_key
from streammeta.storage.errors import CorruptObjectError, WrongBucketError
from streammeta.storage.object_store.opening import open_object_store
from streammeta.v1 import common_pb2
from streammeta.v1.metadata_pb2 import GetSnapshotResponse
from tests.kit.memory_store import MemoryObjectStore
from tests.kit.real_cluster import running_cluster
from tests.reconcile.fake_controller import (
    COMMITTED,
    LINKED,
    REMOVED,
    FakeMap,
    MapObject,
    checkpoint_of,
    serving,
)


@contextmanager
def asking(state: FakeMap, patience_s: float = 5) -> Iterator[LeaderClient]:
    """Serve a map; yield a client of it."""
    with serving(state) as endpoint, LeaderClient([endpoint], patience_s) as leader:
        yield leader


def test_states_come_in_the_order_asked_for() -> None:
    state = FakeMap(objects={7: MapObject(COMMITTED)}, next_object_id=10)
    with asking(state) as leader:
        standing = leader.check_objects([9, 7, 10])
    assert standing.states == [REMOVED, COMMITTED, common_pb2.OBJECT_STATE_NOT_ISSUED]
    assert (standing.cluster_id, standing.next_object_id) == ("c1", 10)


def test_no_leader_ends_in_an_error_that_names_the_endpoints() -> None:
    with serving(FakeMap()) as endpoint:
        pass
    with (
        LeaderClient([endpoint], 0.5) as leader,
        pytest.raises(ControllerError, match=f"{endpoint}"),
    ):
        leader.check_objects([1])


def test_a_refusal_is_not_repeated() -> None:
    state = FakeMap(refuse=grpc.StatusCode.FAILED_PRECONDITION)
    complaint = r"rejected.*FAILED_PRECONDITION: told to refuse"
    with asking(state, 60) as leader, pytest.raises(ControllerError, match=complaint):
        leader.check_objects([1])
    assert state.checks == [[1]]


def test_an_answer_without_a_cluster_id_is_no_answer() -> None:
    unnamed = FakeMap(cluster_id="")
    with asking(unnamed) as leader, pytest.raises(ControllerError, match="cluster id"):
        leader.check_objects([1])


def test_a_copy_of_the_map_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "map.checkpoint"
    state = FakeMap(snapshot=bytes(range(50)), chunk_bytes=7)
    with asking(state) as leader:
        assert fetch_snapshot(leader, path) == (9, 4)
    assert path.read_bytes() == bytes(range(50))


def copied(state: FakeMap, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> bytes:
    """Copy the map on a clock that goes on by 100 s a chunk and by nothing else."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _seconds: None)
    monkeypatch.setattr("streammeta.rpc.blocking_client.time", clock)

    def take(chunks: Iterator[GetSnapshotResponse]) -> bytes:
        data = b""
        for received in chunks:
            now[0] += 100
            data += received.data
        return data

    with asking(state, patience_s) as leader:
        return leader.read_snapshot(take)


def test_a_leader_lost_during_a_copy_is_searched_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FakeMap(snapshot=b"1234567890", chunk_bytes=1, broken_copies=2)
    assert copied(state, monkeypatch, patience_s=150) == b"1234567890"


def test_copies_that_always_break_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FakeMap(snapshot=b"1234567890", chunk_bytes=1, broken_copies=1000)
    with pytest.raises(ControllerError, match="150 s"):
        copied(state, monkeypatch, patience_s=150)


class Sending(LeaderClient):
    """A leader that sends these chunks."""

    def __init__(self, chunks: list[GetSnapshotResponse]) -> None:
        super().__init__(["unused:1"], 1)
        self._chunks = chunks

    def read_snapshot(self, take):  # type: ignore[no-untyped-def]
        return take(iter(self._chunks))


def chunk(position: int, data: bytes, total: int = 10, end_offset: int = 9) -> GetSnapshotResponse:
    """One piece of a file of `total` bytes."""
    return GetSnapshotResponse(
        end_offset=end_offset, epoch=4, total_bytes=total, position=position, data=data
    )


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [chunk(0, b"12345")],
        [chunk(0, b"12345"), chunk(6, b"7890")],
        [chunk(5, b"67890")],
        [chunk(0, b"12345"), chunk(5, b"67890", end_offset=10)],
        [chunk(0, b"12345"), chunk(5, b"67890", total=11)],
        [chunk(0, b"1234567890x")],
    ],
    ids=["nothing", "short", "gap", "no start", "another copy", "another size", "long"],
)
def test_a_broken_copy_is_refused(tmp_path: Path, chunks: list[GetSnapshotResponse]) -> None:
    with pytest.raises(MetadataExportError, match="at byte"):
        fetch_snapshot(Sending(chunks), tmp_path / "map")


def test_ends_of_streams_are_read_to_the_last_page() -> None:
    state = FakeMap(ends={stream: stream + 5 for stream in range(0, 2500, 2)}, streams_a_page=7)
    with asking(state) as leader:
        assert leader.stream_ends(range(2500)) == state.ends
        assert leader.stream_ends([3, 5]) == {}
        assert leader.stream_ends([]) == {}


def test_unasked_ends_of_streams_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FakeMap()
    monkeypatch.setattr(FakeMap, "ends_of", lambda *_: {9: 1})
    with asking(state) as leader, pytest.raises(ControllerError):
        leader.stream_ends([1])


def test_without_a_leader_no_stream_is_deleted() -> None:
    state = FakeMap(refuse=grpc.StatusCode.PERMISSION_DENIED)
    with asking(state) as leader, pytest.raises(ControllerError, match="DescribeStreams"):
        leader.stream_ends([1])


def exported(state: FakeMap, folder: Path) -> MetadataExport:
    """Export the fake's map."""
    with asking(state) as leader:
        return export_metadata(leader, folder)


def test_the_objects_of_the_map_are_exported(tmp_path: Path) -> None:
    objects = {
        3: MapObject(COMMITTED, size=30, time_ms=33, attributes=-7, node=4),
        5: MapObject(LINKED, size=2**40, crc=2**32 - 1),
        9: MapObject(common_pb2.OBJECT_STATE_PREPARED, node=-1),
    }
    made = exported(FakeMap(objects=objects, next_object_id=10), tmp_path / "map")
    assert made == MetadataExport(
        "c1",
        "uuid-1",
        2000,
        9,
        4,
        next_object_id=10,
        next_stream_id=100,
        objects=3,
        committed_objects=2,
    )
    assert [path.name for path in (tmp_path / "map").iterdir()] == ["objects.parquet"]
    rows = pq.read_table(tmp_path / "map").to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (3, 2, 30, 33, -7, 4, 1, -1, 0),
        (5, 5, 2**40, 1_000_000, 0, 7, 1, 2**32 - 1, 0),
        (9, 1, 0, 1_000_000, 0, -1, 1, -1, 0),
    ]


@pytest.mark.parametrize("with_sums", [(), (0, 1, 2, 3), (1, 7, 8, 30), range(0, 40, 3)])
def test_checksums_are_found_across_the_pieces_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_sums: Iterable[int]
) -> None:
    monkeypatch.setattr(checkpoint_file, "BATCH_ROWS", 3)
    sums = {i: i + 100 for i in with_sums}
    objects = {i: MapObject(COMMITTED, crc=sums.get(i, -1)) for i in range(40) if i % 7 != 6}
    made = exported(FakeMap(objects=objects, chunk_bytes=10_000), tmp_path / "map")
    assert (made.objects, made.committed_objects) == (len(objects), len(objects))
    rows = pq.read_table(tmp_path / "map").to_pylist()
    assert {row["object_id"]: row["map_crc"] for row in rows} == {
        i: sums.get(i, -1) for i in objects
    }


def test_an_empty_map_is_exported(tmp_path: Path) -> None:
    made = exported(FakeMap(next_object_id=0), tmp_path / "map")
    assert (made.objects, made.committed_objects, made.next_object_id) == (0, 0, 0)


@pytest.mark.parametrize("at", [0, 20, 200, -60, -1])
def test_a_damaged_copy_is_refused(tmp_path: Path, at: int) -> None:
    state = FakeMap(objects={3: MapObject(COMMITTED)})
    damaged = bytearray(state.checkpoint())
    damaged[at] ^= 1
    state.snapshot = bytes(damaged)
    with pytest.raises(MetadataExportError):
        exported(state, tmp_path / "map")


def test_a_copy_without_the_columns_wanted_is_refused(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "counters": {"next_object_id": np.array([1])},
        "objects": {"id": np.array([1])},
        "bucket_claim": {"cluster_uuid": ["u"], "issued_below": np.array([1])},
    }
    with pytest.raises(MetadataExportError, match="columns"):
        exported(FakeMap(snapshot=checkpoint_of(sections)), tmp_path / "map")


def test_a_copy_of_another_state_than_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MetadataExportError, match=r"end_offset=8.*end_offset=9"):
        exported(FakeMap(snapshot=checkpoint_of({}, end_offset=8)), tmp_path / "map")


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

    with asking(state) as leader:
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
        pytest.raises(ControllerError, match=f"{other}.*--connect"),
    ):
        identify(leader)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cluster_uuid": ""}, "has no UUID and no marker"),
        ({"namespace": ""}, "does not report its namespace"),
        ({"bucket_problem": "it is older"}, "does not trust its bucket: it is older"),
    ],
)
def test_a_cluster_without_its_bucket_is_refused(change: dict[str, Any], complaint: str) -> None:
    with (
        asking(replace(DEV, **change), 0.1) as leader,
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
    with pytest.raises(WrongBucketError, match="marker"):
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


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"cluster_id": "prod"}, "cluster 'prod', UUID uuid-1, but the plan to"),
        ({"cluster_uuid": "uuid-2"}, "UUID uuid-2, but the plan to"),
        ({"cluster_uuid": ""}, "UUID unknown"),
        ({"issued_below": 199}, "claims reach 200"),
        ({"next_object_id": 99}, "plan saw 100"),
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
        exported = export_metadata(leader, tmp_path / "map")
    assert (exported.cluster_id, exported.cluster_uuid) == ("test", identity.cluster_uuid)
    assert exported.issued_below >= standing.issued_below >= claimed_below > 0
