"""One file of the log: a file header, then frames end to end.

A segment is named after its first sequence and gets the name once its header is durable; the one
before it is wholly synced by then. So only the end of the last segment can be torn.
"""

from __future__ import annotations

import re
from pathlib import Path

from streammeta.client.write_ahead_log.frames import FrameReader
from streammeta.client.write_ahead_log.identity import (
    MAX_HEADER_SIZE,
    SEGMENT_MAGIC,
    BadHeaderError,
    FileHeader,
    decode_file_header,
)
from streammeta.storage.durable_files import File, FileSystem, replace_file

_NAME = re.compile(r"^(\d{20})\.wal$")
_KEPT_NAME = re.compile(r"^(\d{20}-\d+\.aside|(\d{20}\.wal|state)\.damaged)$")
_TEMPORARY_NAME = re.compile(r"^(\d{20}-\d+\.aside|(\d{20}\.wal|state)(\.damaged)?)\.tmp$")


def segment_path(directory: Path, first_sequence: int) -> Path:
    """Return where the segment that begins with `first_sequence` is."""
    return directory / f"{first_sequence:020d}.wal"


def segment_sequence(name: str) -> int | None:
    """Return the first sequence in a segment's file name, None for other files."""
    match = _NAME.match(name)
    return int(match[1]) if match else None


def is_leftover(name: str) -> bool:
    """Whether a crash in the middle of making a file left this one."""
    return _TEMPORARY_NAME.match(name) is not None


def is_kept_aside(name: str) -> bool:
    """Whether the log made this file for the operator, and never touches it again."""
    return _KEPT_NAME.match(name) is not None


class Segment:
    """An open segment; `size` is where the next frame begins."""

    def __init__(self, path: Path, file: File, header: FileHeader, size: int) -> None:
        self.path = path
        self.header = header
        self.size = size
        self.file = file

    @classmethod
    def create(cls, files: FileSystem, directory: Path, header: FileHeader) -> Segment:
        """Make an empty segment, durably."""
        path = segment_path(directory, header.first_sequence)
        replace_file(files, path, header.encode())
        files.sync_directory(path.parent)
        return cls(path, files.open(path), header, header.size)

    @classmethod
    def open(cls, files: FileSystem, path: Path) -> Segment:
        """Open a segment; raises `BadHeaderError` unless its header fits its name."""
        file = files.open(path)
        try:
            header = decode_file_header(file.read(0, MAX_HEADER_SIZE), SEGMENT_MAGIC, path)
            if header.first_sequence != segment_sequence(path.name):
                raise BadHeaderError(
                    f"its header says first sequence {header.first_sequence}, not what its name"
                    " says"
                )
        except BaseException:
            file.close()
            raise
        return cls(path, file, header, header.size)

    @property
    def first_sequence(self) -> int:
        """Sequence of the first record."""
        return self.header.first_sequence

    def frames(self) -> FrameReader:
        """Return a reader of the frames from the first one on."""
        return FrameReader(self.file, self.header.log_id, self.header.size)

    def append(self, frame: bytes) -> None:
        """Write a frame at the end; durable after `sync`. After an error, `take_back`."""
        self.file.write(self.size, frame)
        self.size += len(frame)

    def take_back(self) -> None:
        """Cut off what a failed `append` has written."""
        if self.file.size() > self.size:
            self.file.truncate(self.size)

    def sync(self) -> None:
        """Make what was appended durable."""
        self.file.sync()

    def close(self) -> None:
        """Release the file."""
        self.file.close()
