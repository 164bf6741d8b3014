"""Sources held against the checksums that were recorded when they were uploaded.

Copied blocks get a new checksum, that of their new object; bytes that were damaged before would
look whole from then on. So what is read of a source is summed up as it comes, in pieces and in any
order, and when the pieces are all of its blocks their checksum must be the recorded one. A source
of which something was not read, as it had expired or was copied by an earlier attempt, can't be
checked so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from streammeta.storage.object_format.crc_arithmetic import joined_crc


@dataclass(frozen=True, slots=True)
class RecordedChecksum:
    """The CRC-32C of a whole object, and of its end behind `data_size` bytes of blocks."""

    crc32c: int
    data_size: int
    tail_size: int
    tail_crc32c: int


@dataclass(frozen=True, slots=True)
class _Piece:
    position: int
    size: int
    crc32c: int


class SourceChecks:
    """What was seen of each source whose checksum is known."""

    def __init__(self, recorded: Mapping[int, RecordedChecksum]) -> None:
        self._recorded = recorded
        self._pieces: defaultdict[int, list[_Piece]] = defaultdict(list)
        self.checked = 0

    def wants(self, object_id: int) -> bool:
        """Tell whether there is a checksum to hold this source against."""
        return object_id in self._recorded

    def add(self, object_id: int, position: int, size: int, crc32c: int) -> None:
        """Take the checksum of some bytes of a source."""
        self._pieces[object_id].append(_Piece(position, size, crc32c))

    def damaged(self) -> dict[int, str]:
        """Return the sources that are not what was uploaded, and how that shows."""
        found: dict[int, str] = {}
        for object_id, pieces in self._pieces.items():
            recorded = self._recorded[object_id]
            crc32c = _of_all(pieces, recorded)
            self.checked += crc32c is not None
            if crc32c is not None and crc32c != recorded.crc32c:
                found[object_id] = (
                    f"its bytes have the CRC-32C {crc32c:#010x}, recorded is"
                    f" {recorded.crc32c:#010x}; keep it, and restore it from a copy of the bucket"
                )
        return found


def _of_all(pieces: list[_Piece], recorded: RecordedChecksum) -> int | None:
    """Return the checksum of the object, None unless the pieces are all of its blocks."""
    crc32c = end = 0
    for piece in sorted(pieces, key=lambda one: one.position):
        if piece.position != end:
            return None
        crc32c = joined_crc(crc32c, piece.crc32c, piece.size)
        end += piece.size
    if end != recorded.data_size:
        return None
    return joined_crc(crc32c, recorded.tail_crc32c, recorded.tail_size)
