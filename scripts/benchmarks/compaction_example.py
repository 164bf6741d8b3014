"""Requests to compact three small SSOs in two iterations.

The example of the documentation (docs/compaction.md), written, compacted and read through a
controller, with the requests counted by the store. AutoMQ's requests for the same blocks are
computed for comparison.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks.client_place import MIB, ColdReads, Place, require_same, running_place
from scripts.benchmarks.committer import LoadError
from scripts.benchmarks.compaction_workload import compact_as_automq
from scripts.benchmarks.compaction_world import World
from scripts.benchmarks.figures import Outcome, Progress, Table
from streammeta.client import WriterConfig
from streammeta.client.compaction.config import MEMORY_MIN, CompactionConfig
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.object_format.record import BLOCK_HEADER_SIZE, RECORD_HEADER_SIZE

OBJECTS = (
    ((0, (20,)), (1, (15, 15)), (3, (20,))),
    ((0, (5,)), (1, (30, 30))),
    ((2, (35, 35, 30)), (3, (5, 35))),
)
"""Streams of each object, with the units of each of their blocks."""
STREAMS = 4
BLOCK_UNITS = 35
SPLIT_UNITS = 80
BUDGET_UNITS = 150
MARKER_GETS = 1
"""A compactor reads the bucket's marker once in its life."""
RESERVED_MIB = 4
"""Part of a writer's buffer that is not for the records of one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Size of the example: bytes of one of its units, at least 64 KiB."""

    unit_bytes: int = MIB // 2


async def measure(root: Path, settings: Example, progress: Progress) -> Outcome:
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
    automq = await asyncio.to_thread(_compute_automq, settings)
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


async def _compact(place: Place, settings: Example) -> dict[str, int]:
    """Return the requests and bytes of compaction, and the objects afterwards."""
    config = CompactionConfig(
        memory_budget=_budget(settings),
        selection=SelectionConfig(growth=1, split_size=SPLIT_UNITS * settings.unit_bytes),
    )
    session, before = place.session, place.requests()
    compactor = SetObjectCompactor(
        session.client, session.node, session.namespace, place.store, config
    )
    try:
        report = await compactor.run_once(place.target)
    finally:
        compactor.close()
    if report.failures or report.left_out:
        raise LoadError(f"the example was not compacted: {report.failures or report.left_out}")

    made = {name: count - before[name] for name, count in place.requests().items()}
    return {
        "index_and_data_gets": made["get_range"] - MARKER_GETS,
        "puts": made["put"],
        "multiparts": made["start_multipart"],
        "parts": made["upload_part"],
        "bytes_read": report.figures.bytes_read,
        "bytes_written": report.figures.bytes_written,
        "set_objects": await place.set_object_count(),
        "stream_objects": sum(len(group.stream_object_ids) for group in report.groups),
    }


def _budget(settings: Example) -> int:
    """Return the least budget, to a unit, with which an iteration has room for `BUDGET_UNITS`."""
    wanted = BUDGET_UNITS * settings.unit_bytes + 1_000
    entries = sum(len(blocks) for streams in OBJECTS for _, blocks in streams)
    budget = MEMORY_MIN
    while CompactionConfig(memory_budget=budget).block_bytes(entries) < wanted:
        budget += settings.unit_bytes
    return budget


def _compute_automq(settings: Example) -> dict[str, int]:
    world, ends = World(STREAMS), np.zeros(STREAMS, dtype=np.int64)
    for streams in OBJECTS:
        rows: list[tuple[int, ...]] = []
        for stream, blocks in streams:
            for units in blocks:
                size = units * settings.unit_bytes + BLOCK_HEADER_SIZE
                rows.append((0, stream, ends[stream], ends[stream] + units, units, 0, size))
                ends[stream] += units
        world.upload(EntryTable(*np.array(rows, dtype=np.int64).T).place())
    limits = CompactionLimits(
        memory_budget=BUDGET_UNITS * settings.unit_bytes + 1_000,
        split_size=SPLIT_UNITS * settings.unit_bytes,
    )
    compact_as_automq(world, limits)
    costs = world.costs

    return {
        "index_and_data_gets": costs.gets,
        "puts": costs.puts,
        "multiparts": costs.multiparts,
        "parts": costs.parts,
        "bytes_read": costs.bytes_read,
        "bytes_written": costs.bytes_written,
        "set_objects": len(world.set_objects),
        "stream_objects": len(world.stream_objects),
    }


def _outcome(
    settings: Example,
    automq: Mapping[str, int],
    measured: Mapping[str, int],
    before: ColdReads,
    after: ColdReads,
) -> Outcome:
    figures: dict[str, float] = {f"example_{name}": count for name, count in measured.items()}
    figures["example_cold_gets_per_mib_before"] = before.gets_per_mib
    figures["example_cold_gets_per_mib_after"] = after.gets_per_mib
    reads = f"{before.gets_per_mib} -> {after.gets_per_mib}"
    mib = [
        {f"{name}_mib": found[f"bytes_{name}"] / MIB for name in ("read", "written")}
        for found in (automq, measured)
    ]
    rows = [
        {"system": "AutoMQ, computed", **automq, **mib[0]},
        {"system": "streammeta, measured", "reads": reads, **measured, **mib[1]},
    ]
    table = Table.of(
        f"Three SSOs, 275 units of {settings.unit_bytes} bytes, 150 in memory",
        rows,
        "system | GET = index_and_data_gets | PUT = puts | uploads in parts = multiparts | parts"
        " | MiB read = read_mib | MiB written = written_mib | SSOs = set_objects"
        " | stream objects = stream_objects | cold GETs/MiB = reads",
    )

    return Outcome(
        benchmark="compaction-example",
        settings={**asdict(settings), "memory_budget": _budget(settings)},
        figures=figures,
        details={"automq": dict(automq), "streammeta": dict(measured)},
        tables=[table],
    )
