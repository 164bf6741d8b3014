"""Costs and benefits of compaction for a busy node in a day, on a virtual clock.

A thousand streams of very different rates share a node that uploads like a broker. The same day
passes three times: without compaction, with the product's policy, planner and limits, and with
AutoMQ's defaults: every five minutes it merges all SSOs younger than two hours, and splits older
ones, object by object. Only bytes are left out: every plan is made, and metadata decides every
commit.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scripts.benchmarks.compaction_world import MIB, World, WriteRules
from scripts.benchmarks.figures import Outcome, Progress, Table
from scripts.benchmarks.metadata_driver import NOW_MS
from streammeta.client.compaction.config import CompactionConfig
from streammeta.storage.compaction.entries import EntryTable
from streammeta.storage.compaction.plan import CompactionLimits
from streammeta.storage.compaction.planner import plan_compaction, plan_force_split
from streammeta.storage.compaction.selection import GroupKind, select_stream_set_objects
from streammeta.storage.object_format.object_reader import tail_guess
from streammeta.storage.object_format.record import BLOCK_HEADER_SIZE, RECORD_HEADER_SIZE

AUTOMQ_RULES = WriteRules(part_bytes=48 * MIB, index_part=True)
"""AutoMQ gathers pieces of 16 MiB until a part exceeds 32 MiB. Each part counts as 48 MiB."""
AUTOMQ_OBJECTS = 500
AUTOMQ_SPLIT_AFTER_MS = 120 * 60_000
SLOW_SHARE = 0.5
"""Share of the streams, by rate, that are called slow."""
SETTLED_HOURS = 6
"""Hours until every stream has enough data for requests per MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Load of a busy node: sizes in bytes of payload, rates per second."""

    streams: int = 1_000
    bytes_per_s: int = MIB
    skew: float = 1.0
    """The rate of the stream of rank r is proportional to 1 / r ** skew."""
    hours: int = 26
    record_bytes: int = 1_024
    upload_bytes: int = 16 * MIB
    upload_every_s: int = 60
    """An upload comes when there are `upload_bytes`, or after this time."""
    block_bytes: int = 512 * 1024
    compact_every_s: int = 300
    memory_mib: int = 200


Day: TypeAlias = Mapping[str, Any]
"""Figures of a day's end. GETs are from a cold reader of every whole stream, for slow streams
also as the mean and the worst of every hour from `SETTLED_HOURS` on. Amplification is the number of
bytes that compaction wrote for each byte uploaded."""

Compact = Callable[[World], None]


def measure(settings: Workload, progress: Progress, stop: threading.Event | None = None) -> Outcome:
    """Let the day pass with every policy. Raises `InterruptedError` soon after `stop` is set."""

    def show(text: str) -> None:
        if stop is not None and stop.is_set():
            raise InterruptedError("the measurement was cancelled")
        progress(text)

    memory = settings.memory_mib * MIB
    config, limits = CompactionConfig(memory_budget=memory), CompactionLimits(memory_budget=memory)
    policies: dict[str, Compact] = {
        "none": lambda _world: None,
        "automq": lambda world: compact_as_automq(world, limits),
        "streammeta": lambda world: compact(world, config),
    }
    days = [live(settings, name, policy, show) for name, policy in policies.items()]
    return _outcome(settings, days)


def live(settings: Workload, name: str, policy: Compact, progress: Progress) -> Day:
    """Let the hours pass with uploads, and with a compaction at fixed intervals."""
    world = World(settings.streams)
    next_compaction_s, hour, most = settings.compact_every_s, 0, 0
    slow_reads: list[float] = []
    for at_s, entries in uploads(settings):
        # Compactions that are due before this upload come first.
        while next_compaction_s <= at_s:
            world.now_ms = NOW_MS + next_compaction_s * 1000
            policy(world)
            most = max(most, len(world.set_objects))
            next_compaction_s += settings.compact_every_s

        if at_s >= hour * 3600:
            progress(f"compaction: hour {hour} of {settings.hours}, {name}")
            # Early hours have too little data of slow streams.
            if hour >= SETTLED_HOURS:
                slow_reads.append(_gets_per_mib(world, _slow(world)))
            hour += 1
        world.now_ms = NOW_MS + at_s * 1000
        world.upload(entries)
    return _day(name, world, most, slow_reads or [_gets_per_mib(world, _slow(world))])


def rates(settings: Workload) -> NDArray[np.float64]:
    """Return the bytes a second of each stream, the fastest first."""
    shares = np.arange(1, settings.streams + 1, dtype=np.float64) ** -settings.skew
    shares *= settings.bytes_per_s / shares.sum()
    return shares


def uploads(settings: Workload) -> Iterator[tuple[int, EntryTable]]:
    """Yield the second of each upload and the entries of its object."""
    every_s = min(settings.upload_every_s, max(1, settings.upload_bytes // settings.bytes_per_s))
    per_second = rates(settings) / settings.record_bytes
    written = np.zeros(settings.streams, dtype=np.int64)
    for at_s in range(every_s, settings.hours * 3600 + 1, every_s):
        until = np.floor(per_second * at_s).astype(np.int64)
        if (until > written).any():
            yield at_s, _entries(written, until, settings)
        written = until


def compact(world: World, config: CompactionConfig) -> None:
    """Make a cycle as the product's compactor does."""
    world.costs.calls += 1
    selection = select_stream_set_objects(world.listing(), config.group_limits, world.now_ms)
    rules = WriteRules(
        put_bytes=config.put_bytes, part_bytes=config.part_size, read_bytes=config.read_bytes
    )
    for group in selection.groups:
        sources = [world.set_objects[object_id] for object_id in group.object_ids]
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
    """Make a cycle as AutoMQ does, which reads every index again and prepares ids one by one."""
    world.costs.calls += 2
    for source in world.set_objects.values():
        is_found_at_once = source.index_size <= source.size - tail_guess(source.size, "").start
        world.read_index(source, gets=1 if is_found_at_once else 2)

    newest = sorted(world.set_objects.values(), key=lambda source: -source.data_time_ms)
    old_until_ms = world.now_ms - AUTOMQ_SPLIT_AFTER_MS
    old = [source for source in newest if source.data_time_ms <= old_until_ms]
    young = newest[: len(newest) - len(old)][:AUTOMQ_OBJECTS]
    plans = [
        *(plan_force_split(source.entries, replace(limits, split_size=0)) for source in old),
        plan_compaction(EntryTable.concatenate([source.entries for source in young]), limits),
    ]
    for plan in plans:
        for commit in plan.commits:
            outputs = sum(len(iteration.outputs) for iteration in commit.iterations)
            world.costs.calls += 1 + outputs
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
    unset = np.zeros(len(stream_id), dtype=np.int64)
    return EntryTable(unset, stream_id, first, last, last - first, unset, size).place()


def _slow(world: World) -> NDArray[np.bool_]:
    """Mark the slow streams, which are the last ones."""
    return np.arange(world.streams) >= world.streams * (1 - SLOW_SHARE)


def _gets_per_mib(world: World, streams: NDArray[np.bool_]) -> float:
    return float(world.cold_reads()[streams].sum() / world.uploaded[streams].sum() * MIB)


def _day(name: str, world: World, most: int, slow_reads: Sequence[float]) -> Day:
    slow, every = _slow(world), np.ones(world.streams, dtype=np.bool_)

    def amplification(streams: NDArray[np.bool_]) -> float:
        return round(float(world.rewritten[streams].sum() / world.uploaded[streams].sum()), 2)

    return {
        "policy": name,
        "costs": asdict(world.costs),
        "set_objects": len(world.set_objects),
        "most_set_objects": most,
        "stream_objects": len(world.stream_objects),
        "checkpoint_bytes": world.checkpoint_bytes(),
        "gets_per_mib": round(_gets_per_mib(world, every), 3),
        "slow_gets_per_mib": round(sum(slow_reads) / len(slow_reads), 3),
        "worst_slow_gets_per_mib": round(max(slow_reads), 3),
        "amplification": amplification(every),
        "slow_amplification": amplification(slow),
    }


def _outcome(settings: Workload, days: Sequence[Day]) -> Outcome:
    figures: dict[str, float] = {}
    rows = []
    for day in days:
        costs, megabytes = day["costs"], day["checkpoint_bytes"] / 1e6
        gib = {f"gib_{name}": costs[f"bytes_{name}"] / 2**30 for name in ("read", "written")}
        rows.append({**costs, **day, **gib, "checkpoint_mb": megabytes})
        requests = costs["gets"] + costs["puts"] + costs["parts"] + 2 * costs["multiparts"]
        figures |= {
            f"{day['policy']}_store_requests": requests,
            f"{day['policy']}_objects": day["set_objects"] + day["stream_objects"],
            f"{day['policy']}_checkpoint_mb": round(megabytes, 3),
            f"{day['policy']}_cold_gets_per_mib": day["gets_per_mib"],
            f"{day['policy']}_slow_cold_gets_per_mib": day["slow_gets_per_mib"],
            f"{day['policy']}_write_amplification": day["amplification"],
            f"{day['policy']}_slow_write_amplification": day["slow_amplification"],
        }
    rate = f"{settings.hours} hours of {settings.streams} streams, {settings.bytes_per_s} B/s"
    left = Table.of(
        f"{rate}: objects left",
        rows,
        "policy | SSOs = set_objects | most of them = most_set_objects"
        " | stream objects = stream_objects | checkpoint MB = checkpoint_mb"
        " | cold GETs/MiB = gets_per_mib | of slow streams = slow_gets_per_mib"
        " | at worst = worst_slow_gets_per_mib | bytes rewritten = amplification"
        " | of the slow streams = slow_amplification",
    )
    costs_table = Table.of(
        "Costs of compaction",
        rows,
        "policy | compactions | GET = gets | PUT = puts | uploads in parts = multiparts | parts"
        " | objects deleted = deleted | GiB read = gib_read | GiB written = gib_written"
        " | controller calls = calls",
    )

    return Outcome(
        benchmark="compaction-workload",
        settings=asdict(settings),
        figures=figures,
        details={"days": days},
        tables=[left, costs_table],
    )
