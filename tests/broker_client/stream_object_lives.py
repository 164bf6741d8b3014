"""Lives of processes that compact the stream objects of a world, and histories that have many.

A process ends by itself or by the fate of one of its steps. Sizes are small: the rules of parts and
groups are those of the product, a hundred thousand times smaller.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import GroupReport
from streammeta.client.compaction.stream_object_compactor import ALL_AT_ONCE, StreamObjectCompactor
from streammeta.storage.compaction.stream_objects import GroupRules, StreamCompaction
from tests.compaction import compaction_lives as lives
from tests.compaction.compaction_steps import Steps
from tests.compaction.compaction_world import TrueStream, World

NODE, OTHER = 1000, 1001


def small_rules() -> dict[StreamCompaction, GroupRules]:
    """Rules of groups of a few hundred bytes; nothing is left for a later turn."""
    sizes = {
        StreamCompaction.REMOVE_EXPIRED: 1,
        StreamCompaction.MERGE_SMALL: 1_500,
        StreamCompaction.MERGE_LARGE: 20_000,
        StreamCompaction.PRUNE_LINKS: 1,
        StreamCompaction.GATHER_SMALL: 700,
        StreamCompaction.LINK: 20_000,
    }
    soft = StreamCompaction.GATHER_SMALL
    return {
        kind: GroupRules(
            size,
            is_soft=kind is soft,
            absorbed_bytes=8 * size if kind is soft else None,
            linked_bytes=400,
            dirty_bytes=100,
            max_objects=7,
        )
        for kind, size in sizes.items()
    }


TINY = replace(
    lives.TINY,
    min_part_bytes=60,
    copy_part_bytes=400,
    fetched_bytes=300,
    whole_object_bytes=250,
    index_merge_bytes=200,
    group_rules=small_rules(),
)


def compactor(
    world: World, steps: Steps, config: CompactionConfig = TINY, node_id: int = NODE
) -> AbstractContextManager[StreamObjectCompactor]:
    """Yield a compactor whose calls are steps of one process of a node."""
    return lives.stream_compactor(world, node_id, steps, config)


async def compact(
    world: World,
    kinds: Sequence[StreamCompaction] = ALL_AT_ONCE,
    steps: Steps | None = None,
    config: CompactionConfig = TINY,
    node_id: int = NODE,
) -> list[GroupReport] | None:
    """Live a life that compacts all streams of a node; None if it was killed."""
    steps = steps or Steps()
    with compactor(world, steps, config, node_id) as made:

        async def work() -> list[GroupReport]:
            return [report async for report in made.compact_node(kinds)]

        return await steps.live(work())


async def compacted(world: World, *args: Any, **kwargs: Any) -> list[GroupReport]:
    """Compact as `compact`; the process must not be killed."""
    reports = await compact(world, *args, **kwargs)
    assert reports is not None, "the process was killed"
    return reports


def of_parts(**changes: Any) -> CompactionConfig:
    """The usual configuration with something changed."""
    return replace(TINY, **changes)


async def random_world(rng: random.Random, actions: int = 40) -> World:
    """Let two nodes write to a few streams, mostly in objects of their own; trim some."""
    world = World(rng.choice([60, 150]))
    world.tells_facts = rng.random() < 0.7
    await world.register(NODE, OTHER)
    for node_id in (NODE, NODE, NODE, OTHER):
        await world.create(node_id, 1)
    for _ in range(actions):
        await act(world, rng)
    return world


async def act(world: World, rng: random.Random) -> None:
    """Let one thing happen."""
    opened = [one for one in world.live() if one.is_open]
    stream = rng.choice(opened)
    draw = rng.random()
    if draw < 0.8:
        await write(world, rng, stream)
    elif draw < 0.93:
        await world.trim(stream.stream_id, rng.randint(stream.start, stream.end))
    elif draw < 0.97:
        await world.move(stream.stream_id, rng.choice([NODE, OTHER]))
    else:
        await world.lose(stream.stream_id, rng.randint(1, 4))
        await world.move(stream.stream_id, rng.choice([NODE, OTHER]))
        await write(world, rng, stream)  # two losses in a row would be one


async def write(world: World, rng: random.Random, stream: TrueStream) -> None:
    """Append to a stream, nine times of ten in an object of its own."""
    sizes = [(rng.randint(1, 3), rng.randint(0, 90)) for _ in range(rng.choice([1, 2, 3, 9]))]
    apart = [stream.stream_id] if rng.random() < 0.9 else []
    await world.upload(stream.owner, {stream.stream_id: sizes}, apart)


def stored_ranges(world: World, stream_id: int) -> list[tuple[int, int, int]]:
    """Ids and offsets of a stream's stream objects and composites, by start offset."""
    found = []
    for one in world.committed():
        if one.node_id >= 0 or stream_id not in one.ranges.stream_id.tolist():
            continue
        start, end = one.ranges.start_offset.tolist()[0], one.ranges.end_offset.tolist()[0]
        found.append((one.object_id, start, end))
    return sorted(found, key=lambda item: item[1])
