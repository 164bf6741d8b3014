"""Durable state of one replica: its log in segments, its snapshots and its quorum-state.

All calls block on the disk and must be made in one thread, unless stated otherwise. A write is
durable after `sync`. After an exception other than DiskFullError the state of the disk is unknown,
and the process must exit. Flushed data is never cut silently, see `recovery`.
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
        """Snapshots in the directory. Only the journal finishes, installs and removes them."""
        self.reserve = reserve
        """Space for urgent writes. While it is short, only urgent writes continue."""
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
        """Durations of flushes that had something to write."""
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

        A torn tail, which was never flushed, is cut. The result is in `quorum_state` and
        `log_start`. A log that lost flushed batches is opened with `log_start.lost` set, and its
        damaged files are put aside. With `directory_id` the directory must have that id. A missing
        reserve of `reserve_bytes` is created, as far as the disk permits. Small batches overwrite
        zeros that are allocated in advance, `room_bytes` at a time, 0 for none.

        Raises:
            DirectoryNotFormattedError: it is empty or missing.
            WrongDirectoryError: it belongs to another node or cluster, or is not a controller's.
            DirectoryLockedError: another process uses it.
            JournalDamagedError: a file with votes or the identity is missing or altered.
            DiskFullError: there is no space to put damaged files aside.
        """
        files = files or PosixFileSystem()
        identity = read_identity(directory, files)
        check_identity(identity, directory, cluster_id, node_id, directory_id)
        lock = lock_directory(files, directory)
        try:
            # A process killed after a rename leaves names that are visible but not yet durable.
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
        """Log start offset. Everything below it is in a snapshot."""
        return EndOffset(self._segments[0].base_offset) if self._segments else self.end_offset

    @property
    def size(self) -> int:
        """Size of the log's segments in bytes, thread-safe."""
        return sum(segment.size for segment in tuple(self._segments))

    # -- writing

    def write_quorum_state(self, state: QuorumState) -> None:
        """Replace the quorum-state, durably. Raises DiskFullError with nothing changed."""
        # An epoch never decreases: an older state would allow a second vote.
        assert state.epoch >= self.quorum_state.epoch, "the epoch of the quorum-state decreases"
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
        """Write batches that continue the log, durable after `sync`.

        Raises DiskFullError. Batches before the one that did not fit stay. Append the others from
        `end_offset` on once there is space.
        """
        for batch in batches:
            if batch.base_offset != self.end_offset or batch.epoch < self._last_epoch:
                raise ValueError(
                    f"batch at {batch.base_offset} of epoch {batch.epoch} does not continue a log "
                    f"that ends at {self.end_offset} in epoch {self._last_epoch}"
                )

            try:
                self._append_batch(batch)
            except DiskFullError as error:
                # The batch may be one that the leader has to replicate to make progress.
                if not self.reserve.release_for_log(error):
                    raise
                self._append_batch(batch)

            self.end_offset = batch.end_offset
            self._last_epoch = batch.epoch
            self.appended_bytes += batch.size

    def sync(self) -> None:
        """Make everything appended durable."""
        # A larger end would vouch to the leader for entries that no disk has.
        assert self.flushed_end <= self.end_offset, "flushed entries are in the log"
        if self.flushed_end == self.end_offset:
            return
        began = time.perf_counter()
        # After a failed flush the kernel may drop the pages, so a second flush proves nothing.
        self._has_failed = True
        self._segments[-1].sync()

        self.flush_times.add(time.perf_counter() - began)
        self._has_failed = False
        self.flushed_end = self.end_offset
        self._mark.advance(self.flushed_end)

    def truncate(self, end_offset: EndOffset) -> None:
        """Cut the log, durably, so that it ends at `end_offset`, where a batch must begin.

        A crash leaves the log cut or whole. Raises DiskFullError, after which it may be repeated.
        """
        if end_offset < self.end_offset:
            self._cut(end_offset)
        self._mark.end_cut()

    def trim(self, start_offset: EndOffset) -> None:
        """Remove segments entirely below `start_offset`, and snapshots that end below it.

        Raises ValueError above the newest snapshot, because the batches would be lost.
        """
        kept = self.snapshots.kept
        if not kept or start_offset > kept[-1].end_offset:
            raise ValueError(f"no snapshot reaches {start_offset}: the log cannot be trimmed there")

        removed = 0
        while len(self._segments) > 1 and self._segments[1].base_offset <= start_offset:
            # Oldest first, so that a crash leaves a contiguous log.
            segment = self._segments.pop(0)
            segment.close()
            self._files.remove(segment.path)
            removed += 1

        if removed:
            self._files.sync_directory(self._directory)
        self.snapshots.forget_below(start_offset)

    def clear_damage(self) -> None:
        """Remove the damage record, durably, after the log is repaired."""
        state_files.clear_damage(self._files, self._directory)

    def close(self) -> None:
        """Flush, then release files and lock. A failed flush is not repeated."""
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
        """Make a sealed file a snapshot, durably. Return False if the log now begins above it.

        Raises:
            DiskFullError: there is no space for the name. It may be repeated.
            ValueError: no batch of its epoch ends at the snapshot's end.
        """
        snapshot_id = writer.snapshot_id
        # A newer snapshot was installed while this one was written.
        if snapshot_id.end_offset < self.start_offset:
            writer.abandon()
            return False
        # The snapshot must describe this log, not one that was truncated.
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
        """Restart the log at the end of the downloaded snapshot and return the voters in it.

        None if the file is incomplete, damaged or not the announced one. The file is then removed,
        and the log stays. The snapshot is durable before the log is removed. Raises DiskFullError,
        after which it may be repeated.
        """
        if self._half_installed is None or self._half_installed[0] != snapshot_id:
            voters = self.snapshots.install(snapshot_id, total_bytes, digest)
            if voters is None:
                return None
            # A retry after a full disk continues here, with the snapshot published.
            self._half_installed = snapshot_id, voters
        self._restart_log(snapshot_id)
        _, voters = self._half_installed
        self._half_installed = None
        return voters

    # -- reading

    def read(self, start_offset: EndOffset, max_bytes: int) -> tuple[Batch, ...]:
        """Return whole batches from `start_offset` on, at least one if available.

        Returns nothing below the start of the log. Raises JournalDamagedError if the batches are
        damaged.
        """
        for segment in reversed(self._segments):
            if segment.base_offset <= start_offset:
                return tuple(segment.read(start_offset, max_bytes))
        return ()

    # -- parts

    def _append_batch(self, batch: Batch) -> None:
        segment = self._segment_for_append()
        # Room must not extend past the end of the segment.
        room = max(0, min(self._room_bytes, self._segment_bytes - segment.size))
        segment.append_batch(batch, self.flushed_end, room)

    def _segment_for_append(self) -> JournalSegment:
        # A segment is flushed and sealed before the next begins: only the last may be torn.
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
            raise ValueError(f"no batch begins at {end_offset}: the log cannot be cut there")

        self.sync()
        # Announced first, so that a start after a crash finishes the cut instead of reporting
        # damage.
        self._mark.begin_cut(end_offset)
        while len(self._segments) > 1 and self._segments[-1].base_offset >= end_offset:
            self._remove_last_segment()
        position = self._segments[-1].position_of(end_offset)
        if position is not None:
            self._segments[-1].cut(position)

        self.end_offset = self.flushed_end = end_offset
        self._last_epoch = epoch

    def _restart_log(self, snapshot_id: SnapshotId) -> None:
        # The log may not end below the mark, or the next start would report damage.
        self._mark.lower(snapshot_id.end_offset)
        while self._segments:
            # Last first, so that a crash never leaves a log that seems to follow the snapshot.
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
        """Return the epoch of the batch that ends there, or None. The log's start counts."""
        if end_offset == self.end_offset:
            return self._last_epoch
        # A segment's header has the epoch of the batch before it.
        for segment in reversed(self._segments):
            if segment.base_offset == end_offset:
                return segment.previous_epoch
            if segment.base_offset < end_offset:
                return segment.epoch_ending_at(end_offset)
        return None
