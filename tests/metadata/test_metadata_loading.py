"""A map read from a checkpoint file is the map that was written, indexes and counts included.

Tables are tiny here, so that small maps are read as large ones are: into columns that tables take
as their own, with rules checked in windows of a few rows.
"""

import io
import itertools
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from streammeta.controller.errors import DamagedMetadataError
from streammeta.controller.ids import SnapshotId
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables import tables
from streammeta.controller.metadata.tables.stream_index import StreamIndex
from streammeta.controller.metadata.tables.tables import Table, roomy_zeros
from streammeta.controller.metadata.tables.values import NodeIdentity, ObjectState
from streammeta.controller.runtime.persistence.metadata_checkpoint import read_metadata
from streammeta.controller.snapshot.checkpoint_file import CheckpointError, CheckpointReader
from tests.kit.seeds import seeds
from tests.metadata.map_pair import Pair
from tests.metadata.random_requests import RandomRequests
from tests.metadata.rich_history import checkpoint
from tests.metadata.small_tables import small_tables

STEPS = 60


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with small_tables(), patch.object(tables, "RESERVE_ABOVE", 0):
        yield


def _random_pair(rng: Random, steps: int = STEPS) -> Pair:
    requests, pair = RandomRequests(rng), Pair()
    pair.begin(requests)
    _go_on(pair, requests, rng, steps)
    return pair


def _go_on(pair: Pair, requests: RandomRequests, rng: Random, steps: int) -> None:
    for _ in range(steps):
        pair.now += rng.choice((1, 1, 50, 400))
        pair.write(requests.any(pair.model))


def _written(cluster_metadata: ClusterMetadata) -> tuple[SnapshotId, bytes]:
    snapshot_id, file = checkpoint(cluster_metadata.freeze())
    return snapshot_id, file.getvalue()


def _derived(cluster_metadata: Any) -> dict[str, Any]:
    """Return what a map derives from its sections, in terms of what they hold."""
    streams, objects = cluster_metadata._streams, cluster_metadata._objects
    ranges, past = objects._ranges, streams._past
    lists, ended = {}, {}
    for stream_id in range(len(streams)):
        rows = ranges.rows_of_stream(stream_id)
        listed = (ranges.object_ids(rows), *ranges.columns(rows))
        lists[stream_id] = [values.tolist() for values in listed]
        chain = past.chain(int(streams._table["past_head"][stream_id]))
        ended[stream_id] = [
            (past.cell("range_index", row), past.cell("epoch", row)) for row in chain
        ]
    directory = [pair for part in objects._directory.from_id(0) for pair in zip(*part, strict=True)]
    named = {int(object_id): int(objects._table["object_id"][row]) for object_id, row in directory}
    return {
        "lists": lists,
        "ended": ended,
        "directory": named,
        "next": objects._directory.next_id,
        "states": (objects._counts._of_state, objects._counts.committed_bytes),
        "of nodes": {node: count for node, count in objects._set_objects._counts.items() if count},
        "spans": objects._set_objects._spans,
        "links": {key: ids.tolist() for key, ids in objects._links._linked.items()},
        "due": (objects._deadlines.before(2**62, 10**6), objects._destroyed.before(2**62, 10**6)),
        "swept": objects._swept,
        "live": streams._live,
        "open": {node: count for node, count in streams._open_counts._counts.items() if count},
    }


@pytest.mark.parametrize("seed", seeds(2, slow=3))
def test_a_loaded_map_is_the_frozen_one_and_goes_on_as_it(seed: int) -> None:
    rng = Random(seed)
    pair = _random_pair(rng)
    for _ in range(3):
        pair.commit(len(pair.uncommitted))
        snapshot_id, data = _written(pair.map)
        loaded = read_metadata(io.BytesIO(data), snapshot_id).cluster_metadata
        assert _derived(loaded) == _derived(pair.map)
        assert loaded.state_hash() == pair.map.state_hash()
        pair.map = loaded
        _go_on(pair, RandomRequests(rng), rng, STEPS // 3)
        pair.check()


def test_no_two_columns_of_a_loaded_map_share_memory() -> None:
    """Columns of one section may take the place of equal ones of another while they are read."""
    alike = Pair()  # every stream has one range, and most of its cells are the stream's
    node = NodeIdentity(7, 1)
    alike.write(r.RegisterNode(node=node))
    alike.write(r.CreateStreams(request_id="r", node=node, streams=(r.NewStream(),) * 50))
    alike.write(r.OpenStreams(node=node, streams=tuple(r.StreamToOpen(n, 1) for n in range(50))))
    for pair in (alike, *(_random_pair(Random(seed)) for seed in range(2))):
        snapshot_id, data = _written(pair.map)
        loaded: Any = read_metadata(io.BytesIO(data), snapshot_id).cluster_metadata
        parts = (loaded._streams, loaded._streams._past, loaded._objects, loaded._objects._ranges)
        columns = [array for part in parts for array in part._table._arrays.values()]
        assert len(columns) > 20
        for column, other in itertools.combinations(columns, 2):
            assert not np.shares_memory(column, other)
        assert loaded.state_hash() == pair.map.state_hash()


def test_a_damaged_byte_in_any_section_is_refused() -> None:
    snapshot_id, data = _written(_random_pair(Random(1)).map)
    entries = CheckpointReader(io.BytesIO(data)).entries
    read_metadata(io.BytesIO(data), snapshot_id)
    for entry in entries.values():
        if entry.name == "voters":
            continue  # the journal's check reads it
        for at in range(entry.position, entry.position + entry.length, 251):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(CheckpointError, match=f"section '{entry.name}'"):
                read_metadata(io.BytesIO(bytes(damaged)), snapshot_id)


def test_a_row_is_told_by_its_number_whichever_window_it_is_in() -> None:
    cluster_metadata = _random_pair(Random(2)).map
    sections = {
        name: dict(columns) for name, columns in cluster_metadata.freeze().sections().items()
    }
    sizes = sections["objects"]["object_size"]
    assert len(sizes) > 10
    for row in range(len(sizes)):
        broken = sizes.copy()  # type: ignore[union-attr]
        broken[row] = -5
        changed = {**sections, "objects": {**sections["objects"], "object_size": broken}}
        with pytest.raises(DamagedMetadataError, match="got -5") as caught:
            ClusterMetadata.from_sections(changed, cluster_metadata.applied_end_offset)
        assert (caught.value.row, caught.value.field) == (row, "object_size")


def test_a_table_takes_roomy_columns_as_they_are_and_copies_others() -> None:
    table = Table({"a": np.int64, "b": np.int32, "c": np.int64})
    a, b, c = roomy_zeros(20, np.int64), roomy_zeros(20, np.int64), np.arange(20)
    a[:], b[:] = 1, 2
    table.load({"a": a, "b": b, "c": c})
    assert np.shares_memory(table["a"], a)
    assert not np.shares_memory(table["c"], c)
    table.extend(30)
    assert np.shares_memory(table["a"], a)
    assert [table[name].tolist() for name in "abc"] == [
        [*values, *[0] * 30] for values in ([1] * 20, [2] * 20, list(range(20)))
    ]


@pytest.mark.parametrize("seed", seeds(6, slow=14))
def test_loaded_lists_are_those_that_were_appended(seed: int) -> None:
    dice = np.random.default_rng(seed)
    streams = np.sort(dice.integers(0, 30, size=dice.integers(0, 90)))
    rows = dice.permutation(len(streams))
    index = StreamIndex()
    index.load(len(streams), lambda part: (streams[part].astype(np.int32), rows[part]))
    for stream_id in range(31):
        assert index.rows(stream_id).tolist() == rows[streams == stream_id].tolist()


@pytest.mark.parametrize("seed", seeds(2, slow=3))
def test_the_ranges_of_all_streams_are_counted(seed: int) -> None:
    cluster_metadata: Any = _random_pair(Random(seed)).map
    ranges = cluster_metadata._objects._ranges
    counts = cluster_metadata.ranges_of_streams().tolist()
    listed = [len(ranges.rows_of_stream(id_)) for id_ in range(len(cluster_metadata._streams))]
    covered = min(len(counts), len(listed))
    assert sum(listed) > 0, "the history commits"
    assert counts[:covered] == listed[:covered]
    assert not any(counts[covered:] + listed[covered:])


@pytest.mark.parametrize("seed", seeds(2, start=1))
@pytest.mark.parametrize("at_once", [1, 7, 1_000])
def test_sizes_by_owner_are_those_of_all_committed_objects(seed: int, at_once: int) -> None:
    cluster_metadata: Any = _random_pair(Random(seed)).map
    objects = cluster_metadata._objects
    pieces = list(cluster_metadata.owned_sizes(at_once))
    streams, nodes, sizes = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    assert sizes.sum() == cluster_metadata.size().committed_bytes > 0
    assert len(nodes) == cluster_metadata.size().committed_objects
    assert np.count_nonzero(nodes >= 0) == cluster_metadata.size().stream_set_objects
    held = {
        stream_id: [
            int(objects._table["object_size"][row])
            for row in objects.rows(objects.stream_objects(stream_id)[0])
            if objects._table["state"][row] == ObjectState.COMMITTED
        ]
        for stream_id in range(len(cluster_metadata._streams))
    }
    assert any(held.values()), "some streams have objects of their own"
    found = {stream_id: sizes[streams == stream_id].tolist() for stream_id in held}
    assert {stream_id: sorted(found[stream_id]) for stream_id in held} == {
        stream_id: sorted(held[stream_id]) for stream_id in held
    }
