"""Reads inside of blocks: places of entries, bytes of no entry, and the requests that they cost."""

from __future__ import annotations

import asyncio
import logging
import random
import struct
from dataclasses import dataclass, field

import pytest

from streammeta.brokers.pulsar.blobs.blobs import MemoryBlobs
from streammeta.brokers.pulsar.block_reader import EntryPlaces
from streammeta.brokers.pulsar.formats import ledger_values
from streammeta.brokers.pulsar.formats.blocks import PADDING, BlockHeader, Entry, find_entry
from streammeta.brokers.pulsar.formats.index_block import IndexBlock, IndexEntry, LedgerIndex
from streammeta.brokers.pulsar.formats.object_names import data_name, index_name, object_metadata
from streammeta.brokers.pulsar.ledger_reader import OPEN_HANDLES, LedgerReader
from streammeta.brokers.pulsar.offloader import OffloadedLedger, Offloader
from streammeta.storage.errors import PayloadError
from tests.brokers.pulsar_kit import Ledger, Topic

UUID = "00112233-4455-6677-8899-aabbccddeeff"
LEDGER = 7


@dataclass(slots=True)
class Counted(MemoryBlobs):
    """Counts requests for data, and their bytes."""

    requests: list[tuple[int, int]] = field(default_factory=list)

    async def read(self, name: str, start: int, length: int) -> bytes:
        data = await MemoryBlobs.read(self, name, start, length)
        if not name.endswith("-index"):
            self.requests.append((start, len(data)))
        return data


def _encoded(entry_id: int, data: bytes) -> bytes:
    return struct.pack(">iq", len(data), entry_id) + data


async def _opened(
    pieces: list[bytes], first: int = 0, count: int = 4, buffer_size: int = 1 << 20
) -> tuple[OffloadedLedger, Counted]:
    """Open a ledger of one block with this content, whose entries begin with `first`."""
    blobs = Counted()
    body = b"".join(pieces)
    header = BlockHeader(128 + len(body), first).encode()
    metadata = ledger_values.LedgerMetadata(100, first + count - 1)
    index = LedgerIndex((IndexEntry(first, 1, 0),), first + count - 1)
    block = IndexBlock(metadata, 128 + len(body), 128, index)
    await blobs.put(data_name(UUID, LEDGER), header + body, object_metadata("data", {}))
    await blobs.put(index_name(UUID, LEDGER), block.encode(), object_metadata("index", {}))
    return await Offloader(blobs, buffer_size=buffer_size).open(LEDGER, UUID), blobs


# ---- requests ----


@pytest.mark.parametrize("batch", [1, 10, 100])
async def test_a_block_that_is_read_in_order_is_fetched_once(batch: int) -> None:
    bodies = [bytes(100)] * 3000
    blobs = Counted()
    offloader = Offloader(blobs, buffer_size=10_000)
    await offloader.offload(Bodies(bodies), UUID, {})
    handle = await offloader.open(LEDGER, UUID)
    for first in range(0, 3000, batch):
        await handle.read(first, first + batch - 1)
    size = len(blobs.kept[data_name(UUID, LEDGER)][0])
    # A head that the end of the buffer cuts is fetched again.
    assert sum(length for _, length in blobs.requests) < size * 1.01
    assert len(blobs.requests) <= size // 10_000 + 2


async def test_a_read_in_the_middle_begins_near_it_once_the_block_is_known() -> None:
    rng = random.Random(15)
    blobs = Counted()
    offloader = Offloader(blobs, buffer_size=4096)
    bodies = [rng.randbytes(rng.randrange(1, 900)) for _ in range(4000)]
    await offloader.offload(Bodies(bodies), UUID, {})
    handle = await offloader.open(LEDGER, UUID)
    await handle.read(0, 3999)
    blobs.requests.clear()
    for _ in range(50):
        first = rng.randrange(3990)
        found = await handle.read(first, first + 9)
        assert [entry.data for entry in found] == bodies[first : first + 10]
    # At most 64 KiB before the entry, instead of up to 1.8 MiB from the block's start.
    assert sum(length for _, length in blobs.requests) < 50 * ((64 << 10) + 20_000)


async def test_reads_side_by_side_share_a_handle() -> None:
    rng = random.Random(16)
    bodies = [rng.randbytes(rng.randrange(1, 90)) for _ in range(500)]

    class Yielding(Counted):
        async def read(self, name: str, start: int, length: int) -> bytes:
            await asyncio.sleep(0)
            return await Counted.read(self, name, start, length)

    blobs = Yielding()
    offloader = Offloader(blobs, 3000, 700)
    await offloader.offload(Bodies(bodies), UUID, {})
    handle = await offloader.open(LEDGER, UUID)

    async def read(first: int, last: int) -> None:
        found = await handle.read(first, last)
        assert [entry.data for entry in found] == bodies[first : last + 1]

    for _ in range(20):
        ranges = [sorted(rng.sample(range(500), 2)) for _ in range(5)]
        await asyncio.gather(*(read(first, last) for first, last in ranges))


def test_places_are_bounded_and_the_nearest_one_is_found() -> None:
    places = EntryPlaces(spacing=10, most=8)
    ids = list(range(1000))
    random.Random(1).shuffle(ids)
    for entry_id in ids:
        places.note(entry_id, 128 + entry_id * 5, 9_000)
        assert len(places._kept) <= 8
    assert places.spacing > 10
    found = places.find(999, 0)
    assert found is not None
    assert found.offset == 128 + found.entry_id * 5
    assert places.find(found.entry_id - 1, found.entry_id) is None
    places.note_next(999, 128 + 999 * 5, 9_000)
    following = places.find(999, 0)
    assert following is not None
    assert following.entry_id == 999


# ---- bytes of no entry ----


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize(
    "garbage",
    [
        b"dirty data",
        bytes(10),
        bytes(64),
        b"\x00",
        b"\xff" * 9,
        PADDING * 5,
        bytes(range(200)) * 20,
    ],
)
async def test_bytes_of_no_entry_are_skipped(
    garbage: bytes, at: int, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = [b"Entry %d" % entry_id * 3 for entry_id in range(first, first + 4)]
    pieces = [_encoded(first + number, body) for number, body in enumerate(bodies)]
    handle, _ = await _opened([*pieces[:at], garbage, *pieces[at:]], first)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            if first:
                found = await handle._data.entries(handle._block.index, first, first + 3)
            else:
                found = await handle.read(0, 3)
            assert [entry.data for entry in found] == bodies
    assert bool(caplog.records) == (at < 4)
    if first == 0:
        assert [entry.data for entry in await handle.read(2, 3)] == bodies[2:]


async def test_bytes_between_all_entries_are_skipped() -> None:
    rng = random.Random(4)
    bodies = [rng.randbytes(30) for _ in range(20)]
    pieces = [
        rng.randbytes(rng.randrange(1, 50)) + _encoded(at, it) for at, it in enumerate(bodies)
    ]
    handle, _ = await _opened(pieces, count=20, buffer_size=64)
    assert [entry.data for entry in await handle.read(0, 19)] == bodies
    assert [entry.data for entry in await handle.read(7, 9)] == bodies[7:10]


async def test_an_entry_that_comes_twice_counts_once() -> None:
    pieces = [_encoded(0, b"a" * 9), _encoded(0, b"a" * 9), _encoded(1, b"b"), _encoded(2, b"c")]
    handle, _ = await _opened(pieces, count=3)
    found = await handle.read(0, 2)
    assert [entry.data for entry in found] == [b"a" * 9, b"b", b"c"]


async def test_an_entry_without_data_is_read() -> None:
    pieces = [_encoded(0, b""), _encoded(1, b"a"), _encoded(2, b""), _encoded(3, b"")]
    handle, _ = await _opened(pieces)
    assert await handle.read(0, 3) == [Entry(0, b""), Entry(1, b"a"), Entry(2, b""), Entry(3, b"")]


@pytest.mark.parametrize(
    "body",
    [bytes(100), b"\x01" * 100, bytes([0, 0, 0, 1] * 25), b"x" * 20 + _encoded(1, b"y" * 40)],
)
@pytest.mark.parametrize("damaged", range(12))
async def test_a_damaged_head_is_not_taken_for_bytes_of_no_entry(damaged: int, body: bytes) -> None:
    """What its data look like must not stand for the entry."""
    pieces = [_encoded(at, body) for at in range(4)]
    broken = bytearray(pieces[1])
    broken[damaged] ^= 0x7F
    handle, _ = await _opened([pieces[0], bytes(broken), *pieces[2:]])
    if damaged != 3:  # a shorter length cuts the entry, and no format of a peer has a checksum
        with pytest.raises(PayloadError, match="entry"):
            await handle.read(0, 3)
    assert (await handle.read(0, 0))[0].data == body


def test_a_search_ends_with_its_window() -> None:
    assert find_entry(b"x" * 50, 3, 50) is None
    assert find_entry(b"", 3, 0) is None
    assert find_entry(b"x" * 30 + _encoded(3, b"abc"), 3, 40) is None  # its end lies outside


async def test_an_object_that_ends_early_is_refused() -> None:
    handle, blobs = await _opened([_encoded(at, b"x" * 50) for at in range(4)])
    data, metadata = blobs.kept[data_name(UUID, LEDGER)]
    for size in (0, 100, 128, 150, len(data) - 1):
        blobs.kept[data_name(UUID, LEDGER)] = (data[:size], metadata)
        fresh = await Offloader(blobs).open(LEDGER, UUID)
        with pytest.raises(PayloadError):
            await fresh.read(0, 3)
    assert handle.metadata.last_entry == 3


# ---- handles ----


async def test_a_reader_keeps_few_copies_open() -> None:
    topic = Topic(closed=OPEN_HANDLES + 20)
    offloader = Offloader(MemoryBlobs())
    topic.copies = offloader  # type: ignore[assignment]
    managed = await topic.open()
    await managed.offload(managed.ledgers[:-1])
    reader = LedgerReader(managed, offloader)
    for info in managed.ledgers[:-1]:
        await reader.read(info.ledger_id, 0, 2)
        assert reader.open_handles <= OPEN_HANDLES
    assert len(await reader.read(0, 0, 2)) == 3


async def test_two_first_reads_of_a_ledger_open_one_handle() -> None:
    topic = Topic(closed=1)
    offloader = Offloader(MemoryBlobs())
    opened: list[OffloadedLedger] = []

    class Slow:
        async def open(self, ledger_id: int, uuid: str) -> OffloadedLedger:
            await asyncio.sleep(0)
            opened.append(await offloader.open(ledger_id, uuid))
            return opened[-1]

    topic.copies = offloader  # type: ignore[assignment]
    managed = await topic.open()
    await managed.offload(managed.ledgers[:-1])
    reader = LedgerReader(managed, Slow())
    await asyncio.gather(*(reader.read(0, 0, 2) for _ in range(3)))
    reader.close()
    assert reader.open_handles == 0
    assert all(handle.is_closed for handle in opened)


# ---- bytes of contexts ----


def test_a_copy_that_is_not_whole_has_no_field_for_it() -> None:
    """Bytes of the peer's class, which leaves `complete` out until it is true."""
    half = ledger_values.OffloadContext(UUID, driver="aws-s3")
    head = "08f7ccd5a2b4c6c80810ffddf7e6bcd7eacc88013208"
    assert half.encode().hex() == head + "0a066177732d7333"
    assert ledger_values.OffloadContext.decode(half.encode()) == half
    whole = ledger_values.OffloadContext(UUID, complete=True, driver="aws-s3")
    assert "1801" in whole.encode().hex()
    segment = ledger_values.OffloadSegment(UUID, driver="aws-s3")
    assert segment.encode().hex() == head.removesuffix("3208") + "3a080a066177732d7333"
    assert ledger_values.OffloadSegment.decode(segment.encode()) == segment
    info = ledger_values.LedgerInfo(7, 1, 2, 3, half)
    assert ledger_values.LedgerInfo.decode(info.encode()) == info
    explicit = bytes.fromhex("08011001" + "1800")  # as an earlier version wrote it
    assert not ledger_values.OffloadContext.decode(explicit).complete


class Bodies(Ledger):
    """A ledger of given bodies."""

    def __init__(self, bodies: list[bytes]) -> None:
        super().__init__(ledger_id=LEDGER, entries=len(bodies))
        self.bodies = bodies

    @property
    def metadata(self) -> ledger_values.LedgerMetadata:
        return ledger_values.LedgerMetadata(sum(map(len, self.bodies)), len(self.bodies) - 1)

    async def read(self, first: int, last: int) -> list[Entry]:
        return [Entry(at, self.bodies[at]) for at in range(first, last + 1)]
