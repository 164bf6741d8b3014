"""What is known of sources: their indexes, what the map has of them, and whether they are whole."""

from __future__ import annotations

import random
from dataclasses import dataclass

import google_crc32c
import numpy as np
import pytest

from streammeta.client.compaction.commit import WrittenObject
from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.output_writer import OutputJournal
from streammeta.client.compaction.report import SourceError
from streammeta.client.compaction.set_object_sources import (
    Source,
    SourceIndex,
    SourceIndexes,
    is_whole,
)
from streammeta.client.compaction.store_calls import StoreCalls
from streammeta.storage.compaction.entries import Column, Entry, EntryTable
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.compaction.verification import RecordedChecksum, SourceChecks
from streammeta.storage.errors import StoreUnavailableError
from streammeta.storage.object_format.record import RecordBatch
from tests.kit.built_objects import ObjectBuilder
from tests.kit.memory_store import MemoryObjectStore


class FakeMap:
    """Knows ranges of objects, and counts questions."""

    def __init__(self, known: dict[int, list[tuple[int, int, int]]] | None = None) -> None:
        self.known = known or {}
        self.asked: list[list[int]] = []

    async def ranges(self, object_ids: list[int]) -> dict[int, Column]:
        self.asked.append(object_ids)
        return {one: np.array(self.known[one]) for one in object_ids if one in self.known}


@dataclass
class Bench:
    store: MemoryObjectStore
    map: FakeMap
    cache_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        self.calls = StoreCalls(self.store, CompactionConfig(store_patience_s=0.0))
        self.indexes = SourceIndexes(
            self.calls,
            self.map,  # type: ignore[arg-type]
            lambda object_id: f"key-{object_id}",
            self.cache_bytes,
        )

    def put(self, object_id: int, streams: int, blocks: int = 1) -> Source:
        """Store an object of streams with some blocks each, of one record of offset span 1."""
        builder = ObjectBuilder(1)
        for stream_id in range(streams):
            records = [RecordBatch(stream_id, 0, at, 1, b"x") for at in range(blocks)]
            builder.write(records)
        data = builder.finish().data
        self.store.put(f"key-{object_id}", data)
        return Source(object_id, len(data), streams)

    @property
    def gets(self) -> int:
        return self.store.metrics().of("get_range").calls


def index_of(loaded: SourceIndex | SourceError) -> SourceIndex:
    assert isinstance(loaded, SourceIndex), loaded
    return loaded


@pytest.mark.parametrize(("streams", "blocks", "gets"), [(2, 3, 1), (900, 2, 1), (3, 900, 2)])
async def test_an_index_takes_one_request_unless_its_streams_have_many_blocks(
    streams: int, blocks: int, gets: int
) -> None:
    bench = Bench(MemoryObjectStore(), FakeMap())
    source = bench.put(7, streams, blocks)
    for _ in range(2):
        index = index_of((await bench.indexes.load([source]))[7])
        assert len(index.entries) == streams * blocks
        assert bench.gets == bench.indexes.reads == gets, "the second time it is cached"
    data = bench.store.objects()["key-7"]
    assert index.tail_crc32c == google_crc32c.value(data[index.data_size :])
    assert index.data_size + index.tail_size == len(data)
    assert bench.map.asked == [], "as many ranges as the map says"
    bench.indexes.cache.forget(7)
    await bench.indexes.load([source])
    assert bench.gets == 2 * gets


async def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap(), cache_bytes=5_000)
    sources = [bench.put(one, 20) for one in range(3)]
    for source in sources:
        await bench.indexes.load([source])
    await bench.indexes.load(sources[1:])
    assert bench.gets == 3
    await bench.indexes.load(sources[:1])
    assert bench.gets == 4


async def test_each_fault_is_that_of_one_object() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap())
    good, corrupt = bench.put(1, 2), bench.put(2, 2)
    bench.store.put("key-2", bytes(corrupt.size))
    small = Source(4, 20, 1)
    loaded = await bench.indexes.load([good, corrupt, Source(3, 500, 1), small])
    assert isinstance(loaded[1], SourceIndex)
    reasons = [loaded[one] for one in (2, 3, 4)]
    assert all(isinstance(one, SourceError) and not one.passing for one in reasons), reasons
    bench.store.fail_next("get_range", StoreUnavailableError("down"))
    other = bench.put(5, 2)
    loaded = await bench.indexes.load([other])
    failed = loaded[5]
    assert isinstance(failed, SourceError)
    assert (failed.reason, failed.passing) == ("its index could not be read: down", True)
    assert isinstance((await bench.indexes.load([other]))[5], SourceIndex)


async def test_entries_that_the_map_does_not_know_are_not_the_objects() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap({7: [(2, 0, 3), (0, 1, 2)]}))
    source = bench.put(7, 3, blocks=3)
    listed = Source(7, source.size, range_count=2)
    index = index_of((await bench.indexes.load([listed]))[7])
    rows = [(row.stream_id, row.start_offset) for row in index.entries.rows()]
    assert rows == [(0, 1), (2, 0), (2, 1), (2, 2)]
    assert bench.map.asked == [[7]]
    assert is_whole(index, {0: 0, 1: 0, 2: 0})
    bench.map.known[7].append((0, 3, 9))
    bench.indexes.cache.forget(7)
    index = index_of((await bench.indexes.load([listed]))[7])
    assert not is_whole(index, {0: 0, 2: 0}), "offsets 3 to 9 are not in the index"
    assert is_whole(index, {0: 9, 2: 0}), "unless nobody can read them"
    assert is_whole(index, {2: 0})
    bench.map.known.clear()
    bench.indexes.cache.forget(7)
    assert isinstance((await bench.indexes.load([listed]))[7], SourceError)


async def test_a_suspect_is_held_against_the_map_whatever_it_looks_like() -> None:
    bench = Bench(MemoryObjectStore(), FakeMap({7: [(0, 0, 1), (1, 5, 6)]}))
    source = bench.put(7, 2)
    await bench.indexes.load([source])
    assert bench.indexes.suspect([7])
    assert not bench.indexes.suspect([7]), "once is enough"
    index = index_of((await bench.indexes.load([source]))[7])
    assert bench.map.asked == [[7]]
    assert not is_whole(index, {0: 0, 1: 0})


@pytest.mark.parametrize("seed", range(20))
def test_pieces_in_any_order_tell_whether_a_source_is_what_was_uploaded(seed: int) -> None:
    rng = random.Random(seed)
    data, tail = rng.randbytes(rng.randint(1, 5_000)), rng.randbytes(rng.randint(84, 500))
    cuts = sorted({0, *(rng.randrange(len(data)) for _ in range(rng.randint(0, 5)))})
    pieces = list(zip(cuts, [*cuts[1:], len(data)], strict=True))
    rng.shuffle(pieces)

    def checks_of(seen: bytes, given: list[tuple[int, int]]) -> SourceChecks:
        crc32c = google_crc32c.value(data + tail)
        recorded = RecordedChecksum(crc32c, len(data), len(tail), google_crc32c.value(tail))
        checks = SourceChecks({3: recorded})
        for start, end in given:
            checks.add(3, start, end - start, google_crc32c.value(seen[start:end]))
        return checks

    whole = checks_of(data, pieces)
    assert (whole.damaged(), whole.checked) == ({}, 1), f"seed {seed}"
    at = rng.randrange(len(data))
    damaged = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    assert set(checks_of(damaged, pieces).damaged()) == {3}, f"seed {seed}"
    partly = checks_of(damaged, pieces[1:])
    assert (partly.damaged(), partly.checked) == ({}, 0), f"seed {seed}"


def test_an_output_is_used_again_for_the_same_blocks_while_its_id_is_valid() -> None:
    now = [0.0]
    journal = OutputJournal(lambda: now[0])
    blocks = EntryTable.of_rows([Entry(1, 5, 0, 10, 1, 0, 60), Entry(2, 5, 10, 20, 1, 40, 60)])
    written = WrittenObject(9, 200, 1)
    journal.keep(blocks, written, 100.0)
    assert journal.find(blocks) == written
    assert journal.find(blocks.span(0, 1)) is None
    assert journal.find(blocks.take(np.array([1, 0]))) is None, "another order"
    now[0] = 100.0
    assert journal.find(blocks) is None
    now[0] = 0.0
    journal.drop([8])
    assert journal.find(blocks) == written
    journal.drop([9])
    assert not len(journal)


def test_bounds_that_could_never_be_met_are_refused_and_budgets_are_kept() -> None:
    for bounds in (
        {"memory_budget": 1 << 20},
        {"part_bytes": 1 << 20},
        {"read_threads": 0},
        {"write_rate": -1.0},
        {"id_ttl_s": 0.005},
    ):
        with pytest.raises(ValueError, match=next(iter(bounds))):
            CompactionConfig(**bounds)
    for budget in (16 << 20, 64 << 20, 200 << 20):
        config = CompactionConfig(memory_budget=budget)
        taken = config.block_bytes(0) + config.part_size + config.index_cache_bytes
        # The allocator keeps a tenth: with less left, 10 GiB outgrew the bound on a process.
        assert taken < budget * 0.9
        assert config.block_bytes(config.max_entries) >= budget // 4
        both = CompactionConfig(memory_budget=budget, overlap=True)
        assert both.block_bytes(0) == config.block_bytes(0) // 2
    slow = CompactionConfig(write_rate=1_000_000.0, id_ttl_s=400.0)
    assert slow.group_limits.max_group_bytes == 100_000_000, "done long before ids expire"
    few = CompactionConfig(selection=SelectionConfig(max_group_ranges=7))
    assert few.group_limits.max_group_ranges == 7
