"""Surviving directories on disks in memory: a log that is written, then read as a survivor's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.journal.directory import format_directory, read_identity
from streammeta.controller.journal.journal import Journal
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.messages import Batch, BatchKind, encode_voters
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.records.codec import encode_records
from streammeta.controller.recover.planning import (
    Circumstances,
    RecoveryPlan,
    Report,
    choose_survivor,
    plan_recovery,
    voters_text,
)
from streammeta.controller.recover.survivor import Survivor, read_survivor
from streammeta.controller.runtime.persistence.metadata_checkpoint import snapshot_check
from streammeta.storage.durable_files import FileSystem
from tests.kit.crash_disk import CrashDisk

CLUSTER = ClusterId("test")
UUID = "11111111-2222-3333-4444-555555555555"
NEW_UUID = "99999999-2222-3333-4444-555555555555"
NEW_DISK = "new-disk"
DIRECTORY = Path("/node")
MADE = Circumstances(
    namespace="_streammeta_test",
    claimed_below=1_000_000,
    generation=2,
    cluster_uuid=NEW_UUID,
    directory_id=NEW_DISK,
    now_ms=1_700_000_000_000,
)


def voters(*node_ids: int) -> VoterSet:
    """Voters that are known with their disks, `disk1` that of node 1."""
    return VoterSet(
        tuple(
            Voter(ReplicaKey(NodeId(node), DirectoryId(f"disk{node}")), f"127.0.0.1:{node}")
            for node in node_ids
        )
    )


def report(node_id: int, progress: tuple[int, int] = (4, 100), **changes: object) -> Report:
    """The report of a whole directory of one of three voters; `progress` is epoch and end."""
    whole = Report(
        cluster_id=CLUSTER,
        cluster_uuid=UUID,
        node_id=node_id,
        directory_id=f"disk{node_id}",
        epoch=progress[0] + 1,
        last_epoch=progress[0],
        end_offset=progress[1],
        committed_end=10,
        log_hash="ab",
        voters=voters_text(voters(1, 2, 3)),
        damages=0,
        is_repairing=0,
        feature_level=2,
        next_object_id=50,
        issued_below=90,
        undecided_from=40,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


class Writing:
    """A log that is written in the way of a leader, one entry a batch."""

    def __init__(self) -> None:
        self.map = ClusterMetadata()
        self.batches: list[Batch] = []
        self.named = VoterSet()

    @property
    def end(self) -> int:
        return self.batches[-1].end_offset if self.batches else 0

    def name_voters(self, epoch: int, named: VoterSet) -> None:
        self.named = named
        self._add(epoch, BatchKind.CONTROL, encode_voters(named))

    def write(self, epoch: int, request: r.WriteRequest) -> None:
        records = self.map.decide(request, 1_000, self.end).records
        self.map.apply(self.end, records)
        self._add(epoch, BatchKind.DATA, encode_records(records))

    def put(self, epoch: int, key: str) -> None:
        item = r.KVToPut(key=key, value=b"1", overwrite=True)
        self.write(epoch, r.PutKVs(items=(item,)))

    def _add(self, epoch: int, kind: BatchKind, payload: bytes) -> None:
        self.batches.append(Batch(EndOffset(self.end), Epoch(epoch), kind, (payload,)))


def written(keys: int = 5, node_ids: Iterable[int] = (1, 2, 3)) -> Writing:
    """A log of a cluster that has its bucket, with some keys in epoch 4."""
    log = Writing()
    log.name_voters(4, voters(*node_ids))
    log.write(4, r.ClaimBucket(cluster_uuid=UUID, issued_below=1_000))
    for number in range(keys):
        log.put(4, f"key {number}")
    return log


def put_on_disk(
    log: Writing, files: FileSystem, node_id: int = 3, directory: Path = DIRECTORY
) -> None:
    """Make the directory of a node that has flushed a log."""
    format_directory(
        directory,
        cluster_id=CLUSTER,
        node_id=NodeId(node_id),
        directory_id=DirectoryId(f"disk{node_id}"),
        files=files,
    )
    journal = open_journal(files, node_id, directory)
    journal.write_quorum_state(QuorumState(Epoch(5)))
    journal.append(log.batches)
    journal.sync()
    journal.close()


def open_journal(files: FileSystem, node_id: int = 3, directory: Path = DIRECTORY) -> Journal:
    """Open the directory as its controller would."""
    return Journal.open(
        directory,
        cluster_id=CLUSTER,
        node_id=NodeId(node_id),
        read_snapshot_voters=snapshot_check(CLUSTER),
        reserve_bytes=0,
        segment_bytes=200,
        files=files,
    )


def survivor_on(files: FileSystem) -> Survivor:
    return read_survivor(DIRECTORY, files, read_identity(DIRECTORY, files))


def plan_of(survivor: Report, dead: tuple[int, ...] = (1, 2)) -> RecoveryPlan:
    """A plan to go on from the only survivor."""
    return plan_recovery(choose_survivor([survivor], dead), [survivor], dead, MADE)


def disk_of(log: Writing) -> CrashDisk:
    disk = CrashDisk()
    put_on_disk(log, disk)
    return disk.copy()
