"""Offloaded ledgers: what damage, crashes and large entries come to."""

from __future__ import annotations

import random

import pytest

from streammeta.brokers.pulsar.blobs.blobs import BlobError, MemoryBlobs
from streammeta.brokers.pulsar.formats.blocks import (
    Entry,
    EntryTooLargeError,
    decode_block,
    encode_blocks,
)
from streammeta.brokers.pulsar.formats.index_block import IndexBlock
from streammeta.brokers.pulsar.formats.ledger_values import LedgerInfo, OffloadContext
from streammeta.brokers.pulsar.formats.object_names import data_name, index_name
from streammeta.brokers.pulsar.formats.read_errors import NoSuchLedgerError
from streammeta.brokers.pulsar.ledger_list import ManagedLedger
from streammeta.brokers.pulsar.list_store import decode_list, encode_list
from streammeta.brokers.pulsar.offloader import Offloader
from streammeta.storage.errors import PayloadError
from tests.conformance.pulsar_formats import UUID
from tests.conformance.pulsar_ledgers import Sources
from tests.conformance.pulsar_offload import LEDGER, MemoryLedger, presence
from tests.kit.memory_stores import MemoryListStore


@pytest.mark.parametrize("seed", range(20))
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
    assert [one for block in blocks for one in decode_block(block.data)] == entries
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
