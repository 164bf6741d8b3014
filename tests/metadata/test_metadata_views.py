"""Entries are applied once, and undone until they are committed; views of tables never change."""

from collections.abc import Callable

import numpy as np
import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.metadata import requests as r
from streammeta.controller.metadata.tables import Table, Undo
from tests.metadata.test_metadata_uploads import NODE, NOW, World


def test_committed_entries_are_not_undone() -> None:
    world = World()
    end = world.map.applied_end_offset
    world.map.forget_undo(end)
    before = world.map.state_hash()
    with pytest.raises(InvariantError, match="is committed"):
        world.map.undo_to(end - 1)
    assert world.map.state_hash() == before


def test_an_entry_is_not_replayed_twice() -> None:
    world = World()
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
