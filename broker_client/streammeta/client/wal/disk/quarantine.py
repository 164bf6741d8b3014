"""Quarantine: makes a damaged log readable again, on the operator's request.

A copy of each damaged file is kept as `<name>.damaged`. The file is replaced by one with all
readable frames. A frame of kind 2 replaces the unreadable ones and counts the lost records. Can be
repeated after a crash at any point.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from streammeta.client.errors import DamagedLogError, WrongLogError
from streammeta.client.wal.disk import files as log_files
from streammeta.client.wal.disk.config import LogIdentity
from streammeta.storage.durable_files import FileSystem, pieces_of, replace_file
from streammeta.storage.segmented_log import Damage, FrameHeader, segment_base

_MAX_COUNT = 2**32 - 1

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Salvage:
    """Readable part of one segment: its valid frames in order, and the end they vouch for.

    `is_whole` means that only valid frames follow the header, `is_gapless` that no record is
    missing before the last of them.
    """

    end: int
    frames: list[tuple[int, FrameHeader]] = field(default_factory=list)
    vouched_end: int = 0
    is_whole: bool = True
    is_gapless: bool = True


def quarantine(files: FileSystem, directory: Path, identity: LogIdentity) -> int:
    """Repair everything that opening the log reports as damage. Without damage, change nothing.

    Returns how many records are lost with missing segments at the beginning. Opening the log counts
    the records lost after it.

    Raises:
        WrongLogError: the log belongs to another node or cluster.
        DamagedLogError: no file can be read, so the log's owner is unknown.
        OSError: the disk failed or is full. It can be repeated.
    """
    state = _repair_state(files, directory, identity)
    try:
        paths = log_files.segment_paths(files, directory)
        first = _base_of(paths[0]) if paths else state.flushed
        missing = max(0, first - state.trimmed)
        # The state is moved past the gap, or opening the log would report it as damage again.
        if missing:
            _log.error("%s: records %d to %d are lost", directory, state.trimmed, first - 1)
            state.note(first, state.flushed)
            state.sync()

        for path, following in zip_longest(paths, paths[1:]):
            _repair_segment(files, path, following, identity, state)
        return missing
    finally:
        state.close()


def _repair_state(files: FileSystem, directory: Path, identity: LogIdentity) -> log_files.StateFile:
    path = directory / log_files.STATE_NAME
    with suppress(DamagedLogError, FileNotFoundError):
        return log_files.StateFile.open(files, path)
    paths = log_files.segment_paths(files, directory)
    headers = [_header_of(files, segment, identity) for segment in paths]
    known = next((header for header in headers if header is not None), None)
    if known is None:
        raise DamagedLogError(path, 0, "neither it nor any segment names the owner of the log")

    # Renamed, as its bytes may help to find the cause.
    if log_files.STATE_NAME in files.names(directory):
        files.rename(path, path.with_name(f"{log_files.STATE_NAME}.damaged"))
    header = log_files.FileHeader(
        log_files.STATE_MAGIC, identity.namespace, identity.node_id, known.log_id, 0
    )
    # Without the state nothing is known to be trimmed or flushed: every readable record counts.
    first = min(_base_of(segment) for segment in paths)
    log_files.StateFile.create(files, path, header, first, first)

    return log_files.StateFile.open(files, path)


def _header_of(files: FileSystem, path: Path, identity: LogIdentity) -> log_files.FileHeader | None:
    """Read a segment's header, None if it is damaged. Raises `WrongLogError`."""
    with closing(files.open(path)) as file, suppress(log_files.BadHeaderError):
        header = log_files.decode_file_header(
            file.read(0, log_files.MAX_HEADER_SIZE), log_files.SEGMENT_MAGIC, path
        )
        log_files.check_owner(header, identity, path)
        return header
    return None


def _repair_segment(
    files: FileSystem,
    path: Path,
    following: Path | None,
    identity: LogIdentity,
    state: log_files.StateFile,
) -> None:
    old_header = _header_of(files, path, identity)
    if old_header is not None and old_header.log_id != state.header.log_id:
        raise WrongLogError(f"{path} belongs to another write-ahead log. Move the file away")
    header = log_files.FileHeader(
        log_files.SEGMENT_MAGIC,
        identity.namespace,
        identity.node_id,
        state.header.log_id,
        _base_of(path),
    )

    with closing(log_files.LogSegment(path, files.open(path), header)) as segment:
        salvage = _salvage(segment)
        if following is not None:
            end = _base_of(following)
        else:
            end = max(salvage.end, salvage.vouched_end, state.flushed)
        # Only the last segment may end with a torn frame.
        may_end_so = end == salvage.end and (salvage.is_whole or following is None)
        if old_header == header and may_end_so and salvage.is_gapless:
            return
        # The copy comes first: the operator may still recover bytes from it.
        replace_file(files, path.with_name(f"{path.name}.damaged"), pieces_of(segment.file))
        repaired = _repaired_pieces(segment, salvage, end, identity.node_epoch)
        replace_file(files, path, repaired)


def _salvage(segment: log_files.LogSegment) -> _Salvage:
    """Find the valid frames of a segment, even after damage."""
    found = _Salvage(segment.base_offset)
    for position, frame in segment.frames_past_damage(segment.header_size):
        if isinstance(frame, Damage):
            # A damaged body may still have a valid header, which vouches for earlier records.
            header, found.is_whole = frame.next_header, False
        else:
            header, _ = frame
        if header is not None:
            found.vouched_end = max(found.vouched_end, header.flushed_end)
        if header is None or isinstance(frame, Damage):
            continue
        if header.base_offset < found.end:
            found.is_whole = False  # it repeats records
            continue
        found.is_gapless &= found.is_whole and header.base_offset == found.end
        found.frames.append((position, header))
        found.end = header.end_offset

    return found


def _repaired_pieces(
    segment: log_files.LogSegment, salvage: _Salvage, end: int, node_epoch: int
) -> Iterator[bytes]:
    """Yield the bytes of the segment that replaces the damaged one."""
    yield segment.header.encode()
    expected = segment.base_offset
    for position, frame in salvage.frames:
        if frame.end_offset > end:
            break
        yield from _lost_frames(segment, expected, frame.base_offset, node_epoch)
        yield segment.file.read(position, frame.size)
        expected = frame.end_offset
    yield from _lost_frames(segment, expected, end, node_epoch)


def _lost_frames(
    segment: log_files.LogSegment, begin: int, end: int, node_epoch: int
) -> Iterator[bytes]:
    if begin < end:
        _log.error("%s: records %d to %d are lost", segment.path, begin, end - 1)
    # The count of a frame has 32 bits.
    while begin < end:
        count = min(end - begin, _MAX_COUNT)
        yield segment.codec.encode(
            b"",
            base_offset=begin,
            epoch=node_epoch,
            flushed_end=begin,
            kind=log_files.FrameKind.LOST,
            count=count,
        )
        begin += count


def _base_of(path: Path) -> int:
    base_offset = segment_base(path.name, log_files.SUFFIX)
    assert base_offset is not None, f"{path} is not a segment"
    return base_offset
