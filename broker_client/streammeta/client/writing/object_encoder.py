"""Object encoder: moves runs of encoded records into the bytes of an object.

Owns where data blocks are cut, and the buffer of the object. The records leave their run piece by
piece as they enter the object, so a batch is never in memory twice. The format of the bytes is
`streammeta.storage.object_format`. Pure: no I/O, no clock.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streammeta.client.resources.resources import give_back
from streammeta.client.writing.record_buffer import UNKNOWN_TIME, ObjectPlan, StreamRun
from streammeta.storage.object_format import record as record_format
from streammeta.storage.object_format.checksum import ObjectChecksum
from streammeta.storage.object_format.index_block import FOOTER_SIZE, INDEX_ENTRY_SIZE, IndexEntry
from streammeta.storage.object_format.object_writer import encode_trailer

_OWN_PAGES_FROM = 128 * 1024
"""Objects of at least this size get their own pages, which return to the system at once."""

_GIVE_BACK_BYTES = 1024 * 1024
"""Bytes that may be in memory twice: in the object, and in freed pieces of its runs."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedObject:
    """The bytes of an object without an id yet, and its contents.

    `starts` are the positions where the blocks of each run start, and where the last run's blocks
    end. `crc32c` covers all bytes. Time bounds are in ms since 1970, both `UNKNOWN_TIME` if some
    record has no time.
    """

    runs: tuple[StreamRun, ...]
    shared: bool
    data: memoryview
    starts: tuple[int, ...]
    crc32c: int
    min_timestamp_ms: int
    max_timestamp_ms: int

    @property
    def size(self) -> int:
        """Bytes of the object."""
        return len(self.data)

    def records_of(self, run: StreamRun) -> list[record_format.RecordBatch]:
        """Decode the records of one of its runs."""
        index = self.runs.index(run)
        return record_format.decode_blocks(self.data[self.starts[index] : self.starts[index + 1]])


def encode_object(plan: ObjectPlan, block_bytes: int) -> EncodedObject:
    """Build the object of `plan`. Its runs keep only their ranges and callers.

    A data block ends when the payload since the last cut reaches `block_bytes`. The count continues
    across the end of a stream.
    """
    cutter = _Cutter(block_bytes)
    blocks = [cutter.cut(run) for run in plan.runs]
    # The exact size first: the bytes are written once, into a buffer that never grows.
    lengths = [block.data_length for cuts in blocks for block in cuts]
    data_size = sum(lengths) + record_format.BLOCK_HEADER_SIZE * len(lengths)
    entry_count = sum(map(len, blocks))
    data = _allocate(data_size + INDEX_ENTRY_SIZE * entry_count + FOOTER_SIZE)

    entries: list[IndexEntry] = []
    starts = [0]
    position = kept_from = 0
    for run, cuts in zip(plan.runs, blocks, strict=True):
        for block, entry in zip(cuts, _entries(run, cuts, position), strict=True):
            body = position + record_format.BLOCK_HEADER_SIZE
            data[position:body] = record_format.encode_block_header(
                block.records, block.data_length
            )
            position = body + block.data_length
            _move(run.segments, data[body:position])
            entries.append(entry)
            # Freed segments stay in the allocator's heap until a call returns them.
            if position - kept_from >= _GIVE_BACK_BYTES:
                give_back()
                kept_from = position
        starts.append(position)
        del run.lengths[:], run.offsets[:]

    data[position:] = encode_trailer(entries, position)

    checksum = ObjectChecksum()
    checksum.update(data)
    return EncodedObject(
        plan.runs,
        plan.shared,
        data.toreadonly(),
        tuple(starts),
        checksum.value,
        *_time_bounds(plan.runs),
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A data block of offsets `[start_offset, end_offset)`. `data_length` excludes its header."""

    records: int
    data_length: int
    start_offset: int
    end_offset: int


class _Cutter:
    """Divides runs, in the order of the object, into data blocks."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._carried = 0

    def cut(self, run: StreamRun) -> list[_Block]:
        """Return the blocks of the next run."""
        # Small runs are the usual case, and need no search for cuts.
        if self._carried + run.payload_bytes < self._threshold:
            self._carried += run.payload_bytes
            whole = _Block(len(run.lengths), run.encoded_bytes, run.start_offset, run.end_offset)
            return [whole]
        return self._cut_large(run)

    def _cut_large(self, run: StreamRun) -> list[_Block]:
        # Prefix sums find each cut by binary search instead of a loop over all records.
        payload = np.cumsum(np.frombuffer(run.lengths, dtype=np.uint32), dtype=np.int64)
        blocks: list[_Block] = []
        first, before = 0, 0
        while first < len(payload):
            # The block includes the record that reaches the threshold.
            last = int(np.searchsorted(payload, before + self._threshold - self._carried))
            self._carried = 0
            if last == len(payload):
                last -= 1
                self._carried += int(payload[last]) - before

            records = last + 1 - first
            length = int(payload[last]) - before + record_format.RECORD_HEADER_SIZE * records
            ends = last + 1 == len(payload)
            # A block ends where the next one starts, so that blocks of a stream are contiguous.
            end_offset = run.end_offset if ends else run.offsets[last + 1]
            blocks.append(_Block(records, length, run.offsets[first], end_offset))
            first, before = last + 1, int(payload[last])
        return blocks


def _entries(run: StreamRun, blocks: Sequence[_Block], position: int) -> list[IndexEntry]:
    entries: list[IndexEntry] = []
    for block in blocks:
        size = record_format.BLOCK_HEADER_SIZE + block.data_length
        entries.append(
            IndexEntry(
                run.stream.stream_id,
                block.start_offset,
                block.end_offset,
                block.records,
                position,
                size,
            )
        )
        position += size

    return entries


def _allocate(size: int) -> memoryview:
    """Return zeroed memory whose pages are allocated when they are first written."""
    if size < _OWN_PAGES_FROM:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _move(segments: deque[bytearray], target: memoryview) -> None:
    """Fill `target` from the front of `segments`, freeing each segment that was copied."""
    at = 0
    while at < len(target):
        segment = segments.popleft()
        wanted = len(target) - at
        if len(segment) <= wanted:
            target[at : at + len(segment)] = segment
            at += len(segment)
        else:
            target[at:] = memoryview(segment)[:wanted]
            # Nothing is moved here: a bytearray keeps an offset to its first byte.
            del segment[:wanted]
            segments.appendleft(segment)
            return


def _time_bounds(runs: Sequence[StreamRun]) -> tuple[int, int]:
    earliest = min(run.min_timestamp_ms for run in runs)
    if earliest < 0:
        return UNKNOWN_TIME, UNKNOWN_TIME
    return earliest, max(run.max_timestamp_ms for run in runs)
