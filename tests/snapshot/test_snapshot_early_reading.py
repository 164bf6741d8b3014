"""What is read of a checkpoint before its digest was compared counts only if the digest agrees."""

import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.snapshots import SnapshotStore
from streammeta.controller.metadata.api.requests import CreateStreams, NewStream, RegisterNode
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.values import NodeIdentity
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence import metadata_checkpoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import (
    EarlyReading,
    FrozenCheckpoint,
    LoadedMetadata,
    read_metadata,
    snapshot_check,
)
from streammeta.controller.snapshot.checkpoint_file import FOOTER, CheckpointError, CheckpointReader
from streammeta.storage.durable_files import PosixFileSystem
from tests.metadata.map_pair import Pair

CLUSTER, NODE = ClusterId("c"), NodeId(1)
VOTERS = VoterSet((Voter(ReplicaKey(NODE, None), "a:1"),))


def _map(streams: int) -> ClusterMetadata:
    pair, node = Pair(), NodeIdentity(7, 1)
    pair.write(RegisterNode(node=node))
    pair.write(CreateStreams(request_id="r", node=node, streams=(NewStream(),) * streams))
    return pair.map


def _written(cluster_metadata: ClusterMetadata, epoch: int = 1) -> tuple[SnapshotId, bytes]:
    snapshot_id = SnapshotId(EndOffset(cluster_metadata.applied_end_offset), Epoch(epoch))
    file = io.BytesIO()
    point = SnapshotPoint(snapshot_id, CLUSTER, VOTERS)
    FrozenCheckpoint(point, cluster_metadata.freeze(), bytes(16)).write(file)
    return snapshot_id, file.getvalue()


@pytest.fixture
def counted() -> Iterator[list[LoadedMetadata]]:
    """What was read of files, by whomever."""
    read: list[LoadedMetadata] = []

    def noted(file: Any, snapshot_id: SnapshotId) -> LoadedMetadata:
        read.append(read_metadata(file, snapshot_id))
        return read[-1]

    with patch.object(metadata_checkpoint, "read_metadata", noted):
        yield read


def test_an_intact_checkpoint_is_read_once(tmp_path: Path, counted: list[LoadedMetadata]) -> None:
    older, newest = _written(_map(3)), _written(_map(9), epoch=2)
    for snapshot_id, data in (older, newest):
        (tmp_path / snapshot_id.file_name).write_bytes(data)
    with EarlyReading(tmp_path) as early:
        early.settle(newest[0])
        loaded = early.read(io.BytesIO(newest[1]), newest[0])
        assert counted == [loaded]
        assert loaded.cluster_metadata.state_hash() == _map(9).state_hash()
        again = early.read(io.BytesIO(newest[1]), newest[0])
        assert again.cluster_metadata is not loaded.cluster_metadata


def test_what_is_not_the_newest_that_is_intact_is_read_when_asked_for(
    tmp_path: Path, counted: list[LoadedMetadata]
) -> None:
    older, newest = _written(_map(3)), _written(_map(9), epoch=2)
    (tmp_path / newest[0].file_name).write_bytes(newest[1])
    with EarlyReading(tmp_path) as early:
        early.settle(older[0])
        loaded = early.read(io.BytesIO(older[1]), older[0])
        assert counted[-1] is loaded
        assert loaded.cluster_metadata.state_hash() == _map(3).state_hash()


def test_a_file_of_the_same_name_with_another_digest_is_read_anew(tmp_path: Path) -> None:
    snapshot_id, data = _written(_map(3))
    _, other = _written(_map(9))
    (tmp_path / snapshot_id.file_name).write_bytes(data)
    with EarlyReading(tmp_path) as early:
        early.settle(snapshot_id)
        loaded = early.read(io.BytesIO(other), snapshot_id)
    assert loaded.cluster_metadata.state_hash() == _map(9).state_hash()


def test_without_a_checkpoint_nothing_is_read(
    tmp_path: Path, counted: list[LoadedMetadata]
) -> None:
    with EarlyReading(tmp_path) as early:
        early.settle(None)
    assert not counted


def test_a_failure_is_met_again_where_the_file_is_asked_for(tmp_path: Path) -> None:
    snapshot_id, data = _written(_map(3))
    (tmp_path / snapshot_id.file_name).write_bytes(data[:-1])
    with EarlyReading(tmp_path) as early:
        early.settle(snapshot_id)
        with pytest.raises(CheckpointError, match="footer"):
            early.read(io.BytesIO(data[:-1]), snapshot_id)
    (tmp_path / snapshot_id.file_name).unlink()
    (tmp_path / snapshot_id.file_name).mkdir()
    with EarlyReading(tmp_path) as early:
        assert early.read(io.BytesIO(data), snapshot_id).log_hash == bytes(16)


def _damages(data: bytes) -> Iterator[Callable[[bytearray], None]]:
    """Damage a byte of every section, of what lies around them, and of the digest itself."""
    entries = CheckpointReader(io.BytesIO(data)).entries.values()
    places = [entry.position + at for entry in entries for at in (0, entry.length // 2)]
    for place in (0, 20, *places, len(data) - FOOTER.size - 5, len(data) - FOOTER.size):

        def damage(changed: bytearray, place: int = place) -> None:
            changed[place] ^= 4

        yield damage


def test_a_damaged_file_is_put_aside_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    """Also if all sections are intact and only the digest disagrees, which is known at the end."""
    older, newest = _written(_map(3)), _written(_map(9), epoch=2)
    for number, damage in enumerate(_damages(newest[1])):
        directory = tmp_path / str(number)
        directory.mkdir()
        changed = bytearray(newest[1])
        damage(changed)
        (directory / older[0].file_name).write_bytes(older[1])
        (directory / newest[0].file_name).write_bytes(changed)
        with EarlyReading(directory) as early:
            files, check = PosixFileSystem(), snapshot_check(CLUSTER)
            store = SnapshotStore(directory, files, check, time.monotonic)
            store.recover()
            assert store.kept == (older[0],)
            early.settle(older[0])
            assert early._early is None
            with store.open(older[0]) as file:
                loaded = early.read(file, older[0])
        assert (directory / f"{newest[0].file_name}.damaged").exists()
        assert loaded.cluster_metadata.state_hash() == _map(3).state_hash()
