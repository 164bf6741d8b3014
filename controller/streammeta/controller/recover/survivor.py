"""Reading of a surviving directory: its report, and the metadata at the end of its flushed log.

Changes nothing. A follower learns late which entries are committed, so everything flushed is read.
An entry that was never acknowledged may thereby become committed, but no acknowledged entry is
lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streammeta.controller.backup.replaying import Replayed
from streammeta.controller.backup.restoring import first_undecided_id
from streammeta.controller.backup.segments import Position, advance_position
from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import Epoch, SnapshotId
from streammeta.controller.journal import state_files
from streammeta.controller.journal.directory import DirectoryIdentity
from streammeta.controller.journal.inspection import Inspection
from streammeta.controller.journal.recovery import NO_SNAPSHOT
from streammeta.controller.journal.segment import open_segments
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.messages import Batch, BatchKind, decode_voters
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.records.codec import RecordCodecError, decode_records
from streammeta.controller.recover.planning import RecoveryError, Report, voters_text
from streammeta.controller.runtime.persistence import metadata_checkpoint
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH
from streammeta.storage.durable_files import FileSystem, as_binary_io
from streammeta.storage.segmented_log import BadFrameError


@dataclass(frozen=True, slots=True)
class Survivor:
    """A directory's report and its metadata, which is empty for a damaged directory."""

    report: Report
    replayed: Replayed


def read_survivor(path: Path, files: FileSystem, identity: DirectoryIdentity) -> Survivor:
    """Read a whole directory, which no other process may use meanwhile.

    Raises:
        JournalError: it is of a newer version, or its identity is damaged.
        NewerLogError: its log contains records that only a newer version can read.
        RecoveryError: its log can't be replayed.
    """
    inspection = Inspection(path, files, identity)
    inspection.run(metadata_checkpoint.snapshot_check(identity.cluster_id))
    # A damaged log is not replayed. The report only names the damage.
    if inspection.findings:
        nothing = Replayed(ClusterMetadata(), Position(0, EMPTY_LOG_HASH), 0, 0)
        return Survivor(_report(inspection, nothing, VoterSet(), NO_SNAPSHOT), nothing)
    base = inspection.snapshots[-1].snapshot_id if inspection.snapshots else NO_SNAPSHOT
    replayed, voters = _base(inspection, base)
    for batch in _batches(inspection, base):
        if batch.kind is BatchKind.CONTROL:
            # The last voters of the log count, committed or not, as in the quorum itself.
            voters = decode_voters(batch) or voters
        _replay(replayed, batch)
    return Survivor(_report(inspection, replayed, voters, base), replayed)


def _base(inspection: Inspection, base: SnapshotId) -> tuple[Replayed, VoterSet]:
    first = inspection.identity.bootstrap_voters
    if base == NO_SNAPSHOT:
        return Replayed(ClusterMetadata(), Position(0, EMPTY_LOG_HASH), 0, 0), first
    path = inspection.path / base.file_name
    with as_binary_io(inspection.files.open(path)) as file:
        named = (
            metadata_checkpoint.snapshot_check(inspection.identity.cluster_id)(base, file) or first
        )
        # The check has read the file to its end.
        file.seek(0)
        loaded = metadata_checkpoint.read_metadata(file, base)
    position = Position(base.end_offset, loaded.log_hash)
    replayed = Replayed(loaded.cluster_metadata, position, base.epoch, 0)
    return replayed, named


def _batches(inspection: Inspection, base: SnapshotId) -> Iterator[Batch]:
    """Yield the batches after the newest snapshot, or none if it has replaced the log."""
    end, epoch = base.end_offset, Epoch(0)
    for batch in _whole_log(inspection):
        if batch.base_offset < base.end_offset:
            end, epoch = batch.end_offset, batch.epoch
            continue
        # The log before the snapshot ends in another epoch, so what follows diverges from it.
        if batch.base_offset == base.end_offset and epoch not in (0, base.epoch):
            return
        if end != batch.base_offset:
            return
        yield batch
        end = batch.end_offset


def _whole_log(inspection: Inspection) -> Iterator[Batch]:
    """Yield all batches that a start would keep, up to an announced truncation or a torn tail."""
    files, path, log_id = inspection.files, inspection.path, inspection.identity.log_id
    mark = state_files.FlushedMark.open(files, path / state_files.MARK_NAME, log_id)
    cut_end = mark.end_offset if mark.is_cutting else None
    for file in open_segments(files, path, log_id):
        assert file.segment is not None  # no damage was found
        try:
            for batch in file.segment.scan():
                if cut_end is not None and batch.base_offset >= cut_end:
                    return
                yield batch
        except BadFrameError:
            return  # a torn tail, because no damage was found
        finally:
            file.close()


def _replay(replayed: Replayed, batch: Batch) -> None:
    if batch.kind is BatchKind.DATA:
        for index, payload in enumerate(batch.payloads):
            try:
                replayed.cluster_metadata.apply(batch.base_offset + index, decode_records(payload))
            except (InvariantError, RecordCodecError) as error:
                raise RecoveryError(
                    "UNREADABLE",
                    f"the entry at offset {batch.base_offset + index} can't be replayed: {error}",
                    "use the version of streammeta that wrote the log",
                ) from error
        replayed.cluster_metadata.forget_undo(batch.end_offset)
    replayed.position = advance_position(replayed.position, [batch])
    replayed.epoch = batch.epoch


def _report(
    inspection: Inspection, replayed: Replayed, voters: VoterSet, base: SnapshotId
) -> Report:
    identity, record = inspection.identity, inspection.record
    cluster_metadata = replayed.cluster_metadata
    repairs = 0 if record is None else len(record.findings)

    return Report(
        cluster_id=identity.cluster_id,
        cluster_uuid=cluster_metadata.bucket_claim.cluster_uuid,
        node_id=identity.node_id,
        directory_id=identity.directory_id,
        epoch=inspection.state.epoch if inspection.state else 0,
        last_epoch=replayed.epoch,
        end_offset=replayed.position.end_offset,
        committed_end=base.end_offset,
        log_hash=replayed.position.log_hash.hex(),
        voters=voters_text(voters),
        damages=len(inspection.findings) - repairs,
        is_repairing=int(record is not None),
        feature_level=cluster_metadata.feature_level,
        next_object_id=cluster_metadata.next_object_id,
        issued_below=cluster_metadata.bucket_claim.issued_below,
        undecided_from=first_undecided_id(
            cluster_metadata.freeze(), cluster_metadata.next_object_id
        ),
    )
