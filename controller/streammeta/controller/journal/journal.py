"""Durable state of one replica: its log in segments, its snapshots and its quorum-state.

All calls block on the disk and belong on one thread, unless they say otherwise. A write is durable
after `sync`. After an exception other than DiskFullError the state of the disk is unknown, and the
process must end. Flushed data is never cut away silently: see `recovery`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from streammeta.controller.ids import ClusterId, DirectoryId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.journal import state_files
from streammeta.controller.journal.directory import (
    DirectoryIdentity,
    check_identity,
    lock_directory,
    read_identity,
)
from streammeta.controller.journal.recovery import Recovery
from streammeta.controller.journal.reserve import DEFAULT_RESERVE_BYTES, RESERVE_NAME, Reserve
from streammeta.controller.journal.segment import ROOM_BYTES, JournalSegment
from streammeta.controller.journal.snapshots import SnapshotCheck, SnapshotStore, SnapshotWriter
from streammeta.controller.quorum.config import QuorumState
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.timings import Times
from streammeta.storage.durable_files import DiskFullError, FileSystem, Lock, PosixFileSystem

DEFAULT_SEGMENT_BYTES = 64 << 20


class Journal:
    """An open data directory."""

    def __init__(
        self,
        directory: Path,
        files: FileSystem,
        identity: DirectoryIdentity,
        lock: Lock,
        segment_bytes: int,
        room_bytes: int,
        snapshots: SnapshotStore,
        reserve: Reserve,
    ) -> None:
        self.identity = identity
        self._directory = directory
        self._files = files
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._room_bytes = room_bytes
        self.snapshots = snapshots
        """Snapshots beside the log; the journal itself finishes, installs and removes them."""
        self.reserve = reserve
        """Room for urgent writes: while it is short of any, only those go on."""
        self._has_failed = False
        self.quorum_state = state_files.read_quorum_state(files, directory / state_files.STATE_NAME)
        self._mark = state_files.FlushedMark.open(
            files, directory / state_files.MARK_NAME, identity.log_id
        )
        self._segments, self.log_start = Recovery(
            directory, files, identity.log_id, self._mark, self.quorum_state, snapshots
        ).run()
        self.end_offset = self.log_start.end_offset
        self.flushed_end = self.end_offset
        epochs = self.log_start.epoch_starts
        self._last_epoch = epochs[-1].epoch if epochs else self.log_start.start_epoch
        self._half_installed: tuple[SnapshotId, VoterSet] | None = None
        self.flush_times = Times()
        """Times of flushes of the log that had something to flush."""
        self.appended_bytes = 0
        """Bytes of batches appended since the journal was opened."""

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        cluster_id: ClusterId,
        node_id: NodeId,
        read_snapshot_voters: SnapshotCheck,
        directory_id: DirectoryId | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        room_bytes: int = ROOM_BYTES,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        files: FileSystem | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Journal:
        """Check the identity of the directory, lock it, and recover its contents.

        A torn tail, which was never flushed, is cut. `quorum_state` and `log_start` hold the
        result. A log that lost flushed batches is opened with `log_start.lost` set, the damaged
        files put aside. With `directory_id`, the directory must be that one. A directory without
        its reserve of `reserve_bytes` gets it, as far as the disk has it. Small batches are
        written over zeros that are made ahead, `room_bytes` at a time; 0 for none.

        Raises:
            DirectoryNotFormattedError: it is empty or missing.
            WrongDirectoryError: it belongs to another node or cluster, or is not a controller's.
            DirectoryLockedError: another process uses it.
            JournalDamagedError: a file that holds votes or identity is missing or altered.
            DiskFullError: there is no room to put damaged files aside.
        """
        files = files or PosixFileSystem()
        identity = read_identity(directory, files)
        check_identity(identity, directory, cluster_id, node_id, directory_id)
        lock = lock_directory(files, directory)
        try:
            # A process killed after a rename leaves names that are seen and not yet durable.
            files.sync_directory(directory)
            snapshots = SnapshotStore(directory, files, read_snapshot_voters, monotonic)
            reserve = Reserve(files, directory / RESERVE_NAME, reserve_bytes)
            journal = cls(
                directory, files, identity, lock, segment_bytes, room_bytes, snapshots, reserve
            )
            reserve.refill()
            return journal
        except BaseException:
            lock.release()
            raise

    @property
    def start_offset(self) -> EndOffset:
        """Log start offset; everything below is in a snapshot."""
        return EndOffset(self._segments[0].base_offset) if self._segments else self.end_offset

    @property
    def size(self) -> int:
        """Bytes of the log's segments; may be asked from any thread."""
        return sum(segment.size for segment in tuple(self._segments))

    # -- writing

    def write_quorum_state(self, state: QuorumState) -> None:
        """Replace the quorum-state, durably; raises DiskFullError with nothing changed."""
        path = self._directory / state_files.STATE_NAME
        try:
            state_files.write_quorum_state(self._files, path, state)
        except DiskFullError as error:
            if not self.reserve.release_for_state(error):
                raise
            state_files.write_quorum_state(self._files, path, state)
            self.reserve.keep_for_state()
        self.quorum_state = state

    def append(self, batches: Sequence[Batch]) -> None:
        """Write batches that continue the log; durable after `sync`.

        Raises DiskFullError: whole batches before the one that found no room stay; append those
        from `end_offset` on when there is room.
        """
        for batch in batches:
            if batch.base_offset != self.end_offset or batch.epoch < self._last_epoch:
                raise ValueError(
                    f"batch at {batch.base_offset} of epoch {batch.epoch} does not continue a log "
                    f"that ends at {self.end_offset} in epoch {self._last_epoch}"
                )
            try:
                self._append_one(batch)
            except DiskFullError as error:
                if not self.reserve.release_for_log(error):
                    raise
                self._append_one(batch)
            self.end_offset = batch.end_offset
            self._last_epoch = batch.epoch
            self.appended_bytes += batch.size

    def sync(self) -> None:
        """Make everything appended durable."""
        if self.flushed_end == self.end_offset:
            return
        began = time.perf_counter()
        self._has_failed = True  # until the sync has succeeded
        self._segments[-1].sync()
        self.flush_times.add(time.perf_counter() - began)
        self._has_failed = False
        self.flushed_end = self.end_offset
        self._mark.advance(self.flushed_end)

    def truncate(self, end_offset: EndOffset) -> None:
        """Cut the log so that it ends at `end_offset`, where a batch must begin; durably.

        A crash leaves the log cut or whole. Raises DiskFullError; it may be repeated then.
        """
        if end_offset < self.end_offset:
            self._cut(end_offset)
        self._mark.end_cut()

    def trim(self, start_offset: EndOffset) -> None:
        """Remove segments wholly below `start_offset`, and snapshots that end below it.

        Raises ValueError above the newest snapshot: the removed batches would be in no snapshot.
        """
        kept = self.snapshots.kept
        if not kept or start_offset > kept[-1].end_offset:
            raise ValueError(f"no snapshot reaches {start_offset}, the log can't be trimmed there")
        removed = 0
        while len(self._segments) > 1 and self._segments[1].base_offset <= start_offset:
            # The oldest first, so that a crash leaves a contiguous log.
            segment = self._segments.pop(0)
            segment.close()
            self._files.remove(segment.path)
            removed += 1
        if removed:
            self._files.sync_directory(self._directory)
        self.snapshots.forget_below(start_offset)

    def clear_damage(self) -> None:
        """Forget, durably, that damage had cut anything from this log."""
        state_files.clear_damage(self._files, self._directory)

    def close(self) -> None:
        """Flush, release the files and the lock; a flush that failed is not tried again."""
        if not self._has_failed:
            self.sync()
            self._mark.close()
        for segment in self._segments:
            segment.close()
        self.reserve.close()
        self.snapshots.close()
        self._lock.release()

    # -- snapshots

    def finish_snapshot(self, writer: SnapshotWriter) -> bool:
        """Make a sealed file a snapshot, durably; False if the log begins above it by now.

        Raises:
            DiskFullError: there is no room for the name; it may be repeated.
            ValueError: no batch of its epoch ends where the snapshot ends.
        """
        snapshot_id = writer.snapshot_id
        if snapshot_id.end_offset < self.start_offset:
            writer.abandon()
            return False
        if self._epoch_ending_at(snapshot_id.end_offset) != snapshot_id.epoch:
            raise ValueError(
                f"no batch of epoch {snapshot_id.epoch} ends at {snapshot_id.end_offset}: no "
                "snapshot may end there"
            )
        self.snapshots.publish(writer)
        return True

    def install_snapshot(
        self, snapshot_id: SnapshotId, total_bytes: int, digest: bytes
    ) -> VoterSet | None:
        """Begin the log anew at the end of the downloaded snapshot; return the voters it names.

        None if the file is incomplete, damaged or not the announced one: it is removed then, and
        the log stays. The snapshot is durable before the log goes. Raises DiskFullError; it may be
        repeated then.
        """
        if self._half_installed is None or self._half_installed[0] != snapshot_id:
            voters = self.snapshots.install(snapshot_id, total_bytes, digest)
            if voters is None:
                return None
            self._half_installed = snapshot_id, voters
        self._begin_anew(snapshot_id)
        _, voters = self._half_installed
        self._half_installed = None
        return voters

    # -- reading

    def read(self, start_offset: EndOffset, max_bytes: int) -> tuple[Batch, ...]:
        """Return whole batches from `start_offset`, at least one if there is any.

        None are returned below the start of the log. Raises JournalDamagedError if the bytes read
        are damaged.
        """
        for segment in reversed(self._segments):
            if segment.base_offset <= start_offset:
                return tuple(segment.read(start_offset, max_bytes))
        return ()

    # -- parts

    def _append_one(self, batch: Batch) -> None:
        segment = self._segment_for_append()
        room = max(0, min(self._room_bytes, self._segment_bytes - segment.size))
        segment.append_batch(batch, self.flushed_end, room)

    def _segment_for_append(self) -> JournalSegment:
        if not self._segments or self._segments[-1].size >= self._segment_bytes:
            self.sync()
            if self._segments:
                self._segments[-1].seal()
            segment = JournalSegment.create(
                self._files,
                self._directory,
                self.identity.log_id,
                self.end_offset,
                self._last_epoch,
            )
            self._segments.append(segment)
        return self._segments[-1]

    def _cut(self, end_offset: EndOffset) -> None:
        epoch = self._epoch_ending_at(end_offset)
        if epoch is None:
            raise ValueError(f"no batch begins at {end_offset}, the log can't be cut there")
        self.sync()
        self._mark.begin_cut(end_offset)
        while len(self._segments) > 1 and self._segments[-1].base_offset >= end_offset:
            self._remove_last_segment()
        position = self._segments[-1].position_of(end_offset)
        if position is not None:
            self._segments[-1].cut(position)
        self.end_offset = self.flushed_end = end_offset
        self._last_epoch = epoch

    def _begin_anew(self, snapshot_id: SnapshotId) -> None:
        self._mark.lower(snapshot_id.end_offset)
        while self._segments:
            # The last first, so that a crash never leaves a log that seems to follow the snapshot.
            self._remove_last_segment()
        self.end_offset = self.flushed_end = snapshot_id.end_offset
        self._last_epoch = snapshot_id.epoch
        self._mark.advance(self.end_offset)
        self.snapshots.forget_below(snapshot_id.end_offset)

    def _remove_last_segment(self) -> None:
        segment = self._segments.pop()
        segment.close()
        self._files.remove(segment.path)
        self._files.sync_directory(self._directory)

    def _epoch_ending_at(self, end_offset: EndOffset) -> Epoch | None:
        """Return the epoch of the batch that ends there, or None; the log's start counts."""
        if end_offset == self.end_offset:
            return self._last_epoch
        for segment in reversed(self._segments):
            if segment.base_offset == end_offset:
                return segment.previous_epoch
            if segment.base_offset < end_offset:
                return segment.epoch_ending_at(end_offset)
        return None
