"""Files of acknowledged records that can't be committed, kept for the operator.

A file `<20 digits>-<n>.aside` is a file header, a frame of kind 3 with the reason, and frames of
records as in a segment. It gets its name only when it is complete and durable. The log never reads,
changes or removes it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

from streammeta.client.arguments import check_path
from streammeta.client.errors import DamagedLogError
from streammeta.client.wal.disk import files as log_files
from streammeta.storage.durable_files import FileSystem, PosixFileSystem, replace_file
from streammeta.storage.object_format.record import RecordBatch, encode_record
from streammeta.storage.segmented_log import BadFrameError

_FRAME_BYTES = 1 << 20


def set_aside_path(directory: Path, trimmed: int, number: int) -> Path:
    """Return the name of file `number` of a process whose log is trimmed at `trimmed`.

    A later process with the same trimmed position finds the same records in the log, so it may
    replace the file.
    """
    return directory / f"{trimmed:020d}-{number}.aside"


def write_set_aside(
    files: FileSystem,
    path: Path,
    header: log_files.FileHeader,
    node_epoch: int,
    records: Iterable[RecordBatch],
    reason: str,
) -> bool:
    """Write the file durably and return whether there is one, which takes at least one record."""
    frames = _frames(header, node_epoch, records)
    # No file for no records: it would make the operator look for lost data.
    first = next(frames, None)
    if first is None:
        return False
    text = log_files.frame_codec(header.log_id).encode(
        reason.encode(),
        base_offset=0,
        epoch=node_epoch,
        flushed_end=0,
        kind=log_files.FrameKind.TEXT,
        count=0,
    )
    replace_file(files, path, chain([header.encode() + text + first], frames))
    return True


def read_set_aside(
    path: str | os.PathLike[str], files: FileSystem | None = None
) -> Iterator[str | RecordBatch]:
    """Yield the reason, then the records. Needs no log, and changes nothing.

    Raises `DamagedLogError` at the first damaged place.
    """
    return _read(check_path("path", path), files)


def _read(path: Path, files: FileSystem | None) -> Iterator[str | RecordBatch]:
    with closing((files or PosixFileSystem()).open(path)) as file:
        position = 0
        try:
            header = log_files.decode_file_header(
                file.read(0, log_files.MAX_HEADER_SIZE), log_files.SET_ASIDE_MAGIC, path
            )
            position = header.size
            frames = log_files.frame_codec(header.log_id).frames(file, position)
            while frame := frames.next():
                if frame[0].kind == log_files.FrameKind.TEXT:
                    yield frame[1].decode()
                yield from log_files.records_in(*frame)
                # For the message: the last valid frame ends here.
                position = frames.position
        except log_files.BadHeaderError as error:
            raise DamagedLogError(path, position, str(error)) from None
        except BadFrameError as error:
            raise DamagedLogError(path, position, f"the frame there: {error}") from None


def _frames(
    header: log_files.FileHeader, node_epoch: int, records: Iterable[RecordBatch]
) -> Iterator[bytes]:
    codec = log_files.frame_codec(header.log_id)
    count = 0
    for group in _groups(records):
        yield codec.encode(
            b"".join(group),
            base_offset=count,
            epoch=node_epoch,
            flushed_end=count,
            kind=log_files.FrameKind.RECORDS,
            count=len(group),
        )
        count += len(group)


def _groups(records: Iterable[RecordBatch]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for record in records:
        group.append(encode_record(record))
        size += record.encoded_size
        if size >= _FRAME_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
