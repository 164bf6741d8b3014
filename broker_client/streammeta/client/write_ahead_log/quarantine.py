"""Making a damaged log readable again, when the operator asks for it.

Of each damaged file a copy is kept as `<name>.damaged`. The file itself is replaced by one with
all frames that can still be read, and a frame of kind 2 in the place of those that can't, which
says how many records are lost there. Can be repeated after a crash at any point.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from streammeta.client.write_ahead_log.errors import DamagedLogError, WrongLogError
from streammeta.client.write_ahead_log.frames import (
    BadFrameError,
    FrameHeader,
    FrameKind,
    FrameOrigin,
    FrameReader,
    frame_headers_from,
)
from streammeta.client.write_ahead_log.identity import (
    MAX_HEADER_SIZE,
    SEGMENT_MAGIC,
    STATE_MAGIC,
    BadHeaderError,
    FileHeader,
    LogIdentity,
    check_owner,
    decode_file_header,
)
from streammeta.client.write_ahead_log.scan import segment_paths
from streammeta.client.write_ahead_log.segment import segment_sequence
from streammeta.client.write_ahead_log.state_file import STATE_NAME, StateFile
from streammeta.storage.durable_files import File, FileSystem

_COPY_BYTES = 1 << 20
_MAX_COUNT = 2**32 - 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Salvage:
    """What can be read of one segment: its good frames in order, and what they vouch for.

    `is_whole` tells that nothing but good frames follows the header.
    """

    frames: tuple[tuple[int, FrameHeader], ...]
    end: int
    vouched_end: int
    is_whole: bool


def quarantine(files: FileSystem, directory: Path, identity: LogIdentity) -> int:
    """Mend what `scan` would report as damage; does nothing if there is none.

    Returns how many records are lost with segments at the beginning that are missing; `scan` counts
    those that are lost behind.

    Raises:
        WrongLogError: the log is another's.
        DamagedLogError: nothing of it can be read, not even whose it is.
        OSError: the disk failed or is full; it can be repeated.
    """
    state = _mended_state(files, directory, identity)
    try:
        paths = segment_paths(files, directory)
        first = _sequence(paths[0]) if paths else state.flushed
        missing = max(0, first - state.trimmed)
        if missing:
            _log.error("%s: records %d to %d are lost", directory, state.trimmed, first - 1)
            state.note(first, state.flushed)
            state.sync()
        for path, following in zip_longest(paths, paths[1:]):
            _mend_segment(files, path, following, identity, state)
        return missing
    finally:
        state.close()


def _mended_state(files: FileSystem, directory: Path, identity: LogIdentity) -> StateFile:
    path = directory / STATE_NAME
    with contextlib.suppress(DamagedLogError, FileNotFoundError):
        return StateFile.open(files, path)
    headers = [_header_of(files, one, identity) for one in segment_paths(files, directory)]
    known = next((header for header in headers if header is not None), None)
    if known is None:
        raise DamagedLogError(path, 0, "neither it nor any segment tells whose log it is")
    if STATE_NAME in files.names(directory):
        files.rename(path, path.with_name(f"{STATE_NAME}.damaged"))
    header = FileHeader(STATE_MAGIC, identity.namespace, identity.node_id, known.log_id, 0)
    first = min(_sequence(one) for one in segment_paths(files, directory))
    StateFile.create(files, path, header, first, first)
    return StateFile.open(files, path)


def _header_of(files: FileSystem, path: Path, identity: LogIdentity) -> FileHeader | None:
    """Read a segment's header, None if it is damaged; raises `WrongLogError`."""
    file = files.open(path)
    try:
        header = decode_file_header(file.read(0, MAX_HEADER_SIZE), SEGMENT_MAGIC, path)
        check_owner(header, identity, path)
    except BadHeaderError:
        return None
    finally:
        file.close()
    return header


def _mend_segment(
    files: FileSystem,
    path: Path,
    following: Path | None,
    identity: LogIdentity,
    state: StateFile,
) -> None:
    old_header = _header_of(files, path, identity)
    if old_header is not None and old_header.log_id != state.header.log_id:
        raise WrongLogError(f"{path} belongs to another write-ahead log; move the file away")
    header = FileHeader(
        SEGMENT_MAGIC, identity.namespace, identity.node_id, state.header.log_id, _sequence(path)
    )
    file = files.open(path)
    try:
        salvage = _salvage(file, header)
        if following is not None:
            end = _sequence(following)
        else:
            end = max(salvage.end, salvage.vouched_end, state.flushed)
        is_torn_only = following is None and end == salvage.end and _is_gapless(header, salvage)
        if old_header == header and end == salvage.end and (salvage.is_whole or is_torn_only):
            return
        _copy(files, file, path.with_name(f"{path.name}.damaged"))
        origin = FrameOrigin(state.header.log_id, identity.node_epoch)
        _replace(files, file, path, _mended_pieces(file, path, header, salvage, end, origin))
    finally:
        file.close()


def _salvage(file: File, header: FileHeader) -> _Salvage:
    """Find the good frames of a segment, wherever they are."""
    frames: list[tuple[int, FrameHeader]] = []
    end, vouched_end, position, is_whole = header.first_sequence, 0, header.size, True
    while True:
        reader = FrameReader(file, header.log_id, position)
        try:
            while frame := reader.next():
                if frame[0].first_sequence < end:
                    raise BadFrameError("it repeats records")
                frames.append((position, frame[0]))
                end, position = frame[0].end_sequence, reader.position
                vouched_end = max(vouched_end, frame[0].flushed_end)
        except BadFrameError:
            is_whole = False
        else:
            return _Salvage(tuple(frames), end, vouched_end, is_whole)
        later = next(frame_headers_from(file, header.log_id, position + 1), None)
        if later is None:
            return _Salvage(tuple(frames), end, vouched_end, is_whole)
        position, vouched_end = later[0], max(vouched_end, later[1].flushed_end)


def _is_gapless(header: FileHeader, salvage: _Salvage) -> bool:
    position, expected = header.size, header.first_sequence
    for found, frame in salvage.frames:
        if (found, frame.first_sequence) != (position, expected):
            return False
        position, expected = found + frame.size, frame.end_sequence
    return True


def _mended_pieces(
    file: File,
    path: Path,
    header: FileHeader,
    salvage: _Salvage,
    end: int,
    origin: FrameOrigin,
) -> Iterator[bytes]:
    """Yield the bytes of the segment that takes the damaged one's place."""
    yield header.encode()
    expected = header.first_sequence
    for position, frame in salvage.frames:
        if frame.end_sequence > end:
            break
        yield from _lost(origin, expected, frame.first_sequence, path)
        yield file.read(position, frame.size)
        expected = frame.end_sequence
    yield from _lost(origin, expected, end, path)


def _lost(origin: FrameOrigin, begin: int, end: int, path: Path) -> Iterator[bytes]:
    if begin < end:
        _log.error("%s: records %d to %d are lost", path, begin, end - 1)
    while begin < end:
        count = min(end - begin, _MAX_COUNT)
        yield origin.encode(FrameKind.LOST, b"", begin, count, begin)
        begin += count


def _copy(files: FileSystem, file: File, target: Path) -> None:
    size = file.size()
    pieces = (file.read(at, min(_COPY_BYTES, size - at)) for at in range(0, size, _COPY_BYTES))
    _replace(files, file, target, pieces)


def _replace(files: FileSystem, source: File, target: Path, pieces: Iterator[bytes]) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    written = files.open(temporary, create=True)
    position = 0
    try:
        written.truncate(0)
        for piece in pieces:
            written.write(position, piece)
            position += len(piece)
        written.sync()
    finally:
        written.close()
    files.rename(temporary, target)
    files.sync_directory(target.parent)


def _sequence(path: Path) -> int:
    sequence = segment_sequence(path.name)
    if sequence is None:
        raise ValueError(f"{path} is not a segment")
    return sequence
