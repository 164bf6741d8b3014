"""Three small set objects, compacted in two iterations: which requests that takes.

The example of the documentation (docs/compaction.md), for real: written, compacted and read through
a controller, the requests counted by the store. Beside it stands what AutoMQ asks for with
the same blocks, which is computed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks.committer import LoadError
from scripts.benchmarks.compaction_place import MIB, ColdReads, Place, require_same, running_place
from scripts.benchmarks.compaction_settings import Example
from scripts.benchmarks.compaction_workload import compact_as_automq
from scripts.benchmarks.compaction_world import Costs, World
from scripts.benchmarks.figures import Outcome, Table
from streammeta.client import WriterConfig
from streammeta.client.compaction.config import MEMORY_MIN, CompactionConfig
from streammeta.client.compaction.set_object_compactor import SetObjectCompactor
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_format.record import BLOCK_HEADER_SIZE, RECORD_HEADER_SIZE

OBJECTS = (
    ((0, (20,)), (1, (15, 15)), (3, (20,))),
    ((0, (5,)), (1, (30, 30))),
    ((2, (35, 35, 30)), (3, (5, 35))),
)
"""Of each object the streams, and how many units each of their blocks has."""
STREAMS = 4
BLOCK_UNITS = 35
SPLIT_UNITS = 80
BUDGET_UNITS = 150
MARKER_GETS = 1
"""A compactor reads the bucket's marker once in its life, however much it compacts."""
RESERVED_MIB = 4
"""Of a writer's buffer, beside the records of one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What compacting the example asked of store and controller."""

    index_and_data_gets: int
    puts: int
    multiparts: int
    parts: int
    bytes_read: int
    bytes_written: int
    set_objects: int
    """That are left."""
    stream_objects: int
    """That were made."""


async def measure(root: Path, settings: Example, progress: Callable[[str], None]) -> Outcome:
    """Compact the example."""
    progress("compaction: the example of three objects")
    largest = sum(sum(blocks) for _, blocks in OBJECTS[-1]) * settings.unit_bytes
    config = WriterConfig(
        max_buffer_bytes=2 * largest + RESERVED_MIB * MIB,
        upload_bytes=2 * largest,
        split_bytes=2 * largest,
        block_bytes=BLOCK_UNITS * (settings.unit_bytes - RECORD_HEADER_SIZE),  # of payload
        linger_s=600.0,
    )
    async with running_place(root, STREAMS, config) as place:
        await _write(place, settings)
        before = await place.read(place.stream_ids)
        measured = await _compact(place, settings)
        after = await place.read(place.stream_ids)
    require_same(before, after)
    automq = await asyncio.to_thread(_automq, settings)
    return _outcome(settings, automq, measured, before, after)


async def _write(place: Place, settings: Example) -> None:
    payload = bytes(settings.unit_bytes - RECORD_HEADER_SIZE)
    for streams in OBJECTS:
        acks = [
            await place.writer.append(place.stream_ids[stream], payload)
            for stream, blocks in streams
            for _ in range(sum(blocks))
        ]
        await place.writer.flush()
        await asyncio.gather(*acks)


async def _compact(place: Place, settings: Example) -> Requests:
    config = CompactionConfig(
        memory_budget=_budget(settings),
        selection=SelectionConfig(growth=1, split_size=SPLIT_UNITS * settings.unit_bytes),
    )
    session, before = place.session, place.store.metrics()
    compactor = SetObjectCompactor(
        session.client, session.node, session.namespace, place.store, config
    )
    try:
        report = await compactor.run_once(place.target)
    finally:
        compactor.close()
    if report.failures or report.left_out:
        raise LoadError(f"the example was not compacted: {report.failures or report.left_out}")
    after = place.store.metrics()

    def asked(operation: str) -> int:
        return after.of(operation).requests - before.of(operation).requests

    return Requests(
        index_and_data_gets=asked("get_range") - MARKER_GETS,
        puts=asked("put"),
        multiparts=asked("start_multipart"),
        parts=asked("upload_part"),
        bytes_read=report.figures.bytes_read,
        bytes_written=report.figures.bytes_written,
        set_objects=len(await place.set_object_sizes()),
        stream_objects=sum(len(each.stream_object_ids) for each in report.groups),
    )


def _budget(settings: Example) -> int:
    """Return the least budget, to a unit, with which an iteration has room for `BUDGET_UNITS`."""
    wanted = BUDGET_UNITS * settings.unit_bytes + 1_000
    entries = sum(len(blocks) for streams in OBJECTS for _, blocks in streams)
    budget = MEMORY_MIN
    while CompactionConfig(memory_budget=budget).block_bytes(entries) < wanted:
        budget += settings.unit_bytes
    return budget


def _automq(settings: Example) -> Requests:
    world, ends = World(STREAMS), np.zeros(STREAMS, dtype=np.int64)
    for streams in OBJECTS:
        rows: list[tuple[int, ...]] = []
        for stream, blocks in streams:
            for units in blocks:
                size = units * settings.unit_bytes + BLOCK_HEADER_SIZE
                rows.append((0, stream, ends[stream], ends[stream] + units, units, 0, size))
                ends[stream] += units
        columns = np.array(rows, dtype=np.int64).T
        world.upload(EntryTable(*columns).placed())
    limits = CompactionLimits(
        memory_budget=BUDGET_UNITS * settings.unit_bytes + 1_000,
        split_size=SPLIT_UNITS * settings.unit_bytes,
    )
    compact_as_automq(world, limits)
    return _requests(world.costs, world)


def _requests(costs: Costs, world: World) -> Requests:
    return Requests(
        index_and_data_gets=costs.gets,
        puts=costs.puts,
        multiparts=costs.multiparts,
        parts=costs.parts,
        bytes_read=costs.bytes_read,
        bytes_written=costs.bytes_written,
        set_objects=len(world.set_objects),
        stream_objects=len(world.stream_objects),
    )


def _outcome(
    settings: Example,
    automq: Requests,
    measured: Requests,
    before: ColdReads,
    after: ColdReads,
) -> Outcome:
    figures: dict[str, float] = {f"example_{name}": n for name, n in asdict(measured).items()}
    figures |= {
        "example_cold_gets_per_mib_before": before.gets_per_mib,
        "example_cold_gets_per_mib_after": after.gets_per_mib,
    }
    columns = (
        *("", "GET", "PUT", "uploads in parts", "parts", "MiB read", "MiB written"),
        *("set objects", "stream objects", "cold GETs/MiB"),
    )
    rows = tuple(
        (
            *(name, each.index_and_data_gets, each.puts, each.multiparts, each.parts),
            *(round(each.bytes_read / MIB, 1), round(each.bytes_written / MIB, 1)),
            *(each.set_objects, each.stream_objects, reads),
        )
        for name, each, reads in (
            ("AutoMQ, computed", automq, ""),
            ("streammeta, measured", measured, f"{before.gets_per_mib} -> {after.gets_per_mib}"),
        )
    )
    title = f"Three set objects, 275 units of {settings.unit_bytes} bytes, 150 in memory"
    return Outcome(
        benchmark="compaction-example",
        settings={**asdict(settings), "memory_budget": _budget(settings)},
        figures=figures,
        details={"automq": asdict(automq), "streammeta": asdict(measured)},
        tables=(Table(title=title, columns=columns, rows=rows),),
    )
