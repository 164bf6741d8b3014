"""Views of the map: asked by name, applied once, undone until committed, never changed."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammeta.controller import metadata
from streammeta.controller.errors import InvariantError
from streammeta.controller.metadata.api import requests as r
from streammeta.controller.metadata.api.requests import ClaimBucket
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.decisions.maintenance import Claim
from streammeta.controller.metadata.tables.tables import Table, Undo
from streammeta.controller.records.record import BucketClaimed, StreamSetObjectsCommitted
from tests.kit.seeds import seeds
from tests.metadata.small_world import NODE, NOW, World, batch


def test_committed_entries_are_not_undone() -> None:
    world = World()
    end = world.map.applied_end_offset
    world.map.forget_undo(end)
    before = world.map.state_hash()
    with pytest.raises(InvariantError, match="committed"):
        world.map.undo_to(end - 1)
    assert world.map.state_hash() == before


def test_an_entry_is_not_replayed_twice() -> None:
    world = World()
    with pytest.raises(InvariantError, match="below"):
        world.map.apply(0, ())


def test_records_that_do_not_fit_leave_no_trace() -> None:
    world = World()
    before = world.map.state_hash()
    create = r.CreateStreams(request_id="x", node=NODE, streams=(r.NewStream(),))
    offset = world.map.applied_end_offset
    records = world.map.decide(create, NOW, offset).records
    with pytest.raises(InvariantError, match="stream id"):
        world.map.apply(offset, (*records, *records))
    assert world.map.state_hash() == before
    assert world.map.applied_end_offset == offset


@pytest.mark.parametrize("seed", seeds(2, slow=3))
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


_MODULES = sorted(Path(metadata.__path__[0]).rglob("*.py"))
_MANAGERS = ("_streams", "_objects", "_nodes", "_kvs", "_bucket_claim", "_upkeep", "_repeats")


@pytest.mark.parametrize("name", _MANAGERS)
def test_a_manager_shows_no_table(name: str) -> None:
    manager = getattr(ClusterMetadata(), name)
    assert [field for field in vars(manager) if not field.startswith("_")] == []
    assert not hasattr(manager, "__getitem__"), "a column by its name is no named query"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_private_parts_are_reached_through_their_owner_alone(path: Path) -> None:
    # `self._streams` names a manager; `self._streams._table` would reach into it.
    found = [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not _is_own(node.value)
        and not _is_builder(node)
    ]
    assert found == []


def _is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def _is_builder(node: ast.Attribute) -> bool:
    """Return whether `from_sections` fills its map, or a named tuple is asked for its parts."""
    if node.attr in ("_make", "_fields"):
        return True
    return isinstance(node.value, ast.Name) and node.value.id == "cluster_metadata"


def test_what_changes_nothing_is_no_record() -> None:
    world = World()
    request = ClaimBucket(cluster_uuid="a", issued_below=7)
    world.write(request)
    assert world.map.decide(request, 0, world.map.applied_end_offset).records == ()


@pytest.mark.parametrize(("uuid", "bound"), [("", 9), ("b", 9), ("a", 6)])
def test_a_record_that_would_change_the_uuid_or_lower_the_bound_does_not_fit(
    uuid: str, bound: int
) -> None:
    world = World()
    world.write(ClaimBucket(cluster_uuid="a", issued_below=7))
    with pytest.raises(InvariantError, match=r"UUID|bound"):
        world.map.apply(
            world.map.applied_end_offset, [BucketClaimed(cluster_uuid=uuid, issued_below=bound)]
        )
    assert world.map.bucket_claim == Claim("a", 7)


def test_checkpoints_of_versions_without_claims_are_read() -> None:
    sections = dict(World().map.freeze().sections())
    del sections["bucket_claim"]
    assert ClusterMetadata.from_sections(sections, 1).bucket_claim == Claim("", 0)


def test_a_batch_is_one_record_and_every_object_holds_its_own_ranges() -> None:
    world = World()
    request = batch((3, (0, 0, 5), (2, 0, 7)), (1, (1, 0, 9)), (2, (3, 0, 1)))
    decision = world.map.decide(request, NOW, world.map.applied_end_offset)
    assert [type(record) for record in decision.records] == [StreamSetObjectsCommitted]
    answer = world.write(request)
    assert (answer.errors.tolist(), answer.range_errors.tolist()) == ([0] * 3, [0] * 4)
    described: Any = world.map.query(r.DescribeObjects(object_ids=(1, 2, 3)))
    held = [(item.object_id, item.ranges.stream_id.tolist()) for item in described.objects]
    assert held == [(1, [1]), (2, [3]), (3, [0, 2])]
    assert world.ends() == [5, 9, 7, 1]
