"""Continuous backup: the leader's task that copies the committed log to a bucket.

At the start of a term it finds the end of the backup, checks that its last file belongs to this
log, and continues from there. `next_step` decides the order on offsets only: segments continue the
backup and contain committed entries only, and each new checkpoint of the controller is uploaded
after the segments before it. Nothing is buffered while the bucket is unavailable: missing entries
are read from the log again later. Where the log was trimmed meanwhile, a checkpoint begins a new
chain. Calls of the bucket run in threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias

import structlog

from streammeta.controller.backup import segments
from streammeta.controller.backup.archive import Archive
from streammeta.controller.backup.chains import find_dispensable
from streammeta.controller.backup.checkpoints import checkpoint_file, checkpoint_log_hash
from streammeta.controller.backup.errors import BackupDivergedError, BackupError
from streammeta.controller.backup.verification import newest_file
from streammeta.controller.ids import ClusterId, SnapshotId
from streammeta.controller.lifecycle import tasks
from streammeta.controller.quorum.messages import Batch
from streammeta.controller.runtime.clock import Clock
from streammeta.controller.runtime.persistence.state_hashes import EMPTY_LOG_HASH, UNKNOWN_LOG_HASH
from streammeta.controller.runtime.replication.log_time import JUMP_MS
from streammeta.controller.runtime.writer.controller import MetadataController
from streammeta.storage.cluster_files import backup_files
from streammeta.storage.errors import StorageError
from streammeta.storage.object_store.protocol.base import ObjectStore

ORIGIN = segments.Position(0, EMPTY_LOG_HASH)
"""Beginning of a log that was never trimmed."""


@dataclass(frozen=True, slots=True)
class PutSegment:
    """Upload the entries from a position on, at most up to `end_offset`."""

    start: segments.Position
    end_offset: int


@dataclass(frozen=True, slots=True)
class PutCheckpoint:
    """Upload a checkpoint from the controller's disk."""

    snapshot_id: SnapshotId


Step: TypeAlias = PutSegment | PutCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of the backup and of the controller.

    `position` is the end of the backed up log, None if a chain must begin. `checkpoint_end` is the
    end of the newest checkpoint in the backup, 0 without one. `newest` is the controller's newest
    one.
    """

    position: segments.Position | None
    checkpoint_end: int
    newest: SnapshotId | None
    committed_end: int


def next_step(progress: Progress) -> Step | None:
    """Return the next upload, None if everything committed is in the backup."""
    newest, position = progress.newest, progress.position
    if position is None:
        # The log before a checkpoint may be trimmed, so a chain can only begin there.
        if newest is not None:
            return PutCheckpoint(newest)
        position = ORIGIN
    elif newest is not None and progress.checkpoint_end < newest.end_offset <= position.end_offset:
        return PutCheckpoint(newest)
    if progress.committed_end > position.end_offset:
        return PutSegment(position, progress.committed_end)
    return None


_log = structlog.get_logger(component="backup")

SEGMENT_BYTES = 4 << 20
"""Payload in bytes at which a segment is full."""

READ_BYTES = 128 << 10
"""Bytes read from the log at once, few enough not to delay a flush."""

CHECKPOINT_TIMEOUT_S = 600.0
"""Deadline for uploading a checkpoint, which is as large as the metadata, in seconds."""

LATE_INTERVALS = 3
"""Intervals without a finished copy after which the backup counts as late."""


class BackupSource(Protocol):
    """The log and the checkpoints of this controller."""

    async def read(self, start_offset: int, max_bytes: int) -> tuple[Batch, ...]:
        """Return whole batches from an offset on, none if they were trimmed."""
        ...

    @property
    def newest_checkpoint(self) -> SnapshotId | None:
        """The newest checkpoint on disk."""
        ...

    def open_checkpoint(self, snapshot_id: SnapshotId) -> BinaryIO:
        """Open a checkpoint, in a thread. Raises FileNotFoundError if it was removed."""
        ...


@dataclass(frozen=True, slots=True)
class BackupStatus:
    """Lag of the backup, as this leader knows it.

    `behind_ms` is the age of the oldest committed entry that may be missing. `problem` says why
    nothing is uploaded, and is empty if all is well.
    """

    end_offset: int
    behind_entries: int
    behind_ms: int
    problem: str


class _TrimmedError(Exception):
    """The log begins above the requested entries."""


class _OtherBoundsError(_TrimmedError):
    """No batch of the log begins, or ends, at the requested offset."""


@dataclass(slots=True, eq=False)
class _Term:
    """The backup as the leader knows it in one term."""

    archive: Archive
    copied_at_ms: int
    """Monotonic time up to which everything committed is in the backup."""
    is_begun: bool = False
    position: segments.Position | None = None
    last_ms: int = 0
    checkpoint_end: int = 0
    problem: str = ""
    is_late: bool = False
    is_clock_doubted: bool = False


class Backup(tasks.PeriodicTask, tasks.LeaderTask[_Term]):
    """The leader's backup task, idle on other controllers."""

    def __init__(
        self,
        controller: MetadataController,
        source: BackupSource,
        store: ObjectStore,
        clock: Clock,
        *,
        cluster_id: ClusterId,
        cluster_uuid: Callable[[], str],
        writer_version: str,
        interval_ms: int,
        keep_ms: int,
    ) -> None:
        """`cluster_uuid` returns the cluster's UUID, empty as long as there is none."""
        super().__init__(interval_ms)
        self._controller = controller
        self._source = source
        self._store = store
        self._clock = clock
        self._cluster_id = cluster_id
        self._cluster_uuid = cluster_uuid
        self._writer_version = writer_version
        self._keep_ms = keep_ms
        self._leads = False
        controller.on_leadership(self._on_leadership)

    @property
    def status(self) -> BackupStatus | None:
        """The state of the backup, None if this node does not lead or has not started."""
        term = self._term
        if term is None:
            return None
        behind = self._controller.committed_end - self.end_offset
        behind_ms = self._clock.monotonic_ms() - term.copied_at_ms if behind else 0
        return BackupStatus(self.end_offset, behind, behind_ms, term.problem)

    @property
    def end_offset(self) -> int:
        """End of the log in the backup, 0 if this node does not lead or does not know it yet."""
        position = None if self._term is None else self._term.position
        return 0 if position is None else position.end_offset

    async def step(self) -> None:
        """Copy everything committed so far. Failures are retried in the next interval."""
        # Without a UUID there is no folder: two clusters of one name must not share one.
        if self._leads and self._cluster_uuid():
            await self._work()

    def _on_leadership(self, leads: bool) -> None:
        # Knowledge of an earlier term is outdated: another leader may have continued the backup.
        self._leads, self._term = leads, None

    # -- one interval

    async def _work(self) -> None:
        if self._term is None:
            folder = backup_files.Folder(self._cluster_id, self._cluster_uuid())
            self._term = _Term(Archive(self._store, folder), self._clock.monotonic_ms())
        term = self._term
        try:
            if not term.is_begun:
                await self._begin(term)
            await self._copy(term)
        # The next leader continues. A failure of this term is not its problem.
        except tasks.TermOverError:
            return
        except (StorageError, BackupError, OSError) as error:
            self._note(term, str(error))
        else:
            self._note(term, "")

    async def _copy(self, term: _Term) -> None:
        """Upload everything that is committed now."""
        # Taken before the upload, so that entries committed meanwhile do not count as copied.
        now_ms, wanted = self._clock.monotonic_ms(), self._controller.committed_end
        while (step := next_step(self._progress(term, wanted))) is not None:
            match step:
                case PutSegment():
                    await self._put_segment(term, step)
                case PutCheckpoint(snapshot_id=snapshot_id):
                    await self._put_checkpoint(term, snapshot_id)
                    # Only a new checkpoint can make older files dispensable.
                    await self._remove_old(term)
        term.copied_at_ms = now_ms

    def _progress(self, term: _Term, committed_end: int) -> Progress:
        return Progress(
            position=term.position,
            checkpoint_end=term.checkpoint_end,
            newest=self._source.newest_checkpoint,
            committed_end=committed_end,
        )

    # -- the steps

    async def _begin(self, term: _Term) -> None:
        """Find the end of the backup, and check that it is a backup of this log."""
        inventory = await self._with_archive(term, lambda archive: archive.inventory())
        newest = await self._with_archive(term, lambda archive: newest_file(inventory, archive))
        if newest is not None:
            self._require_not_ahead(newest.end_offset)
            await self._require_own(term, newest)
            term.position = segments.Position(newest.end_offset, bytes.fromhex(newest.log_hash))
            term.last_ms = newest.last_ms
            # The backup may have lagged before this term.
            term.copied_at_ms -= max(0, self._clock.wall_ms() - newest.last_ms)
        term.checkpoint_end = max((name.end_offset for name in inventory.checkpoints), default=0)
        term.is_begun = True
        end = None if newest is None else newest.end_offset
        _log.info("backup_begun", folder=term.archive.folder.prefix, end_offset=end)

    def _require_not_ahead(self, end_offset: int) -> None:
        committed_end = self._controller.committed_end
        if end_offset > committed_end:
            raise BackupDivergedError(
                f"the backup ends at offset {end_offset}, but this log at {committed_end}: the "
                "controllers were reset to an earlier state, or another copy of the cluster "
                "writes to the backup. Restore from it, or set another --backup-store"
            )

    async def _require_own(self, term: _Term, newest: backup_files.Manifest) -> None:
        """Require that the newest file belongs to this log, as far as the log reaches back."""
        try:
            if isinstance(newest, backup_files.SegmentManifest):
                is_own = await self._holds_segment(term, newest)
            else:
                is_own = await self._holds_point(term, newest)
        except _OtherBoundsError:
            is_own = False
        # The entries that could prove it are gone. Its end is known not to be ahead of this log.
        except _TrimmedError:
            return
        if not is_own:
            raise BackupDivergedError(
                f"{newest.name} of the backup differs from this log: another history of the "
                "cluster writes to the backup. Set a separate --backup-store for this cluster"
            )

    async def _holds_segment(self, term: _Term, manifest: backup_files.SegmentManifest) -> bool:
        start, end = manifest.start_offset, manifest.end_offset
        data = segments.encode(
            await self._read(term, start, end, manifest.size), manifest.cluster_uuid
        )
        return hashlib.sha256(data).hexdigest() == manifest.sha256

    async def _holds_point(self, term: _Term, manifest: backup_files.CheckpointManifest) -> bool:
        """Compare a file's log hash with the one of this controller's newest checkpoint.

        The log between the two extends the hash of the lower point to the higher one.
        """
        here = await self._own_position(term)
        there = segments.Position(manifest.end_offset, bytes.fromhex(manifest.log_hash))
        if UNKNOWN_LOG_HASH in (here.log_hash, there.log_hash):
            return True
        low, high = sorted((here, there), key=lambda position: position.end_offset)
        while low.end_offset < high.end_offset:
            batches = await self._read(term, low.end_offset, high.end_offset, SEGMENT_BYTES)
            low = await self._advance(term, low, batches)
        return low == high

    async def _advance(
        self, term: _Term, before: segments.Position, batches: list[Batch]
    ) -> segments.Position:
        return await self._call(
            term, lambda _: segments.advance_position(before, batches), tasks.CALL_TIMEOUT_S
        )

    async def _own_position(self, term: _Term) -> segments.Position:
        """Return the position of this controller's newest checkpoint, or the log's origin."""
        newest = self._source.newest_checkpoint
        if newest is None:
            return segments.Position(0, EMPTY_LOG_HASH)

        def log_hash(_: ObjectStore) -> bytes:
            with self._source.open_checkpoint(newest) as file:
                return checkpoint_log_hash(file)

        return segments.Position(
            newest.end_offset, await self._call(term, log_hash, tasks.CALL_TIMEOUT_S)
        )

    async def _put_segment(self, term: _Term, step: PutSegment) -> None:
        try:
            batches = await self._read(term, step.start.end_offset, step.end_offset, SEGMENT_BYTES)
        except _TrimmedError:
            _log.warning("backup_interrupted", end_offset=step.start.end_offset)
            term.position = None
            return
        now_ms = self._controller.log_time.now_ms()
        writing = segments.Writing(
            folder=term.archive.folder,
            # Times of one leader may precede an earlier leader's times if its clock was faster.
            first_ms=min(term.last_ms, now_ms),
            last_ms=now_ms,
            feature_level=self._controller.cluster_metadata.feature_level,
            writer_version=self._writer_version,
        )

        def put(archive: Archive) -> backup_files.SegmentManifest:
            data, manifest = segments.new_segment(batches, step.start, writing)
            archive.put(data, manifest)
            return manifest

        manifest = await self._with_archive(term, put)
        term.position = segments.Position(manifest.end_offset, bytes.fromhex(manifest.log_hash))
        term.last_ms = manifest.last_ms

    async def _put_checkpoint(self, term: _Term, snapshot_id: SnapshotId) -> None:
        now_ms = self._controller.log_time.now_ms()
        level = self._controller.cluster_metadata.feature_level

        def put(archive: Archive) -> bytes:
            with self._source.open_checkpoint(snapshot_id) as file:
                data, manifest = checkpoint_file(
                    file,
                    archive.folder,
                    created_ms=now_ms,
                    feature_level=level,
                    writer_version=self._writer_version,
                )
            archive.put(data, manifest)
            return bytes.fromhex(manifest.log_hash)

        log_hash = await self._with_archive(term, put, CHECKPOINT_TIMEOUT_S)
        term.checkpoint_end = snapshot_id.end_offset
        # A new chain begins here, because the log no longer reaches back to the old one's end.
        if term.position is None:
            term.position, term.last_ms = (
                segments.Position(snapshot_id.end_offset, log_hash),
                now_ms,
            )

    async def _remove_old(self, term: _Term) -> None:
        """Remove old files. Their ages are differences of the bucket's own times only."""

        def remove(archive: Archive) -> tuple[backup_files.Inventory, int]:
            inventory = archive.inventory()
            return inventory, archive.delete(find_dispensable(inventory, self._keep_ms))

        inventory, removed = await self._with_archive(term, remove)
        self._compare_clocks(term, inventory)
        if removed:
            _log.info("old_backups_removed", files=removed)

    def _compare_clocks(self, term: _Term, inventory: backup_files.Inventory) -> None:
        """Log once a term that this machine's clock and the bucket's differ much."""
        written_ms = max(inventory.written_ms.values(), default=0)
        ahead_ms = self._clock.wall_ms() - written_ms
        if written_ms and abs(ahead_ms) > JUMP_MS and not term.is_clock_doubted:
            term.is_clock_doubted = True
            _log.warning("clock_differs_from_bucket", ahead_ms=ahead_ms)

    # -- helpers

    async def _read(
        self, term: _Term, start_offset: int, end_offset: int, max_bytes: int
    ) -> list[Batch]:
        """Read committed batches from an offset on, at least one.

        Raises:
            _TrimmedError: the log begins above `start_offset`.
            _OtherBoundsError: no batch begins there, or the last one ends elsewhere.
        """
        batches: list[Batch] = []
        at, size = start_offset, 0
        while at < end_offset and size < max_bytes:
            read = await self._source.read(at, READ_BYTES)
            # The term may have ended during the read.
            self._require(term)
            if not read:
                raise _TrimmedError
            # Batches are never split, so a segment ends at the end of a batch.
            fit = [batch for batch in read if batch.end_offset <= end_offset]
            if not fit or fit[0].base_offset != at:
                raise _OtherBoundsError
            batches += fit
            at, size = fit[-1].end_offset, size + sum(batch.size for batch in fit)
        return batches

    async def _with_archive(
        self,
        term: _Term,
        call: Callable[[Archive], tasks.T],
        timeout_s: float = tasks.CALL_TIMEOUT_S,
    ) -> tasks.T:
        folder = term.archive.folder
        return await self._call(term, lambda store: call(Archive(store, folder)), timeout_s)

    def _note(self, term: _Term, problem: str) -> None:
        """Log the start and the end of a problem, and of a late backup, once each."""
        if self._term is not term:
            return

        if problem != term.problem:
            term.problem = problem
            if problem:
                _log.error("backup_failed", reason=problem)
            else:
                _log.info("backup_works_again")

        status = self.status
        assert status is not None
        is_late = status.behind_ms > LATE_INTERVALS * self._interval_ms
        if is_late and not term.is_late:
            _log.error(
                "backup_late", behind_ms=status.behind_ms, behind_entries=status.behind_entries
            )

        term.is_late = is_late
