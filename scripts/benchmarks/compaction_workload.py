"""What compaction costs a busy node in a day, and what it is good for, on a virtual clock.

A thousand streams of very different rates share a node that uploads as brokers do. The same day is
lived three times: without compaction, with the product's policy, planner and limits, and as AutoMQ
does by default: every five minutes everything younger than two hours is merged once more, and what
is older is split, object by object. Only bytes are left out; every plan is made, every commit is
decided by a map.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scripts.benchmarks.compaction_settings import Workload
from scripts.benchmarks.compaction_world import MIB, START_MS, Costs, World, WriteRules
from scripts.benchmarks.figures import Outcome, Table
from streammeta.client.compaction.config import CompactionConfig
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.compaction.planner import plan_compaction, plan_force_split
from streammeta.storage.compaction.selection import GroupKind, select_set_objects
from streammeta.storage.object_format.object_reader import tail_guess
from streammeta.storage.object_format.record import BLOCK_HEADER_SIZE, RECORD_HEADER_SIZE

AUTOMQ_RULES = WriteRules(part_bytes=48 * MIB, index_part=True)
"""Pieces of 16 MiB are gathered until a part has more than 32 MiB: it is taken as if every part had
the most that gives."""
AUTOMQ_OBJECTS = 500
AUTOMQ_SPLIT_AFTER_MS = 120 * 60_000
SLOW_SHARE = 0.5
"""Which part of the streams, by rate, is called slow."""
SETTLED_HOURS = 6
"""After which there is enough of every stream to speak of requests for a MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """How a day ended."""

    policy: str
    costs: Costs
    set_objects: int
    most_set_objects: int
    """That a compaction left."""
    stream_objects: int
    checkpoint_bytes: int
    gets_per_mib: float
    """Of a reader of every whole stream, each of them cold, when the day is over."""
    slow_gets_per_mib: float
    """The same of the slow half of the streams, the mean of every hour from `SETTLED_HOURS` on."""
    worst_slow_gets_per_mib: float
    """The same at the worst hour."""
    amplification: float
    """Bytes that compaction wrote for each byte uploaded."""
    slow_amplification: float
    """The same of the slow half of the streams."""


Compact = Callable[[World], None]


def measure(settings: Workload, progress: Callable[[str], None]) -> Outcome:
    """Live the day with every policy."""
    config = CompactionConfig(memory_budget=settings.memory_mib * MIB)
    policies: dict[str, Compact] = {
        "none": lambda _world: None,
        "automq": lambda world: compact_as_automq(
            world, CompactionLimits(memory_budget=settings.memory_mib * MIB)
        ),
        "streammeta": lambda world: compact(world, config),
    }
    days: list[Day] = []
    for name, policy in policies.items():
        days.append(live(settings, name, policy, progress))
    return _outcome(settings, days)


def live(settings: Workload, name: str, policy: Compact, progress: Callable[[str], None]) -> Day:
    """Let the hours pass: uploads come, and every so often the policy is asked."""
    world = World(settings.streams)
    next_compaction_s, hour, most = settings.compact_every_s, 0, 0
    slow_reads: list[float] = []
    for at_s, entries in uploads(settings):
        while next_compaction_s <= at_s:
            world.now_ms = START_MS + next_compaction_s * 1000
            policy(world)
            most = max(most, len(world.set_objects))
            next_compaction_s += settings.compact_every_s
        if at_s >= hour * 3600:
            progress(f"compaction: hour {hour} of {settings.hours}, {name}")
            if hour >= SETTLED_HOURS:
                slow_reads.append(_gets_per_mib(world, _slow(world)))
            hour += 1
        world.now_ms = START_MS + at_s * 1000
        world.upload(entries)
    return _day(name, world, most, slow_reads or [_gets_per_mib(world, _slow(world))])


def rates(settings: Workload) -> NDArray[np.float64]:
    """Return the bytes a second of each stream, the fastest first."""
    shares = np.arange(1, settings.streams + 1, dtype=np.float64) ** -settings.skew
    shares *= settings.bytes_per_s / shares.sum()
    return shares


def uploads(settings: Workload) -> Iterator[tuple[int, EntryTable]]:
    """Yield the second of each upload and the entries of its object."""
    each_s = min(settings.upload_every_s, max(1, settings.upload_bytes // settings.bytes_per_s))
    per_second = rates(settings) / settings.record_bytes
    written = np.zeros(settings.streams, dtype=np.int64)
    for at_s in range(each_s, settings.hours * 3600 + 1, each_s):
        until = np.floor(per_second * at_s).astype(np.int64)
        if (until > written).any():
            yield at_s, _entries(written, until, settings)
        written = until


def compact(world: World, config: CompactionConfig) -> None:
    """Do a cycle as the product's compactor does."""
    world.costs.calls += 1
    selection = select_set_objects(world.listing(), config.group_limits, world.now_ms)
    rules = WriteRules(
        put_bytes=config.put_bytes, part_bytes=config.part_size, read_bytes=config.read_bytes
    )
    for group in selection.groups:
        sources = [world.set_objects[each] for each in group.object_ids]
        for source in sources:
            world.read_index(source)
        live = EntryTable.concatenate([source.entries for source in sources])
        limits = CompactionLimits(
            memory_budget=config.block_bytes(len(live)),
            split_size=group.split_size,
            max_streams=config.max_streams,
            max_stream_objects=config.max_stream_objects,
        )
        world.costs.calls += 1  # for the streams' starts
        if group.kind is GroupKind.SPLIT:
            plan = plan_force_split(live, limits)
        else:
            plan = plan_compaction(live, limits, sharing_only=False)
        for commit in plan.commits:
            world.costs.calls += 2  # to prepare ids, and to commit
            world.replace(commit, rules)


def compact_as_automq(world: World, limits: CompactionLimits) -> None:
    """Do a cycle as AutoMQ does, which reads every index anew and prepares ids one by one."""
    world.costs.calls += 2
    for source in world.set_objects.values():
        is_found_at_once = source.index_size <= source.size - tail_guess(source.size, "").start
        world.read_index(source, gets=1 if is_found_at_once else 2)
    newest = sorted(world.set_objects.values(), key=lambda each: -each.data_time_ms)
    old = [each for each in newest if world.now_ms - each.data_time_ms >= AUTOMQ_SPLIT_AFTER_MS]
    young = newest[: len(newest) - len(old)][:AUTOMQ_OBJECTS]
    plans = [
        *(plan_force_split(each.entries, replace(limits, split_size=0)) for each in old),
        plan_compaction(EntryTable.concatenate([each.entries for each in young]), limits),
    ]
    for plan in plans:
        for commit in plan.commits:
            made = sum(len(iteration.outputs) for iteration in commit.iterations)
            world.costs.calls += 1 + made
            world.replace(commit, AUTOMQ_RULES)


def _entries(starts: NDArray[np.int64], ends: NDArray[np.int64], settings: Workload) -> EntryTable:
    """Return the index of an upload with the records `[starts, ends)` of each stream."""
    per_block = max(1, settings.block_bytes // settings.record_bytes)
    streams = np.flatnonzero(ends > starts)
    blocks = -(-(ends - starts)[streams] // per_block)
    stream_id = np.repeat(streams, blocks)
    number = np.arange(len(stream_id)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = starts[stream_id] + number * per_block
    last = np.minimum(first + per_block, ends[stream_id])
    size = (last - first) * (settings.record_bytes + RECORD_HEADER_SIZE) + BLOCK_HEADER_SIZE
    nowhere = np.zeros(len(stream_id), dtype=np.int64)
    return EntryTable(nowhere, stream_id, first, last, last - first, nowhere, size).placed()


def _slow(world: World) -> NDArray[np.bool_]:
    """Mark the slow streams; they come in the order of their rates."""
    return np.arange(world.streams) >= world.streams * (1 - SLOW_SHARE)


def _gets_per_mib(world: World, streams: NDArray[np.bool_]) -> float:
    return float(world.cold_reads()[streams].sum() / world.uploaded[streams].sum() * MIB)


def _day(name: str, world: World, most: int, slow_reads: Sequence[float]) -> Day:
    slow, every = _slow(world), np.ones(world.streams, dtype=np.bool_)
    return Day(
        policy=name,
        costs=world.costs,
        set_objects=len(world.set_objects),
        most_set_objects=most,
        stream_objects=len(world.stream_objects),
        checkpoint_bytes=world.checkpoint_bytes(),
        gets_per_mib=round(_gets_per_mib(world, every), 3),
        slow_gets_per_mib=round(sum(slow_reads) / len(slow_reads), 3),
        worst_slow_gets_per_mib=round(max(slow_reads), 3),
        amplification=round(float(world.rewritten.sum() / world.uploaded.sum()), 2),
        slow_amplification=round(
            float(world.rewritten[slow].sum() / world.uploaded[slow].sum()), 2
        ),
    )


def _outcome(settings: Workload, days: list[Day]) -> Outcome:
    figures: dict[str, float] = {}
    for day in days:
        figures |= {
            f"{day.policy}_store_requests": day.costs.requests,
            f"{day.policy}_objects": day.set_objects + day.stream_objects,
            f"{day.policy}_checkpoint_mb": round(day.checkpoint_bytes / 1e6, 3),
            f"{day.policy}_cold_gets_per_mib": day.gets_per_mib,
            f"{day.policy}_slow_cold_gets_per_mib": day.slow_gets_per_mib,
            f"{day.policy}_write_amplification": day.amplification,
            f"{day.policy}_slow_write_amplification": day.slow_amplification,
        }
    return Outcome(
        benchmark="compaction-workload",
        settings=asdict(settings),
        figures=figures,
        details={"days": [asdict(day) for day in days]},
        tables=(_left_table(settings, days), _cost_table(days)),
    )


def _left_table(settings: Workload, days: list[Day]) -> Table:
    columns = (
        *("policy", "set objects", "most of them", "stream objects", "checkpoint MB"),
        *("cold GETs/MiB", "of slow streams", "at worst", "bytes rewritten", "of slow streams"),
    )
    return Table(
        title=f"{settings.hours} hours of {settings.streams} streams, {settings.bytes_per_s} B/s:"
        " what is left",
        columns=columns,
        rows=tuple(
            (
                *(day.policy, day.set_objects, day.most_set_objects, day.stream_objects),
                *(round(day.checkpoint_bytes / 1e6, 2), day.gets_per_mib, day.slow_gets_per_mib),
                *(day.worst_slow_gets_per_mib, day.amplification, day.slow_amplification),
            )
            for day in days
        ),
    )


def _cost_table(days: list[Day]) -> Table:
    columns = (
        *("policy", "compactions", "GET", "PUT", "uploads in parts", "parts", "objects deleted"),
        *("GiB read", "GiB written", "controller calls"),
    )
    return Table(
        title="What compaction took",
        columns=columns,
        rows=tuple(
            (
                *(day.policy, day.costs.compactions, day.costs.gets, day.costs.puts),
                *(day.costs.multiparts, day.costs.parts, day.costs.deleted),
                *(
                    round(day.costs.bytes_read / 2**30, 2),
                    round(day.costs.bytes_written / 2**30, 2),
                ),
                day.costs.calls,
            )
            for day in days
        ),
    )
