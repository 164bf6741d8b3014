"""Files of records that were acknowledged and can't be committed: kept for people, not lost.

A file `<20 digits>-<n>.aside` is a file header, a frame of kind 3 with the reason, and frames of
records as in a segment. It appears under its name only when it is whole and durable. The log never
reads, changes or removes it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

from streammeta.client.arguments import check_path
from streammeta.client.write_ahead_log.errors import DamagedLogError
from streammeta.client.write_ahead_log.frames import (
    BadFrameError,
    FrameKind,
    FrameOrigin,
    FrameReader,
    records_in,
)
from streammeta.client.write_ahead_log.identity import (
    MAX_HEADER_SIZE,
    SET_ASIDE_MAGIC,
    BadHeaderError,
    FileHeader,
    decode_file_header,
)
from streammeta.storage.durable_files import FileSystem, PosixFileSystem
from streammeta.storage.object_format.record import RecordBatch, encode_record

_FRAME_BYTES = 1 << 20


def set_aside_path(directory: Path, trimmed: int, number: int) -> Path:
    """Name file `number` of those that a process made while the log was trimmed at `trimmed`.

    A later process that finds the log trimmed there finds the same records in it, too, so it may
    replace the file.
    """
    return directory / f"{trimmed:020d}-{number}.aside"


def write_set_aside(
    files: FileSystem,
    path: Path,
    header: FileHeader,
    origin: FrameOrigin,
    records: Iterable[RecordBatch],
    reason: str,
) -> int:
    """Write the file, durably, and return how many records it has; none leaves no file."""
    bodies = _frame_bodies(records)
    first = next(bodies, None)
    if first is None:
        return 0
    temporary = path.with_name(f"{path.name}.tmp")
    file = files.open(temporary, create=True)
    count = 0
    try:
        file.truncate(0)
        data = header.encode() + origin.encode(FrameKind.TEXT, reason.encode(), 0, 0, 0)
        position = 0
        for pieces in chain([first], bodies):
            body = b"".join(pieces)
            data += origin.encode(FrameKind.RECORDS, body, count, len(pieces), count)
            file.write(position, data)
            position += len(data)
            count += len(pieces)
            data = b""
        file.sync()
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_directory(path.parent)
    return count


def read_set_aside(
    path: str | os.PathLike[str], files: FileSystem | None = None
) -> Iterator[str | RecordBatch]:
    """Yield the reason, then the records; needs no log, and changes nothing.

    Raises `DamagedLogError` where the file is not what was written.
    """
    return _read(check_path("path", path), files)


def _read(path: Path, files: FileSystem | None) -> Iterator[str | RecordBatch]:
    with closing((files or PosixFileSystem()).open(path)) as file:
        position = 0
        try:
            header = decode_file_header(file.read(0, MAX_HEADER_SIZE), SET_ASIDE_MAGIC, path)
            position = header.size
            frames = FrameReader(file, header.log_id, position)
            while frame := frames.next():
                if frame[0].kind == FrameKind.TEXT:
                    yield frame[1].decode()
                yield from records_in(*frame, str(path))
                position = frames.position
        except (BadHeaderError, BadFrameError) as error:
            raise DamagedLogError(path, position, str(error)) from None


def _frame_bodies(records: Iterable[RecordBatch]) -> Iterator[list[bytes]]:
    pieces: list[bytes] = []
    size = 0
    for record in records:
        pieces.append(encode_record(record))
        size += record.encoded_size
        if size >= _FRAME_BYTES:
            yield pieces
            pieces, size = [], 0
    if pieces:
        yield pieces
