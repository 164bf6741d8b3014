"""Frozen views stay as they were, checkpoints bring every field back."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import EndOffset, Epoch, SnapshotId
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.cluster_map import ClusterMap
from streammeta.controller.metadata.tables import Table, Undo
from streammeta.controller.metadata.values import NodeIdentity, OnConflict
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader, write_checkpoint
from tests.metadata.test_metadata_uploads import NODE, NOW, OTHER, World, stream_objects


def _full_world() -> World:
    """A map with something in every section."""
    world = World(streams=6)
    tagged = r.NewStream((("partition", "1"), ("topic", "t")))
    world.write(r.CreateStreams(request_id="tags", node=NODE, streams=(tagged,)))
    world.commit(0, (0, 0, 10), (1, 0, 20), stream_objects=stream_objects((1, 2, 0, 5)))
    world.commit(2, (0, 10, 20), (3, 9, 20), on_conflict=OnConflict.ACCEPT_VALID, crc32c=7)
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(0, 1), r.StreamToClose(2, 1))))
    world.write(r.OpenStreams(node=OTHER, streams=(r.StreamToOpen(0, 4, (("k", "v"),)),)))
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(2, 1),)))
    world.write(r.RemoveObjects(object_ids=(1,)))
    world.write(r.RegisterNode(node=OTHER, wal_config="w", tags=(("rack", "r"),)))
    world.write(r.PutKVs(items=(r.KVToPut(namespace="n", key="k", value=b"\xff\x00"),)))
    owed = (r.StreamToClose(3, 1, end_offset=5), r.StreamToClose(4, 1, end_offset=6))
    world.write(r.CloseStreams(node=NODE, streams=owed))
    world.write(r.AbandonUploads(node_id=NODE.node_id, stream_ids=(4,)))
    world.write(r.RegisterNode(node=NodeIdentity(1_000, 1)))
    world.write(r.UnregisterNode(node=NodeIdentity(1_000, 1)))
    world.write(r.SetNodeLock(node_id=OTHER.node_id, locked=True))
    world.write(r.HoldDeletions(hold_ms=1_000))
    world.write(r.ClaimBucket(cluster_uuid="u-1", issued_below=1_000))
    world.map.forget_undo(world.map.applied_end_offset)
    return world


def _plain(sections: Any) -> dict[str, dict[str, list[Any]]]:
    return {
        name: {
            column: list(np.asarray(v).tolist()) if isinstance(v, np.ndarray) else list(v)
            for column, v in section.items()
        }
        for name, section in sections.items()
    }


def test_every_section_comes_back_through_a_checkpoint() -> None:
    world = _full_world()
    frozen = world.map.freeze()
    sections = _plain(frozen.sections())
    assert all(len(next(iter(columns.values()))) for columns in sections.values() if columns)
    sink = io.BytesIO()
    write_checkpoint(
        sink, SnapshotId(EndOffset(frozen.end_offset), Epoch(1)), "c", frozen.sections()
    )
    reader = CheckpointReader(sink)
    restored = ClusterMap.from_sections(reader.sections(), reader.id.end_offset)
    assert restored.applied_end_offset == world.map.applied_end_offset
    assert restored.state_hash() == world.map.state_hash()
    assert _plain(restored.freeze().sections()) == sections


def test_a_view_does_not_see_later_writes() -> None:
    world = _full_world()
    frozen = world.map.freeze()
    before = frozen.digest()
    world.commit(5, (0, 20, 25), (1, 20, 30), node=NODE, on_conflict=OnConflict.ACCEPT_VALID)
    world.write(r.CreateStreams(request_id="more", node=NODE, streams=(r.NewStream(),) * 3_000))
    world.write(r.CloseStreams(node=NODE, streams=(r.StreamToClose(1, 1),)))
    world.write(r.DeleteStreams(node=NODE, streams=(r.StreamToDelete(1, 1),)))
    assert frozen.digest() == before
    world.map.undo_to(frozen.end_offset)
    assert world.map.state_hash() == before


def test_a_view_of_what_is_undone_later_stays_as_it_was() -> None:
    world = _full_world()
    end, before = world.map.applied_end_offset, world.map.state_hash()
    world.map.forget_undo(end)
    world.commit(5, (1, 20, 30))
    frozen, uncommitted = world.map.freeze(), world.map.state_hash()
    world.map.undo_to(end)
    assert world.map.state_hash() == before
    assert frozen.digest() == uncommitted != before


def test_committed_entries_are_not_undone() -> None:
    world = _full_world()
    end = world.map.applied_end_offset
    before = world.map.state_hash()
    with pytest.raises(InvariantError, match="is committed"):
        world.map.undo_to(end - 1)
    assert world.map.state_hash() == before


def test_an_entry_is_not_replayed_twice() -> None:
    world = _full_world()
    with pytest.raises(InvariantError, match="holds everything below"):
        world.map.apply(0, ())


def test_records_that_do_not_fit_leave_no_trace() -> None:
    world = World()
    before = world.map.state_hash()
    create = r.CreateStreams(request_id="x", node=NODE, streams=(r.NewStream(),))
    offset = world.map.applied_end_offset
    records = world.map.decide(create, NOW, offset).records
    with pytest.raises(InvariantError, match="next stream id"):
        world.map.apply(offset, (*records, *records))
    assert world.map.state_hash() == before
    assert world.map.applied_end_offset == offset


@pytest.mark.parametrize("seed", range(5))
def test_table_views_and_undo_over_random_writes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = Table({"a": np.int64, "b": np.int8})
    undo = Undo()
    table.append(9_000, undo)
    table.write("a", slice(0, 9_000), np.arange(9_000))
    undo.clear()
    start = table["a"].copy()
    views = []
    changes: list[Callable[[], None]] = [
        lambda: table.put("a", int(rng.integers(len(table))), 5, undo),
        lambda: table.put("a", np.unique(rng.integers(0, len(table), 50)), 6, undo),
        lambda: table.put("b", slice(10, 5_000), 1, undo),
        lambda: table.append(int(rng.integers(1, 4_000)), undo) and None,
        lambda: views.append((table.view(), table["a"].copy(), table["b"].copy())),
    ]
    for _ in range(60):
        changes[int(rng.integers(len(changes)))]()
    for action in reversed(undo):
        action()
    assert np.array_equal(table["a"], start), f"seed {seed}"
    assert not table["b"].any(), f"seed {seed}"
    for view, a, b in views:
        assert np.array_equal(view.column("a"), a), f"seed {seed}"
        assert np.array_equal(view.column("b"), b), f"seed {seed}"
