"""A checkpoint names the voters as of its end, and a file may be relied on whole or not at all."""

import io

import pytest

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.errors import BadSnapshotError
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import (
    FrozenCheckpoint,
    read_metadata,
    snapshot_check,
)
from streammeta.controller.snapshot.checkpoint_file import (
    CheckpointError,
    CheckpointReader,
    write_checkpoint,
)
from streammeta.controller.snapshot.voters import section_voters, voters_section

VOTERS = VoterSet(
    (
        Voter(ReplicaKey(NodeId(1), DirectoryId("d-1")), "host-1:9100"),
        Voter(ReplicaKey(NodeId(2)), "[::1]:9100"),
    )
)
TOLD = VOTERS.with_update(Voter(ReplicaKey(NodeId(2)), "[::1]:9100", "[::1]:9101"))
ID = SnapshotId(EndOffset(7), Epoch(3))
CHECK = snapshot_check(ClusterId("c"))


def written(voters: VoterSet) -> bytes:
    sink = io.BytesIO()
    point = SnapshotPoint(ID, ClusterId("c"), voters)
    assert FrozenCheckpoint(point, ClusterMetadata().freeze(), b"").write(sink) == len(
        sink.getvalue()
    )
    return sink.getvalue()


@pytest.mark.parametrize("voters", [VOTERS, TOLD, VoterSet()])
def test_the_voters_come_back(voters: VoterSet) -> None:
    whole = written(voters)
    assert CHECK(ID, io.BytesIO(whole)) == voters
    assert next(iter(CheckpointReader(io.BytesIO(whole)).entries)) == "voters"
    assert (
        read_metadata(io.BytesIO(whole), ID).cluster_metadata.state_hash()
        == ClusterMetadata().state_hash()
    )


def test_a_file_is_as_it_was_while_no_client_endpoint_is_known() -> None:
    assert list(voters_section(VOTERS)) == ["node_id", "directory_id", "endpoint"]
    assert voters_section(TOLD)["client_endpoint"] == ["", "[::1]:9101"]


def test_a_file_without_the_section_names_nobody() -> None:
    sink = io.BytesIO()
    write_checkpoint(
        sink, SnapshotId(EndOffset(7), Epoch(3)), "c", ClusterMetadata().freeze().sections()
    )
    assert CHECK(ID, sink) == VoterSet()


@pytest.mark.parametrize("name", ["end_offset", "epoch", "cluster"])
def test_another_checkpoint_is_refused(name: str) -> None:
    check = snapshot_check(ClusterId("other" if name == "cluster" else "c"))
    wanted = {
        "end_offset": SnapshotId(EndOffset(8), Epoch(3)),
        "epoch": SnapshotId(EndOffset(7), Epoch(2)),
        "cluster": ID,
    }[name]
    with pytest.raises(BadSnapshotError):
        check(wanted, io.BytesIO(written(VOTERS)))


def test_every_flipped_or_missing_byte_is_refused() -> None:
    whole = written(VOTERS)
    for place in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        with pytest.raises(BadSnapshotError):
            CHECK(ID, io.BytesIO(bytes(damaged)))
        with pytest.raises(BadSnapshotError):
            CHECK(ID, io.BytesIO(whole[:place]))


def test_a_node_named_twice_is_refused() -> None:
    section = voters_section(VOTERS)
    twice = {name: [values[0], values[0]] for name, values in section.items()}
    twice["node_id"] = section["node_id"][[0, 0]]
    sink = io.BytesIO()
    write_checkpoint(sink, SnapshotId(EndOffset(7), Epoch(3)), "c", {"voters": twice})
    with pytest.raises(CheckpointError, match="repeat"):
        section_voters(CheckpointReader(sink))
