"""Report on a sound or damaged object: footer, index, records, faults and deviations.

A sound object is read like by any reader. Otherwise the report contains each fault and salvages the
rest: blocks contain their length, so records are found without an index, and invalid entries are
shown. A tolerant report separates deviations of foreign objects (see `storage.errors`) from faults.
Does no I/O. The caller passes a function that fetches bytes `[start, end)`, a few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from streammeta.storage.errors import CorruptObjectError, Deviation, Source
from streammeta.storage.object_format import index_block
from streammeta.storage.object_format import record as record_format
from streammeta.storage.object_format.composite import LinkedObject, decode_composite
from streammeta.storage.object_format.object_reader import (
    ByteRange,
    ObjectReader,
    check_length,
    read_entry,
)

Fetch: TypeAlias = Callable[[int, int], bytes]

MAX_FETCH_BYTES = 4 * 1024 * 1024
MAX_SALVAGED_BLOCK_BYTES = 64 * 1024 * 1024
"""Largest block, in bytes, that is read without a sound index entry for it."""


@dataclass(frozen=True, slots=True)
class ObjectOutline:
    """Footer and index of an object, and their faults.

    `footer` is None if unreadable. `entries` are complete if `is_sound`, and may otherwise break
    any rule. `links` belong to a composite, whose entries are in other objects. `deviations` were
    tolerated, or are None if the object was read strictly. In a relative object all offsets count
    from 0 in each stream, as in the bytes.
    """

    source: str
    size: int
    footer: index_block.Footer | None
    entries: tuple[index_block.IndexEntry, ...]
    links: tuple[LinkedObject, ...]
    faults: tuple[CorruptObjectError, ...]
    deviations: tuple[Deviation, ...] | None = None

    @property
    def is_composite(self) -> bool:
        """Whether the footer says that this is a composite object."""
        return self.footer is not None and self.footer.composite

    @property
    def is_relative(self) -> bool:
        """Whether the footer says that the offsets count from 0 in each stream."""
        return self.footer is not None and self.footer.relative

    @property
    def is_sound(self) -> bool:
        """Whether footer, index and a composite's links keep all rules."""
        return not self.faults

    @property
    def ranges(self) -> tuple[index_block.StreamRange, ...]:
        """First start to last end of each stream, in the order of the index."""
        return index_block.stream_ranges(self.entries)


@dataclass(frozen=True, slots=True)
class PlacedRecord:
    """A record and the position of its first byte in the object."""

    position: int
    record: record_format.RecordBatch


Finding: TypeAlias = PlacedRecord | Deviation | CorruptObjectError
"""Result of a read: a record, a tolerated deviation, or a fault in place of a record."""


def read_outline(
    source: str, size: int, fetch: Fetch, *, is_tolerant: bool = False
) -> ObjectOutline:
    """Read footer and index of the object named `source` of `size` bytes.

    Raises only the errors of `fetch`. The outline contains all faults of the object.
    """
    noted: list[Deviation] | None = [] if is_tolerant else None
    outline = _read_outline(source, size, fetch, noted)
    return outline if noted is None else replace(outline, deviations=tuple(noted))


def _read_outline(
    source: str, size: int, fetch: Fetch, noted: list[Deviation] | None
) -> ObjectOutline:
    try:
        start = max(0, size - index_block.FOOTER_SIZE)
        tail = fetch(start, size) if size > start else b""
        again = Source(source, noted=None if noted is None else [])  # noted by the reader below
        footer = index_block.decode_footer(
            memoryview(tail), size, composite=None, accept_relative=True, source=again
        )
    except CorruptObjectError as fault:
        return ObjectOutline(source, size, None, (), (), (fault,))

    try:
        if footer.composite:
            data = check_length(ByteRange(0, size), fetch(0, size), source)
            composite = decode_composite(data, source=source, noted=noted)
            return ObjectOutline(source, size, footer, tuple(composite.index), composite.links, ())
        reader = ObjectReader(source, size, noted, accept_relative=True)
        while (needed := reader.needed) is not None:
            reader.receive(fetch(needed.start, needed.end))
        return ObjectOutline(source, size, footer, tuple(reader.index), (), ())
    except CorruptObjectError as fault:
        entries = _salvage_index(footer, fetch)
        return ObjectOutline(source, size, footer, entries, (), (fault,))


def _salvage_index(footer: index_block.Footer, fetch: Fetch) -> tuple[index_block.IndexEntry, ...]:
    """Decode the entries in the first few MiB of an invalid index."""
    start = footer.index_position
    end = start + min(footer.index_size, MAX_FETCH_BYTES)
    return tuple(index_block.salvage_entries(memoryview(fetch(start, end)))) if end > start else ()


def read_records(
    outline: ObjectOutline, fetch: Fetch, stream_id: int | None = None
) -> Iterator[Finding]:
    """Yield all records of the object, or of one stream, and every fault.

    A composite has no records. For a damaged index entry, the records before the fault are yielded,
    then the fault, then the next entry. Deviations are yielded too, unless the outline was read
    strictly.
    """
    is_tolerant = outline.deviations is not None
    if outline.is_composite:
        return

    if not outline.is_sound:
        data_size = outline.size if outline.footer is None else outline.footer.index_position
        for finding in _walk(outline.source, data_size, fetch, is_tolerant):
            if not isinstance(finding, PlacedRecord) or _is_wanted(finding.record, stream_id):
                yield finding
        return

    wanted = (e for e in outline.entries if stream_id is None or e.stream_id == stream_id)
    for run in _runs(wanted):
        span = ByteRange(run[0].position, run[-1].position + run[-1].size)
        try:
            view = check_length(span, fetch(span.start, span.end), outline.source)
        except CorruptObjectError as fault:
            yield fault
            continue
        for entry in run:
            at = entry.position - span.start
            data = view[at : at + entry.size]
            yield from _entry_findings(entry, data, outline.source, is_tolerant)


def _is_wanted(record: record_format.RecordBatch, stream_id: int | None) -> bool:
    return stream_id is None or record.stream_id == stream_id


def _runs(entries: Iterable[index_block.IndexEntry]) -> Iterator[list[index_block.IndexEntry]]:
    """Group adjacent entries, so that a fetch of bounded size covers each group."""
    run: list[index_block.IndexEntry] = []
    for entry in entries:
        if run:
            end = run[-1].position + run[-1].size
            is_large = entry.position + entry.size - run[0].position > MAX_FETCH_BYTES
            if entry.position != end or is_large:
                yield run
                run = []
        run.append(entry)
    if run:
        yield run


def _entry_findings(
    entry: index_block.IndexEntry, data: memoryview, source: str, is_tolerant: bool
) -> Iterator[Finding]:
    """Yield the deviations of an index entry, its readable records, and its fault if it has one."""
    fault: CorruptObjectError | None = None
    noted: list[Deviation] | None = [] if is_tolerant else None
    try:
        read_entry(entry, data, source, noted)
    except CorruptObjectError as error:
        fault = error

    yield from noted or ()
    again = Source(source, entry.position, None if noted is None else [])
    at = 0

    with suppress(CorruptObjectError):  # the same fault as above
        while at < len(data):
            header = record_format.decode_block_header(data, at, source=again)
            stop = at + record_format.BLOCK_HEADER_SIZE + header.data_length
            yield from _block_records(data[:stop], at, header.record_count, again)
            at = stop

    if fault is not None:
        yield fault


def _block_records(data: memoryview, at: int, count: int, source: Source) -> Iterator[PlacedRecord]:
    """Yield the records of the block at `at`, one by one. Raises `CorruptObjectError`."""
    at += record_format.BLOCK_HEADER_SIZE
    for _ in range(count):
        record = record_format.decode_record(data, at, source=source)
        yield PlacedRecord(source.origin + at, record)
        at += record.encoded_size


def _walk(source: str, data_size: int, fetch: Fetch, is_tolerant: bool) -> Iterator[Finding]:
    """Yield the records of all blocks from the start, up to the first fault."""
    window = _Window(source, data_size, fetch)
    at = 0
    while at < data_size:
        place = Source(source, at, [] if is_tolerant else None)
        try:
            head = window.read(at, min(at + record_format.BLOCK_HEADER_SIZE, data_size))
            header = record_format.decode_block_header(head, 0, end=data_size - at, source=place)
            yield from place.noted or ()
            size = record_format.BLOCK_HEADER_SIZE + header.data_length
            if size > MAX_SALVAGED_BLOCK_BYTES:
                raise place.corrupt(
                    0,
                    "size of a block without a sound index entry",
                    f"{size} bytes",
                    f"at most {MAX_SALVAGED_BLOCK_BYTES} bytes",
                )
            block = window.read(at, at + size)
            yield from _block_records(block, 0, header.record_count, place)
        except CorruptObjectError as fault:
            yield fault
            return

        at += size


class _Window:
    """Reads the first `size` bytes of an object sequentially, some MiB at a time."""

    def __init__(self, source: str, size: int, fetch: Fetch) -> None:
        self._source = source
        self._size = size
        self._fetch = fetch
        self._held = ByteRange(0, 0)
        self._data = memoryview(b"")

    def read(self, start: int, end: int) -> memoryview:
        """Return bytes `[start, end)`. Raises `CorruptObjectError` if the object ends first."""
        if not self._held.start <= start <= end <= self._held.end:
            span = ByteRange(start, min(max(end, start + MAX_FETCH_BYTES), self._size))
            self._data = check_length(span, self._fetch(span.start, span.end), self._source)
            self._held = span
        at = start - self._held.start
        return self._data[at : at + end - start]
