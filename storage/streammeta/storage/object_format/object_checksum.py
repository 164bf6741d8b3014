"""CRC-32C of whole objects: what the format itself lacks, kept beside an object, not inside it.

The bytes of an object have no checksum. Who writes one computes its CRC-32C (Castagnoli, as in
RFC 3720) while the bytes pass by and records it in the metadata of the object; who reads all of
the bytes again, in order and in pieces of any size, can hold them against it.
"""

from __future__ import annotations

import google_crc32c

from streammeta.storage.errors import CorruptObjectError

_COPIED_BYTES = 256 * 1024
"""Few enough to stay in the processor's cache."""


class ObjectChecksum:
    """The CRC-32C of the bytes seen so far, in the order they were given."""

    __slots__ = ("_crc", "_size")

    def __init__(self) -> None:
        self._crc = 0
        self._size = 0

    @property
    def value(self) -> int:
        """The checksum, 0..2^32-1; 0 of no bytes."""
        return self._crc

    @property
    def size(self) -> int:
        """Bytes seen."""
        return self._size

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the object."""
        if isinstance(data, bytes):
            self._crc = google_crc32c.extend(self._crc, data)
        else:
            self._update_by_copies(memoryview(data).cast("B"))
        self._size += len(data)

    def _update_by_copies(self, data: memoryview) -> None:
        """Copy piece by piece, since the library takes nothing but `bytes`."""
        for start in range(0, len(data), _COPIED_BYTES):
            piece = bytes(data[start : start + _COPIED_BYTES])
            self._crc = google_crc32c.extend(self._crc, piece)

    def verify(self, expected: int, *, source: str) -> None:
        """Raise `CorruptObjectError` for the object named `source` unless the value is `expected`.

        To be called when all of its bytes have been seen.
        """
        if self._crc != expected:
            raise CorruptObjectError(
                source,
                0,
                f"CRC-32C of its {self._size} bytes",
                found=f"{self._crc:#010x}",
                expected=f"{expected:#010x}",
            )
