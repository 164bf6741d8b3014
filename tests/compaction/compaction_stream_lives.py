"""Lives of processes that compact stream objects of a world, with bounds for tiny objects."""

from __future__ import annotations

from dataclasses import dataclass

from streammeta.client.compaction.config import CompactionConfig
from streammeta.client.compaction.report import GroupReport
from streammeta.client.compaction.stream_object_compactor import StreamObjectCompactor
from streammeta.storage.compaction.copy_plan import CopyRules
from streammeta.storage.compaction.stream_objects import GroupRules, StreamCompaction
from tests.compaction.compaction_lives import identity
from tests.compaction.compaction_map import NAMESPACE
from tests.compaction.compaction_steps import SteppedStore, Steps
from tests.compaction.compaction_world import World

GATHERED_BYTES = 600


@dataclass(frozen=True, slots=True)
class TinyStreamConfig(CompactionConfig):
    """Objects of a few hundred bytes are copied in parts by the store."""

    @property
    def copy_rules(self) -> CopyRules:
        """Parts of tens of bytes."""
        return CopyRules(min_part_bytes=80, max_part_bytes=1_000, fetched_bytes=300)


TINY_STREAMS = TinyStreamConfig(
    whole_object_bytes=150,
    store_patience_s=0.0,
    group_rules={
        StreamCompaction.REMOVE_EXPIRED: GroupRules(1),
        StreamCompaction.MERGE_SMALL: GroupRules(2_000),
        StreamCompaction.MERGE_LARGE: GroupRules(20_000),
        StreamCompaction.PRUNE_LINKS: GroupRules(20_000, dirty_bytes=50),
        StreamCompaction.GATHER_SMALL: GroupRules(
            GATHERED_BYTES, is_soft=True, absorbed_bytes=4 * GATHERED_BYTES
        ),
        StreamCompaction.LINK: GroupRules(20_000, linked_bytes=GATHERED_BYTES // 2),
    },
)


async def compact_stream(
    world: World,
    stream_id: int,
    kind: StreamCompaction,
    steps: Steps | None = None,
    config: CompactionConfig = TINY_STREAMS,
) -> GroupReport | None:
    """Live a life that compacts the objects of one stream, in its owner's name."""
    steps = steps or Steps()
    owner = world.streams[stream_id].owner
    made = StreamObjectCompactor(
        world.map.client(steps),
        identity(world, owner),
        NAMESPACE,
        SteppedStore(world.store, steps),
        config,
    )
    try:
        return await steps.live(made.compact(stream_id, kind))
    finally:
        made.close()
