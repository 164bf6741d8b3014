"""Checks before a commit: nothing lost, nothing duplicated, nothing damaged.

Coverage compares the outputs' index entries with the live entries of their sources. Copied blocks
get a new checksum, which would hide any damage from then on. Therefore the first record of each
entry is compared with the index, and the bytes of a completely read source with the CRC-32C of its
upload. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streammeta.storage.compaction.entries import (
    Column,
    EntryTable,
    contiguous_runs,
    sort_by_stream,
)
from streammeta.storage.errors import CorruptObjectError, StorageError
from streammeta.storage.object_format.checksum import join_crcs
from streammeta.storage.object_format.record import BLOCK_HEADER_SIZE, BLOCK_MAGIC, RECORD_MAGIC


class CoverageError(StorageError):
    """Outputs do not contain exactly the live data of the sources and must not be committed."""


def check_coverage(sources: EntryTable, outputs: EntryTable) -> None:
    """Compare the entries of all outputs of a commit with all live entries of its sources.

    Offsets, records and bytes must be equal in each run of each stream.

    Raises:
        CoverageError: they differ, or outputs overlap. Names the first stream and offset.
    """
    # Runs hide the cuts between entries, which compaction may move.
    read, written = sort_by_stream(sources), sort_by_stream(outputs)
    # First: an overlap could hide a gap of the same size in the sums.
    _check_overlap(written)
    wanted, found = _runs(read), _runs(written)
    count = min(len(wanted), len(found))
    differs = (wanted[:count] != found[:count]).any(axis=1)

    if differs.any():
        place = int(differs.argmax())
    elif len(wanted) != len(found):
        place = count
    else:
        return

    raise CoverageError(
        f"outputs contain {_describe(found, place)}, expected {_describe(wanted, place)}, the live"
        " data of the sources. Nothing was committed. Plan the compaction again"
    )


def _check_overlap(written: EntryTable) -> None:
    is_over = (written.stream_id[1:] == written.stream_id[:-1]) & (
        written.start_offset[1:] < written.end_offset[:-1]
    )
    if is_over.any():
        row = int(is_over.argmax())
        first, second = written.row(row), written.row(row + 1)
        raise CoverageError(
            f"outputs overlap: stream {first.stream_id} [{first.start_offset}, {first.end_offset})"
            f" in object {first.object_id} and [{second.start_offset}, {second.end_offset}) in"
            f" object {second.object_id}. Nothing was committed. Plan the compaction again"
        )


def _runs(table: EntryTable) -> Column:
    """Return a row for each run: stream, start, end, records and bytes."""
    firsts = contiguous_runs(table)
    if not len(firsts):
        return np.empty((0, 5), dtype=np.int64)
    lasts = np.append(firsts[1:], len(table)) - 1
    return np.stack(
        (
            table.stream_id[firsts],
            table.start_offset[firsts],
            table.end_offset[lasts],
            np.add.reduceat(table.record_count, firsts),
            np.add.reduceat(table.size, firsts),
        ),
        axis=1,
    )


def _describe(runs: Column, place: int) -> str:
    if place >= len(runs):
        return "nothing more"
    stream_id, start, end, records, size = runs[place].tolist()
    return f"stream {stream_id} [{start}, {end}) of {records} records and {size} bytes"


_STREAM_ID = slice(BLOCK_HEADER_SIZE + 1, BLOCK_HEADER_SIZE + 9)
_BASE_OFFSET = slice(BLOCK_HEADER_SIZE + 17, BLOCK_HEADER_SIZE + 25)
# The record's magic, stream, epoch and base offset.
_HEAD_SIZE = BLOCK_HEADER_SIZE + 25
# Bounds the copy of the headers to less than a megabyte.
_ENTRIES_AT_A_TIME = 16 * 1024


class DamagedBlockError(CorruptObjectError):
    """A block contradicts the index of its object."""

    def __init__(
        self, object_id: int, source: str, position: int, what: str, *, found: str, expected: str
    ) -> None:
        self.object_id = object_id
        super().__init__(source, position, what, found=found, expected=expected)


def check_blocks(
    buffer: memoryview, places: Column, entries: EntryTable, key_of: Callable[[int], str]
) -> None:
    """Compare the first record of each entry, at `places` of the buffer, with the entry.

    Finds zeros and bytes of another object or position, but no damage of a payload.

    Raises:
        DamagedBlockError: a record's stream or offset differs from the index. Names the source
            (`key_of` its id) and the position.
    """
    octets = np.frombuffer(buffer, dtype=np.uint8)
    # In slices, because the gathered headers are copies.
    for start in range(0, len(entries), _ENTRIES_AT_A_TIME):
        some = entries.span(start, start + _ENTRIES_AT_A_TIME)
        at = places[start : start + _ENTRIES_AT_A_TIME]
        # Gathers one header per entry from anywhere in the buffer.
        heads = octets[at[:, None] + np.arange(_HEAD_SIZE)]
        streams, offsets = (
            _decode_numbers(heads[:, _STREAM_ID]),
            _decode_numbers(heads[:, _BASE_OFFSET]),
        )
        faults = (
            (heads[:, 0] != BLOCK_MAGIC)
            | (heads[:, BLOCK_HEADER_SIZE] != RECORD_MAGIC)
            | (streams != some.stream_id)
            | (offsets != some.start_offset)
        )

        if faults.any():
            number = int(faults.argmax())
            entry = some.row(number)
            raise DamagedBlockError(
                entry.object_id,
                key_of(entry.object_id),
                entry.position,
                "start of a block",
                found=heads[number].tobytes().hex(),
                expected=f"the first record of stream {entry.stream_id} at offset"
                f" {entry.start_offset}, as in the index",
            )


def _decode_numbers(octets: NDArray[np.uint8]) -> Column:
    """Decode a column of big-endian 64-bit numbers."""
    return np.ascontiguousarray(octets).view(">i8").astype(np.int64)[:, 0]


@dataclass(frozen=True, slots=True)
class RecordedChecksum:
    """CRC-32C of a whole object, and of its tail after `data_size` bytes of blocks."""

    crc32c: int
    data_size: int
    tail_size: int
    tail_crc32c: int


_Piece: TypeAlias = tuple[int, int, int]
"""Position, size and CRC-32C of some bytes of a source."""


class SourceChecks:
    """Compares the checksums of the bytes read from each source, in any order, with recorded ones.

    A source with unread blocks (expired, copied by the store or by an earlier attempt) has `gaps`.
    They have to be read too, because the new object's checksum would vouch for the copied bytes.
    """

    def __init__(self, recorded: Mapping[int, RecordedChecksum]) -> None:
        self._recorded = recorded
        self._pieces: defaultdict[int, list[_Piece]] = defaultdict(list)
        self.checked = 0

    def wants(self, object_id: int) -> bool:
        """Return whether a checksum was recorded for this source."""
        return object_id in self._recorded

    def add(self, object_id: int, position: int, size: int, crc32c: int) -> None:
        """Add the checksum of some bytes of a source."""
        self._pieces[object_id].append((position, size, crc32c))

    def restart(self, object_id: int) -> SourceChecks:
        """Return new checks of one source, without any bytes read."""
        return SourceChecks({object_id: self._recorded[object_id]})

    def gaps(self) -> dict[int, list[tuple[int, int]]]:
        """Return the ranges of blocks without a checksum, by source."""
        gaps: dict[int, list[tuple[int, int]]] = {}
        for object_id, recorded in self._recorded.items():
            end, missing = 0, []
            for position, size, _ in sorted(self._pieces[object_id]):
                if position > end:
                    missing.append((end, position))
                # Pieces may overlap after a repeated read.
                end = max(end, position + size)
            if end < recorded.data_size:
                missing.append((end, recorded.data_size))
            if missing:
                gaps[object_id] = missing
        return gaps

    def damaged(self) -> dict[int, str]:
        """Return the sources that differ from their upload, with the reason."""
        found: dict[int, str] = {}
        for object_id, pieces in self._pieces.items():
            recorded = self._recorded[object_id]
            crc32c = _combine(pieces, recorded)
            # Sources without complete reads are not counted as verified.
            self.checked += crc32c is not None
            if crc32c is not None and crc32c != recorded.crc32c:
                found[object_id] = (
                    f"CRC-32C is {crc32c:#010x}, but {recorded.crc32c:#010x} was recorded. Keep the"
                    " object, and restore it from a copy of the bucket"
                )
        return found


def _combine(pieces: list[_Piece], recorded: RecordedChecksum) -> int | None:
    """Return the checksum of the object, or None unless the pieces cover all of its blocks."""
    crc32c = end = 0
    for position, size, piece_crc32c in sorted(pieces):
        # Checksums join only without gaps and overlaps.
        if position != end:
            return None
        crc32c = join_crcs(crc32c, piece_crc32c, size)
        end += size
    if end != recorded.data_size:
        return None
    # Index and footer are not copied. Their part of the checksum was computed when they were read.
    return join_crcs(crc32c, recorded.tail_crc32c, recorded.tail_size)
