"""Scenarios about offloaded ledgers: written, read, deleted, and what failures leave."""

from __future__ import annotations

import re
from typing import Any

from streammeta.brokers.pulsar.blobs import BlobError, MemoryBlobs
from streammeta.brokers.pulsar.blocks import HEADER_SIZE, Entry
from streammeta.brokers.pulsar.ledger_values import LedgerMetadata
from streammeta.brokers.pulsar.object_names import VERSION_KEY, data_name, index_name
from streammeta.brokers.pulsar.offloader import OffloadedLedger, Offloader
from streammeta.brokers.pulsar.range_stream import RangeStream
from streammeta.brokers.pulsar.read_errors import (
    IncorrectParameterError,
    NoSuchLedgerError,
    OffloadReadHandleClosedError,
)
from streammeta.brokers.pulsar.segments import Segments
from streammeta.brokers.pulsar.streaming import OfferResult, SegmentLimits, StreamingSegment
from tests.conformance.pulsar_formats import UUID
from tests.conformance.scenario_args import Args
from tests.conformance.shape_answers import Runner, Said

LEDGER = 7
NAMES = data_name(UUID, LEDGER), index_name(UUID, LEDGER)
BLOCK_SIZE = 5 << 20


class MemoryLedger:
    """A ledger in memory."""

    def __init__(self, ledger_id: int, bodies: list[bytes], *, is_closed: bool = True) -> None:
        self.ledger_id = ledger_id
        self.entries = [Entry(at, body) for at, body in enumerate(bodies)]
        self.is_closed = is_closed

    @property
    def metadata(self) -> LedgerMetadata:
        return LedgerMetadata(sum(len(one.data) for one in self.entries), len(self.entries) - 1)

    async def read(self, first: int, last: int) -> list[Entry]:
        return self.entries[first : last + 1]


def a_ledger(blocks: int = 1, block_size: int = BLOCK_SIZE) -> MemoryLedger:
    size = block_size // 16
    count = (block_size - HEADER_SIZE) // (size + 12) * blocks
    return MemoryLedger(LEDGER, [bytes([at % 251]) * size for at in range(count)])


def presence(blobs: MemoryBlobs) -> dict[str, bool]:
    data, index = (name in blobs.kept for name in NAMES)
    return {"data": data, "index": index}


async def offloaded(
    blocks: int = 1, block_size: int = BLOCK_SIZE
) -> tuple[MemoryBlobs, Offloader, MemoryLedger]:
    blobs = MemoryBlobs()
    offloader, ledger = Offloader(blobs, block_size), a_ledger(blocks, block_size)
    await offloader.offload(ledger, UUID, {"ManagedLedgerName": "ml"})
    return blobs, offloader, ledger


async def _read_error(handle: OffloadedLedger, first: int, last: int) -> Exception | None:
    try:
        await handle.read(first, last)
    except (OSError, ValueError, NoSuchLedgerError, OffloadReadHandleClosedError) as error:
        return error
    return None


async def _and_read(given: Args) -> dict[str, Any]:
    blocks, size = int(given.take("ledger").split()[0]), given.take("block_size")
    _, offloader, ledger = await offloaded(blocks, size)
    handle = await offloader.open(LEDGER, UUID)
    last = ledger.metadata.last_entry
    same = await handle.read(0, last) == ledger.entries
    return {
        "expect": {
            "last_entry_same": handle.metadata.last_entry == last,
            "entries": Said.of({"ids, lengths and bytes equal": same}),
        }
    }


async def _bad_ranges(given: list[list[Any]]) -> dict[str, Any]:
    _, offloader, ledger = await offloaded()
    handle, found = await offloader.open(LEDGER, UUID), []
    for first, last in given:
        end = ledger.metadata.last_entry + 1 if last == "last entry + 1" else last
        error = await _read_error(handle, first, end)
        found.append(error.code if isinstance(error, IncorrectParameterError) else error)
    return {"expect": found}


_FAILING = {
    "start of the multipart upload fails": "begin",
    "a part fails": "part",
    "completion fails": "complete",
    "the index object fails": "put",
}


async def _failures(given: list[str]) -> dict[str, Any]:
    errors, left = list[bool](), set[str]()
    for said in given:
        blobs = MemoryBlobs(fails={_FAILING[said]})
        try:
            await Offloader(blobs).offload(a_ledger(), UUID, {})
        except BlobError as error:
            errors.append(str(error) == f"{_FAILING[said]} failed")
        left |= blobs.kept.keys()
    each = {
        "error": Said.of({"that of the store": len(errors) == len(given) and all(errors)}),
        "data_object": NAMES[0] in left,
        "index_object": NAMES[1] in left,
    }
    return {"expect": {"each": each}}


async def _empty(given: Args) -> dict[str, Any]:
    bodies = [b""] * (given.take("last_entry") + 1)
    ledger = MemoryLedger(LEDGER, bodies, is_closed=given.take("closed"))
    if ledger.metadata.length != given.take("length"):
        raise ValueError("length is another")
    blobs = MemoryBlobs()
    try:
        await Offloader(blobs).offload(ledger, UUID, {})
    except ValueError:
        return {"expect": {"error": "IllegalArgument" if not blobs.kept else "objects are left"}}
    return {"expect": {"error": None}}


async def _delete(given: list[str]) -> dict[str, Any]:
    if given != ["offload", "delete"]:
        raise ValueError("steps are others")
    blobs, offloader, _ = await offloaded()
    facts = {"after_offload": presence(blobs)}
    await offloader.delete(LEDGER, UUID)
    return {"expect": {**facts, "after_delete": presence(blobs)}}


async def _unknown_version(given: Args) -> dict[str, Any]:
    errors = []
    for version in given.take("format_version_of_data_object"):
        blobs, offloader, _ = await offloaded()
        blobs.kept[NAMES[0]][1][VERSION_KEY] = version
        handle = await offloader.open(LEDGER, UUID)
        errors.append(await _read_error(handle, 0, 0))
    refused = all(
        isinstance(one, OSError) and "Error reading from BlobStore" in str(one) for one in errors
    )
    said = 'IO error "Error reading from BlobStore"'
    return {"expect": {"open": Said(ok=len(errors) > 0), "read": Said.of({said: refused})}}


async def _again_after_end(given: Args) -> dict[str, Any]:
    _, offloader, ledger = await offloaded()
    handle, done = await offloader.open(LEDGER, UUID), []
    for first, last in given.take("reads"):
        end = ledger.metadata.last_entry if last == "last entry" else last
        done.append(await handle.read(first, end) == ledger.entries[first : end + 1])
    return {"expect": {"both": Said(ok=all(done))}}


async def _closed_handle(given: Args) -> dict[str, Any]:
    given.take("read_after_close")
    _, offloader, _ = await offloaded()
    handle = await offloader.open(LEDGER, UUID)
    states = ["Closed" if handle.is_closed else "Opened"]
    handle.close()
    states.append("Closed" if handle.is_closed else "Opened")
    error = await _read_error(handle, 0, 0)
    code = error.code if isinstance(error, OffloadReadHandleClosedError) else None
    return {"expect": {"state": states, "error": code}}


async def _missing(given: Args) -> dict[str, Any]:
    if given.take("delete") != "data object after open":
        raise ValueError("something else is deleted")
    blobs, offloader, _ = await offloaded()
    handle = await offloader.open(LEDGER, UUID)
    await blobs.delete([NAMES[0]])
    error = await _read_error(handle, 0, 0)
    return {"expect": {"read": error.code if isinstance(error, NoSuchLedgerError) else error}}


# ---- streams over ranges ----


def _stream(data: bytes, buffer_size: int = 1000) -> RangeStream:
    async def read(start: int, length: int) -> bytes:
        return data[start : start + length]

    return RangeStream(read, len(data), buffer_size)


async def _drained(stream: RangeStream, step: int) -> bytes:
    parts = []
    while part := await stream.read(step):
        parts.append(part)
    return b"".join(parts)


async def _whole_object(given: Args) -> dict[str, Any]:
    size, buffer = given.take("size"), given.take("buffer")
    data = bytes(at % 253 for at in range(size))
    same = [await _drained(_stream(data, buffer), step) == data for step in (1, 100)]

    async def nothing(start: int, length: int) -> bytes:
        raise OSError("no such object")

    try:
        await RangeStream(nothing, size, buffer).read(1)
        fails = False
    except OSError:
        fails = True
    return {
        "expect": {
            "bytes": Said.of({"equal by single bytes and by 100 byte reads": all(same)}),
            "missing_object": Said.of({"IO error": fails}),
        }
    }


async def _seek_forward(given: Args) -> dict[str, Any]:
    data = bytes(at % 253 for at in range(given.take("size")))
    stream, found = _stream(data), []
    for _, position in given.take("steps"):
        try:
            stream.seek_forward(position)
        except OSError:
            found.append(Said.of({"IO error (backwards)": True}))
            continue
        part = await stream.read(10)
        good = part == data[position : position + 10]
        is_last = position == given.take("steps")[-1][1]
        rest = is_last and await _drained(stream, 100) == data[position + 10 :]
        found.append(Said.of({"ok": good, "ok, rest of the object equal": good and rest}))
    return {"expect": found}


# ---- streaming ----


async def _streamed(max_bytes: int, count: int, size: int) -> tuple[list[int], list[Entry], bool]:
    """Stream entries of ledger 0 into segments; return ends, what is read, and its truth."""
    blobs, ends, limits = MemoryBlobs(), list[int](), SegmentLimits(max_bytes, block_bytes=300)

    def segment(at: int) -> StreamingSegment:
        return StreamingSegment(blobs, f"segment-{len(ends)}", 0, at, limits=limits)

    writer, taken = segment(0), list[Entry]()
    for at in range(count):
        entry = Entry(at, bytes([at]) * size)
        done = writer.offer(0, entry)
        if done is OfferResult.FAIL_SEGMENT_CLOSED:
            ends.append((await writer.finish()).entry_id)
            writer = segment(at)
            done = writer.offer(0, entry)
        if done is not OfferResult.SUCCESS:
            raise AssertionError(done)
        taken.append(entry)
    ends.append((await writer.finish()).entry_id)
    uuids = [f"segment-{number}" for number in range(len(ends))]
    entries = await (await Segments(blobs).open(0, uuids)).read(0, count - 1)
    return ends, entries, entries == taken


async def _streams_one(given: Args) -> dict[str, Any]:
    match = re.match(r"(\d+) of (\d+) bytes in ledger 0", given.take("entries"))
    if match is None:
        raise ValueError("entries are others")
    ends, _, same = await _streamed(given.take("segment_max_bytes"), *map(int, match.groups()))
    facts = {"end_ledger": 0, "end_entry": ends[-1], f"read_0_{ends[-1]}": Said(equal=same)}
    return {"expect": facts}


async def _streams_several(given: Args) -> dict[str, Any]:
    limit, segments = given.take("segment_max_bytes"), given.take("segments")
    last = int(segments[-1].rpartition("..")[2])
    ends, _, same = await _streamed(limit, last + 1, limit * len(segments) // (last + 1))
    return {"expect": {"end_entries": ends, f"read_0_{last}": Said(equal=same)}}


RUNNERS: dict[str, Runner] = {
    "offload_and_read": _and_read,
    "offload_bad_ranges": _bad_ranges,
    "offload_failures_leave_nothing": _failures,
    "offload_empty_ledger": _empty,
    "offload_delete": _delete,
    "offload_unknown_data_version": _unknown_version,
    "offload_read_again_after_end": _again_after_end,
    "offload_closed_handle": _closed_handle,
    "offload_data_object_missing": _missing,
    "streaming_segment_closes_by_size": _streams_one,
    "streaming_across_segments": _streams_several,
    "range_stream_whole_object": _whole_object,
    "range_stream_seek_forward": _seek_forward,
}
