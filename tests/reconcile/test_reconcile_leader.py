"""Asking the leader: redirects, patience, and no answer made out of a doubt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pyarrow.parquet as pq
import pytest

from streammeta.reconcile.errors import ControllerError, MapExportError
from streammeta.reconcile.leader import LeaderClient
from streammeta.reconcile.map_export import MapExport, export_map, fetch_snapshot
from streammeta.v1 import common_pb2
from streammeta.v1.metadata_pb2 import GetSnapshotResponse
from tests.reconcile.fake_controller import (
    COMMITTED,
    LINKED,
    REMOVED,
    FakeMap,
    MapObject,
    checkpoint_of,
    serving,
)


def test_states_come_in_the_order_asked_for() -> None:
    state = FakeMap(objects={7: MapObject(COMMITTED)}, next_object_id=10)
    with serving(state) as endpoint, LeaderClient([endpoint], 5) as leader:
        standing = leader.check_objects([9, 7, 10])
    assert standing.states == [REMOVED, COMMITTED, common_pb2.OBJECT_STATE_NOT_ISSUED]
    assert (standing.cluster_id, standing.next_object_id) == ("c1", 10)


def test_a_redirect_is_followed_and_remembered() -> None:
    leading, following = FakeMap(), FakeMap()
    with serving(leading) as there, serving(following) as here:
        following.leader_endpoint = there
        with LeaderClient([here], 5) as leader:
            leader.check_objects([1])
            leader.check_objects([2])
    assert following.checks == [[1]]
    assert leading.checks == [[1], [2]]


def test_a_dead_controller_is_passed_over() -> None:
    with serving(FakeMap()) as alive:
        with serving(FakeMap()) as dead:
            pass
        with LeaderClient([dead, alive], 10) as leader:
            assert leader.check_objects([1]).cluster_id == "c1"


def test_no_leader_ends_in_an_error_that_names_the_endpoints() -> None:
    with serving(FakeMap()) as endpoint:
        pass
    with (
        LeaderClient([endpoint], 0.5) as leader,
        pytest.raises(ControllerError, match=rf"no leader answered within 0.5 s.*{endpoint}"),
    ):
        leader.check_objects([1])


def test_a_refusal_is_not_repeated() -> None:
    state = FakeMap(refuse=grpc.StatusCode.FAILED_PRECONDITION)
    with (
        serving(state) as endpoint,
        LeaderClient([endpoint], 60) as leader,
        pytest.raises(ControllerError, match=r"refused.*FAILED_PRECONDITION: told to refuse"),
    ):
        leader.check_objects([1])
    assert state.checks == [[1]]


def test_an_answer_without_a_cluster_id_is_no_answer() -> None:
    with (
        serving(FakeMap(cluster_id="")) as endpoint,
        LeaderClient([endpoint], 5) as leader,
        pytest.raises(ControllerError, match="without a cluster id"),
    ):
        leader.check_objects([1])


def test_a_copy_of_the_map_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "map.checkpoint"
    state = FakeMap(snapshot=bytes(range(50)), chunk_bytes=7)
    with serving(state) as endpoint, LeaderClient([endpoint], 5) as leader:
        assert fetch_snapshot(leader, path) == (9, 4)
    assert path.read_bytes() == bytes(range(50))


def copied(state: FakeMap, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> bytes:
    """Copy the map on a clock that goes on by 100 s a chunk and by nothing else."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _seconds: None)
    monkeypatch.setattr("streammeta.rpc.blocking_client.time", clock)

    def take(chunks: Iterator[GetSnapshotResponse]) -> bytes:
        data = b""
        for one in chunks:
            now[0] += 100
            data += one.data
        return data

    with serving(state) as endpoint, LeaderClient([endpoint], patience_s) as leader:
        return leader.read_snapshot(take)


def test_a_leader_lost_during_a_long_copy_is_looked_for_as_long_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = FakeMap(snapshot=b"1234567890", chunk_bytes=1, broken_copies=2)
    assert copied(state, monkeypatch, patience_s=150) == b"1234567890"


def test_copies_that_always_break_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    state = FakeMap(snapshot=b"1234567890", chunk_bytes=1, broken_copies=1000)
    with pytest.raises(ControllerError, match=r"no leader answered within 150 s.*told to break"):
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
    with pytest.raises(MapExportError, match=r"copy of the map (broke|ended) at byte"):
        fetch_snapshot(Sending(chunks), tmp_path / "map")


def exported(state: FakeMap, folder: Path) -> MapExport:
    """Export the fake's map."""
    with serving(state) as endpoint, LeaderClient([endpoint], 5) as leader:
        return export_map(leader, folder)


def test_the_objects_of_the_map_are_exported(tmp_path: Path) -> None:
    objects = {
        3: MapObject(COMMITTED, size=30, time_ms=33, attributes=-7),
        5: MapObject(LINKED, size=2**40),
        9: MapObject(common_pb2.OBJECT_STATE_PREPARED),
    }
    made = exported(FakeMap(objects=objects, next_object_id=10), tmp_path / "map")
    assert made == MapExport(
        "c1", "uuid-1", 2000, 9, 4, next_object_id=10, objects=3, committed_objects=2
    )
    assert [path.name for path in (tmp_path / "map").iterdir()] == ["objects.parquet"]
    rows = pq.read_table(tmp_path / "map").to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (3, 2, 30, 33, -7),
        (5, 5, 2**40, 1_000_000, 0),
        (9, 1, 0, 1_000_000, 0),
    ]


def test_an_empty_map_is_exported(tmp_path: Path) -> None:
    made = exported(FakeMap(next_object_id=0), tmp_path / "map")
    assert (made.objects, made.committed_objects, made.next_object_id) == (0, 0, 0)


@pytest.mark.parametrize("at", [0, 20, 200, -60, -1])
def test_a_damaged_copy_is_refused(tmp_path: Path, at: int) -> None:
    state = FakeMap(objects={3: MapObject(COMMITTED)})
    damaged = bytearray(state.checkpoint())
    damaged[at] ^= 1
    state.snapshot = bytes(damaged)
    with pytest.raises(MapExportError, match="can't be read"):
        exported(state, tmp_path / "map")


def test_a_copy_without_the_columns_wanted_is_refused(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "counters": {"next_object_id": np.array([1])},
        "objects": {"id": np.array([1])},
        "bucket_claim": {"cluster_uuid": ["u"], "issued_below": np.array([1])},
    }
    with pytest.raises(MapExportError, match="other columns than this version reads"):
        exported(FakeMap(snapshot=checkpoint_of(sections)), tmp_path / "map")


def test_a_copy_of_another_state_than_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MapExportError, match=r"end_offset=8.*sent as.*end_offset=9"):
        exported(FakeMap(snapshot=checkpoint_of({}, end_offset=8)), tmp_path / "map")
