"""Check of a log for feature levels that this version can't run at, before startup changes a file.

It searches for the bytes of the one record that sets a level, because reading a log is far faster
than decoding it. Anything else that a newer version writes follows such a record, or is in a
checkpoint, which the journal checks itself.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from streammeta.controller.errors import NewerLogError
from streammeta.controller.features import SUPPORTED
from streammeta.controller.journal.directory import read_identity
from streammeta.controller.journal.errors import NewerVersionError
from streammeta.controller.journal.segment import JournalSegment, open_segments
from streammeta.controller.quorum.messages import Batch, BatchKind
from streammeta.controller.records.codec import decode_records, encode_records
from streammeta.controller.records.record import FeatureLevelSet
from streammeta.storage.durable_files import File, FileSystem, PosixFileSystem
from streammeta.storage.segmented_log import BadFrameError

_MARK = encode_records((FeatureLevelSet(level=1),))[2:-1]
"""Bytes of every record that sets a level below 128: everything but the entry's head and the
level."""

_PIECE_BYTES = 4 << 20


def check_levels(directory: Path, files: FileSystem | None = None) -> None:
    """Check the whole log, uncommitted entries included. Damage is left to recovery.

    Raises:
        NewerVersionError: the log sets a level that is not in `SUPPORTED`.
        DirectoryNotFormattedError, WrongDirectoryError, JournalDamagedError: as `read_identity`.
    """
    files = files or PosixFileSystem(read_only=True)
    identity = read_identity(directory, files)
    for found in open_segments(files, directory, identity.log_id):
        with contextlib.closing(found):
            if found.segment is not None and _has_mark(found.segment.file):
                _check_segment(found.segment)


def _has_mark(file: File) -> bool:
    size, position = file.size(), 0
    while position < size:
        # Pieces overlap, so that a mark across their border is found.
        if _MARK in file.read(position, _PIECE_BYTES + len(_MARK)):
            return True
        position += _PIECE_BYTES
    return False


def _check_segment(segment: JournalSegment) -> None:
    # Damage and torn tails are the business of recovery, which may change files.
    with contextlib.suppress(BadFrameError):
        for batch in segment.scan():
            if batch.kind is BatchKind.DATA:
                _check_batch(segment.path, batch)


def _check_batch(path: Path, batch: Batch) -> None:
    for payload in batch.payloads:
        # Decoding all entries would delay a start by as long as their replay.
        if _MARK not in payload:
            continue
        try:
            records = decode_records(payload)
        except NewerLogError as error:
            raise NewerVersionError(f"{path}: {error}") from error
        for record in records:
            if isinstance(record, FeatureLevelSet) and not SUPPORTED.include(record.level):
                raise NewerVersionError(
                    f"{path} sets feature level {record.level}, but this version runs at "
                    f"{SUPPORTED}: start a version that runs at level {record.level}"
                )
