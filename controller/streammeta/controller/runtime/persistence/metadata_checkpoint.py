"""The metadata as a checkpoint file: writing, reading, and the journal's check of the file.

Every call reads or writes all metadata and must run in a thread. `EarlyReading` has its own thread:
at startup it reads the newest checkpoint while the journal verifies the digests of all files.

`ReadAhead` reads large sections in a separate thread. Reading mostly touches memory for the first
time, while checking and indexing the previous section mostly computes. Both release the
interpreter's lock most of the time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from streammeta.controller.errors import DamagedMetadataError
from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import ClusterId, SnapshotId
from streammeta.controller.journal.errors import BadSnapshotError, NewerVersionError
from streammeta.controller.journal.snapshots import SnapshotCheck
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.sections.frozen import FrozenMetadata, sections_digest
from streammeta.controller.metadata.sections.rules import ADDED_COLUMNS, COLUMNS, SECTIONS
from streammeta.controller.metadata.tables.tables import Array, roomy_zeros
from streammeta.controller.quorum.voters import VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.state_hashes import UNKNOWN_LOG_HASH
from streammeta.controller.snapshot import checkpoint_file, voters
from streammeta.controller.snapshot.section_reading import ColumnBuffers

LARGE_BYTES = 1 << 20
"""At most one section of this size or more is read ahead, to limit memory."""


class ReadAhead(Mapping[str, dict[str, Any]]):
    """The sections of an open reader, which must not be used otherwise until this is closed.

    A section that was read ahead is returned once. Later accesses read it again.
    """

    def __init__(
        self, reader: checkpoint_file.CheckpointReader, order: Sequence[str], buffers: ColumnBuffers
    ) -> None:
        """Start reading. `order` lists sections in order of access, whether they exist or not."""
        self._entries = reader.entries
        self._read: Callable[[str], dict[str, Any]] = reader.sections(buffers).__getitem__
        self._left = deque(name for name in order if name in reader.entries)
        self._ahead: dict[str, Future[dict[str, Any]]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint-reader")

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the section being read, and drop sections read ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Return a section. Raises as `CheckpointReader.columns` does."""
        # One thread reads all sections, because they share the position of the file.
        section = self._ahead.pop(name, None) or self._thread.submit(self._read, name)
        self._read_next()
        return section.result()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _read_next(self) -> None:
        # Small sections may wait in memory, but only one large one.
        while self._left and not any(map(self._is_large, self._ahead)):
            name = self._left.popleft()
            self._ahead[name] = self._thread.submit(self._read, name)

    def _is_large(self, name: str) -> bool:
        return self._entries[name].length >= LARGE_BYTES


LOG_HASH_SECTION = "log_hash"
"""One row: `value`, the rolling hash of the entries below the end in hex, empty if unknown."""

_KNOWN_COLUMNS = {
    voters.VOTERS_SECTION: frozenset(voters.VOTERS_COLUMNS),
    LOG_HASH_SECTION: frozenset(("value",)),
    **{name: frozenset((*names, *ADDED_COLUMNS.get(name, ()))) for name, names in COLUMNS.items()},
}
"""Known columns by section. Ignoring an unknown section or column would change the metadata."""


@dataclass(frozen=True, slots=True)
class FrozenCheckpoint:
    """A view of the metadata with the other contents of a checkpoint, not yet a file."""

    point: SnapshotPoint
    view: FrozenMetadata
    log_hash: bytes

    @property
    def id(self) -> SnapshotId:
        """Return the identity of the checkpoint."""
        return self.point.snapshot_id

    def write(self, sink: checkpoint_file.Sink) -> int:
        """Write the whole file and return its size in bytes."""
        return checkpoint_file.write_checkpoint(
            sink,
            self.id,
            self.point.cluster_id,
            _Sections(self),
        )


@dataclass(frozen=True, slots=True)
class LoadedMetadata:
    """Contents of a checkpoint file: the metadata and the rolling hash of the log below it."""

    cluster_metadata: ClusterMetadata
    log_hash: bytes


class _Sections(Mapping[str, Any]):
    """Sections of voters and log hash, then the metadata's sections, each computed on access."""

    def __init__(self, frozen: FrozenCheckpoint) -> None:
        self._added: dict[str, checkpoint_file.Columns] = {
            voters.VOTERS_SECTION: voters.voters_section(frozen.point.voters),
            LOG_HASH_SECTION: {"value": [frozen.log_hash.hex()]},
        }
        self._metadata_sections = frozen.view.sections()

    def __getitem__(self, name: str) -> Any:
        return self._added[name] if name in self._added else self._metadata_sections[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._added
        yield from self._metadata_sections

    def __len__(self) -> int:
        return len(self._added) + len(self._metadata_sections)


class _TableBuffers(ColumnBuffers):
    """Columns that the metadata's tables use as their own memory.

    The columns of `ranges` named here are compared with columns of `streams` and discarded. Most
    streams have one range, and then both are equal.
    """

    _COMPARED: ClassVar = ("stream_id", "range_index", "epoch", "end_offset", "node_id")
    _TYPES: ClassVar = {("object_ranges", "stream_id"): np.dtype(np.int32)}

    def __init__(self) -> None:
        self._streams: dict[str, Array] = {}

    def zeros(self, section: str, column: str, rows: int, dtype: np.dtype[Any]) -> Array:
        """Implement `ColumnBuffers.zeros`."""
        zeros = roomy_zeros(rows, self._TYPES.get((section, column), dtype))
        # Kept for the comparison with `ranges`, whose last rows repeat them.
        if section == "streams":
            self._streams[column] = zeros
        return zeros

    def known(self, section: str, column: str) -> Array | None:
        """Implement `ColumnBuffers.known`."""
        is_compared = section == "ranges" and column in self._COMPARED
        return self._streams.get(column) if is_compared else None


def read_metadata(file: BinaryIO, snapshot_id: SnapshotId) -> LoadedMetadata:
    """Return the contents of a checkpoint file.

    Raises:
        CheckpointError: the file is damaged, its sections contradict each other, or it is another
            checkpoint.
    """
    reader = checkpoint_file.CheckpointReader(file, snapshot_id.file_name)
    if reader.id != snapshot_id:
        raise checkpoint_file.CheckpointError(
            f"the file is checkpoint {reader.id.file_name}, expected {snapshot_id.file_name}"
        )
    try:
        with ReadAhead(reader, tuple(SECTIONS), _TableBuffers()) as sections:
            cluster_metadata = ClusterMetadata.from_sections(sections, snapshot_id.end_offset)
    except DamagedMetadataError as error:
        raise checkpoint_file.CheckpointError(f"{snapshot_id.file_name}: {error}") from error
    return LoadedMetadata(cluster_metadata, log_hash_of(reader))


class EarlyReading:
    """Reading of a directory's newest checkpoint while the journal is recovered.

    The choice of the file is a guess. Its contents are returned only for a file with the same
    digest in its footer, and the journal accepts no file whose bytes do not match that digest. If
    reading failed, or another file is needed, that file is read from the beginning.
    """

    def __init__(self, directory: Path) -> None:
        """Begin, if `directory` has a checkpoint."""
        # Names begin with the end offset in fixed width, so the largest is the newest.
        self._path = max(directory.glob("*.checkpoint"), default=None)
        self._thread = ThreadPoolExecutor(1, "early-reading")
        self._early: Future[tuple[bytes, LoadedMetadata]] | None = None
        if self._path is not None:
            self._early = self._thread.submit(_read_with_digest, self._path)

    def __enter__(self) -> EarlyReading:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until reading has ended, and drop a result that was not used."""
        self._thread.shutdown(wait=True)
        self._early = None

    def settle(self, newest: SnapshotId | None) -> None:
        """Drop the result unless it belongs to the newest intact checkpoint."""
        if newest is None or self._path is None or self._path.name != newest.file_name:
            self._early = None

    def read(self, file: BinaryIO, snapshot_id: SnapshotId) -> LoadedMetadata:
        """Return what `read_metadata` returns, from the early result if it belongs to this file."""
        early, self._early = self._early, None
        if early is not None:
            digest = checkpoint_file.CheckpointReader(file, snapshot_id.file_name).digest
            with contextlib.suppress(Exception):  # reading the file below reports it again
                read_digest, loaded = early.result()
                # Equal digests mean equal contents, even if the file was replaced meanwhile.
                if read_digest == digest:
                    return loaded
            # Frees a large result before the file is read once more.
            del early
        return read_metadata(file, snapshot_id)


def _read_with_digest(path: Path) -> tuple[bytes, LoadedMetadata]:
    with path.open("rb") as file:
        reader = checkpoint_file.CheckpointReader(file, path.name)
        return reader.digest, read_metadata(file, reader.id)


def log_hash_of(reader: checkpoint_file.CheckpointReader) -> bytes:
    """Return the rolling hash of the log below a checkpoint's end."""
    if LOG_HASH_SECTION not in reader.entries:
        return UNKNOWN_LOG_HASH  # older versions wrote none
    return bytes.fromhex(reader.columns(LOG_HASH_SECTION)["value"][0])


def state_hash_of(reader: checkpoint_file.CheckpointReader) -> bytes:
    """Return the digest of a checkpoint's metadata, section by section, without loading it."""
    added = (voters.VOTERS_SECTION, LOG_HASH_SECTION)
    names = [name for name in reader.entries if name not in added]
    return sections_digest((name, reader.columns(name)) for name in names)


def snapshot_check(cluster_id: ClusterId) -> SnapshotCheck:
    """Return the check that this cluster's journal makes of every snapshot file."""

    def check(snapshot_id: SnapshotId, file: BinaryIO) -> VoterSet:
        try:
            return _checked_voters(file, snapshot_id, cluster_id)
        # A newer file is intact, so it must not be removed as damaged.
        except checkpoint_file.NewerCheckpointError as error:
            raise NewerVersionError(str(error)) from error
        except checkpoint_file.CheckpointError as error:
            raise BadSnapshotError(str(error)) from error

    return check


def _checked_voters(file: BinaryIO, snapshot_id: SnapshotId, cluster_id: ClusterId) -> VoterSet:
    reader = checkpoint_file.CheckpointReader(file, snapshot_id.file_name)
    if (reader.id, reader.cluster_id) != (snapshot_id, cluster_id):
        raise checkpoint_file.CheckpointError(
            f"{snapshot_id.file_name}: the file is checkpoint {reader.id.file_name} of cluster "
            f"{reader.cluster_id!r}, expected the one of its name and of cluster {cluster_id!r}"
        )
    # Bytes before contents: nothing of a damaged file is interpreted.
    reader.verify()
    _require_known(reader)
    return voters.section_voters(reader)


def _require_known(reader: checkpoint_file.CheckpointReader) -> None:
    """Reject unknown sections and columns before any row is read.

    A newer version may define their contents freely.
    """
    for section in reader.entries:
        if section not in _KNOWN_COLUMNS:
            reader.reject_newer(f"its section {section!r}")
        for name in reader.column_names(section):
            if name not in _KNOWN_COLUMNS[section]:
                reader.reject_newer(f"column {name!r} of its section {section!r}")
    if "feature_level" in reader.entries:
        level = int(reader.columns("feature_level")["level"][0])
        if not SUPPORTED.include(level):
            reader.reject_newer(f"its feature level {level}, only {SUPPORTED}")
