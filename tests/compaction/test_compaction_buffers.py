"""The blocks that a compaction holds at any moment are within its budget."""

from __future__ import annotations

import mmap
import time
import weakref
from dataclasses import replace

import pytest

from tests.compaction.compaction_lives import EAGER, PART_BYTES, TINY, compacted
from tests.compaction.compaction_reads import ReadCheck
from tests.compaction.compaction_world import World

BUDGET = 12_000
BLOCK = 1_000


class Buffers:
    """Stands in for the memory that blocks are read into, and adds up what is in use.

    A thread lets go of what it has sent a moment after the loop hears of it, so there is a short
    wait for that.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        self.most = 0
        self.made = 0

    def new(self, size: int) -> memoryview:
        if not size:
            return memoryview(b"")
        patience = time.monotonic() + 1.0
        while self.held + size > self._limit and time.monotonic() < patience:
            time.sleep(0.001)
        pages = mmap.mmap(-1, size)
        weakref.finalize(pages, self._freed, size)
        self.made += 1
        self.held += size
        self.most = max(self.most, self.held)
        return memoryview(pages)

    def _freed(self, size: int) -> None:
        self.held -= size


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("force_split", [False, True])
async def test_blocks_in_memory_are_within_the_budget(
    overlap: bool, force_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trailers = 36 * 15 + 48 * 5  # entries and outputs that one iteration can end with
    buffers = Buffers(BUDGET + PART_BYTES + trailers)
    monkeypatch.setattr("streammeta.client.compaction.set_object_run.new_buffer", buffers.new)

    world = World(BLOCK)
    await world.register(1000)
    streams = await world.create(1000, 5)
    for _ in range(8):
        sizes = {each: [(1, BLOCK)] * (1 + each) for each in streams}
        await world.upload(1000, sizes)
    check = ReadCheck(world)
    selection = replace(EAGER, split_size=20 * BLOCK)
    config = replace(TINY, memory_budget=BUDGET, overlap=overlap, selection=selection)
    report = await compacted(world, 1000, config=config, force_split=force_split)
    assert not report.failures
    check.run()
    await world.sweep()
    check.run()
    assert buffers.made >= 10, "there is far more to read than the budget holds"
    assert BUDGET / 2 < buffers.most <= BUDGET + PART_BYTES + trailers
    assert buffers.held == 0, "nothing is kept"
