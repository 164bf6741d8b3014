"""Segments of streaming offload: written in bounded blocks, read over segments, deleted once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from uuid import UUID

import pytest

from streammeta.brokers.pulsar.blobs.blobs import BlobError, MemoryBlobs, MemoryUpload
from streammeta.brokers.pulsar.cluster_lists import encode_list
from streammeta.brokers.pulsar.formats import ledger_values, read_errors
from streammeta.brokers.pulsar.formats.blocks import PADDING, BlockHeader, Entry
from streammeta.brokers.pulsar.formats.index_block import StreamingIndexBlock
from streammeta.brokers.pulsar.formats.object_names import VERSION_KEY
from streammeta.brokers.pulsar.ledger_list import ManagedLedger
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.brokers.pulsar.segments import Segments
from streammeta.brokers.pulsar.streaming import OfferResult, SegmentLimits, StreamingSegment
from streammeta.storage.errors import PayloadError
from tests.conformance.pulsar_ledgers import Sources
from tests.kit.memory_stores import MemoryListStore
from tests.kit.seeds import seeds

Rows = Sequence[tuple[int, Entry]]
LIMITS = SegmentLimits(segment_bytes=1 << 30, buffer_bytes=900, block_bytes=300)


def _uuid(number: int) -> str:
    return str(UUID(int=number, version=4))


async def _streamed(
    blobs: MemoryBlobs, number: int, rows: Rows, limits: SegmentLimits = LIMITS
) -> None:
    ledger_id, first = rows[0]
    segment = StreamingSegment(blobs, _uuid(number), ledger_id, first.entry_id, limits=limits)
    for ledger_id, entry in rows:
        done = segment.offer(ledger_id, entry)
        if done is OfferResult.FAIL_BUFFER_FULL:
            await segment.upload_blocks()
            done = segment.offer(ledger_id, entry)
        assert done is OfferResult.SUCCESS
        assert segment.waiting_bytes < limits.buffer_bytes + len(entry.data) + 1
    end = await segment.finish()
    assert (end.ledger_id, end.entry_id) == (rows[-1][0], rows[-1][1].entry_id)


def _rows(ledger_id: int, first: int, sizes: Sequence[int]) -> list[tuple[int, Entry]]:
    return [
        (ledger_id, Entry(first + at, bytes([at % 251]) * size)) for at, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("seed", seeds(6, slow=14))
async def test_ledgers_over_any_segments_are_read_back_in_any_range(seed: int) -> None:
    chosen = random.Random(seed)
    rows, first = list[tuple[int, Entry]](), chosen.choice((0, 5, 127, 128, 300))
    for ledger_id in (4, 5, 9):
        sizes = [chosen.choice((0, 7, 90, 700)) for _ in range(chosen.randrange(1, 60))]
        rows += _rows(ledger_id, first, sizes)
        first = 0
    blobs, cuts = MemoryBlobs(), sorted(chosen.sample(range(1, len(rows)), 2))
    for number, (begin, end) in enumerate(
        zip([0, *cuts], [*cuts, len(rows)], strict=True), start=1
    ):
        await _streamed(blobs, number, rows[begin:end])
    segments = Segments(blobs, chosen.randrange(1, 900))
    for ledger_id in (4, 5, 9):
        entries = [entry for number, entry in rows if number == ledger_id]
        handle = await segments.open(ledger_id, [_uuid(number) for number in (1, 2, 3)])
        assert handle.first_entry == entries[0].entry_id
        assert handle.last_entry == entries[-1].entry_id
        for _ in range(10):
            low, high = sorted(chosen.choices(range(len(entries)), k=2))
            read = await handle.read(entries[low].entry_id, entries[high].entry_id)
            assert read == entries[low : high + 1], f"seed {seed}"


async def test_every_block_but_a_ledgers_last_is_full_and_all_end_with_padding() -> None:
    blobs = MemoryBlobs()
    await _streamed(blobs, 1, _rows(7, 200, [100] * 10) + _rows(8, 0, [1]))
    data = blobs.kept[_uuid(1)][0]
    index = StreamingIndexBlock.decode(blobs.kept[f"{_uuid(1)}-index"][0])
    assert index.data_object_length == len(data)
    assert data[: len(PADDING)] == PADDING  # before entry 200, at which the peer does not begin
    at = len(PADDING)
    places = [(7, entry) for entry in index.ledgers[7][1].entries]
    places += [(8, entry) for entry in index.ledgers[8][1].entries]
    assert [(ledger, place.first_entry, place.part) for ledger, place in places] == [
        (7, 200, 1),
        (7, 203, 2),
        (7, 206, 3),
        (7, 209, 4),
        (8, 0, 5),
    ]
    full = 128 + 3 * (12 + 100) + len(PADDING)
    for (ledger, place), size in zip(places, [full, full, full, 300, 300], strict=True):
        assert place.offset == at
        header = BlockHeader.decode(data[at : at + 128])
        assert header == BlockHeader(size, place.first_entry, ledger)
        at += size
        assert data[at - 4 : at - 3] >= b"\x80" or size == 300
    assert at == len(data)


async def test_a_full_buffer_takes_entries_again_after_an_upload() -> None:
    blobs = MemoryBlobs()
    segment = StreamingSegment(blobs, _uuid(1), 1, 0, limits=LIMITS)
    for at in range(9):
        assert segment.offer(1, Entry(at, bytes(100))) is OfferResult.SUCCESS
    assert segment.offer(1, Entry(9, b"x")) is OfferResult.FAIL_BUFFER_FULL
    assert segment.waiting_bytes == 900
    await segment.upload_blocks()
    assert segment.waiting_bytes == 0
    assert segment.offer(1, Entry(9, b"x")) is OfferResult.SUCCESS
    await segment.upload_blocks()
    assert segment.waiting_bytes == 1  # less than a block


async def test_a_finished_segment_takes_nothing_and_does_not_finish_twice() -> None:
    segment = StreamingSegment(MemoryBlobs(), _uuid(1), 1, 3, limits=LIMITS)
    with pytest.raises(ValueError, match="empty"):
        await segment.finish()
    assert segment.offer(2, Entry(0, b"a")) is OfferResult.FAIL_NOT_CONSECUTIVE
    assert segment.offer(1, Entry(3, b"a")) is OfferResult.SUCCESS
    assert segment.offer(1, Entry(5, b"a")) is OfferResult.FAIL_NOT_CONSECUTIVE
    assert segment.offer(2, Entry(1, b"a")) is OfferResult.FAIL_NOT_CONSECUTIVE
    await segment.finish()
    assert segment.offer(1, Entry(4, b"a")) is OfferResult.FAIL_SEGMENT_CLOSED
    with pytest.raises(ValueError, match="finished"):
        await segment.finish()


@pytest.mark.parametrize("failing", ["begin", "part", "complete", "put"])
async def test_a_segment_that_fails_leaves_nothing_and_takes_nothing(failing: str) -> None:
    blobs = MemoryBlobs(fails={failing})
    segment = StreamingSegment(blobs, _uuid(1), 1, 0, limits=LIMITS)
    for at in range(4):
        segment.offer(1, Entry(at, bytes(100)))
    with pytest.raises(BlobError, match=f"{failing} failed"):
        await segment.finish()
    assert not blobs.kept
    assert segment.offer(1, Entry(4, b"")) is OfferResult.FAIL_SEGMENT_CLOSED


class _Slow(MemoryBlobs):
    """Uploads that let others run."""

    async def begin(self, name: str, metadata: Mapping[str, str]) -> MemoryUpload:
        await asyncio.sleep(0)
        return _SlowUpload(self, name, dict(metadata))


class _SlowUpload(MemoryUpload):
    async def part(self, number: int, data: bytes) -> None:
        await asyncio.sleep(0)
        self.blobs.check(f"part {number}")
        await super().part(number, data)


async def test_uploads_of_one_segment_take_turns() -> None:
    blobs, rows = _Slow(), _rows(1, 0, [100] * 20)
    segment = StreamingSegment(blobs, _uuid(1), 1, 0, limits=SegmentLimits(1 << 30, 1 << 20, 300))
    for ledger_id, entry in rows:
        assert segment.offer(ledger_id, entry) is OfferResult.SUCCESS
    await asyncio.gather(segment.upload_blocks(), segment.upload_blocks(), segment.finish())
    handle = await Segments(blobs).open(1, [_uuid(1)])
    assert await handle.read(0, 19) == [entry for _, entry in rows]


async def test_a_segment_that_fails_beside_its_end_is_not_finished() -> None:
    blobs = _Slow(fails={"part 2"})
    segment = StreamingSegment(blobs, _uuid(1), 1, 0, limits=SegmentLimits(1 << 30, 1 << 20, 300))
    for ledger_id, entry in _rows(1, 0, [100] * 20):
        segment.offer(ledger_id, entry)
    jobs = [segment.upload_blocks(), segment.finish()]
    failed, refused = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(failed, BlobError)
    assert isinstance(refused, ValueError)
    assert "is abandoned" in str(refused)
    assert not blobs.kept


async def test_the_index_says_what_is_known_of_a_closed_ledger() -> None:
    closed = ledger_values.LedgerInfo(1, 50, 777, 9)
    blobs, known = MemoryBlobs(), {1: closed, 2: ledger_values.LedgerInfo(2)}
    segment = StreamingSegment(blobs, _uuid(1), 1, 48, limits=LIMITS, known=known.get)
    for ledger_id, entry in _rows(1, 48, [3, 3]) + _rows(2, 0, [5, 5, 5]):
        assert segment.offer(ledger_id, entry) is OfferResult.SUCCESS
    await segment.finish()
    index = StreamingIndexBlock.decode(blobs.kept[f"{_uuid(1)}-index"][0])
    assert {number: info for number, (info, _) in index.ledgers.items()} == {
        1: closed,
        2: ledger_values.LedgerInfo(2, 3),
    }


async def test_reads_refuse_what_the_segments_do_not_have() -> None:
    blobs = MemoryBlobs()
    await _streamed(blobs, 1, _rows(1, 5, [3, 3, 3]))
    segments = Segments(blobs)
    with pytest.raises(read_errors.NoSuchLedgerError, match="ledger 2"):
        await segments.open(2, [_uuid(1)])
    with pytest.raises(read_errors.NoSuchLedgerError):
        await segments.open(1, [_uuid(2)])
    handle = await segments.open(1, [_uuid(1)])
    for first, last in ((4, 6), (5, 8), (7, 6)):
        with pytest.raises(read_errors.IncorrectParameterError, match=r"5\.\.7"):
            await handle.read(first, last)
    handle.close()
    with pytest.raises(read_errors.OffloadReadHandleClosedError):
        await handle.read(5, 5)


async def test_damaged_segments_are_refused_and_never_read_as_something_else() -> None:
    blobs = MemoryBlobs()
    await _streamed(blobs, 1, _rows(1, 0, [100] * 5))
    segments, name = Segments(blobs), f"{_uuid(1)}-index"
    index, data = blobs.kept[name], blobs.kept[_uuid(1)]
    for size in range(len(index[0])):
        blobs.kept[name] = (index[0][:size], index[1])
        with pytest.raises(PayloadError):
            await segments.open(1, [_uuid(1)])
    blobs.kept[name] = (index[0], {VERSION_KEY: "2"})
    with pytest.raises(OSError, match="Invalid object version"):
        await segments.open(1, [_uuid(1)])
    blobs.kept[name] = index
    handle = await segments.open(1, [_uuid(1)])
    full = 128 + 3 * 112 + 4
    for at, size, told in (
        (0, 4, "block header"),  # the first block's magic
        (full + 28, 8, "block header"),  # the second block's ledger
        (128, 4, "entry"),  # a length
        (136, 4, "entry"),  # an id
    ):
        blobs.kept[_uuid(1)] = (data[0][:at] + b"\x7f" * size + data[0][at + size :], data[1])
        with pytest.raises(PayloadError, match=told):
            await handle.read(0, 4)
    del blobs.kept[_uuid(1)]
    with pytest.raises(read_errors.NoSuchLedgerError):
        await handle.read(0, 4)


def _context(*numbers: int, end: int | None = None) -> ledger_values.OffloadContext:
    return ledger_values.OffloadContext(
        "",
        complete=True,
        segments=tuple(
            ledger_values.OffloadSegment(_uuid(number), True, 5, 6, end, "aws-s3", {"bucket": "b"})
            for number in numbers
        ),
    )


async def _managed(
    blobs: MemoryBlobs, ledgers: list[ledger_values.LedgerInfo], segments: Segments | None
) -> ManagedLedger:
    store, sources = MemoryListStore(encode_list(ledgers)), Sources({})
    managed = ManagedLedger("m", store, sources, Offloader(blobs), lambda: 0, segments=segments)
    await managed.open()
    return managed


async def test_a_list_with_segments_is_read_and_trimmed() -> None:
    blobs, segments = MemoryBlobs(), None
    await _streamed(blobs, 1, _rows(1, 0, [9] * 5))
    await _streamed(blobs, 2, _rows(1, 5, [8] * 5) + _rows(2, 0, [7] * 3))
    ledgers = [
        ledger_values.LedgerInfo(1, 10, 85, 1, _context(1, 2)),
        ledger_values.LedgerInfo(2, 3, 21, 1, _context(2, end=2)),
        ledger_values.LedgerInfo(3),
    ]
    with pytest.raises(ValueError, match="segments"):
        await _managed(blobs, ledgers, segments)
    segments = Segments(blobs)
    managed = await _managed(blobs, ledgers, segments)
    assert managed.ledgers == ledgers
    with pytest.raises(read_errors.NoSuchLedgerError, match="segments"):
        await LedgerReader(managed, Offloader(blobs)).read(1, 0, 9)
    reader = LedgerReader(managed, Offloader(blobs), segments=segments)
    assert [entry.entry_id for entry in await reader.read(1, 3, 8)] == list(range(3, 9))
    assert [len(entry.data) for entry in await reader.read(2, 0, 2)] == [7, 7, 7]
    assert reader.open_handles == 2
    assert await managed.trim(2) == [1]
    assert set(blobs.kept) == {_uuid(2), f"{_uuid(2)}-index"}  # ledger 2 is in it
    assert await managed.trim(3) == [2]
    assert not blobs.kept
