"""Sending memory that belongs to the caller, without a copy of it."""

from __future__ import annotations

import io
from typing import IO, cast

from streammeta.storage.object_store.base import Body

_PIECE_BYTES = 64 * 1024


def as_view(data: Body) -> bytes | memoryview:
    """Give `data` without copying it: itself if it can't change, else a view of its bytes."""
    return data if isinstance(data, bytes) else memoryview(data).cast("B")


def sendable(body: bytes | memoryview) -> bytes | IO[bytes]:
    """Give what botocore sends as `body`, for one attempt."""
    return body if isinstance(body, bytes) else cast("IO[bytes]", ViewBody(body))


class ViewBody(io.RawIOBase):
    """A file over a memoryview, read piece by piece as it is sent."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Give what comes next, all of it for a negative size, else at most `size` bytes.

        Who asks for a lot gets less than that, so that little is held.
        """
        size = len(self._view) if size < 0 else min(size, _PIECE_BYTES)
        piece = bytes(self._view[self._at : self._at + size])
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` from the start, from here or from the end."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Give the position of the next read."""
        return self._at
