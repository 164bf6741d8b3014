"""Lives of compacting processes: each ends by itself, or by the fate of one of its steps.

What a process holds in memory is gone with it; the next one starts from the map and the bucket.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from streammeta.client import model
from streammeta.client.compaction.config import CompactionConfig, CompactionTarget
from streammeta.client.compaction.report import CompactionReport, GroupReport
from streammeta.client.compaction.sso_compactor import SetObjectCompactor
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.storage.compaction.copy_plan import CopyRules
from streammeta.storage.compaction.selection import SelectionConfig
from streammeta.storage.compaction.stream_objects import StreamCompaction, rules_for
from tests.compaction.compaction_steps import Steps, stepped
from tests.compaction.compaction_world import NAMESPACE, World

NODE, OTHER = 1000, 1001

EAGER = SelectionConfig(growth=1, split_size=400)
"""Compacts whatever there is more than one of; small streams stay together."""

PART_BYTES = 700
"""Stores take larger parts only; `small_parts` lets the one in memory take these."""


@dataclass(frozen=True, slots=True)
class TinyConfig(CompactionConfig):
    """Bounds for objects of a few hundred bytes; `memory_budget` is that of the blocks alone."""

    min_part_bytes: int = 60

    def __post_init__(self) -> None:
        """Refuse nothing."""

    @property
    def part_size(self) -> int:
        return self.part_bytes

    @property
    def max_entries(self) -> int:
        return 1_000_000

    @property
    def index_cache_bytes(self) -> int:
        return 10_000

    @property
    def copy_rules(self) -> CopyRules:
        return CopyRules(self.min_part_bytes, self.copy_part_bytes, self.fetched_bytes)

    def buffer_bytes(self, entries: int) -> int:
        return self.memory_budget


TINY = TinyConfig(
    memory_budget=4_000,
    read_bytes=600,
    part_bytes=PART_BYTES,
    put_bytes=PART_BYTES,
    store_patience_s=0.0,
    commit_deadline_s=0.3,
    selection=EAGER,
    copy_part_bytes=400,
    fetched_bytes=300,
    whole_object_bytes=250,
    index_merge_bytes=200,
    group_rules={
        kind: replace(rules_for(kind, size), linked_bytes=300, dirty_bytes=100, max_objects=7)
        for kind, size in {
            StreamCompaction.REMOVE_EXPIRED: 1,
            StreamCompaction.MERGE_SMALL: 1_500,
            StreamCompaction.MERGE_LARGE: 20_000,
            StreamCompaction.PRUNE_LINKS: 1,
            StreamCompaction.GATHER_SMALL: 700,
            StreamCompaction.LINK: 20_000,
        }.items()
    },
)


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammeta.storage.object_store.protocol.base.MIN_PART_SIZE", 1)


def identity(world: World, node_id: int) -> model.NodeIdentity:
    """The newest process of a node."""
    node = world.nodes[node_id]
    return model.NodeIdentity(node.node_id, node.node_epoch)


def target(world: World, node_id: int, *, gone: bool = False) -> CompactionTarget:
    return CompactionTarget(node_id, world.nodes[node_id].node_epoch, failover=gone)


def compactor(
    world: World, node_id: int, steps: Steps, config: CompactionConfig = TINY
) -> contextlib.closing[SetObjectCompactor]:
    """Return a compactor whose calls are steps of one process of a node."""
    return contextlib.closing(
        SetObjectCompactor(
            world.map.client(steps),
            identity(world, node_id),
            NAMESPACE,
            stepped(world.store, steps.made),
            config,
            now_ms=world.clock.wall_ms,
        )
    )


async def compact(
    world: World,
    node_id: int,
    steps: Steps | None = None,
    config: CompactionConfig = TINY,
    *,
    force_split: bool = False,
    by: int | None = None,
) -> CompactionReport | None:
    """Live a life that compacts a node's set objects once; None if it was killed.

    `by` is another node, which does it for one that is gone.
    """
    steps = steps or Steps()
    with compactor(world, node_id if by is None else by, steps, config) as made:
        whose = target(world, node_id, gone=by is not None)
        return await steps.live(made.run_once(whose, force_split=force_split))


async def compacted(world: World, node_id: int, *args: Any, **kwargs: Any) -> CompactionReport:
    """Compact as `compact`; the process must not be killed."""
    report = await compact(world, node_id, *args, **kwargs)
    assert report is not None, "the process was killed"
    return report


def stream_compactor(
    world: World, steps: Steps, config: CompactionConfig = TINY, node_id: int = NODE
) -> contextlib.closing[StreamObjectCompactor]:
    """Return a compactor of stream objects whose calls are steps of one process of a node."""
    return contextlib.closing(
        StreamObjectCompactor(
            world.map.client(steps),
            identity(world, node_id),
            NAMESPACE,
            stepped(world.store, steps.made),
            config,
            is_busy=lambda: False,
        )
    )


async def compact_stream(
    world: World, stream_id: int, kind: StreamCompaction, steps: Steps | None = None
) -> GroupReport | None:
    """Live a life that compacts the objects of one stream, in its owner's name."""
    steps = steps or Steps()
    with stream_compactor(world, steps, node_id=world.streams[stream_id].owner) as made:
        return await steps.live(made.compact(stream_id, kind))


async def compact_streams(
    world: World,
    kinds: Sequence[StreamCompaction],
    steps: Steps | None = None,
    config: CompactionConfig = TINY,
    node_id: int = NODE,
) -> list[GroupReport] | None:
    """Live a life that compacts all streams of a node; None if it was killed."""
    steps = steps or Steps()
    with stream_compactor(world, steps, config, node_id) as made:

        async def work() -> list[GroupReport]:
            return [report async for report in made.compact_node(kinds)]

        return await steps.live(work())


async def compacted_streams(world: World, *args: Any, **kwargs: Any) -> list[GroupReport]:
    """Compact as `compact_streams`; the process must not be killed."""
    reports = await compact_streams(world, *args, **kwargs)
    assert reports is not None, "the process was killed"
    return reports


async def steps_of(world: World, **options: Any) -> list[str]:
    """Return the steps of an undisturbed compaction of the first node's set objects."""
    steps = Steps()
    await compact(world, NODE, steps, **options)
    return steps.names


def drawn(rng: random.Random) -> CompactionConfig:
    """Some configuration, also with limits so low that not everything can be compacted."""
    return replace(
        TINY,
        memory_budget=rng.choice([400, 1_500, 50_000]),
        overlap=rng.random() < 0.5,
        read_bytes=rng.choice([50, 600, 10_000]),
        part_bytes=rng.choice([60, PART_BYTES, 10_000]),
        put_bytes=rng.choice([0, PART_BYTES, 10_000]),
        max_streams=rng.choice([1, 3, 15_000]),
        max_stream_objects=rng.choice([1, 4, 5_000]),
        selection=replace(
            EAGER,
            growth=rng.choice([1, 2]),
            split_size=rng.choice([0, 100, 400, 10_000]),
            max_group_objects=rng.choice([2, 500]),
        ),
    )
