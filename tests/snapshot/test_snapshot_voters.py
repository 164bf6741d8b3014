"""Checkpoints of newer versions stop a controller; voters are named as of a checkpoint's end."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.errors import BadSnapshotError, NewerVersionError
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import (
    FrozenCheckpoint,
    read_metadata,
    snapshot_check,
)
from streammeta.controller.snapshot import checkpoint_file
from streammeta.controller.snapshot.checkpoint_file import (
    FOOTER,
    HEADER,
    CheckpointError,
    CheckpointReader,
    write_checkpoint,
)
from streammeta.controller.snapshot.voters import section_voters, voters_section
from tests.journal.journal_tools import make, open_journal

VOTERS = VoterSet(
    (
        Voter(ReplicaKey(NodeId(1), DirectoryId("d-1")), "host-1:9100"),
        Voter(ReplicaKey(NodeId(2)), "[::1]:9100"),
    )
)
TOLD = VOTERS.with_update(Voter(ReplicaKey(NodeId(2)), "[::1]:9100", "[::1]:9101"))
AT = SnapshotId(EndOffset(7), Epoch(3))
CHECK = snapshot_check(ClusterId("c"))


def written(voters: VoterSet) -> bytes:
    sink = io.BytesIO()
    point = SnapshotPoint(AT, ClusterId("c"), voters)
    assert FrozenCheckpoint(point, ClusterMetadata().freeze(), b"").write(sink) == len(
        sink.getvalue()
    )
    return sink.getvalue()


@pytest.mark.parametrize("voters", [VOTERS, TOLD, VoterSet()])
def test_the_voters_come_back(voters: VoterSet) -> None:
    whole = written(voters)
    assert CHECK(AT, io.BytesIO(whole)) == voters
    assert next(iter(CheckpointReader(io.BytesIO(whole)).entries)) == "voters"
    assert (
        read_metadata(io.BytesIO(whole), AT).cluster_metadata.state_hash()
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
    assert CHECK(AT, sink) == VoterSet()


@pytest.mark.parametrize("name", ["end_offset", "epoch", "cluster"])
def test_another_checkpoint_is_refused(name: str) -> None:
    check = snapshot_check(ClusterId("other" if name == "cluster" else "c"))
    wanted = {
        "end_offset": SnapshotId(EndOffset(8), Epoch(3)),
        "epoch": SnapshotId(EndOffset(7), Epoch(2)),
        "cluster": AT,
    }[name]
    with pytest.raises(BadSnapshotError):
        check(wanted, io.BytesIO(written(VOTERS)))


def test_every_flipped_or_missing_byte_is_refused() -> None:
    whole = written(VOTERS)
    for place in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        with pytest.raises(BadSnapshotError):
            CHECK(AT, io.BytesIO(bytes(damaged)))
        with pytest.raises(BadSnapshotError):
            CHECK(AT, io.BytesIO(whole[:place]))


def test_a_node_named_twice_is_refused() -> None:
    section = voters_section(VOTERS)
    twice = {name: [values[0], values[0]] for name, values in section.items()}
    twice["node_id"] = section["node_id"][[0, 0]]
    sink = io.BytesIO()
    write_checkpoint(sink, SnapshotId(EndOffset(7), Epoch(3)), "c", {"voters": twice})
    with pytest.raises(CheckpointError, match="repeat"):
        section_voters(CheckpointReader(sink))


CHECK = snapshot_check(ClusterId("c"))


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return a checkpoint of the empty map whose sections were changed."""
    sections: dict[str, Any] = dict(ClusterMetadata().freeze().sections())
    change(sections)
    sink = io.BytesIO()
    write_checkpoint(sink, AT, "c", sections)
    return sink.getvalue()


def with_section() -> bytes:
    column = np.zeros(0, np.int64)
    return changed(lambda sections: sections.update(links={"stream_id": column}))


def with_column() -> bytes:
    def add(sections: dict[str, Any]) -> None:
        sections["streams"] = {**sections["streams"], "colour": np.zeros(0, np.int64)}

    return changed(add)


def with_version(monkeypatch: pytest.MonkeyPatch) -> bytes:
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint_file, "VERSION", checkpoint_file.VERSION + 1)
        return changed(lambda _: None)


def with_index_member(place: str) -> bytes:
    """Return a checkpoint whose index says more than this version knows, with its checksum."""
    whole = changed(lambda _: None)
    digest, _, length, magic = FOOTER.unpack(whole[-FOOTER.size :])
    body = whole[: -FOOTER.size - length]
    index = json.loads(whole[-FOOTER.size - length : -FOOTER.size])
    (index if place == "index" else index["sections"][0])["colour"] = 1
    text = json.dumps(index).encode()
    return body + text + FOOTER.pack(digest, google_crc32c.value(text), len(text), magic)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("section", "its section 'links'"),
        ("column", "column 'colour' of its section 'streams'"),
        ("version", "format version 3, only up to 2"),
        ("index", "member 'colour' of its index"),
        ("entry", "member 'colour' of its index"),
    ],
)
def test_what_only_a_newer_version_knows_stops_a_start_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: str
) -> None:
    made: dict[str, Callable[[], bytes]] = {
        "section": with_section,
        "column": with_column,
        "version": lambda: with_version(monkeypatch),
        "index": lambda: with_index_member("index"),
        "entry": lambda: with_index_member("entry"),
    }
    data = tmp_path / "data"
    make(data)
    (data / AT.file_name).write_bytes(made[kind]())
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    with pytest.raises(NewerVersionError) as raised:
        open_journal(data, read_snapshot_voters=CHECK)
    assert told in str(raised.value)
    after = {path.name: path.read_bytes() for path in data.iterdir()}
    assert {name: after[name] for name in before if name != ".lock"} == {
        name: data for name, data in before.items() if name != ".lock"
    }
    assert not list(data.glob("*.damaged"))


def test_a_damaged_version_is_damage() -> None:
    whole = bytearray(changed(lambda _: None))
    whole[HEADER.size - 22] ^= 0x10  # within the version
    with pytest.raises(BadSnapshotError, match="checksum"):
        CHECK(AT, io.BytesIO(bytes(whole)))
