"""Snapshots in a data directory: written, downloaded, verified and leased to readers.

The contents of snapshots are opaque here. A given function checks that a file is complete and
intact. Names, with end offset and epoch: `<20 digits>-<10 digits>.checkpoint`, with the suffix
`.tmp` while written here, `.part` while downloaded, and `.damaged` if found damaged.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

import structlog

from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.journal import errors
from streammeta.controller.quorum.events import SnapshotChunk
from streammeta.controller.quorum.voters import VoterSet
from streammeta.storage import durable_files

SnapshotCheck: TypeAlias = Callable[[SnapshotId, BinaryIO], VoterSet]
"""Reads a whole file and returns the voters in it. Raises BadSnapshotError unless the file is
complete, intact and the snapshot with this id."""

IDLE_LEASE_S = 60.0
"""Seconds a snapshot stays readable after its last chunk was read, even if it was removed."""

_TRUSTED_S = 5.0
"""Seconds in which a file is not verified again, for a reader that retries after a timeout."""

_NAME = re.compile(r"^(\d{20})-(\d{10})\.checkpoint$")
_UNFINISHED_NAME = re.compile(r"^\d{20}-\d{10}\.checkpoint\.(tmp|part)$")

_SYNC_EVERY_BYTES = 16 << 20
"""Maximum bytes written without a flush, so that no flush of the log waits for a whole snapshot."""

_log = structlog.get_logger(component="journal")


def parse_snapshot_name(name: str) -> SnapshotId | None:
    """Return the id of the snapshot in a file, or None for other files."""
    match = _NAME.match(name)
    return SnapshotId(EndOffset(int(match[1])), Epoch(int(match[2]))) if match else None


def is_unfinished_snapshot(name: str) -> bool:
    """Return whether a crash while a snapshot was written or downloaded left this file."""
    return _UNFINISHED_NAME.match(name) is not None


class SnapshotWriter:
    """Writer of one snapshot's bytes, in order, used by one thread at a time."""

    def __init__(
        self, files: durable_files.FileSystem, path: Path, snapshot_id: SnapshotId
    ) -> None:
        """Begin an empty file. Raises DiskFullError."""
        self.snapshot_id = snapshot_id
        self.path = path
        self.size = 0
        self._files = files
        self._file: durable_files.File = files.open(path, create=True)
        self._file.truncate(0)
        self._synced_size = 0
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the bytes written."""
        return self._digest.digest()

    def write(self, data: bytes) -> int:
        """Write all of `data`. Return its length. Raises DiskFullError without having written."""
        try:
            self._file.write(self.size, data)
        except durable_files.DiskFullError:
            # A partial write must not count, because the chunk will be written again.
            if self._file.size() > self.size:
                self._file.truncate(self.size)
            raise
        self.size += len(data)
        self._digest.update(data)
        if self.size - self._synced_size >= _SYNC_EVERY_BYTES:
            self.seal()
        return len(data)

    def seal(self) -> None:
        """Make everything written durable."""
        self._file.sync()
        self._synced_size = self.size

    def publish(self, path: Path) -> None:
        """Give the sealed file its name, durably. Raises DiskFullError with nothing changed."""
        assert self._synced_size == self.size, "the snapshot was not sealed"
        self._files.rename(self.path, path)
        self._files.sync_directory(path.parent)
        self._file.close()

    def abandon(self) -> None:
        """Remove the file."""
        self._file.close()
        self._files.remove(self.path)


@dataclass
class _Lease:
    """A snapshot being read in chunks. Its file stays open even if it is removed."""

    file: durable_files.File
    size: int
    users: int = 0
    read_at: float = 0.0
    digest: bytes = b""
    verified_at: float | None = None
    was_begun: bool = False
    guard: threading.Lock = field(default_factory=threading.Lock)


class SnapshotStore:
    """The snapshots of one directory.

    Any thread may read or begin a snapshot. All other calls belong to the journal's thread.
    """

    def __init__(
        self,
        directory: Path,
        files: durable_files.FileSystem,
        check: SnapshotCheck,
        monotonic: Callable[[], float],
    ) -> None:
        self.kept: tuple[SnapshotId, ...] = ()
        """Complete snapshots, in ascending order."""
        self.newest_voters: VoterSet | None = None
        self._directory = directory
        self._files = files
        self._check = check
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._digests: dict[SnapshotId, bytes] = {}
        self._leases: dict[SnapshotId, _Lease] = {}
        self._download: SnapshotWriter | None = None

    # -- inventory

    def recover(self) -> None:
        """Find the complete and intact snapshots. Log damaged ones and put them aside."""
        kept = []
        for name in self._files.names(self._directory):
            # The interrupted writer starts again from the beginning.
            if is_unfinished_snapshot(name):
                self._files.remove(self._directory / name)
            elif (snapshot_id := parse_snapshot_name(name)) is not None:
                kept.append(snapshot_id)

        voters = {}
        for snapshot_id in kept:
            try:
                voters[snapshot_id] = self._check_file(self.path_of(snapshot_id), snapshot_id)
            except errors.BadSnapshotError as error:
                self._put_aside(snapshot_id, error)

        self.kept = tuple(sorted(voters))
        self.newest_voters = voters[self.kept[-1]] if self.kept else None

    def path_of(self, snapshot_id: SnapshotId) -> Path:
        """Return the path of a snapshot, which may not exist."""
        return self._directory / snapshot_id.file_name

    def forget_below(self, start_offset: EndOffset) -> None:
        """Remove snapshots that end below `start_offset`. Open readers continue."""
        with self._guard:
            removed = [item for item in self.kept if item.end_offset < start_offset]
            self.kept = tuple(item for item in self.kept if item not in removed)
            for snapshot_id in removed:
                self._digests.pop(snapshot_id, None)
        for snapshot_id in removed:
            self._files.remove(self.path_of(snapshot_id))
        if removed:
            self._files.sync_directory(self._directory)

    # -- writing one

    def begin(self, snapshot_id: SnapshotId) -> SnapshotWriter:
        """Begin to write a snapshot of this node. Raises DiskFullError."""
        path = self.path_of(snapshot_id)
        return SnapshotWriter(self._files, path.with_name(path.name + ".tmp"), snapshot_id)

    def publish(self, writer: SnapshotWriter) -> None:
        """Make a complete, sealed file a snapshot, durably. Raises DiskFullError."""
        writer.publish(self.path_of(writer.snapshot_id))
        with self._guard:
            self.kept = tuple(sorted({*self.kept, writer.snapshot_id}))
            self._digests[writer.snapshot_id] = writer.digest

    # -- downloading one

    def write_chunk(self, snapshot_id: SnapshotId, position: int, data: bytes) -> None:
        """Add bytes to the download. Position 0 restarts it, and ends any other.

        Raises:
            DiskFullError: the disk is full. The chunk may be written again.
            ValueError: the chunk does not continue the download.
        """
        if position == 0:
            self._drop_download()
            path = self.path_of(snapshot_id)
            part = path.with_name(path.name + ".part")
            self._download = SnapshotWriter(self._files, part, snapshot_id)

        download = self._download
        # A gap or an overlap would only be found after the whole download.
        if download is None or download.snapshot_id != snapshot_id or download.size != position:
            have = (download.snapshot_id, download.size) if download else None
            raise ValueError(f"bytes at {position} of {snapshot_id}: the download is at {have}")
        download.write(data)

    def install(self, snapshot_id: SnapshotId, total_bytes: int, digest: bytes) -> VoterSet | None:
        """Check the download and make it a snapshot, durably, and return the voters in it.

        Returns None and removes the file if it is not the announced one. Raises DiskFullError with
        nothing changed.
        """
        download = self._download
        if download is None or download.snapshot_id != snapshot_id:
            return None

        try:
            if (download.size, download.digest) != (total_bytes, digest):
                raise errors.BadSnapshotError(
                    f"{download.size} bytes with SHA-256 {download.digest.hex()} arrived, "
                    f"{total_bytes} with {digest.hex()} were announced"
                )
            voters = self._check_file(download.path, snapshot_id)
        except errors.BadSnapshotError as error:
            _log.error("snapshot_refused", file=download.path.name, reason=str(error))
            self._drop_download()
            return None

        # The name announces a snapshot, so its bytes must be durable first.
        download.seal()
        self.publish(download)
        self._download = None
        self.newest_voters = voters
        return voters

    def _drop_download(self) -> None:
        if self._download is not None:
            download, self._download = self._download, None
            download.abandon()

    # -- reading one

    def open(self, snapshot_id: SnapshotId) -> BinaryIO:
        """Open a snapshot to read it from the start. Raises FileNotFoundError."""
        return durable_files.as_binary_io(self._files.open(self.path_of(snapshot_id)))

    def read(self, snapshot_id: SnapshotId, position: int, max_bytes: int) -> SnapshotChunk | None:
        """Return bytes of a snapshot, empty at its end, or None if it does not exist.

        A reader that proceeds chunk by chunk reads one file to its end, even if it is removed
        meanwhile, unless a minute passes between two chunks.

        Raises JournalDamagedError if the file is damaged.
        """
        lease = self._take_lease(snapshot_id)
        if lease is None:
            return None
        try:
            digest = self._digest_of(snapshot_id, lease)
            if position == 0:
                self._begin_download(snapshot_id, lease)
            return SnapshotChunk(lease.size, lease.file.read(position, max_bytes), digest)
        finally:
            with self._guard:
                lease.users -= 1
                lease.read_at = self._monotonic()

    def release_idle(self) -> None:
        """Close files whose lease has expired."""
        limit = self._monotonic() - IDLE_LEASE_S
        with self._guard:
            idle = [
                key
                for key, lease in self._leases.items()
                if not lease.users and lease.read_at <= limit
            ]
            for snapshot_id in idle:
                self._leases.pop(snapshot_id).file.close()

    def close(self) -> None:
        """Release all files."""
        with self._guard:
            for lease in self._leases.values():
                lease.file.close()
            self._leases.clear()

    def _take_lease(self, snapshot_id: SnapshotId) -> _Lease | None:
        with self._guard:
            lease = self._leases.get(snapshot_id)
            if lease is None:
                if snapshot_id not in self.kept:
                    return None
                file = self._files.open(self.path_of(snapshot_id))
                known = self._digests.get(snapshot_id, b"")
                lease = self._leases[snapshot_id] = _Lease(file, file.size(), digest=known)
            # A lease in use must not be closed as idle.
            lease.users += 1
            return lease

    def _digest_of(self, snapshot_id: SnapshotId, lease: _Lease) -> bytes:
        """Return the digest, computed once, after a check that the file is still intact."""
        with lease.guard:
            # The first reader after a start pays for the check of the whole file.
            if not lease.digest:
                path = self.path_of(snapshot_id)
                try:
                    self._check(snapshot_id, durable_files.as_binary_io(lease.file, closes=False))
                except errors.BadSnapshotError as error:
                    raise errors.JournalDamagedError(
                        path, 0, str(error), errors.RESTART_REPAIRS
                    ) from None
                lease.digest = _digest(lease.file)
                with self._guard:
                    self._digests[snapshot_id] = lease.digest
            return lease.digest

    def _begin_download(self, snapshot_id: SnapshotId, lease: _Lease) -> None:
        """Verify the file unless this is its first download: a retry may mean that it was bad."""
        with lease.guard:
            was_begun, lease.was_begun = lease.was_begun, True
            now = self._monotonic()
            is_trusted = lease.verified_at is not None and now < lease.verified_at + _TRUSTED_S
            if not was_begun or is_trusted:
                return

            if _digest(lease.file) != lease.digest:
                raise errors.JournalDamagedError(
                    self.path_of(snapshot_id),
                    0,
                    "its bytes differ from those written",
                    errors.RESTART_REPAIRS,
                )
            lease.verified_at = self._monotonic()

    # -- checking

    def _check_file(self, path: Path, snapshot_id: SnapshotId) -> VoterSet:
        with durable_files.as_binary_io(self._files.open(path)) as file:
            return self._check(snapshot_id, file)

    def _put_aside(self, snapshot_id: SnapshotId, error: errors.BadSnapshotError) -> None:
        path = self.path_of(snapshot_id)
        _log.error("snapshot_damaged", file=str(path), reason=str(error), kept_as=".damaged")
        self._files.rename(path, path.with_name(path.name + ".damaged"))
        self._files.sync_directory(self._directory)


def _digest(file: durable_files.File) -> bytes:
    digest = hashlib.sha256()
    for piece in durable_files.pieces_of(file):
        digest.update(piece)
    return digest.digest()
