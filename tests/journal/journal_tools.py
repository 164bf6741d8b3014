"""Shared by the journal's tests: batches, small snapshots, written disks, a journal's contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal.directory import format_directory
from streammeta.controller.journal.errors import BadSnapshotError
from streammeta.controller.journal.journal import Journal
from streammeta.controller.journal.snapshots import SnapshotWriter
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.log_view import LostEntries
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.storage.durable_files import FileSystem
from tests.kit.crash_disk import CrashDisk

CLUSTER, NODE = ClusterId("c"), NodeId(1)
VOTERS = VoterSet((Voter(ReplicaKey(NODE, DirectoryId("d")), "127.0.0.1:1"),))
STATE = QuorumState(Epoch(9), ReplicaKey(NodeId(2)), NodeId(3))
ONE_SEGMENT = 64 << 20
DIRECTORY = Path("/node")
"""Where a node's files are on a disk in memory."""


def batch(base: int, epoch: int, *payloads: bytes, control: bool = False) -> Batch:
    kind = BatchKind.CONTROL if control else BatchKind.DATA
    return Batch(EndOffset(base), Epoch(epoch), kind, payloads)


def snapshot_id(end_offset: int, epoch: int) -> SnapshotId:
    return SnapshotId(EndOffset(end_offset), Epoch(epoch))


def snapshot_bytes(which: SnapshotId, filling: bytes = b"state") -> bytes:
    """Return a file that `check_snapshot` accepts."""
    head = json.dumps([which.end_offset, which.epoch]).encode() + b"\n" + filling
    return head + hashlib.sha256(head).digest()


def check_snapshot(which: SnapshotId, file: BinaryIO) -> VoterSet:
    data = file.read()
    if data != snapshot_bytes(which, data[data.find(b"\n") + 1 : -32]):
        raise BadSnapshotError("its digest does not match")
    return VOTERS


def make(path: Path, files: FileSystem | None = None, state: QuorumState = STATE) -> None:
    """Format a directory whose node has seen all epochs that the tests write."""
    format_directory(path, cluster_id=CLUSTER, node_id=NODE, bootstrap_voters=VOTERS, files=files)
    journal = open_journal(path, files=files)
    journal.write_quorum_state(state)
    journal.close()


def open_journal(
    path: Path, segment_bytes: int = ONE_SEGMENT, files: FileSystem | None = None, **more: Any
) -> Journal:
    options: dict[str, Any] = {
        "cluster_id": CLUSTER,
        "node_id": NODE,
        "read_snapshot_voters": check_snapshot,
        "room_bytes": 0,
        "reserve_bytes": 0,
    }
    return Journal.open(path, segment_bytes=segment_bytes, files=files, **{**options, **more})


def written_disk(
    segment_bytes: int = ONE_SEGMENT,
    *groups: Sequence[Batch],
    snapshots: tuple[tuple[int, int], ...] = (),
) -> CrashDisk:
    """Return a disk with batches that were flushed group by group, and snapshots."""
    disk = CrashDisk()
    make(DIRECTORY, disk)
    journal = open_journal(DIRECTORY, segment_bytes, disk)
    for group in groups:
        journal.append(group)
        journal.sync()
    for end_offset, epoch in snapshots:
        take_snapshot(journal, snapshot_id(end_offset, epoch))
    journal.close()
    return disk.copy()


def read_all(journal: Journal) -> list[Batch]:
    found: list[Batch] = []
    end = journal.start_offset
    while chunk := journal.read(end, 100):
        found.extend(chunk)
        end = found[-1].end_offset
    return found


def sealed_snapshot(
    journal: Journal, which: SnapshotId, filling: bytes = b"state"
) -> SnapshotWriter:
    """Write a snapshot that is yet to be given its name."""
    writer = journal.snapshots.begin(which)
    data = snapshot_bytes(which, filling)
    writer.write(data[:7])
    writer.write(data[7:])
    writer.seal()
    return writer


def take_snapshot(journal: Journal, which: SnapshotId, filling: bytes = b"state") -> None:
    """Write a snapshot as the disk's worker does."""
    assert journal.finish_snapshot(sealed_snapshot(journal, which, filling))


def download(journal: Journal, which: SnapshotId, data: bytes, chunk_bytes: int = 20) -> None:
    for position in range(0, len(data), chunk_bytes):
        journal.snapshots.write_chunk(which, position, data[position : position + chunk_bytes])


def install(journal: Journal, which: SnapshotId, data: bytes) -> VoterSet | None:
    download(journal, which, data)
    return journal.install_snapshot(which, len(data), hashlib.sha256(data).digest())


@dataclass(frozen=True)
class Held:
    """What a journal holds that a replica relies on."""

    batches: tuple[Batch, ...]
    start_offset: int
    end_offset: int
    snapshots: tuple[SnapshotId, ...]
    state: QuorumState
    lost: LostEntries | None


def held_by(journal: Journal) -> Held:
    """Read everything; what recovery told must be what can be read."""
    batches = tuple(read_all(journal))
    start = journal.log_start
    assert [b for b in batches if b.kind is BatchKind.CONTROL] == list(start.control)
    assert batches[len(batches) - len(start.tail) :] == start.tail
    changes = [b for i, b in enumerate(batches) if not i or batches[i - 1].epoch < b.epoch]
    epochs = [(item.epoch, item.start_offset) for item in start.epoch_starts]
    assert epochs == [(b.epoch, b.base_offset) for b in changes]
    assert (start.start_offset, start.end_offset) == (journal.start_offset, journal.end_offset)
    assert start.snapshots == journal.snapshots.kept
    newest = journal.snapshots.kept[-1].end_offset if journal.snapshots.kept else 0
    assert start.start_offset <= newest <= start.end_offset
    assert start.snapshot_voters == (VOTERS if journal.snapshots.kept else None)
    for which in journal.snapshots.kept:
        with journal.snapshots.open(which) as file:
            check_snapshot(which, file)
    return Held(
        batches,
        start.start_offset,
        start.end_offset,
        journal.snapshots.kept,
        journal.quorum_state,
        start.lost,
    )
