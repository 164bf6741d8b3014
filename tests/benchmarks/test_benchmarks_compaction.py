"""The benchmarks of compaction count what was really done, and models keep every byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks import (
    compaction_example,
    compaction_stream_objects,
    compaction_throughput,
    compaction_workload,
)
from scripts.benchmarks.compaction_example import Example
from scripts.benchmarks.compaction_stream_objects import StreamObjects
from scripts.benchmarks.compaction_throughput import Throughput
from scripts.benchmarks.compaction_workload import Workload
from scripts.benchmarks.compaction_world import Costs as Counted
from scripts.benchmarks.compaction_world import World, WriteRules
from streammeta.storage.compaction.entries import Entry, EntryTable
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.compaction.planner import plan_compaction

MIB = 1 << 20


def silent(_text: str) -> None:
    pass


def test_a_day_keeps_every_byte_and_is_cheaper_than_with_automq() -> None:
    settings = Workload(streams=60, bytes_per_s=100_000, hours=3, upload_bytes=4 * MIB)
    outcome = compaction_workload.measure(settings, silent)
    days = {day["policy"]: day for day in outcome.details["days"]}
    assert list(days) == ["none", "automq", "streammeta"]
    assert days["none"]["costs"]["gets"] == 0
    assert days["none"]["amplification"] == 0
    for day in (days["automq"], days["streammeta"]):
        assert day["amplification"] > 0
        assert day["set_objects"] < days["none"]["set_objects"]
        assert day["checkpoint_bytes"] < days["none"]["checkpoint_bytes"]
        assert day["gets_per_mib"] < days["none"]["gets_per_mib"]
    slow = "slow_amplification"
    assert 0 < days["streammeta"][slow] <= days["automq"][slow] / 2
    assert outcome.figures["streammeta_slow_write_amplification"] == days["streammeta"][slow]
    assert [len(table.rows) for table in outcome.tables] == [3, 3]


def test_uploads_of_a_day_have_every_record_once() -> None:
    settings = Workload(streams=7, bytes_per_s=50_000, hours=1, upload_bytes=MIB)
    ends = np.zeros(7, dtype=np.int64)
    for _, entries in compaction_workload.uploads(settings):
        for entry in entries.rows():
            assert entry.start_offset == ends[entry.stream_id]
            ends[entry.stream_id] = entry.end_offset
    expected = compaction_workload.rates(settings) * 3600 / settings.record_bytes
    assert (np.abs(ends - expected) <= np.maximum(3, expected / 100)).all()


def test_a_world_counts_what_a_plan_asks_for() -> None:
    world = World(2)
    for number in range(3):
        entries = [
            Entry(0, stream, number, number + 1, 1, 0, size)
            for stream, size in ((0, 100), (1, 5 * MIB))
        ]
        world.upload(EntryTable.of_rows(entries).place())
    live = EntryTable.concatenate([stored.entries for stored in world.set_objects.values()])
    limits = CompactionLimits(memory_budget=100 * MIB, split_size=MIB)
    (commit,) = plan_compaction(live, limits).commits
    world.replace(commit, WriteRules(put_bytes=10 * MIB, part_bytes=6 * MIB))
    data = 3 * (5 * MIB + 100)
    # An index entry of 36 bytes for the small stream, three for the large one, and two footers.
    written = data + 4 * 36 + 2 * 48
    assert world.costs == Counted(
        gets=3,
        puts=1,
        parts=3,
        multiparts=1,
        deleted=3,
        bytes_read=data,
        bytes_written=written,
        compactions=1,
    )
    assert world.stream_objects == [(1, 15 * MIB)]
    assert [stored.entries.data_size for stored in world.set_objects.values()] == [300]
    assert world.cold_reads().tolist() == [2, 1 + 4]


@pytest.mark.process
def test_the_example_is_compacted_as_documented(tmp_path: Path) -> None:
    settings = Example(unit_bytes=64 * 1024)
    outcome = asyncio.run(compaction_example.measure(tmp_path / "place", settings, silent))
    measured, automq = outcome.details["streammeta"], outcome.details["automq"]
    for costs in (measured, automq):
        assert (costs["set_objects"], costs["stream_objects"]) == (1, 3)
        assert (costs["puts"], costs["multiparts"]) == (4, 0)
    assert measured["index_and_data_gets"] == 3 + 5
    assert measured["bytes_written"] == pytest.approx(275 * settings.unit_bytes, rel=0.01)
    after = outcome.figures["example_cold_gets_per_mib_after"]
    assert 0 < after < outcome.figures["example_cold_gets_per_mib_before"]


@pytest.mark.process
def test_stream_objects_are_copied_fetched_or_linked(tmp_path: Path) -> None:
    settings = StreamObjects(objects=3, object_mib=12)
    place = tmp_path / "place"
    outcome = asyncio.run(compaction_stream_objects.measure(place, settings, silent))
    copied, fetched, linked = outcome.details["ways"]
    assert (copied["copies"], fetched["copies"], linked["copies"]) == (3, 0, 0)
    assert fetched["bytes_read"] >= 3 * 12 * MIB > linked["bytes_read"]
    assert copied["bytes_read"] >= 3 * 12 * MIB > copied["bytes_written"]  # read to be compared
    assert (linked["puts"], linked["parts"]) == (1, 0)
    assert all(way["objects_after"] == 1 for way in outcome.details["ways"])


@pytest.mark.process
def test_a_run_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    settings = Throughput(streams=5, total_mib=48, budgets_mib=(16,), profile=True)
    outcome = asyncio.run(compaction_throughput.measure(tmp_path / "place", settings, silent))
    (run,) = outcome.details["runs"]
    assert run["set_objects_before"] == 3
    assert run["figures"]["sources"] == 3
    assert run["figures"]["bytes_written"] >= 47 * MIB
    assert run["figures"]["peak_resident_mib"] > run["figures"]["resident_before_mib"] > 10
    assert run["gets_per_mib_after"] < run["gets_per_mib_before"]
    titles = [table.title for table in outcome.tables]
    assert any("by function" in title for title in titles)
    assert outcome.figures["compaction_48_mib_16_budget_mib_per_s"] > 0
