"""A file of the journal as Python's own libraries want to read it."""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from streammeta.storage.durable_files import File

_READ_BUFFER_BYTES = 1 << 20


def as_binary_io(file: File, *, closes: bool = True) -> BinaryIO:
    """Return a buffered, seekable reader of `file`; closing it closes `file` if told so."""
    return io.BufferedReader(_FileReader(file, closes=closes), _READ_BUFFER_BYTES)


class _FileReader(io.RawIOBase):
    def __init__(self, file: File, *, closes: bool) -> None:
        self._file = file
        self._closes = closes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size()}
        self._position = max(0, origins[whence] + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed and self._closes:
            self._file.close()
        super().close()
