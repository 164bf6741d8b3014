"""Limits of the map: what is counted, what is refused, and that taking away always works."""

from typing import Any

import pytest

from streammeta.controller.config import ControllerConfig
from streammeta.controller.errors import QuotaExceededError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.registries import limits
from streammeta.controller.metadata.tables.values import NodeIdentity, PageRequest
from streammeta.controller.runtime.writer.controller import MetadataController
from tests.kit.memory_log import NODE, MemoryLog, committed, create
from tests.kit.waiting import ManualClock
from tests.metadata.map_pair import Pair
from tests.metadata.rich_history import SEEDS, history, shared_history, width

LIMITS = limits.MetadataLimits(
    streams=4, prepared_objects=4, nodes=2, kv_keys=2, kv_bytes=100, tag_bytes=20
)


class Small:
    """A leader of a map with small limits."""

    def __init__(self) -> None:
        self.controller = MetadataController(ClusterMetadata(), ManualClock(), limits=LIMITS)
        self.log = MemoryLog(self.controller)
        self.controller.bind(self.log)
        self.log.lead()

    async def write(self, request: Any) -> Any:
        return (await committed(self.log, self.controller.write(request))).answer

    async def is_refused(self, request: Any, quota: str, used: int) -> None:
        before = self.log.next_offset
        with pytest.raises(QuotaExceededError) as refused:
            await self.write(request)
        error = refused.value
        assert (error.quota, error.limit, error.used) == (quota, getattr(LIMITS, quota), used)
        assert self.log.next_offset == before


@pytest.fixture
def small() -> Small:
    return Small()


def prepare(request_id: str, count: int) -> r.PrepareObjects:
    return r.PrepareObjects(request_id=request_id, node=NODE, count=count, ttl_ms=60_000)


def put(key: str, size: int) -> r.PutKVs:
    return r.PutKVs(items=(r.KVToPut(key=key, value=bytes(size), overwrite=True),))


def tagged(request_id: str, size: int) -> r.CreateStreams:
    stream = r.NewStream(tags=(("k", "v" * (size - 1)),))
    return r.CreateStreams(request_id=request_id, node=NODE, streams=(stream,))


async def test_streams_are_limited_and_a_repeat_is_answered_as_before(small: Small) -> None:
    await small.write(r.RegisterNode(node=NODE))
    first = await small.write(create("a", 4))
    await small.is_refused(create("b", 1), "streams", 4)
    assert await small.write(create("a", 4)) == first
    delete = r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(0, -1),))
    await small.write(delete)
    await small.write(create("b", 1))


async def test_prepared_objects_are_limited(small: Small) -> None:
    await small.write(r.RegisterNode(node=NODE))
    await small.write(prepare("a", 3))
    await small.is_refused(prepare("b", 2), "prepared_objects", 3)
    await small.write(prepare("b", 1))


async def test_nodes_are_limited_whichever_call_makes_them_known(small: Small) -> None:
    for node_id in (1, 2):
        await small.write(r.RegisterNode(node=NodeIdentity(node_id, 1)))
    await small.is_refused(r.RegisterNode(node=NodeIdentity(3, 1)), "nodes", 2)
    await small.is_refused(r.GetOpeningStreams(node=NodeIdentity(3, 1)), "nodes", 2)
    await small.write(r.RegisterNode(node=NodeIdentity(2, 9)))
    await small.write(r.UnregisterNode(node=NodeIdentity(1, 1)))
    await small.write(r.RegisterNode(node=NodeIdentity(3, 1)))


async def test_keys_and_their_bytes_are_limited_and_may_shrink(small: Small) -> None:
    await small.write(put("a", 60))
    await small.is_refused(put("b", 60), "kv_bytes", 61)
    await small.is_refused(put("a", 100), "kv_bytes", 61)
    await small.write(put("a", 50))
    await small.write(put("b", 10))
    await small.is_refused(put("c", 1), "kv_keys", 2)
    await small.write(r.DeleteKVs(keys=(r.KVKey(key="a"),)))
    await small.write(put("c", 80))


async def test_tags_are_limited(small: Small) -> None:
    await small.write(r.RegisterNode(node=NODE))
    await small.write(tagged("a", 15))
    await small.is_refused(tagged("b", 10), "tag_bytes", 15)
    opened = r.StreamToOpen(0, 1, tags=(("k", "v" * 9),))
    await small.is_refused(r.OpenStreams(node=NODE, streams=(opened,)), "tag_bytes", 15)
    await small.write(tagged("b", 5))


async def test_what_is_above_a_lowered_limit_may_still_be_taken_away(small: Small) -> None:
    await small.write(put("a", 60))
    small.controller._limits = limits.MetadataLimits(kv_bytes=10)
    await small.write(put("a", 40))
    with pytest.raises(QuotaExceededError):
        await small.write(put("a", 41))


def counted(cluster_metadata: ClusterMetadata) -> dict[str, int]:
    """Count what is limited by looking at all of it."""
    streams: Any = cluster_metadata.query(r.DescribeStreams(page=PageRequest(10_000)))
    pairs = [pair for stream in streams.streams for tag in stream.tags for pair in tag]
    sections = cluster_metadata.freeze().sections()
    values = list(sections["kvs"].values())
    rows = list(zip(*values[:3], strict=True))
    size = cluster_metadata.size()
    return {
        "streams": size.streams,
        "prepared_objects": size.prepared_objects,
        "nodes": size.nodes,
        "kv_keys": len(rows),
        "kv_bytes": sum(limits.kv_bytes(*row) for row in rows),
        "tag_bytes": sum(map(len, pairs)),
        "producers": width(sections["producers"]) if "producers" in sections else 0,
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_the_counts_are_those_of_the_map_after_any_history_and_load(seed: int) -> None:
    cluster_metadata = shared_history(seed).pair.map
    assert dict(cluster_metadata.used()) == counted(cluster_metadata)
    view = cluster_metadata.freeze()
    loaded = ClusterMetadata.from_sections(view.sections(), view.end_offset)
    assert dict(loaded.used()) == dict(cluster_metadata.used())


def test_the_counts_go_back_when_changes_are_undone() -> None:
    made = history(3)
    cluster_metadata = made.pair.map
    for end in reversed(made.ends):
        cluster_metadata.undo_to(end)
        assert dict(cluster_metadata.used()) == counted(cluster_metadata)


def test_the_limits_and_the_counts_have_the_same_names_and_defaults() -> None:
    assert set(Pair().map.used()) == set(limits.QUOTAS)
    defaults = {name: part.default for name, part in ControllerConfig.__dataclass_fields__.items()}
    assert {quota: defaults[f"max_{quota}"] for quota in limits.QUOTAS} == {
        quota: getattr(limits.MetadataLimits(), quota) for quota in limits.QUOTAS
    }


def test_records_that_add_nothing_limited_are_not_counted() -> None:
    limits.require_room(Pair().map, (object(),), limits.MetadataLimits())
