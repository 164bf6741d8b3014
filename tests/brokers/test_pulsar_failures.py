"""Offloads and reads that fail: what is left, what counts, and what is never read."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from streammeta.brokers.pulsar.blobs.blobs import BlobError, MemoryBlobs, MemoryUpload
from streammeta.brokers.pulsar.cluster_lists import decode_list, encode_list
from streammeta.brokers.pulsar.formats.blocks import (
    Entry,
    EntryTooLargeError,
    decode_block,
    encode_blocks,
)
from streammeta.brokers.pulsar.formats.index_block import IndexBlock
from streammeta.brokers.pulsar.formats.ledger_values import (
    LedgerInfo,
    OffloadContext,
    OffloadSegment,
)
from streammeta.brokers.pulsar.formats.object_names import data_name, index_name
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.brokers.pulsar.ledger_list import ManagedLedger
from streammeta.brokers.pulsar.ledger_reader import LedgerReader
from streammeta.brokers.pulsar.offloader import NotAppendableError, Offloader
from streammeta.brokers.pulsar.segments import Segments
from streammeta.brokers.pulsar.streaming import OfferResult, SegmentLimits, StreamingSegment
from streammeta.storage.errors import PayloadError
from tests.conformance.pulsar_formats import UUID
from tests.conformance.pulsar_ledgers import Sources
from tests.conformance.pulsar_offload import LEDGER, MemoryLedger, presence
from tests.kit.memory_stores import MemoryListStore
from tests.kit.seeds import seeds

OTHER = UUID[:-1] + "0"
LIMITS = SegmentLimits(segment_bytes=1 << 20, buffer_bytes=900, block_bytes=300)


@dataclass(slots=True)
class Traced(MemoryBlobs):
    """Notes its calls, and the uploads that were neither completed nor aborted."""

    calls: list[str] = field(default_factory=list)
    open_uploads: set[str] = field(default_factory=set)

    def check(self, call: str) -> None:
        self.calls.append(call)
        MemoryBlobs.check(self, call)

    async def begin(self, name: str, metadata: Mapping[str, str]) -> TracedUpload:
        self.check("begin")
        self.open_uploads.add(name)
        return TracedUpload(self, name, dict(metadata))


class TracedUpload(MemoryUpload):
    async def complete(self) -> None:
        await super().complete()
        self.traced.open_uploads.discard(self.name)

    async def abort(self) -> None:
        await super().abort()
        self.traced.open_uploads.discard(self.name)

    @property
    def traced(self) -> Traced:
        assert isinstance(self.blobs, Traced)
        return self.blobs


# ---- offloads ----


@pytest.mark.parametrize("failing", ["begin", "part", "complete", "put"])
async def test_a_failed_offload_leaves_neither_object_nor_parts(failing: str) -> None:
    blobs = Traced(fails={failing})
    with pytest.raises(BlobError, match=f"{failing} failed"):
        await Offloader(blobs, 300).offload(MemoryLedger(LEDGER, [b"a" * 90] * 9), UUID, {})
    assert not blobs.kept
    assert not blobs.open_uploads


async def test_the_index_is_written_when_the_data_are_whole() -> None:
    blobs = Traced()
    await Offloader(blobs, 300).offload(MemoryLedger(LEDGER, [b"a" * 90] * 3), UUID, {})
    assert blobs.calls[0] == "begin"
    assert set(blobs.calls[1:-2]) == {"part"}
    assert blobs.calls[-2:] == ["complete", "put"]
    assert set(blobs.kept) == {data_name(UUID, LEDGER), index_name(UUID, LEDGER)}


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([], "returned 0 entries, none, for 0..4"),
        ([0, 2, 3, 4], "returned 4 entries, 0..4"),
        ([1, 2, 3, 4], "returned 4 entries, 1..4"),
        ([0, 0, 1, 2], "returned 4 entries, 0..2"),
        ([0, 1, 2, 3, 4, 5], "returned 6 entries, 0..5"),
    ],
)
async def test_a_source_that_gives_other_entries_than_it_has_is_not_copied(
    answer: list[int], complaint: str
) -> None:
    """The copy would stand for the ledger when its source is deleted."""

    class Wrong(MemoryLedger):
        async def read(self, first: int, last: int) -> list[Entry]:
            return [Entry(at, b"x" * 20) for at in answer]

    blobs = Traced()
    with pytest.raises(ValueError, match=complaint):
        await Offloader(blobs, 300).offload(Wrong(LEDGER, [b"x" * 20] * 5), UUID, {})
    assert not blobs.kept
    assert not blobs.open_uploads


async def test_what_is_open_or_empty_is_not_copied_and_a_reader_copies_nothing() -> None:
    blobs = Traced()
    open_ledger = MemoryLedger(LEDGER, [b"a"], is_closed=False)
    for ledger in (open_ledger, MemoryLedger(LEDGER, [])):
        with pytest.raises(ValueError, match="empty"):
            await Offloader(blobs).offload(ledger, UUID, {})
    with pytest.raises(NotAppendableError):
        await Offloader(blobs, is_appendable=False).offload(MemoryLedger(1, [b"a"]), UUID, {})
    assert blobs.calls == []


# ---- streaming ----


def offered(blobs: MemoryBlobs, uuid: str, first: int, bodies: Sequence[bytes]) -> StreamingSegment:
    segment = StreamingSegment(blobs, uuid, LEDGER, first, limits=LIMITS)
    for at, body in enumerate(bodies, start=first):
        assert segment.offer(LEDGER, Entry(at, body)) is OfferResult.SUCCESS
    return segment


@pytest.mark.parametrize("failing", ["begin", "part"])
async def test_a_segment_whose_upload_fails_leaves_nothing_and_takes_nothing(failing: str) -> None:
    blobs = Traced()
    segment = offered(blobs, UUID, 0, [b"a" * 100] * 3)
    if failing == "part":
        await segment.upload_blocks()
        for at in range(3, 6):
            assert segment.offer(LEDGER, Entry(at, b"b" * 100)) is OfferResult.SUCCESS
    blobs.fails = {failing}
    with pytest.raises(BlobError):
        await segment.upload_blocks()
    assert segment.offer(LEDGER, Entry(6, b"c")) is OfferResult.FAIL_SEGMENT_CLOSED
    with pytest.raises(ValueError, match="finished"):
        await segment.finish()
    assert not blobs.kept
    assert not blobs.open_uploads


async def test_a_segment_that_is_abandoned_leaves_nothing() -> None:
    blobs = Traced()
    segment = offered(blobs, UUID, 0, [b"a" * 100] * 3)
    await segment.upload_blocks()
    await segment.abandon()
    assert segment.is_closed
    assert not blobs.open_uploads
    assert not blobs.kept


@pytest.mark.parametrize(("segment_bytes", "accepted"), [(250, 3), (200, 2)])
async def test_a_segment_is_full_as_soon_as_it_has_its_bytes_and_not_before(
    segment_bytes: int, accepted: int
) -> None:
    limits = SegmentLimits(segment_bytes=segment_bytes, buffer_bytes=900, block_bytes=300)
    segment = StreamingSegment(MemoryBlobs(), UUID, LEDGER, 0, limits=limits)
    results = [segment.offer(LEDGER, Entry(at, b"a" * 100)) for at in range(accepted + 1)]
    assert results == [OfferResult.SUCCESS] * accepted + [OfferResult.FAIL_SEGMENT_CLOSED]
    end = await segment.finish()
    assert (end.ledger_id, end.entry_id) == (LEDGER, accepted - 1)


async def test_an_earlier_ledger_does_not_follow() -> None:
    segment = offered(MemoryBlobs(), UUID, 0, [b"a"])
    assert segment.offer(LEDGER - 1, Entry(0, b"b")) is OfferResult.FAIL_NOT_CONSECUTIVE
    assert segment.offer(LEDGER, Entry(0, b"b")) is OfferResult.FAIL_NOT_CONSECUTIVE
    assert segment.offer(LEDGER + 1, Entry(1, b"b")) is OfferResult.FAIL_NOT_CONSECUTIVE
    assert segment.offer(LEDGER + 1, Entry(0, b"b")) is OfferResult.SUCCESS


async def test_of_two_segments_with_an_entry_the_later_one_counts() -> None:
    blobs = MemoryBlobs()
    for uuid, first, body in ((UUID, 0, b"early"), (OTHER, 3, b"late")):
        await offered(blobs, uuid, first, [body] * 6).finish()
    handle = await Segments(blobs).open(LEDGER, [UUID, OTHER])
    read = await handle.read(0, 8)
    assert read == [Entry(at, b"early" if at < 3 else b"late") for at in range(9)]
    assert await handle.read(2, 3) == [Entry(2, b"early"), Entry(3, b"late")]


async def test_a_segment_that_can_not_be_deleted_raises_and_both_objects_go_in_the_end() -> None:
    blobs = MemoryBlobs()
    await offered(blobs, UUID, 0, [b"a"]).finish()
    blobs.fails = {"delete"}
    with pytest.raises(BlobError):
        await Segments(blobs).delete(UUID)
    blobs.fails = set()
    for _ in range(2):
        await Segments(blobs).delete(UUID)
    assert not blobs.kept


# ---- reads ----


class Opener:
    """Opens copies whose only entry names their place and uuid."""

    def __init__(self, place: bytes) -> None:
        self.place = place
        self.opened: list[Any] = []

    async def open(self, ledger_id: int, uuid: Any) -> Opened:
        self.opened.append(uuid)
        return Opened(b"%s %s" % (self.place, str(uuid).encode()))


@dataclass
class Opened:
    body: bytes
    is_closed: bool = False

    async def read(self, first: int, last: int) -> list[Entry]:
        return [Entry(first, self.body)]

    def close(self) -> None:
        self.is_closed = True


async def managed_with(context: OffloadContext | None) -> ManagedLedger:
    ledgers = [LedgerInfo(1, 1, 1, 1, context), LedgerInfo(2)]
    sources = Sources({1: MemoryLedger(1, [b"source"])})
    managed = ManagedLedger(
        "m",
        MemoryListStore(encode_list(ledgers)),
        sources,
        Offloader(MemoryBlobs()),
        lambda: 0,
        segments=Segments(MemoryBlobs()),
    )
    await managed.open()
    return managed


async def test_a_copy_that_is_not_whole_is_not_read() -> None:
    for context in (None, OffloadContext(UUID, False, None, 1)):
        copies = Opener(b"copy")
        reader = LedgerReader(await managed_with(context), copies)
        assert [entry.data for entry in await reader.read(1, 0, 0)] == [b"source"]
        assert copies.opened == []


async def test_a_ledger_that_was_offloaded_again_is_read_from_its_new_copy() -> None:
    managed = await managed_with(OffloadContext(UUID, True, None, 1))
    copies = Opener(b"copy")
    reader = LedgerReader(managed, copies)
    for uuid in (UUID, UUID, OTHER):
        managed.ledgers[0] = LedgerInfo(1, 1, 1, 1, OffloadContext(uuid, True, None, 1))
        assert [entry.data for entry in await reader.read(1, 0, 0)] == [b"copy " + uuid.encode()]
    assert copies.opened == [UUID, OTHER]
    reader.close()
    assert reader.open_handles == 0


async def test_a_copy_in_a_former_place_is_read_there() -> None:
    context = OffloadContext(UUID, True, None, 1, "old")
    copies, former = Opener(b"new"), Opener(b"old")
    reader = LedgerReader(await managed_with(context), copies, former={"old": former})
    assert [entry.data for entry in await reader.read(1, 0, 0)] == [b"old " + UUID.encode()]
    assert copies.opened == []


async def test_a_segment_that_is_not_whole_is_not_read() -> None:
    whole, half = (
        OffloadSegment(uuid, complete, 5, 6, None, "aws-s3", {"bucket": "b"})
        for uuid, complete in ((UUID, True), (OTHER, False))
    )
    context = OffloadContext("", complete=True, segments=(whole, half))
    segments = Opener(b"segments")
    reader = LedgerReader(await managed_with(context), Opener(b"copy"), segments=segments)
    await reader.read(1, 0, 0)
    assert segments.opened == [[UUID]]


async def test_a_ledger_that_the_list_does_not_name_is_not_read_though_a_copy_is_there() -> None:
    copies = Opener(b"copy")
    with pytest.raises(NoSuchLedgerError):
        await LedgerReader(await managed_with(None), copies).read(9, 0, 0)
    assert copies.opened == []


# ---- whole ledgers, damage and sweeps ----


@pytest.mark.parametrize("seed", seeds(6, slow=14))
async def test_any_ledger_is_read_back_in_any_range(seed: int) -> None:
    chosen = random.Random(seed)
    bodies = [chosen.randbytes(chosen.randrange(1, 90)) for _ in range(chosen.randrange(1, 300))]
    ledger, blobs = MemoryLedger(LEDGER, bodies), MemoryBlobs()
    offloader = Offloader(blobs, chosen.randrange(230, 2000), chosen.randrange(1, 700))
    await offloader.offload(ledger, UUID, {})
    handle = await offloader.open(LEDGER, UUID)
    for _ in range(20):
        first = chosen.randrange(len(bodies))
        last = chosen.randrange(first, len(bodies))
        assert await handle.read(first, last) == ledger.entries[first : last + 1], seed
    data, _ = blobs.kept[data_name(UUID, LEDGER)]
    assert (
        len(data) == IndexBlock.decode(blobs.kept[index_name(UUID, LEDGER)][0]).data_object_length
    )


async def test_an_entry_larger_than_a_block_is_refused_and_leaves_nothing() -> None:
    blobs = MemoryBlobs()
    ledger = MemoryLedger(LEDGER, [b"a", b"b" * 1000])
    with pytest.raises(EntryTooLargeError, match="1000"):
        await Offloader(blobs, 500).offload(ledger, UUID, {})
    assert presence(blobs) == {"data": False, "index": False}
    with pytest.raises(EntryTooLargeError):
        list(encode_blocks(ledger.entries, 500))


def test_blocks_of_entries_hold_all_of_them_in_order() -> None:
    entries = [Entry(at, bytes(at)) for at in range(50)]
    blocks = list(encode_blocks(entries, 300))
    assert [entry for block in blocks for entry in decode_block(block.data)] == entries
    assert all(len(block.data) == 300 for block in blocks[:-1])


async def test_damaged_objects_are_refused_and_never_read_as_something_else() -> None:
    ledger, blobs = MemoryLedger(LEDGER, [b"abc", b"defg"]), MemoryBlobs()
    offloader = Offloader(blobs)
    await offloader.offload(ledger, UUID, {})
    name = index_name(UUID, LEDGER)
    whole = blobs.kept[name]
    for size in range(len(whole[0])):
        blobs.kept[name] = (whole[0][:size], whole[1])
        with pytest.raises(PayloadError):
            await offloader.open(LEDGER, UUID)
    blobs.kept[name] = whole
    data, metadata = blobs.kept[data_name(UUID, LEDGER)]
    blobs.kept[data_name(UUID, LEDGER)] = (data[:132] + b"\xff" * 8 + data[140:], metadata)
    with pytest.raises(PayloadError, match="entry"):
        await (await offloader.open(LEDGER, UUID)).read(0, 1)
    await offloader.delete(LEDGER, UUID)
    with pytest.raises(NoSuchLedgerError):
        await offloader.open(LEDGER, UUID)


async def test_a_deletion_that_fails_is_raised_and_may_be_repeated() -> None:
    blobs = MemoryBlobs()
    offloader = Offloader(blobs)
    await offloader.offload(MemoryLedger(LEDGER, [b"abc"]), UUID, {})
    blobs.fails = {"delete"}
    with pytest.raises(BlobError):
        await offloader.delete(LEDGER, UUID)
    blobs.fails = set()
    for _ in range(2):
        await offloader.delete(LEDGER, UUID)
    assert not blobs.kept


@pytest.mark.parametrize("deleted", [None, False, True])
def test_lists_are_read_back_as_they_were(deleted: bool | None) -> None:
    context = OffloadContext(UUID, True, deleted, 9, "streammeta", {"bucket": "b"})
    ledgers = [LedgerInfo(1, 5, 50, 7, context), LedgerInfo(2, 1, 9)]
    data = encode_list(ledgers)
    assert decode_list(data) == ledgers
    with pytest.raises(PayloadError):
        decode_list(data[:-1])


async def test_a_sweep_leaves_what_others_keep_in_the_same_place() -> None:
    blobs, uuids = MemoryBlobs(), [f"{UUID[:-1]}{at}" for at in range(5)]
    offloader = Offloader(blobs)
    mine, other = ({"ManagedLedgerName": name} for name in ("ml", "another"))
    for uuid, extra in zip(uuids, (mine, other, {}, mine, mine), strict=True):
        await offloader.offload(MemoryLedger(LEDGER, [b"abc"]), uuid, extra)
    await blobs.delete([data_name(uuids[3], LEDGER)])  # half of a copy
    await blobs.put("backups/not-ours.txt", b"x", {})
    listed = LedgerInfo(LEDGER, 1, 3, 1, OffloadContext(uuids[4], True))
    store = MemoryListStore(encode_list([listed]))
    managed = ManagedLedger("ml", store, Sources({}), offloader, lambda: 0)
    await managed.open()
    kept = set(blobs.kept)
    assert set(await managed.sweep()) == {(LEDGER, uuids[0]), (LEDGER, uuids[3])}
    gone = {data_name(uuids[0], LEDGER), *(index_name(uuids[at], LEDGER) for at in (0, 3))}
    assert set(blobs.kept) == kept - gone
